//! A file or device that several processes divide among themselves as memory: nothing that stands there means anything to
//! another process, or to a later one.
//!
//! A tract has a label in its first block, which says just that, so that nobody's data are taken for free memory and a
//! tract is never taken for a pool. The label is written once and says nothing of who uses what: that is locks' business
//! (`wsp::memory`), which end with the processes.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::RegionKind;
use super::copy::{Copier, ReadTable, Routines};
use super::domain::Domain;
use super::label::{Block0, LABEL_BYTES, Label};
use super::mapping::HUGE_PAGE_BYTES;
use super::open::read_block0;
use super::region::OpenRegion;
use crate::error::{Error, Result};
use crate::limits::MEMORY_BYTES_MIN;

const SITE: &str = "media::tract::open";

/// What the first block of a tract begins with; zeros follow.
const LABEL: &[u8] =
    b"LODEHEAP memory of programs that run; its content means nothing to others, nor later\n";

/// See the file's head.
#[derive(Debug)]
pub struct Tract {
    pub path: PathBuf,
    /// Open for reading and writing, with a shared lock (flock) that ends with its last mapping.
    pub file: OwnedFd,
    /// Whole units, in bytes.
    pub bytes: usize,
    /// What is mapped, reserved and given back at a time: a huge page, or what the device asks for, in bytes.
    pub unit_bytes: usize,
    /// The kernel maps private copies of it.
    pub copies_on_write: bool,
    /// The host can take pages back, which read as zeros then, and reserves them before they are used.
    pub punches_holes: bool,
}

/// Bytes at the begin of a tract that nobody uses: its label.
pub const TRACT_LABEL_BYTES: usize = LABEL_BYTES;

impl Tract {
    /// Opens the file or device at `path`. With a `size` a file is made where there is none, and is so long at least; a
    /// device has to be, and of either no more is used. Without, what is there is used as long as it is.
    ///
    /// EEXIST where it holds a pool or anything else, EBUSY where somebody has it alone, EINVAL where it is too small, and
    /// whatever the host answers. Nothing is left behind on failure.
    pub fn open(path: &Path, size: Option<u64>) -> Result<Tract> {
        let mut made = false;
        let opened = match OpenRegion::open_beside(path) {
            Err(e) if e.errno() == libc::ENOENT && size.is_some() => {
                OpenRegion::create(path).inspect(|_| made = true).and_then(|alone| {
                    // Its lock is for one; everything else is as with a file that was there.
                    drop(alone);
                    OpenRegion::open_beside(path)
                })
            }
            Err(e) if e.errno() == libc::ENOENT => Err(e.context("give a size to make a file")),
            opened => opened,
        };
        let tract = opened.and_then(|region| Tract::of_region(region, size));
        if made && tract.is_err() {
            // Best effort: the error that led here is what the user needs to see.
            let _ = std::fs::remove_file(path);
        }
        tract
    }

    /// Anonymous memory of so many bytes; pages are taken at first use.
    pub fn memfd(bytes: u64) -> Result<Tract> {
        Tract::of_region(OpenRegion::memfd(bytes)?, Some(bytes))
    }

    fn of_region(mut region: OpenRegion, size: Option<u64>) -> Result<Tract> {
        let path = region.path.clone();
        let invalid = |what: String| Err(Error::message(libc::EINVAL, SITE, what));
        if let Some(size) = size
            && region.bytes < size
        {
            region.extend(size)?;
        }
        let unit_bytes = region.unit_bytes();
        let bytes = size.unwrap_or(u64::MAX).min(region.bytes) as usize & !(unit_bytes - 1);
        let least = MEMORY_BYTES_MIN.max(2 * unit_bytes);
        if region.bytes == 0 {
            return invalid(format!("{} is empty: give a size", path.display()));
        }
        if bytes < least {
            let message = format!(
                "{} has room for {bytes} bytes of memory, {least} are the least: give a larger size",
                path.display()
            );
            return invalid(message);
        }
        label(&region)?;
        let kind = region.kind();
        let huge_pages = unit_bytes != HUGE_PAGE_BYTES || region.is_hugetlbfs();
        Ok(Tract {
            bytes,
            unit_bytes,
            copies_on_write: kind != RegionKind::DeviceDax && !huge_pages,
            punches_holes: !matches!(kind, RegionKind::DeviceDax | RegionKind::BlockDevice),
            path,
            file: region.into_file(),
        })
    }
}

/// Makes sure of the label, and refuses what is no tract and not blank.
fn label(region: &OpenRegion) -> Result<()> {
    let block = read_block0(region)?;
    if block.starts_with(LABEL) {
        return Ok(());
    }
    let what = match Label::decode(&block) {
        Block0::Blank => return write_label(region),
        Block0::Label(_) | Block0::Newer(_) | Block0::Damaged(_) => "holds a pool",
        Block0::Foreign => "holds other data",
    };
    let path = region.path.display();
    let message = format!(
        "{path} {what}, which memory of programs would overwrite: use another file, or remove it first"
    );
    Err(Error::message(libc::EEXIST, SITE, message))
}

fn write_label(region: &OpenRegion) -> Result<()> {
    let copier = Copier::new(Routines::default_choice(), Domain::Volatile, ReadTable::default());
    let map = region.map_prefix(LABEL_BYTES as u64)?;
    // SAFETY: the mapping covers block 0, which the file has, and the label is ours. Who does so at the same time stores
    // the same bytes.
    unsafe { copier.copy_cached(map.base(), LABEL) }.map_err(|_| {
        let message = format!("{} has no room for its label, or is bad there", region.path.display());
        Error::message(libc::EIO, SITE, message)
    })
}
