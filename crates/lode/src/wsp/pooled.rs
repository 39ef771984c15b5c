//! Guest memory in a pool: one of its files, which QEMU maps from what the pool is made of.
//!
//! Such a file is *fixed*: its blocks stand still until `lode wsp rm` (`lodestone::fs::FIXED`). So the pool may be mounted
//! meanwhile, or not, and its other files do not notice. To make or remove the file takes the pool for a moment, or its mount.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use lodestone::error::{Error, Result};
use lodestone::fs::files::Files;
use lodestone::fs::{Cred, FIXED, FixedPlace, Fs, OpenOptions};
use lodestone::media::{Pool, holds_pool, mounts};
use lodestone::quote::Shown;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

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

/// What is written beside the slots of an image that was put aside, where its memory is not beside them.
#[derive(Serialize, Deserialize, Debug)]
#[serde(untagged)]
pub enum Kept {
    /// It stays where it is.
    InPool { file: PoolFile, number: u64 },
    /// It got another name, within its file system.
    Moved { path: PathBuf, inode: u64 },
}

impl Kept {
    /// The name of that document.
    pub const NAME: &str = "memory.json";
    const NEW_NAME: &str = "memory.json.new";

    /// Before the memory is put aside: whole after a power failure, or not there.
    pub fn write(&self, image: &Path) -> Result<()> {
        let (path, new) = (image.join(Kept::NAME), image.join(Kept::NEW_NAME));
        let text = serde_json::to_string(self).expect("our documents have string keys only");
        let written = fs::File::create(&new).and_then(|mut file| {
            file.write_all((text + "\n").as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            [Some(image), image.parent()]
                .into_iter()
                .flatten()
                .try_for_each(|dir| fs::File::open(dir)?.sync_all())
        });
        written.map_err(|e| {
            let _ = fs::remove_file(&new);
            Error::io(e, SITE, "cannot write", &path)
        })
    }

    /// None of an image that has its memory beside its slots.
    pub fn read(image: &Path) -> Result<Option<Kept>> {
        let path = image.join(Kept::NAME);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(e, SITE, "cannot read", &path)),
        };
        serde_json::from_slice(&text).map(Some).map_err(|e| {
            Error::message(libc::EPROTO, SITE, format!("{} is not understood: {e}", path.shown()))
        })
    }

    /// Removes the memory, unless something else is there by now.
    pub fn remove(&self) -> Result<()> {
        match self {
            Kept::InPool { file, number } => file.remove(*number),
            Kept::Moved { path, inode } => match fs::symlink_metadata(path) {
                Ok(about) if about.ino() == *inode => {
                    fs::remove_file(path).map_err(|e| Error::io(e, SITE, "cannot remove", path))
                }
                Ok(_) => Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                Err(e) => Err(Error::io(e, SITE, "cannot remove", path)),
            },
        }
    }
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
            let device = device_of(&about);
            let dir = fs::canonicalize(media).map_err(|e| failed(&e))?;
            let mounts = mounts::pools().map_err(|e| failed(&e))?;
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

    /// Makes the file where there is none, so long, in one piece, and says where it is, and whether it was made now. One that is
    /// there, is our own, and as long, stays as it is.
    pub fn make(&self, bytes: u64) -> Result<(FixedPlace, bool)> {
        match self.make_as(bytes, libc::O_EXCL) {
            Err(e) if e.errno() == libc::EEXIST => Ok((self.make_as(bytes, 0)?, false)),
            made => Ok((made?, true)),
        }
    }

    /// Makes one beside it, for memory anew where the old is kept.
    pub fn make_beside(&self, bytes: u64) -> Result<(PoolFile, FixedPlace)> {
        let mut n = 1;
        loop {
            let path = self.path.with_extension(format!("{n}.ram"));
            let file = PoolFile { pool: self.pool.clone(), path };
            match file.make_as(bytes, libc::O_EXCL) {
                Err(e) if e.errno() == libc::EEXIST => n += 1,
                made => return Ok((file, made?)),
            }
        }
    }

    /// `exclusive`: O_EXCL, or 0.
    fn make_as(&self, bytes: u64, exclusive: i32) -> Result<FixedPlace> {
        let path = self.path.as_os_str().as_bytes();
        let place = match self.on_mount() {
            Some(file) => make_on_mount(&file, bytes, exclusive),
            None => with_pool(&self.pool, |files| make_in_pool(files, path, bytes, exclusive)),
        };
        let place = place.map_err(|e| self.failed(e))?;
        let place = FixedPlace::decode(&place).ok_or_else(|| {
            let message =
                format!("{self} does not say where it lies: mount the pool by this version of lode");
            Error::message(libc::EPROTO, SITE, message)
        })?;
        match place.path == self.pool && place.bytes == bytes {
            true => Ok(place),
            false => {
                let message = format!(
                    "{self} lies in {} for its server, which sees other files: use that",
                    show(&place.path)
                );
                Err(Error::message(libc::EXDEV, SITE, message))
            }
        }
    }

    /// Gives the blocks back. Nothing where the file with this number has gone already, whoever has one of its name now.
    pub fn remove(&self, number: u64) -> Result<()> {
        let path = self.path.as_os_str().as_bytes();
        let removed = match self.on_mount() {
            Some(file) => remove_on_mount(&file, number),
            None => with_pool(&self.pool, |files| remove_in_pool(files, path, number)),
        };
        removed.map_err(|e| self.failed(e))
    }

    /// Its path on a mount of the pool, if there is one: then the mount's server has the pool.
    fn on_mount(&self) -> Option<PathBuf> {
        let mounts = mounts::pools().ok()?.into_iter().rev();
        let mut here = mounts.filter(|mount| Path::new(&mount.source) == self.pool && !mount.read_only);
        // Not one whose server is dead, nor one that another mount hides.
        let answers = |mount: &mounts::Entry| {
            fs::metadata(&mount.dir).is_ok_and(|about| device_of(&about) == mount.device)
        };
        here.find_map(|mount| {
            let file = mount.dir.join(self.path.strip_prefix(&mount.root).ok()?);
            answers(&mount).then_some(file)
        })
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
                format!(
                    "{self} exists, and is something else or somebody else's: remove it, or choose another directory"
                ),
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

fn device_of(about: &fs::Metadata) -> (u32, u32) {
    (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()))
}

/// Whoever else owns a file, or has a name of it, has the memory of the guest.
fn is_ours(uid: u32, links: u64) -> Result<()> {
    match uid == rustix::process::geteuid().as_raw() && links == 1 {
        true => Ok(()),
        false => Err(Error::message(libc::EEXIST, SITE, "the file is somebody else's, or has other names")),
    }
}

/// What getxattr answers of the file that was made.
fn make_in_pool(files: &Files<Pool>, path: &[u8], bytes: u64, exclusive: i32) -> Result<Vec<u8>> {
    let fd = files.open(path, libc::O_RDWR | libc::O_CREAT | libc::O_NOFOLLOW | exclusive, 0o600)?;
    let about = files.fstat(fd).and_then(|about| is_ours(about.uid, about.nlink.into()));
    let made = about.and_then(|()| files.fsetxattr(fd, FIXED, bytes.to_string().as_bytes(), 0));
    let place = made.and_then(|()| files.fgetxattr(fd, FIXED));
    files.close(fd)?;
    place.inspect_err(|_| {
        // What was there is not empty.
        if files.lstat(path).is_ok_and(|about| about.size == 0) {
            let _ = files.unlink(path);
        }
    })
}

fn remove_in_pool(files: &Files<Pool>, path: &[u8], number: u64) -> Result<()> {
    if files.getxattr(path, false, FIXED).is_ok_and(|place| is_another(&place, number)) {
        return Ok(());
    }
    match files.removexattr(path, false, FIXED).map_err(|e| (e.errno(), e)) {
        Ok(()) | Err((libc::ENODATA, _)) => files.unlink(path),
        // The file, for the pool is open.
        Err((libc::ENOENT, _)) => Ok(()),
        Err((_, e)) => Err(e),
    }
}

/// As [`make_in_pool`].
fn make_on_mount(file: &Path, bytes: u64, exclusive: i32) -> Result<Vec<u8>> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | exclusive);
    let open = options.open(file).map_err(|e| Error::io(e, SITE, "cannot make", file))?;
    let about = open.metadata().map_err(|e| Error::io(e, SITE, "cannot examine", file))?;
    is_ours(about.uid(), about.nlink())?;
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

fn remove_on_mount(file: &Path, number: u64) -> Result<()> {
    let mut place = vec![0; PLACE_BYTES_MAX];
    if rustix::fs::lgetxattr(file, fixed(), &mut place[..]).is_ok_and(|len| is_another(&place[..len], number))
    {
        return Ok(());
    }
    match rustix::fs::lremovexattr(file, fixed()) {
        Ok(()) | Err(Errno::NODATA) => {}
        // The file, for the mount answers.
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::BUSY) => {
            let message = "a guest, or a copy of one, runs in it: stop that first";
            return Err(Error::message(libc::EBUSY, SITE, message));
        }
        Err(e) => return Err(Error::io(e.into(), SITE, "cannot remove", file)),
    }
    fs::remove_file(file).map_err(|e| Error::io(e, SITE, "cannot remove", file))
}

/// Whether a fixed file is not the one with this number.
fn is_another(place: &[u8], number: u64) -> bool {
    FixedPlace::decode(place).is_some_and(|place| place.number != number)
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
    // Who opens the pool may do all with it; what is made is his.
    let cred = Cred { enforce: false, ..Cred::process() };
    let done = does(&Files::new(Arc::clone(&fs), cred, 0));
    let closed = fs.close();
    done.and_then(|done| closed.map(|()| done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_put_aside_is_removed_and_no_other() {
        let dir = std::env::temp_dir().join(format!("lode-wsp-kept-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        assert!(Kept::read(&dir).unwrap().is_none());
        let path = dir.join("vm.img.kept.1");
        fs::write(&path, b"memory").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        Kept::Moved { path: path.clone(), inode: inode + 1 }.remove().unwrap();
        assert!(path.exists(), "somebody else's");
        Kept::Moved { path: path.clone(), inode }.write(&dir).unwrap();
        let kept = Kept::read(&dir).unwrap().unwrap();
        kept.remove().unwrap();
        assert!(!path.exists());
        kept.remove().unwrap();
        fs::write(dir.join(Kept::NAME), r#"{"file":{"pool":"/p","path":"/g.ram"},"number":7}"#).unwrap();
        assert!(matches!(Kept::read(&dir).unwrap(), Some(Kept::InPool { number: 7, .. })));
        fs::write(dir.join(Kept::NAME), "{}").unwrap();
        assert!(Kept::read(&dir).is_err());
        fs::remove_dir_all(&dir).unwrap();
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
