//! Offsets with a type, and values that are plain bytes; reading and overwriting what is live.

use std::marker::PhantomData;

use super::format::CHUNK;
use super::{Heap, Offset, invalid};
use crate::error::Result;
use crate::media::{Addr, Media};

/// Values that may be stored as the bytes they are and read back by another run of the program.
///
/// # Safety
///
/// Every bit pattern is a value; there is no padding; nothing in it means something only to this process (references,
/// addresses unless the heap has its place, descriptors).
pub unsafe trait Plain: Copy + 'static {}

// SAFETY: integers have no padding, and every pattern is one of theirs.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for u128 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: an array has no padding between its elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The bytes of a value.
pub(super) fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a `Plain` value has no padding, so that all of its bytes are initialised.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

/// Where a value of this type begins. As large as an [`Offset`]; the type is the program's word for it.
pub struct Ptr<T> {
    at: Offset,
    value: PhantomData<fn() -> T>,
}

impl<T> Ptr<T> {
    #[inline]
    pub const fn new(at: Offset) -> Ptr<T> {
        Ptr { at, value: PhantomData }
    }

    #[inline]
    pub const fn offset(self) -> Offset {
        self.at
    }

    /// A word of the value, for [`Transaction::set`](super::Transaction::set): `std::mem::offset_of!` says where.
    #[inline]
    pub const fn word(self, bytes: usize) -> Offset {
        self.at.add(bytes as u64)
    }
}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Ptr<T> {
        *self
    }
}

impl<T> Copy for Ptr<T> {}

impl<T> PartialEq for Ptr<T> {
    fn eq(&self, other: &Ptr<T>) -> bool {
        self.at == other.at
    }
}

impl<T> Eq for Ptr<T> {}

impl<T> std::fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ptr({:#x})", self.at.0)
    }
}

impl<M: Media> Heap<M> {
    /// Checks that bytes are where objects are; whether one is there is the caller's business.
    fn inside(&self, at: Offset, bytes: u64) -> Result<Addr> {
        let end = self.layout.chunks_at + self.layout.chunks * CHUNK;
        if at.0 >= self.layout.chunks_at && at.0.checked_add(bytes).is_some_and(|e| e <= end) {
            return Ok(Addr(at.0));
        }
        Err(invalid("heap::inside", format!("{bytes} bytes at {:#x} are not where objects are", at.0)))
    }

    /// Copies bytes out of the heap. Another thread that stores there meanwhile may be seen in part. EINVAL outside
    /// of where objects are, EIO for bad media.
    pub fn read(&self, at: Offset, to: &mut [u8]) -> Result<()> {
        let at = self.inside(at, to.len() as u64)?;
        Ok(self.media.read(at, to)?)
    }

    /// One word, at a multiple of 8, in one piece.
    pub fn word(&self, at: Offset) -> Result<u64> {
        let at = self.inside(at, 8)?;
        if !at.0.is_multiple_of(8) {
            return Err(invalid("heap::word", format!("{:#x} is no multiple of 8, and no word", at.0)));
        }
        Ok(self.media.load64(at)?)
    }

    /// Copies a value out of the heap.
    pub fn get<T: Plain>(&self, at: Ptr<T>) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        // SAFETY: zeroed memory of so many bytes, nobody else's.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
        self.read(at.offset(), bytes)?;
        // SAFETY: every pattern of bytes is a value of a `Plain` type.
        Ok(unsafe { value.assume_init() })
    }

    /// Overwrites bytes of a live object in place: durable on return, but a crash may leave any part of it. For what
    /// has to be whole use [`Transaction::set`](super::Transaction::set), or a new object. EINVAL where the bytes are
    /// not of one live object.
    pub fn overwrite(&self, at: Offset, bytes: &[u8]) -> Result<()> {
        self.usable()?;
        if self.alloc.live_around(at.0, bytes.len() as u64).is_none() {
            let message = format!("{} bytes at {:#x} are not of one live object", bytes.len(), at.0);
            return Err(invalid("heap::overwrite", message));
        }
        let stored = self.media.copy_cached(Addr(at.0), bytes).map_err(|fault| self.fault(fault))?;
        let written = self.media.write_back(stored.at(), stored.len());
        self.make_durable(written.map_err(|fault| self.fault(fault))?)?;
        self.settle_if_due()
    }

    /// What the program stored there by address is durable on return. EINVAL outside of where objects are, EIO for media that went
    /// bad since.
    pub fn persist(&self, at: Offset, bytes: u64) -> Result<()> {
        self.usable()?;
        let at = self.inside(at, bytes)?;
        self.make_durable(self.media.write_back(at, bytes as usize)?)?;
        self.settle_if_due()
    }

    /// A record that is not settled would be applied again after a crash, over what was stored since.
    fn settle_if_due(&self) -> Result<()> {
        match self.is_unsettled() && !self.media.omits("what is stored in place is settled") {
            true => self.settle(),
            false => Ok(()),
        }
    }

    /// Where an object is mapped; none on media that are not mapped.
    pub fn address(&self, at: Offset) -> Option<*mut u8> {
        self.inside(at, 1).ok()?;
        self.media.mapped(Addr(at.0), 1)
    }

    /// What an address leads to, if it is one of this heap.
    pub fn offset_of(&self, address: *const u8) -> Option<Offset> {
        let begin = self.media.mapped(Addr(0), 1)?.addr();
        let at = Offset(address.addr().checked_sub(begin)? as u64);
        self.inside(at, 1).ok().map(|_| at)
    }

    /// The address at which it always is, if it has its place.
    pub fn base(&self) -> Option<u64> {
        (self.header.base != 0).then_some(self.header.base)
    }

    /// What a word holds that points to an object: its address where the heap has its place, else its offset.
    pub fn link_value(&self, to: Offset) -> u64 {
        self.header.base + to.0
    }

    /// The object that such a word points to; none for 0, or where it leads out of the heap.
    pub fn linked(&self, value: u64) -> Option<Offset> {
        let at = Offset(value.checked_sub(self.header.base)?);
        self.inside(at, 1).ok().map(|_| at)
    }

    pub fn media(&self) -> &M {
        &self.media
    }
}
