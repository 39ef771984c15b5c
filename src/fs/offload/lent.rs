//! Bytes that whoever calls promises to leave alone while a copy uses them.

use crate::media::Addr;
use crate::mover::engine_port::{RawTransfer, Transfer};

/// Bytes that stay where they are, and as they are, until the copy that they were lent to has ended.
#[derive(Clone, Copy)]
pub struct Lent<'a>(&'a [u8]);

impl<'a> Lent<'a> {
    /// # Safety
    ///
    /// If the call that takes them answers that a copy is under way, they outlive it: [`Fs::wait_for_write`] returned.
    pub unsafe fn new(bytes: &'a [u8]) -> Lent<'a> {
        Lent(bytes)
    }

    #[inline]
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    #[inline]
    pub(in crate::fs) fn first(self, len: usize) -> Lent<'a> {
        Lent(&self.0[..self.0.len().min(len)])
    }

    #[inline]
    pub(in crate::fs) fn part(self, from: usize, len: usize) -> Lent<'a> {
        Lent(&self.0[from..from + len])
    }

    pub(in crate::fs) fn to_media(self, at: Addr) -> RawTransfer {
        Transfer::to_media(at, self.0).raw()
    }
}

/// Room for bytes that nobody else uses until the copy that it was lent to has ended.
pub struct LentRoom<'a>(&'a mut [u8]);

impl<'a> LentRoom<'a> {
    /// # Safety
    ///
    /// As [`Lent::new`], until [`Fs::wait_for_read`] returned.
    pub unsafe fn new(room: &'a mut [u8]) -> LentRoom<'a> {
        LentRoom(room)
    }

    #[inline]
    pub(in crate::fs) fn bytes(&mut self) -> &mut [u8] {
        self.0
    }

    #[inline]
    pub(in crate::fs) fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    pub(in crate::fs) fn first(&mut self, len: usize) -> LentRoom<'_> {
        let len = self.0.len().min(len);
        LentRoom(&mut self.0[..len])
    }

    pub(in crate::fs) fn part_from_media(&mut self, at: Addr, from: usize, len: usize) -> RawTransfer {
        Transfer::from_media(at, &mut self.0[from..from + len]).raw()
    }
}
