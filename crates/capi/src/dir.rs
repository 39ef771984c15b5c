//! Directory streams.
//!
//! A stream is a descriptor and a buffer of entries read ahead. A `lode_dir *` is not an address: it is
//! the number of the stream in the pool's table, so that a stream that is closed, or never was one, is
//! EBADF instead of a crash.

use crate::call::{done, on_pool};
use crate::convert::string;
use crate::failure::{errno, set_errno};
use crate::pools::{OpenPool, lode_fs};
use libc::dirent;
use lodestone::error::{Error, Result};
use lodestone::fs::files::{Fd, table::Held};
use parking_lot::Mutex;
use std::ffi::{c_char, c_int, c_long};
use std::mem::offset_of;

/// A directory being read.
pub struct lode_dir {
    _opaque: [u8; 0],
}

/// Bytes of entries read ahead: about a hundred entries.
const BUFFER_BYTES: usize = 4096;

/// What getdents64 hands out is a `struct dirent` of this platform.
const _: () = {
    assert!(offset_of!(dirent, d_ino) == offset_of!(libc::dirent64, d_ino));
    assert!(offset_of!(dirent, d_off) == offset_of!(libc::dirent64, d_off));
    assert!(offset_of!(dirent, d_reclen) == offset_of!(libc::dirent64, d_reclen));
    assert!(offset_of!(dirent, d_type) == offset_of!(libc::dirent64, d_type));
    assert!(offset_of!(dirent, d_name) == offset_of!(libc::dirent64, d_name));
    assert!(align_of::<dirent>() == 8);
};

/// The state of one `lode_dir`.
pub struct Stream {
    fd: Fd,
    /// Records of `struct dirent`, aligned as they ask.
    buffer: Box<[u64; BUFFER_BYTES / 8]>,
    /// Bytes of the buffer handed out, and filled.
    next: usize,
    filled: usize,
    /// Where reading goes on behind the last entry handed out.
    position: u64,
}

impl Stream {
    fn new(fd: Fd) -> Stream {
        Stream { fd, buffer: Box::new([0; BUFFER_BYTES / 8]), next: 0, filled: 0, position: 0 }
    }

    /// The next entry; NULL at the end.
    fn read(&mut self, pool: &OpenPool) -> Result<*mut dirent> {
        if self.next == self.filled {
            self.next = 0;
            self.filled = 0;
            // As readdir(3): a directory that was removed has no entries.
            self.filled = match pool.files.getdents(self.fd, bytes_of(&mut self.buffer[..])) {
                Err(e) if e.errno() == libc::ENOENT => 0,
                other => other?,
            };
            if self.filled == 0 {
                return Ok(std::ptr::null_mut());
            }
        }
        let entry = self.buffer.as_mut_ptr().cast::<u8>().wrapping_add(self.next).cast::<dirent>();
        // SAFETY: `next` is where a record of getdents begins, 8-byte aligned and inside the buffer; the
        // record is read through field pointers because it is shorter than a whole struct dirent.
        let (length, position) =
            unsafe { ((&raw const (*entry).d_reclen).read(), (&raw const (*entry).d_off).read()) };
        self.next += usize::from(length);
        self.position = position as u64;
        Ok(entry)
    }

    fn seek(&mut self, pool: &OpenPool, position: u64) -> Result<()> {
        pool.files.seekdir(self.fd, position)?;
        self.next = 0;
        self.filled = 0;
        self.position = position;
        Ok(())
    }
}

/// Opens a directory for reading its entries; the stream holds one descriptor. Returns NULL on failure.
/// Errors: EACCES, ELOOP, EMFILE, ENAMETOOLONG, ENOENT, ENOTDIR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_opendir(fs: *mut lode_fs, path: *const c_char) -> *mut lode_dir {
    on_pool("lode_opendir", fs, |pool| {
        let slot = pool.streams.reserve()?;
        // SAFETY: the contract at the head of the header.
        let fd = pool.files.opendir(unsafe { string(path) }?)?;
        let number = slot.fill(Mutex::new(Stream::new(fd)));
        Ok(std::ptr::without_provenance_mut(number + 1))
    })
}

/// The next entry, "." and ".." first; NULL at the end with errno as it was, and NULL with errno on
/// failure. The entry is valid until the next call on the same stream. Entries that come or go while the
/// stream is read may or may not be seen; all others are seen once. Errors: EBADF, EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_readdir(fs: *mut lode_fs, dir: *mut lode_dir) -> *mut dirent {
    let before = errno();
    on_pool("lode_readdir", fs, |pool| {
        let entry = stream(pool, dir)?.lock().read(pool)?;
        if entry.is_null() {
            // A lock that had to wait has changed it.
            set_errno(before);
        }
        Ok(entry)
    })
}

/// Where the stream stands, for lode_seekdir; -1 on failure. Errors: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_telldir(fs: *mut lode_fs, dir: *mut lode_dir) -> c_long {
    on_pool("lode_telldir", fs, |pool| Ok(stream(pool, dir)?.lock().position as c_long))
}

/// Goes to a place that lode_telldir reported. Unlike POSIX it says whether it failed. Errors: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_seekdir(fs: *mut lode_fs, dir: *mut lode_dir, position: c_long) -> c_int {
    done("lode_seekdir", fs, |pool| stream(pool, dir)?.lock().seek(pool, position as u64))
}

/// Begins again, with the entries as they are now. Errors: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_rewinddir(fs: *mut lode_fs, dir: *mut lode_dir) -> c_int {
    done("lode_rewinddir", fs, |pool| stream(pool, dir)?.lock().seek(pool, 0))
}

/// The stream's descriptor, which the stream keeps. Errors: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_dirfd(fs: *mut lode_fs, dir: *mut lode_dir) -> c_int {
    on_pool("lode_dirfd", fs, |pool| Ok(stream(pool, dir)?.lock().fd))
}

/// Closes the stream and its descriptor. Errors: EBADF.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_closedir(fs: *mut lode_fs, dir: *mut lode_dir) -> c_int {
    done("lode_closedir", fs, |pool| {
        let stream = pool.streams.take(number(dir)).ok_or(ebadf())?;
        pool.files.close(stream.into_inner().fd)
    })
}

fn stream(pool: &OpenPool, dir: *mut lode_dir) -> Result<Held<'_, Mutex<Stream>>> {
    pool.streams.get(number(dir)).ok_or(ebadf())
}

fn number(dir: *mut lode_dir) -> usize {
    dir.addr().wrapping_sub(1)
}

fn ebadf() -> Error {
    Error::new(libc::EBADF, "capi::dir")
}

fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: any bytes are words and words are bytes; length and lifetime are the same memory's.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
