//! Reading directories through a descriptor: the offset is the cookie of the last entry read.

use super::{Fd, File, Files};
use crate::error::{Error, Result};
use crate::fs::{DirEntry, Kind};
use crate::media::Media;
use std::mem::offset_of;

type Record = libc::dirent64;
/// Bytes of a record in front of the name.
const HEAD: usize = offset_of!(Record, d_name);

impl<M: Media> Files<M> {
    /// A descriptor to read a directory with.
    pub fn opendir(&self, path: &[u8]) -> Result<Fd> {
        self.open(path, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC, 0)
    }

    pub fn closedir(&self, fd: Fd) -> Result<()> {
        self.close(fd)
    }

    /// Calls `each` for the entries from the offset on, until it answers false; the entry it refused
    /// comes first the next time. `each` must not call the file system.
    pub fn readdir(&self, fd: Fd, each: &mut dyn FnMut(&DirEntry) -> bool) -> Result<()> {
        let file = self.open_file(fd)?;
        file.check_directory()?;
        let mut offset = file.offset.write();
        let start = *offset;
        self.fs.readdir(file.node.ino(), start, &mut |entry| {
            let more = each(entry);
            if more {
                *offset = entry.cookie;
            }
            more
        })
    }

    /// Fills `dst` with `struct dirent64` records as getdents64(2) does and returns their bytes; 0 at
    /// the end. EINVAL where not even one fits.
    pub fn getdents(&self, fd: Fd, dst: &mut [u8]) -> Result<usize> {
        let mut used = 0;
        let mut refused = false;
        self.readdir(fd, &mut |entry| match put(&mut dst[used..], entry) {
            Some(bytes) => {
                used += bytes;
                true
            }
            None => {
                refused = true;
                false
            }
        })?;
        match (used, refused) {
            (0, true) => Err(Error::new(libc::EINVAL, "files::getdents")),
            _ => Ok(used),
        }
    }

    /// Where reading goes on: 0, or the cookie of an entry. Stays valid whatever comes and goes.
    pub fn telldir(&self, fd: Fd) -> Result<u64> {
        let file = self.open_file(fd)?;
        file.check_directory()?;
        let offset = *file.offset.read();
        Ok(offset)
    }

    /// Reading goes on behind the entry with this cookie; 0 begins again.
    pub fn seekdir(&self, fd: Fd, cookie: u64) -> Result<()> {
        let file = self.open_file(fd)?;
        file.check_directory()?;
        *file.offset.write() = cookie;
        Ok(())
    }

    pub fn rewinddir(&self, fd: Fd) -> Result<()> {
        self.seekdir(fd, 0)
    }
}

impl File {
    fn check_directory(&self) -> Result<()> {
        match self.node.kind() {
            Kind::Directory => Ok(()),
            _ => Err(Error::new(libc::ENOTDIR, "files::readdir")),
        }
    }
}

/// One record, 8-byte aligned, its name closed by a NUL. Nothing where it does not fit.
fn put(dst: &mut [u8], entry: &DirEntry) -> Option<usize> {
    let bytes = (HEAD + entry.name.len() + 1).next_multiple_of(align_of::<Record>());
    let record = dst.get_mut(..bytes)?;
    record[offset_of!(Record, d_ino)..][..8].copy_from_slice(&u64::from(entry.ino.0).to_ne_bytes());
    record[offset_of!(Record, d_off)..][..8].copy_from_slice(&entry.cookie.to_ne_bytes());
    record[offset_of!(Record, d_reclen)..][..2].copy_from_slice(&(bytes as u16).to_ne_bytes());
    record[offset_of!(Record, d_type)] = entry.kind as u8;
    record[HEAD..][..entry.name.len()].copy_from_slice(entry.name);
    record[HEAD + entry.name.len()..].fill(0);
    Some(bytes)
}
