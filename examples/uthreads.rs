//! How a program uses files of a pool from uthreads: counts the words of some texts, one uthread for each.
//!
//! `cargo run --release --example uthreads [ENGINE]` (emu by default). The pool lies in anonymous memory. Nothing here is
//! asynchronous to look at: a uthread opens, writes and reads as a thread would, and where it has to wait the worker runs
//! another one.

use std::sync::Arc;

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::runtime::{Options, Runtime};
use lodestone::{Error, Result};

const POOL_BYTES: u64 = 64 << 20;
const TEXTS: usize = 16;
const WORKERS: usize = 2;

fn main() -> Result<()> {
    let engine: EngineKind = match std::env::args().nth(1) {
        Some(name) => name.parse().map_err(|e| Error::message(libc::EINVAL, "uthreads", format!("{e}")))?,
        None => EngineKind::Emu,
    };
    let pool = Pool::memfd(POOL_BYTES, &PoolOptions::default())?;
    let pool = Fs::mkfs(pool, &MkfsOptions::default())?;
    let fs = Fs::open(pool, &OpenOptions { engine, ..OpenOptions::default() })?;
    let files = Arc::new(Files::new(fs.clone(), Cred::process(), 0o022));

    let runtime = Runtime::new(Options::default())?;
    let counts = (0..TEXTS).map(|n| {
        let files = files.clone();
        runtime.spawn(move || {
            let path = format!("/text.{n}");
            write(&files, &path, &text(n))?;
            count(&files, &path)
        })
    });
    let counts = counts.collect::<Result<Vec<_>>>()?;
    runtime.run(WORKERS)?;

    for (n, count) in counts.into_iter().enumerate() {
        // A uthread's panic is ours.
        let words = count.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        assert_eq!(words, words_of(n));
        println!("text {n:>2}: {words} words");
    }
    let moved = fs.mover().moved();
    println!("{} copies by {engine}, {} KiB", moved.copies, moved.bytes >> 10);
    fs.close()
}

fn words_of(n: usize) -> usize {
    20_000 + 1000 * n
}

fn text(n: usize) -> Vec<u8> {
    b"word ".repeat(words_of(n))
}

fn write(files: &Files<Pool>, path: &str, bytes: &[u8]) -> Result<()> {
    let fd = files.open(path.as_bytes(), libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL, 0o644)?;
    let written = files.write(fd, bytes);
    files.close(fd)?;
    match written? {
        n if n == bytes.len() => Ok(()),
        n => Err(Error::message(libc::ENOSPC, "uthreads", format!("{path}: {n} bytes were written"))),
    }
}

fn count(files: &Files<Pool>, path: &str) -> Result<usize> {
    let fd = files.open(path.as_bytes(), libc::O_RDONLY, 0)?;
    let size = files.fstat(fd)?.size as usize;
    let mut text = vec![0; size];
    let read = files.pread(fd, &mut text, 0);
    files.close(fd)?;
    let words = text[..read?].split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    Ok(words.count())
}
