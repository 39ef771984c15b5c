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
//! 4. When all children have ended or executed something, the parent's frozen units *thaw*: one of which nothing is in use
//!    is as good as new; the others get their copies back from DRAM if the process has one thread, which nobody
//!    can overtake then. In a process of several threads what was stored after a fork into what was there before it stays
//!    in DRAM until it is freed.
//!
//! How does a parent know that its children are gone? Before a fork it opens the media once more, locks a byte behind
//! all data with that, and maps a page of it; after the fork it lets go of both. The lock is then the child's, who does
//! not know of it, and the kernel's to drop.
//!
//! Device-dax and hugetlbfs have no private mappings (or none that are sure of their pages). There a process of one thread
//! stands its pages aside in DRAM, forks, and takes them back: a copy for each fork. One of several threads cannot do
//! so, since others would go on writing: its child has no such memory at all (`MADV_DONTFORK`), and faults where it
//! touches it, rather than write its parent's. [`permitted`] says so beforehand.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};

use super::gate::Gate;
use super::ground::{Ground, lock, witness_offset};
use super::heap::{Heap, Place};
use crate::limits::MEMORIES_MAX;

/// Every heap of this process: found without a lock by who asks whether a fork is possible.
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

fn heaps() -> impl Iterator<Item = &'static Heap> {
    // SAFETY: a heap unregisters before it ends, which waits for a fork that is under way.
    HEAPS.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

/// Whether a fork now would leave the child all memory: false in a process of several threads, with memory on media of
/// which the kernel maps no private copies.
pub fn permitted() -> bool {
    let exact =
        |heap: &Heap| heap.ground.enter().is_none_or(|ground| ground.copies_on_write || ground.owned == 0);
    heaps().all(exact) || is_single_thread()
}

/// Whether an address is of some heap's ground.
pub(super) fn on_media(address: usize) -> bool {
    heaps().any(|heap| heap.place(address) != Place::Dram)
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
    for heap in heaps() {
        let mut ground = heap.ground.open_in_child();
        ground.become_child();
        heap.inherit(ground.base);
    }
    REGISTRY.let_go();
}

impl Ground {
    fn prepare_fork(&mut self) {
        if self.inherited || self.owned == 0 {
            return;
        }
        if self.copies_on_write {
            self.freeze();
        } else if is_single_thread() {
            self.stand_aside();
        }
    }

    /// Step 1 of the file's head.
    fn freeze(&mut self) {
        let mut from = 0;
        let in_use = |unit: &super::ground::Unit| unit.owned && unit.held > 0 && !unit.frozen;
        while let Some((at, count)) = self.runs(in_use, from) {
            // Where it fails these units stay shared, and the child is without them.
            if self.map_private(at, count) {
                self.freeze_units(at, count);
            }
            from = at + count;
        }
        if self.frozen > 0 && self.witness.is_none() {
            self.witness = self.bear_witness();
            self.unwitnessed |= self.witness.is_none();
        }
    }

    /// A lock that lasts as long as the child maps a page.
    fn bear_witness(&self) -> Option<(i32, usize)> {
        let file = self.open_again()?;
        if !lock(file.as_raw_fd(), libc::F_RDLCK, witness_offset(), 1) {
            return None;
        }
        // SAFETY: a new mapping that nobody touches.
        let page = unsafe { mmap(null_mut(), 1, ProtFlags::empty(), MapFlags::PRIVATE, &file, 0) }.ok()?;
        Some((file.into_raw_fd(), page.expose_provenance()))
    }

    fn after_fork(&mut self) {
        if let Some((file, page)) = self.witness.take() {
            // SAFETY: both are from `bear_witness`, and the child has them now.
            unsafe {
                drop(OwnedFd::from_raw_fd(file));
                let _ = munmap(with_exposed_provenance_mut(page), 1);
            }
        }
        self.take_back();
    }

    /// In the child all that is the parent's stays as it is, to be read, written and freed; nothing is added to it.
    fn become_child(&mut self) {
        if let Some((file, _)) = self.witness.take() {
            // SAFETY: from `bear_witness`. The page stays mapped, and is what keeps the lock.
            drop(unsafe { OwnedFd::from_raw_fd(file) });
        }
        for unit in &mut self.units {
            unit.aside = false;
        }
        self.inherited = true;
    }

    /// Step 4 of the file's head. True where something was won.
    pub(super) fn thaw(&mut self) -> bool {
        if self.has_children() {
            return false;
        }
        let alone = is_single_thread();
        let mut won = false;
        for unit in 0..self.units.len() {
            let found = self.units[unit];
            if !found.frozen || (found.held > 0 && !(alone && self.copy_back(unit))) {
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

    #[test]
    fn threads_are_counted() {
        let before = thread_count().unwrap();
        assert!(before >= 1);
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || stopped.recv());
            assert!(thread_count().unwrap() >= 2);
            drop(stop);
        });
    }
}
