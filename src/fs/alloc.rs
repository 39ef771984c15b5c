//! Block allocator: which 4 KiB blocks of the pool are free. DRAM only; recovery or a checkpoint fills it.
//!
//! **The bitmap.** One cache line per *group* of 512 blocks (2 MiB); a set bit is a block that is used or in
//! a pocket, and only an atomic operation on its word takes a block out or puts it back.
//!
//! **Shards.** A thread has a shard of its own while it lives (threads beyond [`SHARDS_MAX`] share one). Its
//! *pocket* holds what the thread freed last, newest first, so that a hot block is written again while it is
//! still in the cache, and what was taken ahead of a file that grows: most calls meet no other thread and
//! need no locked instruction. No block is stranded there: before anybody is told "no space", and before free
//! blocks are listed, all pockets are emptied into the bitmap. A shard also names the group that the thread
//! fills, so that single blocks come out consecutively; logs fill another group than data, so that they do
//! not cut files into pieces. Only its owner writes a shard's counters.
//!
//! **Summaries**, one bit per group each, zero to begin with, so that an empty pool costs no memory:
//! `full` (nothing was free when somebody looked), `touched` (a block may be used: not for 2 MiB runs),
//! `owned` (a shard fills it). Who frees a block first clears its bit, then `full`; who sets `full` then
//! looks at the bits again: so a group with a free block does not stay hidden (both sides sequentially
//! consistent). `touched` is kept by the same handshake with the roles exchanged.
//!
//! **The reserve** is a set of real blocks, taken out of the bitmap, for deletes, truncates and log
//! cleaning on a full pool ([`Class::Release`], [`Class::Last`]). No counting on the hot path: what is free in the bitmap
//! is available to all.
//!
//! Invariants, executed by [`Allocator::check_state`] while nothing else runs:
//!
//! 1. Blocks set in the bitmap less those in pockets = blocks allocated or marked - blocks freed.
//! 2. A group flagged `full` has no free block.
//! 3. A group with a used block is flagged `touched`.
//! 4. Bits past the end of the pool are set.
//! 5. The reserve holds distinct, used blocks; what it holds and what it misses is its target.
//! 6. A partial mini block is used, and some but not all of its minis are used.
//! 7. Blocks in pockets are set in the bitmap, and distinct.
//! 8. Deferred runs are used, overlap neither each other, nor the reserve, nor partial mini blocks; deferred
//!    minis are used and distinct.

use std::collections::{BTreeMap, BTreeSet};

use crossbeam_utils::{Backoff, CachePadded};
use smallvec::SmallVec;

use crate::limits::POOL_BLOCKS_MAX;
use crate::sync::primitive::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::sync::primitive::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use crate::sync::primitive::{Mutex, wait};
use crate::sync::{Lock, thread};

/// Blocks in a group: 2 MiB, and one cache line of bitmap.
pub const GROUP_BLOCKS: u32 = 512;
/// Minis in a block.
pub const BLOCK_MINIS: u8 = 8;

const GROUP_WORDS: usize = GROUP_BLOCKS as usize / 64;
/// Threads with a shard of their own, at most; in a small pool as many as it has groups.
const SHARDS_MAX: usize = thread::SLOTS_MAX;
/// Freed runs in a pocket.
const HOT_RUNS: usize = 32;
/// Longest run, in blocks, worth a place there: longer ones do not stay in a cache.
pub const HOT_RUN_MAX: u32 = 16;
/// Blocks taken at a time for data that grows by less.
const AHEAD_BLOCKS: u32 = 64;
/// Growing files for which a thread has blocks ahead.
const AHEAD_RUNS: usize = 4;
/// Partly used groups looked at for a good one before an untouched one is broken.
const PROBE_GROUPS_MAX: u32 = 16;
/// Free blocks that make a partly used group worth moving to.
const PROBE_FREE_MIN: u32 = 64;
/// Groups among which these are looked for: 8 GiB.
const PROBE_SPAN_MAX: u32 = 4096;
/// Times that a search waits for free blocks that another thread is moving: two seconds, nearly all of them asleep. On a busy machine
/// a thread that gives way to others has been seen away for a fifth of one.
const TRANSIT_WAITS_MAX: u32 = 40_000;
const MINI_STRIPES: usize = 16;
const RESERVE_BLOCKS_MAX: u32 = 256;
const RESERVE_BLOCKS_MIN: u32 = 8;
/// Sums over the counters that are looked at for two that agree.
const COUNTS_TRIES_MAX: u32 = 4;
const NO_GROUP: u32 = u32::MAX;

/// A 4 KiB block of the pool, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block(pub u32);

/// Contiguous blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Run {
    pub start: Block,
    pub count: u32,
}

impl Run {
    /// No block. For who looks for some on the way of every write: an `Option` of a run travels through the stack, as two words that are loaded
    /// as one, and so waits until all stores before it are on media.
    const NONE: Run = Run::new(Block(0), 0);

    #[inline]
    pub const fn new(start: Block, count: u32) -> Run {
        Run { start, count }
    }

    /// Itself, if it has any.
    #[inline]
    fn found(self) -> Option<Run> {
        (self.count > 0).then_some(self)
    }

    /// The block after the last.
    #[inline]
    pub const fn end(self) -> Block {
        Block(self.start.0 + self.count)
    }

    /// The numbers of its blocks.
    pub fn blocks(self) -> std::ops::Range<u32> {
        self.start.0..self.end().0
    }

    /// Takes off the first blocks.
    #[inline]
    fn split(&mut self, count: u32) -> Run {
        let first = Run::new(self.start, count);
        *self = Run::new(first.end(), self.count - count);
        first
    }
}

/// What one request was given: nearly always one run.
pub type Runs = SmallVec<[Run; 4]>;

/// An eighth of a block, 512 bytes: the first segment of a small log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Mini {
    pub block: Block,
    /// 0 to 7.
    pub slot: u8,
}

/// What blocks are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    Data,
    /// Logs and inode tables: kept apart from data, so that files stay contiguous.
    Metadata,
    /// What works on a full pool as long as that keeps nobody from deleting: may use half of the reserve.
    Release,
    /// What makes room in the end, and has to work whatever was done to a full pool before: records of removals, and what is
    /// live in a log that is cleaned. May use all of the reserve.
    Last,
}

impl Class {
    /// Blocks of a reserve of `target` that are left to others; none where it may not be touched.
    fn leaves_of_reserve(self, target: u32) -> Option<u32> {
        match self {
            Class::Data | Class::Metadata => None,
            Class::Release => Some(target / 2),
            Class::Last => Some(0),
        }
    }
}

/// Blocks claimed twice, or outside the pool: `block` is the first of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conflict {
    pub block: Block,
}

/// No free block that this class may use. Deferred frees do not count as free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSpace;

/// What waits for [`Allocator::release`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deferred {
    pub blocks: u64,
    pub minis: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stats {
    /// Blocks in the pool.
    pub total: u64,
    /// Unused blocks, the reserve among them, deferred frees not.
    pub free: u64,
    /// Blocks that any class can have.
    pub available: u64,
    pub deferred: Deferred,
    /// A run of this many blocks is free: the longest that the summaries show, not always the longest.
    pub largest_run_hint: u32,
}

/// See the file's head.
pub struct Allocator {
    total: u32,
    /// From `skip` on one bit per block, zero is free; a group is one cache line.
    words: Box<[AtomicU64]>,
    skip: usize,
    full: Flags,
    touched: Flags,
    owned: Flags,
    /// The last is shared by the threads that have none of their own.
    shards: Box<[CachePadded<Shard>]>,
    /// Where the search for an untouched group goes on; [`NO_GROUP`] when there was none.
    fresh_from: AtomicU32,
    /// Where the search for a partly used group goes on.
    partial_from: AtomicU32,
    reserve: Reserve,
    minis: Box<[CachePadded<MiniStripe>]>,
    started: AtomicBool,
    is_wrong: AtomicBool,
}

/// A thread's own part.
struct Shard {
    /// Blocks ever allocated and freed through this shard.
    allocated: AtomicU64,
    freed: AtomicU64,
    /// The groups this shard fills, and how far it has come in each: data, then the rest.
    cursors: [Cursor; 2],
    /// The stripe of the last mini.
    mini_stripe: AtomicUsize,
    /// Oldest epoch in `bins`, `u64::MAX` without one. Written under the lock.
    oldest: AtomicU64,
    pocket: Lock<Pocket>,
    bins: Mutex<Vec<Bin>>,
}

/// Free runs that the bitmap counts as used.
struct Pocket {
    /// A stack of what was freed; the oldest falls out when it is full.
    hot: [Run; HOT_RUNS],
    /// The newest is at `(next - 1) % HOT_RUNS`.
    next: usize,
    len: usize,
    /// What was taken ahead of data that grows; `ahead_next` is the one to give up next.
    ahead: [Run; AHEAD_RUNS],
    ahead_next: usize,
}

impl Pocket {
    const fn new() -> Pocket {
        const NONE: Run = Run::new(Block(0), 0);
        Pocket { hot: [NONE; HOT_RUNS], next: 0, len: 0, ahead: [NONE; AHEAD_RUNS], ahead_next: 0 }
    }

    /// Answers the run that fell out.
    #[inline]
    fn push(&mut self, run: Run) -> Option<Run> {
        // Not of images that fuzzers forge, as in `freed_wrongly`: there it is noticed once both are put back.
        debug_assert!(
            cfg!(fuzzing) || self.iter().all(|r| r.end() <= run.start || run.end() <= r.start),
            "{run:?} freed twice"
        );
        let oldest = std::mem::replace(&mut self.hot[self.next], run);
        self.next = (self.next + 1) % HOT_RUNS;
        if self.len == HOT_RUNS {
            return Some(oldest);
        }
        self.len += 1;
        None
    }

    /// From the run freed last, if it has `want` blocks.
    #[inline]
    fn take_hot(&mut self, want: u32) -> Run {
        let last = (self.next + HOT_RUNS - 1) % HOT_RUNS;
        let run = &mut self.hot[last];
        if self.len == 0 || run.count < want {
            return Run::NONE;
        }
        let taken = run.split(want);
        if run.count == 0 {
            (self.next, self.len) = (last, self.len - 1);
        }
        taken
    }

    /// Answers the run that is given up for it, perhaps an empty one.
    #[inline]
    fn push_ahead(&mut self, run: Run) -> Run {
        let place = &mut self.ahead[self.ahead_next];
        self.ahead_next = (self.ahead_next + 1) % AHEAD_RUNS;
        std::mem::replace(place, run)
    }

    /// Up to `want` blocks from `start` on, if they were taken ahead.
    #[inline]
    fn take_at(&mut self, start: Block, want: u32) -> Run {
        match self.ahead.iter_mut().find(|run| run.start == start && run.count > 0) {
            Some(run) => run.split(want.min(run.count)),
            None => Run::NONE,
        }
    }

    /// From what was taken ahead last, if it has `want` blocks.
    #[inline]
    fn take_ahead(&mut self, want: u32) -> Run {
        let run = &mut self.ahead[(self.ahead_next + AHEAD_RUNS - 1) % AHEAD_RUNS];
        if run.count >= want { run.split(want) } else { Run::NONE }
    }

    fn iter(&self) -> impl Iterator<Item = Run> {
        let hot = (1..=self.len).map(|back| self.hot[(self.next + HOT_RUNS - back) % HOT_RUNS]);
        hot.chain(self.ahead).filter(|run| run.count > 0)
    }
}

struct Cursor {
    group: AtomicU32,
    bit: AtomicU32,
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor { group: AtomicU32::new(NO_GROUP), bit: AtomicU32::new(0) }
    }
}

/// What becomes free when `epoch` is released.
struct Bin {
    epoch: u64,
    runs: Vec<Run>,
    minis: Vec<Mini>,
}

struct Reserve {
    target: AtomicU32,
    /// `target` less the blocks held. Written under the lock.
    missing: AtomicU32,
    /// The first block held and, in the upper half, the one behind the last. The lock is a locked instruction, for which whoever frees would
    /// wait until all of its stores are on media, and a line that others write.
    ends: AtomicU64,
    /// Between them: bit `block % 4096` is set for each block held: tells frees of reserve blocks from others cheaply.
    filter: [AtomicU64; 64],
    /// Ascending.
    blocks: Mutex<Vec<u32>>,
}

#[derive(Default)]
struct MiniStripe {
    /// Entries of `partial`, to be read without the lock.
    len: AtomicUsize,
    /// Used slots of the blocks that have both used and free ones. A used block that is not here is either
    /// no mini block or one whose minis are all used.
    partial: Mutex<BTreeMap<u32, u8>>,
}

/// One bit per group.
struct Flags(Box<[AtomicU64]>);

impl Flags {
    fn new(groups: usize) -> Flags {
        Flags((0..groups.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// The flags of 64 groups.
    #[inline]
    fn word(&self, index: usize) -> u64 {
        self.0[index].load(SeqCst)
    }

    #[inline]
    fn get(&self, group: u32) -> bool {
        self.0[group as usize / 64].load(SeqCst) >> (group % 64) & 1 != 0
    }

    fn set(&self, group: u32) {
        self.0[group as usize / 64].fetch_or(1 << (group % 64), SeqCst);
    }

    fn set_alone(&mut self, group: u32) {
        *self.0[group as usize / 64].get_mut() |= 1 << (group % 64);
    }

    fn clear(&self, group: u32) {
        self.0[group as usize / 64].fetch_and(!(1u64 << (group % 64)), SeqCst);
    }
}

/// A copy of a group's bitmap.
struct Bits([u64; GROUP_WORDS]);

impl Bits {
    fn free(&self) -> u32 {
        self.0.iter().map(|w| w.count_zeros()).sum()
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|&w| w == 0)
    }

    /// First bit from `from` that is set (`flip` 0) or clear (`flip` all ones); 512 if there is none.
    #[inline]
    fn next(&self, from: u32, flip: u64) -> u32 {
        let mut at = from;
        while at < GROUP_BLOCKS {
            let word = (self.0[at as usize / 64] ^ flip) & (u64::MAX << (at % 64));
            if word != 0 {
                return (at & !63) + word.trailing_zeros();
            }
            at = (at & !63) + 64;
        }
        GROUP_BLOCKS
    }

    /// The next free bits from `from`: first and count.
    #[inline]
    fn free_run(&self, from: u32) -> Option<(u32, u32)> {
        let start = self.next(from, u64::MAX);
        (start < GROUP_BLOCKS).then(|| (start, self.next(start, 0) - start))
    }

    /// The first run of `want` bits, looking from `from` round to it again; else the longest.
    fn best_run(&self, from: u32, want: u32) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        for begin in [from, 0] {
            let mut at = begin;
            while let Some((start, count)) = self.free_run(at) {
                if count >= want {
                    return Some((start, want));
                }
                if best.is_none_or(|(_, longest)| count > longest) {
                    best = Some((start, count));
                }
                at = start + count;
            }
            if from == 0 {
                break;
            }
        }
        best
    }
}

/// The calling thread's shard.
#[derive(Clone, Copy)]
struct Local<'a> {
    shard: &'a Shard,
    shared: bool,
}

impl Local<'_> {
    /// Counts; only the owner writes, so no locked instruction is needed unless the shard is shared. Who sees it sees
    /// what was counted before it, by others as well: of a block that went from hand to hand, in that order.
    #[inline]
    fn count(&self, counter: &AtomicU64, n: u32) {
        if self.shared {
            counter.fetch_add(n as u64, Release);
        } else {
            counter.store(counter.load(Relaxed).wrapping_add(n as u64), Release);
        }
    }
}

/// `len` bits from `bit`.
#[inline]
fn mask(bit: u32, len: u32) -> u64 {
    (u64::MAX >> (64 - len)) << bit
}

/// The first group from `from` up to `end` whose bit is set in `candidates` (64 groups, by word index).
fn next_group(from: u32, end: u32, candidates: impl Fn(usize) -> u64) -> Option<u32> {
    let mut at = from;
    while at < end {
        let word = candidates(at as usize / 64) & (u64::MAX << (at % 64));
        if word != 0 {
            let found = (at & !63) + word.trailing_zeros();
            return (found < end).then_some(found);
        }
        at = (at & !63) + 64;
    }
    None
}

/// The parts of a run that lie in one bitmap word: block, length.
#[inline]
fn by_word(run: Run) -> impl Iterator<Item = (u32, u32)> {
    let mut at = run.start.0;
    let end = run.end().0;
    std::iter::from_fn(move || {
        let len = (64 - at % 64).min(end - at);
        let part = (at, len);
        at += len;
        (len != 0).then_some(part)
    })
}

impl Allocator {
    /// All blocks free. Mark what is used, then [`start`](Allocator::start).
    pub fn new(total_blocks: u32) -> Allocator {
        assert!(total_blocks > 0 && total_blocks as u64 <= POOL_BLOCKS_MAX);
        let count = (total_blocks as usize).div_ceil(GROUP_BLOCKS as usize);
        let (words, skip) = zeroed_groups(count);
        let mut allocator = Allocator {
            total: total_blocks,
            skip,
            words,
            full: Flags::new(count),
            touched: Flags::new(count),
            owned: Flags::new(count),
            shards: {
                let own = (0..count.min(SHARDS_MAX) as u32).map(|slot| Lock::leaning_to(slot, Pocket::new()));
                own.chain([Lock::new(Pocket::new())])
                    .map(|pocket| CachePadded::new(Shard::new(pocket)))
                    .collect()
            },
            fresh_from: AtomicU32::new(0),
            partial_from: AtomicU32::new(0),
            reserve: Reserve::new(),
            minis: (0..MINI_STRIPES).map(|_| CachePadded::default()).collect(),
            started: AtomicBool::new(false),
            is_wrong: AtomicBool::new(false),
        };
        allocator.close_tail();
        allocator
    }

    /// From a checkpoint: all used but `runs`, which ascend. Add the partial minis with
    /// [`load_partial_mini`](Allocator::load_partial_mini), then [`start`](Allocator::start).
    pub fn from_free_runs(total_blocks: u32, runs: impl Iterator<Item = Run>) -> Result<Allocator, Conflict> {
        let mut allocator = Allocator::new(total_blocks);
        let mut used_from = 0;
        for run in runs {
            if run.start.0 < used_from || !allocator.contains(run) {
                return Err(Conflict { block: run.start });
            }
            allocator.fill(Run::new(Block(used_from), run.start.0 - used_from));
            used_from = run.end().0;
        }
        allocator.fill(Run::new(Block(used_from), total_blocks - used_from));
        Ok(allocator)
    }

    /// Marks free blocks, alone with the allocator: without locked instructions.
    fn fill(&mut self, run: Run) {
        let mut at = run.start.0;
        while at < run.end().0 {
            let group = at / GROUP_BLOCKS;
            let end = ((group + 1) * GROUP_BLOCKS).min(run.end().0);
            self.touched.set_alone(group);
            if end - at == GROUP_BLOCKS {
                self.full.set_alone(group);
                let first = self.skip + at as usize / 64;
                self.words[first..first + GROUP_WORDS].fill_with(|| AtomicU64::new(u64::MAX));
            } else {
                for (at, len) in by_word(Run::new(Block(at), end - at)) {
                    *self.words[self.skip + at as usize / 64].get_mut() |= mask(at % 64, len);
                }
            }
            at = end;
        }
        let local = self.local();
        local.count(&local.shard.allocated, run.count);
    }

    /// Marks blocks found in use at recovery. On conflict nothing is marked. Thread-safe.
    pub fn mark_used(&self, run: Run) -> Result<(), Conflict> {
        if !self.contains(run) {
            return Err(Conflict { block: Block(run.start.0.max(self.total)) });
        }
        for (at, len) in by_word(run) {
            let bits = mask(at % 64, len);
            let old = self.word(at).fetch_or(bits, SeqCst);
            if old & bits != 0 {
                self.word(at).fetch_and(old | !bits, SeqCst);
                for (at, len) in by_word(Run::new(run.start, at - run.start.0)) {
                    self.word(at).fetch_and(!mask(at % 64, len), SeqCst);
                }
                return Err(Conflict { block: Block((at & !63) + (old & bits).trailing_zeros()) });
            }
            self.touch(at / GROUP_BLOCKS);
        }
        let local = self.local();
        local.count(&local.shard.allocated, run.count);
        Ok(())
    }

    /// Ends the marking: the reserve is taken, allocation may begin.
    pub fn start(&self) {
        assert!(!self.started.swap(true, SeqCst), "the allocator is started once");
        let share = (self.total / 100).clamp(RESERVE_BLOCKS_MIN, RESERVE_BLOCKS_MAX);
        let target = share.min(self.total / 2);
        let mut held = self.reserve.blocks.lock();
        self.reserve.target.store(target, SeqCst);
        // From the end of the pool, where 2 MiB runs are missed least.
        for group in (0..self.group_count()).rev() {
            let bits = self.bits(group);
            let mut at = 0;
            while let Some((bit, count)) = bits.free_run(at).filter(|_| held.len() < target as usize) {
                at = bit + count;
                let take = count.min(target - held.len() as u32);
                let first = group * GROUP_BLOCKS + at - take;
                held.extend(first..first + self.claim(first, take));
                // Owned by the reserve, so to say: others come here last.
                self.owned.set(group);
            }
            if held.len() == target as usize {
                break;
            }
        }
        held.sort_unstable();
        let local = self.local();
        local.count(&local.shard.allocated, held.len() as u32);
        self.reserve.publish(&held);
    }

    /// Part of the reserve is in use: nothing else was free.
    #[inline]
    pub fn is_short(&self) -> bool {
        self.reserve.missing.load(Relaxed) != 0
    }

    /// Blocks of the reserve that [`Class::Release`] may use, in all.
    pub fn blocks_for_release(&self) -> u32 {
        self.reserve.target.load(Relaxed) / 2
    }

    /// A contiguous run of 1 to `want` blocks, as long as can be found cheaply; `None` when no block is
    /// free that the class may use. 512 and more come 2 MiB-aligned where there are such runs.
    ///
    /// With `near` (the block after the caller's last one) the run begins there if that block is free, and
    /// else where the next ones can follow. Without, the block freed last comes first.
    #[inline]
    pub fn alloc(&self, want: u32, class: Class, near: Option<Block>) -> Option<Run> {
        self.alloc_any(want, class, near).found()
    }

    /// As [`alloc`](Allocator::alloc); an empty run where there is none.
    fn alloc_any(&self, want: u32, class: Class, near: Option<Block>) -> Run {
        debug_assert!(want > 0 && self.started.load(Relaxed));
        let local = self.local();
        let run = match near {
            Some(block) => self.alloc_near(local, want, block),
            None => self.alloc_pocketed(local, want, class),
        };
        if run.count == 0 {
            return self.alloc_counted(local, want, class);
        }
        local.count(&local.shard.allocated, run.count);
        run
    }

    /// From the bitmap or, in the end, from the reserve.
    fn alloc_counted(&self, local: Local, want: u32, class: Class) -> Run {
        match self.alloc_cold(local, want, class) {
            Some(run) => {
                local.count(&local.shard.allocated, run.count);
                run
            }
            None => self.reserve.take(want, class).unwrap_or(Run::NONE),
        }
    }

    /// `want` blocks in as few runs as can be found cheaply, or none at all.
    pub fn alloc_all(&self, want: u32, class: Class, out: &mut Runs) -> Result<(), NoSpace> {
        // Not even in passing is all taken for a request that cannot be met.
        if self.cannot_meet(want) {
            return Err(NoSpace);
        }
        let before = out.len();
        let mut missing = want;
        let mut near = None;
        while missing > 0 {
            let Some(run) = self.alloc(missing, class, near) else {
                out.drain(before..).for_each(|run| self.free(run));
                return Err(NoSpace);
            };
            missing -= run.count;
            near = Some(run.end());
            match out[before..].last_mut() {
                Some(last) if last.end() == run.start => last.count += run.count,
                _ => out.push(run),
            }
        }
        Ok(())
    }

    /// One run of `want` blocks, or none where no such run is free. If it has as many as a group it begins with one: it is
    /// mapped by huge pages. The reserve is left alone.
    pub fn alloc_whole(&self, want: u32) -> Option<Run> {
        debug_assert!(want > 0 && self.started.load(Relaxed));
        self.empty_pockets();
        let (mut first, mut group) = (0, 0);
        while group < self.group_count() {
            let bits = self.bits(group);
            let (before, free) = ((group - first) * GROUP_BLOCKS, bits.next(0, 0));
            let found = match want < GROUP_BLOCKS {
                true => {
                    bits.best_run(0, want).filter(|run| run.1 == want).map(|run| group * GROUP_BLOCKS + run.0)
                }
                false => (before.saturating_add(free) >= want).then_some(first * GROUP_BLOCKS),
            };
            if let Some(start) = found {
                let got = self.claim(start, want);
                if got == want {
                    let local = self.local();
                    local.count(&local.shard.allocated, want);
                    return Some(Run::new(Block(start), want));
                }
                // Somebody was faster: on behind what he took.
                if got > 0 {
                    self.put_back(Run::new(Block(start), got));
                }
                group = (start + got) / GROUP_BLOCKS;
                first = group + 1;
            } else if free < GROUP_BLOCKS {
                first = group + 1;
            }
            group += 1;
        }
        None
    }

    /// Frees blocks that nothing on media or in flight refers to any more. They are free on return.
    #[inline]
    pub fn free(&self, run: Run) {
        self.free_run(run, self.local());
    }

    /// Blocks that become free when their epoch is [released](Allocator::release).
    pub fn free_deferred(&self, run: Run, epoch: u64) {
        if !self.is_in_use(run) {
            return self.freed_wrongly(run);
        }
        self.local().shard.defer(epoch, |bin| match bin.runs.last_mut() {
            Some(last) if last.end() == run.start => last.count += run.count,
            _ => bin.runs.push(run),
        });
    }

    /// Frees everything deferred to `epoch` or an earlier one; whether there was anything.
    pub fn release(&self, epoch: u64) -> bool {
        let local = self.local();
        let mut any = false;
        for shard in self.shards_in_use() {
            if shard.oldest.load(Relaxed) > epoch {
                continue;
            }
            for bin in shard.take_bins(epoch) {
                bin.runs.into_iter().for_each(|run| self.free_run(run, local));
                bin.minis.into_iter().for_each(|mini| self.free_mini(mini));
                any = true;
            }
        }
        any
    }

    /// What waits for a release.
    pub fn deferred(&self) -> Deferred {
        let mut sum = Deferred::default();
        self.for_each_bin(&mut |bin| {
            sum.blocks += bin.runs.iter().map(|run| run.count as u64).sum::<u64>();
            sum.minis += bin.minis.len() as u64;
        });
        sum
    }

    /// Blocks that any class can have now. While others allocate and free without a pause it may be fewer than there are.
    pub fn available(&self) -> u64 {
        let mut counts = self.counts();
        for _ in 0..COUNTS_TRIES_MAX {
            let again = self.counts();
            if again == counts {
                return self.free_by(counts);
            }
            counts = again;
        }
        // So that nobody frees in this sum what he had not allocated.
        let sum = |of: fn(&Shard) -> &AtomicU64| {
            self.shards_in_use().fold(0, |sum: u64, shard| sum.wrapping_add(of(shard).load(Acquire)))
        };
        let freed = sum(|shard| &shard.freed);
        self.free_by((sum(|shard| &shard.allocated), freed))
    }

    fn free_by(&self, (allocated, freed): (u64, u64)) -> u64 {
        (self.total as u64).saturating_sub(allocated.wrapping_sub(freed))
    }

    /// Whether at some moment during this call fewer blocks were free than are wanted, where those are more than a group.
    #[inline]
    pub fn cannot_meet(&self, want: u32) -> bool {
        want > GROUP_BLOCKS && self.has_fewer_than(want)
    }

    #[cold]
    fn has_fewer_than(&self, want: u32) -> bool {
        let counts = self.counts();
        let free = self.free_by(counts) + self.reserve.blocks.lock().len() as u64;
        (want as u64) > free && counts == self.counts()
    }

    pub fn stats(&self) -> Stats {
        let available = self.available();
        Stats {
            total: self.total as u64,
            free: available + self.reserve.blocks.lock().len() as u64,
            available,
            deferred: self.deferred(),
            largest_run_hint: self.largest_run_hint(),
        }
    }

    /// All free runs, ascending and not adjacent, the reserve among them; with `with_deferred` also what
    /// waits for a release. For a checkpoint: nothing else may run.
    pub fn for_each_free_run(&self, with_deferred: bool, each: &mut dyn FnMut(Run)) {
        self.empty_pockets();
        let mut extra: Vec<Run> =
            self.reserve.blocks.lock().iter().map(|&block| Run::new(Block(block), 1)).collect();
        if with_deferred {
            self.for_each_bin(&mut |bin| extra.extend_from_slice(&bin.runs));
            let freed = self.minis_view(true).into_iter().filter(|&(_, used)| used == 0);
            extra.extend(freed.map(|(block, _)| Run::new(Block(block), 1)));
        }
        extra.sort_unstable();
        let mut extra = extra.into_iter().peekable();
        let mut pending: Option<Run> = None;
        let mut put = |run: Run| match &mut pending {
            Some(last) if last.end() == run.start => last.count += run.count,
            _ => {
                if let Some(done) = pending.replace(run) {
                    each(done);
                }
            }
        };
        self.for_each_clear_run(&mut |run| {
            while let Some(first) = extra.next_if(|e| e.start < run.start) {
                put(first);
            }
            put(run);
        });
        extra.for_each(&mut put);
        if let Some(last) = pending {
            each(last);
        }
    }

    fn for_each_clear_run(&self, each: &mut dyn FnMut(Run)) {
        for group in 0..self.group_count() {
            let first = group * GROUP_BLOCKS;
            if !self.touched.get(group) {
                // Its bitmap was perhaps never written: reading would give it memory.
                each(Run::new(Block(first), GROUP_BLOCKS.min(self.total - first)));
                continue;
            }
            let bits = self.bits(group);
            let mut at = 0;
            while let Some((bit, count)) = bits.free_run(at) {
                each(Run::new(Block(first + bit), count));
                at = bit + count;
            }
        }
    }

    // Where to allocate.

    #[inline]
    fn alloc_near(&self, local: Local, want: u32, block: Block) -> Run {
        let ahead = local.shard.pocket.write().take_at(block, want);
        if ahead.count > 0 { ahead } else { self.alloc_ahead(local, want, block.0) }
    }

    /// Takes the free blocks from `start` on: `want` of them, and more into the pocket.
    fn alloc_ahead(&self, local: Local, want: u32, start: u32) -> Run {
        let got = self.claim(start, want.max(AHEAD_BLOCKS));
        if got > want {
            self.keep_ahead(local, Run::new(Block(start + want), got - want));
        }
        Run::new(Block(start), got.min(want))
    }

    #[inline]
    fn alloc_pocketed(&self, local: Local, want: u32, class: Class) -> Run {
        let mut pocket = local.shard.pocket.write();
        let hot = pocket.take_hot(want);
        if hot.count == 0 && class == Class::Data { pocket.take_ahead(want) } else { hot }
    }

    /// Puts a freed run, still set in the bitmap, into the thread's pocket.
    #[inline]
    fn keep_hot(&self, local: Local, run: Run) {
        let oldest = local.shard.pocket.write().push(run);
        if let Some(oldest) = oldest {
            self.put_back(oldest);
        }
    }

    /// Puts what follows a growing file, set in the bitmap, into the thread's pocket.
    fn keep_ahead(&self, local: Local, run: Run) {
        let given_up = local.shard.pocket.write().push_ahead(run);
        if given_up.count > 0 {
            self.put_back(given_up);
        }
    }

    /// Empties all pockets; false where they were empty.
    fn empty_pockets(&self) -> bool {
        let mut any = false;
        for shard in self.shards_in_use() {
            let pocket = std::mem::replace(&mut *shard.pocket.write(), Pocket::new());
            for run in pocket.iter() {
                self.put_back(run);
                any = true;
            }
        }
        any
    }

    /// From the group the shard fills, or the next one.
    fn alloc_cold(&self, local: Local, want: u32, class: Class) -> Option<Run> {
        if want >= GROUP_BLOCKS
            && let Some(run) = self.alloc_groups(want)
        {
            return Some(run);
        }
        let want = want.min(GROUP_BLOCKS);
        let cursor = &local.shard.cursors[(class != Class::Data) as usize];
        let ahead = if class == Class::Data { AHEAD_BLOCKS } else { want };
        if let Some(run) = self.alloc_at_cursor(local, cursor, want, ahead) {
            return Some(run);
        }
        let (backoff, mut waits) = (Backoff::new(), 0);
        loop {
            let Some((group, bit, len)) = self.find_group(want) else {
                // Before pockets are asked, which disturbs those who have them: what is there counts as free.
                if self.is_exhausted() {
                    return None;
                }
                if self.empty_pockets() {
                    continue;
                }
                // What is not to be found and not used is in another thread's hands, between bitmap and pocket.
                // Not for ever, for that thread may have panicked.
                if waits == TRANSIT_WAITS_MAX {
                    return None;
                }
                waits += 1;
                wait(&backoff);
                continue;
            };
            let got = self.claim(group * GROUP_BLOCKS + bit, len);
            if got > 0 {
                self.move_cursor(cursor, group, bit + got);
                return Some(Run::new(Block(group * GROUP_BLOCKS + bit), got));
            }
            // Who was faster may not have come to flag it yet.
            self.touch(group);
        }
    }

    /// Goes on in the shard's group, unless it has no run of `want` left.
    #[inline]
    fn alloc_at_cursor(&self, local: Local, cursor: &Cursor, want: u32, ahead: u32) -> Option<Run> {
        let group = cursor.group.load(Relaxed);
        if group == NO_GROUP {
            return None;
        }
        let bit = cursor.bit.load(Relaxed);
        if want == 1 {
            let first = group * GROUP_BLOCKS + bit;
            let got = self.claim(first, ahead.max(1).min(GROUP_BLOCKS - bit));
            if got > 0 {
                cursor.bit.store((bit + got) % GROUP_BLOCKS, Relaxed);
                if got > 1 {
                    self.keep_ahead(local, Run::new(Block(first + 1), got - 1));
                }
                return Some(Run::new(Block(first), 1));
            }
        }
        loop {
            let bits = self.bits(group);
            let (bit, len) = bits.best_run(cursor.bit.load(Relaxed), want)?;
            if len < want {
                return None;
            }
            let got = self.claim(group * GROUP_BLOCKS + bit, want);
            if got > 0 {
                cursor.bit.store((bit + got) % GROUP_BLOCKS, Relaxed);
                return Some(Run::new(Block(group * GROUP_BLOCKS + bit), got));
            }
        }
    }

    fn move_cursor(&self, cursor: &Cursor, group: u32, bit: u32) {
        let old = cursor.group.swap(group, Relaxed);
        cursor.bit.store(bit % GROUP_BLOCKS, Relaxed);
        if old == group {
            return;
        }
        self.owned.set(group);
        if old != NO_GROUP {
            self.owned.clear(old);
            self.untouch_if_empty(old);
        }
    }

    /// A run at the start of an untouched group, going on as far as the following blocks are free.
    fn alloc_groups(&self, want: u32) -> Option<Run> {
        loop {
            let group = self.find_untouched()?;
            let got = self.claim(group * GROUP_BLOCKS, want);
            if got > 0 {
                return Some(Run::new(Block(group * GROUP_BLOCKS), got));
            }
            self.touch(group);
        }
    }

    /// The next group to fill and a run in it: a partly used one that is worth it, else an untouched one,
    /// else the best of what is left.
    fn find_group(&self, want: u32) -> Option<(u32, u32, u32)> {
        let partial = |i| self.touched.word(i) & !self.full.word(i) & !self.owned.word(i);
        let worth = |bits: &Bits, len| len >= want && bits.free() >= PROBE_FREE_MIN;
        let (found, is_worth) = self.probe(want, PROBE_SPAN_MAX, partial, worth);
        if is_worth {
            return found;
        }
        if let Some(group) = self.find_untouched() {
            return Some((group, 0, want));
        }
        self.probe(want, u32::MAX, |i| !self.full.word(i), |_, len| len >= want).0
    }

    /// An untouched group that no shard fills.
    fn find_untouched(&self) -> Option<u32> {
        let (from, end) = (self.fresh_from.load(Relaxed), self.group_count());
        if from == NO_GROUP {
            return None;
        }
        let untouched = |i| !(self.touched.word(i) | self.owned.word(i));
        let found = next_group(from, end, untouched).or_else(|| next_group(0, from, untouched));
        self.fresh_from.store(found.unwrap_or(NO_GROUP), Relaxed);
        found
    }

    /// Looks at the next candidates with a free block, from where the last probe ended and round, among
    /// `span` groups: the first that is `good`, else the one with the longest run of the first
    /// [`PROBE_GROUPS_MAX`]; and whether it is good. Flags full ones on the way.
    fn probe(
        &self,
        want: u32,
        span: u32,
        candidates: impl Fn(usize) -> u64,
        good: impl Fn(&Bits, u32) -> bool,
    ) -> (Option<(u32, u32, u32)>, bool) {
        let (from, all) = (self.partial_from.load(Relaxed), self.group_count());
        let before_wrap = span.min(all - from);
        let (mut best, mut seen) = (None, 0);
        for (mut at, end) in [(from, from + before_wrap), (0, span.min(all) - before_wrap)] {
            while seen < PROBE_GROUPS_MAX
                && let Some(group) = next_group(at, end, &candidates)
            {
                at = group + 1;
                let bits = self.bits(group);
                let Some((bit, len)) = bits.best_run(0, want) else {
                    self.flag_full(group);
                    continue;
                };
                let found = Some((group, bit, len));
                if good(&bits, len) {
                    self.partial_from.store(group, Relaxed);
                    return (found, true);
                }
                if best.is_none_or(|(_, _, longest)| len > longest) {
                    best = found;
                }
                seen += 1;
                self.partial_from.store(at % all, Relaxed);
            }
        }
        (best, false)
    }

    // The bitmap.

    fn group_count(&self) -> u32 {
        self.total.div_ceil(GROUP_BLOCKS)
    }

    /// A group's words as they are now, one after the other.
    #[inline]
    fn bits(&self, group: u32) -> Bits {
        let first = self.skip + group as usize * GROUP_WORDS;
        let words = self.words[first..].first_chunk::<GROUP_WORDS>().expect("groups are whole");
        Bits(std::array::from_fn(|i| words[i].load(SeqCst)))
    }

    #[inline]
    fn word(&self, block: u32) -> &AtomicU64 {
        &self.words[self.skip + block as usize / 64]
    }

    /// Takes up to `want` free blocks that begin with `start`; answers how many.
    #[inline]
    fn claim(&self, start: u32, want: u32) -> u32 {
        if want == 1 {
            if start >= self.total {
                return 0;
            }
            let (word, bit) = (self.word(start), 1u64 << (start % 64));
            if word.fetch_or(bit, SeqCst) & bit != 0 {
                return 0;
            }
            self.touch(start / GROUP_BLOCKS);
            return 1;
        }
        self.claim_many(start, want)
    }

    fn claim_many(&self, start: u32, want: u32) -> u32 {
        let end = (start as u64 + want as u64).min(self.total as u64) as u32;
        if start >= end {
            return 0;
        }
        let mut got = 0;
        for (at, len) in by_word(Run::new(Block(start), end - start)) {
            let claimed = claim_in_word(self.word(at), at % 64, len);
            got += claimed;
            if claimed > 0 {
                self.touch(at / GROUP_BLOCKS);
            }
            if claimed < len {
                break;
            }
        }
        // Searches need not come to see that these are full.
        for group in start.div_ceil(GROUP_BLOCKS)..(start + got) / GROUP_BLOCKS {
            self.flag_full(group);
        }
        got
    }

    #[inline]
    fn free_run(&self, run: Run, local: Local) {
        let run = match self.reserve.missing.load(Relaxed) {
            0 => run,
            _ => self.refill_reserve(run),
        };
        if run.count == 0 {
            return;
        }
        let is_hot = run.count <= HOT_RUN_MAX;
        // Of long ones the rest is seen as they are put back.
        let is_right = if is_hot { self.is_in_use(run) } else { self.may_be_freed(run) };
        if !is_right {
            return self.freed_wrongly(run);
        }
        // Before anybody can have them: no block is ever counted as used twice.
        local.count(&local.shard.freed, run.count);
        match is_hot {
            true => self.keep_hot(local, run),
            false => self.put_back(run),
        }
    }

    /// Clears a run in the bitmap.
    fn put_back(&self, run: Run) {
        for (at, len) in by_word(run) {
            let bits = mask(at % 64, len);
            let old = self.word(at).fetch_and(!bits, SeqCst);
            if old & bits != bits {
                self.freed_wrongly(run);
            }
            self.freed_in(at / GROUP_BLOCKS, old & !bits);
        }
    }

    /// Brings the summaries up to date after blocks of one word, now `left`, were freed.
    #[inline]
    fn freed_in(&self, group: u32, left: u64) {
        if self.full.get(group) {
            self.full.clear(group);
        }
        if left == 0 && !self.owned.get(group) {
            self.untouch_if_empty(group);
        }
    }

    #[inline]
    fn contains(&self, run: Run) -> bool {
        run.start.0 as u64 + run.count as u64 <= self.total as u64
    }

    /// Whether a run lies in the pool, and no block of it in the reserve, which is nobody's to free.
    #[inline]
    fn may_be_freed(&self, run: Run) -> bool {
        self.contains(run) && !self.reserve.holds_any(run)
    }

    #[inline]
    fn is_in_use(&self, run: Run) -> bool {
        let is_set = |(at, len)| {
            let bits = mask(at % 64, len);
            self.word(at).load(Relaxed) & bits == bits
        };
        self.may_be_freed(run) && by_word(run).all(is_set)
    }

    /// Who frees what is free has not had it alone: the image was forged, or this program is wrong (then its tests end here).
    #[cold]
    fn freed_wrongly(&self, run: Run) {
        let is_tested = cfg!(any(shuttle, debug_assertions)) && !cfg!(fuzzing);
        assert!(!is_tested, "{run:?} is freed, and was not in use");
        self.is_wrong.store(true, Relaxed);
    }

    /// Whether anything was freed that was not in use: nobody can tell any more which blocks are.
    #[inline]
    pub fn is_wrong(&self) -> bool {
        self.is_wrong.load(Relaxed)
    }

    #[inline]
    fn touch(&self, group: u32) {
        if !self.touched.get(group) {
            self.touched.set(group);
        }
    }

    fn untouch_if_empty(&self, group: u32) {
        if self.bits(group).is_empty() {
            self.touched.clear(group);
            if self.fresh_from.load(Relaxed) == NO_GROUP {
                self.fresh_from.store(group, Relaxed);
            }
            // A claim that saw the flag before it was cleared is visible now.
            if !self.bits(group).is_empty() {
                self.touched.set(group);
            }
        }
    }

    fn flag_full(&self, group: u32) {
        self.full.set(group);
        // A free that saw the flag before it was set is visible now.
        if self.bits(group).free() > 0 {
            self.full.clear(group);
        }
    }

    /// Bits past the end of the pool are used for good.
    fn close_tail(&mut self) {
        let end = self.group_count() * GROUP_BLOCKS;
        for (at, len) in by_word(Run::new(Block(self.total), end - self.total)) {
            *self.words[self.skip + at as usize / 64].get_mut() |= mask(at % 64, len);
            // Never a 2 MiB run.
            self.touch(at / GROUP_BLOCKS);
        }
    }

    #[inline]
    fn local(&self) -> Local<'_> {
        let slot = thread::slot() as usize;
        let last = self.shards.len() - 1;
        Local { shard: &self.shards[slot.min(last)], shared: slot >= last }
    }

    /// The shards that threads ever had.
    fn shards_in_use(&self) -> impl Iterator<Item = &Shard> {
        let last = self.shards.len() - 1;
        let used = thread::slots_used().min(last);
        self.shards[..used].iter().chain(&self.shards[last..]).map(|shard| &**shard)
    }

    /// At some moment during this call no block was free. A sum over counters that move is no moment's: whoever allocates
    /// behind the one and frees before the other is in it too often. Two that agree are, for no counter ever goes back.
    pub fn is_exhausted(&self) -> bool {
        let counts = self.counts();
        counts.0.wrapping_sub(counts.1) >= self.total as u64 && counts == self.counts()
    }

    /// Blocks ever allocated and freed.
    fn counts(&self) -> (u64, u64) {
        self.shards_in_use().fold((0, 0), |(allocated, freed), shard| {
            let freed = freed.wrapping_add(shard.freed.load(Acquire));
            (allocated.wrapping_add(shard.allocated.load(Acquire)), freed)
        })
    }

    fn largest_run_hint(&self) -> u32 {
        let end = self.group_count();
        let (mut at, mut longest) = (0, 0);
        while let Some(start) = next_group(at, end, |i| !self.touched.word(i)) {
            at = start + 1;
            while at < end && !self.touched.get(at) {
                at += 1;
            }
            longest = longest.max(at * GROUP_BLOCKS - start * GROUP_BLOCKS);
        }
        if longest == 0 {
            let partial = next_group(self.partial_from.load(Relaxed), end, |i| !self.full.word(i));
            let run = partial.and_then(|group| self.bits(group).best_run(0, GROUP_BLOCKS));
            longest = run.map_or(0, |(_, len)| len);
        }
        longest
    }
}

/// Words for `count` groups, and how many stand before the first, so that each group is one cache line.
#[cfg(not(shuttle))]
fn zeroed_groups(count: usize) -> (Box<[AtomicU64]>, usize) {
    // Memory that the kernel zeroes when it is first used: a type with an alignment of its own would be
    // zeroed here, which takes 16 ms for 1 TiB instead of none.
    let zeroed = Box::<[AtomicU64]>::new_zeroed_slice((count + 1) * GROUP_WORDS);
    // SAFETY: all zeros is a value of atomic integers.
    let words = unsafe { zeroed.assume_init() };
    let skip = words.as_ptr().align_offset(GROUP_WORDS * size_of::<u64>());
    (words, skip)
}

/// Shuttle's atomics are no plain integers.
#[cfg(shuttle)]
fn zeroed_groups(count: usize) -> (Box<[AtomicU64]>, usize) {
    ((0..count * GROUP_WORDS).map(|_| AtomicU64::new(0)).collect(), 0)
}

/// Takes the free bits that begin with `bit`, at most `len`; answers how many.
fn claim_in_word(word: &AtomicU64, bit: u32, len: u32) -> u32 {
    let mut old = word.load(Relaxed);
    loop {
        let taken = old & mask(bit, len);
        let free = if taken == 0 { len } else { taken.trailing_zeros() - bit };
        if free == 0 {
            return 0;
        }
        match word.compare_exchange_weak(old, old | mask(bit, free), SeqCst, Relaxed) {
            Ok(_) => return free,
            Err(now) => old = now,
        }
    }
}

impl Shard {
    fn new(pocket: Lock<Pocket>) -> Shard {
        Shard {
            allocated: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            cursors: Default::default(),
            mini_stripe: AtomicUsize::new(0),
            oldest: AtomicU64::new(u64::MAX),
            pocket,
            bins: Mutex::new(Vec::new()),
        }
    }

    fn defer(&self, epoch: u64, put: impl FnOnce(&mut Bin)) {
        let mut bins = self.bins.lock();
        let at = match bins.iter().rposition(|bin| bin.epoch == epoch) {
            Some(at) => at,
            None => {
                bins.push(Bin { epoch, runs: Vec::new(), minis: Vec::new() });
                self.oldest.store(self.oldest.load(Relaxed).min(epoch), Relaxed);
                bins.len() - 1
            }
        };
        put(&mut bins[at]);
    }

    fn take_bins(&self, epoch: u64) -> Vec<Bin> {
        let mut bins = self.bins.lock();
        let taken = bins.extract_if(.., |bin| bin.epoch <= epoch).collect();
        self.oldest.store(bins.iter().map(|bin| bin.epoch).min().unwrap_or(u64::MAX), Relaxed);
        taken
    }
}

impl Reserve {
    fn new() -> Reserve {
        Reserve {
            target: AtomicU32::new(0),
            missing: AtomicU32::new(0),
            ends: AtomicU64::new(0),
            filter: [const { AtomicU64::new(0) }; 64],
            blocks: Mutex::new(Vec::new()),
        }
    }

    /// Brings filter and `missing` up to date; the caller holds the lock.
    fn publish(&self, held: &[u32]) {
        let mut filter = [0u64; 64];
        for block in held {
            filter[(block / 64 % 64) as usize] |= 1 << (block % 64);
        }
        for (word, bits) in self.filter.iter().zip(filter) {
            word.store(bits, Relaxed);
        }
        let first = held.first().copied().unwrap_or(0);
        let end = held.last().map_or(0, |&last| last + 1);
        self.ends.store(first as u64 | (end as u64) << 32, Relaxed);
        self.missing.store(self.target.load(Relaxed) - held.len() as u32, SeqCst);
    }

    /// The last run of the reserve, at most `want` blocks and what the class may have of them.
    #[cold]
    fn take(&self, want: u32, class: Class) -> Option<Run> {
        let leaves = class.leaves_of_reserve(self.target.load(Relaxed))?;
        let mut held = self.blocks.lock();
        let want = want.min((held.len() as u32).saturating_sub(leaves));
        if want == 0 {
            return None;
        }
        let mut run = Run::new(Block(held.pop()?), 1);
        while run.count < want && held.last().is_some_and(|&block| block + 1 == run.start.0) {
            held.pop();
            run = Run::new(Block(run.start.0 - 1), run.count + 1);
        }
        self.publish(&held);
        Some(run)
    }

    #[inline]
    fn holds_any(&self, run: Run) -> bool {
        let ends = self.ends.load(Relaxed);
        if run.start.0 >= (ends >> 32) as u32 || run.end().0 <= ends as u32 {
            return false;
        }
        let suspect = by_word(run)
            .any(|(at, len)| self.filter[(at / 64 % 64) as usize].load(Relaxed) & mask(at % 64, len) != 0);
        suspect && self.is_among(run)
    }

    #[cold]
    fn is_among(&self, run: Run) -> bool {
        let held = self.blocks.lock();
        let next = held.partition_point(|&block| block < run.start.0);
        held.get(next).is_some_and(|&block| block < run.end().0)
    }
}

impl Allocator {
    /// Gives the reserve what it misses; answers the rest of the run.
    #[cold]
    fn refill_reserve(&self, run: Run) -> Run {
        if !self.is_in_use(run) {
            self.freed_wrongly(run);
            return Run::new(run.start, 0);
        }
        let mut held = self.reserve.blocks.lock();
        let missing = self.reserve.target.load(Relaxed) - held.len() as u32;
        let take = missing.min(run.count);
        held.extend(run.start.0..run.start.0 + take);
        held.sort_unstable();
        self.reserve.publish(&held);
        Run::new(Block(run.start.0 + take), run.count - take)
    }
}

/// Minis.
impl Allocator {
    /// An eighth of a block.
    pub fn alloc_mini(&self, class: Class) -> Option<Mini> {
        let shard = self.local().shard;
        let own = shard.mini_stripe.load(Relaxed);
        for at in (0..MINI_STRIPES).map(|step| (own + step) % MINI_STRIPES) {
            if self.minis[at].len.load(Relaxed) > 0
                && let Some(mini) = self.minis[at].take_partial()
            {
                shard.mini_stripe.store(at, Relaxed);
                return Some(mini);
            }
        }
        let Some(run) = self.alloc(1, class, None) else {
            // Exact: a mini freed meanwhile.
            return self.minis.iter().find_map(|stripe| stripe.take_partial());
        };
        let block = run.start;
        self.mini_stripe(block).put(block, 1);
        shard.mini_stripe.store(stripe_of(block), Relaxed);
        Some(Mini { block, slot: 0 })
    }

    /// Free on return; a block whose minis are all free becomes a free block.
    pub fn free_mini(&self, mini: Mini) {
        let block = Run::new(mini.block, 1);
        match self.mini_stripe(mini.block).free(mini, || self.is_in_use(block)) {
            Some(true) => self.free(block),
            Some(false) => {}
            None => self.freed_wrongly(block),
        }
    }

    /// A mini that becomes free when its epoch is [released](Allocator::release).
    pub fn free_mini_deferred(&self, mini: Mini, epoch: u64) {
        let block = Run::new(mini.block, 1);
        if !self.is_in_use(block) {
            return self.freed_wrongly(block);
        }
        self.local().shard.defer(epoch, |bin| bin.minis.push(mini));
    }

    /// No more minis of this block are given out, nor may any be freed from now on.
    pub fn retire_minis(&self, block: Block) {
        if block.0 < self.total {
            let stripe = self.mini_stripe(block);
            stripe.put_locked(&mut stripe.partial.lock(), block, u8::MAX);
        }
    }

    /// Marks a mini found in use at recovery. Thread-safe, also against
    /// [`mark_used`](Allocator::mark_used).
    pub fn mark_mini_used(&self, mini: Mini) -> Result<(), Conflict> {
        assert!(mini.slot < BLOCK_MINIS);
        let stripe = self.mini_stripe(mini.block);
        let mut partial = stripe.partial.lock();
        let used = match partial.get(&mini.block.0) {
            Some(&used) => used,
            None => {
                self.mark_used(Run::new(mini.block, 1))?;
                0
            }
        };
        if used & 1 << mini.slot != 0 {
            return Err(Conflict { block: mini.block });
        }
        stripe.put_locked(&mut partial, mini.block, used | 1 << mini.slot);
        Ok(())
    }

    /// A partial mini block of a checkpoint: `used` has a bit for each used slot. The block itself must be
    /// used already (it is in no free run).
    pub fn load_partial_mini(&self, block: Block, used: u8) -> Result<(), Conflict> {
        let conflict = Conflict { block };
        if block.0 >= self.total || used == 0 || used == u8::MAX {
            return Err(conflict);
        }
        let stripe = self.mini_stripe(block);
        let mut partial = stripe.partial.lock();
        if !self.is_used(block.0) || partial.contains_key(&block.0) {
            return Err(conflict);
        }
        stripe.put_locked(&mut partial, block, used);
        Ok(())
    }

    /// Blocks with both used and free minis, ascending, with a bit for each used one; with `with_deferred`
    /// as they will be after a release. For a checkpoint: nothing else may run.
    pub fn for_each_partial_mini(&self, with_deferred: bool, each: &mut dyn FnMut(Block, u8)) {
        for (block, used) in self.minis_view(with_deferred) {
            if used != 0 {
                each(Block(block), used);
            }
        }
    }

    /// The partial mini blocks; with deferred minis taken off, where 0 means a block that becomes free.
    fn minis_view(&self, with_deferred: bool) -> BTreeMap<u32, u8> {
        let mut view = BTreeMap::new();
        for stripe in &self.minis {
            view.append(&mut stripe.partial.lock().clone());
        }
        if with_deferred {
            self.for_each_bin(&mut |bin| {
                for mini in &bin.minis {
                    *view.entry(mini.block.0).or_insert(u8::MAX) &= !(1 << mini.slot);
                }
            });
        }
        view
    }

    fn for_each_bin(&self, each: &mut dyn FnMut(&Bin)) {
        for shard in self.shards_in_use() {
            shard.bins.lock().iter().for_each(&mut *each);
        }
    }

    fn mini_stripe(&self, block: Block) -> &MiniStripe {
        &self.minis[stripe_of(block)]
    }
}

/// The minis of one group stay in one stripe: the thread that fills the group meets no other.
fn stripe_of(block: Block) -> usize {
    (block.0 / GROUP_BLOCKS) as usize % MINI_STRIPES
}

impl MiniStripe {
    /// A mini of the first partial block: low blocks fill up, high ones drain.
    fn take_partial(&self) -> Option<Mini> {
        let mut partial = self.partial.lock();
        let (&block, &used) = partial.first_key_value()?;
        let slot = used.trailing_ones() as u8;
        self.put_locked(&mut partial, Block(block), used | 1 << slot);
        Some(Mini { block: Block(block), slot })
    }

    fn put(&self, block: Block, used: u8) {
        self.put_locked(&mut self.partial.lock(), block, used);
    }

    /// Files `block` under its new state: only partial blocks stay.
    fn put_locked(&self, partial: &mut BTreeMap<u32, u8>, block: Block, used: u8) {
        if used == 0 || used == u8::MAX {
            partial.remove(&block.0);
        } else {
            partial.insert(block.0, used);
        }
        self.len.store(partial.len(), Relaxed);
    }

    /// True when it was the block's last; None where it was free, or its block, of which `is_in_use` tells.
    fn free(&self, mini: Mini, is_in_use: impl FnOnce() -> bool) -> Option<bool> {
        let bit = 1 << mini.slot;
        let mut partial = self.partial.lock();
        let used = match partial.get(&mini.block.0) {
            Some(&used) => used,
            None => is_in_use().then_some(u8::MAX)?,
        };
        if used & bit == 0 {
            return None;
        }
        self.put_locked(&mut partial, mini.block, used & !bit);
        Some(used == bit)
    }
}

/// The invariants of the file's head.
impl Allocator {
    /// Panics with the number of the invariant that does not hold. Nothing else may run.
    pub fn check_state(&self) {
        let mut used = 0;
        for group in 0..self.group_count() {
            let free = self.bits(group).free();
            used += (GROUP_BLOCKS - free) as u64;
            assert!(!self.full.get(group) || free == 0, "2: group {group} is not full");
            assert!(free == GROUP_BLOCKS || self.touched.get(group), "3: group {group} is used");
        }
        let end = self.group_count() * GROUP_BLOCKS;
        for block in self.total..end {
            assert!(self.is_used(block), "4: block {block} lies past the end");
        }
        let (allocated, freed) = self.counts();
        let counted = allocated.wrapping_sub(freed);
        let mut taken = self.check_reserve();
        let pocketed = self.check_pockets(&mut taken);
        assert_eq!(used - (end - self.total) as u64 - pocketed, counted, "1: used blocks");
        self.check_minis(&mut taken);
        self.check_deferred(&mut taken);
    }

    fn check_reserve(&self) -> BTreeSet<u32> {
        let held = self.reserve.blocks.lock();
        for &block in held.iter() {
            assert!(self.is_used(block), "5: reserve block {block} is free");
        }
        let distinct: BTreeSet<u32> = held.iter().copied().collect();
        assert_eq!(distinct.len(), held.len(), "5: reserve blocks are distinct");
        let (target, missing) = (self.reserve.target.load(SeqCst), self.reserve.missing.load(SeqCst));
        assert_eq!(held.len() as u32 + missing, target, "5: the reserve's target");
        let ends = self.reserve.ends.load(SeqCst);
        let within = |&block: &u32| ends as u32 <= block && block < (ends >> 32) as u32;
        assert!(held.iter().all(within), "5: the reserve's ends");
        distinct
    }

    /// Answers how many blocks are in pockets.
    fn check_pockets(&self, taken: &mut BTreeSet<u32>) -> u64 {
        let mut count = 0;
        for shard in self.shards_in_use() {
            for block in shard.pocket.read().iter().flat_map(|run| run.start.0..run.end().0) {
                assert!(self.is_used(block), "7: pocketed block {block} is clear in the bitmap");
                assert!(taken.insert(block), "7: pocketed block {block} is taken twice");
                count += 1;
            }
        }
        count
    }

    fn check_minis(&self, taken: &mut BTreeSet<u32>) {
        for (block, used) in self.minis_view(false) {
            assert!(self.is_used(block), "6: mini block {block} is free");
            assert!(used != 0 && used != u8::MAX, "6: mini block {block} is not partial");
            assert!(taken.insert(block), "6: mini block {block} is taken twice");
        }
    }

    fn check_deferred(&self, taken: &mut BTreeSet<u32>) {
        let partial = self.minis_view(false);
        let mut minis = BTreeSet::new();
        self.for_each_bin(&mut |bin| {
            for block in bin.runs.iter().flat_map(|run| run.start.0..run.end().0) {
                assert!(self.is_used(block), "8: deferred block {block} is free");
                assert!(taken.insert(block), "8: deferred block {block} is taken twice");
            }
            for mini in &bin.minis {
                let used = partial.get(&mini.block.0).copied().unwrap_or(u8::MAX);
                assert!(self.is_used(mini.block.0) && used >> mini.slot & 1 != 0, "8: {mini:?} is free");
                assert!(minis.insert(*mini), "8: {mini:?} is deferred twice");
            }
        });
    }

    fn is_used(&self, block: u32) -> bool {
        self.word(block).load(SeqCst) >> (block % 64) & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;

    use proptest::prelude::*;

    use super::*;

    fn started(total: u32) -> Allocator {
        let allocator = Allocator::new(total);
        allocator.start();
        allocator
    }

    fn free_runs(allocator: &Allocator, with_deferred: bool) -> Vec<Run> {
        let mut runs = Vec::new();
        allocator.for_each_free_run(with_deferred, &mut |run| runs.push(run));
        runs
    }

    fn drain(allocator: &Allocator, class: Class) -> Vec<Run> {
        std::iter::from_fn(|| allocator.alloc(1, class, None)).collect()
    }

    #[test]
    fn single_blocks_come_consecutively_and_the_last_freed_first() {
        let a = started(1 << 16);
        let blocks: Vec<u32> = (0..1000).map(|_| a.alloc(1, Class::Data, None).unwrap().start.0).collect();
        assert!(blocks.windows(2).all(|pair| pair[1] == pair[0] + 1));
        for &block in &[7, 90, 40] {
            a.free(Run::new(Block(blocks[block]), 1));
        }
        let again: Vec<u32> = (0..3).map(|_| a.alloc(1, Class::Data, None).unwrap().start.0).collect();
        assert_eq!(again, [blocks[40], blocks[90], blocks[7]]);
        a.check_state();
    }

    #[test]
    fn logs_do_not_cut_data_into_pieces() {
        let a = started(1 << 16);
        let mut data = Vec::new();
        for _ in 0..100 {
            data.push(a.alloc(1, Class::Data, None).unwrap().start.0);
            a.alloc(1, Class::Metadata, None).unwrap();
        }
        assert!(data.windows(2).all(|pair| pair[1] == pair[0] + 1));
    }

    #[test]
    fn near_goes_on_where_the_file_ends() {
        let a = started(1 << 16);
        let first = a.alloc(8, Class::Data, None).unwrap();
        let next = a.alloc(100, Class::Data, Some(first.end())).unwrap();
        assert_eq!(next, Run::new(first.end(), 100));
        // Taken: something else, and past the end of the pool: no panic.
        assert!(a.alloc(1, Class::Data, Some(first.start)).unwrap().start.0 >= next.end().0);
        assert!(a.alloc(1, Class::Data, Some(Block(u32::MAX))).is_some());
        a.check_state();
    }

    #[test]
    fn large_runs_are_aligned_and_long() {
        let a = started(1 << 18);
        a.alloc(1, Class::Data, None).unwrap();
        let run = a.alloc(100_000, Class::Data, None).unwrap();
        assert_eq!((run.start.0 % GROUP_BLOCKS, run.count), (0, 100_000));
        assert!(a.stats().largest_run_hint > GROUP_BLOCKS);
        a.free(run);
        assert_eq!(a.alloc(GROUP_BLOCKS, Class::Data, None).unwrap().count, GROUP_BLOCKS);
        a.check_state();
    }

    #[test]
    fn the_last_free_block_is_found_wherever_it_is() {
        let a = started(5000);
        let held: Vec<Run> = std::thread::scope(|s| s.spawn(|| drain(&a, Class::Data)).join().unwrap());
        assert_eq!((a.available(), a.stats().free), (0, 50));
        assert_eq!(a.alloc(1, Class::Metadata, None), None);
        // Freed by another thread: in that thread's memory only.
        std::thread::scope(|s| s.spawn(|| a.free(held[1234])).join().unwrap());
        assert_eq!(a.alloc(1000, Class::Data, Some(Block(3))), Some(held[1234]));
        a.check_state();
    }

    #[test]
    fn the_reserve_is_for_release_alone_and_fills_up_first() {
        let a = started(10_000);
        let data = drain(&a, Class::Data);
        assert_eq!(data.len(), 9900);
        let first = a.alloc(64, Class::Release, None).unwrap();
        assert_eq!((first.count, a.alloc(1, Class::Release, None)), (50, None));
        let rest = drain(&a, Class::Last);
        assert_eq!((rest.len(), a.stats().free), (50, 0));
        a.free(Run::new(data[5].start, 1));
        assert_eq!((a.available(), a.stats().free), (0, 1));
        assert_eq!(a.alloc(1, Class::Data, None), None);
        a.free(first);
        rest.into_iter().for_each(|run| a.free(run));
        assert_eq!((a.available(), a.stats().free), (1, 101));
        a.check_state();
    }

    #[test]
    fn alloc_all_takes_all_or_nothing() {
        let a = started(3000);
        let mut out = Runs::new();
        let available = a.available() as u32;
        assert_eq!(a.alloc_all(available + 1, Class::Data, &mut out), Err(NoSpace));
        assert!(out.is_empty() && a.available() as u32 == available);
        a.alloc_all(available, Class::Data, &mut out).unwrap();
        assert_eq!(out.iter().map(|run| run.count).sum::<u32>(), available);
        assert_eq!(a.alloc(1, Class::Data, None), None);
        a.check_state();
    }

    #[test]
    fn a_block_marked_twice_is_a_conflict_and_marks_nothing() {
        let a = Allocator::new(4096);
        a.mark_used(Run::new(Block(700), 1)).unwrap();
        assert_eq!(a.mark_used(Run::new(Block(100), 1000)), Err(Conflict { block: Block(700) }));
        assert_eq!(a.mark_used(Run::new(Block(4000), 97)), Err(Conflict { block: Block(4096) }));
        a.mark_used(Run::new(Block(100), 600)).unwrap();
        a.mark_used(Run::new(Block(701), 400)).unwrap();
        a.start();
        assert_eq!(free_runs(&a, false), [Run::new(Block(0), 100), Run::new(Block(1101), 4096 - 1101)]);
        a.check_state();
    }

    #[test]
    fn deferred_blocks_come_back_with_their_epoch() {
        let a = started(2000);
        let runs = drain(&a, Class::Data);
        for (i, run) in runs[..100].iter().enumerate() {
            a.free_deferred(*run, 5 + i as u64 % 2);
        }
        assert_eq!(a.deferred(), Deferred { blocks: 100, minis: 0 });
        a.check_state();
        assert_eq!(a.alloc(1, Class::Data, None), None);
        let free_now = free_runs(&a, false).iter().map(|run| run.count).sum::<u32>();
        let free_then = free_runs(&a, true).iter().map(|run| run.count).sum::<u32>();
        assert_eq!((free_now, free_then), (20, 120));
        a.release(5);
        assert_eq!((a.available(), a.deferred().blocks), (50, 50));
        a.release(6);
        assert_eq!((a.available(), a.deferred().blocks), (100, 0));
        a.check_state();
    }

    #[test]
    fn minis_share_blocks_and_give_them_back() {
        let a = started(1000);
        let before = a.available();
        let mut minis: Vec<Mini> = (0..20).map(|_| a.alloc_mini(Class::Metadata).unwrap()).collect();
        assert_eq!(before - a.available(), 3);
        a.check_state();
        a.free_mini_deferred(minis.swap_remove(3), 9);
        a.check_state();
        a.release(9);
        // The slot set free is used again before a new block is.
        minis.push(a.alloc_mini(Class::Data).unwrap());
        for _ in 0..4 {
            minis.push(a.alloc_mini(Class::Data).unwrap());
        }
        assert_eq!(before - a.available(), 3);
        let distinct: BTreeSet<Mini> = minis.iter().copied().collect();
        assert_eq!(distinct.len(), 24);
        minis.into_iter().for_each(|mini| a.free_mini(mini));
        assert_eq!(a.available(), before);
        a.check_state();
    }

    #[test]
    fn minis_survive_a_checkpoint_and_recovery() {
        let a = started(1000);
        let minis: Vec<Mini> = (0..13).map(|_| a.alloc_mini(Class::Data).unwrap()).collect();
        for &mini in &minis[8..12] {
            a.free_mini_deferred(mini, 1);
        }
        let mut partial = Vec::new();
        a.for_each_partial_mini(true, &mut |block, used| partial.push((block, used)));
        assert_eq!(partial, [(minis[12].block, 1 << minis[12].slot)]);
        let loaded = Allocator::from_free_runs(1000, free_runs(&a, true).into_iter()).unwrap();
        for &(block, used) in &partial {
            loaded.load_partial_mini(block, used).unwrap();
            assert_eq!(loaded.load_partial_mini(block, used), Err(Conflict { block }));
        }
        loaded.start();
        loaded.check_state();

        let scanned = Allocator::new(1000);
        for &mini in minis[..8].iter().chain(&minis[12..]) {
            scanned.mark_mini_used(mini).unwrap();
            assert_eq!(scanned.mark_mini_used(mini), Err(Conflict { block: mini.block }));
        }
        assert!(scanned.mark_used(Run::new(minis[12].block, 1)).is_err());
        scanned.start();
        scanned.check_state();
        assert_eq!(free_runs(&scanned, false), free_runs(&loaded, false));
        for a in [&loaded, &scanned] {
            minis[..8].iter().chain(&minis[12..]).for_each(|&mini| a.free_mini(mini));
            assert_eq!(a.available(), 990);
        }
    }

    #[test]
    fn a_block_that_becomes_free_by_deferred_minis_is_in_the_checkpoint() {
        let a = started(1000);
        let minis: Vec<Mini> = (0..8).map(|_| a.alloc_mini(Class::Data).unwrap()).collect();
        minis.into_iter().for_each(|mini| a.free_mini_deferred(mini, 4));
        assert_eq!(free_runs(&a, true), [Run::new(Block(0), 1000)]);
        a.for_each_partial_mini(true, &mut |_, _| panic!("the block is free"));
    }

    #[test]
    fn checkpoints_of_foreign_origin_are_refused() {
        let load = |runs: &[(u32, u32)]| {
            let runs = runs.iter().map(|&(start, count)| Run::new(Block(start), count));
            Allocator::from_free_runs(1000, runs.collect::<Vec<_>>().into_iter()).is_ok()
        };
        assert!(load(&[(0, 10), (10, 5), (900, 100)]));
        assert!(!load(&[(0, 10), (9, 5)]));
        assert!(!load(&[(900, 101)]));
        assert!(!load(&[(5, u32::MAX)]));
    }

    /// By a panic where debug assertions are compiled in, and else for good.
    fn is_noticed(a: &Allocator, wrong: impl FnOnce()) -> bool {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(wrong)).is_err();
        panicked || a.is_wrong.swap(false, Relaxed)
    }

    #[test]
    fn a_block_freed_twice_is_noticed() {
        let a = started(1000);
        let run = a.alloc(4, Class::Data, None).unwrap();
        let mini = a.alloc_mini(Class::Data).unwrap();
        let noticed = |wrong: &dyn Fn()| is_noticed(&a, wrong);
        a.free(Run::new(run.start, 1));
        // It is looked for there by a debug assertion.
        assert!(
            !cfg!(debug_assertions) || noticed(&|| a.free(Run::new(run.start, 1))),
            "it is in the pocket"
        );
        a.empty_pockets();
        assert!(noticed(&|| a.free(Run::new(run.start, 1))), "it is clear in the bitmap");
        assert!(noticed(&|| a.free(run)));
        assert!(noticed(&|| a.free_deferred(run, 1)));
        assert!(noticed(&|| a.free(Run::new(Block(999), 1))), "a reserve block");
        assert!(noticed(&|| a.free(Run::new(Block(998), 5))), "past the end");
        assert!(noticed(&|| a.free_mini(Mini { slot: 3, ..mini })));
        assert!(noticed(&|| a.free_mini(Mini { block: Block(500), slot: 0 })));
        assert!(noticed(&|| a.free_mini_deferred(Mini { block: Block(500), slot: 0 }, 1)));
        let long = a.alloc(400, Class::Data, None).unwrap();
        assert!(long.count > HOT_RUN_MAX);
        a.free(Run::new(Block(long.end().0 - 1), 1));
        a.empty_pockets();
        assert!(noticed(&|| a.free(long)), "its last is clear");
    }

    #[test]
    fn an_empty_terabyte_costs_little() {
        let begin = std::time::Instant::now();
        let a = started(1 << 28);
        let run = a.alloc(1 << 20, Class::Data, None).unwrap();
        assert_eq!(run.count, 1 << 20);
        assert_eq!(free_runs(&a, false).iter().map(|run| run.count).sum::<u32>(), (1 << 28) - (1 << 20));
        assert!(begin.elapsed().as_millis() < 1000, "{:?}", begin.elapsed());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Alloc { want: u32, class: Class, near: Option<u32> },
        AllocAll { want: u32 },
        AllocWhole { want: u32 },
        Free { which: usize, part: u32 },
        Defer { which: usize, epoch: u64 },
        Release { epoch: u64 },
        AllocMini,
        FreeMini { which: usize, defer: Option<u64> },
    }

    fn op(total: u32) -> impl Strategy<Value = Op> {
        let class =
            prop_oneof![Just(Class::Data), Just(Class::Metadata), Just(Class::Release), Just(Class::Last)];
        let want = prop_oneof![Just(1u32), 1..20u32, 1..700u32];
        prop_oneof![
            6 => (want.clone(), class, proptest::option::of(0..total + 5))
                .prop_map(|(want, class, near)| Op::Alloc { want, class, near }),
            1 => want.clone().prop_map(|want| Op::AllocAll { want }),
            1 => prop_oneof![want, 500..1600u32].prop_map(|want| Op::AllocWhole { want }),
            4 => (any::<usize>(), any::<u32>()).prop_map(|(which, part)| Op::Free { which, part }),
            2 => (any::<usize>(), 0..4u64).prop_map(|(which, epoch)| Op::Defer { which, epoch }),
            1 => (0..4u64).prop_map(|epoch| Op::Release { epoch }),
            2 => Just(Op::AllocMini),
            2 => (any::<usize>(), proptest::option::of(0..4u64))
                .prop_map(|(which, defer)| Op::FreeMini { which, defer }),
        ]
    }

    /// What a caller knows: who holds what.
    struct Model {
        total: u32,
        used: BTreeSet<u32>,
        held: Vec<Run>,
        minis: Vec<Mini>,
        mini_blocks: BTreeMap<u32, u8>,
        deferred: Vec<(u64, Run)>,
        deferred_minis: Vec<(u64, Mini)>,
    }

    impl Model {
        fn take(&mut self, run: Run) {
            assert!(run.count > 0 && run.end().0 <= self.total);
            for block in run.start.0..run.end().0 {
                assert!(self.used.insert(block), "block {block} handed out twice");
            }
        }

        fn give(&mut self, run: Run) {
            for block in run.start.0..run.end().0 {
                assert!(self.used.remove(&block));
            }
        }

        fn take_mini(&mut self, mini: Mini) {
            let slots = self.mini_blocks.entry(mini.block.0).or_insert(0);
            if *slots == 0 {
                assert!(self.used.insert(mini.block.0), "mini block handed out twice");
            }
            assert!(*slots >> mini.slot & 1 == 0, "{mini:?} handed out twice");
            *slots |= 1 << mini.slot;
            self.minis.push(mini);
        }

        fn give_mini(&mut self, mini: Mini) {
            let slots = self.mini_blocks.get_mut(&mini.block.0).unwrap();
            *slots &= !(1 << mini.slot);
            if *slots == 0 {
                self.mini_blocks.remove(&mini.block.0);
                assert!(self.used.remove(&mini.block.0));
            }
        }

        fn free(&self) -> u32 {
            self.total - self.used.len() as u32
        }

        fn apply(&mut self, a: &Allocator, op: &Op, reserve: u32) {
            match *op {
                Op::Alloc { want, class, near } => {
                    let floor = class.leaves_of_reserve(reserve).unwrap_or(reserve);
                    let near = near.map(Block);
                    match a.alloc(want, class, near) {
                        Some(run) => {
                            assert!(run.count <= want && self.free() > floor);
                            self.take(run);
                            self.held.push(run);
                        }
                        None => assert!(self.free() <= floor, "{} blocks are free", self.free()),
                    }
                }
                Op::AllocAll { want } => {
                    let mut runs = Runs::new();
                    let enough = self.free() >= want + reserve.min(self.free());
                    assert_eq!(a.alloc_all(want, Class::Data, &mut runs).is_ok(), enough);
                    for run in runs {
                        self.take(run);
                        self.held.push(run);
                    }
                }
                Op::AllocWhole { want } => {
                    let stride = if want < GROUP_BLOCKS { 1 } else { GROUP_BLOCKS };
                    // A short one does not cross groups, and which blocks the reserve has is not known here.
                    let fits = |start: &u32| (*start..start + want).all(|block| !self.used.contains(&block));
                    let places = (0..self.total.saturating_sub(want - 1)).step_by(stride as usize);
                    let found = places.filter(fits).count();
                    match a.alloc_whole(want) {
                        Some(run) => {
                            assert!(found > 0 && run.count == want && run.start.0.is_multiple_of(stride));
                            self.take(run);
                            self.held.push(run);
                        }
                        None => assert!(
                            found <= (2 * reserve * want) as usize,
                            "{want} blocks fit in {found} places"
                        ),
                    }
                }
                Op::Free { which, part } if !self.held.is_empty() => {
                    let index = which % self.held.len();
                    let run = &mut self.held[index];
                    let freed = Run::new(run.start, 1 + part % run.count);
                    *run = Run::new(freed.end(), run.count - freed.count);
                    self.held.retain(|run| run.count > 0);
                    self.give(freed);
                    a.free(freed);
                }
                Op::Defer { which, epoch } if !self.held.is_empty() => {
                    let run = self.held.swap_remove(which % self.held.len());
                    self.deferred.push((epoch, run));
                    a.free_deferred(run, epoch);
                }
                Op::Release { epoch } => {
                    a.release(epoch);
                    let due: Vec<_> = self.deferred.extract_if(.., |d| d.0 <= epoch).collect();
                    due.into_iter().for_each(|(_, run)| self.give(run));
                    let due: Vec<_> = self.deferred_minis.extract_if(.., |d| d.0 <= epoch).collect();
                    due.into_iter().for_each(|(_, mini)| self.give_mini(mini));
                }
                Op::AllocMini => match a.alloc_mini(Class::Metadata) {
                    Some(mini) => self.take_mini(mini),
                    None => {
                        assert!(self.free() <= reserve);
                        assert!(self.mini_blocks.values().all(|&slots| slots == u8::MAX));
                    }
                },
                Op::FreeMini { which, defer } if !self.minis.is_empty() => {
                    let mini = self.minis.swap_remove(which % self.minis.len());
                    if let Some(epoch) = defer {
                        self.deferred_minis.push((epoch, mini));
                        a.free_mini_deferred(mini, epoch);
                    } else {
                        self.give_mini(mini);
                        a.free_mini(mini);
                    }
                }
                _ => {}
            }
        }

        fn compare(&self, a: &Allocator) {
            a.check_state();
            assert_eq!(a.stats().free as u32, self.free());
            let mut free = BTreeSet::new();
            let mut end = None;
            a.for_each_free_run(false, &mut |run| {
                assert!(end.is_none_or(|end| end < run.start), "runs ascend and do not touch");
                end = Some(run.end());
                free.extend(run.start.0..run.end().0);
            });
            let expected: BTreeSet<u32> = (0..self.total).filter(|b| !self.used.contains(b)).collect();
            assert_eq!(free, expected);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn agrees_with_a_naive_model(
            total in prop_oneof![20..600u32, 600..4000u32],
            seed in any::<u64>(),
            ops in proptest::collection::vec(op(4000), 1..250),
        ) {
            let a = Allocator::new(total);
            let mut model = Model {
                total,
                used: BTreeSet::new(),
                held: Vec::new(),
                minis: Vec::new(),
                mini_blocks: BTreeMap::new(),
                deferred: Vec::new(),
                deferred_minis: Vec::new(),
            };
            // A few blocks found in use, as recovery would mark them.
            for i in 0..seed % 40 {
                let block = (seed.rotate_left(i as u32 * 3) % total as u64) as u32;
                let fresh = !model.used.contains(&block);
                prop_assert_eq!(a.mark_used(Run::new(Block(block), 1)).is_ok(), fresh);
                model.used.insert(block);
            }
            a.start();
            let reserve = (total / 100).clamp(8, 256).min(total / 2);
            for op in &ops {
                model.apply(&a, op, reserve);
            }
            model.compare(&a);
        }
    }

    /// Each block's owner count: 1 while a thread holds it.
    struct Owners(Vec<AtomicU8>);

    impl Owners {
        fn take(&self, run: Run) {
            for block in run.start.0..run.end().0 {
                assert_eq!(self.0[block as usize].swap(1, SeqCst), 0, "block {block} handed out twice");
            }
        }

        fn give(&self, run: Run) {
            for block in run.start.0..run.end().0 {
                assert_eq!(self.0[block as usize].swap(0, SeqCst), 1);
            }
        }
    }

    fn churn(a: &Allocator, owners: &Owners, mut random: u64, steps: u32) {
        let mut held: Vec<Run> = Vec::new();
        let mut minis: Vec<Mini> = Vec::new();
        for step in 0..steps {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (kind, value) = (random >> 60, (random >> 33) as u32);
            match kind {
                0..6 => {
                    let want = if value % 4 == 0 { 1 + value / 4 % 600 } else { 1 };
                    let near = held.last().filter(|_| value & 8 != 0).map(|run| run.end());
                    let whole = value % 16 == 4;
                    let run = if whole { a.alloc_whole(want) } else { a.alloc(want, Class::Data, near) };
                    if let Some(run) = run {
                        assert!(!whole || run.count == want);
                        owners.take(run);
                        held.push(run);
                    }
                }
                6..12 if !held.is_empty() => {
                    let run = held.swap_remove(value as usize % held.len());
                    owners.give(run);
                    a.free(run);
                }
                12 if !held.is_empty() => {
                    let run = held.swap_remove(value as usize % held.len());
                    owners.give(run);
                    a.free_deferred(run, step as u64);
                }
                13 => drop(a.release(step as u64 / 2)),
                14 => minis.extend(a.alloc_mini(Class::Metadata)),
                15 if !minis.is_empty() => a.free_mini(minis.swap_remove(value as usize % minis.len())),
                _ => {}
            }
        }
        held.into_iter().for_each(|run| {
            owners.give(run);
            a.free(run);
        });
        minis.into_iter().for_each(|mini| a.free_mini(mini));
    }

    #[test]
    fn threads_never_share_a_block_and_lose_none() {
        for (total, threads) in [(3000, 4), (40_000, 3)] {
            let a = started(total);
            let owners = Owners((0..total).map(|_| AtomicU8::new(0)).collect());
            std::thread::scope(|s| {
                for thread in 0..threads {
                    let (a, owners) = (&a, &owners);
                    s.spawn(move || churn(a, owners, 77 + thread, 40_000));
                }
            });
            a.release(u64::MAX);
            a.check_state();
            assert_eq!(free_runs(&a, false), [Run::new(Block(0), total)]);
            assert_eq!(a.stats().free, total as u64);
        }
    }

    #[test]
    fn who_needs_one_of_the_blocks_that_are_free_gets_one() {
        const THREADS: u32 = 3;
        let a = started(3000);
        while a.available() > THREADS as u64 {
            a.alloc(a.available() as u32 - THREADS, Class::Data, None).unwrap();
        }
        let until = std::time::Instant::now() + std::time::Duration::from_millis(700);
        std::thread::scope(|s| {
            for thread in 0..THREADS {
                let a = &a;
                s.spawn(move || {
                    while std::time::Instant::now() < until {
                        let near = (thread == 0).then_some(Block(7));
                        let run = a.alloc(1, Class::Data, near).expect("no more are held than there are");
                        assert_eq!(run.count, 1);
                        a.free(run);
                    }
                });
            }
        });
        a.check_state();
        assert_eq!(a.available(), THREADS as u64);
    }

    #[test]
    fn threads_marking_the_same_blocks_agree_on_one_owner() {
        let a = Allocator::new(1 << 14);
        let marked: Vec<u64> = std::thread::scope(|s| {
            let mark = || (0..1 << 14).filter(|&b| a.mark_used(Run::new(Block(b), 1)).is_ok()).count() as u64;
            let threads: Vec<_> = (0..4).map(|_| s.spawn(mark)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(marked.iter().sum::<u64>(), 1 << 14);
        a.start();
        a.check_state();
        assert_eq!(a.alloc(1, Class::Last, None), None);
    }

    #[test]
    fn more_threads_than_shards_share_the_last() {
        let a = started(1 << 16);
        let barrier = std::sync::Barrier::new(SHARDS_MAX + 20);
        std::thread::scope(|s| {
            for _ in 0..SHARDS_MAX + 20 {
                s.spawn(|| {
                    let run = a.alloc(3, Class::Data, None).unwrap();
                    barrier.wait();
                    a.free(run);
                    barrier.wait();
                });
            }
        });
        a.check_state();
        assert_eq!(a.stats().free, 1 << 16);
    }
}
