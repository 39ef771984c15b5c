//! Slots: small numbers that living threads have to themselves.
//!
//! What belongs to a slot is written by one thread at a time, without locked instructions. A slot passes to a
//! later thread when its owner ends, with all that was written. Threads beyond the first [`SLOTS_MAX`],
//! and threads that are ending, have none.

use std::cell::Cell;
use std::marker::PhantomData;

use super::primitive::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use super::primitive::atomic::{AtomicU64, AtomicUsize};
use super::primitive::{shared_static, thread_local};

/// Threads with a slot, at most.
pub const SLOTS_MAX: usize = if cfg!(shuttle) { 64 } else { 256 };
/// The slot of threads that have none.
pub const NONE: u32 = u32::MAX;

/// In a type that must stay with the thread that made it.
pub type NotSend = PhantomData<*const ()>;

shared_static! {
    static TAKEN: [AtomicU64; SLOTS_MAX / 64] = [const { AtomicU64::new(0) }; SLOTS_MAX / 64];
}
shared_static! {
    static USED: AtomicUsize = AtomicUsize::new(0);
}

/// What `SLOT` holds before the thread asked.
const UNASKED: u32 = u32::MAX - 1;

thread_local! {
    /// Apart from `OWNED`, because a plain cell is read without looking whether it was destroyed.
    static SLOT: Cell<u32> = const { Cell::new(UNASKED) };
    static OWNED: Owned = Owned::take();
}

/// The calling thread's slot, or [`NONE`].
#[inline]
pub fn slot() -> u32 {
    match SLOT.with(Cell::get) {
        UNASKED => ask(),
        known => known,
    }
}

/// No thread ever had a slot from here on.
pub fn slots_used() -> usize {
    USED.load(SeqCst)
}

#[cold]
fn ask() -> u32 {
    let slot = OWNED.try_with(|owned| owned.0).unwrap_or(NONE);
    SLOT.with(|known| known.set(slot));
    slot
}

/// Gives the slot back when the thread ends.
struct Owned(u32);

impl Owned {
    fn take() -> Owned {
        for (index, word) in TAKEN.iter().enumerate() {
            let mut taken = word.load(Relaxed);
            while taken != u64::MAX {
                let bit = taken.trailing_ones();
                // Acquire: what the slot's last owner wrote is seen by the next.
                match word.compare_exchange_weak(taken, taken | 1 << bit, Acquire, Relaxed) {
                    Ok(_) => {
                        let slot = index * 64 + bit as usize;
                        USED.fetch_max(slot + 1, SeqCst);
                        return Owned(slot as u32);
                    }
                    Err(now) => taken = now,
                }
            }
        }
        Owned(NONE)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Under shuttle it may be gone already.
        let _ = SLOT.try_with(|known| known.set(NONE));
        if self.0 != NONE {
            let (index, bit) = (self.0 as usize / 64, self.0 % 64);
            TAKEN[index].fetch_and(!(1 << bit), Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn living_threads_have_slots_of_their_own_and_later_ones_inherit() {
        for _ in 0..20 {
            let barrier = Barrier::new(16);
            let mut slots: Vec<u32> = std::thread::scope(|s| {
                let threads: Vec<_> = (0..16)
                    .map(|_| {
                        s.spawn(|| {
                            let mine = slot();
                            barrier.wait();
                            assert_eq!(slot(), mine);
                            mine
                        })
                    })
                    .collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            slots.sort_unstable();
            slots.dedup_by(|a, b| a == b && *a != NONE);
            assert_eq!(slots.len(), 16, "{slots:?}");
        }
        assert!(slots_used() <= SLOTS_MAX);
    }
}
