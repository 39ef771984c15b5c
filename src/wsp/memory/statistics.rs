//! Who has what of a memory, as numbers.

use std::sync::atomic::Ordering;

use super::ground::PAGE;
use super::{Memory, hooks};

/// A memory at one moment; the parts are read one after the other.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Bytes that the media has for all processes.
    pub media_bytes: usize,
    /// Bytes that this process claimed, in use or idle.
    pub claimed_bytes: usize,
    /// Bytes of claimed ones that the host keeps in DRAM or on the media just now.
    pub resident_bytes: usize,
    /// Bytes of claimed ones that were in use at a fork: what is stored there since is in DRAM.
    pub frozen_bytes: usize,
    /// Bytes of extents on media.
    pub extent_bytes: usize,
    /// Bytes of extents that a process before a fork had on media.
    pub inherited_bytes: usize,
    /// Bytes of extents in DRAM, because the media was full.
    pub dram_bytes: usize,
    /// Extents that got DRAM, so far.
    pub fallen_back: usize,
    /// Extents that were refused, so far.
    pub refused: usize,
    pub arenas: Vec<ArenaStatistics>,
}

/// One arena.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArenaStatistics {
    /// jemalloc's number.
    pub index: usize,
    /// Bytes of pages that hold something in use.
    pub active_bytes: usize,
    /// Bytes of pages that are kept for later use.
    pub dirty_bytes: usize,
    pub extents: usize,
    pub extent_bytes: usize,
    pub dram_bytes: usize,
}

impl Memory {
    pub fn statistics(&self) -> Statistics {
        hooks::refresh();
        let arenas = self.lanes.iter().map(|lane| {
            let pages = hooks::pages_of(lane.index);
            ArenaStatistics {
                index: lane.index,
                active_bytes: pages.active * PAGE,
                dirty_bytes: pages.dirty * PAGE,
                extents: lane.arena.extents(),
                extent_bytes: lane.arena.media_bytes(),
                dram_bytes: lane.arena.dram_bytes(),
            }
        });
        let arenas = arenas.collect();
        let counts = &self.heap.counts;
        let of_ground = self.heap.ground.enter().map(|ground| {
            let own = |units: usize| if ground.inherited { 0 } else { units * ground.unit_bytes };
            (ground.bytes(), own(ground.owned), own(ground.frozen), ground.resident_bytes())
        });
        let (media_bytes, claimed_bytes, frozen_bytes, resident_bytes) = of_ground.unwrap_or_default();
        Statistics {
            media_bytes,
            claimed_bytes,
            resident_bytes,
            frozen_bytes,
            extent_bytes: counts.media_bytes.load(Ordering::Relaxed),
            inherited_bytes: counts.inherited_bytes.load(Ordering::Relaxed),
            dram_bytes: counts.dram_bytes.load(Ordering::Relaxed),
            fallen_back: counts.fallen_back.load(Ordering::Relaxed),
            refused: counts.refused.load(Ordering::Relaxed),
            arenas,
        }
    }
}
