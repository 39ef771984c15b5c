//! The one error type: what kind (an errno), where in the code, on what, and why.
//!
//! POSIX callers need the errno, people need a sentence, engineers the exact site. An error without
//! detail costs no allocation, because ENOENT is an everyday answer.

use std::fmt;
use std::path::Path;

use crate::quote::Shown;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An errno with the place that raised it and, where there is more to say, a sentence and a cause.
pub struct Error {
    errno: i32,
    site: &'static str,
    detail: Option<Box<Detail>>,
}

#[derive(Default)]
struct Detail {
    /// What failed, on which file, and the remedy: shown to people.
    message: String,
    source: Option<std::io::Error>,
}

impl Error {
    /// `site` names the function that decided, as `room::function`.
    #[inline]
    pub const fn new(errno: i32, site: &'static str) -> Self {
        Error { errno, site, detail: None }
    }

    /// An error that people will read: the message names the file and the remedy.
    #[cold]
    pub fn message(errno: i32, site: &'static str, message: impl Into<String>) -> Self {
        Error { errno, site, detail: Some(Box::new(Detail { message: message.into(), source: None })) }
    }

    /// A failed system call on `path`.
    #[cold]
    pub fn io(source: std::io::Error, site: &'static str, what: &str, path: &Path) -> Self {
        let errno = source.raw_os_error().unwrap_or(libc::EIO);
        let message = format!("{what} {}: {source}", path.shown());
        Error { errno, site, detail: Some(Box::new(Detail { message, source: Some(source) })) }
    }

    /// Puts `context` in front of the message.
    #[cold]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        let old = self.to_string();
        let detail = self.detail.get_or_insert_default();
        detail.message = format!("{context}: {old}");
        self
    }

    #[inline]
    pub fn errno(&self) -> i32 {
        self.errno
    }

    pub fn site(&self) -> &'static str {
        self.site
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.detail {
            Some(d) => f.write_str(&d.message),
            None => write!(f, "{}", std::io::Error::from_raw_os_error(self.errno)),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} (errno {}, at {})", self.errno, self.site)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.detail.as_ref()?.source.as_ref().map(|e| e as _)
    }
}

impl From<crate::media::Fault> for Error {
    fn from(fault: crate::media::Fault) -> Self {
        Error::message(
            libc::EIO,
            "media::fault",
            format!("the media at pool offset {:#x} cannot be read or written", fault.at.0),
        )
    }
}
