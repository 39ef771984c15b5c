//! What is to be woken when. Workers look at it between uthreads; nobody sleeps longer than to the next alarm.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wait::Waiter;
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicU64, Ordering};

/// No alarm is set.
const NEVER: u64 = u64::MAX;
/// As long as there are fewer alarms none is taken out before its time.
const CANCELLED_MIN: usize = 64;

pub struct Timers {
    began: Instant,
    /// Of the first alarm, in nanoseconds since `began`.
    next_ns: AtomicU64,
    heap: Mutex<BinaryHeap<Reverse<Entry>>>,
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
        Timers { began: Instant::now(), next_ns: AtomicU64::new(NEVER), heap: Mutex::default() }
    }
}

impl Timers {
    pub fn set(&self, after: Duration, waiter: Arc<Waiter>) -> Alarm {
        let at = self.began.elapsed().saturating_add(after);
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(NEVER - 1).min(NEVER - 1);
        let mut heap = self.heap.lock();
        if heap.len() >= CANCELLED_MIN && heap.len() == heap.capacity() {
            // Before it grows: what was cancelled needs no place.
            heap.retain(|Reverse(entry)| !entry.waiter.is_woken());
            // As many more come before the next time, so that each alarm pays for two.
            let left = heap.len();
            heap.reserve(left);
        }
        heap.push(Reverse(Entry { at_ns, waiter: waiter.clone() }));
        self.note_next(&heap);
        Alarm(waiter)
    }

    /// Wakes whose time has come; how long it is to the next.
    pub fn fire(&self) -> Option<Duration> {
        let next = self.next_ns.load(Ordering::Acquire);
        if next == NEVER {
            return None;
        }
        let now = self.began.elapsed().as_nanos() as u64;
        if next > now {
            return Some(Duration::from_nanos(next - now));
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
        next.map(|at| Duration::from_nanos(at.saturating_sub(now)))
    }

    /// Nobody waits for any of them any more.
    pub fn clear(&self) {
        let heap = {
            let mut heap = self.heap.lock();
            self.next_ns.store(NEVER, Ordering::Release);
            std::mem::take(&mut *heap)
        };
        drop(heap);
    }

    fn note_next(&self, heap: &BinaryHeap<Reverse<Entry>>) -> Option<u64> {
        let next = heap.peek().map(|Reverse(entry)| entry.at_ns);
        self.next_ns.store(next.unwrap_or(NEVER), Ordering::Release);
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
        let heap = timers.heap.lock();
        assert!(heap.len() >= live.len() && heap.len() <= 4 * CANCELLED_MIN, "{}", heap.len());
        assert!(heap.capacity() >= 2 * live.len(), "each that is set looks through all");
    }
}
