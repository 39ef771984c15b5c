//! Engines that are told by descriptors what to copy: the memory for those is made once, a request is one submission,
//! be it one descriptor or a batch, and whoever waits looks at completion records (Fastmove §5.1).
//!
//! Queues differ: one takes no batches, another makes no checksums, a third cannot say when a store has reached memory.
//! What a queue does not offer is done another way: descriptors one by one, the checksum by the CPU while the device
//! copies, stores into the caches. A queue that is gone is passed over; when all are, the engine takes nothing.
//!
//! **Invariants.**
//! 1. A slot belongs, in this order and to one at a time: to nobody (in `free`), to a caller that fills it, to the device
//!    behind the portal, and, once the status of its last record is written, to the caller that waits for it. A device
//!    that stays silent is given up: when `give_up` has returned it follows no address any more.
//! 2. The device follows addresses of a slot only while it has it: meanwhile who submitted vouches for the bytes and for
//!    media, and waits for the ticket; the portal, which waits for its device, is dropped before the slots.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::completion::{Completion, Status};
use super::dsa::{BATCH_MAX, Descriptor, TRANSFER_BYTES_MAX};
use super::engine_dsa_slot::{Request, Slot};
use super::engine_port::{Awaited, Capability, Engine, Place, RawTransfer, Refused, Routes, Ticket};
use super::manager::Channels;
use super::profile::SMALLEST_BYTES;
use crate::media::{ByAddress, LINE, Media};
use crate::wait::{Holding, until};

/// Requests under way at most.
const SLOTS: usize = 128;

/// What a portal accepted of several descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// So many, from the first one on.
    pub count: usize,
    /// Why not the others: later perhaps, or never again.
    pub rest: Option<Refused>,
}

/// What one channel of a portal can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Bytes of one descriptor at most.
    pub transfer_bytes_max: usize,
    /// Descriptors of one batch at most; less than 2: it takes no batches.
    pub batch_max: usize,
    /// Past the caches only where the device reads back what it stored: for otherwise nobody knows when that has
    /// reached memory.
    pub routes: Routes,
    /// It can be told to store into the caches; otherwise it does as it likes.
    pub cache_control: bool,
    pub copy_crc: bool,
    /// It waits for pages that are not there.
    pub block_on_fault: bool,
}

impl Offer {
    /// All that this program makes use of.
    pub const ALL: Offer = Offer {
        transfer_bytes_max: TRANSFER_BYTES_MAX,
        batch_max: BATCH_MAX,
        routes: Routes::BOTH,
        cache_control: true,
        copy_crc: true,
        block_on_fault: true,
    };

    pub(super) fn transfer_bytes(&self) -> usize {
        self.transfer_bytes_max.clamp(1, TRANSFER_BYTES_MAX)
    }

    pub(super) fn takes_batch(&self, count: usize) -> bool {
        (2..=self.batch_max).contains(&count)
    }
}

/// Where a device takes descriptors.
pub trait Portal: Send + Sync + 'static {
    /// One at least.
    fn channels(&self) -> usize;

    fn offer(&self, channel: usize) -> Offer;

    /// The NUMA node of a channel's device, where that is known.
    fn node(&self, _channel: usize) -> Option<u32> {
        None
    }

    /// Hands descriptors over, as many as are accepted.
    ///
    /// # Safety
    ///
    /// For each of them, until the status of its completion record is written, or [`give_up`](Portal::give_up) has
    /// returned true: all ranges that it names, and those that its batch names, are mapped; what is copied from is not
    /// changed; what is copied to, records included, is nobody else's.
    unsafe fn submit(&self, channel: usize, descriptors: &[Descriptor]) -> Taken;

    /// What happened, where it takes nothing any more.
    fn why_gone(&self) -> String {
        "its device is gone".to_owned()
    }

    /// So many descriptors of those that were taken have ended, as their records say.
    fn ended(&self, _channel: usize, _descriptors: usize) {}

    /// Somebody waits in vain since `since`. True: the channel is closed, and its device follows no address any more that
    /// it was given there; what has no status in its record was not done.
    fn give_up(&self, _channel: usize, _since: Instant) -> bool {
        false
    }

    /// From now on no descriptor begins; those under way go on to their end where the device cannot rest in the middle,
    /// and rest when this returns where it can.
    fn suspend(&self, channel: usize);

    fn resume(&self, channel: usize);

    /// Whether channels can [`rest`](Portal::rest).
    fn can_rest(&self) -> bool {
        false
    }

    /// As `suspend`, without waiting for what is under way; descriptors are accepted meanwhile. Beside `suspend`: a channel
    /// goes on when neither holds it.
    fn rest(&self, _channel: usize) {}

    fn go_on(&self, _channel: usize) {}
}

pub struct Dsa<P: Portal> {
    portal: P,
    offers: Box<[Offer]>,
    gone: Box<[AtomicBool]>,
    /// By region, the channels whose device is on its node; where there are none, all.
    near: Box<[Box<[usize]>]>,
    capability: Capability,
    slots: Box<[Slot]>,
    free: Mutex<Vec<usize>>,
    said_gone: AtomicBool,
    copier: ByAddress,
}

impl<P: Portal> Dsa<P> {
    /// Stores go past the caches or into them, as each channel offers: an engine that is to be told copy by copy needs
    /// channels that all can do the same.
    pub fn new(portal: P) -> Dsa<P> {
        let offers: Box<[Offer]> = (0..portal.channels()).map(|channel| portal.offer(channel)).collect();
        let routes = Routes {
            past_caches: offers.iter().all(|offer| offer.routes.past_caches),
            into_caches: offers.iter().all(|offer| offer.routes.into_caches),
        };
        assert!(routes.past_caches || routes.into_caches, "the channels have no route in common");
        let one_request = |offer: &Offer| offer.transfer_bytes() * offer.batch_max.clamp(1, BATCH_MAX);
        let capability = Capability {
            smallest_bytes: SMALLEST_BYTES,
            largest_bytes: offers.iter().map(one_request).min().expect("a portal has channels"),
            alignment: if routes.past_caches { LINE } else { 1 },
            routes,
            shares_reads: true,
            channels: offers.len(),
        };
        Dsa {
            gone: offers.iter().map(|_| AtomicBool::new(false)).collect(),
            near: Box::default(),
            capability,
            slots: (0..SLOTS).map(|_| Slot::new()).collect(),
            free: Mutex::new((0..SLOTS).collect()),
            said_gone: AtomicBool::new(false),
            copier: ByAddress::default(),
            offers,
            portal,
        }
    }

    /// Prefers, for each region, the devices on its node.
    pub fn near(self, regions: &[Option<u32>]) -> Dsa<P> {
        let all = 0..self.offers.len();
        let of = |node: &Option<u32>| {
            let there = |channel: &usize| node.is_some() && self.portal.node(*channel) == *node;
            let near: Box<[usize]> = all.clone().filter(there).collect();
            if near.is_empty() { all.clone().collect() } else { near }
        };
        Dsa { near: regions.iter().map(of).collect(), ..self }
    }

    pub fn portal(&self) -> &P {
        &self.portal
    }

    /// The channels to try for a region, the one whose turn it is first.
    fn channels(&self, region: usize, turn: usize) -> impl Iterator<Item = usize> + '_ {
        let (count, first) = (self.offers.len(), self.numbered(region, turn));
        std::iter::once(first).chain((1..count).map(move |n| (first + n) % count))
    }

    /// The portal's channel whose turn it is for a region.
    fn numbered(&self, region: usize, turn: usize) -> usize {
        self.near.get(region).map_or(turn % self.offers.len(), |near| near[turn % near.len()])
    }

    /// Whether no record will be written any more.
    fn is_given_up(&self, slot: &Slot) -> bool {
        let Request { channel, begun, .. } = slot.request();
        let given_up = self.portal.give_up(channel, begun);
        if given_up {
            self.gone[channel].store(true, Ordering::Relaxed);
        }
        given_up
    }

    /// Hands a request over to one channel.
    ///
    /// # Safety
    ///
    /// As for [`Engine::submit`]; the slot is the caller's alone.
    unsafe fn submit_to<M: Media>(
        &self,
        channel: usize,
        slot: &Slot,
        media: &M,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<(), Refused> {
        let offer = (channel, &self.offers[channel]);
        // SAFETY: the slot is the caller's alone (invariant 1), and the device's from the submission on; the caller vouches
        // for the bytes and for media.
        let taken = unsafe {
            let filled = slot.fill(media, batch, crc, offer).ok_or(Refused::Gone)?;
            self.portal.submit(channel, &filled)
        };
        if taken.count == 0 {
            return Err(taken.rest.unwrap_or(Refused::Full));
        }
        // The device copies meanwhile.
        // SAFETY: it is the caller's, but for what the device has; the caller vouches for the bytes.
        unsafe { slot.handed_over(taken.count, &self.copier) };
        if taken.rest == Some(Refused::Gone) {
            self.gone[channel].store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl<M: Media, P: Portal> Engine<M> for Dsa<P> {
    fn capability(&self) -> Capability {
        self.capability
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        if batch.iter().all(|transfer| transfer.len == 0) {
            let crc = crc.unwrap_or(0);
            return Ok(Ticket::ended(Completion { status: Status::Done, crc, ..Completion::failed() }));
        }
        let slot = self.free.lock().pop().ok_or(Refused::Full)?;
        let mut refused = Refused::Gone;
        let mapped = batch.iter().all(|transfer| media.mapped(transfer.at, transfer.len).is_some());
        for channel in self.channels(region, channel) {
            if !mapped || self.gone[channel].load(Ordering::Relaxed) {
                continue;
            }
            // SAFETY: the slot was free, so it is this caller's alone; the caller vouches for the rest.
            match unsafe { self.submit_to(channel, &self.slots[slot], media, batch, crc) } {
                Ok(()) => return Ok(Ticket(Place::Slot { region: 0, slot })),
                Err(Refused::Gone) => {
                    self.gone[channel].store(true, Ordering::Relaxed);
                }
                // What is full is left to the CPU: another channel has copies of its own (EasyIO §4.4).
                Err(Refused::Full) => {
                    refused = Refused::Full;
                    break;
                }
            }
        }
        self.free.lock().push(slot);
        if refused == Refused::Gone && !self.said_gone.swap(true, Ordering::Relaxed) {
            let why = if mapped { self.portal.why_gone() } else { "this media has no addresses".to_owned() };
            tracing::warn!("a copy engine takes nothing any more ({why}): from now on the CPU copies");
        }
        Err(refused)
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        match ticket.0 {
            Place::Slot { slot, .. } => {
                let slot = &self.slots[slot];
                slot.has_ended() || self.is_given_up(slot)
            }
            Place::Ended(_) => true,
        }
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        let place = match ticket.0 {
            Place::Slot { slot, .. } => slot,
            Place::Ended(completion) => return completion,
        };
        // Nobody is told: whoever waits looks.
        until(&Awaited::<M>(self, &ticket), None, Holding::Something);
        let slot = &self.slots[place];
        // SAFETY: the ticket makes the request this caller's, and whoever submitted vouches for the bytes until this returns;
        // the device is through with the slot (invariant 1), and Acquire shows its records.
        let completion = unsafe { slot.completion(&self.copier) };
        let request = slot.request();
        self.portal.ended(request.channel, request.submitted());
        self.free.lock().push(place);
        completion
    }

    /// Of all regions: a device's channels serve any.
    fn suspend(&self, _region: usize) {
        (0..self.offers.len()).for_each(|channel| self.portal.suspend(channel));
    }

    fn resume(&self, _region: usize) {
        (0..self.offers.len()).for_each(|channel| self.portal.resume(channel));
    }

    fn channels(&self, region: usize) -> Channels {
        let can_rest = self.portal.can_rest();
        match self.near.get(region) {
            None => Channels { group: 0, count: self.offers.len(), can_rest, bounds_itself: false },
            Some(near) => {
                let group = self.near.iter().position(|of| of == near).unwrap_or(region);
                Channels { group, count: near.len(), can_rest, bounds_itself: false }
            }
        }
    }

    fn rest(&self, region: usize, channel: usize) {
        self.portal.rest(self.numbered(region, channel));
    }

    fn go_on(&self, region: usize, channel: usize) {
        self.portal.go_on(self.numbered(region, channel));
    }
}
