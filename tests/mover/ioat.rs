//! The engine for I/OAT, on the model of its registers: the same conformance test, and what only such a device can do:
//! rings that are full and wrap, errors that halt a channel, silence, lies, resets that are not answered.

use std::alloc::Layout;
use std::time::Instant;

use lodestone::mover::engine_emu_ioat::{Addresses, Emulated, Model};
use lodestone::mover::engine_ioat::{Bounds, Device, Ioat, PIECE_BYTES_MAX, Pin, Pinned, SLOTS};
use lodestone::mover::ioat::{
    CBVER, CHAINADDR, CHANCMD, CHANCMP, CHANCNT, CHANCTRL, CHANERR, CHANNEL_BYTES, CHANSTS, CMD_RESET,
    CONFIG_CHANERR_INT, CONTROL_COMPLETION, CTRL_ANY_ERR_ABORT, CTRL_ERR_COMPLETION, DMACOUNT, Descriptor,
    ERR_CHAIN_ADDRESS, ERR_CONTROL, ERR_LENGTH, ERR_NEXT_ADDRESS, ERR_READ_DATA, ERR_WRITE_DATA, State,
    Status as ChannelStatus, XFERCAP,
};

use super::*;

const EAGER: Limits = Limits { in_flight_max: None, ..LIMITS };
/// For devices that keep silent on purpose; long enough for a model whose thread has to wait for a CPU.
const SOON: Bounds = Bounds { silence: Duration::from_millis(200), answer: Duration::from_secs(1) };

fn device_of(model: Model, bounds: Bounds) -> Ioat<Emulated> {
    let durability = if model.ddio { Durability::WriteBack } else { Durability::OnCompletion };
    Ioat::new(Emulated::new(model).unwrap(), durability, bounds).unwrap()
}

/// A mover that has such an engine, and the engine to ask it what it did.
fn given(pool: &Pool, model: Model, bounds: Bounds) -> (Mover<Pool>, Arc<Ioat<Emulated>>) {
    let engine = Arc::new(device_of(model, bounds));
    let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
    mover.give(Box::new(Shared(engine.clone())), EAGER);
    (mover, engine)
}

/// An engine that somebody else looks at as well.
struct Shared(Arc<Ioat<Emulated>>);

impl Engine<Pool> for Shared {
    fn capability(&self) -> Capability {
        Engine::<Pool>::capability(&*self.0)
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &Pool,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        // SAFETY: the caller's.
        unsafe { self.0.submit(media, region, channel, batch, crc) }
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        Engine::<Pool>::poll(&*self.0, ticket)
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        Engine::<Pool>::wait(&*self.0, ticket)
    }

    fn suspend(&self, region: usize) {
        Engine::<Pool>::suspend(&*self.0, region);
    }

    fn resume(&self, region: usize) {
        Engine::<Pool>::resume(&*self.0, region);
    }
}

fn wait(engine: &Ioat<Emulated>, ticket: Ticket) -> Completion {
    Engine::<Pool>::wait(engine, ticket)
}

#[test]
fn a_device_with_registers_conforms_whatever_it_does() {
    let calm = Model::default();
    let models = [
        calm,
        Model { ddio: false, ..calm },
        Model { addresses: Addresses::Pages, ..calm },
        Model { pins: false, ..calm },
        Model { channels: 1, xfercap: 12, version: 0x32, ..calm },
        Model { functions: 2, channels: 2, latency: Duration::from_micros(20), ..calm },
        Model { faults: Some((9, 5)), version: 0x30, ..calm },
        Model { faults: Some((150, 3)), addresses: Addresses::Pages, ddio: false, ..calm },
        Model { faults: Some((40, 7)), pins: false, xfercap: 14, ..calm },
        Model { bytes_per_s: Some(2 << 30), faults: Some((20, 2)), functions: 3, channels: 1, ..calm },
    ];
    for pool in &pools() {
        for model in models {
            let (mover, engine) = given(pool, model, Bounds::default());
            conforms(pool, &mover, None);
            let (moved, counts) = (mover.moved(), engine.counts());
            assert!(moved.bytes > 0, "{model:?}: {moved:?}");
            assert_eq!(moved.finished > 0, model.faults.is_some(), "{model:?}: {moved:?}");
            assert_eq!(counts.resets > 0, model.faults.is_some(), "{model:?}: {counts:?}");
            // Stripes are so small that each of their copies goes through a buffer.
            assert_eq!(counts.pinned > 0, model.pins && pool.regions() == 1, "{model:?}: {counts:?}");
            assert!(counts.bounced > 0 && engine.device().device_ns() > 0, "{counts:?}");
        }
    }
}

#[test]
fn a_device_that_never_succeeds_is_left_alone() {
    let pool = pools().remove(0);
    let (mover, engine) = given(&pool, Model { faults: Some((1, 9)), ..Model::default() }, Bounds::default());
    conforms(&pool, &mover, None);
    let (moved, counts) = (mover.moved(), engine.counts());
    // Four channels, each given five chances.
    assert_eq!(counts.resets, 4 * 5, "{counts:?}");
    assert!(moved.busy > moved.copies, "{moved:?}");
}

/// Under load: what was under way then is the CPU's, and the rest of the test is, too, or the device's again.
#[test]
fn a_device_that_fails_for_good_or_for_once_loses_nothing() {
    let pool = pools().remove(0);
    let calm = Model::default();
    // Whether the device is used again after it.
    let failures = [
        (Model { hangs_at: Some(20), ..calm }, true),
        (Model { hangs_at: Some(1), channels: 1, ..calm }, true),
        (Model { lies_at: Some(20), ..calm }, true),
        (Model { mute_at: Some(20), ..calm }, false),
        (Model { vanishes_at: Some(20), ..calm }, false),
        (Model { vanishes_at: Some(1), addresses: Addresses::Pages, ..calm }, false),
    ];
    for (model, goes_on) in failures {
        let (mover, engine) = given(&pool, model, SOON);
        conforms(&pool, &mover, None);
        let (moved, counts) = (mover.moved(), engine.counts());
        assert!(counts.resets > 0 && moved.finished > 0, "{model:?}: {moved:?} {counts:?}");
        assert_eq!(moved.copies > 100, goes_on, "{model:?}: {moved:?}");
        if !goes_on {
            assert!(moved.busy > 100, "{model:?}: {moved:?}");
            let refused = mover.engine(EngineKind::Given).unwrap();
            let bytes = [1; 8192];
            let mut transfer = Transfer::ToMedia { at: Addr(4096), from: &bytes, route: Route::IntoCaches };
            let refused = carry(refused, &pool, (0, 0), &mut transfer, None, || ()).unwrap_err();
            assert_eq!(refused, Refused::Gone, "{model:?}");
        }
    }
}

/// What this thread logs as a warning or worse.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn during(act: impl FnOnce()) -> Vec<String> {
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.clone(), act);
        lines.0.lock().unwrap().clone()
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn one_line_says_why_the_cpu_copies() {
    let pool = pools().remove(0);
    let bytes = [7; 64 << 10];
    let copy = |mover: &Mover<Pool>| {
        for n in 0..20 {
            let (_, flushed) = mover.store(&pool, None, Addr(4096 + (n << 16)), &bytes, None).unwrap();
            pool.fence(flushed);
            assert!(holds(&pool, 4096 + (n << 16), &bytes));
        }
    };
    let lines = Lines::during(|| {
        let (mover, _) = given(&pool, Model { mute_at: Some(3), ..Model::default() }, SOON);
        copy(&mover);
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("engine emu-ioat: the device is given up ("), "{lines:?}");
    let lines = Lines::during(|| {
        let (mover, _) = given(&pool, Model { hangs_at: Some(3), ..Model::default() }, SOON);
        copy(&mover);
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("was reset (it has made no progress for too long)"), "{lines:?}");
    let mut there = false;
    let lines = Lines::during(|| {
        let mover = Mover::new(&pool, EngineKind::Ioat, Profile::default());
        copy(&mover);
        there = mover.engine(EngineKind::Ioat).is_some();
    });
    if there {
        eprintln!("SKIPPED: that a missing device is told: there is one");
        return;
    }
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].starts_with("engine ioat: ") && lines[0].ends_with("; the CPU copies instead"),
        "{lines:?}"
    );
}

/// Neither a reset nor taking its memory away stops it: then nothing is given back, but the process ends.
#[test]
#[cfg_attr(miri, ignore)]
fn a_device_that_nothing_stops_ends_the_process() {
    const IN_CHILD: &str = "LODE_TEST_IOAT_CHILD";
    let own = "ioat::a_device_that_nothing_stops_ends_the_process";
    if std::env::var_os(IN_CHILD).is_some() {
        let pool = pools().remove(0);
        let (mover, _engine) =
            given(&pool, Model { mute_at: Some(1), stops: false, ..Model::default() }, SOON);
        let _ = mover.store(&pool, None, Addr(4096), &[1; 64 << 10], None);
        // Never reached.
        std::process::exit(0);
    }
    let test = std::env::current_exe().unwrap();
    let child = std::process::Command::new(test).args(["--exact", own]).env(IN_CHILD, "1").output().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&child.status);
    assert_eq!(signal, Some(6), "{child:?}");
}

#[test]
fn rings_and_counts_wrap() {
    let pool = pools().remove(0);
    // 4 KiB to a descriptor: 16 for each copy.
    let engine = device_of(Model { channels: 1, xfercap: 12, ..Model::default() }, Bounds::default());
    let copies = if cfg!(miri) { 300 } else { 2 * (1 << 16) / 16 + 100 };
    let mut rng = Rng::new(5);
    let bytes = random(&mut rng, 128 << 10);
    for n in 0..copies {
        let from = &bytes[(n * 64) % (60 << 10)..][..64 << 10];
        let ticket = submit(&engine, &pool, 0, &[(4096, from)], None);
        assert_eq!(wait(&engine, ticket).bytes, 64 << 10, "{n}");
        assert!(n % 64 != 0 || holds(&pool, 4096, from), "{n}");
    }
    let counts = engine.counts();
    assert_eq!((counts.descriptors, counts.doorbells, counts.resets), (16 * copies as u64, copies as u64, 0));
}

#[test]
fn a_request_is_one_doorbell_and_pairing_halves_its_descriptors() {
    let pool = pools().remove(0);
    let bytes = random(&mut Rng::new(4), 1 << 20);
    let aligned = bytes.as_ptr().align_offset(4096);
    let descriptors = |addresses, offset: usize, at: u64, len: usize| {
        let engine = device_of(Model { addresses, ..Model::default() }, Bounds::default());
        let from = &bytes[aligned + offset..][..len];
        let completion = wait(&engine, submit(&engine, &pool, 0, &[(at, from)], Some(3)));
        assert_eq!((completion.status, completion.crc), (Status::Done, crc32c(from, 3)));
        assert!(holds(&pool, at, from));
        let counts = engine.counts();
        assert_eq!((counts.doorbells, counts.pinned), (1, 1));
        (counts.descriptors, counts.descriptors_unpaired)
    };
    // The buffer is off, media is not; then both, differently; then neither.
    assert_eq!(descriptors(Addresses::Pages, 100, 4096, 128 << 10), (33, 64));
    assert_eq!(descriptors(Addresses::Pages, 100, 4096 + 200, 128 << 10), (33, 65));
    assert_eq!(descriptors(Addresses::Pages, 0, 4096, 128 << 10), (32, 32));
    // Behind an IOMMU nothing is cut.
    assert_eq!(descriptors(Addresses::Contiguous, 100, 4096, 128 << 10), (1, 64));
}

#[test]
fn a_batch_of_several_places_is_one_doorbell_and_one_checksum() {
    let pool = pools().remove(0);
    for model in [Model::default(), Model { addresses: Addresses::Pages, ..Model::default() }] {
        let engine = device_of(model, Bounds::default());
        let bytes = random(&mut Rng::new(4), 3 << 20);
        let (a, rest) = bytes.split_at(5000);
        let (b, c) = rest.split_at(64);
        let copies = [(4096, a), (64 << 10, b), (1 << 20, c)];
        let completion = wait(&engine, submit(&engine, &pool, 0, &copies, Some(77)));
        assert_eq!((completion.status, completion.bytes), (Status::Done, bytes.len() as u64));
        assert_eq!(completion.crc, crc32c(&bytes, 77));
        assert!(copies.iter().all(|(at, bytes)| holds(&pool, *at, bytes)));
        assert_eq!(engine.counts().doorbells, 1);
        // What is more than one submission takes is several.
        let many: Vec<(u64, &[u8])> =
            (0..40).map(|n| (n << 16, &bytes[n as usize * 500..][..3000])).collect();
        let all: Vec<u8> = many.iter().flat_map(|(_, bytes)| bytes.to_vec()).collect();
        let completion = wait(&engine, submit(&engine, &pool, 0, &many, Some(1)));
        assert_eq!((completion.bytes, completion.crc), (all.len() as u64, crc32c(&all, 1)));
        assert!(many.iter().all(|(at, bytes)| holds(&pool, *at, bytes)));
        assert_eq!(engine.counts().doorbells, 1 + 3);
    }
}

/// Of which a submission takes a part, through a buffer or pinned.
#[test]
fn a_request_larger_than_a_submission_goes_on_by_itself() {
    let pool = pools().remove(0);
    let bytes = random(&mut Rng::new(6), PIECE_BYTES_MAX + (300 << 10) + 7);
    for pins in [true, false] {
        let engine = device_of(Model { pins, ..Model::default() }, Bounds::default());
        let ticket = submit(&engine, &pool, 0, &[(8192 + 3, &bytes)], Some(0));
        // Also when it is only looked at.
        eventually("it ends", || Engine::<Pool>::poll(&engine, &ticket));
        let completion = wait(&engine, ticket);
        assert_eq!((completion.bytes, completion.crc), (bytes.len() as u64, crc32c(&bytes, 0)));
        assert!(holds(&pool, 8192 + 3, &bytes));
        let doorbells = if pins { 2 } else { bytes.len().div_ceil(64 << 10) };
        assert_eq!(engine.counts().doorbells, doorbells as u64);
    }
}

#[test]
fn what_fails_in_a_request_ends_what_counts_of_it() {
    let pool = pools().remove(0);
    let model = Model { faults: Some((30, 3)), xfercap: 12, ..Model::default() };
    let engine = device_of(model, Bounds::default());
    let mut ended = [0; 3];
    for n in 0..60u8 {
        let bytes = vec![n + 1; 64 << 10];
        let completion = wait(&engine, submit(&engine, &pool, 1, &[(4096, &bytes)], Some(9)));
        let done = completion.bytes as usize;
        assert!(holds(&pool, 4096, &bytes[..done]), "{n}: {completion:?}");
        assert_eq!(completion.crc, crc32c(&bytes[..done], 9), "{n}: {completion:?}");
        match completion.status {
            Status::Done => assert_eq!(done, bytes.len()),
            Status::Partial => assert!(done > 0 && done < bytes.len() && done.is_multiple_of(4096)),
            Status::Failed => assert_eq!(done, 0),
        }
        ended[completion.status as usize] += 1;
    }
    assert!(ended.iter().all(|times| *times > 0), "each end is met: {ended:?}");
}

#[test]
fn a_full_table_and_a_full_ring_refuse() {
    let pool = pools().remove(0);
    let bytes = random(&mut Rng::new(7), PIECE_BYTES_MAX + 2 * 4096);
    // Elsewhere in its pages than media: a descriptor more for each copy.
    let bytes = &bytes[bytes.as_ptr().align_offset(4096) + 64..];
    // Small ones use up the places for requests, large ones the descriptors of the ring.
    for (len, addresses, at_most) in
        [(4096, Addresses::Contiguous, SLOTS), (PIECE_BYTES_MAX - 4096, Addresses::Pages, 3)]
    {
        let model = Model { channels: 1, addresses, ..Model::default() };
        let engine = device_of(model, Bounds::default());
        Engine::<Pool>::suspend(&engine, 0);
        let mut tickets = Vec::new();
        let refused = loop {
            let raw = RawTransfer {
                at: Addr(4096),
                dram: Dram::From(bytes[..len].as_ptr(), Route::IntoCaches),
                len,
            };
            // SAFETY: all tickets are waited for below, before the bytes go.
            match unsafe { engine.submit(&pool, 0, 0, &[raw], None) } {
                Ok(ticket) => tickets.push(ticket),
                Err(refused) => break refused,
            }
        };
        assert_eq!((refused, tickets.len()), (Refused::Full, at_most));
        assert!(tickets.iter().all(|ticket| !Engine::<Pool>::poll(&engine, ticket)), "it rests");
        Engine::<Pool>::resume(&engine, 0);
        for ticket in tickets {
            assert_eq!(wait(&engine, ticket).bytes, len as u64);
        }
        assert!(holds(&pool, 4096, &bytes[..len]));
        assert_eq!(wait(&engine, submit(&engine, &pool, 0, &[(0, &bytes[..64])], None)).bytes, 64);
    }
}

#[test]
fn channels_with_registers_overtake_each_other() {
    let pool = pools().remove(0);
    let bounds = Bounds { silence: Duration::from_secs(1), ..Bounds::default() };
    let engine = device_of(Model { channels: 2, ..Model::default() }, bounds);
    let (large, small) = (random(&mut Rng::new(8), 1 << 20), random(&mut Rng::new(9), 4096));
    engine.suspend_channel(0);
    let first = submit(&engine, &pool, 0, &[(1 << 20, &large)], None);
    let second = submit(&engine, &pool, 1, &[(4096, &small)], None);
    assert_eq!(wait(&engine, second).status, Status::Done);
    assert!(holds(&pool, 4096, &small));
    // However long it rests, that is not taken for silence.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| wait(&engine, first));
        std::thread::sleep(bounds.silence * 3 / 2);
        assert!(!waits.is_finished(), "its channel rests");
        engine.resume_channel(0);
        assert_eq!(waits.join().unwrap().bytes, 1 << 20);
    });
    assert!(holds(&pool, 1 << 20, &large));
    assert_eq!(engine.counts().resets, 0);
}

/// Where a copy rests depends on when it is told to: tried until that is in the middle.
#[test]
fn a_descriptor_rests_in_the_middle_and_begins_anew() {
    const TRIES: u64 = 200;
    const PIECE: usize = 16 << 10;
    let pool = pools().remove(0);
    let model = Model { bytes_per_s: Some(256 << 20), ..Model::default() };
    let engine = device_of(model, Bounds::default());
    let rested = (1..=TRIES).any(|seed| {
        let bytes = random(&mut Rng::new(seed), 1 << 20);
        let come = || {
            let pieces = (0..bytes.len()).step_by(PIECE);
            pieces.take_while(|&at| holds(&pool, (1 << 20) + at as u64, &bytes[at..at + PIECE])).count()
        };
        let ticket = submit(&engine, &pool, 0, &[(1 << 20, &bytes)], None);
        std::thread::sleep(Duration::from_micros(50 * (seed % 40)));
        Engine::<Pool>::suspend(&engine, 0);
        let (pieces, ended) = (come(), Engine::<Pool>::poll(&engine, &ticket));
        assert_eq!(ended, pieces == bytes.len() / PIECE);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!((come(), Engine::<Pool>::poll(&engine, &ticket)), (pieces, ended), "it rests");
        Engine::<Pool>::resume(&engine, 0);
        assert_eq!(wait(&engine, ticket).bytes, 1 << 20);
        assert!(holds(&pool, 1 << 20, &bytes));
        !ended && pieces > 0
    });
    assert!(rested, "in {TRIES} tries none was told in the middle");
    assert_eq!(engine.counts().resets, 0);
}

#[test]
fn other_media_than_is_registered_is_refused() {
    let mut pools = pools();
    let (other, pool) = (pools.remove(1), pools.remove(0));
    let engine = device_of(Model::default(), Bounds::default());
    engine.register(&pool);
    let bytes = [5; 8192];
    let raw =
        RawTransfer { at: Addr(4096), dram: Dram::From(bytes.as_ptr(), Route::IntoCaches), len: bytes.len() };
    // SAFETY: nothing is submitted, or it is waited for below.
    let refused = unsafe { engine.submit(&other, 0, 0, &[raw], None) };
    assert_eq!(refused.err(), Some(Refused::Gone));
    assert!(holds(&other, 4096, &[0; 8192]) && holds(&pool, 4096, &[0; 8192]));
    assert_eq!(wait(&engine, submit(&engine, &pool, 0, &[(4096, &bytes)], None)).bytes, 8192);
    // Memory that is mapped nowhere cannot be registered.
    let simulated = SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory);
    let engine = device_of(Model::default(), Bounds::default());
    // SAFETY: as above.
    let refused = unsafe { engine.submit(&simulated, 0, 0, &[raw], None) };
    assert_eq!(refused.err(), Some(Refused::Gone));
}

#[test]
fn a_device_that_cannot_be_used_is_told_in_words() {
    let said = |model, bounds| {
        let device = Emulated::new(model).unwrap();
        Ioat::new(device, Durability::WriteBack, bounds).err().unwrap()
    };
    let calm = Model::default();
    let old = said(Model { version: 0x12, ..calm }, SOON);
    assert_eq!(old, "the device has version 1.2, 3.0 is wanted at least");
    let odd = said(Model { xfercap: 5, ..calm }, SOON);
    assert_eq!(odd, "the device says that it copies 2^5 bytes at a time");
    // No descriptor is followed by a device that was told to stop.
    let device = Emulated::new(calm).unwrap();
    assert!(device.stop());
    let refused = Ioat::new(device, Durability::WriteBack, SOON).err().unwrap();
    assert!(refused.starts_with("no memory can be registered"), "{refused}");
}

// ---- the model itself, as a driver sees it ----

/// A page-aligned piece of memory, named to the device.
struct Named {
    at: *mut u8,
    bus: u64,
    layout: Layout,
}

impl Named {
    fn new(device: &Emulated, bytes: usize) -> Named {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: it is not empty; the tests stop or drop the device before this goes.
        unsafe {
            let at = std::alloc::alloc_zeroed(layout);
            Named { at, bus: device.register(at, bytes).unwrap(), layout }
        }
    }

    fn put<T>(&self, offset: usize, value: T) {
        assert!(offset + size_of::<T>() <= self.layout.size());
        // SAFETY: inside, and not the device's at the moment.
        unsafe { self.at.add(offset).cast::<T>().write(value) };
    }

    fn get<T>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.layout.size());
        // SAFETY: inside, and not the device's at the moment.
        unsafe { self.at.add(offset).cast::<T>().read() }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.at, self.layout) };
    }
}

pub fn eventually(what: &str, came_true: impl Fn() -> bool) {
    let begun = Instant::now();
    while !came_true() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

const CHANNEL: usize = CHANNEL_BYTES;

fn state(device: &Emulated) -> ChannelStatus {
    ChannelStatus::of(device.read64(0, CHANNEL + CHANSTS))
}

fn reset(device: &Emulated) {
    device.write8(0, CHANNEL + CHANCMD, CMD_RESET);
    eventually("a reset is answered", || device.read8(0, CHANNEL + CHANCMD) & CMD_RESET == 0);
}

/// One descriptor, on a channel that was reset.
fn start(device: &Emulated, ring: &Named, descriptor: Descriptor) {
    reset(device);
    ring.put(0, Descriptor { next: ring.bus + 64, ..descriptor });
    device.write16(0, CHANNEL + CHANCTRL, CTRL_ANY_ERR_ABORT | CTRL_ERR_COMPLETION);
    device.write64(0, CHANNEL + CHANCMP, ring.bus + 4088);
    device.write64(0, CHANNEL + CHAINADDR, ring.bus);
    device.write16(0, CHANNEL + DMACOUNT, 1);
}

#[test]
fn the_model_copies_and_tells_where_it_was_told_to() {
    let device = Emulated::new(Model::default()).unwrap();
    let (ring, data) = (Named::new(&device, 4096), Named::new(&device, 8192));
    assert_eq!((device.read8(0, CHANCNT), device.read8(0, XFERCAP), device.read8(0, CBVER)), (4, 20, 0x33));
    assert_eq!(state(&device).state, State::Halted, "before it is started");
    data.put(100, 0x1122_3344_5566_7788_u64);
    let mut copy = Descriptor::copy(data.bus + 100, data.bus + 4096, 8);
    copy.control |= CONTROL_COMPLETION;
    start(&device, &ring, copy);
    eventually("it copies", || state(&device).state == State::Idle);
    assert_eq!(state(&device).finished, ring.bus);
    eventually("it tells", || ring.get::<u64>(4088) == ring.bus | 1);
    assert_eq!(data.get::<u64>(4096), 0x1122_3344_5566_7788);
    // Told nothing, it tells nothing.
    ring.put(4088, 0u64);
    start(&device, &ring, Descriptor::copy(data.bus, data.bus + 4096, 64));
    eventually("it copies", || state(&device).state == State::Idle);
    assert_eq!((ring.get::<u64>(4088), data.get::<u64>(4096)), (0, 0));
}

#[test]
fn the_model_halts_where_a_device_would() {
    let device = Emulated::new(Model { version: 0x32, ..Model::default() }).unwrap();
    let (ring, data) = (Named::new(&device, 4096), Named::new(&device, 8192));
    let bytes = [1u8; 64];
    let pins = [Pin { at: bytes.as_ptr(), bytes: 64, stored_to: false }];
    // SAFETY: the bytes are there until the device is dropped.
    let pinned = unsafe { device.pin(3, &pins) }.unwrap();
    let Pinned::Contiguous(read_only) = pinned[0] else { panic!("{pinned:?}") };
    let copy = Descriptor::copy(data.bus, data.bus + 4096, 64);
    let known = |descriptor: Descriptor| {
        start(&device, &ring, descriptor);
        // It tells the error before it halts.
        let error = || device.read32(0, CHANNEL + CHANERR);
        let ended = || error() != 0 || state(&device).state == State::Idle;
        eventually("it halts or ends", ended);
        let expected = if error() == 0 { State::Idle } else { State::Halted };
        eventually("it is in that state", || state(&device).state == expected);
        error()
    };
    assert_eq!(known(copy), 0);
    // Addresses of this process are none of the bus.
    assert_eq!(known(Descriptor { source: data.at.addr() as u64, ..copy }), ERR_READ_DATA);
    assert_eq!(known(Descriptor { destination: data.at.addr() as u64, ..copy }), ERR_WRITE_DATA);
    assert_eq!(known(Descriptor { source: data.bus + 8192 - 63, ..copy }), ERR_READ_DATA);
    assert_eq!(known(Descriptor { source: read_only, ..copy }), 0);
    assert_eq!(known(Descriptor { destination: read_only, ..copy }), ERR_WRITE_DATA);
    assert_eq!(known(Descriptor { size: 0, ..copy }), ERR_LENGTH);
    assert_eq!(known(Descriptor { size: (1 << 20) + 1, ..copy }), ERR_LENGTH);
    assert_eq!(known(Descriptor { control: 0x87 << 24, ..copy }), ERR_CONTROL);
    // It was told in memory as well, and stays as it is until it is reset.
    assert_eq!(ring.get::<u64>(4088) & 7, 3);
    device.write16(0, CHANNEL + DMACOUNT, 2);
    assert_eq!(device.read32(0, CHANNEL + CHANERR), ERR_CONTROL);
    // An error is cleared by writing it.
    device.write32(0, CHANNEL + CHANERR, ERR_CONTROL | ERR_LENGTH);
    assert_eq!(device.read32(0, CHANNEL + CHANERR), 0);
    assert_ne!(device.read_config(0, CONFIG_CHANERR_INT), 0);
    device.write_config(0, CONFIG_CHANERR_INT, u32::MAX);
    assert_eq!(device.read_config(0, CONFIG_CHANERR_INT), 0);
    // What is taken away is not reached any more.
    device.unpin(3);
    assert_eq!(known(Descriptor { source: read_only, ..copy }), ERR_READ_DATA);
    reset(&device);
    device.write64(0, CHANNEL + CHAINADDR, ring.bus + 8);
    device.write16(0, CHANNEL + DMACOUNT, 1);
    eventually("it halts", || device.read32(0, CHANNEL + CHANERR) == ERR_CHAIN_ADDRESS);
    assert!(device.stop());
    reset(&device);
    device.write64(0, CHANNEL + CHAINADDR, ring.bus);
    device.write16(0, CHANNEL + DMACOUNT, 1);
    eventually("it reaches nothing", || device.read32(0, CHANNEL + CHANERR) == ERR_NEXT_ADDRESS);
}
