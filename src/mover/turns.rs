//! Whose turn it is to copy, where more callers want to than may: a turn is many copies.
//!
//! To put a caller to sleep and to wake it takes as much CPU time as several copies of 64 KiB. So a place that is given back
//! is not at once another caller's: who runs and comes back for it soon keeps it, until its turn is over; only then one that
//! sleeps is woken, and the place is kept for it. Were it woken after each copy, it would mostly come too late and sleep
//! again, and writers that wait would cost more than writers that crowd the memory (efficient-pm §4 limits them to save
//! CPU time). Where nobody comes back soon, each place that is given back wakes one.
//!
//! A decision is a function of counts and the clock, without locks: those are its users', [`Semaphore`] and [`Delegate`].
//! That who held a place never comes back is found out by who sleeps: it looks by itself where its turn is overdue.
//!
//! [`Semaphore`]: super::engine_semaphore::Semaphore
//! [`Delegate`]: super::engine_delegate::Delegate

use std::time::{Duration, Instant};

use crate::wait::{Ending, Holding, POLL_MAX, for_at_most};

/// For how long places are not given to others while callers sleep: a sleep and its two switches (10 to 15 us) are little of it, and
/// where there are more threads than CPUs each waits as long for a CPU.
const TURN: Duration = Duration::from_micros(1500);
/// Who has not come back after so long does something else meanwhile.
const BACK_SOON: Duration = POLL_MAX;
/// A gap counts as so much at most, so that it is soon found out when there are none any more.
const GAP_MAX: Duration = Duration::from_nanos(4 * BACK_SOON.as_nanos() as u64);
/// A place is kept so long for who was woken; it may find no CPU.
const KEPT_MAX: Duration = Duration::from_millis(1);
/// So long after its turn should have come who sleeps looks by itself, and as often from then on. A sleep that is to end before the
/// kernel's next tick (4 ms where it has 250 a second) programs a timer, and once more when it was woken: in a virtual machine
/// 5 us of CPU time, half of what the whole sleep takes. It is rare: who did not come back once is not expected next time.
const OVERDUE: Duration = Duration::from_millis(4);

/// Who is to be woken for a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wakes {
    One,
    /// All were woken: one that came too late, because the engine's own threads took its place, and sleeps again.
    Again,
}

pub(super) struct Turns {
    places: u32,
    /// Callers that sleep, or have been woken and have not looked yet.
    sleeping: usize,
    /// Places that are kept for those who were woken, and since when the last of them is.
    kept: usize,
    kept_since: Instant,
    began: Instant,
    /// When a place was given back last, until somebody comes who runs.
    given_back: Option<Instant>,
    /// How long that takes, on average.
    gap: Duration,
}

impl Turns {
    pub fn new(places: usize) -> Turns {
        let (now, places) = (Instant::now(), u32::try_from(places).unwrap_or(u32::MAX).max(1));
        Turns {
            places,
            sleeping: 0,
            kept: 0,
            kept_since: now,
            began: now,
            given_back: None,
            gap: Duration::ZERO,
        }
    }

    /// Whether who comes may have one of so many free places, without sleeping.
    #[inline]
    pub fn lets_in(&mut self, free: usize, now: impl FnOnce() -> Instant) -> bool {
        // Nobody to be fair to: no clock is looked at.
        if self.sleeping == 0 {
            return free > 0;
        }
        let now = now();
        self.came(now);
        if self.kept > 0 && now.saturating_duration_since(self.kept_since) > KEPT_MAX {
            self.kept = 0;
        }
        free > self.kept
    }

    /// Who was not let in sleeps from now on. Where all places are in use its turn comes after those of who sleeps already:
    /// within so long, or somebody went and did not come back.
    pub fn falls_asleep(&mut self, now: Instant) -> Duration {
        if self.sleeping == 0 {
            (self.began, self.kept, self.given_back) = (now, 0, None);
        }
        let before = u32::try_from(self.sleeping).unwrap_or(u32::MAX);
        self.sleeping += 1;
        TURN.saturating_mul(before / self.places + 1) + OVERDUE
    }

    /// Whether one that sleeps, and looks, has one of so many free places; then it sleeps no more. One that is `awake` was not
    /// woken, and leaves to others what is kept for them; where all were woken it is kept for any of them.
    pub fn lets_sleeper_in(&mut self, free: usize, awake: bool, now: impl FnOnce() -> Instant) -> bool {
        let not_its = if awake && self.kept < self.sleeping { self.kept } else { 0 };
        if free <= not_its {
            return false;
        }
        self.sleeping -= 1;
        self.kept = self.kept.saturating_sub(1).min(self.sleeping);
        self.began = now();
        self.came(self.began);
        true
    }

    /// One that sleeps, and looks, wants no place any more.
    pub fn sleeper_goes(&mut self) {
        self.sleeping -= 1;
        self.kept = self.kept.min(self.sleeping);
    }

    /// A place was given back, by a caller that may come back or by somebody else: whether one that sleeps is to be woken,
    /// for which it is kept; then [`woke`](Turns::woke) follows.
    #[inline]
    pub fn wakes_one(&mut self, by_caller: bool, now: impl FnOnce() -> Instant) -> Option<Wakes> {
        if self.sleeping == 0 {
            return None;
        }
        if self.sleeping == self.kept {
            return Some(Wakes::Again);
        }
        let now = now();
        self.given_back = Some(now);
        let over = !by_caller || now.saturating_duration_since(self.began) >= TURN || self.gap > BACK_SOON;
        if over {
            self.kept += 1;
            (self.kept_since, self.began) = (now, now);
        }
        over.then_some(Wakes::One)
    }

    /// One that sleeps has been woken, or nobody was there to be woken, since those that sleep are about to look. That took longer
    /// than a caller takes to come back, whose time counts from now on.
    pub fn woke(&mut self, wakes: Wakes, one: bool, now: Instant) {
        if wakes == Wakes::One && !one {
            self.kept = self.kept.saturating_sub(1);
        }
        if self.given_back.is_some() {
            self.given_back = Some(now);
        }
    }

    /// For how long callers may come and go without asking; none where nobody sleeps, so that it does not matter who does.
    pub fn stays(&self, now: impl FnOnce() -> Instant) -> Option<Duration> {
        if self.sleeping == 0 {
            return None;
        }
        if self.kept > 0 || self.given_back.is_some() || self.gap > BACK_SOON {
            return Some(Duration::ZERO);
        }
        Some(TURN.saturating_sub(now().saturating_duration_since(self.began)))
    }

    fn came(&mut self, now: Instant) {
        if let Some(since) = self.given_back.take() {
            self.gap = (self.gap * 3 + now.saturating_duration_since(since).min(GAP_MAX)) / 4;
        }
    }
}

/// Sleeps until a place is the calling thread's, who may hold locks, and will have stores to fence. `soon` is when it
/// looks first, should nobody wake it.
pub(super) fn sleep_for(place: &impl Ending, soon: Duration) {
    if !for_at_most(place, soon, Holding::Something) {
        while !for_at_most(place, OVERDUE, Holding::Something) {}
    }
}

#[cfg(all(test, not(any(shuttle, loom))))]
mod tests {
    use super::*;

    /// One place, a clock, and who comes.
    struct Gate {
        turns: Turns,
        now: Instant,
        free: usize,
    }

    impl Gate {
        fn new(free: usize) -> Gate {
            let turns = Turns::new(free);
            Gate { now: turns.began, turns, free }
        }

        fn after(&mut self, us: u64) -> &mut Gate {
            self.now += Duration::from_micros(us);
            self
        }

        fn comes(&mut self) -> bool {
            let now = self.now;
            let in_now = self.turns.lets_in(self.free, || now);
            self.free -= usize::from(in_now);
            if !in_now {
                self.turns.falls_asleep(now);
            }
            in_now
        }

        fn looks(&mut self) -> bool {
            self.looks_being(false)
        }

        fn looks_being(&mut self, awake: bool) -> bool {
            let now = self.now;
            let in_now = self.turns.lets_sleeper_in(self.free, awake, || now);
            self.free -= usize::from(in_now);
            in_now
        }

        fn goes(&mut self) -> bool {
            let now = self.now;
            self.free += 1;
            self.turns.wakes_one(true, || now).is_some()
        }
    }

    #[test]
    fn who_comes_back_soon_keeps_its_place_for_a_turn() {
        let mut gate = Gate::new(1);
        assert!(gate.comes());
        assert!(!gate.comes(), "another one sleeps");
        let mut copies = 0;
        while !gate.after(3).goes() {
            assert!(gate.after(1).comes(), "nobody is woken, so that the place is for who runs");
            copies += 1;
        }
        let turn = TURN.as_micros() as u64 / 4;
        assert!((turn - 2..=turn + 2).contains(&copies), "a turn had {copies} copies of 4 us");
        // Now it is kept for who was woken, also before that one looks.
        assert!(!gate.after(1).comes());
        assert!(gate.after(20).looks());
        assert!(!gate.after(3).goes(), "its turn has begun");
    }

    #[test]
    fn where_nobody_comes_back_soon_each_place_wakes_one() {
        let mut gate = Gate::new(1);
        assert!(gate.comes());
        (0..9).for_each(|_| assert!(!gate.comes()));
        // At first it is taken for one that comes back; who sleeps finds out.
        assert!(!gate.after(5).goes());
        assert!(gate.after(OVERDUE.as_micros() as u64).looks());
        let mut woken = 0;
        for _ in 0..8 {
            if gate.after(5).goes() {
                woken += 1;
            }
            assert!(gate.after(50).looks());
        }
        assert!(woken >= 6, "{woken} of 8");
    }

    #[test]
    fn who_sleeps_looks_by_itself_where_its_turn_is_overdue() {
        for (places, overdue) in [(1, [1, 2, 3, 4]), (2, [1, 1, 2, 2])] {
            let mut gate = Gate::new(places);
            (0..places).for_each(|_| assert!(gate.comes()));
            for turns in overdue {
                let now = gate.now;
                assert_eq!(gate.turns.falls_asleep(now), TURN * turns + OVERDUE, "{places} places");
            }
        }
    }

    #[test]
    fn a_place_is_not_kept_for_ever() {
        let mut gate = Gate::new(1);
        assert!(gate.comes());
        assert!(!gate.comes());
        assert!(gate.after(1600).goes());
        assert!(!gate.after(900).comes(), "two sleep");
        assert!(gate.after(200).comes(), "who was woken has no CPU");
        assert!(!gate.looks());
        gate.goes();
        assert!(gate.looks() && gate.turns.sleeping == 1);
        gate.goes();
        assert!(gate.looks() && gate.turns.sleeping == 0 && gate.turns.kept == 0);
        gate.goes();
        assert!(gate.comes());
    }

    #[test]
    fn what_it_takes_to_wake_another_is_no_absence() {
        let mut gate = Gate::new(1);
        assert!(gate.comes() && !gate.comes());
        for turn in 0..9 {
            let mut copies = 0;
            while !gate.after(25).goes() {
                assert!(gate.after(2).comes());
                copies += 1;
            }
            assert!(copies > 40, "turn {turn} had {copies} copies");
            let now = gate.after(12).now;
            gate.turns.woke(Wakes::One, true, now);
            assert!(!gate.after(2).comes() && gate.after(20).looks());
        }
    }

    #[test]
    fn who_falls_asleep_does_not_take_what_is_kept_for_who_was_woken() {
        let mut gate = Gate::new(1);
        assert!(gate.comes() && !gate.comes());
        assert!(gate.after(1600).goes(), "one is woken");
        assert!(!gate.after(2).comes() && !gate.looks_being(true), "it falls asleep behind that one");
        assert!(gate.after(30).looks(), "who was woken");
        assert!(gate.after(1600).goes());
        // The one that sleeps is about to: nobody was there to be woken.
        assert!(gate.looks_being(true), "all were woken, hence it");
        assert!(!gate.comes() && !gate.comes());
        assert!(gate.after(1600).goes());
        assert!(!gate.looks_being(true), "one of the two, which is known when it was woken");
        let now = gate.now;
        gate.turns.woke(Wakes::One, false, now);
        assert!(gate.looks_being(true), "none was");
    }

    #[test]
    fn who_does_not_come_back_gives_its_place_away() {
        let mut gate = Gate::new(1);
        assert!(gate.comes() && !gate.comes());
        gate.free += 1;
        let now = gate.now;
        assert_eq!(gate.turns.wakes_one(false, || now), Some(Wakes::One), "the engine's own thread");
        assert!(!gate.comes() && gate.looks());
    }

    #[test]
    fn one_of_two_places_is_kept() {
        let mut gate = Gate::new(2);
        assert!(gate.comes() && gate.comes() && !gate.comes());
        assert!(gate.after(1600).goes());
        let now = gate.now;
        gate.turns.woke(Wakes::One, true, now);
        assert!(gate.after(1).goes());
        // It is on its way, and was not there to be woken again.
        gate.turns.woke(Wakes::Again, false, now);
        assert!(gate.turns.kept == 1, "one sleeps, for which a place is kept");
        assert!(gate.comes(), "the other place is free");
        assert!(!gate.comes() && gate.looks());
    }
}
