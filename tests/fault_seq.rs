//! Media that fail at one load or store, at every one of each operation of ACE's set and of opening the pool, on all kinds of
//! pools: see `sim/faults.rs`. `LODE_FAULTS_EVERY=1` tries all of them.

use lodestone::fs::DataMode;
use lodestone::media::Domain;
use lodestone::sim::faults::{self, Faults, Left, Pool, Tally};
use lodestone::sim::media::Failing;
use lodestone::sim::run::{Copier, Image, Place, Start};
use lodestone::sim::workload::{self, Sequence};

const DOMAINS: [Domain; 2] = [Domain::Memory, Domain::PageCache];
const DATA: [DataMode; 2] = [DataMode::Cow, DataMode::InPlace];
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

/// Those that pass, at once or once somebody else met them, and those that last.
fn hold(every: u64, copiers: &[Copier], run: Run) -> [Tally; 3] {
    let said = std::env::var("LODE_FAULTS_EVERY").ok();
    let every = said.map_or(every, |every| every.parse().expect("a number"));
    [Failing::Once, Failing::Twice, Failing::FromThenOn].map(|failing| {
        let (mut tally, mut broken) = (Tally::default(), Vec::new());
        for domain in DOMAINS {
            for &image in Image::ALL {
                for (data, &copier) in DATA.iter().flat_map(|&data| copiers.iter().map(move |c| (data, c))) {
                    let place = Place { domain, data, image, copier };
                    let start = Start::new(place).unwrap();
                    for n in 0..workload::count(1) {
                        let faults = Faults { failing, every, from: 1 + (n + tally.sequences) % every };
                        let found = run(&start, &workload::sequence(1, n), faults, &mut tally);
                        broken.extend(found.into_iter().map(|what| format!("{place}, {what}")));
                    }
                }
            }
        }
        println!("{failing:?}, every {every}: {tally:?}, {} broken", broken.len());
        broken.iter().take(SHOWN_MAX).for_each(|what| println!("{what}"));
        assert!(broken.is_empty(), "promises were broken");
        tally
    })
}

#[test]
fn an_access_of_an_operation_fails() {
    let [once, _, from_then_on] = hold(37, COPIERS, &|start, s, faults, tally| {
        faults::operation(start, s, Pool::Loaded, faults, tally)
    });
    assert!(once.failed > once.faults / 2 && once.stopped > 0);
    assert!(from_then_on.damaged > 0);
}

#[test]
fn an_access_of_an_operation_on_a_pool_just_opened_fails() {
    let [once, ..] = hold(401, &[Copier::Cpu], &|start, s, faults, tally| {
        faults::operation(start, s, Pool::Cold, faults, tally)
    });
    assert!(once.failed > 0);
}

#[test]
fn an_access_of_opening_fails() {
    for left in [Left::Closed, Left::Killed] {
        let [_, _, from_then_on] = hold(997, &[Copier::Cpu], &|start, s, faults, tally| {
            faults::opening(start, s, left, faults, tally)
        });
        assert!(from_then_on.damaged > 0 || left == Left::Closed);
    }
}
