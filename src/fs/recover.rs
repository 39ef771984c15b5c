//! Opening a pool that was not closed: what the logs say becomes the state, in parallel.
//!
//! 1. The slot headers are read.
//! 2. Each directory's log is scanned for operations **in doubt**. Normally that is its last one at
//!    most, and only if its epoch is not settled. After a power loss on an ordinary file it is every
//!    operation of an epoch that was not synced, because write-back keeps no order. What is in doubt
//!    counts only if what it depends on is there: the slot it names, its other half in another log.
//!    Where it does not count, the log is cut before it.
//! 3. Cuts are carried from log to log until nothing changes; then the directories are replayed, and
//!    link counts and parents follow from the root down. What the root does not reach is free.
//! 4. The logs of all files reached are replayed, the last operation's data is verified, blocks are
//!    marked, and redo bytes are stored again.
//! 5. Logs that were cut are sealed, so that what was voided once is void for ever. Offloaded writes whose copy had
//!    not ended are skipped, whatever follows them; what their pages are instead is written down, which later replays
//!    come to after them.
//!
//! **Damage** costs the inode that has it, not the pool. A damaged file answers EUCLEAN from then on (its log head
//! says so, because later recoveries cannot tell any more), and the blocks that the rest of its log names stay
//! taken. Where damage hides which blocks are in use (a directory's, or a log that cannot be followed to its end)
//! nothing is changed: the pool is open for reading only. What nobody names may be damaged as it likes.
//!
//! Every step can be repeated: a crash in recovery is followed by the same recovery.
//!
//! **A killed process** may leave words in a cache: a log's head, a name that was withdrawn, a completion word, which are stored and
//! then flushed. Recovery sees them, decides by them, and lets others rely on that; so it writes them back as it reads
//! them (`keep`), and power that fails later does not take them. Records are past the caches already, and both copies of the state
//! line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::alloc::{Block, Class, Conflict, Mini, Run};
use super::dirindex::Named;
use super::format::*;
use super::inode::{self, AddRecord, Body, Data, Inode, Partner, Redos};
use super::log::{self, Batch, Log, Op, Owner, Reader};
use super::mount::{Opened, load_table_inode};
use super::offload::Pages;
use super::*;
use crate::sync::together::together;

use repairs::{Owned, Repairs, conflict, mark};

mod directories;
mod files;
mod repairs;

/// Slots that a thread takes at a time.
const SLOTS_AT_A_TIME: u32 = 512;
const THREADS_MAX: usize = 64;

type Headers = Vec<Option<SlotHeader>>;

struct Recovery<'a, M: Media> {
    core: &'a Core<M>,
    table_inode: &'a Inode,
    /// Epochs up to this one hold no doubt.
    settled: u64,
    /// What was stored, or is now, may reach the disk in any order.
    deferred: bool,
    power_loss: bool,
    headers: Headers,
    /// Slots on bad media.
    bad_slots: HashSet<u32>,
    voided: AtomicU32,
    /// The highest epoch that a log carries.
    newest: AtomicU64,
}

/// Inodes with names that cannot be read.
type Damaged = Vec<(u32, Error)>;

pub(super) fn recover<M: Media>(core: &mut Core<M>, previous: &State, power_lost: bool) -> Result<Opened> {
    let core = &*core;
    match previous.closed {
        true => tracing::info!("the pool was too full for a checkpoint: scanning its logs"),
        false => tracing::info!("the pool was not closed: scanning its logs"),
    }
    let whole = |run| core.alloc.mark_used(run).map_err(conflict(TABLE_INO));
    whole(Run { start: Block(0), count: TABLE_BLOCK })?;
    whole(Run { start: Block(core.sb.blocks as u32 - 1), count: 1 })?;
    let table_inode = load_table_inode(core)?;
    keep(core, log::block_addr(Block(TABLE_BLOCK)).add(LOG_HEAD_OFFSET));
    mark(core, TABLE_INO, &table_inode.body.read())?;
    let slots = (table_inode.body.read().size / BLOCK as u64) as u32 * SLOTS_PER_BLOCK;
    let mut r = Recovery {
        core,
        table_inode: &table_inode,
        settled: previous.settled,
        deferred: core.deferring || previous.deferred,
        power_loss: previous.lost_power(power_lost),
        headers: Vec::new(),
        bad_slots: HashSet::new(),
        voided: AtomicU32::new(0),
        newest: AtomicU64::new(0),
    };
    (r.headers, r.bad_slots) = r.read_headers(slots)?;
    if r.headers[ROOT_INO as usize].is_none_or(|h| h.mode & libc::S_IFMT != libc::S_IFDIR) {
        return Err(Error::message(
            libc::EUCLEAN,
            "recover::recover",
            "the root directory is damaged; lode fsck --repair keeps what validates",
        ));
    }
    let table = table::Table::default();
    let mut repairs = Repairs::default();
    let lost = r.recover_directories(&table, slots, &mut repairs)?;
    r.recover_files(&table, slots, &mut repairs)?;
    for block in core.media.bad() {
        // Somebody's, or nobody's from now on.
        let _ = core.alloc.mark_used(Run { start: block, count: 1 });
    }
    let damaged = (lost.len() + repairs.damaged.len()) as u64;
    let read_only = r.report_damage(&lost, &repairs.damaged);
    let held = r.hold(&table, &repairs);
    core.alloc.start();
    // Above all that logs carry, even if the state line is older than they are.
    core.epochs.raise(r.newest.load(Ordering::Relaxed));
    let epoch = Some(core.epochs.current());
    for owned in held {
        match owned {
            Owned::Blocks(run) => core.free(run, epoch),
            Owned::Mini(mini) => log::release(core, log::mini_addr(mini), MINI_LINES as u16, epoch),
        }
    }
    let left = if read_only {
        r.show(&table, repairs);
        LeftTimes::new()
    } else {
        r.repair(&table, repairs)?
    };
    let is_free = |ino: &u32| table.entry(*ino).links() == 0 && !r.bad_slots.contains(ino);
    let mut free_slots: Vec<u32> = (2..slots).filter(is_free).collect();
    let orphans = free_slots.iter().filter(|&&ino| r.headers[ino as usize].is_some()).count() as u64;
    free_slots.reverse();
    let report = OpenReport {
        was_clean: false,
        checkpoint_damaged: false, // the caller knows
        inodes_scanned: slots as u64 - free_slots.len() as u64,
        voided: r.voided.load(Ordering::Relaxed) as u64,
        orphans,
        damaged,
        settled: previous.settled,
        seconds: 0.0,
    };
    Ok(Opened { table, table_inode, slot_count: slots, free_slots, left, read_only, report })
}

/// Writes back a word that a process that was killed may have left in a cache, so that what is decided by it stays so. The fence
/// is that at the end of the thread's part in [`parallel`].
#[track_caller]
fn keep<M: Media>(core: &Core<M>, at: Addr) {
    // Of a page that went bad since it was loaded the next load says so.
    let _ = core.media.write_back(at, 8).map(Flushed::stood_for);
}

/// Runs `work` over `[0, count)` in parts, on all CPUs. What a thread flushed meanwhile, or before, is durable on return.
fn parallel<M: Media, T: Send + Default>(
    core: &Core<M>,
    count: u32,
    work: impl Fn(std::ops::Range<u32>, &mut T) -> Result<()> + Sync,
) -> Result<Vec<T>> {
    let parts = (count.div_ceil(SLOTS_AT_A_TIME) as usize).clamp(1, THREADS_MAX);
    // Asking how many CPUs there are reads files: not for a small pool.
    let threads = match parts {
        1 => 1,
        _ => std::thread::available_parallelism().map_or(1, |n| n.get()).min(parts),
    };
    let next = AtomicU32::new(0);
    let failed = Mutex::new(None);
    let run = || {
        let mut out = T::default();
        loop {
            let from = next.fetch_add(SLOTS_AT_A_TIME, Ordering::Relaxed);
            if from >= count || failed.lock().is_some() {
                core.fence(Flushed::issued());
                return out;
            }
            if let Err(e) = work(from..count.min(from + SLOTS_AT_A_TIME), &mut out) {
                failed.lock().get_or_insert(e);
            }
        }
    };
    let parts = together(threads, run);
    match failed.into_inner() {
        Some(e) => Err(e),
        None => Ok(parts),
    }
}

impl<M: Media> Recovery<'_, M> {
    fn slot(&self, ino: u32) -> Addr {
        let body = self.table_inode.body.read();
        let super::index::Mapping::Written(block) = body.file().expect("checked").get(ino / SLOTS_PER_BLOCK)
        else {
            unreachable!("the table has no holes: checked at load");
        };
        log::block_addr(block).add((ino % SLOTS_PER_BLOCK) as u64 * SLOT as u64)
    }

    fn owner(&self, ino: u32) -> Owner {
        let generation = self.headers[ino as usize].expect("the caller saw a header").generation;
        Owner { ino, generation, slot: self.slot(ino) }
    }

    fn is_dir(&self, ino: u32) -> bool {
        self.headers[ino as usize].is_some_and(|h| h.mode & libc::S_IFMT == libc::S_IFDIR)
    }

    fn read_headers(&self, slots: u32) -> Result<(Headers, HashSet<u32>)> {
        type Part = (Vec<(u32, SlotHeader)>, Vec<u32>);
        let parts = parallel(self.core, slots, |range, (found, bad): &mut Part| {
            for ino in range.filter(|&ino| ino != TABLE_INO) {
                match inode::read_header(self.core, ino, self.slot(ino)) {
                    Ok(None) => {}
                    Ok(Some(header)) => {
                        found.push((ino, header));
                        keep(self.core, self.slot(ino).add(LOG_HEAD_OFFSET));
                    }
                    Err(_) => bad.push(ino),
                }
            }
            Ok(())
        })?;
        let mut headers = vec![None; slots as usize];
        let mut bad_slots = HashSet::new();
        for (found, bad) in parts {
            found.into_iter().for_each(|(ino, h)| headers[ino as usize] = Some(h));
            bad_slots.extend(bad);
        }
        Ok((headers, bad_slots))
    }

    /// Whether an operation needs proof that what it depends on is on media.
    fn in_doubt(&self, op: &Op, last: bool) -> bool {
        let all = self.power_loss
            && !self.core.media.omits("after a power loss all that was not synced is in doubt");
        op.epoch() > self.settled
            && (last || all)
            && (!op.was_withdrawn()
                || self.core.media.omits("who withdraws a name has found its record complete"))
    }
}
