//! `lode ls POOL:/path ...`: directories of a pool.
//!
//! One name per line, sorted by its bytes; times are UTC, so that output does not depend on where it runs.

use std::os::unix::ffi::OsStrExt;

use lodestone::fs::{Attr, Kind, Time};
use lodestone::quote::Quoted;
use lodestone::{Error, Result};
use serde::Serialize;

use crate::cli;
use crate::failure::{self, Failure, Output, complain, reason, remedy};
use crate::pool::{Access, Pools, Tree as PoolTree};
use crate::target::{PoolPath, exact};
use crate::tree::{Named, base_name, check_length, join};

pub fn run(args: &cli::Ls) -> failure::Result<()> {
    let mut pools = Pools::new();
    for path in &args.paths {
        pools.open(&path.pool, Access::Read)?;
    }
    let mut listings = Vec::new();
    let mut failures = 0;
    for path in &args.paths {
        let mut failed = |what: &str, path: &PoolPath, e: &Error| {
            complain(format_args!("cannot {what} {path}: {}{}", reason(e), remedy(e.errno())));
            failures += 1;
        };
        match check_length(&path.path) {
            Ok(()) => list(pools.tree(&path.pool), path, args, &mut listings, &mut failed),
            Err(e) => failed("list", path, &e),
        }
    }
    let printed = Output::print(|out| match args.json {
        true => out.json(&Document { listings: &listings }),
        false => print(&listings, args, out),
    });
    pools.close()?;
    printed?;
    if failures == 0 { Ok(()) } else { Err(Failure::Reported) }
}

#[derive(Serialize)]
struct Document<'a> {
    listings: &'a [Listing],
}

/// One argument, or one directory met below it.
#[derive(Serialize)]
struct Listing {
    #[serde(serialize_with = "as_text")]
    pool: Vec<u8>,
    /// The exact name of the pool where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_hex: Option<String>,
    #[serde(serialize_with = "as_text")]
    path: Vec<u8>,
    /// The exact path where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    #[serde(skip)]
    shown: String,
    directory: bool,
    entries: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    #[serde(serialize_with = "as_text")]
    name: Vec<u8>,
    /// The exact name where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    ino: u32,
    kind: &'static str,
    /// Nothing of an inode that cannot be read.
    #[serde(flatten)]
    facts: Option<Facts>,
    /// Why it, or what it says, cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// What stands in the inode.
#[derive(Serialize)]
struct Facts {
    mode: String,
    nlink: u32,
    uid: u32,
    gid: u32,
    size: u64,
    /// Bytes that the file holds on media.
    allocated: u64,
    /// Of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdev: Option<(u32, u32)>,
    mtime: String,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_optional_text")]
    target: Option<Vec<u8>>,
    /// The exact target where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
}

fn as_text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

fn as_optional_text<S: serde::Serializer>(bytes: &Option<Vec<u8>>, to: S) -> Result<S::Ok, S::Error> {
    as_text(bytes.as_deref().unwrap_or_default(), to)
}

/// Adds the listing of `path`, and with -R those below it. A directory that fails is told and left out.
fn list(
    tree: &PoolTree,
    path: &PoolPath,
    args: &cli::Ls,
    listings: &mut Vec<Listing>,
    failed: &mut dyn FnMut(&str, &PoolPath, &Error),
) {
    let mut waiting = vec![path.clone()];
    while let Some(path) = waiting.pop() {
        match one(tree, &path, args, failed) {
            Ok(listing) => {
                if args.recursive && listing.directory {
                    let below = listing.entries.iter().rev().filter(|e| e.is_directory_below());
                    waiting
                        .extend(below.map(|e| PoolPath { path: join(&path.path, &e.name), ..path.clone() }));
                }
                listings.push(listing);
            }
            Err(e) => failed("list", &path, &e),
        }
    }
}

/// The listing of `path`. Of an entry that fails the name is listed, and the failure told.
fn one(
    tree: &PoolTree,
    path: &PoolPath,
    args: &cli::Ls,
    failed: &mut dyn FnMut(&str, &PoolPath, &Error),
) -> Result<Listing> {
    // As ls(1): a symbolic link to a directory is followed, with -l it is shown.
    let attr = match tree.attr(&path.path, !args.long) {
        Err(e) if e.errno() == libc::ENOENT => tree.attr(&path.path, false)?,
        Ok(found) if found.kind() != Kind::Directory => tree.attr(&path.path, false)?,
        found => found?,
    };
    let directory = attr.kind() == Kind::Directory;
    let entries = if directory {
        let names = tree.entries(attr.ino)?.into_iter();
        let shown = names.filter(|entry| args.all || !entry.name.starts_with(b"."));
        let below = |name: &[u8]| PoolPath { path: join(&path.path, name), ..path.clone() };
        shown
            .map(|named| {
                let (entry, wrong) = Entry::new(tree, named);
                if let Some(e) = wrong {
                    failed("read", &below(&entry.name), &e);
                }
                entry
            })
            .collect()
    } else {
        let name = base_name(&path.path).to_vec();
        let (entry, wrong) = Entry::new(tree, Named { name, ino: attr.ino, kind: attr.kind() });
        if let Some(e) = wrong {
            failed("read", path, &e);
        }
        vec![entry]
    };
    Ok(Listing {
        pool_hex: exact(path.pool.as_bytes()),
        pool: path.pool.as_bytes().to_vec(),
        path_hex: exact(&path.path),
        path: path.path.clone(),
        shown: path.to_string(),
        directory,
        entries,
    })
}

impl Entry {
    /// With what of it cannot be read.
    fn new(tree: &PoolTree, Named { name, ino, kind }: Named) -> (Entry, Option<Error>) {
        let attr = tree.fs.getattr(ino);
        let target = match (&attr, kind) {
            (Ok(_), Kind::Symlink) => tree.fs.readlink(ino).map(Some),
            _ => Ok(None),
        };
        let (target, unread) = target.map_or_else(|e| (None, Some(e)), |target| (target, None));
        let (facts, wrong) = match attr {
            Ok(attr) => (Some(Facts::new(&attr, target)), unread),
            Err(e) => (None, Some(e)),
        };
        let error = wrong.as_ref().map(reason);
        (Entry { name_hex: exact(&name), name, ino: ino.0, kind: kind_name(kind), facts, error }, wrong)
    }

    fn is_directory_below(&self) -> bool {
        self.facts.is_some() && self.kind == "directory" && self.name != b"." && self.name != b".."
    }

    /// The line of -l, with its columns as wide as the listing needs them.
    fn long_line(&self, width: &Widths) -> String {
        let (l, u, g, s, t) = (width.nlink, width.uid, width.gid, width.size, width.mtime);
        let letter = kind_letter(self.kind);
        let Some(facts) = &self.facts else {
            let unknown = "?";
            return format!(
                "{letter}????????? {unknown:>l$} {unknown:>u$} {unknown:>g$} {unknown:>s$} {unknown:>t$} "
            );
        };
        let mode = u32::from_str_radix(&facts.mode, 8).expect("we wrote these digits");
        let (permissions, size) = (permissions(mode), facts.size_column());
        let Facts { nlink, uid, gid, mtime, .. } = facts;
        format!("{letter}{permissions} {nlink:>l$} {uid:>u$} {gid:>g$} {size:>s$} {mtime:>t$} ")
    }
}

impl Facts {
    fn new(a: &Attr, target: Option<Vec<u8>>) -> Facts {
        let is_device = matches!(a.kind(), Kind::CharDevice | Kind::BlockDevice);
        Facts {
            mode: format!("{:04o}", a.mode & 0o7777),
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            size: a.size,
            allocated: a.blocks * 512,
            rdev: is_device.then(|| (libc::major(a.rdev), libc::minor(a.rdev))),
            mtime: utc(a.mtime),
            target_hex: target.as_deref().and_then(exact),
            target,
        }
    }

    fn size_column(&self) -> String {
        self.rdev.map_or(self.size.to_string(), |(major, minor)| format!("{major},{minor}"))
    }
}

struct Widths {
    nlink: usize,
    uid: usize,
    gid: usize,
    size: usize,
    mtime: usize,
}

impl Widths {
    fn of(entries: &[Entry]) -> Widths {
        let facts = || entries.iter().filter_map(|entry| entry.facts.as_ref());
        let widest = |text: &dyn Fn(&Facts) -> String| facts().map(|f| text(f).len()).max().unwrap_or(1);
        Widths {
            nlink: widest(&|f| f.nlink.to_string()),
            uid: widest(&|f| f.uid.to_string()),
            gid: widest(&|f| f.gid.to_string()),
            size: widest(&Facts::size_column),
            mtime: widest(&|f| f.mtime.clone()),
        }
    }
}

fn print(listings: &[Listing], args: &cli::Ls, out: &mut Output) -> failure::Result<()> {
    let titled = args.recursive || args.paths.len() > 1;
    for (i, listing) in listings.iter().enumerate() {
        if titled && listing.directory {
            let gap = if i > 0 { "\n" } else { "" };
            out.line(format_args!("{gap}{}:", listing.shown))?;
        }
        let widths = Widths::of(&listing.entries);
        for entry in &listing.entries {
            let long = if args.long { entry.long_line(&widths) } else { String::new() };
            let target = match entry.facts.as_ref().and_then(|facts| facts.target.as_ref()) {
                Some(target) if args.long => format!(" -> {}", Quoted(target)),
                _ => String::new(),
            };
            out.line(format_args!("{long}{}{target}", Quoted(&entry.name)))?;
        }
    }
    Ok(())
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Fifo => "fifo",
        Kind::CharDevice => "char-device",
        Kind::Directory => "directory",
        Kind::BlockDevice => "block-device",
        Kind::File => "file",
        Kind::Symlink => "symlink",
        Kind::Socket => "socket",
    }
}

fn kind_letter(kind: &str) -> char {
    match kind {
        "fifo" => 'p',
        "file" => '-',
        "symlink" => 'l',
        other => other.chars().next().unwrap_or('?'),
    }
}

/// `rwxr-xr-x`, with s and t for the set-id and sticky bits.
fn permissions(mode: u32) -> String {
    let set = |bit: u32, letter: char| if mode & bit != 0 { letter } else { '-' };
    let execute = |bit: u32, special: u32, letter: char| match (mode & bit != 0, mode & special != 0) {
        (true, true) => letter,
        (false, true) => letter.to_ascii_uppercase(),
        (true, false) => 'x',
        (false, false) => '-',
    };
    [
        set(0o400, 'r'),
        set(0o200, 'w'),
        execute(0o100, 0o4000, 's'),
        set(0o040, 'r'),
        set(0o020, 'w'),
        execute(0o010, 0o2000, 's'),
        set(0o004, 'r'),
        set(0o002, 'w'),
        execute(0o001, 0o1000, 't'),
    ]
    .iter()
    .collect()
}

/// `2026-01-31T23:59:59Z`: seconds, UTC.
pub fn utc(time: Time) -> String {
    let (days, second) = (time.sec.div_euclid(86_400), time.sec.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// The date of a day counted from 1970-01-01: years of 400-year eras that begin in March, so that the leap
/// day is the last of its year.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468; // from 0000-03-01
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, date)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn permissions_are_shown_as_ls_does() {
        for (mode, shown) in [
            (0o755, "rwxr-xr-x"),
            (0o4711, "rws--x--x"),
            (0o2644, "rw-r-Sr--"),
            (0o1777, "rwxrwxrwt"),
            (0o1000, "--------T"),
        ] {
            assert_eq!(permissions(mode), shown);
        }
    }

    #[test]
    fn dates_agree_with_date() {
        let seconds =
            [0, -1, 951_782_400, 951_868_800, 1_709_208_000, 4_107_542_399, Time::SEC_MIN, Time::SEC_MAX];
        for sec in seconds {
            let at = format!("@{sec}");
            let date = Command::new("date").args(["-u", "-d", &at, "+%Y-%m-%dT%H:%M:%SZ"]).output().unwrap();
            assert_eq!(utc(Time::new(sec, 0)), String::from_utf8(date.stdout).unwrap().trim());
        }
    }
}
