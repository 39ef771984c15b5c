//! The end of a mount by signal: SIGTERM, SIGINT and SIGHUP all mean "unmount and close the pool".
//!
//! The signals are blocked in every thread and taken by one that waits for them, so that no request is
//! ever interrupted half-way. A mount in use is given a grace, then taken out of sight, then cut from its
//! users: whoever sends SIGTERM means it, and a checkpoint must follow before SIGKILL does. A second signal
//! ends the grace.
//!
//! Of what its users stored through mappings before the cut nothing is lost: the kernel is made to write it, while the mount is in sight
//! (later nobody could ask), and again before the cut. That has a limit, too, and the next signal ends it.

use std::io;
use std::mem::MaybeUninit;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use super::write_back::{Step, WriteBack};
use crate::door::connect::Attachment;

/// How long a busy mount may stay in sight.
const GRACE: Duration = Duration::from_secs(2);
/// How long its users may go on after it has been taken out of sight.
const LINGER: Duration = Duration::from_secs(1);
/// How long the kernel may take, in all, to write what its users stored.
const WRITE_BACK: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// The signals that end a mount, blocked since this was made.
pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks them in this thread and those it starts.
    pub fn block() -> io::Result<Signals> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set, which sigaddset then changes and pthread_sigmask reads;
        // the numbers are valid, so that neither fails.
        let (code, set) = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let set = set.assume_init();
            (libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()), set)
        };
        if code == 0 { Ok(Signals { set }) } else { Err(io::Error::from_raw_os_error(code)) }
    }

    /// Waits for one of them, at most `limit`.
    fn wait(&self, limit: Duration) -> bool {
        let limit =
            libc::timespec { tv_sec: limit.as_secs() as libc::time_t, tv_nsec: limit.subsec_nanos().into() };
        // SAFETY: the set is initialised and the time outlives the call; the information about the sender
        // is not wanted, which NULL says.
        unsafe { libc::sigtimedwait(&self.set, std::ptr::null_mut(), &limit) > 0 }
    }

    fn wait_for_one(&self) {
        while !self.wait(Duration::from_secs(3600)) {}
    }

    /// Starts the thread that ends the mount at a signal. When its users have been cut off and the kernel
    /// still does not let go, `stuck` hears of it.
    pub fn watch(self, attachment: Attachment, stuck: Sender<io::Result<()>>) -> io::Result<()> {
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            self.wait_for_one();
            self.end(&attachment);
            // The server sees the end of the connection and the process ends. Where that does not come:
            thread::sleep(LINGER);
            let _ = stuck.send(Ok(()));
        })?;
        Ok(())
    }

    fn end(&self, attachment: &Attachment) {
        if attachment.dir().is_none() || self.unmount_in_grace(attachment) {
            return;
        }
        tracing::warn!("the mount is in use: it is taken out of sight, and its users are cut off");
        let begin = Instant::now();
        let write_back = WriteBack::begin(attachment);
        let step = |step, end| match &write_back {
            Ok(write_back) => write_back.step(step, end, || self.wait(Duration::ZERO)),
            Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
        };
        let asked = step(Step::Ask, begin + WRITE_BACK);
        let took = begin.elapsed();
        if let Err(e) = attachment.unmount(true) {
            tracing::error!(error = %e, "the mount cannot be taken away");
        }
        self.wait(LINGER);
        let settled =
            asked.and_then(|()| step(Step::Settle, Instant::now() + WRITE_BACK.saturating_sub(took)));
        if let Err(e) = settled {
            tracing::error!(error = %e, "what programs stored through mappings may be lost: the kernel did not write all of it");
        }
        attachment.cut();
    }

    /// True when the mount has gone.
    fn unmount_in_grace(&self, attachment: &Attachment) -> bool {
        let end = Instant::now() + GRACE;
        loop {
            match attachment.unmount(false) {
                Ok(()) => return true,
                Err(e) if e.raw_os_error() != Some(libc::EBUSY) => {
                    tracing::error!(error = %e, "unmount");
                    return false;
                }
                Err(_) if Instant::now() >= end || self.wait(POLL) => return false,
                Err(_) => {}
            }
        }
    }
}
