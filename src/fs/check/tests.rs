//! What damage, or whoever makes up an image, may not do to a check and a repair: each at a size at which work that grows with
//! the square of it would take minutes, or more memory than there is.

use super::image::{Entry, Piece, Sum};
use super::repair::Mender;
use super::rewrite::{self, Seed};
use super::scan::scan;
use super::*;
use crate::fs::{Cred, Ino, MkfsOptions};
use crate::media::{Pool as Region, PoolOptions};

/// An epoch that is settled where a test says so.
const EPOCH: u64 = 5;
const OWN: u32 = 9;

fn made(bytes: u64) -> Region {
    let region = Region::memfd(bytes, &PoolOptions::default()).unwrap();
    Fs::mkfs(region, &MkfsOptions::default()).unwrap()
}

fn look_at(media: &Region) -> Checked<'_, Region> {
    look(media, Ask::default(), None, &Pages::new(), Strays::new()).unwrap()
}

/// An inode that nobody names, of which nothing is stored.
fn empty(pool: &Pool<Region>, kind: Kind) -> Image {
    let generation = 7 << 40 | 1;
    let header = SlotHeader { mode: kind.mode_bits() | 0o600, uid: 0, gid: 0, generation, rdev: 0, btime: 0 };
    Image::new(pool.owner(OWN, generation), header)
}

fn store(media: &Region, at: Addr, bytes: &[u8]) {
    let dirty = media.copy_cached(at, bytes).unwrap();
    media.fence(media.flush(dirty));
}

/// Stores the log of an image, and lets the slot lead to it.
fn store_log(checked: &mut Checked<'_, Region>, image: &Image) {
    let pool = &checked.pool;
    let seed = Seed { key_crc: pool.key_crc, incarnation: pool.state.mount + 1, epoch: EPOCH };
    let head = rewrite::write(pool.media, &mut checked.space, seed, image, &|_| Ok(Vec::new())).unwrap();
    let mut words = image.header.encode(pool.key_crc, image.owner.ino);
    words[LOG_HEAD_OFFSET as usize / 8] = pack_log_head(head);
    let flushed = pool.media.store_lines(image.owner.slot, &[words]).unwrap();
    pool.media.fence(flushed);
}

fn read(pool: &Pool<Region>, image: &Image) -> Image {
    image::read(pool, image.owner, image.header, None)
}

/// As after a loss of power that left nothing settled.
fn doubt(checked: &mut Checked<'_, Region>) {
    checked.pool.power_loss = true;
    checked.pool.state = State { clean: false, settled: EPOCH - 1, ..checked.pool.state };
}

/// Checksums of so many bytes each that follow each other, which fill lines of a log.
fn with_sums(image: &mut Image, count: u64) {
    image.size = count * 64;
    image.sums.extend((0..count).map(|n| (n * 64, Sum { end: n * 64 + 64, crc: n as u32 })));
}

#[test]
fn a_directory_may_have_many_operations_in_doubt() {
    const NAMES: u32 = 100_000;
    let media = made(64 << 20);
    let mut checked = look_at(&media);
    let mut dir = empty(&checked.pool, Kind::Directory);
    for ino in 0..NAMES {
        let name = ino.to_string().into_bytes().into();
        dir.name(Entry { name, ino, generation: 1, kind: Kind::File, linked: false });
    }
    store_log(&mut checked, &dir);
    doubt(&mut checked);
    let read = read(&checked.pool, &dir);
    assert!(read.is_whole() && !read.cut);
    assert_eq!(read.entries, dir.entries);
}

#[test]
fn a_log_ends_before_the_first_operation_in_doubt_that_is_not_complete() {
    let media = made(4 << 20);
    let mut checked = look_at(&media);
    let mut file = empty(&checked.pool, Kind::File);
    let run = checked.space.allocate_run(4).unwrap();
    file.map(0, Piece { count: 4, block: run.start.0, unwritten: false });
    for n in 0..4 {
        let start = n * BLOCK as u64;
        let crc = media.crc32c(block_addr(run.start).add(start), BLOCK, 0).unwrap();
        file.sums.insert(start, Sum { end: start + BLOCK as u64, crc: crc ^ (n == 2) as u32 });
    }
    (file.size, file.mode) = (4 * BLOCK as u64, libc::S_IFREG | 0o640);
    store_log(&mut checked, &file);
    assert!(!read(&checked.pool, &file).cut, "nothing is in doubt");
    doubt(&mut checked);
    let cut = read(&checked.pool, &file);
    assert!(cut.cut && cut.is_whole());
    assert_eq!(cut.pages, file.pages);
    assert_eq!(cut.sums.keys().copied().collect::<Vec<_>>(), [0, BLOCK as u64]);
    assert_eq!(cut.mode, file.header.mode, "what says so comes later");
    // Of that which is cut anyhow nothing counts.
    let first = cut.log.head_seq + 1;
    let earlier = image::read(&checked.pool, file.owner, file.header, Some(first));
    assert!(earlier.cut && earlier.pages.is_empty());
}

#[test]
fn a_log_whose_head_is_lost_may_have_many_segments() {
    const SEGMENTS: usize = 16_000;
    let media = made(96 << 20);
    let mut checked = look_at(&media);
    let mut file = empty(&checked.pool, Kind::File);
    with_sums(&mut file, SEGMENTS as u64 * (SEGMENT_LINES as u64 - 2));
    store_log(&mut checked, &file);
    let segments = read(&checked.pool, &file).log.segments;
    assert!(segments.len() > SEGMENTS, "{}", segments.len());

    // The head, and links, of which each is to be found again.
    store(&media, file.owner.slot.add(LOG_HEAD_OFFSET), &[0x55; 8]);
    let link = (BLOCK - LINE) as u64;
    segments[..SEGMENTS].iter().step_by(3).for_each(|(at, _)| store(&media, at.add(link), &[0; LINE]));
    let owner = (OWN, file.owner.generation);
    let owners = Owners::new(checked.pool.key_crc, [owner]);
    let mut strays: Vec<Stray> = segments
        .iter()
        .map(|&(at, _)| owners.segments_at(&checked.pool, at).next().expect("it is a segment").1)
        .collect();
    strays.sort_by_key(stray_order);
    checked.pool.strays.insert(owner, strays);
    let found = read(&checked.pool, &file);
    assert_eq!(found.log.damage[0], Damage::Head);
    assert_eq!(found.log.segments, segments);
    assert_eq!(found.sums.len(), file.sums.len());
}

#[test]
fn many_segments_may_be_of_many_inodes() {
    const INODES: u32 = 100_000;
    let media = made(64 << 20);
    let pool = look_at(&media).pool;
    let generation = |ino: u32| (ino as u64 % 5) << 40 | 1;
    let place = |ino: u32| Addr((1 << 20) + ino as u64 * MINI as u64);
    for ino in 0..INODES {
        let mut line = [0; LINE];
        put32(&mut line, field::segment::LINES, MINI_LINES);
        put32(&mut line, field::segment::INCARNATION, ino % 3);
        let seed = log_seed(pool.key_crc, ino, generation(ino), ino % 3);
        Head::finish(&mut line, ino, EPOCH, Type::Segment as u8, seed);
        store(&media, place(ino), &line);
    }
    let owners = Owners::new(pool.key_crc, (0..INODES).map(|ino| (ino, generation(ino))));
    for ino in 0..INODES {
        let found: Vec<_> = owners.segments_at(&pool, place(ino)).collect();
        assert_eq!(found.len(), 1, "{ino}");
        assert_eq!((found[0].0, found[0].1.seq), ((ino, generation(ino)), ino));
    }
    let others = Owners::new(pool.key_crc, (0..INODES).map(|ino| (ino, generation(ino) + 1)));
    assert_eq!(others.segments_at(&pool, place(1)).count(), 0);
    assert_eq!(owners.segments_at(&pool, place(INODES)).count(), 0, "nothing stands there");
}

#[test]
fn free_runs_and_bad_ones_may_overlap() {
    const BLOCKS: u32 = 1 << 20;
    let runs: Vec<Run> = (0..400_000).map(|n| Run::new(Block(10 + n % 7), BLOCKS - 20)).collect();
    assert_eq!(joined(runs.iter().copied()), [Run::new(Block(10), BLOCKS - 14)]);
    let mut space = Space::new(BLOCKS as u64);
    space.take(Run::new(Block(0), 12));
    let endless = Run { start: Block(BLOCKS - 2), count: u32::MAX };
    let free = runs.iter().copied().chain([endless]).collect();
    let (lost, free) = space.compare(&Account { free, ..Account::default() });
    assert_eq!(lost, [Run::new(Block(BLOCKS - 4), 2)]);
    assert_eq!(free, [Run::new(Block(10), 2)]);
    space.take_bad(runs);
    assert_eq!(space.allocate_run(3).map(|run| run.start), Some(Block(BLOCKS - 4)));
    let apart = [(5, 2), (20, 1), (7, 3), (8, 1), (12, 0), (21, 1)];
    let apart = joined(apart.map(|(start, count)| Run { start: Block(start), count }));
    assert_eq!(apart, [Run::new(Block(5), 5), Run::new(Block(20), 2)]);
}

#[test]
fn a_file_may_say_that_it_has_a_block_many_times() {
    let media = made(16 << 20);
    let mut checked = look_at(&media);
    let blocks = checked.pool.sb.blocks;
    let some = Piece { count: 1000, block: 2000, unwritten: false };
    let mut file = empty(&checked.pool, Kind::File);
    (0..400_000).for_each(|n| file.map(n * 5000, some));
    store_log(&mut checked, &file);
    let read = read(&checked.pool, &file);
    let pages: u64 = read.pages.values().map(|piece| piece.count as u64).sum();
    assert!(pages > blocks && pages <= 16 * blocks, "{pages} of {blocks}");
    assert!(!read.nonsense.is_empty());
    checked.space.take_image(&read);
    assert!((2000..3000).all(|block| checked.space.twice.contains(&block)));

    // Each page that has a block is told; one is given another.
    let mut file = empty(&checked.pool, Kind::File);
    file.map(3, Piece { count: 4, block: 100, unwritten: false });
    file.map(10, Piece { count: 2, block: 101, unwritten: true });
    assert_eq!(file.pages_with(&[101, 103, 500].into()), [(4, 101), (6, 103), (10, 101)]);
    file.give_block(10, 700);
    assert_eq!(file.pages_with(&[101, 700].into()), [(4, 101), (10, 700)]);
    assert_eq!(file.piece_of(10).map(|(_, piece)| piece.unwritten), Some(true));
}

fn open(media: Region) -> Arc<Fs<Region>> {
    Fs::open(media, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap()
}

fn reopen(fs: Arc<Fs<Region>>) -> Region {
    fs.close().unwrap();
    let bytes = fs.media().len();
    let mut image = vec![0; bytes as usize];
    fs.media().read(Addr(0), &mut image).unwrap();
    let region = Region::memfd(bytes, &PoolOptions::default()).unwrap();
    store(&region, Addr(0), &image);
    region
}

fn make(fs: &Fs<Region>, name: &str) -> Ino {
    let made = fs.mknod(&Cred::root(), Ino::ROOT, name.as_bytes(), libc::S_IFREG | 0o600, 0, 0).unwrap();
    fs.forget(made.ino, 1);
    made.ino
}

#[test]
fn many_inodes_may_have_one_block() {
    const INODES: usize = 2000;
    let fs = open(made(32 << 20));
    let inos: Vec<Ino> = (0..INODES).map(|n| make(&fs, &format!("{n}"))).collect();
    let media = reopen(fs);
    let mut checked = look_at(&media);
    assert!(checked.report.is_clean(), "{:#?}", checked.report.findings);
    let block = checked.space.allocate().unwrap().0;
    for ino in inos {
        let mut image = (*checked.tree.image(&checked.pool, ino.0).unwrap()).clone();
        // That it has it twice is told once.
        [0, 2].into_iter().for_each(|page| image.map(page, Piece { count: 1, block, unwritten: false }));
        image.size = 3 * BLOCK as u64;
        store_log(&mut checked, &image);
    }
    let report = check(&media).unwrap();
    let twice: Vec<&Finding> = report.findings.iter().filter(|f| f.what == What::BlockTwice).collect();
    assert_eq!(twice.len(), INODES, "{:#?}", report.findings[0]);
    assert!(twice.iter().all(|f| f.detail.len() < 100), "{}", twice[0].detail);
}

/// Whatever record the table's log loses: of all that is to be written again no two have one block.
#[test]
fn a_table_that_lost_records_yields_what_others_have() {
    let fs = open(made(8 << 20));
    let names: Vec<String> = (0..1600).map(|n| format!("{n}")).collect();
    names.iter().for_each(|name| _ = make(&fs, name));
    names.iter().for_each(|name| fs.unlink(&Cred::root(), Ino::ROOT, name.as_bytes()).unwrap());
    // What the table gives back, which it does at a close, all goes to another.
    let fs = open(reopen(open(reopen(fs))));
    let [spare, taker] = ["spare", "taker"].map(|name| make(&fs, name));
    let write = |ino, at| fs.write(&Cred::root(), ino, at, &[0xee; BLOCK], false);
    (0..200).for_each(|n| _ = write(spare, n * BLOCK as u64).unwrap());
    (0..).map(|n| n * BLOCK as u64).find(|&at| write(taker, at).is_err());
    fs.unlink(&Cred::root(), Ino::ROOT, b"spare").unwrap();
    let media = reopen(fs);
    let mut records = Vec::new();
    let table = look_at(&media);
    scan(&table.pool, table.table.owner, &mut |op, _| records.extend(op.records().map(|rec| rec.at)));
    assert!(records.len() > 3);
    let mut met = 0;
    for at in records {
        let mut byte = [0];
        media.read(at.add(20), &mut byte).unwrap();
        store(&media, at.add(20), &[byte[0] ^ 0x55]);
        let mut mender = Mender::new(run(&media, Ask { scrub: true, ..Ask::default() }, None).unwrap());
        mender.plan().unwrap();
        let twice = mender.checked.report.findings.iter().filter(|f| f.what == What::BlockTwice);
        met += twice.filter(|f| f.ino == Some(TABLE_INO)).count();
        let mut space = Space::new(mender.checked.pool.sb.blocks);
        mender.images.values().for_each(|image| space.take_data(image));
        assert!(space.twice.is_empty(), "{at:?}: {:?}", space.twice);
        store(&media, at.add(20), &byte);
    }
    assert!(met > 0, "the table never seems to have what another has");
}
