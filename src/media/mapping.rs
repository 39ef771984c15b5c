//! A file or device mapped at an address that huge pages can use.
//!
//! The address is aligned to 2 MiB (or to what a device asks) by reserving too much and mapping over
//! the middle. A mapping registers itself with `fault` for as long as it lives.

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::fault::{self, Registration};

/// The huge page that x86 and most others have, in bytes.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sharing {
    /// Stores reach the file.
    Shared,
    /// As `Shared`, and the file's metadata is durable before a store can reach a new block (DAX only).
    SharedSync,
    /// Stores stay in private copies of pages; the file never changes.
    Private,
}

impl Sharing {
    fn flags(self) -> MapFlags {
        match self {
            Sharing::Shared => MapFlags::SHARED,
            Sharing::SharedSync => MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            Sharing::Private => MapFlags::PRIVATE | MapFlags::NORESERVE,
        }
    }
}

/// Whether a file is mapped without a page cache between (`MAP_SYNC` is accepted for no other).
pub(super) fn is_dax(file: BorrowedFd<'_>) -> bool {
    let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
    let page = rustix::param::page_size();
    // SAFETY: a new mapping at an address that the kernel chooses, never accessed.
    let Ok(probe) = (unsafe { mmap(null_mut(), page, ProtFlags::READ, flags, file, 0) }) else {
        return false;
    };
    // SAFETY: nobody uses the probe.
    let _ = unsafe { munmap(probe, page) };
    true
}

/// The NUMA node that holds the page of an address; none where the kernel does not say.
pub(super) fn node_of(at: *const u8) -> Option<u32> {
    const MPOL_F_NODE: usize = 1 << 0;
    const MPOL_F_ADDR: usize = 1 << 1;
    let (mut node, no_mask): (libc::c_int, *mut libc::c_ulong) = (-1, null_mut());
    let flags = MPOL_F_NODE | MPOL_F_ADDR;
    // SAFETY: the kernel stores one integer, and reads nothing: the mask is absent, the address is looked up.
    let failed = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut node, no_mask, 0usize, at, flags) };
    if failed == 0 { u32::try_from(node).ok() } else { None }
}

#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    _registration: Registration,
}

// SAFETY: a mapping is an address range; who may touch its bytes is its users' business, and they go
// through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of a file at this address. EEXIST where something is mapped there.
    pub fn at(file: BorrowedFd<'_>, bytes: usize, address: usize, sharing: Sharing) -> Result<Mapping> {
        let flags = sharing.flags() | MapFlags::FIXED_NOREPLACE;
        let wanted = std::ptr::without_provenance_mut(address);
        // SAFETY: the kernel maps nothing over what is there.
        let start = unsafe { mmap(wanted, bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0)? };
        if start != wanted {
            // A kernel before 4.17 takes the address for a hint.
            // SAFETY: nobody uses the mapping yet.
            let _ = unsafe { munmap(start, bytes) };
            return Err(Errno::EXIST);
        }
        Mapping::registered(start, bytes)
    }

    /// Maps `bytes` of a file from `offset` on: whole huge pages where the file has no others. `align` is a power of two.
    pub fn new(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        align: usize,
        sharing: Sharing,
    ) -> Result<Mapping> {
        debug_assert!(align.is_power_of_two());
        let flags = sharing.flags();
        let reserved_bytes = bytes.checked_add(align).ok_or(Errno::NOMEM)?;
        // SAFETY: a new range of addresses, chosen by the kernel.
        let reserved = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(null_mut(), reserved_bytes, ProtFlags::empty(), flags)?
        };
        let head = reserved.addr().wrapping_neg() & (align - 1);
        let start = reserved.wrapping_byte_add(head);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: MAP_FIXED replaces only what was reserved above.
        if let Err(e) = unsafe { mmap(start, bytes, prot, flags | MapFlags::FIXED, file, offset) } {
            // SAFETY: nobody uses the reservation.
            let _ = unsafe { munmap(reserved, reserved_bytes) };
            return Err(e);
        }
        Self::trim(reserved.addr(), start.addr(), bytes, reserved_bytes);
        Mapping::registered(start, bytes)
    }

    /// Takes a mapping over; it ends here where it cannot be registered.
    fn registered(start: *mut std::ffi::c_void, bytes: usize) -> Result<Mapping> {
        let base = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        let Some(registration) = fault::register(base.as_ptr().addr(), bytes) else {
            // SAFETY: nobody uses the mapping yet.
            let _ = unsafe { munmap(start, bytes) };
            return Err(Errno::MFILE);
        };
        let mapping = Mapping { base, bytes, _registration: registration };
        // Both are hints: where the kernel cannot follow, pages are small and dumps are large.
        let _ = mapping.advise(Advice::LinuxHugepage);
        let _ = mapping.advise(Advice::LinuxDontDump);
        Ok(mapping)
    }

    /// Gives the ends of a reservation back.
    fn trim(reserved: usize, start: usize, bytes: usize, reserved_bytes: usize) {
        let page = rustix::param::page_size();
        let end = start + bytes.next_multiple_of(page);
        for (from, to) in [(reserved, start), (end, reserved + reserved_bytes)] {
            if to > from {
                // SAFETY: these pages belong to the reservation, and the file is not mapped over them.
                let _ = unsafe { munmap(std::ptr::without_provenance_mut(from), to - from) };
            }
        }
    }

    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The NUMA node that holds its first page; none where the kernel does not say.
    pub fn node(&self) -> Option<u32> {
        node_of(self.base.as_ptr())
    }

    /// Takes every page now instead of at first use.
    pub fn prefault(&self, sharing: Sharing) -> Result<()> {
        self.advise(match sharing {
            Sharing::Private => Advice::LinuxPopulateRead,
            Sharing::Shared | Sharing::SharedSync => Advice::LinuxPopulateWrite,
        })
    }

    /// Maps pages anew at the next access; of a private mapping what was stored is lost.
    pub fn unmap_pages(&self) -> Result<()> {
        self.advise(Advice::LinuxDontNeed)
    }

    fn advise(&self, advice: Advice) -> Result<()> {
        // SAFETY: the range is this mapping; none of the advice used changes what the bytes of a shared one hold.
        unsafe { madvise(self.base.as_ptr().cast(), self.bytes, advice) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the pool that owned the mapping is gone, and no pointer into it outlives a call.
        // The registration ends after the mapping: a slot too many is harmless, one too few is not.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
