//! The mover for other storage engines: copies between DRAM and slow memory that they name, without the file system.
//!
//! Three calls, as Fastmove's Table 3 has them inside a kernel: to media, from media, and of many parts at once
//! (efficient-pm §4 has one, which stores). Each of them waits here, or gives a ticket ([`ticket`](super::ticket)), which is a
//! future, too.
//!
//! ```
//! use lodestone::media::{Addr, Span, SpanOptions};
//! use lodestone::mover::EngineKind;
//! use lodestone::mover::copies::{Copies, CopyOptions};
//! use lodestone::mover::profile::Profile;
//!
//! # fn main() -> lodestone::Result<()> {
//! let media = Span::memfd(4 << 20, &SpanOptions::default())?;
//! let copies = Copies::new(media, EngineKind::Delegate, Profile::default());
//! let durable = CopyOptions { durable: true, crc: Some(0), ..CopyOptions::default() };
//!
//! // Waits here.
//! let copied = copies.to_media(Addr(4096), b"kept", &durable)?;
//! let mut back = [0; 4];
//! assert_eq!(copies.from_media(Addr(4096), &mut back, &durable)?.crc, copied.crc);
//! assert_eq!(&back, b"kept");
//!
//! // Goes on, and waits later. The ticket owns the buffer meanwhile.
//! let ticket = copies.submit_to_media(Addr(1 << 20), vec![7; 1 << 20], &durable);
//! let (buffer, copied) = ticket.wait();
//! assert_eq!((buffer.len(), copied?.bytes), (1 << 20, 1 << 20));
//!
//! // With borrowed buffers: all tickets have ended when the scope does.
//! let (mut a, mut b) = (vec![0; 64 << 10], vec![0; 64 << 10]);
//! copies.scope(|scope| {
//!     scope.from_media(Addr(1 << 20), &mut a, &CopyOptions::default())?;
//!     scope.from_media(Addr(2 << 20), &mut b, &CopyOptions::default())?.wait()
//! })?;
//! assert!(a.iter().all(|byte| *byte == 7) && b.iter().all(|byte| *byte == 0));
//! # Ok(())
//! # }
//! ```
//!
//! **Durability is chosen for each copy.** With [`durable`](CopyOptions::durable) it is there on return, as far as the
//! media's domain goes: in `cpu-cache` and `memory` after a fence, in `page-cache` after a sync of the file, which takes
//! as long as the device does; `volatile` keeps nothing. Without, it is after the next [`fence`](Copies::fence) *of the
//! same thread* (a fence knows the stores of its own thread only). Copies by ticket are fenced when they have ended;
//! those that are to be durable are when [`wait`](super::ticket::Ticket::wait) returned.
//!
//! A crash in between leaves any part of a copy on media: atomic is what the caller makes of it.

use std::sync::Arc;

use super::class::{Class, Via};
use super::engine_port::{RawTransfer, Transfer};
use super::manager::Qos;
use super::profile::Profile;
use super::ticket::Home;
use super::{EngineKind, Mover};
use crate::error::{Error, Result};
use crate::limits::COPY_PARTS_MAX;
use crate::media::{Addr, Domain, Fault, Flushed, Media, Span};
use crate::wait::Holding;

const SITE: &str = "mover::copies";

/// Media and who copies there. Dropping it waits for the tickets under way.
pub struct Copies<M: Media = Span> {
    pub(super) home: Arc<Home<M>>,
}

/// What one copy is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// It is durable on return: see the file's head. Of copies from media it changes nothing.
    pub durable: bool,
    /// Continue this CRC-32C (0 to begin) by the bytes that are copied, in the order of their parts. Of what goes to media
    /// it is computed on the way; of what is read, from what has arrived, by the CPU.
    pub crc: Option<u32>,
    /// Who copies; none: as `Copies` was made.
    pub engine: Option<EngineKind>,
    /// What is wanted of it; none: as `Copies` was made.
    pub class: Option<Class>,
}

impl CopyOptions {
    pub(super) fn via(&self) -> Via {
        Via { engine: self.engine, class: self.class }
    }
}

/// A copy that has ended well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub bytes: u64,
    /// Where one was asked for.
    pub crc: Option<u32>,
}

impl<M: Media> Copies<M> {
    /// `kind` copies where a call names no engine; `profile` says from which size on, and how many at a time.
    pub fn new(media: M, kind: EngineKind, profile: Profile) -> Copies<M> {
        Copies::classed(media, kind, profile, None, Qos::default())
    }

    /// As [`new`](Copies::new), with a class for calls that name none, and with how much class bandwidth has to give way.
    pub fn classed(
        media: M,
        kind: EngineKind,
        profile: Profile,
        class: Option<Class>,
        qos: Qos,
    ) -> Copies<M> {
        let mover = Mover::of_class(&media, kind, profile, class, qos);
        Copies { home: Arc::new(Home::new(media, mover)) }
    }

    pub fn media(&self) -> &M {
        self.home.media()
    }

    /// The engines, and what they did.
    pub fn mover(&self) -> &Mover<M> {
        self.home.mover()
    }

    /// Copies to media, and waits. Any alignment; no bytes are no error.
    ///
    /// EINVAL for a range outside of media, or one that overlaps its source; EROFS; EIO for bad media, or a sync that
    /// failed: then any part of the range may have changed.
    pub fn to_media(&self, at: Addr, from: &[u8], options: &CopyOptions) -> Result<Copied> {
        let (media, bytes) = (self.media(), self.check(&[Transfer::to_media(at, from).raw()])?);
        let stored =
            self.mover().store_holding(media, options.via(), at, from, options.crc, Holding::Nothing);
        let (crc, flushed) = stored.map_err(bad_media)?;
        match options.durable {
            true => self.home.make_durable(flushed)?,
            // By the caller's own.
            false => flushed.stood_for(),
        }
        Ok(Copied { bytes, crc })
    }

    /// Copies from media, and waits. EINVAL and EIO as [`to_media`](Copies::to_media); then any part of `to` may have
    /// changed.
    pub fn from_media(&self, at: Addr, to: &mut [u8], options: &CopyOptions) -> Result<Copied> {
        let bytes = self.check(&[Transfer::FromMedia { at, to }.raw()])?;
        let loaded = self.mover().load_holding(self.media(), options.via(), at, to, Holding::Nothing);
        loaded.map_err(bad_media)?;
        Ok(Copied { bytes, crc: options.crc.map(|crc| crate::media::crc32c(to, crc)) })
    }

    /// Copies many parts, all to media or all from it, and waits: engines get them in as few submissions as it takes.
    ///
    /// EINVAL also where parts go both ways, where targets overlap, or for more than [`COPY_PARTS_MAX`].
    pub fn vectored(&self, parts: &mut [Transfer<'_>], options: &CopyOptions) -> Result<Copied> {
        let raw: Vec<RawTransfer> = parts.iter_mut().map(Transfer::raw).collect();
        let bytes = self.check(&raw)?;
        let carried =
            self.mover().carry_all(self.media(), options.via(), parts, options.crc, Holding::Nothing);
        let crc = carried.map_err(bad_media)?;
        if options.durable && raw.first().is_some_and(RawTransfer::is_to_media) {
            self.home.make_durable(Flushed::issued())?;
        }
        Ok(Copied { bytes, crc })
    }

    /// Makes durable what this thread's copies stored, and what tickets copied that have ended. EIO where a sync failed:
    /// then nobody knows what of it is kept.
    pub fn fence(&self) -> Result<()> {
        self.home.make_durable(Flushed::issued())
    }

    /// Waits for all tickets under way, those of other threads too. How each ended its own `wait` says.
    pub fn wait_for_all(&self) {
        self.home.wait_for_all();
    }

    /// As [`wait_for_all`](Copies::wait_for_all), and then does what [`fence`](Copies::fence) does.
    pub fn drain(&self) -> Result<()> {
        self.wait_for_all();
        self.fence()
    }

    /// What is wrong with a request; its bytes, where nothing is.
    pub(super) fn check(&self, parts: &[RawTransfer]) -> Result<u64> {
        let media = self.media();
        if parts.len() > COPY_PARTS_MAX {
            return refused(format!("{} parts in one copy: at most {COPY_PARTS_MAX}", parts.len()));
        }
        let Some(first) = parts.first() else { return Ok(0) };
        let to_media = first.is_to_media();
        let mut bytes = 0;
        for part in parts {
            if part.is_to_media() != to_media {
                return refused("parts of one copy go to media and from it: make it two copies".into());
            }
            let end = part.at.0.checked_add(part.len as u64);
            if part.len > isize::MAX as usize || end.is_none_or(|end| end > media.len()) {
                let (len, at) = (part.len, part.at.0);
                return refused(format!("{len} bytes at {at} are outside of media of {} bytes", media.len()));
            }
            bytes += part.len as u64;
        }
        if to_media && media.is_read_only() {
            return Err(Error::message(libc::EROFS, SITE, "the media were opened for reading only"));
        }
        if overlaps(media, parts) {
            return refused("source and target of a copy overlap, or two targets do".into());
        }
        Ok(bytes)
    }
}

fn refused<T>(message: String) -> Result<T> {
    Err(Error::message(libc::EINVAL, SITE, message))
}

pub(super) fn bad_media(fault: Fault) -> Error {
    let message = format!(
        "the media at offset {:#x} cannot be read or written: it is bad there, or its file was cut",
        fault.at.0
    );
    Error::message(libc::EIO, SITE, message)
}

impl<M: Media> Home<M> {
    /// Fences what this thread stored, and has the host write back where that is needed.
    pub(super) fn make_durable(&self, flushed: Flushed) -> Result<()> {
        self.media().fence(flushed);
        self.sync()
    }

    pub(super) fn sync(&self) -> Result<()> {
        if self.media().domain() != Domain::PageCache {
            return Ok(());
        }
        self.media().sync().map_err(sync_failed)
    }
}

pub(super) fn sync_failed(e: std::io::Error) -> Error {
    let message = format!("the host could not write the media back ({e}): what of it is kept nobody knows");
    Error::message(libc::EIO, SITE, message)
}

/// From here up to there, in the address space.
type Range = (u64, u64);

/// Whether a target overlaps another or a source. Where media is mapped nowhere, only what can be told is.
fn overlaps<M: Media>(media: &M, parts: &[RawTransfer]) -> bool {
    let mut targets: Vec<Range> = Vec::new();
    let mut sources: Vec<Range> = Vec::new();
    let mut on_media: Vec<Range> = Vec::new();
    for part in parts.iter().filter(|part| part.len > 0) {
        let range = |from: u64| (from, from + part.len as u64);
        let dram = range(part.address() as u64);
        let mapped = media.mapped(part.at, part.len).map(|at| range(at.addr() as u64));
        match part.is_to_media() {
            true => {
                on_media.push(range(part.at.0));
                targets.extend(mapped);
                sources.push(dram);
            }
            false => {
                targets.push(dram);
                sources.extend(mapped);
            }
        }
    }
    if meet(&mut on_media) || meet(&mut targets) {
        return true;
    }
    sources.iter().any(|source| {
        let behind = targets.partition_point(|target| target.0 < source.1);
        behind > 0 && targets[behind - 1].1 > source.0
    })
}

/// Sorts ranges; whether two of them overlap.
fn meet(ranges: &mut [Range]) -> bool {
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
}
