//! What the DRAM structures cost: block allocator, page index, directory index. Figures in nanoseconds are
//! CPU time of the thread, the median of several rounds; pauses are the longest single call.
//! Run it with `--release`.

use std::hint::black_box;

use lodestone::fs::alloc::{Allocator, Block, Class, Run};
use lodestone::fs::dirindex::{DirIndex, Dirent};
use lodestone::fs::index::PageIndex;
use lodestone::fs::{Ino, Kind};
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 9;

fn main() {
    allocator();
    threads();
    pools();
    pages();
    directories();
}

/// Median nanoseconds per step; `run` does `steps` steps.
fn measure(what: &str, steps: u32, mut run: impl FnMut()) {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = cpu_ns();
            run();
            (cpu_ns() - begin) as f64 / steps as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!("{what:<64} {:>9.1} ns", rounds[ROUNDS / 2]);
}

/// CPU time of this thread.
fn cpu_ns() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// Microseconds of CPU time since `begin`.
fn took(begin: i64) -> f64 {
    (cpu_ns() - begin) as f64 / 1000.0
}

fn report(what: &str, us: f64) {
    println!("{what:<64} {us:>9.1} us");
}

/// A pseudo-random sequence (Knuth's MMIX constants).
fn random(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as u32
}

fn started(blocks: u32) -> Allocator {
    let allocator = Allocator::new(blocks);
    allocator.start();
    allocator
}

fn one(a: &Allocator, near: Option<Block>) -> Run {
    a.alloc(1, Class::Data, near).expect("the pool has room")
}

fn allocator() {
    const STEPS: u32 = 1 << 20;
    let a = started(1 << 22);
    one(&a, None);
    measure("alloc: alloc and free of one block, hot", STEPS, || {
        for _ in 0..STEPS {
            a.free(black_box(one(&a, None)));
        }
    });
    measure("alloc: one block, cold, in sequence, and its free", STEPS, || {
        let blocks: Vec<Run> = (0..STEPS).map(|_| one(&a, Some(Block(0)))).collect();
        blocks.into_iter().for_each(|run| a.free(run));
    });
    measure("alloc: one block after the last (near), and its free", STEPS, || {
        let first = a.alloc(512, Class::Data, None).expect("the pool has room");
        let mut end = first.end();
        for _ in 0..STEPS {
            end = one(&a, Some(end)).end();
        }
        a.free(Run::new(first.start, first.count));
        a.free(Run::new(first.end(), STEPS));
    });
    measure("alloc: free_deferred of one block, and its release", STEPS, || {
        for step in 0..STEPS {
            a.free_deferred(one(&a, None), step as u64 / 64);
            if step % 64 == 63 {
                a.release(step as u64 / 64);
            }
        }
        a.release(u64::MAX);
    });
    measure("alloc: 256 blocks (1 MiB), and their free", 1 << 14, || {
        for _ in 0..1 << 14 {
            a.free(black_box(a.alloc(256, Class::Data, None).expect("the pool has room")));
        }
    });
    measure("alloc: a mini, and its free", STEPS, || {
        for _ in 0..STEPS {
            a.free_mini(black_box(a.alloc_mini(Class::Metadata).expect("the pool has room")));
        }
    });
    a.check_state();
}

/// CPU time of a pair while as many threads do the same: more than alone is contention.
fn threads() {
    const STEPS: u32 = 1 << 22;
    let a = started(1 << 20);
    for count in [1, 2, 4] {
        let pairs = || {
            let begin = cpu_ns();
            (0..STEPS).for_each(|_| a.free(black_box(one(&a, None))));
            (cpu_ns() - begin) as f64 / STEPS as f64
        };
        let mut rounds: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                std::thread::scope(|s| {
                    let threads: Vec<_> = (0..count).map(|_| s.spawn(pairs)).collect();
                    let each = threads.into_iter().map(|thread| thread.join().expect("no panic"));
                    each.sum::<f64>() / count as f64
                })
            })
            .collect();
        rounds.sort_by(f64::total_cmp);
        println!("{:<64} {:>9.1} ns", format!("alloc: the same, {count} threads"), rounds[ROUNDS / 2]);
    }
    a.check_state();
}

fn pools() {
    let begin = cpu_ns();
    let a = started(1 << 28);
    report("alloc: empty pool of 1 TiB", took(begin));
    let begin = cpu_ns();
    black_box(started(1 << 14));
    report("alloc: empty pool of 64 MiB", took(begin));
    let begin = cpu_ns();
    a.alloc_all(a.available() as u32, Class::Data, &mut lodestone::fs::alloc::Runs::new())
        .expect("available");
    report("alloc: all of it", took(begin));
    let mut state = 3;
    for _ in 0..1000 {
        a.free(Run::new(Block(random(&mut state) % (1 << 27) * 2), 1));
    }
    // Forget the hints: another thread has none.
    let each = std::thread::scope(|s| {
        let drain = || {
            let begin = cpu_ns();
            for _ in 0..900 {
                one(&a, None);
            }
            took(begin) / 900.0
        };
        s.spawn(drain).join().expect("no panic")
    });
    report("alloc: a block of a full pool with 1000 scattered ones", each);
    let begin = cpu_ns();
    assert!(a.alloc(1, Class::Data, None).is_some());
    let mut runs = Vec::new();
    a.for_each_free_run(true, &mut |run| runs.push(run));
    report("alloc: for_each_free_run of a full 1 TiB pool", took(begin));
    let begin = cpu_ns();
    let b = Allocator::from_free_runs(1 << 28, runs.into_iter()).expect("ascending");
    b.start();
    report("alloc: from_free_runs of a full 1 TiB pool", took(begin));
}

fn pages() {
    const PAGES: u32 = 1 << 18;
    let mut state = 9;
    let mut index = PageIndex::new();
    for i in 0..4 * PAGES {
        index.set_run(random(&mut state) % PAGES, 1, Block(1 + i), false, &mut |_, _| {});
    }
    println!("index: 1 GiB, random blocks: {} bytes", index.heap_bytes());
    let mut block = 0;
    measure("index: get and set of a random page of it", PAGES, || {
        for _ in 0..PAGES {
            let page = random(&mut state) % PAGES;
            black_box(index.get(page));
            block = block % (1 << 24) + 1;
            index.set_run(page, 1, Block(block), false, &mut |run, _| {
                black_box(run);
            });
        }
    });
    measure("index: get of a random page of it", PAGES, || {
        for _ in 0..PAGES {
            black_box(index.get(random(&mut state) % PAGES));
        }
    });
    measure("index: run_at of 256 pages of it", PAGES / 256, || {
        let mut page = 0;
        while page < PAGES {
            page += black_box(index.run_at(page, 256)).1;
        }
    });
    let mut index = PageIndex::new();
    for i in 0..PAGES / 4096 {
        index.set_run(i * 4096, 4096, Block(1 + i * 5000), false, &mut |_, _| {});
    }
    println!("index: 1 GiB in 16 MiB extents: {} bytes", index.heap_bytes());
    measure("index: append of a page to a growing file", PAGES, || {
        let mut index = PageIndex::new();
        for page in 0..PAGES {
            index.set_run(page, 1, Block(page + 1), false, &mut |_, _| {});
        }
        black_box(index.mapped());
    });
}

fn directories() {
    for count in [1_000u32, 100_000, 1_000_000] {
        directory(count);
    }
}

fn directory(count: u32) {
    let names: Vec<Vec<u8>> = (0..count).map(|i| format!("file-{i:07}.dat").into_bytes()).collect();
    let insert = |index: &mut DirIndex, name: &[u8]| {
        let cookie = index.next_cookie().expect("few entries");
        let ino = Ino(cookie);
        let entry = Dirent { ino, generation: 1, kind: Kind::File, cookie, seq: cookie, lines: 1 };
        index.insert(name, entry).expect("a new name");
    };
    let mut index = DirIndex::new();
    measure(&format!("dir: insert, {count} entries"), count, || {
        index = DirIndex::new();
        names.iter().for_each(|name| insert(&mut index, name));
    });
    let bytes = index.heap_bytes() as f64 / count as f64;
    println!("dir: {bytes:.1} bytes per entry, the name has {}", names[0].len());
    let mut state = 5;
    measure(&format!("dir: lookup, {count} entries, random"), count, || {
        for _ in 0..count {
            black_box(index.lookup(&names[(random(&mut state) % count) as usize]));
        }
    });
    measure(&format!("dir: lookup of what is not there, {count} entries"), count, || {
        let mut name = *b"file-0000000.tmp";
        for _ in 0..count {
            let digits = random(&mut state) % 10_000_000;
            for (at, byte) in name[5..12].iter_mut().enumerate() {
                *byte = b'0' + (digits / 10u32.pow(at as u32) % 10) as u8;
            }
            black_box(index.lookup(&name));
        }
    });
    measure(&format!("dir: listing, per entry of {count}"), count, || {
        black_box(index.iter().map(|found| found.name.len()).sum::<usize>());
    });
    let mut order: Vec<usize> = (0..names.len()).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random(&mut state) as usize % (at + 1));
    }
    measure(&format!("dir: insert in sequence and remove at random, {count} entries"), count, || {
        let mut index = DirIndex::new();
        names.iter().for_each(|name| insert(&mut index, name));
        for &at in &order {
            black_box(index.remove(&names[at]));
        }
    });
    pauses(count, &names, &order, insert);
}

/// The longest of all calls, and the third-longest: the first may be the machine's.
fn pauses(count: u32, names: &[Vec<u8>], order: &[usize], insert: impl Fn(&mut DirIndex, &[u8])) {
    let mut index = DirIndex::new();
    let timed = |call: &mut dyn FnMut()| {
        let begin = cpu_ns();
        call();
        took(begin)
    };
    let inserts: Vec<f64> = names.iter().map(|name| timed(&mut || insert(&mut index, name))).collect();
    let mut remove = |at: &usize| {
        black_box(index.remove(&names[*at]));
    };
    let removes: Vec<f64> = order.iter().map(|at| timed(&mut || remove(at))).collect();
    for (what, mut times) in [("insert", inserts), ("remove", removes)] {
        times.sort_by(f64::total_cmp);
        let [.., third, _, longest] = times[..] else { return };
        report(&format!("dir: longest {what} of {count}"), longest);
        report(&format!("dir: third-longest {what} of {count}"), third);
    }
}
