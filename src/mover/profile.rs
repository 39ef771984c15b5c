//! What the scheduler knows beforehand: from which size on an engine is worth its cost, and how much it bears.

/// Nothing smaller is ever handed over, in bytes (EasyIO §4.4).
pub const SMALLEST_BYTES: usize = 4 << 10;

/// From how many bytes on copies are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    pub local_write: usize,
    pub local_read: usize,
    pub remote_write: usize,
    pub remote_read: usize,
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
    pub emu_ioat: Limits,
    pub ioat: Limits,
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
            emu_ioat: Limits { thresholds: bulk, in_flight_max: None },
            // What the artifact of Fastmove lets through for each node.
            ioat: Limits { thresholds: bulk, in_flight_max: Some(8) },
        }
    }
}

impl Profile {
    /// As this, engines being handed all copies of so many bytes and more: for who knows better.
    pub fn handing_over_from(mut self, bytes: usize) -> Profile {
        let all =
            Thresholds { local_write: bytes, local_read: bytes, remote_write: bytes, remote_read: bytes };
        let engines = [
            &mut self.semaphore,
            &mut self.delegate,
            &mut self.dsa,
            &mut self.ioat,
            &mut self.emu,
            &mut self.emu_ioat,
        ];
        for limits in engines {
            limits.thresholds = all;
        }
        self
    }
}
