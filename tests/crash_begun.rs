//! Writes that a device copies while others go on, and power failures: what `sim::begun` plays.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lodestone::fs::DataMode;
use lodestone::media::Domain;
use lodestone::sim::begun::{Played, Plot, play, plots};
use lodestone::sim::explore::Bounds;
use lodestone::sim::mutation::Mutation;
use lodestone::sim::run::{Copier, Image, Place, Start};
use parking_lot::Mutex;

const BOUNDS: Bounds = Bounds { leaves_max: 200, lane_states: 4, seed: 1 };

/// Plays each of them on all CPUs.
fn hold(place: Place, plots: &[Plot]) -> Played {
    let start = Start::new(place).expect("a pool to begin on");
    let (next, total) = (AtomicUsize::new(0), Mutex::new(Played::default()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(plot) = plots.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let played =
                        play(&start, *plot, &BOUNDS, None).unwrap_or_else(|what| panic!("{place}: {what}"));
                    *total.lock() += played;
                }
            });
        }
    });
    let total = *total.lock();
    let coverage = total.coverage;
    assert!(coverage.points > plots.len() as u64 * 4 && coverage.states > coverage.points, "{total:?}");
    total
}

fn place(copier: Copier) -> Place {
    Place { domain: Domain::Memory, data: DataMode::Cow, image: Image::Fresh, copier }
}

/// Every `LODE_BEGUN_STEP`th of them: all are a matter of the night.
fn some() -> Vec<Plot> {
    let step = std::env::var("LODE_BEGUN_STEP").ok().and_then(|step| step.parse().ok()).unwrap_or(29);
    plots().step_by(step).collect()
}

#[test]
fn what_is_under_way_is_all_or_nothing_and_takes_nothing_with_it() {
    let total = hold(place(Copier::Late), &some());
    println!("{total:?}");
}

/// A pool in which next to nothing is free: writes in pieces, and some that find no room while copies are under way.
#[test]
fn the_same_where_hardly_anything_is_free() {
    let total = hold(Place { image: Image::Full, ..place(Copier::Late) }, &some());
    println!("{total:?}");
}

/// What holds all that is noticed where it is left out.
#[test]
fn each_step_is_needed() {
    let start = Start::new(place(Copier::Late)).expect("a pool to begin on");
    for step in [
        "an offloaded write counts only once it is copied",
        "what the pages of a skipped write are is written down",
        "what is being read is not reused",
        "what is being read is not overwritten where it is",
        "a paired record is settled before its directory's log goes",
    ] {
        let without = || Some(Arc::new(Mutation::without_named(step.to_owned())));
        let noticed = plots().step_by(7).any(|plot| {
            let played = catch_unwind(AssertUnwindSafe(|| play(&start, plot, &BOUNDS, without())));
            !matches!(played, Ok(Ok(_)))
        });
        assert!(noticed, "nothing notices that this is left out: {step}");
    }
}

#[test]
fn the_same_through_the_caches() {
    let total = hold(Place { domain: Domain::Memory, ..place(Copier::LateByAlignment) }, &some());
    println!("{total:?}");
}

/// Of two regions: a write is two batches, which end in either order.
#[test]
fn the_same_in_several_batches() {
    let total = hold(place(Copier::LateStriped), &some());
    println!("{total:?}");
}

/// There a write in pieces is batches of several.
#[test]
fn the_same_in_several_batches_where_hardly_anything_is_free() {
    let total = hold(Place { image: Image::Full, ..place(Copier::LateStriped) }, &some());
    println!("{total:?}");
}

/// A page at a time: what class bandwidth may not hand over yet is held back, and its record is committed.
#[test]
fn the_same_where_pieces_are_held_back() {
    let plots = some();
    let total = hold(place(Copier::LateInPieces), &plots);
    println!("{total:?}");
    assert!(total.held_back * 2 > plots.len() as u64, "{total:?}");
}

#[test]
fn the_same_where_pieces_are_held_back_and_hardly_anything_is_free() {
    let plots = some();
    let total = hold(Place { image: Image::Full, ..place(Copier::LateInPieces) }, &plots);
    println!("{total:?}");
    assert!(total.held_back > 0, "{total:?}");
}

/// What was found is found again: nothing in it is the clock's or the allocator's.
#[test]
fn a_history_replays() {
    for copier in [Copier::Late, Copier::LateInPieces, Copier::LateStriped, Copier::LateByAlignment] {
        let start = Start::new(place(copier)).expect("a pool to begin on");
        for plot in some().into_iter().step_by(9) {
            let [first, second] =
                [(), ()].map(|()| play(&start, plot, &BOUNDS, None).expect("promises are kept"));
            let count = |played: Played| (played.coverage.points, played.coverage.states, played.held_back);
            assert_eq!(count(first), count(second), "{copier:?} {plot:?}");
        }
    }
}
