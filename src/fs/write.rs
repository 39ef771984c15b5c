//! Writing file data.
//!
//! Five ways, chosen by what is there already; each commits with one record and (mostly) one fence:
//!
//! | what is written | how |
//! |---|---|
//! | bytes behind the end of file, in its last block | in place: nobody can see them before the size moves |
//! | pages with no data yet, or reserved blocks | new blocks (or those reserved), mapped by the record |
//! | up to [`REDO_BYTES_MAX`] over existing data | the record carries the bytes; then stored in place |
//! | more over existing data | copy-on-write: new blocks, the old ones freed after the fence |
//! | over existing data with `data=inplace` | a record with the times, then the data in place |
//!
//! **Whole pages of a file that somebody else has** are copied before its lock is had, by all who write it.
//!
//! **An engine's copy** of whole blocks goes on after the record was committed and the inode let go: see `offload`.
//!
//! **One fence.** The record names the data's CRC-32C, computed while it is copied; recovery counts a
//! log's last record only if the data verifies, so nothing orders data before record (EasyIO §4.2's
//! orderless idea, for CPU copies). From a size on that the media [names](Media::two_fence_bytes), a second
//! fence costs less than the CRC. On an ordinary file the CRC is always there, because write-back reorders more than
//! one record.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;

use crossbeam_utils::Backoff;
use smallvec::SmallVec;

use super::alloc::{Block, Class, Run, Runs};
use super::format::*;
use super::index::{Mapping, PageIndex};
use super::inode::{Body, Data, Redone, extent_offset, write_record_bytes};
use super::last_line::LastLine;
use super::log::{Batch, block_addr};
use super::offload::{Commit, Needs, Parts};
use super::sink::{Sink, whole_lines};
use super::*;
use crate::limits::FILE_BYTES_MAX;
use crate::media::{Addr, Flushed, LINE, Words};
use crate::sync::primitive::wait;

/// Largest overwrite that commits as a redo record, in bytes.
pub const REDO_BYTES_MAX: usize = 1024;
/// Longest redo record that goes to media word by word, in lines.
const REDO_LINES_MAX: usize = 9;
/// One write moves at most this many bytes, as Linux's do.
const WRITE_BYTES_MAX: usize = 0x7fff_f000;
/// After so many writes that met nobody a file is no longer taken for one that several write.
const SHARED_FOR: u8 = 32;
/// After the pool was full so many writes have their file before they have blocks.
const AHEAD_PAUSE: u64 = 1024;
/// Extents that one record holds; more go into further records of the same operation.
const EXTENTS_PER_RECORD: usize = 250;

const PAGE: u64 = BLOCK as u64;

/// What a write is about to do, page by page.
#[derive(Default)]
struct Plan {
    extents: SmallVec<[Extent; 2]>,
    /// Blocks that were allocated: given back if the write fails.
    fresh: Runs,
}

/// See the table at the head of this file.
enum Way {
    AtEnd(Block),
    Redo,
    InPlace,
    /// All of them mapped or holes, and nothing else of the file; or one at its end.
    WholePages,
    Blocks,
}

/// What is written where.
#[derive(Clone, Copy)]
struct Input<'a> {
    offset: u64,
    bytes: Lent<'a>,
    /// Packed time.
    now: u64,
    engine: Via,
    of_reserve: OfReserve,
}

/// What of a write may be taken from the reserve.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OfReserve {
    Nothing,
    /// Where that was promised: of a file with blocks that were reserved, or of what is overwritten in place.
    Record,
    /// What replaces others.
    RecordAndBlocks,
}

/// Pages of one piece of what goes to the reserve, at most.
const RESERVE_PAGES_MAX: usize = 16;

impl Input<'_> {
    fn record_class(&self) -> Class {
        if self.of_reserve == OfReserve::Nothing { Class::Data } else { Class::Release }
    }

    fn block_class(&self) -> Class {
        if self.of_reserve == OfReserve::RecordAndBlocks { Class::Release } else { Class::Data }
    }
}

/// What of a write at `offset` the largest file holds; all where that is nothing, which is refused.
#[inline]
fn up_to_largest(src: Lent, offset: u64) -> Lent {
    match FILE_BYTES_MAX.saturating_sub(offset) {
        0 => src,
        room => src.first(usize::try_from(room).unwrap_or(usize::MAX)),
    }
}

/// Where a file's pages from this one on would lie with those before it.
#[inline]
fn block_behind(index: &PageIndex, page: u32) -> Option<Block> {
    match index.get(page.checked_sub(1)?) {
        Mapping::Written(block) => Some(Block(block.0 + 1)),
        _ => None,
    }
}

/// A write that was committed: the offset behind it, and its copy, if that goes on.
type Written = (u64, Option<Arc<WriteUnderWay>>);

/// Whether who lent them keeps its thread until they are copied.
fn waits(bytes: Lent) -> bool {
    bytes.waits() && !crate::wait::lets_others_run()
}

/// Whether somebody else has the file, or had it lately: who copies before having it keeps it for so short a time that
/// nobody has to sleep for it.
#[inline]
fn is_shared(inode: &Inode) -> bool {
    let taken = inode.body.seems_taken();
    let shared_for = inode.shared_for.load(Ordering::Relaxed);
    if taken || shared_for > 0 {
        let next = if taken { SHARED_FOR } else { shared_for - 1 };
        inode.shared_for.store(next, Ordering::Relaxed);
    }
    taken || shared_for > 0
}

/// What was stored before the file was had. Gives its blocks back, unless a write takes it over.
struct Ahead<'a, M: Media> {
    core: &'a Core<M>,
    plan: Plan,
    sink: Sink,
    /// The last to go.
    _counted: Counted<'a>,
}

/// One of those who have blocks and are in no epoch: a close waits for them.
pub(super) struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    pub(super) fn new(all: &'a AtomicU64) -> Counted<'a> {
        // Either a close sees this, or this sees the close.
        all.fetch_add(1, Ordering::SeqCst);
        Counted(all)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<M: Media> Ahead<'_, M> {
    fn give(&mut self, plan: &mut Plan, sink: &mut Sink) {
        let theirs = std::mem::take(&mut self.plan);
        plan.extents.extend(theirs.extents);
        plan.fresh.extend(theirs.fresh);
        let flushed = std::mem::replace(&mut self.sink.flushed, Flushed::issued());
        sink.flushed = std::mem::replace(&mut sink.flushed, Flushed::issued()).and(flushed);
        sink.crc = self.sink.crc;
    }
}

impl<M: Media> Drop for Ahead<'_, M> {
    fn drop(&mut self) {
        if !self.plan.fresh.is_empty() {
            self.core.give_up(&self.plan, std::mem::replace(&mut self.sink.flushed, Flushed::issued()));
        }
    }
}

impl<M: Media> Core<M> {
    /// Gives back what a failed write allocated. Nothing of it was committed. It may have stored behind the end
    /// of file, where the next writer, perhaps on another processor, stores again: in this order.
    fn give_up(&self, plan: &Plan, stored: Flushed) {
        self.fence(stored);
        for &run in &plan.fresh {
            self.free(run, None);
        }
    }
}

impl<M: Media> Fs<M> {
    /// Writes `src` at `offset`, or, with `append`, at the end of file; returns the offset after the
    /// last byte. At most 0x7ffff000 bytes, as write(2), and no more than the largest file holds. Atomic with
    /// `data=cow`: after a crash all of it is there or none. Set-id bits are dropped unless `cred` is the superuser.
    ///
    /// EFBIG behind the largest file, ENOSPC with nothing changed, EIO for bad media.
    pub fn write_at(&self, cred: &Cred, node: &Node, offset: u64, src: &[u8], append: bool) -> Result<u64> {
        self.write_and_wait(src, |src| self.begin_write(cred, node, offset, src, append))
            .map(|range| range.end)
    }

    /// As [`write_at`](Fs::write_at), up to where it would wait for a copy: that is then the caller's to wait for, with
    /// nothing of the file system held. The range that it writes.
    pub fn begin_write(
        &self,
        cred: &Cred,
        node: &Node,
        offset: u64,
        src: Lent,
        append: bool,
    ) -> WriteStep<Range<u64>> {
        self.try_write(cred, node, offset, src.first(WRITE_BYTES_MAX), append, OfReserve::Nothing)
    }

    /// One function for all that writes take of the reserve: what it is made of has one caller each, and so becomes part of it.
    #[inline(never)]
    fn try_write(
        &self,
        cred: &Cred,
        node: &Node,
        offset: u64,
        src: Lent,
        append: bool,
        of_reserve: OfReserve,
    ) -> WriteStep<Range<u64>> {
        let inode = &*node.inode;
        let mut input =
            Input { offset, bytes: up_to_largest(src, offset), now: 0, engine: node.engine(), of_reserve };
        let mut watch = self.core.ledger.begin(Op::Write, input.bytes.bytes().len());
        let mut room = self.room();
        loop {
            let done = {
                let mut ahead = None;
                if of_reserve == OfReserve::Nothing && is_shared(inode) && !append {
                    ahead = self.copy_ahead(inode, &input)?;
                    watch.did(Phase::Copy);
                }
                let mut body = self.table.change(inode);
                // Not before: what others log meanwhile stands in front, and must not be of a later epoch.
                let guard = self.core.enter()?;
                watch.did(Phase::Wait);
                if append {
                    input.offset = body.size;
                    input.bytes = up_to_largest(src, input.offset);
                }
                if let Some(write) = self.in_the_way(&mut body, &input) {
                    watch.forget();
                    return Ok(Step::Blocked(write));
                }
                if self.is_overgrown(&body) && matches!(body.data, Data::File(_)) {
                    self.catch_up(inode, &mut body, &guard);
                }
                if of_reserve == OfReserve::Record && !append {
                    input.bytes = input.bytes.first(self.bytes_of_one_way(&body, offset, input.bytes));
                }
                self.write_locked(cred, node, (&mut body, &guard), &mut input, ahead.as_mut(), &mut watch)
            };
            match done {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                Err(e)
                    if e.errno() == libc::ENOSPC
                        && of_reserve == OfReserve::Nothing
                        && !super::offload::is_put_off() =>
                {
                    return self.write_from_reserve(cred, node, offset, src, append);
                }
                Err(e) => return Err(e),
                Ok((end, None)) => return Ok(Step::Done(input.offset..end)),
                Ok((end, Some(write))) => return Ok(Step::UnderWay(input.offset..end, write)),
            }
        }
    }

    /// A write that the pool has no room for, as far as it may take from the reserve. ENOSPC where it may not, or finds nothing there;
    /// where only some of its pieces have room, up to the end of the last that had.
    #[cold]
    #[inline(never)]
    fn write_from_reserve(
        &self,
        cred: &Cred,
        node: &Node,
        offset: u64,
        src: Lent,
        append: bool,
    ) -> WriteStep<Range<u64>> {
        // Where an append goes is known once the file is had.
        let len = if append { src } else { up_to_largest(src, offset) }.bytes().len();
        let mut done = 0;
        let full = loop {
            let (at, rest) = (offset + done as u64, src.part(done, len - done));
            match self.try_write(cred, node, at, rest, append, OfReserve::Record) {
                Ok(Step::Done(range)) if !append && range.end < offset + len as u64 => {
                    done = (range.end - offset) as usize;
                }
                Ok(Step::Done(range)) if done > 0 => return Ok(Step::Done(offset..range.end)),
                Err(e) if e.errno() == libc::ENOSPC && done == 0 => break e,
                Ok(Step::Blocked(_)) | Err(_) if done > 0 => return Ok(Step::Done(offset..at)),
                step => return step,
            }
        };
        // What is appended replaces nothing.
        if append || !node.is_written_back() {
            return Err(full);
        }
        let mut pages = (page_count(offset, len) as usize).min(RESERVE_PAGES_MAX);
        loop {
            // What programs stored through a mapping nobody can refuse them any more. So on a full pool it goes to blocks of the
            // reserve, in pieces, each of which gives it the blocks that it replaces (decision 0096).
            let piece = src.first((pages * BLOCK - (offset % PAGE) as usize).min(len));
            match self.try_write(cred, node, offset, piece, false, OfReserve::RecordAndBlocks) {
                Err(e) if e.errno() == libc::ENOSPC && pages > 1 => pages /= 2,
                step => return step,
            }
        }
    }

    /// With `data=inplace` a write may be cut into pieces: the bytes that are written in one way, so that none takes blocks for pages that it
    /// need not replace. Else all.
    #[cold]
    fn bytes_of_one_way(&self, body: &Body, offset: u64, src: Lent) -> usize {
        let len = src.bytes().len();
        let in_place = self.core.sb.data_in_place && !self.core.deferring && len > 0;
        let Some(index) = body.file().filter(|_| in_place) else { return len };
        // What needs a block all the same is refused as a whole.
        if !all_mapped(body, offset, offset + len as u64, |mapping| mapping != Mapping::Hole) {
            return len;
        }
        let (mapping, count) = index.run_at((offset / PAGE) as u32, page_count(offset, len));
        let end = (offset / PAGE + count as u64) * PAGE;
        let end = match mapping {
            Mapping::Written(_) if offset < body.size => end.min(body.size),
            Mapping::Unwritten(_) => end,
            _ => return len,
        };
        len.min((end - offset) as usize)
    }

    /// A write under way that has to end before this one begins.
    #[inline]
    fn in_the_way(&self, body: &mut Body, input: &Input) -> Option<Arc<WriteUnderWay>> {
        let len = input.bytes.bytes().len() as u64;
        let size = body.size;
        let needs = || {
            // From the end of file on, where it begins behind it: what is between becomes zeros.
            let from = input.offset.min(size) / PAGE;
            Needs::PagesAndEnd(from..(input.offset.saturating_add(len)).div_ceil(PAGE))
        };
        let write = body.writes.in_the_way(needs);
        if write.is_none() && body.writes.any() && self.is_overgrown(body) {
            return body.writes.in_the_way(|| Needs::None);
        }
        write
    }

    pub fn write(&self, cred: &Cred, ino: Ino, offset: u64, src: &[u8], append: bool) -> Result<u64> {
        self.write_at(cred, &Node::new(self.inode(ino)?), offset, src, append)
    }

    fn write_locked(
        &self,
        cred: &Cred,
        node: &Node,
        (body, guard): (&mut Body, &epoch::Guard),
        input: &mut Input,
        ahead: Option<&mut Ahead<M>>,
        watch: &mut Watch,
    ) -> Result<Written> {
        let inode = &*node.inode;
        check_writable(body)?;
        let (offset, len) = (input.offset, input.bytes.bytes().len() as u64);
        let end = offset.checked_add(len).filter(|&e| e <= FILE_BYTES_MAX);
        let Some(end) = end else { return Err(Error::new(libc::EFBIG, "write::write_at")) };
        if len == 0 {
            return Ok((offset, None));
        }
        input.now = now();
        let way = match input.of_reserve {
            OfReserve::Nothing => self.way(inode, body, offset, end),
            _ => self.way_with_reserve(inode, body, (offset, end), input.of_reserve)?,
        };
        watch.did(Phase::Index);
        let falls =
            set_id_that_falls(cred, body) != 0 || xattr::has_capability(body) && !node.is_written_back();
        let written = if falls {
            self.write_unprivileged(cred, node, (body, guard), *input, ahead, way, watch)
        } else {
            match way {
                Way::AtEnd(block) => {
                    self.append_in_place(inode, body, guard, *input, block, watch).map(|end| (end, None))
                }
                Way::Redo => {
                    self.overwrite_by_redo(inode, body, guard, *input, None, watch).map(|end| (end, None))
                }
                Way::InPlace => {
                    let batch = &mut Batch::new();
                    self.overwrite_in_place(inode, body, guard, *input, batch, watch).map(|end| (end, None))
                }
                Way::WholePages if ahead.is_none() && !self.core.mover.takes(input.engine, len as usize) => {
                    self.write_pages(node, (body, guard), input, watch)
                }
                Way::WholePages | Way::Blocks => {
                    self.write_blocks(node, (body, guard), *input, ahead, &mut Batch::new(), watch)
                }
            }
        };
        if written.is_ok() {
            self.tidy_log(inode, body, guard);
            watch.did(Phase::Metadata);
        }
        written
    }

    /// A write with which set-id bits or a capability fall: the records that say so go first.
    #[cold]
    #[expect(clippy::too_many_arguments, reason = "those of `write_locked`, and the way")]
    fn write_unprivileged(
        &self,
        cred: &Cred,
        node: &Node,
        (body, guard): (&mut Body, &epoch::Guard),
        input: Input,
        ahead: Option<&mut Ahead<M>>,
        way: Way,
        watch: &mut Watch,
    ) -> Result<Written> {
        let inode = &*node.inode;
        let (mode, seq) = (body.mode, body.log.seq());
        let batch = &mut Batch::new();
        self.drop_set_id(cred, inode, body, batch);
        let uncapped = !node.is_written_back() && self.drop_capability(body, batch);
        let written = match way {
            Way::Redo => {
                self.overwrite_by_redo(inode, body, guard, input, Some(batch), watch).map(|end| (end, None))
            }
            Way::InPlace => {
                self.overwrite_in_place(inode, body, guard, input, batch, watch).map(|end| (end, None))
            }
            Way::AtEnd(_) | Way::WholePages | Way::Blocks => {
                self.write_blocks(node, (body, guard), input, ahead, batch, watch)
            }
        };
        match &written {
            Err(_) if body.log.seq() == seq => body.mode = mode,
            // It was committed, even where its data met bad media afterwards.
            _ if uncapped => self.capability_dropped(body, guard),
            _ => {}
        }
        written
    }

    /// Takes the set-id bits that fall by a change of the data, with a record of it in `batch`.
    #[inline]
    pub(super) fn drop_set_id(&self, cred: &Cred, inode: &Inode, body: &mut Body, batch: &mut Batch) {
        let falls = set_id_that_falls(cred, body);
        if falls != 0 {
            body.mode &= !falls;
            body.attr_record(inode.atime.load(Ordering::Relaxed), 0, batch);
        }
    }

    /// On an ordinary file nothing is overwritten in place, whatever the mode: after a power loss the data of
    /// every record since the last sync is verified, and must be what the record wrote.
    #[inline]
    fn way(&self, inode: &Inode, body: &Body, offset: u64, end: u64) -> Way {
        if offset == body.size
            && (end - 1) / PAGE == offset / PAGE
            && let Some(block) = last_block(body)
        {
            return Way::AtEnd(block);
        }
        let whole =
            || (offset | end).is_multiple_of(PAGE) && !body.file().is_some_and(PageIndex::may_have_unwritten);
        if end > body.size || self.core.deferring {
            let next_page = offset == body.size && end - offset == PAGE && !self.core.deferring;
            return if next_page && whole() { Way::WholePages } else { Way::Blocks };
        }
        // Who reads it just now goes on reading what was there.
        if self.core.copies.reads().touch(inode.ino.0, offset / PAGE..end.div_ceil(PAGE))
            && !self.core.media.omits("what is being read is not overwritten where it is")
        {
            return Way::Blocks;
        }
        let small = end - offset <= REDO_BYTES_MAX as u64;
        if (small || self.core.sb.data_in_place) && all_written(body, offset, end) {
            if self.core.sb.data_in_place { Way::InPlace } else { Way::Redo }
        } else if whole() {
            Way::WholePages
        } else {
            Way::Blocks
        }
    }

    /// As [`way`](Fs::way) of a write that may take from the reserve: ENOSPC where that was not promised.
    #[cold]
    fn way_with_reserve(
        &self,
        inode: &Inode,
        body: &Body,
        (offset, end): (u64, u64),
        of_reserve: OfReserve,
    ) -> Result<Way> {
        let way = match of_reserve {
            OfReserve::RecordAndBlocks if has_blocks(body, offset, end) => Some(Way::Blocks),
            OfReserve::RecordAndBlocks => None,
            _ => match self.way(inode, body, offset, end) {
                Way::InPlace => Some(Way::InPlace),
                _ => body.file().filter(|index| index.may_have_unwritten()).map(|_| Way::Blocks),
            },
        };
        way.ok_or_else(|| Error::new(libc::ENOSPC, "write::way_with_reserve"))
    }

    /// Bytes behind the end of file that its last block has room for.
    fn append_in_place(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        Input { offset, bytes: src, now, engine, .. }: Input,
        block: Block,
        watch: &mut Watch,
    ) -> Result<u64> {
        let end = offset + src.bytes().len() as u64;
        let mut sink = Sink::new(Some(0), engine);
        let last = LastLine::of(body);
        let knew_last = last.is_some();
        if let Err(e) = sink.append(&self.core, block_addr(block).add(offset % PAGE), src, last) {
            return Err(self.undo(&Plan::default(), sink.flushed, e));
        }
        watch.did(Phase::Copy);
        let fields =
            WriteFields { start: offset, len: end - offset, size: end, mtime: now, crc: sink.crc, flags: 0 };
        let mut line = [write_line(None, &fields)];
        let record = (Type::Write, &mut line[..]);
        let committed =
            self.commit_lines_and(inode, body, record, guard, Class::Data, sink.flushed, |body, _| {
                watch.did(Phase::Metadata);
                body.size = end;
                if !self.core.deferring {
                    LastLine::appended(body, src.bytes(), knew_last);
                }
                (body.mtime, body.ctime) = (now, now);
                watch.did(Phase::Index);
            });
        if let Err(e) = committed {
            return Err(self.undo(&Plan::default(), Flushed::issued(), e));
        }
        watch.did(Phase::Metadata);
        Ok(end)
    }

    /// The bytes go into the record; recovery stores them again if need be, so the stores in place need no
    /// fence before the cleaner drops the record.
    #[inline(never)]
    fn overwrite_by_redo(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        Input { offset, bytes: src, now, .. }: Input,
        before: Option<&mut Batch>,
        watch: &mut Watch,
    ) -> Result<u64> {
        let src = src.bytes();
        if let Mapping::Written(block) = body.file().expect("check_writable").get((offset / PAGE) as u32) {
            let n = src.len().min((PAGE - offset % PAGE) as usize);
            self.core.media.expect_store(block_addr(block).add(offset % PAGE), n);
        }
        let bytes = field::redo::DATA + src.len();
        let seq = if before.is_none() && bytes <= REDO_LINES_MAX * LINE {
            let mut lines = [Words::default(); REDO_LINES_MAX];
            let lines = &mut lines[..bytes.div_ceil(LINE)];
            redo_words(lines.as_flattened_mut(), offset, now, src);
            self.commit_lines(inode, body, (Type::Redo, lines), guard, Class::Data, Flushed::issued())?
        } else {
            let mut own = None;
            let batch = before.unwrap_or_else(|| own.insert(Batch::new()));
            let r = batch.record(Type::Redo, bytes);
            put64(r, field::redo::OFFSET, offset);
            put64(r, field::redo::MTIME, now);
            put16(r, field::redo::LEN, src.len() as u16);
            r[field::redo::DATA..bytes].copy_from_slice(src);
            self.commit(inode, body, batch, guard, Class::Data, Flushed::issued())?;
            batch.placed(batch.count() - 1).0
        };
        watch.did(Phase::Metadata);
        let mut redone = body.redone.take().unwrap_or_default();
        let stored = self.redo(body, offset, src, seq, &mut redone).inspect_err(|e| self.core.poison(e));
        body.redone = Some(redone);
        stored?;
        watch.did(Phase::Copy);
        (body.mtime, body.ctime) = (now, now);
        Ok(offset + src.len() as u64)
    }

    /// Stores what a redo record holds in place.
    fn redo(
        &self,
        body: &Body,
        offset: u64,
        src: &[u8],
        seq: u32,
        redone: &mut VecDeque<Redone>,
    ) -> Result<()> {
        let index = body.file().expect("check_writable");
        let mut at = offset;
        let mut rest = src;
        while !rest.is_empty() {
            let n = rest.len().min((PAGE - at % PAGE) as usize);
            let Mapping::Written(block) = index.get((at / PAGE) as u32) else {
                unreachable!("all_written looked");
            };
            let dirty = self.core.media.copy_cached(block_addr(block).add(at % PAGE), &rest[..n])?;
            redone.push_back(Redone { at: dirty.at(), len: n as u16, seq });
            dirty.redundant("the redo record is durable; the cleaner writes back before it goes");
            at += n as u64;
            rest = &rest[n..];
        }
        Ok(())
    }

    /// `data=inplace`: the times commit first, so that no record whose data could still be verified is
    /// the log's last when its data changes.
    #[inline(never)]
    fn overwrite_in_place(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        input: Input,
        batch: &mut Batch,
        watch: &mut Watch,
    ) -> Result<u64> {
        let (class, Input { offset, bytes: src, now, engine, .. }) = (input.record_class(), input);
        let src = src.bytes();
        let before = (body.mtime, body.ctime);
        (body.mtime, body.ctime) = (now, now);
        // The batch may have one without the times: this one counts.
        body.attr_record(inode.atime.load(Ordering::Relaxed), 0, batch);
        if let Err(e) = self.commit(inode, body, batch, guard, class, Flushed::issued()) {
            (body.mtime, body.ctime) = before;
            return Err(e);
        }
        watch.did(Phase::Metadata);
        let index = body.file().expect("check_writable");
        let mut sink = Sink::new(None, engine);
        let mut at = offset;
        while at < offset + src.len() as u64 {
            let done = (at - offset) as usize;
            let (mapping, pages) = index.run_at((at / PAGE) as u32, page_count(at, src.len() - done));
            let Mapping::Written(block) = mapping else { unreachable!("all_written looked") };
            let n = (pages as u64 * PAGE - at % PAGE).min((src.len() - done) as u64) as usize;
            sink.store(&self.core, block_addr(block).add(at % PAGE), &src[done..done + n])?;
            at += n as u64;
        }
        self.core.fence(sink.flushed);
        watch.did(Phase::Copy);
        Ok(at)
    }

    /// One run of new blocks, if there is one so long: the commonest writes to large files, by fewer instructions than
    /// [`write_blocks`](Fs::write_blocks) (decision 0093).
    #[inline(never)]
    fn write_pages(
        &self,
        node: &Node,
        (body, guard): (&mut Body, &epoch::Guard),
        input: &Input,
        watch: &mut Watch,
    ) -> Result<Written> {
        let core = &self.core;
        let src = input.bytes.bytes();
        let (page, count) = ((input.offset / PAGE) as u32, (src.len() / BLOCK) as u32);
        let grows = input.offset == body.size;
        let index = body.file().expect("check_writable");
        let near = if grows { block_behind(index, page) } else { None };
        index.expect_set(page);
        let full = || Error::new(libc::ENOSPC, "write::plan");
        if core.alloc.cannot_meet(count) {
            return self.write_blocks(node, (body, guard), *input, None, &mut Batch::new(), watch);
        }
        let run = core.alloc.alloc(count, Class::Data, near).ok_or_else(full)?;
        if run.count < count {
            core.free(run, None);
            return self.write_blocks(node, (body, guard), *input, None, &mut Batch::new(), watch);
        }
        watch.did(Phase::Metadata);
        let undo =
            |e| self.undo(&Plan { fresh: Runs::from_slice(&[run]), ..Plan::default() }, Flushed::issued(), e);
        let at = block_addr(run.start);
        let (crc, pending) = if core.verifies(src.len()) {
            let (crc, flushed) = core.media.copy_nt_crc(at, src, 0).map_err(|fault| undo(fault.into()))?;
            (Some(crc), flushed)
        } else {
            core.fence(core.media.copy_nt(at, src).map_err(|fault| undo(fault.into()))?);
            (None, Flushed::issued())
        };
        watch.did(Phase::Copy);
        let (start, len) = (input.offset, src.len() as u64);
        let size = body.size.max(start + len);
        let knew_last = grows && LastLine::of(body).is_some();
        let fields = WriteFields { start, len, size, mtime: input.now, crc, flags: 0 };
        let mut line = [write_line(Some(&Extent { page, count, block: run.start }), &fields)];
        let record = (Type::Write, &mut line[..]);
        let reuse_after = core.reuse_after(guard);
        let replaced = self
            .commit_lines_and(&node.inode, body, record, guard, Class::Data, pending, |body, _| {
                watch.did(Phase::Metadata);
                let index = body.file_mut();
                let mut replaced = Runs::new();
                match if count == 1 { index.replace(page, run.start) } else { None } {
                    Some(old) => replaced.push(Run::new(old, 1)),
                    None => index.set_run(page, count, run.start, false, &mut |old, _| replaced.push(old)),
                }
                if grows {
                    (body.size, body.tail_shared) = (size, false);
                    LastLine::appended(body, src, knew_last);
                }
                (body.mtime, body.ctime) = (input.now, input.now);
                if let (Some(next), None) = (replaced.last(), reuse_after) {
                    core.expect_alloc(*next);
                }
                watch.did(Phase::Index);
                replaced
            })
            .map_err(undo)?;
        watch.did(Phase::Metadata);
        replaced.into_iter().for_each(|old| core.free(old, reuse_after));
        watch.did(Phase::Index);
        Ok((input.offset + len, None))
    }

    /// New blocks for what has none or may not be overwritten; in place behind the end of file and in
    /// reserved blocks.
    #[inline(never)]
    fn write_blocks(
        &self,
        node: &Node,
        (body, guard): (&mut Body, &epoch::Guard),
        input: Input,
        ahead: Option<&mut Ahead<M>>,
        batch: &mut Batch,
        watch: &mut Watch,
    ) -> Result<Written> {
        let (class, block_class) = (input.record_class(), input.block_class());
        let Input { offset, bytes: src, now, engine, .. } = input;
        let inode = &*node.inode;
        let len = src.bytes().len();
        let end = offset + len as u64;
        let whole_pages = (end / PAGE).saturating_sub(offset.div_ceil(PAGE)) as usize * BLOCK;
        let offloads = self.core.mover.takes(engine, whole_pages)
            && batch.is_empty()
            && ahead.is_none()
            && class == Class::Data
            && self.offloads(inode, engine, whole_pages, src);
        let verify = self.core.verifies(len) && !offloads;
        let mut sink = Sink::new(verify.then_some(0), engine);
        sink.parts = offloads.then(Parts::new);
        let mut plan = Plan::default();
        let (start, tail) = match self.zero_tail(body, offset, &mut sink, batch, &mut plan) {
            Ok(done) => done,
            Err(e) => return Err(self.undo(&plan, sink.flushed, e)),
        };
        let (from, to) = if let Some(ahead) = ahead {
            ahead.give(&mut plan, &mut sink);
            (offset, end)
        } else {
            let planned = self.plan(body, (offset, end), block_class, &mut plan);
            watch.did(Phase::Metadata);
            let copied =
                planned.and_then(|in_place| self.copy(body, &plan, in_place, offset, src, &mut sink));
            match copied {
                Ok(range) => range,
                Err(e) => return Err(self.undo(&plan, sink.flushed, e)),
            }
        };
        let size = body.size.max(end);
        let knew_last = LastLine::of(body).is_some();
        let fields = WriteFields {
            start: start.unwrap_or(from),
            len: to - start.unwrap_or(from),
            size,
            mtime: now,
            crc: sink.crc,
            flags: 0,
        };
        let under_way = if sink.parts.is_some() {
            let pages = offset / PAGE..end.div_ceil(PAGE);
            let commit = Commit { pages, extents: &plan.extents, fields, watch };
            match self.write_orderless(node, body, guard, (&mut sink, waits(src)), batch.is_empty(), commit) {
                Ok(under_way) => under_way,
                Err(e) => return Err(self.undo(&plan, sink.flushed, e)),
            }
        } else {
            None
        };
        let pending = if sink.crc.is_none() && under_way.is_none() {
            self.core.fence(sink.flushed);
            Flushed::issued()
        } else {
            sink.flushed
        };
        watch.did(Phase::Copy);
        let committed = if under_way.is_some() {
            Ok(())
        } else if batch.is_empty() && plan.extents.len() <= 1 {
            let mut line = [write_line(plan.extents.first(), &fields)];
            self.commit_lines(inode, body, (Type::Write, &mut line), guard, class, pending).map(drop)
        } else {
            write_records(batch, &plan.extents, &fields);
            self.commit(inode, body, batch, guard, class, pending).map(drop)
        };
        if let Err(e) = committed {
            return Err(self.undo(&plan, Flushed::issued(), e));
        }
        watch.did(Phase::Metadata);
        self.tail_settled(body, tail, self.core.reuse_after(guard));
        let appends = offset == body.size && under_way.is_none() && !self.core.deferring;
        // Where the file grows, its last block was replaced if it was shared.
        body.tail_shared &= size == body.size;
        let index = body.file_mut();
        for e in &plan.extents {
            index.set_run(e.page, e.count, e.block, false, &mut |old, unwritten| {
                // A reserved block was written where it is; and while the copy goes on the old ones are needed.
                if !(unwritten && within(old, *e)) && under_way.is_none() {
                    // Asked anew: what was just stored in halves would be read as a whole, which waits for the fence.
                    self.core.free(old, self.core.reuse_after(guard));
                }
            });
        }
        body.size = size;
        if appends {
            LastLine::appended(body, src.bytes(), knew_last);
        }
        (body.mtime, body.ctime) = (now, now);
        watch.did(Phase::Index);
        Ok((end, under_way))
    }

    /// Stores whole pages in new blocks while somebody else has the file: in front of its lock there is nothing else to do,
    /// and writers of disjoint ranges copy side by side. None where that cannot be known to be what the write needs.
    #[cold]
    fn copy_ahead(
        &self,
        inode: &Inode,
        &Input { offset, bytes: src, engine, .. }: &Input,
    ) -> Result<Option<Ahead<'_, M>>> {
        let core = &self.core;
        let len = src.bytes().len();
        let fits = offset.checked_add(len as u64).is_some_and(|end| end <= FILE_BYTES_MAX);
        let whole_pages = len > 0 && len.is_multiple_of(BLOCK) && offset.is_multiple_of(PAGE) && fits;
        let offloads = core.mover.takes(engine, len) && self.offloads(inode, engine, len, src);
        if !whole_pages || offloads || core.sb.data_in_place || core.ordered {
            return Ok(None);
        }
        let verify = core.verifies(len);
        let (plan, sink) = (Plan::default(), Sink::new(verify.then_some(0), engine));
        let mut ahead = Ahead { core, plan, sink, _counted: Counted::new(&core.ahead) };
        core.check_alive()?;
        let less = |left: u64| left.checked_sub(1);
        if core.ahead_pause.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            return Ok(None);
        }
        // Before it has any: also who gets too few may have had what another needed. Everybody reads what lies beside it.
        if !core.ahead_ever.load(Ordering::Relaxed) {
            core.ahead_ever.store(true, Ordering::Relaxed);
        }
        let plan = &mut ahead.plan;
        // The other way it may do with blocks that are reserved.
        if core.alloc.alloc_all((len / BLOCK) as u32, Class::Data, &mut plan.fresh).is_err() {
            return Ok(None);
        }
        let mut done = 0;
        for run in &plan.fresh {
            let (page, bytes) = ((offset / PAGE) as u32 + (done / BLOCK) as u32, run.count as usize * BLOCK);
            plan.extents.push(Extent { page, count: run.count, block: run.start });
            ahead.sink.store(core, block_addr(run.start), &src.bytes()[done..done + bytes])?;
            done += bytes;
        }
        if ahead.sink.crc.is_none() {
            // Here nobody waits for it.
            core.fence(std::mem::replace(&mut ahead.sink.flushed, Flushed::issued()));
        }
        Ok(Some(ahead))
    }

    /// Waits for those who have blocks before they have their file, and lets nobody do so for a while: one after the other
    /// writers need less room. Whether there ever was one: it may have had what was needed.
    pub(super) fn pause_copies_ahead(&self) -> bool {
        self.core.ahead_pause.store(AHEAD_PAUSE, Ordering::SeqCst);
        self.wait_for_copies_ahead();
        self.core.ahead_ever.load(Ordering::Relaxed)
    }

    pub(super) fn wait_for_fixing(&self) {
        let backoff = Backoff::new();
        while self.core.fixing.load(Ordering::SeqCst) != 0 {
            wait(&backoff);
        }
    }

    pub(super) fn wait_for_copies_ahead(&self) {
        let backoff = Backoff::new();
        while self.core.ahead.load(Ordering::SeqCst) != 0 {
            wait(&backoff);
        }
    }

    /// Whether the record of a write, alone in its operation, is committed before an engine has copied: then it may turn out
    /// not to have happened. Not on an ordinary file: what was synced has to verify until a state line says so durably, and
    /// such a record has no checksum. And not while somebody waits that no such write is under way.
    #[inline(never)]
    fn offloads(&self, inode: &Inode, engine: Via, bytes: usize, src: Lent) -> bool {
        self.core.mover.outlives(engine, bytes, waits(src))
            && !self.core.deferring
            && !self.core.ordered
            && inode.stills.load(Ordering::Relaxed) == 0
    }

    /// Hands over what was put together for an engine, and commits while it copies. None where it has copied, or was waited
    /// for because other records go with the write's: then it is to be committed as any other.
    #[inline(never)]
    fn write_orderless(
        &self,
        node: &Node,
        body: &mut Body,
        guard: &epoch::Guard,
        (sink, waits): (&mut Sink, bool),
        alone: bool,
        commit: Commit,
    ) -> Result<Option<Arc<WriteUnderWay>>> {
        let parts = sink.parts.take().expect("it was put together");
        let flight = self.hand_over(sink.engine, &parts, waits);
        if flight.ended_at_once() || !alone {
            return self.abort_copy(flight).map(|()| None);
        }
        let pending = std::mem::replace(&mut sink.flushed, Flushed::issued());
        self.commit_under_way(node, body, guard, (flight, pending), commit).map(Some)
    }

    #[cold]
    fn undo(&self, plan: &Plan, stored: Flushed, e: Error) -> Error {
        self.core.give_up(plan, stored);
        e
    }

    /// Where a write begins behind the end of file, the bytes between become zeros. In the same block
    /// they belong to the write (the returned offset is where its CRC begins), or the whole block is copied;
    /// in an earlier block they are settled first.
    fn zero_tail(
        &self,
        body: &Body,
        offset: u64,
        sink: &mut Sink,
        batch: &mut Batch,
        plan: &mut Plan,
    ) -> Result<(Option<u64>, Option<Extent>)> {
        let size = body.size;
        if offset <= size || size.is_multiple_of(PAGE) {
            return Ok((None, None));
        }
        if self.core.media.omits("bytes behind the end of file become zeros") {
            return Ok((None, None));
        }
        if offset / PAGE != size / PAGE {
            return Ok((None, self.settle_tail(body, offset, batch, &mut plan.fresh)?));
        }
        match body.file().expect("a file").get((size / PAGE) as u32) {
            Mapping::Written(block) if !body.tail_shared => {
                let zeros = [0; BLOCK];
                let at = block_addr(block).add(size % PAGE);
                sink.store(&self.core, at, &zeros[..(offset - size) as usize])?;
                Ok((Some(size), None))
            }
            _ => Ok((None, None)),
        }
    }

    /// Finds blocks for every page of `[offset, end)`. Returns whether the first page is written in
    /// place, because the write begins at or behind the end of file in its last block.
    fn plan(&self, body: &Body, (offset, end): (u64, u64), class: Class, plan: &mut Plan) -> Result<bool> {
        let index = body.file().expect("check_writable");
        let (mut page, last) = ((offset / PAGE) as u32, ((end - 1) / PAGE) as u32);
        let tail = (body.size / PAGE) as u32;
        let in_place = offset >= body.size && page == tail && last_block(body).is_some();
        if in_place {
            page += 1;
        }
        let mut near = if offset >= body.size { block_behind(index, page) } else { None };
        if offset < body.size {
            index.expect_set(page);
        }
        while page <= last {
            let pages = last - page + 1;
            let (mapping, count) =
                if index.may_have_unwritten() { index.run_at(page, pages) } else { (Mapping::Hole, pages) };
            match mapping {
                Mapping::Unwritten(block) => plan.extents.push(Extent { page, count, block }),
                Mapping::Written(_) | Mapping::Hole => {
                    let from = plan.fresh.len();
                    let full = || Error::new(libc::ENOSPC, "write::plan");
                    if self.core.alloc.cannot_meet(count) {
                        return Err(full());
                    }
                    let run = self.core.alloc.alloc(count, class, near).ok_or_else(full)?;
                    plan.fresh.push(run);
                    if run.count < count {
                        let rest = count - run.count;
                        self.core.alloc.alloc_all(rest, class, &mut plan.fresh).map_err(|_| full())?;
                    }
                    let mut at = page;
                    for run in &plan.fresh[from..] {
                        plan.extents.push(Extent { page: at, count: run.count, block: run.start });
                        at += run.count;
                    }
                }
            }
            near = plan.extents.last().map(|e| Block(e.block.0 + e.count));
            page += count;
        }
        Ok(in_place)
    }

    /// Copies the data, with what the first and last block keep of the old content. Returns the range
    /// of file bytes that were stored.
    fn copy(
        &self,
        body: &Body,
        plan: &Plan,
        in_place: bool,
        offset: u64,
        lent: Lent,
        sink: &mut Sink,
    ) -> Result<(u64, u64)> {
        let src = lent.bytes();
        let index = body.file().expect("check_writable");
        let end = offset + src.len() as u64;
        let mut at = offset;
        if in_place {
            let Mapping::Written(block) = index.get((at / PAGE) as u32) else {
                unreachable!("plan looked");
            };
            let n = (PAGE - at % PAGE).min(end - at);
            let media = block_addr(block).add(at % PAGE);
            // Behind a gap it is another line.
            let last = LastLine::of(body).filter(|_| offset == body.size);
            sink.append(&self.core, media, lent.part(0, n as usize), last)?;
            at += n;
        }
        let from = if in_place { offset } else { offset - offset % PAGE };
        let mut to = end;
        for e in &plan.extents {
            let (first, last) = (e.page as u64 * PAGE, (e.page as u64 + e.count as u64) * PAGE);
            let mut media = block_addr(e.block);
            if at > first {
                // A block that keeps bytes in front of the write.
                let n = (first + PAGE).min(end) - at;
                let kept = self.edge(body, first, &src[..n as usize], at, sink, media)?;
                at += n;
                to = to.max(kept);
                media = media.add(PAGE);
            }
            let whole = (last.min(end) - at) / PAGE * PAGE;
            if whole > 0 {
                let done = (at - offset) as usize;
                sink.store_lent(&self.core, media, lent.part(done, whole as usize))?;
                at += whole;
                media = media.add(whole);
            }
            if at < last.min(end) {
                let done = (at - offset) as usize;
                let kept = self.edge(body, at, &src[done..], at, sink, media)?;
                at = end;
                to = to.max(kept);
            }
        }
        Ok((from, to))
    }

    /// Stores the block of file page `page` (an offset), of which `bytes` at `at` are new and the rest
    /// keeps its old content. Returns the file offset up to which the block has content.
    fn edge(
        &self,
        body: &Body,
        page: u64,
        bytes: &[u8],
        at: u64,
        sink: &mut Sink,
        media: Addr,
    ) -> Result<u64> {
        let mut block = [0; BLOCK];
        let (from, to) = ((at - page) as usize, (at - page) as usize + bytes.len());
        let live = body.size.saturating_sub(page).min(PAGE) as usize;
        if (from > 0 && live > 0 || to < live)
            && let Mapping::Written(old) = body.file().expect("a file").get((page / PAGE) as u32)
        {
            self.core.media.read(block_addr(old), &mut block[..live])?;
        }
        block[from..to].copy_from_slice(bytes);
        let kept = to.max(live);
        let whole = whole_lines(&self.core, media, kept);
        if whole > 0 {
            sink.store(&self.core, media, &block[..whole])?;
        }
        sink.store_tail(&self.core, media.add(whole as u64), &block[whole..kept])?;
        Ok(page + kept as u64)
    }
}

/// Whether `old` lies in the blocks of `e`.
fn within(old: Run, e: Extent) -> bool {
    old.start.0 >= e.block.0 && old.start.0 + old.count <= e.block.0 + e.count
}

fn page_count(at: u64, len: usize) -> u32 {
    ((at % PAGE + len as u64).div_ceil(PAGE)) as u32
}

pub(super) fn check_writable(body: &Body) -> Result<()> {
    if body.dead {
        return Err(Error::new(libc::ESTALE, "write::check_writable"));
    }
    match body.data {
        Data::File(_) if body.fixed => Err(super::fixed::in_use()),
        Data::File(_) => Ok(()),
        Data::Dir(_) => Err(Error::new(libc::EISDIR, "write::check_writable")),
        _ => Err(Error::new(libc::EINVAL, "write::check_writable")),
    }
}

/// The set-id bits that a change of the data by `cred` takes: none from the superuser.
#[inline]
pub(super) fn set_id_that_falls(cred: &Cred, body: &Body) -> u32 {
    if body.mode & (libc::S_ISUID | libc::S_ISGID) == 0 || cred.is_root() {
        return 0;
    }
    body.mode & libc::S_ISUID | set_gid_that_falls(cred, body)
}

/// The set-group-id bit, where it means execution, or where `cred` could not set it (as Linux).
#[inline]
pub(super) fn set_gid_that_falls(cred: &Cred, body: &Body) -> u32 {
    if body.mode & libc::S_IXGRP != 0 || !(cred.is_root() || cred.in_group(body.gid)) {
        body.mode & libc::S_ISGID
    } else {
        0
    }
}

/// The last block of a file that has room behind the end of file, if that may be stored to.
#[inline]
fn last_block(body: &Body) -> Option<Block> {
    let in_block = !body.size.is_multiple_of(PAGE) && !body.tail_shared;
    match body.file().filter(|_| in_block)?.get((body.size / PAGE) as u32) {
        Mapping::Written(block) => Some(block),
        _ => None,
    }
}

/// Whether every page of the range holds data that may be overwritten where it is.
#[inline]
fn all_written(body: &Body, offset: u64, end: u64) -> bool {
    all_mapped(body, offset, end, |mapping| matches!(mapping, Mapping::Written(_)))
}

/// Whether a write changes nothing but blocks that the file has.
fn has_blocks(body: &Body, offset: u64, end: u64) -> bool {
    end <= body.size && all_mapped(body, offset, end, |mapping| mapping != Mapping::Hole)
}

fn all_mapped(body: &Body, offset: u64, end: u64, is: impl Fn(Mapping) -> bool) -> bool {
    let Some(index) = body.file() else { return false };
    let (mut page, last) = ((offset / PAGE) as u32, ((end - 1) / PAGE) as u32);
    while page <= last {
        let (mapping, count) = index.run_at(page, last - page + 1);
        if !is(mapping) {
            return false;
        }
        page += count;
    }
    true
}

/// The fields of a write record.
#[derive(Clone, Copy)]
pub(super) struct WriteFields {
    /// Range of file bytes that the CRC covers; of an offloaded write the ticket.
    pub start: u64,
    pub len: u64,
    pub size: u64,
    pub mtime: u64,
    /// `None`: the data is durable already.
    pub crc: Option<u32>,
    pub flags: u16,
}

/// A write record with at most one extent, as the words of its line.
#[inline]
fn write_line(extent: Option<&Extent>, fields: &WriteFields) -> [u64; 8] {
    let flags = fields.flags | if fields.crc.is_none() { field::write::SETTLED } else { 0 };
    let e = extent.copied().unwrap_or(Extent { page: 0, count: 0, block: Block(0) });
    let (start, len) = match fields.crc {
        Some(_) => (fields.start, fields.len),
        None if fields.flags & field::write::OFFLOADED != 0 => (fields.start, 0),
        None => (0, 0),
    };
    let pair = |low: u32, high: u32| low as u64 | (high as u64) << 32;
    [
        0,
        0,
        start,
        fields.size,
        fields.mtime,
        pair(len as u32, fields.crc.unwrap_or(0)),
        pair(flags as u32 | (extent.is_some() as u32) << 16, e.page),
        pair(e.count, e.block.0),
    ]
}

/// A redo record as words, all zero before.
#[inline]
fn redo_words(words: &mut [u64], offset: u64, mtime: u64, src: &[u8]) {
    words[field::redo::OFFSET / 8] = offset;
    words[field::redo::MTIME / 8] = mtime;
    words[field::redo::LEN / 8] = src.len() as u64;
    put_bytes(words, field::redo::DATA, src);
}

/// Puts the write into `batch`: one record, or several where there are very many extents. The last one
/// carries the CRC over all the data.
pub(super) fn write_records(batch: &mut Batch, extents: &[Extent], fields: &WriteFields) {
    let mut rest = extents;
    loop {
        let (now, later) = rest.split_at(rest.len().min(EXTENTS_PER_RECORD));
        let verified = later.is_empty() && fields.crc.is_some();
        let r = batch.record(Type::Write, write_record_bytes(now.len()));
        put64(r, field::write::SIZE, fields.size);
        put64(r, field::write::MTIME, fields.mtime);
        if verified {
            put64(r, field::write::START, fields.start);
            put32(r, field::write::LEN, fields.len as u32);
            put32(r, field::write::CRC, fields.crc.unwrap_or(0));
        }
        if fields.flags & field::write::OFFLOADED != 0 {
            put64(r, field::write::START, fields.start);
        }
        put16(r, field::write::FLAGS, fields.flags | if verified { 0 } else { field::write::SETTLED });
        put16(r, field::write::EXTENTS, now.len() as u16);
        for (i, e) in now.iter().enumerate() {
            let at = extent_offset(i);
            put32(r, at, e.page);
            put32(r, at + 4, e.count);
            put32(r, at + 8, e.block.0);
        }
        rest = later;
        if rest.is_empty() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::files::{Fd, Files};
    use crate::media::{Domain, Pool, PoolOptions};

    #[test]
    fn a_line_of_words_is_the_record() {
        let e = Extent { page: 0x0102_0304, count: 7, block: Block(0x0a0b_0c0d) };
        let off = field::write::OFFLOADED;
        let given =
            [(vec![e], Some(0xdead_beef), 0), (vec![], Some(1), 0), (vec![e], None, 0), (vec![e], None, off)];
        for (extents, crc, flags) in given {
            let fields = WriteFields { start: 4096, len: 512, size: 1 << 40, mtime: 99, crc, flags };
            let mut batch = Batch::new();
            write_records(&mut batch, &extents, &fields);
            let mut bytes = batch.bytes().to_vec();
            bytes[..HEAD].fill(0);
            let words: Vec<u8> =
                write_line(extents.first(), &fields).iter().flat_map(|w| w.to_le_bytes()).collect();
            assert_eq!(bytes, words);
        }
    }

    /// A pool, and a file of twelve blocks in it.
    fn with_file(domain: Domain) -> (Arc<Fs<Pool>>, Files<Pool>, Fd) {
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let media = Fs::mkfs(Pool::memfd(16 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
        let fs = Fs::open(media, &OpenOptions::default()).unwrap();
        let files = Files::new(fs.clone(), Cred::root(), 0);
        let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.pwrite(fd, &[1; 12 * BLOCK], 0).unwrap();
        (fs, files, fd)
    }

    /// A pool with a file of so many bytes, and another that has the rest of the blocks but `left`.
    fn nearly_full(bytes: usize, left: u64) -> (Arc<Fs<Pool>>, Files<Pool>, Fd, Fd) {
        let (fs, files, _) = with_file(Domain::Memory);
        let make = |name| files.open(name, libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        let (file, rest) = (make(&b"shared"[..]), make(&b"rest"[..]));
        files.pwrite(file, &vec![1; bytes], 0).unwrap();
        let room = (fs.statfs().blocks_free - left) * PAGE;
        files.fallocate(rest, 0, 0, room as i64).unwrap();
        (fs, files, file, rest)
    }

    /// Where there is room for one of them after the other, none is told that there is none.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn those_who_have_blocks_ahead_take_nobody_the_room() {
        const LEN: usize = 64 * BLOCK;
        // Room for one and a half, and for logs.
        let (fs, files, fd, _) = nearly_full(4 * LEN, 100);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let files = &files;
                scope.spawn(move || {
                    for _ in 0..300 {
                        files.pwrite(fd, &[2; LEN], (thread * LEN) as i64).unwrap();
                    }
                });
            }
        });
        assert!(fs.check().unwrap().findings.is_empty());
    }

    /// Where two who write for the first time take what is free in turns, neither has enough.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn the_first_who_has_too_few_blocks_ahead_takes_nobody_the_room() {
        const LEN: usize = 64 * BLOCK;
        for _ in 0..50 {
            // Room for one and a half, no two blocks of it side by side.
            let (_, files, fd, rest) = nearly_full(2 * LEN, 4);
            for hole in 0..96 {
                let at = 2 * hole * BLOCK as i64;
                files
                    .fallocate(rest, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, BLOCK as i64)
                    .unwrap();
            }
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let (files, both) = (&files, &both);
                    scope.spawn(move || {
                        both.wait();
                        for _ in 0..4 {
                            files.pwrite(fd, &[2; LEN], (thread * LEN) as i64).unwrap();
                        }
                    });
                }
            });
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn who_finds_a_file_taken_copies_before_it_has_it() {
        for domain in [Domain::Memory, Domain::PageCache] {
            let (fs, files, fd) = with_file(domain);
            let inode = fs.inode(files.fstat(fd).unwrap().ino).unwrap();
            let free = || fs.core.alloc.stats().free;
            for len in [1, 8] {
                let before = free();
                let taken = inode.body.read();
                std::thread::scope(|scope| {
                    let files = &files;
                    scope.spawn(move || files.pwrite(fd, &vec![2; len * BLOCK], 2 * PAGE as i64).unwrap());
                    // It has blocks before it has the file.
                    while free() + len as u64 > before {
                        std::thread::yield_now();
                    }
                    drop(taken);
                });
                assert!(free() + 2 >= before || fs.core.deferring, "the old ones are free");
            }
            // Its record verifies.
            drop(files);
            drop(inode);
            let options = OpenOptions { power_lost: true, ..OpenOptions::default() };
            let again = Fs::open(fs.abandon().unwrap(), &options).unwrap();
            let files = Files::new(again, Cred::root(), 0);
            let fd = files.open(b"file", libc::O_RDONLY, 0).unwrap();
            let mut bytes = [0; 12 * BLOCK];
            files.pread(fd, &mut bytes, 0).unwrap();
            let wanted = [vec![1; 2 * BLOCK], vec![2; 8 * BLOCK], vec![1; 2 * BLOCK]].concat();
            assert!(bytes[..] == wanted, "{domain:?}");
            assert!(files.fs().check().unwrap().findings.is_empty());
        }
    }

    /// A checkpoint that counted their blocks would lose them.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn a_close_waits_for_those_who_have_blocks_and_no_file_yet() {
        for domain in [Domain::Memory, Domain::PageCache] {
            let (fs, files, fd) = with_file(domain);
            let inode = fs.inode(files.fstat(fd).unwrap().ino).unwrap();
            let free = || fs.core.alloc.stats().free;
            let (before, taken) = (free(), inode.body.read());
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| files.pwrite(fd, &[2; 8 * BLOCK], 0).unwrap_err().errno());
                while free() + 8 > before {
                    std::thread::yield_now();
                }
                let closer = scope.spawn(|| fs.close().unwrap());
                while fs.core.check_alive().is_ok() {
                    std::thread::yield_now();
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!closer.is_finished() && !writer.is_finished());
                drop(taken);
                assert_eq!(writer.join().unwrap(), libc::EIO);
                closer.join().unwrap();
            });
            drop((files, inode));
            let again = Fs::open(fs.abandon().unwrap(), &OpenOptions::default()).unwrap();
            assert!(again.open_report().was_clean);
            assert!(again.check().unwrap().findings.is_empty());
        }
    }

    #[test]
    fn words_of_a_redo_record_are_its_bytes() {
        for len in [1usize, 3, 4, 5, 11, 12, 13, 28, 29, 64, 100, 512] {
            let src: Vec<u8> = (0..len).map(|i| i as u8 | 0x80).collect();
            let mut bytes = vec![0; (field::redo::DATA + len).div_ceil(LINE) * LINE];
            put64(&mut bytes, field::redo::OFFSET, 0x0102_0304_0506);
            put64(&mut bytes, field::redo::MTIME, u64::MAX - 5);
            put16(&mut bytes, field::redo::LEN, len as u16);
            bytes[field::redo::DATA..field::redo::DATA + len].copy_from_slice(&src);
            let mut words = vec![0; bytes.len() / 8];
            redo_words(&mut words, 0x0102_0304_0506, u64::MAX - 5, &src);
            assert_eq!(words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>(), bytes, "{len}");
        }
    }
}
