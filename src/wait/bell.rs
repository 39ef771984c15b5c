//! A bell: whoever brings something to its end rings it, and wakes all who listen.
//!
//! Listeners are wakers, so that threads, uthreads and async tasks are one thing here. Each has a seat of its own, of
//! which the bell keeps at most one waker: so what listens often does not pile up, and what goes leaves nothing behind.
//!
//! **No ring is missed.** Who listens takes its seat, passes a fence and looks whether it has ended; who ends it says so,
//! passes a fence and looks whether somebody listens. So one of the two sees the other. Where nobody listens a ring
//! is that fence and a load.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64 as Unseen;
use std::task::Waker;

use smallvec::SmallVec;

use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicBool, Ordering, fence};

#[derive(Default)]
pub struct Bell {
    /// Somebody may listen.
    awaited: AtomicBool,
    listeners: Mutex<SmallVec<[(u64, Waker); 1]>>,
}

/// One listener, at whatever bell.
#[derive(Debug)]
pub struct Seat(u64);

impl Seat {
    pub fn new() -> Seat {
        // A number, and nothing that others wait for: the model checker need not see it.
        static NEXT: Unseen = Unseen::new(0);
        Seat(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn number(&self) -> u64 {
        self.0
    }
}

impl Default for Seat {
    fn default() -> Seat {
        Seat::new()
    }
}

impl Bell {
    pub fn new() -> Bell {
        Bell::default()
    }

    /// From now on the waker is woken at the next ring, instead of the one that this seat had. Whoever listens looks
    /// afterwards whether it has ended meanwhile.
    pub fn listen(&self, seat: &Seat, waker: &Waker) {
        let mut listeners = self.listeners.lock();
        let gone = match listeners.iter_mut().find(|(number, _)| *number == seat.0) {
            Some((_, before)) if before.will_wake(waker) => None,
            Some((_, before)) => Some(std::mem::replace(before, waker.clone())),
            None => {
                listeners.push((seat.0, waker.clone()));
                None
            }
        };
        self.awaited.store(true, Ordering::Relaxed);
        // Outside of the lock: whose last it is may do anything, also leave here.
        drop((listeners, gone));
        fence(Ordering::SeqCst);
    }

    /// Whether it still listened: nobody has rung for it.
    pub fn leave(&self, seat: &Seat) -> bool {
        let mut listeners = self.listeners.lock();
        let place = listeners.iter().position(|(number, _)| *number == seat.0);
        let left = place.map(|place| listeners.remove(place));
        self.awaited.store(!listeners.is_empty(), Ordering::Relaxed);
        drop(listeners);
        left.is_some()
    }

    /// Wakes all who listen; they listen no more.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.awaited.load(Ordering::Relaxed) {
            self.ring_aloud();
        }
    }

    #[cold]
    fn ring_aloud(&self) {
        let mut listeners = self.listeners.lock();
        self.awaited.store(false, Ordering::Relaxed);
        let woken = std::mem::take(&mut *listeners);
        // A waker may do anything, also listen here.
        drop(listeners);
        woken.into_iter().for_each(|(_, waker)| wake(waker));
    }

    /// Wakes who has listened for longest, where somebody does; whether somebody did.
    pub fn ring_one(&self) -> bool {
        fence(Ordering::SeqCst);
        if !self.awaited.load(Ordering::Relaxed) {
            return false;
        }
        let mut listeners = self.listeners.lock();
        let first = (!listeners.is_empty()).then(|| listeners.remove(0));
        self.awaited.store(!listeners.is_empty(), Ordering::Relaxed);
        drop(listeners);
        let rang = first.is_some();
        if let Some((_, waker)) = first {
            wake(waker);
        }
        rang
    }
}

/// Wakes. A waker is somebody else's code: should it panic, others are woken all the same, and whoever rings goes on.
pub(super) fn wake(waker: Waker) {
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!("a waker panicked: whoever it was to wake may sleep on");
    }
}

#[cfg(all(test, not(any(shuttle, loom))))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Wake for Counted {
        fn wake(self: Arc<Counted>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn counted() -> (Arc<Counted>, Waker) {
        let counted = Arc::new(Counted::default());
        (counted.clone(), counted.into())
    }

    fn woken(counted: &Counted) -> usize {
        counted.0.load(Ordering::SeqCst)
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Panics>) {
            panic!("a waker's own");
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_nobody_else_asleep() {
        let bell = Bell::new();
        let (a, b) = (Seat::new(), Seat::new());
        let (other, waker) = counted();
        bell.listen(&a, &Arc::new(Panics).into());
        bell.listen(&b, &waker);
        bell.ring();
        assert_eq!(woken(&other), 1);
        bell.listen(&a, &Arc::new(Panics).into());
        assert!(bell.ring_one());
    }

    #[test]
    fn a_ring_wakes_each_seat_once_with_its_last_waker() {
        let bell = Bell::new();
        let (a, b) = (Seat::new(), Seat::new());
        let ((first, before), (last, after), (other, waker)) = (counted(), counted(), counted());
        bell.listen(&a, &before);
        bell.listen(&b, &waker);
        bell.listen(&a, &after);
        bell.ring();
        bell.ring();
        assert_eq!((woken(&first), woken(&last), woken(&other)), (0, 1, 1));
        assert!(!bell.leave(&a), "it was rung for");
    }

    #[test]
    fn who_has_left_is_kept_and_woken_no_more() {
        let bell = Bell::new();
        let (seat, (gone, waker)) = (Seat::new(), counted());
        bell.listen(&seat, &waker);
        assert!(bell.leave(&seat) && !bell.leave(&seat));
        drop(waker);
        bell.ring();
        assert_eq!(woken(&gone), 0);
        assert_eq!(Arc::strong_count(&gone), 1, "nothing is left behind");
    }

    /// As a task that takes its other waits with it.
    #[test]
    fn whose_waker_is_replaced_may_use_the_bell_as_it_goes() {
        struct Leaves(Arc<Bell>, Seat);

        impl Wake for Leaves {
            fn wake(self: Arc<Leaves>) {}
        }

        impl Drop for Leaves {
            fn drop(&mut self) {
                self.0.leave(&self.1);
            }
        }

        let bell = Arc::new(Bell::new());
        let (seat, other) = (Seat::new(), Seat::new());
        let ((gone, its_waker), (stays, waker)) = (counted(), counted());
        bell.listen(&other, &its_waker);
        bell.listen(&seat, &Arc::new(Leaves(bell.clone(), other)).into());
        bell.listen(&seat, &waker);
        bell.ring();
        assert_eq!((woken(&gone), woken(&stays)), (0, 1));
    }

    #[test]
    fn one_ring_is_for_who_came_first() {
        let bell = Bell::new();
        let seats = [Seat::new(), Seat::new()];
        let [(a, wake_a), (b, wake_b)] = [counted(), counted()];
        assert!(!bell.ring_one(), "nobody listens");
        bell.listen(&seats[0], &wake_a);
        bell.listen(&seats[1], &wake_b);
        assert!(bell.ring_one());
        assert_eq!((woken(&a), woken(&b)), (1, 0));
        assert!(bell.ring_one() && !bell.ring_one());
        assert_eq!((woken(&a), woken(&b)), (1, 1));
    }
}
