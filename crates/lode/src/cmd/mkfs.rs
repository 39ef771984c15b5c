//! `lode mkfs POOL`: an empty file system on files or devices.
//!
//! Everything that can be refused is refused before the first byte is written: what a region holds, sizes
//! against limits and against the host's disk. Files that this command created are removed if it fails.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use lodestone::fs::{DataMode, Fs, MkfsOptions};
use lodestone::media::{Media, Pool, PoolOptions};
use rustix::io::Errno;

use crate::cli::{self, Data};
use crate::failure::{Failure, Output, Result};
use crate::pool::about;
use crate::size::Size;
use crate::target::{regions, show};

/// Size of a new pool that was given none, in bytes.
const SIZE_DEFAULT: u64 = 4 << 30;
/// How much of an existing file is looked into for data, in bytes; holes do not count.
const LOOKED_INTO_MAX: u64 = 256 << 20;
const LOOK_BYTES: usize = 1 << 20;

pub fn run(args: &cli::Mkfs) -> Result<()> {
    let paths = regions(&args.pool);
    let states = paths.iter().map(|path| Region::find(path)).collect::<Result<Vec<_>>>()?;
    if !args.force {
        states.iter().try_for_each(Region::refuse_data)?;
    }
    let size = pool_size(args, &states)?;
    if let Some(size) = size {
        fits_the_host(size, &states)?;
    }
    let options =
        PoolOptions { stripe_bytes: Some(args.stripe), force: args.force, ..PoolOptions::default() };
    let media = Pool::create(&paths, size, &options)?;
    let media = format(args, media).inspect_err(|_| states.iter().for_each(Region::undo))?;
    let mode = if args.data == Data::Cow { "cow" } else { "inplace" };
    let mut out = Output::new();
    let (path, size, domain) = (show(&paths[0]), Size(media.len()), media.describe().domain);
    out.line(format_args!("made {path}: {size}, data={mode}, domain {domain}"))?;
    out.finish()
}

fn format(args: &cli::Mkfs, media: Pool) -> Result<Pool> {
    let options = MkfsOptions {
        label: args.label.clone().unwrap_or_default(),
        data: if args.data == Data::Cow { DataMode::Cow } else { DataMode::InPlace },
        force: args.force,
        root_uid: rustix::process::geteuid().as_raw(),
        root_gid: rustix::process::getegid().as_raw(),
        ..MkfsOptions::default()
    };
    let media = Fs::mkfs(media, &options).map_err(|e| about(&args.pool, &e))?;
    let synced = media.sync();
    synced.map_err(|e| Failure::failed(format_args!("cannot sync {}: {e}", show(Path::new(&args.pool)))))?;
    Ok(media)
}

/// What stands at the path of a region before anything is done.
struct Region<'a> {
    path: &'a Path,
    /// None where nothing is there.
    found: Option<Found>,
}

struct Found {
    /// Bytes; 0 for a device, whose size the media knows.
    size: u64,
    allocated: u64,
    regular: bool,
    block_device: bool,
}

impl<'a> Region<'a> {
    fn find(path: &'a Path) -> Result<Region<'a>> {
        if path.as_os_str().is_empty() {
            return Err(Failure::usage("the name of a pool is empty"));
        }
        let found = match fs::metadata(path) {
            Ok(m) => Some(Found {
                size: m.len(),
                allocated: m.blocks() * 512,
                regular: m.is_file(),
                block_device: m.file_type().is_block_device(),
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && fs::symlink_metadata(path).is_ok() => {
                return Err(Failure::failed(format_args!(
                    "{} is a symbolic link that leads nowhere: remove it, or name another file",
                    show(path)
                )));
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Failure::failed(format_args!("cannot open {}: {}", show(path), plain(&e)))),
        };
        Ok(Region { path, found })
    }

    /// The file is to be made, or is there and empty.
    fn is_new(&self) -> bool {
        self.found.as_ref().is_none_or(|f| f.regular && f.size == 0)
    }

    /// An existing file must be blank. The first block is left to the media, which knows what it says, and so is what is
    /// neither file nor block device: opening a pipe would wait for whoever writes to it.
    fn refuse_data(&self) -> Result<()> {
        if !self.found.as_ref().is_some_and(|f| f.block_device || f.regular && f.size > 0) {
            return Ok(());
        }
        match first_data(self.path) {
            Ok(Some(at)) if at >= 4096 => Err(Failure::failed(format_args!(
                "{} is not empty (there is data at byte {at}); add --force to overwrite it",
                show(self.path)
            ))),
            // What cannot be read here is told by the media, in better words.
            _ => Ok(()),
        }
    }

    /// Removes a file that was not there before.
    fn undo(&self) {
        if self.found.is_none() {
            // Best effort: the failure that led here is what the user needs to see.
            let _ = fs::remove_file(self.path);
        }
    }
}

/// An I/O error without the number behind it.
fn plain(e: &std::io::Error) -> String {
    Errno::from_io_error(e).map_or_else(
        || e.to_string(),
        |errno| {
            let text = std::io::Error::from(errno).to_string();
            text.split(" (os error").next().unwrap_or_default().to_string()
        },
    )
}

/// The offset of the first byte that is not zero. Holes are jumped over, so that a sparse file of any size
/// takes no time.
fn first_data(path: &Path) -> std::io::Result<Option<u64>> {
    let file = File::open(path)?;
    let mut buffer = vec![0; LOOK_BYTES];
    let (mut at, mut looked) = (0, 0);
    while looked < LOOKED_INTO_MAX {
        let here = at;
        at = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL) => here, // cannot tell holes from data: all is data
            Err(e) => return Err(e.into()),
        };
        let n = file.read_at(&mut buffer, at)?;
        if n == 0 {
            return Ok(None);
        }
        if let Some(inside) = buffer[..n].iter().position(|&b| b != 0) {
            return Ok(Some(at + inside as u64));
        }
        at += n as u64;
        looked += n as u64;
    }
    Ok(None)
}

/// The size to create the pool with; none to take files and devices as they are.
fn pool_size(args: &cli::Mkfs, regions: &[Region]) -> Result<Option<u64>> {
    let new: Vec<&Region> = regions.iter().filter(|r| r.is_new()).collect();
    for region in new.iter().filter(|r| r.found.is_none()) {
        if region.path.starts_with("/dev") && !region.path.starts_with("/dev/shm") {
            let path = show(region.path);
            return Err(Failure::failed(format_args!(
                "{path} is not there, and devices are not made by mkfs"
            )));
        }
    }
    match (args.size, new.first(), regions.len()) {
        (Some(size), ..) => Ok(Some(size)),
        (None, None, _) => Ok(None),
        (None, Some(_), 1) => Ok(Some(SIZE_DEFAULT)),
        (None, Some(region), _) => Err(Failure::usage(format_args!(
            "{} is new; give the size of the pool, as in --size 4G",
            show(region.path)
        ))),
    }
}

/// Refuses what the disks of the new files have no room for. Taking the blocks would fail as well, but only
/// after it has filled the disk.
fn fits_the_host(size: u64, regions: &[Region]) -> Result<()> {
    let each = size / regions.len() as u64;
    let files = regions.iter().filter(|r| r.found.as_ref().is_none_or(|f| f.regular));
    let mut wanted: Vec<(u64, u64, PathBuf)> = Vec::new();
    for region in files {
        let held = region.found.as_ref().map_or(0, |f| f.allocated);
        let parent = match region.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let disk = if region.found.is_some() { region.path } else { parent };
        let (Ok(meta), Ok(space)) = (fs::metadata(disk), rustix::fs::statvfs(disk)) else { continue };
        // One that has no limit, or does not tell it (ramfs, some tmpfs, memfd).
        if space.f_blocks == 0 {
            continue;
        }
        let missing = each.saturating_sub(held);
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let before: u64 = wanted.iter().filter(|w| w.0 == meta.dev()).map(|w| w.1).sum();
        if before.saturating_add(missing) > free {
            return Err(Failure::failed(format_args!(
                "{} does not fit: its disk has {} free, {} are wanted; give a smaller --size",
                show(region.path),
                Size(free),
                Size(before.saturating_add(missing)),
            )));
        }
        wanted.push((meta.dev(), missing, disk.to_path_buf()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("lode-mkfs-{}-{name}", std::process::id()))
    }

    #[test]
    fn a_sparse_file_is_blank_until_its_first_byte() {
        let path = scratch("sparse");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(first_data(&path).unwrap(), None);
        file.write_all_at(b"x", (1 << 39) + 5).unwrap();
        assert_eq!(first_data(&path).unwrap(), Some((1 << 39) + 5));
        fs::remove_file(&path).unwrap();
    }
}
