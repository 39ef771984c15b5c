//! What it costs to wait so long for somebody else, by each rung of the wait ladder: what its limits are taken from
//! (`docs/decisions/0082-wait-ladder.md`).
//!
//! An *engine*, a thread on another core, ends a request after so many microseconds, and rings. *poll* looks again and
//! again; *tpause* likewise, the core resting in between, where the processor can (WAITPKG); *yield* gives the worker to
//! another uthread between two looks; *sleep* is woken by the ring; *ladder* is what the library does when it expects
//! the right time.
//!
//! Times are from the end to when the caller goes on, CPU time is what one wait takes: the caller's thread's, and the
//! engine's for the ring. Of *yield* it is what the other uthread's work lost. The engine's own spinning counts nowhere:
//! it stands for a copy. How much later than it should a sleep ends that nobody ends is a row of its own.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lodestone::runtime::{spawn, yield_now};
use lodestone::wait::pause::{Pause, moment};
use lodestone::wait::slack::in_a_hurry;
use lodestone::wait::{Bell, Ending, Holding, POLL_MAX, until};
use lodestone::{Error, Result};

use super::clock::{Clock, Histogram, thread_cpu_ns};
use super::plan::Plan;
use super::report::{Claim, Row, median};
use super::turns::{allowed_cores, pin_thread};
use super::uthreads::alone;
use super::value::{Values, value};

const LENGTHS_US: [u64; 5] = [1, 3, 10, 30, 100];
/// Steps of the other uthread's work between two switches: about half a microsecond.
const WORK_STEPS: u64 = 400;
/// For which the ladder's limit stands: the crossover found may be so many times as long, and no longer.
const CROSSOVER_US_MAX: f64 = 2.0 * POLL_MAX.as_micros() as f64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Poll,
    Rest,
    Yield,
    Sleep,
    Ladder,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Poll => "poll",
            Way::Rest => "tpause",
            Way::Yield => "yield",
            Way::Sleep => "sleep",
            Way::Ladder => "ladder",
        }
    }

    fn all() -> Vec<Way> {
        let ways = [Way::Poll, Way::Rest, Way::Yield, Way::Sleep, Way::Ladder];
        ways.into_iter().filter(|way| *way != Way::Rest || Pause::here() == Pause::Rest).collect()
    }
}

/// Ends requests, one at a time.
#[derive(Default)]
struct Engine {
    /// The number of the last request, and of the last that ended.
    begun: AtomicU64,
    ended: AtomicU64,
    /// How long it takes, and when it ended, in ticks.
    ticks: AtomicU64,
    at: AtomicU64,
    /// CPU time of all rings.
    ringing_ns: AtomicU64,
    over: AtomicBool,
    bell: Bell,
}

/// A request by its number.
struct Request<'a>(&'a Engine, u64);

impl Ending for Request<'_> {
    fn look(&self) -> bool {
        self.0.ended.load(Ordering::Acquire) >= self.1
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.0.bell)
    }
}

impl Engine {
    fn work(&self, clock: Clock) {
        let mut last = 0;
        while !self.over.load(Ordering::Relaxed) {
            let next = self.begun.load(Ordering::Acquire);
            if next == last {
                spin_loop();
                continue;
            }
            last = next;
            let (begun, ticks) = (clock.stamp(), self.ticks.load(Ordering::Relaxed));
            let mut now = begun;
            while now.saturating_sub(begun) < ticks {
                spin_loop();
                now = clock.stamp();
            }
            let cpu_ns = thread_cpu_ns();
            self.at.store(clock.stamp(), Ordering::Relaxed);
            self.ended.store(last, Ordering::Release);
            self.bell.ring();
            self.ringing_ns.fetch_add(thread_cpu_ns() - cpu_ns, Ordering::Relaxed);
        }
    }
}

/// One round of one way.
struct Turn {
    late: Histogram,
    cpu_us: f64,
    waits_per_s: f64,
}

/// Waits so often; gives what one of them takes, the ring apart.
fn waits(engine: &Engine, way: Way, us: u64, count: u64, late: &mut Histogram) {
    let clock = Clock::get();
    let time = Duration::from_micros(us);
    for _ in 0..count {
        let request = Request(engine, engine.begun.load(Ordering::Relaxed) + 1);
        let begun = Instant::now();
        engine.begun.store(request.1, Ordering::Release);
        match way {
            Way::Poll => {
                while !request.look() {
                    spin_loop();
                }
            }
            Way::Rest => {
                while !request.look() {
                    moment();
                }
            }
            Way::Yield => {
                while !request.look() {
                    yield_now();
                }
            }
            Way::Sleep => drop(until(&request, None, Holding::Something)),
            Way::Ladder => drop(until(&request, Some(begun + time), Holding::Something)),
        }
        late.add(clock.stamp().saturating_sub(engine.at.load(Ordering::Relaxed)));
    }
}

/// A little work; nothing of it can be left out.
fn work() {
    let mut sum = 0u64;
    for step in 0..WORK_STEPS {
        sum = black_box(sum.wrapping_mul(31).wrapping_add(step));
    }
    black_box(sum);
}

/// CPU time of one unit of work and its switch, with nobody who waits beside it, in nanoseconds.
fn work_ns(units: u64) -> Result<f64> {
    alone(move || {
        let begun = thread_cpu_ns();
        for _ in 0..units {
            work();
            yield_now();
        }
        Ok((thread_cpu_ns() - begun) as f64 / units as f64)
    })
}

/// As [`waits`], in a uthread beside one that works; the CPU time of all waits, in nanoseconds.
fn waits_beside_work(
    engine: &Arc<Engine>,
    us: u64,
    count: u64,
    work_ns: f64,
    late: Histogram,
) -> Result<(Histogram, f64)> {
    let engine = engine.clone();
    alone(move || {
        let over = Arc::new(AtomicBool::new(false));
        let works = spawn({
            let over = over.clone();
            move || {
                let mut units = 0u64;
                while !over.load(Ordering::Relaxed) {
                    work();
                    units += 1;
                    yield_now();
                }
                units
            }
        })?;
        let (mut late, begun) = (late, thread_cpu_ns());
        waits(&engine, Way::Yield, us, count, &mut late);
        let cpu_ns = (thread_cpu_ns() - begun) as f64;
        over.store(true, Ordering::Relaxed);
        let units = works.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((late, (cpu_ns - units as f64 * work_ns).max(0.0)))
    })
}

fn turn(engine: &Arc<Engine>, way: Way, us: u64, count: u64, work_ns: f64) -> Result<Turn> {
    let clock = Clock::get();
    engine.ticks.store(clock.ticks(Duration::from_micros(us)), Ordering::Relaxed);
    let (wall, ringing_ns) = (Instant::now(), engine.ringing_ns.load(Ordering::Relaxed));
    let (late, cpu_ns) = match way {
        Way::Yield => waits_beside_work(engine, us, count, work_ns, Histogram::default())?,
        _ => {
            let (mut late, begun) = (Histogram::default(), thread_cpu_ns());
            waits(engine, way, us, count, &mut late);
            (late, (thread_cpu_ns() - begun) as f64)
        }
    };
    let rings_ns = (engine.ringing_ns.load(Ordering::Relaxed) - ringing_ns) as f64;
    let cpu_us = (cpu_ns + rings_ns) / 1e3 / count as f64;
    Ok(Turn { late, cpu_us, waits_per_s: count as f64 / wall.elapsed().as_secs_f64() })
}

pub fn run(plan: &Plan) -> Result<Values> {
    let cores = allowed_cores()?;
    let [own, others @ ..] = cores.as_slice() else { return Err(too_few()) };
    let other = others.first().ok_or_else(too_few)?;
    let engine = Arc::new(Engine::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin_thread(*other);
            engine.work(Clock::get());
        });
        let measured = scope.spawn(|| {
            pin_thread(*own);
            measure(plan, &engine)
        });
        let values = measured.join();
        engine.over.store(true, Ordering::Relaxed);
        values.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn too_few() -> Error {
    Error::message(libc::ENOTSUP, "bench::waits", "two processors are needed: one waits for the other")
}

fn measure(plan: &Plan, engine: &Arc<Engine>) -> Result<Values> {
    let work_ns = work_ns(plan.waits * 10)?;
    let mut values: Vec<(Row, Option<Claim>)> = Vec::new();
    let (mut polls, mut sleeps) = (Vec::new(), Vec::new());
    for us in LENGTHS_US {
        let ways = Way::all();
        let mut turns: Vec<Vec<Turn>> = ways.iter().map(|_| Vec::new()).collect();
        for round in 0..=plan.rounds {
            for (way, turns) in ways.iter().zip(&mut turns) {
                let turn = turn(engine, *way, us, plan.waits, work_ns)?;
                // The first one warms up.
                if round > 0 {
                    turns.push(turn);
                }
            }
        }
        for (way, turns) in ways.iter().zip(&turns) {
            let row = row(*way, us, turns);
            let cpu_us = row.cpu_us_per_op.unwrap_or(0.0);
            match way {
                Way::Poll => polls.push((us as f64, cpu_us)),
                Way::Sleep => sleeps.push((us as f64, cpu_us)),
                _ => {}
            }
            values.push((row, None));
        }
    }
    let (row, claim) = value("wait-crossover", &[crossover_us(&polls, &sleeps)], "us", CROSSOVER_US_MAX);
    values.push((row, Some(claim)));
    let late: Vec<f64> = (0..plan.rounds).map(|_| nap_late_us(plan.waits / 10)).collect();
    values.push((value("wait-nap-late", &late, "us", 0.0).0, None));
    let hurry = || in_a_hurry(|| nap_late_us(plan.waits / 10));
    let late: Vec<f64> = (0..plan.rounds).map(|_| hurry()).collect();
    values.push((value("wait-nap-late-hurried", &late, "us", 0.0).0, None));
    let (rows, claims): (Vec<Row>, Vec<Option<Claim>>) = values.into_iter().unzip();
    Ok((rows, claims.into_iter().flatten().collect()))
}

fn row(way: Way, us: u64, turns: &[Turn]) -> Row {
    let clock = Clock::get();
    let mut late = Histogram::default();
    turns.iter().for_each(|turn| late.merge(&turn.late));
    let rates: Vec<f64> = turns.iter().map(|turn| turn.waits_per_s).collect();
    let cpu: Vec<f64> = turns.iter().map(|turn| turn.cpu_us).collect();
    let percentile = |share| late.percentile(share).map_or(0.0, |ticks| clock.ns(ticks as u64) / 1e3);
    Row {
        name: format!("wait-{us}us"),
        system: way.name().to_owned(),
        threads: 1,
        ops_per_s: median(&rates),
        gib_per_s: None,
        p50_us: percentile(0.5),
        p99_us: percentile(0.99),
        cpu_s_per_gib: None,
        cpu_us_per_op: Some(median(&cpu)),
        waiting_share: None,
        cpu_scope: "wait",
        promise: "",
        memory: None,
        rounds: turns.len(),
        ops_per_s_min: rates.iter().copied().fold(f64::INFINITY, f64::min),
        ops_per_s_max: rates.iter().copied().fold(0.0, f64::max),
        ops_per_s_rounds: rates,
        value: None,
        unit: None,
    }
}

/// The length of wait up to which polling takes less CPU time than sleeping, between two that were measured; the last
/// one where it always does.
fn crossover_us(polls: &[(f64, f64)], sleeps: &[(f64, f64)]) -> f64 {
    let more: Vec<(f64, f64)> = polls.iter().zip(sleeps).map(|(p, s)| (p.0, p.1 - s.1)).collect();
    let Some(at) = more.iter().position(|(_, more)| *more > 0.0) else {
        return more.last().map_or(0.0, |(us, _)| *us);
    };
    let (us, over) = more[at];
    match at.checked_sub(1).map(|before| more[before]) {
        Some((before, under)) => before + (us - before) * under / (under - over),
        None => us,
    }
}

/// By how much a sleep of 100 us lasts too long, half of the time.
fn nap_late_us(count: u64) -> f64 {
    const NAP: Duration = Duration::from_micros(100);
    let late = (0..count.max(1)).map(|_| {
        let begun = Instant::now();
        std::thread::sleep(NAP);
        (begun.elapsed() - NAP).as_nanos() as f64 / 1e3
    });
    median(&late.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossover_lies_between_what_was_measured() {
        let sleeps = [1.0, 10.0, 100.0].map(|us| (us, 5.0));
        let polls = [1.0, 10.0, 100.0].map(|us| (us, us));
        let found = crossover_us(&polls, &sleeps);
        assert!((4.9..5.1).contains(&found), "{found}");
        assert_eq!(crossover_us(&polls, &sleeps.map(|(us, _)| (us, 0.5))), 1.0, "never less");
        assert_eq!(crossover_us(&polls, &sleeps.map(|(us, _)| (us, 1e3))), 100.0, "always less");
    }
}
