//! The switch between a worker and a uthread, by corosensei.
//!
//! A *fiber* is a closure with a stack of its own. A worker resumes it and has it back when it suspends itself or ends.
//!
//! **Invariants.**
//! 1. A fiber that has begun is resumed, and dropped, on the thread where it began; elsewhere only if whoever made it
//!    vouched for it ([`Fiber::new`] tells).
//! 2. `CURRENT` is the frame of the fiber that runs on this thread. It lies on that fiber's own stack, so it is there
//!    for as long as the fiber can run.

mod overflow;
mod stack;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use corosensei::{Coroutine, CoroutineResult, Yielder};

use crate::sync::primitive::thread_local;

pub use overflow::Watch;
pub use stack::{Stack, Stacks};

/// Why a fiber gave its worker back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It goes on when others had their turn.
    Yield,
    /// It goes on when somebody wakes it from this.
    Rest(Rest),
}

/// What a fiber rests for. What wakes it from the one neither ends the other nor is lost there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The program's own wait, for whatever it likes.
    Park,
    /// A wait of this room, or of the room `wait`.
    Wait,
}

/// What a fiber has on its own stack while it runs.
struct Frame {
    yielder: *const Yielder<(), Why>,
    /// No access here: where a stack that is too small ends.
    guard: std::ops::Range<usize>,
    stack_bytes: usize,
    label: Label,
}

/// What a message calls a fiber, and what tells it from all others.
#[derive(Clone)]
pub struct Label {
    pub number: u64,
    pub name: Option<Arc<str>>,
    /// The address of where it leaves its result, which is there, and no other's, while it runs.
    pub result: usize,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "uthread {} ({name})", self.number),
            None => write!(f, "uthread {}", self.number),
        }
    }
}

thread_local! {
    static CURRENT: Cell<*const Frame> = const { Cell::new(std::ptr::null()) };
}

// Calls of their own, so that no fiber keeps the address of a thread's variable over a switch, after which it may run on
// another thread.
#[inline(never)]
fn current() -> *const Frame {
    CURRENT.with(Cell::get)
}

#[inline(never)]
fn set_current(frame: *const Frame) {
    CURRENT.with(|current| current.set(frame));
}

/// Whether the calling code runs on a fiber.
#[inline]
pub fn inside() -> bool {
    !current().is_null()
}

/// Whether the calling code runs on the fiber that leaves its result at this address.
#[inline]
pub fn runs(result: usize) -> bool {
    // SAFETY: invariant 2: it is there while the calling code runs on it.
    unsafe { current().as_ref() }.is_some_and(|frame| frame.label.result == result)
}

/// Gives the worker back, and returns when it resumes the fiber; false outside of one. The fiber keeps its errno, though it
/// is the thread's, and others set it meanwhile.
#[inline]
pub fn suspend(why: Why) -> bool {
    let frame = current();
    if frame.is_null() {
        return false;
    }
    let kept = errno();
    // SAFETY: invariant 2; the yielder is the fiber's own, which runs here.
    unsafe { (*(*frame).yielder).suspend(why) };
    set_errno(kept);
    true
}

// As above: perhaps of another thread afterwards.
#[inline(never)]
fn errno() -> libc::c_int {
    // SAFETY: the C library gives every thread its errno.
    unsafe { *libc::__errno_location() }
}

#[inline(never)]
fn set_errno(errno: libc::c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

pub struct Fiber {
    coroutine: Coroutine<(), Why, (), Stack>,
    /// Its frame, once it has begun.
    frame: *const Frame,
}

// SAFETY: before it begins a fiber is a closure that is `Send`, and a stack. Afterwards invariant 1 holds.
unsafe impl Send for Fiber {}

impl Fiber {
    /// The closure may not unwind. Whoever lets the fiber go on on another thread than it began on vouches that, where
    /// it suspends itself, it holds nothing that belongs to a thread.
    #[inline]
    pub fn new(stack: Stack, label: Label, run: impl FnOnce() + Send + 'static) -> Fiber {
        let guard = stack.guard();
        let stack_bytes = corosensei::stack::Stack::base(&stack).get() - guard.end;
        let body = move |yielder: &Yielder<(), Why>, ()| {
            let frame = Frame { yielder, guard, stack_bytes, label };
            set_current(&frame);
            run();
            set_current(std::ptr::null());
        };
        Fiber { coroutine: Coroutine::with_stack(stack, body), frame: std::ptr::null() }
    }

    /// Runs it until it suspends itself, for the reason that is returned, or ends.
    #[inline]
    pub fn resume(&mut self) -> Option<Why> {
        // Who resumes is no fiber, and stays on its thread.
        set_current(self.frame);
        let result = self.coroutine.resume(());
        self.frame = CURRENT.with(|current| current.replace(std::ptr::null()));
        match result {
            CoroutineResult::Yield(why) => Some(why),
            CoroutineResult::Return(()) => None,
        }
    }

    /// Whether it has been resumed ever.
    #[inline]
    pub fn begun(&self) -> bool {
        self.coroutine.started()
    }

    /// The stack of a fiber that has ended.
    #[inline]
    pub fn into_stack(self) -> Stack {
        self.coroutine.into_stack()
    }
}
