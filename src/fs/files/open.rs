//! open(2): what the flags ask for, what the last component is, and what Linux answers.
//!
//! The number is reserved before anything is opened or made, so that a full table has no effects.

use super::{AT_FDCWD, Fd, File, Files};
use crate::error::{Error, Result};
use crate::fs::walk::follow_one;
use crate::fs::{Attr, Kind, Node};
use crate::media::Media;
use crate::sync::Lock;
use libc::{
    O_ACCMODE, O_CLOEXEC, O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_RDONLY, O_TMPFILE, O_TRUNC,
    S_IFREG,
};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

/// O_TMPFILE without the O_DIRECTORY that it carries for old kernels.
const TMPFILE: i32 = O_TMPFILE & !O_DIRECTORY;

impl<M: Media> Files<M> {
    pub fn open(&self, path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
        self.openat(AT_FDCWD, path, flags, mode)
    }

    /// The lowest free descriptor for the file that `path` names. `mode`: permission bits of a file
    /// that is made, before the umask.
    pub fn openat(&self, at: Fd, path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
        let flags = match flags & O_PATH {
            0 => flags,
            _ => flags & (O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
        };
        let mode = S_IFREG | mode & 0o7777;
        if flags & O_TRUNC != 0 {
            self.let_writes_end(|| self.at_path(at, path, true, 0, |node| Ok(node.ino())));
        }
        self.with_room(|| {
            let slot = self.table.reserve()?;
            let node = match flags & (TMPFILE | O_CREAT) {
                0 => self.open_existing(at, path, flags)?,
                TMPFILE => self.open_tmpfile(at, path, flags, mode)?,
                O_CREAT => self.open_or_create(at, path, flags, mode)?,
                _ => return Err(einval()),
            };
            let file = File { node, flags: AtomicI32::new(flags), offset: Lock::new(0) };
            Ok(slot.fill(Arc::new(file)) as Fd)
        })
    }

    fn open_existing(&self, at: Fd, path: &[u8], flags: i32) -> Result<Node> {
        // What O_PATH opens is not looked into, so nothing has to be permitted.
        let cred = if flags & O_PATH != 0 { &self.granted } else { &self.cred };
        self.at_path(at, path, flags & O_NOFOLLOW == 0, 0, |node| {
            check_kind(node.kind(), flags)?;
            self.fs.open_inode(cred, node, flags)?;
            self.only_a_file(node.clone(), flags)
        })
    }

    fn open_tmpfile(&self, at: Fd, path: &[u8], flags: i32, mode: u32) -> Result<Node> {
        if flags & O_DIRECTORY == 0 || flags & O_ACCMODE == O_RDONLY {
            return Err(einval());
        }
        let follow = flags & O_NOFOLLOW == 0;
        let made = self
            .pinned_at_path(at, path, follow, 0, |dir| self.fs.tmpfile(&self.cred, dir, mode, self.umask()));
        self.opened(made?)
    }

    /// O_CREAT. A symbolic link as the last component is followed, dangling or not, unless O_EXCL or
    /// O_NOFOLLOW stand against it.
    fn open_or_create(&self, at: Fd, path: &[u8], flags: i32, mode: u32) -> Result<Node> {
        if flags & O_DIRECTORY != 0 {
            return Err(einval());
        }
        let mut base = self.base_node(at, path)?;
        let mut path = Cow::Borrowed(path);
        let mut links = 0;
        loop {
            let place = self.place_from(base.as_ref(), &path, &mut links)?;
            if place.is_dot() {
                let errno = if flags & O_EXCL != 0 { libc::EEXIST } else { libc::EISDIR };
                return Err(Error::new(errno, "files::open"));
            }
            if place.slash {
                return Err(Error::new(libc::EISDIR, "files::open"));
            }
            let dir = place.dir.node.ino();
            let attr = match self.fs.create(&self.cred, dir, place.name, mode, self.umask(), flags) {
                Ok((attr, true)) => return self.opened(attr),
                Ok((attr, false)) => attr,
                Err(e) => return Err(e),
            };
            let node = self.opened(attr)?;
            if node.kind() == Kind::Symlink && flags & O_NOFOLLOW == 0 {
                let target = follow_one(&mut links).and_then(|()| self.fs.readlink(node.ino()));
                self.fs.release_node(&node);
                base = Some(place.dir.node.clone());
                path = Cow::Owned(target?);
                continue;
            }
            if let Err(e) = check_kind(node.kind(), flags) {
                self.fs.release_node(&node);
                return Err(e);
            }
            return self.only_a_file(node, flags);
        }
    }

    /// Pipes, sockets and devices are the kernel's; here they are only names: ENXIO, once it is clear that
    /// they might be opened.
    fn only_a_file(&self, node: Node, flags: i32) -> Result<Node> {
        match node.kind() {
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice if flags & O_PATH == 0 => {
                self.fs.release_node(&node);
                Err(Error::new(libc::ENXIO, "files::open"))
            }
            _ => Ok(node),
        }
    }

    /// Takes over the open and gives back the reference that making or finding a file took.
    fn opened(&self, attr: Attr) -> Result<Node> {
        let node = self.fs.node(attr.ino);
        self.fs.forget(attr.ino, 1);
        node.inspect_err(|_| self.fs.release(attr.ino))
    }
}

/// May an existing inode of this kind be opened with these flags?
fn check_kind(kind: Kind, flags: i32) -> Result<()> {
    let writes = flags & O_ACCMODE != O_RDONLY || flags & O_TRUNC != 0;
    let errno = match kind {
        Kind::Directory if writes || flags & O_CREAT != 0 => libc::EISDIR,
        Kind::Directory => return Ok(()),
        _ if flags & O_DIRECTORY != 0 => libc::ENOTDIR,
        _ if flags & O_PATH != 0 => return Ok(()),
        Kind::Symlink => libc::ELOOP,
        _ => return Ok(()),
    };
    Err(Error::new(errno, "files::open"))
}

fn einval() -> Error {
    Error::new(libc::EINVAL, "files::open")
}
