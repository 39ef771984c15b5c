//! Threads of their own in front of each region, on its node; callers wait for them (efficient-pm §4, *workqueue*; OdinFS).
//!
//! To put a caller to sleep, to wake a thread and to wake the caller again costs more CPU time than a copy of 64 KiB
//! (`docs/decisions/0082-wait-ladder.md`). So **who waits helps**: a caller on the region's node that keeps its thread
//! copies its batch itself, as soon as fewer copies are under way than there may be. That is as good as a thread in all
//! that threads are for: no more copies at a time than the region bears, each of them from its own node. Threads do what
//! callers do not wait for ([`Engine::start`]), and what comes from other nodes. They poll for a moment before they sleep,
//! where batches have come so fast lately that this pays. Who copies its own overtakes batches that wait, for a moment
//! ([`OVERTAKEN_MAX`]); where the first of them has waited for longer, what comes goes behind them: so nobody is starved.
//!
//! **Invariants.**
//! 1. A slot belongs, in this order and to one at a time: to nobody (in `free`), to a caller that fills it, which keeps
//!    it until it starts it or helps (`Held`), to the queue (`Queued`), to whoever copies, worker or caller (`Begun`), and,
//!    once it has `Ended`, to whoever waits for it, on any thread.
//! 2. A batch is looked at only while its caller is between `submit` and `wait`: so the bytes are there, and so is media.
//! 3. Stores are fenced by the thread that made them before it reports: a fence is for the own thread's stores only.
//! 4. Who copies, worker or caller, has one of as many `places` as there may be workers. When one of them has ended and its
//!    turn is over (`turns`), it wakes a caller that waits for a place; and if batches are queued, it goes on with them or
//!    wakes a worker.
//!
//! Threads begin at the first copy that is for them: a process that forks after opening a pool (the mount server, into the
//! background) has them where it needs them. Until then no batch is ever queued, and callers come and go without the lock;
//! one that goes just then sees no batch, but the threads that begin see its place.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::completion::Completion;
use super::engine_port::{
    Awaited, Capability, Durability, Engine, Place, RawTransfer, Refused, Ticket, copy_batch,
};
use super::manager::Channels;
use super::node::{self, Node, free_thread};
use super::places::{Entry, Places, Taken};
use super::turns::{Turns, sleep_for};
use crate::account;
use crate::media::Media;
use crate::sync::signals::kept_off;
use crate::wait::{Bell, Ending, Holding, POLL_MAX, poll_for, until};

/// Batches in front of one region; more are refused.
const SLOTS: usize = 128;
/// A worker's gap between batches counts as so much at most: so that it finds out soon when they come fast again.
const GAP_MAX: Duration = Duration::from_nanos(4 * POLL_MAX.as_nanos() as u64);

/// A batch that waits is overtaken by callers that help themselves for so long.
const OVERTAKEN_MAX: Duration = Duration::from_millis(1);

pub struct Delegate<M: Media> {
    regions: Box<[Arc<Queue<M>>]>,
    /// By region, from the first copy on that is for them.
    threads: Box<[OnceLock<Vec<JoinHandle<()>>>]>,
}

/// What callers and workers of one region share.
struct Queue<M: Media> {
    waiting: Mutex<Waiting>,
    /// Workers have something to look at: a batch that may be begun, or the end.
    ready: AtomicBool,
    /// Workers sleep here.
    bell: Bell,
    places: Places,
    /// Callers sleep here that want to copy, where as many do as may.
    freed: Bell,
    /// Workers that look for batches without pause, so that nobody has to wake one.
    polling: AtomicUsize,
    slots: Box<[Slot<M>]>,
    workers: usize,
    node: Option<Node>,
}

struct Waiting {
    /// And when each of them came.
    batches: VecDeque<(usize, Instant)>,
    free: Vec<usize>,
    suspended: bool,
    /// Batches were queued: there are threads, or will be.
    staffed: bool,
    closed: bool,
    /// Of callers that want to copy.
    turns: Turns,
}

/// Whose a slot is, as invariant 1 has it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Held,
    Queued,
    Begun,
    Ended,
}

struct Slot<M: Media> {
    /// A [`Stage`]; from `Held` on it changes under the queue's lock, but for the end.
    stage: AtomicU8,
    work: Mutex<Option<Work<M>>>,
    completion: Mutex<Option<Completion>>,
    /// Rung at its end.
    bell: Bell,
}

struct Work<M: Media> {
    media: *const M,
    batch: SmallVec<[RawTransfer; 4]>,
    crc: Option<u32>,
}

// SAFETY: `media` is shared with whoever copies for as long as invariant 2 says, and media can be shared.
unsafe impl<M: Media> Send for Work<M> {}

impl<M: Media> Slot<M> {
    fn is(&self, stage: Stage) -> bool {
        self.stage.load(Ordering::Acquire) == stage as u8
    }

    fn becomes(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Release);
    }

    /// Copies on this thread, which has begun it, and reports.
    fn copy(&self) {
        let work = self.work.lock().take().expect("a slot that is begun is filled");
        let copy = || {
            // SAFETY: by invariant 2 media and the bytes are there until this slot has ended.
            let (media, (completion, flushed)) = unsafe {
                let media = &*work.media;
                (media, copy_batch(media, &work.batch, work.crc))
            };
            media.fence(flushed);
            Completion { durability: Durability::OnCompletion, ..completion }
        };
        // What panics here panics again in the caller, which does what was not done.
        let completion = catch_unwind(AssertUnwindSafe(copy)).unwrap_or(Completion::failed());
        *self.completion.lock() = Some(completion);
        self.becomes(Stage::Ended);
        // From here on the slot is the caller's, who may have given it to another: whom this wakes too early looks
        // again.
        self.bell.ring();
    }
}

impl Waiting {
    /// Whether a batch that waits for workers has done so for long. Until then callers go before it that begin what is their
    /// own; from then on they go behind all that wait, or these would keep them out for as long as more of them come.
    fn is_late(&self) -> bool {
        self.batches.front().is_some_and(|(_, came)| came.elapsed() >= OVERTAKEN_MAX)
    }

    /// Whether a batch may be begun now, if there is a place.
    fn has_next(&self, places: &Places) -> bool {
        let may_begin = !self.suspended || self.closed;
        may_begin && !self.batches.is_empty() && places.free() > 0
    }
}

/// What a worker without work waits for.
impl<M: Media> Ending for Queue<M> {
    fn look(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.bell)
    }
}

/// A caller that sleeps until it has a place among those that copy, or is to go behind batches that wait; whoever sees a place
/// has it.
struct Sleeper<'a, M: Media> {
    queue: &'a Queue<M>,
    place: OnceLock<Option<Taken>>,
}

impl<M: Media> Ending for Sleeper<'_, M> {
    fn look(&self) -> bool {
        self.has_one(false)
    }

    fn look_awake(&self) -> bool {
        self.has_one(true)
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.queue.freed)
    }
}

impl<M: Media> Sleeper<'_, M> {
    fn has_one(&self, awake: bool) -> bool {
        let queue = self.queue;
        let mut waiting = queue.waiting.lock();
        let place = if waiting.is_late() {
            waiting.turns.sleeper_goes();
            None
        } else {
            let place = if waiting.suspended { None } else { queue.places.take() };
            let Some(place) = place else { return false };
            if !waiting.turns.lets_sleeper_in(queue.places.free() + 1, awake, Instant::now) {
                queue.places.give_back(place);
                return false;
            }
            Some(place)
        };
        queue.note(&waiting);
        self.place.set(place).expect("it looks no more once it knows");
        true
    }
}

impl<M: Media> Queue<M> {
    fn new(workers: usize, node: Option<Node>) -> Queue<M> {
        let slot = |_| Slot {
            stage: AtomicU8::new(Stage::Ended as u8),
            work: Mutex::new(None),
            completion: Mutex::new(None),
            bell: Bell::new(),
        };
        Queue {
            waiting: Mutex::new(Waiting {
                batches: VecDeque::with_capacity(SLOTS),
                free: (0..SLOTS).collect(),
                suspended: false,
                staffed: false,
                closed: false,
                turns: Turns::new(workers),
            }),
            ready: AtomicBool::new(false),
            bell: Bell::new(),
            places: Places::new(workers),
            freed: Bell::new(),
            polling: AtomicUsize::new(0),
            slots: (0..SLOTS).map(slot).collect(),
            workers,
            node,
        }
    }

    /// After each change of what workers and callers look at, under the lock.
    fn note(&self, waiting: &Waiting) {
        // First: a caller that goes without asking has given its place back by the time this returns.
        let entry = match (waiting.suspended, waiting.staffed) {
            (true, _) => Entry::Suspended,
            (_, true) => Entry::Asked,
            _ => Entry::ByTurns,
        };
        self.places.note(entry, &waiting.turns, Instant::now);
        let ended = waiting.closed && waiting.batches.is_empty();
        self.ready.store(ended || waiting.has_next(&self.places), Ordering::Release);
    }

    /// A batch that is the worker's from now on, if one may be begun, and when it came; or whether all is over.
    fn next(&self) -> Result<(usize, Taken, Instant), bool> {
        let mut waiting = self.waiting.lock();
        let place = if waiting.has_next(&self.places) { self.places.take() } else { None };
        let Some(place) = place else {
            self.note(&waiting);
            return Err(waiting.closed && waiting.batches.is_empty());
        };
        let (slot, came) = waiting.batches.pop_front().expect("there is one");
        self.slots[slot].becomes(Stage::Begun);
        self.note(&waiting);
        Ok((slot, place, came))
    }

    /// One copy less, of a caller or of a worker; how many batches wait to be begun.
    #[inline]
    fn leave(&self, place: Taken, by_caller: bool) -> usize {
        if self.places.give_back(place) { self.ask_who_is_next(by_caller) } else { 0 }
    }

    #[cold]
    fn ask_who_is_next(&self, by_caller: bool) -> usize {
        let mut waiting = self.waiting.lock();
        let queued = if waiting.has_next(&self.places) { waiting.batches.len() } else { 0 };
        let wakes = waiting.turns.wakes_one(by_caller, Instant::now);
        self.note(&waiting);
        drop(waiting);
        if let Some(wakes) = wakes {
            let one = self.freed.ring_one();
            let mut waiting = self.waiting.lock();
            waiting.turns.woke(wakes, one, Instant::now());
            self.note(&waiting);
        }
        queued
    }

    fn work(&self) {
        // How long there usually is nothing to do, as far as that is short; and since when there is nothing.
        let (mut gap, mut idle) = (GAP_MAX, None);
        loop {
            match self.next() {
                Ok((slot, place, came)) => {
                    if let Some(since) = idle.take() {
                        gap = (gap * 3 + came.saturating_duration_since(since).min(GAP_MAX)) / 4;
                    }
                    self.slots[slot].copy();
                    self.leave(place, false);
                }
                Err(true) => return,
                Err(false) => {
                    idle.get_or_insert_with(Instant::now);
                    self.rest(gap);
                }
            }
        }
    }

    /// Until there is something to do: polls, where that comes within what is worth it, and sleeps.
    fn rest(&self, gap: Duration) {
        if gap <= POLL_MAX {
            self.polling.fetch_add(1, Ordering::SeqCst);
            let found = poll_for(self, gap + POLL_MAX);
            self.polling.fetch_sub(1, Ordering::SeqCst);
            if found {
                return;
            }
        }
        until(self, None, Holding::Something);
    }

    /// Wakes a worker, where none looks anyway. Who stops looking looks once more after a fence, before it sleeps; so
    /// either sees the other.
    fn wake_one(&self, queued: usize) {
        fence(Ordering::SeqCst);
        if self.polling.load(Ordering::SeqCst) < queued {
            self.bell.ring_one();
        }
    }

    /// Hands a batch over to the workers that its caller has kept; how many are queued then.
    fn enqueue(&self, slot: usize) -> Option<usize> {
        let mut waiting = self.waiting.lock();
        if !self.slots[slot].is(Stage::Held) {
            return None;
        }
        self.slots[slot].becomes(Stage::Queued);
        waiting.batches.push_back((slot, Instant::now()));
        waiting.staffed = true;
        self.note(&waiting);
        Some(if waiting.has_next(&self.places) { waiting.batches.len() } else { 0 })
    }

    /// There is no worker, and none will be: what is queued fails, and its callers copy it.
    fn give_up(&self) {
        let queued = std::mem::take(&mut self.waiting.lock().batches);
        for slot in queued.into_iter().map(|(slot, _)| &self.slots[slot]) {
            drop(slot.work.lock().take());
            *slot.completion.lock() = Some(Completion::failed());
            slot.becomes(Stage::Ended);
            slot.bell.ring();
        }
    }

    /// Whether the calling thread is on another node than the region.
    fn is_elsewhere(&self) -> bool {
        let elsewhere = |node: &Node| node::current().is_some_and(|here| here != node.number);
        self.node.as_ref().is_some_and(elsewhere)
    }

    /// A place to copy this batch in, which nobody has begun, and which is the calling thread's from now on.
    fn take_back(&self, slot: usize) -> Option<Taken> {
        if self.is_elsewhere() {
            return None;
        }
        let mut waiting = self.waiting.lock();
        let place = match waiting.batches.front() {
            Some((first, _)) if *first == slot => {
                let place = if waiting.has_next(&self.places) { self.places.take()? } else { return None };
                waiting.batches.pop_front();
                place
            }
            _ => {
                let free = if waiting.suspended || waiting.is_late() { 0 } else { self.places.free() };
                let mine = self.slots[slot].is(Stage::Held) && waiting.turns.lets_in(free, Instant::now);
                if mine { self.places.take()? } else { return None }
            }
        };
        self.slots[slot].becomes(Stage::Begun);
        self.note(&waiting);
        Some(place)
    }

    /// Waits until the calling thread may copy what it has; none where that is to go behind batches that wait.
    #[inline]
    fn enter(&self) -> Option<Taken> {
        self.places.take_unasked().or_else(|| account::waiting(|| self.ask_for_a_place()))
    }

    #[cold]
    fn ask_for_a_place(&self) -> Option<Taken> {
        let mut waiting = self.waiting.lock();
        if waiting.is_late() {
            return None;
        }
        let free = if waiting.suspended { 0 } else { self.places.free() };
        // Whoever needs not ask may have been faster.
        if waiting.turns.lets_in(free, Instant::now)
            && let Some(place) = self.places.take()
        {
            self.note(&waiting);
            return Some(place);
        }
        let soon = waiting.turns.falls_asleep(Instant::now());
        self.note(&waiting);
        drop(waiting);
        let sleeper = Sleeper { queue: self, place: OnceLock::new() };
        sleep_for(&sleeper, soon);
        sleeper.place.into_inner().expect("it slept until it knew")
    }

    /// A caller's end of a copy: for who sleeps it does one more, which is cheaper than to wake a worker.
    #[inline]
    fn leave_helping(&self, place: Taken) {
        let mut queued = self.leave(place, true);
        if queued > 0
            && let Ok((slot, place, _)) = self.next()
        {
            self.slots[slot].copy();
            queued = self.leave(place, true);
        }
        if queued > 0 {
            self.wake_one(queued);
        }
    }
}

impl<M: Media> Delegate<M> {
    /// `workers` threads for each region, on the CPUs of its node where that is known.
    pub fn new(nodes: &[Option<Node>], workers: usize) -> Delegate<M> {
        Delegate {
            regions: nodes.iter().map(|node| Arc::new(Queue::new(workers.max(1), node.clone()))).collect(),
            threads: nodes.iter().map(|_| OnceLock::new()).collect(),
        }
    }

    /// The queue of a ticket's region, and its slot; none for one that had ended when it was submitted.
    fn place(&self, ticket: &Ticket) -> Option<(&Queue<M>, usize)> {
        match ticket.0 {
            Place::Slot { region, slot } => Some((&self.regions[region], slot)),
            Place::Ended(_) => None,
        }
    }

    /// Has the workers do what its caller does not do itself.
    fn hand_over(&self, ticket: &Ticket) {
        let Place::Slot { region, slot } = ticket.0 else { return };
        let queue = &self.regions[region];
        if !queue.slots[slot].is(Stage::Held) {
            return;
        }
        let Some(queued) = queue.enqueue(slot) else { return };
        if self.threads[region].get_or_init(|| self.start_threads(region)).is_empty() {
            // Nobody else will: the caller does what could not be begun.
            queue.give_up();
        }
        // Where as many copy as may, who ends first sees to it.
        if queued > 0 {
            queue.wake_one(queued);
        }
    }

    /// Threads for a region, as many as there can be.
    fn start_threads(&self, region: usize) -> Vec<JoinHandle<()>> {
        let mut threads = Vec::new();
        let workers = self.regions[region].workers;
        for n in 0..workers {
            let queue = self.regions[region].clone();
            let work = move || {
                match &queue.node {
                    Some(node) => node.keep_thread(),
                    None => free_thread(),
                }
                queue.work();
            };
            let thread = std::thread::Builder::new().name(format!("lode-copy-{region}-{n}"));
            match kept_off(|| thread.spawn(work)) {
                Ok(thread) => threads.push(thread),
                Err(e) => {
                    tracing::warn!("engine delegate: {n} of {workers} threads for region {region}: {e}");
                    break;
                }
            }
        }
        threads
    }
}

impl<M: Media> Engine<M> for Delegate<M> {
    fn capability(&self) -> Capability {
        Capability::of_threads()
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        region: usize,
        _channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let queue = &self.regions[region];
        let n = queue.waiting.lock().free.pop().ok_or(Refused::Full)?;
        let slot = &queue.slots[n];
        *slot.work.lock() = Some(Work { media, batch: SmallVec::from_slice(batch), crc });
        slot.becomes(Stage::Held);
        Ok(Ticket(Place::Slot { region, slot: n }))
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit_and_help(
        &self,
        media: &M,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let queue = &self.regions[region];
        if queue.is_elsewhere() {
            // SAFETY: the caller's.
            return unsafe { self.submit(media, region, channel, batch, crc) };
        }
        let Some(place) = queue.enter() else {
            // SAFETY: the caller's.
            let ticket = unsafe { self.submit(media, region, channel, batch, crc)? };
            self.hand_over(&ticket);
            return Ok(ticket);
        };
        // SAFETY: the caller vouches for the batch.
        let copied = catch_unwind(AssertUnwindSafe(|| unsafe { copy_batch(media, batch, crc) }));
        queue.leave_helping(place);
        let completion = copied.map_or_else(
            |_| Completion::failed(),
            |(completion, flushed)| {
                // By the mover's own, as the completion says.
                flushed.stood_for();
                completion
            },
        );
        Ok(Ticket::ended(completion))
    }

    fn start(&self, ticket: &Ticket) {
        self.hand_over(ticket);
    }

    fn help(&self, ticket: &Ticket) {
        let Some((queue, slot)) = self.place(ticket) else { return };
        let Some(place) = queue.take_back(slot) else { return self.hand_over(ticket) };
        queue.slots[slot].copy();
        queue.leave_helping(place);
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        // Who looks before anybody has begun does not wait for it.
        self.hand_over(ticket);
        self.place(ticket).is_none_or(|(queue, slot)| queue.slots[slot].is(Stage::Ended))
    }

    fn bell(&self, ticket: &Ticket) -> Option<&Bell> {
        self.place(ticket).map(|(queue, slot)| &queue.slots[slot].bell)
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        if let Some(completion) = ticket.completion() {
            return completion;
        }
        Engine::<M>::help(self, &ticket);
        until(&Awaited::<M>(self, &ticket), None, Holding::Something);
        let (queue, n) = self.place(&ticket).expect("it had not ended at once");
        let completion = queue.slots[n].completion.lock().take().expect("it has ended");
        queue.waiting.lock().free.push(n);
        completion
    }

    fn suspend(&self, region: usize) {
        let queue = &self.regions[region];
        let mut waiting = queue.waiting.lock();
        waiting.suspended = true;
        queue.note(&waiting);
    }

    fn resume(&self, region: usize) {
        let queue = &self.regions[region];
        let mut waiting = queue.waiting.lock();
        waiting.suspended = false;
        queue.note(&waiting);
        drop(waiting);
        queue.bell.ring();
        queue.freed.ring();
    }

    /// A queue of its own for each region.
    fn channels(&self, region: usize) -> Channels {
        Channels { group: region, count: 1, can_rest: false, bounds_itself: true }
    }
}

impl<M: Media> Drop for Delegate<M> {
    fn drop(&mut self) {
        for queue in &self.regions {
            let mut waiting = queue.waiting.lock();
            waiting.closed = true;
            queue.note(&waiting);
            drop(waiting);
            queue.bell.ring();
        }
        for thread in self.threads.iter_mut().filter_map(OnceLock::take).flatten() {
            if thread.join().is_err() {
                tracing::error!("a thread that copies panicked");
            }
        }
    }
}

#[cfg(all(test, not(any(shuttle, miri))))]
mod tests {
    use super::*;
    use crate::media::{Addr, Span, SpanOptions};
    use crate::mover::completion::Status;
    use crate::mover::engine_port::{Dram, Route};

    /// It would be kept out for as long as more batches come, holding its locks.
    #[test]
    fn who_finds_a_batch_that_has_waited_for_long_goes_behind_it() {
        let media = Span::memfd(1 << 20, &SpanOptions::default()).unwrap();
        let delegate = Delegate::new(&[None], 1);
        let queue = &delegate.regions[0];
        let bytes = vec![7; 4096];
        let part = || {
            let dram = Dram::From(bytes.as_ptr(), Route::PastCaches);
            [RawTransfer { at: Addr(0), dram, len: bytes.len() }]
        };
        // SAFETY: all of them are waited for below, before media and the bytes go.
        let helps = || unsafe { delegate.submit_and_help(&media, 0, 0, &part(), None) }.unwrap();
        let place = queue.places.take().unwrap();
        std::thread::scope(|scope| {
            let sleeps = scope.spawn(helps);
            while queue.waiting.lock().turns.stays(Instant::now).is_none() {
                std::thread::yield_now();
            }
            // SAFETY: as above.
            let late = unsafe { delegate.submit(&media, 0, 0, &part(), None) }.unwrap();
            Engine::<Span>::start(&delegate, &late);
            queue.waiting.lock().batches[0].1 -= OVERTAKEN_MAX;
            let comes = helps();
            let slept = sleeps.join().unwrap();
            let queued: Vec<_> = queue.waiting.lock().batches.iter().map(|(slot, _)| Some(*slot)).collect();
            assert_eq!((queued.len(), queued[0]), (3, late.slot()));
            assert!(queued.contains(&comes.slot()) && queued.contains(&slept.slot()));
            assert!(queue.waiting.lock().turns.stays(Instant::now).is_none(), "nobody sleeps");
            queue.wake_one(queue.leave(place, false));
            for ticket in [comes, slept, late] {
                assert_eq!(Engine::<Span>::wait(&delegate, ticket).status, Status::Done);
            }
        });
    }
}
