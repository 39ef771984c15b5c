//! The lock around a heap: it blocks nobody while a fork is under way, and a child can take it anew.
//!
//! jemalloc calls into a heap with locks of its own held, and takes all of them itself before a fork. Whoever forks would
//! wait for them with the heap's lock held, and somebody who has one of them would wait for the heap's: so while a fork
//! is under way the heap is closed, which costs its callers a detour and no wait. An ordinary mutex cannot be used for
//! another reason too: its owner may be a thread that the child does not have.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WAITED_FOR: u32 = 2;

/// A value that one thread at a time has.
pub(super) struct Gate<T> {
    word: AtomicU32,
    /// Between the handlers before and after a fork.
    closed: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by whoever took the word only.
unsafe impl<T: Send> Sync for Gate<T> {}

pub(super) struct Inside<'a, T>(&'a Gate<T>);

impl<T> Gate<T> {
    pub const fn new(value: T) -> Gate<T> {
        Gate { word: AtomicU32::new(FREE), closed: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// None while a fork is under way.
    pub fn enter(&self) -> Option<Inside<'_, T>> {
        let inside = self.take();
        // Under the lock, under which it was closed.
        (!self.closed.load(Ordering::Relaxed)).then_some(inside)
    }

    fn take(&self) -> Inside<'_, T> {
        if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.word.swap(WAITED_FOR, Ordering::Acquire) != FREE {
                // Woken, interrupted, or changed meanwhile: looked at again in any case.
                let _ = futex::wait(&self.word, futex::Flags::PRIVATE, WAITED_FOR, None);
            }
        }
        Inside(self)
    }

    /// Before a fork: waits for who is inside, and lets nobody in until it is opened.
    pub fn close(&self) -> Inside<'_, T> {
        let inside = self.take();
        self.closed.store(true, Ordering::Relaxed);
        inside
    }

    /// After a fork, in the parent.
    pub fn open(&self) -> Inside<'_, T> {
        let inside = self.take();
        self.closed.store(false, Ordering::Relaxed);
        inside
    }

    /// Takes it until [`let_go`](Gate::let_go): who else wants it waits.
    pub fn hold(&self) {
        std::mem::forget(self.take());
    }

    /// Ends `hold`, in the same thread, or in the child of a fork between.
    pub fn let_go(&self) {
        drop(Inside(self));
    }

    /// After a fork, in the child, whose only thread this is.
    pub fn open_in_child(&self) -> Inside<'_, T> {
        self.word.store(FREE, Ordering::Relaxed);
        self.open()
    }
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread took the word, and gives it back when this is dropped.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Inside<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Inside<'_, T> {
    fn drop(&mut self) {
        if self.0.word.swap(FREE, Ordering::Release) == WAITED_FOR {
            let _ = futex::wake(&self.0.word, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn one_at_a_time() {
        let gate = Gate::new(0usize);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..rounds).for_each(|_| *gate.enter().unwrap() += 1));
            }
        });
        assert_eq!(*gate.enter().unwrap(), 4 * rounds);
    }

    #[test]
    fn nobody_waits_for_a_fork() {
        let gate = Gate::new(1);
        drop(gate.close());
        assert!(gate.enter().is_none());
        // A thread that the child does not have was inside.
        std::mem::forget(gate.take());
        assert_eq!(*gate.open_in_child(), 1);
        assert!(gate.enter().is_some());
    }

    #[test]
    fn closing_waits_for_who_is_inside() {
        let gate = Gate::new(());
        let left = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let inside = gate.enter().unwrap();
            let closer = scope.spawn(|| {
                drop(gate.close());
                left.load(Ordering::SeqCst)
            });
            // It waits, or it is done already, which it must not be.
            while gate.word.load(Ordering::Relaxed) != WAITED_FOR && !closer.is_finished() {
                std::thread::yield_now();
            }
            left.store(1, Ordering::SeqCst);
            drop(inside);
            assert_eq!(closer.join().unwrap(), 1);
        });
    }
}
