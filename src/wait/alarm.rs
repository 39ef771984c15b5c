//! Wakers that are woken at a time: for async tasks on executors of others, whose engine wakes nobody.
//!
//! One thread, which begins with the first alarm and ends when there has been none for a while, sleeps until the
//! next. Its CPU time is the process's like any other, and `lode bench` and `lode cost` count it. An alarm is of one
//! seat, and goes when that sets another or cancels it.

use std::collections::{BTreeMap, HashMap};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::bell::{Seat, wake};
use super::slack;
use crate::sync::signals::kept_off;

/// The thread ends after so long without an alarm.
const IDLE_MAX: Duration = Duration::from_secs(1);

struct Alarms {
    by_time: BTreeMap<(Instant, u64), Waker>,
    by_seat: HashMap<u64, Instant>,
    running: bool,
}

static ALARMS: Mutex<Option<Alarms>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

impl Alarms {
    fn remove(&mut self, seat: u64) -> Option<Waker> {
        let at = self.by_seat.remove(&seat)?;
        self.by_time.remove(&(at, seat))
    }
}

impl Seat {
    /// Wakes at that time, instead of when it was to before.
    pub fn set_alarm(&self, at: Instant, waker: &Waker) {
        let mut alarms = ALARMS.lock();
        let known = alarms.get_or_insert_with(|| Alarms {
            by_time: BTreeMap::new(),
            by_seat: HashMap::new(),
            running: false,
        });
        // Dropped last, outside of the lock: whose last it is may do anything.
        let before = known.remove(self.number());
        let soonest = known.by_time.first_key_value().is_none_or(|((first, _), _)| at < *first);
        if !known.running {
            match kept_off(|| std::thread::Builder::new().name("lode-alarms".to_owned()).spawn(run)) {
                Ok(_) => known.running = true,
                Err(e) => {
                    drop(alarms);
                    tracing::warn!("a copy is waited for by looking again and again: no thread starts: {e}");
                    return waker.wake_by_ref();
                }
            }
        }
        known.by_seat.insert(self.number(), at);
        known.by_time.insert((at, self.number()), waker.clone());
        drop((alarms, before));
        if soonest {
            CHANGED.notify_one();
        }
    }

    /// No alarm of this seat goes off any more.
    pub fn cancel_alarm(&self) {
        let gone = ALARMS.lock().as_mut().and_then(|alarms| alarms.remove(self.number()));
        // Outside of the lock: whose last it is may do anything.
        drop(gone);
    }
}

fn run() {
    slack::hurry();
    let mut alarms = ALARMS.lock();
    loop {
        let known = alarms.as_mut().expect("the first alarm made it");
        let now = Instant::now();
        match known.by_time.first_key_value().map(|((at, seat), _)| (*at, *seat)) {
            Some((at, seat)) if at <= now => {
                let waker = known.remove(seat);
                parking_lot::MutexGuard::unlocked(&mut alarms, || waker.into_iter().for_each(wake));
            }
            Some((at, _)) => drop(CHANGED.wait_until(&mut alarms, at)),
            None => {
                let idle = CHANGED.wait_for(&mut alarms, IDLE_MAX).timed_out();
                let known = alarms.as_mut().expect("the first alarm made it");
                if idle && known.by_time.is_empty() {
                    known.running = false;
                    return;
                }
            }
        }
    }
}

#[cfg(all(test, not(shuttle), not(miri)))]
mod tests {
    use super::*;
    use crate::wait::current_waker;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    struct Woken(AtomicUsize, Waker);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::SeqCst);
            self.1.wake_by_ref();
        }
    }

    fn woken() -> (Arc<Woken>, Waker) {
        let woken = Arc::new(Woken(AtomicUsize::new(0), current_waker()));
        (woken.clone(), woken.into())
    }

    /// As a task that takes its other waits with it.
    #[test]
    fn whose_waker_is_replaced_may_cancel_alarms_as_it_goes() {
        struct Cancels(Seat);

        impl Wake for Cancels {
            fn wake(self: Arc<Cancels>) {}
        }

        impl Drop for Cancels {
            fn drop(&mut self) {
                self.0.cancel_alarm();
            }
        }

        let (seat, other) = (Seat::new(), Seat::new());
        let ((woken, waker), late) = (woken(), Instant::now() + Duration::from_secs(3600));
        other.set_alarm(late, &waker);
        seat.set_alarm(late, &Arc::new(Cancels(other)).into());
        assert_eq!(Arc::strong_count(&woken), 3);
        seat.set_alarm(late, &waker);
        assert_eq!(Arc::strong_count(&woken), 3, "one is its own, and one is gone");
        seat.cancel_alarm();
    }

    #[test]
    fn alarms_go_off_in_time_and_once_and_not_when_cancelled() {
        // A machine that is busy may take longer to cancel an alarm than it has to go off: then it is given longer.
        let shown =
            [30, 300, 3000, 30_000].into_iter().any(|ms| alarms_go_off_after(Duration::from_millis(ms)));
        assert!(shown, "to set and cancel alarms took longer than 30 s");
    }

    /// False where they were due before they were all set and cancelled: then nothing is shown.
    fn alarms_go_off_after(delay: Duration) -> bool {
        let (first, later, never) = (Seat::new(), Seat::new(), Seat::new());
        let ((a, wake_a), (b, wake_b), (c, wake_c)) = (woken(), woken(), woken());
        let now = Instant::now();
        let soon = now + delay;
        never.set_alarm(soon, &wake_c);
        never.cancel_alarm();
        later.set_alarm(soon + Duration::from_millis(10), &wake_b);
        first.set_alarm(now + Duration::from_secs(3600), &wake_a);
        // Instead of the hour.
        first.set_alarm(soon, &wake_a);
        if Instant::now() >= soon {
            [&first, &later].into_iter().for_each(Seat::cancel_alarm);
            return false;
        }
        while b.0.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Instant::now() >= soon + Duration::from_millis(10));
        assert_eq!(a.0.load(Ordering::SeqCst), 1, "the earlier one was before");
        assert_eq!(c.0.load(Ordering::SeqCst), 0, "it was cancelled");
        drop((wake_a, wake_b, wake_c));
        assert_eq!([&a, &c].map(Arc::strong_count), [1, 1], "nothing is left behind");
        true
    }
}
