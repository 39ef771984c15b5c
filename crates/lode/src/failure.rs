//! How a command ends: the exit codes and the one line on stderr.
//!
//! Every failure is one line, `lode: <what failed, on which file, what to do>`, whatever bytes the file
//! names hold: control characters are shown escaped, so that a line stays a line. A reader that has
//! closed the pipe is no failure.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command stops.
#[derive(Debug)]
pub enum Failure {
    /// The command line or the configuration is wrong: exit 2.
    Usage(String),
    /// The work failed: exit 1.
    Failed(String),
    /// The work failed and each failure has been reported: exit 1.
    Reported,
    /// Nobody reads standard output any more: exit 0.
    ReaderGone,
    /// The command ended with this code and has said why.
    Ended(ExitCode),
}

impl Failure {
    pub fn failed(message: impl fmt::Display) -> Failure {
        Failure::Failed(message.to_string())
    }

    pub fn usage(message: impl fmt::Display) -> Failure {
        Failure::Usage(message.to_string())
    }

    /// Writes the line, if one is due, and gives the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Failure::Usage(message) => {
                complain(&message);
                ExitCode::from(2)
            }
            Failure::Failed(message) => {
                complain(&message);
                ExitCode::from(1)
            }
            Failure::Reported => ExitCode::from(1),
            Failure::ReaderGone => ExitCode::SUCCESS,
            Failure::Ended(code) => code,
        }
    }
}

impl From<lodestone::Error> for Failure {
    fn from(e: lodestone::Error) -> Failure {
        Failure::Failed(reason(&e))
    }
}

/// One line on stderr. Nothing can be done where that fails too.
pub fn complain(message: impl fmt::Display) {
    let line: String = without_numbers(&message.to_string()).chars().flat_map(escape_control).collect();
    let _ = writeln!(io::stderr(), "lode: {line}");
}

/// Without the numbers that the standard library puts behind the words of an errno.
fn without_numbers(message: &str) -> String {
    let mut parts = message.split(" (os error ");
    let mut words = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => words.push_str(rest),
            _ => words.extend([" (os error ", part]),
        }
    }
    words
}

fn escape_control(c: char) -> impl Iterator<Item = char> {
    let (escaped, plain) = if c.is_control() { (Some(c.escape_default()), None) } else { (None, Some(c)) };
    escaped.into_iter().flatten().chain(plain)
}

/// Why, in words without the errno's number.
pub fn reason(e: &lodestone::Error) -> String {
    let text = e.to_string();
    let number = format!(" (os error {})", e.errno());
    text.strip_suffix(&number).map_or(text.clone(), str::to_string)
}

/// What to do about an errno, to stand behind the message; empty where the reason says it all.
pub fn remedy(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC => "; remove files, or copy to a larger pool or disk",
        libc::EACCES | libc::EPERM => "; run as the owner or as root",
        libc::EROFS => "; mount it writable",
        libc::ENAMETOOLONG => "; a name has at most 255 bytes and a path 4095",
        libc::EIO => "; the media failed: look into the kernel log and restore from a copy",
        _ => "",
    }
}

/// Standard output, buffered; its failures are told apart from the command's own.
pub struct Output {
    to: io::BufWriter<io::StdoutLock<'static>>,
}

impl Output {
    pub fn new() -> Output {
        Output { to: io::BufWriter::with_capacity(1 << 16, io::stdout().lock()) }
    }

    /// Prints for a command whose exit code says more than whether it printed: that nobody reads any more does not end it.
    pub fn print(with: impl FnOnce(&mut Output) -> Result<()>) -> Result<()> {
        let mut out = Output::new();
        match with(&mut out).and_then(|()| out.finish()) {
            Err(Failure::ReaderGone) => Ok(()),
            printed => printed,
        }
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.to.write_all(bytes).map_err(output_failed)
    }

    pub fn line(&mut self, line: impl fmt::Display) -> Result<()> {
        writeln!(self.to, "{line}").map_err(output_failed)
    }

    /// One JSON document: the only thing that `--json` prints.
    pub fn json(&mut self, document: &impl serde::Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(document).expect("our documents have string keys only");
        self.line(text)
    }

    /// Hands everything over; a command that printed is done only when this succeeded.
    pub fn finish(mut self) -> Result<()> {
        self.to.flush().map_err(output_failed)
    }
}

fn output_failed(e: io::Error) -> Failure {
    if e.kind() == io::ErrorKind::BrokenPipe {
        Failure::ReaderGone
    } else {
        Failure::failed(format_args!("cannot write to standard output: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_one_line() {
        let shown: String = "a\nb\x1b[2J\tä".chars().flat_map(escape_control).collect();
        assert_eq!(shown, "a\\nb\\u{1b}[2J\\tä");
    }

    #[test]
    fn a_message_has_words_only() {
        let full = std::io::Error::from_raw_os_error(libc::ENOSPC);
        let message = format!("cannot write x: {full}; make room, or {full}");
        assert!(message.contains("(os error 28)"));
        let words = "No space left on device";
        assert_eq!(without_numbers(&message), format!("cannot write x: {words}; make room, or {words}"));
        let other = "a (os error b) (os error 1";
        assert_eq!(without_numbers(other), other);
    }
}
