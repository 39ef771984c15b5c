//! Waiting: who lets others run and who does not, who is woken by whom, tickets as futures on an executor of others, and
//! that nobody sleeps for ever. A test of this file that finds a defect hangs, or finds what should not have happened;
//! none of them looks at a clock.

use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use lodestone::Result;
use lodestone::media::{Addr, Domain, Media, Span, SpanOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::copies::{Copied, Copies, CopyOptions};
use lodestone::mover::engine_dsa::{Dsa, Offer};
use lodestone::mover::engine_emu::{Emulated, Model};
use lodestone::mover::engine_port::{Dram, RawTransfer, Route, Routes, Transfer};
use lodestone::mover::profile::Profile;
use lodestone::runtime::{Options, Runtime, Unparker, park, spawn, yield_now};
use lodestone::wait::{Bell, Ending, Holding, Seen, for_at_most, keeping_thread, until};

const BYTES: usize = 64 << 10;
const DURABLE: CopyOptions = CopyOptions { durable: true, crc: None, engine: None, class: None };
/// Long enough for a defect to show.
const WHILE: Duration = Duration::from_millis(20);

/// Ends when somebody says so, and rings if it has a bell that works.
#[derive(Default)]
struct Request {
    ended: AtomicBool,
    bell: Bell,
}

impl Request {
    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl Ending for Request {
    fn look(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.bell)
    }
}

/// The same, for which nobody rings.
struct Silent(Arc<Request>);

impl Ending for Silent {
    fn look(&self) -> bool {
        self.0.look()
    }
}

fn value<T>(outcome: std::thread::Result<T>) -> T {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs one uthread and what it spawns, on one worker.
fn alone<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let runtime = Runtime::new(Options::default()).unwrap();
    let handle = runtime.spawn(body).unwrap();
    runtime.run(1).unwrap();
    value(handle.join())
}

/// Nothing known, soon, and late: every rung.
fn dues() -> [Option<Instant>; 3] {
    [None, Some(Instant::now()), Some(Instant::now() + WHILE)]
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_uthread_that_holds_nothing_lets_others_run() {
    alone(|| {
        for silent in [false, true] {
            for due in dues() {
                let request = Arc::new(Request::default());
                // On the one worker: it ends nothing before the other gives that away.
                let other = request.clone();
                let ends = spawn(move || other.end()).unwrap();
                match silent {
                    false => until(&*request, due, Holding::Nothing),
                    true => until(&Silent(request), due, Holding::Nothing),
                };
                value(ends.join());
            }
        }
    });
}

/// Waits with a uthread beside it that has yet to run, while a thread ends the request; whether the uthread has run.
fn others_ran(due: Option<Instant>, holding: Holding) -> bool {
    let request = Arc::new(Request::default());
    let ran = Arc::new(AtomicBool::new(false));
    let (other, runs) = (request.clone(), ran.clone());
    let thread = std::thread::spawn(move || {
        std::thread::sleep(WHILE);
        other.end();
    });
    let beside = spawn(move || runs.store(true, Ordering::SeqCst)).unwrap();
    until(&*request, due, holding);
    let found = ran.load(Ordering::SeqCst);
    value(beside.join());
    thread.join().unwrap();
    found
}

#[test]
#[cfg_attr(miri, ignore)]
fn one_that_holds_something_keeps_its_worker() {
    alone(|| {
        for due in dues() {
            assert!(!others_ran(due, Holding::Something), "{due:?}");
            assert!(others_ran(due, Holding::Nothing), "{due:?}");
        }
    });
    // So does one whose caller does.
    alone(|| {
        assert!(!keeping_thread(|| keeping_thread(|| others_ran(None, Holding::Nothing))));
        assert!(others_ran(None, Holding::Nothing), "it keeps it no more");
    });
    // One that moves may have stores of its thread, whatever it says.
    let runtime = Runtime::new(Options::default()).unwrap();
    // SAFETY: it holds nothing of its thread where it waits.
    let handle = unsafe { runtime.spawn_movable(|| others_ran(None, Holding::Nothing)) }.unwrap();
    runtime.run(1).unwrap();
    assert!(!value(handle.join()));
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_wake_up_that_was_for_something_else_is_not_lost() {
    alone(|| {
        let request = Arc::new(Request::default());
        let (other, unparker) = (request.clone(), Unparker::current());
        let ends = spawn(move || {
            unparker.unpark();
            (0..10).for_each(|_| yield_now());
            other.end();
        })
        .unwrap();
        until(&*request, None, Holding::Nothing);
        // It was unparked meanwhile: this does not wait.
        park();
        value(ends.join());
    });
    // A thread's token is its own.
    let request = Arc::new(Request::default());
    let other = request.clone();
    let ends = std::thread::spawn(move || {
        std::thread::sleep(WHILE);
        other.end();
    });
    std::thread::current().unpark();
    assert_eq!(until(&*request, None, Holding::Nothing), Seen::AfterNap);
    std::thread::park();
    ends.join().unwrap();
}

#[test]
fn a_bell_that_is_broken_keeps_nobody_for_ever() {
    let request = Arc::new(Request::default());
    let other = request.clone();
    let ends = std::thread::spawn(move || {
        std::thread::sleep(WHILE);
        // Its engine is gone, and rings no more.
        other.ended.store(true, Ordering::Release);
    });
    until(&*request, None, Holding::Something);
    ends.join().unwrap();
    assert_eq!(until(&*request, None, Holding::Something), Seen::AtOnce);
}

#[test]
fn what_never_ends_is_waited_for_as_long_as_asked() {
    let never = Arc::new(Request::default());
    let begun = Instant::now();
    assert!(
        !for_at_most(&*never, WHILE, Holding::Something)
            && !for_at_most(&Silent(never), WHILE, Holding::Nothing)
    );
    assert!(begun.elapsed() >= 2 * WHILE);
}

fn copies_of(kind: EngineKind, domain: Domain) -> Arc<Copies> {
    let options = SpanOptions { assume: Some(domain), ..SpanOptions::default() };
    let profile = Profile::default().handing_over_from(4 << 10);
    Arc::new(Copies::new(Span::memfd(4 << 20, &options).unwrap(), kind, profile))
}

/// A device that rings for nobody, and takes copies of any alignment.
fn with_device(model: Model) -> Arc<Copies> {
    let copies = copies_of(EngineKind::Cpu, Domain::Memory);
    let model = Model { offer: Offer { routes: Routes::INTO_CACHES, ..model.offer }, ..model };
    let limits = Profile::default().handing_over_from(4 << 10).emu;
    copies.mover().give(Box::new(Dsa::new(Emulated::new(model))), limits);
    copies
}

fn suspend(copies: &Copies) {
    copies.mover().engine(copies.mover().kind()).unwrap().suspend(0);
}

fn resume(copies: &Copies) {
    copies.mover().engine(copies.mover().kind()).unwrap().resume(0);
}

/// One engine that rings, and one that does not; both rest.
fn resting() -> [Arc<Copies>; 2] {
    let both = [copies_of(EngineKind::Delegate, Domain::Memory), with_device(Model::default())];
    both.iter().for_each(|copies| suspend(copies));
    both
}

fn holds(copies: &Copies, at: u64, byte: u8) -> bool {
    let mut found = vec![0; BYTES];
    copies.media().read(Addr(at), &mut found).unwrap();
    found.iter().all(|found| *found == byte)
}

#[test]
#[cfg_attr(miri, ignore)]
fn uthreads_let_others_run_while_engines_copy() {
    for copies in resting() {
        let calls: [fn(&Copies) -> Result<Copied>; 4] = [
            |copies| copies.submit_to_media(Addr(0), vec![1; BYTES], &DURABLE).wait().1,
            |copies| copies.to_media(Addr(0), &vec![2; BYTES], &DURABLE),
            |copies| copies.from_media(Addr(0), &mut vec![0; BYTES], &DURABLE),
            |copies| {
                let bytes = vec![4; BYTES];
                copies.vectored(&mut [Transfer::to_media(Addr(0), &bytes)], &DURABLE)
            },
        ];
        for call in calls {
            let runs = copies.clone();
            suspend(&copies);
            alone(move || {
                let other = runs.clone();
                // The engine rests until the other uthread has had the only worker.
                let wakes = spawn(move || resume(&other)).unwrap();
                assert_eq!(call(&runs).unwrap().bytes, BYTES as u64);
                value(wakes.join());
            });
        }
        assert!(holds(&copies, 0, 4));
    }
}

/// Runs a future on this thread, as whoever knows nothing of Lodestone would.
fn block_on<F: IntoFuture>(future: F) -> F::Output {
    struct Parked(std::thread::Thread);

    impl Wake for Parked {
        fn wake(self: Arc<Parked>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Parked(std::thread::current())));
    let mut future = pin!(future.into_future());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn tickets_complete_on_an_executor_of_others() {
    for copies in resting() {
        let other = copies.clone();
        let resumes = std::thread::spawn(move || {
            std::thread::sleep(WHILE);
            resume(&other);
        });
        let tickets: Vec<_> = (0..20u64)
            .map(|n| copies.submit_to_media(Addr(n << 16), vec![n as u8; BYTES], &DURABLE))
            .collect();
        let sum = block_on(async {
            let mut sum = 0;
            for ticket in tickets {
                let (buffer, copied) = ticket.await;
                assert_eq!((buffer.len(), copied?.bytes), (BYTES, BYTES as u64));
                sum += buffer[0] as usize;
            }
            Ok::<usize, lodestone::Error>(sum)
        });
        assert_eq!(sum.unwrap(), (0..20).sum::<usize>());
        resumes.join().unwrap();
        assert!((0..20).all(|n| holds(&copies, n << 16, n as u8)));
        // What is done at once, and what is wrong with a request.
        let (_, none) = block_on(copies.submit_to_media(Addr(0), Vec::new(), &DURABLE));
        assert_eq!(none.unwrap().bytes, 0);
        let (_, outside) = block_on(copies.submit_to_media(Addr(1 << 40), vec![0; BYTES], &DURABLE));
        assert_eq!(outside.unwrap_err().errno(), libc::EINVAL);
    }
}

/// Where a sync makes it durable the future waits for that, too.
#[test]
#[cfg_attr(miri, ignore)]
fn a_future_of_an_ordinary_file_is_synced() {
    for kind in [EngineKind::Cpu, EngineKind::Delegate] {
        let copies = copies_of(kind, Domain::PageCache);
        let (_, copied) = block_on(copies.submit_to_media(Addr(0), vec![5; BYTES], &DURABLE));
        assert_eq!(copied.unwrap().bytes, BYTES as u64);
        assert!(holds(&copies, 0, 5));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn several_tasks_and_threads_wait_for_one_copy() {
    for copies in resting() {
        let bytes = vec![9; BYTES];
        let part =
            RawTransfer { at: Addr(0), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: BYTES };
        // SAFETY: the threads below wait for it, and `bytes` outlives them.
        let ticket = unsafe { copies.submit_raw(&[part], &DURABLE) }.unwrap();
        std::thread::scope(|scope| {
            let asks = (0..3).map(|_| ticket.clone()).map(|ticket| scope.spawn(|| block_on(ticket)));
            let waits = (0..3).map(|_| scope.spawn(|| ticket.wait()));
            let all: Vec<_> = asks.chain(waits).collect();
            std::thread::sleep(WHILE);
            assert!(!all.iter().any(|waits| waits.is_finished()) && !ticket.poll());
            resume(&copies);
            assert!(all.into_iter().all(|waits| waits.join().unwrap().unwrap().bytes == BYTES as u64));
        });
        assert!(ticket.poll() && holds(&copies, 0, 9));
    }
}

/// Counts, and does nothing.
#[derive(Default)]
struct Counted(AtomicUsize);

impl Wake for Counted {
    fn wake(self: Arc<Counted>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn futures_that_are_dropped_leave_nothing_behind() {
    for copies in resting() {
        let bytes = vec![3; BYTES];
        let part =
            RawTransfer { at: Addr(0), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: BYTES };
        // SAFETY: it is waited for below, and `bytes` outlives that.
        let ticket = unsafe { copies.submit_raw(&[part], &DURABLE) }.unwrap();
        let counted = Arc::new(Counted::default());
        let waker = Waker::from(counted.clone());
        for _ in 0..100 {
            let mut future = ticket.clone().into_future();
            // Looked at often: it is one task all the same.
            for _ in 0..3 {
                let polled = Pin::new(&mut future).poll(&mut Context::from_waker(&waker));
                assert!(polled.is_pending(), "the engine rests");
            }
            drop(future);
        }
        drop(waker);
        // An alarm that just goes off has the last one for a moment.
        while Arc::strong_count(&counted) > 1 {
            yield_now();
        }
        let woken = counted.0.load(Ordering::SeqCst);
        resume(&copies);
        assert_eq!(ticket.wait().unwrap().bytes, BYTES as u64);
        assert_eq!(counted.0.load(Ordering::SeqCst), woken, "nobody was there to be woken");
        assert!(holds(&copies, 0, 3));
        // One that owns its buffer waits for the copy.
        suspend(&copies);
        let mut future = copies.submit_to_media(Addr(0), vec![7; BYTES], &DURABLE).into_future();
        let waker = Waker::from(counted.clone());
        assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
        std::thread::scope(|scope| {
            let drops = scope.spawn(move || drop(future));
            std::thread::sleep(WHILE);
            assert!(!drops.is_finished(), "the engine may still read the buffer");
            resume(&copies);
            drops.join().unwrap();
        });
        assert!(holds(&copies, 0, 7));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn an_engine_that_vanishes_keeps_nobody_for_ever() {
    // It takes two descriptors; with the third it is gone, and what it had fails.
    let copies = with_device(Model { vanishes_after: Some(2), ..Model::default() });
    suspend(&copies);
    let [first, second] =
        [1u8, 2].map(|n| copies.submit_to_media(Addr(u64::from(n) << 16), vec![n; BYTES], &DURABLE));
    std::thread::scope(|scope| {
        let waits = scope.spawn(move || first.wait().1.unwrap().bytes);
        let asks = scope.spawn(move || block_on(second).1.unwrap().bytes);
        std::thread::sleep(WHILE);
        assert!(!waits.is_finished() && !asks.is_finished());
        copies.to_media(Addr(3 << 16), &[3; BYTES], &DURABLE).unwrap();
        assert_eq!((waits.join().unwrap(), asks.join().unwrap()), (BYTES as u64, BYTES as u64));
    });
    assert!((1..=3).all(|n| holds(&copies, n << 16, n as u8)), "the CPU did it");
}
