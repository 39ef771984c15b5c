//! What uthreads cost: a switch, a life from spawn to join, and the memory of one that waits.
//!
//! A switch is one uthread's turn to the next one's, two of them taking turns on one worker. Memory is the growth of
//! this process's anonymous memory and page tables while so many wait, divided by them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lodestone::runtime::{Condvar, Mutex, Options, Runtime, spawn, yield_now};
use lodestone::{Error, Result};

use super::machine::{memory_available_bytes, resident_anonymous_bytes, table_bytes};
use super::plan::Plan;
use super::value::{Values, value};

const SWITCH_NS_MAX: f64 = 40.0;
const LIFE_NS_MAX: f64 = 400.0;
const PARKED_BYTES_MAX: f64 = 8192.0;

pub fn run(plan: &Plan) -> Result<Values> {
    let repeat =
        |once: &dyn Fn() -> Result<f64>| (0..plan.rounds).map(|_| once()).collect::<Result<Vec<f64>>>();
    let switch = repeat(&|| switches(plan.uthread_turns))?;
    let life = repeat(&|| lives(plan.uthread_turns / 10))?;
    let mut values = vec![
        value("uthread-switch", &switch, "ns", SWITCH_NS_MAX),
        value("uthread-spawn-join", &life, "ns", LIFE_NS_MAX),
    ];
    let bytes = parked(plan.uthreads_parked)?;
    values.push(value("uthread-parked", &[bytes], "bytes each", PARKED_BYTES_MAX));
    Ok(values.into_iter().unzip())
}

/// A runtime whose uthreads may keep their worker for as long as is measured.
pub fn runtime() -> Result<Runtime> {
    Runtime::new(Options { long_slice: Duration::from_secs(3600), ..Options::default() })
}

/// Runs one uthread on one worker, and gives its result.
pub fn alone<T: Send + 'static>(body: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let runtime = runtime()?;
    let handle = runtime.spawn(body)?;
    runtime.run(1)?;
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn switches(turns: usize) -> Result<f64> {
    alone(move || {
        let other = spawn(move || (0..turns).for_each(|_| yield_now()))?;
        // Both have begun.
        yield_now();
        let begun = Instant::now();
        (0..turns - 1).for_each(|_| yield_now());
        let ns = begun.elapsed().as_nanos() as f64;
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok(ns / (2 * (turns - 1)) as f64)
    })
}

fn lives(count: usize) -> Result<f64> {
    alone(move || {
        let begun = Instant::now();
        for n in 0..count {
            let outcome = spawn(move || n)?.join();
            std::hint::black_box(outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        Ok(begun.elapsed().as_nanos() as f64 / count as f64)
    })
}

fn parked(count: usize) -> Result<f64> {
    let need = count as u64 * PARKED_BYTES_MAX as u64;
    if memory_available_bytes() < need {
        let message = format!("{count} uthreads may need {} MiB of memory, which are not free", need >> 20);
        return Err(Error::message(libc::ENOMEM, "bench::uthreads", message));
    }
    let unknown = || Error::message(libc::ENOSYS, "bench::uthreads", "/proc/self/status has no RssAnon");
    let used = move || Some(resident_anonymous_bytes()? + table_bytes()?);
    crate::allocator::give_back();
    let before = used().ok_or_else(unknown)?;
    let runtime = runtime()?;
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let waiting = Arc::new(AtomicUsize::new(0));
    for _ in 0..count {
        let (gate, waiting) = (gate.clone(), waiting.clone());
        runtime.spawn(move || {
            let mut open = gate.0.lock();
            waiting.fetch_add(1, Ordering::Relaxed);
            while !*open {
                gate.1.wait(&mut open);
            }
        })?;
    }
    let measure = runtime.spawn(move || {
        while waiting.load(Ordering::Relaxed) < count {
            yield_now();
        }
        let now = used();
        *gate.0.lock() = true;
        gate.1.notify_all();
        now
    })?;
    runtime.run(1)?;
    let now = measure.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    Ok(now.ok_or_else(unknown)?.saturating_sub(before) as f64 / count as f64)
}
