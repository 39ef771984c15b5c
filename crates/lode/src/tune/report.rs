//! What `lode tune` reports: what was found, what it was before, and how well it is known. The JSON document is this.
//!
//! Bandwidths are GiB/s, CPU time is seconds per GiB over all threads; time of threads that stand for a device stands
//! apart. A change is shown where it is more than the noise, and is null where there is nothing to compare with.

use lodestone::mover::EngineKind;
use lodestone::mover::identity::Machine;
use lodestone::mover::profile::{BIN_BYTES, BINS, Lane, NEVER, Profile};
use lodestone::mover::profile_text::Document;
use serde::{Serialize, Serializer};

use super::decision;
use super::measure::Row;
use super::outcome;
use super::rule::{Beside, Count, Enough, Spread, enough, worth};
use super::turn::Turn;

const GIB: f64 = (1u64 << 30) as f64;

#[derive(Serialize)]
pub struct Report {
    pub machine: Where,
    pub media: MediaFacts,
    pub method: Method,
    pub decision: Decision,
    pub copies: Copies,
    pub engines: Vec<EngineFacts>,
    pub profile: ProfileFacts,
    /// Engines that were not measured, and why.
    pub skipped: Vec<String>,
    /// Reasons to doubt the result.
    pub warnings: Vec<String>,
}

#[derive(Serialize)]
pub struct Where {
    pub cpu: String,
    pub cpus: usize,
    /// The CPUs of each node.
    pub nodes: Vec<String>,
}

#[derive(Serialize)]
pub struct MediaFacts {
    /// Null where a pool was made for the measure.
    pub pool: Option<String>,
    pub memory: Vec<String>,
    pub domain: &'static str,
    /// The domain was assumed: figures are those of *emulated PM*.
    pub emulated: bool,
    pub regions: usize,
}

#[derive(Serialize)]
pub struct Method {
    pub quick: bool,
    pub rounds: usize,
    pub slice_ms: f64,
    pub files: usize,
    pub file_bytes: u64,
    /// Null where the kernel does not say.
    pub last_level_cache_bytes: Option<u64>,
}

#[derive(Serialize)]
pub struct Decision {
    pub ns: f64,
    pub noise_ns: f64,
    pub aim_ns: f64,
}

/// Copies at a time, by the calling threads.
#[derive(Serialize)]
pub struct Copies {
    /// What the profile says, for each region.
    pub concurrency: usize,
    pub was: Option<usize>,
    pub size_bytes: usize,
    pub write: Sweep,
    pub read: Sweep,
}

/// What more and more copies at a time reach together.
#[derive(Serialize, Clone)]
pub struct Sweep {
    /// The fewest that are enough: of a device by bandwidth, of callers by what more take of the CPU, too.
    pub enough: Option<usize>,
    /// More were tried, and brought too little.
    pub saturated: bool,
    pub points: Vec<Point>,
}

#[derive(Serialize, Clone)]
pub struct Point {
    pub copies: usize,
    pub gib_per_s: Measured,
    /// Of the process, but for threads that stand for a device.
    pub cpu_s_per_gib: Measured,
}

#[derive(Serialize, Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub median: f64,
    /// Half of what lies between the quartiles of the rounds.
    pub noise: f64,
}

#[derive(Serialize)]
pub struct EngineFacts {
    pub name: &'static str,
    /// It stands for a device in software: its figures say nothing about a device's speed.
    pub emulated: bool,
    pub limits: Option<LimitFacts>,
    pub bandwidth: Vec<BandwidthRow>,
    pub sizes: Vec<SizeRow>,
    pub beside_cpu: Vec<BesideRow>,
}

#[derive(Serialize)]
pub struct LimitFacts {
    pub in_flight_max: InFlight,
    pub in_flight_was: Option<InFlight>,
    /// Empty for engines that hold their copies down themselves.
    pub in_flight: Vec<(&'static str, Sweep)>,
    pub thresholds: Vec<ThresholdRow>,
}

#[derive(Serialize)]
pub struct ThresholdRow {
    pub lane: &'static str,
    pub threshold: Threshold,
    pub was: Option<Threshold>,
    /// Null where either is no number.
    pub change_percent: Option<f64>,
}

/// As in the profile: a number of bytes, or "never".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(pub usize);

/// As in the profile: a number, or "none".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight(pub Option<u32>);

impl Serialize for Threshold {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            NEVER => to.serialize_str("never"),
            bytes => to.serialize_u64(bytes as u64),
        }
    }
}

impl Serialize for InFlight {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => to.serialize_str("none"),
            Some(max) => to.serialize_u32(max),
        }
    }
}

/// Of one lane and thread count.
#[derive(Serialize)]
pub struct BandwidthRow {
    pub lane: &'static str,
    pub threads: usize,
    pub bins: Vec<BinFacts>,
}

#[derive(Serialize)]
pub struct BinFacts {
    /// The bin's upper end; null for the last.
    pub up_to_bytes: Option<usize>,
    pub gib_per_s: Measured,
    pub was: Option<f64>,
    /// Zero where the difference is within the noise.
    pub change_percent: Option<f64>,
}

#[derive(Serialize, Clone)]
pub struct SizeRow {
    pub lane: &'static str,
    pub threads: usize,
    pub bytes: usize,
    pub gib_per_s: Measured,
    pub cpu_s_per_gib: Measured,
    /// Of threads that stand for a device; null where there are none.
    pub device_cpu_s_per_gib: Option<f64>,
}

/// Multiples of what the CPU takes, over all thread counts; below 1 is less.
#[derive(Serialize)]
pub struct BesideRow {
    pub lane: &'static str,
    pub bytes: usize,
    pub cpu_time: Measured,
    pub time: Measured,
    pub pays: bool,
}

#[derive(Serialize)]
pub struct ProfileFacts {
    /// Where it stands, or would.
    pub path: Option<String>,
    pub written: bool,
    /// When the one before it was written.
    pub before: Option<String>,
    /// Why nothing is compared with what stood there.
    pub not_compared: Option<String>,
    /// Engines that keep what the old profile says of them.
    pub kept: Vec<&'static str>,
}

impl Measured {
    fn of(spread: Spread, scale: f64) -> Measured {
        Measured { median: spread.median * scale, noise: spread.noise * scale }
    }
}

impl Where {
    pub fn of(machine: &Machine) -> Where {
        Where { cpu: machine.cpu.clone(), cpus: machine.cpus, nodes: machine.nodes.clone() }
    }
}

impl Decision {
    pub fn of(spread: Spread) -> Decision {
        Decision { ns: spread.median, noise_ns: spread.noise, aim_ns: decision::AIM_NS }
    }
}

impl Sweep {
    /// Of a device.
    pub fn of(counts: &[Count]) -> Sweep {
        let found = enough(counts);
        Sweep {
            enough: found.map(|enough| enough.copies),
            saturated: found.is_some_and(|Enough { saturated, .. }| saturated),
            points: Sweep::points(counts),
        }
    }

    pub fn of_callers(counts: &[Count]) -> Sweep {
        let enough = worth(counts);
        let saturated = counts.last().is_some_and(|most| enough < Some(most.copies));
        Sweep { enough, saturated, points: Sweep::points(counts) }
    }

    fn points(counts: &[Count]) -> Vec<Point> {
        let point = |count: &Count| Point {
            copies: count.copies,
            gib_per_s: Measured::of(count.bytes_per_s, 1.0 / GIB),
            cpu_s_per_gib: Measured::of(count.cpu_s_per_byte, GIB),
        };
        counts.iter().map(point).collect()
    }
}

/// What was measured of one engine.
pub struct Measures<'a> {
    pub kind: EngineKind,
    /// Of this engine, and of the CPU beside it.
    pub rows: &'a [Row],
    /// Reads as they are shared with the CPU; none for engines that share none.
    pub shared: &'a [Row],
    pub sweep: &'a [Row],
}

impl Measures<'_> {
    /// Beside the CPU, as copies will go: reads shared, where they are.
    pub fn beside(&self, lane: Lane) -> Vec<Beside> {
        match outcome::beside_cpu(self.shared, self.kind, lane) {
            shared if !shared.is_empty() => shared,
            _ => outcome::beside_cpu(self.rows, self.kind, lane),
        }
    }

    pub fn lanes(&self) -> impl Iterator<Item = Lane> {
        let has = |lane: &Lane| self.rows.iter().any(|row| row.engine == self.kind && row.lane == *lane);
        Lane::ALL.into_iter().filter(has)
    }
}

impl EngineFacts {
    /// `profile` is the new one, `before` what stood there.
    pub fn of(measures: &Measures<'_>, profile: &Profile, before: Option<&Document>) -> EngineFacts {
        let kind = measures.kind;
        let before = before.filter(|before| before.engines.contains(&kind));
        EngineFacts {
            name: kind.name(),
            emulated: kind.emulated(),
            limits: limits(measures, profile, before),
            bandwidth: bandwidth(measures, before),
            sizes: sizes(measures),
            beside_cpu: measures.lanes().flat_map(|lane| besides(measures, lane)).collect(),
        }
    }
}

fn limits(measures: &Measures<'_>, profile: &Profile, before: Option<&Document>) -> Option<LimitFacts> {
    let limits = profile.limits(measures.kind)?;
    let old = before.and_then(|before| before.profile.limits(measures.kind));
    let threshold = |lane: Lane| {
        let (now, was) = (limits.thresholds.of(lane), old.map(|old| old.thresholds.of(lane)));
        let numbers = was.filter(|was| *was != NEVER && now != NEVER);
        ThresholdRow {
            lane: lane.name(),
            threshold: Threshold(now),
            was: was.map(Threshold),
            change_percent: numbers.map(|was| (now as f64 / was as f64 - 1.0) * 100.0),
        }
    };
    let sweep = |lane: Lane| {
        let counts = outcome::counts(measures.sweep, measures.kind, lane);
        (!counts.is_empty()).then(|| (lane.name(), Sweep::of(&counts)))
    };
    Some(LimitFacts {
        in_flight_max: InFlight(limits.in_flight_max),
        in_flight_was: old.map(|old| InFlight(old.in_flight_max)),
        in_flight: Lane::ALL.into_iter().filter_map(sweep).collect(),
        thresholds: measures.lanes().map(threshold).collect(),
    })
}

fn bandwidth(measures: &Measures<'_>, before: Option<&Document>) -> Vec<BandwidthRow> {
    let old = before.and_then(|before| before.profile.bandwidths(measures.kind));
    let mut rows = Vec::new();
    for lane in measures.lanes() {
        let of_lane = || measures.rows.iter().filter(|row| row.engine == measures.kind && row.lane == lane);
        let mut threads: Vec<usize> = of_lane().map(|row| row.threads).collect();
        threads.sort_unstable();
        threads.dedup();
        for (n, &threads) in threads.iter().enumerate() {
            let old = old.map(|old| if n == 0 { old.of(lane).one } else { old.of(lane).all });
            let best = |bin: usize| {
                let in_bin =
                    |row: &&Row| row.threads == threads && lodestone::mover::profile::bin(row.bytes) == bin;
                let spreads = of_lane().filter(in_bin).map(|row| row.spread(Turn::bytes_per_s));
                spreads.max_by(|a, b| a.median.total_cmp(&b.median))
            };
            let bins = (0..BINS)
                .filter_map(|bin| Some(bin_facts(bin, best(bin)?, old.map(|old| old[bin]))))
                .collect();
            rows.push(BandwidthRow { lane: lane.name(), threads, bins });
        }
    }
    rows
}

fn bin_facts(bin: usize, now: Spread, was: Option<u64>) -> BinFacts {
    let was = was.filter(|was| *was > 0).map(|was| was as f64);
    BinFacts {
        up_to_bytes: BIN_BYTES.get(bin).copied(),
        gib_per_s: Measured::of(now, 1.0 / GIB),
        was: was.map(|was| was / GIB),
        change_percent: was.map(|was| change_percent(now, was)),
    }
}

/// The change in percent; none where it is within the noise. The old number, of which the noise is not known, is taken
/// to have had as much.
pub fn change_percent(now: Spread, was: f64) -> f64 {
    let old = Spread { median: was, noise: now.noise };
    match now.less_than(&old) || old.less_than(&now) {
        true => (now.median / was - 1.0) * 100.0,
        false => 0.0,
    }
}

fn sizes(measures: &Measures<'_>) -> Vec<SizeRow> {
    let mut rows: Vec<&Row> = measures.rows.iter().filter(|row| row.engine == measures.kind).collect();
    rows.sort_by_key(|row| (row.lane as usize, row.threads, row.bytes));
    let size = |row: &Row| SizeRow {
        lane: row.lane.name(),
        threads: row.threads,
        bytes: row.bytes,
        gib_per_s: Measured::of(row.spread(Turn::bytes_per_s), 1.0 / GIB),
        cpu_s_per_gib: Measured::of(row.spread(Turn::cpu_s_per_byte), GIB),
        device_cpu_s_per_gib: row.engine.emulated().then(|| row.spread(Turn::device_s_per_byte).median * GIB),
    };
    rows.into_iter().map(size).collect()
}

fn besides(measures: &Measures<'_>, lane: Lane) -> Vec<BesideRow> {
    let row = |beside: &Beside| BesideRow {
        lane: lane.name(),
        bytes: beside.bytes,
        cpu_time: Measured::of(beside.cpu, 1.0),
        time: Measured::of(beside.time, 1.0),
        pays: beside.pays(),
    };
    match measures.kind {
        EngineKind::Cpu => Vec::new(),
        _ => measures.beside(lane).iter().map(row).collect(),
    }
}

/// A report with two engines, one of them emulated, after a run that came out otherwise.
#[cfg(test)]
pub fn sample() -> Report {
    let measured = |median| Measured { median, noise: median / 50.0 };
    let sweep = Sweep {
        enough: Some(2),
        saturated: true,
        points: vec![
            Point { copies: 1, gib_per_s: measured(2.0), cpu_s_per_gib: measured(0.5) },
            Point { copies: 2, gib_per_s: measured(4.0), cpu_s_per_gib: measured(0.5) },
        ],
    };
    let size = |lane, bytes, device| SizeRow {
        lane,
        threads: 2,
        bytes,
        gib_per_s: measured(bytes as f64 / 65536.0),
        cpu_s_per_gib: measured(0.06),
        device_cpu_s_per_gib: device,
    };
    let bandwidth = |lane, threads, was: Option<f64>| {
        let change_percent = was.map(|was| (2.0 / was - 1.0) * 100.0);
        let bin = BinFacts { up_to_bytes: Some(16 << 10), gib_per_s: measured(2.0), was, change_percent };
        BandwidthRow { lane, threads, bins: vec![bin] }
    };
    let beside = |lane, bytes, ratio| BesideRow {
        lane,
        bytes,
        cpu_time: measured(ratio),
        time: measured(1.0),
        pays: ratio < 1.0,
    };
    let threshold = |lane, threshold, was, change_percent| ThresholdRow {
        lane,
        threshold: Threshold(threshold),
        was: Some(Threshold(was)),
        change_percent,
    };
    let sizes = |lane, device| [4 << 10, 64 << 10].map(|bytes| size(lane, bytes, device)).to_vec();
    let engine = |kind: EngineKind, limits, bandwidth, sizes, beside_cpu| EngineFacts {
        name: kind.name(),
        emulated: kind.emulated(),
        limits,
        bandwidth,
        sizes,
        beside_cpu,
    };
    let delegate = LimitFacts {
        in_flight_max: InFlight(None),
        in_flight_was: Some(InFlight(None)),
        in_flight: Vec::new(),
        thresholds: vec![
            threshold("local_write", 64 << 10, 128 << 10, Some(-50.0)),
            threshold("local_read", NEVER, NEVER, None),
        ],
    };
    let emu = LimitFacts {
        in_flight_max: InFlight(Some(2)),
        in_flight_was: None,
        in_flight: vec![("local_write", sweep.clone())],
        thresholds: vec![ThresholdRow { was: None, ..threshold("local_write", 16 << 10, NEVER, None) }],
    };
    Report {
        machine: Where { cpu: "Xeon <&>".into(), cpus: 2, nodes: vec!["0-1".into()] },
        media: MediaFacts {
            pool: None,
            memory: vec!["dram".into()],
            domain: "memory",
            emulated: true,
            regions: 1,
        },
        method: Method {
            quick: true,
            rounds: 3,
            slice_ms: 5.0,
            files: 2,
            file_bytes: 64 << 20,
            last_level_cache_bytes: None,
        },
        decision: Decision { ns: 20.0, noise_ns: 0.5, aim_ns: decision::AIM_NS },
        copies: Copies {
            concurrency: 2,
            was: Some(3),
            size_bytes: 64 << 10,
            write: sweep.clone(),
            read: Sweep { saturated: false, ..sweep },
        },
        engines: vec![
            engine(
                EngineKind::Cpu,
                None,
                vec![bandwidth("local_write", 1, Some(1.0)), bandwidth("local_write", 2, Some(2.0))],
                [sizes("local_write", None), sizes("local_read", None)].concat(),
                Vec::new(),
            ),
            engine(
                EngineKind::Delegate,
                Some(delegate),
                vec![bandwidth("local_write", 2, None), bandwidth("local_read", 2, None)],
                [sizes("local_write", None), sizes("local_read", None)].concat(),
                vec![beside("local_write", 4 << 10, 1.5), beside("local_write", 64 << 10, 0.5)],
            ),
            engine(
                EngineKind::Emu,
                Some(emu),
                vec![bandwidth("local_write", 2, None)],
                sizes("local_write", Some(0.05)),
                vec![beside("local_write", 4 << 10, 0.9)],
            ),
        ],
        profile: ProfileFacts {
            path: Some("/p.toml".into()),
            written: true,
            before: Some("2026-01-01T00:00:00Z".into()),
            not_compared: None,
            kept: vec!["semaphore"],
        },
        skipped: vec!["x: why".into()],
        warnings: vec!["doubt".into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_within_the_noise_is_none() {
        let now = Spread { median: 10.0, noise: 0.5 };
        for (was, percent) in [(10.9, 0.0), (9.1, 0.0), (12.5, -20.0), (8.0, 25.0)] {
            assert!((change_percent(now, was) - percent).abs() < 1e-9, "{was}");
        }
    }

    #[test]
    fn words_are_those_of_the_file() {
        let thresholds = serde_json::to_string(&[Threshold(NEVER), Threshold(4096)]).unwrap();
        assert_eq!(thresholds, r#"["never",4096]"#);
        let limits = serde_json::to_string(&[InFlight(None), InFlight(Some(8))]).unwrap();
        assert_eq!(limits, r#"["none",8]"#);
    }
}
