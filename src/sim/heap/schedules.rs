//! The allocator, the lanes and settling under every kind of schedule (see `sync/schedules.rs`): shuttle decides after each
//! access to shared memory, and after each store to the media, who goes on.
//!
//! Looked for: an object that two threads have, one that nobody has, a record that is settled before it is applied
//! (the heap is opened again from what surely survives), threads that wait for each other.

use std::sync::Arc;

use parking_lot::Mutex;
use shuttle::thread;

use crate::media::Domain;
use crate::sim::media::{CrashPoint, Keep, SimMedia};
use crate::sync::schedules::explore;
use crate::wsp::heap::{FormatOptions, Heap, Shape};

const SHAPE: Shape = Shape { lanes: 2, ring_lines: 8, roots: 4 };
/// Room for all that threads have at a time, and not for much more.
const BYTES: usize = 400 << 10;
const ROUNDS: u64 = 4;
const TYPE: u64 = 1;
/// Of the moments at which power may fail so many are tried: the first, and each so far behind the last.
const POINTS_STEP: usize = 5;

fn made() -> Heap<SimMedia> {
    let options = FormatOptions { shape: Some(SHAPE), identity: Some(1), ..FormatOptions::default() };
    Heap::format(SimMedia::new(vec![0; BYTES], Domain::Memory), &options).unwrap()
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
        let heap = Arc::new(made());
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
        let heap = Arc::new(made());
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
