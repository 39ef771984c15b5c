//! The engine `dsa` without a DSA: which queues it finds, what it tells them, and what it makes of their answers, from the
//! production code's side of the device file. `dsa_peer` is what stands on the other side.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};

use lodestone::fs::files::Files;
use lodestone::mover::dsa_sysfs::{Unusable, Why};
use lodestone::mover::engine_dsa_portal::{DsaPortal, SILENCE_MAX};

use super::dsa_peer::*;
use super::*;

/// As the kernel's without a limit by the scheduler.
const EAGER: Limits = Limits { in_flight_max: None, ..LIMITS };
/// For tests in which a device stays silent.
const SHORT: Duration = Duration::from_millis(300);

fn engine(tree: &Tree) -> Dsa<DsaPortal> {
    Dsa::new(DsaPortal::open_found(&tree.find(), SILENCE_MAX).unwrap())
}

fn mover(pool: &Pool, engine: Dsa<DsaPortal>) -> Mover<Pool> {
    let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
    mover.give(Box::new(engine), EAGER);
    mover
}

fn emulated() -> Emulated {
    Emulated::new(Model { offer: Offer::ALL, ..Model::default() })
}

fn why(found: &[Unusable], name: &str) -> String {
    found.iter().find(|queue| queue.name == name).unwrap_or_else(|| panic!("{name}")).why.to_string()
}

// ---- what is found ----

#[test]
fn a_machine_without_a_dsa_says_so() {
    let tree = Tree::new();
    assert_eq!(tree.find().missing().unwrap(), "no Intel DSA here, or its driver idxd is not loaded");
    let said = DsaPortal::open(&tree.places()).err().unwrap();
    assert_eq!(said, tree.find().missing().unwrap());
    // An analytics accelerator is on the same bus, and its queues are not ours.
    tree.lists("iax1", DEVICE, &[]).lists("wq1.0", SHARED, &[]);
    assert_eq!(tree.find().missing().unwrap(), "the driver idxd knows no Intel DSA");
    tree.lists("dsa0", DEVICE, &[]);
    assert_eq!(tree.find().missing().unwrap(), "dsa0 has no work queue");
}

#[test]
fn queues_are_found_with_what_they_can() {
    let tree = Tree::new();
    tree.lists("dsa10", DEVICE, &[("numa_node", "1")]).lists("wq10.1", DEDICATED, &[]);
    tree.lists("dsa2", DEVICE, &[("numa_node", "-1")]).lists("wq2.0", SHARED, &[]).lists(
        "engine2.0",
        &[],
        &[],
    );
    std::fs::write(tree.file("wq10.1"), "").unwrap();
    std::fs::write(tree.file("wq2.0"), "").unwrap();
    let found = tree.find();
    assert_eq!(found.devices, ["dsa2", "dsa10"]);
    assert_eq!((found.unusable, found.usable.len()), (vec![], 2));
    let [two, ten] = &found.usable[..] else { unreachable!() };
    assert_eq!((&*two.name, two.shared, two.size, two.node), ("wq2.0", true, 32, None));
    assert_eq!(two.offer, Offer { batch_max: 32, ..Offer::ALL });
    assert_eq!((&*ten.name, ten.shared, ten.size, ten.node), ("wq10.1", false, 16, Some(1)));
    assert_eq!(ten.offer, Offer { batch_max: 32, block_on_fault: false, ..Offer::ALL });
    assert_eq!(ten.file, tree.file("wq10.1"));
}

#[test]
fn a_queue_offers_no_more_than_it_and_its_device_say() {
    let offer = |device: &[(&str, &str)], queue: &[(&str, &str)]| {
        let tree = Tree::new();
        tree.lists("dsa0", DEVICE, device).lists("wq0.0", SHARED, queue);
        std::fs::write(tree.file("wq0.0"), "").unwrap();
        tree.find().usable.pop().expect("it is usable").offer
    };
    let all = Offer { batch_max: 32, ..Offer::ALL };
    assert_eq!(offer(&[], &[]), all);
    assert_eq!(offer(&[], &[("max_transfer_size", "65536")]), Offer { transfer_bytes_max: 65536, ..all });
    assert_eq!(offer(&[("max_transfer_size", "4096")], &[]), Offer { transfer_bytes_max: 4096, ..all });
    assert_eq!(offer(&[("max_batch_size", "4")], &[]), Offer { batch_max: 4, ..all });
    assert_eq!(offer(&[], &[("max_batch_size", "1")]), Offer { batch_max: 1, ..all });
    // Without a page request nobody fetches the page that is waited for.
    for flag in [("ats_disable", "1"), ("prs_disable", "1"), ("block_on_fault", "0")] {
        assert_eq!(offer(&[], &[flag]), Offer { block_on_fault: false, ..all }, "{flag:?}");
    }
    assert_eq!(offer(&[("gen_cap", "0x104")], &[]), Offer { block_on_fault: false, ..all });
    // Without read-back nobody knows when a store has reached memory.
    assert_eq!(offer(&[("gen_cap", "0x5")], &[]), Offer { routes: Routes::INTO_CACHES, ..all });
    assert_eq!(offer(&[("gen_cap", "0x101")], &[]), Offer { cache_control: false, ..all });
    // Operations: the device's and, of those, the queue's.
    assert_eq!(offer(&[("op_cap", "0x3fd")], &[]), Offer { batch_max: 0, copy_crc: false, ..all });
    assert_eq!(offer(&[], &[("op_config", "00000000,00020008")]), Offer { batch_max: 0, ..all });
    assert_eq!(offer(&[], &[("op_config", "00000000,0000000a")]), Offer { copy_crc: false, ..all });
}

#[test]
fn an_older_kernel_says_less_and_less_is_relied_upon() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    std::fs::write(tree.file("wq0.0"), "").unwrap();
    for attribute in
        ["pasid_enabled", "gen_cap", "op_cap", "max_batch_size", "max_transfer_size", "numa_node"]
    {
        tree.lacks("dsa0", attribute);
    }
    for attribute in ["max_transfer_size", "max_batch_size", "block_on_fault", "ats_disable", "threshold"] {
        tree.lacks("wq0.0", attribute);
    }
    let queue = tree.find().usable.pop().unwrap();
    let least = Offer {
        batch_max: 0,
        routes: Routes::INTO_CACHES,
        cache_control: false,
        copy_crc: false,
        block_on_fault: false,
        ..Offer::ALL
    };
    assert_eq!((queue.offer, queue.node), (least, None));
}

#[test]
fn each_queue_that_cannot_be_used_says_why() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]);
    tree.lists("wq0.0", SHARED, &[("state", "disabled")]);
    tree.lists("wq0.1", SHARED, &[("type", "kernel")]);
    tree.lists("wq0.2", SHARED, &[]);
    tree.lists("wq0.3", SHARED, &[("size", "many")]);
    tree.lists("wq0.4", SHARED, &[("mode", "both")]);
    tree.lists("wq0.5", SHARED, &[("max_transfer_size", "0")]);
    tree.lists("wq0.6", SHARED, &[("size", "-3")]);
    tree.lists("wq0.7", SHARED, &[("op_config", "00000000,00020002")]);
    tree.lists("wq0.8", SHARED, &[("max_batch_size", "0x10")]);
    tree.lists("wq0.9", SHARED, &[]).lacks("wq0.9", "mode");
    tree.lists("wq0.10", SHARED, &[("op_config", "everything")]);
    tree.lists("dsa1", DEVICE, &[("state", "disabled"), ("numa_node", "1")]).lists("wq1.0", SHARED, &[]);
    tree.lists("dsa2", DEVICE, &[("pasid_enabled", "0")]).lists("wq2.0", SHARED, &[]);
    tree.lists("dsa3", DEVICE, &[("max_batch_size", "")]).lists("wq3.0", SHARED, &[]);
    let found = tree.find();
    assert_eq!(found.usable, []);
    let says = |name| why(&found.unusable, name);
    assert_eq!(says("wq0.0"), "it is disabled");
    assert_eq!(says("wq0.1"), "its type is kernel, not user");
    assert_eq!(says("wq0.2"), format!("{} is not there", tree.file("wq0.2").display()));
    assert_eq!(says("wq0.3"), "its size is 'many'");
    assert_eq!(says("wq0.4"), "its mode is 'both'");
    assert_eq!(says("wq0.5"), "its max_transfer_size is '0'");
    assert_eq!(says("wq0.6"), "its size is '-3'");
    assert_eq!(says("wq0.7"), "it is not allowed to copy");
    assert_eq!(says("wq0.8"), "its max_batch_size is '0x10'");
    assert_eq!(says("wq0.9"), "its mode cannot be read");
    assert_eq!(says("wq0.10"), "its op_config is 'everything'");
    assert_eq!(says("wq1.0"), "its device dsa1 is disabled");
    assert_eq!(says("wq2.0"), "its device dsa2 has no PASID, so it cannot follow a process's addresses");
    assert_eq!(says("wq3.0"), "its max_batch_size is ''");
    let node = |name: &str| found.unusable.iter().find(|q| q.name == name).unwrap().node;
    assert_eq!((node("wq0.0"), node("wq1.0")), (Some(0), Some(1)));
    // And all of it, with what to do, where an engine was asked for.
    let said = DsaPortal::open(&tree.places()).err().unwrap();
    for part in
        ["wq0.0: it is disabled (accel-config", "wq2.0: its device dsa2 has no PASID", "intel_iommu=on,sm_on"]
    {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_device_file_of_somebody_else_says_what_to_do() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    std::fs::write(tree.file("wq0.0"), "").unwrap();
    std::fs::set_permissions(tree.file("wq0.0"), std::fs::Permissions::from_mode(0o400)).unwrap();
    // Root may open everything: asked as nobody, on a thread whose identity ends with it.
    let as_nobody = || {
        let id: libc::uid_t = 65534;
        // SAFETY: it changes this thread's identity alone, and fails where it may not.
        unsafe { libc::syscall(libc::SYS_setresuid, id, id, id) };
        (tree.find(), DsaPortal::open(&tree.places()).err())
    };
    let (found, said) = std::thread::scope(|scope| scope.spawn(as_nobody).join().unwrap());
    assert_eq!(found.usable, []);
    assert_eq!(found.unusable[0].why, Why::Denied(tree.file("wq0.0")));
    let file = tree.file("wq0.0").display().to_string();
    let whole = format!(
        "wq0.0: {file} is not permitted to this user (chgrp a group of this user and chmod g+rw {file})"
    );
    assert_eq!(said.unwrap(), whole);
}

// ---- what queues are told ----

/// One queue behind a FIFO.
fn of_fifo(queue: &[(&str, &str)], device: Option<Emulated>) -> (Tree, Peer) {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, queue);
    let peer = Peer::of_fifo(&tree.file("wq0.0"), device);
    (tree, peer)
}

/// One dedicated queue behind a page; none where the processor cannot store to it.
fn of_page(queue: &[(&str, &str)], device: Emulated) -> Option<(Tree, Peer)> {
    if !std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default().contains(" movdir64b") {
        eprintln!("SKIPPED: this processor has no MOVDIR64B");
        return None;
    }
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", DEDICATED, queue);
    let peer = Peer::of_page(&tree.file("wq0.0"), device);
    Some((tree, peer))
}

fn all_is_copied_through(tree: &Tree) {
    for pool in &pools() {
        let mover = mover(pool, engine(tree));
        conforms(pool, &mover, None);
        let moved = mover.moved();
        assert!(moved.bytes > 0, "{moved:?}");
        assert_eq!((moved.finished, moved.busy), (0, 0), "{moved:?}");
    }
}

#[test]
fn written_descriptors_conform() {
    let (tree, peer) = of_fifo(&[], Some(emulated()));
    all_is_copied_through(&tree);
    assert!(peer.seen.checksums.load(Ordering::Relaxed) > 0);
}

#[test]
fn stored_descriptors_conform() {
    let Some((tree, peer)) = of_page(&[], emulated()) else { return };
    all_is_copied_through(&tree);
    assert!(peer.seen.descriptors.load(Ordering::Relaxed) > 0);
}

#[test]
fn faults_under_load_are_borne_through_either_door() {
    let faulty = || Emulated::new(Model { faults: Some((3, 5)), ..Model::default() });
    // So that pages that are not there end a copy.
    let written = of_fifo(&[("block_on_fault", "0")], Some(faulty()));
    let stored = of_page(&[], faulty());
    for (tree, _peer) in [Some(written), stored].iter().flatten() {
        for pool in &pools() {
            let mover = mover(pool, engine(tree));
            conforms(pool, &mover, None);
            let moved = mover.moved();
            assert!(moved.finished > 0 && moved.copies > moved.finished, "{moved:?}");
        }
    }
}

#[test]
fn what_a_queue_does_not_offer_is_done_another_way() {
    let all = Offer { block_on_fault: false, ..Offer::ALL };
    let offers = [
        Offer { copy_crc: false, ..all },
        Offer { batch_max: 0, transfer_bytes_max: 32 << 10, ..all },
        Offer { batch_max: 3, transfer_bytes_max: 10_000, ..all },
        Offer { cache_control: false, ..all },
        Offer { block_on_fault: true, ..all },
        Offer { routes: Routes::INTO_CACHES, cache_control: false, copy_crc: false, batch_max: 0, ..all },
    ];
    for pool in &pools() {
        for offer in offers {
            for faults in [None, Some((3, 8))] {
                let model = Model { offer, faults, ..Model::default() };
                let mover = Mover::new(pool, EngineKind::Cpu, Profile::default());
                mover.give(Box::new(Dsa::new(Emulated::new(model))), EAGER);
                conforms(pool, &mover, None);
                let moved = mover.moved();
                assert!(moved.bytes > 0, "{model:?}: {moved:?}");
                assert_eq!(moved.finished > 0, faults.is_some(), "{model:?}: {moved:?}");
            }
        }
    }
}

/// A file system above queues that were found as on a machine with a DSA: its copies outlive their calls, some end early, and
/// after a power loss all is there that was acknowledged.
#[test]
fn files_are_copied_through_queues_that_were_found() {
    const FILE_BYTES: usize = 1 << 20;
    let faulty = || Emulated::new(Model { offer: Offer::ALL, faults: Some((3, 5)), ..Model::default() });
    let written = of_fifo(&[("block_on_fault", "0")], Some(faulty()));
    let stored = of_page(&[], faulty());
    for (tree, peer) in [Some(written), stored].iter().flatten() {
        for pool in pools() {
            let fs =
                Fs::open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap(), &OpenOptions::default()).unwrap();
            fs.mover().give(Box::new(engine(tree)), EAGER);
            let files = Files::new(fs, Cred::root(), 0);
            let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
            let mut rng = Rng::new(11);
            let mut model = random(&mut rng, FILE_BYTES);
            assert_eq!(files.pwrite(fd, &model, 0).unwrap(), FILE_BYTES);
            for _ in 0..60 {
                let (at, len) = place(&mut rng, 0, FILE_BYTES);
                let (bytes, other) = (random(&mut rng, len), place(&mut rng, 0, FILE_BYTES));
                model[at..at + len].copy_from_slice(&bytes);
                let write = files.submit_pwrite(fd, bytes.into(), at as i64).unwrap();
                // It waits for what it overlaps.
                let read = files.submit_pread(fd, vec![0; other.1].into(), other.0 as i64).unwrap();
                let (bytes, count) = read.into_bytes();
                assert!(count.unwrap() == other.1 && bytes[..] == model[other.0..][..other.1]);
                assert_eq!(write.wait().unwrap(), len);
            }
            let moved = files.fs().mover().moved();
            assert!(moved.copies > 0 && moved.finished > 0, "{moved:?}");
            let fs = files.fs().clone();
            drop(files);
            let media = fs.abandon().unwrap();
            let again = OpenOptions { power_lost: true, ..OpenOptions::default() };
            let files = Files::new(Fs::open(media, &again).unwrap(), Cred::root(), 0);
            let fd = files.open(b"file", libc::O_RDONLY, 0).unwrap();
            let mut found = vec![0; FILE_BYTES];
            assert_eq!(files.pread(fd, &mut found, 0).unwrap(), FILE_BYTES);
            assert!(found == model);
            let findings = files.fs().check().unwrap().findings;
            assert!(findings.is_empty(), "{findings:?}");
        }
        assert!(peer.seen.batches.load(Ordering::Relaxed) > 0, "what is in several places goes at once");
    }
}

/// Several transfers at once, where the queue takes no batches: they go one by one, in one system call.
#[test]
fn without_batches_descriptors_go_one_by_one() {
    let (tree, peer) = of_fifo(&[("op_config", "00000000,00020008")], Some(emulated()));
    let (pool, engine) = (pools().remove(0), engine(&tree));
    let bytes = random(&mut Rng::new(4), 3 << 20);
    let (a, rest) = bytes.split_at(5000);
    let (b, c) = rest.split_at(64);
    let completion = Engine::<Pool>::wait(
        &engine,
        submit(&engine, &pool, 0, &[(4096, a), (64 << 10, b), (1 << 20, c)], Some(9)),
    );
    assert_eq!((completion.status, completion.bytes), (Status::Done, bytes.len() as u64));
    assert_eq!(completion.crc, crc32c(&bytes, 9), "the CPU made it");
    assert!(holds(&pool, 4096, a) && holds(&pool, 64 << 10, b) && holds(&pool, 1 << 20, c));
    let seen = &*peer.seen;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!((count(&seen.descriptors), count(&seen.batches), count(&seen.checksums)), (4, 0, 0));
}

#[test]
fn more_transfers_than_a_request_holds_are_not_forgotten() {
    let (tree, _peer) = of_fifo(&[], Some(emulated()));
    let (pool, engine) = (pools().remove(0), engine(&tree));
    let bytes = random(&mut Rng::new(6), 20 << 12);
    let copies: Vec<(u64, &[u8])> = bytes.chunks(4096).zip(1..).map(|(bytes, n)| (n << 13, bytes)).collect();
    let completion = Engine::<Pool>::wait(&engine, submit(&engine, &pool, 0, &copies, Some(1)));
    assert_eq!((completion.status, completion.bytes), (Status::Partial, 16 << 12));
    assert_eq!(completion.crc, crc32c(&bytes[..16 << 12], 1));
}

#[test]
fn stores_say_how_durable_they_are_copy_by_copy() {
    let (tree, _peer) = of_fifo(&[], Some(emulated()));
    let (pool, engine) = (pools().remove(0), engine(&tree));
    let bytes = vec![1; 8192];
    for (route, durability) in
        [(Route::PastCaches, Durability::OnCompletion), (Route::IntoCaches, Durability::WriteBack)]
    {
        let mut transfer = Transfer::ToMedia { at: Addr(4096), from: &bytes, route };
        let (completion, ()) = carry(&engine, &pool, (0, 0), &mut transfer, None, || ()).unwrap();
        assert_eq!(completion.durability, durability);
    }
}

/// The device of 4 KiB pages: its offer says less than a request.
#[test]
fn a_dedicated_queue_never_holds_more_than_it_can() {
    const SIZE: usize = 2;
    let slow = Model { latency: Duration::from_micros(200), ..Model::default() };
    let Some((tree, peer)) = of_page(&[("size", "2")], Emulated::new(slow)) else { return };
    let (pool, first) = (pools().remove(0), engine(&tree));
    let bytes = [3; 4096];
    // Two engines of one process share the queue, and its places.
    let second = engine(&tree);
    let a = submit(&first, &pool, 0, &[(4096, &bytes)], None);
    let b = submit(&second, &pool, 0, &[(8192, &bytes)], None);
    let raw =
        [RawTransfer { at: Addr(16384), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: 4096 }];
    for engine in [&first, &second] {
        // SAFETY: it is refused.
        let refused = unsafe { engine.submit(&pool, 0, 0, &raw, None) };
        assert_eq!(refused.err(), Some(Refused::Full), "two are under way until somebody has seen their end");
    }
    Engine::<Pool>::wait(&first, a);
    let c = submit(&second, &pool, 0, &[(16384, &bytes)], None);
    for ticket in [b, c] {
        assert_eq!(Engine::<Pool>::wait(&second, ticket).status, Status::Done);
    }
    drop(first);
    let mover = mover(&pool, second);
    conforms(&pool, &mover, None);
    let moved = mover.moved();
    assert!(moved.bytes > 0 && moved.finished == 0, "{moved:?}");
    let most = peer.seen.most.load(Ordering::Relaxed);
    assert!((1..=SIZE).contains(&most), "{most} at a time");
}

#[test]
fn a_queue_that_was_closed_is_opened_again() {
    let (tree, _peer) = of_fifo(&[], Some(emulated()));
    let pool = pools().remove(0);
    let bytes = [5; 4096];
    for n in 1..4 {
        let engine = engine(&tree);
        let ticket = submit(&engine, &pool, 0, &[(n << 12, &bytes)], None);
        assert_eq!(Engine::<Pool>::wait(&engine, ticket).status, Status::Done);
    }
}

#[test]
fn queues_near_the_media_are_preferred() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    tree.lists("dsa1", DEVICE, &[("numa_node", "1")]).lists("wq1.0", SHARED, &[]).lists("wq1.1", SHARED, &[]);
    let peers = ["wq0.0", "wq1.0", "wq1.1"].map(|name| Peer::of_fifo(&tree.file(name), Some(emulated())));
    let pool = pools().remove(0);
    let seen = || peers.each_ref().map(|peer| peer.seen.descriptors.load(Ordering::Relaxed));
    let copy = |engine: &Dsa<DsaPortal>| {
        for channel in 0..6 {
            Engine::<Pool>::wait(engine, submit(engine, &pool, channel, &[(4096, &[1; 4096])], None));
        }
    };
    copy(&engine(&tree).near(&[Some(1)]));
    assert_eq!(seen(), [0, 3, 3]);
    copy(&engine(&tree).near(&[Some(0)]));
    assert_eq!(seen(), [6, 3, 3]);
    // Nobody is near, or nobody knows: all take turns.
    copy(&engine(&tree).near(&[Some(7)]));
    copy(&engine(&tree).near(&[None]));
    assert_eq!(seen(), [10, 7, 7]);
}

#[test]
fn a_suspended_queue_holds_what_comes() {
    let (tree, peer) = of_fifo(&[], Some(emulated()));
    let pool = Arc::new(pools().remove(0));
    let engine = Arc::new(engine(&tree));
    Engine::<Pool>::suspend(&*engine, 0);
    let copy = std::thread::spawn({
        let (pool, engine) = (pool.clone(), engine.clone());
        move || Engine::<Pool>::wait(&*engine, submit(&*engine, &pool, 0, &[(4096, &[9; 4096])], None)).status
    });
    std::thread::sleep(Duration::from_millis(30));
    assert!(!copy.is_finished());
    assert_eq!(peer.seen.descriptors.load(Ordering::Relaxed), 0);
    Engine::<Pool>::resume(&*engine, 0);
    assert_eq!(copy.join().unwrap(), Status::Done);
    assert!(holds(&pool, 4096, &[9; 4096]));
}

// ---- what goes wrong ----

/// EAGAIN for as long as the FIFO is full of what nobody reads.
#[test]
fn a_queue_that_stays_full_is_left_to_the_cpu_and_asked_again() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    let mut file = fifo(&tree.file("wq0.0"));
    let bytes = rustix::pipe::fcntl_setpipe_size(file.as_fd(), 4096).unwrap();
    std::io::Write::write_all(&mut file, &vec![0; bytes]).unwrap();
    let pool = pools().remove(0);
    let mover = mover(&pool, engine(&tree));
    conforms(&pool, &mover, None);
    let full = mover.moved();
    assert!(full.copies == 0 && full.busy > 0, "{full:?}");
    file.read_exact(&mut vec![0; bytes]).unwrap();
    let _peer = Peer::reads(file, Some(emulated()));
    conforms(&pool, &mover, None);
    let moved = mover.moved();
    assert!(moved.copies > 0 && moved.finished == 0, "{moved:?}");
}

/// Every write fails, as with ENODEV.
#[test]
fn a_device_that_takes_nothing_is_said_once_and_passed_over() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]).lists("wq0.1", SHARED, &[]);
    symlink("/dev/full", tree.file("wq0.0")).unwrap();
    let pool = pools().remove(0);
    {
        let peer = Peer::of_fifo(&tree.file("wq0.1"), Some(emulated()));
        let mover = mover(&pool, engine(&tree));
        conforms(&pool, &mover, None);
        let moved = mover.moved();
        assert!(
            moved.copies > 0 && moved.busy == 0 && moved.finished == 0,
            "the other queue does it: {moved:?}"
        );
        assert!(peer.seen.descriptors.load(Ordering::Relaxed) >= moved.copies);
    }
    std::fs::remove_file(tree.file("wq0.1")).unwrap();
    let engine = engine(&tree);
    let raw =
        [RawTransfer { at: Addr(4096), dram: Dram::From([1; 4096].as_ptr(), Route::PastCaches), len: 4096 }];
    // SAFETY: it is refused.
    assert_eq!(unsafe { engine.submit(&pool, 0, 0, &raw, None) }.err(), Some(Refused::Gone));
    let said = engine.portal().why_gone();
    assert!(said.contains("wq0.0: ") && said.contains("and writing to it: "), "{said}");
    let mover = mover(&pool, engine);
    conforms(&pool, &mover, None);
    let moved = mover.moved();
    assert!(moved.copies == 0 && moved.busy > 0, "{moved:?}");
}

/// The terminal's other end is closed under load: writes fail from then on, and what was on its way is never answered.
#[test]
fn a_device_that_vanishes_under_load_is_given_up() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    let (master, slave) = terminal();
    symlink(slave, tree.file("wq0.0")).unwrap();
    let pool = pools().remove(0);
    let portal = DsaPortal::open_found(&tree.find(), SHORT).unwrap();
    let device = std::thread::spawn(move || {
        let (device, mut master) = (emulated(), master);
        for turn in 0..40 {
            let mut bytes = [0; 64];
            master.read_exact(&mut bytes).unwrap();
            follow(Some(&device), turn, descriptor_of(bytes));
        }
    });
    let mover = mover(&pool, Dsa::new(portal));
    conforms(&pool, &mover, None);
    device.join().unwrap();
    let moved = mover.moved();
    assert!(moved.bytes > 0 && moved.busy > 0, "{moved:?}");
}

/// A terminal that changes no bytes, and the path of its other end.
fn terminal() -> (File, String) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let mut plain = tcgetattr(&master).unwrap();
    plain.make_raw();
    tcsetattr(&master, OptionalActions::Now, &plain).unwrap();
    let slave = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    (File::from(master), slave)
}

/// It takes descriptors and never answers.
#[test]
fn a_silent_queue_is_closed_and_the_others_go_on() {
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]).lists("wq0.1", SHARED, &[]);
    let silent = Peer::of_fifo(&tree.file("wq0.0"), None);
    let good = Peer::of_fifo(&tree.file("wq0.1"), Some(emulated()));
    let pool = pools().remove(0);
    let engine = Dsa::new(DsaPortal::open_found(&tree.find(), SHORT).unwrap());
    let bytes = [7; 4096];
    let (lost, other) = (
        submit(&engine, &pool, 0, &[(4096, &bytes)], None),
        submit(&engine, &pool, 0, &[(8192, &bytes)], Some(0)),
    );
    assert!(!Engine::<Pool>::poll(&engine, &lost), "it may still answer");
    for ticket in [lost, other] {
        let completion = Engine::<Pool>::wait(&engine, ticket);
        assert_eq!((completion.status, completion.bytes), (Status::Failed, 0));
    }
    assert!(engine.portal().why_gone().contains("said nothing for"), "{}", engine.portal().why_gone());
    let mover = mover(&pool, engine);
    conforms(&pool, &mover, None);
    let moved = mover.moved();
    assert!(moved.copies > 0 && moved.finished == 0 && moved.busy == 0, "{moved:?}");
    let count = |peer: &Peer| peer.seen.descriptors.load(Ordering::Relaxed);
    assert!(count(&silent) == 2 && count(&good) > 0, "nothing more went to the silent one");
}

#[test]
fn a_poll_ends_when_a_silent_queue_is_given_up() {
    let (tree, _silent) = of_fifo(&[], None);
    let pool = pools().remove(0);
    let engine = Dsa::new(DsaPortal::open_found(&tree.find(), SHORT).unwrap());
    let bytes = [7; 4096];
    let ticket = submit(&engine, &pool, 0, &[(4096, &bytes)], None);
    while !Engine::<Pool>::poll(&engine, &ticket) {
        std::thread::yield_now();
    }
    assert_eq!(Engine::<Pool>::wait(&engine, ticket).status, Status::Failed);
}

#[test]
fn the_engine_dsa_without_one_is_the_cpu() {
    if has_dsa() {
        eprintln!("SKIPPED: this machine has a DSA");
        return;
    }
    let pool = pools().remove(0);
    let mover = Mover::new(&pool, EngineKind::Dsa, Profile::default());
    assert!(mover.engine(EngineKind::Dsa).is_none());
    conforms(&pool, &mover, None);
    let moved = mover.moved();
    assert!(moved.busy > 0 && (moved.copies, moved.bytes, moved.finished) == (0, 0, 0), "{moved:?}");
}

/// The device follows the addresses of whoever opened the queue, which are not the child's.
#[test]
fn a_forked_child_submits_nothing() {
    let (tree, peer) = of_fifo(&[], Some(emulated()));
    let (pool, engine) = (pools().remove(0), engine(&tree));
    let bytes = [1; 4096];
    let raw =
        [RawTransfer { at: Addr(4096), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: 4096 }];
    // SAFETY: the child tries one submission, which is refused, and ends without coming back.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it is refused.
        let refused = unsafe { engine.submit(&pool, 0, 0, &raw, None) }.err() == Some(Refused::Gone);
        // SAFETY: it ends here.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: `status` is written to.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(peer.seen.descriptors.load(Ordering::Relaxed), 0);
    let ticket = submit(&engine, &pool, 0, &[(4096, &bytes)], None);
    assert_eq!(Engine::<Pool>::wait(&engine, ticket).status, Status::Done, "the parent goes on");
}

/// Warnings of this thread.
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// What is warned of while a mover is made and copies to a pool ten times.
fn warnings(made: impl FnOnce() -> Mover<Pool>, pool: &Pool) -> (Mover<Pool>, Vec<String>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let mover = tracing::subscriber::with_default(Warnings(lines.clone()), || {
        let mover = made();
        for n in 0..10 {
            let (_, flushed) = mover.store(pool, None, Addr(n << 16), &[n as u8; 64 << 10], None).unwrap();
            pool.fence(flushed);
            assert!(holds(pool, n << 16, &[n as u8; 64 << 10]));
        }
        mover
    });
    let said = lines.lock().unwrap().clone();
    (mover, said)
}

#[test]
fn whoever_asked_for_a_dsa_is_told_once_why_the_cpu_copies() {
    let pool = pools().remove(0);
    if !has_dsa() {
        let (mover, said) = warnings(|| Mover::new(&pool, EngineKind::Dsa, Profile::default()), &pool);
        assert_eq!(said.len(), 1, "{said:?}");
        let missing = lodestone::mover::dsa_sysfs::find(&Places::default()).missing().unwrap();
        assert_eq!(said[0], format!("engine dsa: {missing}; the CPU copies instead"));
        assert_eq!(mover.moved().busy, 10);
    }
    let tree = Tree::new();
    tree.lists("dsa0", DEVICE, &[]).lists("wq0.0", SHARED, &[]);
    symlink("/dev/full", tree.file("wq0.0")).unwrap();
    let (_, said) = warnings(|| mover(&pool, engine(&tree)), &pool);
    let file = tree.file("wq0.0").display().to_string();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains(&file) && said[0].ends_with("from now on the CPU copies"), "{said:?}");
}
