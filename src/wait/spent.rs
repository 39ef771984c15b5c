//! What waiting takes of the CPU: of threads, where somebody wants to know, for to ask costs a system call.
//!
//! efficient-pm (§7.2) holds its work queue against OdinFS by this number: what callers spend on waiting beside what the
//! copies take.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};

static COUNTED: AtomicBool = AtomicBool::new(false);
static WAITS: AtomicU64 = AtomicU64::new(0);
static CPU_NS: AtomicU64 = AtomicU64::new(0);

/// By all threads of the process, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Waits that were counted: those for what had not ended when they began.
    pub waits: u64,
    /// CPU time of the waiting threads, user and system, in nanoseconds: looking, polling, falling asleep, waking up. What
    /// wakes them is not theirs. A uthread's wait is left out, for others run meanwhile.
    pub cpu_ns: u64,
}

impl Spent {
    pub fn so_far() -> Spent {
        Spent { waits: WAITS.load(Ordering::Relaxed), cpu_ns: CPU_NS.load(Ordering::Relaxed) }
    }

    /// What came since an earlier look.
    pub fn since(&self, earlier: &Spent) -> Spent {
        Spent {
            waits: self.waits.wrapping_sub(earlier.waits),
            cpu_ns: self.cpu_ns.wrapping_sub(earlier.cpu_ns),
        }
    }
}

/// From now on waits of threads are counted, or not any more; at first they are not.
pub fn count(on: bool) {
    COUNTED.store(on, Ordering::Relaxed);
}

/// Waits on the calling thread.
pub(super) fn on<T>(wait: impl FnOnce() -> T) -> T {
    if cfg!(shuttle) || !COUNTED.load(Ordering::Relaxed) {
        return wait();
    }
    let before = thread_cpu_ns();
    let waited_for = wait();
    CPU_NS.fetch_add(thread_cpu_ns().saturating_sub(before), Ordering::Relaxed);
    WAITS.fetch_add(1, Ordering::Relaxed);
    waited_for
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(all(test, not(shuttle), not(miri)))]
mod tests {
    use std::time::Duration;

    use super::super::{Ending, Holding, for_at_most, poll_for};
    use super::*;

    struct Never;

    impl Ending for Never {
        fn look(&self) -> bool {
            false
        }
    }

    /// Other tests of this process wait, too: numbers are bounds.
    #[test]
    fn a_wait_is_counted_where_somebody_wants_to_know() {
        let wait = || for_at_most(&Never, Duration::from_millis(5), Holding::Something);
        count(true);
        let before = Spent::so_far();
        (0..3).for_each(|_| assert!(!wait()));
        let spent = Spent::so_far().since(&before);
        count(false);
        assert!(spent.waits >= 3 && spent.cpu_ns > 0, "{spent:?}");
        assert!(!poll_for(&Never, Duration::from_micros(1)), "the polling rung alone is its caller's own");
    }
}
