//! Copies that were handed over and that nobody waits for yet: a request of any number of transfers, cut into what
//! engines take and what is this thread's.
//!
//! All that goes to one region's engine is submitted at once, in as few batches as it takes (Fastmove §5.1); the CPU's
//! share is copied after that, while the engine works. With a checksum each batch is one transfer, whose checksum
//! begins anew: they end in any order, and are joined at the end.
//!
//! **Invariants.**
//! 1. Whoever begins a flight vouches for its bytes until it has ended; engine and media are those it ends with.
//! 2. What a thread of the flight stored itself it has fenced before it returns, because a fence is for the own
//!    thread's stores only: what has ended is durable as far as a fence makes it so.
//! 3. A flight that is dropped has ended: while this code has one that has not, it is in a [`Landing`].

use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::dsa::{BATCH_MAX, TRANSFER_BYTES_MAX};
use super::engine_port::{Awaited, Durability, End, Engine, RawTransfer, Ticket, Transfer};
use super::schedule::{Decision, Direction, Expected, Job, decide};
use super::{EngineKind, Mover, Running};
use crate::media::{Fault, Flushed, Media, crc32c_join};
use crate::wait::{Holding, Seat, Seen, until};

/// See the file's head.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    batches: SmallVec<[Batch; 1]>,
    /// Of a read that is shared with the CPU and nothing else: its bytes, the CPU's part, and in how many nanoseconds.
    shared: Option<(usize, u64, u64)>,
    /// With a checksum: of all parts in the order of the request, each from 0; and how many bytes each has.
    sums: Option<SmallVec<[(u32, u64); 3]>>,
    /// The first that was met.
    fault: Option<Fault>,
    /// When somebody saw that it had not ended, for the last time.
    looked: Option<Instant>,
}

/// With an engine.
#[derive(Debug)]
struct Batch {
    kind: EngineKind,
    region: usize,
    channel: usize,
    /// None once it was waited for.
    ticket: Option<Ticket>,
    /// Of its end; none before it is submitted.
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
        let (now, took) = (Instant::now(), self.expected.map_or_else(Default::default, |e| e.elapsed()));
        let close = |looked: Instant| now.saturating_duration_since(looked) * CLOSE <= took;
        match self.seen {
            Some(seen) => seen,
            None if looked.is_some_and(close) => Seen::Watched,
            None => Seen::AtOnce,
        }
    }

    fn bytes(&self) -> usize {
        self.transfers.iter().map(|transfer| transfer.len).sum()
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
            if let (Some(ticket), Some(engine)) = (batch.ticket.take(), self.mover.engine(batch.kind)) {
                engine.wait(ticket);
            }
        }
    }
}

/// A request while it is cut.
struct Cut {
    sums: Option<SmallVec<[(u32, u64); 3]>>,
    /// What the calling thread copies, and where the checksum of each goes.
    own: SmallVec<[(RawTransfer, usize); 4]>,
    pending: SmallVec<[Batch; 1]>,
    parts: usize,
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
        let room = self.pending.iter_mut().rfind(|batch| {
            let taken: usize = batch.transfers.iter().map(descriptors).sum();
            !alone && batch.region == region && taken + descriptors(&part) <= BATCH_MAX
        });
        match room {
            Some(batch) => batch.transfers.push(part),
            None => {
                let transfers = SmallVec::from_slice(&[part]);
                let (ticket, expected, seen) = (None, None, None);
                let channel = 0;
                self.pending.push(Batch { kind, region, channel, ticket, expected, seen, transfers, sum });
            }
        }
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
        via: Option<EngineKind>,
        transfers: &[RawTransfer],
        crc: bool,
        waits: bool,
    ) -> Flight {
        let sums = crc.then(SmallVec::new);
        let mut cut = Cut { sums, own: SmallVec::new(), pending: SmallVec::new(), parts: 0, shared: false };
        let kind = via.unwrap_or_else(|| self.kind());
        for transfer in transfers {
            let mut done = 0;
            while done < transfer.len {
                let (region, room) = media.region(transfer.at.add(done as u64));
                let len = room.min((transfer.len - done) as u64) as usize;
                self.cut(&mut cut, kind, region, transfer.part(done, len), waits);
                done += len;
            }
        }
        let Cut { sums, mut own, pending, shared, .. } = cut;
        let mut landing = Landing { mover: self, flight: Flight { sums, ..Flight::default() } };
        let last = pending.len().wrapping_sub(1);
        for (n, mut batch) in pending.into_iter().enumerate() {
            // SAFETY: the caller's.
            match unsafe { self.hand_over(media, &batch, crc, waits && n == last) } {
                Some((ticket, channel, expected)) => {
                    (batch.ticket, batch.channel, batch.expected) = (Some(ticket), channel, Some(expected));
                    landing.flight.batches.push(batch);
                }
                // With checksums it is one transfer; without them nobody looks at the place.
                None => own.extend(batch.transfers.iter().map(|transfer| (*transfer, batch.sum))),
            }
        }
        // Who waits does the first itself, where it helps; the others begin beside it.
        let mut own_turn = waits;
        self.for_each_under_way(&landing.flight, |engine, ticket| {
            if !std::mem::take(&mut own_turn) {
                engine.start(ticket);
            }
        });
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
    pub(crate) fn outlives(&self, via: Option<EngineKind>, bytes: usize, waits: bool) -> bool {
        let kind = via.unwrap_or_else(|| self.kind());
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
        via: Option<EngineKind>,
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
            self.await_flight(&mut landing.flight, holding);
            self.end(media, &mut landing.flight)?;
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
        let share = if shares { scheduler.share(part.len) } else { 0.0 };
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
        for at in (from..until).step_by(batch_bytes_max) {
            let len = (until - at).min(batch_bytes_max);
            cut.hand_over(kind, region, part.part(at, len));
        }
        cut.own(part.part(until, part.len - until));
    }

    /// None where the engine takes nothing.
    ///
    /// # Safety
    ///
    /// As for [`begin`](Mover::begin).
    unsafe fn hand_over(
        &self,
        media: &M,
        batch: &Batch,
        crc: bool,
        helps: bool,
    ) -> Option<(Ticket, usize, Expected)> {
        let Running { engine, scheduler, limits, capability } = self.running(batch.kind)?;
        let to_media = batch.transfers[0].is_to_media();
        let direction = if to_media { Direction::Write } else { Direction::Read };
        let crc = (crc && to_media).then_some(0);
        let ticket = scheduler.claim(batch.region, &capability, limits).and_then(|claim| {
            let (region, channel) = (batch.region, claim.channel);
            // SAFETY: the caller vouches for the bytes and for media until the flight has ended.
            let ticket = unsafe {
                match helps {
                    true => engine.submit_and_help(media, region, channel, &batch.transfers, crc),
                    false => engine.submit(media, region, channel, &batch.transfers, crc),
                }
            };
            let ticket = ticket.ok()?;
            claim.keep();
            Some((ticket, channel, scheduler.expect((region, channel), direction, batch.bytes())))
        });
        if ticket.is_none() {
            self.count_busy();
        }
        ticket
    }

    /// Whether all of it has ended, and is to be [ended](Mover::end) without waiting.
    pub(crate) fn has_ended(&self, flight: &mut Flight) -> bool {
        let ended = flight.batches.iter().all(|batch| match (&batch.ticket, self.engine(batch.kind)) {
            (Some(ticket), Some(engine)) => engine.poll(ticket),
            _ => true,
        });
        if !ended {
            flight.looked = Some(Instant::now());
        }
        ended
    }

    /// Waits until the engines are through, and changes nothing: it is to be [ended](Mover::end) then. In a uthread that
    /// holds nothing others run meanwhile.
    pub(super) fn await_flight(&self, flight: &mut Flight, holding: Holding) {
        for batch in &mut flight.batches {
            if let (Some(ticket), Some(engine)) = (&batch.ticket, self.engine(batch.kind)) {
                engine.help(ticket);
                let due = batch.expected.and_then(|expected| expected.due);
                batch.seen = Some(until(&Awaited(engine, ticket), due, holding));
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

    /// Whether somebody rings for all that is under way.
    pub(crate) fn rings(&self, flight: &Flight) -> bool {
        let mut rings = true;
        self.for_each_under_way(flight, |engine, ticket| rings &= engine.bell(ticket).is_some());
        rings
    }

    /// Waits for the engines, and does what they left undone. Afterwards nobody uses the bytes any more.
    ///
    /// # Safety
    ///
    /// The flight was begun with this mover and these media, and its bytes are there.
    pub(crate) unsafe fn end(&self, media: &M, flight: &mut Flight) -> Result<(), Fault> {
        for n in 0..flight.batches.len() {
            let batch = &mut flight.batches[n];
            let Some(ticket) = batch.ticket.take() else { continue };
            let run = self.running(batch.kind).expect("it took the batch");
            let told = run.engine.bell(&ticket).is_some();
            let completion = run.engine.wait(ticket);
            run.scheduler.give_back(batch.region);
            let bytes = batch.bytes();
            if let (Some((whole, own, own_ns)), 1) = (flight.shared.take(), flight.batches.len())
                && own + completion.bytes == whole as u64
            {
                run.scheduler.shared(whole, (completion.bytes, completion.nanoseconds), (own, own_ns));
            }
            let batch = &mut flight.batches[n];
            let (mut done, sum, to_media) =
                (self.ended(&completion, bytes), batch.sum, batch.transfers[0].is_to_media());
            let end = End { completion, seen: batch.seen(flight.looked), told };
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
        flight.fault.map_or(Ok(()), Err)
    }
}

impl Flight {
    /// The region and the channel of its first batch: what is handed over there ends in turn, more or less.
    pub(crate) fn channel(&self) -> (usize, usize) {
        self.batches.first().map_or((0, 0), |batch| (batch.region, batch.channel))
    }

    /// Whether all of it had ended when it was handed over. Asks no engine.
    pub(crate) fn ended_at_once(&self) -> bool {
        self.batches
            .iter()
            .all(|batch| batch.ticket.as_ref().is_none_or(|ticket| ticket.completion().is_some()))
    }

    /// Whether engines have nothing of it: it ends without waiting.
    pub(crate) fn is_over(&self) -> bool {
        self.batches.iter().all(|batch| batch.ticket.is_none())
    }

    /// When the last of it is expected to end; none where nobody knows.
    pub(crate) fn due(&self) -> Option<Instant> {
        let dues = self.batches.iter().map(|batch| batch.expected.and_then(|expected| expected.due));
        dues.collect::<Option<SmallVec<[Instant; 4]>>>()?.into_iter().max()
    }

    /// How somebody who waited for all of it saw its end.
    pub(super) fn was_seen(&mut self, seen: Seen) {
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
