//! Every byte that the file system keeps on media, in one file.
//!
//! Integers are little-endian and of fixed width. `docs/format.md` draws these structures; a test
//! compares the drawings with the constants here.
//!
//! The pool, in blocks of 4 KiB:
//!
//! ```text
//! 0          region label (owned by media/)
//! 1          superblock, first copy
//! 2          state lines, first copy (two lines, written in turn); completion words, one in each line
//! 3..3+16    the first 256 inode slots: slot 0 is the inode table itself, slot 1 the root directory
//! ...        data, log segments, more inode slots
//! last       superblock, second copy, with a copy of the state lines
//! ```
//!
//! A **log** is a sequence of 64-byte lines, numbered by a 32-bit sequence. It begins in the three
//! lines behind the slot's header and goes on in segments. A record takes one or more lines of one
//! segment; its head holds its sequence number and a CRC-32C over all its bytes, seeded with the
//! pool's secret key, the inode's number and generation, and the log's *incarnation*. A torn record
//! therefore never happened, and bytes that stood there before never count:
//!
//! - The sequence number and the CRC must both be those expected: 64 bits against chance.
//! - The key keeps a program that writes file data from forging a record in a block that becomes a log
//!   segment later.
//! - The incarnation changes when a log is appended to after a crash ([`Type::Seal`]): whole records
//!   that the crash left behind a gap become invalid at once.

use super::alloc::Block;
use super::types::Time;
use crate::limits::{LABEL_BYTES_MAX, POOL_BLOCKS_MAX, POOL_BYTES_MIN};
use crate::media::{Addr, LINE, Words, crc32c, crc32c_words};

pub const BLOCK: usize = 4096;
pub const MAGIC: [u8; 8] = *b"LODESTNE";
/// The format that `mkfs` writes.
pub const VERSION: u32 = 3;
/// The oldest that is read.
pub const VERSION_OLDEST: u32 = 2;
/// From this one on a record may be [withdrawn](WITHDRAWN).
pub const VERSION_WITHDRAWS: u32 = 3;

pub const SUPER_BLOCK: u64 = 1;
pub const STATE_BLOCK: u64 = 2;
pub const TABLE_BLOCK: u32 = 3;
/// Blocks of the inode table that mkfs lays out.
pub const TABLE_BLOCKS: u32 = 16;
/// Where in the last block the second copy of the state lines stands.
pub const STATE_COPY_OFFSET: u64 = 2048;
/// Lanes of offloaded writes, and where in the state block the completion word of the first stands.
pub const LANES: usize = 32;
pub const COMPLETIONS_OFFSET: u64 = 2048;

pub const SLOT: usize = 256;
pub const SLOTS_PER_BLOCK: u32 = (BLOCK / SLOT) as u32;
/// Log lines inside a slot, the last of which is kept for the link to the first segment.
pub const SLOT_LINES: u32 = (SLOT / LINE) as u32 - 1;
/// The inode that maps the inode table.
pub const TABLE_INO: u32 = 0;
pub const ROOT_INO: u32 = 1;

pub const SEGMENT_LINES: u32 = (BLOCK / LINE) as u32;
pub const MINI: usize = 512;
pub const MINI_LINES: u32 = (MINI / LINE) as u32;
/// Longest record, in lines: a segment less its header and its link.
pub const RECORD_LINES_MAX: u32 = SEGMENT_LINES - 2;

pub const HEAD: usize = 16;

/// Mounts that generations have bits for.
pub const MOUNT_MAX: u32 = 1 << 24;

// ---------------------------------------------------------------------------------------------------
// Field access. Records are byte arrays: nothing here depends on Rust's layout rules.

#[inline]
pub fn get16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(b[at..at + 2].try_into().unwrap())
}
#[inline]
pub fn get32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().unwrap())
}
#[inline]
pub fn get64(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}
#[inline]
pub fn put16(b: &mut [u8], at: usize, v: u16) {
    b[at..at + 2].copy_from_slice(&v.to_le_bytes());
}
#[inline]
pub fn put32(b: &mut [u8], at: usize, v: u32) {
    b[at..at + 4].copy_from_slice(&v.to_le_bytes());
}
#[inline]
pub fn put64(b: &mut [u8], at: usize, v: u64) {
    b[at..at + 8].copy_from_slice(&v.to_le_bytes());
}

/// A time on media: 34 bits of seconds from -2^31, 30 bits of nanoseconds.
#[inline]
pub fn pack_time(t: Time) -> u64 {
    (((t.sec - Time::SEC_MIN) as u64) << 30) | t.nsec as u64
}

#[inline]
pub fn unpack_time(v: u64) -> Time {
    let nsec = (v & ((1 << 30) - 1)) as u32;
    Time { sec: (v >> 30) as i64 + Time::SEC_MIN, nsec: nsec.min(999_999_999) }
}

// ---------------------------------------------------------------------------------------------------
// Superblock

/// What mkfs decides once. Both copies are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Super {
    pub version: u32,
    pub uuid: [u8; 16],
    /// Seeds every CRC; never shown.
    pub key: [u8; 16],
    pub blocks: u64,
    pub data_in_place: bool,
    pub created: u64,
    pub label: String,
}

pub const SUPER_BYTES: usize = 192;

impl Super {
    pub fn encode(&self) -> [u8; SUPER_BYTES] {
        let mut b = [0; SUPER_BYTES];
        b[0..8].copy_from_slice(&MAGIC);
        put32(&mut b, 8, self.version);
        b[16..32].copy_from_slice(&self.uuid);
        b[32..48].copy_from_slice(&self.key);
        put64(&mut b, 48, self.blocks);
        put64(&mut b, 56, self.created);
        put32(&mut b, 64, BLOCK as u32);
        b[68] = self.data_in_place as u8;
        let label = self.label.as_bytes();
        assert!(label.len() <= LABEL_BYTES_MAX);
        b[72..72 + label.len()].copy_from_slice(label);
        let crc = crc32c(&b[16..], get32(&b, 8));
        put32(&mut b, 12, crc);
        b
    }

    /// `Err` says what is wrong, in words.
    pub fn decode(b: &[u8; SUPER_BYTES]) -> Result<Super, SuperFault> {
        Super::decode_if(b, |intact| intact)
    }

    /// As [`decode`](Super::decode); `verified` hears whether the checksum holds, and answers whether to go on.
    pub fn decode_if(
        b: &[u8; SUPER_BYTES],
        verified: impl FnOnce(bool) -> bool,
    ) -> Result<Super, SuperFault> {
        if b[0..8] != MAGIC {
            return Err(SuperFault::Foreign);
        }
        let version = get32(b, 8);
        if version > VERSION {
            return Err(SuperFault::Newer(version));
        }
        if !verified(crc32c(&b[16..], version) == get32(b, 12)) || version == 0 {
            return Err(SuperFault::Damaged);
        }
        if version < VERSION_OLDEST {
            return Err(SuperFault::Older(version));
        }
        let label = &b[72..135];
        let label = &label[..label.iter().position(|&c| c == 0).unwrap_or(label.len())];
        let label = std::str::from_utf8(label).map_err(|_| SuperFault::Damaged)?;
        let blocks = get64(b, 48);
        let fits = (POOL_BYTES_MIN / BLOCK as u64..=POOL_BLOCKS_MAX).contains(&blocks);
        if get32(b, 64) != BLOCK as u32 || b[68] > 1 || !fits {
            return Err(SuperFault::Damaged);
        }
        Ok(Super {
            version,
            uuid: b[16..32].try_into().unwrap(),
            key: b[32..48].try_into().unwrap(),
            blocks,
            data_in_place: b[68] == 1,
            created: get64(b, 56),
            label: label.to_owned(),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperFault {
    Foreign,
    Newer(u32),
    Older(u32),
    Damaged,
}

/// What changes with every mount and tick. One line, two copies in turn: the valid one with the
/// higher serial counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct State {
    pub serial: u64,
    /// Counts mounts; half of every inode generation, and the incarnation of logs.
    pub mount: u32,
    /// The last user closed the pool, and the checkpoint is whole.
    pub clean: bool,
    /// The last user closed the pool, whether with a checkpoint or not.
    pub closed: bool,
    /// The last mount that did not end cleanly; logs of that incarnation or an older one are sealed
    /// before they grow.
    pub crashed: u32,
    /// Every operation of this epoch and of those before is complete (and, on an ordinary file, synced).
    pub settled: u64,
    pub checkpoint: u32,
    /// Which boot of the host wrote this: after the same boot, the page cache is intact. 0: it is not, for a sync failed.
    pub boot: u64,
    /// Whoever wrote this wrote to the host's page cache: what no sync covers is in doubt after a power loss.
    pub deferred: bool,
}

impl State {
    pub fn encode(&self, key: &[u8; 16]) -> [u8; LINE] {
        let mut b = [0; LINE];
        put64(&mut b, 8, self.serial);
        put32(&mut b, 16, self.mount);
        put32(&mut b, 20, self.clean as u32 | (self.deferred as u32) << 1 | (self.closed as u32) << 2);
        put32(&mut b, 24, self.crashed);
        put32(&mut b, 28, self.checkpoint);
        put64(&mut b, 32, self.settled);
        put64(&mut b, 40, self.boot);
        put32(&mut b, 4, 0x5441_5453);
        let crc = crc32c(&b[4..], crc32c(key, 0));
        put32(&mut b, 0, crc);
        b
    }

    pub fn decode(b: &[u8; LINE], key: &[u8; 16]) -> Option<State> {
        State::is_intact(b, key).then(|| State::fields(b)).flatten()
    }

    pub fn is_intact(b: &[u8; LINE], key: &[u8; 16]) -> bool {
        crc32c(&b[4..], crc32c(key, 0)) == get32(b, 0)
    }

    /// What an intact line says.
    pub fn fields(b: &[u8; LINE]) -> Option<State> {
        if get32(b, 4) != 0x5441_5453 {
            return None;
        }
        let state = State {
            serial: get64(b, 8),
            mount: get32(b, 16),
            clean: get32(b, 20) & 1 != 0,
            deferred: get32(b, 20) & 2 != 0,
            closed: get32(b, 20) & 4 != 0,
            crashed: get32(b, 24),
            checkpoint: get32(b, 28),
            settled: get64(b, 32),
            boot: get64(b, 40),
        };
        // Higher ones could not be counted on.
        (state.mount < MOUNT_MAX && state.serial < 1 << 63 && state.settled < 1 << 47).then_some(state)
    }
}

// ---------------------------------------------------------------------------------------------------
// Inode slot

/// The header line of an inode slot, written once at creation. All changes go to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHeader {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub generation: u64,
    pub rdev: u64,
    /// Packed; also the first atime, mtime and ctime.
    pub btime: u64,
}

/// Where in the header line the log head stands: the address of the first segment, or 0 for the lines
/// of the slot itself; with inverted check bits where the log is damaged. Outside the header's CRC, because log
/// cleaning swings it with one 8-byte store.
pub const LOG_HEAD_OFFSET: u64 = 56;

impl SlotHeader {
    pub fn encode(&self, key_crc: u32, ino: u32) -> Words {
        let pair = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        let mut words = [
            pair(0, self.mode),
            pair(self.uid, self.gid),
            self.generation,
            self.rdev,
            self.btime,
            pair(ino, 0),
            0,
            0,
        ];
        words[0] |= crc32c_words(&words[..6], key_crc) as u64;
        words
    }

    pub fn decode(b: &[u8; LINE], key_crc: u32, ino: u32) -> Option<SlotHeader> {
        SlotHeader::is_intact(b, key_crc).then(|| SlotHeader::fields(b, ino)).flatten()
    }

    pub fn is_intact(b: &[u8; LINE], key_crc: u32) -> bool {
        crc32c(&b[4..48], key_crc) == get32(b, 0)
    }

    /// Whose header it says it is.
    pub fn said_ino(b: &[u8; LINE]) -> u32 {
        get32(b, 40)
    }

    /// What an intact header says, if it is that of inode `ino`.
    pub fn fields(b: &[u8; LINE], ino: u32) -> Option<SlotHeader> {
        (SlotHeader::said_ino(b) == ino).then(|| SlotHeader {
            mode: get32(b, 4),
            uid: get32(b, 8),
            gid: get32(b, 12),
            generation: get64(b, 16),
            rdev: get64(b, 24),
            btime: get64(b, 32),
        })
    }
}

/// A log head: the address of a segment with 16 check bits in the low and high bits that an address
/// of 512-byte granularity below 2^48 leaves free.
pub fn pack_log_head(segment: Addr) -> u64 {
    assert!(segment.0.is_multiple_of(MINI as u64) && segment.0 >> 48 == 0);
    let check = crc32c(&segment.0.to_le_bytes(), 0x10de) as u16;
    segment.0 | (check as u64) << 48
}

/// Check bits inverted: recovery found the log damaged, and without a repair its inode is not used again. A
/// log head still, for who reads what is left.
pub const LOG_CONDEMNED: u64 = 0xffff << 48;

/// Whether a log head says that the log is damaged.
pub fn is_condemned(v: u64) -> bool {
    v == LOG_CONDEMNED || unpack_log_head(v ^ LOG_CONDEMNED).is_some()
}

/// `None` where the check bits do not match.
pub fn unpack_log_head(v: u64) -> Option<Addr> {
    let addr = v & ((1 << 48) - 1);
    (addr.is_multiple_of(MINI as u64) && pack_log_head(Addr(addr)) == v).then_some(Addr(addr))
}

/// The mount that made an inode: the incarnation in which its log begins.
#[inline]
pub fn incarnation(generation: u64) -> u32 {
    (generation >> 40) as u32
}

/// The seed of all records of one log in one incarnation.
pub fn log_seed(key_crc: u32, ino: u32, generation: u64, incarnation: u32) -> u32 {
    let mut b = [0; 16];
    put32(&mut b, 0, ino);
    put64(&mut b, 4, generation);
    put32(&mut b, 12, incarnation);
    crc32c(&b, key_crc)
}

// ---------------------------------------------------------------------------------------------------
// Records

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Type {
    /// The log goes on in another segment.
    Link = 1,
    /// First line of a segment.
    Segment = 2,
    /// From here on the log has a new incarnation.
    Seal = 3,
    /// All attributes, as they are now.
    Attr = 4,
    /// File pages have new blocks, or the bytes behind the old end of file are now data.
    Write = 5,
    /// File pages have no blocks.
    Hole = 6,
    /// Bytes to store over existing file data.
    Redo = 7,
    /// A directory entry appears (and may replace or move others).
    Add = 8,
    /// A directory entry goes.
    Remove = 9,
    /// A directory entry goes to another directory: the other half of an [`Type::Add`].
    RemoveMoved = 10,
    /// An extended attribute is set or removed.
    Xattr = 11,
    /// The target of a symbolic link.
    Symlink = 12,
    /// What consecutive file pages are, said again by the cleaner.
    Pages = 13,
    /// Blocks that failed and are never used again. In the inode table's log alone.
    Bad = 14,
}

/// Set in a record's type byte: the record counts only if the next one does.
pub const MORE: u8 = 0x80;

/// What the checksum of an [`Type::Add`] is changed by, bit by bit, when the name that it added goes without a record of its own.
/// Half of the bits are set, so that damage does not look like it.
pub const WITHDRAWN: u32 = 0x5a3c_96e1;

impl Type {
    /// For sets of types.
    #[inline]
    pub const fn bit(self) -> u16 {
        1 << self as u8
    }

    #[inline]
    pub fn from_byte(b: u8) -> Option<Type> {
        use Type::*;
        const BY_NUMBER: [Option<Type>; 16] = {
            let mut all = [None; 16];
            let known = [
                Link,
                Segment,
                Seal,
                Attr,
                Write,
                Hole,
                Redo,
                Add,
                Remove,
                RemoveMoved,
                Xattr,
                Symlink,
                Pages,
                Bad,
            ];
            let mut i = 0;
            while i < known.len() {
                all[known[i] as usize] = Some(known[i]);
                i += 1;
            }
            all
        };
        BY_NUMBER.get((b & !MORE) as usize).copied().flatten()
    }
}

/// The head of a record.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub crc: u32,
    pub seq: u32,
    /// 48 bits.
    pub epoch: u64,
    pub kind: Type,
    pub more: bool,
    /// The name that it added went since: [`holds`](Head::holds) found that.
    pub withdrawn: bool,
    pub lines: u32,
}

impl Head {
    /// `None` where these cannot be the first bytes of a record.
    #[inline]
    pub fn decode(b: &[u8]) -> Option<Head> {
        let word = get64(b, 8);
        let kind = Type::from_byte((word >> 48) as u8)?;
        let lines = (word >> 56) as u32;
        if lines == 0 || lines > RECORD_LINES_MAX {
            return None;
        }
        Some(Head {
            crc: get32(b, 0),
            seq: get32(b, 4),
            epoch: word & ((1 << 48) - 1),
            kind,
            more: word >> 48 & MORE as u64 != 0,
            withdrawn: false,
            lines,
        })
    }

    /// Whether the record's checksum is right, as it was written or as it was withdrawn, which is noted.
    #[inline]
    pub fn holds(&mut self, record: &[u8], seed: u32) -> bool {
        let off = crc32c(&record[4..], seed) ^ self.crc;
        self.withdrawn = off == WITHDRAWN && self.kind == Type::Add;
        off == 0 || self.withdrawn
    }

    /// Writes the head into `record`, whose lines are complete otherwise, with its CRC.
    #[inline]
    pub fn finish(record: &mut [u8], seq: u32, epoch: u64, kind: u8, seed: u32) {
        debug_assert!(record.len().is_multiple_of(LINE) && epoch >> 48 == 0);
        put32(record, 4, seq);
        put64(record, 8, epoch | (kind as u64) << 48 | ((record.len() / LINE) as u64) << 56);
        let crc = crc32c(&record[4..], seed);
        put32(record, 0, crc);
    }
}

/// A run of file pages and the blocks that hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub page: u32,
    pub count: u32,
    pub block: Block,
}

/// Puts bytes into words that are zero from there on. Who reads these words soon is not held up by stores of another width.
#[inline]
pub fn put_bytes(words: &mut [u64], at: usize, bytes: &[u8]) {
    let (first, rest) = bytes.split_at(bytes.len().min(at.next_multiple_of(8) - at));
    if !first.is_empty() {
        words[at / 8] |= few_bytes(first) << (at % 8 * 8);
    }
    let mut chunks = rest.chunks_exact(8);
    let mut to = words[at.div_ceil(8)..].iter_mut();
    for (chunk, word) in (&mut chunks).zip(&mut to) {
        *word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
    }
    if let [_, ..] = chunks.remainder() {
        *to.next().expect("the words hold the bytes") = few_bytes(chunks.remainder());
    }
}

/// Up to eight bytes as a word.
#[inline]
fn few_bytes(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | byte as u64)
}

impl Extent {
    /// Takes in `next` if it goes on where this one ends, in the file and on media.
    #[inline]
    pub fn join(&mut self, next: Extent) -> bool {
        let joins = self.page + self.count == next.page && self.block.0 + self.count == next.block.0;
        self.count += if joins { next.count } else { 0 };
        joins
    }
}

pub const EXTENT: usize = 12;

/// Offsets of the fields of each record type, from the record's first byte.
pub mod field {
    pub mod write {
        pub const START: usize = 16;
        pub const SIZE: usize = 24;
        pub const MTIME: usize = 32;
        pub const LEN: usize = 40;
        pub const CRC: usize = 44;
        pub const FLAGS: usize = 48;
        pub const EXTENTS: usize = 50;
        /// The first extent stands in the first line, five more in each further line.
        pub const FIRST: usize = 52;
        pub const PER_LINE: usize = 5;

        /// The data was durable before the record was written: nothing to verify.
        pub const SETTLED: u16 = 1;
        /// The blocks are reserved and read as zeros.
        pub const UNWRITTEN: u16 = 2;
        /// Times and size stay as they are (log cleaning).
        pub const MOVED: u16 = 4;
        /// An engine copies the data, which goes on after the record was written: in the place of START stands the
        /// ticket, and until its epoch is settled the record counts only where the completion word of its lane has
        /// reached it (EasyIO §4.2).
        pub const OFFLOADED: u16 = 8;
    }

    pub mod hole {
        pub const PAGE: usize = 16;
        pub const COUNT: usize = 20;
        pub const SIZE: usize = 24;
        pub const MTIME: usize = 32;
    }

    pub mod attr {
        pub const MODE: usize = 16;
        pub const UID: usize = 20;
        pub const GID: usize = 24;
        pub const FLAGS: usize = 28;
        pub const SIZE: usize = 32;
        pub const ATIME: usize = 40;
        pub const MTIME: usize = 48;
        pub const CTIME: usize = 56;
        /// The size is set, and pages behind it lose their blocks.
        pub const TRUNCATE: u32 = 1;
        /// The size is set to a larger one: blocks that are reserved behind the old end stay.
        pub const GROW: u32 = 2;

        /// Whether a record is a truncate's, and not one of other attributes, which has the size as it was.
        pub fn sets_size(record: &[u8]) -> bool {
            super::super::get32(record, FLAGS) & (TRUNCATE | GROW) != 0
        }
    }

    pub mod pages {
        pub const PAGE: usize = 16;
        pub const COUNT: usize = 20;
        /// A word of 4 bytes for each page: its block, or 0 for a hole; [`UNWRITTEN`] is set where the block is
        /// reserved and reads as zeros.
        pub const WORDS: usize = 24;

        pub const UNWRITTEN: u32 = 1 << 31;
    }

    pub mod bad {
        /// First block.
        pub const BLOCK: usize = 16;
        pub const COUNT: usize = 20;
    }

    pub mod redo {
        pub const OFFSET: usize = 16;
        pub const MTIME: usize = 24;
        pub const LEN: usize = 32;
        pub const DATA: usize = 36;
    }

    pub mod add {
        pub const GENERATION: usize = 16;
        pub const MTIME: usize = 24;
        pub const INO: usize = 32;
        pub const COOKIE: usize = 36;
        /// Cookie of the entry of the same name that goes, or 0.
        pub const REPLACES: usize = 40;
        /// Cookie of the entry of this directory under which the inode was known, or 0. With a partner: of the entry that goes to
        /// that one's directory, while a new inode, a whiteout, takes its name.
        pub const MOVED: usize = 44;
        pub const KIND: usize = 48;
        pub const NAME_LEN: usize = 49;
        pub const FLAGS: usize = 50;
        /// Lines that a new inode's own log must have (symbolic link, inherited ACL).
        pub const LINES: usize = 51;
        pub const NAME: usize = 52;

        /// The inode was made for this entry.
        pub const CREATE: u8 = 1;
        /// Half of an operation on two directories: a [`partner`] stands before the name.
        pub const PARTNER: u8 = 2;
        /// Times stay as they are (log cleaning).
        pub const COPIED: u8 = 4;
    }

    pub mod remove {
        pub const GENERATION: usize = 16;
        pub const MTIME: usize = 24;
        pub const INO: usize = 32;
        pub const COOKIE: usize = 36;
        /// Of RemoveMoved alone.
        pub const PARTNER: usize = 40;
    }

    /// The other half of an operation on two directories: which log, where in it, and the number that
    /// both halves carry.
    pub mod partner {
        pub const GENERATION: usize = 0;
        pub const INO: usize = 8;
        pub const SEQ: usize = 12;
        pub const TRANSACTION: usize = 16;
        pub const BYTES: usize = 24;
    }

    pub mod xattr {
        pub const CTIME: usize = 16;
        pub const VALUE_LEN: usize = 24;
        pub const BLOCK: usize = 28;
        pub const CRC: usize = 32;
        pub const NAME_LEN: usize = 36;
        pub const FLAGS: usize = 37;
        pub const NAME: usize = 38;

        pub const REMOVE: u8 = 1;
        /// The value stands in blocks of its own, one run.
        pub const IN_BLOCKS: u8 = 2;
        /// The change time stays as it is (log cleaning).
        pub const COPIED: u8 = 4;
    }

    pub mod symlink {
        pub const LEN: usize = 16;
        /// Of this part in the target: a long one takes two records.
        pub const OFFSET: usize = 18;
        pub const TARGET: usize = 20;
    }

    pub mod link {
        pub const ADDR: usize = 16;
        pub const LINES: usize = 24;
        pub const INCARNATION: usize = 28;
    }

    pub mod segment {
        pub const LINES: usize = 16;
        pub const INCARNATION: usize = 20;
    }

    pub mod seal {
        pub const INCARNATION: usize = 16;
    }
}

// ---------------------------------------------------------------------------------------------------
// Offloaded writes

/// A lane and a place in it: which completion word has to reach which number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub lane: u16,
    /// From 1 on; it never begins anew.
    pub seq: u64,
}

/// Numbers of a lane have so many bits, on media.
pub const TICKET_BITS: u32 = 48;
pub const TICKET_MAX: u64 = (1 << TICKET_BITS) - 1;

impl Ticket {
    pub fn pack(self) -> u64 {
        debug_assert!(self.seq <= TICKET_MAX);
        self.seq | (self.lane as u64) << TICKET_BITS
    }

    /// `None` where there is no such lane, or no such number.
    pub fn unpack(word: u64) -> Option<Ticket> {
        let ticket = Ticket { lane: (word >> TICKET_BITS) as u16, seq: word & TICKET_MAX };
        ((ticket.lane as usize) < LANES && ticket.seq > 0).then_some(ticket)
    }
}

/// Where the completion word of a lane stands: alone in its line, since the threads of several lanes store theirs.
pub fn completion_addr(lane: usize) -> Addr {
    assert!(lane < LANES);
    Addr(STATE_BLOCK * BLOCK as u64 + COMPLETIONS_OFFSET + (lane * LINE) as u64)
}

fn completion_check(lane: usize, seq: u64) -> u64 {
    (crc32c(&seq.to_le_bytes(), 0xc09e_1e7e ^ lane as u32) as u16 as u64) << TICKET_BITS
}

/// A lane's completion word: all copies up to this number are done. Eight bytes, which no memory tears, with 16 check
/// bits.
pub fn pack_completion(lane: usize, seq: u64) -> u64 {
    debug_assert!(seq <= TICKET_MAX);
    seq | completion_check(lane, seq)
}

/// `None` where the check bits do not match. A word that was never written says that nothing is done.
pub fn unpack_completion(lane: usize, word: u64) -> Option<u64> {
    let seq = word & TICKET_MAX;
    (word == 0 || word == pack_completion(lane, seq)).then_some(seq)
}

const _: () = {
    assert!(COMPLETIONS_OFFSET as usize + LANES * LINE <= BLOCK);
    assert!(BLOCK.is_multiple_of(LINE) && SLOT.is_multiple_of(LINE) && MINI.is_multiple_of(LINE));
    assert!(SUPER_BYTES <= STATE_COPY_OFFSET as usize);
    assert!(field::write::FIRST + EXTENT == LINE);
    assert!(field::write::PER_LINE * EXTENT <= LINE);
    assert!(field::attr::CTIME + 8 == LINE);
    assert!(field::remove::PARTNER + field::partner::BYTES == LINE);
    assert!(field::add::NAME + field::partner::BYTES + crate::limits::NAME_BYTES_MAX <= 6 * LINE);
    assert!(LOG_HEAD_OFFSET as usize + 8 == LINE);
    assert!(field::redo::DATA + 1024 <= RECORD_LINES_MAX as usize * LINE);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_packing() {
        for t in [
            Time::new(0, 0),
            Time::new(-1, 999_999_999),
            Time::new(Time::SEC_MIN, 1),
            Time::new(Time::SEC_MAX, 999_999_999),
            Time::new(4_294_967_296, 7),
        ] {
            assert_eq!(unpack_time(pack_time(t)), t);
        }
        assert!(pack_time(Time::new(1, 0)) > pack_time(Time::new(0, 999_999_999)));
    }

    #[test]
    fn a_super_block_with_any_flipped_bit_is_refused() {
        let sb = Super {
            version: VERSION,
            uuid: [7; 16],
            key: [9; 16],
            blocks: 4096,
            data_in_place: false,
            created: 1,
            label: "x".into(),
        };
        let good = sb.encode();
        assert_eq!(Super::decode(&good), Ok(sb));
        for bit in 0..SUPER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Super::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_record_with_any_flipped_bit_does_not_hold_withdrawn_or_not() {
        let seed = 0x1234;
        let mut record = [0x5a; 2 * LINE];
        Head::finish(&mut record, 7, 9, Type::Add as u8, seed);
        for withdrawn in [false, true] {
            if withdrawn {
                let crc = get32(&record, 0) ^ WITHDRAWN;
                put32(&mut record, 0, crc);
            }
            let mut head = Head::decode(&record).unwrap();
            assert!(head.holds(&record, seed));
            assert_eq!(head.withdrawn, withdrawn);
            for bit in 0..record.len() * 8 {
                let mut bad = record;
                bad[bit / 8] ^= 1 << (bit % 8);
                let held = Head::decode(&bad).filter(|head| head.lines == 2);
                assert!(!held.is_some_and(|mut head| head.holds(&bad, seed)), "bit {bit}");
            }
        }
        // Nothing else is ever withdrawn.
        Head::finish(&mut record, 7, 9, Type::Remove as u8, seed);
        let crc = get32(&record, 0) ^ WITHDRAWN;
        put32(&mut record, 0, crc);
        assert!(!Head::decode(&record).unwrap().holds(&record, seed));
    }

    #[test]
    fn a_completion_word_with_any_flipped_bit_is_refused() {
        for (lane, seq) in [(0, 1), (7, 0x1234_5678_9abc), (LANES - 1, TICKET_MAX)] {
            let good = pack_completion(lane, seq);
            assert_eq!(unpack_completion(lane, good), Some(seq));
            assert_eq!(unpack_completion(lane ^ 1, good), None, "it is another lane's");
            for bit in 0..64 {
                assert_eq!(unpack_completion(lane, good ^ 1 << bit), None, "bit {bit}");
            }
        }
        assert_eq!(unpack_completion(3, 0), Some(0));
    }

    #[test]
    fn tickets_survive_packing() {
        for ticket in [Ticket { lane: 0, seq: 1 }, Ticket { lane: LANES as u16 - 1, seq: TICKET_MAX }] {
            assert_eq!(Ticket::unpack(ticket.pack()), Some(ticket));
        }
        assert_eq!(Ticket::unpack(0), None);
        assert_eq!(Ticket::unpack((LANES as u64) << TICKET_BITS | 1), None);
    }

    #[test]
    fn a_log_head_with_any_flipped_bit_is_refused() {
        let good = pack_log_head(Addr(0x1234_5000));
        assert_eq!(unpack_log_head(good), Some(Addr(0x1234_5000)));
        for bit in 0..64 {
            assert_eq!(unpack_log_head(good ^ 1 << bit), None, "bit {bit}");
        }
    }
}
