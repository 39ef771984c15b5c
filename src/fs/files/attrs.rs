//! Attributes: stat, modes, owners, times, access, extended attributes, the file system's own.

use super::{AT_FDCWD, Fd, Files, check_flags};
use crate::error::{Error, Result};
use crate::fs::xattr::{check_length, check_setting};
use crate::fs::{Attr, Kind, Node, SetAttr, SetTime, StatFs};
use crate::media::Media;
use libc::{AT_EACCESS, AT_EMPTY_PATH, AT_NO_AUTOMOUNT, AT_SYMLINK_NOFOLLOW};

impl<M: Media> Files<M> {
    #[inline]
    pub fn stat(&self, path: &[u8]) -> Result<Attr> {
        self.fs.stat(&self.cred, None, path, true)
    }

    #[inline]
    pub fn lstat(&self, path: &[u8]) -> Result<Attr> {
        self.fs.stat(&self.cred, None, path, false)
    }

    #[inline]
    pub fn fstat(&self, fd: Fd) -> Result<Attr> {
        self.fs.attr_of(&self.file(fd)?.node)
    }

    /// `flags`: AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH.
    pub fn fstatat(&self, at: Fd, path: &[u8], flags: i32) -> Result<Attr> {
        check_flags(flags, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH | AT_NO_AUTOMOUNT)?;
        self.at_path(at, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags, |node| self.fs.attr_of(node))
    }

    pub fn chmod(&self, path: &[u8], mode: u32) -> Result<()> {
        self.fchmodat(AT_FDCWD, path, mode, 0)
    }

    pub fn fchmod(&self, fd: Fd, mode: u32) -> Result<()> {
        self.with_room(|| self.set(&self.open_file(fd)?.node, mode_to(mode)))
    }

    /// `flags`: AT_SYMLINK_NOFOLLOW (a link's mode cannot change: EOPNOTSUPP), AT_EMPTY_PATH.
    pub fn fchmodat(&self, at: Fd, path: &[u8], mode: u32, flags: i32) -> Result<()> {
        self.with_room(|| {
            check_flags(flags, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH)?;
            self.at_path(at, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags, |node| match node.kind() {
                Kind::Symlink => Err(Error::new(libc::EOPNOTSUPP, "files::chmod")),
                _ => self.set(node, mode_to(mode)),
            })
        })
    }

    pub fn chown(&self, path: &[u8], uid: u32, gid: u32) -> Result<()> {
        self.fchownat(AT_FDCWD, path, uid, gid, 0)
    }

    pub fn lchown(&self, path: &[u8], uid: u32, gid: u32) -> Result<()> {
        self.fchownat(AT_FDCWD, path, uid, gid, AT_SYMLINK_NOFOLLOW)
    }

    pub fn fchown(&self, fd: Fd, uid: u32, gid: u32) -> Result<()> {
        self.with_room(|| self.set(&self.open_file(fd)?.node, owner_to(uid, gid)))
    }

    /// `u32::MAX` leaves the user or the group. `flags`: AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH.
    pub fn fchownat(&self, at: Fd, path: &[u8], uid: u32, gid: u32, flags: i32) -> Result<()> {
        self.with_room(|| {
            check_flags(flags, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH)?;
            let set = owner_to(uid, gid);
            self.at_path(at, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags, |node| self.set(node, set))
        })
    }

    /// Access and modification time; `None` leaves one (UTIME_OMIT). `flags`: AT_SYMLINK_NOFOLLOW,
    /// AT_EMPTY_PATH.
    pub fn utimensat(
        &self,
        at: Fd,
        path: &[u8],
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
        flags: i32,
    ) -> Result<()> {
        self.with_room(|| {
            if atime.is_none() && mtime.is_none() {
                return Ok(()); // nothing is looked at, not even the path
            }
            check_flags(flags, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH)?;
            let set = SetAttr { atime, mtime, ..SetAttr::default() };
            self.at_path(at, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags, |node| self.set(node, set))
        })
    }

    pub fn futimens(&self, fd: Fd, atime: Option<SetTime>, mtime: Option<SetTime>) -> Result<()> {
        self.with_room(|| {
            if atime.is_none() && mtime.is_none() {
                return Ok(());
            }
            let file = self.open_file(fd)?;
            self.set(&file.node, SetAttr { atime, mtime, ..SetAttr::default() })
        })
    }

    pub fn access(&self, path: &[u8], mask: i32) -> Result<()> {
        self.faccessat(AT_FDCWD, path, mask, 0)
    }

    /// `mask`: F_OK, or any of R_OK, W_OK, X_OK. Real and effective identity are the same here, so
    /// AT_EACCESS changes nothing.
    pub fn faccessat(&self, at: Fd, path: &[u8], mask: i32, flags: i32) -> Result<()> {
        check_flags(mask, libc::R_OK | libc::W_OK | libc::X_OK)?;
        check_flags(flags, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH | AT_EACCESS)?;
        self.pinned_at_path(at, path, flags & AT_SYMLINK_NOFOLLOW == 0, flags, |ino| match mask {
            libc::F_OK => Ok(()),
            _ => self.fs.access(&self.cred, ino, mask),
        })
    }

    /// The whole file system; the path has only to exist.
    pub fn statvfs(&self, path: &[u8]) -> Result<StatFs> {
        self.at_path(AT_FDCWD, path, true, 0, |_| Ok(self.fs.statfs()))
    }

    pub fn fstatvfs(&self, fd: Fd) -> Result<StatFs> {
        self.file(fd).map(|_| self.fs.statfs())
    }

    /// The value of an extended attribute. `follow`: of what a symbolic link points to.
    pub fn getxattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Result<Vec<u8>> {
        check_length(name)?;
        self.pinned_at_path(AT_FDCWD, path, follow, 0, |ino| self.fs.getxattr(&self.cred, ino, name))
    }

    pub fn fgetxattr(&self, fd: Fd, name: &[u8]) -> Result<Vec<u8>> {
        check_length(name)?;
        self.fs.getxattr(&self.cred, self.open_file(fd)?.node.ino(), name)
    }

    /// `flags`: 0, XATTR_CREATE or XATTR_REPLACE.
    pub fn setxattr(&self, path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.with_room(|| {
            check_setting(name, value, flags)?;
            self.pinned_at_path(AT_FDCWD, path, follow, 0, |ino| {
                self.fs.setxattr(&self.cred, ino, name, value, flags)
            })
        })
    }

    pub fn fsetxattr(&self, fd: Fd, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.with_room(|| {
            check_setting(name, value, flags)?;
            self.fs.setxattr(&self.cred, self.open_file(fd)?.node.ino(), name, value, flags)
        })
    }

    /// Names, each closed by a NUL.
    pub fn listxattr(&self, path: &[u8], follow: bool) -> Result<Vec<u8>> {
        self.pinned_at_path(AT_FDCWD, path, follow, 0, |ino| self.fs.listxattr(&self.cred, ino))
    }

    pub fn flistxattr(&self, fd: Fd) -> Result<Vec<u8>> {
        self.fs.listxattr(&self.cred, self.open_file(fd)?.node.ino())
    }

    pub fn removexattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Result<()> {
        self.with_room(|| {
            check_length(name)?;
            self.pinned_at_path(AT_FDCWD, path, follow, 0, |ino| self.fs.removexattr(&self.cred, ino, name))
        })
    }

    pub fn fremovexattr(&self, fd: Fd, name: &[u8]) -> Result<()> {
        self.with_room(|| {
            check_length(name)?;
            self.fs.removexattr(&self.cred, self.open_file(fd)?.node.ino(), name)
        })
    }

    fn set(&self, node: &Node, set: SetAttr) -> Result<()> {
        self.fs.setattr_node(&self.cred, node, &set).map(|_| ())
    }
}

fn mode_to(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() }
}

fn owner_to(uid: u32, gid: u32) -> SetAttr {
    let given = |id| (id != u32::MAX).then_some(id);
    SetAttr { uid: given(uid), gid: given(gid), ..SetAttr::default() }
}
