//! An inode in DRAM, and how its log makes it: replay.
//!
//! Replay is one function for the lazy load after a clean mount and for recovery. It trusts nothing:
//! a record whose numbers do not fit the pool is damage, reported, never followed.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use std::collections::{HashMap, VecDeque};

use smallvec::SmallVec;

use super::Core;
use super::acl;
use super::alloc::{Block, Run};
use super::clean::Cleaning;
use super::dirindex::DirIndex;
use super::fixed::FIXED;
use super::format::*;
use super::index::PageIndex;
use super::last_line::LastLine;
use super::log::{self, Log, Op, Owner, Reader, Record};
use super::offload::Writes;
use super::statline::BodyLock;
use super::types::{Attr, Ino, Kind};
use crate::error::{Error, Result};
use crate::limits::FILE_BYTES_MAX;
use crate::media::{Addr, Fault, Flushed, LINE, Media, Words, crc32c};

/// In memory order: what stat reads comes first and close together.
#[repr(C)]
pub struct Inode {
    pub ino: Ino,
    pub kind: Kind,
    /// Made without a name (O_TMPFILE): may get one, which a file that lost its names may not.
    pub linkable: AtomicBool,
    /// The access time is newer here than in the log: written back at close, where there is room, and by the cleaner.
    pub atime_ahead: AtomicBool,
    /// The change time of a link, rename or unlink, which stands in the log of a directory alone: written back at close and
    /// before that record goes.
    pub ctime_ahead: AtomicBool,
    /// A write failed after it was committed, and no fsync has told yet.
    pub lost: AtomicBool,
    /// Writes that shall still expect to find somebody else in it.
    pub shared_for: AtomicU8,
    /// Made in this mount: lines that its log has from the start.
    pub born_lines: u8,
    /// Calls that wait until no write of it is under way: meanwhile none is handed over.
    pub stills: AtomicU32,
    pub generation: u64,
    /// Packed. Outside the lock, because reads set it.
    pub atime: AtomicU64,
    pub body: BodyLock,
    /// References (as FUSE counts them) and opens. A nameless inode lives while there are any.
    pub uses: AtomicU64,
    pub slot: Addr,
}

#[repr(C)]
pub struct Body {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Reclaimed: no name, no user. Whoever still holds the inode gets ESTALE.
    pub dead: bool,
    /// The last block has bytes of a longer file which a power loss may bring back (the truncation is not
    /// synced): nothing is stored in it in place.
    pub tail_shared: bool,
    /// Its blocks stand still: see `fixed`.
    pub fixed: bool,
    pub size: u64,
    /// Packed, as all times here.
    pub mtime: u64,
    pub ctime: u64,
    pub btime: u64,
    pub data: Data,
    pub log: Log,
    pub cleaning: Cleaning,
    pub xattrs: Vec<Xattr>,
    /// What redo records of this mount stored in place and nobody wrote back, oldest first: the cleaner does
    /// before it drops the record.
    #[allow(clippy::box_collection, reason = "four words in each of a million inodes that have none")]
    pub redone: Option<Box<VecDeque<Redone>>>,
    /// Of a file that grows by less than lines.
    pub last_line: Option<Box<LastLine>>,
    /// Whose copies are under way.
    pub writes: Writes,
}

/// Bytes that a redo record stored in place.
#[derive(Clone, Copy)]
pub struct Redone {
    pub at: Addr,
    pub len: u16,
    /// The record's number.
    pub seq: u32,
}

/// What an inode costs before its index is built, what the table has of it and reference counts included.
#[cfg(not(shuttle))]
const _: () = assert!(
    size_of::<Inode>() + 16 + size_of::<super::table::Entry>() + size_of::<super::statline::StatLine>()
        <= 400
);

pub enum Data {
    File(PageIndex),
    Dir(Box<DirIndex>),
    Symlink(Box<[u8]>),
    /// Fifo, socket, device: its number.
    Special(u64),
}

/// An extended attribute. The value stays on media: all of an inode could have gigabytes.
pub struct Xattr {
    pub name: Box<[u8]>,
    /// Where the value stands, its length and its CRC.
    pub at: Addr,
    pub len: u32,
    pub crc: u32,
    /// The record that sets it.
    pub seq: u32,
    /// What the value occupies, if it is not in the record.
    pub blocks: Option<Run>,
    /// The value of an access list: permission checks need it.
    pub list: Option<Box<[u8]>>,
}

impl Xattr {
    /// Not [placed](Xattr::place) yet.
    pub fn new(name: &[u8], value: &[u8], blocks: Option<Run>) -> Xattr {
        let list = acl::is_list(name).then(|| value.into());
        let (len, crc) = (value.len() as u32, value_crc(value));
        let at = blocks.map_or(Addr(0), |run| log::block_addr(run.start));
        Xattr { name: name.into(), at, len, crc, seq: 0, blocks, list }
    }

    /// Its record has this number and this place.
    pub fn place(&mut self, seq: u32, record: Addr) {
        self.seq = seq;
        if self.blocks.is_none() {
            self.at = record.add((field::xattr::NAME + self.name.len()) as u64);
        }
    }
}

impl Inode {
    pub fn owner(&self) -> Owner {
        Owner { ino: self.ino.0, generation: self.generation, slot: self.slot }
    }

    #[inline]
    pub fn attr(&self, body: &Body, nlink: u32) -> Attr {
        attr_from(self.ino, self.generation, self.atime.load(Ordering::Relaxed), body, nlink)
    }

    /// The attributes of an inode that nobody else knows yet.
    pub fn new_attr(&mut self, links: u32) -> Attr {
        let Inode { ino, generation, atime, body, .. } = self;
        attr_from(*ino, *generation, atime.load(Ordering::Relaxed), body.get_mut(), links)
    }

    #[inline]
    pub fn set_atime_ahead(&self) {
        if !self.atime_ahead.load(Ordering::Relaxed) {
            self.atime_ahead.store(true, Ordering::Relaxed);
        }
    }

    #[inline]
    pub fn set_ctime_ahead(&self) {
        if !self.ctime_ahead.load(Ordering::Relaxed) {
            self.ctime_ahead.store(true, Ordering::Relaxed);
        }
    }

    /// The log has all attributes.
    #[inline]
    pub fn set_attrs_logged(&self) {
        self.atime_ahead.store(false, Ordering::Relaxed);
        self.ctime_ahead.store(false, Ordering::Relaxed);
    }
}

#[inline]
fn attr_from(ino: Ino, generation: u64, atime: u64, body: &Body, nlink: u32) -> Attr {
    let blocks = match &body.data {
        Data::File(index) => index.mapped() * (BLOCK as u64 / 512),
        _ => 0,
    };
    Attr {
        ino,
        generation,
        mode: body.mode,
        nlink,
        uid: body.uid,
        gid: body.gid,
        rdev: body.rdev(),
        size: body.size(),
        blocks,
        atime: unpack_time(atime),
        mtime: unpack_time(body.mtime),
        ctime: unpack_time(body.ctime),
        btime: unpack_time(body.btime),
    }
}

impl Body {
    /// A new inode's body.
    pub fn new(header: &SlotHeader, log: Log) -> Body {
        let kind = Kind::from_mode(header.mode).expect("the caller checked the type");
        Body {
            mode: header.mode,
            uid: header.uid,
            gid: header.gid,
            size: 0,
            mtime: header.btime,
            ctime: header.btime,
            btime: header.btime,
            log,
            cleaning: Cleaning::default(),
            data: match kind {
                Kind::File => Data::File(PageIndex::new()),
                Kind::Directory => Data::Dir(Box::new(DirIndex::new())),
                Kind::Symlink => Data::Symlink(Box::default()),
                _ => Data::Special(header.rdev),
            },
            xattrs: Vec::new(),
            redone: None,
            last_line: None,
            writes: Writes::default(),
            dead: false,
            tail_shared: false,
            fixed: false,
        }
    }

    pub fn size(&self) -> u64 {
        match &self.data {
            Data::File(_) => self.size,
            Data::Dir(dir) => (dir.len() as u64 + 2) * 32,
            Data::Symlink(target) => target.len() as u64,
            Data::Special(_) => 0,
        }
    }

    /// A device's number.
    pub fn rdev(&self) -> u64 {
        if let Data::Special(rdev) = self.data { rdev } else { 0 }
    }

    pub fn file(&self) -> Option<&PageIndex> {
        if let Data::File(index) = &self.data { Some(index) } else { None }
    }

    pub fn file_mut(&mut self) -> &mut PageIndex {
        match &mut self.data {
            Data::File(index) => index,
            _ => unreachable!("the caller checked that this is a file"),
        }
    }

    pub fn dir(&self) -> Result<&DirIndex> {
        if let Data::Dir(d) = &self.data { Ok(d) } else { Err(Error::new(libc::ENOTDIR, "inode::dir")) }
    }

    pub fn dir_mut(&mut self) -> &mut DirIndex {
        match &mut self.data {
            Data::Dir(d) => d,
            _ => unreachable!("the caller checked that this is a directory"),
        }
    }

    /// Puts a record with all attributes into `batch`.
    pub fn attr_record(&self, atime: u64, flags: u32, batch: &mut log::Batch) {
        let r = batch.record(Type::Attr, field::attr::CTIME + 8);
        put32(r, field::attr::MODE, self.mode);
        put32(r, field::attr::UID, self.uid);
        put32(r, field::attr::GID, self.gid);
        put32(r, field::attr::FLAGS, flags);
        put64(r, field::attr::SIZE, self.size);
        put64(r, field::attr::ATIME, atime);
        put64(r, field::attr::MTIME, self.mtime);
        put64(r, field::attr::CTIME, self.ctime);
    }

    pub fn heap_bytes(&self) -> usize {
        let xattr = |x: &Xattr| size_of::<Xattr>() + x.name.len() + x.list.as_ref().map_or(0, |l| l.len());
        self.log.heap_bytes()
            + self.xattrs.iter().map(xattr).sum::<usize>()
            + match &self.data {
                Data::File(index) => index.heap_bytes(),
                Data::Dir(dir) => dir.heap_bytes(),
                Data::Symlink(t) => t.len(),
                Data::Special(_) => 0,
            }
    }
}

// ---------------------------------------------------------------------------------------------------
// Replay

/// Redo bytes not yet known to be in place, by file page: recovery stores them again.
#[derive(Default)]
pub struct Redos {
    pages: HashMap<u32, Vec<Piece>>,
}

struct Piece {
    /// Offset in the page.
    at: u16,
    bytes: Box<[u8]>,
}

impl Redos {
    fn add(&mut self, mut offset: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let at = (offset % BLOCK as u64) as usize;
            let n = bytes.len().min(BLOCK - at);
            let page = (offset / BLOCK as u64) as u32;
            self.pages.entry(page).or_default().push(Piece { at: at as u16, bytes: bytes[..n].into() });
            offset += n as u64;
            bytes = &bytes[n..];
        }
    }

    /// The page has other blocks now.
    fn remap(&mut self, page: u32, count: u32) {
        if self.pages.is_empty() {
            return;
        }
        if (count as usize) < self.pages.len() {
            for p in page..page.saturating_add(count) {
                self.pages.remove(&p);
            }
        } else {
            self.pages.retain(|&p, _| p < page || p - page >= count);
        }
    }

    /// Bytes behind the end of file are nobody's: what an append stores there must stay.
    fn truncate(&mut self, size: u64) {
        let (page, at) = ((size / BLOCK as u64) as u32, (size % BLOCK as u64) as usize);
        self.pages.retain(|&p, _| p <= page);
        if let Some(pieces) = self.pages.get_mut(&page) {
            pieces.retain_mut(|piece| {
                let keep = at.saturating_sub(piece.at as usize).min(piece.bytes.len());
                if keep < piece.bytes.len() {
                    piece.bytes = piece.bytes[..keep].into();
                }
                keep > 0
            });
        }
    }

    /// Stores what is left, in blocks that are `own`. Idempotent. Where media is bad the rest is stored all the same; an error where
    /// older bytes stand that can be read.
    pub fn apply<M: Media>(
        &self,
        core: &Core<M>,
        index: &PageIndex,
        own: &dyn Fn(Block) -> bool,
    ) -> Result<()> {
        let mut failed = None;
        let mut pending = Flushed::issued();
        for (&page, pieces) in &self.pages {
            if core.media.omits("redo records are stored again") {
                continue;
            }
            let super::index::Mapping::Written(block) = index.get(page) else { continue };
            if !own(block) {
                continue;
            }
            for piece in pieces {
                let at = log::block_addr(block).add(piece.at as u64);
                match core.media.copy_cached(at, &piece.bytes) {
                    Ok(dirty) => pending = pending.and(core.media.flush(dirty)),
                    Err(_) => {
                        let (stored, stale) = store_by_lines(core, at, &piece.bytes);
                        pending = pending.and(stored);
                        failed = failed.or(stale);
                    }
                }
            }
        }
        core.media.fence(pending);
        failed.map_or(Ok(()), |fault| Err(fault.into()))
    }
}

/// Stores line by line what could not be stored at once. A line that fails again fails its readers too, or, should it not, is what is
/// answered.
#[cold]
fn store_by_lines<M: Media>(core: &Core<M>, at: Addr, bytes: &[u8]) -> (Flushed, Option<Fault>) {
    let (mut pending, mut stale) = (Flushed::issued(), None);
    let first = (LINE - (at.0 % LINE as u64) as usize).min(bytes.len());
    let (head, rest) = bytes.split_at(first);
    let mut place = at;
    for line in std::iter::once(head).chain(rest.chunks(LINE)) {
        match core.media.copy_cached(place, line) {
            Ok(dirty) => pending = pending.and(core.media.flush(dirty)),
            Err(fault) => {
                stale =
                    stale.or(core.media.read(place, &mut [0; LINE][..line.len()]).is_ok().then_some(fault))
            }
        }
        place = place.add(line.len() as u64);
    }
    (pending, stale)
}

/// Applies one operation to a body.
pub fn apply<M: Media>(
    core: &Core<M>,
    owner: &Owner,
    body: &mut Body,
    atime: &mut u64,
    op: &Op,
    mut redos: Option<&mut Redos>,
) -> Result<()> {
    for record in op.records() {
        apply_record(core, owner, body, atime, &record, redos.as_deref_mut())?;
    }
    Ok(())
}

fn apply_record<M: Media>(
    core: &Core<M>,
    owner: &Owner,
    body: &mut Body,
    atime: &mut u64,
    record: &Record,
    redos: Option<&mut Redos>,
) -> Result<()> {
    let b = record.bytes;
    match (record.kind, &mut body.data) {
        (Type::Attr, _) => apply_attr(body, atime, b, redos),
        (Type::Write, Data::File(index)) => {
            let flags = get16(b, field::write::FLAGS);
            for e in extents(b) {
                let e = e.ok_or_else(|| log::damaged(owner, "a write record is too short"))?;
                if e.count == 0
                    || e.page.checked_add(e.count).is_none()
                    || !core.holds_blocks(Run { start: e.block, count: e.count })
                {
                    return Err(log::damaged(owner, "a write record names blocks outside the pool"));
                }
                index.set_run(e.page, e.count, e.block, flags & field::write::UNWRITTEN != 0, &mut |_, _| {});
            }
            if let Some(redos) = redos
                && flags & field::write::MOVED == 0
            {
                extents(b).flatten().for_each(|e| redos.remap(e.page, e.count));
            }
            if flags & field::write::MOVED == 0 {
                body.size = get64(b, field::write::SIZE).min(FILE_BYTES_MAX);
                body.mtime = get64(b, field::write::MTIME);
                body.ctime = body.mtime;
            }
            Ok(())
        }
        (Type::Pages, Data::File(index)) => {
            let (page, count) = (get32(b, field::pages::PAGE), get32(b, field::pages::COUNT) as usize);
            let words = b.get(field::pages::WORDS..).and_then(|words| words.get(..4 * count));
            let words = words.filter(|_| page.checked_add(count as u32).is_some());
            let words = words.ok_or_else(|| log::damaged(owner, "a pages record is too short"))?;
            let words = words.chunks_exact(4).map(|word| get32(word, 0));
            let block = |word| Block(word & !field::pages::UNWRITTEN);
            if !words.clone().all(|w| w == 0 || core.holds_blocks(Run { start: block(w), count: 1 })) {
                return Err(log::damaged(owner, "a pages record names blocks outside the pool"));
            }
            index.set_words(page, words);
            Ok(())
        }
        (Type::Hole, Data::File(index)) => {
            let (page, count) = (get32(b, field::hole::PAGE), get32(b, field::hole::COUNT));
            if page.checked_add(count).is_none() {
                return Err(log::damaged(owner, "a hole lies behind the largest file"));
            }
            index.clear(page, count, &mut |_, _| {});
            if let Some(redos) = redos {
                redos.remap(page, count);
            }
            body.size = get64(b, field::hole::SIZE).min(FILE_BYTES_MAX);
            body.mtime = get64(b, field::hole::MTIME);
            body.ctime = body.mtime;
            Ok(())
        }
        (Type::Redo, Data::File(_)) => {
            let len = get16(b, field::redo::LEN) as usize;
            let data = b
                .get(field::redo::DATA..field::redo::DATA + len)
                .ok_or_else(|| log::damaged(owner, "a redo record is too short"))?;
            let offset = get64(b, field::redo::OFFSET);
            if offset > FILE_BYTES_MAX - len as u64 {
                return Err(log::damaged(owner, "a redo record lies behind the largest file"));
            }
            if let Some(redos) = redos {
                redos.add(offset, data);
            }
            body.mtime = get64(b, field::redo::MTIME);
            body.ctime = body.mtime;
            Ok(())
        }
        (Type::Add, Data::Dir(dir)) => {
            let entry =
                AddRecord::decode(b).ok_or_else(|| log::damaged(owner, "an add record is too short"))?;
            let stamp = entry.apply(dir, record.seq, (b.len() / LINE) as u8, owner)?;
            if let Some(mtime) = stamp {
                (body.mtime, body.ctime) = (mtime, mtime);
            }
            if record.withdrawn {
                dir.remove_cookie(entry.cookie);
            }
            Ok(())
        }
        (Type::Remove | Type::RemoveMoved, Data::Dir(dir)) => {
            // The cleaner drops dead add records before the remove records that made them so.
            dir.remove_cookie(get32(b, field::remove::COOKIE));
            body.mtime = get64(b, field::remove::MTIME);
            body.ctime = body.mtime;
            Ok(())
        }
        (Type::Xattr, _) => apply_xattr(core, owner, body, record),
        (Type::Symlink, Data::Symlink(target)) => {
            let len = get16(b, field::symlink::LEN) as usize;
            let part = b
                .get(field::symlink::TARGET..field::symlink::TARGET + len)
                .ok_or_else(|| log::damaged(owner, "its target record is too short"))?;
            let at = get16(b, field::symlink::OFFSET) as usize;
            let mut whole = std::mem::take(target).into_vec();
            whole.resize(whole.len().max(at + len), 0);
            whole[at..at + len].copy_from_slice(part);
            *target = whole.into();
            Ok(())
        }
        // What is read of these when the pool is opened: `mount::read_bad_blocks`.
        (Type::Bad, Data::File(_)) if owner.ino == TABLE_INO => Ok(()),
        _ => Err(log::damaged(owner, "its log has a record of another type of inode")),
    }
}

fn apply_attr(body: &mut Body, atime: &mut u64, b: &[u8], redos: Option<&mut Redos>) -> Result<()> {
    // The type is the header's: a record cannot change it.
    body.mode = body.mode & libc::S_IFMT | get32(b, field::attr::MODE) & 0o7777;
    body.uid = get32(b, field::attr::UID);
    body.gid = get32(b, field::attr::GID);
    *atime = get64(b, field::attr::ATIME);
    body.mtime = get64(b, field::attr::MTIME);
    body.ctime = get64(b, field::attr::CTIME);
    if let Data::File(index) = &mut body.data {
        body.size = get64(b, field::attr::SIZE).min(FILE_BYTES_MAX);
        if get32(b, field::attr::FLAGS) & field::attr::TRUNCATE != 0 {
            let page = body.size.div_ceil(BLOCK as u64);
            index.clear(page as u32, u32::MAX - page as u32, &mut |_, _| {});
            if let Some(redos) = redos {
                redos.truncate(body.size);
            }
        }
    }
    Ok(())
}

fn apply_xattr<M: Media>(core: &Core<M>, owner: &Owner, body: &mut Body, record: &Record) -> Result<()> {
    let b = record.bytes;
    let short = || log::damaged(owner, "an attribute record is too short");
    let flags = b[field::xattr::FLAGS];
    let end = field::xattr::NAME + b[field::xattr::NAME_LEN] as usize;
    let name = b.get(field::xattr::NAME..end).ok_or_else(short)?;
    if flags & field::xattr::COPIED == 0 {
        body.ctime = get64(b, field::xattr::CTIME);
    }
    let old = body.xattrs.iter().position(|x| *x.name == *name);
    if name == FIXED {
        body.fixed = flags & field::xattr::REMOVE == 0;
    }
    if flags & field::xattr::REMOVE != 0 {
        if let Some(i) = old {
            body.xattrs.swap_remove(i);
        }
        return Ok(());
    }
    let len = get32(b, field::xattr::VALUE_LEN) as usize;
    let blocks = if flags & field::xattr::IN_BLOCKS != 0 {
        let run = Run { start: Block(get32(b, field::xattr::BLOCK)), count: len.div_ceil(BLOCK) as u32 };
        if len == 0 || len > crate::limits::XATTR_VALUE_BYTES_MAX || !core.holds_blocks(run) {
            return Err(log::damaged(owner, "an attribute value lies outside the pool"));
        }
        Some(run)
    } else {
        b.get(end..end + len).ok_or_else(short)?;
        None
    };
    let list = match blocks {
        _ if !acl::is_list(name) => None,
        Some(run) => {
            let mut list = vec![0; len];
            core.media.read(log::block_addr(run.start), &mut list)?;
            Some(list.into())
        }
        None => Some(b[end..end + len].into()),
    };
    let at = blocks.map_or(Addr(0), |run| log::block_addr(run.start));
    let (len, crc) = (len as u32, get32(b, field::xattr::CRC));
    let mut x = Xattr { name: name.into(), at, len, crc, seq: 0, blocks, list };
    x.place(record.seq, record.addr);
    match old {
        Some(i) => body.xattrs[i] = x,
        None => body.xattrs.push(x),
    }
    Ok(())
}

/// The extents of a write record; `None` where the record is too short for its count.
pub fn extents(b: &[u8]) -> impl Iterator<Item = Option<Extent>> + '_ {
    let count = get16(b, field::write::EXTENTS) as usize;
    (0..count).map(move |i| {
        let at = extent_offset(i);
        (at + EXTENT <= b.len()).then(|| Extent {
            page: get32(b, at),
            count: get32(b, at + 4),
            block: Block(get32(b, at + 8)),
        })
    })
}

/// Where the `i`th extent stands in a write record.
#[inline]
pub fn extent_offset(i: usize) -> usize {
    if i == 0 {
        field::write::FIRST
    } else {
        LINE * (1 + (i - 1) / field::write::PER_LINE) + (i - 1) % field::write::PER_LINE * EXTENT
    }
}

/// Bytes of a write record with `count` extents.
#[inline]
pub fn write_record_bytes(count: usize) -> usize {
    if count == 0 { field::write::FIRST } else { extent_offset(count - 1) + EXTENT }
}

/// Longest add record that goes to media word by word, in lines.
pub const ADD_LINES_MAX: usize = 3;

/// A directory entry as its record has it.
pub struct AddRecord<'a> {
    pub ino: u32,
    pub generation: u64,
    pub mtime: u64,
    pub cookie: u32,
    pub replaces: u32,
    pub moved: u32,
    pub kind: u8,
    pub flags: u8,
    pub lines: u8,
    pub partner: Option<Partner>,
    pub name: &'a [u8],
}

#[derive(Clone, Copy, Debug)]
pub struct Partner {
    pub generation: u64,
    pub ino: u32,
    pub seq: u32,
    pub transaction: u64,
}

impl Partner {
    pub fn decode(b: &[u8]) -> Partner {
        Partner {
            generation: get64(b, field::partner::GENERATION),
            ino: get32(b, field::partner::INO),
            seq: get32(b, field::partner::SEQ),
            transaction: get64(b, field::partner::TRANSACTION),
        }
    }

    pub fn encode(&self, b: &mut [u8]) {
        put64(b, field::partner::GENERATION, self.generation);
        put32(b, field::partner::INO, self.ino);
        put32(b, field::partner::SEQ, self.seq);
        put64(b, field::partner::TRANSACTION, self.transaction);
    }
}

impl<'a> AddRecord<'a> {
    /// Enters the inode, and nothing besides.
    #[inline]
    pub fn new(
        ino: Ino,
        generation: u64,
        kind: Kind,
        name: &'a [u8],
        cookie: u32,
        mtime: u64,
    ) -> AddRecord<'a> {
        AddRecord {
            ino: ino.0,
            generation,
            mtime,
            cookie,
            replaces: 0,
            moved: 0,
            kind: kind as u8,
            flags: 0,
            lines: 0,
            partner: None,
            name,
        }
    }

    pub fn decode(b: &'a [u8]) -> Option<AddRecord<'a>> {
        let flags = b[field::add::FLAGS];
        let (partner, at) = if flags & field::add::PARTNER != 0 {
            (
                Some(Partner::decode(b.get(field::add::NAME..field::add::NAME + field::partner::BYTES)?)),
                field::add::NAME + field::partner::BYTES,
            )
        } else {
            (None, field::add::NAME)
        };
        let name = b.get(at..at + b[field::add::NAME_LEN] as usize)?;
        let valid =
            !name.is_empty() && !name.contains(&b'/') && !name.contains(&0) && name != b"." && name != b"..";
        (valid && Kind::from_dtype(b[field::add::KIND]).is_some()).then(|| AddRecord {
            ino: get32(b, field::add::INO),
            generation: get64(b, field::add::GENERATION),
            mtime: get64(b, field::add::MTIME),
            cookie: get32(b, field::add::COOKIE),
            replaces: get32(b, field::add::REPLACES),
            moved: get32(b, field::add::MOVED),
            kind: b[field::add::KIND],
            flags,
            lines: b[field::add::LINES],
            partner,
            name,
        })
    }

    /// Whether it is the half of a rename that leaves a whiteout behind: besides what it adds, another entry goes to the partner's
    /// directory.
    pub fn sends(&self) -> bool {
        self.partner.is_some() && self.moved != 0
    }

    /// Puts the record into `batch`.
    #[inline]
    pub fn encode(&self, batch: &mut log::Batch) {
        let partner_bytes = if self.partner.is_some() { field::partner::BYTES } else { 0 };
        let at = field::add::NAME + partner_bytes;
        let b = batch.record(Type::Add, at + self.name.len());
        put64(b, field::add::GENERATION, self.generation);
        put64(b, field::add::MTIME, self.mtime);
        put32(b, field::add::INO, self.ino);
        put32(b, field::add::COOKIE, self.cookie);
        put32(b, field::add::REPLACES, self.replaces);
        put32(b, field::add::MOVED, self.moved);
        b[field::add::KIND] = self.kind;
        b[field::add::NAME_LEN] = self.name.len() as u8;
        b[field::add::FLAGS] = self.flags | if self.partner.is_some() { field::add::PARTNER } else { 0 };
        b[field::add::LINES] = self.lines;
        if let Some(p) = &self.partner {
            p.encode(&mut b[field::add::NAME..]);
        }
        b[at..at + self.name.len()].copy_from_slice(self.name);
    }

    /// The record as words of zeroed lines; the number of lines. `None` where it has a partner, or is longer.
    #[inline]
    pub fn words(&self, lines: &mut [Words; ADD_LINES_MAX]) -> Option<usize> {
        let bytes = field::add::NAME + self.name.len();
        if self.partner.is_some() || bytes > ADD_LINES_MAX * LINE {
            return None;
        }
        let pair = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        let small = [self.kind, self.name.len() as u8, self.flags, self.lines];
        let words = lines.as_flattened_mut();
        words[field::add::GENERATION / 8] = self.generation;
        words[field::add::MTIME / 8] = self.mtime;
        words[field::add::INO / 8] = pair(self.ino, self.cookie);
        words[field::add::REPLACES / 8] = pair(self.replaces, self.moved);
        words[field::add::KIND / 8] = u32::from_le_bytes(small) as u64;
        put_bytes(words, field::add::NAME, self.name);
        Some(bytes.div_ceil(LINE))
    }

    /// Changes the directory as the record says; the new times, if it sets any.
    fn apply(&self, dir: &mut DirIndex, seq: u32, lines: u8, owner: &Owner) -> Result<Option<u64>> {
        if self.flags & field::add::COPIED != 0 {
            // The cleaner wrote it again; the older one may or may not be gone.
            if dir.by_cookie(self.cookie).is_some() {
                dir.set_seq(self.cookie, seq, lines);
                return Ok(None);
            }
        } else {
            // Absent where the cleaner dropped their dead records.
            dir.remove_cookie(self.replaces);
            dir.remove_cookie(self.moved);
        }
        let entry = super::dirindex::Dirent {
            ino: Ino(self.ino),
            generation: self.generation,
            kind: Kind::from_dtype(self.kind).expect("decode checked it"),
            cookie: self.cookie,
            seq,
            lines,
        };
        dir.insert(self.name, entry)
            .map_err(|_| log::damaged(owner, "two of its entries have one name or one cookie"))?;
        Ok((self.flags & field::add::COPIED == 0).then_some(self.mtime))
    }
}

/// Reads an inode from media: its slot and its whole log. Everything is complete: the pool was closed
/// cleanly, or recovery has been over it.
pub fn load<M: Media>(core: &Core<M>, ino: u32, slot: Addr) -> Result<Inode> {
    let header = read_header(core, ino, slot)?.ok_or_else(|| {
        Error::message(
            libc::EUCLEAN,
            "inode::load",
            format!("inode {ino} has no valid slot; lode fsck --repair keeps what validates"),
        )
    })?;
    let owner = Owner { ino, generation: header.generation, slot };
    let mut reader = Reader::new(core, owner)?;
    let mut body = Body::new(&header, Log::new(core.key_crc, &owner));
    let mut atime = header.btime;
    let mut op = Op::default();
    while reader.next(&mut op)? {
        apply(core, &owner, &mut body, &mut atime, &op, None)?;
    }
    body.log = reader.into_log();
    Ok(assemble(&header, &owner, body, atime))
}

pub fn assemble(header: &SlotHeader, owner: &Owner, body: Body, atime: u64) -> Inode {
    Inode {
        ino: Ino(owner.ino),
        generation: owner.generation,
        slot: owner.slot,
        kind: Kind::from_mode(header.mode).expect("read_header checked the type"),
        atime: AtomicU64::new(atime),
        atime_ahead: AtomicBool::new(false),
        ctime_ahead: AtomicBool::new(false),
        lost: AtomicBool::new(false),
        shared_for: AtomicU8::new(0),
        born_lines: 0,
        stills: AtomicU32::new(0),
        uses: AtomicU64::new(0),
        linkable: AtomicBool::new(false),
        body: BodyLock::new(body),
    }
}

/// The header of a slot, if it is valid.
pub fn read_header<M: Media>(core: &Core<M>, ino: u32, slot: Addr) -> Result<Option<SlotHeader>> {
    let mut line = [0; LINE];
    core.media.read(slot, &mut line[..LOG_HEAD_OFFSET as usize])?;
    let parts = [(slot, LOG_HEAD_OFFSET as usize)];
    if !core.media.verified(&parts, SlotHeader::is_intact(&line, core.key_crc)) {
        return Ok(None);
    }
    Ok(SlotHeader::fields(&line, ino).filter(|h| Kind::from_mode(h.mode).is_some()))
}

/// Whether the data that the operation names is what the operation wrote, as far as it can be read: its CRC over
/// the file's bytes as they are after the operation (`index`).
pub fn verify_data<M: Media>(core: &Core<M>, index: &PageIndex, op: &Op) -> Result<bool> {
    'records: for record in op.records() {
        if record.kind != Type::Write
            || get16(record.bytes, field::write::FLAGS)
                & (field::write::SETTLED | field::write::UNWRITTEN | field::write::MOVED)
                != 0
        {
            continue;
        }
        let mut offset = get64(record.bytes, field::write::START);
        if offset > FILE_BYTES_MAX {
            return Ok(false);
        }
        let end = offset + get32(record.bytes, field::write::LEN) as u64;
        let mut crc = 0;
        let mut parts: SmallVec<[(Addr, usize); 4]> = SmallVec::new();
        while offset < end {
            let n = (end - offset).min(BLOCK as u64 - offset % BLOCK as u64);
            let super::index::Mapping::Written(block) = index.get((offset / BLOCK as u64) as u32) else {
                return Ok(false);
            };
            let at = log::block_addr(block).add(offset % BLOCK as u64);
            crc = match core.media.crc32c(at, n as usize, crc) {
                Ok(crc) => crc,
                // What cannot be read may be what was acknowledged: it counts, and who reads it gets EIO. Were it
                // void, the file would be its older self without a word.
                Err(_) => continue 'records,
            };
            if M::OBSERVED {
                parts.push((at, n as usize));
            }
            offset += n;
        }
        if !core.media.verified(&parts, crc == get32(record.bytes, field::write::CRC)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// CRC-32C of bytes in DRAM, for values kept in blocks.
pub fn value_crc(value: &[u8]) -> u32 {
    crc32c(value, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_an_add_record_are_its_bytes() {
        let name: Vec<u8> = (0..255).map(|i| i as u8 | 0x80).collect();
        for len in [1, 4, 5, 11, 12, 13, 14, 20, 75, 76, 77, 140, 141, 255] {
            let record = AddRecord {
                ino: 0x0102_0304,
                generation: 0x0a0b_0c0d_0e0f,
                mtime: u64::MAX - 7,
                cookie: 0x1112_1314,
                replaces: 0x2122_2324,
                moved: 0x3132_3334,
                kind: 8,
                flags: field::add::CREATE,
                lines: 9,
                partner: None,
                name: &name[..len],
            };
            let mut batch = log::Batch::new();
            record.encode(&mut batch);
            let mut bytes = batch.bytes().to_vec();
            bytes[..HEAD].fill(0);
            let mut lines = [Words::default(); ADD_LINES_MAX];
            match record.words(&mut lines) {
                Some(count) => {
                    let words = lines[..count].as_flattened().iter();
                    assert_eq!(words.flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>(), bytes, "{len}");
                }
                None => assert!(bytes.len() > ADD_LINES_MAX * LINE, "{len}"),
            }
        }
    }
}
