//! SIGINT, SIGTERM and SIGHUP as a question: long work asks between two steps, ends in order and says so.
//!
//! The default action would leave a pool that has to recover and half a file that nobody speaks of. The
//! second signal of a kind kills, so that a step that hangs cannot hold a terminal.

use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    // Relaxed: the flag publishes nothing but itself.
    REQUESTED.store(true, Ordering::Relaxed);
}

/// Turns the signals into [`requested`] from here on.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: both structures are zeroed, which is a valid sigaction, and the kernel only reads one and
        // fills the other; the handler only stores to an atomic, which is async-signal-safe.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut old);
            if old.sa_sigaction == libc::SIG_IGN {
                continue; // nohup, or a shell's background job
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
            // No SA_RESTART: a read from a pipe or a terminal must come back and ask.
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Somebody asked this process to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
