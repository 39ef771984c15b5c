//! What yielding and parking are inside of a uthread. The runtime says it, because this room is below it.

use std::sync::OnceLock;
use std::task::Waker;
use std::time::Duration;

/// What the runtime provides, all of it for the caller.
pub struct Uthreads {
    /// It is a uthread that stays on its thread.
    pub stays: fn() -> bool,
    /// Wakes it from `park`.
    pub waker: fn() -> Waker,
    /// Lets others run until it is woken, or for so long; may return early.
    pub park: fn(Duration),
    /// Lets others go first.
    pub yield_now: fn(),
}

static UTHREADS: OnceLock<Uthreads> = OnceLock::new();

/// Once; later calls change nothing.
pub fn provide(uthreads: Uthreads) {
    // The first to come has said the same.
    let _ = UTHREADS.set(uthreads);
}

/// None where the caller is no uthread, or one that moves between threads: what it waits for may have to do with its
/// thread (stores that are to be fenced).
pub(super) fn current() -> Option<&'static Uthreads> {
    UTHREADS.get().filter(|uthreads| (uthreads.stays)())
}
