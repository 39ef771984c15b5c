//! A copy of a suspended guest that shares its blocks: a guest of its own, made in a moment whatever the memory's size.
//!
//! Memory and disks become files whose blocks are the original's until one of both stores to them (FICLONE: XFS, btrfs). So neither
//! waits for the other, as with private memory, and the copy can be suspended in turn. Its image has another number
//! ([`adopt`](lodestone::wsp::adopt)), so that nothing of the one is taken for the other's.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use lodestone::error::{Error, Result};
use lodestone::quote::Shown;
use lodestone::wsp::{Ram, Seal, adopt};

use super::emulator::{command_line, refused_for_reflink};
use super::guest::{identity_of, open_ram, open_ram_to_read, open_slot, slot_path};
use super::identity::{Disk, Identity};
use super::place::{Config, Place, image_number, make_own_dir, remove_if_there};
use super::suspend::words;

const SITE: &str = "wsp::reflink";

/// Copies the image of a suspended guest, which nobody resumes meanwhile; `accept` is asked about its disks. The copy is suspended, and
/// described in `clone`; after an error nothing is left of it.
pub fn copy(config: &Config, clone: &Place, accept: impl FnOnce(&Seal) -> Result<()>) -> Result<Config> {
    if let Some(why) = refused(config) {
        return Err(Error::message(libc::EOPNOTSUPP, SITE, why));
    }
    let media = open_ram_to_read(config)?;
    let ram = Ram::new(&media, config.ram_bytes)?;
    let generation = lodestone::wsp::cycle::suspended(&ram)?.generation;
    let slot = open_slot(config, generation)?;
    let (_, seal) = lodestone::wsp::cycle::image(&ram, &slot)?;
    accept(&seal)?;
    let mut copy = places(config, clone);
    let mut made = Made(Vec::new());
    make_own_dir(&copy.slots)?;
    made.share(&config.ram, &copy.ram)?;
    for (from, to) in config.disks.iter().zip(&copy.disks) {
        made.share(from, to)?;
    }
    made.copy(&slot_path(config, generation), &slot_path(&copy, generation))?;
    let mut image = [0; 16];
    rustix::rand::getrandom(&mut image, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::message(e.raw_os_error(), SITE, "the kernel gives no random numbers"))?;
    copy.image = Some(image_number(image));
    let media = open_ram(&copy)?;
    let slot = open_slot(&copy, generation)?;
    adopt(&Ram::new(&media, copy.ram_bytes)?, &slot, image, |seal| sealed_anew(config, &copy, seal))?;
    clone.write_config(&copy).map_err(|failure| Error::message(libc::EIO, SITE, words(failure)))?;
    made.0.clear();
    Ok(copy)
}

fn refused(config: &Config) -> Option<&'static str> {
    if config.clone_of.is_some() {
        return Some("it is a clone, whose memory is its own alone");
    }
    if config.pooled.is_some() {
        return Some(
            "memory in a pool shares no blocks: leave --reflink out, for a copy that ends with its memory",
        );
    }
    if !config.ram.is_file() || config.disks.iter().any(|disk| !disk.is_file()) {
        return Some("only files share blocks, and its memory or a disk is a device: leave --reflink out");
    }
    refused_for_reflink(&config.options)
}

/// Where the copy's files are: beside the original's.
fn places(config: &Config, clone: &Place) -> Config {
    let beside = |path: &Path| {
        let mut name = OsString::from(path);
        name.push(format!(".{}", clone.name));
        PathBuf::from(name)
    };
    let (ram, slots) = match config.ram.parent() == Some(&config.slots) {
        true => {
            let dir = config.slots.with_file_name(format!("{}.wsp", clone.name));
            (dir.join("ram"), dir)
        }
        false => (beside(&config.ram), clone.dir.join("slots")),
    };
    let disks = config.disks.iter().map(|disk| beside(disk)).collect();
    Config { ram, slots, disks, own_disks: true, failed: 0, ..config.clone() }
}

/// What the copy runs in: the same, but for its disks.
fn sealed_anew(config: &Config, copy: &Config, seal: &Seal) -> Result<Vec<u8>> {
    let saved = identity_of(seal)?;
    let its_copy = |disk: &Disk| {
        let n = config.disks.iter().position(|path| *path == disk.path).ok_or_else(|| {
            let message = format!(
                "the disk {} is based on another file, or is none of --disk, and is not copied: leave --reflink out",
                disk.path.shown()
            );
            Error::message(libc::EOPNOTSUPP, SITE, message)
        })?;
        Disk::synced(&copy.disks[n])
    };
    let disks = saved.disks.iter().map(its_copy).collect::<Result<Vec<_>>>()?;
    let identity = Identity { command: command_line(copy), disks, ..saved };
    Ok(serde_json::to_vec(&identity).expect("our documents have string keys only"))
}

/// Files that were made, and are removed again unless all goes well.
struct Made(Vec<PathBuf>);

impl Made {
    /// A new file with the blocks of another.
    fn share(&mut self, from: &Path, to: &Path) -> Result<()> {
        let (source, target) = self.open(from, to)?;
        rustix::fs::ioctl_ficlone(&target, &source).map_err(|e| {
            let message = format!(
                "the file system of {} shares no blocks with a copy ({}): put memory and disks on XFS or btrfs, or leave --reflink out",
                from.shown(),
                io::Error::from(e)
            );
            Error::message(libc::EOPNOTSUPP, SITE, message)
        })?;
        target.sync_all().and_then(|()| sync_parent(to)).map_err(|e| Error::io(e, SITE, "cannot sync", to))
    }

    fn copy(&mut self, from: &Path, to: &Path) -> Result<()> {
        let (mut source, mut target) = self.open(from, to)?;
        let copied = io::copy(&mut source, &mut target).and_then(|_| target.sync_all());
        let copied = copied.and_then(|()| sync_parent(to));
        copied.map_err(|e| Error::io(e, SITE, "cannot write the copy", to))
    }

    fn open(&mut self, from: &Path, to: &Path) -> Result<(File, File)> {
        let source = File::open(from).map_err(|e| Error::io(e, SITE, "cannot open", from))?;
        let target = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(to);
        let target = target.map_err(|e| Error::io(e, SITE, "cannot make", to))?;
        self.0.push(to.to_owned());
        Ok((source, target))
    }
}

/// A file's name is durable with its directory.
fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = remove_if_there(path);
        }
        // Where it was made for them, and nothing else is in it.
        for dir in self.0.iter().filter_map(|path| path.parent()) {
            if dir.extension().is_some_and(|end| end == "wsp") {
                let _ = std::fs::remove_dir(dir);
            }
        }
    }
}
