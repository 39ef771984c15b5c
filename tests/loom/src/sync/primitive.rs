//! As `src/sync/primitive.rs`, of loom.

use std::sync::OnceLock;

use crossbeam_utils::Backoff;
use loom::sync::Condvar;
pub use loom::sync::MutexGuard;

pub mod atomic {
    use std::cell::Cell;

    pub use loom::sync::atomic::{
        AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
    };
    pub use std::sync::atomic::compiler_fence;

    thread_local! {
        /// All threads of a model run on that of its test.
        pub static WITHOUT_FENCES: Cell<bool> = const { Cell::new(false) };
    }

    /// All barriers of all files end here.
    pub fn fence(order: Ordering) {
        if !WITHOUT_FENCES.get() {
            loom::sync::atomic::fence(order);
        }
    }
}

pub fn wait(_: &Backoff) {
    loom::thread::yield_now();
}

/// With parking_lot's interface.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// parking_lot's, as far as it is used.
pub struct RawRwLock(OnceLock<Inside>);

struct Inside {
    /// Readers, or -1 for a writer.
    count: Mutex<i32>,
    left: Condvar,
}

impl RawRwLock {
    fn inside(&self) -> &Inside {
        self.0.get_or_init(|| Inside { count: Mutex::new(0), left: Condvar::new() })
    }

    fn when(&self, may_enter: impl Fn(i32) -> bool) -> MutexGuard<'_, i32> {
        let mut count = self.inside().count.lock();
        while !may_enter(*count) {
            count = self.inside().left.wait(count).unwrap_or_else(|e| e.into_inner());
        }
        count
    }

    fn leave(&self, becomes: impl Fn(i32) -> i32) {
        let mut count = self.inside().count.lock();
        *count = becomes(*count);
        drop(count);
        self.inside().left.notify_all();
    }
}

// SAFETY: the count admits readers or one writer, and changes under its mutex only.
unsafe impl parking_lot::lock_api::RawRwLock for RawRwLock {
    type GuardMarker = parking_lot::lock_api::GuardNoSend;

    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock = RawRwLock(OnceLock::new());

    fn lock_shared(&self) {
        *self.when(|count| count >= 0) += 1;
    }

    fn try_lock_shared(&self) -> bool {
        let mut count = self.inside().count.lock();
        let free = *count >= 0;
        *count += i32::from(free);
        free
    }

    // SAFETY: the caller has the lock, so there is a reader to count off.
    unsafe fn unlock_shared(&self) {
        self.leave(|count| count - 1);
    }

    fn lock_exclusive(&self) {
        *self.when(|count| count == 0) = -1;
    }

    fn try_lock_exclusive(&self) -> bool {
        let mut count = self.inside().count.lock();
        let free = *count == 0;
        *count -= i32::from(free);
        free
    }

    // SAFETY: the caller has the lock alone.
    unsafe fn unlock_exclusive(&self) {
        self.leave(|_| 0);
    }
}

// SAFETY: as above; there is no moment between writer and reader.
unsafe impl parking_lot::lock_api::RawRwLockDowngrade for RawRwLock {
    // SAFETY: the caller has the lock alone.
    unsafe fn downgrade(&self) {
        self.leave(|_| 1);
    }
}

/// Each execution has its own, which begins as nothing: loom's atomics are no constants.
macro_rules! shared_static {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $init:expr;) => {
        loom::lazy_static! { $(#[$attribute])* static ref $name: $type = Default::default(); }
    };
}
pub(crate) use shared_static;
