//! The allocator and the epochs under schedules that shuttle chooses; see `sync/schedules.rs`.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Unseen;
use std::sync::atomic::Ordering::SeqCst;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use super::alloc::{Allocator, Block, Class, Run};
use super::epoch::Epochs;
use super::table::FreeSlots;
use crate::sync::primitive::yield_now;
use crate::sync::schedules::explore;

/// Two groups and a bit, so that threads have shards of their own.
const TOTAL: u32 = 2 * 512 + 40;

/// An allocator with `free` blocks beside its reserve, and who has which block.
struct Pool {
    alloc: Allocator,
    free: u64,
    owners: Vec<Unseen>,
}

impl Pool {
    fn new(free: u32) -> Arc<Pool> {
        const RESERVE: u32 = 10;
        let alloc = Allocator::new(TOTAL);
        // What is left free stands in two groups.
        let (first, last) = (free / 2, free - free / 2 + RESERVE);
        alloc.mark_used(Run::new(Block(first), TOTAL - first - last)).expect("all is free");
        alloc.start();
        assert_eq!(alloc.available(), free as u64);
        Arc::new(Pool { alloc, free: free as u64, owners: (0..TOTAL).map(|_| Unseen::new(0)).collect() })
    }

    fn take(&self, want: u32, near: Option<Block>) -> Option<Run> {
        let run = self.alloc.alloc(want, Class::Data, near)?;
        for block in run.start.0..run.end().0 {
            assert_eq!(self.owners[block as usize].swap(1, SeqCst), 0, "block {block} handed out twice");
        }
        Some(run)
    }

    fn give(&self, run: Run, epoch: Option<u64>) {
        for block in run.start.0..run.end().0 {
            assert_eq!(self.owners[block as usize].swap(0, SeqCst), 1);
        }
        match epoch {
            None => self.alloc.free(run),
            Some(epoch) => self.alloc.free_deferred(run, epoch),
        }
    }

    /// Nothing else runs.
    fn check(&self) {
        self.alloc.release(u64::MAX);
        self.alloc.check_state();
        assert_eq!(self.alloc.available(), self.free, "blocks were lost");
        let mut found = 0;
        self.alloc.for_each_free_run(false, &mut |run| found += run.count as u64);
        assert_eq!(found, self.alloc.stats().free, "blocks are hidden");
    }
}

#[test]
fn no_block_is_handed_out_twice_and_none_is_lost() {
    explore(|| {
        let pool = Pool::new(12);
        let churn = |pool: Arc<Pool>| {
            let mut held: Vec<Run> = Vec::new();
            for step in 0..6 {
                let near = held.last().map(|run| run.end());
                match thread_rng().gen_range(0..6u32) {
                    0 => held.extend(pool.take(1, None)),
                    1 => held.extend(pool.take(3, near)),
                    2 => held.extend(pool.take(20, None)),
                    3 => held.pop().into_iter().for_each(|run| pool.give(run, None)),
                    4 => held.pop().into_iter().for_each(|run| pool.give(run, Some(step))),
                    _ => drop(pool.alloc.release(step)),
                }
            }
            held.into_iter().for_each(|run| pool.give(run, None));
        };
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let pool = pool.clone();
                thread::spawn(move || churn(pool))
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        pool.check();
    });
}

/// Also where it is in another thread's pocket, or on its way between pocket and bitmap.
#[test]
fn who_needs_one_of_the_blocks_that_are_free_gets_one() {
    explore(|| {
        const THREADS: u32 = 3;
        let pool = Pool::new(THREADS);
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let pool = pool.clone();
                thread::spawn(move || {
                    for _ in 0..3 {
                        let near = (thread == 0).then_some(Block(1));
                        let run = pool.take(1, near).expect("no more are held than there are");
                        yield_now();
                        pool.give(run, None);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        pool.check();
    });
}

#[test]
fn a_pool_with_a_block_free_at_all_times_is_never_exhausted() {
    explore(|| {
        let pool = Pool::new(3);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let pool = pool.clone();
                thread::spawn(move || {
                    for _ in 0..4 {
                        let run = pool.take(1, None).expect("three are free, and two wanted");
                        yield_now();
                        pool.give(run, None);
                    }
                })
            })
            .collect();
        for _ in 0..6 {
            assert!(!pool.alloc.is_exhausted(), "one of three is free always");
            yield_now();
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        pool.check();
    });
}

#[test]
fn minis_of_one_block_are_shared_out_once() {
    explore(|| {
        let pool = Pool::new(4);
        let taken: Arc<Vec<Unseen>> = Arc::new((0..TOTAL * 8).map(|_| Unseen::new(0)).collect());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (pool, taken) = (pool.clone(), taken.clone());
                thread::spawn(move || {
                    for step in 0..4 {
                        let Some(mini) = pool.alloc.alloc_mini(Class::Metadata) else { continue };
                        let index = mini.block.0 as usize * 8 + mini.slot as usize;
                        assert_eq!(taken[index].swap(1, SeqCst), 0, "{mini:?} handed out twice");
                        yield_now();
                        taken[index].store(0, SeqCst);
                        match step % 2 {
                            0 => pool.alloc.free_mini(mini),
                            _ => pool.alloc.free_mini_deferred(mini, step),
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        pool.check();
    });
}

#[test]
fn an_epoch_ends_when_all_inside_have_left() {
    explore(|| {
        const FIRST: u64 = 5;
        let epochs = Arc::new(Epochs::new(FIRST));
        epochs.share();
        let inside: Arc<Vec<Unseen>> = Arc::new((0..4).map(|_| Unseen::new(0)).collect());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (epochs, inside) = (epochs.clone(), inside.clone());
                thread::spawn(move || {
                    for _ in 0..3 {
                        let guard = epochs.enter();
                        let count = &inside[(guard.epoch() - FIRST) as usize];
                        count.fetch_add(1, SeqCst);
                        yield_now();
                        count.fetch_sub(1, SeqCst);
                    }
                })
            })
            .collect();
        for _ in 0..3 {
            let ended = epochs.advance();
            for count in &inside[..=(ended - FIRST) as usize] {
                assert_eq!(count.load(SeqCst), 0, "epoch {ended} ended with an operation inside");
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

/// Inode slots: the end of the table is taken from all who have some, and given back, while others take and free.
#[test]
fn no_slot_is_handed_out_twice_nor_behind_the_end() {
    const UNIT: u32 = 4;
    const ALL: u32 = 4 * UNIT;
    explore(|| {
        let slots = Arc::new(FreeSlots::new(2..ALL));
        let owners: Arc<Vec<Unseen>> = Arc::new((0..ALL).map(|_| Unseen::new(0)).collect());
        let own = |owners: &[Unseen], ino: u32| {
            assert_eq!(owners[ino as usize].swap(1, SeqCst), 0, "slot {ino} handed out twice");
            ino
        };
        let give = |owners: &[Unseen], ino: u32| assert_eq!(owners[ino as usize].swap(0, SeqCst), 1);
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (slots, owners) = (slots.clone(), owners.clone());
                thread::spawn(move || {
                    let mut held: Vec<u32> = Vec::new();
                    for step in 0..6 {
                        match thread_rng().gen_range(0..5u32) {
                            0 | 1 => held.extend(slots.take().map(|ino| own(&owners, ino))),
                            2 => held.extend(slots.steal().map(|ino| own(&owners, ino))),
                            3 => drop(slots.release(step)),
                            _ => held.pop().into_iter().for_each(|ino| {
                                give(&owners, ino);
                                slots.put(ino, thread_rng().gen_bool(0.3).then_some(step));
                            }),
                        }
                    }
                    held.into_iter().for_each(|ino| {
                        give(&owners, ino);
                        slots.put(ino, None);
                    });
                })
            })
            .collect();
        for _ in 0..2 {
            let first = slots.take_end(UNIT, ALL, UNIT);
            assert!(first == ALL || first.is_multiple_of(UNIT) && first >= UNIT, "{first}");
            (first..ALL).for_each(|ino| _ = own(&owners, ino));
            yield_now();
            (first..ALL).for_each(|ino| give(&owners, ino));
            slots.add(first..ALL);
        }
        users.into_iter().for_each(|t| t.join().unwrap());
        slots.release(u64::MAX);
        assert_eq!((slots.count(), slots.any()), (ALL as u64 - 2, true), "slots were lost");
        assert_eq!(slots.take_end(UNIT, ALL, UNIT), UNIT);
        assert_eq!(std::iter::from_fn(|| slots.take()).count(), UNIT as usize - 2);
    });
}
