//! Each model is the smallest meeting of threads in which what a file's head promises can fail: with its fences left out it has
//! to, else it would show nothing.

use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Unseen;
use std::task::{Wake, Waker};

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use crate::fs::epoch::Epochs;
use crate::sync::lock::Lock;
use crate::sync::primitive::atomic::WITHOUT_FENCES;
use crate::sync::thread::have;
use crate::wait::{Bell, Seat};

/// Forced switches of an execution.
const SWITCHES: usize = 3;

pub fn explore(model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(SWITCHES);
    builder.check(model);
}

/// The model holds, and does not without fences.
pub fn holds_by_its_fences(model: fn()) {
    explore(model);
    WITHOUT_FENCES.set(true);
    let failed = catch_unwind(|| explore(model)).is_err();
    WITHOUT_FENCES.set(false);
    assert!(failed, "this model holds without fences, too: it shows nothing");
}

/// A value that loom watches: two at it at once, or one that does not see what another did, end the model.
#[derive(Default)]
pub struct Cell(loom::cell::UnsafeCell<u32>);

// SAFETY: whoever gets at it is alone, or loom says that it is not.
unsafe impl Sync for Cell {}

// SAFETY: see above.
unsafe impl Send for Cell {}

impl Cell {
    pub fn add(&self) {
        // SAFETY: loom checks that nobody else is at it.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    fn get(&self) -> u32 {
        // SAFETY: loom checks that nobody changes it.
        self.0.with(|value| unsafe { *value })
    }
}

/// Counts wakes where loom does not see it.
#[derive(Default)]
struct Wakes(Unseen);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn rings(ring: fn(&Bell)) {
    let (bell, ended) = (Arc::new(Bell::new()), Arc::new(AtomicBool::new(false)));
    let worker = thread::spawn({
        let (bell, ended) = (bell.clone(), ended.clone());
        move || {
            ended.store(true, Ordering::Release);
            ring(&bell);
        }
    });
    let (seat, wakes) = (Seat::new(), Arc::new(Wakes::default()));
    bell.listen(&seat, &Waker::from(wakes.clone()));
    let seen = ended.load(Ordering::Acquire);
    worker.join().unwrap();
    assert!(seen || wakes.0.load(Ordering::SeqCst) == 1, "it sleeps for ever");
}

#[test]
fn no_ring_is_missed() {
    holds_by_its_fences(|| rings(Bell::ring));
    holds_by_its_fences(|| {
        rings(|bell| {
            bell.ring_one();
        });
    });
}

#[test]
fn an_epoch_ends_after_those_inside() {
    holds_by_its_fences(|| {
        let epochs = Arc::new(Epochs::new(5));
        epochs.share();
        let written = Arc::new(Cell::default());
        let writer = thread::spawn({
            let (epochs, written) = (epochs.clone(), written.clone());
            move || {
                have(1);
                let guard = epochs.enter();
                if guard.epoch() == 5 {
                    written.add();
                }
            }
        });
        have(0);
        assert_eq!(epochs.advance(), 5);
        // What was written in the epoch is there, and nothing more is.
        written.add();
        writer.join().unwrap();
    });
}

/// A lock leans to a thread that has it once, and another one writes.
fn has_beside_a_writer(once: fn(&Lock<Cell>)) -> Arc<Lock<Cell>> {
    let lock = Arc::new(Lock::leaning_to(1, Cell::default()));
    let leans_to = thread::spawn({
        let lock = lock.clone();
        move || {
            have(1);
            once(&lock);
        }
    });
    have(0);
    lock.write().add();
    leans_to.join().unwrap();
    lock
}

#[test]
fn a_lock_that_leans_has_one_writer() {
    holds_by_its_fences(|| {
        let lock = has_beside_a_writer(|lock| lock.write().add());
        assert_eq!(lock.read().get(), 2);
    });
}

#[test]
fn a_reader_that_a_lock_leans_to_is_not_disturbed() {
    holds_by_its_fences(|| {
        has_beside_a_writer(|lock| {
            let guard = lock.read();
            let before = guard.get();
            thread::yield_now();
            assert_eq!(guard.get(), before);
        });
    });
}
