//! One thread's view of a system under measure, and the loop that times it.
//!
//! Every system runs the same loop with the same offsets, names and buffers; the loop is compiled for
//! each, so that no call goes through a table. After a slice the worker reads its last write back, or
//! counts its names: a bench that does not check results measures mistakes.

use std::time::Duration;

use lodestone::{Error, Result};

use super::clock::{Clock, Histogram};
use super::rows::Work;

/// The operations of one system, bound to one private file and one private directory.
pub trait Worker: Send {
    fn read(&mut self, at: u64, dst: &mut [u8]) -> Result<()>;
    fn write(&mut self, at: u64, src: &[u8]) -> Result<()>;
    /// Begins a fresh, empty file that [`append`](Worker::append) extends. Not timed.
    fn append_begin(&mut self) -> Result<()>;
    fn append(&mut self, src: &[u8]) -> Result<()>;
    /// Removes that file and says how many bytes it had. Not timed.
    fn append_end(&mut self) -> Result<u64>;
    fn create(&mut self, name: &Name) -> Result<()>;
    fn stat(&mut self, name: &Name) -> Result<()>;
    fn rename(&mut self, from: &Name, to: &Name) -> Result<()>;
    fn unlink(&mut self, name: &Name) -> Result<()>;
    /// Reads the whole directory; the count leaves out "." and "..".
    fn readdir(&mut self) -> Result<u64>;
    /// Until this is called again with true, name operations need not be durable: what a slow system
    /// has not done when its time is up is then done without measuring.
    fn set_durable(&mut self, _durable: bool) {}
}

/// A file name of fixed length with its closing NUL, so that no operation pays for making one.
#[derive(Clone, Copy)]
pub struct Name([u8; NAME_LEN + 1]);

const NAME_LEN: usize = 14;

impl Name {
    fn new(kind: char, n: usize) -> Name {
        let text = format!("{kind}ile.{n:09}\0");
        Name(text.as_bytes().try_into().expect("nine digits hold every count of names"))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0[..NAME_LEN]
    }

    pub fn c_str(&self) -> &std::ffi::CStr {
        // SAFETY: `new`, the only maker, ends the bytes with a NUL and puts none before it. The check is
        // left out because this runs inside the timed loop of the kernel's peers only.
        unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(&self.0) }
    }
}

/// The names of a directory: as created, in the order of creation and in a random one, and as renamed to, in
/// that random one. Each list is read from front to back, so that no cache miss of the loop's own is measured.
pub struct Names {
    pub created: Vec<Name>,
    pub visited: Vec<Name>,
    pub renamed: Vec<Name>,
}

impl Names {
    pub fn new(count: usize) -> Names {
        let mut order: Vec<u32> = (0..count as u32).collect();
        let mut random = Random(0x5eed);
        for i in (1..count).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
        let names =
            |kind, order: &mut dyn Iterator<Item = usize>| order.map(|n| Name::new(kind, n)).collect();
        let mut random_order = order.iter().map(|&n| n as usize);
        Names {
            created: names('f', &mut (0..count)),
            visited: names('f', &mut random_order.clone()),
            renamed: names('g', &mut random_order),
        }
    }
}

/// xorshift64*: a few cycles per number, so the generator is not what is measured.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    #[inline(always)]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let mixed = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        ((u128::from(mixed) * u128::from(bound)) >> 64) as u64
    }

    /// Whole pages, the same ones after 65: what stands in a wrong place differs from what should.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        const DISTINCT_BYTES: usize = 65 * PAGE;
        let mut filled = bytes.len().min(DISTINCT_BYTES);
        for word in bytes[..filled].chunks_exact_mut(8) {
            word.copy_from_slice(&self.below(u64::MAX).to_le_bytes());
        }
        while filled < bytes.len() {
            let more = filled.min(bytes.len() - filled);
            bytes.copy_within(..more, filled);
            filled += more;
        }
    }
}

/// One slice of one row, the same for every system.
#[derive(Clone)]
pub struct Job {
    pub work: Work,
    pub bytes: usize,
    pub file_bytes: u64,
    /// Bytes an append file may grow to in one slice.
    pub append_bytes_max: u64,
    pub slice: Duration,
    /// Differs between rounds, never between systems.
    pub seed: u64,
    pub names: std::sync::Arc<Names>,
}

/// Where a thread writes from and reads to, page-aligned.
///
/// Consecutive writes carry different bytes by starting at different pages of one random block. Nothing
/// is stored into it while the clock runs: a store just before a copy would stall the copy's first load
/// until all stores before it have left the core, and that would be measured instead.
pub struct Buffers {
    source: Pages,
    target: Pages,
}

const SOURCES: usize = 4;
const PAGE: usize = 4096;
/// The largest operation of any row.
pub const OP_BYTES_MAX: usize = 1 << 20;

impl Buffers {
    pub fn new() -> Buffers {
        let source = Pages::new(OP_BYTES_MAX + (SOURCES - 1) * PAGE);
        let mut target = Pages::new(OP_BYTES_MAX);
        target.bytes_mut().fill(0xa5);
        Buffers { source, target }
    }

    fn refill(&mut self, seed: u64) {
        let mut random = Random::new(seed);
        random.fill(self.source.bytes_mut());
    }

    /// What operation `i` writes.
    #[inline(always)]
    fn source(&self, i: u64, bytes: usize) -> &[u8] {
        let at = i as usize % SOURCES * PAGE;
        &self.source.bytes()[at..at + bytes]
    }
}

/// Bytes that begin at a page.
pub struct Pages {
    storage: Vec<u8>,
    skew: usize,
    len: usize,
}

impl Pages {
    pub fn new(len: usize) -> Pages {
        let storage = vec![0; len + PAGE];
        let skew = storage.as_ptr().align_offset(PAGE);
        Pages { storage, skew, len }
    }

    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        &self.storage[self.skew..self.skew + self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.skew..self.skew + self.len]
    }
}

/// What one thread did in one slice.
pub struct Slice {
    pub ops: u64,
    pub began: u64,
    pub ended: u64,
    pub latency: Histogram,
}

/// The loop's ends: operations and time, whichever is first.
struct Timed {
    clock: Clock,
    slice: Slice,
    deadline: u64,
}

impl Timed {
    fn begin(job: &Job) -> Timed {
        let clock = Clock::get();
        let latency = Histogram::default();
        let began = clock.stamp();
        let deadline = began.saturating_add(clock.ticks(job.slice));
        Timed { clock, slice: Slice { ops: 0, began, ended: began, latency }, deadline }
    }

    /// Repeats `op(0)`, `op(1)` ... at most `ops_max` times.
    #[inline(always)]
    fn repeat(&mut self, ops_max: u64, mut op: impl FnMut(u64) -> Result<()>) -> Result<()> {
        let mut i = 0;
        while i < ops_max {
            op(i)?;
            i += 1;
            let now = self.clock.stamp();
            self.slice.latency.add(now - self.slice.ended);
            self.slice.ended = now;
            if now >= self.deadline {
                break;
            }
        }
        self.slice.ops = i;
        Ok(())
    }
}

/// Prepares, waits in `start` for the others, times, reports `done`, and checks one slice. `start` is
/// called whatever happens, because others wait there too.
pub fn run<W: Worker>(
    worker: &mut W,
    job: &Job,
    buffers: &mut Buffers,
    start: &dyn Fn(),
    done: &dyn Fn(),
) -> Result<Slice> {
    let prepared = if job.work == Work::Append { worker.append_begin() } else { Ok(()) };
    buffers.refill(job.seed);
    start();
    prepared?;
    let mut timed = Timed::begin(job);
    let outcome = match job.work {
        Work::WriteRandom | Work::WriteSequential => write(worker, job, buffers, &mut timed),
        Work::ReadRandom | Work::ReadSequential => read(worker, job, buffers, &mut timed),
        Work::Append => append(worker, job, buffers, &mut timed),
        Work::Readdir => readdir(worker, job, &mut timed),
        _ => names(worker, job, 0, &mut timed),
    };
    done();
    outcome?;
    check(worker, job, buffers, &timed.slice)?;
    Ok(timed.slice)
}

/// Offsets of a slice: random blocks, or one pass after the other.
struct Offsets {
    random: Option<Random>,
    blocks: u64,
    bytes: u64,
}

impl Offsets {
    fn of(job: &Job) -> Offsets {
        let random = matches!(job.work, Work::WriteRandom | Work::ReadRandom).then(|| Random::new(job.seed));
        Offsets { random, blocks: job.file_bytes / job.bytes as u64, bytes: job.bytes as u64 }
    }

    #[inline(always)]
    fn next(&mut self, i: u64) -> u64 {
        let block = match &mut self.random {
            Some(random) => random.below(self.blocks),
            None => i % self.blocks,
        };
        block * self.bytes
    }
}

fn write<W: Worker>(worker: &mut W, job: &Job, buffers: &Buffers, timed: &mut Timed) -> Result<()> {
    let mut offsets = Offsets::of(job);
    timed.repeat(u64::MAX, |i| worker.write(offsets.next(i), buffers.source(i, job.bytes)))
}

fn read<W: Worker>(worker: &mut W, job: &Job, buffers: &mut Buffers, timed: &mut Timed) -> Result<()> {
    let mut offsets = Offsets::of(job);
    let target = &mut buffers.target.bytes_mut()[..job.bytes];
    timed.repeat(u64::MAX, |i| worker.read(offsets.next(i), target))
}

fn append<W: Worker>(worker: &mut W, job: &Job, buffers: &Buffers, timed: &mut Timed) -> Result<()> {
    let ops_max = job.append_bytes_max / job.bytes as u64;
    timed.repeat(ops_max, |i| worker.append(buffers.source(i, job.bytes)))
}

/// An operation is one entry; its latency is its share of a pass over the directory.
fn readdir<W: Worker>(worker: &mut W, job: &Job, timed: &mut Timed) -> Result<()> {
    let want = job.names.created.len() as u64;
    let Timed { clock, slice, deadline } = timed;
    while slice.ended < *deadline {
        let got = worker.readdir()?;
        if got != want {
            return Err(wrong(format!("readdir reported {got} of {want} names")));
        }
        let now = clock.stamp();
        slice.latency.add((now - slice.ended) / want);
        slice.ended = now;
        slice.ops += want;
    }
    Ok(())
}

/// Name operations from the `from`th in the row's order.
fn names<W: Worker>(worker: &mut W, job: &Job, from: u64, timed: &mut Timed) -> Result<()> {
    let Names { created, visited, renamed } = &*job.names;
    let todo = created.len() as u64 - from;
    let at = |i: u64| (i + from) as usize;
    match job.work {
        Work::Create => timed.repeat(todo, |i| worker.create(&created[at(i)])),
        Work::Stat => timed.repeat(todo, |i| worker.stat(&visited[at(i)])),
        Work::Rename => timed.repeat(todo, |i| worker.rename(&visited[at(i)], &renamed[at(i)])),
        Work::Unlink => timed.repeat(todo, |i| worker.unlink(&renamed[at(i)])),
        work => unreachable!("{work:?} does not work on names"),
    }
}

/// Reads back what the slice wrote last; does the name operations that the slice had no time for.
fn check<W: Worker>(worker: &mut W, job: &Job, buffers: &Buffers, slice: &Slice) -> Result<()> {
    match job.work {
        Work::WriteRandom | Work::WriteSequential => {
            let mut offsets = Offsets::of(job);
            let at = (0..slice.ops).map(|i| offsets.next(i)).last().unwrap_or(0);
            let mut got = vec![0; job.bytes];
            worker.read(at, &mut got)?;
            if got != buffers.source(slice.ops.saturating_sub(1), job.bytes) {
                return Err(wrong(format!("{} bytes at {at} are not what was written last", job.bytes)));
            }
        }
        Work::Append => {
            let (got, want) = (worker.append_end()?, slice.ops * job.bytes as u64);
            if got != want {
                return Err(wrong(format!("a file of {want} appended bytes has {got}")));
            }
        }
        Work::Create | Work::Rename | Work::Unlink => {
            worker.set_durable(false);
            let untimed = Job { slice: Duration::MAX, ..job.clone() };
            let rest = names(worker, &untimed, slice.ops, &mut Timed::begin(&untimed));
            worker.set_durable(true);
            rest?;
        }
        _ => {}
    }
    Ok(())
}

fn wrong(what: String) -> Error {
    Error::message(libc::EIO, "bench::check", what)
}
