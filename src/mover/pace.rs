//! Waiting for a moment more exactly than the kernel wakes threads: for devices in software that are held to a speed.

use std::time::{Duration, Instant};

/// A sleep may last so much longer than it should.
pub(super) const NEAR: Duration = Duration::from_micros(200);

/// Returns at this moment: sleeps while it is far, and then looks at the clock.
pub(super) fn until(moment: Instant) {
    loop {
        let left = moment.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        match left.checked_sub(NEAR) {
            Some(far) if !far.is_zero() => std::thread::sleep(far),
            _ => std::hint::spin_loop(),
        }
    }
}

/// How long so many bytes take at so many a second.
pub(super) fn time_of(bytes: usize, bytes_per_s: u64) -> Duration {
    Duration::from_nanos((bytes as u64 * 1_000_000_000) / bytes_per_s.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_not_left_before() {
        for time in [Duration::ZERO, Duration::from_micros(20), Duration::from_millis(1)] {
            let begun = Instant::now();
            until(begun + time);
            assert!(begun.elapsed() >= time);
        }
        assert_eq!(time_of(64 << 10, 1 << 30), Duration::from_nanos(61_035));
    }
}
