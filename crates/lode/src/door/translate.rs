//! Our types in `fuser`'s words and back.

use std::time::UNIX_EPOCH;

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};
use lodestone::fs::{Attr, DirEntry, Ino, Kind, SetTime, Time};

/// What stat reports as the unit of I/O, whatever the media: programs size buffers by it, and the
/// kernel's idea of a file's block must not exceed a page.
const BLOCK_BYTES: u32 = 4096;

/// The kernel's name of an inode is our number: it names only what we told it. Anything else is stale.
pub fn ino(node: INodeNo) -> Result<Ino, lodestone::Error> {
    match u32::try_from(node.0) {
        Ok(n) => Ok(Ino(n)),
        Err(_) => Err(lodestone::Error::new(libc::ESTALE, "door::ino")),
    }
}

pub fn errno(error: &lodestone::Error) -> Errno {
    Errno::from_i32(error.errno())
}

pub fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Fifo => FileType::NamedPipe,
        Kind::CharDevice => FileType::CharDevice,
        Kind::Directory => FileType::Directory,
        Kind::BlockDevice => FileType::BlockDevice,
        Kind::File => FileType::RegularFile,
        Kind::Symlink => FileType::Symlink,
        Kind::Socket => FileType::Socket,
    }
}

pub fn attributes(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(u64::from(attr.ino.0)),
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.to_system_time(),
        mtime: attr.mtime.to_system_time(),
        ctime: attr.ctime.to_system_time(),
        crtime: attr.btime.to_system_time(),
        kind: file_type(attr.kind()),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        // The protocol has 32 bits, which hold every device number Linux has.
        rdev: attr.rdev as u32,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// The entry that says "no such name, and you may remember that": inode 0.
pub fn no_entry() -> FileAttr {
    bare(0, Kind::File)
}

/// An entry of a listing of which nothing is known but what the directory says.
pub fn unread(entry: &DirEntry) -> FileAttr {
    bare(entry.ino.0, entry.kind)
}

fn bare(number: u32, kind: Kind) -> FileAttr {
    FileAttr {
        ino: INodeNo(u64::from(number)),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: file_type(kind),
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

pub fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(t) => SetTime::To(Time::from_system_time(t)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_number_we_never_gave_is_stale() {
        assert_eq!(ino(INodeNo(1)).unwrap(), Ino::ROOT);
        assert_eq!(ino(INodeNo(1 << 32)).unwrap_err().errno(), libc::ESTALE);
    }
}
