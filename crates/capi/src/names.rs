//! Names: making, moving and removing them.

use crate::call::{done, on_pool};
use crate::convert::{output, string};
use crate::pools::lode_fs;
use libc::{dev_t, mode_t, size_t, ssize_t};
use lodestone::Error;
use std::ffi::{c_char, c_int, c_uint};

/// Makes a directory. mode: permission bits, less the umask. Errors: EACCES, EEXIST, ELOOP, EMLINK,
/// ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_mkdir(fs: *mut lode_fs, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_mkdir", fs, |pool| pool.files.mkdir(unsafe { string(path) }?, mode))
}

/// Removes an empty directory. Errors: EACCES, EBUSY (the root), EINVAL ("."), ELOOP, ENAMETOOLONG, ENOENT,
/// ENOTDIR, ENOTEMPTY, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_rmdir(fs: *mut lode_fs, path: *const c_char) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_rmdir", fs, |pool| pool.files.rmdir(unsafe { string(path) }?))
}

/// Removes a name that is not a directory's; the file goes with its last name and descriptor. Errors:
/// EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_unlink(fs: *mut lode_fs, path: *const c_char) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_unlink", fs, |pool| pool.files.unlink(unsafe { string(path) }?))
}

/// Moves a name, in one step that a crash cannot split. flags: 0 (what stands at `to` is replaced),
/// RENAME_NOREPLACE (EEXIST instead) or RENAME_EXCHANGE (both stay, exchanged); or RENAME_WHITEOUT, alone or with
/// RENAME_NOREPLACE (a character device 0:0 takes the old name in the same step). Errors: EACCES, EBUSY,
/// EEXIST, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, ENOTEMPTY, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_rename(
    fs: *mut lode_fs,
    from: *const c_char,
    to: *const c_char,
    flags: c_uint,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_rename", fs, |pool| pool.files.rename(unsafe { string(from) }?, unsafe { string(to) }?, flags))
}

/// Gives a file a further name; a symbolic link itself, not what it points to. Errors: EACCES, EEXIST,
/// ELOOP, EMLINK, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM (a directory), EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_link(fs: *mut lode_fs, from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_link", fs, |pool| pool.files.link(unsafe { string(from) }?, unsafe { string(to) }?))
}

/// Gives the file of a descriptor a name: how a file opened with O_TMPFILE (without O_EXCL) gets one.
/// Errors: as lode_link, and EBADF; ENOENT where the file has lost its last name. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_flink(fs: *mut lode_fs, fd: c_int, to: *const c_char) -> c_int {
    done("lode_flink", fs, |pool| {
        // SAFETY: the contract at the head of the header.
        let to = unsafe { string(to) }?;
        pool.files.linkat(fd, b"", libc::AT_FDCWD, to, libc::AT_EMPTY_PATH)
    })
}

/// Makes a symbolic link with the text `target` (1 to 4095 bytes). Errors: EACCES, EEXIST, ELOOP,
/// ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_symlink(fs: *mut lode_fs, target: *const c_char, path: *const c_char) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_symlink", fs, |pool| pool.files.symlink(unsafe { string(target) }?, unsafe { string(path) }?))
}

/// Copies the text of a symbolic link to buf, at most size bytes and without a NUL, and returns the
/// bytes copied. Errors: EACCES, EFAULT, EINVAL (not a link, or size is 0), ELOOP, ENAMETOOLONG, ENOENT,
/// ENOTDIR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_readlink(
    fs: *mut lode_fs,
    path: *const c_char,
    buf: *mut c_char,
    size: size_t,
) -> ssize_t {
    on_pool("lode_readlink", fs, |pool| {
        // SAFETY: the contract at the head of the header.
        let (path, room) = unsafe { (string(path)?, output(buf.cast(), size)?) };
        if room.is_empty() {
            return Err(Error::new(libc::EINVAL, "capi::readlink"));
        }
        let target = pool.files.readlink(path)?;
        let copied = target.len().min(room.len());
        room[..copied].copy_from_slice(&target[..copied]);
        Ok(copied as ssize_t)
    })
}

/// Makes a file, fifo, socket or device node, by the type bits of mode (none: a regular file). dev: the
/// device number of a device node. Here they are names only: lode_open refuses all but files. Errors:
/// EACCES, EEXIST, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM (a directory, or a device
/// node by an ordinary user), EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_mknod(
    fs: *mut lode_fs,
    path: *const c_char,
    mode: mode_t,
    dev: dev_t,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_mknod", fs, |pool| pool.files.mknod(unsafe { string(path) }?, mode, dev))
}
