//! Where the time of reads and writes goes, by size: EasyIO's Figure 1, drawn for us from the file system's own account
//! (`lodestone::account`).
//!
//! The loop is that of the other rows; in every round the account is looked at before and after. Phases are shares of the
//! time that the account has, so they sum up to 1; what the loop measured in the same round stands beside it. Each
//! row is the round whose operations took neither longest nor shortest: a thread that the host stops for a while would
//! lengthen whatever phase it was in. (A slice to warm up goes before each round, and counts in the account only.)

use std::fmt::Write;
use std::sync::Arc;

use lodestone::account::{Op, Phase, Times};
use lodestone::fs::Fs;
use lodestone::media::Pool;
use lodestone::{Error, Result};
use serde::Serialize;

use super::machine::{Machine, load};
use super::place::Place;
use super::plan::Plan;
use super::rows::{BREAKDOWN_ROWS, RowSpec, Work};
use super::table::digits;
use super::turns::{Contestant, Crew, separate_cores};
use super::worker::Names;
use super::{BenchOptions, breakdown_plot, finish_machine, own_contestants, progress, report, shared_note};
use crate::outfile;

/// Operations of which one is watched: more than usual, so that the rows of large ones have enough of them.
const ONE_IN: u32 = 8;

#[derive(Serialize)]
pub struct Breakdown {
    pub machine: Machine,
    pub breakdown: Vec<Part>,
    /// On what some of it was measured, in words.
    pub notes: Vec<String>,
}

/// One operation of one system.
#[derive(Serialize)]
pub struct Part {
    pub name: String,
    pub system: String,
    pub threads: usize,
    pub bytes: usize,
    /// Operations that were watched.
    pub watched: u64,
    pub ops_per_s: f64,
    /// What the loop measured, the mean; and what the account has of the operations it watched.
    pub measured_us: f64,
    pub accounted_us: f64,
    /// Of what the account has.
    pub shares: Shares,
}

#[derive(Serialize, Clone, Copy)]
pub struct Shares {
    pub copy: f64,
    pub metadata: f64,
    pub index: f64,
    pub wait: f64,
}

impl Shares {
    fn of(times: &Times) -> Shares {
        let [copy, metadata, index, wait] = Phase::ALL.map(|phase| times.share(phase));
        Shares { copy, metadata, index, wait }
    }

    /// In the order of [`Phase::ALL`].
    pub fn all(&self) -> [(Phase, f64); 4] {
        let Shares { copy, metadata, index, wait } = *self;
        let shares = [copy, metadata, index, wait];
        std::array::from_fn(|n| (Phase::ALL[n], shares[n]))
    }
}

/// One of the systems, all its thread counts.
struct System {
    fs: Arc<Fs<Pool>>,
    contestants: Vec<Contestant>,
}

pub fn run(options: &BenchOptions, plan: &Plan, place: &mut Place, machine: &mut Machine) -> Result<String> {
    let mut systems = Vec::new();
    for (i, variant) in plan.variants().into_iter().enumerate() {
        let own = own_contestants(plan, place, machine, i, variant)?;
        let (fs, contestants) =
            own.map_err(|missing| Error::message(libc::ENODEV, "bench::breakdown", missing))?;
        // Few operations fit into a smoke run's slices.
        fs.ledger().watch_one_in(if options.smoke { 1 } else { ONE_IN });
        systems.push(System { fs, contestants });
    }
    let crew = Crew::new(plan.threads_max())?;
    let jobs = plan.jobs(Arc::new(Names::new(1)));
    let mut parts = Vec::new();
    for spec in BREAKDOWN_ROWS {
        for System { fs, contestants } in &mut systems {
            for contestant in contestants {
                let op = if spec.work == Work::WriteRandom { Op::Write } else { Op::Read };
                let mut rounds = Vec::new();
                for round in 0..plan.rounds as u64 {
                    let before = fs.times(op);
                    let only = std::slice::from_mut(contestant);
                    let job_of = |spec: &RowSpec, seed| jobs(spec, 2 * round + seed);
                    let rows = crew.rounds(&[spec], only, 1, &job_of, &progress)?;
                    rounds.extend(rows.iter().map(|row| part(spec, row, &fs.times(op).since(&before))));
                }
                rounds.sort_by(|a: &Part, b| a.accounted_us.total_cmp(&b.accounted_us));
                let middle = rounds.len() / 2;
                parts.extend(rounds.into_iter().nth(middle));
            }
        }
    }
    machine.load_after = load();
    finish_machine(machine, plan, place);
    let shared = shared_note(plan.threads_max(), separate_cores()?);
    let notes = machine.other_media.iter().cloned().chain(shared).collect();
    deliver(&Breakdown { machine: machine.clone(), breakdown: parts, notes }, options)
}

fn part(spec: &RowSpec, row: &report::Row, times: &Times) -> Part {
    Part {
        name: row.name.clone(),
        system: row.system.clone(),
        threads: row.threads,
        bytes: spec.bytes,
        watched: times.operations,
        ops_per_s: row.ops_per_s,
        measured_us: row.threads as f64 * 1e6 / row.ops_per_s,
        accounted_us: times.total_ns() as f64 / 1e3 / times.operations.max(1) as f64,
        shares: Shares::of(times),
    }
}

fn deliver(breakdown: &Breakdown, options: &BenchOptions) -> Result<String> {
    outfile::with_picture(answer(breakdown, options)?, options.svg.as_deref(), || {
        Ok(breakdown_plot::render(breakdown))
    })
}

fn answer(breakdown: &Breakdown, options: &BenchOptions) -> Result<String> {
    if !options.json {
        return Ok(table(breakdown));
    }
    let mut text = serde_json::to_string_pretty(breakdown)
        .map_err(|e| Error::message(libc::EINVAL, "bench::breakdown", e.to_string()))?;
    text.push('\n');
    Ok(text)
}

fn table(breakdown: &Breakdown) -> String {
    let m = &breakdown.machine;
    let media: Vec<&str> = std::iter::once(&m.media).chain(&breakdown.notes).map(String::as_str).collect();
    let mut out = format!(
        "{}\n{}, {} cores, Linux {}; files in {}{}\nthe middle one of {} rounds of {} ms; shares of what the file \
         system accounts for; load {:.1} before, {:.1} after\n\n{:<12} {:<14} thr",
        media.join("\n"),
        m.cpu,
        m.cores,
        m.kernel,
        m.place,
        m.profile_note(),
        m.rounds,
        m.slice_ms,
        m.load_before,
        m.load_after,
        "where time goes",
        "system"
    );
    for phase in Phase::ALL {
        let _ = write!(out, " {:>9}", phase.name());
    }
    let _ = writeln!(out, " {:>12} {:>12} {:>9}", "accounted us", "measured us", "watched");
    for part in &breakdown.breakdown {
        let _ = write!(out, "{:<15} {:<11} {:>6}", part.name, part.system, part.threads);
        for (_, share) in part.shares.all() {
            let _ = write!(out, " {:>7.1} %", share * 100.0);
        }
        let (accounted, measured) = (digits(part.accounted_us), digits(part.measured_us));
        let _ = writeln!(out, " {accounted:>12} {measured:>12} {:>9}", part.watched);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::{BenchOptions, run};
    use lodestone::mover::EngineKind;
    use serde_json::Value;

    /// Every size of every system is there, and its phases are the whole; how large they are is nobody's business here.
    #[test]
    fn smoke_run_breaks_every_size_down() {
        let svg = std::env::temp_dir().join(format!("lode-breakdown-test-{}.svg", std::process::id()));
        let options = BenchOptions {
            smoke: true,
            json: true,
            breakdown: true,
            threads: vec![1],
            engines: vec![EngineKind::Delegate],
            svg: Some(svg.clone()),
            ..BenchOptions::default()
        };
        let report: Value = serde_json::from_str(&run(&options).unwrap()).unwrap();
        let parts = report["breakdown"].as_array().unwrap();
        assert_eq!(parts.len(), super::BREAKDOWN_ROWS.len() * 2);
        for part in parts {
            let shares: Vec<f64> = ["copy", "metadata", "index", "wait"]
                .iter()
                .map(|phase| part["shares"][phase].as_f64().unwrap())
                .collect();
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{part}");
            assert!(shares.iter().all(|share| *share > 0.0), "{part}");
            assert!(
                part["watched"].as_u64() > Some(0) && part["accounted_us"].as_f64() > Some(0.0),
                "{part}"
            );
            assert!(part["ops_per_s"].as_f64() > Some(0.0), "{part}");
        }
        let picture = std::fs::read_to_string(&svg).unwrap();
        std::fs::remove_file(&svg).unwrap();
        assert!(picture.contains("emulated PM") && picture.ends_with("</svg>\n"));
        for spec in super::BREAKDOWN_ROWS {
            assert!(picture.contains(&format!(">{}<", spec.name)), "{}", spec.name);
        }
        let text = run(&BenchOptions { json: false, svg: None, ..options }).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("read-1m")).count(), 2, "{text}");
    }
}
