//! Where a bench runs: a private tmpfs, an ext4 image on a loop device, pool files.
//!
//! As root everything is mounted in a mount namespace of this process, so that nothing stays behind,
//! but mount servers and an empty directory if it is killed. Otherwise files lie in /dev/shm and are removed at the
//! end, or by the next bench if this one is killed. A signal that asks to stop is no such end: all is removed first.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lodestone::quote::Shown;
use lodestone::{Error, Result};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::UnshareFlags;

use super::machine::check_memory;
use crate::failure::complain;
use crate::interrupt;

pub struct Place {
    root: PathBuf,
    is_mounted: bool,
    /// Mappings have huge pages, where the memory is not in pieces.
    has_huge_pages: bool,
    left: Arc<Mutex<Left>>,
}

/// What has to go at the end.
struct Left {
    root: PathBuf,
    /// To unmount, last first.
    mounted: Vec<PathBuf>,
    /// Files and directories outside `root`.
    elsewhere: Vec<PathBuf>,
}

const SHM: &str = "/dev/shm";
const PREFIX: &str = "lode-bench-";
const EXT4_MAGIC: u64 = 0xef53;

impl Place {
    pub fn open() -> Result<Place> {
        let place = Place::private_tmpfs().or_else(|_| Place::in_shm())?;
        let left = place.left.clone();
        // In a thread that sees the mounts of this one.
        interrupt::when_requested(move || {
            // Held to the end: whoever meets what is gone by now waits for it, and says nothing.
            let mut left = lock(&left);
            super::progress_end();
            complain("interrupted; nothing is reported of a bench that did not end");
            left.remove();
            std::process::exit(1);
        });
        Ok(place)
    }

    pub fn new(root: PathBuf, is_mounted: bool, has_huge_pages: bool) -> Place {
        let mounted = if is_mounted { vec![root.clone()] } else { Vec::new() };
        let left = Left { root: root.clone(), mounted, elsewhere: Vec::new() };
        Place { root, is_mounted, has_huge_pages, left: Arc::new(Mutex::new(left)) }
    }

    fn private_tmpfs() -> std::io::Result<Place> {
        // SAFETY: the flag changes which mounts this thread and its later children see; no file
        // descriptor and no memory is shared anew. The bench starts its threads after this.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        system("mount", ["--make-rprivate", "/"])?;
        let dir = std::env::temp_dir();
        // Whose tmpfs went with their mount namespace.
        stale(&dir).for_each(|left| drop(std::fs::remove_dir(left)));
        let root = dir.join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir(&root)?;
        // By default it would hold half of the memory; that all fits has been looked at. A mapping may ask for huge pages, as
        // persistent memory is mapped by; files written through calls have small ones, as by default.
        let mount = |options: &str| {
            let what = ["-t", "tmpfs", "-o", options, "lode-bench"].map(OsStr::new);
            system("mount", what.into_iter().chain([root.as_os_str()]))
        };
        let (has_huge_pages, mounted) = match mount("size=100%,huge=advise") {
            Ok(()) => (true, Ok(())),
            Err(_) => (false, mount("size=100%")),
        };
        if let Err(e) = mounted {
            let _ = std::fs::remove_dir(&root);
            return Err(e);
        }
        Ok(Place::new(root, true, has_huge_pages))
    }

    fn in_shm() -> Result<Place> {
        stale(Path::new(SHM)).for_each(|left| drop(std::fs::remove_dir_all(left)));
        let root = Path::new(SHM).join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir(&root).map_err(|e| Error::io(e, "bench::place", "create", &root))?;
        Ok(Place::new(root, false, false))
    }

    pub fn describe(&self) -> String {
        match (!self.is_mounted, self.has_huge_pages) {
            (true, _) => format!("tmpfs at {SHM}"),
            (false, true) => "private tmpfs, huge pages for mappings".to_string(),
            (false, false) => "private tmpfs".to_string(),
        }
    }

    /// Refuses what does not fit, before it is begun.
    pub fn check_room(&self, what: &str, need: u64) -> Result<()> {
        check_memory(what, need)?;
        let free = if self.is_mounted { None } else { free_bytes(&self.root) };
        match free.and_then(|free| too_small(what, need, free)) {
            Some(message) => Err(Error::message(libc::ENOSPC, "bench::place", message)),
            None => Ok(()),
        }
    }

    /// An ext4 image can be mounted.
    pub fn has_ext4(&self) -> bool {
        self.is_mounted
    }

    /// Removes all that was made so far: what comes next needs the memory.
    pub fn clear(&mut self) {
        lock(&self.left).empty(usize::from(self.is_mounted));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// A directory on this tmpfs.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.path(name);
        std::fs::create_dir_all(&dir).map_err(|e| Error::io(e, "bench::place", "create", &dir))?;
        Ok(dir)
    }

    /// A directory on ext4: an image on this tmpfs, loop-mounted (the same memory as all others), or
    /// one on the host's disk. Says in words which, or why neither.
    pub fn ext4(&mut self, bytes: u64, inodes: usize) -> Result<(PathBuf, String), String> {
        let image_error = match self.ext4_image(bytes, inodes) {
            Ok(dir) => return Ok((dir, "ext4 on a loop device over tmpfs".to_string())),
            Err(e) => e,
        };
        let host = std::env::current_dir()
            .ok()
            .filter(|dir| rustix::fs::statfs(dir).is_ok_and(|fs| fs.f_type as u64 == EXT4_MAGIC));
        let host =
            host.ok_or(format!("no image ({image_error}), and the current directory is not on ext4"))?;
        let dir = host.join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.shown()))?;
        lock(&self.left).elsewhere.push(dir.clone());
        Ok((dir, format!("ext4 of the host's disk (no image: {image_error})")))
    }

    fn ext4_image(&mut self, bytes: u64, inodes: usize) -> std::io::Result<PathBuf> {
        if !self.is_mounted {
            return Err(std::io::Error::other("mounting needs root"));
        }
        let (image, dir) = (self.path("ext4.img"), self.path("ext4"));
        std::fs::File::create(&image)?.set_len(bytes)?;
        std::fs::create_dir(&dir)?;
        let inodes = inodes.to_string();
        let eager: &OsStr = "lazy_itable_init=0,lazy_journal_init=0".as_ref();
        let args = ["-q".as_ref(), "-F".as_ref(), "-N".as_ref(), inodes.as_ref(), "-E".as_ref(), eager];
        system("mkfs.ext4", args.into_iter().chain([image.as_os_str()]))?;
        system("mount", ["-o".as_ref(), "loop".as_ref(), image.as_os_str(), dir.as_os_str()])?;
        self.remember_mount(&dir);
        Ok(dir)
    }

    /// Makes a pool file, which the user may have wanted elsewhere than here and which goes at the end. A device stays.
    pub fn make<T>(&mut self, file: &Path, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let is_ours = file.starts_with(&self.root);
        // Noted before it is there: a signal may come while it is made. What is there already may be somebody's.
        let was_there = file.symlink_metadata().is_ok();
        if !is_ours && !was_there {
            lock(&self.left).elsewhere.push(file.to_path_buf());
        }
        let made = make()?;
        if !is_ours && was_there && file.is_file() {
            lock(&self.left).elsewhere.push(file.to_path_buf());
        }
        Ok(made)
    }

    /// A mount that somebody else makes on a directory of this place.
    pub fn remember_mount(&mut self, dir: &Path) {
        lock(&self.left).mounted.push(dir.to_path_buf());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.left).remove();
    }
}

impl Left {
    fn remove(&mut self) {
        self.empty(0);
        let _ = std::fs::remove_dir_all(&self.root);
    }

    /// Leaves the root, and the first so many mounts.
    fn empty(&mut self, mounts: usize) {
        for dir in self.mounted.drain(mounts..).rev() {
            if system("umount", [dir.as_os_str()]).is_err() {
                // Somebody is still in there. Who waits for a mount server is told that it is gone; all else goes when they leave.
                let _ = system("umount", ["-f".as_ref(), "-l".as_ref(), dir.as_os_str()]);
            }
        }
        let inside = std::fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in self.elsewhere.drain(..).chain(inside) {
            let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
    }
}

/// None where the file system does not say: a tmpfs without a limit has no blocks.
fn free_bytes(dir: &Path) -> Option<u64> {
    let fs = rustix::fs::statvfs(dir).ok().filter(|fs| fs.f_blocks > 0)?;
    Some(fs.f_bavail * fs.f_frsize)
}

/// What is said where it does not fit.
fn too_small(what: &str, need: u64, free: u64) -> Option<String> {
    (free < need).then(|| {
        format!(
            "{SHM} has {} MiB free, {what} needs {} MiB: run as root, enlarge it (in a container: --shm-size), or try \
             --quick, --peers tmpfs or --threads 1",
            free >> 20,
            need >> 20
        )
    })
}

/// A thread that panicked with it leaves as much to remove.
fn lock(left: &Mutex<Left>) -> MutexGuard<'_, Left> {
    left.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What benches left in a directory that were killed before they could remove it.
fn stale(dir: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        let pid = name.to_str()?.strip_prefix(PREFIX)?.parse::<u32>().ok()?;
        (!Path::new("/proc").join(pid.to_string()).exists()).then(|| entry.path())
    })
}

/// Where administrative commands are, too.
pub fn search_path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

/// Runs an administrative command; its stderr becomes the error.
pub fn system<A: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = A>) -> std::io::Result<()> {
    let output = Command::new(program)
        .args(args)
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .output()
        .map_err(|e| std::io::Error::new(e.kind(), format!("{program}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(std::io::Error::other(format!("{program}: {}", said.trim().lines().last().unwrap_or("failed"))))
}

/// A file mapped for reading by plain loads.
pub struct Mapping {
    base: *const u8,
    len: usize,
}

// SAFETY: the mapping is read-only and lives until drop; bytes that others change while they are read
// are copied as bytes, no reference to them is formed.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub fn open(path: &Path) -> Result<Mapping> {
        let io = |e| Error::io(e, "bench::place", "map", path);
        let file = std::fs::File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len() as usize;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, &file, 0) };
        Ok(Mapping { base: base.map_err(|e| io(e.into()))?.cast(), len })
    }

    /// memcpy out of the mapping.
    #[inline(always)]
    pub fn read(&self, at: u64, dst: &mut [u8]) {
        assert!(at as usize + dst.len() <= self.len);
        // SAFETY: the range is inside the mapping (asserted), `dst` is the caller's own memory.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at as usize), dst.as_mut_ptr(), dst.len()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly what mmap returned, and nothing points into it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast_mut().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_cleared_is_used_again() {
        let dir = |name: &str| std::env::temp_dir().join(format!("lode-place-{name}-{}", std::process::id()));
        let (root, pool) = (dir("root"), dir("pool"));
        std::fs::create_dir(&root).unwrap();
        let mut place = Place::new(root.clone(), false, false);
        std::fs::write(place.dir("tmpfs").unwrap().join("data"), [0; 100]).unwrap();
        std::fs::write(place.path("pool0"), [0; 100]).unwrap();
        let write =
            || std::fs::write(&pool, [0; 100]).map_err(|e| Error::io(e, "bench::place", "write", &pool));
        place.make(&pool, write).unwrap();
        place.clear();
        assert!(std::fs::read_dir(&root).unwrap().next().is_none() && !pool.exists());
        std::fs::write(place.path("million.pool"), [0; 100]).unwrap();
        drop(place);
        assert!(!root.exists());
    }

    #[test]
    fn a_place_that_is_too_small_is_named_with_the_remedy() {
        assert_eq!(too_small("the bench", 64 << 20, 64 << 20), None);
        let said = too_small("the bench", 5000 << 20, 64 << 20).unwrap();
        for words in ["/dev/shm has 64 MiB free", "the bench needs 5000 MiB", "--shm-size", "--quick"] {
            assert!(said.contains(words), "{said}");
        }
    }
}
