//! What a device reads and writes of one request: descriptors, records, and beside them what the engine has to know of
//! it. Made once; who has it when is invariant 1 of `engine_dsa`.
//!
//! What the device reports is not trusted further than it can be: no more bytes count than were asked for, of a checksum
//! only whole descriptors do, and of several copies those before the first that did not end well.

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use smallvec::SmallVec;

use super::completion::{Completion, Status};
use super::dsa::{self, BATCH_MAX, Descriptor, Record};
use super::engine_dsa::Offer;
use super::engine_port::{Dram, Durability, RawTransfer, Route};
use crate::media::{ByAddress, Media};

pub(super) struct Slot(UnsafeCell<Memory>);

#[repr(C, align(64))]
struct Memory {
    list: [Descriptor; BATCH_MAX],
    batch_record: Record,
    records: [Record; BATCH_MAX],
    request: Request,
}

#[derive(Clone, Copy)]
pub(super) struct Request {
    pub channel: usize,
    /// Descriptors that copy; how many of them the device has; and whether they are all of the request.
    count: usize,
    taken: usize,
    whole: bool,
    /// They went as one batch, which ends with a record of its own.
    batch: bool,
    checksum: Checksum,
    durability: Durability,
    /// Of all of the request, where that is the CPU's to make: none where the source cannot be read.
    early: Option<u32>,
    /// When the device had it.
    pub begun: Instant,
}

/// Who makes it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checksum {
    None,
    Device,
    /// From this seed.
    Cpu(u32),
}

impl Request {
    /// Descriptors that were submitted as such.
    pub fn submitted(&self) -> usize {
        if self.batch { 1 } else { self.taken }
    }
}

/// What is to be submitted: one, where they are a batch.
pub(super) type Filled = SmallVec<[Descriptor; 4]>;

// SAFETY: invariant 1 of `engine_dsa`.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    pub(super) fn new() -> Slot {
        let request = Request {
            channel: 0,
            count: 0,
            taken: 0,
            whole: true,
            batch: false,
            checksum: Checksum::None,
            durability: Durability::OnCompletion,
            early: None,
            begun: Instant::now(),
        };
        Slot(UnsafeCell::new(Memory {
            list: [Descriptor::default(); BATCH_MAX],
            batch_record: Record::default(),
            records: [Record::default(); BATCH_MAX],
            request,
        }))
    }

    /// Puts a request into the slot, in a way that the channel offers; what is to be submitted of it. None where media is
    /// mapped nowhere.
    ///
    /// # Safety
    ///
    /// The slot is the caller's alone.
    pub(super) unsafe fn fill<M: Media>(
        &self,
        media: &M,
        batch: &[RawTransfer],
        crc: Option<u32>,
        (channel, offer): (usize, &Offer),
    ) -> Option<Filled> {
        let memory = self.0.get();
        let at = memory.expose_provenance() as u64;
        let (mut list, durability, whole) =
            copies(at + offset_of!(Memory, records) as u64, media, batch, offer)?;
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
        let begun = Instant::now();
        let (batch, early) = (as_batch, None);
        let request = Request { channel, count, taken: 0, whole, batch, checksum, durability, early, begun };
        // SAFETY: the caller's. Through the raw pointer alone, which is the one that the device's addresses come from.
        unsafe {
            (&raw mut (*memory).batch_record).write(Record::default());
            (&raw mut (*memory).records).write([Record::default(); BATCH_MAX]);
            (&raw mut (*memory).list).cast::<Descriptor>().copy_from_nonoverlapping(list.as_ptr(), count);
            (&raw mut (*memory).request).write(request);
        }
        if as_batch {
            let batch = Descriptor::batch(at + offset_of!(Memory, list) as u64, count as u32);
            let record = at + offset_of!(Memory, batch_record) as u64;
            list = SmallVec::from_slice(&[Descriptor { completion_addr: record, ..batch }]);
        }
        Some(list)
    }

    /// The device has so many of what was to be submitted, one at least. Makes the checksum of all of them, where that is the
    /// CPU's to make: in the time in which the device copies.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, but for what the device has of it; whoever submitted vouches for the bytes.
    pub(super) unsafe fn handed_over(&self, submitted: usize, copier: &ByAddress) {
        let memory = self.0.get();
        let request = self.request();
        let taken = if request.batch { request.count } else { submitted };
        let request = Request { taken, begun: Instant::now(), ..request };
        // SAFETY: the device has nothing to do with the request.
        unsafe { (&raw mut (*memory).request).write(request) };
        if let Checksum::Cpu(seed) = request.checksum {
            // SAFETY: the caller's; and as above.
            unsafe {
                let early = self.checksum(copier, u64::MAX, seed);
                (&raw mut (*memory).request).write(Request { early, ..request });
            }
        }
    }

    pub(super) fn request(&self) -> Request {
        // SAFETY: the device has nothing to do with the request, which is its caller's until it has waited.
        unsafe { (&raw const (*self.0.get()).request).read() }
    }

    /// Whether the records that the device writes last are written: then all are.
    pub(super) fn has_ended(&self) -> bool {
        let (memory, request) = (self.0.get(), self.request());
        (0..request.submitted()).all(|n| {
            // SAFETY: status bytes are touched as atomics alone while the device may write them.
            let status = unsafe {
                let record = match request.batch {
                    true => &raw mut (*memory).batch_record,
                    false => (&raw mut (*memory).records).cast::<Record>().add(n),
                };
                AtomicU8::from_ptr(record.cast())
            };
            status.load(Ordering::Acquire) != dsa::NONE
        })
    }

    /// The CRC-32C, continued, of the first `bytes` of a request. None where the source cannot be read.
    ///
    /// # Safety
    ///
    /// The request is the caller's, and whoever submitted vouches for the bytes.
    unsafe fn checksum(&self, copier: &ByAddress, mut bytes: u64, seed: u32) -> Option<u32> {
        let mut crc = seed;
        for n in 0..self.request().taken {
            // SAFETY: of the list the device reads only.
            let descriptor = unsafe { (&raw const (*self.0.get()).list).cast::<Descriptor>().add(n).read() };
            let len = bytes.min(descriptor.size.into());
            bytes -= len;
            let from = std::ptr::with_exposed_provenance(descriptor.src_addr as usize);
            // SAFETY: the caller's: the bytes are there and do not change until the ticket has been waited for.
            crc = unsafe { copier.crc32c(from, len as usize, crc) }.ok()?;
        }
        Some(crc)
    }

    /// How it ended.
    ///
    /// # Safety
    ///
    /// The device is through with the slot; the request is the caller's, and whoever submitted vouches for the bytes.
    pub(super) unsafe fn completion(&self, copier: &ByAddress) -> Completion {
        // SAFETY: the slot is the caller's.
        let completion = unsafe { (*self.0.get()).completion() };
        let Request { checksum: Checksum::Cpu(seed), early, .. } = self.request() else { return completion };
        let crc = match completion.status {
            Status::Done => early,
            // SAFETY: the caller's.
            _ => unsafe { self.checksum(copier, completion.bytes, seed) },
        };
        // Where there is none, the caller's CPU meets the same fault, and says where.
        let failed = Completion { nanoseconds: completion.nanoseconds, ..Completion::failed() };
        crc.map_or(failed, |crc| Completion { crc, ..completion })
    }
}

impl Memory {
    fn completion(&self) -> Completion {
        let Request { count, taken, whole, checksum, durability, begun, .. } = self.request;
        let (mut all_well, mut bytes, mut crc) = (whole && taken == count, 0u64, 0);
        for (descriptor, record) in self.list.iter().zip(&self.records).take(taken) {
            let (ended, done) = record.outcome(descriptor.size);
            // A device's checksum of less than all of a copy is nobody's.
            if ended == Status::Done || checksum != Checksum::Device {
                bytes += u64::from(done);
                crc = record.crc as u32;
            }
            if ended != Status::Done {
                tracing::debug!("{done} of {} bytes were copied: {}", descriptor.size, record.cause());
                all_well = false;
                break;
            }
        }
        let status = match (all_well, bytes) {
            (true, _) => Status::Done,
            (false, 0) => Status::Failed,
            (false, _) => Status::Partial,
        };
        Completion { status, bytes, crc, durability, nanoseconds: begun.elapsed().as_nanos() as u64 }
    }
}

/// The descriptors of a batch, with their records from `records` on; when what they store is durable; and whether they are
/// all, for a slot has room for so many.
fn copies<M: Media>(
    records: u64,
    media: &M,
    batch: &[RawTransfer],
    offer: &Offer,
) -> Option<(Filled, Durability, bool)> {
    let into_caches = if offer.cache_control { dsa::FLAG_CC } else { 0 };
    let blocks = if offer.block_on_fault { dsa::FLAG_BOF } else { 0 };
    let (mut list, mut durability) = (Filled::new(), Durability::OnCompletion);
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
                return Some((list, durability, false));
            }
            let len = (transfer.len - done).min(offer.transfer_bytes()) as u32;
            let copy = Descriptor::copy(from + done as u64, to + done as u64, len, flags | blocks);
            let record = records + (list.len() * size_of::<Record>()) as u64;
            list.push(Descriptor { completion_addr: record, ..copy });
        }
    }
    Some((list, durability, true))
}
