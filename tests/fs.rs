//! The file system as its callers see it: what was acknowledged is there, after a close and after a
//! crash of the process.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lodestone::fs::{
    Attr, Cred, DataMode, Fs, Ino, Kind, MkfsOptions, OpenOptions, RENAME_EXCHANGE, SetAttr, SetTime, Time,
};
use lodestone::media::{Domain, Media, Pool, PoolOptions};

type F = Arc<Fs<Pool>>;

const SIZE: u64 = 64 << 20;

/// Anonymous memory; or a file in the directory that the environment names, on the media below it.
fn pool(bytes: u64, assume: Option<Domain>) -> Pool {
    let Some(dir) = std::env::var_os("LODESTONE_TEST_DIR") else {
        return Pool::memfd(bytes, &PoolOptions { assume, ..PoolOptions::default() }).unwrap();
    };
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let path = PathBuf::from(dir).join(format!("pool{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    let pool = Pool::create(std::slice::from_ref(&path), Some(bytes), &PoolOptions::default()).unwrap();
    assert!(pool.domain().is_persistent_memory(), "{} is in domain {}", path.display(), pool.domain());
    std::fs::remove_file(path).unwrap();
    pool
}

fn fresh() -> F {
    open(Fs::mkfs(pool(SIZE, Some(Domain::Memory)), &MkfsOptions::default()).unwrap())
}

fn open(media: Pool) -> F {
    Fs::open(media, &OpenOptions::default()).unwrap()
}

fn crash(fs: F) -> F {
    let fs = open(fs.abandon().expect("nobody else uses it"));
    assert!(!fs.open_report().was_clean);
    fs
}

fn reopened(fs: F) -> F {
    fs.close().unwrap();
    open(fs.abandon().unwrap())
}

fn close(fs: F) -> F {
    let fs = reopened(fs);
    assert!(fs.open_report().was_clean);
    fs
}

fn root() -> Cred {
    Cred::root()
}

fn make(fs: &F, dir: Ino, name: &str) -> Ino {
    let (attr, created) = fs.create(&root(), dir, name.as_bytes(), 0o644, 0, libc::O_EXCL).unwrap();
    assert!(created);
    fs.release(attr.ino);
    fs.forget(attr.ino, 1);
    attr.ino
}

fn mkdir(fs: &F, dir: Ino, name: &str) -> Ino {
    let attr = fs.mkdir(&root(), dir, name.as_bytes(), 0o755, 0).unwrap();
    fs.forget(attr.ino, 1);
    attr.ino
}

fn find(fs: &F, dir: Ino, name: &str) -> Option<Attr> {
    let attr = fs.lookup(&root(), dir, name.as_bytes()).ok()?;
    fs.forget(attr.ino, 1);
    Some(attr)
}

fn content(fs: &F, ino: Ino) -> Vec<u8> {
    let size = fs.getattr(ino).unwrap().size as usize;
    let mut bytes = vec![0xaa; size + 10];
    let n = fs.read(ino, 0, &mut bytes).unwrap();
    assert_eq!(n, size);
    bytes.truncate(n);
    bytes
}

fn names(fs: &F, dir: Ino) -> Vec<String> {
    let mut all = Vec::new();
    fs.readdir(dir, 0, &mut |e| {
        all.push(String::from_utf8_lossy(e.name).into_owned());
        true
    })
    .unwrap();
    all.retain(|n| n != "." && n != "..");
    all.sort();
    all
}

/// Bytes that differ from place to place.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

#[test]
fn a_truncate_that_grows_keeps_what_was_reserved() {
    for at_end in [close, crash] {
        let fs = fresh();
        let file = make(&fs, Ino::ROOT, "f");
        fs.write(&root(), file, 0, &pattern(1, 5000), false).unwrap();
        fs.fallocate(&root(), file, libc::FALLOC_FL_KEEP_SIZE, 0, 1 << 20).unwrap();
        let reserved = fs.getattr(file).unwrap().blocks;
        assert_eq!(reserved, (1 << 20) / 512);
        let resize = |fs: &F, size| {
            fs.setattr(&root(), file, &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap().blocks
        };
        assert_eq!(resize(&fs, 100_000), reserved);
        assert_eq!(resize(&fs, 300_001), reserved);
        let fs = at_end(fs);
        assert_eq!(fs.getattr(file).unwrap().blocks, reserved);
        let mut wanted = pattern(1, 5000);
        wanted.resize(300_001, 0);
        assert_eq!(content(&fs, file), wanted);
        assert!(fs.check().unwrap().findings.iter().all(|f| f.ino != Some(file.0)));
        // One that leaves the size, or makes it smaller, gives it back.
        let held = 300_001_u64.div_ceil(4096) * 8;
        assert_eq!(resize(&fs, 300_001), held);
        assert_eq!(resize(&fs, 5000), 16);
        assert_eq!(content(&at_end(fs), file), pattern(1, 5000));
    }
}

#[test]
fn what_is_created_as_the_parent_of_a_directory_that_is_gone_is_refused() {
    let fs = fresh();
    let dir = fs.mkdir(&root(), Ino::ROOT, b"d", 0o755, 0).unwrap().ino;
    fs.rmdir(&root(), Ino::ROOT, b"d").unwrap();
    assert_eq!(fs.create(&root(), dir, b"..", 0o644, 0, 0).unwrap_err().errno(), libc::ENOENT);
    fs.forget(dir, 1);
}

#[test]
fn files_survive_a_close_and_a_crash() {
    let mut fs = fresh();
    let dir = mkdir(&fs, Ino::ROOT, "d");
    let sizes = [0, 1, 100, 4095, 4096, 4097, 70_000, 1 << 20];
    for (i, &size) in sizes.iter().enumerate() {
        let ino = make(&fs, dir, &format!("f{i}"));
        fs.write(&root(), ino, 0, &pattern(i as u64, size), false).unwrap();
    }
    for again in [close, crash, close, crash, crash] {
        fs = again(fs);
        for (i, &size) in sizes.iter().enumerate() {
            let attr = find(&fs, dir, &format!("f{i}")).unwrap();
            assert_eq!((attr.size, attr.nlink, attr.kind()), (size as u64, 1, Kind::File));
            assert_eq!(content(&fs, attr.ino), pattern(i as u64, size));
        }
        assert_eq!(fs.getattr(Ino::ROOT).unwrap().nlink, 3);
        let more = make(&fs, dir, "more");
        fs.write(&root(), more, 4090, b"over the edge", false).unwrap();
        fs.unlink(&root(), dir, b"more").unwrap();
    }
}

#[test]
fn random_writes_read_back_whatever_the_offset() {
    let mut fs = fresh();
    let ino = make(&fs, Ino::ROOT, "f");
    let mut model: Vec<u8> = Vec::new();
    let mut rng = 12345u64;
    let mut next = |n: u64| {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        rng % n
    };
    for round in 0..3000u64 {
        let at = next(300_000) as usize;
        let len = match next(4) {
            0 => next(100) as usize,
            1 => next(2000) as usize,
            2 => next(9000) as usize,
            _ => next(60_000) as usize,
        };
        match next(10) {
            0 => {
                let set = SetAttr { size: Some(at as u64), ..SetAttr::default() };
                fs.setattr(&root(), ino, &set).unwrap();
                model.resize(at, 0);
            }
            1 => {
                let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                fs.fallocate(&root(), ino, punch, at as u64, len as u64 + 1).unwrap();
                let end = model.len().min(at + len + 1);
                if at < end {
                    model[at..end].fill(0);
                }
            }
            2 => {
                fs.fallocate(&root(), ino, 0, at as u64, len as u64 + 1).unwrap();
                model.resize(model.len().max(at + len + 1), 0);
            }
            3 => {
                fs.fallocate(&root(), ino, libc::FALLOC_FL_ZERO_RANGE, at as u64, len as u64 + 1).unwrap();
                model.resize(model.len().max(at + len + 1), 0);
                model[at..at + len + 1].fill(0);
            }
            _ => {
                let bytes = pattern(round, len);
                let at = if next(4) == 0 { model.len() } else { at };
                assert_eq!(fs.write(&root(), ino, at as u64, &bytes, false).unwrap(), (at + len) as u64);
                if len > 0 {
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&bytes);
                }
            }
        }
        if round % 500 == 499 {
            fs = if round % 1000 == 999 { crash(fs) } else { close(fs) };
        }
        if round % 10 == 0 {
            assert!(content(&fs, ino) == model, "round {round}");
        }
    }
    assert!(content(&fs, ino) == model);
    let free = fs.statfs().blocks_free;
    fs.unlink(&root(), Ino::ROOT, b"f").unwrap();
    assert!(fs.statfs().blocks_free > free);
}

#[test]
fn renames_of_every_form() {
    let mut fs = fresh();
    let (a, b) = (mkdir(&fs, Ino::ROOT, "a"), mkdir(&fs, Ino::ROOT, "b"));
    let (x, y) = (make(&fs, a, "x"), make(&fs, b, "y"));
    let cred = root();
    fs.rename(&cred, a, b"x", a, b"x2", 0).unwrap();
    fs.rename(&cred, a, b"x2", b, b"x3", 0).unwrap();
    assert_eq!(names(&fs, b), ["x3", "y"]);
    fs.rename(&cred, b, b"x3", b, b"y", RENAME_EXCHANGE).unwrap();
    assert_eq!((find(&fs, b, "x3").unwrap().ino, find(&fs, b, "y").unwrap().ino), (y, x));
    fs = crash(fs);
    assert_eq!((find(&fs, b, "x3").unwrap().ino, find(&fs, b, "y").unwrap().ino), (y, x));
    let z = make(&fs, a, "z");
    fs.rename(&cred, a, b"z", b, b"y", RENAME_EXCHANGE).unwrap();
    assert_eq!((find(&fs, a, "z").unwrap().ino, find(&fs, b, "y").unwrap().ino), (x, z));
    fs.rename(&cred, a, b"z", b, b"y", 0).unwrap();
    assert!(names(&fs, a).is_empty());
    // A directory moves; its parent and the link counts follow.
    let c = mkdir(&fs, a, "c");
    fs.rename(&cred, a, b"c", b, b"c", 0).unwrap();
    assert_eq!((fs.getattr(a).unwrap().nlink, fs.getattr(b).unwrap().nlink), (2, 3));
    let up = fs.lookup(&cred, c, b"..").unwrap().ino;
    fs.forget(up, 1);
    assert_eq!(up, b);
    assert_eq!(fs.rename(&cred, Ino::ROOT, b"b", c, b"b", 0).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(fs.rename(&cred, b, b"c", Ino::ROOT, b"b", 0).unwrap_err().errno(), libc::ENOTEMPTY);
    for again in [crash, close] {
        fs = again(fs);
        assert_eq!(names(&fs, b), ["c", "x3", "y"]);
        assert_eq!(find(&fs, b, "y").unwrap().ino, x);
        assert_eq!((fs.getattr(a).unwrap().nlink, fs.getattr(b).unwrap().nlink), (2, 3));
    }
}

/// All names but the dots, some at a time; `meanwhile` sees each of them.
fn listed(fs: &F, dir: Ino, mut meanwhile: impl FnMut(&str)) -> Vec<String> {
    let (mut all, mut cookie) = (Vec::new(), 0);
    loop {
        let from = all.len();
        let mut more = false;
        fs.readdir(dir, cookie, &mut |e| {
            more = all.len() < from + 7;
            if more {
                cookie = e.cookie;
                all.push(String::from_utf8_lossy(e.name).into_owned());
            }
            more
        })
        .unwrap();
        all[from..].iter().filter(|name| !name.starts_with('.')).for_each(|name| meanwhile(name));
        if all.len() == from {
            all.retain(|n| n != "." && n != "..");
            return all;
        }
    }
}

#[test]
fn a_listing_comes_to_its_end_and_meets_once_what_stays() {
    let mut fs = fresh();
    let cred = root();
    let dir = mkdir(&fs, Ino::ROOT, "d");
    let all: Vec<String> = (0..300).map(|n| format!("f{n:03}")).collect();
    all.iter().for_each(|name| _ = make(&fs, dir, name));
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    for again in [close, crash] {
        let renamed =
            |from: &str, to: &str| fs.rename(&cred, dir, from.as_bytes(), dir, to.as_bytes(), 0).unwrap();
        // Names that go and come back, and new ones in the place of old ones.
        let seen = listed(&fs, dir, |name| {
            renamed(name, "TEMP");
            renamed("TEMP", name);
        });
        assert_eq!(sorted(seen), all);
        let seen = listed(&fs, dir, |name| {
            make(&fs, dir, "new");
            renamed("new", name);
        });
        assert_eq!(sorted(seen), all);
        // Each makes another one; none of these is met.
        let seen = listed(&fs, dir, |name| _ = make(&fs, dir, &format!("{name}.bak")));
        assert_eq!(sorted(seen), all);
        all.iter().for_each(|name| fs.unlink(&cred, dir, format!("{name}.bak").as_bytes()).unwrap());
        // What is renamed, replaced or exchanged before a listing is there keeps its place in it.
        let mut first = true;
        let seen = listed(&fs, dir, |_| {
            if std::mem::take(&mut first) {
                renamed("f000", "g000");
                make(&fs, dir, "new");
                renamed("new", "f001");
                fs.rename(&cred, dir, b"f002", dir, b"f003", RENAME_EXCHANGE).unwrap();
            }
        });
        assert_eq!(sorted(seen), sorted(all.iter().map(|n| n.replace("f000", "g000")).collect()));
        renamed("g000", "f000");
        let places = |fs: &F| {
            let mut places = Vec::new();
            fs.readdir(dir, 0, &mut |e| {
                places.push((e.cookie, e.ino, e.name.to_vec()));
                true
            })
            .unwrap();
            places.retain(|(_, _, name)| name != b"..");
            places
        };
        let before = places(&fs);
        fs = again(fs);
        assert_eq!(places(&fs), before, "the order is of the media");
    }
}

#[test]
fn many_files_come_and_go_and_leave_nothing() {
    let mut fs = fresh();
    let free = fs.statfs().blocks_free;
    let dir = mkdir(&fs, Ino::ROOT, "many");
    for round in 0..3 {
        for i in 0..5000 {
            let ino = make(&fs, dir, &format!("file number {i} of round {round}"));
            if i % 7 == 0 {
                fs.write(&root(), ino, 0, &pattern(i, 3000), false).unwrap();
            }
        }
        fs = if round == 1 { close(fs) } else { crash(fs) };
        assert_eq!(names(&fs, dir).len(), 5000);
        for i in 0..5000 {
            fs.unlink(&root(), dir, format!("file number {i} of round {round}").as_bytes()).unwrap();
        }
        assert!(names(&fs, dir).is_empty());
    }
    fs.rmdir(&root(), Ino::ROOT, b"many").unwrap();
    fs = crash(fs);
    // The inode table keeps its slots; everything else comes back.
    let slots = (fs.statfs().inodes - fs.statfs().blocks_free * 16) / 16;
    assert!(fs.statfs().blocks_free + slots >= free, "{} + {slots} < {free}", fs.statfs().blocks_free);
}

#[test]
fn a_directory_that_was_emptied_drops_its_log() {
    const COUNT: u32 = 16_000;
    let fs = fresh();
    let dir = mkdir(&fs, Ino::ROOT, "d");
    let name =
        |n: u32| format!("a file with so long a name that its record takes more than one line, number {n}");
    let moved = |n: u32| format!("moved {n}");
    (0..COUNT).for_each(|n| _ = make(&fs, dir, &name(n)));
    for n in (0..COUNT).map(|n| n * 5003 % COUNT) {
        fs.rename(&root(), dir, name(n).as_bytes(), dir, moved(n).as_bytes(), 0).unwrap();
    }
    // One line each, which leave two dead: removals outrun the cleaner.
    (0..COUNT).for_each(|n| fs.unlink(&root(), dir, moved(n * 7919 % COUNT).as_bytes()).unwrap());
    let free = fs.statfs().blocks_free;
    (0..100).for_each(|n| _ = make(&fs, dir, &name(n)));
    let freed = fs.statfs().blocks_free - free;
    assert!(freed > 200, "only {freed} blocks");
    let fs = crash(fs);
    assert_eq!(names(&fs, dir).len(), 100);
}

#[test]
fn a_log_stays_short_however_often_a_file_changes() {
    let mut fs = fresh();
    let ino = make(&fs, Ino::ROOT, "f");
    fs.write(&root(), ino, 0, &pattern(0, 40_960), false).unwrap();
    let free = fs.statfs().blocks_free;
    for i in 0..50_000u64 {
        fs.write(&root(), ino, i * 4096 % 40_960, &pattern(i, 64), false).unwrap();
        fs.write(&root(), ino, (i * 7) % 9 * 4096, &pattern(i, 4096), false).unwrap();
    }
    assert!(free - fs.statfs().blocks_free < 64, "{} blocks", free - fs.statfs().blocks_free);
    let before = content(&fs, ino);
    fs = crash(fs);
    assert!(content(&fs, ino) == before);
}

/// Many sweeps of the cleaner go over this file while it changes, each in several steps.
#[test]
fn a_file_in_pieces_stays_right_while_its_log_is_swept() {
    const PAGES: u64 = 900;
    const PAGE: usize = 4096;
    let mut fs = fresh();
    let used = |fs: &F| fs.statfs().blocks - fs.statfs().blocks_free;
    let before = used(&fs);
    let ino = make(&fs, Ino::ROOT, "f");
    fs.setxattr(&root(), ino, b"user.kept", b"value", 0).unwrap();
    fs.write(&root(), ino, 0, &vec![0; PAGES as usize * PAGE], false).unwrap();
    let reserve = |fs: &F, page: u64| {
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        fs.fallocate(&root(), ino, keep, (PAGES + page) * PAGE as u64, 3 * PAGE as u64).unwrap();
    };
    let mut expected = vec![0; PAGES as usize * PAGE];
    let mut random = 7u64;
    let mut below = |n: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % n
    };
    let mut most = 0;
    for i in 0..24_000u64 {
        let page = below(PAGES) as usize;
        let at = page * PAGE;
        match below(40) {
            0 => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                fs.fallocate(&root(), ino, mode, at as u64, PAGE as u64).unwrap();
                expected[at..at + PAGE].fill(0);
            }
            1 => reserve(&fs, below(50)),
            2..10 => {
                let bytes = pattern(i, 1 + below(200) as usize);
                fs.write(&root(), ino, at as u64, &bytes, false).unwrap();
                expected[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            _ => {
                let bytes = pattern(i, PAGE);
                fs.write(&root(), ino, at as u64, &bytes, false).unwrap();
                expected[at..at + PAGE].copy_from_slice(&bytes);
            }
        }
        if i % 3_000 == 1_500 {
            most = most.max(used(&fs) - before);
            fs = if i % 6_000 == 1_500 { crash(fs) } else { close(fs) };
            assert!(content(&fs, ino) == expected, "after {i} operations");
            assert_eq!(fs.getxattr(&root(), ino, b"user.kept").unwrap(), b"value");
        }
    }
    // The log has less than two lines a page; up to 53 pages are reserved.
    assert!(most < PAGES + 53 + PAGES * 2 / 64, "{most} blocks");
    fs.unlink(&root(), Ino::ROOT, b"f").unwrap();
    assert!(used(&fs) < before + 8, "{} blocks, {before} before", used(&fs));
}

#[test]
fn a_full_pool_says_so_and_recovers() {
    for assume in [Domain::Memory, Domain::PageCache] {
        let fs = open(Fs::mkfs(pool(8 << 20, Some(assume)), &MkfsOptions::default()).unwrap());
        let mut made = 0;
        let full = loop {
            match fs.create(&root(), Ino::ROOT, format!("f{made}").as_bytes(), 0o644, 0, libc::O_EXCL) {
                Ok((attr, _)) => {
                    made += 1;
                    let wrote = fs.write(&root(), attr.ino, 0, &pattern(made, 10_000), false);
                    fs.release(attr.ino);
                    fs.forget(attr.ino, 1);
                    if let Err(e) = wrote {
                        break e;
                    }
                }
                Err(e) => break e,
            }
        };
        assert_eq!(full.errno(), libc::ENOSPC);
        assert!(fs.statfs().blocks_free < 3, "{:?}", fs.statfs());
        let fs = crash(fs);
        for i in 0..made {
            fs.unlink(&root(), Ino::ROOT, format!("f{i}").as_bytes()).unwrap();
        }
        assert!(names(&fs, Ino::ROOT).is_empty());
        let ino = make(&fs, Ino::ROOT, "again");
        fs.write(&root(), ino, 0, &pattern(1, 4 << 20), false).unwrap();
        let fs = crash(fs);
        assert!(content(&fs, find(&fs, Ino::ROOT, "again").unwrap().ino) == pattern(1, 4 << 20));
    }
}

/// Files of one block each until nothing more fits.
fn fill(fs: &F) -> u32 {
    (0..)
        .find(|n| {
            let made = fs.create(&root(), Ino::ROOT, format!("f{n}").as_bytes(), 0o644, 0, libc::O_EXCL);
            let Ok((attr, _)) = made else { return true };
            let wrote = fs.write(&root(), attr.ino, 0, &pattern(*n as u64, 4096), false);
            fs.release(attr.ino);
            fs.forget(attr.ino, 1);
            wrote.is_err()
        })
        .unwrap()
}

/// As `rm -r` does, which removes what a listing showed; and what changes in place needs blocks, too.
#[test]
fn a_full_pool_can_be_emptied_at_once() {
    for assume in [Domain::Memory, Domain::PageCache] {
        let fs = open(Fs::mkfs(pool(16 << 20, Some(assume)), &MkfsOptions::default()).unwrap());
        let made = fill(&fs);
        let first = find(&fs, Ino::ROOT, "f0").unwrap().ino;
        for n in 0..2000 {
            let set = SetAttr { size: Some(if n % 2 == 0 { 1001 } else { 3003 }), ..SetAttr::default() };
            fs.setattr(&root(), first, &set).unwrap_or_else(|e| panic!("{assume}, the {n}th: {e}"));
        }
        for name in names(&fs, Ino::ROOT) {
            let removed = fs.unlink(&root(), Ino::ROOT, name.as_bytes());
            removed.unwrap_or_else(|e| panic!("{assume}, {name} of {made}: {e}"));
        }
        assert!(names(&fs, Ino::ROOT).is_empty());
        fs.sync().unwrap();
    }
}

/// Inodes that nobody needs any more take no room from data: on the full pool itself, and after a close.
#[test]
fn what_the_inode_table_took_is_had_again() {
    for assume in [Domain::Memory, Domain::PageCache] {
        let mut fs = open(Fs::mkfs(pool(16 << 20, Some(assume)), &MkfsOptions::default()).unwrap());
        let free = fs.statfs().blocks_free;
        let name = |n: u32| format!("f{n}");
        for round in 0..3 {
            let made = (0..).find(|n| {
                let made = fs.create(&root(), Ino::ROOT, name(*n).as_bytes(), 0o644, 0, libc::O_EXCL);
                made.map(|(attr, _)| (fs.release(attr.ino), fs.forget(attr.ino, 1))).is_err()
            });
            let made = made.unwrap();
            assert!(made > 40_000, "{made} files");
            let mut order: Vec<u32> = (0..made).collect();
            if round == 1 {
                order.reverse();
            }
            order.iter().for_each(|&n| fs.unlink(&root(), Ino::ROOT, name(n).as_bytes()).unwrap());
            if round == 2 {
                fs = close(fs);
                let now = fs.statfs().blocks_free;
                assert!(now + 100 >= free, "{assume}: {now} blocks of {free} are free after a close");
            }
            let big = pattern(round, (free - 200) as usize * 4096);
            // On an ordinary file nothing that was freed since the last sync is to be had, for this file neither.
            (0..3).for_each(|_| fs.sync().unwrap());
            let ino = make(&fs, Ino::ROOT, "big");
            let before = fs.statfs();
            fs.write(&root(), ino, 0, &big, false).unwrap_or_else(|e| {
                panic!("{assume}, round {round}: {e}, {free} before, {before:?}, now {:?}", fs.statfs())
            });
            fs = if round == 0 { crash(fs) } else { fs };
            assert!(content(&fs, find(&fs, Ino::ROOT, "big").unwrap().ino) == big);
            let report = fs.check().unwrap();
            assert!(report.is_clean(), "{assume}, round {round}: {:#?}", report.findings);
            fs.unlink(&root(), Ino::ROOT, b"big").unwrap();
        }
    }
}

/// A program's stores through a mapping were accepted long ago: over blocks that the file has they find room, where a `write` is
/// refused; into holes they are refused as late as they come.
#[test]
fn what_was_stored_through_a_mapping_finds_room_on_a_full_pool() {
    const PAGES: usize = 256;
    for (assume, size) in
        [(Domain::Memory, 16 << 20), (Domain::PageCache, 16 << 20), (Domain::Memory, 64 << 20)]
    {
        let fs = open(Fs::mkfs(pool(size, Some(assume)), &MkfsOptions::default()).unwrap());
        let (attr, _) = fs.create(&root(), Ino::ROOT, b"mapped", 0o644, 0, libc::O_EXCL).unwrap();
        let node = fs.node(attr.ino).unwrap();
        let mut holds = pattern(1, PAGES * 4096 - 100);
        fs.write_at(&root(), &node, 0, &holds, false).unwrap();
        fs.fallocate(&root(), attr.ino, libc::FALLOC_FL_KEEP_SIZE, 300 * 4096, 4096).unwrap();
        fill(&fs);
        let refused = |done: lodestone::Result<u64>| assert_eq!(done.unwrap_err().errno(), libc::ENOSPC);
        // Several blocks: a small one goes to the log's last line.
        refused(fs.write_at(&root(), &node, 0, &pattern(2, 4096 * 64), false));
        node.set_written_back();
        // As the kernel does: single pages, many at once, the last one short; each again and again.
        for round in 0..6u64 {
            for (from, count) in [(0, 128), (128, 128), (7, 1), (200, 56), (3, 2), (9, 17)] {
                let begin = from * 4096;
                let end = ((from + count) * 4096).min(holds.len());
                holds[begin..end].copy_from_slice(&pattern(10 + round, end - begin));
                let mut at = begin;
                while at < end {
                    at = fs.write_at(&root(), &node, at as u64, &holds[at..end], false).unwrap() as usize;
                }
            }
        }
        refused(fs.write_at(&root(), &node, 280 * 4096, &holds[..4096], false));
        // What is appended replaces nothing either.
        refused(fs.write_at(&root(), &node, 0, &holds[..64 * 4096], true));
        let all = |fs: &F| {
            let mut got = vec![0; holds.len()];
            assert_eq!(fs.read(attr.ino, 0, &mut got).unwrap(), got.len());
            assert!(got == holds, "{assume}");
        };
        all(&fs);
        // And it was not at the cost of those who delete.
        let fs = if assume == Domain::Memory { crash(fs) } else { reopened(fs) };
        all(&fs);
        for n in 0.. {
            let name = format!("f{n}");
            match fs.unlink(&root(), Ino::ROOT, name.as_bytes()) {
                Ok(()) => {}
                Err(e) => {
                    assert_eq!(e.errno(), libc::ENOENT, "{name}: {e}");
                    break;
                }
            }
        }
        all(&fs);
    }
}

/// Deleting always works, in whatever order, of however many names, and whatever was done to the full pool before.
#[test]
fn a_full_pool_can_always_be_emptied() {
    type Change = fn(&F, Ino, &str) -> lodestone::Result<()>;
    let nothing: Change = |_, _, _| Ok(());
    // It keeps the names, and stores two records.
    let rename: Change =
        |fs, dir, name| fs.rename(&root(), dir, name.as_bytes(), dir, b"f0", RENAME_EXCHANGE);
    let chmod: Change = |fs, dir, name| {
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        fs.setattr(&root(), find(fs, dir, name).unwrap().ino, &set).map(drop)
    };
    for (assume, size) in [(Domain::Memory, 2 << 20), (Domain::PageCache, 2 << 20), (Domain::Memory, 8 << 20)]
    {
        for (change, in_each) in
            [(nothing, u32::MAX), (rename, u32::MAX), (chmod, u32::MAX), (nothing, 100), (chmod, 61)]
        {
            for newest_first in [true, false] {
                let fs = open(Fs::mkfs(pool(size, Some(assume)), &MkfsOptions::default()).unwrap());
                let mut made: Vec<(Ino, String)> = Vec::new();
                let mut dir = Ino::ROOT;
                loop {
                    let n = made.len() as u32;
                    if in_each != u32::MAX && n.is_multiple_of(in_each) {
                        match fs.mkdir(&root(), Ino::ROOT, format!("d{n}").as_bytes(), 0o755, 0) {
                            Ok(attr) => {
                                fs.forget(attr.ino, 1);
                                dir = attr.ino;
                            }
                            Err(_) => break,
                        }
                    }
                    let name = format!("f{n}");
                    let Ok((attr, _)) = fs.create(&root(), dir, name.as_bytes(), 0o644, 0, 0) else { break };
                    fs.release(attr.ino);
                    fs.forget(attr.ino, 1);
                    made.push((dir, name));
                }
                assert!(made.len() > 1000);
                for (dir, name) in made.iter().cycle().take(2 * made.len()) {
                    if let Err(e) = change(&fs, *dir, name) {
                        assert_eq!(e.errno(), libc::ENOSPC);
                    }
                }
                // (Without room for a checkpoint the next open recovers.)
                let fs = if newest_first { fs } else { reopened(fs) };
                if newest_first {
                    made.reverse();
                }
                for (n, (dir, name)) in made.iter().enumerate() {
                    fs.unlink(&root(), *dir, name.as_bytes()).unwrap_or_else(|e| {
                        panic!("{assume}, {in_each} in each: the {n}th of {}: {e}", made.len())
                    });
                }
                for name in names(&fs, Ino::ROOT) {
                    fs.rmdir(&root(), Ino::ROOT, name.as_bytes()).unwrap();
                }
                fs.check().unwrap();
                let again = make(&fs, Ino::ROOT, "again");
                fs.write(&root(), again, 0, &pattern(1, 64 << 10), false).unwrap_or_else(|e| {
                    panic!(
                        "{assume}, {in_each} in each, newest first {newest_first}, of {}: {e}; {:?}",
                        made.len(),
                        fs.statfs()
                    )
                });
            }
        }
    }
}

/// What a close writes back takes nothing of what removals need, and loses no change time.
#[test]
fn a_full_pool_is_closed_with_its_change_times_and_can_be_emptied_then() {
    let mut were_clean = Vec::new();
    let ways = [
        (Domain::Memory, false, false),
        (Domain::PageCache, false, false),
        (Domain::Memory, true, false),
        // More change times than there is room for, when the directory that has them is cleaned.
        (Domain::Memory, true, true),
    ];
    for (assume, modes, unlinks) in ways {
        let fs = open(Fs::mkfs(pool(16 << 20, Some(assume)), &MkfsOptions::default()).unwrap());
        let mut made: Vec<(Ino, String)> = Vec::new();
        // Logs that end anywhere in a segment.
        for n in 0..200 {
            let dir = mkdir(&fs, Ino::ROOT, &format!("d{n}"));
            for name in (0..n % 67 + 1).map(|k| format!("{k}")) {
                make(&fs, dir, &name);
                made.push((dir, name));
            }
        }
        let chmod = |ino: Ino, mode: usize| {
            let set = SetAttr { mode: Some(0o600 + mode as u32 % 8), ..SetAttr::default() };
            fs.setattr(&root(), ino, &set).map(drop)
        };
        let (from, to) = (mkdir(&fs, Ino::ROOT, "from"), mkdir(&fs, Ino::ROOT, "to"));
        let files: Vec<Ino> = (0..1500).map(|n| make(&fs, from, &format!("f{n}"))).collect();
        for (n, ino) in files.iter().enumerate() {
            fs.write(&root(), *ino, 0, b"x", false).unwrap();
            fs.link(&root(), *ino, to, format!("l{n}").as_bytes()).unwrap();
            (0..n % 17).for_each(|mode| chmod(*ino, mode).unwrap());
        }
        let filler = make(&fs, Ino::ROOT, "filler");
        let fill = || {
            for bytes in [64 << 10, 4 << 10] {
                let end = || fs.getattr(filler).unwrap().size;
                while fs.write(&root(), filler, end(), &pattern(1, bytes), false).is_ok() {}
            }
        };
        fill();
        // What may use part of the reserve uses it up.
        let mut refused = false;
        for round in 0..if modes { 30 } else { 0 } {
            refused |= files.iter().any(|ino| chmod(*ino, round).is_err());
        }
        assert_eq!(refused, modes);
        for (n, ino) in files.iter().enumerate().take(if modes { 900 } else { 150 }) {
            let name = |kind: &str| format!("{kind}{n}").into_bytes();
            let _ = match n % 3 {
                0 if modes => Ok(()),
                0 => fs.unlink(&root(), to, &name("l")),
                1 => fs.rename(&root(), from, &name("f"), to, &name("g"), 0),
                _ => fs.link(&root(), *ino, from, &name("h")).map(drop),
            };
        }
        for n in 0..if unlinks { 1500 } else { 0 } {
            if let Err(e) = fs.unlink(&root(), to, format!("l{n}").as_bytes()) {
                assert_eq!(e.errno(), libc::ENOENT, "{assume}: link {n}: {e}");
            }
        }
        fill();
        // Access times, for which there is no room.
        for ino in &files {
            fs.read(*ino, 0, &mut [0; 1]).unwrap();
        }
        let times = |fs: &F| -> Vec<_> { files.iter().map(|ino| fs.getattr(*ino).unwrap().ctime).collect() };
        let before = times(&fs);
        let same = |now: Vec<_>| unlinks || before == now;
        fs.close().unwrap();
        let media = fs.abandon().unwrap();
        let info = Fs::probe(&media).unwrap();
        assert!(info.closed);
        were_clean.push(info.clean);
        let fs = open(media);
        assert!(same(times(&fs)), "{assume}");
        fs.check().unwrap();
        // And by a scan, by which there is no more room than before.
        let fs = open(fs.abandon().unwrap());
        assert!(same(times(&fs)), "{assume}, scanned");
        let fs = reopened(fs);
        assert!(same(times(&fs)), "{assume}, closed once more");
        for (n, (dir, name)) in made.iter().enumerate() {
            fs.unlink(&root(), *dir, name.as_bytes()).unwrap_or_else(|e| panic!("{assume}: the {n}th: {e}"));
        }
        let fs = close(fs);
        assert!(same(times(&fs)), "{assume}, with room again");
    }
    assert_eq!(were_clean, [true, true, false, false], "the last two have no room for change times");
}

/// Somebody else frees, and takes, all the time.
#[test]
fn what_does_not_fit_is_told_so() {
    let fs = open(Fs::mkfs(pool(16 << 20, Some(Domain::PageCache)), &MkfsOptions::default()).unwrap());
    let (large, busy) = (make(&fs, Ino::ROOT, "large"), make(&fs, Ino::ROOT, "busy"));
    let stop = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while stop.load(Ordering::Acquire) == 0 {
                fs.write(&root(), busy, 0, &[1; 4096], false).unwrap();
            }
        });
        for _ in 0..5 {
            let refused = fs.fallocate(&root(), large, 0, 0, 1 << 40);
            assert_eq!(refused.unwrap_err().errno(), libc::ENOSPC);
            let value = fs.setxattr(&root(), large, b"user.value", &[1; 60_000], 0);
            value.unwrap();
        }
        stop.store(1, Ordering::Release);
    });
}

/// Its owner's write takes the set-id bit of a file that is overwritten in place: with the times.
#[test]
fn an_overwrite_in_place_that_takes_set_id_bits_keeps_its_times() {
    let options = MkfsOptions { data: DataMode::InPlace, ..MkfsOptions::default() };
    let fs = open(Fs::mkfs(pool(8 << 20, Some(Domain::Memory)), &options).unwrap());
    let owner = Cred { uid: 1000, gid: 1000, groups: Vec::new(), enforce: true };
    let ino = make(&fs, Ino::ROOT, "f");
    fs.write(&root(), ino, 0, &[1; 8192], false).unwrap();
    let set = SetAttr { mode: Some(0o4755), uid: Some(1000), gid: Some(1000), ..SetAttr::default() };
    fs.setattr(&root(), ino, &set).unwrap();
    let long_ago = Some(SetTime::To(Time { sec: 1_000_000_000, nsec: 0 }));
    let set = SetAttr { mode: Some(0o4755), mtime: long_ago, atime: long_ago, ..SetAttr::default() };
    let before = fs.setattr(&root(), ino, &set).unwrap();
    fs.write(&owner, ino, 0, &[2; 4096], false).unwrap();
    let after = find(&fs, Ino::ROOT, "f").unwrap();
    assert!(after.mode & 0o7777 == 0o755 && after.mtime != before.mtime, "{after:?}");
    let left = find(&crash(fs), Ino::ROOT, "f").unwrap();
    assert_eq!((left.mode, left.mtime, left.ctime), (after.mode, after.mtime, after.ctime));
}

#[test]
fn xattrs_symlinks_links_and_nameless_files() {
    let mut fs = fresh();
    let cred = root();
    let ino = make(&fs, Ino::ROOT, "f");
    let big = pattern(3, 60_000);
    fs.setxattr(&cred, ino, b"user.small", b"value", 0).unwrap();
    fs.setxattr(&cred, ino, b"user.big", &big, 0).unwrap();
    fs.setxattr(&cred, ino, b"trusted.gone", b"x", 0).unwrap();
    fs.removexattr(&cred, ino, b"trusted.gone").unwrap();
    let long = pattern(4, 4095).iter().map(|b| b'a' + b % 26).collect::<Vec<u8>>();
    for (name, target) in [(b"s".as_slice(), b"f".as_slice()), (b"l", &long)] {
        let attr = fs.symlink(&cred, Ino::ROOT, name, target).unwrap();
        fs.forget(attr.ino, 1);
    }
    let linked = fs.link(&cred, ino, Ino::ROOT, b"g").unwrap();
    assert_eq!(linked.nlink, 2);
    fs.forget(ino, 1);
    let nameless = fs.tmpfile(&cred, Ino::ROOT, 0o600, 0).unwrap();
    fs.write(&cred, nameless.ino, 0, b"temporary", false).unwrap();
    let named = fs.link(&cred, nameless.ino, Ino::ROOT, b"named").unwrap();
    assert_eq!(named.nlink, 1);
    fs.forget(nameless.ino, 2);
    fs.release(nameless.ino);
    let lost = fs.tmpfile(&cred, Ino::ROOT, 0o600, 0).unwrap();
    fs.write(&cred, lost.ino, 0, &pattern(9, 50_000), false).unwrap();
    let ctime = fs.getattr(ino).unwrap().ctime;
    for again in [crash, close, crash] {
        fs = again(fs);
        assert_eq!(fs.getxattr(&cred, ino, b"user.small").unwrap(), b"value");
        assert_eq!(fs.getxattr(&cred, ino, b"user.big").unwrap(), big);
        assert_eq!(fs.getxattr(&cred, ino, b"trusted.gone").unwrap_err().errno(), libc::ENODATA);
        assert_eq!(fs.readlink(find(&fs, Ino::ROOT, "s").unwrap().ino).unwrap(), b"f");
        assert_eq!(fs.readlink(find(&fs, Ino::ROOT, "l").unwrap().ino).unwrap(), long);
        assert_eq!(fs.getattr(ino).unwrap().nlink, 2);
        assert_eq!(fs.getattr(ino).unwrap().ctime, ctime);
        assert_eq!(content(&fs, find(&fs, Ino::ROOT, "named").unwrap().ino), b"temporary");
    }
}

#[test]
fn a_removed_directory_takes_no_nameless_file() {
    let fs = fresh();
    let dir = fs.mkdir(&root(), Ino::ROOT, b"d", 0o755, 0).unwrap().ino;
    let nameless = fs.tmpfile(&root(), dir, 0o600, 0).unwrap().ino;
    fs.rmdir(&root(), Ino::ROOT, b"d").unwrap();
    assert_eq!(fs.tmpfile(&root(), dir, 0o600, 0).unwrap_err().errno(), libc::ENOENT);
    assert_eq!(fs.link(&root(), nameless, dir, b"f").unwrap_err().errno(), libc::ENOENT);
    assert_eq!(fs.link(&root(), nameless, Ino::ROOT, b"f").unwrap().nlink, 1);
}

#[test]
fn threads_do_not_get_in_each_others_way() {
    let fs = fresh();
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let fs = &fs;
            s.spawn(move || {
                let dir = mkdir(fs, Ino::ROOT, &format!("t{t}"));
                for i in 0..500 {
                    let ino = make(fs, dir, &format!("f{i}"));
                    fs.write(&root(), ino, 0, &pattern(t * 1000 + i, 5000), false).unwrap();
                    let (a, b) = (format!("f{i}"), format!("g{t}-{i}"));
                    fs.rename(&root(), dir, a.as_bytes(), Ino::ROOT, b.as_bytes(), 0).unwrap();
                    if i % 3 == 0 {
                        fs.rename(&root(), Ino::ROOT, b.as_bytes(), dir, a.as_bytes(), 0).unwrap();
                        fs.unlink(&root(), dir, a.as_bytes()).unwrap();
                    }
                }
            });
        }
    });
    let before = names(&fs, Ino::ROOT);
    assert_eq!(before.len(), 4 + 4 * 333);
    let fs = crash(fs);
    assert_eq!(names(&fs, Ino::ROOT), before);
    let attr = find(&fs, Ino::ROOT, "g2-1").unwrap();
    assert!(content(&fs, attr.ino) == pattern(2001, 5000));
}

/// Runs `work` in threads; panics instead of waiting for ever.
fn finishes(what: &str, work: Vec<Box<dyn FnOnce() + Send>>) {
    let count = work.len();
    let (done, ended) = std::sync::mpsc::channel();
    for w in work {
        let done = done.clone();
        std::thread::spawn(move || {
            w();
            let _ = done.send(());
        });
    }
    for _ in 0..count {
        let one = ended.recv_timeout(std::time::Duration::from_secs(20));
        assert!(one.is_ok(), "{what}: the threads wait for each other");
    }
}

#[test]
fn an_exchange_of_a_file_and_a_directory_that_names_it_does_not_deadlock() {
    let fs = fresh();
    let f = make(&fs, Ino::ROOT, "f"); // the lower number: once locked first
    let x = mkdir(&fs, Ino::ROOT, "x");
    fs.link(&root(), f, x, b"other").unwrap();
    fs.forget(f, 1);
    let (a, b) = (fs.clone(), fs.clone());
    let rename = move || {
        for _ in 0..60_000 {
            a.rename(&root(), Ino::ROOT, b"f", Ino::ROOT, b"x", RENAME_EXCHANGE).unwrap();
        }
    };
    let look = move || {
        for _ in 0..120_000 {
            assert!(find(&b, x, "other").is_some());
        }
    };
    finishes("exchange", vec![Box::new(rename), Box::new(look)]);
}

#[test]
fn looking_up_the_parent_does_not_deadlock_with_its_changes() {
    let fs = fresh();
    let p = mkdir(&fs, Ino::ROOT, "p");
    let d = mkdir(&fs, p, "d");
    make(&fs, d, "keeps it");
    let (a, b) = (fs.clone(), fs.clone());
    let remove = move || {
        for _ in 0..100_000 {
            assert_eq!(a.rmdir(&root(), p, b"d").unwrap_err().errno(), libc::ENOTEMPTY);
        }
    };
    let look = move || {
        for _ in 0..100_000 {
            assert_eq!(find(&b, d, "..").unwrap().ino, p);
        }
    };
    finishes("..", vec![Box::new(remove), Box::new(look)]);
}

#[test]
fn a_removed_directory_has_no_parent() {
    let fs = fresh();
    let p = mkdir(&fs, Ino::ROOT, "p");
    let d = fs.mkdir(&root(), p, b"d", 0o755, 0).unwrap().ino; // a reference is kept
    fs.rmdir(&root(), p, b"d").unwrap();
    fs.rmdir(&root(), Ino::ROOT, b"p").unwrap();
    let other = make(&fs, Ino::ROOT, "another inode with the number of the parent");
    assert_eq!(other, p);
    assert_eq!(fs.lookup(&root(), d, b"..").unwrap_err().errno(), libc::ENOENT);
    fs.forget(d, 1);
}

/// An access list as the kernel writes it, that names `named` users.
fn list(named: u32) -> Vec<u8> {
    let mut acl = 2u32.to_le_bytes().to_vec();
    let mut entry = |tag: u16, perm: u16, id: u32| {
        acl.extend(tag.to_le_bytes());
        acl.extend(perm.to_le_bytes());
        acl.extend(id.to_le_bytes());
    };
    entry(1, 7, u32::MAX);
    (0..named).for_each(|i| entry(2, 5, 1000 + i));
    entry(4, 5, u32::MAX);
    entry(16, 7, u32::MAX);
    entry(32, 0, u32::MAX);
    acl
}

#[test]
fn default_lists_of_any_length_are_inherited() {
    let mut fs = fresh();
    let cred = root();
    for (i, named) in [1, 200, 400, 600, 8000].into_iter().enumerate() {
        let d = mkdir(&fs, Ino::ROOT, &format!("d{i}"));
        fs.setxattr(&cred, d, b"system.posix_acl_default", &list(named), 0).unwrap();
        make(&fs, d, "f");
        mkdir(&fs, d, "e");
        for again in [crash, close] {
            fs = again(fs);
            let (f, e) = (find(&fs, d, "f").unwrap(), find(&fs, d, "e").unwrap());
            let access = fs.getxattr(&cred, f.ino, b"system.posix_acl_access").unwrap();
            assert_eq!(access.len(), list(named).len());
            assert_eq!(fs.getxattr(&cred, e.ino, b"system.posix_acl_default").unwrap(), list(named));
        }
        let free = fs.statfs().blocks_free;
        fs.unlink(&cred, d, b"f").unwrap();
        fs.rmdir(&cred, d, b"e").unwrap();
        assert!(fs.statfs().blocks_free >= free + 3 * (list(named).len() as u64 / 4096));
    }
}

#[test]
fn file_capabilities_go_with_every_change_of_data_or_owner() {
    let fs = fresh();
    let cred = root();
    let changes: [(&str, &dyn Fn(Ino)); 6] = [
        ("write", &|f| assert_eq!(fs.write(&cred, f, 0, b"x", false).unwrap(), 1)),
        ("truncate", &|f| {
            fs.setattr(&cred, f, &SetAttr { size: Some(10), ..SetAttr::default() }).unwrap();
        }),
        ("open", &|f| {
            fs.open_node(&cred, f, libc::O_WRONLY | libc::O_TRUNC).unwrap();
            fs.release(f);
        }),
        ("chown", &|f| {
            fs.setattr(&cred, f, &SetAttr { uid: Some(7), ..SetAttr::default() }).unwrap();
        }),
        ("fallocate", &|f| fs.fallocate(&root(), f, 0, 100, 1).unwrap()),
        ("punch", &|f| {
            fs.fallocate(&root(), f, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 1).unwrap();
        }),
    ];
    for (name, change) in changes {
        let f = make(&fs, Ino::ROOT, name);
        fs.write(&cred, f, 0, b"a program", false).unwrap();
        fs.setxattr(&cred, f, b"security.capability", b"all of them", 0).unwrap();
        fs.setattr(&cred, f, &SetAttr { mode: Some(0o755), ..SetAttr::default() }).unwrap();
        assert!(fs.getxattr(&cred, f, b"security.capability").is_ok(), "{name}");
        change(f);
        let gone = fs.getxattr(&cred, f, b"security.capability").map(|_| ());
        assert_eq!(gone.map_err(|e| e.errno()), Err(libc::ENODATA), "{name}");
    }
    let fs = crash(fs);
    for name in ["write", "truncate", "open", "chown", "fallocate", "punch"] {
        let f = find(&fs, Ino::ROOT, name).unwrap();
        assert!(fs.getxattr(&root(), f.ino, b"security.capability").is_err(), "{name}");
    }
}
