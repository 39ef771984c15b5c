//! A thread's sleep until its waker is woken.
//!
//! The standard library's `park` is not used: its one token may be the program's own, which a wait in here would take away
//! from it.

use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use super::slack::in_a_hurry;
use crate::sync::primitive::{Condvar, Mutex, thread_local, wait_notified, yield_now};

/// See the file's head.
pub(crate) struct Sleeper {
    woken: Mutex<bool>,
    wakes: Condvar,
}

thread_local! {
    static OWN: Arc<Sleeper> = Arc::new(Sleeper::new());
}

impl Sleeper {
    pub fn new() -> Sleeper {
        Sleeper { woken: Mutex::new(false), wakes: Condvar::new() }
    }

    /// The calling thread's.
    pub fn own() -> Arc<Sleeper> {
        // One that is ending has none of its own any more.
        OWN.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Sleeper::new()))
    }

    /// As [`sleep`](Sleeper::sleep), for a short time, which is meant. Under a model checker no time passes: others go on.
    pub fn nap(&self, at_most: Duration) {
        if cfg!(shuttle) {
            return yield_now();
        }
        in_a_hurry(|| self.sleep(at_most));
    }

    /// Returns when it was woken, since the last time that this returned, or after so long.
    pub fn sleep(&self, at_most: Duration) {
        let mut woken = self.woken.lock();
        if !*woken {
            woken = wait_notified(&self.wakes, woken, at_most);
        }
        *woken = false;
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Sleeper>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Sleeper>) {
        let mut woken = self.woken.lock();
        // Outside of the lock: who is woken takes it.
        let slept = !std::mem::replace(&mut *woken, true);
        drop(woken);
        if slept {
            self.wakes.notify_one();
        }
    }
}

/// Wakes the calling thread from its waits in this room.
pub fn current_waker() -> Waker {
    Sleeper::own().into()
}
