//! Threads of their own in front of each region, on its node; callers sleep (efficient-pm §4, *workqueue*; OdinFS).
//!
//! **Invariants.**
//! 1. A slot belongs, in this order and to one at a time: to nobody (in `free`), to a caller that fills it, to the
//!    queue, to a worker, and, once it has `ended`, to whoever waits for it, on any thread.
//! 2. A worker looks at a batch only while its caller is between `submit` and `wait`: so the bytes are there, and so
//!    is media.
//! 3. A worker's stores are fenced by the worker before it reports: a fence is for the own thread's stores only.
//!
//! Threads begin at the first copy: a process that forks after opening a pool (the mount server, into the background)
//! has them where it needs them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::completion::Completion;
use super::engine_port::{Capability, Durability, Engine, Place, RawTransfer, Refused, Ticket, copy_batch};
use super::manager::Channels;
use super::node::{Node, free_thread};
use crate::media::Media;

/// Batches in front of one region; more are refused.
const SLOTS: usize = 128;

pub struct Delegate<M: Media> {
    regions: Box<[Arc<Queue<M>>]>,
    workers: usize,
    nodes: Box<[Option<Node>]>,
    /// By region, from the first copy there on.
    threads: Box<[OnceLock<Vec<JoinHandle<()>>>]>,
}

/// What callers and workers of one region share.
struct Queue<M: Media> {
    waiting: Mutex<Waiting>,
    /// Somebody came, or something changed.
    changed: Condvar,
    slots: Box<[Slot<M>]>,
}

struct Waiting {
    batches: VecDeque<usize>,
    free: Vec<usize>,
    suspended: bool,
    closed: bool,
}

struct Slot<M: Media> {
    work: Mutex<Option<Work<M>>>,
    ended: Mutex<Option<Completion>>,
    /// Somebody may sleep until `ended` is there.
    end: Condvar,
}

struct Work<M: Media> {
    media: *const M,
    batch: SmallVec<[RawTransfer; 4]>,
    crc: Option<u32>,
}

// SAFETY: `media` is shared with the worker for as long as invariant 2 says, and media can be shared.
unsafe impl<M: Media> Send for Work<M> {}

impl<M: Media> Queue<M> {
    fn new() -> Queue<M> {
        let slot = |_| Slot { work: Mutex::new(None), ended: Mutex::new(None), end: Condvar::new() };
        let free = (0..SLOTS).collect();
        Queue {
            waiting: Mutex::new(Waiting {
                batches: VecDeque::with_capacity(SLOTS),
                free,
                suspended: false,
                closed: false,
            }),
            changed: Condvar::new(),
            slots: (0..SLOTS).map(slot).collect(),
        }
    }

    /// The next batch; none when the queue is closed and empty.
    fn next(&self) -> Option<usize> {
        let mut waiting = self.waiting.lock();
        loop {
            if !waiting.suspended || waiting.closed {
                if let Some(slot) = waiting.batches.pop_front() {
                    return Some(slot);
                }
                if waiting.closed {
                    return None;
                }
            }
            self.changed.wait(&mut waiting);
        }
    }

    fn work(&self) {
        while let Some(n) = self.next() {
            let slot = &self.slots[n];
            let work = slot.work.lock().take().expect("a queued slot is filled");
            let copy = || {
                // SAFETY: by invariant 2 media and the bytes are there until this slot is done.
                let (media, (completion, flushed)) = unsafe {
                    let media = &*work.media;
                    (media, copy_batch(media, &work.batch, work.crc))
                };
                media.fence(flushed);
                Completion { durability: Durability::OnCompletion, ..completion }
            };
            // What panics here panics again in the caller, which does what was not done.
            let completion = catch_unwind(AssertUnwindSafe(copy)).unwrap_or(Completion::failed());
            *slot.ended.lock() = Some(completion);
            // From here on the slot is the caller's, who may have given it to another: whom this wakes too early looks
            // again.
            slot.end.notify_one();
        }
    }
}

impl<M: Media> Delegate<M> {
    /// `workers` threads for each region, on the CPUs of its node where that is known.
    pub fn new(nodes: Box<[Option<Node>]>, workers: usize) -> Delegate<M> {
        Delegate {
            regions: nodes.iter().map(|_| Arc::new(Queue::new())).collect(),
            workers: workers.max(1),
            threads: nodes.iter().map(|_| OnceLock::new()).collect(),
            nodes,
        }
    }

    /// Threads for a region, as many as there can be.
    fn start(&self, region: usize) -> Vec<JoinHandle<()>> {
        let mut threads = Vec::new();
        for n in 0..self.workers {
            let (queue, node) = (self.regions[region].clone(), self.nodes[region].clone());
            let work = move || {
                match node {
                    Some(node) => node.keep_thread(),
                    None => free_thread(),
                }
                queue.work();
            };
            match std::thread::Builder::new().name(format!("lode-copy-{region}-{n}")).spawn(work) {
                Ok(thread) => threads.push(thread),
                Err(e) => {
                    tracing::warn!(
                        "engine delegate: {n} of {} threads for region {region}: {e}",
                        self.workers
                    );
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
        if self.threads[region].get_or_init(|| self.start(region)).is_empty() {
            return Err(Refused::Gone);
        }
        let queue = &self.regions[region];
        let work = Work { media, batch: SmallVec::from_slice(batch), crc };
        let mut waiting = queue.waiting.lock();
        let n = waiting.free.pop().ok_or(Refused::Full)?;
        let slot = &queue.slots[n];
        *slot.work.lock() = Some(work);
        waiting.batches.push_back(n);
        drop(waiting);
        queue.changed.notify_one();
        Ok(Ticket(Place::Slot { region, slot: n }))
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        match ticket.0 {
            Place::Slot { region, slot } => self.regions[region].slots[slot].ended.lock().is_some(),
            Place::Ended(_) => true,
        }
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        let (region, n) = match ticket.0 {
            Place::Slot { region, slot } => (region, slot),
            Place::Ended(completion) => return completion,
        };
        let queue = &self.regions[region];
        let slot = &queue.slots[n];
        let mut ended = slot.ended.lock();
        let completion = loop {
            match ended.take() {
                Some(completion) => break completion,
                None => slot.end.wait(&mut ended),
            }
        };
        drop(ended);
        queue.waiting.lock().free.push(n);
        completion
    }

    fn suspend(&self, region: usize) {
        self.regions[region].waiting.lock().suspended = true;
    }

    fn resume(&self, region: usize) {
        let queue = &self.regions[region];
        queue.waiting.lock().suspended = false;
        queue.changed.notify_all();
    }

    /// A queue of its own for each region.
    fn channels(&self, region: usize) -> Channels {
        Channels { group: region, count: 1, can_rest: false }
    }
}

impl<M: Media> Drop for Delegate<M> {
    fn drop(&mut self) {
        for queue in &self.regions {
            queue.waiting.lock().closed = true;
            queue.changed.notify_all();
        }
        for thread in self.threads.iter_mut().filter_map(OnceLock::take).flatten() {
            if thread.join().is_err() {
                tracing::error!("a thread that copies panicked");
            }
        }
    }
}
