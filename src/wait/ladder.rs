//! The wait: from rung to rung until it has ended.

use std::time::{Duration, Instant};

use super::bell::{Bell, Seat};
use super::rung::{POLL_MAX, POLL_TOTAL_MAX, Rung, Situation, rung};
use super::sleeper::Sleeper;
use super::uthread::{self, Uthreads};
use super::{Holding, pause, spent};
use crate::sync::primitive;

/// Something that ends.
pub trait Ending {
    /// Whether it has ended; a wait that saw it does not ask again. May do what it takes to find out.
    fn look(&self) -> bool;

    /// As [`look`](Ending::look), by who has not slept yet: what is kept for those who were woken is not its.
    fn look_awake(&self) -> bool {
        self.look()
    }

    /// What rings when it ends; none where nobody does.
    fn bell(&self) -> Option<&Bell> {
        None
    }
}

/// How its end was seen: how exactly the caller knows when it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It had ended when the wait began.
    AtOnce,
    /// Between two looks that follow each other closely.
    Watched,
    /// After a sleep, or anything else that took as long.
    AfterNap,
}

impl Seen {
    /// By a look so long after the one before: a uthread's yield may last as long as others run.
    fn after(gap: Duration) -> Seen {
        if gap <= POLL_MAX { Seen::Watched } else { Seen::AfterNap }
    }
}

/// Waits until it has ended, which is expected at `due`, if anybody knows.
pub fn until(ending: &(impl Ending + ?Sized), due: Option<Instant>, holding: Holding) -> Seen {
    if ending.look_awake() {
        return Seen::AtOnce;
    }
    climb(ending, due, None, holding).expect("it ends, or goes on")
}

/// As [`until`], for a time at most; whether it has ended. For what may never end. A time that no clock reaches is for ever.
pub fn for_at_most(ending: &(impl Ending + ?Sized), time: Duration, holding: Holding) -> bool {
    ending.look_awake() || climb(ending, None, Instant::now().checked_add(time), holding).is_some()
}

/// The polling rung alone, for a time that is cut to what one wait may poll for; whether it has ended.
pub fn poll_for(ending: &(impl Ending + ?Sized), time: Duration) -> bool {
    !cfg!(shuttle) && poll(ending, Instant::now(), time.min(POLL_TOTAL_MAX), pause::moment).0.is_some()
}

/// None at `deadline`.
fn climb(
    ending: &(impl Ending + ?Sized),
    due: Option<Instant>,
    deadline: Option<Instant>,
    holding: Holding,
) -> Option<Seen> {
    let uthread = match holding {
        Holding::Nothing => uthread::current(),
        Holding::Something => None,
    };
    match uthread {
        Some(_) => from_rung_to_rung(ending, due, deadline, uthread),
        None => spent::on(|| from_rung_to_rung(ending, due, deadline, None)),
    }
}

fn from_rung_to_rung(
    ending: &(impl Ending + ?Sized),
    due: Option<Instant>,
    deadline: Option<Instant>,
    uthread: Option<&'static Uthreads>,
) -> Option<Seen> {
    let bell = ending.bell();
    let begun = Instant::now();
    let mut now = begun;
    let mut polled = Duration::ZERO;
    let mut rest = None;
    loop {
        if deadline.is_some_and(|deadline| now >= deadline) {
            return None;
        }
        let next = rung(&Situation {
            left: due.map(|due| due.saturating_duration_since(now)),
            waited: now - begun,
            polled,
            rings: bell.is_some(),
            yields: uthread.is_some(),
        });
        let nap = match next {
            // Under a model checker time is nothing that passes.
            Rung::Poll(_) | Rung::Yield(_) if cfg!(shuttle) => Duration::MAX,
            Rung::Poll(time) => {
                let (seen, at) = poll(ending, now, time, pause::moment);
                if seen.is_some() {
                    return seen;
                }
                (polled, now) = (polled + (at - now), at);
                continue;
            }
            Rung::Yield(time) => {
                let yield_now = uthread.map_or(pause::moment as fn(), |uthread| uthread.yield_now);
                let (seen, at) = poll(ending, now, time, yield_now);
                if seen.is_some() {
                    return seen;
                }
                (polled, now) = (polled + (at - now), at);
                continue;
            }
            Rung::Park(nap) | Rung::Sleep(nap) => nap,
        };
        let nap = deadline.map_or(nap, |deadline| nap.min(deadline - now));
        let rest = rest.get_or_insert_with(|| Rest::new(uthread, bell));
        if rest.nap(ending, nap) {
            return Some(Seen::AfterNap);
        }
        now = Instant::now();
    }
}

/// Looks again and again, for so long; how its end was seen, if it was, and the time then.
fn poll(
    ending: &(impl Ending + ?Sized),
    from: Instant,
    time: Duration,
    pause: impl Fn(),
) -> (Option<Seen>, Instant) {
    let mut before = from;
    loop {
        pause();
        let ended = ending.look();
        let now = Instant::now();
        if ended || now - from >= time {
            return (ended.then(|| Seen::after(now - before)), now);
        }
        before = now;
    }
}

/// A caller that sleeps, and listens meanwhile.
struct Rest<'a> {
    sleeps: Sleeps,
    bell: Option<&'a Bell>,
    seat: Seat,
}

enum Sleeps {
    Uthread(&'static Uthreads, std::task::Waker),
    Thread(std::sync::Arc<Sleeper>),
}

impl Rest<'_> {
    fn new<'a>(uthread: Option<&'static Uthreads>, bell: Option<&'a Bell>) -> Rest<'a> {
        let sleeps = match uthread {
            Some(uthreads) => Sleeps::Uthread(uthreads, (uthreads.waker)()),
            None => Sleeps::Thread(Sleeper::own()),
        };
        Rest { sleeps, bell, seat: Seat::new() }
    }

    /// Whether it has ended.
    fn nap(&self, ending: &(impl Ending + ?Sized), time: Duration) -> bool {
        if let Some(bell) = self.bell {
            match &self.sleeps {
                Sleeps::Uthread(_, waker) => bell.listen(&self.seat, waker),
                Sleeps::Thread(sleeper) => bell.listen(&self.seat, &sleeper.clone().into()),
            }
            // It may have rung before.
            if ending.look_awake() {
                return true;
            }
        }
        match &self.sleeps {
            // Under a model checker no time passes: others go on, of this worker and of all threads.
            Sleeps::Uthread(uthreads, _) if cfg!(shuttle) && self.bell.is_none() => {
                primitive::yield_now();
                (uthreads.yield_now)();
            }
            Sleeps::Uthread(uthreads, _) => {
                (uthreads.park)(time);
                // Awake it looks by itself: a ring is for others now.
                if let Some(bell) = self.bell {
                    bell.leave(&self.seat);
                }
            }
            // The bell ends it; or nothing does but its time.
            Sleeps::Thread(sleeper) if self.bell.is_some() => sleeper.sleep(time),
            Sleeps::Thread(sleeper) => sleeper.nap(time),
        }
        ending.look()
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if let Some(bell) = self.bell {
            bell.leave(&self.seat);
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    struct At(Instant);

    impl Ending for At {
        fn look(&self) -> bool {
            Instant::now() >= self.0
        }
    }

    #[test]
    fn what_is_waited_for_however_long_it_takes_ends() {
        for time in [Duration::MAX, Duration::from_secs(u64::MAX / 4), Duration::from_secs(3600)] {
            for later in [0, 5, 3000].map(Duration::from_micros) {
                assert!(for_at_most(&At(Instant::now() + later), time, Holding::Something), "{time:?}");
            }
        }
    }

    #[test]
    fn a_look_long_after_the_one_before_is_no_watch() {
        assert_eq!(Seen::after(Duration::ZERO), Seen::Watched);
        assert_eq!(Seen::after(POLL_MAX), Seen::Watched);
        assert_eq!(Seen::after(POLL_MAX + Duration::from_nanos(1)), Seen::AfterNap);
    }
}
