//! Media in DRAM that remembers which stores are durable.
//!
//! **Fault model.** A store is a sequence of aligned 8-byte atoms.
//!
//! | domain | what a power failure leaves |
//! |---|---|
//! | `memory` | of each line a prefix of its cached stores, flushed or not; of non-temporal atoms any subset; all that was flushed or non-temporal before a fence |
//! | `cpu-cache` | of all cached stores together a prefix; of non-temporal atoms any subset; all before a fence |
//! | `page-cache` | of each page what it was at some moment since the last sync; a fence is nothing. Torn ([`SimMedia::tear_pages`]): of each sector |
//!
//! Poison: loads and stores that meet it fail. A *failed ADR* is a failure that takes fenced lines with it
//! ([`Keep::FailedAdr`]): nothing is promised then but that it is noticed or does no harm. What a device copies is in
//! `engine`.
//!
//! A [`CrashPoint`] is what one moment leaves to chance; `explore` makes states of it. Pages are shared and copied
//! on write, so that both are cheap.
//!
//! A **killed process** loses nothing: the next one sees all stores ([`CrashPoint::killed`]). Those that were flushed or
//! non-temporal last, because the kernel was entered behind them; in `memory` the others are in a cache still, and power may
//! fail before they leave it.
//!
//! Threads: a fence completes what its own thread flushed or stored past the caches, and nothing of others; in
//! `cpu-cache` also all cached stores before its thread's last one, because they have one order. Built with
//! `--cfg shuttle` each store, flush and fence is a moment at which another thread may go on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use smallvec::SmallVec;

use super::engine::Device;
use super::mutation::{Mutation, Step};
use super::undecided::{Open, Script, Undecided};
use crate::media::{Addr, Dirty, Domain, Durable, Fault, Flushed, LINE, Media, crc32c};

pub(super) const ATOM: usize = 8;
pub(super) const PAGE: usize = 4096;
/// What a disk takes as one.
const SECTOR: usize = 512;
/// Fenced lines that a failed ADR may take.
const FENCED_LINES_MAX: usize = 64;
const GROUP: usize = 16;
/// Of a page.
const LINES: usize = PAGE / LINE;
const _: () = assert!(LINES == u64::BITS as usize);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Cached,
    Flushed,
    NonTemporal,
}

/// One 8-byte store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Atom {
    pub at: usize,
    pub value: [u8; ATOM],
    pub way: Way,
    /// Who flushed it, or stored it if nobody did; a bit for each.
    pub by: u64,
    /// Its place in the program's order, over all media.
    pub seq: u64,
    /// The last one of its store.
    pub ends: bool,
}

impl Atom {
    /// Survives or not whatever becomes of the others.
    pub fn is_free(&self) -> bool {
        self.way == Way::NonTemporal
    }
}

/// What stores in doubt keep an order within.
fn unit_bytes(domain: Domain, torn_pages: bool) -> usize {
    match domain {
        Domain::PageCache if torn_pages => SECTOR,
        Domain::PageCache => PAGE,
        _ => LINE,
    }
}

/// Stores in doubt of one line (`page-cache`: of one page, or sector).
pub(super) struct Unit {
    /// Of the line, of the page or sector.
    pub number: usize,
    /// In program order.
    pub atoms: Vec<Atom>,
    /// Where each is, and its place in `atoms`: by address, those of one address in program order.
    by_address: Vec<(usize, u32)>,
}

/// By number.
pub(super) type Pending = Vec<Unit>;

impl Unit {
    fn new(number: usize, atoms: Vec<Atom>) -> Unit {
        let mut by_address: Vec<(usize, u32)> = (0..).zip(&atoms).map(|(n, a)| (a.at, n)).collect();
        by_address.sort_unstable();
        Unit { number, atoms, by_address }
    }

    /// The atoms of these bytes, and their places: those of one address in program order.
    pub fn atoms_by_address(&self, bytes: &Range<usize>) -> impl Iterator<Item = (usize, &Atom)> {
        let below = |end: usize| self.by_address.partition_point(|&(at, _)| at < end);
        let found = &self.by_address[below(bytes.start)..below(bytes.end)];
        found.iter().map(|&(_, n)| (n as usize, &self.atoms[n as usize]))
    }

    /// The same, all in program order.
    pub fn atoms_of(&self, bytes: &Range<usize>) -> impl Iterator<Item = (usize, &Atom)> {
        let mut found: SmallVec<[(usize, &Atom); 32]> = self.atoms_by_address(bytes).collect();
        found.sort_unstable_by_key(|&(n, _)| n);
        found.into_iter()
    }
}

/// Bytes, in pages and groups of pages that clones share until they are written.
#[derive(Clone)]
pub(super) struct Pages(Vec<Arc<[Page; GROUP]>>);

type Page = Arc<[u8; PAGE]>;

impl Pages {
    fn new(image: &[u8]) -> Pages {
        let zeros = Arc::new([0; PAGE]);
        let page = |bytes: &[u8]| {
            let mut page = [0; PAGE];
            page[..bytes.len()].copy_from_slice(bytes);
            if page == *zeros { zeros.clone() } else { Arc::new(page) }
        };
        let group = |bytes: &[u8]| {
            let mut pages = bytes.chunks(PAGE).map(page);
            Arc::new(std::array::from_fn(|_| pages.next().unwrap_or_else(|| zeros.clone())))
        };
        Pages(image.chunks(GROUP * PAGE).map(group).collect())
    }

    fn page(&self, n: usize) -> &[u8; PAGE] {
        &self.0[n / GROUP][n % GROUP]
    }

    fn page_mut(&mut self, n: usize) -> &mut [u8; PAGE] {
        Arc::make_mut(&mut Arc::make_mut(&mut self.0[n / GROUP])[n % GROUP])
    }

    /// The parts of a range by page: (page, where in it, where in the range).
    fn parts(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        let start = range.start;
        let mut at = start;
        std::iter::from_fn(move || {
            (at < range.end).then(|| {
                let (page, from) = (at / PAGE, at % PAGE);
                let len = (PAGE - from).min(range.end - at);
                let part = (page, from..from + len, at - start..at - start + len);
                at += len;
                part
            })
        })
    }

    fn read(&self, at: usize, dst: &mut [u8]) {
        for (page, from, to) in Pages::parts(at..at + dst.len()) {
            dst[to].copy_from_slice(&self.page(page)[from]);
        }
    }

    pub(super) fn write(&mut self, at: usize, src: &[u8]) {
        for (page, to, from) in Pages::parts(at..at + src.len()) {
            self.page_mut(page)[to].copy_from_slice(&src[from]);
        }
    }

    /// Words and where they are, one after the other; those of one page are stored together.
    fn write_words(&mut self, words: impl IntoIterator<Item = (usize, [u8; ATOM])>) {
        let mut words = words.into_iter().peekable();
        while let Some(&(first, _)) = words.peek() {
            let page = self.page_mut(first / PAGE);
            while let Some((at, value)) = words.next_if(|(at, _)| at / PAGE == first / PAGE) {
                page[at % PAGE..][..ATOM].copy_from_slice(&value);
            }
        }
    }

    fn word(&self, at: usize) -> [u8; ATOM] {
        self.page(at / PAGE)[at % PAGE..][..ATOM].try_into().expect("an atom has 8 bytes")
    }

    fn crc32c(&self, range: Range<usize>, crc: u32) -> u32 {
        Pages::parts(range).fold(crc, |crc, (page, from, _)| crc32c(&self.page(page)[from], crc))
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut image = vec![0; len];
        self.read(0, &mut image);
        image
    }
}

/// The lines of a page that bytes of it touch, a bit for each.
fn touched(bytes: &Range<usize>) -> u64 {
    lines(bytes.start / LINE..bytes.end.div_ceil(LINE))
}

/// Those of which they are all.
fn covered(bytes: &Range<usize>) -> u64 {
    lines(bytes.start.div_ceil(LINE)..bytes.end / LINE)
}

fn lines(range: Range<usize>) -> u64 {
    let below = |line: usize| if line == LINES { u64::MAX } else { (1 << line) - 1 };
    below(range.end) & !below(range.start)
}

/// What media have that come of others, as those had it.
#[derive(Clone, Default)]
struct Ways {
    /// What is left out on purpose.
    mutation: Option<Arc<Mutation>>,
    /// What copies to it.
    copying: Copying,
    /// Removals find no room for their records.
    crammed: bool,
    /// See [`SimMedia::tear_pages`].
    torn_pages: bool,
    poison: Vec<Range<usize>>,
}

struct Memory {
    /// What loads see, where it is decided.
    now: Pages,
    /// What surely survives; none where that is what loads see.
    durable: Option<Pages>,
    pending: BTreeMap<usize, Vec<Atom>>,
    stores: u64,
    fences: u64,
    /// Lines made durable last, and what they held before.
    fenced: VecDeque<(usize, [u8; LINE])>,
    /// Of a crashed media: what the failure left to chance and nobody has looked at yet.
    undecided: Option<Undecided>,
    /// Lines of which something may be left to chance still: of each page a bit for each.
    doubtful: Vec<u64>,
    /// Of a crashed media that was stored to: what the failure left, as far as it is decided.
    found: Option<Pages>,
    recorder: Option<Recorder>,
    /// Sees the media before each flush that has something to do.
    flush_recorder: Option<Recorder>,
    ways: Ways,
    /// Loads and stores since they are counted, and which of them fails.
    accesses: u64,
    fails: Option<(u64, Failing)>,
    /// The next of this line fails, and no other.
    fails_again: Option<Range<usize>>,
    syncs_fail: bool,
    /// The sync behind so many fails, and no other.
    sync_fails: Option<u64>,
    /// Stores up to this one should have been made durable by that one: their pages are taken for clean.
    forgotten: u64,
}

/// In front of a device for striped media two regions take turns so.
const STRIPE_BYTES: u64 = 4096;

/// Called before each fence and each sync with the state of the media: where a crash is worth looking at.
pub type Recorder = Box<dyn FnMut(&CrashPoint) + Send>;

/// How often a line fails that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    Once,
    /// Also when it is met next: who copies instead of a device meets it again.
    Twice,
    FromThenOn,
}

/// The media at a moment at which power may fail.
#[derive(Clone)]
pub struct CrashPoint {
    pub(super) durable: Pages,
    pub(super) pending: Arc<Pending>,
    fenced: VecDeque<(usize, [u8; LINE])>,
    ways: Ways,
    len: u64,
    pub(super) domain: Domain,
    /// Fences and syncs before it.
    pub fences: u64,
}

/// How data comes to the media.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copying {
    /// A device does it.
    pub engine: Option<Device>,
    /// The processor's checksum costs more than a fence at any size.
    pub fenced_first: bool,
}

/// See the file's head.
pub struct SimMedia {
    memory: Mutex<Memory>,
    /// Whether anything depends on what is [verified](Media::verified).
    asks: AtomicBool,
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
    /// One or two atoms, by chance, and what must be there if they are.
    Few(u64),
    /// All but one or two atoms, and what cannot be there without them.
    AllButFew(u64),
    /// By chance, from this seed.
    Random(u64),
    /// By chance, and of what was fenced last some lines are lost.
    FailedAdr(u64),
}

impl CrashPoint {
    /// Lines (`page-cache`: pages, or sectors) with stores in doubt.
    pub fn lines(&self) -> usize {
        self.pending.len()
    }

    /// Of each of those.
    pub(super) fn unit_bytes(&self) -> usize {
        unit_bytes(self.domain, self.ways.torn_pages)
    }

    /// An image that the failure may leave.
    pub fn image(&self, keep: Keep) -> Vec<u8> {
        self.kept(keep).bytes(self.len as usize)
    }

    /// As [`image`](CrashPoint::image), to be opened.
    pub fn media(&self, keep: Keep) -> SimMedia {
        self.found(self.kept(keep))
    }

    /// The same, nothing of which is shared with others: threads that copy and change the same pages wait for one another's counts.
    pub(super) fn apart(&self) -> CrashPoint {
        CrashPoint { durable: Pages::new(&self.durable.bytes(self.len as usize)), ..self.clone() }
    }

    /// What the next process finds if this one is killed here.
    pub fn killed(&self) -> SimMedia {
        let mut media = self.found(self.kept(Keep::Everything));
        let memory = media.memory.get_mut();
        let mut durable = self.durable.clone();
        for unit in self.pending.iter() {
            let through = match self.domain {
                Domain::Memory => unit.atoms.iter().rposition(|a| a.way == Way::Flushed),
                Domain::CpuCache => Some(unit.atoms.len()),
                Domain::PageCache | Domain::Volatile => None,
            };
            let mut kept: Vec<Atom> = Vec::new();
            for (i, atom) in unit.atoms.iter().enumerate() {
                if atom.is_free() || through.is_some_and(|t| i <= t) {
                    durable.write(atom.at, &atom.value);
                    kept.retain(|k| k.at != atom.at);
                } else {
                    kept.push(*atom);
                }
                memory.stores = memory.stores.max(atom.seq);
            }
            if !kept.is_empty() {
                memory.pending.insert(unit.number, kept);
            }
        }
        memory.durable = Some(durable);
        media
    }

    fn found(&self, pages: Pages) -> SimMedia {
        SimMedia::from_pages(pages, self.len, self.domain, self.ways.clone())
    }

    /// The media after the failure, what is in doubt decided by `script` when it is looked at first. Once it is gone, the
    /// choices beyond the script are behind it.
    pub(super) fn undecided(&self, script: Script) -> (SimMedia, Arc<Mutex<Option<Vec<Open>>>>) {
        let mut media = self.found(self.durable.clone());
        let met = Arc::default();
        let memory = media.memory.get_mut();
        memory.undecided = Some(Undecided::new(self, script, Arc::clone(&met)));
        memory.doubtful = vec![0; (self.len as usize).div_ceil(PAGE)];
        for (_, atom) in self.atoms() {
            memory.doubtful[atom.at / PAGE] |= 1 << (atom.at % PAGE / LINE);
        }
        (media, met)
    }

    /// How many states there are, as a power of two.
    pub(super) fn states_log2(&self) -> f64 {
        let mut ordered: BTreeMap<usize, u64> = BTreeMap::new();
        let mut free = 0;
        for (unit, atom) in self.atoms() {
            match atom.is_free() {
                true => free += 1,
                false => *ordered.entry(self.order(unit)).or_default() += 1,
            }
        }
        ordered.values().map(|&n| ((n + 1) as f64).log2()).sum::<f64>() + free as f64
    }

    fn kept(&self, keep: Keep) -> Pages {
        let mut image = self.durable.clone();
        let mut rng = Rng::new(match keep {
            Keep::Random(seed) | Keep::Few(seed) | Keep::AllButFew(seed) | Keep::FailedAdr(seed) => seed,
            _ => 0,
        });
        match keep {
            Keep::Nothing => {}
            Keep::Random(_) => self.keep_some(&mut rng, &mut image),
            Keep::FailedAdr(_) => {
                self.keep_some(&mut rng, &mut image);
                for (line, held) in self.fenced.iter().rev() {
                    if rng.below(4) == 0 {
                        image.write(line * LINE, held);
                    }
                }
            }
            Keep::Few(_) | Keep::AllButFew(_) => self.keep_few(keep, &mut rng, &mut image),
            Keep::Everything | Keep::AllBut(_) | Keep::Only(_) => {
                for (n, unit) in self.pending.iter().enumerate() {
                    let keeps = match keep {
                        Keep::AllBut(line) => line != n,
                        Keep::Only(line) => line == n,
                        _ => true,
                    };
                    if keeps {
                        image.write_words(unit.atoms.iter().map(|a| (a.at, a.value)));
                    }
                }
            }
        }
        image
    }

    /// All atoms in doubt, with their units.
    fn atoms(&self) -> impl Iterator<Item = (usize, &Atom)> {
        self.pending.iter().flat_map(|unit| unit.atoms.iter().map(move |a| (unit.number, a)))
    }

    /// What each ordered atom keeps its order with: its line, its page or sector, or everything.
    pub(super) fn order(&self, unit: usize) -> usize {
        if self.domain == Domain::CpuCache { 0 } else { unit }
    }

    fn keep_few(&self, keep: Keep, rng: &mut Rng, image: &mut Pages) {
        let atoms: Vec<(usize, &Atom)> = self.atoms().collect();
        if atoms.is_empty() {
            return;
        }
        let chosen: Vec<(usize, &Atom)> =
            (0..2).map(|_| atoms[rng.below(atoms.len() as u64) as usize]).collect();
        let all_but = matches!(keep, Keep::AllButFew(_));
        let mut kept: Vec<&Atom> = Vec::new();
        for &(unit, atom) in &atoms {
            let touched = |&&(u, c): &&(usize, &Atom)| {
                let tied = !c.is_free() && !atom.is_free() && self.order(u) == self.order(unit);
                c.seq == atom.seq || tied && if all_but { c.seq < atom.seq } else { c.seq > atom.seq }
            };
            if chosen.iter().any(|c| touched(&c)) != all_but {
                kept.push(atom);
            }
        }
        kept.sort_by_key(|a| a.seq);
        image.write_words(kept.iter().map(|a| (a.at, a.value)));
    }

    /// A prefix of the ordered stores, any subset of the non-temporal ones.
    fn keep_some(&self, rng: &mut Rng, image: &mut Pages) {
        // In one order everything has one moment.
        let moment = self.domain == Domain::CpuCache;
        let (first, last) = (
            self.atoms().map(|(_, a)| a.seq).min().unwrap_or(0),
            self.atoms().map(|(_, a)| a.seq).max().unwrap_or(0),
        );
        let until = match rng.below(3) {
            0 => last,
            _ => first + rng.below(last + 1 - first),
        };
        for Unit { atoms, .. } in self.pending.iter() {
            let ordered = atoms.iter().filter(|a| !a.is_free()).count();
            let mut prefix = match rng.below(4) {
                0 => 0,
                1 => ordered,
                _ => rng.below(ordered as u64 + 1) as usize,
            };
            // Whole lines are the most likely survivors: half of the time all atoms share one fate.
            let fate = rng.below(4);
            for atom in atoms {
                let keeps = if atom.is_free() {
                    match fate {
                        0 => true,
                        1 => false,
                        _ => rng.below(2) == 0,
                    }
                } else if moment {
                    atom.seq <= until
                } else if prefix > 0 {
                    prefix -= 1;
                    true
                } else {
                    false
                };
                if keeps {
                    image.write(atom.at, &atom.value);
                }
            }
        }
    }
}

impl Memory {
    fn check(&mut self, bytes: Range<usize>) -> Result<(), Fault> {
        self.accesses += 1;
        if let Some((_, failing)) = self.fails.take_if(|(nth, _)| *nth == self.accesses) {
            // In the middle, where there is one.
            let line = (bytes.start + bytes.len() / 2) / LINE * LINE;
            match failing {
                Failing::Once => {}
                Failing::Twice => self.fails_again = Some(line..line + LINE),
                Failing::FromThenOn => self.ways.poison.push(line..line + LINE),
            }
            return Err(Fault { at: Addr(line.max(bytes.start) as u64) });
        }
        if let Some(line) = self.fails_again.take_if(|line| line.start < bytes.end && bytes.start < line.end)
        {
            return Err(Fault { at: Addr(line.start.max(bytes.start) as u64) });
        }
        match self.ways.poison.iter().find(|p| p.start < bytes.end && bytes.start < p.end) {
            Some(p) => Err(Fault { at: Addr(p.start.max(bytes.start) as u64) }),
            None => Ok(()),
        }
    }

    /// Decides what these bytes are, before they are looked at; whether anything was in doubt.
    fn decide(&mut self, bytes: Range<usize>) -> bool {
        let Some(undecided) = &mut self.undecided else { return false };
        if Pages::parts(bytes.clone()).all(|(page, part, _)| self.doubtful[page] & touched(&part) == 0) {
            return false;
        }
        for (page, part, _) in Pages::parts(bytes.clone()) {
            self.doubtful[page] &= !covered(&part);
        }
        let mut words: SmallVec<[(usize, [u8; ATOM]); 64]> = SmallVec::new();
        undecided.decide(bytes, &mut |at, value| words.push((at, value)));
        for pages in [Some(&mut self.now), self.durable.as_mut(), self.found.as_mut()].into_iter().flatten() {
            pages.write_words(words.iter().copied());
        }
        true
    }

    /// How many of these bytes, from the first on, are not in doubt. None where an access may fail: then each is one of its own.
    fn certain(&self, bytes: Range<usize>) -> usize {
        if self.fails.is_some() || self.fails_again.is_some() || !self.ways.poison.is_empty() {
            return 0;
        }
        if self.undecided.is_none() {
            return bytes.len();
        }
        for (page, part, ahead) in Pages::parts(bytes.clone()) {
            let doubtful = self.doubtful[page] & touched(&part);
            if doubtful != 0 {
                let line = doubtful.trailing_zeros() as usize * LINE;
                return ahead.start + line.saturating_sub(part.start);
            }
        }
        bytes.len()
    }

    /// Of a page cache: what it does not take for clean after a sync that failed.
    fn dirty_pages(&self) -> BTreeSet<usize> {
        let since = |atoms: &[Atom]| atoms.iter().any(|a| a.seq > self.forgotten);
        self.pending.values().filter(|atoms| since(atoms)).map(|atoms| page_of(atoms)).collect()
    }

    fn durable(&self) -> &Pages {
        self.durable.as_ref().unwrap_or(&self.now)
    }

    /// What surely survives, of its own from now on: loads are about to see something else.
    fn own_durable(&mut self) -> &mut Pages {
        if self.found.is_none() && self.undecided.is_some() {
            self.found = Some(self.now.clone());
        }
        self.durable.get_or_insert_with(|| self.now.clone())
    }

    fn crash_point(&self, len: u64, domain: Domain) -> CrashPoint {
        CrashPoint {
            durable: self.durable().clone(),
            pending: Arc::new(
                self.pending.iter().map(|(&unit, atoms)| Unit::new(unit, atoms.clone())).collect(),
            ),
            fenced: self.fenced.clone(),
            ways: self.ways.clone(),
            len,
            domain,
            fences: self.fences,
        }
    }

    /// Whether the step that the caller's caller takes is one to leave out.
    #[track_caller]
    fn leaves_out(&self, step: Step) -> bool {
        let caller = Location::caller();
        self.ways.mutation.as_ref().is_some_and(|m| m.meets(step, Some(caller)))
    }

    /// Atoms survive from now on.
    fn settle(&mut self, atoms: &[Atom]) {
        for atoms in atoms.chunk_by(|a, b| a.at / LINE == b.at / LINE) {
            let line = atoms[0].at / LINE;
            if self.fenced.back().is_none_or(|(last, _)| *last != line) {
                let mut held = [0; LINE];
                self.durable().read(line * LINE, &mut held);
                self.fenced.push_back((line, held));
                if self.fenced.len() > FENCED_LINES_MAX {
                    self.fenced.pop_front();
                }
            }
            self.own_durable().write_words(atoms.iter().map(|a| (a.at, a.value)));
        }
    }
}

/// Of a unit, which has no part in another.
fn page_of(unit: &[Atom]) -> usize {
    unit[0].at / PAGE
}

/// Of 64 who may have stored: so many are threads, the others copies of a device.
const THREADS: usize = 32;

/// The calling thread, or a device's copy.
fn me() -> u64 {
    match super::engine::job() {
        Some(job) => 1 << (THREADS + job as usize % (u64::BITS as usize - THREADS)),
        None => 1 << (crate::sync::thread::slot() as usize % THREADS),
    }
}

/// Another thread may go on here, where a scheduler decides who does.
fn moment() {
    #[cfg(shuttle)]
    {
        use crate::sync::primitive::atomic::{AtomicBool, Ordering};
        AtomicBool::new(false).load(Ordering::SeqCst);
    }
}

/// xorshift: the same sequence for the same seed, everywhere.
#[derive(Clone)]
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
        SimMedia::from_pages(Pages::new(&image), image.len() as u64, domain, Ways::default())
    }

    fn from_pages(pages: Pages, len: u64, domain: Domain, ways: Ways) -> SimMedia {
        let asks = AtomicBool::new(ways.mutation.is_some());
        let memory = Memory {
            durable: None,
            now: pages,
            pending: BTreeMap::new(),
            stores: 0,
            fences: 0,
            fenced: VecDeque::new(),
            undecided: None,
            doubtful: Vec::new(),
            found: None,
            recorder: None,
            flush_recorder: None,
            ways,
            accesses: 0,
            fails: None,
            fails_again: None,
            syncs_fail: false,
            sync_fails: None,
            forgotten: 0,
        };
        SimMedia { memory: Mutex::new(memory), asks, len, domain }
    }

    /// From now on `recorder` sees the media before each fence.
    pub fn record(&self, recorder: Option<Recorder>) {
        self.memory.lock().recorder = recorder;
    }

    /// From now on `recorder` sees the media before each flush of what is in no memory yet: where a killed process leaves
    /// more than power could take before.
    pub fn record_flushes(&self, recorder: Option<Recorder>) {
        self.memory.lock().flush_recorder = recorder;
    }

    /// From now on loads and stores of these bytes fail.
    pub fn poison(&self, bytes: Range<usize>) {
        self.memory.lock().ways.poison.push(bytes);
    }

    /// The `nth` load or store from now on fails, the first being 1, and of others of the line that it met those that `failing` says.
    pub fn fail_access(&self, nth: u64, failing: Failing) {
        let mut memory = self.memory.lock();
        (memory.accesses, memory.fails) = (0, Some((nth, failing)));
    }

    /// Loads and stores since [`fail_access`](SimMedia::fail_access), and what fails from now on, which is nothing more.
    pub fn accesses(&self) -> u64 {
        let mut memory = self.memory.lock();
        (memory.fails, memory.fails_again) = (None, None);
        memory.accesses
    }

    /// Whether part of it is bad.
    pub fn is_bad(&self) -> bool {
        !self.memory.lock().ways.poison.is_empty()
    }

    /// Whether of what a failure left in doubt something is there in part, as far as it is decided.
    pub(super) fn is_torn(&self) -> bool {
        self.memory.lock().undecided.as_ref().is_some_and(Undecided::is_torn)
    }

    /// Whether syncs fail from now on. What they should have made durable stays in doubt.
    pub fn fail_syncs(&self, fail: bool) {
        self.memory.lock().syncs_fail = fail;
    }

    /// The next sync fails, and those behind it succeed without what it should have made durable: that stays in doubt
    /// until its page is stored to again, as with Linux, which says so once and takes the pages for clean.
    pub fn fail_sync_once(&self) {
        self.fail_sync_behind(0);
    }

    /// The same, of the sync that comes after so many.
    pub fn fail_sync_behind(&self, syncs: u64) {
        self.memory.lock().sync_fails = Some(syncs);
    }

    /// One bit of a byte goes wrong, durably.
    pub fn flip(&self, at: usize, bit: u32) {
        let mut memory = self.memory.lock();
        let mut byte = [0];
        memory.now.read(at, &mut byte);
        byte[0] ^= 1 << bit;
        memory.own_durable().write(at, &byte);
        memory.now.write(at, &byte);
    }

    /// What loads see, as if everything had been written back.
    pub fn image(&self) -> Vec<u8> {
        let mut memory = self.memory.lock();
        self.look(&mut memory, 0..self.len as usize);
        memory.now.bytes(self.len as usize)
    }

    /// Media with what loads see, all of it durable. Shares pages with this one.
    pub fn copy(&self) -> SimMedia {
        let mut memory = self.memory.lock();
        self.look(&mut memory, 0..self.len as usize);
        self.left(&memory, memory.now.clone())
    }

    /// The media as the failure left it, before anything was stored since: what was looked at is what it was, of
    /// the rest nothing is there. Of media after no failure, what surely survives.
    pub fn as_found(&self) -> SimMedia {
        let memory = self.memory.lock();
        self.left(&memory, memory.found.as_ref().unwrap_or(memory.durable()).clone())
    }

    /// The same, and of the rest everything is there that can be.
    pub fn as_left(&self) -> SimMedia {
        let memory = self.memory.lock();
        let mut pages = memory.found.as_ref().unwrap_or(memory.durable()).clone();
        if let Some(undecided) = &memory.undecided {
            undecided.rest(&mut |at, value| pages.write(at, &value));
        }
        self.left(&memory, pages)
    }

    fn left(&self, memory: &Memory, pages: Pages) -> SimMedia {
        SimMedia::from_pages(pages, self.len, self.domain, memory.ways.clone())
    }

    /// From now on file systems on it copy data so.
    pub fn copied(&self, copying: Copying) {
        self.memory.lock().ways.copying = copying;
    }

    /// From now on, and in all media that come of this one, a page of an ordinary file is of several moments, one for each sector: the
    /// kernel hands it over while others store to it.
    pub fn tear_pages(&self) {
        let mut memory = self.memory.lock();
        memory.ways.torn_pages = true;
        let unit = unit_bytes(self.domain, true);
        for atom in std::mem::take(&mut memory.pending).into_values().flatten() {
            memory.pending.entry(atom.at / unit).or_default().push(atom);
        }
    }

    /// From now on removals find no room for their records.
    pub fn cram(&self) {
        self.memory.lock().ways.crammed = true;
    }

    pub fn is_crammed(&self) -> bool {
        self.memory.lock().ways.crammed
    }

    /// The device that copies.
    pub fn engine(&self) -> Option<Device> {
        self.memory.lock().ways.copying.engine
    }

    fn is_striped(&self) -> bool {
        self.engine().is_some_and(|device| device.striped)
    }

    /// From now on, and in all media that come of this one, something is left out or noted.
    pub fn mutate(&self, mutation: Option<Arc<Mutation>>) {
        let mut memory = self.memory.lock();
        memory.ways.mutation = mutation;
        self.note(&memory);
    }

    /// What a failure now would leave to chance.
    pub fn crash_point(&self) -> CrashPoint {
        self.memory.lock().crash_point(self.len, self.domain)
    }

    /// Lets the recorder look.
    fn show(&self, memory: &mut Memory) {
        memory.fences += 1;
        if let Some(mut recorder) = memory.recorder.take() {
            recorder(&memory.crash_point(self.len, self.domain));
            memory.recorder = Some(recorder);
        }
    }

    /// Decides what bytes are that somebody is about to look at.
    fn look(&self, memory: &mut Memory, bytes: Range<usize>) {
        if memory.decide(bytes) {
            self.note(memory);
        }
    }

    /// Remembers whether [`Media::verified`] has to look.
    fn note(&self, memory: &Memory) {
        let asks = memory.ways.mutation.is_some() || memory.undecided.as_ref().is_some_and(Undecided::asks);
        // Whoever reads and verifies is one thread.
        self.asks.store(asks, Ordering::Relaxed);
    }

    fn store(&self, at: Addr, bytes: &[u8], way: Way) -> Result<(), Fault> {
        moment();
        let me = me();
        let mut memory = self.memory.lock();
        let (from, mut to) = (at.0 as usize, at.0 as usize + bytes.len());
        let failed = memory.check(from..to).err();
        // What is in front of the line that failed was stored.
        if let Some(fault) = failed {
            to = fault.at.0 as usize;
        }
        if from == to {
            return failed.map_or(Ok(()), Err);
        }
        let bytes = &bytes[..to - from];
        let (first, last) = (from / ATOM * ATOM, to.next_multiple_of(ATOM));
        // Of words that are stored in part the rest is looked at.
        for edge in [from, to].into_iter().filter(|edge| !edge.is_multiple_of(ATOM)) {
            let word = edge / ATOM * ATOM;
            self.look(&mut memory, word..word + ATOM);
        }
        if let Some(undecided) = &mut memory.undecided {
            undecided.overwrite(first..last);
        }
        memory.own_durable();
        memory.now.write(from, bytes);
        let unit = unit_bytes(self.domain, memory.ways.torn_pages);
        for at in (first..last).step_by(ATOM) {
            let value = memory.now.word(at);
            // The edges of a non-temporal copy that are not whole atoms are cached stores with a flush.
            let whole = at >= from && at + ATOM <= to;
            let way = match way {
                _ if self.domain == Domain::PageCache => Way::Cached,
                Way::NonTemporal if !whole => Way::Flushed,
                way => way,
            };
            memory.stores += 1;
            let atom = Atom { at, value, way, by: me, seq: memory.stores, ends: at + ATOM == last };
            memory.pending.entry(at / unit).or_default().push(atom);
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Media for SimMedia {
    const OBSERVED: bool = true;

    fn len(&self) -> u64 {
        self.len
    }

    fn domain(&self) -> Domain {
        self.domain
    }

    fn regions(&self) -> usize {
        if self.is_striped() { 2 } else { 1 }
    }

    fn region(&self, at: Addr) -> (usize, u64) {
        match self.is_striped() {
            true => ((at.0 / STRIPE_BYTES % 2) as usize, STRIPE_BYTES - at.0 % STRIPE_BYTES),
            false => (0, self.len - at.0),
        }
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        let range = at.0 as usize..at.0 as usize + dst.len();
        let mut memory = self.memory.lock();
        memory.check(range.clone())?;
        self.look(&mut memory, range);
        memory.now.read(at.0 as usize, dst);
        Ok(())
    }

    fn certain(&self, at: Addr, len: usize) -> usize {
        self.memory.lock().certain(at.0 as usize..at.0 as usize + len)
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        assert!(at.0.is_multiple_of(8));
        let mut b = [0; 8];
        self.read(at, &mut b)?;
        Ok(u64::from_le_bytes(b))
    }

    fn crc32c(&self, at: Addr, len: usize, crc: u32) -> Result<u32, Fault> {
        let range = at.0 as usize..at.0 as usize + len;
        let mut memory = self.memory.lock();
        memory.check(range.clone())?;
        self.look(&mut memory, range.clone());
        Ok(memory.now.crc32c(range, crc))
    }

    #[track_caller]
    fn verified(&self, parts: &[(Addr, usize)], matches: bool) -> bool {
        if !self.asks.load(Ordering::Relaxed) {
            return matches;
        }
        let mut memory = self.memory.lock();
        if let Some(undecided) = &mut memory.undecided {
            undecided.verified(parts);
        }
        self.note(&memory);
        matches | memory.leaves_out(Step::Check)
    }

    fn refuses_removals(&self) -> bool {
        self.is_crammed()
    }

    fn omits(&self, step: &'static str) -> bool {
        let memory = self.memory.lock();
        memory.ways.mutation.as_ref().is_some_and(|m| m.meets(Step::Named(step), None))
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

    fn two_fence_bytes(&self) -> usize {
        if self.memory.lock().ways.copying.fenced_first { 0 } else { 16 << 10 }
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], crc: u32) -> Result<(u32, Flushed), Fault> {
        self.store(at, src, Way::NonTemporal)?;
        Ok((crc32c(src, crc), Flushed::issued()))
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        self.copy_nt(at, &vec![0; len])
    }

    #[track_caller]
    fn flush(&self, dirty: Dirty) -> Flushed {
        moment();
        let me = me();
        let mut memory = self.memory.lock();
        // Caches that power loss does not empty have nothing to leave out; but what another thread stored is then this one's to
        // fence.
        let left_out = self.domain == Domain::Memory && memory.leaves_out(Step::Flush);
        if dirty.is_empty() || self.domain == Domain::PageCache || left_out {
            return Flushed::issued();
        }
        let (from, to) = (dirty.at().0 as usize / LINE, (dirty.at().0 as usize + dirty.len() - 1) / LINE);
        if memory.flush_recorder.is_some() {
            let is_cached = |a: &Atom| a.way == Way::Cached;
            if memory.pending.range(from..=to).any(|(_, atoms)| atoms.iter().any(is_cached)) {
                let point = memory.crash_point(self.len, self.domain);
                memory.flush_recorder.as_mut().expect("it is there")(&point);
            }
        }
        for (_, atoms) in memory.pending.range_mut(from..=to) {
            for atom in atoms.iter_mut() {
                match atom.way {
                    Way::Cached => (atom.way, atom.by) = (Way::Flushed, me),
                    Way::Flushed => atom.by |= me,
                    Way::NonTemporal => {}
                }
            }
        }
        Flushed::issued()
    }

    #[track_caller]
    fn fence(&self, _flushed: Flushed) -> Durable {
        moment();
        let me = me();
        let mut guard = self.memory.lock();
        let memory = &mut *guard;
        self.show(memory);
        if self.domain == Domain::PageCache || memory.leaves_out(Step::Fence) {
            return Durable::fenced();
        }
        let mine = |a: &Atom| a.by & me != 0;
        // In one order everything before the thread's last store is there with it.
        let seen = match self.domain {
            Domain::CpuCache => {
                memory.pending.values().flatten().filter(|a| !a.is_free() && mine(a)).map(|a| a.seq).max()
            }
            _ => None,
        };
        for (line, atoms) in std::mem::take(&mut memory.pending) {
            // What was written back takes the line's earlier cached stores with it.
            let through = atoms.iter().rposition(|a| a.way == Way::Flushed && mine(a));
            let (mut kept, mut lasting): (Vec<Atom>, Vec<Atom>) = (Vec::new(), Vec::new());
            for (i, atom) in atoms.into_iter().enumerate() {
                let lasts = match atom.is_free() {
                    true => mine(&atom),
                    false => through.is_some_and(|t| i <= t) || seen.is_some_and(|last| atom.seq <= last),
                };
                if lasts {
                    // Memory is coherent: an older store never comes back over a newer one.
                    kept.retain(|k| k.at != atom.at);
                    lasting.push(atom);
                } else {
                    kept.push(atom);
                }
            }
            memory.settle(&lasting);
            if !kept.is_empty() {
                memory.pending.insert(line, kept);
            }
        }
        Durable::fenced()
    }

    #[track_caller]
    fn sync(&self) -> std::io::Result<()> {
        let mut guard = self.memory.lock();
        let memory = &mut *guard;
        if self.domain == Domain::PageCache {
            self.show(memory);
            if memory.syncs_fail {
                return Err(std::io::Error::from_raw_os_error(libc::EIO));
            }
            let before = memory.sync_fails.take();
            memory.sync_fails = before.and_then(|syncs| syncs.checked_sub(1));
            if before == Some(0) {
                memory.forgotten = memory.stores;
                return Err(std::io::Error::from_raw_os_error(libc::EIO));
            }
            if memory.leaves_out(Step::Sync) {
                return Ok(());
            }
            if memory.forgotten == 0 {
                memory.durable = None;
                memory.pending.clear();
                return Ok(());
            }
            let dirty = memory.dirty_pages();
            for (unit, atoms) in std::mem::take(&mut memory.pending) {
                match dirty.contains(&page_of(&atoms)) {
                    true => memory.settle(&atoms),
                    false => drop(memory.pending.insert(unit, atoms)),
                }
            }
        }
        Ok(())
    }

    /// Pages that are taken for clean show what is there.
    fn drop_cached(&self) {
        let mut guard = self.memory.lock();
        let memory = &mut *guard;
        if memory.forgotten == 0 {
            return;
        }
        let dirty = memory.dirty_pages();
        let Memory { now, durable, pending, .. } = memory;
        pending.retain(|_, atoms| {
            let page = page_of(atoms);
            let is_dirty = dirty.contains(&page);
            if !is_dirty {
                let there = durable.as_ref().unwrap_or(now).page(page);
                *now.page_mut(page) = *there;
            }
            is_dirty
        });
    }
}
