//! Trees of files behind one set of verbs: the host's and a pool's. `cp` copies from one to another without
//! asking which is which; `ls`, `cat` and `rm` use the pool's.
//!
//! Paths are bytes, and what a tree has below a path that a user named may lie deeper than any path of the system's reaches:
//! then it is gone to in pieces. Errors carry the bare errno: the command that asked knows both names and says them.

mod host;
mod pool;

use lodestone::fs::{Kind, Time};
use lodestone::limits::PATH_BYTES_MAX;
use lodestone::{Error, Result};

pub use host::HostTree;
pub use pool::{Named, PoolTree};

/// What stat says, on either side.
#[derive(Clone, Copy, Debug)]
pub struct Stat {
    /// Device and inode number: equal for two names of one file.
    pub file: (u64, u64),
    pub kind: Kind,
    /// Permission bits (07777).
    pub mode: u32,
    pub nlink: u64,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
}

pub trait Tree {
    fn stat(&self, path: &[u8], follow: bool) -> Result<Stat>;
    /// Without "." and "..", sorted.
    fn names(&self, dir: &[u8]) -> Result<Vec<Vec<u8>>>;
    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>>;
    fn open(&self, path: &[u8]) -> Result<Box<dyn Source + '_>>;
    /// As open(2) with O_CREAT and O_TRUNC; with `exclusive` also O_EXCL. The umask applies.
    fn create(&self, path: &[u8], mode: u32, exclusive: bool) -> Result<Box<dyn Sink + '_>>;
    fn mkdir(&self, path: &[u8], mode: u32) -> Result<()>;
    fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()>;
    /// `mode` with its type.
    fn mknod(&self, path: &[u8], mode: u32, rdev: u64) -> Result<()>;
    fn link(&self, old: &[u8], new: &[u8]) -> Result<()>;
    fn unlink(&self, path: &[u8]) -> Result<()>;
    /// Without `uid` the group alone.
    fn chown(&self, path: &[u8], uid: Option<u32>, gid: u32) -> Result<()>;
    /// Not for symbolic links: they have no mode.
    fn chmod(&self, path: &[u8], mode: u32) -> Result<()>;
    fn set_times(&self, path: &[u8], atime: Time, mtime: Time) -> Result<()>;
    /// Names and values, of a symbolic link its own.
    fn xattrs(&self, path: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>>;
    fn set_xattr(&self, path: &[u8], name: &[u8], value: &[u8]) -> Result<()>;
}

/// A file open for reading.
pub trait Source {
    fn stat(&self) -> Result<Stat>;
    /// 0 at the end of file. A pipe ignores the offset.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize>;
    /// The next range that is no hole, from `offset` on; none where only a hole follows.
    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>>;
}

/// A file open for writing.
pub trait Sink {
    /// All of `bytes`.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()>;
    /// A device or a pipe has what length it has.
    fn set_len(&self, size: u64) -> Result<()>;
    /// What is not written reads as zeros: of no device, which keeps what it held, and of no pipe.
    fn has_holes(&self) -> bool;
}

/// Refuses what a user named where no path of the system's is as long.
pub fn check_length(path: &[u8]) -> Result<()> {
    match path.len() > PATH_BYTES_MAX {
        true => Err(Error::new(libc::ENAMETOOLONG, "lode::tree")),
        false => Ok(()),
    }
}

/// Bytes of a path that are gone at once: less than any system takes, with what stands for a directory before them.
const PIECE_BYTES_MAX: usize = 4000;

/// Of a path that is too long the directory to go to first, and what is left from there; none where it is short enough, or has
/// a name that is too long.
fn split_long(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let begin = path.get(..PIECE_BYTES_MAX)?;
    let (dir, rest) = path.split_at(begin.iter().rposition(|&b| b == b'/')? + 1);
    let name = rest.iter().position(|&b| b != b'/')?;
    Some((dir, &rest[name..]))
}

/// `dir/name`.
pub fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if dir.is_empty() || dir.ends_with(b"/") { b"" } else { b"/" };
    [dir, slash, name].concat()
}

/// Where the last component of a path stands, trailing slashes aside; nowhere in the root.
fn last_component(path: &[u8]) -> std::ops::Range<usize> {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    let start = path[..end].iter().rposition(|&b| b == b'/').map_or(0, |at| at + 1);
    start..end
}

/// The last component of a path; empty for the root.
pub fn base_name(path: &[u8]) -> &[u8] {
    &path[last_component(path)]
}

/// What stands before the last component, with its slash; empty where nothing does.
pub fn parent(path: &[u8]) -> &[u8] {
    let last = last_component(path);
    if last.is_empty() { path } else { &path[..last.start] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_are_gone_in_pieces() {
        let short = [b"/", "d/".repeat(1999).as_bytes()].concat();
        assert_eq!((short.len(), split_long(&short)), (3999, None));
        for (path, slashes) in
            [("/d".repeat(5000), ""), ("d/".repeat(5000), "/"), ("dd//".repeat(3000), "//")]
        {
            let count = |part: &[u8]| part.iter().filter(|&&b| b == b'd').count();
            let (mut rest, mut gone) = (path.as_bytes(), 0);
            while let Some((dir, behind)) = split_long(rest) {
                assert!(dir.len() <= PIECE_BYTES_MAX && dir.ends_with(b"/") && !behind.starts_with(b"/"));
                gone += count(dir);
                rest = behind;
            }
            assert!(rest.len() <= PIECE_BYTES_MAX && rest.ends_with(slashes.as_bytes()));
            assert_eq!(gone + count(rest), path.matches('d').count());
        }
        assert_eq!(split_long("d".repeat(9000).as_bytes()), None);
        assert_eq!(split_long(&[b"d", "/".repeat(9000).as_bytes()].concat()), None);
    }

    #[test]
    fn paths_are_joined_and_taken_apart() {
        assert_eq!(join(b"/", b"a"), b"/a");
        assert_eq!(join(b"/a", b"b"), b"/a/b");
        assert_eq!(join(b"", b"b"), b"b");
        for (path, base) in [("/a/b", "b"), ("/a/b//", "b"), ("/", ""), ("", ""), ("a", "a"), ("a/..", "..")]
        {
            assert_eq!(base_name(path.as_bytes()), base.as_bytes(), "{path}");
        }
        for (path, above) in
            [("/a/b", "/a/"), ("/a/b//", "/a/"), ("/a", "/"), ("a", ""), ("/", "/"), ("", "")]
        {
            assert_eq!(parent(path.as_bytes()), above.as_bytes(), "{path}");
        }
    }
}
