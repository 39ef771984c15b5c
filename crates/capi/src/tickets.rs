//! Reads and writes by ticket.

use crate::call::{on_pool, without_pool};
use crate::convert::{input, output};
use crate::failure::Quiet;
use crate::file::Waiting;
use crate::media::{class_of_flags, lode_ticket};
use crate::pools::{OpenPool, lode_fs};
use libc::{off_t, size_t, ssize_t};
use lodestone::fs::files::{Files, OpenFile, Written};
use lodestone::fs::{Fs, Lent, LentRoom, ReadUnderWay, Step, Tries, WriteUnderWay};
use lodestone::limits::COPY_TICKETS_MAX;
use lodestone::media::Pool;
use lodestone::{Error, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// The tickets of a pool.
pub type Tickets = Mutex<HashMap<lode_ticket, Asked>>;

/// A read or write that was asked for.
#[derive(Clone)]
pub enum Asked {
    Ended(ssize_t),
    Reads(ssize_t, Arc<ReadUnderWay>),
    Writes(Written, Arc<WriteUnderWay>),
}

/// What one try came to.
enum Tried {
    Asked(Asked),
    Blocked(Arc<WriteUnderWay>, Arc<Fs<Pool>>),
    /// By copies that keep room.
    PutOff(Arc<Fs<Pool>>),
}

/// Begins what lode_pread does, and returns a ticket for lode_poll and lode_wait, never negative. Until the ticket has ended
/// nobody uses the buffer. What a write under way is about to change is waited for first. Where the pool's engine does not
/// copy on its own (cpu, semaphore), and below an engine's threshold, the bytes are read before this returns.
///
/// Errors: those of lode_pread but EIO by bad media, which lode_wait tells if an engine met it; EAGAIN (nobody waited for
/// 65536 others).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pread_async(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *mut c_void,
    count: size_t,
    offset: off_t,
) -> lode_ticket {
    // SAFETY: the caller's.
    unsafe { ask_to_read("lode_pread_async", fs, OpenFile::of(fd), (buf, count), offset) }
}

/// As lode_pread_async, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
/// lode_open_pool were told; 0: of theirs. Further errors: EINVAL (other flags).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pread2_async(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *mut c_void,
    count: size_t,
    offset: off_t,
    flags: c_int,
) -> lode_ticket {
    const CALL: &str = "lode_pread2_async";
    match class_of_flags(flags) {
        // SAFETY: the caller's.
        Ok(class) => unsafe { ask_to_read(CALL, fs, OpenFile::of_class(fd, class), (buf, count), offset) },
        Err(e) => without_pool(CALL, || Err(e)),
    }
}

/// Begins what lode_pwrite does, and returns a ticket for lode_poll and lode_wait, never negative. Until the ticket has ended
/// nobody changes the buffer. From now on reads of these bytes wait for the write, and so do writes of them and lode_fsync of
/// the file; nothing else does. A write under way to the same bytes is waited for first. Where the pool's engine does not copy
/// on its own (cpu, semaphore), below an engine's threshold, and on ordinary files, the write is done before this returns.
///
/// Errors: those of lode_pwrite but EIO by bad media, which lode_wait tells if an engine met it; EAGAIN (nobody waited for
/// 65536 others). Durable: nothing before the ticket has ended; then what lode_pwrite says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pwrite_async(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *const c_void,
    count: size_t,
    offset: off_t,
) -> lode_ticket {
    // SAFETY: the caller's.
    unsafe { ask_to_write("lode_pwrite_async", fs, OpenFile::of(fd), (buf, count), offset) }
}

/// As lode_pwrite_async, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
/// lode_open_pool were told; 0: of theirs. Further errors: EINVAL (other flags).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_pwrite2_async(
    fs: *mut lode_fs,
    fd: c_int,
    buf: *const c_void,
    count: size_t,
    offset: off_t,
    flags: c_int,
) -> lode_ticket {
    const CALL: &str = "lode_pwrite2_async";
    match class_of_flags(flags) {
        // SAFETY: the caller's.
        Ok(class) => unsafe { ask_to_write(CALL, fs, OpenFile::of_class(fd, class), (buf, count), offset) },
        Err(e) => without_pool(CALL, || Err(e)),
    }
}

/// 1 where the read or write of a ticket has ended, 0 where not, -1 on failure. Once it has, the buffer is the caller's; how
/// it ended, and the end of the ticket, is lode_wait's. Errors: EINVAL (no such ticket, or it was waited for).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_poll(fs: *mut lode_fs, ticket: lode_ticket) -> c_int {
    on_pool("lode_poll", fs, |pool| {
        let ended = match ticket_of(pool, ticket)? {
            Asked::Ended(_) => true,
            Asked::Reads(_, read) => pool.files.fs().read_has_ended(&read),
            Asked::Writes(_, write) => pool.files.fs().write_has_ended(&write),
        };
        Ok(ended.into())
    })
}

/// Waits until the read or write of a ticket has ended, and returns what lode_pread or lode_pwrite would have. Any thread may,
/// and several at once; the first that returns ends the ticket. In a uthread others run meanwhile. Errors: EINVAL (no such
/// ticket, or it was waited for), EIO (bad media; a write left the file as it was): the ticket has ended then, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_wait(fs: *mut lode_fs, ticket: lode_ticket) -> ssize_t {
    const CALL: &str = "lode_wait";
    let mut found = None;
    let answer = on_pool(CALL, fs, |pool| {
        found = Some((ticket_of(pool, ticket)?, pool.files.fs().clone()));
        Ok(0 as ssize_t)
    });
    let Some((asked, shared)) = found else { return answer };
    let _waiting = Waiting;
    without_pool(CALL, || {
        let ended = match asked {
            Asked::Ended(bytes) => Ok(bytes),
            Asked::Reads(bytes, read) => shared.wait_for_read(&read).map(|()| bytes),
            Asked::Writes(written, write) => shared
                .wait_for_write(&write)
                .and_then(|()| shared.sync_written(written))
                .map(|bytes| bytes as ssize_t),
        };
        // Both before the error is told: they may change errno.
        drop(shared);
        // A pool that was closed meanwhile has ended its tickets.
        let _ = crate::handle::with(fs.addr(), |pool: &OpenPool| Ok(pool.tickets.lock().remove(&ticket)));
        ended
    })
}

/// # Safety
/// As the head of the header says, until the ticket has ended.
unsafe fn ask_to_read(
    call: &'static str,
    fs: *mut lode_fs,
    of: OpenFile<Pool>,
    (buf, count): (*mut c_void, size_t),
    offset: off_t,
) -> lode_ticket {
    ask(call, fs, of, |files, of| {
        // SAFETY: the caller's: until the ticket has ended the buffer is the read's.
        let room = unsafe { LentRoom::new(output(buf, count)?) };
        Ok(match files.begin_pread(of, room, offset)? {
            Step::Done(read) => Tried::Asked(Asked::Ended(read as ssize_t)),
            Step::UnderWay(read, copy) => Tried::Asked(Asked::Reads(read as ssize_t, copy)),
            Step::Blocked(write) => Tried::Blocked(write, files.fs().clone()),
        })
    })
}

/// # Safety
/// As the head of the header says, until the ticket has ended.
unsafe fn ask_to_write(
    call: &'static str,
    fs: *mut lode_fs,
    of: OpenFile<Pool>,
    (buf, count): (*const c_void, size_t),
    offset: off_t,
) -> lode_ticket {
    ask(call, fs, of, |files, of| {
        // SAFETY: the caller's: until the ticket has ended the buffer stays as it is.
        let bytes = unsafe { Lent::new(input(buf, count)?) };
        Ok(match files.begin_pwrite(of, bytes, offset)? {
            Step::Done(written) => Tried::Asked(Asked::Ended(files.sync_written(written)? as ssize_t)),
            Step::UnderWay(written, copy) => Tried::Asked(Asked::Writes(written, copy)),
            Step::Blocked(write) => Tried::Blocked(write, files.fs().clone()),
        })
    })
}

/// Begins, outside of the pool waiting for what is in the way.
fn ask(
    call: &'static str,
    fs: *mut lode_fs,
    of: OpenFile<Pool>,
    mut begin: impl FnMut(&Files<Pool>, &mut OpenFile<Pool>) -> Result<Tried>,
) -> lode_ticket {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    let mut of = Quiet::new(of);
    let mut tries = Tries::new();
    loop {
        let mut later = None;
        let answer = on_pool(call, fs, |pool| {
            if pool.tickets.lock().len() >= COPY_TICKETS_MAX {
                let message = format!("nobody waited for {COPY_TICKETS_MAX} reads and writes: wait for some");
                return Err(Error::message(libc::EAGAIN, "capi::tickets", message));
            }
            let put_off = || Ok(Tried::PutOff(pool.files.fs().clone()));
            match tries.attempt(|| begin(&pool.files, &mut of)).unwrap_or_else(put_off)? {
                Tried::Asked(asked) => {
                    let number = NEXT.fetch_add(1, Ordering::Relaxed);
                    pool.tickets.lock().insert(number, asked);
                    Ok(number)
                }
                tried => {
                    later = Some(tried);
                    Ok(0)
                }
            }
        });
        match later {
            Some(Tried::Blocked(write, shared)) => shared.wait_until_over(&write),
            Some(Tried::PutOff(shared)) => shared.wait_for_room(),
            Some(Tried::Asked(_)) | None => return answer,
        }
    }
}

fn ticket_of(pool: &OpenPool, ticket: lode_ticket) -> Result<Asked> {
    let known = pool.tickets.lock().get(&ticket).cloned();
    known.ok_or_else(|| {
        let message = format!("{ticket} is no ticket of this pool, or it was waited for");
        Error::message(libc::EINVAL, "capi::tickets", message)
    })
}
