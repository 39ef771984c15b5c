//! Bad blocks: those on which a load or a store failed are never given to anybody again.
//!
//! Every load and store of the file system goes through [`Watched`], which notes where one failed. From that moment
//! on the block, once freed, is free to nobody ([`Core::free`]). The next tick (or close) writes a [`Type::Bad`] record
//! into the inode table's log, and every open reads them. Whoever has such a block keeps it: what of it can be read
//! is still there.
//!
//! A hole that the disk below the pool's file has no room for is quarantined until the next mount alone, and written down
//! nowhere: the medium is not to blame.
//!
//! A store that failed in a log poisons the file system (see [`Core::poison`]): then nothing is written down any
//! more, and the block is noted again when it is met again.
//!
//! [`Type::Bad`]: super::format::Type::Bad

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::quote::Shown;
use crate::sync::primitive::Mutex;

use super::alloc::{Block, Run};
use super::format::*;
use super::log::Batch;
use super::*;
use crate::media::{Dirty, Fault};

type Tried<T> = std::result::Result<T, Fault>;

/// Media, with what of them failed.
pub struct Watched<M> {
    media: M,
    any: AtomicBool,
    was_out_of_room: AtomicBool,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    bad: BTreeSet<u32>,
    /// Those that no record says yet.
    unsaved: Vec<u32>,
}

impl<M> Deref for Watched<M> {
    type Target = M;

    #[inline]
    fn deref(&self) -> &M {
        &self.media
    }
}

/// What can fail.
impl<M: Media> Watched<M> {
    #[inline]
    pub fn read(&self, at: Addr, dst: &mut [u8]) -> Tried<()> {
        self.media.read(at, dst).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn load64(&self, at: Addr) -> Tried<u64> {
        self.media.load64(at).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Tried<u32> {
        self.media.crc32c(at, len, crc).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn store64(&self, at: Addr, value: u64) -> Tried<Dirty> {
        self.media.store64(at, value).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn copy_cached(&self, at: Addr, src: &[u8]) -> Tried<Dirty> {
        self.media.copy_cached(at, src).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn copy_nt(&self, at: Addr, src: &[u8]) -> Tried<Flushed> {
        self.media.copy_nt(at, src).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Tried<(u32, Flushed)> {
        self.media.copy_nt_crc(at, src, crc).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn store_lines(&self, at: Addr, lines: &[Words]) -> Tried<Flushed> {
        self.media.store_lines(at, lines).inspect_err(|fault| self.note(fault))
    }

    /// What somebody else did to media: see `mover`.
    #[inline]
    pub fn watch<T>(&self, does: impl FnOnce(&M) -> Tried<T>) -> Tried<T> {
        does(&self.media).inspect_err(|fault| self.note(fault))
    }

    #[inline]
    pub fn zero_nt(&self, at: Addr, len: usize) -> Tried<Flushed> {
        self.media.zero_nt(at, len).inspect_err(|fault| self.note(fault))
    }
}

impl<M: Media> Watched<M> {
    pub fn new(media: M) -> Watched<M> {
        Watched {
            media,
            any: AtomicBool::new(false),
            was_out_of_room: AtomicBool::new(false),
            blocks: Mutex::default(),
        }
    }

    pub fn into_inner(self) -> M {
        self.media
    }

    #[cold]
    fn note(&self, fault: &Fault) {
        let block = (fault.at.0 / BLOCK as u64) as u32;
        let mut blocks = self.blocks.lock();
        if !blocks.bad.insert(block) {
            return;
        }
        self.any.store(true, Ordering::Release);
        match self.media.out_of_room(fault.at) {
            None => {
                tracing::error!("block {block} of the media failed; once freed it is not used again");
                blocks.unsaved.push(block);
            }
            Some(file) => {
                // Once: there may be many.
                if !self.was_out_of_room.swap(true, Ordering::AcqRel) {
                    tracing::error!("the disk below {} is full: make room there", file.shown());
                }
            }
        }
    }

    /// Whether something is quarantined that the next mount may use: a checkpoint would hide it.
    pub fn was_out_of_room(&self) -> bool {
        self.was_out_of_room.load(Ordering::Acquire)
    }

    /// What records say.
    pub fn know(&self, runs: &[Run]) {
        let all = runs.iter().flat_map(|run| run.start.0..run.end().0);
        self.blocks.lock().bad.extend(all);
        self.any.fetch_or(!runs.is_empty(), Ordering::Release);
    }

    #[inline]
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub fn is_bad(&self, block: Block) -> bool {
        self.any() && self.blocks.lock().bad.contains(&block.0)
    }

    /// All of them.
    pub fn bad(&self) -> Vec<Block> {
        self.blocks.lock().bad.iter().map(|&block| Block(block)).collect()
    }

    /// The parts of a run that did not fail.
    #[inline]
    pub fn each_good(&self, run: Run, each: &mut dyn FnMut(Run)) {
        if self.any() { self.each_good_among_bad(run, each) } else { each(run) }
    }

    #[cold]
    fn each_good_among_bad(&self, run: Run, each: &mut dyn FnMut(Run)) {
        let bad: Vec<u32> = self.blocks.lock().bad.range(run.start.0..run.end().0).copied().collect();
        let mut from = run.start.0;
        for end in bad.into_iter().chain([run.end().0]) {
            if end > from {
                each(Run::new(Block(from), end - from));
            }
            from = end + 1;
        }
    }
}

impl<M: Media> Fs<M> {
    /// Blocks that failed and are not used again.
    pub fn bad_blocks(&self) -> u64 {
        self.core.media.bad().len() as u64
    }

    /// Writes down what failed since this was done last. The caller is in no epoch. Where there is no room it is
    /// tried again the next time.
    pub(super) fn save_bad_blocks(&self) {
        let unsaved = std::mem::take(&mut self.core.media.blocks.lock().unsaved);
        // The blocks of labels, superblocks and state lines are nobody's.
        let (unsaved, _): (Vec<u32>, Vec<u32>) =
            unsaved.into_iter().partition(|&block| self.core.holds_blocks(Run::new(Block(block), 1)));
        if unsaved.is_empty() {
            return;
        }
        let saved = (|| {
            let mut body = self.table.change(&self.table_inode);
            let guard = self.core.enter()?;
            let mut batch = Batch::new();
            for &block in &unsaved {
                let r = batch.record(Type::Bad, field::bad::COUNT + 4);
                put32(r, field::bad::BLOCK, block);
                put32(r, field::bad::COUNT, 1);
            }
            let nothing = Flushed::issued();
            self.commit(&self.table_inode, &mut body, &mut batch, &guard, Class::Last, nothing)
        })();
        if let Err(e) = saved {
            tracing::warn!("bad blocks could not be written down: {e}");
            self.core.media.blocks.lock().unsaved.extend(unsaved);
        }
    }
}
