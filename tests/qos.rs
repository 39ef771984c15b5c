//! Classes of copies: what is copied is right whoever waits for whom; one of class latency overtakes pieces of class
//! bandwidth that came before it; owners share; nothing is left behind at rest. Orders are looked at, and no times.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Addr, Domain, Pool, PoolOptions, Span, SpanOptions, crc32c};
use lodestone::mover::EngineKind;
use lodestone::mover::class::{Class, Owner};
use lodestone::mover::copies::{Copies, CopyOptions};
use lodestone::mover::engine_dsa::Dsa;
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::engine_port::{Dram, RawTransfer, Route, Transfer};
use lodestone::mover::manager::{PIECE_BYTES, Qos};
use lodestone::mover::profile::Profile;
use lodestone::mover::state::EngineState;

const MEDIA_BYTES: u64 = 32 << 20;
const BULK_BYTES: usize = 2 << 20;

fn of(class: Class) -> CopyOptions {
    CopyOptions { class: Some(class), ..CopyOptions::default() }
}

fn bandwidth(owner: u32) -> CopyOptions {
    of(Class::Bandwidth(Owner::of(owner)))
}

fn latency() -> CopyOptions {
    of(Class::Latency)
}

fn eager() -> Profile {
    Profile::default().handing_over_from(4 << 10)
}

fn media() -> Span {
    let options = SpanOptions { assume: Some(Domain::Memory), ..SpanOptions::default() };
    Span::memfd(MEDIA_BYTES, &options).unwrap()
}

/// With an emulated device of its own.
fn emulated(model: Model) -> Copies {
    with_qos(model, Qos::default())
}

/// Class bandwidth is owed nothing, however long it waits: what its channel does depends on no clock.
fn patient() -> Qos {
    Qos { floor_percent: 0, starve_max: Duration::from_secs(3600), ..Qos::default() }
}

fn with_qos(model: Model, qos: Qos) -> Copies {
    let copies = Copies::classed(media(), EngineKind::Cpu, eager(), None, qos);
    copies.mover().give(Box::new(Dsa::new(Emulated::new(model))), eager().emu);
    copies
}

/// So slow that what is under way stays that for a while.
fn slow(channels: usize) -> Model {
    Model { channels, bytes_per_s: Some(256 << 20), ..Model::default() }
}

fn seen(copies: &Copies) -> EngineState {
    copies.mover().state().engines.remove(0)
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n / 64) as u8 ^ (n as u8).wrapping_mul(7) ^ seed).collect()
}

#[test]
fn every_class_copies_what_it_should_with_every_engine() {
    let classes = [None, Some(Class::Latency), Some(Class::Bandwidth(Owner::of(3)))];
    for kind in EngineKind::NAMED {
        let copies = Copies::classed(media(), kind, eager(), None, Qos::default());
        for class in classes {
            for (n, bytes) in
                [100, 5000, PIECE_BYTES, PIECE_BYTES + 1, 300_001, 1 << 20].into_iter().enumerate()
            {
                let (at, data) = (Addr(4096 * n as u64 + 17), pattern(n as u8, bytes));
                let options = CopyOptions { class, crc: Some(9), durable: true, engine: None };
                let copied = copies.to_media(at, &data, &options).unwrap();
                assert_eq!(
                    (copied.bytes, copied.crc),
                    (bytes as u64, Some(crc32c(&data, 9))),
                    "{kind} {class:?}"
                );
                let mut back = vec![0; bytes];
                assert_eq!(copies.from_media(at, &mut back, &options).unwrap(), copied);
                assert!(back == data, "{kind} {class:?} {bytes}");
                // By ticket, and polled.
                let ticket = copies.submit_to_media(at, pattern(!(n as u8), bytes), &options);
                while n % 2 == 0 && !ticket.poll() {
                    std::thread::yield_now();
                }
                let (data, copied) = ticket.wait();
                assert_eq!(copied.unwrap().crc, Some(crc32c(&data, 9)));
                let (back, copied) = copies.submit_from_media(at, vec![0; bytes], &options).wait();
                assert_eq!(copied.unwrap().crc, Some(crc32c(&data, 9)));
                assert!(back == data);
            }
        }
        for engine in copies.mover().state().engines {
            let owed = |group: &lodestone::mover::manager::GroupState| {
                (group.latency.under_way, group.bandwidth.under_way, group.at_rest)
            };
            assert!(engine.groups.iter().all(|group| owed(group) == (0, 0, false)), "{engine:?}");
            assert!(engine.owners.iter().all(|owner| owner.under_way == 0 && owner.waiting == 0));
        }
    }
}

#[test]
fn a_device_that_fails_and_refuses_is_no_matter_of_the_class() {
    let models = [
        Model { ring: 1, faults: Some((3, 5)), ..Model::default() },
        Model { channels: 1, ring: 2, faults: Some((2, 11)), ..Model::default() },
        Model { vanishes_after: Some(20), ..Model::default() },
    ];
    for model in models {
        let copies = emulated(model);
        std::thread::scope(|scope| {
            for thread in 0..3u32 {
                let copies = &copies;
                scope.spawn(move || {
                    let options = [latency(), bandwidth(1), bandwidth(2)][thread as usize];
                    for n in 0..12 {
                        let at = Addr(u64::from(thread) * (8 << 20) + n * 4096 + 64 * n);
                        let data = pattern(n as u8, 200_000 + n as usize);
                        let options = CopyOptions { crc: Some(0), ..options };
                        let copied = copies.submit_to_media(at, data.clone(), &options).wait().1.unwrap();
                        assert_eq!(copied.crc, Some(crc32c(&data, 0)), "{model:?}");
                        let mut back = vec![0; data.len()];
                        copies.from_media(at, &mut back, &options).unwrap();
                        assert!(back == data, "{model:?}");
                    }
                });
            }
        });
        let group = seen(&copies).groups.remove(0);
        assert_eq!((group.latency.under_way, group.bandwidth.under_way, group.at_rest), (0, 0, false));
    }
}

#[test]
fn one_of_class_latency_overtakes_pieces_that_came_before() {
    const LONG_BYTES: usize = 16 << 20;
    for channels in [4, 2, 1] {
        let copies = with_qos(slow(channels), patient());
        let (long, small) = (pattern(1, LONG_BYTES), pattern(2, PIECE_BYTES));
        let bulk = copies.submit_to_media(Addr(0), long, &bandwidth(1));
        assert!(!bulk.poll());
        for n in 0..4 {
            let one = copies.submit_to_media(Addr((20 << 20) + n * 4096), small.clone(), &latency());
            if channels > 1 {
                assert!(seen(&copies).groups[0].at_rest, "the channel of class bandwidth makes room");
            }
            one.wait().1.unwrap();
            assert!(!bulk.poll(), "of 256 pieces that came before, the last has not ended");
        }
        let (data, copied) = bulk.wait();
        assert_eq!(copied.unwrap().bytes, LONG_BYTES as u64);
        let mut back = vec![0; LONG_BYTES];
        copies.from_media(Addr(0), &mut back, &CopyOptions::default()).unwrap();
        assert!(back == data);
    }
}

#[test]
fn a_channel_at_rest_goes_on_though_nobody_submits() {
    let copies = with_qos(slow(4), patient());
    let bulk = copies.submit_to_media(Addr(0), pattern(1, 512 << 10), &bandwidth(1));
    let one = copies.submit_to_media(Addr(8 << 20), pattern(2, PIECE_BYTES), &latency());
    assert!(seen(&copies).groups[0].at_rest);
    one.wait().1.unwrap();
    assert!(!seen(&copies).groups[0].at_rest, "its end let the channel go on");
    // All pieces were handed over: from here on the device needs nobody.
    assert_eq!(seen(&copies).owners[0].waiting, 0);
    assert_eq!(bulk.wait().1.unwrap().bytes, 512 << 10);

    // A ticket of class latency that nobody ends: who waits for the bulk lets it through.
    let copies = emulated(slow(4));
    let bulk = copies.submit_to_media(Addr(0), pattern(3, BULK_BYTES), &bandwidth(1));
    let never = copies.submit_to_media(Addr(8 << 20), pattern(4, PIECE_BYTES), &latency());
    let (data, copied) = bulk.wait();
    copied.unwrap();
    let mut back = vec![0; BULK_BYTES];
    copies.from_media(Addr(0), &mut back, &CopyOptions::default()).unwrap();
    assert!(back == data);
    drop(never);
}

#[test]
fn copies_without_a_class_never_stand_on_a_channel_at_rest() {
    let copies = with_qos(slow(2), patient());
    let bulk = copies.submit_to_media(Addr(0), pattern(1, BULK_BYTES), &bandwidth(1));
    let never = copies.submit_to_media(Addr(8 << 20), pattern(2, PIECE_BYTES), &latency());
    assert!(seen(&copies).groups[0].at_rest);
    // Would one of them be given the second channel, it would wait for the ticket above.
    for n in 0..6u64 {
        copies.to_media(Addr((9 << 20) + n * 4096), &pattern(5, 32 << 10), &CopyOptions::default()).unwrap();
    }
    assert!(seen(&copies).groups[0].at_rest, "and none of that let it go on");
    never.wait().1.unwrap();
    bulk.wait().1.unwrap();
}

/// It had the channel that class bandwidth came to have; whoever waits for it looks after nobody else.
#[test]
fn what_was_handed_over_before_there_were_classes_ends_first_all_the_same() {
    for is_patient in [true, false] {
        let copies = with_qos(slow(2), if is_patient { patient() } else { Qos::default() });
        let submit =
            |n: u64, options| copies.submit_to_media(Addr(n << 22), pattern(n as u8, BULK_BYTES), &options);
        let before = [submit(0, CopyOptions::default()), submit(1, CopyOptions::default())];
        let bulk = submit(2, bandwidth(1));
        let one = submit(3, latency());
        assert!(!seen(&copies).groups[0].at_rest, "somebody else is on its channel");
        for ticket in before {
            assert_eq!(ticket.wait().1.unwrap().bytes, BULK_BYTES as u64);
        }
        one.wait().1.unwrap();
        bulk.wait().1.unwrap();
        // Now it is class bandwidth's own.
        let bulk = submit(2, bandwidth(1));
        let one = submit(3, latency());
        // What is owed to it goes by the clock, and this thread may not have run for long.
        let rests = seen(&copies).groups[0].at_rest;
        assert!(rests || !is_patient || bulk.poll());
        one.wait().1.unwrap();
        bulk.wait().1.unwrap();
    }
}

/// By engines that hold the number of copies down themselves, class latency's reads, too.
#[test]
fn reads_of_class_latency_go_by_the_limit_of_threads() {
    for kind in [EngineKind::Semaphore, EngineKind::Delegate] {
        let profile = Profile { concurrency: 1, ..eager() };
        let copies = Copies::classed(media(), kind, profile, None, Qos::default());
        std::thread::scope(|scope| {
            for n in 0..8u64 {
                let copies = &copies;
                scope.spawn(move || {
                    let mut back = vec![0; 64 << 10];
                    for _ in 0..20 {
                        copies.from_media(Addr(n << 20), &mut back, &latency()).unwrap();
                    }
                });
            }
        });
        let latency = seen(&copies).groups[0].latency;
        assert_eq!((latency.held_back, latency.copies), (0, 160), "{kind}: none went past it");
    }
}

/// Where there is no such device here, that is told by what it leaves to the CPU: whichever way copies take.
#[test]
fn copies_by_an_engine_that_is_not_there_are_counted() {
    let copies = Copies::classed(media(), EngineKind::Dsa, eager(), None, Qos::default());
    if copies.mover().engine(EngineKind::Dsa).is_some() {
        println!("SKIPPED: this machine has a DSA");
        return;
    }
    let (mut back, data) = (vec![0; 64 << 10], pattern(1, 64 << 10));
    let busy = || copies.mover().moved().busy;
    for (count, options) in [CopyOptions::default(), latency(), bandwidth(1)].iter().enumerate() {
        let before = busy();
        copies.to_media(Addr(0), &data, options).unwrap();
        copies.from_media(Addr(0), &mut back, options).unwrap();
        copies.submit_to_media(Addr(0), data.clone(), options).wait().1.unwrap();
        assert_eq!(busy() - before, 3, "options {count}");
        copies.submit_to_media(Addr(0), vec![0; 100], options).wait().1.unwrap();
        assert_eq!(busy() - before, 3, "what is small is the CPU's in any case");
    }
}

/// How large the shares are, the model in `mover::owners` shows: here they would depend on when threads run.
#[test]
fn requests_of_two_owners_end_in_whatever_order_one_thread_waits_for_them() {
    const EACH_BYTES: usize = 2 << 20;
    let copies = emulated(slow(2));
    let submit = |n: u64, owner| {
        copies.submit_to_media(Addr(n << 21), pattern(n as u8, EACH_BYTES), &bandwidth(owner))
    };
    let mut tickets: Vec<_> = (0..6).map(|n| submit(n, 1 + n as u32 / 4)).collect();
    // What the others have under way, and nobody looks at, stops none of them.
    for n in [3, 0, 3, 1, 1, 0] {
        let (data, copied) = tickets.remove(n).wait();
        assert_eq!(copied.unwrap().bytes, EACH_BYTES as u64);
        let mut back = vec![0; EACH_BYTES];
        let at = (0..6).find(|n| pattern(*n, 64)[..] == data[..64]).expect("it is one of them");
        copies.from_media(Addr(u64::from(at) << 21), &mut back, &CopyOptions::default()).unwrap();
        assert!(back == data);
    }
    let owners = seen(&copies).owners;
    let bytes = |owner| owners.iter().find(|state| state.owner == owner).map(|state| state.bytes);
    assert_eq!((bytes(1), bytes(2)), (Some(4 * EACH_BYTES as u64), Some(2 * EACH_BYTES as u64)));
}

#[test]
fn dropped_and_forgotten_tickets_give_everything_back() {
    let copies = emulated(slow(4));
    for round in 0..3 {
        let bulk = copies.submit_to_media(Addr(0), pattern(1, BULK_BYTES), &bandwidth(round));
        let one = copies.submit_from_media(Addr(8 << 20), vec![0; PIECE_BYTES], &latency());
        drop((bulk, one));
        copies.submit_to_media(Addr(0), pattern(1, 256 << 10), &bandwidth(7)).poll();
    }
    std::mem::forget(copies.submit_to_media(Addr(0), pattern(1, BULK_BYTES), &bandwidth(8)));
    copies.drain().unwrap();
    let state = seen(&copies);
    assert!(state.owners.iter().all(|owner| owner.under_way == 0 && owner.waiting == 0), "{state:?}");
    let group = &state.groups[0];
    assert_eq!((group.latency.under_way, group.bandwidth.under_way, group.at_rest), (0, 0, false));
    assert!(group.depths.iter().all(|depth| *depth == 0));
}

#[test]
fn who_waits_for_all_is_held_back_by_none_that_nobody_looks_at() {
    let copies = with_qos(slow(1), patient());
    let (few, many) = (pattern(1, PIECE_BYTES), pattern(2, BULK_BYTES));
    // In which order they are waited for is chance.
    for _ in 0..16 {
        let bulk = copies.submit_to_media(Addr(1 << 20), many[..4 * PIECE_BYTES].to_vec(), &bandwidth(1));
        let unseen = copies.submit_to_media(Addr(0), few.clone(), &latency());
        copies.wait_for_all();
        assert!(unseen.poll() && bulk.poll());
    }
    copies.scope(|scope| {
        scope.to_media(Addr(1 << 20), &many, &bandwidth(1)).unwrap();
        scope.to_media(Addr(0), &few, &latency()).unwrap();
    });
}

#[test]
fn many_parts_of_one_request_are_pieces() {
    let copies = emulated(Model { channels: 2, ..Model::default() });
    let data = pattern(3, 40 * 24 * 1024);
    let mut parts: Vec<Transfer<'_>> = data
        .chunks(24 << 10)
        .enumerate()
        .map(|(n, from)| Transfer::to_media(Addr((n as u64) * (64 << 10) + 4096), from))
        .collect();
    let copied = copies.vectored(&mut parts, &bandwidth(1)).unwrap();
    assert_eq!(copied.bytes, data.len() as u64);
    let pieces = seen(&copies).groups[0].bandwidth.copies;
    assert_eq!(pieces, 20, "two parts of 24 KiB are one piece, three would be too many");
    for (n, part) in data.chunks(24 << 10).enumerate() {
        let mut back = vec![0; part.len()];
        copies.from_media(Addr((n as u64) * (64 << 10) + 4096), &mut back, &latency()).unwrap();
        assert!(back == part);
    }
    // The edges are the CPU's, also of pieces.
    let raw = RawTransfer { at: Addr(9), dram: Dram::From(data.as_ptr(), Route::PastCaches), len: 300_000 };
    // SAFETY: the bytes are there until it was waited for.
    let ticket = unsafe { copies.submit_raw(&[raw], &bandwidth(1)) }.unwrap();
    ticket.wait().unwrap();
    let mut back = vec![0; 300_000];
    copies.from_media(Addr(9), &mut back, &CopyOptions::default()).unwrap();
    assert!(back == data[..300_000]);
}

#[test]
fn a_file_has_the_class_of_its_pool_or_its_own() {
    let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    let pool = Fs::mkfs(Pool::memfd(64 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
    let open = OpenOptions {
        engine: EngineKind::Emu,
        class: Some(Class::Latency),
        profile: eager(),
        ..OpenOptions::default()
    };
    let fs = Fs::open(pool, &open).unwrap();
    let files = Files::new(fs.clone(), Cred::root(), 0);
    let fd = files.open(b"/f", libc::O_RDWR | libc::O_CREAT, 0o644).unwrap();
    let counts = || {
        let group = fs.mover().state().engines.remove(0).groups.remove(0);
        (group.latency.copies, group.bandwidth.copies)
    };
    let data = pattern(6, 256 << 10);
    files.pwrite(fd, &data, 0).unwrap();
    let (of_latency, none) = counts();
    assert!(of_latency > 0 && none == 0);
    files.set_class(fd, Some(Class::Bandwidth(Owner::of(5)))).unwrap();
    files.pwrite(fd, &data, 1 << 20).unwrap();
    let (as_before, pieces) = counts();
    assert!(as_before == of_latency && pieces >= 4, "{pieces}");
    assert_eq!(fs.mover().state().engines[0].owners[0].owner, 5);
    files.set_class(fd, None).unwrap();
    let mut back = vec![0; data.len()];
    assert_eq!(files.pread(fd, &mut back, 1 << 20).unwrap(), data.len());
    assert!(back == data);
    assert!(counts().0 > of_latency && counts().1 == pieces);
    assert_eq!(files.set_class(99, None).unwrap_err().errno(), libc::EBADF);
    files.close(fd).unwrap();
    fs.close().unwrap();
}

/// Whatever the file's and the pool's is; the next call has theirs again.
#[test]
fn a_call_has_a_class_of_its_own() {
    let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    let pool = Fs::mkfs(Pool::memfd(64 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
    let open = OpenOptions {
        engine: EngineKind::Emu,
        class: Some(Class::Latency),
        profile: eager(),
        ..OpenOptions::default()
    };
    let fs = Fs::open(pool, &open).unwrap();
    let files = Files::new(fs.clone(), Cred::root(), 0);
    let fd = files.open(b"/f", libc::O_RDWR | libc::O_CREAT, 0o644).unwrap();
    let counts = || {
        let group = fs.mover().state().engines.remove(0).groups.remove(0);
        (group.latency.copies, group.bandwidth.copies)
    };
    let data = pattern(6, 256 << 10);
    let back = || vec![0; data.len()];
    files.pwrite(fd, &data, 0).unwrap();
    let bulk = files.classed(Class::Bandwidth(Owner::of(9)));
    type Call<'a> = &'a dyn Fn();
    let calls: [Call; 10] = [
        &|| assert_eq!(bulk.write(fd, &data).unwrap(), data.len()),
        &|| {
            let mut back = back();
            files.lseek(fd, 0, libc::SEEK_SET).unwrap();
            assert!(bulk.read(fd, &mut back).unwrap() == data.len() && back == data);
        },
        &|| assert_eq!(bulk.pwrite(fd, &data, 1 << 20).unwrap(), data.len()),
        &|| {
            let mut back = back();
            assert!(bulk.pread(fd, &mut back, 1 << 20).unwrap() == data.len() && back == data);
        },
        &|| {
            let ticket = bulk.submit_pwrite(fd, data.clone().into(), 2 << 20).unwrap();
            assert_eq!(ticket.wait().unwrap(), data.len());
        },
        &|| {
            let (back, read) = bulk.submit_pread(fd, back().into(), 2 << 20).unwrap().into_bytes();
            assert!(read.unwrap() == data.len() && back[..] == data);
        },
        &|| assert_eq!(block_on(bulk.pwrite_async(fd, data.clone().into(), 3 << 20)).1.unwrap(), data.len()),
        &|| assert!(block_on(bulk.pread_async(fd, back().into(), 3 << 20)).0[..] == data),
        &|| assert_eq!(block_on(bulk.write_async(fd, data.clone().into())).1.unwrap(), data.len()),
        &|| {
            files.lseek(fd, 0, libc::SEEK_SET).unwrap();
            assert!(block_on(bulk.read_async(fd, back().into())).0[..] == data);
        },
    ];
    for of_file in [None, Some(Class::Latency)] {
        files.set_class(fd, of_file).unwrap();
        for (number, call) in calls.iter().enumerate() {
            let before = counts();
            call();
            let after = counts();
            assert_eq!(after.0, before.0, "call {number}");
            assert!(after.1 >= before.1 + 4, "call {number}: {before:?} {after:?}");
        }
        let before = counts();
        files.pwrite(fd, &data, 0).unwrap();
        assert!(counts().0 > before.0 && counts().1 == before.1, "the next call has the file's again");
    }
    assert!(fs.mover().state().engines[0].owners.iter().all(|owner| owner.owner == 9));
    // One that was blocked goes on with its class.
    files.set_class(fd, Some(Class::Bandwidth(Owner::of(9)))).unwrap();
    let before = counts();
    let first = files.submit_pwrite(fd, data.clone().into(), 0).unwrap();
    files.classed(Class::Latency).pwrite(fd, &data, 0).unwrap();
    assert!(counts().0 > before.0);
    first.wait().unwrap();
    assert_eq!(bulk.pwrite(99, &data, 0).unwrap_err().errno(), libc::EBADF);
    files.close(fd).unwrap();
    fs.close().unwrap();
}

/// Asks again and again.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}
