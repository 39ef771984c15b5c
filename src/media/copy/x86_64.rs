//! The routines of x86-64: bindings of the assembly, and which of them this processor can run.

use std::arch::x86_64::__cpuid_count;

use super::fold::FOLD;
use super::{
    CopyCrcFn, CopyFn, CrcFn, Isa, Load64Fn, Outcome, ReadStreamsFn, Routines, Store64Fn,
    TWO_FENCE_BYTES_BY_TABLE, WriteBackFn, ZeroFn, crc_table,
};

/// [`Routines::two_fence_bytes`], by how much a carry-less product takes at a time (decision 0093).
const TWO_FENCE_BYTES_BY_128_BITS: usize = 8 << 10;
const TWO_FENCE_BYTES_BY_256_BITS: usize = 64 << 10;
const TWO_FENCE_BYTES_BY_512_BITS: usize = 128 << 10;

std::arch::global_asm!(include_str!("x86_64.s"), fold = sym FOLD);

macro_rules! import {
    ($($name:ident : fn($($argument:ty),*);)*) => {
        unsafe extern "C" {
            $(fn $name($(_: $argument),*) -> Outcome;)*
        }
    };
}

import! {
    lode_load64: fn(*const u64);
    lode_store64: fn(*mut u64, u64);
    lode_clwb: fn(*const u8, usize);
    lode_clflushopt: fn(*const u8, usize);
    lode_clflush: fn(*const u8, usize);
    lode_copy_sse2: fn(*mut u8, *const u8, usize);
    lode_copy_avx2: fn(*mut u8, *const u8, usize);
    lode_copy_avx512: fn(*mut u8, *const u8, usize);
    lode_copy_lines_sse2: fn(*mut u8, *const u8, usize);
    lode_copy_lines_avx2: fn(*mut u8, *const u8, usize);
    lode_copy_lines_avx512: fn(*mut u8, *const u8, usize);
    lode_copy_lines_crc_sse42: fn(*mut u8, *const u8, usize, u32);
    lode_copy_lines_crc_avx2: fn(*mut u8, *const u8, usize, u32);
    lode_copy_lines_crc_avx512: fn(*mut u8, *const u8, usize, u32);
    lode_zero_lines_sse2: fn(*mut u8, usize);
    lode_zero_lines_avx2: fn(*mut u8, usize);
    lode_zero_lines_avx512: fn(*mut u8, usize);
    lode_crc_sse42: fn(*const u8, usize, u32);
    lode_crc_avx2: fn(*const u8, usize, u32);
    lode_crc_avx512: fn(*const u8, usize, u32);
    lode_read_1: fn(*mut u8, *const u8, usize);
    lode_read_1_ahead_sse2: fn(*mut u8, *const u8, usize);
    lode_read_1_burst_sse2: fn(*mut u8, *const u8, usize);
    lode_read_4_sse2: fn(*mut u8, *const u8, usize);
    lode_read_4_ahead_sse2: fn(*mut u8, *const u8, usize);
    lode_read_8_sse2: fn(*mut u8, *const u8, usize);
    lode_read_1_ahead_avx2: fn(*mut u8, *const u8, usize);
    lode_read_1_burst_avx2: fn(*mut u8, *const u8, usize);
    lode_read_4_avx2: fn(*mut u8, *const u8, usize);
    lode_read_4_ahead_avx2: fn(*mut u8, *const u8, usize);
    lode_read_8_avx2: fn(*mut u8, *const u8, usize);
    lode_read_1_ahead_avx512: fn(*mut u8, *const u8, usize);
    lode_read_1_burst_avx512: fn(*mut u8, *const u8, usize);
    lode_read_4_avx512: fn(*mut u8, *const u8, usize);
    lode_read_4_ahead_avx512: fn(*mut u8, *const u8, usize);
    lode_read_8_avx512: fn(*mut u8, *const u8, usize);
}

// Marks in the section of the assembly, and routines with a calling convention of their own: called from
// `asm!` alone.
unsafe extern "C" {
    fn lode_media_begin();
    fn lode_media_vex_begin();
    fn lode_media_end();
    fn lode_media_fault();
    fn lode_media_vex_fault();
    fn lode_line_nt();
    fn lode_line_cached();
}

/// What the processor has, as far as routines differ by it.
#[derive(Clone, Copy, Debug)]
pub(in crate::media) struct Features {
    avx2: bool,
    avx512: bool,
    /// Carry-less products of 128 bits, and the instruction that reduces what they leave.
    crc32: bool,
    /// Such products of whole vectors.
    wide_fold: bool,
    clflushopt: bool,
    clwb: bool,
    /// The generation of AMD's processors since 2017; 3 for those before, too.
    pub zen: Option<u32>,
}

impl Features {
    pub fn detect() -> Features {
        let avx512 = is_x86_feature_detected!("avx512f");
        let leaf7 = __cpuid_count(7, 0);
        let crc32 = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq");
        Features {
            avx2: is_x86_feature_detected!("avx2"),
            avx512,
            crc32,
            wide_fold: crc32 && is_x86_feature_detected!("vpclmulqdq"),
            clflushopt: leaf7.ebx & 1 << 23 != 0,
            clwb: leaf7.ebx & 1 << 24 != 0,
            zen: zen(avx512),
        }
    }

    /// A processor of 2003: the paths that this machine would not take.
    #[cfg(test)]
    pub fn oldest() -> Features {
        Features {
            avx2: false,
            avx512: false,
            crc32: false,
            wide_fold: false,
            clflushopt: false,
            clwb: false,
            zen: None,
        }
    }

    pub fn has(&self, isa: Isa) -> bool {
        match isa {
            Isa::Portable => false,
            Isa::Sse2 => true,
            Isa::Avx2 => self.avx2,
            Isa::Avx512 => self.avx512 && self.avx2,
        }
    }

    /// Instructions that routines use beyond SSE2, and whether they are there.
    pub fn list(&self) -> Vec<(&'static str, bool)> {
        vec![
            ("avx512", self.avx512),
            ("avx2", self.avx2),
            ("vpclmulqdq", self.wide_fold),
            ("crc32 and pclmulqdq", self.crc32),
            ("clwb", self.clwb),
            ("clflushopt", self.clflushopt),
        ]
    }

    pub fn write_back_name(&self) -> &'static str {
        match (self.clwb, self.clflushopt) {
            (true, _) => "clwb",
            (false, true) => "clflushopt",
            (false, false) => "clflush",
        }
    }

    fn write_back(&self) -> WriteBackFn {
        match (self.clwb, self.clflushopt) {
            (true, _) => lode_clwb,
            (false, true) => lode_clflushopt,
            (false, false) => lode_clflush,
        }
    }

    pub fn crc_name(&self, isa: Isa) -> &'static str {
        match isa {
            Isa::Avx2 | Isa::Avx512 if self.wide_fold => "vpclmulqdq",
            _ if self.crc32 => "pclmulqdq",
            _ => "table",
        }
    }
}

/// The third and the fourth have one family, and AVX-512 apart.
fn zen(avx512: bool) -> Option<u32> {
    let leaf0 = __cpuid_count(0, 0);
    let vendor = [leaf0.ebx, leaf0.edx, leaf0.ecx].map(u32::to_le_bytes);
    let signature = __cpuid_count(1, 0).eax;
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    let is_amd = matches!(vendor.as_flattened(), b"AuthenticAMD" | b"HygonGenuine");
    let generation = match family {
        0x1a.. => 5,
        _ if avx512 => 4,
        _ => 3,
    };
    (is_amd && family >= 0x17).then_some(generation)
}

/// The routines of `isa`, which the processor has.
pub(super) fn routines(isa: Isa, features: &Features) -> Routines {
    let common = sse2(features);
    let wide = features.wide_fold;
    match isa {
        Isa::Portable | Isa::Sse2 => common,
        Isa::Avx2 => Routines {
            copy: lode_copy_avx2,
            copy_lines: lode_copy_lines_avx2,
            copy_lines_crc: if wide { lode_copy_lines_crc_avx2 } else { common.copy_lines_crc },
            two_fence_bytes: if wide { TWO_FENCE_BYTES_BY_256_BITS } else { common.two_fence_bytes },
            zero_lines: lode_zero_lines_avx2,
            crc: if wide { lode_crc_avx2 } else { common.crc },
            read_1_ahead: lode_read_1_ahead_avx2,
            read_1_burst: lode_read_1_burst_avx2,
            read_4: lode_read_4_avx2,
            read_4_ahead: lode_read_4_ahead_avx2,
            read_8: lode_read_8_avx2,
            ..common
        },
        Isa::Avx512 => Routines {
            copy: lode_copy_avx512,
            copy_lines: lode_copy_lines_avx512,
            copy_lines_crc: if wide { lode_copy_lines_crc_avx512 } else { common.copy_lines_crc },
            two_fence_bytes: if wide { TWO_FENCE_BYTES_BY_512_BITS } else { common.two_fence_bytes },
            zero_lines: lode_zero_lines_avx512,
            crc: if wide { lode_crc_avx512 } else { common.crc },
            read_1_ahead: lode_read_1_ahead_avx512,
            read_1_burst: lode_read_1_burst_avx512,
            read_4: lode_read_4_avx512,
            read_4_ahead: lode_read_4_ahead_avx512,
            read_8: lode_read_8_avx512,
            ..common
        },
    }
}

fn sse2(features: &Features) -> Routines {
    let crc32 = features.crc32;
    Routines {
        copy: lode_copy_sse2,
        copy_lines: lode_copy_lines_sse2,
        copy_lines_crc: if crc32 { lode_copy_lines_crc_sse42 } else { copy_lines_crc_by_table },
        two_fence_bytes: if crc32 { TWO_FENCE_BYTES_BY_128_BITS } else { TWO_FENCE_BYTES_BY_TABLE },
        zero_lines: lode_zero_lines_sse2,
        load64: lode_load64,
        store64: lode_store64,
        crc: if crc32 { lode_crc_sse42 } else { crc_by_table },
        read_1: lode_read_1,
        read_1_ahead: lode_read_1_ahead_sse2,
        read_1_burst: lode_read_1_burst_sse2,
        read_4: lode_read_4_sse2,
        read_4_ahead: lode_read_4_ahead_sse2,
        read_8: lode_read_8_sse2,
        write_back: features.write_back(),
        write_backs_overlap: features.clwb || features.clflushopt,
        store_line,
    }
}

/// # Safety
/// As [`LineFn`].
#[inline(always)]
unsafe fn store_line(dst: *mut u8, words: &[u64; 8], cached: bool) -> usize {
    let fault: u64;
    macro_rules! call {
        ($routine:ident) => {
            // SAFETY: the routine stores 64 bytes at `dst`, which the caller vouches for, changes the
            // register named here and no other, and leaves the stack alone.
            unsafe {
                std::arch::asm!(
                    "call {routine}",
                    routine = sym $routine,
                    in("rdi") dst,
                    in("rax") words[0],
                    in("rcx") words[1],
                    inout("rdx") words[2] => fault,
                    in("rsi") words[3],
                    in("r8") words[4],
                    in("r9") words[5],
                    in("r10") words[6],
                    in("r11") words[7],
                )
            }
        };
    }
    if cached {
        call!(lode_line_cached)
    } else {
        call!(lode_line_nt)
    }
    fault as usize
}

/// CRC state over words, eight bytes at a time.
///
/// # Safety
/// The processor has SSE4.2.
#[target_feature(enable = "sse4.2")]
pub(super) unsafe fn crc_words(words: &[u64], state: u32) -> u32 {
    words.iter().fold(state as u64, |state, &word| std::arch::x86_64::_mm_crc32_u64(state, word)) as u32
}

/// For processors without crc32: through a buffer, because only the assembly may touch media.
///
/// # Safety
/// As [`CrcFn`].
unsafe extern "C" fn crc_by_table(mut src: *const u8, len: usize, mut state: u32) -> Outcome {
    let mut buffer = [0; 512];
    let mut left = len;
    while left > 0 {
        let now = left.min(buffer.len());
        // SAFETY: `now` bytes of the caller's range, and as many of the buffer.
        let copied = unsafe { lode_copy_sse2(buffer.as_mut_ptr(), src, now) };
        if copied.fault != 0 {
            return copied;
        }
        state = crc_table::update(state, buffer[..now].iter().copied());
        // SAFETY: still inside, or one past the end of, the caller's range.
        src = unsafe { src.add(now) };
        left -= now;
    }
    Outcome::done(u64::from(state))
}

/// # Safety
/// As [`CopyCrcFn`].
unsafe extern "C" fn copy_lines_crc_by_table(
    dst: *mut u8,
    src: *const u8,
    len: usize,
    state: u32,
) -> Outcome {
    // SAFETY: passed on.
    let copied = unsafe { lode_copy_lines_sse2(dst, src, len) };
    if copied.fault != 0 {
        return copied;
    }
    // SAFETY: passed on.
    unsafe { crc_by_table(src, len, state) }
}

/// Lets the routine that a fault interrupted return `address`; false where it was no routine of ours.
///
/// # Safety
/// `context` is what the kernel passed to a handler of a synchronous signal.
pub(in crate::media) unsafe fn return_fault(context: *mut libc::c_void, address: usize) -> bool {
    // SAFETY: the kernel's argument is a ucontext of the interrupted thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = registers[libc::REG_RIP as usize] as usize;
    let mark = |f: unsafe extern "C" fn()| f as usize;
    if !(mark(lode_media_begin)..mark(lode_media_end)).contains(&at) {
        return false;
    }
    let is_vex = at >= mark(lode_media_vex_begin);
    let resume = if is_vex { mark(lode_media_vex_fault) } else { mark(lode_media_fault) };
    registers[libc::REG_RIP as usize] = resume as libc::greg_t;
    registers[libc::REG_RDX as usize] = address as libc::greg_t;
    true
}

// The bindings have the types that `Routines` names.
const _: (CopyFn, CopyCrcFn, ZeroFn, CrcFn, Load64Fn, Store64Fn, ReadStreamsFn, WriteBackFn) = (
    lode_copy_sse2,
    lode_copy_lines_crc_sse42,
    lode_zero_lines_sse2,
    lode_crc_sse42,
    lode_load64,
    lode_store64,
    lode_read_4_sse2,
    lode_clwb,
);
