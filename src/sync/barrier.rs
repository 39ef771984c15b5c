//! An asymmetric pair of barriers.
//!
//! Two threads each store to a place of their own and then load the other's; not both may miss the other's
//! store. The usual way is a full barrier between store and load in both. Here the frequent side has
//! [`light`], which only keeps the compiler from reordering, and the rare side has [`heavy`], which returns
//! after every running thread of the process has passed a full barrier. (Linux `membarrier(2)`,
//! `PRIVATE_EXPEDITED`; threads that do not run passed one when they were scheduled away.)

use std::sync::OnceLock;

use super::primitive::atomic::{Ordering, compiler_fence, fence};

/// Whether [`heavy`] works here; otherwise both sides must use full barriers.
#[inline]
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(register)
}

/// The frequent side: between its store and its load.
#[inline(always)]
pub fn light() {
    if cfg!(any(miri, shuttle, loom)) { fence(Ordering::SeqCst) } else { compiler_fence(Ordering::SeqCst) }
}

/// The rare side: between its store and its load. Some microseconds.
#[cold]
pub fn heavy() {
    fence(Ordering::SeqCst);
    // After fork(2) the child is not registered; and no thread may go on believing that others were stopped.
    assert!(expedite() || register() && expedite(), "the kernel took back its memory barrier (membarrier)");
}

#[cfg(not(any(miri, shuttle, loom)))]
mod kernel {
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: the call takes two integers and touches no memory of the caller.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0) == 0 }
    }

    pub fn register() -> bool {
        membarrier(REGISTER_PRIVATE_EXPEDITED)
    }

    pub fn expedite() -> bool {
        membarrier(PRIVATE_EXPEDITED)
    }
}

/// Miri has no such call. There both sides use full barriers, which is a pair of barriers as well: so it
/// follows what leans, and its model of weak memory tells where an ordering is too weak. Under shuttle memory is
/// sequentially consistent: every access is a barrier, and these are nothing.
#[cfg(any(miri, shuttle, loom))]
mod kernel {
    pub fn register() -> bool {
        true
    }

    pub fn expedite() -> bool {
        true
    }
}

use kernel::{expedite, register};
