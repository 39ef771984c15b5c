//! The account of reads and writes: every way of writing is in it with all its phases, and who waits for an engine waits.

use std::sync::Arc;
use std::time::Duration;

use lodestone::account::{Op, Phase, Times};
use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, Node, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::EngineKind;

fn make(domain: Domain) -> (Arc<Fs<Pool>>, Node) {
    let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
    let pool = Fs::mkfs(Pool::memfd(64 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(pool, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap();
    let ino = fs.create(&Cred::root(), Ino::ROOT, b"file", 0o644, 0, 0).unwrap().0.ino;
    let node = fs.node(ino).unwrap();
    fs.ledger().watch_one_in(1);
    (fs, node)
}

fn all_phases_of(times: &Times) {
    for phase in Phase::ALL {
        assert!(times.ns(phase) > 0, "{}: {times:?}", phase.name());
    }
    assert_eq!(Phase::ALL.iter().map(|phase| times.ns(*phase)).sum::<u64>(), times.total_ns());
}

/// On a thread of its own, which has let nothing pass yet.
fn on_a_new_thread(run: impl FnOnce() + Send + 'static) {
    std::thread::spawn(run).join().unwrap();
}

#[test]
fn each_way_of_writing_has_all_its_phases() {
    for domain in [Domain::Memory, Domain::PageCache] {
        on_a_new_thread(move || {
            let (fs, node) = make(domain);
            let cred = Cred::root();
            // Appended, copied on write with one fence and with two, by redo record.
            for (offset, bytes) in [(0, 64 << 10), (4096, 4096), (0, 64 << 10), (100, 64)] {
                let before = fs.times(Op::Write);
                for _ in 0..20 {
                    fs.write_at(&cred, &node, offset, &vec![1; bytes], false).unwrap();
                }
                let times = fs.times(Op::Write).since(&before);
                assert_eq!((times.operations, times.bytes), (20, 20 * bytes as u64), "{offset} {bytes}");
                all_phases_of(&times);
            }
            let before = fs.times(Op::Write);
            let mut back = vec![0; 10_000];
            (0..20).for_each(|_| assert_eq!(fs.read_at(&node, 3, &mut back).unwrap(), back.len()));
            let times = fs.times(Op::Read);
            assert_eq!((times.operations, times.bytes), (20, 200_000));
            all_phases_of(&times);
            assert_eq!(fs.times(Op::Write).operations, before.operations, "reads are no writes");
            // What fails has taken its time, too.
            fs.write_at(&cred, &node, u64::MAX - 1, b"beyond", false).unwrap_err();
            assert_eq!(fs.times(Op::Write).since(&before).operations, 1);
        });
    }
}

#[test]
fn waiting_for_an_engine_is_waiting() {
    for (kind, op) in [
        (EngineKind::Delegate, Op::Write),
        (EngineKind::Delegate, Op::Read),
        (EngineKind::Semaphore, Op::Write),
    ] {
        on_a_new_thread(move || {
            const REST: Duration = Duration::from_millis(30);
            let (fs, node) = make(Domain::Memory);
            let mut bytes = vec![3; 256 << 10];
            fs.write_at(&Cred::root(), &node, 0, &bytes, false).unwrap();
            node.set_engine(Some(kind));
            fs.mover().engine(kind).unwrap().suspend(0);
            let resume = std::thread::spawn({
                let fs = fs.clone();
                move || {
                    std::thread::sleep(REST);
                    fs.mover().engine(kind).unwrap().resume(0);
                }
            });
            let before = fs.times(op);
            match op {
                Op::Write => drop(fs.write_at(&Cred::root(), &node, 0, &bytes, false).unwrap()),
                Op::Read => assert_eq!(fs.read_at(&node, 0, &mut bytes).unwrap(), bytes.len()),
            }
            resume.join().unwrap();
            let times = fs.times(op).since(&before);
            assert_eq!(times.operations, 1);
            assert!(times.ns(Phase::Wait) >= REST.as_nanos() as u64 / 2, "{kind} {op:?}: {times:?}");
        });
    }
}
