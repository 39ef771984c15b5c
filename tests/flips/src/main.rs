//! Every byte of an image that `lode wsp suspend` left goes wrong in turn, and what verifies it before a resume has to refuse it.
//!
//! ```text
//! flips RAM RAM_BYTES SLOT [--all]
//! ```
//!
//! RAM is the file of a guest's memory, RAM_BYTES of it and the record; SLOT is its slot. Neither is changed: the record and the slot
//! are copied into memory, and [`image`], which `lode wsp resume` asks, looks at the copies. Each bit of the record and of the seal is
//! flipped, and one bit of each byte of the state, another from byte to byte. Of the zeros behind the state, which the seal covers,
//! too, every 61st goes wrong, with `--all` each.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use lodestone::media::{Addr, Domain, Media, Span, SpanOptions};
use lodestone::wsp::Ram;
use lodestone::wsp::cycle::image;
use lodestone::wsp::image::{RECORD_BYTES, RECORD_STRIDE_BYTES, RECORDS, SEAL_BYTES, TRAILER_BYTES};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Of the bytes behind the state one in so many, where not all are asked for.
const REST_STRIDE: u64 = 61;
/// Bytes that a thread takes at a time.
const PIECE: u64 = 256;
/// What a damaged image may be refused with: it is not what it was, of another generation or boot, or of a later version.
const REFUSALS: [i32; 4] = [libc::EILSEQ, libc::ESTALE, libc::EPROTO, libc::ENODATA];

fn main() -> ExitCode {
    match run() {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("flips: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (ram, bytes, slot, all) = match &words[..] {
        [ram, bytes, slot] => (ram, bytes, slot, false),
        [ram, bytes, slot, all] if all == "--all" => (ram, bytes, slot, true),
        _ => return Err("usage: flips RAM RAM_BYTES SLOT [--all]".into()),
    };
    let original = Image { ram: trailer_of(ram, bytes.parse()?)?, slot: std::fs::read(slot)? };
    let (record, seal) = original.copied()?.check(|ram, slot| Ok(image(ram, slot)?))?;
    let state_end = SEAL_BYTES as u64 + seal.stream_bytes;
    let flips = original.copied()?.check(|ram, slot| {
        let mut flips = 0;
        let line = original.ram.bytes + record.serial % RECORDS * RECORD_STRIDE_BYTES;
        for bit in 0..RECORD_BYTES as u64 * 8 {
            flips += refused(ram.media(), line + bit / 8, bit % 8, "the record", || image(ram, slot).err())?;
        }
        for bit in 0..SEAL_BYTES as u64 * 8 {
            flips += refused(slot, bit / 8, bit % 8, "the seal", || image(ram, slot).err())?;
        }
        Ok(flips)
    })?;
    let next = AtomicU64::new(SEAL_BYTES as u64);
    let piece = || -> Result<u64> {
        let mut flips = 0;
        let copy = original.copied()?;
        copy.check(|ram, slot| {
            loop {
                let from = next.fetch_add(PIECE, Ordering::Relaxed);
                if from >= slot.len() {
                    return Ok(flips);
                }
                for at in from..(from + PIECE).min(slot.len()) {
                    if at < state_end || all || at % REST_STRIDE == 0 || at == slot.len() - 1 {
                        flips += refused(slot, at, at % 8, "the slot", || image(ram, slot).err())?;
                    }
                }
            }
        })
    };
    let of_state: Result<Vec<u64>> = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(piece)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let of_state: u64 = of_state?.iter().sum();
    Ok(format!(
        "{} bits of record and seal, {of_state} bytes of {} in the slot: all refused",
        flips,
        original.slot.len() - SEAL_BYTES
    ))
}

/// Flips a bit, looks, and flips it back: 1.
fn refused(
    media: &Span,
    at: u64,
    bit: u64,
    what: &str,
    looked: impl Fn() -> Option<lodestone::Error>,
) -> Result<u64> {
    let flip = || -> lodestone::Result<()> {
        let mut byte = [0];
        media.read(Addr(at), &mut byte)?;
        media.copy_cached(Addr(at), &[byte[0] ^ 1 << bit])?.redundant("a copy, which nobody opens again");
        Ok(())
    };
    flip()?;
    let verdict = looked();
    flip()?;
    match verdict {
        Some(e) if REFUSALS.contains(&e.errno()) => Ok(1),
        Some(e) => {
            Err(format!("bit {bit} of byte {at} of {what} was flipped, and that failed with: {e}").into())
        }
        None => {
            Err(format!("bit {bit} of byte {at} of {what} was flipped, and the image would be resumed")
                .into())
        }
    }
}

/// What stands behind a guest's memory.
struct Trailer {
    bytes: u64,
    trailer: Vec<u8>,
}

fn trailer_of(path: &str, bytes: u64) -> Result<Trailer> {
    let mut trailer = vec![0; TRAILER_BYTES as usize];
    File::open(path)?.read_exact_at(&mut trailer, bytes)?;
    Ok(Trailer { bytes, trailer })
}

struct Image {
    ram: Trailer,
    slot: Vec<u8>,
}

/// Of an image, to spoil: memory itself is holes, for nobody looks at it.
struct Copied {
    bytes: u64,
    ram: Span,
    slot: Span,
}

impl Image {
    fn copied(&self) -> Result<Copied> {
        let options = SpanOptions { assume: Some(Domain::CpuCache), ..SpanOptions::default() };
        let ram = Span::memfd(self.ram.bytes + TRAILER_BYTES, &options)?;
        let slot = Span::memfd(self.slot.len() as u64, &options)?;
        for (span, at, bytes) in [(&ram, self.ram.bytes, &self.ram.trailer), (&slot, 0, &self.slot)] {
            let stored = span.copy_cached(Addr(at), bytes).map_err(lodestone::Error::from)?;
            stored.redundant("a copy, which nobody opens again");
        }
        Ok(Copied { bytes: self.ram.bytes, ram, slot })
    }
}

impl Copied {
    fn check<T>(&self, does: impl FnOnce(&Ram<Span>, &Span) -> Result<T>) -> Result<T> {
        does(&Ram::new(&self.ram, self.bytes)?, &self.slot)
    }
}
