//! Slots of threads, given by the model: how they are found is in the real one's own tests.

use std::cell::Cell;
use std::marker::PhantomData;

pub const SLOTS_MAX: usize = 2;
pub const NONE: u32 = u32::MAX;

pub type NotSend = PhantomData<*const ()>;

loom::thread_local! {
    static SLOT: Cell<u32> = Cell::new(0);
}

/// The calling thread has this slot.
pub fn have(slot: u32) {
    SLOT.with(|known| known.set(slot));
}

pub fn slot() -> u32 {
    SLOT.with(Cell::get)
}

pub fn slots_used() -> usize {
    SLOTS_MAX
}
