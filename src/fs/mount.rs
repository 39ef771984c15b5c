//! Making, opening, closing and syncing a pool.
//!
//! The state line says which mount this is, whether the last one ended cleanly, and up to which epoch
//! everything is complete. It is one of two lines written in turn, and again at the pool's end: that one bad
//! page damages both lines of a copy must cost nothing.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use parking_lot::Condvar;

use super::alloc::{Allocator, Block, Class};
use super::format::*;
use super::inode::{self, Inode};
use super::log::{self, Batch, Owner};
use super::*;
use crate::limits::{LABEL_BYTES_MAX, POOL_BLOCKS_MAX, POOL_BYTES_MIN};
use crate::media::LINE;
use crate::sync::primitive::Mutex;
use crate::sync::signals::kept_off;

/// How often complete operations are named as settled, and, on an ordinary file, synced.
const TICK: Duration = Duration::from_secs(1);
const SYNC_TICKS: u32 = 5;
/// A state line may lag this many epochs behind what logs of an ordinary file carry.
const EPOCH_SLACK: u64 = 1024;

/// Progress of syncs on an ordinary file.
pub(super) struct Synced {
    /// The last epoch whose `fdatasync` completed.
    done: u64,
    /// The last epoch that a durable state line names: what was freed in it may be reused.
    named: u64,
}

pub(super) struct Ticker {
    stop: Arc<(parking_lot::Mutex<bool>, Condvar)>,
    thread: JoinHandle<()>,
}

impl MkfsOptions {
    /// EINVAL for what no pool can have; `bytes`, where it is known, is to be the size of the pool.
    pub fn check(&self, bytes: Option<u64>) -> Result<()> {
        let sizes = POOL_BYTES_MIN..=POOL_BLOCKS_MAX * BLOCK as u64 + BLOCK as u64 - 1;
        if let Some(bytes) = bytes.filter(|bytes| !sizes.contains(bytes)) {
            let message = format!(
                "a pool has from {} MiB to {} TiB; this one would have {bytes} bytes: choose another size",
                POOL_BYTES_MIN >> 20,
                (POOL_BLOCKS_MAX * BLOCK as u64) >> 40,
            );
            return Err(Error::message(libc::EINVAL, "mount::mkfs", message));
        }
        MkfsOptions::check_label(&self.label)
    }

    /// EINVAL for what is no label: it is one line of text, and not a long one.
    pub fn check_label(label: &str) -> Result<()> {
        let message = match label {
            _ if label.len() > LABEL_BYTES_MAX => format!("a label has at most {LABEL_BYTES_MAX} bytes"),
            _ if label.chars().any(char::is_control) => "a label has no control characters".to_owned(),
            _ => return Ok(()),
        };
        Err(Error::message(libc::EINVAL, "mount::mkfs", message))
    }
}

impl<M: Media> Core<M> {
    /// Of a pool found as `found`, for the mount that `state` tells of. What is as large as this is moved in calls of its
    /// own, out of which nothing deep is called: who opens a pool may be a uthread, with a small stack.
    #[inline(never)]
    fn begin(media: M, sb: Super, options: &OpenOptions, state: &State, found: State) -> Box<Core<M>> {
        let profile = options.profile.clone();
        let mover = Mover::of_class(&media, options.engine, profile, options.class, options.qos);
        Box::new(Core {
            mover,
            copies: offload::Copies::default(),
            ordered: options.ordered,
            ledger: Ledger::default(),
            deferring: Fs::<M>::defers(media.domain()),
            two_fence_bytes: media.two_fence_bytes(),
            media: quarantine::Watched::new(media),
            alloc: Allocator::new(sb.blocks as u32),
            key_crc: crate::media::crc32c(&sb.key, 0),
            sb,
            epochs: epoch::Epochs::new(found.settled + EPOCH_SLACK),
            mount: state.mount,
            crashed: state.crashed,
            found,
            poisoned: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            media_sync: Mutex::default(),
            releases: AtomicU64::new(0),
            ahead: CachePadded::default(),
            fixing: AtomicU64::new(0),
            ahead_pause: AtomicU64::new(0),
            ahead_ever: AtomicBool::new(false),
            read_only: options.read_only,
            generations: Numbers::default(),
            transactions: AtomicU64::new(0),
            paired: AtomicU64::new(0),
            head_moves: Mutex::default(),
        })
    }
}

impl<M: Media> Fs<M> {
    /// Makes an empty file system. EEXIST where one is there and `force` is not set.
    pub fn mkfs(media: M, options: &MkfsOptions) -> Result<M> {
        options.check(Some(media.len()))?;
        let blocks = media.len() / BLOCK as u64;
        if media.is_used(Addr(0), media.len()) {
            let message = "a guest runs whose memory is in this pool: stop it first";
            return Err(Error::message(libc::EBUSY, "mount::mkfs", message));
        }
        if !options.force && !matches!(SuperCopies::read(&media)?.best(), Err(SuperFault::Foreign)) {
            return Err(Error::message(
                libc::EEXIST,
                "mount::mkfs",
                "there is a Lodestone file system already: use another file, or force (lode mkfs --force) to replace it",
            ));
        }
        let sb = Super {
            version: VERSION,
            uuid: identity(options, 0)?,
            key: identity(options, 1)?,
            blocks,
            data_in_place: options.data == DataMode::InPlace,
            created: now(),
            label: options.label.clone(),
        };
        write_empty(&media, &sb, options)?;
        let fs = Fs::start(media, sb, &OpenOptions::default())?;
        fs.close()?;
        Ok(fs.abandon().expect("nobody else has the file system yet"))
    }

    /// Reads what the superblock says, without opening the pool or changing anything.
    pub fn probe(media: &M) -> Result<PoolInfo> {
        let copies = SuperCopies::read(media)?;
        let sb = copies.whole(media)?;
        let state = read_state(media, &sb)?;
        let bad = check::bad_blocks(media, &sb, state);
        Ok(PoolInfo {
            bad_blocks: bad.iter().map(|run| run.count as u64).sum(),
            uuid: sb.uuid,
            label: sb.label.clone(),
            format_version: sb.version,
            data: if sb.data_in_place { DataMode::InPlace } else { DataMode::Cow },
            bytes: sb.blocks * BLOCK as u64,
            mounts: state.mount,
            clean: state.clean,
            closed: state.closed || state.clean,
            created: unpack_time(sb.created),
            first_copy_damaged: copies.first.is_err(),
            second_copy_damaged: copies.second.is_err(),
        })
    }

    pub fn info(&self) -> PoolInfo {
        let sb = &self.core.sb;
        let state = self.state.lock();
        PoolInfo {
            bad_blocks: self.bad_blocks(),
            uuid: sb.uuid,
            label: sb.label.clone(),
            format_version: sb.version,
            data: if sb.data_in_place { DataMode::InPlace } else { DataMode::Cow },
            bytes: sb.blocks * BLOCK as u64,
            mounts: state.mount,
            clean: state.clean,
            closed: state.closed || state.clean,
            created: unpack_time(sb.created),
            first_copy_damaged: false,
            second_copy_damaged: false,
        }
    }

    /// Opens the pool: loads the checkpoint of a clean close, or recovers.
    pub fn open(media: M, options: &OpenOptions) -> Result<Arc<Fs<M>>> {
        let copies = SuperCopies::read(&media)?;
        let sb = copies.whole(&media)?;
        // Before anything is written: a pool that is not opened after all stays closed.
        let ticker = if options.read_only || options.no_ticker { None } else { Some(Ticker::begin()?) };
        if copies.first.is_err() || copies.second.is_err() {
            let (bad, good) = if copies.first.is_err() { ("first", "second") } else { ("second", "first") };
            let mended = match write_super(&media, &sb) {
                _ if options.read_only => String::new(),
                Ok(()) => " and written back".to_owned(),
                Err(e) => format!("; it cannot be written back: {e}"),
            };
            tracing::warn!("the {bad} copy of the superblock is damaged; the {good} was used{mended}");
        }
        let fs = Fs::start(media, sb, options)?;
        if fs.core.read_only {
            fs.core.poisoned.store(true, Ordering::Release);
        } else if let Some((ticker, watch)) = ticker {
            // Fails where the thread has ended, which it does after this.
            let _ = watch.send(Arc::downgrade(&fs));
            *fs.ticker.lock() = Some(ticker);
        }
        Ok(fs)
    }

    fn start(media: M, sb: Super, options: &OpenOptions) -> Result<Arc<Fs<M>>> {
        let begun = Instant::now();
        let previous = read_state(&media, &sb)?;
        if previous.sync_failed() {
            tracing::warn!(
                "a sync of the pool failed when it was last used: only what is on the disk counts"
            );
            media.drop_cached();
        }
        if previous.mount + 1 >= MOUNT_MAX {
            return Err(Error::message(
                libc::EOVERFLOW,
                "mount::open",
                "the pool was opened 16 million times, its last; copy its files to a new pool",
            ));
        }
        let state = State {
            serial: previous.serial + 1,
            mount: previous.mount + 1,
            clean: false,
            closed: false,
            crashed: if previous.clean { previous.crashed } else { previous.mount },
            settled: previous.settled,
            checkpoint: 0,
            boot: boot(),
            deferred: Fs::<M>::defers(media.domain()),
        };
        // What the last crash left is told from damage until recovery is through, however often that begins.
        // So is a power loss: what it left is verified by the next one, should this recovery be cut short.
        let found = if previous.clean { state } else { previous };
        let entered =
            State { crashed: previous.crashed, boot: found.boot, deferred: found.deferred, ..state };
        let bad = check::bad_blocks(&media, &sb, previous);
        let mut core = Core::begin(media, sb, options, &state, previous);
        core.media.know(&bad);
        // Nothing else may reach media before the pool is marked as in use.
        write_state(&*core.media, &core.sb, &entered)?;
        sync_behind(&*core.media, &core.sb, &entered, "mount::open")?;
        let loaded = match previous.clean {
            true => match checkpoint::load(&mut core, previous.checkpoint) {
                Err(e) => {
                    tracing::warn!("{e}; the logs are scanned instead");
                    core.alloc = Allocator::new(core.sb.blocks as u32);
                    None
                }
                Ok(opened) => Some(opened),
            },
            false => None,
        };
        let was_clean = loaded.is_some();
        let opened = match loaded {
            Some(opened) => opened,
            None => recover::recover(&mut core, &previous, options.power_lost)?,
        };
        core.media.bad().into_iter().for_each(|block| core.alloc.retire_minis(block));
        core.read_only |= opened.read_only;
        let report = OpenReport {
            checkpoint_damaged: previous.clean && !was_clean,
            seconds: begun.elapsed().as_secs_f64(),
            ..opened.report
        };
        // Until an epoch is named recovery is not through.
        let fs = Fs::begin(core, Opened { report, ..opened }, State { crashed: previous.crashed, ..state });
        if !was_clean && !fs.core.read_only {
            fs.settle_durably()?; // recovery has settled everything there is
            fs.core.alloc.release(u64::MAX); // and nobody asks any more for what it held
            fs.core.check_freed();
        }
        // Who replays has it to itself, and a barrier would stop the other replays of the process. Schedules are about what all others have.
        if !options.no_ticker || cfg!(shuttle) {
            fs.core.epochs.share();
        }
        fs.begin_lanes();
        Ok(fs)
    }

    #[inline(never)] // as `Core::begin`
    fn begin(core: Box<Core<M>>, opened: Opened, state: State) -> Arc<Fs<M>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let before = core.epochs.current() - 1;
        Arc::new_cyclic(|this| Fs {
            core: *core,
            table: opened.table,
            loading: [const { Mutex::new(()) }; 64],
            slots: table::FreeSlots::new(opened.free_slots),
            slot_count: AtomicU32::new(opened.slot_count),
            table_inode: opened.table_inode,
            rename_lock: Mutex::new(()),
            fixing: Mutex::new(()),
            left: Mutex::new(opened.left),
            departed: Default::default(),
            namespace: CachePadded::new(AtomicU64::new(0)),
            seconds: CachePadded::new(AtomicU64::new(now())),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
            syncing: Mutex::new(Synced { done: before, named: before }),
            report: opened.report,
            ticker: Mutex::new(None),
            syncer: Arc::default(),
            this: this.clone(),
        })
    }

    /// Ends the epoch, waits for its operations, makes them survive power loss where that takes a
    /// sync, and names it in the state line. The caller is in no epoch.
    pub(super) fn settle(&self) -> Result<()> {
        let settled = self.settle_locked(&mut self.syncing.lock());
        self.free_departed();
        settled
    }

    /// The same, unless it would wait for copies, or for somebody who does; whether the epoch was named.
    pub(super) fn settle_beside_copies(&self) -> Result<bool> {
        if self.has_writes_under_way() {
            return Ok(false);
        }
        // Whoever has it may wait for copies.
        let Some(mut synced) = self.syncing.try_lock() else { return Ok(false) };
        let ended = self.end_epoch();
        // They may have begun meanwhile.
        if self.has_writes_of(ended) {
            return Ok(false);
        }
        let settled = self.name_ended(&mut synced, ended);
        drop(synced);
        self.free_departed();
        settled.map(|()| true)
    }

    /// [`settle`](Fs::settle) so that the state line survives power loss, too. Before that nothing may be
    /// reused that was freed in the epoch, or that recovery found free: recovery would verify what it held.
    fn settle_durably(&self) -> Result<()> {
        self.settle()?;
        if self.core.deferring { self.settle() } else { Ok(()) }
    }

    /// Ends the current epoch and names it as settled: what the background tick does once a second.
    pub fn tick(&self) -> Result<()> {
        self.core.check_alive()?;
        self.settle()
    }

    fn settle_locked(&self, synced: &mut Synced) -> Result<()> {
        let ended = self.end_epoch();
        self.finish_writes(ended);
        self.name_ended(synced, ended)
    }

    fn end_epoch(&self) -> u64 {
        self.save_bad_blocks();
        self.core.epochs.advance()
    }

    /// Makes durable what was stored so far, on an ordinary file, whatever is under way.
    #[track_caller]
    pub(super) fn sync_media(&self) -> Result<()> {
        let one = self.core.media_sync.lock();
        // Whoever failed in an epoch said so before leaving it.
        if self.core.failed.load(Ordering::Acquire) {
            return Err(self.core.poison_error());
        }
        let Err(e) = self.core.media.sync() else { return Ok(()) };
        let e = sync_error(e, "mount::sync");
        self.core.poison(&e);
        drop(one);
        let mut state = self.state.lock();
        // A checkpoint of a pool that is not closed is a repair's, which was cut short.
        *state = doubt(&*self.core.media, &self.core.sb, &State { checkpoint: 0, ..*state });
        Err(e)
    }

    /// Names an epoch of which nothing is under way.
    fn name_ended(&self, synced: &mut Synced, ended: u64) -> Result<()> {
        self.sync_media()?;
        // The state line written after the last sync is durable since this one, and so are the heads that were moved then.
        let moved = std::mem::replace(&mut synced.named, synced.done);
        synced.done = ended;
        self.move_heads(synced.named).inspect_err(|e| self.core.poison(e))?;
        // Only once it is written may others rely on it.
        let mut state = self.state.lock();
        let (serial, crashed) = (state.serial + 1, self.core.crashed);
        let named = State { serial, crashed, settled: ended, ..*state };
        write_state(&*self.core.media, &self.core.sb, &named).inspect_err(|e| self.core.poison(e))?;
        *state = named;
        drop(state);
        if self.core.deferring {
            // What the logs of the heads that were moved just now began with bears the epoch behind theirs, and more than one epoch may
            // have ended before a sync.
            let reusable = synced.named.min(moved + 1);
            let blocks = self.core.alloc.release(reusable);
            self.core.check_freed();
            if self.slots.release(reusable) || blocks {
                self.core.releases.fetch_add(1, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Everything acknowledged before survives power loss on return, in every domain that can.
    pub fn sync(&self) -> Result<()> {
        self.sync_since(self.core.epochs.current())
    }

    /// The same for what was acknowledged before, when the epoch was `wanted`.
    pub(super) fn sync_since(&self, wanted: u64) -> Result<()> {
        if self.core.read_only {
            return Ok(());
        }
        self.core.check_alive()?;
        if !self.core.deferring {
            return Ok(());
        }
        let mut synced = self.syncing.lock();
        if synced.done >= wanted {
            return Ok(()); // one that began since did it for all
        }
        self.settle_locked(&mut synced)
    }

    /// As [`sync`](Fs::sync): one epoch covers all inodes, and the cost is one `fdatasync` shared by all
    /// who wait. Nothing to do where stores are durable on return.
    pub fn fsync(&self, ino: Ino, data_only: bool) -> Result<()> {
        let _ = data_only;
        self.finish_writes_of_file(ino);
        self.fsync_since(ino, self.core.epochs.current())
    }

    /// The same for what was acknowledged before, when the epoch was `wanted`; no write of the file from before is under way.
    pub(super) fn fsync_since(&self, ino: Ino, wanted: u64) -> Result<()> {
        self.sync_since(wanted)?;
        if self.take_lost(ino) {
            return Err(Error::message(
                libc::EIO,
                "mount::fsync",
                "of what was written some could not be stored: media is bad there; the file has its older bytes",
            ));
        }
        Ok(())
    }

    /// Writes a checkpoint and marks the pool clean. Later operations fail with EIO.
    pub fn close(&self) -> Result<()> {
        if let Some(ticker) = self.ticker.lock().take() {
            ticker.stop();
        }
        if self.core.read_only {
            return Ok(());
        }
        self.save_bad_blocks();
        if self.core.poisoned.swap(true, Ordering::SeqCst) {
            return Err(self.core.poison_error());
        }
        self.wait_for_copies_ahead();
        self.wait_for_fixing();
        // Who entered an epoch before leaves it, who does after sees that the pool is closed.
        if self.core.deferring {
            let ended = self.core.epochs.advance();
            self.finish_writes(ended);
        } else {
            self.settle()?; // nothing freed at once may be in doubt
        }
        self.finish_reads();
        self.reclaim_orphans();
        let is_whole = self.write_back()?;
        self.begin_no_more_reads();
        self.finish_reads(); // those that began meanwhile keep what was freed
        self.settle_durably()?;
        if self.core.deferring {
            self.settle()?; // the heads of cleaned logs
        }
        // Everything is durable and named: what waited for that is free.
        self.core.alloc.release(u64::MAX);
        self.core.check_freed();
        self.core.check_stored()?;
        self.slots.release(u64::MAX);
        self.shrink_table(&self.core.epochs.enter())?;
        self.core.alloc.release(u64::MAX);
        // What a scan finds in the logs of directories a checkpoint would hide.
        // And that what is quarantined for want of room below the pool is free.
        let was_out_of_room = self.core.media.was_out_of_room();
        let checkpoint = if is_whole && !was_out_of_room { checkpoint::store(self)? } else { None };
        if checkpoint.is_none() {
            let full = if was_out_of_room { "the disk below the pool was" } else { "the pool is" };
            tracing::warn!("{full} too full for a checkpoint: the next mount scans the logs instead");
        }
        self.sync_media()?;
        let state = {
            let mut state = self.state.lock();
            state.serial += 1;
            state.closed = true;
            state.clean = checkpoint.is_some();
            state.checkpoint = checkpoint.unwrap_or(0);
            *state
        };
        write_state(&*self.core.media, &self.core.sb, &state)?;
        self.sync_media()
    }

    /// Forgets all that is in DRAM and gives the media back, as a crash of the process would: the next
    /// open recovers. `None` while others use the file system.
    #[inline(never)] // as `Core::begin`
    pub fn abandon(self: Arc<Self>) -> Option<M> {
        let ticker = self.ticker.lock().take();
        if let Some(ticker) = ticker {
            ticker.stop();
        }
        self.end_copies();
        Arc::into_inner(self).map(|fs| fs.core.media.into_inner())
    }

    pub(super) fn loaded(&self) -> impl Iterator<Item = Arc<Inode>> + '_ {
        (1..self.slot_count.load(Ordering::Acquire)).filter_map(|ino| self.table.entry(ino).node.share())
    }

    /// Files without a name that are still open: nobody can reach them after this.
    fn reclaim_orphans(&self) {
        for inode in self.loaded().filter(|i| self.links(i) == 0) {
            self.reclaim(&inode, true);
        }
    }

    /// Puts into the logs what only DRAM knows, change times before access times, for which no full pool gives room: they
    /// were never promised. Durably: the state line that follows names it as settled. False where a change time found
    /// no room: the log of a directory has it.
    fn write_back(&self) -> Result<bool> {
        let mut pending = Flushed::issued();
        let mut is_whole = true;
        for (class, change_times) in [(Class::Release, true), (Class::Data, false)] {
            for inode in self.loaded() {
                let mut body = self.table.change(&inode);
                let guard = self.core.epochs.enter();
                if change_times {
                    pending = pending.and(self.write_back_redone(&mut body, None));
                }
                let ctime_ahead = inode.ctime_ahead.load(Ordering::Acquire);
                let ahead = match change_times {
                    true => ctime_ahead,
                    false => !ctime_ahead && inode.atime_ahead.load(Ordering::Acquire),
                };
                if !ahead {
                    continue;
                }
                let mut batch = Batch::new();
                body.attr_record(inode.atime.load(Ordering::Relaxed), 0, &mut batch);
                match self.append(&inode, &mut body, &mut batch, &guard, class) {
                    Ok(flushed) => {
                        inode.set_attrs_logged();
                        pending = pending.and(flushed);
                    }
                    Err(e) if e.errno() == libc::ENOSPC => is_whole &= !change_times,
                    Err(e) => return Err(e),
                }
            }
        }
        self.core.fence(pending);
        Ok(is_whole)
    }

    /// Gives the inode table more slots. ENOSPC where the pool has no block left for them.
    pub(super) fn grow_table(&self, guard: &epoch::Guard) -> Result<()> {
        let mut body = self.table.change(&self.table_inode);
        let page = self.slot_count.load(Ordering::Acquire) / SLOTS_PER_BLOCK;
        let Some(run) = self.core.alloc.alloc(TABLE_BLOCKS, Class::Data, None) else {
            return Err(Error::new(libc::ENOSPC, "mount::grow_table"));
        };
        let mut batch = Batch::new();
        let size = (page + run.count) as u64 * BLOCK as u64;
        table_record(&mut batch, Extent { page, count: run.count, block: run.start }, size);
        let committed =
            self.commit(&self.table_inode, &mut body, &mut batch, guard, Class::Data, Flushed::issued());
        if let Err(e) = committed {
            self.core.free(run, None);
            return Err(e);
        }
        body.size = size;
        body.file_mut().set_run(page, run.count, run.start, false, &mut |_, _| {});
        let first = page * SLOTS_PER_BLOCK;
        let end = first + run.count * SLOTS_PER_BLOCK;
        self.slot_count.store(end, Ordering::Release);
        self.slots.add(first..end);
        self.tidy_log(&self.table_inode, &mut body, guard);
        Ok(())
    }

    /// Gives the blocks of the inode table's end back, where all its slots are free; whether there were any. (On an ordinary file they
    /// wait for a sync.) Nobody looks for a number there: no entry has it, and no record that could still be void.
    #[cold]
    pub(super) fn shrink_table(&self, guard: &epoch::Guard) -> Result<bool> {
        const UNIT: u32 = TABLE_BLOCKS * SLOTS_PER_BLOCK;
        let mut body = self.table.change(&self.table_inode);
        let end = self.slot_count.load(Ordering::Acquire);
        let first = self.slots.take_end(UNIT, end, UNIT);
        if first == end {
            return Ok(false);
        }
        let (page, size) = (first / SLOTS_PER_BLOCK, body.size);
        body.size = page as u64 * BLOCK as u64;
        let mut batch = Batch::new();
        let atime = self.table_inode.atime.load(Ordering::Relaxed);
        body.attr_record(atime, field::attr::TRUNCATE, &mut batch);
        let nothing = Flushed::issued();
        let committed = self.commit(&self.table_inode, &mut body, &mut batch, guard, Class::Last, nothing);
        if let Err(e) = committed {
            tracing::debug!(
                "the inode table keeps {} blocks that it does not need: {e}",
                end / SLOTS_PER_BLOCK - page
            );
            body.size = size;
            self.slots.add(first..end);
            return if e.errno() == libc::ENOSPC { Ok(false) } else { Err(e) };
        }
        self.slot_count.store(first, Ordering::Release);
        let reuse = self.core.reuse_after(guard);
        body.file_mut().clear(page, u32::MAX - page, &mut |run, _| self.core.free(run, reuse));
        // Its log is cleaned where the table grows again: a close has named all heads that moved by now.
        Ok(true)
    }
}

fn table_record(batch: &mut Batch, extent: Extent, size: u64) {
    let r = batch.record(Type::Write, inode::write_record_bytes(1));
    put64(r, field::write::SIZE, size);
    put16(r, field::write::FLAGS, field::write::SETTLED);
    put16(r, field::write::EXTENTS, 1);
    put32(r, field::write::FIRST, extent.page);
    put32(r, field::write::FIRST + 4, extent.count);
    put32(r, field::write::FIRST + 8, extent.block.0);
}

impl Ticker {
    /// Names epochs as settled in the background, as long as the file system lives that it is then told of. Ends where that
    /// does not come.
    fn begin<M: Media>() -> Result<(Ticker, Sender<Weak<Fs<M>>>)> {
        let stop = Arc::new((parking_lot::Mutex::new(false), Condvar::new()));
        let signal = stop.clone();
        let (watch, watched) = channel::<Weak<Fs<M>>>();
        let run = move || watched.recv().into_iter().for_each(|fs| Ticker::run(&fs, &signal));
        let thread = std::thread::Builder::new().name("lode-epochs".into());
        let thread = kept_off(|| thread.spawn(run)).map_err(|e| {
            let message = format!("cannot start a thread (raise ulimit -u or pids.max): {e}");
            Error::message(e.raw_os_error().unwrap_or(libc::EAGAIN), "mount::open", message)
        })?;
        Ok((Ticker { stop, thread }, watch))
    }

    fn run<M: Media>(fs: &Weak<Fs<M>>, stop: &(parking_lot::Mutex<bool>, Condvar)) {
        let mut ticks = 0;
        loop {
            {
                let mut stopped = stop.0.lock();
                if !*stopped {
                    stop.1.wait_for(&mut stopped, TICK);
                }
                if *stopped {
                    return;
                }
            }
            let Some(fs) = fs.upgrade() else { return };
            fs.seconds.store(now(), Ordering::Relaxed);
            ticks += 1;
            if fs.core.deferring && ticks % SYNC_TICKS != 0 {
                continue;
            }
            if fs.core.check_alive().is_err() || fs.settle().is_err() {
                return;
            }
        }
    }

    fn stop(self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        // The thread itself may hold the last reference and be the one that closes.
        if self.thread.thread().id() != std::thread::current().id() {
            let _ = self.thread.join();
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// Superblock and state line

/// Both copies of the superblock.
pub(super) struct SuperCopies {
    pub first: std::result::Result<Super, SuperFault>,
    pub second: std::result::Result<Super, SuperFault>,
}

impl SuperCopies {
    pub fn read<M: Media>(media: &M) -> Result<SuperCopies> {
        let read = |at: u64| -> std::result::Result<Super, SuperFault> {
            let mut b = [0; SUPER_BYTES];
            if at + SUPER_BYTES as u64 > media.len() || media.read(Addr(at), &mut b).is_err() {
                return Err(SuperFault::Damaged);
            }
            Super::decode_if(&b, |intact| media.verified(&[(Addr(at), SUPER_BYTES)], intact))
        };
        let first = read(SUPER_BLOCK * BLOCK as u64);
        let end = match &first {
            Ok(sb) => sb.blocks,
            Err(_) => media.len() / BLOCK as u64,
        };
        let second = if end > STATE_BLOCK {
            read((end - 1).saturating_mul(BLOCK as u64))
        } else {
            Err(SuperFault::Foreign)
        };
        Ok(SuperCopies { first, second })
    }

    fn best(&self) -> std::result::Result<&Super, SuperFault> {
        match (&self.first, &self.second) {
            (Ok(sb), _) | (Err(SuperFault::Damaged | SuperFault::Foreign | SuperFault::Newer(_)), Ok(sb)) => {
                Ok(sb)
            }
            (Err(SuperFault::Foreign), Err(SuperFault::Damaged)) => Err(SuperFault::Foreign),
            (Err(f), _) => Err(*f),
        }
    }

    /// What holds, of a pool that is all there.
    pub fn whole<M: Media>(&self, media: &M) -> Result<Super> {
        let sb = self.best().map_err(|f| super_error(f, "mount::open"))?.clone();
        if sb.blocks * BLOCK as u64 > media.len() {
            return Err(Error::message(
                libc::EUCLEAN,
                "mount::open",
                format!(
                    "the pool was made with {} bytes but only {} are there: the image was cut short; restore it whole",
                    sb.blocks * BLOCK as u64,
                    media.len()
                ),
            ));
        }
        Ok(sb)
    }
}

fn super_error(fault: SuperFault, site: &'static str) -> Error {
    let (errno, message) = match fault {
        SuperFault::Foreign => {
            let message = "neither copy of the superblock is there: restore the pool from a backup, or, where lode mkfs was \
                           cut short, run it again with --force";
            (libc::EINVAL, message.to_owned())
        }
        SuperFault::Newer(v) => (
            libc::EPROTONOSUPPORT,
            format!("the pool has format version {v}, this Lodestone knows up to {VERSION}: use a newer one"),
        ),
        SuperFault::Older(v) => (
            libc::EPROTONOSUPPORT,
            format!(
                "the pool has format version {v}, this Lodestone reads versions {VERSION_OLDEST} to {VERSION}: copy its files \
                 elsewhere with the one that made it, and make the pool anew"
            ),
        ),
        SuperFault::Damaged => (
            libc::EUCLEAN,
            "both copies of the superblock are damaged; restore the pool from a backup".to_owned(),
        ),
    };
    Error::message(errno, site, message)
}

fn sync_error(e: std::io::Error, site: &'static str) -> Error {
    Error::message(e.raw_os_error().unwrap_or(libc::EIO), site, format!("the pool could not be synced: {e}"))
}

/// Makes durable what was stored so far, on an ordinary file, by one who has the pool to itself and wrote `last`, its newest state line.
pub(super) fn sync_behind<M: Media>(media: &M, sb: &Super, last: &State, site: &'static str) -> Result<()> {
    media.sync().map_err(|e| {
        doubt(media, sb, last);
        sync_error(e, site)
    })
}

/// After a sync that failed, and behind `last`: the kernel says so once, and may show from now on what is not on the disk, as if it
/// were. Who opens the pool next must not believe it. Where this line is lost as well, so is that.
fn doubt<M: Media>(media: &M, sb: &Super, last: &State) -> State {
    let doubted = State { serial: last.serial + 1, clean: false, closed: false, boot: 0, ..*last };
    let _ = write_state(media, sb, &doubted);
    doubted
}

pub(super) fn write_super<M: Media>(media: &M, sb: &Super) -> Result<()> {
    let bytes = sb.encode();
    let first = media.copy_nt(Addr(SUPER_BLOCK * BLOCK as u64), &bytes)?;
    media.fence(first);
    let second = media.copy_nt(Addr((sb.blocks - 1) * BLOCK as u64), &bytes)?;
    media.fence(second);
    Ok(())
}

fn state_addr(sb: &Super, copy: bool, serial: u64) -> Addr {
    let line = serial % 2 * LINE as u64;
    if copy {
        Addr((sb.blocks - 1) * BLOCK as u64 + STATE_COPY_OFFSET + line)
    } else {
        Addr(STATE_BLOCK * BLOCK as u64 + line)
    }
}

/// Writes the state line and its copy at the pool's end, one after the other. One of the two is enough: where the other cannot be
/// stored it is older, and the newer one counts.
pub(super) fn write_state<M: Media>(media: &M, sb: &Super, state: &State) -> Result<()> {
    let line = state.encode(&sb.key);
    let mut failed = None;
    for copy in [false, true] {
        match media.copy_nt(state_addr(sb, copy, state.serial), &line) {
            Ok(flushed) => _ = media.fence(flushed),
            Err(fault) if failed.is_none() => failed = Some(fault),
            Err(fault) => return Err(fault.into()),
        }
    }
    if let Some(fault) = failed {
        tracing::debug!("one of the two copies of the state line was not stored: {}", Error::from(fault));
    }
    Ok(())
}

/// The newest valid state line of each copy.
pub(super) struct StateCopies {
    pub first: Option<State>,
    pub second: Option<State>,
}

impl StateCopies {
    pub fn read<M: Media>(media: &M, sb: &Super) -> StateCopies {
        let newest = |copy: bool| {
            (0..2)
                .filter_map(|serial| {
                    let mut line = [0; LINE];
                    let at = state_addr(sb, copy, serial);
                    if at.0 + LINE as u64 > media.len() {
                        return None;
                    }
                    media.read(at, &mut line).ok()?;
                    let intact = media.verified(&[(at, LINE)], State::is_intact(&line, &sb.key));
                    intact.then(|| State::fields(&line)).flatten()
                })
                .max_by_key(|s| s.serial)
        };
        StateCopies { first: newest(false), second: newest(true) }
    }

    /// The newest of both. One from the copy alone counts as not clean: should its newest line be damaged, too,
    /// then the pool moved on.
    pub fn newest(&self) -> Option<State> {
        let copied = self.second.map(|s| State { clean: s.clean && self.first.is_some(), ..s });
        self.first.into_iter().chain(copied).max_by_key(|s| s.serial)
    }
}

fn read_state<M: Media>(media: &M, sb: &Super) -> Result<State> {
    StateCopies::read(media, sb).newest().ok_or_else(|| {
        Error::message(
            libc::EUCLEAN,
            "mount::read_state",
            "all copies of the state line are damaged; restore the pool from a backup",
        )
    })
}

/// Lays out a file system with an empty root, complete but for a checkpoint.
fn write_empty<M: Media>(media: &M, sb: &Super, options: &MkfsOptions) -> Result<()> {
    let key_crc = crate::media::crc32c(&sb.key, 0);
    // The old superblock goes first: a mkfs cut short leaves no pool rather than half of one.
    for at in [SUPER_BLOCK, sb.blocks - 1] {
        let zeros = media.zero_nt(Addr(at * BLOCK as u64), BLOCK)?;
        media.fence(zeros);
    }
    let zeros = media.zero_nt(Addr(STATE_BLOCK * BLOCK as u64), BLOCK)?;
    media.fence(zeros);
    let table = log::block_addr(Block(TABLE_BLOCK));
    let zeros = media.zero_nt(table, TABLE_BLOCKS as usize * BLOCK)?;
    media.fence(zeros);
    let generation = 1 << 40;
    let file = SlotHeader { mode: libc::S_IFREG, uid: 0, gid: 0, generation, rdev: 0, btime: sb.created };
    let root = SlotHeader {
        mode: libc::S_IFDIR | 0o755,
        uid: options.root_uid,
        gid: options.root_gid,
        generation: generation | 1,
        ..file
    };
    for (ino, header) in [(TABLE_INO, &file), (ROOT_INO, &root)] {
        let at = table.add(ino as u64 * SLOT as u64);
        let flushed = media.store_lines(at, &[header.encode(key_crc, ino)])?;
        media.fence(flushed);
    }
    write_table_extent(media, key_crc, generation, table)?;
    let deferred = Fs::<M>::defers(media.domain());
    let state = State { serial: 1, mount: 1, clean: false, boot: boot(), deferred, ..State::default() };
    write_state(media, sb, &state)?;
    write_super(media, sb)?;
    sync_behind(media, sb, &state, "mount::mkfs")
}

/// The first record of the inode table: its first blocks.
fn write_table_extent<M: Media>(media: &M, key_crc: u32, generation: u64, slot: Addr) -> Result<()> {
    let mut record = [0; LINE];
    put64(&mut record, field::write::SIZE, TABLE_BLOCKS as u64 * BLOCK as u64);
    put16(&mut record, field::write::FLAGS, field::write::SETTLED);
    put16(&mut record, field::write::EXTENTS, 1);
    put32(&mut record, field::write::FIRST + 4, TABLE_BLOCKS);
    put32(&mut record, field::write::FIRST + 8, TABLE_BLOCK);
    let seed = log_seed(key_crc, TABLE_INO, generation, incarnation(generation));
    Head::finish(&mut record, 0, 0, Type::Write as u8, seed);
    let flushed = media.copy_nt(slot.add(LINE as u64), &record)?;
    media.fence(flushed);
    Ok(())
}

/// 16 bytes that no other pool has; of a simulation those of its number.
fn identity(options: &MkfsOptions, which: u8) -> Result<[u8; 16]> {
    let mut b = [which; 16];
    if let Some(number) = options.identity {
        put64(&mut b, 0, number);
        return Ok(b);
    }
    rustix::rand::getrandom(&mut b, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::new(e.raw_os_error(), "mount::identity"))?;
    Ok(b)
}

/// Names this boot of the host; where it has no name, this process. Never 0.
fn boot() -> u64 {
    static BOOT: LazyLock<u64> = LazyLock::new(|| {
        let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        match id.is_empty() {
            false => crate::media::crc32c(&id, 0) as u64 | 1 << 32,
            true => RandomState::new().hash_one(0) | 1 << 33,
        }
    });
    *BOOT
}

impl State {
    /// Whether stores that no sync covers may be lost: the host's page cache is another one by now, or `asked` says so.
    pub(super) fn lost_power(&self, asked: bool) -> bool {
        self.deferred && (asked || self.boot != boot())
    }

    /// Whether the host's page cache may show what is not on the disk, and will not be.
    pub(super) fn sync_failed(&self) -> bool {
        self.deferred && !self.clean && self.boot == 0
    }
}

/// What both ways of opening find.
pub(super) struct Opened {
    pub table: table::Table,
    pub table_inode: Inode,
    pub slot_count: u32,
    pub free_slots: Vec<u32>,
    /// Those that recovery found no room for.
    pub left: LeftTimes,
    /// Damage hides which blocks are in use.
    pub read_only: bool,
    pub report: OpenReport,
}

/// Reads the inode table's own inode.
pub(super) fn load_table_inode<M: Media>(core: &Core<M>) -> Result<Inode> {
    let slot = log::block_addr(Block(TABLE_BLOCK));
    let inode = inode::load(core, TABLE_INO, slot)?;
    let body = inode.body.read();
    let pages = body.size / BLOCK as u64;
    let written = |i: &super::index::PageIndex| {
        let mut runs = i.iter_runs(0);
        let end = runs.try_fold(0, |at, r| (r.page == at && !r.unwritten).then_some(at + r.count));
        end.is_some_and(|end| end as u64 == pages)
    };
    let fits = (TABLE_BLOCKS as u64..=u32::MAX as u64 / SLOTS_PER_BLOCK as u64).contains(&pages);
    let whole = fits && body.file().is_some_and(written);
    drop(body);
    if !whole {
        let owner = Owner { ino: TABLE_INO, generation: inode.generation, slot };
        return Err(log::damaged(&owner, "the inode table has holes"));
    }
    Ok(inode)
}
