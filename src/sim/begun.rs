//! Writes that a device copies while other operations begin and end: all or nothing of each, whenever power fails, and
//! nothing of the others is lost with them.
//!
//! A history begins one or two writes, does something to the same files or their names, and ends the writes in one order
//! or the other. What is left of it at each fence must be what some serial order gives, of what was acknowledged and
//! some of what was not. For persistent memory: on an ordinary file what is not synced is promised to nobody.

use std::sync::Arc;

use parking_lot::Mutex;

use super::explore::{Bounds, Coverage, explore};
use super::history::{Call, History};
use super::judge;
use super::machine::{self, Machine};
use super::media::CrashPoint;
use super::mutation::Mutation;
use super::run::Start;
use super::tree::Tree;

/// What is there first.
const BEFORE: &[&str] = &[
    "mkdir A",
    "create foo",
    "write foo 0 45000",
    "create A/bar",
    "setxattr foo user.a 20",
    "open 0 foo",
    "chmod foo 644",
    "sync",
];

/// Writes that are begun: over what there is, over holes, across the end of file and behind it.
const WRITES: &[&str] = &[
    "write foo 0 8192",
    "write foo 5000 13000",
    "write foo 16384 8192",
    "write foo 40960 12288",
    "write foo 45000 9000",
    "write foo 61440 8192",
    "write A/bar 0 8192",
];

/// What happens meanwhile.
const OPS: &[&str] = &[
    "write foo 0 100",
    "write foo 4000 300",
    "write foo 20480 4096",
    "write foo 30000 5000",
    "write foo 44000 3000",
    "append foo 100",
    "append foo 9000",
    "write A/bar 0 100",
    "append A/bar 5000",
    "truncate foo 0",
    "truncate foo 6000",
    "truncate foo 43000",
    "truncate foo 70000",
    "fallocate foo punch 4096 8192",
    "fallocate foo zero 100 20000",
    "fallocate foo reserve 40000 30000",
    "chmod foo 600",
    "chown foo 5 6",
    "setxattr foo user.a 30",
    "setxattr foo user.b 5000",
    "removexattr foo user.a",
    "utimens foo 77",
    "unlink foo",
    "rename foo A/foo",
    "rename A/bar foo",
    "link foo bar",
    "unlink A/bar",
    "fsync foo",
    "sync",
    "tick",
    "create B",
];

/// One history: writes by their places in [`WRITES`], what happens meanwhile, and whether they end in turn.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    first: usize,
    second: Option<usize>,
    ops: [usize; 2],
    in_turn: bool,
}

/// All of them.
pub fn plots() -> impl Iterator<Item = Plot> {
    let seconds = || std::iter::once(None).chain((0..WRITES.len()).map(Some));
    let writes = (0..WRITES.len()).flat_map(move |first| seconds().map(move |second| (first, second)));
    writes.enumerate().flat_map(|(n, (first, second))| {
        (0..OPS.len()).map(move |op| {
            // Each with another one behind it.
            let ops = [op, (op * 7 + n * 3 + 1) % OPS.len()];
            Plot { first, second, ops, in_turn: (n + op).is_multiple_of(2) }
        })
    })
}

/// A history as it goes on.
struct Stage {
    machine: Machine,
    history: Arc<Mutex<History>>,
    points: Arc<Mutex<Vec<(CrashPoint, History)>>>,
}

impl Stage {
    fn begin(&self, n: usize) -> (super::workload::Op, u64) {
        let mut history = self.history.lock();
        let event = history.event();
        history.calls[n].begun = Some(event);
        (history.calls[n].op.clone(), history.calls[n].tag)
    }

    fn end(&self, n: usize, outcome: super::model::Outcome) {
        let mut history = self.history.lock();
        let event = history.event();
        history.calls[n].ended = Some((event, outcome));
    }

    /// Begins the first `writes` calls, makes the others, and ends the writes.
    fn play(&mut self, writes: usize, in_turn: bool) {
        let count = self.history.lock().calls.len();
        let mut tickets = Vec::new();
        for n in 0..writes {
            let (op, tag) = self.begin(n);
            match self.machine.begin_write(&op, tag) {
                Ok(ticket) => tickets.push((n, ticket)),
                Err(e) => self.end(n, Err(e.errno())),
            }
        }
        for n in writes..count {
            let (op, tag) = self.begin(n);
            let outcome = self.machine.attempt(&op, tag);
            self.end(n, outcome);
        }
        if !in_turn {
            tickets.reverse();
        }
        for (n, ticket) in tickets {
            let outcome = ticket.wait().map(drop).map_err(|e| e.errno());
            self.end(n, outcome);
        }
    }
}

/// Plays one on a pool, and looks at what failures leave of it.
pub fn play(
    start: &Start,
    plot: Plot,
    bounds: &Bounds,
    mutation: Option<Arc<Mutation>>,
) -> Result<Coverage, String> {
    let mut machine = start.machine(mutation)?;
    for op in BEFORE {
        let done = machine.apply(&op.parse().expect("an operation"))?;
        done.map_err(|errno| format!("{op}: errno {errno}"))?;
    }
    let begun = [Some(plot.first), plot.second].into_iter().flatten().map(|n| WRITES[n]);
    let texts: Vec<&str> = begun.chain(plot.ops.map(|n| OPS[n])).collect();
    let writes = texts.len() - plot.ops.len();
    let call = |(n, text): (usize, &&str)| {
        let op = text.parse().expect("an operation");
        Call { thread: n, op, tag: 1000 + n as u64, begun: None, ended: None }
    };
    let history = Arc::new(Mutex::new(History::new(texts.iter().enumerate().map(call).collect())));
    let points: Arc<Mutex<Vec<(CrashPoint, History)>>> = Arc::default();
    let (kept, seen) = (points.clone(), history.clone());
    let recorder = move |point: &CrashPoint| kept.lock().push((point.clone(), seen.lock().clone()));
    machine.fs().media().record(Some(Box::new(recorder)));
    let mut stage = Stage { machine, history, points };
    stage.play(writes, plot.in_turn);
    let Stage { machine, history, points } = stage;
    machine.fs().media().record(None);
    let at_end = history.lock().clone();
    let found = Tree::read(machine.fs(), [])?;
    at_end.serial(&machine.model, &found).map_err(|what| format!("{plot:?}: {what}\n{at_end}"))?;
    let mut points = std::mem::take(&mut *points.lock());
    points.push((judge::settled(machine.fs().clone()), at_end));
    let mut total = Coverage::default();
    for (point, history) in points {
        let visit = |media| {
            let fs = machine::open(media)?;
            let found = Tree::read(&fs, [])?;
            history.serial(&machine.model, &found)?;
            judge::independent(&fs)?;
            judge::checked(&fs)?;
            judge::use_up(&fs.media().crash_point(), &found, start.free_when_empty())?;
            Ok(found.digest())
        };
        let (coverage, violation) = explore(&point, bounds, &mut |media| visit(media));
        total += coverage;
        if let Some(v) = violation {
            return Err(format!("{plot:?}: {}\nlost: {}\n{history}", v.what, v.lost));
        }
    }
    Ok(total)
}
