//! Threads: two to four of them use one file system, under schedules that shuttle chooses. What they were answered,
//! and what there is in the end, must be that of some serial order of their operations; and power may fail at any
//! fence of any of them: then what is left is that of some serial order of what was acknowledged, and of some of
//! what was under way; on an ordinary file of every inode what it was at some moment of such an order since the last sync.
//!
//! The same by uthreads, on one worker or two: they wait for copies with their worker given away, and some of them do so
//! with a lock of their own that they take again and again.
//!
//! The same on media that fail at one access in the middle of that, a thread's or a device's: what answered EIO changed nothing,
//! and where the pool takes no more changes afterwards it may have been done, or not, for the next process; of all else nothing
//! is lost.
//!
//! Run as the other schedules are: see `sync/schedules.rs`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, Runner, thread};

use super::explore::{Bounds, explore};
use super::faults;
use super::history::{Call, History};
use super::judge;
use super::machine::{self, Machine};
use super::media::{CrashPoint, Failing, Recorder, Rng};
use super::model::Model;
use super::mutation::Mutation;
use super::run::{Copier, Image, Place, Start};
use super::tree::Tree;
use super::workload::Op;
use crate::fs::DataMode;
use crate::media::Domain;
use crate::runtime::{self, Runtime};

/// What is there first.
const BEFORE: &[&str] = &[
    "mkdir A",
    "mkdir B",
    "mkdir A/C",
    "create foo",
    "write foo 0 9000",
    "create A/foo",
    "write A/foo 0 100",
    "create B/bar",
    "mkdir D",
    "link B/bar D/bar",
    "link B/bar A/bar",
    "setxattr foo user.a 20",
    "open 0 foo",
    "open 1 B/bar",
    "sync",
];

/// What threads do: all of it around the same few names.
const OPS: &[&str] = &[
    "create foo",
    "create bar",
    "create A/foo",
    "create A/new",
    "create B/new",
    "create A/C/new",
    "mkdir A/new",
    "mkdir B/new",
    "mkdir bar",
    "symlink foo A/new",
    "symlink ~300 bar",
    "unlink foo",
    "unlink A/foo",
    "unlink A/bar",
    "unlink B/bar",
    "unlink bar",
    "rmdir A/C",
    "rmdir B",
    "rmdir A",
    "link foo bar",
    "link foo A/new",
    "link A/foo B/new",
    "link B/bar foo",
    "rename foo bar",
    "rename foo A/foo",
    "rename A/foo foo",
    "rename A/foo B/bar",
    "rename B/bar A/new",
    "rename A/bar B/bar",
    "rename foo A/foo exchange",
    "rename A/foo B/bar exchange",
    "rename foo bar noreplace",
    "rename foo bar whiteout",
    "rename A/foo B/bar whiteout",
    "rename A/C B/C",
    "rename A/C C",
    "rename B A/B",
    "rename A B/A",
    "rename A/C B exchange",
    "write foo 0 100",
    "write foo 4000 300",
    "write foo 8192 4096",
    "write foo 0 8192",
    "write foo 4096 9000",
    "write A/foo 4096 8192",
    "write A/foo 50 100",
    "append foo 100",
    "append A/foo 5000",
    "append B/bar 10",
    "truncate foo 0",
    "truncate foo 5000",
    "truncate foo 20000",
    "truncate A/foo 10",
    "fallocate foo punch 0 4096",
    "fallocate foo zero 100 5000",
    "fallocate A/foo reserve 0 9000",
    "setxattr foo user.a 10",
    "setxattr foo user.b 5000",
    "removexattr foo user.a",
    "setxattr A user.a 100",
    "chmod foo 600",
    "chmod A 700",
    "chown A/foo 5 6",
    "fsync foo",
    "write @0 3000 2000",
    "append @0 700",
    "truncate @0 5000",
    "fallocate @0 punch 0 4096",
    "setxattr @1 user.c 30",
    "append @1 4000",
    "sync",
    "tick",
];

/// Histories that are tried more often than chance would: of each thread what it does.
const GIVEN: &[&[&str]] = &[
    // A directory goes while somebody changes a file that had lost a name in it.
    &["unlink D/bar ; rmdir D", "chmod B/bar 600 ; append B/bar 10"],
    &["unlink D/bar ; rmdir D", "setxattr B/bar user.a 10", "unlink A/bar"],
    // A directory goes behind a rename, while copies are under way and somebody names epochs.
    &["rename foo A/C/foo ; rename A/C/foo foo ; rmdir A/C", "write A/foo 4096 8192", "tick"],
];
/// One history in so many is a given one.
const GIVEN_IN: u64 = 8;

const THREADS_MAX: usize = 4;
const OPS_MAX: usize = 5;
/// Crash points of one run that are looked at.
const POINTS_MAX: usize = 3;
const STACK_BYTES: usize = 4 << 20;
/// Schedules in which a history is run. The first of the second kind has no switch: it only counts steps.
const SCHEDULES_EACH: usize = 8;
/// One more than there are forced switches in a schedule of the second kind.
const SWITCHES: usize = 4;

struct Starting {
    start: Start,
    place: Place,
}

/// Pools to begin on; made once, in a schedule of its own.
fn starts() -> &'static [Starting] {
    static STARTS: OnceLock<Vec<Starting>> = OnceLock::new();
    STARTS.get_or_init(|| {
        let made: Arc<Mutex<Vec<Starting>>> = Arc::default();
        let to = made.clone();
        let make = move || {
            for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
                for image in [Image::Fresh, Image::Cleaning, Image::Crammed] {
                    for data in [DataMode::Cow, DataMode::InPlace] {
                        for copier in [Copier::Cpu, Copier::Late] {
                            let place = Place { domain, data, image, copier };
                            let start = Start::new(place).expect("a pool to begin on");
                            to.lock().push(Starting { start, place });
                        }
                    }
                }
            }
        };
        Runner::new(RandomScheduler::new(1), config()).run(make);
        std::mem::take(&mut *made.lock())
    })
}

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.max_steps = shuttle::MaxSteps::None;
    config.failure_persistence = FailurePersistence::None; // the seed repeats it
    config.silence_warnings = true; // the head of `sync/primitive` says what shuttle cannot see
    config
}

fn draw_history(seed: u64) -> History {
    let mut rng = Rng::new(seed);
    let mut below = |n: usize| rng.below(n as u64) as usize;
    let mut calls: Vec<(usize, &str)> = if seed.is_multiple_of(GIVEN_IN) {
        let threads = GIVEN[below(GIVEN.len())].iter().enumerate();
        threads.flat_map(|(thread, text)| text.split(" ; ").map(move |op| (thread, op))).collect()
    } else {
        let threads = 2 + below(THREADS_MAX - 1);
        let count = threads + below(OPS_MAX + 1 - threads);
        (0..count).map(|n| (n % threads, OPS[below(OPS.len())])).collect()
    };
    calls.sort_by_key(|(thread, _)| *thread);
    let call = |(n, (thread, op)): (usize, (usize, &str))| {
        let op = op.parse().expect("an operation");
        Call { thread, op, tag: 1000 + n as u64, begun: None, ended: None }
    };
    History::new(calls.into_iter().enumerate().map(call).collect())
}

/// Who makes the calls of a history's threads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Threads,
    Uthreads { workers: usize },
}

/// Moments of a run, each with what had been done by then.
type Moments = Vec<(CrashPoint, History)>;

/// Threads use a file system; what they did, and how it was at their fences and before their flushes.
fn run(history: History, machine: &mut Machine, by: By) -> (History, Moments, Moments) {
    let history = Arc::new(Mutex::new(history));
    let [fences, flushes]: [Arc<Mutex<Moments>>; 2] = Default::default();
    let recorder = |moments: &Arc<Mutex<Moments>>| -> Option<Recorder> {
        let (kept, seen) = (moments.clone(), history.clone());
        Some(Box::new(move |point| kept.lock().push((point.clone(), seen.lock().clone()))))
    };
    machine.fs().media().record(recorder(&fences));
    machine.fs().media().record_flushes(recorder(&flushes));
    let threads = history.lock().calls.last().map_or(0, |c| c.thread + 1);
    let lock = Arc::new(runtime::Mutex::new(()));
    let calls = (0..threads)
        .map(|thread| {
            let (mut machine, history, lock) = (machine.beside(), history.clone(), lock.clone());
            move || {
                let own: Vec<usize> = {
                    let history = history.lock();
                    (0..history.calls.len()).filter(|n| history.calls[*n].thread == thread).collect()
                };
                for n in own {
                    // Some have it through their call, which may wait for a copy.
                    let _held = (by != By::Threads && n % 2 == 0).then(|| lock.lock());
                    let (op, tag) = {
                        let mut history = history.lock();
                        let event = history.event();
                        let call = &mut history.calls[n];
                        call.begun = Some(event);
                        (call.op.clone(), call.tag)
                    };
                    let outcome = machine.attempt(&op, tag);
                    let mut history = history.lock();
                    let event = history.event();
                    history.calls[n].ended = Some((event, outcome));
                }
            }
        })
        .collect::<Vec<_>>();
    match by {
        By::Threads => {
            let running: Vec<_> = calls.into_iter().map(thread::spawn).collect();
            running.into_iter().for_each(|t| t.join().expect("no thread panics"));
        }
        By::Uthreads { workers } => {
            let options = runtime::Options { stack_bytes: STACK_BYTES, ..runtime::Options::default() };
            let runtime = Runtime::new(options).expect("a runtime");
            let mut calls = calls.into_iter();
            // Beside a single worker a thread: it is what uthreads are switched against.
            let beside = if workers == 1 { calls.next().map(thread::spawn) } else { None };
            let running: Vec<_> = calls.map(|calls| runtime.spawn(calls).expect("a uthread")).collect();
            runtime.run(workers).expect("workers");
            beside.into_iter().for_each(|t| t.join().expect("no thread panics"));
            running.into_iter().for_each(|t| t.join().expect("no uthread panics"));
        }
    }
    machine.fs().media().record(None);
    machine.fs().media().record_flushes(None);
    let history = history.lock().clone();
    let taken = |moments: Arc<Mutex<Moments>>| std::mem::take(&mut *moments.lock());
    (history, taken(fences), taken(flushes))
}

fn once(history: History, by: By) {
    let fit: Vec<_> =
        starts().iter().filter(|of| by == By::Threads || of.place.copier == Copier::Late).collect();
    let Starting { start, place } = fit[thread_rng().gen_range(0..fit.len())];
    let deferring = place.domain == Domain::PageCache;
    let without = std::env::var("LODE_SCHEDULE_WITHOUT").ok();
    let mutation = without.map(|site| Arc::new(Mutation::without_named(site)));
    let mut machine = start.machine(mutation).expect("it opens");
    for op in BEFORE {
        // On a pool that was used some of it is there.
        let _ = machine.apply(&op.parse().expect("an operation")).expect("as the oracle says");
    }
    let (history, fences, flushes) = run(history, &mut machine, by);
    let end = Tree::read(machine.fs(), []).expect("it can be read");
    if let Err(what) = history.serial(&machine.model, &end) {
        panic!("{what}\n{history}");
    }
    let end = judge::settled(machine.fs().clone());
    // An overwrite in place may be torn.
    let whole = |h: &History| {
        place.data == DataMode::Cow
            || deferring
            || !h
                .calls
                .iter()
                .any(|c| c.begun.is_some() && c.ended.is_none() && matches!(c.op, Op::Write(..)))
    };
    let killed: Vec<_> = flushes.iter().chain(&fences).filter(|(_, h)| whole(h)).collect();
    if !killed.is_empty() {
        let (point, history) = killed[thread_rng().gen_range(0..killed.len())];
        if let Err(what) = kill(point, history, &machine.model, deferring) {
            panic!("the process was killed ({place}): {what}\n{history}");
        }
    }
    let mut chosen: Vec<_> = fences.into_iter().filter(|(_, h)| whole(h)).collect();
    while chosen.len() > POINTS_MAX {
        let lot = thread_rng().gen_range(0..chosen.len());
        chosen.swap_remove(lot);
    }
    chosen.push((end, history));
    for (point, history) in chosen {
        if let Err(what) = power_fails(&point, &history, &machine.model, deferring) {
            panic!("after a power failure: {what}\n{history}");
        }
    }
}

/// What a power failure leaves is that of a serial order.
fn power_fails(point: &CrashPoint, history: &History, model: &Model, deferring: bool) -> Result<(), String> {
    let bounds = Bounds { leaves_max: 24, lane_states: 2, seed: thread_rng().gen_range(0..1 << 32) };
    let visit = |fs: &crate::fs::Fs<_>| {
        let found = Tree::read(fs, [])?;
        match deferring {
            true => history.serial_since_sync(model, &found)?,
            false => history.serial(model, &found)?,
        }
        judge::independent(fs)?;
        judge::checked(fs)?;
        Ok(found.digest())
    };
    let (_, violation) = explore(point, &bounds, &mut |media| visit(&*machine::open(media)?));
    violation.map_or(Ok(()), |v| Err(format!("{}\nlost: {}", v.what, v.lost)))
}

/// What a killed process leaves is that of a serial order, and stays when power fails behind the next open.
fn kill(point: &CrashPoint, history: &History, model: &Model, deferring: bool) -> Result<(), String> {
    let fs = machine::open_after(point.killed(), false)?;
    let found = Tree::read(&fs, [])?;
    history.serial(model, &found)?;
    judge::checked(&fs)?;
    let bounds = Bounds { leaves_max: 8, lane_states: 1, seed: thread_rng().gen_range(0..1 << 32) };
    let (_, violation) = explore(&fs.media().crash_point(), &bounds, &mut |media| {
        let left = Tree::read(&*machine::open(media)?, [])?;
        match deferring {
            true => history.serial_since_sync(model, &left)?,
            false if left.named != found.named => return Err(left.differs(&found)),
            false => {}
        }
        Ok(left.digest())
    });
    violation
        .map_or(Ok(()), |v| Err(format!("power failed behind the next open: {}\nlost: {}", v.what, v.lost)))
}

/// Threads use a file system whose media fail at one access, unless `accesses` is still 0: so many they made at most.
fn once_failing(history: History, by: By, accesses: &AtomicU64) {
    let Starting { start, place } = &starts()[thread_rng().gen_range(0..starts().len())];
    let deferring = place.domain == Domain::PageCache;
    let mut machine = start.machine(None).expect("it opens");
    for op in BEFORE {
        let _ = machine.apply(&op.parse().expect("an operation")).expect("as the oracle says");
    }
    let most = accesses.load(Ordering::Relaxed);
    let nth = if most == 0 { 0 } else { thread_rng().gen_range(1..=most) };
    let failing = if thread_rng().r#gen() { Failing::Once } else { Failing::Twice };
    machine.fs().media().fail_access(nth, failing);
    let (history, fences, _) = run(history, &mut machine, by);
    accesses.fetch_max(machine.fs().media().accesses(), Ordering::Relaxed);
    let point = machine.fs().media().crash_point();
    let live = Tree::read(machine.fs(), []);
    let say = |what: String| -> ! { panic!("access {nth} fails, {failing:?} ({place}): {what}\n{history}") };
    let is_stopped = faults::is_stopped(machine.fs()).unwrap_or_else(|e| say(e));
    // An overwrite in place that failed, or was cut short, has happened in part.
    let is_torn = |h: &History| {
        let is_whole = |c: &Call| c.ended.is_some_and(|(_, answered)| answered.is_ok());
        place.data == DataMode::InPlace
            && !deferring
            && h.calls.iter().any(|c| c.begun.is_some() && matches!(c.op, Op::Write(..)) && !is_whole(c))
    };
    if !is_stopped {
        let held = live.and_then(|live| {
            if !is_torn(&history) {
                history.without_failed().serial(&machine.model, &live)?;
            }
            judge::checked(machine.fs())
        });
        held.unwrap_or_else(|e| say(format!("afterwards: {e}")));
    }
    let mut points = vec![(point, history.clone())];
    if !fences.is_empty() {
        points.push(fences[thread_rng().gen_range(0..fences.len())].clone());
    }
    for (point, history) in points.into_iter().filter(|(_, h)| !is_torn(h)) {
        let history = history.with_failed_perhaps();
        kill(&point, &history, &machine.model, deferring)
            .unwrap_or_else(|e| say(format!("the process was killed: {e}")));
        power_fails(&point, &history, &machine.model, deferring)
            .unwrap_or_else(|e| say(format!("after a power failure: {e}")));
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// `LODE_SCHEDULES` histories, from `LODE_SCHEDULE_SEED` on. `LODE_SCHEDULE_WITHOUT` leaves out a step, as
/// `lode crash --mutants` names it ("fence at src/fs/namei.rs:302"): then it should fail.
#[test]
fn threads_have_a_serial_order_and_power_failures_keep_it() {
    explore_histories(|seed| play(seed, By::Threads));
}

#[test]
fn uthreads_do_too() {
    explore_histories(|seed| play(seed, by_uthreads(seed)));
}

#[test]
fn they_do_where_an_access_fails() {
    explore_histories(|seed| {
        let by = if turn(seed) % 2 == 0 { By::Threads } else { by_uthreads(seed / 2) };
        let (history, accesses) = (draw_history(seed), AtomicU64::new(0));
        Box::new(move || once_failing(history.clone(), by, &accesses))
    });
}

fn by_uthreads(seed: u64) -> By {
    By::Uthreads { workers: 1 + (turn(seed) % 2) as usize }
}

/// Even and odd for given histories, too, whose seeds are all even.
fn turn(seed: u64) -> u64 {
    seed + seed / GIVEN_IN
}

/// What is run in schedules.
type Played = Box<dyn Fn() + Send + Sync>;

fn play(seed: u64, by: By) -> Played {
    let history = draw_history(seed);
    Box::new(move || once(history.clone(), by))
}

fn explore_histories(played: fn(u64) -> Played) {
    starts();
    let first = setting("LODE_SCHEDULE_SEED", 1);
    for seed in first..first + setting("LODE_SCHEDULES", 300) {
        let once = played(seed);
        let random = RandomScheduler::new_from_seed(seed, SCHEDULES_EACH);
        let switching = PctScheduler::new_from_seed(seed, SWITCHES, SCHEDULES_EACH);
        let run = || match seed % 3 {
            0 => Runner::new(random, config()).run(once),
            _ => Runner::new(switching, config()).run(once),
        };
        let held = catch_unwind(AssertUnwindSafe(run));
        assert!(held.is_ok(), "repeated by LODE_SCHEDULE_SEED={seed} LODE_SCHEDULES=1");
    }
}
