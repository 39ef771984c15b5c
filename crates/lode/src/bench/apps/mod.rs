//! Eight applications on uthreads, synchronous and asynchronous (EasyIO §6.3, Table 1 and Figure 10).
//!
//! Each item of an application reads a file of Table 1's size, works on it by a library that others use as well, and writes
//! what comes out. The synchronous run has one uthread on each app core, and the core copies; in the asynchronous ones
//! a device copies, and while it does so the core runs another uthread. Systems take turns, with the same items, on as
//! many app cores, and whatever they compute and leave in files has to be the same, or the row fails.
//!
//! **What is emulated.** Memory is DRAM. A core that copies is held up to the speed of Optane (`slow`), in all systems
//! alike; the emulated device is a thread of its own, held to a speed (`system` says which and whose). So with two cores
//! there is one app core. What is real: the file system, its copies and checksums, the uthreads, the applications.
//!
//! Files: `app` what an application is, one file for each of the eight, `text` words and log lines, `slow` the
//! memory, `system` who copies, `round` one timed round.

mod aes;
mod app;
#[cfg(test)]
mod bed;
mod bfs;
mod fileserver;
mod grep;
mod jpeg;
mod knn;
mod round;
pub(super) mod slow;
mod snappy;
pub(super) mod system;
mod text;
mod webserver;

use std::path::PathBuf;
use std::sync::Arc;

use lodestone::mover::EngineKind;
use lodestone::quote::Shown;
use lodestone::{Error, Result};

use self::app::{App, Desk};
use self::round::Round;
use self::system::{CORE, Copier, DMA, System, UTHREADS_PER_CORE};
use super::machine::{Machine, check_memory};
use super::place::Place;
use super::plan::Plan;
use super::report::{Claim, Outcome, Row, median};
use super::{make_pool, progress};

/// The synchronous run: what the others are held against.
pub const SYNC: &str = "sync";
/// With the device that is faster than a core.
const FAST: &str = "async-emu-dma";
const GIB: f64 = (1u64 << 30) as f64;
/// EasyIO §6.3 has 1.5 to 2.3 for those that do not mostly compute.
const SPEEDUP_AT_LEAST: f64 = 1.5;
const COMPUTING_AT_LEAST: f64 = 0.98;

/// What an application mostly does (EasyIO §6.3), hence what is claimed of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Copies: there is nothing to do meanwhile, so it gains by as much as the device is faster than a core.
    Copies,
    /// Both: copies and computation overlap, whatever the device's speed.
    Balanced,
    Computes,
}

struct Spec {
    name: &'static str,
    kind: Kind,
    /// In a round.
    items: usize,
    make: fn(usize) -> Result<Arc<dyn App>>,
}

const fn spec(name: &'static str, kind: Kind, items: usize, make: fn(usize) -> Result<Arc<dyn App>>) -> Spec {
    Spec { name, kind, items, make }
}

/// In the order of Table 1.
const APPS: &[Spec] = &[
    spec("app-snappy", Kind::Balanced, 64, |shrink| Ok(Arc::new(snappy::Snappy::new(shrink)?))),
    spec("app-jpeg", Kind::Computes, 16, |shrink| Ok(Arc::new(jpeg::Jpeg::new(shrink)?))),
    spec("app-aes", Kind::Computes, 1024, |shrink| Ok(Arc::new(aes::Aes::new(shrink)))),
    spec("app-grep", Kind::Balanced, 128, |shrink| Ok(Arc::new(grep::Grep::new(shrink)?))),
    spec("app-knn", Kind::Balanced, 192, |shrink| Ok(Arc::new(knn::Knn::new(shrink)?))),
    spec("app-bfs", Kind::Balanced, 192, |shrink| Ok(Arc::new(bfs::Bfs::new(shrink)))),
    spec("app-fileserver", Kind::Copies, 192, |shrink| Ok(Arc::new(fileserver::Fileserver::new(shrink)))),
    spec("app-webserver", Kind::Copies, 192, |shrink| Ok(Arc::new(webserver::Webserver::new(shrink)))),
];

/// How large a run is.
#[derive(Clone, Debug)]
pub struct Size {
    /// Files have this part of Table 1's size.
    pub shrink: usize,
    /// Rounds have this part of their items.
    pub fewer: usize,
    /// Of each system's pool: inputs and outputs of all applications.
    pub pool_bytes: u64,
    pub cores: usize,
}

/// Which engines cannot be measured here, in words.
fn objection(engines: &[EngineKind]) -> Option<String> {
    if engines.contains(&EngineKind::EmuIoat) {
        return Some("the speed of emu-ioat cannot be set for loads and stores apart; give emu".into());
    }
    let real = engines.iter().filter(|engine| is_real(**engine)).count();
    (0 < real && real < engines.len()).then(|| {
        "dsa and ioat are measured on memory as it is, the others on emulated slow memory: give one kind at a time".into()
    })
}

/// A device that has a speed of its own: what it runs on is taken for as slow as it is.
fn is_real(engine: EngineKind) -> bool {
    matches!(engine, EngineKind::Dsa | EngineKind::Ioat)
}

pub fn run(plan: &Plan, place: &mut Place, machine: &mut Machine) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let engines = match plan.engines.as_slice() {
        [] => vec![EngineKind::Emu],
        engines => engines.to_vec(),
    };
    let paced = !engines.iter().any(|engine| is_real(*engine));
    let lineup = lineup(&engines);
    check(plan, place, &engines, lineup.len())?;
    let mut systems: Vec<(System, PathBuf)> = Vec::new();
    let mut memory = None;
    for (name, copier) in lineup {
        progress(&format!("making a pool for {name}"));
        let path = plan.apps_pool_path(place, &name);
        let pool = make_pool(place, &path, plan.apps.pool_bytes, plan.assume[0])?;
        memory = Some(machine.memory_of("apps", &pool));
        match System::new(&name, copier, pool, paced.then_some(CORE))? {
            Some(system) => systems.push((system, path)),
            None => {
                outcome
                    .skipped
                    .push(format!("{name}: it cannot be used on this machine; lode info says why"));
            }
        }
    }
    outcome.notes = notes(plan, paced, &engines);
    if systems.len() > 1 {
        for spec in APPS {
            measure(spec, plan, &systems, paced, &mut outcome)?;
        }
    }
    outcome.rows.iter_mut().for_each(|row| row.memory = memory.clone());
    systems.into_iter().try_for_each(|(system, path)| system.close(&path))?;
    Ok(outcome)
}

/// The systems: the synchronous one first.
fn lineup(engines: &[EngineKind]) -> Vec<(String, Copier)> {
    let mut lineup = vec![(SYNC.to_owned(), Copier::Core)];
    for engine in engines {
        match engine {
            EngineKind::Emu => lineup.extend([
                ("async-emu".to_owned(), Copier::Device(CORE)),
                (FAST.to_owned(), Copier::Device(DMA)),
            ]),
            engine => lineup.push((format!("async-{engine}"), Copier::Engine(*engine))),
        }
    }
    lineup
}

/// Refuses applications that cannot run here.
fn check(plan: &Plan, place: &Place, engines: &[EngineKind], systems: usize) -> Result<()> {
    let refused = |message: String| Err(Error::message(libc::EINVAL, "bench::apps", message));
    if let Some(objection) = objection(engines) {
        return refused(objection);
    }
    if let Some(device) = plan.device() {
        return refused(format!(
            "{} holds one pool, and each system needs one: give a path on a DAX file system",
            device.shown()
        ));
    }
    let (what, need) = ("a pool for each system", systems as u64 * plan.apps.pool_bytes);
    match plan.pool {
        None => place.check_room(what, need),
        Some(_) if plan.pools_take_memory() => check_memory(what, need),
        Some(_) => Ok(()),
    }
}

fn notes(plan: &Plan, paced: bool, engines: &[EngineKind]) -> Vec<String> {
    let cores = plan.apps.cores;
    let mut notes = vec![format!(
        "apps: {cores} app core{}, {UTHREADS_PER_CORE} uthreads each (sync: 1); a round is a number of items{}",
        if cores == 1 { "" } else { "s" },
        if engines.contains(&EngineKind::Emu) {
            "; the emulated device's thread takes another core"
        } else {
            ""
        },
    )];
    let gb = |rate: u64| rate as f64 / 1e9;
    if paced {
        notes.push(format!(
            "apps: emulated: memory is DRAM; a core that copies spins until the time of Optane is over, {:.1} GB/s for stores \
             and {:.1} for loads, in all systems",
            gb(CORE.store),
            gb(CORE.load)
        ));
    }
    if engines.contains(&EngineKind::Emu) {
        notes.push(format!(
            "apps: emulated: the device of async-emu has the speed of one core, that of async-emu-dma {:.1} GB/s for stores and \
             {:.1} for loads",
            gb(DMA.store),
            gb(DMA.load)
        ));
    }
    notes
}

/// All rounds of one application.
fn measure(
    spec: &Spec,
    plan: &Plan,
    systems: &[(System, PathBuf)],
    paced: bool,
    outcome: &mut Outcome,
) -> Result<()> {
    progress(&format!("{}: making its input", spec.name));
    let app = (spec.make)(plan.apps.shrink)?;
    let cores = plan.apps.cores;
    // At least two for each uthread.
    let items = (spec.items / plan.apps.fewer).max(2 * UTHREADS_PER_CORE * cores);
    let named = |e: Error| e.context(spec.name);
    systems.iter().try_for_each(|(system, _)| app.prepare(&system.shelf, items)).map_err(named)?;
    let mut desks: Vec<Vec<Desk>> = systems.iter().map(|_| Vec::new()).collect();
    let mut rounds: Vec<Vec<Round>> = systems.iter().map(|_| Vec::new()).collect();
    // The first one warms up.
    for turn in 0..=plan.rounds {
        for place in 0..systems.len() {
            let which = (turn + place) % systems.len();
            let system = &systems[which].0;
            progress(&format!("{} {}, round {turn} of {}", spec.name, system.name, plan.rounds));
            let round = round::run(system, &app, items, cores, &mut desks[which]).map_err(named)?;
            rounds[which].push(round);
        }
    }
    same_results(spec.name, systems, &rounds)?;
    let promise = if paced { "durable and atomic; emulated slow memory" } else { "durable and atomic" };
    let rows: Vec<Row> = systems
        .iter()
        .zip(&rounds)
        .map(|((system, _), rounds)| row(spec.name, &system.name, cores, promise, &rounds[1..]))
        .collect();
    outcome.claims.extend(claim(spec, &rows));
    outcome.rows.extend(rows);
    outcome.rows.push(copying_row(spec.name, cores, &rounds[0][1..]));
    Ok(())
}

/// Whatever computed and copied: what came out is the same, each time.
fn same_results(name: &str, systems: &[(System, PathBuf)], rounds: &[Vec<Round>]) -> Result<()> {
    let want = rounds[0][0].result;
    for ((system, _), rounds) in systems.iter().zip(rounds) {
        if let Some(round) = rounds.iter().position(|round| round.result != want) {
            let message = format!(
                "{name}: {} computed or stored something else than {SYNC} did, in round {round}: no row is worth having",
                system.name
            );
            return Err(Error::message(libc::EIO, "bench::apps", message));
        }
    }
    Ok(())
}

fn row(name: &str, system: &str, cores: usize, promise: &'static str, rounds: &[Round]) -> Row {
    let of = |number: &dyn Fn(&Round) -> f64| median(&rounds.iter().map(number).collect::<Vec<_>>());
    let rates: Vec<f64> = rounds.iter().map(|round| round.items as f64 / round.seconds).collect();
    let middle = median(&rates);
    let gib = |round: &Round| round.bytes as f64 / GIB;
    Row {
        name: name.to_owned(),
        system: system.to_owned(),
        threads: cores,
        ops_per_s: middle,
        gib_per_s: Some(of(&|round| gib(round) / round.seconds)),
        p50_us: of(&|round| round.p50_us),
        p99_us: of(&|round| round.p99_us),
        cpu_s_per_gib: Some(of(&|round| round.cpu_s / gib(round))),
        cpu_us_per_op: Some(of(&|round| round.cpu_s * 1e6 / round.items as f64)),
        waiting_share: None,
        cpu_scope: round::SCOPE.name(),
        promise,
        memory: None,
        rounds: rounds.len(),
        ops_per_s_min: rates.iter().copied().fold(middle, f64::min),
        ops_per_s_max: rates.iter().copied().fold(middle, f64::max),
        ops_per_s_rounds: rates,
        value: None,
        unit: None,
    }
}

/// How much of the synchronous run is copying: the part that a device can take over.
fn copying_row(name: &str, cores: usize, rounds: &[Round]) -> Row {
    let shares: Vec<f64> = rounds.iter().map(|round| round.copying_share * 100.0).collect();
    Row {
        name: format!("{name}-copying"),
        ops_per_s: 0.0,
        gib_per_s: None,
        p50_us: 0.0,
        p99_us: 0.0,
        cpu_s_per_gib: None,
        cpu_us_per_op: None,
        waiting_share: None,
        ops_per_s_min: 0.0,
        ops_per_s_max: 0.0,
        ops_per_s_rounds: Vec::new(),
        value: Some(median(&shares)),
        unit: Some("% of time"),
        ..row(name, SYNC, cores, "", rounds)
    }
}

/// What is claimed of an application, held by the first asynchronous system; of one that only copies, by the fast device
/// where there is one, for with a device as slow as a core there is nothing to gain.
fn claim(spec: &Spec, rows: &[Row]) -> Option<Claim> {
    let (sync, others) = rows.split_first()?;
    let fast = others.iter().find(|row| spec.kind == Kind::Copies && row.system == FAST);
    let own = fast.or(others.first())?;
    let target = if spec.kind == Kind::Computes { COMPUTING_AT_LEAST } else { SPEEDUP_AT_LEAST };
    let ratio = own.ops_per_s / sync.ops_per_s;
    let ratios = own.ops_per_s_rounds.iter().zip(&sync.ops_per_s_rounds).map(|(own, sync)| own / sync);
    let (ratio_min, ratio_max) =
        ratios.fold((ratio, ratio), |(least, most), ratio| (least.min(ratio), most.max(ratio)));
    Some(Claim {
        row: spec.name.to_owned(),
        system: own.system.clone(),
        threads: own.threads,
        metric: "ops_per_s",
        against: SYNC.to_owned(),
        ratio,
        ratio_min,
        ratio_max,
        bound: "at least",
        target,
        ok: ratio >= target,
    })
}

#[cfg(test)]
mod tests {
    use lodestone::media::{Domain, Pool, PoolOptions};

    use super::system::System;
    use super::*;

    fn system(name: &str, copier: Copier) -> (System, PathBuf) {
        let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
        let pool = Pool::memfd(96 << 20, &options).unwrap();
        (System::new(name, copier, pool, None).unwrap().unwrap(), PathBuf::new())
    }

    /// Every application on every kind of system, on one core and on two: the results are the same, and devices copied.
    #[test]
    fn results_do_not_depend_on_who_copies() {
        let systems = [
            system(SYNC, Copier::Core),
            system("emu", Copier::Device(DMA)),
            system("delegate", Copier::Engine(EngineKind::Delegate)),
        ];
        for spec in APPS {
            let app = (spec.make)(8).unwrap();
            systems.iter().for_each(|(system, _)| app.prepare(&system.shelf, 16).unwrap());
            let run = |(system, _): &(System, PathBuf)| -> Vec<Round> {
                let mut desks = Vec::new();
                [1, 2].map(|cores| round::run(system, &app, 16, cores, &mut desks).unwrap()).into()
            };
            let rounds: Vec<Vec<Round>> = systems.iter().map(run).collect();
            same_results(spec.name, &systems, &rounds).unwrap();
            assert!(
                rounds.iter().flatten().all(|round| round.bytes > 0 && round.bytes == rounds[0][0].bytes)
            );
            assert!(rounds[0][0].result != 0, "{}", spec.name);
        }
        for (system, _) in &systems[1..] {
            let moved = system.shelf.fs().mover().moved();
            assert!(moved.bytes > 16 << 20 && moved.finished == 0, "{}: {moved:?}", system.name);
        }
        assert_eq!(systems[0].0.shelf.fs().mover().moved().copies, 0);
    }

    /// A page that was stored elsewhere, or by another item, is seen.
    #[test]
    fn other_results_fail_the_row() {
        let systems = [system(SYNC, Copier::Core), system("emu", Copier::Device(CORE))];
        let app = (APPS[2].make)(16).unwrap();
        let round = |(system, _): &(System, PathBuf), spoil: bool| {
            app.prepare(&system.shelf, 8).unwrap();
            if spoil {
                let fd = system.shelf.open(b"/aes/in.3", libc::O_WRONLY, 0).unwrap();
                system.shelf.pwrite(fd, b"?", 1000).unwrap();
                system.shelf.close(fd).unwrap();
            }
            vec![round::run(system, &app, 8, 1, &mut Vec::new()).unwrap()]
        };
        let rounds = [round(&systems[0], false), round(&systems[1], true)];
        let error = same_results("app-aes", &systems, &rounds).unwrap_err().to_string();
        assert!(error.contains("app-aes") && error.contains("emu") && error.contains("round 0"), "{error}");
    }

    fn rate(system: &str, rates: &[f64]) -> Row {
        let round = |rate: &f64| Round {
            items: 10,
            seconds: 10.0 / rate,
            cpu_s: 1.0,
            p50_us: 1.0,
            p99_us: 2.0,
            bytes: 1 << 30,
            copying_share: 0.5,
            result: 1,
        };
        row("app-x", system, 1, "", &rates.iter().map(round).collect::<Vec<_>>())
    }

    #[test]
    fn a_claim_is_held_by_the_device_that_can_keep_it() {
        let rows = [
            rate(SYNC, &[100.0, 80.0, 120.0]),
            rate("async-emu", &[99.0, 97.0, 130.0]),
            rate(FAST, &[160.0, 150.0, 180.0]),
            rate("async-delegate", &[10.0, 10.0, 10.0]),
        ];
        let of = |kind| {
            let claim = claim(&Spec { kind, ..spec("app-x", kind, 1, |_| unreachable!()) }, &rows).unwrap();
            assert_eq!(claim.against, SYNC);
            (claim.system, claim.target, claim.ok)
        };
        assert_eq!(of(Kind::Balanced), ("async-emu".to_owned(), 1.5, false));
        assert_eq!(of(Kind::Computes), ("async-emu".to_owned(), 0.98, true));
        assert_eq!(of(Kind::Copies), ("async-emu-dma".to_owned(), 1.5, true));
    }

    #[test]
    fn engines_of_two_kinds_are_refused_in_words() {
        assert_eq!(objection(&[]), None);
        assert_eq!(objection(&[EngineKind::Emu, EngineKind::Delegate]), None);
        assert_eq!(objection(&[EngineKind::Dsa]), None);
        assert!(objection(&[EngineKind::Dsa, EngineKind::Emu]).unwrap().contains("as it is"));
        assert!(objection(&[EngineKind::EmuIoat]).unwrap().contains("emu-ioat"));
    }
}
