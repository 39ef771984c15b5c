//! The mount against bindfs over tmpfs: the same programs, the same files, through the same kernel
//! door.
//!
//! Data rows are one pass of fio over a file whose cached pages fio drops first, buffered, as ordinary
//! programs read and write. CPU time is that of the whole machine less its idle rate, because server,
//! kernel and fio share the work; fio's own start is in it, for both.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lodestone::media::Domain;
use lodestone::{Error, Result};
use serde_json::Value;

use super::clock::machine_cpu_s;
use super::machine::Memory;
use super::peer_kernel::KernelWorker;
use super::place::{Place, search_path, system};
use super::report::{Row, median};
use super::rows::{RowSpec, Work};
use super::turns::{Contestant, CpuScope};

const GIB: f64 = (1u64 << 30) as f64;
const MOUNT_WAIT: Duration = Duration::from_secs(20);

/// A mounted file system under measure.
pub struct Mounted {
    pub system: &'static str,
    pub dir: PathBuf,
    promise: &'static str,
    /// Of its pool.
    memory: Option<Memory>,
}

impl Mounted {
    /// Mounts the pool, which lies in `memory`, with this very program.
    pub fn lode(
        place: &mut Place,
        pool: &Path,
        assume: Domain,
        promise: &'static str,
        memory: Memory,
    ) -> Result<Mounted> {
        let dir = place.dir("mount.lode")?;
        let assume = assume.name();
        let program = std::env::current_exe().map_err(|e| failed("lode", e))?;
        let program = program.to_string_lossy().into_owned();
        let (command, foreground, domain) = ("mount".as_ref(), "-f".as_ref(), "--assume".as_ref());
        let args = [command, foreground, pool.as_os_str(), dir.as_os_str(), domain, assume.as_ref()];
        let mounted = Mounted::start(place, "lode", &program, &args, dir.clone(), promise)?;
        Ok(Mounted { memory: Some(memory), ..mounted })
    }

    /// bindfs as it comes, over a directory on tmpfs.
    pub fn bindfs(place: &mut Place) -> Result<Mounted> {
        let (source, dir) = (place.dir("bindfs.source")?, place.dir("mount.bindfs")?);
        let args = ["-f".as_ref(), source.as_os_str(), dir.as_os_str()];
        Mounted::start(place, "bindfs", "bindfs", &args, dir.clone(), "stored in memory, not durable")
    }

    /// A server in the foreground, which ends when it is unmounted, or when this program is killed.
    fn start(
        place: &mut Place,
        name: &'static str,
        program: &str,
        args: &[&OsStr],
        dir: PathBuf,
        promise: &'static str,
    ) -> Result<Mounted> {
        let device = |path: &Path| rustix::fs::stat(path).map(|s| s.st_dev);
        let before = device(&dir).map_err(|e| failed(name, e))?;
        let said = place.path(&format!("{name}.stderr"));
        let stderr = std::fs::File::create(&said).map_err(|e| failed(name, e))?;
        // Before it is made: a signal may come meanwhile.
        place.remember_mount(&dir);
        let mut server = ending_with_us(program)
            .args(args)
            .env("PATH", search_path())
            // A terminal's interrupt is the bench's, which unmounts.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .map_err(|e| failed(name, format!("{program}: {e}")))?;
        let began = Instant::now();
        while device(&dir).is_ok_and(|now| now == before) {
            if let Some(status) = server.try_wait().map_err(|e| failed(name, e))? {
                let said = std::fs::read_to_string(&said).unwrap_or_default();
                return Err(failed(name, format!("{program}: {status}: {}", said.trim())));
            }
            if began.elapsed() > MOUNT_WAIT {
                return Err(failed(name, "the mount did not appear"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Mounted { system: name, dir, promise, memory: None })
    }

    /// The name rows run by the common loop.
    pub fn contestant(&self) -> Result<Contestant> {
        let worker = KernelWorker::new(&self.dir, 0, "names", 0, false)?;
        Ok(Contestant {
            system: self.system.to_string(),
            scope: CpuScope::Machine,
            promise: self.promise,
            memory: self.memory.clone(),
            has_names: true,
            waits: false,
            seats: vec![Some(Box::new(worker))],
        })
    }
}

/// A command that ends when the calling thread does, also where this program is killed; as it comes where there is no `setpriv`
/// (util-linux) that can tell it so.
fn ending_with_us(program: &str) -> Command {
    let told = ["--pdeathsig", "TERM", "--"];
    if system("setpriv", told.iter().chain(&["true"])).is_err() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(told).arg(program);
    command
}

fn failed(who: &str, why: impl std::fmt::Display) -> Error {
    Error::message(libc::EIO, "bench::mount", format!("{who}: {why}"))
}

/// What one fio run said.
struct FioRun {
    ops: f64,
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_s: f64,
    wall_s: f64,
}

/// Runs `specs` by fio, the mounts in turn, `rounds` times after one that lays out and warms.
pub fn data_rows(
    specs: &[&'static RowSpec],
    mounts: &[Mounted],
    rounds: usize,
    bytes: u64,
    idle_rate: f64,
    progress: &dyn Fn(&str),
) -> Result<Vec<Row>> {
    let mut done: Vec<Vec<Vec<FioRun>>> =
        specs.iter().map(|_| mounts.iter().map(|_| Vec::new()).collect()).collect();
    for round in 0..=rounds {
        for (spec, done) in specs.iter().zip(&mut done) {
            progress(&format!("{} round {round} of {rounds}", spec.name));
            for turn in 0..mounts.len() {
                let who = (turn + round) % mounts.len();
                let run = fio(&mounts[who], spec, bytes, round)?;
                if round > 0 {
                    done[who].push(run);
                }
            }
        }
    }
    let pairs = specs.iter().zip(&done);
    Ok(pairs
        .flat_map(|(spec, done)| mounts.iter().zip(done).map(|(m, runs)| row(spec, m, runs, idle_rate)))
        .collect())
}

fn fio(mount: &Mounted, spec: &RowSpec, bytes: u64, round: usize) -> Result<FioRun> {
    let pattern = match spec.work {
        Work::WriteSequential => "write",
        Work::ReadSequential => "read",
        Work::WriteRandom => "randwrite",
        Work::ReadRandom => "randread",
        work => unreachable!("{work:?} is no fio row"),
    };
    let mut command = Command::new("fio");
    command
        .args(["--name=bench", "--ioengine=psync", "--invalidate=1", "--fallocate=none", "--thread"])
        .args(["--output-format=json", "--random_generator=tausworthe64"])
        .arg(format!("--filename={}", mount.dir.join("data").display()))
        .arg(format!("--rw={pattern}"))
        .arg(format!("--bs={}", spec.bytes))
        .arg(format!("--size={bytes}"))
        .arg(format!("--randseed={}", round + 1))
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let (cpu, wall) = (machine_cpu_s(), Instant::now());
    let output = command.output().map_err(|e| failed("fio", e))?;
    let (cpu_s, wall_s) = (machine_cpu_s() - cpu, wall.elapsed().as_secs_f64());
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed("fio", format!("{} on {}: {}", spec.name, mount.system, said.trim())));
    }
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|e| failed("fio", e))?;
    let side = if pattern.ends_with("write") { "write" } else { "read" };
    let job = &report["jobs"][0][side];
    let number = |value: &Value| value.as_f64().ok_or_else(|| failed("fio", "its report lacks a number"));
    let latency = &job["clat_ns"]["percentile"];
    Ok(FioRun {
        ops: number(&job["total_ios"])?,
        ops_per_s: number(&job["iops"])?,
        p50_us: number(&latency["50.000000"])? / 1e3,
        p99_us: number(&latency["99.000000"])? / 1e3,
        cpu_s,
        wall_s,
    })
}

fn row(spec: &RowSpec, mount: &Mounted, runs: &[FioRun], idle_rate: f64) -> Row {
    let of = |f: &dyn Fn(&FioRun) -> f64| -> Vec<f64> { runs.iter().map(f).collect() };
    let sum = |f: &dyn Fn(&FioRun) -> f64| -> f64 { runs.iter().map(f).sum() };
    let rates = of(&|r| r.ops_per_s);
    let ops_per_s = median(&rates);
    let cpu_s_per_op = (sum(&|r| r.cpu_s) - idle_rate * sum(&|r| r.wall_s)) / sum(&|r| r.ops);
    let cpu_s_per_op = (cpu_s_per_op > 0.0).then_some(cpu_s_per_op);
    let gib = spec.bytes as f64 / GIB;
    Row {
        name: spec.name.to_string(),
        system: mount.system.to_string(),
        threads: 1,
        ops_per_s,
        gib_per_s: Some(ops_per_s * gib),
        p50_us: median(&of(&|r| r.p50_us)),
        p99_us: median(&of(&|r| r.p99_us)),
        cpu_s_per_gib: cpu_s_per_op.map(|s| s / gib),
        cpu_us_per_op: cpu_s_per_op.map(|s| s * 1e6),
        waiting_share: None,
        cpu_scope: CpuScope::Machine.name(),
        promise: mount.promise,
        memory: mount.memory.clone(),
        rounds: runs.len(),
        ops_per_s_min: rates.iter().copied().fold(ops_per_s, f64::min),
        ops_per_s_max: rates.iter().copied().fold(ops_per_s, f64::max),
        ops_per_s_rounds: rates,
        value: None,
        unit: None,
    }
}
