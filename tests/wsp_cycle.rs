//! Suspend and resume of a guest that is a model, with a failure at every fence and sync of it, and states that the
//! failure could leave of memory and of the slot.
//!
//! The model's memory is a number of words that it changes while it runs; the state of its devices is a copy of them. So
//! state that meets memory of another moment is seen at once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use lodestone::error::{Error, Result};
use lodestone::media::{Addr, Domain, Media};
use lodestone::sim::explore::{Bounds, explore};
use lodestone::sim::media::{CrashPoint, Keep, SimMedia};
use lodestone::sim::mutation::Mutation;
use lodestone::wsp::image::{
    NUMBER_MAX, RECORD_BYTES, RECORD_STRIDE_BYTES, RECORDS, Record, SEAL_BYTES, TRAILER_BYTES,
};
use lodestone::wsp::record::{forget_of_any_size, of_any_size};
use lodestone::wsp::{
    Machine, Ram, Saved, Seal, State, adopt, go_on_standing, resume, resume_clone, suspend,
};

/// A page: the record has another, and may come to the disk before what it is about.
const RAM_BYTES: u64 = 4096;
const WORDS: u64 = 128;
/// Of the guest's words; every fourth word of memory is one.
const WORD_STRIDE_BYTES: u64 = RAM_BYTES / WORDS;
/// What is saved: all words.
const STREAM_BYTES: u64 = WORDS * 8;
const SLOT_BYTES: usize = SEAL_BYTES + 2 * STREAM_BYTES as usize;
const DOMAINS: [Domain; 3] = [Domain::CpuCache, Domain::Memory, Domain::PageCache];

/// Memory and the slots by generation; slots of earlier generations stay, so that nothing relies on their absence.
#[derive(Clone)]
struct Host {
    ram: Arc<SimMedia>,
    slots: Arc<Mutex<BTreeMap<u64, Arc<SimMedia>>>>,
    mutation: Option<Arc<Mutation>>,
    log: Option<Arc<Mutex<Log>>>,
}

impl Host {
    fn new(domain: Domain) -> Host {
        let ram = Arc::new(media((RAM_BYTES + TRAILER_BYTES) as usize, domain));
        let host = Host { ram, slots: Arc::default(), mutation: None, log: None };
        host.memory().begin([7; 16]).unwrap();
        host
    }

    /// From now on every fence and sync is a moment of `log`.
    fn watched(domain: Domain, log: &Arc<Mutex<Log>>, mutation: Option<Arc<Mutation>>) -> Host {
        let host = Host { mutation: mutation.clone(), log: Some(log.clone()), ..Host::new(domain) };
        host.ram.mutate(mutation);
        let (log, slots) = (log.clone(), host.slots.clone());
        host.ram.record(Some(Box::new(move |point| {
            let slots = slots.lock().unwrap();
            let slots = slots.iter().map(|(generation, slot)| (*generation, slot.crash_point())).collect();
            log.lock().unwrap().moment(point.clone(), slots);
        })));
        host
    }

    fn memory(&self) -> Ram<'_, Arc<SimMedia>> {
        Ram::new(&self.ram, RAM_BYTES).unwrap()
    }

    fn slot(&self, generation: u64) -> Option<Arc<SimMedia>> {
        self.slots.lock().unwrap().get(&generation).cloned()
    }

    fn words(&self) -> Vec<u64> {
        (0..WORDS).map(|n| self.ram.load64(Addr(n * WORD_STRIDE_BYTES)).unwrap()).collect()
    }

    /// Power may fail just now, too.
    fn now(&self) {
        if let Some(log) = &self.log {
            let slots = self.slots.lock().unwrap();
            let slots = slots.iter().map(|(generation, slot)| (*generation, slot.crash_point())).collect();
            log.lock().unwrap().moment(self.ram.crash_point(), slots);
        }
    }

    /// What the program does: the record names the slot.
    fn resume(&self, machine: &mut Model) -> Result<u64> {
        let generation = self.memory().record()?.map_or(0, |record| record.generation);
        let slot = self.slot(generation).ok_or_else(|| Error::message(libc::ENOENT, "model", "no slot"))?;
        Ok(resume(&self.memory(), &slot, machine, |_| Ok(()))?.generation)
    }
}

fn media(bytes: usize, domain: Domain) -> SimMedia {
    SimMedia::new(vec![0; bytes], domain)
}

/// What was acknowledged, and every moment at which power may fail.
#[derive(Default)]
struct Log {
    /// Memory when the guest was stopped for a generation.
    stopped: BTreeMap<u64, Vec<u64>>,
    /// Acknowledged as suspended, and not being resumed.
    surely: Option<u64>,
    /// Being suspended or resumed.
    maybe: Option<u64>,
    moments: Vec<Moment>,
}

struct Moment {
    ram: CrashPoint,
    slots: Vec<(u64, CrashPoint)>,
    surely: Option<u64>,
    maybe: Option<u64>,
}

impl Log {
    fn moment(&mut self, ram: CrashPoint, slots: Vec<(u64, CrashPoint)>) {
        let (surely, maybe) = (self.surely, self.maybe);
        self.moments.push(Moment { ram, slots, surely, maybe });
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Step {
    Stop,
    Save,
    Identity,
    Start,
    Load,
    GoOn,
}

/// The model of what a guest runs in.
struct Model {
    host: Host,
    runs: bool,
    loaded: Option<Vec<u64>>,
    fails: Option<Step>,
    ended: bool,
    /// Words stored to.
    touched: RefCell<BTreeSet<u64>>,
}

impl Model {
    fn of(host: &Host, runs: bool) -> Model {
        Model {
            host: host.clone(),
            runs,
            loaded: None,
            fails: None,
            ended: false,
            touched: RefCell::default(),
        }
    }

    /// The guest does something: what it stores stays in caches.
    fn work(&self) {
        thread_local!(static STEP: Cell<u64> = const { Cell::new(1) });
        assert!(self.runs);
        for _ in 0..WORDS / 16 {
            let step = STEP.replace(STEP.get() + 1);
            let at = Addr(step * 37 % WORDS * WORD_STRIDE_BYTES);
            self.touched.borrow_mut().insert(at.0);
            self.host.ram.store64(at, step).unwrap().redundant("a guest makes nothing durable");
        }
    }

    fn may(&self, step: Step) -> Result<()> {
        match self.fails == Some(step) {
            true => Err(Error::message(libc::EIO, "model", format!("{step:?} fails"))),
            false => Ok(()),
        }
    }

    fn suspend(&mut self) -> Result<u64> {
        let host = self.host.clone();
        let log = host.log.clone();
        let suspended = suspend(&host.memory(), self)?;
        if let Some(log) = log {
            let mut log = log.lock().unwrap();
            (log.surely, log.maybe) = (Some(suspended.generation), None);
        }
        host.now();
        Ok(suspended.generation)
    }
}

impl Machine for Model {
    type Slot = Arc<SimMedia>;

    fn stop(&mut self) -> Result<()> {
        self.may(Step::Stop)?;
        self.runs = false;
        Ok(())
    }

    fn save(&mut self, generation: u64) -> Result<Saved<Arc<SimMedia>>> {
        let slot = media(SLOT_BYTES, self.host.ram.domain());
        slot.mutate(self.host.mutation.clone());
        let slot = Arc::new(slot);
        self.host.slots.lock().unwrap().insert(generation, slot.clone());
        let words = self.host.words();
        if let Some(log) = &self.host.log {
            let mut noted = log.lock().unwrap();
            noted.stopped.insert(generation, words.clone());
            noted.maybe = Some(generation);
            let (log, ram) = (log.clone(), self.host.ram.clone());
            let others = self.host.slots.clone();
            slot.record(Some(Box::new(move |point| {
                // The slot itself is at work, and cannot be asked.
                let others = others.lock().unwrap();
                let others = others.iter().filter(|(g, _)| **g != generation);
                let mut slots: Vec<_> = others.map(|(g, slot)| (*g, slot.crash_point())).collect();
                slots.push((generation, point.clone()));
                log.lock().unwrap().moment(ram.crash_point(), slots);
            })));
        }
        for (n, word) in words.iter().enumerate() {
            let at = Addr(SEAL_BYTES as u64 + n as u64 * 8);
            slot.store64(at, *word)?.redundant("nothing of it need be durable");
        }
        self.may(Step::Save)?;
        Ok(Saved { slot, stream_bytes: STREAM_BYTES })
    }

    fn identity(&mut self) -> Result<Vec<u8>> {
        self.may(Step::Identity)?;
        Ok(b"model".to_vec())
    }

    fn touched(&mut self) -> Option<Vec<(Addr, usize)>> {
        Some(self.touched.borrow().iter().map(|at| (Addr(*at), 8)).collect())
    }

    fn discard(&mut self, generation: u64) {
        self.host.slots.lock().unwrap().remove(&generation);
    }

    fn start(&mut self, _seal: &Seal) -> Result<()> {
        self.may(Step::Start)
    }

    fn load(&mut self, seal: &Seal) -> Result<()> {
        self.may(Step::Load)?;
        assert_eq!((seal.stream_bytes, &seal.identity[..]), (STREAM_BYTES, &b"model"[..]));
        let slot = self.host.slot(seal.generation).unwrap();
        let word = |n| slot.load64(Addr(SEAL_BYTES as u64 + n * 8)).unwrap();
        self.loaded = Some((0..WORDS).map(word).collect());
        if let Some(log) = &self.host.log {
            let mut log = log.lock().unwrap();
            (log.maybe, log.surely) = (log.surely.or(log.maybe), None);
        }
        Ok(())
    }

    fn go_on(&mut self) -> Result<()> {
        self.may(Step::GoOn)?;
        self.runs = true;
        if let Some(log) = &self.host.log {
            log.lock().unwrap().maybe = None;
        }
        Ok(())
    }

    fn end(&mut self) {
        (self.runs, self.ended) = (false, true);
    }
}

/// Suspends and resumes some times, one of them in vain.
fn history(host: &Host) -> Result<()> {
    let mut machine = Model::of(host, true);
    machine.work();
    for cycle in 0..4 {
        if cycle == 2 {
            machine.fails = Some(Step::Save);
            assert!(machine.suspend().is_err());
            machine.fails = None;
            machine.work();
        }
        let generation = machine.suspend()?;
        assert_eq!(generation, cycle + 1);
        machine = Model::of(host, false);
        assert_eq!(host.resume(&mut machine)?, generation);
        machine.work();
        host.now();
    }
    Ok(())
}

/// Opens states that a failure at any moment of the history could leave. How many, and what was wrong.
fn failures(domain: Domain, mutation: Option<Arc<Mutation>>) -> (u64, Option<String>) {
    let log = Arc::new(Mutex::new(Log::default()));
    let host = Host::watched(domain, &log, mutation);
    if let Err(e) = history(&host) {
        return (0, Some(format!("without a failure: {e}")));
    }
    host.ram.record(None);
    host.slots.lock().unwrap().values().for_each(|slot| slot.record(None));
    let log = std::mem::take(&mut *log.lock().unwrap());
    // Of each cycle: the slot, memory, the record twice, and when it is suspended and when it runs.
    assert!(log.moments.len() >= 4 * 6, "{} moments", log.moments.len());
    let keeps =
        [Keep::Nothing, Keep::Everything, Keep::Random(1), Keep::Random(2), Keep::Few(3), Keep::AllButFew(4)];
    let bounds = Bounds { leaves_max: 1 << 10, lane_states: 16, seed: 5 };
    let mut states = 0;
    for (n, moment) in log.moments.iter().enumerate() {
        for keep in keeps {
            // Every state of memory with some of the slots, and the other way round.
            let slots = || -> BTreeMap<_, _> {
                moment.slots.iter().map(|(g, point)| (*g, Arc::new(point.media(keep)))).collect()
            };
            let mut visit = |ram: SimMedia| judge(&log, moment, Arc::new(ram), slots());
            let (coverage, wrong) = explore(&moment.ram, &bounds, &mut visit);
            states += coverage.states;
            if let Some(wrong) = wrong {
                return (states, Some(format!("moment {n}, slots {keep:?}: {}: {}", wrong.what, wrong.lost)));
            }
        }
        let Some((generation, newest)) = moment.slots.last() else { continue };
        for keep in keeps {
            let mut visit = |slot: SimMedia| {
                let mut slots: BTreeMap<_, _> =
                    moment.slots.iter().map(|(g, point)| (*g, Arc::new(point.media(keep)))).collect();
                slots.insert(*generation, Arc::new(slot));
                judge(&log, moment, Arc::new(moment.ram.media(keep)), slots)
            };
            let (coverage, wrong) = explore(newest, &bounds, &mut visit);
            states += coverage.states;
            if let Some(wrong) = wrong {
                return (
                    states,
                    Some(format!("moment {n}, memory {keep:?}: {}: {}", wrong.what, wrong.lost)),
                );
            }
        }
    }
    (states, None)
}

/// What a failure left is resumed as it was when it was stopped, or not at all.
fn judge(
    log: &Log,
    moment: &Moment,
    ram: Arc<SimMedia>,
    slots: BTreeMap<u64, Arc<SimMedia>>,
) -> std::result::Result<u64, String> {
    let host = Host { ram, slots: Arc::new(Mutex::new(slots)), mutation: None, log: None };
    let mut machine = Model::of(&host, false);
    let generation = match host.resume(&mut machine) {
        Ok(generation) => generation,
        Err(e) if moment.surely.is_some() => return Err(format!("a suspended guest is refused: {e}")),
        Err(_) => return Ok(0),
    };
    if ![moment.surely, moment.maybe].contains(&Some(generation)) {
        return Err(format!(
            "generation {generation} is resumed, of {:?} or {:?}",
            moment.surely, moment.maybe
        ));
    }
    let stopped = log.stopped.get(&generation).ok_or("a generation that never was")?;
    if host.words() != *stopped {
        return Err(format!("memory is not what it was when generation {generation} was stopped"));
    }
    if machine.loaded.as_ref() != Some(stopped) {
        return Err(format!("the state of generation {generation} is not what was saved"));
    }
    let mut again = Model::of(&host, false);
    match host.resume(&mut again) {
        Ok(_) => Err("an image is resumed twice".into()),
        Err(_) => Ok(generation),
    }
}

#[test]
fn a_failure_at_any_moment_leaves_an_image_or_none() {
    for domain in DOMAINS {
        let (states, wrong) = failures(domain, None);
        assert_eq!(wrong, None, "{domain}");
        assert!(states > 1000, "{domain}: {states} states");
        println!("{domain}: {states} states");
    }
}

/// Bits of an image that is suspended go wrong, one at a time.
fn flips(domain: Domain, mutation: Option<Arc<Mutation>>) -> Option<String> {
    let host = Host::new(domain);
    let mut machine = Model::of(&host, true);
    machine.work();
    let generation = machine.suspend().unwrap();
    let (slot, record) = (host.slot(generation).unwrap(), host.memory().record().unwrap().unwrap());
    let refused = |ram: Arc<SimMedia>, slot: SimMedia| {
        ram.mutate(mutation.clone());
        slot.mutate(mutation.clone());
        let slots = Arc::new(Mutex::new(BTreeMap::from([(generation, Arc::new(slot))])));
        let host = Host { ram, slots, mutation: None, log: None };
        let mut machine = Model::of(&host, false);
        host.resume(&mut machine).is_err()
    };
    for byte in 0..SLOT_BYTES {
        let flipped = slot.copy();
        flipped.flip(byte, byte as u32 % 8);
        if !refused(Arc::new(host.ram.copy()), flipped) {
            return Some(format!("byte {byte} of the slot was flipped, and the guest resumed"));
        }
    }
    for byte in 0..RECORD_BYTES {
        let flipped = host.ram.copy();
        let at = RAM_BYTES + record.serial % RECORDS * RECORD_STRIDE_BYTES;
        flipped.flip(at as usize + byte, byte as u32 % 8);
        if !refused(Arc::new(flipped), slot.copy()) {
            return Some(format!("byte {byte} of the record was flipped, and the guest resumed"));
        }
    }
    None
}

#[test]
fn every_byte_of_an_image_is_looked_at() {
    for domain in DOMAINS {
        assert_eq!(flips(domain, None), None, "{domain}");
    }
}

/// Each flush, fence, sync and check of the room is left out in turn: something above notices.
#[test]
fn no_step_can_be_left_out() {
    let met = Arc::new(Mutation::default());
    for domain in DOMAINS {
        assert_eq!(failures(domain, Some(met.clone())).1, None);
    }
    let sites = met.sites();
    assert!(sites.len() >= 8, "{sites:?}");
    for site in sites {
        let left_out = || Some(Arc::new(Mutation::without(site)));
        let noticed = DOMAINS
            .iter()
            .any(|domain| failures(*domain, left_out()).1.is_some() || flips(*domain, left_out()).is_some());
        assert!(noticed, "nothing notices that {site} is left out");
    }
}

#[test]
fn what_fails_before_the_record_leaves_the_guest_running() {
    for fails in [Step::Stop, Step::Save, Step::Identity] {
        let host = Host::new(Domain::Memory);
        let mut machine = Model::of(&host, true);
        machine.fails = Some(fails);
        let e = machine.suspend().unwrap_err();
        assert!(machine.runs && !machine.ended && e.to_string().contains("runs on"), "{e}");
        assert_eq!(host.memory().record().unwrap().unwrap().state, State::Running);
        assert!(host.slots.lock().unwrap().is_empty());
        machine.fails = None;
        assert_eq!(machine.suspend().unwrap(), 1);
    }
}

#[test]
fn a_guest_whose_record_is_in_doubt_does_not_run_on() {
    let host = Host::new(Domain::PageCache);
    let mut machine = Model::of(&host, true);
    machine.work();
    // Memory cannot be made durable: before the record.
    host.ram.fail_syncs(true);
    assert!(machine.suspend().unwrap_err().to_string().contains("runs on"));
    assert!(machine.runs);
    // The record's place cannot be stored to.
    host.ram.fail_syncs(false);
    let (from, to) = (RAM_BYTES as usize, (RAM_BYTES + RECORDS * RECORD_STRIDE_BYTES) as usize);
    let serial = host.memory().record().unwrap().unwrap().serial;
    assert_eq!(serial, 1, "nothing was written yet");
    host.ram.poison(from..to);
    assert!(machine.suspend().is_err());
    assert!(machine.runs, "it was not stopped: the record could not be read");
}

/// The kernel says once that it could not write pages, takes them for clean, and the next sync succeeds without them.
#[test]
fn what_a_sync_did_not_write_is_in_the_next_image() {
    let host = Host::new(Domain::PageCache);
    let mut machine = Model::of(&host, true);
    let suspended_whole = |machine: &mut Model| {
        let generation = machine.suspend().unwrap();
        let words = host.words();
        let left = Arc::new(host.ram.crash_point().media(Keep::Nothing));
        let left = Host { ram: left, ..host.clone() };
        assert_eq!(left.resume(&mut Model::of(&left, false)).unwrap(), generation);
        assert_eq!(left.words(), words, "generation {generation}");
    };
    machine.work();
    host.ram.fail_sync_once();
    assert!(machine.suspend().unwrap_err().to_string().contains("runs on"));
    suspended_whole(&mut machine);
    // Of a guest that was left standing the record is written first.
    let mut machine = Model::of(&host, false);
    host.resume(&mut machine).unwrap();
    machine.work();
    machine.runs = false;
    host.ram.fail_sync_once();
    assert!(go_on_standing(&host.memory(), &mut machine).is_err());
    assert!(go_on_standing(&host.memory(), &mut machine).unwrap().is_some());
    suspended_whole(&mut machine);
}

/// The guest did not run, and what says that its image is consumed may come to the disk all the same.
#[test]
fn a_sync_that_fails_consumes_no_image() {
    let host = Host::new(Domain::PageCache);
    let mut machine = Model::of(&host, true);
    machine.work();
    machine.suspend().unwrap();
    host.ram.fail_sync_once();
    let mut machine = Model::of(&host, false);
    let e = host.resume(&mut machine).unwrap_err();
    assert!(machine.ended && !machine.runs && e.to_string().contains("was not resumed"), "{e}");
    for keep in [Keep::Nothing, Keep::Everything] {
        let left = Host { ram: Arc::new(host.ram.crash_point().media(keep)), ..host.clone() };
        assert_eq!(left.resume(&mut Model::of(&left, false)).unwrap(), 1, "{keep:?}");
    }
    host.ram.fail_syncs(true);
    let e = host.resume(&mut Model::of(&host, false)).unwrap_err();
    assert!(e.to_string().contains("is not known"), "{e}");
    host.ram.fail_syncs(false);
    assert_eq!(host.resume(&mut Model::of(&host, false)).unwrap(), 1);
}

/// Whatever size the memory of the guest had that was there before: its record is found, and none is left of it.
#[test]
fn no_record_of_any_size_is_left() {
    const UNIT: u64 = 4096;
    for domain in DOMAINS {
        let ram = Arc::new(media((4 * UNIT + TRAILER_BYTES) as usize, domain));
        assert_eq!(of_any_size(&ram, UNIT).unwrap(), None);
        for (n, units) in [2, 4].into_iter().enumerate() {
            Ram::new(&ram, units * UNIT).unwrap().begin([n as u8 + 1; 16]).unwrap();
        }
        assert_eq!(of_any_size(&ram, UNIT).unwrap().unwrap().image, [2; 16]);
        // Who is suspended comes first.
        let host = Host { ram: ram.clone(), ..Host::new(domain) };
        Ram::new(&ram, UNIT).unwrap().begin([7; 16]).unwrap();
        Model::of(&host, true).suspend().unwrap();
        assert_eq!(of_any_size(&ram, UNIT).unwrap().unwrap().image, [7; 16]);
        forget_of_any_size(&ram, UNIT).unwrap();
        let left = Arc::new(ram.crash_point().media(Keep::Nothing));
        assert_eq!(of_any_size(&left, UNIT).unwrap(), None, "{domain}");
    }
}

#[test]
fn a_resume_that_fails_may_be_tried_again_until_the_guest_runs() {
    let host = Host::new(Domain::Memory);
    let mut machine = Model::of(&host, true);
    machine.work();
    machine.suspend().unwrap();
    let words = host.words();
    for fails in [Step::Start, Step::Load] {
        let mut machine = Model::of(&host, false);
        machine.fails = Some(fails);
        assert!(host.resume(&mut machine).is_err());
        assert!(machine.ended && !machine.runs);
        assert_eq!(host.memory().record().unwrap().unwrap().state, State::Suspended);
    }
    for _ in 0..2 {
        let mut clone = Model::of(&host, false);
        resume_clone(&host.memory(), &host.slot(1).unwrap(), &mut clone, |_| Ok(())).unwrap();
        assert_eq!(clone.loaded.as_ref(), Some(&words));
    }
    let mut machine = Model::of(&host, false);
    machine.fails = Some(Step::GoOn);
    assert!(host.resume(&mut machine).unwrap_err().to_string().contains("consumed"));
    assert!(machine.ended);
    let e = host.resume(&mut Model::of(&host, false)).unwrap_err();
    assert_eq!(e.errno(), libc::ESTALE, "{e}");
}

/// A record behind it would not be found, and this one would go on saying that the guest is suspended.
#[test]
fn a_record_whose_number_is_the_last_resumes_nothing() {
    for serial in [NUMBER_MAX - 1, NUMBER_MAX, u64::MAX] {
        let host = Host::new(Domain::Memory);
        let mut machine = Model::of(&host, true);
        machine.work();
        machine.suspend().unwrap();
        let record = host.memory().record().unwrap().unwrap();
        let forged = Record { serial, ..record }.encode();
        let at = Addr(RAM_BYTES + record.serial % RECORDS * RECORD_STRIDE_BYTES);
        host.ram.fence(host.ram.copy_nt(at, &forged).unwrap());
        let mut machine = Model::of(&host, false);
        assert!(host.resume(&mut machine).is_err() && !machine.runs, "{serial:#x}");
    }
}

#[test]
fn memory_of_another_generation_fits_no_state() {
    let host = Host::new(Domain::Memory);
    let mut machine = Model::of(&host, true);
    machine.work();
    machine.suspend().unwrap();
    let old = Host { ram: Arc::new(host.ram.copy()), ..host.clone() };
    let mut machine = Model::of(&host, false);
    host.resume(&mut machine).unwrap();
    machine.work();
    machine.suspend().unwrap();
    // Memory as it was at generation 1 with the slot of generation 2 under its name.
    let newest = host.slot(2).unwrap();
    host.slots.lock().unwrap().insert(1, newest);
    let e = old.resume(&mut Model::of(&old, false)).unwrap_err();
    assert_eq!(e.errno(), libc::ESTALE, "{e}");
    // The slot of another boot.
    let other = Host::new(Domain::Memory);
    other.memory().begin([8; 16]).unwrap();
    let mut machine = Model::of(&other, true);
    machine.suspend().unwrap();
    let mut machine = Model::of(&other, false);
    machine.host = host.clone();
    let foreign = host.slot(2).unwrap();
    let e = resume(&other.memory(), &foreign, &mut machine, |_| Ok(())).unwrap_err();
    assert_eq!(e.errno(), libc::ESTALE, "{e}");
}

#[test]
fn a_copy_of_its_own_fits_nothing_of_its_original() {
    let host = Host::new(Domain::PageCache);
    let mut machine = Model::of(&host, true);
    machine.work();
    machine.suspend().unwrap();
    let words = host.words();
    let copy = || {
        let slots = BTreeMap::from([(1, Arc::new(host.slot(1).unwrap().copy()))]);
        Host { ram: Arc::new(host.ram.copy()), slots: Arc::new(Mutex::new(slots)), ..host.clone() }
    };
    let other = copy();
    let own = |seal: &Seal| Ok(seal.identity.clone());
    assert_eq!(adopt(&other.memory(), &other.slot(1).unwrap(), [9; 16], own).unwrap(), 1);
    for (ram, slot) in [(&host, &other), (&other, &host)] {
        let mut machine = Model::of(ram, false);
        let e = resume(&ram.memory(), &slot.slot(1).unwrap(), &mut machine, |_| Ok(())).unwrap_err();
        assert_eq!(e.errno(), libc::ESTALE, "{e}");
    }
    // Both go on, each by itself.
    for host in [&other, &host] {
        let mut machine = Model::of(host, false);
        assert_eq!(host.resume(&mut machine).unwrap(), 1);
        assert_eq!(machine.loaded.as_ref(), Some(&words));
        machine.work();
        assert_eq!(machine.suspend().unwrap(), 2);
    }
    // Between the two steps it is no image.
    let cut = copy();
    let e = adopt(&cut.memory(), &cut.slot(1).unwrap(), [9; 16], own).and_then(|_| {
        let before = copy();
        resume(&before.memory(), &cut.slot(1).unwrap(), &mut Model::of(&before, false), |_| Ok(()))
    });
    assert_eq!(e.unwrap_err().errno(), libc::ESTALE);
    assert_eq!(adopt(&host.memory(), &cut.slot(1).unwrap(), [9; 16], own).unwrap_err().errno(), libc::ESTALE);
}

#[test]
fn who_is_suspended_is_not_suspended_again() {
    let host = Host::new(Domain::Memory);
    let mut machine = Model::of(&host, true);
    machine.suspend().unwrap();
    let mut machine = Model::of(&host, true);
    assert_eq!(machine.suspend().unwrap_err().errno(), libc::EALREADY);
    assert!(machine.runs);
    assert_eq!(Ram::new(&host.ram, RAM_BYTES + TRAILER_BYTES).err().unwrap().errno(), libc::EINVAL);
    // Another size: no record is where it should be.
    let shorter = Ram::new(&host.ram, RAM_BYTES - 64).unwrap();
    assert_eq!(suspend(&shorter, &mut machine).unwrap_err().errno(), libc::ENODATA);
}

/// Whoever resumed a guest is killed when the record was stored and nobody synced it: before memory moves on, it is durable.
#[test]
fn who_goes_on_standing_has_a_durable_record() {
    for domain in DOMAINS {
        let host = Host::new(domain);
        let mut machine = Model::of(&host, true);
        machine.work();
        machine.suspend().unwrap();
        assert_eq!(go_on_standing(&host.memory(), &mut machine).unwrap(), None, "the image is what counts");
        assert!(!machine.runs);
        let mut machine = Model::of(&host, false);
        host.resume(&mut machine).unwrap();
        machine.runs = false;
        // As if nothing had been made durable: all the stores of the last record again, without a fence.
        let record = host.memory().record().unwrap().unwrap();
        let at = Addr(RAM_BYTES + record.serial % RECORDS * RECORD_STRIDE_BYTES);
        let (mut line, before) = ([0; RECORD_BYTES], host.ram.copy());
        host.ram.read(at, &mut line).unwrap();
        let older =
            Host { ram: Arc::new(media((RAM_BYTES + TRAILER_BYTES) as usize, domain)), ..host.clone() };
        let all = before.image();
        let rest: Vec<u8> = (0..all.len())
            .map(|n| if (at.0 as usize..at.0 as usize + RECORD_BYTES).contains(&n) { 0 } else { all[n] })
            .collect();
        let stored = older.ram.copy_nt(Addr(0), &rest).unwrap();
        older.ram.fence(stored);
        older.ram.sync().unwrap();
        older.ram.copy_nt(at, &line).unwrap().left_to_sync();
        let mut machine = Model::of(&older, false);
        assert_eq!(go_on_standing(&older.memory(), &mut machine).unwrap(), Some(1));
        assert!(machine.runs);
        let point = older.ram.crash_point();
        let (_, wrong) = explore(&point, &Bounds::default(), &mut |ram| {
            let found = Ram::new(&Arc::new(ram), RAM_BYTES).unwrap().record().unwrap().unwrap();
            if found.state == State::Consumed { Ok(found.serial) } else { Err(format!("{found:?}")) }
        });
        assert!(wrong.is_none(), "{domain}: {wrong:?}");
    }
}
