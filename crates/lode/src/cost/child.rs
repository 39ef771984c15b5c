//! Runs the command that is measured: where its output goes, how it ended, what CPU time its own processes used.
//!
//! Output that is to be kept goes to a file in memory, not through a pipe: a pipe would need a reader whose work
//! counts, and a server that the command leaves behind would hold it open for ever. Its size is looked at now and then, and a
//! command that prints more than is kept is ended. A signal ends the command too; it stays in our process group, so that it
//! can ask for a password on the terminal.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::target::show;

/// What is kept of a command's output at most, in bytes.
const OUTPUT_BYTES_MAX: u64 = 64 << 20;
/// How often it is looked whether there is more.
const LOOK_AT_OUTPUT_EVERY: Duration = Duration::from_millis(100);
/// How long a command may take to end after it was asked to, before it is killed.
const END_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Where the command's standard output goes.
pub enum Stdout {
    /// Into memory; in [`Ended::output`] afterwards.
    Kept,
    /// To our standard error, because ours is one JSON document.
    Stderr,
    Inherited,
}

pub struct Child {
    pid: Pid,
    /// Readable once the process has ended.
    pidfd: OwnedFd,
    kept: Option<File>,
}

/// A command that has ended.
pub struct Ended {
    pub status: ExitStatus,
    /// User and system time in seconds of the process and of those below it that were waited for.
    pub cpu_s: f64,
    /// What it printed, where that was kept.
    pub output: Vec<u8>,
}

impl Child {
    /// Starts `words`, program and arguments.
    pub fn start(words: &[OsString], stdout: Stdout) -> Result<Child> {
        let program = Path::new(&words[0]);
        let kept = matches!(stdout, Stdout::Kept).then(memory_file).transpose()?;
        let to = match (&kept, stdout) {
            (Some(file), _) => file.try_clone().map(Stdio::from),
            (None, Stdout::Stderr) => std::io::stderr().as_fd().try_clone_to_owned().map(Stdio::from),
            (None, _) => Ok(Stdio::inherit()),
        };
        let to = to.map_err(|e| Failure::failed(format_args!("cannot hand over standard output: {e}")))?;
        let spawned = Command::new(&words[0]).args(&words[1..]).stdout(to).spawn();
        let child = spawned.map_err(|e| not_started(program, &e))?;
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| Failure::failed(format_args!("cannot watch {}: {e}", show(program))))?;
        Ok(Child { pid, pidfd, kept })
    }

    /// Waits for its end, which a signal to us brings about, and printing too much.
    pub fn wait(mut self) -> Result<Ended> {
        match &self.kept {
            Some(file) => self.wait_while_it_prints(file),
            None => interrupt::wait_readable(self.pidfd.as_fd()),
        }
        if interrupt::requested() {
            self.end();
        }
        let (status, cpu_s) = reap(self.pid)
            .map_err(|e| Failure::failed(format_args!("cannot learn how the command ended: {e}")))?;
        let mut output = Vec::new();
        if let Some(file) = &mut self.kept {
            file.rewind()
                .and_then(|()| file.take(OUTPUT_BYTES_MAX + 1).read_to_end(&mut output))
                .map_err(|e| Failure::failed(format_args!("cannot read what the command printed: {e}")))?;
            if output.len() as u64 > OUTPUT_BYTES_MAX {
                return Err(Failure::failed(format_args!(
                    "the command printed more than {} MiB, which is kept to look for fio's report in: give --bytes",
                    OUTPUT_BYTES_MAX >> 20
                )));
            }
        }
        Ok(Ended { status, cpu_s, output })
    }

    fn wait_while_it_prints(&self, kept: &File) {
        while !interrupt::wait_readable_within(self.pidfd.as_fd(), LOOK_AT_OUTPUT_EVERY) {
            if interrupt::requested() {
                return;
            }
            if kept.metadata().is_ok_and(|file| file.len() > OUTPUT_BYTES_MAX) {
                // Whoever of its processes stays behind prints no more, either.
                let _ = rustix::fs::fcntl_add_seals(kept, SealFlags::GROW);
                return self.end();
            }
        }
    }

    /// Asks the process to end, then makes it. One that is gone already is not asked.
    fn end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::TERM);
        let asked = Instant::now();
        while asked.elapsed() < END_WITHIN {
            if has_ended(self.pid) {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

fn memory_file() -> Result<File> {
    rustix::fs::memfd_create("lode-cost-stdout", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map(File::from)
        .map_err(|e| Failure::failed(format_args!("no memory for what the command prints: {e}")))
}

fn not_started(program: &Path, e: &std::io::Error) -> Failure {
    let name = show(program);
    let is_path = program.as_os_str().as_encoded_bytes().contains(&b'/');
    match e.kind() {
        ErrorKind::NotFound if !is_path => {
            Failure::failed(format_args!("there is no command {name} in any directory of PATH"))
        }
        ErrorKind::NotFound if program.exists() => Failure::failed(format_args!(
            "cannot run {name}: the interpreter that its first line names is not there"
        )),
        ErrorKind::NotFound => Failure::failed(format_args!("there is no command {name}")),
        ErrorKind::PermissionDenied => Failure::failed(format_args!(
            "cannot run {name}: it is not executable (chmod +x), or not for this user"
        )),
        _ => Failure::failed(format_args!("cannot run {name}: {e}")),
    }
}

/// Whether the process has ended; it stays to be reaped.
fn has_ended(pid: Pid) -> bool {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_)))
}

/// Waits for the process and takes its exit status and CPU seconds.
fn reap(pid: Pid) -> std::io::Result<(ExitStatus, f64)> {
    let mut status = 0;
    // SAFETY: an all-zero rusage is a valid one, and the kernel writes only to the two locals.
    let (reaped, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let reaped = loop {
            let reaped = libc::wait4(pid.as_raw_nonzero().get(), &mut status, 0, &mut usage);
            if reaped >= 0 || std::io::Error::last_os_error().kind() != ErrorKind::Interrupted {
                break reaped;
            }
        };
        (reaped, usage)
    };
    if reaped < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    Ok((ExitStatus::from_raw(status), seconds(usage.ru_utime) + seconds(usage.ru_stime)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    #[test]
    fn output_status_and_time_of_the_process_come_back() {
        let line =
            words(&["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo said; exit 3"]);
        let ended = Child::start(&line, Stdout::Kept).unwrap().wait().unwrap();
        assert_eq!((ended.status.code(), ended.output.as_slice()), (Some(3), b"said\n".as_slice()));
        assert!(ended.cpu_s > 0.0);
    }

    #[test]
    fn a_server_left_behind_holds_nobody_up() {
        let begun = Instant::now();
        let line = words(&["sh", "-c", "sleep 20 & echo left $!"]);
        let ended = Child::start(&line, Stdout::Kept).unwrap().wait().unwrap();
        let text = String::from_utf8(ended.output).unwrap();
        let pid = text.trim().strip_prefix("left ").unwrap().parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn who_prints_without_end_is_ended() {
        // The shell's own child is nobody whom we end.
        for line in ["exec yes", "yes; true"] {
            let outcome = Child::start(&words(&["sh", "-c", line]), Stdout::Kept).unwrap().wait();
            match outcome {
                Err(Failure::Failed(message)) => assert!(message.contains("more than 64 MiB"), "{message}"),
                _ => panic!("{line} has ended by itself"),
            }
        }
    }

    #[test]
    fn why_a_command_cannot_be_run_is_said() {
        let why = |program: &str| match Child::start(&words(&[program]), Stdout::Inherited) {
            Err(Failure::Failed(message)) => message,
            _ => panic!("{program} was run"),
        };
        assert!(why("no-such-command-anywhere").contains("PATH"));
        assert!(why("/no/such/command").contains("there is no command"));
        assert!(why("/etc/passwd").contains("not executable"));
    }
}
