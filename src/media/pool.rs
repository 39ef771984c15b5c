//! One or many regions as one address space: the [`Media`] of production.
//!
//! **Invariants.**
//! 1. Block 0 of every region is its label (`label`); the pool's users begin at block 1.
//! 2. Pool stripe 0 is stripe 0 of region 0; stripe s >= 1 is stripe 1 + (s - 1) / n of region
//!    (s - 1) % n. Labels of regions 1.. thus have no pool address, and a pool of one region is the
//!    region itself: the fast path, one addition.
//! 3. All regions are used to the size of the smallest.
//! 4. A region is locked as long as it is mapped.

use std::fmt;
use std::ops::Range;

use super::LINE;
use super::copy::{Copier, Isa, ReadTable, Routines};
use super::label::Label;
use super::region::{FileIdentity, Region, RegionKind};
use super::{Addr, Dirty, Domain, Durable, Fault, Flushed, Media, Words};

/// How to open or create a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolOptions {
    /// The persistence domain to work by, instead of the one detected. On DRAM this emulates
    /// persistent memory; on persistent memory only the safer side is accepted.
    pub assume: Option<Domain>,
    /// Stores stay in a private copy; the files never change.
    pub read_only: bool,
    /// Take every page now instead of at first use.
    pub prefault: bool,
    /// The instruction set, instead of the best one (or of `LODE_ISA`).
    pub isa: Option<Isa>,
    /// Create: stripe unit of several regions, a power of two; 2 MiB by default.
    pub stripe_bytes: Option<u64>,
    /// Create: take files that hold something already.
    pub force: bool,
    /// How reads use several streams.
    pub reads: Option<ReadTable>,
}

/// A mapped pool.
pub struct Pool {
    /// Region 0.
    base: *mut u8,
    bytes: u64,
    copier: Copier,
    /// log2 of the stripe unit where there is more than one region.
    stripe_shift: Option<u32>,
    domain: Domain,
    isa: Isa,
    label: Label,
    regions: Vec<Region>,
    options: PoolOptions,
}

// SAFETY: `base` points into `regions`, which the pool owns; all access to media is by routines that
// tolerate concurrent change, as other processes could cause it anyway.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// The pool's identity, new at every creation.
    pub fn uuid(&self) -> [u8; 16] {
        self.label.pool_uuid
    }

    /// The stripe unit in bytes; a pool of one region has it too, unused.
    pub fn stripe_bytes(&self) -> u64 {
        self.label.stripe_bytes
    }

    /// The files and devices that it is made of.
    pub fn files(&self) -> Vec<FileIdentity> {
        self.regions.iter().map(Region::identity).collect()
    }

    /// Regions, region 0 first, as long as their label says and with a domain that `open` chose.
    pub(super) fn of_regions(
        regions: Vec<Region>,
        label: Label,
        domain: Domain,
        (isa, routines): (Isa, Routines),
        options: &PoolOptions,
    ) -> Pool {
        let (bytes, stripe_shift) = match regions.len() as u64 {
            1 => (label.region_bytes, None),
            n => {
                let stripes = label.region_bytes / label.stripe_bytes;
                let bytes = label.stripe_bytes * (1 + n * (stripes - 1));
                (bytes, Some(label.stripe_bytes.trailing_zeros()))
            }
        };
        Pool {
            base: regions[0].map.base(),
            bytes,
            copier: Copier::new(routines, domain, options.reads.unwrap_or_default()),
            stripe_shift,
            domain,
            isa,
            label,
            regions,
            options: *options,
        }
    }

    pub(super) fn label(&self) -> &Label {
        &self.label
    }

    pub(super) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// What was done to its files is right.
    pub(super) fn keep(&mut self) {
        self.regions.iter_mut().for_each(Region::keep);
    }

    pub(super) fn copier(&self) -> &Copier {
        &self.copier
    }

    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    pub(super) fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// Panics for a range outside the pool: the caller validates what it read from media.
    #[inline]
    fn check(&self, at: Addr, len: usize) {
        if at.0.checked_add(len as u64).is_none_or(|end| end > self.bytes) {
            outside(at, len, self.bytes);
        }
    }

    /// Where a range is mapped, in a pool of one region.
    #[inline]
    fn flat(&self, at: Addr, len: usize) -> Option<*mut u8> {
        self.check(at, len);
        match self.stripe_shift {
            // SAFETY: checked above to be inside the only region.
            None => Some(unsafe { self.base.add(at.0 as usize) }),
            Some(_) => None,
        }
    }

    /// An aligned word; stripes are aligned too, so that it lies in one.
    #[inline]
    fn word(&self, at: Addr) -> *mut u64 {
        assert!(at.0.is_multiple_of(8), "the word at {at:?} is not aligned");
        let media = match (self.flat(at, 8), self.stripe_shift) {
            (Some(media), _) => media,
            (None, shift) => self.locate(at, shift.unwrap_or(0)).0,
        };
        media.cast()
    }

    /// Runs `piece` on each contiguous part of a range: (pointer to media, range of the caller's bytes).
    /// Out of line, so that the callers' fast paths stay short.
    #[inline(never)]
    fn striped(
        &self,
        at: Addr,
        len: usize,
        mut piece: impl FnMut(*mut u8, Range<usize>) -> Result<(), usize>,
    ) -> Result<(), Fault> {
        let Some(shift) = self.stripe_shift else { unreachable!("only called for several regions") };
        let mut done = 0;
        while done < len {
            let (pointer, room) = self.locate(at.add(done as u64), shift);
            let now = room.min(len - done);
            piece(pointer, done..done + now).map_err(|address| self.fault(address))?;
            done += now;
        }
        Ok(())
    }

    /// Where a pool address is mapped, and how many bytes follow in the same stripe.
    #[inline]
    fn locate(&self, at: Addr, shift: u32) -> (*mut u8, usize) {
        let stripe = at.0 >> shift;
        let within = at.0 & ((1 << shift) - 1);
        let regions = self.regions.len() as u64;
        let (region, region_stripe) = match stripe.checked_sub(1) {
            None => (0, 0),
            Some(s) => (s % regions, 1 + s / regions),
        };
        let offset = (region_stripe << shift) + within;
        let base = self.regions[region as usize].map.base();
        // SAFETY: the address was checked to be inside the pool, so that by invariant 2 the offset is
        // inside the region.
        (unsafe { base.add(offset as usize) }, ((1 << shift) - within) as usize)
    }

    /// The pool address of a faulting machine address: the inverse of [`locate`](Self::locate).
    #[cold]
    pub(super) fn fault(&self, address: usize) -> Fault {
        let found = self.regions.iter().enumerate().find_map(|(i, r)| {
            let offset = address.checked_sub(r.map.base().addr())?;
            (offset < r.map.bytes()).then_some((i as u64, offset as u64))
        });
        let (region, offset) = found.unwrap_or((0, 0));
        let Some(shift) = self.stripe_shift else { return Fault { at: Addr(offset) } };
        let within = offset & ((1 << shift) - 1);
        let stripe = match (offset >> shift).checked_sub(1) {
            // A label: only region 0's has a pool address, which stands for all.
            None => 0,
            Some(s) => 1 + s * self.regions.len() as u64 + region,
        };
        Fault { at: Addr((stripe << shift) + within) }
    }
}

/// Out of line, so that the callers' fast paths stay short.
#[cold]
#[inline(never)]
fn outside(at: Addr, len: usize, bytes: u64) -> ! {
    panic!("range of {len} bytes at {at:?} is outside the pool of {bytes} bytes")
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("path", &self.label.paths[0])
            .field("bytes", &self.bytes)
            .field("regions", &self.regions.len())
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}

impl Media for Pool {
    #[inline]
    fn len(&self) -> u64 {
        self.bytes
    }

    #[inline]
    fn domain(&self) -> Domain {
        self.domain
    }

    fn regions(&self) -> usize {
        self.regions.len()
    }

    fn region(&self, at: Addr) -> (usize, u64) {
        let (region, _, room) = self.region_of(at);
        (region, room)
    }

    fn mapped(&self, at: Addr, len: usize) -> Option<*mut u8> {
        let Some(shift) = self.stripe_shift else { return self.flat(at, len) };
        self.check(at, len);
        let (pointer, room) = self.locate(at, shift);
        (len <= room).then_some(pointer)
    }

    fn in_file(&self, at: Addr, len: u64) -> Option<(std::path::PathBuf, u64)> {
        let (region, offset, room) = self.region_of(at);
        let region = &self.regions[region];
        (len <= room && region.kind != RegionKind::Memfd).then(|| (region.path.clone(), offset))
    }

    fn is_used(&self, at: Addr, len: u64) -> bool {
        let (region, offset, _) = self.region_of(at);
        self.regions[region].is_used(offset..offset + len)
    }

    fn stored(&self, at: Addr) -> Option<Range<u64>> {
        let mut at = at.0;
        while at < self.bytes {
            let (region, offset, room) = self.region_of(Addr(at));
            if let Some(part) = self.regions[region].stored(offset..offset + room) {
                return Some(at + (part.start - offset)..at + (part.end - offset));
            }
            at += room;
        }
        None
    }

    fn mapping(&self, region: usize) -> Option<(*mut u8, usize)> {
        let whole = (self.regions[region].map.base(), self.label.region_bytes as usize);
        (!self.options.read_only).then_some(whole)
    }

    fn out_of_room(&self, at: Addr) -> Option<std::path::PathBuf> {
        let region = &self.regions[self.region_of(at).0];
        region.is_out_of_room().then(|| region.path.clone())
    }

    fn node(&self, region: usize) -> Option<u32> {
        self.regions[region].map.node()
    }

    #[inline]
    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        let copier = &self.copier;
        match self.flat(at, dst.len()) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            Some(media) => unsafe { copier.read(dst, media) }.map_err(|address| self.fault(address)),
            // SAFETY: `striped` hands out mapped media as long as the part.
            None => self.striped(at, dst.len(), |media, part| unsafe { copier.read(&mut dst[part], media) }),
        }
    }

    #[inline]
    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        let media = self.word(at);
        // SAFETY: `word` answers with an aligned word of mapped media.
        unsafe { self.copier.load64(media) }.map_err(|address| self.fault(address))
    }

    #[inline]
    fn crc32c(&self, at: Addr, len: usize, mut crc: u32) -> Result<u32, Fault> {
        let copier = &self.copier;
        match self.flat(at, len) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            Some(media) => unsafe { copier.crc32c(media, len, crc) }.map_err(|address| self.fault(address)),
            None => {
                self.striped(at, len, |media, part| {
                    // SAFETY: `striped` hands out mapped media as long as the part.
                    crc = unsafe { copier.crc32c(media, part.len(), crc)? };
                    Ok(())
                })?;
                Ok(crc)
            }
        }
    }

    #[inline]
    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        let media = self.word(at);
        // SAFETY: `word` answers with an aligned word of mapped media.
        unsafe { self.copier.store64(media, value) }.map_err(|address| self.fault(address))?;
        Ok(Dirty::stored(at, 8))
    }

    #[inline]
    fn expect_store(&self, at: Addr, len: usize) {
        if let Some(media) = self.flat(at, len) {
            super::copy::prefetch_for_store(media, len);
        }
    }

    #[inline]
    fn expect_read(&self, at: Addr, len: usize) {
        if let Some(media) = self.mapped(at, len) {
            super::copy::prefetch_for_load(media, len);
        }
    }

    #[inline]
    fn expect_copy(&self, page: Addr) {
        if let Some(media) = self.flat(page, super::copy::PAGE) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            unsafe { self.copier.expect_copy(media) };
        }
    }

    #[inline]
    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        let copier = &self.copier;
        match self.flat(at, src.len()) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            Some(media) => unsafe { copier.copy_cached(media, src) }.map_err(|address| self.fault(address)),
            None => self.striped(at, src.len(), |media, part| {
                // SAFETY: `striped` hands out mapped media as long as the part.
                unsafe { copier.copy_cached(media, &src[part]) }
            }),
        }?;
        Ok(Dirty::stored(at, src.len()))
    }

    #[inline]
    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        let copier = &self.copier;
        match self.flat(at, src.len()) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            Some(media) => unsafe { copier.copy_nt(media, src) }.map_err(|address| self.fault(address)),
            None => self.striped(at, src.len(), |media, part| {
                // SAFETY: `striped` hands out mapped media as long as the part.
                unsafe { copier.copy_nt(media, &src[part]) }
            }),
        }?;
        Ok(Flushed::issued())
    }

    fn two_fence_bytes(&self) -> usize {
        self.copier.two_fence_bytes()
    }

    #[inline]
    fn copy_nt_crc(&self, at: Addr, src: &[u8], mut crc: u32) -> Result<(u32, Flushed), Fault> {
        let copier = &self.copier;
        match self.flat(at, src.len()) {
            Some(media) => {
                // SAFETY: `flat` answers with mapped media as long as the range.
                let copied = unsafe { copier.copy_nt_crc(media, src, crc) };
                crc = copied.map_err(|address| self.fault(address))?;
            }
            None => self.striped(at, src.len(), |media, part| {
                // SAFETY: `striped` hands out mapped media as long as the part.
                crc = unsafe { copier.copy_nt_crc(media, &src[part], crc)? };
                Ok(())
            })?,
        }
        Ok((crc, Flushed::issued()))
    }

    #[inline]
    fn store_lines(&self, at: Addr, lines: &[Words]) -> Result<Flushed, Fault> {
        assert!(at.0.is_multiple_of(LINE as u64), "a record begins with a line");
        let stored = match self.flat(at, size_of_val(lines)) {
            // SAFETY: `flat` answers with mapped media as long as the lines; regions begin with a page.
            Some(media) => unsafe { self.copier.store_lines(media, lines) },
            None => return self.copy_nt(at, &super::copy::line_bytes(lines)),
        };
        stored.map_err(|address| self.fault(address))?;
        Ok(Flushed::issued())
    }

    #[inline]
    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        let copier = &self.copier;
        match self.flat(at, len) {
            // SAFETY: `flat` answers with mapped media as long as the range.
            Some(media) => unsafe { copier.zero_nt(media, len) }.map_err(|address| self.fault(address)),
            // SAFETY: `striped` hands out mapped media as long as the part.
            None => self.striped(at, len, |media, part| unsafe { copier.zero_nt(media, part.len()) }),
        }?;
        Ok(Flushed::issued())
    }

    #[inline]
    fn flush(&self, dirty: Dirty) -> Flushed {
        self.write_back(dirty.at, dirty.len).unwrap_or_else(|_| Flushed::issued())
    }

    #[inline]
    fn write_back(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        let copier = &self.copier;
        if copier.writes_back() && len > 0 {
            let written = match self.flat(at, len) {
                // SAFETY: `flat` answers with mapped media as long as the range.
                Some(media) => unsafe { copier.write_back(media, len) },
                None => {
                    let mut written = Ok(());
                    self.striped(at, len, |media, part| {
                        // SAFETY: `striped` hands out mapped media as long as the part.
                        written = written.and(unsafe { copier.write_back(media, part.len()) });
                        Ok(())
                    })?;
                    written
                }
            };
            written.map_err(|address| self.fault(address))?;
        }
        Ok(Flushed::issued())
    }

    #[inline]
    fn fence(&self, _flushed: Flushed) -> Durable {
        self.copier.fence();
        Durable::fenced()
    }

    fn sync(&self) -> std::io::Result<()> {
        if self.domain == Domain::PageCache && !self.options.read_only {
            for region in &self.regions {
                region.sync()?;
            }
        }
        Ok(())
    }

    fn drop_cached(&self) {
        if self.domain == Domain::PageCache {
            self.regions.iter().for_each(Region::drop_cached);
        }
    }
}

impl Pool {
    /// The region of a pool address, the offset in it, and the bytes that follow there.
    fn region_of(&self, at: Addr) -> (usize, u64, u64) {
        let Some(shift) = self.stripe_shift else { return (0, at.0, self.bytes - at.0) };
        let (pointer, room) = self.locate(at, shift);
        let inside = |r: &Region| {
            let offset = pointer.addr().wrapping_sub(r.map.base().addr());
            offset < r.map.bytes()
        };
        let region = self.regions.iter().position(inside).expect("locate answers with a region of this pool");
        (region, (pointer.addr() - self.regions[region].map.base().addr()) as u64, room as u64)
    }
}
