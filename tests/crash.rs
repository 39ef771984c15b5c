//! Power failures at every fence of random operations, on simulated media.
//!
//! Before each fence several images that a failure could leave are taken; after the operation each is
//! opened with the production code. The tree must be exactly the one before the operation or the one
//! after it, opening again must change nothing, and the file system must be usable: everything can be
//! deleted and the space comes back.
//!
//! `LODE_CRASH_SEED` and `LODE_CRASH_OPS` choose others than the default ones; a failure names its seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use lodestone::fs::format::{BLOCK, LOG_HEAD_OFFSET, SLOT, TABLE_BLOCK};
use lodestone::fs::{Cred, Fs, Ino, Kind, MkfsOptions, OpenOptions, RENAME_EXCHANGE, SetAttr};
use lodestone::media::{Addr, Domain, Media, crc32c};
use lodestone::sim::media::{Keep, Recorder, Rng, SimMedia};
use parking_lot::Mutex;

type F = Arc<Fs<SimMedia>>;

const POOL_BYTES: usize = 2 << 20;
/// Images per fence, besides the systematic ones.
const RANDOM_IMAGES: u64 = 4;
/// Systematic images per fence: each of the first and last lines missing, or alone.
const EDGE_LINES: usize = 3;

fn open(media: SimMedia) -> F {
    let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
    let fs = Fs::open(media, &options).expect("a crashed pool opens");
    let report = fs.check().expect("a pool that opens can be checked");
    assert!(report.is_clean(), "{:#?}", report.findings);
    fs
}

/// What a program can see of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Seen {
    ino: Ino,
    mode: u32,
    nlink: u32,
    owner: (u32, u32),
    size: u64,
    blocks: u64,
    times: (i64, u32, i64, u32),
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Seen {
    fn same(&self, other: &Seen) -> bool {
        self.content == other.content && self.xattrs == other.xattrs && self.mode == other.mode
    }
}

type Tree = BTreeMap<String, Seen>;

fn by_inode(tree: &Tree) -> BTreeMap<u32, Seen> {
    tree.values().map(|s| (s.ino.0, s.clone())).collect()
}

fn tree(fs: &F) -> Tree {
    let mut all = Tree::new();
    let mut queue = vec![(String::from("/"), Ino::ROOT)];
    while let Some((path, ino)) = queue.pop() {
        let attr = fs.getattr(ino).unwrap();
        let mut content = Vec::new();
        match attr.kind() {
            Kind::File => {
                content = vec![0; attr.size as usize];
                assert_eq!(fs.read(ino, 0, &mut content).unwrap(), content.len());
            }
            Kind::Symlink => content = fs.readlink(ino).unwrap(),
            Kind::Directory => {
                let base = path.trim_end_matches('/');
                fs.readdir(ino, 0, &mut |e| {
                    if e.name != b"." && e.name != b".." {
                        queue.push((format!("{base}/{}", String::from_utf8_lossy(e.name)), e.ino));
                    }
                    true
                })
                .unwrap();
            }
            _ => {}
        }
        let names = fs.listxattr(&Cred::root(), ino).unwrap();
        let xattrs = names
            .split(|&b| b == 0)
            .filter(|n| !n.is_empty())
            .map(|n| (n.to_vec(), fs.getxattr(&Cred::root(), ino, n).unwrap()))
            .collect();
        let seen = Seen {
            ino,
            mode: attr.mode,
            nlink: attr.nlink,
            owner: (attr.uid, attr.gid),
            size: attr.size,
            blocks: attr.blocks,
            times: (attr.mtime.sec, attr.mtime.nsec, attr.ctime.sec, attr.ctime.nsec),
            content,
            xattrs,
        };
        all.insert(path, seen);
    }
    all
}

fn names(tree: &Tree, kind: Option<u32>) -> Vec<String> {
    let fits = |s: &Seen| kind.is_none_or(|k| s.mode & libc::S_IFMT == k);
    tree.iter().filter(|(p, s)| *p != "/" && fits(s)).map(|(p, _)| p.clone()).collect()
}

fn pick<'a>(rng: &mut Rng, from: &'a [String]) -> Option<&'a str> {
    (!from.is_empty()).then(|| from[rng.below(from.len() as u64) as usize].as_str())
}

fn split(path: &str) -> (&str, &str) {
    let at = path.rfind('/').unwrap();
    (if at == 0 { "/" } else { &path[..at] }, &path[at + 1..])
}

fn bytes(rng: &mut Rng) -> Vec<u8> {
    let len = match rng.below(8) {
        0 => 1 + rng.below(9),
        1 => 63 + rng.below(3),
        2 => 4095 + rng.below(3),
        3 => rng.below(20_000) + 1,
        4 => 4096,
        _ => rng.below(900) + 1,
    };
    (0..len).map(|_| rng.draw() as u8).collect()
}

/// Seeds that found bugs: change times taken from directories out of reach; a truncate and an append in
/// place that changed bytes of an older record, not synced yet.
const FOUND_PAGE_CACHE: [u64; 3] = [701, 702, 703];
/// A file replaced by a rename kept its old change time.
const FOUND: [u64; 1] = [102];

/// What a crash left, and at which fence.
type State = (String, SimMedia);

/// Does one operation; its name. Errors are fine: an operation may find nothing to do.
fn operate(fs: &F, now: &Tree, rng: &mut Rng) -> String {
    let cred = Cred::root();
    let ino = |path: &str| now[path].ino;
    let files = names(now, Some(libc::S_IFREG));
    let mut dirs = names(now, Some(libc::S_IFDIR));
    dirs.push("/".into());
    let dir = pick(rng, &dirs).unwrap().to_string();
    let all = names(now, None);
    let fresh =
        format!("n{}{}", rng.below(30), if rng.below(6) == 0 { "x".repeat(60) } else { String::new() });
    let file = pick(rng, &files).map(str::to_string);
    match (rng.below(24), file) {
        (0..=2, _) | (_, None) => {
            let made = fs.create(&cred, ino(&dir), fresh.as_bytes(), 0o644, 0, libc::O_EXCL);
            if let Ok((attr, _)) = made {
                fs.release(attr.ino);
                fs.forget(attr.ino, 1);
            }
            format!("create {dir}/{fresh}")
        }
        (3, _) => {
            if let Ok(attr) = fs.mkdir(&cred, ino(&dir), fresh.as_bytes(), 0o755, 0) {
                fs.forget(attr.ino, 1);
            }
            format!("mkdir {dir}/{fresh}")
        }
        (4, _) => {
            let target = "t".repeat(1 + rng.below(300) as usize);
            if let Ok(attr) = fs.symlink(&cred, ino(&dir), fresh.as_bytes(), target.as_bytes()) {
                fs.forget(attr.ino, 1);
            }
            format!("symlink {dir}/{fresh}")
        }
        (5 | 6, _) => {
            let path = pick(rng, &all).unwrap();
            let (parent, name) = split(path);
            if now[path].mode & libc::S_IFMT == libc::S_IFDIR {
                let _ = fs.rmdir(&cred, ino(parent), name.as_bytes());
            } else {
                let _ = fs.unlink(&cred, ino(parent), name.as_bytes());
            }
            format!("remove {path}")
        }
        (7..=10, _) => {
            let from = pick(rng, &all).unwrap();
            let to = match rng.below(3) {
                0 => pick(rng, &all).unwrap().to_string(),
                _ => format!("{}/{fresh}", dir.trim_end_matches('/')),
            };
            let flags = if rng.below(4) == 0 { RENAME_EXCHANGE } else { 0 };
            let ((a, x), (b, y)) = (split(from), split(&to));
            let _ = fs.rename(&cred, ino(a), x.as_bytes(), ino(b), y.as_bytes(), flags);
            format!("rename {from} {to} {flags}")
        }
        (11, Some(f)) => {
            if fs.link(&cred, ino(&f), ino(&dir), fresh.as_bytes()).is_ok() {
                fs.forget(ino(&f), 1);
            }
            format!("link {f} {dir}/{fresh}")
        }
        (12 | 13, Some(f)) => {
            let size = rng.below(now[&f].size + 6000);
            let _ = fs.setattr(&cred, ino(&f), &SetAttr { size: Some(size), ..SetAttr::default() });
            format!("truncate {f} {size}")
        }
        (14, Some(f)) => {
            let mode = rng.below(0o1000) as u32;
            let _ = fs.setattr(&cred, ino(&f), &SetAttr { mode: Some(mode), ..SetAttr::default() });
            format!("chmod {f} {mode:o}")
        }
        (15, Some(f)) => {
            let name = format!("user.{}", rng.below(3));
            let value = vec![rng.draw() as u8; rng.below(5000) as usize];
            if rng.below(4) == 0 {
                let _ = fs.removexattr(&cred, ino(&f), name.as_bytes());
            } else {
                let _ = fs.setxattr(&cred, ino(&f), name.as_bytes(), &value, 0);
            }
            format!("xattr {f} {name} {}", value.len())
        }
        (16, Some(f)) => {
            let mode =
                [0, libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE, libc::FALLOC_FL_PUNCH_HOLE | 1];
            let mode = mode[rng.below(4) as usize];
            let (at, len) = (rng.below(now[&f].size + 5000), rng.below(9000) + 1);
            let _ = fs.fallocate(&Cred::root(), ino(&f), mode, at, len);
            format!("fallocate {f} mode {mode} {at} {len}")
        }
        (17 | 18, Some(f)) => {
            let b = bytes(rng);
            let _ = fs.write(&cred, ino(&f), 0, &b, true);
            format!("append {f} {}", b.len())
        }
        (_, Some(f)) => {
            let b = bytes(rng);
            let at = rng.below(now[&f].size + 2000);
            let _ = fs.write(&cred, ino(&f), at, &b, false);
            format!("write {f} {at} {}", b.len())
        }
    }
}

/// Opens an image and holds it against the trees it may show.
fn check(media: SimMedia, allowed: [&Tree; 2], what: &str) {
    let fs = open(media);
    let found = tree(&fs);
    if !allowed.contains(&&found) {
        let differs = |t: &Tree| {
            let paths: Vec<&String> =
                t.keys().chain(found.keys()).filter(|p| t.get(*p) != found.get(*p)).collect();
            format!("{paths:?}")
        };
        let (before, after) = (differs(allowed[0]), differs(allowed[1]));
        let detail =
            found.iter().find(|(p, s)| allowed.iter().all(|t| t.get(*p) != Some(s))).map(|(p, s)| {
                let brief = |s: Option<&Seen>| {
                    s.map(|s| {
                        let sums: Vec<u32> =
                            s.xattrs.values().chain([&s.content]).map(|v| crc32c(v, 0)).collect();
                        format!(
                            "{:?} {:o} {} {} {} {:?} {sums:x?}",
                            s.ino, s.mode, s.nlink, s.size, s.blocks, s.times
                        )
                    })
                };
                format!(
                    "{p}: {:?}, was {:?}, or {:?}",
                    brief(Some(s)),
                    brief(allowed[0].get(p)),
                    brief(allowed[1].get(p))
                )
            });
        panic!("{what}: not the tree before (differs at {before}) nor after ({after}); {detail:?}");
    }
    usable(fs, found, what);
}

/// Opens an image again and deletes everything.
fn usable(fs: F, found: Tree, what: &str) {
    // Recovery is idempotent.
    let again = open(fs.abandon().unwrap().copy());
    let twice = tree(&again);
    let paths = found.keys().chain(twice.keys());
    let changed =
        paths.filter(|p| found.get(*p) != twice.get(*p)).map(|p| (p, found.get(p), twice.get(p))).next();
    assert!(changed.is_none(), "{what}: a second recovery changes the tree: {}", brief_change(changed));
    let used = found;
    // Everything can be deleted.
    for path in names(&used, None).iter().rev() {
        let (parent, name) = split(path);
        let dir = used[parent].ino;
        let gone = if used[path].mode & libc::S_IFMT == libc::S_IFDIR {
            again.rmdir(&Cred::root(), dir, name.as_bytes())
        } else {
            again.unlink(&Cred::root(), dir, name.as_bytes())
        };
        gone.unwrap_or_else(|e| panic!("{what}: {path} cannot be deleted: {e}"));
    }
    let free = again.statfs().blocks_free;
    assert!(
        free as usize > POOL_BYTES / 4096 - 90,
        "{what}: {free} blocks are free after deleting everything"
    );
}

fn brief_change(changed: Option<(&String, Option<&Seen>, Option<&Seen>)>) -> String {
    let Some((path, a, b)) = changed else { return String::new() };
    let brief = |s: Option<&Seen>| {
        s.map(|s| {
            let sums: Vec<u32> = s.xattrs.values().chain([&s.content]).map(|v| crc32c(v, 0)).collect();
            format!("{:?} {:o} {} {} {} {:?} {sums:x?}", s.ino, s.mode, s.nlink, s.size, s.blocks, s.times)
        })
    };
    format!("{path}: {:?}, then {:?}", brief(a), brief(b))
}

/// Fills the log of one of two files with records that soon are dead. `each` gets every operation.
fn churn(now: &Tree, rng: &mut Rng, each: &mut dyn FnMut(Ino, &Change)) {
    let files = names(now, Some(libc::S_IFREG));
    let Some(file) = files.get(rng.below(files.len().min(2) as u64) as usize) else { return };
    for _ in 0..rng.below(80) {
        let change = match rng.below(3) {
            0 => Change::Mode(rng.below(0o1000) as u32),
            1 => Change::Write {
                offset: rng.below(6) * 4096 + rng.below(4000),
                len: 1 + rng.below(90) as usize,
            },
            _ => Change::Write { offset: rng.below(6) * 4096, len: 4096 },
        };
        each(now[file].ino, &change);
    }
}

/// What fills a log until it is cleaned: attributes, and pages that are moved or rewritten.
enum Change {
    Mode(u32),
    Write { offset: u64, len: usize },
}

impl Change {
    fn apply(&self, fs: &Fs<SimMedia>, ino: Ino, fill: u8) {
        match *self {
            Change::Mode(mode) => {
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                fs.setattr(&Cred::root(), ino, &set).map(drop).unwrap();
            }
            Change::Write { offset, len } => {
                fs.write(&Cred::root(), ino, offset, &vec![fill; len], false).map(drop).unwrap();
            }
        }
    }
}

/// Takes the images that a failure could leave from the `from`th fence on.
fn recorder(images: &Arc<Mutex<Vec<State>>>, salt: u64, from: u64) -> Recorder {
    let queue = images.clone();
    let mut fences = 0;
    Box::new(move |crash| {
        fences += 1;
        if fences <= from {
            return;
        }
        let mut queue = queue.lock();
        let lines = crash.lines();
        let edges = (0..lines).filter(|n| *n < EDGE_LINES || n + EDGE_LINES >= lines);
        let keeps = [Keep::Nothing, Keep::Everything]
            .into_iter()
            .chain(edges.flat_map(|n| [Keep::AllBut(n), Keep::Only(n)]))
            .chain((0..RANDOM_IMAGES).map(|n| Keep::Random(salt ^ crash.fences << 8 ^ n)));
        queue.extend(keeps.map(|k| (format!("fence {} {k:?}", crash.fences), crash.media(k))));
    })
}

fn run(seed: u64, ops: u64, domain: Domain, churns: bool) -> u64 {
    let mut rng = Rng::new(seed);
    let empty = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
    let fs = open(empty.copy());
    let mut before = tree(&fs);
    let images: Arc<Mutex<Vec<State>>> = Arc::default();
    let (mut states, mut cleanings) = (0, 0);
    for op in 0..ops {
        let salt = rng.draw();
        if churns {
            churn(&before.clone(), &mut rng, &mut |ino, change| {
                // An operation has one fence, unless it cleans.
                fs.media().record(Some(recorder(&images, salt, 1)));
                change.apply(&fs, ino, salt as u8);
                fs.media().record(None);
                let after = tree(&fs);
                for (state, media) in images.lock().drain(..) {
                    let what = format!("seed {seed} {domain:?} before op {op} (cleaning), {state}");
                    check(media, [&before, &after], &what);
                    states += 1;
                    cleanings += 1;
                }
                before = after;
            });
        }
        fs.media().record(Some(recorder(&images, salt, 0)));
        let name = operate(&fs, &before, &mut rng);
        if rng.below(10) == 0 {
            fs.tick().unwrap();
        }
        fs.media().record(None);
        let after = tree(&fs);
        for (state, media) in images.lock().drain(..) {
            let what = format!("seed {seed} {domain:?} op {op} ({name}), {state}");
            if std::env::var_os("LODE_CRASH_TRACE").is_some() && state.contains("Nothing") {
                eprintln!("{what}");
            }
            check(media, [&before, &after], &what);
            states += 1;
        }
        before = after;
    }
    assert!(!churns || ops < 30 || cleanings > 0, "no log was cleaned");
    states
}

/// Power failures on an ordinary file, whose pages are written back in any order. What was synced and not
/// touched since must be there exactly; what was synced and only got other names must be somewhere; the rest
/// must be readable, deletable, and leave nothing behind.
fn run_page_cache(seed: u64, ops: u64, churns: bool) -> u64 {
    let domain = Domain::PageCache;
    let mut rng = Rng::new(seed);
    let empty = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
    let fs = open(empty.copy());
    fs.sync().unwrap();
    // By inode: what no operation touched since the last sync.
    let mut before = tree(&fs);
    let mut synced = before.clone();
    let mut kept = by_inode(&synced);
    let images: Arc<Mutex<Vec<State>>> = Arc::default();
    let mut states = 0;
    for op in 0..ops {
        let queue = images.clone();
        let salt = rng.draw();
        fs.media().record(Some(Box::new(move |crash| {
            let mut queue = queue.lock();
            let pages = crash.lines();
            let keeps = [
                Keep::Nothing,
                Keep::AllBut(salt as usize % pages.max(1)),
                Keep::Only(salt as usize % pages.max(1)),
            ]
            .into_iter()
            .chain((0..2).map(|n| Keep::Random(salt ^ crash.fences << 8 ^ n)));
            queue.extend(keeps.map(|k| (format!("store order {} {k:?}", crash.fences), crash.media(k))));
        })));
        if churns {
            churn(&before.clone(), &mut rng, &mut |ino, change| {
                change.apply(&fs, ino, salt as u8);
                synced.retain(|_, seen| seen.ino != ino);
                kept.remove(&ino.0);
            });
            before = tree(&fs);
        }
        let name = operate(&fs, &before, &mut rng);
        let after_operation = tree(&fs);
        if std::env::var_os("LODE_CRASH_TRACE").is_some() {
            eprintln!("seed {seed} op {op}: {name}");
        }
        // What this operation changed is in doubt until the next sync.
        synced.retain(|path, seen| after_operation.get(path) == Some(seen));
        let now = by_inode(&after_operation);
        let was = by_inode(&before);
        // A name more and one less, in two directories, are two operations, and nothing orders them.
        let unnamed = |ino: &u32, n: &Seen| was.get(ino).is_some_and(|w| n.nlink < w.nlink);
        kept.retain(|ino, seen| now.get(ino).is_some_and(|n| n.same(seen) && !unnamed(ino, n)));
        let syncs = rng.below(6) == 0;
        if syncs {
            fs.sync().unwrap();
        }
        fs.media().record(None);
        for (state, media) in images.lock().drain(..) {
            let what = format!("seed {seed} page-cache op {op} ({name}), {state}");
            let crashed = open(media);
            let found = tree(&crashed);
            for (path, seen) in &synced {
                // Directories on the way may have moved and taken it with them.
                let stays = found.get(path).is_some_and(|f| f.same(seen));
                let now = found.get(path).map(|f| (f.mode, f.size));
                let was = (seen.mode, seen.size);
                assert!(stays, "{what}: {path} was synced as {was:?} and is {now:?}: {:?}", found.keys());
            }
            let found_inodes = by_inode(&found);
            for (ino, seen) in &kept {
                let stays = found_inodes.get(ino).is_some_and(|f| f.same(seen));
                assert!(stays, "{what}: {ino:?} was synced and is nowhere: {:?}", found.keys());
            }
            usable(crashed, found, &what);
            states += 1;
        }
        if syncs {
            synced = after_operation.clone();
            kept = by_inode(&synced);
        }
        before = after_operation;
    }
    states
}

#[test]
fn what_was_synced_survives_any_order_of_write_back() {
    let (seed, ops) = (setting("LODE_CRASH_SEED", 1), setting("LODE_CRASH_OPS", 30));
    let states: u64 = std::thread::scope(|s| {
        let seeds = (seed..seed + 4).chain(FOUND_PAGE_CACHE);
        let runs: Vec<_> = seeds.map(|seed| s.spawn(move || run_page_cache(seed, ops, false))).collect();
        runs.into_iter().map(|r| r.join().unwrap_or_else(|_| panic!("a run failed"))).sum()
    });
    println!("{states} crash states, 0 violations");
    assert!(states > ops, "the workload reached media");
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[test]
fn every_interrupted_operation_is_all_or_nothing() {
    let (seed, ops) = (setting("LODE_CRASH_SEED", 1), setting("LODE_CRASH_OPS", 30));
    let states: u64 = std::thread::scope(|s| {
        let runs: Vec<_> = [Domain::Memory, Domain::CpuCache]
            .into_iter()
            .flat_map(|d| (seed..seed + 4).chain(FOUND).map(move |seed| (seed, d)))
            .map(|(seed, d)| s.spawn(move || run(seed, ops, d, false)))
            .collect();
        runs.into_iter().map(|r| r.join().unwrap_or_else(|_| panic!("a run failed"))).sum()
    });
    println!("{states} crash states, 0 violations");
    assert!(states > ops, "the workload reached media");
}

#[test]
fn a_crash_around_log_cleaning_costs_nothing() {
    let (seed, ops) = (setting("LODE_CRASH_SEED", 1), setting("LODE_CRASH_OPS", 30));
    let states: u64 = std::thread::scope(|s| {
        let runs = [
            s.spawn(move || run(seed, ops, Domain::Memory, true)),
            s.spawn(move || run(seed + 1, ops, Domain::CpuCache, true)),
            s.spawn(move || run_page_cache(seed + 2, ops, true)),
            s.spawn(move || run_page_cache(seed + 3, ops, true)),
        ];
        runs.into_iter().map(|r| r.join().unwrap_or_else(|_| panic!("a run failed"))).sum()
    });
    println!("{states} crash states, 0 violations");
    assert!(states > ops, "the workload reached media");
}

/// Images of failures in the middle of operations, and of recovery from each: wherever it is cut short, the next
/// one shows what it would have shown. So does an open for reading only, which changes nothing.
fn run_recovery(seed: u64, ops: u64, domain: Domain) -> u64 {
    let mut rng = Rng::new(seed);
    let empty = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
    let fs = open(empty.copy());
    let images: Arc<Mutex<Vec<State>>> = Arc::default();
    let take = |salt: u64| -> Option<Recorder> {
        let queue = images.clone();
        Some(Box::new(move |crash| {
            let keeps = [Keep::Nothing, Keep::Everything, Keep::Random(salt ^ crash.fences << 8)];
            queue.lock().extend(keeps.map(|k| (format!("fence {} {k:?}", crash.fences), crash.media(k))));
        }))
    };
    let mut states = 0;
    for op in 0..ops {
        let before = tree(&fs);
        let salt = rng.draw();
        fs.media().record(take(salt));
        let name = operate(&fs, &before, &mut rng);
        if rng.below(8) == 0 {
            fs.sync().unwrap();
        }
        fs.media().record(None);
        let mut crashes: Vec<State> = std::mem::take(&mut *images.lock());
        while crashes.len() > 2 {
            crashes.swap_remove(rng.below(crashes.len() as u64) as usize);
        }
        for (state, media) in crashes {
            let what = format!("seed {seed} {domain:?} op {op} ({name}), {state}");
            let to_recover = media.copy();
            to_recover.record(take(salt ^ 1));
            let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
            let recovered = Fs::open(to_recover, &options).unwrap();
            recovered.media().record(None);
            let wanted = tree(&recovered);

            let options = OpenOptions { read_only: true, ..options };
            let looked_at = Fs::open(media, &options).unwrap();
            assert!(tree(&looked_at) == wanted, "{what}: for reading only it is another tree");
            let refused = [
                looked_at.mkdir(&Cred::root(), Ino::ROOT, b"new", 0o755, 0).map(drop),
                looked_at
                    .setattr(&Cred::root(), Ino::ROOT, &SetAttr { mode: Some(0), ..SetAttr::default() })
                    .map(drop),
            ];
            let refused = refused.map(|r| r.map_err(|e| e.errno()));
            assert_eq!(refused, [Err(libc::EROFS); 2], "{what}: open for reading only");
            looked_at.close().unwrap();

            for (again, media) in std::mem::take(&mut *images.lock()) {
                let found = tree(&open(media));
                let mut paths = wanted.keys().chain(found.keys());
                let changed = paths.find(|p| wanted.get(*p) != found.get(*p));
                let changed = changed.map(|p| (p, wanted.get(p), found.get(p)));
                assert!(changed.is_none(), "{what}, then recovery {again}: {}", brief_change(changed));
                states += 1;
            }
        }
    }
    states
}

#[test]
fn a_crash_in_recovery_and_a_look_change_nothing() {
    let (seed, ops) = (setting("LODE_CRASH_SEED", 1), setting("LODE_CRASH_OPS", 30) / 2);
    let states: u64 = std::thread::scope(|s| {
        let domains = [Domain::Memory, Domain::CpuCache, Domain::PageCache];
        let runs: Vec<_> =
            domains.into_iter().map(|d| s.spawn(move || run_recovery(seed + 9, ops, d))).collect();
        runs.into_iter().map(|r| r.join().unwrap_or_else(|_| panic!("a run failed"))).sum()
    });
    println!("{states} crash states, 0 violations");
    assert!(states > ops, "recovery reached media");
}

/// Bytes of the pool with one large file, and its pages: many more than one step of a sweep takes.
const SWEPT_POOL_BYTES: usize = 4 << 20;
const SWEPT_PAGES: u64 = 300;

/// Changes a large file in one way, and what it should hold; the name of the change.
fn change_large(fs: &F, ino: Ino, model: &mut Vec<u8>, rng: &mut Rng) -> String {
    let cred = Cred::root();
    let fill = rng.draw() as u8;
    let page = rng.below(SWEPT_PAGES) as usize;
    let grown = |model: &mut Vec<u8>, end: usize| model.resize(model.len().max(end), 0);
    match rng.below(40) {
        0 => {
            let size = (rng.below(SWEPT_PAGES / 2) + SWEPT_PAGES / 2) * BLOCK as u64 - rng.below(2) * 1000;
            fs.setattr(&cred, ino, &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
            model.resize(size as usize, 0);
            format!("truncate {size}")
        }
        1..=3 => {
            let pages = 1 + rng.below(6) as usize;
            let (from, to) = (page * BLOCK, (page + pages) * BLOCK);
            let (mode, name) = [
                (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, "punch"),
                (libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, "zero"),
                (0, "reserve"),
            ][rng.below(3) as usize];
            fs.fallocate(&cred, ino, mode, from as u64, (to - from) as u64).unwrap();
            let end = model.len();
            if mode == 0 {
                grown(model, to);
            } else if from < end {
                model[from..to.min(end)].fill(0);
            }
            format!("{name} {page} {pages}")
        }
        4 => {
            let set = SetAttr { mode: Some(0o600 | fill as u32 & 0o77), ..SetAttr::default() };
            fs.setattr(&cred, ino, &set).unwrap();
            "chmod".to_owned()
        }
        kind => {
            let (at, len) = match kind {
                5..=8 => (page * BLOCK + rng.below(3000) as usize, 1 + rng.below(200) as usize),
                9 => (page * BLOCK, BLOCK * (1 + rng.below(8) as usize)),
                10 => (page * BLOCK + rng.below(4000) as usize, 1 + rng.below(6000) as usize),
                _ => (page * BLOCK, BLOCK),
            };
            fs.write(&cred, ino, at as u64, &vec![fill; len], false).unwrap();
            grown(model, at + len);
            model[at..at + len].fill(fill);
            format!("write {at} {len}")
        }
    }
}

/// A large file whose log is swept again and again while it changes, and what failures leave of it: on persistent
/// memory the file before the operation or after it, on an ordinary file what it was at some moment since the
/// last sync.
fn run_sweeps(seed: u64, ops: u64, domain: Domain) -> u64 {
    let mut rng = Rng::new(seed);
    let options = MkfsOptions::default();
    let empty = Fs::mkfs(SimMedia::new(vec![0; SWEPT_POOL_BYTES], domain), &options).unwrap();
    let fs = open(empty.copy());
    let ino = fs.create(&Cred::root(), Ino::ROOT, b"f", 0o644, 0, 0).unwrap().0.ino;
    let head = |fs: &F| {
        let slot = TABLE_BLOCK as u64 * BLOCK as u64 + ino.0 as u64 * SLOT as u64;
        fs.media().load64(Addr(slot + LOG_HEAD_OFFSET)).unwrap()
    };
    // Every page where nobody expects it.
    let mut model = vec![0; SWEPT_PAGES as usize * BLOCK];
    for n in 0..SWEPT_PAGES {
        let page = n * 7 % SWEPT_PAGES;
        fs.write(&Cred::root(), ino, page * BLOCK as u64, &[page as u8; BLOCK], false).unwrap();
        model[page as usize * BLOCK..][..BLOCK].fill(page as u8);
    }
    (0..3).for_each(|_| fs.sync().unwrap());
    let deferred = domain == Domain::PageCache;
    // What the file was since the last sync.
    let mut moments = vec![model.clone()];
    let images: Arc<Mutex<Vec<State>>> = Arc::default();
    let (mut states, mut heads) = (0, std::collections::HashSet::from([head(&fs)]));
    for op in 0..ops {
        let (queue, salt) = (images.clone(), rng.draw());
        // An operation that cleans has more than one fence. Of the others some.
        let (mut fences, from) = (0, if salt % 24 == 0 { 0 } else { 1 });
        fs.media().record(Some(Box::new(move |crash| {
            fences += 1;
            if fences <= from || deferred && salt >> 8 & 3 != 0 {
                return;
            }
            let line = salt as usize % crash.lines().max(1);
            let random = (0..2).map(|n| Keep::Random(salt ^ crash.fences << 8 ^ n));
            let keeps = [Keep::Nothing, Keep::Everything, Keep::AllBut(line), Keep::Only(line)].into_iter();
            queue.lock().extend(
                keeps.chain(random).map(|k| (format!("fence {} {k:?}", crash.fences), crash.media(k))),
            );
        })));
        let name = change_large(&fs, ino, &mut model, &mut rng);
        moments.push(model.clone());
        let syncs = rng.below(25) == 0;
        if syncs {
            fs.sync().unwrap();
        }
        fs.media().record(None);
        heads.insert(head(&fs));
        for (state, media) in images.lock().drain(..) {
            let what = format!("seed {seed} {domain:?} op {op} ({name}), {state}");
            let crashed = open(media);
            let content = |fs: &F| {
                let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize];
                assert_eq!(fs.read(ino, 0, &mut bytes).unwrap(), bytes.len());
                bytes
            };
            let found = content(&crashed);
            assert!(moments.contains(&found), "{what}: {}", differs(&found, moments.last().unwrap()));
            // What it holds now goes through a close, and its space comes back.
            crashed.close().unwrap();
            let closed = open(crashed.media().copy());
            assert!(closed.open_report().was_clean, "{what}");
            assert!(content(&closed) == found, "{what}: a close changes it");
            closed.unlink(&Cred::root(), Ino::ROOT, b"f").unwrap();
            let free = closed.statfs().blocks_free as usize;
            assert!(free > SWEPT_POOL_BYTES / BLOCK - 90, "{what}: {free} blocks are free without the file");
            states += 1;
        }
        if !deferred || syncs {
            moments.drain(..moments.len() - 1);
        }
    }
    assert!(ops < 1800 || heads.len() > 3, "the log was swept, and what it had dropped: {}", heads.len());
    states
}

/// Pages in which two contents differ, in words.
fn differs(a: &[u8], b: &[u8]) -> String {
    let pages: Vec<usize> = a
        .chunks(BLOCK)
        .zip(b.chunks(BLOCK))
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(n, _)| n)
        .collect();
    format!("{} bytes, should be {}; pages {pages:?} differ from the last moment", a.len(), b.len())
}

#[test]
fn a_crash_in_a_sweep_costs_nothing() {
    let (seed, ops) = (setting("LODE_CRASH_SEED", 1), setting("LODE_CRASH_OPS", 30) * 60);
    let states: u64 = std::thread::scope(|s| {
        let domains = [Domain::Memory, Domain::CpuCache, Domain::PageCache, Domain::PageCache];
        let runs: Vec<_> =
            (seed..).zip(domains).map(|(seed, d)| s.spawn(move || run_sweeps(seed, ops, d))).collect();
        runs.into_iter().map(|r| r.join().unwrap_or_else(|_| panic!("a run failed"))).sum()
    });
    println!("{states} crash states, 0 violations");
    assert!(states > ops / 60, "the workload reached media");
}
