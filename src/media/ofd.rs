//! Locks of ranges of an open file: they end with it, so that who is killed leaves none, and a descriptor that is handed on
//! hands them on. The kernel's other locks of ranges belong to processes.

use std::os::fd::RawFd;

use rustix::io::{Errno, Result};

/// Sets (`F_RDLCK`, `F_WRLCK`) or removes (`F_UNLCK`) the lock of a range. AGAIN where another open file has one that keeps it off.
pub(crate) fn set(file: RawFd, kind: i32, start: i64, bytes: i64) -> Result<()> {
    let lock = lock_of(kind, start, bytes);
    // SAFETY: the kernel reads one lock.
    match unsafe { libc::fcntl(file, libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// The end of what keeps a lock for writing off a range; an inner none where nothing does, an outer one where the
/// kernel does not say.
pub(crate) fn conflict(file: RawFd, start: i64, bytes: i64) -> Option<Option<i64>> {
    let mut lock = lock_of(libc::F_WRLCK, start, bytes);
    // SAFETY: the kernel reads one lock and writes one.
    if unsafe { libc::fcntl(file, libc::F_OFD_GETLK, &raw mut lock) } != 0 {
        return None;
    }
    let free = i32::from(lock.l_type) == libc::F_UNLCK;
    let end = if lock.l_len == 0 { i64::MAX } else { lock.l_start.saturating_add(lock.l_len) };
    Some((!free).then_some(end))
}

fn lock_of(kind: i32, start: i64, bytes: i64) -> libc::flock {
    // SAFETY: plain data, for which zeros are valid; the process number has to be 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start;
    lock.l_len = bytes;
    lock
}
