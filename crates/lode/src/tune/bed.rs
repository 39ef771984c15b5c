//! What is measured in: a pool, and files without a name in it, which end with the pool, however that is left.
//!
//! Writes go to new blocks, and of a large pool most were never touched: what is measured first would be the kernel that
//! finds pages. So all free space but a part is reserved, and that part is written once; there overwritten blocks come
//! round again.
//!
//! Copies go the way of every copy: `write_at` and `read_at` of the file system, whose mover has the engine. Its profile
//! here hands every copy over, so that the engine is measured and not the profile of yesterday.

use std::sync::Arc;

use lodestone::fs::{Cred, Fs, Ino, Node, OpenOptions};
use lodestone::media::{Media, Pool};
use lodestone::mover::EngineKind;
use lodestone::mover::profile::{BINS, Bandwidths, Lane, Profile, SMALLEST_BYTES};
use lodestone::mover::schedule::Direction;

use crate::failure::{Result, complain, reason};

const FILL_BYTES: usize = 1 << 20;
/// Left for logs, in bytes.
const LOG_BYTES: u64 = 8 << 20;
const FILE_MODE: u32 = 0o600;
/// Syncs until all that was freed before them may be used again.
const SYNCS_TO_FREE: usize = 3;

/// How reads are shared while they are measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The engine copies all of them.
    EngineAlone,
    /// As the profile's bandwidths say.
    Profile,
}

pub struct Bed {
    /// None once it is closed.
    fs: Option<Arc<Fs<Pool>>>,
    files: Vec<Node>,
    /// What is to stay untouched of the free space.
    reserved: Option<Node>,
    pub file_bytes: u64,
}

impl Bed {
    /// Opens the pool; `profile` says how many copies go at a time, and what engines reach.
    pub fn open(media: Pool, profile: &Profile, sharing: Sharing) -> lodestone::Result<Bed> {
        let profile = measuring(profile, sharing);
        let fs = Fs::open(media, &OpenOptions { profile, ..OpenOptions::default() })?;
        Ok(Bed { fs: Some(fs), files: Vec::new(), reserved: None, file_bytes: 0 })
    }

    /// Bytes that new files may have.
    pub fn free_bytes(&self) -> u64 {
        let statfs = self.fs().statfs();
        statfs.blocks_free * u64::from(statfs.block_bytes)
    }

    /// Makes files and fills them, and leaves as much free space as they have; `step` is asked between pieces whether to
    /// go on.
    pub fn fill(&mut self, files: usize, file_bytes: u64, step: &dyn Fn() -> Result<()>) -> Result<()> {
        let together = files as u64 * file_bytes;
        let free = self.free_bytes();
        if let Some(rest) = free.checked_sub(2 * together + LOG_BYTES).filter(|rest| *rest > 0) {
            let reserved = self.file()?;
            self.fs().fallocate_node(&Cred::root(), &reserved, 0, 0, rest)?;
            self.reserved = Some(reserved);
        }
        for _ in 0..files {
            let file = self.file()?;
            self.write(&file, file_bytes, step)?;
            self.files.push(file);
        }
        let touched = self.file()?;
        self.write(&touched, self.free_bytes().saturating_sub(LOG_BYTES).min(together), step)?;
        self.end(touched);
        self.file_bytes = file_bytes;
        self.settle()
    }

    /// A new one, without a name. As root: whoever may write to the pool itself may do anything in it.
    fn file(&self) -> Result<Node> {
        let attr = self.fs().tmpfile(&Cred::root(), Ino::ROOT, FILE_MODE, 0)?;
        Ok(self.fs().node(attr.ino)?)
    }

    fn write(&self, file: &Node, bytes: u64, step: &dyn Fn() -> Result<()>) -> Result<()> {
        let block = vec![0x5a; FILL_BYTES];
        for offset in (0..bytes).step_by(block.len()) {
            step()?;
            let now = (bytes - offset).min(block.len() as u64) as usize;
            self.fs().write_at(&Cred::root(), file, offset, &block[..now], false)?;
        }
        Ok(())
    }

    /// Its blocks are free again.
    fn end(&self, file: Node) {
        let ino = file.ino();
        drop(file);
        self.fs().release(ino);
        self.fs().forget(ino, 1);
    }

    pub fn fs(&self) -> &Fs<Pool> {
        self.fs.as_ref().expect("only `close` and `drop` take it")
    }

    /// The files, copied to and from by `engine`.
    pub fn files(&self, engine: EngineKind) -> Vec<Node> {
        let of_engine = |node: &Node| {
            let node = node.clone();
            node.set_engine(Some(engine));
            node
        };
        self.files.iter().map(of_engine).collect()
    }

    /// Makes room for writes where little is left: on an ordinary file what was overwritten is free only after syncs, and
    /// a write that finds no other block would wait for them in the middle of a measure.
    pub fn make_room(&self) -> Result<()> {
        let together = self.files.len() as u64 * self.file_bytes;
        if self.free_bytes() < together / 2 { self.settle() } else { Ok(()) }
    }

    /// How much each of so many threads may copy in one turn. What is overwritten is free at once where stores are durable on
    /// return, and elsewhere only after syncs.
    pub fn room_for(&self, direction: Direction, threads: usize) -> u64 {
        match direction == Direction::Write && !self.fs().media().domain().is_persistent_memory() {
            true => self.free_bytes() / 2 / threads as u64,
            false => u64::MAX,
        }
    }

    /// What was freed may be used again. Nothing to do where stores are durable on return.
    fn settle(&self) -> Result<()> {
        (0..SYNCS_TO_FREE).try_for_each(|_| self.fs().sync())?;
        Ok(())
    }

    /// Closes the pool, with which the files go, and gives its media back.
    pub fn close(mut self) -> Result<Pool> {
        self.let_go();
        let fs = self.fs.take().expect("it is closed once");
        fs.close()?;
        Ok(fs.abandon().expect("nobody else uses the pool of this measure"))
    }
}

impl Bed {
    /// The files' blocks are free again.
    fn let_go(&mut self) {
        for file in std::mem::take(&mut self.files).into_iter().chain(self.reserved.take()) {
            if self.fs.is_some() {
                self.end(file);
            }
        }
    }
}

impl Drop for Bed {
    /// A measure that ends early leaves the pool as it found it, too.
    fn drop(&mut self) {
        self.let_go();
        if let Some(fs) = self.fs.take()
            && let Err(e) = fs.close()
        {
            complain(format_args!("closing the pool: {}; the next use recovers it", reason(&e)));
        }
    }
}

/// As `profile`, but every copy is handed over.
fn measuring(profile: &Profile, sharing: Sharing) -> Profile {
    let mut profile = profile.clone();
    for kind in EngineKind::NAMED {
        if let Some(limits) = profile.limits_mut(kind) {
            limits.in_flight_max = None;
            Lane::ALL.into_iter().for_each(|lane| limits.thresholds.set(lane, SMALLEST_BYTES));
        }
        if sharing == Sharing::EngineAlone {
            // Beside an engine that is so much faster the CPU has no share that is worth a copy.
            let rate = if kind == EngineKind::Cpu { 1 } else { 1 << 40 };
            let mut bandwidths = Bandwidths::default();
            bandwidths.of_mut(Lane::LocalRead).one = [rate; BINS];
            profile.set_bandwidths(kind, bandwidths);
        }
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;
    use lodestone::fs::MkfsOptions;
    use lodestone::media::PoolOptions;

    #[test]
    fn every_copy_is_the_engines_and_all_of_it() {
        let pool = || {
            let pool = Pool::memfd(64 << 20, &PoolOptions::default()).unwrap();
            Fs::mkfs(pool, &MkfsOptions::default()).unwrap()
        };
        let go_on = || Ok(());
        let mut bed = Bed::open(pool(), &Profile::default(), Sharing::EngineAlone).unwrap();
        bed.fill(1, 1 << 20, &go_on).unwrap();
        for kind in EngineKind::NAMED.into_iter().filter(|kind| *kind != EngineKind::Cpu) {
            let files = bed.files(kind);
            if bed.fs().mover().engine(kind).is_none() {
                continue;
            }
            for bytes in [SMALLEST_BYTES, 1 << 20] {
                let before = bed.fs().mover().moved();
                let mut buffer = vec![7; bytes];
                bed.fs().write_at(&Cred::root(), &files[0], 0, &buffer, false).unwrap();
                bed.fs().read_at(&files[0], 0, &mut buffer).unwrap();
                let now = bed.fs().mover().moved();
                if kind == EngineKind::Emu || kind.bounds_itself() {
                    let edge = 4096;
                    let moved = (now.bytes - before.bytes) as usize;
                    assert!(
                        (2 * bytes - edge..=2 * bytes).contains(&moved),
                        "{kind}: {moved} of 2 x {bytes}"
                    );
                }
            }
        }
        bed.close().unwrap();
    }

    #[test]
    fn nothing_is_left_of_the_files() {
        let pool = Pool::memfd(64 << 20, &PoolOptions::default()).unwrap();
        let pool = Fs::mkfs(pool, &MkfsOptions::default()).unwrap();
        let mut bed = Bed::open(pool, &Profile::default(), Sharing::EngineAlone).unwrap();
        let before = bed.free_bytes();
        bed.fill(2, 8 << 20, &|| Ok(())).unwrap();
        assert!(bed.free_bytes() + (16 << 20) <= before);
        let bed = Bed::open(bed.close().unwrap(), &Profile::default(), Sharing::Profile).unwrap();
        assert!(bed.free_bytes() + (1 << 20) > before, "{} of {before} are free", bed.free_bytes());
    }
}
