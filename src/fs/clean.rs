//! Log cleaning: what is live in the oldest part of a log is appended again, then the head moves past that part.
//!
//! It runs at the end of an operation that needed a new segment, under the inode's lock, a little at a
//! time: the pause is that of copying some 60 lines. What a log may waste is bounded: somewhat more than is
//! live, and a little; a directory's twice as much, while the pool has room.
//!
//! **Files** are *swept*: a pass over the index appends the mapping of all pages, some at a time, while the
//! file goes on being used. When it is through, everything that was in the log before it began is dead,
//! unread: what has changed behind its back stands behind its beginning.
//!
//! **Directories** (and extended attributes) are cleaned first in, first out: the oldest segment is read, and
//! the records that DRAM knows as live are appended again. So a remove record can only be dropped after every
//! add record that it cancels is gone from the log (those are older), and nothing else about tombstones
//! needs care. A rename's other half in another log knows by number that this one went past
//! ([`Log::head_seq`]).
//!
//! On an ordinary file a fence makes nothing durable: there the head moves ([`HeadMove`]) once the copies are
//! synced and a durable state line names their epoch, so that nothing in front of them is verified any more:
//! the mapping that it needs may be gone. What the head leaves behind is reused after one more sync.
//!
//! A crash anywhere in between leaves both the old records and their copies; replay takes copies for
//! what they are.
//!
//! [`Log::head_seq`]: super::log::Log::head_seq

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::alloc::Class;
use super::format::*;
use super::index::{PART_PAGES, PageIndex, Part};
use super::inode::{AddRecord, Body, Data, Inode, Xattr};
use super::log::{self, Batch, Segment};
use super::write::{WriteFields, write_records};
use super::*;
use crate::media::{Flushed, LINE};

/// Lines that any log may have before it is cleaned.
const SLACK_LINES: u32 = 192;
/// Lines that a directory's log may have for each live one while there is room: who removes many names in any order copies the
/// less, the more of the oldest segment is dead by then.
const DIRECTORY_LINES_FOR_LIVE: u32 = 3;
/// Times that one operation cleans.
const CLEANINGS_MAX: usize = 2;
/// Steps of one that catches up: more than any but the largest file takes.
const CATCH_UP_STEPS_MAX: usize = 4096;
/// Segments without live records that go at once.
const DEAD_SEGMENTS_MAX: usize = 256;
/// Lines of a segment that are no record's: its head, the link to the next, and the attributes in a log that was cleaned.
const SEGMENT_LINES_OF_ITS_OWN: u32 = 3;
/// A log of so many closed parts is cleaned at once on a full pool, wherever.
const SMALL_LOG_PARTS: usize = 2;
/// With fewer lines that are dead a log is not cleaned on a full pool.
const DEAD_LINES_MIN: u32 = 16;
/// As many lines that are dead are enough to clean a log of any length on a full pool.
const DEAD_LINES_WORTH_IT: u32 = 128;
/// Entries of a directory that are looked through for the oldest of their records.
const ENTRIES_LOOKED_THROUGH_MAX: usize = 256;
/// Runs of pages that a sweep appends for each segment that the log grew; or [`PART_PAGES`] pages, where there
/// are no runs.
const SWEEP_RUNS: usize = 64;
/// Lines of the longest pages record.
const PAGES_LINES: usize = (field::pages::WORDS + 4 * PART_PAGES).div_ceil(LINE);
/// Types of records that may be live. All others only change what later records or DRAM know.
const LIVE_KINDS: u16 =
    Type::Write.bit() | Type::Pages.bit() | Type::Add.bit() | Type::Symlink.bit() | UNSWEPT_KINDS;
/// Of those the ones that no sweep of a file appends again.
const UNSWEPT_KINDS: u16 = Type::Xattr.bit() | Type::Bad.bit();

/// The closed parts at the head of a directory's log that have nothing live.
fn dead_parts(inode: &Inode, body: &Body) -> usize {
    let entries_from = entries_from(body);
    let is_dead = |&(n, part): &(usize, Segment)| match part.kinds & LIVE_KINDS {
        0 => true,
        live => live == Type::Add.bit() && is_before(body.log.seq_behind(n + 1), entries_from),
    };
    body.log.closed(&inode.owner()).enumerate().take(DEAD_SEGMENTS_MAX).take_while(is_dead).count()
}

/// Whether enough of a directory's log is dead for it to be cleaned on a full pool.
fn gains_by_cleaning(inode: &Inode, body: &Body) -> bool {
    let segments = body.log.closed(&inode.owner()).count() as u32 + 1;
    let lines = body.log.lines();
    let dead = lines.saturating_sub(live_lines(body) + SEGMENT_LINES_OF_ITS_OWN * segments);
    body.dir().is_ok() && !body.log.stuck && dead >= (lines / 8).clamp(DEAD_LINES_MIN, DEAD_LINES_WORTH_IT)
}

/// How far the cleaner is with a file.
#[derive(Default)]
pub struct Cleaning {
    /// Nothing of a file's mapping before this record is live: the last sweep began here.
    swept: Option<u32>,
    sweep: Option<Sweep>,
}

/// A sweep under way: the log's next record when it began, and the page it has come to.
#[derive(Clone, Copy)]
struct Sweep {
    from: u32,
    page: u32,
}

/// A log head that waits for its copies' epoch to be named. Slots are reused only later.
pub(super) struct HeadMove {
    epoch: u64,
    slot: Addr,
    head: Addr,
}

impl<M: Media> Fs<M> {
    /// On an ordinary file: moves the heads whose copies are of `epoch` or before, which a durable state line
    /// names. The caller holds the lock of syncs.
    pub(super) fn move_heads(&self, epoch: u64) -> Result<()> {
        let mut waiting = self.core.head_moves.lock();
        // In the order of their pushes: of one log's the last counts.
        for m in waiting.extract_if(.., |m| m.epoch <= epoch) {
            log::swing(&self.core, m.slot, m.head)?.left_to_sync();
        }
        Ok(())
    }

    /// The last step of every operation that appended to the log of `inode`.
    #[inline]
    pub(super) fn tidy_log(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) {
        // A copy of a record would count, whatever becomes of what it copies.
        if !body.writes.any() && body.log.take_grown() {
            self.clean_if_due(inode, body, guard);
        }
    }

    /// Whether writes of this file have to end so that its log can be cleaned: it was put off for as long as it is good.
    #[inline]
    pub(super) fn is_overgrown(&self, body: &Body) -> bool {
        body.log.has_grown() && !body.log.stuck && body.log.lines() > 2 * (SLACK_LINES + 2 * live_lines(body))
    }

    /// Whether a log wastes more than it may: on a pool that is short of room more than its file's mapping takes, else than that takes
    /// where each page has a record.
    fn is_due(&self, body: &Body) -> bool {
        let may_have = match &body.data {
            Data::File(index) if self.core.alloc.is_short() => lines_of_sweep(index),
            Data::Dir(_) if !self.core.alloc.is_short() => DIRECTORY_LINES_FOR_LIVE * live_lines(body),
            _ => 2 * live_lines(body),
        };
        body.log.lines() > SLACK_LINES + may_have
    }

    /// Cleans what was put off while copies were under way, all of it at once: now there are none.
    #[cold]
    pub(super) fn catch_up(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) {
        body.log.take_grown();
        for _ in 0..CATCH_UP_STEPS_MAX {
            if !self.is_due(body) && body.cleaning.sweep.is_none() {
                return;
            }
            if let Err(e) = self.clean_file(inode, body, guard) {
                return put_off(inode, &e);
            }
        }
    }

    #[cold]
    fn clean_if_due(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) {
        if body.log.stuck {
            return;
        }
        if let Data::File(_) = body.data {
            // Others wait for the room. Where the old and the new do not find it together a sweep that stops would take it.
            if self.core.alloc.is_short() {
                let fits = |index| {
                    let room = self.core.alloc.blocks_for_release() * (SEGMENT_LINES - 2);
                    body.log.lines() + lines_of_sweep(index) <= room
                };
                if body.cleaning.sweep.is_some() || self.is_due(body) && body.file().is_some_and(fits) {
                    self.catch_up(inode, body, guard);
                }
                return;
            }
            let cleaned = self.clean_file(inode, body, guard);
            return cleaned.unwrap_or_else(|e| put_off(inode, &e));
        }
        for _ in 0..CLEANINGS_MAX {
            if !self.is_due(body) {
                return;
            }
            match self.clean_oldest(inode, body, guard, true) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) => return put_off(inode, &e),
            }
        }
    }

    /// On a full pool: the whole log of a directory is cleaned, if that gains room in it. A step takes no more than it gives back,
    /// so that what the reserve keeps for this is enough, however many names there are. Whether it is worth trying again.
    /// (On an ordinary file what was freed waits for syncs: [`make_room_over_syncs`](Fs::make_room_over_syncs).)
    #[cold]
    pub(super) fn make_room_in_log(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) -> bool {
        if self.core.deferring || !gains_by_cleaning(inode, body) {
            return false;
        }
        let closed = body.log.closed(&inode.owner()).count();
        self.clean_parts(inode, body, guard, closed) < closed
    }

    /// The same where what was freed waits for syncs: as far as the reserve goes, syncs, and so on to the end. Where the caller
    /// of the operation is to wait for them (`offload::Tries`) that is ENOSPC: the operation is called again, and goes on from there.
    #[cold]
    pub(super) fn make_room_over_syncs(&self, dir: Ino) -> Result<()> {
        let mut left = None;
        while left != Some(0) {
            let before = left;
            let cleaned = {
                let pin = pin();
                let inode = self.inode_pinned(dir, &pin)?;
                let mut body = self.table.change(inode);
                let guard = self.core.enter()?;
                let parts = match left {
                    None if gains_by_cleaning(inode, &body) => body.log.closed(&inode.owner()).count(),
                    None => return Ok(()),
                    Some(left) => left.min(body.log.closed(&inode.owner()).count()),
                };
                let rest = self.clean_parts(inode, &mut body, &guard, parts);
                left = Some(rest);
                rest < parts
            };
            if cleaned && offload::put_off_with_a_part(|| self.syncs_make_room()) {
                return Err(Error::new(libc::ENOSPC, "clean::make_room_over_syncs"));
            }
            // Others may have synced, or nothing could be cleaned.
            if self.has_deferred() {
                self.sync_to_free()?;
            }
            if left == before {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Cleans the `parts` oldest parts of a directory's log as long as there is room; how many are left.
    fn clean_parts(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard, parts: usize) -> usize {
        let mut left = parts;
        while left > 0 {
            // Attributes once: they stand behind all that goes.
            match self.clean_oldest(inode, body, guard, left == parts) {
                Ok(0) => return 0,
                Ok(cleaned) => left = left.saturating_sub(cleaned),
                Err(e) => {
                    put_off(inode, &e);
                    break;
                }
            }
        }
        left
    }

    /// Behind a removal on a pool that is short of room: what is dead in this log may be all that other directories' removals can
    /// have.
    #[cold]
    pub(super) fn give_dead_parts_back(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) {
        if !gains_by_cleaning(inode, body) {
            return;
        }
        let closed = body.log.closed(&inode.owner()).count();
        // Where it is not there at once no more is taken for it than the next removals can do without.
        let parts = match self.core.deferring && closed > SMALL_LOG_PARTS {
            true => dead_parts(inode, body),
            false => closed,
        };
        self.clean_parts(inode, body, guard, parts);
    }

    /// One step of a directory's: of its closed parts those with nothing that could be live go together, unread; else one goes.
    /// How many did.
    fn clean_oldest(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        with_attributes: bool,
    ) -> Result<usize> {
        let dead = dead_parts(inode, body);
        let oldest = body.log.closed(&inode.owner()).next();
        match oldest {
            None => Ok(0),
            Some(_) if dead > 0 => {
                self.move_head(inode, body, guard, Live::default(), dead, with_attributes)?;
                Ok(dead)
            }
            Some(oldest) => {
                self.clean_segment(inode, body, guard, oldest, with_attributes)?;
                Ok(1)
            }
        }
    }

    /// One step: dead parts go, or the sweep goes on.
    fn clean_file(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) -> Result<()> {
        let due = self.is_due(body);
        let swept = body.cleaning.swept;
        let owner = inode.owner();
        let (mut dead, mut oldest) = (0, None);
        for part in body.log.closed(&owner).take(DEAD_SEGMENTS_MAX) {
            let swept = is_before(body.log.seq_behind(dead + 1), swept);
            let live = part.kinds & LIVE_KINDS;
            if !(live == 0 && (swept || due) || live & UNSWEPT_KINDS == 0 && swept) {
                oldest = Some((part, swept));
                break;
            }
            dead += 1;
        }
        match oldest {
            _ if dead > 0 => self.move_head(inode, body, guard, Live::default(), dead, true),
            Some((oldest, true)) => self.clean_segment(inode, body, guard, oldest, true),
            _ if due || body.cleaning.sweep.is_some() => self.sweep(inode, body, guard),
            _ => Ok(()),
        }
    }

    /// See the file's head. Not durable alone, but before the head moves: the fence is for who does that on
    /// another processor.
    fn sweep(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) -> Result<()> {
        // Before records have the same numbers again.
        body.last_line = None;
        let Sweep { from, page } = body.cleaning.sweep.unwrap_or(Sweep { from: body.log.seq(), page: 0 });
        let Body { log, data, .. } = body;
        let Data::File(index) = data else { unreachable!("clean_file looked") };
        let mut runs: [SmallVec<[Extent; SWEEP_RUNS]>; 2] = Default::default();
        let mut appended = Ok(None);
        let next = index.parts_from(page, &mut |part| match part {
            Part::Run(run) => {
                let extents = &mut runs[run.unwritten as usize];
                extents.push(Extent { page: run.page, count: run.count, block: run.block });
                extents.len() < SWEEP_RUNS
            }
            Part::Words { page, words } => {
                let mut lines = [Words::default(); PAGES_LINES];
                let lines = &mut lines[..(field::pages::WORDS + 4 * words.len()).div_ceil(LINE)];
                pages_words(lines.as_flattened_mut(), page, words);
                let record = (Type::Pages, lines);
                let epoch = guard.epoch();
                appended =
                    log.append_lines(&self.core, &inode.owner(), record, epoch, Class::Release).map(Some);
                false
            }
        });
        let flushed = match self.alive_after(appended)? {
            Some((_, flushed)) => flushed,
            None => Flushed::issued(),
        };
        let mut batch = Batch::new();
        for (extents, flags) in runs.iter().zip([0, field::write::UNWRITTEN]) {
            if !extents.is_empty() {
                let flags = flags | field::write::MOVED;
                let fields = WriteFields { start: 0, len: 0, size: 0, mtime: 0, crc: None, flags };
                write_records(&mut batch, extents, &fields);
            }
        }
        // Fenced also where the second append finds no space: the first one's record is in the log, and the
        // next may be appended on another processor.
        let appended = match batch.is_empty() {
            true => Ok(Flushed::issued()),
            false => self.append(inode, body, &mut batch, guard, Class::Release),
        };
        match appended {
            Ok(more) => self.core.fence(flushed.and(more)),
            Err(e) => {
                self.core.fence(flushed);
                return Err(e);
            }
        };
        match next {
            Some(page) => body.cleaning.sweep = Some(Sweep { from, page }),
            None => body.cleaning = Cleaning { swept: Some(from), sweep: None },
        }
        Ok(())
    }

    fn clean_segment(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        oldest: Segment,
        with_attributes: bool,
    ) -> Result<()> {
        let mut live = Live::default();
        let mut buffer = [0; BLOCK];
        let bytes = &mut buffer[..oldest.lines as usize * LINE];
        self.core.media.read(oldest.addr, bytes)?;
        // What is live among them DRAM decides.
        let next = body.log.seq_behind(1).expect("something is behind a closed part");
        log::each_record(self.core.key_crc, &inode.owner(), &oldest, bytes, next, &mut |head, record| {
            live.keep(body, head, record);
        })
        .inspect_err(|e| {
            body.log.stuck = true;
            tracing::error!("{e}");
        })?;
        self.move_head(inode, body, guard, live, 1, with_attributes)
    }

    /// Appends what is live, then lets the `count` oldest parts go. Without attributes only where a record behind these parts has
    /// them.
    fn move_head(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        live: Live,
        count: usize,
        with_attributes: bool,
    ) -> Result<()> {
        self.core.check_stored()?;
        self.keep_times(inode, guard)?;
        let Live { mut batch, copies } = live;
        if with_attributes {
            // They may have been set by any record that goes.
            body.attr_record(inode.atime.load(Ordering::Relaxed), 0, &mut batch);
        }
        let kept_from = body.log.seq_behind(count);
        let flushed = match batch.is_empty() {
            true => Flushed::issued(),
            false => self.append(inode, body, &mut batch, guard, Class::Last)?,
        };
        if with_attributes {
            inode.set_attrs_logged();
        }
        self.core.fence(flushed.and(self.write_back_redone(body, kept_from)));
        for (i, copy) in copies {
            let (seq, lines) = batch.placed(i);
            match copy {
                Copy::Entry(cookie) => {
                    body.dir_mut().set_seq(cookie, seq, lines);
                }
                Copy::Xattr(at) => body.xattrs[at].place(seq, batch.addr(i)),
            }
        }
        let (head, dropped) = body.log.drop_oldest(count);
        let waits = self.core.deferring && !self.core.media.omits("a head waits for its copies");
        let reuse = waits.then(|| {
            // Stored in the sync after the one of this epoch, durable in the one after that, which names
            // the next epoch.
            self.core.head_moves.lock().push(HeadMove { epoch: guard.epoch(), slot: inode.slot, head });
            guard.epoch() + 1
        });
        if reuse.is_none() {
            let swung = log::swing(&self.core, inode.slot, head).inspect_err(|e| self.core.poison(e))?;
            self.core.fence(swung);
        }
        for s in dropped {
            log::release(&self.core, s.addr, s.lines, reuse);
        }
        Ok(())
    }
}

impl<M: Media> Fs<M> {
    /// Writes back what redo records before number `end` stored in place (all of them, if there is none);
    /// the caller fences.
    pub(super) fn write_back_redone(&self, body: &mut Body, end: Option<u32>) -> Flushed {
        let mut pending = Flushed::issued();
        let Some(redone) = &mut body.redone else { return pending };
        while let Some(r) =
            redone.pop_front_if(|r| end.is_none_or(|end| (end.wrapping_sub(r.seq) as i32) > 0))
        {
            // Of a page that went bad the next load says so.
            if let Ok(flushed) = self.core.media.write_back(r.at, r.len as usize) {
                pending = pending.and(flushed);
            }
        }
        pending
    }
}

/// Whether a part of the log ends before this record, if there is one to be before.
fn is_before(end: Option<u32>, record: Option<u32>) -> bool {
    let end = end.expect("something is behind a closed part");
    record.is_some_and(|record| (end.wrapping_sub(record) as i32) <= 0)
}

/// The record before which no entry of a directory has its record, where that is quickly found: so a directory that was
/// emptied drops its log unread.
fn entries_from(body: &Body) -> Option<u32> {
    let Data::Dir(dir) = &body.data else { return None };
    let first = body.log.head_seq();
    let behind = |named: super::dirindex::Named| named.entry.seq.wrapping_sub(first);
    (dir.len() <= ENTRIES_LOOKED_THROUGH_MAX)
        .then(|| dir.iter().map(behind).min().map_or(body.log.seq(), |behind| first.wrapping_add(behind)))
}

/// A full pool is cleaned later; a failed store has poisoned the file system already.
fn put_off(inode: &Inode, e: &Error) {
    tracing::debug!("log of inode {} not cleaned: {e}", inode.ino.0);
}

/// What of a segment must stay.
#[derive(Default)]
struct Live {
    batch: Batch,
    /// Whose record number changes, by the record's index in the batch.
    copies: Vec<(usize, Copy)>,
}

enum Copy {
    Entry(u32),
    Xattr(usize),
}

impl Live {
    fn keep(&mut self, body: &Body, head: &Head, bytes: &[u8]) {
        match (head.kind, &body.data) {
            (Type::Add, Data::Dir(dir)) => {
                let Some(record) = AddRecord::decode(bytes) else { return };
                if dir.by_cookie(record.cookie).is_some_and(|n| n.entry.seq == head.seq) {
                    self.copies.push((self.batch.count(), Copy::Entry(record.cookie)));
                    let flags = field::add::COPIED;
                    AddRecord { replaces: 0, moved: 0, lines: 0, partner: None, flags, ..record }
                        .encode(&mut self.batch);
                }
            }
            (Type::Xattr, _) => {
                if let Some(i) = body.xattrs.iter().position(|x| x.seq == head.seq) {
                    self.copies.push((self.batch.count(), Copy::Xattr(i)));
                    self.copy(head.kind, bytes)[field::xattr::FLAGS] |= field::xattr::COPIED;
                }
            }
            (Type::Symlink | Type::Bad, _) => {
                self.copy(head.kind, bytes);
            }
            _ => {}
        }
    }

    fn copy(&mut self, kind: Type, bytes: &[u8]) -> &mut [u8] {
        let r = self.batch.record(kind, bytes.len());
        r[HEAD..].copy_from_slice(&bytes[HEAD..]);
        r
    }
}

/// A pages record as words, all zero before.
fn pages_words(to: &mut [u64], page: u32, words: &[u32]) {
    let pair = |low: u32, high: u32| low as u64 | (high as u64) << 32;
    to[field::pages::PAGE / 8] = pair(page, words.len() as u32);
    for (to, two) in to[field::pages::WORDS / 8..].iter_mut().zip(words.chunks(2)) {
        *to = pair(two[0], two.get(1).copied().unwrap_or(0));
    }
}

/// Lines that a sweep appends, hardly less than so many.
fn lines_of_sweep(index: &PageIndex) -> u32 {
    let (mut lines, mut runs) = (0, 0);
    index.parts_from(0, &mut |part| {
        match part {
            // With what runs before it leave of a line.
            Part::Words { words, .. } => lines += (field::pages::WORDS + 4 * words.len()).div_ceil(LINE) + 1,
            Part::Run(_) => runs += 1,
        }
        true
    });
    lines as u32 + (runs as u32).div_ceil(field::write::PER_LINE as u32 - 1) + 2
}

/// Lines that the log would have if it held nothing dead, roughly. A file is allowed half a line a page: its log
/// takes at most one in forty bytes of its data, while it is swept.
fn live_lines(body: &Body) -> u32 {
    let data = match &body.data {
        Data::File(index) => (index.mapped() / 2).min(1 << 30) as u32,
        Data::Dir(dir) => dir.live_lines().min(1 << 30) as u32,
        Data::Symlink(target) => (target.len() / LINE) as u32,
        Data::Special(_) => 0,
    };
    let in_record = |x: &Xattr| if x.blocks.is_none() { x.len as usize } else { 0 };
    let xattrs: usize = body.xattrs.iter().map(|x| 1 + (x.name.len() + in_record(x)) / LINE).sum();
    data + xattrs as u32
}
