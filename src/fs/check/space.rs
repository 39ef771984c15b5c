//! Who has which blocks: each may have one owner, and what has none is free.

use std::collections::{BTreeMap, BTreeSet};

use super::super::alloc::{Block, Run};
use super::super::format::*;
use super::super::log::addr_mini;
use super::Account;
use super::image::Image;

const ALL_MINIS: u8 = u8::MAX;

pub struct Space {
    words: Vec<u64>,
    blocks: u32,
    /// No block before this one is free.
    search_from: u32,
    /// Blocks that logs have in parts, with a bit for each part in use.
    minis: BTreeMap<u32, u8>,
    /// [Apart](joined).
    bad: Vec<Run>,
    /// Blocks that more than one has.
    pub twice: BTreeSet<u32>,
}

/// All that an inode has, log segments in parts of blocks as their blocks.
pub fn blocks_of(image: &Image) -> impl Iterator<Item = Run> + '_ {
    let segments = image.log.segments.iter().map(|&(at, _)| Run::new(addr_mini(at).block, 1));
    image.runs().chain(segments)
}

impl Space {
    pub fn new(blocks: u64) -> Space {
        Space {
            words: vec![0; blocks.div_ceil(64) as usize],
            blocks: blocks as u32,
            search_from: 0,
            minis: BTreeMap::new(),
            bad: Vec::new(),
            twice: BTreeSet::new(),
        }
    }

    pub fn has(&self, block: u32) -> bool {
        self.words[block as usize / 64] & 1 << (block % 64) != 0
    }

    fn set(&mut self, block: u32) {
        self.words[block as usize / 64] |= 1 << (block % 64);
    }

    pub fn take(&mut self, run: Run) {
        for block in run.blocks() {
            if self.has(block) {
                self.twice.insert(block);
            }
            self.set(block);
        }
    }

    /// Blocks that are never given to anybody again, whoever has them.
    pub fn take_bad(&mut self, runs: impl IntoIterator<Item = Run>) {
        self.bad = joined(runs);
        self.bad.clone().into_iter().for_each(|run| self.keep(run));
    }

    fn is_bad(&self, block: u32) -> bool {
        let n = self.bad.partition_point(|run| run.end().0 <= block);
        self.bad.get(n).is_some_and(|run| run.start.0 <= block)
    }

    /// Nobody is given these blocks, whoever has them.
    pub fn keep(&mut self, run: Run) {
        run.blocks().for_each(|block| self.set(block));
    }

    pub fn take_image(&mut self, image: &Image) {
        self.take_log(image);
        self.take_data(image);
    }

    pub fn take_data(&mut self, image: &Image) {
        image.runs().for_each(|run| self.take(run));
    }

    pub fn take_log(&mut self, image: &Image) {
        for &(at, lines) in &image.log.segments {
            let mini = addr_mini(at);
            if lines == SEGMENT_LINES {
                self.take(Run::new(mini.block, 1));
                continue;
            }
            let block = mini.block.0;
            match self.minis.get(&block).copied() {
                None if self.has(block) => _ = self.twice.insert(block),
                Some(used) if used & 1 << mini.slot != 0 => _ = self.twice.insert(block),
                _ => {}
            }
            self.set(block);
            *self.minis.entry(block).or_insert(0) |= 1 << mini.slot;
        }
    }

    /// Whether nothing that an inode has is somebody's.
    pub fn is_free_of(&self, image: &Image) -> bool {
        let segments = image.log.segments.iter().all(|&(at, lines)| {
            let mini = addr_mini(at);
            match self.minis.get(&mini.block.0).copied() {
                Some(used) => lines != SEGMENT_LINES && used & 1 << mini.slot == 0,
                None => !self.has(mini.block.0),
            }
        });
        segments && image.runs().all(|run| run.blocks().all(|block| !self.has(block)))
    }

    pub fn used(&self) -> u64 {
        self.words.iter().map(|word| word.count_ones() as u64).sum()
    }

    /// Blocks that nobody has and that are not free, and blocks that somebody has and that are free.
    pub fn compare(&self, account: &Account) -> (Vec<Run>, Vec<Run>) {
        let surely_free = bits(self.blocks, &account.free);
        let maybe_free = bits(self.blocks, &account.freed);
        let (mut lost, mut free) = (Vec::new(), Vec::new());
        for (at, &used) in self.words.iter().enumerate() {
            let tail = self.blocks as usize - at * 64;
            let inside = if tail >= 64 { u64::MAX } else { (1 << tail) - 1 };
            each_bit(!used & !surely_free[at] & !maybe_free[at] & inside, at, &mut lost);
            each_bit(used & surely_free[at], at, &mut free);
        }
        let minis: BTreeSet<u32> = self
            .minis
            .keys()
            .chain(account.minis.keys())
            .chain(account.freed_minis.keys())
            .copied()
            .collect();
        // Of a bad block all parts count as used.
        for block in minis.into_iter().filter(|&block| !self.is_bad(block)) {
            let Some(&used) = self.minis.get(&block) else {
                continue; // all of it is somebody's, or lost: it was looked at above
            };
            let is_free = |bits: &[u64]| bits[block as usize / 64] & 1 << (block % 64) != 0;
            let most = account.minis.get(&block).copied().unwrap_or(ALL_MINIS);
            let least = match account.freed_minis.get(&block) {
                Some(&least) => least,
                None if is_free(&maybe_free) => 0,
                None => most,
            };
            if least & !used != 0 {
                lost.push(Run::new(Block(block), 1));
            }
            if used & !most != 0 {
                free.push(Run::new(Block(block), 1));
            }
        }
        (lost, free)
    }

    /// A free block; it is taken.
    pub fn allocate(&mut self) -> Option<Block> {
        self.allocate_run(1).map(|run| run.start)
    }

    /// The first free blocks that follow each other; they are taken.
    pub fn allocate_run(&mut self, count: u32) -> Option<Run> {
        let (mut at, mut len) = (self.search_from, 0);
        while at < self.blocks && len < count {
            if at.is_multiple_of(64) && self.words[at as usize / 64] == u64::MAX {
                (at, len) = (at + 64, 0);
                continue;
            }
            len = if self.has(at) { 0 } else { len + 1 };
            at += 1;
        }
        if len < count {
            return None;
        }
        let run = Run::new(Block(at - count), count);
        (run.start.0..at).for_each(|block| self.set(block));
        if count == 1 {
            self.search_from = at; // nothing before is free
        }
        Some(run)
    }
}

/// The same blocks in runs that are apart, ascending. (Those that somebody made up may overlap, and end nowhere.)
pub fn joined(runs: impl IntoIterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = runs.into_iter().filter(|run| run.count > 0).collect();
    runs.sort_unstable();
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        let end = run.start.0.saturating_add(run.count);
        match joined.last_mut() {
            Some(last) if run.start <= last.end() => last.count = last.count.max(end - last.start.0),
            _ => joined.push(Run::new(run.start, end - run.start.0)),
        }
    }
    joined
}

fn bits(blocks: u32, runs: &[Run]) -> Vec<u64> {
    let mut words = vec![0u64; (blocks as usize).div_ceil(64)];
    for run in joined(runs.iter().copied()) {
        for block in run.start.0..run.end().0.min(blocks) {
            words[block as usize / 64] |= 1 << (block % 64);
        }
    }
    words
}

/// Adds the blocks whose bits are set in the word `at`.
fn each_bit(mut word: u64, at: usize, runs: &mut Vec<Run>) {
    while word != 0 {
        let block = at as u32 * 64 + word.trailing_zeros();
        match runs.last_mut() {
            Some(last) if last.end().0 == block => last.count += 1,
            _ => runs.push(Run::new(Block(block), 1)),
        }
        word &= word - 1;
    }
}
