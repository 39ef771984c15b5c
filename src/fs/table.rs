//! The inode table in DRAM: for each inode number its link count, its parent (directories), the inode itself once
//! it was loaded, and then what stat reports of it.
//!
//! 16 bytes an inode, 80 once it or a neighbour was loaded. Link counts and parents are not on media: a clean
//! close saves them in the checkpoint, recovery derives them from the directories.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::sync::primitive::Mutex;

use super::inode::Inode;
use super::statline::{Changing, StatLine, set_atime};
use crate::media::prefetch;
use crate::sync::PerThread;
use crate::sync::reclaim::Cell;

#[derive(Default)]
pub struct Entry {
    pub nlink: AtomicU32,
    /// The directory that names this directory.
    pub parent: AtomicU32,
    /// Once it was loaded.
    pub node: Cell<Inode>,
}

impl Entry {
    pub fn links(&self) -> u32 {
        self.nlink.load(Ordering::Acquire)
    }
}

/// Callers bound inode numbers by the number of slots.
#[derive(Default)]
pub struct Table {
    entries: ByNumber<Entry>,
    lines: ByNumber<StatLine>,
    ends: ByNumber<AtomicU32>,
}

impl Table {
    #[inline]
    pub fn entry(&self, ino: u32) -> &Entry {
        self.entries.of(ino)
    }

    #[inline]
    pub fn line(&self, ino: u32) -> &StatLine {
        self.lines.of(ino)
    }

    /// Where the log of an inode ended that was not loaded since the pool was opened: the number that its next record
    /// will have; 0 where that is not known.
    #[inline]
    pub fn log_end(&self, ino: u32) -> &AtomicU32 {
        self.ends.of(ino)
    }

    /// Asks for what is changed soon of a number that is not used yet.
    #[inline]
    pub fn prefetch(&self, ino: u32) {
        prefetch(self.entry(ino));
        prefetch(self.line(ino));
    }

    /// Asks for what a stat of this number reads, if there is any: a guess makes nothing.
    #[inline]
    pub fn prefetch_line(&self, ino: u32) {
        if let Some(line) = self.lines.get(ino) {
            prefetch(line);
        }
    }

    /// Makes an inode that nobody knows ready to be [filled in](Table::fill), with the link count that it has or will have
    /// before anybody finds its name.
    #[inline]
    pub fn share(&self, mut inode: Inode, links: u32) -> Arc<Inode> {
        let atime = *inode.atime.get_mut();
        self.line(inode.ino.0).show(inode.body.get_mut(), atime, links);
        Arc::new(inode)
    }

    /// For who holds the number's slot: there is one inode of a number at a time.
    #[inline]
    pub fn fill(&self, inode: Arc<Inode>) {
        self.entry(inode.ino.0).node.fill(inode);
    }

    /// The exclusive lock on an inode's body.
    #[inline]
    pub fn change<'a>(&'a self, inode: &'a Inode) -> Changing<'a> {
        inode.body.write(self.line(inode.ino.0))
    }

    /// Changes the link count of an inode, for who has its exclusive lock; the count before. Until that lock is let go of,
    /// nobody is shown the new one beside attributes from before.
    pub fn change_links(&self, ino: u32, change: impl FnOnce(u32) -> u32) -> u32 {
        let links = &self.entry(ino).nlink;
        let before = links.load(Ordering::Relaxed);
        let now = change(before);
        self.line(ino).set_links(now);
        // Sequentially consistent, as where an inode's last use ends: of the two one sees the other's end.
        links.store(now, Ordering::SeqCst);
        before
    }

    /// The caller has the inode's lock, at least shared.
    pub fn set_atime(&self, inode: &Inode, atime: u64) {
        set_atime(&inode.atime, self.line(inode.ino.0), atime);
    }
}

const LEAF: usize = 1 << 10;
/// Each has twice as many leaves as the one before, the first has one: together enough for every number.
const BRANCHES: usize = (u32::BITS - LEAF.ilog2()) as usize + 1;

type Leaf<T> = Box<[T]>;
type Branch<T> = Box<[OnceLock<Leaf<T>>]>;

/// Grows without moving, so that look-ups take no lock.
struct ByNumber<T> {
    branches: [OnceLock<Branch<T>>; BRANCHES],
}

impl<T> Default for ByNumber<T> {
    fn default() -> ByNumber<T> {
        ByNumber { branches: [const { OnceLock::new() }; BRANCHES] }
    }
}

/// Branch, leaf in it, and place in that.
#[inline]
fn place_of(number: u32) -> (usize, usize, usize) {
    let number = number as usize;
    let leaf = number / LEAF + 1;
    let branch = leaf.ilog2() as usize;
    (branch, leaf - (1 << branch), number % LEAF)
}

impl<T: Default> ByNumber<T> {
    /// What belongs to `number`, made if it is the first of its neighbourhood.
    #[inline]
    fn of(&self, number: u32) -> &T {
        let (branch, leaf, at) = place_of(number);
        let branch = self.branches[branch]
            .get_or_init(|| std::iter::repeat_with(OnceLock::new).take(1 << branch).collect());
        let leaf = branch[leaf].get_or_init(|| (0..LEAF).map(|_| T::default()).collect());
        &leaf[at]
    }

    /// What belongs to `number`, if that was made.
    #[inline]
    fn get(&self, number: u32) -> Option<&T> {
        let (branch, leaf, at) = place_of(number);
        Some(&self.branches[branch].get()?[leaf].get()?[at])
    }
}

/// Slots that a thread takes at a time of those that belong to no thread.
const REFILL: usize = 32;
/// Slots that a thread keeps, at most, to take them again, and that it gathers to give them back.
const KEPT_MAX: usize = 8 * REFILL;
const GATHERED_MAX: usize = 4 * REFILL;
/// A slot that is freed so far above the lowest that is free is not kept.
const NEAR: u32 = 1024;

/// Inode slots that may be taken: of a thread's own the last freed, which it has touched a moment ago, else the lowest. So the table's
/// end is in use only as far as it has to be, and can be given back.
pub struct FreeSlots {
    own: PerThread<Own>,
    global: Mutex<Slots>,
    /// That of `global` or below it.
    lowest: AtomicU32,
    /// Freed in an epoch that is not synced yet.
    deferred: Mutex<Vec<(u64, u32)>>,
}

/// What a thread has.
#[derive(Default)]
struct Own {
    near: Vec<u32>,
    far: Vec<u32>,
}

/// A set of slots: a bit for each.
#[derive(Default)]
struct Slots {
    words: Vec<u64>,
    count: u64,
    /// None is in a word before this one.
    from: usize,
}

impl Slots {
    fn add(&mut self, ino: u32) {
        let (word, bit) = (ino as usize / 64, 1 << (ino % 64));
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        debug_assert!(self.words[word] & bit == 0, "slot {ino} is free twice");
        self.words[word] |= bit;
        self.count += 1;
        self.from = self.from.min(word);
    }

    fn take_lowest(&mut self) -> Option<u32> {
        self.from += self.words.get(self.from..)?.iter().position(|word| *word != 0)?;
        let bit = self.words[self.from].trailing_zeros();
        self.words[self.from] &= !(1 << bit);
        self.count -= 1;
        Some(self.from as u32 * 64 + bit)
    }

    /// The lowest, or one below it; the highest number where there is none.
    fn lowest(&self) -> u32 {
        if self.count == 0 { u32::MAX } else { self.from as u32 * 64 }
    }

    fn has(&self, ino: u32) -> bool {
        self.words.get(ino as usize / 64).is_some_and(|word| word >> (ino % 64) & 1 != 0)
    }
}

impl FreeSlots {
    pub fn new(free: impl IntoIterator<Item = u32>) -> FreeSlots {
        let slots = FreeSlots {
            own: PerThread::new(),
            global: Mutex::default(),
            lowest: AtomicU32::new(0),
            deferred: Mutex::new(Vec::new()),
        };
        slots.add(free);
        slots
    }

    #[inline]
    pub fn take(&self) -> Option<u32> {
        let mut own = self.own.own().write();
        if let Some(ino) = own.near.pop() {
            return Some(ino);
        }
        let Own { near, far } = &mut *own;
        let mut global = self.global.lock();
        far.drain(..).for_each(|ino| global.add(ino));
        near.extend(std::iter::from_fn(|| global.take_lowest()).take(REFILL));
        near.reverse();
        self.lowest.store(global.lowest(), Ordering::Relaxed);
        near.pop()
    }

    /// Whether any can be taken, whoever has it.
    pub fn any(&self) -> bool {
        let has_any = |own: &Own| !own.near.is_empty() || !own.far.is_empty();
        self.own.all().any(|part| has_any(&part.read())) || self.global.lock().count > 0
    }

    /// What other threads hold back: for a pool that is full.
    pub fn steal(&self) -> Option<u32> {
        self.own.all().find_map(|part| {
            let mut part = part.write();
            part.near.pop().or_else(|| part.far.pop())
        })
    }

    #[inline]
    pub fn put(&self, ino: u32, epoch: Option<u64>) {
        if let Some(e) = epoch {
            self.deferred.lock().push((e, ino));
            return;
        }
        let mut own = self.own.own().write();
        let is_near = ino <= self.lowest.load(Ordering::Relaxed).saturating_add(NEAR);
        let (part, max) = if is_near { (&mut own.near, KEPT_MAX) } else { (&mut own.far, GATHERED_MAX) };
        part.push(ino);
        if part.len() > max {
            self.add(part.drain(..));
        }
    }

    /// Makes slots free that no thread has.
    pub fn add(&self, free: impl IntoIterator<Item = u32>) {
        let mut global = self.global.lock();
        free.into_iter().for_each(|ino| global.add(ino));
        self.lowest.store(global.lowest(), Ordering::Relaxed);
    }

    /// Takes all slots from some number up to `end`, which is behind the last there is, where these are all free: from the lowest
    /// multiple of `unit` that is at least `least`. `end` where there is none.
    pub fn take_end(&self, least: u32, end: u32, unit: u32) -> u32 {
        // One thread's at a time, and never on the way where nobody finds them.
        for part in self.own.all() {
            let mut part = part.write();
            let Own { near, far } = &mut *part;
            self.add(near.drain(..).chain(far.drain(..)));
        }
        let mut global = self.global.lock();
        let free = (0..end).rev().take_while(|ino| global.has(*ino)).count() as u32;
        let first = (end - free).next_multiple_of(unit).clamp(least, end.max(least)).min(end);
        for ino in first..end {
            global.words[ino as usize / 64] &= !(1 << (ino % 64));
        }
        global.count -= (end - first) as u64;
        self.lowest.store(global.lowest(), Ordering::Relaxed);
        first
    }

    /// Whether any wait for a release.
    pub fn has_deferred(&self) -> bool {
        !self.deferred.lock().is_empty()
    }

    /// Slots freed in `epoch` or before may be taken again; whether there were any.
    pub fn release(&self, epoch: u64) -> bool {
        let ready: Vec<(u64, u32)> = self.deferred.lock().extract_if(.., |(e, _)| *e <= epoch).collect();
        let any = !ready.is_empty();
        self.add(ready.into_iter().map(|(_, ino)| ino));
        any
    }

    pub fn count(&self) -> u64 {
        let of = |own: &Own| (own.near.len() + own.far.len()) as u64;
        let held: u64 = self.own.all().map(|part| of(&part.read())).sum();
        held + self.global.lock().count + self.deferred.lock().len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_finds_what_was_made_and_makes_nothing() {
        let numbers = [0, 1, LEAF as u32 - 1, LEAF as u32, 3 * LEAF as u32 + 7, 1 << 20];
        let table = ByNumber::<AtomicU32>::default();
        for made in numbers {
            let is_near = |other: &u32| *other as usize / LEAF == made as usize / LEAF;
            let known = numbers.iter().filter(|n| **n < made || is_near(n)).copied().collect::<Vec<_>>();
            assert_eq!(table.get(made).is_some(), (1..LEAF as u32).contains(&made), "{made}");
            table.of(made).store(made + 1, Ordering::Relaxed);
            for number in numbers {
                assert_eq!(table.get(number).is_some(), known.contains(&number), "{number} after {made}");
            }
            assert!(std::ptr::eq(table.get(made).unwrap(), table.of(made)));
        }
    }

    #[test]
    fn only_an_end_that_is_free_is_taken() {
        let slots = FreeSlots::new((2..64).chain(70..700).chain(701..1024));
        (64..70).for_each(|ino| slots.put(ino, None));
        assert_eq!(slots.take_end(256, 1024, 256), 768);
        assert_eq!(slots.count(), 768 - 2 - 1);
        assert_eq!(slots.take_end(256, 768, 256), 768);
        assert_eq!(slots.take(), Some(2));
        slots.put(700, None);
        assert_eq!(slots.take_end(256, 768, 256), 256);
        assert_eq!(slots.take_end(256, 256, 256), 256);
        assert_eq!(slots.take_end(512, 256, 256), 256);
        assert_eq!(slots.count(), 256 - 3);
        slots.add(256..512);
        assert_eq!((slots.take(), slots.count()), (Some(3), 512 - 4));
    }

    #[test]
    fn the_lowest_slot_is_taken_but_for_one_that_was_freed_near_it() {
        let slots = FreeSlots::new(2..256);
        let taken: Vec<u32> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(taken, Vec::from_iter(2..256));
        assert_eq!((slots.count(), slots.take()), (0, None));
        slots.put(5, None);
        slots.put(90, None);
        assert_eq!((slots.take(), slots.take(), slots.take()), (Some(90), Some(5), None));
        // However many are freed, and in whatever order, the first that are taken then are low ones.
        let orders: [Vec<u32>; 3] = [
            (2..50_000).collect(),
            (2..50_000).rev().collect(),
            (0..49_998).map(|n| n * 7 % 49_998 + 2).collect(),
        ];
        for order in orders {
            order.iter().for_each(|&ino| slots.put(ino, None));
            assert_eq!(slots.count(), 49_998);
            let low = std::iter::from_fn(|| slots.take()).take(5000).max();
            assert!(low < Some(5000 + 2 + NEAR), "{low:?}");
            std::iter::from_fn(|| slots.take()).for_each(drop);
            assert_eq!(slots.count(), 0);
        }
        // Those that wait for a sync are nobody's.
        slots.put(7, Some(3));
        assert_eq!((slots.take(), slots.count(), slots.release(2)), (None, 1, false));
        assert_eq!((slots.release(3), slots.take()), (true, Some(7)));
    }

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let table = ByNumber::<AtomicU32>::default();
        let leaf = LEAF as u32;
        let mut numbers: Vec<u32> = vec![0, 1, u32::MAX - 1, u32::MAX];
        // Either side of where a leaf ends, and a branch.
        numbers.extend(
            [1, 2, 3, 4, 7, 8, 1023].into_iter().flat_map(|n| [n * leaf - 1, n * leaf, n * leaf + 1]),
        );
        numbers.sort_unstable();
        numbers.dedup();
        for &n in &numbers {
            assert_eq!(table.of(n).swap(!n, Ordering::Relaxed), 0, "{n}");
        }
        for n in numbers {
            assert_eq!(table.of(n).load(Ordering::Relaxed), !n, "{n}");
        }
    }
}
