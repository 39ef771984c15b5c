//! Finds the inode table's blocks by what stands in them, where the table's log does not say it any more.
//!
//! A slot's header is intact by itself and says its inode's number, so that a block with one tells which page of the table it is, or
//! was: blocks that the table gave back, or that a repair moved, keep their headers. A page is the block whose slots directories name,
//! by number and generation; of several the one that the log says; of others the one with the newest inode.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::super::alloc::Block;
use super::super::format::*;
use super::super::log::block_addr;
use super::super::types::Kind;
use super::image::{Image, Piece};
use super::{Checked, NOWHERE, TABLE_INO};
use crate::media::{LINE, Media};

/// Blocks of the inode table, by page.
pub type Pages = BTreeMap<u32, u32>;

/// Pages in a row that may be missing where there are more: of an image that somebody made up a table has no end.
const MISSING_MAX: usize = 4 * TABLE_BLOCKS as usize;

/// A block that has slots of a page.
struct Candidate {
    page: u32,
    block: u32,
    /// The log says so, too.
    is_logged: bool,
    /// Inodes whose headers are intact, and their generations.
    inodes: Vec<(u32, u64)>,
}

/// All blocks that may be pages of the table.
pub struct Search {
    logged: Pages,
    candidates: Vec<Candidate>,
    /// Blocks that turned out to be somebody else's.
    refused: BTreeSet<u32>,
    searched: bool,
}

impl Search {
    /// Reads all of the pool that somebody may have stored to, but for what somebody has.
    pub fn of<M: Media>(checked: &Checked<'_, M>) -> Search {
        let pool = &checked.pool;
        let logged: Pages =
            (0..).zip(pool.table.iter().copied()).filter(|&(_, block)| block != NOWHERE).collect();
        let pages: BTreeMap<u32, u32> = logged.iter().map(|(&page, &block)| (block, page)).collect();
        let mut search = Search { logged, candidates: Vec::new(), refused: BTreeSet::new(), searched: false };
        for block in checked.searched() {
            let page = pages.get(&block).copied();
            if page.is_none() && checked.space.has(block) {
                continue;
            }
            let mut said: BTreeMap<u32, Vec<(u32, u64)>> =
                page.map(|page| (page, Vec::new())).into_iter().collect();
            for (ino, generation) in headers(checked, block) {
                said.entry(ino / SLOTS_PER_BLOCK).or_default().push((ino, generation));
            }
            search.candidates.extend(said.into_iter().map(|(of, inodes)| Candidate {
                page: of,
                block,
                is_logged: page == Some(of),
                inodes,
            }));
        }
        search
    }

    /// The pages that are not where the log says, as far as `checked` knows, which may know some of them already.
    pub fn pages<M: Media>(&mut self, checked: &Checked<'_, M>) -> Pages {
        self.refused.extend(&checked.space.twice);
        let named: HashSet<(u32, u64)> = checked
            .tree
            .dirs
            .values()
            .flat_map(|dir| dir.entries.values())
            .map(|e| (e.ino, e.generation))
            .collect();
        let mut order: Vec<(usize, bool, u64, &Candidate)> = self
            .candidates
            .iter()
            .filter(|c| c.is_logged || !self.refused.contains(&c.block))
            .map(|c| {
                let names = c.inodes.iter().filter(|inode| named.contains(inode)).count();
                let newest = c.inodes.iter().map(|&(_, generation)| generation).max().unwrap_or(0);
                (names, c.is_logged, newest, c)
            })
            .collect();
        order.sort_by_key(|&(names, is_logged, newest, c)| {
            std::cmp::Reverse((names, is_logged, newest, c.block))
        });
        let (mut pages, mut taken) = (Pages::new(), BTreeSet::new());
        let mut last = None;
        for (names, is_logged, _, c) in order {
            if pages.contains_key(&c.page) || !taken.insert(c.block) {
                continue;
            }
            pages.insert(c.page, c.block);
            if names > 0 || is_logged {
                last = last.max(Some(c.page));
            }
        }
        // What the table gave back is not of it again, once it is seen that nobody names anything there.
        if std::mem::replace(&mut self.searched, true) {
            pages.retain(|&page, _| Some(page) <= last);
        }
        pages.retain(|page, block| self.logged.get(page) != Some(block));
        pages
    }
}

/// The inodes that intact headers in a block say they are of.
fn headers<M: Media>(checked: &Checked<'_, M>, block: u32) -> Vec<(u32, u64)> {
    let pool = &checked.pool;
    let mut bytes = [0; BLOCK];
    let at = block_addr(Block(block));
    let is_readable = pool.media.read(at, &mut bytes).is_ok();
    let header = |n: u32| {
        let from = n as usize * SLOT;
        let mut line: [u8; LINE] = bytes[from..from + LINE].try_into().expect("a line");
        if !is_readable {
            pool.media.read(at.add(from as u64), &mut line).ok()?;
        }
        let ino = SlotHeader::said_ino(&line);
        let page = ino / SLOTS_PER_BLOCK;
        let fits = ino % SLOTS_PER_BLOCK == n && (page as u64) < pool.sb.blocks;
        let header = if fits { SlotHeader::decode(&line, pool.key_crc, ino)? } else { return None };
        Kind::from_mode(header.mode).map(|_| (ino, header.generation))
    };
    (0..SLOTS_PER_BLOCK).filter_map(header).collect()
}

/// Where the pages of the table stand that its own inode has, in a pool of so many blocks, as far as there are not too many missing; its
/// image ends there.
pub fn table_of(image: &mut Image, blocks: u64) -> Vec<u32> {
    debug_assert_eq!(image.owner.ino, TABLE_INO);
    let pages_max = (blocks as usize).min((u32::MAX / SLOTS_PER_BLOCK) as usize);
    let mut table = Vec::new();
    for (&page, &Piece { count, block, .. }) in image.pages.iter().filter(|(_, piece)| !piece.unwritten) {
        let end = page as usize + count as usize;
        if page as usize > table.len() + MISSING_MAX || end > pages_max {
            break;
        }
        table.resize(page as usize, NOWHERE);
        table.extend(block..block + count);
    }
    let end = table.len() as u32;
    image.unmap(end, u32::MAX - end);
    image.size = end as u64 * BLOCK as u64;
    table
}
