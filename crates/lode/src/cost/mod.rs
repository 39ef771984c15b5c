//! `lode cost`: what a command costs the whole machine in CPU time and energy for each GiB that it moves.
//!
//! The measure is that of efficient-pm, section 3: time on *all* processors, not that of the command's own
//! processes, because file systems work in kernel threads and servers too. What else runs is measured first and
//! subtracted; what the command's own processes used stands beside it, so that the difference can be seen.
//!
//! Files: `load` time of all processors and the idle load, `child` runs the command, `bytes` how much it moved,
//! `energy` joules, `report` runs and their mean, `table` and `plot` what people see.

pub mod load;

mod bytes;
mod child;
mod energy;
mod plot;
mod report;
mod table;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result, complain};
use crate::interrupt;
use crate::machine::Machine;
use crate::outfile;
use crate::target::show;

use bytes::{BlockDevice, Counted, Counters, MountedPool, Printed};
use child::{Child, Stdout};
use energy::Source;
use load::{CpuTimes, Processes};
use report::{Idle, Report, Run, Spent, Where};

/// Share of all processors that may be busy before a measure before somebody is told. efficient-pm wants it "low"
/// and gives no number.
const IDLE_BUSY_MAX: f64 = 0.05;
/// How long a signal may go unnoticed while nothing runs.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// What the command line says.
pub struct CostOptions {
    pub command: Vec<OsString>,
    pub runs: u32,
    /// How long the idle load is watched; zero means that nothing is known of it, nor subtracted.
    pub idle: Duration,
    /// Bytes that each run moves, where the caller knows.
    pub bytes: Option<u64>,
    /// A mounted pool whose server counts.
    pub pool: Option<OsString>,
    /// A block device whose sectors count.
    pub block: Option<PathBuf>,
    /// A shell command that prints joules so far.
    pub meter: Option<OsString>,
    /// Standard output is kept for the JSON document.
    pub json: bool,
    /// Write a picture here.
    pub svg: Option<PathBuf>,
}

/// Measures; the answer is the text for stdout. Everything that the command itself prints has been handed on by then.
pub fn run(options: &CostOptions) -> Result<String> {
    interrupt::catch();
    let root = Path::new("/");
    let counters = match (&options.pool, &options.block) {
        (Some(pool), _) => Some(Counters::Pool(MountedPool::find(pool)?)),
        (None, Some(device)) => Some(Counters::Block(BlockDevice::open(root, device)?)),
        (None, None) => None,
    };
    let (energy, energy_note) = match Source::find(root, options.meter.as_deref()) {
        Ok(source) => (Some(source), None),
        Err(why) => (None, Some(why)),
    };
    let machine = here(root);
    let idle = watch_idle(options.idle, machine.cpus, energy.as_ref())?;
    let mut report = Report::new(options, machine, idle);
    report.energy_from = energy.as_ref().map(Source::name);
    report.energy_note = energy_note;
    for number in 1..=options.runs {
        report.runs.push(measure(options, number, counters.as_ref(), energy.as_ref(), report.idle.as_ref())?);
    }
    report.finish();
    deliver(&report, options)
}

fn here(root: &Path) -> Where {
    let machine = Machine::probe(root);
    Where { cpu: machine.cpu, cpus: machine.cpus.max(1), kernel: machine.kernel }
}

/// What the machine does while nothing is asked of it: the noise of every run.
fn watch_idle(time: Duration, cpus: usize, energy: Option<&Source>) -> Result<Option<Idle>> {
    if time.is_zero() {
        return Ok(None);
    }
    let joules_before = energy.map(Source::read).transpose()?;
    let processes = Processes::now();
    let (before, begun) = (CpuTimes::now()?, Instant::now());
    while begun.elapsed() < time {
        check_interrupt()?;
        std::thread::sleep(ASK_EVERY.min(time.saturating_sub(begun.elapsed())));
    }
    let (times, seconds) = (CpuTimes::now()?.since(&before), begun.elapsed().as_secs_f64());
    let spent = Spent { times, processes_s: Processes::now().since(&processes) };
    let joules = energy.zip(joules_before).map(|(source, before)| source.since(&before)).transpose()?;
    let idle = Idle::of(&spent, seconds, cpus, joules);
    if !idle.quiet {
        complain(format_args!(
            "warning: {}; results will vary, and so will what is subtracted",
            idle.loudness()
        ));
    }
    Ok(Some(idle))
}

/// One run of the command between two readings of everything.
fn measure(
    options: &CostOptions,
    number: u32,
    counters: Option<&Counters>,
    energy: Option<&Source>,
    idle: Option<&Idle>,
) -> Result<Run> {
    check_interrupt()?;
    // Nobody looks into what the command prints where the bytes are known.
    let stdout = match (options.bytes.is_none(), options.json) {
        (true, _) => Stdout::Kept,
        (false, true) => Stdout::Stderr,
        (false, false) => Stdout::Inherited,
    };
    let joules_before = energy.map(Source::read).transpose()?;
    let counted_before = counters.map(Counters::read).transpose()?;
    let processes = Processes::now();
    let (before, begun) = (CpuTimes::now()?, Instant::now());
    let ended = Child::start(&options.command, stdout)?.wait()?;
    let (wall_s, times) = (begun.elapsed().as_secs_f64(), CpuTimes::now()?.since(&before));
    let spent = Spent { times, processes_s: Processes::now().since(&processes) + ended.cpu_s };
    let counted_after = counters.map(Counters::read).transpose()?;
    let joules = energy.zip(joules_before).map(|(source, before)| source.since(&before)).transpose()?;
    // Of a command that failed its report says why.
    let printed = match ended.status.success() {
        true => Printed::of(&ended.output),
        false => Printed::whole(&ended.output),
    };
    printed.hand_on(options.json)?;
    check_interrupt()?;
    if !ended.status.success() {
        let program = Path::new(&options.command[0]);
        return Err(Failure::failed(format_args!(
            "run {number} of {}: {} ended with {}; a command that fails is not measured",
            options.runs,
            show(program),
            ended.status
        )));
    }
    let moved = match options.bytes {
        Some(bytes) => Some(Counted { bytes, from: "option" }),
        None => match (printed.moved()?, counters.zip(counted_before.zip(counted_after))) {
            (None, Some((counters, (before, after)))) => Some(counters.moved(before, after)?),
            (moved, _) => moved,
        },
    };
    Ok(Run::of(&spent, wall_s, ended.cpu_s, idle, moved, joules))
}

fn check_interrupt() -> Result<()> {
    match interrupt::requested() {
        true => Err(Failure::failed("interrupted; nothing is reported of a measure that did not end")),
        false => Ok(()),
    }
}

fn deliver(report: &Report, options: &CostOptions) -> Result<String> {
    outfile::with_picture(answer(report, options)?, options.svg.as_deref(), || Ok(plot::render(report)))
}

fn answer(report: &Report, options: &CostOptions) -> Result<String> {
    if !options.json {
        return Ok(table::render(report));
    }
    let mut text = serde_json::to_string_pretty(report).map_err(Failure::failed)?;
    text.push('\n');
    Ok(text)
}
