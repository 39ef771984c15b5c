//! Shared things that are read without counting, and freed when nobody can be reading them.
//!
//! A reader is *pinned* while it follows a [`Cell`]'s pointer; what is taken out of a cell waits until every
//! thread that was pinned then has been seen unpinned, or pinned later. Epoch-based reclamation (K. Fraser,
//! Practical lock-freedom, 2004), with the dear half of the barrier on the side that frees.
//!
//! The rule: a pin notes the epoch that it began in; what is taken out is tagged with the epoch after it was
//! taken out. To free, a thread begins a new epoch, passes the heavy barrier, and frees whatever has a tag
//! below every noted epoch. A reader that found the pointer noted an epoch not above the tag, before it
//! looked: either its note is seen, or it looks after the barrier and finds the pointer gone. (It reads the
//! epoch with Acquire: a look that overtook that could find what was gone when the epoch began.)
//!
//! A cell remembers that it was filled once ([`Cell::was_filled`]): what it stands for is not to be had from
//! elsewhere any more.

use std::marker::PhantomData;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::primitive::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use super::primitive::{RwLock, RwLockReadGuard, shared_static, static_made_late};
use super::thread::NotSend;
use super::{PerThread, barrier, thread};

/// More than the pins that a thread has at a time.
const EPOCH_UNIT: u64 = 1 << 16;
/// What a thread takes out before it tries to free.
const WAITING_MAX: usize = if cfg!(shuttle) {
    2
} else if cfg!(miri) {
    8
} else {
    512
};

shared_static! {
    static EPOCH: AtomicU64 = AtomicU64::new(1);
}
shared_static! {
    /// By slot: the epoch of the outermost pin times [`EPOCH_UNIT`], and how many pins there are; 0 without any.
    static PINNED: [CachePadded<AtomicU64>; thread::SLOTS_MAX] =
        [const { CachePadded::new(AtomicU64::new(0)) }; thread::SLOTS_MAX];
}
shared_static! {
    /// For threads without a slot.
    static SLOTLESS: RwLock<()> = RwLock::new(());
}
static_made_late! {
    static WAITING: PerThread<Vec<Waiting>> = PerThread::new();
}

/// Taken out of a cell.
struct Waiting {
    tag: u64,
    /// Held for its drop.
    _thing: Arc<dyn Send + Sync>,
}

/// While it lives, nothing that its thread finds in a cell is freed.
pub struct Pin {
    note: Note,
    here: NotSend,
}

enum Note {
    Slot(&'static AtomicU64),
    Slotless { _lock: RwLockReadGuard<'static, ()> },
}

#[inline]
pub fn pin() -> Pin {
    let note = match PINNED.get(thread::slot() as usize) {
        None => Note::Slotless { _lock: SLOTLESS.read_recursive() },
        Some(note) => {
            let noted = note.load(Ordering::Relaxed);
            if noted != 0 {
                note.store(noted + 1, Ordering::Relaxed);
                return Pin { note: Note::Slot(note), here: PhantomData };
            }
            // Release: who sees this note has seen the end of the pins before it.
            note.store(EPOCH.load(Ordering::Acquire) * EPOCH_UNIT + 1, Ordering::Release);
            if barrier::is_available() {
                barrier::light();
            } else {
                fence(Ordering::SeqCst);
            }
            Note::Slot(note)
        }
    };
    Pin { note, here: PhantomData }
}

impl Drop for Pin {
    #[inline]
    fn drop(&mut self) {
        if let Note::Slot(note) = self.note {
            let noted = note.load(Ordering::Relaxed);
            // The last of them, which need not be the outermost.
            let left = if noted % EPOCH_UNIT == 1 { 0 } else { noted - 1 };
            note.store(left, Ordering::Release);
        }
    }
}

/// The address in a cell that is empty again: nothing stands in the first bytes of memory.
const EMPTIED: usize = 1;

/// Holds a shared thing, or nothing.
pub struct Cell<T> {
    /// Of an `Arc`, whose count includes this; [`EMPTIED`], or null before it was first filled.
    pointer: AtomicPtr<T>,
    owns: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> Cell<T> {
    pub const fn empty() -> Cell<T> {
        Cell { pointer: AtomicPtr::new(std::ptr::null_mut()), owns: PhantomData }
    }

    #[inline]
    pub fn get<'p>(&self, pin: &'p Pin) -> Option<&'p T> {
        let thing = self.thing(pin)?;
        // SAFETY: alive for as long as this thread is pinned, as `thing` says.
        Some(unsafe { &*thing })
    }

    /// From `Arc::into_raw` in `fill`. That count is given back by `empty_out`, through WAITING, not before this
    /// thread unpins (the file's head), or by `drop`, which has the cell alone.
    #[inline]
    fn thing(&self, _: &Pin) -> Option<*const T> {
        let pointer = self.pointer.load(Ordering::Acquire);
        (pointer.addr() > EMPTIED).then_some(pointer.cast_const())
    }

    /// Whether anything ever was in it: true for good.
    pub fn was_filled(&self) -> bool {
        !self.pointer.load(Ordering::Acquire).is_null()
    }

    /// A count of its own.
    #[inline]
    pub fn share(&self) -> Option<Arc<T>> {
        let pin = pin();
        // The pointer itself: one made from a reference to the thing would not reach its count.
        let thing = self.thing(&pin)?;
        // SAFETY: from `Arc::into_raw`, and alive as `thing` says, so the count is not 0.
        unsafe {
            Arc::increment_strong_count(thing);
            Some(Arc::from_raw(thing))
        }
    }

    /// Fills a cell that is empty, for who alone fills and empties it: without a locked instruction, which would wait
    /// for all stores before it.
    #[inline]
    pub fn fill(&self, thing: Arc<T>) {
        assert!(
            self.pointer.load(Ordering::Relaxed).addr() <= EMPTIED,
            "a cell that is filled is empty before"
        );
        self.pointer.store(Arc::into_raw(thing).cast_mut(), Ordering::Release);
    }

    /// Empties the cell. Must not be called by a thread that waits for pinned ones: it frees what it can and
    /// waits for nobody.
    pub fn empty_out(&self) {
        let pointer = self.pointer.swap(std::ptr::without_provenance_mut(EMPTIED), Ordering::SeqCst);
        if pointer.addr() <= EMPTIED {
            return;
        }
        let tag = EPOCH.load(Ordering::SeqCst);
        // SAFETY: from `Arc::into_raw` in `fill`; the swap gave its count to this call.
        let thing: Arc<dyn Send + Sync> = unsafe { Arc::from_raw(pointer) };
        let ready = {
            let mut waiting = WAITING.own().write();
            waiting.push(Waiting { tag, _thing: thing });
            if waiting.len().is_multiple_of(WAITING_MAX) { take_free(&mut waiting) } else { Vec::new() }
        };
        // With no lock held: a drop may do anything.
        drop(ready);
    }
}

impl<T: Send + Sync + 'static> Default for Cell<T> {
    fn default() -> Cell<T> {
        Cell::empty()
    }
}

impl<T> Drop for Cell<T> {
    fn drop(&mut self) {
        let pointer = *self.pointer.get_mut();
        if pointer.addr() > EMPTIED {
            // SAFETY: from `Arc::into_raw` in `fill`; who drops the cell has it alone.
            drop(unsafe { Arc::from_raw(pointer) });
        }
    }
}

/// What nobody can be reading any more.
#[cold]
fn take_free(waiting: &mut Vec<Waiting>) -> Vec<Waiting> {
    let Some(_slotless) = SLOTLESS.try_write() else { return Vec::new() };
    EPOCH.fetch_add(1, Ordering::SeqCst);
    if barrier::is_available() {
        barrier::heavy();
    } else {
        fence(Ordering::SeqCst);
    }
    let notes = PINNED[..thread::slots_used().min(thread::SLOTS_MAX)].iter();
    // Acquire: what the readers did with it comes before it is freed.
    let noted = notes.map(|note| note.load(Ordering::Acquire)).filter(|&noted| noted != 0).min();
    let oldest = noted.map(|noted| noted / EPOCH_UNIT);
    waiting.extract_if(.., |w| oldest.is_none_or(|oldest| w.tag < oldest)).collect()
}

/// Frees all that waits and nobody can be reading.
#[cfg(test)]
pub fn collect() {
    for part in WAITING.all() {
        let free = take_free(&mut part.write());
        drop(free);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    struct Thing {
        alive: AtomicBool,
        drops: Arc<AtomicUsize>,
    }

    impl Drop for Thing {
        fn drop(&mut self) {
            assert!(self.alive.swap(false, Ordering::SeqCst), "dropped once");
            self.drops.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn nothing_is_freed_under_a_reader_and_all_in_the_end() {
        let rounds = if cfg!(miri) { 5 * WAITING_MAX } else { 4 * WAITING_MAX };
        let drops = Arc::new(AtomicUsize::new(0));
        let made = AtomicUsize::new(0);
        let cells: Vec<Cell<Thing>> = (0..3).map(|_| Cell::empty()).collect();
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        for cell in &cells {
                            let outer = pin();
                            if let Some(thing) = cell.get(&outer) {
                                drop(cell.share());
                                std::hint::spin_loop();
                                assert!(thing.alive.load(Ordering::SeqCst));
                            }
                        }
                    }
                });
            }
            s.spawn(|| {
                for i in 0..rounds {
                    let cell = &cells[i % cells.len()];
                    let thing = Thing { alive: AtomicBool::new(true), drops: drops.clone() };
                    cell.fill(Arc::new(thing));
                    made.fetch_add(1, Ordering::Relaxed);
                    cell.empty_out();
                }
                done.store(true, Ordering::Relaxed);
            });
        });
        let given_up = std::time::Instant::now() + std::time::Duration::from_secs(60);
        // Other tests of the process may be pinned meanwhile, or hold back nothing: then all are gone.
        let gone = loop {
            collect();
            match drops.load(Ordering::SeqCst) {
                0 if !cfg!(miri) && std::time::Instant::now() < given_up => std::thread::yield_now(),
                gone => break gone,
            }
        };
        assert!(gone <= made.load(Ordering::SeqCst) && (gone > 0 || cfg!(miri)), "{gone}");
    }

    #[test]
    fn pins_may_end_in_any_order() {
        let note = &PINNED[thread::slot() as usize];
        let (outer, inner) = (pin(), pin());
        let epoch = note.load(Ordering::Relaxed) / EPOCH_UNIT;
        drop(outer);
        assert_eq!(note.load(Ordering::Relaxed) / EPOCH_UNIT, epoch, "still pinned by the inner one");
        drop((pin(), inner));
        assert_eq!(note.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_cell_remembers_that_it_was_filled() {
        let cell = Cell::empty();
        assert!(!cell.was_filled());
        for i in 0..3 {
            cell.fill(Arc::new(i));
            assert_eq!(cell.get(&pin()), Some(&i));
            cell.empty_out();
            assert!(cell.share().is_none() && cell.was_filled());
            cell.empty_out();
        }
    }

    #[test]
    fn a_full_cell_stays_and_a_dropped_one_frees() {
        let drops = Arc::new(AtomicUsize::new(0));
        let thing = || Arc::new(Thing { alive: AtomicBool::new(true), drops: drops.clone() });
        let cell = Cell::empty();
        assert!(cell.share().is_none());
        cell.fill(thing());
        let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cell.fill(thing())));
        assert!(again.is_err());
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        let held = cell.share().expect("it is full");
        drop(cell);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        drop(held);
        assert_eq!(drops.load(Ordering::SeqCst), 2);
    }
}
