//! Copies between any two addresses, either of which may be media: as a device copies that follows descriptors.

use super::Domain;
use super::copy::{Copier, ReadTable, Routines};

/// See the file's head. Faults of media are answers, as everywhere; those of other memory are not caught.
pub struct ByAddress {
    copier: Copier,
}

impl Default for ByAddress {
    fn default() -> ByAddress {
        ByAddress { copier: Copier::new(Routines::default_choice(), Domain::Memory, ReadTable::default()) }
    }
}

impl ByAddress {
    /// Stores past the caches, which [`fence`](ByAddress::fence) completes; or the address of a fault.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped for so many bytes, and do not overlap; nobody changes the source or uses the target
    /// meanwhile.
    pub unsafe fn non_temporal(&self, to: *mut u8, from: *const u8, len: usize) -> Result<(), usize> {
        // SAFETY: the caller vouches for both.
        unsafe { self.copier.copy_nt(to, std::slice::from_raw_parts(from, len)) }
    }

    /// Stores into the caches; or the address of a fault.
    ///
    /// # Safety
    ///
    /// As for [`non_temporal`](ByAddress::non_temporal).
    pub unsafe fn cached(&self, to: *mut u8, from: *const u8, len: usize) -> Result<(), usize> {
        // SAFETY: the caller vouches for both.
        unsafe { self.copier.copy_cached(to, std::slice::from_raw_parts(from, len)) }
    }

    /// The CRC-32C of these bytes, continued; or the address of a fault.
    ///
    /// # Safety
    ///
    /// The range is mapped, and nobody changes it meanwhile.
    pub unsafe fn crc32c(&self, from: *const u8, len: usize, crc: u32) -> Result<u32, usize> {
        // SAFETY: the caller vouches for it.
        unsafe { self.copier.crc32c(from, len, crc) }
    }

    pub fn fence(&self) {
        self.copier.fence();
    }
}
