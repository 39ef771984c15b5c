//! The index of one directory in DRAM: by name for lookup, by cookie for readdir and for the log cleaner.
//! Built from the directory's log at first use; a lookup never touches the media.
//!
//! An entry is one *record*, fixed part and name together, in an arena of 16 KiB chunks, so that a lookup
//! misses the cache once for the table and once for the entry. A record does not move when others come and
//! go; when more than two thirds of a chunk are dead, its living records move to the open chunk.
//!
//! No call ever rebuilds the whole, however large the directory is: the name table (`names`) grows by small
//! tables. The cookie order is a sorted list in pieces of [`PIECE_COOKIES_MAX`], so that entries may come in
//! any order, as they do when a cleaned log is read.
//!
//! Names are chosen by users, perhaps by hostile ones: the hash is seeded anew in each process.
//!
//! Invariants, executed by [`DirIndex::check_state`]:
//!
//! 1. Pieces hold 1 to [`PIECE_COOKIES_MAX`] cookies, all ascending; `first` is a piece's first.
//! 2. Each cookie leads to a living record that bears it; there are as many cookies as records.
//! 3. Each record is found by its name, with its inode; the table holds nothing else.
//! 4. A chunk counts its dead bytes right; mostly dead is at most the open one; spare ones are empty.
//! 5. Lines are counted right.
//! 6. No cookie is above `last_cookie`.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use rapidhash::v3::{RapidSecrets, rapidhash_v3_micro_inline};

use super::names::{self, Names, Place};
use super::types::{Ino, Kind};
use crate::limits::NAME_BYTES_MAX;

/// Cookies 1 and 2 are "." and "..", which are not entries here; 0 begins a listing.
pub const COOKIE_FIRST: u32 = 3;

/// Bytes of an arena chunk. A record lies in one chunk.
const CHUNK_BYTES: usize = 16 << 10;
/// Records begin at multiples of this, so that 32 bits name a place in 32 GiB: a chunk and a multiple.
const RECORD_ALIGN: usize = 8;
const CHUNK_PLACES: u32 = (CHUNK_BYTES / RECORD_ALIGN) as u32;
const CHUNKS_MAX: usize = (1 << 32) / CHUNK_PLACES as usize;
/// Cookies in one piece of the order.
const PIECE_COOKIES_MAX: usize = 256;
/// An entry without its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dirent {
    pub ino: Ino,
    pub generation: u64,
    pub kind: Kind,
    /// Its place in listings, for as long as it lives.
    pub cookie: u32,
    /// Position of its record in the directory's log.
    pub seq: u32,
    /// Lines of that record.
    pub lines: u8,
}

/// An entry in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Named<'a> {
    pub name: &'a [u8],
    pub entry: Dirent,
}

/// An entry taken out of the index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Removed {
    pub name: Box<[u8]>,
    pub entry: Dirent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InsertError {
    /// The name is there.
    NameExists,
    /// Another entry has the cookie, or it is below [`COOKIE_FIRST`].
    CookieTaken,
    /// 32 GiB of records.
    Full,
}

/// See the file's head.
#[derive(Default)]
pub struct DirIndex {
    arena: Arena,
    names: Names,
    order: Order,
    live_lines: u64,
    /// The highest cookie ever inserted.
    last_cookie: u32,
    /// Once that is `u32::MAX`: where the last free cookie was found.
    gap_from: u32,
}

static SECRETS: LazyLock<RapidSecrets> =
    LazyLock::new(|| RapidSecrets::seed(RandomState::new().hash_one(0u64)));

#[inline]
fn hash_of(name: &[u8]) -> u32 {
    rapidhash_v3_micro_inline::<true, false>(name, &SECRETS) as u32
}

/// A record's fixed part, as it lies in the arena, little-endian like everything in Lodestone:
/// generation 8, ino 4, cookie 4, seq 4, kind 1 (0: dead), lines 1, name length 1.
type Head = [u8; HEAD_BYTES];
const HEAD_BYTES: usize = 23;
const KIND: usize = 20;
const LINES: usize = 21;
const NAME_LEN: usize = 22;

/// Field by field where they stay: a head put together elsewhere would be loaded in pieces larger than it was stored in,
/// and such a load waits for all stores before it, the fence of the operation included.
#[inline]
fn encode(head: &mut Head, entry: &Dirent, name_len: u8) {
    head[0..8].copy_from_slice(&entry.generation.to_le_bytes());
    head[8..12].copy_from_slice(&entry.ino.0.to_le_bytes());
    head[12..16].copy_from_slice(&entry.cookie.to_le_bytes());
    head[16..20].copy_from_slice(&entry.seq.to_le_bytes());
    head[KIND] = entry.kind as u8;
    head[LINES] = entry.lines;
    head[NAME_LEN] = name_len;
}

#[inline]
fn word(head: &Head, at: usize) -> u32 {
    u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
}

#[inline]
fn decode(head: &Head) -> Dirent {
    Dirent {
        generation: word(head, 0) as u64 | (word(head, 4) as u64) << 32,
        ino: Ino(word(head, 8)),
        cookie: word(head, 12),
        seq: word(head, 16),
        kind: Kind::from_dtype(head[KIND]).expect("a living record has a kind"),
        lines: head[LINES],
    }
}

/// Bytes of a record with a name of this length.
#[inline]
fn record_bytes(name_len: usize) -> usize {
    (HEAD_BYTES + name_len).next_multiple_of(RECORD_ALIGN)
}

impl DirIndex {
    pub fn new() -> DirIndex {
        DirIndex::default()
    }

    #[inline]
    pub fn lookup(&self, name: &[u8]) -> Option<Dirent> {
        self.lookup_and(name, |_| ())
    }

    /// [`lookup`](DirIndex::lookup), where `expect` is told the inode that it probably is, before the name is compared: to ask for
    /// what it will need.
    #[inline]
    pub fn lookup_and(&self, name: &[u8], expect: impl Fn(Ino)) -> Option<Dirent> {
        let found = self.find(hash_of(name), name, expect)?;
        // The table's number, which is there before the record is.
        Some(Dirent { ino: found.ino, ..decode(self.arena.head(found.place)) })
    }

    #[inline]
    fn find(&self, hash: u32, name: &[u8], expect: impl Fn(Ino)) -> Option<names::Named> {
        self.names.find(hash, |named| {
            expect(named.ino);
            self.arena.name(named.place) == name
        })
    }

    #[inline]
    pub fn by_cookie(&self, cookie: u32) -> Option<Named<'_>> {
        self.order.find(cookie).map(|place| self.arena.named(place))
    }

    /// A cookie for the next entry: above all others, so that no listing under way meets it; after 2^32
    /// entries any free one. `None` when there is none left. It is taken by `insert`, not by this.
    pub fn next_cookie(&self) -> Option<u32> {
        let none = COOKIE_FIRST - 1;
        match self.last_cookie.max(none) {
            u32::MAX => self.order.gap_after(self.gap_from.max(none)).or_else(|| self.order.gap_after(none)),
            last => Some(last + 1),
        }
    }

    /// Adds an entry, in any order of cookies.
    pub fn insert(&mut self, name: &[u8], entry: Dirent) -> Result<(), InsertError> {
        assert!(!name.is_empty() && name.len() <= NAME_BYTES_MAX, "names were checked before");
        let hash = hash_of(name);
        if self.find(hash, name, |_| ()).is_some() {
            return Err(InsertError::NameExists);
        }
        let taken = entry.cookie <= self.last_cookie && self.order.find(entry.cookie).is_some();
        if taken || entry.cookie < COOKIE_FIRST {
            return Err(InsertError::CookieTaken);
        }
        if self.arena.is_full() {
            return Err(InsertError::Full);
        }
        let (place, closed) = self.arena.append(&entry, name);
        let named = names::Named { ino: entry.ino, place };
        self.names.insert(hash, named);
        self.order.insert(entry.cookie, place);
        self.live_lines += entry.lines as u64;
        if self.last_cookie == u32::MAX {
            self.gap_from = entry.cookie;
        }
        self.last_cookie = self.last_cookie.max(entry.cookie);
        if let Some(chunk) = closed {
            self.compact(chunk);
        }
        Ok(())
    }

    pub fn remove(&mut self, name: &[u8]) -> Option<Dirent> {
        let found = self.find(hash_of(name), name, |_| ())?;
        Some(self.remove_record(found.place))
    }

    pub fn remove_cookie(&mut self, cookie: u32) -> Option<Removed> {
        let place = self.order.find(cookie)?;
        let name = self.arena.name(place).into();
        Some(Removed { name, entry: self.remove_record(place) })
    }

    /// The entry's record is at `seq` now (an update, or the cleaner moved it). False without the entry.
    pub fn set_seq(&mut self, cookie: u32, seq: u32, lines: u8) -> bool {
        let Some(place) = self.order.find(cookie) else { return false };
        let entry = decode(self.arena.head(place));
        self.write(place, Dirent { seq, lines, ..entry });
        true
    }

    /// Gives the entry with the cookie of `entry` all its other fields; answers what it was. The name stays.
    pub fn replace(&mut self, entry: Dirent) -> Option<Dirent> {
        let place = self.order.find(entry.cookie)?;
        Some(self.write(place, entry))
    }

    /// All entries, their cookies ascending.
    pub fn iter(&self) -> impl Iterator<Item = Named<'_>> {
        self.order.all().map(|place| self.arena.named(place))
    }

    /// The entries with cookies below this one, descending.
    pub fn iter_below(&self, cookie: u64) -> impl Iterator<Item = Named<'_>> {
        self.order.below(cookie).map(|place| self.arena.named(place))
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.names.len() == 0
    }

    /// Log lines that the entries' records take.
    pub fn live_lines(&self) -> u64 {
        self.live_lines
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.arena.heap_bytes() + self.names.heap_bytes() + self.order.heap_bytes()
    }

    fn write(&mut self, place: Place, entry: Dirent) -> Dirent {
        let head = self.arena.head_mut(place);
        let old = decode(head);
        encode(head, &entry, head[NAME_LEN]);
        if entry.ino != old.ino {
            let hash = hash_of(self.arena.name(place));
            self.names.replace(hash, place, names::Named { ino: entry.ino, place });
        }
        self.live_lines = self.live_lines - old.lines as u64 + entry.lines as u64;
        old
    }

    fn remove_record(&mut self, place: Place) -> Dirent {
        let entry = decode(self.arena.head(place));
        self.names.remove(hash_of(self.arena.name(place)), place);
        self.order.remove(entry.cookie);
        self.live_lines -= entry.lines as u64;
        self.arena.kill(place);
        self.compact(place / CHUNK_PLACES);
        if self.is_empty() && self.arena.chunks.len() > 1 {
            (self.arena, self.names, self.order) = Default::default();
        }
        entry
    }

    /// Moves the living records out of a closed chunk that is mostly dead.
    fn compact(&mut self, chunk: u32) {
        let mut next = Some(chunk);
        while let Some(chunk) = next.take_if(|chunk| self.arena.is_mostly_dead(*chunk)) {
            let bytes = self.arena.take_chunk(chunk);
            for (offset, head, name) in records(&bytes) {
                let old = chunk * CHUNK_PLACES + (offset / RECORD_ALIGN) as u32;
                let entry = decode(head);
                let (new, closed) = self.arena.append(&entry, name);
                self.names.replace(hash_of(name), old, names::Named { ino: entry.ino, place: new });
                self.order.moved(entry.cookie, new);
                next = next.or(closed);
            }
            self.arena.spare.push(chunk);
        }
    }
}

/// The living records of a chunk: offset, fixed part, name.
fn records(bytes: &[u8]) -> impl Iterator<Item = (usize, &Head, &[u8])> {
    let mut at = 0;
    let all = std::iter::from_fn(move || {
        let offset = at;
        let (head, rest) = bytes.get(offset..)?.split_first_chunk::<HEAD_BYTES>()?;
        let len = head[NAME_LEN] as usize;
        at += record_bytes(len);
        Some((offset, head, &rest[..len]))
    });
    all.filter(|(_, head, _)| head[KIND] != 0)
}

/// Records, one after the other.
#[derive(Default)]
struct Arena {
    chunks: Vec<Chunk>,
    /// Chunk that takes new records, if there is any chunk.
    open: u32,
    /// Numbers of chunks given up.
    spare: Vec<u32>,
}

#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    dead: usize,
}

impl Arena {
    #[inline]
    fn tail(&self, place: Place) -> &[u8] {
        let offset = (place % CHUNK_PLACES) as usize * RECORD_ALIGN;
        &self.chunks[(place / CHUNK_PLACES) as usize].bytes[offset..]
    }

    #[inline]
    fn head(&self, place: Place) -> &Head {
        self.tail(place).first_chunk().expect("a record is whole")
    }

    #[inline]
    fn head_mut(&mut self, place: Place) -> &mut Head {
        let offset = (place % CHUNK_PLACES) as usize * RECORD_ALIGN;
        let bytes = &mut self.chunks[(place / CHUNK_PLACES) as usize].bytes;
        bytes[offset..].first_chunk_mut().expect("a record is whole")
    }

    #[inline]
    fn name(&self, place: Place) -> &[u8] {
        let (head, rest) = self.tail(place).split_first_chunk::<HEAD_BYTES>().expect("a record is whole");
        &rest[..head[NAME_LEN] as usize]
    }

    // Listings would store it by words, call by call, and load it as vectors.
    #[inline(always)]
    fn named(&self, place: Place) -> Named<'_> {
        Named { name: self.name(place), entry: decode(self.head(place)) }
    }

    fn is_full(&self) -> bool {
        self.spare.is_empty() && self.chunks.len() == CHUNKS_MAX
    }

    /// Adds a record. Answers its place, and the chunk that was closed because it had no room.
    fn append(&mut self, entry: &Dirent, name: &[u8]) -> (Place, Option<u32>) {
        let need = record_bytes(name.len());
        let mut closed = None;
        if self.chunks.is_empty() {
            self.chunks.push(Chunk::default());
        } else if self.chunks[self.open as usize].bytes.len() + need > CHUNK_BYTES {
            closed = Some(self.open);
            self.open = self.spare.pop().unwrap_or_else(|| {
                self.chunks.push(Chunk::default());
                self.chunks.len() as u32 - 1
            });
            self.chunks[self.open as usize].bytes.reserve_exact(CHUNK_BYTES);
        }
        let bytes = &mut self.chunks[self.open as usize].bytes;
        let offset = bytes.len();
        bytes.resize(offset + need, 0);
        let record = bytes[offset..].split_first_chunk_mut::<HEAD_BYTES>();
        let (head, rest) = record.expect("there is room for the whole record");
        encode(head, entry, name.len() as u8);
        rest[..name.len()].copy_from_slice(name);
        (self.open * CHUNK_PLACES + (offset / RECORD_ALIGN) as u32, closed)
    }

    fn kill(&mut self, place: Place) {
        let head = self.head_mut(place);
        head[KIND] = 0;
        let len = record_bytes(head[NAME_LEN] as usize);
        self.chunks[(place / CHUNK_PLACES) as usize].dead += len;
    }

    fn is_mostly_dead(&self, chunk: u32) -> bool {
        let Chunk { bytes, dead } = &self.chunks[chunk as usize];
        chunk != self.open && dead * 3 > bytes.len() * 2
    }

    fn take_chunk(&mut self, chunk: u32) -> Vec<u8> {
        std::mem::take(&mut self.chunks[chunk as usize]).bytes
    }

    fn heap_bytes(&self) -> usize {
        let chunks: usize = self.chunks.iter().map(|chunk| chunk.bytes.capacity()).sum();
        chunks + self.chunks.capacity() * size_of::<Chunk>() + self.spare.capacity() * size_of::<u32>()
    }
}

/// The cookies, ascending, in pieces.
#[derive(Default)]
struct Order {
    pieces: Vec<Piece>,
}

struct Piece {
    first: u32,
    cookies: Vec<(u32, Place)>,
}

impl Piece {
    fn last(&self) -> u32 {
        self.first.max(self.cookies.last().map_or(0, |last| last.0))
    }

    /// Where the cookie is, or would be. Without gaps before it, it is where its distance says.
    #[inline]
    fn search(&self, cookie: u32) -> Result<usize, usize> {
        let guess = cookie.wrapping_sub(self.first) as usize;
        match self.cookies.get(guess) {
            Some(&(found, _)) if found == cookie => Ok(guess),
            _ => self.cookies.binary_search_by_key(&cookie, |&(cookie, _)| cookie),
        }
    }
}

impl Order {
    /// The piece that has the cookie, if one has it: the last that does not begin above it.
    #[inline]
    fn piece_of(&self, cookie: u32) -> usize {
        self.pieces.partition_point(|piece| piece.first <= cookie).saturating_sub(1)
    }

    #[inline]
    fn find(&self, cookie: u32) -> Option<Place> {
        let piece = self.pieces.get(self.piece_of(cookie))?;
        piece.search(cookie).ok().map(|at| piece.cookies[at].1)
    }

    fn moved(&mut self, cookie: u32, place: Place) {
        let index = self.piece_of(cookie);
        let at = self.pieces[index].search(cookie).expect("every record is in the order");
        self.pieces[index].cookies[at].1 = place;
    }

    fn insert(&mut self, cookie: u32, place: Place) {
        let mut index = self.piece_of(cookie);
        let is_last = index + 1 == self.pieces.len();
        match self.pieces.get_mut(index) {
            None => {
                self.pieces.push(Piece { first: cookie, cookies: vec![(cookie, place)] });
                return;
            }
            Some(piece) if piece.cookies.len() == PIECE_COOKIES_MAX => {
                // At the end, as new cookies come, pieces stay full; elsewhere halves leave room.
                let at_end = is_last && cookie > piece.last();
                let keep = if at_end { PIECE_COOKIES_MAX } else { PIECE_COOKIES_MAX / 2 };
                let mut cookies = Vec::with_capacity(PIECE_COOKIES_MAX);
                cookies.extend(piece.cookies.drain(keep..));
                let first = cookies.first().map_or(cookie, |first| first.0);
                self.pieces.insert(index + 1, Piece { first, cookies });
                index += (cookie >= first) as usize;
            }
            Some(_) => {}
        }
        let piece = &mut self.pieces[index];
        let at = match piece.cookies.last() {
            Some(last) if last.0 >= cookie => piece.search(cookie).unwrap_err(),
            _ => piece.cookies.len(),
        };
        piece.cookies.insert(at, (cookie, place));
        piece.first = piece.cookies[0].0;
    }

    fn remove(&mut self, cookie: u32) {
        let index = self.piece_of(cookie);
        let piece = &mut self.pieces[index];
        let at = piece.search(cookie).expect("every record is in the order");
        piece.cookies.remove(at);
        match piece.cookies.first() {
            Some(first) => piece.first = first.0,
            None => {
                self.pieces.remove(index);
                return;
            }
        }
        if let [piece, next, ..] = &mut self.pieces[index..]
            && piece.cookies.len() + next.cookies.len() <= PIECE_COOKIES_MAX / 2
        {
            piece.cookies.append(&mut next.cookies);
            self.pieces.remove(index + 1);
        }
    }

    fn all(&self) -> impl DoubleEndedIterator<Item = Place> {
        places(&self.pieces)
    }

    fn below(&self, cookie: u64) -> impl Iterator<Item = Place> {
        let (whole, rest) = self.pieces.split_at(self.pieces.partition_point(|p| (p.last() as u64) < cookie));
        let cut = rest
            .first()
            .map_or(&[][..], |p| &p.cookies[..p.cookies.partition_point(|c| (c.0 as u64) < cookie)]);
        cut.iter().rev().map(|&(_, place)| place).chain(places(whole).rev())
    }

    /// The first cookie above `from` that no entry has.
    fn gap_after(&self, from: u32) -> Option<u32> {
        let mut want = from.checked_add(1)?;
        for piece in &self.pieces[self.piece_of(want).min(self.pieces.len())..] {
            if want > piece.last() {
                continue;
            }
            let Ok(at) = piece.search(want) else { return Some(want) };
            let dense = (piece.last() - want) as usize == piece.cookies.len() - 1 - at;
            if !dense {
                let taken = piece.cookies[at..].iter().zip(want..).take_while(|(c, want)| c.0 == *want);
                return Some(want + taken.count() as u32);
            }
            want = piece.last().checked_add(1)?;
        }
        Some(want)
    }

    fn heap_bytes(&self) -> usize {
        let cookies: usize = self.pieces.iter().map(|piece| piece.cookies.capacity()).sum();
        cookies * size_of::<(u32, Place)>() + self.pieces.capacity() * size_of::<Piece>()
    }
}

fn places(pieces: &[Piece]) -> impl DoubleEndedIterator<Item = Place> {
    pieces.iter().flat_map(|piece| &piece.cookies).map(|&(_, place)| place)
}

/// The invariants of the file's head.
impl DirIndex {
    /// Panics with the number of the invariant that does not hold.
    pub fn check_state(&self) {
        let pieces = &self.order.pieces;
        for piece in pieces {
            assert!((1..=PIECE_COOKIES_MAX).contains(&piece.cookies.len()), "1: a piece's length");
            assert_eq!(piece.first, piece.cookies[0].0, "1: a piece's first");
        }
        let cookies: Vec<_> = pieces.iter().flat_map(|piece| piece.cookies.iter().copied()).collect();
        assert!(cookies.is_sorted_by(|a, b| a.0 < b.0), "1: cookies ascend");
        assert_eq!(cookies.len(), self.len(), "2: cookies and records");
        let mut lines = 0;
        for &(cookie, place) in &cookies {
            let entry = decode(self.arena.head(place));
            assert_eq!(entry.cookie, cookie, "2: the record bears its cookie");
            assert_eq!(self.lookup(self.arena.name(place)), Some(entry), "3: found by its name");
            lines += entry.lines as u64;
        }
        self.names.check_state(|place| hash_of(self.arena.name(place)));
        self.arena.check_state(self.len());
        assert_eq!(lines, self.live_lines, "5: live lines");
        assert!(cookies.last().is_none_or(|last| last.0 <= self.last_cookie), "6: the last cookie");
    }
}

impl Arena {
    fn check_state(&self, len: usize) {
        let mut living = 0;
        for (number, chunk) in (0..).zip(&self.chunks) {
            let records: Vec<usize> =
                records(&chunk.bytes).map(|(_, _, name)| record_bytes(name.len())).collect();
            living += records.len();
            assert_eq!(records.iter().sum::<usize>() + chunk.dead, chunk.bytes.len(), "4: dead bytes");
            assert!(!self.is_mostly_dead(number), "4: chunk {number} is mostly dead");
        }
        assert_eq!(living, len, "2: living records");
        assert!(self.spare.iter().all(|&c| self.chunks[c as usize].bytes.capacity() == 0), "4: spare");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn entry(cookie: u32) -> Dirent {
        Dirent {
            ino: Ino(cookie.wrapping_mul(7)),
            generation: (cookie as u64) << 33 | 5,
            kind: if cookie.is_multiple_of(2) { Kind::File } else { Kind::Directory },
            cookie,
            seq: cookie ^ 0x5555,
            lines: cookie as u8 % 4 + 1,
        }
    }

    fn name(i: u32) -> Vec<u8> {
        format!("file-{i:07}.dat").into_bytes()
    }

    fn filled(count: u32) -> DirIndex {
        let mut index = DirIndex::new();
        for i in 0..count {
            let cookie = index.next_cookie().unwrap();
            assert_eq!(cookie, COOKIE_FIRST + i);
            index.insert(&name(i), entry(cookie)).unwrap();
        }
        index
    }

    #[test]
    fn a_large_directory_is_found_listed_and_small() {
        let count = 100_000;
        let mut index = filled(count);
        index.check_state();
        for i in (0..count).step_by(77) {
            assert_eq!(index.lookup(&name(i)), Some(entry(i + COOKIE_FIRST)));
            assert_eq!(index.by_cookie(i + COOKIE_FIRST).unwrap().name, name(i));
        }
        assert_eq!(index.lookup(b"missing"), None);
        assert_eq!(index.iter().count(), count as usize);
        let per_entry = index.heap_bytes() / count as usize;
        assert!(per_entry <= 64 + name(0).len(), "{per_entry} bytes each");

        let full = index.heap_bytes();
        for i in (0..count).filter(|i| i % 10 != 0) {
            assert!(index.remove(&name(i)).is_some());
        }
        index.check_state();
        assert_eq!(index.len(), count as usize / 10);
        assert!(index.heap_bytes() < full / 3, "{} of {full}", index.heap_bytes());
        let listed: Vec<u32> = index.iter().map(|found| found.entry.cookie).collect();
        assert_eq!(listed, (0..count / 10).map(|i| i * 10 + COOKIE_FIRST).collect::<Vec<_>>());
        for i in (0..count).step_by(10) {
            assert_eq!(&*index.remove_cookie(i + COOKIE_FIRST).unwrap().name, name(i));
        }
        index.check_state();
        assert!(index.is_empty() && index.heap_bytes() == 0, "{}", index.heap_bytes());
    }

    #[test]
    fn entries_come_in_any_order_of_cookies() {
        let mut index = DirIndex::new();
        let count = 5000u32;
        for i in 0..count {
            let cookie = COOKIE_FIRST + i.wrapping_mul(2_654_435_761) % 4_294_967_291;
            index.insert(&name(i), entry(cookie)).unwrap();
        }
        index.check_state();
        let listed: Vec<u32> = index.iter().map(|found| found.entry.cookie).collect();
        assert!(listed.len() == count as usize && listed.is_sorted());
    }

    #[test]
    fn cookies_wrap_into_gaps() {
        let mut index = filled(2000);
        assert!(index.remove_cookie(700).is_some() && index.remove_cookie(1500).is_some());
        index.insert(b"last", entry(u32::MAX)).unwrap();
        assert_eq!(index.next_cookie(), Some(700));
        index.insert(b"a", entry(700)).unwrap();
        assert_eq!(index.next_cookie(), Some(1500));
        index.insert(b"b", entry(1500)).unwrap();
        assert_eq!(index.next_cookie(), Some(2003));
        index.insert(b"c", entry(2003)).unwrap();
        // Goes on from there, and round when the end is reached.
        assert!(index.remove_cookie(10).is_some());
        assert_eq!(index.next_cookie(), Some(2004));
        index.insert(b"d", entry(u32::MAX - 1)).unwrap();
        assert_eq!(index.next_cookie(), Some(10));
        index.check_state();
    }

    #[test]
    fn names_and_cookies_are_unique() {
        let mut index = filled(10);
        assert_eq!(index.insert(&name(3), entry(99)), Err(InsertError::NameExists));
        assert_eq!(index.insert(b"new", entry(5)), Err(InsertError::CookieTaken));
        assert_eq!(index.insert(b"new", entry(2)), Err(InsertError::CookieTaken));
        assert!(!index.set_seq(99, 1, 1) && index.remove_cookie(99).is_none());
        index.check_state();
    }

    #[test]
    fn one_name_made_and_removed_for_ever_takes_no_memory() {
        let mut index = filled(3);
        for _ in 0..100_000 {
            let cookie = index.next_cookie().unwrap();
            index.insert(b"temporary", entry(cookie)).unwrap();
            index.remove(b"temporary").unwrap();
        }
        index.check_state();
        assert!(index.heap_bytes() < 2 * CHUNK_BYTES + 4096, "{}", index.heap_bytes());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert { name: u32, cookie: Option<u32> },
        Remove { name: u32 },
        RemoveCookie { which: usize },
        SetSeq { which: usize, seq: u32, lines: u8 },
        Replace { which: usize, ino: u32 },
    }

    fn op() -> impl Strategy<Value = Op> {
        let cookie = prop_oneof![
            6 => Just(None),
            2 => (0..3000u32).prop_map(Some),
            1 => (u32::MAX - 5..=u32::MAX).prop_map(Some)
        ];
        prop_oneof![
            6 => (0..400u32, cookie).prop_map(|(name, cookie)| Op::Insert { name, cookie }),
            2 => (0..400u32).prop_map(|name| Op::Remove { name }),
            2 => any::<usize>().prop_map(|which| Op::RemoveCookie { which }),
            1 => (any::<usize>(), any::<u32>(), 0..9u8)
                .prop_map(|(which, seq, lines)| Op::SetSeq { which, seq, lines }),
            1 => (any::<usize>(), any::<u32>()).prop_map(|(which, ino)| Op::Replace { which, ino }),
        ]
    }

    /// Names of all lengths.
    fn test_name(i: u32) -> Vec<u8> {
        let mut name = format!("{i}-").into_bytes();
        name.resize((i as usize * 37) % 250 + 5, b'a' + i as u8 % 26);
        name
    }

    #[derive(Default)]
    struct Model {
        by_cookie: BTreeMap<u32, (Vec<u8>, Dirent)>,
    }

    impl Model {
        fn by_name(&self, name: &[u8]) -> Option<Dirent> {
            self.by_cookie.values().find(|(other, _)| other == name).map(|(_, entry)| *entry)
        }

        fn cookie(&self, which: usize) -> u32 {
            self.by_cookie.keys().copied().nth(which % self.by_cookie.len().max(1)).unwrap_or(77)
        }

        fn apply(&mut self, index: &mut DirIndex, op: &Op) {
            match *op {
                Op::Insert { name, cookie } => self.insert(index, &test_name(name), cookie),
                Op::Remove { name } => {
                    let removed = index.remove(&test_name(name));
                    assert_eq!(removed, self.by_name(&test_name(name)));
                    removed.map(|entry| self.by_cookie.remove(&entry.cookie));
                }
                Op::RemoveCookie { which } => {
                    let cookie = self.cookie(which);
                    let removed = index.remove_cookie(cookie).map(|r| (r.name.into_vec(), r.entry));
                    assert_eq!(removed, self.by_cookie.remove(&cookie));
                }
                Op::SetSeq { which, seq, lines } => {
                    let cookie = self.cookie(which);
                    let found = self.by_cookie.get_mut(&cookie);
                    assert_eq!(index.set_seq(cookie, seq, lines), found.is_some());
                    if let Some((_, entry)) = found {
                        *entry = Dirent { seq, lines, ..*entry };
                    }
                }
                Op::Replace { which, ino } => {
                    let cookie = self.cookie(which);
                    let new = Dirent { ino: Ino(ino), ..entry(cookie) };
                    let old = self.by_cookie.get_mut(&cookie).map(|(_, e)| std::mem::replace(e, new));
                    assert_eq!(index.replace(new), old);
                }
            }
        }

        fn insert(&mut self, index: &mut DirIndex, name: &[u8], cookie: Option<u32>) {
            let cookie = cookie.unwrap_or_else(|| {
                let cookie = index.next_cookie().unwrap();
                assert!(cookie >= COOKIE_FIRST && !self.by_cookie.contains_key(&cookie));
                cookie
            });
            let expected = if self.by_name(name).is_some() {
                Err(InsertError::NameExists)
            } else if cookie < COOKIE_FIRST || self.by_cookie.contains_key(&cookie) {
                Err(InsertError::CookieTaken)
            } else {
                self.by_cookie.insert(cookie, (name.to_vec(), entry(cookie)));
                Ok(())
            };
            assert_eq!(index.insert(name, entry(cookie)), expected);
        }

        fn compare(&self, index: &DirIndex, below: u32) {
            index.check_state();
            let all: Vec<_> = index.iter().map(|f| f.entry).collect();
            assert!(all.iter().eq(self.by_cookie.values().map(|(_, e)| e)));
            let listed: Vec<_> = index.iter_below(below as u64).map(|f| (f.name.to_vec(), f.entry)).collect();
            let expected: Vec<_> = self.by_cookie.range(..below).rev().map(|(_, e)| e.clone()).collect();
            assert_eq!(listed, expected);
            let lines: u64 = self.by_cookie.values().map(|(_, entry)| entry.lines as u64).sum();
            assert_eq!((index.len(), index.live_lines()), (self.by_cookie.len(), lines));
            for name in (0..400).map(test_name) {
                assert_eq!(index.lookup(&name), self.by_name(&name));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_a_map(ops in proptest::collection::vec(op(), 1..600), after in 0..3000u32) {
            let (mut index, mut model) = (DirIndex::new(), Model::default());
            for op in &ops {
                model.apply(&mut index, op);
            }
            model.compare(&index, after);
        }
    }
}
