//! Media that fail at one load or store, at every one of each operation of ACE's set and of opening the pool, on all kinds of
//! pools: see `sim/faults.rs`. `LODE_FAULTS_EVERY=1` tries all of them.

use std::collections::{HashMap, HashSet};

use lodestone::fs::DataMode;
use lodestone::media::Domain;
use lodestone::sim::faults::{self, Faults, Left, Pool, Tally};
use lodestone::sim::media::Failing;
use lodestone::sim::run::{Copier, Image, Place, Start};
use lodestone::sim::workload::{self, Sequence};

/// Who copies: each of them fails in ways of its own.
const COPIERS: &[Copier] = &[
    Copier::Cpu,
    Copier::CpuFenced,
    Copier::PastCaches,
    Copier::IntoCaches,
    Copier::LateByAlignment,
    Copier::LateStriped,
    Copier::LateInPieces,
];
const SHOWN_MAX: usize = 20;

type Run<'a> = &'a dyn Fn(&Start, &Sequence, Faults, &mut Tally) -> Vec<String>;

/// One of so many sequences, at one of so many of its accesses.
#[derive(Clone, Copy)]
struct OneOf {
    sequences: u64,
    accesses: u64,
}

fn places(copiers: &[Copier]) -> Vec<Place> {
    let mut places = Vec::new();
    for domain in [Domain::Memory, Domain::PageCache] {
        for &image in Image::ALL {
            for data in [DataMode::Cow, DataMode::InPlace] {
                places.extend(copiers.iter().map(|&copier| Place { domain, data, image, copier }));
            }
        }
    }
    places
}

/// Those that pass, at once or once somebody else met them, and those that last.
fn hold(one_of: OneOf, copiers: &[Copier], run: Run) -> [Tally; 3] {
    let said = std::env::var("LODE_FAULTS_EVERY").ok();
    let whole = |every: String| OneOf { sequences: 1, accesses: every.parse().expect("a number") };
    let OneOf { sequences, accesses: every } = said.map_or(one_of, whole);
    let kinds = [Failing::Once, Failing::Twice, Failing::FromThenOn];
    let (mut tallies, mut broken, mut round) = ([Tally::default(); 3], Vec::new(), 0);
    let mut chosen: HashMap<u64, HashSet<u64>> = HashMap::new();
    for place in places(copiers) {
        let start = Start::new(place).unwrap();
        for (tally, failing) in tallies.iter_mut().zip(kinds) {
            // In each round others, whatever number of them there is.
            for n in (0..workload::count(1)).filter(|n| (n + round) % sequences == 0) {
                let faults = Faults { failing, every, from: 1 + (n + round / sequences) % every };
                chosen.entry(n).or_default().insert(faults.from);
                let found = run(&start, &workload::sequence(1, n), faults, tally);
                broken.extend(found.into_iter().map(|what| format!("{place}, {what}")));
            }
            round += 1;
        }
    }
    assert_eq!(chosen.len() as u64, workload::count(1), "each sequence has its turn");
    let from = (round / sequences).min(every) as usize;
    assert!(
        chosen.values().all(|some| some.len() >= from),
        "not each begins at so many accesses: {chosen:?}"
    );
    tallies.iter().zip(kinds).for_each(|(tally, failing)| println!("{failing:?}, every {every}: {tally:?}"));
    broken.iter().take(SHOWN_MAX).for_each(|what| println!("{what}"));
    assert!(broken.is_empty(), "promises were broken {} times", broken.len());
    tallies
}

#[test]
fn an_access_of_an_operation_fails() {
    let [once, _, from_then_on] =
        hold(OneOf { sequences: 8, accesses: 4 }, COPIERS, &|start, s, faults, tally| {
            faults::operation(start, s, Pool::Loaded, faults, tally)
        });
    assert!(once.failed > once.faults / 2 && once.stopped > 0);
    assert!(once.handed_over > once.faults / 20, "engines have little to copy: {once:?}");
    assert!(from_then_on.damaged > 0);
}

#[test]
fn an_access_of_an_operation_on_a_pool_just_opened_fails() {
    let [once, ..] =
        hold(OneOf { sequences: 11, accesses: 83 }, &[Copier::Cpu], &|start, s, faults, tally| {
            faults::operation(start, s, Pool::Cold, faults, tally)
        });
    assert!(once.failed > 0);
}

#[test]
fn an_access_of_opening_fails() {
    for left in [Left::Closed, Left::Killed] {
        let [_, _, from_then_on] =
            hold(OneOf { sequences: 11, accesses: 199 }, &[Copier::Cpu], &|start, s, faults, tally| {
                faults::opening(start, s, left, faults, tally)
            });
        assert!(from_then_on.damaged > 0 || left == Left::Closed);
    }
}
