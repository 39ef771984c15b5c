//! Data between media and DRAM: who copies it.
//!
//! | engine | what it is |
//! |---|---|
//! | `cpu` | the calling thread |
//! | `semaphore` | the calling thread, at most so many at a time per region (efficient-pm §4) |
//! | `delegate` | threads of their own per region, and callers who wait for what nobody has begun (efficient-pm §4, OdinFS) |
//! | `dsa` | Intel's Data Streaming Accelerator, through the work queues that its driver gives to users |
//! | `ioat` | Intel I/OAT, held through VFIO |
//! | `emu` | a device in software that takes the descriptors of a DSA: for tests, and for those who have none |
//! | `emu-ioat` | a device in software that has the registers of an I/OAT: likewise |
//!
//! [`Mover`] brings a copy to its end in any case: what an engine refuses, or leaves undone, the calling thread
//! copies. So faults show up as they do without an engine, and engines need not understand them.
//!
//! What is stored is **not durable** on return, whoever stored it: it is when the caller has fenced.

pub mod class;
pub mod completion;
pub mod copies;
pub mod dsa;
pub mod dsa_sysfs;
mod engine_delegate;
pub mod engine_dsa;
mod engine_dsa_page;
pub mod engine_dsa_portal;
mod engine_dsa_slot;
pub mod engine_emu;
pub mod engine_emu_ioat;
pub mod engine_ioat;
mod engine_ioat_channel;
mod engine_ioat_memory;
pub mod engine_port;
mod engine_semaphore;
pub(crate) mod flight;
pub mod future;
pub mod identity;
pub mod ioat;
pub mod manager;
pub mod node;
pub mod owners;
mod pace;
mod pacing;
pub mod pairing;
mod places;
pub mod priority;
pub mod profile;
#[cfg(feature = "profile-text")]
pub mod profile_text;
pub mod regulator;
pub mod schedule;
pub mod state;
pub mod ticket;
mod turns;
pub mod vfio;
pub mod vfio_sysfs;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use class::{Class, Via};
use completion::Completion;
use dsa_sysfs::Places;
use engine_delegate::Delegate;
use engine_dsa::Dsa;
use engine_dsa_portal::DsaPortal;
use engine_emu::{Emulated, Model};
use engine_ioat::{Bounds, Ioat};
use engine_port::{Capability, Durability, End, Engine, Transfer, carry_expected, dram_address, store};
use engine_semaphore::Semaphore;
use manager::{Channels, Manager, Qos};
use profile::{Lane, Limits, Profile, SMALLEST_BYTES};
use schedule::{Decision, Direction, Expected, Job, Scheduler, decide};
use vfio::Vfio;

use crate::media::{Addr, Fault, Flushed, Media};
use crate::sync::PerThread;
use crate::wait::Holding;

/// Who copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// The calling thread.
    #[default]
    Cpu,
    /// The calling thread, at most so many at a time.
    Semaphore,
    /// Other threads.
    Delegate,
    /// Intel's DSA.
    Dsa,
    /// Intel I/OAT.
    Ioat,
    /// A device in software.
    Emu,
    /// Another, with registers.
    EmuIoat,
    /// The one that [`Mover::give`] got: a simulator's.
    Given,
}

impl EngineKind {
    /// Those that can be named.
    pub const NAMED: [EngineKind; 7] = [
        EngineKind::Cpu,
        EngineKind::Semaphore,
        EngineKind::Delegate,
        EngineKind::Dsa,
        EngineKind::Ioat,
        EngineKind::Emu,
        EngineKind::EmuIoat,
    ];

    /// A number other than 0.
    pub(crate) fn code(self) -> u8 {
        self as u8 + 1
    }

    #[inline]
    pub(crate) fn of_code(code: u8) -> Option<EngineKind> {
        const ALL: [EngineKind; 8] = [
            EngineKind::Cpu,
            EngineKind::Semaphore,
            EngineKind::Delegate,
            EngineKind::Dsa,
            EngineKind::Ioat,
            EngineKind::Emu,
            EngineKind::EmuIoat,
            EngineKind::Given,
        ];
        ALL.get((code as usize).wrapping_sub(1)).copied()
    }

    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Cpu => "cpu",
            EngineKind::Semaphore => "semaphore",
            EngineKind::Delegate => "delegate",
            EngineKind::Dsa => "dsa",
            EngineKind::Emu => "emu",
            EngineKind::Ioat => "ioat",
            EngineKind::EmuIoat => "emu-ioat",
            EngineKind::Given => "given",
        }
    }

    /// It stands for a device in software: what runs on it says nothing about a device's speed.
    pub fn emulated(self) -> bool {
        matches!(self, EngineKind::Emu | EngineKind::EmuIoat)
    }

    /// It copies on threads, and holds their number down by itself: to leave to the CPU what is beyond a limit would
    /// undo that.
    pub fn bounds_itself(self) -> bool {
        matches!(self, EngineKind::Semaphore | EngineKind::Delegate)
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no engine has.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownEngine(String);

impl fmt::Display for UnknownEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = EngineKind::NAMED.map(EngineKind::name).join(", ");
        write!(f, "there is no engine '{}': {names} are wanted", self.0)
    }
}

impl std::error::Error for UnknownEngine {}

impl FromStr for EngineKind {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<EngineKind, UnknownEngine> {
        let named = EngineKind::NAMED.into_iter().find(|kind| kind.name() == name);
        named.ok_or_else(|| UnknownEngine(name.to_owned()))
    }
}

/// What engines did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Copies handed over, and bytes that engines copied of them.
    pub copies: u64,
    pub bytes: u64,
    /// Copies that were left to the CPU because of the engine's limit, or because it refused, or is not there.
    pub busy: u64,
    /// Copies of which the CPU did what the engine left undone.
    pub finished: u64,
}

/// Copies by the engine of one's choice.
pub struct Mover<M: Media> {
    kind: EngineKind,
    /// The class of whoever names none.
    class: Option<Class>,
    qos: Qos,
    /// Copies of so many bytes are not the calling thread's.
    smallest: AtomicUsize,
    profile: Profile,
    regions: Box<[Option<node::Node>]>,
    // Each in a place of its own: a file system that has a mover is made on the stack of who opens it, perhaps a uthread's.
    semaphore: OnceLock<Box<Run<Semaphore>>>,
    delegate: OnceLock<Box<Run<Delegate<M>>>>,
    /// None where no queue can be used: then the CPU copies.
    dsa: OnceLock<Option<Box<Run<Dsa<DsaPortal>>>>>,
    emu: OnceLock<Box<Run<Dsa<Emulated>>>>,
    /// None inside: it cannot be used here.
    emu_ioat: OnceLock<Option<Box<Run<Ioat<engine_emu_ioat::Emulated>>>>>,
    ioat: OnceLock<Option<Box<Run<Ioat<Vfio>>>>>,
    given: OnceLock<Box<Run<Box<dyn Engine<M>>>>>,
    /// Why the engine of whoever names none cannot be used.
    missing: OnceLock<String>,
    /// By thread, from the first copy on that is counted: a shared counter's locked instruction would wait for the copy.
    moved: OnceLock<PerThread<Moved>>,
}

/// An engine in use.
struct Run<E> {
    engine: E,
    scheduler: Scheduler,
    manager: Manager,
    limits: Limits,
}

/// The same, whatever engine it is.
struct Running<'a, M: Media> {
    engine: &'a dyn Engine<M>,
    scheduler: &'a Scheduler,
    manager: &'a Manager,
    limits: &'a Limits,
    capability: Capability,
}

/// A copy without a class on the channel of class bandwidth: see [`Manager::comes`].
struct Stranger<'a> {
    manager: &'a Manager,
    at: Channels,
}

impl Stranger<'_> {
    /// Until its batch was waited for, which says that it [went](Manager::went).
    fn keep(self) -> Channels {
        let at = self.at;
        std::mem::forget(self);
        at
    }
}

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        self.manager.went(self.at);
    }
}

impl<'a, M: Media> Running<'a, M> {
    fn of<E: Engine<M>>(run: &'a Run<E>) -> Running<'a, M> {
        Running::with(run, &run.engine)
    }

    fn with<E>(run: &'a Run<E>, engine: &'a dyn Engine<M>) -> Running<'a, M> {
        let Run { scheduler, manager, limits, .. } = run;
        Running { engine, scheduler, manager, limits, capability: engine.capability() }
    }

    /// The engine as copies without a class see it in front of a region: without the channel of class bandwidth, once
    /// there is one.
    #[inline]
    fn unclassed(&self, region: usize) -> Capability {
        match self.manager.is_parted() {
            false => self.capability,
            true => Capability { channels: self.engine.channels(region).of_others(), ..self.capability },
        }
    }

    fn channels(&self, region: usize) -> Channels {
        self.engine.channels(region)
    }

    /// A copy without a class is about to be handed over; it has ended once what this answers is dropped.
    #[inline]
    fn comes(&self, region: usize, channel: usize) -> Option<Stranger<'a>> {
        if self.capability.channels == 1 {
            return None;
        }
        let (manager, at) = (self.manager, self.channels(region));
        let rest = |rests| self.rest(region, at, rests);
        manager.comes(at, channel, &rest).then(|| Stranger { manager, at })
    }

    /// Tells the channel of class bandwidth to rest, or to go on.
    fn rest(&self, region: usize, channels: Channels, rests: bool) {
        match rests {
            true => self.engine.rest(region, channels.of_bandwidth()),
            false => self.engine.go_on(region, channels.of_bandwidth()),
        }
    }

    /// A batch was just submitted; when it is due.
    fn expect(
        &self,
        expected: &mut Option<Expected>,
        place: (usize, usize),
        direction: Direction,
        bytes: usize,
    ) -> Option<Instant> {
        expected.insert(self.scheduler.expect(place, direction, bytes)).due
    }

    /// It has ended, all of it done or not.
    fn met(&self, expected: Option<Expected>, whole: bool, end: &End) {
        if let Some(expected) = expected {
            let took_ns = end.told.then_some(end.completion.nanoseconds);
            self.scheduler.met(expected, whole, end.seen, took_ns);
        }
    }
}

impl<M: Media> Mover<M> {
    /// `kind` is the engine of whoever names none.
    pub fn new(media: &M, kind: EngineKind, profile: Profile) -> Mover<M> {
        Mover::of_class(media, kind, profile, None, Qos::default())
    }

    /// The same, with a class for whoever names none, and with how much class bandwidth has to give way.
    pub fn of_class(
        media: &M,
        kind: EngineKind,
        profile: Profile,
        class: Option<Class>,
        qos: Qos,
    ) -> Mover<M> {
        node::note_allowed();
        let known = |region| {
            let number = media.node(region)?;
            node::nodes().iter().find(|node| node.number == number).cloned()
        };
        let mover = Mover {
            kind,
            class,
            qos,
            smallest: AtomicUsize::new(smallest(kind)),
            profile,
            regions: (0..media.regions()).map(known).collect(),
            semaphore: OnceLock::new(),
            delegate: OnceLock::new(),
            dsa: OnceLock::new(),
            emu: OnceLock::new(),
            emu_ioat: OnceLock::new(),
            ioat: OnceLock::new(),
            given: OnceLock::new(),
            missing: OnceLock::new(),
            moved: OnceLock::new(),
        };
        // Now, and not at somebody's first copy: all of media is pinned for it.
        if kind == EngineKind::Ioat
            && let Some(run) = mover.ioat()
        {
            run.engine.register(media);
        }
        // Now, too, while whoever opens the pool still hears that there is none.
        if kind == EngineKind::Dsa {
            mover.running(kind);
        }
        mover
    }

    /// Why the CPU copies for whoever names no engine, where another engine was asked for and cannot be used.
    pub fn missing(&self) -> Option<&str> {
        self.missing.get().map(String::as_str)
    }

    fn note_missing(&self, kind: EngineKind, why: impl std::fmt::Display) {
        tracing::warn!("engine {}: {why}; the CPU copies instead", kind.name());
        if kind == self.kind {
            let _ = self.missing.set(why.to_string());
        }
    }

    fn emu_ioat(&self) -> Option<&Run<Ioat<engine_emu_ioat::Emulated>>> {
        let start = || {
            let device = engine_emu_ioat::Emulated::new(engine_emu_ioat::Model::default())?;
            let engine = Ioat::new(device, Durability::WriteBack, Bounds::default());
            let engine = engine.inspect_err(|e| self.note_missing(EngineKind::EmuIoat, e)).ok()?;
            Some(self.run(EngineKind::EmuIoat, engine))
        };
        self.emu_ioat.get_or_init(start).as_deref()
    }

    fn ioat(&self) -> Option<&Run<Ioat<Vfio>>> {
        let start = || {
            let device = Vfio::open(Path::new("/")).map_err(|e| e.to_string());
            let engine = device.and_then(|device| Ioat::new(device, vfio::durability(), Bounds::default()));
            let engine = engine.inspect_err(|e| self.note_missing(EngineKind::Ioat, e)).ok()?;
            Some(self.run(EngineKind::Ioat, engine))
        };
        self.ioat.get_or_init(start).as_deref()
    }

    /// An engine from elsewhere, which from now on is everybody's who names none. Once.
    pub fn give(&self, engine: Box<dyn Engine<M>>, limits: Limits) {
        let scheduler = Scheduler::new(self.regions.len());
        let manager = Manager::new(self.regions.len(), self.qos);
        let given = self.given.set(Box::new(Run { engine, scheduler, manager, limits }));
        assert!(given.is_ok(), "one engine is given");
        self.smallest.store(smallest(EngineKind::Given), Ordering::Relaxed);
    }

    /// The engine of whoever names none.
    pub fn kind(&self) -> EngineKind {
        if self.given.get().is_some() { EngineKind::Given } else { self.kind }
    }

    pub fn moved(&self) -> Moved {
        let parts = self.moved.get().into_iter().flat_map(PerThread::all);
        parts.map(|part| *part.read()).fold(Moved::default(), |a, b| Moved {
            copies: a.copies + b.copies,
            bytes: a.bytes + b.bytes,
            busy: a.busy + b.busy,
            finished: a.finished + b.finished,
        })
    }

    /// Counts on this thread.
    #[inline]
    fn count(&self, count: impl FnOnce(&mut Moved)) {
        count(&mut self.moved.get_or_init(PerThread::new).own().write());
    }

    /// Whether a copy is for [`store`](Mover::store) or [`load`](Mover::load): otherwise the calling thread copies it
    /// without further ado.
    #[inline]
    pub fn takes(&self, via: impl Into<Via>, bytes: usize) -> bool {
        match via.into().engine {
            None => bytes >= self.smallest.load(Ordering::Relaxed),
            Some(kind) => bytes >= smallest(kind),
        }
    }

    /// An engine as the profile has it: its limits, and where both are known, the bandwidths that reads are first
    /// shared by.
    fn run<E>(&self, kind: EngineKind, engine: E) -> Box<Run<E>> {
        let scheduler = Scheduler::new(self.regions.len());
        let reads = |kind| self.profile.bandwidths(kind).map(|b| &b.of(Lane::LocalRead).one);
        if let (Some(cpu), Some(own)) = (reads(EngineKind::Cpu), reads(kind)) {
            scheduler.seed(cpu, own);
        }
        for lane in [Lane::LocalWrite, Lane::LocalRead] {
            if let Some(reached) = self.profile.bandwidths(kind) {
                scheduler.seed_pace(lane.direction(), &reached.of(lane).one);
            }
        }
        let limits =
            *self.profile.limits(kind).expect("a profile has limits of each engine that is made here");
        Box::new(Run { engine, scheduler, manager: Manager::new(self.regions.len(), self.qos), limits })
    }

    /// The engine itself: none is the calling thread.
    pub fn engine(&self, kind: EngineKind) -> Option<&dyn Engine<M>> {
        self.running(kind).map(|run| run.engine)
    }

    fn running(&self, kind: EngineKind) -> Option<Running<'_, M>> {
        let concurrency = self.profile.concurrency;
        match kind {
            EngineKind::Cpu => None,
            EngineKind::Semaphore => {
                let new = || self.run(kind, Semaphore::new(self.regions.len(), concurrency));
                Some(Running::of(self.semaphore.get_or_init(new)))
            }
            EngineKind::Delegate => {
                let new = || self.run(kind, Delegate::new(&self.regions, concurrency));
                Some(Running::of(self.delegate.get_or_init(new)))
            }
            EngineKind::Dsa => self.dsa.get_or_init(|| self.dsa()).as_deref().map(Running::of),
            EngineKind::Emu => {
                let device = || Dsa::new(Emulated::new(Model::default()));
                Some(Running::of(self.emu.get_or_init(|| self.run(kind, device()))))
            }
            EngineKind::EmuIoat => self.emu_ioat().map(Running::of),
            EngineKind::Ioat => self.ioat().map(Running::of),
            EngineKind::Given => self.given.get().map(|run| Running::with(run, &*run.engine)),
        }
    }

    /// As `running`, of an engine that is in use already.
    fn in_use(&self, kind: EngineKind) -> Option<Running<'_, M>> {
        match kind {
            EngineKind::Cpu => None,
            EngineKind::Semaphore => self.semaphore.get().map(|run| Running::of(run)),
            EngineKind::Delegate => self.delegate.get().map(|run| Running::of(run)),
            EngineKind::Dsa => self.dsa.get()?.as_deref().map(Running::of),
            EngineKind::Emu => self.emu.get().map(|run| Running::of(run)),
            EngineKind::EmuIoat => self.emu_ioat.get()?.as_deref().map(Running::of),
            EngineKind::Ioat => self.ioat.get()?.as_deref().map(Running::of),
            EngineKind::Given => self.running(kind),
        }
    }

    /// Ends epochs of the channel manager that are over, and lets channels go on that are due. Whoever begins, ends or
    /// waits for a copy of a class does that as well: this is for those who do something else meanwhile.
    pub fn drive(&self) {
        for kind in EngineKind::NAMED.into_iter().chain([EngineKind::Given]) {
            let Some(run) = self.in_use(kind).filter(|run| run.manager.is_parted()) else { continue };
            let now = run.manager.now();
            for region in 0..self.regions.len() {
                let channels = run.channels(region);
                run.manager.drive(channels, now, &|rests| run.rest(region, channels, rests));
            }
        }
    }

    /// Opens the queues of this machine.
    fn dsa(&self) -> Option<Box<Run<Dsa<DsaPortal>>>> {
        match DsaPortal::open(&Places::default()) {
            Ok(portal) => {
                let nodes: Vec<Option<u32>> =
                    self.regions.iter().map(|node| node.as_ref().map(|node| node.number)).collect();
                Some(self.run(EngineKind::Dsa, Dsa::new(portal).near(&nodes)))
            }
            Err(reason) => {
                self.note_missing(EngineKind::Dsa, reason);
                None
            }
        }
    }

    /// The class of a copy.
    #[inline]
    fn class_of(&self, via: Via) -> Option<Class> {
        via.class.or(self.class)
    }

    /// The engine to use; none where the calling thread copies, which is counted where that was not asked for.
    fn chosen(&self, via: Via) -> Option<Running<'_, M>> {
        let kind = via.engine.unwrap_or_else(|| self.kind());
        let running = self.running(kind);
        if running.is_none() && kind != EngineKind::Cpu {
            self.count_busy();
        }
        running
    }

    /// Copies `from` to media, and continues its CRC-32C where one is given. To be fenced by this thread, which it keeps
    /// while an engine copies: its callers hold locks. Panics for a range outside of media.
    pub fn store(
        &self,
        media: &M,
        via: impl Into<Via>,
        at: Addr,
        from: &[u8],
        crc: Option<u32>,
    ) -> Result<(Option<u32>, Flushed), Fault> {
        self.store_holding(media, via.into(), at, from, crc, Holding::Something)
    }

    /// As [`store`](Mover::store), for callers that know what they hold.
    pub(super) fn store_holding(
        &self,
        media: &M,
        via: Via,
        at: Addr,
        from: &[u8],
        mut crc: Option<u32>,
        holding: Holding,
    ) -> Result<(Option<u32>, Flushed), Fault> {
        check(media, at, from.len());
        if self.class_of(via).is_some() {
            let crc = self.carry_all(media, via, &mut [Transfer::to_media(at, from)], crc, holding)?;
            return Ok((crc, Flushed::issued()));
        }
        let Some(run) = self.chosen(via) else { return store(media, at, from, crc) };
        let mut flushed = Flushed::issued();
        let mut done = 0;
        while done < from.len() {
            let at = at.add(done as u64);
            let (region, room) = media.region(at);
            let len = room.min((from.len() - done) as u64) as usize;
            let part = &from[done..done + len.min(run.capability.largest_bytes)];
            let (next, stored) = self.store_part(media, &run, region, at, part, (crc, holding))?;
            crc = next;
            flushed = flushed.and(stored);
            done += part.len();
        }
        Ok((crc, flushed))
    }

    /// Within one region.
    fn store_part(
        &self,
        media: &M,
        run: &Running<'_, M>,
        region: usize,
        at: Addr,
        from: &[u8],
        (crc, holding): (Option<u32>, Holding),
    ) -> Result<(Option<u32>, Flushed), Fault> {
        let Running { engine, scheduler, limits, capability, .. } = run;
        let job = self.job(region, Direction::Write, at, from);
        let Decision::Engine { head, tail, route } = decide(&job, capability, limits, 0.0) else {
            return store(media, at, from, crc);
        };
        let Some(claim) = scheduler.claim(region, &run.unclassed(region), limits) else {
            self.count_busy();
            return store(media, at, from, crc);
        };
        let (edge, rest) = from.split_at(head);
        let (middle, end) = rest.split_at(rest.len() - tail);
        let (mut crc, mut flushed) = match edge.len() {
            0 => (crc, Flushed::issued()),
            _ => store(media, at, edge, crc)?,
        };
        let at = at.add(head as u64);
        let mut transfer = Transfer::ToMedia { at, from: middle, route };
        let place = (region, claim.channel);
        let mut expected = None;
        let expect = || run.expect(&mut expected, place, Direction::Write, middle.len());
        let stranger = run.comes(region, claim.channel);
        let carried = carry_expected(*engine, media, place, &mut transfer, crc, || (), (holding, expect));
        drop((stranger, claim));
        let done = match &carried {
            Ok((end, ())) => {
                let completion = &end.completion;
                let done = self.ended(completion, middle.len());
                run.met(expected, done == middle.len(), end);
                crc = crc.map(|before| if done > 0 { completion.crc } else { before });
                if done > 0 && completion.durability == Durability::WriteBack {
                    flushed = flushed.and(media.write_back(at, done)?);
                }
                done
            }
            Err(_) => {
                self.count_busy();
                0
            }
        };
        for (from, part) in [(done, &middle[done..]), (middle.len(), end)] {
            if !part.is_empty() {
                let (next, stored) = store(media, at.add(from as u64), part, crc)?;
                crc = next;
                flushed = flushed.and(stored);
            }
        }
        Ok((crc, flushed))
    }

    /// Copies from media. The caller keeps its thread while an engine copies. Panics for a range outside of media.
    pub fn load(&self, media: &M, via: impl Into<Via>, at: Addr, to: &mut [u8]) -> Result<(), Fault> {
        self.load_holding(media, via.into(), at, to, Holding::Something)
    }

    /// As [`load`](Mover::load), for callers that know what they hold.
    pub(super) fn load_holding(
        &self,
        media: &M,
        via: Via,
        at: Addr,
        to: &mut [u8],
        holding: Holding,
    ) -> Result<(), Fault> {
        check(media, at, to.len());
        if self.class_of(via).is_some() {
            return self
                .carry_all(media, via, &mut [Transfer::FromMedia { at, to }], None, holding)
                .map(drop);
        }
        let Some(run) = self.chosen(via) else { return media.read(at, to) };
        let mut done = 0;
        while done < to.len() {
            let at = at.add(done as u64);
            let (region, room) = media.region(at);
            let len = room.min((to.len() - done) as u64) as usize;
            let until = done + len.min(run.capability.largest_bytes);
            self.load_part(media, &run, region, at, &mut to[done..until], holding)?;
            done = until;
        }
        Ok(())
    }

    fn load_part(
        &self,
        media: &M,
        run: &Running<'_, M>,
        region: usize,
        at: Addr,
        to: &mut [u8],
        holding: Holding,
    ) -> Result<(), Fault> {
        let Running { engine, scheduler, limits, capability, .. } = run;
        let bytes = to.len();
        let job = self.job(region, Direction::Read, at, to);
        let until = match decide(&job, capability, limits, scheduler.share(bytes)) {
            Decision::Cpu(_) => return media.read(at, to),
            Decision::Engine { .. } => bytes,
            Decision::Shared { engine } => engine,
        };
        let Some(claim) = scheduler.claim(region, &run.unclassed(region), limits) else {
            self.count_busy();
            return media.read(at, to);
        };
        let (engines, own) = to.split_at_mut(until);
        let mut transfer = Transfer::FromMedia { at, to: engines };
        let meanwhile = || -> Result<u64, Fault> {
            let begun = Instant::now();
            if !own.is_empty() {
                media.read(at.add(until as u64), own)?;
            }
            Ok(begun.elapsed().as_nanos() as u64)
        };
        let place = (region, claim.channel);
        let mut expected = None;
        let expect = || run.expect(&mut expected, place, Direction::Read, until);
        let stranger = run.comes(region, claim.channel);
        let carried =
            carry_expected(*engine, media, place, &mut transfer, None, meanwhile, (holding, expect));
        drop((stranger, claim));
        let Ok((end, own_time)) = carried else {
            self.count_busy();
            return media.read(at, to);
        };
        let completion = end.completion;
        let done = self.ended(&completion, until);
        run.met(expected, done == until, &end);
        // First the rest of what comes first: of two faults that one is told.
        if done < until {
            media.read(at.add(done as u64), &mut to[done..until])?;
        }
        let own_time = own_time?;
        if until < bytes && done == until {
            let engine = (done as u64, completion.nanoseconds);
            scheduler.shared(bytes, engine, ((bytes - until) as u64, own_time), end.is_late());
        }
        Ok(())
    }

    /// Counts a batch of `bytes`; how many of them need no second look.
    fn ended(&self, completion: &Completion, bytes: usize) -> usize {
        let done = (completion.bytes as usize).min(bytes);
        self.count(|moved| {
            moved.copies += 1;
            moved.bytes += done as u64;
            moved.finished += u64::from(done < bytes);
        });
        done
    }

    fn count_busy(&self) {
        self.count(|moved| moved.busy += 1);
    }

    /// Whether the region is on another node than the calling thread.
    fn is_remote(&self, region: usize) -> bool {
        match (&self.regions[region], node::current()) {
            (Some(there), Some(here)) => there.number != here,
            _ => false,
        }
    }

    fn job(&self, region: usize, direction: Direction, at: Addr, dram: &[u8]) -> Job {
        let remote = self.is_remote(region);
        Job { direction, remote, bytes: dram.len(), media: at.0, dram: dram_address(dram) }
    }
}

/// From which size on copies are not the calling thread's at once.
#[inline]
fn smallest(kind: EngineKind) -> usize {
    if kind == EngineKind::Cpu { usize::MAX } else { SMALLEST_BYTES }
}

/// Panics for a range outside of media, as media does: the caller validates what it read from there.
fn check<M: Media>(media: &M, at: Addr, bytes: usize) {
    let end = at.0.checked_add(bytes as u64);
    assert!(end.is_some_and(|end| end <= media.len()), "{bytes} bytes at {at:?} are outside of media");
}
