//! Waiting, for whoever calls: a uthread gives its worker back, a thread sleeps.
//!
//! Locks, channels, joins and timers of this room wait here and nowhere else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::switch::{self, Why};
use super::task::Task;
use super::worker;
use crate::mover::completion::{self, LightThreads, Poller, Wake};

/// Wakes one uthread, or one thread.
#[derive(Clone)]
pub struct Unparker(Who);

#[derive(Clone)]
enum Who {
    Uthread(Arc<Task>),
    Thread(Thread),
}

impl Unparker {
    /// Of the caller.
    pub fn current() -> Unparker {
        match worker::current_task() {
            Some(task) => Unparker(Who::Uthread(task)),
            None => Unparker(Who::Thread(std::thread::current())),
        }
    }

    /// Ends its wait in [`park`], or the next one, where it is not in one.
    pub fn unpark(&self) {
        match &self.0 {
            Who::Uthread(task) => Task::wake(task),
            Who::Thread(thread) => thread.unpark(),
        }
    }
}

impl Wake for Unparker {
    fn wake(&self) {
        self.unpark();
    }
}

/// Uthreads, for those who wait for copies.
struct Uthreads;

impl LightThreads for Uthreads {
    fn current(&self) -> Option<Arc<dyn Wake>> {
        switch::inside().then(|| Arc::new(Unparker::current()) as Arc<dyn Wake>)
    }

    fn park(&self) {
        park();
    }

    fn poll(&self, number: usize, make: &dyn Fn() -> Arc<dyn Poller>) {
        if let Some(runtime) = worker::current_runtime() {
            runtime.poll_once(number, make);
        }
    }
}

/// Tells those who wait for copies that there are uthreads.
pub fn make_known() {
    completion::know(&Uthreads);
}

/// Waits until somebody unparks the caller. May return without that, too.
pub fn park() {
    if !switch::suspend(Why::Park) {
        std::thread::park();
    }
}

/// As [`park`], for so long at most.
pub fn park_timeout(timeout: Duration) {
    if switch::inside() {
        let waiter = Waiter::new();
        let alarm = worker::wake_after(timeout, waiter.clone());
        switch::suspend(Why::Park);
        alarm.cancel();
    } else {
        std::thread::park_timeout(timeout);
    }
}

/// One wait of one caller for one event: woken once, by anybody.
pub struct Waiter {
    woken: AtomicBool,
    unparker: Unparker,
}

impl Waiter {
    pub fn new() -> Arc<Waiter> {
        Arc::new(Waiter { woken: AtomicBool::new(false), unparker: Unparker::current() })
    }

    /// Whether this call was the first.
    pub fn wake(&self) -> bool {
        let first = !self.woken.swap(true, Ordering::AcqRel);
        if first {
            self.unparker.unpark();
        }
        first
    }

    /// It needs no waking any more.
    pub fn cancel(&self) {
        self.woken.store(true, Ordering::Release);
    }

    pub fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    /// Returns when it is woken. For who made it.
    pub fn wait(&self) {
        while !self.is_woken() {
            park();
        }
    }

    /// As [`wait`](Waiter::wait), until `deadline` at most; whether it was woken.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        while !self.is_woken() {
            let now = Instant::now();
            if now >= deadline {
                // Who wakes it now finds it woken, and looks for somebody else.
                return self.woken.swap(true, Ordering::AcqRel);
            }
            park_timeout(deadline - now);
        }
        true
    }
}

/// Goes on after so long. Other uthreads run meanwhile.
pub fn sleep(time: Duration) {
    if !switch::inside() {
        return std::thread::sleep(time);
    }
    let waiter = Waiter::new();
    worker::wake_after(time, waiter.clone());
    waiter.wait();
}

/// Lets others go first.
#[inline]
pub fn yield_now() {
    if !switch::suspend(Why::Yield) {
        std::thread::yield_now();
    }
}
