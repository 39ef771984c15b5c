//! Becoming a daemon: the caller gets its prompt back when the mount is live, and not before.
//!
//! The process forks while it is still one thread. The child does all the work and keeps the caller's
//! stderr until the mount is live, so that its one line of error is seen; the parent waits for the
//! child's verdict on a pipe and exits with it. All that letting go of the caller takes is had before. Afterwards nobody reads a terminal: what the server still
//! has to say goes to the system log.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::thread;

use rustix::fs::FileType;
use rustix::pipe::PipeFlags;

use super::FAILED;
use super::stop::Signals;

const LOG_SOCKET: &str = "/dev/log";
/// Facility daemon, severity warning.
const LOG_PRIORITY: u32 = 3 << 3 | 4;
/// Longest line that goes to the system log, in bytes.
const LOG_LINE_BYTES_MAX: u64 = 8192;

pub enum Side {
    /// The caller's process, and the exit code of the attempt.
    Parent(u8),
    /// No thread of it takes a signal that ends a mount but the one that waits for it.
    Child(Signals, Ready),
}

/// The child's end of the pipe.
pub struct Ready {
    pipe: OwnedFd,
    null: OwnedFd,
    /// What takes the place of stderr; none where that stays.
    log: Option<OwnedFd>,
}

/// Forks. Must be called before the process has a second thread.
pub fn split() -> io::Result<Side> {
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the caller promises that this is the only thread, so that no lock is left held in the child
    // and it may go on as any process.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            // Before there is a second thread, which would be ended by them, and the process with it.
            match Signals::block().and_then(|signals| Ok((signals, Ready::prepare()?))) {
                Ok((signals, (null, log))) => Ok(Side::Child(signals, Ready { pipe: theirs, null, log })),
                Err(e) => {
                    // The child says it.
                    tell(theirs, FAILED);
                    Err(e)
                }
            }
        }
        child => {
            drop(theirs);
            let mut verdict = [0];
            match File::from(ours).read(&mut verdict)? {
                0 => {
                    // So that what it held is given back. It fails where somebody else has waited.
                    let child = rustix::process::Pid::from_raw(child);
                    let _ = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
                    Err(io::Error::other("the server ended before the mount was live"))
                }
                _ => Ok(Side::Parent(verdict[0])),
            }
        }
    }
}

impl Ready {
    /// What it takes to let go.
    fn prepare() -> io::Result<(OwnedFd, Option<OwnedFd>)> {
        rustix::process::setsid()?;
        let null = OwnedFd::from(File::options().read(true).write(true).open("/dev/null")?);
        let log = match is_file(io::stderr()) {
            true => None,
            false => Some(system_log().or_else(|_| null.try_clone())?),
        };
        Ok((null, log))
    }

    /// The attempt failed; its line is on stderr.
    pub fn failed(self, code: u8) {
        tell(self.pipe, code);
    }

    /// The mount is live: lets go of the caller and of all it lent.
    pub fn live(self) {
        // None of it can fail: the descriptors that are replaced are open, or may be.
        let _ = rustix::process::chdir("/");
        let _ = rustix::stdio::dup2_stdin(&self.null);
        let _ = rustix::stdio::dup2_stdout(&self.null);
        let _ = self.log.as_ref().map(rustix::stdio::dup2_stderr);
        tell(self.pipe, 0);
    }
}

fn tell(pipe: OwnedFd, code: u8) {
    // A caller that has gone needs no verdict.
    let _ = File::from(pipe).write_all(&[code]);
}

/// A caller that sent stderr to a file wants what follows there.
fn is_file(stream: impl AsFd) -> bool {
    rustix::fs::fstat(stream).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile)
}

/// A descriptor whose lines go to the system log.
fn system_log() -> io::Result<OwnedFd> {
    let log = UnixDatagram::unbound()?;
    log.connect(LOG_SOCKET)?;
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    thread::Builder::new().name("log".to_owned()).spawn(move || forward(File::from(read), &log))?;
    Ok(write)
}

/// Runs until the last writer has gone, which is the end of the process.
fn forward(lines: File, log: &UnixDatagram) {
    let mut lines = BufReader::new(lines);
    let mut line = Vec::new();
    while lines.by_ref().take(LOG_LINE_BYTES_MAX).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        let entry = format!("<{LOG_PRIORITY}>lode[{}]: {}", std::process::id(), text.trim_end());
        // A log that is down must not stop the server.
        let _ = log.send(entry.as_bytes());
        line.clear();
    }
}
