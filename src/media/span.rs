//! Memory without a label: a file or device as it is, or a range that somebody has mapped already. For storage engines
//! that have a format of their own and want the copies alone (see `mover::copies`).
//!
//! A span is one region with everything that a pool's region has: the persistence domain detected, the lock against
//! other users, faults as errors. It writes nothing of its own, so that its first byte is the user's.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MsyncFlags, msync};

use super::copy::{Copier, Isa, ReadTable, Routines};
use super::fault::{self, Registration};
use super::mapping::node_of;
use super::open::{begins_pool, choose_domain, read_beginning};
use super::region::{OpenRegion, Region};
use super::{Addr, Dirty, Domain, Durable, Fault, Flushed, Media, RegionKind, bad_media};
use crate::error::{Error, Result};
use crate::quote::Shown;
use crate::sync::together::together;

const OPEN: &str = "media::span::open";
const MAPPED: &str = "media::span::mapped";
/// So many bytes to write back are worth a thread.
const THREAD_BYTES_MIN: usize = 16 << 20;
/// What a thread takes at a time, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// How to open a span.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpanOptions {
    /// The persistence domain to work by, instead of the one detected: see [`PoolOptions::assume`].
    ///
    /// [`PoolOptions::assume`]: super::PoolOptions::assume
    pub assume: Option<Domain>,
    /// Nothing is stored.
    pub read_only: bool,
    /// Take every page now instead of at first use.
    pub prefault: bool,
    /// The file is made where there is none, and is so long at least, in bytes, which the host reserves now; a device
    /// has to be. None: what is there, as long as it is.
    pub size: Option<u64>,
    /// Also where a pool is.
    pub force: bool,
}

/// Where a part of a file or device begins and how long it is, in bytes: whole pages, of device-dax whole pages of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub offset: u64,
    pub bytes: u64,
}

/// See the file's head.
pub struct Span {
    base: *mut u8,
    bytes: u64,
    copier: Copier,
    domain: Domain,
    read_only: bool,
    held: Held,
}

/// What keeps the addresses valid and their faults caught.
enum Held {
    Region(Box<Region>),
    /// Of a caller, who keeps it mapped. Its pages, for the kernel wants whole ones.
    Range {
        start: usize,
        bytes: usize,
        _registration: Registration,
    },
}

// SAFETY: `base` points to what `held` keeps mapped, or the caller of `mapped` does; all access is by routines that
// tolerate concurrent change.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// Opens and locks the file or device at `path`: a regular file, a file on a DAX mount, a block device, device-dax.
    /// A file that is made is there after a power failure, too.
    ///
    /// EBUSY where another process or span has it, EEXIST where it holds a pool, and whatever the host answers.
    pub fn open(path: &Path, options: &SpanOptions) -> Result<Span> {
        Span::open_at(path, options, |begin| begin.map(|_| Vec::new()))
    }

    /// As [`open`](Span::open), mapped at the first of the addresses that `places` answers where nothing is mapped;
    /// anywhere where it answers none. It sees the file before anything of it changes: the first
    /// 128 KiB, zeros where there is less; or why they cannot be read. EADDRINUSE where all are taken.
    pub fn open_at(
        path: &Path,
        options: &SpanOptions,
        places: impl FnOnce(Result<Vec<u8>>) -> Result<Vec<u64>>,
    ) -> Result<Span> {
        let mut span = Span::make_at(path, options, places)?;
        span.keep();
        Ok(span)
    }

    /// As [`open_at`](Span::open_at), for who makes something there: until it is [kept](Span::keep), what this did to the
    /// host is undone when the span is dropped, before anybody else can have the file: one that it made is removed, one
    /// that it made longer is cut back.
    pub fn make_at(
        path: &Path,
        options: &SpanOptions,
        places: impl FnOnce(Result<Vec<u8>>) -> Result<Vec<u64>>,
    ) -> Result<Span> {
        let size = options.size.filter(|_| !options.read_only);
        let (mut region, made) = match size.map(|_| OpenRegion::create(path)) {
            Some(Ok(region)) => (region, true),
            Some(Err(e)) if e.errno() != libc::EEXIST => return Err(e),
            _ => (OpenRegion::open(path, options.read_only)?, false),
        };
        let seen = read_beginning(&region);
        let judges = !made && !options.read_only && !options.force;
        if judges && seen.as_ref().is_ok_and(|begin| begins_pool(begin)) {
            let message = format!(
                "{} holds a pool: use another file, open it read-only, or force it to destroy the pool",
                region.path.shown()
            );
            return Err(Error::message(libc::EEXIST, OPEN, message));
        }
        let places = places(seen)?;
        if let Some(size) = size {
            region.reserve(size)?;
        }
        Span::of_region(region, options, &places)
    }

    /// What [`make_at`](Span::make_at) made stays.
    pub fn keep(&mut self) {
        if let Held::Region(region) = &mut self.held {
            region.keep();
        }
    }

    /// A part of the file or device at `path`, which is its user's own: whoever has the whole, or other parts, uses the rest
    /// alone. A pool gives such parts away (`Fs::fix`).
    ///
    /// EBUSY where another process or span has that part, EINVAL where it is no part of the file.
    pub fn open_part(path: &Path, part: Part, options: &SpanOptions) -> Result<Span> {
        let options = SpanOptions { size: None, ..*options };
        let end = part.offset.checked_add(part.bytes);
        let range = part.offset..end.ok_or_else(|| Error::new(libc::EINVAL, OPEN))?;
        Span::of_region(OpenRegion::open_part(path, range, options.read_only)?, &options, &[])
    }

    /// Keeps others from opening a part to store to it, as long as the file is open anywhere: in this process, or in one that it
    /// is handed to. EBUSY where somebody has opened it so.
    pub fn hold_part(path: &Path, part: Part) -> Result<OwnedFd> {
        let end = part.offset.checked_add(part.bytes);
        let range = part.offset..end.ok_or_else(|| Error::new(libc::EINVAL, OPEN))?;
        OpenRegion::open_part(path, range, true).map(OpenRegion::into_file)
    }

    /// Says that somebody uses a part, as long as the file is open anywhere; he who opens it meanwhile is not kept off.
    pub fn use_part(path: &Path, part: Part) -> Result<OwnedFd> {
        OpenRegion::use_part(path, part.offset..part.offset.saturating_add(part.bytes))
    }

    /// Whether somebody says that of any of a part.
    pub fn is_part_used(path: &Path, part: Part) -> Result<bool> {
        OpenRegion::is_part_used(path, part.offset..part.offset.saturating_add(part.bytes))
    }

    /// Anonymous memory of so many bytes; pages are taken at first use.
    pub fn memfd(bytes: u64, options: &SpanOptions) -> Result<Span> {
        let options = SpanOptions { size: None, ..*options };
        Span::of_region(OpenRegion::memfd(bytes)?, &options, &[])
    }

    fn of_region(region: OpenRegion, options: &SpanOptions, places: &[u64]) -> Result<Span> {
        if region.bytes == 0 {
            let message = format!("{} is empty: give a size", region.path.shown());
            return Err(Error::message(libc::EINVAL, OPEN, message));
        }
        let bytes = region.bytes;
        let region = match places {
            [] => region.map(bytes, options.prefault)?,
            places => region.map_at(bytes, options.prefault, places)?,
        };
        let (isa, routines) = Routines::choose(None)?;
        let domain = choose_domain(std::slice::from_ref(&region), options.assume, isa)?;
        if options.size.is_some() {
            region.settle()?;
        }
        Ok(Span {
            base: region.map.base(),
            bytes,
            copier: Copier::new(routines, domain, ReadTable::default()),
            domain,
            read_only: options.read_only,
            held: Held::Region(Box::new(region)),
        })
    }

    /// Memory that the caller has mapped, and what makes stores to it durable: nobody asks the kernel. In
    /// [`Domain::PageCache`] that is `msync`.
    ///
    /// EINVAL for no bytes, EMFILE where too many regions are mapped.
    ///
    /// # Safety
    ///
    /// Until the span is dropped: the range is mapped, for reading and unless `read_only` for writing; and nobody has
    /// references to its bytes (raw pointers, and atomics, may be used as races permit).
    pub unsafe fn mapped(start: *mut u8, bytes: usize, domain: Domain, read_only: bool) -> Result<Span> {
        let refused = |errno, message: &str| Err(Error::message(errno, MAPPED, message));
        if start.is_null() || bytes == 0 || bytes > isize::MAX as usize {
            return refused(libc::EINVAL, "a range that is mapped has an address and a length");
        }
        let (isa, routines) = Routines::choose(None)?;
        if domain.is_persistent_memory() && isa == Isa::Portable {
            let message = "there are no instructions known here that write caches back on this processor";
            return refused(libc::EOPNOTSUPP, message);
        }
        // The kernel may name a fault by its page.
        let page = rustix::param::page_size();
        let first = start.addr() & !(page - 1);
        let pages = start.addr() + bytes - first;
        let Some(registration) = fault::register(first, pages.next_multiple_of(page)) else {
            return refused(libc::EMFILE, "this process has too many regions mapped: close some");
        };
        Ok(Span {
            base: start,
            bytes: bytes as u64,
            copier: Copier::new(routines, domain, ReadTable::default()),
            domain,
            read_only,
            held: Held::Range { start: first, bytes: pages, _registration: registration },
        })
    }

    pub(super) fn region(&self) -> Option<&Region> {
        match &self.held {
            Held::Region(region) => Some(region),
            Held::Range { .. } => None,
        }
    }

    /// What it is, for people.
    pub fn name(&self) -> String {
        match &self.held {
            Held::Region(region) => region.path.shown().to_string(),
            Held::Range { .. } => format!("the memory mapped at {:#x}", self.base.addr()),
        }
    }

    /// What it lies in; none of a range that was mapped already.
    pub fn kind(&self) -> Option<RegionKind> {
        self.region().map(|region| region.kind)
    }

    /// The domain that the kernel tells; none of a range that was mapped already.
    pub fn detected(&self) -> Option<Domain> {
        match &self.held {
            Held::Region(region) => Some(region.detected),
            Held::Range { .. } => None,
        }
    }

    /// Where a range is mapped. Panics for one outside.
    #[inline]
    fn at(&self, at: Addr, len: usize) -> *mut u8 {
        let end = at.0.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "{len} bytes at {at:?} are outside of the span");
        // SAFETY: checked to be inside of what is mapped.
        unsafe { self.base.add(at.0 as usize) }
    }

    /// Each thread fences what it wrote back. The error is one of the faults.
    fn write_back_by_several(&self, ranges: &[(Addr, usize)]) -> Result<(), Fault> {
        let pieces = ranges.iter().flat_map(|&(at, len)| {
            (0..len).step_by(PIECE_BYTES).map(move |done| (at.add(done as u64), PIECE_BYTES.min(len - done)))
        });
        let pieces: Vec<(Addr, usize)> = pieces.collect();
        let (next, bad) = (AtomicUsize::new(0), OnceLock::new());
        let work = || {
            while let Some(&(at, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                match self.write_back(at, len) {
                    Ok(flushed) => flushed.stood_for(),
                    Err(fault) => _ = bad.set(fault),
                }
            }
            self.fence(Flushed::issued());
        };
        let bytes: usize = ranges.iter().map(|(_, len)| len).sum();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        together(processors.min(bytes / THREAD_BYTES_MIN), work);
        bad.into_inner().map_or(Ok(()), Err)
    }

    /// All of the file, or the part of it that this is: what others have in the same file is not waited for.
    fn sync_region(&self, region: &Region) -> std::io::Result<()> {
        match region.is_part {
            false => region.sync(),
            // SAFETY: msync touches no byte: it writes pages back that the region keeps mapped.
            true => unsafe {
                msync(self.base.cast(), self.bytes as usize, MsyncFlags::SYNC).map_err(Into::into)
            },
        }
    }

    #[cold]
    fn fault(&self, address: usize) -> Fault {
        Fault { at: Addr(address.saturating_sub(self.base.addr()) as u64) }
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Span");
        f.field("name", &self.name())
            .field("bytes", &self.bytes)
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}

impl Media for Span {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn domain(&self) -> Domain {
        self.domain
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn node(&self, _region: usize) -> Option<u32> {
        node_of(self.base)
    }

    fn mapped(&self, at: Addr, len: usize) -> Option<*mut u8> {
        Some(self.at(at, len))
    }

    fn mapping(&self, _region: usize) -> Option<(*mut u8, usize)> {
        // Whole pages: the kernel maps no less, and devices are told of no less.
        let page = rustix::param::page_size();
        let before = self.base.addr() % page;
        let bytes = (before + self.bytes as usize).next_multiple_of(page);
        (!self.read_only).then_some((self.base.wrapping_sub(before), bytes))
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        let media = self.at(at, dst.len());
        // SAFETY: `at` answers with mapped media as long as the range.
        unsafe { self.copier.read(dst, media) }.map_err(|address| self.fault(address))
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        let media = self.at(at, 8).cast::<u64>();
        assert!(media.is_aligned(), "the word at {at:?} is not aligned");
        // SAFETY: an aligned word of mapped media.
        unsafe { self.copier.load64(media) }.map_err(|address| self.fault(address))
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        let media = self.at(at, len);
        // SAFETY: `at` answers with mapped media as long as the range.
        unsafe { self.copier.crc32c(media, len, crc) }.map_err(|address| self.fault(address))
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        let media = self.at(at, 8).cast::<u64>();
        assert!(media.is_aligned(), "the word at {at:?} is not aligned");
        // SAFETY: an aligned word of mapped media.
        unsafe { self.copier.store64(media, value) }.map_err(|address| self.fault(address))?;
        Ok(Dirty::stored(at, 8))
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        let media = self.at(at, src.len());
        // SAFETY: `at` answers with mapped media as long as the range.
        unsafe { self.copier.copy_cached(media, src) }.map_err(|address| self.fault(address))?;
        Ok(Dirty::stored(at, src.len()))
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        let media = self.at(at, src.len());
        // SAFETY: `at` answers with mapped media as long as the range.
        unsafe { self.copier.copy_nt(media, src) }.map_err(|address| self.fault(address))?;
        Ok(Flushed::issued())
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        let media = self.at(at, src.len());
        // SAFETY: `at` answers with mapped media as long as the range.
        let copied = unsafe { self.copier.copy_nt_crc(media, src, crc) };
        Ok((copied.map_err(|address| self.fault(address))?, Flushed::issued()))
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        let media = self.at(at, len);
        // SAFETY: `at` answers with mapped media as long as the range.
        unsafe { self.copier.zero_nt(media, len) }.map_err(|address| self.fault(address))?;
        Ok(Flushed::issued())
    }

    fn flush(&self, dirty: Dirty) -> Flushed {
        self.write_back(dirty.at(), dirty.len()).unwrap_or_else(|_| Flushed::issued())
    }

    fn write_back(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        if self.copier.writes_back() && len > 0 {
            let media = self.at(at, len);
            // SAFETY: `at` answers with mapped media as long as the range, which is not empty.
            unsafe { self.copier.write_back(media, len) }.map_err(|address| self.fault(address))?;
        }
        Ok(Flushed::issued())
    }

    fn two_fence_bytes(&self) -> usize {
        self.copier.two_fence_bytes()
    }

    fn fence(&self, _flushed: Flushed) -> Durable {
        self.copier.fence();
        Durable::fenced()
    }

    /// Of a file on a DAX mount the kernel knows which pages were stored to through a mapping without `MAP_SYNC`, and
    /// writes back no others. Elsewhere every line of the ranges is written back, by several threads where there are many.
    fn persist(&self, ranges: &[(Addr, usize)]) -> std::io::Result<Durable> {
        match &self.held {
            Held::Region(region) if region.kind == RegionKind::DaxFile => self.sync_region(region)?,
            _ if self.copier.writes_back() => self.write_back_by_several(ranges).map_err(bad_media)?,
            _ => self.sync()?,
        }
        Ok(self.fence(Flushed::issued()))
    }

    fn sync(&self) -> std::io::Result<()> {
        if self.domain != Domain::PageCache || self.read_only {
            return Ok(());
        }
        match &self.held {
            Held::Region(region) => self.sync_region(region),
            // SAFETY: msync touches no byte: it writes pages back that whoever made this span keeps mapped.
            Held::Range { start, bytes, .. } => unsafe {
                msync(std::ptr::with_exposed_provenance_mut(*start), *bytes, MsyncFlags::SYNC)
                    .map_err(Into::into)
            },
        }
    }
}
