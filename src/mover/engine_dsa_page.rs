//! The page through which a process hands descriptors to a work queue, and the two instructions that store to it: 64
//! bytes at once, which a device takes as one descriptor.
//!
//! MOVDIR64B is for dedicated queues: it never learns whether the queue had room. ENQCMD is for shared ones: the device
//! answers, and the processor adds the process's PASID. Any address of the page is the queue's; taking turns keeps stores
//! to one from waiting for each other.
//!
//! The page is the only thing here that is touched. Of the addresses within a descriptor nothing is known here: who
//! submits vouches for them.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::dsa::Descriptor;

/// What the kernel maps of a queue, in bytes.
const PAGE_BYTES: usize = 4096;
/// Descriptors that fit there side by side.
const PLACES: usize = PAGE_BYTES / size_of::<Descriptor>();
/// Times that a shared queue is asked again at once: as often as the kernel's own driver asks.
const ENQUEUE_TRIES_MAX: u32 = 16;

/// How descriptors are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    Movdir64b,
    Enqcmd,
}

impl Instruction {
    /// The one for a queue, or its name where this processor lacks it.
    pub(super) fn of_queue(shared: bool) -> Result<Instruction, &'static str> {
        let (movdir64b, enqcmd) = known();
        match shared {
            false if movdir64b => Ok(Instruction::Movdir64b),
            false => Err("MOVDIR64B"),
            true if enqcmd => Ok(Instruction::Enqcmd),
            true => Err("ENQCMD"),
        }
    }
}

/// Bits 28 and 29 of ECX, leaf 7: MOVDIR64B, ENQCMD.
#[cfg(all(not(miri), target_arch = "x86_64"))]
fn known() -> (bool, bool) {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    if __cpuid(0).eax < 7 {
        return (false, false);
    }
    let ecx = __cpuid_count(7, 0).ecx;
    (ecx >> 28 & 1 == 1, ecx >> 29 & 1 == 1)
}

#[cfg(any(miri, not(target_arch = "x86_64")))]
fn known() -> (bool, bool) {
    (false, false)
}

pub(super) struct Page {
    base: NonNull<u8>,
    turn: AtomicUsize,
    instruction: Instruction,
}

// SAFETY: the page is stored to only, by instructions that many threads may execute at once.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    pub(super) fn map(file: BorrowedFd<'_>, instruction: Instruction) -> rustix::io::Result<Page> {
        // SAFETY: a mapping at an address that the kernel chooses, which nobody else has.
        let base = unsafe {
            let flags = MapFlags::SHARED | MapFlags::POPULATE;
            mmap(std::ptr::null_mut(), PAGE_BYTES, ProtFlags::WRITE, flags, file, 0)?
        };
        let base = NonNull::new(base.cast()).expect("nothing is mapped at 0");
        Ok(Page { base, turn: AtomicUsize::new(0), instruction })
    }

    /// Stores descriptors; how many the queue has taken: of a dedicated one nobody knows, so they count as taken.
    ///
    /// # Safety
    ///
    /// As for [`Portal::submit`](super::engine_dsa::Portal::submit); a dedicated queue has room for them.
    pub(super) unsafe fn submit(&self, descriptors: &[Descriptor]) -> usize {
        // What the descriptors name has to be there before them: these stores wait for no others.
        store_fence();
        let taken = |descriptor: &&Descriptor| {
            let place = self.turn.fetch_add(1, Ordering::Relaxed) % PLACES;
            let to = self.base.as_ptr().wrapping_add(place * size_of::<Descriptor>());
            match self.instruction {
                Instruction::Movdir64b => {
                    // SAFETY: 64 aligned bytes of the page; the processor has the instruction, or there were no `self`.
                    unsafe { movdir64b(to, descriptor) };
                    true
                }
                // SAFETY: likewise.
                Instruction::Enqcmd => (0..ENQUEUE_TRIES_MAX).any(|_| unsafe { enqcmd(to, descriptor) }),
            }
        };
        descriptors.iter().take_while(taken).count()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody else has the address.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), PAGE_BYTES) };
    }
}

#[cfg(all(not(miri), target_arch = "x86_64"))]
fn store_fence() {
    // SAFETY: SSE is part of every 64-bit x86.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// # Safety
///
/// The processor has the instruction; 64 bytes at `to` are mapped for stores and aligned.
#[cfg(all(not(miri), target_arch = "x86_64"))]
unsafe fn movdir64b(to: *mut u8, descriptor: &Descriptor) {
    // SAFETY: the caller's.
    unsafe {
        std::arch::asm!("movdir64b {to}, [{from}]", to = in(reg) to, from = in(reg) descriptor,
            options(nostack, preserves_flags));
    }
}

/// Whether the queue had room.
///
/// # Safety
///
/// As for [`movdir64b`].
#[cfg(all(not(miri), target_arch = "x86_64"))]
unsafe fn enqcmd(to: *mut u8, descriptor: &Descriptor) -> bool {
    let full: u8;
    // SAFETY: the caller's.
    unsafe {
        std::arch::asm!("enqcmd {to}, [{from}]", "setz {full}", to = in(reg) to, from = in(reg) descriptor,
            full = out(reg_byte) full, options(nostack));
    }
    full == 0
}

#[cfg(any(miri, not(target_arch = "x86_64")))]
fn store_fence() {}

/// # Safety
///
/// None: it is never called, for no processor here has the instruction.
#[cfg(any(miri, not(target_arch = "x86_64")))]
unsafe fn movdir64b(_: *mut u8, _: &Descriptor) {
    unreachable!("this processor has no such instruction")
}

/// # Safety
///
/// As for [`movdir64b`].
#[cfg(any(miri, not(target_arch = "x86_64")))]
unsafe fn enqcmd(_: *mut u8, _: &Descriptor) -> bool {
    unreachable!("this processor has no such instruction")
}
