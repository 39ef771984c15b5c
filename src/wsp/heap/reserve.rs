//! Objects on their way: reserved in DRAM, filled, and published by a commit, or given back.
//!
//! What is stored to a reserved object needs no order and no fence of its own: the commit that publishes it sees to
//! that, in whichever thread. Large pieces go past the caches at once.

use super::pointer::bytes_of;
use super::{Change, Heap, Offset, Plain, Ptr, invalid};
use crate::error::Result;
use crate::limits::HEAP_OBJECT_BYTES_MAX;
use crate::media::{Addr, Media};

/// Pieces from this size on are stored past the caches, in bytes.
const PAST_CACHES_BYTES_MIN: usize = 4096;
/// Zeros that are stored at a time, in bytes.
const ZEROS: [u8; 256] = [0; 256];
const IN_COMMIT: &str = "the commit that publishes the object writes it back; nobody else finds it";

/// An object that nobody else has. It is given back when this is dropped, or when the program ends before a commit
/// publishes it.
#[derive(Debug)]
pub struct Reservation<'h, M: Media> {
    heap: &'h Heap<M>,
    at: Offset,
    bytes: u64,
    /// Bytes from the beginning, the last of which was stored through the caches.
    stored: u64,
}

impl<M: Media> Heap<M> {
    /// An object of so many bytes, whose content is whatever was there. It begins at a multiple of 16, and of its size
    /// where that is a power of two up to 32 KiB. ENOSPC, EIO.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation<'_, M>> {
        Ok(Reservation { heap: self, at: self.reserve_offset(bytes)?, bytes, stored: 0 })
    }

    /// As [`reserve`](Heap::reserve), for who keeps the offset and calls [`give_back`](Heap::give_back) or
    /// [`commit`](Heap::commit).
    pub fn reserve_offset(&self, bytes: u64) -> Result<Offset> {
        self.usable()?;
        if bytes > HEAP_OBJECT_BYTES_MAX {
            let message = format!("an object has at most {HEAP_OBJECT_BYTES_MAX} bytes, not {bytes}");
            return Err(invalid("heap::reserve", message));
        }
        self.alloc.reserve(&self.media, bytes)
    }

    /// A reserved object is nobody's again. EINVAL where it is not reserved.
    pub fn give_back(&self, at: Offset) -> Result<()> {
        self.alloc.give_back(at)
    }

    /// Bytes that an object can hold, at least what was asked for. EINVAL where none begins there.
    pub fn usable_bytes(&self, at: Offset) -> Result<u64> {
        Ok(self.alloc.find(at)?.bytes())
    }
}

impl<'h, M: Media> Reservation<'h, M> {
    #[inline]
    pub fn offset(&self) -> Offset {
        self.at
    }

    pub(super) fn heap(&self) -> &'h Heap<M> {
        self.heap
    }

    /// Bytes that were asked for.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Stores bytes in the object, `at` bytes from its beginning. EINVAL beyond its end, EIO for bad media.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at.checked_add(bytes.len() as u64).filter(|&end| end <= self.bytes);
        let Some(end) = end else {
            let message =
                format!("{} bytes at {at} do not fit an object of {} bytes", bytes.len(), self.bytes);
            return Err(invalid("heap::write", message));
        };
        let (media, to) = (&self.heap.media, Addr(self.at.0 + at));
        if bytes.len() >= PAST_CACHES_BYTES_MIN {
            // The commit may be another thread's, whose fence would not cover it.
            media.fence(media.copy_nt(to, bytes)?);
            if media.domain().is_persistent_memory() {
                return Ok(());
            }
        } else if !bytes.is_empty() {
            media.copy_cached(to, bytes)?.redundant(IN_COMMIT);
        }
        self.stored = self.stored.max(end);
        Ok(())
    }

    /// Stores a value at the object's beginning.
    pub fn put<T: Plain>(&mut self, value: &T) -> Result<Ptr<T>> {
        self.write(0, bytes_of(value))?;
        Ok(Ptr::new(self.at))
    }

    /// Fills it with zeros.
    pub fn zero(&mut self) -> Result<()> {
        if self.bytes >= PAST_CACHES_BYTES_MIN as u64 {
            let media = &self.heap.media;
            media.fence(media.zero_nt(Addr(self.at.0), self.bytes as usize)?);
            if !media.domain().is_persistent_memory() {
                self.stored = self.bytes;
            }
            return Ok(());
        }
        (0..self.bytes).step_by(ZEROS.len()).try_for_each(|at| {
            let len = (self.bytes - at).min(ZEROS.len() as u64) as usize;
            self.write(at, &ZEROS[..len])
        })
    }

    /// Where the object is mapped, to be filled by stores; none on media that are not mapped. Aligned as the object is.
    pub fn address(&mut self) -> Option<*mut u8> {
        self.stored = self.bytes;
        self.heap.address(self.at)
    }

    /// What publishes it.
    pub(super) fn change(&self) -> Change<'static> {
        Change::Publish { at: self.at, stored: self.stored }
    }

    /// A commit has published it.
    pub(super) fn published(self) {
        std::mem::forget(self);
    }
}

impl<M: Media> Drop for Reservation<'_, M> {
    fn drop(&mut self) {
        // It stays where a commit could not be made durable: then nobody knows whether it is published.
        let _ = self.heap.alloc.give_back(self.at);
    }
}
