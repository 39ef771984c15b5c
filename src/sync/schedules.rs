//! The locks under every kind of schedule: shuttle decides after each access to shared memory which thread goes
//! on. Built and run with `RUSTFLAGS="--cfg shuttle" cargo test --lib schedules`; a failure prints its schedule,
//! which `shuttle::replay` repeats. `LODE_SCHEDULES` is how many of each kind are tried.
//!
//! Looked for: two threads in a lock at once, a lock that is never had though free, a wake-up that is lost (shuttle
//! ends a run in which nobody can go on), a thing freed under a reader, a thing never freed.
//!
//! What a check relies on is in the standard library's atomics, which shuttle does not see: it must not add
//! schedules of its own.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Unseen;
use std::sync::atomic::Ordering::SeqCst;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Runner, thread};

use super::primitive::yield_now;
use super::reclaim::{Cell, collect, pin};
use super::{Lock, PerThread};

/// Of each thread: shuttle's own choice is too small for a panic in a debug build.
const STACK_BYTES: usize = 1 << 20;
/// Forced switches in a schedule of the second kind.
const SWITCHES: usize = 3;

/// Tries random schedules, and such with few switches at the worst places.
pub fn explore(test: fn()) {
    let count = std::env::var("LODE_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    config.silence_warnings = true; // the head of `primitive` says what shuttle cannot see
    Runner::new(RandomScheduler::new(count), config.clone()).run(test);
    Runner::new(PctScheduler::new(SWITCHES, count), config).run(test);
}

fn add(lock: &Lock<(u32, u32)>) {
    let mut both = lock.write();
    both.0 += 1;
    yield_now();
    both.1 += 1;
    assert_eq!(both.0, both.1, "a writer was not alone");
}

fn look(lock: &Lock<(u32, u32)>) {
    let both = lock.read();
    let before = both.0;
    yield_now();
    assert_eq!((both.0, both.1), (before, before), "a reader was in with a writer");
}

#[test]
fn a_lock_that_leans_has_one_writer_or_readers() {
    explore(|| {
        for leaning in [false, true] {
            let make = if leaning { |v| Lock::leaning_to(super::thread::slot(), v) } else { Lock::new };
            let lock = Arc::new(make((0, 0)));
            let threads: Vec<_> = (0..2)
                .map(|t| {
                    let lock = lock.clone();
                    thread::spawn(move || {
                        // So often in a row that it leans to this thread, too.
                        (0..4).for_each(|i| if (i + t) % 3 == 0 { look(&lock) } else { add(&lock) });
                    })
                })
                .collect();
            (0..3).for_each(|_| add(&lock));
            look(&lock);
            threads.into_iter().for_each(|t| t.join().unwrap());
            let added = 3 + (0..2).flat_map(|t| (0..4).map(move |i| i + t)).filter(|n| n % 3 != 0).count();
            assert_eq!(lock.read().0 as usize, added);
        }
    });
}

#[test]
fn heirs_of_a_slot_are_never_in_with_others() {
    explore(|| {
        let lock = Arc::new(Lock::leaning_to(super::thread::slot(), (0, 0)));
        let lives = |lock: Arc<Lock<_>>| {
            for _ in 0..3 {
                let lock = lock.clone();
                thread::spawn(move || (0..3).for_each(|_| add(&lock))).join().unwrap();
            }
        };
        let (one, other) = (lock.clone(), lock.clone());
        let threads = [thread::spawn(move || lives(one)), thread::spawn(move || lives(other))];
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*lock.read(), (18, 18));
    });
}

#[test]
fn locks_taken_in_one_order_never_stop_each_other() {
    explore(|| {
        let locks = Arc::new([Lock::leaning_to(super::thread::slot(), (0, 0)), Lock::new((0, 0))]);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let locks = locks.clone();
                thread::spawn(move || {
                    for _ in 0..3 {
                        let first = locks[0].read();
                        add(&locks[1]);
                        drop(first);
                        add(&locks[0]);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!((locks[0].read().0, locks[1].read().0), (6, 6));
    });
}

#[test]
fn a_part_for_each_thread_loses_nothing_to_who_empties_all() {
    explore(|| {
        let parts: Arc<PerThread<u32>> = Arc::default();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let parts = parts.clone();
                thread::spawn(move || {
                    for _ in 0..4 {
                        let mut own = parts.own().write();
                        let before = *own;
                        yield_now();
                        *own = before + 1;
                    }
                })
            })
            .collect();
        let take = || parts.all().map(|part| std::mem::take(&mut *part.write())).sum::<u32>();
        let early = take() + take();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(early + take(), 8);
    });
}

struct Thing {
    freed: Arc<Unseen>,
    alive: Unseen,
}

impl Drop for Thing {
    fn drop(&mut self) {
        assert_eq!(self.alive.swap(0, SeqCst), 1, "freed twice");
        self.freed.fetch_add(1, SeqCst);
    }
}

#[test]
fn nothing_is_freed_under_a_reader_and_all_in_the_end() {
    explore(|| {
        let (freed, cell) = (Arc::new(Unseen::new(0)), Arc::new(Cell::empty()));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let cell: Arc<Cell<Thing>> = cell.clone();
                thread::spawn(move || {
                    for _ in 0..4 {
                        let pinned = pin();
                        if let Some(thing) = cell.get(&pinned) {
                            let shared = cell.share();
                            yield_now();
                            assert_eq!(thing.alive.load(SeqCst), 1, "freed under a reader");
                            drop(shared);
                        }
                    }
                })
            })
            .collect();
        const MADE: usize = 6;
        for _ in 0..MADE {
            let thing = Thing { freed: freed.clone(), alive: Unseen::new(1) };
            cell.fill(Arc::new(thing));
            yield_now();
            cell.empty_out();
        }
        readers.into_iter().for_each(|t| t.join().unwrap());
        collect();
        assert_eq!(freed.load(SeqCst), MADE, "something is never freed");
    });
}
