//! Descriptors: open, read, write, seek, size, sync.

use crate::call::{done, on_pool, with_room, without_pool};
use crate::convert::{input, output, store, string};
use crate::failure::Quiet;
use crate::media::class_of_flags;
use crate::pools::{self, lode_fs};
use libc::{mode_t, off_t, size_t, ssize_t};
use lodestone::Error;
use lodestone::account::{Op, Phase};
use lodestone::fs::files::{AT_FDCWD, Files, OpenFile, Written};
use lodestone::fs::{Fs, Ino, Lent, LentRoom, ReadStep, Step, Tries, WriteStep, WriteUnderWay};
use lodestone::media::Pool;
use lodestone::wait::lets_others_run;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// The offset that stands for the file's, as with preadv2(2).
const AT_ITS_OWN: off_t = -1;

/// What one try of a read or write came to, outside of which the pool may be closed.
enum Tried<T, W> {
    Done(ssize_t),
    UnderWay(T, W, Arc<Fs<Pool>>),
    Blocked(Arc<WriteUnderWay>, Arc<Fs<Pool>>),
    /// By copies that keep room.
    PutOff(Arc<Fs<Pool>>),
}

/// Ends the process where a wait panics: an engine may be using the caller's bytes.
pub struct Waiting;

impl Drop for Waiting {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Runs `begin` on a pool, and waits for copies with nothing of the pool held: so uthreads let others run meanwhile; all
/// others keep their thread, which `begin` is told.
#[inline]
fn read_outside(
    call: &'static str,
    fs: *mut lode_fs,
    of: OpenFile<Pool>,
    mut begin: impl FnMut(&Files<Pool>, &mut OpenFile<Pool>, bool) -> ReadStep<usize>,
) -> ssize_t {
    let mut of = Quiet::new(of);
    let keeps = !lets_others_run();
    loop {
        let tried = tried(call, fs, |files| {
            let shared = || files.fs().clone();
            Ok(match begin(files, &mut of, keeps)? {
                Step::Done(n) => Tried::Done(n as ssize_t),
                Step::UnderWay(n, read) => Tried::UnderWay(n, read, shared()),
                Step::Blocked(write) => Tried::Blocked(write, shared()),
            })
        });
        let _waiting = Waiting;
        match tried {
            Tried::Done(answer) => return answer,
            Tried::Blocked(write, fs) => fs.wait_until_over(&write),
            Tried::PutOff(fs) => fs.wait_for_room(),
            Tried::UnderWay(n, read, fs) => {
                // What is moved goes before an error is told, as it may change errno.
                return without_pool(call, move || {
                    fs.wait_for_read(&read).map(|()| n as ssize_t).inspect_err(|_| of.failed())
                });
            }
        }
    }
}

/// As [`read_outside`], for writes.
#[inline]
fn write_outside(
    call: &'static str,
    fs: *mut lode_fs,
    of: OpenFile<Pool>,
    mut begin: impl FnMut(&Files<Pool>, &mut OpenFile<Pool>, bool) -> WriteStep<Written>,
) -> ssize_t {
    let mut of = Quiet::new(of);
    let keeps = !lets_others_run();
    let mut tries = Tries::new();
    // By O_SYNC or O_DSYNC, with nothing of the pool held.
    let mut to_sync = None;
    loop {
        let tried = tried(call, fs, |files| {
            let shared = || files.fs().clone();
            let Some(step) = tries.attempt(|| begin(files, &mut of, keeps)) else {
                return Ok(Tried::PutOff(shared()));
            };
            Ok(match step? {
                Step::Done(written) if written.is_to_be_synced() => {
                    to_sync = Some((written, shared()));
                    Tried::Done(0)
                }
                Step::Done(written) => Tried::Done(files.sync_written(written)? as ssize_t),
                Step::UnderWay(written, write) => Tried::UnderWay(written, write, shared()),
                Step::Blocked(write) => Tried::Blocked(write, shared()),
            })
        });
        let _waiting = Waiting;
        match tried {
            Tried::Done(answer) => {
                let Some((written, shared)) = to_sync else { return answer };
                return without_pool(call, move || {
                    shared.sync_written(written).map(|n| n as ssize_t).inspect_err(|_| of.failed())
                });
            }
            Tried::Blocked(write, shared) => shared.wait_until_over(&write),
            Tried::PutOff(shared) => shared.wait_for_room(),
            Tried::UnderWay(written, write, shared) => {
                return without_pool(call, move || {
                    let done = shared.wait_for_write(&write).and_then(|()| shared.sync_written(written));
                    done.map(|n| n as ssize_t).inspect_err(|_| of.failed())
                });
            }
        }
    }
}

/// Finds what is to be synced, and syncs it with nothing of the pool held.
fn sync_outside<T>(
    call: &'static str,
    fs: *mut lode_fs,
    find: impl FnOnce(&Files<Pool>) -> lodestone::Result<T>,
    sync: impl FnOnce(&Arc<Fs<Pool>>, T) -> lodestone::Result<()>,
) -> c_int {
    let mut found = None;
    let answer = on_pool(call, fs, |pool| {
        found = Some((find(&pool.files)?, pool.files.fs().clone()));
        Ok(0)
    });
    let Some((what, shared)) = found else { return answer };
    // As in `read_outside`.
    without_pool(call, move || sync(&shared, what).map(|()| 0))
}

fn fsync_outside(call: &'static str, fs: *mut lode_fs, fd: c_int, data_only: bool) -> c_int {
    sync_outside(call, fs, |files| files.ino(fd), |shared, ino| shared.fsync_and_wait(ino, data_only))
}

/// In a uthread, before a call that would wait for the writes under way in a file with the pool held: they end here, and
/// others run meanwhile.
fn let_writes_end(
    call: &'static str,
    fs: *mut lode_fs,
    find: impl FnOnce(&Files<Pool>) -> lodestone::Result<Ino>,
) {
    if !lets_others_run() {
        return;
    }
    let mut found = None;
    // What there is to say of a failure the call itself says.
    let _: c_int = on_pool(call, fs, |pool| {
        let shared = pool.files.fs();
        if shared.has_writes_under_way() {
            found = find(&pool.files).ok().map(|ino| (ino, shared.clone()));
        }
        Ok(0)
    });
    if let Some((ino, shared)) = found {
        let _: c_int = without_pool(call, || {
            shared.let_writes_end(ino);
            Ok(0)
        });
    }
}

/// One try; what failed has been told.
fn tried<T, W>(
    call: &'static str,
    fs: *mut lode_fs,
    run: impl FnOnce(&Files<Pool>) -> lodestone::Result<Tried<T, W>>,
) -> Tried<T, W> {
    let mut came_to = None;
    let answer = on_pool(call, fs, |pool| {
        came_to = Some(run(&pool.files)?);
        Ok(0 as ssize_t)
    });
    came_to.unwrap_or(Tried::Done(answer))
}

/// Opens or makes a file and returns the lowest free descriptor of this pool, or -1.
///
/// flags: O_RDONLY, O_WRONLY, O_RDWR; O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_DIRECTORY, O_NOFOLLOW,
/// O_TMPFILE, O_PATH, O_SYNC, O_DSYNC; O_CLOEXEC, O_DIRECT, O_NOATIME, O_NOCTTY and O_NONBLOCK are
/// accepted and change nothing. mode: permission bits of a file that is made, less the umask; without
/// O_CREAT or O_TMPFILE it is not looked at.
///
/// Errors: EACCES, EEXIST, EINVAL, EISDIR, ELOOP, EMFILE (1048576 are open), ENAMETOOLONG, ENOENT, ENOSPC,
/// ENOTDIR, ENXIO (a fifo, socket or device), EPERM (O_NOATIME on another's file), EROFS. Durable: the new
/// name, the truncation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_open(
    fs: *mut lode_fs,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    let path = || unsafe { string(path) };
    if flags & libc::O_TRUNC != 0 {
        let_writes_end("lode_open", fs, |files| Ok(files.stat(path()?)?.ino));
    }
    with_room("lode_open", fs, |pool| pool.files.open(path()?, flags, mode))
}

/// As lode_open, relative paths starting at the directory that dirfd is open on; AT_FDCWD is the root.
/// Further errors: EBADF, ENOTDIR for dirfd.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_openat(
    fs: *mut lode_fs,
    dirfd: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the contract at the head of the header.
    let path = || unsafe { string(path) };
    if flags & libc::O_TRUNC != 0 {
        let_writes_end("lode_openat", fs, |files| Ok(files.fstatat(dirfd, path()?, 0)?.ino));
    }
    with_room("lode_openat", fs, |pool| pool.files.openat(dirfd, path()?, flags, mode))
}

/// Closes a descriptor. A call that uses it in another thread ends first, or, where it waits for a copy,
/// goes on with the file that it began with. The space of an unlinked file is free when its last descriptor
/// is closed and no copy into it is under way. Errors: EBADF. Closing makes nothing more durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_close(fs: *mut lode_fs, fd: c_int) -> c_int {
    done("lode_close", fs, |pool| pool.files.close(fd))
}

/// A second descriptor for the same open file: they share the offset and O_APPEND. Errors: EBADF, EMFILE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_dup(fs: *mut lode_fs, fd: c_int) -> c_int {
    on_pool("lode_dup", fs, |pool| pool.files.dup(fd))
}

/// Reads up to count bytes at the file offset, moves it, and returns the bytes read: fewer than count
/// only at the end of file or beyond 0x7ffff000, 0 at the end. Threads that share the offset take turns.
/// Errors: EBADF, EFAULT, EINVAL, EIO (bad media), EISDIR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_read(fs: *mut lode_fs, fd: c_int, buf: *mut c_void, count: size_t) -> ssize_t {
    read_outside("lode_read", fs, OpenFile::of(fd), |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `read_outside` waits before it returns.
        let room = unsafe { LentRoom::new(output(buf, count)?) }.waiting(keeps);
        files.begin_read(of, room)
    })
}

/// As lode_read at offset (bytes, not negative); the file offset is neither used nor moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pread(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    read_outside("lode_pread", fs, OpenFile::of(fd), |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `read_outside` waits before it returns.
        let room = unsafe { LentRoom::new(output(buf, count)?) }.waiting(keeps);
        files.begin_pread(of, room, offset)
    })
}

/// Writes count bytes at the file offset, or with O_APPEND at the end of file, moves the offset, and
/// returns the bytes written: fewer than count only beyond 0x7ffff000 or at the largest file size
/// (16 TiB less 4096 bytes). Threads that share the offset take turns.
///
/// Errors: EBADF, EFAULT, EFBIG, EINVAL, EIO, ENOSPC, EROFS. Durable: the data and the size; by default
/// (data=cow) the whole write or none of it survives a crash.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_write(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *const c_void,
    count: size_t,
) -> ssize_t {
    write_outside("lode_write", fs, OpenFile::of(fd), |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `write_outside` waits before it returns.
        let bytes = unsafe { Lent::new(input(buf, count)?) }.waiting(keeps);
        files.begin_write(of, bytes)
    })
}

/// As lode_write at offset (bytes, not negative); the file offset is neither used nor moved. On a
/// descriptor with O_APPEND the bytes go to the end of file, as on Linux.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pwrite(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *const c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    write_outside("lode_pwrite", fs, OpenFile::of(fd), |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `write_outside` waits before it returns.
        let bytes = unsafe { Lent::new(input(buf, count)?) }.waiting(keeps);
        files.begin_pwrite(of, bytes, offset)
    })
}

/// As lode_pread, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
/// lode_open_pool were told; 0: of theirs. offset -1: as lode_read, at the file offset, which moves. Further errors:
/// EINVAL (other flags).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pread2(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *mut c_void,
    count: size_t,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    const CALL: &str = "lode_pread2";
    let of = match class_of_flags(flags) {
        Ok(class) => OpenFile::of_class(fd, class),
        Err(e) => return without_pool(CALL, || Err(e)),
    };
    read_outside(CALL, fs, of, |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `read_outside` waits before it returns.
        let room = unsafe { LentRoom::new(output(buf, count)?) }.waiting(keeps);
        match offset {
            AT_ITS_OWN => files.begin_read(of, room),
            _ => files.begin_pread(of, room, offset),
        }
    })
}

/// As lode_pwrite, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
/// lode_open_pool were told; 0: of theirs. offset -1: as lode_write, at the file offset, which moves. Further errors:
/// EINVAL (other flags).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pwrite2(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *const c_void,
    count: size_t,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    const CALL: &str = "lode_pwrite2";
    let of = match class_of_flags(flags) {
        Ok(class) => OpenFile::of_class(fd, class),
        Err(e) => return without_pool(CALL, || Err(e)),
    };
    write_outside(CALL, fs, of, |files, of, keeps| {
        // SAFETY: the contract at the head of the header; `write_outside` waits before it returns.
        let bytes = unsafe { Lent::new(input(buf, count)?) }.waiting(keeps);
        match offset {
            AT_ITS_OWN => files.begin_write(of, bytes),
            _ => files.begin_pwrite(of, bytes, offset),
        }
    })
}

/// Moves the file offset and returns it, in bytes. whence: SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA,
/// SEEK_HOLE. Errors: EBADF, EINVAL, ENXIO (SEEK_DATA or SEEK_HOLE beyond the end).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_lseek(fs: *mut lode_fs, fd: c_int, offset: off_t, whence: c_int) -> off_t {
    on_pool("lode_lseek", fs, |pool| Ok(pool.files.lseek(fd, offset, whence)? as off_t))
}

/// Sets the size of a file in bytes; bytes that come into being read as zeros. Errors: EACCES, EFBIG,
/// EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_truncate(fs: *mut lode_fs, path: *const c_char, length: off_t) -> c_int {
    // SAFETY: the contract at the head of the header.
    let path = || unsafe { string(path) };
    let_writes_end("lode_truncate", fs, |files| Ok(files.stat(path()?)?.ino));
    done("lode_truncate", fs, |pool| pool.files.truncate(path()?, length))
}

/// As lode_truncate on a descriptor. EINVAL where it is not open for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_ftruncate(fs: *mut lode_fs, fd: c_int, length: off_t) -> c_int {
    let_writes_end("lode_ftruncate", fs, |files| files.ino(fd));
    done("lode_ftruncate", fs, |pool| pool.files.ftruncate(fd, length))
}

/// Reserves, punches or zeros a range of bytes. mode: 0 or FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (with
/// KEEP_SIZE), FALLOC_FL_ZERO_RANGE, FALLOC_FL_UNSHARE_RANGE (as 0: nothing is shared). Errors: EBADF, EFBIG,
/// EINVAL, ENOSPC, EOPNOTSUPP (other modes), EROFS. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fallocate(
    fs: *mut lode_fs,
    fd: c_int,
    mode: c_int,
    offset: off_t,
    len: off_t,
) -> c_int {
    let_writes_end("lode_fallocate", fs, |files| files.ino(fd));
    done("lode_fallocate", fs, |pool| pool.files.fallocate(fd, mode, offset, len))
}

/// From now on this engine copies what is read and written through the descriptor and its duplicates: cpu,
/// semaphore, delegate, dsa, ioat, emu or emu-ioat, as lode_open_pool explains them. NULL: the pool's. What
/// a call promises does not depend on it. Errors: EBADF, EFAULT, EINVAL (no such engine).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_set_engine(fs: *mut lode_fs, fd: c_int, engine: *const c_char) -> c_int {
    done("lode_set_engine", fs, |pool| {
        let engine = match engine.is_null() {
            true => None,
            // SAFETY: the contract at the head of the header.
            false => Some(pools::engine(&String::from_utf8_lossy(unsafe { string(engine)? }))?),
        };
        pool.files.set_engine(fd, engine)
    })
}

/// From now on this is wanted of copies of what is read and written through the descriptor and its duplicates: latency or
/// bandwidth, as lode_open_pool explains them. NULL: the pool's. It changes when a copy is made, and nothing of what a call
/// promises. Errors: EBADF, EFAULT, EINVAL (no such class).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_set_class(fs: *mut lode_fs, fd: c_int, class: *const c_char) -> c_int {
    done("lode_set_class", fs, |pool| {
        let class = match class.is_null() {
            true => None,
            // SAFETY: the contract at the head of the header.
            false => Some(pools::class(&String::from_utf8_lossy(unsafe { string(class)? }))?),
        };
        pool.files.set_class(fd, class)
    })
}

/// Makes everything done to the file survive power loss, on every kind of media that can keep it. Only
/// ordinary files as media need it: on persistent memory each call is durable when it returns. Also for
/// directories. Errors: EBADF, EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fsync(fs: *mut lode_fs, fd: c_int) -> c_int {
    fsync_outside("lode_fsync", fs, fd, false)
}

/// As lode_fsync, leaving out metadata that reading the data back does not need.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_fdatasync(fs: *mut lode_fs, fd: c_int) -> c_int {
    fsync_outside("lode_fdatasync", fs, fd, true)
}

/// lode_fsync for the whole pool. Errors: EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_sync(fs: *mut lode_fs) -> c_int {
    sync_outside("lode_sync", fs, |_| Ok(()), |shared, ()| shared.sync_and_wait())
}

/// Tests whether the user of this pool may do what mode asks: F_OK (it exists), or any of R_OK, W_OK,
/// X_OK. Errors: EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EROFS.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_access(fs: *mut lode_fs, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the contract at the head of the header.
    done("lode_access", fs, |pool| pool.files.faccessat(AT_FDCWD, unsafe { string(path) }?, mode, 0))
}

/// Where the time of operations went that were watched: about one in 64 of each thread.
#[repr(C)]
pub struct lode_times {
    /// That were watched, and the bytes that they were asked for.
    pub operations: u64,
    pub bytes: u64,
    /// Moving data, in nanoseconds; all phases together are the whole.
    pub copy_ns: u64,
    /// Allocating, appending records and fencing them.
    pub metadata_ns: u64,
    /// Finding out where things are.
    pub index_ns: u64,
    /// Waiting for locks, and for engines that copy.
    pub wait_ns: u64,
}

/// Operations that lode_get_times knows.
pub const LODE_READS: c_int = 0;
pub const LODE_WRITES: c_int = 1;

/// Where the time of reads (LODE_READS) or writes (LODE_WRITES) went since the pool was opened, on all threads. (Phases as
/// in EasyIO, Figure 1.) Errors: EFAULT, EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_get_times(fs: *mut lode_fs, operation: c_int, times: *mut lode_times) -> c_int {
    done("lode_get_times", fs, |pool| {
        let op = match operation {
            LODE_READS => Op::Read,
            LODE_WRITES => Op::Write,
            _ => return Err(Error::new(libc::EINVAL, "capi::get_times")),
        };
        let found = pool.files.fs().times(op);
        let found = lode_times {
            operations: found.operations,
            bytes: found.bytes,
            copy_ns: found.ns(Phase::Copy),
            metadata_ns: found.ns(Phase::Metadata),
            index_ns: found.ns(Phase::Index),
            wait_ns: found.ns(Phase::Wait),
        };
        // SAFETY: the contract at the head of the header.
        unsafe { store(times, found) }
    })
}
