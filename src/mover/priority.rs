//! The class that a program has by its I/O priority (ionice(1), ioprio_set(2)), for programs that know of no classes:
//! realtime is latency, idle is bandwidth, and best effort, which everybody has who said nothing, is none.

use super::class::{Class, Owner};

/// IOPRIO_WHO_PROCESS of `linux/ioprio.h`: a thread, in truth.
const WHO_PROCESS: libc::c_int = 1;
/// Priorities have their class above these bits.
const CLASS_SHIFT: u32 = 13;
const REALTIME: u32 = 1;
const IDLE: u32 = 3;

/// Of thread `tid`, or, with 0, of the calling one; class bandwidth has this `owner`. None where nothing was said, and where
/// the kernel does not tell: the thread has ended, or is another user's. One system call.
pub fn class_of(tid: u32, owner: Owner) -> Option<Class> {
    // SAFETY: three numbers, and nothing is stored.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, tid) };
    match u32::try_from(priority).ok()? >> CLASS_SHIFT & 7 {
        REALTIME => Some(Class::Latency),
        IDLE => Some(Class::Bandwidth(owner)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(class: u32) -> bool {
        // SAFETY: of this thread, which ends with the test.
        unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, class << CLASS_SHIFT) == 0 }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a system call that it does not know")]
    fn a_thread_has_the_class_of_its_priority() {
        let (mine, other) = (Owner::of(7), Owner::process());
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        std::thread::spawn(move || {
            assert_eq!(class_of(tid, mine), None, "who started it said nothing");
            assert!(set(IDLE));
            assert_eq!(class_of(0, mine), Some(Class::Bandwidth(mine)));
            let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            assert_eq!(class_of(own, other), Some(Class::Bandwidth(other)));
            // Not everybody may.
            if set(REALTIME) {
                assert_eq!(class_of(0, mine), Some(Class::Latency));
            }
            assert!(set(2));
            assert_eq!(class_of(0, mine), None);
        })
        .join()
        .unwrap();
        assert_eq!(class_of(u32::MAX >> 1, mine), None, "nobody has this number");
    }
}
