//! Heaps in files and devices: making one, opening one, and the place of one that is always mapped at the same address.

use std::path::Path;

use super::format::{BLOCK, CHUNK, Header, header};
use super::recover::{FormatOptions, refuse_block};
use super::{Heap, Shape};
use crate::error::{Error, Result};
use crate::media::{Addr, Domain, Media, Span, SpanOptions};
use crate::quote::Shown;

/// Addresses that are tried for a heap that wants a place and does not say which.
const PLACES: usize = 8;
/// Where such places are: far below what Linux maps by itself, above what programs are linked to.
const PLACE_MIN: u64 = 0x1000_0000_0000;
const PLACE_STEP: u64 = 1 << 32;
const PLACE_STEPS: u64 = 1 << 13;

/// EINVAL for more than any host has.
fn whole_blocks(size: u64) -> Result<u64> {
    size.checked_next_multiple_of(BLOCK).ok_or_else(|| {
        Error::message(libc::EINVAL, "heap::create", format!("a heap cannot have {size} bytes"))
    })
}

/// Where a heap is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// Wherever there is room, each time: what the program keeps are offsets.
    #[default]
    Anywhere,
    /// Always at one address, chosen when it is made: the program may keep addresses.
    Fixed,
    /// Always at this address, a multiple of 2 MiB.
    At(u64),
}

/// How to make a heap in a file or device.
#[derive(Clone, Debug, Default)]
pub struct CreateOptions {
    /// Of the file, which is made where there is none, in bytes; none: all of the file or device that is there.
    pub size: Option<u64>,
    /// At most 63 bytes.
    pub label: String,
    pub place: Place,
    /// None: by its size.
    pub shape: Option<Shape>,
    /// Also where something is.
    pub force: bool,
    pub open: OpenOptions,
}

/// How to open one.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// The persistence domain to work by instead of the one detected: see [`SpanOptions::assume`].
    pub assume: Option<Domain>,
    /// Take every page now instead of at first use.
    pub prefault: bool,
}

impl Heap<Span> {
    /// Makes a heap in a file or device, and opens it; durable on return, the file's name too. Where it cannot be made a
    /// file that was made for it is removed, and one that was there is as long as before. EEXIST where something is
    /// (something but zeros in the first 128 KiB), EBUSY where somebody uses it,
    /// EADDRINUSE where its place is taken, EINVAL for a size or a place that cannot be, and whatever the host answers.
    pub fn create(path: &Path, options: &CreateOptions) -> Result<Heap<Span>> {
        let named = |e: Error| e.context(path.shown());
        let places = match options.place {
            Place::Anywhere => Vec::new(),
            Place::At(0) => {
                let message = format!("{}: 0 is no place for a heap: give another address", path.shown());
                return Err(Error::message(libc::EINVAL, "heap::create", message));
            }
            Place::At(address) => vec![address],
            Place::Fixed => some_places()?,
        };
        let span = SpanOptions {
            assume: options.open.assume,
            prefault: options.open.prefault,
            size: options.size.map(whole_blocks).transpose().map_err(named)?,
            force: options.force,
            ..SpanOptions::default()
        };
        // Before anything of it changes.
        let judge = |begin: Result<Vec<u8>>| match options.force {
            true => Ok(places),
            false => refuse_block(&begin?).map(|()| places).map_err(named),
        };
        let span = Span::make_at(path, &span, judge)?;
        let base = match options.place {
            Place::Anywhere => 0,
            _ => span.mapped(Addr(0), 1).map_or(0, |at| at.addr() as u64),
        };
        let format = FormatOptions {
            label: options.label.clone(),
            base,
            shape: options.shape,
            force: options.force,
            identity: None,
        };
        let mut heap = Heap::format(span, &format).map_err(named)?;
        heap.media.keep();
        Ok(heap)
    }

    /// Opens the heap in a file or device: see [`Heap::open`] for what is refused; EBUSY where another process has it.
    pub fn open_path(path: &Path, options: &OpenOptions) -> Result<Heap<Span>> {
        let named = |e: Error| e.context(path.shown());
        let span =
            SpanOptions { assume: options.assume, prefault: options.prefault, ..SpanOptions::default() };
        // A first copy of the header that is damaged, or cannot be read, says nothing: the second one then does, below.
        let place_of = |begin: Result<Vec<u8>>| {
            let Ok(begin) = begin else { return Ok(Vec::new()) };
            let first: &[u8; header::BYTES] = begin[..header::BYTES].try_into().expect("a block is longer");
            let base = Header::decode(first, |intact| intact).map_or(0, |header| header.base);
            Ok(if base == 0 { Vec::new() } else { vec![base] })
        };
        let mut opened = Span::open_at(path, &span, place_of)?;
        let base = Heap::probe(&opened).map_err(named)?.base;
        let is_elsewhere = |base: u64| opened.mapped(Addr(0), 1).is_some_and(|at| at.addr() as u64 != base);
        if let Some(base) = base.filter(|&base| is_elsewhere(base)) {
            drop(opened);
            opened = Span::open_at(path, &span, |_| Ok(vec![base]))?;
        }
        Heap::open(opened).map_err(named)
    }
}

/// Places by chance, so that two heaps of one program rarely want the same.
fn some_places() -> Result<Vec<u64>> {
    let mut random = [0; PLACES * 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::new(e.raw_os_error(), "heap::create"))?;
    let place = |b: &[u8]| {
        let number = u64::from_le_bytes(b.try_into().expect("eight bytes"));
        PLACE_MIN + number % PLACE_STEPS * PLACE_STEP
    };
    Ok(random.chunks_exact(8).map(place).collect())
}

const _: () = assert!(PLACE_STEP.is_multiple_of(CHUNK));
