//! `lode fsck POOL [--repair]`: is everything in a pool as it must be, and what can be done about it.
//!
//! Exit codes as other fsck have them: 0 nothing wrong, 1 mended, 4 something is left, 8 not checked.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use lodestone::fs::check::{self, Finding, Progress, Report};
use lodestone::media::{Pool, PoolOptions};
use serde::Serialize;

use crate::cli;
use crate::failure::{Failure, Output, Result, complain, reason};
use crate::progress::Waiting;
use crate::size::Size;
use crate::target::{HostPath, exact, show};

const MENDED: u8 = 1;
const LEFT: u8 = 4;
const NOT_CHECKED: u8 = 8;

const DAMAGED: &str = "damaged";

pub fn run(args: &cli::Fsck) -> Result<()> {
    let document = match look(args) {
        Ok(document) => document,
        Err(e) => {
            let message = about(&args.pool, &e);
            complain(&message);
            if args.json {
                let (pool, pool_hex) = HostPath::of(&args.pool);
                let refused = Refused { pool, pool_hex, result: "not-checked", error: message };
                if let Err(failure) = Output::print(|out| out.json(&refused)) {
                    failure.report();
                }
            }
            return Err(Failure::Ended(ExitCode::from(NOT_CHECKED)));
        }
    };
    // Who reads the code alone gets it whether or not anybody reads the rest.
    let code = match (document.code(), say(args, &document)) {
        (code, Ok(())) => code,
        (code, Err(failure)) => {
            failure.report();
            code.max(NOT_CHECKED)
        }
    };
    match code {
        0 => Ok(()),
        code => Err(Failure::Ended(ExitCode::from(code))),
    }
}

fn say(args: &cli::Fsck, document: &Document) -> Result<()> {
    Output::print(|out| if args.json { out.json(document) } else { document.print(out) })
}

fn look(args: &cli::Fsck) -> lodestone::Result<Document> {
    let waiting = Waiting::new(if args.repair { "repairing" } else { "checking" });
    let watch = |progress| waiting.at(|| how_far(progress));
    let (media, lost_label) = map(Path::new(&args.pool), args.repair)?;
    let media = Arc::new(media);
    let mut has_failed = false;
    if args.repair {
        let repaired = check::repair(media.clone(), false, Some(&watch));
        let some_left = |e: &lodestone::Error| matches!(e.errno(), libc::ENOSPC | libc::EIO);
        // A repair that was refused has changed nothing.
        if lost_label && repaired.as_ref().err().is_none_or(some_left) {
            media.write_label()?;
        }
        match repaired {
            Ok(mut done) => {
                if lost_label {
                    done.found.add_lost_label();
                }
                return Ok(Document::new(&args.pool, &done.found, Some(&done.after)));
            }
            // What is wrong is known all the same.
            Err(e) if some_left(&e) => {
                complain(format!("not all could be repaired: {}", about(&args.pool, &e)));
                has_failed = true;
            }
            Err(e) => return Err(e),
        }
    }
    let mut found = check::examine(media, false, Some(&watch))?;
    if lost_label && !args.repair {
        found.add_lost_label();
    }
    let document = Document::new(&args.pool, &found, None);
    // Whoever reads the code alone must not take it for mended.
    Ok(if has_failed { Document { result: DAMAGED, ..document } } else { document })
}

fn how_far(progress: Progress) -> String {
    match progress {
        Progress::Inodes { done, of, bytes } => {
            format!("inode {done} of {of}, {} of files read", Size(bytes))
        }
        Progress::Search { done, of } => {
            format!("searching for lost parts of logs, {} of {}", Size(done), Size(of))
        }
    }
}

/// Maps the pool; the bool says that its label is lost.
fn map(pool: &Path, writable: bool) -> lodestone::Result<(Pool, bool)> {
    let options = PoolOptions { read_only: !writable, ..PoolOptions::default() };
    match Pool::open(pool, &options) {
        // Of device-dax there are no private copies; nothing is stored there all the same.
        Err(e) if e.errno() == libc::EOPNOTSUPP && !writable => map(pool, true),
        Err(e) if matches!(e.errno(), libc::EUCLEAN | libc::EINVAL) => {
            match check::open_unlabelled(pool, &options) {
                Ok(Some(pool)) => Ok((pool, true)),
                Err(part) if part.errno() == libc::EUCLEAN => Err(part),
                // That it is no pool of one region is said as it was.
                _ => Err(e),
            }
        }
        opened => opened.map(|pool| (pool, false)),
    }
}

/// What failed, with the pool's name where it does not say it.
fn about(pool: &OsStr, e: &lodestone::Error) -> String {
    let (name, reason) = (show(Path::new(pool)).to_string(), reason(e));
    if reason.contains(&name) { reason } else { format!("{name}: {reason}") }
}

#[derive(Serialize)]
struct Refused {
    pool: HostPath,
    /// The exact name of the pool where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_hex: Option<String>,
    result: &'static str,
    error: String,
}

#[derive(Serialize)]
struct Document {
    pool: HostPath,
    /// The exact name of the pool where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_hex: Option<String>,
    /// `clean`, `repaired` or `damaged`.
    result: &'static str,
    /// The last user closed it.
    closed: bool,
    files: u64,
    directories: u64,
    blocks_used: u64,
    blocks_bad: u64,
    /// File bytes that match a checksum.
    bytes_verified: u64,
    findings: Vec<Line>,
    /// Findings that are not listed.
    more: u64,
    #[serde(skip)]
    repaired: bool,
}

#[derive(Serialize)]
struct Line {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    inode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// The exact path where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<u64>,
    /// File bytes that are lost or doubtful.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<u64>,
    message: String,
    repair: &'static str,
    repaired: bool,
}

impl Line {
    fn new(finding: &Finding, repaired: bool) -> Line {
        Line {
            kind: finding.what.name(),
            inode: finding.ino,
            path: finding.path.as_ref().map(|path| String::from_utf8_lossy(path).into_owned()),
            path_hex: finding.path.as_deref().and_then(exact),
            block: finding.block,
            from: finding.bytes.map(|b| b.0),
            to: finding.bytes.map(|b| b.1),
            message: finding.to_string(),
            repair: finding.what.remedy(),
            repaired,
        }
    }
}

impl Document {
    /// Of a check, or with what was left after a repair.
    fn new(pool: &OsStr, found: &Report, after: Option<&Report>) -> Document {
        let left = |finding: &Finding| {
            after.is_none_or(|after| {
                after.findings.iter().any(|f| f.what == finding.what && f.ino == finding.ino)
            })
        };
        let mut findings: Vec<Line> = found.findings.iter().map(|f| Line::new(f, !left(f))).collect();
        let fresh = after.iter().flat_map(|after| &after.findings).filter(|f| !found.findings.contains(f));
        findings.extend(fresh.map(|f| Line::new(f, false)));
        let state = after.unwrap_or(found);
        let result = match (found.is_clean(), state.is_clean()) {
            (true, true) => "clean",
            (false, true) => "repaired",
            _ => DAMAGED,
        };
        let (pool, pool_hex) = HostPath::of(pool);
        Document {
            pool,
            pool_hex,
            result,
            closed: found.clean,
            files: state.files,
            directories: state.directories,
            blocks_used: state.blocks_used,
            blocks_bad: state.blocks_bad,
            bytes_verified: state.bytes_verified,
            findings,
            more: found.more,
            repaired: after.is_some(),
        }
    }

    fn code(&self) -> u8 {
        match self.result {
            "clean" => 0,
            "repaired" => MENDED,
            _ => LEFT,
        }
    }

    fn print(&self, out: &mut Output) -> Result<()> {
        for line in &self.findings {
            let verb = match (self.repaired, line.repaired) {
                (true, true) => "repaired",
                (true, false) => "left",
                (false, _) => "a repair",
            };
            out.line(format_args!("{}; {verb}: {}", line.message, line.repair))?;
        }
        if self.more > 0 {
            out.line(format_args!("and {} more", self.more))?;
        }
        let closed = if self.closed { "" } else { ", was not closed" };
        out.line(format_args!(
            "{}: {}{closed}: {} files, {} directories, {} blocks in use, {} bad, {} bytes match their checksums",
            self.pool,
            self.result,
            self.files,
            self.directories,
            self.blocks_used,
            self.blocks_bad,
            self.bytes_verified
        ))?;
        if self.result == DAMAGED && !self.repaired {
            out.line("lode fsck --repair mends it; make a copy of the pool first")?;
        }
        Ok(())
    }
}
