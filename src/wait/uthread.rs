//! What yielding and parking are inside of a uthread. The runtime says it, because this room is below it.

use std::cell::Cell;
use std::sync::OnceLock;
use std::task::Waker;
use std::time::Duration;

use crate::sync::primitive::thread_local;

/// What the runtime provides, all of it for the caller.
pub struct Uthreads {
    /// It is a uthread.
    pub is_one: fn() -> bool,
    /// And one that stays on its thread.
    pub stays: fn() -> bool,
    /// Wakes it from `park`, and from nothing of the program's own.
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

thread_local! {
    /// Callers on this thread that hold something for those they call.
    static KEEPERS: Cell<u32> = const { Cell::new(0) };
}

/// Runs what may wait and says that it holds nothing, on behalf of a caller that does: a lock around a whole call. The thread
/// is kept.
pub fn keeping_thread<T>(run: impl FnOnce() -> T) -> T {
    struct Keeper;

    impl Drop for Keeper {
        fn drop(&mut self) {
            KEEPERS.with(|keepers| keepers.set(keepers.get() - 1));
        }
    }

    KEEPERS.with(|keepers| keepers.set(keepers.get() + 1));
    // Nobody else runs on this thread before it is dropped, so the count is this caller's.
    let _keeper = Keeper;
    run()
}

/// Whether the caller is a uthread.
pub fn is_uthread() -> bool {
    UTHREADS.get().is_some_and(|uthreads| (uthreads.is_one)())
}

/// Whether a wait of the caller that holds nothing lets others run.
pub fn lets_others_run() -> bool {
    current().is_some()
}

/// None where the caller is no uthread, or one that moves between threads: what it waits for may have to do with its
/// thread (stores that are to be fenced). None, too, where somebody keeps the thread.
pub(super) fn current() -> Option<&'static Uthreads> {
    let uthreads = UTHREADS.get().filter(|_| KEEPERS.with(Cell::get) == 0)?;
    (uthreads.stays)().then_some(uthreads)
}
