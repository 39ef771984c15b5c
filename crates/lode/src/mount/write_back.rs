//! What programs stored through shared mappings, and the kernel alone has: asked for before a mount in use is cut from its users. A
//! connection that is cut takes it along, and nobody hears of that.
//!
//! On a thread of its own, for it may wait for requests that nobody answers any more. It shares no descriptor with the process: the
//! device is closed when that ends, and then the kernel lets the thread go.

use std::fs::File;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::door::connect::Attachment;
use crate::door::fuse::BACKGROUND_REQUESTS_MAX;

/// For the end of what one thread waits for, in steps.
const POLL: Duration = Duration::from_millis(5);

/// What the thread is asked to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The kernel asks for all writes, of which some may be under way.
    Ask,
    /// And whoever serves has taken them all.
    Settle,
}

/// The thread that waits. It lets go of the mount when this is dropped.
pub struct WriteBack {
    ask: Sender<Step>,
    done: Receiver<io::Result<()>>,
}

impl WriteBack {
    pub fn begin(attachment: &Attachment) -> io::Result<WriteBack> {
        let ((ask, asked), (tell, done)) = (channel(), channel());
        let attachment = attachment.clone();
        thread::Builder::new()
            .name("write-back".to_owned())
            .spawn(move || serve(&attachment, &asked, &tell))?;
        Ok(WriteBack { ask, done })
    }

    /// Fails at `end`, or once `give_up` says so; the thread may wait on.
    pub fn step(&self, step: Step, end: Instant, give_up: impl Fn() -> bool) -> io::Result<()> {
        // Where the thread has ended the answer says so.
        let _ = self.ask.send(step);
        loop {
            match self.done.recv_timeout(POLL) {
                Ok(done) => return done,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("its thread panicked"));
                }
                Err(_) if Instant::now() >= end || give_up() => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => {}
            }
        }
    }
}

fn serve(attachment: &Attachment, asked: &Receiver<Step>, tell: &Sender<io::Result<()>>) {
    let root = keep_no_descriptor().and_then(|()| attachment.root());
    for step in asked {
        let done = match &root {
            Ok(root) => write_all(attachment, root, step),
            Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
        };
        if tell.send(done).is_err() {
            return;
        }
    }
}

fn write_all(attachment: &Attachment, root: &File, step: Step) -> io::Result<()> {
    rustix::fs::syncfs(root)?;
    if step == Step::Settle {
        // The kernel waits until it has asked, and for no answer. What it keeps back is more than it may ask in the background at once;
        // the rest is in one queue, and whoever serves takes that in its order: what is asked now, last.
        while attachment.waiting().is_some_and(|requests| requests > u64::from(BACKGROUND_REQUESTS_MAX)) {
            thread::sleep(POLL);
        }
        rustix::fs::fstatfs(root)?;
    }
    Ok(())
}

/// Of those of the process. Where a kernel before 5.9 cannot, they stay, which matters for what is stuck alone.
fn keep_no_descriptor() -> io::Result<()> {
    const FIRST: u32 = 3;
    // SAFETY: closes what this thread alone sees closed, and of that it has and uses nothing.
    let done = unsafe { libc::syscall(libc::SYS_close_range, FIRST, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
    match (done, io::Error::last_os_error()) {
        (0, _) => Ok(()),
        (_, e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
        (_, e) => Err(e),
    }
}
