//! A part for each thread: its owner takes it without locked instructions, others when they must.

use crossbeam_utils::CachePadded;

use super::lock::Lock;
use super::primitive::atomic::{AtomicBool, Ordering};
use super::thread;

pub struct PerThread<T> {
    /// By slot; the last for the threads that have none.
    parts: Box<[CachePadded<Part<T>>]>,
}

struct Part<T> {
    /// Whether its thread ever asked for it. If not, it leans to that thread for nothing, and is not worth setting upright.
    is_had: AtomicBool,
    value: Lock<T>,
}

impl<T: Default> Default for PerThread<T> {
    fn default() -> PerThread<T> {
        PerThread::new()
    }
}

impl<T: Default> PerThread<T> {
    pub fn new() -> PerThread<T> {
        let slot = |slot| Lock::leaning_to(slot, T::default());
        let parts = (0..thread::SLOTS_MAX as u32).map(slot).chain([Lock::new(T::default())]);
        let part = |value| CachePadded::new(Part { is_had: AtomicBool::new(false), value });
        PerThread { parts: parts.map(part).collect() }
    }

    /// The calling thread's part.
    #[inline]
    pub fn own(&self) -> &Lock<T> {
        let part = &self.parts[(thread::slot() as usize).min(thread::SLOTS_MAX)];
        if !part.is_had.load(Ordering::Relaxed) {
            part.is_had.store(true, Ordering::Relaxed);
        }
        &part.value
    }

    /// The parts that threads ever had. What the caller knows that a thread did with its part is there: then it knows,
    /// too, that the thread had it.
    pub fn all(&self) -> impl Iterator<Item = &Lock<T>> {
        let used = &self.parts[..thread::slots_used().min(thread::SLOTS_MAX)];
        let had = used.iter().filter(|part| part.is_had.load(Ordering::Relaxed));
        had.chain(self.parts.last()).map(|part| &part.value)
    }
}

#[cfg(all(test, not(any(shuttle, loom))))]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_thread_had_is_gone_through() {
        let parts = PerThread::<u32>::new();
        let seen = || parts.all().map(|part| *part.read()).collect::<Vec<_>>();
        assert_eq!(seen(), [0], "that of the threads without a slot");
        *parts.own().write() = 1;
        std::thread::scope(|s| s.spawn(|| *parts.own().write() = 2).join().unwrap());
        let mut sums = seen();
        sums.sort_unstable();
        assert_eq!(sums, [0, 1, 2]);
    }
}
