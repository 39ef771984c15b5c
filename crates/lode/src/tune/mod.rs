//! `lode tune`: what engines are worth on this machine, found by measuring and kept in a profile (docs/tune.md).
//!
//! Fastmove (§6.3.2) found thresholds and limits by hand and left finding them by program to the future; this is it.
//!
//! Files: `plan` sizes, threads and where they run, `bed` the pool that is measured in, `turn` one engine's turn,
//! `measure` who takes turns with whom, `rule` the rules as functions of numbers, `outcome` what the rounds amount to by
//! them, `decision` the cost of deciding, `report` all that was found, `table` and `plot` what people see, `store` the
//! file.

mod bed;
mod decision;
mod measure;
mod outcome;
mod plan;
mod plot;
mod report;
mod rule;
mod store;
mod table;
mod turn;

use std::path::{Path, PathBuf};
use std::time::Duration;

use lodestone::fs::{Fs, MkfsOptions, Time};
use lodestone::media::{Description, Domain, Media, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::identity::{Machine, memory};
use lodestone::mover::node;
use lodestone::mover::profile::{Lane, Profile};
use lodestone::mover::profile_text::{Document, render};
use lodestone::mover::schedule::Direction;
use rustix::time::{ClockId, clock_gettime};

use crate::bench::{allowed_cores, memory_available_bytes};
use crate::cmd::utc;
use crate::cost::load::CpuTimes;
use crate::failure::{Failure, Result, complain, reason};
use crate::interrupt;
use crate::outfile;
use crate::pool::{Access, map};
use crate::profile;
use crate::progress::Steps;
use crate::size::Size;
use crate::target::show;

use bed::{Bed, Sharing};
use measure::{Contestant, Row, check_interrupt, rounds, turns};
use plan::{Plan, SIZES, SWEEP_BYTES, Site};
use report::{
    Copies, Decision, EngineFacts, Measures, MediaFacts, Method, ProfileFacts, Report, Sweep, Where,
};
use store::Draft;

/// How long other work is watched before.
const WATCHED: Duration = Duration::from_millis(500);
/// So much of all CPUs may be busy with other work before somebody is told.
const BUSY_SHARE_MAX: f64 = 0.05;
/// An engine took its copies where it took so many of them, of 1: the rest is what a full queue refuses.
const TAKEN_MIN: f64 = 0.5;

/// What the command line says.
pub struct TuneOptions {
    /// None: one is made in memory.
    pub pool: Option<PathBuf>,
    /// None: all that are no emulated devices.
    pub engines: Vec<EngineKind>,
    pub quick: bool,
    pub assume: Option<Domain>,
    pub out: Option<PathBuf>,
    pub dry_run: bool,
    pub svg: Option<PathBuf>,
    /// Answer with the JSON document instead of the table.
    pub json: bool,
}

/// Measures, and writes the profile; the answer is the text for stdout.
pub fn run(options: &TuneOptions) -> Result<String> {
    interrupt::catch();
    let plan = Plan::new(&options.engines, options.quick);
    let place = options.out.clone().or_else(profile::place);
    let draft = match (&place, options.dry_run) {
        (_, true) => None,
        (Some(place), false) => Some(Draft::new(place)?),
        (None, false) => {
            return Err(Failure::failed(
                "there is no place for the profile: HOME is not set; name one with --out",
            ));
        }
    };
    let media = media(options, &plan)?;
    let description = media.describe();
    let machine = Machine::here();
    let old = Old::read(place.as_deref(), &machine, &memory(&description.regions));
    let busy = busy_share(machine.cpus)?;
    let session = Session::new(&plan, &description, &media, machine.cpus)?;
    let (measured, media) = session.run(media)?;
    // What was measured is closed before anything is said.
    drop(media);
    let (document, mut report) = conclude(options, &plan, &session, &measured, &description, machine, &old);
    report.warnings.extend(busy_warning(busy));
    report.profile.path = place.as_deref().map(|place| show(place).to_string());
    check_interrupt()?;
    if let Some(draft) = draft {
        draft.publish(&render(&document))?;
        report.profile.written = true;
    }
    deliver(&report, options)
}

/// How busy the machine is with other work, of 1.
fn busy_share(cpus: usize) -> Result<f64> {
    let before = CpuTimes::now()?;
    std::thread::sleep(WATCHED);
    check_interrupt()?;
    Ok(CpuTimes::now()?.since(&before).busy_s() / WATCHED.as_secs_f64() / cpus.max(1) as f64)
}

/// Other work slows everybody, but not alike: who copies on more threads gets more of a CPU that is fought for.
fn busy_warning(share: f64) -> Option<String> {
    (share > BUSY_SHARE_MAX).then(|| {
        format!(
            "the machine was {:.0} % busy with other work before, more than {:.0} %: measure again when it is quiet",
            share * 100.0,
            BUSY_SHARE_MAX * 100.0
        )
    })
}

/// The pool that is named, or one in memory.
fn media(options: &TuneOptions, plan: &Plan) -> Result<Pool> {
    if let Some(pool) = &options.pool {
        return Ok(map(pool, Access::Write, options.assume)?.0);
    }
    let assume = Some(options.assume.unwrap_or(Domain::Memory));
    // No site has more.
    let files = plan.files(allowed_cores()?.len());
    plan.check_memory(files, memory_available_bytes()).map_err(Failure::failed)?;
    let pool = Pool::memfd(plan.pool_bytes(files), &PoolOptions { assume, ..PoolOptions::default() })?;
    Ok(Fs::mkfs(pool, &MkfsOptions::default())?)
}

/// The profile that stands where the new one goes.
struct Old {
    document: Option<Document>,
    /// Why it is not compared with, where there is one.
    note: Option<String>,
}

impl Old {
    fn read(place: Option<&Path>, machine: &Machine, memory: &[String]) -> Old {
        match place.map_or(Ok(None), profile::read) {
            Ok(None) => Old { document: None, note: None },
            Ok(Some(document)) => {
                match document.wrong_machine(machine).or_else(|| document.wrong_memory(memory)) {
                    None => Old { document: Some(document), note: None },
                    note => Old { document: None, note },
                }
            }
            Err(why) => Old { document: None, note: Some(why) },
        }
    }
}

/// What is fixed before the first turn.
struct Session<'a> {
    plan: &'a Plan,
    sites: Vec<Site>,
    /// Why local and remote copies are not both measured.
    site_note: Option<String>,
    /// CPUs that this process may use, and those of the machine, which the profile will be taken for.
    cpus: (usize, usize),
    regions: usize,
    files: usize,
    /// For messages.
    pool: String,
}

/// All rounds.
struct Measured {
    /// Copies at a time by the calling threads.
    sweep: Vec<Row>,
    /// What was found of them when all else had been measured, where that was something else.
    changed: Option<String>,
    profile: Profile,
    /// All engines beside the CPU.
    rows: Vec<Row>,
    /// Reads of engines that share them with the CPU.
    shared: Vec<Row>,
    /// Copies at a time by devices.
    device_sweep: Vec<Row>,
    file_bytes: u64,
    /// Engines that copied.
    engines: Vec<EngineKind>,
    skipped: Vec<String>,
}

impl Session<'_> {
    fn new<'a>(plan: &'a Plan, description: &Description, media: &Pool, cpus: usize) -> Result<Session<'a>> {
        let nodes: Vec<(u32, &[usize])> =
            node::nodes().iter().map(|node| (node.number, node.cpus())).collect();
        let regions = description.regions.len();
        let pool_nodes: Vec<Option<u32>> = (0..regions).map(|region| media.node(region)).collect();
        let allowed = allowed_cores()?;
        let (sites, site_note) = plan::sites(&nodes, &pool_nodes, &allowed);
        let most = sites.iter().map(|site| site.cpus.len()).max().unwrap_or(1);
        let files = plan.files(most);
        let cpus = (allowed.len(), cpus);
        let pool = description.regions.first().map_or(String::new(), |region| show(&region.path).to_string());
        Ok(Session { plan, sites, site_note, cpus, regions, files, pool })
    }

    /// Everything, in files of `media`, which it gives back closed.
    fn run(&self, media: Pool) -> Result<(Measured, Pool)> {
        let steps = Steps::new();
        let cpu_sweep = self.sweep_of(EngineKind::Cpu, &plan::counts(self.sites[0].cpus.len()));
        let mut all = self.contestants(EngineKind::Cpu, Lane::ALL.as_slice());
        all.extend(self.plan.engines.iter().flat_map(|kind| self.contestants(*kind, Lane::ALL.as_slice())));
        let devices = self.plan.engines.iter().filter(|kind| !kind.bounds_itself());
        let counts = plan::device_counts(self.sites[0].cpus.len());
        let device_sweep: Vec<Contestant> = devices.flat_map(|kind| self.sweep_of(*kind, &counts)).collect();
        for (contestants, sizes) in [
            (&cpu_sweep, &[SWEEP_BYTES][..]),
            (&all, &SIZES),
            (&device_sweep, &[SWEEP_BYTES]),
            (&cpu_sweep, &[SWEEP_BYTES]),
        ] {
            steps.expect(turns(contestants, sizes, self.plan));
        }

        let mut profile = Profile::default();
        let bed = self.bed(media, &profile, Sharing::EngineAlone, &steps)?;
        let file_bytes = bed.file_bytes;
        let sweep = rounds(&bed, &cpu_sweep, &[SWEEP_BYTES], self.plan, &steps)?;
        let lane = self.sites[0].lane(Direction::Write);
        let concurrency = |sweep: &[Row]| {
            let counts = outcome::counts(sweep, EngineKind::Cpu, lane);
            outcome::concurrency(&counts, self.regions, self.cpus.0 < self.cpus.1)
        };
        profile.concurrency = concurrency(&sweep);

        // Semaphore and delegate with as many copies at a time as they will have.
        let bed = self.bed(bed.close()?, &profile, Sharing::EngineAlone, &steps)?;
        let sharing: Vec<EngineKind> =
            self.plan.engines.iter().copied().filter(|kind| shares(&bed, *kind)).collect();
        let rows = rounds(&bed, &all, &SIZES, self.plan, &steps)?;
        let device_sweep = rounds(&bed, &device_sweep, &[SWEEP_BYTES], self.plan, &steps)?;
        let last = concurrency(&rounds(&bed, &cpu_sweep, &[SWEEP_BYTES], self.plan, &steps)?);
        let changed = changed(profile.concurrency, last);
        profile.concurrency = profile.concurrency.min(last);
        let (engines, skipped) = self.which_copied(&rows);
        profile.set_bandwidths(EngineKind::Cpu, outcome::bandwidths(&rows, EngineKind::Cpu));
        for kind in &engines {
            profile.set_bandwidths(*kind, outcome::bandwidths(&rows, *kind));
        }

        // Reads as they will be shared.
        let sharing: Vec<EngineKind> = sharing.into_iter().filter(|kind| engines.contains(kind)).collect();
        let (mut shared, mut bed) = (Vec::new(), bed);
        if !sharing.is_empty() {
            let reads = [Lane::LocalRead, Lane::RemoteRead];
            let all = std::iter::once(EngineKind::Cpu).chain(sharing);
            let all: Vec<Contestant> = all.flat_map(|kind| self.contestants(kind, &reads)).collect();
            steps.expect(turns(&all, &SIZES, self.plan));
            bed = self.bed(bed.close()?, &profile, Sharing::Profile, &steps)?;
            shared = rounds(&bed, &all, &SIZES, self.plan, &steps)?;
        }
        let media = bed.close()?;
        Ok((
            Measured { sweep, changed, profile, rows, shared, device_sweep, file_bytes, engines, skipped },
            media,
        ))
    }

    fn bed(&self, media: Pool, profile: &Profile, sharing: Sharing, steps: &Steps) -> Result<Bed> {
        let of_pool = |why| Failure::failed(format_args!("{}: {why}", self.pool));
        let mut bed = Bed::open(media, profile, sharing).map_err(|e| of_pool(reason(&e)))?;
        let file_bytes = self.plan.file_bytes(self.files, bed.free_bytes()).map_err(of_pool)?;
        steps.name(format!("filling {} files of {}", self.files, Size(file_bytes)));
        bed.fill(self.files, file_bytes, &check_interrupt)?;
        Ok(bed)
    }

    /// Of one engine, at each site, with one thread and with all.
    fn contestants(&self, kind: EngineKind, lanes: &[Lane]) -> Vec<Contestant> {
        let mut all = Vec::new();
        for site in &self.sites {
            for lane in lanes.iter().filter(|lane| lane.remote() == site.remote) {
                all.extend(
                    site.threads().into_iter().map(|threads| Contestant::new(kind, *lane, site, threads)),
                );
            }
        }
        all
    }

    /// More and more copies at a time, at the first site.
    fn sweep_of(&self, kind: EngineKind, counts: &[usize]) -> Vec<Contestant> {
        let site = &self.sites[0];
        let lanes = [Direction::Write, Direction::Read].map(|direction| site.lane(direction));
        let of = |lane| counts.iter().map(move |count| Contestant::new(kind, lane, site, *count));
        lanes.into_iter().flat_map(of).collect()
    }

    /// Engines that took their copies. What an engine refuses the CPU copies: that is not to be shown as the engine's.
    fn which_copied(&self, rows: &[Row]) -> (Vec<EngineKind>, Vec<String>) {
        let (mut copied, mut skipped) = (Vec::new(), Vec::new());
        for &kind in &self.plan.engines {
            let taken = rows.iter().filter(|row| row.engine == kind).map(Row::taken).fold(1.0, f64::min);
            match taken >= TAKEN_MIN {
                true => copied.push(kind),
                false => skipped.push(format!(
                    "{kind}: it took {:.0} % of its copies, and the CPU did the rest; lode info says what it lacks",
                    taken * 100.0
                )),
            }
        }
        (copied, skipped)
    }
}

/// Somebody else's work, or a virtual machine's host, makes memory bear more at one time than at another.
fn changed(first: usize, last: usize) -> Option<String> {
    (first != last).then(|| {
        format!(
            "copies at a time that are worth it were {first} at the beginning and {last} at the end, and the profile has \
             the smaller number: measure again"
        )
    })
}

/// Whether an engine leaves a share of reads to the CPU.
fn shares(bed: &Bed, kind: EngineKind) -> bool {
    bed.fs().mover().engine(kind).is_some_and(|engine| engine.capability().shares_reads)
}

/// The profile, and the report of it.
fn conclude(
    options: &TuneOptions,
    plan: &Plan,
    session: &Session<'_>,
    measured: &Measured,
    description: &Description,
    machine: Machine,
    old: &Old,
) -> (Document, Report) {
    let measures = |kind| Measures {
        kind,
        rows: &measured.rows,
        shared: &measured.shared,
        sweep: &measured.device_sweep,
    };
    let mut profile = measured.profile.clone();
    let [write, read] = [Direction::Write, Direction::Read].map(|direction| session.sites[0].lane(direction));
    for &kind in &measured.engines {
        let found = measures(kind);
        let sweep = |lane| outcome::counts(found.sweep, kind, lane);
        let limits = profile.limits_mut(kind).expect("the CPU is not among them");
        limits.in_flight_max = match kind.bounds_itself() {
            true => None,
            false => outcome::in_flight_max(&sweep(write), &sweep(read), session.regions),
        };
        for lane in found.lanes() {
            limits.thresholds.set(lane, outcome::threshold_of(&found.beside(lane)));
        }
    }
    let before = old.document.as_ref();
    let engines = std::iter::once(EngineKind::Cpu).chain(measured.engines.iter().copied());
    let facts = engines.clone().map(|kind| EngineFacts::of(&measures(kind), &profile, before)).collect();
    let kept =
        keep(&mut profile, before, &engines.clone().chain(plan.engines.iter().copied()).collect::<Vec<_>>());
    let cpu_sweep = |lane| Sweep::of_callers(&outcome::counts(&measured.sweep, EngineKind::Cpu, lane));
    let copies = Copies {
        concurrency: profile.concurrency,
        was: before.map(|before| before.profile.concurrency),
        size_bytes: SWEEP_BYTES,
        write: cpu_sweep(write),
        read: cpu_sweep(read),
    };
    let report = Report {
        machine: Where::of(&machine),
        media: MediaFacts {
            pool: options.pool.as_deref().map(|pool| show(pool).to_string()),
            memory: memory(&description.regions),
            domain: description.domain.name(),
            emulated: description.emulated,
            regions: session.regions,
        },
        method: Method {
            quick: options.quick,
            rounds: plan.rounds,
            slice_ms: plan.slice.as_secs_f64() * 1e3,
            files: session.files,
            file_bytes: measured.file_bytes,
            last_level_cache_bytes: plan.last_level_cache_bytes,
        },
        decision: Decision::of(decision::cost_ns()),
        copies,
        engines: facts,
        profile: ProfileFacts {
            path: None,
            written: false,
            before: before.map(|before| before.written.clone()),
            not_compared: old.note.clone(),
            kept: kept.iter().map(|kind| kind.name()).collect(),
        },
        skipped: measured.skipped.clone(),
        warnings: measured
            .changed
            .iter()
            .cloned()
            .chain(warnings(plan, session, measured.file_bytes))
            .collect(),
    };
    let document = Document {
        written: utc(Time::new(clock_gettime(ClockId::Realtime).tv_sec, 0)),
        memory: report.media.memory.clone(),
        domain: report.media.domain.to_owned(),
        emulated_memory: report.media.emulated,
        engines: engines.chain(kept).collect(),
        machine,
        profile,
    };
    (document, report)
}

/// Engines that nobody asked about keep what the old profile says of them.
fn keep(profile: &mut Profile, before: Option<&Document>, asked: &[EngineKind]) -> Vec<EngineKind> {
    let Some(before) = before else { return Vec::new() };
    let kept: Vec<EngineKind> = before.engines.iter().copied().filter(|kind| !asked.contains(kind)).collect();
    for &kind in &kept {
        if let (Some(limits), Some(old)) = (profile.limits_mut(kind), before.profile.limits(kind)) {
            *limits = *old;
        }
        if let Some(bandwidths) = before.profile.bandwidths(kind) {
            profile.set_bandwidths(kind, *bandwidths);
        }
    }
    kept
}

/// A container, or taskset, allows some.
fn few_cpus((allowed, all): (usize, usize)) -> Option<String> {
    (allowed < all).then(|| {
        format!(
            "this process may use {allowed} of {all} CPUs, and the profile will be taken for all of them: measure where it may \
             use as many"
        )
    })
}

fn warnings(plan: &Plan, session: &Session<'_>, file_bytes: u64) -> Vec<String> {
    let mut warnings: Vec<String> = session.site_note.iter().cloned().chain(few_cpus(session.cpus)).collect();
    let files = file_bytes * session.files as u64;
    match plan.last_level_cache_bytes {
        Some(cache) if files <= cache => warnings.push(format!(
            "files of {} together fit the last-level cache of {}: reads may be faster than memory is",
            Size(files),
            Size(cache)
        )),
        Some(_) => {}
        None => warnings.push("the kernel does not say how large the last-level cache is".to_owned()),
    }
    warnings
}

fn deliver(report: &Report, options: &TuneOptions) -> Result<String> {
    for skipped in &report.skipped {
        complain(format_args!("skipped: {skipped}"));
    }
    outfile::with_picture(answer(report, options)?, options.svg.as_deref(), || Ok(plot::render(report)))
}

fn answer(report: &Report, options: &TuneOptions) -> Result<String> {
    if !options.json {
        return Ok(table::render(report));
    }
    let mut text = serde_json::to_string_pretty(report).map_err(Failure::failed)?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_warned_of() {
        assert_eq!(busy_warning(0.04), None);
        assert!(busy_warning(0.42).unwrap().contains("42 % busy with other work"));
    }

    #[test]
    fn a_profile_of_few_cpus_is_warned_of() {
        assert_eq!(few_cpus((2, 2)), None);
        assert!(few_cpus((1, 2)).unwrap().contains("1 of 2 CPUs"));
    }

    #[test]
    fn a_machine_that_changed_is_warned_of() {
        assert_eq!(changed(2, 2), None);
        assert!(changed(2, 1).unwrap().contains("2 at the beginning and 1 at the end"));
    }

    #[test]
    fn what_was_not_asked_about_is_kept() {
        let before = {
            let mut profile = Profile::default();
            profile.delegate.thresholds.set(Lane::LocalWrite, 128 << 10);
            profile.emu.in_flight_max = Some(7);
            Document {
                written: String::new(),
                machine: Machine::here(),
                memory: Vec::new(),
                domain: String::new(),
                emulated_memory: false,
                engines: vec![EngineKind::Cpu, EngineKind::Delegate, EngineKind::Emu],
                profile,
            }
        };
        let mut profile = Profile::default();
        let kept = keep(&mut profile, Some(&before), &[EngineKind::Cpu, EngineKind::Delegate]);
        assert_eq!(kept, [EngineKind::Emu]);
        assert_eq!(profile.emu.in_flight_max, Some(7));
        assert_eq!(profile.delegate, Profile::default().delegate, "it was measured anew");
        assert!(keep(&mut profile, None, &[]).is_empty());
    }
}
