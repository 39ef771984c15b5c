//! One round: so many items of an application on one system, by uthreads, timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lodestone::Result;
use lodestone::runtime::{JoinHandle, Options, Runtime};

use super::app::{App, Desk, weigh};
use super::system::System;
use crate::bench::clock::{Clock, Histogram};
use crate::bench::turns::CpuScope;

/// Decoders and regular expressions need more than the default.
const STACK_BYTES: usize = 512 << 10;
/// An item may keep its worker for as long as it takes: here that is work, and no mistake.
const LONG_SLICE: Duration = Duration::from_secs(10);

/// Of all systems: one whose engine is threads pays for what those copy, and others' emulated devices are nobody's.
pub const SCOPE: CpuScope = CpuScope::BesideDevice;

/// What a round came to.
pub struct Round {
    pub items: usize,
    pub seconds: f64,
    pub cpu_s: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Read and written.
    pub bytes: u64,
    /// Of the cores' time, in copies between slow memory and DRAM.
    pub copying_share: f64,
    /// What came out, in short: the same for all systems.
    pub result: u64,
}

/// What one uthread did.
struct Part {
    desk: Desk,
    result: u64,
    times: Histogram,
}

/// Runs `items` items on `cores` workers, then reads back what they left in files. Desks are kept from round to round.
pub fn run(
    system: &System,
    app: &Arc<dyn App>,
    items: usize,
    cores: usize,
    desks: &mut Vec<Desk>,
) -> Result<Round> {
    let runtime = Runtime::new(Options { stack_bytes: STACK_BYTES, long_slice: LONG_SLICE })?;
    let next = Arc::new(AtomicUsize::new(0));
    desks.resize_with(cores * system.uthreads_per_core(), Desk::default);
    let parts = desks.drain(..).map(|desk| {
        let (app, shelf, next) = (app.clone(), system.shelf.clone(), next.clone());
        runtime.spawn(move || part(&*app, &shelf, desk, &next, items))
    });
    let parts: Vec<JoinHandle<Result<Part>>> = parts.collect::<Result<_>>()?;
    let copying_before = system.media().copying();
    let (cpu_begun, began) = (SCOPE.begin(), Instant::now());
    runtime.run(cores)?;
    let (seconds, cpu_s) = (began.elapsed().as_secs_f64(), SCOPE.since(cpu_begun));
    let copying = system.media().copying() - copying_before;
    let (mut times, mut result, mut bytes) = (Histogram::default(), 0u64, 0);
    for part in parts {
        let mut part = part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        times.merge(&part.times);
        result = result.wrapping_add(part.result);
        bytes += std::mem::take(&mut part.desk.moved);
        desks.push(part.desk);
    }
    let left = app.collect(&system.shelf, &mut desks[0], items)?;
    desks[0].moved = 0;
    let us = |share| times.percentile(share).map_or(0.0, |ticks| Clock::get().ns(ticks as u64) / 1e3);
    Ok(Round {
        items,
        seconds,
        cpu_s,
        p50_us: us(0.50),
        p99_us: us(0.99),
        bytes,
        copying_share: copying.as_secs_f64() / (seconds * cores as f64),
        result: result.rotate_left(32) ^ left,
    })
}

/// Takes item after item until there is none.
fn part(
    app: &dyn App,
    shelf: &super::app::Shelf,
    mut desk: Desk,
    next: &AtomicUsize,
    items: usize,
) -> Result<Part> {
    let clock = Clock::get();
    let (mut times, mut result) = (Histogram::default(), 0u64);
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= items {
            return Ok(Part { desk, result, times });
        }
        let began = clock.stamp();
        let came_out = app.work(shelf, &mut desk, n)?;
        times.add(clock.stamp() - began);
        result = result.wrapping_add(weigh(n, came_out));
    }
}
