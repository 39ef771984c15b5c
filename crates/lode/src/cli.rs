//! The command line: every subcommand, flag and help text. Defined once; `--help`, completions, man pages,
//! environment variables and the keys of the configuration file are all derived from here.

pub mod wsp;

use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgAction, Args, Command, CommandFactory, Parser, Subcommand, ValueEnum};

use lodestone::fs::MkfsOptions;
use lodestone::limits::{MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, POOL_BLOCKS_MAX, POOL_BYTES_MIN};
use lodestone::mover::class::{Class, UnknownClass};
use lodestone::mover::{EngineKind, UnknownEngine};

use self::wsp::Wsp;
use crate::live::address::Address;
use crate::size::{self, Size};
use crate::target::{PoolPath, Target, parse_pool_path};

/// Largest pool, in bytes.
const POOL_BYTES_MAX: u64 = POOL_BLOCKS_MAX * 4096;
/// Most runs of a measured command.
const COST_RUNS_MAX: i64 = 1000;
/// Longest that the idle load is watched, in seconds.
const COST_IDLE_S_MAX: f64 = 3600.0;
/// Most parts that crash tests are shared out in.
const PARTS_MAX: u64 = 1_000_000;
/// Between two looks, in seconds.
const TOP_INTERVAL_S: std::ops::RangeInclusive<f64> = 0.1..=3600.0;

/// A file system for slow, byte-addressable memory, in user space.
#[derive(Parser, Debug)]
#[command(name = "lode", version, propagate_version = true, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Sub,
    /// Read this configuration file instead of /etc/lode.toml and ~/.config/lode/config.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Subcommand, Debug)]
pub enum Sub {
    Mkfs(Mkfs),
    Info(Info),
    Mount(Mount),
    Umount(Umount),
    Top(Top),
    Ls(Ls),
    Cat(Cat),
    Cp(Cp),
    Rm(Rm),
    Fsck(Fsck),
    Dump(Dump),
    Run(Run),
    Bench(Bench),
    Cost(Cost),
    Tune(Tune),
    Crash(Crash),
    Wsp(Wsp),
    Completions(Completions),
    Man(Man),
}

/// Make a file system on a file, a DAX device or several of them
///
/// POOL is created where it does not exist. A file system, or anything else that POOL holds, is overwritten
/// only with --force.
#[derive(Args, Debug)]
pub struct Mkfs {
    /// The file or device; several, with commas between, are striped and named by the first from then on
    #[arg(value_parser = PoolNameParser)]
    pub pool: OsString,
    /// Size of the pool, all of which is taken from the disk now; K, M, G and T are binary. (A sparse pool: make the file first, as with
    /// truncate -s 1T POOL, and give no size.) [default: what POOL has, 4G where it is new]
    #[arg(long, value_name = "SIZE", value_parser = parse_pool_size)]
    pub size: Option<u64>,
    /// Overwrite what POOL holds
    #[arg(long)]
    pub force: bool,
    /// A name for people, at most 63 bytes
    #[arg(long, value_parser = parse_label)]
    pub label: Option<String>,
    /// How file data is written: cow makes each write atomic, inplace only metadata
    #[arg(long, value_name = "MODE", default_value = "cow")]
    pub data: Data,
    /// Bytes that stand in one region before the next one follows
    #[arg(long, value_name = "SIZE", default_value = "2M", value_parser = parse_stripe)]
    pub stripe: u64,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    Cow,
    Inplace,
}

/// Say what a pool is, what this machine can do for it, and what is missing
///
/// Without POOL, the machine alone. Nothing is changed; a pool in use or damaged is described as far as it
/// can be read.
#[derive(Args, Debug)]
pub struct Info {
    /// The file or device of the pool, the first of several
    #[arg(value_parser = PoolNameParser)]
    pub pool: Option<OsString>,
    /// Take the media for persistent memory of this kind (emulation)
    #[arg(long, value_name = "DOMAIN")]
    pub assume: Option<Assume>,
    /// The profile to look at [default: ~/.config/lode/profile.toml, else /etc/lode/profile.toml]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assume {
    Memory,
    CpuCache,
    PageCache,
}

/// Mount a pool on a directory, for every program
///
/// Returns once the mount is live. Also the mount helper of fstab's type fuse.lode.
///
/// Options of its own, beside the kernel's (ro, noatime, nosuid, sync and the like):
///
/// allow_other: other users may use it as well; root's mounts always allow it.
///
/// nonempty: DIR may hold something, which is then covered.
///
/// threads=N: how many requests are served at a time [default: one for each core, at most 8].
///
/// cache=none: every call reaches the pool, and the kernel keeps nothing; cache=always: it keeps names, attributes
/// and data; cache=auto, the default: as long as that is right, which so far is always.
///
/// engine=ENGINE, class=CLASS, assume=DOMAIN, profile=FILE, metrics=ADDR: as --engine, --class, --assume, --profile and
/// --metrics.
///
/// floor=PERCENT: what class bandwidth keeps of the bytes that classes copy, if it wants it, from 1 to 90 [default: 10].
///
/// starve=MS: and so many milliseconds, from 1 to 60000, after which it has a piece where nothing moves [default: 2].
///
/// max_read=BYTES, max_write=BYTES: the largest request, from 4096 to 1048576.
///
/// What the server has to say (damage, a device that cannot be used, a write-back that failed) goes to the system log (/dev/log, facility
/// daemon); with --foreground, or where standard error is a file, there. Where neither is, as in many containers, nobody hears it: use
/// --foreground or 2>FILE.
#[derive(Args, Debug)]
pub struct Mount {
    /// The file or device of the pool, the first of several
    #[arg(value_parser = PoolNameParser)]
    pub pool: OsString,
    /// Where to
    pub dir: PathBuf,
    /// Mount options, with commas between, as in mount(8)
    #[arg(short = 'o', long, value_name = "OPTS")]
    pub options: Vec<OsString>,
    /// Stay in the foreground
    #[arg(short, long)]
    pub foreground: bool,
    /// Take the media for persistent memory of this kind (emulation)
    #[arg(long, value_name = "DOMAIN")]
    pub assume: Option<Assume>,
    /// Who copies data: cpu, semaphore (at most two threads at a time), delegate (threads of its own), dsa and ioat
    /// (Intel's devices; lode info says whether there are any), emu and emu-ioat (emulated devices, for tests)
    #[arg(long, value_name = "ENGINE", value_parser = parse_engine)]
    pub engine: Option<EngineKind>,
    /// What is wanted of copies that engines make: latency (each is through soon), bandwidth (many are, and they give way
    /// to the others), or bandwidth:N (likewise, sharing with other numbers) [default: LODE_CLASS, else that of each
    /// caller's I/O priority: latency of realtime, bandwidth of idle (ionice)]
    #[arg(long, value_name = "CLASS", value_parser = parse_class)]
    pub class: Option<Class>,
    /// What engines are worth here, as lode tune found it [default: ~/.config/lode/profile.toml, else
    /// /etc/lode/profile.toml]; one that was made on another machine, or is damaged, is not used, which is said
    #[arg(long, value_name = "FILE", value_parser = parse_option_path)]
    pub profile: Option<PathBuf>,
    /// Serve metrics for Prometheus (GET /metrics) and the state as JSON (GET /state) there: HOST:PORT or unix:PATH. lode
    /// top needs none. Nobody is asked for a password: choose an address that only those reach who may know
    #[arg(long, value_name = "ADDR", value_parser = parse_metrics)]
    pub metrics: Option<String>,
}

/// Unmount a directory
#[derive(Args, Debug)]
pub struct Umount {
    /// Where the pool is mounted
    pub dir: PathBuf,
}

/// Watch a mounted pool: who copies how much, who waits, where the time of reads and writes goes
///
/// Its server is asked every second and what happened in between is shown: copies by engine and class, channels, shares of
/// owners, phases of reads and writes (of those that are watched, one in 64), free space. q, Esc and ctrl-C end it, arrows
/// and PgUp, PgDn scroll. Where standard output is no terminal, as with --once.
#[derive(Args, Debug)]
pub struct Top {
    /// A mounted pool, a mount point, or the address of its --metrics: HOST:PORT or unix:PATH
    pub target: OsString,
    /// How long to wait between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,
    /// Print what happens in one interval as text, and end
    #[arg(long)]
    pub once: bool,
    /// Print the state as one JSON document, and end: counts since the mount
    #[arg(long)]
    pub json: bool,
}

/// List directories in a pool
///
/// Times are UTC. A name with control characters or invalid UTF-8 is shown as $'...', which a shell reads
/// back.
#[derive(Args, Debug)]
pub struct Ls {
    /// What to list
    #[arg(required = true, value_name = "POOL:/PATH", value_parser = PoolPathParser)]
    pub paths: Vec<PoolPath>,
    /// Mode, links, owner, size and time of each entry
    #[arg(short, long)]
    pub long: bool,
    /// Names that begin with a dot too
    #[arg(short, long)]
    pub all: bool,
    /// Directories inside directories too
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Write files of a pool to standard output
#[derive(Args, Debug)]
pub struct Cat {
    /// What to write
    #[arg(required = true, value_name = "POOL:/PATH", value_parser = PoolPathParser)]
    pub paths: Vec<PoolPath>,
}

/// Copy files into, out of and between pools
///
/// POOL:/path is a file in a pool, anything else one of the host: the first `:/` divides, so ./a:b is a file
/// of the host. A backslash before the colon takes its meaning away (dir\:/file).
///
/// Holes stay holes; into a pipe or a device they are written as zeros. An interrupted copy removes the file that it made and says so; one that was there
/// before stays, incomplete. A file of the host that is the
/// pool being copied is refused, and nothing is written over what the same command just made, or through a symbolic
/// link that leads nowhere.
#[derive(Args, Debug)]
pub struct Cp {
    /// What to copy
    #[arg(required = true, value_name = "FROM", value_parser = TargetParser)]
    pub from: Vec<Target>,
    /// Where to: a new name, or a directory to copy into
    #[arg(required = true, value_name = "TO", value_parser = TargetParser)]
    pub to: Target,
    /// Directories too, with all they hold; symbolic links are copied, not followed
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// As -r, and keep mode, owner, times, xattrs, hard links and special files; a target that has other names is
    /// replaced
    #[arg(short, long)]
    pub archive: bool,
}

/// Remove files and directories from a pool
#[derive(Args, Debug)]
pub struct Rm {
    /// What to remove
    #[arg(required = true, value_name = "POOL:/PATH", value_parser = PoolPathParser)]
    pub paths: Vec<PoolPath>,
    /// Directories too, with all they hold
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// What is not there is no failure
    #[arg(short, long)]
    pub force: bool,
}

/// Check a pool that nobody uses, and repair it
///
/// Everything is read: superblocks, the log of every inode, names, blocks, and all file data, which are compared
/// with their checksums where they have one. Without --repair nothing is changed, and what a repair would do is
/// said. A pool that was not closed is looked at as its next use would find it.
///
/// A repair keeps what validates and makes nothing up. Inodes whose names are lost get one in /lost+found, their
/// number. Make a copy of the pool first.
///
/// Exit codes: 0 nothing is wrong, 1 all was repaired, 4 something is left, 8 the pool could not be checked.
#[derive(Args, Debug)]
pub struct Fsck {
    /// The file or device of the pool, the first of several
    #[arg(value_parser = PoolNameParser)]
    pub pool: OsString,
    /// Repair what can be repaired
    #[arg(long)]
    pub repair: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Show what stands on media: the superblock, or the records of one inode
#[derive(Args, Debug)]
pub struct Dump {
    /// The file or device of the pool, the first of several
    #[arg(value_parser = PoolNameParser)]
    pub pool: OsString,
    /// An inode number (1 is the root directory)
    pub ino: Option<u32>,
}

/// Run a program with its memory on slow memory
///
/// MEDIA is a file (on a DAX mount, tmpfs or hugetlbfs too), a block device or a device-dax node. What the program allocates
/// lies there, and means nothing once it has ended. Several programs may use one MEDIA at a time, as those do that CMD starts:
/// each has its own part, and a child that was forked has a copy of its parent's.
///
/// Not to be had: programs that are linked statically or run as another user (setuid), and what a program takes by mmap
/// itself, as Go and Java do. docs/memory-type.md says more.
///
/// CMD takes the place of lode, so that its exit status and signals are its own; 127: CMD was not found, 126: it could not be
/// started, 1: MEDIA cannot be used.
#[derive(Args, Debug)]
pub struct Run {
    /// The program, and its arguments
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
    /// Where its memory lies
    #[arg(long, value_name = "MEDIA", required = true)]
    pub heap: Option<PathBuf>,
    /// Make MEDIA where it does not exist, and so long at least; no more of it is used [default: as long as it is]
    #[arg(long, value_name = "SIZE", value_parser = parse_heap_size)]
    pub heap_size: Option<u64>,
    /// What an allocation gets when MEDIA is full: dram, or fail (the program is told that there is no memory)
    #[arg(long, value_name = "WAY", default_value = "dram")]
    pub heap_full: HeapFull,
    /// Leave allocations of fewer bytes in DRAM
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    pub heap_min: u64,
    /// Add a line of JSON to FILE when the program, or one that it started, ends: bytes on MEDIA and in DRAM by arena; -:
    /// write it to standard error
    #[arg(long, value_name = "FILE")]
    pub heap_stats: Option<OsString>,
    /// What programs get that CMD starts: own (a part of MEDIA) or none (DRAM)
    #[arg(long, value_name = "WHAT", default_value = "own")]
    pub heap_children: HeapChildren,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeapFull {
    Dram,
    Fail,
}

impl HeapFull {
    pub fn name(self) -> &'static str {
        match self {
            HeapFull::Dram => "dram",
            HeapFull::Fail => "fail",
        }
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeapChildren {
    Own,
    None,
}

impl HeapChildren {
    pub fn name(self) -> &'static str {
        match self {
            HeapChildren::Own => "own",
            HeapChildren::None => "none",
        }
    }
}

/// Measure this file system, others, and the memory below them
///
/// Systems take turns within one run; each row is the median of its rounds. A row marked emulated ran on
/// ordinary memory that was taken for persistent memory. What cannot be had on this machine is left out, which is said,
/// unless --only names it.
#[derive(Args, Debug)]
pub struct Bench {
    /// Only these rows
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Compare with these file systems: tmpfs, ext4
    #[arg(long, value_name = "FS", value_delimiter = ',')]
    pub peers: Vec<String>,
    /// Smaller sizes, shorter rounds, one thread
    #[arg(long)]
    pub quick: bool,
    /// Shows that every row works; the numbers mean nothing
    #[arg(long)]
    pub smoke: bool,
    /// The rows of the mount too
    #[arg(long)]
    pub mount: bool,
    /// Instead of the rows: where the time of reads and writes goes, by size
    #[arg(long, conflicts_with_all = ["only", "peers", "mount"])]
    pub breakdown: bool,
    /// Numbers of threads
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Rounds of each row
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// Take the media for persistent memory of these kinds (emulation)
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    pub assume: Vec<Assume>,
    /// Have these copy data, each as a system of its own: cpu, semaphore, delegate, dsa, ioat, emu, emu-ioat
    #[arg(long, value_name = "ENGINE", value_delimiter = ',', value_parser = parse_engine)]
    pub engine: Vec<EngineKind>,
    /// What engines are worth here, as lode tune found it [default: ~/.config/lode/profile.toml, else
    /// /etc/lode/profile.toml]; one that was made on another machine, or is damaged, is not used, which is said
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Where to make the pool: a path that is free, as are those with .1, .2 ... and .limit added, where those of
    /// further systems lie; a device holds the first alone
    #[arg(long, value_name = "PATH")]
    pub pool: Option<PathBuf>,
    /// Write a picture of the result here
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Measure what a command costs the machine: CPU seconds and joules for each GiB that it moves
///
/// The time of all CPUs counts, in kernel threads and servers too, not only that of the command's processes, which
/// stands beside it. The idle load is measured first and subtracted. Bytes are taken from --bytes, from fio's report
/// where the command prints one (--output-format=json), or from --pool or --block. Energy is that of the processor packages
/// (RAPL) unless there is a --meter.
///
/// A command that fails ends the measure. What it prints is printed once it has ended; with --json, on stderr. One that
/// prints more than 64 MiB is ended, unless --bytes is given.
#[derive(Args, Debug)]
pub struct Cost {
    /// The command, and its arguments
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
    /// How often to run it
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=COST_RUNS_MAX))]
    pub runs: u32,
    /// Bytes that each run moves; K, M, G and T are binary
    #[arg(long, value_name = "SIZE", value_parser = parse_moved)]
    pub bytes: Option<u64>,
    /// Count what the server of this pool reads and writes, a mounted pool or its mount point, where fio reports nothing
    #[arg(long, value_name = "POOL", value_parser = PoolNameParser)]
    pub pool: Option<OsString>,
    /// Count the sectors of this block device, a name or a path, where fio reports nothing
    #[arg(long, value_name = "DEV", conflicts_with = "pool")]
    pub block: Option<PathBuf>,
    /// How long to watch the idle load; 0: not at all, and nothing is subtracted
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_idle)]
    pub idle: Duration,
    /// A shell command that prints joules so far, asked before and after each run
    #[arg(long, value_name = "CMD")]
    pub meter: Option<OsString>,
    /// Write a picture of the result here
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Find out what engines are worth on this machine, and keep it in a profile
///
/// Each engine copies beside the CPU, in turn, with one thread and with as many as there are CPUs: from which size on it
/// costs less, how many copies at a time the memory bears, what each reaches. It is measured in files without a name of
/// POOL, which go with the command however it ends; without POOL, in memory that is taken for persistent memory.
///
/// The profile is read by every later command and mount on this machine. Run again, the old one stands beside the new
/// one. A difference within the noise is none.
#[derive(Args, Debug)]
pub struct Tune {
    /// The file or device of the pool, the first of several
    #[arg(value_parser = PoolNameParser)]
    pub pool: Option<OsString>,
    /// Only these engines; emulated devices are measured only where they are named here
    #[arg(long, value_name = "ENGINE", value_delimiter = ',', value_parser = parse_engine)]
    pub engine: Vec<EngineKind>,
    /// Smaller files, shorter and fewer rounds: seconds instead of a minute, and more noise
    #[arg(long)]
    pub quick: bool,
    /// Take the media for persistent memory of this kind (emulation)
    #[arg(long, value_name = "DOMAIN")]
    pub assume: Option<Assume>,
    /// Where to write the profile [default: LODE_PROFILE, else /etc/lode/profile.toml for root and
    /// ~/.config/lode/profile.toml for others]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write no profile
    #[arg(long)]
    pub dry_run: bool,
    /// Write a picture of the result here
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Let simulated power fail at every point of many workloads, and judge what is left
///
/// Sequences of file system operations run on simulated media. At each fence and sync the states that a power
/// failure could leave are opened with the production code and held against an independent model: what was
/// acknowledged must be there, what was interrupted wholly or not at all, and the pool must be usable. Exit 1
/// where a promise is broken; each violation is shown with the shortest sequence that shows it, what was lost,
/// and the command that repeats it. No file of this machine is touched.
#[derive(Args, Debug)]
pub struct Crash {
    /// seq1, seq2 or seq3 (all sequences of so many operations, of seq3 a sample), heap (persistent heaps: all of one and
    /// two operations, and long ones by chance), or a file of sequences
    #[arg(long, value_name = "SET|FILE", default_value = "seq1")]
    pub workload: PathBuf,
    /// Chooses the sample, and the states where there are too many
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// So many sequences by chance, or all [default: all of seq1 and seq2, 1000 of seq3]
    #[arg(long, value_name = "N|all", value_parser = parse_samples)]
    pub samples: Option<u64>,
    /// Of the sequences every Nth, from the Kth on: a part of the work for each of N nights or machines
    #[arg(long, value_name = "K/N", default_value = "1/1", hide_default_value = true, value_parser = parse_part)]
    pub part: Part,
    /// Persistence domains
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',', default_value = "all")]
    pub domain: Vec<CrashDomain>,
    /// Data modes
    #[arg(long, value_name = "MODE", value_delimiter = ',', default_values = ["cow", "inplace"])]
    pub data: Vec<Data>,
    /// Pools to begin on: new ones, full ones, with logs about to be cleaned, used before, not closed, full but for what an inode table
    /// that has grown can give back, without room for the records of removals; heaps that are filled in part
    #[arg(long, value_name = "IMAGE", value_delimiter = ',', default_value = "all")]
    pub image: Vec<CrashImage>,
    /// Who copies data: the CPU, verified by its record or fenced before it, or a device that stores past the caches,
    /// into them, or either by alignment
    #[arg(long, value_name = "ENGINE", value_delimiter = ',', default_values = ["cpu"])]
    pub engine: Vec<CrashEngine>,
    /// 2: power fails again while the pool is recovered, and processes are killed before power fails
    #[arg(long, value_name = "1|2", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub depth: u8,
    /// On an ordinary file: each sector of a page is of a moment of its own, and not all of the page of one. Takes five times as long
    #[arg(long)]
    pub torn_pages: bool,
    /// States of each crash point that are searched; where there are more, half of them are drawn by chance, and
    /// the point counts as not covered
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(2..))]
    pub leaves: u64,
    /// Threads [default: all CPUs]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Test the tester: leave out each flush, fence, sync and checksum check of the file system, one at a time,
    /// and say which of them no sequence misses
    #[arg(long)]
    pub mutants: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Every `of`th of some sequences, beginning with the `k`th.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub k: u64,
    pub of: u64,
}

impl Part {
    /// How many of `all` are in it.
    pub fn count(self, all: u64) -> u64 {
        (all + self.of - self.k) / self.of
    }

    /// Which of all is the `n`th of it, from 0.
    pub fn nth(self, n: u64) -> u64 {
        n * self.of + self.k - 1
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.k, self.of)
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashDomain {
    All,
    Memory,
    CpuCache,
    PageCache,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashEngine {
    Cpu,
    CpuFenced,
    PastCaches,
    IntoCaches,
    ByAlignment,
    Late,
    LateByAlignment,
    LateStriped,
    LateInPieces,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashImage {
    All,
    Aged,
    Fresh,
    Full,
    Cleaning,
    Filled,
    Reused,
    Crashed,
    Grown,
    Crammed,
}

/// Print the completions of a shell
#[derive(Args, Debug)]
pub struct Completions {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// Write the man pages into a directory
#[derive(Args, Debug)]
pub struct Man {
    /// Where to; created where it does not exist
    pub dir: PathBuf,
}

/// The whole definition, with the environment variables that stand for flags.
pub fn command() -> Command {
    Cli::command().mut_args(name_environment).mut_subcommands(|sub| {
        let examples = examples(sub.get_name()).iter();
        let shown: String = examples.map(|(what, line)| format!("  {what}:\n    {line}\n")).collect();
        sub.after_long_help(format!("Examples:\n{shown}")).mut_args(name_environment)
    })
}

/// Each flag can be set by `LODE_<NAME>`, except those that permit to overwrite, delete or repair: they must be
/// said on the command line each time.
fn name_environment(arg: Arg) -> Arg {
    match setting_name(&arg) {
        Some(name) => {
            let variable = format!("LODE_{}", name.replace('-', "_").to_ascii_uppercase());
            // One that is empty says nothing.
            if std::env::var_os(&variable).is_some_and(|value| value.is_empty()) {
                return arg;
            }
            let arg = arg.env(variable).hide_env_values(true);
            match arg.get_action() {
                ArgAction::SetTrue => arg.value_parser(clap::builder::BoolishValueParser::new()),
                _ => arg,
            }
        }
        None => arg,
    }
}

/// The name under which environment and configuration file set an argument; none where they must not.
pub fn setting_name(arg: &Arg) -> Option<&str> {
    let name = arg.get_long()?;
    let said_each_time = matches!(name, "force" | "recursive" | "repair" | "help" | "version");
    (!said_each_time).then_some(name)
}

/// What the help and the man page of a subcommand show: what it does, and the line that does it.
pub fn examples(subcommand: &str) -> &'static [(&'static str, &'static str)] {
    match subcommand {
        "mkfs" => &[
            ("A pool in a file", "lode mkfs demo.pool --size 4G"),
            ("A pool over two NUMA nodes", "lode mkfs /dev/dax0.0,/dev/dax1.0 --label data"),
        ],
        "info" => &[("What this machine can do", "lode info"), ("What a pool is", "lode info demo.pool")],
        "mount" => &[
            ("Mount, and return once it is there", "lode mount demo.pool /mnt"),
            ("Stay in the foreground, read only", "lode mount demo.pool /mnt -f -o ro"),
            ("With metrics for Prometheus", "lode mount demo.pool /mnt --metrics 127.0.0.1:9847"),
        ],
        "umount" => &[("Unmount", "lode umount /mnt")],
        "top" => &[
            ("What goes on in a mounted pool", "lode top demo.pool"),
            ("Ten seconds of it as text", "lode top /mnt --once --interval 10"),
            ("All counts, from another address", "lode top 127.0.0.1:9847 --json"),
        ],
        "ls" => &[
            ("The root directory", "lode ls demo.pool:/"),
            ("All files below a directory, with details", "lode ls -lR demo.pool:/docs"),
        ],
        "cat" => &[("Show a file", "lode cat demo.pool:/docs/notes.txt")],
        "cp" => &[
            ("A file into a pool", "lode cp notes.txt demo.pool:/notes.txt"),
            ("A directory out of it, with all attributes", "lode cp -a demo.pool:/docs ./docs"),
            ("From pool to pool", "lode cp -a one.pool:/docs two.pool:/"),
        ],
        "rm" => &[
            ("A file", "lode rm demo.pool:/notes.txt"),
            ("A directory with all it holds", "lode rm -r demo.pool:/docs"),
        ],
        "fsck" => &[
            ("Is anything wrong?", "lode fsck demo.pool"),
            ("Mend it, after a copy was made", "lode fsck demo.pool --repair"),
        ],
        "dump" => &[
            ("The superblock", "lode dump demo.pool"),
            ("The records of the root directory", "lode dump demo.pool 1"),
        ],
        "run" => &[
            (
                "A sort whose memory is a file on a DAX mount",
                "lode run --heap /mnt/pmem/heap --heap-size 8G -- sort -S 4G big.txt",
            ),
            (
                "Large allocations only, and what came of it",
                "lode run --heap /dev/dax0.0 --heap-min 64K --heap-stats - -- python3 train.py",
            ),
        ],
        "bench" => &[
            ("All rows beside tmpfs", "lode bench --peers tmpfs"),
            ("Does it work at all", "lode bench --quick --only write-rand-4k"),
            ("Where the time goes, with a picture", "lode bench --breakdown --svg breakdown.svg"),
        ],
        "cost" => &[
            ("A command that moves a known amount", "lode cost --bytes 1G -- cp big.img /mnt"),
            ("fio counts for itself", "lode cost -- fio --output-format=json sync-write.fio"),
            ("As one JSON document, five runs", "lode cost --json --runs 5 --block sda -- sync -f /srv"),
        ],
        "tune" => &[
            ("On the media of a pool", "lode tune demo.pool"),
            ("How it would come out, with a picture", "lode tune demo.pool --quick --dry-run --svg tune.svg"),
            ("The emulated device too", "lode tune --engine semaphore,delegate,emu"),
        ],
        "crash" => &[
            ("Every operation, alone", "lode crash --workload seq1"),
            ("Every pair, on persistent memory", "lode crash --workload seq2 --domain memory"),
            ("Persistent heaps", "lode crash --workload heap"),
            ("A hundred thousand triples", "lode crash --workload seq3 --samples 100000 --seed 7"),
            (
                "A tenth of all triples",
                "lode crash --workload seq3 --samples all --part 3/10 --domain memory --image fresh",
            ),
        ],
        "wsp" => &[
            (
                "Boot a guest whose memory is on persistent memory",
                "lode wsp start db --ram 4G --media /mnt/pmem --disk db.qcow2",
            ),
            ("Suspend it, and let it go on", "lode wsp suspend db"),
            ("After the power is back", "lode wsp resume --all"),
            ("What a power failure asks for", "lode wsp suspend --all --window 50ms"),
            ("What else QEMU is told", "lode wsp start test --ram 512M --media /dev/shm -- -kernel vmlinux"),
        ],
        "completions" => &[(
            "For bash, for this user",
            "lode completions bash > ~/.local/share/bash-completion/completions/lode",
        )],
        "man" => &[("Next to the build", "lode man target/man")],
        _ => &[],
    }
}

fn parse_pool_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    match bytes {
        ..POOL_BYTES_MIN => Err(format!("too small: a pool has at least {}", Size(POOL_BYTES_MIN))),
        POOL_BYTES_MIN..=POOL_BYTES_MAX => Ok(bytes),
        _ => Err(format!("too large: a pool has at most {}", Size(POOL_BYTES_MAX))),
    }
}

fn parse_heap_size(text: &str) -> Result<u64, String> {
    const LEAST: u64 = MEMORY_BYTES_MIN as u64;
    const MOST: u64 = MEMORY_BYTES_MAX as u64;
    match size::parse(text)? {
        ..LEAST => Err(format!("too small: {} are the least", Size(LEAST))),
        LEAST..=MOST => Ok(size::parse(text)?),
        _ => Err(format!("too large: {} are the most", Size(MOST))),
    }
}

fn parse_moved(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("nothing moved has no cost per byte".to_string()),
        bytes => Ok(bytes),
    }
}

fn parse_idle(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.0..=COST_IDLE_S_MAX).contains(s));
    let refused = || format!("not a number of seconds from 0 to {COST_IDLE_S_MAX}");
    seconds.map(Duration::from_secs_f64).ok_or_else(refused)
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| TOP_INTERVAL_S.contains(s));
    let refused =
        || format!("not a number of seconds from {} to {}", TOP_INTERVAL_S.start(), TOP_INTERVAL_S.end());
    seconds.map(Duration::from_secs_f64).ok_or_else(refused)
}

/// All are more than there are.
fn parse_samples(text: &str) -> Result<u64, String> {
    match text {
        "all" => Ok(u64::MAX),
        _ => text
            .parse()
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| "not a number of 1 or more, nor \"all\"".to_string()),
    }
}

fn parse_part(text: &str) -> Result<Part, String> {
    let numbers =
        text.split_once('/').and_then(|(k, of)| Some(Part { k: k.parse().ok()?, of: of.parse().ok()? }));
    numbers
        .filter(|part| (1..=part.of).contains(&part.k) && part.of <= PARTS_MAX)
        .ok_or_else(|| format!("not K/N with K from 1 to N, and N up to {PARTS_MAX}"))
}

/// As it was given: it becomes a mount option.
fn parse_metrics(text: &str) -> Result<String, String> {
    text.parse::<Address>()?;
    without_comma(text).map(str::to_string)
}

fn parse_option_path(text: &str) -> Result<PathBuf, String> {
    without_comma(text).map(PathBuf::from)
}

fn without_comma(text: &str) -> Result<&str, String> {
    let wrong = "a mount option has no comma: choose another path";
    if text.contains(',') { Err(wrong.to_string()) } else { Ok(text) }
}

fn parse_stripe(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    let fits = bytes.is_power_of_two() && (4096..=1 << 30).contains(&bytes);
    fits.then_some(bytes).ok_or_else(|| "not a power of two from 4K to 1G".to_string())
}

fn parse_class(name: &str) -> Result<Class, String> {
    name.parse().map_err(|e: UnknownClass| e.to_string())
}

fn parse_engine(name: &str) -> Result<EngineKind, String> {
    name.parse().map_err(|e: UnknownEngine| e.to_string())
}

fn parse_label(text: &str) -> Result<String, String> {
    MkfsOptions::check_label(text).map(|()| text.to_string()).map_err(|e| e.to_string())
}

/// Names a pool, by any bytes but none.
#[derive(Clone)]
struct PoolNameParser;

impl clap::builder::TypedValueParser for PoolNameParser {
    type Value = OsString;

    fn parse_ref(
        &self,
        _cmd: &Command,
        _arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<OsString, clap::Error> {
        match value.is_empty() {
            true => Err(clap::Error::raw(
                clap::error::ErrorKind::ValueValidation,
                "the name of a pool is empty: name its file or device",
            )),
            false => Ok(value.to_owned()),
        }
    }
}

/// Names a file of a pool; anything else is a usage error.
#[derive(Clone)]
struct PoolPathParser;

impl clap::builder::TypedValueParser for PoolPathParser {
    type Value = PoolPath;

    fn parse_ref(
        &self,
        _cmd: &Command,
        _arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<PoolPath, clap::Error> {
        parse_pool_path(value).map_err(|e| clap::Error::raw(clap::error::ErrorKind::ValueValidation, e))
    }
}

/// Names a file of a pool or of the host.
#[derive(Clone)]
struct TargetParser;

impl clap::builder::TypedValueParser for TargetParser {
    type Value = Target;

    fn parse_ref(
        &self,
        _cmd: &Command,
        _arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Target, clap::Error> {
        match Target::parse(value) {
            Target::Pool(p) if p.pool.is_empty() => parse_pool_path(value)
                .map(Target::Pool)
                .map_err(|e| clap::Error::raw(clap::error::ErrorKind::ValueValidation, e)),
            target => Ok(target),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_an_example_that_parses() {
        for sub in command().get_subcommands() {
            let examples = examples(sub.get_name());
            assert!(!examples.is_empty(), "{} has no example", sub.get_name());
            for (_, line) in examples {
                let words = line.split_whitespace().take_while(|w| *w != ">");
                command().try_get_matches_from(words).unwrap_or_else(|e| panic!("{line}: {e}"));
            }
        }
    }

    #[test]
    fn nothing_that_deletes_is_set_from_outside() {
        for sub in command().get_subcommands() {
            for arg in sub.get_arguments() {
                let dangerous = matches!(arg.get_id().as_str(), "force" | "recursive" | "repair");
                assert!(!dangerous || arg.get_env().is_none(), "{} {}", sub.get_name(), arg.get_id());
            }
        }
    }
}
