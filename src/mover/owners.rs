//! Fair shares between those who copy in class bandwidth, which Fastmove §7 leaves open: start-time fair queueing over
//! their owners.
//!
//! Each owner has a count of bytes it was given. Who is ahead of the last of those who want more by more than one piece
//! waits. Who comes begins where the last one stands, or stood, where nobody asks for more: neither idle time is credit nor
//! what others got before. Who wants more and does not ask for it (a
//! ticket that nobody polls, a thread that does not run) is waited for a few epochs and no longer, and catches up with
//! little of it: so a share that nobody takes is the others'.
//!
//! A table of atomic numbers; looking through it is for copies of class bandwidth, once for each piece of 64 KiB.

use crossbeam_utils::CachePadded;

use crate::limits::COPY_OWNERS_MAX;
use crate::sync::primitive::atomic::{AtomicU32, AtomicU64, Ordering};

use super::class::Owner;

/// An owner that has not asked for so many epochs is not waited for.
const PATIENCE_EPOCHS: u64 = 5;
/// What an owner may catch up with that did not ask for a while, in leads.
const CREDIT_LEADS: u64 = 16;

#[derive(Default)]
struct Entry {
    /// The owner's number, and 1; 0 for nobody's.
    id: AtomicU32,
    /// Flights that have pieces to hand over.
    wants: AtomicU32,
    under_way: AtomicU32,
    /// When it asked last, as an epoch.
    asked: AtomicU64,
    /// Bytes given, and those that others had before it came.
    served: AtomicU64,
    /// Bytes of pieces that ended: what is given may be taken back, and this only grows.
    bytes: AtomicU64,
}

impl Entry {
    fn is_idle(&self) -> bool {
        self.wants.load(Ordering::Relaxed) == 0 && self.under_way.load(Ordering::Relaxed) == 0
    }

    /// Whether it counts for others.
    fn competes(&self, epoch: u64) -> bool {
        let asked = self.asked.load(Ordering::Relaxed);
        self.wants.load(Ordering::Relaxed) > 0 && asked + PATIENCE_EPOCHS >= epoch
    }
}

/// An owner's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat(usize);

/// What one owner got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerState {
    pub owner: u32,
    /// Bytes of pieces that came to their end.
    pub bytes: u64,
    /// Pieces with the engine.
    pub under_way: u32,
    /// Requests that have pieces to hand over.
    pub waiting: u32,
}

/// See the file's head.
pub struct Owners {
    /// More owners than places share them.
    entries: Box<[CachePadded<Entry>]>,
    /// How far ahead one may be, in bytes.
    lead_bytes: u64,
    /// Where who was given something last stood before it, as `served` counts. Only grows.
    clock: CachePadded<AtomicU64>,
    /// Flights that have pieces to hand over, of all.
    wanting: CachePadded<AtomicU32>,
}

impl Owners {
    pub fn new(lead_bytes: u64) -> Owners {
        let entries = (0..COPY_OWNERS_MAX).map(|_| CachePadded::default()).collect();
        Owners { entries, lead_bytes, clock: CachePadded::default(), wanting: CachePadded::default() }
    }

    /// A request of this owner has pieces to hand over, from now on until [`leave`](Owners::leave).
    pub fn join(&self, owner: Owner, epoch: u64) -> Seat {
        let seat = self.seat(owner);
        let entry = &self.entries[seat.0];
        if entry.wants.load(Ordering::Relaxed) == 0 {
            let least = self.least(epoch).unwrap_or_else(|| self.clock.load(Ordering::Relaxed));
            entry.served.fetch_max(least, Ordering::Relaxed);
        }
        entry.asked.fetch_max(epoch, Ordering::Relaxed);
        entry.wants.fetch_add(1, Ordering::Relaxed);
        self.wanting.fetch_add(1, Ordering::Relaxed);
        seat
    }

    /// The request has handed over its last piece, or given up.
    pub fn leave(&self, seat: Seat) {
        self.entries[seat.0].wants.fetch_sub(1, Ordering::Relaxed);
        self.wanting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Requests that have pieces to hand over.
    pub fn wanting(&self) -> u32 {
        self.wanting.load(Ordering::Relaxed)
    }

    /// The owner wants a piece, and is waited for from now on, also where nobody can have one.
    pub fn ask(&self, seat: Seat, epoch: u64) {
        let entry = &self.entries[seat.0];
        let away = entry.asked.load(Ordering::Relaxed) + PATIENCE_EPOCHS < epoch;
        if away && let Some(least) = self.least(epoch) {
            // Its thread may just not have run: what others got meanwhile it may catch up with, but no more.
            entry.served.fetch_max(least.saturating_sub(CREDIT_LEADS * self.lead_bytes), Ordering::Relaxed);
        }
        entry.asked.fetch_max(epoch, Ordering::Relaxed);
    }

    /// Whether it is this owner's turn for a piece of so many bytes. True: it has it, until [`ended`](Owners::ended).
    pub fn grant(&self, seat: Seat, bytes: u64, epoch: u64) -> bool {
        let entry = &self.entries[seat.0];
        let others = self.entries.iter().enumerate().filter(|(n, _)| *n != seat.0);
        let competing = others.filter(|(_, other)| other.competes(epoch));
        let least = competing.map(|(_, other)| other.served.load(Ordering::Relaxed)).min();
        let served = entry.served.load(Ordering::Relaxed);
        if least.is_some_and(|least| served.saturating_sub(least) > self.lead_bytes) {
            return false;
        }
        entry.under_way.fetch_add(1, Ordering::Relaxed);
        let stood = entry.served.fetch_add(bytes, Ordering::Relaxed);
        self.clock.fetch_max(stood, Ordering::Relaxed);
        true
    }

    /// A piece that was granted, of so many bytes, came to its end.
    pub fn ended(&self, seat: Seat, bytes: u64) {
        let entry = &self.entries[seat.0];
        entry.under_way.fetch_sub(1, Ordering::Relaxed);
        entry.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A piece that was granted goes nowhere.
    pub fn take_back(&self, seat: Seat, bytes: u64) {
        let entry = &self.entries[seat.0];
        entry.under_way.fetch_sub(1, Ordering::Relaxed);
        entry.served.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub fn state(&self) -> Vec<OwnerState> {
        let of = |entry: &CachePadded<Entry>| {
            Some(OwnerState {
                owner: entry.id.load(Ordering::Relaxed).checked_sub(1)?,
                bytes: entry.bytes.load(Ordering::Relaxed),
                under_way: entry.under_way.load(Ordering::Relaxed),
                waiting: entry.wants.load(Ordering::Relaxed),
            })
        };
        self.entries.iter().filter_map(of).collect()
    }

    /// What the last of those who want more has got, and who have asked lately.
    fn least(&self, epoch: u64) -> Option<u64> {
        let wanting = self.entries.iter().filter(|entry| entry.competes(epoch));
        wanting.map(|entry| entry.served.load(Ordering::Relaxed)).min()
    }

    /// The owner's place: its own, a free one, one that is idle, or else that of another.
    fn seat(&self, owner: Owner) -> Seat {
        let (count, id) = (self.entries.len(), owner.id() + 1);
        let home = owner.id() as usize % count;
        let places = || (0..count).map(|n| (home + n) % count);
        let of = |n: usize| self.entries[n].id.load(Ordering::Relaxed);
        let takes = |n: &usize, from: u32| {
            let entry = &self.entries[*n];
            entry.id.compare_exchange(from, id, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        // A place is never free again, so that its own is before any free one. Another thread may take it for the same owner
        // just now.
        let is_its_own = |n: &usize| match of(*n) {
            0 => takes(n, 0) || of(*n) == id,
            taken => taken == id,
        };
        if let Some(own) = places().find(is_its_own) {
            return Seat(own);
        }
        let idle = places().find(|n| self.entries[*n].is_idle() && takes(n, of(*n)));
        if let Some(n) = idle {
            self.entries[n].bytes.store(0, Ordering::Relaxed);
        }
        Seat(idle.unwrap_or(home))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    const PIECE: u64 = 64 << 10;

    /// A channel that ends pieces in the order in which they came, one in each turn.
    #[derive(Default)]
    struct Channel(std::collections::VecDeque<(Seat, usize)>);

    struct Model {
        owners: Owners,
        channel: Channel,
        epoch: u64,
        done: Vec<u64>,
    }

    impl Model {
        fn new(apps: usize) -> Model {
            Model { owners: Owners::new(PIECE), channel: Channel::default(), epoch: 0, done: vec![0; apps] }
        }

        /// App n asks so often for a piece; the channel has room for so many in all.
        fn ask(&mut self, n: usize, seat: Seat, times: usize, pieces_max: u32) {
            for _ in 0..times {
                self.owners.ask(seat, self.epoch);
                let room = (self.channel.0.len() as u32) < pieces_max;
                if room && self.owners.grant(seat, PIECE, self.epoch) {
                    self.channel.0.push_back((seat, n));
                }
            }
        }

        fn end_one(&mut self) {
            if let Some((seat, n)) = self.channel.0.pop_front() {
                self.owners.ended(seat, PIECE);
                self.done[n] += 1;
            }
        }
    }

    #[test]
    fn two_owners_share_whoever_asks_more() {
        // The window, and how greedily the first asks.
        for (pieces_max, greed) in [(16, 16), (16, 1), (2, 5), (1, 40)] {
            let mut model = Model::new(2);
            let seats = [model.owners.join(Owner::of(1), 0), model.owners.join(Owner::of(2), 0)];
            for turn in 0..2000 {
                model.epoch = turn / 4;
                model.ask(0, seats[0], greed, pieces_max);
                model.ask(1, seats[1], 1, pieces_max);
                model.end_one();
            }
            let (a, b) = (model.done[0], model.done[1]);
            assert!(a + b >= 1990, "the channel had always something to do: {a} + {b}");
            assert!(a.abs_diff(b) <= 20, "{pieces_max} {greed}: {a} and {b}");
        }
    }

    #[test]
    fn threads_do_not_make_a_share_larger() {
        let mut model = Model::new(2);
        let many: Vec<Seat> = (0..10).map(|_| model.owners.join(Owner::of(1), 0)).collect();
        assert!(many.iter().all(|seat| *seat == many[0]));
        let one = model.owners.join(Owner::of(2), 0);
        for turn in 0..1000 {
            model.epoch = turn / 4;
            many.iter().for_each(|seat| model.ask(0, *seat, 1, 4));
            model.ask(1, one, 1, 4);
            model.end_one();
        }
        assert!(model.done[0].abs_diff(model.done[1]) <= 8, "{:?}", model.done);
    }

    #[test]
    fn who_comes_later_has_no_credit_and_no_debt() {
        let mut model = Model::new(2);
        let first = model.owners.join(Owner::of(1), 0);
        for turn in 0..500 {
            model.epoch = turn / 4;
            model.ask(0, first, 4, 4);
            model.end_one();
        }
        assert!(model.done[0] > 490, "alone it has everything");
        let second = model.owners.join(Owner::of(2), model.epoch);
        let before = model.done.clone();
        for turn in 500..1000 {
            model.epoch = turn / 4;
            model.ask(0, first, 4, 4);
            model.ask(1, second, 4, 4);
            model.end_one();
        }
        let (a, b) = (model.done[0] - before[0], model.done[1]);
        assert!(a.abs_diff(b) <= 10, "{a} and {b}: the late one does not catch up, nor is it behind");
    }

    #[test]
    fn who_does_not_ask_holds_nobody_up() {
        let mut model = Model::new(2);
        let first = model.owners.join(Owner::of(1), 0);
        let silent = model.owners.join(Owner::of(2), 0);
        for turn in 0..400 {
            model.epoch = turn / 4;
            model.ask(0, first, 4, 4);
            model.end_one();
        }
        // So many epochs of four pieces each.
        assert!(model.done[0] >= 400 - 4 * (PATIENCE_EPOCHS + 1), "{:?}", model.done);
        // Back again, it begins where the other stands.
        let before = model.done[0];
        for turn in 400..800 {
            model.epoch = turn / 4;
            model.ask(0, first, 4, 4);
            model.ask(1, silent, 4, 4);
            model.end_one();
        }
        let (a, b) = (model.done[0] - before, model.done[1]);
        assert!(a.abs_diff(b) <= 10 + CREDIT_LEADS, "{a} and {b}: it catches up with a little");
    }

    /// One that wants nothing more between its requests, and one that wants more and never asks.
    #[test]
    fn who_comes_while_others_pause_keeps_nobody_out() {
        for silent in [false, true] {
            let owners = Owners::new(PIECE);
            if silent {
                owners.join(Owner::of(3), 0);
            }
            let last = 1000;
            let first = owners.join(Owner::of(1), 0);
            for epoch in 0..last {
                owners.ask(first, epoch);
                if owners.grant(first, PIECE, epoch) {
                    owners.ended(first, PIECE);
                }
            }
            owners.leave(first);
            let second = owners.join(Owner::of(2), last);
            let first = owners.join(Owner::of(1), last);
            [first, second].into_iter().for_each(|seat| owners.ask(seat, last));
            assert!(
                owners.grant(first, PIECE, last),
                "silent {silent}: what it got before is held against it"
            );
            assert!(owners.grant(second, PIECE, last));
        }
    }

    #[test]
    fn bytes_that_are_told_never_shrink() {
        let owners = Owners::new(PIECE);
        let seat = owners.join(Owner::of(1), 0);
        let told = || owners.state()[0].bytes;
        assert!(owners.grant(seat, PIECE, 0));
        assert_eq!(told(), 0, "it may be taken back");
        owners.take_back(seat, PIECE);
        assert_eq!(told(), 0);
        assert!(owners.grant(seat, PIECE, 0));
        owners.ended(seat, PIECE);
        assert_eq!(told(), PIECE);
        owners.leave(seat);
    }

    #[test]
    fn more_owners_than_places_share_them() {
        let owners = Owners::new(PIECE);
        let seats: Vec<Seat> =
            (0..COPY_OWNERS_MAX as u32 + 3).map(|id| owners.join(Owner::of(id), 0)).collect();
        seats.iter().for_each(|seat| owners.ask(*seat, 0));
        assert!(seats.iter().all(|seat| owners.grant(*seat, PIECE, 0)));
        assert_eq!(owners.state().len(), COPY_OWNERS_MAX);
        seats.iter().for_each(|seat| {
            owners.ended(*seat, PIECE);
            owners.leave(*seat);
        });
        assert!(owners.state().iter().all(|owner| owner.under_way == 0 && owner.waiting == 0));
        // An idle place is another's, with a count of its own.
        let newcomer = owners.join(Owner::of(9999), 1);
        let state = owners.state();
        let of = state.iter().find(|owner| owner.owner == 9999).expect("it has a place");
        assert_eq!((of.bytes, of.waiting), (0, 1));
        owners.leave(newcomer);
    }
}

/// Under schedules that shuttle chooses; see `sync/schedules.rs`.
#[cfg(all(test, shuttle))]
mod schedules {
    use std::sync::Arc;

    use shuttle::thread;

    use super::*;
    use crate::sync::schedules::explore;

    #[test]
    fn an_owner_has_one_place_whoever_takes_it() {
        explore(|| {
            let owners = Arc::new(Owners::new(1));
            let join = |id| {
                let owners = owners.clone();
                thread::spawn(move || owners.join(Owner::of(id), 0))
            };
            // The last wants the same place first.
            let threads = [1, 1, 1 + COPY_OWNERS_MAX as u32].map(join);
            let [one, same, other] = threads.map(|thread| thread.join().unwrap());
            assert!(one == same && one != other, "{one:?}, {same:?} and {other:?}");
        });
    }
}
