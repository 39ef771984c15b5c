//! Media on which stores stay private: what stands below is never changed.
//!
//! For looking at what a recovery or a repair would do, on any media. Blocks that were stored to are kept in DRAM;
//! nothing is durable.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Addr, Dirty, Domain, Durable, Fault, Flushed, Media, crc32c};

const PAGE: usize = 4096;

pub struct Overlay<M> {
    below: Arc<M>,
    pages: Mutex<BTreeMap<u64, Box<[u8; PAGE]>>>,
}

impl<M: Media> Overlay<M> {
    pub fn new(below: Arc<M>) -> Overlay<M> {
        Overlay { below, pages: Mutex::default() }
    }

    /// The parts of a range that lie in one page each: page, first byte in it, bytes.
    fn parts(at: Addr, len: usize) -> impl Iterator<Item = (u64, usize, usize)> {
        let mut from = at.0;
        let end = at.0 + len as u64;
        std::iter::from_fn(move || {
            let (page, within) = (from / PAGE as u64, (from % PAGE as u64) as usize);
            let part = (PAGE - within).min((end - from) as usize);
            from += part as u64;
            (part > 0).then_some((page, within, part))
        })
    }

    fn store(&self, at: Addr, src: &[u8]) -> Result<(), Fault> {
        let mut pages = self.pages.lock();
        let mut done = 0;
        for (page, within, part) in Self::parts(at, src.len()) {
            let copy = match pages.entry(page) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    let mut copy = Box::new([0; PAGE]);
                    if part < PAGE {
                        self.below.read(Addr(page * PAGE as u64), &mut copy[..])?;
                    }
                    entry.insert(copy)
                }
            };
            copy[within..within + part].copy_from_slice(&src[done..done + part]);
            done += part;
        }
        Ok(())
    }
}

impl<M: Media> Media for Overlay<M> {
    fn len(&self) -> u64 {
        self.below.len()
    }

    fn domain(&self) -> Domain {
        self.below.domain()
    }

    fn stored(&self, at: Addr) -> Option<Range<u64>> {
        let below = self.below.stored(at);
        let page = self.pages.lock().range(at.0 / PAGE as u64..).next().map(|(&page, _)| page * PAGE as u64);
        match (below, page) {
            (Some(below), Some(page)) if page < below.start => {
                Some(at.0.max(page)..below.start.min(page + PAGE as u64))
            }
            (None, Some(page)) => Some(at.0.max(page)..page + PAGE as u64),
            (below, _) => below,
        }
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        let pages = self.pages.lock();
        let mut done = 0;
        for (page, within, part) in Self::parts(at, dst.len()) {
            let to = &mut dst[done..done + part];
            match pages.get(&page) {
                Some(copy) => to.copy_from_slice(&copy[within..within + part]),
                None => self.below.read(at.add(done as u64), to)?,
            }
            done += part;
        }
        Ok(())
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        let mut word = [0; 8];
        self.read(at, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        let mut crc = crc;
        let mut part = [0; PAGE];
        for (page, within, len) in Self::parts(at, len) {
            self.read(Addr(page * PAGE as u64 + within as u64), &mut part[..len])?;
            crc = crc32c(&part[..len], crc);
        }
        Ok(crc)
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        self.copy_cached(at, &value.to_le_bytes())
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        self.store(at, src)?;
        Ok(Dirty::stored(at, src.len()))
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        self.store(at, src)?;
        Ok(Flushed::issued())
    }

    fn two_fence_bytes(&self) -> usize {
        self.below.two_fence_bytes()
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        self.store(at, src)?;
        Ok((crc32c(src, crc), Flushed::issued()))
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        for (page, within, part) in Self::parts(at, len) {
            self.store(Addr(page * PAGE as u64 + within as u64), &[0; PAGE][..part])?;
        }
        Ok(Flushed::issued())
    }

    fn flush(&self, _dirty: Dirty) -> Flushed {
        Flushed::issued()
    }

    fn fence(&self, _flushed: Flushed) -> Durable {
        Durable::fenced()
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn drop_cached(&self) {
        self.below.drop_cached();
    }
}

/// Media that several hold: who opens them as a file system may fail, and another one goes on.
impl<M: Media> Media for Arc<M> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn in_file(&self, at: Addr, len: u64) -> Option<(std::path::PathBuf, u64)> {
        (**self).in_file(at, len)
    }

    fn is_used(&self, at: Addr, len: u64) -> bool {
        (**self).is_used(at, len)
    }

    fn stored(&self, at: Addr) -> Option<Range<u64>> {
        (**self).stored(at)
    }

    fn domain(&self) -> Domain {
        (**self).domain()
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        (**self).read(at, dst)
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        (**self).load64(at)
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        (**self).crc32c(at, len, crc)
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        (**self).store64(at, value)
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        (**self).copy_cached(at, src)
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        (**self).copy_nt(at, src)
    }

    fn two_fence_bytes(&self) -> usize {
        (**self).two_fence_bytes()
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        (**self).copy_nt_crc(at, src, crc)
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        (**self).zero_nt(at, len)
    }

    fn flush(&self, dirty: Dirty) -> Flushed {
        (**self).flush(dirty)
    }

    #[track_caller]
    fn write_back(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        (**self).write_back(at, len)
    }

    fn fence(&self, flushed: Flushed) -> Durable {
        (**self).fence(flushed)
    }

    #[track_caller]
    fn persist(&self, ranges: &[(Addr, usize)]) -> std::io::Result<Durable> {
        (**self).persist(ranges)
    }

    fn sync(&self) -> std::io::Result<()> {
        (**self).sync()
    }

    fn drop_cached(&self) {
        (**self).drop_cached();
    }
}
