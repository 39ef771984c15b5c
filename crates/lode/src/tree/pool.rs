//! A pool's file tree.
//!
//! Works by path, as the calling user. References that operations on entries take are given back at once;
//! an open file holds its inode for as long as it lives.

use std::sync::Arc;

use lodestone::fs::{Attr, Cred, Fs, Ino, Kind, Node, SetAttr, SetTime, Time};
use lodestone::media::Media;
use lodestone::{Error, Result};

use super::{Sink, Source, Stat, Tree};

pub struct PoolTree<M: Media> {
    pub fs: Arc<Fs<M>>,
    pub cred: Cred,
    /// Stands for the device number: two open pools differ in it.
    pub device: u64,
    umask: u32,
}

/// An entry of a directory.
pub struct Named {
    pub name: Vec<u8>,
    pub ino: Ino,
    pub kind: Kind,
}

impl<M: Media> PoolTree<M> {
    pub fn new(fs: Arc<Fs<M>>, device: u64) -> PoolTree<M> {
        // There is no call that only reads the umask; nothing is created between these two.
        let umask = rustix::process::umask(rustix::fs::Mode::empty());
        rustix::process::umask(umask);
        PoolTree { fs, cred: Cred::process(), device, umask: umask.as_raw_mode() }
    }

    /// The directory to go to first where a path is very long, and what is left of it.
    fn near<'p>(&self, mut path: &'p [u8]) -> Result<(Option<Node>, &'p [u8])> {
        let mut base = None;
        while let Some((dir, rest)) = super::split_long(path) {
            base = Some(self.fs.walk(&self.cred, base.as_ref(), dir, true)?);
            path = rest;
        }
        Ok((base, path))
    }

    fn walk(&self, path: &[u8], follow: bool) -> Result<Node> {
        let (base, path) = self.near(path)?;
        self.fs.walk(&self.cred, base.as_ref(), path, follow)
    }

    fn walk_parent<'p>(&self, path: &'p [u8]) -> Result<(Node, &'p [u8])> {
        let (base, path) = self.near(path)?;
        self.fs.walk_parent(&self.cred, base.as_ref(), path)
    }

    fn node(&self, path: &[u8], follow: bool) -> Result<Node> {
        // As with open(2), a trailing slash asks for a directory, through a symbolic link too.
        let slash = path.len() > 1 && path.ends_with(b"/");
        let node = self.walk(path, follow || slash)?;
        if slash && self.fs.attr_of(&node)?.mode & libc::S_IFMT != libc::S_IFDIR {
            return Err(Error::new(libc::ENOTDIR, "lode::pool::node"));
        }
        Ok(node)
    }

    pub fn attr(&self, path: &[u8], follow: bool) -> Result<Attr> {
        self.fs.attr_of(&self.node(path, follow)?)
    }

    /// What a directory says of its names, but for "." and "..", sorted: that is known of inodes that cannot be read, too.
    pub fn entries(&self, dir: Ino) -> Result<Vec<Named>> {
        self.fs.access(&self.cred, dir, libc::R_OK)?;
        let mut entries = Vec::new();
        self.fs.readdir(dir, 0, &mut |e| {
            if e.name != b"." && e.name != b".." {
                entries.push(Named { name: e.name.to_vec(), ino: e.ino, kind: e.kind });
            }
            true
        })?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Gives back the reference that came with `attr`.
    fn settle(&self, attr: Attr) {
        self.fs.forget(attr.ino, 1);
    }

    fn stat_of(&self, a: &Attr) -> Stat {
        Stat {
            file: (self.device, u64::from(a.ino.0)),
            kind: a.kind(),
            mode: a.mode & 0o7777,
            nlink: u64::from(a.nlink),
            uid: a.uid,
            gid: a.gid,
            rdev: a.rdev,
            size: a.size,
            atime: a.atime,
            mtime: a.mtime,
        }
    }

    /// A path whose last component is a symbolic link or not there: where it leads, so that creating
    /// follows it as open(2) does.
    fn created_at(&self, path: &[u8], exclusive: bool) -> Result<Vec<u8>> {
        let mut path = path.to_vec();
        for _ in 0..lodestone::limits::SYMLINK_DEPTH_MAX {
            let node = match self.walk(&path, false) {
                Ok(node) => node,
                Err(e) if e.errno() == libc::ENOENT => return Ok(path),
                Err(e) => return Err(e),
            };
            if exclusive || self.fs.attr_of(&node)?.mode & libc::S_IFMT != libc::S_IFLNK {
                return Ok(path);
            }
            let target = self.fs.readlink(node.ino())?;
            let dir = path.iter().rposition(|&b| b == b'/').map_or(&b""[..], |at| &path[..=at]);
            path = if target.starts_with(b"/") { target } else { super::join(dir, &target) };
        }
        Err(Error::new(libc::ELOOP, "lode::pool::create"))
    }

    fn set(&self, path: &[u8], set: SetAttr) -> Result<()> {
        let node = self.walk(path, false)?;
        self.fs.setattr(&self.cred, node.ino(), &set).map(|_| ())
    }
}

impl<M: Media> Tree for PoolTree<M> {
    fn stat(&self, path: &[u8], follow: bool) -> Result<Stat> {
        Ok(self.stat_of(&self.attr(path, follow)?))
    }

    fn names(&self, dir: &[u8]) -> Result<Vec<Vec<u8>>> {
        let dir = self.node(dir, true)?;
        Ok(self.entries(dir.ino())?.into_iter().map(|entry| entry.name).collect())
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.fs.readlink(self.node(path, false)?.ino())
    }

    fn open(&self, path: &[u8]) -> Result<Box<dyn Source + '_>> {
        let node = self.node(path, true)?;
        self.fs.open_node(&self.cred, node.ino(), libc::O_RDONLY)?;
        Ok(Box::new(PoolFile { tree: self, node, referenced: false }))
    }

    fn create(&self, path: &[u8], mode: u32, exclusive: bool) -> Result<Box<dyn Sink + '_>> {
        let path = self.created_at(path, exclusive)?;
        let (dir, name) = self.walk_parent(&path)?;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | if exclusive { libc::O_EXCL } else { 0 };
        let (attr, _) = self.fs.create(&self.cred, dir.ino(), name, mode, self.umask, flags)?;
        let node = self.fs.node(attr.ino)?;
        Ok(Box::new(PoolFile { tree: self, node, referenced: true }))
    }

    fn mkdir(&self, path: &[u8], mode: u32) -> Result<()> {
        let (dir, name) = self.walk_parent(path)?;
        let attr = self.fs.mkdir(&self.cred, dir.ino(), name, mode, self.umask)?;
        self.settle(attr);
        Ok(())
    }

    fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        let (dir, name) = self.walk_parent(path)?;
        let attr = self.fs.symlink(&self.cred, dir.ino(), name, target)?;
        self.settle(attr);
        Ok(())
    }

    fn mknod(&self, path: &[u8], mode: u32, rdev: u64) -> Result<()> {
        let (dir, name) = self.walk_parent(path)?;
        let attr = self.fs.mknod(&self.cred, dir.ino(), name, mode, self.umask, rdev)?;
        self.settle(attr);
        Ok(())
    }

    fn link(&self, old: &[u8], new: &[u8]) -> Result<()> {
        let node = self.walk(old, false)?;
        let (dir, name) = self.walk_parent(new)?;
        let attr = self.fs.link(&self.cred, node.ino(), dir.ino(), name)?;
        self.settle(attr);
        Ok(())
    }

    fn unlink(&self, path: &[u8]) -> Result<()> {
        let (dir, name) = self.walk_parent(path)?;
        self.fs.unlink(&self.cred, dir.ino(), name)
    }

    fn chown(&self, path: &[u8], uid: Option<u32>, gid: u32) -> Result<()> {
        self.set(path, SetAttr { uid, gid: Some(gid), ..SetAttr::default() })
    }

    fn chmod(&self, path: &[u8], mode: u32) -> Result<()> {
        self.set(path, SetAttr { mode: Some(mode), ..SetAttr::default() })
    }

    fn set_times(&self, path: &[u8], atime: Time, mtime: Time) -> Result<()> {
        let (atime, mtime) = (Some(SetTime::To(atime)), Some(SetTime::To(mtime)));
        self.set(path, SetAttr { atime, mtime, ..SetAttr::default() })
    }

    fn xattrs(&self, path: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let ino = self.node(path, false)?.ino();
        let names = self.fs.listxattr(&self.cred, ino)?;
        let names = names.split(|&b| b == 0).filter(|name| !name.is_empty());
        names.map(|name| Ok((name.to_vec(), self.fs.getxattr(&self.cred, ino, name)?))).collect()
    }

    fn set_xattr(&self, path: &[u8], name: &[u8], value: &[u8]) -> Result<()> {
        let node = self.walk(path, false)?;
        self.fs.setxattr(&self.cred, node.ino(), name, value, 0)
    }
}

struct PoolFile<'a, M: Media> {
    tree: &'a PoolTree<M>,
    node: Node,
    /// Creating took a reference besides the open.
    referenced: bool,
}

impl<M: Media> Drop for PoolFile<'_, M> {
    fn drop(&mut self) {
        self.tree.fs.release(self.node.ino());
        if self.referenced {
            self.tree.fs.forget(self.node.ino(), 1);
        }
    }
}

impl<M: Media> PoolFile<'_, M> {
    /// Permission was asked when the file was opened; a file may be created with a mode that forbids it.
    fn opener(&self) -> Cred {
        Cred { enforce: false, ..self.tree.cred.clone() }
    }
}

impl<M: Media> Source for PoolFile<'_, M> {
    fn stat(&self) -> Result<Stat> {
        Ok(self.tree.stat_of(&self.tree.fs.attr_of(&self.node)?))
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.tree.fs.read_at(&self.node, offset, buffer)
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let fs = &self.tree.fs;
        let start = match fs.seek(self.node.ino(), offset, libc::SEEK_DATA) {
            Ok(start) => start,
            Err(e) if e.errno() == libc::ENXIO => return Ok(None),
            Err(e) => return Err(e),
        };
        Ok(Some((start, fs.seek(self.node.ino(), start, libc::SEEK_HOLE)?)))
    }
}

impl<M: Media> Sink for PoolFile<'_, M> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.tree.fs.write_at(&self.opener(), &self.node, offset, bytes, false).map(|_| ())
    }

    fn set_len(&self, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.tree.fs.setattr(&self.opener(), self.node.ino(), &set).map(|_| ())
    }

    fn has_holes(&self) -> bool {
        true
    }
}
