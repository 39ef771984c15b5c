//! What the eight applications have in common: what one is, and how it reads and writes files of a pool.
//!
//! An application is a number of *items*, each by itself: read a file, work on what it holds, in some cases write a new
//! file. Items may run in any order and at the same time, so what comes out is compared as a sum over items.

use lodestone::fs::files::Files;
use lodestone::media::{Pool, crc32c};
use lodestone::{Error, Result};

use super::slow::Slow;

/// The files that an application works on.
pub type Shelf = Files<Slow<Pool>>;

pub const FILE_MODE: u32 = 0o644;
const DIR_MODE: u32 = 0o755;

pub trait App: Send + Sync {
    /// Writes what `items` items need. Once, before the first of them.
    fn prepare(&self, shelf: &Shelf, items: usize) -> Result<()>;

    /// Does item `n`. What came out, in short.
    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64>;

    /// After so many items, untimed: reads back what they left in files, and makes room for them to run again. What it
    /// found, in short.
    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64>;
}

/// What a uthread has to itself: buffers that serve item after item.
#[derive(Default)]
pub struct Desk {
    pub input: Vec<u8>,
    pub output: Vec<u8>,
    /// Bytes read and written so far.
    pub moved: u64,
}

impl Desk {
    /// Reads a whole file into `input`.
    pub fn read(&mut self, shelf: &Shelf, path: &str) -> Result<()> {
        let fd = shelf.open(path.as_bytes(), libc::O_RDONLY, 0)?;
        let read = self.read_open(shelf, fd);
        shelf.close(fd)?;
        read.map_err(|e| e.context(path))
    }

    fn read_open(&mut self, shelf: &Shelf, fd: i32) -> Result<()> {
        let size = shelf.fstat(fd)?.size as usize;
        self.input.resize(size, 0);
        let mut done = 0;
        while done < size {
            let n = shelf.pread(fd, &mut self.input[done..], done as i64)?;
            if n == 0 {
                return Err(Error::message(libc::EIO, "bench::apps", "the file became shorter"));
            }
            done += n;
        }
        self.moved += size as u64;
        Ok(())
    }

    /// Writes `output` into a new file.
    pub fn write_new(&mut self, shelf: &Shelf, path: &str) -> Result<()> {
        write_new(shelf, path, &self.output)?;
        self.moved += self.output.len() as u64;
        Ok(())
    }

    /// Writes the first bytes of `output` at the end of a file.
    pub fn append(&mut self, shelf: &Shelf, path: &str, bytes: usize) -> Result<()> {
        let fd = shelf.open(path.as_bytes(), libc::O_WRONLY | libc::O_APPEND, 0)?;
        let written = write_open(shelf, fd, &self.output[..bytes]);
        shelf.close(fd)?;
        self.moved += bytes as u64;
        written.map_err(|e| e.context(path))
    }
}

pub fn make_dir(shelf: &Shelf, path: &str) -> Result<()> {
    shelf.mkdir(path.as_bytes(), DIR_MODE)
}

/// Makes a file that is not there yet.
pub fn write_new(shelf: &Shelf, path: &str, bytes: &[u8]) -> Result<()> {
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    let fd = shelf.open(path.as_bytes(), flags, FILE_MODE)?;
    let written = write_open(shelf, fd, bytes);
    shelf.close(fd)?;
    written.map_err(|e| e.context(path))
}

fn write_open(shelf: &Shelf, fd: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        let n = shelf.write(fd, bytes)?;
        bytes = &bytes[n..];
    }
    Ok(())
}

/// The numbered input files of an application.
pub fn write_inputs(shelf: &Shelf, dir: &str, inputs: &[Vec<u8>]) -> Result<()> {
    make_dir(shelf, dir)?;
    inputs.iter().enumerate().try_for_each(|(n, bytes)| write_new(shelf, &input(dir, n), bytes))
}

pub fn input(dir: &str, n: usize) -> String {
    format!("{dir}/in.{n}")
}

pub fn output(dir: &str, n: usize) -> String {
    format!("{dir}/out.{n}")
}

/// What the output files of all items hold, which are removed.
pub fn take_outputs(shelf: &Shelf, desk: &mut Desk, dir: &str, items: usize) -> Result<u64> {
    let mut sum = 0u64;
    for n in 0..items {
        let path = output(dir, n);
        desk.read(shelf, &path)?;
        sum = sum.wrapping_add(weigh(n, digest(&desk.input)));
        shelf.unlink(path.as_bytes())?;
    }
    Ok(sum)
}

/// Bytes in short: their number and their checksum.
pub fn digest(bytes: &[u8]) -> u64 {
    (bytes.len() as u64) << 32 | u64::from(crc32c(bytes, 0))
}

/// The result of item `n` as a summand: two items that change places change the sum.
pub fn weigh(n: usize, result: u64) -> u64 {
    (result ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(2 * n as u64 + 1)
}

/// Looks at a word of each 4 KiB: whether data came, at little cost.
pub fn glance(bytes: &[u8]) -> u64 {
    let word = |page: &[u8]| page.first_chunk().map_or(page.len() as u64, |word| u64::from_le_bytes(*word));
    bytes.chunks(4096).map(word).fold(0, |sum, word| sum.rotate_left(1) ^ word)
}

/// What an application reads is not what it wrote.
pub fn malformed(what: impl std::fmt::Display) -> Error {
    Error::message(libc::EIO, "bench::apps", format!("the input is damaged: {what}"))
}
