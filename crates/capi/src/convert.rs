//! C types to Rust ones and back. NULL where something must be is EFAULT.

use lodestone::error::{Error, Result};
use lodestone::fs::{Attr, SetTime, StatFs, Time};
use lodestone::limits::{XATTR_LIST_BYTES_MAX, XATTR_VALUE_BYTES_MAX};
use std::ffi::{CStr, c_char, c_void};

/// The bytes of a C string.
///
/// # Safety
/// `text` is NULL or points to a string closed by a NUL that nobody writes during the call.
#[inline]
pub unsafe fn string<'a>(text: *const c_char) -> Result<&'a [u8]> {
    if text.is_null() {
        return Err(efault());
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// A buffer to read from.
///
/// # Safety
/// `buffer` is NULL or points to `count` bytes that nobody writes during the call.
#[inline]
pub unsafe fn input<'a>(buffer: *const c_void, count: usize) -> Result<&'a [u8]> {
    match (buffer.is_null(), count) {
        (_, 0) => Ok(&[]),
        (false, 1..=MAX) => {
            // SAFETY: the caller's contract.
            Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), count) })
        }
        (true, _) => Err(efault()),
        (false, _) => Err(Error::new(libc::EINVAL, "capi::input")),
    }
}

/// A buffer to write to.
///
/// # Safety
/// `buffer` is NULL or points to `count` bytes that nobody else uses during the call.
#[inline]
pub unsafe fn output<'a>(buffer: *mut c_void, count: usize) -> Result<&'a mut [u8]> {
    match (buffer.is_null(), count) {
        (_, 0) => Ok(&mut []),
        (false, 1..=MAX) => {
            // SAFETY: the caller's contract; bytes need no initialisation to be overwritten.
            Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), count) })
        }
        (true, _) => Err(efault()),
        (false, _) => Err(Error::new(libc::EINVAL, "capi::output")),
    }
}

const MAX: usize = isize::MAX as usize;

/// The value of an extended attribute.
///
/// # Safety
/// As of [`input`].
pub unsafe fn value_of<'a>(buffer: *const c_void, count: usize) -> Result<&'a [u8]> {
    if count > XATTR_VALUE_BYTES_MAX {
        return Err(Error::new(libc::E2BIG, "capi::value_of"));
    }
    // SAFETY: the caller's contract.
    unsafe { input(buffer, count) }
}

/// Stores a result where the caller wants it.
///
/// # Safety
/// `to` is NULL or points to room for a `T`.
#[inline]
pub unsafe fn store<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(efault());
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// `value` in `buffer`, or only its length where `size` is 0, as the getxattr family answers.
///
/// # Safety
/// As [`output`].
pub unsafe fn sized(buffer: *mut c_void, size: usize, value: &[u8]) -> Result<isize> {
    if size != 0 {
        // SAFETY: the caller's contract; no value and no list is longer.
        let room = unsafe { output(buffer, size.min(XATTR_VALUE_BYTES_MAX.max(XATTR_LIST_BYTES_MAX))) }?;
        let room = room.get_mut(..value.len()).ok_or(Error::new(libc::ERANGE, "capi::sized"))?;
        room.copy_from_slice(value);
    }
    Ok(value.len() as isize)
}

/// Access and modification time; NULL means now, `None` leaves one.
///
/// # Safety
/// `times` is NULL or points to two timespecs.
pub unsafe fn times(times: *const libc::timespec) -> Result<[Option<SetTime>; 2]> {
    if times.is_null() {
        return Ok([Some(SetTime::Now); 2]);
    }
    // SAFETY: the caller's contract.
    let [a, m] = unsafe { times.cast::<[libc::timespec; 2]>().read() };
    Ok([time(a)?, time(m)?])
}

fn time(t: libc::timespec) -> Result<Option<SetTime>> {
    match t.tv_nsec {
        libc::UTIME_NOW => Ok(Some(SetTime::Now)),
        libc::UTIME_OMIT => Ok(None),
        nsec @ 0..1_000_000_000 => Ok(Some(SetTime::To(Time::new(t.tv_sec, nsec as u32)))),
        _ => Err(Error::new(libc::EINVAL, "capi::times")),
    }
}

/// `device` is what st_dev says of the pool.
pub fn stat(attr: &Attr, device: u64) -> libc::stat {
    // SAFETY: a struct stat is integers only; zero is a value of each.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_dev = device;
    stat.st_ino = u64::from(attr.ino.0);
    stat.st_mode = attr.mode;
    stat.st_nlink = attr.nlink.into();
    stat.st_uid = attr.uid;
    stat.st_gid = attr.gid;
    stat.st_rdev = attr.rdev;
    stat.st_size = attr.size as i64;
    stat.st_blksize = 4096;
    stat.st_blocks = attr.blocks as i64;
    (stat.st_atime, stat.st_atime_nsec) = (attr.atime.sec, attr.atime.nsec.into());
    (stat.st_mtime, stat.st_mtime_nsec) = (attr.mtime.sec, attr.mtime.nsec.into());
    (stat.st_ctime, stat.st_ctime_nsec) = (attr.ctime.sec, attr.ctime.nsec.into());
    stat
}

pub fn statvfs(fs: &StatFs) -> libc::statvfs {
    // SAFETY: a struct statvfs is integers only; zero is a value of each.
    let mut out: libc::statvfs = unsafe { std::mem::zeroed() };
    out.f_bsize = fs.block_bytes.into();
    out.f_frsize = fs.block_bytes.into();
    out.f_blocks = fs.blocks;
    out.f_bfree = fs.blocks_free;
    out.f_bavail = fs.blocks_free;
    out.f_files = fs.inodes;
    out.f_ffree = fs.inodes_free;
    out.f_favail = fs.inodes_free;
    out.f_fsid = fs.fsid;
    out.f_namemax = fs.name_bytes_max.into();
    out.f_flag = if fs.read_only { libc::ST_RDONLY } else { 0 };
    out
}

pub fn efault() -> Error {
    Error::new(libc::EFAULT, "capi::convert")
}
