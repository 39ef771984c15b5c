//! Lanes: where records go, and how they are settled.
//!
//! A lane is a ring of lines that one commit at a time writes to. Its records need no order among themselves; their
//! numbers order them all. A record that was applied has left stores in caches. They are written back under the next
//! fence of their lane, or by who **settles**: it waits until no commit with a number up to the highest one so far is
//! under way, writes back what they left, and then names that number in the state line. From then on their lines may
//! be used again. That takes two fences once in dozens of commits.
//!
//! On an ordinary file a sync takes the place of the fence; commits that come meanwhile share the next one.

use std::cell::Cell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use smallvec::SmallVec;

use super::Heap;
use super::format::{RecordHead, State, encode_record};
use crate::error::{Error, Result};
use crate::media::{Addr, Domain, Durable, Fault, Flushed, Media};
use crate::sync::primitive::atomic::{AtomicBool, AtomicU64, fence};
use crate::sync::primitive::thread_local;
use crate::sync::primitive::{Mutex, MutexGuard};
use crate::sync::thread;

thread_local! {
    /// See [`prefer`].
    static PREFERRED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// From now on this thread takes this lane and this shard, by number; none: by its own. For simulations, so that the
/// same run gives the same bytes.
pub fn prefer(number: Option<usize>) {
    PREFERRED.with(|preferred| preferred.set(number));
}

/// Which of so many is the calling thread's.
pub(super) fn own(count: usize) -> usize {
    PREFERRED.with(Cell::get).unwrap_or_else(|| thread::slot() as usize) % count
}

/// One ring.
pub(super) struct Lane {
    /// By line: the number of the record that it is part of.
    numbers: Box<[u64]>,
    /// The line of the next record.
    next: usize,
    /// Stored by the last record and not written back.
    applied: SmallVec<[(Addr, usize); 8]>,
}

/// Commits that share a sync.
#[derive(Default)]
pub(super) struct Group {
    /// Syncs begun.
    begun: AtomicU64,
    ended: Mutex<Ended>,
}

/// What became of the syncs.
#[derive(Default)]
struct Ended {
    /// The last one that went well.
    last: u64,
    /// One failed. The kernel says so once and then takes the pages for clean, so that the next sync would succeed
    /// without them: there is none.
    failed: bool,
}

impl Group {
    /// Everything that this thread stored before survives loss of power.
    #[track_caller]
    fn sync<M: Media>(&self, media: &M) -> std::io::Result<()> {
        // One that begins from now on: what was stored before is seen by whoever counts it later.
        fence(SeqCst);
        let wanted = self.begun.load(Acquire) + 1;
        let mut ended = self.ended.lock();
        if ended.failed {
            return Err(std::io::Error::from_raw_os_error(libc::EIO));
        }
        if ended.last >= wanted {
            return Ok(());
        }
        let this = self.begun.fetch_add(1, AcqRel) + 1;
        // Before the lock is let go: who waits for it stored before the sync that failed.
        media.sync().inspect_err(|_| ended.failed = true)?;
        ended.last = this;
        Ok(())
    }
}

/// A panic between a record's number and its last store leaves a record that is applied in part: it must not be settled.
/// Dropped before the lane is let go. (Whether the thread panics says nothing: another uthread's panic may wait meanwhile.)
pub(super) struct Unfinished<'h>(&'h AtomicBool);

impl Unfinished<'_> {
    /// All of the record is stored.
    pub fn finished(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.store(true, Release);
    }
}

impl Lane {
    /// `number` is settled.
    pub fn new(lines: u16, number: u64) -> Lane {
        Lane { numbers: vec![number; lines as usize].into(), next: 0, applied: SmallVec::new() }
    }

    /// The first of so many lines in a row, if all of them may be used.
    fn room(&self, lines: usize, settled: u64) -> Option<usize> {
        let first = if self.next + lines > self.numbers.len() { 0 } else { self.next };
        self.numbers[first..first + lines].iter().all(|&number| number <= settled).then_some(first)
    }

    /// A record stored so many bytes here.
    pub fn stored(&mut self, at: Addr, bytes: usize) {
        self.applied.push((at, bytes));
    }

    fn write_back<M: Media>(&self, media: &M) -> Result<Flushed, Fault> {
        let mut written = self.applied.iter().map(|&(at, bytes)| media.write_back(at, bytes));
        written.try_fold(Flushed::issued(), |all, more| Ok(all.and(more?)))
    }
}

impl<M: Media> Heap<M> {
    /// What was stored and flushed is durable. A failure is for ever: nobody knows what is on the media then.
    #[track_caller]
    pub(super) fn make_durable(&self, flushed: Flushed) -> Result<Durable> {
        let durable = self.media.fence(flushed);
        if self.media.domain() == Domain::PageCache {
            self.group.sync(&self.media).map_err(|e| self.fail(sync_failed(&e)))?;
        }
        Ok(durable)
    }

    /// From now on nothing is acknowledged.
    #[cold]
    pub(super) fn fail(&self, error: Error) -> Error {
        self.failed.store(true, Release);
        error.context("the heap refuses changes until it is opened again")
    }

    #[cold]
    pub(super) fn fault(&self, fault: Fault) -> Error {
        self.fail(fault.into())
    }

    #[inline]
    pub(super) fn usable(&self) -> Result<()> {
        if self.failed.load(Acquire) {
            let message =
                "the heap could not make something durable and refuses changes: close it and open it again";
            return Err(Error::message(libc::EIO, "heap::usable", message));
        }
        Ok(())
    }

    /// A lane with room for so many lines, and the first of them. Who has it is the only one that writes there.
    fn lane(&self, lines: usize) -> Result<(usize, MutexGuard<'_, Lane>, usize)> {
        let mine = own(self.lanes.len());
        loop {
            self.usable()?;
            let order = (mine..self.lanes.len()).chain(0..mine);
            let free = order.into_iter().find_map(|n| Some((n, self.lanes[n].try_lock()?)));
            let (number, lane) = free.unwrap_or_else(|| (mine, self.lanes[mine].lock()));
            let settled = match self.media.omits("a line is used again only once its record is settled") {
                true => u64::MAX,
                false => self.settled.load(Acquire),
            };
            if let Some(first) = lane.room(lines, settled) {
                return Ok((number, lane, first));
            }
            drop(lane);
            self.settle()?;
        }
    }

    /// Writes a record of these entries; when it returns they are durable. They are to be applied before the lane is
    /// let go, which the caller does last.
    pub(super) fn append(
        &self,
        entries: &[u64],
        lines: usize,
    ) -> Result<(MutexGuard<'_, Lane>, Durable, Unfinished<'_>)> {
        let (number, mut lane, first) = self.lane(lines)?;
        let unfinished = Unfinished(&self.failed);
        // Only with a lane locked: who settles finds all numbers below applied once it had every lane.
        let record = self.next.fetch_add(1, AcqRel);
        let head = RecordHead { lines, number: record, settled: self.settled.load(Acquire) };
        let at = self.layout.line(number, first);
        let words = encode_record(self.keys, at, head, entries);
        let written = lane.write_back(&self.media).map_err(|fault| self.fault(fault))?;
        let stored = self.media.store_lines(at, &words).map_err(|fault| self.fault(fault))?;
        let durable = self.make_durable(stored.and(written))?;
        lane.applied.clear();
        lane.numbers[first..first + lines].fill(record);
        lane.next = first + lines;
        Ok((lane, durable, unfinished))
    }

    /// Settles every record whose commit has ended: what they changed is on the media at its place.
    pub(super) fn settle(&self) -> Result<()> {
        self.usable()?;
        let mut state = self.state.lock();
        self.settle_as(&mut state, false)
    }

    /// As [`settle`](Heap::settle); `closed` says that this is the end.
    pub(super) fn settle_as(&self, state: &mut State, closed: bool) -> Result<()> {
        let last = self.next.load(Acquire) - 1;
        if last == state.settled && state.closed == closed {
            return Ok(());
        }
        let mut written = Flushed::issued();
        let omits = self.media.omits("who settles waits for every lane");
        for lane in &self.lanes {
            let held = if omits { lane.try_lock() } else { Some(lane.lock()) };
            let Some(mut lane) = held else { continue };
            written = written.and(lane.write_back(&self.media).map_err(|fault| self.fault(fault))?);
            lane.applied.clear();
        }
        self.usable()?;
        self.make_durable(written)?;
        let named = State { serial: state.serial + 1, settled: last, closed, ..*state };
        self.write_state(&named)?;
        *state = named;
        // Release: who uses a line again does it behind this.
        self.settled.store(last, Release);
        Ok(())
    }

    /// Both copies of a state line, durable on return; one, where the other is bad media.
    pub(super) fn write_state(&self, state: &State) -> Result<()> {
        let line = state.encode(self.keys);
        let stored = match self.layout.state(state.serial).map(|at| self.media.copy_nt(at, &line)) {
            [Ok(first), Ok(second)] => first.and(second),
            [Ok(one), Err(_)] | [Err(_), Ok(one)] => one,
            [Err(fault), Err(_)] => return Err(self.fault(fault)),
        };
        self.make_durable(stored)?;
        Ok(())
    }

    /// Whether some record would be applied again after a crash now.
    pub(super) fn is_unsettled(&self) -> bool {
        self.next.load(Acquire) - 1 > self.settled.load(Relaxed)
    }
}

fn sync_failed(e: &std::io::Error) -> Error {
    let message = format!("the heap's file cannot be synced: {e}");
    Error::message(e.raw_os_error().unwrap_or(libc::EIO), "heap::sync", message)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    use std::sync::{Arc, Barrier};

    use super::Group;
    use crate::media::Domain;
    use crate::runtime::{JoinHandle, Options, Runtime, spawn};
    use crate::sim::media::SimMedia;
    use crate::wsp::heap::{Change, FormatOptions, Heap, Shape};

    /// Who settles looks once it had every lane.
    #[test]
    fn a_panic_is_known_before_its_lane_is_free() {
        let shape = Some(Shape { lanes: 1, ring_lines: 8, roots: 1 });
        let options = FormatOptions { shape, identity: Some(1), ..FormatOptions::default() };
        for _ in 0..50 {
            let heap = Heap::format(SimMedia::new(vec![0; 256 << 10], Domain::Memory), &options).unwrap();
            let at = heap.reserve_offset(16).unwrap();
            let has_lane = Arc::new(Barrier::new(2));
            let waits = has_lane.clone();
            heap.media().record(Some(Box::new(move |_| {
                waits.wait();
                panic!("in the middle of a commit");
            })));
            std::thread::scope(|s| {
                s.spawn(|| {
                    has_lane.wait();
                    let lane = std::iter::repeat_with(|| heap.lanes[0].try_lock()).find_map(|lane| lane);
                    assert!(heap.failed.load(Acquire), "others take its record for applied");
                    drop(lane);
                });
                let publish = [Change::Publish { at, stored: 0 }];
                catch_unwind(AssertUnwindSafe(|| heap.commit(&publish))).unwrap_err();
            });
        }
    }

    /// One whose panic lets others run on its worker, as where it waits for a copy before its buffer goes.
    #[test]
    fn a_panic_of_another_uthread_is_no_panic_of_a_commit() {
        struct Waits(Option<JoinHandle<bool>>, Arc<AtomicBool>);
        impl Drop for Waits {
            fn drop(&mut self) {
                let commits = self.0.take().expect("it is dropped once");
                self.1.store(commits.join().unwrap_or(false), Relaxed);
            }
        }
        let heap = Heap::format(SimMedia::new(vec![0; 256 << 10], Domain::Memory), &FormatOptions::default());
        let heap = Box::new(heap.unwrap());
        let commits = move || {
            assert!(std::thread::panicking(), "the other one is in its panic");
            (0..2).all(|_| {
                let at = heap.reserve_offset(16).unwrap();
                heap.commit(&[Change::Publish { at, stored: 0 }]).is_ok()
            })
        };
        let committed = Arc::new(AtomicBool::new(false));
        let told = committed.clone();
        let panics = move || {
            let _waits = Waits(Some(spawn(commits).unwrap()), told);
            panic!("as the test wants it");
        };
        let runtime = Runtime::new(Options::default()).unwrap();
        drop(runtime.spawn(panics).unwrap());
        runtime.run(1).unwrap();
        assert!(committed.load(Relaxed), "the heap refuses changes");
    }

    /// The second one would succeed, without what the first one should have made durable.
    #[test]
    fn after_a_sync_that_failed_none_succeeds() {
        let (group, media) = (Group::default(), SimMedia::new(vec![0; 4096], Domain::PageCache));
        group.sync(&media).unwrap();
        media.fail_sync_once();
        assert!(group.sync(&media).is_err());
        assert!(group.sync(&media).is_err(), "what was lost is acknowledged");
    }
}
