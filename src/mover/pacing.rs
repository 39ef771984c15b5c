//! How long copies take, learnt from those that have ended: what waiting is planned by.
//!
//! A time that was seen exactly moves the average towards itself. One that was seen after a sleep is an upper bound,
//! and an average that follows upper bounds would never come down again, because who expects a long wait sleeps for
//! long. So an average that is above such a bound falls to it, and gives way a little at least: until somebody wakes early
//! enough to see the end itself. Whoever asks only after the end may come at any time later: where nothing is known his
//! bound is no beginning.

use std::sync::atomic::{AtomicU32, Ordering};

use super::profile::{BINS, Bins, bin};
use crate::wait::Seen;

/// Of one direction, by size. Threads may overtake each other: then one of two ends is not learnt from.
#[derive(Default)]
pub(super) struct Pacing {
    /// Nanoseconds a byte, as the bits of a float; 0 while nobody knows.
    bins: [AtomicU32; BINS],
}

/// An exact time counts for so much of the average.
const WEIGHT: f32 = 1.0 / 8.0;
/// What an average gives way by, where a sleep was too long.
const GIVES_WAY: f32 = 15.0 / 16.0;

impl Pacing {
    /// For a copy behind so many bytes, from when it is handed over to its end.
    pub fn expected_ns(&self, bytes: usize, before: u64) -> Option<u64> {
        let pace = f32::from_bits(self.bins[bin(bytes)].load(Ordering::Relaxed));
        (pace > 0.0).then(|| (pace * (before + bytes as u64) as f32) as u64)
    }

    /// A copy behind so many bytes has taken so long.
    pub fn learn(&self, bytes: u64, before: u64, ns: u64, seen: Seen) {
        let pace = &self.bins[bin(bytes as usize)];
        let known = f32::from_bits(pace.load(Ordering::Relaxed));
        let found = ns.max(1) as f32 / (before + bytes).max(1) as f32;
        let next = match seen {
            // It had ended long before, perhaps: its caller came late.
            Seen::AtOnce if known == 0.0 => return,
            Seen::AtOnce => found.min(known),
            _ if known == 0.0 => found,
            Seen::Watched => known + (found - known) * WEIGHT,
            Seen::AfterNap => found.min(known * GIVES_WAY),
        };
        pace.store(next.to_bits(), Ordering::Relaxed);
    }

    /// In bytes a second; 0 where nobody measured.
    pub fn seed(&self, bytes_per_s: &Bins) {
        for (pace, rate) in self.bins.iter().zip(bytes_per_s).filter(|(_, rate)| **rate > 0) {
            pace.store((1e9 / *rate as f32).to_bits(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 64 << 10;

    fn expected(pacing: &Pacing) -> u64 {
        pacing.expected_ns(BYTES as usize, 0).unwrap()
    }

    fn about(found: u64, wanted: u64) {
        assert!(found.abs_diff(wanted) <= wanted / 50, "{found} instead of {wanted}");
    }

    #[test]
    fn it_follows_what_was_seen_exactly() {
        let pacing = Pacing::default();
        assert_eq!(pacing.expected_ns(BYTES as usize, 0), None, "nobody knows");
        pacing.learn(BYTES, 0, 10_000, Seen::Watched);
        about(expected(&pacing), 10_000);
        about(pacing.expected_ns(BYTES as usize, 3 * BYTES).unwrap(), 40_000);
        assert_eq!(pacing.expected_ns(4 << 20, 0), None, "another size");
        (0..64).for_each(|_| pacing.learn(BYTES, 0, 30_000, Seen::Watched));
        about(expected(&pacing), 30_000);
        // The time of all that was in the queue is that of so many bytes.
        (0..64).for_each(|_| pacing.learn(BYTES, 9 * BYTES, 200_000, Seen::Watched));
        about(expected(&pacing), 20_000);
    }

    #[test]
    fn a_sleep_that_was_too_long_does_not_feed_itself() {
        let (pacing, lateness) = (Pacing::default(), 60_000);
        // The device takes 15 us. Who expects more than 10 sleeps, and sees the end late.
        pacing.learn(BYTES, 0, 100_000, Seen::AfterNap);
        for _ in 0..200 {
            let (left, truth) = (expected(&pacing), 15_000);
            let slept = left > 10_000;
            match slept {
                true => pacing.learn(
                    BYTES,
                    0,
                    (left.saturating_sub(lateness) + lateness).max(truth),
                    Seen::AfterNap,
                ),
                false => pacing.learn(BYTES, 0, truth, Seen::Watched),
            }
        }
        let at_last = expected(&pacing);
        assert!((8_000..=16_000).contains(&at_last), "{at_last}");
    }

    #[test]
    fn a_pace_that_is_far_too_long_is_left_again() {
        let (pacing, truth) = (Pacing::default(), 15_000);
        pacing.learn(BYTES, 0, 5_000_000_000, Seen::AfterNap);
        let mut samples = 0;
        while expected(&pacing) > 2 * truth {
            // Each sleep lasts as long as was expected, so that no bound is below the average.
            pacing.learn(BYTES, 0, expected(&pacing).max(truth), Seen::AfterNap);
            samples += 1;
            assert!(samples <= 200, "{}", expected(&pacing));
        }
    }

    #[test]
    fn who_comes_late_teaches_an_upper_bound_only() {
        let pacing = Pacing::default();
        pacing.learn(BYTES, 0, 5_000_000_000, Seen::AtOnce);
        assert_eq!(pacing.expected_ns(BYTES as usize, 0), None, "no beginning");
        pacing.learn(BYTES, 0, 10_000, Seen::Watched);
        pacing.learn(BYTES, 0, 900_000, Seen::AtOnce);
        about(expected(&pacing), 10_000);
        pacing.learn(BYTES, 0, 4_000, Seen::AtOnce);
        about(expected(&pacing), 4_000);
    }

    #[test]
    fn it_begins_with_what_the_profile_says() {
        let pacing = Pacing::default();
        pacing.seed(&[0, 4_000_000_000, 0, 0, 0]);
        about(expected(&pacing), 16_384);
        assert_eq!(pacing.expected_ns(4 << 10, 0), None, "nobody measured");
    }
}
