//! Guest memory in a pool: one of its files, which QEMU maps from what the pool is made of.
//!
//! Such a file is *fixed*: its blocks stand still until `lode wsp rm` (`lodestone::fs::FIXED`). So the pool may be mounted
//! meanwhile, or not, and its other files do not notice. To make or remove the file takes the pool for a moment, or its mount.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use lodestone::error::{Error, Result};
use lodestone::fs::files::Files;
use lodestone::fs::{Cred, FIXED, FixedPlace, Fs, OpenOptions};
use lodestone::media::{Pool, holds_pool};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::door::table;
use crate::failure::Failure;
use crate::pool::{Access, map};
use crate::target::{Target, show};

const SITE: &str = "wsp::pooled";
/// The first QEMU that maps memory from an offset in its file.
const OFFSETS_SINCE: (u32, u32) = (8, 1);
/// An attribute's value with a path in it, in bytes.
const PLACE_BYTES_MAX: usize = 8192;

/// A file of a pool with a guest's memory.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PoolFile {
    /// The pool's file or device.
    pub pool: PathBuf,
    /// From its root on.
    pub path: PathBuf,
}

impl PoolFile {
    /// The file that a guest's memory becomes, where `--media` names a pool, a directory in one (`POOL:/DIR`), or one on its
    /// mount; none for other media.
    pub fn of(guest: &str, media: &Path) -> std::result::Result<Option<PoolFile>, Failure> {
        let failed =
            |e: &dyn std::fmt::Display| Failure::failed(format_args!("cannot use {}: {e}", show(media)));
        let file = format!("{guest}.ram");
        let in_pool = |pool: &Path, dir: &Path| {
            // Where it really is: a link may come to name another.
            let pool = fs::canonicalize(pool).map_err(|e| failed(&e))?;
            let file = PoolFile { pool, path: dir.join(&file) };
            match file.pool.to_str().and(file.path.to_str()) {
                Some(_) => Ok(Some(file)),
                None => Err(Failure::usage(format_args!("{}: give a path that is UTF-8", show(media)))),
            }
        };
        if let Target::Pool(target) = Target::parse(media.as_os_str()) {
            return in_pool(Path::new(&target.pool), Path::new(OsStr::from_bytes(&target.path)));
        }
        let Ok(about) = fs::metadata(media) else { return Ok(None) };
        if about.is_dir() {
            let device = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
            let dir = fs::canonicalize(media).map_err(|e| failed(&e))?;
            let mounts = table::pools().map_err(|e| failed(&e))?;
            let mut held = mounts.iter().rev().filter(|mount| mount.device == device);
            let found = held.find_map(|mount| Some((mount, dir.strip_prefix(&mount.dir).ok()?)));
            return found.map_or(Ok(None), |(mount, below)| {
                in_pool(Path::new(&mount.source), &mount.root.join(below))
            });
        }
        match holds_pool(media) {
            Ok(true) => in_pool(media, Path::new("/")),
            Ok(false) => Ok(None),
            Err(e) => Err(failed(&e)),
        }
    }

    /// Makes the file where there is none, so long, in one piece, and says where it is. One that is there, and as long, stays as
    /// it is.
    pub fn make(&self, bytes: u64) -> Result<FixedPlace> {
        let place = match self.on_mount() {
            Some(file) => make_on_mount(&file, bytes),
            None => {
                with_pool(&self.pool, |files| make_in_pool(files, self.path.as_os_str().as_bytes(), bytes))
            }
        };
        let place = place.map_err(|e| self.failed(e))?;
        FixedPlace::decode(&place).ok_or_else(|| {
            let message =
                format!("{self} does not say where it lies: mount the pool by this version of lode");
            Error::message(libc::EPROTO, SITE, message)
        })
    }

    /// Gives the blocks back. Nothing where the file has gone already.
    pub fn remove(&self) -> Result<()> {
        let removed = match self.on_mount() {
            Some(file) => remove_on_mount(&file),
            None => with_pool(&self.pool, |files| remove_in_pool(files, self.path.as_os_str().as_bytes())),
        };
        removed.or_else(|e| if e.errno() == libc::ENOENT { Ok(()) } else { Err(self.failed(e)) })
    }

    /// One beside it, for memory anew where the old is kept.
    pub fn beside(&self, n: u32) -> PoolFile {
        PoolFile { pool: self.pool.clone(), path: self.path.with_extension(format!("{n}.ram")) }
    }

    /// Its path on a mount of the pool, if there is one: then the mount's server has the pool.
    fn on_mount(&self) -> Option<PathBuf> {
        let mounts = table::pools().ok()?.into_iter().rev();
        let mut here = mounts.filter(|mount| Path::new(&mount.source) == self.pool && !mount.read_only);
        here.find_map(|mount| Some(mount.dir.join(self.path.strip_prefix(&mount.root).ok()?)))
    }

    fn failed(&self, e: Error) -> Error {
        match e.errno() {
            libc::ENOSPC => Error::message(
                libc::ENOSPC,
                SITE,
                format!(
                    "no run so long is free in {}: make room there, or take a larger pool",
                    show(&self.pool)
                ),
            ),
            libc::EEXIST => Error::message(
                libc::EEXIST,
                SITE,
                format!("{self} exists, and is something else: remove it, or choose another directory"),
            ),
            _ => e.context(self),
        }
    }
}

impl std::fmt::Display for PoolFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", show(&self.pool), show(&self.path))
    }
}

/// What getxattr answers of the file that was made.
fn make_in_pool(files: &Files<Pool>, path: &[u8], bytes: u64) -> Result<Vec<u8>> {
    let fd = files.open(path, libc::O_RDWR | libc::O_CREAT, 0o600)?;
    let made = files.fsetxattr(fd, FIXED, bytes.to_string().as_bytes(), 0);
    let place = made.and_then(|()| files.fgetxattr(fd, FIXED));
    files.close(fd)?;
    place.inspect_err(|_| {
        // What was there is not empty.
        if files.stat(path).is_ok_and(|about| about.size == 0) {
            let _ = files.unlink(path);
        }
    })
}

fn remove_in_pool(files: &Files<Pool>, path: &[u8]) -> Result<()> {
    match files.removexattr(path, false, FIXED) {
        Err(e) if e.errno() != libc::ENODATA => Err(e),
        _ => files.unlink(path),
    }
}

/// As [`make_in_pool`].
fn make_on_mount(file: &Path, bytes: u64) -> Result<Vec<u8>> {
    let options = fs::OpenOptions::new().read(true).write(true).create(true).mode(0o600).clone();
    let open = options.open(file).map_err(|e| Error::io(e, SITE, "cannot make", file))?;
    let failed = |e: Errno| Error::io(e.into(), SITE, "cannot fix", file);
    let mut place = vec![0; PLACE_BYTES_MAX];
    let made = rustix::fs::fsetxattr(&open, fixed(), bytes.to_string().as_bytes(), XattrFlags::empty());
    match made.and_then(|()| rustix::fs::fgetxattr(&open, fixed(), &mut place[..])) {
        Ok(len) => {
            place.truncate(len);
            Ok(place)
        }
        Err(e) => {
            if open.metadata().is_ok_and(|about| about.len() == 0) {
                let _ = fs::remove_file(file);
            }
            Err(failed(e))
        }
    }
}

fn remove_on_mount(file: &Path) -> Result<()> {
    match rustix::fs::lremovexattr(file, fixed()) {
        Ok(()) | Err(Errno::NODATA) => {}
        Err(e) => return Err(Error::io(e.into(), SITE, "cannot remove", file)),
    }
    fs::remove_file(file).map_err(|e| Error::io(e, SITE, "cannot remove", file))
}

fn fixed() -> &'static str {
    std::str::from_utf8(FIXED).expect("it is ASCII")
}

/// What QEMU cannot do here, in words, or none: this one, with these options, on memory in a pool.
pub fn refused(qemu: &Path, options: &[String]) -> Option<String> {
    // It gives pages back by holes in the file, until 9.2 at the wrong place; and hands the whole file to back ends.
    const NEVER: [&str; 4] = ["balloon", "virtio-mem", "free-page-reporting", "vhost-user"];
    if let Some(what) = NEVER.into_iter().find(|what| options.iter().any(|option| option.contains(what))) {
        return Some(format!(
            "{what} reaches beyond a guest's memory: give the guest media of its own, not a pool"
        ));
    }
    let version = version_of(qemu)?;
    (version < OFFSETS_SINCE).then(|| {
        let ((major, minor), (first, second)) = (version, OFFSETS_SINCE);
        format!(
            "{} is version {major}.{minor}, and memory in a pool takes {first}.{second} or later: name another with \
             --qemu, or give the guest media of its own",
            show(qemu)
        )
    })
}

/// Where it says.
fn version_of(qemu: &Path) -> Option<(u32, u32)> {
    let said =
        Command::new(qemu).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut numbers = said.split_once("version ")?.1.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn with_pool<T>(pool: &Path, does: impl FnOnce(&Files<Pool>) -> Result<T>) -> Result<T> {
    let (media, _) = map(pool, Access::Write, None)?;
    let fs = Fs::open(media, &OpenOptions::default())?;
    let done = does(&Files::new(Arc::clone(&fs), Cred::root(), 0));
    let closed = fs.close();
    done.and_then(|done| closed.map(|()| done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beside_has_another_name() {
        let file = PoolFile { pool: "/p".into(), path: "/a/db.ram".into() };
        assert_eq!(file.beside(1).to_string(), "/p:/a/db.1.ram");
        assert_eq!(file.beside(1).beside(2).to_string(), "/p:/a/db.1.2.ram");
    }

    #[test]
    fn what_would_reach_beyond_is_refused() {
        let none = Path::new("/nowhere/qemu");
        for option in ["virtio-balloon-pci,free-page-reporting=on", "virtio-mem-pci", "vhost-user-blk-pci"] {
            assert!(refused(none, &["-device".into(), option.into()]).is_some(), "{option}");
        }
        assert_eq!(refused(none, &["-kernel".into(), "vmlinux".into()]), None);
    }
}
