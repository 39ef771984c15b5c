//! A device in software, on a thread of its own, that takes the descriptors of a DSA: for those who have none, and to show
//! that whatever a device does data is right. What runs on it is **emulated**: it says nothing about a device's speed.
//!
//! It has several channels, each a queue of limited length that it serves in turn, a piece of a descriptor at a time: so
//! copies of different channels overtake each other, and a channel that is suspended stops in the middle of a copy
//! and goes on from there.
//!
//! **Invariants.**
//! 1. A descriptor is followed from `submit` up to its completion record, whose status is written last, with Release.
//!    Whoever submits vouches for all its addresses until then.
//! 2. One thread, the device, follows addresses: it has no lock meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::dsa::{self, Descriptor, Record};
use super::engine_dsa::{Offer, Portal, Taken};
use super::engine_port::Refused;
use super::node::free_thread;
use super::pace;
use crate::media::ByAddress;
use crate::sync::signals::kept_off;

/// The device looks at its channels after so many bytes.
const PIECE_BYTES: usize = 16 << 10;
/// And so often while all of them wait for their moment.
const LOOK_EVERY: Duration = Duration::from_micros(2);
/// So long after its last descriptor the device is there at once for the next: to ring a device's doorbell is a store, and to
/// wake a thread takes longer than all the rest of a submission.
const AWAKE: Duration = Duration::from_micros(100);
/// What its thread loses between two pieces a device held to a speed makes up for; not what it loses without a CPU.
const LOST_MAX: Duration = Duration::from_micros(20);

/// How the device behaves.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub channels: usize,
    /// Descriptors that wait in one channel at most; more are not accepted.
    pub ring: usize,
    /// Bytes a second, over all channels; none for as fast as it can.
    pub bytes_per_s: Option<u64>,
    /// The same for copies past the caches, which are those to memory that is slower to store to than to load from;
    /// none for the same speed.
    pub store_bytes_per_s: Option<u64>,
    /// From when it takes a descriptor to when it begins to copy.
    pub latency: Duration,
    /// One in so many descriptors ends early or fails, by chance from this seed; none for never.
    pub faults: Option<(u32, u64)>,
    /// After so many descriptors it vanishes: what it has then fails, and it takes nothing any more.
    pub vanishes_after: Option<u32>,
    /// What it can: it refuses the rest as a device does.
    pub offer: Offer,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            channels: 4,
            ring: 64,
            bytes_per_s: None,
            store_bytes_per_s: None,
            latency: Duration::ZERO,
            faults: None,
            vanishes_after: None,
            // Faults are shown, and not waited for.
            offer: Offer { block_on_fault: false, ..Offer::ALL },
        }
    }
}

impl Model {
    /// What a copy is held to, in bytes a second.
    fn rate(&self, descriptor: &Descriptor) -> Option<u64> {
        match descriptor.has(dsa::FLAG_DRDBK) {
            true => self.store_bytes_per_s.or(self.bytes_per_s),
            false => self.bytes_per_s,
        }
    }
}

pub struct Emulated {
    shared: Arc<Shared>,
    /// From the first descriptor on: a process that forks before has it where it needs it.
    device: OnceLock<Option<JoinHandle<()>>>,
}

struct Shared {
    model: Model,
    state: Mutex<State>,
    changed: Condvar,
    /// How often there was something new for the device.
    rung: AtomicU32,
    /// Nanoseconds that the device worked.
    busy: AtomicU64,
}

struct State {
    channels: Vec<Channel>,
    closed: bool,
    gone: bool,
    /// Descriptors so far.
    taken: u32,
}

#[derive(Default)]
struct Channel {
    ring: VecDeque<Job>,
    /// The first of the ring is with the device.
    held: bool,
    suspended: bool,
    /// The same, by the channel manager.
    rests: bool,
}

/// A descriptor and how far the device is with it.
#[derive(Clone, Copy)]
struct Job {
    descriptor: Descriptor,
    begins: Instant,
    now: Progress,
    /// Of a batch: descriptors of it that ended, and whether each ended well.
    ended: u32,
    all_well: bool,
}

/// Within one copy.
#[derive(Clone, Copy)]
struct Progress {
    done: usize,
    crc: u32,
    /// It ends early here, with this status.
    ends_at: Option<(usize, u8)>,
    begun: bool,
}

impl Progress {
    const NONE: Progress = Progress { done: 0, crc: 0, ends_at: None, begun: false };
}

// SAFETY: descriptors hold addresses as numbers; invariant 1 says who vouches for them.
unsafe impl Send for Shared {}
// SAFETY: as above; all that changes is behind a lock or atomic.
unsafe impl Sync for Shared {}

impl Shared {
    fn ring(&self) {
        self.rung.fetch_add(1, Ordering::Release);
        // All: who waits for a channel to rest sleeps there, too.
        self.changed.notify_all();
    }

    /// Whether it was rung again within `AWAKE`.
    fn is_rung_soon(&self, heard: u32) -> bool {
        let begun = Instant::now();
        while self.rung.load(Ordering::Acquire) == heard {
            if begun.elapsed() >= AWAKE {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }
}

impl Emulated {
    pub fn new(model: Model) -> Emulated {
        let model = Model { channels: model.channels.max(1), ring: model.ring.max(1), ..model };
        let channels = (0..model.channels).map(|_| Channel::default()).collect();
        let state = Mutex::new(State { channels, closed: false, gone: false, taken: 0 });
        let shared = Shared {
            model,
            state,
            changed: Condvar::new(),
            rung: AtomicU32::new(0),
            busy: AtomicU64::new(0),
        };
        Emulated { shared: Arc::new(shared), device: OnceLock::new() }
    }

    /// CPU time that stands for the device's own, in nanoseconds.
    pub fn device_ns(&self) -> u64 {
        self.shared.busy.load(Ordering::Relaxed)
    }

    /// Queues one descriptor.
    ///
    /// # Safety
    ///
    /// As for [`Portal::submit`].
    unsafe fn take(&self, channel: usize, descriptor: &Descriptor) -> Result<(), Refused> {
        if self.device.get_or_init(|| self.start()).is_none() {
            return Err(Refused::Gone);
        }
        let mut state = self.shared.state.lock();
        if self.shared.model.vanishes_after.is_some_and(|count| state.taken >= count) {
            state.gone = true;
            self.shared.ring();
        }
        if state.gone {
            return Err(Refused::Gone);
        }
        let ring = &mut state.channels[channel].ring;
        if ring.len() >= self.shared.model.ring {
            return Err(Refused::Full);
        }
        let begins = Instant::now() + self.shared.model.latency;
        let descriptor = *descriptor;
        ring.push_back(Job { descriptor, begins, now: Progress::NONE, ended: 0, all_well: true });
        state.taken += 1;
        drop(state);
        self.shared.ring();
        Ok(())
    }

    fn start(&self) -> Option<JoinHandle<()>> {
        let shared = self.shared.clone();
        let work = move || {
            free_thread();
            Device::new(&shared).work();
        };
        let thread = std::thread::Builder::new().name("lode-emu".to_owned());
        let started = kept_off(|| thread.spawn(work));
        started.inspect_err(|e| tracing::warn!("engine emu: its thread does not start: {e}")).ok()
    }
}

impl Portal for Emulated {
    fn channels(&self) -> usize {
        self.shared.model.channels
    }

    fn offer(&self, _channel: usize) -> Offer {
        self.shared.model.offer
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(&self, channel: usize, descriptors: &[Descriptor]) -> Taken {
        // SAFETY: the caller's.
        let refusal = |descriptor| unsafe { self.take(channel, descriptor) }.err();
        let refused =
            descriptors.iter().enumerate().find_map(|(n, descriptor)| Some((n, refusal(descriptor)?)));
        match refused {
            Some((count, why)) => Taken { count, rest: Some(why) },
            None => Taken { count: descriptors.len(), rest: None },
        }
    }

    fn suspend(&self, channel: usize) {
        let mut state = self.shared.state.lock();
        state.channels[channel].suspended = true;
        // What it has in hand it puts down first.
        while state.channels[channel].held {
            self.shared.changed.wait(&mut state);
        }
    }

    fn resume(&self, channel: usize) {
        self.shared.state.lock().channels[channel].suspended = false;
        self.shared.ring();
    }

    fn can_rest(&self) -> bool {
        true
    }

    fn rest(&self, channel: usize) {
        self.shared.state.lock().channels[channel].rests = true;
    }

    fn go_on(&self, channel: usize) {
        self.shared.state.lock().channels[channel].rests = false;
        self.shared.ring();
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.ring();
        if let Some(device) = self.device.take().flatten()
            && device.join().is_err()
        {
            tracing::error!("the thread of engine emu panicked");
        }
    }
}

/// What the thread has.
struct Device<'a> {
    shared: &'a Shared,
    copier: ByAddress,
    chance: u64,
    /// When a device of its speed is through with what it did so far, or had nothing to do last.
    through: Instant,
}

impl Device<'_> {
    fn new(shared: &Shared) -> Device<'_> {
        let chance = shared.model.faults.map_or(1, |(_, seed)| seed | 1);
        Device { shared, copier: ByAddress::default(), chance, through: Instant::now() }
    }

    fn work(&mut self) {
        let mut turn = 0;
        while let Some((channel, mut job, gone)) = self.next(&mut turn) {
            let begun = Instant::now();
            let ended = if gone { self.fail(&job) } else { self.piece(&mut job) };
            self.shared.busy.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let mut state = self.shared.state.lock();
            let channel = &mut state.channels[channel];
            channel.held = false;
            match ended {
                true => drop(channel.ring.pop_front()),
                false => channel.ring[0] = job,
            }
            drop(state);
            self.shared.changed.notify_all();
        }
    }

    /// The first descriptor of the next channel that has one to go on with; none when all is done and closed.
    fn next(&mut self, turn: &mut usize) -> Option<(usize, Job, bool)> {
        let mut state = self.shared.state.lock();
        let (mut asleep, mut waited) = (false, false);
        loop {
            let now = Instant::now();
            let (count, gone, closed) = (state.channels.len(), state.gone, state.closed);
            let mut soonest: Option<Instant> = None;
            let mut empty = true;
            for _ in 0..count {
                *turn = (*turn + 1) % count;
                let channel = &mut state.channels[*turn];
                let Some(job) = channel.ring.front() else { continue };
                empty = false;
                let begins = if gone || closed { now } else { job.begins };
                if (channel.suspended || channel.rests) && !gone && !closed {
                    continue;
                }
                if begins > now {
                    soonest = Some(soonest.map_or(begins, |s| s.min(begins)));
                    continue;
                }
                channel.held = true;
                if waited {
                    self.through = now;
                }
                return Some((*turn, *job, gone));
            }
            waited = true;
            match soonest {
                None if closed && empty => return None,
                None if asleep => self.shared.changed.wait(&mut state),
                None => {
                    let heard = self.shared.rung.load(Ordering::Relaxed);
                    asleep = !MutexGuard::unlocked(&mut state, || self.shared.is_rung_soon(heard));
                }
                // A little at a time: another channel may have something before.
                Some(moment) if moment - now <= pace::NEAR => {
                    MutexGuard::unlocked(&mut state, || pace::until(moment.min(now + LOOK_EVERY)));
                }
                Some(moment) => drop(self.shared.changed.wait_until(&mut state, moment - pace::NEAR)),
            }
        }
    }

    /// Goes on with a descriptor; whether it ended.
    fn piece(&mut self, job: &mut Job) -> bool {
        if job.descriptor.opcode() != dsa::OPCODE_BATCH {
            let done = self.copy(&job.descriptor, &mut job.now);
            return done.is_some();
        }
        let count = job.descriptor.size;
        if !(2..=self.shared.model.offer.batch_max as u32).contains(&count) {
            complete(&job.descriptor, Record::of_status(dsa::DESC_CNT_ERANGE));
            return true;
        }
        let list = job.descriptor.src_addr as *const Descriptor;
        // SAFETY: the batch's list is there until its record is written (invariant 1).
        let descriptor = unsafe { list.add(job.ended as usize).read() };
        let Some(well) = self.copy(&descriptor, &mut job.now) else { return false };
        job.ended += 1;
        job.all_well &= well;
        job.now = Progress::NONE;
        if job.ended < count {
            return false;
        }
        let status = if job.all_well { dsa::SUCCESS } else { dsa::BATCH_FAIL };
        complete(&job.descriptor, Record { bytes_completed: count, ..Record::of_status(status) });
        true
    }

    /// All that is left of a descriptor fails.
    fn fail(&self, job: &Job) -> bool {
        let failed = Record::of_status(dsa::HW_ERR1);
        if job.descriptor.opcode() == dsa::OPCODE_BATCH {
            let list = job.descriptor.src_addr as *const Descriptor;
            for n in job.ended..job.descriptor.size {
                // SAFETY: the batch's list is there until its record is written (invariant 1).
                let descriptor = unsafe { list.add(n as usize).read() };
                complete(&descriptor, failed);
            }
        }
        complete(&job.descriptor, failed);
        true
    }

    /// A piece of one copy; how it ended, if it did.
    fn copy(&mut self, descriptor: &Descriptor, now: &mut Progress) -> Option<bool> {
        let with_crc = descriptor.opcode() == dsa::OPCODE_COPY_CRC;
        let size = descriptor.size as usize;
        if let Some(status) = self.objection(descriptor) {
            complete(descriptor, Record::of_status(status));
            return Some(false);
        }
        if !now.begun {
            let seed = descriptor.seed_addr as *const u64;
            now.crc = match descriptor.has(dsa::FLAG_SEED_FROM_MEMORY) {
                // SAFETY: the address of a record that has been written (invariant 1).
                true => unsafe { seed.read() as u32 },
                false => descriptor.crc_seed,
            };
            (now.ends_at, now.begun) = (self.by_chance(size, descriptor.has(dsa::FLAG_BOF)), true);
        }
        let until = now.ends_at.map_or(size, |(end, _)| end);
        let len = PIECE_BYTES.min(until - now.done);
        if let Err(fault) = self.move_bytes(descriptor, now, len, with_crc) {
            let of_write = (descriptor.dst_addr..descriptor.dst_addr + size as u64).contains(&(fault as u64));
            self.end(descriptor, Record::page_fault(now.done as u32, fault as u64, of_write));
            return Some(false);
        }
        now.done += len;
        if let Some(rate) = self.shared.model.rate(descriptor) {
            let began = self.through.max(Instant::now() - LOST_MAX - pace::time_of(len, rate));
            self.through = began + pace::time_of(len, rate);
            pace::until(self.through);
        }
        if now.done < until {
            return None;
        }
        let record = match now.ends_at {
            None => Record {
                bytes_completed: size as u32,
                crc: now.crc.into(),
                ..Record::of_status(dsa::SUCCESS)
            },
            Some((_, dsa::PAGE_FAULT_NOBOF)) => {
                let fault = descriptor.src_addr + now.done as u64;
                Record { crc: now.crc.into(), ..Record::page_fault(now.done as u32, fault, false) }
            }
            Some((_, status)) => Record::of_status(status),
        };
        self.end(descriptor, record);
        Some(now.ends_at.is_none())
    }

    /// Why a copy is not begun.
    fn objection(&self, descriptor: &Descriptor) -> Option<u8> {
        let Offer { transfer_bytes_max, routes, cache_control, copy_crc, block_on_fault, .. } =
            self.shared.model.offer;
        let known = match descriptor.opcode() {
            dsa::OPCODE_COPY_CRC => copy_crc,
            opcode => opcode == dsa::OPCODE_MEMMOVE,
        };
        let flags = [
            (dsa::FLAG_DRDBK, routes.past_caches),
            (dsa::FLAG_CC, cache_control),
            (dsa::FLAG_BOF, block_on_fault),
        ];
        if !known {
            Some(dsa::BAD_OPCODE)
        } else if flags.iter().any(|(flag, offered)| descriptor.has(*flag) && !offered) {
            Some(dsa::INVALID_FLAGS)
        } else if !(1..=transfer_bytes_max).contains(&(descriptor.size as usize)) {
            Some(dsa::XFER_ERANGE)
        } else {
            None
        }
    }

    fn move_bytes(
        &self,
        descriptor: &Descriptor,
        now: &mut Progress,
        len: usize,
        with_crc: bool,
    ) -> Result<(), usize> {
        if len == 0 {
            return Ok(());
        }
        let (from, to) = (descriptor.src_addr as *const u8, descriptor.dst_addr as *mut u8);
        // SAFETY: both ranges are there until the record is written (invariant 1), and no more than `size` of each is
        // touched.
        unsafe {
            let (from, to) = (from.add(now.done), to.add(now.done));
            match descriptor.has(dsa::FLAG_DRDBK) {
                true => self.copier.non_temporal(to, from, len)?,
                false => self.copier.cached(to, from, len)?,
            }
            if with_crc {
                now.crc = self.copier.crc32c(from, len, now.crc)?;
            }
        }
        Ok(())
    }

    /// What was stored past the caches reaches memory before the record is written.
    fn end(&self, descriptor: &Descriptor, record: Record) {
        self.copier.fence();
        complete(descriptor, record);
    }

    /// Where this copy ends early, and how. One that waits for its pages meets no fault of theirs.
    fn by_chance(&mut self, size: usize, blocks: bool) -> Option<(usize, u8)> {
        let (one_in, _) = self.shared.model.faults?;
        let mut draw = |below: u64| {
            self.chance ^= self.chance << 13;
            self.chance ^= self.chance >> 7;
            self.chance ^= self.chance << 17;
            self.chance % below.max(1)
        };
        if draw(one_in.into()) > 0 {
            return None;
        }
        Some(match draw(3) {
            0 => (0, dsa::HW_ERR1),
            _ if blocks => return None,
            1 => (0, dsa::PAGE_FAULT_NOBOF),
            _ => (draw(size as u64) as usize, dsa::PAGE_FAULT_NOBOF),
        })
    }
}

/// Writes a completion record: from then on nothing of the descriptor is the device's.
fn complete(descriptor: &Descriptor, record: Record) {
    let to = descriptor.completion_addr as *mut Record;
    // SAFETY: the record's place is there until its status is written (invariant 1), and the submitter looks at the rest
    // only after that. It looks at the status meanwhile, which is the first byte, and nothing but atomic for both.
    unsafe {
        ((*to).result, (*to).bytes_completed) = (record.result, record.bytes_completed);
        ((*to).fault_addr, (*to).crc) = (record.fault_addr, record.crc);
        AtomicU8::from_ptr(to.cast()).store(record.status, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_past_the_caches_have_a_speed_of_their_own() {
        let to = |flags| Descriptor::copy(0, 0, 1, flags);
        let (load, store) = (to(dsa::FLAG_CC), to(dsa::FLAG_DRDBK));
        let of = |bytes_per_s, store_bytes_per_s| {
            let model = Model { bytes_per_s, store_bytes_per_s, ..Model::default() };
            (model.rate(&load), model.rate(&store))
        };
        assert_eq!(of(None, None), (None, None));
        assert_eq!(of(Some(3), None), (Some(3), Some(3)));
        assert_eq!(of(Some(3), Some(2)), (Some(3), Some(2)));
        assert_eq!(of(None, Some(2)), (None, Some(2)));
    }
}
