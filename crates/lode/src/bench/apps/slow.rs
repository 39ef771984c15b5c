//! Media on which a copy takes as long as it would on slow memory, whoever's CPU copies: a stand-in for Optane on DRAM.
//!
//! **What is emulated.** The bytes lie in DRAM. Each load or store of [`PACED_BYTES_MIN`] and more through the CPU goes there
//! at full speed, and then the calling core spins until the time is over that slow memory takes for it: a core that
//! copies slow memory is stalled for so long, and can do nothing else. Smaller accesses (records, words) are not slowed:
//! their latency is not modelled. A device that follows addresses passes by here, and is held to a speed of its own
//! ([`Model`](lodestone::mover::engine_emu::Model)). Cores do not slow each other down, nor do cores and devices: total
//! bandwidth is not modelled.
//!
//! Both runs of an application stand on this, so whatever the asynchronous one leaves to the CPU costs it what it costs the
//! synchronous one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lodestone::media::{Addr, Dirty, Domain, Durable, Fault, Flushed, Media, Words};

/// Smaller accesses are not slowed: a line of Optane, in bytes.
pub const PACED_BYTES_MIN: usize = 256;

/// Of copies between this memory and DRAM, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    pub store: u64,
    pub load: u64,
}

pub struct Slow<M> {
    below: M,
    /// None: as fast as it is.
    core: Option<Speed>,
    /// Nanoseconds that cores spent in copies of [`PACED_BYTES_MIN`] and more.
    copying: AtomicU64,
}

impl<M: Media> Slow<M> {
    /// `core` is what one core reaches.
    pub fn new(below: M, core: Option<Speed>) -> Slow<M> {
        Slow { below, core, copying: AtomicU64::new(0) }
    }

    /// How long cores have been copying.
    pub fn copying(&self) -> Duration {
        Duration::from_nanos(self.copying.load(Ordering::Relaxed))
    }

    fn load<T>(&self, bytes: usize, copy: impl FnOnce() -> T) -> T {
        self.hold(bytes, self.core.map(|core| core.load), copy)
    }

    fn store<T>(&self, bytes: usize, copy: impl FnOnce() -> T) -> T {
        self.hold(bytes, self.core.map(|core| core.store), copy)
    }

    #[inline]
    fn hold<T>(&self, bytes: usize, bytes_per_s: Option<u64>, copy: impl FnOnce() -> T) -> T {
        if bytes < PACED_BYTES_MIN {
            return copy();
        }
        let begun = Instant::now();
        let made = copy();
        let least = bytes_per_s.map_or(Duration::ZERO, |rate| time_of(bytes, rate));
        let mut took = begun.elapsed();
        while took < least {
            std::hint::spin_loop();
            took = begun.elapsed();
        }
        self.copying.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        made
    }
}

/// How long so many bytes take at so many a second.
fn time_of(bytes: usize, bytes_per_s: u64) -> Duration {
    Duration::from_nanos((bytes as u128 * 1_000_000_000 / u128::from(bytes_per_s.max(1))) as u64)
}

impl<M: Media> Media for Slow<M> {
    const OBSERVED: bool = M::OBSERVED;

    fn len(&self) -> u64 {
        self.below.len()
    }

    fn domain(&self) -> Domain {
        self.below.domain()
    }

    fn is_read_only(&self) -> bool {
        self.below.is_read_only()
    }

    fn regions(&self) -> usize {
        self.below.regions()
    }

    fn region(&self, at: Addr) -> (usize, u64) {
        self.below.region(at)
    }

    fn node(&self, region: usize) -> Option<u32> {
        self.below.node(region)
    }

    fn mapped(&self, at: Addr, len: usize) -> Option<*mut u8> {
        self.below.mapped(at, len)
    }

    fn mapping(&self, region: usize) -> Option<(*mut u8, usize)> {
        self.below.mapping(region)
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        self.load(dst.len(), || self.below.read(at, dst))
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        self.below.load64(at)
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        self.load(len, || self.below.crc32c(at, len, crc))
    }

    #[track_caller]
    fn verified(&self, parts: &[(Addr, usize)], matches: bool) -> bool {
        self.below.verified(parts, matches)
    }

    fn omits(&self, step: &'static str) -> bool {
        self.below.omits(step)
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        self.below.store64(at, value)
    }

    fn expect_store(&self, at: Addr, len: usize) {
        self.below.expect_store(at, len);
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        self.store(src.len(), || self.below.copy_cached(at, src))
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        self.store(src.len(), || self.below.copy_nt(at, src))
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        self.store(src.len(), || self.below.copy_nt_crc(at, src, crc))
    }

    fn two_fence_bytes(&self) -> usize {
        self.below.two_fence_bytes()
    }

    fn store_lines(&self, at: Addr, lines: &[Words]) -> Result<Flushed, Fault> {
        self.store(size_of_val(lines), || self.below.store_lines(at, lines))
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        self.store(len, || self.below.zero_nt(at, len))
    }

    #[track_caller]
    fn flush(&self, dirty: Dirty) -> Flushed {
        self.below.flush(dirty)
    }

    #[track_caller]
    fn write_back(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        self.below.write_back(at, len)
    }

    #[track_caller]
    fn fence(&self, flushed: Flushed) -> Durable {
        self.below.fence(flushed)
    }

    #[track_caller]
    fn sync(&self) -> std::io::Result<()> {
        self.below.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lodestone::media::{Span, SpanOptions};

    /// Slow enough to be told from any machine: a copy returns no earlier, and bytes are those of the media below.
    #[test]
    fn a_copy_takes_its_time_and_changes_nothing() {
        let options = SpanOptions { assume: Some(Domain::Memory), ..SpanOptions::default() };
        let speed = Speed { store: 10 << 20, load: 20 << 20 };
        let slow = Slow::new(Span::memfd(1 << 20, &options).unwrap(), Some(speed));
        let bytes: Vec<u8> = (0..=255).cycle().take(64 << 10).collect();
        let begun = Instant::now();
        let stored = slow.copy_nt(Addr(4096), &bytes).unwrap();
        slow.fence(stored);
        assert!(begun.elapsed() >= Duration::from_micros(6250));
        let mut back = vec![0; bytes.len()];
        slow.read(Addr(4096), &mut back).unwrap();
        assert_eq!(back, bytes);
        assert!(slow.copying() >= Duration::from_micros(6250 + 3125));
        let before = slow.copying();
        slow.read(Addr(4096), &mut back[..PACED_BYTES_MIN - 1]).unwrap();
        assert_eq!(slow.copying(), before, "what is small is not slowed");
    }

    #[test]
    fn a_time_follows_from_bytes_and_speed() {
        assert_eq!(time_of(64 << 10, 2_275_555_556), Duration::from_nanos(28_799));
        assert_eq!(time_of(usize::MAX >> 1, 1 << 40).as_secs(), (usize::MAX >> 1) as u64 >> 40);
    }
}
