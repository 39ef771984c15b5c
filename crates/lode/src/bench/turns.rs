//! Systems take turns: A B C A B C ..., the order rotating, so that a slow second of the machine
//! slows every system and not one of them.
//!
//! Each worker thread is pinned to its own core (with more threads than cores: shares one, which a note says) and lives
//! for the whole run. A warm-up round, which
//! is not reported, precedes the measured ones; measured rounds are never dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use lodestone::mover::node::cpu_list;
use lodestone::wait::spent::{self, Spent};
use lodestone::{Error, Result};
use rustix::thread::CpuSet;

use super::clock::{Clock, Histogram, device_cpu_s, machine_cpu_s, process_cpu_s};
use super::machine::Memory;
use super::report::{Row, median};
use super::rows::RowSpec;
use super::worker::{Buffers, Job, Slice, Worker, run};

const GIB: f64 = (1u64 << 30) as f64;

/// A [`Worker`] of any system.
pub trait Seat: Send {
    fn run(&mut self, job: &Job, buffers: &mut Buffers, start: &dyn Fn(), done: &dyn Fn()) -> Result<Slice>;
}

impl<W: Worker> Seat for W {
    fn run(&mut self, job: &Job, buffers: &mut Buffers, start: &dyn Fn(), done: &dyn Fn()) -> Result<Slice> {
        run(self, job, buffers, start, done)
    }
}

/// Whose CPU time a system is charged with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuScope {
    /// It runs in the calling threads.
    Process,
    /// The same beside threads that stand for a device: its time is no processor's.
    BesideDevice,
    /// Kernel threads work for it too.
    Machine,
}

impl CpuScope {
    pub fn name(self) -> &'static str {
        match self {
            CpuScope::Process => "process",
            CpuScope::BesideDevice => "process, without the emulated device",
            CpuScope::Machine => "machine",
        }
    }

    /// What to subtract from [`since`](CpuScope::since).
    pub fn begin(self) -> f64 {
        match self {
            CpuScope::Process => process_cpu_s(),
            CpuScope::Machine => machine_cpu_s(),
            // To ask for the device's time takes time itself: not between two readings.
            CpuScope::BesideDevice => {
                let device_s = device_cpu_s();
                process_cpu_s() - device_s
            }
        }
    }

    /// CPU seconds since then.
    pub fn since(self, begun: f64) -> f64 {
        match self {
            CpuScope::Process => process_cpu_s() - begun,
            CpuScope::Machine => machine_cpu_s() - begun,
            CpuScope::BesideDevice => {
                let process_s = process_cpu_s();
                (process_s - device_cpu_s() - begun).max(0.0)
            }
        }
    }
}

/// One system with one thread count.
pub struct Contestant {
    pub system: String,
    pub scope: CpuScope,
    pub promise: &'static str,
    /// Of its pool.
    pub memory: Option<Memory>,
    /// False for raw memory.
    pub has_names: bool,
    /// Its engine has callers wait for each other: what that takes of the CPU is counted apart.
    pub waits: bool,
    /// One per thread; `None` while a thread has it.
    pub seats: Vec<Option<Box<dyn Seat>>>,
}

/// What one contestant did in one round.
#[derive(Clone, Copy, Default)]
struct Round {
    ops: f64,
    wall_s: f64,
    cpu_s: f64,
    /// Of that, what threads spent on waiting for each other's copies.
    waiting_cpu_s: f64,
    p50_us: f64,
    p99_us: f64,
}

/// The worker threads.
pub struct Crew {
    members: Vec<Member>,
    /// Busy seconds per second of the machine while this process sleeps.
    idle_rate: f64,
}

struct Member {
    tasks: Option<Sender<Task>>,
    events: Receiver<Event>,
    thread: Option<JoinHandle<()>>,
}

struct Task {
    seat: Box<dyn Seat>,
    job: Arc<Job>,
    gates: Arc<Gates>,
}

/// Where the threads of one slice wait for each other, so that only timed work is charged.
#[derive(Default)]
struct Gates {
    /// All are prepared, the CPU clock has been read.
    go: AtomicBool,
    /// All have ended, the CPU clock has been read.
    counted: AtomicBool,
}

enum Event {
    Ready,
    Done,
    Result(Box<dyn Seat>, Result<Slice>),
}

const IDLE_SAMPLE: std::time::Duration = std::time::Duration::from_millis(400);

impl Crew {
    pub fn new(threads: usize) -> Result<Crew> {
        let cores = allowed_cores()?;
        let members = (0..threads).map(|i| Member::spawn(cores[i % cores.len()])).collect();
        let before = machine_cpu_s();
        std::thread::sleep(IDLE_SAMPLE);
        let idle_rate = (machine_cpu_s() - before) / IDLE_SAMPLE.as_secs_f64();
        Ok(Crew { members, idle_rate })
    }

    pub fn idle_rate(&self) -> f64 {
        self.idle_rate
    }

    /// One slice of `contestant` on as many threads as it has seats.
    fn slice(&self, contestant: &mut Contestant, job: &Arc<Job>) -> Result<Round> {
        let gates = Arc::new(Gates::default());
        let members = &self.members[..contestant.seats.len()];
        for (member, seat) in members.iter().zip(&mut contestant.seats) {
            let seat = seat.take().ok_or_else(died)?;
            let task = Task { seat, job: job.clone(), gates: gates.clone() };
            member.tasks.as_ref().expect("the crew is at work").send(task).map_err(|_| died())?;
        }
        let ready: Result<Vec<_>> = members.iter().map(Member::event).collect();
        spent::count(contestant.waits);
        let (cpu, waits) = (contestant.scope.begin(), Spent::so_far());
        gates.go.store(true, Ordering::Release);
        let done = ready.and_then(|_| members.iter().try_for_each(|m| m.event().map(drop)));
        let cpu_s = contestant.scope.since(cpu);
        let waiting_cpu_s = Spent::so_far().since(&waits).cpu_ns as f64 / 1e9;
        gates.counted.store(true, Ordering::Release);
        members.iter().for_each(Member::unpark);
        done?;
        let mut slices = Vec::new();
        for (member, seat) in members.iter().zip(&mut contestant.seats) {
            let Event::Result(back, slice) = member.event()? else { return Err(died()) };
            *seat = Some(back);
            slices.push(slice.map_err(|e| e.context(&contestant.system))?);
        }
        Ok(Round { cpu_s, waiting_cpu_s, ..summary(&slices) })
    }

    /// Runs `specs` in order, each by all of `contestants` in turn, `rounds` times after a warm-up.
    /// Name rows go together, because each works on what the one before left.
    pub fn rounds(
        &self,
        specs: &[&'static RowSpec],
        contestants: &mut [Contestant],
        rounds: usize,
        job_of: &dyn Fn(&RowSpec, u64) -> Job,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>> {
        let mut done: Vec<Vec<Vec<Round>>> = vec![vec![Vec::new(); contestants.len()]; specs.len()];
        for round in 0..=rounds {
            for (spec, done) in specs.iter().zip(&mut done) {
                progress(&format!("{} round {round} of {rounds}", spec.name));
                let job = Arc::new(job_of(spec, round as u64));
                for turn in 0..contestants.len() {
                    let who = (turn + round) % contestants.len();
                    let contestant = &mut contestants[who];
                    if spec.work.on_names() && !contestant.has_names {
                        continue;
                    }
                    let result = self.slice(contestant, &job).map_err(|e| e.context(spec.name))?;
                    if round > 0 {
                        done[who].push(result);
                    }
                }
            }
        }
        let mut rows = Vec::new();
        for (spec, done) in specs.iter().zip(&done) {
            let with_rounds = contestants.iter().zip(done).filter(|(_, rounds)| !rounds.is_empty());
            rows.extend(with_rounds.map(|(c, rounds)| self.row(spec, c, rounds)));
        }
        Ok(rows)
    }

    fn row(&self, spec: &RowSpec, who: &Contestant, rounds: &[Round]) -> Row {
        let of = |f: &dyn Fn(&Round) -> f64| -> Vec<f64> { rounds.iter().map(f).collect() };
        let rates = of(&|r| r.ops / r.wall_s);
        let ops_per_s = median(&rates);
        let cpu_s_per_op = match who.scope {
            CpuScope::Process | CpuScope::BesideDevice => median(&of(&|r| r.cpu_s / r.ops)),
            // Steps of 10 ms are too coarse for one round: all rounds together.
            CpuScope::Machine => {
                let sum = |f: &dyn Fn(&Round) -> f64| -> f64 { rounds.iter().map(f).sum() };
                (sum(&|r| r.cpu_s) - self.idle_rate * sum(&|r| r.wall_s)) / sum(&|r| r.ops)
            }
        };
        let cpu_s_per_op = (cpu_s_per_op > 0.0).then_some(cpu_s_per_op);
        // Where the profile leaves a size to the CPU nobody waits, and nothing is to be said of it.
        let waited = who.waits && rounds.iter().any(|r| r.waiting_cpu_s > 0.0);
        let gib_per_op = (spec.bytes > 0).then_some(spec.bytes as f64 / GIB);
        Row {
            name: spec.name.to_string(),
            system: who.system.clone(),
            threads: who.seats.len(),
            ops_per_s,
            gib_per_s: gib_per_op.map(|gib| gib * ops_per_s),
            p50_us: median(&of(&|r| r.p50_us)),
            p99_us: median(&of(&|r| r.p99_us)),
            cpu_s_per_gib: cpu_s_per_op.zip(gib_per_op).map(|(s, gib)| s / gib),
            cpu_us_per_op: cpu_s_per_op.map(|s| s * 1e6),
            waiting_share: waited
                .then(|| median(&of(&|r| r.waiting_cpu_s / (r.cpu_s - r.waiting_cpu_s).max(1e-9)))),
            cpu_scope: who.scope.name(),
            promise: who.promise,
            memory: who.memory.clone(),
            rounds: rounds.len(),
            ops_per_s_min: rates.iter().copied().fold(ops_per_s, f64::min),
            ops_per_s_max: rates.iter().copied().fold(ops_per_s, f64::max),
            ops_per_s_rounds: rates,
            value: None,
            unit: None,
        }
    }
}

/// All threads of one slice as one: from the first start to the last end.
fn summary(slices: &[Slice]) -> Round {
    let clock = Clock::get();
    let began = slices.iter().map(|s| s.began).min().unwrap_or(0);
    let ended = slices.iter().map(|s| s.ended).max().unwrap_or(0);
    let mut latency = Histogram::default();
    slices.iter().for_each(|s| latency.merge(&s.latency));
    let us = |share| clock.ns(latency.percentile(share).unwrap_or(0.0) as u64) / 1e3;
    Round {
        ops: slices.iter().map(|s| s.ops as f64).sum(),
        wall_s: clock.ns(ended - began) / 1e9,
        cpu_s: 0.0,
        waiting_cpu_s: 0.0,
        p50_us: us(0.50),
        p99_us: us(0.99),
    }
}

fn died() -> Error {
    Error::message(libc::EIO, "bench::turns", "a bench thread died; its panic is above")
}

/// Keeps the calling thread on one core.
pub fn pin_thread(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    // Unpinned is worse, not wrong: the result then shows it as spread.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// The processors that this process may use: one of each core first, then those that share a core with one before.
pub fn allowed_cores() -> Result<Vec<usize>> {
    Ok(apart(&allowed()?, &siblings).0)
}

/// How many cores these are.
pub fn separate_cores() -> Result<usize> {
    Ok(apart(&allowed()?, &siblings).1)
}

fn allowed() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)
        .map_err(|e| Error::message(e.raw_os_error(), "bench::turns", format!("sched_getaffinity: {e}")))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect())
}

/// The processors of the core that this one is of; none where the kernel does not say.
fn siblings(cpu: usize) -> Vec<usize> {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(file).ok().and_then(|text| cpu_list(&text)).unwrap_or_default()
}

/// Processors, of which `siblings` says which share a core: those in front that share none, and how many these are.
fn apart(allowed: &[usize], siblings: &dyn Fn(usize) -> Vec<usize>) -> (Vec<usize>, usize) {
    let before = |cpu: usize| siblings(cpu).iter().filter(|s| **s < cpu && allowed.contains(s)).count();
    let mut ranked: Vec<(usize, usize)> = allowed.iter().map(|cpu| (before(*cpu), *cpu)).collect();
    ranked.sort_unstable();
    let cores = ranked.iter().filter(|(before, _)| *before == 0).count();
    (ranked.into_iter().map(|(_, cpu)| cpu).collect(), cores)
}

impl Member {
    fn spawn(core: usize) -> Member {
        let (tasks, inbox) = channel::<Task>();
        let (outbox, events) = channel::<Event>();
        let work = move || {
            pin_thread(core);
            let mut buffers = Buffers::new();
            for task in inbox {
                task.perform(&mut buffers, &outbox);
            }
        };
        Member { tasks: Some(tasks), events, thread: Some(std::thread::spawn(work)) }
    }

    fn unpark(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn event(&self) -> Result<Event> {
        self.events.recv().map_err(|_| died())
    }
}

impl Task {
    fn perform(mut self, buffers: &mut Buffers, outbox: &Sender<Event>) {
        // A closed outbox means that the run was given up; the result then interests nobody.
        let tell = |event| drop(outbox.send(event));
        let done_told = std::cell::Cell::new(false);
        // A running thread's CPU time is brought up to date when it asks for it, else by the next tick.
        let settle_cpu_clock = process_cpu_s;
        let done = || {
            settle_cpu_clock();
            tell(Event::Done);
            done_told.set(true);
            while !self.gates.counted.load(Ordering::Acquire) {
                std::thread::park();
            }
        };
        let start = || {
            settle_cpu_clock();
            tell(Event::Ready);
            while !self.gates.go.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        let result = self.seat.run(&self.job, buffers, &start, &done);
        if !done_told.get() {
            done();
        }
        tell(Event::Result(self.seat, result));
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_share_a_core_come_last() {
        // As Intel numbers them, as AMD's firmware often does, and one that shares with nobody.
        let far = |cpu: usize| vec![cpu % 4, cpu % 4 + 4];
        let near = |cpu: usize| vec![cpu / 2 * 2, cpu / 2 * 2 + 1];
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(apart(&all, &far), (all.clone(), 4));
        assert_eq!(apart(&all, &near), (vec![0, 2, 4, 6, 1, 3, 5, 7], 4));
        assert_eq!(apart(&all, &|cpu| vec![cpu]), (all.clone(), 8));
        assert_eq!(apart(&all, &|_| Vec::new()), (all.clone(), 8), "the kernel does not say");
        // Whom the process may not use shares nothing with anybody.
        assert_eq!(apart(&[1, 2, 3], &near), (vec![1, 2, 3], 2));
        assert_eq!(apart(&[5, 7], &near), (vec![5, 7], 2));
        assert_eq!(apart(&[], &near), (vec![], 0));
    }
}
