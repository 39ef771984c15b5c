//! What a fork does to memory on media: parent and child each see their own, from the instant of the fork on.
//!
//! Memory on media is mapped shared, for else stores would not reach it, and what is mapped shared a child shares: both
//! would write one heap. `fork` promises each a copy, and most children execute another program at once, so the copy must
//! cost nothing until somebody writes. The kernel does that for private mappings of a file. So:
//!
//! 1. *Before* the fork, units of which something is handed out are mapped again, private, over the same bytes. Nobody sees a
//!    difference, whatever other threads do meanwhile: a page holds the same before and after, and the kernel
//!    changes the mapping of a range as one step. From now on they are *frozen*: stores go to copies of pages in
//!    DRAM, and nobody writes these bytes of the media.
//! 2. The fork is then an ordinary one, and exact: the kernel copies on write, in both.
//! 3. The parent's next allocations get units that it claims anew, shared again; the child's get its own claims, at other
//!    addresses. The lock on frozen units lasts as long as anybody maps them (`ground`).
//! 4. When all children have ended or executed something, the parent's frozen units *thaw* as it needs more: those of which
//!    nothing is in use, which are as good as new. What was stored after a fork into what was there before it stays in DRAM
//!    until it is freed. Who says that nothing is under way there (`Memory::trim`) gets the others back too, in a process
//!    of one thread: their copies are taken to the media, and nobody overtakes that. It is not done unasked, because the
//!    kernel itself may be storing there, into pages that it keeps hold of whatever is mapped (direct I/O under way).
//!
//! How does a parent know that its children are gone? Before a fork it opens the media once more, locks a byte behind
//! all data with that, and maps a page of it; after the fork it lets go of both. The lock is then the child's, and the kernel's
//! to drop. The open file serves the child as its own where it has no rights to open one. Units that are frozen at a fork for
//! which the media could not be opened stay so.
//!
//! Handlers cannot refuse a fork. Who can, asks [`prepare_fork`] first: it freezes what there is, and says whether that went.
//!
//! Device-dax and hugetlbfs have no private mappings (or none that are sure of their pages). There a process of one thread
//! stands its pages aside in DRAM, forks, and takes them back: a copy for each fork. One of several threads cannot do
//! so, since others would go on writing: its child has no such memory at all (`MADV_DONTFORK`), and faults where it
//! touches it, rather than write its parent's.

use std::os::fd::AsRawFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use super::descriptors::{self, Descriptor};
use super::gate::Gate;
use super::ground::{Ground, lock, process, witness_offset};
use super::heap::Heap;
use crate::limits::MEMORIES_MAX;

/// Every heap of this process. Only who is inside of [`REGISTRY`] may look at one: outside it may just end.
static HEAPS: [AtomicPtr<Heap>; MEMORIES_MAX] = [const { AtomicPtr::new(null_mut()) }; MEMORIES_MAX];
/// Held from before a fork to after it, so that no heap comes or goes, and one thread forks at a time. It is never asked for in
/// an allocation, and so never by who holds a lock of jemalloc's that a fork waits for: where jemalloc's handler runs
/// before ours, no second fork comes to ours.
static REGISTRY: Gate<()> = Gate::new(());

/// From now on forks see to a heap. False where there are too many.
pub(super) fn register(heap: &Heap) -> bool {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers do what handlers may: they make system calls and change what is theirs. It fails for want
        // of memory only, and then children have none of it (MADV_DONTFORK).
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
    let _alone = REGISTRY.enter();
    let free = HEAPS.iter().find(|slot| slot.load(Ordering::Relaxed).is_null());
    if let Some(slot) = free {
        slot.store((&raw const *heap).cast_mut(), Ordering::Release);
    }
    free.is_some()
}

pub(super) fn unregister(heap: &Heap) {
    let _alone = REGISTRY.enter();
    for slot in &HEAPS {
        if std::ptr::eq(slot.load(Ordering::Relaxed), heap) {
            slot.store(null_mut(), Ordering::Relaxed);
        }
    }
}

/// For who is inside of [`REGISTRY`], or holds it.
fn heaps() -> impl Iterator<Item = &'static Heap> {
    // SAFETY: a heap unregisters before it ends, which waits for who is inside.
    HEAPS.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

/// Why a fork would not leave the child all memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForkRefused {
    /// The process has several threads, and memory on media of which the kernel maps no private copies: ENOSYS.
    Threads,
    /// The kernel maps no more private memory, or no more mappings (RLIMIT_DATA, vm.overcommit_memory,
    /// vm.max_map_count): ENOMEM.
    Memory,
}

/// For who is about to fork, and can do without: does beforehand what handlers do, and says whether the child will have all
/// memory. What other threads allocate between this and the fork may still be missing there.
pub fn prepare_fork() -> Result<(), ForkRefused> {
    let _alone = REGISTRY.enter();
    for heap in heaps() {
        let Some(mut ground) = heap.ground.enter() else { continue };
        if ground.is_foreign() || ground.inherited || ground.owned == 0 {
            continue;
        }
        if !ground.copies_on_write && !is_single_thread() {
            return Err(ForkRefused::Threads);
        }
        if ground.copies_on_write && !ground.freeze() {
            return Err(ForkRefused::Memory);
        }
    }
    Ok(())
}

extern "C" fn before() {
    REGISTRY.hold();
    for heap in heaps() {
        heap.ground.close().prepare_fork();
    }
}

extern "C" fn in_parent() {
    for heap in heaps() {
        heap.ground.open().after_fork();
    }
    REGISTRY.let_go();
}

extern "C" fn in_child() {
    descriptors::in_child();
    for heap in heaps() {
        let mut ground = heap.ground.open_in_child();
        ground.become_child();
        heap.inherit(ground.base);
    }
    REGISTRY.let_go();
}

impl Ground {
    fn prepare_fork(&mut self) {
        if self.is_foreign() || self.inherited || self.owned == 0 {
            return;
        }
        if self.copies_on_write {
            self.freeze();
            self.bear_witness();
            self.advise_frozen(Advice::LinuxDoFork);
        } else if is_single_thread() {
            self.stand_aside();
        }
    }

    /// Step 1 of the file's head. False where some units stay shared, because the kernel maps no private copies just now: a
    /// child would be without them.
    fn freeze(&mut self) -> bool {
        let (mut from, mut all) = (0, true);
        let in_use = |unit: &super::ground::Unit| unit.owned && unit.held > 0 && !unit.frozen;
        while let Some((at, count)) = self.runs(in_use, from) {
            let frozen = self.map_private(at, count);
            if frozen {
                self.freeze_units(at, count);
            }
            all &= frozen;
            from = at + count;
        }
        all
    }

    /// Makes what lasts as long as the child maps a page.
    fn bear_witness(&mut self) {
        if self.frozen == 0 || self.witness.is_some() {
            return;
        }
        self.witness = self.open_witness();
        if self.witness.is_none() {
            self.units.iter_mut().filter(|unit| unit.frozen).for_each(|unit| unit.unseen = true);
        }
    }

    fn open_witness(&mut self) -> Option<(Descriptor, usize)> {
        let file = Descriptor::new(self.open_or_spare()?, self.identity)?;
        let made = file.get().filter(|file| lock(file.as_raw_fd(), libc::F_RDLCK, witness_offset(), 1));
        // SAFETY: a new mapping that nobody touches.
        let map = |file| unsafe { mmap(null_mut(), 1, ProtFlags::empty(), MapFlags::PRIVATE, file, 0) };
        match made.and_then(|file| map(file).ok()) {
            Some(page) => Some((file, page.expose_provenance())),
            None => {
                drop(file.into_file());
                None
            }
        }
    }

    fn after_fork(&mut self) {
        if let Some((file, page)) = self.witness.take() {
            drop(file.into_file());
            // SAFETY: from `open_witness`, and the child has it now.
            let _ = unsafe { munmap(with_exposed_provenance_mut(page), 1) };
        }
        self.advise_frozen(Advice::LinuxDontFork);
        self.take_back();
    }

    /// Children that no handler told have nothing of what is frozen either: they left no witness, and it would change below
    /// them as it thaws.
    fn advise_frozen(&self, advice: Advice) {
        // What is a parent's stays as it is.
        if self.is_foreign() || self.inherited {
            return;
        }
        let mut from = 0;
        while let Some((at, count)) = self.runs(|unit| unit.frozen, from) {
            from = at + count;
            let start = with_exposed_provenance_mut(self.unit_address(at));
            // SAFETY: mappings of ours; what their pages hold stays.
            let _ = unsafe { madvise(start, count * self.unit_bytes, advice) };
        }
    }

    /// In the child all that is the parent's stays as it is, to be read, written and freed; nothing is added to it.
    fn become_child(&mut self) {
        // One open file for both would be one owner of locks.
        self.drop_spares();
        // The page stays mapped, and is what keeps the lock.
        self.handed = self.witness.take().map(|(file, _)| file);
        for unit in &mut self.units {
            unit.aside = false;
        }
        self.process = process();
        self.inherited = true;
    }

    /// Step 4 of the file's head, with what is in use or without. True where something was won.
    pub(super) fn thaw(&mut self, in_use: bool) -> bool {
        if self.frozen == 0 || self.inherited || self.has_children() {
            return false;
        }
        let alone = in_use && is_single_thread();
        let mut won = false;
        for unit in 0..self.units.len() {
            let found = self.units[unit];
            if !found.frozen || found.unseen || (found.held > 0 && !(alone && self.copy_back(unit))) {
                continue;
            }
            if self.map_shared(unit, 1) {
                self.unfreeze(unit);
                won = true;
            }
        }
        won
    }

    /// Copies what a frozen unit holds to the media. For processes of one thread.
    fn copy_back(&mut self, unit: usize) -> bool {
        let alias = self.map_alias(unit, 1);
        if alias.is_null() {
            return false;
        }
        // SAFETY: both are mapped, and there is nobody but this thread.
        unsafe {
            self.copy_held(unit, 1, with_exposed_provenance_mut(self.unit_address(unit)), alias);
            let _ = munmap(alias.cast(), self.unit_bytes);
        }
        true
    }

    /// Puts a copy in DRAM in the place of what is handed out. For processes of one thread.
    fn stand_aside(&mut self) {
        let mut from = 0;
        while let Some((at, count)) = self.runs(|unit| unit.owned && unit.held > 0, from) {
            from = at + count;
            let bytes = count * self.unit_bytes;
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping.
            let Ok(copy) = (unsafe { mmap_anonymous(null_mut(), bytes, prot, flags) }) else { continue };
            let place = with_exposed_provenance_mut::<std::ffi::c_void>(self.unit_address(at));
            // SAFETY: both are as long as the units, and there is nobody but this thread; the copy takes the place of what
            // it is a copy of.
            let moved = unsafe {
                self.copy_held(at, count, place.cast(), copy.cast());
                mremap_fixed(copy, bytes, bytes, MremapFlags::MAYMOVE, place)
            };
            if moved.is_ok() {
                self.units[at..at + count].iter_mut().for_each(|unit| unit.aside = true);
            }
        }
    }

    /// Undoes `stand_aside`; what was stored meanwhile is kept.
    fn take_back(&mut self) {
        let mut from = 0;
        while let Some((at, count)) = self.runs(|unit| unit.aside, from) {
            from = at + count;
            let alias = self.map_alias(at, count);
            if alias.is_null() {
                // They stay in DRAM.
                continue;
            }
            // SAFETY: both are mapped, and there is nobody but this thread.
            unsafe {
                self.copy_held(at, count, with_exposed_provenance_mut(self.unit_address(at)), alias);
                let _ = munmap(alias.cast(), count * self.unit_bytes);
            }
            if self.map_shared(at, count) {
                self.units[at..at + count].iter_mut().for_each(|unit| unit.aside = false);
            }
        }
    }
}

/// Whether the calling thread is the only one of its process, as the kernel counts them. One that was joined may be
/// counted for a moment longer.
fn is_single_thread() -> bool {
    const LOOKS_MAX: u32 = 20;
    for look in 0..LOOKS_MAX {
        match thread_count() {
            Some(1) => return true,
            Some(2) if look + 1 < LOOKS_MAX => std::thread::yield_now(),
            _ => return false,
        }
    }
    false
}

/// Field 20 of /proc/self/stat, read without an allocation.
fn thread_count() -> Option<u32> {
    const NAME_CLOSES_TO_COUNT: usize = 18;
    let mut text = [0; 512];
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/self/stat", flags, rustix::fs::Mode::empty()).ok()?;
    let read = rustix::io::read(&file, &mut text).ok()?;
    // The second field is a name in brackets that may hold anything.
    let fields = &text[text[..read].iter().rposition(|byte| *byte == b')')?..read];
    let count = fields.split(|byte| *byte == b' ').nth(NAME_CLOSES_TO_COUNT)?;
    std::str::from_utf8(count).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wsp::memory::tests::{alone, fork};

    #[test]
    fn threads_are_counted() {
        let _alone = alone();
        // A child has one thread, whatever the tests have.
        fork(
            || {
                let before = thread_count();
                let (stop, stopped) = std::sync::mpsc::channel::<()>();
                let second = std::thread::spawn(move || stopped.recv());
                let during = (thread_count(), is_single_thread());
                drop(stop);
                let _ = second.join();
                (before, during) == (Some(1), (Some(2), false)) && is_single_thread()
            },
            || {},
        );
    }
}
