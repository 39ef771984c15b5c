//! `lode bench`: this file system, others, and the memory below them, measured side by side.
//!
//! Every claim is a ratio between systems that took turns in one run on one machine; the rows, their
//! targets and the method are fixed here, so that a result can be argued with. `limit` is the raw copy
//! on the same kind of memory: what no file system can beat without doing less.
//!
//! Files: `rows` the catalogue and targets, `plan` options checked and sizes chosen, `place` tmpfs,
//! ext4 and pool files, `worker` the timed loop, `turns` who runs when and on which core, `peer_*` the
//! systems, `mount` fio on mounts, `breakdown` where the time of reads and writes goes, `capacity` pools of
//! a million files and of 1 TiB, `uthreads` what those cost, `offload` what a device leaves of a core, `orderless`
//! what it brings to commit before the copy ends, `apps` applications on uthreads, `waits` what it costs to wait, `qos`
//! what classes of copies do to each other, `value` rows that are a number, `report` rows and claims, `table` and `plot`
//! what people see, `clock` time stamps and CPU time, `machine` where.

mod apps;
mod breakdown;
mod breakdown_plot;
mod capacity;
mod clock;
mod machine;
mod mount;
mod offload;
mod orderless;
mod peer_kernel;
mod peer_limit;
mod peer_lode;
mod place;
mod plan;
mod plot;
mod qos;
mod report;
mod rows;
mod table;
mod turns;
mod uthreads;
mod value;
mod waits;
mod worker;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lodestone::fs::{Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Media, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::{Error, Result};

use crate::outfile;
use crate::profile;
use crate::target::show;
pub use clock::{device_cpu_s, process_cpu_s, thread_cpu_ns};
pub use machine::memory_available_bytes;
pub use plan::USAGE;
pub use table::digits;
pub use turns::{allowed_cores, pin_thread};
pub use worker::{Pages, Random};

use machine::{Machine, Memory, load};
use mount::Mounted;
use peer_kernel::KernelWorker;
use peer_limit::LimitWorker;
use peer_lode::LodeWorker;
use place::{Mapping, Place};
use plan::Plan;
use report::{Outcome, Report};
use turns::{Contestant, CpuScope, Crew, Seat, separate_cores};
use worker::{Job, Names};

/// What the command line says. Empty lists mean the defaults.
#[derive(Clone, Debug, Default)]
pub struct BenchOptions {
    /// Row names, or the groups "mount" and "data" and "names".
    pub only: Vec<String>,
    /// "tmpfs", "ext4".
    pub peers: Vec<String>,
    /// Smaller sizes, shorter rounds, one thread, nothing that takes minutes.
    pub quick: bool,
    /// Shows that every row works, in seconds; the numbers mean nothing.
    pub smoke: bool,
    /// Answer with the JSON document instead of the table.
    pub json: bool,
    /// Write the picture here.
    pub svg: Option<PathBuf>,
    pub threads: Vec<usize>,
    /// Persistence domains to run lode in, the first as system `lode`, others as `lode-DOMAIN`.
    pub assume: Vec<Domain>,
    /// Engines that copy besides the CPU, each as a system of its own.
    pub engines: Vec<EngineKind>,
    /// What engines are worth; else what other commands take.
    pub profile: Option<PathBuf>,
    /// Where to make the first pool, and the others with `.1`, `.2` ... and `.limit` added: a path that is free. Default: tmpfs.
    pub pool: Option<PathBuf>,
    pub rounds: Option<usize>,
    /// The rows of the mount, against bindfs.
    pub mount: bool,
    /// Instead of the rows: where the time of reads and writes goes, by size.
    pub breakdown: bool,
}

/// Names that `--only` takes.
pub fn row_names() -> impl Iterator<Item = &'static str> {
    rows::ROWS.iter().chain(rows::MOUNT_ROWS).map(|r| r.name).chain(rows::VALUE_ROWS.iter().copied())
}

/// Runs the bench; the answer is the text for stdout.
pub fn run(options: &BenchOptions) -> Result<String> {
    let answer = measure(options);
    progress_end();
    answer
}

fn measure(options: &BenchOptions) -> Result<String> {
    let plan = Plan::of(options)?;
    let mut machine = Machine::here();
    let mut place = Place::open()?;
    plan.check_room(&place)?;
    if options.breakdown {
        return breakdown::run(options, &plan, &mut place, &mut machine);
    }
    let mut all = Outcome::default();
    if !plan.rows.is_empty() {
        let mut contestants = line_up(&plan, &mut place, &mut machine, &mut all.skipped)?;
        all.rows.extend(run_rows(&plan, &mut contestants)?);
        drop(contestants);
        place.clear();
    }
    if !plan.mount_rows.is_empty() {
        let mut own = |place: &mut Place| run_mount(&plan, place, &mut machine);
        match own(&mut place) {
            Ok(more) => all.rows.extend(more),
            Err(e) if plan.asked_by_name => return Err(e),
            Err(e) => all.skipped.push(format!("mount rows: {e}")),
        }
        place.clear();
    }
    all.claims = report::claims(&all.rows, machine.cores);
    run_values(&plan, &mut place, &mut machine, &mut all)?;
    progress_end();
    machine.load_after = load();
    finish_machine(&mut machine, &plan, &place);
    let Outcome { rows, claims, notes, skipped } = all;
    let few = table::too_few(plan.rounds).filter(|_| !claims.is_empty());
    let shared = shared_note(plan.threads_at_once(), separate_cores()?);
    let notes = machine.other_media.iter().cloned().chain(few).chain(shared).chain(notes).collect();
    let report = Report { machine, rows, claims, notes, skipped };
    deliver(&report, options)
}

/// What the groups of values bring. One that cannot be had here costs no row but its own.
fn run_values(plan: &Plan, place: &mut Place, machine: &mut Machine, all: &mut Outcome) -> Result<()> {
    for name in &plan.values {
        progress(name);
        match run_value(name, plan, place, machine) {
            Ok(more) => all.extend(more),
            // What came out wrong is no lack of means.
            Err(e) if plan.asked_by_name || e.errno() == libc::EIO => return Err(e.context(name)),
            Err(e) => {
                all.skipped.push(format!("{name}: {e}"));
                place.clear();
            }
        }
    }
    Ok(())
}

fn run_value(name: &str, plan: &Plan, place: &mut Place, machine: &mut Machine) -> Result<Outcome> {
    Ok(match name {
        "uthreads" => uthreads::run(plan)?.into(),
        "offload" => offload::run(plan)?.into(),
        "orderless" => orderless::run(plan)?.into(),
        "apps" => apps::run(plan, place, machine)?,
        "waits" => waits::run(plan)?.into(),
        "qos" => qos::run(plan)?.into(),
        pool => capacity::run(pool, plan, place, machine)?.into(),
    })
}

/// What is said where threads that are measured do not have a core each.
fn shared_note(threads: usize, cores: usize) -> Option<String> {
    let s = if cores == 1 { "" } else { "s" };
    (threads > cores).then(|| format!("threads share a core: up to {threads} of them had {cores} core{s}"))
}

fn deliver(report: &Report, options: &BenchOptions) -> Result<String> {
    for skipped in &report.skipped {
        eprintln!("lode bench: skipped: {skipped}");
    }
    let picture = options.svg.as_deref();
    outfile::with_picture(answer(report, options)?, picture, || {
        plot::render(report).ok_or_else(|| {
            let message = format!(
                "no picture for {}: no row has tmpfs, bindfs or sync to compare with",
                picture.map(show).expect("nothing else is drawn")
            );
            Error::message(libc::EINVAL, "bench::plot", message)
        })
    })
}

fn answer(report: &Report, options: &BenchOptions) -> Result<String> {
    if !options.json {
        return Ok(table::render(report));
    }
    let mut text = serde_json::to_string_pretty(report)
        .map_err(|e| Error::message(libc::EINVAL, "bench::report", e.to_string()))?;
    text.push('\n');
    Ok(text)
}

fn finish_machine(machine: &mut Machine, plan: &Plan, place: &Place) {
    machine.place = plan
        .pool
        .as_ref()
        .map_or(place.describe(), |p| format!("{} (pool), {} (peers)", p.display(), place.describe()));
    machine.rounds = plan.rounds;
    machine.slice_ms = plan.slice.as_secs_f64() * 1e3;
    machine.pool_bytes = plan.pool_bytes;
    machine.file_bytes = plan.file_bytes;
    machine.names_per_directory = plan.names;
}

/// What a write has reached when it returns.
fn promise_of(pool: &Pool) -> &'static str {
    match pool.domain() {
        Domain::CpuCache | Domain::Memory => "durable and atomic",
        Domain::PageCache => "atomic; survives the process, power loss after fsync",
        Domain::Volatile => "atomic; survives the process",
    }
}

/// Where the kernel writes a file's pages back, it does so in threads of its own.
fn scope_of(domain: Domain) -> CpuScope {
    if domain == Domain::PageCache { CpuScope::Machine } else { CpuScope::Process }
}

/// A fresh pool with all its memory touched. A path that holds something already is refused.
fn make_pool(place: &mut Place, path: &Path, bytes: u64, domain: Domain) -> Result<Pool> {
    let options = PoolOptions { assume: Some(domain), prefault: true, ..PoolOptions::default() };
    place.make(path, || Pool::create(&[path.to_path_buf()], Some(bytes), &options))
}

/// All systems with all thread counts, files filled, pages touched.
fn line_up(
    plan: &Plan,
    place: &mut Place,
    machine: &mut Machine,
    skipped: &mut Vec<String>,
) -> Result<Vec<Contestant>> {
    let mut all = Vec::new();
    for (i, variant) in plan.variants().into_iter().enumerate() {
        match own_contestants(plan, place, machine, i, variant)? {
            Ok((_, own)) => all.extend(own),
            Err(missing) => skipped.push(missing),
        }
    }
    if plan.has_peer("tmpfs") {
        progress("filling tmpfs files");
        let dir = place.dir("tmpfs")?;
        let promise = "stored in memory, not durable";
        all.extend(contestants(
            plan,
            "tmpfs",
            CpuScope::Process,
            (promise, None),
            (true, false),
            &mut |file, tag| Ok(Box::new(KernelWorker::new(&dir, file, tag, plan.file_bytes, false)?)),
        )?);
    }
    if plan.has_peer("ext4") {
        progress("making an ext4 file system");
        match place.ext4(plan.ext4_bytes(), plan.ext4_inodes()) {
            Ok((dir, what)) => {
                machine.ext4 = Some(what);
                let promise = "durable (O_DSYNC, fsync of the directory); a write may be torn";
                all.extend(contestants(
                    plan,
                    "ext4",
                    CpuScope::Machine,
                    (promise, None),
                    (true, false),
                    &mut |file, tag| Ok(Box::new(KernelWorker::new(&dir, file, tag, plan.file_bytes, true)?)),
                )?);
            }
            Err(why) => skipped.push(format!("ext4: {why}")),
        }
    }
    progress("touching the memory of the limit");
    match plan.device() {
        Some(device) => {
            skipped.push(format!("limit: {} has no second pool of the same memory", show(device)))
        }
        None => all.extend(limit(plan, place, machine)?),
    }
    Ok(all)
}

/// A file system and who works on it; or why its engine cannot be had here.
type Own = std::result::Result<(Arc<Fs<Pool>>, Vec<Contestant>), String>;

/// Lode with the `i`th domain and engine.
fn own_contestants(
    plan: &Plan,
    place: &mut Place,
    machine: &mut Machine,
    i: usize,
    (domain, engine): (Domain, EngineKind),
) -> Result<Own> {
    let system = match engine {
        EngineKind::Cpu if i == 0 => "lode".to_string(),
        EngineKind::Cpu => format!("lode-{domain}"),
        engine if engine.emulated() => format!("lode-{engine} (emulated)"),
        engine => format!("lode-{engine}"),
    };
    if let (1.., Some(device)) = (i, plan.device()) {
        return Ok(Err(format!("{system}: {} holds one pool", show(device))));
    }
    progress(&format!("making a pool of {} MiB, domain {domain}", plan.pool_bytes >> 20));
    let path = plan.pool_path(place, i);
    let pool = make_pool(place, &path, plan.pool_bytes, domain)?;
    let memory = machine.memory_of(&system, &pool);
    let promise = promise_of(&pool);
    // A profile that is refused is said on a line of its own.
    progress_end();
    let profile = profile::for_pool(plan.profile.as_deref(), &pool);
    if i == 0 {
        machine.profile = profile.used().map(|file| file.display().to_string());
    }
    let profile = profile.profile();
    let pool = Fs::mkfs(pool, &MkfsOptions::default())?;
    let fs = Fs::open(pool, &OpenOptions { engine, profile, ..OpenOptions::default() })?;
    // A row of this name would be the CPU's.
    if engine != EngineKind::Cpu && fs.mover().engine(engine).is_none() {
        return Ok(Err(format!("{system}: it cannot be used on this machine; lode info says why")));
    }
    let scope = if engine.emulated() { CpuScope::BesideDevice } else { scope_of(domain) };
    let (promise, kind) = ((promise, Some(memory)), (true, engine.bounds_itself()));
    let all = contestants(plan, &system, scope, promise, kind, &mut |file, tag| {
        Ok(Box::new(LodeWorker::new(fs.clone(), file, tag, plan.file_bytes)?))
    })?;
    Ok(Ok((fs, all)))
}

/// Raw copies on a pool of the same size and domain beside the first one.
fn limit(plan: &Plan, place: &mut Place, machine: &mut Machine) -> Result<Vec<Contestant>> {
    let path = plan.limit_path(place);
    let pool = Arc::new(make_pool(place, &path, plan.pool_bytes, plan.assume[0])?);
    let mapping = Arc::new(Mapping::open(&path)?);
    let promise = ("durable, no file system", Some(machine.memory_of("limit", &pool)));
    contestants(plan, "limit", scope_of(plan.assume[0]), promise, (false, false), &mut |file, _| {
        let (file_bytes, append_max) = (plan.file_bytes, plan.append_bytes_max);
        Ok(Box::new(LimitWorker::new(pool.clone(), mapping.clone(), file, file_bytes, append_max)))
    })
}

/// Makes the worker of file number and directory tag.
type MakeSeat<'a> = dyn FnMut(usize, &str) -> Result<Box<dyn Seat>> + 'a;

/// One contestant per thread count. Thread i works on file i whatever the thread count; directories are
/// each contestant's own, because rows on names leave their names for the next row.
fn contestants(
    plan: &Plan,
    system: &str,
    scope: CpuScope,
    (promise, memory): (&'static str, Option<Memory>),
    (has_names, waits): (bool, bool),
    seat: &mut MakeSeat,
) -> Result<Vec<Contestant>> {
    let contestant = |&threads: &usize| {
        let seats = (0..threads).map(|i| seat(i, &format!("threads{threads}.{i}")).map(Some));
        let seats = seats.collect::<Result<Vec<_>>>()?;
        let (system, memory) = (system.to_string(), memory.clone());
        Ok(Contestant { system, scope, promise, memory, has_names, waits, seats })
    };
    plan.threads.iter().map(contestant).collect()
}

fn run_rows(plan: &Plan, contestants: &mut [Contestant]) -> Result<Vec<report::Row>> {
    let crew = Crew::new(plan.threads_max())?;
    let job_of = plan.jobs(Arc::new(Names::new(plan.names)));
    let mut rows = Vec::new();
    for spec in plan.rows.iter().filter(|s| !s.work.on_names()) {
        rows.extend(crew.rounds(&[*spec], contestants, plan.rounds, &job_of, &progress)?);
    }
    if plan.rows.iter().any(|s| s.work.on_names()) {
        let cycle: Vec<_> = rows::ROWS.iter().filter(|s| s.work.on_names()).collect();
        let all = crew.rounds(&cycle, contestants, plan.rounds, &job_of, &progress)?;
        rows.extend(all.into_iter().filter(|r| plan.rows.iter().any(|s| s.name == r.name)));
    }
    Ok(rows)
}

fn run_mount(plan: &Plan, place: &mut Place, machine: &mut Machine) -> Result<Vec<report::Row>> {
    let domain = plan.assume[0];
    let path = plan.mount_pool_path(place);
    let pool = make_pool(place, &path, plan.mount_pool_bytes(), domain)?;
    let pool = Fs::mkfs(pool, &MkfsOptions::default())?;
    let memory = machine.memory_of("mount rows", &pool);
    let promise = promise_of(&pool);
    drop(pool);
    let mounts = [Mounted::lode(place, &path, domain, promise, memory)?, Mounted::bindfs(place)?];
    let crew = Crew::new(1)?;
    let fio_rows: Vec<_> = plan.mount_rows.iter().filter(|s| !s.work.on_names()).copied().collect();
    let mut rows =
        mount::data_rows(&fio_rows, &mounts, plan.rounds, plan.fio_bytes(), crew.idle_rate(), &progress)?;
    if plan.mount_rows.iter().any(|s| s.work.on_names()) {
        let mut contestants = mounts.iter().map(Mounted::contestant).collect::<Result<Vec<_>>>()?;
        let cycle: Vec<_> = rows::MOUNT_ROWS.iter().filter(|s| s.work.on_names()).collect();
        let jobs = plan.jobs(Arc::new(Names::new(plan.mount_names())));
        let job_of = |spec: &rows::RowSpec, seed| Job { slice: plan::MOUNT_SLICE, ..jobs(spec, seed) };
        let all = crew.rounds(&cycle, &mut contestants, plan.rounds, &job_of, &progress)?;
        rows.extend(all.into_iter().filter(|r| plan.mount_rows.iter().any(|s| s.name == r.name)));
    }
    Ok(rows)
}

/// What is going on, on stderr where a person looks at it.
fn progress(what: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{what}");
        let _ = stderr.flush();
    }
}

fn progress_end() {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Every row of every system is there with sane numbers; how large they are is nobody's business here.
    #[test]
    fn smoke_run_reports_every_row() {
        let svg = std::env::temp_dir().join(format!("lode-bench-test-{}.svg", std::process::id()));
        let options = BenchOptions {
            smoke: true,
            json: true,
            peers: vec!["tmpfs".into()],
            only: ["data", "names"].iter().chain(rows::VALUE_ROWS).map(|name| name.to_string()).collect(),
            svg: Some(svg.clone()),
            ..BenchOptions::default()
        };
        let threads = Plan::of(&options).unwrap().threads;
        let report: Value = serde_json::from_str(&run(&options).unwrap()).unwrap();
        assert_eq!(report["machine"]["emulated"], true);
        for row in report["rows"].as_array().unwrap() {
            let emulated = ["lode", "limit"].contains(&row["system"].as_str().unwrap())
                && (row.get("value").is_none() || row["name"].as_str().unwrap().starts_with("million"));
            assert!(
                !emulated || row["emulated"] == true && row["media"] == report["machine"]["media"],
                "{row}"
            );
            assert!(row["system"] != "tmpfs" || row.get("emulated").is_none(), "{row}");
        }
        for spec in rows::ROWS {
            let systems: &[&str] =
                if spec.work.on_names() { &["lode", "tmpfs"] } else { &["lode", "tmpfs", "limit"] };
            for system in systems {
                threads.iter().for_each(|&n| check_row(&report, spec.name, system, n, spec.bytes > 0));
            }
        }
        for name in [
            "million-mount-clean",
            "million-mount-crash",
            "million-media",
            "terabyte-mkfs",
            "uthread-switch",
            "uthread-spawn-join",
            "uthread-parked",
            "offload-write-64k-depth-1",
            "offload-read-64k-depth-32",
            "orderless-latency-64k",
            "orderless-cpu-64k",
            "orderless-write-4k",
            "plain-write-256k",
            "qos-write-64k-managed",
            "qos-read-bandwidth-kept",
            "qos-decision",
        ] {
            check_row(&report, name, "lode", 1, false);
        }
        for name in ["app-snappy", "app-jpeg", "app-aes", "app-grep", "app-knn", "app-bfs", "app-webserver"] {
            ["sync", "async-emu", "async-emu-dma"]
                .iter()
                .for_each(|system| check_row(&report, name, system, 1, true));
            check_row(&report, &format!("{name}-copying"), "sync", 1, false);
        }
        let notes = report["notes"].as_array().unwrap();
        for words in ["emulated: memory is DRAM", "2 rounds, fewer than the 5"] {
            assert!(notes.iter().any(|note| note.as_str().unwrap().contains(words)), "{words}: {notes:?}");
        }
        let claimed: usize = rows::ROWS.iter().map(|r| r.targets.len()).sum();
        assert!(report["claims"].as_array().unwrap().len() >= claimed);
        let picture = std::fs::read_to_string(&svg).unwrap();
        std::fs::remove_file(&svg).unwrap();
        assert!(picture.contains("emulated PM") && picture.ends_with("</svg>\n"));
    }

    fn check_row(report: &Value, name: &str, system: &str, threads: usize, moves_data: bool) {
        let rows = report["rows"].as_array().unwrap();
        let is_it = |r: &&Value| r["name"] == name && r["system"] == system && r["threads"] == threads;
        let row =
            rows.iter().find(is_it).unwrap_or_else(|| panic!("no row {name} of {system}, {threads} threads"));
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row} is no number"));
        if row.get("value").is_some() {
            assert!(number("value").is_finite() && number("value") >= 0.0, "{row}");
            return;
        }
        assert!(number("ops_per_s") > 0.0 && number("p50_us") > 0.0, "{row}");
        assert!(number("p99_us") >= number("p50_us"), "{row}");
        assert!(number("ops_per_s_min") <= number("ops_per_s_max"), "{row}");
        assert_eq!(row["gib_per_s"].is_number(), moves_data, "{row}");
        assert_eq!(row["cpu_s_per_gib"].is_number(), moves_data, "{row}");
    }

    /// Table and picture of applications say what is emulated, and what is claimed of each.
    #[test]
    fn applications_alone_are_labelled_and_drawn() {
        let svg = std::env::temp_dir().join(format!("lode-apps-test-{}.svg", std::process::id()));
        let options = BenchOptions {
            smoke: true,
            only: vec!["apps".into()],
            threads: vec![2],
            engines: vec![EngineKind::Emu, EngineKind::Delegate],
            svg: Some(svg.clone()),
            ..BenchOptions::default()
        };
        let text = run(&options).unwrap();
        let picture = std::fs::read_to_string(&svg).unwrap();
        std::fs::remove_file(&svg).unwrap();
        for words in ["2 app cores", "emulated: memory is DRAM", "emulated: the device of async-emu"] {
            assert!(text.contains(words) && picture.contains(words), "{words}: {text}");
        }
        for system in ["sync", "async-emu", "async-emu-dma", "async-delegate"] {
            assert!(text.contains(system) && picture.contains(&format!(">{system}<")), "{system}: {text}");
        }
        let verdicts = text.lines().filter(|line| line.ends_with("ok") || line.ends_with("MISS"));
        assert_eq!(verdicts.filter(|line| line.starts_with("app-")).count(), 8, "{text}");
        assert!(picture.contains("target: 1.5 x sync") && picture.contains("target: 0.98 x sync"));
    }

    #[test]
    fn bad_options_are_refused_by_name() {
        let refuse = |options: BenchOptions, word: &str| {
            let error = run(&options).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        };
        refuse(BenchOptions { only: vec!["writes".into()], ..Default::default() }, "writes");
        refuse(BenchOptions { peers: vec!["zfs".into()], ..Default::default() }, "zfs");
        refuse(BenchOptions { threads: vec![0], ..Default::default() }, "0 threads");
        let engines = vec![EngineKind::Dsa, EngineKind::Emu];
        refuse(
            BenchOptions { only: vec!["apps".into()], engines, ..Default::default() },
            "one kind at a time",
        );
        refuse(BenchOptions { rounds: Some(0), ..Default::default() }, "0 rounds");
    }

    #[test]
    fn a_pool_path_in_use_is_not_touched() {
        let path = std::env::temp_dir().join(format!("lode-bench-test-{}.pool", std::process::id()));
        std::fs::write(&path, [7u8; 8192]).unwrap();
        let options = BenchOptions {
            smoke: true,
            peers: vec!["tmpfs".into()],
            pool: Some(path.clone()),
            ..Default::default()
        };
        let error = run(&options).expect_err("the file holds something").to_string();
        let kept = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        assert_eq!(kept, [7u8; 8192]);
    }

    /// Systems are compared on one kind of memory: all pools lie where the user wants the first.
    #[test]
    fn all_pools_lie_at_the_path_that_is_named() {
        let path = std::env::temp_dir().join(format!("lode-bench-test-{}.pools", std::process::id()));
        let options = BenchOptions {
            smoke: true,
            assume: vec![Domain::Memory, Domain::CpuCache],
            engines: vec![EngineKind::Delegate],
            pool: Some(path.clone()),
            ..BenchOptions::default()
        };
        let plan = Plan::of(&options).unwrap();
        let root = std::env::temp_dir().join(format!("lode-bench-test-{}.place", std::process::id()));
        let mut place = Place::new(root, false, false);
        let paths: Vec<PathBuf> = (0..plan.variants().len()).map(|i| plan.pool_path(&place, i)).collect();
        assert_eq!(paths, [path.clone(), path.with_added_extension("1"), path.with_added_extension("2")]);
        let mut machine = Machine::here();
        let variant = plan.variants()[1];
        let (_, own) = own_contestants(&plan, &mut place, &mut machine, 1, variant).unwrap().unwrap();
        assert!(paths[1].is_file() && own[0].system == "lode-cpu-cache" && own[0].memory.is_some());
        drop(own);
        place.clear();
        assert!(!paths[1].exists());
    }

    #[test]
    fn a_device_holds_the_first_pool_alone() {
        let options = BenchOptions { smoke: true, pool: Some("/dev/null".into()), ..BenchOptions::default() };
        let plan = Plan::of(&options).unwrap();
        let (mut place, mut machine) = (Place::new("/nonexistent".into(), false, false), Machine::here());
        let second = (Domain::CpuCache, EngineKind::Cpu);
        let own = own_contestants(&plan, &mut place, &mut machine, 1, second).unwrap();
        assert_eq!(own.err().unwrap(), "lode-cpu-cache: /dev/null holds one pool");
    }

    #[test]
    fn what_cannot_be_had_is_left_out_unless_it_is_named() {
        let options = BenchOptions {
            smoke: true,
            only: ["waits", "uthreads"].map(str::to_owned).into(),
            ..Default::default()
        };
        let mut plan = Plan::of(&options).unwrap();
        let of = |plan: &Plan| {
            let (mut place, mut machine) = (Place::new("/nonexistent".into(), false, false), Machine::here());
            let mut all = Outcome::default();
            run_values(plan, &mut place, &mut machine, &mut all).map(|()| all)
        };
        let mut on_one_core = || {
            pin_thread(allowed_cores().unwrap()[0]);
            let error = of(&plan).err().unwrap().to_string();
            plan.asked_by_name = false;
            (error, of(&plan).unwrap())
        };
        let (error, all) = std::thread::scope(|scope| scope.spawn(&mut on_one_core).join().unwrap());
        assert!(error.starts_with("waits: two processors"), "{error}");
        assert!(all.rows.iter().any(|row| row.name == "uthread-switch"));
        assert_eq!(all.skipped.len(), 1, "{:?}", all.skipped);
        assert!(all.skipped[0].starts_with("waits: two processors"), "{:?}", all.skipped);
    }

    #[test]
    fn threads_that_share_a_core_are_told_of() {
        assert_eq!(shared_note(2, 2), None);
        assert!(shared_note(2, 1).unwrap().contains("up to 2 of them had 1 core"));
        assert!(shared_note(4, 2).unwrap().ends_with("2 cores"));
    }
}
