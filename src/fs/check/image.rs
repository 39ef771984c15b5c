//! What an inode is by its log: the checker's own replay, with maps that are as plain as they can be.
//!
//! Every record is judged by itself: one that says nonsense is named and left out, what the others say counts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::super::acl::{self, Acl};
use super::super::alloc::{Block, Run};
use super::super::dirindex::COOKIE_FIRST;
use super::super::format::*;
use super::super::inode::{AddRecord, Partner, extents};
use super::super::log::{Owner, block_addr};
use super::super::types::Kind;
use super::scan::{Damage, Found, Op, Rec, scan};
use super::{Pool, span};
use crate::limits::{FILE_BYTES_MAX, PATH_BYTES_MAX, XATTR_VALUE_BYTES_MAX};
use crate::media::{Addr, Media};

const PAGE: u64 = BLOCK as u64;
/// So many times the blocks of its pool a file may have, by its log. A block is one file's and stands in it once, so that it has
/// fewer unless records are lost; of an image that somebody made up it could have each a million times.
const MAPPED_TIMES_MAX: u64 = 16;

/// File pages from some page on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub count: u32,
    pub block: u32,
    pub unwritten: bool,
}

/// A checksum of file bytes that nothing has changed since.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    pub end: u64,
    pub crc: u32,
}

#[derive(Clone, Debug)]
pub struct Value {
    pub at: Addr,
    pub len: u32,
    pub crc: u32,
    pub blocks: Option<Run>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Box<[u8]>,
    pub ino: u32,
    pub generation: u64,
    pub kind: Kind,
    /// The inode had another name when it got this one: so that it is not gone with it.
    pub linked: bool,
}

/// Half of an operation on two directories.
#[derive(Clone, Copy, Debug)]
pub struct Half {
    pub partner: Partner,
    pub seq: u32,
    pub in_doubt: bool,
    pub names: Names,
}

/// What becomes of names in this directory.
#[derive(Clone, Copy, Debug)]
pub enum Names {
    /// One goes to the other directory.
    Leaves,
    /// One comes from there, maybe in place of this inode's: which then is gone, or goes there in exchange. The other half tells.
    Comes { instead_of: Option<(u32, u64)> },
}

/// What of a record, of a log that is whole otherwise, cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nonsense {
    /// A record's fields contradict each other or lie outside the pool.
    Record { at: Addr, what: &'static str },
    /// Two entries have one name; the older one is left out.
    Name { name: Box<[u8]> },
}

#[derive(Clone)]
pub struct Image {
    pub owner: Owner,
    pub header: SlotHeader,
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub atime: u64,
    pub mtime: u64,
    pub ctime: u64,
    pub pages: BTreeMap<u32, Piece>,
    /// How many of its pages have a block.
    mapped: u64,
    pub sums: BTreeMap<u64, Sum>,
    pub xattrs: BTreeMap<Box<[u8]>, Value>,
    /// By cookie.
    pub entries: BTreeMap<u32, Entry>,
    names: HashMap<Box<[u8]>, u32>,
    /// Where a free number of an entry is looked for, once the last one is taken.
    free_from: u32,
    pub target: Vec<u8>,
    /// Blocks that are never used again: what the inode table's log says.
    pub bad: BTreeSet<Run>,
    pub halves: Vec<Half>,
    /// Inodes that lost an entry here, for good, and got none again.
    pub removed: HashSet<(u32, u64)>,
    pub nonsense: Vec<Nonsense>,
    pub log: Found,
    /// Its last operations were interrupted: recovery would void them.
    pub cut: bool,
    /// Some of its writes were interrupted: recovery would void them.
    pub skipped: bool,
}

/// Reads an inode: its log up to the operation number `cut`, if there is one.
pub fn read<M: Media>(pool: &Pool<M>, owner: Owner, header: SlotHeader, mut cut: Option<u32>) -> Image {
    loop {
        let (image, void) = replay(pool, owner, header, cut);
        // It was applied. To read all in front of it once more costs less than to keep, for each operation in doubt, what
        // was before it.
        if void.is_none() {
            return image;
        }
        cut = void;
    }
}

/// The same, and the number of the first operation in doubt that is not complete: the image is one with it, then.
fn replay<M: Media>(
    pool: &Pool<M>,
    owner: Owner,
    header: SlotHeader,
    cut: Option<u32>,
) -> (Image, Option<u32>) {
    let mut image = Image::new(owner, header);
    let mut void = None;
    // What a record behind a skipped write may say that it has from it, and what holds: size and time.
    let mut claims = None;
    let found = scan(pool, owner, &mut |op, last| {
        if image.cut || cut == Some(op.seq) {
            image.cut = true;
            return;
        }
        let in_doubt = pool.in_doubt(op.epoch, last) && !op.was_withdrawn();
        let was_copied = image.was_copied(pool, op);
        if !was_copied {
            let write = op.records().last().expect("an operation has records").bytes;
            let (size, mtime) = (get64(write, field::write::SIZE), get64(write, field::write::MTIME));
            claims = Some(((size, mtime), (image.size, image.mtime)));
            image.skipped = true;
            return;
        }
        // The holes of a write that was taken back, in front of the attributes that others have.
        let takes_back =
            op.records().last().is_some_and(|r| r.kind == Type::Attr && !field::attr::sets_size(r.bytes));
        for rec in op.records() {
            image.apply(pool, &rec, op.seq, in_doubt);
            let changes_data = match rec.kind {
                Type::Hole => !takes_back,
                Type::Write => get16(rec.bytes, field::write::FLAGS) & field::write::MOVED == 0,
                Type::Attr => field::attr::sets_size(rec.bytes),
                kind => kind == Type::Redo,
            };
            claims = claims.filter(|_| !changes_data);
            if let Some(((size, mtime), holds)) =
                claims.filter(|_| rec.kind == Type::Attr && !field::attr::sets_size(rec.bytes))
            {
                image.size = if image.size == size { holds.0 } else { image.size };
                image.mtime = if image.mtime == mtime { holds.1 } else { image.mtime };
            }
        }
        if in_doubt && !image.is_there(pool, op) {
            (image.cut, void) = (true, Some(op.seq));
        }
    });
    image.log = found;
    (image, void)
}

/// The name of the attribute that a record is of.
fn xattr_name(b: &[u8]) -> Option<&[u8]> {
    let end = field::xattr::NAME + b[field::xattr::NAME_LEN] as usize;
    b.get(field::xattr::NAME..end)
}

impl Image {
    pub fn new(owner: Owner, header: SlotHeader) -> Image {
        Image {
            owner,
            header,
            kind: Kind::from_mode(header.mode).expect("the caller looked at the header"),
            mode: header.mode,
            uid: header.uid,
            gid: header.gid,
            size: 0,
            atime: header.btime,
            mtime: header.btime,
            ctime: header.btime,
            pages: BTreeMap::new(),
            mapped: 0,
            sums: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            entries: BTreeMap::new(),
            names: HashMap::new(),
            free_from: COOKIE_FIRST,
            target: Vec::new(),
            bad: BTreeSet::new(),
            halves: Vec::new(),
            removed: HashSet::new(),
            nonsense: Vec::new(),
            log: Found::default(),
            cut: false,
            skipped: false,
        }
    }

    /// Whether what the log says can be taken as it is.
    pub fn is_whole(&self) -> bool {
        self.log.damage.is_empty() && self.nonsense.is_empty()
    }

    /// Whether part of the log is unreadable, so that anything may have stood there.
    pub fn lost_records(&self) -> bool {
        self.log.damage.iter().any(|d| !matches!(d, Damage::Condemned))
            || self.nonsense.iter().any(|n| matches!(n, Nonsense::Record { .. }))
    }

    /// Whether an operation in doubt is complete: its data, its values, the inodes that it names.
    fn is_there<M: Media>(&self, pool: &Pool<M>, op: &Op) -> bool {
        op.records().all(|rec| match rec.kind {
            Type::Write => {
                let start = get64(rec.bytes, field::write::START);
                self.sums.get(&start).is_none_or(|sum| self.holds(pool, start, sum) != Some(false))
            }
            // What was written again holds, or is damaged.
            Type::Xattr => {
                let value = xattr_name(rec.bytes).and_then(|name| self.xattrs.get(name));
                let is_copy = rec.bytes[field::xattr::FLAGS] & field::xattr::COPIED != 0;
                is_copy || value.is_none_or(|v| v.holds(pool))
            }
            Type::Add => AddRecord::decode(rec.bytes).is_some_and(|add| {
                add.flags & field::add::COPIED != 0
                    || pool.bad_slots.contains(&add.ino)
                    || pool.header(add.ino).is_some_and(|h| h.generation == add.generation)
            }),
            _ => true,
        })
    }

    /// Whether an operation is none that an engine was to copy the data of, or the copy had ended.
    fn was_copied<M: Media>(&mut self, pool: &Pool<M>, op: &Op) -> bool {
        let is_offloaded = |rec: &Rec| {
            rec.kind == Type::Write && get16(rec.bytes, field::write::FLAGS) & field::write::OFFLOADED != 0
        };
        let Some(rec) = op.records().find(is_offloaded) else { return true };
        let Some(ticket) = Ticket::unpack(get64(rec.bytes, field::write::START)) else {
            self.nonsense(&rec, "names a lane that there is not");
            return true;
        };
        if pool.live || pool.state.clean || op.epoch <= pool.state.settled {
            return true;
        }
        let lane = ticket.lane as usize;
        let word = pool.media.load64(completion_addr(lane)).ok();
        match word.and_then(|word| unpack_completion(lane, word)) {
            Some(done) => ticket.seq <= done,
            None => {
                self.nonsense(&rec, "may not have been complete: its completion word is damaged");
                true
            }
        }
    }

    fn nonsense(&mut self, rec: &Rec, what: &'static str) {
        self.nonsense.push(Nonsense::Record { at: rec.at, what });
    }

    fn apply<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec, seq: u32, in_doubt: bool) {
        let said = match (rec.kind, self.kind) {
            (Type::Attr, _) => self.attr(pool, rec),
            (Type::Write, Kind::File) => self.write(pool, rec),
            (Type::Pages, Kind::File) => self.pages_again(pool, rec),
            (Type::Hole, Kind::File) => self.hole(rec),
            (Type::Redo, Kind::File) => self.redo(rec),
            (Type::Add, Kind::Directory) => self.add(rec, seq, in_doubt),
            (Type::Remove | Type::RemoveMoved, Kind::Directory) => self.remove(rec, seq, in_doubt),
            (Type::Xattr, _) => self.xattr(pool, rec),
            (Type::Bad, Kind::File) if self.owner.ino == TABLE_INO => self.bad(pool, rec),
            (Type::Symlink, Kind::Symlink) => self.symlink(rec),
            _ => Err("is of another type of inode"),
        };
        if let Err(what) = said {
            self.nonsense(rec, what);
        }
    }

    fn attr<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let size = get64(b, field::attr::SIZE);
        if self.kind == Kind::File && size > FILE_BYTES_MAX {
            return Err("makes the file longer than any can be");
        }
        self.mode = self.mode & libc::S_IFMT | get32(b, field::attr::MODE) & 0o7777;
        (self.uid, self.gid) = (get32(b, field::attr::UID), get32(b, field::attr::GID));
        self.atime = get64(b, field::attr::ATIME);
        (self.mtime, self.ctime) = (get64(b, field::attr::MTIME), get64(b, field::attr::CTIME));
        if self.kind != Kind::File {
            return Ok(());
        }
        self.size = size;
        if get32(b, field::attr::FLAGS) & field::attr::TRUNCATE != 0 {
            let page = size.div_ceil(PAGE) as u32;
            self.unmap(page, u32::MAX - page);
        }
        if pool.sb.data_in_place {
            self.sums.clear(); // an overwrite in place may follow, without a record of its own
        }
        while let Some((&start, sum)) = self.sums.last_key_value()
            && sum.end > size
        {
            self.sums.remove(&start);
        }
        Ok(())
    }

    fn write<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let flags = get16(b, field::write::FLAGS);
        let size = get64(b, field::write::SIZE);
        let (start, len) = match flags & field::write::OFFLOADED {
            0 => (get64(b, field::write::START), get32(b, field::write::LEN) as u64),
            _ => (0, 0), // a ticket stands there
        };
        for e in extents(b) {
            let e = e.ok_or("has no room for its extents")?;
            let run = Run { start: e.block, count: e.count };
            if e.count == 0 || e.page.checked_add(e.count).is_none() || !pool.holds_blocks(run) {
                return Err("names blocks outside the pool");
            }
        }
        self.can_map(pool, extents(b).flatten().map(|e| e.count as u64).sum())?;
        let moved = flags & field::write::MOVED != 0;
        if !moved && (size > FILE_BYTES_MAX || start.checked_add(len).is_none_or(|end| end > size)) {
            return Err("ends behind the file's end");
        }
        let unwritten = flags & field::write::UNWRITTEN != 0;
        for e in extents(b).flatten() {
            self.map(e.page, Piece { count: e.count, block: e.block.0, unwritten });
        }
        if moved {
            return Ok(());
        }
        self.size = size;
        self.mtime = get64(b, field::write::MTIME);
        self.ctime = self.mtime;
        self.changed(start, start + len);
        if flags & (field::write::SETTLED | field::write::UNWRITTEN) == 0 && len > 0 {
            self.sums.insert(start, Sum { end: start + len, crc: get32(b, field::write::CRC) });
        }
        Ok(())
    }

    fn pages_again<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let (page, count) = (get32(b, field::pages::PAGE), get32(b, field::pages::COUNT));
        let words = b.get(field::pages::WORDS..).and_then(|words| words.get(..4 * count as usize));
        let words = words.filter(|_| page.checked_add(count).is_some()).ok_or("has no room for its pages")?;
        let words = words.chunks_exact(4).map(|word| get32(word, 0));
        let block = |word: u32| word & !field::pages::UNWRITTEN;
        let valid = |word| word == 0 || pool.holds_blocks(Run { start: Block(block(word)), count: 1 });
        if !words.clone().all(valid) {
            return Err("names blocks outside the pool");
        }
        self.can_map(pool, count as u64)?;
        // In this order: behind the last word there may be no page that has a number.
        for (word, page) in words.zip(page..) {
            let unwritten = word & field::pages::UNWRITTEN != 0;
            match word {
                0 => self.unmap(page, 1),
                _ => self.map(page, Piece { count: 1, block: block(word), unwritten }),
            }
        }
        Ok(())
    }

    fn hole(&mut self, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let (page, count) = (get32(b, field::hole::PAGE), get32(b, field::hole::COUNT));
        let size = get64(b, field::hole::SIZE);
        if page.checked_add(count).is_none() || size > FILE_BYTES_MAX {
            return Err("lies behind the largest file");
        }
        self.unmap(page, count);
        self.size = size;
        self.mtime = get64(b, field::hole::MTIME);
        self.ctime = self.mtime;
        Ok(())
    }

    fn redo(&mut self, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let (offset, len) = (get64(b, field::redo::OFFSET), get16(b, field::redo::LEN) as u64);
        if field::redo::DATA + len as usize > b.len() {
            return Err("has no room for its bytes");
        }
        // The file's size may have stood in front of the log's head.
        let end = offset.checked_add(len).filter(|&end| end <= FILE_BYTES_MAX);
        self.changed(offset, end.ok_or("lies behind the largest file")?);
        self.mtime = get64(b, field::redo::MTIME);
        self.ctime = self.mtime;
        Ok(())
    }

    fn add(&mut self, rec: &Rec, seq: u32, in_doubt: bool) -> Result<(), &'static str> {
        let add = AddRecord::decode(rec.bytes).ok_or("holds no name")?;
        self.add_entry(&add, seq, in_doubt)?;
        if rec.withdrawn {
            self.take(add.cookie);
        }
        Ok(())
    }

    fn add_entry(&mut self, add: &AddRecord, seq: u32, in_doubt: bool) -> Result<(), &'static str> {
        let copied = add.flags & field::add::COPIED != 0;
        if copied && self.entries.contains_key(&add.cookie) {
            return Ok(());
        }
        let entry_of = |cookie| self.entries.get(&cookie).filter(|_| !copied);
        let replaced = entry_of(add.replaces).map(|e| (e.ino, e.generation));
        let sent = entry_of(add.moved).filter(|_| add.sends()).map(|e| (e.ino, e.generation));
        let linked = match entry_of(add.moved) {
            Some(moved) if sent.is_none() => moved.linked,
            _ => {
                add.flags & (field::add::COPIED | field::add::CREATE) == 0
                    && add.partner.is_none()
                    && add.replaces == 0
            }
        };
        if !copied {
            self.take(add.replaces);
            self.take(add.moved);
            (self.mtime, self.ctime) = (add.mtime, add.mtime);
        }
        if let Some(partner) = add.partner {
            // Whether they are gone is not said here.
            [replaced, sent].iter().flatten().for_each(|gone| _ = self.removed.remove(gone));
            let names = if add.sends() { Names::Leaves } else { Names::Comes { instead_of: replaced } };
            self.halves.push(Half { partner, seq, in_doubt, names });
        }
        if add.cookie < COOKIE_FIRST || self.entries.contains_key(&add.cookie) {
            return Err("has the number of another entry");
        }
        let kind = Kind::from_dtype(add.kind).ok_or("holds no type")?;
        let entry = Entry { name: add.name.into(), ino: add.ino, generation: add.generation, kind, linked };
        if let Some(&older) = self.names.get(add.name) {
            self.take(older);
            self.nonsense.push(Nonsense::Name { name: add.name.into() });
        }
        self.insert(add.cookie, entry);
        Ok(())
    }

    fn remove(&mut self, rec: &Rec, seq: u32, in_doubt: bool) -> Result<(), &'static str> {
        let b = rec.bytes;
        if rec.kind == Type::RemoveMoved {
            let partner = Partner::decode(&b[field::remove::PARTNER..]);
            self.halves.push(Half { partner, seq, in_doubt, names: Names::Leaves });
        }
        let gone = self.entries.remove(&get32(b, field::remove::COOKIE));
        if let Some(e) = &gone {
            self.names.remove(&e.name);
        }
        if rec.kind != Type::RemoveMoved && gone.is_none_or(|e| !e.linked) {
            self.removed.insert((get32(b, field::remove::INO), get64(b, field::remove::GENERATION)));
        }
        self.mtime = get64(b, field::remove::MTIME);
        self.ctime = self.mtime;
        Ok(())
    }

    /// Takes an entry out.
    pub fn take(&mut self, cookie: u32) -> Option<Entry> {
        let e = self.entries.remove(&cookie)?;
        self.names.remove(&e.name);
        if !e.linked {
            self.removed.insert((e.ino, e.generation));
        }
        Some(e)
    }

    pub fn insert(&mut self, cookie: u32, entry: Entry) {
        self.removed.remove(&(entry.ino, entry.generation));
        self.names.insert(entry.name.clone(), cookie);
        self.entries.insert(cookie, entry);
    }

    /// Adds an entry under a number that none had.
    pub fn name(&mut self, entry: Entry) {
        let last = self.entries.last_key_value().map_or(0, |(&last, _)| last);
        let next = last.checked_add(1).map(|next| next.max(COOKIE_FIRST));
        let cookie = next.unwrap_or_else(|| {
            let free = (self.free_from..).find(|cookie| !self.entries.contains_key(cookie));
            self.free_from = free.expect("a directory has no four billion entries");
            self.free_from
        });
        self.insert(cookie, entry);
    }

    pub fn named(&self, name: &[u8]) -> Option<&Entry> {
        self.entries.get(self.names.get(name)?)
    }

    fn xattr<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let flags = b[field::xattr::FLAGS];
        let name = xattr_name(b).ok_or("has no room for its name")?;
        let end = field::xattr::NAME + name.len();
        if flags & field::xattr::COPIED == 0 {
            self.ctime = get64(b, field::xattr::CTIME);
        }
        if pool.sb.data_in_place {
            self.sums.clear();
        }
        if flags & field::xattr::REMOVE != 0 {
            self.xattrs.remove(name);
            return Ok(());
        }
        let len = get32(b, field::xattr::VALUE_LEN);
        let (at, blocks) = if flags & field::xattr::IN_BLOCKS != 0 {
            let run = Run {
                start: Block(get32(b, field::xattr::BLOCK)),
                count: (len as usize).div_ceil(BLOCK) as u32,
            };
            if len == 0 || len as usize > XATTR_VALUE_BYTES_MAX || !pool.holds_blocks(run) {
                return Err("names a value outside the pool");
            }
            (block_addr(run.start), Some(run))
        } else {
            b.get(end..end + len as usize).ok_or("has no room for its value")?;
            (rec.at.add(end as u64), None)
        };
        let crc = get32(b, field::xattr::CRC);
        self.xattrs.insert(name.into(), Value { at, len, crc, blocks });
        Ok(())
    }

    fn bad<M: Media>(&mut self, pool: &Pool<M>, rec: &Rec) -> Result<(), &'static str> {
        let (block, count) = (get32(rec.bytes, field::bad::BLOCK), get32(rec.bytes, field::bad::COUNT));
        let run = Run { start: Block(block), count };
        if !pool.holds_blocks(run) {
            return Err("names bad blocks outside the pool");
        }
        self.bad.insert(run); // the cleaner wrote some again
        Ok(())
    }

    fn symlink(&mut self, rec: &Rec) -> Result<(), &'static str> {
        let b = rec.bytes;
        let (len, at) = (get16(b, field::symlink::LEN) as usize, get16(b, field::symlink::OFFSET) as usize);
        let part = b.get(field::symlink::TARGET..field::symlink::TARGET + len);
        let part = part.ok_or("has no room for its target")?;
        if at + len > PATH_BYTES_MAX {
            return Err("makes a target that is longer than a path");
        }
        self.target.resize(self.target.len().max(at + len), 0);
        self.target[at..at + len].copy_from_slice(part);
        Ok(())
    }

    // -----------------------------------------------------------------------------------------------
    // Pages

    /// Whether so many pages more may have blocks.
    fn can_map<M: Media>(&self, pool: &Pool<M>, pages: u64) -> Result<(), &'static str> {
        match self.mapped + pages <= MAPPED_TIMES_MAX * pool.sb.blocks {
            true => Ok(()),
            false => Err("gives the file more blocks than there are"),
        }
    }

    /// Gives pages a piece, wherever there was another one.
    pub fn map(&mut self, page: u32, piece: Piece) {
        if self.has(page, piece) {
            return;
        }
        self.unmap(page, piece.count);
        self.mapped += piece.count as u64;
        if let Some((&first, before)) = self.pages.range_mut(..page).next_back()
            && first + before.count == page
            && before.block + before.count == piece.block
            && before.unwritten == piece.unwritten
        {
            before.count += piece.count;
            return;
        }
        self.pages.insert(page, piece);
    }

    /// Gives a page another block than it has.
    pub fn give_block(&mut self, page: u32, block: u32) {
        let unwritten = self.piece_of(page).is_some_and(|(_, piece)| piece.unwritten);
        self.map(page, Piece { count: 1, block, unwritten });
    }

    /// The pages that have one of these blocks, ascending, each with its block.
    pub fn pages_with(&self, blocks: &BTreeSet<u32>) -> Vec<(u32, u32)> {
        let pages = self.pages.iter().flat_map(|(&page, p)| {
            blocks.range(p.block..p.block + p.count).map(move |&block| (page + (block - p.block), block))
        });
        pages.collect()
    }

    /// Whether pages have these very blocks.
    fn has(&self, page: u32, piece: Piece) -> bool {
        let mut at = page;
        while at < page + piece.count {
            let Some((first, old)) = self.piece_of(at) else { return false };
            if old.block + (at - first) != piece.block + (at - page) || old.unwritten != piece.unwritten {
                return false;
            }
            at = first + old.count;
        }
        true
    }

    /// Takes the blocks of pages away.
    pub fn unmap(&mut self, page: u32, count: u32) {
        let end = page.saturating_add(count);
        self.changed(page as u64 * PAGE, end as u64 * PAGE);
        let first = self.pages.range(..page).next_back().filter(|(p, old)| *p + old.count > page);
        let from = first.map_or(page, |(&p, _)| p);
        let touched: Vec<(u32, Piece)> = self.pages.range(from..end).map(|(&p, &old)| (p, old)).collect();
        for (p, old) in touched {
            self.pages.remove(&p);
            let to = p + old.count;
            self.mapped -= (to.min(end) - p.max(page)) as u64;
            if p < page {
                self.pages.insert(p, Piece { count: page - p, ..old });
            }
            if to > end {
                let skipped = end - p;
                let rest = Piece { count: old.count - skipped, block: old.block + skipped, ..old };
                self.pages.insert(end, rest);
            }
        }
    }

    /// No checksum of these bytes holds any more.
    pub fn changed(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        while let Some((&first, _)) = self.sums.range(..end).next_back().filter(|(_, sum)| sum.end > start) {
            self.sums.remove(&first);
        }
    }

    pub fn piece_of(&self, page: u32) -> Option<(u32, Piece)> {
        let (&first, &piece) = self.pages.range(..=page).next_back()?;
        (page - first < piece.count).then_some((first, piece))
    }

    /// Where a file byte stands.
    pub fn place(&self, offset: u64) -> Option<Addr> {
        let page = (offset / PAGE) as u32;
        let (first, piece) = self.piece_of(page).filter(|(_, piece)| !piece.unwritten)?;
        Some(block_addr(Block(piece.block + (page - first))).add(offset % PAGE))
    }

    /// Whether file bytes match their checksum; `None` where they cannot be read.
    pub fn holds<M: Media>(&self, pool: &Pool<M>, start: u64, sum: &Sum) -> Option<bool> {
        let mut crc = 0;
        for (at, len) in span(start, sum.end) {
            let Some(place) = self.place(at) else { return Some(false) };
            crc = pool.media.crc32c(place, len as usize, crc).ok()?;
        }
        Some(crc == sum.crc)
    }

    /// Everything that the inode has outside its slot and its log.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let pages = self.pages.values().map(|p| Run { start: Block(p.block), count: p.count });
        pages.chain(self.xattrs.values().filter_map(|v| v.blocks))
    }
}

impl Value {
    pub fn holds<M: Media>(&self, pool: &Pool<M>) -> bool {
        pool.media.crc32c(self.at, self.len as usize, 0).is_ok_and(|crc| crc == self.crc)
    }

    /// Whether an access list is one that the kernel could have stored.
    pub fn is_list<M: Media>(&self, pool: &Pool<M>, name: &[u8]) -> bool {
        if !acl::is_list(name) {
            return true;
        }
        let mut bytes = vec![0; self.len as usize];
        pool.media.read(self.at, &mut bytes).is_ok()
            && Acl::parse(&bytes).is_ok_and(|list| list.is_none_or(|list| list.check().is_ok()))
    }
}
