//! Making, moving and removing names.
//!
//! The last component decides before the directory does: Linux gives "." and "..", the root and a
//! trailing slash an answer of their own in each call.

use super::{AT_FDCWD, Fd, Files, Pinned};
use crate::error::{Error, Result};
use crate::fs::types::is_rename;
use crate::fs::{Attr, Cred, Kind, Node, RENAME_EXCHANGE, RENAME_NOREPLACE};
use crate::limits::PATH_BYTES_MAX;
use crate::media::Media;
use libc::{AT_EMPTY_PATH, AT_REMOVEDIR, AT_SYMLINK_FOLLOW, O_EXCL, O_TMPFILE, S_IFMT};

/// Where a name stands or will stand.
pub(super) struct Place<'f, 'p, M: Media> {
    pub dir: Pinned<'f, M>,
    pub name: &'p [u8],
    /// The path ends with a slash: it can only mean a directory.
    pub slash: bool,
}

impl<M: Media> Place<'_, '_, M> {
    /// The root, "." or "..": never a name that comes or goes.
    pub fn is_dot(&self) -> bool {
        matches!(self.name, b"" | b"." | b"..")
    }
}

impl<M: Media> Files<M> {
    pub fn mkdir(&self, path: &[u8], mode: u32) -> Result<()> {
        self.mkdirat(AT_FDCWD, path, mode)
    }

    pub fn mkdirat(&self, at: Fd, path: &[u8], mode: u32) -> Result<()> {
        self.with_room(|| {
            let place = self.place(at, path)?;
            if place.is_dot() {
                return Err(Error::new(libc::EEXIST, "files::mkdir"));
            }
            let mode = libc::S_IFDIR | mode & 0o7777;
            let made = self.fs.mkdir(&self.cred, place.dir.node.ino(), place.name, mode, self.umask());
            self.forget_made(made)
        })
    }

    pub fn mknod(&self, path: &[u8], mode: u32, rdev: u64) -> Result<()> {
        self.mknodat(AT_FDCWD, path, mode, rdev)
    }

    /// Makes a file, fifo, socket or device node; type bits 0 mean a regular file.
    pub fn mknodat(&self, at: Fd, path: &[u8], mode: u32, rdev: u64) -> Result<()> {
        self.with_room(|| {
            let kind = match mode & S_IFMT {
                0 => Some(Kind::File),
                _ => Kind::from_mode(mode),
            };
            let kind = match kind {
                None | Some(Kind::Symlink) => return Err(Error::new(libc::EINVAL, "files::mknod")),
                Some(Kind::Directory) => return Err(Error::new(libc::EPERM, "files::mknod")),
                Some(kind) => kind,
            };
            let device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
            // The kernel has numbers of 32 bits: the mount would show another device.
            if device && u32::try_from(rdev).is_err() {
                return Err(Error::new(libc::EINVAL, "files::mknod"));
            }
            let place = self.place(at, path)?;
            self.check_new(&place)?;
            let mode = kind.mode_bits() | mode & 0o7777;
            let rdev = if device { rdev } else { 0 };
            let made = self.fs.mknod(&self.cred, place.dir.node.ino(), place.name, mode, self.umask(), rdev);
            self.forget_made(made)
        })
    }

    pub fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        self.symlinkat(target, AT_FDCWD, path)
    }

    pub fn symlinkat(&self, target: &[u8], at: Fd, path: &[u8]) -> Result<()> {
        self.with_room(|| {
            match target.len() {
                0 => return Err(Error::new(libc::ENOENT, "files::symlink")),
                1..=PATH_BYTES_MAX => (),
                _ => return Err(Error::new(libc::ENAMETOOLONG, "files::symlink")),
            }
            let place = self.place(at, path)?;
            self.check_new(&place)?;
            self.forget_made(self.fs.symlink(&self.cred, place.dir.node.ino(), place.name, target))
        })
    }

    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<()> {
        self.linkat(AT_FDCWD, from, AT_FDCWD, to, 0)
    }

    /// `flags`: AT_SYMLINK_FOLLOW; AT_EMPTY_PATH with an empty `from` names the descriptor's file,
    /// which gives an O_TMPFILE file its name.
    pub fn linkat(&self, from_at: Fd, from: &[u8], to_at: Fd, to: &[u8], flags: i32) -> Result<()> {
        self.with_room(|| {
            super::check_flags(flags, AT_SYMLINK_FOLLOW | AT_EMPTY_PATH)?;
            let link = |node: &Node| {
                let pinned = self.pin(node.clone())?;
                let place = self.place(to_at, to)?;
                self.check_new(&place)?;
                self.forget_made(self.fs.link(
                    &self.cred,
                    pinned.node.ino(),
                    place.dir.node.ino(),
                    place.name,
                ))
            };
            if from.is_empty() && flags & AT_EMPTY_PATH != 0 && from_at != AT_FDCWD {
                let (node, nameless_for_ever) = {
                    let file = self.file(from_at)?;
                    let flags = O_TMPFILE | O_EXCL;
                    (file.node.clone(), file.flags() & flags == flags)
                };
                if nameless_for_ever {
                    // What is wrong with the place is said first.
                    let place = self.place(to_at, to)?;
                    self.check_new(&place)?;
                    let errno = if self.kind(&place).is_ok() { libc::EEXIST } else { libc::ENOENT };
                    return Err(Error::new(errno, "files::link"));
                }
                return link(&node).map_err(|e| match e.errno() {
                    // Closed meanwhile, its last name or none.
                    libc::ESTALE => Error::new(libc::ENOENT, "files::link"),
                    _ => e,
                });
            }
            let from = if from.is_empty() && flags & AT_EMPTY_PATH != 0 { b"/" } else { from };
            let base = self.base_node(from_at, from)?;
            self.at_walked(base.as_ref(), from, flags & AT_SYMLINK_FOLLOW != 0, link)
        })
    }

    pub fn unlink(&self, path: &[u8]) -> Result<()> {
        self.unlinkat(AT_FDCWD, path, 0)
    }

    pub fn rmdir(&self, path: &[u8]) -> Result<()> {
        self.unlinkat(AT_FDCWD, path, AT_REMOVEDIR)
    }

    /// Removes a name; with AT_REMOVEDIR an empty directory.
    pub fn unlinkat(&self, at: Fd, path: &[u8], flags: i32) -> Result<()> {
        self.with_room(|| {
            super::check_flags(flags, AT_REMOVEDIR)?;
            let place = self.place(at, path)?;
            let dir = place.dir.node.ino();
            let errno = match (flags, place.name) {
                (0, b"" | b"." | b"..") => libc::EISDIR,
                (0, name) if !place.slash => return self.fs.unlink(&self.cred, dir, name),
                (0, _) => match self.fs.check_changes().and_then(|()| self.kind(&place))? {
                    Kind::Directory => libc::EISDIR,
                    _ => libc::ENOTDIR,
                },
                (_, b"") => libc::EBUSY,
                (_, b".") => libc::EINVAL,
                (_, b"..") => libc::ENOTEMPTY,
                (_, name) => return self.fs.rmdir(&self.cred, dir, name),
            };
            Err(Error::new(errno, "files::unlink"))
        })
    }

    pub fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Result<()> {
        self.renameat2(AT_FDCWD, from, AT_FDCWD, to, flags)
    }

    /// `flags`: 0, RENAME_NOREPLACE or RENAME_EXCHANGE, or RENAME_WHITEOUT, which may stand with the first.
    pub fn renameat2(&self, from_at: Fd, from: &[u8], to_at: Fd, to: &[u8], flags: u32) -> Result<()> {
        self.with_room(|| {
            if !is_rename(flags) {
                return Err(Error::new(libc::EINVAL, "files::rename"));
            }
            let from_base = self.base_node(from_at, from)?;
            let from = self.place_from(from_base.as_ref(), from, &mut 0)?;
            let to_base = self.base_node(to_at, to)?;
            let to = self.place_from(to_base.as_ref(), to, &mut 0)?;
            if from.is_dot() {
                return Err(Error::new(libc::EBUSY, "files::rename"));
            }
            if to.is_dot() {
                let errno = if flags & RENAME_NOREPLACE != 0 { libc::EEXIST } else { libc::EBUSY };
                return Err(Error::new(errno, "files::rename"));
            }
            self.check_rename_slashes(&from, &to, flags)?;
            self.fs.rename(&self.cred, from.dir.node.ino(), from.name, to.dir.node.ino(), to.name, flags)
        })
    }

    /// A trailing slash demands a directory: as the thing moved, or, in an exchange, on its own side.
    fn check_rename_slashes(&self, from: &Place<'_, '_, M>, to: &Place<'_, '_, M>, flags: u32) -> Result<()> {
        if !from.slash && !to.slash {
            return Ok(());
        }
        self.fs.check_changes()?;
        let exchange = flags == RENAME_EXCHANGE;
        let source = self.kind(from)?;
        let target = match self.kind(to) {
            Err(e) if e.errno() == libc::ENOENT => None,
            found => Some(found?),
        };
        let errno = match target {
            Some(_) if flags & RENAME_NOREPLACE != 0 => libc::EEXIST,
            None if exchange => libc::ENOENT,
            Some(kind) if exchange && to.slash && kind != Kind::Directory => libc::ENOTDIR,
            _ if source == Kind::Directory || exchange && !from.slash => return Ok(()),
            _ => libc::ENOTDIR,
        };
        Err(Error::new(errno, "files::rename"))
    }

    pub fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.readlinkat(AT_FDCWD, path)
    }

    /// What a symbolic link points to. An empty path names a link opened with O_PATH and O_NOFOLLOW.
    pub fn readlinkat(&self, at: Fd, path: &[u8]) -> Result<Vec<u8>> {
        let flags = if at == AT_FDCWD { 0 } else { AT_EMPTY_PATH };
        self.at_path(at, path, false, flags, |node| match (node.kind(), path.is_empty()) {
            (Kind::Symlink, _) => self.fs.readlink(self.pin(node.clone())?.node.ino()),
            (_, true) => Err(Error::new(libc::ENOENT, "files::readlink")),
            (_, false) => Err(Error::new(libc::EINVAL, "files::readlink")),
        })
    }

    fn place<'f, 'p>(&'f self, at: Fd, path: &'p [u8]) -> Result<Place<'f, 'p, M>> {
        let base = self.base(at, path)?;
        self.place_from(base.as_ref().map(|f| &f.node), path, &mut 0)
    }

    /// ENOENT where the directory, or one on the way, goes at this moment. `links` counts the symbolic links followed.
    pub(super) fn place_from<'f, 'p>(
        &'f self,
        base: Option<&Node>,
        path: &'p [u8],
        links: &mut u32,
    ) -> Result<Place<'f, 'p, M>> {
        let held = self.fs.walk_parent_on(&self.cred, base, path, links).and_then(|(dir, name)| {
            // The root stands in no directory that would be searched.
            let any = Cred::root();
            let cred = if name.is_empty() { &any } else { &self.cred };
            self.fs.hold_directory(cred, &dir)?;
            Ok((dir, name))
        });
        let (dir, name) = held.map_err(|e| match e.errno() {
            libc::ESTALE => Error::new(libc::ENOENT, "files::place"),
            _ => e,
        })?;
        Ok(Place { dir: Pinned { fs: &self.fs, node: dir }, name, slash: path.ends_with(b"/") })
    }

    /// What stands at a place now.
    fn kind(&self, place: &Place<'_, '_, M>) -> Result<Kind> {
        let attr = self.fs.lookup(&self.cred, place.dir.node.ino(), place.name)?;
        self.fs.forget(attr.ino, 1);
        Ok(attr.kind())
    }

    /// The place of a new name that is not a directory: a trailing slash finds what is there or nothing.
    fn check_new(&self, place: &Place<'_, '_, M>) -> Result<()> {
        if place.is_dot() {
            return Err(Error::new(libc::EEXIST, "files::check_new"));
        }
        if place.slash {
            self.kind(place)?;
            return Err(Error::new(libc::EEXIST, "files::check_new"));
        }
        Ok(())
    }

    /// Gives back the reference that making an entry took.
    fn forget_made(&self, made: Result<Attr>) -> Result<()> {
        self.fs.forget(made?.ino, 1);
        Ok(())
    }
}
