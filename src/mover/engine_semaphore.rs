//! The calling thread, but at most so many at a time per region (efficient-pm §4, *semaphore*): beyond what a region
//! bears, more copies at once only make each of them slower, and each burns a CPU while it waits. Who waits sleeps, and a turn
//! is many copies (`turns`).

use std::time::Instant;

use parking_lot::Mutex;

use super::completion::Completion;
use super::engine_port::{Capability, Engine, RawTransfer, Refused, Ticket, copy_batch};
use super::manager::Channels;
use super::turns::{Turns, sleep_for};
use crate::account::waiting;
use crate::media::Media;
use crate::wait::{Bell, Ending};

pub struct Semaphore {
    regions: Box<[Gate]>,
}

struct Gate {
    state: Mutex<State>,
    /// Rung for one for each place that is given back.
    opened: Bell,
}

struct State {
    free: usize,
    suspended: bool,
    turns: Turns,
}

impl State {
    /// Places that callers may have now.
    fn open(&self) -> usize {
        if self.suspended { 0 } else { self.free }
    }
}

/// A place that is given back.
struct Entered<'a>(&'a Gate);

/// What who sleeps waits for is a place, which whoever sees it has.
impl Ending for Gate {
    fn look(&self) -> bool {
        self.has_one(false)
    }

    fn look_awake(&self) -> bool {
        self.has_one(true)
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.opened)
    }
}

impl Gate {
    /// Whether a caller that sleeps has a place.
    fn has_one(&self, awake: bool) -> bool {
        let mut state = self.state.lock();
        let open = state.open();
        let has_one = state.turns.lets_sleeper_in(open, awake, Instant::now);
        state.free -= usize::from(has_one);
        has_one
    }

    fn enter(&self) -> Entered<'_> {
        let mut state = self.state.lock();
        let open = state.open();
        if state.turns.lets_in(open, Instant::now) {
            state.free -= 1;
            return Entered(self);
        }
        let soon = state.turns.falls_asleep(Instant::now());
        drop(state);
        sleep_for(self, soon);
        Entered(self)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.free += 1;
        let wakes = state.turns.wakes_one(true, Instant::now);
        drop(state);
        if let Some(wakes) = wakes {
            let one = self.0.opened.ring_one();
            self.0.state.lock().turns.woke(wakes, one, Instant::now());
        }
    }
}

impl Semaphore {
    /// At most `copies` at a time in front of each region.
    pub fn new(regions: usize, copies: usize) -> Semaphore {
        let gate = |_| Gate {
            state: Mutex::new(State { free: copies.max(1), suspended: false, turns: Turns::new(copies) }),
            opened: Bell::new(),
        };
        Semaphore { regions: (0..regions).map(gate).collect() }
    }
}

impl<M: Media> Engine<M> for Semaphore {
    fn capability(&self) -> Capability {
        Capability::of_threads()
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        region: usize,
        _channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let _entered = waiting(|| self.regions[region].enter());
        // SAFETY: the caller vouches for the batch.
        let (done, flushed) = unsafe { copy_batch(media, batch, crc) };
        // By the mover's own, as its completion says.
        flushed.stood_for();
        Ok(Ticket::ended(done))
    }

    fn poll(&self, _: &Ticket) -> bool {
        true
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        ticket.completion().expect("submit went through with it")
    }

    fn suspend(&self, region: usize) {
        self.regions[region].state.lock().suspended = true;
    }

    fn resume(&self, region: usize) {
        let gate = &self.regions[region];
        gate.state.lock().suspended = false;
        gate.opened.ring();
    }

    /// A gate of its own for each region.
    fn channels(&self, region: usize) -> Channels {
        Channels { group: region, count: 1, can_rest: false }
    }
}
