//! What copies of class latency take beside those of class bandwidth (EasyIO §6.4.3, Figure 12): 64 KiB at a time by ticket,
//! alone, beside somebody who copies blocks of 2 MiB without classes, and beside the same with them.
//!
//! One thread is both programs, as uthreads of one worker are: it polls the tickets of both, and works on something of its
//! own between two copies of class latency. The device is the emulated one, held to the speed of Fastmove's memory
//! (`offload`), all of its channels together. So these rows show what the channel manager does with such a device, and
//! nothing of a device. The three take turns in one run; latencies are those at which the thread finds out.

use std::hint::black_box;

use lodestone::Result;
use lodestone::media::{Addr, Domain, Span, SpanOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::class::{Class, Owner};
use lodestone::mover::copies::{Copies, CopyOptions};
use lodestone::mover::engine_dsa::Dsa;
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::manager::{Channels, Manager, Qos};
use lodestone::mover::profile::Profile;
use lodestone::mover::schedule::Direction;

use super::clock::{Clock, Histogram};
use super::offload::{READ_BYTES_PER_S, WRITE_BYTES_PER_S};
use super::plan::Plan;
use super::report::{Claim, Row, median};
use super::value::{Values, value};
use super::worker::Random;

const COPY_BYTES: usize = 64 << 10;
const BULK_BYTES: usize = 2 << 20;
/// Own work between two copies of class latency, in nanoseconds, at random up to twice that: the device has them for
/// about a quarter of its time.
const THINK_NS: u64 = 80_000;
/// Of the 99th percentile alone.
const P99_RATIO_MAX: f64 = 1.4;
/// Class bandwidth keeps so much of what class latency leaves of the device, of 100.
const KEPT_MIN: f64 = 50.0;
/// A decision for a copy of class latency, in nanoseconds.
const DECISION_NS_MAX: f64 = 50.0;
const DECISIONS: usize = 100_000;

/// Who copies beside class latency.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nobody,
    /// Neither has a class.
    Unmanaged,
    Managed,
}

const SETTINGS: [(Beside, &str); 3] =
    [(Beside::Nobody, "alone"), (Beside::Unmanaged, "unmanaged"), (Beside::Managed, "managed")];

pub fn run(plan: &Plan) -> Result<Values> {
    let mut values = vec![decision(plan)];
    for (direction, name, bytes_per_s) in
        [(Direction::Write, "write", WRITE_BYTES_PER_S), (Direction::Read, "read", READ_BYTES_PER_S)]
    {
        let beds = SETTINGS.iter().map(|_| bed(plan, bytes_per_s)).collect::<Result<Vec<_>>>()?;
        let mut turns: [Vec<Turn>; 3] = Default::default();
        // The first one warms up.
        for round in 0..=plan.rounds {
            for n in 0..SETTINGS.len() {
                let who = (n + round) % SETTINGS.len();
                let turn = turn(plan, &beds[who], direction, SETTINGS[who].0, round as u64 + 1)?;
                if round > 0 {
                    turns[who].push(turn);
                }
            }
        }
        for (n, (beside, setting)) in SETTINGS.iter().enumerate() {
            let p99: Vec<f64> = turns[n].iter().map(|turn| turn.p99_us).collect();
            // Round by round, against the turn alone of the same round.
            let ratios: Vec<f64> =
                turns[n].iter().zip(&turns[0]).map(|(turn, alone)| turn.p99_us / alone.p99_us).collect();
            let title = format!("qos-{name}-64k-{setting}");
            let (mut row, claim) = value(&title, &ratios, "x p99 alone (emulated)", P99_RATIO_MAX);
            row.p50_us = median(&turns[n].iter().map(|turn| turn.p50_us).collect::<Vec<_>>());
            row.p99_us = median(&p99);
            let bulk: Vec<f64> = turns[n].iter().map(|turn| turn.bulk_gib_per_s).collect();
            row.gib_per_s = (*beside != Beside::Nobody).then(|| median(&bulk));
            // The others are there to compare with.
            let claims = (*beside == Beside::Managed).then_some(claim);
            values.push((row, claims));
        }
        let kept: Vec<f64> = turns[2].iter().map(|turn| turn.kept_percent).collect();
        let title = format!("qos-{name}-bandwidth-kept");
        let (row, claim) = value(&title, &kept, "% of what is left (emulated)", KEPT_MIN);
        values.push((row, Some(Claim { bound: "at least", ok: claim.ratio >= KEPT_MIN, ..claim })));
    }
    let (rows, claims): (Vec<Row>, Vec<Option<Claim>>) = values.into_iter().unzip();
    Ok((rows, claims.into_iter().flatten().collect()))
}

/// Media of its own, and a device.
fn bed(plan: &Plan, bytes_per_s: u64) -> Result<Copies> {
    let options = SpanOptions { assume: Some(Domain::Memory), prefault: true, ..SpanOptions::default() };
    let copies = Copies::new(Span::memfd(plan.offload_bytes, &options)?, EngineKind::Cpu, Profile::default());
    let model = Model { bytes_per_s: Some(bytes_per_s), ..Model::default() };
    copies.mover().give(Box::new(Dsa::new(Emulated::new(model))), Profile::default().emu);
    Ok(copies)
}

/// What the manager takes to let a copy of class latency in, its time stamp included.
fn decision(plan: &Plan) -> (Row, Option<Claim>) {
    let manager = Manager::new(1, Qos::default());
    let at = Channels { group: 0, count: 4, can_rest: true, bounds_itself: false };
    let clock = Clock::get();
    let once = || {
        let mut ticks = 0;
        for _ in 0..DECISIONS {
            let began = clock.stamp();
            let bytes = COPY_BYTES as u64;
            let entered = manager.enter_latency(at, Direction::Write, bytes, manager.now(), &|_| ());
            ticks += clock.stamp() - began;
            let entered = black_box(entered).expect("writes are let in");
            manager.leave(at, entered, manager.now(), &|_| ());
        }
        clock.ns(ticks) / DECISIONS as f64
    };
    let rounds: Vec<f64> = (0..plan.rounds).map(|_| once()).collect();
    let (row, claim) = value("qos-decision", &rounds, "ns", DECISION_NS_MAX);
    (row, Some(claim))
}

struct Turn {
    p50_us: f64,
    p99_us: f64,
    bulk_gib_per_s: f64,
    kept_percent: f64,
}

fn turn(plan: &Plan, copies: &Copies, direction: Direction, beside: Beside, seed: u64) -> Result<Turn> {
    let class =
        |class| CopyOptions { class: (beside == Beside::Managed).then_some(class), ..CopyOptions::default() };
    let (small, large) = (class(Class::Latency), class(Class::Bandwidth(Owner::process())));
    let clock = Clock::get();
    let mut random = Random::new(seed);
    // The first half is class latency's.
    let half = plan.offload_bytes / 2;
    let submit = |at: u64, buffer: Vec<u8>, options: &CopyOptions| match direction {
        Direction::Write => copies.submit_to_media(Addr(at), buffer, options),
        Direction::Read => copies.submit_from_media(Addr(at), buffer, options),
    };
    let mut spare = Some(vec![1u8; COPY_BYTES]);
    let mut spare_bulk = (beside != Beside::Nobody).then(|| vec![2u8; BULK_BYTES]);
    let (mut one, mut bulk) = (None, None);
    let (mut latency, mut bulk_bytes, mut small_bytes) = (Histogram::default(), 0u64, 0u64);
    let began = clock.stamp();
    let deadline = began + clock.ticks(plan.slice);
    let (mut now, mut next, mut since) = (began, began, began);
    while now < deadline || one.is_some() || bulk.is_some() {
        if now < deadline {
            if let Some(buffer) = spare_bulk.take() {
                bulk = Some(submit(
                    half + random.below(half / BULK_BYTES as u64) * BULK_BYTES as u64,
                    buffer,
                    &large,
                ));
            }
            if now >= next
                && let Some(buffer) = spare.take()
            {
                since = clock.stamp();
                one =
                    Some(submit(random.below(half / COPY_BYTES as u64) * COPY_BYTES as u64, buffer, &small));
            }
        }
        if let Some(ticket) = one.take_if(|ticket| ticket.poll()) {
            let (buffer, outcome) = ticket.wait();
            small_bytes += outcome?.bytes;
            latency.add(clock.stamp() - since);
            spare = Some(buffer);
            next = clock.stamp() + clock.ticks(std::time::Duration::from_nanos(random.below(2 * THINK_NS)));
        }
        if let Some(ticket) = bulk.take_if(|ticket| ticket.poll()) {
            let (buffer, outcome) = ticket.wait();
            bulk_bytes += outcome?.bytes;
            spare_bulk = Some(buffer);
        }
        now = clock.stamp();
    }
    let seconds = clock.ns(now - began) / 1e9;
    let us = |share| clock.ns(latency.percentile(share).unwrap_or(0.0) as u64) / 1e3;
    let device_bytes = seconds
        * match direction {
            Direction::Write => WRITE_BYTES_PER_S,
            Direction::Read => READ_BYTES_PER_S,
        } as f64;
    let left = (device_bytes - small_bytes as f64).max(1.0);
    Ok(Turn {
        p50_us: us(0.50),
        p99_us: us(0.99),
        bulk_gib_per_s: bulk_bytes as f64 / seconds / (1u64 << 30) as f64,
        kept_percent: bulk_bytes as f64 / left * 100.0,
    })
}
