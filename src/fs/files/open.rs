//! open(2): what the flags ask for, what the last component is, and what Linux answers.
//!
//! The number is reserved before anything is opened or made, so that a full table has no effects.

use super::{AT_FDCWD, Fd, File, Files, check_path};
use crate::error::{Error, Result};
use crate::fs::{Attr, Ino, Kind, Node};
use crate::limits::SYMLINK_DEPTH_MAX;
use crate::media::Media;
use libc::{
    O_ACCMODE, O_CLOEXEC, O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_RDONLY, O_TMPFILE, O_TRUNC,
    S_IFREG,
};
use parking_lot::Mutex;
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
        let slot = self.table.reserve()?;
        let (node, kind) = match flags & (TMPFILE | O_CREAT) {
            0 => self.open_existing(at, path, flags)?,
            TMPFILE => self.open_tmpfile(at, path, flags, mode)?,
            O_CREAT => self.open_or_create(at, path, flags, mode)?,
            _ => return Err(einval()),
        };
        let file = File { node, kind, flags: AtomicI32::new(flags), offset: Mutex::new(0) };
        Ok(slot.fill(Arc::new(file)) as Fd)
    }

    fn open_existing(&self, at: Fd, path: &[u8], flags: i32) -> Result<(Node, Kind)> {
        let node = self.find(at, path, flags & O_NOFOLLOW == 0, 0)?;
        let kind = self.fs.attr_of(&node)?.kind();
        check_kind(kind, flags)?;
        self.fs.open_node(&self.cred, node.ino(), flags)?;
        Ok((node, kind))
    }

    fn open_tmpfile(&self, at: Fd, path: &[u8], flags: i32, mode: u32) -> Result<(Node, Kind)> {
        if flags & O_DIRECTORY == 0 || flags & O_ACCMODE == O_RDONLY {
            return Err(einval());
        }
        let dir = self.find(at, path, flags & O_NOFOLLOW == 0, 0)?;
        let attr = self.fs.tmpfile(&self.cred, dir.ino(), mode, self.umask())?;
        self.opened(attr)
    }

    /// O_CREAT. A symbolic link as the last component is followed, dangling or not, unless O_EXCL or
    /// O_NOFOLLOW stand against it.
    fn open_or_create(&self, at: Fd, path: &[u8], flags: i32, mode: u32) -> Result<(Node, Kind)> {
        if flags & O_DIRECTORY != 0 {
            return Err(einval());
        }
        let mut base = self.base(at, path)?.map(|file| file.node.clone());
        let mut path = Cow::Borrowed(path);
        for _ in 0..=SYMLINK_DEPTH_MAX {
            check_path(&path)?;
            let (dir, name) = self.fs.walk_parent(&self.cred, base.as_ref(), &path)?;
            if path.ends_with(b"/") && !name.is_empty() {
                return Err(Error::new(libc::EISDIR, "files::open"));
            }
            if matches!(name, b"" | b"." | b"..") {
                let errno = if flags & O_EXCL != 0 { libc::EEXIST } else { libc::EISDIR };
                return Err(Error::new(errno, "files::open"));
            }
            match self.fs.create(&self.cred, dir.ino(), name, mode, self.umask(), flags) {
                Ok((attr, _)) => return self.opened_as(attr, flags),
                Err(e) if e.errno() == libc::ELOOP && flags & (O_EXCL | O_NOFOLLOW) == 0 => {
                    let target = self.target(dir.ino(), name)?;
                    path = Cow::Owned(target);
                    base = Some(dir);
                }
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(libc::ELOOP, "files::open"))
    }

    /// What the symbolic link `name` points to.
    fn target(&self, dir: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let link = self.fs.lookup(&self.cred, dir, name)?;
        let target = self.fs.readlink(link.ino);
        self.fs.forget(link.ino, 1);
        target
    }

    /// Takes over the open and gives back the reference that making a file took.
    fn opened(&self, attr: Attr) -> Result<(Node, Kind)> {
        let node = self.fs.node(attr.ino);
        self.fs.forget(attr.ino, 1);
        match node {
            Ok(node) => Ok((node, attr.kind())),
            Err(e) => {
                self.fs.release(attr.ino);
                Err(e)
            }
        }
    }

    fn opened_as(&self, attr: Attr, flags: i32) -> Result<(Node, Kind)> {
        let (node, kind) = self.opened(attr)?;
        if let Err(e) = check_kind(kind, flags) {
            self.fs.release(attr.ino);
            return Err(e);
        }
        Ok((node, kind))
    }
}

/// May an existing inode of this kind be opened with these flags?
fn check_kind(kind: Kind, flags: i32) -> Result<()> {
    let writes = flags & O_ACCMODE != O_RDONLY || flags & O_TRUNC != 0;
    let errno = match kind {
        Kind::Directory if writes => libc::EISDIR,
        Kind::Directory => return Ok(()),
        _ if flags & O_DIRECTORY != 0 => libc::ENOTDIR,
        _ if flags & O_PATH != 0 => return Ok(()),
        Kind::File => return Ok(()),
        Kind::Symlink => libc::ELOOP,
        // Pipes, sockets and devices are the kernel's; here they are only names.
        Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => libc::ENXIO,
    };
    Err(Error::new(errno, "files::open"))
}

fn einval() -> Error {
    Error::new(libc::EINVAL, "files::open")
}
