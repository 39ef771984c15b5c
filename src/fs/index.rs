//! The extent index of one file in DRAM: file page (4 KiB) to block. Built from the inode's log at first
//! use; every data write looks a page up and replaces it, every read asks for a run.
//!
//! Four shapes, each the cheapest for its files. Nothing or one extent is held inline; a few extents are a
//! sorted vector; from there on a radix tree. Its *leaves* stand for 512 pages (2 MiB) and are empty, one
//! run, up to four pieces, or a table of words as long as needed. Its *branches* hold 64 leaves (128 MiB) and are a sorted
//! vector: in a file without large holes branch n stands at place n, so that the guess is right and a
//! look-up takes three loads; a file with large holes pays for the branches it uses, found by bisection.
//!
//! A mapped page is a word: the block number, and the top bit for *unwritten* (allocated, reads as zeros).
//! 0 is a hole: block 0 holds the superblock and never belongs to a file.
//!
//! Invariants, executed by [`PageIndex::check_state`]:
//!
//! 1. Extents ascend, do not overlap and have no neighbour they could be one with; there are 2 to
//!    [`FEW_EXTENTS_MAX`] of them in a vector.
//! 2. Branches ascend, hold 1 to 64 leaves, and the last of these is not empty.
//! 3. A run lies within its leaf; a table counts its mapped pages right, and has some; pieces ascend, are at
//!    least two, and do not go on like the one before.
//! 4. The mapped pages are counted right; without any, the index is empty.
//! 5. No page is unwritten unless `reserved` says that some may be.

use super::alloc::{Block, Run};
use super::format::field;

/// Pages of a leaf: 2 MiB of the file.
const LEAF_PAGES: u32 = 512;
const BRANCH_LEAVES: u32 = 64;
const BRANCH_PAGES: u32 = LEAF_PAGES * BRANCH_LEAVES;
/// Pages of the largest file.
const PAGES_MAX: u64 = 1 << 32;
/// Extents in a vector before it becomes a tree.
const FEW_EXTENTS_MAX: usize = 16;
/// Pieces of a leaf that needs no table: as many as fit into the size of the others.
const LEAF_PIECES: usize = 4;
/// A change of this many pages may have left a table in few pieces.
const COLLAPSE_PAGES: u16 = 64;
/// Shortest table, in pages.
const TABLE_PAGES_MIN: usize = 16;

/// Pages of one part, at most, where each has a word.
pub const PART_PAGES: usize = 128;

const UNWRITTEN: u32 = field::pages::UNWRITTEN;
const HOLE: u32 = 0;

/// What a page is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapping {
    Hole,
    Written(Block),
    /// Allocated, never written: reads as zeros.
    Unwritten(Block),
}

/// Pages with contiguous blocks of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRun {
    pub page: u32,
    pub count: u32,
    pub block: Block,
    pub unwritten: bool,
}

/// What some consecutive pages are.
pub enum Part<'a> {
    Run(MappedRun),
    /// A word for each page, as media has them in [`field::pages`].
    Words {
        page: u32,
        words: &'a [u32],
    },
}

/// See the file's head.
#[derive(Default)]
pub struct PageIndex {
    root: Root,
    mapped: u64,
    /// There may be unwritten pages.
    reserved: bool,
}

#[derive(Default)]
enum Root {
    #[default]
    Empty,
    One(Extent),
    Few(Vec<Extent>),
    Tree(Vec<Branch>),
}

/// `word` is the first page's; the following ones count up.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Extent {
    page: u32,
    count: u32,
    word: u32,
}

/// 128 MiB of the file: pages from `number * BRANCH_PAGES`. Leaves past the end of the vector are empty.
struct Branch {
    number: u32,
    leaves: Vec<Leaf>,
}

#[derive(Default)]
enum Leaf {
    #[default]
    Empty,
    /// Pages `first..first + count`; `word` is the first one's.
    Run { first: u16, count: u16, word: u32 },
    /// All pages, in a few pieces (holes are pieces, too): the first from page 0, the others from `starts`.
    /// `words` are those of their first pages. Unused ones start behind the last page.
    Pieces { starts: [u16; LEAF_PIECES - 1], words: [u32; LEAF_PIECES] },
    /// From page 0; pages past the end are holes.
    Table { words: Box<[u32]>, mapped: u16 },
}

const _: () = assert!(size_of::<Leaf>() == 24);

#[inline]
fn mapping(word: u32) -> Mapping {
    match word {
        HOLE => Mapping::Hole,
        word if word & UNWRITTEN != 0 => Mapping::Unwritten(Block(word & !UNWRITTEN)),
        word => Mapping::Written(Block(word)),
    }
}

/// The word `n` pages after one with `word` in the same piece.
#[inline]
fn forward(word: u32, n: u32) -> u32 {
    if word == HOLE { HOLE } else { word + n }
}

impl Extent {
    fn end(self) -> u64 {
        self.page as u64 + self.count as u64
    }

    /// The part between two pages, if there is one.
    fn part(self, from: u64, to: u64) -> Option<Extent> {
        let (from, to) = (from.max(self.page as u64), to.min(self.end()));
        (from < to).then(|| Extent {
            page: from as u32,
            count: (to - from) as u32,
            word: forward(self.word, from as u32 - self.page),
        })
    }

    /// Whether `next` goes on where this one ends, in the file and on the media.
    fn joins(self, next: Extent) -> bool {
        self.end() == next.page as u64 && self.word + self.count == next.word
    }
}

/// Collects what a change replaces and reports it in long runs. A page that keeps its block (unwritten
/// became written) is not replaced.
struct Replaced<'a> {
    report: &'a mut dyn FnMut(Run, bool),
    pending: Option<(u32, u32)>,
    /// Pages that were mapped, whether they keep their block or not.
    mapped: u64,
}

impl Replaced<'_> {
    /// `count` pages had words from `old` on and get words from `new` on.
    #[inline]
    fn add(&mut self, old: u32, new: u32, count: u32) {
        if old == HOLE {
            return;
        }
        self.mapped += count as u64;
        if (old ^ new) & !UNWRITTEN == 0 {
            return;
        }
        match &mut self.pending {
            Some((word, pages)) if *word + *pages == old => *pages += count,
            _ => {
                self.finish();
                self.pending = Some((old, count));
            }
        }
    }

    #[inline]
    fn finish(&mut self) {
        if let Some((word, pages)) = self.pending.take() {
            (self.report)(Run::new(Block(word & !UNWRITTEN), pages), word & UNWRITTEN != 0);
        }
    }
}

impl PageIndex {
    pub fn new() -> PageIndex {
        PageIndex::default()
    }

    #[inline]
    pub fn get(&self, page: u32) -> Mapping {
        mapping(match &self.root {
            Root::Tree(branches) => match find_branch(branches, page / BRANCH_PAGES) {
                Ok(at) => branches[at].word(page % BRANCH_PAGES),
                Err(_) => HOLE,
            },
            _ => self.piece(page, 1).0,
        })
    }

    /// Whether pages may be allocated and unwritten. (Where not, who replaces pages need not look at them.)
    #[inline]
    pub fn may_have_unwritten(&self) -> bool {
        self.reserved
    }

    /// Fetches what [`set_run`](PageIndex::set_run) will need for this page, without waiting.
    #[inline]
    pub fn expect_set(&self, page: u32) {
        if let [word, ..] = self.words_from(page) {
            crate::media::prefetch(word);
        }
    }

    /// What `page` is, and for how many pages, at most `max`, the same goes on: contiguous blocks of one
    /// kind, or a hole.
    #[inline]
    pub fn run_at(&self, page: u32, max: u32) -> (Mapping, u32) {
        // The commonest: one page is read.
        if max == 1 { (self.get(page), 1) } else { self.run_of(page, max) }
    }

    fn run_of(&self, page: u32, max: u32) -> (Mapping, u32) {
        let max = (max as u64).min(PAGES_MAX - page as u64) as u32;
        let (word, mut count) = self.piece(page, max);
        while count < max {
            let (next, more) = self.piece(page + count, max - count);
            if next != forward(word, count) {
                break;
            }
            count += more;
        }
        (mapping(word), count)
    }

    /// Maps `count` pages to the blocks from `block` on. What they were mapped to goes to `replaced`, run by
    /// run with whether it was unwritten, except pages that had that very block already.
    pub fn set_run(
        &mut self,
        page: u32,
        count: u32,
        block: Block,
        unwritten: bool,
        replaced: &mut dyn FnMut(Run, bool),
    ) {
        assert!(block.0 != 0 && block.0 as u64 + count as u64 <= UNWRITTEN as u64, "{block:?} is a file's");
        let word = block.0 | if unwritten { UNWRITTEN } else { 0 };
        self.reserved |= unwritten;
        match self.slot(page) {
            Some(slot) if count == 1 => {
                let old = std::mem::replace(slot, word);
                if (old ^ word) & !UNWRITTEN != 0 {
                    replaced(Run::new(Block(old & !UNWRITTEN), 1), old & UNWRITTEN != 0);
                }
            }
            _ => self.assign(page, count, word, replaced),
        }
    }

    /// [`set_run`](PageIndex::set_run) for the commonest, a random page of a large file that is overwritten: the block that it
    /// had. None, and nothing done, where the page is not written, or its extent is not kept page by page.
    #[inline]
    pub fn replace(&mut self, page: u32, block: Block) -> Option<Block> {
        debug_assert!(block.0 != 0 && block.0 < UNWRITTEN);
        let slot = self.slot(page).filter(|slot| **slot & UNWRITTEN == 0 && **slot != block.0)?;
        Some(Block(std::mem::replace(slot, block.0)))
    }

    /// Makes pages what a word says of each, as [`Part::Words`] has it.
    pub fn set_words(&mut self, page: u32, words: impl Iterator<Item = u32>) {
        let mut run: Option<(u32, u32, u32)> = None;
        for (n, word) in words.enumerate() {
            match &mut run {
                Some((_, count, first)) if word == forward(*first, *count) => *count += 1,
                _ => self.set_same(run.replace((page + n as u32, 1, word))),
            }
        }
        self.set_same(run);
    }

    /// Page, count, and the first page's word.
    fn set_same(&mut self, run: Option<(u32, u32, u32)>) {
        if let Some((page, count, word)) = run {
            self.assign(page, count, word, &mut |_, _| {});
            self.reserved |= word & UNWRITTEN != 0;
        }
    }

    /// Makes `count` pages a hole. What they were mapped to goes to `replaced`.
    pub fn clear(&mut self, page: u32, count: u32, replaced: &mut dyn FnMut(Run, bool)) {
        self.assign(page, count, HOLE, replaced);
    }

    /// The first written page from `page` on.
    pub fn next_data(&self, page: u32) -> Option<u32> {
        self.next_where(page, |mapping| matches!(mapping, Mapping::Written(_)))
    }

    /// The first page from `page` on that reads as zeros without being written: a hole or unwritten.
    /// `None` when all up to the largest file's end are written.
    pub fn next_hole(&self, page: u32) -> Option<u32> {
        self.next_where(page, |mapping| !matches!(mapping, Mapping::Written(_)))
    }

    /// Mapped blocks, written or not.
    #[inline]
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// All mapped pages from `page` on, in the longest runs.
    pub fn iter_runs(&self, page: u32) -> impl Iterator<Item = MappedRun> {
        let mut at = page as u64;
        std::iter::from_fn(move || {
            while at < PAGES_MAX {
                let page = at as u32;
                let (mapping, count) = self.run_at(page, u32::MAX);
                at += count as u64;
                let (block, unwritten) = match mapping {
                    Mapping::Hole => continue,
                    Mapping::Written(block) => (block, false),
                    Mapping::Unwritten(block) => (block, true),
                };
                return Some(MappedRun { page, count, block, unwritten });
            }
            None
        })
    }

    /// Hands out what the pages from `page` on are, holes left out or not, for as long as `each` answers true.
    /// Returns where to go on, `None` behind the last mapped page. Words end before the last page there could be,
    /// which no file has: where a part ends can be said in 32 bits.
    pub fn parts_from(&self, page: u32, each: &mut dyn FnMut(Part) -> bool) -> Option<u32> {
        let mut at = page as u64;
        while at < PAGES_MAX {
            let page = at as u32;
            let words = self.words_from(page);
            let words = &words[..words.len().min(PART_PAGES).min((u32::MAX - page) as usize)];
            if !words.is_empty() {
                at += words.len() as u64;
                if words.iter().any(|&word| word != HOLE) && !each(Part::Words { page, words }) {
                    return u32::try_from(at).ok();
                }
                continue;
            }
            let (word, count) = self.piece(page, u32::MAX);
            at += count as u64;
            let (block, unwritten) = (Block(word & !UNWRITTEN), word & UNWRITTEN != 0);
            if word != HOLE && !each(Part::Run(MappedRun { page, count, block, unwritten })) {
                return u32::try_from(at).ok();
            }
        }
        None
    }

    /// The words of a table from `page` on; empty where the page is in none.
    #[inline]
    fn words_from(&self, page: u32) -> &[u32] {
        let Root::Tree(branches) = &self.root else { return &[] };
        let Ok(at) = find_branch(branches, page / BRANCH_PAGES) else { return &[] };
        match branches[at].leaves.get((page % BRANCH_PAGES / LEAF_PAGES) as usize) {
            Some(Leaf::Table { words, .. }) => words.get((page % LEAF_PAGES) as usize..).unwrap_or(&[]),
            _ => &[],
        }
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        match &self.root {
            Root::Empty | Root::One(_) => 0,
            Root::Few(extents) => extents.capacity() * size_of::<Extent>(),
            Root::Tree(branches) => {
                let own = branches.capacity() * size_of::<Branch>();
                own + branches.iter().map(Branch::heap_bytes).sum::<usize>()
            }
        }
    }

    fn next_where(&self, page: u32, wanted: impl Fn(Mapping) -> bool) -> Option<u32> {
        let mut at = page as u64;
        while at < PAGES_MAX {
            let (word, count) = self.piece(at as u32, u32::MAX);
            if wanted(mapping(word)) {
                return Some(at as u32);
            }
            at += count as u64;
        }
        None
    }

    /// The word of a mapped page in a table, unless it is a leaf's last one (then the table may become a
    /// run).
    #[inline]
    fn slot(&mut self, page: u32) -> Option<&mut u32> {
        let Root::Tree(branches) = &mut self.root else { return None };
        let at = find_branch(branches, page / BRANCH_PAGES).ok()?;
        match branches[at].leaves.get_mut((page % BRANCH_PAGES / LEAF_PAGES) as usize)? {
            Leaf::Table { words, .. } if page % LEAF_PAGES != LEAF_PAGES - 1 => {
                words.get_mut((page % LEAF_PAGES) as usize).filter(|word| **word != HOLE)
            }
            _ => None,
        }
    }

    /// The word of `page` and how many pages, at most `max`, go on like it within one extent, leaf or gap.
    fn piece(&self, page: u32, max: u32) -> (u32, u32) {
        let (word, to) = match &self.root {
            Root::Empty => (HOLE, PAGES_MAX),
            Root::One(extent) => piece_of_extents(std::slice::from_ref(extent), page),
            Root::Few(extents) => piece_of_extents(extents, page),
            Root::Tree(branches) => match find_branch(branches, page / BRANCH_PAGES) {
                Ok(at) => {
                    let limit = max.min(LEAF_PAGES);
                    let (word, count) = branches[at].piece(page % BRANCH_PAGES, limit);
                    (word, page as u64 + count as u64)
                }
                Err(at) => match branches.get(at) {
                    Some(next) => (HOLE, next.number as u64 * BRANCH_PAGES as u64),
                    None => (HOLE, PAGES_MAX),
                },
            },
        };
        (word, (to - page as u64).min(max as u64) as u32)
    }

    #[inline]
    fn assign(&mut self, page: u32, count: u32, word: u32, report: &mut dyn FnMut(Run, bool)) {
        assert!(page as u64 + count as u64 <= PAGES_MAX, "pages lie in the largest file");
        if count == 0 {
            return;
        }
        let mut replaced = Replaced { report, pending: None, mapped: 0 };
        let change = Extent { page, count, word };
        match &mut self.root {
            Root::Tree(branches) if word == HOLE => clear_tree(branches, change, &mut replaced),
            Root::Tree(branches) => assign_tree(branches, change, &mut replaced),
            _ => self.assign_extents(change, &mut replaced),
        }
        replaced.finish();
        self.mapped -= replaced.mapped;
        if word != HOLE {
            self.mapped += count as u64;
        } else if self.mapped == 0 {
            (self.root, self.reserved) = (Root::Empty, false);
        }
    }

    fn assign_extents(&mut self, change: Extent, replaced: &mut Replaced) {
        // The commonest: a file grows at its end.
        let last = match &mut self.root {
            Root::One(extent) => Some(extent),
            Root::Few(extents) => extents.last_mut(),
            _ => None,
        };
        if let Some(last) = last
            && change.word != HOLE
            && last.joins(change)
        {
            last.count += change.count;
            return;
        }
        let mut extents = match std::mem::take(&mut self.root) {
            Root::Few(extents) => extents,
            Root::One(extent) if extent.page == change.page && extent.count == change.count => {
                replaced.add(extent.word, change.word, change.count);
                self.root = if change.word == HOLE { Root::Empty } else { Root::One(change) };
                return;
            }
            Root::One(extent) => vec![extent],
            _ => Vec::new(),
        };
        splice_extents(&mut extents, change, replaced);
        self.root = match extents.len() {
            0 => Root::Empty,
            1 => Root::One(extents[0]),
            2..=FEW_EXTENTS_MAX => Root::Few(extents),
            _ => Root::Tree(plant(&extents)),
        };
    }
}

fn piece_of_extents(extents: &[Extent], page: u32) -> (u32, u64) {
    let next = extents.partition_point(|extent| extent.end() <= page as u64);
    match extents.get(next) {
        Some(extent) if extent.page <= page => (extent.word + (page - extent.page), extent.end()),
        Some(extent) => (HOLE, extent.page as u64),
        None => (HOLE, PAGES_MAX),
    }
}

/// Puts `change` in the place of what it covers, joined with its neighbours where they allow it.
fn splice_extents(extents: &mut Vec<Extent>, mut change: Extent, replaced: &mut Replaced) {
    let (from, to) = (change.page as u64, change.end());
    let mut first = extents.partition_point(|extent| extent.end() <= from);
    let mut last = first + extents[first..].partition_point(|extent| (extent.page as u64) < to);
    for old in &extents[first..last] {
        if let Some(old) = old.part(from, to) {
            replaced.add(old.word, forward(change.word, old.page - change.page), old.count);
        }
    }
    let mut before = extents[first..last].first().and_then(|old| old.part(0, from));
    let mut after = extents[first..last].last().and_then(|old| old.part(to, PAGES_MAX));
    if change.word != HOLE {
        // Neighbours that are not touched may join, too.
        if before.is_none() && first > 0 {
            first -= 1;
            before = Some(extents[first]);
        }
        if after.is_none() && last < extents.len() {
            after = Some(extents[last]);
            last += 1;
        }
        if let Some(joined) = before.take_if(|before| before.joins(change)) {
            change = Extent { count: joined.count + change.count, ..joined };
        }
        if let Some(joined) = after.take_if(|after| change.joins(*after)) {
            change.count += joined.count;
        }
    }
    let middle = (change.word != HOLE).then_some(change);
    extents.splice(first..last, [before, middle, after].into_iter().flatten());
}

/// Where the branch is, or where it would be.
#[inline]
fn find_branch(branches: &[Branch], number: u32) -> Result<usize, usize> {
    match branches.get(number as usize) {
        Some(branch) if branch.number == number => Ok(number as usize),
        _ => branches.binary_search_by_key(&number, |branch| branch.number),
    }
}

fn plant(extents: &[Extent]) -> Vec<Branch> {
    let mut branches = Vec::new();
    let mut nothing = Replaced { report: &mut |_, _| {}, pending: None, mapped: 0 };
    for &extent in extents {
        assign_tree(&mut branches, extent, &mut nothing);
    }
    branches
}

fn assign_tree(branches: &mut Vec<Branch>, change: Extent, replaced: &mut Replaced) {
    let mut at = change.page as u64;
    while let Some(part) = change.part(at, (at | (LEAF_PAGES as u64 - 1)) + 1) {
        let number = part.page / BRANCH_PAGES;
        let place = find_branch(branches, number).unwrap_or_else(|place| {
            branches.insert(place, Branch { number, leaves: Vec::new() });
            place
        });
        let first = (part.page % LEAF_PAGES) as u16;
        branches[place].leaf_mut(part.page).assign(first, part.count as u16, part.word, replaced);
        at = part.end();
    }
}

/// Visits only the leaves there are, and drops what becomes empty.
fn clear_tree(branches: &mut Vec<Branch>, change: Extent, replaced: &mut Replaced) {
    let first = find_branch(branches, change.page / BRANCH_PAGES).unwrap_or_else(|place| place);
    let last = (change.end() - 1) / BRANCH_PAGES as u64;
    let count = branches[first..].partition_point(|branch| branch.number as u64 <= last);
    let mut emptied = false;
    for branch in &mut branches[first..first + count] {
        branch.clear(change, replaced);
        emptied |= branch.leaves.is_empty();
    }
    if emptied {
        branches.retain(|branch| !branch.leaves.is_empty());
    }
}

impl Branch {
    #[inline]
    fn word(&self, page: u32) -> u32 {
        match self.leaves.get((page / LEAF_PAGES) as usize) {
            Some(leaf) => leaf.word(page % LEAF_PAGES),
            None => HOLE,
        }
    }

    /// As [`PageIndex::piece`], `page` counted from the branch's first.
    fn piece(&self, page: u32, max: u32) -> (u32, u32) {
        match self.leaves.get((page / LEAF_PAGES) as usize) {
            Some(leaf) => leaf.piece(page % LEAF_PAGES, max),
            None => (HOLE, BRANCH_PAGES - page),
        }
    }

    #[inline]
    fn leaf_mut(&mut self, page: u32) -> &mut Leaf {
        let index = (page % BRANCH_PAGES / LEAF_PAGES) as usize;
        if index >= self.leaves.len() {
            self.leaves.resize_with(index + 1, Leaf::default);
        }
        &mut self.leaves[index]
    }

    fn clear(&mut self, change: Extent, replaced: &mut Replaced) {
        let start = self.number as u64 * BRANCH_PAGES as u64;
        let from = (change.page as u64).saturating_sub(start) as u32 / LEAF_PAGES;
        for index in from as usize..self.leaves.len() {
            let leaf_start = start + index as u64 * LEAF_PAGES as u64;
            let Some(part) = change.part(leaf_start, leaf_start + LEAF_PAGES as u64) else {
                break;
            };
            let first = (part.page % LEAF_PAGES) as u16;
            self.leaves[index].assign(first, part.count as u16, HOLE, replaced);
        }
        while let Some(Leaf::Empty) = self.leaves.last() {
            self.leaves.pop();
        }
    }

    fn heap_bytes(&self) -> usize {
        let tables = self.leaves.iter().map(|leaf| match leaf {
            Leaf::Table { words, .. } => size_of_val(&**words),
            _ => 0,
        });
        self.leaves.capacity() * size_of::<Leaf>() + tables.sum::<usize>()
    }
}

impl Leaf {
    #[inline]
    fn word(&self, page: u32) -> u32 {
        match self {
            Leaf::Empty => HOLE,
            Leaf::Run { first, count, word } => match page.wrapping_sub(*first as u32) {
                n if n < *count as u32 => word + n,
                _ => HOLE,
            },
            Leaf::Pieces { starts, words } => {
                let (at, start, _) = piece_at(starts, page);
                forward(words[at], page - start)
            }
            Leaf::Table { words, .. } => words.get(page as usize).copied().unwrap_or(HOLE),
        }
    }

    /// As [`PageIndex::piece`], within the leaf.
    fn piece(&self, page: u32, max: u32) -> (u32, u32) {
        match self {
            Leaf::Empty => (HOLE, LEAF_PAGES - page),
            Leaf::Run { first, count, word } => {
                let (first, end) = (*first as u32, *first as u32 + *count as u32);
                if page < first {
                    (HOLE, first - page)
                } else if page < end {
                    (word + (page - first), end - page)
                } else {
                    (HOLE, LEAF_PAGES - page)
                }
            }
            Leaf::Pieces { starts, words } => {
                let (at, start, end) = piece_at(starts, page);
                (forward(words[at], page - start), end - page)
            }
            Leaf::Table { words, .. } => {
                let Some(rest) = words.get(page as usize..).filter(|rest| !rest.is_empty()) else {
                    return (HOLE, LEAF_PAGES - page);
                };
                let window = &rest[..rest.len().min(max as usize)];
                let mut same = (0u32..).zip(window);
                let end = same.position(|(n, &word)| word != forward(window[0], n));
                (window[0], end.unwrap_or(window.len()) as u32)
            }
        }
    }

    #[inline]
    fn assign(&mut self, first: u16, count: u16, word: u32, replaced: &mut Replaced) {
        if let Leaf::Table { words, mapped } = self
            && (first + count) as usize <= words.len()
        {
            assign_table(words, mapped, first, count, word, replaced);
            if word == HOLE && *mapped == 0 {
                *self = Leaf::Empty;
            } else if (first + count) as u32 == LEAF_PAGES || count >= COLLAPSE_PAGES {
                self.collapse();
            }
            return;
        }
        self.assign_slow(first, count, word, replaced);
    }

    /// A run that stays one, or becomes a table, or a table that must grow.
    fn assign_slow(&mut self, first: u16, count: u16, word: u32, replaced: &mut Replaced) {
        let (old_first, old_count, old_word) = match self {
            Leaf::Empty if word == HOLE => return,
            Leaf::Empty => {
                *self = Leaf::Run { first, count, word };
                return;
            }
            Leaf::Run { first, count, word } => (*first, *count, *word),
            Leaf::Table { words, .. } if word == HOLE => {
                // Holes anyway past the table's end.
                let end = words.len() as u16;
                if first < end {
                    self.assign(first, end - first, word, replaced);
                }
                return;
            }
            Leaf::Pieces { .. } => {
                self.grow(LEAF_PAGES as usize);
                return self.assign(first, count, word, replaced);
            }
            Leaf::Table { .. } => {
                self.grow((first + count) as usize);
                return self.assign(first, count, word, replaced);
            }
        };
        let (end, old_end) = (first + count, old_first + old_count);
        let (from, to) = (first.max(old_first), end.min(old_end));
        let covers = first <= old_first && end >= old_end;
        let apart = from > to;
        // Both lie on one diagonal: page and block differ by the same.
        let one = word != HOLE
            && !apart
            && word.wrapping_sub(first as u32) == old_word.wrapping_sub(old_first as u32);
        if covers || one || (word == HOLE && (from >= to || from == old_first || to == old_end)) {
            if from < to {
                let new = forward(word, (from - first) as u32);
                replaced.add(old_word + (from - old_first) as u32, new, (to - from) as u32);
            }
            *self = match word {
                HOLE if covers => Leaf::Empty,
                HOLE if from >= to => return,
                HOLE if from == old_first => {
                    Leaf::Run { first: to, count: old_end - to, word: old_word + (to - old_first) as u32 }
                }
                HOLE => Leaf::Run { first: old_first, count: from - old_first, word: old_word },
                _ if covers => Leaf::Run { first, count, word },
                _ => {
                    let first = first.min(old_first);
                    let word = old_word.wrapping_sub((old_first - first) as u32);
                    Leaf::Run { first, count: end.max(old_end) - first, word }
                }
            };
            return;
        }
        self.grow(end.max(old_end) as usize);
        self.assign(first, count, word, replaced);
    }

    /// Makes it a table of at least `pages`.
    fn grow(&mut self, pages: usize) {
        let mut words = vec![HOLE; pages.next_power_of_two().max(TABLE_PAGES_MIN)].into_boxed_slice();
        let mut count = 0;
        match self {
            Leaf::Empty => {}
            Leaf::Run { first, count: run, word } => {
                count = *run;
                for (n, slot) in (0..*run).zip(&mut words[*first as usize..]) {
                    *slot = *word + n as u32;
                }
            }
            Leaf::Pieces { .. } => {
                let mut page = 0;
                while page < LEAF_PAGES {
                    let (word, pages) = self.piece(page, LEAF_PAGES);
                    for n in 0..pages {
                        words[(page + n) as usize] = forward(word, n);
                    }
                    count += if word == HOLE { 0 } else { pages as u16 };
                    page += pages;
                }
            }
            Leaf::Table { words: old, mapped } => {
                count = *mapped;
                words[..old.len()].copy_from_slice(old);
            }
        }
        *self = Leaf::Table { words, mapped: count };
    }

    /// A full table in few pieces gives up its words: a preallocated file that was written page by page is as
    /// small as before, and a file that was written in large parts stays in the cache. Most others are refused
    /// after a few words.
    fn collapse(&mut self) {
        let Leaf::Table { words: all, .. } = self else { return };
        if all.len() != LEAF_PAGES as usize {
            return;
        }
        let mut starts = [LEAF_PAGES as u16; LEAF_PIECES - 1];
        let mut words = [HOLE; LEAF_PIECES];
        let (mut pieces, mut at) = (0, 0);
        while at < all.len() {
            if pieces == LEAF_PIECES {
                return;
            }
            let first = all[at];
            if pieces > 0 {
                starts[pieces - 1] = at as u16;
            }
            words[pieces] = first;
            pieces += 1;
            let same = (0..).zip(&all[at..]).position(|(n, &word)| word != forward(first, n));
            at = same.map_or(all.len(), |n| at + n);
        }
        *self = match pieces {
            1 => Leaf::Run { first: 0, count: LEAF_PAGES as u16, word: words[0] },
            _ => Leaf::Pieces { starts, words },
        };
    }
}

/// Which piece a page is in, where that begins, and where it ends.
#[inline]
fn piece_at(starts: &[u16; LEAF_PIECES - 1], page: u32) -> (usize, u32, u32) {
    let at: usize = starts.iter().map(|&start| usize::from(page >= start as u32)).sum();
    let start = if at == 0 { 0 } else { starts[at - 1] as u32 };
    (at, start, starts.get(at).map_or(LEAF_PAGES, |&end| end as u32))
}

#[inline]
fn assign_table(
    words: &mut [u32],
    mapped: &mut u16,
    first: u16,
    count: u16,
    word: u32,
    replaced: &mut Replaced,
) {
    let before = replaced.mapped;
    let slots = &mut words[first as usize..(first + count) as usize];
    let mut at = 0;
    // Run by run, because what is stored per page is also waited for per page.
    while at < slots.len() {
        let old = slots[at];
        let same = (0..).zip(&slots[at..]).position(|(n, &slot)| slot != forward(old, n));
        let run = same.unwrap_or(slots.len() - at);
        replaced.add(old, forward(word, at as u32), run as u32);
        at += run;
    }
    for (n, slot) in (0..).zip(slots) {
        *slot = forward(word, n);
    }
    *mapped -= (replaced.mapped - before) as u16;
    *mapped += if word == HOLE { 0 } else { count };
}

/// The invariants of the file's head.
impl PageIndex {
    /// Panics with the number of the invariant that does not hold.
    pub fn check_state(&self) {
        let mapped = match &self.root {
            Root::Empty => 0,
            Root::One(extent) => extent.count as u64,
            Root::Few(extents) => check_extents(extents),
            Root::Tree(branches) => {
                assert!(branches.is_sorted_by(|a, b| a.number < b.number), "2: branches ascend");
                branches.iter().map(Branch::check_state).sum()
            }
        };
        assert_eq!(mapped, self.mapped, "4: mapped pages");
        assert!(mapped > 0 || matches!(self.root, Root::Empty), "4: nothing mapped, not empty");
        assert!(self.reserved || self.iter_runs(0).all(|run| !run.unwritten), "5: an unwritten page");
    }
}

fn check_extents(extents: &[Extent]) -> u64 {
    assert!((2..=FEW_EXTENTS_MAX).contains(&extents.len()), "1: {} extents", extents.len());
    assert!(extents.iter().all(|extent| extent.count > 0 && extent.word != HOLE), "1: no empty extent");
    for pair in extents.windows(2) {
        assert!(pair[0].end() <= pair[1].page as u64 && !pair[0].joins(pair[1]), "1: neighbours");
    }
    extents.iter().map(|extent| extent.count as u64).sum()
}

impl Branch {
    fn check_state(&self) -> u64 {
        assert!((1..=BRANCH_LEAVES as usize).contains(&self.leaves.len()), "2: leaves of a branch");
        assert!(!matches!(self.leaves.last(), Some(Leaf::Empty)), "2: the last leaf is empty");
        self.leaves.iter().map(Leaf::check_state).sum()
    }
}

impl Leaf {
    fn check_state(&self) -> u64 {
        match self {
            Leaf::Empty => 0,
            Leaf::Run { first, count, word } => {
                assert!(*count > 0 && (*first + *count) as u32 <= LEAF_PAGES && *word != HOLE, "3: a run");
                *count as u64
            }
            Leaf::Pieces { starts, words } => {
                assert!(starts[0] > 0 && (starts[0] as u32) < LEAF_PAGES, "3: at least two pieces");
                let mut mapped = 0;
                for (at, &word) in words.iter().enumerate() {
                    let start = if at == 0 { 0 } else { starts[at - 1] as u32 };
                    let end = starts.get(at).map_or(LEAF_PAGES, |&end| end as u32);
                    assert!(start < end || start == LEAF_PAGES && end == start, "3: pieces ascend");
                    mapped += if word == HOLE { 0 } else { (end - start) as u64 };
                    let before = if at == 0 { None } else { Some(self.word(start - 1)) };
                    let goes_on = before.is_some_and(|b| word == if b == HOLE { HOLE } else { b + 1 });
                    assert!(start == LEAF_PAGES || !goes_on, "3: a piece goes on like the one before");
                }
                mapped
            }
            Leaf::Table { words, mapped } => {
                let counted = words.iter().filter(|&&word| word != HOLE).count();
                assert!(counted == *mapped as usize && counted > 0, "3: a table counts {mapped}");
                counted as u64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type Model = BTreeMap<u32, (u32, bool)>;

    fn set(index: &mut PageIndex, page: u32, count: u32, block: u32) -> Vec<(Run, bool)> {
        let mut out = Vec::new();
        index.set_run(page, count, Block(block), false, &mut |run, unwritten| out.push((run, unwritten)));
        out
    }

    #[test]
    fn small_files_need_no_heap() {
        let mut index = PageIndex::new();
        assert_eq!(size_of::<PageIndex>(), 48);
        assert!(set(&mut index, 0, 1, 77).is_empty());
        assert_eq!(set(&mut index, 0, 1, 99), [(Run::new(Block(77), 1), false)]);
        // Contiguous growth stays one extent, whatever the size.
        set(&mut index, 1, 1 << 18, 100);
        assert_eq!(index.heap_bytes(), 0);
        assert_eq!(index.run_at(5, 1000), (Mapping::Written(Block(104)), 1000));
        assert_eq!(index.mapped(), (1 << 18) + 1);
        index.check_state();
    }

    #[test]
    fn sparse_and_contiguous_files_are_small() {
        let mut index = PageIndex::new();
        for i in 0..40u32 {
            set(&mut index, i * 100_000_000, 1, 500 + 2 * i);
        }
        assert!(index.heap_bytes() < 40 * 2048, "{}", index.heap_bytes());
        assert_eq!(index.next_data(100_000_001), Some(200_000_000));
        index.check_state();

        // 1 GiB in 2 MiB runs.
        let mut index = PageIndex::new();
        for i in 0..512u32 {
            set(&mut index, i * 512, 512, 1 + 1024 * (1 + i * 7 % 512));
        }
        assert!(index.heap_bytes() < 32 * 1024, "{}", index.heap_bytes());
        index.check_state();
    }

    #[test]
    fn a_preallocated_file_written_page_by_page_is_small_again() {
        let mut index = PageIndex::new();
        // Preallocated in pieces that do not touch, so that it is a tree.
        for i in 0..64u32 {
            index.set_run(i * 512, 512, Block(1000 + i * 1000), true, &mut |_, _| panic!("a hole"));
        }
        let preallocated = index.heap_bytes();
        for page in 0..64 * 512u32 {
            let Mapping::Unwritten(block) = index.get(page) else { panic!("page {page}") };
            index.set_run(page, 1, block, false, &mut |run, _| panic!("{run:?} is kept"));
            assert_eq!(index.next_hole(0), (page < 64 * 512).then_some(page + 1));
        }
        assert_eq!((index.heap_bytes(), index.mapped()), (preallocated, 64 * 512));
        index.check_state();
    }

    #[test]
    fn the_last_page_of_the_largest_file_works() {
        let mut index = PageIndex::new();
        for page in (0..40).map(|i| u32::MAX - 3 * i) {
            set(&mut index, page, 1, 10 + page % 1000);
        }
        assert_eq!(index.run_at(u32::MAX, u32::MAX), (Mapping::Written(Block(10 + u32::MAX % 1000)), 1));
        assert_eq!(index.next_hole(u32::MAX), None);
        assert_eq!(index.iter_runs(0).count(), 40);
        index.clear(1, u32::MAX, &mut |_, _| {});
        assert_eq!((index.mapped(), index.heap_bytes()), (0, 0));
        index.check_state();
    }

    #[test]
    fn parts_end_where_the_largest_file_ends() {
        let mut index = PageIndex::new();
        for page in (0..40).map(|i| u32::MAX - 1 - 3 * i) {
            set(&mut index, page, 1, 10 + page % 1000);
        }
        let mut copy = PageIndex::new();
        let (mut from, mut parts) = (Some(0), 0);
        while let Some(page) = from {
            parts += 1;
            assert!(parts < 20, "it comes to an end");
            from = index.parts_from(page, &mut |part| {
                match part {
                    Part::Run(run) => panic!("{run:?} is in a table"),
                    Part::Words { page, words } => {
                        assert!(page.checked_add(words.len() as u32).is_some(), "as replay wants it");
                        copy.set_words(page, words.iter().copied());
                    }
                }
                false
            });
        }
        copy.check_state();
        assert_eq!(copy.iter_runs(0).collect::<Vec<_>>(), index.iter_runs(0).collect::<Vec<_>>());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Set {
            page: u32,
            count: u32,
            block: u32,
            unwritten: bool,
        },
        /// Maps pages to the blocks that the page before them asks for, as an append does.
        Extend {
            page: u32,
            count: u32,
        },
        /// Turns unwritten pages into written ones.
        Write {
            page: u32,
            count: u32,
        },
        Clear {
            page: u32,
            count: u32,
        },
    }

    /// Pages crowd around leaf and branch edges, near and far.
    fn page() -> impl Strategy<Value = u32> {
        let base = prop_oneof![
            4 => Just(0u32),
            3 => Just(LEAF_PAGES - 20),
            2 => Just(3 * LEAF_PAGES),
            2 => Just(BRANCH_PAGES - 30),
            1 => Just(7 * BRANCH_PAGES),
            1 => Just(u32::MAX - 3000),
        ];
        (base, prop_oneof![0..40u32, 0..1500u32]).prop_map(|(base, offset)| base + offset)
    }

    fn op() -> impl Strategy<Value = Op> {
        let count = prop_oneof![3 => Just(1u32), 3 => 1..12u32, 1 => 1..1400u32];
        prop_oneof![
            5 => (page(), count.clone(), 1..5000u32, any::<bool>())
                .prop_map(|(page, count, block, unwritten)| Op::Set { page, count, block, unwritten }),
            4 => (page(), count.clone()).prop_map(|(page, count)| Op::Extend { page, count }),
            2 => (page(), count.clone()).prop_map(|(page, count)| Op::Write { page, count }),
            2 => (page(), count).prop_map(|(page, count)| Op::Clear { page, count }),
        ]
    }

    /// Applies the change to both and compares what they say was replaced.
    fn change(index: &mut PageIndex, model: &mut Model, page: u32, count: u32, new: Option<(u32, bool)>) {
        let count = count.min(u32::MAX - page);
        let mut expected = Vec::new();
        for n in 0..count {
            let new = new.map(|(block, unwritten)| (block + n, unwritten));
            let old = match new {
                Some(new) => model.insert(page + n, new),
                None => model.remove(&(page + n)),
            };
            if let Some((block, unwritten)) = old
                && new.is_none_or(|new| new.0 != block)
            {
                expected.push((block, unwritten));
            }
        }
        let mut got = Vec::new();
        let mut replaced = |run: Run, unwritten| {
            got.extend((run.start.0..run.end().0).map(|block| (block, unwritten)));
        };
        match new {
            Some((block, unwritten)) => index.set_run(page, count, Block(block), unwritten, &mut replaced),
            None => index.clear(page, count, &mut replaced),
        }
        assert_eq!(got, expected);
    }

    fn apply(index: &mut PageIndex, model: &mut Model, op: &Op) {
        match *op {
            Op::Set { page, count, block, unwritten } => {
                change(index, model, page, count, Some((block, unwritten)));
            }
            Op::Extend { page, count } => {
                let before = page.checked_sub(1).and_then(|page| model.get(&page).copied());
                let (block, unwritten) = before.unwrap_or((9000, false));
                change(index, model, page, count, Some((block + 1, unwritten)));
            }
            Op::Write { page, count } => {
                for page in (page..=u32::MAX).take(count as usize) {
                    if let Some(&(block, true)) = model.get(&page) {
                        change(index, model, page, 1, Some((block, false)));
                    }
                }
            }
            Op::Clear { page, count } => change(index, model, page, count, None),
        }
        index.check_state();
    }

    fn to_mapping(entry: Option<&(u32, bool)>) -> Mapping {
        match entry {
            None => Mapping::Hole,
            Some(&(block, false)) => Mapping::Written(Block(block)),
            Some(&(block, true)) => Mapping::Unwritten(Block(block)),
        }
    }

    /// The longest runs, made the naive way.
    fn runs(model: &Model) -> Vec<MappedRun> {
        let mut runs: Vec<MappedRun> = Vec::new();
        for (&page, &(block, unwritten)) in model {
            match runs.last_mut() {
                Some(last)
                    if last.page + last.count == page
                        && last.block.0 + last.count == block
                        && last.unwritten == unwritten =>
                {
                    last.count += 1
                }
                _ => runs.push(MappedRun { page, count: 1, block: Block(block), unwritten }),
            }
        }
        runs
    }

    fn compare(index: &PageIndex, model: &Model, page: u32) {
        assert_eq!(index.get(page), to_mapping(model.get(&page)));
        let written = |page: &u32| matches!(model.get(page), Some((_, false)));
        assert_eq!(index.next_data(page), model.range(page..).map(|(page, _)| *page).find(written));
        assert_eq!(index.next_hole(page), (page..=u32::MAX).find(|page| !written(page)));
        let (mapping, count) = index.run_at(page, 700);
        assert_eq!(mapping, index.get(page));
        let goes_on = |n: u32| match (mapping, model.get(&(page + n))) {
            (Mapping::Hole, None) => true,
            (Mapping::Written(first), Some(&(block, false))) => first.0 + n == block,
            (Mapping::Unwritten(first), Some(&(block, true))) => first.0 + n == block,
            _ => false,
        };
        let room = (u32::MAX - page).saturating_add(1).min(700);
        assert_eq!(count, (0..room).find(|&n| !goes_on(n)).unwrap_or(room));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn agrees_with_a_map(
            ops in proptest::collection::vec(op(), 1..120),
            probes in proptest::collection::vec(page(), 20),
        ) {
            let (mut index, mut model) = (PageIndex::new(), Model::new());
            for op in &ops {
                apply(&mut index, &mut model, op);
            }
            prop_assert_eq!(index.mapped(), model.len() as u64);
            prop_assert_eq!(index.iter_runs(0).collect::<Vec<_>>(), runs(&model));
            for &page in &probes {
                compare(&index, &model, page);
            }
        }
    }
}
