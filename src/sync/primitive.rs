//! What the locks, the epochs and the allocator stand on: atomics, plain locks, statics and waiting.
//!
//! Built with `--cfg shuttle` they are those of [shuttle](https://docs.rs/shuttle), whose scheduler then chooses
//! who goes on after each of them; otherwise the standard library's and parking_lot's, at no cost. Shuttle's memory
//! is sequentially consistent: it looks for wrong interleavings, not for orderings that are too weak (`tests/loom` does).

#[cfg(shuttle)]
pub use scheduled::*;
#[cfg(not(shuttle))]
pub use usual::*;

#[cfg(not(shuttle))]
mod usual {
    pub use std::sync::atomic;
    pub use std::thread::{
        Scope, ScopedJoinHandle, Thread, current, park, park_timeout, scope, sleep, yield_now,
    };
    pub use std::thread_local;

    pub use parking_lot::{Condvar, Mutex, MutexGuard, RawRwLock, RwLock, RwLockReadGuard};

    use crossbeam_utils::Backoff;
    use std::time::Duration;

    /// Waits for a thread that copies much, or does not run.
    #[inline]
    pub fn wait(backoff: &Backoff) {
        if backoff.is_completed() {
            std::thread::sleep(Duration::from_micros(50));
        } else {
            backoff.snooze();
        }
    }

    /// Sleeps until the condition is notified, or for so long at most; may return early.
    pub fn wait_notified<'a, T>(
        condition: &Condvar,
        mut guard: MutexGuard<'a, T>,
        at_most: Duration,
    ) -> MutexGuard<'a, T> {
        condition.wait_for(&mut guard, at_most);
        guard
    }

    /// A thread of a scope, by a name for those who look at the process.
    pub fn spawn_scoped<'scope>(
        scope: &'scope Scope<'scope, '_>,
        name: String,
        run: impl FnOnce() + Send + 'scope,
    ) -> std::io::Result<ScopedJoinHandle<'scope, ()>> {
        std::thread::Builder::new().name(name).spawn_scoped(scope, run)
    }

    /// A static that begins as a constant; under shuttle each execution has its own.
    macro_rules! shared_static {
        ($(#[$attribute:meta])* static $name:ident: $type:ty = $init:expr;) => {
            $(#[$attribute])* static $name: $type = $init;
        };
    }
    /// As `shared_static`, made at its first use.
    macro_rules! static_made_late {
        ($(#[$attribute:meta])* static $name:ident: $type:ty = $init:expr;) => {
            $(#[$attribute])* static $name: std::sync::LazyLock<$type> = std::sync::LazyLock::new(|| $init);
        };
    }
    pub(crate) use {shared_static, static_made_late};
}

#[cfg(shuttle)]
mod scheduled {
    pub use shuttle::sync::atomic;
    pub use shuttle::thread::{Scope, ScopedJoinHandle, Thread, current, park, scope, sleep, yield_now};
    pub use shuttle::thread_local;

    use crossbeam_utils::Backoff;
    use shuttle::sync::RwLockWriteGuard;
    use std::time::Duration;

    pub use shuttle::sync::{Condvar, MutexGuard, RwLockReadGuard};

    pub fn wait(_: &Backoff) {
        yield_now();
    }

    /// No time passes: others go on.
    pub fn park_timeout(_at_most: Duration) {
        yield_now();
    }

    pub fn spawn_scoped<'scope>(
        scope: &'scope Scope<'scope, '_>,
        _name: String,
        run: impl FnOnce() + Send + 'scope,
    ) -> std::io::Result<ScopedJoinHandle<'scope, ()>> {
        Ok(scope.spawn(run))
    }

    /// No time passes: whom nobody notifies sleeps for ever, which ends the run.
    pub fn wait_notified<'a, T>(
        condition: &Condvar,
        guard: MutexGuard<'a, T>,
        _at_most: Duration,
    ) -> MutexGuard<'a, T> {
        condition.wait(guard).unwrap_or_else(|e| e.into_inner())
    }

    /// With parking_lot's interface: a panic with the lock held is no matter of the lock.
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub const fn new(value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|e| e.into_inner())
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Mutex<T> {
            Mutex::new(T::default())
        }
    }

    /// As [`Mutex`].
    pub struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub const fn new(value: T) -> RwLock<T> {
            RwLock(shuttle::sync::RwLock::new(value))
        }

        pub fn read_recursive(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(|e| e.into_inner())
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.read_recursive()
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(|e| e.into_inner())
        }

        pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            self.0.try_write().ok()
        }
    }

    impl<T: Default> Default for RwLock<T> {
        fn default() -> RwLock<T> {
            RwLock::new(T::default())
        }
    }

    /// parking_lot's, as far as it is used.
    pub struct RawRwLock {
        /// Readers inside, or -1 for a writer.
        inside: Mutex<i32>,
        left: Condvar,
    }

    // SAFETY: `inside` admits readers or one writer, and changes under its mutex only.
    unsafe impl parking_lot::lock_api::RawRwLock for RawRwLock {
        type GuardMarker = parking_lot::lock_api::GuardNoSend;

        #[allow(clippy::declare_interior_mutable_const)]
        const INIT: RawRwLock = RawRwLock { inside: Mutex::new(0), left: Condvar::new() };

        fn lock_shared(&self) {
            *self.when(|inside| inside >= 0) += 1;
        }

        fn try_lock_shared(&self) -> bool {
            let mut inside = self.inside.lock();
            let free = *inside >= 0;
            *inside += free as i32;
            free
        }

        // SAFETY: the caller has the lock, so there is a reader to count off.
        unsafe fn unlock_shared(&self) {
            *self.inside.lock() -= 1;
            self.left.notify_all();
        }

        fn lock_exclusive(&self) {
            *self.when(|inside| inside == 0) = -1;
        }

        fn try_lock_exclusive(&self) -> bool {
            let mut inside = self.inside.lock();
            let free = *inside == 0;
            *inside -= free as i32;
            free
        }

        // SAFETY: the caller has the lock alone.
        unsafe fn unlock_exclusive(&self) {
            *self.inside.lock() = 0;
            self.left.notify_all();
        }
    }

    // SAFETY: as above; there is no moment between writer and reader.
    unsafe impl parking_lot::lock_api::RawRwLockDowngrade for RawRwLock {
        // SAFETY: the caller has the lock alone.
        unsafe fn downgrade(&self) {
            *self.inside.lock() = 1;
            self.left.notify_all();
        }
    }

    impl RawRwLock {
        fn when(&self, may_enter: impl Fn(i32) -> bool) -> MutexGuard<'_, i32> {
            let mut inside = self.inside.lock();
            while !may_enter(*inside) {
                inside = self.left.wait(inside).unwrap_or_else(|e| e.into_inner());
            }
            inside
        }
    }

    macro_rules! shared_static {
        ($(#[$attribute:meta])* static $name:ident: $type:ty = $init:expr;) => {
            shuttle::lazy_static! { $(#[$attribute])* static ref $name: $type = $init; }
        };
    }
    pub(crate) use {shared_static, shared_static as static_made_late};
}
