//! The systems that applications run on: the same file system on the same slow memory, and who copies.
//!
//! | system | who copies | uthreads on a core |
//! |---|---|---|
//! | `sync` | the core that asks, which is stalled for as long as its memory takes | 1 |
//! | `async-emu` | an emulated device that is as fast as one core | [`UTHREADS_PER_CORE`] |
//! | `async-emu-dma` | an emulated device that is as fast as a DMA engine | the same |
//! | `async-ENGINE` | the engine named | the same |
//!
//! Speeds of a core are those that Fastmove saw one core copy with, from and to six interleaved Optane modules (Table 4, 64
//! KiB). A DMA engine is faster than one core: EasyIO §2.2 has one channel reach all that three modules take in stores, and
//! 63 % less than cores reach together in loads; §6.1 has six modules bear 13.2 and 37.6 GB/s.

use std::path::Path;
use std::sync::Arc;

use lodestone::Result;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::Pool;
use lodestone::mover::EngineKind;
use lodestone::mover::engine_dsa::Dsa;
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::profile::Profile;

use super::app::Shelf;
use super::slow::{Slow, Speed};

/// EasyIO §6.2 has two. An item computes for a millisecond and more without a break, so whoever waits for a copy goes on late: with
/// eight the device has work all the same (with two, four, eight snappy is 1.05, 1.45, 1.9 times as fast as `sync`).
pub const UTHREADS_PER_CORE: usize = 8;

/// Of one core: 64 KiB in 28.8 and 17.6 us (Fastmove, Table 4).
pub const CORE: Speed = Speed { store: 2_275_555_556, load: 3_723_636_364 };
/// Of a DMA engine in front of three modules (EasyIO §2.2 and §6.1): half of 13.2 GB/s, and 37 % of half of 37.6 GB/s.
pub const DMA: Speed = Speed { store: 6_600_000_000, load: 6_956_000_000 };

/// Who copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Copier {
    /// The core that asks.
    Core,
    /// An emulated device of this speed.
    Device(Speed),
    /// An engine of this machine.
    Engine(EngineKind),
}

pub struct System {
    pub name: String,
    pub copier: Copier,
    pub shelf: Arc<Shelf>,
}

impl System {
    /// A file system on this pool, whose memory is as slow to cores as `core` says. None where the engine cannot be had.
    pub fn new(name: &str, copier: Copier, pool: Pool, core: Option<Speed>) -> Result<Option<System>> {
        let media = Fs::mkfs(Slow::new(pool, core), &MkfsOptions::default())?;
        let engine = match copier {
            Copier::Engine(engine) => engine,
            Copier::Core | Copier::Device(_) => EngineKind::Cpu,
        };
        let fs = Fs::open(media, &OpenOptions { engine, ..OpenOptions::default() })?;
        if engine != EngineKind::Cpu && fs.mover().engine(engine).is_none() {
            return Ok(None);
        }
        if let Copier::Device(Speed { store, load }) = copier {
            let model = Model { bytes_per_s: Some(load), store_bytes_per_s: Some(store), ..Model::default() };
            fs.mover().give(Box::new(Dsa::new(Emulated::new(model))), Profile::default().emu);
        }
        let shelf = Arc::new(Shelf::new(fs, Cred::process(), 0));
        Ok(Some(System { name: name.to_owned(), copier, shelf }))
    }

    pub fn uthreads_per_core(&self) -> usize {
        if self.copier == Copier::Core { 1 } else { UTHREADS_PER_CORE }
    }

    pub fn media(&self) -> &Slow<Pool> {
        self.shelf.fs().media()
    }

    /// Ends its use of the pool, which is removed where it is a file.
    pub fn close(self, path: &Path) -> Result<()> {
        self.shelf.fs().close()?;
        drop(self);
        if path.is_file() {
            std::fs::remove_file(path).map_err(|e| lodestone::Error::io(e, "bench::apps", "remove", path))?;
        }
        Ok(())
    }
}
