//! `lode mkfs POOL`: an empty file system on files or devices.
//!
//! Everything that can be refused is refused before the first byte is written: what a region holds, sizes
//! against limits and against the host's disk. Files that this command created are removed if it fails.

use std::fs;
use std::os::unix::fs::MetadataExt;
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

pub fn run(args: &cli::Mkfs) -> Result<()> {
    let paths = regions(&args.pool);
    let states = paths.iter().map(|path| Region::find(path)).collect::<Result<Vec<_>>>()?;
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
}

impl<'a> Region<'a> {
    fn find(path: &'a Path) -> Result<Region<'a>> {
        if path.as_os_str().is_empty() {
            return Err(Failure::usage("the name of a pool is empty"));
        }
        let found = match fs::metadata(path) {
            Ok(m) => Some(Found { size: m.len(), allocated: m.blocks() * 512, regular: m.is_file() }),
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
