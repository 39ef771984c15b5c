//! The runtime under every kind of schedule (see `sync/schedules.rs`): a wake-up that is lost leaves a worker or a uthread asleep for
//! ever, with which shuttle ends the run.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicUsize as Unseen;
use std::sync::atomic::Ordering::SeqCst;

use shuttle::sync::mpsc::channel;
use shuttle::thread;

use super::{Condvar, Mutex, Options, Runtime, Unparker, bounded, spawn, yield_now};
use crate::sync::schedules::explore;

fn runtime() -> Arc<Runtime> {
    let options = Options { stack_bytes: 256 << 10, ..Options::default() };
    Arc::new(Runtime::new(options).expect("a runtime"))
}

/// Uthreads that hold a lock while they wait, let go of it, and take it again.
#[test]
fn a_lock_has_one_holder_and_whoever_waits_for_it_is_woken() {
    explore(|| {
        let runtime = runtime();
        let (lock, inside) = (Arc::new(Mutex::new(0)), Arc::new(Unseen::new(0)));
        let uthreads: Vec<_> = (0..3)
            .map(|_| {
                let (lock, inside) = (lock.clone(), inside.clone());
                let run = move || {
                    for _ in 0..2 {
                        let mut count = lock.lock();
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two are in");
                        yield_now();
                        *count += 1;
                        inside.fetch_sub(1, SeqCst);
                    }
                };
                runtime.spawn(run).unwrap()
            })
            .collect();
        runtime.run(2).unwrap();
        uthreads.into_iter().for_each(|uthread| uthread.join().unwrap());
        assert_eq!(*lock.lock(), 6);
    });
}

/// By those of its worker, of another, and by a thread that is none.
#[test]
fn what_is_sent_to_a_sleeping_worker_is_run() {
    explore(|| {
        let runtime = runtime();
        let (sender, receiver) = bounded(1);
        let parked = runtime.spawn(move || receiver.recv()).unwrap();
        let outside = thread::spawn({
            let runtime = runtime.clone();
            move || {
                let told = runtime.spawn(move || sender.send(7).unwrap());
                told.unwrap().join().unwrap();
            }
        });
        // Until none is left: the sender may come later, and is run by nobody then.
        runtime.run(2).unwrap();
        outside.join().unwrap();
        assert_eq!(parked.join().unwrap(), Ok(7));
    });
}

/// Each is joined before the next is spawned, so that a run may end at any moment of it. What comes too late for one run is
/// the next one's.
fn spawned_beside_the_end(runners: usize, body: fn() -> u32) {
    const SPAWNED: u32 = 2;
    let (runtime, over) = (runtime(), Arc::new(AtomicBool::new(false)));
    let runners: Vec<_> = (0..runners)
        .map(|_| {
            let (runtime, over) = (runtime.clone(), over.clone());
            thread::spawn(move || {
                while !over.load(SeqCst) {
                    if let Err(e) = runtime.run(2) {
                        assert_eq!(e.errno(), libc::EBUSY, "{e}");
                    }
                    thread::yield_now();
                }
            })
        })
        .collect();
    let sum = (0..SPAWNED).map(|_| runtime.spawn(body).unwrap().join().unwrap()).sum::<u32>();
    over.store(true, SeqCst);
    runners.into_iter().for_each(|runner| runner.join().unwrap());
    assert_eq!((sum, runtime.stats().live), (7 * SPAWNED, 0));
}

#[test]
fn what_is_spawned_beside_the_end_of_a_run_is_run() {
    explore(|| spawned_beside_the_end(1, || 7));
}

#[test]
fn what_begins_beside_the_end_of_a_run_is_woken() {
    explore(|| spawned_beside_the_end(1, || spawn(|| 7).unwrap().join().unwrap()));
}

#[test]
fn two_runners_never_run_it_at_once() {
    explore(|| {
        spawned_beside_the_end(2, || {
            let home = thread::current().id();
            let seven = spawn(|| 7).unwrap();
            yield_now();
            let seven = seven.join().unwrap();
            assert_eq!(thread::current().id(), home, "it has begun, and moved");
            seven
        });
    });
}

#[test]
fn what_idle_workers_take_over_is_run_once() {
    explore(|| {
        let runtime = runtime();
        let ran = Arc::new(Unseen::new(0));
        let first = {
            let ran = ran.clone();
            let part = move || {
                let ran = ran.clone();
                let run = move || {
                    yield_now();
                    ran.fetch_add(1, SeqCst);
                };
                spawn(run).unwrap()
            };
            runtime.spawn(move || (0..3).map(|_| part()).for_each(|part| part.join().unwrap())).unwrap()
        };
        runtime.run(2).unwrap();
        first.join().unwrap();
        assert_eq!(ran.load(SeqCst), 3);
        assert_eq!(runtime.stats().live, 0);
    });
}

/// It is for what anybody may run, and its worker finds first what is bound to it, and keeps it: the third one, which sleeps, is woken then.
#[test]
fn a_wake_up_that_is_spent_on_something_else_is_handed_on() {
    const WORKERS: usize = 3;
    explore(|| {
        let runtime = runtime();
        let first = runtime.spawn(|| {
            let (gives, given) = channel();
            let [(tells_first, first_told), (tells_second, second_told)] = [channel(), channel()];
            let second = spawn(move || {
                gives.send(Unparker::current()).unwrap();
                super::park();
                second_told.recv().unwrap();
            });
            // Whoever waits so keeps its worker: the second begins on another one.
            let unparker: Unparker = given.recv().unwrap();
            (0..WORKERS * 8).for_each(|_| thread::yield_now());
            let third =
                spawn(move || [tells_first, tells_second].iter().for_each(|tells| tells.send(()).unwrap()));
            unparker.unpark();
            first_told.recv().unwrap();
            second.unwrap().join().unwrap();
            third.unwrap().join().unwrap();
        });
        runtime.run(WORKERS).unwrap();
        first.unwrap().join().unwrap();
    });
}

#[test]
fn whoever_is_notified_goes_on() {
    explore(|| {
        let runtime = runtime();
        let shared = Arc::new((Mutex::new(0), Condvar::new()));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                let wait = move || {
                    let mut tokens = shared.0.lock();
                    while *tokens == 0 {
                        shared.1.wait(&mut tokens);
                    }
                    *tokens -= 1;
                };
                runtime.spawn(wait).unwrap()
            })
            .collect();
        let give = move || {
            for _ in 0..2 {
                *shared.0.lock() += 1;
                shared.1.notify_one();
            }
        };
        let giver = runtime.spawn(give).unwrap();
        runtime.run(2).unwrap();
        giver.join().unwrap();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// Also where it comes while something else is waited for.
#[test]
fn an_unpark_is_for_the_programs_own_park() {
    explore(|| {
        let runtime = runtime();
        let parks = || {
            let me = Unparker::current();
            let unparks = move || {
                me.unpark();
                yield_now();
            };
            spawn(unparks).unwrap().join().unwrap();
            super::park();
        };
        let parked = runtime.spawn(parks).unwrap();
        runtime.run(2).unwrap();
        parked.join().unwrap();
    });
}

/// As an engine does it, whose thread is no worker.
#[test]
fn a_thread_wakes_uthreads_that_park() {
    explore(|| {
        let runtime = runtime();
        let given = Arc::new(shuttle::sync::Mutex::new(None::<Unparker>));
        let waker = thread::spawn({
            let given = given.clone();
            move || {
                loop {
                    if let Some(unparker) = given.lock().unwrap().take() {
                        return unparker.unpark();
                    }
                    shuttle::thread::yield_now();
                }
            }
        });
        let parks = move || {
            *given.lock().unwrap() = Some(Unparker::current());
            super::park();
        };
        let parked = runtime.spawn(parks).unwrap();
        runtime.run(1).unwrap();
        parked.join().unwrap();
        waker.join().unwrap();
    });
}
