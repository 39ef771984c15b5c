//! Attributes of files and of the pool.

use crate::call::{done, on_pool};
use crate::convert::{self, store, string};
use crate::pools::lode_fs;
use libc::{gid_t, mode_t, stat, statvfs, timespec, uid_t};
use lodestone::error::Error;
use lodestone::fs::files::AT_FDCWD;
use std::ffi::{c_char, c_int};

/// Attributes of what a path names, symbolic links followed. st_size is in bytes, st_blocks in units of
/// 512 bytes. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_stat(fs: *mut lode_fs, path: *const c_char, buf: *mut stat) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_stat", fs, |pool| unsafe {
        store(buf, convert::stat(&pool.files.stat(string(path)?)?, pool.device))
    })
}

/// As lode_stat, of a symbolic link itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lstat(fs: *mut lode_fs, path: *const c_char, buf: *mut stat) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_lstat", fs, |pool| unsafe {
        store(buf, convert::stat(&pool.files.lstat(string(path)?)?, pool.device))
    })
}

/// As lode_stat, of a descriptor's file. Errors: EBADF, EFAULT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fstat(fs: *mut lode_fs, fd: c_int, buf: *mut stat) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_fstat", fs, |pool| unsafe { store(buf, convert::stat(&pool.files.fstat(fd)?, pool.device)) })
}

/// Sets the permission bits (07777). Errors: EACCES, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS.
/// Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_chmod(fs: *mut lode_fs, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_chmod", fs, |pool| pool.files.chmod(unsafe { string(path) }?, mode))
}

/// As lode_chmod on a descriptor. Errors: EBADF, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fchmod(fs: *mut lode_fs, fd: c_int, mode: mode_t) -> c_int {
    done("lode_fchmod", fs, |pool| pool.files.fchmod(fd, mode))
}

/// Sets user and group, symbolic links followed; -1 leaves one as it is. Errors: EACCES, ELOOP,
/// ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_chown(fs: *mut lode_fs, path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_chown", fs, |pool| pool.files.chown(unsafe { string(path) }?, uid, gid))
}

/// As lode_chown, of a symbolic link itself. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lchown(fs: *mut lode_fs, path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_lchown", fs, |pool| pool.files.lchown(unsafe { string(path) }?, uid, gid))
}

/// As lode_chown on a descriptor. Errors: EBADF, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fchown(fs: *mut lode_fs, fd: c_int, uid: uid_t, gid: gid_t) -> c_int {
    done("lode_fchown", fs, |pool| pool.files.fchown(fd, uid, gid))
}

/// Sets access and modification time (times[0] and times[1]); tv_nsec may be UTIME_NOW or UTIME_OMIT, and
/// NULL means now for both. Kept from 1901 to 2446 with nanoseconds. flags: 0, or AT_SYMLINK_NOFOLLOW for
/// a symbolic link itself. Errors: EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS.
/// Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_utimens(
    fs: *mut lode_fs,
    path: *const c_char,
    times: *const timespec,
    flags: c_int,
) -> c_int {
    done("lode_utimens", fs, |pool| {
        // SAFETY: the contract at the head of the header.
        let (path, times) = unsafe { (string(path)?, convert::times(times)) };
        // A wrong time is seen last.
        let [atime, mtime] = times.or_else(|e| pool.files.fstatat(AT_FDCWD, path, flags).and(Err(e)))?;
        pool.files.utimensat(AT_FDCWD, path, atime, mtime, flags)
    })
}

/// As lode_utimens on a descriptor. Errors: EACCES, EBADF, EINVAL, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_futimens(fs: *mut lode_fs, fd: c_int, times: *const timespec) -> c_int {
    done("lode_futimens", fs, |pool| {
        // SAFETY: the contract at the head of the header.
        let times = unsafe { convert::times(times) };
        let [atime, mtime] = times.or_else(|e| match pool.files.flags(fd)? & libc::O_PATH {
            0 => Err(e),
            _ => Err(Error::new(libc::EBADF, "capi::futimens")),
        })?;
        pool.files.futimens(fd, atime, mtime)
    })
}

/// Size and use of the pool, in units of f_frsize bytes; path names anything in it. Errors: EACCES,
/// EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_statvfs(fs: *mut lode_fs, path: *const c_char, buf: *mut statvfs) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_statvfs", fs, |pool| unsafe {
        store(buf, convert::statvfs(&pool.files.statvfs(string(path)?)?))
    })
}

/// As lode_statvfs through a descriptor. Errors: EBADF, EFAULT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fstatvfs(fs: *mut lode_fs, fd: c_int, buf: *mut statvfs) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_fstatvfs", fs, |pool| unsafe { store(buf, convert::statvfs(&pool.files.fstatvfs(fd)?)) })
}

/// Sets the mask of permission bits that new files lack and returns the old one. Starts as the process's
/// umask when the pool is opened.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_umask(fs: *mut lode_fs, mask: mode_t) -> c_int {
    on_pool("lode_umask", fs, |pool| Ok(pool.files.set_umask(mask) as c_int))
}
