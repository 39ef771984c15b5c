//! Uthreads: threads of this program, light enough to have one for each request, so that a worker does something else
//! while data moves (EasyIO §2.3, §4.1).
//!
//! ```
//! use lodestone::runtime::{self, Options, Runtime};
//!
//! let runtime = Runtime::new(Options::default()).unwrap();
//! let sum = runtime
//!     .spawn(|| {
//!         let parts: Vec<_> = (0..10).map(|n| runtime::spawn(move || n * n).unwrap()).collect();
//!         parts.into_iter().map(|part| part.join().unwrap()).sum::<i32>()
//!     })
//!     .unwrap();
//! runtime.run(2).unwrap();
//! assert_eq!(sum.join().unwrap(), 285);
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `switch` | the switch itself, stacks, what becomes of an overflow |
//! | `task` | one uthread, and its result |
//! | `worker` | queues, stealing, sleep |
//! | `wait` | waiting, for uthreads and threads alike; what the room `wait` is told of it |
//! | `timer` | alarms |
//! | `lock`, `channel` | mutex, condition variable and channel that let others run meanwhile |
//!
//! **Where a uthread runs.** One that has not begun yet is anybody's. One that has begun stays with its worker, since
//! what it holds may belong to that thread: a lock of the standard library, a reference to a thread's own variable. Only
//! who makes a uthread with [`Runtime::spawn_movable`] vouches that it holds nothing of the kind where it waits, and
//! then idle workers steal it at any time.

mod channel;
mod lock;
#[cfg(all(test, shuttle))]
mod schedules;
mod switch;
mod task;
mod timer;
mod wait;
mod worker;

use std::sync::Arc;
use std::time::Duration;

pub use channel::{Closed, Receiver, Sender, TryRecv, TrySend, bounded};
pub use lock::{Condvar, Mutex, MutexGuard};
pub use task::{JoinHandle, Outcome};
pub use wait::{Unparker, park, park_timeout, sleep, yield_now};

use crate::error::{Error, Result};
use worker::Shared;

/// How a runtime is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of each uthread, in bytes; memory is used as far as it is touched. Addresses are reserved for several at a time, up to 32 MiB.
    pub stack_bytes: usize,
    /// A uthread that keeps its worker for longer is reported.
    pub long_slice: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { stack_bytes: 64 << 10, long_slice: Duration::from_millis(20) }
    }
}

/// What a runtime did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Uthreads that have not ended.
    pub live: usize,
    pub spawned: u64,
    /// Times that a worker ran a uthread.
    pub slices: u64,
    /// Times that a worker took uthreads from another.
    pub steals: u64,
    /// Slices that were too long.
    pub long_slices: u64,
}

/// In how long the next completion is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pending(pub Duration);

/// Something that completes, and wakes who waits for it, when it is looked at. One that panics is polled no more, and the log says so.
pub trait Poller: Send + Sync {
    /// Wakes those whose wait is over; in how long more is expected, if anything is under way.
    fn poll(&self) -> Option<Pending>;
}

/// Runs uthreads.
pub struct Runtime {
    shared: Arc<Shared>,
}

impl Runtime {
    pub fn new(options: Options) -> Result<Runtime> {
        crate::wait::provide(wait::uthreads());
        Ok(Runtime { shared: Arc::new(Shared::new(options)?) })
    }

    /// A uthread; it runs once the runtime does. Fails where there is no memory for its stack.
    pub fn spawn<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        Shared::spawn(&self.shared, None, false, run)
    }

    /// As [`spawn`](Runtime::spawn), with a name for messages.
    pub fn spawn_named<T: Send + 'static>(
        &self,
        name: &str,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        Shared::spawn(&self.shared, Some(name.into()), false, run)
    }

    /// As [`spawn`](Runtime::spawn); workers that have nothing to do take it over, whenever it waits. Only not while an
    /// engine copies for it, when it keeps its worker: it may have stores that its thread has still to fence.
    ///
    /// # Safety
    ///
    /// Wherever the uthread waits (a lock, a channel, a join, a sleep, a yield of this room) it holds nothing that
    /// belongs to a thread: no lock of the standard library, no reference to a thread's variable, nothing that is not
    /// `Send`.
    pub unsafe fn spawn_movable<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        Shared::spawn(&self.shared, None, true, run)
    }

    /// Runs on this thread and on `workers - 1` more, until no uthread is left. One at a time. What another thread spawns as it
    /// ends may be left to the next run.
    pub fn run(&self, workers: usize) -> Result<()> {
        Shared::run(&self.shared, workers)
    }

    /// Something that workers poll between uthreads, from now on. Anybody may add it, also another that is polled just now.
    pub fn add_poller(&self, poller: Arc<dyn Poller>) {
        self.shared.add_poller(poller);
    }

    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.shared.clear();
    }
}

/// A uthread beside the one that calls. Fails outside of uthreads, and where there is no memory for its stack.
pub fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    worker::spawn_beside(run).unwrap_or_else(|| {
        let message = "only a uthread can spawn without a runtime: call Runtime::spawn";
        Err(Error::message(libc::EINVAL, "runtime::spawn", message))
    })
}

/// Whether the caller is a uthread.
pub fn is_uthread() -> bool {
    switch::inside()
}
