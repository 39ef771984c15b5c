//! One conformance test for all engines: whatever an engine does or fails to do, each byte arrives, each checksum is
//! right, nothing else changes, and a fence by the caller makes it durable.

#[path = "mover/ioat.rs"]
mod ioat;

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, OpenOptions};
use lodestone::media::{
    Addr, Dirty, Domain, Durable, Fault, Flushed, LINE, Media, Pool, PoolOptions, crc32c,
};
use lodestone::mover::completion::{Completion, Status};
use lodestone::mover::dsa_sysfs::Places;
use lodestone::mover::engine_dsa::{Dsa, Offer, Portal};
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::engine_port::*;
use lodestone::mover::profile::{Limits, Profile, Thresholds};
use lodestone::mover::{EngineKind, Mover};
use lodestone::sim::media::{Keep, Rng, SimMedia};

use ioat::eventually;

#[cfg(not(miri))]
#[path = "mover/dsa.rs"]
mod dsa;
#[cfg(not(miri))]
#[path = "mover/dsa_peer.rs"]
mod dsa_peer;

const MEDIA_BYTES: usize = 4 << 20;
const COPY_BYTES_MAX: usize = 300 << 10;

const LIMITS: Limits = Limits {
    thresholds: Thresholds {
        local_write: 16 << 10,
        local_read: 32 << 10,
        remote_write: 16 << 10,
        remote_read: 16 << 10,
    },
    in_flight_max: Some(3),
};

/// An engine that does not always come to the end. What is told to go into the caches is not written back; what goes
/// past them is durable as `past` says.
struct Faulty {
    capability: Capability,
    past: Durability,
    turns: AtomicU32,
}

impl Faulty {
    fn new(alignment: usize, routes: Routes, past: Durability) -> Box<Faulty> {
        let capability = Capability {
            smallest_bytes: 4 << 10,
            largest_bytes: 100 << 10,
            alignment,
            routes,
            shares_reads: true,
            channels: 3,
        };
        Box::new(Faulty { capability, past, turns: AtomicU32::new(0) })
    }
}

/// Each way to say when a copy is durable.
const ROUTES: [(Routes, Durability); 5] = [
    (Routes::PAST_CACHES, Durability::OnCompletion),
    (Routes::PAST_CACHES, Durability::Fence),
    (Routes::INTO_CACHES, Durability::WriteBack),
    (Routes::BOTH, Durability::OnCompletion),
    (Routes::BOTH, Durability::Fence),
];

impl<M: Media> Engine<M> for Faulty {
    fn capability(&self) -> Capability {
        self.capability
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        _region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        assert!(channel < 3, "channel {channel}");
        let bytes: usize = batch.iter().map(|t| t.len).sum();
        assert!(bytes <= self.capability.largest_bytes);
        let until = match self.turns.fetch_add(1, Ordering::Relaxed) % 7 {
            0 => return Err(Refused::Full),
            1 => return Err(Refused::Gone),
            2 => 0,
            3 => bytes / 3,
            4 => bytes - 1,
            _ => bytes,
        };
        let (mut done, mut crc, mut durability) = (0, crc.unwrap_or(0), self.past);
        for transfer in batch {
            let now = transfer.len.min(until - done);
            match transfer.dram {
                Dram::From(from, route) => {
                    assert!(transfer.at.0.is_multiple_of(self.capability.alignment as u64));
                    assert!(transfer.len.is_multiple_of(self.capability.alignment));
                    let Routes { past_caches, into_caches } = self.capability.routes;
                    assert!(if route == Route::PastCaches { past_caches } else { into_caches });
                    let skewed = !(transfer.at.0 ^ from.addr() as u64).is_multiple_of(LINE as u64);
                    assert!(route == Route::IntoCaches || self.capability.alignment == 1 || !skewed);
                    if route == Route::IntoCaches {
                        durability = Durability::WriteBack;
                    }
                    // SAFETY: whoever submits vouches for the bytes.
                    let from = unsafe { std::slice::from_raw_parts(from, now) };
                    let dirty = media.copy_cached(transfer.at, from).unwrap();
                    match durability {
                        Durability::WriteBack => dirty.redundant("the mover writes it back"),
                        Durability::OnCompletion => {
                            media.fence(media.flush(dirty));
                        }
                        Durability::Fence => media.flush(dirty).stood_for(),
                    }
                    crc = crc32c(from, crc);
                }
                Dram::To(to) => {
                    // SAFETY: likewise.
                    media.read(transfer.at, unsafe { std::slice::from_raw_parts_mut(to, now) }).unwrap();
                }
            }
            done += now;
        }
        let status = match done {
            0 => Status::Failed,
            n if n < bytes => Status::Partial,
            _ => Status::Done,
        };
        let done = Completion { status, bytes: done as u64, crc, durability, nanoseconds: 1000 };
        Ok(Ticket::ended(done))
    }

    fn poll(&self, _: &Ticket) -> bool {
        true
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        ticket.completion().unwrap()
    }

    fn suspend(&self, _: usize) {}

    fn resume(&self, _: usize) {}
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| rng.draw().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// A copy that few others are like: of any size, at any place.
fn place(rng: &mut Rng, from: usize, to: usize) -> (usize, usize) {
    let len = match rng.below(4) {
        0 => rng.below(64),
        1 => rng.below(9000),
        2 => 4096 << rng.below(6),
        _ => rng.below(COPY_BYTES_MAX as u64),
    };
    let len = (len as usize).min(to - from);
    let mut at = from + rng.below((to - from - len) as u64 + 1) as usize;
    if rng.below(3) == 0 {
        at = (at / LINE * LINE).max(from);
    }
    (at, len)
}

/// Copies in one part of media against a copy of it in DRAM.
fn exercise<M: Media>(
    media: &M,
    mover: &Mover<M>,
    via: Option<EngineKind>,
    part: std::ops::Range<usize>,
    seed: u64,
    copies: usize,
) {
    let mut rng = Rng::new(seed);
    let mut model = vec![0; part.len()];
    media.read(Addr(part.start as u64), &mut model).unwrap();
    for n in 0..copies {
        let (at, len) = place(&mut rng, part.start, part.end);
        let own = at - part.start..at - part.start + len;
        let skew = rng.below(70) as usize;
        if rng.below(2) == 0 {
            let bytes = random(&mut rng, len + skew);
            let begin = (rng.below(2) == 0).then_some(rng.draw() as u32);
            let (crc, flushed) = mover.store(media, via, Addr(at as u64), &bytes[skew..], begin).unwrap();
            media.fence(flushed);
            assert_eq!(crc, begin.map(|begin| crc32c(&bytes[skew..], begin)), "{n}: {len} bytes at {at}");
            model[own].copy_from_slice(&bytes[skew..]);
        } else {
            let mut bytes = vec![0xee; len + skew + 1];
            mover.load(media, via, Addr(at as u64), &mut bytes[skew..skew + len]).unwrap();
            assert!(bytes[skew..skew + len] == model[own], "{n}: {len} bytes at {at}");
            assert!(bytes[..skew].iter().chain(&bytes[skew + len..]).all(|b| *b == 0xee), "{n}: beside it");
        }
    }
    let mut now = vec![0; part.len()];
    media.read(Addr(part.start as u64), &mut now).unwrap();
    assert!(now == model, "what nobody stored to changed");
}

/// Pools of one region and of three, stripes so small that copies cross them.
fn pools() -> Vec<Pool> {
    let options =
        PoolOptions { assume: Some(Domain::Memory), stripe_bytes: Some(64 << 10), ..PoolOptions::default() };
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let dir = std::env::temp_dir();
    [1, 3]
        .into_iter()
        .map(|regions| {
            let name = |_| {
                let n = MADE.fetch_add(1, Ordering::Relaxed);
                dir.join(format!("lodestone-mover-{}-{n}", std::process::id()))
            };
            let paths: Vec<_> = (0..regions).map(name).collect();
            let pool = Pool::create(&paths, Some((2 * MEDIA_BYTES) as u64), &options).unwrap();
            paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
            pool
        })
        .collect()
}

fn copies() -> usize {
    std::env::var("LODE_COPIES").ok().and_then(|n| n.parse().ok()).unwrap_or(if cfg!(miri) {
        20
    } else {
        2000
    })
}

/// Whether this machine has a work queue: without one the CPU copies.
fn has_dsa() -> bool {
    let found = lodestone::mover::dsa_sysfs::find(&Places::default());
    found.missing().is_none()
}

/// From four threads, each in its own part, of which the edges share lines.
fn conforms<M: Media>(media: &M, mover: &Mover<M>, via: Option<EngineKind>) {
    const THREADS: usize = 4;
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            scope.spawn(move || {
                let of = |n| 4096 + n * (MEDIA_BYTES - 4096) / THREADS;
                exercise(media, mover, via, of(n)..of(n + 1), 7 + n as u64, copies() / THREADS);
            });
        }
    });
}

#[test]
fn every_engine_conforms() {
    for pool in &pools() {
        for kind in EngineKind::NAMED {
            // Chosen for all, and by whoever calls.
            let for_all = Mover::new(pool, kind, Profile::default());
            conforms(pool, &for_all, None);
            let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
            conforms(pool, &mover, Some(kind));
            for mover in [for_all, mover] {
                let moved = mover.moved();
                if kind == EngineKind::Dsa {
                    // A real one meets pages that are not there, and queues that others fill.
                    assert!(if has_dsa() { moved.bytes > 0 } else { moved.copies == 0 && moved.busy > 0 });
                    continue;
                }
                if kind == EngineKind::Ioat && mover.engine(kind).is_none() {
                    assert!(moved.copies == 0 && moved.busy > 0, "{kind}: {moved:?}");
                    continue;
                }
                assert_eq!(moved.bytes > 0, kind != EngineKind::Cpu, "{kind}: {moved:?}");
                assert_eq!((moved.finished, moved.busy), (0, 0), "{kind}: {moved:?}");
            }
        }
    }
}

#[test]
fn what_an_engine_leaves_undone_is_done() {
    for pool in &pools() {
        for alignment in [1, LINE] {
            for (routes, past) in ROUTES {
                let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
                mover.give(Faulty::new(alignment, routes, past), LIMITS);
                conforms(pool, &mover, None);
                let moved = mover.moved();
                assert!(moved.busy > 0 && moved.finished > 0 && moved.copies > moved.finished, "{moved:?}");
            }
        }
    }
}

#[test]
fn a_fence_makes_durable_what_any_engine_stored() {
    let own = EngineKind::NAMED.map(|kind| (kind, None));
    let given = ROUTES.map(|routes| (EngineKind::Given, Some(routes)));
    for (kind, routes) in own.into_iter().chain(given) {
        let media = SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory);
        let mover = Mover::new(&media, EngineKind::Cpu, Profile::default());
        if let Some((routes, past)) = routes {
            mover.give(Faulty::new(LINE, routes, past), LIMITS);
        }
        let mut rng = Rng::new(3);
        for _ in 0..60 {
            let (at, len) = place(&mut rng, 0, MEDIA_BYTES);
            let bytes = random(&mut rng, len);
            let (_, flushed) = mover.store(&media, Some(kind), Addr(at as u64), &bytes, Some(0)).unwrap();
            media.fence(flushed);
            let mut found = vec![0; len];
            media.crash_point().media(Keep::Nothing).read(Addr(at as u64), &mut found).unwrap();
            assert!(found == bytes, "{kind}: {len} bytes at {at}");
        }
    }
}

#[test]
fn a_bad_line_is_met_as_without_an_engine() {
    for kind in EngineKind::NAMED {
        let media = SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory);
        let mover = Mover::new(&media, kind, Profile::default());
        media.poison(100 << 10..(100 << 10) + LINE);
        let fault = mover.store(&media, None, Addr(64 << 10), &[1; 64 << 10], None).unwrap_err();
        assert_eq!(fault.at, Addr(100 << 10), "{kind}");
        let mut bytes = vec![0; 64 << 10];
        assert_eq!(mover.load(&media, None, Addr(64 << 10), &mut bytes).unwrap_err().at, Addr(100 << 10));
        // The engine goes on.
        mover.load(&media, None, Addr(1 << 20), &mut bytes).unwrap();
    }
}

/// On whatever thread the signal comes.
#[test]
#[cfg_attr(miri, ignore)]
fn media_that_goes_away_is_met_as_without_an_engine() {
    const CUT: u64 = 1 << 20;
    let path = std::env::temp_dir().join(format!("lodestone-mover-cut-{}", std::process::id()));
    for kind in EngineKind::NAMED {
        let options = PoolOptions { assume: Some(Domain::Memory), force: true, ..PoolOptions::default() };
        let pool = Pool::create(std::slice::from_ref(&path), Some(8 << 20), &options).unwrap();
        let mover = Mover::new(&pool, kind, Profile::default());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(CUT).unwrap();
        let mut bytes = vec![3; 128 << 10];
        for before in [0, 64 << 10] {
            let at = Addr(CUT - before);
            let fault = mover.store(&pool, None, at, &bytes, Some(0)).unwrap_err();
            assert_eq!(fault.at, Addr(CUT), "{kind}: a store {before} bytes before the cut");
            let fault = mover.load(&pool, None, at, &mut bytes).unwrap_err();
            assert_eq!(fault.at, Addr(CUT), "{kind}: a load {before} bytes before the cut");
        }
        // The engine goes on.
        let (_, flushed) = mover.store(&pool, None, Addr(8192), &[4; 128 << 10], None).unwrap();
        pool.fence(flushed);
        mover.load(&pool, None, Addr(8192), &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 4), "{kind}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
#[should_panic(expected = "outside")]
fn a_range_outside_panics_in_the_caller() {
    let pool = pools().remove(0);
    let mover = Mover::new(&pool, EngineKind::Delegate, Profile::default());
    let (at, bytes) = (Addr(pool.len() - 4096), vec![0; 64 << 10]);
    let _ = mover.store(&pool, None, at, &bytes, None);
}

/// How many copies there are at a time, and by whom. The first waits until so many are inside as are wanted; each stays until
/// nobody came for a while.
struct Crowd {
    media: SimMedia,
    wanted: usize,
    inside: Mutex<Inside>,
    came: Condvar,
}

#[derive(Default)]
struct Inside {
    now: usize,
    most: usize,
    by: Vec<std::thread::ThreadId>,
}

impl Crowd {
    fn new(wanted: usize) -> Crowd {
        let media = SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory);
        Crowd { media, wanted, inside: Mutex::default(), came: Condvar::new() }
    }
}

impl Media for Crowd {
    fn len(&self) -> u64 {
        self.media.len()
    }

    fn domain(&self) -> Domain {
        self.media.domain()
    }

    fn two_fence_bytes(&self) -> usize {
        self.media.two_fence_bytes()
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        let mut inside = self.inside.lock().unwrap();
        inside.now += 1;
        inside.most = inside.most.max(inside.now);
        inside.by.push(std::thread::current().id());
        self.came.notify_all();
        let too_few = |inside: &mut Inside| inside.most < self.wanted;
        let (inside, late) = self.came.wait_timeout_while(inside, Duration::from_secs(60), too_few).unwrap();
        assert!(!late.timed_out(), "nobody else came in");
        drop(inside);
        std::thread::sleep(Duration::from_millis(20));
        let copied = self.media.copy_nt(at, src);
        self.inside.lock().unwrap().now -= 1;
        copied
    }

    fn fence(&self, flushed: Flushed) -> Durable {
        self.media.fence(flushed)
    }

    fn read(&self, _: Addr, _: &mut [u8]) -> Result<(), Fault> {
        unreachable!("nobody reads a crowd")
    }

    fn load64(&self, _: Addr) -> Result<u64, Fault> {
        unreachable!("nobody reads a crowd")
    }

    fn crc32c(&self, _: Addr, _: usize, _: u32) -> Result<u32, Fault> {
        unreachable!("nobody reads a crowd")
    }

    fn store64(&self, _: Addr, _: u64) -> Result<Dirty, Fault> {
        unreachable!("copies are non-temporal")
    }

    fn copy_cached(&self, _: Addr, _: &[u8]) -> Result<Dirty, Fault> {
        unreachable!("copies are non-temporal")
    }

    fn copy_nt_crc(&self, _: Addr, _: &[u8], _: u32) -> Result<(u32, Flushed), Fault> {
        unreachable!("no checksum is asked for")
    }

    fn zero_nt(&self, _: Addr, _: usize) -> Result<Flushed, Fault> {
        unreachable!("copies have bytes")
    }

    fn flush(&self, _: Dirty) -> Flushed {
        unreachable!("copies are non-temporal")
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_limited_engines_limit() {
    for kind in [EngineKind::Semaphore, EngineKind::Delegate] {
        let crowd = Crowd::new(2);
        let mover = Mover::new(&crowd, kind, Profile { concurrency: 2, ..Profile::default() });
        std::thread::scope(|scope| {
            for n in 0..6 {
                let (crowd, mover) = (&crowd, &mover);
                scope.spawn(move || {
                    let (_, flushed) =
                        mover.store(crowd, None, Addr(n << 17), &[n as u8; 64 << 10], None).unwrap();
                    crowd.fence(flushed);
                });
            }
        });
        assert_eq!(crowd.inside.lock().unwrap().most, 2, "{kind}");
    }
}

/// Nobody is woken for what its caller can do itself; what nobody waits for begins all the same.
#[test]
fn who_waits_for_a_delegate_copies_and_who_does_not_has_others_copy() {
    let crowd = Crowd::new(1);
    let mover = Mover::new(&crowd, EngineKind::Delegate, Profile { concurrency: 1, ..Profile::default() });
    let bytes = vec![1; 64 << 10];
    let (_, flushed) = mover.store(&crowd, None, Addr(0), &bytes, None).unwrap();
    crowd.fence(flushed);
    let here = std::thread::current().id();
    let by = || std::mem::take(&mut crowd.inside.lock().unwrap().by);
    assert_eq!(by(), [here]);
    let engine = mover.engine(EngineKind::Delegate).unwrap();
    let submit = || {
        let dram = Dram::From(bytes.as_ptr(), Route::PastCaches);
        let part = RawTransfer { at: Addr(0), dram, len: bytes.len() };
        // SAFETY: it is waited for below, before the bytes go.
        unsafe { engine.submit(&crowd, 0, 0, &[part], None) }.unwrap()
    };
    // Its submitter goes on to something else.
    let ticket = submit();
    engine.start(&ticket);
    eventually("a worker copies it", || engine.poll(&ticket));
    assert_eq!(engine.wait(ticket).bytes, 64 << 10);
    assert!(by().iter().all(|thread| *thread != here));
    // Somebody who only looks does not copy.
    let ticket = submit();
    eventually("a worker copies it", || engine.poll(&ticket));
    assert_eq!(engine.wait(ticket).status, Status::Done);
    assert!(by().iter().all(|thread| *thread != here));
    // Who waits stands behind those that came before: there is one place.
    let (first, second) = (submit(), submit());
    engine.start(&first);
    assert_eq!((engine.wait(second).status, engine.wait(first).status), (Status::Done, Status::Done));
    assert_eq!((by().len(), crowd.inside.lock().unwrap().most), (2, 1));
}

#[test]
fn a_suspended_region_holds_and_resumes() {
    let pool = Arc::new(pools().remove(0));
    for kind in [EngineKind::Semaphore, EngineKind::Delegate] {
        let mover = Arc::new(Mover::new(&*pool, kind, Profile::default()));
        mover.engine(kind).unwrap().suspend(0);
        let copy = std::thread::spawn({
            let (pool, mover) = (pool.clone(), mover.clone());
            move || mover.store(&*pool, None, Addr(4096), &[9; 64 << 10], None).map(|(_, f)| pool.fence(f))
        });
        std::thread::sleep(Duration::from_millis(30));
        assert!(!copy.is_finished(), "{kind}");
        mover.engine(kind).unwrap().resume(0);
        copy.join().unwrap().unwrap();
        let mut found = vec![0; 64 << 10];
        pool.read(Addr(4096), &mut found).unwrap();
        assert!(found.iter().all(|b| *b == 9));
    }
}

#[test]
fn a_panic_meanwhile_waits_for_the_copy() {
    let pool = pools().remove(0);
    let mover = Mover::new(&pool, EngineKind::Delegate, Profile::default());
    let engine = mover.engine(EngineKind::Delegate).unwrap();
    let bytes = vec![5; 1 << 20];
    let mut transfer = Transfer::ToMedia { at: Addr(4096), from: &bytes, route: Route::PastCaches };
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        carry(engine, &pool, (0, 0), &mut transfer, None, || panic!("meanwhile"))
    }));
    assert!(panicked.is_err());
    let mut found = vec![0; 1 << 20];
    pool.read(Addr(4096), &mut found).unwrap();
    assert!(found == bytes, "it had ended");
}

// ---- the emulated device ----

fn device(model: Model, routes: Routes) -> Box<Dsa<Emulated>> {
    let offer = Offer { routes, ..model.offer };
    Box::new(Dsa::new(Emulated::new(Model { offer, ..model })))
}

#[test]
fn an_emulated_device_conforms_whatever_it_does() {
    let calm = Model::default();
    let models = [
        calm,
        Model { channels: 1, ring: 1, ..calm },
        Model { channels: 3, faults: Some((3, 5)), ..calm },
        Model { ring: 2, faults: Some((1, 9)), latency: Duration::from_micros(20), ..calm },
        Model { bytes_per_s: Some(2 << 30), faults: Some((4, 2)), ..calm },
    ];
    let eager = Limits { in_flight_max: None, ..LIMITS };
    for pool in &pools() {
        for model in models {
            for routes in [Routes::PAST_CACHES, Routes::INTO_CACHES, Routes::BOTH] {
                let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
                mover.give(device(model, routes), eager);
                conforms(pool, &mover, None);
                let moved = mover.moved();
                assert!(moved.bytes > 0 || model.faults.is_some_and(|(one_in, _)| one_in == 1), "{moved:?}");
                assert_eq!(moved.finished > 0, model.faults.is_some(), "{model:?}: {moved:?}");
                assert!(moved.busy == 0 || model.ring < 64, "{model:?}: {moved:?}");
            }
        }
    }
}

/// Copies of one batch, submitted as they are.
fn submit<'a>(
    engine: &dyn Engine<Pool>,
    pool: &Pool,
    channel: usize,
    copies: &[(u64, &'a [u8])],
    crc: Option<u32>,
) -> Ticket {
    let raw = |&(at, from): &(u64, &'a [u8])| RawTransfer {
        at: Addr(at),
        dram: Dram::From(from.as_ptr(), Route::PastCaches),
        len: from.len(),
    };
    let batch: Vec<RawTransfer> = copies.iter().map(raw).collect();
    // SAFETY: the callers wait for the ticket with this engine before the bytes go, and change none of them.
    unsafe { engine.submit(pool, 0, channel, &batch, crc) }.unwrap()
}

fn holds(pool: &Pool, at: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    pool.read(Addr(at), &mut found).unwrap();
    found == bytes
}

#[test]
fn a_batch_is_one_submission_and_one_checksum() {
    let pool = pools().remove(0);
    for model in [Model::default(), Model { ring: 1, channels: 1, ..Model::default() }] {
        let engine = device(model, Routes::PAST_CACHES);
        let bytes = random(&mut Rng::new(4), 3 << 20);
        let (a, rest) = bytes.split_at(5000);
        let (b, c) = rest.split_at(64);
        // The last one is more than one descriptor takes.
        let copies = [(4096, a), (64 << 10, b), (1 << 20, c)];
        let ticket = submit(&*engine, &pool, 0, &copies, Some(77));
        let completion = Engine::<Pool>::wait(&*engine, ticket);
        assert_eq!((completion.status, completion.bytes), (Status::Done, bytes.len() as u64));
        assert_eq!(completion.crc, crc32c(&bytes, 77));
        assert!(copies.iter().all(|(at, bytes)| holds(&pool, *at, bytes)));
    }
    // What fails in a batch ends what counts of it.
    let engine = device(Model { faults: Some((2, 3)), ..Model::default() }, Routes::PAST_CACHES);
    let bytes = [7; 4096];
    let mut ended = [0; 3];
    for n in 0..60u8 {
        let bytes = bytes.map(|b| b + n);
        let copies: Vec<_> = (0..4).map(|k| (k << 16, &bytes[..])).collect();
        let completion = Engine::<Pool>::wait(&*engine, submit(&*engine, &pool, 1, &copies, None));
        let whole = completion.bytes as usize / bytes.len();
        assert!(copies[..whole].iter().all(|(at, bytes)| holds(&pool, *at, bytes)), "{n}: {completion:?}");
        match completion.status {
            Status::Done => assert_eq!(completion.bytes, 4 << 12),
            Status::Partial => assert!((1..4 << 12).contains(&completion.bytes)),
            Status::Failed => assert_eq!(completion.bytes, 0),
        }
        ended[completion.status as usize] += 1;
    }
    assert!(ended.iter().all(|times| *times > 0), "each end is met: {ended:?}");
}

#[test]
fn channels_overtake_each_other() {
    let pool = pools().remove(0);
    let engine = device(Model { channels: 2, ..Model::default() }, Routes::PAST_CACHES);
    let (large, small) = (random(&mut Rng::new(8), 1 << 20), random(&mut Rng::new(9), 4096));
    engine.portal().suspend(0);
    let first = submit(&*engine, &pool, 0, &[(1 << 20, &large)], None);
    let second = submit(&*engine, &pool, 1, &[(4096, &small)], None);
    assert_eq!(Engine::<Pool>::wait(&*engine, second).status, Status::Done);
    assert!(holds(&pool, 4096, &small));
    assert!(!Engine::<Pool>::poll(&*engine, &first), "its channel rests");
    engine.portal().resume(0);
    assert_eq!(Engine::<Pool>::wait(&*engine, first).bytes, 1 << 20);
    assert!(holds(&pool, 1 << 20, &large));
    assert!(engine.portal().device_ns() > 0);
}

/// Where a copy rests depends on when it is told to: tried until that is in the middle.
#[test]
fn a_copy_rests_in_the_middle_and_goes_on_from_there() {
    const TRIES: u64 = 200;
    const PIECE: usize = 16 << 10;
    let pool = pools().remove(0);
    let engine = device(Model { bytes_per_s: Some(256 << 20), ..Model::default() }, Routes::PAST_CACHES);
    let rested = (1..=TRIES).any(|seed| {
        let bytes = random(&mut Rng::new(seed), 1 << 20);
        let come = || {
            (0..bytes.len())
                .step_by(PIECE)
                .take_while(|&at| holds(&pool, (1 << 20) + at as u64, &bytes[at..at + PIECE]))
        };
        let ticket = submit(&*engine, &pool, 0, &[(1 << 20, &bytes)], None);
        std::thread::sleep(Duration::from_micros(50 * (seed % 40)));
        engine.portal().suspend(0);
        let pieces = come().count();
        let ended = Engine::<Pool>::poll(&*engine, &ticket);
        assert_eq!(ended, pieces == bytes.len() / PIECE);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!((come().count(), Engine::<Pool>::poll(&*engine, &ticket)), (pieces, ended), "it rests");
        engine.portal().resume(0);
        assert_eq!(Engine::<Pool>::wait(&*engine, ticket).bytes, 1 << 20);
        assert!(holds(&pool, 1 << 20, &bytes));
        !ended && pieces > 0
    });
    assert!(rested, "in {TRIES} tries none was told in the middle");
}

#[test]
fn a_device_that_vanishes_under_load_loses_nothing() {
    let pool = pools().remove(0);
    for count in [0, 1, 40] {
        let model = Model { vanishes_after: Some(count), ..Model::default() };
        let mover = Mover::new(&pool, EngineKind::Cpu, Profile::default());
        mover.give(device(model, Routes::PAST_CACHES), LIMITS);
        conforms(&pool, &mover, None);
        let moved = mover.moved();
        assert!(moved.copies <= count.into() && moved.busy > 0, "{moved:?}");
        assert!(moved.bytes > 0 || count < 2, "{moved:?}");
    }
}

/// Through a file system: for a pool, for an open file, for one call; with what a crash leaves of it.
#[test]
fn files_hold_what_any_engine_wrote() {
    let cred = Cred::root();
    for kind in EngineKind::NAMED {
        let media = SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory);
        let options =
            OpenOptions { no_ticker: true, power_lost: true, engine: kind, ..OpenOptions::default() };
        let fs = Fs::open(Fs::mkfs(media, &MkfsOptions::default()).unwrap(), &options).unwrap();
        let ino = fs.create(&cred, Ino::ROOT, b"file", 0o644, 0, 0).unwrap().0.ino;
        let (node, mut model, mut rng) = (fs.node(ino).unwrap(), Vec::new(), Rng::new(11));
        for n in 0..60 {
            let (at, len) = place(&mut rng, 0, 600 << 10);
            let bytes = random(&mut rng, len);
            match n % 3 {
                0 => node.set_engine(None),
                1 => node.set_engine(Some(EngineKind::Semaphore)),
                _ => node.set_engine(Some(EngineKind::Delegate)),
            }
            fs.write_at(&cred, &node, at as u64, &bytes, false).unwrap();
            if len > 0 {
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].copy_from_slice(&bytes);
            }
            let mut found = vec![0; model.len()];
            assert_eq!(fs.read_at(&node, 0, &mut found).unwrap(), model.len());
            assert!(found == model, "{kind}: {len} bytes at {at}");
        }
        assert!(fs.mover().moved().bytes > 0);
        let after = Fs::open(fs.media().crash_point().media(Keep::Nothing), &options).unwrap();
        let mut found = vec![0; model.len() + 1];
        assert_eq!(after.read(ino, 0, &mut found).unwrap(), model.len());
        assert!(found[..model.len()] == model, "{kind}: after a power failure");
    }
}

#[test]
fn names_of_engines_are_read() {
    for kind in EngineKind::NAMED {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let said = "gpu".parse::<EngineKind>().unwrap_err().to_string();
    assert_eq!(
        said,
        "there is no engine 'gpu': cpu, semaphore, delegate, dsa, ioat, emu, emu-ioat are wanted"
    );
}
