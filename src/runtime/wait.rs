//! Waiting, for whoever calls: a uthread gives its worker back, a thread sleeps.
//!
//! Locks, channels, joins and timers of this room wait here and nowhere else. What waits for a copy climbs the ladder of
//! the room `wait`, which is told here what parking and yielding are.

use std::sync::Arc;
use std::task::Wake;
use std::time::{Duration, Instant};

use super::switch::{self, Rest, Why};
use super::task::Task;
use super::worker;
use crate::sync::primitive;
use crate::sync::primitive::Thread;
use crate::sync::primitive::atomic::{AtomicBool, Ordering};
use crate::wait::{Sleeper, Uthreads};

/// How a uthread waits for what is not of this room.
pub(super) fn uthreads() -> Uthreads {
    Uthreads {
        is_one: switch::inside,
        stays: || worker::current_task().is_some_and(|task| !task.movable),
        waker: || worker::current_task().expect("it stays, so it is a uthread").into(),
        park: |time| rest_for(Rest::Wait, time),
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
            Who::Uthread(task) => Task::wake_from(task, Rest::Park),
            Who::Thread(thread) => thread.unpark(),
        }
    }
}

/// Waits until somebody unparks the caller. May return without that, too.
pub fn park() {
    if !switch::suspend(Why::Rest(Rest::Park)) {
        primitive::park();
    }
}

/// As [`park`], for so long at most, which may be for ever ([`Duration::MAX`]).
pub fn park_timeout(timeout: Duration) {
    if switch::inside() {
        rest_for(Rest::Park, timeout);
    } else {
        primitive::park_timeout(timeout);
    }
}

/// A uthread's rest, for so long at most.
fn rest_for(rest: Rest, at_most: Duration) {
    if cfg!(shuttle) {
        switch::suspend(Why::Rest(rest)); // no time passes under a model checker
        return;
    }
    let task = worker::current_task().expect("only uthreads rest");
    let waiter = Waiter::of(Caller::Uthread(task, rest));
    let alarm = worker::wake_after(at_most, waiter);
    switch::suspend(Why::Rest(rest));
    alarm.cancel();
}

/// Who waits in this room. An [`Unparker`] does not wake it: that is for the program's own next wait.
#[derive(Clone)]
pub(super) enum Caller {
    Uthread(Arc<Task>, Rest),
    Thread(Arc<Sleeper>),
}

impl Caller {
    pub fn current() -> Caller {
        match worker::current_task() {
            Some(task) => Caller::Uthread(task, Rest::Wait),
            None => Caller::Thread(Sleeper::own()),
        }
    }

    /// Ends its rest, or the next one, where it has none just now.
    pub fn wake(&self) {
        match self {
            Caller::Uthread(task, rest) => Task::wake_from(task, *rest),
            Caller::Thread(sleeper) => sleeper.wake_by_ref(),
        }
    }

    /// Returns when it is woken, or was before, by whomever. For itself.
    pub fn rest(&self) {
        match self {
            Caller::Uthread(_, rest) => {
                switch::suspend(Why::Rest(*rest));
            }
            Caller::Thread(sleeper) => sleeper.sleep(Duration::MAX),
        }
    }

    /// As [`rest`](Caller::rest), for so long at most.
    fn rest_for(&self, at_most: Duration) {
        match self {
            Caller::Uthread(_, rest) => rest_for(*rest, at_most),
            Caller::Thread(sleeper) => sleeper.sleep(at_most),
        }
    }
}

/// One wait of one caller for one event: woken once, by anybody.
pub struct Waiter {
    woken: AtomicBool,
    caller: Caller,
}

impl Waiter {
    pub fn new() -> Arc<Waiter> {
        Waiter::of(Caller::current())
    }

    fn of(caller: Caller) -> Arc<Waiter> {
        Arc::new(Waiter { woken: AtomicBool::new(false), caller })
    }

    /// Whether this call was the first.
    pub fn wake(&self) -> bool {
        let first = !self.woken.swap(true, Ordering::AcqRel);
        if first {
            self.caller.wake();
        }
        first
    }

    /// It needs no waking any more.
    pub fn cancel(&self) {
        self.woken.store(true, Ordering::Release);
    }

    /// Whether who waits may go on on any worker.
    pub fn is_movable(&self) -> bool {
        matches!(&self.caller, Caller::Uthread(task, _) if task.movable)
    }

    pub fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    /// Returns when it is woken. For who made it.
    pub fn wait(&self) {
        while !self.is_woken() {
            self.caller.rest();
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
            self.caller.rest_for(deadline - now);
        }
        true
    }
}

/// Goes on after so long, which may be never ([`Duration::MAX`]). Other uthreads run meanwhile.
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
