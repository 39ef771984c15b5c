//! Power failures at every fence of operations on persistent heaps, on simulated media: every operation, every pair of
//! them in one domain, long sequences by chance; and steps left out on purpose, each of which has to be noticed.
//!
//! `lode crash --workload heap` runs more. `LODE_CRASH_SEED` chooses other long sequences; a failure names what repeats it.

use lodestone::media::Domain;
use lodestone::sim::explore::Bounds;
use lodestone::sim::heap::run::{Image, Place, Plan, run};
use lodestone::sim::heap::{mutants, workload};
use lodestone::sim::mutation::Site;
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
    assert!(tally.kills > tally.sequences, "no process was killed: {tally:?}");
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

/// All pairs on a heap whose lists have objects, operations in two lanes; `lode crash` does it on every heap.
#[test]
fn two_operations_on_persistent_memory() {
    let place = Place { domain: Domain::Memory, image: Image::Filled, alternates: true };
    let others = [Place { domain: Domain::PageCache, ..place }, Place { image: Image::Crashed, ..place }];
    let places = [place].into_iter().chain(others).collect();
    hold(places, workload::count(2), |n| (workload::sequence(2, n), false), effort(false));
}

fn seed() -> u64 {
    std::env::var("LODE_CRASH_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// Every operation of each is cut short: rings go round, chunks change what they are, space runs out.
#[test]
fn long_sequences_by_chance() {
    const LENGTH: usize = 60;
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        let places = Place::all(domain, &[Image::Fresh, Image::Full, Image::Reused]);
        let of = |n| (workload::random(seed() << 16 | n, LENGTH), true);
        let tally = hold(places, 4, of, effort(false));
        assert!(tally.refused > 0, "space never ran out: {tally:?}");
    }
}

/// Checksums that nobody misses here, by file and by what stands in the line: the check of an open heap looks at words
/// that opening looked at; entries elsewhere are durable before the record that names them, so that only damage between
/// a crash and the next opening would show.
///
/// And steps by name, without a file: who settles waits for commits of other threads, and here one ends before the next
/// begins (`src/sim/heap/schedules.rs` has threads); what a record says of those before it counts where both copies of a
/// state line are lost (`tests/heap.rs` loses them).
const SURVIVORS: &[(&str, &str)] = &[
    ("src/wsp/heap/check.rs", "self.media.verified("),
    ("src/wsp/heap/recover.rs", "verified(&[(Addr(at), bytes)], is_whole)"),
    ("", "who settles waits for every lane"),
    ("", "a record says what was settled before it"),
];

/// A word that two lanes set, one of which then rests while the other goes round; one that is stored in place behind a
/// commit that set it; one of an object whose space another one gets.
const CHOSEN: &str = "heap
mark a
mark a
abandon 24
many b 3 24
abandon 24
many b 3 24
abandon 24
many b 3 24

mark a
overwrite a

mark a
pop a
push a 300
";

/// Whether a site is one of these.
fn is_one_of(site: &str, survivors: &[(&str, &str)]) -> bool {
    survivors.iter().any(|(file, text)| {
        if file.is_empty() {
            return site == *text;
        }
        let source = std::fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let line = site.rsplit(':').next().and_then(|n| source.lines().nth(n.parse::<usize>().ok()? - 1));
        site.contains(file) && line.is_some_and(|line| line.contains(text))
    })
}

/// What is left out: a flush, a fence, a sync, a checksum that is not looked at, and steps by name. A survivor is
/// named here with its reason.
fn noticed(domain: Domain, survivors: &[(&str, &str)]) {
    let places = vec![
        Place { domain, image: Image::Filled, alternates: true },
        Place { domain, image: Image::Reused, alternates: false },
    ];
    let single = workload::count(1);
    let chosen = workload::parse(CHOSEN).unwrap();
    let count = single + chosen.len() as u64 + 6;
    let of = move |n| match n {
        n if n < single => (workload::sequence(1, n), false),
        n => match chosen.get((n - single) as usize) {
            Some(chosen) => (chosen.clone(), true),
            None => (workload::random(n, 40), true),
        },
    };
    let effort = Effort { bounds: Bounds { leaves_max: 128, lane_states: 4, seed: 1 }, ..Effort::default() };
    let plan = Plan { places, count, sequence: Box::new(of), effort, threads: 1 };
    // A mutant may die by a panic; that is no news.
    std::panic::set_hook(Box::new(|_| ()));
    // At night the survivors, too: whether they still are.
    let at_night = std::env::var_os("LODE_MUTANTS").is_some();
    let chosen = |site: &Site| at_night || !is_one_of(&site.to_string(), survivors);
    let tried = mutants::run(&plan, &chosen, &|_, _, _| true);
    drop(std::panic::take_hook());
    let tried = tried.unwrap();
    let mut alive = Vec::new();
    for mutant in &tried {
        match &mutant.killed {
            Some(by) => println!("without {}: {}: {}", mutant.site, by.at, by.what.lines().next().unwrap()),
            None => alive.push(mutant.site.to_string()),
        }
    }
    println!("{domain}: {} of {} are noticed; not {alive:#?}", tried.len() - alive.len(), tried.len());
    alive.retain(|site| !is_one_of(site, survivors));
    assert!(alive.is_empty(), "nobody notices what is left out: {alive:#?}");
    assert!(tried.len() > 10, "there is little to leave out: {tried:?}");
}

#[test]
fn what_is_left_out_is_noticed_on_persistent_memory() {
    noticed(Domain::Memory, SURVIVORS);
}

#[test]
fn what_is_left_out_is_noticed_on_an_ordinary_file() {
    noticed(Domain::PageCache, SURVIVORS);
}
