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

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use crossbeam_utils::Backoff;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::completion::{Completion, Status};
use super::dsa::{self, BATCH_MAX, Descriptor, Record, TRANSFER_BYTES_MAX};
use super::engine_port::{
    Capability, Dram, Durability, Engine, Place, RawTransfer, Refused, Route, Routes, Ticket,
};
use super::profile::SMALLEST_BYTES;
use crate::media::{ByAddress, LINE, Media};

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

    fn transfer_bytes(&self) -> usize {
        self.transfer_bytes_max.clamp(1, TRANSFER_BYTES_MAX)
    }

    fn takes_batch(&self, count: usize) -> bool {
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

    /// Somebody waits in vain since `since`. True: the channel is closed, and its device follows no address any more that it was
    /// given there; what has no status in its record was not done.
    fn give_up(&self, _channel: usize, _since: Instant) -> bool {
        false
    }

    /// From now on no descriptor begins; those under way go on to their end where the device cannot rest in the middle,
    /// and rest when this returns where it can.
    fn suspend(&self, channel: usize);

    fn resume(&self, channel: usize);
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

struct Slot(UnsafeCell<Memory>);

/// What a device reads and writes of one request, and what the engine has to know of it.
#[repr(C, align(64))]
struct Memory {
    list: [Descriptor; BATCH_MAX],
    batch_record: Record,
    records: [Record; BATCH_MAX],
    request: Request,
}

#[derive(Clone, Copy)]
struct Request {
    channel: usize,
    /// Descriptors that copy, and how many of them the device has.
    count: usize,
    taken: usize,
    /// They went as one batch, which ends with a record of its own.
    batch: bool,
    checksum: Checksum,
    durability: Durability,
    begun: Instant,
}

/// Who makes it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checksum {
    None,
    Device,
    /// From this seed.
    Cpu(u32),
}

// SAFETY: invariant 1.
unsafe impl Sync for Slot {}
// SAFETY: invariant 1.
unsafe impl Send for Slot {}

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
        let request = Request {
            channel: 0,
            count: 0,
            taken: 0,
            batch: false,
            checksum: Checksum::None,
            durability: Durability::OnCompletion,
            begun: Instant::now(),
        };
        let memory = || Memory {
            list: [Descriptor::default(); BATCH_MAX],
            batch_record: Record::default(),
            records: [Record::default(); BATCH_MAX],
            request,
        };
        Dsa {
            gone: offers.iter().map(|_| AtomicBool::new(false)).collect(),
            near: Box::default(),
            capability,
            slots: (0..SLOTS).map(|_| Slot(UnsafeCell::new(memory()))).collect(),
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
        let count = self.offers.len();
        let near = self.near.get(region);
        let first = near.map_or(turn % count, |near| near[turn % near.len()]);
        std::iter::once(first).chain((1..count).map(move |n| (first + n) % count))
    }

    /// The status bytes that have to be written before a request has ended.
    fn statuses(&self, slot: usize) -> impl Iterator<Item = &AtomicU8> {
        let memory = self.slots[slot].0.get();
        let request = self.request(slot);
        let last = if request.batch { 1 } else { request.taken };
        (0..last).map(move |n| {
            // SAFETY: the slot is there as long as the engine; status bytes are touched as atomics alone while the device may write them.
            unsafe {
                let record = match request.batch {
                    true => &raw mut (*memory).batch_record,
                    false => (&raw mut (*memory).records).cast::<Record>().add(n),
                };
                AtomicU8::from_ptr(record.cast())
            }
        })
    }

    fn has_ended(&self, slot: usize) -> bool {
        self.statuses(slot).all(|status| status.load(Ordering::Acquire) != dsa::NONE)
    }

    /// Whether no record will be written any more.
    fn is_given_up(&self, slot: usize) -> bool {
        let request = self.request(slot);
        let given_up = self.portal.give_up(request.channel, request.begun);
        if given_up {
            self.gone[request.channel].store(true, Ordering::Relaxed);
        }
        given_up
    }

    fn request(&self, slot: usize) -> Request {
        // SAFETY: the slot is there as long as the engine; the device has nothing to do with the request, which is its
        // caller's until it has waited.
        unsafe { (&raw const (*self.slots[slot].0.get()).request).read() }
    }

    /// The CRC-32C, continued, of what a request copied or is to copy: `bytes` of it. None where the source cannot
    /// be read.
    ///
    /// # Safety
    ///
    /// The slot's list is the caller's, and whoever submitted vouches for the bytes.
    unsafe fn checksum(&self, slot: usize, count: usize, mut bytes: u64, seed: u32) -> Option<u32> {
        let mut crc = seed;
        let list = self.slots[slot].0.get().cast::<Descriptor>();
        for n in 0..count {
            // SAFETY: the caller's; the list is the first field of a slot's memory.
            let descriptor = unsafe { list.add(n).read() };
            let len = bytes.min(descriptor.size.into());
            bytes -= len;
            let from = std::ptr::with_exposed_provenance(descriptor.src_addr as usize);
            // SAFETY: the caller's: the bytes are there and do not change until the ticket has been waited for.
            crc = unsafe { self.copier.crc32c(from, len as usize, crc) }.ok()?;
        }
        Some(crc)
    }
}

const _: () = assert!(offset_of!(Memory, list) == 0);

/// The descriptors of a batch, whose records are at `memory`, as many as a slot has room for; none where media is mapped
/// nowhere.
fn descriptors<M: Media>(
    memory: *mut Memory,
    media: &M,
    batch: &[RawTransfer],
    offer: &Offer,
) -> Option<(SmallVec<[Descriptor; 4]>, Durability)> {
    let records = memory.expose_provenance() as u64 + offset_of!(Memory, records) as u64;
    let into_caches = if offer.cache_control { dsa::FLAG_CC } else { 0 };
    let blocks = if offer.block_on_fault { dsa::FLAG_BOF } else { 0 };
    let mut list: SmallVec<[Descriptor; 4]> = SmallVec::new();
    let mut durability = Durability::OnCompletion;
    for transfer in batch {
        let mapped = media.mapped(transfer.at, transfer.len)?.expose_provenance() as u64;
        let (from, to, flags) = match transfer.dram {
            Dram::From(from, Route::PastCaches) if offer.routes.past_caches => {
                (from.expose_provenance() as u64, mapped, dsa::FLAG_DRDBK)
            }
            Dram::From(from, _) => {
                durability = Durability::WriteBack;
                (from.expose_provenance() as u64, mapped, into_caches)
            }
            Dram::To(to) => (mapped, to.expose_provenance() as u64, into_caches),
        };
        for done in (0..transfer.len).step_by(offer.transfer_bytes()) {
            if list.len() == BATCH_MAX {
                return Some((list, durability));
            }
            let len = (transfer.len - done).min(offer.transfer_bytes()) as u32;
            let copy = Descriptor::copy(from + done as u64, to + done as u64, len, flags | blocks);
            let record = records + (list.len() * size_of::<Record>()) as u64;
            list.push(Descriptor { completion_addr: record, ..copy });
        }
    }
    Some((list, durability))
}

/// Puts a request into its slot; the batch's descriptor, for where it is to be submitted as one.
///
/// # Safety
///
/// The slot at `memory` is the caller's alone.
unsafe fn fill(memory: *mut Memory, list: &[Descriptor], request: Request) -> Descriptor {
    let at = memory.expose_provenance() as u64;
    let mut batch = Descriptor::batch(at + offset_of!(Memory, list) as u64, list.len() as u32);
    batch.completion_addr = at + offset_of!(Memory, batch_record) as u64;
    // SAFETY: the caller's. Through the raw pointer alone, which is the one that the device's addresses come from.
    unsafe {
        (&raw mut (*memory).batch_record).write(Record::default());
        (&raw mut (*memory).records).write([Record::default(); BATCH_MAX]);
        (&raw mut (*memory).list).cast::<Descriptor>().copy_from_nonoverlapping(list.as_ptr(), list.len());
        (&raw mut (*memory).request).write(request);
    }
    batch
}

impl Memory {
    /// Once the request has ended: the copies that count are those before the first that did not end well.
    fn completion(&self) -> Completion {
        let Request { count, taken, checksum, durability, begun, .. } = self.request;
        let (mut status, mut bytes, mut crc) = (Status::Done, 0u64, 0);
        for (descriptor, record) in self.list.iter().zip(&self.records).take(taken) {
            let (ended, done) = record.outcome(descriptor.size);
            // A device's checksum of less than all of a copy is nobody's.
            let counts = ended == Status::Done || checksum != Checksum::Device;
            if counts {
                bytes += u64::from(done);
                crc = record.crc as u32;
            }
            if ended != Status::Done {
                status = Status::Failed;
                break;
            }
        }
        if taken < count {
            status = Status::Failed;
        }
        if status == Status::Failed && bytes > 0 {
            status = Status::Partial;
        }
        Completion { status, bytes, crc, durability, nanoseconds: begun.elapsed().as_nanos() as u64 }
    }
}

impl<P: Portal> Dsa<P> {
    /// Hands a request over to one channel.
    ///
    /// # Safety
    ///
    /// As for [`Engine::submit`]; the slot is the caller's alone.
    unsafe fn submit_to<M: Media>(
        &self,
        channel: usize,
        slot: usize,
        media: &M,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<(), Refused> {
        let (memory, offer) = (self.slots[slot].0.get(), &self.offers[channel]);
        let (mut list, durability) = descriptors(memory, media, batch, offer).ok_or(Refused::Gone)?;
        let count = list.len();
        let as_batch = offer.takes_batch(count);
        // The seeds of later copies are in the records of the earlier ones, and only in a batch those end first.
        let checksum = match crc {
            None => Checksum::None,
            Some(_) if offer.copy_crc && (count == 1 || as_batch) => Checksum::Device,
            Some(seed) => Checksum::Cpu(seed),
        };
        if checksum == Checksum::Device {
            let mut before = None;
            for descriptor in &mut list {
                *descriptor = descriptor.with_crc(crc.unwrap_or(0));
                if let Some(record) = before.replace(descriptor.completion_addr) {
                    *descriptor = descriptor.seeded_from(record);
                }
            }
        }
        let taken = if as_batch { count } else { 0 };
        let request =
            Request { channel, count, taken, batch: as_batch, checksum, durability, begun: Instant::now() };
        // SAFETY: the slot is the caller's alone (invariant 1), and the device's from the submission on; the caller
        // vouches for the bytes and for media.
        let taken = unsafe {
            let descriptor = fill(memory, &list, request);
            let submitted: &[Descriptor] = if as_batch { &[descriptor] } else { &list };
            self.portal.submit(channel, submitted)
        };
        if taken.count == 0 {
            return Err(taken.rest.unwrap_or(Refused::Full));
        }
        if !as_batch {
            // SAFETY: the device has nothing to do with this field.
            unsafe { (&raw mut (*memory).request.taken).write(taken.count) };
        }
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
        let slot = self.free.lock().pop().ok_or(Refused::Full)?;
        let mut refused = Refused::Gone;
        let mapped = batch.iter().all(|transfer| media.mapped(transfer.at, transfer.len).is_some());
        for channel in self.channels(region, channel) {
            if !mapped || self.gone[channel].load(Ordering::Relaxed) {
                continue;
            }
            // SAFETY: the slot was free, so it is this caller's alone; the caller vouches for the rest.
            match unsafe { self.submit_to(channel, slot, media, batch, crc) } {
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
            Place::Slot { slot, .. } => self.has_ended(slot) || self.is_given_up(slot),
            Place::Ended(_) => true,
        }
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        let slot = match ticket.0 {
            Place::Slot { slot, .. } => slot,
            Place::Ended(completion) => return completion,
        };
        let memory = self.slots[slot].0.get();
        let request = self.request(slot);
        // Beside the device, if it comes to its end.
        let early = match request.checksum {
            // SAFETY: the list is only read by the device; whoever submitted vouches for the bytes until this returns.
            Checksum::Cpu(seed) => unsafe { self.checksum(slot, request.taken, u64::MAX, seed) },
            _ => None,
        };
        let backoff = Backoff::new();
        while !(self.has_ended(slot) || backoff.is_completed() && self.is_given_up(slot)) {
            backoff.snooze();
        }
        // SAFETY: the device is through with the slot, so it is this caller's (invariant 1); Acquire shows its records.
        let mut completion = unsafe { (*memory).completion() };
        if let Checksum::Cpu(seed) = request.checksum {
            // SAFETY: as above.
            let of_done = || unsafe { self.checksum(slot, request.taken, completion.bytes, seed) };
            let crc = if completion.status == Status::Done { early } else { of_done() };
            match crc {
                Some(crc) => completion.crc = crc,
                // The caller's CPU meets the same fault, and says where.
                None => {
                    completion = Completion { nanoseconds: completion.nanoseconds, ..Completion::failed() }
                }
            }
        }
        self.portal.ended(request.channel, if request.batch { 1 } else { request.taken });
        self.free.lock().push(slot);
        completion
    }

    /// Of all regions: a device's channels serve any.
    fn suspend(&self, _region: usize) {
        (0..self.offers.len()).for_each(|channel| self.portal.suspend(channel));
    }

    fn resume(&self, _region: usize) {
        (0..self.offers.len()).for_each(|channel| self.portal.resume(channel));
    }
}
