//! Time stamps: the processor's counter where it runs at one rate in every power state, else the system's clock.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Rates are taken over at least so long.
const CALIBRATION: Duration = Duration::from_millis(2);
/// A rate that is taken over so long holds for ever.
const SETTLED: Duration = Duration::from_millis(100);
/// Two readings of the clocks may be somewhat apart.
const SUSPENDED_MIN: Duration = Duration::from_millis(100);

struct Origin {
    at: Instant,
    ticks: u64,
    counter: bool,
    /// By then.
    suspended: Duration,
}

static ORIGIN: OnceLock<Origin> = OnceLock::new();

/// Before the first stamp: so that a rate is known soon.
pub fn begin() {
    origin();
}

#[inline]
fn origin() -> &'static Origin {
    ORIGIN.get_or_init(|| {
        let counter = has_counter();
        let suspended = if counter { suspended() } else { Duration::ZERO };
        Origin { at: Instant::now(), ticks: if counter { counter_now() } else { 0 }, counter, suspended }
    })
}

/// In ticks.
#[inline]
pub fn now() -> u64 {
    let origin = origin();
    if origin.counter { counter_now() } else { origin.at.elapsed().as_nanos() as u64 }
}

/// Taken once, as soon as it can be told well: where the machine is suspended the counter goes back, or on while the clock
/// stands still, and what is taken over that is no rate.
pub fn ns_per_tick() -> f64 {
    static RATE: OnceLock<f64> = OnceLock::new();
    let origin = origin();
    if !origin.counter {
        return 1.0;
    }
    if let Some(rate) = RATE.get() {
        return *rate;
    }
    let (at, ticks, least) = match suspended().saturating_sub(origin.suspended) < SUSPENDED_MIN {
        true => (origin.at, origin.ticks, CALIBRATION),
        false => (Instant::now(), counter_now(), SETTLED),
    };
    while at.elapsed() < least {
        std::thread::sleep(least);
    }
    let (passed, ticks) = (at.elapsed(), counter_now().saturating_sub(ticks));
    let rate = passed.as_nanos() as f64 / ticks.max(1) as f64;
    if passed < SETTLED { rate } else { *RATE.get_or_init(|| rate) }
}

/// For how long the machine was, since it was started.
fn suspended() -> Duration {
    let of = |clock| {
        let time = clock_gettime(clock);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let awake = of(ClockId::Monotonic);
    of(ClockId::Boottime).saturating_sub(awake)
}

/// The stamp of so much later than now; none as long as the rate is not known, or where that is no time.
pub fn after(later: Duration) -> Option<u64> {
    let origin = origin();
    if later.is_zero() || origin.counter && origin.at.elapsed() < CALIBRATION {
        return None;
    }
    Some(now() + (later.as_nanos() as f64 / ns_per_tick()) as u64)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn has_counter() -> bool {
    use std::arch::x86_64::__cpuid;
    const INVARIANT: u32 = 1 << 8;
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & INVARIANT != 0
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn counter_now() -> u64 {
    // SAFETY: every x86-64 processor has it, and `has_counter` has found out that this one's is of use.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn has_counter() -> bool {
    false
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn counter_now() -> u64 {
    unreachable!("there is no counter")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_follow_the_clock() {
        begin();
        let (wall, first) = (Instant::now(), now());
        std::thread::sleep(Duration::from_millis(20));
        let (ticks, wall) = (now() - first, wall.elapsed());
        let ratio = ticks as f64 * ns_per_tick() / wall.as_nanos() as f64;
        assert!((0.8..1.25).contains(&ratio), "stamps ran at {ratio} of the clock");
    }

    #[test]
    fn the_rate_is_taken_once() {
        begin();
        std::thread::sleep(SETTLED);
        let first = ns_per_tick();
        std::thread::sleep(CALIBRATION);
        assert_eq!(ns_per_tick().to_bits(), first.to_bits());
    }
}
