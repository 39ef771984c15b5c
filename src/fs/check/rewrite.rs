//! Writes a log that says what an image is, in blocks that nobody has: it counts once a log head leads to it.

use super::super::alloc::Block;
use super::super::format::*;
use super::super::inode::AddRecord;
use super::super::log::{Batch, block_addr};
use super::super::types::{Ino, Kind};
use super::image::{Image, Value};
use super::space::{Space, joined};
use crate::error::{Error, Result};
use crate::media::{Addr, LINE, Media};

/// Extents in one record.
const EXTENTS_MAX: usize = 64;
/// Bytes of a symbolic link's target in one record.
const TARGET_BYTES_MAX: usize = 2048;
/// Above all numbers that lost records of the old log may have had.
const SEQ_STEP: u32 = 1 << 20;

/// A log in the making.
struct Log<'s, 'm, M: Media> {
    media: &'m M,
    space: &'s mut Space,
    seed: u32,
    incarnation: u32,
    epoch: u64,
    seq: u32,
    segment: Vec<u8>,
    at: Addr,
}

/// What seeds a new log.
#[derive(Clone, Copy)]
pub struct Seed {
    pub key_crc: u32,
    pub incarnation: u32,
    pub epoch: u64,
}

/// Stores the log of `image`, with the values of its attributes (by name) that stand in records; where it begins.
/// Durable once the caller has fenced and synced. ENOSPC where no block is free.
pub fn write<M: Media>(
    media: &M,
    space: &mut Space,
    seed: Seed,
    image: &Image,
    value: &dyn Fn(&Value) -> Result<Vec<u8>>,
) -> Result<Addr> {
    let (ino, generation) = (image.owner.ino, image.owner.generation);
    let first = space.allocate().ok_or_else(no_space)?;
    let mut log = Log {
        media,
        space,
        seed: log_seed(seed.key_crc, ino, generation, seed.incarnation),
        incarnation: seed.incarnation,
        epoch: seed.epoch,
        seq: image.log.next_seq.wrapping_add(SEQ_STEP),
        segment: Vec::with_capacity(BLOCK),
        at: Addr(0),
    };
    log.begin(first);
    for (name, v) in &image.xattrs {
        log.xattr(name, v, image.ctime, value)?;
    }
    match image.kind {
        Kind::File => log.file(image)?,
        Kind::Directory => log.directory(image)?,
        Kind::Symlink => log.symlink(image)?,
        _ => {}
    }
    log.attributes(image)?;
    log.store()?;
    Ok(block_addr(first))
}

impl<M: Media> Log<'_, '_, M> {
    /// Goes on in a block of its own.
    fn begin(&mut self, block: Block) {
        self.at = block_addr(block);
        self.segment.clear();
        let mut line = [0; LINE];
        put32(&mut line, field::segment::LINES, SEGMENT_LINES);
        put32(&mut line, field::segment::INCARNATION, self.incarnation);
        self.finish(&mut line, Type::Segment);
    }

    fn finish(&mut self, record: &mut [u8], kind: Type) {
        Head::finish(record, self.seq, self.epoch, kind as u8, self.seed);
        self.seq = self.seq.wrapping_add((record.len() / LINE) as u32);
        self.segment.extend_from_slice(record);
    }

    fn store(&mut self) -> Result<()> {
        let flushed = self.media.copy_nt(self.at, &self.segment)?;
        self.media.fence(flushed);
        Ok(())
    }

    /// Appends a record of at least `bytes` bytes that `fill` fills in.
    fn record(&mut self, kind: Type, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let lines = bytes.div_ceil(LINE);
        if self.segment.len() + (lines + 1) * LINE > BLOCK {
            let next = self.space.allocate().ok_or_else(no_space)?;
            let mut link = [0; LINE];
            put64(&mut link, field::link::ADDR, block_addr(next).0);
            put32(&mut link, field::link::LINES, SEGMENT_LINES);
            put32(&mut link, field::link::INCARNATION, self.incarnation);
            self.finish(&mut link, Type::Link);
            self.store()?;
            self.begin(next);
        }
        let mut record = vec![0; lines * LINE];
        fill(&mut record);
        self.finish(&mut record, kind);
        Ok(())
    }

    fn attributes(&mut self, image: &Image) -> Result<()> {
        self.record(Type::Attr, field::attr::CTIME + 8, |r| {
            put32(r, field::attr::MODE, image.mode);
            put32(r, field::attr::UID, image.uid);
            put32(r, field::attr::GID, image.gid);
            put64(r, field::attr::SIZE, image.size);
            put64(r, field::attr::ATIME, image.atime);
            put64(r, field::attr::MTIME, image.mtime);
            put64(r, field::attr::CTIME, image.ctime);
        })
    }

    fn xattr(
        &mut self,
        name: &[u8],
        v: &Value,
        ctime: u64,
        value: &dyn Fn(&Value) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let inline = if v.blocks.is_none() { value(v)? } else { Vec::new() };
        let end = field::xattr::NAME + name.len();
        self.record(Type::Xattr, end + inline.len(), |r| {
            put64(r, field::xattr::CTIME, ctime);
            put32(r, field::xattr::VALUE_LEN, v.len);
            put32(r, field::xattr::BLOCK, v.blocks.map_or(0, |run| run.start.0));
            put32(r, field::xattr::CRC, v.crc);
            r[field::xattr::NAME_LEN] = name.len() as u8;
            let in_blocks = if v.blocks.is_some() { field::xattr::IN_BLOCKS } else { 0 };
            r[field::xattr::FLAGS] = in_blocks | field::xattr::COPIED;
            r[field::xattr::NAME..end].copy_from_slice(name);
            r[end..end + inline.len()].copy_from_slice(&inline);
        })
    }

    fn file(&mut self, image: &Image) -> Result<()> {
        for unwritten in [false, true] {
            let pieces = image.pages.iter().filter(|(_, p)| p.unwritten == unwritten);
            let extents: Vec<Extent> =
                pieces.map(|(&page, p)| Extent { page, count: p.count, block: Block(p.block) }).collect();
            for some in extents.chunks(EXTENTS_MAX) {
                let bytes = super::super::inode::write_record_bytes(some.len());
                self.record(Type::Write, bytes, |r| {
                    let reserved = if unwritten { field::write::UNWRITTEN } else { 0 };
                    put16(r, field::write::FLAGS, field::write::MOVED | field::write::SETTLED | reserved);
                    put16(r, field::write::EXTENTS, some.len() as u16);
                    for (i, e) in some.iter().enumerate() {
                        let at = super::super::inode::extent_offset(i);
                        put32(r, at, e.page);
                        put32(r, at + 4, e.count);
                        put32(r, at + 8, e.block.0);
                    }
                })?;
            }
        }
        // Who makes up a log may let it end in front of what it has written.
        for (&start, sum) in image.sums.iter().filter(|(_, sum)| sum.end <= image.size) {
            self.record(Type::Write, field::write::FIRST, |r| {
                put64(r, field::write::START, start);
                put64(r, field::write::SIZE, image.size);
                put64(r, field::write::MTIME, image.mtime);
                put32(r, field::write::LEN, (sum.end - start) as u32);
                put32(r, field::write::CRC, sum.crc);
            })?;
        }
        for run in joined(image.bad.iter().copied()) {
            self.record(Type::Bad, field::bad::COUNT + 4, |r| {
                put32(r, field::bad::BLOCK, run.start.0);
                put32(r, field::bad::COUNT, run.count);
            })?;
        }
        Ok(())
    }

    fn directory(&mut self, image: &Image) -> Result<()> {
        for (&cookie, e) in &image.entries {
            let add = AddRecord {
                flags: field::add::COPIED,
                ..AddRecord::new(Ino(e.ino), e.generation, e.kind, &e.name, cookie, image.mtime)
            };
            let mut batch = Batch::new();
            add.encode(&mut batch);
            let bytes = batch.bytes();
            self.record(Type::Add, bytes.len(), |r| r.copy_from_slice(bytes))?;
        }
        Ok(())
    }

    fn symlink(&mut self, image: &Image) -> Result<()> {
        for (i, part) in image.target.chunks(TARGET_BYTES_MAX).enumerate() {
            let end = field::symlink::TARGET + part.len();
            self.record(Type::Symlink, end, |r| {
                put16(r, field::symlink::LEN, part.len() as u16);
                put16(r, field::symlink::OFFSET, (i * TARGET_BYTES_MAX) as u16);
                r[field::symlink::TARGET..end].copy_from_slice(part);
            })?;
        }
        Ok(())
    }
}

#[cold]
pub fn no_space() -> Error {
    Error::message(libc::ENOSPC, "check::repair", "no block is free for the repair")
}
