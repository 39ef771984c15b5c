//! Media that fail at one load or store: each of an operation's in turn, and each of opening the pool; once, once more, or from then on.
//!
//! What is asked of whatever follows, after `docs/semantics.md` ("When something fails") and `docs/fsck.md` ("Bad blocks"):
//!
//! - Nothing panics. A call that fails answers EIO.
//! - Where the fault passes, at once or once it was met again, a call that failed and left the pool in use changed nothing; after one that took it out of use,
//!   the next process finds the operation wholly there or not at all. All space is free when everything is deleted.
//! - Where it lasts, whatever can be read is as it was, names aside. A repair leaves a clean pool, in which all is that had a
//!   name, but for what stands on the bad line.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::judge::{self, Allowed};
use super::machine::{self, Machine};
use super::media::{CrashPoint, Failing, Keep, SimMedia};
use super::run::{Start, overwritten};
use super::tree::{CONTRADICTS, Inodes, Seen, Tree};
use super::workload::{Op, Sequence};
use crate::fs::check::{self, Finding, Report, What};
use crate::fs::{Cred, Fs, Ino, OpenOptions};
use crate::media::{Domain, Media};

/// Which faults.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub failing: Failing,
    /// Every so many accesses, from this one on.
    pub every: u64,
    pub from: u64,
}

/// In what state the pool is when media fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Everything that was used is loaded.
    Loaded,
    /// It was opened just now.
    Cold,
}

/// How its last user left a pool that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Closed,
    Killed,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub sequences: u64,
    pub faults: u64,
    /// Calls, or openings, that failed.
    pub failed: u64,
    /// Copies that operations handed over to an engine.
    pub handed_over: u64,
    /// After which the pool took no more changes.
    pub stopped: u64,
    /// Pools that opened with damage.
    pub damaged: u64,
    /// That could not be repaired, because of where the fault lies.
    pub unrepaired: u64,
}

/// An operation that is about to be done.
struct Ready {
    machine: Machine,
    before: Tree,
    op: Op,
}

/// All but the last operation of a sequence is done, and durable. `None`: there is nothing to look at.
fn ready(start: &Start, sequence: &Sequence, pool: Pool) -> Result<Option<Ready>, String> {
    let mut machine = start.machine(None)?;
    let mut last = None;
    for line in &sequence.lines {
        let needs = line.needs.iter().flat_map(|need| need.bring_about(&machine.model));
        for op in needs.collect::<Vec<_>>().into_iter().chain(line.ops.iter().flat_map(Op::steps)) {
            // What the pool has no room for is left out.
            if let Some(op) = last.replace(op) {
                _ = machine.apply(&op)?;
            }
        }
    }
    let Some(op) = last.filter(|op| !matches!(op, Op::Reopen | Op::Crash | Op::Kill)) else {
        return Ok(None);
    };
    machine.fs().sync().map_err(|e| format!("{e:?}"))?;
    let before = machine.tree()?;
    if pool == Pool::Cold {
        if machine.holds_open() {
            return Ok(None);
        }
        machine.apply(&Op::Reopen)?.expect("it has no errno");
    }
    Ok(Some(Ready { machine, before, op }))
}

/// Lets each access of the last operation of a sequence fail in turn; what was broken, in words.
pub fn operation(
    start: &Start,
    sequence: &Sequence,
    pool: Pool,
    faults: Faults,
    tally: &mut Tally,
) -> Vec<String> {
    let begin = || ready(start, sequence, pool);
    let whole = begin().and_then(|ready| {
        let Some(Ready { mut machine, op, .. }) = ready else { return Ok(None) };
        machine.fs().media().fail_access(0, Failing::Once);
        let done = machine.attempt_next(&op);
        let accesses = machine.fs().media().accesses();
        Ok(Some((accesses, done, machine.seen()?)))
    });
    let (accesses, done, after) = match whole {
        Ok(Some(whole)) => whole,
        Ok(None) => return Vec::new(),
        Err(e) => return vec![format!("without a fault: {e}\n{sequence}")],
    };
    tally.sequences += 1;
    let mut broken = Vec::new();
    for nth in (faults.from..=accesses).step_by(faults.every as usize) {
        tally.faults += 1;
        let ready = begin().expect("it went well before").expect("it is there");
        let what = format!("{}, access {nth} of {accesses}", ready.op);
        let run = Run { start, failing: faults.failing, nth, wanted: done, after: &after };
        broken.extend(said(what, sequence, || run.operation(ready, tally)));
    }
    broken
}

/// Lets each access of opening what a sequence leaves fail in turn; what was broken, in words.
pub fn opening(
    start: &Start,
    sequence: &Sequence,
    left: Left,
    faults: Faults,
    tally: &mut Tally,
) -> Vec<String> {
    let point = ready(start, sequence, Pool::Loaded).and_then(|ready| {
        let Some(Ready { machine, before, .. }) = ready.filter(|ready| !ready.machine.holds_open()) else {
            return Ok(None);
        };
        let fs = if left == Left::Closed { machine.close()? } else { machine.fs().clone() };
        Ok(Some((fs.media().crash_point(), before)))
    });
    let (point, before) = match point {
        Ok(Some(point)) => point,
        Ok(None) => return Vec::new(),
        Err(e) => return vec![format!("without a fault: {e}\n{sequence}")],
    };
    tally.sequences += 1;
    let (mut broken, mut accesses, mut nth) = (Vec::new(), faults.from, faults.from);
    while nth <= accesses {
        tally.faults += 1;
        let what = format!("opening what was {left:?}, access {nth}");
        let opened = || opened(&point, &before, nth, faults.failing, tally, &mut accesses);
        broken.extend(said(what, sequence, opened));
        nth += faults.every;
    }
    broken
}

fn said(what: String, sequence: &Sequence, run: impl FnOnce() -> Result<(), String>) -> Option<String> {
    let done = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("panic".to_owned()));
    done.err().map(|e| format!("{what}: {e}\n{sequence}"))
}

/// One fault in one operation.
struct Run<'a> {
    start: &'a Start,
    failing: Failing,
    nth: u64,
    /// What the operation answers without a fault, and what there is then.
    wanted: Result<(), i32>,
    after: &'a Tree,
}

impl Run<'_> {
    fn operation(&self, ready: Ready, tally: &mut Tally) -> Result<(), String> {
        let Ready { mut machine, before, op } = ready;
        let torn = overwritten(&machine, &op).filter(|_| self.start.is_in_place());
        let moved = machine.fs().mover().moved().copies;
        machine.fs().media().fail_access(self.nth, self.failing);
        let done = machine.attempt_next(&op);
        tally.handed_over += machine.fs().mover().moved().copies - moved;
        machine.fs().media().accesses();
        let failed = done.is_err() && done != self.wanted;
        if failed && done != Err(libc::EIO) {
            return Err(format!("it answers errno {}", done.unwrap_err()));
        }
        let point = machine.fs().media().crash_point();
        let live = machine.seen();
        let stopped = is_stopped(machine.fs())?;
        tally.failed += failed as u64;
        tally.stopped += stopped as u64;
        let trees = if failed { vec![&before, self.after] } else { vec![self.after] };
        let may = May { trees, torn };
        if self.failing == Failing::FromThenOn {
            return self.lasting(&point, &may, tally);
        }
        if !stopped {
            let live = live.map_err(|e| format!("afterwards {e}"))?;
            // An overwrite in place that failed has happened in part.
            let is_torn = may.torn.is_some();
            let unchanged = || May { trees: vec![&before], torn: None };
            let only = if failed && !is_torn { unchanged() } else { may.clone() };
            only.judge(&live).map_err(|e| format!("afterwards {e}"))?;
            judge::checked(machine.fs())?;
        }
        for way in Way::of(point.domain) {
            let say = |e: String| format!("{}: {e}", way.name());
            let fs = machine::open_after(way.media(&point), way.lost_power()).map_err(say)?;
            let found = Tree::read(&fs, []).map_err(say)?;
            may.judge(&found).map_err(say)?;
            judge::checked(&fs).map_err(say)?;
            let point = fs.media().crash_point();
            judge::use_up(&point, &found, self.start.free_when_empty()).map_err(say)?;
        }
        if stopped { Ok(()) } else { closes(machine) }
    }

    fn lasting(&self, point: &CrashPoint, may: &May, tally: &mut Tally) -> Result<(), String> {
        for way in Way::of(point.domain) {
            let say = |e: String| format!("{}: {e}", way.name());
            if let Ok(fs) = machine::open_after(way.media(point), way.lost_power()) {
                tally.damaged += (fs.open_report().damaged > 0) as u64;
                may.in_part(&fs, None).map_err(say)?;
            }
            repaired(way.media(point), way.lost_power(), may, tally).map_err(say)?;
        }
        Ok(())
    }
}

/// What the next process finds.
#[derive(Clone, Copy)]
enum Way {
    Killed,
    LostPower(Keep),
}

impl Way {
    /// (On an ordinary file power may take much that is not asked for here.)
    fn of(domain: Domain) -> &'static [Way] {
        match domain {
            Domain::PageCache => &[Way::Killed],
            _ => &[Way::Killed, Way::LostPower(Keep::Nothing), Way::LostPower(Keep::Everything)],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::Killed => "killed",
            Way::LostPower(Keep::Nothing) => "power lost, and all in doubt",
            Way::LostPower(_) => "power lost",
        }
    }

    fn lost_power(self) -> bool {
        matches!(self, Way::LostPower(_))
    }

    /// As bad as it was.
    fn media(self, point: &CrashPoint) -> SimMedia {
        match self {
            Way::Killed => point.killed(),
            Way::LostPower(keep) => point.media(keep),
        }
    }
}

/// Whether the pool takes no more changes: one may meet the fault itself.
pub(super) fn is_stopped(fs: &Fs<SimMedia>) -> Result<bool, String> {
    Ok(refuses(fs)? && refuses(fs)?)
}

fn refuses(fs: &Fs<SimMedia>) -> Result<bool, String> {
    match fs.create(&Cred::root(), Ino::ROOT, b"new after the fault", 0o644, 0, 0) {
        Ok(_) => Ok(false),
        Err(e) if e.errno() == libc::ENOSPC => Ok(false),
        Err(e) if e.errno() == libc::EIO => Ok(true),
        Err(e) => Err(format!("creating a file answers {e:?}")),
    }
}

/// A pool that goes on after a fault is closed, and opened again, as any other.
fn closes(machine: Machine) -> Result<(), String> {
    let whole = Tree::read(machine.fs(), [])?;
    let mut closed = machine.close()?;
    for _ in 0..2 {
        closed = machine::open_after(closed.media().crash_point().media(Keep::Everything), false)?;
        May { trees: vec![&whole], torn: None }.judge(&Tree::read(&closed, [])?)?;
        judge::checked(&closed)?;
        closed.close().map_err(|e| format!("it cannot be closed: {e:?}"))?;
    }
    Ok(())
}

/// `most`: accesses that an opening took.
fn opened(
    point: &CrashPoint,
    before: &Tree,
    nth: u64,
    failing: Failing,
    tally: &mut Tally,
    most: &mut u64,
) -> Result<(), String> {
    let may = May { trees: vec![before], torn: None };
    let media = Arc::new(point.killed());
    media.fail_access(nth, failing);
    let lasts = failing == Failing::FromThenOn;
    let opened = Fs::open(media.clone(), &options());
    let accesses = media.accesses();
    *most = accesses.max(*most);
    match opened {
        Ok(fs) => {
            let report = fs.open_report();
            let is_whole = report.damaged == 0 && !report.checkpoint_damaged && !lasts;
            may.in_part(&fs, None)?;
            if is_whole {
                may.judge(&Tree::read(&fs, [])?)?;
                judge::checked(&fs)?;
            }
            tally.damaged += (report.damaged > 0) as u64;
            // With changes, closed or not.
            if fs.create(&Cred::root(), Ino::ROOT, b"new after the fault", 0o644, 0, 0).is_ok() {
                _ = fs.unlink(&Cred::root(), Ino::ROOT, b"new after the fault");
            }
            if nth.is_multiple_of(2) {
                _ = fs.close();
            }
        }
        Err(_) => tally.failed += 1,
    }
    let point = media.crash_point();
    match Fs::open(Arc::new(point.killed()), &options()) {
        Ok(fs) => may.in_part(&fs, None).map_err(|e| format!("opened again: {e}"))?,
        Err(_) if lasts => {}
        Err(e) => return Err(format!("it cannot be opened again: {e:?}")),
    }
    repaired(point.killed(), false, &may, tally)
}

fn options() -> OpenOptions {
    OpenOptions { no_ticker: true, ..OpenOptions::default() }
}

fn repaired(media: SimMedia, lost_power: bool, may: &May, tally: &mut Tally) -> Result<(), String> {
    let media = Arc::new(media);
    let done = match check::repair(media.clone(), lost_power, None) {
        Ok(done) => done,
        // Where both copies of a line are needed, or the table's own slot; or no block is free.
        Err(e) if e.errno() == libc::EIO && media.is_bad() || e.errno() == libc::ENOSPC => {
            tally.unrepaired += 1;
            return Ok(());
        }
        Err(e) => return Err(format!("it cannot be repaired: {e:?}")),
    };
    // One copy stays where it cannot be stored.
    let is_copy = |f: &Finding| media.is_bad() && matches!(f.what, What::Superblock | What::StateLine);
    if let Some(left) = done.after.findings.iter().find(|f| !is_copy(f)) {
        return Err(format!("a repair leaves {left}"));
    }
    let fs =
        Fs::open(media.clone(), &options()).map_err(|e| format!("repaired, it cannot be opened: {e:?}"))?;
    let report = fs.check().map_err(|e| format!("{e:?}"))?;
    if let Some(finding) = report.findings.iter().find(|f| !is_copy(f)) {
        return Err(format!("repaired and opened, the check finds {finding}"));
    }
    may.in_part(&fs, Some(&done.found)).map_err(|e| format!("repaired: {e}"))
}

/// The same, where the one inode that is new has the number that it has in `wanted`: that of a slot in a block that failed is
/// given to nobody.
fn renumbered(found: &Tree, wanted: &Tree) -> Option<Tree> {
    let others = |a: &Tree, b: &Tree| -> Vec<u32> {
        a.named.keys().copied().filter(|ino| !b.named.contains_key(ino)).collect()
    };
    let (&[number], &[other]) = (&others(found, wanted)[..], &others(wanted, found)[..]) else { return None };
    let mut renumbered = found.clone();
    let new = renumbered.named.remove(&number)?;
    renumbered.named.insert(other, new);
    for seen in renumbered.named.values_mut() {
        Arc::make_mut(seen).names.values_mut().filter(|ino| **ino == number).for_each(|ino| *ino = other);
    }
    Some(renumbered)
}

/// What there may be.
#[derive(Clone)]
struct May<'a> {
    trees: Vec<&'a Tree>,
    /// The bytes of an inode that an overwrite in place may have torn.
    torn: Option<(u32, std::ops::Range<u64>)>,
}

impl May<'_> {
    fn judge(&self, found: &Tree) -> Result<(), String> {
        let trees = self.trees.iter().map(|&tree| Arc::new(tree.clone())).collect();
        let judged = Allowed::OneOf { trees, torn: self.torn.clone() }.judge(found).map(drop);
        let is_one = |tree: &&&Tree| renumbered(found, tree).is_some_and(|found| found.named == tree.named);
        judged.or_else(|e| self.trees.iter().find(is_one).map(drop).ok_or(e))
    }

    fn versions(&self, ino: u32) -> impl Iterator<Item = &Seen> {
        self.trees.iter().filter_map(move |tree| Inodes::get(&tree.named, &ino)).map(|seen| &**seen)
    }

    /// What can be read is as it was, but for names and what follows from them, which other logs decide. After a repair, which
    /// found this, all can be read that had a name, unless what says so was lost.
    fn in_part<M: Media>(&self, fs: &Fs<M>, found: Option<&Report>) -> Result<(), String> {
        let findings =
            |ino: u32| found.into_iter().flat_map(|r| &r.findings).filter(move |f| f.ino == Some(ino));
        let mut numbers: Vec<u32> = self.trees.iter().flat_map(|tree| tree.named.keys().copied()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for ino in numbers {
            let mut lost_records =
                findings(ino).filter(|f| f.what == What::Slot || f.what == What::Media && f.bytes.is_none());
            if lost_records.next().is_some() {
                continue;
            }
            let is_certain = self.versions(ino).count() == self.trees.len();
            let seen = match Seen::read(fs, Ino(ino)) {
                Ok(seen) => seen,
                Err((libc::EIO, _)) => continue,
                Err((CONTRADICTS, e)) => return Err(e),
                Err((_, e)) if found.is_some() && is_certain => return Err(e),
                Err(_) => continue,
            };
            // Where what says that it was removed is lost, an inode comes back in lost+found, which may have a free number itself.
            let is_other = self.versions(ino).all(|v| v.generation != seen.generation);
            if is_other && (!is_certain || findings(ino).any(|f| f.what == What::Orphan)) {
                continue;
            }
            let lost: Vec<_> = findings(ino).filter_map(|f| f.bytes).collect();
            if !self.versions(ino).any(|v| self.is_like(&seen, v, ino, &lost)) {
                let how: Vec<String> = self.versions(ino).map(|v| seen.differs(v)).collect();
                return Err(format!("inode {ino} {}", how.join("; or: ")));
            }
        }
        Ok(())
    }

    /// `lost`: bytes that are zeros now.
    fn is_like(&self, seen: &Seen, version: &Seen, ino: u32, lost: &[(u64, u64)]) -> bool {
        let is_dir = seen.mode & libc::S_IFMT == libc::S_IFDIR;
        let owner = |s: &Seen| (s.generation, s.mode, s.uid, s.gid, s.rdev);
        let byte_is = |at: usize| {
            let byte = Some(&seen.content[at]);
            let is_lost = lost.iter().any(|&(from, to)| (from..to).contains(&(at as u64)));
            version.content.get(at) == byte
                || is_lost && byte == Some(&0)
                || self.torn.is_some() && self.versions(ino).any(|v| v.content.get(at) == byte)
        };
        owner(seen) == owner(version)
            && seen.xattrs == version.xattrs
            && seen.content.len() == version.content.len()
            && (0..seen.content.len()).all(byte_is)
            && (is_dir || (seen.mtime, seen.size, &seen.data) == (version.mtime, version.size, &version.data))
    }
}
