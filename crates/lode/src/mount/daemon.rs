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
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use rustix::fs::FileType;
use rustix::pipe::PipeFlags;

use super::FAILED;
use super::stop::Signals;

const LOG_SOCKET: &str = "/dev/log";
/// Facility daemon, severity warning.
const LOG_PRIORITY: u32 = 3 << 3 | 4;
/// Longest line that goes to the system log, in bytes.
const LOG_LINE_BYTES_MAX: u64 = 8192;
/// How long a line waits for a log that stands still. Those behind it do not wait any more.
const LOG_WAIT: Duration = Duration::from_millis(500);
/// How long the end of the process waits for the log to have heard all.
const LOG_END: Duration = Duration::from_secs(1);

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
    /// None where stderr stays.
    log: Option<Log>,
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
    fn prepare() -> io::Result<(OwnedFd, Option<Log>)> {
        rustix::process::setsid()?;
        let null = OwnedFd::from(File::options().read(true).write(true).open("/dev/null")?);
        let log = if is_file(io::stderr()) { None } else { Some(Log::begin(&null)?) };
        Ok((null, log))
    }

    /// The attempt failed; its line is on stderr.
    pub fn failed(self, code: u8) {
        tell(self.pipe, code);
    }

    /// The mount is live: lets go of the caller and of all it lent. What is given is kept until the server has nothing more to say.
    pub fn live(mut self) -> Option<Log> {
        // None of it can fail: the descriptors that are replaced are open, or may be.
        let _ = rustix::process::chdir("/");
        let _ = rustix::stdio::dup2_stdin(&self.null);
        let _ = rustix::stdio::dup2_stdout(&self.null);
        if let Some(log) = &mut self.log {
            log.becomes_stderr();
        }
        tell(self.pipe, 0);
        self.log
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

/// What takes the place of stderr. When it is dropped, all that was said there has been heard.
pub struct Log {
    /// None once it has.
    stderr: Option<OwnedFd>,
    null: OwnedFd,
    /// Nobody sends: it ends with the thread.
    ended: Receiver<()>,
}

impl Log {
    fn begin(null: &OwnedFd) -> io::Result<Log> {
        let (running, ended) = mpsc::channel();
        let stderr = system_log(running).or_else(|_| null.try_clone())?;
        Ok(Log { stderr: Some(stderr), null: null.try_clone()?, ended })
    }

    fn becomes_stderr(&mut self) {
        let _ = self.stderr.take().map(rustix::stdio::dup2_stderr);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if self.stderr.take().is_none() {
            // The last that writes to the pipe gives way.
            let _ = rustix::stdio::dup2_stderr(&self.null);
        }
        let _ = self.ended.recv_timeout(LOG_END);
    }
}

/// A descriptor whose lines go to the system log. `running` goes with the thread that brings them there.
fn system_log(running: Sender<()>) -> io::Result<OwnedFd> {
    let log = UnixDatagram::unbound()?;
    log.connect(LOG_SOCKET)?;
    log.set_write_timeout(Some(LOG_WAIT))?;
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    thread::Builder::new().name("log".to_owned()).spawn(move || {
        forward(File::from(read), &log);
        drop(running);
    })?;
    Ok(write)
}

/// Runs until the last writer has gone. A log that is down or stands still must not stop the server, which would wait for
/// room in the pipe: one line waits, and what is not taken then is lost.
fn forward(lines: File, log: &UnixDatagram) {
    let mut lines = BufReader::new(lines);
    let (mut line, mut lost) = (Vec::new(), 0u64);
    let send = |text: &str| {
        let entry = format!("<{LOG_PRIORITY}>lode[{}]: {}", std::process::id(), text.trim_end());
        // By its name: one that began anew has another socket.
        let sent = log.send_to(entry.as_bytes(), LOG_SOCKET);
        let _ = log.set_nonblocking(sent.is_err());
        sent.is_ok()
    };
    while lines.by_ref().take(LOG_LINE_BYTES_MAX).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        if lost > 0 && send(&format!("lode: warning: {lost} lines were lost: the log did not take them")) {
            lost = 0;
        }
        lost += u64::from(!send(&String::from_utf8_lossy(&line)));
        line.clear();
    }
}
