//! Copies that were handed over and that nobody waits for yet: a request of any number of transfers, cut into what
//! engines take and what is this thread's.
//!
//! All that goes to one region's engine is submitted at once, in as few batches as it takes (Fastmove §5.1); the CPU's
//! share is copied after that, while the engine works. With a checksum each batch is one transfer, whose checksum
//! begins anew: they end in any order, and are joined at the end.
//!
//! What has a class goes by the channel manager. Of class bandwidth pieces are *held back* until they are let in: the
//! flight has those, and whoever polls it or waits for it hands them over.
//!
//! **Invariants.**
//! 1. Whoever begins a flight vouches for its bytes until it has ended; engine and media are those it ends with.
//! 2. What a thread of the flight stored itself it has fenced before it returns, because a fence is for the own
//!    thread's stores only: what has ended is durable as far as a fence makes it so.
//! 3. A flight that is dropped has ended: while this code has one that has not, it is in a [`Landing`].
//! 4. Whoever was let in by the channel manager leaves it once: when its batch is waited for.

use std::collections::VecDeque;
use std::time::Duration;

use crossbeam_utils::Backoff;
use smallvec::SmallVec;

use super::class::{Class, Via};
use super::completion::Completion;
use super::dsa::{BATCH_MAX, TRANSFER_BYTES_MAX};
use super::engine_port::{Durability, RawTransfer, Refused, Ticket, Transfer};
use super::manager::{Entered, PIECE_BYTES};
use super::owners::Seat;
use super::schedule::{Decision, Direction, Job, decide};
use super::{EngineKind, Mover, Running};
use crate::account::waiting;
use crate::media::{Fault, Flushed, Media, crc32c_join};

/// Who waits for pieces that are held back looks so often, once it has looked a while.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct Flight {
    batches: SmallVec<[Batch; 1]>,
    /// Of class bandwidth: what was not let in yet.
    held: Option<Held>,
    /// With a checksum: of all parts in the order of the request, each from 0; and how many bytes each has.
    sums: Option<SmallVec<[(u32, u64); 3]>>,
    /// The first that was met.
    fault: Option<Fault>,
}

/// Pieces that wait, and for whom.
#[derive(Debug)]
struct Held {
    kind: EngineKind,
    seat: Seat,
    pieces: VecDeque<Batch>,
}

/// With an engine.
#[derive(Debug)]
struct Batch {
    kind: EngineKind,
    region: usize,
    /// None once it was waited for.
    ticket: Option<Ticket>,
    /// With a class, and the ticket.
    entered: Option<Entered>,
    transfers: SmallVec<[RawTransfer; 4]>,
    /// Where its checksum goes.
    sum: usize,
}

impl Batch {
    fn bytes(&self) -> usize {
        self.transfers.iter().map(|transfer| transfer.len).sum()
    }

    fn direction(&self) -> Direction {
        if self.transfers[0].is_to_media() { Direction::Write } else { Direction::Read }
    }

    /// What its checksum begins with, where the engine is to make one.
    fn seed(&self, crc: bool) -> Option<u32> {
        (crc && self.transfers[0].is_to_media()).then_some(0)
    }
}

/// A flight that ends in any case, so that its bytes are not given back before.
struct Landing<'a, M: Media> {
    mover: &'a Mover<M>,
    flight: Flight,
}

impl<M: Media> Drop for Landing<'_, M> {
    fn drop(&mut self) {
        for batch in &mut self.flight.batches {
            self.mover.wait(batch);
        }
        self.mover.let_go(&mut self.flight);
    }
}

/// A request while it is cut.
struct Cut {
    sums: Option<SmallVec<[(u32, u64); 3]>>,
    /// What the calling thread copies, and where the checksum of each goes.
    own: SmallVec<[(RawTransfer, usize); 4]>,
    pending: SmallVec<[Batch; 1]>,
    parts: usize,
    class: Option<Class>,
}

impl Cut {
    /// The place of the next part's checksum.
    fn next_sum(&mut self, bytes: usize) -> usize {
        if let Some(sums) = &mut self.sums {
            sums.push((0, bytes as u64));
        }
        self.parts += 1;
        self.parts - 1
    }

    fn own(&mut self, part: RawTransfer) {
        if part.len > 0 {
            let sum = self.next_sum(part.len);
            self.own.push((part, sum));
        }
    }

    /// For the engine, with others of the same region where a batch has room.
    fn hand_over(&mut self, kind: EngineKind, region: usize, part: RawTransfer) {
        if part.len == 0 {
            return;
        }
        let sum = self.next_sum(part.len);
        let alone = self.sums.is_some();
        let descriptors = |t: &RawTransfer| t.len.div_ceil(TRANSFER_BYTES_MAX);
        let bytes_max = if self.in_pieces() { PIECE_BYTES } else { usize::MAX };
        let has_room = |batch: &&mut Batch| {
            let taken: usize = batch.transfers.iter().map(descriptors).sum();
            let fits = taken + descriptors(&part) <= BATCH_MAX && batch.bytes() + part.len <= bytes_max;
            !alone && batch.region == region && fits
        };
        // Pieces are many, and all but the last are full.
        let room = match self.in_pieces() {
            true => self.pending.last_mut().filter(has_room),
            false => self.pending.iter_mut().rfind(has_room),
        };
        match room {
            Some(batch) => batch.transfers.push(part),
            None => {
                let transfers = SmallVec::from_slice(&[part]);
                self.pending.push(Batch { kind, region, ticket: None, entered: None, transfers, sum });
            }
        }
    }

    /// The channel manager wants no more than a piece at a time.
    fn in_pieces(&self) -> bool {
        matches!(self.class, Some(Class::Bandwidth(_)))
    }
}

impl<M: Media> Mover<M> {
    /// Begins to copy; all to media, or all from it. With `crc` the parts' checksums are kept for [`crc`](Flight::crc).
    /// `shares`: the CPU copies its share of large reads now, which is for callers that wait at once.
    ///
    /// # Safety
    ///
    /// The transfers' bytes are there until the flight has ended, as `Engine::submit` asks for; their ranges lie in media. It
    /// [ends](Mover::end) with this mover and these media before any of them goes.
    pub(super) unsafe fn begin(
        &self,
        media: &M,
        via: impl Into<Via>,
        transfers: &[RawTransfer],
        crc: bool,
        shares: bool,
    ) -> Flight {
        let (sums, via) = (crc.then(SmallVec::new), via.into());
        let class = self.class_of(via);
        let mut cut = Cut { sums, own: SmallVec::new(), pending: SmallVec::new(), parts: 0, class };
        let kind = via.engine.unwrap_or_else(|| self.kind());
        for transfer in transfers {
            let mut done = 0;
            while done < transfer.len {
                let (region, room) = media.region(transfer.at.add(done as u64));
                let len = room.min((transfer.len - done) as u64) as usize;
                self.cut(&mut cut, kind, region, transfer.part(done, len), shares);
                done += len;
            }
        }
        let Cut { sums, mut own, pending, .. } = cut;
        let mut landing = Landing { mover: self, flight: Flight { sums, ..Flight::default() } };
        if let Some(Class::Bandwidth(owner)) = class
            && !pending.is_empty()
        {
            let manager = self.running(kind).expect("it has pieces").manager;
            let seat = manager.join(owner, manager.now());
            landing.flight.held = Some(Held { kind, seat, pieces: pending.into_iter().collect() });
            // SAFETY: the caller's.
            unsafe { self.let_in(media, &mut landing.flight) };
        } else {
            for mut batch in pending {
                // SAFETY: the caller's.
                match unsafe { self.hand_over(media, &mut batch, class, crc) } {
                    Some(ticket) => {
                        batch.ticket = Some(ticket);
                        landing.flight.batches.push(batch);
                    }
                    // With checksums it is one transfer; without them nobody looks at the place.
                    None => own.extend(batch.transfers.iter().map(|transfer| (*transfer, batch.sum))),
                }
            }
        }
        for (part, sum) in own {
            // SAFETY: the caller's.
            unsafe { landing.flight.copy(media, part, sum) };
        }
        media.fence(Flushed::issued());
        std::mem::take(&mut landing.flight)
    }

    /// Copies all of it, and waits; the checksum continued, where one is given.
    pub(super) fn carry_all(
        &self,
        media: &M,
        via: impl Into<Via>,
        transfers: &mut [Transfer<'_>],
        crc: Option<u32>,
    ) -> Result<Option<u32>, Fault> {
        let raw: SmallVec<[RawTransfer; 4]> = transfers.iter_mut().map(Transfer::raw).collect();
        // SAFETY: the bytes and media are borrowed until this function returns, what is copied to by it alone; before
        // that the flight has ended, if need be by `Landing`. Media checks its range at each access.
        unsafe {
            let flight = self.begin(media, via, &raw, crc.is_some(), true);
            let mut landing = Landing { mover: self, flight };
            waiting(|| self.end(media, &mut landing.flight))?;
            Ok(landing.flight.crc(crc))
        }
    }

    /// The scheduler's rules for a part within one region.
    fn cut(&self, cut: &mut Cut, kind: EngineKind, region: usize, part: RawTransfer, shares: bool) {
        let Some(Running { scheduler, limits, capability, .. }) = self.running(kind) else {
            return cut.own(part);
        };
        let to_media = part.is_to_media();
        let direction = if to_media { Direction::Write } else { Direction::Read };
        let job = Job {
            direction,
            remote: self.is_remote(region),
            bytes: part.len,
            media: part.at.0,
            dram: part.address() as u64,
        };
        let share = if shares && !cut.in_pieces() { scheduler.share(part.len) } else { 0.0 };
        let (from, until, part) = match decide(&job, &capability, limits, share) {
            Decision::Cpu(_) => return cut.own(part),
            Decision::Engine { head, tail, route } => (head, part.len - tail, part.by(route)),
            Decision::Shared { engine } => (0, engine, part),
        };
        cut.own(part.part(0, from));
        // No more than one batch holds.
        let batch_bytes_max = capability.largest_bytes.min(BATCH_MAX * TRANSFER_BYTES_MAX);
        let batch_bytes_max =
            if cut.in_pieces() { batch_bytes_max.min(PIECE_BYTES) } else { batch_bytes_max };
        for at in (from..until).step_by(batch_bytes_max) {
            let len = (until - at).min(batch_bytes_max);
            cut.hand_over(kind, region, part.part(at, len));
        }
        cut.own(part.part(until, part.len - until));
    }

    /// None where the engine takes nothing. Not of class bandwidth.
    ///
    /// # Safety
    ///
    /// As for [`begin`](Mover::begin).
    unsafe fn hand_over(
        &self,
        media: &M,
        batch: &mut Batch,
        class: Option<Class>,
        crc: bool,
    ) -> Option<Ticket> {
        let run = self.running(batch.kind)?;
        let (region, crc) = (batch.region, batch.seed(crc));
        let entered = match class {
            None => None,
            // None: a read that the CPU makes.
            Some(_) => {
                let (manager, channels) = (run.manager, run.channels(region));
                let rest = |rests| run.rest(region, channels, rests);
                let (direction, bytes) = (batch.direction(), batch.bytes() as u64);
                Some(manager.enter_latency(channels, direction, bytes, manager.now(), &rest)?)
            }
        };
        let ticket = run.scheduler.claim(region, &run.unclassed(region), run.limits).and_then(|claim| {
            let channel = entered.as_ref().map_or(claim.channel, |entered| entered.channel);
            // SAFETY: the caller vouches for the bytes and for media until the flight has ended.
            let ticket = unsafe { run.engine.submit(media, region, channel, &batch.transfers, crc) };
            ticket.ok().inspect(|_| claim.keep())
        });
        match (&ticket, entered) {
            (Some(_), entered) => batch.entered = entered,
            (None, Some(entered)) => {
                let channels = run.channels(region);
                run.manager.take_back(channels, entered, false, &|rests| run.rest(region, channels, rests));
            }
            (None, None) => {}
        }
        if ticket.is_none() {
            self.count_busy();
        }
        ticket
    }

    /// Hands over the pieces that are let in; what the engine refuses of them the calling thread copies, and fences.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    unsafe fn let_in(&self, media: &M, flight: &mut Flight) {
        let Some(Held { kind, seat, mut pieces }) = flight.held.take() else { return };
        let run = self.running(kind).expect("it has pieces");
        let Running { engine, manager, .. } = run;
        // Regions whose channels let nothing in for now.
        let mut full: SmallVec<[usize; 4]> = SmallVec::new();
        let mut next = 0;
        while next < pieces.len() {
            let region = pieces[next].region;
            let channels = run.channels(region);
            let rest = |rests| run.rest(region, channels, rests);
            let (direction, bytes) = (pieces[next].direction(), pieces[next].bytes() as u64);
            let own = flight.batches.iter().filter(|batch| batch.ticket.is_some()).count() as u32;
            let entered = match full.contains(&channels.group) {
                true => None,
                false => {
                    manager.enter_bandwidth(channels, (seat, own), direction, bytes, manager.now(), &rest)
                }
            };
            let Some(entered) = entered else {
                if !full.contains(&channels.group) {
                    full.push(channels.group);
                }
                // What comes after goes elsewhere, if at all.
                match pieces
                    .iter()
                    .skip(next)
                    .position(|piece| !full.contains(&run.channels(piece.region).group))
                {
                    Some(further) => next += further,
                    None => break,
                }
                continue;
            };
            let mut piece = pieces.remove(next).expect("it is there");
            let crc = piece.seed(flight.sums.is_some());
            // SAFETY: the caller vouches for the bytes and for media until the flight has ended.
            match unsafe { engine.submit(media, region, entered.channel, &piece.transfers, crc) } {
                Ok(ticket) => {
                    (piece.ticket, piece.entered) = (Some(ticket), Some(entered));
                    flight.batches.push(piece);
                }
                // Its own make room, and somebody waits for them.
                Err(Refused::Full) if own > 0 => {
                    manager.take_back(channels, entered, true, &rest);
                    full.push(channels.group);
                    pieces.insert(next, piece);
                }
                Err(_) => {
                    manager.take_back(channels, entered, false, &rest);
                    self.count_busy();
                    for transfer in piece.transfers {
                        // SAFETY: the caller's.
                        unsafe { flight.copy(media, transfer, piece.sum) };
                    }
                    media.fence(Flushed::issued());
                }
            }
        }
        flight.held = Some(Held { kind, seat, pieces });
        if flight.held.as_ref().is_some_and(|held| held.pieces.is_empty()) {
            self.let_go(flight);
        }
    }

    /// What is held back is nobody's any more.
    fn let_go(&self, flight: &mut Flight) {
        if let Some(held) = flight.held.take() {
            self.running(held.kind).expect("it has pieces").manager.part(held.seat);
        }
    }

    /// Whether all of it has ended, and is to be [ended](Mover::end) without waiting. Of class bandwidth it hands over what
    /// is let in.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    pub(super) unsafe fn has_ended(&self, media: &M, flight: &mut Flight) -> bool {
        if flight.has_class() {
            // SAFETY: the caller's.
            unsafe { self.go_through(media, flight) };
        }
        flight.held.is_none() && flight.batches.iter().all(|batch| self.batch_has_ended(batch))
    }

    fn batch_has_ended(&self, batch: &Batch) -> bool {
        match (&batch.ticket, self.engine(batch.kind)) {
            (Some(ticket), Some(engine)) => engine.poll(ticket),
            _ => true,
        }
    }

    /// Finishes what has ended of a flight with a class, hands over more, and drives the channel manager.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    unsafe fn go_through(&self, media: &M, flight: &mut Flight) {
        let mut n = 0;
        while n < flight.batches.len() {
            if self.batch_has_ended(&flight.batches[n]) {
                // SAFETY: the caller's.
                unsafe { self.finish(media, flight, n) };
                flight.batches.remove(n);
            } else {
                n += 1;
            }
        }
        // SAFETY: the caller's.
        unsafe { self.let_in(media, flight) };
        flight.batches.iter().for_each(|batch| self.drive_for(batch));
    }

    /// Drives the channel manager for a batch that waits.
    fn drive_for(&self, batch: &Batch) {
        if batch.entered.is_some()
            && batch.ticket.is_some()
            && let Some(run) = self.running(batch.kind)
        {
            let channels = run.channels(batch.region);
            let rest = |rests| run.rest(batch.region, channels, rests);
            run.manager.drive(channels, run.manager.now(), &rest);
        }
    }

    /// Waits for one batch, and gives back its places. None where it was waited for.
    fn wait(&self, batch: &mut Batch) -> Option<Completion> {
        let run = self.running(batch.kind)?;
        let (region, channels) = (batch.region, run.channels(batch.region));
        if batch.entered.is_some() && channels.can_rest {
            // A channel at rest goes on only if somebody looks: this one does.
            let backoff = Backoff::new();
            while !self.batch_has_ended(batch) {
                self.drive_for(batch);
                backoff.snooze();
            }
        }
        let completion = run.engine.wait(batch.ticket.take()?);
        let of_bandwidth = batch.entered.as_ref().is_some_and(Entered::is_of_bandwidth);
        if !of_bandwidth {
            run.scheduler.give_back(region);
        }
        if let Some(entered) = batch.entered.take() {
            run.manager.leave(channels, entered, run.manager.now(), &|rests| {
                run.rest(region, channels, rests);
            });
        }
        Some(completion)
    }

    /// Waits for the engines, and does what they left undone. Afterwards nobody uses the bytes any more.
    ///
    /// # Safety
    ///
    /// The flight was begun with this mover and these media, and its bytes are there.
    pub(super) unsafe fn end(&self, media: &M, flight: &mut Flight) -> Result<(), Fault> {
        let backoff = Backoff::new();
        while let Some(held) = &flight.held {
            let region = held.pieces.front().map_or(0, |piece| piece.region);
            let can_rest = self.running(held.kind).is_some_and(|run| run.channels(region).can_rest);
            if !can_rest && !flight.batches.is_empty() {
                // No channel is at rest: it sleeps until its first piece has ended.
                // SAFETY: the caller's.
                unsafe { self.finish(media, flight, 0) };
            } else if backoff.is_completed() && flight.batches.is_empty() {
                std::thread::sleep(LOOK_EVERY);
            } else {
                backoff.snooze();
            }
            // SAFETY: the caller's.
            unsafe { self.go_through(media, flight) };
        }
        for n in 0..flight.batches.len() {
            // SAFETY: the caller's.
            unsafe { self.finish(media, flight, n) };
        }
        flight.fault.map_or(Ok(()), Err)
    }

    /// Waits for the batch of this number, and does what was left undone of it.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    unsafe fn finish(&self, media: &M, flight: &mut Flight, n: usize) {
        // It stays in the flight, which is waited for should this panic.
        let Some(completion) = self.wait(&mut flight.batches[n]) else { return };
        let batch = &mut flight.batches[n];
        let (mut done, sum, to_media) =
            (self.ended(&completion, batch.bytes()), batch.sum, batch.transfers[0].is_to_media());
        let writes_back = to_media && completion.durability == Durability::WriteBack;
        if done > 0
            && to_media
            && let Some(sums) = &mut flight.sums
        {
            sums[sum].0 = completion.crc;
        }
        for transfer in std::mem::take(&mut batch.transfers) {
            let whole = done.min(transfer.len);
            if writes_back && whole > 0 {
                media.fence(media.write_back(transfer.at, whole));
            }
            if !to_media && flight.sums.is_some() {
                // SAFETY: the caller's; this reads what was just copied.
                unsafe { flight.sum_up(&transfer.part(0, whole), sum) };
            }
            if whole < transfer.len {
                // SAFETY: the caller's.
                unsafe { flight.copy(media, transfer.part(whole, transfer.len - whole), sum) };
                media.fence(Flushed::issued());
            }
            done -= whole;
        }
    }
}

impl Flight {
    /// Whether engines have nothing of it: it ends without waiting.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_none() && self.batches.iter().all(|batch| batch.ticket.is_none())
    }

    /// Whether the channel manager is to be driven for it.
    fn has_class(&self) -> bool {
        self.held.is_some() || self.batches.iter().any(|batch| batch.entered.is_some())
    }

    /// The checksum of all bytes, continued; once it has ended well.
    pub(super) fn crc(&self, begin: Option<u32>) -> Option<u32> {
        let join = |crc, &(part, bytes): &(u32, u64)| crc32c_join(crc, part, bytes);
        Some(self.sums.as_ref()?.iter().fold(begin?, join))
    }

    /// Copies a part on this thread, its checksum continued; to be fenced.
    ///
    /// # Safety
    ///
    /// As for [`RawTransfer::copy`].
    unsafe fn copy<M: Media>(&mut self, media: &M, part: RawTransfer, sum: usize) {
        if self.fault.is_some() {
            return;
        }
        let crc = self.sums.as_ref().filter(|_| part.is_to_media()).map(|sums| sums[sum].0);
        // SAFETY: the caller's.
        match unsafe { part.copy(media, crc) } {
            Ok((crc, flushed)) => {
                flushed.stood_for();
                if let (Some(sums), Some(crc)) = (&mut self.sums, crc) {
                    sums[sum].0 = crc;
                }
                if !part.is_to_media() && self.sums.is_some() {
                    // SAFETY: the caller's; this reads what was just copied.
                    unsafe { self.sum_up(&part, sum) };
                }
            }
            Err(fault) => self.fault = Some(fault),
        }
    }

    /// Continues a checksum by what was read.
    ///
    /// # Safety
    ///
    /// The part's bytes are there, and nobody changes them.
    unsafe fn sum_up(&mut self, part: &RawTransfer, sum: usize) {
        if let Some(sums) = &mut self.sums {
            // SAFETY: the caller's.
            sums[sum].0 = crate::media::crc32c(unsafe { part.bytes() }, sums[sum].0);
        }
    }
}
