//! What it brings that a write commits while its data is copied (EasyIO §6.4.1 and §6.4.2, Figure 11): against the plain way,
//! which waits for the copy before it writes its record and keeps the file meanwhile.
//!
//! On the emulated device, as fast as EasyIO found a channel of its hardware (`apps`): one uthread, alone and beside one that
//! works. The device's thread needs a core of its own. And by the CPU, whose copies are made before the file is had, where
//! somebody else has it: threads that write to one file, each to a part of its own, on memory that is as slow to a core as
//! Optane (`apps::slow`). The systems take turns.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lodestone::Result;
use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::engine_dsa::Dsa;
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::profile::Profile;
use lodestone::runtime;

use super::apps::slow::Slow;
use super::apps::system::CORE;
use super::clock::Clock;
use super::plan::Plan;
use super::report::{Claim, Row, median};
use super::value::{Values, value};
use super::worker::Random;

const WRITE_BYTES: usize = 64 << 10;
/// Of which the times are told.
const SIZES: [(&str, usize); 4] =
    [("4k", 4 << 10), ("16k", 16 << 10), ("64k", WRITE_BYTES), ("256k", 256 << 10)];
const FILE_BYTES: u64 = 32 << 20;
const POOL_BYTES: u64 = 128 << 20;
/// EasyIO §2.2: what one channel stores.
const STORE_BYTES_PER_S: u64 = 6_600_000_000;
/// Of what the plain way takes, in percent.
const LATENCY_MAX: f64 = 85.0;
/// Of the core.
const CPU_MAX: f64 = 40.0;
/// Times the plain way's throughput.
const SHARED_MIN: f64 = 1.6;
const SHARED_WRITERS: usize = 2;
/// Own work between two looks at other uthreads, in nanoseconds.
const WORK_NS: f64 = 2000.0;

type Emulation = Arc<Files<Slow<Pool>>>;

pub fn run(plan: &Plan) -> Result<Values> {
    let systems = [open(false, true)?, open(true, true)?];
    let by_cpu = [open(false, false)?, open(true, false)?];
    let (mut cpu, mut shared) = (Vec::new(), Vec::new());
    let mut times: [[Vec<f64>; 2]; SIZES.len()] = Default::default();
    for round in 0..=plan.rounds as u64 {
        for (size, times) in SIZES.iter().zip(&mut times) {
            for (files, times) in systems.iter().zip(times) {
                times.push(alone(plan.slice, files, size.1, round)?);
            }
        }
        let cpu_used = beside_work(plan.slice, &systems[0], round)?;
        // The first one warms up.
        if round == 0 {
            times = Default::default();
        } else {
            cpu.push(cpu_used);
        }
        let mut turns = Vec::new();
        for files in &by_cpu {
            turns.push(together(plan.slice, files, round)?);
        }
        if let ([ahead, plain], 1..) = (&turns[..], round) {
            shared.push(ahead / plain);
        }
    }
    let ratios = |[orderless, plain]: &[Vec<f64>; 2]| -> Vec<f64> {
        orderless.iter().zip(plain).map(|(orderless, plain)| orderless / plain * 100.0).collect()
    };
    let of_64k = SIZES.iter().position(|(_, bytes)| *bytes == WRITE_BYTES).expect("it is one of them");
    let latency = ratios(&times[of_64k]);
    let mut values = vec![
        value("orderless-latency-64k", &latency, "% of the plain way (emulated)", LATENCY_MAX),
        value("orderless-cpu-64k", &cpu, "% of the core (emulated)", CPU_MAX),
    ];
    let (row, claim) = at_least("shared-file-64k", &shared, "x the plain way (emulated)", SHARED_MIN);
    values.push((Row { threads: SHARED_WRITERS, ..row }, Claim { threads: SHARED_WRITERS, ..claim }));
    let (mut rows, claims): Values = values.into_iter().unzip();
    for ((size, _), times) in SIZES.iter().zip(&times) {
        for (way, times) in ["orderless", "plain"].iter().zip(times) {
            // Their ratio is what is claimed.
            rows.push(value(&format!("{way}-write-{size}"), times, "us (emulated)", f64::INFINITY).0);
        }
    }
    Ok((rows, claims))
}

/// As [`value`], of what is to be large.
fn at_least(name: &str, all: &[f64], unit: &'static str, limit: f64) -> (Row, Claim) {
    let (row, claim) = value(name, all, unit, limit);
    let ok = claim.ratio >= limit;
    (row, Claim { bound: "at least", ok, ..claim })
}

/// A pool with one file that is all there.
fn open(ordered: bool, device: bool) -> Result<Emulation> {
    let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    let slow = Slow::new(Pool::memfd(POOL_BYTES, &options)?, Some(CORE));
    let media = Fs::mkfs(slow, &MkfsOptions::default())?;
    let fs = Fs::open(media, &OpenOptions { ordered, ..OpenOptions::default() })?;
    if device {
        let model = Model { bytes_per_s: Some(STORE_BYTES_PER_S), ..Model::default() };
        fs.mover().give(Box::new(Dsa::new(Emulated::new(model))), Profile::default().emu);
    }
    let files = Arc::new(Files::new(fs, Cred::root(), 0));
    let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600)?;
    for at in (0..FILE_BYTES).step_by(1 << 20) {
        files.pwrite(fd, &vec![1; 1 << 20], at as i64)?;
    }
    Ok(files)
}

/// Writes until the time is over, within so many bytes from `from` on; how many, and the median of their times in
/// microseconds.
fn write(
    slice: Duration,
    files: &Emulation,
    (from, bytes): (u64, u64),
    write_bytes: usize,
    seed: u64,
) -> Result<(u64, f64)> {
    let clock = Clock::get();
    let fd = files.open(b"file", libc::O_RDWR, 0)?;
    let source = vec![seed as u8; write_bytes];
    let mut random = Random::new(seed + 1);
    let mut times = Vec::new();
    let deadline = clock.stamp() + clock.ticks(slice);
    let mut now = clock.stamp();
    while now < deadline {
        let at = from + random.below(bytes / write_bytes as u64) * write_bytes as u64;
        files.pwrite(fd, &source, at as i64)?;
        let then = clock.stamp();
        times.push(clock.ns(then - now) / 1e3);
        now = then;
    }
    files.close(fd)?;
    Ok((times.len() as u64, median(&times)))
}

/// One uthread on one worker; the median of its times, in microseconds.
fn alone(slice: Duration, files: &Emulation, write_bytes: usize, seed: u64) -> Result<f64> {
    let runtime = super::uthreads::runtime()?;
    let files = files.clone();
    let writer = runtime.spawn(move || write(slice, &files, (0, FILE_BYTES), write_bytes, seed))?;
    runtime.run(1)?;
    Ok(joined(writer.join())?.1)
}

/// The same beside one that works; what is not left for that, in percent of the core.
fn beside_work(slice: Duration, files: &Emulation, seed: u64) -> Result<f64> {
    let runtime = super::uthreads::runtime()?;
    let over = Arc::new(AtomicBool::new(false));
    let worked = Arc::new(AtomicU64::new(0));
    let (files, end) = (files.clone(), over.clone());
    let writer = runtime.spawn(move || {
        let clock = Clock::get();
        let began = clock.stamp();
        let written = write(slice, &files, (0, FILE_BYTES), WRITE_BYTES, seed);
        end.store(true, Ordering::Relaxed);
        written.map(|_| clock.ns(clock.stamp() - began))
    })?;
    let sum = worked.clone();
    runtime.spawn(move || {
        let clock = Clock::get();
        while !over.load(Ordering::Relaxed) {
            let began = clock.stamp();
            while clock.ns(clock.stamp() - began) < WORK_NS {
                black_box(began);
            }
            sum.fetch_add(clock.ns(clock.stamp() - began) as u64, Ordering::Relaxed);
            runtime::yield_now();
        }
    })?;
    runtime.run(1)?;
    let whole = joined(writer.join())?;
    Ok((1.0 - worked.load(Ordering::Relaxed) as f64 / whole) * 100.0)
}

/// Several threads, all in one file; writes a slice.
fn together(slice: Duration, files: &Emulation, seed: u64) -> Result<f64> {
    let part = FILE_BYTES / SHARED_WRITERS as u64;
    let writer = |n: u64| write(slice, files, (n * part, part), WRITE_BYTES, seed * 100 + n);
    let counts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..SHARED_WRITERS as u64).map(|n| scope.spawn(move || writer(n))).collect();
        threads.into_iter().map(|thread| joined(thread.join())).collect::<Result<Vec<_>>>()
    })?;
    Ok(counts.iter().map(|(count, _)| *count as f64).sum())
}

fn joined<T>(outcome: runtime::Outcome<Result<T>>) -> Result<T> {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
