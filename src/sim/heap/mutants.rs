//! Steps of the heap left out on purpose: whether the simulator would notice. See `sim/mutation.rs`.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::run::{Broken, Plan, Start, sequence};
use crate::sim::explore::Bounds;
use crate::sim::mutation::{Mutation, Site, Step};
use crate::sim::run::Effort;

/// Bits that go wrong after a sequence, where a checksum is not looked at.
const FLIPS: u32 = 200;

/// What became of a mutation.
#[derive(Clone, Debug)]
pub struct Mutant {
    pub site: Site,
    /// Sequences that ran until it was killed; all of them where it survived.
    pub sequences: u64,
    /// What noticed it.
    pub killed: Option<Broken>,
}

/// A sequence on a heap: their numbers, the heap's first.
type Job = (usize, u64);

/// Leaves out each site that the plan's sequences meet, one at a time. `progress` is called after each with how
/// many of how many were tried, and answers whether to go on.
pub fn run(
    plan: &Plan,
    progress: &(dyn Fn(usize, usize, &Mutant) -> bool + Sync),
) -> Result<Vec<Mutant>, String> {
    let starts: Vec<Start> = plan.places.iter().map(|p| Start::new(*p)).collect::<Result<_, _>>()?;
    let met = meet(plan, &starts)?;
    let sites: Vec<(&Site, &Vec<Job>)> = met.iter().collect();
    let mutants = Mutex::new(BTreeMap::new());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((site, jobs)) = sites.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mutant = try_out(plan, &starts, jobs, **site);
            let mut mutants = mutants.lock();
            if !progress(mutants.len() + 1, sites.len(), &mutant) {
                next.store(sites.len(), Ordering::Relaxed);
            }
            mutants.insert(**site, mutant);
        }
    };
    std::thread::scope(|s| {
        (1..plan.threads.max(1)).for_each(|_| drop(s.spawn(work)));
        work();
    });
    Ok(mutants.into_inner().into_values().collect())
}

/// Sites, and which sequences meet them where. What recovery meets all of them do.
fn meet(plan: &Plan, starts: &[Start]) -> Result<BTreeMap<Site, Vec<Job>>, String> {
    let met: Mutex<BTreeMap<Site, Vec<Job>>> = Mutex::default();
    let failed: Mutex<Option<String>> = Mutex::default();
    let next = AtomicU64::new(0);
    let bounds = Bounds { leaves_max: 32, lane_states: 1, ..plan.effort.bounds.clone() };
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let (start, number) = ((n / plan.count) as usize, n % plan.count);
            if start >= starts.len() {
                return;
            }
            let noted = Arc::new(Mutation::default());
            let mutation = Some(noted.clone());
            let effort = Effort { bounds: bounds.clone(), twice: false, flips: 0, mutation };
            let (ops, every) = (plan.sequence)(number);
            if let Some(broken) = sequence(&starts[start], &ops, every, &effort).1 {
                failed.lock().get_or_insert(format!("with nothing left out: {broken}"));
                return;
            }
            let mut met = met.lock();
            noted.sites().into_iter().for_each(|site| met.entry(site).or_default().push((start, number)));
        }
    };
    std::thread::scope(|s| {
        (1..plan.threads.max(1)).for_each(|_| drop(s.spawn(work)));
        work();
    });
    let mut met = met.into_inner();
    met.values_mut().for_each(|jobs| jobs.sort_unstable());
    failed.into_inner().map_or(Ok(met), Err)
}

/// Runs the sequences that meet the site without it until one shows it: with one failure, and then with another one
/// in the recovery.
fn try_out(plan: &Plan, starts: &[Start], jobs: &[Job], site: Site) -> Mutant {
    let mut mutant = Mutant { site, sequences: 0, killed: None };
    let mut tried = HashSet::new();
    for twice in [false, true] {
        for &(start, n) in jobs {
            let mutation = Some(Arc::new(Mutation::without(site)));
            let flips = if site.step == Step::Check { FLIPS } else { 0 };
            let effort = Effort { mutation, twice, flips, ..plan.effort.clone() };
            let (ops, every) = (plan.sequence)(n);
            mutant.sequences += tried.insert((start, n)) as u64;
            mutant.killed = sequence(&starts[start], &ops, every, &effort).1;
            if mutant.killed.is_some() {
                return mutant;
            }
        }
    }
    mutant
}
