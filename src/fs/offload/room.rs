//! Room that copies keep, or what was freed and is not synced yet, waited for with nothing held.
//!
//! An operation that finds the pool full waits for the copies that keep blocks, or syncs what was freed, and tries again
//! (`make_room`): with its thread, for by then it has a descriptor, a directory, the C library's stripe. Where others could
//! run meanwhile, in a uthread and for a future, whoever is outermost has it put off instead: the operation fails as on a
//! full pool, which changes nothing, its caller lets go of everything, waits, and calls it again.

use std::cell::Cell;

use super::syncs::Requested;
use super::*;
use crate::sync::primitive::thread_local;
use crate::wait::lets_others_run;

/// So often an operation is put off: others may take what it waits for. Then it waits as a thread does.
const PUT_OFF_MAX: u32 = 4;
/// So often besides, where it has made a part of its room itself.
const PUT_OFF_WITH_A_PART_MAX: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Inside,
    /// Whoever called it waits.
    Outside,
    /// Likewise, and there is something to wait for.
    PutOff,
    /// Likewise, of what it did itself.
    PutOffWithAPart,
}

thread_local! {
    /// Where the operation that runs on this thread waits for room. There is one: it lets nobody else run.
    static WAITS: Cell<Waits> = const { Cell::new(Waits::Inside) };
}

/// The tries of one operation.
pub struct Tries {
    left: u32,
    parts_left: u32,
}

impl Tries {
    /// Made by whoever holds nothing yet: outside of a uthread, and where somebody keeps its thread, operations wait by themselves.
    #[inline]
    pub fn new() -> Tries {
        match lets_others_run() {
            true => Tries::of_task(),
            false => Tries { left: 0, parts_left: 0 },
        }
    }

    /// Of whoever has something else to do than to wait.
    pub(super) fn of_task() -> Tries {
        Tries { left: PUT_OFF_MAX, parts_left: PUT_OFF_WITH_A_PART_MAX }
    }

    /// Runs it, and it lets nobody else run. None where it was put off: [`Fs::wait_for_room`], and once more.
    #[inline]
    pub fn attempt<T>(&mut self, run: impl FnOnce() -> Result<T>) -> Option<Result<T>> {
        match self.left {
            0 => Some(run()),
            _ => self.attempt_outside(run),
        }
    }

    fn attempt_outside<T>(&mut self, run: impl FnOnce() -> Result<T>) -> Option<Result<T>> {
        struct Inside;

        impl Drop for Inside {
            fn drop(&mut self) {
                WAITS.with(|waits| waits.set(Waits::Inside));
            }
        }

        // An operation within another one: that is put off.
        if WAITS.with(Cell::get) != Waits::Inside {
            return Some(run());
        }
        WAITS.with(|waits| waits.set(Waits::Outside));
        let inside = Inside;
        let done = run();
        let waits = WAITS.with(Cell::get);
        drop(inside);
        match done {
            Err(e) if waits != Waits::Outside && e.errno() == libc::ENOSPC => {
                match waits == Waits::PutOffWithAPart && self.parts_left > 0 {
                    true => self.parts_left -= 1,
                    false => self.left -= 1,
                }
                None
            }
            done => Some(done),
        }
    }
}

impl Default for Tries {
    fn default() -> Tries {
        Tries::new()
    }
}

/// Whether somebody waits in the place of the operation that found the pool full, should there be something to wait for.
#[cold]
pub(in crate::fs) fn put_off(something: impl FnOnce() -> bool) -> bool {
    let put_off = WAITS.with(Cell::get) != Waits::Inside && something();
    if put_off {
        WAITS.with(|waits| waits.set(Waits::PutOff));
    }
    put_off
}

/// The same of what an operation has set free itself, a part of what it needs: it comes nearer each time.
pub(in crate::fs) fn put_off_with_a_part(something: impl FnOnce() -> bool) -> bool {
    let put_off = put_off(something);
    if put_off {
        WAITS.with(|waits| waits.set(Waits::PutOffWithAPart));
    }
    put_off
}

/// Whether the operation fails only to be tried again.
pub(in crate::fs) fn is_put_off() -> bool {
    matches!(WAITS.with(Cell::get), Waits::PutOff | Waits::PutOffWithAPart)
}

/// What keeps blocks.
pub(super) struct Keeping {
    pub writes: Vec<Arc<WriteUnderWay>>,
    pub reads: Vec<Arc<ReadUnderWay>>,
    /// Asked for, and made by a thread of their own.
    pub syncs: Option<Arc<Requested>>,
}

impl Keeping {
    /// The copy that is waited for, from the last to the first.
    pub fn last(&self) -> Option<&Copy> {
        let write = self.writes.last().map(|write| &write.copy);
        write.or_else(|| self.reads.last().map(|read| &read.copy))
    }
}

impl<M: Media> Fs<M> {
    /// Copies that are under way, and syncs where those free something.
    pub(super) fn keeping(&self) -> Keeping {
        let mut writes = Vec::new();
        for lane in &self.core.copies.lanes {
            writes.extend(lane.lock().under_way.iter().cloned());
        }
        let fs = self.this.upgrade().filter(|_| self.syncs_make_room());
        let syncs = fs.map(|fs| Requested::of(&fs, |fs, _| fs.sync_to_free()));
        Keeping { writes, reads: self.core.copies.reads.all(), syncs }
    }

    /// Whether what was freed waits for a sync that another thread can make: a model checker's threads are its own.
    pub(in crate::fs) fn syncs_make_room(&self) -> bool {
        self.core.deferring && !cfg!(shuttle) && self.has_deferred()
    }

    /// Waits for what keeps blocks now. The caller holds nothing of the file system: in a uthread others run meanwhile.
    pub fn wait_for_room(&self) {
        let Keeping { writes, reads, syncs } = self.keeping();
        writes.iter().for_each(|write| self.wait_until_over(write));
        for read in &reads {
            self.climb(&read.copy);
            self.end_read(read);
        }
        self.free_departed_beside_copies();
        if let Some(syncs) = syncs {
            // Whoever finds the pool still full is told why.
            wait::until(&*syncs, None, Holding::Nothing);
        }
    }
}
