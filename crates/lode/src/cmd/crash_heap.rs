//! `lode crash --workload heap`: the same for persistent heaps.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lodestone::sim::explore::Bounds;
use lodestone::sim::heap::mutants::{self, Mutant};
use lodestone::sim::heap::run::{Broken, Image, Place, Plan, run as explore};
use lodestone::sim::heap::workload::{self, Sequence};
use lodestone::sim::run::Effort;

use super::crash::{
    LANE_STATES, REDRAWS_PER_SECOND, SITES, Tried, Violation, document, read_text, some, table, tell_mutants,
};
use crate::cli;
use crate::failure::{Failure, Output, Result};

/// Long sequences besides all of one and of two operations, and how many operations each has.
const LONG: u64 = 200;
const LONG_OPS: usize = 60;

/// Sequences, and whether each operation of one is cut short.
pub struct Sequences {
    name: String,
    count: u64,
    sequence: Box<dyn Fn(u64) -> (Sequence, bool) + Sync>,
}

/// The sequences of the workload, if it is one of heaps.
pub fn sequences(args: &cli::Crash) -> Result<Option<Sequences>> {
    let name = args.workload.to_string_lossy().into_owned();
    if args.workload == Path::new("heap") {
        let (one, two, seed) = (workload::count(1), workload::count(2), args.seed);
        let of = move |n: u64| match n {
            n if n < one => (workload::sequence(1, n), false),
            n if n < one + two => (workload::sequence(2, n - one), false),
            n => (workload::random(seed << 32 ^ (n - one - two), LONG_OPS), true),
        };
        let all = one + two + LONG;
        let count = args.samples.map_or(all, |samples| samples.min(all));
        // Few are the first of all, singles before pairs.
        return Ok(Some(Sequences { name, count, sequence: Box::new(of) }));
    }
    // What cannot be read is told of by whoever reads it next.
    let Ok(text) = read_text(&args.workload) else { return Ok(None) };
    if !workload::is_text(&text) {
        return Ok(None);
    }
    let all = workload::parse(&text).map_err(|e| Failure::failed(format_args!("{name}: {e}")))?;
    let count = all.len() as u64;
    Ok(Some(Sequences { name, count, sequence: Box::new(move |n| (all[n as usize].clone(), true)) }))
}

fn places(args: &cli::Crash) -> Vec<Place> {
    let mut places = Vec::new();
    for domain in args.domain.iter().flat_map(|d| d.domains()) {
        for place in args.image.iter().flat_map(|i| Place::all(domain, i.heap_images())) {
            if !places.contains(&place) {
                places.push(place);
            }
        }
    }
    places
}

impl cli::CrashImage {
    fn heap_images(self) -> &'static [Image] {
        match self {
            cli::CrashImage::All => Image::ALL,
            cli::CrashImage::Aged => &Image::ALL[1..],
            cli::CrashImage::Fresh => &[Image::Fresh],
            cli::CrashImage::Filled => &[Image::Filled],
            cli::CrashImage::Cleaning | cli::CrashImage::Crammed | cli::CrashImage::Grown => &[],
            cli::CrashImage::Full => &[Image::Full],
            cli::CrashImage::Reused => &[Image::Reused],
            cli::CrashImage::Crashed => &[Image::Crashed],
        }
    }
}

pub fn run(args: &cli::Crash, sequences: Sequences) -> Result<()> {
    let Sequences { name, count, sequence } = sequences;
    let (cleaning, crammed) = (cli::CrashImage::Cleaning, cli::CrashImage::Crammed);
    for (image, name) in [(cleaning, "cleaning"), (crammed, "crammed"), (cli::CrashImage::Grown, "grown")] {
        if args.image.contains(&image) {
            let has = if image == cli::CrashImage::Grown { "inodes" } else { "logs" };
            return Err(Failure::usage(format!("heaps have no {has}: --image {name} is for file systems")));
        }
    }
    let part = args.part;
    if args.mutants {
        some(part, count)?;
    }
    let plan = Plan {
        places: places(args),
        count: part.count(count),
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
        return left_out(args, &plan, &bar, begun);
    }
    let report = explore(&plan, &|done, total, tally| {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(format!("{} states, {} violations", tally.states, tally.violations));
        !crate::interrupt::requested()
    });
    bar.finish_and_clear();
    let report = report.map_err(Failure::failed)?;
    let seconds = begun.elapsed().as_secs_f64();
    Output::print(|out| match args.json {
        true => {
            let broken = report.broken.iter().map(|b| violation(b, args)).collect();
            out.json(&document(&name, args, &report.tally, broken, seconds))
        }
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

fn left_out(args: &cli::Crash, plan: &Plan, bar: &ProgressBar, begun: Instant) -> Result<()> {
    // A mutant may die by a panic; that is not news.
    std::panic::set_hook(Box::new(|_| ()));
    let tried = mutants::run(plan, &|_| true, &|done, total, mutant| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        bar.set_message(mutant.map_or_else(|| SITES.to_owned(), |mutant| mutant.site.to_string()));
        !crate::interrupt::requested()
    });
    drop(std::panic::take_hook());
    bar.finish_and_clear();
    let tried = tried.map_err(Failure::failed)?.into_iter().map(Tried::from).collect();
    tell_mutants(args, tried, begun)
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

fn violation(b: &Broken, args: &cli::Crash) -> Violation {
    Violation {
        what: b.what.clone(),
        at: b.at.clone(),
        lost: b.lost.clone(),
        sequence: format!("{}\n{}", workload::HEADING, b.sequence),
        replay: replay(b, args),
    }
}

/// Both ways to use lanes are tried by each run, so that the place need not name one.
fn replay(b: &Broken, args: &cli::Crash) -> String {
    let (domain, image) = (b.place.domain, b.place.image.name());
    let cli::Crash { seed, leaves, depth, .. } = args;
    let place = format!("--domain {domain} --image {image}");
    let torn = if args.torn_pages { " --torn-pages" } else { "" };
    format!("lode crash --workload FILE {place} --seed {seed} --leaves {leaves} --depth {depth}{torn}")
}
