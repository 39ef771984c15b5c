//! One memory: ground on media behind a gate, DRAM where that is full, and who got how much of which.
//!
//! Extents that are not on media are plain anonymous mappings, and told apart by their address. A child of a fork has
//! a third kind, what it inherited from its parent's ground: private memory at addresses that are nobody's ground any more.
//! It goes back to the kernel as DRAM does.

use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::gate::Gate;
use super::ground::{Ground, PAGE};
use crate::limits::MEMORIES_MAX;

/// What an allocation gets when the media is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Full {
    /// DRAM, which is counted.
    #[default]
    Dram,
    /// Nothing: ENOMEM.
    Fail,
}

/// See the file's head.
pub(super) struct Heap {
    pub ground: Gate<Ground>,
    full: Full,
    places: &'static Places,
    /// Forks that made this process.
    pub generation: AtomicUsize,
    pub counts: Counts,
}

/// Addresses of one heap. They stand for ever, so that anybody may ask where an address lies while heaps come and go: whoever
/// asks has it in use, and so its own heap stands; of another one that changes just now it hears something that does no harm.
struct Places {
    /// 0: nobody's.
    bytes: AtomicUsize,
    /// Of the ground, as it was last seen under the gate.
    base: AtomicUsize,
    /// What this process inherited, from its youngest ancestors.
    inherited: [AtomicUsize; GENERATIONS_MAX],
}

static PLACES: [Places; MEMORIES_MAX] = [const {
    Places {
        bytes: AtomicUsize::new(0),
        base: AtomicUsize::new(0),
        inherited: [const { AtomicUsize::new(0) }; GENERATIONS_MAX],
    }
}; MEMORIES_MAX];

/// How many places were ever taken: behind them nobody looks.
static PLACES_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Forks in a row whose addresses are known for what they are; memory of older ones counts as DRAM when it is freed.
const GENERATIONS_MAX: usize = 16;

/// What extents come to, in bytes; and how often.
#[derive(Default)]
pub(super) struct Counts {
    pub media_bytes: AtomicUsize,
    pub dram_bytes: AtomicUsize,
    pub inherited_bytes: AtomicUsize,
    /// Extents that got DRAM, or nothing, because the media was full.
    pub fallen_back: AtomicUsize,
    pub refused: AtomicUsize,
}

/// Where an extent lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Media,
    Inherited,
    Dram,
}

/// Whether an address is of some heap's ground, or was in an ancestor.
pub(super) fn on_media(address: usize) -> bool {
    let taken = &PLACES[..PLACES_TAKEN.load(Ordering::Acquire)];
    taken.iter().any(|places| places.of(address) != Place::Dram)
}

impl Places {
    fn take(bytes: usize) -> Option<&'static Places> {
        let number = PLACES.iter().position(|places| {
            places.bytes.compare_exchange(0, bytes, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })?;
        PLACES_TAKEN.fetch_max(number + 1, Ordering::Release);
        Some(&PLACES[number])
    }

    fn give_back(&self) {
        for base in self.inherited.iter().chain([&self.base]) {
            base.store(0, Ordering::Relaxed);
        }
        self.bytes.store(0, Ordering::Release);
    }

    /// Asked when anything is freed. Few have inherited anything: the youngest comes first, and behind the last there is none.
    #[inline]
    fn of(&self, address: usize) -> Place {
        let bytes = self.bytes.load(Ordering::Acquire);
        let within = |base: usize| base != 0 && address.wrapping_sub(base) < bytes;
        if within(self.base.load(Ordering::Relaxed)) {
            return Place::Media;
        }
        let inherited = self.inherited.iter().map(|base| base.load(Ordering::Relaxed));
        match inherited.take_while(|base| *base != 0).any(within) {
            true => Place::Inherited,
            false => Place::Dram,
        }
    }
}

impl Heap {
    /// None where too many are open.
    pub fn new(ground: Ground, full: Full) -> Option<Heap> {
        let places = Places::take(ground.bytes())?;
        places.base.store(ground.base, Ordering::Relaxed);
        let generation = AtomicUsize::new(0);
        Some(Heap { ground: Gate::new(ground), full, places, generation, counts: Counts::default() })
    }

    pub fn place(&self, address: usize) -> Place {
        self.places.of(address)
    }

    /// In a child: what was its parent's ground is its inheritance.
    pub fn inherit(&self, base: usize) {
        if self.places.base.swap(0, Ordering::Relaxed) == 0 {
            return;
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        let inherited = &self.places.inherited;
        for slot in (1..GENERATIONS_MAX).rev() {
            inherited[slot].store(inherited[slot - 1].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        inherited[0].store(base, Ordering::Relaxed);
        let media = self.counts.media_bytes.swap(0, Ordering::Relaxed);
        self.counts.inherited_bytes.fetch_add(media, Ordering::Relaxed);
    }

    /// Memory of whole pages, at `wanted` if that is not 0; and whether it is known to be zeros. None where there is none.
    pub fn alloc(&self, wanted: usize, bytes: usize, align: usize) -> Option<(*mut u8, bool)> {
        let mut is_full = true;
        if let Some(mut ground) = self.ground.enter() {
            let granted = match wanted {
                0 => ground.alloc(bytes, align),
                _ if self.place(wanted) == Place::Media => ground.alloc_at(wanted, bytes),
                _ => None,
            };
            self.places.base.store(if ground.inherited { 0 } else { ground.base }, Ordering::Relaxed);
            if let Some(granted) = granted {
                self.counts.media_bytes.fetch_add(bytes, Ordering::Relaxed);
                return Some((with_exposed_provenance_mut(granted.address), granted.zeroed));
            }
        } else {
            // In the middle of a fork there is no other way, whatever was asked for.
            is_full = false;
        }
        if wanted != 0 {
            return None;
        }
        if is_full && self.full == Full::Fail {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let got = map_dram(bytes, align);
        if !got.is_null() {
            self.counts.fallen_back.fetch_add(is_full as usize, Ordering::Relaxed);
            self.counts.dram_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        (!got.is_null()).then_some((got, true))
    }

    /// Takes back what [`alloc`](Heap::alloc) gave, in whatever pieces. False where it stays with the caller: in the middle of
    /// a fork.
    ///
    /// # Safety
    ///
    /// Nobody uses it any more.
    pub unsafe fn free(&self, address: usize, bytes: usize) -> bool {
        let count = match self.place(address) {
            Place::Media => {
                let Some(mut ground) = self.ground.enter() else { return false };
                ground.free(address, bytes);
                self.counts.media_bytes.fetch_sub(bytes, Ordering::Relaxed);
                return true;
            }
            Place::Inherited => &self.counts.inherited_bytes,
            Place::Dram => &self.counts.dram_bytes,
        };
        // SAFETY: private pages that nobody uses, by contract.
        let _ = unsafe { munmap(with_exposed_provenance_mut(address), bytes) };
        // What was there before this heap is not in its counts.
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(bytes)));
        true
    }

    /// Whether two neighbours may be taken for one: they go back to the same place.
    pub fn may_merge(&self, one: usize, other: usize) -> bool {
        self.place(one) == self.place(other)
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.places.give_back();
    }
}

/// Anonymous memory at a multiple of `align`; null where there is none.
fn map_dram(bytes: usize, align: usize) -> *mut u8 {
    let Some(reserved) = bytes.checked_add(align.saturating_sub(PAGE)) else { return null_mut() };
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: new addresses, chosen by the kernel.
    let Ok(start) = (unsafe { mmap_anonymous(null_mut(), reserved, prot, flags) }) else { return null_mut() };
    let start = start.expose_provenance();
    let at = start.next_multiple_of(align.max(PAGE));
    for (from, to) in [(start, at), (at + bytes, start + reserved)] {
        if to > from {
            // SAFETY: the ends of what was mapped just now.
            let _ = unsafe { munmap(with_exposed_provenance_mut(from), to - from) };
        }
    }
    with_exposed_provenance_mut(at)
}
