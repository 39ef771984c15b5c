//! One engine's turn: so many threads copy at random offsets for a slice of time, and what that took is counted.
//!
//! CPU time is that of all threads of this process, so of an engine's own threads too; that of threads which stand for a
//! device is counted apart. Only what lies between two gates counts: threads, buffers and their pages are there before.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lodestone::fs::{Cred, Node};
use lodestone::mover::EngineKind;
use lodestone::mover::schedule::Direction;

use super::bed::Bed;
use super::plan::OP_BYTES_MAX;
use crate::bench::{Pages, Random, device_cpu_s, pin_thread, process_cpu_s, thread_cpu_ns};
use crate::failure::{Failure, Result};

/// Consecutive writes begin at different pages of the source, so that they carry different bytes.
const SOURCES: usize = 4;
const PAGE: usize = 4096;

/// Who copies what.
pub struct Load<'a> {
    pub engine: EngineKind,
    pub direction: Direction,
    pub bytes: usize,
    /// The CPU of each thread.
    pub cpus: &'a [usize],
    pub slice: Duration,
    /// Each thread copies so much at most: of writes as much as the pool has room for.
    pub bytes_max: u64,
    pub seed: u64,
}

/// What it took.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub bytes: u64,
    /// From the first thread's start on, until one has ended: then the others copy no more.
    pub wall_s: f64,
    /// Copied until then.
    pub bytes_in_time: f64,
    /// Of all threads but those that stand for a device.
    pub cpu_s: f64,
    pub device_s: f64,
    /// The share of the copies that the engine took, of 1.
    pub taken: f64,
}

impl Turn {
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes_in_time / self.wall_s
    }

    pub fn cpu_s_per_byte(&self) -> f64 {
        self.cpu_s / self.bytes as f64
    }

    pub fn device_s_per_byte(&self) -> f64 {
        self.device_s / self.bytes as f64
    }
}

/// What one thread did.
struct Done {
    copies: u64,
    began: Instant,
    /// The last copy's.
    last_began: Instant,
    ended: Instant,
    /// CPU time of this thread, by its own clock.
    cpu_ns: u64,
}

impl Done {
    /// Of the last copy, which may have gone on when others had ended, a part.
    fn copies_until(&self, end: Instant) -> f64 {
        let last = (self.ended - self.last_began).as_secs_f64();
        let in_time = end.saturating_duration_since(self.last_began).as_secs_f64();
        let share = if last > 0.0 { (in_time / last).min(1.0) } else { 1.0 };
        (self.copies - 1) as f64 + share
    }
}

pub fn turn(bed: &Bed, load: &Load<'_>) -> Result<Turn> {
    let (ready, go, done, counted) = (gate(load), gate(load), gate(load), gate(load));
    let (gates, over) = ([&ready, &go, &done, &counted], AtomicBool::new(false));
    let moved = bed.fs().mover().moved();
    let (cpu_s, device_s, results) = std::thread::scope(|scope| {
        let over = &over;
        let work = |n: usize| move || copier(bed, load, n, gates, over);
        let threads: Vec<_> = (0..load.cpus.len()).map(|n| scope.spawn(work(n))).collect();
        ready.wait();
        // To ask for the device's time takes time itself: not between the two readings.
        let device_s = || if load.engine.emulated() { device_cpu_s() } else { 0.0 };
        let (device_before, before) = (device_s(), process_cpu_s());
        go.wait();
        done.wait();
        let (after, device_after) = (process_cpu_s(), device_s());
        counted.wait();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        (after - before, device_after - device_before, results)
    });
    let died = |_| Failure::failed("a thread that copied died; its panic is above");
    let all = results.into_iter().map(|result| result.map_err(died)?).collect::<Result<Vec<Done>>>()?;
    let copies: u64 = all.iter().map(|done| done.copies).sum();
    let began = all.iter().map(|done| done.began).min().expect("there is a thread");
    let ended = all.iter().map(|done| done.ended).min().expect("there is a thread");
    // A copy that a region's end, or that of free space, divides is more than one for the engine.
    let taken = (bed.fs().mover().moved().copies - moved.copies) as f64 / copies as f64;
    Ok(Turn {
        bytes: copies * load.bytes as u64,
        wall_s: (ended - began).as_secs_f64(),
        bytes_in_time: all.iter().map(|done| done.copies_until(ended) * load.bytes as f64).sum(),
        // A device's time is told to the tick; that of the threads that copied is known.
        cpu_s: (cpu_s - device_s).max(all.iter().map(|done| done.cpu_ns).sum::<u64>() as f64 / 1e9),
        device_s,
        taken: taken.min(1.0),
    })
}

/// Where all threads and the one that counts meet.
fn gate(load: &Load<'_>) -> Barrier {
    Barrier::new(load.cpus.len() + 1)
}

/// A thread's part. It passes all gates, whatever happens: others wait there.
fn copier(
    bed: &Bed,
    load: &Load<'_>,
    n: usize,
    [ready, go, done, counted]: [&Barrier; 4],
    over: &AtomicBool,
) -> Result<Done> {
    pin_thread(load.cpus[n]);
    let threads = load.cpus.len();
    // Its own: threads that write to one file wait for each other.
    let files: Vec<Node> = bed.files(load.engine).into_iter().skip(n).step_by(threads).collect();
    assert!(!files.is_empty(), "there is a file for each thread");
    let mut random = Random::new(load.seed * threads as u64 + n as u64);
    let mut source = Pages::new(OP_BYTES_MAX + (SOURCES - 1) * PAGE);
    random.fill(source.bytes_mut());
    let mut target = Pages::new(OP_BYTES_MAX);
    target.bytes_mut().fill(0xa5);
    ready.wait();
    go.wait();
    let result = copy(bed, load, &files, &mut random, &source, &mut target, over);
    over.store(true, Ordering::Relaxed);
    // A running thread's CPU time is brought up to date when it asks for it, else by the next tick.
    process_cpu_s();
    done.wait();
    counted.wait();
    let (result, last) = result?;
    if let (Direction::Write, Some((file, offset, from))) = (load.direction, last) {
        check(bed, load, &files[file], offset, &source.bytes()[from..from + load.bytes])?;
    }
    Ok(result)
}

/// The last write: which file, where, and which bytes of the source.
type Last = Option<(usize, u64, usize)>;

fn copy(
    bed: &Bed,
    load: &Load<'_>,
    files: &[Node],
    random: &mut Random,
    source: &Pages,
    target: &mut Pages,
    over: &AtomicBool,
) -> Result<(Done, Last)> {
    let (fs, cred) = (bed.fs(), Cred::root());
    let blocks = bed.file_bytes / load.bytes as u64;
    let copies_max = (load.bytes_max / load.bytes as u64).max(1);
    let (mut copies, mut last) = (0, None);
    let cpu_before = thread_cpu_ns();
    let began = Instant::now();
    let (mut last_began, mut ended) = (began, began);
    while copies == 0 || ended - began < load.slice && copies < copies_max && !over.load(Ordering::Relaxed) {
        last_began = ended;
        let file = random.below(files.len() as u64) as usize;
        let offset = random.below(blocks) * load.bytes as u64;
        match load.direction {
            Direction::Write => {
                let from = copies as usize % SOURCES * PAGE;
                fs.write_at(&cred, &files[file], offset, &source.bytes()[from..from + load.bytes], false)?;
                last = Some((file, offset, from));
            }
            Direction::Read => {
                let read = fs.read_at(&files[file], offset, &mut target.bytes_mut()[..load.bytes])?;
                assert_eq!(read, load.bytes, "reads are inside the file");
            }
        }
        copies += 1;
        ended = Instant::now();
    }
    let cpu_ns = thread_cpu_ns() - cpu_before;
    Ok((Done { copies, began, last_began, ended, cpu_ns }, last))
}

/// Reads the last write back: a measure that does not look at results measures mistakes.
fn check(bed: &Bed, load: &Load<'_>, file: &Node, offset: u64, wanted: &[u8]) -> Result<()> {
    let mut got = vec![0; load.bytes];
    bed.fs().read_at(file, offset, &mut got)?;
    match got == wanted {
        true => Ok(()),
        false => Err(Failure::failed(format_args!(
            "engine {}: {} bytes at {offset} are not what was written last; please report this",
            load.engine, load.bytes
        ))),
    }
}
