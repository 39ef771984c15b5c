//! What the rounds amount to: thresholds, copies at a time and bandwidths, by the rules in `rule`.

use lodestone::mover::EngineKind;
use lodestone::mover::profile::{
    BANDWIDTH_BYTES_PER_S_MAX, BANDWIDTH_BYTES_PER_S_MIN, BINS, Bandwidths, Bins, CONCURRENCY_MAX,
    IN_FLIGHT_MAX, Lane, NEVER, Profile, bin,
};

use super::measure::Row;
use super::rule::{Beside, Count, Enough, Spread, enough, threshold, worth};
use super::turn::Turn;

/// The engine beside the CPU at each size of a lane, sizes ascending. `rows` have both, with the same threads; rounds are
/// held against each other one by one, because what slowed one slowed its neighbour.
pub fn beside_cpu(rows: &[Row], engine: EngineKind, lane: Lane) -> Vec<Beside> {
    let of = |kind| move |row: &&Row| row.engine == kind && row.lane == lane;
    let mut sizes: Vec<usize> = rows.iter().filter(of(engine)).map(|row| row.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let at = |bytes: usize| {
        let mut pairs = Vec::new();
        for own in rows.iter().filter(of(engine)).filter(|row| row.bytes == bytes) {
            let same = |cpu: &&Row| cpu.bytes == bytes && cpu.threads == own.threads;
            pairs.push((own, rows.iter().filter(of(EngineKind::Cpu)).find(same)?));
        }
        let rounds = pairs.iter().map(|(own, cpu)| own.turns.len().min(cpu.turns.len())).min()?;
        let ratio = |number: fn(&Turn) -> f64| {
            // Over thread counts the geometric mean: half here and twice there is one.
            let round = |n: usize| {
                let logs =
                    pairs.iter().map(|(own, cpu)| (number(&own.turns[n]) / number(&cpu.turns[n])).ln());
                (logs.sum::<f64>() / pairs.len() as f64).exp()
            };
            Spread::of(&(0..rounds).map(round).collect::<Vec<_>>())
        };
        Some(Beside {
            bytes,
            cpu: ratio(Turn::cpu_s_per_byte)?,
            time: ratio(|turn| 1.0 / turn.bytes_per_s())?,
        })
    };
    sizes.into_iter().filter_map(at).collect()
}

/// The threshold that follows, or [`NEVER`].
pub fn threshold_of(beside: &[Beside]) -> usize {
    threshold(beside).unwrap_or(NEVER)
}

/// What an engine reached by itself: in each bin the best of its sizes.
pub fn bandwidths(rows: &[Row], engine: EngineKind) -> Bandwidths {
    let mut bandwidths = Bandwidths::default();
    let best = |lane: Lane, many: bool| -> Bins {
        let mut bins = [0; BINS];
        let most =
            rows.iter().filter(|row| row.engine == engine && row.lane == lane).map(|row| row.threads).max();
        let threads = if many { most } else { Some(1) };
        for row in rows.iter().filter(|row| row.engine == engine && row.lane == lane) {
            if Some(row.threads) == threads {
                let rate = row.spread(Turn::bytes_per_s).median.round() as u64;
                let best = &mut bins[bin(row.bytes)];
                // What is slower than a profile may say counts as not measured.
                let rate = if rate < BANDWIDTH_BYTES_PER_S_MIN { 0 } else { rate };
                *best = (*best).max(rate.min(BANDWIDTH_BYTES_PER_S_MAX));
            }
        }
        bins
    };
    for lane in Lane::ALL {
        let peak = bandwidths.of_mut(lane);
        (peak.one, peak.all) = (best(lane, false), best(lane, true));
    }
    bandwidths
}

/// Copies at a time and what they took together, counts ascending.
pub fn counts(sweep: &[Row], engine: EngineKind, lane: Lane) -> Vec<Count> {
    let rows = sweep.iter().filter(|row| row.engine == engine && row.lane == lane);
    let of = |row: &Row| Count {
        copies: row.threads,
        bytes_per_s: row.spread(Turn::bytes_per_s),
        cpu_s_per_byte: row.spread(Turn::cpu_s_per_byte),
    };
    let mut counts: Vec<Count> = rows.map(of).collect();
    counts.sort_by_key(|count| count.copies);
    counts
}

/// Copies at a time in front of each of `regions`: as many as are worth it to writes, for it is writes that suffer from
/// more (efficient-pm §2, §4). Where all that could be tried are, and there are CPUs that could not (`more`), nobody knows
/// what more would bring: no fewer than by default.
pub fn concurrency(writes: &[Count], regions: usize, more: bool) -> usize {
    let default = Profile::default().concurrency;
    let copies = worth(writes).unwrap_or(default);
    let is_open = more && writes.last().is_some_and(|most| most.copies == copies);
    let found = copies.div_ceil(regions.max(1)).clamp(1, CONCURRENCY_MAX);
    if is_open { found.max(default) } else { found }
}

/// The limit of a device: as many as writes or reads make use of; none where more may bring more.
pub fn in_flight_max(writes: &[Count], reads: &[Count], regions: usize) -> Option<u32> {
    let of = |counts: &[Count]| {
        enough(counts).filter(|Enough { saturated, .. }| *saturated).map(|enough| enough.copies)
    };
    let copies = of(writes)?.max(of(reads)?);
    Some((copies.div_ceil(regions.max(1)) as u32).clamp(1, IN_FLIGHT_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(bytes_per_s: f64, cpu_s_per_byte: f64) -> Turn {
        let bytes = 1 << 30;
        let wall_s = bytes as f64 / bytes_per_s;
        Turn {
            bytes,
            wall_s,
            bytes_in_time: bytes as f64,
            cpu_s: cpu_s_per_byte * bytes as f64,
            device_s: 0.0,
            taken: 1.0,
        }
    }

    fn row(engine: EngineKind, lane: Lane, threads: usize, bytes: usize, turns: &[(f64, f64)]) -> Row {
        let turns = turns.iter().map(|(rate, cpu)| turn(*rate, *cpu)).collect();
        Row { engine, lane, threads, bytes, turns }
    }

    #[test]
    fn rounds_are_compared_one_by_one_and_thread_counts_together() {
        let (cpu, own, lane) = (EngineKind::Cpu, EngineKind::Delegate, Lane::LocalWrite);
        let rows = [
            // The second round was ten times slower for both: that is no noise.
            row(cpu, lane, 1, 4096, &[(4e9, 1e-9), (4e8, 1e-8), (4e9, 1e-9)]),
            row(own, lane, 1, 4096, &[(2e9, 4e-9), (2e8, 4e-8), (2e9, 4e-9)]),
            row(cpu, lane, 2, 4096, &[(4e9, 2e-9), (4e9, 2e-9), (4e9, 2e-9)]),
            row(own, lane, 2, 4096, &[(8e9, 1e-9), (8e9, 1e-9), (8e9, 1e-9)]),
            // Other lanes and sizes are their own.
            row(cpu, Lane::LocalRead, 1, 4096, &[(1e9, 1.0)]),
            row(own, Lane::LocalRead, 1, 4096, &[(9e9, 1.0)]),
            row(own, lane, 1, 8192, &[(1e9, 1e-9)]),
        ];
        let got = beside_cpu(&rows, own, lane);
        assert_eq!(got.len(), 1, "without the CPU there is nothing to compare with: {got:?}");
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        near(got[0].cpu.median, (4.0f64 * 0.5).sqrt());
        near(got[0].cpu.noise, got[0].cpu.median * 0.01);
        near(got[0].time.median, 1.0);
        near(beside_cpu(&rows, own, Lane::LocalRead)[0].time.median, 1.0 / 9.0);
        assert!(beside_cpu(&rows, EngineKind::Emu, lane).is_empty());
    }

    #[test]
    fn the_best_size_of_a_bin_is_its_bandwidth() {
        let (cpu, lane) = (EngineKind::Cpu, Lane::LocalRead);
        let rows = [
            row(cpu, lane, 1, 4 << 10, &[(3e9, 0.0), (1e9, 0.0), (2e9, 0.0)]),
            row(cpu, lane, 1, 16 << 10, &[(5e9, 0.0)]),
            row(cpu, lane, 2, 16 << 10, &[(7e9, 0.0)]),
            row(cpu, lane, 2, 4 << 20, &[(9e9, 0.0)]),
            row(EngineKind::Emu, lane, 1, 4 << 10, &[(8e9, 0.0)]),
        ];
        let got = bandwidths(&rows, cpu);
        assert_eq!(got.of(lane).one, [5_000_000_000, 0, 0, 0, 0]);
        assert_eq!(got.of(lane).all, [7_000_000_000, 0, 0, 0, 9_000_000_000]);
        assert_eq!(got.of(Lane::LocalWrite).one, [0; BINS]);
        // One CPU is one thread and all of them.
        assert_eq!(bandwidths(&rows, EngineKind::Emu).of(lane).all[0], 8_000_000_000);
    }

    #[test]
    fn limits_are_per_region() {
        let exact = |rates: &[f64]| -> Vec<Count> {
            let spread = |median| Spread { median, noise: 0.01 };
            let count = |(n, rate): (usize, &f64)| Count {
                copies: n + 1,
                bytes_per_s: spread(*rate),
                cpu_s_per_byte: spread((n + 1) as f64 / rate),
            };
            rates.iter().enumerate().map(count).collect()
        };
        let (three, two, open) = (exact(&[1.0, 2.0, 3.0, 3.0]), exact(&[1.0, 2.0, 2.0]), exact(&[1.0, 2.0]));
        let of_all = |counts: &[Count], regions| concurrency(counts, regions, false);
        assert_eq!((of_all(&three, 1), of_all(&three, 2), of_all(&three, 9)), (3, 2, 1));
        assert_eq!(of_all(&open, 1), 2);
        assert_eq!(of_all(&[], 1), Profile::default().concurrency);
        // Of one CPU of several.
        let (one, default) = (exact(&[1.0]), Profile::default().concurrency);
        assert_eq!((concurrency(&one, 1, false), concurrency(&one, 1, true)), (1, default));
        assert_eq!(concurrency(&exact(&[1.0, 1.0]), 1, true), 1, "more were tried and brought nothing");
        assert_eq!(in_flight_max(&three, &two, 1), Some(3));
        assert_eq!(in_flight_max(&two, &three, 2), Some(2));
        assert_eq!(in_flight_max(&three, &open, 1), None, "reads may bear more");
        assert_eq!(in_flight_max(&open, &three, 1), None, "writes may bear more");
        assert_eq!(in_flight_max(&[], &three, 1), None);
    }
}
