//! An inode's log: self-validating records, appended with no order between their bytes.
//!
//! The owner of the inode's lock appends; nobody else touches the log. Invariants:
//!
//! 1. `tail` is the line after the last record, `seq` its number, and at least one line (for the link)
//!    follows `room` lines in the segment.
//! 2. `segments` are the log's segments in order, without the lines in the slot; `in_slot` says whether
//!    the log still begins there.
//! 3. An append either places all its records or none: segments are had before a byte is written.
//!
//! A batch of records is one *operation*: all but the last carry [`MORE`], so that recovery takes all
//! of them or none. The caller fences; until then nothing of it counts.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::Core;
use super::alloc::{Block, Class, Mini, Run};
use super::format::{self, *};
use crate::error::{Error, Result};
use crate::media::{Addr, Flushed, LINE, Media, Words, crc32c_words};

/// Later incarnations in which what stands behind a log's end is tried.
const INCARNATIONS_TRIED_MAX: usize = 1 << 12;

/// Whose log it is: what seeds the CRC besides the key.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    pub ino: u32,
    pub generation: u64,
    pub slot: Addr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub addr: Addr,
    pub seq: u32,
    pub lines: u16,
    /// Types of the records in it, a bit each.
    pub kinds: u16,
}

#[derive(Clone, Debug)]
pub struct Log {
    tail: Addr,
    room: u16,
    in_slot: bool,
    seq: u32,
    incarnation: u32,
    seed: u32,
    /// Lines from the head to the tail, links and segment heads included.
    lines: u32,
    /// A segment was added since the cleaner last looked.
    grown: bool,
    /// A record is not what was appended: the log is not cleaned.
    pub stuck: bool,
    /// Types of the records in the slot, a bit each.
    slot_kinds: u16,
    segments: VecDeque<Segment>,
}

/// Records of one operation, in the making.
#[derive(Default)]
pub struct Batch {
    bytes: SmallVec<[u8; 128]>,
    records: SmallVec<[Pending; 3]>,
}

#[derive(Clone, Copy)]
struct Pending {
    kind: Type,
    lines: u32,
    /// Its number and its place, once it was appended.
    seq: u32,
    at: Addr,
}

impl Batch {
    #[inline]
    pub fn new() -> Batch {
        Batch::default()
    }

    /// A zeroed record of at least `bytes` bytes, head included; the caller fills in the rest.
    #[inline]
    pub fn record(&mut self, kind: Type, bytes: usize) -> &mut [u8] {
        let lines = bytes.div_ceil(LINE);
        assert!(lines as u32 <= RECORD_LINES_MAX);
        let from = self.bytes.len();
        self.bytes.resize(from + lines * LINE, 0);
        self.records.push(Pending { kind, lines: lines as u32, seq: 0, at: Addr(0) });
        &mut self.bytes[from..]
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub fn lines(&self) -> u32 {
        (self.bytes.len() / LINE) as u32
    }

    /// The records so far, their heads empty.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Records so far: the index of the next one.
    pub fn count(&self) -> usize {
        self.records.len()
    }

    /// The number of the `i`th record and its lines, after the append.
    pub fn placed(&self, i: usize) -> (u32, u8) {
        (self.records[i].seq, self.records[i].lines as u8)
    }

    /// Where the `i`th record stands, after the append.
    pub fn addr(&self, i: usize) -> Addr {
        self.records[i].at
    }
}

impl Log {
    /// The log of an inode just made: empty, in its slot.
    pub fn new(core_key: u32, owner: &Owner) -> Log {
        let incarnation = format::incarnation(owner.generation);
        Log {
            tail: owner.slot.add(LINE as u64),
            room: (SLOT_LINES - 1) as u16,
            in_slot: true,
            seq: 0,
            incarnation,
            seed: log_seed(core_key, owner.ino, owner.generation, incarnation),
            lines: 0,
            grown: false,
            stuck: false,
            slot_kinds: 0,
            segments: VecDeque::new(),
        }
    }

    /// The number of the next record.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    pub fn lines(&self) -> u32 {
        self.lines
    }

    pub fn segments(&self) -> &VecDeque<Segment> {
        &self.segments
    }

    /// Remembers that the segment at the tail has a record of this type.
    #[inline]
    fn note(&mut self, kind: Type) {
        match self.segments.back_mut() {
            Some(segment) => segment.kinds |= kind.bit(),
            None => self.slot_kinds |= kind.bit(),
        }
    }

    /// Whether a segment was added that the cleaner has not looked at.
    #[inline]
    pub fn has_grown(&self) -> bool {
        self.grown
    }

    /// Whether the log went on in a new segment since this was asked last.
    #[inline]
    pub fn take_grown(&mut self) -> bool {
        std::mem::take(&mut self.grown)
    }

    pub fn heap_bytes(&self) -> usize {
        self.segments.capacity() * size_of::<Segment>()
    }

    /// The number of the first record that the log still holds.
    pub fn head_seq(&self) -> u32 {
        if self.in_slot { 0 } else { self.segments[0].seq }
    }

    #[inline]
    fn wants_seal<M: Media>(&self, core: &Core<M>) -> bool {
        self.incarnation <= core.crashed_mount()
    }

    /// Stores the batch behind the tail. Durable after the caller's fence, void without it.
    ///
    /// ENOSPC leaves the log as it was. EIO (bad media) leaves it undefined: the caller poisons the
    /// file system, and from then on nothing is appended to any log.
    #[inline]
    pub fn append<M: Media>(
        &mut self,
        core: &Core<M>,
        owner: &Owner,
        batch: &mut Batch,
        epoch: u64,
        class: Class,
    ) -> Result<Flushed> {
        debug_assert!(!batch.is_empty());
        core.check_stored()?;
        if batch.lines() > self.room as u32 || self.wants_seal(core) {
            let reserved = self.reserve(core, batch, class)?;
            return self.append_reserved(core, owner, batch, epoch, reserved);
        }
        let mut at = 0;
        let last = batch.records.len() - 1;
        for (i, Pending { kind, lines, seq, at: addr }) in batch.records.iter_mut().enumerate() {
            let record = &mut batch.bytes[at..at + *lines as usize * LINE];
            let more = if i == last { 0 } else { MORE };
            Head::finish(record, self.seq, epoch, *kind as u8 | more, self.seed);
            (*seq, *addr) = (self.seq, self.tail.add(at as u64));
            self.note(*kind);
            self.seq = self.seq.wrapping_add(*lines);
            at += record.len();
        }
        let flushed = core.media.copy_nt(self.tail, &batch.bytes)?;
        self.tail = self.tail.add(at as u64);
        self.room -= batch.lines() as u16;
        self.lines += batch.lines();
        Ok(flushed)
    }

    /// [`append`](Log::append) of one record of few lines, given as words; the head is filled in here. Returns the
    /// record's number, too.
    #[inline]
    pub fn append_lines<M: Media>(
        &mut self,
        core: &Core<M>,
        owner: &Owner,
        (kind, lines): (Type, &mut [Words]),
        epoch: u64,
        class: Class,
    ) -> Result<(u32, Flushed)> {
        core.check_stored()?;
        let count = lines.len() as u16;
        if count > self.room || self.wants_seal(core) {
            let mut batch = Batch::new();
            let record = batch.record(kind, size_of_val(lines));
            for (i, word) in lines.as_flattened().iter().enumerate().skip(HEAD / 8) {
                put64(record, 8 * i, *word);
            }
            let flushed = self.append(core, owner, &mut batch, epoch, class)?;
            return Ok((batch.placed(0).0, flushed));
        }
        let seq = self.seq;
        lines[0][0] = (seq as u64) << 32;
        lines[0][1] = epoch | (kind as u64) << 48 | (count as u64) << 56;
        lines[0][0] |= crc32c_words(lines.as_flattened(), self.seed) as u64;
        let flushed = core.media.store_lines(self.tail, lines)?;
        self.note(kind);
        self.seq = seq.wrapping_add(count as u32);
        self.tail = self.tail.add(size_of_val(lines) as u64);
        self.room -= count;
        self.lines += count as u32;
        Ok((seq, flushed))
    }

    /// [`append`](Log::append) with the segments it needs in hand: it cannot run out of space, so an
    /// operation on two logs reserves for both first.
    pub fn append_reserved<M: Media>(
        &mut self,
        core: &Core<M>,
        owner: &Owner,
        batch: &mut Batch,
        epoch: u64,
        reserved: Reserved,
    ) -> Result<Flushed> {
        let mut fresh = reserved.0.into_iter();
        let appended =
            core.check_stored().and_then(|()| self.append_in(core, owner, batch, epoch, &mut fresh));
        assert!(appended.is_err() || fresh.len() == 0, "an append takes all the segments it reserved");
        Reserved(fresh.collect()).give_back(core);
        appended
    }

    fn append_in<M: Media>(
        &mut self,
        core: &Core<M>,
        owner: &Owner,
        batch: &mut Batch,
        epoch: u64,
        fresh: &mut impl Iterator<Item = (Addr, u16)>,
    ) -> Result<Flushed> {
        let mut flushed = Flushed::issued();
        let last = batch.records.len() - 1;
        let mut at = 0;
        if self.wants_seal(core) {
            flushed = match self.room {
                // There is no room for a seal, and behind a link of the old incarnation its records could count.
                0 => flushed.and(self.link(core, owner, core.mount(), epoch, fresh)?),
                _ => flushed.and(self.seal(core, owner, epoch)?),
            };
        }
        for (i, Pending { kind, lines, seq, at: addr }) in batch.records.iter_mut().enumerate() {
            if *lines > self.room as u32 {
                flushed = flushed.and(self.link(core, owner, self.incarnation, epoch, fresh)?);
            }
            let record = &mut batch.bytes[at..at + *lines as usize * LINE];
            at += record.len();
            let more = if i == last { 0 } else { MORE };
            (*seq, *addr) = (self.seq, self.tail);
            self.note(*kind);
            flushed = flushed.and(self.put(core, record, *kind as u8 | more, epoch)?);
        }
        Ok(flushed)
    }

    /// Stores one record at the tail; there is room.
    fn put<M: Media>(&mut self, core: &Core<M>, record: &mut [u8], kind: u8, epoch: u64) -> Result<Flushed> {
        let lines = (record.len() / LINE) as u32;
        Head::finish(record, self.seq, epoch, kind, self.seed);
        let flushed = core.media.copy_nt(self.tail, record)?;
        self.tail = self.tail.add(record.len() as u64);
        self.seq = self.seq.wrapping_add(lines);
        self.room = self.room.wrapping_sub(lines as u16);
        self.lines += lines;
        Ok(flushed)
    }

    /// Begins a new incarnation, so that no record that a crash left behind the tail ever counts.
    fn seal<M: Media>(&mut self, core: &Core<M>, owner: &Owner, epoch: u64) -> Result<Flushed> {
        let mut record = [0; LINE];
        put32(&mut record, field::seal::INCARNATION, core.mount());
        let flushed = self.put(core, &mut record, Type::Seal as u8, epoch)?;
        self.become_incarnation(core, owner, core.mount());
        Ok(flushed)
    }

    fn become_incarnation<M: Media>(&mut self, core: &Core<M>, owner: &Owner, incarnation: u32) {
        self.incarnation = incarnation;
        self.seed = log_seed(core.key_crc, owner.ino, owner.generation, incarnation);
    }

    /// Seals the log where it ends now, over a record that recovery voided. Needs no segment, because
    /// the voided record (or the link line) stood at the tail.
    pub fn seal_void<M: Media>(&mut self, core: &Core<M>, owner: &Owner, epoch: u64) -> Result<Flushed> {
        assert!(self.room >= 1, "a voided record left its lines behind");
        self.seal(core, owner, epoch)
    }

    /// Gets the segments that the batch (and a seal) will need: all or ENOSPC.
    pub fn reserve<M: Media>(&self, core: &Core<M>, batch: &Batch, class: Class) -> Result<Reserved> {
        let mut fresh = SmallVec::new();
        let mut room = self.room as u32;
        let mut total = self.lines;
        if self.wants_seal(core) && room > 0 {
            (room, total) = (room - 1, total + 1);
        }
        for lines in batch.records.iter().map(|r| r.lines) {
            if lines > room {
                let Some(segment) = allocate(core, lines, total, class) else {
                    Reserved(fresh).give_back(core);
                    return Err(Error::new(libc::ENOSPC, "log::append"));
                };
                fresh.push(segment);
                total += 2;
                room = segment.1 as u32 - 2;
            }
            room -= lines;
            total += lines;
        }
        Ok(Reserved(fresh))
    }

    /// Goes on in the next reserved segment, as this incarnation or as another one.
    fn link<M: Media>(
        &mut self,
        core: &Core<M>,
        owner: &Owner,
        incarnation: u32,
        epoch: u64,
        fresh: &mut impl Iterator<Item = (Addr, u16)>,
    ) -> Result<Flushed> {
        let (addr, segment_lines) = fresh.next().expect("reserve counted the segments");
        let mut record = [0; LINE];
        put64(&mut record, field::link::ADDR, addr.0);
        put32(&mut record, field::link::LINES, segment_lines as u32);
        put32(&mut record, field::link::INCARNATION, incarnation);
        let linked = self
            .put(core, &mut record, Type::Link as u8, epoch)
            .inspect_err(|_| release(core, addr, segment_lines, None))?;
        if incarnation != self.incarnation {
            self.become_incarnation(core, owner, incarnation);
        }
        self.tail = addr;
        self.room = segment_lines - 1;
        self.segments.push_back(Segment { addr, seq: self.seq, lines: segment_lines, kinds: 0 });
        self.grown = true;
        let mut record = [0; LINE];
        put32(&mut record, field::segment::LINES, segment_lines as u32);
        put32(&mut record, field::segment::INCARNATION, self.incarnation);
        let headed = self.put(core, &mut record, Type::Segment as u8, epoch)?;
        Ok(linked.and(headed))
    }

    /// The parts of the log that the cleaner may empty, oldest first: the lines in the slot, then all
    /// segments but the one being written.
    pub fn closed(&self, owner: &Owner) -> impl Iterator<Item = Segment> + '_ {
        let slot = Segment {
            addr: owner.slot.add(LINE as u64),
            seq: 0,
            lines: SLOT_LINES as u16,
            kinds: self.slot_kinds,
        };
        let closed = self.segments.len().saturating_sub(1);
        let in_slot = self.in_slot && !self.segments.is_empty();
        in_slot.then_some(slot).into_iter().chain(self.segments.iter().take(closed).copied())
    }

    /// Where the record of this number stands, which the log still holds.
    pub fn addr_of(&self, owner: &Owner, seq: u32) -> Addr {
        let ahead = |from: u32| seq.wrapping_sub(from) as i32;
        let (from, addr) = match self.segments.iter().rfind(|s| ahead(s.seq) >= 0) {
            Some(segment) => (segment.seq, segment.addr),
            None => (0, owner.slot.add(LINE as u64)),
        };
        addr.add(ahead(from) as u64 * LINE as u64)
    }

    /// The number of the first record that stays when the `count` oldest closed parts go.
    pub fn seq_behind(&self, count: usize) -> Option<u32> {
        self.segments.get(count - self.in_slot as usize).map(|s| s.seq)
    }

    /// Forgets the `count` oldest closed parts, whose live records were appended again. Returns where the log
    /// begins now, for [`swing`], and the segments to be freed once that is durable.
    pub fn drop_oldest(&mut self, count: usize) -> (Addr, SmallVec<[Segment; 4]>) {
        let segments = count - self.in_slot as usize;
        let first = self.segments[segments];
        self.in_slot = false;
        self.lines = self.seq.wrapping_sub(first.seq);
        (first.addr, self.segments.drain(..segments).collect())
    }

    /// Gives all segments back: the inode is gone.
    pub fn free_all<M: Media>(&mut self, core: &Core<M>, epoch: Option<u64>) {
        for s in self.segments.drain(..) {
            release(core, s.addr, s.lines, epoch);
        }
    }
}

/// Segments for an append that is sure to come.
pub struct Reserved(SmallVec<[(Addr, u16); 2]>);

impl Reserved {
    pub fn give_back<M: Media>(self, core: &Core<M>) {
        for (addr, lines) in self.0 {
            release(core, addr, lines, None);
        }
    }
}

/// Lets the log of a slot begin at `head`, with one 8-byte store. What the log has from there on is durable.
pub fn swing<M: Media>(core: &Core<M>, slot: Addr, head: Addr) -> Result<Flushed> {
    let dirty = core.media.store64(slot.add(LOG_HEAD_OFFSET), pack_log_head(head))?;
    Ok(core.media.flush(dirty))
}

/// A segment that holds a record of `lines` lines: small while the log is small.
fn allocate<M: Media>(core: &Core<M>, lines: u32, total: u32, class: Class) -> Option<(Addr, u16)> {
    if total < 3 * MINI_LINES
        && lines <= MINI_LINES - 2
        && let Some(mini) = core.alloc.alloc_mini(class)
        // A part of a bad block stays taken.
        && !core.media.is_bad(mini.block)
    {
        return Some((mini_addr(mini), MINI_LINES as u16));
    }
    let run = core.alloc.alloc(1, class, None)?;
    Some((block_addr(run.start), SEGMENT_LINES as u16))
}

/// Frees a segment: at once, or once `epoch` is synced.
pub fn release<M: Media>(core: &Core<M>, addr: Addr, lines: u16, epoch: Option<u64>) {
    if lines as u32 == MINI_LINES {
        if core.media.is_bad(addr_mini(addr).block) {
            return;
        }
        match epoch {
            None => core.alloc.free_mini(addr_mini(addr)),
            Some(e) => core.alloc.free_mini_deferred(addr_mini(addr), e),
        }
        core.check_freed();
    } else {
        core.free(Run { start: Block((addr.0 / BLOCK as u64) as u32), count: 1 }, epoch);
    }
}

#[inline]
pub fn block_addr(block: Block) -> Addr {
    Addr(block.0 as u64 * BLOCK as u64)
}

pub fn mini_addr(mini: Mini) -> Addr {
    block_addr(mini.block).add(mini.slot as u64 * MINI as u64)
}

pub fn addr_mini(addr: Addr) -> Mini {
    Mini { block: Block((addr.0 / BLOCK as u64) as u32), slot: (addr.0 % BLOCK as u64 / MINI as u64) as u8 }
}

// ---------------------------------------------------------------------------------------------------
// Reading

/// A record as read: its bytes are a private copy, so they cannot change under the reader.
pub struct Record<'a> {
    pub kind: Type,
    pub seq: u32,
    pub epoch: u64,
    pub bytes: &'a [u8],
    /// Where it stands on media.
    pub addr: Addr,
    /// The name that it added went since, without a record.
    pub withdrawn: bool,
}

/// The records of one operation.
#[derive(Default)]
pub struct Op {
    bytes: Vec<u8>,
    records: SmallVec<[Read; 3]>,
    before: Option<Mark>,
}

#[derive(Clone, Copy)]
struct Read {
    kind: Type,
    seq: u32,
    epoch: u64,
    /// Its bytes in the operation's.
    from: u32,
    to: u32,
    addr: Addr,
    withdrawn: bool,
}

/// A point in a log to which recovery may cut it back.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    tail: Addr,
    room: u16,
    in_slot: bool,
    seq: u32,
    incarnation: u32,
    seed: u32,
    lines: u32,
    segments: usize,
}

impl Op {
    pub fn records(&self) -> impl Iterator<Item = Record<'_>> {
        self.records.iter().map(|r| Record {
            kind: r.kind,
            seq: r.seq,
            epoch: r.epoch,
            bytes: &self.bytes[r.from as usize..r.to as usize],
            addr: r.addr,
            withdrawn: r.withdrawn,
        })
    }

    pub fn epoch(&self) -> u64 {
        self.records.iter().map(|r| r.epoch).max().unwrap_or(0)
    }

    /// Whether a name that it added was withdrawn, by somebody who had found it complete.
    pub fn was_withdrawn(&self) -> bool {
        self.records.iter().any(|r| r.withdrawn)
    }

    /// Number of the operation's first record.
    pub fn seq(&self) -> u32 {
        self.records[0].seq
    }

    /// The log's end without this operation and all behind it.
    pub fn begin(&self) -> Mark {
        self.before.expect("an operation that was read knows where it began")
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.records.clear();
        self.before = None;
    }
}

/// The records of a closed part of a log, as they stand in `bytes`, up to the link that leads to number `next`. EUCLEAN where
/// one is not what was appended: who copies what is live would make that valid, and who leaves it out would lose it.
pub fn each_record(
    key_crc: u32,
    owner: &Owner,
    part: &Segment,
    bytes: &[u8],
    next: u32,
    each: &mut dyn FnMut(&Head, &[u8]),
) -> Result<()> {
    let changed = || damaged(owner, "a record of its log is not what was appended");
    let seed_of = |incarnation| log_seed(key_crc, owner.ino, owner.generation, incarnation);
    let mut seed = seed_of(match part.addr == owner.slot.add(LINE as u64) {
        true => incarnation(owner.generation),
        false => get32(bytes, field::segment::INCARNATION),
    });
    let (mut at, mut seq) = (0, part.seq);
    loop {
        let head = bytes.get(at..at + LINE).and_then(Head::decode).filter(|head| head.seq == seq);
        let mut head = head.ok_or_else(changed)?;
        let record = bytes.get(at..at + head.lines as usize * LINE).ok_or_else(changed)?;
        if !head.holds(record, seed) {
            return Err(changed());
        }
        at += record.len();
        seq = seq.wrapping_add(head.lines);
        match head.kind {
            Type::Link if seq == next => return Ok(()),
            Type::Link => return Err(changed()),
            Type::Seal => seed = seed_of(get32(record, field::seal::INCARNATION)),
            _ => {}
        }
        each(&head, record);
    }
}

/// Reads a log from its head, operation by operation.
pub struct Reader<'a, M: Media> {
    core: &'a Core<M>,
    owner: Owner,
    /// The log up to the last operation returned; its tail is where reading goes on.
    log: Log,
    buffer: Box<[u8; BLOCK]>,
    /// What part of media the buffer holds.
    buffered: (Addr, usize),
    /// Reads on behind a damaged record.
    salvaging: bool,
    /// The highest epoch among the records read.
    newest: u64,
}

impl<'a, M: Media> Reader<'a, M> {
    /// EUCLEAN where the log's head is damaged.
    pub fn new(core: &'a Core<M>, owner: Owner) -> Result<Self> {
        Reader::begin(core, owner, false, false)
    }

    /// As before the log was found damaged, if it was.
    pub fn even_condemned(core: &'a Core<M>, owner: Owner) -> Result<Self> {
        Reader::begin(core, owner, false, true)
    }

    /// For a damaged log: what can be read of it, damaged records left out, is read without an error.
    pub fn salvage(core: &'a Core<M>, owner: Owner) -> Result<Self> {
        Reader::begin(core, owner, true, true)
    }

    fn begin(core: &'a Core<M>, owner: Owner, salvaging: bool, even_condemned: bool) -> Result<Self> {
        let mut log = Log::new(core.key_crc, &owner);
        let mut reader = {
            let mut word = core.media.load64(owner.slot.add(LOG_HEAD_OFFSET))?;
            if is_condemned(word) {
                if !even_condemned {
                    return Err(damaged(&owner, "its log was found damaged when the pool was opened"));
                }
                word ^= LOG_CONDEMNED;
            }
            if word != 0 {
                let addr = unpack_log_head(word)
                    .filter(|a| core.holds(*a, MINI))
                    .ok_or_else(|| damaged(&owner, "its log head is not a log address"))?;
                log.tail = addr;
                log.in_slot = false;
            }
            let (buffer, buffered) = (Box::new([0; BLOCK]), (Addr(0), 0));
            Reader { core, owner, log, buffer, buffered, salvaging, newest: 0 }
        };
        if !reader.log.in_slot {
            let (segment, incarnation) = reader
                .segment_at(reader.log.tail, None)?
                .ok_or_else(|| damaged(&owner, "the first segment of its log is damaged"))?;
            reader.enter(segment, incarnation);
        }
        Ok(reader)
    }

    fn enter(&mut self, segment: Segment, incarnation: u32) {
        if incarnation != self.log.incarnation {
            self.become_incarnation(incarnation);
        }
        self.log.tail = segment.addr.add(LINE as u64);
        self.log.room = segment.lines - 2;
        self.log.seq = segment.seq.wrapping_add(1);
        self.log.lines += 1;
        self.log.segments.push_back(segment);
    }

    /// The segment whose head stands at `addr`, if it is one (with number `seq`, if given).
    fn segment_at(&mut self, addr: Addr, seq: Option<u32>) -> Result<Option<(Segment, u32)>> {
        let mut line = [0; LINE];
        self.core.media.read(addr, &mut line)?;
        let lines = get32(&line, field::segment::LINES);
        let incarnation = get32(&line, field::segment::INCARNATION);
        let seed = log_seed(self.core.key_crc, self.owner.ino, self.owner.generation, incarnation);
        let matches = crate::media::crc32c(&line[4..], seed) == get32(&line, 0);
        let matches = self.core.media.verified(&[(addr, LINE)], matches);
        let Some(head) = Head::decode(&line) else { return Ok(None) };
        let valid = head.kind == Type::Segment
            && head.lines == 1
            && matches
            && seq.is_none_or(|s| s == head.seq)
            && (lines == MINI_LINES || lines == SEGMENT_LINES)
            && addr.0.is_multiple_of(lines as u64 * LINE as u64)
            && self.core.holds(addr, lines as usize * LINE);
        Ok(valid.then_some((Segment { addr, seq: head.seq, lines: lines as u16, kinds: 0 }, incarnation)))
    }

    /// The next whole operation into `op`; false at the end of the log.
    pub fn next(&mut self, op: &mut Op) -> Result<bool> {
        op.clear();
        let mut before = None;
        loop {
            let mark = self.mark();
            let Some(head) = self.peek()? else {
                if let Some((lines, incarnation)) = self.gap()? {
                    if !self.salvaging {
                        return Err(damaged(&self.owner, "a record in the middle of its log is damaged"));
                    }
                    self.advance(lines);
                    self.become_incarnation(incarnation);
                    continue;
                }
                if self.salvaging && before.is_some() {
                    op.before = before;
                    return Ok(true);
                }
                self.rewind(before.unwrap_or(mark)); // an operation cut short never happened
                return Ok(false);
            };
            self.newest = self.newest.max(head.epoch);
            let (from, len) = (self.at(), head.lines as usize * LINE);
            match head.kind {
                Type::Link => {
                    let addr = Addr(get64(&self.buffer[from..], field::link::ADDR));
                    let its = get32(&self.buffer[from..], field::link::INCARNATION);
                    let next = if addr.0.is_multiple_of(MINI as u64) && self.core.holds(addr, MINI) {
                        self.segment_at(addr, Some(head.seq.wrapping_add(1)))?.filter(|&(_, incarnation)| {
                            incarnation == its || self.core.media.omits("a link leads to its own incarnation")
                        })
                    } else {
                        None
                    };
                    if next.is_none() && self.is_certain(&head, its) {
                        return Err(damaged(&self.owner, "a segment of its log is damaged"));
                    }
                    let Some((segment, incarnation)) = next else {
                        self.rewind(before.unwrap_or(mark));
                        return Ok(false); // the link is durable, what it names is not
                    };
                    self.log.lines += 1;
                    if incarnation != self.log.incarnation {
                        op.clear(); // as a seal does
                        before = None;
                    }
                    self.enter(segment, incarnation);
                }
                Type::Seal => {
                    let incarnation = get32(&self.buffer[from..], field::seal::INCARNATION);
                    self.advance(1);
                    self.become_incarnation(incarnation);
                    // A seal ends whatever stood before it.
                    op.clear();
                    before = None;
                }
                Type::Segment => return Err(damaged(&self.owner, "a segment head stands among its records")),
                kind => {
                    before = before.or(Some(mark));
                    let start = op.bytes.len() as u32;
                    op.bytes.extend_from_slice(&self.buffer[from..from + len]);
                    let addr = self.log.tail;
                    op.records.push(Read {
                        kind,
                        seq: head.seq,
                        epoch: head.epoch,
                        from: start,
                        to: start + len as u32,
                        addr,
                        withdrawn: head.withdrawn,
                    });
                    self.log.note(kind);
                    self.advance(head.lines);
                    if !head.more {
                        op.before = before;
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// The log as read so far; at the end, ready for appending.
    pub fn into_log(self) -> Log {
        self.log
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    pub fn newest(&self) -> u64 {
        self.newest
    }

    fn become_incarnation(&mut self, incarnation: u32) {
        self.log.become_incarnation(self.core, &self.owner, incarnation);
    }

    fn advance(&mut self, lines: u32) {
        self.log.tail = self.log.tail.add(lines as u64 * LINE as u64);
        self.log.seq = self.log.seq.wrapping_add(lines);
        self.log.room -= lines as u16;
        self.log.lines += lines;
    }

    fn mark(&self) -> Mark {
        let l = &self.log;
        Mark {
            tail: l.tail,
            room: l.room,
            in_slot: l.in_slot,
            seq: l.seq,
            incarnation: l.incarnation,
            seed: l.seed,
            lines: l.lines,
            segments: l.segments.len(),
        }
    }

    /// Cuts the log back.
    pub fn rewind(&mut self, to: Mark) {
        let l = &mut self.log;
        l.tail = to.tail;
        l.room = to.room;
        l.in_slot = to.in_slot;
        l.seq = to.seq;
        l.incarnation = to.incarnation;
        l.seed = to.seed;
        l.lines = to.lines;
        l.segments.truncate(to.segments);
    }

    /// Offset of the tail in the buffer.
    fn at(&self) -> usize {
        (self.log.tail.0 - self.buffered.0.0) as usize
    }

    /// Whether all of a record's operation was on media when the pool was opened; of a link, with the incarnation that it names,
    /// what it leads to. Not where a crash before the last mount may have left records behind a torn one: their epochs were
    /// named since.
    fn is_certain(&self, head: &Head, incarnation: u32) -> bool {
        incarnation > self.core.found.crashed && head.epoch <= self.core.found.settled
    }

    /// Lines from the tail to the next record that is certain (in a damaged log: that is whole), and the incarnation that it is of:
    /// what stood there was a record once, or the seal behind which that one begins.
    fn gap(&mut self) -> Result<Option<(u32, u32)>> {
        let room = self.log.room as usize;
        let (own, seed) = (self.log.incarnation, self.log.seed);
        let since = if self.salvaging { own } else { own.max(self.core.found.crashed) };
        let later = (since.saturating_add(1)..=self.core.found.mount).rev().take(INCARNATIONS_TRIED_MAX);
        for ahead in 1..=room {
            let seq = self.log.seq.wrapping_add(ahead as u32);
            let mut found = self.record_at(ahead, seq, seed)?.map(|head| (head, own));
            if found.is_none() {
                let at = self.at() + ahead * LINE;
                let is_numbered = Head::decode(&self.buffer[at..at + LINE]).is_some_and(|h| h.seq == seq);
                for its in later.clone().take_while(|_| is_numbered) {
                    let seed = log_seed(self.core.key_crc, self.owner.ino, self.owner.generation, its);
                    found = self.record_at(ahead, seq, seed)?.map(|head| (head, its));
                    if found.is_some() {
                        break;
                    }
                }
            }
            if let Some((_, its)) = found.filter(|(head, its)| self.salvaging || self.is_certain(head, *its))
            {
                return Ok(Some((ahead as u32, its)));
            }
        }
        Ok(None)
    }

    /// The valid record at the tail, if there is one; its bytes are in the buffer.
    fn peek(&mut self) -> Result<Option<Head>> {
        self.record_at(0, self.log.seq, self.log.seed)
    }

    /// The record with number `seq` that begins `ahead` lines behind the tail, fits there and is valid in the incarnation of that
    /// seed.
    fn record_at(&mut self, ahead: usize, seq: u32, seed: u32) -> Result<Option<Head>> {
        let left = self.log.room as usize + 1 - ahead; // the link's line belongs to the segment too
        let fits = |head: &Head| match head.kind {
            Type::Link => head.lines == 1,
            _ => (head.lines as usize) < left,
        };
        self.fill(ahead + 1)?;
        let at = self.at() + ahead * LINE;
        let mut found = match Head::decode(&self.buffer[at..at + LINE]) {
            Some(head) if head.seq == seq && fits(&head) => Some(head),
            _ => None,
        };
        let count = found.as_ref().map_or(1, |head| head.lines as usize);
        self.fill(ahead + count)?;
        let at = self.at() + ahead * LINE;
        let bytes = &self.buffer[at..at + count * LINE];
        let matches = found.as_mut().is_some_and(|head| head.holds(bytes, seed));
        let from = self.log.tail.add((ahead * LINE) as u64);
        let matches = self.core.media.verified(&[(from, count * LINE)], matches);
        Ok(found.filter(|_| matches))
    }

    /// Brings this many lines from the tail on into the buffer, with all behind them in the segment.
    fn fill(&mut self, lines: usize) -> Result<()> {
        let tail = self.log.tail;
        let (from, len) = self.buffered;
        if from.0 <= tail.0 && tail.0 + (lines * LINE) as u64 <= from.0 + len as u64 {
            return Ok(());
        }
        let wanted = lines * LINE;
        let room = (self.log.room as usize + 1) * LINE;
        if M::OBSERVED && from.0 <= tail.0 && tail.0 <= from.0 + len as u64 && len + wanted <= BLOCK {
            // What is there already was looked at already.
            let (end, ahead) = (from.add(len as u64), (tail.0 - from.0) as usize);
            let certain = self.core.media.certain(end, (ahead + room).min(BLOCK).saturating_sub(len));
            let more = (ahead + wanted - len).max(certain);
            self.core.media.read(end, &mut self.buffer[len..len + more])?;
            self.buffered = (from, len + more);
            return Ok(());
        }
        let mut bytes = if M::OBSERVED { self.core.media.certain(tail, room).max(wanted) } else { room };
        if self.core.media.read(tail, &mut self.buffer[..bytes]).is_err() {
            // What stands in front of a line that cannot be read is read all the same.
            bytes = lines * LINE;
            self.core.media.read(tail, &mut self.buffer[..bytes])?;
        }
        self.buffered = (tail, bytes);
        Ok(())
    }
}

#[cold]
pub fn damaged(owner: &Owner, what: &str) -> Error {
    Error::message(
        libc::EUCLEAN,
        "log::read",
        format!("inode {} is damaged: {what}; lode fsck --repair keeps what validates", owner.ino),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::fs::{Fs, Ino, MkfsOptions, OpenOptions, inode};
    use crate::media::Domain;
    use crate::sim::machine::Machine;
    use crate::sim::media::{CrashPoint, Keep, SimMedia};
    use crate::sim::model::Model;
    use crate::sim::workload::{ACE, Line};

    /// The incarnation's generation and the numbers of the operations in a log, as the media has them.
    fn operations(fs: &Fs<SimMedia>, ino: u32) -> Option<(u64, Vec<u32>)> {
        let slot = fs.slot(ino).ok()?;
        let generation = inode::read_header(&fs.core, ino, slot).ok()??.generation;
        let mut reader = Reader::new(&fs.core, Owner { ino, generation, slot }).ok()?;
        let (mut op, mut found) = (Op::default(), Vec::new());
        while reader.next(&mut op).ok()? {
            found.push(op.seq());
        }
        Some((generation, found))
    }

    /// What the logs hold if the failure keeps these stores. Read only: nothing is voided on media.
    fn logs(point: &CrashPoint, keep: Keep) -> Vec<Option<(u64, Vec<u32>)>> {
        let options =
            OpenOptions { read_only: true, no_ticker: true, power_lost: true, ..OpenOptions::default() };
        let fs = Fs::open(point.media(keep), &options).expect("it opens");
        (1..fs.slot_count.load(std::sync::atomic::Ordering::Relaxed))
            .map(|ino| operations(&fs, ino))
            .collect()
    }

    /// The one-fence rule: whatever fails, of each log only the last operation can be in doubt.
    #[test]
    fn only_the_last_operation_of_a_log_can_be_in_doubt() {
        let mut looked_at = 0;
        for domain in [Domain::Memory, Domain::CpuCache] {
            let began = Machine::begin();
            let empty = Fs::mkfs(SimMedia::new(vec![0; 1 << 20], domain), &MkfsOptions::default()).unwrap();
            let mut machine = Machine::new(empty.copy(), Model::new(began), 0).unwrap();
            let points: Arc<Mutex<Vec<CrashPoint>>> = Arc::default();
            for text in ACE.iter().filter(|text| !text.contains("reopen")) {
                let line: Line = text.parse().unwrap();
                let needs = line.needs.iter().flat_map(|need| need.bring_about(&machine.model));
                for op in needs.collect::<Vec<_>>() {
                    machine.apply(&op).unwrap().ok();
                }
                for op in line.ops.iter().flat_map(crate::sim::workload::Op::steps) {
                    let kept = points.clone();
                    machine.fs().media().record(Some(Box::new(move |p| kept.lock().push(p.clone()))));
                    machine.apply(&op).unwrap().ok();
                    machine.fs().media().record(None);
                    for point in points.lock().drain(..).filter(|p| p.lines() > 0) {
                        looked_at += 1;
                        check(&point, &op);
                    }
                }
            }
        }
        assert!(looked_at > 200, "{looked_at} crash points");
    }

    fn check(point: &CrashPoint, op: &crate::sim::workload::Op) {
        let sure = logs(point, Keep::Nothing);
        for (n, (all, sure)) in logs(point, Keep::Everything).into_iter().zip(sure).enumerate() {
            let (Some((generation, all)), Some((old, sure))) = (all, sure) else { continue };
            let Some(last) = sure.last().filter(|_| generation == old) else { continue };
            let doubtful = all.iter().filter(|seq| (seq.wrapping_sub(*last) as i32) > 0).count();
            assert!(
                doubtful <= 1,
                "{op}: {doubtful} operations of inode {} are in doubt",
                Ino(n as u32 + 1).0
            );
        }
    }
}
