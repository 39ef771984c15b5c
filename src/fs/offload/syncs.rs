//! Syncs that somebody waits for with something else to do meanwhile: one thread makes them, for all who ask.
//!
//! A sync of an ordinary file blocks its thread for as long as the disk takes. Of a uthread that is a worker, which others need;
//! of a future it is whoever polls it. What was asked for while one sync was under way is all covered by the next, so that one
//! thread is as good as many. It begins with the first request and ends when there has been none for a while; it has the
//! file system only as long as somebody waits. Its CPU time is the process's like any other.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::media::Media;
use crate::sync::signals::kept_off;
use crate::wait::{Bell, Ending};

/// The thread ends after so long without a request.
const IDLE_MAX: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

/// Requests, and whether a thread sees to them.
#[derive(Default)]
pub struct Syncer {
    queue: Mutex<Queue>,
    came: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
}

impl Syncer {
    /// Fails with the job where no thread begins.
    fn add(self: &Arc<Self>, job: Job) -> std::result::Result<(), (Job, std::io::Error)> {
        let mut queue = self.queue.lock();
        if !queue.running {
            let this = self.clone();
            let thread = std::thread::Builder::new().name("lode-sync".to_owned());
            let begun = kept_off(|| thread.spawn(move || this.run()));
            if let Err(e) = begun {
                return Err((job, e));
            }
            queue.running = true;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.came.notify_one();
        Ok(())
    }

    fn run(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut queue, job);
            } else if self.came.wait_for(&mut queue, IDLE_MAX).timed_out() && queue.jobs.is_empty() {
                queue.running = false;
                return;
            }
        }
    }
}

/// A sync that was asked for.
#[derive(Default)]
pub(super) struct Requested {
    done: Mutex<Option<Result<()>>>,
    pub(super) bell: Bell,
}

impl Requested {
    /// `sync` makes durable what was there in the epoch that it is given.
    pub(super) fn of<M: Media>(
        fs: &Arc<Fs<M>>,
        sync: impl FnOnce(&Fs<M>, u64) -> Result<()> + Send + 'static,
    ) -> Arc<Requested> {
        let requested = Arc::<Requested>::default();
        let (its, shared, epoch) = (requested.clone(), fs.clone(), fs.core.epochs.current());
        let job = move || {
            let caught = catch_unwind(AssertUnwindSafe(|| sync(&shared, epoch)));
            // Others wait for their syncs behind this one.
            let done = caught.unwrap_or_else(|_| {
                let message = "the sync panicked: nothing is known to be durable; open the pool again";
                Err(Error::message(libc::EIO, "offload::sync", message))
            });
            // Whoever is told may go on to let go of the pool.
            drop(shared);
            *its.done.lock() = Some(done);
            its.bell.ring();
        };
        if let Err((job, e)) = fs.syncer.add(Box::new(job)) {
            tracing::warn!("a sync is waited for by the task that asked for it: no thread starts: {e}");
            job();
        }
        requested
    }

    /// How it ended, once.
    pub(super) fn take(&self) -> Option<Result<()>> {
        self.done.lock().take()
    }
}

impl Ending for Requested {
    fn look(&self) -> bool {
        self.done.lock().is_some()
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.bell)
    }
}
