//! Power failures at every fence of operations on persistent heaps, on simulated media: every operation, every pair of
//! them in one domain, long sequences by chance; and steps left out on purpose, each of which has to be noticed.
//!
//! `lode crash --workload heap` runs more. `LODE_CRASH_SEED` chooses other long sequences; a failure names what repeats it.

use lodestone::media::Domain;
use lodestone::sim::explore::Bounds;
use lodestone::sim::heap::run::{Image, Place, Plan, Start, run, sequence};
use lodestone::sim::heap::{mutants, workload};
use lodestone::sim::run::{Effort, Tally};

fn effort(twice: bool) -> Effort {
    let bounds = Bounds { leaves_max: 256, lane_states: 2, seed: 1 };
    Effort { bounds, twice, ..Effort::default() }
}

fn hold(
    places: Vec<Place>,
    count: u64,
    of: impl Fn(u64) -> (workload::Sequence, bool) + Sync + 'static,
    effort: Effort,
) -> Tally {
    let plan = Plan { places, count, sequence: Box::new(of), effort, threads: 1 };
    let report = run(&plan, &|_, _, _| true).unwrap();
    for broken in &report.broken {
        println!("{broken}");
    }
    println!("{:?}", report.tally);
    assert_eq!(report.tally.violations, 0, "promises were broken");
    assert!(report.tally.crash_points > report.tally.sequences, "nothing failed: {:?}", report.tally);
    assert!(report.tally.states > report.tally.crash_points, "nothing was lost: {:?}", report.tally);
    report.tally
}

fn one(domain: Domain) {
    let places = Place::all(domain, Image::ALL);
    let tally = hold(places, workload::count(1), |n| (workload::sequence(1, n), false), effort(true));
    assert!(tally.recovery_states > 0, "no recovery was cut short: {tally:?}");
    assert!(tally.covered_points * 100 > tally.crash_points * 95, "too little was covered: {tally:?}");
}

#[test]
fn one_operation_on_persistent_memory() {
    one(Domain::Memory);
}

#[test]
fn one_operation_with_caches_that_are_flushed() {
    one(Domain::CpuCache);
}

#[test]
fn one_operation_on_an_ordinary_file() {
    one(Domain::PageCache);
}
