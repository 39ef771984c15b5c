//! Runs sequences of operations on the production code and on the oracle, lets power fail at every point of the
//! last line of each, and judges what is left.
//!
//! Earlier lines need no failures of their own: they are the last line of a shorter sequence.
//!
//! The result does not depend on the number of threads: each sequence is a run of its own on a copy of a pool
//! that was made once, with a clock that counts steps.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::fs::format::SLOTS_PER_BLOCK;
use crate::fs::{Cred, DataMode, Fs, Ino, MkfsOptions, SetAttr, SetTime};
use crate::media::Domain;
use crate::mover::engine_port::Routes;

use super::engine::Device;
use super::explore::{Bounds, Coverage, Violation, explore};
use super::judge::{self, Allowed};
use super::machine::{self, Machine};
use super::media::{Copying, CrashPoint, Keep, SimMedia};
use super::model::{Falloc, Model, Target};
use super::mutation::Mutation;
use super::tree::{self, Tree};
use super::workload::{Line, Op, Sequence};

/// The smallest pool there may be.
const POOL_BYTES: usize = crate::limits::POOL_BYTES_MIN as usize;
/// Sequences that failed and are made shorter and told of; of others only the number is.
const TOLD_MAX: usize = 20;
/// Failures of power behind an operation that take lines which were fenced.
const ADR_FAILURES: u64 = 2;
/// The time that inodes are given by which a recovered pool is used, in seconds.
const GONE_ON: i64 = 77;

/// What a pool went through before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    /// Just made.
    Fresh,
    /// A few blocks are free.
    Full,
    /// Every file and directory has a log whose next growth cleans it.
    Cleaning,
    /// Every block and every inode was used before; opened several times.
    Reused,
    /// Not closed: it is recovered at the start.
    Crashed,
    /// A few blocks are free, and the end of an inode table that has grown: so it is given back where there is no other room. Not closed.
    Grown,
    /// Removals find no room for their records. Its clock stands still: the times of such removals are not promised.
    Crammed,
}

impl Image {
    pub const ALL: &[Image] = &[
        Image::Fresh,
        Image::Full,
        Image::Cleaning,
        Image::Reused,
        Image::Crashed,
        Image::Grown,
        Image::Crammed,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Image::Fresh => "fresh",
            Image::Full => "full",
            Image::Cleaning => "cleaning",
            Image::Reused => "reused",
            Image::Crashed => "crashed",
            Image::Grown => "grown",
            Image::Crammed => "crammed",
        }
    }
}

/// Where a sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub domain: Domain,
    pub data: DataMode,
    pub image: Image,
    pub copier: Copier,
}

/// Who copies data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copier {
    #[default]
    Cpu,
    /// The processor, and a second fence costs less than a checksum: data is durable before its record.
    CpuFenced,
    /// A device, past the caches.
    PastCaches,
    /// A device, into the caches.
    IntoCaches,
    /// A device, past the caches what is aligned, and into them what is not.
    ByAlignment,
    /// A device that is late, past the caches.
    Late,
    /// The same, by alignment.
    LateByAlignment,
    /// The same as the first of these, of two regions: a write of several blocks is two batches.
    LateStriped,
    /// A device that is late, past the caches, a page at a time: the channel manager holds the rest back.
    LateInPieces,
}

impl Copier {
    pub fn name(self) -> &'static str {
        match self {
            Copier::Cpu => "cpu",
            Copier::CpuFenced => "cpu-fenced",
            Copier::PastCaches => "past-caches",
            Copier::IntoCaches => "into-caches",
            Copier::ByAlignment => "by-alignment",
            Copier::Late => "late",
            Copier::LateByAlignment => "late-by-alignment",
            Copier::LateStriped => "late-striped",
            Copier::LateInPieces => "late-in-pieces",
        }
    }

    fn copying(self) -> Copying {
        let by = |device| Copying { engine: Some(device), ..Copying::default() };
        let device = |routes, late| by(Device { routes, late, striped: false, in_pieces: false });
        let late = Device { routes: Routes::PAST_CACHES, late: true, striped: false, in_pieces: false };
        match self {
            Copier::Cpu => Copying::default(),
            Copier::CpuFenced => Copying { fenced_first: true, ..Copying::default() },
            Copier::PastCaches => device(Routes::PAST_CACHES, false),
            Copier::IntoCaches => device(Routes::INTO_CACHES, false),
            Copier::ByAlignment => device(Routes::BOTH, false),
            Copier::Late => device(Routes::PAST_CACHES, true),
            Copier::LateByAlignment => device(Routes::BOTH, true),
            Copier::LateStriped => by(Device { striped: true, ..late }),
            Copier::LateInPieces => by(Device { in_pieces: true, ..late }),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let data = match self.data {
            DataMode::Cow => "cow",
            DataMode::InPlace => "inplace",
        };
        write!(f, "--domain {} --data {data} --image {}", self.domain, self.image.name())?;
        match self.copier {
            Copier::Cpu => Ok(()),
            other => write!(f, " --engine {}", other.name()),
        }
    }
}

/// A pool to begin on.
pub struct Start {
    place: Place,
    media: CrashPoint,
    model: Model,
    step: i64,
    /// Free blocks when everything is removed.
    free_when_empty: u64,
}

/// How thoroughly.
#[derive(Clone, Debug, Default)]
pub struct Effort {
    pub bounds: Bounds,
    /// Power fails again during recovery; and processes are killed, and power fails later.
    pub twice: bool,
    /// On an ordinary file: each sector of a page is of a moment of its own.
    pub torn_pages: bool,
    /// Bits that go wrong on the media, one at a time, when all is done and the pool is closed.
    pub flips: u32,
    /// What is left out on purpose.
    pub mutation: Option<Arc<Mutation>>,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub sequences: u64,
    pub crash_points: u64,
    /// Crash points all of whose states were covered.
    pub covered_points: u64,
    pub states: u64,
    /// States that differ in what a program sees or in what is free: each was used until it was empty.
    pub distinct: u64,
    /// Crash points in recoveries, and states that they left.
    pub recovery_points: u64,
    pub recovery_states: u64,
    /// Moments at which the process was killed, and power failed later: the points and states of that count among those in
    /// recoveries.
    pub kills: u64,
    /// Pools that opened although power took lines that were fenced.
    pub adr_failed: u64,
    /// Operations that a full pool refused.
    pub refused: u64,
    pub violations: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.sequences += other.sequences;
        self.crash_points += other.crash_points;
        self.covered_points += other.covered_points;
        self.states += other.states;
        self.distinct += other.distinct;
        self.recovery_points += other.recovery_points;
        self.recovery_states += other.recovery_states;
        self.kills += other.kills;
        self.adr_failed += other.adr_failed;
        self.refused += other.refused;
        self.violations += other.violations;
    }
}

impl Tally {
    /// Visits what failures leave; a visit counts states that are new to it, and those of recoveries that it cut short.
    pub(super) fn explore(
        &mut self,
        point: &CrashPoint,
        bounds: &Bounds,
        visit: &mut dyn FnMut(SimMedia, &mut u64, &mut Coverage) -> Result<u64, String>,
    ) -> Result<(), Violation> {
        let mut twice = Coverage::default();
        let (coverage, violation) = explore(point, bounds, &mut |media| {
            let caught = catch_unwind(AssertUnwindSafe(|| visit(media, &mut self.distinct, &mut twice)));
            caught.unwrap_or_else(|panic| Err(format!("panic: {}", panic_text(&*panic))))
        });
        self.crash_points += coverage.points;
        self.covered_points += coverage.exhausted;
        self.states += coverage.states;
        self.recovery_points += twice.points;
        self.recovery_states += twice.states;
        violation.map_or(Ok(()), Err)
    }

    /// Looks at what a killed process leaves, and counts what power takes behind it.
    pub(super) fn kill(
        &mut self,
        look: impl FnOnce(&mut Coverage) -> Result<(), String>,
    ) -> Result<(), Violation> {
        let mut twice = Coverage::default();
        let caught = catch_unwind(AssertUnwindSafe(|| look(&mut twice)));
        self.kills += 1;
        self.recovery_points += twice.points;
        self.recovery_states += twice.states;
        caught.unwrap_or_else(|panic| Err(format!("panic: {}", panic_text(&*panic)))).map_err(plain)
    }
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Broken {
    pub what: String,
    /// What the failure lost; empty where it was broken without one.
    pub lost: String,
    /// The operation, and which of its fences.
    pub at: String,
    pub sequence: Sequence,
    pub place: Place,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "{} ({}), {}", self.at, self.place, self.what)?;
        if !self.lost.is_empty() {
            writeln!(f, "lost: {}", self.lost)?;
        }
        write!(f, "{}", self.sequence)
    }
}

// ---------------------------------------------------------------------------------------------------
// Pools to begin on

impl Start {
    /// Free blocks when everything is removed.
    pub(super) fn free_when_empty(&self) -> u64 {
        self.free_when_empty
    }

    pub(super) fn is_in_place(&self) -> bool {
        self.place.data == DataMode::InPlace
    }

    /// Whether nearly nothing of it is free.
    pub(super) fn is_full(&self) -> bool {
        matches!(self.place.image, Image::Full | Image::Grown)
    }

    /// Begins on a copy of it.
    pub fn machine(&self, mutation: Option<Arc<Mutation>>) -> Result<Machine, String> {
        let media = self.media.apart().media(Keep::Everything);
        media.mutate(mutation);
        media.copied(self.place.copier.copying());
        if self.place.image == Image::Crammed {
            media.cram();
        }
        Machine::new(media, self.model.clone(), self.step)
    }

    /// Makes one. Fails where the production code and the oracle disagree already.
    pub fn new(place: Place) -> Result<Start, String> {
        let began = Machine::begin();
        let options = MkfsOptions { data: place.data, identity: Some(1), ..MkfsOptions::default() };
        let empty = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], place.domain), &options)
            .map_err(|e| format!("it cannot be made: {e:?}"))?;
        let empty = empty.crash_point().media(Keep::Everything);
        if place.image == Image::Crammed {
            empty.cram();
        }
        let mut machine = Machine::new(empty, Model::new(began), 0)?;
        age(&mut machine, place.image)?;
        let tree = machine.tree()?;
        let (model, step) = (machine.model.clone(), machine.step());
        let media = match place.image {
            Image::Crashed | Image::Grown => {
                machine.fs().sync().map_err(|e| format!("{e:?}"))?;
                machine.fs().media().crash_point()
            }
            _ => judge::settled(machine.close()?),
        };
        let media = settle(&media);
        let used = machine::open(media.media(Keep::Everything))?;
        judge::remove_all(&used, &tree)?;
        let free_when_empty = used.statfs().blocks_free;
        Ok(Start { place, media, model, step, free_when_empty })
    }
}

/// The same with nothing in doubt.
fn settle(point: &CrashPoint) -> CrashPoint {
    point.media(Keep::Everything).crash_point()
}

fn path(text: &str) -> Target {
    Target::Path(text.to_owned())
}

/// Does what has to work.
fn must(machine: &mut Machine, op: Op) -> Result<(), String> {
    let done = machine.apply(&op)?;
    done.map_err(|errno| format!("{op}: errno {errno}"))
}

fn age(machine: &mut Machine, image: Image) -> Result<(), String> {
    match image {
        Image::Fresh => Ok(()),
        Image::Full => fill(machine),
        Image::Grown => grow_table(machine),
        Image::Cleaning => grow_logs(machine),
        Image::Reused => (0..3).try_for_each(|_| {
            reuse(machine)?;
            must(machine, Op::Reopen)
        }),
        Image::Crashed | Image::Crammed => {
            must(machine, Op::Mkdir("A".into()))?;
            must(machine, Op::Create("A/foo".into()))?;
            must(machine, Op::Write(path("A/foo"), 0, 9000))?;
            must(machine, Op::Rename("A/foo".into(), "bar".into(), super::model::Rename::Plain))?;
            must(machine, Op::Create("A/foo".into()))
        }
    }
}

/// Takes all blocks, then gives a few back.
fn fill(machine: &mut Machine) -> Result<(), String> {
    const LEFT: [u64; 3] = [8, 4, 2];
    let mut n = 0;
    let mut reserve = |machine: &mut Machine, blocks: u64| -> Result<bool, String> {
        let name = format!("fill{n}-{blocks}");
        n += 1;
        if machine.apply(&Op::Create(name.clone()))?.is_err() {
            return Ok(false);
        }
        let taken = machine.apply(&Op::Fallocate(path(&name), Falloc::ReserveKeepSize, 0, blocks * 4096))?;
        if taken.is_err() {
            must(machine, Op::Unlink(name))?;
        }
        Ok(taken.is_ok())
    };
    for blocks in LEFT {
        reserve(machine, blocks)?;
    }
    for blocks in (0..8).rev().map(|power| 1 << power) {
        while reserve(machine, blocks)? {}
    }
    for (n, blocks) in LEFT.into_iter().enumerate() {
        must(machine, Op::Unlink(format!("fill{n}-{blocks}")))?;
    }
    (0..3).try_for_each(|_| must(machine, Op::Sync))
}

/// Fills it, but for what a table of more inodes takes, makes those, and removes them.
fn grow_table(machine: &mut Machine) -> Result<(), String> {
    const ROOM: u64 = 40;
    const LEFT: u64 = 6;
    let slots = |machine: &Machine| {
        let stat = machine.fs().statfs();
        stat.inodes - stat.blocks_free * SLOTS_PER_BLOCK as u64
    };
    let reserve = |machine: &mut Machine, name: &str, left: u64| {
        let blocks = machine.fs().statfs().blocks_free.saturating_sub(left);
        (0..blocks).try_for_each(|n| {
            must(machine, Op::Fallocate(path(name), Falloc::ReserveKeepSize, n * 4096, 4096))
        })
    };
    let before = slots(machine);
    // With numbers in front of all that go.
    must(machine, Op::Create("fill".into()))?;
    must(machine, Op::Create("rest".into()))?;
    reserve(machine, "fill", ROOM)?;
    must(machine, Op::Mkdir("many".into()))?;
    let mut made = 0;
    while slots(machine) == before {
        must(machine, Op::Create(format!("many/{made}")))?;
        made += 1;
    }
    (0..made).try_for_each(|n| must(machine, Op::Unlink(format!("many/{n}"))))?;
    must(machine, Op::Rmdir("many".into()))?;
    (0..3).try_for_each(|_| must(machine, Op::Sync))?;
    reserve(machine, "rest", LEFT)?;
    (0..3).try_for_each(|_| must(machine, Op::Sync))?;
    match slots(machine) > before {
        true => Ok(()),
        false => Err("the inode table was given back already".to_owned()),
    }
}

/// Brings the log of each file and directory that sequences use to where the next record makes it grow and be
/// cleaned.
fn grow_logs(machine: &mut Machine) -> Result<(), String> {
    const STEPS_MAX: usize = 600;
    for dir in ["A", "A/C", "B"] {
        must(machine, Op::Mkdir(dir.into()))?;
    }
    for file in ["foo", "bar", "A/foo", "B/bar"] {
        must(machine, Op::Create(file.into()))?;
        must(machine, Op::Write(path(file), 0, 9000))?;
    }
    for name in ["foo", "bar", "A/foo", "B/bar", ".", "A", "B"] {
        let mut due = false;
        for n in 0..STEPS_MAX {
            // What the next record does is tried on a copy.
            let mut copy = Machine::new(
                machine.fs().media().crash_point().media(Keep::Everything),
                machine.model.clone(),
                machine.step(),
            )?;
            let points = record(copy.fs().media());
            let op = Op::Chmod(path(name), 0o700 | (n as u32 % 64));
            must(&mut copy, op.clone())?;
            copy.fs().media().record(None);
            due = points.lock().len() > 1;
            if due {
                break;
            }
            must(machine, op)?;
        }
        if !due {
            return Err(format!("{STEPS_MAX} records and the log of {name} was not cleaned"));
        }
    }
    Ok(())
}

/// Files and directories everywhere, then none.
fn reuse(machine: &mut Machine) -> Result<(), String> {
    let mut made = Vec::new();
    for n in 0.. {
        let dir = format!("old{n}");
        if machine.apply(&Op::Mkdir(dir.clone()))?.is_err() {
            break;
        }
        let file = format!("{dir}/file");
        made.push(dir);
        if machine.apply(&Op::Create(file.clone()))?.is_err() {
            break;
        }
        made.push(file.clone());
        if machine.apply(&Op::Write(path(&file), 0, 9000))?.is_err() {
            break;
        }
    }
    for name in made.into_iter().rev() {
        let op = if name.contains('/') { Op::Unlink(name) } else { Op::Rmdir(name) };
        must(machine, op)?;
    }
    (0..3).try_for_each(|_| must(machine, Op::Sync))
}

/// From now on crash points are kept.
pub(super) fn record(media: &SimMedia) -> Arc<Mutex<Vec<CrashPoint>>> {
    let points: Arc<Mutex<Vec<CrashPoint>>> = Arc::default();
    let kept = points.clone();
    media.record(Some(Box::new(move |point| kept.lock().push(point.clone()))));
    points
}

/// From now on the points at which something is flushed are kept.
pub(super) fn record_flushes(media: &SimMedia) -> Arc<Mutex<Vec<CrashPoint>>> {
    let points: Arc<Mutex<Vec<CrashPoint>>> = Arc::default();
    let kept = points.clone();
    media.record_flushes(Some(Box::new(move |point| kept.lock().push(point.clone()))));
    points
}

// ---------------------------------------------------------------------------------------------------
// One sequence

/// Runs a sequence and explores the failures of its last line.
pub fn sequence(start: &Start, sequence: &Sequence, effort: &Effort) -> (Tally, Option<Broken>) {
    let mut run =
        Run { start, effort, tally: Tally { sequences: 1, ..Tally::default() }, seen: HashSet::new() };
    let broken = guarded(|at| run.sequence(sequence, at)).map(|(v, at)| {
        run.tally.violations = 1;
        Broken { what: v.what, lost: v.lost, at, sequence: sequence.clone(), place: start.place }
    });
    (run.tally, broken)
}

/// What a run broke, and where it was; a panic breaks something, too.
pub(super) fn guarded(
    run: impl FnOnce(&Mutex<String>) -> Result<(), Violation>,
) -> Option<(Violation, String)> {
    let at = Mutex::new(String::from("the start"));
    let done = catch_unwind(AssertUnwindSafe(|| run(&at)));
    let broken = match done {
        Ok(done) => done.err(),
        Err(panic) => Some(plain(format!("panic: {}", panic_text(&*panic)))),
    };
    broken.map(|violation| (violation, at.into_inner()))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
}

struct Run<'a> {
    start: &'a Start,
    effort: &'a Effort,
    tally: Tally,
    /// States that were used until empty.
    seen: HashSet<u64>,
}

/// Without a failure.
pub(super) fn plain(what: String) -> Violation {
    Violation { what, lost: String::new() }
}

impl Run<'_> {
    fn sequence(&mut self, sequence: &Sequence, at: &Mutex<String>) -> Result<(), Violation> {
        let start = self.start;
        let mut machine = start.machine(self.effort.mutation.clone()).map_err(plain)?;
        if self.effort.torn_pages {
            machine.fs().media().tear_pages();
        }
        let Some((last, earlier)) = sequence.lines.split_last() else { return Ok(()) };
        let mut history = History { trees: Vec::new(), crowded: start.is_full() };
        for (n, line) in earlier.iter().enumerate() {
            self.needs(&mut machine, line, &mut history, n == 0, at)?;
            for op in line.ops.iter().flat_map(Op::steps) {
                self.quietly(&mut machine, &op, &mut history, at)?;
            }
        }
        self.needs(&mut machine, last, &mut history, earlier.is_empty(), at)?;
        for op in &last.ops {
            let steps = op.steps();
            for (n, step) in steps.iter().enumerate() {
                // Of many that are alike those count that clean a log, and the last.
                let always = n + 1 == steps.len();
                self.recorded(&mut machine, step, &mut history, always, at)?;
            }
        }
        *at.lock() = "the end, closed and opened again".to_owned();
        let before = machine.tree().map_err(plain)?;
        machine.apply(&Op::Reopen).map_err(plain)?.expect("it has no errno");
        let after = machine.tree().map_err(plain)?;
        if before.named != after.named {
            return Err(plain(after.differs(&before)));
        }
        *at.lock() = "the end, closed".to_owned();
        let closed = judge::settled(machine.close().map_err(plain)?);
        self.explore_closed(&closed, &after)?;
        if self.effort.flips > 0 {
            let closed = settle(&closed);
            // What mends a damaged pool is not what a sequence meets.
            let mutation = self.effort.mutation.as_ref().filter(|m| m.leaves_out());
            let Bounds { seed, .. } = self.effort.bounds;
            judge::flipped(&closed, &after, mutation, self.effort.flips, seed).map_err(plain)?;
        }
        Ok(())
    }

    /// Nothing of a close that was acknowledged is in doubt; so this adds nothing to what is counted.
    fn explore_closed(&self, closed: &CrashPoint, tree: &Tree) -> Result<(), Violation> {
        let (_, violation) = explore(closed, &self.effort.bounds, &mut |media| {
            let fs = machine::open(media)?;
            let found = Tree::read(&fs, [])?;
            if found.named != tree.named {
                return Err(found.differs(tree));
            }
            match fs.open_report().was_clean {
                true => Ok(found.digest()),
                false => Err("what was closed has to be recovered".to_owned()),
            }
        });
        violation.map_or(Ok(()), Err)
    }

    /// Brings about what a line needs; what the first line needs is durable.
    fn needs(
        &mut self,
        machine: &mut Machine,
        line: &Line,
        history: &mut History,
        first: bool,
        at: &Mutex<String>,
    ) -> Result<(), Violation> {
        for need in &line.needs {
            for op in need.bring_about(&machine.model) {
                self.quietly(machine, &op, history, at)?;
            }
        }
        if first {
            self.quietly(machine, &Op::Sync, history, at)?;
        }
        Ok(())
    }

    fn quietly(
        &mut self,
        machine: &mut Machine,
        op: &Op,
        history: &mut History,
        at: &Mutex<String>,
    ) -> Result<(), Violation> {
        *at.lock() = op.to_string();
        let done = machine.apply(op).map_err(plain)?;
        self.refused(op, &done, machine)?;
        history.crowded |= done == Err(libc::ENOSPC);
        let tree = machine.tree().map_err(plain)?;
        history.passed(op, done.is_ok(), tree);
        Ok(())
    }

    /// Only a full pool may refuse for want of space, and none may refuse to remove a name.
    fn refused(&mut self, op: &Op, done: &Result<(), i32>, machine: &Machine) -> Result<(), Violation> {
        if *done != Err(libc::ENOSPC) {
            return Ok(());
        }
        if matches!(op, Op::Unlink(_) | Op::Rmdir(_)) {
            return Err(plain(format!("no space for {op}")));
        }
        self.tally.refused += 1;
        let stat = machine.fs().statfs();
        if self.start.is_full() || stat.blocks_free < stat.blocks / 4 {
            return Ok(());
        }
        Err(plain(format!("no space, with {} of {} blocks free", stat.blocks_free, stat.blocks)))
    }

    fn recorded(
        &mut self,
        machine: &mut Machine,
        op: &Op,
        history: &mut History,
        always: bool,
        at: &Mutex<String>,
    ) -> Result<(), Violation> {
        *at.lock() = op.to_string();
        let before = history.trees.last().cloned().expect("what the first line needs was synced");
        let target = overwritten(machine, op);
        let points = record(machine.fs().media());
        let flushes = self.effort.twice.then(|| record_flushes(machine.fs().media()));
        let done = machine.apply(op).map_err(plain);
        let last = machine.fs().media().crash_point();
        machine.fs().media().record(None);
        machine.fs().media().record_flushes(None);
        let done = done?;
        self.refused(op, &done, machine)?;
        history.crowded |= done == Err(libc::ENOSPC);
        let after = history.push(machine.tree().map_err(plain)?);
        let points = std::mem::take(&mut *points.lock());
        let flushes = flushes.map(|flushes| std::mem::take(&mut *flushes.lock()));
        let deferring = self.start.place.domain == Domain::PageCache;
        if always || points.len() > 1 {
            let during = match deferring {
                true => history.allowed(true),
                false => Allowed::OneOf { trees: vec![before, after], torn: self.torn(target.clone()) },
            };
            for (n, point) in points.iter().enumerate() {
                *at.lock() = format!("{op}, fence {} of {}", n + 1, points.len());
                self.explore(point, &during, true)?;
            }
            if let Some(flushes) = &flushes {
                let left = Left { history, interrupted: true, torn: self.torn(target) };
                for (which, points) in [("fence", &points), ("flush", flushes)] {
                    for (n, point) in points.iter().enumerate() {
                        *at.lock() = format!("{op}, killed at {which} {} of {}", n + 1, points.len());
                        self.killed(point, &left)?;
                    }
                }
            }
        }
        history.settled(op, done.is_ok());
        if always {
            *at.lock() = format!("{op}, done");
            self.explore(&last, &history.allowed(deferring), false)?;
            if self.start.place.domain == Domain::Memory {
                *at.lock() = format!("{op}, done, and power takes what was fenced, too");
                self.adr_failed(&last);
            }
            if self.effort.twice {
                *at.lock() = format!("{op}, killed when it was done");
                self.killed(&last, &Left { history, interrupted: false, torn: None })?;
            }
        }
        Ok(())
    }

    /// Power fails and what was promised of it does not hold: lines that were fenced are as they were before. Nothing is asked
    /// then but that whoever opens the pool, reads it and checks it lives.
    fn adr_failed(&mut self, point: &CrashPoint) {
        for seed in 0..ADR_FAILURES {
            if let Ok(fs) = machine::open(point.media(Keep::FailedAdr(seed))) {
                let _ = (Tree::read(&fs, []), judge::checked(&fs), fs.close());
                self.tally.adr_failed += 1;
            }
        }
    }

    /// The process is killed, the next one recovers the pool and changes it, and power fails.
    fn killed(&mut self, point: &CrashPoint, left: &Left) -> Result<(), Violation> {
        let deferring = self.start.place.domain == Domain::PageCache;
        let bounds = Bounds { leaves_max: 8, lane_states: 1, ..self.effort.bounds.clone() };
        self.tally.kill(|twice| killed(point, left, deferring, &bounds, twice))
    }

    fn torn(&self, target: Option<(u32, std::ops::Range<u64>)>) -> Option<(u32, std::ops::Range<u64>)> {
        target.filter(|_| self.start.place.data == DataMode::InPlace)
    }

    /// `interrupted`: the last tree is not acknowledged yet.
    fn explore(&mut self, point: &CrashPoint, allowed: &Allowed, interrupted: bool) -> Result<(), Violation> {
        let Run { start, effort, tally, seen } = self;
        if let Allowed::SinceSync { trees, .. } = allowed {
            nothing_lost(point, last_of(trees, interrupted))
                .map_err(|what| Violation { what, lost: "nothing was lost".to_owned() })?;
        }
        tally.explore(point, &effort.bounds, &mut |media, distinct, twice| {
            visit(media, allowed, start, effort, seen, distinct, twice)
        })
    }
}

/// What counts only where it verifies does verify where nothing was lost: the state is that before the interrupted operation, or
/// that after it, as it is after a process was killed. `trees`: these two, or the one that was acknowledged.
fn nothing_lost(point: &CrashPoint, trees: &[Arc<Tree>]) -> Result<(), String> {
    let found = Tree::read(&*machine::open(point.media(Keep::Everything))?, [])?;
    is_one_of(&found, trees).map_err(|what| format!("what is there does not count: {what}"))
}

/// The last tree, or in the middle of an operation the last two.
fn last_of(trees: &[Arc<Tree>], interrupted: bool) -> &[Arc<Tree>] {
    &trees[trees.len().saturating_sub(1 + interrupted as usize)..]
}

/// Whether it is one of these, times included.
fn is_one_of(found: &Tree, trees: &[Arc<Tree>]) -> Result<(), String> {
    match trees.iter().any(|tree| tree.named == found.named) {
        true => Ok(()),
        false => Err(found.differs(&trees[trees.len() - 1])),
    }
}

/// What a process that is killed leaves to be found.
struct Left<'a> {
    history: &'a History,
    /// In the middle of an operation: the last tree but one may be found, too.
    interrupted: bool,
    torn: Option<(u32, std::ops::Range<u64>)>,
}

/// See [`Run::killed`].
fn killed(
    point: &CrashPoint,
    left: &Left,
    deferring: bool,
    bounds: &Bounds,
    twice: &mut Coverage,
) -> Result<(), String> {
    let last = last_of(&left.history.trees, left.interrupted);
    let one_of_last = Allowed::OneOf { trees: last.to_vec(), torn: left.torn.clone() };
    let media = point.killed();
    let points = record(&media);
    let fs = machine::open_after(media, false)?;
    fs.media().record(None);
    let points = std::mem::take(&mut *points.lock());
    let found = Tree::read(&fs, [])?;
    match deferring {
        true => is_one_of(&found, last)?,
        false => _ = one_of_last.judge(&found)?,
    }
    judge::checked(&fs)?;
    // Nobody was told what a recovery found that is cut short.
    let during = if deferring { left.history.allowed(true) } else { one_of_last };
    let before = if deferring { left.history.trees.clone() } else { Vec::new() };
    let mut history = History { trees: before, crowded: left.history.crowded };
    history.push(found);
    again(&points, bounds, twice, |media| during.judge(&Tree::read(&*machine::open(media)?, [])?).map(drop))?;
    stays(&fs.media().crash_point(), history.allowed(deferring), bounds, twice)
        .map_err(|what| format!("power failed after a recovery: {what}"))?;
    change_all(&fs, &mut history)?;
    stays(&fs.media().crash_point(), history.allowed(deferring), bounds, twice)
        .map_err(|what| format!("power failed after inodes were changed: {what}"))
}

/// Opens what a failure left, and judges it. The hash says what was seen.
fn visit(
    media: SimMedia,
    allowed: &Allowed,
    start: &Start,
    effort: &Effort,
    seen: &mut HashSet<u64>,
    distinct: &mut u64,
    twice: &mut Coverage,
) -> Result<u64, String> {
    let fs = machine::open(media)?;
    let torn = fs.media().is_torn();
    let found = Tree::read(&fs, [])?;
    let which = allowed.judge(&found)?;
    judge::independent(&fs)?;
    judge::checked(&fs)?;
    let (report, stat) = (fs.open_report(), fs.statfs());
    let counts = (report.voided, report.orphans, report.settled);
    // What is torn is nowhere in the tree, and whoever goes on meets it.
    let state = (which, counts, stat.blocks_free, stat.inodes_free, torn);
    let mut hasher = rapidhash::fast::RapidHasher::default();
    state.hash(&mut hasher);
    let hash = hasher.finish();
    if !seen.insert(hash) {
        return Ok(hash);
    }
    *distinct += 1;
    let left = effort.twice.then(|| (fs.media().as_found(), fs.media().as_left()));
    judge::use_up(&judge::settled(fs), &found, start.free_when_empty)?;
    let Some((left, with_the_rest)) = left else { return Ok(hash) };
    let bounds = Bounds { leaves_max: 8, lane_states: 1, ..effort.bounds.clone() };
    let crowded = matches!(allowed, Allowed::SinceSync { crowded: true, .. });
    let history = History { trees: Vec::new(), crowded };
    go_on(with_the_rest, &found, history, start.place.domain == Domain::PageCache, &bounds, twice)?;
    let points = record(&left);
    machine::open(left)?.media().record(None);
    let points = std::mem::take(&mut *points.lock());
    again(&points, &bounds, twice, |media| {
        let again = Tree::read(&*machine::open(media)?, [])?;
        if again.named == found.named { Ok(()) } else { Err(again.differs(&found)) }
    })?;
    Ok(hash)
}

/// Every inode is changed after a recovery, and power fails again: of what the first failure took nothing comes back.
fn go_on(
    media: SimMedia,
    found: &Tree,
    mut history: History,
    deferring: bool,
    bounds: &Bounds,
    twice: &mut Coverage,
) -> Result<(), String> {
    let fs = machine::open(media)?;
    let again = history.push(Tree::read(&fs, [])?);
    if again.named != found.named {
        return Err(format!("a recovery depends on what it does not look at: {}", again.differs(found)));
    }
    change_all(&fs, &mut history)?;
    stays(&fs.media().crash_point(), history.allowed(deferring), bounds, twice)
        .map_err(|what| format!("power failed again after inodes were changed: {what}"))
}

/// Gives every inode that has a name a time.
fn change_all(fs: &Arc<Fs<SimMedia>>, history: &mut History) -> Result<(), String> {
    let inodes: Vec<u32> = history.trees[history.trees.len() - 1].named.keys().copied().collect();
    for ino in inodes {
        let set = SetAttr { mtime: Some(SetTime::To(tree::time(GONE_ON))), ..SetAttr::default() };
        match fs.setattr(&Cred::root(), Ino(ino), &set) {
            Ok(_) => _ = history.push(Tree::read(fs, [])?),
            Err(e) if e.errno() == libc::ENOSPC => {}
            Err(e) => return Err(format!("inode {ino} cannot be changed: {e:?}")),
        }
    }
    Ok(())
}

/// What a failure at this point leaves is allowed.
fn stays(point: &CrashPoint, allowed: Allowed, bounds: &Bounds, twice: &mut Coverage) -> Result<(), String> {
    let (coverage, violation) =
        explore(point, bounds, &mut |media| allowed.judge(&Tree::read(&*machine::open(media)?, [])?));
    twice.points += coverage.points;
    twice.states += coverage.states;
    violation.map_or(Ok(()), |v| Err(format!("{} ({})", v.what, v.lost)))
}

/// Power failed again, at these fences of a recovery: the next one finds the same.
pub(super) fn again(
    points: &[CrashPoint],
    bounds: &Bounds,
    twice: &mut Coverage,
    same: impl Fn(SimMedia) -> Result<(), String>,
) -> Result<(), String> {
    for (n, point) in points.iter().enumerate() {
        let (coverage, violation) = explore(point, bounds, &mut |media| same(media).map(|()| 0));
        twice.points += coverage.points;
        twice.states += coverage.states;
        if let Some(v) = violation {
            return Err(format!(
                "recovery was cut short at its fence {} ({}), and the next one finds something else: {}",
                n + 1,
                v.lost,
                v.what
            ));
        }
    }
    Ok(())
}

/// Trees since the last sync; on persistent memory the last of them.
struct History {
    trees: Vec<Arc<Tree>>,
    /// The pool is, or was, too full for something.
    crowded: bool,
}

impl History {
    fn passed(&mut self, op: &Op, done: bool, tree: Tree) {
        self.push(tree);
        self.settled(op, done);
    }

    /// The newest one.
    fn push(&mut self, mut tree: Tree) -> Arc<Tree> {
        if let Some(before) = self.trees.last() {
            tree.share(before);
        }
        self.trees.push(Arc::new(tree));
        self.trees[self.trees.len() - 1].clone()
    }

    /// What a failure now may leave.
    fn allowed(&self, deferring: bool) -> Allowed {
        match deferring {
            true => Allowed::SinceSync { trees: self.trees.clone(), crowded: self.crowded },
            false => Allowed::OneOf { trees: self.trees.last().cloned().into_iter().collect(), torn: None },
        }
    }

    fn settled(&mut self, op: &Op, done: bool) {
        if done && matches!(op, Op::Sync | Op::Fsync(_) | Op::Tick | Op::Reopen | Op::Crash | Op::Kill) {
            self.trees.drain(..self.trees.len() - 1);
        }
    }
}

/// What an overwrite in place may tear: the inode and the bytes that were there before.
pub(super) fn overwritten(machine: &Machine, op: &Op) -> Option<(u32, std::ops::Range<u64>)> {
    let (Op::Write(target, at, len) | Op::WriteBack(target, at, len)) = op else { return None };
    let (ino, size) = machine.file(target)?;
    let end = at + *len as u64;
    (end <= size || matches!(op, Op::WriteBack(..))).then(|| (ino, *at..end.min(size)))
}

// ---------------------------------------------------------------------------------------------------
// Many sequences

/// What is done.
pub struct Plan {
    pub places: Vec<Place>,
    /// How many sequences there are, and the `n`th of them.
    pub count: u64,
    pub sequence: Box<dyn Fn(u64) -> Sequence + Sync>,
    pub effort: Effort,
    pub threads: usize,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Report<B = Broken> {
    pub tally: Tally,
    /// The first ones, each with as few lines as show it.
    pub broken: Vec<B>,
    /// It was told to stop.
    pub stopped: bool,
}

/// Runs all of it. `progress` is called now and then with how many sequences are done, of how many, and answers
/// whether to go on.
pub fn run(plan: &Plan, progress: &(dyn Fn(u64, u64, &Tally) -> bool + Sync)) -> Result<Report, String> {
    let starts: Vec<Start> = plan.places.iter().map(|p| Start::new(*p)).collect::<Result<_, _>>()?;
    let one = |n: u64, start: usize| sequence(&starts[start], &(plan.sequence)(n), &plan.effort);
    let mut report = on_all(plan.count, starts.len(), plan.threads, &one, progress);
    // Who stops waits for nothing more.
    for broken in report.broken.iter_mut().filter(|_| !report.stopped) {
        let start = starts.iter().find(|s| s.place == broken.place).expect("it ran on one of them");
        shorten(broken, |b| fewer(&b.sequence).into_iter().find_map(|s| sequence(start, &s, &plan.effort).1));
    }
    Ok(report)
}

/// The same work on so many threads, of which the caller's is one.
pub(super) fn on_threads(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|s| {
        (1..threads.max(1)).for_each(|_| drop(s.spawn(&work)));
        work();
    });
}

/// Runs so many sequences on so many starts, each by `one`.
pub(super) fn on_all<B: Send>(
    count: u64,
    starts: usize,
    threads: usize,
    one: &(dyn Fn(u64, usize) -> (Tally, Option<B>) + Sync),
    progress: &(dyn Fn(u64, u64, &Tally) -> bool + Sync),
) -> Report<B> {
    let total = count as usize * starts;
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let result = Mutex::new((Tally::default(), BTreeMap::<usize, B>::new()));
    on_threads(threads, || {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= total || stopped.load(Ordering::Relaxed) {
                return;
            }
            let (tally, broken) = one((job / starts) as u64, job % starts);
            let mut result = result.lock();
            result.0 += tally;
            result.1.extend(broken.map(|b| (job, b)));
            while result.1.len() > TOLD_MAX {
                result.1.pop_last();
            }
            if !progress(result.0.sequences, total as u64, &result.0) {
                stopped.store(true, Ordering::Relaxed);
            }
        }
    });
    let (tally, broken) = result.into_inner();
    Report { tally, broken: broken.into_values().collect(), stopped: stopped.into_inner() }
}

/// Replaced by one with less as long as there is one.
pub(super) fn shorten<B>(broken: &mut B, less: impl Fn(&B) -> Option<B>) {
    while let Some(shorter) = less(broken) {
        *broken = shorter;
    }
}

/// A sequence with one thing less, in every way.
fn fewer(sequence: &Sequence) -> Vec<Sequence> {
    let mut all = Vec::new();
    for (n, line) in sequence.lines.iter().enumerate() {
        if sequence.lines.len() > 1 {
            let mut less = sequence.clone();
            less.lines.remove(n);
            all.push(less);
        }
        for op in 0..line.ops.len() {
            let mut less = sequence.clone();
            less.lines[n].ops.remove(op);
            if !less.lines[n].ops.is_empty() {
                all.push(less);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool on an ordinary file, and an operation on it: what there is before and after, and before and behind its fences.
    fn interrupted() -> ([Arc<Tree>; 2], [CrashPoint; 2]) {
        let place = Place {
            domain: Domain::PageCache,
            data: DataMode::Cow,
            image: Image::Fresh,
            copier: Copier::Cpu,
        };
        let mut machine = Start::new(place).unwrap().machine(None).unwrap();
        let look =
            |machine: &Machine| (Arc::new(machine.tree().unwrap()), machine.fs().media().crash_point());
        let (before, begins) = look(&machine);
        must(&mut machine, Op::Create("foo".to_owned())).unwrap();
        let (after, done) = look(&machine);
        ([before, after], [begins, done])
    }

    #[test]
    fn what_was_acknowledged_and_not_lost_is_there() {
        let (trees, [begins, done]) = interrupted();
        nothing_lost(&begins, last_of(&trees, true)).unwrap();
        nothing_lost(&done, last_of(&trees, true)).unwrap();
        nothing_lost(&done, last_of(&trees, false)).unwrap();
        let refused = nothing_lost(&begins, last_of(&trees, false)).unwrap_err();
        assert!(refused.contains("foo (inode"), "{refused}");
    }

    /// A torn record leads to the same tree as none, and is another state to go on from.
    #[test]
    fn what_is_torn_is_told_from_what_is_not_there() {
        let (_, [_, done]) = interrupted();
        let mut seen = HashSet::new();
        let (coverage, _) = explore(&done, &Bounds::default(), &mut |media| {
            let fs = machine::open(media)?;
            let torn = fs.media().is_torn();
            seen.insert((Tree::read(&fs, [])?.paths(), torn));
            Ok(0)
        });
        let has = |torn: bool| seen.iter().any(|(paths, is_torn)| paths.is_empty() && *is_torn == torn);
        assert!(has(false) && has(true), "{seen:?} {coverage:?}");
    }

    #[test]
    fn who_stops_is_heard_while_sites_are_noted() {
        let plan = Plan {
            places: vec![],
            count: 0,
            sequence: Box::new(|_| unreachable!("there are none")),
            effort: Effort::default(),
            threads: 2,
        };
        assert_eq!(crate::sim::mutation::run(&plan, &|_| true, &|_, _, _| true).unwrap().len(), 0);
        let place =
            Place { domain: Domain::Memory, data: DataMode::Cow, image: Image::Fresh, copier: Copier::Cpu };
        let asked = AtomicUsize::new(0);
        let plan = Plan {
            places: vec![place],
            count: 100,
            sequence: Box::new(|_| Sequence { lines: vec!["| create foo".parse().unwrap()] }),
            ..plan
        };
        let tried = crate::sim::mutation::run(&plan, &|_| true, &|_, total, mutant| {
            assert!(total == 100 && mutant.is_none());
            asked.fetch_add(1, Ordering::Relaxed);
            false
        });
        assert_eq!(tried.unwrap().len(), 0);
        assert!(asked.into_inner() <= plan.threads);
    }
}
