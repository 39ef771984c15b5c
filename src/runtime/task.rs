//! A uthread: its closure on a stack, who waits for its end, and how it is woken.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Wake;

use super::switch::{self, Fiber, Label, Rest};
use super::wait::Caller;
use super::worker::Shared;
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicU32, Ordering};

/// How a uthread ended: with its value, or what it panicked with.
pub type Outcome<T> = std::result::Result<T, Box<dyn Any + Send>>;

/// What outlives the fiber, for those who wake it.
pub struct Task {
    pub(super) label: Label,
    pub(super) runtime: Arc<Shared>,
    /// It may go on on any worker.
    pub(super) movable: bool,
    /// The number of the worker where it began, which it stays with unless it is movable; [`NOWHERE`] before.
    home: AtomicU32,
    waiting: Mutex<Waiting>,
}

const NOWHERE: u32 = u32::MAX;

#[derive(Default)]
struct Waiting {
    /// By what it may rest for: it was woken while it did not. Its next such rest ends at once.
    woken: [bool; 2],
    resting: Option<(Rest, Box<Runnable>)>,
}

/// A uthread that can go on: whoever has this may resume it, where its task says.
pub struct Runnable {
    pub(super) fiber: Fiber,
    /// With the worker while it runs.
    pub(super) task: Option<Arc<Task>>,
}

impl Runnable {
    /// The number of the worker that alone may run it.
    #[inline]
    pub(super) fn bound_to(&self) -> Option<usize> {
        let task = self.task.as_ref().expect("it does not run");
        // Whoever has it to queue it has it from who set this.
        let home = task.home.load(Ordering::Relaxed);
        (home != NOWHERE).then_some(home as usize)
    }
}

impl Task {
    pub(super) fn new(label: Label, runtime: Arc<Shared>, movable: bool) -> Arc<Task> {
        Arc::new(Task { label, runtime, movable, home: AtomicU32::new(NOWHERE), waiting: Mutex::default() })
    }

    /// It begins on this worker.
    #[inline]
    pub(super) fn begins(&self, worker: usize) {
        if !self.movable {
            self.home.store(worker as u32, Ordering::Relaxed);
        }
    }

    /// Ends such a rest, or the next one, where it has none just now.
    pub(super) fn wake_from(this: &Arc<Task>, rest: Rest) {
        let resting = {
            let mut waiting = this.waiting.lock();
            let resting = waiting.resting.take_if(|(what, _)| *what == rest);
            waiting.woken[rest as usize] = resting.is_none();
            resting
        };
        if let Some((_, runnable)) = resting {
            Shared::enqueue(&this.runtime, runnable);
        }
    }

    /// Puts a uthread to rest, or answers it, where it was woken meanwhile.
    pub(super) fn rest(this: &Arc<Task>, rest: Rest, mut runnable: Box<Runnable>) -> Option<Box<Runnable>> {
        let mut waiting = this.waiting.lock();
        if std::mem::take(&mut waiting.woken[rest as usize]) {
            return Some(runnable);
        }
        // A circle, until it is woken: its stack goes with none of those who could wake it.
        runnable.task = Some(this.clone());
        waiting.resting = Some((rest, runnable));
        None
    }
}

/// From its waits, not from the program's own.
impl Wake for Task {
    fn wake(self: Arc<Task>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Task>) {
        Task::wake_from(self, Rest::Wait);
    }
}

/// Where a uthread leaves its result.
struct Slot<T>(Mutex<State<T>>);

enum State<T> {
    /// Somebody may wait for it.
    Running(Option<Caller>),
    Ended(Outcome<T>),
}

/// Gives a uthread's result, once.
pub struct JoinHandle<T> {
    slot: Arc<Slot<T>>,
}

impl<T> JoinHandle<T> {
    /// Waits for its end. A panic of the uthread is the error. Panics in the uthread itself, which would wait for ever.
    pub fn join(self) -> Outcome<T> {
        loop {
            let caller = {
                let mut state = self.slot.0.lock();
                if let State::Ended(outcome) = std::mem::replace(&mut *state, State::Running(None)) {
                    return outcome;
                }
                let caller = Caller::current();
                *state = State::Running(Some(caller.clone()));
                caller
            };
            assert!(!self.is_own(), "a uthread cannot join itself");
            caller.rest();
        }
    }

    /// Whether it is the uthread that calls.
    pub fn is_own(&self) -> bool {
        switch::runs(self.address())
    }

    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.slot).addr()
    }

    /// Whether it has ended: then `join` does not wait.
    pub fn is_finished(&self) -> bool {
        matches!(*self.slot.0.lock(), State::Ended(_))
    }
}

/// Leaves the result in its slot, whatever becomes of the closure.
struct Finish<T>(Option<Arc<Slot<T>>>);

impl<T> Finish<T> {
    fn end(&mut self, outcome: Outcome<T>) {
        let Some(slot) = self.0.take() else { return };
        let before = std::mem::replace(&mut *slot.0.lock(), State::Ended(outcome));
        if let State::Running(Some(waits)) = before {
            waits.wake();
        }
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        self.end(Err(Box::new("the runtime was dropped before this uthread ran")));
    }
}

/// The closure that a fiber runs, and who is told of its end.
pub(super) fn with_outcome<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> (impl FnOnce() + Send + 'static, JoinHandle<T>) {
    let slot = Arc::new(Slot(Mutex::new(State::Running(None))));
    let mut finish = Finish(Some(slot.clone()));
    let body = move || {
        let outcome = catch_unwind(AssertUnwindSafe(run));
        // Where nobody waits the result is dropped here, and its panic would be the worker's.
        if catch_unwind(AssertUnwindSafe(|| finish.end(outcome))).is_err() {
            tracing::error!("the result of a uthread that nobody joins panicked when it was dropped");
        }
    };
    (body, JoinHandle { slot })
}
