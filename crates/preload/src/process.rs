//! fork, refused where it could not be kept: its child would fault, or write its parent's memory.
//!
//! What a fork does to memory on media is the library's business (`wsp::memory`), by handlers that the C library runs. They
//! cannot refuse; this can. `vfork`, `posix_spawn` and `system` share the memory of their parent until they
//! execute another program, and need nothing.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use lodestone::wsp::memory::{ForkRefused, prepare_fork};

use crate::report::complain;

type Fork = unsafe extern "C" fn() -> c_int;

/// The C library's, once it was asked for.
static FORK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// As fork(2). ENOSYS in a process of several threads whose memory lies on a device of which the kernel maps no private copies:
/// device-dax and hugetlbfs. ENOMEM where the kernel maps no more private copies just now.
///
/// # Safety
///
/// As fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    match prepare_fork() {
        Ok(()) => {}
        // As where the kernel itself has no memory for a child: the program says so.
        Err(ForkRefused::Memory) => return failed(libc::ENOMEM),
        Err(ForkRefused::Threads) => {
            complain(
                "a process of several threads with memory on device-dax or hugetlbfs cannot fork: use a file on a DAX \
                 mount, or let it start programs by posix_spawn",
            );
            return failed(libc::ENOSYS);
        }
    }
    let mut found = FORK.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the name ends with NUL.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"fork".as_ptr()) };
        FORK.store(found, Ordering::Relaxed);
    }
    if found.is_null() {
        return failed(libc::ENOSYS);
    }
    // SAFETY: the C library's fork has this type.
    let fork = unsafe { std::mem::transmute::<*mut c_void, Fork>(found) };
    // SAFETY: the caller's.
    unsafe { fork() }
}

fn failed(errno: c_int) -> c_int {
    // SAFETY: the C library gives every thread its errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}
