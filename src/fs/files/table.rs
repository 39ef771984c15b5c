//! Numbers for open things: the lowest free number first, a look-up without a shared cache line.
//!
//! A slot is a readers-writer lock alone in its cache lines, leaning towards the thread that opened. A look-up
//! read-locks the slot of its own number for as long as the thing is in use: plain loads and stores, and
//! threads that use different numbers touch nothing in common. [`take`](Table::take) write-locks it, so that a close
//! that races with a use waits for the use and no use ever sees a thing that is gone. Uses are short:
//! nothing in a file system blocks for ever as a pipe does.
//!
//! Slots live in segments that double in size and never move, so a look-up needs no lock to find one.
//! Giving out and taking back numbers is serial, as "the lowest free one" demands of any implementation.

use crate::error::{Error, Result};
use crate::sync::primitive::Mutex;
use crate::sync::{Lock, ReadGuard};
use crossbeam_utils::CachePadded;
use std::ops::Deref;
use std::sync::OnceLock;

/// Slots in the first segment; segment `k` has `SEGMENT_SLOTS << k`.
const SEGMENT_SLOTS: usize = 64;
/// 64 * (2^25 - 1) numbers at most.
const SEGMENTS: usize = 25;

type Slot<T> = CachePadded<Lock<Option<T>>>;

/// A thing in use. Its number cannot be taken back before this is dropped.
pub struct Held<'t, T>(ReadGuard<'t, Option<T>>);

impl<'t, T> Held<'t, T> {
    #[inline]
    fn new(slot: ReadGuard<'t, Option<T>>) -> Option<Held<'t, T>> {
        slot.is_some().then_some(Held(slot))
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0.as_ref().expect("it was there when the slot was locked")
    }
}

/// What callers know by a small number.
pub struct Table<T> {
    segments: [OnceLock<Box<[Slot<T>]>>; SEGMENTS],
    numbers: Mutex<Numbers>,
}

/// A number that is taken but names nothing yet; dropped unfilled, it is free again.
pub struct Reserved<'t, T> {
    table: &'t Table<T>,
    number: usize,
}

impl<T> Table<T> {
    /// At most `limit` things at a time.
    pub fn new(limit: usize) -> Table<T> {
        assert!(limit < SEGMENT_SLOTS << SEGMENTS, "the segments hold the limit");
        Table {
            segments: [const { OnceLock::new() }; SEGMENTS],
            numbers: Mutex::new(Numbers { limit, ..Numbers::default() }),
        }
    }

    /// The thing with this number, held until the guard is dropped.
    ///
    /// Not by a thread that holds one already: see [`Lock`].
    #[inline]
    pub fn get(&self, number: usize) -> Option<Held<'_, T>> {
        Held::new(self.slot(number)?.read())
    }

    /// Takes the lowest free number; EMFILE where all are in use. To be called before the thing is
    /// made, so that a full table has no effects.
    pub fn reserve(&self) -> Result<Reserved<'_, T>> {
        let number = self.numbers.lock().take().ok_or(Error::new(libc::EMFILE, "files::reserve"))?;
        let (segment, _) = place(number);
        self.segments[segment].get_or_init(|| {
            (0..SEGMENT_SLOTS << segment).map(|_| CachePadded::new(Lock::new(None))).collect()
        });
        Ok(Reserved { table: self, number })
    }

    /// Frees a number and hands back what it named, after the last use has ended.
    pub fn take(&self, number: usize) -> Option<T> {
        let thing = self.slot(number)?.write().take()?;
        self.numbers.lock().give_back(number);
        Some(thing)
    }

    /// Takes everything out, for the end of all use.
    pub fn drain(&self) -> impl Iterator<Item = T> + '_ {
        let count: usize = self.segments.iter().filter_map(|s| s.get()).map(|s| s.len()).sum();
        (0..count).filter_map(|number| self.take(number))
    }

    #[inline]
    fn slot(&self, number: usize) -> Option<&Slot<T>> {
        let (segment, index) = place(number);
        self.segments.get(segment)?.get()?.get(index)
    }
}

impl<T> Reserved<'_, T> {
    /// From here on the number names `thing`.
    pub fn fill(self, thing: T) -> usize {
        let number = self.number;
        let slot = self.table.slot(number).expect("reserve made the segment");
        let old = slot.write().replace(thing);
        assert!(old.is_none(), "a free number names nothing");
        std::mem::forget(self);
        number
    }
}

impl<T> Drop for Reserved<'_, T> {
    fn drop(&mut self) {
        self.table.numbers.lock().give_back(self.number);
    }
}

/// The segment of a number and the index in it.
#[inline]
fn place(number: usize) -> (usize, usize) {
    let n = number.saturating_add(SEGMENT_SLOTS);
    let segment = (n.ilog2() - SEGMENT_SLOTS.ilog2()) as usize;
    (segment, n - (SEGMENT_SLOTS << segment))
}

/// Which numbers are in use: a bitmap, and a bitmap of its full words, as kernels keep it.
#[derive(Default)]
struct Numbers {
    taken: Vec<u64>,
    full: Vec<u64>,
    limit: usize,
}

impl Numbers {
    fn take(&mut self) -> Option<usize> {
        let word = match self.full.iter().position(|&w| w != u64::MAX) {
            Some(i) => i * 64 + self.full[i].trailing_ones() as usize,
            None => self.full.len() * 64,
        };
        let number = word * 64 + self.taken.get(word).map_or(0, |w| w.trailing_ones() as usize);
        if number >= self.limit {
            return None;
        }
        if word == self.taken.len() {
            self.taken.push(0);
            self.full.resize(self.taken.len().div_ceil(64), 0);
        }
        self.taken[word] |= 1 << (number % 64);
        if self.taken[word] == u64::MAX {
            self.full[word / 64] |= 1 << (word % 64);
        }
        Some(number)
    }

    fn give_back(&mut self, number: usize) {
        let word = number / 64;
        assert!(self.taken[word] & (1 << (number % 64)) != 0, "only a taken number comes back");
        self.taken[word] &= !(1 << (number % 64));
        self.full[word / 64] &= !(1 << (word % 64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    fn add<T>(table: &Table<T>, thing: T) -> usize {
        table.reserve().unwrap().fill(thing)
    }

    #[test]
    fn the_lowest_free_number_comes_first() {
        let table = Table::new(10_000);
        for i in 0..5_000 {
            assert_eq!(add(&table, i), i);
        }
        for i in [4_999, 4_000, 63, 64, 0] {
            assert_eq!(table.take(i), Some(i));
        }
        for i in [0, 63, 64, 4_000, 4_999, 5_000] {
            assert_eq!(add(&table, i), i);
            assert_eq!(*table.get(i).unwrap(), i);
        }
    }

    #[test]
    fn the_limit_is_exact_and_an_unfilled_number_is_free_again() {
        let table = Table::new(130);
        for i in 0..130 {
            assert_eq!(add(&table, ()), i);
        }
        assert_eq!(table.reserve().err().unwrap().errno(), libc::EMFILE);
        table.take(70).unwrap();
        drop(table.reserve().unwrap());
        assert_eq!(add(&table, ()), 70);
        assert_eq!(table.drain().count(), 130);
        assert_eq!(add(&table, ()), 0);
    }

    #[test]
    fn numbers_that_name_nothing() {
        let table = Table::<u8>::new(100);
        for i in [0, 63, 64, 100, 1 << 40, usize::MAX] {
            assert!(table.get(i).is_none());
            assert!(table.take(i).is_none());
        }
        let reserved = table.reserve().unwrap();
        assert!(table.get(0).is_none(), "reserved is not open");
        assert!(table.take(0).is_none());
        reserved.fill(7);
        assert_eq!(*table.get(0).unwrap(), 7);
    }

    #[test]
    fn a_close_that_races_with_uses_waits_and_later_uses_fail() {
        struct Thing<'a> {
            gone: &'a AtomicBool,
        }
        impl Drop for Thing<'_> {
            fn drop(&mut self) {
                self.gone.store(true, Ordering::SeqCst);
            }
        }
        let gone: Vec<_> = (0..200).map(|_| AtomicBool::new(false)).collect();
        let table: Table<Thing<'_>> = Table::new(1);
        let uses = AtomicUsize::new(0);
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if let Some(thing) = table.get(0) {
                            std::thread::yield_now();
                            assert!(!thing.gone.load(Ordering::SeqCst), "held things live");
                            uses.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            for gone in &gone {
                let seen = uses.load(Ordering::Relaxed);
                assert_eq!(add(&table, Thing { gone }), 0);
                while uses.load(Ordering::Relaxed) == seen {
                    std::thread::yield_now();
                }
                drop(table.take(0).expect("only this thread closes"));
                assert!(gone.load(Ordering::SeqCst));
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn one_of_two_closes_wins() {
        let table = Table::new(4);
        for round in 0..500 {
            add(&table, round);
            let wins: usize = std::thread::scope(|s| {
                let threads: Vec<_> = (0..2).map(|_| s.spawn(|| table.take(0).is_some() as usize)).collect();
                threads.into_iter().map(|t| t.join().unwrap()).sum()
            });
            assert_eq!(wins, 1);
        }
    }
}
