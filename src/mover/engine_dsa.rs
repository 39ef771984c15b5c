//! Engines that are told by descriptors what to copy: the memory for those is made once, a request is one submission,
//! be it one descriptor or a batch, and whoever waits looks at completion records (Fastmove §5.1).
//!
//! **Invariants.**
//! 1. A slot belongs, in this order and to one at a time: to nobody (in `free`), to a caller that fills it, to the device
//!    behind the portal, and, once the status of its last record is written, to the caller that waits for it.
//! 2. The device follows addresses of a slot only while it has it: meanwhile who submitted vouches for the bytes and for
//!    media, and the slot stays: the portal, which waits for its device, is dropped before the slots.

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use crossbeam_utils::Backoff;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::completion::{Completion, Status};
use super::dsa::{self, BATCH_MAX, Descriptor, Record, TRANSFER_BYTES_MAX};
use super::engine_port::{Capability, Dram, Durability, Engine, Place, RawTransfer, Refused, Ticket};
use super::profile::SMALLEST_BYTES;
use crate::media::{LINE, Media};

/// Requests under way at most.
const SLOTS: usize = 128;

/// Whether a portal accepted a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// Later, perhaps.
    Full,
    /// Never again.
    Gone,
}

/// Where a device takes descriptors.
pub trait Portal: Send + Sync + 'static {
    fn channels(&self) -> usize;

    /// Hands a descriptor over.
    ///
    /// # Safety
    ///
    /// Until the status of its completion record is written: all ranges that it names, and those that its batch names,
    /// are mapped; what is copied from is not changed; what is copied to, records included, is nobody else's.
    unsafe fn submit(&self, channel: usize, descriptor: &Descriptor) -> Taken;

    /// Returns once the channel rests. Copies may rest in the middle.
    fn suspend(&self, channel: usize);

    fn resume(&self, channel: usize);
}

pub struct Dsa<P: Portal> {
    portal: P,
    durability: Durability,
    slots: Box<[Slot]>,
    free: Mutex<Vec<usize>>,
    said_gone: AtomicBool,
}

struct Slot(UnsafeCell<Memory>);

/// What a device reads and writes of one request.
#[repr(C, align(64))]
struct Memory {
    list: [Descriptor; BATCH_MAX],
    batch_record: Record,
    records: [Record; BATCH_MAX],
    count: usize,
    with_crc: bool,
    begun: Instant,
}

// SAFETY: invariant 1.
unsafe impl Sync for Slot {}
// SAFETY: invariant 1.
unsafe impl Send for Slot {}

impl<P: Portal> Dsa<P> {
    /// `durability` says which way the device is told to store: past the caches, or into them.
    pub fn new(portal: P, durability: Durability) -> Dsa<P> {
        let memory = || Memory {
            list: [Descriptor::default(); BATCH_MAX],
            batch_record: Record::default(),
            records: [Record::default(); BATCH_MAX],
            count: 0,
            with_crc: false,
            begun: Instant::now(),
        };
        Dsa {
            portal,
            durability,
            slots: (0..SLOTS).map(|_| Slot(UnsafeCell::new(memory()))).collect(),
            free: Mutex::new((0..SLOTS).collect()),
            said_gone: AtomicBool::new(false),
        }
    }

    pub fn portal(&self) -> &P {
        &self.portal
    }

    /// The status byte that is written last.
    fn last_status(&self, slot: usize) -> &AtomicU8 {
        let memory = self.slots[slot].0.get();
        // SAFETY: the slot is there as long as the engine; its status bytes are touched as atomics alone while the device
        // may write them.
        unsafe {
            let count = (&raw const (*memory).count).read();
            let record = match count {
                1 => &raw mut (*memory).records[0],
                _ => &raw mut (*memory).batch_record,
            };
            AtomicU8::from_ptr(record.cast())
        }
    }
}

/// The descriptors of a batch, whose records are at `memory`; none where they are too many, or media is mapped nowhere.
fn descriptors<M: Media>(
    memory: *mut Memory,
    media: &M,
    batch: &[RawTransfer],
    crc: Option<u32>,
    durability: Durability,
) -> Option<SmallVec<[Descriptor; 4]>> {
    let records = memory.expose_provenance() as u64 + offset_of!(Memory, records) as u64;
    let mut list: SmallVec<[Descriptor; 4]> = SmallVec::new();
    for transfer in batch {
        let mapped = media.mapped(transfer.at, transfer.len)?.expose_provenance() as u64;
        let (from, to, flags) = match (transfer.dram, durability) {
            (Dram::From(from), Durability::WriteBack) => {
                (from.expose_provenance() as u64, mapped, dsa::FLAG_CC)
            }
            (Dram::From(from), _) => (from.expose_provenance() as u64, mapped, dsa::FLAG_DRDBK),
            (Dram::To(to), _) => (mapped, to.expose_provenance() as u64, dsa::FLAG_CC),
        };
        for done in (0..transfer.len).step_by(TRANSFER_BYTES_MAX) {
            let len = (transfer.len - done).min(TRANSFER_BYTES_MAX) as u32;
            let copy = Descriptor::copy(from + done as u64, to + done as u64, len, flags, crc);
            let record = records + (list.len() * size_of::<Record>()) as u64;
            let seeded = if crc.is_some() && !list.is_empty() {
                copy.seeded_from(record - size_of::<Record>() as u64)
            } else {
                copy
            };
            list.push(Descriptor { completion_addr: record, ..seeded });
        }
    }
    (1..=BATCH_MAX).contains(&list.len()).then_some(list)
}

/// Puts a request into its slot; what is to be submitted of it.
///
/// # Safety
///
/// The slot at `memory` is the caller's alone.
unsafe fn fill(memory: *mut Memory, list: &[Descriptor], with_crc: bool) -> Descriptor {
    let at = memory.expose_provenance() as u64;
    let mut batch = Descriptor::batch(at + offset_of!(Memory, list) as u64, list.len() as u32);
    batch.completion_addr = at + offset_of!(Memory, batch_record) as u64;
    // SAFETY: the caller's. Through the raw pointer alone, which is the one that the device's addresses come from.
    unsafe {
        (&raw mut (*memory).batch_record).write(Record::default());
        (&raw mut (*memory).records).write([Record::default(); BATCH_MAX]);
        (&raw mut (*memory).list).cast::<Descriptor>().copy_from_nonoverlapping(list.as_ptr(), list.len());
        (&raw mut (*memory).count).write(list.len());
        (&raw mut (*memory).with_crc).write(with_crc);
        (&raw mut (*memory).begun).write(Instant::now());
    }
    if list.len() == 1 { list[0] } else { batch }
}

impl Memory {
    /// Once all records are written: the copies that count are those before the first that did not end well.
    fn completion(&self) -> Completion {
        let (mut status, mut bytes, mut crc) = (Status::Done, 0u64, 0);
        for (descriptor, record) in self.list.iter().zip(&self.records).take(self.count) {
            let (ended, done) = record.outcome(descriptor.size);
            // A checksum of less than all of a copy is nobody's.
            let counts = ended == Status::Done || !self.with_crc;
            if counts {
                bytes += u64::from(done);
                crc = record.crc as u32;
            }
            if ended != Status::Done {
                status = if bytes > 0 { Status::Partial } else { Status::Failed };
                break;
            }
        }
        let nanoseconds = self.begun.elapsed().as_nanos() as u64;
        Completion { status, bytes, crc, nanoseconds }
    }
}

impl<M: Media, P: Portal> Engine<M> for Dsa<P> {
    fn capability(&self) -> Capability {
        Capability {
            smallest_bytes: SMALLEST_BYTES,
            alignment: if self.durability == Durability::OnCompletion { LINE } else { 1 },
            durability: self.durability,
            shares_reads: true,
            channels: self.portal.channels(),
        }
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        _region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let slot = self.free.lock().pop().ok_or(Refused::Full)?;
        let memory = self.slots[slot].0.get();
        let taken = match descriptors(memory, media, batch, crc, self.durability) {
            None => Taken::Gone,
            // SAFETY: the slot was free, so it is this caller's alone (invariant 1), and the device's from the submission
            // on; the caller vouches for the bytes and for media.
            Some(list) => unsafe {
                let descriptor = fill(memory, &list, crc.is_some());
                self.portal.submit(channel, &descriptor)
            },
        };
        if taken != Taken::Yes {
            self.free.lock().push(slot);
        }
        match taken {
            Taken::Yes => Ok(Ticket(Place::Slot { region: 0, slot })),
            Taken::Full => Err(Refused::Full),
            Taken::Gone => {
                if !self.said_gone.swap(true, Ordering::Relaxed) {
                    tracing::warn!("a copy engine takes nothing any more: from now on the CPU copies");
                }
                Err(Refused::Gone)
            }
        }
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        match ticket.0 {
            Place::Slot { slot, .. } => self.last_status(slot).load(Ordering::Acquire) != dsa::NONE,
            Place::Ended(_) => true,
        }
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        let slot = match ticket.0 {
            Place::Slot { slot, .. } => slot,
            Place::Ended(completion) => return completion,
        };
        let backoff = Backoff::new();
        while self.last_status(slot).load(Ordering::Acquire) == dsa::NONE {
            backoff.snooze();
        }
        // SAFETY: the device is through with the slot, so it is this caller's (invariant 1); Acquire shows its records.
        let completion = unsafe { (*self.slots[slot].0.get()).completion() };
        self.free.lock().push(slot);
        completion
    }

    /// Of all regions: a device's channels serve any.
    fn suspend(&self, _region: usize) {
        (0..self.portal.channels()).for_each(|channel| self.portal.suspend(channel));
    }

    fn resume(&self, _region: usize) {
        (0..self.portal.channels()).for_each(|channel| self.portal.resume(channel));
    }
}
