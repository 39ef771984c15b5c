//! Recovery held against images that a power failure may leave, made on purpose: each test names what was
//! lost and what must be there all the same.

use std::sync::Arc;

use lodestone::fs::files::Files;
use lodestone::fs::format::*;
use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, OpenOptions, RENAME_EXCHANGE, SetAttr};
use lodestone::media::{Addr, Domain, LINE, Media, crc32c};
use lodestone::mover::engine_port::Routes;
use lodestone::sim::engine::{Device, SimEngine};
use lodestone::sim::media::{Copying, Failing, Keep, SimMedia};
use parking_lot::Mutex;

type F = Arc<Fs<SimMedia>>;

/// What failed, and what it left.
type Failure = (String, Vec<u8>);

const POOL_BYTES: usize = 1 << 20;

fn try_open(image: Vec<u8>, domain: Domain) -> lodestone::Result<F> {
    let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
    Fs::open(SimMedia::new(image, domain), &options)
}

fn open(image: Vec<u8>, domain: Domain) -> F {
    try_open(image, domain).expect("a crashed pool opens")
}

fn fresh(domain: Domain) -> F {
    let media = SimMedia::new(vec![0; POOL_BYTES], domain);
    open(Fs::mkfs(media, &MkfsOptions::default()).unwrap().image(), domain)
}

fn find(fs: &F, dir: Ino, name: &[u8]) -> Option<Ino> {
    let ino = fs.lookup(&Cred::root(), dir, name).ok()?.ino;
    fs.forget(ino, 1);
    Some(ino)
}

fn create(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.create(&Cred::root(), dir, name, 0o644, 0, libc::O_EXCL).unwrap().0.ino;
    fs.forget(ino, 2);
    ino
}

fn mkdir(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.mkdir(&Cred::root(), dir, name, 0o755, 0).unwrap().ino;
    fs.forget(ino, 1);
    ino
}

/// Until nothing is in doubt and all that was freed may be used again.
fn settle(fs: &F) {
    (0..3).for_each(|_| fs.sync().unwrap());
}

fn chmod(fs: &F, ino: Ino, mode: u32) {
    fs.setattr(&Cred::root(), ino, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
}

fn content(fs: &F, ino: Ino) -> Vec<u8> {
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(ino, 0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// Runs `work` and returns images of power failures at all its fences and syncs: nothing of what was in
/// doubt, each page or line of it missing, each alone, everything.
fn failures(fs: &F, work: impl FnOnce()) -> Vec<Failure> {
    let images: Arc<Mutex<Vec<Failure>>> = Arc::default();
    let queue = images.clone();
    fs.media().record(Some(Box::new(move |crash| {
        let parts = (0..crash.lines()).flat_map(|n| [Keep::AllBut(n), Keep::Only(n)]);
        let keeps = [Keep::Nothing, Keep::Everything].into_iter().chain(parts);
        queue.lock().extend(keeps.map(|k| (format!("fence {} {k:?}", crash.fences), crash.image(k))));
    })));
    work();
    fs.media().record(None);
    std::mem::take(&mut *images.lock())
}

/// The slot of one of the first inodes.
fn slot(ino: Ino) -> usize {
    TABLE_BLOCK as usize * BLOCK + ino.0 as usize * SLOT
}

fn super_block(image: &[u8]) -> Super {
    let at = SUPER_BLOCK as usize * BLOCK;
    Super::decode(image[at..at + SUPER_BYTES].try_into().unwrap()).unwrap()
}

#[test]
fn a_segment_of_an_older_incarnation_is_no_continuation() {
    let fs = fresh(Domain::Memory);
    let f = create(&fs, Ino::ROOT, b"f");
    // Two records beside the link fit into the slot.
    for mode in [0o601, 0o602, 0o603] {
        chmod(&fs, f, mode);
    }
    let mut image = fs.media().image();
    let key_crc = crc32c(&super_block(&image).key, 0);
    let at = slot(f);
    let header = SlotHeader::decode(image[at..at + LINE].try_into().unwrap(), key_crc, f.0).unwrap();
    let link = at + 3 * LINE;
    assert_eq!(Head::decode(&image[link..]).unwrap().kind, Type::Link);
    let segment = Addr(get64(&image[link..], field::link::ADDR)).0 as usize;
    let head = Head::decode(&image[segment..]).unwrap();
    assert_eq!(head.kind, Type::Segment);
    let older = incarnation(header.generation) - 1;
    let seed = log_seed(key_crc, f.0, header.generation, older);
    // What an older log of this inode may have left there: a head with the same number, and a record.
    let mut line = [0; LINE];
    put32(&mut line, field::segment::LINES, MINI_LINES);
    put32(&mut line, field::segment::INCARNATION, older);
    Head::finish(&mut line, head.seq, 0, Type::Segment as u8, seed);
    image[segment..segment + LINE].copy_from_slice(&line);
    let mut line: [u8; LINE] = image[segment + LINE..segment + 2 * LINE].try_into().unwrap();
    put32(&mut line, field::attr::MODE, 0o777);
    Head::finish(&mut line, head.seq + 1, 0, Type::Attr as u8, seed);
    image[segment + LINE..segment + 2 * LINE].copy_from_slice(&line);

    let fs = open(image, Domain::Memory);
    assert_eq!(fs.getattr(f).unwrap().mode & 0o7777, 0o602, "the log ends at its link");
}

#[test]
fn a_link_behind_a_crash_leads_to_no_segment_of_before() {
    let fs = fresh(Domain::Memory);
    let f = create(&fs, Ino::ROOT, b"f");
    // The first two fill the slot; then a crash that takes the link, and not what stands in the segment.
    for mode in [0o601, 0o602, 0o603] {
        chmod(&fs, f, mode);
    }
    let before = fs.media().image();
    let (link, segment) = (slot(f) + 3 * LINE, first_segment(&before, f));
    let mut image = before.clone();
    image[link..link + LINE].fill(0);

    let fs = open(image, Domain::Memory);
    assert_eq!(fs.getattr(f).unwrap().mode & 0o7777, 0o602);
    chmod(&fs, f, 0o604);
    let mut image = fs.media().image();
    assert_eq!(first_segment(&image, f), segment, "the same place is taken again");
    assert_eq!(open(image.clone(), Domain::Memory).getattr(f).unwrap().mode & 0o7777, 0o604);
    assert_eq!(fs.check().unwrap().findings, []);
    // A crash in that change, which left the link and of the segment nothing.
    let bytes = MINI_LINES as usize * LINE;
    image[segment..segment + bytes].copy_from_slice(&before[segment..segment + bytes]);
    let fs = open(image, Domain::Memory);
    assert_eq!(fs.getattr(f).unwrap().mode & 0o7777, 0o602, "what the first crash took stays away");
}

#[test]
fn a_power_loss_after_log_cleaning_takes_nothing_that_was_synced() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let cred = Cred::root();
    let f = create(&fs, Ino::ROOT, b"f");
    let d = fs.mkdir(&cred, Ino::ROOT, b"d", 0o755, 0).unwrap().ino;
    fs.write(&cred, f, 0, &[7; 9000], false).unwrap();
    fs.setxattr(&cred, f, b"user.a", b"value", 0).unwrap();
    for n in 0..20 {
        create(&fs, d, format!("n{n}").as_bytes());
    }
    fs.sync().unwrap();
    fs.sync().unwrap();
    let mut cleaned = false;
    for round in 0..6u32 {
        let head = fs.media().load64(Addr(slot(f) as u64 + LOG_HEAD_OFFSET)).unwrap();
        let synced = content(&fs, f).len();
        // In place: verified through a mapping that cleaning moves behind it.
        fs.write(&cred, f, 0, &[7; 10], true).unwrap();
        for n in 0..70 {
            chmod(&fs, f, 0o600 | n);
            // What was freed too early is stored over here.
            let passing = create(&fs, d, b"passing");
            fs.write(&cred, passing, 0, &[round as u8; 4096], false).unwrap();
            fs.unlink(&cred, d, b"passing").unwrap();
        }
        let images = failures(&fs, || fs.sync().unwrap());
        cleaned |= fs.media().load64(Addr(slot(f) as u64 + LOG_HEAD_OFFSET)).unwrap() != head;
        let mut seen = std::collections::HashSet::new();
        for (what, image) in images {
            if !seen.insert(crc32c(&image, 0)) {
                continue;
            }
            let fs = try_open(image, domain).unwrap_or_else(|e| panic!("round {round}, {what}: {e}"));
            let found = content(&fs, f);
            let len = found.len();
            let whole = len >= synced && found.iter().all(|&b| b == 7);
            assert!(whole, "round {round}, {what}: of {synced} synced bytes {len} are there");
            let value = fs.getxattr(&cred, f, b"user.a");
            assert_eq!(value.ok().as_deref(), Some(b"value".as_slice()), "round {round}, {what}");
            for n in 0..20 {
                let name = format!("n{n}");
                assert!(find(&fs, d, name.as_bytes()).is_some(), "round {round}, {what}: {name} is gone");
            }
        }
    }
    assert!(cleaned, "the log was cleaned");
}

/// An access list that is too long for a record.
fn long_acl() -> Vec<u8> {
    let mut acl = 2u32.to_le_bytes().to_vec();
    let mut entry = |tag: u16, perm: u16, id: u32| {
        acl.extend_from_slice(&tag.to_le_bytes());
        acl.extend_from_slice(&perm.to_le_bytes());
        acl.extend_from_slice(&id.to_le_bytes());
    };
    entry(1, 7, u32::MAX);
    (0..300).for_each(|uid| entry(2, 4, 1000 + uid));
    entry(4, 5, u32::MAX);
    entry(16, 5, u32::MAX);
    entry(32, 0, u32::MAX);
    acl
}

#[test]
fn a_create_counts_only_with_the_access_list_it_inherited() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let cred = Cred::root();
    let d = fs.mkdir(&cred, Ino::ROOT, b"d", 0o755, 0).unwrap().ino;
    fs.setxattr(&cred, d, b"system.posix_acl_default", &long_acl(), 0).unwrap();
    fs.sync().unwrap();
    fs.sync().unwrap();
    let mut made = Vec::new();
    let images = failures(&fs, || {
        made.push((b"f".as_slice(), create(&fs, d, b"f")));
        made.push((b"g", fs.mkdir(&cred, d, b"g", 0o755, 0).unwrap().ino));
        fs.sync().unwrap();
    });
    let wanted: Vec<Vec<u8>> =
        made.iter().map(|m| fs.getxattr(&cred, m.1, b"system.posix_acl_access").unwrap()).collect();
    let mut present = 0;
    for (what, image) in images {
        let fs = open(image, domain);
        for ((name, _), wanted) in made.iter().zip(&wanted) {
            let Some(ino) = find(&fs, d, name) else { continue };
            present += 1;
            let acl = fs.getxattr(&cred, ino, b"system.posix_acl_access");
            assert!(acl.ok().as_ref() == Some(wanted), "{what}: it came back without its list");
        }
    }
    assert!(present > 2, "some failures leave it");
}

#[test]
fn a_damaged_attribute_value_is_an_error() {
    let fs = fresh(Domain::Memory);
    let cred = Cred::root();
    let f = create(&fs, Ino::ROOT, b"f");
    for (name, value) in [(b"user.a", vec![0xa5; 1000]), (b"user.b", vec![0x5a; 9000])] {
        fs.setxattr(&cred, f, name, &value, 0).unwrap();
        assert_eq!(fs.getxattr(&cred, f, name).unwrap(), value);
        let image = fs.media().image();
        let at = (0..image.len()).find(|&at| image[at..].starts_with(&value[..900])).unwrap();
        let dirty = fs.media().copy_cached(Addr(at as u64), &[0; 8]).unwrap();
        fs.media().fence(fs.media().flush(dirty));
        let read = fs.getxattr(&cred, f, name);
        assert_eq!(read.map(|v| v.len()).unwrap_err().errno(), libc::EIO);
    }
}

#[test]
fn attribute_values_are_found_wherever_cleaning_moved_them() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        let cred = Cred::root();
        let f = create(&fs, Ino::ROOT, b"f");
        let value = |n: u8| vec![n; [10, 1000, 5000][n as usize % 3]];
        let holds = |fs: &F| {
            (0..12).all(|n| fs.getxattr(&cred, f, format!("user.{n}").as_bytes()).unwrap() == value(n))
        };
        for n in 0..12 {
            fs.setxattr(&cred, f, format!("user.{n}").as_bytes(), &value(n), 0).unwrap();
        }
        assert!(holds(&fs));
        let head = |fs: &F| fs.media().load64(Addr(slot(f) as u64 + LOG_HEAD_OFFSET)).unwrap();
        let before = head(&fs);
        for n in 0..2000 {
            chmod(&fs, f, 0o600 + n % 64);
            if n % 100 == 0 {
                fs.tick().unwrap();
            }
        }
        assert_ne!(head(&fs), before, "the log was cleaned");
        assert!(holds(&fs));
        let crashed = open(fs.media().image(), domain);
        assert!(holds(&crashed));
        crashed.close().unwrap();
        assert!(holds(&open(crashed.media().image(), domain)));
    }
}

#[test]
fn a_file_moved_into_a_directory_that_is_lost_stays_where_it_was() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let cred = Cred::root();
    let a = mkdir(&fs, Ino::ROOT, b"a");
    let x = create(&fs, a, b"x");
    fs.write(&cred, x, 0, &[3; 5000], false).unwrap();
    // The log leaves the slot, which shares a page with the others.
    for n in 0..6 {
        create(&fs, a, format!("n{n}").as_bytes());
    }
    let old = mkdir(&fs, Ino::ROOT, b"old");
    fs.sync().unwrap();
    fs.rmdir(&cred, Ino::ROOT, b"old").unwrap();
    settle(&fs);
    // The slot that is taken again holds the old directory's header until it is written back.
    let b = (0..200)
        .map(|n| {
            fs.sync().unwrap();
            mkdir(&fs, Ino::ROOT, format!("b{n}").as_bytes())
        })
        .find(|&b| b == old)
        .expect("the slot is taken again");
    let images = failures(&fs, || {
        fs.rename(&cred, a, b"x", b, b"x", 0).unwrap();
        fs.sync().unwrap();
    });
    for (what, image) in images {
        let fs = open(image, domain);
        let moved = fs.getattr(b).ok().and_then(|_| find(&fs, b, b"x"));
        let found = find(&fs, a, b"x").or(moved);
        assert_eq!(found, Some(x), "{what}: the file is gone");
        assert!(content(&fs, x) == [3; 5000], "{what}");
    }
}

#[test]
fn an_exchange_with_a_directory_that_is_lost_never_was() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let cred = Cred::root();
    // The root's log gets a page of its own.
    for n in 0..40 {
        create(&fs, Ino::ROOT, format!("n{n}").as_bytes());
    }
    let a = mkdir(&fs, Ino::ROOT, b"a");
    let x = create(&fs, a, b"x");
    fs.write(&cred, x, 0, &[3; 5000], false).unwrap();
    settle(&fs);
    let images = failures(&fs, || {
        let b = mkdir(&fs, Ino::ROOT, b"b");
        create(&fs, b, b"y");
        fs.rename(&cred, a, b"x", b, b"y", RENAME_EXCHANGE).unwrap();
        fs.sync().unwrap();
    });
    for (what, image) in images {
        let fs = open(image, domain);
        let moved = find(&fs, Ino::ROOT, b"b").and_then(|b| find(&fs, b, b"y"));
        let here = find(&fs, a, b"x");
        assert!(here == Some(x) || moved == Some(x), "{what}: the file is gone");
        assert!(content(&fs, x) == [3; 5000], "{what}");
    }
}

#[test]
fn a_link_to_a_new_file_counts_only_with_all_of_the_file() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let cred = Cred::root();
    let d = mkdir(&fs, Ino::ROOT, b"d");
    let e = mkdir(&fs, Ino::ROOT, b"e");
    fs.setxattr(&cred, d, b"system.posix_acl_default", &long_acl(), 0).unwrap();
    settle(&fs);
    let mut f = Ino(0);
    let images = failures(&fs, || {
        f = create(&fs, d, b"f");
        fs.link(&cred, f, e, b"g").unwrap();
        fs.forget(f, 1);
        fs.sync().unwrap();
    });
    let wanted = fs.getxattr(&cred, f, b"system.posix_acl_access").unwrap();
    let whole = fs.media().image();
    let mut present = 0;
    for (what, image) in images {
        let fs = open(image, domain);
        for found in [find(&fs, d, b"f"), find(&fs, e, b"g")].into_iter().flatten() {
            present += 1;
            let acl = fs.getxattr(&cred, found, b"system.posix_acl_access");
            assert!(acl.ok().as_ref() == Some(&wanted), "{what}: it came back without its list");
        }
    }
    assert!(present > 2, "some failures leave it");

    // The last word of a header is a store of its own: the last inode's log head may still be there.
    let mut image = whole;
    let state = STATE_BLOCK as usize * BLOCK;
    let sb = super_block(&image);
    for at in [state, state + LINE] {
        let line: &mut [u8] = &mut image[at..at + LINE];
        let found = State::decode((&*line).try_into().unwrap(), &sb.key).unwrap();
        // As if the last sync had not been.
        line.copy_from_slice(&State { settled: 1, ..found }.encode(&sb.key));
    }
    let head = pack_log_head(Addr(100 * BLOCK as u64));
    put64(&mut image, slot(f) + LOG_HEAD_OFFSET as usize, head);
    let fs = try_open(image, domain).expect("half a slot is no inode");
    assert_eq!((find(&fs, d, b"f"), find(&fs, e, b"g")), (None, None));
}

/// A file whose log has ten records, the sixth of them damaged.
fn damaged_log(settled: bool, closed: bool) -> (Ino, Vec<u8>) {
    let fs = fresh(Domain::Memory);
    let f = create(&fs, Ino::ROOT, b"f");
    create(&fs, Ino::ROOT, b"g");
    (0..10).for_each(|n| chmod(&fs, f, 0o600 | n));
    if settled {
        fs.tick().unwrap();
    }
    if closed {
        fs.close().unwrap();
    }
    let mut image = fs.media().image();
    let at = (0..image.len()).step_by(LINE).find(|&at| {
        let attr = Head::decode(&image[at..]).is_some_and(|h| h.kind == Type::Attr && h.seq > 3);
        attr && get32(&image[at..], field::attr::MODE) & 0o7777 == 0o605
    });
    image[at.expect("the record is there") + 40] ^= 1;
    (f, image)
}

#[test]
fn damage_in_the_middle_of_a_log_is_reported_and_no_end() {
    let domain = Domain::Memory;
    let (f, image) = damaged_log(true, true);
    let fs = open(image, domain);
    assert!(fs.open_report().was_clean);
    assert_eq!(fs.getattr(f).map(|a| a.mode).unwrap_err().errno(), libc::EUCLEAN);
    let g = find(&fs, Ino::ROOT, b"g").unwrap();
    chmod(&fs, g, 0o600);

    let (f, image) = damaged_log(true, false);
    let fs = open(image, domain);
    assert_eq!(fs.open_report().damaged, 1);
    assert_eq!(fs.getattr(f).map(|a| a.mode).unwrap_err().errno(), libc::EUCLEAN);
}

fn errno<T>(result: lodestone::Result<T>) -> Option<i32> {
    result.err().map(|e| e.errno())
}

/// Where a page of this content stands.
fn page_of(image: &[u8], fill: u8) -> usize {
    let page = |at: &usize| image[*at..*at + BLOCK].iter().all(|&b| b == fill);
    (0..image.len()).step_by(BLOCK).find(page).expect("the page is there")
}

/// Takes all space there is.
fn fill(fs: &F) {
    let big = create(fs, Ino::ROOT, b"big");
    let mut at = 0;
    while let Ok(end) = fs.write(&Cred::root(), big, at, &[0xee; BLOCK], false) {
        at = end;
    }
    for n in 0.. {
        let name = format!("small{n}");
        let Ok((attr, _)) = fs.create(&Cred::root(), Ino::ROOT, name.as_bytes(), 0o644, 0, 0) else { break };
        fs.forget(attr.ino, 2);
        (0..8).for_each(|_| {
            drop(fs.setattr(&Cred::root(), attr.ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }))
        });
    }
}

/// An unclean pool with files f and g. f's log has attributes, a page of 0xa1, attributes, a page of 0xb2;
/// what `damage` does to the image is done once all of it is settled.
fn damaged_file(domain: Domain, damage: impl Fn(&mut [u8], Ino)) -> (Ino, Ino, Vec<u8>) {
    let fs = fresh(domain);
    let (f, g) = (create(&fs, Ino::ROOT, b"f"), create(&fs, Ino::ROOT, b"g"));
    fs.write(&Cred::root(), g, 0, &[0xc3; 5000], false).unwrap();
    chmod(&fs, f, 0o601);
    fs.write(&Cred::root(), f, 0, &[0xa1; BLOCK], false).unwrap();
    (0..3).for_each(|n| chmod(&fs, f, 0o610 | n));
    fs.write(&Cred::root(), f, BLOCK as u64, &[0xb2; BLOCK], false).unwrap();
    settle(&fs);
    fs.tick().unwrap();
    let mut image = fs.media().image();
    damage(&mut image, f);
    (f, g, image)
}

/// The record that set this mode.
fn attr_record(image: &[u8], mode: u32) -> usize {
    let is = |at: &usize| {
        Head::decode(&image[*at..]).is_some_and(|h| h.kind == Type::Attr)
            && get32(&image[*at..], field::attr::MODE) & 0o7777 == mode
    };
    (0..image.len()).step_by(LINE).find(is).expect("the record is there")
}

/// Where the link in a file's slot leads.
fn first_segment(image: &[u8], ino: Ino) -> usize {
    let link = slot(ino) + 3 * LINE;
    assert_eq!(Head::decode(&image[link..]).unwrap().kind, Type::Link);
    get64(&image[link..], field::link::ADDR) as usize
}

#[test]
fn a_damaged_file_costs_itself_and_keeps_its_blocks() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let (f, g, image) = damaged_file(domain, |image, _| {
            let at = attr_record(image, 0o611);
            image[at + 40] ^= 1;
        });
        let pages = [page_of(&image, 0xa1), page_of(&image, 0xb2)];
        let mut images = vec![("whole".to_owned(), image.clone())];
        // However often recovery itself is interrupted.
        let media = SimMedia::new(image, domain);
        let states: Arc<Mutex<Vec<Failure>>> = Arc::default();
        let queue = states.clone();
        media.record(Some(Box::new(move |crash| {
            let keeps = [Keep::Nothing, Keep::Everything, Keep::Only(0)];
            queue
                .lock()
                .extend(keeps.map(|k| (format!("recovery fence {} {k:?}", crash.fences), crash.image(k))));
        })));
        drop(
            Fs::open(media, &OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() })
                .unwrap(),
        );
        images.append(&mut states.lock());
        assert!(images.len() > 6);
        for (what, image) in images {
            let mut fs = open(image, domain);
            for round in 0..4 {
                assert_eq!(errno(fs.getattr(f)), Some(libc::EUCLEAN), "{domain:?} {what}, round {round}");
                assert!(content(&fs, g) == [0xc3; 5000], "{domain:?} {what}, round {round}");
                chmod(&fs, g, 0o600 | round);
                if round == 0 {
                    fill(&fs);
                    settle(&fs);
                }
                if round == 2 {
                    fs.close().unwrap();
                }
                let image = fs.media().image();
                for (at, fill) in pages.into_iter().zip([0xa1, 0xb2]) {
                    assert!(image[at..at + BLOCK].iter().all(|&b| b == fill), "{domain:?} {what}: {fill:x}");
                }
                fs = open(image, domain);
            }
        }
    }
}

/// A recovery that was cut short after it had found a file damaged: the next one does not take that for a file that was never made,
/// and its new name, with all that was done in that directory since, for one that does not count.
#[test]
fn a_file_that_was_found_damaged_keeps_the_name_that_is_in_doubt() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        let d = mkdir(&fs, Ino::ROOT, b"d");
        let c = create(&fs, Ino::ROOT, b"c");
        (0..40).for_each(|n| chmod(&fs, c, 0o600 | n));
        settle(&fs);
        fs.tick().unwrap();
        fs.link(&Cred::root(), c, d, b"c").unwrap();
        fs.forget(c, 1);
        create(&fs, d, b"later");
        let mut image = fs.media().image();
        let at = attr_record(&image, 0o611);
        image[at + 40] ^= 1;
        let mut interrupted = vec![("whole".to_owned(), image.clone())];
        let media = SimMedia::new(image, domain);
        let states: Arc<Mutex<Vec<Failure>>> = Arc::default();
        let queue = states.clone();
        media.record(Some(Box::new(move |crash| {
            let keeps = [Keep::Nothing, Keep::Everything];
            queue.lock().extend(keeps.map(|k| (format!("fence {} {k:?}", crash.fences), crash.image(k))));
        })));
        let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
        drop(Fs::open(media, &options).unwrap());
        interrupted.append(&mut states.lock());
        assert!(interrupted.len() > 4);
        for (what, image) in interrupted {
            let fs = open(image, domain);
            for dir in [Ino::ROOT, d] {
                let found = errno(fs.lookup(&Cred::root(), dir, b"c"));
                assert_eq!(found, Some(libc::EUCLEAN), "{domain:?}, {what}");
            }
            assert!(find(&fs, d, b"later").is_some(), "{domain:?}, {what}");
        }
    }
}

/// Where damage lets nothing be written down, what did not hold is not shown all the same.
#[test]
fn a_pool_that_is_damaged_elsewhere_shows_files_as_they_hold() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let d = mkdir(&fs, Ino::ROOT, b"d");
    for n in 0..9 {
        create(&fs, d, format!("x{n}").as_bytes());
    }
    let f = create(&fs, Ino::ROOT, b"f");
    fs.write(&Cred::root(), f, 0, &[0xa1; 2 * BLOCK], false).unwrap();
    settle(&fs);
    fs.tick().unwrap();
    fs.write(&Cred::root(), f, 0, &[0xb2; 2 * BLOCK], false).unwrap();
    let mut image = fs.media().image();
    // The write is torn.
    let torn = page_of(&image, 0xb2);
    image[torn..torn + BLOCK].fill(0);
    assert!(content(&open(image.clone(), domain), f) == [0xa1; 2 * BLOCK]);
    image[slot(d) + LINE + 40] ^= 1;
    for _ in 0..2 {
        let fs = open(image, domain);
        assert_eq!(errno(fs.lookup(&Cred::root(), d, b"x3")), Some(libc::EUCLEAN));
        assert!(content(&fs, f) == [0xa1; 2 * BLOCK]);
        assert_eq!(find(&fs, Ino::ROOT, b"f"), Some(f));
        assert_eq!(errno(fs.write(&Cred::root(), f, 0, &[1], false)), Some(libc::EROFS));
        image = fs.media().image();
    }
}

/// A record that changed on the media under an open pool is neither copied, which would make it valid, nor left out with all behind it.
#[test]
fn cleaning_copies_no_record_that_is_not_what_was_appended() {
    for (at, bit) in [(4, 1), (50, 1), (9, 1)] {
        let domain = Domain::Memory;
        let fs = fresh(domain);
        let d = mkdir(&fs, Ino::ROOT, b"d");
        let names: Vec<String> = (0..100).map(|n| format!("name {n}")).collect();
        for name in &names {
            create(&fs, d, name.as_bytes());
        }
        fs.tick().unwrap();
        let image = fs.media().image();
        let is_its = |at: &usize| {
            Head::decode(&image[*at..]).is_some_and(|h| h.kind == Type::Add)
                && image[*at..*at + LINE].windows(7).any(|part| part == b"name 50")
        };
        let record = (0..image.len()).step_by(LINE).find(is_its).expect("the record is there") + at;
        let dirty = fs.media().copy_cached(Addr(record as u64), &[image[record] ^ bit]).unwrap();
        fs.media().fence(fs.media().flush(dirty));
        for n in 0..5000 {
            create(&fs, d, b"one more");
            fs.unlink(&Cred::root(), d, b"one more").unwrap();
            if n % 100 == 0 {
                fs.tick().unwrap();
            }
        }
        assert!(names.iter().all(|name| find(&fs, d, name.as_bytes()).is_some()));
        let found = errno(open(fs.media().image(), domain).lookup(&Cred::root(), d, b"name 99"));
        assert_eq!(found, Some(libc::EUCLEAN), "byte {at}");
    }
}

#[test]
fn where_damage_hides_which_blocks_are_used_nothing_is_changed() {
    type Damage = fn(&mut [u8], Ino);
    let cases: [(&str, Damage); 3] = [
        ("segment head", |image, f| image[first_segment(image, f) + 20] ^= 1),
        ("log head", |image, f| image[slot(f) + LOG_HEAD_OFFSET as usize] ^= 1),
        ("slot", |image, f| image[slot(f) + 20] ^= 1),
    ];
    for (what, damage) in cases {
        for domain in [Domain::Memory, Domain::PageCache] {
            let (f, g, mut image) = damaged_file(domain, damage);
            for _ in 0..2 {
                let fs = open(image, domain);
                assert_eq!(errno(fs.getattr(f)), Some(libc::EUCLEAN), "{what}");
                assert!(content(&fs, g) == [0xc3; 5000], "{what}");
                assert_eq!(errno(fs.write(&Cred::root(), g, 0, &[1], false)), Some(libc::EROFS), "{what}");
                assert_eq!(errno(fs.create(&Cred::root(), Ino::ROOT, b"n", 0o644, 0, 0)), Some(libc::EROFS));
                fs.sync().unwrap();
                fs.close().unwrap();
                image = fs.media().image();
            }
        }
    }
}

#[test]
fn a_damaged_directory_hides_what_is_below_it_alone() {
    let domain = Domain::Memory;
    let fs = fresh(domain);
    let (d, e) = (mkdir(&fs, Ino::ROOT, b"d"), mkdir(&fs, Ino::ROOT, b"e"));
    for n in 0..9 {
        create(&fs, d, format!("x{n}").as_bytes());
    }
    let y = create(&fs, e, b"y");
    fs.write(&Cred::root(), y, 0, &[5; 100], false).unwrap();
    fs.tick().unwrap();
    let mut image = fs.media().image();
    image[slot(d) + LINE + 40] ^= 1;
    for _ in 0..2 {
        let fs = open(image, domain);
        assert_eq!(errno(fs.lookup(&Cred::root(), d, b"x3")), Some(libc::EUCLEAN));
        assert_eq!(find(&fs, e, b"y"), Some(y));
        assert!(content(&fs, y) == [5; 100]);
        assert_eq!(errno(fs.mkdir(&Cred::root(), e, b"n", 0o755, 0)), Some(libc::EROFS));
        image = fs.media().image();
    }
}

#[test]
fn bad_media_matters_to_those_whose_it_is() {
    let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        let cred = Cred::root();
        let (d, f) = (mkdir(&fs, Ino::ROOT, b"d"), create(&fs, Ino::ROOT, b"f"));
        let (g, h) = (create(&fs, Ino::ROOT, b"g"), create(&fs, Ino::ROOT, b"h"));
        (0..9).for_each(|n| {
            create(&fs, d, format!("x{n}").as_bytes());
        });
        for n in [f, g, h] {
            (0..9).for_each(|m| chmod(&fs, n, 0o600 | m));
        }
        (0..9).for_each(|n| fs.unlink(&cred, d, format!("x{n}").as_bytes()).unwrap());
        fs.rmdir(&cred, Ino::ROOT, b"d").unwrap();
        fs.unlink(&cred, Ino::ROOT, b"f").unwrap();
        settle(&fs);
        let image = fs.media().image();
        let removed = [first_segment(&image, d), first_segment(&image, f), slot(f)];
        // The old logs of what nobody names, and a slot.
        let media = SimMedia::new(image.clone(), domain);
        for at in removed {
            media.poison(at..at + LINE);
        }
        let fs = Fs::open(media, &options).unwrap();
        assert_eq!(fs.open_report().damaged, 0);
        for n in [g, h] {
            assert_eq!(fs.getattr(n).unwrap().mode & 0o7777, 0o610);
            chmod(&fs, n, 0o700);
        }
        // The log of what somebody names.
        for at in [first_segment(&image, g), slot(g)] {
            let media = SimMedia::new(image.clone(), domain);
            media.poison(at..at + LINE);
            let fs = Fs::open(media, &options).unwrap();
            assert_eq!(errno(fs.getattr(g)), Some(libc::EIO));
            assert_eq!(fs.getattr(h).unwrap().mode & 0o7777, 0o610);
            assert_eq!(
                errno(fs.setattr(&cred, h, &SetAttr::default())).or(Some(libc::EROFS)),
                Some(libc::EROFS)
            );
            assert_eq!(errno(fs.create(&cred, Ino::ROOT, b"n", 0o644, 0, 0)), Some(libc::EROFS));
        }
    }
}

#[test]
fn the_state_lines_may_be_lost_in_one_of_their_places() {
    let state = STATE_BLOCK as usize * BLOCK;
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        for copy in [false, true] {
            let mut fs = fresh(domain);
            let (f, cred) = (create(&fs, Ino::ROOT, b"f"), Cred::root());
            for round in 0..40u8 {
                fs.write(&cred, f, 0, &[round; 3 * BLOCK], false).unwrap();
                // Blocks go from hand to hand.
                let passing = create(&fs, Ino::ROOT, b"passing");
                fs.write(&cred, passing, 0, &[0xdd; 3 * BLOCK], false).unwrap();
                fs.unlink(&cred, Ino::ROOT, b"passing").unwrap();
                fs.sync().unwrap();
                fs.tick().unwrap();
                if round % 10 == 9 {
                    if round == 29 {
                        fs.close().unwrap();
                    }
                    let mut image = fs.media().image();
                    let at = if copy { image.len() - BLOCK + STATE_COPY_OFFSET as usize } else { state };
                    image[at..at + 2 * LINE].fill(0);
                    fs = open(image, domain);
                    assert!(content(&fs, f) == [round; 3 * BLOCK], "{domain:?}, round {round}");
                }
            }
        }
    }
}

/// Found by a fuzzer: after a clean close the last record of a log passed for its end, and the blocks it named were
/// taken for another's.
#[test]
fn a_log_that_lost_its_last_record_after_a_clean_close_is_damaged() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        let (a, b) = (create(&fs, Ino::ROOT, b"a"), create(&fs, Ino::ROOT, b"b"));
        let write = |fs: &F, ino, byte| {
            fs.write(&Cred::root(), ino, 0, &[byte; BLOCK], false).unwrap();
        };
        write(&fs, a, 1);
        settle(&fs);
        write(&fs, a, 2);
        settle(&fs);
        write(&fs, b, 3);
        fs.close().unwrap();
        let mut image = fs.media().image();
        assert_eq!(content(&open(image.clone(), domain), a), [2; BLOCK]);
        image[slot(a) + 2 * LINE + 20] ^= 1;
        // Not looked at, it is no other after another close.
        let unseen = open(image, domain);
        assert!(unseen.open_report().was_clean);
        unseen.close().unwrap();
        let fs = open(unseen.media().image(), domain);
        assert_eq!(errno(fs.getattr(a)), Some(libc::EUCLEAN), "{domain:?}");
        write(&fs, b, 4);
        assert_eq!(content(&fs, b), [4; BLOCK]);
        fs.close().unwrap();
        let report = lodestone::fs::check::check(fs.media()).unwrap();
        assert!(report.findings.iter().any(|f| f.ino == Some(a.0)), "{:#?}", report.findings);
    }
}

#[test]
fn epochs_go_on_above_all_that_logs_carry() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        let f = create(&fs, Ino::ROOT, b"f");
        for n in 0..3000 {
            fs.tick().unwrap();
            if n % 1000 == 999 {
                chmod(&fs, f, 0o600 | (n / 1000));
            }
        }
        let mut image = fs.media().image();
        let sb = super_block(&image);
        let end = image.len() - BLOCK + STATE_COPY_OFFSET as usize;
        let lines = [0, LINE].map(|l| [STATE_BLOCK as usize * BLOCK + l, end + l]);
        for &at in lines.as_flattened() {
            let line: &mut [u8] = &mut image[at..at + LINE];
            let found = State::decode((&*line).try_into().unwrap(), &sb.key).unwrap();
            line.copy_from_slice(&State { settled: 1, clean: false, ..found }.encode(&sb.key));
        }
        let epoch = |image: &[u8], mode| Head::decode(&image[attr_record(image, mode)..]).unwrap().epoch;
        let old = epoch(&image, 0o602);
        assert!(old > 3000);
        let fs = open(image, domain);
        chmod(&fs, f, 0o700);
        assert!(epoch(&fs.media().image(), 0o700) > old);
    }
}

#[test]
fn records_that_a_crash_left_behind_a_gap_are_no_damage() {
    let domain = Domain::Memory;
    let (f, image) = damaged_log(false, false);
    let mode = |fs: &F| fs.getattr(f).unwrap().mode & 0o7777;
    let fs = open(image, domain);
    assert_eq!(mode(&fs), 0o604);
    // However often it is opened again, and however many epochs are named.
    fs.tick().unwrap();
    fs.close().unwrap();
    let fs = open(fs.media().image(), domain);
    assert_eq!(mode(&fs), 0o604);
    fs.tick().unwrap();
    let fs = open(fs.media().image(), domain);
    assert_eq!(mode(&fs), 0o604);
    chmod(&fs, f, 0o700);
    fs.tick().unwrap();
    let fs = open(fs.media().image(), domain);
    assert_eq!(mode(&fs), 0o700);
}

/// A first recovery that is cut short leaves the host's new boot behind: the second one must know all the same
/// that power was lost.
#[test]
fn a_power_loss_is_remembered_until_recovery_is_through() {
    let domain = Domain::PageCache;
    let fs = fresh(domain);
    let f = create(&fs, Ino::ROOT, b"f");
    settle(&fs);
    fs.write(&Cred::root(), f, 0, &[0xa1; BLOCK], false).unwrap();
    fs.write(&Cred::root(), f, BLOCK as u64, &[0xb2; BLOCK], false).unwrap();
    let mut image = fs.media().image();
    // Of the first write the record came to the media, its data did not; and the host has another boot since.
    let at = page_of(&image, 0xa1);
    image[at..at + BLOCK].fill(0);
    let sb = super_block(&image);
    let end = image.len() - BLOCK + STATE_COPY_OFFSET as usize;
    for at in [0, LINE].map(|l| [STATE_BLOCK as usize * BLOCK + l, end + l]).concat() {
        let line: &mut [u8] = &mut image[at..at + LINE];
        if let Some(state) = State::decode((&*line).try_into().unwrap(), &sb.key) {
            line.copy_from_slice(&State { boot: 1, ..state }.encode(&sb.key));
        }
    }
    let options = OpenOptions { no_ticker: true, ..OpenOptions::default() };
    let media = SimMedia::new(image, domain);
    let images: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let queue = images.clone();
    media.record(Some(Box::new(move |crash| queue.lock().push(crash.image(Keep::Everything)))));
    let whole = Fs::open(media, &options).unwrap();
    assert_eq!(content(&whole, f).len(), 0, "nothing of it was synced, and the first write is not whole");
    let images = std::mem::take(&mut *images.lock());
    assert!(images.len() > 3);
    for (n, image) in images.into_iter().enumerate() {
        let again = Fs::open(SimMedia::new(image, domain), &options).unwrap();
        assert_eq!(content(&again, f).len(), 0, "recovery was cut short at fence {n}");
    }
}

/// The next mount may be on other media, by another driver or by an override; what was written through the page cache is in
/// doubt all the same.
#[test]
fn what_the_page_cache_lost_is_missed_on_any_media() {
    let fs = fresh(Domain::PageCache);
    let f = create(&fs, Ino::ROOT, b"f");
    fs.write(&Cred::root(), f, 0, &[1; 20_000], false).unwrap();
    settle(&fs);
    let images = failures(&fs, || {
        fs.write(&Cred::root(), f, 0, &[2; 20_000], false).unwrap();
        chmod(&fs, f, 0o600);
        chmod(&fs, f, 0o640);
        fs.sync().unwrap();
    });
    assert!(images.len() > 10, "{}", images.len());
    for (what, image) in images {
        for domain in [Domain::PageCache, Domain::Memory, Domain::CpuCache] {
            let fs = open(image.clone(), domain);
            let found = content(&fs, f);
            assert!(found == [1; 20_000] || found == [2; 20_000], "{what}, {domain}");
        }
    }
}

#[test]
fn a_pool_of_an_older_format_is_refused_and_not_misread() {
    let mut image = fresh(Domain::Memory).media().image();
    become_version(&mut image, VERSION_OLDEST - 1);
    let refused =
        Fs::open(SimMedia::new(image, Domain::Memory), &OpenOptions::default()).map(drop).unwrap_err();
    assert_eq!(refused.errno(), libc::EPROTONOSUPPORT);
    assert!(refused.to_string().contains(&format!("version {}", VERSION_OLDEST - 1)), "{refused}");
}

fn become_version(image: &mut [u8], version: u32) {
    let sb = Super { version, ..super_block(image) };
    for block in [SUPER_BLOCK, sb.blocks - 1] {
        image[block as usize * BLOCK..][..SUPER_BYTES].copy_from_slice(&sb.encode());
    }
}

/// Who knows that version alone would take a withdrawn record for the end of its log.
#[test]
fn a_pool_of_the_format_before_is_used_as_it_was() {
    let cred = Cred::root();
    for domain in [Domain::Memory, Domain::PageCache] {
        let fs = fresh(domain);
        create(&fs, Ino::ROOT, b"old");
        fs.close().unwrap();
        let mut image = fs.media().image();
        become_version(&mut image, VERSION_OLDEST);
        let fs = open(image, domain);
        assert_eq!(fs.info().format_version, VERSION_OLDEST);
        create(&fs, Ino::ROOT, b"new");
        fs.unlink(&cred, Ino::ROOT, b"old").unwrap();
        fs.media().cram();
        let refused = fs.unlink(&cred, Ino::ROOT, b"new").unwrap_err();
        assert_eq!(refused.errno(), libc::ENOSPC);
        fs.sync().unwrap();
        let fs = open(fs.media().image(), domain);
        assert_eq!((find(&fs, Ino::ROOT, b"old"), find(&fs, Ino::ROOT, b"new").is_some()), (None, true));
        fs.unlink(&cred, Ino::ROOT, b"new").unwrap();
    }
}

/// Whoever withdrew a name had found its record complete: what it named may be another's since, and what it replaced stays gone.
#[test]
fn a_withdrawn_name_stays_gone_whoever_has_its_inode() {
    let cred = Cred::root();
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        let fs = fresh(domain);
        let (a, b) = (mkdir(&fs, Ino::ROOT, b"a"), mkdir(&fs, Ino::ROOT, b"b"));
        create(&fs, a, b"y");
        let x = create(&fs, a, b"x");
        fs.tick().unwrap();
        // The last record of its log.
        fs.rename(&cred, a, b"x", a, b"y", 0).unwrap();
        fs.media().cram();
        fs.unlink(&cred, a, b"y").unwrap();
        assert!(fs.dump_inode(a).unwrap().contains("withdrawn"));
        if domain == Domain::PageCache {
            settle(&fs);
        }
        let mut made = (0..300).map(|n| create(&fs, b, format!("{n}").as_bytes()));
        assert!(made.any(|ino| ino == x), "its slot is used again");
        fs.sync().unwrap();
        let fs = open(fs.media().image(), domain);
        assert!(fs.check().unwrap().is_clean());
        assert_eq!((find(&fs, a, b"x"), find(&fs, a, b"y")), (None, None), "{domain}");
        assert!(find(&fs, b, b"0").is_some());
        fs.rmdir(&cred, Ino::ROOT, b"a").unwrap();
    }
}

/// On an ordinary file it may be on the disk before all that came before it is; then that is synced first, whoever goes on working.
#[test]
fn what_left_a_directory_is_not_lost_with_its_withdrawn_name() {
    let cred = Cred::root();
    let fs = fresh(Domain::PageCache);
    let (a, b) = (mkdir(&fs, Ino::ROOT, b"a"), mkdir(&fs, Ino::ROOT, b"b"));
    let f = create(&fs, a, b"f");
    settle(&fs);
    fs.media().cram();
    let images = failures(&fs, || {
        fs.rename(&cred, a, b"f", b, b"g", 0).unwrap();
        fs.rmdir(&cred, Ino::ROOT, b"a").unwrap();
        chmod(&fs, f, 0o600);
        fs.sync().unwrap();
    });
    assert!(images.len() > 3, "{}", images.len());
    for (what, image) in images {
        let fs = open(image, Domain::PageCache);
        let found = find(&fs, b, b"g").or_else(|| find(&fs, find(&fs, Ino::ROOT, b"a")?, b"f"));
        assert_eq!(found, Some(f), "{what}");
        assert!(fs.check().unwrap().is_clean());
    }
}

/// A recovery that has to write something down finds what room there is: what a withdrawn name had is free, and what is held in case
/// that it is cut short is not held at the price of a pool that does not open.
#[test]
fn a_recovery_has_the_room_that_there_is() {
    recover_on_a_full_pool(true);
    recover_on_a_full_pool(false);
}

/// Behind the removal of a large file, whose name is withdrawn, or whose record is not settled.
fn recover_on_a_full_pool(is_withdrawn: bool) {
    let media = Fs::mkfs(SimMedia::new(vec![0; 2 << 20], Domain::Memory), &MkfsOptions::default()).unwrap();
    let media = SimMedia::new(media.image(), Domain::Memory);
    let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
    let device = Device { routes: Routes::PAST_CACHES, late: true, striped: false, in_pieces: false };
    media.copied(Copying { engine: Some(device), ..Copying::default() });
    let files = Files::new(Fs::open(media, &options).unwrap(), Cred::root(), 0);
    let fs = files.fs().clone();
    let create = |path: &str| {
        let fd = files.open(path.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
        files.close(fd).unwrap();
    };
    // Directories whose next record needs a segment.
    for d in 0..200 {
        files.mkdir(format!("/d{d}").as_bytes(), 0o755).unwrap();
        create(&format!("/d{d}/p"));
        create(&format!("/d{d}/q"));
    }
    files.mkdir(b"/v", 0o755).unwrap();
    let v = files.open(b"/v/V", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    files.pwrite(v, &vec![1; 100 * 4096], 0).unwrap();
    files.close(v).unwrap();
    if is_withdrawn {
        create("/v/w");
    }
    // One record more fits into its slot.
    let f = files.open(b"/F", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    files.pwrite(f, &[2; 8192], 0).unwrap();
    let z = files.open(b"/Z", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    let mut at = 0;
    for size in [16384, 4096] {
        while files.pwrite(z, &vec![3; size], at).is_ok() {
            at += size as i64;
        }
    }
    for n in 0.. {
        if files.mkdir(format!("/q{n}").as_bytes(), 0o755).is_err() {
            break;
        }
    }
    // The reserve is used up.
    for d in 0..200 {
        files.unlink(format!("/d{d}/p").as_bytes()).unwrap();
    }
    files.unlink(b"/v/V").unwrap();
    let dir = fs.lookup(&Cred::root(), Ino::ROOT, b"v").unwrap().ino;
    assert_eq!(fs.dump_inode(dir).unwrap().contains("withdrawn"), is_withdrawn);
    if is_withdrawn {
        fs.tick().unwrap();
    }
    assert!(fs.statfs().blocks_free > 90);
    // A write whose copy is under way when power fails.
    fs.mover().give(Box::new(SimEngine::new(device)), SimEngine::limits());
    // The device takes whole lines alone.
    let mut others: Vec<Box<[u8]>> = Vec::new();
    let bytes = loop {
        let bytes: Box<[u8]> = vec![9; 8192].into();
        match bytes.as_ptr().addr().is_multiple_of(LINE) {
            true => break bytes,
            false => others.push(bytes),
        }
    };
    let ticket = files.submit_pwrite(f, bytes, 0).unwrap();
    let image = fs.media().crash_point().image(Keep::Nothing);
    let again = Fs::open(SimMedia::new(image, Domain::Memory), &options);
    let again = again.unwrap_or_else(|e| panic!("it does not open: {e}"));
    assert_eq!(again.open_report().voided, 1);
    drop(ticket);
}

/// Of a tree that was removed level by level the lowest name comes back, and so does each level above it. For that other
/// directories are not read once more for each.
#[test]
fn a_removed_tree_that_comes_back_costs_those_beside_it_nothing() {
    const LEVELS: usize = 30;
    let cred = Cred::root();
    let fs = fresh(Domain::PageCache);
    let file = create(&fs, Ino::ROOT, b"file");
    let wide = mkdir(&fs, Ino::ROOT, b"wide");
    let link = |dir, name: &[u8]| {
        fs.link(&cred, file, dir, name).unwrap();
        fs.forget(file, 1);
    };
    (0..2000).for_each(|n| link(wide, format!("a name of some length {n}").as_bytes()));
    let mut dirs = vec![Ino::ROOT];
    (0..LEVELS).for_each(|n| dirs.push(mkdir(&fs, dirs[n], b"level")));
    link(dirs[LEVELS], b"left");
    settle(&fs);
    fs.unlink(&cred, dirs[LEVELS], b"left").unwrap();
    dirs[..LEVELS].iter().rev().for_each(|&dir| fs.rmdir(&cred, dir, b"level").unwrap());
    let gone = fs.media().image();
    let mut back = gone.clone();
    let lines = (1..SLOT / LINE).map(|n| slot(dirs[LEVELS]) + n * LINE);
    let is_removal = |at: &usize| Head::decode(&gone[*at..]).is_some_and(|head| head.kind == Type::Remove);
    let at = lines.into_iter().find(is_removal).expect("it is in the slot");
    back[at..at + LINE].fill(0);

    let accesses = |image: Vec<u8>, is_back: bool| {
        let media = SimMedia::new(image, Domain::PageCache);
        media.fail_access(u64::MAX, Failing::Once);
        let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
        let fs = Fs::open(media, &options).unwrap();
        let accesses = fs.media().accesses();
        let lowest = (0..LEVELS).try_fold(Ino::ROOT, |dir, _| find(&fs, dir, b"level"));
        assert_eq!(lowest.and_then(|dir| find(&fs, dir, b"left")).is_some(), is_back);
        assert!(find(&fs, wide, b"a name of some length 1999").is_some());
        accesses
    };
    let (before, after) = (accesses(gone, false), accesses(back, true));
    assert!(after < 2 * before, "{after} accesses, not {before}");
}

/// A directory that a power loss took says for ever what was in it once: it is no one's place after the next failure.
#[test]
fn a_directory_that_was_lost_does_not_speak_after_the_next_failure() {
    let cred = Cred::root();
    for goes_on in [false, true] {
        let fs = fresh(Domain::PageCache);
        let [q, d, s, e] = [b"q", b"d", b"s", b"e"].map(|name| mkdir(&fs, Ino::ROOT, name));
        let u = mkdir(&fs, q, b"u");
        create(&fs, d, b"f");
        // Enough to have its log in a page of its own.
        (0..8).for_each(|n| _ = create(&fs, s, format!("{n}").as_bytes()));
        settle(&fs);
        let images = failures(&fs, || {
            let z = mkdir(&fs, s, b"z");
            fs.rename(&cred, q, b"u", z, b"u", 0).unwrap();
        });
        let mut was_lost = false;
        for (first, image) in images {
            let fs = open(image, Domain::PageCache);
            if find(&fs, s, b"z").is_some() || find(&fs, q, b"u") != Some(u) {
                continue;
            }
            was_lost = true;
            fs.rename(&cred, d, b"f", u, b"f", 0).unwrap();
            match goes_on {
                true => fs.rename(&cred, u, b"f", e, b"f", 0).unwrap(),
                false => fs.unlink(&cred, u, b"f").unwrap(),
            }
            fs.rmdir(&cred, q, b"u").unwrap();
            fs.sync().unwrap();
            for (second, image) in failures(&fs, || chmod(&fs, e, 0o700)) {
                let fs = open(image, Domain::PageCache);
                let found = (find(&fs, d, b"f").is_some(), find(&fs, e, b"f").is_some());
                assert_eq!(found, (false, goes_on), "{first}, then {second}");
                assert_eq!(find(&fs, q, b"u"), None, "{first}, then {second}");
            }
        }
        assert!(was_lost);
    }
}
