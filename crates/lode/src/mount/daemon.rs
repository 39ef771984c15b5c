//! Becoming a daemon: the caller gets its prompt back when the mount is live, and not before.
//!
//! The process forks while it is still one thread. The child does all the work and keeps the caller's
//! stderr until the mount is live, so that its one line of error is seen; the parent waits for the
//! child's verdict on a pipe and exits with it. Afterwards nobody reads a terminal: what the server still
//! has to say goes to the system log.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::thread;

use rustix::fs::FileType;
use rustix::pipe::PipeFlags;

const LOG_SOCKET: &str = "/dev/log";
/// Facility daemon, severity warning.
const LOG_PRIORITY: u32 = 3 << 3 | 4;
/// Longest line that goes to the system log, in bytes.
const LOG_LINE_BYTES_MAX: u64 = 8192;

pub enum Side {
    /// The caller's process, and the exit code of the attempt.
    Parent(u8),
    Child(Ready),
}

/// The child's end of the pipe.
pub struct Ready {
    pipe: OwnedFd,
}

/// Forks. Must be called before the process has a second thread.
pub fn split() -> io::Result<Side> {
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the caller promises that this is the only thread, so that no lock is left held in the child
    // and it may go on as any process.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            rustix::process::setsid()?;
            Ok(Side::Child(Ready { pipe: theirs }))
        }
        _ => {
            drop(theirs);
            let mut verdict = [0];
            match File::from(ours).read(&mut verdict)? {
                0 => Err(io::Error::other("the server ended before the mount was live")),
                _ => Ok(Side::Parent(verdict[0])),
            }
        }
    }
}

impl Ready {
    /// The attempt failed; its line is on stderr.
    pub fn failed(self, code: u8) {
        self.tell(code);
    }

    /// The mount is live: lets go of the caller and of all it lent.
    pub fn live(self) -> io::Result<()> {
        rustix::process::chdir("/")?;
        let null = File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        if !is_file(io::stderr()) {
            rustix::stdio::dup2_stderr(system_log().unwrap_or_else(|_| null.into()))?;
        }
        self.tell(0);
        Ok(())
    }

    fn tell(self, code: u8) {
        // A caller that has gone needs no verdict.
        let _ = File::from(self.pipe).write_all(&[code]);
    }
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
