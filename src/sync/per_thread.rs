//! A part for each thread: its owner takes it without locked instructions, others when they must.

use crossbeam_utils::CachePadded;

use super::lock::Lock;
use super::thread;

pub struct PerThread<T> {
    /// By slot; the last for the threads that have none.
    parts: Box<[CachePadded<Lock<T>>]>,
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
        PerThread { parts: parts.map(CachePadded::new).collect() }
    }

    /// The calling thread's part.
    #[inline]
    pub fn own(&self) -> &Lock<T> {
        &self.parts[(thread::slot() as usize).min(thread::SLOTS_MAX)]
    }

    /// The parts that threads ever had.
    pub fn all(&self) -> impl Iterator<Item = &Lock<T>> {
        let used = self.parts[..thread::slots_used().min(thread::SLOTS_MAX)].iter();
        used.chain(self.parts.last()).map(|part| &**part)
    }
}
