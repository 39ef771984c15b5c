//! The mapped memory of a pool and the primitives that make stores durable.
//!
//! This is the only room that stores to media. It imports no other room. Everything above is generic
//! over [`Media`], so that the crash simulator can stand below the production code.
//!
//! **Persistence is a type.** A store yields [`Dirty`] (in a CPU cache) or, when it was non-temporal,
//! [`Flushed`] (on its way, no order yet). [`Media::flush`] turns `Dirty` into `Flushed`,
//! [`Media::fence`] turns `Flushed` into [`Durable`]. What acknowledges an operation takes `Durable`,
//! so that a forgotten fence does not compile.
//!
//! Files: `token` the three states, `domain` what makes a store durable here, `region` one file or
//! device locked and mapped, `label` block 0 of a region, `pool` one or many regions as one address
//! space, `open` how a pool comes to be, `span` memory without labels, for those who have a format of their own,
//! `tract` memory that processes divide among themselves,
//! `unsynced` what the kernel has still to write, `mapping` an address range, `overlay` stores that stay private, `describe` what a pool says of itself, `copy` the
//! routines, `fault` SIGBUS turned into an error.

mod by_address;
mod copy;
mod describe;
mod domain;
mod fault;
mod holder;
mod label;
mod mapping;
pub mod mounts;
pub(crate) mod ofd;
mod open;
mod overlay;
mod pool;
mod region;
mod span;
mod token;
#[cfg(feature = "memory-type")]
mod tract;
mod unsynced;

use std::ops::Range;

pub(crate) use by_address::ByAddress;
pub use copy::{Isa, ReadStep, ReadTable, Streams, Words, crc32c, crc32c_join, crc32c_words, prefetch};
pub use describe::{Description, Pages, RegionDescription};
pub use domain::Domain;
pub use open::holds_pool;
pub use overlay::Overlay;
pub use pool::{Pool, PoolOptions};
pub use region::{FileIdentity, RegionKind, device_align, is_out_of_room};
pub use span::{Part, Span, SpanOptions};
pub use token::{Dirty, Durable, Flushed};
#[cfg(feature = "memory-type")]
pub(crate) use tract::{TRACT_LABEL_BYTES, Tract};
pub use unsynced::{Unsynced, unsynced};

/// A byte address in the pool: 0 is the first byte of the first region.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Addr(pub u64);

impl Addr {
    #[inline]
    pub const fn add(self, bytes: u64) -> Addr {
        Addr(self.0 + bytes)
    }
}

/// The unit of caches, flushes and log records, in bytes.
pub const LINE: usize = 64;

/// A load or store hit bad media (poison, a truncated file, a full tmpfs): the call fails with EIO,
/// the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where, as exactly as the hardware said.
    pub at: Addr,
}

/// Byte-addressable memory that keeps data. All loads and stores of the file system go through here.
///
/// No reference into the memory ever leaves: another process or a device may write it. Ranges must
/// lie inside [`len`](Media::len); an implementation panics otherwise, because the caller validates
/// every address it read from media before it uses it.
pub trait Media: Send + Sync + 'static {
    /// Somebody watches which bytes are read and which are verified: nothing is read ahead but what is
    /// [`certain`](Media::certain), and [`verified`](Media::verified) is told.
    const OBSERVED: bool = false;

    /// Bytes in the pool.
    fn len(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn domain(&self) -> Domain;

    /// Nothing may be stored: what is stored anyhow stays in a private copy, or faults.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Where somebody watches what is read, how many of these bytes, from the first on, tell nothing.
    fn certain(&self, _at: Addr, len: usize) -> usize {
        len
    }

    /// Regions: each is memory of its own, whose bandwidth the copies there share.
    fn regions(&self) -> usize {
        1
    }

    /// The region of an address, and how many bytes follow there in one piece.
    fn region(&self, at: Addr) -> (usize, u64) {
        (0, self.len() - at.0)
    }

    /// The file with holes that has no room for this address on its disk: there a store fails until there is room.
    fn out_of_room(&self, _at: Addr) -> Option<std::path::PathBuf> {
        None
    }

    /// The NUMA node of a region, where the host says.
    fn node(&self, _region: usize) -> Option<u32> {
        None
    }

    /// Where a range of one region is mapped in one piece, for devices that follow addresses; none where it is not.
    fn mapped(&self, _at: Addr, _len: usize) -> Option<*mut u8> {
        None
    }

    /// The file or device that has a range in one piece, and where there.
    fn in_file(&self, _at: Addr, _len: u64) -> Option<(std::path::PathBuf, u64)> {
        None
    }

    /// Whether somebody uses a range of [`in_file`](Media::in_file) past this.
    fn is_used(&self, _at: Addr, _len: u64) -> bool {
        false
    }

    /// The next bytes from `at` on that somebody may have stored to, as far as they lie in one piece; none where none follow.
    /// What lies between reads as zeros, but through a mapping that may cost the host memory, and time in any case: who
    /// looks through all of a pool goes by this.
    fn stored(&self, at: Addr) -> Option<Range<u64>> {
        (at.0 < self.len()).then(|| at.0..self.len())
    }

    /// Where all of a region is mapped and how many bytes it has, for devices that are told of memory beforehand; none where
    /// it is not, or where stores there would not reach the region.
    fn mapping(&self, _region: usize) -> Option<(*mut u8, usize)> {
        None
    }

    /// Copies media to DRAM (`copy_out`: several page-spaced streams for large sizes).
    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault>;

    /// One aligned 8-byte load.
    fn load64(&self, at: Addr) -> Result<u64, Fault>;

    /// CRC-32C (Castagnoli) of a range, continuing from `crc` (0 to begin; the usual conditioning, so
    /// that `crc32c(b, crc32c(a, 0)) == crc32c(ab, 0)`).
    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault>;

    /// These bytes, read just now, were held against a checksum that covers them all, and this came out:
    /// `matches`. Somebody who watches notes it, and may lie, to see whether that is noticed.
    #[inline]
    #[track_caller]
    fn verified(&self, _parts: &[(Addr, usize)], matches: bool) -> bool {
        matches
    }

    /// Whether the named step is left out, to see whether that is noticed.
    #[inline]
    fn omits(&self, _step: &'static str) -> bool {
        false
    }

    /// Whether removals find no room for their records, as on a pool that is full to the last line: for who watches what
    /// becomes of them then.
    #[inline]
    fn refuses_removals(&self) -> bool {
        false
    }

    /// One aligned 8-byte store: atomic, cached.
    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault>;

    /// Says that this range will be stored through the cache soon: its lines are fetched while something
    /// else is waited for. A hint.
    #[inline]
    fn expect_store(&self, _at: Addr, _len: usize) {}

    /// Says that this range is read soon. A hint.
    fn expect_read(&self, _at: Addr, _len: usize) {}

    /// Says that the page at this address will be overwritten past the caches soon: its translation is looked up while something
    /// else is waited for. A hint.
    #[inline]
    fn expect_copy(&self, _page: Addr) {}

    /// Cached copy to media.
    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault>;

    /// Non-temporal copy to media. Unaligned edges are stored cached and flushed inside.
    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault>;

    /// [`copy_nt`](Media::copy_nt) that computes the CRC-32C of the bytes on the way, continuing from
    /// `crc`.
    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault>;

    /// From this size on a second fence costs less than what [`copy_nt_crc`](Media::copy_nt_crc) takes longer than
    /// [`copy_nt`](Media::copy_nt), in bytes.
    fn two_fence_bytes(&self) -> usize;

    /// Non-temporal store of whole lines at a line's address, from registers: bytes that are stored and read
    /// back in another width wait until all stores before them are done, which right behind a bulk copy
    /// takes as long as the copy. For a few lines.
    #[inline]
    fn store_lines(&self, at: Addr, lines: &[Words]) -> Result<Flushed, Fault> {
        self.copy_nt(at, &copy::line_bytes(lines))
    }

    /// Non-temporal zeros.
    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault>;

    /// Writes the cache lines of a store back (nothing to do in domain `cpu-cache`). A page that went bad since then is not
    /// reported: the next load or store there is.
    #[track_caller]
    fn flush(&self, dirty: Dirty) -> Flushed;

    /// Writes back a range that earlier stores may have left dirty: for stores whose token was given up
    /// as redundant. All but what is on pages that went bad meanwhile, the first of which is the error.
    #[track_caller]
    fn write_back(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        Ok(self.flush(Dirty::stored(at, len)))
    }

    /// Orders and completes all flushed stores of this thread.
    #[track_caller]
    fn fence(&self, flushed: Flushed) -> Durable;

    /// Makes everything stored so far survive power loss where the domain is `page-cache`
    /// (`fdatasync` of every region); elsewhere returns at once.
    #[track_caller]
    fn sync(&self) -> std::io::Result<()>;

    /// Forgets what is cached of the media and was written back, or could not be: the next loads show what is there. Nothing
    /// else uses the media. Only where the domain is `page-cache`, and as far as the kernel does it.
    fn drop_cached(&self) {}

    /// Makes durable what others stored to these ranges through mappings of their own: whatever of them is in a cache, the
    /// processor's or the kernel's, is written back.
    #[track_caller]
    fn persist(&self, ranges: &[(Addr, usize)]) -> std::io::Result<Durable> {
        let mut flushed = Ok(Flushed::issued());
        for &(at, len) in ranges {
            let more = self.write_back(at, len);
            flushed = flushed.and_then(|flushed| Ok(flushed.and(more?)));
        }
        let durable = self.fence(flushed.map_err(bad_media)?);
        self.sync()?;
        Ok(durable)
    }
}

/// A fault where others' errors are the kernel's.
fn bad_media(fault: Fault) -> std::io::Error {
    std::io::Error::other(crate::error::Error::from(fault))
}
