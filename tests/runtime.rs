//! Uthreads: results and panics, waiting of every kind, where they run, and what becomes of those that run off their
//! stack.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Addr, Dirty, Domain, Durable, Fault, Flushed, Media, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::copies::{Copies, CopyOptions};
use lodestone::mover::engine_port::{Dram, RawTransfer, Route};
use lodestone::mover::profile::Profile;
use lodestone::runtime::{
    self, Condvar, JoinHandle, Mutex, Options, Outcome, Pending, Poller, Receiver, Runtime, TryRecv, TrySend,
    Unparker, bounded, park, park_timeout, sleep, spawn, yield_now,
};

fn runtime() -> Runtime {
    Runtime::new(Options::default()).unwrap()
}

/// Runs one uthread to its end, and all that it spawns.
fn run<T: Send + 'static>(workers: usize, body: impl FnOnce() -> T + Send + 'static) -> T {
    let runtime = runtime();
    let handle = runtime.spawn(body).unwrap();
    runtime.run(workers).unwrap();
    value(handle.join())
}

fn value<T>(outcome: Outcome<T>) -> T {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn here() -> ThreadId {
    std::thread::current().id()
}

#[test]
fn every_uthread_runs_once_and_gives_its_value() {
    for workers in [1, 2, 4] {
        let ran = Arc::new(AtomicUsize::new(0));
        let counted = ran.clone();
        let sum: u64 = run(workers, move || {
            let spawned = (0..5000u64).map(|n| {
                let ran = counted.clone();
                spawn(move || {
                    for _ in 0..n % 5 {
                        yield_now();
                    }
                    ran.fetch_add(1, Ordering::Relaxed);
                    n
                })
                .unwrap()
            });
            let all: Vec<JoinHandle<u64>> = spawned.collect();
            all.into_iter().map(|handle| value(handle.join())).sum()
        });
        assert_eq!((sum, ran.load(Ordering::Relaxed)), (5000 * 4999 / 2, 5000), "{workers} workers");
    }
}

#[test]
fn a_runtime_runs_again_and_counts() {
    let runtime = runtime();
    for round in 1..=3 {
        let handles: Vec<_> = (0..10).map(|_| runtime.spawn(yield_now).unwrap()).collect();
        assert!(handles.iter().all(|handle| !handle.is_finished()));
        runtime.run(2).unwrap();
        assert!(handles.iter().all(JoinHandle::is_finished));
        let stats = runtime.stats();
        assert_eq!((stats.live, stats.spawned), (0, 10 * round));
        assert_eq!(stats.slices, 2 * 10 * round, "each yields once");
    }
}

#[test]
fn a_panic_is_the_result_of_the_join() {
    let others = run(2, || {
        let bad = spawn(|| -> u32 { panic!("as the test wants it") }).unwrap();
        let good = spawn(|| 7).unwrap();
        let panic = bad.join().unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"as the test wants it"));
        value(good.join())
    });
    assert_eq!(others, 7);
}

#[test]
fn whoever_joins_itself_is_told() {
    let itself = Arc::new(Mutex::new(None::<JoinHandle<()>>));
    let runtime = runtime();
    let own = itself.clone();
    let handle = runtime.spawn(move || {
        let handle = own.lock().take().unwrap();
        assert!(handle.is_own());
        value(handle.join());
    });
    *itself.lock() = handle.ok();
    let other = runtime.spawn(move || itself.lock().is_none()).unwrap();
    assert!(!other.is_own());
    runtime.run(1).unwrap();
    assert!(value(other.join()));
}

#[test]
fn a_result_that_panics_when_nobody_wants_it_harms_nobody() {
    struct Grenade;
    impl Drop for Grenade {
        fn drop(&mut self) {
            panic!("as the test wants it");
        }
    }
    let after = run(1, || {
        drop(spawn(|| Grenade).unwrap());
        // It has ended when the next one has.
        value(spawn(|| 3).unwrap().join())
    });
    assert_eq!(after, 3);
}

#[test]
fn threads_join_uthreads() {
    let runtime = runtime();
    let go = Arc::new(AtomicBool::new(false));
    let wait = go.clone();
    let handle = runtime
        .spawn(move || {
            while !wait.load(Ordering::Acquire) {
                yield_now();
            }
            "done"
        })
        .unwrap();
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| value(handle.join()));
        scope.spawn(|| runtime.run(1).unwrap());
        go.store(true, Ordering::Release);
        assert_eq!(joined.join().unwrap(), "done");
    });
}

#[test]
fn what_never_ran_is_told_to_who_waits() {
    let runtime = runtime();
    let handle = runtime.spawn(|| 1).unwrap();
    drop(runtime);
    let message = handle.join().unwrap_err();
    assert!(message.downcast_ref::<&str>().unwrap().contains("before this uthread ran"));
}

#[test]
fn what_has_begun_stays_on_its_thread() {
    let moved = run(4, || {
        let all: Vec<_> = (0..200)
            .map(|n| {
                spawn(move || {
                    let begun = here();
                    let mut moved = 0;
                    for step in 0..50 {
                        if (n + step) % 7 == 0 {
                            sleep(Duration::from_micros(20));
                        } else {
                            yield_now();
                        }
                        moved += (here() != begun) as u32;
                    }
                    moved
                })
                .unwrap()
            })
            .collect();
        all.into_iter().map(|handle| value(handle.join())).sum::<u32>()
    });
    assert_eq!(moved, 0);
}

#[test]
fn movable_ones_are_stolen_where_they_wait() {
    let runtime = Arc::new(runtime());
    let movable = runtime.clone();
    let handle = runtime
        .spawn(move || {
            let moved = Arc::new(AtomicBool::new(false));
            let begun = Instant::now();
            let goes_on = move || begun.elapsed() < Duration::from_secs(60);
            while !moved.load(Ordering::Relaxed) && goes_on() {
                let home = here();
                let all: Vec<_> = (0..8)
                    .map(|_| {
                        let moved = moved.clone();
                        let body = move || {
                            // What begins elsewhere ends there: a worker with some of its own takes no others. So does
                            // what was left alone here after a while, which nobody wakes another worker for.
                            for _ in 0..10_000 {
                                if here() != home || moved.load(Ordering::Relaxed) || !goes_on() {
                                    break;
                                }
                                yield_now();
                                moved.fetch_or(here() != home, Ordering::Relaxed);
                            }
                        };
                        // SAFETY: it holds a time and the name of a thread, which belong to no thread.
                        unsafe { movable.spawn_movable(body) }.unwrap()
                    })
                    .collect();
                all.into_iter().for_each(|handle| value(handle.join()));
            }
            moved.load(Ordering::Relaxed)
        })
        .unwrap();
    runtime.run(2).unwrap();
    assert!(value(handle.join()));
}

#[test]
fn a_movable_one_leaves_a_worker_that_has_others() {
    let runtime = Arc::new(runtime());
    let movable = runtime.clone();
    let body = move || {
        let begun = Instant::now();
        let goes_on = move || begun.elapsed() < Duration::from_secs(60);
        let home = here();
        let mut moved = false;
        while !moved && goes_on() {
            let body = move || {
                // Long enough for the other worker to wake up for it, find nothing, and sleep again.
                let alone = Instant::now();
                while here() == home && alone.elapsed() < Duration::from_millis(5) {}
                let began_here = here() == home;
                while here() == home && goes_on() {
                    yield_now();
                }
                began_here && here() != home
            };
            // SAFETY: it holds times and the name of a thread, which belong to no thread.
            let handle = unsafe { movable.spawn_movable(body) }.unwrap();
            // One that stays here is queued beside it.
            while !handle.is_finished() {
                yield_now();
            }
            moved = value(handle.join());
        }
        moved
    };
    let handle = runtime.spawn(body).unwrap();
    runtime.run(2).unwrap();
    assert!(value(handle.join()));
}

#[test]
fn idle_workers_take_what_has_not_begun() {
    // The first blocks its worker until another has run the second: alone it would wait for ever.
    let ran = run(2, || {
        let ran = Arc::new(AtomicBool::new(false));
        let other = ran.clone();
        let second = spawn(move || other.store(true, Ordering::Release)).unwrap();
        let begun = Instant::now();
        while !ran.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        let ran = ran.load(Ordering::Acquire);
        value(second.join());
        ran
    });
    assert!(ran);
}

#[test]
fn a_mutex_admits_one_at_a_time() {
    for workers in [1, 3] {
        let counter = Arc::new(Mutex::new(0u64));
        let runtime = runtime();
        for _ in 0..20 {
            let counter = counter.clone();
            let body = move || {
                for step in 0..200 {
                    let mut value = counter.lock();
                    let before = *value;
                    if step % 10 == 0 {
                        yield_now();
                    }
                    *value = before + 1;
                }
            };
            drop(runtime.spawn(body).unwrap());
        }
        std::thread::scope(|scope| {
            // Threads wait for the same lock.
            for _ in 0..2 {
                scope.spawn(|| (0..1000).for_each(|_| *counter.lock() += 1));
            }
            runtime.run(workers).unwrap();
        });
        assert_eq!(*counter.lock(), 20 * 200 + 2 * 1000);
    }
}

#[test]
fn a_condition_is_waited_for_and_notified() {
    run(2, || {
        let turn = Arc::new((Mutex::new(0), Condvar::new()));
        let players: Vec<_> = (0..4)
            .map(|me| {
                let turn = turn.clone();
                spawn(move || {
                    for round in 0..100 {
                        let mut now = turn.0.lock();
                        while *now != round * 4 + me {
                            turn.1.wait(&mut now);
                        }
                        *now += 1;
                        turn.1.notify_all();
                    }
                })
                .unwrap()
            })
            .collect();
        players.into_iter().for_each(|player| value(player.join()));
        assert_eq!(*turn.0.lock(), 400);
    });
}

#[test]
fn one_notification_wakes_one_that_still_waits() {
    run(1, || {
        let pair = Arc::new((Mutex::new(0), Condvar::new()));
        let gave_up = pair.1.wait_for(&mut pair.0.lock(), Duration::from_millis(1));
        assert!(!gave_up, "nobody notified");
        let woken: Vec<_> = (0..3)
            .map(|_| {
                let pair = pair.clone();
                spawn(move || {
                    let mut permits = pair.0.lock();
                    while *permits == 0 {
                        pair.1.wait(&mut permits);
                    }
                    *permits -= 1;
                })
                .unwrap()
            })
            .collect();
        yield_now();
        for _ in 0..3 {
            *pair.0.lock() += 1;
            pair.1.notify_one();
            yield_now();
        }
        woken.into_iter().for_each(|waiter| value(waiter.join()));
    });
}

#[test]
fn channels_carry_everything_once() {
    for workers in [1, 3] {
        let (sum, count) = run(workers, || {
            let (send, receive) = bounded(3);
            let senders: Vec<_> = (0..5u64)
                .map(|part| {
                    let send = send.clone();
                    spawn(move || (0..300).for_each(|n| send.send(part * 300 + n).unwrap())).unwrap()
                })
                .collect();
            drop(send);
            let receivers: Vec<_> = (0..3)
                .map(|_| {
                    let receive = receive.clone();
                    let body = move || std::iter::from_fn(|| receive.recv().ok()).collect::<Vec<u64>>();
                    spawn(body).unwrap()
                })
                .collect();
            senders.into_iter().for_each(|sender| value(sender.join()));
            let got: Vec<u64> = receivers.into_iter().flat_map(|receiver| value(receiver.join())).collect();
            (got.iter().sum::<u64>(), got.len())
        });
        assert_eq!((sum, count), (1500 * 1499 / 2, 1500));
    }
}

#[test]
fn a_channel_says_full_empty_and_closed() {
    let (send, receive) = bounded(1);
    assert_eq!(receive.try_recv(), Err(TryRecv::Empty));
    assert_eq!((send.try_send(1), send.try_send(2)), (Ok(()), Err(TrySend::Full(2))));
    assert_eq!(receive.recv(), Ok(1));
    drop(send);
    assert_eq!(receive.try_recv(), Err(TryRecv::Closed));
    let (send, receive) = bounded(1);
    drop(receive);
    assert_eq!((send.try_send(1), send.send(2).unwrap_err().0), (Err(TrySend::Closed(1)), 2));
    // A sender that waits for room is told, too.
    run(1, || {
        let (send, receive) = bounded(1);
        send.send(1).unwrap();
        let waiting = spawn(move || send.send(2).is_err()).unwrap();
        yield_now();
        drop(receive);
        assert!(value(waiting.join()));
    });
}

/// On a worker that keeps to something else meanwhile; the others have slept since before the alarm was set.
#[test]
fn a_movable_one_is_woken_in_time_by_whoever_sleeps() {
    const AFTER: Duration = Duration::from_millis(100);
    const BUSY: Duration = Duration::from_secs(2);
    let woken = |workers, takes_one| {
        let runtime = Arc::new(runtime());
        let begins = Arc::new(AtomicBool::new(false));
        for _ in 1..workers {
            let begins = begins.clone();
            // Keeps its worker, so that what follows begins on another, all of it on the same one.
            let keeps = move || {
                while !begins.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            runtime.spawn(keeps).unwrap();
        }
        let sleeps = move || {
            let parked = Arc::new(Mutex::new(None));
            let keeper = {
                let parked = parked.clone();
                spawn(move || {
                    *parked.lock() = Some(Unparker::current());
                    park();
                    if takes_one {
                        drop(spawn(|| std::thread::sleep(BUSY)).unwrap());
                    }
                    std::thread::sleep(BUSY);
                })
            };
            while parked.lock().is_none() {
                yield_now();
            }
            begins.store(true, Ordering::Release);
            // Until the other workers have nothing to do, and sleep.
            std::thread::sleep(AFTER);
            let home = here();
            parked.lock().take().expect("it parks").unpark();
            let begun = Instant::now();
            sleep(AFTER);
            let took = begun.elapsed();
            drop(keeper.unwrap());
            (took, here() != home)
        };
        // SAFETY: where it waits it holds times, handles and the name of a thread, which belong to no thread.
        let handle = unsafe { runtime.spawn_movable(sleeps) }.unwrap();
        runtime.run(workers).unwrap();
        let (took, moved) = value(handle.join());
        assert!(took >= AFTER && took < BUSY / 4 * 3, "{workers} workers, {takes_one}: woken after {took:?}");
        assert!(moved, "its worker is busy");
    };
    std::thread::scope(|scope| {
        // Where two sleep one may take to something else, too, after it has heard of the alarm.
        for (workers, takes_one) in [(2, false), (3, false), (3, true)] {
            scope.spawn(move || woken(workers, takes_one));
        }
    });
}

#[test]
fn sleepers_wake_in_the_order_of_their_time() {
    let order = run(1, || {
        let order = Arc::new(Mutex::new(Vec::new()));
        let sleepers: Vec<_> = [30u64, 10, 20, 0]
            .into_iter()
            .map(|ms| {
                let order = order.clone();
                spawn(move || {
                    let begun = Instant::now();
                    sleep(Duration::from_millis(ms));
                    assert!(begun.elapsed() >= Duration::from_millis(ms));
                    order.lock().push(ms);
                })
                .unwrap()
            })
            .collect();
        sleepers.into_iter().for_each(|sleeper| value(sleeper.join()));
        std::mem::take(&mut *order.lock())
    });
    assert_eq!(order, [0, 10, 20, 30]);
}

#[test]
fn a_park_ends_by_an_unpark_before_or_after_or_by_time() {
    run(2, || {
        Unparker::current().unpark();
        park();
        let woken = Arc::new(AtomicBool::new(false));
        let (flag, me) = (woken.clone(), Unparker::current());
        let other = spawn(move || {
            flag.store(true, Ordering::Release);
            me.unpark();
        })
        .unwrap();
        while !woken.load(Ordering::Acquire) {
            park();
        }
        value(other.join());
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(5) {
            park_timeout(Duration::from_millis(5));
        }
    });
}

/// Unparks the caller while it waits, and ends that wait a while later; the caller parks afterwards.
fn unparked_during(wait: impl FnOnce(Receiver<()>)) {
    const WHILE: Duration = Duration::from_millis(10);
    let (me, (send, receive)) = (Unparker::current(), bounded(1));
    let beside = std::thread::spawn(move || {
        std::thread::sleep(WHILE);
        me.unpark();
        std::thread::sleep(WHILE);
        // Who slept has not received.
        let _ = send.send(());
    });
    wait(receive);
    let begun = Instant::now();
    park_timeout(Duration::from_secs(60));
    assert!(begun.elapsed() < Duration::from_secs(30), "it was unparked before");
    beside.join().unwrap();
}

fn is_unparked_whatever_it_waits_for() {
    unparked_during(|_| sleep(Duration::from_millis(30)));
    unparked_during(|receive| receive.recv().unwrap());
    unparked_during(|receive| {
        let lock = Arc::new(Mutex::new(()));
        let other = lock.clone();
        let holds = std::thread::spawn(move || {
            let _inside = other.lock();
            receive.recv().unwrap();
        });
        while !holds.is_finished() && lock.try_lock().is_some() {
            yield_now();
        }
        drop(lock.lock());
        holds.join().unwrap();
    });
    for at_most in [Duration::from_secs(60), Duration::MAX] {
        unparked_during(|receive| {
            let shared = Arc::new((Mutex::new(()), Condvar::new()));
            let other = shared.clone();
            let mut inside = shared.0.lock();
            let notifies = std::thread::spawn(move || {
                receive.recv().unwrap();
                drop(other.0.lock());
                other.1.notify_one();
            });
            assert!(shared.1.wait_for(&mut inside, at_most));
            drop(inside);
            notifies.join().unwrap();
        });
    }
}

#[test]
fn an_unpark_is_for_the_programs_own_park() {
    run(1, || {
        is_unparked_whatever_it_waits_for();
        unparked_during(|receive| value(spawn(move || receive.recv().unwrap()).unwrap().join()));
    });
    is_unparked_whatever_it_waits_for();
    let runtime = Arc::new(runtime());
    unparked_during(|receive| {
        let handle = runtime.spawn(move || receive.recv().unwrap()).unwrap();
        let runs = std::thread::spawn(move || runtime.run(1).unwrap());
        value(handle.join());
        runs.join().unwrap();
    });
    // The thread that runs uthreads, too, while they wait and while it waits for its other workers to end.
    for workers in [1, 2] {
        let runtime = self::runtime();
        unparked_during(|receive| {
            let handle = runtime.spawn(move || receive.recv().unwrap()).unwrap();
            runtime.run(workers).unwrap();
            value(handle.join());
        });
    }
}

#[test]
fn threads_wake_uthreads_of_sleeping_workers() {
    for _ in 0..50 {
        let runtime = runtime();
        let (send, receive) = bounded(1);
        let got = runtime.spawn(move || (0..20).map(|_| receive.recv().unwrap()).sum::<u32>()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=20).for_each(|n| send.send(n).unwrap()));
            runtime.run(2).unwrap();
        });
        assert_eq!(value(got.join()), 210);
    }
}

/// Each is joined before the next is spawned, so that a run may end at any moment of it.
#[test]
fn threads_spawn_beside_the_end_of_a_run() {
    fn nested() -> u32 {
        let home = here();
        let seven = value(spawn(|| 7).unwrap().join());
        assert_eq!(here(), home, "it has begun, and moved");
        seven
    }
    for (spawners, runners, workers) in [(1, 1, 2), (2, 2, 4)] {
        let runtime = runtime();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..runners {
                scope.spawn(|| {
                    while !over.load(Ordering::Acquire) {
                        if let Err(e) = runtime.run(workers) {
                            assert_eq!(e.errno(), libc::EBUSY, "{e}");
                        }
                    }
                });
            }
            let spawns = || (0..400).map(|_| value(runtime.spawn(nested).unwrap().join())).sum::<u32>();
            let spawners: Vec<_> = (0..spawners).map(|_| scope.spawn(spawns)).collect();
            spawners.into_iter().for_each(|spawner| assert_eq!(spawner.join().unwrap(), 7 * 400));
            over.store(true, Ordering::Release);
        });
        assert_eq!(runtime.stats().live, 0);
    }
}

/// Completes what was begun when it is polled for the third time.
#[derive(Default)]
struct Device {
    under_way: Mutex<Vec<(u32, Unparker, Arc<AtomicBool>)>>,
    polls: AtomicU64,
}

impl Poller for Device {
    fn poll(&self) -> Option<Pending> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let mut under_way = self.under_way.try_lock()?;
        under_way.retain_mut(|(left, unparker, done)| {
            *left -= 1;
            if *left == 0 {
                done.store(true, Ordering::Release);
                unparker.unpark();
            }
            *left > 0
        });
        (!under_way.is_empty()).then_some(Pending(Duration::from_micros(1)))
    }
}

#[test]
fn workers_poll_for_completions_between_uthreads() {
    for workers in [1, 2] {
        let runtime = runtime();
        let device = Arc::new(Device::default());
        runtime.add_poller(device.clone());
        let handles: Vec<_> = (0..50)
            .map(|_| {
                let device = device.clone();
                let body = move || {
                    let done = Arc::new(AtomicBool::new(false));
                    device.under_way.lock().push((3, Unparker::current(), done.clone()));
                    while !done.load(Ordering::Acquire) {
                        park();
                    }
                };
                runtime.spawn(body).unwrap()
            })
            .collect();
        runtime.run(workers).unwrap();
        handles.into_iter().for_each(|handle| value(handle.join()));
        assert!(device.polls.load(Ordering::Relaxed) >= 3);
    }
}

/// Has nothing to complete, and panics whenever it is polled but the first two times.
#[derive(Default)]
struct Broken(AtomicU64);

impl Poller for Broken {
    fn poll(&self) -> Option<Pending> {
        assert!(self.0.fetch_add(1, Ordering::Relaxed) < 2, "the device is broken");
        None
    }
}

#[test]
fn a_poller_that_panics_is_polled_no_more_and_its_worker_goes_on() {
    for workers in [1, 2, 4] {
        let runtime = runtime();
        let (broken, device) = (Arc::new(Broken::default()), Arc::new(Device::default()));
        runtime.add_poller(broken.clone());
        runtime.add_poller(device.clone());
        // Each begins on its worker, and goes on there alone.
        let body = || (0..1000).for_each(|_| sleep(Duration::from_micros(1)));
        let handles: Vec<_> = (0..8).map(|_| runtime.spawn(body).unwrap()).collect();
        runtime.run(workers).unwrap();
        handles.into_iter().for_each(|handle| value(handle.join()));
        let polls = broken.0.load(Ordering::Relaxed);
        // Each may poll it while the panic of another is on its way.
        assert!((3..3 + workers as u64).contains(&polls), "polled {polls} times by {workers} workers");
        assert!(device.polls.load(Ordering::Relaxed) > 3 + workers as u64, "the other one is not polled");
    }
}

/// Finds its device when it is first polled.
struct Finds {
    runtime: Weak<Runtime>,
    device: Arc<Device>,
    found: AtomicBool,
}

impl Poller for Finds {
    fn poll(&self) -> Option<Pending> {
        if !self.found.swap(true, Ordering::AcqRel) {
            self.runtime.upgrade().expect("it runs").add_poller(self.device.clone());
        }
        None
    }
}

#[test]
fn a_poller_adds_another() {
    for workers in [1, 2] {
        let (runtime, device) = (Arc::new(runtime()), Arc::new(Device::default()));
        let finds = Finds {
            runtime: Arc::downgrade(&runtime),
            device: device.clone(),
            found: AtomicBool::new(false),
        };
        runtime.add_poller(Arc::new(finds));
        let waits = move || {
            let done = Arc::new(AtomicBool::new(false));
            device.under_way.lock().push((3, Unparker::current(), done.clone()));
            while !done.load(Ordering::Acquire) {
                park();
            }
        };
        let handle = runtime.spawn(waits).unwrap();
        let (tells, told) = std::sync::mpsc::channel();
        // Not joined: it may stand still.
        std::thread::spawn(move || {
            runtime.run(workers).unwrap();
            tells.send(()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(60))
            .expect("a worker waits for itself, or polls the new one not");
        value(handle.join());
    }
}

#[test]
fn a_runtime_is_dropped_with_all_that_it_had() {
    let runtime = runtime();
    let device = Arc::new(Device::default());
    runtime.add_poller(device.clone());
    let handle = runtime.spawn(|| {
        Unparker::current().unpark();
        // Its alarm is cancelled long before its time.
        park_timeout(Duration::from_secs(3600));
    });
    runtime.run(1).unwrap();
    value(handle.unwrap().join());
    drop(runtime);
    assert_eq!(Arc::strong_count(&device), 1, "the runtime leaks");
}

/// Says when it is dropped.
struct Canary(Arc<AtomicBool>);

impl Drop for Canary {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_uthread_that_nobody_can_unpark_any_more_keeps_its_stack() {
    let (tells, told) = std::sync::mpsc::channel();
    // Its run never ends.
    std::thread::spawn(move || {
        let runtime = runtime();
        let (dropped, unparker) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let (own, given) = (Canary(dropped.clone()), unparker.clone());
        let parks = move || {
            *given.lock() = Some(Unparker::current());
            park();
            drop(own);
        };
        drop(runtime.spawn(parks).unwrap());
        let lets_go = move || {
            let last = unparker.lock().take().expect("the other one has begun");
            std::thread::spawn(move || drop(last)).join().unwrap();
            tells.send(dropped.load(Ordering::Acquire)).unwrap();
        };
        drop(runtime.spawn(lets_go).unwrap());
        runtime.run(1).unwrap();
    });
    assert!(!told.recv().unwrap(), "its stack was unwound while it waited");
}

#[test]
fn slices_that_are_too_long_are_counted() {
    let runtime =
        Runtime::new(Options { long_slice: Duration::from_millis(20), ..Options::default() }).unwrap();
    let long = || {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
    };
    let handle = runtime.spawn_named("glutton", long).unwrap();
    runtime.run(1).unwrap();
    value(handle.join());
    assert_eq!(runtime.stats().long_slices, 1);
}

/// Longer than any clock goes.
#[test]
fn times_without_end_are_times() {
    let runtime = Runtime::new(Options { long_slice: Duration::from_secs(1 << 55), ..Options::default() });
    let runtime = runtime.unwrap();
    let waits = || {
        let (me, begun) = (Unparker::current(), Instant::now());
        let unparks = move || {
            while begun.elapsed() < Duration::from_millis(30) {
                std::hint::spin_loop();
            }
            me.unpark();
        };
        let unparks = spawn(unparks).unwrap();
        park_timeout(Duration::MAX);
        assert!(begun.elapsed() >= Duration::from_millis(30));
        value(unparks.join());
    };
    let handle = runtime.spawn(waits).unwrap();
    runtime.run(1).unwrap();
    value(handle.join());
    assert_eq!(runtime.stats().long_slices, 0, "none is too long");
    std::thread::current().unpark();
    park_timeout(Duration::MAX);
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    for stack_bytes in [0, 4096, usize::MAX] {
        let e = Runtime::new(Options { stack_bytes, ..Options::default() }).err().unwrap();
        assert_eq!(e.errno(), libc::EINVAL, "{e}");
    }
    let runtime = Arc::new(runtime());
    assert_eq!(runtime.run(0).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(runtime.run(1 << 20).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(spawn(|| ()).err().unwrap().errno(), libc::EINVAL);
    let inner = runtime.clone();
    let handle = runtime
        .spawn(move || {
            let within = inner.run(1).unwrap_err().errno();
            let beside = std::thread::spawn(move || inner.run(1).unwrap_err().errno());
            (within, beside.join().unwrap())
        })
        .unwrap();
    runtime.run(1).unwrap();
    assert_eq!(value(handle.join()), (libc::EDEADLK, libc::EBUSY));
    assert!(!runtime::is_uthread());
}

#[test]
fn a_hundred_thousand_wait_at_a_time() {
    const COUNT: usize = 100_000;
    let runtime = Runtime::new(Options { stack_bytes: 16 << 10, ..Options::default() }).unwrap();
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let arrived = Arc::new(AtomicUsize::new(0));
    for _ in 0..COUNT {
        let (gate, arrived) = (gate.clone(), arrived.clone());
        let body = move || {
            arrived.fetch_add(1, Ordering::Relaxed);
            let mut open = gate.0.lock();
            while !*open {
                gate.1.wait(&mut open);
            }
        };
        drop(runtime.spawn(body).unwrap());
    }
    let opener = runtime
        .spawn(move || {
            while arrived.load(Ordering::Relaxed) < COUNT {
                yield_now();
            }
            *gate.0.lock() = true;
            gate.1.notify_all();
        })
        .unwrap();
    runtime.run(2).unwrap();
    value(opener.join());
    assert_eq!(runtime.stats().live, 0);
}

/// Uses this much stack at least.
fn descend(bytes: usize) -> u8 {
    let frame = std::hint::black_box([1u8; 1024]);
    if bytes > frame.len() { frame[bytes % 1024] & descend(bytes - frame.len()) } else { frame[0] }
}

const OVERFLOW: &str = "LODE_TEST_OVERFLOW";

#[test]
fn a_stack_has_the_room_that_was_asked_for() {
    let runtime = Runtime::new(Options { stack_bytes: 256 << 10, ..Options::default() }).unwrap();
    let handle = runtime.spawn(|| descend(64 << 10)).unwrap();
    runtime.run(1).unwrap();
    assert_eq!(value(handle.join()), 1);
}

#[test]
fn an_overflow_ends_the_process_and_names_the_uthread() {
    if std::env::var_os(OVERFLOW).is_some() {
        let runtime = Runtime::new(Options { stack_bytes: 16 << 10, ..Options::default() }).unwrap();
        drop(runtime.spawn_named("deep", || descend(1 << 20)).unwrap());
        runtime.run(1).unwrap();
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "an_overflow_ends_the_process_and_names_the_uthread", "--nocapture"]);
    let output = child.env(OVERFLOW, "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&output.status),
        Some(libc::SIGABRT),
        "{stderr}"
    );
    assert!(stderr.contains("uthread 0 (deep) overflowed its stack of 16384 bytes"), "{stderr}");
}

#[test]
fn other_faults_stay_what_they_were() {
    if std::env::var_os(OVERFLOW).is_some() {
        let runtime = runtime();
        // SAFETY: none: this is the fault that is wanted.
        let fault = || unsafe { std::ptr::without_provenance::<u8>(8).read_volatile() };
        drop(runtime.spawn(fault).unwrap());
        runtime.run(1).unwrap();
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "other_faults_stay_what_they_were", "--nocapture"]);
    let output = child.env(OVERFLOW, "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&output.status),
        Some(libc::SIGSEGV),
        "{stderr}"
    );
    assert!(!stderr.contains("overflowed"), "{stderr}");
}

#[test]
fn a_sent_signal_is_not_swallowed() {
    if std::env::var_os(OVERFLOW).is_some() {
        // SAFETY: none: the end that is wanted, as it comes to programs in C: the standard library's own handler swallows one.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        run(1, || {});
        // SAFETY: as above.
        unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) };
        // It comes to whichever thread the kernel likes.
        std::thread::sleep(Duration::from_secs(10));
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_sent_signal_is_not_swallowed", "--nocapture"]);
    let output = child.env(OVERFLOW, "1").output().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(libc::SIGSEGV));
}

/// An ordinary file whose sync ends once others have run.
struct SyncsLate {
    pool: Pool,
    late: AtomicBool,
    others_ran: AtomicBool,
    /// The next sync panics.
    panics: AtomicBool,
    /// Who synced, each time.
    by: std::sync::Mutex<Vec<ThreadId>>,
}

impl SyncsLate {
    fn new(pool: Pool) -> SyncsLate {
        SyncsLate {
            pool,
            late: AtomicBool::new(false),
            others_ran: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            by: std::sync::Mutex::default(),
        }
    }
}

impl Media for SyncsLate {
    fn len(&self) -> u64 {
        self.pool.len()
    }

    fn domain(&self) -> Domain {
        self.pool.domain()
    }

    fn two_fence_bytes(&self) -> usize {
        self.pool.two_fence_bytes()
    }

    fn read(&self, at: Addr, dst: &mut [u8]) -> Result<(), Fault> {
        self.pool.read(at, dst)
    }

    fn load64(&self, at: Addr) -> Result<u64, Fault> {
        self.pool.load64(at)
    }

    fn crc32c(&self, at: Addr, len: usize, seed: u32) -> Result<u32, Fault> {
        self.pool.crc32c(at, len, seed)
    }

    fn store64(&self, at: Addr, value: u64) -> Result<Dirty, Fault> {
        self.pool.store64(at, value)
    }

    fn copy_cached(&self, at: Addr, src: &[u8]) -> Result<Dirty, Fault> {
        self.pool.copy_cached(at, src)
    }

    fn copy_nt(&self, at: Addr, src: &[u8]) -> Result<Flushed, Fault> {
        self.pool.copy_nt(at, src)
    }

    fn copy_nt_crc(&self, at: Addr, src: &[u8], seed: u32) -> Result<(u32, Flushed), Fault> {
        self.pool.copy_nt_crc(at, src, seed)
    }

    fn zero_nt(&self, at: Addr, len: usize) -> Result<Flushed, Fault> {
        self.pool.zero_nt(at, len)
    }

    fn flush(&self, dirty: Dirty) -> Flushed {
        self.pool.flush(dirty)
    }

    fn fence(&self, flushed: Flushed) -> Durable {
        self.pool.fence(flushed)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.by.lock().unwrap().push(std::thread::current().id());
        assert!(!self.panics.swap(false, Ordering::AcqRel), "as a defect would");
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.late.load(Ordering::Acquire) && !self.others_ran.load(Ordering::Acquire) {
            assert!(Instant::now() < deadline, "nobody ran while a uthread waited for its sync");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.pool.sync()
    }
}

/// A task that asked for durable bytes lets go of its future, and then all is let go of.
#[test]
fn media_do_not_go_while_a_thread_syncs_them_for_a_future() {
    let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
    let media = Arc::new(SyncsLate::new(Pool::memfd(32 << 20, &options).unwrap()));
    media.late.store(true, Ordering::Release);
    let copies = Copies::new(media.clone(), EngineKind::Cpu, Profile::default());
    let durable = CopyOptions { durable: true, ..CopyOptions::default() };
    let bytes = [1; 4096];
    let part =
        RawTransfer { at: Addr(0), dram: Dram::From(bytes.as_ptr(), Route::PastCaches), len: bytes.len() };
    // SAFETY: all is copied when this returns, by the CPU, and nobody changes `bytes`.
    let mut future = unsafe { copies.submit_raw(&[part], &durable) }.unwrap().into_future();
    let mut asks = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut future).poll(&mut asks).is_pending());
    drop(future);
    let closes = std::thread::spawn(move || drop(copies));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!closes.is_finished(), "its thread is at the media");
    media.others_ran.store(true, Ordering::Release);
    closes.join().unwrap();
    assert_eq!(Arc::strong_count(&media), 1, "nobody has them any more");
}

/// Hundreds wait for their syncs: one thread makes them, and what was asked for during one is made by the next.
#[test]
fn one_sync_is_for_all_who_wait() {
    const FILES: usize = 300;
    let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
    let pool = Pool::memfd(32 << 20, &options).unwrap();
    let media = Fs::mkfs(SyncsLate::new(pool), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(media, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap();
    let files = Arc::new(Files::new(fs, Cred::root(), 0));
    let runtime = runtime();
    let media = files.fs().media();
    media.others_ran.store(false, Ordering::Release);
    media.late.store(true, Ordering::Release);
    media.by.lock().unwrap().clear();
    let waiting = Arc::new(AtomicUsize::new(0));
    let syncing: Vec<_> = (0..FILES)
        .map(|n| {
            let (files, waiting) = (files.clone(), waiting.clone());
            let sync = move || {
                let fd = files.open(format!("{n}").as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
                files.write(fd, b"some").unwrap();
                waiting.fetch_add(1, Ordering::SeqCst);
                files.fsync(fd).unwrap();
            };
            runtime.spawn(sync).unwrap()
        })
        .collect();
    let running = files.clone();
    let other = runtime.spawn(move || {
        while waiting.load(Ordering::SeqCst) < FILES {
            lodestone::runtime::yield_now();
        }
        running.fs().media().others_ran.store(true, Ordering::Release);
    });
    runtime.run(1).unwrap();
    syncing.into_iter().for_each(|syncing| value(syncing.join()));
    value(other.unwrap().join());
    let by = media.by.lock().unwrap();
    assert!(by.iter().all(|thread| *thread == by[0] && *thread != std::thread::current().id()), "{by:?}");
    assert!(by.len() <= 3, "{} syncs for {FILES} files", by.len());
}

/// Who asked for it is told, and who asks next has his.
#[test]
fn a_sync_that_panics_keeps_nobody_waiting() {
    let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
    let media = SyncsLate::new(Pool::memfd(32 << 20, &options).unwrap());
    let fs = Fs::open(
        Fs::mkfs(media, &MkfsOptions::default()).unwrap(),
        &OpenOptions { no_ticker: true, ..OpenOptions::default() },
    );
    let files = Arc::new(Files::new(fs.unwrap(), Cred::root(), 0));
    files.fs().media().panics.store(true, Ordering::Release);
    let outcomes = run(1, move || {
        let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.write(fd, b"some").unwrap();
        [files.fsync(fd), files.fsync(fd)].map(|done| done.map_err(|e| e.errno()))
    });
    assert_eq!(outcomes, [Err(libc::EIO), Ok(())]);
}

/// In a full pool on an ordinary file what was freed waits for a sync, which whoever needs room asks for: the worker does not
/// wait for its device, nor does who polls a future.
#[test]
fn others_run_while_a_sync_makes_room() {
    let needs: [fn(&Files<SyncsLate>, i32); 4] = [
        |files, fd| assert_eq!(files.pwrite(fd, &[3; 256 << 10], 0).unwrap(), 256 << 10),
        |files, fd| files.fallocate(fd, 0, 0, 256 << 10).unwrap(),
        |files, fd| {
            let ticket = files.submit_pwrite(fd, vec![3; 256 << 10].into(), 0).unwrap();
            assert_eq!(ticket.wait().unwrap(), 256 << 10);
        },
        |files, fd| {
            let mut write = Box::pin(files.pwrite_async(fd, vec![3; 256 << 10].into(), 0));
            let mut context = Context::from_waker(Waker::noop());
            assert!(write.as_mut().poll(&mut context).is_pending());
            loop {
                lodestone::runtime::yield_now();
                if let Poll::Ready((_, written)) = write.as_mut().poll(&mut context) {
                    return assert_eq!(written.unwrap(), 256 << 10);
                }
            }
        },
    ];
    for need in needs {
        let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
        let pool = Pool::memfd(32 << 20, &options).unwrap();
        let media = Fs::mkfs(SyncsLate::new(pool), &MkfsOptions::default()).unwrap();
        let fs = Fs::open(media, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap();
        let files = Arc::new(Files::new(fs, Cred::root(), 0));
        let open = |name: &[u8]| files.open(name, libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        let (fd, gap, fill) = (open(b"file"), open(b"gap"), open(b"fill"));
        files.fallocate(gap, 0, 0, 1 << 20).unwrap();
        let (mut at, mut step) = (0, 1 << 20);
        while step >= 4096 {
            match files.fallocate(fill, 0, at, step) {
                Ok(()) => at += step,
                Err(_) => step /= 2,
            }
        }
        files.ftruncate(gap, 0).unwrap();
        let media = files.fs().media();
        media.by.lock().unwrap().clear();
        media.late.store(true, Ordering::Release);
        let runtime = runtime();
        let own = files.clone();
        let needing = runtime.spawn(move || need(&own, fd)).unwrap();
        let own = files.clone();
        let other =
            runtime.spawn(move || own.fs().media().others_ran.store(true, Ordering::Release)).unwrap();
        runtime.run(1).unwrap();
        value(needing.join());
        value(other.join());
        let by = media.by.lock().unwrap();
        assert!(!by.is_empty() && by.iter().all(|thread| *thread != std::thread::current().id()), "{by:?}");
    }
}

/// A removal in such a pool whose record has no room: its directory's log is cleaned, part by part, and after each what it had
/// waits for syncs.
#[test]
fn others_run_while_a_removal_makes_its_room() {
    const NAMES: usize = 4000;
    let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
    let pool = Pool::memfd(16 << 20, &options).unwrap();
    let media = Fs::mkfs(SyncsLate::new(pool), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(media, &OpenOptions { no_ticker: true, ..OpenOptions::default() }).unwrap();
    let files = Arc::new(Files::new(fs, Cred::root(), 0));
    let open = |name: &[u8]| files.open(name, libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
    files.close(open(b"file")).unwrap();
    files.mkdir(b"many", 0o700).unwrap();
    let name = |n: usize| {
        format!("many/a name that is one of many and takes a line or two of the log, as it is so long, {n}")
    };
    (0..NAMES).for_each(|n| files.link(b"file", name(n).as_bytes()).unwrap());
    let fill = open(b"fill");
    let (mut at, mut step) = (0, 1 << 20);
    while step >= 4096 {
        match files.fallocate(fill, 0, at, step) {
            Ok(()) => at += step,
            Err(_) => step /= 2,
        }
    }
    (0..4).for_each(|_| files.fs().sync().unwrap());
    let media = files.fs().media();
    media.by.lock().unwrap().clear();
    media.late.store(true, Ordering::Release);
    let runtime = runtime();
    let own = files.clone();
    // They free nothing but lines of the log, and leave some in each of its parts.
    let gone = |n: &usize| !n.is_multiple_of(16);
    let removing = runtime
        .spawn(move || (0..NAMES).filter(gone).for_each(|n| own.unlink(name(n).as_bytes()).unwrap()))
        .unwrap();
    let own = files.clone();
    let other = runtime.spawn(move || own.fs().media().others_ran.store(true, Ordering::Release)).unwrap();
    runtime.run(1).unwrap();
    value(removing.join());
    value(other.join());
    let by = media.by.lock().unwrap();
    assert!(!by.is_empty() && by.iter().all(|thread| *thread != std::thread::current().id()), "{by:?}");
    drop(by);
    assert_eq!(files.stat(b"file").unwrap().nlink as usize, 1 + NAMES.div_ceil(16));
    let report = files.fs().check().unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

/// fsync, sync and writes with O_SYNC on an ordinary file wait for its device: not so the worker.
#[test]
fn others_run_while_a_file_is_synced() {
    let options = PoolOptions { assume: Some(Domain::PageCache), ..PoolOptions::default() };
    let pool = Pool::memfd(32 << 20, &options).unwrap();
    let media = Fs::mkfs(SyncsLate::new(pool), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(media, &OpenOptions::default()).unwrap();
    let files = Arc::new(Files::new(fs, Cred::root(), 0));
    let syncs: [fn(&Files<SyncsLate>); 3] = [
        |files| {
            let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
            files.write(fd, b"some").unwrap();
            files.fsync(fd).unwrap();
        },
        |files| files.fs().sync_and_wait().unwrap(),
        |files| {
            let fd = files.open(b"other", libc::O_CREAT | libc::O_RDWR | libc::O_SYNC, 0o600).unwrap();
            files.write(fd, b"more").unwrap();
        },
    ];
    for sync in syncs {
        let runtime = runtime();
        let media = files.fs().media();
        media.others_ran.store(false, Ordering::Release);
        media.late.store(true, Ordering::Release);
        let syncing = files.clone();
        let syncer = runtime.spawn(move || sync(&syncing)).unwrap();
        let running = files.clone();
        let other =
            runtime.spawn(move || running.fs().media().others_ran.store(true, Ordering::Release)).unwrap();
        runtime.run(1).unwrap();
        value(syncer.join());
        value(other.join());
        media.late.store(false, Ordering::Release);
    }
}
