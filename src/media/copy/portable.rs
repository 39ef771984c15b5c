//! The routines in plain Rust, for processors without assembly routines here.
//!
//! No cache line is written back and no fault is caught, so that on such a processor only domains that
//! need neither (`page-cache`, `volatile`) keep their promise; the pool refuses the others.

use super::{Isa, Outcome, Routines, crc_table};

/// Nothing to find out.
#[derive(Clone, Copy, Debug)]
pub(in crate::media) struct Features {
    pub zen: Option<u32>,
}

impl Features {
    pub fn detect() -> Features {
        Features { zen: None }
    }

    pub fn has(&self, isa: Isa) -> bool {
        isa == Isa::Portable
    }

    pub fn list(&self) -> Vec<(&'static str, bool)> {
        vec![("routines of this processor", false)]
    }

    pub fn write_back_name(&self) -> &'static str {
        "none"
    }

    pub fn crc_name(&self, _isa: Isa) -> &'static str {
        "table"
    }
}

pub(super) fn routines(_isa: Isa, _features: &Features) -> Routines {
    Routines {
        copy,
        copy_lines: copy,
        copy_lines_crc,
        two_fence_bytes: super::TWO_FENCE_BYTES_BY_TABLE,
        zero_lines,
        load64,
        store64,
        crc,
        read_1: read_streams::<1>,
        read_1_ahead: read_streams::<1>,
        read_1_burst: read_streams::<1>,
        read_4: read_streams::<4>,
        read_4_ahead: read_streams::<4>,
        read_8: read_streams::<8>,
        write_back,
        write_backs_overlap: false,
        store_line,
    }
}

/// # Safety
/// As [`super::LineFn`].
unsafe fn store_line(dst: *mut u8, words: &super::Words, _cached: bool) -> usize {
    let bytes = super::line_bytes(&[*words]);
    // SAFETY: the caller's.
    unsafe { copy(dst, bytes.as_ptr(), bytes.len()) }.fault as usize
}

/// No fault is caught here.
///
/// # Safety
/// None needed; the signature is that of the other processors.
pub(in crate::media) unsafe fn return_fault(_context: *mut libc::c_void, _address: usize) -> bool {
    false
}

/// # Safety
/// As [`super::CopyFn`].
unsafe extern "C" fn copy(dst: *mut u8, src: *const u8, len: usize) -> Outcome {
    // SAFETY: the caller vouches for both ranges; one is a caller's slice, the other media, so they
    // do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    Outcome::done(0)
}

/// # Safety
/// As [`super::CopyCrcFn`].
unsafe extern "C" fn copy_lines_crc(dst: *mut u8, src: *const u8, len: usize, state: u32) -> Outcome {
    // SAFETY: passed on.
    unsafe {
        copy(dst, src, len);
        crc(src, len, state)
    }
}

/// # Safety
/// As [`super::ZeroFn`].
unsafe extern "C" fn zero_lines(dst: *mut u8, len: usize) -> Outcome {
    // SAFETY: the caller vouches for the range.
    unsafe { std::ptr::write_bytes(dst, 0, len) };
    Outcome::done(0)
}

/// # Safety
/// As [`super::Load64Fn`].
unsafe extern "C" fn load64(src: *const u64) -> Outcome {
    // SAFETY: the caller vouches for the aligned word; volatile, because another process may write it.
    Outcome::done(unsafe { src.read_volatile() })
}

/// # Safety
/// As [`super::Store64Fn`].
unsafe extern "C" fn store64(dst: *mut u64, value: u64) -> Outcome {
    // SAFETY: as in `load64`.
    unsafe { dst.write_volatile(value) };
    Outcome::done(0)
}

/// # Safety
/// As [`super::CrcFn`].
unsafe extern "C" fn crc(src: *const u8, len: usize, state: u32) -> Outcome {
    // SAFETY: the caller vouches for the range. Byte by byte through volatile loads, because media
    // may change under the loop and must not be seen through a slice.
    let bytes = (0..len).map(|i| unsafe { src.add(i).read_volatile() });
    Outcome::done(u64::from(crc_table::update(state, bytes)))
}

/// # Safety
/// As [`super::ReadStreamsFn`].
unsafe extern "C" fn read_streams<const N: usize>(dst: *mut u8, src: *const u8, span: usize) -> Outcome {
    // SAFETY: N spans, one after the other, are one range.
    unsafe { copy(dst, src, span * N) }
}

/// # Safety
/// As [`super::WriteBackFn`].
unsafe extern "C" fn write_back(_at: *const u8, _len: usize) -> Outcome {
    Outcome::done(0)
}
