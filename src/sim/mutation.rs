//! Steps left out on purpose: whether the simulator would notice.
//!
//! A *site* is a place in the file system's source that flushes, fences, syncs or believes a checksum, or a step
//! that the source names ([`Media::omits`](crate::media::Media::omits)). A run that only notes the sites it meets
//! says which mutations there are; each of them then has to be killed: some workload must find a violation.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::explore::Bounds;
use super::run::{self, Broken, Effort, Plan, Start, on_threads};

/// Bits that go wrong after a sequence, where a checksum is not looked at.
const FLIPS: u32 = 200;

/// What is done at a site.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Step {
    Flush,
    Fence,
    Sync,
    /// A checksum is held against what was read; left out, everything matches.
    Check,
    Named(&'static str),
}

/// Where a step is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Site {
    pub step: Step,
    place: Option<(&'static str, u32)>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.step, self.place) {
            (Step::Named(step), _) => write!(f, "{step}"),
            (step, Some((file, line))) => {
                write!(f, "{} at {file}:{line}", format!("{step:?}").to_lowercase())
            }
            (step, None) => write!(f, "{step:?}"),
        }
    }
}

/// What is left out; without a site nothing is, and sites are noted.
#[derive(Default, Debug)]
pub struct Mutation {
    without: Option<Site>,
    named: Option<String>,
    met: Mutex<BTreeSet<Site>>,
}

impl Mutation {
    pub fn without(site: Site) -> Mutation {
        Mutation { without: Some(site), ..Mutation::default() }
    }

    /// As [`without`](Mutation::without), by the words that a site is shown with.
    pub fn without_named(site: String) -> Mutation {
        Mutation { named: Some(site), ..Mutation::default() }
    }

    /// Whether it leaves out anything.
    pub fn leaves_out(&self) -> bool {
        self.without.is_some() || self.named.is_some()
    }

    /// The sites met.
    pub fn sites(&self) -> Vec<Site> {
        self.met.lock().iter().copied().collect()
    }

    /// Notes a site; whether its step is left out.
    pub(super) fn meets(&self, step: Step, at: Option<&'static Location<'static>>) -> bool {
        let site = Site { step, place: at.map(|l| (l.file(), l.line())) };
        if let Some(named) = &self.named {
            return site.to_string() == *named;
        }
        match self.without {
            Some(without) => {
                let is_it = without == site;
                if is_it && self.met.lock().is_empty() {
                    self.met.lock().insert(site);
                }
                is_it
            }
            None => {
                self.met.lock().insert(site);
                false
            }
        }
    }
}

/// What became of a mutation.
#[derive(Clone, Debug)]
pub struct Mutant<B = Broken> {
    pub site: Site,
    /// Sequences that ran until it was killed; all of them where it survived.
    pub sequences: u64,
    /// What noticed it.
    pub killed: Option<B>,
}

/// Called now and then with how many of how many mutants were tried, and the last of them; before there are any with how many
/// of how many sequences said what they meet. Answers whether to go on.
pub type Progress<'a, B = Broken> = &'a (dyn Fn(usize, usize, Option<&Mutant<B>>) -> bool + Sync);

/// Leaves out each site that the plan's sequences meet and that is `chosen`, one at a time.
pub fn run(plan: &Plan, chosen: &dyn Fn(&Site) -> bool, progress: Progress) -> Result<Vec<Mutant>, String> {
    let starts: Vec<Start> = plan.places.iter().map(|p| Start::new(*p)).collect::<Result<_, _>>()?;
    let run =
        |start: usize, n: u64, effort: &Effort| run::sequence(&starts[start], &(plan.sequence)(n), effort).1;
    let trial =
        Trial { starts: starts.len(), count: plan.count, effort: &plan.effort, flips: FLIPS, run: &run };
    trial.run(plan.threads, chosen, progress)
}

/// Sequences by number, to be run without a step.
pub(super) struct Trial<'a, B> {
    /// How many things sequences begin on, and how many sequences there are.
    pub starts: usize,
    pub count: u64,
    pub effort: &'a Effort,
    /// Bits that go wrong while sites are noted.
    pub flips: u32,
    /// Runs a sequence on one of the starts, and says what was noticed.
    pub run: &'a (dyn Fn(usize, u64, &Effort) -> Option<B> + Sync),
}

/// A sequence on a start: their numbers, the start's first.
type Job = (usize, u64);

impl<B: Send + fmt::Display> Trial<'_, B> {
    pub fn run(
        &self,
        threads: usize,
        chosen: &dyn Fn(&Site) -> bool,
        progress: Progress<B>,
    ) -> Result<Vec<Mutant<B>>, String> {
        let Some(met) = self.meet(threads, progress)? else { return Ok(Vec::new()) };
        let sites: Vec<(&Site, &Vec<Job>)> = met.iter().filter(|(site, _)| chosen(site)).collect();
        let mutants = Mutex::new(BTreeMap::new());
        let next = AtomicUsize::new(0);
        on_threads(threads, || {
            while let Some((site, jobs)) = sites.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mutant = self.try_out(jobs, **site);
                let mut mutants = mutants.lock();
                if !progress(mutants.len() + 1, sites.len(), Some(&mutant)) {
                    next.store(sites.len(), Ordering::Relaxed);
                }
                mutants.insert(**site, mutant);
            }
        });
        Ok(mutants.into_inner().into_values().collect())
    }

    /// Sites, and which sequences meet them where; none where it was told to stop.
    fn meet(
        &self,
        threads: usize,
        progress: Progress<B>,
    ) -> Result<Option<BTreeMap<Site, Vec<Job>>>, String> {
        let total = self.starts as u64 * self.count;
        let met: Mutex<(usize, BTreeMap<Site, Vec<Job>>)> = Mutex::default();
        let stopped = AtomicBool::new(false);
        let failed: Mutex<Option<String>> = Mutex::default();
        let next = AtomicU64::new(0);
        // A few states of each crash point: most recoveries of one take the same steps.
        let bounds = Bounds { leaves_max: 32, lane_states: 1, ..self.effort.bounds.clone() };
        on_threads(threads, || {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= total || stopped.load(Ordering::Relaxed) {
                    return;
                }
                let job = ((n / self.count) as usize, n % self.count);
                let noted = Arc::new(Mutation::default());
                let mutation = Some(noted.clone());
                let effort = Effort {
                    bounds: bounds.clone(),
                    twice: false,
                    flips: self.flips,
                    mutation,
                    ..self.effort.clone()
                };
                if let Some(broken) = (self.run)(job.0, job.1, &effort) {
                    failed.lock().get_or_insert(format!("with nothing left out: {broken}"));
                    stopped.store(true, Ordering::Relaxed);
                    return;
                }
                let mut met = met.lock();
                noted.sites().into_iter().for_each(|site| met.1.entry(site).or_default().push(job));
                met.0 += 1;
                if !progress(met.0, total as usize, None) {
                    stopped.store(true, Ordering::Relaxed);
                }
            }
        });
        if let Some(failed) = failed.into_inner() {
            return Err(failed);
        }
        let (_, mut met) = met.into_inner();
        met.values_mut().for_each(|jobs| jobs.sort_unstable());
        Ok((!stopped.into_inner()).then_some(met))
    }

    /// Runs the sequences that meet the site without it until one shows it: with one failure, and then with another
    /// one in the recovery.
    fn try_out(&self, jobs: &[Job], site: Site) -> Mutant<B> {
        let mut tried = BTreeSet::new();
        for twice in [false, true] {
            for &(start, n) in jobs {
                let mutation = Some(Arc::new(Mutation::without(site)));
                let flips = if site.step == Step::Check { FLIPS } else { 0 };
                let effort = Effort { mutation, twice, flips, ..self.effort.clone() };
                tried.insert((start, n));
                let killed = (self.run)(start, n, &effort);
                if killed.is_some() {
                    return Mutant { site, sequences: tried.len() as u64, killed };
                }
            }
        }
        Mutant { site, sequences: tried.len() as u64, killed: None }
    }
}
