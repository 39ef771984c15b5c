//! `fsck` held against damage that is made on purpose: each kind is found, mended, and what is mended can be used;
//! what was not damaged is as it was. And damage that is scattered by chance: `LODE_FSCK_SEED` and
//! `LODE_FSCK_FLIPS` choose other and more than the default.

use std::cell::Cell;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use lodestone::fs::check::{self, Progress, Report, What};
use lodestone::fs::format::*;
use lodestone::fs::{Cred, DataMode, Fs, Ino, MkfsOptions, OpenOptions, SetAttr};
use lodestone::media::{Addr, Domain, LINE, Media, Pool, PoolOptions, crc32c};
use lodestone::sim::media::{Keep, Rng, SimMedia};
use parking_lot::Mutex;

type F<M = SimMedia> = Arc<Fs<M>>;

const POOL_BYTES: usize = 2 << 20;

fn options() -> OpenOptions {
    OpenOptions { no_ticker: true, ..OpenOptions::default() }
}

fn open(image: Vec<u8>, domain: Domain) -> F {
    Fs::open(SimMedia::new(image, domain), &options()).expect("the pool opens")
}

fn create<M: Media>(fs: &F<M>, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.create(&Cred::root(), dir, name, 0o644, 0, libc::O_EXCL).unwrap().0.ino;
    fs.forget(ino, 2);
    ino
}

fn mkdir<M: Media>(fs: &F<M>, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.mkdir(&Cred::root(), dir, name, 0o755, 0).unwrap().ino;
    fs.forget(ino, 1);
    ino
}

fn write<M: Media>(fs: &F<M>, ino: Ino, offset: u64, bytes: &[u8]) {
    fs.write(&Cred::root(), ino, offset, bytes, false).unwrap();
}

fn chmod<M: Media>(fs: &F<M>, ino: Ino, mode: u32) {
    fs.setattr(&Cred::root(), ino, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
}

fn find(fs: &F, dir: Ino, name: &[u8]) -> Option<Ino> {
    let ino = fs.lookup(&Cred::root(), dir, name).ok()?.ino;
    fs.forget(ino, 1);
    Some(ino)
}

fn content<M: Media>(fs: &F<M>, ino: Ino) -> Vec<u8> {
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(ino, 0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// A pool with a little of everything, closed or as a crash leaves it, and what is in it.
struct Sample {
    domain: Domain,
    image: Vec<u8>,
    sb: Super,
    key_crc: u32,
}

/// Inodes of the sample, in the order in which they were made.
const DIR: Ino = Ino(2);
const INNER: Ino = Ino(3);
const FILE: Ino = Ino(4);
const OTHER: Ino = Ino(5);
const DEEP: Ino = Ino(6);
const LINK: Ino = Ino(7);
const EMPTY: Ino = Ino(8);

fn other_bytes() -> Vec<u8> {
    (0..20_000u32).map(|n| ((n * 7) >> 3) as u8 | 1).collect()
}

/// A list that names one user.
fn access_list() -> Vec<u8> {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in
        [(1u16, 6u16, u32::MAX), (2, 4, 1000), (4, 4, u32::MAX), (16, 4, u32::MAX), (32, 4, u32::MAX)]
    {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&perm.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}

/// Where the slot of one of the first inodes stands.
fn slot_of(ino: Ino) -> usize {
    TABLE_BLOCK as usize * BLOCK + ino.0 as usize * SLOT
}

impl Sample {
    fn new(domain: Domain, closed: bool) -> Sample {
        let fresh = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
        let fs = open(fresh.image(), domain);
        let cred = Cred::root();
        assert_eq!(mkdir(&fs, Ino::ROOT, b"dir"), DIR);
        assert_eq!(mkdir(&fs, DIR, b"inner"), INNER);
        assert_eq!(create(&fs, DIR, b"file"), FILE);
        assert_eq!(create(&fs, Ino::ROOT, b"other"), OTHER);
        assert_eq!(create(&fs, INNER, b"deep"), DEEP);
        let link = fs.symlink(&cred, Ino::ROOT, b"link", b"dir/file").unwrap().ino;
        fs.forget(link, 1);
        assert_eq!(link, LINK);
        assert_eq!(create(&fs, Ino::ROOT, b"empty"), EMPTY);
        chmod(&fs, FILE, 0o601);
        write(&fs, FILE, 0, &[0xa1; BLOCK]);
        (0..3).for_each(|n| chmod(&fs, FILE, 0o610 | n));
        write(&fs, FILE, BLOCK as u64, &[0xb2; BLOCK]);
        write(&fs, OTHER, 0, &other_bytes());
        write(&fs, DEEP, 0, b"deep down");
        fs.link(&cred, OTHER, INNER, b"again").unwrap();
        fs.forget(OTHER, 1);
        fs.setxattr(&cred, FILE, b"user.small", &[0x51; 900], 0).unwrap();
        fs.setxattr(&cred, FILE, b"user.large", &[0x52; 9000], 0).unwrap();
        fs.setxattr(&cred, EMPTY, b"system.posix_acl_access", &access_list(), 0).unwrap();
        // Later than all else, by the kernel's coarse clock.
        std::thread::sleep(std::time::Duration::from_millis(11));
        chmod(&fs, FILE, 0o640);
        (0..3).for_each(|_| fs.sync().unwrap());
        fs.tick().unwrap();
        if closed {
            fs.close().unwrap();
        }
        Sample::of(fs.media().image(), domain)
    }

    fn of(image: Vec<u8>, domain: Domain) -> Sample {
        let at = SUPER_BLOCK as usize * BLOCK;
        let sb = Super::decode(image[at..at + SUPER_BYTES].try_into().unwrap()).unwrap();
        let key_crc = crc32c(&sb.key, 0);
        Sample { domain, image, sb, key_crc }
    }

    fn slot(&self, ino: Ino) -> usize {
        slot_of(ino)
    }

    fn media(&self) -> Arc<SimMedia> {
        Arc::new(SimMedia::new(self.image.clone(), self.domain))
    }

    fn report(&self) -> Report {
        check::examine(self.media(), false, None).unwrap()
    }

    fn flip(&mut self, at: usize) {
        self.image[at] ^= 0x55;
    }

    fn header(&self, ino: Ino) -> SlotHeader {
        let at = self.slot(ino);
        SlotHeader::decode(self.image[at..at + LINE].try_into().unwrap(), self.key_crc, ino.0).unwrap()
    }

    /// Where the records of a log stand, segment by segment.
    fn records(&self, ino: Ino) -> Vec<(usize, Head)> {
        self.walk(ino).into_iter().map(|(at, head, _)| (at, head)).collect()
    }

    /// The records of a log, each with its incarnation.
    fn walk(&self, ino: Ino) -> Vec<(usize, Head, u32)> {
        let mut at = self.slot(ino) + LINE;
        let mut found = Vec::new();
        let mut in_force = incarnation(self.header(ino).generation);
        let mut seq = 0;
        while let Some(head) = Head::decode(&self.image[at..]).filter(|h| h.seq == seq) {
            if head.kind == Type::Seal {
                in_force = get32(&self.image[at..], field::seal::INCARNATION);
            }
            found.push((at, head, in_force));
            seq += head.lines;
            at = match head.kind {
                Type::Link => get64(&self.image[at..], field::link::ADDR) as usize,
                _ => at + head.lines as usize * LINE,
            };
        }
        found
    }

    /// The `n`th record of a type.
    fn record(&self, ino: Ino, kind: Type, n: usize) -> usize {
        let of_kind = |r: &&(usize, Head)| r.1.kind == kind;
        self.records(ino).iter().filter(of_kind).nth(n).expect("the record is there").0
    }

    fn last(&self, ino: Ino, kind: Type) -> usize {
        self.records(ino).iter().rfind(|r| r.1.kind == kind).expect("the record is there").0
    }

    /// Changes a record so that it validates all the same.
    fn forge(&mut self, ino: Ino, at: usize, change: impl FnOnce(&mut [u8])) {
        let generation = self.header(ino).generation;
        let (_, head, in_force) = self.walk(ino).into_iter().find(|r| r.0 == at).unwrap();
        let record = &mut self.image[at..at + head.lines as usize * LINE];
        change(record);
        let seed = log_seed(self.key_crc, ino.0, generation, in_force);
        let more = if head.more { MORE } else { 0 };
        Head::finish(record, head.seq, head.epoch, head.kind as u8 | more, seed);
    }

    /// Gives an inode another type; its slot validates all the same.
    fn retype(&mut self, ino: Ino, mode: u32) {
        let header = SlotHeader { mode, ..self.header(ino) };
        let words = header.encode(self.key_crc, ino.0);
        let at = self.slot(ino);
        words.iter().zip(self.image[at..].chunks_mut(8)).for_each(|(word, to)| put64(to, 0, *word));
    }

    /// The entry of a directory that names an inode.
    fn entry(&self, dir: Ino, ino: Ino) -> usize {
        let names =
            |r: &&(usize, Head)| r.1.kind == Type::Add && get32(&self.image[r.0..], field::add::INO) == ino.0;
        self.records(dir).iter().find(names).expect("the entry is there").0
    }

    /// Lets an entry lead elsewhere.
    fn lead(&mut self, dir: Ino, entry: usize, to: Ino, kind: u8) {
        let generation = self.header(to).generation;
        self.forge(dir, entry, |r| {
            put32(r, field::add::INO, to.0);
            put64(r, field::add::GENERATION, generation);
            r[field::add::KIND] = kind;
        });
    }

    fn state(&self) -> State {
        let lines = [0, LINE].map(|n| STATE_BLOCK as usize * BLOCK + n);
        let decode = |at: usize| State::decode(self.image[at..at + LINE].try_into().unwrap(), &self.sb.key);
        lines.into_iter().filter_map(decode).max_by_key(|s| s.serial).unwrap()
    }

    /// Changes the body of the checkpoint, as words.
    fn forge_checkpoint(&mut self, change: impl FnOnce(&mut [u32])) {
        let head = self.state().checkpoint as usize * BLOCK;
        let bytes = get64(&self.image[head..], 8) as usize;
        let block = get32(&self.image[head..], 24) as usize;
        assert_eq!(get32(&self.image[head..], 16), 1, "the body is in one piece");
        let body = &mut self.image[block * BLOCK..block * BLOCK + bytes];
        let mut words: Vec<u32> = body.chunks(4).map(|w| get32(w, 0)).collect();
        change(&mut words);
        body.chunks_mut(4).zip(words).for_each(|(to, word)| put32(to, 0, word));
        let crc = crc32c(
            &self.image[block * BLOCK..][..bytes],
            crc32c(&self.image[head + 8..head + BLOCK], self.key_crc),
        );
        put32(&mut self.image[head..], 4, crc);
    }
}

const DT_DIR: u8 = 4;

type Damage = fn(&mut Sample);

/// A name; whether it takes a pool that was closed; the damage; what must be found; inodes that it may change.
struct Row(&'static str, bool, Damage, What, &'static [Ino]);

const ROWS: &[Row] = &[
    Row("first superblock", false, |s| s.flip(SUPER_BLOCK as usize * BLOCK + 20), What::Superblock, &[]),
    Row(
        "first superblock's version",
        false,
        |s| s.flip(SUPER_BLOCK as usize * BLOCK + 8),
        What::Superblock,
        &[],
    ),
    Row("second superblock", false, |s| s.flip(POOL_BYTES - BLOCK + 20), What::Superblock, &[]),
    Row(
        "first state lines",
        false,
        |s| s.image[STATE_BLOCK as usize * BLOCK..][..2 * LINE].fill(0),
        What::StateLine,
        &[],
    ),
    Row(
        "second state lines",
        false,
        |s| s.image[POOL_BYTES - BLOCK + STATE_COPY_OFFSET as usize..][..2 * LINE].fill(0),
        What::StateLine,
        &[],
    ),
    Row("checkpoint", true, |s| s.flip(s.state().checkpoint as usize * BLOCK + 8), What::Checkpoint, &[]),
    Row("log head", false, |s| s.flip(s.slot(FILE) + LOG_HEAD_OFFSET as usize + 1), What::LogHead, &[]),
    Row(
        "condemned log",
        false,
        |s| {
            let at = s.slot(FILE) + LOG_HEAD_OFFSET as usize;
            put64(&mut s.image[at..], 0, LOG_CONDEMNED);
        },
        What::LogCondemned,
        &[],
    ),
    Row("attribute record", false, |s| s.flip(s.record(FILE, Type::Attr, 2) + 40), What::LogRecord, &[FILE]),
    Row("write record", false, |s| s.flip(s.record(FILE, Type::Write, 0) + 40), What::LogRecord, &[FILE]),
    Row("last record", true, |s| s.flip(s.last(FILE, Type::Attr) + 40), What::LogRecord, &[FILE]),
    Row("segment head", false, |s| s.flip(s.record(FILE, Type::Segment, 0) + 20), What::LogSegment, &[]),
    Row("link", true, |s| s.flip(s.record(FILE, Type::Link, 0) + 20), What::LogSegment, &[]),
    Row("later link", true, |s| s.flip(s.record(FILE, Type::Link, 1) + 20), What::LogSegment, &[]),
    Row(
        "directory record",
        false,
        |s| s.flip(s.entry(DIR, INNER) + 40),
        What::LogRecord,
        &[DIR, INNER, DEEP],
    ),
    Row("root record", true, |s| s.flip(s.entry(Ino::ROOT, DIR) + 40), What::LogRecord, &[DIR]),
    Row(
        "directory segment",
        false,
        |s| s.flip(s.record(Ino::ROOT, Type::Segment, 0) + 20),
        What::LogSegment,
        &[],
    ),
    Row("slot of a file", false, |s| s.flip(s.slot(FILE) + 20), What::Slot, &[FILE]),
    Row("slot of a directory", false, |s| s.flip(s.slot(DIR) + 20), What::Slot, &[DIR]),
    Row("slot of the root", false, |s| s.flip(s.slot(Ino::ROOT) + 20), What::Slot, &[Ino::ROOT]),
    Row("slot of the table", false, |s| s.flip(s.slot(Ino(0)) + 20), What::Slot, &[]),
    Row("type of the table", false, |s| s.retype(Ino(0), libc::S_IFMT), What::Slot, &[]),
    Row("record of the table", false, |s| s.flip(s.slot(Ino(0)) + LINE + 40), What::Table, &[]),
    Row(
        "pages of the table that are not written",
        false,
        |s| {
            let at = s.record(Ino(TABLE_INO), Type::Write, 0);
            s.forge(Ino(TABLE_INO), at, |r| {
                let flags = get16(r, field::write::FLAGS);
                put16(r, field::write::FLAGS, flags | field::write::UNWRITTEN);
            });
        },
        What::Table,
        &[],
    ),
    Row("data block", false, |s| s.flip(page_of(&s.image, 0xb2) + 77), What::Data, &[FILE]),
    Row("attribute value", false, |s| s.flip(page_of(&s.image, 0x52) + 77), What::Value, &[FILE]),
    Row(
        "access list",
        false,
        |s| {
            let at = s.record(EMPTY, Type::Xattr, 0);
            s.forge(EMPTY, at, |r| {
                let value = field::xattr::NAME + r[field::xattr::NAME_LEN] as usize;
                let len = get32(r, field::xattr::VALUE_LEN) as usize;
                r[value + 4] = 99;
                let crc = crc32c(&r[value..value + len], 0);
                put32(r, field::xattr::CRC, crc);
            });
        },
        What::AccessList,
        &[EMPTY],
    ),
    Row("target", false, |s| s.flip(s.record(LINK, Type::Symlink, 0) + 22), What::Target, &[LINK]),
    Row(
        "size",
        false,
        |s| {
            let at = s.last(FILE, Type::Attr);
            s.forge(FILE, at, |r| put64(r, field::attr::SIZE, 10));
        },
        What::Size,
        &[FILE],
    ),
    Row(
        "size of no file",
        false,
        |s| {
            let at = s.last(FILE, Type::Attr);
            s.forge(FILE, at, |r| put64(r, field::attr::SIZE, 1 << 60));
        },
        What::Record,
        &[FILE],
    ),
    Row(
        "block outside the pool",
        false,
        |s| {
            let at = s.record(FILE, Type::Write, 0);
            s.forge(FILE, at, |r| put32(r, field::write::FIRST + 8, 1 << 30));
        },
        What::Record,
        &[FILE],
    ),
    Row(
        "block of two",
        false,
        |s| {
            let block = get32(&s.image[s.record(OTHER, Type::Write, 0)..], field::write::FIRST + 8);
            let at = s.record(FILE, Type::Write, 0);
            s.forge(FILE, at, |r| put32(r, field::write::FIRST + 8, block + 1));
        },
        What::BlockTwice,
        &[FILE],
    ),
    Row(
        "last record of the table",
        true,
        |s| s.forge_checkpoint(|words| words[3] += 1),
        What::LogRecord,
        &[],
    ),
    Row(
        "parts of a block in the checkpoint",
        true,
        |s| {
            s.forge_checkpoint(|words| {
                let run = first_run(words);
                let split = run + 2 * words[run - 1] as usize;
                assert!(words[split] > 0, "some log stands in a part of a block");
                words[split + 2] |= 0x100;
            })
        },
        What::Checkpoint,
        &[],
    ),
    Row(
        "lost block",
        true,
        |s| s.forge_checkpoint(|words| words[first_run(words) + 1] -= 1),
        What::BlockLost,
        &[],
    ),
    Row(
        "block that is free and used",
        true,
        |s| {
            s.forge_checkpoint(|words| {
                let run = first_run(words);
                (words[run], words[run + 1]) = (words[run] - 1, words[run + 1] + 1);
            })
        },
        What::BlockFree,
        &[],
    ),
    Row(
        "link count",
        true,
        |s| s.forge_checkpoint(|words| words[1 + 3 * OTHER.0 as usize] = 7),
        What::Links,
        &[],
    ),
    Row(
        "entry to nowhere",
        false,
        |s| {
            let at = s.slot(EMPTY);
            s.image[at..at + SLOT].fill(0);
        },
        What::Entry,
        &[EMPTY],
    ),
    Row(
        "entry of another generation",
        true,
        |s| {
            let at = s.entry(Ino::ROOT, EMPTY);
            s.forge(Ino::ROOT, at, |r| put64(r, field::add::GENERATION, 77));
        },
        What::Entry,
        &[EMPTY],
    ),
    Row(
        "entry of another type",
        false,
        |s| {
            let at = s.entry(Ino::ROOT, EMPTY);
            s.forge(Ino::ROOT, at, |r| r[field::add::KIND] = DT_DIR);
        },
        What::EntryType,
        &[],
    ),
    Row(
        "name twice",
        true,
        |s| {
            let at = s.entry(Ino::ROOT, EMPTY);
            s.forge(Ino::ROOT, at, |r| r[field::add::NAME..field::add::NAME + 5].copy_from_slice(b"other"));
        },
        What::EntryName,
        &[EMPTY, OTHER],
    ),
    Row(
        "two parents",
        false,
        |s| {
            let at = s.entry(INNER, DEEP);
            s.lead(INNER, at, DIR, DT_DIR);
        },
        What::TwoParents,
        &[DEEP],
    ),
    Row(
        "circle",
        true,
        |s| {
            let at = s.entry(INNER, DEEP);
            s.lead(INNER, at, DIR, DT_DIR);
            let at = s.entry(Ino::ROOT, DIR);
            s.lead(Ino::ROOT, at, EMPTY, 8);
        },
        What::Orphan,
        &[DIR, INNER, FILE, DEEP, EMPTY, OTHER],
    ),
];

/// Where the first free run of a checkpoint stands in its words.
fn first_run(words: &[u32]) -> usize {
    2 + 3 * words[0] as usize
}

/// Where a page of this content stands.
fn page_of(image: &[u8], fill: u8) -> usize {
    let page = |at: &usize| image[*at..*at + BLOCK].iter().all(|&b| b == fill);
    (0..image.len()).step_by(BLOCK).find(page).expect("the page is there")
}

/// What the files of the sample hold, by inode.
fn contents<M: Media>(fs: &F<M>) -> Vec<(Ino, Vec<u8>)> {
    let files = [FILE, OTHER, DEEP, EMPTY];
    files.into_iter().filter(|&ino| fs.getattr(ino).is_ok()).map(|ino| (ino, content(fs, ino))).collect()
}

/// Everything works: what is there can be read, changed and removed, and new things can be made.
fn use_it<M: Media>(fs: &F<M>, what: &str) {
    let cred = Cred::root();
    assert_eq!(fs.open_report().damaged, 0, "{what}");
    let mut queue = vec![(Ino::ROOT, Vec::<(Vec<u8>, Ino, bool)>::new())];
    let mut dirs = Vec::new();
    while let Some((dir, mut names)) = queue.pop() {
        fs.readdir(dir, 0, &mut |e| {
            if e.name != b"." && e.name != b".." {
                names.push((e.name.to_vec(), e.ino, e.kind == lodestone::fs::Kind::Directory));
            }
            true
        })
        .unwrap_or_else(|e| panic!("{what}: {e}"));
        queue.extend(names.iter().filter(|n| n.2).map(|n| (n.1, Vec::new())));
        dirs.push((dir, names));
    }
    for (dir, names) in dirs.iter().rev() {
        let new = create(fs, *dir, b"new");
        write(fs, new, 0, &[9; 30_000]);
        for (name, ino, is_dir) in names {
            fs.getattr(*ino).unwrap_or_else(|e| panic!("{what}: inode {}: {e}", ino.0));
            fs.setattr(&cred, *ino, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
            if !is_dir {
                fs.unlink(&cred, *dir, name).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
        }
        fs.unlink(&cred, *dir, b"new").unwrap();
        for (name, ..) in names.iter().filter(|n| n.2) {
            fs.rmdir(&cred, *dir, name).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
    }
    fs.sync().unwrap();
    let report = fs.check().unwrap();
    assert!(report.is_clean(), "{what}: in use: {:#?}", report.findings);
}

fn row(Row(name, needs_close, damage, wanted, changed): &Row, domain: Domain, closed: bool) {
    if *needs_close && !closed {
        return;
    }
    let what = format!("{name}, {domain:?}, {}", if closed { "closed" } else { "crashed" });
    let mut sample = Sample::new(domain, closed);
    let before = contents(&open(sample.image.clone(), domain));
    damage(&mut sample);
    let report = sample.report();
    let found: Vec<What> = report.findings.iter().map(|f| f.what).collect();
    assert!(found.contains(wanted), "{what}: {:#?}", report.findings);
    for finding in &report.findings {
        assert!(!finding.to_string().is_empty() && !finding.to_string().contains('\n'), "{what}");
    }

    // A look changes nothing.
    let media = sample.media();
    check::examine(media.clone(), false, None).unwrap();
    assert!(media.image() == sample.image, "{what}: a look changes it");

    let repaired = check::repair(media.clone(), false, None).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(repaired.found.findings.iter().any(|f| f.what == *wanted), "{what}: {:#?}", repaired.found);
    assert!(
        repaired.after.is_clean(),
        "{what}: {:#?}, left {:#?}",
        repaired.found.findings,
        repaired.after.findings
    );
    let image = media.image();
    let again = check::repair(media.clone(), false, None).unwrap();
    assert!(again.found.is_clean(), "{what}: a second repair finds {:#?}", again.found.findings);
    assert!(media.image() == image, "{what}: a second repair changes it");

    let fs = open(image, domain);
    assert!(fs.open_report().was_clean, "{what}");
    let after = contents(&fs);
    for kept in before.iter().filter(|(ino, _)| !changed.contains(ino)) {
        assert!(after.contains(kept), "{what}: inode {} changed", kept.0.0);
    }
    use_it(&fs, &what);
    fs.close().unwrap();
    let report = check::check(&SimMedia::new(fs.media().image(), domain)).unwrap();
    assert!(report.is_clean(), "{what}: {:#?}", report.findings);
}

/// Overwrites where data stand, without a record of their own: no checksum of what was there before holds.
#[test]
fn what_is_overwritten_is_no_damage() {
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        for data in [DataMode::Cow, DataMode::InPlace] {
            let made = MkfsOptions { data, ..MkfsOptions::default() };
            let fs =
                open(Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &made).unwrap().image(), domain);
            let f = create(&fs, Ino::ROOT, b"f");
            let cred = Cred::root();
            let mut rng = Rng::new(7);
            for n in 0..300u64 {
                match rng.below(12) {
                    0 => {
                        let size = rng.below(40_000);
                        fs.setattr(&cred, f, &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
                    }
                    1 => {
                        let mode = [
                            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                            libc::FALLOC_FL_ZERO_RANGE,
                            libc::FALLOC_FL_KEEP_SIZE,
                        ][rng.below(3) as usize];
                        fs.fallocate(&cred, f, mode, rng.below(40_000), 1 + rng.below(20_000)).unwrap();
                    }
                    2 => {
                        fs.setxattr(&cred, f, b"user.a", &vec![n as u8; rng.below(5000) as usize], 0).unwrap()
                    }
                    3 => fs.tick().unwrap(),
                    kind => {
                        let most = [10, 900, 6000, 30_000][kind as usize % 4];
                        let bytes = vec![n as u8; 1 + rng.below(most) as usize];
                        write(&fs, f, rng.below(40_000), &bytes);
                    }
                }
                if n % 10 == 0 {
                    let report = fs.check().unwrap();
                    assert!(report.is_clean(), "{domain:?} {data:?} {n}: {:#?}", report.findings);
                }
            }
            let media = Arc::new(SimMedia::new(fs.media().image(), domain));
            let report = check::examine(media, true, None).unwrap();
            assert!(report.is_clean(), "{domain:?} {data:?}, crashed: {:#?}", report.findings);
            fs.close().unwrap();
            let report = check::check(fs.media()).unwrap();
            assert!(report.is_clean(), "{domain:?} {data:?}, closed: {:#?}", report.findings);
        }
    }
}

/// The crash simulator checks each state it makes.
#[test]
fn a_small_pool_is_checked_in_no_time() {
    let sample = Sample::new(Domain::Memory, false);
    let fs = open(sample.image, Domain::Memory);
    let begun = std::time::Instant::now();
    let mut checks = 0;
    while begun.elapsed().as_millis() < 300 {
        assert!(fs.check().unwrap().is_clean());
        checks += 1;
    }
    println!("{checks} checks in {:?}", begun.elapsed());
    // A hundredth of what it does on an idle machine.
    assert!(checks > 20, "{checks} checks in 300 ms");
}

#[test]
fn each_kind_of_damage_is_found_and_mended() {
    let mut failed = Vec::new();
    for r in ROWS {
        for domain in [Domain::Memory, Domain::PageCache] {
            for closed in [true, false] {
                if std::panic::catch_unwind(|| row(r, domain, closed)).is_err() {
                    failed.push((r.0, domain, closed));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Blocks of logs go from hand to hand: what stands first in the pool is not what a log begins with.
#[test]
fn a_log_whose_head_is_lost_begins_where_it_did() {
    for (domain, closed) in
        [Domain::Memory, Domain::PageCache].into_iter().flat_map(|d| [(d, true), (d, false)])
    {
        let fs = open(Sample::new(domain, true).image, domain);
        (0..40).for_each(|n| _ = create(&fs, DIR, format!("kept{n}").as_bytes()));
        let is_out_of_order = |image: &[u8]| {
            let segments = records_from(image, slot_of(DIR)).into_iter().filter(|r| r.1 == Type::Segment);
            let segments: Vec<usize> = segments.map(|r| r.0).collect();
            segments.len() > 2 && segments[1..].iter().any(|at| *at < segments[0])
        };
        let mut names = 0;
        while !is_out_of_order(&fs.media().image()) {
            assert!(names < 10_000, "{domain:?}: its log is never out of order");
            create(&fs, DIR, b"passing");
            fs.unlink(&Cred::root(), DIR, b"passing").unwrap();
            names += 1;
            if names % 20 == 0 {
                fs.sync().unwrap();
                fs.tick().unwrap();
            }
        }
        if closed {
            fs.close().unwrap();
        }
        let mut image = fs.media().image();
        let wanted = walk(&open(image.clone(), domain));
        assert!(is_out_of_order(&image), "{domain:?}");
        image[slot_of(DIR) + LOG_HEAD_OFFSET as usize + 1] ^= 0x55;
        let media = Arc::new(SimMedia::new(image, domain));
        let repaired = check::repair(media.clone(), false, None).unwrap();
        assert!(repaired.found.findings.iter().any(|f| f.what == What::LogHead), "{:#?}", repaired.found);
        assert!(repaired.after.is_clean(), "{:#?}", repaired.after.findings);
        let is = walk(&open(media.image(), domain));
        assert!(is == wanted, "{domain:?}, closed {closed}: {} of {} are there", is.len(), wanted.len());
    }
}

/// What was appended since a recovery is of another incarnation than what stands in front: it is damage all the same that the seal
/// between them does not validate, and no end of the log.
#[test]
fn a_damaged_seal_is_no_end_of_a_log() {
    for (domain, closed) in
        [Domain::Memory, Domain::PageCache].into_iter().flat_map(|d| [(d, true), (d, false)])
    {
        let fs = open(Sample::new(domain, false).image, domain);
        chmod(&fs, FILE, 0o700);
        write(&fs, FILE, 2 * BLOCK as u64, &[0xc3; BLOCK]);
        (0..3).for_each(|_| fs.sync().unwrap());
        fs.tick().unwrap();
        let wanted = contents(&fs);
        if closed {
            fs.close().unwrap();
        }
        let damages: [fn(&mut [u8]); 2] = [|line| line[field::seal::INCARNATION] ^= 2, |line| line.fill(0)];
        for damage in damages {
            let mut sample = Sample::of(fs.media().image(), domain);
            let seal = sample.last(FILE, Type::Seal);
            damage(&mut sample.image[seal..seal + LINE]);
            let what = format!("{domain:?}, closed {closed}");
            let opened = open(sample.image.clone(), domain);
            assert_eq!(
                opened.getattr(FILE).map(|a| a.mode).map_err(|e| e.errno()),
                Err(libc::EUCLEAN),
                "{what}"
            );
            let found = sample.report();
            assert!(found.findings.iter().any(|f| f.ino == Some(FILE.0)), "{what}: {:#?}", found.findings);
            let media = sample.media();
            let repaired = check::repair(media.clone(), false, None).unwrap();
            assert!(repaired.after.is_clean(), "{what}: {:#?}", repaired.after.findings);
            let fs = open(media.image(), domain);
            assert_eq!(fs.getattr(FILE).unwrap().mode & 0o7777, 0o700, "{what}");
            assert_eq!(contents(&fs), wanted, "{what}");
        }
    }
}

#[test]
fn what_a_damaged_directory_named_is_found_again() {
    let mut sample = Sample::new(Domain::Memory, true);
    let at = sample.entry(Ino::ROOT, DIR);
    sample.flip(at + 40);
    let media = sample.media();
    let repaired = check::repair(media.clone(), false, None).unwrap();
    assert!(repaired.found.findings.iter().any(|f| f.what == What::Orphan), "{:#?}", repaired.found);
    assert!(check::check(&*media).unwrap().clean, "it is left closed");
    let fs = open(media.image(), Domain::Memory);
    let found = fs.lookup(&Cred::root(), Ino::ROOT, b"lost+found").expect("lost+found is there").ino;
    assert_eq!(find(&fs, found, b"#2"), Some(DIR));
    assert_eq!(find(&fs, DIR, b"file"), Some(FILE));
    assert_eq!(find(&fs, Ino::ROOT, b"other"), Some(OTHER));
    assert!(content(&fs, OTHER) == other_bytes());
    assert_eq!(fs.getattr(OTHER).unwrap().nlink, 2);
}

/// A file was removed, another one got its blocks, and both lines of that are lost: the removed one has a name again, the other
/// none. Of those blocks it can be told whose they are.
#[test]
fn a_file_whose_blocks_a_removed_one_seems_to_have_is_found_again() {
    let first = [0xd1; 8 * BLOCK];
    let second: Vec<u8> = (0..8 * BLOCK as u32).map(|n| (n * 5 / 4) as u8).collect();
    for second_is_removed in [false, true] {
        let fresh =
            Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], Domain::Memory), &MkfsOptions::default()).unwrap();
        let fs = open(fresh.image(), Domain::Memory);
        let cred = Cred::root();
        let [a, b] = [b"a", b"b"].map(|name| mkdir(&fs, Ino::ROOT, name));
        let removed = create(&fs, a, b"removed");
        let lost = create(&fs, b, b"lost");
        write(&fs, removed, 0, &first);
        // All but what these have.
        let filler = create(&fs, Ino::ROOT, b"filler");
        let mut filled = 0;
        while fs.write(&cred, filler, filled, &[0xf1; BLOCK], false).is_ok() {
            filled += BLOCK as u64;
        }
        let room = SetAttr { size: Some(filled - 8 * BLOCK as u64), ..SetAttr::default() };
        fs.unlink(&cred, a, b"removed").unwrap();
        fs.tick().unwrap();
        write(&fs, lost, 0, &second);
        fs.setattr(&cred, filler, &room).unwrap();
        chmod(&fs, a, 0o711);
        chmod(&fs, b, 0o711);
        if second_is_removed {
            fs.unlink(&cred, b, b"lost").unwrap();
            chmod(&fs, b, 0o700);
        }
        // What is damaged before that is damage, and no end of a log.
        (0..3).for_each(|_| fs.tick().unwrap());
        let mut sample = Sample::of(fs.media().image(), Domain::Memory);
        let lines = [sample.last(a, Type::Remove), sample.entry(b, lost)];
        lines.into_iter().for_each(|at| sample.flip(at + 20));
        let media = sample.media();
        let repaired = check::repair(media.clone(), false, None).unwrap();
        assert!(repaired.after.is_clean(), "{:#?}", repaired.after);
        let fs = open(media.image(), Domain::Memory);
        let found = find(&fs, Ino::ROOT, b"lost+found")
            .and_then(|dir| find(&fs, dir, format!("#{}", lost.0).as_bytes()));
        if second_is_removed {
            assert_eq!(found, None, "{:#?}", repaired.found.findings);
            continue;
        }
        assert_eq!(found, Some(lost), "{:#?}", repaired.found.findings);
        assert!(content(&fs, lost) == second);
        // Its own content as far as nobody got its blocks, and nothing of somebody else's.
        let again = find(&fs, a, b"removed").expect("no line says that it went");
        let left = content(&fs, again);
        assert!(left.chunks(BLOCK).all(|block| block == [0xd1; BLOCK] || block == [0; BLOCK]));
        assert!(left.contains(&0), "nothing of it went to the other");
        assert_eq!(content(&fs, filler).len() as u64, filled - 8 * BLOCK as u64);
    }
}

/// That the inode table is written again as well, for a slot that cannot be read, says nothing of blocks that others have.
#[test]
fn a_damaged_file_keeps_the_block_that_its_checksum_proves() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for rewrites_table in [false, true] {
            let mut sample = Sample::new(domain, true);
            let wanted = content(&open(sample.image.clone(), domain), FILE);
            let block = get32(&sample.image[sample.record(FILE, Type::Write, 1)..], field::write::FIRST + 8);
            let at = sample.record(DEEP, Type::Write, 0);
            sample.forge(DEEP, at, |r| put32(r, field::write::FIRST + 8, block));
            let lost = sample.record(FILE, Type::Attr, 2);
            sample.flip(lost + 40);
            let media = sample.media();
            if rewrites_table {
                let slot = sample.slot(Ino(FILE.0 + 40));
                media.poison(slot..slot + LINE);
            }
            let repaired = check::repair(media.clone(), false, None).unwrap();
            let what = format!("{domain:?}, {rewrites_table}: {:#?}", repaired.found.findings);
            assert!(repaired.found.findings.iter().any(|f| f.what == What::BlockTwice), "{what}");
            assert!(repaired.after.is_clean(), "{what}: left {:#?}", repaired.after.findings);
            assert!(content(&Fs::open(media, &options()).unwrap(), FILE) == wanted, "{what}");
        }
    }
}

/// Its bytes stand in their record; in place they need not be durable.
#[test]
fn a_small_overwrite_of_a_file_that_is_damaged_outlives_a_power_loss() {
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        let fs = open(Sample::new(domain, true).image, domain);
        write(&fs, FILE, 100, &[0xe7; 50]);
        fs.fsync(FILE, false).unwrap();
        let mut sample = Sample::of(fs.media().crash_point().image(Keep::Nothing), domain);
        let damaged = sample.record(FILE, Type::Attr, 2);
        sample.flip(damaged + 40);
        let media = sample.media();
        let repaired = check::repair(media.clone(), true, None).unwrap();
        assert!(!repaired.found.is_clean() && repaired.after.is_clean(), "{domain:?}: {:#?}", repaired.found);
        let fs = open(media.image(), domain);
        assert_eq!(content(&fs, FILE)[90..160], [[0xa1; 10].as_slice(), &[0xe7; 50], &[0xa1; 10]].concat());
    }
}

/// On an ordinary file, after a power loss: recovery gives up for damage elsewhere, and the repair has to tell by
/// itself that both halves of a rename are there, though one stands in a directory that is gone.
#[test]
fn a_rename_stays_when_its_directory_was_removed_and_another_is_damaged() {
    let fresh =
        Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache), &MkfsOptions::default()).unwrap();
    let fs = open(fresh.image(), Domain::PageCache);
    let cred = Cred::root();
    let [a, b, damaged] = [b"a", b"b", b"d"].map(|name| mkdir(&fs, Ino::ROOT, name));
    let file = create(&fs, a, b"file");
    create(&fs, damaged, b"one");
    create(&fs, damaged, b"two");
    write(&fs, file, 0, b"kept");
    (0..3).for_each(|_| fs.sync().unwrap());
    fs.rename(&cred, a, b"file", b, b"file", 0).unwrap();
    fs.rmdir(&cred, Ino::ROOT, b"a").unwrap();
    fs.forget(a, 1);
    fs.sync().unwrap();
    let media = fs.media().crash_point().media(Keep::Nothing);
    let mut sample = Sample::of(media.image(), Domain::PageCache);
    let record = sample.record(damaged, Type::Add, 0);
    sample.flip(record + 40);
    let media = sample.media();
    let repaired = check::repair(media.clone(), true, None).unwrap();
    let fs = open(media.image(), Domain::PageCache);
    assert_eq!(find(&fs, b, b"file"), Some(file), "{:#?}", repaired.found.findings);
    assert_eq!(content(&fs, file), b"kept");
}

/// Of many findings far below the root: each says its path, and none takes more memory than the kernel's longest.
#[test]
fn of_a_path_that_is_too_long_a_finding_says_the_end() {
    let fs = open(Sample::new(Domain::Memory, true).image, Domain::Memory);
    let mut dir = DIR;
    for _ in 0..40 {
        dir = mkdir(&fs, dir, &[b'd'; 200]);
    }
    let file = create(&fs, dir, b"far");
    write(&fs, file, 0, &[0xc9; BLOCK]);
    fs.close().unwrap();
    let mut sample = Sample::of(fs.media().image(), Domain::Memory);
    for fill in [0xc9, 0xb2] {
        let at = page_of(&sample.image, fill);
        sample.flip(at + 77);
    }
    let report = sample.report();
    let path =
        |ino: Ino| report.findings.iter().find(|f| f.ino == Some(ino.0)).unwrap().path.clone().unwrap();
    assert_eq!(path(FILE), b"/dir/file");
    let far = path(file);
    assert!(far.starts_with(b".../ddd") && far.ends_with(b"ddd/far"), "{}", far.escape_ascii());
    assert!((3800..4100).contains(&far.len()), "{} bytes", far.len());
}

/// Directories lock what their entries lead to: never themselves, nor what they lie in.
#[test]
fn an_entry_that_leads_to_its_own_directory_is_followed_into_no_lock() {
    for (to, kind) in [(DIR, DT_DIR), (Ino::ROOT, 8), (Ino::ROOT, DT_DIR), (INNER, 8)] {
        let mut sample = Sample::new(Domain::Memory, true);
        let entry = sample.entry(DIR, FILE);
        sample.lead(DIR, entry, to, kind);
        let fs = open(sample.image.clone(), Domain::Memory);
        let cred = Cred::root();
        let is_refused = |what: &str, done: lodestone::Result<()>| {
            assert_eq!(
                done.map_err(|e| e.errno()),
                Err(libc::EUCLEAN),
                "{what} of an entry that leads to {to:?}"
            );
        };
        is_refused("lookup", fs.lookup(&cred, DIR, b"file").map(drop));
        is_refused("unlink", fs.unlink(&cred, DIR, b"file"));
        is_refused("rmdir", fs.rmdir(&cred, DIR, b"file"));
        is_refused("rename", fs.rename(&cred, DIR, b"file", DIR, b"moved", 0));
        fs.rename(&cred, DIR, b"file", Ino::ROOT, b"moved", 0).unwrap_err();
        // Two names of one inode are no rename.
        if to != INNER {
            is_refused("rename over it", fs.rename(&cred, DIR, b"inner", DIR, b"file", 0));
        }
        let mut listed = 0;
        fs.readdir_plus(DIR, 0, &mut |entry, attr| {
            listed += 1;
            assert!(entry.name != b"file" || attr.is_none());
            true
        })
        .unwrap();
        assert_eq!(listed, 4);
    }
}

#[test]
fn a_pool_without_a_superblock_cannot_be_checked() {
    let mut sample = Sample::new(Domain::Memory, true);
    sample.flip(SUPER_BLOCK as usize * BLOCK + 20);
    sample.flip(POOL_BYTES - BLOCK + 20);
    let e = check::examine(sample.media(), false, None).unwrap_err();
    assert_eq!(e.errno(), libc::EUCLEAN);
    assert!(check::repair(sample.media(), false, None).is_err());
}

#[test]
fn what_is_malformed_is_shown_as_such() {
    let mut sample = Sample::new(Domain::Memory, true);
    let at = sample.last(EMPTY, Type::Xattr);
    sample.forge(EMPTY, at, |r| r[field::xattr::NAME_LEN] = 255);
    let fs = open(sample.image, Domain::Memory);
    assert!(fs.dump_inode(EMPTY).unwrap().contains("attribute (malformed)"));
}

#[test]
fn unreadable_media_cost_what_stood_there() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for closed in [true, false] {
            let sample = Sample::new(domain, closed);
            let page = page_of(&sample.image, 0xb2);
            let whole = open(sample.image.clone(), domain);
            let (names, before) = (names_of(&walk(&whole)), contents(&whole));
            for (what, at) in [
                ("data", page + 3 * LINE),
                ("value", page_of(&sample.image, 0x52)),
                ("log", sample.record(FILE, Type::Attr, 2)),
                ("directory", sample.entry(DIR, FILE)),
                ("slot", sample.slot(Ino(FILE.0 + 40))),
                ("name's slot", sample.slot(FILE)),
                ("name's slot, of a directory", sample.slot(DIR)),
                ("name's slot, of the root", sample.slot(Ino::ROOT)),
            ] {
                let what = format!("{what} {domain:?} {closed}");
                let media = sample.media();
                media.poison(at..at + LINE);
                let report = check::examine(media.clone(), false, None).unwrap();
                if !what.starts_with("slot") {
                    assert!(!report.is_clean(), "{what}");
                }
                let repaired = check::repair(media.clone(), false, None).unwrap();
                assert!(repaired.after.is_clean(), "{what}: {:#?}", repaired.after.findings);
                let fs = Fs::open(media, &options()).unwrap();
                assert!(content(&fs, OTHER) == other_bytes(), "{what}");
                if what.starts_with("name's slot") {
                    assert_eq!(names_of(&walk(&fs)), names, "{what}: {:#?}", repaired.found.findings);
                    assert!(contents(&fs) == before, "{what}: {:#?}", repaired.found.findings);
                }
                if what.starts_with("data") {
                    let ranges: Vec<_> = repaired.found.findings.iter().filter_map(|f| f.bytes).collect();
                    let lost = (BLOCK + 3 * LINE) as u64;
                    assert!(ranges.contains(&(lost, lost + LINE as u64)), "{what}: {ranges:?}");
                    let mut bytes = vec![0xb2; BLOCK];
                    bytes[3 * LINE..4 * LINE].fill(0);
                    assert!(content(&fs, FILE)[BLOCK..] == bytes, "{what}");
                }
                // What failed is not used again.
                if !what.starts_with("slot") {
                    assert_eq!(fs.bad_blocks(), 1, "{what}");
                    use_it(&fs, &what);
                }
            }
        }
    }
}

#[test]
fn a_whole_pool_is_clean() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for closed in [true, false] {
            let sample = Sample::new(domain, closed);
            let report = sample.report();
            assert!(report.is_clean(), "{domain:?} {closed}: {:#?}", report.findings);
            assert_eq!((report.directories, report.files, report.clean), (3, 5, closed));
            assert!(report.bytes_verified > 8000, "{}", report.bytes_verified);
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// A pool that was used for a while: logs cleaned and swept, blocks gone from hand to hand. `crammed`: the names that went
/// were withdrawn.
fn aged(domain: Domain, closed: bool, crammed: bool) -> Vec<u8> {
    let sample = Sample::new(domain, true);
    let fs = open(sample.image, domain);
    if crammed {
        fs.media().cram();
    }
    let cred = Cred::root();
    for n in 0..500u32 {
        chmod(&fs, FILE, 0o600 | (n % 64));
        write(&fs, OTHER, (n as u64 * 37 % 5) * BLOCK as u64, &[n as u8; 700]);
        write(&fs, OTHER, (n as u64 * 11 % 5) * BLOCK as u64, &[n as u8; BLOCK]);
        let name = format!("n{}", n % 9);
        let new = create(&fs, DIR, name.as_bytes());
        write(&fs, new, 0, &[n as u8; 5000]);
        if n % 3 == 0 {
            fs.rename(&cred, DIR, name.as_bytes(), INNER, name.as_bytes(), 0).unwrap();
            fs.unlink(&cred, INNER, name.as_bytes()).unwrap();
        } else {
            fs.unlink(&cred, DIR, name.as_bytes()).unwrap();
        }
        if n % 50 == 0 {
            fs.sync().unwrap();
            fs.tick().unwrap();
        }
    }
    if closed {
        fs.close().unwrap();
    }
    fs.media().image()
}

/// Damages an image in some places; how many.
fn scatter(image: &mut [u8], rng: &mut Rng) -> u64 {
    let lines: Vec<usize> =
        (0..image.len()).step_by(LINE).filter(|&at| image[at..at + LINE].iter().any(|&b| b != 0)).collect();
    let most = if rng.below(2) == 0 { 4 } else { 64 };
    let flips = 1 + rng.below(most);
    for _ in 0..flips {
        // Mostly where something stands.
        let line = match rng.below(20) {
            0 => rng.below((image.len() / LINE) as u64) as usize * LINE,
            _ => lines[rng.below(lines.len() as u64) as usize],
        };
        match rng.below(8) {
            0..=3 => image[line + rng.below(LINE as u64) as usize] ^= 1 << rng.below(8),
            4 => put64(image, line + 8 * rng.below(8) as usize, rng.draw()),
            5 => image[line..line + LINE].fill(0),
            // A line that stood elsewhere, or there before.
            6 => {
                let from = lines[rng.below(lines.len() as u64) as usize];
                image.copy_within(from..from + LINE, line);
            }
            _ => {
                let block = line / BLOCK * BLOCK;
                if rng.below(4) == 0 && !(1..3).contains(&(block / BLOCK)) {
                    image[block..block + BLOCK].fill(rng.draw() as u8);
                }
            }
        }
    }
    flips
}

/// All regular files that can be read, with what they hold.
fn readable<M: Media>(fs: &F<M>) -> Vec<(Ino, Vec<u8>)> {
    let mut found = Vec::new();
    for ino in (2..1024).map(Ino) {
        let Ok(attr) = fs.getattr(ino) else { continue };
        if attr.kind() != lodestone::fs::Kind::File || attr.size > 4 << 20 {
            continue;
        }
        let mut bytes = vec![0; attr.size as usize];
        if fs.read(ino, 0, &mut bytes).is_ok_and(|n| n == bytes.len()) {
            found.push((ino, bytes));
        }
    }
    found
}

/// Takes all space that there is for new files: what was there before must be as it was.
fn fill<M: Media>(fs: &F<M>, what: &str) {
    let before = readable(fs);
    let cred = Cred::root();
    for n in 0..40 {
        let name = format!("fill{n}");
        let Ok((attr, _)) = fs.create(&cred, Ino::ROOT, name.as_bytes(), 0o644, 0, 0) else { break };
        fs.forget(attr.ino, 2);
        if fs.write(&cred, attr.ino, 0, &[0xee; 16 * BLOCK], false).is_err() {
            break;
        }
        for m in 0..4 {
            let set = SetAttr { mode: Some(0o600 | m), ..SetAttr::default() };
            let _ = fs.setattr(&cred, attr.ino, &set);
        }
    }
    let after = readable(fs);
    for file in &before {
        assert!(after.contains(file), "{what}: inode {} changed when others were written", file.0.0);
    }
}

#[test]
fn whatever_is_flipped_nothing_breaks_that_was_whole() {
    let (first, wanted) = (setting("LODE_FSCK_SEED", 1), setting("LODE_FSCK_FLIPS", 20_000));
    let domains = [Domain::Memory, Domain::PageCache];
    let images: Vec<(Domain, Vec<u8>)> = domains
        .iter()
        .flat_map(|&d| [true, false].map(|closed| (d, closed)))
        .flat_map(|(d, closed)| {
            let aged = [false, true].map(|crammed| (d, aged(d, closed, crammed)));
            let others =
                [Sample::new(d, closed).image, tall(d, closed, POOL_BYTES / 2, 300)].map(|image| (d, image));
            others.into_iter().chain(aged)
        })
        .chain(domains.map(|d| {
            let media = SimMedia::new(vec![0; POOL_BYTES], d);
            (d, Fs::mkfs(media, &MkfsOptions::default()).unwrap().image())
        }))
        .collect();
    let (mut flips, mut mended, mut left, mut refused) = (0, 0, 0, 0);
    let mut seed = first;
    while flips < wanted {
        let what = format!("LODE_FSCK_SEED={seed}");
        let mut rng = Rng::new(seed);
        seed += 1;
        let (domain, whole) = &images[rng.below(images.len() as u64) as usize];
        let mut image = whole.clone();
        flips += scatter(&mut image, &mut rng);
        let begun = std::time::Instant::now();
        // As somebody would who notices nothing.
        if let Ok(fs) = Fs::open(SimMedia::new(image.clone(), *domain), &options()) {
            fill(&fs, &format!("{what}, mounted"));
            let _ = fs.close();
        }
        let media = Arc::new(SimMedia::new(image.clone(), *domain));
        let looked = check::examine(media.clone(), false, None);
        assert!(media.image() == image, "{what}: a look changes it");
        let repaired = match check::repair(media.clone(), false, None) {
            Ok(repaired) => repaired,
            Err(e) => {
                assert!(!e.to_string().is_empty(), "{what}");
                refused += 1;
                continue;
            }
        };
        if let Ok(looked) = looked {
            assert_eq!(looked.is_clean(), repaired.found.is_clean(), "{what}: a look and a repair differ");
        }
        if repaired.after.is_clean() {
            mended += 1;
            let fs = Fs::open(media, &options()).unwrap_or_else(|e| panic!("{what}: repaired, but {e}"));
            assert!(fs.open_report().was_clean, "{what}: it is left open");
            fill(&fs, &format!("{what}, repaired"));
            let report = fs.check().unwrap();
            assert!(report.is_clean(), "{what}: {:#?}", report.findings);
        } else {
            left += 1;
            eprintln!("{what}: left: {}", repaired.after.findings[0]);
        }
        assert!(begun.elapsed().as_secs() < 30, "{what}: it takes too long");
    }
    println!("{flips} flips in {} images: {mended} mended, {left} in part, {refused} refused", seed - first);
    assert!(mended > (seed - first) / 2, "most can be mended");
}

/// Loads and stores of a whole pool whose block `at` failed work everywhere else, and go on to.
fn goes_on(media: Arc<SimMedia>, what: &str) {
    for closes in [true, false, true] {
        let fs = Fs::open(media.clone(), &options()).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(fs.bad_blocks(), 1, "{what}");
        assert!(content(&fs, OTHER) == other_bytes(), "{what}");
        fill(&fs, what);
        for n in 0..40 {
            let _ = fs.unlink(&Cred::root(), Ino::ROOT, format!("fill{n}").as_bytes());
        }
        let report = fs.check().unwrap();
        assert!(report.is_clean(), "{what}: {:#?}", report.findings);
        if closes {
            fs.close().unwrap();
        }
        drop(fs);
        assert_eq!(Fs::probe(&media).unwrap().bad_blocks, 1, "{what}");
        assert_eq!(check::examine(media.clone(), false, None).unwrap().blocks_bad, 1, "{what}");
    }
}

#[test]
fn a_block_that_fails_is_not_used_again() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for stores in [false, true] {
            let what = format!("{domain:?}, {}", if stores { "store" } else { "load" });
            let sample = Sample::new(domain, true);
            let media = sample.media();
            let fs = Fs::open(media.clone(), &options()).unwrap();
            let cred = Cred::root();
            if stores {
                // The block freed last is the next one taken.
                let free = create(&fs, Ino::ROOT, b"passing");
                write(&fs, free, 0, &[0xc7; BLOCK]);
                let at = page_of(&media.image(), 0xc7);
                fs.unlink(&cred, Ino::ROOT, b"passing").unwrap();
                (0..3).for_each(|_| fs.sync().unwrap());
                media.poison(at..at + BLOCK);
                let new = create(&fs, Ino::ROOT, b"new");
                let mut failed = 0;
                for n in 0..400 {
                    match fs.write(&cred, new, n * BLOCK as u64, &[1; BLOCK], false) {
                        Ok(_) => {}
                        Err(e) if e.errno() == libc::EIO => failed += 1,
                        Err(e) => {
                            assert_eq!(e.errno(), libc::ENOSPC, "{what}: {e}");
                            break;
                        }
                    }
                }
                assert_eq!(failed, 1, "{what}: one call fails, and only one");
                fs.unlink(&cred, Ino::ROOT, b"new").unwrap();
            } else {
                let at = page_of(&sample.image, 0xa1);
                media.poison(at..at + LINE);
                let mut bytes = [0; 2 * BLOCK];
                let read = fs.read(FILE, 0, &mut bytes).map_err(|e| e.errno());
                assert_eq!(read, Err(libc::EIO), "{what}");
                assert_eq!(
                    fs.read(FILE, BLOCK as u64, &mut bytes).unwrap(),
                    BLOCK,
                    "{what}: the rest is there"
                );
                fs.unlink(&cred, DIR, b"file").unwrap();
            }
            fs.tick().unwrap();
            drop(fs);
            goes_on(media, &what);
        }
    }
}

/// One bad line of the inode table costs one call, not every file that is made from then on.
#[test]
fn a_slot_that_fails_is_not_used_again() {
    let sample = Sample::new(Domain::Memory, true);
    let media = sample.media();
    for closes in [true, false, true] {
        let fs = Fs::open(media.clone(), &options()).unwrap();
        if !closes {
            // The slot freed last is the next one taken.
            let passing = create(&fs, Ino::ROOT, b"passing");
            fs.unlink(&Cred::root(), Ino::ROOT, b"passing").unwrap();
            let slot = sample.slot(passing);
            media.poison(slot..slot + LINE);
        }
        let mut failed = 0;
        for n in 0..40 {
            let name = format!("new{n} {closes}");
            match fs.create(&Cred::root(), Ino::ROOT, name.as_bytes(), 0o644, 0, 0) {
                Ok((attr, _)) => fs.forget(attr.ino, 2),
                Err(e) => {
                    assert_eq!(e.errno(), libc::EIO, "{e}");
                    failed += 1;
                }
            }
            let _ = fs.unlink(&Cred::root(), Ino::ROOT, name.as_bytes());
        }
        assert!(failed <= 1, "{failed} calls failed");
        fs.tick().unwrap();
        if closes {
            fs.close().unwrap();
        }
    }
}

#[test]
fn what_was_acknowledged_and_cannot_be_read_is_no_silent_loss() {
    let sample = Sample::new(Domain::Memory, true);
    let fs = open(sample.image, Domain::Memory);
    write(&fs, FILE, 0, &[0xd9; BLOCK]);
    let image = fs.media().image();
    let at = page_of(&image, 0xd9);
    let media = SimMedia::new(image, Domain::Memory);
    media.poison(at..at + LINE);
    let fs = Fs::open(media, &options()).unwrap();
    let mut bytes = [0; BLOCK];
    let read = fs.read(FILE, 0, &mut bytes).map_err(|e| e.errno());
    assert_eq!(read, Err(libc::EIO), "the older content came back without a word");
    assert_eq!(fs.bad_blocks(), 1);
}

/// The inode table grows and gives its end back, many times: its log is cleaned, what it says of bad blocks stays.
#[test]
fn the_log_of_the_inode_table_is_cleaned() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = open(Sample::new(domain, true).image, domain);
        write(&fs, FILE, 0, &[0xd9; BLOCK]);
        fs.close().unwrap();
        let image = fs.media().image();
        let at = page_of(&image, 0xd9);
        let media = SimMedia::new(image, domain);
        media.poison(at..at + LINE);
        let mut fs = Fs::open(media, &options()).unwrap();
        assert!(fs.read(FILE, 0, &mut [0; BLOCK]).is_err());
        fs.tick().unwrap();
        assert_eq!(fs.bad_blocks(), 1);
        let mut free = 0;
        for round in 0..250 {
            let name = |n: u32| format!("n{n}");
            for n in 0..300 {
                let made =
                    fs.mknod(&Cred::root(), Ino::ROOT, name(n).as_bytes(), libc::S_IFIFO, 0, 0).unwrap();
                fs.forget(made.ino, 1);
            }
            (0..300).for_each(|n| fs.unlink(&Cred::root(), Ino::ROOT, name(n).as_bytes()).unwrap());
            let what = format!("{domain}, round {round}");
            // A process that is killed gives nothing back; the next one does.
            if round % 3 != 1 {
                fs.close().unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            let media = fs.abandon().unwrap();
            fs = Fs::open(media, &options()).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(fs.bad_blocks(), 1, "{what}");
            if round % 3 == 0 {
                let report = fs.check().unwrap();
                assert!(report.is_clean(), "{what}: {:#?}", report.findings);
                let now = fs.statfs().blocks_free;
                free = if round == 0 { now } else { free };
                assert!(now + 16 >= free, "{what}: {now} blocks are free, of {free}");
            }
        }
    }
}

/// One kind for each way of mending.
const DAMAGE: [(&str, Damage); 3] = [
    ("directory", |s| s.flip(s.entry(Ino::ROOT, DIR) + 40)),
    ("file", |s| s.flip(s.record(FILE, Type::Attr, 2) + 40)),
    ("slot", |s| s.flip(s.slot(FILE) + 20)),
];

/// What shows only by what the close wrote down.
const DAMAGE_OF_CLOSED: [(&str, Damage); 2] = [
    ("link", |s| s.flip(s.record(FILE, Type::Link, 0) + 20)),
    ("last record", |s| s.flip(s.last(FILE, Type::Attr) + 40)),
];

/// Whoever asks what a pool is, and not only who opens it, is told that it was cut: what it says stands behind its end.
#[test]
fn a_pool_that_was_cut_says_so() {
    let whole = tall(Domain::Memory, true, POOL_BYTES / 2, 300);
    let behind = table_records(&whole).iter().map(|r| r.0 / BLOCK).max().expect("it has grown");
    for blocks in [behind, POOL_BYTES / 2 / BLOCK - 1] {
        let media = SimMedia::new(whole[..blocks * BLOCK].to_vec(), Domain::Memory);
        let told = [
            Fs::probe(&media).map(drop),
            check::check(&media).map(drop),
            Fs::open(media, &options()).map(drop),
        ];
        for e in told.map(|told| told.expect_err("it is cut")) {
            assert_eq!(e.errno(), libc::EUCLEAN, "{e}");
            assert!(e.to_string().contains("cut short"), "{e}");
        }
    }
}

/// Cuts a repair short at each of its fences and flushes: the next one ends it, and finds all that there is.
fn cut_short<T: PartialEq + std::fmt::Debug>(
    what: &str,
    image: Vec<u8>,
    domain: Domain,
    kept: impl Fn(&F) -> T,
) {
    cut_short_on(what, SimMedia::new(image, domain), domain, kept)
}

/// The same of media of which parts may be bad; where the repair was cut short they are not any more.
fn cut_short_on<T: PartialEq + std::fmt::Debug>(
    what: &str,
    media: SimMedia,
    domain: Domain,
    kept: impl Fn(&F) -> T,
) {
    let what = format!("{what} {domain:?}");
    let media = Arc::new(media);
    let images: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let killed: Arc<Mutex<Vec<SimMedia>>> = Arc::default();
    let (queue, at_fences, at_flushes) = (images.clone(), killed.clone(), killed.clone());
    media.record(Some(Box::new(move |crash| {
        let keeps = [Keep::Nothing, Keep::Everything, Keep::Random(crash.fences)];
        queue.lock().extend(keeps.map(|keep| crash.image(keep)));
        at_fences.lock().push(crash.killed());
    })));
    media.record_flushes(Some(Box::new(move |crash| at_flushes.lock().push(crash.killed()))));
    let whole = check::repair(media.clone(), false, None).unwrap();
    media.record(None);
    media.record_flushes(None);
    assert!(whole.after.is_clean(), "{what}");
    let wanted = kept(&open(media.image(), domain));
    let images = std::mem::take(&mut *images.lock());
    assert!(images.len() > 20);
    for (n, image) in images.into_iter().enumerate() {
        let media = Arc::new(SimMedia::new(image, domain));
        let again = check::repair(media.clone(), true, None).unwrap();
        assert!(again.after.is_clean(), "{what} {n}: {:#?}", again.after.findings);
        assert!(kept(&open(media.image(), domain)) == wanted, "{what} {n}");
    }
    // What a killed repair left in a cache is not what power takes behind the next one.
    for (n, media) in std::mem::take(&mut *killed.lock()).into_iter().enumerate() {
        let media = Arc::new(media);
        let again = check::repair(media.clone(), false, None).unwrap();
        assert!(again.after.is_clean(), "{what}, killed, {n}: {:#?}", again.after.findings);
        let image = media.crash_point().image(Keep::Nothing);
        let left = check::examine(Arc::new(SimMedia::new(image.clone(), domain)), true, None).unwrap();
        assert!(left.is_clean(), "{what}, killed, {n}: {:#?}", left.findings);
        assert!(kept(&open(image, domain)) == wanted, "{what}, killed, {n}");
    }
}

#[test]
fn a_repair_may_be_cut_short_anywhere() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for (what, damage) in DAMAGE.into_iter().chain(DAMAGE_OF_CLOSED) {
            let mut sample = Sample::new(domain, true);
            damage(&mut sample);
            cut_short(what, sample.image, domain, |fs| {
                let file = content(fs, FILE);
                (content(fs, OTHER) == other_bytes(), file.len(), content(fs, DEEP) == b"deep down")
            });
        }
        let mut image = tall(domain, true, POOL_BYTES / 2, 300);
        let wanted = walk(&open(image.clone(), domain));
        let grown =
            table_records(&image).into_iter().rfind(|r| r.1 == Type::Write).expect("the table has grown").0;
        image[grown + 20] ^= 0x55;
        cut_short("table", image, domain, |fs| {
            assert!(walk(fs) == wanted, "all is there again");
        });
    }
}

/// What is below a directory of which nothing can be read needs a name, which shows by that directory alone: it may not be whole, and
/// empty, before.
#[test]
fn what_a_lost_directory_named_outlives_a_repair_that_is_cut_short() {
    let kinds = ["all new", "a slot free beside the root's", "with lost+found"];
    for (domain, kind) in [Domain::Memory, Domain::PageCache].into_iter().flat_map(|d| kinds.map(|k| (d, k)))
    {
        let fresh = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
        let fs = open(fresh.image(), domain);
        if kind == kinds[2] {
            mkdir(&fs, Ino::ROOT, b"lost+found");
        }
        // The directory's slot is in another block than the root's, which is written again elsewhere.
        (0..SLOTS_PER_BLOCK).for_each(|n| _ = create(&fs, Ino::ROOT, format!("{n}").as_bytes()));
        let dir = mkdir(&fs, Ino::ROOT, b"dir");
        let file = create(&fs, dir, b"file");
        let inner = mkdir(&fs, dir, b"inner");
        let deep = create(&fs, inner, b"deep");
        write(&fs, file, 0, b"kept");
        write(&fs, deep, 0, b"deep down");
        if kind == kinds[1] {
            fs.unlink(&Cred::root(), Ino::ROOT, b"3").unwrap();
        }
        (0..3).for_each(|_| fs.sync().unwrap());
        fs.tick().unwrap();
        let mut image = fs.media().image();
        let slot = slot_of(dir);
        image[slot..slot + SLOT].iter_mut().for_each(|byte| *byte ^= 0x55);
        let media = SimMedia::new(image, domain);
        media.poison(slot..slot + LINE);
        cut_short_on(kind, media, domain, |fs| {
            // Below one that was made for it and got no name either, maybe.
            let tree = walk(fs);
            for (ino, bytes) in [(file, b"kept".as_slice()), (deep, b"deep down")] {
                let is_there = tree
                    .iter()
                    .any(|(path, at, _, is)| path.starts_with(b"/lost+found/") && *at == ino && is == bytes);
                assert!(is_there, "{kind}: {:#?}", names_of(&tree));
            }
            assert!(find(fs, inner, b"deep") == Some(deep));
        });
    }
}

/// Takes every block that there is.
fn fill_up(fs: &F) {
    let cred = Cred::root();
    let names = (0..).map(|n: u32| format!("fill {n}"));
    for (name, blocks) in names.zip([64, 8, 1].into_iter().cycle()) {
        let Ok((attr, _)) = fs.create(&cred, Ino::ROOT, name.as_bytes(), 0o644, 0, 0) else { break };
        fs.forget(attr.ino, 2);
        let mut at = 0;
        while fs.write(&cred, attr.ino, at, &vec![0xee; blocks * BLOCK], false).is_ok() {
            at += (blocks * BLOCK) as u64;
        }
    }
    assert!(fs.statfs().blocks_free < 4, "{} blocks are free", fs.statfs().blocks_free);
}

#[test]
fn a_repair_on_a_full_pool_loses_nothing() {
    for (what, damage) in DAMAGE {
        for domain in [Domain::Memory, Domain::PageCache] {
            for closed in [true, false] {
                let fs = open(Sample::new(domain, true).image, domain);
                fill_up(&fs);
                (0..3).for_each(|_| fs.sync().unwrap());
                if closed {
                    fs.close().unwrap();
                }
                let mut sample = Sample::of(fs.media().image(), domain);
                damage(&mut sample);
                let media = sample.media();
                let repaired = check::repair(media.clone(), true, None).unwrap();
                assert!(
                    !repaired.found.is_clean() && repaired.after.is_clean(),
                    "{what} {domain:?} {closed}"
                );
                let fs = open(media.image(), domain);
                assert!(content(&fs, OTHER) == other_bytes(), "{what} {domain:?}");
                assert_eq!(content(&fs, DEEP), b"deep down", "{what} {domain:?}");
            }
        }
    }
}

/// Its blocks may go to others now, so whoever would map it has to see that.
#[test]
fn a_fixed_file_that_is_damaged_is_nobodys_memory() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for damaged in [true, false] {
            let what = format!("{domain:?}, {}", if damaged { "damaged" } else { "another is" });
            let sample = Sample::new(domain, true);
            let fs = open(sample.image, domain);
            let ino = create(&fs, Ino::ROOT, b"ram");
            fs.fix(&Cred::root(), ino, 3 * BLOCK as u64).unwrap();
            let other = create(&fs, Ino::ROOT, b"new");
            write(&fs, other, 0, &[0xe5; 3 * BLOCK]);
            fs.close().unwrap();
            let image = fs.media().image();
            let stamps = |image: &[u8]| image.windows(8).filter(|bytes| bytes == b"LodeFixd").count();
            assert_eq!(stamps(&image), 1, "{what}");
            let stamp = image.windows(8).position(|bytes| bytes == b"LodeFixd").unwrap();
            let media = Arc::new(SimMedia::new(image.clone(), domain));
            let at = if damaged { stamp - BLOCK } else { page_of(&image, 0xe5) };
            media.poison(at..at + LINE);
            let repaired = check::repair(media.clone(), false, None).unwrap();
            assert!(repaired.after.is_clean(), "{what}: {:#?}", repaired.after.findings);
            let fs = Fs::open(media.clone(), &options()).unwrap();
            let place = fs.fixed_place(ino).map_err(|e| e.errno());
            let written = fs.write(&Cred::root(), ino, 0, b"x", false).map_err(|e| e.errno());
            // The simulator's pool is in no file.
            match damaged {
                true => {
                    assert!(place == Err(libc::ENODATA) && written.is_ok(), "{what}: {place:?} {written:?}")
                }
                false => assert!(
                    place == Err(libc::EOPNOTSUPP) && written == Err(libc::ETXTBSY),
                    "{what}: {place:?}"
                ),
            }
            assert_eq!(stamps(&media.image()), if damaged { 0 } else { 1 }, "{what}");
        }
    }
}

/// A tree that takes a table of several pages, each directory in a later one than what names it, on a pool whose table was as long
/// before: blocks that it gave back have slots, too.
fn tall(domain: Domain, closed: bool, bytes: usize, files: u32) -> Vec<u8> {
    let fresh = Fs::mkfs(SimMedia::new(vec![0; bytes], domain), &MkfsOptions::default()).unwrap();
    let fs = open(fresh.image(), domain);
    let cred = Cred::root();
    let name = |n: u32| format!("n{n}").into_bytes();
    for n in 0..files + 100 {
        let made = fs.mknod(&cred, Ino::ROOT, &name(n), libc::S_IFIFO, 0, 0).unwrap();
        fs.forget(made.ino, 1);
    }
    (0..files + 100).for_each(|n| fs.unlink(&cred, Ino::ROOT, &name(n)).unwrap());
    fs.close().unwrap();
    let fs = open(fs.media().image(), domain);
    let taken = create(&fs, Ino::ROOT, b"taken");
    write(&fs, taken, 0, &[0xee; 24 * BLOCK]);
    let mut dir = Ino::ROOT;
    for n in 0..files {
        let new = create(&fs, dir, &name(n));
        chmod(&fs, new, 0o600 | (n % 64));
        if n % 20 == 0 {
            write(&fs, new, 0, &[n as u8; 3000]);
        }
        if n % 200 == 199 {
            dir = mkdir(&fs, dir, b"deeper");
        }
    }
    (0..3).for_each(|_| fs.sync().unwrap());
    fs.tick().unwrap();
    if closed {
        fs.close().unwrap();
    }
    fs.media().image()
}

/// Leaves what seem to be newer slots of the same inodes, which nobody names, in free blocks at the pool's end.
fn mislead(image: &mut [u8]) {
    let sample = Sample::of(image.to_vec(), Domain::Memory);
    let mut free = sample.sb.blocks as usize - 1;
    let header = |block: &[u8], n: usize| {
        let line: &[u8; LINE] = block[n * SLOT..][..LINE].try_into().unwrap();
        SlotHeader::decode(line, sample.key_crc, SlotHeader::said_ino(line))
            .map(|header| (SlotHeader::said_ino(line), header))
    };
    for block in sample.image.chunks(BLOCK) {
        let slots: Vec<(usize, u32, SlotHeader)> = (0..SLOTS_PER_BLOCK as usize)
            .filter_map(|n| header(block, n).map(|(ino, header)| (n, ino, header)))
            .filter(|&(_, ino, _)| ino >= TABLE_BLOCKS * SLOTS_PER_BLOCK)
            .collect();
        if slots.is_empty() {
            continue;
        }
        free -= 1;
        let to = &mut image[free * BLOCK..][..BLOCK];
        assert!(to.iter().all(|&byte| byte == 0), "block {free} is in use");
        for (n, ino, header) in slots {
            let header = SlotHeader { generation: header.generation + (7 << 40), ..header };
            let words = header.encode(sample.key_crc, ino);
            words.iter().zip(to[n * SLOT..].chunks_mut(8)).for_each(|(word, to)| put64(to, 0, *word));
        }
    }
}

fn names_of(tree: &[(Vec<u8>, Ino, u32, Vec<u8>)]) -> Vec<(Vec<u8>, Ino)> {
    tree.iter().map(|(path, ino, ..)| (path.clone(), *ino)).collect()
}

/// All that there is, by path.
fn walk<M: Media>(fs: &F<M>) -> Vec<(Vec<u8>, Ino, u32, Vec<u8>)> {
    let mut found = Vec::new();
    let mut queue = vec![(Vec::new(), Ino::ROOT)];
    while let Some((path, dir)) = queue.pop() {
        let mut names = Vec::new();
        fs.readdir(dir, 0, &mut |e| {
            if e.name != b"." && e.name != b".." {
                names.push(([&path[..], b"/", e.name].concat(), e.ino));
            }
            true
        })
        .unwrap();
        for (path, ino) in names {
            let attr = fs.getattr(ino).unwrap_or_else(|e| panic!("{}: {e}", path.escape_ascii()));
            let bytes = if attr.kind() == lodestone::fs::Kind::File { content(fs, ino) } else { Vec::new() };
            if attr.kind() == lodestone::fs::Kind::Directory {
                queue.push((path.clone(), ino));
            }
            found.push((path, ino, attr.mode, bytes));
        }
    }
    found.sort();
    found
}

/// Where the records of the inode table's log stand.
fn table_records(image: &[u8]) -> Vec<(usize, Type)> {
    records_from(image, TABLE_BLOCK as usize * BLOCK)
}

/// Where the records of a log stand, from where its slot says that it begins.
fn records_from(image: &[u8], slot: usize) -> Vec<(usize, Type)> {
    let mut at = match get64(image, slot + LOG_HEAD_OFFSET as usize) {
        0 => slot + LINE,
        head => unpack_log_head(head).expect("it leads to a log").0 as usize,
    };
    let mut found = Vec::new();
    let mut seq = None;
    while let Some(head) = Head::decode(&image[at..]).filter(|h| seq.is_none_or(|seq| h.seq == seq)) {
        found.push((at, head.kind));
        seq = Some(head.seq + head.lines);
        at = match head.kind {
            Type::Link => get64(&image[at..], field::link::ADDR) as usize,
            _ => at + head.lines as usize * LINE,
        };
    }
    found
}

/// Whatever line of the table's log is lost, its slots say where they stand.
#[test]
fn a_table_whose_log_is_damaged_is_found_by_its_slots() {
    for (domain, closed) in
        [Domain::Memory, Domain::PageCache].into_iter().flat_map(|d| [(d, true), (d, false)])
    {
        let mut whole = tall(domain, closed, 4 * POOL_BYTES, 1400);
        mislead(&mut whole);
        let wanted = walk(&open(whole.clone(), domain));
        let records = table_records(&whole);
        assert!(records.iter().filter(|r| r.1 == Type::Write).count() > 4, "{records:?}");
        let lines = records.iter().flat_map(|&(at, kind)| [(at, kind, false), (at, kind, true)]);
        for (at, kind, poisons) in lines {
            let how = if poisons { "cannot be read" } else { "is damaged" };
            let what = format!("{domain:?}, closed {closed}: {kind:?} at {at:#x} {how}");
            let mut image = whole.clone();
            image[at + 20] ^= 0x55;
            let media = Arc::new(SimMedia::new(image, domain));
            if poisons {
                media.poison(at..at + LINE);
            }
            let report = check::examine(media.clone(), false, None).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(!report.is_clean(), "{what}: nothing is found");
            let repaired =
                check::repair(media.clone(), false, None).unwrap_or_else(|e| panic!("{what}: {e}"));
            let found = &repaired.found.findings;
            assert!(repaired.after.is_clean(), "{what}: {found:#?}, left {:#?}", repaired.after.findings);
            let fs = Fs::open(media, &options()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let is = walk(&fs);
            assert!(is == wanted, "{what}: {} of {} are there: {found:#?}", is.len(), wanted.len());
            use_it(&fs, &what);
        }
    }
}

#[test]
fn the_holes_of_a_sparse_pool_are_not_searched() {
    const BYTES: u64 = 1 << 40;
    let path = std::env::temp_dir().join(format!("lodestone-fsck-sparse-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(BYTES).unwrap();
    let pool = || Pool::open(&path, &PoolOptions::default()).unwrap();
    let made = Pool::create(
        std::slice::from_ref(&path),
        None,
        &PoolOptions { force: true, ..PoolOptions::default() },
    );
    let made = made.unwrap();
    let host = made.describe().regions[0].host_fs;
    // That these do is what is tested.
    if !["ext4", "tmpfs", "xfs"].contains(&host) && made.stored(Addr(0)) == Some(0..BYTES) {
        eprintln!("SKIPPED: {host} below {} tells no holes", path.display());
        return std::fs::remove_file(&path).unwrap();
    }
    let fs = Fs::open(Fs::mkfs(made, &MkfsOptions::default()).unwrap(), &options()).unwrap();
    let inos: Vec<Ino> = (0..40u8).map(|n| create(&fs, Ino::ROOT, &[b'a' + n])).collect();
    inos.iter().for_each(|&ino| write(&fs, ino, 0, &[ino.0 as u8; 10_000]));
    inos.iter().for_each(|&ino| (0..20).for_each(|n| chmod(&fs, ino, 0o600 | n)));
    fs.close().unwrap();
    drop(fs);

    let flip = |at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x55], at).unwrap();
    };
    let slot = |ino: Ino| (TABLE_BLOCK as usize * BLOCK + ino.0 as usize * SLOT) as u64;
    // Heads of logs, and the inode table's log, whose pages are looked for by their slots.
    inos[3..6].iter().for_each(|&ino| flip(slot(ino) + LOG_HEAD_OFFSET + 1));
    flip(slot(Ino(TABLE_INO)) + LOG_HEAD_OFFSET + 1);

    let searched = Cell::new(0u64);
    let (inodes, bytes) = (Cell::new(0), Cell::new(0));
    let watch = |progress| match progress {
        Progress::Search { done, of } => {
            assert!(done < of && of == BYTES, "{progress:?}");
            searched.set(searched.get() + 1);
        }
        Progress::Inodes { done, of, bytes: read } => {
            assert!(done < of, "{progress:?}");
            inodes.set(inodes.get().max(of));
            bytes.set(bytes.get().max(read));
        }
    };
    let report = check::examine(Arc::new(pool()), false, Some(&watch)).unwrap();
    let heads = report.findings.iter().filter(|f| f.what == What::LogHead).count();
    assert!(heads >= 3, "{:#?}", report.findings);
    let repaired = check::repair(Arc::new(pool()), false, Some(&watch)).unwrap();
    assert!(repaired.after.is_clean(), "{:#?}", repaired.after.findings);
    // What has been stored to, a few times over; the pool has 2^28 blocks.
    assert!((1..100_000).contains(&searched.get()), "{searched:?} blocks were searched");
    assert!(inodes.get() > 40 && bytes.get() >= 40 * 10_000, "{inodes:?} inodes, {bytes:?} bytes");
    let held = file.metadata().unwrap().blocks() * 512;
    assert!(held < 64 << 20, "{held} bytes are allocated");

    let fs = Fs::open(pool(), &options()).unwrap();
    for ino in inos {
        assert_eq!(content(&fs, ino), vec![ino.0 as u8; 10_000], "{ino:?}");
        assert_eq!(fs.getattr(ino).unwrap().mode & 0o7777, 0o623, "{ino:?}");
    }
    fs.close().unwrap();
    std::fs::remove_file(&path).unwrap();
}
