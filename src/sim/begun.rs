//! Writes and reads that a device copies while other operations begin and end: all or nothing of each write, whenever power
//! fails, nothing of the others is lost with them, and a read has what there was when it began.
//!
//! A history begins a read or none, and one to three writes, by two channels; does something to the same files or their
//! names, and ends the writes in one order or another, and the read last, when all that it reads may have been replaced, cut off
//! or removed. What is left of it at each fence must be what some serial order gives, of what was acknowledged and
//! some of what was not. For persistent memory: on an ordinary file what is not synced is promised to nobody.
//!
//! Where the device copies in pieces some are held back behind the record, while a write of class latency is under way or the
//! regulator has it so; who waits lets them in, and who asks between the other operations.

use std::sync::Arc;

use parking_lot::Mutex;

use super::explore::{Bounds, Coverage, explore};
use super::history::{Call, History};
use super::judge;
use super::machine::{self, Machine};
use super::media::{CrashPoint, SimMedia};
use super::model::Target;
use super::mutation::Mutation;
use super::run::Start;
use super::tree::Tree;
use super::workload::Op;
use crate::fs::{ReadTicket, WriteTicket};
use crate::mover::class::Class;

/// What is there first.
const BEFORE: &[&str] = &[
    "mkdir A",
    "mkdir D",
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

/// Reads that are begun before anything else.
const READS: &[(&str, u64, usize)] =
    &[("foo", 0, 8192), ("foo", 5000, 13000), ("foo", 36864, 8136), ("A/bar", 0, 6000), ("foo", 0, 45000)];

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
    "rename A/bar D/bar",
    "rmdir A",
];

/// What is moved out of a directory that goes, and what may take its number.
const GOES: [&str; 3] = ["rename A/bar D/bar", "rmdir A", "create B"];

/// One history, by places in [`READS`], [`WRITES`] and [`OPS`].
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    read: Option<usize>,
    writes: [Option<usize>; 3],
    ops: [Option<usize>; 3],
    ends: Ends,
    /// Of a device that copies in pieces: the second write is of class latency.
    mixed: bool,
    /// Likewise: after each operation somebody asks for the writes.
    asks: bool,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Played {
    pub coverage: Coverage,
    /// Crash points at which pieces were held back of a write whose record was committed, but for those while it is waited
    /// for.
    pub held_back: u64,
}

impl std::ops::AddAssign for Played {
    fn add_assign(&mut self, other: Played) {
        self.coverage += other.coverage;
        self.held_back += other.held_back;
    }
}

/// In which order writes end.
#[derive(Clone, Copy, Debug)]
enum Ends {
    InTurn,
    Reversed,
    /// The second first, then as they began.
    FromTheMiddle,
}

/// All of them.
pub fn plots() -> impl Iterator<Item = Plot> {
    let going = (0..WRITES.len()).map(|write| Plot {
        read: None,
        writes: [Some(write), None, None],
        ops: GOES.map(|op| OPS.iter().position(|o| *o == op)),
        ends: Ends::InTurn,
        mixed: false,
        asks: false,
    });
    let seconds = || std::iter::once(None).chain((0..WRITES.len()).map(Some));
    let writes = (0..WRITES.len()).flat_map(move |first| seconds().map(move |second| (first, second)));
    let others = writes.enumerate().flat_map(|(n, (first, second))| {
        (0..OPS.len()).map(move |op| {
            let third =
                second.filter(|_| (n + op) % 3 == 0).map(|second| (first + second + op) % WRITES.len());
            let ends = match (n + op) % 2 {
                0 => Ends::InTurn,
                _ if third.is_some() => Ends::FromTheMiddle,
                _ => Ends::Reversed,
            };
            Plot {
                read: ((n + op) % 5 < 3).then_some((n * 3 + op) % READS.len()),
                writes: [Some(first), second, third],
                // Each with another one behind it.
                ops: [Some(op), Some((op * 7 + n * 3 + 1) % OPS.len()), None],
                ends,
                mixed: op % 3 == 0,
                asks: (n + op) % 4 < 2,
            }
        })
    });
    going.chain(others)
}

/// A history as it goes on.
struct Stage {
    machine: Machine,
    history: Arc<Mutex<History>>,
    points: Arc<Mutex<Vec<(CrashPoint, History)>>>,
    held_back: u64,
}

impl Stage {
    fn begin(&self, n: usize) -> (Op, u64) {
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
    fn play(&mut self, writes: usize, plot: &Plot) {
        let in_pieces = self.machine.fs().media().engine().is_some_and(|device| device.in_pieces);
        let count = self.history.lock().calls.len();
        let mut tickets = Vec::new();
        for n in 0..writes {
            let (op, tag) = self.begin(n);
            let class = (in_pieces && plot.mixed && n == 1).then_some(Class::Latency);
            let before = self.points.lock().len();
            let begun = self.machine.begin_write(&op, tag, class);
            self.count_held_back(before, &tickets);
            match begun {
                Ok(ticket) => tickets.push((n, ticket)),
                Err(e) => self.end(n, Err(e.errno())),
            }
        }
        for n in writes..count {
            let (op, tag) = self.begin(n);
            let before = self.points.lock().len();
            let outcome = self.machine.attempt(&op, tag);
            self.end(n, outcome);
            self.count_held_back(before, &tickets);
            if in_pieces && plot.asks {
                tickets.iter().for_each(|(_, ticket)| _ = ticket.poll());
            }
        }
        match plot.ends {
            Ends::InTurn => {}
            Ends::Reversed => tickets.reverse(),
            Ends::FromTheMiddle => {
                let two = tickets.len().min(2);
                tickets[..two].reverse();
            }
        }
        for (n, ticket) in tickets {
            let outcome = ticket.wait().map(drop).map_err(|e| e.errno());
            self.end(n, outcome);
        }
    }

    /// A write that is held back was so at all points since: nothing is held back again.
    fn count_held_back(&mut self, since: usize, tickets: &[(usize, WriteTicket<SimMedia>)]) {
        if tickets.iter().any(|(_, ticket)| ticket.is_held_back()) {
            self.held_back += (self.points.lock().len() - since) as u64;
        }
    }
}

/// A read under way, and what it is to have.
struct Reads {
    wanted: Vec<u8>,
    reading: ReadTicket<SimMedia>,
}

impl Reads {
    /// None where there is no such file.
    fn begin(machine: &Machine, (path, at, len): (&str, u64, usize)) -> Result<Option<Reads>, String> {
        let begin = || match machine.begin_read(path, at, len) {
            Err(e) if e.errno() == libc::ENOENT => Ok(None),
            begun => begun.map(Some).map_err(|e| format!("a read of {path}: {e:?}")),
        };
        let Some(first) = begin()? else { return Ok(None) };
        let wanted = read(first)?;
        Ok(begin()?.map(|reading| Reads { wanted, reading }))
    }

    /// Once everything that is free was written to.
    fn end(self, machine: &mut Machine) -> Result<(), String> {
        let fill = |n: u64| Op::Write(Target::Path("fill".to_owned()), n * 4096, 4096);
        let mut done = machine.attempt(&Op::Create("fill".to_owned()), 1);
        for n in 0.. {
            if done.is_err() {
                break;
            }
            done = machine.attempt(&fill(n), 77);
        }
        if done != Err(libc::ENOSPC) {
            return Err(format!("filling the pool ended with {done:?}"));
        }
        match read(self.reading)? == self.wanted {
            true => Ok(()),
            false => Err("a read has not what there was when it began".to_owned()),
        }
    }
}

fn read(ticket: ReadTicket<SimMedia>) -> Result<Vec<u8>, String> {
    let (bytes, count) = ticket.into_bytes();
    Ok(bytes[..count.map_err(|e| format!("a read under way: {e:?}"))?].to_vec())
}

/// Plays one on a pool, and looks at what failures leave of it.
pub fn play(
    start: &Start,
    plot: Plot,
    bounds: &Bounds,
    mutation: Option<Arc<Mutation>>,
) -> Result<Played, String> {
    let mut machine = start.machine(mutation)?;
    for op in BEFORE {
        match machine.apply(&op.parse().expect("an operation"))? {
            Ok(()) => {}
            // What follows has nothing to find then.
            Err(libc::ENOSPC | libc::ENOENT | libc::ENODATA) if start.is_full() => {}
            Err(errno) => return Err(format!("{op}: errno {errno}")),
        }
    }
    let reading = plot.read.map(|n| Reads::begin(&machine, READS[n])).transpose()?.flatten();
    let begun = plot.writes.into_iter().flatten().map(|n| WRITES[n]);
    let writes = begun.clone().count();
    let texts: Vec<&str> = begun.chain(plot.ops.into_iter().flatten().map(|n| OPS[n])).collect();
    let call = |(n, text): (usize, &&str)| {
        let op = text.parse().expect("an operation");
        Call { thread: n, op, tag: 1000 + n as u64, begun: None, ended: None }
    };
    let history = History::new(texts.iter().enumerate().map(call).collect()).on_full(start.is_full());
    let history = Arc::new(Mutex::new(history));
    let points: Arc<Mutex<Vec<(CrashPoint, History)>>> = Arc::default();
    let (kept, seen) = (points.clone(), history.clone());
    let recorder = move |point: &CrashPoint| kept.lock().push((point.clone(), seen.lock().clone()));
    machine.fs().media().record(Some(Box::new(recorder)));
    let mut stage = Stage { machine, history, points, held_back: 0 };
    stage.play(writes, &plot);
    let Stage { mut machine, history, points, held_back } = stage;
    machine.fs().media().record(None);
    let at_end = history.lock().clone();
    let found = Tree::read(machine.fs(), [])?;
    at_end.serial(&machine.model, &found).map_err(|what| format!("{plot:?}: {what}\n{at_end}"))?;
    let mut points = std::mem::take(&mut *points.lock());
    match reading {
        Some(reading) => reading.end(&mut machine).map_err(|what| format!("{plot:?}: {what}\n{at_end}"))?,
        None => points.push((judge::settled(machine.fs().clone()), at_end)),
    }
    let mut total = Played { held_back, ..Played::default() };
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
        total.coverage += coverage;
        if let Some(v) = violation {
            return Err(format!("{plot:?}: {}\nlost: {}\n{history}", v.what, v.lost));
        }
    }
    Ok(total)
}
