//! What the copy routines of the media room cost, beside plain memcpy on the same memory.
//!
//! `cargo run --release --example copy [ROUNDS] [DIRECTORY]`. All systems take turns within each round,
//! at random places of a pool of 1 GiB in DIRECTORY (a tmpfs; /dev/shm by default), with a full barrier
//! before each load, so that calls do not overlap (as in a file system, which takes a lock for each).
//! What is shown is the median of all rounds. Figures of the domain `memory` are those of emulated PM.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use lodestone::media::{Addr, Domain, Media, Pool, PoolOptions, crc32c};

const REGION_BYTES: usize = 1 << 30;

/// The memory of a pool, mapped once more for plain memcpy.
struct Plain(*mut u8);

impl Plain {
    fn new(path: &Path) -> Plain {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), REGION_BYTES, prot, flags, &file, 0) };
        Plain(base.unwrap().cast())
    }

    fn store(&self, at: usize, src: &[u8]) {
        // SAFETY: places end before the region does.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.0.add(at), src.len()) };
        black_box(self.0);
    }

    fn load(&self, at: usize, dst: &mut [u8]) {
        // SAFETY: places end before the region does.
        unsafe { std::ptr::copy_nonoverlapping(self.0.add(at), dst.as_mut_ptr(), dst.len()) };
        black_box(dst);
    }
}

/// Removed at the end, come what may.
struct PoolFile(PathBuf);

impl Drop for PoolFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Places(u64);

impl Places {
    /// Other places than at every measurement before.
    fn new() -> Places {
        static SEED: AtomicU64 = AtomicU64::new(88172645463325252);
        Places(SEED.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed))
    }

    /// A random place that is a multiple of `bytes` and has as many behind it; never in block 0.
    fn next(&mut self, bytes: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let first = 4096usize.div_ceil(bytes);
        (first + self.0 as usize % (REGION_BYTES / bytes - first)) * bytes
    }
}

type System<'a> = (&'static str, Box<dyn FnMut(usize) + 'a>);

/// Median nanoseconds of one call, for each system.
fn measure(systems: &mut [System<'_>], bytes: usize, rounds: usize) -> Vec<f64> {
    let calls = ((8 << 20) / bytes).clamp(8, 500);
    let mut places = Places::new();
    let mut times = vec![Vec::with_capacity(rounds); systems.len()];
    for _ in 0..rounds {
        for (system, times) in systems.iter_mut().zip(&mut times) {
            let begin = Instant::now();
            for _ in 0..calls {
                let at = places.next(bytes);
                system.1(at);
            }
            times.push(begin.elapsed().as_nanos() as f64 / calls as f64);
        }
    }
    times.iter_mut().map(|t| median(t)).collect()
}

/// Runs a load behind everything before it, as if its address depended on that.
fn alone(load: impl FnOnce()) {
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every 64-bit x86.
    unsafe {
        std::arch::x86_64::_mm_lfence()
    };
    load();
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn print_table(
    title: &str,
    sizes: &[usize],
    rounds: usize,
    mut systems: impl FnMut(usize) -> Vec<f64>,
    names: &[&str],
) {
    println!("\n{title} (ns per call, and GB/s; median of {rounds} rounds)\n");
    print!("{:>9}", "bytes");
    names.iter().for_each(|n| print!(" {n:>22}"));
    println!();
    for &bytes in sizes {
        print!("{bytes:>9}");
        for ns in systems(bytes) {
            print!(" {ns:>13.1} {:>8.2}", bytes as f64 / ns);
        }
        println!();
    }
}

fn main() {
    let rounds = std::env::args().nth(1).map_or(31, |n| n.parse().expect("ROUNDS is a number"));
    let dir = std::env::args().nth(2).unwrap_or_else(|| "/dev/shm".to_owned());
    let file = PoolFile(Path::new(&dir).join(format!("lodestone-copy-{}", std::process::id())));
    let size = Some(REGION_BYTES as u64);
    let memory = PoolOptions { assume: Some(Domain::Memory), prefault: true, ..PoolOptions::default() };
    let pm = Pool::create(std::slice::from_ref(&file.0), size, &memory).unwrap();
    let volatile = PoolOptions { prefault: true, ..PoolOptions::default() };
    let dram = Pool::memfd(REGION_BYTES as u64, &volatile).unwrap();
    let plain = Plain::new(&file.0);
    let d = pm.describe();
    println!("{} (of {:?}), checksums by {}, emulated PM", d.isa, d.isas, d.crc);
    println!("huge pages: {} of {} MiB", d.regions[0].pages.huge_bytes >> 20, d.bytes >> 20);

    let src = vec![0x5a; 4 << 20];
    let sizes = [64, 256, 1024, 2048, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
    let stores = |bytes: usize| {
        let src = &src[..bytes];
        let mut systems: [System; 5] = [
            ("memcpy", Box::new(|at| plain.store(at, src))),
            ("volatile: copy_nt", Box::new(|at| _ = dram.fence(dram.copy_nt(Addr(at as u64), src).unwrap()))),
            (
                "memory: cached+flush",
                Box::new(|at| {
                    let dirty = pm.copy_cached(Addr(at as u64), src).unwrap();
                    let _ = pm.fence(pm.flush(dirty));
                }),
            ),
            ("memory: copy_nt", Box::new(|at| _ = pm.fence(pm.copy_nt(Addr(at as u64), src).unwrap()))),
            (
                "memory: copy_nt_crc",
                Box::new(|at| _ = pm.fence(pm.copy_nt_crc(Addr(at as u64), src, 0).unwrap().1)),
            ),
        ];
        measure(&mut systems, bytes, rounds)
    };
    let names =
        ["memcpy", "volatile: copy_nt", "memory: cached+flush", "memory: copy_nt", "memory: copy_nt_crc"];
    print_table("Stores, each with its fence", &sizes, rounds, stores, &names);

    let mut dst_plain = vec![0; 4 << 20];
    let mut dst = vec![0; 4 << 20];
    let loads = |bytes: usize| {
        let (dst_plain, dst) = (&mut dst_plain[..bytes], &mut dst[..bytes]);
        let mut systems: [System; 3] = [
            ("memcpy", Box::new(|at| alone(|| plain.load(at, dst_plain)))),
            ("read", Box::new(|at| alone(|| pm.read(Addr(at as u64), dst).unwrap()))),
            ("crc32c", Box::new(|at| alone(|| _ = black_box(pm.crc32c(Addr(at as u64), bytes, 0))))),
        ];
        measure(&mut systems, bytes, rounds)
    };
    print_table("Loads", &sizes, rounds, loads, &["memcpy", "read", "crc32c"]);

    let atomic = |bytes: usize| {
        let src = &src[..bytes];
        // Records follow each other in a log.
        let tail = std::cell::Cell::new(0);
        let line = || {
            tail.set((tail.get() + 64) % (1 << 20));
            Addr(4096 + tail.get())
        };
        let mut systems: [System; 2] = [
            (
                "one fence, checked",
                Box::new(|at| {
                    let (_, data) = pm.copy_nt_crc(Addr(at as u64), src, 0).unwrap();
                    let record = pm.copy_nt(line(), &src[..64]).unwrap();
                    let _ = pm.fence(data.and(record));
                }),
            ),
            (
                "two fences",
                Box::new(|at| {
                    let data = pm.copy_nt(Addr(at as u64), src).unwrap();
                    let _ = pm.fence(data);
                    let record = pm.copy_nt(line(), &src[..64]).unwrap();
                    let _ = pm.fence(record);
                }),
            ),
        ];
        measure(&mut systems, bytes, rounds)
    };
    let sizes = [4096, 16 << 10, 64 << 10];
    print_table(
        "Data and a record of one line",
        &sizes,
        rounds,
        atomic,
        &["one fence, checked", "two fences"],
    );
    print_small(&pm, &src);
}

/// What is paid per call where all data is in the nearest cache.
fn print_small(pool: &Pool, src: &[u8]) {
    let mut line = [0; 64];
    let best = |call: &mut dyn FnMut()| {
        let round = |_| {
            let begin = Instant::now();
            (0..1000).for_each(|_| call());
            begin.elapsed().as_nanos() as f64 / 1000.0
        };
        median(&mut (0..101).map(round).collect::<Vec<_>>())
    };
    println!("\nIn the nearest cache (ns per call)\n");
    println!("{:>24} {:>8.1}", "load64", best(&mut || _ = black_box(pool.load64(Addr(4096)))));
    println!("{:>24} {:>8.1}", "read of 64 bytes", best(&mut || pool.read(Addr(4096), &mut line).unwrap()));
    for bytes in [48, 64, 128, 256] {
        let ns = best(&mut || _ = black_box(crc32c(black_box(&src[..bytes]), 0)));
        println!("{:>24} {ns:>8.1}", format!("crc32c of {bytes} bytes"));
    }
}
