//! The host's file tree, by plain system calls. To what lies deeper than a path reaches they come by an open directory, as
//! /proc/self/fd has it.

use std::borrow::Cow;
use std::ffi::CStr;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use lodestone::fs::{Kind, Time};
use lodestone::{Error, Result};
use rustix::fs::{self as sys, AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::{Sink, Source, Stat, Tree};
use crate::interrupt;

pub struct HostTree;

fn failed(e: Errno) -> Error {
    Error::new(e.raw_os_error(), "lode::host")
}

fn stat_of(s: &sys::Stat) -> Result<Stat> {
    Ok(Stat {
        file: (s.st_dev, s.st_ino),
        kind: Kind::from_mode(s.st_mode).ok_or(Error::new(libc::EINVAL, "lode::host::stat"))?,
        mode: s.st_mode & 0o7777,
        nlink: s.st_nlink,
        uid: s.st_uid,
        gid: s.st_gid,
        rdev: s.st_rdev,
        size: s.st_size as u64,
        atime: Time::new(s.st_atime, s.st_atime_nsec as u32),
        mtime: Time::new(s.st_mtime, s.st_mtime_nsec as u32),
    })
}

/// A path that is short enough for a system call, as long as it lives.
struct Near<'p> {
    path: Cow<'p, [u8]>,
    _dir: Option<OwnedFd>,
}

impl Deref for Near<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.path
    }
}

fn near(mut path: &[u8]) -> Result<Near<'_>> {
    let mut dir: Option<OwnedFd> = None;
    while let Some((part, rest)) = super::split_long(path) {
        let from = dir.as_ref().map_or(CWD, |fd| fd.as_fd());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        dir = Some(sys::openat(from, part, flags, Mode::empty()).map_err(failed)?);
        path = rest;
    }
    let path = match &dir {
        Some(fd) => Cow::from([format!("/proc/self/fd/{}/", fd.as_raw_fd()).as_bytes(), path].concat()),
        None => Cow::from(path),
    };
    Ok(Near { path, _dir: dir })
}

impl Tree for HostTree {
    fn stat(&self, path: &[u8], follow: bool) -> Result<Stat> {
        let near = near(path)?;
        stat_of(&if follow { sys::stat(&*near) } else { sys::lstat(&*near) }.map_err(failed)?)
    }

    fn names(&self, dir: &[u8]) -> Result<Vec<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = sys::open(&*near(dir)?, flags, Mode::empty()).map_err(failed)?;
        let mut names = Vec::new();
        for entry in sys::Dir::read_from(fd).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        Ok(sys::readlink(&*near(path)?, Vec::new()).map_err(failed)?.into_bytes())
    }

    fn open(&self, path: &[u8]) -> Result<Box<dyn Source + '_>> {
        let fd = sys::open(&*near(path)?, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        let stat = stat_of(&sys::fstat(&fd).map_err(failed)?)?;
        // Files of /proc and /sys say that they are empty, and are not.
        let stream = stat.kind != Kind::File || stat.size == 0;
        let reach = if stream { Reach::Stream } else { Reach::File };
        Ok(Box::new(HostFile { fd, reach }))
    }

    fn create(&self, path: &[u8], mode: u32, exclusive: bool) -> Result<Box<dyn Sink + '_>> {
        let exclusive = if exclusive { OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | exclusive;
        let fd = sys::open(&*near(path)?, flags, Mode::from_raw_mode(mode)).map_err(failed)?;
        let reach = match stat_of(&sys::fstat(&fd).map_err(failed)?)?.kind {
            Kind::File => Reach::File,
            Kind::BlockDevice => Reach::Device,
            _ => Reach::Stream,
        };
        Ok(Box::new(HostFile { fd, reach }))
    }

    fn mkdir(&self, path: &[u8], mode: u32) -> Result<()> {
        sys::mkdir(&*near(path)?, Mode::from_raw_mode(mode)).map_err(failed)
    }

    fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        sys::symlink(target, &*near(path)?).map_err(failed)
    }

    fn mknod(&self, path: &[u8], mode: u32, rdev: u64) -> Result<()> {
        sys::mknodat(CWD, &*near(path)?, FileType::from_raw_mode(mode), Mode::from_raw_mode(mode), rdev)
            .map_err(failed)
    }

    fn link(&self, old: &[u8], new: &[u8]) -> Result<()> {
        sys::link(&*near(old)?, &*near(new)?).map_err(failed)
    }

    fn unlink(&self, path: &[u8]) -> Result<()> {
        sys::unlink(&*near(path)?).map_err(failed)
    }

    fn chown(&self, path: &[u8], uid: Option<u32>, gid: u32) -> Result<()> {
        let (uid, gid) = (uid.map(rustix::process::Uid::from_raw), rustix::process::Gid::from_raw(gid));
        sys::chownat(CWD, &*near(path)?, uid, Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }

    fn chmod(&self, path: &[u8], mode: u32) -> Result<()> {
        sys::chmod(&*near(path)?, Mode::from_raw_mode(mode)).map_err(failed)
    }

    fn set_times(&self, path: &[u8], atime: Time, mtime: Time) -> Result<()> {
        let spec = |t: Time| Timespec { tv_sec: t.sec, tv_nsec: i64::from(t.nsec) };
        let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        sys::utimensat(CWD, &*near(path)?, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }

    fn xattrs(&self, path: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let near = near(path)?;
        let names = grown(|buffer| sys::llistxattr(&*near, buffer))?;
        let mut all = Vec::new();
        for name in names.split_inclusive(|&b| b == 0) {
            let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
            match grown(|buffer| sys::lgetxattr(&*near, name, buffer)) {
                Ok(value) => all.push((name.to_bytes().to_vec(), value)),
                Err(e) if e.errno() == libc::ENODATA => {} // removed in between
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    fn set_xattr(&self, path: &[u8], name: &[u8], value: &[u8]) -> Result<()> {
        sys::lsetxattr(&*near(path)?, name, value, sys::XattrFlags::empty()).map_err(failed)
    }
}

/// Calls with a buffer that is large enough for every answer that Linux gives (64 KiB).
fn grown(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> Result<Vec<u8>> {
    let mut buffer = vec![0; lodestone::limits::XATTR_VALUE_BYTES_MAX];
    let len = call(&mut buffer).map_err(failed)?;
    buffer.truncate(len);
    Ok(buffer)
}

struct HostFile {
    fd: OwnedFd,
    reach: Reach,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    File,
    /// Written at offsets, and as long as it is.
    Device,
    /// Read and written without offsets, to its end.
    Stream,
}

impl Source for HostFile {
    fn stat(&self) -> Result<Stat> {
        stat_of(&sys::fstat(&self.fd).map_err(failed)?)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let read = if self.reach == Reach::Stream {
            interrupt::wait_readable(self.fd.as_fd());
            if interrupt::requested() {
                return Err(failed(Errno::INTR));
            }
            rustix::io::read(&self.fd, buffer)
        } else {
            rustix::io::pread(&self.fd, buffer, offset)
        };
        read.map_err(failed)
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        if self.reach == Reach::Stream {
            return Ok(Some((offset, u64::MAX)));
        }
        let start = match sys::seek(&self.fd, sys::SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((offset, u64::MAX))),
            Err(e) => return Err(failed(e)),
        };
        let end = sys::seek(&self.fd, sys::SeekFrom::Hole(start)).unwrap_or(u64::MAX);
        Ok(Some((start, end)))
    }
}

impl Sink for HostFile {
    fn write(&self, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let written = if self.reach == Reach::Stream {
                rustix::io::write(&self.fd, bytes)
            } else {
                rustix::io::pwrite(&self.fd, bytes, offset)
            };
            match written {
                Ok(0) => return Err(failed(Errno::IO)),
                Ok(n) => (offset, bytes) = (offset + n as u64, &bytes[n..]),
                Err(Errno::INTR) if !crate::interrupt::requested() => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }

    fn set_len(&self, size: u64) -> Result<()> {
        match self.reach {
            Reach::File => sys::ftruncate(&self.fd, size).map_err(failed),
            Reach::Device | Reach::Stream => Ok(()),
        }
    }

    fn has_holes(&self) -> bool {
        self.reach == Reach::File
    }
}
