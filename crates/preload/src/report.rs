//! What the library says: a line of JSON at the end, and complaints.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;

use lodestone::quote::Shown;
use lodestone::wsp::memory::Memory;

/// One line on stderr. Nothing can be done where that fails.
pub fn complain(message: &str) {
    let _ = writeln!(std::io::stderr(), "lode: heap: {message}");
}

/// The path of the program that runs.
pub fn program() -> String {
    std::env::current_exe().map_or_else(|_| "this program".to_owned(), |path| path.shown().to_string())
}

/// Ends the process before its program began.
pub fn refuse(message: &str) {
    complain(message);
    std::process::exit(1);
}

/// Adds what a memory came to. One write, so that the lines of several processes stay lines.
pub fn statistics(memory: &Memory, to: &OsStr) {
    let line = line_of(memory);
    let written = match to == "-" {
        true => std::io::stderr().write_all(line.as_bytes()),
        false => OpenOptions::new()
            .create(true)
            .append(true)
            .open(to)
            .and_then(|mut file| file.write_all(line.as_bytes())),
    };
    if let Err(e) = written {
        complain(&format!("cannot add statistics to {}: {e}", to.shown()));
    }
}

fn line_of(memory: &Memory) -> String {
    let found = memory.statistics();
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let mut line = String::new();
    let arenas: Vec<String> = found
        .arenas
        .iter()
        .filter(|arena| arena.extents > 0 || arena.active_bytes > 0)
        .map(|arena| {
            format!(
                r#"{{"arena":{},"active":{},"dirty":{},"extents":{},"on_media":{},"in_dram":{}}}"#,
                arena.index,
                arena.active_bytes,
                arena.dirty_bytes,
                arena.extents,
                arena.extent_bytes,
                arena.dram_bytes
            )
        })
        .collect();
    let _ = writeln!(
        line,
        r#"{{"pid":{},"program":{},"media":{},"media_bytes":{},"claimed":{},"resident":{},"frozen":{},"on_media":{},"inherited":{},"in_dram":{},"fallen_back":{},"refused":{},"arenas":[{}]}}"#,
        std::process::id(),
        quoted(name.trim_end()),
        quoted(memory.name()),
        found.media_bytes,
        found.claimed_bytes,
        found.resident_bytes,
        found.frozen_bytes,
        found.extent_bytes,
        found.inherited_bytes,
        found.dram_bytes,
        found.fallen_back,
        found.refused,
        arenas.join(",")
    );
    line
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
