//! Options checked, and the sizes of a run chosen.
//!
//! Files are larger than what one core's share of a last-level cache holds, and small enough that two
//! pools, tmpfs files and an ext4 image fit the memory of a laptop; a run that would not fit says so
//! before it begins.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lodestone::media::Domain;
use lodestone::mover::EngineKind;
use lodestone::{Error, Result};

use super::BenchOptions;
use super::apps::Size;
use super::machine::memory_available_bytes;
use super::place::Place;
use super::rows::{MOUNT_ROWS, ROWS, RowSpec, VALUE_ROWS};
use super::worker::{Job, Names};

const MIB: u64 = 1 << 20;
const PEERS: &[&str] = &["tmpfs", "ext4"];
/// Where options are refused.
pub const USAGE: &str = "bench::plan";
const THREADS_MAX: usize = 64;
const ROUNDS_MAX: usize = 1000;
/// A claim needs a median of at least so many.
pub const ROUNDS: usize = 5;
/// File systems whose files take memory: tmpfs, ramfs, hugetlbfs.
const MEMORY_MAGICS: &[u64] = &[0x0102_1994, 0x8584_58f6, 0x9584_58f6];
/// Rows on names end with their names; only a system that is many times slower runs out of time.
const NAMES_SLICES: u32 = 4;
/// Name rows on a mount always get to the end.
pub const MOUNT_SLICE: Duration = Duration::from_secs(10);

pub struct Plan {
    pub rows: Vec<&'static RowSpec>,
    pub mount_rows: Vec<&'static RowSpec>,
    pub values: Vec<&'static str>,
    /// The user named rows: one that cannot run is an error, not a skip.
    pub asked_by_name: bool,
    pub peers: Vec<String>,
    pub threads: Vec<usize>,
    pub assume: Vec<Domain>,
    /// Besides the CPU.
    pub engines: Vec<EngineKind>,
    pub profile: Option<PathBuf>,
    pub pool: Option<PathBuf>,
    pub rounds: usize,
    pub slice: Duration,
    pub pool_bytes: u64,
    pub file_bytes: u64,
    pub append_bytes_max: u64,
    pub names: usize,
    pub million_files: usize,
    pub uthread_turns: usize,
    pub uthreads_parked: usize,
    pub offload_bytes: u64,
    pub apps: Size,
    pub waits: u64,
}

impl Plan {
    /// The pools: with each domain, and with each engine in the first of them.
    pub fn variants(&self) -> Vec<(Domain, EngineKind)> {
        let domains = self.assume.iter().map(|domain| (*domain, EngineKind::Cpu));
        domains.chain(self.engines.iter().map(|engine| (self.assume[0], *engine))).collect()
    }

    pub fn of(options: &BenchOptions) -> Result<Plan> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let both = if options.quick || cores < 2 { vec![1] } else { vec![1, 2] };
        let mut plan = Plan {
            rows: ROWS.iter().filter(|r| wanted(options, r)).collect(),
            mount_rows: MOUNT_ROWS.iter().filter(|r| wanted_mount(options, r)).collect(),
            values: VALUE_ROWS.iter().copied().filter(|r| wanted_values(options, r)).collect(),
            asked_by_name: !options.only.is_empty(),
            peers: match options.breakdown {
                true => Vec::new(),
                false => or_default(&options.peers, PEERS.iter().map(|p| p.to_string()).collect()),
            },
            threads: or_default(&options.threads, both),
            assume: or_default(&options.assume, vec![Domain::Memory]),
            engines: options.engines.iter().copied().filter(|e| *e != EngineKind::Cpu).collect(),
            profile: options.profile.clone(),
            pool: options.pool.clone(),
            rounds: options.rounds.unwrap_or(if options.smoke { 2 } else { ROUNDS }),
            slice: Duration::from_millis(150),
            pool_bytes: 2048 * MIB,
            file_bytes: 384 * MIB,
            append_bytes_max: 192 * MIB,
            names: 100_000,
            million_files: 1_000_000,
            uthread_turns: 2_000_000,
            uthreads_parked: 1_000_000,
            offload_bytes: 256 * MIB,
            // Devices in software need cores as well.
            apps: Size {
                shrink: 1,
                fewer: 1,
                pool_bytes: 768 * MIB,
                cores: options.threads.iter().copied().max().unwrap_or(1),
            },
            waits: 2000,
        };
        if options.smoke {
            plan.slice = Duration::from_millis(2);
            (plan.pool_bytes, plan.file_bytes, plan.append_bytes_max) = (96 * MIB, 4 * MIB, MIB);
            (plan.names, plan.million_files) = (200, 2000);
            (plan.uthread_turns, plan.uthreads_parked) = (2000, 2000);
            plan.offload_bytes = 4 * MIB;
            plan.apps = Size { shrink: 16, fewer: 64, pool_bytes: 96 * MIB, ..plan.apps };
            plan.waits = 50;
        } else if options.quick {
            plan.slice = Duration::from_millis(50);
            (plan.pool_bytes, plan.file_bytes, plan.append_bytes_max) = (1024 * MIB, 256 * MIB, 96 * MIB);
            plan.names = 20_000;
            plan.apps = Size { fewer: 4, pool_bytes: 384 * MIB, ..plan.apps };
        }
        plan.check(options)?;
        Ok(plan)
    }

    fn check(&mut self, options: &BenchOptions) -> Result<()> {
        let known = |n: &String| {
            super::row_names().any(|k| k == n) || matches!(n.as_str(), "data" | "names" | "mount")
        };
        if let Some(name) = options.only.iter().find(|n| !known(n)) {
            let names: Vec<&str> = super::row_names().collect();
            return Err(usage(format!("there is no row {name}; rows: {}", names.join(", "))));
        }
        if let Some(peer) = self.peers.iter().find(|p| !PEERS.contains(&p.as_str())) {
            return Err(usage(format!("there is no peer {peer}; peers: {}", PEERS.join(", "))));
        }
        if let Some(n) = self.threads.iter().find(|n| !(1..=THREADS_MAX).contains(n)) {
            return Err(usage(format!("{n} threads: give 1 to {THREADS_MAX}")));
        }
        if !(1..=ROUNDS_MAX).contains(&self.rounds) {
            return Err(usage(format!("{} rounds: give 1 to {ROUNDS_MAX}", self.rounds)));
        }
        self.threads.sort_unstable();
        self.threads.dedup();
        // Room for all files and for blocks freed but not yet reused.
        self.pool_bytes = self.pool_bytes.max(self.files_bytes() * 3 / 2);
        self.check_memory()
    }

    fn check_memory(&self) -> Result<()> {
        let peers = self.peers.len() as u64 * self.files_bytes();
        let pools = if self.pools_take_memory() { self.pools_bytes() } else { 0 };
        let (need, free) = (pools + peers, memory_available_bytes());
        if !self.rows.is_empty() && free < need {
            let message = format!(
                "the bench needs {} MiB of memory, {} MiB are free: try --quick, --peers tmpfs or --threads 1",
                need / MIB,
                free / MIB
            );
            return Err(Error::message(libc::ENOMEM, "bench::plan", message));
        }
        Ok(())
    }

    /// Refuses rows that do not fit the place, before they begin.
    pub fn check_room(&self, place: &Place) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let here = self.peers.iter().filter(|peer| *peer != "ext4" || place.has_ext4()).count();
        let pools = if self.pool.is_none() { self.pools_bytes() } else { 0 };
        place.check_room("the bench", pools + here as u64 * self.files_bytes())
    }

    /// Of all systems and the limit.
    fn pools_bytes(&self) -> u64 {
        (self.variants().len() as u64 + 1) * self.pool_bytes
    }

    /// Of each peer.
    fn files_bytes(&self) -> u64 {
        self.threads_max() as u64 * (self.file_bytes + self.append_bytes_max)
    }

    /// The device that the user named, which holds one pool.
    pub fn device(&self) -> Option<&Path> {
        self.pool.as_deref().filter(|pool| pool.exists() && !pool.is_file())
    }

    /// Pools lie in DRAM: on the place's tmpfs, or on one that the user named.
    pub fn pools_take_memory(&self) -> bool {
        let takes = |pool| self.device().is_none() && is_in_memory(pool);
        self.pool.as_deref().is_none_or(takes)
    }

    pub fn threads_max(&self) -> usize {
        self.threads.last().copied().unwrap_or(1)
    }

    /// Threads that are to have a core each.
    pub fn threads_at_once(&self) -> usize {
        let rows = if self.rows.is_empty() { 1 } else { self.threads_max() };
        // One waits for the other.
        let waits = if self.values.contains(&"waits") { 2 } else { 1 };
        let apps = if self.values.contains(&"apps") { self.apps.cores } else { 1 };
        rows.max(waits).max(apps)
    }

    pub fn has_peer(&self, name: &str) -> bool {
        self.peers.iter().any(|p| p == name)
    }

    /// Where the pool of the `i`th system lies: all beside the first, so that they are of the same kind of memory.
    pub fn pool_path(&self, place: &Place, i: usize) -> PathBuf {
        match &self.pool {
            Some(path) if i == 0 => path.clone(),
            Some(path) => path.with_added_extension(i.to_string()),
            None => place.path(&format!("pool{i}")),
        }
    }

    /// The limit's memory: beside the pool, so that it is of the same kind.
    pub fn limit_path(&self, place: &Place) -> PathBuf {
        match &self.pool {
            Some(path) => path.with_added_extension("limit"),
            None => place.path("limit"),
        }
    }

    /// Of a system that runs applications.
    pub fn apps_pool_path(&self, place: &Place, system: &str) -> PathBuf {
        match &self.pool {
            Some(path) => path.with_added_extension(system),
            None => place.path(&format!("apps.{system}")),
        }
    }

    pub fn mount_pool_path(&self, place: &Place) -> PathBuf {
        place.path("mount.pool")
    }

    pub fn mount_pool_bytes(&self) -> u64 {
        self.fio_bytes() * 2 + 128 * MIB
    }

    pub fn fio_bytes(&self) -> u64 {
        (self.file_bytes * 2 / 3).min(256 * MIB)
    }

    pub fn mount_names(&self) -> usize {
        self.names.min(10_000)
    }

    pub fn ext4_bytes(&self) -> u64 {
        self.files_bytes() + self.ext4_inodes() as u64 * 512 + 192 * MIB
    }

    /// Every contestant's directory may be full at the same time.
    pub fn ext4_inodes(&self) -> usize {
        self.threads.iter().sum::<usize>() * self.names + 1000
    }

    /// Makes the job of a row in a round; the round is the seed, the same for all systems.
    pub fn jobs(&self, names: Arc<Names>) -> impl Fn(&RowSpec, u64) -> Job {
        let (file_bytes, append_bytes_max, slice) = (self.file_bytes, self.append_bytes_max, self.slice);
        move |spec, seed| Job {
            work: spec.work,
            bytes: spec.bytes,
            file_bytes,
            append_bytes_max,
            slice: if spec.work.on_names() { slice * NAMES_SLICES } else { slice },
            seed: seed + 1,
            names: names.clone(),
        }
    }
}

/// Whether a file of this path takes memory.
fn is_in_memory(path: &Path) -> bool {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    rustix::fs::statfs(dir).map_or(true, |fs| MEMORY_MAGICS.contains(&(fs.f_type as u64)))
}

fn or_default<T: Clone>(given: &[T], default: Vec<T>) -> Vec<T> {
    if given.is_empty() { default } else { given.to_vec() }
}

/// An option that cannot be, which the command line did not know.
fn usage(message: String) -> Error {
    Error::message(libc::EINVAL, USAGE, message)
}

fn named(options: &BenchOptions, name: &str) -> bool {
    options.only.iter().any(|n| n == name)
}

fn wanted(options: &BenchOptions, row: &RowSpec) -> bool {
    let group = if row.work.on_names() { "names" } else { "data" };
    options.only.is_empty() || named(options, row.name) || named(options, group)
}

fn wanted_mount(options: &BenchOptions, row: &RowSpec) -> bool {
    (options.mount && options.only.is_empty()) || named(options, row.name) || named(options, "mount")
}

fn wanted_values(options: &BenchOptions, name: &str) -> bool {
    named(options, name) || (options.only.is_empty() && !options.quick && !options.smoke)
}
