//! Signals, which are the program's: no thread that the library starts takes any.
//!
//! The kernel gives a signal to a process to any of its threads that lets it in. A program that blocks one to wait for it would
//! never see it; and its handlers would run on threads that it does not know. What the processor raises stays with the thread that
//! did it, and is let in: SIGBUS is how bad media is found out.

use std::mem::MaybeUninit;

/// By what a thread does itself.
const RAISED: [libc::c_int; 7] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];

/// Runs what starts a thread, which inherits that it takes no signal.
pub fn kept_off<T>(start: impl FnOnce() -> T) -> T {
    let _kept = Kept::new();
    start()
}

/// What the calling thread blocked before.
struct Kept(libc::sigset_t);

impl Kept {
    fn new() -> Option<Kept> {
        // The interpreter has no signals.
        if cfg!(miri) {
            return None;
        }
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::uninit());
        // SAFETY: sigfillset initialises the set, which sigdelset then changes and pthread_sigmask reads; it writes the one
        // before. The numbers are valid, so that none of them fails.
        let (code, before) = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            RAISED.iter().for_each(|signal| {
                libc::sigdelset(all.as_mut_ptr(), *signal);
            });
            let code = libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
            (code, before.assume_init())
        };
        assert_eq!(code, 0, "there is no such way to change a mask");
        Some(Kept(before))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: a mask that was this thread's; nothing is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn blocks(signal: libc::c_int) -> bool {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: with no set to change the mask it writes what there is, which sigismember reads.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
            libc::sigismember(set.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn a_thread_that_is_started_takes_none_but_its_own() {
        let looks = || (blocks(libc::SIGUSR1), blocks(libc::SIGTERM), RAISED.iter().any(|s| blocks(*s)));
        let before = looks();
        let started = kept_off(|| std::thread::spawn(looks));
        assert_eq!(started.join().unwrap(), (true, true, false));
        assert_eq!(looks(), before);
        assert!(std::panic::catch_unwind(|| kept_off(|| panic!("no thread starts"))).is_err());
        assert_eq!(looks(), before, "its starter takes them as ever");
    }
}
