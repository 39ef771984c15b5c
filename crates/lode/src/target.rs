//! Arguments that name files: `POOL:/path` for a file in a pool, anything else for a file of the host.
//!
//! **The rule.** The first `:/` of an argument divides the pool from the absolute path in it; an argument
//! without `:/` is a path of the host, so `./a:b` is one. A backslash before the colon (`dir\:/file`)
//! takes its meaning away, for host paths and pools with such a name. What stands behind the dividing
//! colon is taken as it is. The rule looks at the text alone: what exists on disk never changes it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use lodestone::quote::{Quoted, Shown};

/// A file named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Host(PathBuf),
    Pool(PoolPath),
}

/// A file in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPath {
    /// The pool's file or device.
    pub pool: OsString,
    /// Absolute.
    pub path: Vec<u8>,
}

impl Target {
    pub fn parse(argument: &OsStr) -> Target {
        let bytes = argument.as_bytes();
        let mut before = Vec::with_capacity(bytes.len());
        let mut at = 0;
        while at < bytes.len() {
            if bytes[at..].starts_with(b"\\:/") {
                before.extend_from_slice(b":/");
                at += 3;
            } else if bytes[at..].starts_with(b":/") {
                let path = bytes[at + 1..].to_vec();
                return Target::Pool(PoolPath { pool: OsString::from_vec(before), path });
            } else {
                before.push(bytes[at]);
                at += 1;
            }
        }
        Target::Host(PathBuf::from(OsString::from_vec(before)))
    }
}

/// For commands that work on pools only.
pub fn parse_pool_path(argument: &OsStr) -> Result<PoolPath, String> {
    match Target::parse(argument) {
        Target::Pool(p) if p.pool.is_empty() => {
            Err(format!("{} names no pool: write POOL:/path", Quoted(argument.as_bytes())))
        }
        Target::Pool(p) => Ok(p),
        Target::Host(p) => {
            let shown = Quoted(p.as_os_str().as_bytes()).to_string();
            let shown = shown.trim_end_matches(':');
            Err(format!("{shown} names no file in a pool: write POOL:/path, as in {shown}:/"))
        }
    }
}

/// The regions of a pool in the making: paths with commas between; `\,` is a comma in a path.
pub fn regions(pool: &OsStr) -> Vec<PathBuf> {
    let mut regions = vec![Vec::new()];
    let mut bytes = pool.as_bytes().iter().peekable();
    while let Some(&byte) = bytes.next() {
        let last = regions.last_mut().expect("begins with one");
        match byte {
            b',' => regions.push(Vec::new()),
            b'\\' if bytes.next_if_eq(&&b',').is_some() => last.push(b','),
            other => last.push(other),
        }
    }
    regions.into_iter().map(|path| PathBuf::from(OsString::from_vec(path))).collect()
}

impl fmt::Display for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut whole = self.pool.as_bytes().to_vec();
        whole.push(b':');
        whole.extend_from_slice(&self.path);
        Quoted(&whole).fmt(f)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Host(p) => show(p).fmt(f),
            Target::Pool(p) => p.fmt(f),
        }
    }
}

/// A host path for messages.
pub fn show(path: &Path) -> Quoted<'_> {
    path.shown()
}

/// In hexadecimal digits what is no UTF-8; none of what is.
pub fn exact(bytes: &[u8]) -> Option<String> {
    let is_text = std::str::from_utf8(bytes).is_ok();
    (!is_text).then(|| bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// A host path in a document: as text, quoted where it is shown.
#[derive(Clone, Debug)]
pub struct HostPath(PathBuf);

impl HostPath {
    /// And exactly, in hexadecimal digits, where it is no UTF-8.
    pub fn of(path: impl Into<PathBuf>) -> (HostPath, Option<String>) {
        let path = path.into();
        let hex = exact(path.as_os_str().as_bytes());
        (HostPath(path), hex)
    }

    /// What a document says of a path, where there may be none.
    pub fn of_some(path: Option<impl Into<PathBuf>>) -> (Option<HostPath>, Option<String>) {
        path.map(HostPath::of).map_or((None, None), |(path, hex)| (Some(path), hex))
    }

    pub fn text(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

impl serde::Serialize for HostPath {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.text())
    }
}

impl fmt::Display for HostPath {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        show(&self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(argument: &str) -> Target {
        Target::parse(OsStr::new(argument))
    }

    fn in_pool(pool: &str, path: &str) -> Target {
        Target::Pool(PoolPath { pool: pool.into(), path: path.into() })
    }

    #[test]
    fn the_first_colon_slash_divides() {
        assert_eq!(parsed("a.pool:/x/y"), in_pool("a.pool", "/x/y"));
        assert_eq!(parsed("./a.pool:/"), in_pool("./a.pool", "/"));
        assert_eq!(parsed("a:/b:/c\\:/d"), in_pool("a", "/b:/c\\:/d"));
    }

    #[test]
    fn a_colon_alone_means_nothing() {
        assert_eq!(parsed("./a:b"), Target::Host("./a:b".into()));
        assert_eq!(parsed("a:"), Target::Host("a:".into()));
        assert_eq!(parsed(""), Target::Host("".into()));
    }

    #[test]
    fn a_backslash_takes_the_meaning_away() {
        assert_eq!(parsed("a\\:/b"), Target::Host("a:/b".into()));
        assert_eq!(parsed("a\\\\:/b"), Target::Host("a\\:/b".into()));
        assert_eq!(parsed("a\\:/b:/c"), in_pool("a:/b", "/c"));
        assert_eq!(parsed("a\\b"), Target::Host("a\\b".into()));
    }

    #[test]
    fn commas_part_regions() {
        let parted = |text: &str| regions(OsStr::new(text));
        assert_eq!(parted("a"), [Path::new("a")]);
        assert_eq!(parted("/dev/dax0.0,/dev/dax1.0"), [Path::new("/dev/dax0.0"), Path::new("/dev/dax1.0")]);
        assert_eq!(parted("a\\,b,c\\d"), [Path::new("a,b"), Path::new("c\\d")]);
        assert_eq!(parted("a,"), [Path::new("a"), Path::new("")]);
    }

    #[test]
    fn a_pool_path_needs_a_pool() {
        assert!(parse_pool_path(OsStr::new(":/x")).unwrap_err().contains("names no pool"));
        assert!(parse_pool_path(OsStr::new("a.pool:")).unwrap_err().contains("as in a.pool:/"));
    }
}
