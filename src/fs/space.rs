//! fallocate: reserved blocks, holes, zeros.

use smallvec::SmallVec;

use super::alloc::{Class, Run, Runs};
use super::format::*;
use super::index::Mapping;
use super::inode::Body;
use super::log::Batch;
use super::write::{WriteFields, check_writable, write_records};
use super::*;
use crate::limits::FILE_BYTES_MAX;
use crate::media::{Flushed, crc32c};

const PAGE: u64 = BLOCK as u64;

impl<M: Media> Fs<M> {
    /// `mode`: FALLOC_FL_* bits: reserve (0 or KEEP_SIZE), PUNCH_HOLE, ZERO_RANGE, UNSHARE_RANGE (all
    /// blocks are unshared); collapse and insert are EOPNOTSUPP. Reserved space survives a crash and
    /// makes later writes to it succeed on a full pool, as far as their records find room (docs/semantics.md, "Space"); it reads as zeros.
    /// Set-id bits are dropped unless `cred` is the superuser.
    pub fn fallocate(&self, cred: &Cred, ino: Ino, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.fallocate_node(cred, &Node::new(self.inode(ino)?), mode, offset, len)
    }

    pub fn fallocate_node(&self, cred: &Cred, node: &Node, mode: i32, offset: u64, len: u64) -> Result<()> {
        check_mode(mode)?;
        let keep = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let what = mode & !libc::FALLOC_FL_KEEP_SIZE;
        let end = offset.checked_add(len).filter(|&e| e <= FILE_BYTES_MAX);
        let Some(end) = end else { return Err(Error::new(libc::EFBIG, "space::fallocate")) };
        if len == 0 {
            return Err(Error::new(libc::EINVAL, "space::fallocate"));
        }
        let mut room = self.room();
        loop {
            let done = {
                let mut body = self.change_at_rest(&node.inode);
                let guard = self.core.enter()?;
                check_allocatable(&body)?;
                let mode = body.mode;
                let mut batch = Batch::new();
                self.drop_set_id(cred, &node.inode, &mut body, &mut batch);
                let done = match what {
                    0 | libc::FALLOC_FL_UNSHARE_RANGE => {
                        self.reserve(&node.inode, &mut body, &guard, offset, end, keep, batch)
                    }
                    _ => self.zero_range(&node.inode, &mut body, &guard, offset, end, keep, what, batch),
                };
                if done.is_err() {
                    body.mode = mode;
                }
                self.tidy_log(&node.inode, &mut body, &guard);
                done
            };
            match done {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                done => return done,
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn reserve(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        offset: u64,
        end: u64,
        keep: bool,
        mut batch: Batch,
    ) -> Result<()> {
        let size = if keep { body.size } else { body.size.max(end) };
        let mut fresh = Runs::new();
        let reserved = self.settle_tail(body, size, &mut batch, &mut fresh).and_then(|tail| {
            Ok((tail, self.reserve_holes(body, offset / PAGE, end.div_ceil(PAGE), &mut fresh)?))
        });
        let (tail, extents) = match reserved {
            Ok(reserved) => reserved,
            Err(e) => return Err(self.give_back(&fresh, e)),
        };
        let now = now();
        let uncapped = self.drop_capability(body, &mut batch);
        let fields =
            WriteFields { start: 0, len: 0, size, mtime: now, crc: None, flags: field::write::UNWRITTEN };
        write_records(&mut batch, &extents, &fields);
        if let Err(e) = self.commit(inode, body, &mut batch, guard, Class::Data, Flushed::issued()) {
            return Err(self.give_back(&fresh, e));
        }
        self.tail_settled(body, tail, self.core.reuse_after(guard));
        for e in &extents {
            body.file_mut().set_run(e.page, e.count, e.block, true, &mut |_, _| {
                unreachable!("only holes were reserved");
            });
        }
        if uncapped {
            self.capability_dropped(body, guard);
        }
        body.size = size;
        (body.mtime, body.ctime) = (now, now);
        Ok(())
    }

    /// Blocks for the holes among pages `[from, to)`.
    fn reserve_holes(&self, body: &mut Body, from: u64, to: u64, fresh: &mut Runs) -> Result<Vec<Extent>> {
        let index = body.file_mut();
        let mut extents = Vec::new();
        let mut page = from as u32;
        while (page as u64) < to {
            let (mapping, count) = index.run_at(page, (to - page as u64) as u32);
            if mapping == Mapping::Hole {
                let had = fresh.len();
                self.core
                    .alloc
                    .alloc_all(count, Class::Data, fresh)
                    .map_err(|_| Error::new(libc::ENOSPC, "space::reserve"))?;
                let mut at = page;
                for run in &fresh[had..] {
                    extents.push(Extent { page: at, count: run.count, block: run.start });
                    at += run.count;
                }
            }
            page += count;
        }
        Ok(extents)
    }

    #[cold]
    pub(super) fn give_back(&self, fresh: &[Run], e: Error) -> Error {
        // Nothing of what was stored to them may come after what others store.
        self.core.fence(Flushed::issued());
        for &run in fresh {
            self.core.free(run, None);
        }
        e
    }

    /// Before the size moves up without data: the rest of the last block becomes zeros. Where a fence makes
    /// them durable that is done at once. On an ordinary file they go to a new block, named and verified by a
    /// record in `batch`; the caller hands its extent to [`tail_settled`](Fs::tail_settled).
    pub(super) fn settle_tail(
        &self,
        body: &Body,
        size: u64,
        batch: &mut Batch,
        fresh: &mut Runs,
    ) -> Result<Option<Extent>> {
        let old = body.size;
        let (page, from) = ((old / PAGE) as u32, (old % PAGE) as usize);
        if size <= old || from == 0 {
            return Ok(None);
        }
        if self.core.deferring || body.tail_shared {
            let Some(edge) = self.zero_edge(body, (page, from, BLOCK), size, fresh)? else { return Ok(None) };
            self.core.fence(edge.flushed);
            write_records(batch, &[edge.extent], &edge.fields);
            return Ok(Some(edge.extent));
        }
        if let Mapping::Written(block) = body.file().expect("a file").get(page) {
            let at = log::block_addr(block).add(from as u64);
            let flushed = self.core.media.zero_nt(at, (PAGE - from as u64).min(size - old) as usize)?;
            self.core.fence(flushed);
        }
        Ok(None)
    }

    /// The record of a tail's new block is committed.
    pub(super) fn tail_settled(&self, body: &mut Body, tail: Option<Extent>, reuse: Option<u64>) {
        if let Some(e) = tail {
            body.file_mut()
                .set_run(e.page, e.count, e.block, false, &mut |run, _| self.core.free(run, reuse));
            body.tail_shared = false;
        }
    }

    /// PUNCH_HOLE and ZERO_RANGE: whole pages lose their blocks (ZERO_RANGE reserves new ones), the
    /// pages at the edges are copied with zeros in them. One operation, all or nothing.
    #[allow(clippy::too_many_arguments)]
    fn zero_range(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        offset: u64,
        end: u64,
        keep: bool,
        what: i32,
        mut batch: Batch,
    ) -> Result<()> {
        let size = if keep || what == libc::FALLOC_FL_PUNCH_HOLE { body.size } else { body.size.max(end) };
        let given = batch.count();
        let now = now();
        let mut fresh = Runs::new();
        let mut edges = Vec::new();
        let mut pending = Flushed::issued();
        let (first, last) = (offset.div_ceil(PAGE), end / PAGE);
        let mut zeroed: SmallVec<[(u32, usize, usize); 3]> = edges_of(offset, end, body.size)
            .filter(|z| !(first..last).contains(&(z.0 as u64))) // those lose their blocks anyway
            .collect();
        let tail = body.size / PAGE;
        if size > body.size && !body.size.is_multiple_of(PAGE) && !(first..last).contains(&tail) {
            // What stands behind the old end comes into the file.
            match zeroed.iter_mut().find(|z| z.0 as u64 == tail) {
                Some((_, _, to)) => *to = BLOCK,
                None => zeroed.push((tail as u32, (body.size % PAGE) as usize, BLOCK)),
            }
        }
        for edge in zeroed {
            match self.zero_edge(body, edge, size, &mut fresh) {
                Ok(Some(edge)) => {
                    write_records(&mut batch, &[edge.extent], &WriteFields { mtime: now, ..edge.fields });
                    edges.push(edge.extent);
                    pending = pending.and(edge.flushed);
                }
                Ok(None) => {}
                Err(e) => return Err(self.give_back(&fresh, e)),
            }
        }
        // What the edges hold is durable before the records name it; on an ordinary file they verify it.
        self.core.fence(pending);
        let fields = WriteFields { start: 0, len: 0, size, mtime: now, crc: None, flags: 0 };
        let mut reserved = Vec::new();
        if first < last {
            hole_record(&mut batch, first as u32, (last - first) as u32, size, now);
        }
        if what == libc::FALLOC_FL_ZERO_RANGE {
            // Its blocks may be the very ones that are freed, but only after the commit.
            match self.reserve_anew(body, offset / PAGE, end.div_ceil(PAGE), first, last, &mut fresh) {
                Ok(r) => reserved = r,
                Err(e) => return Err(self.give_back(&fresh, e)),
            }
            if !reserved.is_empty() || first >= last && edges.is_empty() {
                let fields = WriteFields { flags: field::write::UNWRITTEN, ..fields };
                write_records(&mut batch, &reserved, &fields);
            }
        }
        if batch.count() == given {
            write_records(&mut batch, &[], &fields); // nothing but the times
        }
        let uncapped = self.drop_capability(body, &mut batch);
        let class = if what == libc::FALLOC_FL_PUNCH_HOLE { Class::Release } else { Class::Data };
        if let Err(e) = self.commit(inode, body, &mut batch, guard, class, Flushed::issued()) {
            return Err(self.give_back(&fresh, e));
        }
        let reuse = self.core.reuse_after(guard);
        let mut free = |run, _| self.core.free(run, reuse);
        let index = body.file_mut();
        for e in &edges {
            index.set_run(e.page, e.count, e.block, false, &mut free);
        }
        if first < last {
            index.clear(first as u32, (last - first) as u32, &mut free);
        }
        for e in &reserved {
            index.set_run(e.page, e.count, e.block, true, &mut free);
        }
        if uncapped {
            self.capability_dropped(body, guard);
        }
        body.size = size;
        (body.mtime, body.ctime) = (now, now);
        Ok(())
    }

    /// Reserved blocks for pages `[from, to)` of a zeroed range: new ones for `[first, last)`, whose old
    /// ones go, and for holes at the edges.
    fn reserve_anew(
        &self,
        body: &mut Body,
        from: u64,
        to: u64,
        first: u64,
        last: u64,
        fresh: &mut Runs,
    ) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        if first < last {
            let had = fresh.len();
            self.core
                .alloc
                .alloc_all((last - first) as u32, Class::Data, fresh)
                .map_err(|_| Error::new(libc::ENOSPC, "space::zero_range"))?;
            let mut page = first as u32;
            for run in &fresh[had..] {
                extents.push(Extent { page, count: run.count, block: run.start });
                page += run.count;
            }
        }
        let edges = if first < last { [(from, first), (last, to)] } else { [(from, to), (to, to)] };
        for (a, b) in edges {
            extents.extend(self.reserve_holes(body, a, b, fresh)?);
        }
        Ok(extents)
    }

    /// A new block for a page of which bytes `[from, to)` become zeros; nothing to do where it has none.
    /// `size` is the file's after the operation.
    fn zero_edge(
        &self,
        body: &Body,
        (page, from, to): (u32, usize, usize),
        size: u64,
        fresh: &mut Runs,
    ) -> Result<Option<Edge>> {
        let Mapping::Written(old) = body.file().expect("a file").get(page) else { return Ok(None) };
        let run = self.core.alloc.alloc(1, Class::Release, None);
        let run = run.ok_or_else(|| Error::new(libc::ENOSPC, "space::zero_edge"))?;
        fresh.push(run);
        let mut block = [0; BLOCK];
        self.core.media.read(log::block_addr(old), &mut block)?;
        block[from..to].fill(0);
        let flushed = self.core.media.copy_nt(log::block_addr(run.start), &block)?;
        let start = page as u64 * PAGE;
        // Not of what lies behind the end of file: appends will store there.
        let len = size.saturating_sub(start).min(PAGE);
        let crc = self.core.deferring.then(|| crc32c(&block[..len as usize], 0));
        let fields = WriteFields { start, len, size, mtime: now(), crc, flags: 0 };
        Ok(Some(Edge { extent: Extent { page, count: 1, block: run.start }, fields, flushed }))
    }
}

/// A partly zeroed page in a new block, and how its record verifies it.
struct Edge {
    extent: Extent,
    fields: WriteFields,
    flushed: Flushed,
}

/// The partly zeroed pages of `[offset, end)` and which of their bytes; what lies behind the end of
/// file need not be zeroed now.
fn edges_of(offset: u64, end: u64, size: u64) -> impl Iterator<Item = (u32, usize, usize)> {
    let end = end.min(size);
    let (a, b) = (offset / PAGE, end / PAGE);
    let head = (!offset.is_multiple_of(PAGE) && offset < end).then(|| {
        let to = if a == b { end % PAGE } else { PAGE };
        (a as u32, (offset % PAGE) as usize, to as usize)
    });
    let tail = (!end.is_multiple_of(PAGE) && offset < end && (a != b || offset.is_multiple_of(PAGE)))
        .then_some((b as u32, 0, (end % PAGE) as usize));
    head.into_iter().chain(tail)
}

pub(super) fn hole_record(batch: &mut Batch, page: u32, count: u32, size: u64, now: u64) {
    let r = batch.record(Type::Hole, field::hole::MTIME + 8);
    put32(r, field::hole::PAGE, page);
    put32(r, field::hole::COUNT, count);
    put64(r, field::hole::SIZE, size);
    put64(r, field::hole::MTIME, now);
}

/// EOPNOTSUPP for what is not a mode, and for collapsing and inserting ranges.
pub(super) fn check_mode(mode: i32) -> Result<()> {
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match mode & !libc::FALLOC_FL_KEEP_SIZE {
        0 | libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_UNSHARE_RANGE => Ok(()),
        libc::FALLOC_FL_PUNCH_HOLE if mode == PUNCH => Ok(()),
        _ => Err(Error::new(libc::EOPNOTSUPP, "space::fallocate")),
    }
}

fn check_allocatable(body: &Body) -> Result<()> {
    match check_writable(body) {
        Err(e) if e.errno() == libc::EINVAL => Err(Error::new(libc::ENODEV, "space::fallocate")),
        checked => checked,
    }
}
