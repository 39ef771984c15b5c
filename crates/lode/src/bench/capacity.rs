//! What files and bytes cost at rest: a pool of a million empty files, and a sparse one of 1 TiB.
//!
//! Mount times are medians of mounts one after the other. Memory per file is the growth of this process's
//! anonymous memory, divided by the files: after a mount, and after every directory was listed, which is
//! when its index is built. Media per file is what statfs says the files took.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lodestone::fs::{Cred, Fs, Ino, Kind, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::{Error, Result};

use super::machine::{Machine, Memory, resident_anonymous_bytes};
use super::place::Place;
use super::plan::Plan;
use super::report::{Claim, Row};
use super::value::{Values, value};

const MIB: u64 = 1 << 20;
const MOUNTS: usize = 5;
const FILES_PER_DIRECTORY: usize = 10_000;
/// Room per file when the pool is made: more than a file may take, so that the pool is never full.
const POOL_BYTES_PER_FILE: u64 = 1024;
const TERABYTE: u64 = 1 << 40;

const CLEAN_MOUNT_MS_MAX: f64 = 50.0;
const CRASH_MOUNT_MS_MAX: f64 = 3000.0;
const DRAM_BYTES_MAX: f64 = 400.0;
const MEDIA_BYTES_MAX: f64 = 512.0;
const TERABYTE_MS_MAX: f64 = 1000.0;

pub fn run(name: &str, plan: &Plan, place: &Place, machine: &mut Machine) -> Result<Values> {
    let (values, memory) = match name {
        "million" => million(plan, place, machine)?,
        _ => terabyte(plan, place, machine)?,
    };
    let (mut rows, claims): Values = values.into_iter().unzip();
    rows.iter_mut().for_each(|row| row.memory = Some(memory.clone()));
    Ok((rows, claims))
}

/// Rows with their claims, and what their pool lay in.
type Measured = (Vec<(Row, Claim)>, Memory);

fn million(plan: &Plan, place: &Place, machine: &mut Machine) -> Result<Measured> {
    let path = place.path("million.pool");
    let files = plan.million_files;
    let bytes = files as u64 * POOL_BYTES_PER_FILE + 128 * MIB;
    place.check_room("a pool of so many files", bytes + files as u64 * DRAM_BYTES_MAX as u64)?;
    let options = PoolOptions { assume: Some(plan.assume[0]), prefault: true, ..PoolOptions::default() };
    let pool = Pool::create(std::slice::from_ref(&path), Some(bytes), &options)?;
    let memory = machine.memory_of("million", &pool);
    let pool = Fs::mkfs(pool, &MkfsOptions::default())?;
    let fs = Fs::open(pool, &OpenOptions::default())?;
    let before = fs.statfs();
    fill(&fs, files)?;
    let after = fs.statfs();
    let media_bytes = (before.blocks_free - after.blocks_free) * u64::from(after.block_bytes);
    fs.close()?;
    drop(fs);
    let (clean, clean_dram) = mounts(&path, plan.assume[0], End::Close)?;
    let (_, listed_dram) = mounts(&path, plan.assume[0], End::ListAndClose)?;
    // The first of these mounts finds the clean pool of the last close; each one after that finds a crash.
    mounts_once(&path, plan.assume[0], End::Vanish)?;
    let (crash, crash_dram) = mounts(&path, plan.assume[0], End::Vanish)?;
    remove(&path)?;
    let per_file = |bytes: f64| bytes / files as f64;
    let values = vec![
        value("million-mount-clean", &clean, "ms", CLEAN_MOUNT_MS_MAX),
        value("million-mount-crash", &crash, "ms", CRASH_MOUNT_MS_MAX),
        value("million-media", &[per_file(media_bytes as f64)], "bytes/file", MEDIA_BYTES_MAX),
        value("million-dram-clean", &[per_file(clean_dram)], "bytes/file", DRAM_BYTES_MAX),
        value("million-dram-listed", &[per_file(listed_dram)], "bytes/file", DRAM_BYTES_MAX),
        value("million-dram-crash", &[per_file(crash_dram)], "bytes/file", DRAM_BYTES_MAX),
    ];
    Ok((values, memory))
}

fn fill(fs: &Fs<Pool>, files: usize) -> Result<()> {
    let cred = Cred::process();
    let mut dir = Ino::ROOT;
    for i in 0..files {
        if i % FILES_PER_DIRECTORY == 0 {
            let name = format!("d{}", i / FILES_PER_DIRECTORY);
            dir = fs.mkdir(&cred, Ino::ROOT, name.as_bytes(), 0o755, 0)?.ino;
        }
        let name = format!("file.{i:09}");
        let ino = fs.mknod(&cred, dir, name.as_bytes(), libc::S_IFREG | 0o644, 0, 0)?.ino;
        fs.forget(ino, 1);
    }
    Ok(())
}

/// Reads the root directory and all directories in it.
fn list(fs: &Fs<Pool>) -> Result<()> {
    let mut dirs = Vec::new();
    fs.readdir(Ino::ROOT, 0, &mut |entry| {
        let is_child = entry.kind == Kind::Directory && !matches!(entry.name, b"." | b"..");
        dirs.extend(is_child.then_some(entry.ino));
        true
    })?;
    dirs.into_iter().try_for_each(|dir| fs.readdir(dir, 0, &mut |_| true))
}

/// How a mount ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Close,
    /// Memory is taken after every directory was read.
    ListAndClose,
    /// As after SIGKILL: nothing is written.
    Vanish,
}

/// One mount, timed: milliseconds, and bytes of DRAM it took.
fn mounts_once(path: &Path, domain: Domain, end: End) -> Result<(f64, f64)> {
    let unknown = || Error::message(libc::ENOSYS, "bench::capacity", "/proc/self/status has no RssAnon");
    crate::allocator::give_back();
    let before = resident_anonymous_bytes().ok_or_else(unknown)?;
    let began = Instant::now();
    let pool = Pool::open(path, &PoolOptions { assume: Some(domain), ..PoolOptions::default() })?;
    let fs: Arc<Fs<Pool>> = Fs::open(pool, &OpenOptions::default())?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    if end == End::ListAndClose {
        list(&fs)?;
    }
    let after = resident_anonymous_bytes().ok_or_else(unknown)?;
    if end != End::Vanish {
        fs.close()?;
    }
    Ok((ms, after.saturating_sub(before) as f64))
}

/// Several mounts one after the other: milliseconds of each, and the largest growth of memory, because
/// what the allocator kept of the mount before hides in the smaller ones.
fn mounts(path: &Path, domain: Domain, end: End) -> Result<(Vec<f64>, f64)> {
    let mut all = Vec::new();
    let mut dram: f64 = 0.0;
    for _ in 0..MOUNTS {
        let (ms, bytes) = mounts_once(path, domain, end)?;
        all.push(ms);
        dram = dram.max(bytes);
    }
    Ok((all, dram))
}

fn terabyte(plan: &Plan, place: &Place, machine: &mut Machine) -> Result<Measured> {
    let path = place.path("terabyte.pool");
    let io = |e| Error::io(e, "bench::capacity", "make", &path);
    let (mut mkfs, mut mount, mut memory) = (Vec::new(), Vec::new(), None);
    for _ in 0..MOUNTS {
        std::fs::File::create(&path).and_then(|f| f.set_len(TERABYTE)).map_err(io)?;
        let options = PoolOptions { assume: Some(plan.assume[0]), ..PoolOptions::default() };
        let began = Instant::now();
        let pool = Pool::create(std::slice::from_ref(&path), None, &options)?;
        let pool = Fs::mkfs(pool, &MkfsOptions::default())?;
        mkfs.push(began.elapsed().as_secs_f64() * 1e3);
        memory = Some(machine.memory_of("terabyte", &pool));
        let fs = Fs::open(pool, &OpenOptions::default())?;
        fs.close()?;
        drop(fs);
        mount.push(mounts_once(&path, plan.assume[0], End::Close)?.0);
        remove(&path)?;
    }
    let values = vec![
        value("terabyte-mkfs", &mkfs, "ms", TERABYTE_MS_MAX),
        value("terabyte-mount-clean", &mount, "ms", TERABYTE_MS_MAX),
    ];
    Ok((values, memory.expect("it was made")))
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).map_err(|e| Error::io(e, "bench::capacity", "remove", path))
}
