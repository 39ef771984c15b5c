//! The routines that load and store media, and the choice among them.
//!
//! [`Routines`] is what differs by instruction set: leaf functions that a fault may interrupt and that
//! then return where it happened (see `fault`). [`Copier`] is what differs by persistence domain: which
//! routine a store takes, and what happens to its unaligned edges. Both are chosen once, when a pool is
//! opened. Everything here works on one contiguous range of a mapping; striping is the pool's business.

mod copier;
mod crc_join;
mod crc_table;
#[cfg(target_arch = "x86_64")]
mod fold;
mod isa;
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
#[cfg_attr(
    all(test, not(miri), target_arch = "x86_64"),
    expect(dead_code, reason = "only its routines are tested")
)]
mod portable;
mod streams;
#[cfg(test)]
mod tests;
#[cfg(all(not(miri), target_arch = "x86_64"))]
mod x86_64;

pub(super) use copier::Copier;
pub use crc_join::crc32c_join;
pub use isa::{Isa, crc32c};
pub(in crate::media) use isa::{features, return_fault};
pub use streams::{ReadStep, ReadTable, Streams};

use super::{Domain, LINE};

/// What a routine returns, in two registers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    value: u64,
    /// The address of the load or store that failed; 0 where none did.
    fault: u64,
}

impl Outcome {
    fn done(value: u64) -> Outcome {
        Outcome { value, fault: 0 }
    }

    #[inline]
    fn check(self) -> Result<u64, usize> {
        if self.fault == 0 { Ok(self.value) } else { Err(self.fault as usize) }
    }
}

/// (destination, source, bytes): any alignment. Ranges are valid and do not overlap.
pub(super) type CopyFn = unsafe extern "C" fn(*mut u8, *const u8, usize) -> Outcome;
/// As [`CopyFn`], continuing a CRC state, which the value of the outcome returns.
pub(super) type CopyCrcFn = unsafe extern "C" fn(*mut u8, *const u8, usize, u32) -> Outcome;
/// (destination, bytes), whole lines.
pub(super) type ZeroFn = unsafe extern "C" fn(*mut u8, usize) -> Outcome;
pub(super) type Load64Fn = unsafe extern "C" fn(*const u64) -> Outcome;
pub(super) type Store64Fn = unsafe extern "C" fn(*mut u64, u64) -> Outcome;
/// (source, bytes, state).
pub(super) type CrcFn = unsafe extern "C" fn(*const u8, usize, u32) -> Outcome;
/// (destination, source, span): `N` adjacent spans of whole lines, read side by side.
pub(super) type ReadStreamsFn = unsafe extern "C" fn(*mut u8, *const u8, usize) -> Outcome;
/// (start, bytes): writes back every line that the range touches.
pub(super) type WriteBackFn = unsafe extern "C" fn(*const u8, usize) -> Outcome;

/// (destination, words, through the cache): one aligned line. The fault address, or 0.
pub(super) type LineFn = unsafe fn(*mut u8, &Words, bool) -> usize;

/// [`Routines::two_fence_bytes`] where a table computes checksums.
const TWO_FENCE_BYTES_BY_TABLE: usize = 256;

/// The routines of one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Routines {
    /// Through the cache, any alignment.
    pub copy: CopyFn,
    /// Non-temporal where there is such a store: whole lines, destination aligned to a line.
    pub copy_lines: CopyFn,
    pub copy_lines_crc: CopyCrcFn,
    /// From so many bytes on it takes longer than `copy_lines` and a fence.
    pub two_fence_bytes: usize,
    pub zero_lines: ZeroFn,
    pub load64: Load64Fn,
    pub store64: Store64Fn,
    pub crc: CrcFn,
    pub read_1: ReadStreamsFn,
    pub read_1_ahead: ReadStreamsFn,
    pub read_1_burst: ReadStreamsFn,
    pub read_4: ReadStreamsFn,
    pub read_4_ahead: ReadStreamsFn,
    pub read_8: ReadStreamsFn,
    pub write_back: WriteBackFn,
    /// A write-back waits for no other and for no store: fences alone order it.
    pub write_backs_overlap: bool,
    pub store_line: LineFn,
}

#[inline]
fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of every 64-bit x86.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}

/// A line as words, little-endian on media.
pub type Words = [u64; LINE / 8];

/// The bytes of lines.
pub(super) fn line_bytes(lines: &[Words]) -> Vec<u8> {
    lines.as_flattened().iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// CRC-32C of words but for the first's low half, where a record has its CRC; continuing from `seed`. Eight bytes
/// at a time, as they were stored: read in another width they would wait for all stores before them.
#[inline]
pub fn crc32c_words(words: &[u64], seed: u32) -> u32 {
    let (first, rest) = words.split_first().expect("a record has words");
    let state = crc32c(&((first >> 32) as u32).to_le_bytes(), seed);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: just looked.
        return !unsafe { x86_64::crc_words(rest, !state) };
    }
    rest.iter().fold(state, |crc, word| crc32c(&word.to_le_bytes(), crc))
}

/// Fetches lines that will be stored to. Never faults, whatever the address.
#[inline]
pub(super) fn prefetch_for_store(at: *const u8, len: usize) {
    prefetch_lines::<true>(at, len);
}

/// Fetches lines that will be read, and only that. Never faults, whatever the address.
#[inline]
pub(super) fn prefetch_for_load(at: *const u8, len: usize) {
    prefetch_lines::<false>(at, len);
}

/// The smallest pages that media is mapped by.
pub(super) const PAGE: usize = 4096;

/// The line by which the translation of a page is looked up that is stored to past the caches soon: one that the copy overwrites late.
const LATE_LINE: usize = PAGE - 512;

/// Has the translation of a page looked up, at the price of one line that is fetched for nothing. Never faults, whatever the address.
#[inline]
fn prefetch_translation(page: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is a hint and touches no memory architecturally.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_NTA>(page.wrapping_add(LATE_LINE).cast())
    };
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = page;
}

#[inline]
fn prefetch_lines<const STORES: bool>(at: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..len + at.addr() % LINE).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        let line = at.wrapping_add(line).cast();
        // SAFETY: a prefetch is a hint and touches no memory architecturally.
        unsafe {
            if STORES { _mm_prefetch::<_MM_HINT_ET0>(line) } else { _mm_prefetch::<_MM_HINT_T0>(line) }
        };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (at, len);
}

/// Asks for the cache line of something in DRAM that is stored to soon, and waits for nothing.
#[inline]
pub fn prefetch<T>(place: &T) {
    prefetch_for_store(std::ptr::from_ref(place).cast(), size_of::<T>());
}
