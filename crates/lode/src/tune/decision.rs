//! What the scheduler's decision costs: `decide` and `claim`, as the mover runs them in front of every copy that may be
//! an engine's.
//!
//! Copies of changing size, direction and place go through them, read from a table that the compiler cannot see through;
//! the loop, the table's reads and the claims' ends are part of the number. Nothing is subtracted.

use std::hint::black_box;
use std::time::Instant;

use lodestone::media::LINE;
use lodestone::mover::engine_port::{Capability, Routes};
use lodestone::mover::profile::Profile;
use lodestone::mover::schedule::{Decision, Direction, Job, Scheduler, decide};

use super::rule::Spread;
use crate::bench::Random;

/// What it is to stay below, in nanoseconds.
pub const AIM_NS: f64 = 50.0;
const JOBS: usize = 256;
const DECISIONS: usize = 200_000;
const ROUNDS: u64 = 9;

/// A device with all that makes deciding long: alignment, shared reads, several channels.
const DEVICE: Capability = Capability {
    smallest_bytes: 4 << 10,
    alignment: LINE,
    largest_bytes: usize::MAX,
    routes: Routes::PAST_CACHES,
    shares_reads: true,
    channels: 4,
};

/// Nanoseconds of one decision.
pub fn cost_ns() -> Spread {
    let jobs = jobs();
    let scheduler = Scheduler::new(1);
    let rounds: Vec<f64> = (0..=ROUNDS).map(|_| round(&jobs, &scheduler)).collect();
    // The first one warms up.
    Spread::of(&rounds[1..]).expect("there are rounds")
}

fn round(jobs: &[Job], scheduler: &Scheduler) -> f64 {
    let (capability, limits) = (black_box(DEVICE), black_box(Profile::default().emu));
    let begun = Instant::now();
    for n in 0..DECISIONS {
        let job = black_box(&jobs[n % JOBS]);
        let share = match job.direction {
            Direction::Read => scheduler.share(job.bytes),
            Direction::Write => 0.0,
        };
        match black_box(decide(job, &capability, &limits, share)) {
            Decision::Cpu(_) => {}
            _ => drop(black_box(scheduler.claim(0, &capability, &limits))),
        }
    }
    begun.elapsed().as_nanos() as f64 / DECISIONS as f64
}

/// Of all sizes from 4 KiB to 4 MiB, aligned and not, in an order that no branch predictor knows by heart.
fn jobs() -> Vec<Job> {
    let mut random = Random::new(1);
    let mut job = || {
        let offset = random.below(4) * 16;
        let other = if random.below(4) == 0 { random.below(4) * 16 } else { offset };
        Job {
            direction: if random.below(2) == 0 { Direction::Write } else { Direction::Read },
            remote: random.below(2) == 0,
            bytes: (4 << 10) << random.below(11),
            media: (random.below(1 << 30) << 6) + offset,
            dram: (random.below(1 << 30) << 6) + other,
        }
    };
    (0..JOBS).map(|_| job()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the number would be that of the shortest way alone.
    #[test]
    fn the_jobs_take_every_way() {
        let (mut small, mut misaligned, mut whole, mut shared) = (0, 0, 0, 0);
        for job in jobs() {
            match decide(&job, &DEVICE, &Profile::default().emu, 0.5) {
                Decision::Cpu(lodestone::mover::schedule::Why::Small) => small += 1,
                Decision::Cpu(_) => misaligned += 1,
                Decision::Engine { .. } => whole += 1,
                Decision::Shared { .. } => shared += 1,
            }
        }
        assert!(
            [small, misaligned, whole, shared].iter().all(|n| *n > JOBS / 64),
            "{small} {misaligned} {whole} {shared}"
        );
        assert!(cost_ns().median > 0.0);
    }
}
