//! Reads under way: what they keep from being reused, and what may not be stored in place meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::{Copy, Pages, ReadUnderWay};
use crate::fs::alloc::Run;
use crate::sync::primitive::Mutex;

/// Reads under way, and what they keep from being reused.
#[derive(Default)]
pub struct Reads {
    count: AtomicU64,
    state: Mutex<ReadsState>,
}

const NEVER: u64 = u64::MAX;

#[derive(Default)]
struct ReadsState {
    /// [`NEVER`]: none begins any more.
    next: u64,
    under_way: BTreeMap<u64, Arc<ReadUnderWay>>,
    /// Freed while reads with lower numbers were under way, and when it may be reused otherwise.
    kept: VecDeque<(u64, Run, Option<u64>)>,
}

impl Reads {
    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Whether pages of a file are being read. The caller has its exclusive lock: no read of it begins.
    #[inline]
    pub(in crate::fs) fn touch(&self, ino: u32, pages: Pages) -> bool {
        self.any()
            && self
                .state
                .lock()
                .under_way
                .values()
                .any(|read| read.ino == ino && read.pages.start < pages.end && pages.start < read.pages.end)
    }

    /// Keeps blocks for as long as reads are under way; answers whether it does.
    pub fn keep(&self, run: Run, reuse: Option<u64>) -> bool {
        let mut state = self.state.lock();
        let next = state.next;
        let keeps = !state.under_way.is_empty();
        if keeps {
            state.kept.push_back((next, run, reuse));
        }
        keeps
    }

    /// Under the inode's lock. The copy again where none begins any more.
    pub(super) fn begin(&self, ino: u32, pages: Pages, copy: Copy) -> Result<Arc<ReadUnderWay>, Box<Copy>> {
        let mut state = self.state.lock();
        if state.next == NEVER {
            return Err(Box::new(copy));
        }
        let number = state.next;
        state.next += 1;
        let read = Arc::new(ReadUnderWay { number, ino, pages, copy });
        state.under_way.insert(number, read.clone());
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(read)
    }

    /// From now on nothing is kept for a read that is not under way yet.
    pub(super) fn begin_no_more(&self) {
        self.state.lock().next = NEVER;
    }

    /// All under way.
    pub(super) fn all(&self) -> Vec<Arc<ReadUnderWay>> {
        self.state.lock().under_way.values().cloned().collect()
    }

    /// What nobody reads any more.
    pub(super) fn end(&self, read: &ReadUnderWay) -> SmallVec<[(Run, Option<u64>); 2]> {
        let mut state = self.state.lock();
        if state.under_way.remove(&read.number).is_none() {
            return SmallVec::new();
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
        let oldest = state.under_way.first_key_value().map_or(u64::MAX, |(number, _)| *number);
        let mut free = SmallVec::new();
        while let Some((_, run, reuse)) = state.kept.pop_front_if(|(before, ..)| *before <= oldest) {
            free.push((run, reuse));
        }
        free
    }
}
