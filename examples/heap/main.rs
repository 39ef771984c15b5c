//! How a program keeps its data in a persistent heap: keys and values that outlive it, whatever ends it.
//!
//! ```text
//! cargo run --release --example heap -- FILE put KEY VALUE
//! cargo run --release --example heap -- FILE get KEY
//! cargo run --release --example heap -- FILE remove KEY
//! cargo run --release --example heap -- FILE list
//! ```
//!
//! The file is made at the first use. The map itself is in `map.rs`; `tests/heap_kill.rs` kills a process that uses it.

mod map;

use std::path::Path;
use std::process::ExitCode;

use lodestone::media::Span;
use lodestone::wsp::heap::{CreateOptions, Heap, OpenOptions};
use lodestone::{Error, Result};
use map::Map;

const HEAP_BYTES: u64 = 64 << 20;

fn open(path: &Path) -> Result<Map<Span>> {
    if path.exists() {
        return Map::of(Heap::open_path(path, &OpenOptions::default())?);
    }
    let options =
        CreateOptions { size: Some(HEAP_BYTES), label: "example".into(), ..CreateOptions::default() };
    Map::of(Heap::create(path, &options)?)
}

fn run(words: &[String]) -> Result<()> {
    let usage =
        || Error::message(libc::EINVAL, "example", "usage: heap FILE put|get|remove|list [KEY] [VALUE]");
    let (file, words) = words.split_first().ok_or_else(usage)?;
    let mut map = open(Path::new(file))?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["put", key, value] => map.put(key.as_bytes(), value.as_bytes())?,
        ["get", key] => match map.get(key.as_bytes())? {
            Some(value) => println!("{}", String::from_utf8_lossy(&value)),
            None => return Err(Error::message(libc::ENOENT, "example", format!("there is no {key}"))),
        },
        ["remove", key] => drop(map.remove(key.as_bytes())?),
        ["list"] => map.for_each(|key, value| {
            println!("{} {}", String::from_utf8_lossy(&key), String::from_utf8_lossy(&value));
        })?,
        _ => return Err(usage()),
    }
    map.check()?;
    map.heap.close().map(drop)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
