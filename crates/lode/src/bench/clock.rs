//! Time for operations of a few hundred nanoseconds: one time-stamp read per operation, a histogram
//! that keeps no samples, and CPU clocks.
//!
//! The stamp after operation n is the stamp before operation n + 1, so the timer runs once per
//! operation and nothing between two operations escapes the sum. Its own cost is measured and
//! reported, never subtracted.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::cost::load::CpuTimes;

/// Converts stamps to time. One per process: every core's counter agrees on an invariant TSC.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    tsc: bool,
    ticks_per_ns: f64,
    /// What one stamp costs, in nanoseconds.
    pub stamp_ns: f64,
}

/// Threads with such names stand for a device.
const DEVICE_THREADS: &str = "lode-emu";
const CALIBRATION: Duration = Duration::from_millis(40);
const STAMP_COST_SAMPLES: u32 = 20_000;

impl Clock {
    pub fn get() -> Clock {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        *CLOCK.get_or_init(Clock::calibrate)
    }

    fn calibrate() -> Clock {
        let mut clock = Clock { tsc: invariant_tsc(), ticks_per_ns: 1.0, stamp_ns: 0.0 };
        if clock.tsc {
            let (wall, first) = (Instant::now(), clock.stamp());
            while wall.elapsed() < CALIBRATION {
                std::hint::spin_loop();
            }
            clock.ticks_per_ns = (clock.stamp() - first) as f64 / wall.elapsed().as_nanos() as f64;
        }
        let first = clock.stamp();
        let mut last = first;
        for _ in 0..STAMP_COST_SAMPLES {
            last = std::hint::black_box(clock.stamp());
        }
        clock.stamp_ns = clock.ns(last - first) / f64::from(STAMP_COST_SAMPLES);
        clock
    }

    /// "rdtscp" or "clock_gettime".
    pub fn source(&self) -> &'static str {
        if self.tsc { "rdtscp" } else { "clock_gettime" }
    }

    #[inline(always)]
    pub fn stamp(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.tsc {
            let mut core = 0;
            // SAFETY: every x86-64 processor with an invariant TSC has RDTSCP; `core` is a local.
            return unsafe { std::arch::x86_64::__rdtscp(&mut core) };
        }
        let now = clock_gettime(ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    pub fn ns(&self, ticks: u64) -> f64 {
        ticks as f64 / self.ticks_per_ns
    }

    pub fn ticks(&self, time: Duration) -> u64 {
        (time.as_nanos() as f64 * self.ticks_per_ns) as u64
    }
}

/// Whether the time-stamp counter runs at one rate in every power state, and RDTSCP exists.
fn invariant_tsc() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        const RDTSCP: u32 = 1 << 27;
        const INVARIANT: u32 = 1 << 8;
        __cpuid(0x8000_0000).eax >= 0x8000_0007
            && __cpuid(0x8000_0001).edx & RDTSCP != 0
            && __cpuid(0x8000_0007).edx & INVARIANT != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// CPU seconds that all threads of this process have used, user and system.
pub fn process_cpu_s() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// CPU seconds of the threads of this process that stand for a device; none where the kernel does not tell.
pub fn device_cpu_s() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let ns = |dir: std::path::PathBuf| -> Option<f64> {
        let name = std::fs::read_to_string(dir.join("comm")).ok()?;
        if !name.starts_with(DEVICE_THREADS) {
            return None;
        }
        std::fs::read_to_string(dir.join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    threads.filter_map(|thread| ns(thread.path())).sum::<f64>() / 1e9
}

/// CPU time that the calling thread has used, user and system, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CPU seconds that all processors have spent on anything but idling, steps of 10 ms: the only count
/// that includes kernel threads and servers. Zero where /proc/stat cannot be read.
pub fn machine_cpu_s() -> f64 {
    CpuTimes::now().map_or(0.0, |times| times.busy_s())
}

/// Latencies in ticks: 128 buckets per power of two, so a percentile is off by less than 0.8 %.
#[derive(Clone)]
pub struct Histogram {
    buckets: Box<[u32]>,
    count: u64,
}

const SUB_BITS: u32 = 7;
const SUB: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB;

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: vec![0; BUCKETS].into_boxed_slice(), count: 0 }
    }
}

impl Histogram {
    #[inline(always)]
    pub fn add(&mut self, ticks: u64) {
        self.buckets[bucket_of(ticks)] += 1;
        self.count += 1;
    }

    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
    }

    /// The smallest value that `share` of all samples do not exceed; `None` without samples.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0u64;
        for (i, &n) in self.buckets.iter().enumerate() {
            seen += u64::from(n);
            if seen >= rank {
                return Some(middle_of(i));
            }
        }
        None
    }
}

#[inline(always)]
fn bucket_of(ticks: u64) -> usize {
    let top = 63 - (ticks | 1).leading_zeros();
    if top < SUB_BITS {
        return ticks as usize;
    }
    let shift = top - SUB_BITS;
    ((shift as usize + 1) << SUB_BITS) + ((ticks >> shift) as usize & (SUB - 1))
}

fn middle_of(bucket: usize) -> f64 {
    if bucket < SUB {
        return bucket as f64;
    }
    let shift = (bucket >> SUB_BITS) - 1;
    let low = ((SUB + (bucket & (SUB - 1))) as u64) << shift;
    low as f64 + ((1u64 << shift) - 1) as f64 / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_value_within_their_precision() {
        for v in (0..5000).chain([1 << 20, (1 << 33) + 12_345, u64::MAX >> 1, u64::MAX]) {
            let middle = middle_of(bucket_of(v));
            assert!((middle - v as f64).abs() <= v as f64 / 128.0, "{v} became {middle}");
        }
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let mut h = Histogram::default();
        assert_eq!(h.percentile(0.5), None);
        (1..=1000).for_each(|v| h.add(v));
        for (share, want) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let got = h.percentile(share).unwrap();
            assert!((got - want).abs() <= want / 100.0, "{share}: {got}");
        }
    }

    #[test]
    fn stamps_agree_with_the_wall_clock() {
        let clock = Clock::get();
        let (wall, first) = (Instant::now(), clock.stamp());
        std::thread::sleep(Duration::from_millis(20));
        let (ticks, wall) = (clock.stamp() - first, wall.elapsed());
        let ratio = clock.ns(ticks) / wall.as_nanos() as f64;
        assert!((0.9..1.1).contains(&ratio), "stamps ran at {ratio} of the wall clock");
    }
}
