//! Which routine a load or store takes, by persistence domain, size and alignment.
//!
//! In the persistent domains every bulk store is non-temporal, and the unaligned edges of it, which
//! have to go through the cache, are written back here: a copy that leaves its edges in the cache is a
//! bug two published systems share. Without persistence (`page-cache`, `volatile`) nothing needs to be
//! written back, so that small stores stay in the cache and large ones go around it only because that
//! is faster; those are fenced here, once per copy, and [`Copier::fence`] costs nothing.

use super::{Domain, LINE, PAGE, ReadStep, ReadTable, Routines, Streams, Words};

/// Below this many bytes a store that need not be durable stays in the cache (measured: to cold memory
/// both ways take the same time between 1 and 2 KiB).
const NON_TEMPORAL_BYTES_MIN: usize = 2048;

static ZEROS: [u8; NON_TEMPORAL_BYTES_MIN] = [0; NON_TEMPORAL_BYTES_MIN];

/// Loads and stores one contiguous range of mapped media.
///
/// Every method is unsafe for the same reason: the pointer names mapped media, valid for the given
/// bytes, and the caller's slice lies elsewhere. The errors are fault addresses.
#[derive(Clone, Copy)]
pub(in crate::media) struct Copier {
    routines: Routines,
    /// Stores below this many bytes take the cached path.
    cached_below: usize,
    /// Lines stored through the cache have to be written back.
    writes_back: bool,
    /// Stores are durable, and ordered among each other, only behind a fence.
    fences: bool,
    reads: ReadTable,
}

type Result<T> = std::result::Result<T, usize>;

impl Copier {
    pub fn new(routines: Routines, domain: Domain, reads: ReadTable) -> Copier {
        let fences = domain.is_persistent_memory();
        Copier {
            routines,
            cached_below: if fences { 0 } else { NON_TEMPORAL_BYTES_MIN },
            writes_back: domain == Domain::Memory,
            fences,
            reads,
        }
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn read(&self, dst: &mut [u8], src: *const u8) -> Result<()> {
        if dst.len() < self.reads.bytes_min() {
            // SAFETY: the caller's.
            return unsafe { (self.routines.copy)(dst.as_mut_ptr(), src, dst.len()) }.check().map(drop);
        }
        // SAFETY: the caller's.
        unsafe { self.read_streams(dst, src) }
    }

    /// Reads side by side from several pages, because one sequential stream does not fill the memory
    /// parallelism of a core.
    ///
    /// # Safety
    /// See [`Copier`].
    unsafe fn read_streams(&self, mut dst: &mut [u8], mut src: *const u8) -> Result<()> {
        while dst.len() >= self.reads.bytes_min() {
            let ReadStep { streams, span_max, .. } = self.reads.step(dst.len());
            let routine = match streams {
                Streams::One => self.routines.read_1,
                Streams::OneAhead => self.routines.read_1_ahead,
                Streams::OneBurst => self.routines.read_1_burst,
                Streams::Four => self.routines.read_4,
                Streams::FourAhead => self.routines.read_4_ahead,
                Streams::Eight => self.routines.read_8,
            };
            let span = ((dst.len() / streams.count()) & !(LINE - 1)).min(span_max);
            let (now, later) = dst.split_at_mut(span * streams.count());
            // SAFETY: `now` and as many bytes of the source are inside what the caller vouches for.
            unsafe { routine(now.as_mut_ptr(), src, span).check()? };
            // SAFETY: as above.
            src = unsafe { src.add(now.len()) };
            dst = later;
        }
        // SAFETY: the rest of the caller's range.
        unsafe { (self.routines.copy)(dst.as_mut_ptr(), src, dst.len()) }.check().map(drop)
    }

    /// # Safety
    /// See [`Copier`]; `src` is aligned.
    #[inline]
    pub unsafe fn load64(&self, src: *const u64) -> Result<u64> {
        debug_assert!(src.is_aligned());
        // SAFETY: the caller's.
        unsafe { (self.routines.load64)(src) }.check()
    }

    /// # Safety
    /// See [`Copier`]; `dst` is aligned.
    #[inline]
    pub unsafe fn store64(&self, dst: *mut u64, value: u64) -> Result<()> {
        debug_assert!(dst.is_aligned());
        // SAFETY: the caller's.
        unsafe { (self.routines.store64)(dst, value) }.check().map(drop)
    }

    /// One line of log, the CRC in its first four bytes computed here.
    ///
    /// # Safety
    /// See [`Copier`]; `dst` is aligned to a line.
    #[inline]
    pub unsafe fn store_lines(&self, dst: *mut u8, lines: &[Words]) -> Result<()> {
        let cached = self.cached_below > LINE;
        for (line, at) in lines.iter().zip((0..).step_by(LINE)) {
            // SAFETY: the caller's, who vouches for all lines.
            match unsafe { (self.routines.store_line)(dst.add(at), line, cached) } {
                0 => {}
                fault => return Err(fault),
            }
        }
        Ok(())
    }

    /// See [`Routines::two_fence_bytes`].
    pub fn two_fence_bytes(&self) -> usize {
        self.routines.two_fence_bytes
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn crc32c(&self, src: *const u8, len: usize, crc: u32) -> Result<u32> {
        // SAFETY: the caller's.
        unsafe { (self.routines.crc)(src, len, !crc) }.check().map(|state| !(state as u32))
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn copy_cached(&self, dst: *mut u8, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { (self.routines.copy)(dst, src.as_ptr(), src.len()) }.check().map(drop)
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn copy_nt(&self, dst: *mut u8, src: &[u8]) -> Result<()> {
        if src.len() < self.cached_below {
            // SAFETY: the caller's.
            return unsafe { self.copy_cached(dst, src) };
        }
        let (head, lines) = split(dst, src.len());
        let (head, rest) = src.split_at(head);
        let (lines, tail) = rest.split_at(lines);
        // SAFETY: three adjacent parts of what the caller vouches for.
        unsafe {
            self.copy_edge(dst, head)?;
            let dst = dst.add(head.len());
            if !lines.is_empty() {
                (self.routines.copy_lines)(dst, lines.as_ptr(), lines.len()).check()?;
            }
            self.copy_edge(dst.add(lines.len()), tail)?;
        }
        self.order();
        Ok(())
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn copy_nt_crc(&self, dst: *mut u8, src: &[u8], crc: u32) -> Result<u32> {
        let (head, lines) =
            if src.len() < self.cached_below { (src.len(), 0) } else { split(dst, src.len()) };
        let (head, rest) = src.split_at(head);
        let (lines, tail) = rest.split_at(lines);
        let mut state = !crc;
        // SAFETY: as in `copy_nt`.
        unsafe {
            state = self.copy_edge_crc(dst, head, state)?;
            let dst = dst.add(head.len());
            if !lines.is_empty() {
                let copy = self.routines.copy_lines_crc;
                state = copy(dst, lines.as_ptr(), lines.len(), state).check()? as u32;
            }
            state = self.copy_edge_crc(dst.add(lines.len()), tail, state)?;
        }
        self.order();
        Ok(!state)
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn zero_nt(&self, dst: *mut u8, len: usize) -> Result<()> {
        if len < self.cached_below {
            // SAFETY: the caller's.
            return unsafe { self.copy_cached(dst, &ZEROS[..len]) };
        }
        let (head, lines) = split(dst, len);
        // SAFETY: as in `copy_nt`.
        unsafe {
            self.copy_edge(dst, &ZEROS[..head])?;
            let dst = dst.add(head);
            if lines > 0 {
                (self.routines.zero_lines)(dst, lines).check()?;
            }
            self.copy_edge(dst.add(lines), &ZEROS[..len - head - lines])?;
        }
        self.order();
        Ok(())
    }

    /// Part of a non-temporal store that is less than a line.
    ///
    /// # Safety
    /// See [`Copier`].
    #[inline]
    unsafe fn copy_edge(&self, dst: *mut u8, src: &[u8]) -> Result<()> {
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe {
            (self.routines.copy)(dst, src.as_ptr(), src.len()).check()?;
            if self.writes_back {
                self.write_back(dst, src.len())?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// See [`Copier`].
    #[inline]
    unsafe fn copy_edge_crc(&self, dst: *mut u8, src: &[u8], state: u32) -> Result<u32> {
        if src.is_empty() {
            return Ok(state);
        }
        // SAFETY: the caller's; the checksum reads the caller's slice.
        unsafe {
            self.copy_edge(dst, src)?;
            (self.routines.crc)(src.as_ptr(), src.len(), state).check().map(|state| state as u32)
        }
    }

    /// Whether stores through the cache have to be written back to be durable.
    #[inline]
    pub fn writes_back(&self) -> bool {
        self.writes_back
    }

    /// Writes the lines of a cached store back: all but those of pages that went away after it (the file was cut), the
    /// first of which is the error.
    ///
    /// # Safety
    /// See [`Copier`]; `len` is not zero.
    #[inline]
    pub unsafe fn write_back(&self, at: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            let written = (self.routines.write_back)(at, len).check();
            written.map(drop).inspect_err(|&fault| self.write_back_behind(at, len, fault))
        }
    }

    /// Goes on with the page behind the one that ended it.
    ///
    /// # Safety
    /// As for [`write_back`](Copier::write_back).
    #[cold]
    unsafe fn write_back_behind(&self, at: *const u8, len: usize, mut fault: usize) {
        let (mut from, end) = (at.addr(), at.addr() + len);
        loop {
            // A huge page that went bad may be named by where it begins.
            from = (fault.max(from) & !(PAGE - 1)) + PAGE;
            if from >= end {
                return;
            }
            // SAFETY: the rest of the caller's range.
            match unsafe { (self.routines.write_back)(at.add(from - at.addr()), end - from) }.check() {
                Ok(_) => return,
                Err(next) => fault = next,
            }
        }
    }

    /// Has the translation of a page looked up that [`copy_nt`](Copier::copy_nt) stores to soon. By a line of it that is written
    /// back, though it is in no cache, for that line is not fetched: between stores past the caches a load from memory costs
    /// more than what it hides, where two processors share the way there (decision 0093).
    ///
    /// # Safety
    /// See [`Copier`].
    #[inline]
    pub unsafe fn expect_copy(&self, page: *const u8) {
        if self.writes_back && self.routines.write_backs_overlap {
            // SAFETY: the caller's. A fault is not reported: the copy will.
            unsafe { (self.routines.write_back)(page.add(super::LATE_LINE), 1) };
        } else {
            super::prefetch_translation(page);
        }
    }

    /// Completes all stores of this thread where durability asks for it.
    #[inline]
    pub fn fence(&self) {
        if self.fences {
            super::store_fence();
        }
    }

    /// Orders non-temporal stores before a later unlock, where no [`fence`](Copier::fence) will.
    #[inline]
    fn order(&self) {
        if !self.fences {
            super::store_fence();
        }
    }
}

/// Bytes before the first line boundary, and bytes in whole lines behind it.
#[inline]
fn split(dst: *mut u8, len: usize) -> (usize, usize) {
    let head = (dst.addr().wrapping_neg() & (LINE - 1)).min(len);
    (head, (len - head) & !(LINE - 1))
}
