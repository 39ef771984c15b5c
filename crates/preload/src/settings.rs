//! What the environment says. `lode run` sets it, and it stands on its own.
//!
//! | variable | means |
//! |---|---|
//! | `LODE_HEAP` | the media: a file or device |
//! | `LODE_HEAP_SIZE` | make it so long at least, and use no more; K, M, G and T are binary |
//! | `LODE_HEAP_FULL` | `dram` (what does not fit lies in DRAM) or `fail` (ENOMEM) |
//! | `LODE_HEAP_MIN` | allocations of fewer bytes stay in DRAM |
//! | `LODE_HEAP_STATS` | a file that a line of JSON is added to when a process ends; `-` is stderr |
//! | `LODE_HEAP_CHILDREN` | `own` (programs that are executed have their own part) or `none` |

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use lodestone::wsp::memory::Full;

pub struct Settings {
    pub path: PathBuf,
    pub size: Option<u64>,
    pub full: Full,
    /// 0: all is on media.
    pub least_bytes: usize,
    pub statistics: Option<OsString>,
}

const ALL: [&str; 6] = [
    "LODE_HEAP",
    "LODE_HEAP_SIZE",
    "LODE_HEAP_FULL",
    "LODE_HEAP_MIN",
    "LODE_HEAP_STATS",
    "LODE_HEAP_CHILDREN",
];

impl Settings {
    /// None without a media.
    pub fn from_environment() -> Result<Option<Settings>, String> {
        let Some(path) = get("LODE_HEAP") else { return Ok(None) };
        let settings = Settings {
            path: path.into(),
            size: bytes("LODE_HEAP_SIZE")?,
            full: match get("LODE_HEAP_FULL") {
                Some(word) if word == "fail" => Full::Fail,
                Some(word) if word != "dram" => return Err(refused("LODE_HEAP_FULL", &word, "dram or fail")),
                _ => Full::Dram,
            },
            least_bytes: bytes("LODE_HEAP_MIN")?.map_or(0, |bytes| bytes as usize),
            statistics: get("LODE_HEAP_STATS"),
        };
        match get("LODE_HEAP_CHILDREN") {
            Some(word) if word == "none" => {
                for name in ALL {
                    // SAFETY: in a constructor, before the program's own code and its threads.
                    unsafe { env::remove_var(name) };
                }
            }
            Some(word) if word != "own" => return Err(refused("LODE_HEAP_CHILDREN", &word, "own or none")),
            _ => {}
        }
        Ok(Some(settings))
    }
}

/// An empty variable is none.
fn get(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

fn bytes(name: &str) -> Result<Option<u64>, String> {
    let Some(text) = get(name) else { return Ok(None) };
    let read = text.to_str().and_then(parse_bytes);
    read.map(Some).ok_or_else(|| refused(name, &text, "a number of bytes, or one with K, M, G or T"))
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn refused(name: &str, value: &OsStr, wanted: &str) -> String {
    format!("{name}={}: write {wanted}", value.display())
}
