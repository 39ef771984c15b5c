//! A persistent heap on files: what it refuses and in which words, its place in the address space, threads, random
//! operations against a model, damage anywhere.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lodestone::media::{Addr, Domain, Media, Span, SpanOptions};
use lodestone::sim::explore::{Bounds, explore};
use lodestone::sim::media::{CrashPoint, Keep, Rng, SimMedia};
use lodestone::sim::mutation::Mutation;
use lodestone::wsp::heap::format::{self, CHUNK, Layout};
use lodestone::wsp::heap::{
    Change, CreateOptions, FormatOptions, Heap, Offset, OpenOptions, Place, Ptr, Shape, prefer,
};
use proptest::prelude::*;

const TYPE: u64 = 7;
const SHAPE: Shape = Shape { lanes: 4, ring_lines: 16, roots: 64 };

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("lode-heap-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn small() -> CreateOptions {
    CreateOptions { size: Some(2 << 20), label: "test".into(), ..CreateOptions::default() }
}

fn sim(bytes: usize, domain: Domain) -> Heap<SimMedia> {
    let options = FormatOptions { shape: Some(SHAPE), identity: Some(3), ..FormatOptions::default() };
    Heap::format(SimMedia::new(vec![0; bytes], domain), &options).unwrap()
}

/// One object under a root.
fn put<M: Media>(heap: &Heap<M>, name: &str, value: u64) -> Offset {
    let mut object = heap.reserve(32).unwrap();
    object.put(&[value; 4]).unwrap();
    let mut t = heap.transaction();
    let at = t.publish(object);
    t.set_root(name.as_bytes(), TYPE, Some(at));
    t.commit().unwrap();
    at
}

#[test]
fn what_was_committed_is_there_when_it_is_opened_again() {
    let folder = Folder::new();
    let path = folder.file("heap");
    let heap = Heap::create(&path, &small()).unwrap();
    let at = put(&heap, "greeting", 5);
    assert_eq!(heap.info().generation, 1);
    heap.close().unwrap();
    let heap = Heap::open_path(&path, &OpenOptions::default()).unwrap();
    assert!(heap.opened().was_closed && heap.opened().records == 0);
    assert_eq!((heap.info().generation, heap.info().label.as_str()), (2, "test"));
    assert_eq!(heap.root(b"greeting", TYPE).unwrap(), Some(at));
    assert_eq!(heap.get(Ptr::<[u64; 4]>::new(at)).unwrap(), [5; 4]);
    // As a program that ends without a word: nothing is closed.
    put(&heap, "other", 6);
    drop(heap);
    let heap = Heap::open_path(&path, &OpenOptions::default()).unwrap();
    assert!(!heap.opened().was_closed && heap.opened().records == 1, "{:?}", heap.opened());
    assert_eq!(heap.roots().len(), 2);
    assert!(heap.check().unwrap().is_clean());
}

#[test]
fn each_wrong_thing_is_refused_in_its_own_words_and_stays_as_it_was() {
    let folder = Folder::new();
    let path = folder.file("heap");
    let heap = Heap::create(&path, &small()).unwrap();
    put(&heap, "root", 1);
    let refused = |path: &PathBuf, errno: i32, word: &str| {
        let before = std::fs::read(path).ok();
        let e = Heap::open_path(path, &OpenOptions::default()).unwrap_err();
        assert_eq!(e.errno(), errno, "{e}");
        let text = e.to_string();
        assert!(text.contains(word) && text.contains(path.to_str().unwrap()), "{text}");
        assert_eq!(std::fs::read(path).ok(), before, "it was changed: {text}");
    };
    refused(&path, libc::EBUSY, "in use");
    heap.close().unwrap();
    let good = std::fs::read(&path).unwrap();
    let with = |name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let file = folder.file(name);
        let mut bytes = good.clone();
        edit(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        file
    };
    refused(&folder.file("nothing"), libc::ENOENT, "No such file");
    refused(&with("empty", &|b| b.clear()), libc::EINVAL, "empty");
    refused(&with("foreign", &|b| b.fill(7)), libc::EINVAL, "no Lodestone heap");
    refused(&with("blank", &|b| b.fill(0)), libc::EINVAL, "no Lodestone heap");
    refused(&with("cut", &|b| b.truncate(1 << 20)), libc::EINVAL, "was cut");
    let damage = |b: &mut Vec<u8>, at: usize| b[at] ^= 0x10;
    let last = good.len() - 4096;
    let both = with("damaged", &|b| [20, last + 20].iter().for_each(|&at| damage(b, at)));
    refused(&both, libc::EUCLEAN, "both copies");
    let states = [4096, 4160, last + 2048, last + 2112];
    refused(
        &with("state", &|b| states.iter().for_each(|&at| damage(b, at + 9))),
        libc::EUCLEAN,
        "state line",
    );
    let newer = with("newer", &|b| {
        for at in [0, last] {
            b[at + 8] = 9;
            let crc = lodestone::media::crc32c(&b[at + 16..at + 192], 9);
            b[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
        }
    });
    refused(&newer, libc::EOPNOTSUPP, "version 9");
    // One copy of the header, and one of the state, may be lost.
    let mended = with("mended", &|b| [20, 4096 + 9, 4160 + 9].iter().for_each(|&at| damage(b, at)));
    let heap = Heap::open_path(&mended, &OpenOptions::default()).unwrap();
    assert!(heap.opened().header_mended);
    assert_eq!(heap.roots().len(), 1);
    heap.close().unwrap();
    assert!(!Heap::open_path(&mended, &OpenOptions::default()).unwrap().opened().header_mended);
}

#[test]
fn nothing_is_made_over_something_else() {
    let folder = Folder::new();
    let (path, other) = (folder.file("heap"), folder.file("other"));
    Heap::create(&path, &small()).unwrap().close().unwrap();
    let e = Heap::create(&path, &small()).unwrap_err();
    assert_eq!(e.errno(), libc::EEXIST, "{e}");
    std::fs::write(&other, vec![9; 1 << 20]).unwrap();
    assert_eq!(Heap::create(&other, &small()).unwrap_err().errno(), libc::EEXIST);
    let pool = folder.file("pool");
    let options = lodestone::media::PoolOptions::default();
    drop(lodestone::media::Pool::create(std::slice::from_ref(&pool), Some(2 << 20), &options).unwrap());
    assert_eq!(Heap::create(&pool, &small()).unwrap_err().errno(), libc::EEXIST);
    let forced = CreateOptions { force: true, ..small() };
    Heap::create(&other, &forced).unwrap().close().unwrap();
    // What cannot be made leaves no file.
    let none = folder.file("none");
    let tiny = CreateOptions { size: Some(8192), ..small() };
    assert_eq!(Heap::create(&none, &tiny).unwrap_err().errno(), libc::EINVAL);
    let long = CreateOptions { label: "x".repeat(64), ..small() };
    assert_eq!(Heap::create(&none, &long).unwrap_err().errno(), libc::EINVAL);
    assert!(!none.exists());
}

/// What is not the call's own stays as it is: neither made longer nor removed.
#[test]
fn a_heap_that_cannot_be_made_leaves_what_was_there() {
    let folder = Folder::new();
    // As ext4 begins: a boot block that nobody uses, and the superblock behind it.
    let mut ext4 = vec![0; 1 << 20];
    ext4[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    let other = folder.file("other");
    std::fs::write(&other, &ext4).unwrap();
    let e = Heap::create(&other, &small()).unwrap_err();
    assert!(e.errno() == libc::EEXIST && e.to_string().contains("other data"), "{e}");
    assert!(std::fs::read(&other).unwrap() == ext4, "it was changed");
    let options = FormatOptions::default();
    let e = Heap::format(SimMedia::new(ext4, Domain::Memory), &options).unwrap_err();
    assert_eq!(e.errno(), libc::EEXIST, "{e}");
    // One that is blank is made longer, and cut back.
    let blank = folder.file("blank");
    std::fs::write(&blank, vec![0; 1 << 20]).unwrap();
    let long = CreateOptions { label: "x".repeat(64), ..small() };
    assert_eq!(Heap::create(&blank, &long).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(std::fs::metadata(&blank).unwrap().len(), 1 << 20);
    let (link, nowhere) = (folder.file("link"), folder.file("nowhere"));
    std::os::unix::fs::symlink(&nowhere, &link).unwrap();
    assert_eq!(Heap::create(&link, &small()).unwrap_err().errno(), libc::ENOENT);
    assert!(link.is_symlink() && !nowhere.exists());
}

#[test]
fn of_several_who_make_a_heap_one_does_and_keeps_it() {
    const ROUNDS: usize = 40;
    let folder = Folder::new();
    for round in 0..ROUNDS {
        let path = folder.file(&format!("heap {round}"));
        let options = CreateOptions { size: Some(512 << 10), ..small() };
        let begin = std::sync::Barrier::new(3);
        let made: Vec<_> = std::thread::scope(|s| {
            let make = || {
                begin.wait();
                Heap::create(&path, &options)
            };
            let threads: Vec<_> = (0..3).map(|_| s.spawn(make)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let (kept, refused): (Vec<_>, Vec<_>) = made.into_iter().partition(Result::is_ok);
        assert_eq!(kept.len(), 1, "{refused:?}");
        for e in refused.into_iter().map(Result::unwrap_err) {
            assert!([libc::EBUSY, libc::EEXIST].contains(&e.errno()), "{e}");
        }
        kept.into_iter().for_each(|heap| drop(heap.unwrap().close().unwrap()));
        Heap::open_path(&path, &OpenOptions::default()).unwrap();
    }
}

#[test]
fn a_heap_with_a_place_keeps_its_addresses_or_says_who_is_there() {
    let folder = Folder::new();
    let path = folder.file("heap");
    let options = CreateOptions { place: Place::Fixed, ..small() };
    let heap = Heap::create(&path, &options).unwrap();
    let base = heap.base().unwrap();
    let first = put(&heap, "first", 1);
    let second = put(&heap, "second", 2);
    let mut t = heap.transaction();
    t.point(first.add(8), Some(second));
    t.commit().unwrap();
    let address = heap.address(second).unwrap();
    assert_eq!(address.addr() as u64, base + second.0);
    assert_eq!(heap.word(first.add(8)).unwrap(), address.addr() as u64, "words hold addresses");
    assert_eq!(heap.offset_of(address), Some(second));
    heap.close().unwrap();
    let heap = Heap::open_path(&path, &OpenOptions::default()).unwrap();
    assert_eq!(heap.base(), Some(base));
    assert_eq!(heap.linked(heap.word(first.add(8)).unwrap()), Some(second));
    // Another heap cannot have the same place while this one is there.
    let taken = folder.file("taken");
    let there = CreateOptions { place: Place::At(base), ..small() };
    let e = Heap::create(&taken, &there).unwrap_err();
    assert_eq!(e.errno(), libc::EADDRINUSE, "{e}");
    assert!(!taken.exists());
    let copy = folder.file("copy");
    std::fs::copy(&path, &copy).unwrap();
    let e = Heap::open_path(&copy, &OpenOptions::default()).unwrap_err();
    assert_eq!(e.errno(), libc::EADDRINUSE, "{e}");
    assert!(e.to_string().contains("copy"), "{e}");
    heap.close().unwrap();
    let bytes = std::fs::read(&copy).unwrap();
    // Its first header says nothing: the second one names the place.
    std::fs::write(&copy, [&[bytes[0] ^ 1], &bytes[1..]].concat()).unwrap();
    let heap = Heap::open_path(&copy, &OpenOptions::default()).unwrap();
    assert!(heap.base() == Some(base) && heap.opened().header_mended);
    heap.close().unwrap();
    // Mapped elsewhere by other means it is refused.
    let span = Span::open(&copy, &SpanOptions::default()).unwrap();
    assert_eq!(Heap::open(span).unwrap_err().errno(), libc::EADDRINUSE);
    for odd in [0, 12345, 1 << 47] {
        let options = CreateOptions { place: Place::At(odd), ..small() };
        assert!(Heap::create(&folder.file("odd"), &options).is_err(), "{odd:#x}");
    }
}

#[test]
fn a_commit_that_is_refused_changes_nothing() {
    let heap = sim(1 << 20, Domain::Memory);
    let at = put(&heap, "root", 1);
    let (usage, roots) = (heap.usage(), heap.roots());
    let reserved = heap.reserve_offset(64).unwrap();
    let publish = Change::Publish { at: reserved, stored: 0 };
    let root = |to| Change::Root { name: b"new", type_number: 1, to };
    let long = [b'x'; 256];
    let refused: &[(&[Change<'_>], i32)] = &[
        (&[publish, publish], libc::EBUSY),
        (&[Change::Publish { at, stored: 0 }], libc::EINVAL),
        (&[Change::Free(reserved)], libc::EINVAL),
        (&[publish, Change::Free(at.add(16))], libc::EINVAL),
        (&[publish, Change::Free(Offset(5))], libc::EINVAL),
        (&[Change::Free(at), Change::Free(at)], libc::EBUSY),
        (&[publish, Change::Set { at: at.add(4), value: 1 }], libc::EINVAL),
        (&[publish, Change::Set { at: at.add(32), value: 1 }], libc::EINVAL),
        (&[Change::Free(at), Change::Set { at, value: 1 }], libc::EINVAL),
        (&[Change::Set { at: Offset(u64::MAX - 7), value: 1 }], libc::EINVAL),
        (&[publish, Change::Set { at: Offset(u64::MAX - 7), value: 1 }], libc::EINVAL),
        (&[publish, Change::Set { at: reserved.add(64), value: 1 }], libc::EINVAL),
        (&[publish, root(Some(reserved.add(16)))], libc::EINVAL),
        (&[Change::Free(at), root(Some(at))], libc::EINVAL),
        (&[publish, Change::Root { name: b"root", type_number: 8, to: None }], libc::EEXIST),
        (&[publish, Change::RemoveRoot { name: b"none" }], libc::ENOENT),
        (&[Change::Root { name: b"", type_number: 1, to: None }], libc::EINVAL),
        (&[Change::Root { name: &long, type_number: 1, to: None }], libc::ENAMETOOLONG),
    ];
    for (changes, errno) in refused {
        let e = heap.commit(changes).unwrap_err();
        assert_eq!(e.errno(), *errno, "{changes:?}: {e}");
        assert_eq!((heap.usage(), heap.roots()), (usage, roots.clone()), "{changes:?}");
        assert_eq!(heap.get(Ptr::<[u64; 4]>::new(at)).unwrap(), [1; 4], "{changes:?}");
    }
    heap.commit(&[publish, root(Some(reserved)), Change::Set { at: reserved.add(8), value: 9 }]).unwrap();
    assert_eq!(heap.word(reserved.add(8)).unwrap(), 9);
    assert_eq!(heap.give_back(reserved).unwrap_err().errno(), libc::EINVAL);
    let names: Vec<String> = (0..64).map(|n| format!("{n}")).collect();
    let many: Vec<Change<'_>> =
        names.iter().map(|name| Change::Root { name: name.as_bytes(), type_number: 1, to: None }).collect();
    assert_eq!(heap.commit(&many).unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(heap.roots().len(), 2);
    heap.commit(&many[..62]).unwrap();
    assert!(heap.check().unwrap().is_clean());
}

#[test]
fn a_root_changes_its_type_in_one_commit() {
    let heap = sim(1 << 20, Domain::Memory);
    let (a, b) = (put(&heap, "a", 1), put(&heap, "b", 2));
    for number in 100..106 {
        let mut t = heap.transaction();
        t.remove_root(b"a");
        t.set_root(b"a", number, Some(a));
        t.commit().unwrap();
        assert_eq!(heap.root(b"a", number).unwrap(), Some(a));
        assert_eq!((heap.root(b"b", TYPE).unwrap(), heap.roots().len()), (Some(b), 2));
        assert!(heap.check().unwrap().is_clean());
    }
    let left = Heap::open(heap.media().crash_point().media(Keep::Nothing)).unwrap();
    assert_eq!(left.roots(), heap.roots());
}

/// A commit of thousands of objects and words is as any other.
#[test]
fn a_commit_may_be_as_large_as_there_is_room() {
    const OBJECTS: u64 = 5000;
    let heap = sim(4 << 20, Domain::Memory);
    let objects: Vec<Offset> = (0..OBJECTS).map(|_| heap.reserve_offset(32).unwrap()).collect();
    let publish = objects.iter().rev().map(|&at| Change::Publish { at, stored: 0 });
    let words = objects.iter().enumerate().map(|(n, &at)| Change::Set { at: at.add(24), value: n as u64 });
    let beyond = Change::Set { at: objects.iter().max().unwrap().add(32), value: 0 };
    let changes: Vec<Change<'_>> = words.chain(publish).chain([beyond]).collect();
    assert_eq!(heap.commit(&changes).unwrap_err().errno(), libc::EINVAL);
    heap.commit(&changes[..changes.len() - 1]).unwrap();
    let left = Heap::open(heap.media().crash_point().media(Keep::Nothing)).unwrap();
    assert_eq!(left.usage().objects, OBJECTS);
    for (n, &at) in objects.iter().enumerate() {
        assert_eq!(left.word(at.add(24)).unwrap(), n as u64);
    }
}

#[test]
fn what_nothing_leads_to_is_found_and_so_are_links_to_nothing() {
    let heap = sim(1 << 20, Domain::Memory);
    let (a, b) = (put(&heap, "a", 0), put(&heap, "b", 0));
    let mut t = heap.transaction();
    let lost = t.publish(heap.reserve(48).unwrap());
    t.remove_root(b"b");
    t.set(a, heap.link_value(b));
    t.commit().unwrap();
    let trace = |heap: &Heap<SimMedia>| {
        heap.reach(&mut |at, bytes, link| {
            assert_eq!(bytes, 32);
            heap.linked(heap.word(at)?).into_iter().for_each(link);
            Ok(())
        })
        .unwrap()
    };
    let report = trace(&heap);
    assert_eq!((report.lost.clone(), report.findings.len()), (vec![lost], 0), "{report:?}");
    assert!(heap.check().unwrap().is_clean(), "without a trace nobody knows");
    heap.commit(&[Change::Free(b), Change::Free(lost)]).unwrap();
    let report = trace(&heap);
    assert!(report.lost.is_empty() && report.findings[0].contains("nothing is live"), "{report:?}");
    heap.commit(&[Change::Free(a)]).unwrap();
    assert!(heap.check().unwrap().findings[0].contains("root `a`"));
    assert_eq!(heap.root(b"a", TYPE).unwrap_err().errno(), libc::EUCLEAN);
    // Somebody else has the space, and has not published it.
    while heap.reserve_offset(32).unwrap() != a {}
    assert_eq!(heap.root(b"a", TYPE).unwrap_err().errno(), libc::EUCLEAN);
}

#[test]
fn a_heap_that_could_not_make_something_durable_acknowledges_nothing_more() {
    let heap = sim(1 << 20, Domain::PageCache);
    put(&heap, "kept", 1);
    heap.media().fail_syncs(true);
    let mut t = heap.transaction();
    let object = t.publish(heap.reserve(32).unwrap());
    t.set_root(b"doubtful", TYPE, Some(object));
    assert_eq!(t.commit().unwrap_err().errno(), libc::EIO);
    heap.media().fail_syncs(false);
    assert_eq!(heap.commit(&[Change::Set { at: object, value: 1 }]).unwrap_err().errno(), libc::EIO);
    assert_eq!(heap.reserve_offset(16).unwrap_err().errno(), libc::EIO);
    for keep in [Keep::Nothing, Keep::Everything] {
        let again = Heap::open(heap.media().crash_point().media(keep)).unwrap();
        assert!(again.root(b"kept", TYPE).unwrap().is_some());
        assert!(again.check().unwrap().is_clean());
    }
}

/// The kernel says once that it could not write pages, and takes them for clean: what is found there may not be on the disk.
#[test]
fn a_record_that_a_sync_did_not_write_is_durable_before_it_is_applied() {
    let media = Arc::new(SimMedia::new(vec![0; 1 << 20], Domain::PageCache));
    let options = FormatOptions { shape: Some(SHAPE), identity: Some(3), ..FormatOptions::default() };
    let heap = Heap::format(media.clone(), &options).unwrap();
    // Not on one page.
    let mut object = heap.reserve(16384).unwrap();
    object.zero().unwrap();
    let words = [0, 8192].map(|at| object.offset().add(at));
    let mut t = heap.transaction();
    let at = t.publish(object);
    t.set_root(b"both", TYPE, Some(at));
    t.commit().unwrap();
    media.fail_sync_once();
    let e = heap.commit(&words.map(|at| Change::Set { at, value: 1 })).unwrap_err();
    assert_eq!(e.errno(), libc::EIO);
    drop(heap);
    let points = Arc::new(Mutex::new(Vec::new()));
    let noted = points.clone();
    media.record(Some(Box::new(move |point: &CrashPoint| noted.lock().unwrap().push(point.clone()))));
    drop(Heap::open(media.clone()).unwrap());
    media.record(None);
    let points = std::mem::take(&mut *points.lock().unwrap());
    assert!(points.len() >= 3, "the record, its words, the state: {}", points.len());
    let bounds = Bounds { leaves_max: 1 << 8, lane_states: 16, seed: 5 };
    for point in &points {
        let mut visit = |left: SimMedia| {
            let left = Heap::open(left).map_err(|e| e.to_string())?;
            let [one, other] = words.map(|at| left.word(at).unwrap());
            if one == other { Ok(one) } else { Err(format!("one word is {one}, the other {other}")) }
        };
        let (_, wrong) = explore(point, &bounds, &mut visit);
        assert!(wrong.is_none(), "{wrong:?}");
    }
}

#[test]
fn bad_media_is_an_error_of_the_call() {
    let heap = sim(1 << 20, Domain::Memory);
    let at = put(&heap, "root", 1);
    heap.media().poison(at.0 as usize..at.0 as usize + 64);
    assert_eq!(heap.word(at).unwrap_err().errno(), libc::EIO);
    assert_eq!(heap.commit(&[Change::Set { at, value: 2 }]).unwrap_err().errno(), libc::EIO);
    assert_eq!(
        heap.commit(&[Change::Free(at)]).unwrap_err().errno(),
        libc::EIO,
        "nobody knows what is there"
    );
}

/// Of header and state there are two copies: one that cannot be read is as good as a damaged one.
#[test]
fn one_copy_of_header_and_state_may_be_bad_media() {
    const BYTES: usize = 1 << 20;
    const LAST: usize = BYTES - 4096;
    let heap = sim(BYTES, Domain::Memory);
    let at = put(&heap, "root", 1);
    let image = heap.media().image();
    let with = |bad: &[std::ops::Range<usize>]| {
        let media = SimMedia::new(image.clone(), Domain::Memory);
        bad.iter().for_each(|bad| media.poison(bad.clone()));
        media
    };
    for bad in [0..4096, 4096..8192, LAST..BYTES, LAST..LAST + 2048, LAST + 2048..BYTES] {
        let heap = Heap::open(with(std::slice::from_ref(&bad))).unwrap_or_else(|e| panic!("{bad:?}: {e}"));
        assert!(!heap.opened().header_mended, "bad media cannot be mended");
        assert_eq!(heap.root(b"root", TYPE).unwrap(), Some(at));
        put(&heap, "other", 2);
        heap.close().unwrap();
    }
    let headers = Heap::open(with(&[0..4096, LAST..LAST + 2048])).unwrap_err();
    let states = Heap::open(with(&[4096..8192, LAST + 2048..BYTES])).unwrap_err();
    assert_eq!((headers.errno(), states.errno()), (libc::EUCLEAN, libc::EUCLEAN));
    // Of rings there is one: nobody knows which commits were there.
    let ring = format::LANES_AT as usize..format::LANES_AT as usize + 64;
    assert_eq!(Heap::open(with(std::slice::from_ref(&ring))).unwrap_err().errno(), libc::EIO);
}

/// Who made something else there left the second copy of the header alone.
#[test]
fn what_was_made_over_a_heap_is_not_overwritten() {
    const BYTES: usize = 1 << 20;
    let heap = sim(BYTES, Domain::Memory);
    let at = put(&heap, "root", 1);
    let image = heap.media().image();
    type Change<'a> = &'a dyn Fn(&mut [u8]);
    let with = |change: Change| {
        let mut image = image.clone();
        change(&mut image);
        image
    };
    let foreign: [Change; 3] = [
        &|image| image[..4096].fill(0x5a),
        // Much of a header is zeros, in whatever else begins there, too.
        &|image| {
            image[..4096].fill(0);
            image[..8].copy_from_slice(b"somebody");
        },
        // A file system that leaves the first sectors alone.
        &|image| {
            image[..4096].fill(0);
            image[1080..1082].copy_from_slice(&[0x53, 0xef]);
        },
    ];
    for change in foreign {
        let image = with(change);
        let media = SimMedia::new(image.clone(), Domain::Memory);
        media.record(Some(Box::new(|_| panic!("it stores"))));
        assert_eq!(Heap::open(media).unwrap_err().errno(), libc::EINVAL);
    }
    let damaged: [Change; 3] =
        [&|image| image[..4096].fill(0), &|image| image[..64].fill(0x5a), &|image| image[3] ^= 1];
    for change in damaged {
        let heap = Heap::open(SimMedia::new(with(change), Domain::Memory)).unwrap();
        assert!(heap.opened().header_mended);
        assert_eq!(heap.root(b"root", TYPE).unwrap(), Some(at));
    }
}

#[test]
fn a_chunk_with_a_bad_descriptor_is_left_out() {
    const BYTES: usize = 1 << 20;
    let layout = Layout::new(BYTES as u64, SHAPE).unwrap();
    let heap = sim(BYTES, Domain::Memory);
    // Opening reads only the first line of a free chunk's descriptor.
    let bad = |chunk: u32| layout.word(chunk, 8).0 as usize..layout.word(chunk, 48).0 as usize;
    [0, 2].into_iter().for_each(|chunk| heap.media().poison(bad(chunk)));
    let mut taken = Vec::new();
    while let Ok(at) = heap.reserve_offset(16384) {
        assert!(![Some(0), Some(2)].contains(&layout.chunk_of(at.0)), "{at:?} is in a bad chunk");
        taken.push(at);
    }
    assert_eq!(taken.len() as u64, (layout.chunks - 2) * CHUNK / 16384);
    taken.into_iter().for_each(|at| heap.give_back(at).unwrap());
    assert_eq!(heap.reserve_offset(heap.usage().capacity).unwrap_err().errno(), libc::ENOSPC);
    let report = heap.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// Free objects of a run that another thread takes from are free.
#[test]
fn one_thread_may_have_what_others_left() {
    let heap = sim(1 << 20, Domain::Memory);
    let mut taken: Vec<Offset> = Vec::new();
    for thread in [1, 2, 0] {
        prefer(Some(thread));
        taken.push(heap.reserve_offset(8192).unwrap());
    }
    while let Ok(at) = heap.reserve_offset(8192) {
        taken.push(at);
    }
    prefer(None);
    assert_eq!(taken.len() as u64, heap.usage().capacity / 8192, "there was room");
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len() as u64, heap.usage().capacity / 8192, "two have the same bytes");
}

/// Both copies of the newest state line are lost: records say, too, what was settled before them, so that an old one
/// whose lane rested does not undo what is newer.
#[test]
fn a_lost_state_line_brings_no_old_record_back() {
    const BYTES: usize = 1 << 20;
    const LINES: u64 = 8;
    let shape = Shape { lanes: 2, ring_lines: LINES as u16, roots: 4 };
    let options = FormatOptions { shape: Some(shape), identity: Some(3), ..FormatOptions::default() };
    let heap = Heap::format(SimMedia::new(vec![0; BYTES], Domain::Memory), &options).unwrap();
    let at = put(&heap, "root", 0);
    let heap = Heap::open(heap.close().unwrap()).unwrap();
    let set = |lane: usize, at: Offset, value: u64| {
        prefer(Some(lane));
        heap.commit(&[Change::Set { at, value }]).unwrap();
        prefer(None);
    };
    set(0, at, 1);
    set(1, at, 2);
    // Once round, so that the line of the newer record is used again.
    (1..=LINES).for_each(|n| set(1, at.add(8), n));
    let lost = |mutation: Option<Mutation>| {
        let mut image = heap.media().crash_point().image(Keep::Everything);
        let serial = |at: usize| {
            u64::from_le_bytes(image[at + format::state::SERIAL..][..8].try_into().expect("eight bytes"))
        };
        let newest = if serial(4096) > serial(4096 + 64) { 0 } else { 64 };
        for block in [4096, BYTES - 4096 + 2048] {
            image[block + newest] ^= 1;
        }
        let media = SimMedia::new(image, Domain::Memory);
        media.mutate(mutation.map(std::sync::Arc::new));
        Heap::open(media).unwrap().word(at).unwrap()
    };
    assert_eq!(lost(None), 2);
    let without = Mutation::without_named("a record says what was settled before it".to_owned());
    assert_eq!(lost(Some(without)), 1, "this shows nothing");
}

/// Each thread has its own list, all share the space; what one has nobody else gets.
#[test]
fn threads_share_a_heap() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 400;
    let folder = Folder::new();
    let path = folder.file("heap");
    let options = CreateOptions { size: Some(16 << 20), ..small() };
    let options =
        CreateOptions { open: OpenOptions { assume: Some(Domain::Memory), prefault: false }, ..options };
    let heap = Heap::create(&path, &options).unwrap();
    std::thread::scope(|s| {
        for thread in 0..THREADS {
            let heap = &heap;
            s.spawn(move || {
                let mut rng = Rng::new(thread + 1);
                let mut mine: Vec<(Offset, u64, u8)> = Vec::new();
                let name = format!("thread {thread}");
                for _ in 0..ROUNDS {
                    let mut t = heap.transaction();
                    let bytes = [16, 40, 200, 1000, 5000, 40_000][rng.below(6) as usize];
                    let fill = rng.below(256) as u8;
                    let mut object = heap.reserve(bytes).unwrap();
                    object.write(0, &vec![fill; bytes as usize]).unwrap();
                    let at = t.publish(object);
                    t.set_root(name.as_bytes(), thread, Some(at));
                    let old = (mine.len() > 20).then(|| mine.swap_remove(rng.below(20) as usize));
                    old.into_iter().for_each(|(at, ..)| t.free(at));
                    t.commit().unwrap();
                    mine.push((at, bytes, fill));
                }
                for (at, bytes, fill) in mine {
                    let mut seen = vec![0; bytes as usize];
                    heap.read(at, &mut seen).unwrap();
                    assert!(seen.iter().all(|&b| b == fill), "somebody else has the object at {at:?}");
                }
            });
        }
    });
    let (usage, roots) = (heap.usage(), heap.roots());
    assert_eq!(usage.objects, THREADS * 21);
    let report = heap.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    drop(heap);
    let heap = Heap::open_path(&path, &OpenOptions::default()).unwrap();
    assert_eq!((heap.usage(), heap.roots()), (usage, roots));
    let report = heap.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// No commit names a root, so that nothing but the lanes keeps them apart: some replace an object that a word leads to,
/// one stores in place, one commits more than a record holds.
#[test]
fn threads_change_words_side_by_side() {
    const ROUNDS: u64 = 1500;
    const WORDS: u64 = 64;
    let folder = Folder::new();
    let path = folder.file("heap");
    let open = OpenOptions { assume: Some(Domain::Memory), prefault: false };
    let heap = Heap::create(&path, &CreateOptions { open, ..small() }).unwrap();
    let cells: [Offset; 4] = std::array::from_fn(|n| {
        let mut t = heap.transaction();
        let mut cell = heap.reserve(WORDS * 8).unwrap();
        cell.zero().unwrap();
        let cell = t.publish(cell);
        let mut object = heap.reserve(32).unwrap();
        object.zero().unwrap();
        t.link(cell, object);
        t.set_root(format!("{n}").as_bytes(), TYPE, Some(cell));
        t.commit().unwrap();
        cell
    });
    let word = |at: Offset, n: u64| at.add(n * 8);
    let replace = |cell: Offset| {
        for round in 1..=ROUNDS {
            let old = heap.linked(heap.word(cell).unwrap()).unwrap();
            assert_eq!(heap.word(old).unwrap(), round - 1, "somebody else has the object");
            let mut object = heap.reserve(32).unwrap();
            object.put(&[round; 4]).unwrap();
            let mut t = heap.transaction();
            t.link(cell, object);
            t.set(word(cell, 1), round);
            t.free(old);
            t.commit().unwrap();
        }
    };
    let store = |cell: Offset| {
        for round in 1..=ROUNDS {
            heap.commit(&[Change::Set { at: word(cell, 1), value: round - 1 }]).unwrap();
            heap.overwrite(word(cell, 1), &round.to_le_bytes()).unwrap();
        }
    };
    let set_all = |cell: Offset| {
        for round in 1..=ROUNDS {
            let all = (1..WORDS).map(|n| Change::Set { at: word(cell, n), value: round });
            heap.commit(&all.collect::<Vec<_>>()).unwrap();
        }
    };
    std::thread::scope(|s| {
        let (replace, store, set_all) = (&replace, &store, &set_all);
        s.spawn(move || replace(cells[0]));
        s.spawn(move || replace(cells[1]));
        s.spawn(move || store(cells[2]));
        s.spawn(move || set_all(cells[3]));
    });
    let judge = |heap: &Heap<Span>| {
        assert_eq!(heap.usage().objects, 8, "an object is lost");
        for n in 0..4 {
            let cell = heap.root(format!("{n}").as_bytes(), TYPE).unwrap().unwrap();
            assert_eq!(heap.word(word(cell, 1)).unwrap(), ROUNDS, "{n}");
            assert_eq!(heap.word(word(cell, WORDS - 1)).unwrap(), if n == 3 { ROUNDS } else { 0 });
            let object = heap.linked(heap.word(cell).unwrap()).unwrap();
            assert_eq!(heap.word(object).unwrap(), if n < 2 { ROUNDS } else { 0 }, "{n}");
        }
        let report = heap.check().unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
    };
    judge(&heap);
    drop(heap);
    judge(&Heap::open_path(&path, &OpenOptions::default()).unwrap());
}

// ---------------------------------------------------------------------------------------------------
// A model

#[derive(Clone, Debug)]
enum Step {
    /// Publish an object of so many bytes under this root, free the one before.
    Put(u8, u32, u8),
    /// Two at once; the second's first word points to the first.
    Pair(u8, u32),
    Set(u8, u64),
    /// The root is removed and made again, in one commit.
    Renew(u8),
    Remove(u8),
    /// Reserved and given back.
    Abandon(u32),
    /// Reserved until the heap is opened again.
    Keep(u32),
    Close,
    Crash(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![8 => 8u32..300, 3 => 300u32..5000, 1 => 5000u32..100_000];
    let step = prop_oneof![
        8 => (0u8..12, bytes.clone(), any::<u8>()).prop_map(|(r, b, f)| Step::Put(r, b, f)),
        2 => (0u8..12, bytes.clone()).prop_map(|(r, b)| Step::Pair(r, b)),
        4 => (0u8..12, any::<u64>()).prop_map(|(r, v)| Step::Set(r, v)),
        3 => (0u8..12).prop_map(Step::Remove),
        2 => (0u8..12).prop_map(Step::Renew),
        1 => bytes.clone().prop_map(Step::Abandon),
        1 => bytes.prop_map(Step::Keep),
        1 => Just(Step::Close),
        1 => any::<u64>().prop_map(Step::Crash),
    ];
    proptest::collection::vec(step, 100..250)
}

/// Of each root: its object's bytes, and what another one holds that its first word points to.
#[derive(Clone, PartialEq, Debug, Default)]
struct Held {
    content: Vec<u8>,
    behind: Option<Vec<u8>>,
}

type Model = BTreeMap<u8, Held>;

fn name(root: u8) -> [u8; 2] {
    [b'r', root]
}

fn objects_of(heap: &Heap<SimMedia>, root: u8, held: &Held) -> (Offset, Option<Offset>) {
    let at = heap.root(&name(root), TYPE).unwrap().expect("it leads somewhere");
    (at, held.behind.is_some().then(|| heap.linked(heap.word(at).unwrap()).unwrap()))
}

fn read(heap: &Heap<SimMedia>, at: Offset, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    heap.read(at, &mut content).unwrap();
    content
}

fn compare(heap: &Heap<SimMedia>, model: &Model) {
    assert_eq!(heap.roots().len(), model.len());
    let mut used = 0;
    let mut objects = 0;
    for (&root, held) in model {
        let (at, behind) = objects_of(heap, root, held);
        assert!(read(heap, at, held.content.len()) == held.content, "root {root} holds something else");
        for (at, content) in
            [(at, Some(&held.content))].into_iter().chain(behind.map(|at| (at, held.behind.as_ref())))
        {
            used += heap.usable_bytes(at).unwrap();
            objects += 1;
            let content = content.expect("it is one of the model");
            assert!(
                read(heap, at, content.len()) == *content,
                "an object of root {root} holds something else"
            );
        }
    }
    assert_eq!((heap.usage().objects, heap.usage().used), (objects, used), "something is leaked");
    let report = heap.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// Whether there was room.
fn take(heap: &Heap<SimMedia>, model: &mut Model, step: &Step) -> lodestone::Result<()> {
    let freed = |root: u8, model: &Model| -> Vec<Offset> {
        let objects = model.get(&root).map(|held| objects_of(heap, root, held));
        objects.into_iter().flat_map(|(at, behind)| [Some(at), behind]).flatten().collect()
    };
    let mut t = heap.transaction();
    match *step {
        Step::Put(root, bytes, fill) => {
            let content: Vec<u8> = (0..bytes).map(|n| fill.wrapping_add(n as u8)).collect();
            let mut object = heap.reserve(bytes as u64)?;
            object.write(0, &content)?;
            let at = t.publish(object);
            t.set_root(&name(root), TYPE, Some(at));
            freed(root, model).into_iter().for_each(|at| t.free(at));
            t.commit()?;
            model.insert(root, Held { content, behind: None });
        }
        Step::Pair(root, bytes) => {
            let behind = vec![root; bytes as usize];
            let mut first = heap.reserve(64)?;
            let mut second = heap.reserve(bytes as u64)?;
            second.write(0, &behind)?;
            first.zero()?;
            let at = t.publish(first);
            let second = t.link(at, second);
            t.set_root(&name(root), TYPE, Some(at));
            freed(root, model).into_iter().for_each(|at| t.free(at));
            t.commit()?;
            let mut content = vec![0; 64];
            content[..8].copy_from_slice(&heap.link_value(second).to_le_bytes());
            model.insert(root, Held { content, behind: Some(behind) });
        }
        Step::Set(root, value) => {
            let Some(held) = model.get_mut(&root).filter(|h| h.content.len() >= 16) else { return Ok(()) };
            let (at, _) = objects_of(heap, root, held);
            t.set(at.add(8), value);
            t.commit()?;
            held.content[8..16].copy_from_slice(&value.to_le_bytes());
        }
        Step::Renew(root) => {
            if let Some(held) = model.get(&root) {
                let (at, _) = objects_of(heap, root, held);
                t.remove_root(&name(root));
                t.set_root(&name(root), TYPE, Some(at));
                t.commit()?;
            }
        }
        Step::Remove(root) => {
            if model.contains_key(&root) {
                t.remove_root(&name(root));
                freed(root, model).into_iter().for_each(|at| t.free(at));
                t.commit()?;
                model.remove(&root);
            }
        }
        Step::Abandon(bytes) => heap.reserve(bytes as u64)?.write(0, &vec![0xee; bytes as usize])?,
        Step::Keep(bytes) => {
            let mut kept = heap.reserve(bytes as u64)?;
            kept.write(0, &vec![0xdd; bytes as usize])?;
            std::mem::forget(kept);
        }
        Step::Close | Step::Crash(_) => unreachable!("not a change"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Some 45,000 steps (`PROPTEST_CASES` chooses more).
    #[test]
    fn a_heap_does_what_a_model_does(steps in steps(), domain in prop_oneof![Just(Domain::Memory), Just(Domain::CpuCache), Just(Domain::PageCache)]) {
        let mut heap = sim(800 << 10, domain);
        let mut model = Model::new();
        for (n, step) in steps.iter().enumerate() {
            match step {
                Step::Close => heap = Heap::open(heap.close().unwrap()).unwrap(),
                Step::Crash(seed) => {
                    let point = heap.media().crash_point();
                    heap = Heap::open(point.media(Keep::Random(*seed))).unwrap();
                    compare(&heap, &model);
                }
                step => match take(&heap, &mut model, step) {
                    Ok(()) => {}
                    Err(e) => assert_eq!(e.errno(), libc::ENOSPC, "{step:?}: {e}"),
                },
            }
            if n % 16 == 0 {
                compare(&heap, &model);
            }
        }
        compare(&heap, &model);
        for root in 0..12 {
            take(&heap, &mut model, &Step::Remove(root)).unwrap();
        }
        let heap = Heap::open(heap.close().unwrap()).unwrap();
        let whole = heap.usage().capacity;
        heap.give_back(heap.reserve_offset(whole).unwrap()).unwrap();
    }
}

// ---------------------------------------------------------------------------------------------------
// Damage

/// Bytes anywhere in an image go wrong, of one that was closed and of ones that power failures left: it opens or is
/// refused with words; what opens grants nothing twice.
#[test]
fn damage_anywhere_is_refused_or_harmless() {
    let mut heap = sim(600 << 10, Domain::Memory);
    let mut model = Model::new();
    let mut rng = Rng::new(5);
    let mut images = Vec::new();
    for n in 0..160u32 {
        let bytes = [24, 100, 300, 3000, 40_000][rng.below(5) as usize];
        let step = if n % 4 == 3 {
            Step::Remove(rng.below(12) as u8)
        } else {
            Step::Put(rng.below(12) as u8, bytes, n as u8)
        };
        let _ = take(&heap, &mut model, &step);
        if n % 20 == 19 {
            images.push(heap.media().crash_point().image(Keep::Random(n as u64)));
        }
    }
    let media = heap.close().unwrap();
    images.push(media.image());
    heap = Heap::open(media).unwrap();
    let metadata = heap.roots().iter().filter_map(|r| r.to).min().unwrap().0 as usize / 32768 * 32768;
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..6000 {
        let mut image = images[rng.below(images.len() as u64) as usize].clone();
        let end = if rng.below(8) == 0 { image.len() } else { metadata };
        for _ in 0..=rng.below(3) {
            let at = rng.below(end as u64) as usize;
            match rng.below(3) {
                0 => image[at] ^= 1 << rng.below(8),
                1 => image[at] = rng.draw() as u8,
                // A line goes to another place.
                _ => {
                    let (from, to) = (at / 64 * 64, rng.below(end as u64) as usize / 64 * 64);
                    image.copy_within(from..from + 64, to);
                }
            }
        }
        match Heap::open(SimMedia::new(image, Domain::Memory)) {
            Ok(heap) => {
                opened += 1;
                grants_nothing_twice(&heap);
            }
            Err(e) => {
                refused += 1;
                assert!(
                    !e.to_string().is_empty()
                        && [libc::EUCLEAN, libc::EINVAL, libc::EOPNOTSUPP].contains(&e.errno()),
                    "{e:?}"
                );
            }
        }
    }
    assert!(opened > 100 && refused > 100, "{opened} opened, {refused} refused");
}

fn grants_nothing_twice(heap: &Heap<SimMedia>) {
    let report = heap.check().unwrap();
    // A root may lead to what is not live: that is said, by the check and to who asks for it.
    assert!(report.findings.iter().all(|f| f.contains("root `")), "{:?}", report.findings);
    let mut ranges = Vec::new();
    for root in heap.roots() {
        if let Ok(Some(at)) = heap.root(&root.name, root.type_number)
            && let Ok(bytes) = heap.usable_bytes(at)
        {
            ranges.push((at.0, bytes));
        }
    }
    ranges.dedup();
    for bytes in [16, 24, 100, 300, 3000, 40_000] {
        while let Ok(at) = heap.reserve_offset(bytes) {
            ranges.push((at.0, heap.usable_bytes(at).unwrap()));
            if ranges.len() % 8 == 0 {
                break;
            }
        }
    }
    ranges.sort_unstable();
    ranges.dedup();
    assert!(ranges.windows(2).all(|p| p[0].0 + p[0].1 <= p[1].0), "granted twice: {ranges:?}");
}

/// An offset is an address of the media, and what is overwritten there is durable at once.
#[test]
fn addresses_of_the_media_and_of_the_heap_agree() {
    let heap = sim(1 << 20, Domain::Memory);
    let at = put(&heap, "root", 0x0102_0304);
    assert_eq!(heap.media().load64(Addr(at.0)).unwrap(), 0x0102_0304);
    heap.overwrite(at, &9u64.to_le_bytes()).unwrap();
    assert_eq!(heap.media().crash_point().media(Keep::Nothing).load64(Addr(at.0)).unwrap(), 9);
}
