//! Who is measured, in which order: contestants take turns, the order rotating, so that a slow second of the machine
//! slows all of them; sizes descend. A first round, which does not count, starts threads and touches pages.

use lodestone::mover::EngineKind;
use lodestone::mover::profile::Lane;

use super::bed::Bed;
use super::plan::{Plan, Site};
use super::rule::Spread;
use super::turn::{Load, Turn, turn};
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::progress::Steps;
use crate::size::Size;

/// An engine with so many threads on its way between DRAM and media.
#[derive(Clone, Debug)]
pub struct Contestant {
    pub engine: EngineKind,
    pub lane: Lane,
    /// The CPU of each thread.
    pub cpus: Vec<usize>,
}

impl Contestant {
    /// More threads than CPUs share them.
    pub fn new(engine: EngineKind, lane: Lane, site: &Site, threads: usize) -> Contestant {
        let cpus = site.cpus.iter().copied().cycle().take(threads).collect();
        Contestant { engine, lane, cpus }
    }
}

/// All rounds of one contestant at one size.
#[derive(Clone, Debug)]
pub struct Row {
    pub engine: EngineKind,
    pub lane: Lane,
    pub threads: usize,
    pub bytes: usize,
    pub turns: Vec<Turn>,
}

impl Row {
    pub fn spread(&self, number: impl Fn(&Turn) -> f64) -> Spread {
        let rounds: Vec<f64> = self.turns.iter().map(number).collect();
        Spread::of(&rounds).expect("there is at least one round")
    }

    /// The share of its copies that the engine took.
    pub fn taken(&self) -> f64 {
        self.spread(|turn| turn.taken).median
    }
}

/// How many turns `rounds` takes.
pub fn turns(contestants: &[Contestant], sizes: &[usize], plan: &Plan) -> u64 {
    (contestants.len() * sizes.len() * (plan.rounds + 1)) as u64
}

/// All contestants at all sizes.
pub fn rounds(
    bed: &Bed,
    contestants: &[Contestant],
    sizes: &[usize],
    plan: &Plan,
    steps: &Steps,
) -> Result<Vec<Row>> {
    let row = |c: &Contestant, bytes| {
        let turns = Vec::with_capacity(plan.rounds);
        Row { engine: c.engine, lane: c.lane, threads: c.cpus.len(), bytes, turns }
    };
    let mut rows = Vec::new();
    for &bytes in sizes {
        let mut of_size: Vec<Row> = contestants.iter().map(|c| row(c, bytes)).collect();
        for round in 0..=plan.rounds {
            for place in 0..contestants.len() {
                let n = (place + round) % contestants.len();
                let Contestant { engine, lane, cpus } = &contestants[n];
                check_interrupt()?;
                let emulated = if engine.emulated() { " (emulated)" } else { "" };
                steps.name(format!("{engine}{emulated}, {} of {}", words(*lane), Size(bytes as u64)));
                bed.make_room()?;
                let load = Load {
                    engine: *engine,
                    direction: lane.direction(),
                    bytes,
                    cpus,
                    slice: plan.slice,
                    bytes_max: bed.room_for(lane.direction(), cpus.len()),
                    seed: round as u64 + 1,
                };
                let turn = turn(bed, &load)?;
                if round > 0 {
                    of_size[n].turns.push(turn);
                }
                steps.advance();
            }
        }
        rows.extend(of_size);
    }
    Ok(rows)
}

/// A lane for people.
pub fn words(lane: Lane) -> &'static str {
    match lane {
        Lane::LocalWrite => "local writes",
        Lane::LocalRead => "local reads",
        Lane::RemoteWrite => "remote writes",
        Lane::RemoteRead => "remote reads",
    }
}

pub fn check_interrupt() -> Result<()> {
    match interrupt::requested() {
        true => Err(Failure::failed("interrupted; no profile was written, and the pool is as it was")),
        false => Ok(()),
    }
}
