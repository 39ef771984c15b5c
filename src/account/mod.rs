//! Where the time of operations goes: copying, metadata, the index, waiting (EasyIO §2.1, Figure 1).
//!
//! It is always on, because it looks at one operation in [`ONE_IN`] of each thread, at random distances: the others
//! count down a number of their own thread, and at each step find that nobody watches them. An operation that is watched
//! takes a time stamp after each of its steps, and adds up in a part of its own thread: nothing that threads share is
//! written. `docs/decisions/0072-accounting.md` has what that costs.
//!
//! **Invariant.** The phases of an operation sum up to its whole: each stamp ends a phase and begins the next.
//!
//! A stamp is taken when the processor comes to it, which does not wait for stores: those that have not reached memory
//! are waited for in the next fence, which is metadata's where one fence is for data and record.

pub(crate) mod stamp;

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::PerThread;

/// Operations of a thread of which one is watched, on average.
pub const ONE_IN: u32 = 64;

/// What an operation does in a stretch of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Moves data, a fence for data alone included.
    Copy,
    /// Allocates, builds records, appends and fences them; access times.
    Metadata,
    /// Finds out where things are, and keeps it.
    Index,
    /// Takes locks and gives them back, enters its epoch, waits for engines.
    Wait,
}

impl Phase {
    pub const ALL: [Phase; PHASES] = [Phase::Copy, Phase::Metadata, Phase::Index, Phase::Wait];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Copy => "copy",
            Phase::Metadata => "metadata",
            Phase::Index => "index",
            Phase::Wait => "wait",
        }
    }
}

const PHASES: usize = 4;

/// What is accounted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Read,
    Write,
}

const OPS: usize = 2;

/// The operations of one kind that were watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    pub operations: u64,
    /// Asked for.
    pub bytes: u64,
    /// By phase, in the order of [`Phase::ALL`], in nanoseconds.
    ns: [u64; PHASES],
}

impl Times {
    pub fn ns(&self, phase: Phase) -> u64 {
        self.ns[phase as usize]
    }

    /// All phases together.
    pub fn total_ns(&self) -> u64 {
        self.ns.iter().sum()
    }

    /// Of 1; 0 where nothing was watched.
    pub fn share(&self, phase: Phase) -> f64 {
        match self.total_ns() {
            0 => 0.0,
            total => self.ns(phase) as f64 / total as f64,
        }
    }

    /// What came since an earlier look.
    pub fn since(&self, earlier: &Times) -> Times {
        let mut ns = self.ns;
        ns.iter_mut().zip(earlier.ns).for_each(|(now, before)| *now = now.saturating_sub(before));
        let operations = self.operations.saturating_sub(earlier.operations);
        Times { operations, bytes: self.bytes.saturating_sub(earlier.bytes), ns }
    }
}

/// In ticks of [`stamp`].
#[derive(Clone, Copy, Default)]
struct Sums {
    operations: u64,
    bytes: u64,
    ticks: [u64; PHASES],
    /// From the first stamp to the last, to hold the phases against.
    whole: u64,
}

/// The account of one file system.
pub struct Ledger {
    /// From the first operation that is watched on.
    parts: OnceLock<PerThread<[Sums; OPS]>>,
    one_in: AtomicU32,
}

thread_local! {
    /// Operations of this thread that nobody watches, before the next.
    static LEFT: Cell<u32> = const { Cell::new(0) };
    static CHANCE: Cell<u32> = const { Cell::new(0x9e37_79b9) };
    /// Somebody watches: what is waited for elsewhere is counted.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static WAITED: Cell<u64> = const { Cell::new(0) };
}

impl Default for Ledger {
    fn default() -> Ledger {
        stamp::begin();
        Ledger { parts: OnceLock::new(), one_in: AtomicU32::new(ONE_IN) }
    }
}

impl Ledger {
    /// Begins an operation, which its watch ends.
    #[inline]
    pub fn begin(&self, op: Op, bytes: usize) -> Watch<'_> {
        // Under a model checker threads are not the operating system's.
        if cfg!(shuttle) {
            return Watch(None);
        }
        match LEFT.get() {
            0 => self.watch(op, bytes),
            left => {
                LEFT.set(left - 1);
                Watch(None)
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn watch(&self, op: Op, bytes: usize) -> Watch<'_> {
        LEFT.set(self.draw());
        // An operation inside of another is part of that.
        if WATCHED.replace(true) {
            return Watch(None);
        }
        WAITED.set(0);
        let now = stamp::now();
        let bytes = bytes as u64;
        Watch(Some(Running { ledger: self, op, bytes, began: now, last: now, ticks: [0; PHASES] }))
    }

    /// How many are let pass: from none to as many that it comes to one in so many.
    fn draw(&self) -> u32 {
        let mut chance = CHANCE.get();
        chance ^= chance << 13;
        chance ^= chance >> 17;
        chance ^= chance << 5;
        CHANCE.set(chance);
        let most = 2 * (self.one_in.load(Ordering::Relaxed) - 1);
        ((u64::from(chance) * (u64::from(most) + 1)) >> 32) as u32
    }

    /// From now on one in so many operations is watched, [`ONE_IN`] at first: after those that a thread lets pass already.
    /// 1 is all of them, for measurements.
    pub fn watch_one_in(&self, count: u32) {
        self.one_in.store(count.clamp(1, 1 << 20), Ordering::Relaxed);
    }

    pub fn one_in(&self) -> u32 {
        self.one_in.load(Ordering::Relaxed)
    }

    /// What was watched so far, on all threads.
    pub fn times(&self, op: Op) -> Times {
        let sums = self.sums(op);
        let ns_per_tick = stamp::ns_per_tick();
        let ns = sums.ticks.map(|ticks| (ticks as f64 * ns_per_tick) as u64);
        Times { operations: sums.operations, bytes: sums.bytes, ns }
    }

    fn sums(&self, op: Op) -> Sums {
        let parts = self.parts.get().into_iter().flat_map(PerThread::all);
        parts.map(|part| part.read()[op as usize]).fold(Sums::default(), |a, b| a.and(&b))
    }
}

impl Ledger {
    /// Waits on behalf of an operation that was watched, after its watch has ended: it let go of all it held.
    pub fn waiting<T>(&self, op: Op, wait: impl FnOnce() -> T) -> T {
        let began = stamp::now();
        let waited_for = wait();
        let whole = stamp::now().saturating_sub(began);
        let mut ticks = [0; PHASES];
        ticks[Phase::Wait as usize] = whole;
        let sums = Sums { operations: 0, bytes: 0, ticks, whole };
        let mut own = self.parts.get_or_init(PerThread::new).own().write();
        let own = &mut own[op as usize];
        *own = own.and(&sums);
        waited_for
    }
}

impl Sums {
    fn and(mut self, other: &Sums) -> Sums {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.ticks.iter_mut().zip(other.ticks).for_each(|(sum, ticks)| *sum += ticks);
        self.whole += other.whole;
        self
    }
}

/// One operation, most often one that nobody watches. Ends when it is dropped; what came after the last step was
/// waiting: locks are given back.
pub struct Watch<'a>(Option<Running<'a>>);

struct Running<'a> {
    ledger: &'a Ledger,
    op: Op,
    bytes: u64,
    began: u64,
    last: u64,
    ticks: [u64; PHASES],
}

impl Watch<'_> {
    /// It was no operation: it is to be tried again.
    #[cold]
    pub fn forget(&mut self) {
        if self.0.take().is_some() {
            WATCHED.set(false);
        }
    }

    /// Whether somebody watches.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// What the operation did since the last step.
    #[inline]
    pub fn did(&mut self, phase: Phase) {
        if let Some(running) = &mut self.0 {
            running.did(phase);
        }
    }
}

impl Running<'_> {
    #[cold]
    #[inline(never)]
    fn did(&mut self, phase: Phase) {
        let now = stamp::now();
        // Counters of two processors may be a little apart.
        let ticks = now.saturating_sub(self.last);
        let waited = WAITED.replace(0).min(ticks);
        self.ticks[phase as usize] += ticks - waited;
        self.ticks[Phase::Wait as usize] += waited;
        self.last = self.last.max(now);
    }
}

impl Drop for Watch<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(running) = &mut self.0 {
            running.end();
        }
    }
}

impl Running<'_> {
    #[cold]
    #[inline(never)]
    fn end(&mut self) {
        self.did(Phase::Wait);
        WATCHED.set(false);
        let Running { ledger, op, bytes, began, last, ticks } = *self;
        let sums = Sums { operations: 1, bytes, ticks, whole: last - began };
        let mut own = ledger.parts.get_or_init(PerThread::new).own().write();
        let own = &mut own[op as usize];
        *own = own.and(&sums);
    }
}

/// Waits for somebody else, on behalf of the operation of this thread, if that is watched.
#[inline]
pub fn waiting<T>(wait: impl FnOnce() -> T) -> T {
    if !WATCHED.get() {
        return wait();
    }
    let began = stamp::now();
    let waited_for = wait();
    WAITED.set(WAITED.get() + stamp::now().saturating_sub(began));
    waited_for
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn all(ledger: &Ledger) {
        ledger.watch_one_in(1);
        LEFT.set(0);
    }

    #[test]
    fn phases_sum_up_to_the_whole() {
        let ledger = Ledger::default();
        all(&ledger);
        for n in 0..1000 {
            let mut watch = ledger.begin(Op::Write, n);
            Phase::ALL.into_iter().cycle().take(n % 7).for_each(|phase| watch.did(phase));
            waiting(|| std::hint::black_box(n));
        }
        let sums = ledger.sums(Op::Write);
        assert_eq!((sums.operations, sums.bytes), (1000, 999 * 500));
        assert_eq!(sums.ticks.iter().sum::<u64>(), sums.whole);
        assert!(sums.ticks.iter().all(|ticks| *ticks > 0), "{:?}", sums.ticks);
        assert_eq!(ledger.sums(Op::Read).operations, 0);
        let times = ledger.times(Op::Write);
        let shares: f64 = Phase::ALL.iter().map(|phase| times.share(*phase)).sum();
        assert!((shares - 1.0).abs() < 1e-9, "{times:?}");
        assert_eq!(times.since(&times), Times::default());
    }

    #[test]
    fn what_is_waited_for_elsewhere_is_not_the_phase() {
        let ledger = Ledger::default();
        all(&ledger);
        let pause = std::time::Duration::from_millis(5);
        let mut watch = ledger.begin(Op::Read, 1);
        waiting(|| std::thread::sleep(pause));
        watch.did(Phase::Copy);
        drop(watch);
        // Counters and clocks may differ a little.
        let least = pause.as_nanos() as u64 * 9 / 10;
        assert!(ledger.times(Op::Read).ns(Phase::Wait) >= least, "{:?}", ledger.times(Op::Read));
        // Nobody watches: it goes to nobody.
        waiting(|| std::thread::sleep(pause));
        assert_eq!(WAITED.get(), 0);
    }

    #[test]
    fn one_in_so_many_is_watched() {
        let ledger = Ledger::default();
        LEFT.set(0);
        const COUNT: u32 = 64_000;
        (0..COUNT).for_each(|_| drop(ledger.begin(Op::Read, 0)));
        let watched = ledger.times(Op::Read).operations as u32;
        let expected = COUNT / ONE_IN;
        assert!((expected * 8 / 10..=expected * 12 / 10).contains(&watched), "{watched}");
    }

    #[test]
    fn an_operation_inside_of_another_is_part_of_it() {
        let ledger = Ledger::default();
        all(&ledger);
        let outer = ledger.begin(Op::Write, 1);
        drop(ledger.begin(Op::Read, 1));
        drop(outer);
        assert_eq!((ledger.sums(Op::Write).operations, ledger.sums(Op::Read).operations), (1, 0));
        drop(ledger.begin(Op::Read, 1));
        assert_eq!(ledger.sums(Op::Read).operations, 1);
    }

    #[test]
    fn threads_add_up() {
        let ledger = Ledger::default();
        ledger.watch_one_in(1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| drop(ledger.begin(Op::Write, 2))));
            }
        });
        let times = ledger.times(Op::Write);
        assert_eq!((times.operations, times.bytes), (400, 800));
    }
}
