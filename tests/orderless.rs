//! Writes and reads whose copies go on after their operation let go of the file: who waits for whom, what becomes of
//! copies that fail, of files that go meanwhile, of pools that close; and the same from uthreads.

use std::future::Future;
use std::io::BufRead;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lodestone::fs::files::{Fd, Files, OpenFile};
use lodestone::fs::format::{LANES, TICKET_MAX, completion_addr, pack_completion};
use lodestone::fs::{Cred, Fs, Lent, MkfsOptions, OpenOptions, Step, Transferring, Tries, WriteTicket};
use lodestone::media::{Domain, Media, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::completion::{Completion, Status};
use lodestone::mover::engine_port::*;
use lodestone::runtime::{self, Options, Runtime};
use lodestone::sim::engine::SimEngine;
use lodestone::sim::media::{Keep, SimMedia};

const POOL_BYTES: u64 = 32 << 20;
const KIB: usize = 1 << 10;

/// A device that ends no copy before it is told to: it does nothing then, and the CPU copies.
struct Gate(Key);

#[derive(Clone, Default)]
struct Key {
    open: Arc<(Mutex<bool>, Condvar)>,
    begun: Arc<AtomicUsize>,
    /// Where the last was to go.
    last: Arc<Mutex<u64>>,
}

impl Key {
    fn set(&self, open: bool) {
        *self.open.0.lock().unwrap() = open;
        self.open.1.notify_all();
    }

    /// Copies that were handed over.
    fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }
}

impl<M: Media> Engine<M> for Gate {
    fn capability(&self) -> Capability {
        Capability {
            smallest_bytes: 4096,
            largest_bytes: usize::MAX,
            alignment: 1,
            routes: Routes::PAST_CACHES,
            shares_reads: false,
            channels: 2,
        }
    }

    // SAFETY: it touches none of the bytes.
    unsafe fn submit(
        &self,
        _: &M,
        _: usize,
        _: usize,
        batch: &[RawTransfer],
        _: Option<u32>,
    ) -> Result<Ticket, Refused> {
        *self.0.last.lock().unwrap() = batch[0].at.0;
        Ok(Ticket::in_slot(0, self.0.begun.fetch_add(1, Ordering::SeqCst)))
    }

    fn poll(&self, _: &Ticket) -> bool {
        *self.0.open.0.lock().unwrap()
    }

    fn wait(&self, _: Ticket) -> Completion {
        let open = self.0.open.0.lock().unwrap();
        drop(self.0.open.1.wait_while(open, |open| !*open).unwrap());
        Completion { status: Status::Failed, bytes: 0, crc: 0, durability: Durability::Fence, nanoseconds: 1 }
    }

    fn suspend(&self, _: usize) {}

    fn resume(&self, _: usize) {}
}

fn files_on<M: Media>(media: M, engine: Option<EngineKind>) -> (Files<M>, Key) {
    files_of(Fs::mkfs(media, &MkfsOptions::default()).unwrap(), engine)
}

/// Of a pool that is there.
fn files_of<M: Media>(media: M, engine: Option<EngineKind>) -> (Files<M>, Key) {
    let options = OpenOptions { engine: engine.unwrap_or_default(), ..OpenOptions::default() };
    let fs = Fs::open(media, &options).unwrap();
    match engine {
        None => behind_a_gate(fs),
        Some(_) => (Files::new(fs, Cred::root(), 0), Key::default()),
    }
}

fn behind_a_gate<M: Media>(fs: Arc<Fs<M>>) -> (Files<M>, Key) {
    let key = Key::default();
    fs.mover().give(Box::new(Gate(key.clone())), SimEngine::limits());
    (Files::new(fs, Cred::root(), 0), key)
}

fn memfd() -> Pool {
    Pool::memfd(POOL_BYTES, &PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() }).unwrap()
}

fn create<M: Media>(files: &Files<M>, name: &str, content: &[u8]) -> Fd {
    let fd = files.open(name.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
    assert_eq!(files.pwrite(fd, content, 0).unwrap(), content.len());
    files.set_engine(fd, None).unwrap();
    fd
}

fn content<M: Media>(files: &Files<M>, fd: Fd) -> Vec<u8> {
    files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
    let mut bytes = vec![0; files.fstat(fd).unwrap().size as usize];
    assert_eq!(files.pread(fd, &mut bytes, 0).unwrap(), bytes.len());
    files.set_engine(fd, None).unwrap();
    bytes
}

fn check<M: Media>(files: &Files<M>) {
    let report = files.fs().check().unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn only_what_overlaps_a_write_waits_for_it() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 256 * KIB]);
    let ticket = files.submit_pwrite(fd, vec![2; 64 * KIB].into(), 64 * KIB as i64).unwrap();
    assert!(!ticket.poll() && key.begun() == 1);
    // Beside it: writes of each kind, reads, attributes, names.
    let other = files.open(b"file", libc::O_RDWR, 0).unwrap();
    files.set_engine(other, Some(EngineKind::Cpu)).unwrap();
    for (at, len) in [(0, 100), (5000, 3000), (128 * KIB, 64 * KIB), (60 * KIB, 4 * KIB)] {
        assert_eq!(files.pwrite(other, &vec![3; len], at as i64).unwrap(), len);
    }
    let mut bytes = vec![0; 4 * KIB];
    files.pread(other, &mut bytes, 60 * KIB as i64).unwrap();
    assert!(bytes.iter().all(|b| *b == 3));
    files.fchmod(fd, 0o600).unwrap();
    files.rename(b"file", b"renamed", 0).unwrap();
    let second = files.submit_pwrite(fd, vec![4; 16 * KIB].into(), 200 * KIB as i64).unwrap();
    assert!(!ticket.poll() && !second.poll() && key.begun() == 2, "nothing of that waited");
    // And across it: all of that comes back after the gate was opened.
    let opened = AtomicBool::new(false);
    let waits = |what: &str| assert!(opened.load(Ordering::SeqCst), "{what} did not wait");
    std::thread::scope(|scope| {
        let (files, key, waits, opened) = (&files, &key, &waits, &opened);
        scope.spawn(move || {
            let mut bytes = vec![0; 8 * KIB];
            files.pread(other, &mut bytes, 124 * KIB as i64).unwrap();
            waits("a read");
            assert!(bytes[..4 * KIB].iter().all(|b| *b == 2), "it reads what was written");
        });
        scope.spawn(move || {
            let fd = files.open(b"renamed", libc::O_RDWR, 0).unwrap();
            files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
            files.pwrite(fd, &[5; 10], 100 * KIB as i64).unwrap();
            waits("a write");
        });
        scope.spawn(move || {
            files.truncate(b"renamed", 250 * KIB as i64).unwrap();
            waits("a truncate");
        });
        scope.spawn(move || {
            files.fsync(fd).unwrap();
            waits("fsync");
        });
        std::thread::sleep(Duration::from_millis(20));
        opened.store(true, Ordering::SeqCst);
        key.set(true);
    });
    assert_eq!((ticket.wait().unwrap(), ticket.wait().unwrap()), (64 * KIB, 64 * KIB), "twice the same");
    assert_eq!(second.into_bytes().1.unwrap(), 16 * KIB);
    let all = content(&files, fd);
    assert_eq!(all.len(), 250 * KIB);
    assert_eq!((all[0], all[64 * KIB], all[100 * KIB], all[128 * KIB], all[200 * KIB]), (3, 2, 5, 3, 4));
    check(&files);
}

/// While somebody waits until no write of a file is under way, none begins that would be: otherwise writers of which some
/// copy always is would put him off for ever.
#[test]
fn who_needs_a_file_at_rest_has_his_turn() {
    const SLOTS: usize = 500;
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 16 * KIB]);
    files.truncate(b"file", (SLOTS * 16 * KIB) as i64).unwrap();
    let begun = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (files, begun) = (&files, &begun);
        let write = |n| files.submit_pwrite(fd, vec![2; 16 * KIB].into(), (n * 16 * KIB) as i64).unwrap();
        let first = write(0);
        let truncate = scope.spawn(|| files.truncate(b"file", 20 * KIB as i64).unwrap());
        let writer = scope.spawn(move || {
            let begin = |n| {
                let ticket = write(n);
                begun.store(n, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
                ticket
            };
            (1..SLOTS).map(begin).collect::<Vec<_>>()
        });
        // None begins any more once the truncate waits.
        let mut last = usize::MAX;
        while last != begun.load(Ordering::SeqCst) && !writer.is_finished() {
            last = begun.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(300));
        }
        let waited = !writer.is_finished();
        key.set(true);
        truncate.join().unwrap();
        let tickets = writer.join().unwrap();
        assert!(tickets.iter().chain([&first]).all(|ticket| ticket.wait().unwrap() == 16 * KIB));
        assert!(waited, "a writer was always quicker");
    });
    let all = content(&files, fd);
    assert!(all[..16 * KIB] == [2; 16 * KIB] && all.len() == SLOTS * 16 * KIB);
    check(&files);
}

#[test]
fn a_read_under_way_blocks_no_write_and_sees_none() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 64 * KIB]);
    std::thread::scope(|scope| {
        let (files, key) = (&files, &key);
        let reader = scope.spawn(move || {
            let mut bytes = vec![0; 64 * KIB];
            files.pread(fd, &mut bytes, 0).unwrap();
            bytes
        });
        while key.begun() == 0 {
            std::thread::yield_now();
        }
        let other = files.open(b"file", libc::O_RDWR, 0).unwrap();
        files.set_engine(other, Some(EngineKind::Cpu)).unwrap();
        // Small ones would go in place, large ones free blocks that the next would get; a truncate frees all.
        for round in 0..20 {
            files.pwrite(other, &[2; 100], 200 * round).unwrap();
            files.pwrite(other, &[3; 32 * KIB], 0).unwrap();
        }
        files.ftruncate(other, 100).unwrap();
        files.pwrite(other, &[4; 60 * KIB], 200).unwrap();
        key.set(true);
        assert!(reader.join().unwrap().iter().all(|b| *b == 1), "it read what was there when it began");
    });
    let all = content(&files, fd);
    assert!(all[..100].iter().all(|b| *b == 3) && all[100..200].iter().all(|b| *b == 0));
    assert!(all[200..].iter().all(|b| *b == 4));
    check(&files);
}

/// However many reads overlap: what nobody reads is not kept for those that came since.
#[test]
fn what_was_freed_is_kept_for_no_read_that_began_since() {
    let (files, key) = files_on(memfd(), None);
    let (fd, other) = (create(&files, "read", &[1; 64 * KIB]), create(&files, "other", &[2; 64 * KIB]));
    key.set(true);
    let free = || files.fs().statfs().blocks_free;
    let submit = || files.submit_pread(fd, vec![0; 64 * KIB].into(), 0).unwrap();
    let before = free();
    let (first, second) = (submit(), submit());
    files.ftruncate(other, 0).unwrap();
    assert!(free() <= before, "reads under way may be of what it had");
    first.into_bytes().1.unwrap();
    let third = submit();
    second.into_bytes().1.unwrap();
    assert!(free() > before + 8, "{} blocks are free, {before} were", free());
    third.into_bytes().1.unwrap();
    check(&files);
}

#[test]
fn files_may_go_while_they_are_written() {
    let (files, key) = files_on(memfd(), None);
    let keep = create(&files, "keep", b"");
    let free = files.fs().statfs().blocks_free;
    let fd = create(&files, "gone", b"");
    let ticket = files.submit_pwrite(fd, vec![7; 100 * KIB].into(), 0).unwrap();
    assert_eq!(files.fstat(fd).unwrap().size, 100 * KIB as u64, "what is under way shows");
    files.unlink(b"gone").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            key.set(true);
        });
        files.close(fd).unwrap();
        assert_eq!(ticket.wait().unwrap(), 100 * KIB);
    });
    assert!(files.fs().statfs().blocks_free + 2 >= free, "its blocks are free");
    assert_eq!(files.pwrite(keep, &[1; 32 * KIB], 0).unwrap(), 32 * KIB);
    check(&files);
}

/// What a file goes with: its last name, what is moved over it, its last descriptor.
const LAST: [fn(&Files<Pool>, Fd); 4] = [
    |files, fd| {
        files.close(fd).unwrap();
        files.unlink(b"gone").unwrap();
    },
    |files, fd| {
        files.close(fd).unwrap();
        files.rename(b"other", b"gone", 0).unwrap();
        files.rename(b"gone", b"other", 0).unwrap();
    },
    |files, fd| {
        files.unlink(b"gone").unwrap();
        files.close(fd).unwrap();
    },
    |files, fd| {
        let second = files.dup(fd).unwrap();
        files.close(fd).unwrap();
        files.rename(b"other", b"gone", 0).unwrap();
        files.rename(b"gone", b"other", 0).unwrap();
        files.close(second).unwrap();
    },
];

/// Whoever ends a file goes on, and so do others: its blocks and its number go when the last of its copies is over.
#[test]
fn the_end_of_a_file_waits_for_no_copy() {
    for (number, last) in LAST.into_iter().enumerate() {
        let (files, key) = files_on(memfd(), None);
        let other = create(&files, "other", &[5; 64 * KIB]);
        let free = files.fs().statfs().blocks_free;
        let fd = create(&files, "gone", &[1; 64 * KIB]);
        let ino = files.ino(fd).unwrap();
        let tickets = [0, 32 * KIB, 64 * KIB]
            .map(|at| files.submit_pwrite(fd, vec![7; 32 * KIB].into(), at as i64).unwrap());
        or_opened(&key, || last(&files, fd));
        assert!(!tickets.iter().any(|ticket| ticket.poll()), "it waited: {number}");
        assert_eq!(files.stat(b"gone").unwrap_err().errno(), libc::ENOENT);
        // Others get nothing of it meanwhile.
        let new = create(&files, "new", &[9; 200 * KIB]);
        assert_ne!(files.ino(new).unwrap(), ino);
        let held = free - files.fs().statfs().blocks_free;
        assert!(held >= 90, "its 96 KiB, which are copied, what those replace, and 200 KiB: {held} blocks");
        key.set(true);
        // In another order than that in which they began.
        assert!([2, 0, 1].iter().all(|n| tickets[*n].wait().unwrap() == 32 * KIB));
        files.close(new).unwrap();
        files.unlink(b"new").unwrap();
        assert!(files.fs().statfs().blocks_free + 2 >= free, "its blocks are free: {number}");
        let numbers = ["one", "two"].map(|name| files.ino(create(&files, name, &[])).unwrap());
        assert!(numbers.contains(&ino), "and its number: {number}");
        assert_eq!(content(&files, other), [5; 64 * KIB]);
        check(&files);
    }
}

/// In a full pool, too: what a file that went has is waited for by who needs it.
#[test]
fn room_that_a_file_had_is_waited_for() {
    let (files, key, ticket, other) = full_but_for_a_copy();
    // The first descriptor is its.
    files.unlink(b"file").unwrap();
    or_opened(&key, || files.close(0).unwrap());
    assert!(!ticket.poll());
    std::thread::scope(|scope| {
        let files = &files;
        // More than the copy had replaced: also what it wrote.
        let writes = scope.spawn(move || files.pwrite(other, &vec![3; 400 * KIB], 0));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!writes.is_finished(), "it does not wait for what the file had");
        key.set(true);
        assert_eq!(writes.join().unwrap().unwrap(), 400 * KIB);
    });
    check(&files);
}

/// A pool whose epochs nobody settles by himself, with "old", a directory that has blocks and is empty: what was in it,
/// "kept", went to "new" a moment ago. An empty directory "other" there is, too, and a file that is copied by the gate.
fn with_a_directory_that_may_go() -> (Arc<Files<Pool>>, Key, Fd, u64) {
    let fs = Fs::mkfs(memfd(), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(fs, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap();
    let (files, key) = behind_a_gate(fs);
    let fd = create(&files, "file", &[1; 256 * KIB]);
    ["new", "other"].iter().for_each(|name| files.mkdir(name.as_bytes(), 0o700).unwrap());
    let free = files.fs().statfs().blocks_free;
    files.mkdir(b"old", 0o700).unwrap();
    files.setxattr(b"old", true, b"user.large", &[7; 60_000], 0).unwrap();
    files.close(create(&files, "old/kept", &[5; 100])).unwrap();
    files.rename(b"old/kept", b"new/kept", 0).unwrap();
    (Arc::new(files), key, fd, free)
}

/// What a directory goes with.
const LAST_OF_A_DIRECTORY: [fn(&Files<Pool>); 3] = [
    |files| files.rmdir(b"old").unwrap(),
    |files| {
        files.rename(b"other", b"old", 0).unwrap();
        files.rename(b"old", b"other", 0).unwrap();
    },
    |files| {
        let fd = files.open(b"old", libc::O_DIRECTORY, 0).unwrap();
        files.rmdir(b"old").unwrap();
        files.close(fd).unwrap();
    },
];

/// What it has stays until the epoch is settled in which something was moved between it and another one: nobody waits for the copies
/// that are to be over by then, neither in a uthread nor on a thread.
#[test]
fn the_end_of_a_directory_waits_for_no_copy() {
    for (number, last) in LAST_OF_A_DIRECTORY.into_iter().enumerate() {
        for in_uthread in [true, false] {
            let (files, key, fd, free) = with_a_directory_that_may_go();
            let ino = files.stat(b"old").unwrap().ino;
            let held = free - files.fs().statfs().blocks_free;
            assert!(held > 14, "what it has: {held} blocks");
            let ticket = files.submit_pwrite(fd, vec![7; 64 * KIB].into(), 0).unwrap();
            let copied = free - held - files.fs().statfs().blocks_free;
            if in_uthread {
                let runtime = Runtime::new(Options::default()).unwrap();
                let own = files.clone();
                let removes = runtime.spawn(move || last(&own)).unwrap();
                let own = files.clone();
                let other = runtime.spawn(move || own.mkdir(b"meanwhile", 0o700).unwrap()).unwrap();
                or_opened(&key, || runtime.run(1).unwrap());
                removes.join().unwrap();
                other.join().unwrap();
            } else {
                or_opened(&key, || last(&files));
                files.mkdir(b"meanwhile", 0o700).unwrap();
            }
            assert!(!ticket.poll(), "it waited: {number}");
            assert_eq!(files.stat(b"old").unwrap_err().errno(), libc::ENOENT);
            assert_ne!(files.stat(b"meanwhile").unwrap().ino, ino, "nobody has its number");
            let left = free - files.fs().statfs().blocks_free;
            assert!(left >= held + copied, "nor its blocks: {left} of {held} and {copied}");
            key.set(true);
            assert_eq!(ticket.wait().unwrap(), 64 * KIB);
            files.fs().tick().unwrap();
            let left = free - files.fs().statfs().blocks_free;
            assert!(left <= 3, "it is freed with the epoch: {left} blocks");
            let numbers = ["one", "two"].map(|name| files.ino(create(&files, name, &[])).unwrap());
            assert!(numbers.contains(&ino), "and so is its number: {number}");
            let kept = files.open(b"new/kept", libc::O_RDONLY, 0).unwrap();
            assert_eq!(content(&files, kept), [5; 100]);
            check(&files);
        }
    }
}

/// In a full pool, too: what such a directory has is waited for by who needs it, in a uthread so that others run.
#[test]
fn room_that_a_directory_had_is_waited_for() {
    for in_uthread in [true, false] {
        let (files, key, fd, _) = with_a_directory_that_may_go();
        let other = create(&files, "written", &[]);
        files.set_engine(other, Some(EngineKind::Cpu)).unwrap();
        fill(&files, 16 * KIB);
        let ticket = files.submit_pwrite(fd, vec![2; 8 * KIB].into(), 0).unwrap();
        or_opened(&key, || files.rmdir(b"old").unwrap());
        assert!(!ticket.poll());
        let write = move |files: &Files<Pool>| files.pwrite(other, &vec![3; 40 * KIB], 0).unwrap();
        if in_uthread {
            assert_eq!(waits_and_lets_others_run(&files, &key, write), 40 * KIB);
        } else {
            std::thread::scope(|scope| {
                let writes = scope.spawn(|| write(&files));
                std::thread::sleep(Duration::from_millis(50));
                assert!(!writes.is_finished(), "it does not wait for what the directory had");
                key.set(true);
                assert_eq!(writes.join().unwrap(), 40 * KIB);
            });
        }
        assert_eq!(ticket.wait().unwrap(), 8 * KIB);
        check(&files);
    }
}

/// One that went with its copies under way is not there after a close, and none of it is lost by a copy that fails.
#[test]
fn a_file_that_went_is_gone_however_its_copies_end() {
    for fails in [false, true] {
        let (files, key) = files_on(SimMedia::new(vec![0; 8 << 20], Domain::Memory), None);
        create(&files, "other", &[5; 64 * KIB]);
        let free = files.fs().statfs().blocks_free;
        let fd = create(&files, "gone", &[1; 64 * KIB]);
        let ticket = files.submit_pwrite(fd, vec![7; 96 * KIB].into(), 0).unwrap();
        files.unlink(b"gone").unwrap();
        or_opened(&key, || files.close(fd).unwrap());
        if fails {
            let block = *key.last.lock().unwrap() as usize + 4096;
            files.fs().media().poison(block..block + 64);
        }
        // After a power loss now, and at the end.
        let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
        let lost = files.fs().media().crash_point().media(Keep::Everything);
        key.set(true);
        match fails {
            true => assert_eq!(ticket.wait().unwrap_err().errno(), libc::EIO),
            false => files.fs().close().unwrap(),
        }
        let media = files.fs().media().crash_point().media(Keep::Everything);
        assert!(files.fs().statfs().blocks_free + 3 >= free, "but for a block that is bad");
        for media in [lost, media] {
            let fs = Fs::open(media, &options).unwrap();
            assert!(fs.statfs().blocks_free + 3 >= free);
            let again = Files::new(fs, Cred::root(), 0);
            assert_eq!(again.stat(b"gone").unwrap_err().errno(), libc::ENOENT);
            let other = again.open(b"other", libc::O_RDONLY, 0).unwrap();
            assert_eq!(content(&again, other), [5; 64 * KIB]);
            check(&again);
        }
    }
}

#[test]
fn a_pool_that_closes_waits_for_its_copies() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 8 * KIB]);
    let ticket = files.submit_pwrite(fd, vec![9; 32 * KIB].into(), 0).unwrap();
    let fs = files.fs().clone();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| fs.close().unwrap());
        std::thread::sleep(Duration::from_millis(5));
        key.set(true);
        closing.join().unwrap();
    });
    assert_eq!(ticket.wait().unwrap(), 32 * KIB);
    drop((ticket, files));
    let fs = Fs::open(fs.abandon().unwrap(), &OpenOptions::default()).unwrap();
    assert!(fs.open_report().was_clean);
    let files = Files::new(fs, Cred::root(), 0);
    let fd = files.open(b"file", libc::O_RDONLY, 0).unwrap();
    assert_eq!(content(&files, fd), vec![9; 32 * KIB]);
}

/// What neither the engine nor the CPU can store is taken back: the ticket says so each time, fsync once.
#[test]
fn a_copy_that_fails_leaves_the_file_as_it_was() {
    for grows in [false, true] {
        let (files, key) = files_on(SimMedia::new(vec![0; 8 << 20], Domain::Memory), None);
        let old: Vec<u8> = (0..40_000u32).map(|n| n as u8).collect();
        let fd = create(&files, "file", &old);
        let before = files.fs().statfs().blocks_free;
        let at = if grows { 36_864 } else { 4096 };
        let ticket = files.submit_pwrite(fd, vec![0xee; 16 * KIB].into(), at).unwrap();
        let block = *key.last.lock().unwrap() as usize + 4096;
        files.fs().media().poison(block..block + 64);
        key.set(true);
        assert_eq!(ticket.wait().unwrap_err().errno(), libc::EIO);
        assert_eq!(ticket.wait().unwrap_err().errno(), libc::EIO, "and again");
        assert_eq!(content(&files, fd), old, "all of the old is there, nothing of the new");
        assert_eq!(files.fsync(fd).unwrap_err().errno(), libc::EIO);
        files.fsync(fd).unwrap();
        // But for the bad block, and a segment of the log for what was said about it.
        let free = files.fs().statfs().blocks_free;
        assert!(free + 2 >= before, "{free} blocks are free of {before}");
        assert_eq!(files.pwrite(fd, &[5; 16 * KIB], 0).unwrap(), 16 * KIB, "and the file goes on");
        check(&files);
        // After a failure, too.
        let left = files.fs().media().crash_point().media(Keep::Everything);
        let options = OpenOptions { no_ticker: true, ..OpenOptions::default() };
        let again = Files::new(Fs::open(left, &options).unwrap(), Cred::root(), 0);
        let fd = again.open(b"file", libc::O_RDONLY, 0).unwrap();
        let mut wanted = old.clone();
        wanted[..16 * KIB].fill(5);
        assert_eq!(content(&again, fd), wanted);
    }
}

/// The same of a future, which gives its bytes back.
#[test]
fn a_future_whose_copy_fails_says_so() {
    let (files, key) = files_on(SimMedia::new(vec![0; 8 << 20], Domain::Memory), None);
    let fd = create(&files, "file", &[1; 64 * KIB]);
    let pending = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (files, pending) = (&files, &pending);
        let writes = scope.spawn(move || {
            block_on_and_tell(files.pwrite_async(fd, vec![2; 16 * KIB].into(), 8 * KIB as i64), pending)
        });
        while pending.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let block = *key.last.lock().unwrap() as usize + 4096;
        files.fs().media().poison(block..block + 64);
        key.set(true);
        let (bytes, written) = writes.join().unwrap();
        assert!(written.unwrap_err().errno() == libc::EIO && bytes[..] == [2; 16 * KIB]);
    });
    assert_eq!(content(&files, fd), [1; 64 * KIB]);
    assert_eq!(block_on(files.fsync_async(fd).unwrap()).0.unwrap_err().errno(), libc::EIO);
    block_on(files.fsync_async(fd).unwrap()).0.unwrap();
    check(&files);
}

/// The small write before it was durable by its record alone.
#[test]
fn a_copy_that_fails_takes_no_small_write_with_it() {
    let (files, key) = files_on(SimMedia::new(vec![0; 8 << 20], Domain::Memory), None);
    let mut wanted = vec![1; 64 * KIB];
    let fd = create(&files, "file", &wanted);
    files.fsync(fd).unwrap();
    for at in [5000, 9000] {
        wanted[at..at + 24].fill(2);
        assert_eq!(files.pwrite(fd, &[2; 24], at as i64).unwrap(), 24);
    }
    let ticket = files.submit_pwrite(fd, vec![0xee; 16 * KIB].into(), 4096).unwrap();
    let block = *key.last.lock().unwrap() as usize + 4096;
    files.fs().media().poison(block..block + 64);
    key.set(true);
    assert_eq!(ticket.wait().unwrap_err().errno(), libc::EIO);
    for keep in [Keep::Everything, Keep::Nothing] {
        let left = files.fs().media().crash_point().media(keep);
        let options = OpenOptions { no_ticker: true, ..OpenOptions::default() };
        let again = Files::new(Fs::open(left, &options).unwrap(), Cred::root(), 0);
        let fd = again.open(b"file", libc::O_RDONLY, 0).unwrap();
        assert!(content(&again, fd) == wanted, "{keep:?}");
    }
    assert!(content(&files, fd) == wanted);
    check(&files);
}

/// Its descriptor was closed meanwhile, and names another file by then.
#[test]
fn a_blocked_write_goes_to_the_file_that_its_descriptor_named() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 64 * KIB]);
    let before = files.fs().statfs().blocks_free;
    let ticket = files.submit_pwrite(fd, vec![2; 32 * KIB].into(), 0).unwrap();
    let mut write = pin!(files.pwrite_async(fd, vec![3; 16].into(), 5000));
    let mut read = pin!(files.pread_async(fd, vec![0; 16].into(), 9000));
    let mut context = Context::from_waker(Waker::noop());
    assert!(write.as_mut().poll(&mut context).is_pending() && read.as_mut().poll(&mut context).is_pending());
    files.close(fd).unwrap();
    files.unlink(b"file").unwrap();
    let other = create(&files, "other", &[9; 64 * KIB]);
    assert_eq!(other, fd, "the number is used again");
    key.set(true);
    ticket.wait().unwrap();
    let (_, written) = block_on(write).0;
    let (seen, read) = block_on(read).0;
    assert_eq!((written.unwrap(), read.unwrap(), &seen[..]), (16, 16, [2; 16].as_slice()));
    assert!(content(&files, other) == [9; 64 * KIB]);
    check(&files);
    drop(ticket);
    files.close(other).unwrap();
    files.unlink(b"other").unwrap();
    files.fs().sync().unwrap();
    assert!(files.fs().statfs().blocks_free >= before, "the file without a name went with its last call");
}

/// Who finds a file taken copies before it has it; a write is still all there or not at all, and nothing is lost.
#[test]
fn writers_of_one_file_copy_side_by_side() {
    const SLOT: usize = 32 * KIB;
    const SLOTS: usize = 6;
    for domain in [Domain::Memory, Domain::PageCache] {
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let files = Files::new(
            Fs::open(
                Fs::mkfs(Pool::memfd(POOL_BYTES, &options).unwrap(), &MkfsOptions::default()).unwrap(),
                &OpenOptions::default(),
            )
            .unwrap(),
            Cred::root(),
            0,
        );
        let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.fs().sync().unwrap();
        let free = files.fs().statfs().blocks_free;
        files.fallocate(fd, libc::FALLOC_FL_KEEP_SIZE, 0, (2 * SLOT) as i64).unwrap();
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let files = &files;
                scope.spawn(move || {
                    let mut bytes = vec![0; SLOT];
                    for round in 0..150 {
                        let slot = (thread * 5 + round * 7) % SLOTS;
                        bytes.fill((thread * 50 + round % 50) as u8);
                        // Whole pages of several sizes; the last of them behind the end of file at first.
                        let len = if round % 3 == 0 { SLOT } else { SLOT / 8 };
                        assert_eq!(files.pwrite(fd, &bytes[..len], (slot * SLOT) as i64).unwrap(), len);
                        let read = files.pread(fd, &mut bytes[..4 * KIB], (slot * SLOT) as i64).unwrap();
                        assert!(bytes[..read].iter().all(|b| *b == bytes[0] && *b >= 50), "half a write");
                    }
                });
            }
        });
        check(&files);
        files.ftruncate(fd, 0).unwrap();
        for _ in 0..3 {
            files.fs().sync().unwrap();
        }
        // But for a log that is longer now.
        let left = files.fs().statfs().blocks_free;
        assert!(left + 8 >= free, "{left} blocks are free of {free}");
        // Where there is no room ahead there may be some in what is reserved.
        let room = files.fs().statfs().blocks_free as i64 * 4096;
        let reserved = files.open(b"reserved", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.fallocate(reserved, 0, 0, room - (2 << 20)).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let files = &files;
                scope.spawn(move || {
                    for round in 0..100 {
                        let at = (thread * 100 + round) * 16 * KIB as i64;
                        assert_eq!(files.pwrite(reserved, &[7; 8 * KIB], at).unwrap(), 8 * KIB);
                        let end = at + 8 * KIB as i64;
                        assert_eq!(files.pwrite(reserved, &[8; 8 * KIB], end).unwrap(), 8 * KIB);
                    }
                });
            }
        });
        check(&files);
        // Their records verify.
        let fs = files.fs().clone();
        drop(files);
        let media = fs.abandon().unwrap();
        let again = Fs::open(media, &OpenOptions { power_lost: true, ..OpenOptions::default() }).unwrap();
        let files = Files::new(again, Cred::root(), 0);
        let fd = files.open(b"reserved", libc::O_RDONLY, 0).unwrap();
        for at in (0..400 * 16 * KIB).step_by(16 * KIB) {
            let mut bytes = [0; 16 * KIB];
            files.pread(fd, &mut bytes, at as i64).unwrap();
            assert!(bytes[..8 * KIB] == [7; 8 * KIB] && bytes[8 * KIB..] == [8; 8 * KIB], "at {at}");
        }
        check(&files);
    }
}

fn poison_words(media: &SimMedia, lanes: std::ops::Range<usize>) {
    for lane in lanes {
        let word = completion_addr(lane).0 as usize;
        media.poison(word..word + 8);
    }
}

#[test]
fn a_lane_whose_word_is_bad_is_not_used() {
    for bad in [0..1, 0..LANES - 1] {
        let media = SimMedia::new(vec![0; 8 << 20], Domain::Memory);
        let media = Fs::mkfs(media, &MkfsOptions::default()).unwrap();
        poison_words(&media, bad);
        let (files, key) = files_of(media, None);
        key.set(true);
        let fd = create(&files, "file", &[1; 64 * KIB]);
        assert_eq!(files.pwrite(fd, &[2; 32 * KIB], 0).unwrap(), 32 * KIB);
        assert_eq!(key.begun(), 1);
        // What was acknowledged is there after a power loss.
        let left = files.fs().media().crash_point().media(Keep::Nothing);
        let options = OpenOptions { no_ticker: true, ..OpenOptions::default() };
        let again = Files::new(Fs::open(left, &options).unwrap(), Cred::root(), 0);
        let fd = again.open(b"file", libc::O_RDONLY, 0).unwrap();
        assert_eq!(content(&again, fd), [vec![2; 32 * KIB], vec![1; 32 * KIB]].concat());
        check(&files);
    }
}

#[test]
fn a_word_that_cannot_be_written_acknowledges_nothing() {
    let (files, key) = files_on(SimMedia::new(vec![0; 8 << 20], Domain::Memory), None);
    key.set(true);
    let fd = create(&files, "file", &[1; 64 * KIB]);
    poison_words(files.fs().media(), 0..LANES);
    assert_eq!(files.pwrite(fd, &[2; 32 * KIB], 0).unwrap_err().errno(), libc::EIO);
    // What media hold nobody knows now: nothing is changed any more.
    assert_eq!(files.mkdir(b"dir", 0o755).unwrap_err().errno(), libc::EIO);
    let mut bytes = [0; 100];
    assert_eq!(files.pread(fd, &mut bytes, 40 * KIB as i64).unwrap(), 100);
    assert_eq!(bytes, [1; 100]);
}

#[test]
fn a_uthread_that_waits_for_a_copy_lets_others_run() {
    let (files, key) = files_on(memfd(), None);
    let files = Arc::new(files);
    let fd = create(&files, "file", &[1; 128 * KIB]);
    let runtime = Runtime::new(Options::default()).unwrap();
    let order: Arc<Mutex<Vec<&str>>> = Arc::default();
    let (own, said) = (files.clone(), order.clone());
    let writer = runtime.spawn(move || {
        // The offset's lock, the descriptor and the inode are free for others while it waits.
        let written = own.write(fd, &[2; 64 * KIB]).unwrap();
        said.lock().unwrap().push("written");
        written
    });
    let (own, said) = (files.clone(), order.clone());
    let reader = runtime.spawn(move || {
        let mut bytes = vec![0; 32 * KIB];
        own.pread(fd, &mut bytes, 0).unwrap();
        said.lock().unwrap().push("read");
        bytes
    });
    let (own, said) = (files.clone(), order.clone());
    let other = runtime.spawn(move || {
        while key.begun() == 0 {
            runtime::yield_now();
        }
        // On one worker nobody else would open the gate.
        own.pwrite(fd, &[3; 100], 100 * KIB as i64).unwrap();
        assert_eq!(own.lseek(fd, 0, libc::SEEK_CUR).unwrap(), 64 * KIB as u64);
        said.lock().unwrap().push("meanwhile");
        key.set(true);
    });
    runtime.run(1).unwrap();
    let (writer, reader, other) = (writer.unwrap(), reader.unwrap(), other.unwrap());
    assert_eq!(writer.join().unwrap(), 64 * KIB);
    other.join().unwrap();
    assert!(reader.join().unwrap().iter().all(|b| *b == 2), "it waited for what overlaps");
    assert_eq!(order.lock().unwrap()[0], "meanwhile");
    check(&files);
}

/// Does this in a uthread that waits for what is behind the gate; another one on the same worker opens it meanwhile.
fn waits_and_lets_others_run<T: Send + 'static>(
    files: &Arc<Files<Pool>>,
    key: &Key,
    change: impl FnOnce(&Files<Pool>) -> T + Send + 'static,
) -> T {
    let runtime = Runtime::new(Options::default()).unwrap();
    let opened = Arc::new(AtomicBool::new(false));
    let (own, seen) = (files.clone(), opened.clone());
    let changing = runtime.spawn(move || {
        let done = change(&own);
        assert!(seen.load(Ordering::SeqCst), "it kept the worker");
        done
    });
    let own = key.clone();
    let opening = runtime.spawn(move || {
        opened.store(true, Ordering::SeqCst);
        own.set(true);
    });
    or_opened(key, || runtime.run(1).unwrap());
    opening.unwrap().join().unwrap();
    changing.unwrap().join().unwrap()
}

/// Runs what may wait with its thread kept; so that the test fails then, and does not hang, the gate opens after a while.
fn or_opened<T>(key: &Key, run: impl FnOnce() -> T) -> T {
    let (done, waits) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if waits.recv_timeout(Duration::from_secs(20)) == Err(RecvTimeoutError::Timeout) {
                key.set(true);
            }
        });
        let ran = run();
        drop(done);
        ran
    })
}

/// What needs a file at rest: it waits, and on a single worker somebody else ends its copy.
#[test]
fn a_uthread_that_waits_for_a_file_at_rest_lets_others_run() {
    let changes: [fn(&Files<Pool>, Fd); 5] = [
        |files, fd| files.ftruncate(fd, 20 * KIB as i64).unwrap(),
        |files, _| files.truncate(b"file", 20 * KIB as i64).unwrap(),
        |files, fd| {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            files.fallocate(fd, punch, 20 * KIB as i64, 108 * KIB as i64).unwrap();
        },
        |files, fd| {
            files.fsync(fd).unwrap();
            files.ftruncate(fd, 20 * KIB as i64).unwrap();
        },
        |files, _| {
            let anew = files.open(b"file", libc::O_RDWR | libc::O_TRUNC, 0).unwrap();
            assert_eq!(files.fstat(anew).unwrap().size, 0);
            files.pwrite(anew, &[2; 20 * KIB], 0).unwrap();
        },
    ];
    for change in changes {
        let (files, key) = files_on(memfd(), None);
        let files = Arc::new(files);
        let fd = create(&files, "file", &[1; 128 * KIB]);
        let ticket = files.submit_pwrite(fd, vec![2; 64 * KIB].into(), 0).unwrap();
        waits_and_lets_others_run(&files, &key, move |files| change(files, fd));
        assert_eq!(ticket.wait().unwrap(), 64 * KIB);
        let mut all = content(&files, fd);
        all.truncate(20 * KIB);
        assert_eq!(all, [2; 20 * KIB]);
        check(&files);
    }
}

/// A pool without a free block but those that writes under way will have replaced: whoever needs some waits for them, and finds no
/// full pool; where none come free it is full.
#[test]
fn room_that_copies_keep_is_waited_for() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 256 * KIB]);
    let fill = files.open(b"fill", libc::O_CREAT | libc::O_WRONLY, 0o600).unwrap();
    // All but what one write of the file's size takes, and a few for logs.
    let room = (256 * KIB + 64 * KIB) as i64;
    let free = || files.fs().statfs().blocks_free as i64 * 4096;
    files.set_engine(fill, Some(EngineKind::Cpu)).unwrap();
    files.fallocate(fill, 0, 0, free() - room).unwrap();
    let ticket = files.submit_pwrite(fd, vec![2; 256 * KIB].into(), 0).unwrap();
    assert!(free() < 128 * KIB as i64, "{} bytes are free", free());
    std::thread::scope(|scope| {
        let files = &files;
        let other = files.open(b"other", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.set_engine(other, Some(EngineKind::Cpu)).unwrap();
        let writes = scope.spawn(move || files.pwrite(other, &[3; 200 * KIB], 0));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!writes.is_finished(), "it does not wait for what the copy will have replaced");
        key.set(true);
        assert_eq!(writes.join().unwrap().unwrap(), 200 * KIB);
        // Nothing more comes free now.
        let full = files.pwrite(other, &[4; 512 * KIB], 256 * KIB as i64).unwrap_err();
        assert_eq!(full.errno(), libc::ENOSPC);
        assert_eq!(content(files, other), [3; 200 * KIB]);
    });
    assert_eq!(ticket.wait().unwrap(), 256 * KIB);
    assert_eq!(content(&files, fd), [2; 256 * KIB]);
    check(&files);
}

/// Leaves so many bytes free.
fn fill(files: &Files<Pool>, left: usize) {
    let gap = files.open(b"gap", libc::O_CREAT | libc::O_WRONLY, 0o600).unwrap();
    files.fallocate(gap, 0, 0, left as i64).unwrap();
    let fill = files.open(b"fill", libc::O_CREAT | libc::O_WRONLY, 0o600).unwrap();
    let (mut at, mut step) = (0, 1 << 20);
    while step >= 4096 {
        match files.fallocate(fill, 0, at, step) {
            Ok(()) => at += step,
            Err(e) if e.errno() == libc::ENOSPC => step /= 2,
            Err(e) => panic!("{e}"),
        }
    }
    files.ftruncate(gap, 0).unwrap();
}

/// A pool that is full but for what a copy keeps: 256 KiB of "file", of which a write is under way. "other" is copied by the CPU.
fn full_but_for_a_copy() -> (Arc<Files<Pool>>, Key, WriteTicket<Pool>, Fd) {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 256 * KIB]);
    let other = create(&files, "other", &[]);
    files.set_engine(other, Some(EngineKind::Cpu)).unwrap();
    fill(&files, 256 * KIB);
    let ticket = files.submit_pwrite(fd, vec![2; 256 * KIB].into(), 0).unwrap();
    assert!(!ticket.poll() && key.begun() == 1);
    (Arc::new(files), key, ticket, other)
}

/// Whatever needs room that a copy keeps waits for it with nothing held.
#[test]
fn a_uthread_that_waits_for_room_lets_others_run() {
    let needs: [fn(&Files<Pool>, Fd); 6] = [
        |files, other| {
            // Also the offset's lock is free meanwhile: the next one has it.
            assert_eq!(files.write(other, &[3; 100 * KIB]).unwrap(), 100 * KIB);
            assert_eq!(files.write(other, &[3; 4 * KIB]).unwrap(), 4 * KIB);
        },
        |files, other| {
            let ticket = files.submit_pwrite(other, vec![3; 104 * KIB].into(), 0).unwrap();
            assert_eq!(ticket.wait().unwrap(), 104 * KIB);
        },
        |files, other| {
            files.fallocate(other, 0, 0, 104 * KIB as i64).unwrap();
            files.pwrite(other, &[3; 104 * KIB], 0).unwrap();
        },
        |files, other| {
            files.fsetxattr(other, b"user.large", &[7; 40_000], 0).unwrap();
            files.pwrite(other, &[3; 104 * KIB], 0).unwrap();
        },
        |files, other| {
            // Names: until a log needs more than what was kept for it.
            (0..400).for_each(|n| files.mkdir(format!("directory-{n}").as_bytes(), 0o700).unwrap());
            files.pwrite(other, &[3; 104 * KIB], 0).unwrap();
        },
        |files, other| {
            // The file is that which the descriptor named when the call began.
            let (mut of, mut tries) = (OpenFile::of(other), Tries::new());
            loop {
                // SAFETY: of a static.
                let bytes = unsafe { Lent::new(&[3; 104 * KIB]) };
                match tries.attempt(|| files.begin_pwrite(&mut of, bytes, 0)) {
                    Some(step) => break assert!(matches!(step.unwrap(), Step::Done(_))),
                    None => files.fs().wait_for_room(),
                }
                files.close(other).unwrap();
                assert_eq!(files.open(b"gap", libc::O_RDWR, 0).unwrap(), other);
            }
        },
    ];
    for (number, need) in needs.into_iter().enumerate() {
        let (files, key, ticket, other) = full_but_for_a_copy();
        waits_and_lets_others_run(&files, &key, move |files| need(files, other));
        assert_eq!(ticket.wait().unwrap(), 256 * KIB);
        let other = files.open(b"other", libc::O_RDWR, 0).unwrap();
        assert!(content(&files, other) == [3; 104 * KIB], "need {number}");
        let file = files.open(b"file", libc::O_RDWR, 0).unwrap();
        assert!(content(&files, file) == [2; 256 * KIB]);
        check(&files);
    }
}

/// Where nothing comes free the pool is full, in a uthread as on a thread, and copies that read are waited for as well.
#[test]
fn a_uthread_finds_a_full_pool_full() {
    let (files, key, ticket, other) = full_but_for_a_copy();
    let file = files.open(b"file", libc::O_RDWR, 0).unwrap();
    let full = waits_and_lets_others_run(&files, &key, move |files| {
        files.pwrite(other, &[3; 512 * KIB], 0).unwrap_err().errno()
    });
    assert_eq!(full, libc::ENOSPC);
    ticket.wait().unwrap();
    // A read keeps what is cut off under it.
    files.pwrite(other, &[3; 200 * KIB], 0).unwrap();
    key.set(false);
    let read = files.submit_pread(file, vec![0; 256 * KIB].into(), 0).unwrap();
    assert!(!read.poll());
    files.ftruncate(file, 0).unwrap();
    waits_and_lets_others_run(&files, &key, move |files| {
        assert_eq!(files.pwrite(other, &[3; 200 * KIB], 200 * KIB as i64).unwrap(), 200 * KIB);
    });
    assert!(read.into_bytes().0[..] == [2; 256 * KIB]);
    check(&files);
}

/// A future that needs room is pending, not its executor's thread; dropped it leaves nothing behind.
#[test]
fn a_future_that_waits_for_room_is_woken() {
    let (files, key, ticket, other) = full_but_for_a_copy();
    let waker = Arc::new(Nobody);
    {
        let mut dropped = Box::pin(files.pwrite_async(other, vec![9; 100 * KIB].into(), 0));
        let own = Waker::from(waker.clone());
        let poll = || dropped.as_mut().poll(&mut Context::from_waker(&own)).is_pending();
        assert!(or_opened(&key, poll), "it kept its thread");
    }
    assert_eq!(Arc::strong_count(&waker), 1, "nobody has a waker of its own");
    let pending = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (files, pending) = (&files, &pending);
        let writes = scope.spawn(move || {
            block_on_and_tell(files.pwrite_async(other, vec![3; 104 * KIB].into(), 0), pending).1.unwrap()
        });
        while pending.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        key.set(true);
        assert_eq!(writes.join().unwrap(), 104 * KIB);
    });
    ticket.wait().unwrap();
    assert!(content(&files, other) == [3; 104 * KIB]);
    check(&files);
}

/// Numbers of copies end at 2^48: the last is given, and then the lane is used no more; without any lane a write says so.
#[test]
fn a_lane_whose_numbers_are_used_up_is_left() {
    for left in [1, 0] {
        let media = Fs::mkfs(memfd(), &MkfsOptions::default()).unwrap();
        for lane in 0..LANES {
            let word = pack_completion(lane, if lane == 3 { TICKET_MAX - left } else { TICKET_MAX });
            let dirty = media.store64(completion_addr(lane), word).unwrap();
            media.fence(media.flush(dirty));
        }
        let (files, key) = files_of(media, None);
        key.set(true);
        let fd = create(&files, "file", &[1; 64 * KIB]);
        if left == 1 {
            assert_eq!(files.pwrite(fd, &[2; 32 * KIB], 0).unwrap(), 32 * KIB);
        }
        let full = files.pwrite(fd, &[3; 32 * KIB], 32 * KIB as i64).unwrap_err();
        assert_eq!(full.errno(), libc::EOVERFLOW, "{full}");
        assert_eq!(content(&files, fd), [vec![1 + left as u8; 32 * KIB], vec![1; 32 * KIB]].concat());
        // The CPU has no need of numbers.
        files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
        assert_eq!(files.pwrite(fd, &[4; 32 * KIB], 32 * KIB as i64).unwrap(), 32 * KIB);
        check(&files);
    }
}

/// Of a process that ends while copies are under way nothing is lost that was acknowledged, and nothing is half there.
#[test]
fn a_process_that_is_killed_with_copies_under_way_loses_nothing() {
    const CHILD: &str = "LODE_TEST_KILLED";
    let options = || PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    if let Some(path) = std::env::var_os(CHILD) {
        let (files, _key) = files_of(Pool::open(std::path::Path::new(&path), &options()).unwrap(), None);
        let fd = create(&files, "file", &[1; 128 * KIB]);
        // The gate stays shut: what is handed over is never copied.
        let under_way = files.submit_pwrite(fd, vec![9; 64 * KIB].into(), 0).unwrap();
        let grows = files.submit_pwrite(fd, vec![9; 64 * KIB].into(), 128 * KIB as i64).unwrap();
        files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
        create(&files, "other", &[3; 8 * KIB]);
        files.chmod(b"file", 0o600).unwrap();
        assert!(!under_way.poll() && !grows.poll());
        println!("under way");
        loop {
            std::thread::park();
        }
    }
    struct Gone(std::path::PathBuf);

    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    let path = std::env::temp_dir().join(format!("lodestone-killed-{}", std::process::id()));
    let _gone = Gone(path.clone());
    let pool = Pool::create(std::slice::from_ref(&path), Some(POOL_BYTES), &options()).unwrap();
    drop(Fs::mkfs(pool, &MkfsOptions::default()).unwrap());
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "a_process_that_is_killed_with_copies_under_way_loses_nothing"])
        .env(CHILD, &path)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let said = std::io::BufReader::new(child.stdout.take().unwrap());
    assert!(said.lines().any(|line| line.unwrap().contains("under way")), "the child ended early");
    child.kill().unwrap();
    child.wait().unwrap();
    let (files, key) = files_of(Pool::open(std::path::Path::new(&path), &options()).unwrap(), None);
    key.set(true);
    assert!(!files.fs().open_report().was_clean);
    let fd = files.open(b"file", libc::O_RDWR, 0).unwrap();
    assert_eq!(content(&files, fd), [1; 128 * KIB], "nobody was told that it was written");
    assert_eq!(files.fstat(fd).unwrap().mode & 0o777, 0o600);
    let other = files.open(b"other", libc::O_RDWR, 0).unwrap();
    assert_eq!(content(&files, other), [3; 8 * KIB]);
    check(&files);
}

/// Polls until it is ready, and sleeps in between until it is woken; how often it was not.
fn block_on<F: Future>(future: F) -> (F::Output, usize) {
    let pending = AtomicUsize::new(0);
    (block_on_and_tell(future, &pending), pending.load(Ordering::SeqCst))
}

/// The same; others see how often it was not.
fn block_on_and_tell<F: Future>(future: F, pending: &AtomicUsize) -> F::Output {
    struct Unparks(std::thread::Thread);

    impl Wake for Unparks {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unparks(std::thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => {
                pending.fetch_add(1, Ordering::SeqCst);
                std::thread::park();
            }
        }
    }
}

#[test]
fn futures_of_files_are_woken_when_their_copies_have_ended() {
    for domain in [Domain::Memory, Domain::PageCache] {
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let (files, key) = files_on(Pool::memfd(POOL_BYTES, &options).unwrap(), None);
        let fd = create(&files, "file", &[1; 64 * KIB]);
        let pending = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (files, key, pending) = (&files, &key, &pending);
            let reads = scope.spawn(move || {
                let read = files.pread_async(fd, vec![0; 40 * KIB].into(), 0);
                let (bytes, read) = block_on_and_tell(read, pending);
                assert!(read.unwrap() == 40 * KIB && bytes.iter().all(|b| *b == 1));
            });
            // It waits for its copy.
            while pending.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert!(key.begun() == 1);
            if domain == Domain::Memory {
                // A write, a read that it is in the way of, and a sync.
                let ticket = files.submit_pwrite(fd, vec![2; 16 * KIB].into(), 48 * KIB as i64).unwrap();
                let writes = scope.spawn(move || {
                    let bytes = vec![3; 16 * KIB].into();
                    let ((bytes, written), pending) =
                        block_on(files.pwrite_async(fd, bytes, 56 * KIB as i64));
                    assert!(pending > 0 && written.unwrap() == 16 * KIB && bytes[..] == [3; 16 * KIB]);
                });
                let syncs = scope.spawn(move || {
                    let (done, pending) = block_on(files.fsync_async(fd).unwrap());
                    assert!(pending > 0, "it did not wait for the write");
                    done.unwrap();
                });
                std::thread::sleep(Duration::from_millis(20));
                assert!(!reads.is_finished() && !writes.is_finished() && !syncs.is_finished());
                key.set(true);
                writes.join().unwrap();
                syncs.join().unwrap();
                ticket.wait().unwrap();
            }
            key.set(true);
        });
        // Where nothing is under way a write is ready at once; its sync is, too, unless a device has to be waited for.
        files.set_engine(fd, Some(EngineKind::Cpu)).unwrap();
        let ((bytes, written), pending) = block_on(files.pwrite_async(fd, vec![4; 5000].into(), 0));
        assert!(written.unwrap() == 5000 && pending == 0 && bytes.len() == 5000);
        block_on(files.fdatasync_async(fd).unwrap()).0.unwrap();
        let synced = files.open(b"file", libc::O_RDWR | libc::O_DSYNC | libc::O_APPEND, 0).unwrap();
        assert_eq!(block_on(files.write_async(synced, vec![5; 100].into())).0.1.unwrap(), 100);
        assert_eq!(block_on(files.read_async(synced, vec![0; 100].into())).0.1.unwrap(), 0, "at the end");
        // What the plain calls refuse is refused with the bytes.
        let (bytes, refused) = block_on(files.pwrite_async(99, vec![6; 7].into(), 0)).0;
        assert!(refused.unwrap_err().errno() == libc::EBADF && bytes[..] == [6; 7]);
        assert_eq!(
            block_on(files.pread_async(fd, vec![0; 7].into(), -1)).0.1.unwrap_err().errno(),
            libc::EINVAL
        );
        assert!(files.fsync_async(99).is_err());
        let end = if domain == Domain::Memory { 72 * KIB } else { 64 * KIB };
        assert_eq!(content(&files, fd)[end..], [5; 100]);
        check(&files);
    }
}

/// Its bytes go with it, so it waits; and leaves no waker behind that keeps anything.
#[test]
fn a_future_that_is_dropped_waits_for_its_copy() {
    let (files, key) = files_on(memfd(), None);
    let fd = create(&files, "file", &[1; 64 * KIB]);
    let waker = Arc::new(Nobody);
    let poll = |future: Pin<&mut Transferring<'_, Pool>>| {
        let waker = Waker::from(waker.clone());
        future.poll(&mut Context::from_waker(&waker)).is_pending()
    };
    std::thread::scope(|scope| {
        let mut never = Box::pin(files.pwrite_async(fd, vec![9; 32 * KIB].into(), 0));
        drop(Box::pin(files.pwrite_async(fd, vec![9; 32 * KIB].into(), 0)));
        let mut write = Box::pin(files.pwrite_async(fd, vec![2; 32 * KIB].into(), 0));
        let mut read = Box::pin(files.pread_async(fd, vec![0; 16 * KIB].into(), 48 * KIB as i64));
        assert!(poll(write.as_mut()) && poll(read.as_mut()) && key.begun() == 2);
        assert!(poll(never.as_mut()) && key.begun() == 2, "it has not begun: the write is in its way");
        drop(never);
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            key.set(true);
        });
        drop(write);
        drop(read);
    });
    assert_eq!(Arc::strong_count(&waker), 1, "nobody has a waker of theirs");
    assert_eq!(content(&files, fd), [vec![2; 32 * KIB], vec![1; 32 * KIB]].concat());
    check(&files);
}

struct Nobody;

impl Wake for Nobody {
    fn wake(self: Arc<Self>) {}
}

/// Uthreads beside threads, each with pages of its own in files that all use, by engines that copy on threads.
#[test]
fn many_of_them_on_each_engine() {
    const WRITERS: usize = 24;
    const ROUNDS: usize = 12;
    for engine in [EngineKind::Emu, EngineKind::EmuIoat, EngineKind::Delegate, EngineKind::Semaphore] {
        let (files, _) = files_on(memfd(), Some(engine));
        let files = Arc::new(files);
        let fds = [create(&files, "a", &[]), create(&files, "b", &[])];
        let files_of_tasks = &files;
        let turn = move |files: &Files<Pool>, me: usize, round: usize| {
            let len = 16 * KIB + (me * 7 + round * 13) % (12 * KIB);
            let (fd, at) = (fds[(me + round) % 2], (me * 32 * KIB) as i64);
            let bytes: Vec<u8> = (0..len).map(|n| (n * 31 + me * 7 + round) as u8).collect();
            assert_eq!(files.pwrite(fd, &bytes, at).unwrap(), len);
            let mut back = vec![0; len];
            assert_eq!(files.pread(fd, &mut back, at).unwrap(), len);
            assert!(back == bytes, "{engine}: what {me} reads in round {round} is what it wrote");
        };
        let wait = |me: usize, round: usize| async move {
            let (fd, at) = (fds[(me + round) % 2], (me * 32 * KIB) as i64);
            let bytes = vec![(me + round) as u8; 20 * KIB];
            let (bytes, written) = files_of_tasks.pwrite_async(fd, bytes.into(), at).await;
            assert_eq!(written.unwrap(), 20 * KIB);
            let (back, read) = files_of_tasks.pread_async(fd, vec![0; 20 * KIB].into(), at).await;
            assert!(read.unwrap() == 20 * KIB && back == bytes, "{engine}: task {me} in round {round}");
        };
        let runtime = Runtime::new(Options::default()).unwrap();
        let uthreads: Vec<_> = (0..WRITERS)
            .map(|me| {
                let files = files.clone();
                runtime.spawn(move || (0..ROUNDS).for_each(|round| turn(&files, me, round))).unwrap()
            })
            .collect();
        std::thread::scope(|scope| {
            let files = &files;
            for me in WRITERS..WRITERS + 2 {
                scope.spawn(move || (0..ROUNDS).for_each(|round| turn(files, me, round)));
            }
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let mut tasks: Vec<_> =
                        (WRITERS + 2..WRITERS + 10).map(|me| Box::pin(wait(me, round))).collect();
                    block_on(std::future::poll_fn(|context| {
                        tasks.retain_mut(|task| task.as_mut().poll(context).is_pending());
                        if tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
                    }));
                }
            });
            runtime.run(2).unwrap();
        });
        uthreads.into_iter().for_each(|uthread| uthread.join().unwrap());
        let moved = files.fs().mover().moved();
        assert!(moved.copies + moved.busy > 0, "{engine}: {moved:?}");
        check(&files);
    }
}
