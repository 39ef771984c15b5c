//! Extended attributes: by path, of a symbolic link itself (l-), by descriptor (f-).

use crate::call::{done, on_pool};
use crate::convert::{sized, string, value_of};
use crate::pools::{OpenPool, lode_fs};
use libc::{size_t, ssize_t};
use lodestone::Result;
use std::ffi::{c_char, c_int, c_void};

/// Copies the value of an extended attribute to value and returns its length in bytes; with size 0 only
/// the length. Names begin with user., trusted., security. or are system.posix_acl_access and
/// system.posix_acl_default. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENODATA (no such attribute),
/// ENOENT, ENOTDIR, EOPNOTSUPP, ERANGE (size is too small).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_getxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_getxattr", fs, |pool| unsafe {
        sized(value, size, &pool.files.getxattr(string(path)?, true, string(name)?)?)
    })
}

/// As lode_getxattr, of a symbolic link itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lgetxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_lgetxattr", fs, |pool| unsafe {
        sized(value, size, &pool.files.getxattr(string(path)?, false, string(name)?)?)
    })
}

/// As lode_getxattr on a descriptor. Further error: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fgetxattr(
    fs: *mut lode_fs,
    fd: c_int,
    name: *const c_char,
    value: *mut c_void,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_fgetxattr", fs, |pool| unsafe {
        sized(value, size, &pool.files.fgetxattr(fd, string(name)?)?)
    })
}

/// Sets an extended attribute to size bytes, at most 65536. flags: 0, XATTR_CREATE (EEXIST where it is
/// there) or XATTR_REPLACE (ENODATA where it is not). Errors: EACCES, E2BIG, EEXIST, EFAULT, EINVAL, ELOOP,
/// ENAMETOOLONG, ENODATA, ENOENT, ENOSPC, ENOTDIR, EOPNOTSUPP, EPERM, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_setxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
    value: *const c_void,
    size: size_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_setxattr", fs, |pool| unsafe { set(pool, path, true, name, value, size, flags) })
}

/// As lode_setxattr, of a symbolic link itself. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lsetxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
    value: *const c_void,
    size: size_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_lsetxattr", fs, |pool| unsafe { set(pool, path, false, name, value, size, flags) })
}

/// As lode_setxattr on a descriptor. Further error: EBADF. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fsetxattr(
    fs: *mut lode_fs,
    fd: c_int,
    name: *const c_char,
    value: *const c_void,
    size: size_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_fsetxattr", fs, |pool| unsafe {
        pool.files.fsetxattr(fd, string(name)?, value_of(value, size)?, flags)
    })
}

/// Copies the names of all extended attributes, each closed by a NUL, to list and returns their bytes;
/// with size 0 only the bytes. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ERANGE (size
/// is too small).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_listxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    list: *mut c_char,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_listxattr", fs, |pool| unsafe {
        sized(list.cast(), size, &pool.files.listxattr(string(path)?, true)?)
    })
}

/// As lode_listxattr, of a symbolic link itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_llistxattr(
    fs: *mut lode_fs,
    path: *const c_char,
    list: *mut c_char,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_llistxattr", fs, |pool| unsafe {
        sized(list.cast(), size, &pool.files.listxattr(string(path)?, false)?)
    })
}

/// As lode_listxattr on a descriptor. Further error: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_flistxattr(
    fs: *mut lode_fs,
    fd: c_int,
    list: *mut c_char,
    size: size_t,
) -> ssize_t {
    // SAFETY: the contract at the head of the header.
    on_pool("lode_flistxattr", fs, |pool| unsafe { sized(list.cast(), size, &pool.files.flistxattr(fd)?) })
}

/// Removes an extended attribute. Errors: as lode_setxattr. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_removexattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_removexattr", fs, |pool| unsafe { pool.files.removexattr(string(path)?, true, string(name)?) })
}

/// As lode_removexattr, of a symbolic link itself. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lremovexattr(
    fs: *mut lode_fs,
    path: *const c_char,
    name: *const c_char,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_lremovexattr", fs, |pool| unsafe {
        pool.files.removexattr(string(path)?, false, string(name)?)
    })
}

/// As lode_removexattr on a descriptor. Further error: EBADF. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fremovexattr(fs: *mut lode_fs, fd: c_int, name: *const c_char) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_fremovexattr", fs, |pool| pool.files.fremovexattr(fd, unsafe { string(name) }?))
}

/// # Safety
/// As [`string`] and [`input`].
unsafe fn set(
    pool: &OpenPool,
    path: *const c_char,
    follow: bool,
    name: *const c_char,
    value: *const c_void,
    size: size_t,
    flags: c_int,
) -> Result<()> {
    // SAFETY: the caller's contract.
    let (path, name, value) = unsafe { (string(path)?, string(name)?, value_of(value, size)?) };
    pool.files.setxattr(path, follow, name, value, flags)
}
