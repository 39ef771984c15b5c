//! What the scheduler knows beforehand: from which size on an engine is worth its cost, how much it bears, and what it
//! reaches. `lode tune` measures it; `profile_text` is how it stands in a file.

use super::EngineKind;
use super::schedule::Direction;

/// Nothing smaller is ever handed over, in bytes (EasyIO §4.4).
pub const SMALLEST_BYTES: usize = 4 << 10;
/// A threshold that no copy reaches: the engine is not worth its cost at any size.
pub const NEVER: usize = usize::MAX;
/// Most copies at a time, or threads, in front of one region.
pub const CONCURRENCY_MAX: usize = 1024;
/// Largest threshold other than [`NEVER`], in bytes.
pub const THRESHOLD_BYTES_MAX: usize = 1 << 30;
/// Most copies under way in front of one region.
pub const IN_FLIGHT_MAX: u32 = 4096;
/// Highest bandwidth that anybody can have measured, in bytes a second.
pub const BANDWIDTH_BYTES_PER_S_MAX: u64 = 1 << 44;
/// Lowest one, other than 0 where nobody measured: what is expected by a lower one says nothing.
pub const BANDWIDTH_BYTES_PER_S_MIN: u64 = 1_000_000;

/// Bandwidths are kept by size, in so many bins.
pub const BINS: usize = 5;
/// Upper ends of the bins, in bytes; the last has none.
pub const BIN_BYTES: [usize; BINS - 1] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// The bin of a copy of so many bytes.
pub fn bin(bytes: usize) -> usize {
    BIN_BYTES.iter().position(|end| bytes <= *end).unwrap_or(BINS - 1)
}

/// The four kinds of copies that thresholds tell apart (Fastmove §5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    LocalWrite,
    LocalRead,
    RemoteWrite,
    RemoteRead,
}

impl Lane {
    pub const ALL: [Lane; 4] = [Lane::LocalWrite, Lane::LocalRead, Lane::RemoteWrite, Lane::RemoteRead];

    pub fn of(direction: Direction, remote: bool) -> Lane {
        match (direction, remote) {
            (Direction::Write, false) => Lane::LocalWrite,
            (Direction::Read, false) => Lane::LocalRead,
            (Direction::Write, true) => Lane::RemoteWrite,
            (Direction::Read, true) => Lane::RemoteRead,
        }
    }

    pub fn direction(self) -> Direction {
        match self {
            Lane::LocalWrite | Lane::RemoteWrite => Direction::Write,
            Lane::LocalRead | Lane::RemoteRead => Direction::Read,
        }
    }

    /// The media is on another node than the CPU.
    pub fn remote(self) -> bool {
        matches!(self, Lane::RemoteWrite | Lane::RemoteRead)
    }

    pub fn name(self) -> &'static str {
        match self {
            Lane::LocalWrite => "local_write",
            Lane::LocalRead => "local_read",
            Lane::RemoteWrite => "remote_write",
            Lane::RemoteRead => "remote_read",
        }
    }
}

/// From how many bytes on copies are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    pub local_write: usize,
    pub local_read: usize,
    pub remote_write: usize,
    pub remote_read: usize,
}

impl Thresholds {
    #[inline]
    pub fn of(&self, lane: Lane) -> usize {
        match lane {
            Lane::LocalWrite => self.local_write,
            Lane::LocalRead => self.local_read,
            Lane::RemoteWrite => self.remote_write,
            Lane::RemoteRead => self.remote_read,
        }
    }

    pub fn set(&mut self, lane: Lane, bytes: usize) {
        *match lane {
            Lane::LocalWrite => &mut self.local_write,
            Lane::LocalRead => &mut self.local_read,
            Lane::RemoteWrite => &mut self.remote_write,
            Lane::RemoteRead => &mut self.remote_read,
        } = bytes;
    }
}

/// Bytes a second by size bin; 0 where nobody measured.
pub type Bins = [u64; BINS];

/// What copies of one lane reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// By one thread.
    pub one: Bins,
    /// By as many threads as there were CPUs, together.
    pub all: Bins,
}

/// What an engine reached by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bandwidths([Peak; Lane::ALL.len()]);

impl Bandwidths {
    pub fn of(&self, lane: Lane) -> &Peak {
        &self.0[lane as usize]
    }

    pub fn of_mut(&mut self, lane: Lane) -> &mut Peak {
        &mut self.0[lane as usize]
    }
}

/// Of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub thresholds: Thresholds,
    /// Copies under way in front of one region, beyond which the CPU copies: for engines that suffer from more.
    pub in_flight_max: Option<u32>,
}

/// Defaults that are safe where nobody measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Copies at a time of the engine `semaphore`, and threads of the engine `delegate`, per region. Two are what
    /// efficient-pm §4 found to be reasonable for one module.
    pub concurrency: usize,
    pub semaphore: Limits,
    pub delegate: Limits,
    pub dsa: Limits,
    pub emu: Limits,
    pub ioat: Limits,
    pub emu_ioat: Limits,
    /// Of each engine that was measured, `cpu` too.
    pub bandwidths: Vec<(EngineKind, Bandwidths)>,
}

impl Profile {
    /// None for the calling thread and for an engine that was given: those have no limits here.
    pub fn limits(&self, kind: EngineKind) -> Option<&Limits> {
        match kind {
            EngineKind::Cpu | EngineKind::Given => None,
            EngineKind::Semaphore => Some(&self.semaphore),
            EngineKind::Delegate => Some(&self.delegate),
            EngineKind::Dsa => Some(&self.dsa),
            EngineKind::Ioat => Some(&self.ioat),
            EngineKind::Emu => Some(&self.emu),
            EngineKind::EmuIoat => Some(&self.emu_ioat),
        }
    }

    pub fn limits_mut(&mut self, kind: EngineKind) -> Option<&mut Limits> {
        match kind {
            EngineKind::Cpu | EngineKind::Given => None,
            EngineKind::Semaphore => Some(&mut self.semaphore),
            EngineKind::Delegate => Some(&mut self.delegate),
            EngineKind::Dsa => Some(&mut self.dsa),
            EngineKind::Ioat => Some(&mut self.ioat),
            EngineKind::Emu => Some(&mut self.emu),
            EngineKind::EmuIoat => Some(&mut self.emu_ioat),
        }
    }

    /// None where nobody measured.
    pub fn bandwidths(&self, kind: EngineKind) -> Option<&Bandwidths> {
        self.bandwidths.iter().find(|(of, _)| *of == kind).map(|(_, bandwidths)| bandwidths)
    }

    pub fn set_bandwidths(&mut self, kind: EngineKind, bandwidths: Bandwidths) {
        self.bandwidths.retain(|(of, _)| *of != kind);
        self.bandwidths.push((kind, bandwidths));
    }
}

impl Default for Profile {
    fn default() -> Profile {
        // The semaphore's copies are the CPU's own: nothing has to be earned back.
        let all = Thresholds {
            local_write: SMALLEST_BYTES,
            local_read: SMALLEST_BYTES,
            remote_write: SMALLEST_BYTES,
            remote_read: SMALLEST_BYTES,
        };
        // Where Fastmove §6.2 saw its DMA engine win.
        let bulk = Thresholds {
            local_write: 16 << 10,
            local_read: 32 << 10,
            remote_write: 16 << 10,
            remote_read: 16 << 10,
        };
        Profile {
            concurrency: 2,
            semaphore: Limits { thresholds: all, in_flight_max: None },
            delegate: Limits { thresholds: bulk, in_flight_max: None },
            dsa: Limits { thresholds: bulk, in_flight_max: None },
            emu: Limits { thresholds: bulk, in_flight_max: None },
            // What the artifact of Fastmove lets through for each node.
            ioat: Limits { thresholds: bulk, in_flight_max: Some(8) },
            emu_ioat: Limits { thresholds: bulk, in_flight_max: None },
            bandwidths: Vec::new(),
        }
    }
}

impl Profile {
    /// As this, engines being handed all copies of so many bytes and more: for who knows better.
    pub fn handing_over_from(mut self, bytes: usize) -> Profile {
        let all =
            Thresholds { local_write: bytes, local_read: bytes, remote_write: bytes, remote_read: bytes };
        for kind in EngineKind::NAMED {
            if let Some(limits) = self.limits_mut(kind) {
                limits.thresholds = all;
            }
        }
        self
    }
}
