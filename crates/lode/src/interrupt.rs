//! SIGINT, SIGTERM and SIGHUP as a question: long work asks between two steps, ends in order and says so.
//!
//! The default action would leave a pool that has to recover and half a file that nobody speaks of. The
//! second signal of a kind kills, so that a step that hangs cannot hold a terminal.
//!
//! A step that waits for others (a read from a pipe) first waits for either them or a signal: one that came between
//! the question and the read would otherwise go unnoticed for as long as the read takes.
//!
//! SIGXFSZ asks nothing: the write that brought it says what failed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

static REQUESTED: AtomicBool = AtomicBool::new(false);
/// A pipe that has a byte once a signal came: the end to read, and the number of the other for the handler.
static WAKE: OnceLock<(OwnedFd, OwnedFd)> = OnceLock::new();
static WAKE_WRITE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn note(_signal: libc::c_int) {
    // Relaxed: the flag publishes nothing but itself.
    REQUESTED.store(true, Ordering::Relaxed);
    // SAFETY: write(2) is async-signal-safe; the byte outlives the call. A full or missing pipe does not matter, and
    // `errno` is what the interrupted code left there.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(WAKE_WRITE.load(Ordering::Relaxed), [1u8].as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
    }
}

extern "C" fn go_on(_signal: libc::c_int) {}

/// A file that may not grow any more (`ulimit -f`) fails with EFBIG, so that what was begun is undone, instead of
/// ending the process by SIGXFSZ. By a handler, not by ignoring it: programs that are executed begin with the default.
pub fn outlive_large_files() {
    // SAFETY: both structures are zeroed, which is a valid sigaction, and the kernel only reads one and fills the
    // other; the handler does nothing.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &mut old);
        if old.sa_sigaction == libc::SIG_IGN {
            return; // and so it is for what is executed: the caller wants it
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = go_on as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGXFSZ, &action, std::ptr::null_mut());
    }
}

/// Waits until `fd` can be read (or is at its end), or a signal came.
pub fn wait_readable(fd: BorrowedFd<'_>) {
    if WAKE.get().is_some() {
        wait(fd, -1);
    }
}

/// Likewise, or until so much time is over; whether `fd` can be read.
pub fn wait_readable_within(fd: BorrowedFd<'_>, time: Duration) -> bool {
    wait(fd, time.as_millis() as libc::c_int)
}

fn wait(fd: BorrowedFd<'_>, ms: libc::c_int) -> bool {
    let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // The kernel leaves out what is negative.
    let wake = WAKE.get().map_or(-1, |(wake, _)| wake.as_raw_fd());
    let mut fds = [poll(fd.as_raw_fd()), poll(wake)];
    // SAFETY: the descriptors are open, and the kernel writes the two structures only.
    unsafe { libc::poll(fds.as_mut_ptr(), 2, ms) };
    fds[0].revents != 0
}

/// Runs `act` in a thread of its own once a signal came, for work that has no two steps between which to ask. Without
/// [`catch`] signals do what they do by default, and nothing is run.
pub fn when_requested(act: impl FnOnce() + Send + 'static) {
    let Some((wake, _)) = WAKE.get() else { return };
    std::thread::spawn(move || {
        while !requested() {
            wait_readable(wake.as_fd());
        }
        act();
    });
}

/// Turns the signals into [`requested`] from here on.
pub fn catch() {
    let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
    if let Ok(pipe) = rustix::pipe::pipe_with(flags) {
        let (_, write) = WAKE.get_or_init(|| pipe);
        WAKE_WRITE.store(write.as_raw_fd(), Ordering::Relaxed);
    }
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
