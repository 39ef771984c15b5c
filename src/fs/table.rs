//! The inode table in DRAM: for each inode number its link count, its parent (directories), and the
//! inode itself once it was loaded.
//!
//! 16 bytes an inode. Link counts and parents are not on media: a clean close saves them in the
//! checkpoint, recovery derives them from the directories.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::inode::Inode;
use crate::sync::PerThread;
use crate::sync::reclaim::Cell;

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

const LEAF: usize = 1 << 10;
const FAN: usize = 1 << 11;

type Leaf = Box<[Entry]>;
type Branch = Box<[OnceLock<Leaf>]>;

/// Grows without moving, so that look-ups take no lock.
pub struct Table {
    root: Box<[OnceLock<Branch>]>,
}

impl Table {
    pub fn new() -> Table {
        Table { root: (0..FAN).map(|_| OnceLock::new()).collect() }
    }

    /// The entry of `ino`, made if it is the first of its neighbourhood. Callers bound `ino` by the
    /// number of slots.
    #[inline]
    pub fn entry(&self, ino: u32) -> &Entry {
        let ino = ino as usize;
        let branch =
            self.root[ino / (LEAF * FAN)].get_or_init(|| (0..FAN).map(|_| OnceLock::new()).collect());
        let leaf = branch[ino / LEAF % FAN].get_or_init(|| {
            (0..LEAF)
                .map(|_| Entry { nlink: AtomicU32::new(0), parent: AtomicU32::new(0), node: Cell::empty() })
                .collect()
        });
        &leaf[ino % LEAF]
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
