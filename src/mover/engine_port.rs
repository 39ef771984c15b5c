//! What all engines have in common: how copies are handed over, and how they are waited for.
//!
//! `submit` is the only unsafe step. Safe code calls [`carry`], which lends the bytes for as long as it runs. Waiting is
//! [`await_end`], on the ladder of the room `wait`, whatever the engine.

use std::time::Instant;

use super::completion::{Completion, Status};
use super::manager::Channels;
use super::profile::SMALLEST_BYTES;
use crate::account::waiting;
use crate::media::{Addr, Fault, Flushed, Media};
use crate::wait::{Bell, Ending, Holding, Seen, until};

/// When what a copy stored to media is durable: told by the completion, for one engine may answer differently from
/// copy to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When it reports completion, as far as the domain goes.
    OnCompletion,
    /// After a fence of the thread that submitted: its own stores, past the caches.
    Fence,
    /// After a write-back and a fence by the CPU: it stores into the caches (DDIO; Fastmove §5.2).
    WriteBack,
}

/// Which way an engine is told to store to media (Fastmove §5.2). Threads always store past the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    PastCaches,
    /// DDIO: the CPU writes back what was copied.
    IntoCaches,
}

/// The routes that an engine can be told to take: one at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routes {
    pub past_caches: bool,
    pub into_caches: bool,
}

impl Routes {
    pub const PAST_CACHES: Routes = Routes { past_caches: true, into_caches: false };
    pub const INTO_CACHES: Routes = Routes { past_caches: false, into_caches: true };
    pub const BOTH: Routes = Routes { past_caches: true, into_caches: true };
}

/// What an engine can.
#[derive(Clone, Copy, Debug)]
pub struct Capability {
    /// Smaller copies are the CPU's, in bytes (EasyIO §4.4: selective offload).
    pub smallest_bytes: usize,
    /// Larger copies are handed over in several batches, in bytes.
    pub largest_bytes: usize,
    /// A copy to media begins and ends at multiples of this; what stands out at the edges is the CPU's. Larger than 1:
    /// past the caches the source's address has to have the same place in a line.
    pub alignment: usize,
    pub routes: Routes,
    /// The CPU copies a share of large reads meanwhile (Fastmove §5.3).
    pub shares_reads: bool,
    /// Queues per region.
    pub channels: usize,
}

impl Capability {
    /// Of engines by which threads copy.
    pub(super) fn of_threads() -> Capability {
        Capability {
            smallest_bytes: SMALLEST_BYTES,
            largest_bytes: usize::MAX,
            alignment: 1,
            routes: Routes::PAST_CACHES,
            shares_reads: false,
            channels: 1,
        }
    }
}

/// A copy between media and DRAM.
pub enum Transfer<'a> {
    ToMedia { at: Addr, from: &'a [u8], route: Route },
    FromMedia { at: Addr, to: &'a mut [u8] },
}

impl<'a> Transfer<'a> {
    /// To media, by the route that whoever schedules it finds best.
    pub fn to_media(at: Addr, from: &'a [u8]) -> Transfer<'a> {
        Transfer::ToMedia { at, from, route: Route::PastCaches }
    }

    pub fn from_media(at: Addr, to: &'a mut [u8]) -> Transfer<'a> {
        Transfer::FromMedia { at, to }
    }
}

impl Transfer<'_> {
    pub fn len(&self) -> usize {
        match self {
            Transfer::ToMedia { from, .. } => from.len(),
            Transfer::FromMedia { to, .. } => to.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn raw(&mut self) -> RawTransfer {
        match self {
            Transfer::ToMedia { at, from, route } => {
                RawTransfer { at: *at, dram: Dram::From(from.as_ptr(), *route), len: from.len() }
            }
            Transfer::FromMedia { at, to } => {
                RawTransfer { at: *at, dram: Dram::To(to.as_mut_ptr()), len: to.len() }
            }
        }
    }
}

/// The DRAM end of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Dram {
    From(*const u8, Route),
    To(*mut u8),
}

/// Where bytes begin, to compare with.
pub(super) fn dram_address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().addr() as u64
}

/// A transfer whose bytes somebody vouches for: see [`Engine::submit`].
#[derive(Clone, Copy, Debug)]
pub struct RawTransfer {
    pub at: Addr,
    pub dram: Dram,
    pub len: usize,
}

// SAFETY: the addresses are followed only between `submit` and the end of its ticket, for which time its caller
// vouches that the bytes are there and nobody's else.
unsafe impl Send for RawTransfer {}

impl RawTransfer {
    /// So many bytes of it, from one of them on. Panics for more than there are.
    pub(super) fn part(&self, from: usize, len: usize) -> RawTransfer {
        assert!(from <= self.len && len <= self.len - from, "{len} bytes from {from} on, of {}", self.len);
        // Never followed beyond what is vouched for: a part lies inside.
        let dram = match self.dram {
            Dram::From(at, route) => Dram::From(at.wrapping_add(from), route),
            Dram::To(at) => Dram::To(at.wrapping_add(from)),
        };
        RawTransfer { at: self.at.add(from as u64), dram, len }
    }

    /// The address of its DRAM end, to compare with.
    pub(super) fn address(&self) -> usize {
        match self.dram {
            Dram::From(at, _) => at.addr(),
            Dram::To(at) => at.addr(),
        }
    }

    /// Its DRAM end.
    ///
    /// # Safety
    ///
    /// The bytes are there, and nobody changes them for as long as they are used.
    pub(super) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        let from = match self.dram {
            Dram::From(at, _) => at,
            Dram::To(at) => at.cast_const(),
        };
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(from, self.len) }
    }

    /// The same, by another route.
    pub(super) fn by(self, route: Route) -> RawTransfer {
        let dram = match self.dram {
            Dram::From(at, _) => Dram::From(at, route),
            to => to,
        };
        RawTransfer { dram, ..self }
    }

    pub(crate) fn is_to_media(&self) -> bool {
        matches!(self.dram, Dram::From(..))
    }

    /// Copies it on this thread; the checksum continued, where one is asked for.
    ///
    /// # Safety
    ///
    /// As for [`Engine::submit`], during this call.
    pub(super) unsafe fn copy<M: Media>(
        &self,
        media: &M,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, Flushed), Fault> {
        match self.dram {
            Dram::From(from, _) => {
                // SAFETY: the caller vouches for the bytes.
                let from = unsafe { std::slice::from_raw_parts(from, self.len) };
                store(media, self.at, from, crc)
            }
            Dram::To(to) => {
                // SAFETY: the caller vouches for the bytes, and that nobody else uses them.
                let to = unsafe { std::slice::from_raw_parts_mut(to, self.len) };
                media.read(self.at, to).map(|()| (None, Flushed::issued()))
            }
        }
    }
}

/// A batch on this thread, which has what went to media still to fence: its completion says so.
///
/// # Safety
///
/// As for [`Engine::submit`], during this call.
pub(super) unsafe fn copy_batch<M: Media>(
    media: &M,
    batch: &[RawTransfer],
    mut crc: Option<u32>,
) -> (Completion, Flushed) {
    let begun = Instant::now();
    let mut status = Status::Done;
    let mut flushed = Flushed::issued();
    let mut bytes = 0;
    for transfer in batch {
        // SAFETY: the caller vouches for all of the batch.
        match unsafe { transfer.copy(media, crc) } {
            Ok((next, stored)) => {
                crc = next;
                flushed = flushed.and(stored);
            }
            Err(_) => {
                status = if bytes == 0 { Status::Failed } else { Status::Partial };
                break;
            }
        }
        bytes += transfer.len as u64;
    }
    let nanoseconds = begun.elapsed().as_nanos() as u64;
    (Completion { status, bytes, crc: crc.unwrap_or(0), durability: Durability::Fence, nanoseconds }, flushed)
}

/// Stores on this thread.
pub(super) fn store<M: Media>(
    media: &M,
    at: Addr,
    from: &[u8],
    crc: Option<u32>,
) -> Result<(Option<u32>, Flushed), Fault> {
    match crc {
        Some(crc) => media.copy_nt_crc(at, from, crc).map(|(crc, flushed)| (Some(crc), flushed)),
        None => media.copy_nt(at, from).map(|flushed| (None, flushed)),
    }
}

/// Why an engine takes nothing: then the CPU copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// All places of its queue are taken.
    Full,
    /// It cannot work here any more.
    Gone,
}

/// A batch under way. It ends once: by [`Engine::wait`] of the engine that gave it.
#[derive(Debug)]
#[must_use = "its bytes are lent until it is waited for"]
pub struct Ticket(pub(super) Place);

#[derive(Debug)]
pub(super) enum Place {
    /// In an engine's table.
    Slot { region: usize, slot: usize },
    /// It was through when `submit` returned.
    Ended(Completion),
}

impl Ticket {
    /// For engines that are through when `submit` returns.
    pub fn ended(completion: Completion) -> Ticket {
        Ticket(Place::Ended(completion))
    }

    /// For engines that keep batches by number.
    pub fn in_slot(region: usize, slot: usize) -> Ticket {
        Ticket(Place::Slot { region, slot })
    }

    /// The number, unless it had ended when `submit` returned.
    pub fn slot(&self) -> Option<usize> {
        match self.0 {
            Place::Slot { slot, .. } => Some(slot),
            Place::Ended(_) => None,
        }
    }

    /// How it ended, where that was known when `submit` returned.
    pub fn completion(&self) -> Option<Completion> {
        match self.0 {
            Place::Ended(completion) => Some(completion),
            Place::Slot { .. } => None,
        }
    }
}

/// Who copies.
pub trait Engine<M: Media>: Send + Sync {
    fn capability(&self) -> Capability;

    /// Hands over transfers of one region, all to media or all from it, as one batch. With `crc` the checksum of
    /// what goes to media is continued from there.
    ///
    /// # Safety
    ///
    /// Until `wait` returned for the ticket: the DRAM bytes of each transfer are there; nobody changes them, and
    /// nobody uses those that are copied to; and media lives. The ranges of media lie in it. The ticket is waited
    /// for with this engine.
    unsafe fn submit(
        &self,
        media: &M,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused>;

    /// As [`submit`](Engine::submit), by a caller that has nothing left to do but to wait, and keeps its thread: an engine
    /// of threads may copy on this one, and have ended.
    ///
    /// # Safety
    ///
    /// As `submit`.
    unsafe fn submit_and_help(
        &self,
        media: &M,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        // SAFETY: the caller's.
        unsafe { self.submit(media, region, channel, batch, crc) }
    }

    /// Its submitter goes on to something else: it is to begin now, and not when somebody waits for it.
    fn start(&self, _ticket: &Ticket) {}

    /// Somebody waits for it now: what of it nobody has begun, the engine may do on this thread.
    fn help(&self, _ticket: &Ticket) {}

    /// Whether it has ended.
    fn poll(&self, ticket: &Ticket) -> bool;

    /// What rings when it has ended; none where nobody is told.
    fn bell(&self, _ticket: &Ticket) -> Option<&Bell> {
        None
    }

    /// How it ended. Where it has not, waits as whoever holds locks does, on the ladder: see [`await_end`].
    fn wait(&self, ticket: Ticket) -> Completion;

    /// No batch begins in front of this region until it is resumed; those under way end.
    fn suspend(&self, region: usize);

    fn resume(&self, region: usize);

    /// The channels in front of a region, as [`submit`](Engine::submit) numbers them. Regions that share channels have the
    /// same group, one of the regions' numbers.
    fn channels(&self, _region: usize) -> Channels {
        Channels { group: 0, count: self.capability().channels.max(1), can_rest: false, bounds_itself: false }
    }

    /// From now on this channel begins nothing, and stops where it can in the middle; what is handed over waits there.
    /// Returns once the device was told. Of engines whose channels can rest.
    fn rest(&self, _region: usize, _channel: usize) {}

    /// It goes on.
    fn go_on(&self, _region: usize, _channel: usize) {}
}

/// A ticket, as the ladder has it.
pub(super) struct Awaited<'a, M: Media>(pub &'a dyn Engine<M>, pub &'a Ticket);

impl<M: Media> Ending for Awaited<'_, M> {
    fn look(&self) -> bool {
        self.0.poll(self.1)
    }

    fn bell(&self) -> Option<&Bell> {
        self.0.bell(self.1)
    }
}

/// An end, and what is known of when it was.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub completion: Completion,
    pub seen: Seen,
    /// By an engine that rings: it says how long it was at it. Of others only the caller knows when it saw the end.
    pub told: bool,
}

impl End {
    /// Of a copy that the submission made.
    fn at_once(completion: Completion) -> End {
        End { completion, seen: Seen::AtOnce, told: true }
    }

    /// It was over when somebody asked for the first time, and the engine does not say since when: its time is an upper
    /// bound.
    pub(super) fn is_late(&self) -> bool {
        !self.told && self.seen == Seen::AtOnce
    }
}

/// Waits for a ticket's end, which is expected at `due`, if anybody knows.
pub fn await_end<M: Media>(
    engine: &dyn Engine<M>,
    ticket: Ticket,
    due: Option<Instant>,
    holding: Holding,
) -> End {
    if let Some(completion) = ticket.completion() {
        return End::at_once(completion);
    }
    // To copy is not to wait.
    engine.help(&ticket);
    let wait = || {
        let seen = until(&Awaited(engine, &ticket), due, holding);
        let told = engine.bell(&ticket).is_some();
        End { completion: engine.wait(ticket), seen, told }
    };
    // Who holds nothing is in no operation, whose account this would be.
    if holding == Holding::Nothing { wait() } else { waiting(wait) }
}

/// Submits, does `meanwhile`, and waits; or does neither, where the engine refuses.
pub fn carry<M: Media, T>(
    engine: &dyn Engine<M>,
    media: &M,
    place: (usize, usize),
    transfer: &mut Transfer<'_>,
    crc: Option<u32>,
    meanwhile: impl FnOnce() -> T,
) -> Result<(Completion, T), Refused> {
    let nobody_knows = (Holding::Something, || None);
    let (end, made) = carry_expected(engine, media, place, transfer, crc, meanwhile, nobody_knows)?;
    Ok((end.completion, made))
}

/// As [`carry`], for who knows what it holds, and says after the submission when the end is due. Nobody asks that of a copy
/// that has ended by then.
pub(super) fn carry_expected<M: Media, T>(
    engine: &dyn Engine<M>,
    media: &M,
    (region, channel): (usize, usize),
    transfer: &mut Transfer<'_>,
    crc: Option<u32>,
    meanwhile: impl FnOnce() -> T,
    (holding, due): (Holding, impl FnOnce() -> Option<Instant>),
) -> Result<(End, T), Refused> {
    /// Waits in any case, so that the bytes are not given back before.
    struct Flight<'a, M: Media>(&'a dyn Engine<M>, Option<Ticket>);

    impl<M: Media> Drop for Flight<'_, M> {
        fn drop(&mut self) {
            if let Some(ticket) = self.1.take() {
                self.0.wait(ticket);
            }
        }
    }

    // SAFETY: the bytes and media are borrowed until this function returns, `to` alone by it; before that `Flight`
    // has waited. Media checks its range at each access.
    let submitted = unsafe {
        match holding.keeps_thread() {
            true => engine.submit_and_help(media, region, channel, &[transfer.raw()], crc),
            false => engine.submit(media, region, channel, &[transfer.raw()], crc),
        }
    };
    let ticket = submitted?;
    if let Some(completion) = ticket.completion() {
        return Ok((End::at_once(completion), meanwhile()));
    }
    let mut flight = Flight(engine, Some(ticket));
    let due = due();
    let made = meanwhile();
    let ticket = flight.1.take().expect("it is taken once");
    Ok((await_end(engine, ticket, due, holding), made))
}
