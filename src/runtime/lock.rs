//! A mutex and a condition variable whose waiters let others run: a uthread gives its worker back, a thread sleeps.
//!
//! The mutex is one byte. Who finds it taken queues up, marks it, and tries again when it is woken; who leaves a marked
//! one wakes the first in the queue. Who comes meanwhile may be faster: nobody waits for a sleeper to wake.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::lock_api;

use super::wait::Waiter;
use crate::sync::primitive;
use crate::sync::primitive::atomic::{AtomicU8, Ordering};

const FREE: u8 = 0;
const TAKEN: u8 = 1;
/// Taken, and somebody may wait.
const AWAITED: u8 = 2;

/// As parking_lot's, for uthreads.
pub type Mutex<T> = lock_api::Mutex<RawLock, T>;
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// What a [`Mutex`] locks with.
pub struct RawLock {
    state: AtomicU8,
    queue: primitive::Mutex<VecDeque<Arc<Waiter>>>,
}

// SAFETY: `state` leaves FREE by a swap or an exchange that exactly one caller sees succeed, and returns to it only by
// `unlock`, which the holder alone may call.
unsafe impl lock_api::RawMutex for RawLock {
    /// It may be left on another thread than it was taken on.
    type GuardMarker = lock_api::GuardSend;

    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawLock =
        RawLock { state: AtomicU8::new(FREE), queue: primitive::Mutex::new(VecDeque::new()) };

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    // SAFETY: the caller holds the lock.
    #[inline]
    unsafe fn unlock(&self) {
        if self.state.swap(FREE, Ordering::Release) == AWAITED {
            self.wake();
        }
    }
}

impl RawLock {
    #[cold]
    fn lock_slow(&self) {
        loop {
            let waiter = {
                let mut queue = self.queue.lock();
                // Under the queue's lock: who leaves it AWAITED looks there afterwards.
                if self.state.swap(AWAITED, Ordering::Acquire) == FREE {
                    return;
                }
                let waiter = Waiter::new();
                queue.push_back(waiter.clone());
                waiter
            };
            waiter.wait();
        }
    }

    #[cold]
    fn wake(&self) {
        let first = self.queue.lock().pop_front();
        if let Some(waiter) = first {
            waiter.wake();
        }
    }
}

/// As parking_lot's, for uthreads.
#[derive(Default)]
pub struct Condvar {
    queue: primitive::Mutex<VecDeque<Arc<Waiter>>>,
}

impl Condvar {
    pub const fn new() -> Condvar {
        Condvar { queue: primitive::Mutex::new(VecDeque::new()) }
    }

    /// Leaves the mutex, waits to be notified, and takes it again.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        let waiter = self.queue_up();
        MutexGuard::unlocked(guard, || waiter.wait());
    }

    /// As [`wait`](Condvar::wait), for so long at most; whether it was notified.
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> bool {
        let Some(deadline) = Instant::now().checked_add(timeout) else {
            // No clock goes so far.
            self.wait(guard);
            return true;
        };
        let waiter = self.queue_up();
        let notified = MutexGuard::unlocked(guard, || waiter.wait_until(deadline));
        if !notified {
            self.queue.lock().retain(|other| !Arc::ptr_eq(other, &waiter));
        }
        notified
    }

    fn queue_up(&self) -> Arc<Waiter> {
        let waiter = Waiter::new();
        self.queue.lock().push_back(waiter.clone());
        waiter
    }

    pub fn notify_one(&self) {
        let mut queue = self.queue.lock();
        // One that gave up meanwhile is nobody.
        while let Some(waiter) = queue.pop_front() {
            if waiter.wake() {
                break;
            }
        }
    }

    pub fn notify_all(&self) {
        let all = std::mem::take(&mut *self.queue.lock());
        for waiter in all {
            waiter.wake();
        }
    }
}
