//! One channel of an I/OAT device: its ring of descriptors, its doorbell, what it reports, and how it is stopped.
//!
//! **Invariants.**
//! 1. Descriptors have numbers that only grow; number n is in place n % [`RING`] of the ring. `tail <= head < tail + RING`;
//!    those from `tail` on are the device's, all others the CPU's.
//! 2. A request under way has the descriptors from `begin` up to `end`. Its outcome is written once: when `tail` has
//!    reached `end`, or after a reset that the device acknowledged, or when the device was stopped. Until then it may
//!    read and write whatever they name.
//! 3. What the device reports counts only as far as it was given something: an address outside of the ring, or of a
//!    descriptor that is not its, is no progress.
//!
//! **What proves that a channel no longer writes.** The reset bit of `CHANCMD`, read back as 0: a read is answered
//! behind all that the device wrote before (PCI's order of transactions), and a channel that was reset has no
//! descriptor. A completion proves it for what it completes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, MutexGuard};

use super::engine_ioat::Device;
use super::engine_ioat_memory::{Memory, Place};
use super::engine_port::Refused;
use super::ioat::{self, CHANNEL_BYTES, DESCRIPTOR_BYTES, Descriptor, State, Status};
use super::pairing::Part;
use crate::wait::{Ending, Holding, for_at_most};

/// Descriptors of one channel.
pub(super) const RING: usize = 4096;
const _: () = assert!((1 << 16) % RING == 0, "DMACOUNT wraps with the ring");

/// How a request ended: this, [`FAILED`] where it did not all, and how many of its descriptors count.
pub(super) const ENDED: u64 = 1 << 63;
pub(super) const FAILED: u64 = 1 << 62;
/// By request; 0 while it is under way.
pub(super) type Outcomes = [CachePadded<AtomicU64>];

pub(super) struct Channel {
    function: usize,
    registers: usize,
    /// That of its function.
    pub node: Option<u32>,
    ring: Place<Descriptor>,
    word: Place<AtomicU64>,
    state: Mutex<Ring>,
    /// What the device had reported when somebody last looked closely.
    seen: AtomicU64,
    /// Changes with each reset, start and end: who asks for a reset says which state of affairs made him.
    generation: AtomicU32,
    suspended: AtomicBool,
    /// It takes nothing any more.
    retired: AtomicBool,
}

// SAFETY: ring and word are parts of memory that lives as long as the channel; what is written to them is guarded by
// `state` and invariant 1.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

pub(super) struct Ring {
    head: u64,
    tail: u64,
    /// Number of the descriptor at which the device began to count.
    chain: u64,
    under_way: VecDeque<UnderWay>,
    /// Resets since a request last ended well.
    pub failures: u32,
}

struct UnderWay {
    slot: usize,
    begin: u64,
    end: u64,
}

/// What a completion says of the channel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    Well,
    /// An error stopped it.
    Halted,
    /// It names a descriptor that it was not given.
    Lie,
}

/// The device does not answer: nothing is known of what it does.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mute;

impl Channel {
    pub fn new<D: Device>(
        device: &D,
        memory: &Memory,
        (function, within): (usize, usize),
        n: usize,
    ) -> Channel {
        Channel {
            function,
            registers: CHANNEL_BYTES * (within + 1),
            node: device.node(function),
            ring: memory.ring(n),
            word: memory.word(n),
            state: Mutex::new(Ring { head: 0, tail: 0, chain: 0, under_way: VecDeque::new(), failures: 0 }),
            seen: AtomicU64::new(0),
            generation: AtomicU32::new(0),
            suspended: AtomicBool::new(false),
            retired: AtomicBool::new(true),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Ring> {
        self.state.lock()
    }

    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    pub fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }

    /// What the register says, and whether the device is there at all.
    pub fn status<D: Device>(&self, device: &D) -> Option<Status> {
        let word = device.read64(self.function, self.registers + ioat::CHANSTS);
        (word != ioat::VANISHED).then(|| Status::of(word))
    }

    pub fn errors<D: Device>(&self, device: &D) -> String {
        ioat::errors(device.read32(self.function, self.registers + ioat::CHANERR))
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the word lives as long as the channel, and is touched as an atomic alone.
        unsafe { &*self.word.at }
    }

    fn bus_of(&self, number: u64) -> u64 {
        self.ring.bus + number % RING as u64 * DESCRIPTOR_BYTES as u64
    }

    fn put(&self, ring: &mut Ring, descriptor: Descriptor) {
        let next = self.bus_of(ring.head + 1);
        // SAFETY: inside the ring; by invariant 1 the place is not the device's, and of CPUs only who holds the lock
        // writes it.
        unsafe {
            let place = self.ring.at.add((ring.head % RING as u64) as usize);
            place.write(Descriptor { next, ..descriptor });
        }
        ring.head += 1;
    }

    /// The doorbell.
    fn ring_bell<D: Device>(&self, device: &D, ring: &Ring) {
        // The descriptors before the doorbell, also for a device that is no CPU.
        fence(Ordering::SeqCst);
        let count = (ring.head - ring.chain) as u16;
        device.write16(self.function, self.registers + ioat::DMACOUNT, count);
    }

    /// Hands parts over as one submission, under the number of their request, whose outcome is 0.
    ///
    /// # Safety
    ///
    /// Until the outcome is written: all ranges that the parts name are there for the device; what is copied from is not
    /// changed; what is copied to is nobody else's.
    pub unsafe fn submit<D: Device>(
        &self,
        device: &D,
        slot: usize,
        parts: &[Part],
        outcomes: &Outcomes,
    ) -> Result<(), Refused> {
        let mut ring = self.state.lock();
        if self.is_retired() {
            return Err(Refused::Gone);
        }
        if !self.has_room(&ring, parts.len()) {
            self.reap(&mut ring, outcomes);
            if !self.has_room(&ring, parts.len()) {
                return Err(Refused::Full);
            }
        }
        let begin = ring.head;
        for (n, part) in parts.iter().enumerate() {
            let mut descriptor = Descriptor::copy(part.source, part.destination, part.bytes);
            if n + 1 == parts.len() {
                descriptor.control |= ioat::CONTROL_COMPLETION;
            }
            self.put(&mut ring, descriptor);
        }
        let end = ring.head;
        ring.under_way.push_back(UnderWay { slot, begin, end });
        // A doorbell could wake a channel that is to rest.
        if !self.is_suspended() {
            self.ring_bell(device, &ring);
        }
        Ok(())
    }

    fn has_room(&self, ring: &Ring, parts: usize) -> bool {
        (ring.head - ring.tail) as usize + parts < RING
    }

    /// Looks at what the device reported, if that is news.
    pub fn look(&self, outcomes: &Outcomes) -> Report {
        let word = self.word().load(Ordering::Acquire);
        if word == self.seen.load(Ordering::Relaxed) {
            return Report::Well;
        }
        match self.reap(&mut self.state.lock(), outcomes) {
            false => Report::Lie,
            true if Status::of(word).state == State::Halted => Report::Halted,
            true => Report::Well,
        }
    }

    fn reap(&self, ring: &mut Ring, outcomes: &Outcomes) -> bool {
        let word = self.word().load(Ordering::Acquire);
        let may_be = self.advance(ring, Status::of(word).finished, outcomes);
        if may_be {
            self.seen.store(word, Ordering::Relaxed);
        }
        may_be
    }

    /// Up to this descriptor all are finished (invariant 3).
    fn advance(&self, ring: &mut Ring, finished: u64, outcomes: &Outcomes) -> bool {
        let Some(more) = finished_since(self.ring.bus, (ring.tail, ring.head), finished) else {
            return false;
        };
        ring.tail += more;
        while ring.under_way.front().is_some_and(|first| first.end <= ring.tail) {
            let first = ring.under_way.pop_front().expect("there is one");
            outcomes[first.slot].store(ENDED | (first.end - first.begin), Ordering::Release);
            ring.failures = 0;
        }
        true
    }

    /// All that is under way is the CPU's from now on, but for what is known to be finished.
    ///
    /// The device provably does nothing for this channel any more.
    fn give_back(&self, ring: &mut Ring, outcomes: &Outcomes) {
        for request in std::mem::take(&mut ring.under_way) {
            let done = ring.tail.clamp(request.begin, request.end) - request.begin;
            outcomes[request.slot].store(ENDED | FAILED | done, Ordering::Release);
        }
        ring.tail = ring.head;
    }

    /// It takes nothing any more; the device is stopped.
    pub fn retire(&self, ring: &mut Ring, outcomes: &Outcomes) {
        self.retired.store(true, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
        self.give_back(ring, outcomes);
    }

    /// Throws away what the channel has, but for what it says it has finished, where that `counts`. On return it provably
    /// does nothing, and what was under way has its outcome; or nothing is known of it, and nothing has.
    pub fn reset<D: Device>(
        &self,
        device: &D,
        ring: &mut Ring,
        (outcomes, counts): (&Outcomes, bool),
        answer: Duration,
    ) -> Result<(), Mute> {
        let at = |register| self.registers + register;
        let status = self.status(device).ok_or(Mute)?;
        if status.runs() {
            device.write8(self.function, at(ioat::CHANCMD), ioat::CMD_SUSPEND);
            // Where it does not come to rest the reset stops it.
            until(answer, || self.status(device).is_none_or(|status| !status.runs()));
        }
        let last = self.status(device).ok_or(Mute)?;
        let chanerr = device.read32(self.function, at(ioat::CHANERR));
        device.write32(self.function, at(ioat::CHANERR), chanerr);
        if device.read8(self.function, ioat::CBVER) < ioat::VERSION_3_3 {
            let errors = device.read_config(self.function, ioat::CONFIG_CHANERR_INT);
            device.write_config(self.function, ioat::CONFIG_CHANERR_INT, errors);
        }
        device.write8(self.function, at(ioat::CHANCMD), ioat::CMD_RESET);
        let is_reset = || device.read8(self.function, at(ioat::CHANCMD)) & ioat::CMD_RESET == 0;
        let vanished = || self.status(device).is_none();
        if !until(answer, || is_reset() || vanished()) || vanished() {
            return Err(Mute);
        }
        if counts {
            self.reap(ring, outcomes);
            self.advance(ring, last.finished, outcomes);
        }
        self.give_back(ring, outcomes);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// After a reset: a new chain, which begins with a descriptor that copies nothing, to see that it works.
    pub fn start<D: Device>(&self, device: &D, ring: &mut Ring, answer: Duration) -> Result<(), Mute> {
        let at = |register| self.registers + register;
        self.word().store(0, Ordering::Release);
        self.seen.store(0, Ordering::Relaxed);
        let control = ioat::CTRL_ANY_ERR_ABORT | ioat::CTRL_ERR_COMPLETION;
        device.write16(self.function, at(ioat::CHANCTRL), control);
        device.write64(self.function, at(ioat::CHANCMP), self.word.bus);
        ring.chain = ring.head;
        device.write64(self.function, at(ioat::CHAINADDR), self.bus_of(ring.head));
        let first = self.bus_of(ring.head);
        self.put(ring, Descriptor::null());
        self.ring_bell(device, ring);
        let finished = || Status::of(self.word().load(Ordering::Acquire)).finished == first;
        if !until(answer, finished) {
            return Err(Mute);
        }
        ring.tail = ring.head;
        self.retired.store(false, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
        if self.is_suspended() {
            self.come_to_rest(device, answer);
        }
        Ok(())
    }

    /// Returns once it rests: what it was at is either finished or begins anew afterwards (EasyIO §4.4).
    pub fn suspend<D: Device>(&self, device: &D, answer: Duration) {
        let _ring = self.state.lock();
        self.suspended.store(true, Ordering::Release);
        if !self.is_retired() {
            self.come_to_rest(device, answer);
        }
    }

    fn come_to_rest<D: Device>(&self, device: &D, answer: Duration) {
        device.write8(self.function, self.registers + ioat::CHANCMD, ioat::CMD_SUSPEND);
        until(answer, || self.status(device).is_none_or(|status| !status.runs()));
    }

    /// Some channels wait for the command, some for a doorbell: it gets both.
    pub fn resume<D: Device>(&self, device: &D) {
        let ring = self.state.lock();
        self.suspended.store(false, Ordering::Release);
        if !self.is_retired() {
            device.write8(self.function, self.registers + ioat::CHANCMD, ioat::CMD_RESUME);
            self.ring_bell(device, &ring);
        }
    }
}

/// How many descriptors from `tail` on are finished, if the one at the address `finished` was the last: none where that is
/// not among those up to `head`, nor the one before them. 0 is no address.
fn finished_since(ring: u64, (tail, head): (u64, u64), finished: u64) -> Option<u64> {
    if finished == 0 {
        return Some(0);
    }
    let place = finished.checked_sub(ring)? / DESCRIPTOR_BYTES as u64;
    let more = (place + 1 + RING as u64 - tail % RING as u64) % RING as u64;
    (place < RING as u64 && more <= head - tail).then_some(more)
}

/// Waits, at most so long; whether it came true.
fn until(bound: Duration, came_true: impl Fn() -> bool) -> bool {
    struct Answer<F>(F);

    impl<F: Fn() -> bool> Ending for Answer<F> {
        fn look(&self) -> bool {
            (self.0)()
        }
    }

    for_at_most(&Answer(came_true), bound, Holding::Something)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUS: u64 = 0x10_0000_0000;

    fn address(number: u64) -> u64 {
        BUS + number % RING as u64 * DESCRIPTOR_BYTES as u64
    }

    #[test]
    fn only_what_was_given_can_be_finished() {
        // Nothing yet, and nothing new.
        assert_eq!(finished_since(BUS, (0, 5), 0), Some(0));
        assert_eq!(finished_since(BUS, (7, 9), address(6)), Some(0));
        assert_eq!(finished_since(BUS, (7, 9), address(7)), Some(1));
        assert_eq!(finished_since(BUS, (7, 9), address(8)), Some(2));
        assert_eq!(finished_since(BUS, (7, 9), address(9)), None, "it was not given that one");
        assert_eq!(finished_since(BUS, (7, 9), address(5)), None, "that is long done");
        // Around the end of the ring.
        let end = 3 * RING as u64;
        assert_eq!(finished_since(BUS, (end - 1, end + 2), address(end)), Some(2));
        assert_eq!(finished_since(BUS, (end, end + 2), address(end - 1)), Some(0));
        // Outside of it.
        assert_eq!(finished_since(BUS, (0, 5), BUS - 64), None);
        assert_eq!(finished_since(BUS, (0, 5), BUS + (RING * DESCRIPTOR_BYTES) as u64), None);
        assert_eq!(finished_since(BUS, (0, 5), !0x3f), None);
    }

    proptest! {
        #[test]
        fn progress_never_passes_the_head(
            tail in 0u64..1 << 40, under_way in 0..RING as u64, place in 0..2 * RING as u64,
        ) {
            let head = tail + under_way;
            let finished = BUS + place * DESCRIPTOR_BYTES as u64;
            match finished_since(BUS, (tail, head), finished) {
                Some(more) => {
                    prop_assert!(more <= under_way);
                    prop_assert_eq!(address(tail + more + RING as u64 - 1), finished);
                }
                None => {
                    // Each of those under way, and the one before, would have been taken.
                    let taken = (0..=under_way).any(|n| address(tail + n + RING as u64 - 1) == finished);
                    prop_assert!(!taken);
                }
            }
        }
    }
}
