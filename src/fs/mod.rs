//! The file system: every operation commits with self-validating records and one fence.
//!
//! Callers by inode number (the FUSE door, the mediator) use the node operations of [`Fs`]; callers by
//! path and descriptor use [`files`].

pub mod files;
pub mod types;

use std::sync::Arc;

use crate::error::Result;
use crate::media::Media;
pub use types::*;

/// How a data write keeps its promise (design §4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DataMode {
    /// Each write is atomic: new blocks, one commit.
    #[default]
    Cow,
    /// Metadata atomic, data synchronous but torn by a crash.
    InPlace,
}

#[derive(Clone, Debug, Default)]
pub struct MkfsOptions {
    /// At most 63 bytes of UTF-8.
    pub label: String,
    pub data: DataMode,
    /// Make the file system even where one is there already.
    pub force: bool,
    /// Stripe unit that the media uses (recorded for `lode info`).
    pub root_uid: u32,
    pub root_gid: u32,
}

#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Nothing may change; the media must be a private mapping (recovery writes to it).
    pub read_only: bool,
}

/// What the pool says of itself (`lode info`).
#[derive(Clone, Debug)]
pub struct PoolInfo {
    pub uuid: [u8; 16],
    pub label: String,
    pub format_version: u32,
    pub data: DataMode,
    pub bytes: u64,
    pub mounts: u32,
    pub clean: bool,
    pub created: Time,
}

/// What opening the pool had to do.
#[derive(Clone, Debug, Default)]
pub struct OpenReport {
    /// The last user closed it; nothing was scanned.
    pub was_clean: bool,
    pub inodes_scanned: u64,
    /// Interrupted operations voided.
    pub voided: u64,
    /// Inodes no directory names, reclaimed.
    pub orphans: u64,
    pub seconds: f64,
}

/// An inode held in memory: what a descriptor keeps. Cheap to clone. It does not keep a nameless inode
/// alive; an *open* ([`Fs::open_node`]) does.
#[derive(Clone)]
pub struct Node(Arc<()>);

impl Node {
    pub fn ino(&self) -> Ino { todo!() }
}

/// A mounted pool. Thread-safe; every operation is durable on return as far as the media's domain
/// goes (`page-cache`: after [`fsync`](Fs::fsync)).
///
/// Node operations that return an [`Attr`] of an entry (lookup, create, mknod, mkdir, symlink, link,
/// tmpfile) also add one *reference*, exactly as FUSE counts lookups; [`forget`](Fs::forget) gives
/// references back. An inode without a name lives until its references and opens are gone.
pub struct Fs<M: Media> {
    media: M,
}

#[allow(unused_variables)]
impl<M: Media> Fs<M> {
    /// Makes an empty file system. EEXIST where one is there and `force` is not set.
    pub fn mkfs(media: &M, options: &MkfsOptions) -> Result<()> { todo!() }
    /// Reads what the superblock says, without opening the pool or changing anything.
    pub fn probe(media: &M) -> Result<PoolInfo> { todo!() }
    /// Opens the pool: loads the checkpoint of a clean close, or recovers.
    pub fn open(media: M, options: &OpenOptions) -> Result<Arc<Fs<M>>> { todo!() }
    /// Writes a checkpoint and marks the pool clean. Later operations fail with EIO.
    pub fn close(&self) -> Result<()> { todo!() }
    pub fn media(&self) -> &M { &self.media }
    pub fn info(&self) -> PoolInfo { todo!() }
    pub fn open_report(&self) -> &OpenReport { todo!() }

    pub fn lookup(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<Attr> { todo!() }
    /// Gives back `count` references that lookups and creations took.
    pub fn forget(&self, ino: Ino, count: u64) { todo!() }
    pub fn getattr(&self, ino: Ino) -> Result<Attr> { todo!() }
    pub fn setattr(&self, cred: &Cred, ino: Ino, set: &SetAttr) -> Result<Attr> { todo!() }
    /// As access(2): `mask` of `R_OK`, `W_OK`, `X_OK`.
    pub fn access(&self, cred: &Cred, ino: Ino, mask: i32) -> Result<()> { todo!() }
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> { todo!() }
    /// `mode` holds type and permissions, umask not yet applied (a default ACL replaces it); `umask`
    /// is the caller's.
    pub fn mknod(&self, cred: &Cred, dir: Ino, name: &[u8], mode: u32, umask: u32, rdev: u64) -> Result<Attr> { todo!() }
    pub fn mkdir(&self, cred: &Cred, dir: Ino, name: &[u8], mode: u32, umask: u32) -> Result<Attr> { todo!() }
    /// open(O_CREAT): the bool says whether it was created. Takes a reference and an open.
    /// `flags` are open(2)'s; O_EXCL, O_TRUNC and the access mode are honoured.
    pub fn create(&self, cred: &Cred, dir: Ino, name: &[u8], mode: u32, umask: u32, flags: i32) -> Result<(Attr, bool)> { todo!() }
    /// O_TMPFILE: a file without a name. Takes a reference and an open.
    pub fn tmpfile(&self, cred: &Cred, dir: Ino, mode: u32, umask: u32) -> Result<Attr> { todo!() }
    pub fn symlink(&self, cred: &Cred, dir: Ino, name: &[u8], target: &[u8]) -> Result<Attr> { todo!() }
    pub fn link(&self, cred: &Cred, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> { todo!() }
    pub fn unlink(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<()> { todo!() }
    pub fn rmdir(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<()> { todo!() }
    /// `flags`: 0, `RENAME_NOREPLACE` or `RENAME_EXCHANGE`; others are EINVAL.
    pub fn rename(&self, cred: &Cred, from: Ino, name: &[u8], to: Ino, newname: &[u8], flags: u32) -> Result<()> { todo!() }
    /// open(2) on an inode: permission by the access mode, O_TRUNC. Takes an open.
    pub fn open_node(&self, cred: &Cred, ino: Ino, flags: i32) -> Result<()> { todo!() }
    /// The counterpart of every open.
    pub fn release(&self, ino: Ino) { todo!() }
    /// Bytes read; less than asked only at the end of file.
    pub fn read(&self, ino: Ino, offset: u64, dst: &mut [u8]) -> Result<usize> { todo!() }
    /// Writes all of `src` at `offset`, or, with `append`, at the end of file; returns the offset
    /// after the last byte. Set-id bits are dropped unless `cred` is the superuser.
    pub fn write(&self, cred: &Cred, ino: Ino, offset: u64, src: &[u8], append: bool) -> Result<u64> { todo!() }
    /// `mode`: FALLOC_FL_* bits. Collapse and insert are EOPNOTSUPP.
    pub fn fallocate(&self, ino: Ino, mode: i32, offset: u64, len: u64) -> Result<()> { todo!() }
    /// SEEK_DATA and SEEK_HOLE.
    pub fn seek(&self, ino: Ino, offset: u64, whence: i32) -> Result<u64> { todo!() }
    /// Durable on return against power loss, in every domain that can be.
    pub fn fsync(&self, ino: Ino, data_only: bool) -> Result<()> { todo!() }
    pub fn sync(&self) -> Result<()> { todo!() }
    pub fn statfs(&self) -> StatFs { todo!() }
    /// Calls `each` for the entries after `cookie` (0 to begin; "." and ".." come first, cookies 1 and
    /// 2) until it answers false. `each` must not call the file system.
    pub fn readdir(&self, ino: Ino, cookie: u64, each: &mut dyn FnMut(&DirEntry) -> bool) -> Result<()> { todo!() }
    /// As [`readdir`](Fs::readdir) with attributes, taking a reference for each entry (except "." and
    /// "..") for which `each` answers true.
    pub fn readdir_plus(&self, ino: Ino, cookie: u64, each: &mut dyn FnMut(&DirEntry, &Attr) -> bool) -> Result<()> { todo!() }
    /// The value. `size` semantics are the door's business.
    pub fn getxattr(&self, cred: &Cred, ino: Ino, name: &[u8]) -> Result<Vec<u8>> { todo!() }
    /// `flags`: 0, XATTR_CREATE or XATTR_REPLACE.
    pub fn setxattr(&self, cred: &Cred, ino: Ino, name: &[u8], value: &[u8], flags: i32) -> Result<()> { todo!() }
    /// Names, each closed by a NUL.
    pub fn listxattr(&self, cred: &Cred, ino: Ino) -> Result<Vec<u8>> { todo!() }
    pub fn removexattr(&self, cred: &Cred, ino: Ino, name: &[u8]) -> Result<()> { todo!() }

    // Callers by path and descriptor (files.rs): no table look-up per call.

    pub fn node(&self, ino: Ino) -> Result<Node> { todo!() }
    /// Walks `path` from `base` (the root where the path is absolute or `base` is None), checking search
    /// permission. `follow`: the last component too, if it is a symbolic link.
    pub fn walk(&self, cred: &Cred, base: Option<&Node>, path: &[u8], follow: bool) -> Result<Node> { todo!() }
    /// Walks all but the last component: the directory and the last name (without trailing slashes;
    /// "." and ".." and an empty name are returned as they are, the operation refuses them).
    pub fn walk_parent<'p>(&self, cred: &Cred, base: Option<&Node>, path: &'p [u8]) -> Result<(Node, &'p [u8])> { todo!() }
    pub fn attr_of(&self, node: &Node) -> Result<Attr> { todo!() }
    pub fn read_at(&self, node: &Node, offset: u64, dst: &mut [u8]) -> Result<usize> { todo!() }
    pub fn write_at(&self, cred: &Cred, node: &Node, offset: u64, src: &[u8], append: bool) -> Result<u64> { todo!() }
}
