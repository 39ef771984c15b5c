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

impl<T: Default> ByNumber<T> {
    /// What belongs to `number`, made if it is the first of its neighbourhood.
    #[inline]
    fn of(&self, number: u32) -> &T {
        let number = number as usize;
        let leaf = number / LEAF + 1;
        let branch = leaf.ilog2();
        let leaves = 1 << branch;
        let branch = self.branches[branch as usize]
            .get_or_init(|| std::iter::repeat_with(OnceLock::new).take(leaves).collect());
        let leaf = branch[leaf - leaves].get_or_init(|| (0..LEAF).map(|_| T::default()).collect());
        &leaf[number % LEAF]
    }
}

const REFILL: usize = 32;

/// Inode slots that may be taken. Last freed, first taken, by thread.
pub struct FreeSlots {
    own: PerThread<Vec<u32>>,
    global: Mutex<Vec<u32>>,
    /// Freed in an epoch that is not synced yet.
    deferred: Mutex<Vec<(u64, u32)>>,
}

impl FreeSlots {
    pub fn new(free: Vec<u32>) -> FreeSlots {
        FreeSlots { own: PerThread::new(), global: Mutex::new(free), deferred: Mutex::new(Vec::new()) }
    }

    #[inline]
    pub fn take(&self) -> Option<u32> {
        let mut own = self.own.own().write();
        if let Some(ino) = own.pop() {
            return Some(ino);
        }
        {
            let mut global = self.global.lock();
            let from = global.len().saturating_sub(REFILL);
            own.extend(global.drain(from..));
        }
        own.pop()
    }

    /// What other threads hold back: for a pool that is full.
    pub fn steal(&self) -> Option<u32> {
        self.own.all().find_map(|part| part.write().pop())
    }

    #[inline]
    pub fn put(&self, ino: u32, epoch: Option<u64>) {
        if let Some(e) = epoch {
            self.deferred.lock().push((e, ino));
            return;
        }
        let mut own = self.own.own().write();
        own.push(ino);
        if own.len() > 8 * REFILL {
            let spare = own.drain(..4 * REFILL);
            self.global.lock().extend(spare);
        }
    }

    pub fn add(&self, fresh: impl DoubleEndedIterator<Item = u32>) {
        let mut global = self.global.lock();
        // Lowest number last, because the last one is taken first.
        let mut all: Vec<u32> = fresh.rev().collect();
        all.append(&mut global);
        *global = all;
    }

    /// Whether any wait for a release.
    pub fn has_deferred(&self) -> bool {
        !self.deferred.lock().is_empty()
    }

    /// Slots freed in `epoch` or before may be taken again; whether there were any.
    pub fn release(&self, epoch: u64) -> bool {
        let mut ready = Vec::new();
        self.deferred.lock().retain(|&(e, ino)| {
            if e <= epoch {
                ready.push(ino);
            }
            e > epoch
        });
        let any = !ready.is_empty();
        self.global.lock().extend(ready);
        any
    }

    pub fn count(&self) -> u64 {
        let held: usize = self.own.all().map(|part| part.read().len()).sum();
        (held + self.global.lock().len() + self.deferred.lock().len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
