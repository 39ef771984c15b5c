//! Shared things that are read without counting, and freed when nobody can be reading them.
//!
//! A reader is *pinned* while it follows a [`Cell`]'s pointer; what is taken out of a cell waits until every
//! thread that was pinned then has been seen unpinned, or pinned later. Epoch-based reclamation (K. Fraser,
//! Practical lock-freedom, 2004), with the dear half of the barrier on the side that frees.
//!
//! The rule: a pin notes the epoch that it began in; what is taken out is tagged with the epoch after it was
//! taken out. To free, a thread begins a new epoch, passes the heavy barrier, and frees whatever has a tag
//! below every noted epoch. A reader that found the pointer noted an epoch not above the tag, before it
//! looked: either its note is seen, or it looks after the barrier and finds the pointer gone.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::{Arc, LazyLock};

use crossbeam_utils::CachePadded;
use parking_lot::{RwLock, RwLockReadGuard};

use super::thread::NotSend;
use super::{PerThread, barrier, thread};

/// What a thread takes out before it tries to free.
const WAITING_MAX: usize = 512;

static EPOCH: AtomicU64 = AtomicU64::new(1);
/// By slot: the epoch of the pin, or 0.
static PINNED: [CachePadded<AtomicU64>; thread::SLOTS_MAX] =
    [const { CachePadded::new(AtomicU64::new(0)) }; thread::SLOTS_MAX];
/// For threads without a slot.
static SLOTLESS: RwLock<()> = RwLock::new(());
static WAITING: LazyLock<PerThread<Vec<Waiting>>> = LazyLock::new(PerThread::new);

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
    /// An outer pin of the thread does it.
    Nested,
    Slotless {
        _lock: RwLockReadGuard<'static, ()>,
    },
}

#[inline]
pub fn pin() -> Pin {
    let note = match PINNED.get(thread::slot() as usize) {
        None => Note::Slotless { _lock: SLOTLESS.read_recursive() },
        Some(note) if note.load(Ordering::Relaxed) != 0 => Note::Nested,
        Some(note) => {
            note.store(EPOCH.load(Ordering::Relaxed), Ordering::Relaxed);
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
            note.store(0, Ordering::Release);
        }
    }
}

/// Holds a shared thing, or nothing.
pub struct Cell<T> {
    /// Of an `Arc`, whose count includes this.
    pointer: AtomicPtr<T>,
    owns: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> Cell<T> {
    pub const fn empty() -> Cell<T> {
        Cell { pointer: AtomicPtr::new(std::ptr::null_mut()), owns: PhantomData }
    }

    #[inline]
    pub fn get<'p>(&self, _: &'p Pin) -> Option<&'p T> {
        let pointer = self.pointer.load(Ordering::Acquire);
        // SAFETY: null, or from `Arc::into_raw` in `fill`. That count is given back by `empty_out`, through
        // WAITING, not before this thread unpins (the file's head), or by `drop`, which has the cell alone.
        unsafe { pointer.as_ref() }
    }

    /// A count of its own.
    #[inline]
    pub fn share(&self) -> Option<Arc<T>> {
        let pin = pin();
        let thing = std::ptr::from_ref(self.get(&pin)?);
        // SAFETY: from `Arc::into_raw`, and alive as `get` says, so the count is not 0.
        unsafe {
            Arc::increment_strong_count(thing);
            Some(Arc::from_raw(thing))
        }
    }

    /// Fills an empty cell; hands the thing back if it is not.
    pub fn fill(&self, thing: Arc<T>) -> Result<(), Arc<T>> {
        let pointer = Arc::into_raw(thing).cast_mut();
        let null = std::ptr::null_mut();
        match self.pointer.compare_exchange(null, pointer, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            // SAFETY: from `Arc::into_raw` just above, and stored nowhere.
            Err(_) => Err(unsafe { Arc::from_raw(pointer) }),
        }
    }

    /// Empties the cell. Must not be called by a thread that waits for pinned ones: it frees what it can and
    /// waits for nobody.
    pub fn empty_out(&self) {
        let pointer = self.pointer.swap(std::ptr::null_mut(), Ordering::SeqCst);
        if pointer.is_null() {
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

impl<T> Drop for Cell<T> {
    fn drop(&mut self) {
        let pointer = *self.pointer.get_mut();
        if !pointer.is_null() {
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
    let oldest = notes.map(|note| note.load(Ordering::Acquire)).filter(|&e| e != 0).min();
    waiting.extract_if(.., |w| oldest.is_none_or(|oldest| w.tag < oldest)).collect()
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
        let rounds = if cfg!(miri) { 20 } else { 4 * WAITING_MAX };
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
                    cell.fill(Arc::new(thing)).ok().expect("it is empty");
                    made.fetch_add(1, Ordering::Relaxed);
                    cell.empty_out();
                }
                done.store(true, Ordering::Relaxed);
            });
        });
        for part in WAITING.all() {
            let free = take_free(&mut part.write());
            drop(free);
        }
        // Other tests of the process may be pinned meanwhile, or hold back nothing: then all are gone.
        let gone = drops.load(Ordering::SeqCst);
        assert!(gone <= made.load(Ordering::SeqCst) && (gone > 0 || cfg!(miri)), "{gone}");
    }

    #[test]
    fn a_full_cell_stays_and_a_dropped_one_frees() {
        let drops = Arc::new(AtomicUsize::new(0));
        let thing = || Arc::new(Thing { alive: AtomicBool::new(true), drops: drops.clone() });
        let cell = Cell::empty();
        assert!(cell.share().is_none());
        assert!(cell.fill(thing()).is_ok());
        assert!(cell.fill(thing()).is_err());
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        let held = cell.share().expect("it is full");
        drop(cell);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        drop(held);
        assert_eq!(drops.load(Ordering::SeqCst), 2);
    }
}
