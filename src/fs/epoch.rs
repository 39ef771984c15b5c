//! Sync epochs: which operations are certainly complete.
//!
//! Every operation runs inside one epoch and writes its number into its records. [`Epochs::advance`]
//! begins the next epoch and waits until all operations of the last one have left, that is, have
//! passed their fence; only then may the superblock name it as settled. Entering costs two
//! uncontended atomic adds, because each thread counts in its own stripe.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::{Backoff, CachePadded};
use parking_lot::Mutex;

use super::thread_stripe;

const STRIPES: usize = 32;

pub struct Epochs {
    current: CachePadded<AtomicU64>,
    /// Operations inside, by stripe and by the parity of their epoch.
    inside: Box<[CachePadded<[AtomicU64; 2]>; STRIPES]>,
    advancing: Mutex<()>,
}

/// An operation inside its epoch; leaves when dropped.
pub struct Guard<'a> {
    count: &'a AtomicU64,
    epoch: u64,
}

impl Guard<'_> {
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Release);
    }
}

impl Epochs {
    pub fn new(current: u64) -> Epochs {
        Epochs {
            current: CachePadded::new(AtomicU64::new(current)),
            inside: Box::new(std::array::from_fn(|_| {
                CachePadded::new([AtomicU64::new(0), AtomicU64::new(0)])
            })),
            advancing: Mutex::new(()),
        }
    }

    #[inline]
    pub fn current(&self) -> u64 {
        self.current.load(Ordering::Acquire)
    }

    /// Enters the current epoch.
    #[inline]
    pub fn enter(&self) -> Guard<'_> {
        let stripe = &self.inside[thread_stripe() % STRIPES];
        loop {
            let epoch = self.current.load(Ordering::Acquire);
            let count = &stripe[(epoch & 1) as usize];
            // SeqCst pairs with `advance`: either it sees this count, or this sees its new epoch.
            count.fetch_add(1, Ordering::SeqCst);
            if self.current.load(Ordering::SeqCst) == epoch {
                return Guard { count, epoch };
            }
            count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Ends the current epoch and returns its number, once every operation inside has left. The caller
    /// must not be inside one itself.
    pub fn advance(&self) -> u64 {
        let _one = self.advancing.lock();
        let ended = self.current.fetch_add(1, Ordering::SeqCst);
        for stripe in self.inside.iter() {
            let backoff = Backoff::new();
            while stripe[(ended & 1) as usize].load(Ordering::SeqCst) != 0 {
                backoff.snooze();
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advance_waits_for_those_inside() {
        let epochs = Epochs::new(5);
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
