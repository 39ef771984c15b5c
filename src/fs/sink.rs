//! Where a write's data go: the state of a copy to media.
//!
//! In persistent memory a store to a part of a line fetches that line first. So what ends with the file is stored by whole lines:
//! behind the end nobody reads, and what stands in front of an append is remembered (`last_line`).

use super::Core;
use super::format::put_bytes;
use super::offload::{Lent, Parts};
use crate::error::Result;
use crate::media::{Addr, Flushed, LINE, Media, Words, crc32c};
use crate::mover::class::Via;

/// Largest append that is put together in DRAM, in bytes, with what its first line had before.
const APPEND_BYTES_MAX: usize = 4 * LINE;

/// The state of a copy to media.
pub(super) struct Sink {
    /// Continued; none where two fences are cheaper.
    pub crc: Option<u32>,
    pub flushed: Flushed,
    pub engine: Via,
    /// What engines are to copy all at once, if they are.
    pub parts: Option<Parts>,
}

impl Sink {
    pub fn new(crc: Option<u32>, engine: Via) -> Sink {
        Sink { crc, flushed: Flushed::issued(), engine, parts: None }
    }

    /// Stores what stays where it is until a copy has ended.
    pub fn store_lent<M: Media>(&mut self, core: &Core<M>, at: Addr, bytes: Lent) -> Result<()> {
        match &mut self.parts {
            Some(parts) if core.mover.takes(self.engine, bytes.bytes().len()) => {
                parts.push(bytes.to_media(at));
                Ok(())
            }
            _ => self.store(core, at, bytes.bytes()),
        }
    }

    /// Stores at the end of a file, in a block that it has, of whose last line `last` is known: whole lines. Those of small
    /// appends are put together in DRAM, of others the first.
    pub fn append<M: Media>(
        &mut self,
        core: &Core<M>,
        at: Addr,
        bytes: Lent,
        last: Option<&Words>,
    ) -> Result<()> {
        let (before, src) = ((at.0 % LINE as u64) as usize, bytes.bytes());
        let end = before + src.len();
        let together =
            if end <= APPEND_BYTES_MAX { src.len() } else { before.next_multiple_of(LINE) - before };
        if core.deferring || together == 0 || before > 0 && last.is_none() {
            return self.store_to_end(core, at, bytes);
        }
        let mut lines = [0; APPEND_BYTES_MAX];
        for (byte, word) in lines.as_chunks_mut().0.iter_mut().zip(last.into_iter().flatten()) {
            *byte = word.to_le_bytes();
        }
        let end = before + together;
        lines[before..end].copy_from_slice(&src[..together]);
        let from = Addr(at.0 - before as u64);
        let flushed = core.media.copy_nt(from, &lines[..end.next_multiple_of(LINE)])?;
        self.stored(&src[..together], flushed);
        match together == src.len() {
            true => Ok(()),
            false => {
                self.store_to_end(core, at.add(together as u64), bytes.part(together, src.len() - together))
            }
        }
    }

    /// Stores what ends with the file, from its last whole lines on by [`store_tail`](Sink::store_tail).
    fn store_to_end<M: Media>(&mut self, core: &Core<M>, at: Addr, bytes: Lent) -> Result<()> {
        let whole = whole_lines(core, at, bytes.bytes().len());
        if whole > 0 {
            self.store_lent(core, at, bytes.part(0, whole))?;
        }
        self.store_tail(core, at.add(whole as u64), &bytes.bytes()[whole..])
    }

    /// Stores the last bytes of a file, less than a line. Behind them nobody reads: zeros make the line whole.
    pub fn store_tail<M: Media>(&mut self, core: &Core<M>, at: Addr, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut line = Words::default();
        put_bytes(&mut line, 0, bytes);
        let flushed = core.media.store_lines(at, &[line])?;
        self.stored(bytes, flushed);
        Ok(())
    }

    /// Takes over that lines with these bytes of the write were stored.
    #[inline]
    fn stored(&mut self, bytes: &[u8], flushed: Flushed) {
        self.crc = self.crc.map(|crc| crc32c(bytes, crc));
        self.flushed = std::mem::replace(&mut self.flushed, Flushed::issued()).and(flushed);
    }

    pub fn store<M: Media>(&mut self, core: &Core<M>, at: Addr, bytes: &[u8]) -> Result<()> {
        let flushed = if core.mover.takes(self.engine, bytes.len()) {
            let store = |media: &M| core.mover.store(media, self.engine, at, bytes, self.crc);
            let (crc, flushed) = core.media.watch(store)?;
            self.crc = crc;
            flushed
        } else if let Some(crc) = &mut self.crc {
            let (next, flushed) = core.media.copy_nt_crc(at, bytes, *crc)?;
            *crc = next;
            flushed
        } else {
            core.media.copy_nt(at, bytes)?
        };
        self.flushed = std::mem::replace(&mut self.flushed, Flushed::issued()).and(flushed);
        Ok(())
    }
}

/// How many bytes from `at` to the end of a file are stored as they are: up to the last line boundary, or all, where parts of
/// lines go through the cache and nobody waits for them.
#[inline]
pub(super) fn whole_lines<M: Media>(core: &Core<M>, at: Addr, len: usize) -> usize {
    let tail = (at.0 as usize + len) % LINE;
    if core.deferring || tail > len { len } else { len - tail }
}
