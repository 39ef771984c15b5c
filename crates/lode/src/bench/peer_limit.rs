//! The limit: the same bytes on the same kind of mapping, with no file system.
//!
//! A write is a non-temporal copy, a fence, one more 64-byte line, a fence: what a file system with a
//! commit record does at the least, if it orders data before record. A read is memcpy from the
//! mapping. Nothing here looks up, allocates, checks or locks.

use std::sync::Arc;

use lodestone::media::{Addr, LINE, Media};
use lodestone::{Error, Result};

use super::place::Mapping;
use super::worker::{Name, Worker};

pub struct LimitWorker<M: Media> {
    media: Arc<M>,
    /// The same file mapped once more, for loads that go through no code of ours.
    mapping: Arc<Mapping>,
    /// First byte of this worker's data, then of its append area, then of its lines.
    data: u64,
    append: u64,
    lines: u64,
    append_at: u64,
    next_line: u64,
}

/// A ring of commit lines, as long as a log might be before it wraps.
const LINES_BYTES: u64 = 1 << 20;
/// The pool's label stands before; data begins where a huge page would.
const FIRST: u64 = 2 << 20;

impl<M: Media> LimitWorker<M> {
    pub fn new(
        media: Arc<M>,
        mapping: Arc<Mapping>,
        file: usize,
        file_bytes: u64,
        append_bytes_max: u64,
    ) -> LimitWorker<M> {
        let data = FIRST + file as u64 * (file_bytes + append_bytes_max + LINES_BYTES);
        let append = data + file_bytes;
        let lines = append + append_bytes_max;
        LimitWorker { media, mapping, data, append, lines, append_at: 0, next_line: 0 }
    }

    #[inline(always)]
    fn store(&mut self, at: u64, src: &[u8]) -> Result<()> {
        let copied = self.media.copy_nt(Addr(at), src)?;
        self.media.fence(copied);
        let line = [self.next_line as u8; LINE];
        let at = self.lines + self.next_line % LINES_BYTES;
        self.next_line += LINE as u64;
        let committed = self.media.copy_nt(Addr(at), &line)?;
        self.media.fence(committed);
        Ok(())
    }
}

fn no_names() -> Error {
    Error::message(libc::EOPNOTSUPP, "bench::peer_limit", "raw memory has no names")
}

impl<M: Media> Worker for LimitWorker<M> {
    #[inline(always)]
    fn read(&mut self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.mapping.read(self.data + at, dst);
        Ok(())
    }

    #[inline(always)]
    fn write(&mut self, at: u64, src: &[u8]) -> Result<()> {
        self.store(self.data + at, src)
    }

    fn append_begin(&mut self) -> Result<()> {
        self.append_at = 0;
        Ok(())
    }

    #[inline(always)]
    fn append(&mut self, src: &[u8]) -> Result<()> {
        self.store(self.append + self.append_at, src)?;
        self.append_at += src.len() as u64;
        Ok(())
    }

    fn append_end(&mut self) -> Result<u64> {
        Ok(self.append_at)
    }

    fn create(&mut self, _: &Name) -> Result<()> {
        Err(no_names())
    }

    fn stat(&mut self, _: &Name) -> Result<()> {
        Err(no_names())
    }

    fn rename(&mut self, _: &Name, _: &Name) -> Result<()> {
        Err(no_names())
    }

    fn unlink(&mut self, _: &Name) -> Result<()> {
        Err(no_names())
    }

    fn readdir(&mut self) -> Result<u64> {
        Err(no_names())
    }
}
