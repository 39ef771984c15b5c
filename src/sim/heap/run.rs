//! Runs sequences of operations on a heap, lets power fail at every point of the last one, and judges what is left.
//!
//! Earlier operations need no failures of their own: they are the last one of a shorter sequence. Of long sequences
//! made by chance every operation is cut short (`every`).

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};

use parking_lot::Mutex;

use super::machine::{self, Lists, Machine, differs, lists};
use super::workload::{List, Op, Sequence};
use crate::media::{Domain, Media};
use crate::sim::explore::{Bounds, Coverage, Violation, explore};
use crate::sim::media::{CrashPoint, Keep, Rng, SimMedia};
use crate::sim::run::{self, Effort, Tally, again, guarded, plain, record, record_flushes, shorten};
use crate::wsp::heap::format::{self, CHUNK, CLASSES, Layout};
use crate::wsp::heap::{FormatOptions, Heap, Info, Offset, Shape, prefer};

/// Small, so that rings go round and space runs out.
const SHAPE: Shape = Shape { lanes: 2, ring_lines: 8, roots: 4 };
const CHUNKS: u64 = 12;
const HEAP_BYTES: u64 = CHUNK + CHUNKS * CHUNK + 4096;

/// What a heap went through before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    /// Just made: no roots.
    Fresh,
    /// Both lists have some objects.
    Filled,
    /// One chunk is free.
    Full,
    /// Every chunk was used before, as runs of several classes and by large objects; opened several times.
    Reused,
    /// Not closed, with records that are not settled.
    Crashed,
}

impl Image {
    pub const ALL: &[Image] = &[Image::Fresh, Image::Filled, Image::Full, Image::Reused, Image::Crashed];

    pub fn name(self) -> &'static str {
        match self {
            Image::Fresh => "fresh",
            Image::Filled => "filled",
            Image::Full => "full",
            Image::Reused => "reused",
            Image::Crashed => "crashed",
        }
    }
}

/// Where a sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub domain: Domain,
    pub image: Image,
    /// Operations alternate between two threads and lanes.
    pub alternates: bool,
}

impl Place {
    /// All there are of a domain.
    pub fn all(domain: Domain, images: &[Image]) -> Vec<Place> {
        let of = |&image: &Image| [false, true].map(|alternates| Place { domain, image, alternates });
        images.iter().flat_map(of).collect()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = if self.alternates { 2 } else { 1 };
        write!(f, "--domain {} --image {}, {threads} lanes in turn", self.domain, self.image.name())
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
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}), {}", self.at, self.place, self.what)?;
        if !self.lost.is_empty() {
            writeln!(f, "lost: {}", self.lost)?;
        }
        write!(f, "{}\n{}", super::workload::HEADING, self.sequence)
    }
}

/// A heap to begin on.
pub struct Start {
    pub place: Place,
    media: CrashPoint,
    model: Lists,
    step: u32,
}

impl Start {
    /// Makes one. Fails where the production code and the oracle disagree already.
    pub fn new(place: Place) -> Result<Start, String> {
        prefer(Some(0));
        let options = FormatOptions { shape: Some(SHAPE), identity: Some(1), ..FormatOptions::default() };
        let made = Heap::format(SimMedia::new(vec![0; HEAP_BYTES as usize], place.domain), &options)
            .and_then(Heap::close)
            .map_err(|e| format!("it cannot be made: {e:?}"))?;
        let made = made.crash_point().media(Keep::Everything);
        let mut machine = Machine::new(made, Lists::new(), 0, place.alternates)?;
        let mut must = |op: Op| match machine.apply(op)? {
            true => Err(format!("{op}: no space")),
            false => Ok(()),
        };
        let few =
            [Op::Push(List::A, 24), Op::Push(List::A, 300), Op::Append(List::A, 100), Op::Put(List::B, 48)];
        match place.image {
            Image::Fresh => {}
            Image::Filled => {
                few.into_iter().try_for_each(&mut must)?;
                must(Op::Reopen)?;
            }
            Image::Full => {
                few.into_iter().try_for_each(&mut must)?;
                let chunk = CHUNK as u32;
                while !machine.apply(Op::Push(List::B, 2 * chunk))? {}
                while !machine.apply(Op::Push(List::B, chunk))? {}
                machine.apply(Op::Pop(List::B))?;
            }
            Image::Reused => {
                for round in 0..4 {
                    while !machine.apply(Op::Push(List::A, 16_000))? {}
                    empty(&mut machine, List::A)?;
                    while !machine.apply(Op::Push(List::A, 70_000))? {}
                    empty(&mut machine, List::A)?;
                    while !machine.apply(Op::Many(List::A, 25, 640 + round * 16))? {}
                    empty(&mut machine, List::A)?;
                    machine.apply(Op::Reopen)?;
                }
            }
            Image::Crashed => {
                few.into_iter().try_for_each(&mut must)?;
                must(Op::Mark(List::A))?;
                must(Op::Pop(List::A))?;
                must(Op::Push(List::B, 300))?;
            }
        }
        machine.seen()?;
        let (model, step) = (machine.model.clone(), machine.step());
        let media = match place.image {
            Image::Crashed => machine.heap().media().crash_point(),
            _ => machine.close()?.crash_point(),
        };
        let media = media.media(Keep::Everything).crash_point();
        Ok(Start { place, media, model, step })
    }

    fn machine(&self, effort: &Effort) -> Result<Machine, String> {
        let media = self.media.media(Keep::Everything);
        media.mutate(effort.mutation.clone());
        if effort.torn_pages {
            media.tear_pages();
        }
        Machine::new(media, self.model.clone(), self.step, self.place.alternates)
    }
}

/// Frees a list: all at once, or, where a full heap has no room for so large a commit, one after the other.
fn empty(machine: &mut Machine, list: List) -> Result<(), String> {
    while machine.apply(Op::Drop(list))? {
        if machine.apply(Op::Pop(list))? {
            return Err("a full heap refuses to free one object".to_owned());
        }
    }
    Ok(())
}

// ---------------------------------------------------------------------------------------------------
// One sequence

/// Runs a sequence and explores the failures of its last operation, or of every one.
pub fn sequence(start: &Start, sequence: &Sequence, every: bool, effort: &Effort) -> (Tally, Option<Broken>) {
    let mut run = Run { effort, tally: Tally { sequences: 1, ..Tally::default() }, seen: HashSet::new() };
    let broken = guarded(|at| run.sequence(start, sequence, every, at)).map(|(v, at)| {
        run.tally.violations = 1;
        Broken { what: v.what, lost: v.lost, at, sequence: sequence.clone(), place: start.place }
    });
    (run.tally, broken)
}

struct Run<'a> {
    effort: &'a Effort,
    tally: Tally,
    /// States that were used up.
    seen: HashSet<u64>,
}

impl Run<'_> {
    fn sequence(
        &mut self,
        start: &Start,
        sequence: &Sequence,
        every: bool,
        at: &Mutex<String>,
    ) -> Result<(), Violation> {
        let mut machine = start.machine(self.effort).map_err(plain)?;
        let mut before = machine.seen().map_err(plain)?;
        for (n, &op) in sequence.ops.iter().enumerate() {
            *at.lock() = format!("operation {}, {op}", n + 1);
            let last = n + 1 == sequence.ops.len();
            let points = (every || last).then(|| record(machine.heap().media()));
            let flushes =
                (points.is_some() && self.effort.twice).then(|| record_flushes(machine.heap().media()));
            self.tally.refused += machine.apply(op).map_err(plain)? as u64;
            let after = machine.seen().map_err(plain)?;
            if let Some(points) = points {
                machine.heap().media().record(None);
                machine.heap().media().record_flushes(None);
                let points = std::mem::take(&mut *points.lock());
                for (fence, point) in points.iter().enumerate() {
                    *at.lock() =
                        format!("operation {}, {op}, fence {} of {}", n + 1, fence + 1, points.len());
                    self.explore(point, &[&before, &after])?;
                }
                *at.lock() = format!("operation {}, {op}, done", n + 1);
                let point = machine.heap().media().crash_point();
                self.explore(&point, &[&after])?;
                if let Some(flushes) = flushes {
                    let flushes = std::mem::take(&mut *flushes.lock());
                    // Of bytes that no commit stores who sees them may not rely on them.
                    let flushes = if matches!(op, Op::Overwrite(_)) { Vec::new() } else { flushes };
                    for (which, points) in [("fence", &points), ("flush", &flushes)] {
                        for (k, point) in points.iter().enumerate() {
                            let moment = format!("killed at {which} {} of {}", k + 1, points.len());
                            *at.lock() = format!("operation {}, {op}, {moment}", n + 1);
                            self.killed(point, &[&before, &after])?;
                        }
                    }
                    *at.lock() = format!("operation {}, {op}, killed when it was done", n + 1);
                    self.killed(&point, &[&after])?;
                }
            }
            before = after;
        }
        *at.lock() = "the end, closed and opened again".to_owned();
        machine.apply(Op::Reopen).map_err(plain)?;
        machine.seen().map_err(plain)?;
        if self.effort.flips > 0 {
            *at.lock() = "the end, closed".to_owned();
            let closed = machine.close().map_err(plain)?;
            flipped(&closed, &before, self.effort).map_err(plain)?;
        }
        Ok(())
    }

    /// The process is killed, the next one opens the heap and changes it, and power fails.
    fn killed(&mut self, point: &CrashPoint, allowed: &[&Lists]) -> Result<(), Violation> {
        let bounds = Bounds { leaves_max: 32, lane_states: 1, ..self.effort.bounds.clone() };
        self.tally.kill(|twice| killed(point, allowed, &bounds, twice))
    }

    fn explore(&mut self, point: &CrashPoint, allowed: &[&Lists]) -> Result<(), Violation> {
        let Run { effort, tally, seen } = self;
        tally.explore(point, &effort.bounds, &mut |media, distinct, twice| {
            visit(media, allowed, effort, seen, distinct, twice)
        })
    }
}

// ---------------------------------------------------------------------------------------------------
// The judge

/// Opens what a failure left, and judges it. The hash says what was seen.
fn visit(
    media: SimMedia,
    allowed: &[&Lists],
    effort: &Effort,
    seen: &mut HashSet<u64>,
    distinct: &mut u64,
    twice: &mut Coverage,
) -> Result<u64, String> {
    prefer(Some(0));
    let heap = machine::open(media)?;
    let found = lists(&heap)?;
    if !allowed.contains(&&found) {
        let wanted: Vec<String> = allowed.iter().map(|lists| format!("{lists:?}")).collect();
        return Err(format!("the lists are {found:?}, should be {}", wanted.join(", or ")));
    }
    clean(&heap)?;
    let mut hasher = rapidhash::fast::RapidHasher::default();
    (&found, heap.opened().records).hash(&mut hasher);
    let hash = hasher.finish();
    if !seen.insert(hash) {
        return Ok(hash);
    }
    *distinct += 1;
    let left = effort.twice.then(|| heap.media().as_found());
    use_up(heap, &found)?;
    if let Some(left) = left {
        cut_short(left, &found, effort, twice)?;
    }
    Ok(hash)
}

/// See [`Run::killed`].
fn killed(
    point: &CrashPoint,
    allowed: &[&Lists],
    bounds: &Bounds,
    twice: &mut Coverage,
) -> Result<(), String> {
    prefer(Some(0));
    let media = point.killed();
    let points = record(&media);
    let heap = machine::open(media)?;
    heap.media().record(None);
    let points = std::mem::take(&mut *points.lock());
    let found = lists(&heap)?;
    if !allowed.contains(&&found) {
        return Err(format!("the lists are {found:?}, should be {allowed:?}"));
    }
    clean(&heap)?;
    again(&points, bounds, twice, |media| {
        let again = lists(&machine::open(media)?)?;
        if allowed.contains(&&again) { Ok(()) } else { Err(differs(&again, &found)) }
    })?;
    let mut stays = |heap: &Heap<SimMedia>, now: &Lists, when: &str| {
        let (coverage, violation) = explore(&heap.media().crash_point(), bounds, &mut |media| {
            let left = lists(&machine::open(media)?)?;
            if left == *now { Ok(0) } else { Err(differs(&left, now)) }
        });
        twice.points += coverage.points;
        twice.states += coverage.states;
        violation.map_or(Ok(()), |v| Err(format!("power failed after {when}: {} ({})", v.what, v.lost)))
    };
    stays(&heap, &found, "a recovery")?;
    let mut machine = Machine::resume(heap, found);
    for op in [Op::Push(List::A, 24), Op::Push(List::B, 300), Op::Pop(List::A)] {
        machine.apply(op)?;
        let now = machine.seen()?;
        stays(machine.heap(), &now, "commits behind a recovery")?;
    }
    Ok(())
}

fn clean<M: Media>(heap: &Heap<M>) -> Result<(), String> {
    let report = heap.check().map_err(|e| format!("it cannot be checked: {e:?}"))?;
    match report.is_clean() {
        true => Ok(()),
        false => Err(format!("the check finds {:?}", report.findings)),
    }
}

/// Power fails again, at each fence of the recovery.
fn cut_short(left: SimMedia, found: &Lists, effort: &Effort, twice: &mut Coverage) -> Result<(), String> {
    let points = record(&left);
    machine::open(left)?.media().record(None);
    let bounds = Bounds { leaves_max: 32, lane_states: 1, ..effort.bounds.clone() };
    let points = std::mem::take(&mut *points.lock());
    again(&points, &bounds, twice, |media| {
        let again = lists(&machine::open(media)?)?;
        if again == *found { Ok(()) } else { Err(differs(&again, found)) }
    })
}

/// What is reserved now is nobody else's; and when all is freed, all space is one piece.
fn use_up(heap: Heap<SimMedia>, found: &Lists) -> Result<(), String> {
    let said = |what: &str, e: crate::Error| format!("afterwards {what}: {e:?}");
    let mut taken: Vec<(Offset, u64)> = Vec::new();
    let granted = |bytes: u64| -> Result<Option<(Offset, u64)>, String> {
        match heap.reserve_offset(bytes) {
            Ok(at) => {
                Ok(Some((at, heap.usable_bytes(at).map_err(|e| said("nothing is where it was given", e))?)))
            }
            Err(e) if e.errno() == libc::ENOSPC => Ok(None),
            Err(e) => Err(said("nothing can be reserved", e)),
        }
    };
    for &class in CLASSES.iter().chain(&[40_000]) {
        for _ in 0..3 {
            let Some((at, bytes)) = granted(class as u64)? else { break };
            // Whoever owns it too will see that.
            let media = heap.media();
            let stored = media.zero_nt(crate::media::Addr(at.0), bytes as usize);
            stored.map_err(|e| format!("{e:?}"))?.left_to_sync();
            taken.push((at, bytes));
        }
    }
    taken.sort();
    if let Some(pair) = taken.windows(2).find(|p| p[0].0.0 + p[0].1 > p[1].0.0) {
        return Err(format!("afterwards two get the same bytes: {pair:?}"));
    }
    let seen = lists(&heap)?;
    if seen != *found {
        return Err(format!("afterwards somebody gets bytes of others: {}", differs(&seen, found)));
    }
    for (at, _) in taken {
        heap.give_back(at).map_err(|e| said("what was reserved cannot be given back", e))?;
    }
    let mut machine = Machine::resume(heap, found.clone());
    for list in List::ALL {
        empty(&mut machine, list)?;
    }
    machine.apply(Op::Push(List::A, 24))?;
    machine.apply(Op::Pop(List::A))?;
    machine.seen()?;
    let heap = machine.heap();
    let whole = heap.usage().capacity;
    let at = heap.reserve_offset(whole).map_err(|e| said("when all is freed, space is missing", e))?;
    heap.give_back(at).map_err(|e| said("it cannot be given back", e))?;
    clean(heap)
}

/// One bit goes wrong, so often as is asked for: nothing is noticed that matters, or an error says so. Where objects
/// are nobody but the program knows what is right.
fn flipped(closed: &SimMedia, wanted: &Lists, effort: &Effort) -> Result<(), String> {
    let layout = Layout::new(HEAP_BYTES, SHAPE).expect("heaps of this shape are made");
    let mutation = effort.mutation.as_ref().filter(|m| m.leaves_out());
    let info = Heap::probe(closed).map_err(|e| format!("it is closed and says nothing of itself: {e:?}"))?;
    // Other bits in other sequences.
    let mut hasher = rapidhash::fast::RapidHasher::default();
    (wanted, closed.crash_point().fences).hash(&mut hasher);
    let mut rng = Rng::new(effort.bounds.seed ^ hasher.finish());
    for _ in 0..effort.flips {
        let used = layout.descriptors_at + layout.chunks * format::DESCRIPTOR as u64;
        let at = match rng.below(4) {
            0 => rng.below(2) * format::STATE_AT + rng.below(format::header::BYTES as u64),
            1 => layout.roots_at + rng.below(layout.shape.roots as u64 * format::root::BYTES as u64),
            2 => rng.below(used),
            _ => HEAP_BYTES - 4096 + rng.below(4096),
        };
        let bit = rng.below(8) as u32;
        let media = closed.copy();
        media.mutate(mutation.cloned());
        media.flip(at as usize, bit);
        let what = |e: String| format!("bit {bit} of byte {at:#x} went wrong: {e}");
        let Ok(heap) = Heap::open(media) else { continue };
        let seen = lists(&heap).map_err(what)?;
        if seen != *wanted {
            return Err(what(differs(&seen, wanted)));
        }
        let found = Info { generation: info.generation, closed: info.closed, ..heap.info() };
        if found != info || heap.opened().records > 0 {
            return Err(what(format!("it says {found:?}, and {:?}; was {info:?}", heap.opened())));
        }
        clean(&heap).map_err(what)?;
        use_up(heap, wanted).map_err(what)?;
    }
    Ok(())
}

// ---------------------------------------------------------------------------------------------------
// Many sequences

/// What is done.
pub struct Plan {
    pub places: Vec<Place>,
    /// How many sequences there are, and the `n`th of them, and whether each of its operations is cut short.
    pub count: u64,
    pub sequence: Box<dyn Fn(u64) -> (Sequence, bool) + Sync>,
    pub effort: Effort,
    pub threads: usize,
}

/// What came of it.
pub type Report = run::Report<Broken>;

/// Runs all of it. `progress` is called now and then with how many sequences are done, of how many, and answers
/// whether to go on.
pub fn run(plan: &Plan, progress: &(dyn Fn(u64, u64, &Tally) -> bool + Sync)) -> Result<Report, String> {
    let starts: Vec<Start> = plan.places.iter().map(|p| Start::new(*p)).collect::<Result<_, _>>()?;
    let one = |n: u64, start: usize| {
        let (ops, every) = (plan.sequence)(n);
        sequence(&starts[start], &ops, every, &plan.effort)
    };
    let mut report = run::on_all(plan.count, starts.len(), plan.threads, &one, progress);
    // Who stops waits for nothing more.
    for broken in report.broken.iter_mut().filter(|_| !report.stopped) {
        let start = starts.iter().find(|s| s.place == broken.place).expect("it ran on one of them");
        shorten(broken, |b| fewer(&b.sequence).find_map(|s| sequence(start, &s, true, &plan.effort).1));
    }
    Ok(report)
}

/// A sequence with one operation less, in every way.
fn fewer(all: &Sequence) -> impl Iterator<Item = Sequence> {
    let shorter = (0..all.ops.len()).map(|n| {
        let mut less = all.clone();
        less.ops.remove(n);
        less
    });
    shorter.filter(|s| !s.ops.is_empty())
}
