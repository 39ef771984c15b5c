//! What is left of a core while a device copies (EasyIO §6.2, Figure 8): one thread keeps so many copies of 64 KiB under
//! way, and works on something of its own in between.
//!
//! The device is the emulated one, a thread on another core, held to the speed at which Fastmove saw one core copy from and
//! to its memory (Table 4, 64 KiB). These rows show what handing over and finding out cost, and nothing of a device's speed. A
//! share is the time in calls of the mover by the CPU time of the thread. What the device's thread used stands apart, as
//! CPU seconds for each GiB of scope `device`.

use std::collections::VecDeque;
use std::hint::black_box;

use lodestone::Result;
use lodestone::media::{Addr, Domain, Span, SpanOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::copies::{Copies, CopyOptions};
use lodestone::mover::engine_dsa::Dsa;
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::profile::Profile;
use lodestone::mover::schedule::Direction;
use lodestone::mover::ticket::Ticket;

use super::clock::{Clock, process_cpu_s, thread_cpu_ns};
use super::plan::Plan;
use super::report::{Claim, Row, median};
use super::value::{Values, value};
use super::worker::Random;

const COPY_BYTES: usize = 64 << 10;
const DEPTHS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const WRITE_SHARE_MAX: f64 = 40.0;
const READ_SHARE_MAX: f64 = 10.0;
/// 64 KiB in 28.8 and 17.6 us.
pub const WRITE_BYTES_PER_S: u64 = 2_275_555_556;
pub const READ_BYTES_PER_S: u64 = 3_723_636_364;
/// Own work between two looks at the copies, in nanoseconds: a task of the size that uthreads are for.
const WORK_NS: u64 = 5000;

pub fn run(plan: &Plan) -> Result<Values> {
    let options = SpanOptions { assume: Some(Domain::Memory), prefault: true, ..SpanOptions::default() };
    let mut values = Vec::new();
    for (direction, name, most, bytes_per_s) in [
        (Direction::Write, "write", WRITE_SHARE_MAX, WRITE_BYTES_PER_S),
        (Direction::Read, "read", READ_SHARE_MAX, READ_BYTES_PER_S),
    ] {
        let span = Span::memfd(plan.offload_bytes, &options)?;
        let copies = Copies::new(span, EngineKind::Cpu, Profile::default());
        let model = Model { bytes_per_s: Some(bytes_per_s), ..Model::default() };
        copies.mover().give(Box::new(Dsa::new(Emulated::new(model))), Profile::default().emu);
        for depth in DEPTHS {
            // The first one warms up.
            let rounds =
                (0..=plan.rounds as u64).map(|round| turn(plan, &copies, direction, depth, round + 1));
            let rounds = rounds.collect::<Result<Vec<Turn>>>()?;
            let shares: Vec<f64> = rounds[1..].iter().map(|turn| turn.share * 100.0).collect();
            let (mut row, claim): (Row, Claim) = value(
                &format!("offload-{name}-64k-depth-{depth}"),
                &shares,
                "% of the core (emulated)",
                most,
            );
            let of =
                |number: &dyn Fn(&Turn) -> f64| median(&rounds[1..].iter().map(number).collect::<Vec<_>>());
            row.gib_per_s = Some(of(&|turn| turn.gib_per_s));
            (row.cpu_s_per_gib, row.cpu_scope) = (Some(of(&|turn| turn.device_s_per_gib)), "device");
            values.push((row, claim));
        }
    }
    Ok(values.into_iter().unzip())
}

struct Turn {
    /// Of the thread's CPU time, in calls of the mover.
    share: f64,
    gib_per_s: f64,
    /// CPU time of all other threads: the device's.
    device_s_per_gib: f64,
}

fn turn(plan: &Plan, copies: &Copies, direction: Direction, depth: usize, seed: u64) -> Result<Turn> {
    let durable = CopyOptions { durable: true, ..CopyOptions::default() };
    let clock = Clock::get();
    let mut random = Random::new(seed);
    let places = plan.offload_bytes / COPY_BYTES as u64;
    let mut free: Vec<Vec<u8>> = (0..depth).map(|n| vec![n as u8; COPY_BYTES]).collect();
    let mut under_way: VecDeque<Ticket<Vec<u8>>> = VecDeque::new();
    let (mut called, mut copied) = (0, 0u64);
    let (began, cpu_began, process_began) = (clock.stamp(), thread_cpu_ns(), process_cpu_s());
    let deadline = began + clock.ticks(plan.slice);
    let mut now = began;
    while now < deadline || !under_way.is_empty() {
        while now < deadline
            && let Some(buffer) = free.pop()
        {
            let at = Addr(random.below(places) * COPY_BYTES as u64);
            under_way.push_back(match direction {
                Direction::Write => copies.submit_to_media(at, buffer, &durable),
                Direction::Read => copies.submit_from_media(at, buffer, &durable),
            });
        }
        while under_way.front().is_some_and(Ticket::poll) {
            let ticket = under_way.pop_front().expect("there is one");
            let (buffer, outcome) = ticket.wait();
            copied += outcome?.bytes;
            free.push(buffer);
        }
        let worked_from = clock.stamp();
        called += worked_from - now;
        now = worked_from;
        while clock.ns(now - worked_from) < WORK_NS as f64 {
            now = clock.stamp();
            black_box(now);
        }
    }
    let seconds = clock.ns(now - began) / 1e9;
    let cpu_ns = (thread_cpu_ns() - cpu_began) as f64;
    let gib = copied as f64 / (1u64 << 30) as f64;
    Ok(Turn {
        share: clock.ns(called) / cpu_ns,
        gib_per_s: gib / seconds,
        device_s_per_gib: (process_cpu_s() - process_began - cpu_ns / 1e9).max(0.0) / gib,
    })
}
