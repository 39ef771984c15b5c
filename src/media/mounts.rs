//! What is mounted: `/proc/PID/mountinfo`, read without touching any mount.
//!
//! A dead FUSE mount answers every path operation with ENOTCONN and a hung one with silence, so that
//! questions about mounts are asked of the table and not of the directory.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The type under which pools are mounted.
pub const FILE_SYSTEM_TYPE: &str = "fuse.lode";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Major and minor of `st_dev`; the minor names the FUSE connection.
    pub device: (u32, u32),
    /// What of the file system shows at `dir`.
    pub root: PathBuf,
    pub dir: PathBuf,
    pub read_only: bool,
    pub file_system_type: String,
    pub source: OsString,
}

impl Entry {
    pub fn is_pool(&self) -> bool {
        self.file_system_type == FILE_SYSTEM_TYPE
    }
}

/// What is mounted on `dir` itself: the topmost mount, if there is one. `dir` is absolute, without
/// symbolic links.
pub fn at(dir: &Path) -> io::Result<Option<Entry>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(parse(&table).filter(|e| e.dir == dir).last())
}

/// Where pools are mounted.
pub fn pools() -> io::Result<Vec<Entry>> {
    pools_in("/proc/self/mountinfo")
}

/// Where pools are mounted as another process sees it.
pub fn pools_of(pid: u32) -> io::Result<Vec<Entry>> {
    pools_in(&format!("/proc/{pid}/mountinfo"))
}

fn pools_in(table: &str) -> io::Result<Vec<Entry>> {
    let table = fs::read(table)?;
    Ok(parse(&table).filter(Entry::is_pool).collect())
}

fn parse(table: &[u8]) -> impl Iterator<Item = Entry> {
    table.split(|b| *b == b'\n').filter_map(entry)
}

/// `ID PARENT MAJOR:MINOR ROOT DIR OPTIONS [TAGS...] - TYPE SOURCE OPTIONS`
fn entry(line: &[u8]) -> Option<Entry> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let (major, minor) = std::str::from_utf8(fields.get(2)?).ok()?.split_once(':')?;
    let dash = fields.iter().position(|f| *f == b"-")?;
    Some(Entry {
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: PathBuf::from(plain(fields.get(3)?)),
        dir: PathBuf::from(plain(fields.get(4)?)),
        read_only: fields.get(5)?.split(|b| *b == b',').any(|o| o == b"ro"),
        file_system_type: String::from_utf8_lossy(fields.get(dash + 1)?).into_owned(),
        source: plain(fields.get(dash + 2)?),
    })
}

/// Undoes the kernel's escapes: space, tab, newline, backslash and '#' stand as `\` and three octal digits.
fn plain(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        match (first, octal(tail)) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                rest = &tail[3..];
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

fn octal(digits: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(digits.get(..3)?).ok()?;
    u8::from_str_radix(digits, 8).ok()
}

/// The absolute path under which the table knows `dir`. The last component may be a dead mount, which
/// cannot be looked into.
pub fn resolve(dir: &Path) -> io::Result<PathBuf> {
    if let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let candidate = parent.canonicalize()?.join(name);
        if at(&candidate)?.is_some() {
            return Ok(candidate);
        }
    }
    dir.canonicalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_tags_and_escapes() {
        let line = b"36 35 0:98 / /mnt/a\\040b rw,noatime shared:1 - fuse.lode /pools/x\\134y rw,user_id=0";
        let e = entry(line).unwrap();
        assert_eq!(e.device, (0, 98));
        assert_eq!((e.root.as_path(), e.dir.as_path()), (Path::new("/"), Path::new("/mnt/a b")));
        assert!(e.is_pool() && !e.read_only);
        assert_eq!(e.source, "/pools/x\\y");
    }

    #[test]
    fn damaged_lines_are_no_entries() {
        for line in
            ["", "36 35", "36 35 98 / /mnt rw - fuse.lode src rw", "36 35 0:98 / /mnt rw fuse.lode src"]
        {
            assert_eq!(entry(line.as_bytes()), None, "{line}");
        }
        assert_eq!(plain(b"end\\04"), "end\\04");
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(at(Path::new("/")).unwrap().is_some());
        assert_eq!(at(Path::new("/no/such/place")).unwrap(), None);
    }
}
