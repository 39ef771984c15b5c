//! `lode crash`: lets power fail at every point of sequences of operations, and judges what is left. Those of persistent
//! heaps are in `crash_heap`.

use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lodestone::fs::DataMode;
use lodestone::sim::explore::Bounds;
use lodestone::sim::media::Rng;
use lodestone::sim::mutation::{self, Mutant};
use lodestone::sim::run::{Broken, Copier, Effort, Image, Place, Plan, Report, Tally, run as explore};
use lodestone::sim::workload::{self, Sequence};
use serde::Serialize;

use super::crash_heap;
use crate::cli::{self, Data};
use crate::failure::{Failure, Output, Result};

/// States of each lane without the checksum guard.
pub(super) const LANE_STATES: u32 = 2;
/// Sequences of three that are tried where none says how many.
const SAMPLES: u64 = 1000;
/// A file of sequences, in bytes.
const WORKLOAD_BYTES_MAX: u64 = 16 << 20;
pub(super) const REDRAWS_PER_SECOND: u8 = 4;
/// What is done before there are mutants.
pub(super) const SITES: &str = "which steps there are to leave out";

#[derive(Serialize)]
pub(super) struct Document<'a> {
    workload: &'a str,
    part: String,
    workloads: u64,
    crash_points: u64,
    covered_points: u64,
    states: u64,
    distinct_states: u64,
    recovery_points: u64,
    recovery_states: u64,
    kills: u64,
    refused: u64,
    violations: u64,
    seed: u64,
    seconds: f64,
    states_per_s: f64,
    broken: Vec<Violation>,
}

#[derive(Serialize)]
pub(super) struct Violation {
    pub what: String,
    pub at: String,
    pub lost: String,
    pub sequence: String,
    pub replay: String,
}

pub fn run(args: &cli::Crash) -> Result<()> {
    if let Some(heap) = crash_heap::sequences(args)? {
        return crash_heap::run(args, heap);
    }
    if args.image.contains(&cli::CrashImage::Filled) {
        return Err(Failure::usage("--image filled is for heaps: give --workload heap"));
    }
    let (name, all, sequence) = sequences(args)?;
    let part = args.part;
    if args.mutants {
        some(part, all)?;
    }
    let plan = Plan {
        places: places(args),
        count: part.count(all),
        sequence: Box::new(move |n| sequence(part.nth(n))),
        effort: Effort {
            bounds: Bounds { leaves_max: args.leaves, lane_states: LANE_STATES, seed: args.seed },
            twice: args.depth > 1,
            torn_pages: args.torn_pages,
            ..Effort::default()
        },
        threads: args
            .threads
            .or_else(|| std::thread::available_parallelism().ok())
            .map_or(1, NonZeroUsize::get),
    };
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
    let style = "{bar:24} {pos}/{len} sequences {eta} {wide_msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
    crate::interrupt::catch();
    let begun = Instant::now();
    if args.mutants {
        return mutants(args, &plan, &bar, begun);
    }
    let told = AtomicU64::new(0);
    let report = explore(&plan, &|done, total, tally| {
        bar.set_length(total);
        bar.set_position(done);
        let rate = tally.states as f64 / begun.elapsed().as_secs_f64();
        bar.set_message(format!("{} states, {rate:.0}/s, {} violations", tally.states, tally.violations));
        told.store(tally.violations, Ordering::Relaxed);
        !crate::interrupt::requested()
    });
    bar.finish_and_clear();
    let report = report.map_err(Failure::failed)?;
    let seconds = begun.elapsed().as_secs_f64();
    Output::print(|out| match args.json {
        true => out.json(&document(&name, args, &report.tally, violations(&report, args), seconds)),
        false => {
            let shown = report.broken.iter().map(|b| (b.to_string(), replay(b, args)));
            table(out, &name, args, &report.tally, shown, seconds)
        }
    })?;
    if report.stopped {
        return Err(Failure::failed("interrupted; what was not reached is not counted"));
    }
    if report.tally.violations == 0 { Ok(()) } else { Err(Failure::Reported) }
}

#[derive(Serialize)]
pub(super) struct Mutants {
    mutants: usize,
    killed: usize,
    seed: u64,
    seconds: f64,
    tried: Vec<Tried>,
}

#[derive(Serialize)]
pub(super) struct Tried {
    pub without: String,
    pub sequences: u64,
    /// What noticed it; null where nothing did.
    pub killed_by: Option<String>,
    pub what: Option<String>,
}

/// Fails only where it is interrupted: which survivors are right is for who reads it.
fn mutants(args: &cli::Crash, plan: &Plan, bar: &ProgressBar, begun: Instant) -> Result<()> {
    // A mutant may die by a panic; that is not news.
    std::panic::set_hook(Box::new(|_| ()));
    let tried = mutation::run(plan, &|_| true, &|done, total, mutant| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        bar.set_message(mutant.map_or_else(|| SITES.to_owned(), |mutant| mutant.site.to_string()));
        if let Some(mutant) = mutant {
            tracing::info!(done, total, without = %mutant.site, killed = mutant.killed.is_some());
        }
        !crate::interrupt::requested()
    });
    drop(std::panic::take_hook());
    bar.finish_and_clear();
    let tried = tried.map_err(Failure::failed)?.into_iter().map(Tried::from).collect();
    tell_mutants(args, tried, begun)
}

pub(super) fn tell_mutants(args: &cli::Crash, tried: Vec<Tried>, begun: Instant) -> Result<()> {
    let killed = tried.iter().filter(|t| t.killed_by.is_some()).count();
    Output::print(|out| {
        if args.json {
            let seconds = begun.elapsed().as_secs_f64();
            return out.json(&Mutants { mutants: tried.len(), killed, seed: args.seed, seconds, tried });
        }
        for t in &tried {
            let by = match (&t.killed_by, &t.what) {
                (Some(by), Some(what)) => {
                    format!("killed by {by}: {}", what.lines().next().unwrap_or_default())
                }
                _ => format!("SURVIVES {} sequences", t.sequences),
            };
            out.line(format_args!("without {}: {by}", t.without))?;
        }
        out.line(format_args!("{killed} of {} mutants are killed", tried.len()))
    })?;
    if crate::interrupt::requested() {
        return Err(Failure::failed("interrupted; not every mutant was tried"));
    }
    Ok(())
}

impl From<Mutant> for Tried {
    fn from(mutant: Mutant) -> Tried {
        let by = mutant.killed.as_ref().map(|b| format!("{} ({})", b.at, b.place));
        Tried {
            without: mutant.site.to_string(),
            sequences: mutant.sequences,
            killed_by: by,
            what: mutant.killed.map(|b| b.what),
        }
    }
}

type Sequences = (String, u64, Box<dyn Fn(u64) -> Sequence + Sync>);

/// A file of sequences.
pub fn read_text(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(WORKLOAD_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > WORKLOAD_BYTES_MAX {
        let message = format!("it has more than {} MiB", WORKLOAD_BYTES_MAX >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}

/// Nothing is noticed where nothing runs. (Else the parts of a few sequences may be more than these: then some have none.)
pub(super) fn some(part: cli::Part, all: u64) -> Result<()> {
    match part.count(all) {
        0 => Err(Failure::usage(format!("no sequences: --part {part} leaves none of {all}"))),
        _ => Ok(()),
    }
}

fn sequences(args: &cli::Crash) -> Result<Sequences> {
    let length = match args.workload.to_str() {
        Some("seq1") => 1,
        Some("seq2") => 2,
        Some("seq3") => 3,
        _ => 0,
    };
    let name = args.workload.to_string_lossy().into_owned();
    if length > 0 {
        let all = workload::count(length);
        let samples = args.samples.or((length > 2).then_some(SAMPLES)).filter(|n| *n < all);
        let Some(samples) = samples else {
            return Ok((name, all, Box::new(move |n| workload::sequence(length, n))));
        };
        let seed = args.seed;
        // The same number always gives the same one, whichever others are tried.
        let pick = move |n: u64| workload::sequence(length, Rng::new(seed << 32 ^ n).below(all));
        return Ok((name, samples, Box::new(pick)));
    }
    let text = read_text(&args.workload).map_err(|e| {
        Failure::failed(format_args!("cannot read {name}: {e}; seq1, seq2, seq3 and heap are built in"))
    })?;
    let all = workload::parse(&text).map_err(|e| Failure::failed(format_args!("{name}: {e}")))?;
    Ok((name, all.len() as u64, Box::new(move |n| all[n as usize].clone())))
}

fn places(args: &cli::Crash) -> Vec<Place> {
    let mut places = Vec::new();
    for domain in args.domain.iter().flat_map(|d| d.domains()) {
        for data in &args.data {
            let data = match data {
                Data::Cow => DataMode::Cow,
                Data::Inplace => DataMode::InPlace,
            };
            for image in args.image.iter().flat_map(|i| i.images()) {
                for engine in &args.engine {
                    let place = Place { domain, data, image: *image, copier: engine.copier() };
                    if !places.contains(&place) {
                        places.push(place);
                    }
                }
            }
        }
    }
    places
}

impl cli::CrashDomain {
    pub(super) fn domains(self) -> impl Iterator<Item = lodestone::media::Domain> {
        use lodestone::media::Domain;
        let all = [
            (cli::CrashDomain::Memory, Domain::Memory),
            (cli::CrashDomain::CpuCache, Domain::CpuCache),
            (cli::CrashDomain::PageCache, Domain::PageCache),
        ];
        all.into_iter().filter(move |(d, _)| self == cli::CrashDomain::All || self == *d).map(|(_, d)| d)
    }
}

impl cli::CrashEngine {
    fn copier(self) -> Copier {
        match self {
            cli::CrashEngine::Cpu => Copier::Cpu,
            cli::CrashEngine::CpuFenced => Copier::CpuFenced,
            cli::CrashEngine::PastCaches => Copier::PastCaches,
            cli::CrashEngine::IntoCaches => Copier::IntoCaches,
            cli::CrashEngine::ByAlignment => Copier::ByAlignment,
            cli::CrashEngine::Late => Copier::Late,
            cli::CrashEngine::LateByAlignment => Copier::LateByAlignment,
            cli::CrashEngine::LateStriped => Copier::LateStriped,
            cli::CrashEngine::LateInPieces => Copier::LateInPieces,
        }
    }
}

impl cli::CrashImage {
    fn images(self) -> &'static [Image] {
        match self {
            cli::CrashImage::All => Image::ALL,
            cli::CrashImage::Aged => &Image::ALL[1..],
            cli::CrashImage::Fresh => &[Image::Fresh],
            cli::CrashImage::Full => &[Image::Full],
            cli::CrashImage::Cleaning => &[Image::Cleaning],
            cli::CrashImage::Filled => &[],
            cli::CrashImage::Reused => &[Image::Reused],
            cli::CrashImage::Crashed => &[Image::Crashed],
            cli::CrashImage::Grown => &[Image::Grown],
            cli::CrashImage::Crammed => &[Image::Crammed],
        }
    }
}

fn replay(broken: &Broken, args: &cli::Crash) -> String {
    let cli::Crash { seed, leaves, depth, .. } = args;
    let torn = if args.torn_pages { " --torn-pages" } else { "" };
    format!(
        "lode crash --workload FILE {} --seed {seed} --leaves {leaves} --depth {depth}{torn}",
        broken.place
    )
}

/// The violations in the form they are shown in.
fn violations(report: &Report, args: &cli::Crash) -> Vec<Violation> {
    let violation = |b: &Broken| Violation {
        what: b.what.clone(),
        at: b.at.clone(),
        lost: b.lost.clone(),
        sequence: b.sequence.to_string(),
        replay: replay(b, args),
    };
    report.broken.iter().map(violation).collect()
}

pub(super) fn document<'a>(
    name: &'a str,
    args: &cli::Crash,
    t: &Tally,
    broken: Vec<Violation>,
    seconds: f64,
) -> Document<'a> {
    Document {
        workload: name,
        part: args.part.to_string(),
        workloads: t.sequences,
        crash_points: t.crash_points,
        covered_points: t.covered_points,
        states: t.states,
        distinct_states: t.distinct,
        recovery_points: t.recovery_points,
        recovery_states: t.recovery_states,
        kills: t.kills,
        refused: t.refused,
        violations: t.violations,
        seed: args.seed,
        seconds,
        states_per_s: (t.states + t.recovery_states) as f64 / seconds,
        broken,
    }
}

pub(super) fn table(
    out: &mut Output,
    name: &str,
    args: &cli::Crash,
    t: &Tally,
    shown: impl Iterator<Item = (String, String)>,
    seconds: f64,
) -> Result<()> {
    let rate = (t.states + t.recovery_states) as f64 / seconds;
    let part = if args.part.of > 1 { format!(", part {}", args.part) } else { String::new() };
    out.line(format_args!("workload          {name}{part}, seed {}", args.seed))?;
    out.line(format_args!("sequences         {}", t.sequences))?;
    out.line(format_args!("crash points      {}, {} of them covered", t.crash_points, t.covered_points))?;
    out.line(format_args!("states            {}, {} of them distinct", t.states, t.distinct))?;
    if t.recovery_points > 0 {
        let (points, states) = (t.recovery_points, t.recovery_states);
        out.line(format_args!("within recovery   {points} crash points, {states} states"))?;
    }
    if t.kills > 0 {
        out.line(format_args!("killed processes  {}, and power failed later", t.kills))?;
    }
    out.line(format_args!("speed             {rate:.0} states/s, {seconds:.1} s in all"))?;
    out.line(format_args!("violations        {}", t.violations))?;
    for (broken, replay) in shown {
        out.line(format_args!("\n{broken}replay with these lines as FILE: {replay}"))?;
    }
    Ok(())
}
