//! The channel manager (EasyIO §4.4): which channel a copy of a class gets and when, so that copies of class latency are
//! through soon and those of class bandwidth get all that is left.
//!
//! 1. **Channels apart.** Of a region's channels the last is class bandwidth's, and up to four others are class
//!    latency's. Where there is one only, what follows does what channels cannot.
//! 2. **Small pieces.** Class bandwidth hands over 64 KiB at a time, so many under way at most: nobody stands behind more.
//! 3. **Yielding.** While a copy of class latency is under way, the channel of class bandwidth rests, where the device
//!    can rest in the middle; elsewhere no piece is handed over meanwhile.
//! 4. **The regulator.** In each epoch class bandwidth may hand over so many bytes: fewer after an epoch in which class
//!    latency was late against its target, which is somewhat more than what it takes undisturbed ([`regulator`]).
//! 5. **The floor.** While it wants more it is owed a share of all bytes that classes copy, and a piece now and then
//!    where nothing moves. Once that is a piece, it goes before everybody: so it is never starved.
//! 6. **Shares.** Owners of class bandwidth take turns ([`owners`]).
//! 7. **Reads are admitted**: with a channel that has fewer than two copies under way; those of class latency are
//!    the CPU's otherwise (Listing 2). Those of class bandwidth wait: shunted to the CPU nobody could hold them back.
//!
//! Copies that are small are the CPU's in any case (`schedule`, rule 2), and so is what an engine refuses.
//!
//! There is no thread and, for class latency, no lock. Whoever begins, ends or waits for a copy of a class looks whether
//! an epoch is over, and whether the channel should rest or go on. **Nothing is left behind at rest**: the end of the
//! last copy of class latency lets the channel go on, whoever finds it; and who waits for a piece looks by itself until
//! it has ended. A piece that is held back belongs to a flight, and is handed over when that is polled or waited for.
//!
//! **Invariants.**
//! 1. Who enters leaves once. So counts of copies under way are right, and nothing that has ended keeps a channel at rest.
//! 2. A channel is told to rest or to go on by one at a time, who looks again afterwards (`settle`): no change is lost.

use std::sync::OnceLock;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::class::Owner;
use super::owners::{OwnerState, Owners, Seat};
use super::profile::{BINS, bin};
use super::regulator::{Bounds, Seen, idle, regulate};
use super::schedule::Direction;
use crate::account::stamp;
use crate::sync::primitive::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

/// The regulator looks so often. (EasyIO §4.4 asks for microseconds; in this time the memory of its testbed takes seven
/// pieces.)
pub const EPOCH_NS: u64 = 200_000;
/// Nobody comes with a time that is so much older than another's, unless he was stopped since.
const BACK_EPOCHS_MIN: u64 = 500;
/// What class bandwidth hands over at a time, in bytes, where nobody says otherwise (EasyIO §4.4).
pub const PIECE_BYTES: usize = 64 << 10;
/// Channels over which class latency spreads (EasyIO §4.4).
pub const LATENCY_CHANNELS_MAX: usize = 4;
/// A read begins on a channel that has fewer copies under way (EasyIO §4.4, Listing 2).
pub const READ_DEPTH_MAX: u32 = 2;
/// Pieces of one request under way at most; of several together, unless there are many.
pub const PIECES_MAX: u32 = 16;
/// And of each at least: one that is copied, and one that comes next.
const PIECES_MIN: u32 = 2;
/// And of all, where somebody of class latency came a moment ago, and the channel cannot rest.
const PIECES_MAX_SHARED: u32 = 1;
/// Pieces of which so long nothing was seen have ended, and their owner does not look: they hold nobody up.
const FORGOTTEN_EPOCHS: u64 = 2;
/// Channels that are told apart.
const CHANNELS_MAX: usize = 16;
/// A slack below this tells nothing more: a thread that did not run, and not a device that was busy. In thousandths.
const SLACK_MIN: i64 = -1000;

const FLOORS_PERCENT: std::ops::RangeInclusive<u32> = 1..=90;
const STARVES_MS: std::ops::RangeInclusive<u64> = 1..=60_000;

/// A setting of [`Qos`] that it does not take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UnknownQos {
    Floor(String),
    Starve(String),
}

impl std::fmt::Display for UnknownQos {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            UnknownQos::Floor(percent) => {
                write!(
                    f,
                    "class bandwidth cannot keep '{percent}' percent of what is copied: 1 to 90 are wanted"
                )
            }
            UnknownQos::Starve(time) => {
                write!(
                    f,
                    "class bandwidth cannot wait for '{time}' milliseconds at most: 1 to 60000 are wanted"
                )
            }
        }
    }
}

impl std::error::Error for UnknownQos {}

/// How much class bandwidth has to give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qos {
    /// What a copy of class latency may take. None: by what they take undisturbed, and `target_percent`.
    pub target: Option<Duration>,
    /// Of what copies of class latency take while class bandwidth has none under way.
    pub target_percent: u32,
    /// What class bandwidth gets of the bytes that classes copy, if it wants it, whoever is under way: of 100.
    pub floor_percent: u32,
    /// And a piece after so long, should nothing move (somebody does not look after his copies).
    pub starve_max: Duration,
    /// The regulator's lowest budget, in bytes an epoch; one piece at least.
    pub floor_bytes: u64,
    /// What it gets at most, in bytes an epoch.
    pub top_bytes: u64,
    /// By how much its budget changes from epoch to epoch, in bytes. (EasyIO calls it Delta, and leaves it open.)
    pub step_bytes: u64,
    /// What it hands over at a time, in bytes.
    pub piece_bytes: usize,
    /// Time goes on by so many nanoseconds whenever somebody asks for it, and does not otherwise: for simulations that replay.
    pub by_looks_ns: Option<u64>,
}

impl Default for Qos {
    fn default() -> Qos {
        let piece = PIECE_BYTES as u64;
        Qos {
            target: None,
            target_percent: 125,
            floor_percent: 10,
            starve_max: Duration::from_millis(2),
            floor_bytes: piece,
            // Some 20 GB/s.
            top_bytes: 64 * piece,
            step_bytes: piece,
            piece_bytes: PIECE_BYTES,
            by_looks_ns: None,
        }
    }
}

impl Qos {
    /// Class bandwidth keeps so much of what classes copy, of 100, whoever is under way: 1 to 90.
    pub fn set_floor(&mut self, percent: &str) -> Result<(), UnknownQos> {
        let floor = percent.parse().ok().filter(|percent| FLOORS_PERCENT.contains(percent));
        self.floor_percent = floor.ok_or_else(|| UnknownQos::Floor(percent.to_owned()))?;
        Ok(())
    }

    /// And it waits for a piece for so many milliseconds at most, should nothing move: 1 to 60000.
    pub fn set_starve(&mut self, milliseconds: &str) -> Result<(), UnknownQos> {
        let time = milliseconds.parse().ok().filter(|time| STARVES_MS.contains(time));
        let time = time.ok_or_else(|| UnknownQos::Starve(milliseconds.to_owned()))?;
        self.starve_max = Duration::from_millis(time);
        Ok(())
    }

    fn bounds(&self) -> Bounds {
        let floor_bytes = self.floor_bytes.max(self.piece_bytes as u64);
        Bounds { floor_bytes, top_bytes: self.top_bytes.max(floor_bytes), step_bytes: self.step_bytes.max(1) }
    }
}

/// The channels in front of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Regions with the same number have the same channels.
    pub group: usize,
    /// One at least.
    pub count: usize,
    /// A channel can rest in the middle of what it copies, and what is handed over then waits.
    pub can_rest: bool,
    /// Its engine holds the number of copies down by itself: what the CPU would copy beside it would undo that.
    pub bounds_itself: bool,
}

impl Channels {
    /// The one of class bandwidth.
    pub fn of_bandwidth(&self) -> usize {
        self.count - 1
    }

    /// So many, from the first on, are for others.
    pub fn of_others(&self) -> usize {
        (self.count - 1).max(1)
    }

    /// Class bandwidth has it to itself, and it can rest.
    fn yields(&self) -> bool {
        self.can_rest && self.count > 1
    }

    /// Whether a copy of this turn goes to a channel that may be told to rest.
    fn may_rest(&self, turn: usize) -> bool {
        self.yields() && turn % self.count == self.of_bandwidth()
    }
}

/// Tells the channel of class bandwidth to rest (true), or to go on.
pub type Rest<'a> = &'a dyn Fn(bool);

/// A copy of a class under way: to be left once.
#[derive(Debug)]
#[must_use = "what is entered is left"]
pub struct Entered {
    group: usize,
    pub channel: usize,
    direction: Direction,
    bytes: u64,
    begun: u64,
    of: Kind,
}

impl Entered {
    pub fn is_of_bandwidth(&self) -> bool {
        matches!(self.of, Kind::Bandwidth(_))
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// And whether class bandwidth had something under way.
    Latency {
        disturbed: bool,
    },
    Bandwidth(Seat),
}

/// What one class did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassState {
    pub under_way: u32,
    /// Copies that ended; of class bandwidth, pieces.
    pub copies: u64,
    pub bytes: u64,
    /// Times that one was not let in: a read that the CPU copied; a piece that had to wait.
    pub held_back: u64,
}

/// The channels of some regions, now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupState {
    pub group: usize,
    /// Copies of a class under way, channel by channel.
    pub depths: Vec<u32>,
    pub latency: ClassState,
    pub bandwidth: ClassState,
    /// Bytes that class bandwidth may hand over in an epoch.
    pub budget_bytes: u64,
    /// The channel of class bandwidth is at rest.
    pub at_rest: bool,
    /// Times that it was told to rest.
    pub rests: u64,
    /// Epochs that were looked at, and those in which class latency was late.
    pub epochs: u64,
    pub late_epochs: u64,
}

#[derive(Default)]
struct Class {
    under_way: AtomicU32,
    copies: AtomicU64,
    bytes: AtomicU64,
    held_back: AtomicU64,
}

impl Class {
    fn ended(&self, bytes: u64) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn state(&self) -> ClassState {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ClassState {
            under_way: self.under_way.load(Ordering::Relaxed),
            copies: of(&self.copies),
            bytes: of(&self.bytes),
            held_back: of(&self.held_back),
        }
    }
}

/// What is known of the channels of some regions.
struct Group {
    latency: CachePadded<Class>,
    bandwidth: CachePadded<Class>,
    depths: [AtomicU32; CHANNELS_MAX],
    /// Channels that were found: 0 before the first copy of a class.
    channels: AtomicU32,
    turn: AtomicU32,
    /// The epoch in which class latency was seen last, and 1.
    latency_seen: AtomicU64,
    /// The epoch in which a piece began or ended last.
    bandwidth_seen: AtomicU64,
    /// Nanoseconds for 1024 bytes, undisturbed, by direction and size; 0 while nobody knows.
    alone: [[AtomicU32; BINS]; 2],
    /// The current epoch, and what came in it.
    epoch: CachePadded<AtomicU64>,
    slack: AtomicI64,
    judged: AtomicU32,
    moved: AtomicU64,
    spent: AtomicU64,
    wanted: AtomicBool,
    budget: AtomicU64,
    /// Bytes that class bandwidth got less than its floor.
    owed: AtomicU64,
    /// The epoch in which it got something last, or began to want it.
    fed: AtomicU64,
    at_rest: AtomicBool,
    settling: AtomicBool,
    /// Copies without a class on the channel of class bandwidth: handed over before there was one.
    strangers: AtomicU32,
    rests: AtomicU64,
    epochs: AtomicU64,
    late_epochs: AtomicU64,
    piece_bytes: u64,
}

impl Group {
    fn new(budget: u64, piece_bytes: usize) -> Group {
        Group {
            latency: CachePadded::default(),
            bandwidth: CachePadded::default(),
            depths: Default::default(),
            channels: AtomicU32::new(0),
            turn: AtomicU32::new(0),
            latency_seen: AtomicU64::new(0),
            bandwidth_seen: AtomicU64::new(0),
            alone: Default::default(),
            epoch: CachePadded::default(),
            slack: AtomicI64::new(0),
            judged: AtomicU32::new(0),
            moved: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            wanted: AtomicBool::new(false),
            budget: AtomicU64::new(budget),
            owed: AtomicU64::new(0),
            fed: AtomicU64::new(0),
            at_rest: AtomicBool::new(false),
            settling: AtomicBool::new(false),
            strangers: AtomicU32::new(0),
            rests: AtomicU64::new(0),
            epochs: AtomicU64::new(0),
            late_epochs: AtomicU64::new(0),
            piece_bytes: piece_bytes as u64,
        }
    }

    fn depth(&self, channel: usize) -> &AtomicU32 {
        &self.depths[channel % CHANNELS_MAX]
    }

    /// A piece is owed: that goes before everybody.
    fn is_forced(&self) -> bool {
        self.owed.load(Ordering::SeqCst) >= self.piece_bytes
    }

    fn should_rest(&self, at: Channels) -> bool {
        at.yields()
            && self.latency.under_way.load(Ordering::SeqCst) > 0
            && self.bandwidth.under_way.load(Ordering::SeqCst) > 0
            && self.strangers.load(Ordering::SeqCst) == 0
            && !self.is_forced()
    }

    /// Changes what is owed, two pieces at most.
    fn owe(&self, more: u64, less: u64) {
        let next = |owed: u64| Some((owed + more).min(2 * self.piece_bytes).saturating_sub(less));
        // It always has a next value.
        let _ = self.owed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }

    fn alone(&self, direction: Direction, bytes: u64) -> &AtomicU32 {
        &self.alone[(direction == Direction::Read) as usize][bin(bytes as usize)]
    }
}

/// See the file's head. One for each engine.
pub struct Manager {
    groups: Box<[Group]>,
    owners: Owners,
    qos: Qos,
    bounds: Bounds,
    /// Class bandwidth was seen: from now on its channels are its own.
    parted: AtomicBool,
    ns_per_tick: OnceLock<f64>,
    /// How far the processor's counter went back, in nanoseconds: see [`went_back`](Manager::went_back).
    behind_ns: AtomicU64,
    /// Of a time that goes on by them.
    looks: AtomicU64,
}

impl Manager {
    pub fn new(groups: usize, qos: Qos) -> Manager {
        let bounds = qos.bounds();
        Manager {
            groups: (0..groups.max(1)).map(|_| Group::new(bounds.top_bytes, qos.piece_bytes)).collect(),
            owners: Owners::new(qos.piece_bytes as u64),
            qos,
            bounds,
            parted: AtomicBool::new(false),
            ns_per_tick: OnceLock::new(),
            behind_ns: AtomicU64::new(0),
            looks: AtomicU64::new(0),
        }
    }

    /// In nanoseconds, since whenever.
    #[inline]
    pub fn now(&self) -> u64 {
        if let Some(ns) = self.qos.by_looks_ns {
            return ns * self.looks.fetch_add(1, Ordering::Relaxed);
        }
        let rate = *self.ns_per_tick.get_or_init(|| {
            stamp::begin();
            stamp::ns_per_tick()
        });
        (stamp::now() as f64 * rate) as u64 + self.behind_ns.load(Ordering::Relaxed)
    }

    /// Whether copies without a class leave the channel of class bandwidth alone.
    #[inline]
    pub fn is_parted(&self) -> bool {
        self.parted.load(Ordering::Relaxed)
    }

    /// A copy of class latency: its channel. None: the CPU's, because it is a read and all channels have enough to do.
    #[inline]
    pub fn enter_latency(
        &self,
        at: Channels,
        direction: Direction,
        bytes: u64,
        now: u64,
        rest: Rest<'_>,
    ) -> Option<Entered> {
        let group = &self.groups[at.group];
        self.look(group, now);
        group.latency_seen.store(now / EPOCH_NS + 1, Ordering::Relaxed);
        let count = at.of_others().min(LATENCY_CHANNELS_MAX);
        let turn = group.turn.fetch_add(1, Ordering::Relaxed) as usize;
        let channel = match direction {
            _ if direction == Direction::Write || at.bounds_itself => {
                group.depth(turn % count).fetch_add(1, Ordering::Relaxed);
                turn % count
            }
            _ => {
                let free = (0..count).map(|n| (turn + n) % count).find(|n| {
                    let depth = group.depth(*n);
                    let before = depth.fetch_add(1, Ordering::Relaxed);
                    if before >= READ_DEPTH_MAX {
                        depth.fetch_sub(1, Ordering::Relaxed);
                    }
                    before < READ_DEPTH_MAX
                });
                free.or_else(|| {
                    group.latency.held_back.fetch_add(1, Ordering::Relaxed);
                    None
                })?
            }
        };
        group.channels.store(at.count as u32, Ordering::Relaxed);
        group.latency.under_way.fetch_add(1, Ordering::SeqCst);
        let disturbed = group.bandwidth.under_way.load(Ordering::SeqCst) > 0;
        if disturbed {
            self.settle(group, at, rest);
        }
        let of = Kind::Latency { disturbed };
        Some(Entered { group: at.group, channel, direction, bytes, begun: now, of })
    }

    /// A copy without a class is about to be handed over. It may be the turn of the channel of class bandwidth, as long as
    /// nobody knew of one: who waits for such a copy does not look after the channel, which does not rest before
    /// [`went`](Manager::went). Whether that is to be called once it has ended.
    #[inline]
    pub fn comes(&self, at: Channels, turn: usize, rest: Rest<'_>) -> bool {
        if !at.may_rest(turn) {
            return false;
        }
        let group = &self.groups[at.group];
        group.strangers.fetch_add(1, Ordering::SeqCst);
        self.settle_if_due(group, at, rest);
        true
    }

    /// A copy that [came](Manager::comes) has ended, or was not handed over.
    pub fn went(&self, at: Channels) {
        self.groups[at.group].strangers.fetch_sub(1, Ordering::SeqCst);
    }

    /// A request of class bandwidth has pieces to hand over, until [`part`](Manager::part).
    pub fn join(&self, owner: Owner, now: u64) -> Seat {
        self.parted.store(true, Ordering::Relaxed);
        self.owners.join(owner, now / EPOCH_NS)
    }

    /// The request has handed over its last piece.
    pub fn part(&self, seat: Seat) {
        self.owners.leave(seat);
    }

    /// A piece of class bandwidth, of a request that has `own` more under way: its channel. None: it has to wait. (What a
    /// request of the same thread has under way is no reason: its pieces may have ended, and nobody looks.)
    pub fn enter_bandwidth(
        &self,
        at: Channels,
        (seat, own): (Seat, u32),
        direction: Direction,
        bytes: u64,
        now: u64,
        rest: Rest<'_>,
    ) -> Option<Entered> {
        let group = &self.groups[at.group];
        self.look(group, now);
        group.wanted.store(true, Ordering::Relaxed);
        group.channels.store(at.count as u32, Ordering::Relaxed);
        let epoch = now / EPOCH_NS;
        self.owners.ask(seat, epoch);
        // Together they are no more than one, so that who comes does not stand behind many.
        let mut own_max = (PIECES_MAX / self.owners.wanting().max(1)).max(PIECES_MIN);
        let mut shared = false;
        if !at.yields() {
            let busy = group.latency.under_way.load(Ordering::SeqCst) > 0;
            if busy && !group.is_forced() {
                return self.held_back(group);
            }
            shared = busy || group.latency_seen.load(Ordering::Relaxed) + 1 > epoch;
        }
        if direction == Direction::Read {
            own_max = READ_DEPTH_MAX;
        }
        let forgotten = group.bandwidth_seen.load(Ordering::Relaxed) + FORGOTTEN_EPOCHS < epoch;
        let under_way = &group.bandwidth.under_way;
        let before = under_way.fetch_add(1, Ordering::SeqCst);
        let full = before >= PIECES_MAX_SHARED && shared && !forgotten;
        if full || own >= own_max || !self.owners.grant(seat, bytes, epoch) {
            under_way.fetch_sub(1, Ordering::SeqCst);
            return self.held_back(group);
        }
        if group.spent.fetch_add(bytes, Ordering::Relaxed) >= group.budget.load(Ordering::Relaxed) {
            // The epoch may be another by now.
            let less = |spent: u64| Some(spent.saturating_sub(bytes));
            let _ = group.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            self.owners.take_back(seat, bytes);
            under_way.fetch_sub(1, Ordering::SeqCst);
            return self.held_back(group);
        }
        group.bandwidth_seen.store(epoch, Ordering::Relaxed);
        let channel = at.of_bandwidth();
        group.depth(channel).fetch_add(1, Ordering::Relaxed);
        if group.latency.under_way.load(Ordering::SeqCst) > 0 {
            self.settle(group, at, rest);
        }
        let of = Kind::Bandwidth(seat);
        Some(Entered { group: at.group, channel, direction, bytes, begun: now, of })
    }

    fn held_back(&self, group: &Group) -> Option<Entered> {
        group.bandwidth.held_back.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// It has ended, and who looked after it knows.
    pub fn leave(&self, at: Channels, entered: Entered, now: u64, rest: Rest<'_>) {
        let Entered { group, channel, direction, bytes, begun, of } = entered;
        let group = &self.groups[group];
        group.depth(channel).fetch_sub(1, Ordering::Relaxed);
        match of {
            Kind::Latency { disturbed } => {
                group.latency.under_way.fetch_sub(1, Ordering::SeqCst);
                group.latency.ended(bytes);
                let there = group.bandwidth.under_way.load(Ordering::SeqCst) > 0;
                if there || group.wanted.load(Ordering::Relaxed) {
                    group.owe(bytes * self.share() / 100, 0);
                }
                let disturbed = disturbed || there;
                self.judge(group, direction, bytes, now.saturating_sub(begun), disturbed);
            }
            Kind::Bandwidth(seat) => {
                group.moved.fetch_add(bytes, Ordering::Relaxed);
                group.bandwidth_seen.store(now / EPOCH_NS, Ordering::Relaxed);
                group.fed.store(now / EPOCH_NS, Ordering::Relaxed);
                group.owe(0, bytes * (100 - self.share()) / 100);
                self.owners.ended(seat, bytes);
                group.bandwidth.ended(bytes);
                group.bandwidth.under_way.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.look(group, now);
        self.settle_if_due(group, at, rest);
    }

    /// It was not handed over: the engine refused, and the CPU copies it, which counts all the same; or it comes `later`.
    pub fn take_back(&self, at: Channels, entered: Entered, later: bool, rest: Rest<'_>) {
        let group = &self.groups[entered.group];
        group.depth(entered.channel).fetch_sub(1, Ordering::Relaxed);
        match entered.of {
            Kind::Latency { .. } => drop(group.latency.under_way.fetch_sub(1, Ordering::SeqCst)),
            Kind::Bandwidth(seat) => {
                match later {
                    true => {
                        self.owners.take_back(seat, entered.bytes);
                        // The epoch may be another by now.
                        let less = |spent: u64| Some(spent.saturating_sub(entered.bytes));
                        let _ = group.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
                    }
                    false => self.owners.ended(seat, entered.bytes),
                }
                group.bandwidth.under_way.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.settle_if_due(group, at, rest);
    }

    /// For whoever waits: ends epochs, and lets the channel go on when it is due.
    pub fn drive(&self, at: Channels, now: u64, rest: Rest<'_>) {
        let group = &self.groups[at.group];
        self.look(group, now);
        self.settle_if_due(group, at, rest);
    }

    /// What was seen of the channels of each group that had a copy of a class.
    pub fn state(&self) -> Vec<GroupState> {
        let of = |(n, group): (usize, &Group)| {
            let channels = group.channels.load(Ordering::Relaxed) as usize;
            let depths = &group.depths[..channels.min(CHANNELS_MAX)];
            (channels > 0).then(|| GroupState {
                group: n,
                depths: depths.iter().map(|depth| depth.load(Ordering::Relaxed)).collect(),
                latency: group.latency.state(),
                bandwidth: group.bandwidth.state(),
                budget_bytes: group.budget.load(Ordering::Relaxed),
                at_rest: group.at_rest.load(Ordering::Relaxed),
                rests: group.rests.load(Ordering::Relaxed),
                epochs: group.epochs.load(Ordering::Relaxed),
                late_epochs: group.late_epochs.load(Ordering::Relaxed),
            })
        };
        self.groups.iter().enumerate().filter_map(of).collect()
    }

    pub fn owners(&self) -> Vec<OwnerState> {
        self.owners.state()
    }

    /// Ends the epoch, if it is over.
    #[inline]
    fn look(&self, group: &Group, now: u64) {
        let (epoch, before) = (now / EPOCH_NS, group.epoch.load(Ordering::Relaxed));
        if epoch > before {
            self.end_epoch(group, before, epoch);
        } else if epoch + BACK_EPOCHS_MIN < before {
            self.went_back(before);
        }
    }

    /// The processor's counter goes back where it was suspended to memory: no epoch would end before it was where it had been. From now
    /// on time goes on from there.
    #[cold]
    fn went_back(&self, before: u64) {
        let behind_ns = self.behind_ns.load(Ordering::Relaxed);
        // Not by what the caller had, who may have been stopped for long since.
        let lacks_ns = (before * EPOCH_NS).saturating_sub(self.now());
        if lacks_ns > BACK_EPOCHS_MIN * EPOCH_NS {
            let (more, order) = (behind_ns + lacks_ns, Ordering::Relaxed);
            let _ = self.behind_ns.compare_exchange(behind_ns, more, order, order);
        }
    }

    /// By one of those who see that it is over.
    #[cold]
    fn end_epoch(&self, group: &Group, before: u64, epoch: u64) {
        if group.epoch.compare_exchange(before, epoch, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let judged = group.judged.swap(0, Ordering::Relaxed);
        let slack = group.slack.swap(0, Ordering::Relaxed);
        let slack = (judged > 0).then(|| slack / i64::from(judged));
        let seen = Seen { slack, moved: group.moved.swap(0, Ordering::Relaxed) };
        let budget = regulate(group.budget.load(Ordering::Relaxed), seen, self.bounds);
        group.budget.store(idle(budget, epoch - before - 1, self.bounds), Ordering::Relaxed);
        group.spent.store(0, Ordering::Relaxed);
        group.epochs.fetch_add(1, Ordering::Relaxed);
        if slack.is_some_and(|slack| slack < 0) {
            group.late_epochs.fetch_add(1, Ordering::Relaxed);
        }
        let under_way = group.bandwidth.under_way.load(Ordering::SeqCst) > 0;
        let wanted = group.wanted.swap(false, Ordering::Relaxed) || under_way;
        let hungry = epoch.saturating_sub(group.fed.load(Ordering::Relaxed)).saturating_mul(EPOCH_NS);
        if !wanted {
            group.owed.store(0, Ordering::SeqCst);
            group.fed.store(epoch, Ordering::Relaxed);
        } else if u128::from(hungry) > self.qos.starve_max.as_nanos() {
            group.owe(group.piece_bytes, 0);
            group.fed.store(epoch, Ordering::Relaxed);
        }
    }

    /// Of 100: never so much that what is owed could not be paid.
    fn share(&self) -> u64 {
        u64::from(self.qos.floor_percent.min(90))
    }

    /// What a copy of class latency took, against what it should.
    fn judge(&self, group: &Group, direction: Direction, bytes: u64, took: u64, disturbed: bool) {
        let alone = group.alone(direction, bytes);
        let known = alone.load(Ordering::Relaxed);
        if !disturbed {
            let seen = (took.saturating_mul(1024) / bytes.max(1)).clamp(1, u64::from(u32::MAX / 8)) as u32;
            // An average, which one copy whose thread did not run moves by no more than half.
            let next = match known {
                0 => seen,
                known => ((u64::from(known) * 7 + u64::from(seen.min(known.saturating_mul(5)))) / 8) as u32,
            };
            alone.store(next.max(1), Ordering::Relaxed);
        }
        let target = match self.qos.target {
            Some(target) => target.as_nanos() as u64,
            None => u64::from(known) * bytes / 1024 * u64::from(self.qos.target_percent) / 100,
        };
        if target > 0 {
            let slack =
                (target as i64 - took.min(i64::MAX as u64) as i64).saturating_mul(1000) / target as i64;
            group.slack.fetch_add(slack.max(SLACK_MIN), Ordering::Relaxed);
            group.judged.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn settle_if_due(&self, group: &Group, at: Channels, rest: Rest<'_>) {
        if group.at_rest.load(Ordering::SeqCst) != group.should_rest(at) {
            self.settle(group, at, rest);
        }
    }

    /// Tells the channel what it should do. Who finds another at it leaves it to that one, who looks again afterwards.
    fn settle(&self, group: &Group, at: Channels, rest: Rest<'_>) {
        loop {
            if group.settling.swap(true, Ordering::SeqCst) {
                return;
            }
            let should = group.should_rest(at);
            if group.at_rest.load(Ordering::SeqCst) != should {
                rest(should);
                group.at_rest.store(should, Ordering::SeqCst);
                group.rests.fetch_add(should as u64, Ordering::Relaxed);
            }
            group.settling.store(false, Ordering::SeqCst);
            if group.should_rest(at) == should {
                return;
            }
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const PIECE: u64 = PIECE_BYTES as u64;
    const FOUR: Channels = Channels { group: 0, count: 4, can_rest: true, bounds_itself: false };
    const FIRM: Channels = Channels { group: 0, count: 4, can_rest: false, bounds_itself: false };
    const ONE: Channels = Channels { group: 0, count: 1, can_rest: false, bounds_itself: false };

    /// A manager whose time stands still unless it is told otherwise, and a channel of class bandwidth.
    struct Bed {
        manager: Manager,
        at: Channels,
        now: Cell<u64>,
        rests: Cell<bool>,
        seat: Seat,
        /// Pieces of the request under way.
        own: Cell<u32>,
    }

    impl Bed {
        fn new(at: Channels, qos: Qos) -> Bed {
            let manager = Manager::new(1, qos);
            let now = 1000 * EPOCH_NS;
            let seat = manager.join(Owner::of(1), now);
            Bed { manager, at, now: Cell::new(now), rests: Cell::new(false), seat, own: Cell::new(0) }
        }

        fn latency(&self, direction: Direction) -> Option<Entered> {
            let rest = |rests| self.rests.set(rests);
            self.manager.enter_latency(self.at, direction, PIECE, self.now.get(), &rest)
        }

        fn piece(&self) -> Option<Entered> {
            self.piece_of(self.seat, Direction::Write)
        }

        fn piece_of(&self, seat: Seat, direction: Direction) -> Option<Entered> {
            let rest = |rests| self.rests.set(rests);
            let own = self.own.get();
            self.manager.enter_bandwidth(self.at, (seat, own), direction, PIECE, self.now.get(), &rest)
        }

        fn leave(&self, entered: Entered) {
            self.manager.leave(self.at, entered, self.now.get(), &|rests| self.rests.set(rests));
        }

        fn drive(&self) {
            self.manager.drive(self.at, self.now.get(), &|rests| self.rests.set(rests));
        }

        fn pass(&self, ns: u64) {
            self.now.set(self.now.get() + ns);
        }

        fn state(&self) -> GroupState {
            self.manager.state().remove(0)
        }

        /// One copy of class latency that takes so long.
        fn copy(&self, ns: u64) {
            let entered = self.latency(Direction::Write).expect("writes are let in");
            self.pass(ns);
            self.leave(entered);
        }
    }

    #[test]
    fn classes_have_channels_of_their_own() {
        let bed = Bed::new(FOUR, Qos::default());
        let latency: Vec<Entered> = (0..6).map(|_| bed.latency(Direction::Write).unwrap()).collect();
        let channels: Vec<usize> = latency.iter().map(|entered| entered.channel).collect();
        assert_eq!(channels, [0, 1, 2, 0, 1, 2]);
        let piece = bed.piece().expect("its channel takes it, and rests");
        assert_eq!(piece.channel, 3);
        assert_eq!(bed.state().depths, [2, 2, 2, 1]);
        latency.into_iter().for_each(|entered| bed.leave(entered));
        bed.leave(piece);
        assert_eq!(bed.state().depths, [0, 0, 0, 0]);
        // More than four are left to others.
        let wide = Bed::new(Channels { count: 9, ..FOUR }, Qos::default());
        let channels: Vec<usize> =
            (0..8).map(|_| wide.latency(Direction::Write).unwrap()).map(|entered| entered.channel).collect();
        assert_eq!(channels, [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(wide.piece().unwrap().channel, 8);
    }

    #[test]
    fn reads_are_let_in_where_a_channel_has_less_than_two() {
        let bed = Bed::new(FOUR, Qos::default());
        let write = bed.latency(Direction::Write).unwrap();
        let mut reads: Vec<Entered> = (0..5).map(|_| bed.latency(Direction::Read).unwrap()).collect();
        assert!(bed.latency(Direction::Read).is_none(), "three channels have two each");
        assert_eq!(bed.state().latency.held_back, 1);
        assert!(bed.latency(Direction::Write).is_some(), "writes are no concern of this rule");
        bed.leave(reads.pop().unwrap());
        let again = bed.latency(Direction::Read).expect("there is room again");
        reads.push(again);
        bed.leave(write);
        // Class bandwidth waits instead.
        bed.own.set(READ_DEPTH_MAX);
        assert!(bed.piece_of(bed.seat, Direction::Read).is_none());
        bed.own.set(READ_DEPTH_MAX - 1);
        assert!(bed.piece_of(bed.seat, Direction::Read).is_some());
    }

    #[test]
    fn a_channel_rests_while_class_latency_is_under_way_and_no_longer() {
        let bed = Bed::new(FOUR, Qos::default());
        let piece = bed.piece().unwrap();
        assert!(!bed.rests.get());
        let (a, b) = (bed.latency(Direction::Write).unwrap(), bed.latency(Direction::Write).unwrap());
        assert!(bed.rests.get());
        bed.leave(a);
        assert!(bed.rests.get(), "one is left");
        bed.leave(b);
        assert!(!bed.rests.get(), "nobody submits, and it goes on");
        // The other way round: a piece comes while it has to rest.
        bed.leave(piece);
        let a = bed.latency(Direction::Write).unwrap();
        assert!(!bed.rests.get(), "there is nothing that could disturb");
        let piece = bed.piece().unwrap();
        assert!(bed.rests.get());
        // What is given up lets it go on as well.
        bed.manager.take_back(bed.at, a, false, &|rests| bed.rests.set(rests));
        assert!(!bed.rests.get());
        bed.leave(piece);
        assert_eq!(bed.state().rests, 2);
    }

    #[test]
    fn where_channels_cannot_rest_pieces_wait() {
        for at in [ONE, FIRM] {
            let bed = Bed::new(at, Qos::default());
            let piece = bed.piece().expect("nobody is there");
            bed.leave(piece);
            let entered = bed.latency(Direction::Write).unwrap();
            assert!(bed.piece().is_none(), "{at:?}");
            bed.leave(entered);
            // One at a time, as long as somebody was there a moment ago.
            let piece = bed.piece().unwrap();
            assert!(bed.piece().is_none());
            bed.leave(piece);
            bed.pass(2 * EPOCH_NS);
            assert!((0..5).all(|_| bed.piece().is_some()));
            assert!(!bed.rests.get(), "nobody tells a channel to do what it cannot");
        }
    }

    /// Class bandwidth wants more all the time, for so many twentieths of an epoch: how many pieces it gets, class
    /// latency beginning and ending a copy every `every` steps, or never ending one.
    fn pieces_of(at: Channels, qos: Qos, steps: usize, every: Option<usize>) -> usize {
        let bed = Bed::new(at, qos);
        let mut others = bed.latency(Direction::Write);
        let (mut done, mut under_way) = (0, None);
        for step in 1..=steps {
            if every.is_some_and(|every| step % every == 0) {
                bed.leave(others.take().expect("there is always one"));
                others = bed.latency(Direction::Write);
            }
            under_way = under_way.or_else(|| bed.piece());
            bed.drive();
            // The device works at it, unless the channel rests.
            if !bed.rests.get()
                && let Some(piece) = under_way.take()
            {
                bed.leave(piece);
                done += 1;
            }
            bed.pass(EPOCH_NS / 20);
        }
        done
    }

    #[test]
    fn class_bandwidth_is_never_starved() {
        for at in [FOUR, FIRM, ONE] {
            // Class latency copies a piece in each tenth of an epoch, and is never not there.
            for (floor_percent, expect) in [(10, 190..=230), (25, 630..=700), (50, 1900..=2100), (1, 18..=30)]
            {
                let qos = Qos { floor_percent, starve_max: Duration::from_secs(1), ..Qos::default() };
                let done = pieces_of(at, qos, 4000, Some(2));
                assert!(expect.contains(&done), "{at:?}: {done} beside 2000, {floor_percent} of 100");
            }
            // Nothing moves: somebody does not look after his copy.
            let qos = Qos { starve_max: Duration::from_millis(2), ..Qos::default() };
            let done = pieces_of(at, qos, 4000, None);
            assert!((17..=21).contains(&done), "{at:?}: one for each 11 of 200 epochs, and not {done}");
            let patient = Qos { starve_max: Duration::from_secs(1), ..Qos::default() };
            assert_eq!(pieces_of(at, patient, 4000, None), 0);
        }
    }

    /// As where the processor was suspended to memory.
    #[test]
    fn epochs_go_on_where_the_counter_went_back() {
        let manager = Manager::new(1, Qos::default());
        let group = &manager.groups[0];
        let (early, reached) = (manager.now(), manager.now() / EPOCH_NS + 10_000_000);
        group.epoch.store(reached, Ordering::Relaxed);
        manager.look(group, early);
        assert!(manager.now() / EPOCH_NS >= reached - 1, "it goes on from where it was");
        let behind_ns = manager.behind_ns.load(Ordering::Relaxed);
        manager.look(group, early);
        assert_eq!(
            manager.behind_ns.load(Ordering::Relaxed),
            behind_ns,
            "who was stopped for long turns no clock"
        );
        manager.look(group, (reached + 1) * EPOCH_NS);
        assert_eq!(group.epochs.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_budget_bounds_what_is_handed_over_in_an_epoch() {
        let qos = Qos { top_bytes: 3 * PIECE, ..Qos::default() };
        let bed = Bed::new(FOUR, qos);
        let count = || {
            let mut pieces = Vec::new();
            while let Some(piece) = bed.piece() {
                pieces.push(piece);
            }
            let count = pieces.len();
            pieces.into_iter().for_each(|piece| bed.leave(piece));
            count
        };
        assert_eq!((count(), count()), (3, 0));
        assert_eq!(bed.state().bandwidth.held_back, 2);
        bed.pass(EPOCH_NS);
        assert_eq!((count(), count()), (3, 0));
    }

    #[test]
    fn the_budget_follows_what_class_latency_takes() {
        let bed = Bed::new(ONE, Qos::default());
        // Undisturbed, they take 20 us.
        for _ in 0..100 {
            bed.copy(20_000);
        }
        let top = Qos::default().top_bytes;
        assert_eq!(bed.state().budget_bytes, top);
        // A piece under way all the time makes them late: from what was moved, down to the floor.
        let late = |ns: u64| {
            bed.pass(3 * EPOCH_NS);
            let piece = bed.piece().expect("nobody is there");
            bed.copy(ns);
            bed.leave(piece);
            bed.pass(EPOCH_NS);
            bed.drive();
        };
        late(40_000);
        let after_one = bed.state();
        assert_eq!(after_one.late_epochs, 1);
        assert!(after_one.budget_bytes < top / 8, "{after_one:?}");
        // In time again, it grows; but not for being just in time.
        bed.pass(EPOCH_NS - bed.now.get() % EPOCH_NS);
        bed.drive();
        let before = bed.state().budget_bytes;
        bed.copy(24_000);
        bed.pass(EPOCH_NS - 24_000);
        bed.drive();
        assert_eq!(bed.state().budget_bytes, before, "24 us of 25 are no room");
        bed.copy(20_000);
        bed.pass(EPOCH_NS);
        bed.drive();
        assert!(bed.state().budget_bytes > before);
    }

    #[test]
    fn a_target_may_be_given() {
        let bed = Bed::new(ONE, Qos { target: Some(Duration::from_micros(10)), ..Qos::default() });
        bed.copy(11_000);
        bed.pass(EPOCH_NS);
        bed.drive();
        assert_eq!(bed.state().late_epochs, 1, "the first copy is held against it already");
    }

    #[test]
    fn who_does_not_look_after_its_pieces_holds_up_nobody_else() {
        // Of another owner, or of the same one in another request.
        for other in [1, 2] {
            let bed = Bed::new(FOUR, Qos::default());
            let forgotten: Vec<Entered> = (0..PIECES_MAX).filter_map(|_| bed.piece()).collect();
            assert_eq!(forgotten.len(), PIECES_MAX as usize);
            bed.own.set(PIECES_MAX);
            assert!(bed.piece().is_none(), "that is enough of one request");
            bed.own.set(0);
            let other = bed.manager.join(Owner::of(other), bed.now.get());
            assert!(bed.piece_of(other, Direction::Write).is_some());
            assert!(bed.piece_of(other, Direction::Read).is_some());
        }
        // Also where one is let in at a time.
        let bed = Bed::new(ONE, Qos::default());
        bed.copy(1000);
        let _forgotten = bed.piece().expect("nobody is there");
        let other = bed.manager.join(Owner::of(2), bed.now.get());
        assert!(bed.piece_of(other, Direction::Write).is_none());
        while bed.now.get() / EPOCH_NS <= 1000 + FORGOTTEN_EPOCHS {
            bed.copy(EPOCH_NS / 2);
        }
        assert!(bed.piece_of(other, Direction::Write).is_some());
    }
}

/// Under schedules that shuttle chooses; see `sync/schedules.rs`.
#[cfg(all(test, shuttle))]
mod schedules {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool as Unseen, AtomicU64 as UnseenTime, Ordering::SeqCst};

    use shuttle::thread;

    use super::*;
    use crate::sync::primitive::yield_now;
    use crate::sync::schedules::explore;

    const AT: Channels = Channels { group: 0, count: 2, can_rest: true, bounds_itself: false };
    const PIECE: u64 = PIECE_BYTES as u64;

    /// A manager, and a channel that says whether it rests.
    struct Bed {
        manager: Manager,
        rests: Unseen,
        now: UnseenTime,
    }

    impl Bed {
        fn new() -> Arc<Bed> {
            let starve_max = Duration::from_nanos(EPOCH_NS);
            let manager = Manager::new(1, Qos { starve_max, ..Qos::default() });
            Arc::new(Bed { manager, rests: Unseen::new(false), now: UnseenTime::new(1000 * EPOCH_NS) })
        }

        fn tell(&self, rests: bool) {
            // One at a time: nobody tells it what it does already.
            assert_ne!(self.rests.swap(rests, SeqCst), rests);
            yield_now();
        }

        fn latency(&self) {
            let rest = |rests| self.tell(rests);
            let now = self.now.load(SeqCst);
            let entered = self.manager.enter_latency(AT, Direction::Write, PIECE, now, &rest);
            let entered = entered.expect("writes are let in");
            yield_now();
            self.manager.leave(AT, entered, now, &rest);
        }
    }

    #[test]
    fn a_channel_goes_on_when_the_last_has_left() {
        explore(|| {
            let bed = Bed::new();
            let seat = bed.manager.join(Owner::of(1), 0);
            let now = bed.now.load(SeqCst);
            let rest = |rests| bed.tell(rests);
            let entered = bed.manager.enter_bandwidth(AT, (seat, 0), Direction::Write, PIECE, now, &rest);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let bed = bed.clone();
                    thread::spawn(move || (0..2).for_each(|_| bed.latency()))
                })
                .collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
            // Nobody drives, nobody submits: the piece is under way, and its channel works.
            assert!(!bed.rests.load(SeqCst), "a suspended channel was left behind");
            bed.manager.leave(AT, entered.expect("nobody was there"), now, &rest);
        });
    }

    #[test]
    fn pieces_that_come_meanwhile_end_when_their_owner_waits() {
        explore(|| {
            let bed = Bed::new();
            let waits = {
                let bed = bed.clone();
                thread::spawn(move || {
                    let seat = bed.manager.join(Owner::of(1), 0);
                    let rest = |rests| bed.tell(rests);
                    for _ in 0..2 {
                        let now = bed.now.load(SeqCst);
                        let entered =
                            bed.manager.enter_bandwidth(AT, (seat, 0), Direction::Write, PIECE, now, &rest);
                        let entered = entered.expect("there is room for all");
                        // As a flight waits: its piece ends as soon as the channel does not rest. (If it never does, the
                        // run does not end, and shuttle says so.)
                        while bed.rests.load(SeqCst) {
                            bed.manager.drive(AT, now, &rest);
                            yield_now();
                        }
                        bed.manager.leave(AT, entered, now, &rest);
                    }
                    bed.manager.part(seat);
                })
            };
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let bed = bed.clone();
                    thread::spawn(move || bed.latency())
                })
                .collect();
            others.into_iter().for_each(|t| t.join().unwrap());
            waits.join().unwrap();
            assert!(!bed.rests.load(SeqCst));
            let state = bed.manager.state().remove(0);
            assert_eq!((state.latency.under_way, state.bandwidth.under_way), (0, 0));
        });
    }

    #[test]
    fn somebody_who_never_leaves_does_not_stop_a_piece() {
        explore(|| {
            let bed = Bed::new();
            let rest = |rests| bed.tell(rests);
            let begun = bed.now.load(SeqCst);
            let for_ever = bed.manager.enter_latency(AT, Direction::Write, PIECE, begun, &rest);
            let clock = {
                let bed = bed.clone();
                thread::spawn(move || {
                    for _ in 0..6 {
                        bed.now.fetch_add(EPOCH_NS / 2, SeqCst);
                        yield_now();
                    }
                })
            };
            let seat = bed.manager.join(Owner::of(1), begun / EPOCH_NS);
            let entered = bed.manager.enter_bandwidth(AT, (seat, 0), Direction::Write, PIECE, begun, &rest);
            let entered = entered.expect("its channel takes it, and rests");
            clock.join().unwrap();
            bed.manager.drive(AT, bed.now.load(SeqCst) - EPOCH_NS, &rest);
            bed.manager.drive(AT, bed.now.load(SeqCst), &rest);
            assert!(!bed.rests.load(SeqCst), "what it is owed goes before everybody");
            bed.manager.leave(AT, entered, bed.now.load(SeqCst), &rest);
            bed.manager.leave(AT, for_ever.unwrap(), bed.now.load(SeqCst), &rest);
        });
    }
}
