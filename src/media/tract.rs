//! A file or device that several processes divide among themselves as memory: nothing that stands there means anything to
//! another process, or to a later one.
//!
//! A tract has a label in its first block, which says just that, so that nobody's data are taken for free memory and a
//! tract is never taken for a pool. The label is written once and says nothing of who uses what: that is locks' business
//! (`wsp::memory`), which end with the processes.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::RegionKind;
use super::label::{Block0, LABEL_BYTES, Label};
use super::mapping::HUGE_PAGE_BYTES;
use super::region::OpenRegion;
use crate::error::{Error, Result};
use crate::limits::MEMORY_BYTES_MIN;
use crate::quote::Shown;

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
    /// device has to be, and of either no more is used. Without, what is there is used as long as it is. Any number of
    /// processes may do so at once.
    ///
    /// EEXIST where it holds a pool or anything else, EBUSY where somebody has it alone, EINVAL where it is too small, and
    /// whatever the host answers. Nothing is left behind on failure.
    pub fn open(path: &Path, size: Option<u64>) -> Result<Tract> {
        if let Some(size) = size.filter(|size| *size < MEMORY_BYTES_MIN as u64) {
            return Err(too_small(path, size, MEMORY_BYTES_MIN));
        }
        let region = match size {
            Some(_) => open_or_make(path)?,
            None => match OpenRegion::open_beside(path) {
                Err(e) if e.errno() == libc::ENOENT => return Err(e.context("give a size to make a file")),
                opened => opened?,
            },
        };
        Tract::of_region(region, size)
    }

    /// Anonymous memory of so many bytes; pages are taken at first use.
    pub fn memfd(bytes: u64) -> Result<Tract> {
        Tract::of_region(OpenRegion::memfd(bytes)?, Some(bytes))
    }

    fn of_region(mut region: OpenRegion, size: Option<u64>) -> Result<Tract> {
        let path = region.path.clone();
        let unit_bytes = region.unit_bytes();
        let bytes = region.by_turns(|region| {
            // Before anything is changed: what is somebody else's stays as it is.
            let has_label = has_label(region)?;
            if region.bytes.max(size.unwrap_or(0)) == 0 {
                let message = format!("{} is empty: give a size", path.shown());
                return Err(Error::message(libc::EINVAL, SITE, message));
            }
            let whole = |bytes: u64| bytes as usize & !(unit_bytes - 1);
            let wanted = size.unwrap_or(region.bytes);
            let least = MEMORY_BYTES_MIN.max(2 * unit_bytes);
            if whole(wanted) < least {
                return Err(too_small(&path, wanted, least));
            }
            region.extend(wanted)?;
            if !has_label {
                region.write_head(LABEL)?;
            }
            Ok(whole(wanted))
        })?;
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

/// What is there, or a file that is made. Others may be about the same: a pipe's programs begin at once.
fn open_or_make(path: &Path) -> Result<OpenRegion> {
    // A link to nothing is never there and cannot be made.
    const TRIES_MAX: usize = 8;
    let mut tries = 0;
    loop {
        match OpenRegion::open_beside(path) {
            Err(e) if e.errno() == libc::ENOENT => {}
            opened => return opened,
        }
        match OpenRegion::create_beside(path) {
            Err(e) if e.errno() == libc::EEXIST && tries < TRIES_MAX => tries += 1,
            made => return made,
        }
    }
}

/// Whether it is a tract already; what is neither that nor unused is refused.
fn has_label(region: &OpenRegion) -> Result<bool> {
    let mut block = [0; LABEL_BYTES];
    region.read_head(&mut block)?;
    if block.starts_with(LABEL) {
        return Ok(true);
    }
    let what = match Label::decode(&block) {
        Block0::Blank if region.is_unused()? => return Ok(false),
        Block0::Blank => "begins with zeros and holds other data, or zeros that somebody wrote",
        Block0::Label(_) | Block0::Newer(_) | Block0::Damaged(_) => "holds a pool",
        Block0::Foreign => "holds other data",
    };
    let path = region.path.shown();
    let message = format!(
        "{path} {what}, which memory of programs would overwrite: use another file, or remove it first"
    );
    Err(Error::message(libc::EEXIST, SITE, message))
}

fn too_small(path: &Path, bytes: u64, least: usize) -> Error {
    let message = format!(
        "{} has room for {bytes} bytes of memory, {least} are the least: give a larger size",
        path.shown()
    );
    Error::message(libc::EINVAL, SITE, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::Barrier;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder = std::env::temp_dir().join(format!("lode-tract-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_begins_with_zeros_is_not_taken_for_free() {
        let folder = Folder::new("zeros");
        let path = folder.path("image");
        // Where btrfs, and an array's label of version 1.2, say what they are.
        for (at, bytes) in
            [(0x1_0040, 32 << 20), (0x1000, 32 << 20), (20 << 20, 32 << 20), (0x1_0040, 1 << 20)]
        {
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(bytes).unwrap();
            file.write_all_at(b"_BHRfS_M", at).unwrap();
            let before = std::fs::read(&path).unwrap();
            for size in [None, Some(64 << 20)] {
                let refused = Tract::open(&path, size).unwrap_err();
                assert_eq!(refused.errno(), libc::EEXIST, "{refused}");
            }
            assert!(std::fs::read(&path).unwrap() == before, "what is refused stays as it is, and as long");
        }
    }

    #[test]
    fn a_file_of_holes_is_free() {
        let folder = Folder::new("holes");
        let path = folder.path("file");
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        assert_eq!(Tract::open(&path, None).unwrap().bytes, 16 << 20);
        // Now by its label, whatever else is there.
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        assert_eq!(Tract::open(&path, Some(32 << 20)).unwrap().bytes, 32 << 20);
        assert_eq!(Tract::open(&path, Some(8 << 20)).unwrap().bytes, 8 << 20);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 32 << 20, "nobody makes it shorter");
    }

    #[test]
    fn who_first_opens_a_file_at_once_gets_it_and_none_shortens_it() {
        let folder = Folder::new("once");
        for round in 0..50 {
            let path = folder.path(&round.to_string());
            let begin = Barrier::new(6);
            std::thread::scope(|scope| {
                for n in 0..6u64 {
                    let (path, begin) = (&path, &begin);
                    scope.spawn(move || {
                        begin.wait();
                        let size = (8 + 2 * n) << 20;
                        let tract = Tract::open(path, Some(size)).unwrap();
                        assert_eq!(tract.bytes as u64, size);
                        assert!(rustix::fs::fstat(&tract.file).unwrap().st_size as u64 >= size);
                    });
                }
            });
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 18 << 20);
        }
    }
}
