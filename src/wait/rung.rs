//! Which rung of the ladder is next: a function of what is known, without clock or state.
//!
//! The limits come from `lode bench --only waits` (`docs/decisions/0082-wait-ladder.md`): to sleep and to be woken
//! costs about as much CPU time as [`POLL_MAX`] of polling, and a sleep that nobody ends is late by [`NAP_LATE`].

use std::time::Duration;

/// What is expected sooner is polled for: to sleep and to be woken takes as much CPU time.
pub const POLL_MAX: Duration = Duration::from_micros(10);
/// One wait polls for so long at most, all its attempts together.
pub const POLL_TOTAL_MAX: Duration = Duration::from_micros(30);
/// A sleep that nobody ends lasts so much longer than it should, in a hurry (`slack`).
pub(super) const NAP_LATE: Duration = Duration::from_micros(20);
/// Where nobody rings: the shortest sleep, and the longest, because an expectation may be wrong by any factor.
const NAP_MIN: Duration = Duration::from_micros(5);
const NAP_MAX: Duration = Duration::from_millis(1);
/// Where a bell is to ring, a sleeper looks again after so long all the same.
pub const NAP_RINGS_MAX: Duration = Duration::from_millis(100);

/// What is known of a wait that is not over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Situation {
    /// In how long it is expected to end; zero where it is late, none where nobody knows.
    pub left: Option<Duration>,
    /// Since when it is waited for.
    pub waited: Duration,
    /// Of that, polled or yielded.
    pub polled: Duration,
    /// Somebody wakes the caller at its end.
    pub rings: bool,
    /// It is a uthread that may give its worker away.
    pub yields: bool,
}

/// What is to be done next, for so long at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rung {
    Poll(Duration),
    Yield(Duration),
    Park(Duration),
    Sleep(Duration),
}

pub(super) fn rung(now: &Situation) -> Rung {
    let budget = POLL_TOTAL_MAX.saturating_sub(now.polled);
    // What nobody knows anything of, and nobody rings for, is worth one attempt.
    let soon = match now.left {
        Some(left) => left <= POLL_MAX,
        None => !now.rings && now.polled.is_zero(),
    };
    if soon && !budget.is_zero() {
        // Expectations are wrong by as much as is worth polling for.
        let time = (now.left.unwrap_or(Duration::ZERO) + POLL_MAX).min(budget);
        return if now.yields { Rung::Yield(time) } else { Rung::Poll(time) };
    }
    let nap = if now.rings { NAP_RINGS_MAX } else { look_again(now.waited, now.left) };
    if now.yields { Rung::Park(nap) } else { Rung::Sleep(nap) }
}

/// In how long another look is worthwhile, at something for which nobody rings: shortly before it is due, as far as a sleep
/// can be as exact as that. The later it is the less a little more matters.
pub fn look_again(waited: Duration, left: Option<Duration>) -> Duration {
    match left {
        Some(left) if left > NAP_LATE + NAP_MIN => (left - NAP_LATE).min(NAP_MAX),
        _ => (waited / 4).clamp(NAP_MIN, NAP_MAX),
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    const fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    const FIRST: Situation =
        Situation { left: None, waited: us(0), polled: us(0), rings: false, yields: false };

    #[test]
    fn rungs_follow_what_is_expected() {
        let expected = |left, rings, yields| rung(&Situation { left, rings, yields, ..FIRST });
        for (left, rings, yields, wanted) in [
            // Soon: polled for, as much longer as the expectation may be wrong.
            (Some(us(0)), false, false, Rung::Poll(us(10))),
            (Some(us(3)), true, false, Rung::Poll(us(13))),
            (Some(us(10)), false, false, Rung::Poll(us(20))),
            (Some(us(10)), true, true, Rung::Yield(us(20))),
            // Later: until it rings, or until shortly before.
            (Some(us(11)), true, false, Rung::Sleep(NAP_RINGS_MAX)),
            (Some(us(11)), true, true, Rung::Park(NAP_RINGS_MAX)),
            (Some(us(11)), false, false, Rung::Sleep(NAP_MIN)),
            (Some(us(1000)), false, false, Rung::Sleep(us(980))),
            (Some(us(1000)), false, true, Rung::Park(us(980))),
            (Some(us(5_000_000)), false, false, Rung::Sleep(NAP_MAX)),
            // Unknown: one attempt where nobody rings.
            (None, false, false, Rung::Poll(us(10))),
            (None, false, true, Rung::Yield(us(10))),
            (None, true, false, Rung::Sleep(NAP_RINGS_MAX)),
            (None, true, true, Rung::Park(NAP_RINGS_MAX)),
        ] {
            assert_eq!(expected(left, rings, yields), wanted, "{left:?} rings {rings} yields {yields}");
        }
    }

    #[test]
    fn who_is_late_is_not_polled_for_without_end() {
        let late = |polled, waited, rings| {
            rung(&Situation { left: Some(us(0)), waited, polled, rings, yields: false })
        };
        assert_eq!(late(us(20), us(20), false), Rung::Poll(us(10)));
        assert_eq!(late(us(25), us(25), false), Rung::Poll(us(5)), "what is left of the budget");
        assert_eq!(late(us(30), us(16), false), Rung::Sleep(NAP_MIN));
        assert_eq!(late(us(31), us(31), true), Rung::Sleep(NAP_RINGS_MAX));
        assert_eq!(late(us(30), us(400), false), Rung::Sleep(us(100)), "a quarter of what it has taken");
        assert_eq!(late(us(30), us(1 << 30), false), Rung::Sleep(NAP_MAX));
        // Nobody knows, and the one attempt is over.
        assert_eq!(
            rung(&Situation { polled: us(10), waited: us(10), ..FIRST }),
            Rung::Sleep(NAP_MIN),
            "unknown"
        );
    }

    /// Simulates waits of all lengths, with expectations of all kinds of wrong: none polls for longer than it may, none
    /// goes on in one way for ever.
    #[test]
    fn no_wait_polls_for_longer_than_it_may() {
        for end in [1, 5, 10, 30, 100, 1000, 100_000u64].map(us) {
            for expected in [None, Some(us(0)), Some(end / 10), Some(end), Some(end * 10)] {
                for yields in [false, true] {
                    let mut now = Situation { yields, ..FIRST };
                    let mut steps = 0;
                    while now.waited < end {
                        now.left = expected.map(|due| due.saturating_sub(now.waited));
                        match rung(&now) {
                            Rung::Poll(time) | Rung::Yield(time) => {
                                assert!(!time.is_zero());
                                let time = time.min(end - now.waited);
                                now.polled += time;
                                now.waited += time;
                            }
                            Rung::Park(nap) | Rung::Sleep(nap) => now.waited += nap,
                        }
                        steps += 1;
                        assert!(steps < 1000, "{end:?}, expected {expected:?}");
                    }
                    assert!(now.polled <= POLL_TOTAL_MAX, "{end:?}, expected {expected:?}: {now:?}");
                    // An expectation that is right makes it late by a nap of little length at most.
                    if expected == Some(end) {
                        assert!(now.waited <= end + end / 4 + NAP_MIN, "{end:?}: {now:?}");
                    }
                }
            }
        }
    }
}
