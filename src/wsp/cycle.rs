//! Suspend and resume, step by step, whatever the guest runs in.
//!
//! Sources: WSP §3 and §5.2 (the phases of its Figures 2 and 3). A crash between any two steps, and a store of which only
//! a part survives, is looked at by `tests/wsp_cycle.rs`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::image::{Record, Seal, State};
use super::record::Ram;
use super::slot;
use crate::error::{Error, Result};
use crate::media::{Addr, Domain, Media};

const SITE: &str = "wsp::cycle";
/// No kernel's pages are smaller.
const PAGE_BYTES: usize = 4096;

/// Where a suspend is (WSP Figure 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The guest is stopped, and the state of its devices saved.
    Prepare,
    /// Disks, memory and state are made durable.
    WriteBack,
    /// The record is written.
    Finish,
    /// The image is durable: whoever has no more power has lost nothing.
    Durable,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Prepare => "prepare",
            Phase::WriteBack => "write-back",
            Phase::Finish => "finish",
            Phase::Durable => "durable",
        }
    }
}

/// What a guest runs in. After an error it can still be told to go on, or ended.
pub trait Machine {
    type Slot: Media;

    /// Told at the beginning of each phase of a suspend, for those who watch it.
    fn reached(&mut self, _phase: Phase) {}
    /// The guest stands, and what it wrote to its disks is durable there.
    fn stop(&mut self) -> Result<()>;
    /// Writes the state of all devices, without memory, behind the place of a new slot's seal. Nothing of it need be durable.
    fn save(&mut self, generation: u64) -> Result<Saved<Self::Slot>>;
    /// What the guest runs in, see [`Seal::identity`]. What it says of files is durable there: a power failure leaves what is sealed.
    fn identity(&mut self) -> Result<Vec<u8>>;
    /// Parts of memory that the guest may have stored to since it was let go on, in this machine; none where that is not known.
    /// What it did not store to is as durable as it was.
    fn touched(&mut self) -> Option<Vec<(Addr, usize)>>;
    /// Removes what [`save`](Machine::save) made.
    fn discard(&mut self, generation: u64);
    /// Maps the memory and is ready to load: the guest does not run.
    fn start(&mut self, seal: &Seal) -> Result<()>;
    /// Loads the state of the slot. Memory stays as it is.
    fn load(&mut self, seal: &Seal) -> Result<()>;
    /// The guest runs.
    fn go_on(&mut self) -> Result<()>;
    /// The guest is gone, and what it ran in.
    fn end(&mut self);
}

/// A slot with a state in it.
pub struct Saved<S> {
    pub slot: S,
    /// Bytes of the state, behind the seal's place.
    pub stream_bytes: u64,
}

/// How long it took to suspend a guest (WSP Figure 2).
#[derive(Clone, Copy, Debug)]
pub struct Suspended {
    pub generation: u64,
    pub stream_bytes: u64,
    /// The guest was stopped and the state of its devices saved.
    pub prepare: Duration,
    /// Disks, memory and state were made durable.
    pub write_back: Duration,
    /// The record was written. What the machine takes to end comes after.
    pub finish: Duration,
}

/// How long it took to resume a guest (WSP Figure 3).
#[derive(Clone, Copy, Debug)]
pub struct Resumed {
    pub generation: u64,
    /// When it had been stopped: nanoseconds since 1970, UTC.
    pub suspended_ns: u64,
    /// The image was verified, and the machine made ready: what the paper's trampoline is.
    pub start: Duration,
    /// The state of the devices was loaded.
    pub load: Duration,
    /// The record was written, and the guest told to go on.
    pub finish: Duration,
}

/// Suspends a guest that runs in `machine` on `ram`. On return the image survives what the media survives, and the machine
/// has ended. After an error the guest runs on, as if nothing had been, unless the error says otherwise.
///
/// EALREADY where the record says that it is suspended, ENODATA where there is none.
pub fn suspend<R: Media, M: Machine>(ram: &Ram<R>, machine: &mut M) -> Result<Suspended> {
    let before = known(ram)?;
    if before.state == State::Suspended {
        return Err(Error::message(libc::EALREADY, SITE, "the guest is suspended already"));
    }
    let generation = before.generation + 1;
    let mut lap = Lap::begin();
    machine.reached(Phase::Prepare);
    let saved = machine.stop().and_then(|()| machine.save(generation)).and_then(|saved| {
        let prepare = lap.end();
        machine.reached(Phase::WriteBack);
        let seal = Seal {
            image: before.image,
            generation,
            slot_bytes: 0,
            stream_bytes: saved.stream_bytes,
            stream_crc: 0,
            suspended_ns: now_ns(),
            identity: machine.identity()?,
        };
        slot::seal(&saved.slot, seal)?;
        // Elsewhere nothing is written back, or the kernel knows what.
        let touched = if ram.media().domain() == Domain::Memory { machine.touched() } else { None };
        let touched = touched.unwrap_or_else(|| vec![(Addr(0), ram.bytes() as usize)]);
        ram.media().persist(&touched).map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            let message = format!("the guest's memory cannot be made durable: {e}");
            dirty_again(ram, Error::message(errno, SITE, message))
        })?;
        Ok((saved.stream_bytes, prepare))
    });
    let (stream_bytes, prepare) = match saved {
        Ok(saved) => saved,
        Err(e) => {
            machine.discard(generation);
            return Err(stay(machine, e));
        }
    };
    let write_back = lap.end();
    machine.reached(Phase::Finish);
    if let Err(e) = ram.write(Record { state: State::Suspended, generation, ..before }) {
        // The record may be durable all the same: memory moves on only when another one surely is.
        return match ram.write(Record { generation, ..before }) {
            Ok(_) => {
                machine.discard(generation);
                Err(stay(machine, e))
            }
            Err(_) => Err(e.context(
                "whether the guest is suspended is not known, so it was not let go on; end it, and try to resume it",
            )),
        };
    }
    let finish = lap.end();
    machine.reached(Phase::Durable);
    // Nobody whose power fails waits for that.
    machine.end();
    Ok(Suspended { generation, stream_bytes, prepare, write_back, finish })
}

/// Resumes a guest on `ram` from `slot`. The record says `consumed`, durably, before the guest runs; until then the image stays
/// what it is, and this may be tried again. `accept` is asked what the image itself does not tell: the disks.
///
/// ENODATA without a record, ESTALE where the record says that there is nothing to resume, and what
/// [`verify`](slot::verify) and the machine say.
pub fn resume<R: Media, S: Media, M: Machine>(
    ram: &Ram<R>,
    slot: &S,
    machine: &mut M,
    accept: impl FnOnce(&Seal) -> Result<()>,
) -> Result<Resumed> {
    bring_back(ram, slot, machine, accept, true)
}

/// As [`resume`], of a machine that keeps what the guest stores to memory to itself: the image stays what it is.
pub fn resume_clone<R: Media, S: Media, M: Machine>(
    ram: &Ram<R>,
    slot: &S,
    machine: &mut M,
    accept: impl FnOnce(&Seal) -> Result<()>,
) -> Result<Resumed> {
    bring_back(ram, slot, machine, accept, false)
}

fn bring_back<R: Media, S: Media, M: Machine>(
    ram: &Ram<R>,
    slot: &S,
    machine: &mut M,
    accept: impl FnOnce(&Seal) -> Result<()>,
    consumes: bool,
) -> Result<Resumed> {
    let mut lap = Lap::begin();
    let (record, seal) = image(ram, slot)?;
    accept(&seal)?;
    let (start, load) = bring_up(machine, &seal, &mut lap)?;
    if consumes && let Err(e) = ram.write(Record { state: State::Consumed, ..record }) {
        machine.end();
        // The other record may be stored all the same.
        return Err(e.context(match ram.write(record) {
            Ok(_) => "the image was not resumed",
            Err(_) => "whether the image is consumed is not known; try to resume it again",
        }));
    }
    if let Err(e) = machine.go_on() {
        machine.end();
        return Err(match consumes {
            true => e.context("the image has been consumed, and the guest does not run: boot it"),
            false => e,
        });
    }
    let (generation, suspended_ns) = (record.generation, seal.suspended_ns);
    Ok(Resumed { generation, suspended_ns, start, load, finish: lap.end() })
}

/// Lets a guest go on that stands because whoever suspended or resumed it was killed; the generation that its memory was
/// resumed from last. None where the record says suspended: then the image is what counts, and the machine is to end.
///
/// What the record says may have been stored and not be durable, so it is written once more before memory moves on.
///
/// ENODATA without a record: nobody knows, and the guest goes on standing.
pub fn go_on_standing<R: Media, M: Machine>(ram: &Ram<R>, machine: &mut M) -> Result<Option<u64>> {
    let record = known(ram)?;
    if record.state == State::Suspended {
        return Ok(None);
    }
    ram.write(record).map_err(|e| dirty_again(ram, e))?;
    machine.go_on()?;
    Ok(Some(record.generation))
}

/// Makes the image of a guest of its own out of copies of another's memory and slot: with another number, so that nothing of the one fits
/// the other from here on, and with what it runs in itself. Cut short, it leaves copies that do not fit.
///
/// What [`image`] says of copies that are none.
pub fn adopt<R: Media, S: Media>(
    ram: &Ram<R>,
    slot: &S,
    image: [u8; 16],
    identity: impl FnOnce(&Seal) -> Result<Vec<u8>>,
) -> Result<u64> {
    let (record, seal) = self::image(ram, slot)?;
    let identity = identity(&seal)?;
    slot::seal(slot, Seal { image, identity, ..seal })?;
    ram.write(Record { image, ..record })?;
    Ok(record.generation)
}

/// What the record of memory names as suspended, and the slot's seal, of which every byte verified.
pub fn image<R: Media, S: Media>(ram: &Ram<R>, slot: &S) -> Result<(Record, Seal)> {
    let record = suspended(ram)?;
    let seal = slot::verify(slot, &record)?;
    Ok((record, seal))
}

/// The record, where it says that there is something to resume.
pub fn suspended<R: Media>(ram: &Ram<R>) -> Result<Record> {
    let record = known(ram)?;
    let refused = |message: String| Err(Error::message(libc::ESTALE, SITE, message));
    match record.state {
        State::Suspended => Ok(record),
        State::Running => refused(
            "the guest was not suspended since it was booted, and its devices' state died with it".into(),
        ),
        State::Consumed => refused(format!(
            "the image of generation {} has been consumed: the guest was resumed from it, and memory has moved on",
            record.generation
        )),
    }
}

fn known<R: Media>(ram: &Ram<R>) -> Result<Record> {
    ram.record()?.ok_or_else(|| {
        let message =
            "the memory has no record that verifies: it is of no guest, of another size, or damaged";
        Error::message(libc::ENODATA, SITE, message)
    })
}

/// After a sync that failed, `why`, the kernel takes for clean what it could not write, and the next one succeeds without it. So all
/// of memory, which stands, becomes dirty again before it moves on: else the next suspend would be acknowledged without that.
fn dirty_again<R: Media>(ram: &Ram<R>, why: Error) -> Error {
    if ram.media().domain() != Domain::PageCache {
        return why;
    }
    let again = (0..ram.bytes()).step_by(PAGE_BYTES).map(Addr).try_for_each(|at| {
        let word = ram.media().load64(at)?;
        ram.media().store64(at, word)?.redundant("it is what stood there");
        Ok::<_, Error>(())
    });
    match again {
        Ok(()) => why,
        Err(e) => why.context(format_args!(
            "what of it is lost is not known ({e}): end the guest, and do not suspend it again"
        )),
    }
}

fn bring_up<M: Machine>(machine: &mut M, seal: &Seal, lap: &mut Lap) -> Result<(Duration, Duration)> {
    let started = machine.start(seal).map(|()| lap.end());
    let loaded = started.and_then(|start| machine.load(seal).map(|()| (start, lap.end())));
    loaded.inspect_err(|_| machine.end())
}

/// Lets the guest go on after `why`.
fn stay<M: Machine>(machine: &mut M, why: Error) -> Error {
    match machine.go_on() {
        Ok(()) => why.context("the guest was not suspended, and runs on"),
        Err(e) => why.context(format_args!("the guest was not suspended, and cannot be told to go on ({e})")),
    }
}

/// The time since it was asked last.
struct Lap(Instant);

impl Lap {
    fn begin() -> Lap {
        Lap(Instant::now())
    }

    fn end(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
