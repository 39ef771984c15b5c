//! Formatting, opening and closing.
//!
//! Opening looks at everything before it stores anything, so that a heap that is refused is as it was:
//!
//! 1. Header and state line.
//! 2. Every line of every ring: the records with numbers above the settled one, in the order of their numbers.
//! 3. What they do, in DRAM, over what the media hold. Words in an object that a *later* record frees are left out: the
//!    space may have been filled again since.
//! 4. Descriptors and roots, seen through 3: their checks, and that they agree.
//! 5. The records are made durable, if a process was killed before it did that. The words of 3 are stored and made durable; then
//!    the state line names their numbers as settled. A crash before that leaves the same records, and the next opening does the same.
//!
//! The time grows with the number of chunks, the bits of those that are runs, and the roots; not with the objects.

use std::collections::BTreeMap;
use std::ops::Range;

use super::alloc::Allocator;
use super::format::*;
use super::lane::{Group, Lane};
use super::roots::{Root, Roots};
use super::{Heap, Offset, damaged, invalid};
use crate::error::{Error, Result};
use crate::media::{Addr, Domain, Flushed, LINE, Media};
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicBool, AtomicU64};

use crossbeam_utils::CachePadded;

const FORMAT: &str = "heap::format";
const OPEN: &str = "heap::open";

/// What making a heap decides.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// At most 63 bytes.
    pub label: String,
    /// The address at which it is mapped always; 0: anywhere.
    pub base: u64,
    /// None: by the heap's size.
    pub shape: Option<Shape>,
    /// Also where something is.
    pub force: bool,
    /// For simulations: identity and key by number instead of by chance, and no date.
    pub identity: Option<u64>,
}

/// What a heap says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    pub label: String,
    pub uuid: [u8; 16],
    pub format_version: u32,
    pub bytes: u64,
    /// The address at which it is mapped always.
    pub base: Option<u64>,
    pub shape: Shape,
    /// Seconds since 1970.
    pub created: u64,
    /// Openings so far.
    pub generation: u64,
    /// Its last user closed it.
    pub closed: bool,
}

/// What opening found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Opened {
    /// The last user closed it.
    pub was_closed: bool,
    /// Commits that were applied again.
    pub records: u64,
    /// A copy of the header was damaged, and written anew.
    pub header_mended: bool,
}

/// A heap's records, lanes and roots, where nobody says otherwise.
fn usual_shape(bytes: u64) -> Shape {
    let mib = bytes >> 20;
    Shape {
        lanes: (mib / 4).clamp(2, 64) as u16,
        ring_lines: if mib < 4 { 32 } else { 128 },
        roots: (mib * 16).clamp(16, 4096) as u32,
    }
}

impl<M: Media> Heap<M> {
    /// Makes an empty heap of all of the media, and opens it. EEXIST where something is (in the first block, or of a heap
    /// at the end) and `force` is not set.
    pub fn format(media: M, options: &FormatOptions) -> Result<Heap<M>> {
        let bytes = media.len() / BLOCK * BLOCK;
        let shape = options.shape.unwrap_or_else(|| usual_shape(bytes));
        let header = Header {
            version: VERSION,
            uuid: identity(options, 0)?,
            key: identity(options, 1)?,
            bytes,
            base: options.base,
            created: if options.identity.is_some() { 0 } else { now() },
            shape,
            label: options.label.clone(),
        };
        let layout = checked_layout(&header)?;
        if !options.force {
            refuse_to_replace(&media)?;
        }
        let durable = |flushed: Flushed| {
            media.fence(flushed);
            media.sync().map_err(|e| Error::message(libc::EIO, FORMAT, format!("cannot sync the heap: {e}")))
        };
        // What was there ends before anything of it changes.
        let none = [0; header::BYTES];
        let ended = media.copy_nt(Addr(0), &none)?.and(media.copy_nt(layout.headers()[1], &none)?);
        durable(ended)?;
        let stored = write_empty(&media, &header, &layout)?;
        durable(stored)?;
        let [first, second] = layout.headers();
        let encoded = header.encode();
        durable(media.copy_nt(first, &encoded)?.and(media.copy_nt(second, &encoded)?))?;
        Heap::open(media)
    }

    /// What the header and the state line say, without opening the heap or changing anything.
    pub fn probe(media: &M) -> Result<Info> {
        let (header, layout, _) = read_header(media)?;
        let state = read_state(media, &header, &layout)?;
        Ok(info(&header, &state))
    }

    pub fn info(&self) -> Info {
        info(&self.header, &self.state.lock())
    }

    /// What opening found.
    pub fn opened(&self) -> Opened {
        self.opened
    }

    /// What is in use, and of how much.
    pub fn usage(&self) -> super::Usage {
        self.alloc.usage()
    }

    /// Opens it; commits that a crash interrupted behind their fence are finished. EINVAL where no heap is or the file
    /// was cut, EOPNOTSUPP for a later format, EUCLEAN for damage, EADDRINUSE where it is not mapped in its place,
    /// EROFS on media for reading only: after these nothing has changed. EIO for bad media: that may show when
    /// interrupted commits are finished, of which some words are stored then; the next opening does all of it again.
    pub fn open(media: M) -> Result<Heap<M>> {
        if media.is_read_only() {
            return Err(Error::message(libc::EROFS, OPEN, "a heap cannot be opened for reading only"));
        }
        let (header, layout, header_damaged) = read_header(&media)?;
        check_place(&media, &header)?;
        let keys = header.keys();
        let found = read_state(&media, &header, &layout)?;
        if found.serial + 2 >= NUMBER_MAX || found.settled + (1 << 32) >= NUMBER_MAX {
            return Err(damaged(OPEN, "it claims to have been used longer than there is time".into()));
        }
        let rings = read_rings(&media, &layout, keys, found.settled)?;
        let mut view = View { media: &media, layout: &layout, keys, words: BTreeMap::new() };
        view.apply(&rings.records)?;
        let alloc = view.allocator()?;
        let roots = view.roots()?;
        let words = view.words;
        let settled = rings.records.last().map_or(rings.settled, |record| record.number);
        let state =
            State { serial: found.serial + 1, generation: found.generation + 1, settled, closed: false };
        let lanes = (0..layout.shape.lanes)
            .map(|_| CachePadded::new(Mutex::new(Lane::new(layout.shape.ring_lines, settled))));
        let mut heap = Heap {
            lanes: lanes.collect(),
            next: CachePadded::new(AtomicU64::new(settled + 1)),
            settled: CachePadded::new(AtomicU64::new(settled)),
            state: Mutex::new(state),
            group: Group::default(),
            failed: AtomicBool::new(false),
            opened: Opened {
                was_closed: found.closed,
                records: rings.records.len() as u64,
                header_mended: header_damaged,
            },
            roots: Mutex::new(Roots::new(roots)),
            media,
            header,
            layout,
            keys,
            alloc,
        };
        heap.take_over(&rings.records, &words, &state)?;
        Ok(heap)
    }

    /// Stores what recovery found out, and then that it did.
    fn take_over(&mut self, records: &[Record], words: &BTreeMap<u64, u64>, state: &State) -> Result<()> {
        // A process that was killed may have left records that no sync covers: their words must not be on the disk before them.
        // After a sync that failed the kernel takes for clean what it could not write, and the next one succeeds without it: so
        // they are stored once more. What they rely on, and where their entries stand elsewhere, was durable before they were stored.
        if !words.is_empty()
            && self.media.domain() == Domain::PageCache
            && !self.media.omits("recovery makes records durable before it applies them")
        {
            for line in records.iter().flat_map(|record| record.place.clone().step_by(LINE)) {
                let word = self.media.load64(Addr(line))?;
                self.media.store64(Addr(line), word)?.redundant("it is what stood there");
            }
            self.make_durable(Flushed::issued())?;
        }
        let media = &self.media;
        let mut flushed: Option<Flushed> = None;
        let mut add =
            |more: Flushed| flushed = Some(flushed.take().map_or_else(Flushed::issued, |f| f.and(more)));
        for (&at, &word) in words {
            add(media.flush(media.store64(Addr(at), word)?));
        }
        if self.opened.header_mended {
            for at in self.layout.headers() {
                match media.copy_nt(at, &self.header.encode()) {
                    Ok(stored) => add(stored),
                    Err(_) => self.opened.header_mended = false,
                }
            }
            let how =
                if self.opened.header_mended { "is written back" } else { "stays so: its media is bad" };
            tracing::warn!("a copy of the heap's header was damaged and {how}; the other one is used");
        }
        if let Some(flushed) = flushed {
            self.make_durable(flushed)?;
        }
        self.write_state(state)
    }

    /// Settles everything, says so, and gives the media back. EIO where it could not be made durable; what was
    /// acknowledged is there all the same, once it is opened again.
    pub fn close(self) -> Result<M> {
        self.usable()?;
        {
            let mut state = self.state.lock();
            self.settle_as(&mut state, true)?;
        }
        Ok(self.media)
    }
}

fn info(header: &Header, state: &State) -> Info {
    Info {
        label: header.label.clone(),
        uuid: header.uuid,
        format_version: header.version,
        bytes: header.bytes,
        base: (header.base != 0).then_some(header.base),
        shape: header.shape,
        created: header.created,
        generation: state.generation,
        closed: state.closed,
    }
}

// ---------------------------------------------------------------------------------------------------
// Making one

fn checked_layout(header: &Header) -> Result<Layout> {
    let most = header::LABEL_BYTES - 1;
    if header.label.len() > most || header.label.contains('\0') {
        let message = format!("a label has at most {most} bytes, none of them zero");
        return Err(invalid(FORMAT, message));
    }
    if !is_base(header.base, header.bytes) {
        let message = format!(
            "a heap of {} bytes cannot have its place at {:#x}: give a multiple of 2 MiB below {BASE_MAX:#x}",
            header.bytes, header.base
        );
        return Err(invalid(FORMAT, message));
    }
    header.layout().ok_or_else(|| {
        let message = format!(
            "no heap of {} bytes with {:?} can be made: one has up to {HEAP_BYTES_MAX} bytes, 1 to {LANES_MAX} \
             lanes of {RING_LINES_MIN} to {RING_LINES_MAX} lines, 1 to {ROOTS_MAX} roots, and 32 KiB besides",
            header.bytes, header.shape
        );
        invalid(FORMAT, message)
    })
}

fn refuse_to_replace<M: Media>(media: &M) -> Result<()> {
    let mut block = [0; BLOCK as usize];
    let have = media.len().min(BLOCK) as usize;
    media.read(Addr(0), &mut block[..have])?;
    refuse_block(&block)?;
    match header_at(media, last_block(media))? {
        Err(HeaderFault::Blank | HeaderFault::Foreign) => Ok(()),
        _ => Err(holds("a heap, whose beginning is lost")),
    }
}

/// EEXIST where a beginning, of a block or more, is anything but zeros. All of it counts: there are file systems and
/// tables of partitions that leave their first bytes to others.
pub(super) fn refuse_block(beginning: &[u8]) -> Result<()> {
    let first = beginning[..header::BYTES].try_into().expect("a block is longer than a header");
    Err(holds(match Header::decode(first, |intact| intact) {
        Err(HeaderFault::Blank) if beginning.iter().all(|&b| b == 0) => return Ok(()),
        Err(HeaderFault::Blank | HeaderFault::Foreign) => "other data already",
        Err(HeaderFault::Damaged) => "a heap already, whose header is damaged",
        Ok(_) | Err(HeaderFault::Newer(_)) => "a heap already",
    }))
}

fn holds(what: &str) -> Error {
    let message = format!("it holds {what}: use another file, or force it to destroy what it holds");
    Error::message(libc::EEXIST, FORMAT, message)
}

/// Everything but the header.
fn write_empty<M: Media>(media: &M, header: &Header, layout: &Layout) -> Result<Flushed> {
    let keys = header.keys();
    let rings = layout.roots_at - LANES_AT;
    let mut flushed = media.zero_nt(Addr(LANES_AT), rings as usize)?;
    for slot in 0..layout.shape.roots as usize {
        let at = layout.root(slot);
        let mut bytes = [0; root::BYTES];
        bytes[..8].copy_from_slice(&keys.seal(at, encode_root_value(None)).to_le_bytes());
        flushed = flushed.and(media.copy_nt(at, &bytes)?);
    }
    for chunk in 0..layout.chunks as u32 {
        let mut bytes = [0; DESCRIPTOR];
        for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&keys.seal(layout.word(chunk, n), 0).to_le_bytes());
        }
        flushed = flushed.and(media.copy_nt(layout.word(chunk, 0), &bytes)?);
    }
    let state = State { serial: 1, generation: 0, settled: 0, closed: true };
    for (turn, line) in [(0, [0; LINE]), (1, state.encode(keys))] {
        for at in layout.state(turn) {
            flushed = flushed.and(media.copy_nt(at, &line)?);
        }
    }
    Ok(flushed)
}

fn identity(options: &FormatOptions, which: u8) -> Result<[u8; 16]> {
    let mut b = [which; 16];
    if let Some(number) = options.identity {
        b[..8].copy_from_slice(&number.to_le_bytes());
        return Ok(b);
    }
    rustix::rand::getrandom(&mut b, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::new(e.raw_os_error(), FORMAT))?;
    // Version 4, variant 1 (RFC 9562).
    b[6] = b[6] & 0x0f | 0x40;
    b[8] = b[8] & 0x3f | 0x80;
    Ok(b)
}

fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| d.as_secs())
}

// ---------------------------------------------------------------------------------------------------
// Reading one

fn last_block<M: Media>(media: &M) -> Addr {
    Addr((media.len() / BLOCK).saturating_sub(1) * BLOCK)
}

fn header_at<M: Media>(media: &M, at: Addr) -> Result<Result<Header, HeaderFault>> {
    if media.len() < at.0 + header::BYTES as u64 {
        return Ok(Err(HeaderFault::Blank));
    }
    let mut bytes = [0; header::BYTES];
    media.read(at, &mut bytes)?;
    let parts = [(at, header::BYTES)];
    Ok(Header::decode(&bytes, |intact| media.verified(&parts, intact)))
}

/// The header, and whether one of its copies is damaged; one that cannot be read is.
fn read_header<M: Media>(media: &M) -> Result<(Header, Layout, bool)> {
    let copy = |at| header_at(media, at).unwrap_or(Err(HeaderFault::Damaged));
    let first = copy(Addr(0));
    let second_at = match &first {
        Ok(header) if header.bytes > media.len() => {
            let message = format!(
                "it has {} bytes, and its header says {}: the file was cut; restore it from a copy",
                media.len(),
                header.bytes
            );
            return Err(invalid(OPEN, message));
        }
        Ok(header) => Addr(header.bytes - BLOCK),
        Err(_) => last_block(media),
    };
    let second = copy(second_at);
    let is_damaged = first.is_err() || second != first;
    // A file that grew has its second copy somewhere in the middle: the first one has to be whole there.
    let header = match (first, second) {
        (Ok(header), _) => header,
        (Err(HeaderFault::Newer(version)), _) => {
            let message = format!(
                "it is a heap of format version {version}, later than this program knows: use a newer Lodestone"
            );
            return Err(Error::message(libc::EOPNOTSUPP, OPEN, message));
        }
        (Err(fault), Ok(header)) if header.bytes == second_at.0 + BLOCK => {
            if !was_header(media, fault, &header) {
                let message = "it held a Lodestone heap, whose last block is still there, but begins with something else: \
                               restore its first block from a copy, or make a heap here by force";
                return Err(invalid(OPEN, message.into()));
            }
            header
        }
        (Err(HeaderFault::Blank | HeaderFault::Foreign), _) => {
            return Err(invalid(OPEN, "it holds no Lodestone heap: name one, or make one here".into()));
        }
        (Err(HeaderFault::Damaged), _) => {
            return Err(damaged(OPEN, "both copies of its header are bad".into()));
        }
    };
    let layout = header.layout().ok_or_else(|| damaged(OPEN, "its header says what cannot be".into()))?;
    Ok((header, layout, is_damaged))
}

/// Whether what stands in the first block may be what is left of this header: who opens the heap would write it there again,
/// over whatever was made there since.
fn was_header<M: Media>(media: &M, fault: HeaderFault, header: &Header) -> bool {
    let mut block = [0; BLOCK as usize];
    if media.read(Addr(0), &mut block).is_err() {
        return true;
    }
    match fault {
        HeaderFault::Blank => block.iter().all(|byte| *byte == 0),
        HeaderFault::Foreign => {
            let whole = header.encode();
            // A line of it that says something; zeros stand in whatever else begins there, too.
            let mut lines = whole.chunks(LINE).zip(block.chunks(LINE));
            lines.any(|(line, there)| line == there && line.iter().any(|byte| *byte != 0))
        }
        HeaderFault::Damaged | HeaderFault::Newer(_) => true,
    }
}

/// Raw pointers in it are right only where it is mapped in its place.
fn check_place<M: Media>(media: &M, header: &Header) -> Result<()> {
    let mapped = media.mapped(Addr(0), 1).map(|at| at.addr() as u64);
    match mapped.filter(|&at| header.base != 0 && at != header.base) {
        None => Ok(()),
        Some(at) => {
            let message = format!(
                "its place is at {:#x}, and it is mapped at {at:#x}: open it by its path",
                header.base
            );
            Err(Error::message(libc::EADDRINUSE, OPEN, message))
        }
    }
}

/// The state line that counts. A copy that cannot be read is as good as a damaged one.
fn read_state<M: Media>(media: &M, header: &Header, layout: &Layout) -> Result<State> {
    let mut best: Option<State> = None;
    for at in layout.state(0).into_iter().chain(layout.state(1)) {
        let mut line = [0; LINE];
        if let Err(fault) = media.read(at, &mut line) {
            tracing::warn!("a copy of the heap's state is bad media at {:#x}; the other is used", fault.at.0);
            continue;
        }
        let state = State::decode(&line, header.keys(), |intact| media.verified(&[(at, LINE)], intact));
        best = [best, state].into_iter().flatten().max_by_key(|state| state.serial);
    }
    best.ok_or_else(|| damaged(OPEN, "no copy of its state line is right".into()))
}

/// A record that may have to be applied.
struct Record {
    number: u64,
    /// Where its lines are.
    place: Range<u64>,
    entries: Vec<u64>,
}

struct Rings {
    /// By number.
    records: Vec<Record>,
    settled: u64,
}

fn read_rings<M: Media>(media: &M, layout: &Layout, keys: Keys, settled: u64) -> Result<Rings> {
    let mut found = Rings { records: Vec::new(), settled };
    let lines = layout.shape.ring_lines as usize;
    for lane in 0..layout.shape.lanes as usize {
        for line in 0..lines {
            let at = layout.line(lane, line);
            let mut words = read_words(media, at, LINE / 8)?;
            let count = record_lines(words[record::CHECK], layout.shape).filter(|n| line + n <= lines);
            if let Some(n) = count.filter(|n| *n > 1) {
                words.extend(read_words(media, at.add(LINE as u64), (n - 1) * (LINE / 8))?);
            }
            let is_record = count.is_some() && is_record(keys, at, &words);
            if !media.verified(&[(at, words.len() * 8)], is_record) || count.is_none() {
                continue;
            }
            let Some(head) = record_head(&words) else { continue };
            if !media.omits("a record says what was settled before it") {
                found.settled = found.settled.max(head.settled);
            }
            let place = at.0..at.0 + words.len() as u64 * 8;
            let entries = words.split_off(record::WORDS);
            found.records.push(Record { number: head.number, place, entries });
        }
    }
    let settled = found.settled;
    found.records.retain(|record| record.number > settled);
    if !media.omits("records are applied in the order of their numbers") {
        found.records.sort_by_key(|record| record.number);
    }
    found.records.dedup_by_key(|record| record.number);
    let mut room = layout.chunks * CHUNK;
    for record in &mut found.records {
        fetch_elsewhere(media, layout, keys, &mut room, &mut record.entries)?;
    }
    Ok(found)
}

/// The entries of a record that names another place for them, of which `room` is left.
fn fetch_elsewhere<M: Media>(
    media: &M,
    layout: &Layout,
    keys: Keys,
    room: &mut u64,
    entries: &mut Vec<u64>,
) -> Result<()> {
    let Some((Entry::Elsewhere { at, words, crc }, _)) = decode(entries, layout)? else { return Ok(()) };
    let bytes = (words * 8) as usize;
    // No two records have the same place.
    let left = room.checked_sub(bytes as u64);
    *room = left.ok_or_else(|| damaged(OPEN, "records of large commits take more than all of it".into()))?;
    let is_whole = media.crc32c(Addr(at), bytes, keys.seed)? == crc;
    if !media.verified(&[(Addr(at), bytes)], is_whole) {
        return Err(damaged(OPEN, format!("a large commit's record at {at:#x} is not as it was written")));
    }
    // As long as the heap at most, which may be forged and longer than there is memory.
    let mut fetched = Vec::new();
    let no_memory = |_| {
        let message = format!("a large commit's record at {at:#x} needs {bytes} bytes of memory to be read");
        Error::message(libc::ENOMEM, OPEN, message)
    };
    fetched.try_reserve_exact(words as usize).map_err(no_memory)?;
    for first in (0..words).step_by(FETCH_WORDS) {
        let count = FETCH_WORDS.min((words - first) as usize);
        fetched.extend(read_words(media, Addr(at + first * 8), count)?);
    }
    *entries = fetched;
    Ok(())
}

/// Words that are read at once.
const FETCH_WORDS: usize = 1 << 13;

fn decode<'a>(words: &'a [u64], layout: &Layout) -> Result<Option<(Entry<'a>, &'a [u64])>> {
    Entry::decode(words, layout)
        .map_err(|Unwritten| damaged(OPEN, "a record has an entry that no commit would write".into()))
}

fn read_words<M: Media>(media: &M, at: Addr, count: usize) -> Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    media.read(at, &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes"))).collect())
}

// ---------------------------------------------------------------------------------------------------
// What the records make of it

/// The media as they are once every record is applied.
struct View<'a, M> {
    media: &'a M,
    layout: &'a Layout,
    keys: Keys,
    /// Words that are different.
    words: BTreeMap<u64, u64>,
}

/// Bytes that later records free, joined.
#[derive(Default)]
struct Freed(BTreeMap<u64, u64>);

impl Freed {
    fn has(&self, at: u64) -> bool {
        self.0.range(..=at).next_back().is_some_and(|(_, &end)| at < end)
    }

    fn add(&mut self, mut from: u64, mut to: u64) {
        while let Some((&begin, &end)) = self.0.range(..=to).next_back().filter(|(_, end)| **end >= from) {
            self.0.remove(&begin);
            (from, to) = (from.min(begin), to.max(end));
        }
        self.0.insert(from, to);
    }
}

impl<M: Media> View<'_, M> {
    fn apply(&mut self, records: &[Record]) -> Result<()> {
        let mut all: Vec<Vec<(Entry<'_>, bool)>> = Vec::with_capacity(records.len());
        let mut freed = Freed::default();
        for record in records.iter().rev() {
            let mut entries = Vec::new();
            let mut rest = &record.entries[..];
            while let Some((entry, behind)) = decode(rest, self.layout)? {
                let is_gone = match entry {
                    Entry::Words { at, .. } | Entry::Alloc { at, .. } => freed.has(at),
                    _ => false,
                };
                entries.push((entry, is_gone));
                rest = behind;
            }
            for (entry, _) in &entries {
                match *entry {
                    Entry::Free { at, class } => freed.add(at, at + CLASSES[class as usize] as u64),
                    Entry::FreeChunks { at, chunks } => freed.add(at, at + chunks as u64 * CHUNK),
                    _ => {}
                }
            }
            all.push(entries);
        }
        let omits = self.media.omits("what a later record freed is not stored to");
        for (entry, is_gone) in all.into_iter().rev().flatten() {
            self.apply_entry(entry, is_gone && !omits)?;
        }
        Ok(())
    }

    fn apply_entry(&mut self, entry: Entry<'_>, is_gone: bool) -> Result<()> {
        let store = |words: &mut BTreeMap<u64, u64>, at: u64, values: &[u64]| {
            words.extend(values.iter().enumerate().map(|(n, &value)| (at + n as u64 * 8, value)));
        };
        match entry {
            Entry::Words { at, values } => {
                if !is_gone {
                    store(&mut self.words, at, values);
                }
            }
            Entry::Alloc { at, class, content } => {
                if !is_gone {
                    store(&mut self.words, at, content);
                }
                self.describe(at, Chunk::Run { class });
                self.set_bit(at, class, true)?;
            }
            Entry::Free { at, class } => self.set_bit(at, class, false)?,
            Entry::AllocChunks { at, chunks } => self.describe(at, Chunk::Large { chunks }),
            Entry::FreeChunks { at, .. } => self.describe(at, Chunk::Free),
            Entry::Elsewhere { .. } => {
                return Err(damaged(OPEN, "a record leads to a record that leads elsewhere".into()));
            }
        }
        Ok(())
    }

    fn describe(&mut self, at: u64, what: Chunk) {
        let chunk = self.layout.chunk_of(at).expect("an entry is checked when it is decoded");
        let word = self.layout.word(chunk, 0);
        self.words.insert(word.0, self.keys.seal(word, what.encode()));
    }

    fn set_bit(&mut self, at: u64, class: u8, live: bool) -> Result<()> {
        let chunk = self.layout.chunk_of(at).expect("an entry is checked when it is decoded");
        let index = ((at - self.layout.chunk(chunk)) / CLASSES[class as usize] as u64) as u32;
        let word = self.layout.word(chunk, 1 + (index / SEALED_BITS) as usize);
        let bits = self.content(word)?;
        let bit = 1 << (index % SEALED_BITS);
        let bits = if live { bits | bit } else { bits & !bit };
        self.words.insert(word.0, self.keys.seal(word, bits));
        Ok(())
    }

    /// The content of a sealed word.
    fn content(&self, at: Addr) -> Result<u64> {
        match self.words.get(&at.0) {
            Some(&word) => Ok(self.keys.unseal(at, word).0),
            None => {
                let word = self.media.load64(at)?;
                self.judge(at, word)
            }
        }
    }

    /// Of a word as the media hold it.
    fn judge(&self, at: Addr, word: u64) -> Result<u64> {
        let (content, is_right) = self.keys.unseal(at, word);
        if self.media.verified(&[(at, 8)], is_right) {
            return Ok(content);
        }
        Err(damaged(OPEN, format!("the word at {:#x} fails its check", at.0)))
    }

    /// What a chunk is, and its bits.
    fn chunk(&self, chunk: u32) -> Result<(Chunk, Vec<u64>)> {
        const FIRST: usize = LINE / 8;
        let at = self.layout.word(chunk, 0);
        let mut words = read_words(self.media, at, FIRST)?;
        let seen = |n: usize, word: u64| -> Result<u64> {
            let at = self.layout.word(chunk, n);
            match self.words.get(&at.0) {
                Some(&word) => Ok(self.keys.unseal(at, word).0),
                None => self.judge(at, word),
            }
        };
        let bad = |what: &str| damaged(OPEN, format!("chunk {chunk} {what} (descriptor at {:#x})", at.0));
        let what = Chunk::decode(seen(0, words[0])?).ok_or_else(|| bad("is nothing that there is"))?;
        let Chunk::Run { class } = what else { return Ok((what, Vec::new())) };
        let count = map_words(class);
        if 1 + count > FIRST {
            words.extend(read_words(self.media, at.add(LINE as u64), 1 + count - FIRST)?);
        }
        let bits: Vec<u64> = (1..=count).map(|n| seen(n, words[n])).collect::<Result<_>>()?;
        let last = objects(class) - (count as u32 - 1) * SEALED_BITS;
        if bits[count - 1] >> last != 0 {
            return Err(bad("uses objects that it does not have"));
        }
        Ok((what, bits))
    }

    fn allocator(&self) -> Result<Allocator> {
        let alloc = Allocator::new(*self.layout, self.keys);
        let chunks = self.layout.chunks as u32;
        let (mut chunk, mut free) = (0, 0);
        let admit_free = |chunk: u32, free: &mut u32| {
            if *free > 0 {
                alloc.admit_free(chunk - *free, *free);
                *free = 0;
            }
        };
        while chunk < chunks {
            let (what, bits) = self.chunk(chunk)?;
            match what {
                Chunk::Run { class } if bits.iter().any(|&b| b != 0) => {
                    admit_free(chunk, &mut free);
                    alloc.admit_run(chunk, class, &bits);
                    chunk += 1;
                }
                Chunk::Large { chunks: count } => {
                    admit_free(chunk, &mut free);
                    self.check_large(chunk, count)?;
                    alloc.admit_large(chunk, count);
                    chunk += count;
                }
                Chunk::Free | Chunk::Run { .. } => {
                    free += 1;
                    chunk += 1;
                }
            }
        }
        admit_free(chunk, &mut free);
        Ok(alloc)
    }

    /// The chunks behind the first one of a large object have nothing of their own.
    fn check_large(&self, first: u32, count: u32) -> Result<()> {
        let end = first.checked_add(count).filter(|&end| end as u64 <= self.layout.chunks);
        let end = end.ok_or_else(|| damaged(OPEN, format!("the object of chunk {first} has no end")))?;
        for chunk in first + 1..end {
            let (what, bits) = self.chunk(chunk)?;
            if matches!(what, Chunk::Large { .. }) || bits.iter().any(|&b| b != 0) {
                let message =
                    format!("chunk {chunk} is part of the object of chunk {first}, and in use besides");
                return Err(damaged(OPEN, message));
            }
        }
        Ok(())
    }

    fn roots(&self) -> Result<Vec<Option<Root>>> {
        let mut all: Vec<Option<Root>> = Vec::new();
        let mut names = std::collections::HashSet::new();
        for slot in 0..self.layout.shape.roots as usize {
            let at = self.layout.root(slot);
            let bad = |what: &str| damaged(OPEN, format!("root {slot} {what} (at {:#x})", at.0));
            let value = decode_root_value(self.content(at)?)
                .map_err(|Unwritten| bad("leads nowhere that there is"))?;
            let Some(value) = value else {
                all.push(None);
                continue;
            };
            let mut bytes = [0; root::BYTES];
            self.media.read(at.add(root::TYPE as u64), &mut bytes[root::TYPE..])?;
            let parts = [(at.add(root::TYPE as u64), root::BYTES - root::TYPE)];
            let name = decode_root_name(self.keys, slot, &bytes, |ok| self.media.verified(&parts, ok));
            let (name, type_number) = name.ok_or_else(|| bad("has a name that fails its checksum"))?;
            if !names.insert(name.clone()) {
                return Err(bad("has the name of another"));
            }
            all.push(Some(Root { name, type_number, to: (value != 0).then_some(Offset(value)) }));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::media::SimMedia;

    /// A heap may be larger than memory, and its records many.
    #[test]
    fn records_that_are_larger_than_the_heap_are_not_read() {
        let shape = Some(Shape { lanes: 1, ring_lines: 8, roots: 1 });
        let options = FormatOptions { shape, identity: Some(1), ..FormatOptions::default() };
        for (records, errno) in [(1, None), (2, Some(libc::EUCLEAN))] {
            let heap = Heap::format(SimMedia::new(vec![0; 512 << 10], Domain::Memory), &options).unwrap();
            let (layout, keys) = (heap.layout, heap.keys);
            let bytes = layout.chunks * CHUNK / 2 + 8;
            let media = heap.close().unwrap();
            let crc = media.crc32c(Addr(layout.chunks_at), bytes as usize, keys.seed).unwrap();
            let mut entries = Vec::new();
            Entry::Elsewhere { at: layout.chunks_at, words: bytes / 8, crc }.encode(&mut entries);
            for n in 0..records {
                let at = layout.line(0, n);
                let head = RecordHead { lines: 1, number: 1 + n as u64, settled: 0 };
                let stored = media.store_lines(at, &encode_record(keys, at, head, &entries)).unwrap();
                media.fence(stored);
            }
            assert_eq!(Heap::open(media).err().map(|e| e.errno()), errno, "{records} records");
        }
    }

    #[test]
    fn freed_ranges_join_and_hold_what_is_in_them() {
        let mut freed = Freed::default();
        freed.add(100, 116);
        freed.add(132, 148);
        assert!(freed.has(100) && freed.has(115) && !freed.has(116) && !freed.has(99) && freed.has(140));
        freed.add(116, 132);
        assert_eq!(freed.0.iter().collect::<Vec<_>>(), [(&100, &148)]);
        freed.add(0, 1000);
        assert_eq!(freed.0.len(), 1);
        freed.add(2000, 2016);
        assert!(!freed.has(1000) && freed.has(2000) && !freed.has(2016));
    }
}
