//! Directories that went, and whose logs stay until an epoch is named.
//!
//! Another directory's log may end with the other half of one of their records (`rename_between`), which recovery would look for:
//! so the log of a directory without a name goes once the epoch of the last such record is settled. Who ends the directory
//! settles it, but not where that would be waiting for copies, of whatever file: then it is kept here, and whoever names
//! the epoch frees it. On media it is what an open directory is that was removed. As long as there are any, who finds the pool full
//! has them freed.
//!
//! On an ordinary file nothing is kept: what was freed is not reused that early.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

#[derive(Default)]
pub(super) struct Departed {
    waiting: Mutex<Vec<Waiting>>,
    count: AtomicUsize,
}

struct Waiting {
    ino: u32,
    generation: u64,
    /// What of its records has a partner is of this epoch or an earlier one: nothing came after its name went.
    paired: u64,
}

impl Departed {
    /// Whether there are any.
    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn add(&self, waiting: Waiting) {
        let mut all = self.waiting.lock();
        all.push(waiting);
        self.count.store(all.len(), Ordering::Release);
    }

    fn take(&self, settled: u64) -> Vec<Waiting> {
        let mut all = self.waiting.lock();
        let taken = all.extract_if(.., |waiting| waiting.paired <= settled).collect();
        self.count.store(all.len(), Ordering::Release);
        taken
    }
}

impl<M: Media> Fs<M> {
    /// Whether the log of a directory that lost its name and its last user may go now; otherwise whoever settles frees it, or, where
    /// the file system is poisoned, nobody.
    pub(super) fn log_may_go(&self, dir: &Inode) -> bool {
        let paired = self.core.paired.load(Ordering::Acquire);
        let is_settled = || paired <= self.state.lock().settled;
        let omits = || self.core.media.omits("a paired record is settled before its directory's log goes");
        if self.core.deferring || is_settled() || omits() {
            return true;
        }
        if self.core.check_alive().is_err() {
            return false;
        }
        match self.settle_beside_copies() {
            Ok(false) => {
                self.departed.add(Waiting { ino: dir.ino.0, generation: dir.generation, paired });
                // Who named the epoch meanwhile may not have seen it.
                if is_settled() {
                    self.free_departed();
                }
                false
            }
            settled => settled.is_ok(),
        }
    }

    /// Frees those whose epoch is named by now. The caller holds nothing of the file system, and is in no epoch.
    pub(super) fn free_departed(&self) {
        if !self.departed.any() {
            return;
        }
        let settled = self.state.lock().settled;
        for Waiting { ino, generation, .. } in self.departed.take(settled) {
            let inode = self.table.entry(ino).node.share();
            // Whoever uses it again frees it at last.
            if let Some(inode) = inode.filter(|inode| inode.generation == generation) {
                self.free_inode(&inode, false);
            }
        }
    }

    /// The same for who needs room and has waited for copies; others that are under way by now it does not wait for.
    pub(super) fn free_departed_beside_copies(&self) {
        if self.departed.any() {
            // Where it fails whoever needs the room is told.
            let _ = self.settle_beside_copies();
        }
    }
}
