//! Sync epochs: which operations are certainly complete.
//!
//! Every operation runs inside one epoch and writes its number into its records. [`Epochs::advance`]
//! begins the next epoch and waits until all operations of the last one have left, that is, have
//! passed their fence; only then may the superblock name it as settled. Entering and leaving cost no locked
//! instruction, because each thread counts for itself and `advance` has the barrier that both need.

use std::marker::PhantomData;

use crossbeam_utils::{Backoff, CachePadded};

use crate::sync::primitive::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::primitive::{Mutex, wait};
use crate::sync::{barrier, thread};

pub struct Epochs {
    current: CachePadded<AtomicU64>,
    /// Operations inside, by slot of their thread and by the parity of their epoch. The last is shared by the
    /// threads that have no slot.
    inside: Box<[CachePadded<[AtomicU64; 2]>]>,
    /// Whether the others are written without locked instructions.
    plain: AtomicBool,
    advancing: Mutex<()>,
}

/// An operation inside its epoch; leaves when dropped, on the thread that entered.
pub struct Guard<'a> {
    count: &'a AtomicU64,
    /// With [`PLAIN`] where the count is written without locked instructions: two words travel in registers.
    epoch: u64,
    here: thread::NotSend,
}

/// No epoch has this bit.
const PLAIN: u64 = 1 << 63;

impl Guard<'_> {
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch & !PLAIN
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.epoch & PLAIN != 0 {
            self.count.store(self.count.load(Ordering::Relaxed) - 1, Ordering::Release);
        } else {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl Epochs {
    pub fn new(current: u64) -> Epochs {
        Epochs {
            current: CachePadded::new(AtomicU64::new(current)),
            inside: (0..=thread::SLOTS_MAX).map(|_| CachePadded::default()).collect(),
            plain: AtomicBool::new(false),
            advancing: Mutex::new(()),
        }
    }

    /// From now on it is to be quick to enter, and `advance` pays. While only one thread knows the epochs it is the other way
    /// round: a barrier for all threads of the process would be for nothing. Nobody is inside: a count would be in doubt that one
    /// thread stores and another adds to.
    pub fn share(&self) {
        let nobody =
            || self.inside.iter().flat_map(|counts| &**counts).all(|n| n.load(Ordering::SeqCst) == 0);
        debug_assert!(nobody(), "epochs are shared with an operation inside");
        self.plain.store(barrier::is_available(), Ordering::Relaxed);
    }

    #[inline]
    pub fn current(&self) -> u64 {
        self.current.load(Ordering::Acquire)
    }

    /// Goes on above `epoch`. Nobody is inside.
    pub fn raise(&self, epoch: u64) {
        self.current.fetch_max(epoch + 1, Ordering::SeqCst);
    }

    /// Enters the current epoch.
    #[inline]
    pub fn enter(&self) -> Guard<'_> {
        let slot = (thread::slot() as usize).min(thread::SLOTS_MAX);
        let plain = self.plain.load(Ordering::Relaxed) && slot < thread::SLOTS_MAX;
        loop {
            let epoch = self.current.load(Ordering::Acquire);
            let count = &self.inside[slot][(epoch & 1) as usize];
            // Either `advance` sees this count, or this sees its new epoch.
            if plain {
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                barrier::light();
            } else {
                count.fetch_add(1, Ordering::SeqCst);
            }
            let guard = Guard { count, epoch: if plain { epoch | PLAIN } else { epoch }, here: PhantomData };
            if self.current.load(Ordering::SeqCst) == epoch {
                return guard;
            }
        }
    }

    /// Ends the current epoch and returns its number, once every operation inside has left. The caller
    /// must not be inside one itself.
    pub fn advance(&self) -> u64 {
        let _one = self.advancing.lock();
        let ended = self.current.fetch_add(1, Ordering::SeqCst);
        if self.plain.load(Ordering::Relaxed) {
            barrier::heavy();
        }
        let used = thread::slots_used().min(thread::SLOTS_MAX);
        for counts in self.inside[..used].iter().chain(self.inside.last()) {
            let backoff = Backoff::new();
            while counts[(ended & 1) as usize].load(Ordering::SeqCst) != 0 {
                wait(&backoff);
            }
        }
        ended
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn advance_waits_for_those_inside() {
        for shared in [false, true] {
            let epochs = Epochs::new(5);
            if shared {
                epochs.share();
            }
            waits_for_those_inside(&epochs);
        }
    }

    fn waits_for_those_inside(epochs: &Epochs) {
        let guard = epochs.enter();
        assert_eq!(guard.epoch(), 5);
        std::thread::scope(|s| {
            let ended = s.spawn(|| epochs.advance());
            while epochs.current() == 5 {
                std::thread::yield_now();
            }
            assert!(!ended.is_finished());
            assert_eq!(epochs.enter().epoch(), 6);
            drop(guard);
            assert_eq!(ended.join().unwrap(), 5);
        });
    }
}
