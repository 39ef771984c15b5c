//! Copies that outlive the locks of their operation: orderless writes, and reads that block nobody (EasyIO §4.2, §4.3).
//!
//! **A write** hands its data to an engine, commits its record at once, with a [`Ticket`], and lets go of the inode. Who
//! wrote waits for the copy outside of all locks; so does, before it begins, whoever reads or writes what the copy
//! touches (level 2 of the locks: by range), and nobody else. Tickets of a lane are numbered; when copies have ended,
//! the lane's *completion word* on media is set to the number up to which all have, and only then is a write
//! acknowledged. Whoever sees a copy end stores the word, for all that ended before it: a device may leave the rest to
//! the CPU, or its stores in the caches (DDIO), and could not vouch for them.
//!
//! After a crash a record whose number the word has not reached did not happen, whatever follows it in its log:
//! `recover` skips it and writes down the mapping that holds instead. What follows never needs it:
//!
//! 1. What overlaps it waited, and so did every write and change of the mapping behind one that moves the end of file.
//! 2. The blocks that it replaces are free once it is done, not earlier.
//! 3. An epoch is named as settled once the copies of its writes are done. So words decide about the last epochs alone.
//! 4. A log is not cleaned while a copy of its inode is under way: a copy of a record would count by itself.
//! 5. A file that loses its last name or descriptor keeps its blocks and its number until its copies are over: who sees
//!    the last of them over frees those, and nobody waits.
//!
//! **A read** finds its blocks under the inode's lock and copies after it. What is freed meanwhile is reused once the
//! reads that were under way have ended; nothing that they read is stored in place: it is copied on write.
//!
//! Whoever waits may end what it waits for; in a uthread others run meanwhile (`wait`).

mod future;
mod lent;
mod reads;
mod room;
mod syncs;
mod ticket;

use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Wake, Waker};
use std::time::Instant;

use crossbeam_utils::Backoff;
use smallvec::SmallVec;

use super::format::*;
use super::index::{MappedRun, Mapping};
use super::log::Batch;
use super::statline::Changing;
use super::write::{WriteFields, write_records};
use super::*;
use crate::media::Fault;
use crate::mover::engine_port::RawTransfer;
use crate::mover::flight::Flight;
use crate::sync::primitive;
use crate::wait::{self, Bell, Ending, Holding, Seat, Seen};
pub use future::{Syncing, Transferring};
pub use lent::{Lent, LentRoom};
pub use reads::Reads;
pub use room::Tries;
pub(super) use room::{is_put_off, put_off, put_off_with_a_part};
pub(super) use syncs::Syncer;
pub use ticket::{ReadTicket, WriteTicket};

/// Pages of a file.
pub(super) type Pages = Range<u64>;

/// How far a write came.
pub type WriteStep<T> = Result<Step<T, Arc<WriteUnderWay>>>;
/// How far a read came.
pub type ReadStep<T> = Result<Step<T, Arc<ReadUnderWay>>>;

/// Lanes of copies that nobody holds back; class bandwidth has those from there on.
const LANES_OF_OTHERS: usize = LANES - 8;

/// How far an operation came that may have to wait.
pub enum Step<T, W> {
    Done(T),
    /// It is done once this copy has ended.
    UnderWay(T, W),
    /// Nothing was done: it is to be tried again once this copy has ended.
    Blocked(Arc<WriteUnderWay>),
}

/// A copy that was handed over.
struct Copy {
    /// None once it has ended.
    flight: Mutex<Option<Flight>>,
    ended: AtomicBool,
    fault: Mutex<Option<Fault>>,
    /// When that is expected, if anybody knows.
    due: Option<Instant>,
    /// Rings when its engine is through, where that tells, and when all is done that was waited for.
    bell: Arc<Through>,
    /// Its place at the engine's bells.
    seat: Seat,
    /// Whether the engine tells.
    rings: bool,
    /// Its operation is accounted for, and has not waited yet.
    watched: AtomicBool,
    /// Pieces of it were held back when it was handed over: whoever looks hands them over.
    in_pieces: bool,
}

/// What an engine wakes.
#[derive(Default)]
struct Through(Bell);

impl Wake for Through {
    fn wake(self: Arc<Self>) {
        self.0.ring();
    }
}

impl Copy {
    /// See [`Flight::held_back`]. None also while somebody else is at it.
    fn held_back(&self) -> Option<usize> {
        self.flight.try_lock()?.as_ref()?.held_back()
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// Something that ends when `look` says so.
struct Ends<'a, F: Fn() -> bool> {
    copy: &'a Copy,
    look: F,
}

impl<F: Fn() -> bool> Ending for Ends<'_, F> {
    fn look(&self) -> bool {
        (self.look)()
    }

    fn bell(&self) -> Option<&Bell> {
        self.copy.rings.then_some(&self.copy.bell.0)
    }
}

/// A write whose copy is under way, or was.
pub struct WriteUnderWay {
    /// Until it is over.
    inode: Mutex<Option<Arc<Inode>>>,
    /// That the copy touches.
    pages: Pages,
    /// Those that it mapped anew.
    mapped: SmallVec<[Extent; 1]>,
    /// It moved the end of file: from there.
    grew_from: Option<u64>,
    ticket: Ticket,
    epoch: u64,
    reuse: Option<u64>,
    /// What those were; what is missing was a hole.
    before: SmallVec<[MappedRun; 1]>,
    /// The file's times before it, and the next record of its log after it: they come back where nothing else has followed.
    times: (u64, u64),
    next: u32,
    copy: Copy,
    /// The lane's word has reached it, or it failed.
    over: AtomicBool,
    failed: AtomicBool,
    taken_back: AtomicBool,
}

impl WriteUnderWay {
    #[inline]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn overlaps(&self, pages: &Pages) -> bool {
        self.pages.start < pages.end && pages.start < self.pages.end
    }
}

/// A read whose copy is under way, or was.
pub struct ReadUnderWay {
    number: u64,
    ino: u32,
    pages: Pages,
    copy: Copy,
}

/// What an operation needs of the writes under way in its file.
pub(super) enum Needs {
    /// That none touches these pages or moves the end of file.
    PagesAndEnd(Pages),
    /// That there are none.
    None,
}

/// The writes of a file whose copies are under way. Under its lock.
#[derive(Default)]
#[allow(clippy::box_collection, reason = "two words in each of a million inodes that have none")]
pub struct Writes(Option<Box<Vec<Arc<WriteUnderWay>>>>);

impl Writes {
    /// Of a file that is only read: a write that touches these pages.
    #[inline]
    pub(super) fn touching(&self, pages: impl FnOnce() -> Pages) -> Option<Arc<WriteUnderWay>> {
        let writes = self.0.as_ref()?;
        let pages = pages();
        writes.iter().find(|write| write.overlaps(&pages) && !write.is_over()).cloned()
    }

    /// One to be waited for.
    #[inline]
    pub(super) fn in_the_way(&mut self, needs: impl FnOnce() -> Needs) -> Option<Arc<WriteUnderWay>> {
        if !self.any() {
            return None;
        }
        let needs = needs();
        let meets = |write: &Arc<WriteUnderWay>| match &needs {
            Needs::PagesAndEnd(pages) => write.grew_from.is_some() || write.overlaps(pages),
            Needs::None => true,
        };
        self.0.iter().flat_map(|writes| writes.iter()).find(|write| meets(write)).cloned()
    }

    /// Whether there are any.
    #[inline]
    pub(super) fn any(&mut self) -> bool {
        let Some(writes) = &mut self.0 else { return false };
        writes.retain(|write| !write.is_over());
        if writes.is_empty() {
            self.0 = None;
        }
        self.0.is_some()
    }

    fn all(&self) -> Vec<Arc<WriteUnderWay>> {
        self.0.as_ref().map_or_else(Vec::new, |writes| writes.to_vec())
    }

    fn add(&mut self, write: Arc<WriteUnderWay>) {
        self.0.get_or_insert_default().push(write);
    }
}

/// Writes in the order of their numbers.
#[derive(Default)]
struct Lane {
    /// The last number that was given.
    last: u64,
    under_way: VecDeque<Arc<WriteUnderWay>>,
}

/// All copies under way of a file system.
pub(super) struct Copies {
    lanes: Box<[CachePadded<Mutex<Lane>>]>,
    writes: AtomicU64,
    reads: Reads,
    /// There was one in this mount.
    ever: AtomicBool,
    /// A write failed after its record was committed: some inode has to tell.
    lost: AtomicBool,
}

impl Default for Copies {
    fn default() -> Copies {
        Copies {
            lanes: (0..LANES).map(|_| CachePadded::default()).collect(),
            writes: AtomicU64::new(0),
            reads: Reads::default(),
            ever: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }
    }
}

impl Copies {
    pub(super) fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Whether blocks will be free once copies have ended.
    pub(super) fn keep_blocks(&self) -> bool {
        self.writes.load(Ordering::Acquire) > 0 || self.reads.any()
    }

    /// Whether there were any, which may have ended since somebody found no block free.
    pub(super) fn kept_blocks(&self) -> bool {
        self.ever.load(Ordering::Relaxed)
    }
}

/// The parts of a write or read that engines are to copy.
pub(super) type Parts = SmallVec<[RawTransfer; 2]>;

/// What a write that was handed over is about to commit.
pub(super) struct Commit<'a, 'w> {
    pub pages: Pages,
    pub extents: &'a [Extent],
    /// All but the ticket.
    pub fields: WriteFields,
    pub watch: &'a mut Watch<'w>,
}

impl<M: Media> Fs<M> {
    // -----------------------------------------------------------------------------------------------
    // Handing over

    /// Hands the parts of a write over: they are parts of bytes that were [`Lent`].
    /// `waits`: the caller waits at once, and does its share.
    pub(super) fn hand_over(&self, engine: Via, parts: &Parts, waits: bool) -> Flight {
        // SAFETY: the parts are of lent bytes, which outlive the copy: the flight ends in `end_copy`, which all
        // who wait for it call, or in `abort_copy`, with this mover and these media.
        unsafe { self.core.mover.begin(&self.core.media, engine, parts, false, waits) }
    }

    /// Ends a flight here and now.
    pub(super) fn abort_copy(&self, mut flight: Flight) -> Result<()> {
        // SAFETY: begun by `hand_over`.
        let ended = self.core.media.watch(|media| unsafe { self.core.mover.end(media, &mut flight) });
        Ok(ended?)
    }

    fn copy_has_ended(&self, flight: &mut Flight) -> bool {
        // SAFETY: begun by `hand_over`, with this mover and these media; the bytes that were lent outlive it.
        unsafe { self.core.mover.has_ended(&self.core.media, flight) }
    }

    /// Others may wait for it from now on.
    fn share(&self, flight: Flight, watched: bool) -> Copy {
        let in_pieces = flight.held_back().is_some();
        Copy {
            due: flight.due(),
            rings: self.core.mover.rings(&flight),
            flight: Mutex::new(Some(flight)),
            ended: AtomicBool::new(false),
            fault: Mutex::default(),
            bell: Arc::default(),
            seat: Seat::new(),
            watched: AtomicBool::new(watched),
            in_pieces,
        }
    }

    /// Commits a write whose copy is under way, and notes it in the body; `pending` is what it stored itself. Fails with
    /// the copy ended.
    pub(super) fn commit_under_way(
        &self,
        node: &Node,
        body: &mut Body,
        guard: &epoch::Guard,
        (flight, pending): (Flight, Flushed),
        Commit { pages, extents, mut fields, watch }: Commit,
    ) -> Result<Arc<WriteUnderWay>> {
        watch.did(Phase::Copy);
        let inode = &node.inode;
        let before = runs_of(body, extents);
        let times = (body.mtime, body.ctime);
        let grew_from = (fields.size > body.size).then_some(body.size);
        let (region, channel) = flight.channel();
        let copies = &self.core.copies;
        let mut lane = None;
        // Of each channel and each thread one of its own, as far as there are so many: nobody waits for others' copies.
        // And nobody behind what is held back.
        let first = 7 * (region + crate::sync::thread::slot() as usize) + channel;
        let lanes = |of: Range<usize>| (0..of.len()).map(move |n| of.start + (first + n) % of.len());
        let (held_back, others) = (lanes(LANES_OF_OTHERS..LANES), lanes(0..LANES_OF_OTHERS));
        let lanes = match flight.is_of_bandwidth() {
            true => held_back.chain(others),
            false => others.chain(held_back),
        };
        for number in lanes {
            let state = copies.lanes[number].lock();
            if state.last < TICKET_MAX {
                lane = Some((number, state));
                break;
            }
        }
        let Some((number, mut lane)) = lane else {
            self.abort_copy(flight)?;
            return Err(Error::message(
                libc::EOVERFLOW,
                "offload::commit",
                "the pool has given its engines all copies that it can number; copy its files to a new pool",
            ));
        };
        let ticket = Ticket { lane: number as u16, seq: lane.last + 1 };
        fields.start = ticket.pack();
        fields.flags |= field::write::OFFLOADED;
        let mut batch = Batch::new();
        write_records(&mut batch, extents, &fields);
        if let Err(e) = self.commit(inode, body, &mut batch, guard, Class::Data, pending) {
            drop(lane);
            // What it copied is nobody's, well or not.
            let _ = self.abort_copy(flight);
            return Err(e);
        }
        let write = Arc::new(WriteUnderWay {
            inode: Mutex::new(Some(inode.clone())),
            pages,
            mapped: SmallVec::from_slice(extents),
            grew_from,
            ticket,
            epoch: guard.epoch(),
            reuse: self.core.reuse_after(guard),
            before,
            times,
            next: body.log.seq(),
            copy: self.share(flight, watch.is_on()),
            over: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            taken_back: AtomicBool::new(false),
        });
        lane.last = ticket.seq;
        lane.under_way.push_back(write.clone());
        copies.writes.fetch_add(1, Ordering::Relaxed);
        copies.ever.store(true, Ordering::Relaxed);
        drop(lane);
        body.writes.add(write.clone());
        Ok(write)
    }

    /// Notes a read whose copy is under way; `None` where it was waited for, because the pool is being closed. Under the inode's lock.
    pub(super) fn read_under_way(
        &self,
        ino: u32,
        pages: Pages,
        flight: Flight,
        watched: bool,
    ) -> Result<Option<Arc<ReadUnderWay>>> {
        self.core.copies.ever.store(true, Ordering::Relaxed);
        match self.core.copies.reads.begin(ino, pages, self.share(flight, watched)) {
            Ok(read) => Ok(Some(read)),
            Err(copy) => {
                self.end_copy(&copy);
                let fault = copy.fault.lock().take();
                fault.map_or(Ok(None), |fault| Err(fault.into()))
            }
        }
    }

    // -----------------------------------------------------------------------------------------------
    // Ending

    /// Waits for an engine, if it is not through.
    fn end_copy(&self, copy: &Copy) {
        self.end_seen(copy, None);
    }

    /// The same for who has waited for it, and how he saw its end.
    fn end_seen(&self, copy: &Copy, seen: Option<Seen>) {
        let mut flight = copy.flight.lock();
        let Some(under_way) = &mut *flight else { return };
        if let Some(seen) = seen {
            under_way.was_seen(seen);
        }
        // SAFETY: begun by `hand_over`.
        let ended = self.core.media.watch(|media| unsafe { self.core.mover.end(media, under_way) });
        if let Err(fault) = ended {
            *copy.fault.lock() = Some(fault);
        }
        *flight = None;
        copy.ended.store(true, Ordering::Release);
        drop(flight);
        // Who looked meanwhile found it locked.
        copy.bell.0.ring();
    }

    /// Whether its engine is through with a copy; has the engine tell otherwise.
    fn is_through(&self, copy: &Copy) -> bool {
        if copy.has_ended() {
            return true;
        }
        // Who has the lock waits for the engine.
        let Some(mut flight) = copy.flight.try_lock() else { return false };
        flight.as_mut().is_none_or(|flight| {
            self.copy_has_ended(flight)
                || copy.rings && {
                    self.core.mover.listen(flight, &copy.seat, &Waker::from(copy.bell.clone()));
                    // It may have rung before.
                    self.copy_has_ended(flight)
                }
        })
    }

    /// Whether a copy has ended; ends it if its engine is through, and has the engine tell otherwise.
    fn try_end_copy(&self, copy: &Copy) -> bool {
        let through = self.is_through(copy);
        if through {
            self.end_copy(copy);
        }
        through
    }

    /// Ends the copy of a write; what an engine and the CPU could not store is taken back.
    fn land(&self, write: &Arc<WriteUnderWay>) {
        self.end_copy(&write.copy);
        let fault = *write.copy.fault.lock();
        if let Some(fault) = fault
            && !write.failed.swap(true, Ordering::AcqRel)
        {
            self.take_back(write, fault);
        }
    }

    /// Returns once a write is over; waits for its engine, and for those before it in its lane.
    pub(super) fn finish(&self, write: &Arc<WriteUnderWay>) {
        let backoff = Backoff::new();
        while !write.is_over() {
            self.land(write);
            let lane = write.ticket.lane as usize;
            let first = self.core.copies.lanes[lane].lock().under_way.front().cloned();
            if let Some(first) = first {
                self.land(&first);
            }
            self.advance(lane);
            if !write.is_over() {
                primitive::wait(&backoff); // somebody else is just about to say so
            }
        }
    }

    /// Stores a lane's completion word for what has ended at its front; whether there was anything.
    fn advance(&self, lane: usize) -> bool {
        // A close waits until what this frees is free.
        let _inside = self.core.epochs.enter();
        let mut ended: SmallVec<[Arc<WriteUnderWay>; 4]> = SmallVec::new();
        {
            let mut state = self.core.copies.lanes[lane].lock();
            let is_settled = |write: &mut Arc<WriteUnderWay>| {
                write.copy.has_ended()
                    && (write.copy.fault.lock().is_none() || write.taken_back.load(Ordering::Acquire))
            };
            while let Some(write) = state.under_way.pop_front_if(is_settled) {
                ended.push(write);
            }
            if let Some(last) = ended.last()
                && !self.core.failed.load(Ordering::Acquire)
            {
                self.complete(last.ticket);
            }
        }
        let poisoned = self.core.failed.load(Ordering::Acquire);
        for write in &ended {
            if poisoned {
                write.failed.store(true, Ordering::Release);
            } else if !write.failed.load(Ordering::Acquire) {
                // Reserved blocks were written where they are.
                for run in write.before.iter().filter(|run| !run.unwritten) {
                    self.core.free(Run { start: run.block, count: run.count }, write.reuse);
                }
            }
            let inode = write.inode.lock().take();
            // Sequentially consistent: either who ends the file sees that this is over, or this sees that the file has ended.
            write.over.store(true, Ordering::SeqCst);
            inode.into_iter().for_each(|inode| self.reclaim_if_unused(&inode));
            // Not before: as long as there are any, who finds no block free waits for them.
            self.core.copies.writes.fetch_sub(1, Ordering::Release);
            write.copy.bell.0.ring();
        }
        !ended.is_empty()
    }

    /// Makes durable that all copies of a lane up to this one are done.
    fn complete(&self, ticket: Ticket) {
        let lane = ticket.lane as usize;
        let word = pack_completion(lane, ticket.seq);
        match self.core.media.store64(completion_addr(lane), word) {
            Ok(dirty) => {
                self.core.fence(self.core.media.flush(dirty));
            }
            Err(fault) => self.core.poison(&fault.into()),
        }
    }

    /// The bytes of a write could not be stored: the file is what it was, and says so at the next fsync.
    #[cold]
    fn take_back(&self, write: &WriteUnderWay, fault: Fault) {
        let inode = write.inode.lock().clone().expect("a write that is not over has its inode");
        let inode = &*inode;
        let mut body = self.table.change(inode);
        let guard = self.core.epochs.enter();
        if !body.dead {
            let restored = self.restore(inode, &mut body, &guard, write);
            if let Err(e) = restored {
                self.core.poison(&e);
            }
            let fault = Error::from(fault);
            tracing::error!("inode {}: a write of pages {:?} failed: {fault}", inode.ino.0, write.pages);
        }
        drop((guard, body));
        inode.lost.store(true, Ordering::Release);
        self.core.copies.lost.store(true, Ordering::Release);
        write.taken_back.store(true, Ordering::Release);
    }

    fn restore(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        write: &WriteUnderWay,
    ) -> Result<()> {
        let mut freed: SmallVec<[Run; 2]> = SmallVec::new();
        let index = body.file_mut();
        for e in &write.mapped {
            let (mut at, end) = (e.page, e.page + e.count);
            for run in write.before.iter().filter(|run| (e.page..end).contains(&run.page)) {
                index.clear(at, run.page - at, &mut |old, _| freed.push(old));
                index.set_run(run.page, run.count, run.block, run.unwritten, &mut |old, _| freed.push(old));
                at = run.page + run.count;
            }
            index.clear(at, end - at, &mut |old, _| freed.push(old));
        }
        if let Some(size) = write.grew_from {
            // What the last block holds again may be read still, since before the write moved it.
            (body.size, body.tail_shared) = (size, !size.is_multiple_of(BLOCK as u64));
        }
        if body.log.seq() == write.next {
            body.mtime = write.times.0;
            // A link, rename or unlink stands in no record of its own.
            if !inode.ctime_ahead.load(Ordering::Relaxed) {
                body.ctime = write.times.1;
            }
        }
        // A replay forgets redo records of pages that the write had, and does not have them again for these: so what they
        // stored is written back.
        let pending = self.write_back_redone(body, None);
        let mut batch = Batch::new();
        restoring_records(body, write.mapped.iter().map(pages_of), &mut batch);
        body.attr_record(inode.atime.load(Ordering::Relaxed), 0, &mut batch);
        self.commit(inode, body, &mut batch, guard, Class::Last, pending)?;
        freed.into_iter().for_each(|run| self.core.free(run, write.reuse));
        Ok(())
    }

    // -----------------------------------------------------------------------------------------------
    // Waiting

    /// Writes by `begin`, as often as something is in the way, and waits until it is done.
    #[inline]
    pub(super) fn write_and_wait<T>(
        &self,
        src: &[u8],
        mut begin: impl FnMut(Lent) -> WriteStep<T>,
    ) -> Result<T> {
        let mut tries = Tries::new();
        loop {
            // SAFETY: borrowed until this function returns, which is after the copy has ended: `Landing` sees to it
            // where waiting panics.
            let lent = unsafe { Lent::new(src) }.waiting(true);
            let Some(step) = tries.attempt(|| begin(lent)) else {
                self.wait_for_room();
                continue;
            };
            match step? {
                Step::Done(done) => return Ok(done),
                Step::Blocked(write) => self.wait_until_over(&write),
                Step::UnderWay(done, write) => {
                    let landing = Landing(|| self.end_copy(&write.copy));
                    let waited = self.wait_for_write(&write);
                    drop(landing);
                    return waited.map(|()| done);
                }
            }
        }
    }

    /// The same for a read.
    #[inline]
    pub(super) fn read_and_wait<T>(
        &self,
        dst: &mut [u8],
        mut begin: impl FnMut(LentRoom) -> ReadStep<T>,
    ) -> Result<T> {
        loop {
            // SAFETY: as for writes; `dst` is not used until then.
            match begin(unsafe { LentRoom::new(dst) }.waiting(true))? {
                Step::Done(done) => return Ok(done),
                Step::Blocked(write) => self.wait_until_over(&write),
                Step::UnderWay(done, read) => {
                    let landing = Landing(|| self.end_copy(&read.copy));
                    let waited = self.wait_for_read(&read);
                    drop(landing);
                    return waited.map(|()| done);
                }
            }
        }
    }

    /// Waits until a write is done, and durable as far as the domain goes. The caller holds nothing of the file system.
    /// EIO where it was not: the file is then what it was. Again and again, and on any thread: the answer stays.
    pub fn wait_for_write(&self, write: &Arc<WriteUnderWay>) -> Result<()> {
        self.accounted(Op::Write, &write.copy, || self.wait_until_over(write));
        if write.failed.load(Ordering::Acquire) {
            self.core.check_alive()?;
            return Err(Error::message(
                libc::EIO,
                "offload::wait",
                "what was written could not be stored: media is bad there; the file is as it was before",
            ));
        }
        Ok(())
    }

    /// As [`wait_for_write`](Fs::wait_for_write), however it ends: for who wants to touch the same pages.
    pub fn wait_until_over(&self, write: &Arc<WriteUnderWay>) {
        self.climb(&write.copy);
        while !self.is_over(write) {
            let next = self.next_to_end(write);
            self.climb(&next.copy);
            // Somebody else may be about to advance the lane, or take it back; then its bell rings.
            let look = || self.is_over(&next);
            wait::until(&Ends { copy: &next.copy, look }, None, Holding::Nothing);
        }
        self.finish(write);
    }

    /// What keeps a write from being over whose copy has ended: the first of its lane, for which nobody else may wait; at
    /// last it is that itself.
    fn next_to_end(&self, write: &Arc<WriteUnderWay>) -> Arc<WriteUnderWay> {
        let lane = self.core.copies.lanes[write.ticket.lane as usize].lock();
        // One that came later is first where this one has just left the lane.
        let first = lane.under_way.front().filter(|first| first.ticket.seq < write.ticket.seq);
        first.unwrap_or(write).clone()
    }

    /// Whether it is; ends what engines are through with.
    fn is_over(&self, write: &Arc<WriteUnderWay>) -> bool {
        write.is_over()
            || self.try_end_copy(&write.copy) && {
                self.poll_lane(write.ticket.lane as usize);
                write.is_over()
            }
    }

    /// Whether it is done, or failed: then [`wait_for_write`](Fs::wait_for_write) waits for no engine. May copy what an
    /// engine left undone.
    pub fn write_has_ended(&self, write: &Arc<WriteUnderWay>) -> bool {
        self.is_over(write)
    }

    /// The same of a read.
    pub fn read_has_ended(&self, read: &ReadUnderWay) -> bool {
        let ended = self.try_end_copy(&read.copy);
        if ended {
            self.end_read(read); // nobody need ask again
        }
        ended
    }

    /// Waits until a read has all its bytes. The caller holds nothing of the file system. EIO for bad media.
    pub fn wait_for_read(&self, read: &ReadUnderWay) -> Result<()> {
        self.accounted(Op::Read, &read.copy, || self.climb(&read.copy));
        self.end_read(read);
        read.copy.fault.lock().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Waits for a copy of one's own: that is part of the operation, if that is accounted for. Once.
    fn accounted(&self, op: Op, copy: &Copy, wait: impl FnOnce()) {
        match copy.watched.swap(false, Ordering::Relaxed) {
            true => self.core.ledger.waiting(op, wait),
            false => wait(),
        }
    }

    /// Waits for a copy as the ladder has it, and ends it. A thread of its own helps where an engine lets it.
    fn climb(&self, copy: &Copy) {
        let look = || self.is_through(copy);
        if !wait::lets_others_run()
            && let Some(flight) = copy.flight.try_lock()
            && let Some(flight) = &*flight
        {
            self.core.mover.help(flight);
        }
        while copy.in_pieces
            && let Some(before) = copy.held_back()
        {
            let goes_on = || look() || copy.held_back() != Some(before);
            wait::until(&Ends { copy, look: goes_on }, None, Holding::Nothing);
        }
        let seen = wait::until(&Ends { copy, look }, copy.due, Holding::Nothing);
        // Who came late knows less of its end than who looked before.
        self.end_seen(copy, Some(seen).filter(|seen| *seen != Seen::AtOnce));
    }

    fn end_read(&self, read: &ReadUnderWay) {
        // As in `advance`.
        let _inside = self.core.epochs.enter();
        // Those that began since cannot be of them: nothing maps what was freed.
        for (run, reuse) in self.core.copies.reads.end(read) {
            self.core.free_unread(run, reuse);
        }
    }

    /// Ends what engines are through with, at the front of a lane.
    fn poll_lane(&self, lane: usize) {
        loop {
            let first = self.core.copies.lanes[lane].lock().under_way.front().cloned();
            let Some(first) = first.filter(|first| self.try_end_copy(&first.copy)) else { return };
            self.land(&first);
            // And those behind it that have ended, too: one word is for all.
            let behind: SmallVec<[_; 8]> =
                self.core.copies.lanes[lane].lock().under_way.iter().skip(1).take(8).cloned().collect();
            for write in behind.iter().take_while(|write| self.try_end_copy(&write.copy)) {
                self.land(write);
            }
            // Somebody else may be taking the first back.
            if !self.advance(lane) {
                return;
            }
        }
    }

    /// Waits for all writes of this epoch and of those before.
    pub(super) fn finish_writes(&self, epoch: u64) {
        if self.core.copies.writes.load(Ordering::Acquire) == 0 {
            return;
        }
        for lane in &self.core.copies.lanes {
            let under_way: Vec<_> =
                lane.lock().under_way.iter().filter(|w| w.epoch <= epoch).cloned().collect();
            under_way.iter().for_each(|write| self.finish(write));
        }
    }

    /// Whether any is under way of this epoch or of those before.
    pub(super) fn has_writes_of(&self, epoch: u64) -> bool {
        let of = |lane: &CachePadded<Mutex<Lane>>| lane.lock().under_way.iter().any(|w| w.epoch <= epoch);
        self.has_writes_under_way() && self.core.copies.lanes.iter().any(of)
    }

    /// Engines' reads are waited for from now on before they return.
    pub(super) fn begin_no_more_reads(&self) {
        self.core.copies.reads.begin_no_more();
    }

    /// Waits for all reads.
    pub(super) fn finish_reads(&self) {
        let reads = self.core.copies.reads.all();
        for read in reads {
            self.end_copy(&read.copy);
            self.end_read(&read);
        }
    }

    /// Waits until no write of this file is under way, and has its body. Meanwhile none is handed over: beside writers of
    /// which some copy is always under way this would never return.
    pub(super) fn change_at_rest<'a>(&'a self, inode: &'a Inode) -> Changing<'a> {
        let mut body = self.table.change(inode);
        if body.writes.any() {
            let _still = Still::of(inode);
            while let Some(write) = body.writes.in_the_way(|| Needs::None) {
                drop(body);
                self.finish(&write);
                body = self.table.change(inode);
            }
        }
        body
    }

    /// Waits for the writes of one file.
    pub(super) fn finish_writes_of(&self, inode: &Inode) {
        if self.core.copies.writes.load(Ordering::Acquire) == 0 {
            return;
        }
        let writes = inode.body.read().writes.all();
        writes.iter().for_each(|write| self.finish(write));
    }

    /// Those under way of one file.
    fn writes_of(&self, ino: Ino) -> Vec<Arc<WriteUnderWay>> {
        if self.core.copies.writes.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.inode(ino).map_or_else(|_| Vec::new(), |inode| inode.body.read().writes.all())
    }

    /// The same by number, where there are any at all.
    pub(super) fn finish_writes_of_file(&self, ino: Ino) {
        if self.core.copies.writes.load(Ordering::Acquire) > 0
            && let Ok(inode) = self.inode(ino)
        {
            self.finish_writes_of(&inode);
        }
    }

    /// Returns once no copy that has begun uses bytes of a caller's any more. What became of each is told as ever.
    pub fn end_copying(&self) {
        for lane in &self.core.copies.lanes {
            let under_way: Vec<_> = lane.lock().under_way.iter().cloned().collect();
            under_way.iter().for_each(|write| self.end_copy(&write.copy));
        }
        self.core.copies.reads.all().iter().for_each(|read| self.end_copy(&read.copy));
    }

    /// Ends copies without acknowledging any: for an end that leaves all as a crash would.
    pub(super) fn end_copies(&self) {
        for lane in &self.core.copies.lanes {
            let under_way: Vec<_> = lane.lock().under_way.drain(..).collect();
            for write in under_way {
                self.end_copy(&write.copy);
                write.failed.store(true, Ordering::Release);
                write.inode.lock().take();
                write.over.store(true, Ordering::Release);
                write.copy.bell.0.ring();
            }
        }
        self.finish_reads();
    }

    /// Whether a write of this file failed after it was committed and nobody was told; once.
    pub(super) fn take_lost(&self, ino: Ino) -> bool {
        self.core.copies.lost.load(Ordering::Acquire)
            && self.inode(ino).is_ok_and(|inode| inode.lost.swap(false, Ordering::AcqRel))
    }

    /// Goes on with the numbers that the words say. A damaged word, of which recovery needs nothing any more, is
    /// written anew.
    pub(super) fn begin_lanes(&self) {
        for lane in 0..LANES {
            let word = match self.core.media.load64(completion_addr(lane)) {
                Ok(word) => word,
                Err(fault) => {
                    let fault = Error::from(fault);
                    tracing::warn!(
                        "completion word {lane} of the pool cannot be read, its lane is not used: {fault}"
                    );
                    self.core.copies.lanes[lane].lock().last = TICKET_MAX;
                    continue;
                }
            };
            let last = match unpack_completion(lane, word) {
                Some(last) => last,
                None if self.core.read_only => continue,
                None => {
                    tracing::warn!("completion word {lane} of the pool is damaged; it begins anew");
                    self.complete(Ticket { lane: lane as u16, seq: 0 });
                    0
                }
            };
            self.core.copies.lanes[lane].lock().last = last;
        }
    }
}

pub(super) fn pages_of(e: &Extent) -> Pages {
    e.page as u64..e.page as u64 + e.count as u64
}

/// What the pages of some extents are now.
fn runs_of(body: &Body, extents: &[Extent]) -> SmallVec<[MappedRun; 1]> {
    let index = body.file().expect("check_writable");
    let mut runs = SmallVec::new();
    for e in extents {
        let mut page = e.page;
        while page < e.page + e.count {
            let (mapping, count) = index.run_at(page, e.page + e.count - page);
            let (block, unwritten) = match mapping {
                Mapping::Hole => {
                    page += count;
                    continue;
                }
                Mapping::Written(block) => (block, false),
                Mapping::Unwritten(block) => (block, true),
            };
            runs.push(MappedRun { page, count, block, unwritten });
            page += count;
        }
    }
    runs
}

/// Records that say once more what these pages are, whatever the log said of them.
pub(super) fn restoring_records(body: &Body, ranges: impl Iterator<Item = Pages>, batch: &mut Batch) {
    let index = body.file().expect("only files have pages");
    let mut extents: [Vec<Extent>; 2] = Default::default();
    for pages in ranges {
        let mut page = pages.start as u32;
        while (page as u64) < pages.end {
            let (mapping, count) = index.run_at(page, (pages.end - page as u64) as u32);
            match mapping {
                Mapping::Hole => super::space::hole_record(batch, page, count, body.size, body.mtime),
                Mapping::Written(block) => extents[0].push(Extent { page, count, block }),
                Mapping::Unwritten(block) => extents[1].push(Extent { page, count, block }),
            }
            page += count;
        }
    }
    for (extents, flags) in extents.iter().zip([0, field::write::UNWRITTEN]) {
        if !extents.is_empty() {
            let flags = flags | field::write::MOVED;
            let fields = WriteFields { start: 0, len: 0, size: 0, mtime: 0, crc: None, flags };
            write_records(batch, extents, &fields);
        }
    }
}

/// Somebody waits for all writes of a file.
struct Still<'a>(&'a Inode);

impl Still<'_> {
    fn of(inode: &Inode) -> Still<'_> {
        inode.stills.fetch_add(1, Ordering::Relaxed);
        Still(inode)
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.0.stills.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Ends a copy in any case, before the bytes go that were lent to it.
struct Landing<F: Fn()>(F);

impl<F: Fn()> Drop for Landing<F> {
    fn drop(&mut self) {
        self.0();
    }
}
