//! What is measured, how large and how long: sizes, threads and where they run, files.
//!
//! Files together are twice the last-level cache, where the pool has room, so that reads come from memory; the DRAM end
//! of a copy is a buffer that its thread uses again and again, as a program's is (and the bench's).

use std::fs;
use std::time::Duration;

use lodestone::mover::EngineKind;
use lodestone::mover::profile::Lane;
use lodestone::mover::schedule::Direction;

use crate::size::Size;

const MIB: u64 = 1 << 20;
/// Sizes that are compared, largest first: so each finds free space in pieces that are large enough for it.
pub const SIZES: [usize; 11] = {
    let mut sizes = [0; 11];
    let mut n = 0;
    while n < sizes.len() {
        sizes[n] = OP_BYTES_MAX >> n;
        n += 1;
    }
    sizes
};
/// The largest copy, in bytes.
pub const OP_BYTES_MAX: usize = 4 << 20;
/// The size at which copies at a time are counted, in bytes (Fastmove §6.3.2).
pub const SWEEP_BYTES: usize = 64 << 10;
/// Copies at a time that are tried for devices, where there are fewer CPUs: callers wait, and do not copy.
const DEVICE_COPIES_MIN: usize = 8;
/// Files together, where it is to be quick.
const QUICK_FILES_BYTES: u64 = 128 * MIB;
/// The least that a file may have: two of the largest copies.
const FILE_BYTES_MIN: u64 = 2 * OP_BYTES_MAX as u64;
/// Of the free space, files take one part in so many: each write goes to new blocks, and some of the old ones are freed
/// late.
const FREE_PARTS: u64 = 4;
/// What a pool has beside that, for the file system itself.
const POOL_BYTES_MORE: u64 = 64 * MIB;

pub struct Plan {
    /// Besides the CPU.
    pub engines: Vec<EngineKind>,
    pub rounds: usize,
    pub slice: Duration,
    /// What files together are to have, in bytes.
    pub files_bytes: u64,
    pub last_level_cache_bytes: Option<u64>,
}

impl Plan {
    /// `asked_for`: these engines; none are all that are no emulated devices.
    pub fn new(asked_for: &[EngineKind], quick: bool) -> Plan {
        let wanted = |kind: &EngineKind| match asked_for {
            [] => !kind.emulated(),
            some => some.contains(kind),
        };
        let engines = EngineKind::NAMED.into_iter().filter(|kind| *kind != EngineKind::Cpu && wanted(kind));
        let cache = last_level_cache_bytes();
        let (rounds, slice, files_bytes) = match quick {
            true => (3, Duration::from_millis(5), QUICK_FILES_BYTES),
            false => (9, Duration::from_millis(20), (2 * cache.unwrap_or(0)).max(QUICK_FILES_BYTES)),
        };
        Plan { engines: engines.collect(), rounds, slice, files_bytes, last_level_cache_bytes: cache }
    }

    /// As many as copy at a time, with so many CPUs.
    pub fn files(&self, cpus: usize) -> usize {
        let devices = self.engines.iter().any(|kind| !kind.bounds_itself());
        let most = if devices { device_counts(cpus).into_iter().max() } else { None };
        most.unwrap_or(cpus).max(cpus).max(1)
    }

    /// Bytes of so many files together, with room: many files are more than the caches ask for.
    fn together_bytes(&self, files: usize) -> u64 {
        self.files_bytes.max(files as u64 * FILE_BYTES_MIN)
    }

    /// Bytes of each of `files` files in a pool with so much free space. The message says how much is wanted.
    pub fn file_bytes(&self, files: usize, free: u64) -> Result<u64, String> {
        let together = self.together_bytes(files).min(free / FREE_PARTS);
        let files = files as u64;
        let bytes = (together / files) / OP_BYTES_MAX as u64 * OP_BYTES_MAX as u64;
        match bytes >= FILE_BYTES_MIN {
            true => Ok(bytes),
            false => Err(format!(
                "it has {} free, and measuring takes {}: remove files, or name a larger pool",
                Size(free),
                Size(files * FILE_BYTES_MIN * FREE_PARTS)
            )),
        }
    }

    /// What of such a pool is used, in bytes: the files, and as much again, in which writes find new blocks.
    pub fn memory_bytes(&self, files: usize) -> u64 {
        self.together_bytes(files) * 2 + POOL_BYTES_MORE
    }

    /// Refuses a pool in memory for which there is none.
    pub fn check_memory(&self, files: usize, free: u64) -> Result<(), String> {
        let need = self.memory_bytes(files);
        match need <= free {
            true => Ok(()),
            false => Err(format!(
                "measuring takes {} of memory, and {} are free: give --quick, or name a pool",
                Size(need),
                Size(free)
            )),
        }
    }

    /// Bytes of a pool that is made for the measure in so many files.
    pub fn pool_bytes(&self, files: usize) -> u64 {
        self.together_bytes(files) * FREE_PARTS + POOL_BYTES_MORE
    }
}

/// The cache that all cores of this CPU share.
fn last_level_cache_bytes() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |dir: std::path::PathBuf| {
        let text = fs::read_to_string(dir.join("size")).ok()?;
        crate::size::parse(text.trim()).ok()
    };
    caches.flatten().filter_map(|entry| size(entry.path())).max()
}

/// Copies at a time that are tried: all up to four, then in steps of a half.
pub fn counts(most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (1..=most.min(4)).collect();
    let mut next = 6;
    while next <= most {
        counts.push(next);
        next = if next.is_power_of_two() { next * 3 / 2 } else { next * 4 / 3 };
    }
    counts
}

/// As [`counts`] for a device, which copies while its callers wait.
pub fn device_counts(cpus: usize) -> Vec<usize> {
    counts(cpus.max(DEVICE_COPIES_MIN))
}

/// Where threads run, beside or far from the media.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub remote: bool,
    pub cpus: Vec<usize>,
}

impl Site {
    pub fn lane(&self, direction: Direction) -> Lane {
        Lane::of(direction, self.remote)
    }

    /// One thread, and as many as there are CPUs.
    pub fn threads(&self) -> Vec<usize> {
        let mut threads = vec![1, self.cpus.len()];
        threads.dedup();
        threads
    }
}

/// Local and remote CPUs, where the two can be told apart, and else why not. `nodes` are those of the machine with
/// their CPUs, `pool` that of each region, `allowed` the CPUs that this process may use, in the order in which threads take
/// them.
pub fn sites(
    nodes: &[(u32, &[usize])],
    pool: &[Option<u32>],
    allowed: &[usize],
) -> (Vec<Site>, Option<String>) {
    let everywhere = |why: &str| {
        let note = format!("local and remote copies are not told apart: {why}");
        (vec![Site { remote: false, cpus: allowed.to_vec() }], Some(note))
    };
    if nodes.len() < 2 {
        return (vec![Site { remote: false, cpus: allowed.to_vec() }], None);
    }
    let Some(Some(home)) = pool.first().copied() else {
        return everywhere("the kernel does not say on which node the pool lies");
    };
    if pool.iter().any(|node| *node != Some(home)) {
        return everywhere("the pool lies on several nodes");
    }
    let usable = |wanted: bool| {
        let nodes = nodes.iter().filter(|(number, _)| (*number == home) == wanted);
        nodes
            .map(|(_, cpus)| allowed.iter().copied().filter(|cpu| cpus.contains(cpu)).collect::<Vec<_>>())
            .find(|cpus| !cpus.is_empty())
    };
    match (usable(true), usable(false)) {
        (Some(local), Some(remote)) => {
            (vec![Site { remote: false, cpus: local }, Site { remote: true, cpus: remote }], None)
        }
        (Some(local), None) => {
            let note =
                "remote copies are not measured: this process may use the CPUs of the pool's node only";
            (vec![Site { remote: false, cpus: local }], Some(note.to_owned()))
        }
        (None, Some(remote)) => {
            let note = "local copies are not measured: this process may use no CPU of the pool's node";
            (vec![Site { remote: true, cpus: remote }], Some(note.to_owned()))
        }
        (None, None) => everywhere("this process may use no CPU of any node that the kernel names"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulated_devices_are_measured_only_where_they_are_named() {
        let all = Plan::new(&[], true).engines;
        assert!(all.contains(&EngineKind::Delegate) && !all.iter().any(|kind| kind.emulated()), "{all:?}");
        assert!(!all.contains(&EngineKind::Cpu));
        assert_eq!(Plan::new(&[EngineKind::Emu, EngineKind::Cpu], true).engines, [EngineKind::Emu]);
    }

    #[test]
    fn sizes_reach_every_bin_and_three_beyond_the_largest_threshold() {
        use lodestone::mover::profile::{BINS, SMALLEST_BYTES, bin};
        assert_eq!(SIZES.last(), Some(&SMALLEST_BYTES));
        assert!(SIZES.is_sorted_by(|a, b| a == &(2 * b)));
        assert!((0..BINS).all(|n| SIZES.iter().any(|bytes| bin(*bytes) == n)));
    }

    #[test]
    fn files_fit_the_pool() {
        let plan = Plan { files_bytes: 256 * MIB, ..Plan::new(&[], true) };
        assert_eq!(plan.file_bytes(2, 4096 * MIB), Ok(128 * MIB));
        assert_eq!(plan.file_bytes(2, 200 * MIB), Ok(24 * MIB));
        let said = plan.file_bytes(2, 60 * MIB).unwrap_err();
        assert!(said.contains("60 MiB free") && said.contains("takes 64 MiB"), "{said}");
        assert!(plan.file_bytes(2, plan.pool_bytes(2)).is_ok());
    }

    #[test]
    fn a_pool_that_the_memory_does_not_hold_is_refused() {
        let plan = Plan { files_bytes: 960 * MIB, ..Plan::new(&[], true) };
        let need = plan.memory_bytes(2);
        assert!((1920 * MIB..plan.pool_bytes(2)).contains(&need), "{need}");
        assert_eq!(plan.check_memory(2, need), Ok(()));
        let said = plan.check_memory(2, 1024 * MIB).unwrap_err();
        assert!(said.contains("1 GiB are free") && said.contains("--quick"), "{said}");
    }

    #[test]
    fn a_file_for_each_of_many_cpus_fits_the_pool_that_is_made() {
        for (cpus, quick) in [1, 17, 64, 256].into_iter().flat_map(|cpus| [(cpus, true), (cpus, false)]) {
            let plan = Plan { last_level_cache_bytes: None, ..Plan::new(&[], quick) };
            let files = plan.files(cpus);
            assert!(files >= cpus);
            let bytes = plan.file_bytes(files, plan.pool_bytes(files) - POOL_BYTES_MORE).unwrap();
            assert!(bytes >= FILE_BYTES_MIN, "{cpus} CPUs, quick {quick}: {bytes}");
        }
    }

    #[test]
    fn counts_grow_by_halves() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(40), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]);
        assert_eq!(device_counts(2), [1, 2, 3, 4, 6, 8]);
    }

    #[test]
    fn local_and_remote_are_told_apart_where_the_pool_has_one_node() {
        let nodes: &[(u32, &[usize])] = &[(0, &[0, 1]), (1, &[2, 3])];
        let site = |remote, cpus: &[usize]| Site { remote, cpus: cpus.to_vec() };
        let all = [0, 1, 2, 3];
        assert_eq!(sites(&nodes[..1], &[None], &[0, 1]), (vec![site(false, &[0, 1])], None));
        let of_node_1 = sites(nodes, &[Some(1), Some(1)], &all);
        assert_eq!(of_node_1, (vec![site(false, &[2, 3]), site(true, &[0, 1])], None));
        for (pool, says) in
            [(&[None][..], "does not say"), (&[Some(0), Some(1)], "several"), (&[], "does not say")]
        {
            let (got, note) = sites(nodes, pool, &all);
            assert_eq!(got, [site(false, &all)]);
            assert!(note.unwrap().contains(says));
        }
        // In the order in which threads take them.
        let (got, _) = sites(nodes, &[Some(0)], &[1, 3, 0, 2]);
        assert_eq!(got, [site(false, &[1, 0]), site(true, &[3, 2])]);
        let (got, note) = sites(nodes, &[Some(0)], &[1]);
        assert_eq!(got, [site(false, &[1])]);
        assert!(note.unwrap().contains("remote copies are not measured"));
        let (got, note) = sites(nodes, &[Some(0)], &[2, 3]);
        assert_eq!(got, [site(true, &[2, 3])]);
        assert!(note.unwrap().contains("local copies are not measured"));
    }

    #[test]
    fn thread_counts_are_one_and_all() {
        let threads = |cpus: &[usize]| Site { remote: false, cpus: cpus.to_vec() }.threads();
        assert_eq!((threads(&[0]), threads(&[4, 5, 6])), (vec![1], vec![1, 3]));
    }
}
