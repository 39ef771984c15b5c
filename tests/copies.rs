//! The mover's calls for other storage engines: each call with each engine against a model, durability as chosen, faults,
//! and tickets that are waited for late, elsewhere or never.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lodestone::error::Result;
use lodestone::fs::{Fs, MkfsOptions, OpenOptions};
use lodestone::limits::COPY_PARTS_MAX;
use lodestone::media::{Addr, Domain, Media, Pool, PoolOptions, Span, SpanOptions, crc32c};
use lodestone::mover::EngineKind;
use lodestone::mover::copies::{Copied, Copies, CopyOptions};
use lodestone::mover::engine_dsa::{Dsa, Offer};
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::engine_port::{Dram, RawTransfer, Route, Routes, Transfer};
use lodestone::mover::profile::{Limits, Profile};
use lodestone::sim::media::{Keep, Rng, SimMedia};

const MEDIA_BYTES: usize = 4 << 20;
const NOT_YET: CopyOptions = CopyOptions { durable: false, crc: None, engine: None, class: None };
const DURABLE: CopyOptions = CopyOptions { durable: true, crc: None, engine: None, class: None };

/// A file that goes with it.
struct Path(PathBuf);

impl Path {
    fn new() -> Path {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let n = MADE.fetch_add(1, Ordering::Relaxed);
        Path(std::env::temp_dir().join(format!("lodestone-copies-{}-{n}", std::process::id())))
    }

    fn span(&self, options: SpanOptions) -> Result<Span> {
        Span::open(&self.0, &options)
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn of_size(bytes: usize) -> SpanOptions {
    SpanOptions { size: Some(bytes as u64), ..SpanOptions::default() }
}

/// Engines take all that they can.
fn eager() -> Profile {
    Profile::default().handing_over_from(4 << 10)
}

fn copies_of(kind: EngineKind, domain: Domain) -> Copies {
    let options = SpanOptions { assume: Some(domain), ..SpanOptions::default() };
    Copies::new(Span::memfd(MEDIA_BYTES as u64, &options).unwrap(), kind, eager())
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| rng.draw().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// Parts that do not overlap, of any size, none too.
fn places(rng: &mut Rng, bytes: usize) -> Vec<(usize, usize)> {
    let count = 1 + rng.below(6) as usize;
    let each = bytes / count;
    let place = |n| {
        let len = match rng.below(4) {
            0 => rng.below(64),
            1 => rng.below(9000),
            2 => 4096 << rng.below(5),
            _ => rng.below(200 << 10),
        };
        let len = (len as usize).min(each);
        let at = n * each + rng.below((each - len) as u64 + 1) as usize;
        (at, len)
    };
    (0..count).map(place).collect()
}

/// Every call, chosen by chance, against a model.
fn exercise<M: Media>(copies: &Copies<M>, part: std::ops::Range<usize>, seed: u64, rounds: usize) {
    let mut rng = Rng::new(seed);
    let mut model = vec![0; part.len()];
    let base = |at: usize| Addr((part.start + at) as u64);
    copies.from_media(base(0), &mut model, &NOT_YET).unwrap();
    for n in 0..rounds {
        let places = places(&mut rng, part.len());
        let bytes: u64 = places.iter().map(|(_, len)| *len as u64).sum();
        let crc = (rng.below(2) == 0).then_some(rng.draw() as u32);
        let options = CopyOptions { durable: rng.below(2) == 0, crc, engine: None, class: None };
        let expect = |copied: Copied, all: &[Vec<u8>]| {
            let crc = crc.map(|crc| all.iter().fold(crc, |crc, bytes| crc32c(bytes, crc)));
            assert_eq!(copied, Copied { bytes, crc }, "{n}: {places:?}");
        };
        let way = rng.below(4);
        if rng.below(2) == 0 {
            let data: Vec<Vec<u8>> = places.iter().map(|(_, len)| random(&mut rng, *len)).collect();
            for ((at, len), bytes) in places.iter().zip(&data) {
                model[*at..at + len].copy_from_slice(bytes);
            }
            let owned =
                || places.iter().zip(&data).map(|((at, _), bytes)| (base(*at), bytes.clone())).collect();
            let part = |((at, _), bytes)| -> Transfer<'_> {
                let (at, from): (&usize, &Vec<u8>) = (at, bytes);
                Transfer::to_media(base(*at), from)
            };
            let mut parts: Vec<Transfer<'_>> =
                places.iter().map(|(at, len)| (at, len)).zip(&data).map(part).collect();
            let copied = match way {
                0 => copies.vectored(&mut parts, &options),
                1 => copies.scope(|scope| scope.vectored(parts, &options)?.wait()),
                _ => {
                    let ticket = copies.submit_vectored_to_media(owned(), &options);
                    while way == 3 && !ticket.poll() {
                        std::thread::yield_now();
                    }
                    ticket.wait().1
                }
            };
            expect(copied.unwrap(), &data);
        } else {
            let mut data: Vec<(Addr, Vec<u8>)> =
                places.iter().map(|(at, len)| (base(*at), vec![0xee; *len])).collect();
            let copied = {
                let part = |(at, to): &'_ mut (Addr, Vec<u8>)| (*at, to.as_mut_ptr(), to.len());
                match way {
                    0 => {
                        let mut parts: Vec<Transfer<'_>> =
                            data.iter_mut().map(|(at, to)| Transfer::FromMedia { at: *at, to }).collect();
                        copies.vectored(&mut parts, &options)
                    }
                    1 => {
                        let parts: Vec<RawTransfer> = data
                            .iter_mut()
                            .map(part)
                            .map(|(at, to, len)| RawTransfer { at, dram: Dram::To(to), len })
                            .collect();
                        // SAFETY: waited for at once.
                        unsafe { copies.submit_raw(&parts, &options) }.and_then(|ticket| ticket.wait())
                    }
                    _ => {
                        let ticket = copies.submit_vectored_from_media(data, &options);
                        while way == 3 && !ticket.poll() {
                            std::thread::yield_now();
                        }
                        let (back, copied) = ticket.wait();
                        data = back;
                        copied
                    }
                }
            };
            let data: Vec<Vec<u8>> = data.into_iter().map(|(_, bytes)| bytes).collect();
            for ((at, len), bytes) in places.iter().zip(&data) {
                assert!(model[*at..at + len] == bytes[..], "{n}: {len} bytes at {at}");
            }
            expect(copied.unwrap(), &data);
        }
    }
    let mut now = vec![0; part.len()];
    copies.from_media(base(0), &mut now, &NOT_YET).unwrap();
    assert!(now == model, "what nobody copied to changed");
}

/// From four threads, each in its own part, of which the edges share lines.
fn conforms<M: Media>(copies: &Copies<M>, rounds: usize) {
    const THREADS: usize = 4;
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            scope.spawn(move || {
                let of = |n| 4096 + n * (MEDIA_BYTES - 4096) / THREADS;
                exercise(copies, of(n)..of(n + 1), 5 + n as u64, rounds / THREADS);
            });
        }
    });
    copies.drain().unwrap();
}

const ROUNDS: usize = if cfg!(miri) { 24 } else { 1200 };

#[test]
fn every_call_with_every_engine_conforms() {
    for kind in EngineKind::NAMED {
        for domain in [Domain::Memory, Domain::Volatile] {
            let copies = copies_of(kind, domain);
            conforms(&copies, ROUNDS);
            let moved = copies.mover().moved();
            // Where a machine has no such device the CPU copies: then the mover has no engine of that kind.
            let copies = match kind {
                EngineKind::Dsa | EngineKind::Ioat => copies.mover().engine(kind).is_some(),
                _ => kind != EngineKind::Cpu,
            };
            assert_eq!(moved.bytes > 0, copies, "{kind}: {moved:?}");
        }
    }
}

/// Parts cross stripes: each region has batches of its own.
#[test]
fn striped_media_conform() {
    let paths = [Path::new(), Path::new(), Path::new()];
    let names = paths.each_ref().map(|path| path.0.clone());
    let options =
        PoolOptions { assume: Some(Domain::Memory), stripe_bytes: Some(64 << 10), ..PoolOptions::default() };
    for kind in [EngineKind::Delegate, EngineKind::Emu] {
        let options = PoolOptions { force: true, ..options };
        let pool = Pool::create(&names, Some(2 * MEDIA_BYTES as u64), &options).unwrap();
        conforms(&Copies::new(pool, kind, eager()), ROUNDS);
    }
}

fn device(model: Model, routes: Routes) -> Box<Dsa<Emulated>> {
    let offer = Offer { routes, ..model.offer };
    Box::new(Dsa::new(Emulated::new(Model { offer, ..model })))
}

#[test]
fn what_a_device_leaves_undone_is_done() {
    let calm = Model::default();
    let models = [
        Model { faults: Some((3, 5)), ..calm },
        Model { ring: 1, channels: 1, ..calm },
        Model { vanishes_after: Some(40), ..calm },
    ];
    for model in models {
        for routes in [Routes::PAST_CACHES, Routes::INTO_CACHES, Routes::BOTH] {
            let copies = copies_of(EngineKind::Cpu, Domain::Memory);
            let limits = Limits { in_flight_max: Some(3), ..eager().emu };
            copies.mover().give(device(model, routes), limits);
            conforms(&copies, ROUNDS / 2);
            let moved = copies.mover().moved();
            assert!(moved.bytes > 0, "{model:?}: {moved:?}");
            // What a device has when it vanishes fails, or was done already.
            if model.vanishes_after.is_none() {
                assert_eq!(moved.finished > 0, model.faults.is_some(), "{model:?}: {moved:?}");
            }
        }
    }
}

/// No place in front of the engine is lost, whatever a copy's end.
#[test]
fn places_under_way_are_given_back() {
    let copies = copies_of(EngineKind::Cpu, Domain::Memory);
    let limits = Limits { in_flight_max: Some(2), ..eager().emu };
    let model = Model { faults: Some((2, 9)), ..Model::default() };
    copies.mover().give(device(model, Routes::PAST_CACHES), limits);
    for n in 0..200u8 {
        let ticket = copies.submit_to_media(Addr(4096), vec![n; 64 << 10], &NOT_YET);
        drop(ticket);
    }
    assert_eq!(copies.mover().moved().busy, 0, "one at a time is never too many");
}

#[test]
fn durable_is_what_was_asked_for() {
    for kind in EngineKind::NAMED {
        for durable in [true, false] {
            for way in 0..3 {
                let copies = Copies::new(SimMedia::new(vec![0; MEDIA_BYTES], Domain::Memory), kind, eager());
                let options = CopyOptions { durable, crc: None, engine: None, class: None };
                let bytes = vec![9; 100 << 10];
                match way {
                    0 => copies.to_media(Addr(4100), &bytes, &options).unwrap(),
                    1 => {
                        let mut parts = [Transfer::to_media(Addr(4100), &bytes)];
                        copies.vectored(&mut parts, &options).unwrap()
                    }
                    _ => copies.submit_to_media(Addr(4100), bytes.clone(), &options).wait().1.unwrap(),
                };
                let kept = || {
                    let mut found = vec![0; bytes.len()];
                    let after = copies.media().crash_point().media(Keep::Nothing);
                    after.read(Addr(4100), &mut found).unwrap();
                    found == bytes
                };
                assert!(kept() || !durable, "{kind}, way {way}");
                if kind == EngineKind::Cpu && way == 0 && !durable {
                    assert!(!kept(), "the test sees what is not durable");
                }
                copies.fence().unwrap();
                assert!(kept(), "{kind}, way {way}: after a fence");
            }
        }
    }
}

/// An ordinary file: durable is what the host has written back.
#[test]
fn the_host_is_asked_where_only_it_can_keep_things() {
    let media = || SimMedia::new(vec![0; MEDIA_BYTES], Domain::PageCache);
    let copies = Copies::new(media(), EngineKind::Cpu, Profile::default());
    copies.media().fail_syncs(true);
    let bytes = [1; 8192];
    copies.to_media(Addr(0), &bytes, &NOT_YET).unwrap();
    let failed = |result: Result<Copied>| result.unwrap_err().errno();
    assert_eq!(failed(copies.to_media(Addr(0), &bytes, &DURABLE)), libc::EIO);
    let ticket = copies.submit_to_media(Addr(0), bytes.to_vec(), &DURABLE);
    assert!(ticket.poll(), "copied it is");
    assert_eq!(failed(ticket.wait().1), libc::EIO);
    assert_eq!(copies.fence().unwrap_err().errno(), libc::EIO);
    // Reads ask nobody.
    copies.from_media(Addr(0), &mut [0; 100], &DURABLE).unwrap();
    copies.media().fail_syncs(false);
    copies.to_media(Addr(0), &bytes, &DURABLE).unwrap();
    let mut found = [0; 8192];
    copies.media().crash_point().media(Keep::Nothing).read(Addr(0), &mut found).unwrap();
    assert_eq!(found, bytes);
}

#[test]
fn requests_that_cannot_be_are_refused() {
    let copies = copies_of(EngineKind::Delegate, Domain::Memory);
    let bytes = vec![1; 64 << 10];
    let end = MEDIA_BYTES as u64;
    let invalid = |result: Result<Copied>, word: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    for at in [end - 1, end, u64::MAX - 5] {
        invalid(copies.to_media(Addr(at), &bytes, &DURABLE), "outside");
        invalid(copies.from_media(Addr(at), &mut bytes.clone(), &DURABLE), "outside");
        let (back, refused) = copies.submit_to_media(Addr(at), bytes.clone(), &DURABLE).wait();
        assert_eq!(back, bytes, "the buffer comes back");
        invalid(refused, "outside");
    }
    let mut overlapping = [Transfer::to_media(Addr(0), &bytes), Transfer::to_media(Addr(65535), &bytes)];
    invalid(copies.vectored(&mut overlapping, &NOT_YET), "overlap");
    let mut side_by_side = [Transfer::to_media(Addr(65536), &bytes), Transfer::to_media(Addr(0), &bytes)];
    copies.vectored(&mut side_by_side, &NOT_YET).unwrap();
    let mut other = [0; 8];
    let mut both_ways =
        [Transfer::to_media(Addr(0), &bytes), Transfer::FromMedia { at: Addr(1 << 20), to: &mut other }];
    invalid(copies.vectored(&mut both_ways, &NOT_YET), "two copies");
    let part = |n: usize| Transfer::to_media(Addr(n as u64), &bytes[..1]);
    let mut most: Vec<_> = (0..COPY_PARTS_MAX).map(part).collect();
    copies.vectored(&mut most, &NOT_YET).unwrap();
    most.push(part(COPY_PARTS_MAX));
    invalid(copies.vectored(&mut most, &NOT_YET), "at most");
    // Nothing is something.
    for at in [0, end] {
        assert_eq!(copies.to_media(Addr(at), &[], &DURABLE).unwrap(), Copied::default());
    }
    let nothing = CopyOptions { crc: Some(7), ..DURABLE };
    assert_eq!(copies.vectored(&mut [], &nothing).unwrap(), Copied { bytes: 0, crc: Some(7) });
    assert_eq!(copies.submit_vectored_to_media::<Vec<u8>>(vec![], &nothing).wait().1.unwrap().crc, Some(7));
    // Through addresses a source may be media itself.
    let inside = copies.media().mapped(Addr(8192), 8192).unwrap();
    let to = |at| RawTransfer { at: Addr(at), dram: Dram::From(inside, Route::PastCaches), len: 8192 };
    // SAFETY: the bytes are mapped, nobody else has them, and it is waited for.
    let copy = |at| unsafe { copies.submit_raw(&[to(at)], &DURABLE) }.and_then(|ticket| ticket.wait());
    invalid(copy(8192 + 8191), "overlap");
    invalid(copy(1), "overlap");
    copy(0).unwrap();
    copy(16384).unwrap();
}

#[test]
fn a_file_is_used_as_it_is() {
    let path = Path::new();
    let error = path.span(SpanOptions::default()).unwrap_err();
    assert_eq!(error.errno(), libc::ENOENT);
    let copies = Copies::new(path.span(of_size(10_000)).unwrap(), EngineKind::Cpu, Profile::default());
    assert_eq!(copies.media().len(), 10_000);
    assert_eq!(path.span(SpanOptions::default()).unwrap_err().errno(), libc::EBUSY);
    copies.to_media(Addr(9_990), b"the end...", &DURABLE).unwrap();
    drop(copies);
    assert_eq!(&path.bytes()[9_990..], b"the end...");
    // Longer, never shorter.
    assert_eq!(path.span(of_size(4096)).unwrap().len(), 10_000);
    assert_eq!(path.span(of_size(20_000)).unwrap().len(), 20_000);
    assert_eq!(&path.bytes()[9_990..10_001], b"the end...\0");
    // Read-only: nothing changes.
    let read_only = path.span(SpanOptions { read_only: true, ..SpanOptions::default() }).unwrap();
    let copies = Copies::new(read_only, EngineKind::Cpu, Profile::default());
    let mut found = [0; 3];
    copies.from_media(Addr(9_990), &mut found, &NOT_YET).unwrap();
    assert_eq!(&found, b"the");
    assert_eq!(copies.to_media(Addr(0), b"x", &NOT_YET).unwrap_err().errno(), libc::EROFS);
    assert_eq!(copies.submit_to_media(Addr(0), *b"x", &NOT_YET).wait().1.unwrap_err().errno(), libc::EROFS);
    copies.fence().unwrap();
    drop(copies);
    std::fs::write(&path.0, b"").unwrap();
    assert!(path.span(SpanOptions::default()).unwrap_err().to_string().contains("give a size"));
    std::fs::remove_file(&path.0).unwrap();
    // A pool is not overwritten by mistake.
    drop(Pool::create(std::slice::from_ref(&path.0), Some(4 << 20), &PoolOptions::default()).unwrap());
    let refused = path.span(SpanOptions::default()).unwrap_err();
    assert_eq!(refused.errno(), libc::EEXIST);
    assert!(refused.to_string().contains("holds a pool"), "{refused}");
    path.span(SpanOptions { read_only: true, ..SpanOptions::default() }).unwrap();
    path.span(SpanOptions { force: true, ..SpanOptions::default() }).unwrap();
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_range_that_is_mapped_is_used_as_it_is() {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let path = Path::new();
    drop(path.span(of_size(1 << 20)).unwrap());
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path.0).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which nobody else knows.
    let start = unsafe { mmap(std::ptr::null_mut(), 1 << 20, access, MapFlags::SHARED, &file, 0) }.unwrap();
    let start = start.cast::<u8>();
    for (domain, skew) in [(Domain::PageCache, 0), (Domain::Memory, 100), (Domain::CpuCache, 4096 + 7)] {
        for kind in EngineKind::NAMED {
            let len = (1 << 20) - skew;
            // SAFETY: mapped until below, and used by nothing else.
            let span = unsafe { Span::mapped(start.add(skew), len, domain, false) }.unwrap();
            assert_eq!((span.len(), span.domain(), span.detected()), (len as u64, domain, None));
            let copies = Copies::new(span, kind, eager());
            let bytes = vec![kind as u8 + 1; 300_001];
            copies.to_media(Addr(5), &bytes, &DURABLE).unwrap();
            copies.submit_to_media(Addr(400_000), bytes.clone(), &DURABLE).wait().1.unwrap();
            drop(copies);
            let file = path.bytes();
            assert!(
                file[skew + 5..skew + 300_006] == bytes[..]
                    && file[skew + 400_000..skew + 700_001] == bytes[..]
            );
        }
    }
    // SAFETY: as above.
    let refuse = |start, len| unsafe { Span::mapped(start, len, Domain::Memory, false) }.unwrap_err().errno();
    assert_eq!((refuse(start, 0), refuse(std::ptr::null_mut(), 7)), (libc::EINVAL, libc::EINVAL));
    // The file is cut: that is an error of the copy, beyond the cut.
    file.set_len(512 << 10).unwrap();
    for kind in EngineKind::NAMED {
        // SAFETY: as above.
        let span = unsafe { Span::mapped(start, 1 << 20, Domain::Memory, false) }.unwrap();
        cut_media_are_errors(&Copies::new(span, kind, eager()), 512 << 10);
    }
    // SAFETY: nobody uses it any more.
    unsafe { munmap(start.cast(), 1 << 20) }.unwrap();
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_file_that_is_cut_is_an_error_of_the_copy() {
    for kind in EngineKind::NAMED {
        let path = Path::new();
        let options = SpanOptions { assume: Some(Domain::Memory), ..of_size(MEDIA_BYTES) };
        let copies = Copies::new(path.span(options).unwrap(), kind, eager());
        std::fs::OpenOptions::new().write(true).open(&path.0).unwrap().set_len(1 << 20).unwrap();
        cut_media_are_errors(&copies, 1 << 20);
    }
}

fn cut_media_are_errors(copies: &Copies, cut: u64) {
    let bytes = vec![3; 128 << 10];
    let options = CopyOptions { crc: Some(0), ..DURABLE };
    for before in [0, 64 << 10] {
        let at = Addr(cut - before);
        let bad = |result: Result<Copied>| {
            let error = result.unwrap_err();
            assert_eq!(error.errno(), libc::EIO);
            assert!(error.to_string().contains(&format!("{cut:#x}")), "{error}");
        };
        bad(copies.to_media(at, &bytes, &options));
        bad(copies.from_media(at, &mut bytes.clone(), &options));
        bad(copies.submit_to_media(at, bytes.clone(), &options).wait().1);
        bad(copies.submit_from_media(at, bytes.clone(), &options).wait().1);
        bad(copies.vectored(&mut [Transfer::to_media(at, &bytes)], &options));
    }
    // All goes on.
    copies.to_media(Addr(8192), &bytes, &options).unwrap();
    let (back, copied) = copies.submit_from_media(Addr(8192), vec![0; bytes.len()], &options).wait();
    assert_eq!(copied.unwrap().crc, Some(crc32c(&bytes, 0)));
    assert!(back == bytes);
}

/// Gives a device that takes copies of any alignment.
fn give(copies: &Copies, model: Model) {
    copies.mover().give(device(model, Routes::INTO_CACHES), eager().emu);
}

/// A device that rests: copies are under way for as long as the test wants.
fn resting() -> Copies {
    let copies = copies_of(EngineKind::Cpu, Domain::Memory);
    give(&copies, Model::default());
    copies.mover().engine(EngineKind::Given).unwrap().suspend(0);
    copies
}

fn wake(copies: &Copies) {
    copies.mover().engine(EngineKind::Given).unwrap().resume(0);
}

fn holds(copies: &Copies, at: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    copies.media().read(Addr(at), &mut found).unwrap();
    found == bytes
}

#[test]
fn tickets_end_on_any_thread_and_in_any_order() {
    let copies = resting();
    let bytes = |n: u8| vec![n; 64 << 10];
    let mut tickets: Vec<_> =
        (0..20u8).map(|n| copies.submit_to_media(Addr(u64::from(n) << 16), bytes(n), &DURABLE)).collect();
    assert!(tickets.iter().all(|ticket| !ticket.poll()), "the device rests");
    let last = tickets.pop().unwrap();
    std::thread::scope(|scope| {
        // Many look, one waits.
        let waits = scope.spawn(move || last.wait());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished() && tickets.iter().all(|ticket| !ticket.poll()));
        wake(&copies);
        let (buffer, copied) = waits.join().unwrap();
        assert_eq!((buffer, copied.unwrap().bytes), (bytes(19), 64 << 10));
        for (n, ticket) in tickets.into_iter().enumerate().rev() {
            let waited = scope.spawn(move || ticket.wait()).join().unwrap();
            assert_eq!(waited.0, bytes(n as u8));
            waited.1.unwrap();
        }
    });
    assert!((0..20u8).all(|n| holds(&copies, u64::from(n) << 16, &bytes(n))));
}

/// The delegates' callers sleep, and not only the one that submitted is woken.
#[test]
fn who_did_not_submit_may_wait() {
    for kind in [EngineKind::Delegate, EngineKind::Given] {
        let copies = copies_of(kind, Domain::Memory);
        if kind == EngineKind::Given {
            give(&copies, Model::default());
        }
        copies.mover().engine(kind).unwrap().suspend(0);
        let ticket = copies.submit_to_media(Addr(0), vec![6; 1 << 20], &DURABLE);
        std::thread::scope(|scope| {
            let waits = scope.spawn(move || ticket.wait().1.map(|copied| copied.bytes));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished(), "{kind}");
            copies.mover().engine(kind).unwrap().resume(0);
            assert_eq!(waits.join().unwrap().unwrap(), 1 << 20, "{kind}");
        });
    }
}

#[test]
fn several_wait_for_one_ticket() {
    let copies = Arc::new(resting());
    let bytes = Arc::new(vec![8; 256 << 10]);
    let part =
        RawTransfer { at: Addr(64), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: bytes.len() };
    // SAFETY: `bytes` outlives the threads below, which wait.
    let ticket = unsafe { copies.submit_raw(&[part], &DURABLE) }.unwrap();
    std::thread::scope(|scope| {
        let waits: Vec<_> =
            (0..4).map(|_| scope.spawn(|| ticket.wait().map(|copied| copied.bytes).unwrap())).collect();
        std::thread::sleep(Duration::from_millis(10));
        assert!(!ticket.poll());
        wake(&copies);
        waits.into_iter().for_each(|waits| assert_eq!(waits.join().unwrap(), 256 << 10));
    });
    assert!(ticket.poll() && holds(&copies, 64, &bytes));
}

/// A buffer that says when it goes.
struct Watched(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_ticket_that_is_dropped_waits_and_one_that_is_forgotten_leaks() {
    let copies = resting();
    let gone = Arc::new(AtomicUsize::new(0));
    let buffer = |n: u8| Watched(vec![n; 128 << 10], gone.clone());
    let dropped = copies.submit_to_media(Addr(0), buffer(1), &NOT_YET);
    std::mem::forget(copies.submit_to_media(Addr(1 << 20), buffer(2), &NOT_YET));
    std::thread::scope(|scope| {
        let drops = scope.spawn(move || drop(dropped));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!drops.is_finished() && gone.load(Ordering::SeqCst) == 0, "the device may still read it");
        wake(&copies);
        drops.join().unwrap();
    });
    assert_eq!(gone.load(Ordering::SeqCst), 1);
    copies.drain().unwrap();
    assert!(holds(&copies, 0, &[1; 128 << 10]) && holds(&copies, 1 << 20, &[2; 128 << 10]));
    assert_eq!(gone.load(Ordering::SeqCst), 1, "nobody knows that the other is of no use");
}

#[test]
fn closing_waits_and_tickets_outlive_it() {
    let path = Path::new();
    let options = SpanOptions { assume: Some(Domain::Memory), ..of_size(MEDIA_BYTES) };
    let copies = Copies::new(path.span(options).unwrap(), EngineKind::Cpu, Profile::default());
    // Slow enough that the copies are under way when it closes.
    give(&copies, Model { bytes_per_s: Some(16 << 20), ..Model::default() });
    let ticket = copies.submit_to_media(Addr(0), vec![4; 1 << 20], &DURABLE);
    std::mem::forget(copies.submit_to_media(Addr(2 << 20), vec![5; 256 << 10], &DURABLE));
    assert!(!ticket.poll());
    drop(copies);
    assert!(ticket.poll(), "closing has waited");
    let file = path.bytes();
    assert!(file[..1 << 20] == [4; 1 << 20] && file[2 << 20..(2 << 20) + (256 << 10)] == [5; 256 << 10]);
    assert_eq!(ticket.wait().1.unwrap().bytes, 1 << 20);
}

/// Who blocks a signal to wait for it would miss what one of them takes.
#[test]
fn threads_of_the_library_leave_signals_to_the_program() {
    let engines = [EngineKind::Delegate, EngineKind::Emu, EngineKind::EmuIoat];
    let all = engines.map(|kind| copies_of(kind, Domain::Memory));
    for copies in &all {
        copies.submit_to_media(Addr(0), vec![1; 64 << 10], &NOT_YET).wait().1.unwrap();
    }
    let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    let pool = Fs::mkfs(Pool::memfd(64 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(pool, &OpenOptions::default()).unwrap();
    let mut seen = HashSet::new();
    let awaited = ["lode-copy-0-0", "lode-emu", "lode-emu-ioat", "lode-epochs"];
    // A thread names itself when it begins.
    while !awaited.iter().all(|name| seen.contains(*name)) {
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            // Threads of other tests may have ended.
            let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
            let (name, blocked) = (field("Name:"), u64::from_str_radix(field("SigBlk:"), 16).unwrap());
            if name.starts_with("lode-") {
                let blocks = |signal: i32| blocked & 1 << (signal - 1) != 0;
                assert!(blocks(libc::SIGUSR1) && blocks(libc::SIGALRM) && blocks(libc::SIGTERM), "{name}");
                assert!(!blocks(libc::SIGBUS) && !blocks(libc::SIGSEGV), "{name}");
                seen.insert(name.to_owned());
            }
        }
    }
    fs.close().unwrap();
}

#[test]
fn a_scope_waits_for_what_it_began() {
    let copies = resting();
    let mut to = vec![0; 512 << 10];
    copies
        .to_media(Addr(0), &vec![7; 512 << 10], &CopyOptions { engine: Some(EngineKind::Cpu), ..DURABLE })
        .unwrap();
    std::thread::scope(|threads| {
        let (copies, to) = (&copies, &mut to);
        let scope = threads.spawn(move || {
            copies.scope(|scope| std::mem::forget(scope.from_media(Addr(0), to, &NOT_YET).unwrap()));
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!scope.is_finished());
        wake(copies);
        scope.join().unwrap();
    });
    assert!(to.iter().all(|byte| *byte == 7));
    // Also when it panics.
    let bytes = vec![9; 512 << 10];
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        copies.scope(|scope| {
            scope.to_media(Addr(1 << 20), &bytes, &NOT_YET).unwrap();
            panic!("in the scope");
        })
    }));
    assert!(panicked.is_err() && holds(&copies, 1 << 20, &bytes));
}
