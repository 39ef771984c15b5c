//! Every byte that a heap keeps on media, in one file.
//!
//! Integers are little-endian and of fixed width. `docs/heap-format.md` draws these structures; a test compares the
//! drawings with the constants here.
//!
//! ```text
//! block 0       header, first copy
//! block 1       state lines, first copy: two lines, written in turn
//! ...           lanes: rings of records, one after the other
//! ...           root slots
//! ...           descriptors, one for each chunk
//! ...           chunks of 32 KiB, at multiples of their size
//! last block    header, second copy; at byte 2048 the state lines again
//! ```
//!
//! Three ways in which bytes say that they are right:
//!
//! - What is written once or by turns (header, state line, name of a root) has a CRC-32C.
//! - A **record** has a CRC-32C seeded with the heap's key and the record's place, and a number that only grows: what
//!   stood there before never counts.
//! - A **sealed word** has 48 bits of content and 16 that check them, so that one 8-byte store, which cannot be torn,
//!   changes both: descriptors and the values of roots are made of these. The check depends on the heap's key and on
//!   the word's address; it finds every error within one byte (a test tries all).

use crate::media::{Addr, LINE, Words, crc32c};

pub const MAGIC: [u8; 8] = *b"LODEHEAP";
/// The format this code writes; it reads no other.
pub const VERSION: u32 = 1;

pub const BLOCK: u64 = 4096;
pub const CHUNK: u64 = 32 << 10;
/// Objects begin at multiples of it, and none is smaller.
pub const UNIT: u64 = 16;
/// A heap that is larger would need more bits in a place.
pub const HEAP_BYTES_MAX: u64 = 1 << 47;
/// What an address space maps.
pub const BASE_MAX: u64 = 1 << 47;

const LINE_BYTES: u64 = LINE as u64;

// ---------------------------------------------------------------------------------------------------
// Field access

#[inline]
fn get16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(b[at..at + 2].try_into().expect("two bytes"))
}
#[inline]
fn get32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().expect("four bytes"))
}
#[inline]
fn get64(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().expect("eight bytes"))
}
#[inline]
fn put(b: &mut [u8], at: usize, value: &[u8]) {
    b[at..at + value.len()].copy_from_slice(value);
}

// ---------------------------------------------------------------------------------------------------
// Header

/// Where the fields of the header are.
pub mod header {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 8;
    pub const CRC: usize = 12;
    pub const UUID: usize = 16;
    pub const KEY: usize = 32;
    pub const HEAP_BYTES: usize = 48;
    pub const BASE: usize = 56;
    pub const CREATED: usize = 64;
    pub const CHUNKS: usize = 72;
    pub const LANES: usize = 80;
    pub const RING_LINES: usize = 82;
    pub const ROOTS: usize = 84;
    pub const LABEL: usize = 96;
    pub const LABEL_BYTES: usize = 64;
    /// Of all of it.
    pub const BYTES: usize = 192;
}

/// What making a heap decides once. Both copies are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub version: u32,
    pub uuid: [u8; 16],
    /// Seeds every check; never shown.
    pub key: [u8; 16],
    pub bytes: u64,
    /// Where it is mapped always; 0: anywhere.
    pub base: u64,
    /// Seconds since 1970.
    pub created: u64,
    pub shape: Shape,
    pub label: String,
}

/// What is wrong with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderFault {
    /// Nothing but zeros.
    Blank,
    Foreign,
    Newer(u32),
    Damaged,
}

impl Header {
    pub fn encode(&self) -> [u8; header::BYTES] {
        let mut b = [0; header::BYTES];
        put(&mut b, header::MAGIC, &MAGIC);
        put(&mut b, header::VERSION, &self.version.to_le_bytes());
        put(&mut b, header::UUID, &self.uuid);
        put(&mut b, header::KEY, &self.key);
        put(&mut b, header::HEAP_BYTES, &self.bytes.to_le_bytes());
        put(&mut b, header::BASE, &self.base.to_le_bytes());
        put(&mut b, header::CREATED, &self.created.to_le_bytes());
        put(&mut b, header::CHUNKS, &self.layout().map_or(0, |l| l.chunks).to_le_bytes());
        put(&mut b, header::LANES, &self.shape.lanes.to_le_bytes());
        put(&mut b, header::RING_LINES, &self.shape.ring_lines.to_le_bytes());
        put(&mut b, header::ROOTS, &self.shape.roots.to_le_bytes());
        assert!(self.label.len() < header::LABEL_BYTES);
        put(&mut b, header::LABEL, self.label.as_bytes());
        let crc = crc32c(&b[header::UUID..], self.version);
        put(&mut b, header::CRC, &crc.to_le_bytes());
        b
    }

    /// `verified` hears whether the checksum holds, and answers whether to go on.
    pub fn decode(
        b: &[u8; header::BYTES],
        verified: impl FnOnce(bool) -> bool,
    ) -> Result<Header, HeaderFault> {
        if b[header::MAGIC..header::VERSION] != MAGIC {
            return Err(if b.iter().all(|&b| b == 0) { HeaderFault::Blank } else { HeaderFault::Foreign });
        }
        let version = get32(b, header::VERSION);
        if !verified(crc32c(&b[header::UUID..], version) == get32(b, header::CRC)) || version == 0 {
            return Err(HeaderFault::Damaged);
        }
        if version > VERSION {
            return Err(HeaderFault::Newer(version));
        }
        let label = &b[header::LABEL..header::LABEL + header::LABEL_BYTES];
        let label = &label[..label.iter().position(|&c| c == 0).ok_or(HeaderFault::Damaged)?];
        let heap = Header {
            version,
            uuid: b[header::UUID..header::KEY].try_into().expect("sixteen bytes"),
            key: b[header::KEY..header::HEAP_BYTES].try_into().expect("sixteen bytes"),
            bytes: get64(b, header::HEAP_BYTES),
            base: get64(b, header::BASE),
            created: get64(b, header::CREATED),
            shape: Shape {
                lanes: get16(b, header::LANES),
                ring_lines: get16(b, header::RING_LINES),
                roots: get32(b, header::ROOTS),
            },
            label: std::str::from_utf8(label).map_err(|_| HeaderFault::Damaged)?.to_owned(),
        };
        let layout = heap.layout().ok_or(HeaderFault::Damaged)?;
        let fits = layout.chunks == get64(b, header::CHUNKS) && is_base(heap.base, heap.bytes);
        if fits { Ok(heap) } else { Err(HeaderFault::Damaged) }
    }

    pub fn layout(&self) -> Option<Layout> {
        Layout::new(self.bytes, self.shape)
    }

    pub fn keys(&self) -> Keys {
        let half = |at: usize| get64(&self.key, at);
        Keys { seed: crc32c(&self.key, 0), mask: half(0) ^ half(8).rotate_left(32) }
    }
}

/// Whether a heap of so many bytes may have its place at this address.
pub fn is_base(base: u64, bytes: u64) -> bool {
    const HUGE_PAGE: u64 = 2 << 20;
    base == 0 || base.is_multiple_of(HUGE_PAGE) && bytes <= BASE_MAX && base <= BASE_MAX - bytes
}

// ---------------------------------------------------------------------------------------------------
// Where everything is

/// How a heap is cut, besides its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Commits that can be under way at a time.
    pub lanes: u16,
    /// Lines of each lane's ring.
    pub ring_lines: u16,
    /// Roots at most.
    pub roots: u32,
}

pub const LANES_MAX: u16 = 256;
pub const RING_LINES_MIN: u16 = 8;
pub const RING_LINES_MAX: u16 = 240;
pub const ROOTS_MAX: u32 = 1 << 20;

/// Every record that is not settled has a line of its own, and says in 16 bits how far it is from the settled one.
const _: () = assert!((LANES_MAX as u32) * (RING_LINES_MAX as u32) < 1 << 16);

/// Addresses, all multiples of a block but for the chunks, which are at multiples of their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub bytes: u64,
    pub shape: Shape,
    pub roots_at: u64,
    pub descriptors_at: u64,
    pub chunks_at: u64,
    pub chunks: u64,
}

pub const STATE_AT: u64 = BLOCK;
pub const LANES_AT: u64 = 2 * BLOCK;
/// Where in the last block the second copy of the state lines stands.
pub const STATE_COPY_OFFSET: u64 = 2048;

impl Layout {
    /// None where no chunk fits, or the shape is none.
    pub fn new(bytes: u64, shape: Shape) -> Option<Layout> {
        let is_shape = (1..=LANES_MAX).contains(&shape.lanes)
            && (RING_LINES_MIN..=RING_LINES_MAX).contains(&shape.ring_lines)
            && (1..=ROOTS_MAX).contains(&shape.roots);
        if !is_shape || bytes > HEAP_BYTES_MAX || !bytes.is_multiple_of(BLOCK) {
            return None;
        }
        let rings = shape.lanes as u64 * shape.ring_lines as u64 * LINE_BYTES;
        let roots_at = LANES_AT + rings.next_multiple_of(BLOCK);
        let descriptors_at = roots_at + (shape.roots as u64 * root::BYTES as u64).next_multiple_of(BLOCK);
        let end = bytes.checked_sub(BLOCK)?;
        let begin = |chunks: u64| (descriptors_at + chunks * DESCRIPTOR as u64).next_multiple_of(CHUNK);
        // As many as fit with their descriptors; rounding may cost one.
        let mut chunks = end.checked_sub(descriptors_at)? / (CHUNK + DESCRIPTOR as u64);
        while chunks > 0 && begin(chunks) + chunks * CHUNK > end {
            chunks -= 1;
        }
        let layout = Layout { bytes, shape, roots_at, descriptors_at, chunks_at: begin(chunks), chunks };
        (chunks > 0).then_some(layout)
    }

    /// Two lines and their copies.
    pub fn state(&self, turn: u64) -> [Addr; 2] {
        let line = turn % 2 * LINE_BYTES;
        [Addr(STATE_AT + line), Addr(self.bytes - BLOCK + STATE_COPY_OFFSET + line)]
    }

    pub fn headers(&self) -> [Addr; 2] {
        [Addr(0), Addr(self.bytes - BLOCK)]
    }

    pub fn line(&self, lane: usize, line: usize) -> Addr {
        Addr(LANES_AT + (lane as u64 * self.shape.ring_lines as u64 + line as u64) * LINE_BYTES)
    }

    pub fn root(&self, slot: usize) -> Addr {
        Addr(self.roots_at + (slot * root::BYTES) as u64)
    }

    /// A word of a chunk's descriptor: 0 says what the chunk is.
    pub fn word(&self, chunk: u32, word: usize) -> Addr {
        Addr(self.descriptors_at + chunk as u64 * DESCRIPTOR as u64 + (word * 8) as u64)
    }

    pub fn chunk(&self, chunk: u32) -> u64 {
        self.chunks_at + chunk as u64 * CHUNK
    }

    /// The chunk that an address is in.
    pub fn chunk_of(&self, at: u64) -> Option<u32> {
        let chunk = at.checked_sub(self.chunks_at)? / CHUNK;
        (chunk < self.chunks).then_some(chunk as u32)
    }
}

// ---------------------------------------------------------------------------------------------------
// State line

/// Where the fields of a state line are.
pub mod state {
    pub const CRC: usize = 0;
    pub const TAG: usize = 4;
    pub const SERIAL: usize = 8;
    pub const GENERATION: usize = 16;
    pub const SETTLED: usize = 24;
    pub const CLOSED: usize = 32;
}

const STATE_TAG: [u8; 4] = *b"STAT";

/// What changes with every opening, closing and settling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Of two valid lines the higher one counts.
    pub serial: u64,
    /// Counts openings.
    pub generation: u64,
    /// What records up to this number say is on the media: they are not looked at any more.
    pub settled: u64,
    /// The last user closed it.
    pub closed: bool,
}

impl State {
    pub fn encode(&self, keys: Keys) -> [u8; LINE] {
        let mut b = [0; LINE];
        put(&mut b, state::TAG, &STATE_TAG);
        put(&mut b, state::SERIAL, &self.serial.to_le_bytes());
        put(&mut b, state::GENERATION, &self.generation.to_le_bytes());
        put(&mut b, state::SETTLED, &self.settled.to_le_bytes());
        put(&mut b, state::CLOSED, &(self.closed as u64).to_le_bytes());
        let crc = crc32c(&b[state::TAG..], keys.seed);
        put(&mut b, state::CRC, &crc.to_le_bytes());
        b
    }

    pub fn decode(b: &[u8; LINE], keys: Keys, verified: impl FnOnce(bool) -> bool) -> Option<State> {
        let intact = crc32c(&b[state::TAG..], keys.seed) == get32(b, state::CRC);
        if !verified(intact) || b[state::TAG..state::SERIAL] != STATE_TAG {
            return None;
        }
        let found = State {
            serial: get64(b, state::SERIAL),
            generation: get64(b, state::GENERATION),
            settled: get64(b, state::SETTLED),
            closed: get64(b, state::CLOSED) == 1,
        };
        // Higher ones could not be counted on.
        let counts = [found.serial, found.generation, found.settled].iter().all(|&n| n < NUMBER_MAX);
        counts.then_some(found)
    }
}

/// Numbers that only grow end far below their type.
pub const NUMBER_MAX: u64 = 1 << 62;

// ---------------------------------------------------------------------------------------------------
// Records

/// The words of a record's head, which begins its first line.
pub mod record {
    /// CRC-32C of all that follows, lines, settled.
    pub const CHECK: usize = 0;
    pub const NUMBER: usize = 1;
    /// Words of the head.
    pub const WORDS: usize = 2;
}

/// What a record's head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHead {
    pub lines: usize,
    pub number: u64,
    /// Every record up to this number was settled when this one was written.
    pub settled: u64,
}

/// Lines of one lane's ring that one record takes at most: half of them.
pub fn record_lines_max(shape: Shape) -> usize {
    shape.ring_lines as usize / 2
}

/// Words of entries in a record of so many lines.
pub fn record_words(lines: usize) -> usize {
    lines * (LINE / 8) - record::WORDS
}

/// A record for this place: head, entries, zeros to the end of the last line.
pub fn encode_record(keys: Keys, place: Addr, head: RecordHead, entries: &[u64]) -> Vec<Words> {
    debug_assert!(entries.len() <= record_words(head.lines));
    let mut lines = vec![[0; LINE / 8]; head.lines];
    let words = lines.as_flattened_mut();
    words[record::NUMBER] = head.number;
    words[record::WORDS..record::WORDS + entries.len()].copy_from_slice(entries);
    let behind = head.number - head.settled;
    assert!(behind <= u16::MAX as u64, "a lane's line is used again only once its record is settled");
    let upper = (head.lines as u64) << 32 | behind << 48;
    words[record::CHECK] = upper;
    words[record::CHECK] |= record_crc(keys, place, words) as u64;
    lines
}

fn record_crc(keys: Keys, place: Addr, words: &[u64]) -> u32 {
    let seed = crc32c(&place.0.to_le_bytes(), keys.seed);
    let first = crc32c(&words[record::CHECK].to_le_bytes()[4..], seed);
    words[1..].iter().fold(first, |crc, word| crc32c(&word.to_le_bytes(), crc))
}

/// How many lines the record has that may begin with these words.
pub fn record_lines(first: u64, shape: Shape) -> Option<usize> {
    let lines = (first >> 32 & 0xffff) as usize;
    (1..=record_lines_max(shape)).contains(&lines).then_some(lines)
}

/// Whether these words, all of a record's lines, are a record of this place.
pub fn is_record(keys: Keys, place: Addr, words: &[u64]) -> bool {
    record_crc(keys, place, words) == words[record::CHECK] as u32
}

/// The head of what [`is_record`].
pub fn record_head(words: &[u64]) -> Option<RecordHead> {
    let (lines, number) = ((words[record::CHECK] >> 32 & 0xffff) as usize, words[record::NUMBER]);
    let settled = number.checked_sub(words[record::CHECK] >> 48)?;
    (number < NUMBER_MAX).then_some(RecordHead { lines, number, settled })
}

/// Kinds of entries: the lowest 4 bits of an entry's first word.
pub mod kind {
    pub const WORDS: u64 = 1;
    pub const ALLOC: u64 = 2;
    pub const FREE: u64 = 3;
    pub const ALLOC_CHUNKS: u64 = 4;
    pub const FREE_CHUNKS: u64 = 5;
    pub const ELSEWHERE: u64 = 6;
}

/// Bits of an entry's first word, from the lowest on: kind, class, count, place.
pub const KIND_BITS: u32 = 4;
pub const CLASS_BITS: u32 = 6;
pub const COUNT_BITS: u32 = 7;
pub const PLACE_BITS: u32 = 47;
/// Words that one entry stores at most.
pub const COUNT_MAX: usize = (1 << COUNT_BITS) - 1;

const _: () = {
    assert!(KIND_BITS + CLASS_BITS + COUNT_BITS + PLACE_BITS == u64::BITS);
    assert!(CLASSES.len() <= 1 << CLASS_BITS);
    // A place is an address in words of 8 bytes.
    assert!(HEAP_BYTES_MAX >> 3 <= 1 << PLACE_BITS);
};

/// Bytes that no code of this version wrote, though their checksum is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unwritten;

/// One thing that a record does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// Words from an address on.
    Words {
        at: u64,
        values: &'a [u64],
    },
    /// An object of a class is in use; the words that it holds, or none where they were durable before.
    Alloc {
        at: u64,
        class: u8,
        content: &'a [u64],
    },
    Free {
        at: u64,
        class: u8,
    },
    /// An object of whole chunks is in use.
    AllocChunks {
        at: u64,
        chunks: u32,
    },
    FreeChunks {
        at: u64,
        chunks: u32,
    },
    /// The record's entries are so many words at this address, and this is their CRC-32C.
    Elsewhere {
        at: u64,
        words: u64,
        crc: u32,
    },
}

impl Entry<'_> {
    /// Words that it takes in a record.
    pub fn words(&self) -> usize {
        match self {
            Entry::Words { values, .. } => 1 + values.len(),
            Entry::Alloc { content, .. } => 1 + content.len(),
            Entry::Free { .. } => 1,
            Entry::AllocChunks { .. } | Entry::FreeChunks { .. } => 2,
            Entry::Elsewhere { .. } => 3,
        }
    }

    pub fn encode(&self, to: &mut Vec<u64>) {
        let head = |kind: u64, class: u8, count: usize, at: u64| {
            debug_assert!(count <= COUNT_MAX && at.is_multiple_of(8) && at < HEAP_BYTES_MAX);
            kind | (class as u64) << KIND_BITS
                | (count as u64) << (KIND_BITS + CLASS_BITS)
                | (at / 8) << (KIND_BITS + CLASS_BITS + COUNT_BITS)
        };
        match *self {
            Entry::Words { at, values } => {
                to.push(head(kind::WORDS, 0, values.len(), at));
                to.extend_from_slice(values);
            }
            Entry::Alloc { at, class, content } => {
                to.push(head(kind::ALLOC, class, content.len(), at));
                to.extend_from_slice(content);
            }
            Entry::Free { at, class } => to.push(head(kind::FREE, class, 0, at)),
            Entry::AllocChunks { at, chunks } => {
                to.extend([head(kind::ALLOC_CHUNKS, 0, 1, at), chunks as u64]);
            }
            Entry::FreeChunks { at, chunks } => {
                to.extend([head(kind::FREE_CHUNKS, 0, 1, at), chunks as u64]);
            }
            Entry::Elsewhere { at, words, crc } => {
                to.extend([head(kind::ELSEWHERE, 0, 2, at), words, crc as u64]);
            }
        }
    }

    /// The first entry of these words and the rest; `Ok(None)` at the end.
    pub fn decode<'a>(
        words: &'a [u64],
        layout: &Layout,
    ) -> Result<Option<(Entry<'a>, &'a [u64])>, Unwritten> {
        let Some((&first, rest)) = words.split_first() else { return Ok(None) };
        let bits = |from: u32, count: u32| first >> from & ((1 << count) - 1);
        let kind = bits(0, KIND_BITS);
        if first == 0 {
            return Ok(None);
        }
        let class = bits(KIND_BITS, CLASS_BITS) as u8;
        let count = bits(KIND_BITS + CLASS_BITS, COUNT_BITS) as usize;
        let at = bits(KIND_BITS + CLASS_BITS + COUNT_BITS, PLACE_BITS) * 8;
        let (args, rest) = rest.split_at_checked(count).ok_or(Unwritten)?;
        let chunks = || {
            let chunks = u32::try_from(args.first().copied().unwrap_or(0)).map_err(|_| Unwritten)?;
            let (first, within) = (layout.chunk_of(at).ok_or(Unwritten)?, (at - layout.chunks_at) % CHUNK);
            let fits = within == 0 && chunks > 0 && first as u64 + chunks as u64 <= layout.chunks;
            if fits && count == 1 { Ok(chunks) } else { Err(Unwritten) }
        };
        let entry = match kind {
            kind::WORDS if layout.is_storable(at, count as u64) => Entry::Words { at, values: args },
            kind::ALLOC | kind::FREE => {
                let size = *CLASSES.get(class as usize).ok_or(Unwritten)? as u64;
                let chunk = layout.chunk_of(at).ok_or(Unwritten)?;
                let within = at - layout.chunk(chunk);
                let is_object = within.is_multiple_of(size) && within / size < objects(class) as u64;
                if !is_object || args.len() as u64 * 8 > size {
                    return Err(Unwritten);
                }
                match kind {
                    kind::ALLOC => Entry::Alloc { at, class, content: args },
                    _ if count > 0 => return Err(Unwritten),
                    _ => Entry::Free { at, class },
                }
            }
            kind::ALLOC_CHUNKS => Entry::AllocChunks { at, chunks: chunks()? },
            kind::FREE_CHUNKS => Entry::FreeChunks { at, chunks: chunks()? },
            kind::ELSEWHERE => {
                let &[words, crc] = args else { return Err(Unwritten) };
                let end = words.checked_mul(8).and_then(|bytes| at.checked_add(bytes)).ok_or(Unwritten)?;
                let inside = at >= layout.chunks_at && end <= layout.chunks_at + layout.chunks * CHUNK;
                let crc = u32::try_from(crc).map_err(|_| Unwritten)?;
                if inside { Entry::Elsewhere { at, words, crc } } else { return Err(Unwritten) }
            }
            _ => return Err(Unwritten),
        };
        Ok(Some((entry, rest)))
    }
}

impl Layout {
    /// Whether a record may store so many words here: in chunks, or the value of a root.
    pub fn is_storable(&self, at: u64, words: u64) -> bool {
        let Some(end) = words.checked_mul(8).and_then(|bytes| at.checked_add(bytes)) else { return false };
        let in_chunks = at >= self.chunks_at && end <= self.chunks_at + self.chunks * CHUNK;
        let slot = at
            .checked_sub(self.roots_at)
            .map(|within| (within / root::BYTES as u64, within % root::BYTES as u64));
        let is_value = slot.is_some_and(|(slot, within)| slot < self.shape.roots as u64 && within == 0);
        words > 0 && (in_chunks || is_value && words == 1)
    }
}

// ---------------------------------------------------------------------------------------------------
// Sealed words

/// What seeds the checks of a heap.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// Of every CRC-32C.
    pub seed: u32,
    /// Of sealed words.
    pub mask: u64,
}

/// Bits of content in a sealed word.
pub const SEALED_BITS: u32 = 48;
const SEALED_MASK: u64 = (1 << SEALED_BITS) - 1;

/// Which part of a CRC-32C over the content is the check: a test shows that it finds all errors in one byte.
fn check16(content: u64) -> u64 {
    let crc = crc32c(&content.to_le_bytes()[..6], 0);
    (crc ^ crc >> 16) as u64 & 0xffff
}

impl Keys {
    /// Spreads an address over 16 bits (the finaliser of splitmix64).
    fn mask_of(self, at: Addr) -> u64 {
        let mut x = at.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.mask;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) & 0xffff
    }

    #[inline]
    pub fn seal(self, at: Addr, content: u64) -> u64 {
        debug_assert!(content <= SEALED_MASK);
        content | (check16(content) ^ self.mask_of(at)) << SEALED_BITS
    }

    /// The content of a word, and whether its check says that it is right.
    #[inline]
    pub fn unseal(self, at: Addr, word: u64) -> (u64, bool) {
        let content = word & SEALED_MASK;
        (content, self.seal(at, content) == word)
    }
}

// ---------------------------------------------------------------------------------------------------
// Chunks

/// Bytes of a chunk's descriptor: a sealed word that says what the chunk is, and sealed words of 48 bits each that
/// say which objects of it are in use.
pub const DESCRIPTOR: usize = 384;
/// Words of a descriptor that are bits.
pub const MAP_WORDS: usize = DESCRIPTOR / 8 - 1;

/// Sizes of small objects, in bytes: at most a quarter is lost up to 4 KiB.
pub const CLASSES: [u32; 33] = [
    16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280,
    1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 10912, 16384,
];

/// Objects in a chunk of this class.
pub const fn objects(class: u8) -> u32 {
    CHUNK as u32 / CLASSES[class as usize]
}

/// Words of bits that a chunk of this class uses.
pub const fn map_words(class: u8) -> usize {
    objects(class).div_ceil(SEALED_BITS) as usize
}

const _: () = {
    assert!(DESCRIPTOR.is_multiple_of(LINE));
    let mut class = 0;
    while class < CLASSES.len() {
        assert!(CLASSES[class].is_multiple_of(UNIT as u32));
        assert!(class == 0 || CLASSES[class - 1] < CLASSES[class]);
        assert!(map_words(class as u8) <= MAP_WORDS);
        class += 1;
    }
    // A number of chunks has to fit behind the kind.
    assert!(HEAP_BYTES_MAX / CHUNK <= u32::MAX as u64 + 1);
};

/// What a chunk is: the content of its descriptor's first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Nothing; or part of an object that begins before it.
    Free,
    /// Objects of a class; with none in use as good as free.
    Run { class: u8 },
    /// An object of so many chunks begins here.
    Large { chunks: u32 },
}

const CHUNK_RUN: u64 = 1;
const CHUNK_LARGE: u64 = 2;
const CHUNK_KIND_BITS: u32 = 4;

impl Chunk {
    pub fn encode(self) -> u64 {
        match self {
            Chunk::Free => 0,
            Chunk::Run { class } => CHUNK_RUN | (class as u64) << CHUNK_KIND_BITS,
            Chunk::Large { chunks } => CHUNK_LARGE | (chunks as u64) << CHUNK_KIND_BITS,
        }
    }

    pub fn decode(content: u64) -> Option<Chunk> {
        let value = content >> CHUNK_KIND_BITS;
        match content & ((1 << CHUNK_KIND_BITS) - 1) {
            0 if value == 0 => Some(Chunk::Free),
            CHUNK_RUN if value < CLASSES.len() as u64 => Some(Chunk::Run { class: value as u8 }),
            CHUNK_LARGE if value > 0 => Some(Chunk::Large { chunks: u32::try_from(value).ok()? }),
            _ => None,
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// Roots

/// Where the fields of a root slot are.
pub mod root {
    /// A sealed word, the one part that changes while the root has this name.
    pub const VALUE: usize = 0;
    pub const TYPE: usize = 8;
    pub const CRC: usize = 16;
    pub const NAME_LEN: usize = 20;
    pub const NAME: usize = 24;
    /// Of a slot.
    pub const BYTES: usize = 320;
}

const _: () = {
    assert!(root::NAME + crate::limits::NAME_BYTES_MAX <= root::BYTES);
    assert!(root::BYTES.is_multiple_of(LINE));
};

const ROOT_IN_USE: u64 = 1 << (SEALED_BITS - 1);

/// The content of a root's value: none where the slot is free, else an address, or 0.
pub fn encode_root_value(value: Option<u64>) -> u64 {
    value.map_or(0, |at| ROOT_IN_USE | (at / UNIT))
}

/// `Err` where no code of this version wrote it.
pub fn decode_root_value(content: u64) -> Result<Option<u64>, Unwritten> {
    if content & ROOT_IN_USE == 0 {
        return if content == 0 { Ok(None) } else { Err(Unwritten) };
    }
    let at = (content & !ROOT_IN_USE) * UNIT;
    if at < HEAP_BYTES_MAX { Ok(Some(at)) } else { Err(Unwritten) }
}

/// All of a slot behind its value, for a name of at most 255 bytes.
pub fn encode_root_name(
    keys: Keys,
    slot: usize,
    name: &[u8],
    type_number: u64,
) -> [u8; root::BYTES - root::TYPE] {
    let mut b = [0; root::BYTES];
    put(&mut b, root::TYPE, &type_number.to_le_bytes());
    put(&mut b, root::NAME_LEN, &(name.len() as u16).to_le_bytes());
    put(&mut b, root::NAME, name);
    let crc = root_crc(keys, slot, &b);
    put(&mut b, root::CRC, &crc.to_le_bytes());
    b[root::TYPE..].try_into().expect("the rest of the slot")
}

fn root_crc(keys: Keys, slot: usize, b: &[u8; root::BYTES]) -> u32 {
    let crc = crc32c(&(slot as u64).to_le_bytes(), keys.seed);
    crc32c(&b[root::NAME_LEN..], crc32c(&b[root::TYPE..root::CRC], crc))
}

/// Name and type of a root, from its slot.
pub fn decode_root_name(
    keys: Keys,
    slot: usize,
    b: &[u8; root::BYTES],
    verified: impl FnOnce(bool) -> bool,
) -> Option<(Vec<u8>, u64)> {
    if !verified(root_crc(keys, slot, b) == get32(b, root::CRC)) {
        return None;
    }
    let len = get16(b, root::NAME_LEN) as usize;
    let name = b.get(root::NAME..root::NAME + len).filter(|n| !n.is_empty())?;
    (len <= crate::limits::NAME_BYTES_MAX).then(|| (name.to_vec(), get64(b, root::TYPE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYS: Keys = Keys { seed: 7, mask: 0x1234_5678_9abc_def0 };
    const SHAPE: Shape = Shape { lanes: 2, ring_lines: 8, roots: 4 };

    /// The check is linear but for its mask, so that what one error does, it does to every word.
    #[test]
    fn a_sealed_word_shows_every_error_within_one_byte() {
        let at = Addr(4096);
        for content in [0, 1, SEALED_MASK, 0x1234_5678_9abc] {
            let word = KEYS.seal(at, content);
            assert_eq!(KEYS.unseal(at, word), (content, true));
            for byte in 0..8 {
                for error in 1..=255u64 {
                    assert!(!KEYS.unseal(at, word ^ error << (byte * 8)).1, "byte {byte} ^ {error:#x}");
                }
            }
        }
    }

    #[test]
    fn a_sealed_word_is_right_at_its_place_only() {
        let word = KEYS.seal(Addr(4096), 5);
        let elsewhere = (0..1 << 12).filter(|n| KEYS.unseal(Addr(8192 + n * 8), word).1).count();
        assert!(elsewhere < 4, "{elsewhere} of 4096 other places take it");
    }

    #[test]
    fn a_layout_fills_its_media_and_overlaps_nothing() {
        for bytes in (160 << 10..8 << 20).step_by(BLOCK as usize * 7).map(|b: u64| b / BLOCK * BLOCK) {
            let Some(l) = Layout::new(bytes, SHAPE) else { continue };
            assert!(l.line(1, 7).0 + 64 <= l.roots_at);
            assert!(l.root(4).0 <= l.descriptors_at);
            assert!(l.word(l.chunks as u32, 0).0 <= l.chunks_at);
            let end = l.chunks_at + l.chunks * CHUNK;
            assert!(end <= bytes - BLOCK, "{l:?}");
            // One more chunk, with its descriptor, does not fit.
            let descriptors = l.descriptors_at + (l.chunks + 1) * DESCRIPTOR as u64;
            let more = descriptors.next_multiple_of(CHUNK) + (l.chunks + 1) * CHUNK;
            assert!(more > bytes - BLOCK, "{l:?}");
            assert!(l.chunks_at.is_multiple_of(CHUNK));
            assert_eq!(l.chunk_of(end), None);
            assert_eq!(l.chunk_of(end - 1), Some(l.chunks as u32 - 1));
        }
        assert_eq!(Layout::new(64 << 10, SHAPE), None);
    }

    #[test]
    fn a_header_shows_every_error_in_it() {
        let header = Header {
            version: VERSION,
            uuid: *b"0123456789abcdef",
            key: *b"fedcba9876543210",
            bytes: 1 << 20,
            base: 0,
            created: 1,
            shape: SHAPE,
            label: "cache".into(),
        };
        let good = header.encode();
        assert_eq!(Header::decode(&good, |ok| ok), Ok(header));
        for at in 0..good.len() {
            for error in [1, 0x80, 0xff] {
                let mut bad = good;
                bad[at] ^= error;
                assert!(Header::decode(&bad, |ok| ok).is_err(), "byte {at} ^ {error:#x}");
            }
        }
        assert_eq!(Header::decode(&[0; header::BYTES], |ok| ok), Err(HeaderFault::Blank));
    }

    #[test]
    fn a_root_slot_gives_its_name_back_to_its_own_number_only() {
        let mut slot = [0; root::BYTES];
        let name = vec![b'n'; crate::limits::NAME_BYTES_MAX];
        slot[root::TYPE..].copy_from_slice(&encode_root_name(KEYS, 3, &name, 42));
        assert_eq!(decode_root_name(KEYS, 3, &slot, |ok| ok), Some((name, 42)));
        assert_eq!(decode_root_name(KEYS, 2, &slot, |ok| ok), None);
        for value in [None, Some(0), Some(32), Some(HEAP_BYTES_MAX - UNIT)] {
            assert_eq!(decode_root_value(encode_root_value(value)), Ok(value));
        }
    }

    #[test]
    fn every_entry_survives_encoding() {
        let layout = Layout::new(1 << 20, SHAPE).unwrap();
        let at = layout.chunk(3);
        let entries = [
            Entry::Words { at: at + 8, values: &[1, 2, 3] },
            Entry::Words { at: layout.root(2).0, values: &[9] },
            Entry::Alloc { at: at + 48, class: 2, content: &[4, 5] },
            Entry::Free { at: at + 96, class: 2 },
            Entry::AllocChunks { at, chunks: 2 },
            Entry::FreeChunks { at, chunks: 1 },
            Entry::Elsewhere { at, words: 100, crc: 77 },
        ];
        let mut words = Vec::new();
        entries.iter().for_each(|e| e.encode(&mut words));
        assert_eq!(words.len(), entries.iter().map(Entry::words).sum::<usize>());
        words.extend([0, 0]);
        let mut rest = &words[..];
        for entry in entries {
            let (found, behind) = Entry::decode(rest, &layout).unwrap().unwrap();
            assert_eq!(found, entry);
            rest = behind;
        }
        assert_eq!(Entry::decode(rest, &layout), Ok(None));
    }

    proptest! {
        /// Words behind a right checksum may still be nonsense (a forged image).
        #[test]
        fn any_words_are_judged(words in proptest::collection::vec(any::<u64>(), 0..12)) {
            let layout = Layout::new(1 << 20, SHAPE).unwrap();
            let mut rest = &words[..];
            while let Ok(Some((entry, behind))) = Entry::decode(rest, &layout) {
                prop_assert!(behind.len() < rest.len());
                if let Entry::Words { at, values } = entry {
                    prop_assert!(at + values.len() as u64 * 8 <= layout.bytes);
                }
                rest = behind;
            }
        }

        #[test]
        fn a_record_counts_at_its_place_only(number in 1u64..1 << 40, behind in 0u64..100, entries in proptest::collection::vec(any::<u64>(), 0..14)) {
            let head = RecordHead { lines: 2, number: number + behind, settled: number };
            let lines = encode_record(KEYS, Addr(64), head, &entries);
            let words = lines.as_flattened();
            prop_assert!(is_record(KEYS, Addr(64), words));
            prop_assert_eq!(record_head(words), Some(head));
            prop_assert_eq!(record_lines(words[0], SHAPE), Some(2));
            prop_assert!(!is_record(KEYS, Addr(128), words));
        }
    }
}
