//! The calling thread, but at most so many at a time per region (efficient-pm §4, *semaphore*): beyond what a region
//! bears, more copies at once only make each of them slower, and each burns a CPU while it waits. Who waits sleeps, and a turn
//! is many copies (`turns`).

use std::sync::OnceLock;
use std::time::Instant;

use parking_lot::Mutex;

use super::completion::Completion;
use super::engine_port::{Capability, Engine, RawTransfer, Refused, Ticket, copy_batch};
use super::manager::Channels;
use super::places::{Entry, Places, Taken};
use super::turns::{Turns, sleep_for};
use crate::account::waiting;
use crate::media::Media;
use crate::wait::{Bell, Ending};

pub struct Semaphore {
    regions: Box<[Gate]>,
}

struct Gate {
    places: Places,
    state: Mutex<State>,
    /// Rung for one for each place that is given back.
    opened: Bell,
}

struct State {
    suspended: bool,
    turns: Turns,
}

/// A place that is given back.
struct Entered<'a>(&'a Gate, Taken);

/// What who sleeps waits for is a place, which whoever sees it has.
struct Sleeper<'a> {
    gate: &'a Gate,
    place: OnceLock<Taken>,
}

impl Ending for Sleeper<'_> {
    fn look(&self) -> bool {
        self.has_one(false)
    }

    fn look_awake(&self) -> bool {
        self.has_one(true)
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.gate.opened)
    }
}

impl Sleeper<'_> {
    fn has_one(&self, awake: bool) -> bool {
        let gate = self.gate;
        let mut state = gate.state.lock();
        if state.suspended {
            return false;
        }
        let Some(place) = gate.places.take() else { return false };
        if !state.turns.lets_sleeper_in(gate.places.free() + 1, awake, Instant::now) {
            gate.places.give_back(place);
            return false;
        }
        gate.note(&state, Instant::now);
        self.place.set(place).expect("it looks no more once it has one");
        true
    }
}

impl Gate {
    /// After each change of the state.
    fn note(&self, state: &State, now: impl FnOnce() -> Instant) {
        let entry = if state.suspended { Entry::Suspended } else { Entry::ByTurns };
        self.places.note(entry, &state.turns, now);
    }

    #[inline]
    fn enter(&self) -> Entered<'_> {
        match self.places.take_unasked() {
            Some(place) => Entered(self, place),
            None => Entered(self, waiting(|| self.ask_for_one())),
        }
    }

    #[cold]
    fn ask_for_one(&self) -> Taken {
        let now = Instant::now();
        let mut state = self.state.lock();
        let free = if state.suspended { 0 } else { self.places.free() };
        // Whoever needs not ask may have been faster.
        if state.turns.lets_in(free, || now)
            && let Some(place) = self.places.take()
        {
            self.note(&state, || now);
            return place;
        }
        let soon = state.turns.falls_asleep(now);
        self.note(&state, || now);
        drop(state);
        let sleeper = Sleeper { gate: self, place: OnceLock::new() };
        sleep_for(&sleeper, soon);
        sleeper.place.into_inner().expect("it slept until it had one")
    }

    #[cold]
    fn ask_whose_turn_it_is(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let wakes = state.turns.wakes_one(true, || now);
        self.note(&state, || now);
        drop(state);
        if let Some(wakes) = wakes {
            let one = self.opened.ring_one();
            let now = Instant::now();
            let mut state = self.state.lock();
            state.turns.woke(wakes, one, now);
            self.note(&state, || now);
        }
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.places.give_back(self.1) {
            self.0.ask_whose_turn_it_is();
        }
    }
}

impl Semaphore {
    /// At most `copies` at a time in front of each region.
    pub fn new(regions: usize, copies: usize) -> Semaphore {
        let gate = |_| Gate {
            places: Places::new(copies),
            state: Mutex::new(State { suspended: false, turns: Turns::new(copies) }),
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
        let _entered = self.regions[region].enter();
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
        let gate = &self.regions[region];
        let mut state = gate.state.lock();
        state.suspended = true;
        gate.note(&state, Instant::now);
    }

    fn resume(&self, region: usize) {
        let gate = &self.regions[region];
        let mut state = gate.state.lock();
        state.suspended = false;
        gate.note(&state, Instant::now);
        drop(state);
        gate.opened.ring();
    }

    /// A gate of its own for each region.
    fn channels(&self, region: usize) -> Channels {
        Channels { group: region, count: 1, can_rest: false, bounds_itself: true }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    /// Threads that come and go without pause, beside a gate that is suspended now and then: never more inside than may be,
    /// and all of them have their turns.
    #[test]
    fn no_more_are_inside_than_may_and_all_have_their_turns() {
        for copies in [1, 2] {
            let semaphore = Semaphore::new(1, copies);
            let gate = &semaphore.regions[0];
            let (inside, over) = (AtomicUsize::new(0), AtomicBool::new(false));
            let turns: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
            std::thread::scope(|scope| {
                for turns in &turns {
                    scope.spawn(|| {
                        while !over.load(Ordering::Relaxed) {
                            let entered = gate.enter();
                            let with_me = inside.fetch_add(1, Ordering::SeqCst) + 1;
                            assert!(with_me <= copies, "{with_me} inside");
                            std::hint::black_box((0..200).sum::<u64>());
                            inside.fetch_sub(1, Ordering::SeqCst);
                            drop(entered);
                            turns.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                let began = Instant::now();
                while turns.iter().any(|t| t.load(Ordering::Relaxed) < 100) {
                    assert!(
                        began.elapsed() < Duration::from_secs(60),
                        "somebody never has its turn: {turns:?}"
                    );
                    std::thread::sleep(Duration::from_millis(5));
                    Engine::<crate::media::Pool>::suspend(&semaphore, 0);
                    std::thread::sleep(Duration::from_micros(100));
                    Engine::<crate::media::Pool>::resume(&semaphore, 0);
                }
                over.store(true, Ordering::Relaxed);
            });
            assert_eq!(gate.places.free(), copies);
            assert!(gate.places.take_unasked().is_some(), "nobody sleeps");
        }
    }
}
