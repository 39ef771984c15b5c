//! Waiting, for whoever calls: a uthread gives its worker back, a thread sleeps.
//!
//! Locks, channels, joins and timers of this room wait here and nowhere else. What waits for a copy climbs the ladder of
//! the room `wait`, which is told here what parking and yielding are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::switch::{self, Why};
use super::task::Task;
use super::worker;
use crate::sync::primitive;
use crate::sync::primitive::Thread;
use crate::sync::primitive::atomic::{AtomicBool, Ordering};
use crate::wait::Uthreads;

/// How a uthread waits for what is not of this room.
pub(super) fn uthreads() -> Uthreads {
    Uthreads {
        stays: || worker::current_task().is_some_and(|task| !task.movable),
        waker: || worker::current_task().expect("it stays, so it is a uthread").into(),
        park: park_timeout,
        yield_now,
    }
}

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
            None => Unparker(Who::Thread(primitive::current())),
        }
    }

    /// Ends its wait in [`park`], or the next one, where it is not in one.
    pub fn unpark(&self) {
        match &self.0 {
            Who::Uthread(task) => Task::unpark(task),
            Who::Thread(thread) => thread.unpark(),
        }
    }
}

/// Waits until somebody unparks the caller. May return without that, too.
pub fn park() {
    if !switch::suspend(Why::Park) {
        primitive::park();
    }
}

/// As [`park`], for so long at most.
pub fn park_timeout(timeout: Duration) {
    if cfg!(shuttle) && switch::inside() {
        switch::suspend(Why::Park); // no time passes under a model checker
    } else if switch::inside() {
        let waiter = Waiter::new();
        let alarm = worker::wake_after(timeout, waiter.clone());
        switch::suspend(Why::Park);
        alarm.cancel();
    } else {
        primitive::park_timeout(timeout);
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
        return primitive::sleep(time);
    }
    let waiter = Waiter::new();
    worker::wake_after(time, waiter.clone());
    waiter.wait();
}

/// Lets others go first.
#[inline]
pub fn yield_now() {
    if !switch::suspend(Why::Yield) {
        primitive::yield_now();
    }
}
