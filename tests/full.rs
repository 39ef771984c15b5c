//! A full pool can be emptied, whatever was done to it before, in whatever order, with closes and crashes of the process in
//! between. Random histories: a seed names one, and `LODE_FULL_SEEDS` says how many.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, DataMode, Fs, MkfsOptions, OpenOptions, RENAME_EXCHANGE};
use lodestone::media::{Domain, Pool, PoolOptions};

/// Names in use at a time, at most; and operations in a history.
const NAMES_MAX: usize = 4000;
const OPS: usize = 6000;
/// Threads that remove at once.
const REMOVERS: usize = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    File,
    Dir,
    Symlink,
}

/// What is done to a pool, and the names that are in it.
struct History {
    random: Random,
    files: Files<Pool>,
    names: Vec<(String, Kind)>,
    made: usize,
    full: usize,
}

impl History {
    fn begin(seed: u64) -> History {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let domain = [Domain::Memory, Domain::PageCache][random.below(2)];
        let data = [DataMode::Cow, DataMode::Cow, DataMode::InPlace][random.below(3)];
        let bytes = [2 << 20, 4 << 20, 16 << 20][random.below(3)];
        if std::env::var_os("LODE_FULL_SEED").is_some() {
            eprintln!("{domain}, {data:?}, {bytes} bytes");
        }
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let pool = Pool::memfd(bytes, &options).unwrap();
        let pool = Fs::mkfs(pool, &MkfsOptions { data, ..MkfsOptions::default() }).unwrap();
        let files = Files::new(Fs::open(pool, &OpenOptions::default()).unwrap(), Cred::root(), 0);
        History { random, files, names: Vec::new(), made: 0, full: 0 }
    }

    /// A path that is not in use, below any directory.
    fn fresh(&mut self) -> String {
        let dirs: Vec<usize> = (0..self.names.len()).filter(|&i| self.names[i].1 == Kind::Dir).collect();
        let dir = match self.random.below(dirs.len() + 1) {
            0 => String::new(),
            n => self.names[dirs[n - 1]].0.clone(),
        };
        self.made += 1;
        let long =
            if self.random.below(20) == 0 { "x".repeat(self.random.below(200)) } else { String::new() };
        format!("{dir}/{}{long}", self.made)
    }

    fn any(&mut self, kind: impl Fn(Kind) -> bool) -> Option<usize> {
        let start = self.random.below(self.names.len().max(1));
        (start..self.names.len()).chain(0..start).find(|&i| kind(self.names[i].1))
    }

    fn size(&mut self) -> usize {
        match self.random.below(4) {
            0 => self.random.below(100),
            1 => self.random.below(5000),
            2 => 4096 * (1 + self.random.below(8)),
            _ => self.random.below(200_000),
        }
    }

    /// One operation; ENOSPC, and what a random choice makes impossible, is no failure.
    fn step(&mut self) {
        let grows = self.names.len() < NAMES_MAX;
        let done = match self.random.below(20) {
            0..=3 if grows => {
                let path = self.fresh();
                let made = self.files.open(path.as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644);
                made.and_then(|fd| {
                    self.names.push((path, Kind::File));
                    let bytes = vec![self.made as u8; self.size()];
                    let written =
                        if bytes.len().is_multiple_of(3) { Ok(0) } else { self.files.write(fd, &bytes) };
                    self.files.close(fd).unwrap();
                    written.map(drop)
                })
            }
            4 if grows => {
                let path = self.fresh();
                self.files.mkdir(path.as_bytes(), 0o755).map(|()| self.names.push((path, Kind::Dir)))
            }
            5 if grows => {
                let (path, target) = (self.fresh(), "t".repeat(1 + self.random.below(300)));
                let made = self.files.symlink(target.as_bytes(), path.as_bytes());
                made.map(|()| self.names.push((path, Kind::Symlink)))
            }
            6 | 7 if grows => {
                let Some(i) = self.any(|kind| kind != Kind::Dir) else { return };
                let ((from, kind), path) = (self.names[i].clone(), self.fresh());
                let made = self.files.link(from.as_bytes(), path.as_bytes());
                made.map(|()| self.names.push((path, kind)))
            }
            8 | 9 => {
                let Some(i) = self.any(|kind| kind != Kind::Dir) else { return };
                let path = self.fresh();
                let moved = self.files.rename(self.names[i].0.as_bytes(), path.as_bytes(), 0);
                moved.map(|()| self.names[i].0 = path)
            }
            10 => {
                let both = (self.any(|kind| kind == Kind::File), self.any(|kind| kind == Kind::File));
                let (Some(i), Some(j)) = both else { return };
                let [from, to] = [i, j].map(|i| self.names[i].0.clone());
                let exchanges = self.random.below(2) == 0;
                let flags = if exchanges { RENAME_EXCHANGE } else { 0 };
                let same = || self.files.stat(from.as_bytes()).unwrap().ino;
                let was_same = i == j || same() == self.files.stat(to.as_bytes()).unwrap().ino;
                let moved = self.files.rename(from.as_bytes(), to.as_bytes(), flags);
                if moved.is_ok() && !exchanges && !was_same {
                    self.names.swap_remove(i);
                }
                moved
            }
            11 | 12 => {
                let Some(i) = self.any(|kind| kind == Kind::File) else { return };
                let fd = self.files.open(self.names[i].0.as_bytes(), libc::O_WRONLY, 0).unwrap();
                let (bytes, at) = (vec![7; self.size()], self.size());
                let written = self.files.pwrite(fd, &bytes, at as i64);
                self.files.close(fd).unwrap();
                written.map(drop)
            }
            13 => {
                let Some(i) = self.any(|kind| kind == Kind::File) else { return };
                let size = self.size();
                self.files.truncate(self.names[i].0.as_bytes(), size as i64)
            }
            14 | 15 => {
                let Some(i) = self.any(|kind| kind != Kind::Symlink) else { return };
                let mode = 0o600 + self.random.below(64) as u32;
                self.files.chmod(self.names[i].0.as_bytes(), mode)
            }
            16 => {
                let Some(i) = self.any(|kind| kind != Kind::Symlink) else { return };
                let (name, value) =
                    (format!("user.{}", self.random.below(3)), vec![1; self.random.below(3000)]);
                self.files.setxattr(self.names[i].0.as_bytes(), true, name.as_bytes(), &value, 0)
            }
            17 => {
                // What is open and has no name goes with its descriptor.
                let Some(i) = self.any(|kind| kind == Kind::File) else { return };
                let path = self.names.swap_remove(i).0;
                let fd = self.files.open(path.as_bytes(), libc::O_RDWR, 0).unwrap();
                let removed = self.files.unlink(path.as_bytes());
                let bytes = vec![9; self.size()];
                let _ = self.files.write(fd, &bytes);
                self.files.close(fd).unwrap();
                removed
                    .unwrap_or_else(|e| panic!("unlink {path}, open: {e}; {:?}", self.files.statvfs(b"/")));
                Ok(())
            }
            18 => {
                // An access time.
                for _ in 0..50 {
                    let Some(i) = self.any(|kind| kind == Kind::File) else { return };
                    let fd = self.files.open(self.names[i].0.as_bytes(), libc::O_RDONLY, 0).unwrap();
                    self.files.read(fd, &mut [0; 1]).unwrap();
                    self.files.close(fd).unwrap();
                }
                Ok(())
            }
            _ => {
                let Some(i) = self.any(|kind| kind != Kind::Dir) else { return };
                let path = self.names.swap_remove(i).0;
                self.files
                    .unlink(path.as_bytes())
                    .unwrap_or_else(|e| panic!("unlink {path}: {e}; {:?}", self.files.statvfs(b"/")));
                Ok(())
            }
        };
        match done.map_err(|e| e.errno()) {
            Ok(()) => {}
            Err(libc::ENOSPC) => self.full += 1,
            Err(libc::ENAMETOOLONG | libc::EFBIG | libc::EXDEV) => {}
            Err(errno) => panic!("errno {errno}"),
        }
    }

    /// The pool is closed, or its process killed, and it is opened again.
    fn reopen(self, closes: bool) -> History {
        let fs: Arc<Fs<Pool>> = self.files.fs().clone();
        drop(self.files);
        if closes {
            fs.close().unwrap();
        }
        let pool = fs.abandon().expect("nobody else uses it");
        let fs = Fs::open(pool, &OpenOptions::default()).unwrap();
        History { files: Files::new(fs, Cred::root(), 0), ..self }
    }

    /// Removes all, in any order in which a directory comes after what is in it.
    fn empty(&mut self) {
        let mut inside = std::collections::HashMap::<String, usize>::new();
        let parent = |path: &str| path.rsplit_once('/').unwrap().0.to_owned();
        for (path, _) in &self.names {
            *inside.entry(parent(path)).or_default() += 1;
        }
        let count = self.names.len();
        while !self.names.is_empty() {
            let start = self.random.below(self.names.len());
            let is_leaf = |(path, _): &(String, Kind)| inside.get(path).is_none_or(|n| *n == 0);
            let mut order = (start..self.names.len()).chain(0..start);
            let i = order.find(|&i| is_leaf(&self.names[i])).expect("some are empty");
            let (path, kind) = self.names.swap_remove(i);
            let gone = match kind {
                Kind::Dir => self.files.rmdir(path.as_bytes()),
                _ => self.files.unlink(path.as_bytes()),
            };
            let left = self.names.len();
            gone.unwrap_or_else(|e| panic!("{path}, with {left} of {count} left: {e}"));
            *inside.get_mut(&parent(&path)).unwrap() -= 1;
        }
    }
}

fn run(seed: u64) -> usize {
    let mut history = History::begin(seed);
    for part in 0..3 {
        // At first the pool fills.
        (0..OPS).for_each(|_| history.step());
        let full = history.files.open(format!("/filler{part}").as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0);
        if let Ok(fd) = full {
            history.names.push((format!("/filler{part}"), Kind::File));
            for bytes in [64 << 10, 4096, 1] {
                while history.files.write(fd, &vec![1; bytes]).is_ok() {}
            }
            history.files.close(fd).unwrap();
        }
        (0..OPS / 4).for_each(|_| history.step());
        history = match history.random.below(4) {
            0 => history,
            1 => history.reopen(false),
            _ => history.reopen(true),
        };
    }
    history.empty();
    let report = history.files.fs().check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    let full = history.full;
    // What was held back is there again.
    let history = history.reopen(true);
    assert!(history.files.fs().open_report().was_clean);
    let stat = history.files.statvfs(b"/").unwrap();
    let slots = stat.inodes * 64 / stat.block_bytes as u64;
    assert!((stat.blocks_free + slots) * 100 > stat.blocks * 95, "{stat:?}");
    full
}

/// Several remove what a history left, while another goes on making, moving and removing names among those.
fn run_at_once(seed: u64) -> usize {
    let mut history = History::begin(seed);
    (0..OPS).for_each(|_| history.step());
    let (dirs, others): (Vec<_>, Vec<_>) = history.names.drain(..).partition(|(_, kind)| *kind == Kind::Dir);
    let (files, removers) = (&history.files, AtomicUsize::new(REMOVERS));
    let left = std::thread::scope(|s| {
        for part in others.chunks(others.len().div_ceil(REMOVERS)) {
            let removers = &removers;
            s.spawn(move || {
                struct Done<'a>(&'a AtomicUsize);

                impl Drop for Done<'_> {
                    fn drop(&mut self) {
                        self.0.fetch_sub(1, Ordering::Release);
                    }
                }

                let _done = Done(removers);
                for (path, _) in part {
                    files.unlink(path.as_bytes()).unwrap_or_else(|e| panic!("{path}: {e}"));
                }
            });
        }
        let disturb = || disturb(files, &dirs, &removers, Random(seed | 1));
        s.spawn(disturb).join().expect("it goes on to the end")
    });
    history.names = dirs;
    history.names.extend(left.into_iter().map(|path| (path, Kind::File)));
    history.empty();
    let report = history.files.fs().check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    history.full
}

/// Until the removers are through; the names that it leaves.
fn disturb(
    files: &Files<Pool>,
    dirs: &[(String, Kind)],
    removers: &AtomicUsize,
    mut random: Random,
) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut made = 0;
    while removers.load(Ordering::Acquire) > 0 {
        made += 1;
        let path = match random.below(dirs.len() + 1) {
            0 => format!("/d{made}"),
            n => format!("{}/d{made}", dirs[n - 1].0),
        };
        let any = random.below(names.len().max(1));
        let done = match random.below(4) {
            0 | 1 => files
                .open(path.as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644)
                .and_then(|fd| files.close(fd))
                .map(|()| names.push(path)),
            2 if !names.is_empty() => {
                files.rename(names[any].as_bytes(), path.as_bytes(), 0).map(|()| names[any] = path)
            }
            _ if !names.is_empty() => {
                let path = names.swap_remove(any);
                files.unlink(path.as_bytes()).unwrap_or_else(|e| panic!("{path}: {e}"));
                Ok(())
            }
            _ => Ok(()),
        };
        assert!(done.as_ref().map_or_else(|e| e.errno() == libc::ENOSPC, |()| true), "{done:?}");
    }
    names
}

/// As many as are asked for.
fn with_seeds(run: impl Fn(u64) -> usize + std::panic::RefUnwindSafe) {
    let seeds = std::env::var("LODE_FULL_SEEDS").map_or(12, |n| n.parse().expect("a number"));
    let first = std::env::var("LODE_FULL_SEED").map_or(1, |n| n.parse().expect("a number"));
    let mut full = 0;
    for seed in first..first + seeds {
        let outcome = std::panic::catch_unwind(|| run(seed));
        full += outcome.unwrap_or_else(|_| panic!("LODE_FULL_SEED={seed} LODE_FULL_SEEDS=1 shows it"));
    }
    assert!(full > 100 * seeds as usize, "the pools were full: {full}");
}

#[test]
fn it_can_be_emptied_after_any_history() {
    with_seeds(run);
}

#[test]
fn it_can_be_emptied_by_several_at_once() {
    with_seeds(run_at_once);
}

/// Pages of the file that was reserved.
const RESERVED_PAGES: usize = 1024;
const PAGE: usize = 4096;

/// Writes until the pool is full, in ever smaller pieces.
fn fill(files: &Files<Pool>) {
    let fd = files.open(b"/big", libc::O_CREAT | libc::O_WRONLY, 0o644).unwrap();
    for bytes in [1 << 20, PAGE, 1] {
        while files.write(fd, &vec![0xee; bytes]).is_ok() {}
    }
    let errno = files.write(fd, &[0xee; PAGE]).map_err(|e| e.errno());
    assert_eq!(errno, Err(libc::ENOSPC));
    for n in 0.. {
        let made = files.open(format!("/small{n}").as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644);
        let Ok(fd) = made else { break };
        files.close(fd).unwrap();
    }
    files.close(fd).unwrap();
}

/// One block after the other, in a random order, or in two halves of each; with `data=inplace` on persistent memory again
/// and again, and over both kinds at once.
#[test]
fn what_was_reserved_is_written_on_a_full_pool() {
    for (domain, data, order) in [Domain::Memory, Domain::PageCache]
        .into_iter()
        .flat_map(|domain| [DataMode::Cow, DataMode::InPlace].map(|data| (domain, data)))
        .flat_map(|(domain, data)| (0..3).map(move |order| (domain, data, order)))
    {
        let what = format!("{domain}, {data:?}, order {order}");
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let pool = Pool::memfd(16 << 20, &options).unwrap();
        let pool = Fs::mkfs(pool, &MkfsOptions { data, ..MkfsOptions::default() }).unwrap();
        let files = Files::new(Fs::open(pool, &OpenOptions::default()).unwrap(), Cred::root(), 0);
        let fd = files.open(b"/reserved", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
        files.fallocate(fd, 0, 0, (RESERVED_PAGES * PAGE) as i64).unwrap();
        fill(&files);

        let mut random = Random(77);
        let mut pages: Vec<usize> = (0..RESERVED_PAGES).collect();
        if order == 1 {
            (1..pages.len()).rev().for_each(|i| pages.swap(i, random.below(i + 1)));
        }
        let mut expected = vec![0; RESERVED_PAGES * PAGE];
        let mut write = |at: usize, len: usize, byte: usize| {
            expected[at..at + len].fill(byte as u8);
            let written = files.pwrite(fd, &vec![byte as u8; len], at as i64);
            let written = written.unwrap_or_else(|e| panic!("{what}: {len} bytes at {at}: {e}"));
            assert_eq!(written, len, "{what}: {len} bytes at {at}");
        };
        let in_place = data == DataMode::InPlace && domain == Domain::Memory;
        for (n, &page) in pages.iter().enumerate() {
            if in_place && n == RESERVED_PAGES / 2 {
                // Some of these are written, and some are not.
                write(0, RESERVED_PAGES / 2 * PAGE + 10, 3);
                write(PAGE + 10, (RESERVED_PAGES - 2) * PAGE, 4);
            }
            let halves = if order == 2 { 2 } else { 1 };
            // A half of a block that is written is a block anew, but for where that is overwritten in place.
            for half in 0..if in_place { halves } else { 1 } {
                write(page * PAGE + half * PAGE / halves, PAGE / halves, page % 250 + half);
            }
        }
        if in_place {
            for round in 0..20 {
                pages.iter().for_each(|&page| write(page * PAGE + round, PAGE - 20, page % 200 + round));
            }
        }

        // Where a block is wanted nothing is written, however much of it would need none.
        let bytes = vec![0x77; 8 * PAGE];
        let refused = files.pwrite(fd, &bytes, ((RESERVED_PAGES - 4) * PAGE) as i64);
        assert_eq!(refused.map_err(|e| e.errno()), Err(libc::ENOSPC), "{what}");

        let mut history = History { random, files, names: Vec::new(), made: 0, full: 0 };
        for closes in [false, true] {
            history = history.reopen(closes);
            let files = &history.files;
            let fd = files.open(b"/reserved", libc::O_RDONLY, 0).unwrap();
            let mut found = vec![1; expected.len()];
            assert_eq!(files.pread(fd, &mut found, 0).unwrap(), found.len());
            let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{what}, closed: {closes}");
            files.close(fd).unwrap();
        }
        history.files.unlink(b"/big").unwrap();
        history.files.unlink(b"/reserved").unwrap();
    }
}
