//! The file system: every operation commits with self-validating records and one fence.
//!
//! Callers by inode number (the FUSE door, the mediator) use the node operations of [`Fs`]; callers by
//! path and descriptor use [`files`].
//!
//! The map:
//!
//! | file | owns |
//! |---|---|
//! | `format` | every byte on media |
//! | `log` | appending to and reading an inode's log |
//! | `epoch` | which operations are certainly complete |
//! | `alloc`, `index`, `dirindex`, `names`, `table`, `statline` | what is kept in DRAM only |
//! | `inode` | an inode in DRAM, and its replay from the log |
//! | `write`, `read`, `space`, `attr`, `xattr`, `acl` | operations on one inode |
//! | `fixed` | files whose blocks stand still for who maps them |
//! | `sink`, `last_line` | where a write's data go; what appends need not fetch |
//! | `offload` | copies that go on after their operation let go of the inode |
//! | `namei`, `walk` | operations on names, path walks |
//! | `withdraw` | removals where no record finds room |
//! | `departed` | directories that went, and whose logs stay for a while |
//! | `clean` | log cleaning |
//! | `clock` | what time it is |
//! | `quarantine` | blocks that failed |
//! | `check` | is everything as it must be; repair |
//! | `mount` | mkfs, open, close, sync |
//! | `checkpoint`, `recover` | the two ways to open |
//! | `files` | paths and descriptors, above all of these |
//!
//! Lock order: the rename lock, then directories (an ancestor before its descendants), then other
//! inodes, then the table's own inode, then allocator locks. Of two directories neither of which is above the
//! other the lower number goes first, and only under the rename lock.

pub mod acl;
pub mod alloc;
mod attr;
pub mod check;
mod checkpoint;
mod clean;
pub mod clock;
mod departed;
pub mod dirindex;
pub mod dump;
mod epoch;
pub mod files;
mod fixed;
pub mod format;
pub mod index;
mod inode;
#[cfg(all(debug_assertions, not(test)))]
#[doc(hidden)]
pub mod instances;
mod last_line;
mod log;
mod mount;
mod namei;
mod names;
mod offload;
mod quarantine;
mod read;
mod recover;
#[cfg(all(test, shuttle))]
mod schedules;
mod sink;
mod space;
mod statline;
mod table;
pub mod types;
mod walk;
mod withdraw;
mod write;
mod xattr;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::sync::primitive::Mutex;
use crossbeam_utils::CachePadded;

use crate::account::{Ledger, Op, Phase, Times, Watch};
use crate::error::{Error, Result};
use crate::media::{Addr, Domain, Durable, Flushed, Media, Words};
use crate::mover::class::{self, Via};
use crate::mover::manager::Qos;
use crate::mover::profile::Profile;
use crate::mover::{EngineKind, Mover};
use crate::sync::PerThread;
use crate::sync::reclaim::{Pin, pin};
use alloc::{Allocator, Class, Run};
pub(crate) use clock::now;
pub use fixed::{FIXED, FixedPlace, STAMP_BYTES};
use format::{BLOCK, Super, TABLE_BLOCK};
use inode::{Body, Inode};
pub use offload::{
    Lent, LentRoom, ReadStep, ReadTicket, ReadUnderWay, Step, Syncing, Transferring, Tries, WriteStep,
    WriteTicket, WriteUnderWay,
};
pub use types::*;

/// How a data write keeps its promise (design §4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DataMode {
    /// Each write is atomic: new blocks, one commit.
    #[default]
    Cow,
    /// Metadata atomic, data synchronous but torn by a crash.
    InPlace,
}

#[derive(Clone, Debug, Default)]
pub struct MkfsOptions {
    /// At most 63 bytes of UTF-8.
    pub label: String,
    pub data: DataMode,
    /// Make the file system even where one is there already.
    pub force: bool,
    pub root_uid: u32,
    pub root_gid: u32,
    /// Instead of chance: for simulations that replay.
    pub identity: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Nothing may change; the media must be a private mapping (recovery writes to it).
    pub read_only: bool,
    /// No thread ends epochs in the background; [`Fs::tick`] does it. For simulations that replay. To enter an epoch takes a locked
    /// instruction then, and to end one no barrier for all threads of the process.
    pub no_ticker: bool,
    /// Take it that the host lost power since the pool was last used, whatever its boot says: for a copy of
    /// the media that was made while it was in use.
    pub power_lost: bool,
    /// Who copies data, where an open file or a call does not say.
    pub engine: EngineKind,
    /// What is wanted of copies, likewise; none: nothing particular.
    pub class: Option<class::Class>,
    /// How much class bandwidth has to give way to class latency.
    pub qos: Qos,
    /// What engines are worth here. The default is safe where nobody measured (`lode tune`).
    pub profile: Profile,
    /// A write waits for its engine before it writes its record, and keeps the inode meanwhile: the plain way, to
    /// compare with.
    pub ordered: bool,
}

/// Inodes by number and generation whose change time a directory's log alone has, by that directory.
type LeftTimes = std::collections::HashMap<u32, Vec<(u32, u64)>>;

/// What the pool says of itself (`lode info`).
#[derive(Clone, Debug)]
pub struct PoolInfo {
    pub uuid: [u8; 16],
    pub label: String,
    pub format_version: u32,
    pub data: DataMode,
    pub bytes: u64,
    pub mounts: u32,
    /// The last user closed the pool, and the next one scans no logs.
    pub clean: bool,
    /// The last user closed the pool; of a full one the logs are scanned all the same.
    pub closed: bool,
    pub created: Time,
    /// Blocks that failed and are not used again.
    pub bad_blocks: u64,
    /// The first copy of the superblock is damaged; the second was used.
    pub first_copy_damaged: bool,
    pub second_copy_damaged: bool,
}

/// What opening the pool had to do.
#[derive(Clone, Debug, Default)]
pub struct OpenReport {
    /// The last user closed it; nothing was scanned.
    pub was_clean: bool,
    /// The last user closed it, and its checkpoint is damaged: the logs were scanned instead.
    pub checkpoint_damaged: bool,
    pub inodes_scanned: u64,
    /// Interrupted operations voided.
    pub voided: u64,
    /// Inodes no directory names, reclaimed.
    pub orphans: u64,
    /// Inodes with names that cannot be used: their logs are damaged.
    pub damaged: u64,
    /// Operations of epochs up to this one needed no proof.
    pub settled: u64,
    pub seconds: f64,
}

/// An inode held in memory: what a descriptor keeps. Cheap to clone. It does not keep a nameless inode
/// alive; an *open* ([`Fs::open_node`]) does.
pub struct Node {
    inode: Arc<Inode>,
    /// Who copies what is read and written through it, as [`EngineKind::code`]; 0: as the pool was opened.
    engine: AtomicU8,
    /// What is wanted of these copies, as [`class::Class::code`].
    class: AtomicU32,
    /// What is written through it was stored through a mapping before.
    written_back: AtomicBool,
}

impl Clone for Node {
    fn clone(&self) -> Node {
        Node {
            inode: self.inode.clone(),
            engine: AtomicU8::new(self.engine.load(Ordering::Relaxed)),
            class: AtomicU32::new(self.class.load(Ordering::Relaxed)),
            written_back: AtomicBool::new(self.written_back.load(Ordering::Relaxed)),
        }
    }
}

impl Node {
    fn new(inode: Arc<Inode>) -> Node {
        let (engine, class) = (AtomicU8::new(0), AtomicU32::new(0));
        Node { inode, engine, class, written_back: AtomicBool::new(false) }
    }

    /// From now on this engine copies what is read and written through it; none: the one the pool was opened with.
    /// A clone for one call makes it that call's.
    pub fn set_engine(&self, engine: Option<EngineKind>) {
        self.engine.store(engine.map_or(0, EngineKind::code), Ordering::Relaxed);
    }

    /// From now on this is wanted of copies of what is read and written through it; none: as the pool was opened. A
    /// clone for one call makes it that call's.
    pub fn set_class(&self, class: Option<class::Class>) {
        self.class.store(class::Class::code(class), Ordering::Relaxed);
    }

    /// From now on what is written through it was stored through a mapping before, by whoever may: no capability falls, as
    /// none does on Linux. On a full pool it may go to blocks of the reserve, and be cut short. A clone for one call makes it that
    /// call's.
    pub fn set_written_back(&self) {
        self.written_back.store(true, Ordering::Relaxed);
    }

    #[inline]
    fn is_written_back(&self) -> bool {
        self.written_back.load(Ordering::Relaxed)
    }

    #[inline]
    fn engine(&self) -> Via {
        let engine = EngineKind::of_code(self.engine.load(Ordering::Relaxed));
        Via { engine, class: class::Class::of_code(self.class.load(Ordering::Relaxed)) }
    }

    pub fn ino(&self) -> Ino {
        self.inode.ino
    }

    pub fn kind(&self) -> Kind {
        self.inode.kind
    }
}

/// What an operation has found out about room so far.
struct Room {
    releases: u64,
    /// For copies, and for those who copy ahead.
    waited: bool,
    /// How often there was room that syncs had made, its own and those of others.
    tries: u32,
    tries_beside_others: u32,
    /// Inode slots there were.
    slots: u32,
}

/// What all parts of a mounted file system share.
pub struct Core<M: Media> {
    // Before media: engines end first.
    pub(crate) mover: Mover<M>,
    pub(crate) media: quarantine::Watched<M>,
    copies: offload::Copies,
    /// Engines' copies are waited for before their record is written.
    ordered: bool,
    ledger: Ledger,
    pub(crate) alloc: Allocator,
    pub(crate) key_crc: u32,
    sb: Super,
    epochs: epoch::Epochs,
    mount: u32,
    crashed: u32,
    /// The state in which the pool was found.
    found: format::State,
    /// Nothing freed may be reused before its epoch is synced: the domain is `page-cache`.
    deferring: bool,
    /// Data of so many bytes is fenced before its record instead of verified by it.
    two_fence_bytes: usize,
    /// Takes no more changes: closed, read-only, or failed.
    poisoned: AtomicBool,
    /// Writes that have blocks before they have their file.
    ahead: CachePadded<AtomicU64>,
    /// Files that are being fixed: they have blocks before they have their file.
    fixing: AtomicU64,
    /// So many shall not: the pool was full, and each of them needs its blocks at once.
    ahead_pause: AtomicU64,
    /// There was one in this mount.
    ahead_ever: AtomicBool,
    /// A store failed: no epoch is named any more, for the operation left without its fence.
    failed: AtomicBool,
    /// One syncs the media at a time, and nobody behind a sync that failed: the kernel tells one of two that are under way at once. Who
    /// has it waits for nobody else.
    media_sync: Mutex<()>,
    /// Syncs that let something freed be reused. Written by those who hold the lock of syncs.
    releases: AtomicU64,
    read_only: bool,
    generations: Numbers,
    transactions: AtomicU64,
    /// The epoch of the last operation on two directories.
    paired: AtomicU64,
    /// Of an ordinary file: what log cleaning does after the next sync.
    head_moves: Mutex<Vec<clean::HeadMove>>,
}

impl<M: Media> Core<M> {
    #[inline]
    pub(crate) fn crashed_mount(&self) -> u32 {
        self.crashed
    }

    #[inline]
    pub(crate) fn mount(&self) -> u32 {
        self.mount
    }

    /// Whether a record of so many bytes of data verifies them. Write-back reorders more than one record: nothing else would.
    #[inline]
    fn verifies(&self, data_bytes: usize) -> bool {
        self.deferring || data_bytes < self.two_fence_bytes
    }

    /// Whether a range lies where data, logs and slots may be.
    pub(crate) fn holds(&self, at: Addr, len: usize) -> bool {
        holds(&self.sb, at, len)
    }

    #[inline]
    pub(crate) fn holds_blocks(&self, run: Run) -> bool {
        holds_blocks(&self.sb, run)
    }

    /// Frees blocks, but for bad ones: at once, or once `epoch` is synced.
    #[inline]
    pub(crate) fn free(&self, run: Run, epoch: Option<u64>) {
        if self.copies.reads().any()
            && !self.media.omits("what is being read is not reused")
            && self.copies.reads().keep(run, epoch)
        {
            return;
        }
        self.free_unread(run, epoch);
    }

    /// The same for what no read under way is of.
    pub(crate) fn free_unread(&self, run: Run, epoch: Option<u64>) {
        self.media.each_good(run, &mut |run| match epoch {
            None => self.alloc.free(run),
            Some(e) => self.alloc.free_deferred(run, e),
        });
        self.check_freed();
    }

    /// Behind whatever frees: once that was not in use, nothing is changed any more.
    #[inline]
    pub(crate) fn check_freed(&self) {
        if self.alloc.is_wrong() {
            self.stop_changes();
        }
    }

    #[cold]
    fn stop_changes(&self) {
        self.failed.store(true, Ordering::Release);
        if !self.poisoned.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "blocks were given back that were not in use: the pool is damaged, and takes no more changes; close it and run lode fsck --repair"
            );
        }
    }

    /// A run that is freed next is the one that this thread is given next, if it is short: its first pages are looked up, for
    /// which the copy would wait (decision 0093).
    #[inline]
    fn expect_alloc(&self, run: Run) {
        if run.count <= alloc::HOT_RUN_MAX {
            for page in 0..run.count.min(2) {
                self.media.expect_copy(log::block_addr(alloc::Block(run.start.0 + page)));
            }
        }
    }

    /// When blocks freed by an operation of this epoch may be reused.
    #[inline]
    pub(crate) fn reuse_after(&self, guard: &epoch::Guard) -> Option<u64> {
        let waits = self.deferring && !self.media.omits("what is freed waits for a sync");
        waits.then_some(guard.epoch())
    }

    /// A number no other inode of this pool ever had: the mount in the high 24 bits.
    #[inline]
    fn generation(&self) -> u64 {
        let n = self.generations.next();
        assert!(n < 1 << 40, "a trillion inodes were made in one mount");
        (self.mount as u64) << 40 | n
    }

    fn transaction(&self) -> u64 {
        (self.mount as u64) << 40 | self.transactions.fetch_add(1, Ordering::Relaxed)
    }

    #[cold]
    fn poison(&self, why: &Error) {
        self.failed.store(true, Ordering::Release);
        if !self.poisoned.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "a store to the pool failed ({why}); it takes no more changes until it is opened again"
            );
        }
    }

    #[inline]
    fn check_alive(&self) -> Result<()> {
        // As the counts of those who look here in no epoch: either a close sees such a one's, or that one sees the close.
        if self.poisoned.load(Ordering::SeqCst) { Err(self.poison_error()) } else { Ok(()) }
    }

    /// Whether no store failed. After one that did the end of its log is undefined, and an operation that goes on, to clean that
    /// log, say, must append nothing behind it: a part of what failed would become whole.
    #[inline]
    fn check_stored(&self) -> Result<()> {
        if self.failed.load(Ordering::Relaxed) { Err(self.poison_error()) } else { Ok(()) }
    }

    /// Enters an epoch to change something. Looks only then whether it may: who closes the pool waits for
    /// those inside.
    ///
    /// With the lock of each log it will append to: so the epochs of a log's records ascend. Where they did
    /// not, blocks freed in the older epoch would be reused while an earlier record of the newer one is still
    /// verified by what they held, and recovery would cut the log in front of what was synced.
    // Returned through the stack the guard would be stored by words and loaded as one, behind all stores of the operation before.
    #[inline(always)]
    fn enter(&self) -> Result<epoch::Guard<'_>> {
        let guard = self.epochs.enter();
        self.check_alive()?;
        Ok(guard)
    }

    #[cold]
    fn poison_error(&self) -> Error {
        if self.read_only {
            return Error::new(libc::EROFS, "fs::check_alive");
        }
        Error::message(
            libc::EIO,
            "fs::check_alive",
            "the pool takes no changes after a failed store or a close; open it again",
        )
    }

    #[inline]
    #[track_caller]
    fn fence(&self, flushed: Flushed) -> Durable {
        self.media.fence(flushed)
    }
}

#[inline]
fn holds(sb: &Super, at: Addr, len: usize) -> bool {
    let from = TABLE_BLOCK as u64 * BLOCK as u64;
    let to = (sb.blocks - 1) * BLOCK as u64;
    at.0 >= from && at.0 <= to && len as u64 <= to - at.0
}

#[inline]
fn holds_blocks(sb: &Super, run: Run) -> bool {
    let end = run.start.0 as u64 + run.count as u64;
    run.count > 0 && run.start.0 >= TABLE_BLOCK && end < sb.blocks
}

/// Numbers that are given out once; threads take them in lots.
#[derive(Default)]
struct Numbers {
    lots: AtomicU64,
    own: PerThread<std::ops::Range<u64>>,
}

impl Numbers {
    const LOT: u64 = 256;

    #[inline]
    fn next(&self) -> u64 {
        let mut own = self.own.own().write();
        own.next().unwrap_or_else(|| {
            let from = self.lots.fetch_add(1, Ordering::Relaxed) * Numbers::LOT;
            *own = from..from + Numbers::LOT;
            own.next().expect("a lot is not empty")
        })
    }
}

/// A mounted pool. Thread-safe; every operation is durable on return as far as the media's domain
/// goes (`page-cache`: after [`fsync`](Fs::fsync)).
///
/// Node operations that return an [`Attr`] of an entry (lookup, create, mknod, mkdir, symlink, link,
/// tmpfile) also add one *reference*, exactly as FUSE counts lookups; [`forget`](Fs::forget) gives
/// references back. An inode without a name lives until its references and opens are gone.
pub struct Fs<M: Media> {
    core: Core<M>,
    table: table::Table,
    /// Held while an inode is loaded, by number.
    loading: [Mutex<()>; 64],
    slots: table::FreeSlots,
    /// Slots that the table has room for.
    slot_count: AtomicU32,
    /// The inode whose data are the inode slots.
    table_inode: Inode,
    /// Held by every rename that moves between directories or locks two of them below one: the tree's shape
    /// stands still for it.
    rename_lock: Mutex<()>,
    /// By directory: files that lost a name in it and have others. Its log alone knows their change times.
    left: Mutex<LeftTimes>,
    departed: departed::Departed,
    /// Changes whenever a directory's path or permissions may have: what cached walks check.
    namespace: CachePadded<AtomicU64>,
    /// The time at the last tick: to see cheaply that an access time is not a day old.
    seconds: CachePadded<AtomicU64>,
    /// Tells file systems of one process apart.
    id: u64,
    state: Mutex<format::State>,
    syncing: Mutex<mount::Synced>,
    /// Files are fixed, or not any more, one at a time.
    fixing: Mutex<()>,
    report: OpenReport,
    ticker: Mutex<Option<mount::Ticker>>,
    syncer: Arc<offload::Syncer>,
    /// For syncs that another thread makes.
    this: Weak<Fs<M>>,
}

/// Syncs until everything that was freed may be reused: one covers the operation that freed it, one the state
/// line that names its epoch, and where that was log cleaning one the log's new head.
const SYNCS_TO_FREE: usize = 3;
/// So often an operation that finds the pool full makes syncs that free something and tries again; and so often it tries because
/// those of others did.
const ROOM_TRIES_MAX: u32 = 8;
const ROOM_TRIES_BESIDE_OTHERS_MAX: u32 = 1 << 10;

impl<M: Media> Fs<M> {
    pub fn media(&self) -> &M {
        &self.core.media
    }

    /// Who copies data, and how much of it.
    pub fn mover(&self) -> &Mover<M> {
        &self.core.mover
    }

    /// Where the time of reads or writes went, since the pool was opened, of those that were watched: one in
    /// [`ONE_IN`](crate::account::ONE_IN).
    pub fn times(&self, op: Op) -> Times {
        self.core.ledger.times(op)
    }

    /// What watches them.
    pub fn ledger(&self) -> &Ledger {
        &self.core.ledger
    }

    /// The epoch that operations are in now. It ends when the pool is synced; on media whose stores are durable on return
    /// nothing waits for that.
    pub fn sync_epoch(&self) -> u64 {
        self.core.epochs.current()
    }

    pub fn open_report(&self) -> &OpenReport {
        &self.report
    }

    /// Where the slot of an inode stands.
    fn slot(&self, ino: u32) -> Result<Addr> {
        let body = self.table_inode.body.read();
        let index = body.file().expect("the inode table is a file");
        match index.get(ino / format::SLOTS_PER_BLOCK) {
            index::Mapping::Written(block) => {
                Ok(log::block_addr(block).add((ino % format::SLOTS_PER_BLOCK) as u64 * format::SLOT as u64))
            }
            _ => Err(Error::new(libc::ESTALE, "fs::slot")),
        }
    }

    /// The inode, loaded from its log at first use.
    fn inode(&self, ino: Ino) -> Result<Arc<Inode>> {
        if ino.0 == format::TABLE_INO || ino.0 >= self.slot_count.load(Ordering::Acquire) {
            return Err(Error::new(libc::ESTALE, "fs::inode"));
        }
        let entry = self.table.entry(ino.0);
        entry.node.share().map_or_else(|| self.load(ino, entry), Ok)
    }

    /// As [`inode`](Fs::inode), without a count: for as long as the thread is pinned.
    #[inline]
    fn inode_pinned<'p>(&self, ino: Ino, pin: &'p Pin) -> Result<&'p Inode> {
        if ino.0 != format::TABLE_INO
            && ino.0 < self.slot_count.load(Ordering::Acquire)
            && let Some(inode) = self.table.entry(ino.0).node.get(pin)
        {
            return Ok(inode);
        }
        self.inode(ino)?;
        // Gone again by now, if it lost its last name.
        self.table.entry(ino.0).node.get(pin).ok_or(Error::new(libc::ESTALE, "fs::inode"))
    }

    #[cold]
    fn load(&self, ino: Ino, entry: &table::Entry) -> Result<Arc<Inode>> {
        let _one = self.loading[ino.0 as usize % self.loading.len()].lock();
        let gone = || Error::new(libc::ESTALE, "fs::inode");
        // In this order: an inode that is being made is there before it has links. Those of one that is not here stay.
        let links = entry.links();
        if links == 0 {
            return Err(gone());
        }
        // What was here once is the inode or, if it is here no more, was reclaimed, whatever its links were a
        // moment ago: what the slot holds is dead, or another's.
        if entry.node.was_filled() {
            return entry.node.share().ok_or_else(gone);
        }
        let mut inode = inode::load(&self.core, ino.0, self.slot(ino.0)?)?;
        let (known, end) =
            (self.table.log_end(ino.0).load(Ordering::Relaxed), inode.body.get_mut().log.seq());
        if known != 0 && known != end {
            return Err(log::damaged(&inode.owner(), "its log does not end where it did"));
        }
        let loaded = self.table.share(inode, links);
        self.table.fill(loaded.clone());
        Ok(loaded)
    }

    /// EROFS where nothing may change, EIO after a failed store: for callers that look at things first.
    fn check_changes(&self) -> Result<()> {
        self.core.check_alive()
    }

    fn links(&self, inode: &Inode) -> u32 {
        self.table.entry(inode.ino.0).links()
    }

    fn attr(&self, inode: &Inode, body: &Body) -> Attr {
        inode.attr(body, self.links(inode))
    }

    /// Appends `batch` to the inode's log and fences it together with `pending`: the commit of an
    /// operation on one inode. The caller then changes the body, and last calls `tidy_log`.
    #[inline]
    #[track_caller]
    fn commit(
        &self,
        inode: &Inode,
        body: &mut Body,
        batch: &mut log::Batch,
        guard: &epoch::Guard,
        class: Class,
        pending: Flushed,
    ) -> Result<Durable> {
        let flushed = self.append(inode, body, batch, guard, class)?;
        Ok(self.core.fence(pending.and(flushed)))
    }

    /// [`commit`](Fs::commit) of an operation that is one record of few lines; the record's number.
    #[inline]
    #[track_caller]
    fn commit_lines(
        &self,
        inode: &Inode,
        body: &mut Body,
        record: (format::Type, &mut [Words]),
        guard: &epoch::Guard,
        class: Class,
        pending: Flushed,
    ) -> Result<u32> {
        self.commit_lines_and(inode, body, record, guard, class, pending, |_, seq| seq)
    }

    /// [`commit_lines`](Fs::commit_lines), and what follows from it in DRAM is done while the stores are on their way to the
    /// media: the CPU has nothing else to do until the fence is passed. Nobody sees any of it before: the caller has the
    /// inode's exclusive lock. What is not to be had by others until the record is durable, a block that it frees above all,
    /// is not `meanwhile`'s to give.
    #[inline]
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "those of `commit_lines`, and what to do")]
    fn commit_lines_and<T>(
        &self,
        inode: &Inode,
        body: &mut Body,
        record: (format::Type, &mut [Words]),
        guard: &epoch::Guard,
        class: Class,
        pending: Flushed,
        meanwhile: impl FnOnce(&mut Body, u32) -> T,
    ) -> Result<T> {
        let appended = body.log.append_lines(&self.core, &inode.owner(), record, guard.epoch(), class);
        let (seq, flushed) = appended.map_err(|e| self.no_longer_alive(e))?;
        let done = meanwhile(body, seq);
        self.core.fence(pending.and(flushed));
        Ok(done)
    }

    /// The append alone, for operations on several logs.
    #[inline]
    fn append(
        &self,
        inode: &Inode,
        body: &mut Body,
        batch: &mut log::Batch,
        guard: &epoch::Guard,
        class: Class,
    ) -> Result<Flushed> {
        self.alive_after(body.log.append(&self.core, &inode.owner(), batch, guard.epoch(), class))
    }

    /// What an append answered: after any failure but a full pool the file system takes no more changes.
    #[inline]
    fn alive_after<T>(&self, appended: Result<T>) -> Result<T> {
        appended.map_err(|e| self.no_longer_alive(e))
    }

    #[cold]
    fn no_longer_alive(&self, e: Error) -> Error {
        if e.errno() != libc::ENOSPC {
            self.core.poison(&e);
        }
        e
    }

    #[inline]
    fn releases(&self) -> u64 {
        self.core.releases.load(Ordering::Acquire)
    }

    /// For [`make_room`](Fs::make_room), before an operation that may find the pool full.
    #[inline]
    fn room(&self) -> Room {
        let slots = self.slot_count.load(Ordering::Acquire);
        Room { releases: self.releases(), waited: false, tries: 0, tries_beside_others: 0, slots }
    }

    /// Runs an operation, again where the pool was full and there is room by then.
    #[inline]
    fn with_room<T>(&self, mut run: impl FnMut() -> Result<T>) -> Result<T> {
        let mut room = self.room();
        loop {
            match run() {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => {}
                done => return done,
            }
        }
    }

    /// Makes room where the pool is full only because what was freed is not synced yet, because copies use it, or the inode table has
    /// what it does not need; true where it is worth trying again. Room that others have made since counts. False, too, where the
    /// caller of the operation is to wait (`offload::Tries`).
    #[cold]
    fn make_room(&self, room: &mut Room) -> bool {
        if self.has_made_room(room) {
            return true;
        }
        if offload::is_put_off() {
            return false;
        }
        match self.core.enter().and_then(|guard| self.shrink_table(&guard)) {
            Ok(shrunk) if !shrunk && !self.has_shrunk_since(room) => return false,
            Ok(_) => {}
            // Nothing can be changed any more: the operation hears that.
            Err(_) => return true,
        }
        room.slots = self.slot_count.load(Ordering::Acquire);
        !self.core.deferring || !offload::put_off(|| self.syncs_make_room()) && self.sync_to_free().is_ok()
    }

    /// Whether somebody else made the inode table shorter meanwhile.
    fn has_shrunk_since(&self, room: &Room) -> bool {
        self.slot_count.load(Ordering::Acquire) < room.slots
    }

    /// Of [`make_room`](Fs::make_room) what needs no change to the inode table.
    fn has_made_room(&self, room: &mut Room) -> bool {
        let Room { releases, waited, tries, tries_beside_others, .. } = room;
        // Once: there may always be others.
        if !std::mem::replace(waited, true) {
            let keeps = || self.core.copies.keep_blocks() || self.departed.any();
            if offload::put_off(|| keeps() || self.syncs_make_room()) {
                return false;
            }
            let (ahead, copies) = (self.pause_copies_ahead(), self.core.copies.keep_blocks());
            if copies {
                self.finish_writes(u64::MAX);
                self.finish_reads();
                // Whoever is just ending others frees what those kept before leaving this epoch.
                self.core.epochs.advance();
            }
            let departed = self.departed.any() && self.settle().is_ok();
            if ahead || departed || self.core.copies.kept_blocks() {
                return true;
            }
        }
        if !self.core.deferring || *tries == ROOM_TRIES_MAX {
            return false;
        }
        // Others may free, and take, for ever.
        let (now, waits) = {
            let _no_release = self.syncing.lock();
            (self.releases(), self.has_deferred())
        };
        if now != std::mem::replace(releases, now) && *tries_beside_others < ROOM_TRIES_BESIDE_OTHERS_MAX {
            *tries_beside_others += 1;
            return true;
        }
        *tries += 1;
        let made = waits && self.sync_to_free().is_ok();
        *releases = self.releases();
        made
    }

    /// Whether something that was freed waits for a sync.
    fn has_deferred(&self) -> bool {
        self.core.alloc.deferred() != alloc::Deferred::default() || self.slots.has_deferred()
    }

    fn sync_to_free(&self) -> Result<()> {
        (0..SYNCS_TO_FREE).try_for_each(|_| self.sync())
    }

    /// Gives back `count` references that lookups and creations took.
    pub fn forget(&self, ino: Ino, count: u64) {
        if ino.0 >= self.slot_count.load(Ordering::Acquire) {
            return;
        }
        let entry = self.table.entry(ino.0);
        let pin = pin();
        let Some(inode) = entry.node.get(&pin) else { return };
        self.put(inode, count);
    }

    /// The counterpart of every open.
    pub fn release(&self, ino: Ino) {
        self.forget(ino, 1);
    }

    /// The counterpart of [`Fs::open_node`] for callers that hold the node.
    pub fn release_node(&self, node: &Node) {
        self.put(&node.inode, 1);
    }

    fn put(&self, inode: &Inode, count: u64) {
        // Sequentially consistent, as where a name goes: of the two that end an inode one sees the other's end.
        let before = inode.uses.fetch_sub(count, Ordering::SeqCst);
        if before < count {
            // It stays as it was: a count below zero would keep the inode for ever.
            inode.uses.fetch_add(count, Ordering::AcqRel);
            panic!("an inode was given back more often than taken");
        }
        if before == count && self.table.entry(inode.ino.0).nlink.load(Ordering::SeqCst) == 0 {
            self.reclaim(inode, false);
        }
    }

    /// Frees all that a nameless, unused inode has; a used one's too at the end. Where writes of it are under way nobody waits
    /// for them, but at a close: whoever sees the last of them over does this then.
    fn reclaim(&self, inode: &Inode, at_close: bool) {
        if inode.kind != Kind::Directory || self.log_may_go(inode) {
            self.free_inode(inode, at_close);
        }
    }

    fn free_inode(&self, inode: &Inode, at_close: bool) {
        let mut body = if at_close { self.change_at_rest(inode) } else { self.table.change(inode) };
        if body.writes.any() {
            return;
        }
        let guard = self.core.epochs.enter();
        let reuse = self.core.reuse_after(&guard);
        if body.dead || self.links(inode) > 0 || !at_close && inode.uses.load(Ordering::Acquire) > 0 {
            return;
        }
        body.dead = true;
        self.free_contents(&mut body, reuse);
        body.log.free_all(&self.core, reuse);
        self.table.entry(inode.ino.0).node.empty_out();
        drop(body); // its line shows nothing before another may have it
        self.slots.put(inode.ino.0, reuse);
    }

    fn free_contents(&self, body: &mut Body, reuse: Option<u64>) {
        if let inode::Data::File(index) = &mut body.data {
            index.clear(0, u32::MAX, &mut |run, _| self.core.free(run, reuse));
        }
        for x in body.xattrs.drain(..) {
            if let Some(run) = x.blocks {
                self.core.free(run, reuse);
            }
        }
    }

    pub fn statfs(&self) -> StatFs {
        let stats = self.core.alloc.stats();
        // What was freed is free to who asks, though not to who takes it yet: where that is all there is
        // left, a write syncs and has it.
        let free = stats.available + stats.deferred.blocks;
        let inodes_free = self.slots.count() + free * format::SLOTS_PER_BLOCK as u64;
        let slots = self.slot_count.load(Ordering::Acquire) as u64;
        let uuid = &self.core.sb.uuid;
        StatFs {
            block_bytes: BLOCK as u32,
            blocks: self.core.sb.blocks,
            blocks_free: free,
            inodes: slots + free * format::SLOTS_PER_BLOCK as u64,
            inodes_free,
            name_bytes_max: crate::limits::NAME_BYTES_MAX as u32,
            fsid: u64::from_le_bytes(uuid[..8].try_into().unwrap())
                ^ u64::from_le_bytes(uuid[8..].try_into().unwrap()),
            read_only: self.core.read_only,
        }
    }

    fn defers(domain: Domain) -> bool {
        domain == Domain::PageCache
    }
}
