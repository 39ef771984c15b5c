//! Which way a copy takes: Fastmove §5.4, as a function that the caller runs.
//!
//! In this order, the first rule that holds:
//!
//! 1. Stores go past the caches where the engine can, except for those to an address which differs from the source's
//!    within a line, which engines do badly (§3.2.4, §5.2): those go into the caches, and where the engine cannot do
//!    that, they are the CPU's.
//! 2. What is smaller than the threshold of its kind (read or write, local or remote) is the CPU's.
//! 3. If as many copies are under way as the region's engine bears, it is the CPU's.
//! 4. Large reads are shared with the CPU, where the engine leaves bandwidth (§5.3), in the ratio of what both were
//!    seen to reach; writes never.
//! 5. Otherwise the engine takes all but the unaligned edges, on the next channel in turn.
//!
//! There is no thread and no lock: counters for each region, and bandwidths that are averaged over 50 ms.
//!
//! It says, too, when a copy is expected to end, for those who wait: by what is queued before it on its channel, and
//! by how long copies of its direction and size took so far ([`expect`](Scheduler::expect)).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::engine_port::{Capability, Route};
use super::pacing::Pacing;
use super::profile::{BINS, Bins, Lane, Limits, SMALLEST_BYTES, bin};
use crate::media::LINE;
use crate::wait::Seen;

/// Smaller shares of a read are not worth a descriptor, in bytes.
const SHARE_BYTES_MIN: usize = 8 << 10;
/// Channels of which the queue's length is known.
const CHANNELS_COUNTED: usize = 8;
/// Bandwidths are averages over at least so long.
const WINDOW_NS: u64 = 50_000_000;
/// An engine that ends before the CPU's share of a read is through is taken to be so much faster than was known.
const FASTER: f32 = 17.0 / 16.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    Write,
    Read,
}

/// A copy, as far as the way it takes depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub direction: Direction,
    /// The media is on another node than the CPU.
    pub remote: bool,
    pub bytes: usize,
    /// Address in media, of which only the place in a line counts.
    pub media: u64,
    /// Address in DRAM, likewise.
    pub dram: u64,
}

/// Why the CPU copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Misaligned,
    Small,
    Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Cpu(Why),
    /// All but this many bytes at its ends, which are the CPU's. The route is a store's.
    Engine {
        head: usize,
        tail: usize,
        route: Route,
    },
    /// So many bytes from its beginning on; the CPU copies the rest meanwhile.
    Shared {
        engine: usize,
    },
}

/// Rules 1, 2, 4 and 5: what depends on nothing but the copy. `share` is the engine's share of a read, of 1.
#[inline]
pub fn decide(job: &Job, capability: &Capability, limits: &Limits, share: f32) -> Decision {
    let alignment = capability.alignment as u64;
    let write = job.direction == Direction::Write;
    let aligned = alignment == 1 || (job.media ^ job.dram).is_multiple_of(LINE as u64);
    let route = match (capability.routes.past_caches, capability.routes.into_caches) {
        (true, _) if aligned => Route::PastCaches,
        (_, true) => Route::IntoCaches,
        _ if write => return Decision::Cpu(Why::Misaligned),
        _ => Route::PastCaches,
    };
    let threshold = limits.thresholds.of(Lane::of(job.direction, job.remote));
    if job.bytes < threshold.max(capability.smallest_bytes).max(SMALLEST_BYTES) {
        return Decision::Cpu(Why::Small);
    }
    if write {
        let head = job.media.wrapping_neg() % alignment;
        let tail = (job.media + job.bytes as u64) % alignment;
        return Decision::Engine { head: head as usize, tail: tail as usize, route };
    }
    if capability.shares_reads {
        // A float may be more than all of it.
        let engine = ((job.bytes as f32 * share) as usize / LINE * LINE).min(job.bytes);
        if engine >= SHARE_BYTES_MIN && job.bytes - engine >= SHARE_BYTES_MIN {
            return Decision::Shared { engine };
        }
    }
    Decision::Engine { head: 0, tail: 0, route }
}

/// What is counted about one engine.
pub struct Scheduler {
    regions: Box<[CachePadded<Load>]>,
    cpu: Bandwidth,
    engine: Bandwidth,
    /// By [`Direction`].
    pacing: [Pacing; 2],
    began: Instant,
}

#[derive(Default)]
struct Load {
    in_flight: AtomicU32,
    next_channel: AtomicU32,
    /// Bytes under way, by channel; those of channels that share a number are counted together.
    queued: [AtomicU64; CHANNELS_COUNTED],
}

/// A copy that was handed over, as far as its end is expected.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    handed_over: Instant,
    /// None where nobody knows yet.
    pub due: Option<Instant>,
    direction: Direction,
    bytes: u64,
    /// On its channel, when it came.
    before: u64,
    region: usize,
    channel: usize,
}

/// A place among the copies under way, which are counted where there is a limit.
pub struct Claim<'a> {
    counted: Option<&'a Load>,
    pub channel: usize,
}

impl Claim<'_> {
    /// Keeps the place until [`Scheduler::give_back`], for a copy that outlives the call.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(load) = self.counted {
            load.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Expected {
    /// Since it was handed over.
    pub fn elapsed(&self) -> Duration {
        self.handed_over.elapsed()
    }
}

impl Scheduler {
    pub fn new(regions: usize) -> Scheduler {
        Scheduler {
            regions: (0..regions).map(|_| CachePadded::default()).collect(),
            cpu: Bandwidth::default(),
            engine: Bandwidth::default(),
            pacing: Default::default(),
            began: Instant::now(),
        }
    }

    /// A copy was just handed over; until it is [met](Scheduler::met) it stands before others.
    pub fn expect(&self, (region, channel): (usize, usize), direction: Direction, bytes: usize) -> Expected {
        let queued = &self.regions[region].queued[channel % CHANNELS_COUNTED];
        let before = queued.fetch_add(bytes as u64, Ordering::Relaxed);
        let handed_over = Instant::now();
        let ns = self.pacing[direction as usize].expected_ns(bytes, before);
        let due = ns.map(|ns| handed_over + Duration::from_nanos(ns));
        Expected { handed_over, due, direction, bytes: bytes as u64, before, region, channel }
    }

    /// It has ended, and all of it was copied or not. `took_ns`: by an engine that says exactly how long it was at it.
    pub fn met(&self, expected: Expected, whole: bool, seen: Seen, took_ns: Option<u64>) {
        let Expected { handed_over, direction, bytes, before, region, channel, .. } = expected;
        let queued = &self.regions[region].queued[channel % CHANNELS_COUNTED];
        queued.fetch_sub(bytes, Ordering::Relaxed);
        if !whole {
            return;
        }
        let pacing = &self.pacing[direction as usize];
        match took_ns {
            Some(ns) => pacing.learn(bytes, 0, ns, Seen::Watched),
            None => pacing.learn(bytes, before, handed_over.elapsed().as_nanos() as u64, seen),
        }
    }

    /// Begins with what a profile says that it reaches, in bytes a second.
    pub fn seed_pace(&self, direction: Direction, bytes_per_s: &Bins) {
        self.pacing[direction as usize].seed(bytes_per_s);
    }

    /// Rules 3 and 5: a place in front of the region's engine, and a channel in turn.
    #[inline]
    pub fn claim(&self, region: usize, capability: &Capability, limits: &Limits) -> Option<Claim<'_>> {
        let load = &*self.regions[region];
        let mut claim = Claim { counted: None, channel: 0 };
        if let Some(max) = limits.in_flight_max {
            let before = load.in_flight.fetch_add(1, Ordering::Relaxed);
            claim.counted = Some(load);
            if before >= max {
                return None;
            }
        }
        if capability.channels > 1 {
            claim.channel = load.next_channel.fetch_add(1, Ordering::Relaxed) as usize % capability.channels;
        }
        Some(claim)
    }

    /// Gives back a place that was kept.
    pub fn give_back(&self, region: usize, limits: &Limits) {
        if limits.in_flight_max.is_some() {
            self.regions[region].in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Begins with what a profile says that both reach, in bytes a second; what is seen here replaces it, window by
    /// window.
    pub fn seed(&self, cpu: &Bins, engine: &Bins) {
        self.cpu.seed(cpu);
        self.engine.seed(engine);
    }

    /// The engine's share of a read of so many bytes: by what both reached, or half while nobody knows.
    #[inline]
    pub fn share(&self, bytes: usize) -> f32 {
        let bin = bin(bytes);
        match (self.cpu.of(bin), self.engine.of(bin)) {
            (Some(cpu), Some(engine)) => engine / (cpu + engine),
            _ => 0.5,
        }
    }

    /// A read of `bytes` was shared: what each copied, and in how many nanoseconds. `late`: the engine had ended before
    /// anybody looked, so that its time is the CPU's.
    pub fn shared(&self, bytes: usize, engine: (u64, u64), cpu: (u64, u64), late: bool) {
        self.shared_at(self.began.elapsed().as_nanos() as u64, bytes, engine, cpu, late);
    }

    fn shared_at(&self, now: u64, bytes: usize, engine: (u64, u64), cpu: (u64, u64), late: bool) {
        let bin = bin(bytes);
        // By its time it would never be faster than the share that it was given: the share could only fall.
        let engine = if late { self.engine.faster(bin, engine) } else { engine };
        self.engine.add(bin, engine, now);
        self.cpu.add(bin, cpu, now);
    }
}

/// Bandwidths by size. Threads may overtake each other within a window: then some copies count twice or not.
#[derive(Default)]
struct Bandwidth {
    bins: [CachePadded<Bin>; BINS],
}

#[derive(Default)]
struct Bin {
    /// Bytes a nanosecond, as the bits of a float; 0 before the first window ends.
    average: AtomicU32,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    /// When the window began.
    since: AtomicU64,
}

impl Bandwidth {
    fn of(&self, bin: usize) -> Option<f32> {
        let average = f32::from_bits(self.bins[bin].average.load(Ordering::Relaxed));
        (average > 0.0).then_some(average)
    }

    fn seed(&self, bytes_per_s: &Bins) {
        for (bin, rate) in self.bins.iter().zip(bytes_per_s) {
            bin.average.store((*rate as f32 / 1e9).to_bits(), Ordering::Relaxed);
        }
    }

    /// What is learnt from a time that is an upper bound: a step above what is known, or more where the bound says so.
    fn faster(&self, bin: usize, (bytes, nanoseconds): (u64, u64)) -> (u64, u64) {
        let step = self.of(bin).map_or(nanoseconds, |known| (bytes as f32 / (known * FASTER)) as u64);
        (bytes, nanoseconds.min(step).max(1))
    }

    fn add(&self, bin: usize, (bytes, nanoseconds): (u64, u64), now: u64) {
        let bin = &self.bins[bin];
        let bytes = bin.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let nanoseconds = bin.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed) + nanoseconds;
        let since = bin.since.load(Ordering::Relaxed);
        let over = now.saturating_sub(since) >= WINDOW_NS && nanoseconds > 0;
        let mine = |new| bin.since.compare_exchange(since, new, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if over && mine(now) {
            bin.average.store((bytes as f32 / nanoseconds as f32).to_bits(), Ordering::Relaxed);
            bin.bytes.store(0, Ordering::Relaxed);
            bin.nanoseconds.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine_port::Routes;
    use super::super::profile::Thresholds;
    use super::*;

    const LIMITS: Limits = Limits {
        thresholds: Thresholds {
            local_write: 16 << 10,
            local_read: 32 << 10,
            remote_write: 8 << 10,
            remote_read: 24 << 10,
        },
        in_flight_max: Some(2),
    };

    const DMA: Capability = Capability {
        smallest_bytes: 4 << 10,
        largest_bytes: usize::MAX,
        alignment: LINE,
        routes: Routes::PAST_CACHES,
        shares_reads: true,
        channels: 3,
    };

    /// All of it, or all but the edges, past the caches.
    fn past(head: usize, tail: usize) -> Decision {
        Decision::Engine { head, tail, route: Route::PastCaches }
    }

    fn job(direction: Direction, bytes: usize) -> Job {
        Job { direction, remote: false, bytes, media: 0x1000, dram: 0x7f00 }
    }

    #[test]
    fn rule_1_misaligned_stores_past_the_caches_are_the_cpus() {
        let off = Job { dram: 0x7f01, ..job(Direction::Write, 1 << 20) };
        assert_eq!(decide(&off, &DMA, &LIMITS, 0.5), Decision::Cpu(Why::Misaligned));
        // Both equally off: only the edges are.
        let both = Job { media: 0x1010, ..off };
        let both = Job { dram: 0x7f10, ..both };
        assert_eq!(decide(&both, &DMA, &LIMITS, 0.5), past(48, 16));
        // Into the caches it does no harm, nor does it for reads.
        let ddio = Capability { routes: Routes::INTO_CACHES, ..DMA };
        let into = Decision::Engine { head: 0, tail: 0, route: Route::IntoCaches };
        assert_eq!(decide(&off, &ddio, &LIMITS, 0.5), into);
        // So an engine that can do both is told copy by copy.
        let able = Capability { routes: Routes::BOTH, ..DMA };
        assert_eq!(decide(&off, &able, &LIMITS, 0.5), into);
        assert_eq!(decide(&both, &able, &LIMITS, 0.5), past(48, 16));
        assert_eq!(
            decide(&both, &ddio, &LIMITS, 0.5),
            Decision::Engine { head: 48, tail: 16, route: Route::IntoCaches }
        );
        let read = Job { dram: 0x7f01, ..job(Direction::Read, 1 << 20) };
        assert!(matches!(decide(&read, &DMA, &LIMITS, 0.5), Decision::Shared { .. }));
        // A CPU that does it for us has no alignment.
        let thread = Capability { alignment: 1, ..DMA };
        assert_eq!(decide(&off, &thread, &LIMITS, 0.5), past(0, 0));
    }

    #[test]
    fn rule_2_each_kind_has_its_threshold() {
        for (direction, remote, threshold) in [
            (Direction::Write, false, 16 << 10),
            (Direction::Read, false, 32 << 10),
            (Direction::Write, true, 8 << 10),
            (Direction::Read, true, 24 << 10),
        ] {
            let of = |bytes| decide(&Job { remote, ..job(direction, bytes) }, &DMA, &LIMITS, 0.0);
            assert_eq!(of(threshold - 1), Decision::Cpu(Why::Small), "{direction:?} {remote}");
            assert_eq!(of(threshold), past(0, 0), "{direction:?} {remote}");
        }
        let coarse = Capability { smallest_bytes: 1 << 20, ..DMA };
        assert_eq!(
            decide(&job(Direction::Write, (1 << 20) - 1), &coarse, &LIMITS, 0.5),
            Decision::Cpu(Why::Small)
        );
        let none = Thresholds { local_write: 0, local_read: 0, remote_write: 0, remote_read: 0 };
        let (eager, none) =
            (Capability { smallest_bytes: 0, ..DMA }, Limits { thresholds: none, in_flight_max: None });
        assert_eq!(decide(&job(Direction::Write, 4095), &eager, &none, 0.5), Decision::Cpu(Why::Small));
    }

    #[test]
    fn rule_3_no_more_than_the_engine_bears() {
        let scheduler = Scheduler::new(2);
        let claim = |region| scheduler.claim(region, &DMA, &LIMITS);
        let (a, b) = (claim(0).unwrap(), claim(0).unwrap());
        assert!(claim(0).is_none(), "two are under way");
        assert!(claim(1).is_some(), "another region has its own");
        drop(a);
        assert!(claim(0).is_some());
        drop(b);
        let unlimited = Limits { in_flight_max: None, ..LIMITS };
        let all: Vec<_> = (0..100).map(|_| scheduler.claim(0, &DMA, &unlimited).unwrap()).collect();
        drop(all);
        assert!(claim(0).is_some(), "all places were given back");
    }

    #[test]
    fn rule_4_reads_are_shared_and_writes_never() {
        let of = |direction, bytes, share| decide(&job(direction, bytes), &DMA, &LIMITS, share);
        assert_eq!(of(Direction::Read, 64 << 10, 0.25), Decision::Shared { engine: 16 << 10 });
        assert!(matches!(of(Direction::Write, 64 << 10, 0.25), Decision::Engine { .. }));
        // A share that is too small is none.
        assert_eq!(of(Direction::Read, 64 << 10, 0.1), past(0, 0));
        assert_eq!(of(Direction::Read, 64 << 10, 0.95), past(0, 0));
        // Nor is there one where the product is rounded beyond all of it.
        assert_eq!(of(Direction::Read, (16 << 20) + 63, 1.0), past(0, 0));
        let alone = Capability { shares_reads: false, ..DMA };
        assert_eq!(decide(&job(Direction::Read, 64 << 10), &alone, &LIMITS, 0.5), past(0, 0));
    }

    #[test]
    fn rule_5_channels_take_turns() {
        let scheduler = Scheduler::new(1);
        let unlimited = Limits { in_flight_max: None, ..LIMITS };
        let turns: Vec<usize> =
            (0..7).map(|_| scheduler.claim(0, &DMA, &unlimited).unwrap().channel).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn the_share_follows_what_both_reach() {
        let scheduler = Scheduler::new(1);
        assert_eq!(scheduler.share(64 << 10), 0.5, "while nobody knows");
        let add = |bandwidth: &Bandwidth, bytes, now| bandwidth.add(bin(64 << 10), (bytes, 1000), now);
        for now in [1, WINDOW_NS / 2, WINDOW_NS] {
            add(&scheduler.engine, 3000, now);
            add(&scheduler.cpu, 1000, now);
        }
        assert_eq!(scheduler.share(64 << 10), 0.75);
        assert_eq!(scheduler.share(4 << 20), 0.5, "another size has its own");
        // It learns anew, window by window.
        add(&scheduler.engine, 500, WINDOW_NS + 1);
        assert_eq!(scheduler.share(64 << 10), 0.75, "the window is not over");
        add(&scheduler.engine, 1500, 2 * WINDOW_NS);
        assert_eq!(scheduler.share(64 << 10), 0.5);
    }

    /// Reads that are shared as the scheduler says, one a window, by an engine that is so many times as fast as the CPU.
    fn shared_reads(scheduler: &Scheduler, faster: f32, windows: u64) -> f32 {
        let bytes = 64 << 10;
        let from = scheduler.engine.bins[bin(bytes)].since.load(Ordering::Relaxed);
        for window in 1..=windows {
            let engine = (bytes as f32 * scheduler.share(bytes)) as u64;
            let own = bytes as u64 - engine;
            let (took, own_ns) = ((engine as f32 / faster) as u64, own);
            let late = took <= own_ns;
            let seen_ns = took.max(own_ns);
            scheduler.shared_at(from + window * WINDOW_NS, bytes, (engine, seen_ns), (own, own_ns), late);
        }
        scheduler.share(bytes)
    }

    #[test]
    fn the_share_rises_where_the_engine_waits_for_the_cpu_and_falls_where_the_cpu_waits() {
        let scheduler = Scheduler::new(1);
        let mut before = shared_reads(&scheduler, 3.0, 1);
        assert_eq!(before, 0.5);
        for _ in 0..15 {
            let now = shared_reads(&scheduler, 3.0, 1);
            assert!(now > before, "{now} after {before}");
            before = now;
        }
        let at_last = shared_reads(&scheduler, 3.0, 20);
        assert!((0.74..0.77).contains(&at_last), "{at_last}");
        let at_last = shared_reads(&scheduler, 1.0, 3);
        assert!((0.49..0.52).contains(&at_last), "{at_last}");
    }

    #[test]
    fn the_share_begins_with_what_the_profile_says() {
        let scheduler = Scheduler::new(1);
        // The engine reaches three times what the CPU does, in all bins but the last, which nobody measured.
        let cpu = [2_000_000_000, 2_000_000_000, 2_000_000_000, 2_000_000_000, 0];
        scheduler.seed(&cpu, &cpu.map(|rate| 3 * rate));
        assert_eq!(scheduler.share(64 << 10), 0.75);
        assert_eq!(scheduler.share(4 << 20), 0.5, "where nobody measured");
        // And goes on to learn: here both are equally fast.
        for now in [WINDOW_NS, 2 * WINDOW_NS] {
            scheduler.engine.add(bin(64 << 10), (1000, 1000), now);
            scheduler.cpu.add(bin(64 << 10), (1000, 1000), now);
        }
        assert_eq!(scheduler.share(64 << 10), 0.5);
        assert_eq!(scheduler.share(256 << 10), 0.75, "other sizes keep theirs");
    }

    #[test]
    fn bins_are_five() {
        let of: Vec<usize> = [1, 16 << 10, 17 << 10, 64 << 10, 65 << 10, 1 << 20, 2 << 20].map(bin).to_vec();
        assert_eq!(of, [0, 0, 1, 1, 2, 3, 4]);
    }
}
