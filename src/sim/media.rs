//! Media in DRAM that remembers which stores are durable.
//!
//! **Fault model**, domain `memory`: a store is a sequence of aligned 8-byte atoms. Cached stores of one
//! 64-byte line become durable in program order, at any time, flushed or not; so a crash leaves a prefix
//! of them. Non-temporal atoms are independent until the fence. A fence makes durable what was stored
//! non-temporally or flushed before it. Domain `cpu-cache`: a store is durable once it is globally visible,
//! in program order; non-temporal ones still wait for the fence. Domain `page-cache`: a fence is nothing;
//! pages are written back at any time, in any order, so that a power failure leaves each as it was at some
//! moment since the last sync. Poison: loads and stores that meet it fail. Not modelled yet: engine copies.
//!
//! Threads: the model is one CPU. Several threads may use it, but a fence of one completes the stores of
//! all, so it must not be used to judge code that relies on fences of other threads.

use std::collections::BTreeMap;
use std::ops::Range;

use parking_lot::Mutex;

use crate::media::{Addr, Dirty, Domain, Durable, Fault, Flushed, LINE, Media, crc32c};

const ATOM: usize = 8;
const PAGE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Cached,
    Flushed,
    NonTemporal,
}

/// One 8-byte store.
#[derive(Clone, Copy)]
struct Atom {
    at: usize,
    value: [u8; ATOM],
    way: Way,
}

struct Memory {
    /// What loads see.
    now: Vec<u8>,
    /// What surely survives.
    durable: Vec<u8>,
    /// Stores that may or may not survive, by line (`page-cache`: by page), in program order.
    pending: BTreeMap<usize, Vec<Atom>>,
    fences: u64,
    recorder: Option<Recorder>,
    poison: Vec<Range<usize>>,
}

/// Called before each fence and each sync with the state of the media: where a crash is worth looking at.
pub type Recorder = Box<dyn FnMut(&CrashPoint) + Send>;

/// The media at a moment at which power may fail.
#[derive(Clone)]
pub struct CrashPoint {
    durable: Vec<u8>,
    pending: BTreeMap<usize, Vec<Atom>>,
    domain: Domain,
    pub fences: u64,
}

/// See the file's head.
pub struct SimMedia {
    memory: Mutex<Memory>,
    len: u64,
    domain: Domain,
}

/// Which of the pending stores an image keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Nothing,
    Everything,
    /// All but what the `n`th pending line got.
    AllBut(usize),
    /// Only what the `n`th pending line got.
    Only(usize),
    /// By chance, from this seed.
    Random(u64),
}

impl CrashPoint {
    /// Lines with stores in doubt.
    pub fn lines(&self) -> usize {
        self.pending.len()
    }

    /// An image that the failure may leave.
    pub fn image(&self, keep: Keep) -> Vec<u8> {
        let mut image = self.durable.clone();
        let mut rng = Rng::new(match keep {
            Keep::Random(seed) => seed,
            _ => 0,
        });
        for (n, atoms) in self.pending.values().enumerate() {
            match keep {
                Keep::Nothing => {}
                Keep::Everything => atoms.iter().for_each(|a| a.store(&mut image)),
                Keep::AllBut(line) if line != n => atoms.iter().for_each(|a| a.store(&mut image)),
                Keep::Only(line) if line == n => atoms.iter().for_each(|a| a.store(&mut image)),
                Keep::AllBut(_) | Keep::Only(_) => {}
                Keep::Random(_) => self.keep_some(atoms, &mut rng, &mut image),
            }
        }
        image
    }

    /// As [`image`](CrashPoint::image), to be opened.
    pub fn media(&self, keep: Keep) -> SimMedia {
        SimMedia::new(self.image(keep), self.domain)
    }

    /// A prefix of the cached stores, any subset of the non-temporal ones; of a page, a prefix of all.
    fn keep_some(&self, atoms: &[Atom], rng: &mut Rng, image: &mut [u8]) {
        if self.domain == Domain::PageCache {
            let kept = match rng.below(4) {
                0 => 0,
                1 => atoms.len(),
                _ => rng.below(atoms.len() as u64 + 1) as usize,
            };
            return atoms[..kept].iter().for_each(|a| a.store(image));
        }
        let cached = atoms.iter().filter(|a| a.way != Way::NonTemporal).count();
        let mut prefix = match self.domain {
            Domain::CpuCache => cached,
            _ => rng.below(cached as u64 + 1) as usize,
        };
        // Whole lines are the most likely survivors: half of the time all atoms share one fate.
        let fate = rng.below(4);
        for atom in atoms {
            let keeps = if atom.way == Way::NonTemporal {
                match fate {
                    0 => true,
                    1 => false,
                    _ => rng.below(2) == 0,
                }
            } else if prefix > 0 {
                prefix -= 1;
                true
            } else {
                false
            };
            if keeps {
                atom.store(image);
            }
        }
    }
}

impl Memory {
    fn check(&self, bytes: Range<usize>) -> Result<(), Fault> {
        match self.poison.iter().find(|p| p.start < bytes.end && bytes.start < p.end) {
            Some(p) => Err(Fault { at: Addr(p.start.max(bytes.start) as u64) }),
            None => Ok(()),
        }
    }
}

impl Atom {
    fn store(&self, image: &mut [u8]) {
        image[self.at..self.at + ATOM].copy_from_slice(&self.value);
    }
}

/// xorshift: the same sequence for the same seed, everywhere.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// From 0 to `n - 1`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }
}

impl SimMedia {
    /// `image` is durable.
    pub fn new(image: Vec<u8>, domain: Domain) -> SimMedia {
        assert!(image.len().is_multiple_of(LINE));
        let len = image.len() as u64;
        let memory = Memory {
            durable: image.clone(),
            now: image,
            pending: BTreeMap::new(),
            fences: 0,
            recorder: None,
            poison: Vec::new(),
        };
        SimMedia { memory: Mutex::new(memory), len, domain }
    }

    /// From now on `recorder` sees the media before each fence.
    pub fn record(&self, recorder: Option<Recorder>) {
        self.memory.lock().recorder = recorder;
    }

    /// From now on loads and stores of these bytes fail.
    pub fn poison(&self, bytes: Range<usize>) {
        self.memory.lock().poison.push(bytes);
    }

    /// What loads see, as if everything had been written back.
    pub fn image(&self) -> Vec<u8> {
        self.memory.lock().now.clone()
    }

    /// What a failure now would leave to chance.
    pub fn crash_point(&self) -> CrashPoint {
        let memory = self.memory.lock();
        CrashPoint {
            durable: memory.durable.clone(),
            pending: memory.pending.clone(),
            domain: self.domain,
            fences: memory.fences,
        }
    }

    /// Lets the recorder look.
    fn show(&self, memory: &mut Memory) {
        memory.fences += 1;
        if let Some(recorder) = &mut memory.recorder {
            recorder(&CrashPoint {
                durable: memory.durable.clone(),
                pending: memory.pending.clone(),
                domain: self.domain,
                fences: memory.fences,
            });
        }
    }

    fn store(&self, at: Addr, bytes: &[u8], way: Way) -> Result<(), Fault> {
        let mut memory = self.memory.lock();
        let (from, to) = (at.0 as usize, at.0 as usize + bytes.len());
        memory.check(from..to)?;
        memory.now[from..to].copy_from_slice(bytes);
        let mut atom = from / ATOM * ATOM;
        while atom < to {
            let value = memory.now[atom..atom + ATOM].try_into().expect("an atom has 8 bytes");
            // The edges of a non-temporal copy that are not whole atoms are cached stores with a flush.
            let whole = atom >= from && atom + ATOM <= to;
            let way = if way == Way::NonTemporal && !whole { Way::Flushed } else { way };
            let unit = if self.domain == Domain::PageCache { PAGE } else { LINE };
            memory.pending.entry(atom / unit).or_default().push(Atom { at: atom, value, way });
            atom += ATOM;
        }
        Ok(())
    }
}

impl Media for SimMedia {
    fn len(&self) -> u64 {
        self.len
    }

    fn domain(&self) -> Domain {
        self.domain
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        let range = at.0 as usize..at.0 as usize + dst.len();
        let memory = self.memory.lock();
        memory.check(range.clone())?;
        dst.copy_from_slice(&memory.now[range]);
        Ok(())
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        assert!(at.0.is_multiple_of(8));
        let mut b = [0; 8];
        self.read(at, &mut b)?;
        Ok(u64::from_le_bytes(b))
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        let range = at.0 as usize..at.0 as usize + len;
        let memory = self.memory.lock();
        memory.check(range.clone())?;
        Ok(crc32c(&memory.now[range], crc))
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        assert!(at.0.is_multiple_of(8));
        self.store(at, &value.to_le_bytes(), Way::Cached)?;
        Ok(Dirty::stored(at, 8))
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        self.store(at, src, Way::Cached)?;
        Ok(Dirty::stored(at, src.len()))
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        self.store(at, src, Way::NonTemporal)?;
        Ok(Flushed::issued())
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        self.store(at, src, Way::NonTemporal)?;
        Ok((crc32c(src, crc), Flushed::issued()))
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        self.copy_nt(at, &vec![0; len])
    }

    fn flush(&self, dirty: Dirty) -> Flushed {
        let mut memory = self.memory.lock();
        if dirty.is_empty() || self.domain == Domain::PageCache {
            return Flushed::issued();
        }
        let (from, to) = (dirty.at().0 as usize / LINE, (dirty.at().0 as usize + dirty.len() - 1) / LINE);
        for (_, atoms) in memory.pending.range_mut(from..=to) {
            for atom in atoms.iter_mut().filter(|a| a.way == Way::Cached) {
                atom.way = Way::Flushed;
            }
        }
        Flushed::issued()
    }

    fn fence(&self, _flushed: Flushed) -> Durable {
        let mut guard = self.memory.lock();
        let memory = &mut *guard;
        self.show(memory);
        if self.domain == Domain::PageCache {
            return Durable::fenced();
        }
        let all = self.domain == Domain::CpuCache;
        for atoms in memory.pending.values_mut() {
            // What was written back takes the line's earlier cached stores with it.
            let through = atoms.iter().rposition(|a| a.way == Way::Flushed);
            let mut kept = Vec::new();
            for (i, atom) in atoms.drain(..).enumerate() {
                let lasts = all || atom.way != Way::Cached || through.is_some_and(|t| i < t);
                if lasts {
                    atom.store(&mut memory.durable);
                    // Memory is coherent: an older store never comes back over a newer one.
                    kept.retain(|k: &Atom| k.at != atom.at);
                } else {
                    kept.push(atom);
                }
            }
            *atoms = kept;
        }
        memory.pending.retain(|_, atoms| !atoms.is_empty());
        Durable::fenced()
    }

    fn sync(&self) -> std::io::Result<()> {
        let mut guard = self.memory.lock();
        let memory = &mut *guard;
        if self.domain == Domain::PageCache {
            self.show(memory);
            memory.durable.copy_from_slice(&memory.now);
            memory.pending.clear();
        }
        Ok(())
    }
}
