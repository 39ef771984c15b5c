//! What is to be woken when. Workers look at it between uthreads, and before they sleep, no longer than to the next alarm.
//!
//! Alarms of uthreads that go on anywhere are kept apart: others could run what they wake while the worker where they were set
//! is busy, if they know of them (`worker` says how). What stays with its worker waits for that one anyhow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wait::Waiter;
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicU64, Ordering};

/// No alarm is set: later than any other.
pub const NEVER: u64 = u64::MAX;
/// As long as there are fewer alarms none is taken out before its time.
const CANCELLED_MIN: usize = 64;

pub struct Timers {
    /// All times are nanoseconds since then.
    began: Instant,
    /// Of uthreads that stay with their worker.
    bound: Alarms,
    /// Of those that go on anywhere.
    movable: Alarms,
}

struct Alarms {
    /// Of the first one.
    next_ns: AtomicU64,
    heap: Mutex<BinaryHeap<Reverse<Entry>>>,
}

/// The first alarm of all.
#[derive(Clone, Copy)]
pub struct Next {
    /// As the timers count.
    pub at_ns: u64,
    pub left: Duration,
}

struct Entry {
    at_ns: u64,
    waiter: Arc<Waiter>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.at_ns == other.at_ns
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        self.at_ns.cmp(&other.at_ns)
    }
}

/// An alarm that can be called off.
pub struct Alarm(Arc<Waiter>);

impl Alarm {
    /// It wakes nobody any more; its place is taken back in time.
    pub fn cancel(self) {
        self.0.cancel();
    }
}

impl Default for Timers {
    fn default() -> Timers {
        let alarms = || Alarms { next_ns: AtomicU64::new(NEVER), heap: Mutex::default() };
        Timers { began: Instant::now(), bound: alarms(), movable: alarms() }
    }
}

impl Timers {
    pub fn set(&self, after: Duration, waiter: Arc<Waiter>) -> Alarm {
        let at = self.began.elapsed().saturating_add(after);
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(NEVER - 1).min(NEVER - 1);
        let alarms = if waiter.is_movable() { &self.movable } else { &self.bound };
        alarms.set(Entry { at_ns, waiter: waiter.clone() });
        Alarm(waiter)
    }

    /// Wakes whose time has come; when the next one's does.
    pub fn fire(&self) -> Option<Next> {
        let all = [&self.bound, &self.movable];
        if all.iter().all(|alarms| alarms.next_ns() == NEVER) {
            return None;
        }
        let now = self.began.elapsed().as_nanos() as u64;
        let at_ns = all.map(|alarms| alarms.fire(now)).into_iter().min().filter(|at| *at != NEVER)?;
        Some(Next { at_ns, left: Duration::from_nanos(at_ns.saturating_sub(now)) })
    }

    /// Of the first alarm of a uthread that may go on anywhere; [`NEVER`] where there is none.
    pub fn next_movable_ns(&self) -> u64 {
        self.movable.next_ns()
    }

    /// Nobody waits for any of them any more.
    pub fn clear(&self) {
        self.bound.clear();
        self.movable.clear();
    }
}

impl Alarms {
    fn next_ns(&self) -> u64 {
        self.next_ns.load(Ordering::Acquire)
    }

    fn set(&self, entry: Entry) {
        let mut heap = self.heap.lock();
        if heap.len() >= CANCELLED_MIN && heap.len() == heap.capacity() {
            // Before it grows: what was cancelled needs no place.
            heap.retain(|Reverse(entry)| !entry.waiter.is_woken());
            // As many more come before the next time, so that each alarm pays for two.
            let left = heap.len();
            heap.reserve(left);
        }
        heap.push(Reverse(entry));
        self.note_next(&heap);
    }

    /// Wakes whose time has come by `now`; when the next one's does.
    fn fire(&self, now: u64) -> u64 {
        let next = self.next_ns();
        if next > now {
            return next;
        }
        let mut due = Vec::new();
        let next = {
            let mut heap = self.heap.lock();
            while heap.peek().is_some_and(|Reverse(entry)| entry.at_ns <= now || entry.waiter.is_woken()) {
                due.extend(heap.pop().map(|Reverse(entry)| entry.waiter));
            }
            self.note_next(&heap)
        };
        for waiter in due {
            waiter.wake();
        }
        next
    }

    fn clear(&self) {
        let heap = {
            let mut heap = self.heap.lock();
            self.next_ns.store(NEVER, Ordering::Release);
            std::mem::take(&mut *heap)
        };
        drop(heap);
    }

    fn note_next(&self, heap: &BinaryHeap<Reverse<Entry>>) -> u64 {
        let next = heap.peek().map_or(NEVER, |Reverse(entry)| entry.at_ns);
        self.next_ns.store(next, Ordering::Release);
        next
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_cancelled_is_taken_out_and_what_was_not_is_rarely_looked_through() {
        const LATER: Duration = Duration::from_secs(3600);
        let timers = Timers::default();
        let live: Vec<_> = (1..CANCELLED_MIN).map(|_| timers.set(LATER, Waiter::new())).collect();
        (0..10 * CANCELLED_MIN).for_each(|_| timers.set(LATER, Waiter::new()).cancel());
        let heap = timers.bound.heap.lock();
        assert!(heap.len() >= live.len() && heap.len() <= 4 * CANCELLED_MIN, "{}", heap.len());
        assert!(heap.capacity() >= 2 * live.len(), "each that is set looks through all");
    }
}
