//! The allocator, the lanes and settling under every kind of schedule (see `sync/schedules.rs`): shuttle decides after each
//! access to shared memory, and after each store to the media, who goes on.
//!
//! Looked for: an object that two threads have, one that nobody has, a record that is settled before it is applied
//! (the heap is opened again from what surely survives), threads that wait for each other, an object that is given back
//! twice, a commit that is acknowledged though the sync that it shares failed.

use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Unseen;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use shuttle::thread;

use crate::media::Domain;
use crate::sim::media::{CrashPoint, Keep, SimMedia};
use crate::sim::mutation::Mutation;
use crate::sync::schedules::explore;
use crate::wsp::heap::{Change, FormatOptions, Heap, Offset, Shape};

const SHAPE: Shape = Shape { lanes: 2, ring_lines: 8, roots: 4 };
/// Room for all that threads have at a time, and not for much more.
const BYTES: usize = 400 << 10;
const ROUNDS: u64 = 4;
const TYPE: u64 = 1;
/// Of the moments at which power may fail so many are tried: the first, and each so far behind the last.
const POINTS_STEP: usize = 5;

fn made(domain: Domain) -> Heap<SimMedia> {
    let options = FormatOptions { shape: Some(SHAPE), identity: Some(1), ..FormatOptions::default() };
    Heap::format(SimMedia::new(vec![0; BYTES], domain), &options).unwrap()
}

/// Each thread replaces the object of its own root, so often that rings go round.
fn replace(heap: &Heap<SimMedia>, name: &[u8], bytes: u64) {
    for round in 0..ROUNDS {
        let old = heap.root(name, TYPE).ok().flatten();
        let mut new = heap.reserve(bytes).unwrap();
        new.put(&[round; 2]).unwrap();
        let mut t = heap.transaction();
        let at = t.publish(new);
        t.set_root(name, TYPE, Some(at));
        old.into_iter().for_each(|at| t.free(at));
        t.commit().unwrap();
        let mut seen = [0; 8];
        heap.read(at, &mut seen).unwrap();
        assert_eq!(u64::from_le_bytes(seen), round, "somebody else has the object");
    }
}

/// Whatever was under way when power failed happened wholly or not at all.
fn one_object_for_each_root(left: &Heap<SimMedia>) {
    let roots = left.roots();
    assert_eq!(left.usage().objects, roots.len() as u64, "an object is lost, or nobody's: {roots:?}");
    for root in roots {
        let mut round = [0; 8];
        left.read(root.to.expect("each leads to one"), &mut round).unwrap();
        assert!(u64::from_le_bytes(round) < ROUNDS, "an object holds what nobody stored");
    }
    let report = left.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
}

#[test]
fn threads_that_replace_objects_lose_none_and_share_none() {
    explore(|| {
        let heap = Arc::new(made(Domain::Memory));
        let points: Arc<Mutex<Vec<CrashPoint>>> = Arc::default();
        let kept = points.clone();
        heap.media().record(Some(Box::new(move |point| kept.lock().push(point.clone()))));
        let threads: Vec<_> = [(b"a", 24), (b"b", 24)]
            .into_iter()
            .map(|(name, bytes)| {
                let heap = heap.clone();
                thread::spawn(move || replace(&heap, name, bytes))
            })
            .collect();
        replace(&heap, b"c", 40_000);
        threads.into_iter().for_each(|t| t.join().unwrap());
        heap.media().record(None);
        assert_eq!(heap.usage().objects, 3);
        for (n, point) in points.lock().iter().enumerate().step_by(POINTS_STEP) {
            for keep in [Keep::Nothing, Keep::Everything, Keep::Random(n as u64)] {
                one_object_for_each_root(&Heap::open(point.media(keep)).unwrap());
            }
        }
        let report = heap.check().unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        let left = Heap::open(heap.media().crash_point().media(Keep::Nothing)).unwrap();
        assert_eq!(left.roots(), heap.roots(), "what was acknowledged is lost");
        assert_eq!(left.usage(), heap.usage());
        let report = left.check().unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
    });
}

#[test]
fn threads_that_take_all_there_is_share_nothing_and_give_all_back() {
    explore(|| {
        let heap = Arc::new(made(Domain::Memory));
        let take = |heap: &Heap<SimMedia>| {
            let mut taken = Vec::new();
            while let Ok(at) = heap.reserve_offset(8192) {
                taken.push(at);
            }
            taken
        };
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let heap = heap.clone();
                thread::spawn(move || {
                    let first = take(&heap);
                    first.iter().for_each(|&at| heap.give_back(at).unwrap());
                    take(&heap)
                })
            })
            .collect();
        let mut all: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 8192), "two have the same bytes");
        all.iter().for_each(|&at| heap.give_back(at).unwrap());
        let whole = heap.usage().capacity;
        heap.give_back(heap.reserve_offset(whole).unwrap()).unwrap();
        assert!(heap.check().unwrap().is_clean());
    });
}

#[test]
fn of_two_who_give_back_an_object_one_does() {
    explore(|| {
        let heap = Arc::new(made(Domain::Memory));
        // Of a run, and of whole chunks.
        let objects = [16, 40_000].map(|bytes| heap.reserve_offset(bytes).unwrap());
        let give = move |heap: &Heap<SimMedia>| objects.map(|at| heap.give_back(at).is_ok());
        let one = heap.clone();
        let beside = thread::spawn(move || give(&one));
        let (here, beside) = (give(&heap), beside.join().unwrap());
        assert!(here.iter().zip(beside).all(|(&here, beside)| here != beside), "{here:?} {beside:?}");
        assert!(heap.check().unwrap().is_clean());
    });
}

// ---------------------------------------------------------------------------------------------------
// Commits that no root keeps apart

/// Words of what each thread has: the first one leads to an object, the others count.
const WORDS: u64 = 18;
const NAMES: [&[u8]; 3] = [b"a", b"b", b"c"];

/// One for each thread, and an object to which it leads.
fn cells(heap: &Heap<SimMedia>) -> [Offset; 3] {
    NAMES.map(|name| {
        let mut t = heap.transaction();
        let (mut cell, mut object) = (heap.reserve(WORDS * 8).unwrap(), heap.reserve(24).unwrap());
        cell.zero().unwrap();
        object.zero().unwrap();
        let cell = t.publish(cell);
        t.link(cell, object);
        t.set_root(name, TYPE, Some(cell));
        t.commit().unwrap();
        cell
    })
}

fn word(cell: Offset, n: u64) -> Offset {
    cell.add(n * 8)
}

/// Replaces the object and counts, in one commit.
fn relink(heap: &Heap<SimMedia>, cell: Offset, acknowledged: &Unseen) {
    for round in 1..=ROUNDS {
        let old = heap.linked(heap.word(cell).unwrap()).unwrap();
        let mut new = heap.reserve(24).unwrap();
        new.put(&[round; 3]).unwrap();
        let mut t = heap.transaction();
        t.link(cell, new);
        t.set(word(cell, 1), round);
        t.free(old);
        t.commit().unwrap();
        acknowledged.store(round, SeqCst);
    }
}

/// Counts by commits and in place, by turns.
fn overwrite(heap: &Heap<SimMedia>, cell: Offset, acknowledged: &Unseen) {
    for round in (1..=ROUNDS).step_by(2) {
        heap.commit(&[Change::Set { at: word(cell, 1), value: round }]).unwrap();
        acknowledged.store(round, SeqCst);
        heap.overwrite(word(cell, 1), &(round + 1).to_le_bytes()).unwrap();
        acknowledged.store(round + 1, SeqCst);
    }
}

/// Counts in all words, by commits that fit no record.
fn set_all(heap: &Heap<SimMedia>, cell: Offset, acknowledged: &Unseen) {
    for round in 1..=2 {
        let all: Vec<_> = (1..WORDS).map(|n| Change::Set { at: word(cell, n), value: round }).collect();
        heap.commit(&all).unwrap();
        acknowledged.store(round, SeqCst);
    }
}

/// What was acknowledged is there, and no commit in part.
fn whole(left: &Heap<SimMedia>, cells: [Offset; 3], acknowledged: [u64; 3]) {
    assert_eq!(left.usage().objects, 6, "not whole: an object is lost, or nobody's");
    for (n, cell) in cells.into_iter().enumerate() {
        let count = left.word(word(cell, 1)).unwrap();
        assert!(
            count >= acknowledged[n],
            "not whole, {n}: {count} is there, {acknowledged:?} were acknowledged"
        );
        let last = left.word(word(cell, WORDS - 1)).unwrap();
        assert!(last == 0 || last == count, "not whole, {n}: {count} and {last}, of one commit");
        let object = left.linked(left.word(cell).unwrap()).unwrap();
        let round = left.word(object).unwrap();
        assert!(round == 0 || round == count, "not whole, {n}: {count}, and the object of {round}");
    }
    let report = left.check().unwrap();
    assert!(report.is_clean(), "not whole: {:?}", report.findings);
}

fn side_by_side(without: Option<&str>) {
    let heap = Arc::new(made(Domain::Memory));
    let cells = cells(&heap);
    heap.media().mutate(without.map(|step| Arc::new(Mutation::without_named(step.to_owned()))));
    let acknowledged: Arc<[Unseen; 3]> = Arc::default();
    let points: Arc<Mutex<Vec<(CrashPoint, [u64; 3])>>> = Arc::default();
    let (kept, seen) = (points.clone(), acknowledged.clone());
    let note = move |point: &CrashPoint| {
        kept.lock().push((point.clone(), std::array::from_fn(|n| seen[n].load(SeqCst))));
    };
    heap.media().record(Some(Box::new(note)));
    let threads: Vec<_> = [(0, relink as fn(&_, _, &_)), (1, set_all)]
        .into_iter()
        .map(|(n, does)| {
            let (heap, acknowledged) = (heap.clone(), acknowledged.clone());
            thread::spawn(move || does(&heap, cells[n], &acknowledged[n]))
        })
        .collect();
    overwrite(&heap, cells[2], &acknowledged[2]);
    threads.into_iter().for_each(|t| t.join().unwrap());
    heap.media().record(None);
    let end = (heap.media().crash_point(), [ROUNDS, 2, ROUNDS]);
    let points = std::mem::take(&mut *points.lock());
    for (n, (point, acknowledged)) in points.iter().step_by(POINTS_STEP).chain([&end]).enumerate() {
        for keep in [Keep::Nothing, Keep::Everything, Keep::Random(n as u64)] {
            whole(&Heap::open(point.media(keep)).unwrap(), cells, *acknowledged);
        }
    }
}

#[test]
fn commits_of_words_alone_run_side_by_side() {
    explore(|| side_by_side(None));
}

/// Whether the schedules above would notice.
#[test]
#[should_panic(expected = "not whole")]
fn without_waiting_for_lanes_commits_are_lost() {
    explore(|| side_by_side(Some("who settles waits for every lane")));
}

#[test]
fn who_shares_a_sync_that_fails_is_told() {
    explore(|| {
        let heap = Arc::new(made(Domain::PageCache));
        let cells = cells(&heap);
        let acknowledged: Arc<[Unseen; 3]> = Arc::default();
        heap.media().fail_sync_once();
        let count = |heap: &Heap<SimMedia>, cell: Offset, acknowledged: &Unseen| {
            for value in 1..=ROUNDS {
                if heap.commit(&[Change::Set { at: word(cell, 1), value }]).is_err() {
                    return;
                }
                acknowledged.store(value, SeqCst);
            }
        };
        let threads: Vec<_> = (1..3)
            .map(|n| {
                let (heap, acknowledged) = (heap.clone(), acknowledged.clone());
                thread::spawn(move || count(&heap, cells[n], &acknowledged[n]))
            })
            .collect();
        count(&heap, cells[0], &acknowledged[0]);
        threads.into_iter().for_each(|t| t.join().unwrap());
        let left = Heap::open(heap.media().crash_point().media(Keep::Nothing)).unwrap();
        for (cell, acknowledged) in cells.into_iter().zip(&*acknowledged) {
            assert!(
                left.word(word(cell, 1)).unwrap() >= acknowledged.load(SeqCst),
                "an acknowledged commit is lost"
            );
        }
    });
}
