//! The checkpoint of a clean close: what recovery would derive, written out, so that the next open
//! scans nothing. It stands in blocks that its own list of free blocks calls free: it is read once,
//! before anything is written.
//!
//! ```text
//! head block   magic, CRC-32C of the body, bytes of the body, how many runs, the runs
//! body         slots; per slot: link count, parent, where its log ends
//!              runs of free blocks: count, then first block and length each
//!              blocks split in minis: count, then block and mask of used minis each
//! ```

use std::sync::atomic::Ordering;

use super::alloc::{Allocator, Block, Class, Run, Runs};
use super::format::*;
use super::mount::{Opened, load_table_inode};
use super::*;
use crate::media::crc32c;

const MAGIC: u32 = 0x4b43_4843;
const HEAD_BYTES: usize = 24;
/// Runs that the head block has room for.
const RUNS_MAX: usize = (BLOCK - HEAD_BYTES) / 8;
/// What the body says of a block, at most: of one of the inode table three numbers for each slot.
const BYTES_PER_BLOCK_MAX: u64 = 3 * 4 * SLOTS_PER_BLOCK as u64;

/// Writes the checkpoint, durably; the head's block, or `None` where there is no room.
pub(super) fn store<M: Media>(fs: &Fs<M>) -> Result<Option<u32>> {
    let body = encode(fs);
    let core = &fs.core;
    let Some(head) = core.alloc.alloc(1, Class::Last, None) else { return Ok(None) };
    let mut runs = Runs::new();
    let blocks = body.len().div_ceil(BLOCK) as u32;
    if core.alloc.alloc_all(blocks, Class::Last, &mut runs).is_err() || runs.len() > RUNS_MAX {
        return Ok(None);
    }
    let mut pending = Flushed::issued();
    let mut block = [0; BLOCK];
    put32(&mut block, 0, MAGIC);
    put64(&mut block, 8, body.len() as u64);
    put32(&mut block, 16, runs.len() as u32);
    let mut rest = &body[..];
    for (i, run) in runs.iter().enumerate() {
        put32(&mut block, HEAD_BYTES + 8 * i, run.start.0);
        put32(&mut block, HEAD_BYTES + 8 * i + 4, run.count);
        let (part, later) = rest.split_at(rest.len().min(run.count as usize * BLOCK));
        pending = pending.and(core.media.copy_nt(log::block_addr(run.start), part)?);
        rest = later;
    }
    let crc = crc32c(&body, crc32c(&block[8..], core.key_crc));
    put32(&mut block, 4, crc);
    pending = pending.and(core.media.copy_nt(log::block_addr(head.start), &block)?);
    core.media.fence(pending);
    Ok(Some(head.start.0))
}

fn encode<M: Media>(fs: &Fs<M>) -> Vec<u8> {
    let slots = fs.slot_count.load(Ordering::Acquire);
    let mut body = Vec::with_capacity(slots as usize * 12 + 4096);
    let mut put = |v: u32| body.extend_from_slice(&v.to_le_bytes());
    put(slots);
    for ino in 0..slots {
        let entry = fs.table.entry(ino);
        put(entry.links());
        put(entry.parent.load(Ordering::Acquire));
        put(match entry.node.share() {
            Some(inode) => inode.body.read().log.seq(),
            None if ino == TABLE_INO => fs.table_inode.body.read().log.seq(),
            None => fs.table.log_end(ino).load(Ordering::Relaxed),
        });
    }
    let mut runs = Vec::new();
    fs.core.alloc.for_each_free_run(true, &mut |run| runs.push(run));
    put(runs.len() as u32);
    for run in runs {
        put(run.start.0);
        put(run.count);
    }
    let mut minis = Vec::new();
    fs.core.alloc.for_each_partial_mini(true, &mut |block, used| minis.push((block, used)));
    put(minis.len() as u32);
    for (block, used) in minis {
        put(block.0);
        put(used as u32);
    }
    body
}

/// Reads the checkpoint. EUCLEAN where it is damaged; nothing was changed then.
pub(super) fn load<M: Media>(core: &mut Core<M>, head: u32) -> Result<Opened> {
    let body = read(&*core.media, &core.sb, head)?;
    let mut fields = Fields { bytes: &body };
    let slots = fields.next()?;
    let table_inode = load_table_inode(core)?;
    let pages = table_inode.body.read().size / BLOCK as u64;
    if slots as u64 != pages * SLOTS_PER_BLOCK as u64 {
        return Err(damaged("its inode count is not the table's"));
    }
    let table = table::Table::default();
    let mut free_slots = Vec::new();
    for ino in 0..slots {
        let (links, parent, end) = (fields.next()?, fields.next()?, fields.next()?);
        if ino == TABLE_INO && end != table_inode.body.read().log.seq() {
            return Err(damaged("the inode table's log does not end where it says"));
        }
        if links > 0 {
            let entry = table.entry(ino);
            entry.nlink.store(links, Ordering::Relaxed);
            entry.parent.store(parent, Ordering::Relaxed);
            table.log_end(ino).store(end, Ordering::Relaxed);
        } else if ino > ROOT_INO {
            free_slots.push(ino);
        }
    }
    free_slots.reverse();
    load_space(core, &mut fields)?;
    let report = OpenReport { was_clean: true, ..OpenReport::default() };
    let left = LeftTimes::default();
    Ok(Opened { table, table_inode, slot_count: slots, free_slots, left, read_only: false, report })
}

fn load_space<M: Media>(core: &mut Core<M>, fields: &mut Fields) -> Result<()> {
    let count = fields.next()?;
    let mut runs = Vec::new();
    for _ in 0..count {
        let run = Run { start: Block(fields.next()?), count: fields.next()? };
        let after = runs.last().is_none_or(|l: &Run| l.start.0 + l.count <= run.start.0);
        if !core.holds_blocks(run) || !after {
            return Err(damaged("it frees blocks outside the pool or twice"));
        }
        runs.push(run);
    }
    core.alloc = Allocator::from_free_runs(core.sb.blocks as u32, runs.into_iter())
        .map_err(|_| damaged("it frees a block twice"))?;
    let count = fields.next()?;
    for _ in 0..count {
        let (block, used) = (fields.next()?, fields.next()?);
        let valid = core.holds_blocks(Run { start: Block(block), count: 1 }) && used < 256;
        if !valid || core.alloc.load_partial_mini(Block(block), used as u8).is_err() {
            return Err(damaged("it splits a block that is free"));
        }
    }
    core.alloc.start();
    Ok(())
}

/// The blocks in which a checkpoint stands, as far as its head says.
pub(super) fn blocks<M: Media>(media: &M, sb: &Super, head: u32) -> Vec<Run> {
    let first = Run { start: Block(head), count: 1 };
    let mut block = [0; BLOCK];
    if !holds_blocks(sb, first) || media.read(log::block_addr(Block(head)), &mut block).is_err() {
        return Vec::new();
    }
    let count = (get32(&block, 16) as usize).min(RUNS_MAX);
    let runs = runs(&block, count).filter(|&run| holds_blocks(sb, run));
    std::iter::once(first).chain(runs).collect()
}

fn runs(head: &[u8; BLOCK], count: usize) -> impl Iterator<Item = Run> + Clone + '_ {
    let places = (0..count).map(|i| HEAD_BYTES + 8 * i);
    places.map(|at| Run { start: Block(get32(head, at)), count: get32(head, at + 4) })
}

/// The body of a checkpoint. EUCLEAN where it is damaged.
pub(super) fn read<M: Media>(media: &M, sb: &Super, head: u32) -> Result<Vec<u8>> {
    if !holds_blocks(sb, Run { start: Block(head), count: 1 }) {
        return Err(damaged("it lies outside the pool"));
    }
    let mut block = [0; BLOCK];
    media.read(log::block_addr(Block(head)), &mut block)?;
    let bytes = get64(&block, 8);
    let runs = get32(&block, 16) as usize;
    if get32(&block, 0) != MAGIC || runs > RUNS_MAX || bytes > sb.blocks * BYTES_PER_BLOCK_MAX + BLOCK as u64
    {
        return Err(damaged("its head is not one"));
    }
    let runs = self::runs(&block, runs);
    if !runs.clone().all(|run| holds_blocks(sb, run)) {
        return Err(damaged("its body lies outside the pool"));
    }
    // Before so many bytes are asked for.
    if runs.clone().map(|run| run.count as u64).sum::<u64>() != bytes.div_ceil(BLOCK as u64) {
        return Err(damaged("its length is not that of its blocks"));
    }
    let mut body = Vec::new();
    body.try_reserve_exact(bytes as usize).map_err(|_| damaged("its length is more than there is memory"))?;
    body.resize(bytes as usize, 0);
    let mut rest = &mut body[..];
    let mut parts = vec![(log::block_addr(Block(head)), BLOCK)];
    for run in runs {
        let n = rest.len().min(run.count as usize * BLOCK);
        let (part, later) = rest.split_at_mut(n);
        media.read(log::block_addr(run.start), part)?;
        parts.push((log::block_addr(run.start), part.len()));
        rest = later;
    }
    let is_short = !rest.is_empty();
    let matches = crc32c(&body, crc32c(&block[8..], crc32c(&sb.key, 0))) == get32(&block, 4);
    if !media.verified(&parts, matches) || is_short {
        return Err(damaged("its CRC does not match"));
    }
    Ok(body)
}

struct Fields<'a> {
    bytes: &'a [u8],
}

impl Fields<'_> {
    fn next(&mut self) -> Result<u32> {
        let (first, rest) = self.bytes.split_first_chunk::<4>().ok_or_else(|| damaged("it is too short"))?;
        self.bytes = rest;
        Ok(u32::from_le_bytes(*first))
    }
}

#[cold]
fn damaged(what: &str) -> Error {
    Error::message(libc::EUCLEAN, "checkpoint::load", format!("the checkpoint is damaged: {what}"))
}
