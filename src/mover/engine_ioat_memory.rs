//! The memory that an I/OAT device reads and writes besides what it copies: made once, registered once (Fastmove §5.1,
//! *pre-allocation*). For each channel a ring of descriptors and a word for completions, for each request a buffer that
//! small copies go through.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::sync::atomic::AtomicU64;

use super::engine_ioat::{BOUNCE_BYTES, Device, SHARES_MAX, SLOTS};
use super::engine_ioat_channel::RING;
use super::ioat::{DESCRIPTOR_BYTES, Descriptor};
use super::pairing::PAGE_BYTES;
use crate::media::LINE;

const RING_BYTES: usize = RING * DESCRIPTOR_BYTES;
/// Each share of a request begins at the place in a line at which its other end does.
const BUFFER_BYTES: usize = (BOUNCE_BYTES + SHARES_MAX * 2 * LINE).next_multiple_of(PAGE_BYTES);

pub(super) struct Memory {
    base: *mut u8,
    /// What the device calls `base`.
    bus: u64,
    channels: usize,
    layout: Layout,
}

// SAFETY: an address range that is owned; whoever hands out its parts says whose they are.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A part of it, as the CPU and as the device have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<T> {
    pub at: *mut T,
    pub bus: u64,
}

impl Memory {
    pub fn new(device: &impl Device, channels: usize) -> io::Result<Memory> {
        let words = (channels * LINE).next_multiple_of(PAGE_BYTES);
        let bytes = channels * RING_BYTES + words + SLOTS * BUFFER_BYTES;
        let layout = Layout::from_size_align(bytes, PAGE_BYTES).map_err(io::Error::other)?;
        // SAFETY: it is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        let mut memory = Memory { base, bus: 0, channels, layout };
        // SAFETY: it is there until the device is stopped: who owns both sees to that.
        memory.bus = unsafe { device.register(base, bytes)? };
        Ok(memory)
    }

    fn place<T>(&self, offset: usize) -> Place<T> {
        assert!(offset + size_of::<T>() <= self.layout.size());
        // SAFETY: inside, as just checked.
        Place { at: unsafe { self.base.add(offset) }.cast(), bus: self.bus + offset as u64 }
    }

    /// Of [`RING`] descriptors.
    pub fn ring(&self, channel: usize) -> Place<Descriptor> {
        self.place(channel * RING_BYTES)
    }

    /// In a line of its own.
    pub fn word(&self, channel: usize) -> Place<AtomicU64> {
        self.place(self.channels * RING_BYTES + channel * LINE)
    }

    /// Of `BUFFER_BYTES`, at the beginning of a page.
    pub fn buffer(&self, slot: usize) -> Place<u8> {
        let words = (self.channels * LINE).next_multiple_of(PAGE_BYTES);
        self.place(self.channels * RING_BYTES + words + slot * BUFFER_BYTES)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and no device uses it any more.
        unsafe { dealloc(self.base, self.layout) };
    }
}
