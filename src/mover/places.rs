//! The places of those who copy in front of a region, which callers take and give back without a lock while nobody has to be
//! asked.
//!
//! An instruction that locks the bus, as every mutex has, waits until the streaming stores before it have left the core. Behind
//! a copy that is a second fence, beside the one that its record needs: a tenth of what 64 KiB take. So a place is a flag,
//! which its holder clears by a plain store; only who takes one pays for an exchange, before it copies. Whose turn it is
//! ([`Turns`]) is asked under a lock, and what it answers holds for a moment: for ever while nobody sleeps, else for
//! [`UNASKED_MAX`], after which one pair of leave and enter asks again, and measures.
//!
//! A store that clears a flag may be seen by others after its thread has looked whether somebody has to be asked. So who ends
//! that nobody has to be, as the first to sleep does, has every thread of the process pass a barrier (`sync::barrier`) before
//! it looks at the flags once more; that is rare, and little beside a sleep. The same holds for who takes one while they are
//! suspended: either its flag is seen, or it sees that they are. (`tests/loom` has both, with this file.)

use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::turns::Turns;
use crate::account::stamp;
use crate::sync::barrier;
use crate::sync::primitive::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Of a turn, and of what is learnt from those who ask: little beside a turn, and many copies.
const UNASKED_MAX: Duration = Duration::from_micros(50);

/// No stamp is so far from one that is [`UNASKED_MAX`] later, in ticks: between them the counter went back, as it does where the
/// processor was suspended to memory.
const UNASKED_TICKS_MAX: u64 = 1 << 20;

/// Nobody sleeps.
const FOR_EVER: u64 = u64::MAX;
/// Nobody begins.
const SUSPENDED: u64 = 0;
/// Callers ask: a time that is over.
const ASKED: u64 = 1;

pub(super) struct Places {
    taken: Box<[CachePadded<AtomicBool>]>,
    /// Until this stamp callers need not ask; [`FOR_EVER`], [`ASKED`] or [`SUSPENDED`].
    unasked_until: CachePadded<AtomicU64>,
    /// The kernel has a barrier for all threads. Otherwise each of them passes its own.
    has_barrier: bool,
}

/// Who may come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    /// Callers, as [`Turns`] has it.
    ByTurns,
    /// Callers ask for each place.
    Asked,
    /// Nobody.
    Suspended,
}

/// A place that is its holder's until it gives it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Taken(usize);

impl Places {
    pub fn new(places: usize) -> Places {
        Places {
            taken: (0..places.max(1)).map(|_| CachePadded::default()).collect(),
            unasked_until: CachePadded::new(AtomicU64::new(FOR_EVER)),
            has_barrier: barrier::is_available(),
        }
    }

    /// A free place, where nobody has to be asked for it.
    #[inline]
    pub fn take_unasked(&self) -> Option<Taken> {
        if !is_open(self.unasked_until.load(Ordering::Relaxed)) {
            return None;
        }
        let place = self.take()?;
        self.pass_barrier();
        if self.unasked_until.load(Ordering::Relaxed) == SUSPENDED {
            // Who saw it taken sees nobody begin; who comes asks.
            self.clear(place);
            return None;
        }
        Some(place)
    }

    /// Between a store to a flag and a look at who has to be asked.
    #[inline]
    fn pass_barrier(&self) {
        if self.has_barrier {
            barrier::light();
        } else {
            fence(Ordering::SeqCst);
        }
    }

    #[inline]
    fn clear(&self, place: Taken) {
        self.taken[place.0].store(false, Ordering::Release);
    }

    /// A free place.
    #[inline]
    pub fn take(&self) -> Option<Taken> {
        let take = |place: &CachePadded<AtomicBool>| {
            let take = || place.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
            !place.load(Ordering::Relaxed) && take()
        };
        self.taken.iter().position(take).map(Taken)
    }

    /// Whether somebody has to be asked what becomes of the place.
    #[inline]
    pub fn give_back(&self, place: Taken) -> bool {
        self.clear(place);
        self.pass_barrier();
        !is_open(self.unasked_until.load(Ordering::Relaxed))
    }

    pub fn free(&self) -> usize {
        self.taken.iter().filter(|taken| !taken.load(Ordering::Relaxed)).count()
    }

    /// After each change of who may come and whose turn it is, under the lock of that: whether callers may come and go without
    /// asking at all, and for how long whose turn it is stays as it is. Where they may no more, who gives a place back
    /// from then on asks, or its place is free by the time this returns; and where they are suspended nobody takes one any
    /// more without asking, whose place is not taken by then.
    pub fn note(&self, entry: Entry, turns: &Turns, now: impl FnOnce() -> Instant) {
        let until = match entry {
            Entry::Suspended => SUSPENDED,
            Entry::Asked => ASKED,
            Entry::ByTurns => match turns.stays(now) {
                None => FOR_EVER,
                Some(stays) => stamp::after(stays.min(UNASKED_MAX)).unwrap_or(ASKED),
            },
        };
        let before = self.unasked_until.swap(until, Ordering::Relaxed);
        let was_open = is_open(before) && (before == FOR_EVER || !is_open(until));
        if was_open && until != FOR_EVER || until == SUSPENDED && before != SUSPENDED {
            match self.has_barrier {
                true => barrier::heavy(),
                false => fence(Ordering::SeqCst),
            }
        }
    }
}

/// Whether whoever runs may come and go.
#[inline]
fn is_open(unasked_until: u64) -> bool {
    match unasked_until {
        FOR_EVER => true,
        SUSPENDED | ASKED => false,
        until => (1..UNASKED_TICKS_MAX).contains(&until.wrapping_sub(stamp::now())),
    }
}

#[cfg(all(test, not(any(shuttle, loom))))]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_places_and_whoever_has_one_has_it_alone() {
        let places = Places::new(3);
        let taken: Vec<Taken> = std::iter::from_fn(|| places.take_unasked()).collect();
        assert_eq!(taken, [Taken(0), Taken(1), Taken(2)]);
        assert_eq!((places.take(), places.free()), (None, 0));
        assert!(!places.give_back(taken[1]), "nobody sleeps, so that nobody is asked");
        assert_eq!((places.free(), places.take()), (1, Some(Taken(1))));
    }

    #[test]
    fn callers_ask_where_somebody_sleeps_as_often_as_it_may_change() {
        let (places, mut turns, now) = (Places::new(1), Turns::new(1), Instant::now());
        stamp::begin();
        std::thread::sleep(Duration::from_millis(3));
        let place = places.take_unasked().unwrap();
        turns.falls_asleep(now);
        let note = |turns: &Turns, after: Duration| places.note(Entry::ByTurns, turns, || now + after);
        note(&turns, Duration::ZERO);
        let until = places.unasked_until.load(Ordering::Relaxed);
        assert!(![FOR_EVER, SUSPENDED, ASKED].contains(&until), "for a while nobody is asked");
        // It may be over by now, where this thread did not run meanwhile.
        let left = until.saturating_sub(stamp::now());
        assert!(left as f64 * stamp::ns_per_tick() <= UNASKED_MAX.as_nanos() as f64);
        // Its turn is over.
        note(&turns, Duration::from_secs(1));
        assert!(places.give_back(place) && places.take_unasked().is_none());
        assert!(turns.wakes_one(true, || now + Duration::from_secs(1)).is_some());
        note(&turns, Duration::from_secs(1));
        assert!(places.take_unasked().is_none(), "it is kept for who was woken");
        let place = places.take().unwrap();
        assert!(turns.lets_sleeper_in(1, false, || now));
        note(&turns, Duration::ZERO);
        assert_eq!(places.unasked_until.load(Ordering::Relaxed), FOR_EVER, "nobody sleeps");
        places.note(Entry::Suspended, &turns, || now);
        assert!(places.give_back(place) && places.take_unasked().is_none(), "they are suspended");
        places.note(Entry::Asked, &turns, || now);
        assert!(places.take_unasked().is_none() && places.take() == Some(place), "who asks has it");
    }

    #[test]
    fn who_comes_asks_where_the_counter_went_back() {
        let (later, back) = (UNASKED_TICKS_MAX / 2, UNASKED_TICKS_MAX * 2);
        assert!(is_open(stamp::now() + later) && !is_open(stamp::now()));
        assert!(!is_open(stamp::now() + back));
    }

    /// Where the kernel refuses its barrier (a container may), each passes its own.
    #[test]
    fn places_need_no_barrier_of_the_kernel() {
        let places = Places { has_barrier: false, ..Places::new(1) };
        let (mut turns, now) = (Turns::new(1), Instant::now());
        let place = places.take_unasked().unwrap();
        turns.falls_asleep(now);
        places.note(Entry::ByTurns, &turns, || now);
        places.note(Entry::Suspended, &turns, || now);
        assert!(places.give_back(place) && places.take_unasked().is_none());
    }
}
