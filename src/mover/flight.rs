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

use std::cell::RefCell;
use std::collections::VecDeque;
use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::class::{Class, Via};
use super::completion::Completion;
use super::dsa::{BATCH_MAX, TRANSFER_BYTES_MAX};
use super::engine_port::{Awaited, Durability, End, Engine, RawTransfer, Refused, Ticket, Transfer};
use super::manager::{Channels, Entered};
use super::owners;
use super::schedule::{Decision, Direction, Expected, Job, decide};
use super::{EngineKind, Mover, Running, Stranger, smallest};
use crate::account::waiting;
use crate::media::{Fault, Flushed, Media, crc32c_join};
use crate::wait::{Bell, Ending, Holding, Seat, Seen, until};

/// See the file's head.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    batches: SmallVec<[Batch; 1]>,
    /// With a class: where it is counted with others that end in turn. The channel manager is to be driven for it.
    place: Option<(usize, usize)>,
    /// Of class bandwidth: what was not let in yet.
    held: Option<Held>,
    /// Of a read that is shared with the CPU and nothing else: its bytes, the CPU's part, and in how many nanoseconds.
    shared: Option<(usize, u64, u64)>,
    /// With a checksum: of all parts in the order of the request, each from 0; and how many bytes each has.
    sums: Option<SmallVec<[(u32, u64); 3]>>,
    /// The first that was met.
    fault: Option<Fault>,
    /// When somebody saw that it had not ended, for the last time.
    looked: Option<Instant>,
}

/// Pieces that wait, and for whom.
#[derive(Debug)]
struct Held {
    kind: EngineKind,
    seat: owners::Seat,
    pieces: VecDeque<Batch>,
}

/// With an engine.
#[derive(Debug)]
struct Batch {
    kind: EngineKind,
    region: usize,
    channel: usize,
    /// None once it was waited for.
    ticket: Option<Ticket>,
    /// With a class, and the ticket.
    entered: Option<Entered>,
    /// Without one, on a channel that may rest otherwise; and the ticket.
    stranger: Option<Channels>,
    /// Of its end; none before it is submitted, nor where that made the copy, and none of class bandwidth: nobody knows how
    /// long its channel rests.
    expected: Option<Expected>,
    /// How somebody who waited saw its end.
    seen: Option<Seen>,
    transfers: SmallVec<[RawTransfer; 4]>,
    /// Where its checksum goes.
    sum: usize,
}

/// Who looks again and again sees an end exactly, if its looks lie together by so much of the time that it took.
const CLOSE: u32 = 8;

impl Batch {
    /// How exactly its end is known, `looked` being the last look before.
    fn seen(&self, looked: Option<Instant>) -> Seen {
        let close = |looked: Instant| {
            let took = self.expected.map_or_else(Default::default, |expected| expected.elapsed());
            looked.elapsed() * CLOSE <= took
        };
        match self.seen {
            Some(seen) => seen,
            None if looked.is_some_and(close) => Seen::Watched,
            None => Seen::AtOnce,
        }
    }

    /// It is of class bandwidth, and was let in.
    fn is_piece(&self) -> bool {
        self.entered.as_ref().is_some_and(Entered::is_of_bandwidth)
    }

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

/// The last line of invariant 3: a panic would give bytes back that an engine uses.
impl Drop for Flight {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.is_over() {
            tracing::error!(
                "a panic met a copy under way, whose bytes cannot be taken from it: the process ends"
            );
            std::process::abort();
        }
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

/// A batch that may be on a channel at rest: who looks drives the channel manager.
struct Driven<'a, M: Media>(&'a Mover<M>, &'a Batch);

impl<M: Media> Ending for Driven<'_, M> {
    fn look(&self) -> bool {
        let Driven(mover, batch) = self;
        mover.drive_for(batch);
        mover.batch_has_ended(batch)
    }
}

/// A flight with pieces held back, until one is let in or has ended. Made by who vouches for what [`Mover::end`] asks.
struct GoesOn<'a, M: Media> {
    mover: &'a Mover<M>,
    media: &'a M,
    flight: RefCell<&'a mut Flight>,
    /// Of it, when the wait began.
    left: usize,
    bell: Option<&'a Bell>,
}

impl<M: Media> Ending for GoesOn<'_, M> {
    fn look(&self) -> bool {
        let mut flight = self.flight.borrow_mut();
        // SAFETY: whoever made this vouches for it.
        unsafe { self.mover.go_through(self.media, &mut flight) };
        flight.left() < self.left
    }

    fn bell(&self) -> Option<&Bell> {
        self.bell
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
    /// What goes of class bandwidth at a time.
    piece_bytes: usize,
    /// The CPU has a share of a read that is its own by nothing but the schedule.
    shared: bool,
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
        let bytes_max = if self.in_pieces() { self.piece_bytes } else { usize::MAX };
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
                let batch = Batch {
                    kind,
                    region,
                    channel: 0,
                    ticket: None,
                    entered: None,
                    stranger: None,
                    expected: None,
                    seen: None,
                    transfers,
                    sum,
                };
                self.pending.push(batch);
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
    /// `waits`: the caller waits at once, so the CPU copies its share of large reads now, and threads need not be woken.
    ///
    /// # Safety
    ///
    /// The transfers' bytes are there until the flight has ended, as `Engine::submit` asks for; their ranges lie in media. It
    /// [ends](Mover::end) with this mover and these media before any of them goes.
    pub(crate) unsafe fn begin(
        &self,
        media: &M,
        via: impl Into<Via>,
        transfers: &[RawTransfer],
        crc: bool,
        waits: bool,
    ) -> Flight {
        let (sums, via) = (crc.then(SmallVec::new), via.into());
        let class = self.class_of(via);
        let (own, pending) = (SmallVec::new(), SmallVec::new());
        let piece_bytes = self.qos.piece_bytes;
        let mut cut = Cut { sums, own, pending, parts: 0, class, piece_bytes, shared: false };
        let kind = via.engine.unwrap_or_else(|| self.kind());
        for transfer in transfers {
            let mut done = 0;
            while done < transfer.len {
                let (region, room) = media.region(transfer.at.add(done as u64));
                let len = room.min((transfer.len - done) as u64) as usize;
                self.cut(&mut cut, kind, region, transfer.part(done, len), waits);
                done += len;
            }
        }
        let in_pieces = cut.in_pieces();
        let Cut { sums, mut own, pending, shared, .. } = cut;
        let mut landing = Landing { mover: self, flight: Flight::default() };
        landing.flight.sums = sums;
        if let Some(Class::Bandwidth(owner)) = class
            && !pending.is_empty()
        {
            let run = self.running(kind).expect("it has pieces");
            let seat = run.manager.join(owner, run.manager.now());
            // A place that nobody else has, even if its channel is the only one: what is held back holds up whatever
            // ends in turn behind it.
            let first = pending[0].region;
            landing.flight.place = Some((first, run.channels(first).of_bandwidth().max(1)));
            landing.flight.held = Some(Held { kind, seat, pieces: pending.into_iter().collect() });
            // SAFETY: the caller's.
            unsafe { self.let_in(media, &mut landing.flight) };
        } else {
            let last = pending.len().wrapping_sub(1);
            for (n, mut batch) in pending.into_iter().enumerate() {
                if waits && n == last {
                    // Who waits may do this one itself: the others begin beside it.
                    self.for_each_under_way(&landing.flight, |engine, ticket| engine.start(ticket));
                }
                // SAFETY: the caller's.
                match unsafe { self.hand_over(media, &mut batch, class, crc, waits && n == last) } {
                    true => landing.flight.batches.push(batch),
                    // With checksums it is one transfer; without them nobody looks at the place.
                    false => own.extend(batch.transfers.iter().map(|transfer| (*transfer, batch.sum))),
                }
            }
            if class.is_some() {
                landing.flight.place = Some(landing.flight.channel());
            }
        }
        // Pieces were started as they were let in.
        if !in_pieces && !waits {
            self.for_each_under_way(&landing.flight, |engine, ticket| engine.start(ticket));
        }
        let begun = shared.then(Instant::now);
        let (mut bytes, mut stored) = (0, false);
        for (part, sum) in own {
            // SAFETY: the caller's.
            unsafe { landing.flight.copy(media, part, sum) };
            bytes += part.len;
            stored |= part.is_to_media();
        }
        if let (Some(begun), [whole]) = (begun, transfers) {
            landing.flight.shared = Some((whole.len, bytes as u64, begun.elapsed().as_nanos() as u64));
        }
        // What has ended already this thread may have stored on the engine's behalf.
        self.for_each_under_way(&landing.flight, |_, ticket| stored |= ticket.completion().is_some());
        if stored {
            media.fence(Flushed::issued());
        }
        std::mem::take(&mut landing.flight)
    }

    /// Whether a copy of so many bytes to media, handed over, is likely to go on when the call returns: it is not the
    /// calling thread that copies, and by its thresholds the engine is worth it.
    pub(crate) fn outlives(&self, via: impl Into<Via>, bytes: usize, waits: bool) -> bool {
        let via = via.into();
        let kind = via.engine.unwrap_or_else(|| self.kind());
        let copies_here = kind == EngineKind::Semaphore || kind == EngineKind::Delegate && waits;
        self.takes(via, bytes)
            && !copies_here
            && self.running(kind).is_some_and(|Running { limits, capability, .. }| {
                let thresholds = &limits.thresholds;
                bytes >= thresholds.local_write.min(thresholds.remote_write).max(capability.smallest_bytes)
            })
    }

    fn for_each_under_way(&self, flight: &Flight, mut each: impl FnMut(&dyn Engine<M>, &Ticket)) {
        for batch in &flight.batches {
            if let (Some(ticket), Some(engine)) = (&batch.ticket, self.engine(batch.kind)) {
                each(engine, ticket);
            }
        }
    }

    /// Copies all of it, and waits; the checksum continued, where one is given.
    pub(super) fn carry_all(
        &self,
        media: &M,
        via: impl Into<Via>,
        transfers: &mut [Transfer<'_>],
        crc: Option<u32>,
        holding: Holding,
    ) -> Result<Option<u32>, Fault> {
        let raw: SmallVec<[RawTransfer; 4]> = transfers.iter_mut().map(Transfer::raw).collect();
        // SAFETY: the bytes and media are borrowed until this function returns, what is copied to by it alone; before
        // that the flight has ended, if need be by `Landing`. Media checks its range at each access.
        unsafe {
            let flight = self.begin(media, via, &raw, crc.is_some(), holding.keeps_thread());
            let mut landing = Landing { mover: self, flight };
            match holding {
                // Who holds nothing is in no operation, whose account this would be.
                Holding::Nothing => self.await_flight(media, &mut landing.flight, holding),
                Holding::Something => waiting(|| self.await_flight(media, &mut landing.flight, holding)),
            }
            self.end(media, &mut landing.flight)?;
            Ok(landing.flight.crc(crc))
        }
    }

    /// The scheduler's rules for a part within one region.
    fn cut(&self, cut: &mut Cut, kind: EngineKind, region: usize, part: RawTransfer, shares: bool) {
        let Some(Running { scheduler, limits, capability, .. }) = self.running(kind) else {
            // As where it is there, of what it would take.
            if kind != EngineKind::Cpu && part.len >= smallest(kind) {
                self.count_busy();
            }
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
            Decision::Shared { engine } => {
                cut.shared = true;
                (0, engine, part)
            }
        };
        cut.own(part.part(0, from));
        // No more than one batch holds.
        let batch_bytes_max = capability.largest_bytes.min(BATCH_MAX * TRANSFER_BYTES_MAX);
        let batch_bytes_max =
            if cut.in_pieces() { batch_bytes_max.min(cut.piece_bytes) } else { batch_bytes_max };
        for at in (from..until).step_by(batch_bytes_max) {
            let len = (until - at).min(batch_bytes_max);
            cut.hand_over(kind, region, part.part(at, len));
        }
        cut.own(part.part(until, part.len - until));
    }

    /// Whether the engine takes it. Not of class bandwidth.
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
        helps: bool,
    ) -> bool {
        let Some(run) = self.running(batch.kind) else { return false };
        let (region, crc) = (batch.region, batch.seed(crc));
        let (direction, bytes) = (batch.direction(), batch.bytes());
        let entered = match class {
            None => None,
            Some(_) => {
                let (manager, channels) = (run.manager, run.channels(region));
                let rest = |rests| run.rest(region, channels, rests);
                match manager.enter_latency(channels, direction, bytes as u64, manager.now(), &rest) {
                    Some(entered) => Some(entered),
                    // A read that the CPU makes.
                    None => return false,
                }
            }
        };
        let ticket = run.scheduler.claim(region, &run.unclassed(region), run.limits).and_then(|claim| {
            batch.channel = entered.as_ref().map_or(claim.channel, |entered| entered.channel);
            let stranger = if class.is_none() { run.comes(region, batch.channel) } else { None };
            // SAFETY: the caller vouches for the bytes and for media until the flight has ended.
            let ticket = unsafe {
                match helps {
                    true => run.engine.submit_and_help(media, region, batch.channel, &batch.transfers, crc),
                    false => run.engine.submit(media, region, batch.channel, &batch.transfers, crc),
                }
            };
            ticket.ok().inspect(|_| {
                claim.keep();
                batch.stranger = stranger.map(Stranger::keep);
            })
        });
        let took = ticket.is_some();
        match (ticket, entered) {
            (Some(ticket), entered) => {
                if ticket.completion().is_none() {
                    batch.expected = Some(run.scheduler.expect((region, batch.channel), direction, bytes));
                }
                (batch.ticket, batch.entered) = (Some(ticket), entered);
            }
            (None, Some(entered)) => {
                let channels = run.channels(region);
                run.manager.take_back(channels, entered, false, &|rests| run.rest(region, channels, rests));
            }
            (None, None) => {}
        }
        if !took {
            self.count_busy();
        }
        took
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
        let (mut next, mut stored) = (0, false);
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
                    // Nobody waits especially for it.
                    engine.start(&ticket);
                    stored |= ticket.completion().is_some();
                    piece.channel = entered.channel;
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
                    stored = true;
                }
            }
        }
        if stored {
            media.fence(Flushed::issued());
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
    pub(crate) unsafe fn has_ended(&self, media: &M, flight: &mut Flight) -> bool {
        if flight.place.is_some() {
            // SAFETY: the caller's.
            unsafe { self.go_through(media, flight) };
        }
        let ended = flight.held.is_none() && flight.batches.iter().all(|batch| self.batch_has_ended(batch));
        if !ended {
            flight.looked = Some(Instant::now());
        }
        ended
    }

    fn batch_has_ended(&self, batch: &Batch) -> bool {
        match (&batch.ticket, self.engine(batch.kind)) {
            (Some(ticket), Some(engine)) => engine.poll(ticket),
            _ => true,
        }
    }

    /// Finishes the pieces of a flight that have ended, hands over more, and drives the channel manager. What is of class
    /// latency ends as what has no class does: whoever waited for it says first how it saw the end.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    unsafe fn go_through(&self, media: &M, flight: &mut Flight) {
        let mut n = 0;
        while n < flight.batches.len() {
            if flight.batches[n].is_piece() && self.batch_has_ended(&flight.batches[n]) {
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

    /// Whether a batch may be on a channel at rest, which goes on only if somebody looks: so nobody sleeps until a bell
    /// rings for it.
    fn is_driven(&self, batch: &Batch) -> bool {
        batch.entered.is_some()
            && batch.ticket.is_some()
            && self.running(batch.kind).is_some_and(|run| run.channels(batch.region).can_rest)
    }

    /// Waits until nothing is held back any more.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    unsafe fn await_held(&self, media: &M, flight: &mut Flight, holding: Holding) {
        // Each step is a wait of its own: see `held_back`.
        while flight.held.is_some() {
            // What has ended makes room, and a bell may tell of the first.
            let first = flight.batches.first().filter(|batch| !self.is_driven(batch));
            let bell = first.and_then(|batch| self.engine(batch.kind)?.bell(batch.ticket.as_ref()?));
            let left = flight.left();
            until(&GoesOn { mover: self, media, flight: RefCell::new(flight), left, bell }, None, holding);
        }
    }

    /// Waits for one batch on the ladder. None where it was waited for.
    fn await_batch(&self, batch: &Batch, holding: Holding) -> Option<Seen> {
        let (ticket, engine) = (batch.ticket.as_ref()?, self.engine(batch.kind)?);
        let due = batch.expected.and_then(|expected| expected.due);
        Some(match self.is_driven(batch) {
            true => until(&Driven(self, batch), due, holding),
            false => until(&Awaited(engine, ticket), due, holding),
        })
    }

    /// Waits until the engines are through: it is to be [ended](Mover::end) then. In a uthread that holds nothing others
    /// run meanwhile. Of class bandwidth it hands over what is let in.
    ///
    /// # Safety
    ///
    /// As for [`end`](Mover::end).
    pub(super) unsafe fn await_flight(&self, media: &M, flight: &mut Flight, holding: Holding) {
        // SAFETY: the caller's.
        unsafe { self.await_held(media, flight, holding) };
        for batch in &mut flight.batches {
            if let (Some(ticket), Some(engine)) = (&batch.ticket, self.engine(batch.kind)) {
                engine.help(ticket);
                batch.seen = self.await_batch(batch, holding);
            }
        }
    }

    /// Somebody waits for it now: see [`Engine::help`].
    pub(crate) fn help(&self, flight: &Flight) {
        self.for_each_under_way(flight, |engine, ticket| engine.help(ticket));
    }

    /// Has the waker woken when a part of it has ended. Whoever listens looks once more afterwards.
    pub(crate) fn listen(&self, flight: &Flight, seat: &Seat, waker: &Waker) {
        self.for_each_under_way(flight, |engine, ticket| {
            if let Some(bell) = engine.bell(ticket).filter(|_| !engine.poll(ticket)) {
                bell.listen(seat, waker);
            }
        });
    }

    /// Whether somebody rings for all of it. Not while pieces are held back: those are let in by who looks.
    pub(crate) fn rings(&self, flight: &Flight) -> bool {
        let mut rings = flight.held.is_none() && !flight.batches.iter().any(|batch| self.is_driven(batch));
        self.for_each_under_way(flight, |engine, ticket| rings &= engine.bell(ticket).is_some());
        rings
    }

    /// Waits for one batch, and gives back its places: how it ended, and whether its engine tells. None where it was waited
    /// for.
    fn wait(&self, batch: &mut Batch) -> Option<(Completion, bool)> {
        let run = self.running(batch.kind)?;
        let (region, channels) = (batch.region, run.channels(batch.region));
        if self.is_driven(batch) {
            let seen = self.await_batch(batch, Holding::Something).filter(|seen| *seen != Seen::AtOnce);
            batch.seen = batch.seen.or(seen);
        }
        let ticket = batch.ticket.take()?;
        let told = run.engine.bell(&ticket).is_some();
        let completion = run.engine.wait(ticket);
        if !batch.is_piece() {
            run.scheduler.give_back(region, run.limits);
        }
        if let Some(at) = batch.stranger.take() {
            run.manager.went(at);
        }
        if let Some(entered) = batch.entered.take() {
            run.manager.leave(channels, entered, run.manager.now(), &|rests| {
                run.rest(region, channels, rests);
            });
        }
        Some((completion, told))
    }

    /// Waits for the engines, and does what they left undone. Afterwards nobody uses the bytes any more.
    ///
    /// # Safety
    ///
    /// The flight was begun with this mover and these media, and its bytes are there.
    pub(crate) unsafe fn end(&self, media: &M, flight: &mut Flight) -> Result<(), Fault> {
        // SAFETY: the caller's.
        unsafe { self.await_held(media, flight, Holding::Something) };
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
        let Some((completion, told)) = self.wait(&mut flight.batches[n]) else { return };
        let batch = &flight.batches[n];
        let run = self.running(batch.kind).expect("it took the batch");
        let bytes = batch.bytes();
        let end = End { completion, seen: batch.seen(flight.looked), told };
        if let (Some((whole, own, own_ns)), 1) = (flight.shared.take(), flight.batches.len())
            && own + completion.bytes == whole as u64
        {
            let engine = (completion.bytes, completion.nanoseconds);
            run.scheduler.shared(whole, engine, (own, own_ns), end.is_late());
        }
        let batch = &mut flight.batches[n];
        let (mut done, sum, to_media) =
            (self.ended(&completion, bytes), batch.sum, batch.transfers[0].is_to_media());
        run.met(batch.expected, done == bytes, &end);
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
                let written = media.write_back(transfer.at, whole);
                flight.fault = flight.fault.or(written.err());
                media.fence(Flushed::issued());
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
    /// The region and the channel of its first batch: what is handed over there ends in turn, more or less.
    pub(crate) fn channel(&self) -> (usize, usize) {
        let first = || self.batches.first().map_or((0, 0), |batch| (batch.region, batch.channel));
        self.place.unwrap_or_else(first)
    }

    /// Whether all of it had ended when it was handed over. Asks no engine.
    pub(crate) fn ended_at_once(&self) -> bool {
        let has_ended =
            |batch: &Batch| batch.ticket.as_ref().is_none_or(|ticket| ticket.completion().is_some());
        self.held.is_none() && self.batches.iter().all(has_ended)
    }

    /// Whether it is of class bandwidth, and may be held back.
    pub(crate) fn is_of_bandwidth(&self) -> bool {
        self.held.is_some() || self.batches.iter().any(Batch::is_piece)
    }

    /// Whether engines have nothing of it: it ends without waiting.
    pub(crate) fn is_over(&self) -> bool {
        self.held.is_none() && self.batches.iter().all(|batch| batch.ticket.is_none())
    }

    /// How much is still to be done until nothing is held back and nothing under way: it becomes less with each piece that
    /// is let in, and with each that has ended.
    fn left(&self) -> usize {
        self.batches.len() + self.held.as_ref().map_or(0, |held| 2 * held.pieces.len())
    }

    /// While pieces are held back: a number that becomes less with whatever goes on. Who waits for such a flight begins a
    /// wait for each step: in one long wait it would look ever less often, and few pieces are let in at a look.
    pub(crate) fn held_back(&self) -> Option<usize> {
        self.held.as_ref().map(|_| self.left())
    }

    /// When the last of it is expected to end; none where nobody knows, as of pieces, held back or not.
    pub(crate) fn due(&self) -> Option<Instant> {
        if self.held.is_some() {
            return None;
        }
        let dues = self.batches.iter().map(|batch| batch.expected.and_then(|expected| expected.due));
        dues.collect::<Option<SmallVec<[Instant; 4]>>>()?.into_iter().max()
    }

    /// How somebody who waited for all of it saw its end.
    pub(crate) fn was_seen(&mut self, seen: Seen) {
        self.batches.iter_mut().for_each(|batch| batch.seen = Some(seen));
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
