//! Waiting under every kind of schedule (see `sync/schedules.rs`): a ring that is lost leaves somebody asleep for ever,
//! with which shuttle ends the run.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Unseen;

use shuttle::thread;

use super::{Bell, Ending, Holding, Seat, current_waker, until};
use crate::sync::primitive::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::primitive::{Mutex, yield_now};
use crate::sync::schedules::explore;

/// As an engine has it: a worker ends a request, and rings.
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

#[test]
fn whoever_waits_is_woken() {
    explore(|| {
        let requests: Vec<Arc<Request>> = (0..2).map(|_| Arc::default()).collect();
        let waiters: Vec<_> = (0..3)
            .map(|n| {
                let requests = requests.clone();
                // One after the other, in both orders: a ring of the first may come while the second is waited for.
                thread::spawn(move || {
                    for k in 0..2 {
                        until(&*requests[(n + k) % 2], None, Holding::Something);
                    }
                })
            })
            .collect();
        requests.iter().for_each(|request| request.end());
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// Places that are taken and given back, one ring for each: as `semaphore` and the workers of `delegate` wait.
#[derive(Default)]
struct Places {
    free: Mutex<usize>,
    bell: Bell,
}

impl Ending for Places {
    fn look(&self) -> bool {
        let mut free = self.free.lock();
        let taken = *free > 0;
        *free -= usize::from(taken);
        taken
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.bell)
    }
}

#[test]
fn one_ring_for_each_place_is_enough() {
    explore(|| {
        let places = Arc::new(Places::default());
        let inside = Arc::new(Unseen::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (places, inside) = (places.clone(), inside.clone());
                thread::spawn(move || {
                    for _ in 0..2 {
                        until(&*places, None, Holding::Something);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "there is one place");
                        yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        *places.free.lock() += 1;
                        places.bell.ring_one();
                    }
                })
            })
            .collect();
        *places.free.lock() += 1;
        places.bell.ring_one();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Who goes away leaves the others' seats alone, and takes no ring with it that was for them.
#[test]
fn who_leaves_takes_no_ring_from_others() {
    explore(|| {
        let request = Arc::new(Request::default());
        let wakes = Arc::new(AtomicUsize::new(0));
        let leaver = thread::spawn({
            let request = request.clone();
            move || {
                let seat = Seat::new();
                request.bell.listen(&seat, &current_waker());
                yield_now();
                request.bell.leave(&seat);
            }
        });
        let waiter = thread::spawn({
            let (request, wakes) = (request.clone(), wakes.clone());
            move || {
                until(&*request, None, Holding::Something);
                wakes.fetch_add(1, Ordering::SeqCst);
            }
        });
        request.end();
        leaver.join().unwrap();
        waiter.join().unwrap();
        assert_eq!(wakes.load(Ordering::SeqCst), 1);
    });
}
