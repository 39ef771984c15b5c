//! Edits of an image, each of which leaves the checksum of what it touches right.
//!
//! Where things stand is read from the image as it is before the edit, with the production decoders: an edit of
//! what an earlier edit made unreadable does nothing.

use arbitrary::Arbitrary;
use lodestone::fs::format::*;
use lodestone::media::{Addr, LINE, crc32c};

/// Inodes that edits reach: all that the images have.
const INODES: u32 = 48;
/// Records of one log that are walked at most.
const RECORDS_MAX: usize = 2048;

#[derive(Clone, Debug, Arbitrary)]
pub enum Edit {
    /// Anywhere, and no checksum is made right.
    Bytes { at: u32, value: Value },
    /// In the superblock: of the copies with a bit in `copies`.
    Super { copies: u8, at: u8, value: Value },
    /// In one of the four state lines.
    State { line: u8, at: u8, value: Value },
    /// In the header of an inode slot.
    Slot { ino: u8, at: u8, value: Value },
    /// Where a log begins, in units of 512 bytes; its check bits are made right.
    LogHead { ino: u8, to: u16, condemned: bool },
    /// In a record, its head included.
    Record { ino: u8, nth: u16, at: u16, value: Value },
    /// A record becomes another one's content under its own number.
    Copy { ino: u8, nth: u16, from_ino: u8, from: u16 },
    /// A record behind the last.
    Append { ino: u8, record: Appended },
    /// In the head of the checkpoint or in its body.
    Checkpoint { body: bool, at: u16, value: Value },
}

/// A record to be written behind a log's end.
#[derive(Clone, Debug, Arbitrary)]
pub struct Appended {
    pub kind: Type8,
    pub more: bool,
    /// What the epoch is above (or below) what is settled.
    pub epoch: i8,
    /// What follows the head, in words of 4 bytes.
    pub words: Vec<Word>,
}

/// A record type, known or not.
#[derive(Clone, Debug, Arbitrary)]
pub struct Type8(u8);

/// Four bytes of a record; small numbers are what blocks, pages, lengths and inodes are here.
#[derive(Clone, Debug, Arbitrary)]
pub enum Word {
    Zero,
    Small(u8),
    Any(u32),
    Power(u8),
    /// Half of the generation of an inode.
    Generation {
        ino: u8,
        high: bool,
    },
}

/// What a field becomes.
#[derive(Clone, Debug, Arbitrary)]
pub enum Value {
    Byte(u8),
    Half(u16),
    Word(u32),
    Long(u64),
    Flip(u8),
    Add(i8),
    AddWord(i8),
    AllOnes(bool),
}

impl Value {
    /// Stores it, where it fits.
    pub fn put(&self, bytes: &mut [u8], at: usize) {
        let fits = |size: usize| (at + size <= bytes.len()).then_some(at);
        match *self {
            Value::Byte(v) => fits(1).into_iter().for_each(|at| bytes[at] = v),
            Value::Half(v) => fits(2).into_iter().for_each(|at| put16(bytes, at, v)),
            Value::Word(v) => fits(4).into_iter().for_each(|at| put32(bytes, at, v)),
            Value::Long(v) => fits(8).into_iter().for_each(|at| put64(bytes, at, v)),
            Value::Flip(v) => fits(1).into_iter().for_each(|at| bytes[at] ^= v),
            Value::Add(v) => fits(1).into_iter().for_each(|at| bytes[at] = bytes[at].wrapping_add_signed(v)),
            Value::AddWord(v) => {
                if fits(4).is_some() {
                    let old = get32(bytes, at);
                    put32(bytes, at, old.wrapping_add_signed(v.into()));
                }
            }
            Value::AllOnes(long) => {
                let size = if long { 8 } else { 4 };
                if fits(size).is_some() {
                    bytes[at..at + size].fill(0xff);
                }
            }
        }
    }
}

/// A record found in a log, or the place for the next one.
#[derive(Clone, Copy)]
struct Place {
    at: usize,
    lines: u32,
    seq: u32,
    seed: u32,
    /// Lines from here to the segment's end.
    room: u32,
}

/// Applies all edits.
pub fn apply(image: &mut [u8], edits: &[Edit]) {
    for edit in edits {
        // Nothing to do where what it would change is not to be found.
        let _ = apply_one(image, edit);
    }
}

fn apply_one(image: &mut [u8], edit: &Edit) -> Option<()> {
    match edit {
        Edit::Bytes { at, value } => {
            let at = *at as usize % image.len();
            value.put(image, at);
        }
        Edit::Super { copies, at, value } => {
            let last = (image.len() - BLOCK) / BLOCK;
            for (copy, block) in [SUPER_BLOCK as usize, last].into_iter().enumerate() {
                if copies >> copy & 1 == 1 {
                    let bytes = &mut image[block * BLOCK..][..SUPER_BYTES];
                    value.put(bytes, *at as usize % SUPER_BYTES);
                    let crc = crc32c(&bytes[16..], get32(bytes, 8));
                    put32(bytes, 12, crc);
                }
            }
        }
        Edit::State { line, at, value } => {
            let (key, at_line) = (superblock(image)?.key, state_line(image, *line));
            let bytes = &mut image[at_line..at_line + LINE];
            value.put(bytes, *at as usize % LINE);
            let crc = crc32c(&bytes[4..], crc32c(&key, 0));
            put32(bytes, 0, crc);
        }
        Edit::Slot { ino, at, value } => {
            let (key_crc, slot) = (key_crc(image)?, slot(*ino));
            let bytes = &mut image[slot..slot + LINE];
            value.put(bytes, *at as usize % LINE);
            let crc = crc32c(&bytes[4..48], key_crc);
            put32(bytes, 0, crc);
        }
        Edit::LogHead { ino, to, condemned } => {
            let head = pack_log_head(Addr(*to as u64 * MINI as u64));
            let head = if *condemned { head ^ LOG_CONDEMNED } else { head };
            put64(image, slot(*ino) + LOG_HEAD_OFFSET as usize, head);
        }
        Edit::Record { ino, nth, at, value } => {
            let place = record(image, *ino, *nth)?;
            let bytes = &mut image[place.at..][..place.lines as usize * LINE];
            let at = *at as usize % bytes.len();
            value.put(bytes, at);
            finish(image, &place);
        }
        Edit::Copy { ino, nth, from_ino, from } => {
            let (to, from) = (record(image, *ino, *nth)?, record(image, *from_ino, *from)?);
            let lines = from.lines.min(to.room) as usize;
            image.copy_within(from.at..from.at + lines * LINE, to.at);
            put32(image, to.at + 4, to.seq);
            finish(image, &to);
        }
        Edit::Append { ino, record } => append(image, *ino, record)?,
        Edit::Checkpoint { body, at, value } => edit_checkpoint(image, *body, *at, value)?,
    }
    Some(())
}

/// Makes the CRC right of as many lines as the record says it has.
fn finish(image: &mut [u8], place: &Place) {
    let lines = (image[place.at + 15] as u32).clamp(1, place.room) as usize;
    let crc = crc32c(&image[place.at + 4..place.at + lines * LINE], place.seed);
    put32(image, place.at, crc);
}

fn append(image: &mut [u8], ino: u8, record: &Appended) -> Option<()> {
    let (_, end) = walk(image, ino)?;
    let lines = (HEAD + record.words.len() * 4).div_ceil(LINE).min(end.room as usize);
    if lines == 0 {
        return None;
    }
    let mut bytes = vec![0; lines * LINE];
    for (at, word) in (HEAD..lines * LINE).step_by(4).zip(&record.words) {
        let v = match *word {
            Word::Zero => 0,
            Word::Small(v) => v.into(),
            Word::Any(v) => v,
            Word::Power(v) => 1 << (v % 32),
            Word::Generation { ino, high } => {
                let generation = header(image, ino).map_or(0, |h| h.generation);
                (generation >> if high { 32 } else { 0 }) as u32
            }
        };
        put32(&mut bytes, at, v);
    }
    let settled = state(image)?.settled;
    let epoch = settled.saturating_add_signed(record.epoch.into()) & ((1 << 48) - 1);
    let kind = record.kind.0 & !MORE | if record.more { MORE } else { 0 };
    Head::finish(&mut bytes, end.seq, epoch, kind, end.seed);
    image[end.at..end.at + bytes.len()].copy_from_slice(&bytes);
    Some(())
}

fn edit_checkpoint(image: &mut [u8], in_body: bool, at: u16, value: &Value) -> Option<()> {
    let key_crc = key_crc(image)?;
    let block = |n: u32| (n as usize).checked_mul(BLOCK).filter(|at| at + BLOCK <= image.len());
    let head = block(state(image)?.checkpoint)?;
    let bytes = usize::try_from(get64(image, head + 8)).ok().filter(|&n| n < image.len())?;
    // One run: the images are small.
    let body = block(get32(image, head + 24))?;
    if body + bytes > image.len() {
        return None;
    }
    match in_body {
        false => value.put(&mut image[head..head + 64], at as usize % 64),
        true => value.put(&mut image[body..body + bytes], at as usize % bytes.max(1)),
    }
    let crc = crc32c(&image[body..body + bytes], crc32c(&image[head + 8..head + BLOCK], key_crc));
    put32(image, head + 4, crc);
    Some(())
}

fn superblock(image: &[u8]) -> Option<Super> {
    Super::decode(image[SUPER_BLOCK as usize * BLOCK..][..SUPER_BYTES].try_into().expect("its size")).ok()
}

fn key_crc(image: &[u8]) -> Option<u32> {
    superblock(image).map(|sb| crc32c(&sb.key, 0))
}

/// Of the first copy two lines, then of the second.
fn state_line(image: &[u8], line: u8) -> usize {
    let block = match line & 2 {
        0 => STATE_BLOCK as usize * BLOCK,
        _ => image.len() - BLOCK + STATE_COPY_OFFSET as usize,
    };
    block + (line & 1) as usize * LINE
}

fn state(image: &[u8]) -> Option<State> {
    let key = superblock(image)?.key;
    let line = |line| {
        let at = state_line(image, line);
        State::decode(image[at..at + LINE].try_into().expect("a line"), &key)
    };
    (0..4).filter_map(line).max_by_key(|s| s.serial)
}

fn slot(ino: u8) -> usize {
    TABLE_BLOCK as usize * BLOCK + (ino as u32 % INODES) as usize * SLOT
}

fn header(image: &[u8], ino: u8) -> Option<SlotHeader> {
    let line = image[slot(ino)..][..LINE].try_into().expect("a line");
    SlotHeader::decode(line, key_crc(image)?, ino as u32 % INODES)
}

fn record(image: &[u8], ino: u8, nth: u16) -> Option<Place> {
    let (records, _) = walk(image, ino)?;
    records.get(nth as usize % records.len().max(1)).copied()
}

/// The records of a log, links, segment heads and seals among them, and the place behind the last.
fn walk(image: &[u8], ino: u8) -> Option<(Vec<Place>, Place)> {
    let (key_crc, header, slot) = (key_crc(image)?, header(image, ino)?, slot(ino));
    let seed = |incarnation| log_seed(key_crc, ino as u32 % INODES, header.generation, incarnation);
    let segment = |at: usize| {
        let line = image.get(at..at + LINE)?;
        let room = get32(line, field::segment::LINES);
        (at + room as usize * LINE <= image.len() && (1..=SEGMENT_LINES).contains(&room)).then(|| Place {
            at,
            lines: 1,
            seq: get32(line, 4),
            seed: seed(get32(line, field::segment::INCARNATION)),
            room,
        })
    };
    let mut place = match get64(image, slot + LOG_HEAD_OFFSET as usize) {
        0 => {
            let seed = seed(incarnation(header.generation));
            Place { at: slot + LINE, lines: 0, seq: 0, seed, room: SLOT_LINES }
        }
        head => segment(unpack_log_head(head)?.0 as usize)?,
    };
    let mut records = Vec::new();
    while records.len() < RECORDS_MAX {
        let found = Head::decode(image.get(place.at..place.at + LINE.min(place.room as usize * LINE))?)
            .filter(|head| head.seq == place.seq && head.lines <= place.room)
            .filter(|head| {
                crc32c(&image[place.at + 4..][..head.lines as usize * LINE - 4], place.seed) == head.crc
            });
        let Some(head) = found else { break };
        let bytes = &image[place.at..];
        place.lines = head.lines;
        records.push(place);
        if head.kind == Type::Link {
            let Some(next) = segment(get64(bytes, field::link::ADDR) as usize % image.len()) else { break };
            place = next;
            continue;
        }
        if head.kind == Type::Seal {
            place.seed = seed(get32(bytes, field::seal::INCARNATION));
        }
        place.at += head.lines as usize * LINE;
        place.seq = place.seq.wrapping_add(head.lines);
        place.room -= head.lines;
        if place.room == 0 {
            break;
        }
    }
    Some((records, place))
}
