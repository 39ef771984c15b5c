//! The boundary that every call crosses: handle in, errno out, no panic through.

use crate::failure::fail;
use crate::handle::{self, Held};
use crate::pools::{OpenPool, lode_fs};
use lodestone::fs::Tries;
use lodestone::{Error, Result};
use std::ffi::{c_int, c_long};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a C function answers when it has failed.
pub trait Failed {
    const FAILED: Self;
}

impl Failed for c_int {
    const FAILED: c_int = -1;
}

/// `ssize_t`.
impl Failed for isize {
    const FAILED: isize = -1;
}

/// `off_t`, `long` and `lode_ticket`.
impl Failed for c_long {
    const FAILED: c_long = -1;
}

impl<T> Failed for *mut T {
    const FAILED: *mut T = std::ptr::null_mut();
}

impl<T> Failed for *const T {
    const FAILED: *const T = std::ptr::null();
}

/// Runs one function of the interface on what the handle at this address stands for.
#[inline]
pub fn on<T: Held, R: Failed>(call: &'static str, handle: usize, run: impl FnOnce(&T) -> Result<R>) -> R {
    // Within the call: whoever waits for its end to close the handle knows of it.
    let run = |held: &T| {
        catch_unwind(AssertUnwindSafe(|| run(held))).unwrap_or_else(|_| {
            handle::distrust(handle, held);
            Err(panicked())
        })
    };
    without_pool(call, || handle::with(handle, run))
}

/// Runs one function of the interface on an open pool.
#[inline]
pub fn on_pool<R: Failed>(
    call: &'static str,
    fs: *mut lode_fs,
    run: impl FnOnce(&OpenPool) -> Result<R>,
) -> R {
    on(call, fs.addr(), run)
}

/// As [`on_pool`] for functions that may find the pool full: in a uthread they are put off where copies keep room, and others
/// run with nothing of the pool held.
#[inline]
pub fn with_room<R: Failed>(
    call: &'static str,
    fs: *mut lode_fs,
    mut run: impl FnMut(&OpenPool) -> Result<R>,
) -> R {
    let mut tries = Tries::new();
    loop {
        let mut full = None;
        let answer = on_pool(call, fs, |pool| {
            tries.attempt(|| run(pool)).unwrap_or_else(|| {
                full = Some(pool.files.fs().clone());
                Ok(R::FAILED)
            })
        });
        let Some(shared) = full else { return answer };
        let _: c_int = without_pool(call, || {
            shared.wait_for_room();
            Ok(0)
        });
    }
}

/// As [`with_room`] for functions that answer 0.
#[inline]
pub fn done(call: &'static str, fs: *mut lode_fs, mut run: impl FnMut(&OpenPool) -> Result<()>) -> c_int {
    with_room(call, fs, |pool| run(pool).map(|()| 0))
}

/// Runs a function that has no open pool yet, or none any more.
pub fn without_pool<R: Failed>(call: &'static str, run: impl FnOnce() -> Result<R>) -> R {
    match catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(panicked())) {
        Ok(value) => value,
        Err(error) => {
            fail(call, error);
            R::FAILED
        }
    }
}

fn panicked() -> Error {
    Error::message(
        libc::EIO,
        "capi::call",
        "an internal error; nothing acknowledged is lost: close the pool and open it again, and please report \
         the message on stderr",
    )
}
