//! Bytes that whoever calls promises to leave alone while a copy uses them.

use crate::media::Addr;
use crate::mover::engine_port::{RawTransfer, Transfer};

/// Bytes that stay where they are, and as they are, until the copy that they were lent to has ended.
#[derive(Clone, Copy)]
pub struct Lent<'a> {
    bytes: &'a [u8],
    waits: bool,
}

impl<'a> Lent<'a> {
    /// # Safety
    ///
    /// If the call that takes them answers that a copy is under way, they outlive it: [`Fs::wait_for_write`] returned.
    pub unsafe fn new(bytes: &'a [u8]) -> Lent<'a> {
        Lent { bytes, waits: false }
    }

    /// The same, of who waits at once where a copy is under way, and keeps its thread if it is no uthread: who waits may copy,
    /// and nobody has to be woken.
    #[inline]
    pub fn waiting(self, waits: bool) -> Lent<'a> {
        Lent { waits, ..self }
    }

    #[inline]
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    #[inline]
    pub(in crate::fs) fn waits(self) -> bool {
        self.waits
    }

    #[inline]
    pub(in crate::fs) fn first(self, len: usize) -> Lent<'a> {
        Lent { bytes: &self.bytes[..self.bytes.len().min(len)], ..self }
    }

    #[inline]
    pub(in crate::fs) fn part(self, from: usize, len: usize) -> Lent<'a> {
        Lent { bytes: &self.bytes[from..from + len], ..self }
    }

    pub(in crate::fs) fn to_media(self, at: Addr) -> RawTransfer {
        Transfer::to_media(at, self.bytes).raw()
    }
}

/// Room for bytes that nobody else uses until the copy that it was lent to has ended.
pub struct LentRoom<'a> {
    room: &'a mut [u8],
    waits: bool,
}

impl<'a> LentRoom<'a> {
    /// # Safety
    ///
    /// As [`Lent::new`], until [`Fs::wait_for_read`] returned.
    pub unsafe fn new(room: &'a mut [u8]) -> LentRoom<'a> {
        LentRoom { room, waits: false }
    }

    /// As [`Lent::waiting`].
    #[inline]
    pub fn waiting(self, waits: bool) -> LentRoom<'a> {
        LentRoom { waits, ..self }
    }

    #[inline]
    pub(in crate::fs) fn waits(&self) -> bool {
        self.waits
    }

    #[inline]
    pub(in crate::fs) fn bytes(&mut self) -> &mut [u8] {
        self.room
    }

    #[inline]
    pub(in crate::fs) fn len(&self) -> usize {
        self.room.len()
    }

    #[inline]
    pub(in crate::fs) fn first(&mut self, len: usize) -> LentRoom<'_> {
        let len = self.room.len().min(len);
        LentRoom { room: &mut self.room[..len], waits: self.waits }
    }

    pub(in crate::fs) fn part_from_media(&mut self, at: Addr, from: usize, len: usize) -> RawTransfer {
        Transfer::from_media(at, &mut self.room[from..from + len]).raw()
    }
}
