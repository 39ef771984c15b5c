//! Memory type: a program's memory on slow memory, chosen for each allocation, or for all of an unmodified program.
//!
//! After WSP §4: an application says which type of memory it allocates, an administrator changes the default for those
//! that do not, and `malloc` is jemalloc's. A [`Memory`] is jemalloc's arenas whose extents lie on a file or device. It
//! is memory, not storage: what it holds means nothing when the process has ended, nothing is flushed, and several
//! processes use one media, each what it claimed of it.
//!
//! - [`Memory::alloc`] and its kin choose for one allocation.
//! - [`Memory::scope`] chooses for what a closure allocates, in a program whose global allocator is [`ByScope`].
//! - [`Memory::replace_default`] moves the whole program, as `lode run --heap` does from outside.
//!
//! jemalloc *retains* addresses unless its options say `retain:false`, which only the program can: they are read when jemalloc is
//! first called, from the symbol `_rjem_malloc_conf`. It then takes up to a fifth more than it needs for a large
//! allocation, and keeps the rest for smaller ones of the same arena, DRAM too where the media was full. All of ours say so.
//!
//! Files: `extents` which pages are free, `ground` which units of the media are ours, `descriptors` by which open file,
//! `gate` the lock around them, `heap` media or DRAM, `fork` what a child sees, `hooks` how jemalloc is told, `statistics`
//! who has what.
//!
//! It relies on `media::tract` for the file itself, and on the kernel's locks on open files and private mappings.

mod descriptors;
mod extents;
mod fork;
mod gate;
mod ground;
mod heap;
mod hooks;
mod statistics;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ffi::c_int;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use parking_lot::Mutex;
use tikv_jemalloc_sys as jemalloc;

pub use fork::{ForkRefused, prepare_fork};
pub use heap::Full;
pub use hooks::options_text;
pub use statistics::{ArenaStatistics, Statistics};

use crate::error::{Error, Result};
use crate::limits::MEMORY_ARENAS_MAX;
use crate::media::Tract;
use crate::quote::Shown;
use crate::wait::is_uthread;
use ground::Ground;
use heap::Heap;
use hooks::Arena;

/// How to open a memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryOptions {
    /// A file is made where there is none, and is so long at least, in bytes; no more of it is used. None: what is there, as
    /// long as it is. Blocks are taken from the host as memory is used.
    pub size: Option<u64>,
    /// What an allocation gets when the media is full.
    pub full: Full,
    /// Arenas [default: one for each CPU, at most [`MEMORY_ARENAS_MAX`]].
    pub arenas: Option<usize>,
}

/// Memory on a media. See the file's head.
///
/// All of it ends with this, whatever is still in use. Any thread may use it. After a fork the child has it as it was, as
/// with any memory, and what it allocates is its own.
pub struct Memory {
    /// In boxes, because jemalloc and the handlers of a fork know their addresses. Lanes before what they stand on.
    lanes: Vec<Lane>,
    heap: Box<Heap>,
    name: String,
    /// The arenas are those that all other allocations use.
    replaced: bool,
}

/// An arena with a cache of its free blocks, used by one CPU most of the time.
struct Lane {
    index: usize,
    /// The number of jemalloc's cache; who finds it taken does without. None in a memory that is everybody's, whose threads
    /// have caches of their own.
    cache: Option<Mutex<usize>>,
    arena: Box<Arena>,
}

impl Memory {
    /// Opens the file or device at `path`: a regular file, on a DAX mount, tmpfs or hugetlbfs too, a block device, a
    /// device-dax node. Others may use it as memory at the same time, each their own part.
    ///
    /// EEXIST where it holds a pool or other data, EBUSY where somebody has it alone, EINVAL where it is too small, ENOENT where
    /// it is to be made and no size says how long, ENOMEM, EMFILE where too many memories are open, and whatever the host
    /// answers.
    pub fn open(path: &Path, options: &MemoryOptions) -> Result<Memory> {
        let mut memory = Memory::on(Tract::open(path, options.size)?, options)?;
        for _ in 0..arenas_wanted(options) {
            let lane = memory.lane()?;
            memory.lanes.push(lane);
        }
        Ok(memory)
    }

    /// Anonymous memory of so many bytes, to try things with: DRAM that is handled as a media is.
    pub fn memfd(bytes: u64, options: &MemoryOptions) -> Result<Memory> {
        let mut memory = Memory::on(Tract::memfd(bytes)?, options)?;
        for _ in 0..arenas_wanted(options) {
            let lane = memory.lane()?;
            memory.lanes.push(lane);
        }
        Ok(memory)
    }

    /// Makes this the memory of all that is allocated by jemalloc in this process from now on; what was allocated before stays
    /// where it is. The number of arenas is jemalloc's (`narenas`). Errors as with [`open`](Memory::open), and EINVAL where
    /// jemalloc's options do not say `oversize_threshold:0`.
    ///
    /// It lasts as long as the process, since who knows what is in use.
    pub fn replace_default(path: &Path, options: &MemoryOptions) -> Result<&'static Memory> {
        if hooks::sets_large_apart()? {
            let message =
                "jemalloc keeps large allocations apart: have _rjem_malloc_conf say oversize_threshold:0";
            return Err(Error::message(libc::EINVAL, "wsp::memory::replace_default", message));
        }
        let mut memory = Memory::on(Tract::open(path, options.size)?, options)?;
        memory.replaced = true;
        for index in 0..hooks::automatic_arenas()? {
            // SAFETY: the heap lasts as long as the process: see below.
            let arena = Box::new(unsafe { Arena::new(&raw const *memory.heap) });
            memory.lanes.push(Lane { index, cache: None, arena });
        }
        let memory: &'static Memory = Box::leak(Box::new(memory));
        for lane in &memory.lanes {
            lane.arena.adopt(lane.index)?;
        }
        Ok(memory)
    }

    /// Whether memory can be opened here, without doing so; a file is made, and its label, as [`open`](Memory::open) does.
    pub fn check(path: &Path, size: Option<u64>) -> Result<()> {
        Tract::open(path, size).map(drop)
    }

    fn on(tract: Tract, options: &MemoryOptions) -> Result<Memory> {
        let name = tract.path.shown().to_string();
        let heap = Heap::new(Ground::new(tract)?, options.full).map(Box::new);
        let Some(heap) = heap.filter(|heap| fork::register(heap)) else {
            let message = "too many memories are open in this process: close some";
            return Err(Error::message(libc::EMFILE, "wsp::memory::open", message));
        };
        Ok(Memory { lanes: Vec::new(), heap, name, replaced: false })
    }

    fn lane(&self) -> Result<Lane> {
        // SAFETY: the lanes end before the heap does.
        let arena = Box::new(unsafe { Arena::new(&raw const *self.heap) });
        let index = arena.create()?;
        let cache = hooks::make_cache().inspect_err(|_| {
            // Nothing was allocated from it.
            let _ = hooks::end(index);
        })?;
        Ok(Lane { index, cache: Some(Mutex::new(cache)), arena })
    }

    /// What it is, for people: the path of its media.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether an address lies on the media, or did so in the process that forked this one.
    pub fn contains(&self, at: *const u8) -> bool {
        self.heap.place(at.addr()) != heap::Place::Dram
    }

    /// Memory for `layout`; none where there is none left. A size of 0 gets an address as any other.
    pub fn alloc(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.get(layout, 0)
    }

    /// As [`alloc`](Memory::alloc), and it reads as zeros.
    pub fn alloc_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.get(layout, jemalloc::MALLOCX_ZERO)
    }

    fn get(&self, layout: Layout, flags: c_int) -> Option<NonNull<u8>> {
        let flags = flags | alignment_flag(layout.align(), layout.size());
        let got = self.with_lane(|lane| {
            // SAFETY: the size is not 0, and the flags name an arena and a cache of ours.
            unsafe { jemalloc::mallocx(layout.size().max(1), flags | lane) }
        });
        NonNull::new(got.cast())
    }

    /// Gives memory back.
    ///
    /// # Safety
    ///
    /// It is of this memory, and nobody uses it afterwards.
    pub unsafe fn dealloc(&self, at: NonNull<u8>) {
        self.with_lane(|lane| {
            // To free into a cache no arena is named.
            let cache = lane & CACHE_BITS;
            // SAFETY: by contract; the flags name a cache of ours, or none.
            unsafe { jemalloc::dallocx(at.as_ptr().cast(), cache) }
        });
    }

    /// Makes memory larger or smaller, at the same place or another; what it holds stays, as far as there is room. None where
    /// there is none left: then all is as before.
    ///
    /// # Safety
    ///
    /// It is of this memory, and nobody uses the old place afterwards where there is a new one.
    pub unsafe fn realloc(&self, at: NonNull<u8>, align: usize, bytes: usize) -> Option<NonNull<u8>> {
        let flags = alignment_flag(align, bytes);
        let got = self.with_lane(|lane| {
            // SAFETY: by contract; the size is not 0.
            unsafe { jemalloc::rallocx(at.as_ptr().cast(), bytes.max(1), flags | lane) }
        });
        NonNull::new(got.cast())
    }

    /// How many bytes there really are behind an address.
    ///
    /// # Safety
    ///
    /// It is of this memory, and in use.
    pub unsafe fn usable_bytes(&self, at: NonNull<u8>) -> usize {
        // SAFETY: by contract.
        unsafe { jemalloc::sallocx(at.as_ptr().cast(), 0) }
    }

    /// Runs `call` with the flags of this CPU's lane, its cache for itself if that is free.
    fn with_lane<R>(&self, call: impl FnOnce(c_int) -> R) -> R {
        let lane = &self.lanes[current_cpu() % self.lanes.len()];
        let arena = jemalloc::MALLOCX_ARENA(lane.index);
        // Never waited for: in the child of a fork its owner may be a thread that is not there.
        match lane.cache.as_ref().and_then(Mutex::try_lock) {
            Some(cache) => call(arena | jemalloc::MALLOCX_TCACHE(*cache)),
            None => call(arena | jemalloc::MALLOCX_TCACHE_NONE),
        }
    }

    /// Runs `run`, and what it allocates in this thread by a global allocator that is [`ByScope`] lies here. Scopes may
    /// stand in scopes: the innermost counts. What it frees goes where it came from, whatever the scope.
    ///
    /// For ever, because what was allocated lives on after the scope. Panics in a uthread: others of its worker that run where it
    /// waits would be in the scope, too. There [`alloc`](Memory::alloc) chooses.
    pub fn scope<R>(&'static self, run: impl FnOnce() -> R) -> R {
        assert!(!is_uthread(), "a uthread has no memory scope: others of its thread would be in it");
        struct Back(Option<&'static Memory>);
        impl Drop for Back {
            fn drop(&mut self) {
                SCOPE.set(self.0);
            }
        }
        let _back = Back(SCOPE.replace(Some(self)));
        run()
    }

    /// Gives what is kept for later allocations back to the host and to other processes, and takes what forks left in DRAM
    /// back to the media: that of which nothing is in use, and in a process of one thread all of it.
    ///
    /// Not while the kernel stores into blocks of this memory by itself: direct or asynchronous I/O under way, buffers
    /// registered for it. What it stores then is lost.
    pub fn trim(&self) -> Result<()> {
        // A cache has blocks of any arena of this memory.
        for cache in self.lanes.iter().filter_map(|lane| lane.cache.as_ref()) {
            if let Some(cache) = cache.try_lock() {
                hooks::flush_cache(*cache)?;
            }
        }
        self.lanes.iter().try_for_each(|lane| hooks::purge(lane.index))?;
        if let Some(mut ground) = self.heap.ground.enter() {
            ground.thaw(true);
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        assert!(!self.replaced, "the memory of all allocations lasts as long as the process");
        fork::unregister(&self.heap);
        // A cache has blocks of any arena of this memory: all of them end before the first arena does.
        for cache in self.lanes.iter().filter_map(|lane| lane.cache.as_ref()) {
            // In the child of a fork one may be in the hands of a thread that is not there: it is left alone.
            if let Some(cache) = cache.try_lock() {
                hooks::end_cache(*cache).expect("jemalloc ends what it made");
            }
        }
        for lane in &self.lanes {
            hooks::end(lane.index).expect("jemalloc ends what it made");
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("name", &self.name)
            .field("lanes", &self.lanes.len())
            .finish_non_exhaustive()
    }
}

// SAFETY: jemalloc's functions keep the contract of an allocator; the layout is rounded up only.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.get(layout, 0).map_or(null_mut(), NonNull::as_ptr)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.get(layout, jemalloc::MALLOCX_ZERO).map_or(null_mut(), NonNull::as_ptr)
    }

    unsafe fn dealloc(&self, at: *mut u8, _layout: Layout) {
        // SAFETY: the caller's: allocated here, and so not null.
        unsafe { Memory::dealloc(self, NonNull::new_unchecked(at)) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as above.
        let got = unsafe { Memory::realloc(self, NonNull::new_unchecked(at), layout.align(), bytes) };
        got.map_or(null_mut(), NonNull::as_ptr)
    }
}

thread_local! {
    static SCOPE: Cell<Option<&'static Memory>> = const { Cell::new(None) };
}

/// A global allocator: jemalloc, in DRAM outside of any [`Memory::scope`], and on media inside.
///
/// ```
/// use lodestone::wsp::memory::{ByScope, Memory, MemoryOptions};
///
/// #[global_allocator]
/// static ALLOCATOR: ByScope = ByScope;
///
/// let slow: &'static Memory = Box::leak(Box::new(Memory::memfd(64 << 20, &MemoryOptions::default())?));
/// let table = slow.scope(|| vec![1u64; 1 << 20]);
/// assert!(slow.contains(table.as_ptr().cast()));
/// let index = vec![1u64; 1 << 10];
/// assert!(!slow.contains(index.as_ptr().cast()));
/// # Ok::<(), lodestone::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ByScope;

// SAFETY: jemalloc's functions keep the contract of an allocator, and take back whatever arena it came from.
unsafe impl GlobalAlloc for ByScope {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match SCOPE.get() {
            // SAFETY: the caller's.
            Some(memory) => unsafe { GlobalAlloc::alloc(memory, layout) },
            // SAFETY: the caller's: the size is not 0.
            None => unsafe {
                jemalloc::mallocx(layout.size(), alignment_flag(layout.align(), layout.size())).cast()
            },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let flags = alignment_flag(layout.align(), layout.size()) | jemalloc::MALLOCX_ZERO;
        match SCOPE.get() {
            // SAFETY: the caller's.
            Some(memory) => unsafe { GlobalAlloc::alloc_zeroed(memory, layout) },
            // SAFETY: the caller's: the size is not 0.
            None => unsafe { jemalloc::mallocx(layout.size(), flags).cast() },
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, _layout: Layout) {
        // A cache that gave it to somebody who wants DRAM would undo the choice.
        let flags = if heap::on_media(at.addr()) { jemalloc::MALLOCX_TCACHE_NONE } else { 0 };
        // SAFETY: the caller's.
        unsafe { jemalloc::dallocx(at.cast(), flags) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        let stays = match SCOPE.get() {
            Some(memory) => memory.contains(at),
            None => !heap::on_media(at.addr()),
        };
        // SAFETY: the caller's; the size is not 0, and the old place is given back where there is a new one.
        unsafe {
            match SCOPE.get() {
                Some(memory) if stays => GlobalAlloc::realloc(memory, at, layout, bytes),
                None if stays => {
                    jemalloc::rallocx(at.cast(), bytes, alignment_flag(layout.align(), bytes)).cast()
                }
                // From one kind of memory to another. jemalloc by itself would put the old block where the new one comes from:
                // into a cache of the other kind, which gives it to the next who asks.
                _ => {
                    let to = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
                    if !to.is_null() {
                        std::ptr::copy_nonoverlapping(at, to, layout.size().min(bytes));
                        self.dealloc(at, layout);
                    }
                    to
                }
            }
        }
    }
}

/// What of the flags of a lane names its cache.
const CACHE_BITS: c_int = (1 << 20) - 1;

/// jemalloc aligns to 16 bytes by itself, and faster; what has less than 16 bytes perhaps only to 8.
fn alignment_flag(align: usize, bytes: usize) -> c_int {
    const ALIGNED_ANYWAY: usize = 16;
    if align > ALIGNED_ANYWAY || align > bytes { jemalloc::MALLOCX_ALIGN(align) } else { 0 }
}

fn arenas_wanted(options: &MemoryOptions) -> usize {
    let cpus = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    options.arenas.unwrap_or_else(cpus).clamp(1, MEMORY_ARENAS_MAX)
}

/// The CPU that this thread runs on just now; no thread-local variable is touched, because that may allocate.
fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Runtime;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    // SAFETY: jemalloc reads this symbol when it is first called, as a pointer to a string that ends with NUL; nothing else of
    // the tests has its name.
    #[unsafe(export_name = "_rjem_malloc_conf")]
    static OPTIONS: &[u8; 13] = b"retain:false\0";

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    /// A fork closes every memory of the process for a moment, and its child holds on to what they have.
    pub(super) fn alone() -> parking_lot::MutexGuard<'static, ()> {
        static ONE: Mutex<()> = Mutex::new(());
        ONE.lock()
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 8).unwrap()
    }

    fn memory(bytes: usize, full: Full) -> Memory {
        Memory::memfd(bytes as u64, &MemoryOptions { full, arenas: Some(2), size: None }).unwrap()
    }

    fn fill(at: NonNull<u8>, bytes: usize, with: u8) {
        // SAFETY: allocated for so many bytes by the caller.
        unsafe { at.write_bytes(with, bytes) };
    }

    fn holds(at: NonNull<u8>, bytes: usize, with: u8) -> bool {
        // SAFETY: allocated and filled by the caller.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), bytes) }.iter().all(|byte| *byte == with)
    }

    #[test]
    fn blocks_of_all_sizes_lie_on_media_and_do_not_overlap() {
        let _alone = alone();
        let memory = memory(256 * MIB, Full::Fail);
        let sizes = [1, 16, 100, 4096, 5000, 40 * KIB, 300 * KIB, 3 * MIB, 9 * MIB];
        let blocks: Vec<_> = (0..120)
            .map(|n| {
                let bytes = sizes[n % sizes.len()];
                let at = memory.alloc(layout(bytes)).unwrap();
                assert!(memory.contains(at.as_ptr()), "{bytes} bytes");
                fill(at, bytes, n as u8);
                (at, bytes, n as u8)
            })
            .collect();
        for (at, bytes, with) in &blocks {
            assert!(holds(*at, *bytes, *with));
        }
        let found = memory.statistics();
        let wanted: usize = blocks.iter().map(|(_, bytes, _)| bytes).sum();
        assert!(found.extent_bytes >= wanted && found.claimed_bytes >= found.extent_bytes);
        assert!(found.resident_bytes >= wanted && found.dram_bytes == 0);
        assert!(found.arenas.iter().map(|arena| arena.active_bytes).sum::<usize>() >= wanted);
        for (at, ..) in blocks {
            // SAFETY: allocated above.
            unsafe { memory.dealloc(at) };
        }
        memory.trim().unwrap();
        let left = memory.statistics();
        assert_eq!(left.arenas.iter().map(|arena| arena.active_bytes).sum::<usize>(), 0);
        assert_eq!(left.extent_bytes, 0, "all of it came back: {left:?}");
        assert!(left.resident_bytes < 4 * MIB, "and the host has its pages: {left:?}");
        assert!(left.claimed_bytes < found.claimed_bytes, "and others may have its units: {left:?}");
    }

    #[test]
    fn what_grows_keeps_its_content_and_alignments_hold() {
        let _alone = alone();
        let memory = memory(256 * MIB, Full::Fail);
        let mut at = memory.alloc(layout(100)).unwrap();
        fill(at, 100, 9);
        for bytes in [1000, 20_000, 5 * MIB, 40 * MIB, 300] {
            // SAFETY: allocated before, and only the new place is used afterwards.
            at = unsafe { memory.realloc(at, 8, bytes) }.unwrap();
            assert!(holds(at, 100, 9) && memory.contains(at.as_ptr()));
        }
        for shift in 3..24 {
            let at = memory.alloc(Layout::from_size_align(24, 1 << shift).unwrap()).unwrap();
            assert!(at.addr().get().is_multiple_of(1 << shift), "2 to the power of {shift}");
        }
        // The first of a run of such blocks is aligned by luck.
        for (n, bytes) in (0..12).zip([0, 1, 8].into_iter().cycle()) {
            let small = Layout::from_size_align(bytes, 16).unwrap();
            let is_aligned = |at: NonNull<u8>| at.addr().get().is_multiple_of(16);
            assert!(is_aligned(memory.alloc(small).unwrap()), "{n}: {bytes} bytes");
            assert!(is_aligned(memory.alloc_zeroed(small).unwrap()), "{n}: {bytes} bytes");
            let large = memory.alloc(Layout::from_size_align(100, 16).unwrap()).unwrap();
            // SAFETY: allocated above, and only the new place is used afterwards.
            assert!(is_aligned(unsafe { memory.realloc(large, 16, bytes) }.unwrap()), "{n}: {bytes} bytes");
        }
        let zeroed = memory.alloc_zeroed(layout(8 * MIB)).unwrap();
        assert!(holds(zeroed, 8 * MIB, 0));
        fill(zeroed, 8 * MIB, 1);
        // SAFETY: allocated above.
        unsafe { memory.dealloc(zeroed) };
        assert!(holds(memory.alloc_zeroed(layout(8 * MIB)).unwrap(), 8 * MIB, 0));
    }

    #[test]
    fn a_full_media_fails_or_falls_back_as_asked() {
        let _alone = alone();
        let strict = memory(16 * MIB, Full::Fail);
        assert!(strict.alloc(layout(32 * MIB)).is_none());
        let held = strict.alloc(layout(8 * MIB)).unwrap();
        assert!(strict.alloc(layout(8 * MIB)).is_none());
        assert!(strict.statistics().refused >= 2);
        // SAFETY: allocated above; one that failed leaves the old one.
        unsafe {
            assert!(strict.realloc(held, 8, 64 * MIB).is_none());
            strict.dealloc(held);
        }

        let lax = memory(16 * MIB, Full::Dram);
        let large = lax.alloc(layout(32 * MIB)).unwrap();
        assert!(!lax.contains(large.as_ptr()));
        fill(large, 32 * MIB, 3);
        let found = lax.statistics();
        assert!(found.fallen_back == 1 && found.dram_bytes >= 32 * MIB);
        assert!(lax.contains(lax.alloc(layout(MIB)).unwrap().as_ptr()), "what fits goes there still");
        // SAFETY: allocated above.
        unsafe { lax.dealloc(large) };
        lax.trim().unwrap();
        assert_eq!(lax.statistics().dram_bytes, 0);
    }

    #[test]
    fn threads_allocate_and_free_each_others_blocks() {
        let _alone = alone();
        let memory = memory(128 * MIB, Full::Fail);
        let rounds = 3000;
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let memory = &memory;
                // Of few: for all blocks at once there is no room.
                let (to, from) = std::sync::mpsc::sync_channel::<(usize, usize, u8)>(256);
                scope.spawn(move || {
                    for n in 0..rounds {
                        let bytes = 8 + (n * 37 + thread as usize * 11) % 30_000;
                        let at = memory.alloc(layout(bytes)).unwrap();
                        fill(at, bytes, thread);
                        to.send((at.expose_provenance().get(), bytes, thread)).unwrap();
                    }
                });
                scope.spawn(move || {
                    for (at, bytes, with) in from {
                        let at = NonNull::new(std::ptr::with_exposed_provenance_mut(at)).unwrap();
                        assert!(holds(at, bytes, with));
                        // SAFETY: allocated by the other thread, which let go of it.
                        unsafe { memory.dealloc(at) };
                    }
                });
            }
        });
    }

    /// Runs `child` in a child process, which must find everything in order; `parent` runs meanwhile.
    pub(super) fn fork(child: impl FnOnce() -> bool, parent: impl FnOnce()) {
        // SAFETY: the child makes system calls and uses memory that forks keep whole, until it ends.
        match unsafe { libc::fork() } {
            -1 => panic!("no fork"),
            0 => {
                let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
                // SAFETY: ends the child without the test harness's own ends.
                unsafe { libc::_exit(if fine { 0 } else { 1 }) }
            }
            pid => {
                parent();
                let mut status = 0;
                // SAFETY: a child of ours, and a place for its status.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child: {status:#x}");
            }
        }
    }

    /// Runs `child` in a child that the C library and our handlers know nothing of.
    pub(super) fn clone(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: a fork in all but the handlers; the child makes system calls until it ends.
        match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
            -1 => panic!("no clone"),
            0 => {
                let fine = child();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!fine)) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: a child of ours, and a place for its status.
                assert_eq!(i64::from(unsafe { libc::waitpid(pid as i32, &raw mut status, 0) }), pid);
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
            }
        }
    }

    /// Whether an address has no mapping.
    fn faults(at: NonNull<u8>) -> bool {
        let page = at.as_ptr().map_addr(|at| at & !(ground::PAGE - 1));
        let mut present = 0;
        // SAFETY: asks only, about one page, for which there is a byte.
        let failed = unsafe { libc::mincore(page.cast(), 1, &raw mut present) } != 0;
        failed && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
    }

    /// It leaves no witness: what it could read would turn to zeros where its parent uses it again.
    #[test]
    fn a_child_that_no_handler_told_has_nothing_of_what_an_earlier_fork_froze() {
        let _alone = alone();
        let memory = memory(64 * MIB, Full::Fail);
        let at = memory.alloc(layout(3 * MIB)).unwrap();
        fill(at, 3 * MIB, 1);
        for _ in 0..2 {
            // Those that a handler told have all of it, also of what was frozen before, and so have theirs.
            fork(
                || {
                    (0..2).for_each(|_| fork(|| holds(at, 3 * MIB, 1), || {}));
                    holds(at, 3 * MIB, 1)
                },
                || {},
            );
            assert!(holds(at, 3 * MIB, 1) && !faults(at));
            assert!(clone(|| faults(at)), "it sees what will change");
        }
        assert!(memory.statistics().frozen_bytes >= 3 * MIB);
    }

    #[test]
    fn parent_and_child_each_see_their_own() {
        let _alone = alone();
        let memory = memory(128 * MIB, Full::Fail);
        let small: Vec<_> = (0..100).map(|_| memory.alloc(layout(300)).unwrap()).collect();
        let large = memory.alloc(layout(6 * MIB)).unwrap();
        small.iter().for_each(|at| fill(*at, 300, 1));
        fill(large, 6 * MIB, 1);
        let mut ends = [0; 2];
        // SAFETY: a place for two descriptors.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let parent_has_written = || {
            let mut byte = 0u8;
            // SAFETY: our descriptor, one byte.
            unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) == 1 }
        };
        fork(
            || {
                let before = holds(large, 6 * MIB, 1) && small.iter().all(|at| holds(*at, 300, 1));
                fill(large, MIB, 2);
                let told = parent_has_written();
                // What the parent wrote, and allocated, is not here.
                // SAFETY: inside of the block.
                let rest = unsafe { large.add(MIB) };
                let own = holds(large, MIB, 2) && holds(rest, 5 * MIB, 1);
                let own = own && small.iter().all(|at| holds(*at, 300, 1));
                let mine = memory.alloc(layout(4 * MIB)).unwrap();
                fill(mine, 4 * MIB, 4);
                let found = memory.statistics();
                let by_arena = found.arenas.iter().map(|arena| arena.extent_bytes).sum::<usize>();
                let own = own && by_arena == found.extent_bytes && by_arena >= 4 * MIB;
                // SAFETY: allocated before the fork, and above.
                unsafe {
                    memory.dealloc(large);
                    small.iter().for_each(|at| memory.dealloc(*at));
                }
                before && told && own && holds(mine, 4 * MIB, 4) && memory.contains(mine.as_ptr())
            },
            || {
                fill(large, 6 * MIB, 3);
                let new: Vec<_> = (0..20).map(|_| memory.alloc(layout(MIB)).unwrap()).collect();
                new.iter().for_each(|at| fill(*at, MIB, 5));
                small.iter().for_each(|at| fill(*at, 300, 3));
                // SAFETY: our descriptor, one byte.
                assert_eq!(unsafe { libc::write(ends[1], [1u8].as_ptr().cast(), 1) }, 1);
                assert!(new.iter().all(|at| holds(*at, MIB, 5)));
            },
        );
        assert!(holds(large, 6 * MIB, 3) && small.iter().all(|at| holds(*at, 300, 3)));
    }

    #[test]
    fn children_of_children_see_their_own() {
        let _alone = alone();
        let memory = memory(64 * MIB, Full::Fail);
        let at = memory.alloc(layout(3 * MIB)).unwrap();
        fill(at, 3 * MIB, 1);
        fork(
            || {
                fill(at, MIB, 2);
                let own = memory.alloc(layout(MIB)).unwrap();
                fill(own, MIB, 7);
                fork(
                    || {
                        let seen = holds(at, MIB, 2) && holds(own, MIB, 7);
                        fill(own, MIB, 8);
                        let third = memory.alloc(layout(MIB)).unwrap();
                        fill(third, MIB, 9);
                        // SAFETY: of this memory, in three generations.
                        unsafe { [at, own, third].into_iter().for_each(|at| memory.dealloc(at)) };
                        seen && memory.trim().is_ok()
                    },
                    || fill(own, MIB, 6),
                );
                holds(own, MIB, 6) && holds(at, MIB, 2)
            },
            || {},
        );
        assert!(holds(at, 3 * MIB, 1));
    }

    #[test]
    fn where_the_kernel_copies_nothing_on_write_one_thread_forks_by_copies() {
        let _alone = alone();
        // A child has one thread, whatever the tests have.
        fork(
            || {
                let memory = memory(64 * MIB, Full::Fail);
                let at = memory.alloc(layout(5 * MIB)).unwrap();
                fill(at, 5 * MIB, 1);
                memory.heap.ground.enter().unwrap().copies_on_write = false;
                assert_eq!(prepare_fork(), Ok(()));
                fork(
                    || {
                        let seen = holds(at, 5 * MIB, 1);
                        fill(at, 5 * MIB, 2);
                        let own = memory.alloc(layout(MIB)).unwrap();
                        fill(own, MIB, 4);
                        seen && holds(at, 5 * MIB, 2) && memory.contains(own.as_ptr())
                    },
                    || fill(at, MIB, 3),
                );
                // SAFETY: inside of the block.
                let rest = unsafe { at.add(MIB) };
                let kept = holds(at, MIB, 3) && holds(rest, 4 * MIB, 1);
                // And it lies on the media again: what is stored there is seen by another mapping.
                let mut ground = memory.heap.ground.enter().unwrap();
                let alias = ground.map_alias(0, 8);
                fill(at, MIB, 9);
                let offset = at.addr().get() - ground.base;
                // SAFETY: a mapping of the same bytes.
                let stored = unsafe { NonNull::new_unchecked(alias.add(offset)) };
                drop(ground);
                kept && holds(stored, MIB, 9)
            },
            || {},
        );
        let memory = memory(64 * MIB, Full::Fail);
        let _at = memory.alloc(layout(MIB)).unwrap();
        memory.heap.ground.enter().unwrap().copies_on_write = false;
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || stopped.recv());
            assert_eq!(prepare_fork(), Err(ForkRefused::Threads), "with a second thread nobody can");
            drop(stop);
        });
    }

    #[test]
    fn frozen_memory_is_the_medias_again_when_children_are_gone_and_it_is_free() {
        let _alone = alone();
        let memory = memory(64 * MIB, Full::Fail);
        for _ in 0..20 {
            // Each round needs more than a third of the media: all that was frozen has to come back.
            let at = memory.alloc(layout(22 * MIB)).unwrap();
            fill(at, 22 * MIB, 1);
            fork(|| holds(at, 22 * MIB, 1), || fill(at, MIB, 2));
            assert!(memory.statistics().frozen_bytes >= 22 * MIB);
            // SAFETY: allocated above.
            unsafe { memory.dealloc(at) };
            memory.trim().unwrap();
        }
    }

    /// Has threads stop also where the one that waits for them fails.
    struct Stop<'a>(&'a AtomicBool);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn forks_while_threads_allocate_are_exact() {
        let _alone = alone();
        let memory = memory(256 * MIB, Full::Fail);
        let (stop, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
        let block = memory.alloc(layout(64 * KIB)).unwrap();
        fill(block, 64 * KIB, 7);
        // Numbers in pages and units of their own, which a thread counts up one after the other, whatever is done meanwhile.
        let counted = memory.alloc_zeroed(layout(12 * MIB)).unwrap();
        let numbers: Vec<&AtomicUsize> = (0..24)
            // SAFETY: inside of the block, which lasts as long as the memory; zeros are a number.
            .map(|n| unsafe { counted.add(n * 500 * KIB).cast::<AtomicUsize>().as_ref() })
            .collect();
        let seen = || numbers.iter().map(|number| number.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let one_moment = |seen: &[usize]| seen.is_sorted_by(|a, b| a >= b) && seen[0] - seen[23] <= 1;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 1.. {
                    for number in &numbers {
                        assert_eq!(number.load(Ordering::Relaxed), n - 1, "a store was lost");
                        number.store(n, Ordering::Relaxed);
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let blocks: Vec<_> =
                            (1..60).map(|n| memory.alloc(layout(n * 700)).unwrap()).collect();
                        for (n, at) in blocks.into_iter().enumerate() {
                            fill(at, (n + 1) * 700, n as u8);
                            assert!(holds(at, (n + 1) * 700, n as u8));
                            // SAFETY: allocated above.
                            unsafe { memory.dealloc(at) };
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let _stops = Stop(&stop);
            for with in 0..30 {
                fork(
                    || {
                        let first = seen();
                        let seen = holds(block, 64 * KIB, if with == 0 { 7 } else { with - 1 })
                            && one_moment(&first)
                            && first == seen();
                        let mine = memory.alloc(layout(200 * KIB)).unwrap();
                        fill(mine, 200 * KIB, 1);
                        fill(block, 64 * KIB, 99);
                        seen && holds(mine, 200 * KIB, 1)
                    },
                    || fill(block, 64 * KIB, with),
                );
            }
        });
        assert!(rounds.load(Ordering::Relaxed) > 0 && holds(block, 64 * KIB, 29));
    }

    #[test]
    fn what_is_in_use_thaws_when_it_is_asked_for() {
        let _alone = alone();
        // A child has one thread, whatever the tests have.
        fork(
            || {
                let memory = memory(64 * MIB, Full::Fail);
                let at = memory.alloc(layout(5 * MIB)).unwrap();
                fill(at, 5 * MIB, 1);
                fork(|| holds(at, 5 * MIB, 1), || {});
                fill(at, MIB, 2);
                // More than what is left is not to be had at the price of a move under somebody's input and output.
                let more: Vec<_> = (0..40).map_while(|_| memory.alloc(layout(MIB))).collect();
                let stayed = more.len() > 30 && memory.statistics().frozen_bytes >= 5 * MIB;
                memory.trim().unwrap();
                let thawed = memory.statistics().frozen_bytes == 0;
                // SAFETY: inside of the block.
                let kept = holds(at, MIB, 2) && holds(unsafe { at.add(MIB) }, 4 * MIB, 1);
                let mut ground = memory.heap.ground.enter().unwrap();
                let alias = ground.map_alias(0, 32);
                fill(at, MIB, 9);
                let offset = at.addr().get() - ground.base;
                // SAFETY: a mapping of the same bytes.
                let stored = unsafe { NonNull::new_unchecked(alias.add(offset)) };
                drop(ground);
                stayed && thawed && kept && holds(stored, MIB, 9)
            },
            || {},
        );
    }

    /// Sets a limit of this process, and gives the one before.
    fn limit(which: u32, to: u64) -> u64 {
        // SAFETY: plain data, for which zeros are valid; the kernel reads and writes it.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            assert_eq!(libc::getrlimit(which as _, &raw mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, to);
            assert_eq!(libc::setrlimit(which as _, &raw const limit), 0);
            before
        }
    }

    #[test]
    fn a_fork_that_cannot_be_exact_is_said_beforehand_and_takes_nothing() {
        let _alone = alone();
        fork(
            || {
                let memory = memory(64 * MIB, Full::Fail);
                let at = memory.alloc(layout(20 * MIB)).unwrap();
                fill(at, 20 * MIB, 1);
                let before = limit(libc::RLIMIT_DATA, 1 << 20);
                let refused = prepare_fork();
                limit(libc::RLIMIT_DATA, before);
                let kept = holds(at, 20 * MIB, 1) && memory.statistics().frozen_bytes == 0;
                fill(at, 20 * MIB, 2);
                refused == Err(ForkRefused::Memory)
                    && kept
                    && prepare_fork() == Ok(())
                    && holds(at, 20 * MIB, 2)
            },
            || {},
        );
    }

    #[test]
    fn who_can_open_nothing_any_more_forks_once_and_others_thaw() {
        let _alone = alone();
        fork(
            || {
                let memory = memory(64 * MIB, Full::Fail);
                let at = memory.alloc(layout(2 * MIB)).unwrap();
                fill(at, 2 * MIB, 1);
                let before = limit(libc::RLIMIT_NOFILE, 3);
                for has_more in [true, false] {
                    fork(
                        || {
                            let more = memory.alloc(layout(MIB));
                            more.inspect(|at| fill(*at, MIB, 3));
                            holds(at, 2 * MIB, 1)
                                && more.is_some_and(|at| memory.contains(at.as_ptr())) == has_more
                        },
                        || {},
                    );
                }
                limit(libc::RLIMIT_NOFILE, before);
                // The second left no witness, which is about what was there then.
                for _ in 0..10 {
                    let Some(at) = memory.alloc(layout(22 * MIB)) else { return false };
                    fork(|| true, || fill(at, MIB, 2));
                    // SAFETY: allocated above.
                    unsafe { memory.dealloc(at) };
                    memory.trim().unwrap();
                }
                true
            },
            || {},
        );
    }

    #[test]
    fn who_asks_where_an_address_lies_meets_no_memory_that_ended() {
        let _alone = alone();
        let stop = AtomicBool::new(false);
        let own = 7u8;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(!heap::on_media((&raw const own).addr()));
                    let _ = prepare_fork();
                }
            });
            let _stops = Stop(&stop);
            for _ in 0..200 {
                let memory = memory(16 * MIB, Full::Fail);
                let at = memory.alloc(layout(100)).unwrap();
                assert!(heap::on_media(at.addr().get()));
            }
        });
    }

    #[test]
    fn what_moves_from_dram_into_a_scope_leaves_no_dram_among_the_medias() {
        let _alone = alone();
        let options = MemoryOptions { full: Full::Fail, arenas: Some(1), size: None };
        let memory: &'static Memory = Box::leak(Box::new(Memory::memfd(64 << 20, &options).unwrap()));
        let of = |bytes| Layout::from_size_align(bytes, 8).unwrap();
        for bytes in [100, 3000, 20_000, 300_000] {
            // SAFETY: each block is of this allocator, and as long as said.
            unsafe {
                let blocks: Vec<_> = (0..20).map(|_| ByScope.alloc(of(bytes))).collect();
                for block in &blocks {
                    block.write_bytes(5, bytes);
                }
                let moved: Vec<_> = memory.scope(|| {
                    blocks.into_iter().map(|block| ByScope.realloc(block, of(bytes), 2 * bytes)).collect()
                });
                for block in moved {
                    assert!(memory.contains(block) && holds(NonNull::new(block).unwrap(), bytes, 5));
                }
            }
            for _ in 0..20 {
                assert!(memory.contains(memory.alloc(layout(bytes)).unwrap().as_ptr()), "{bytes} bytes");
            }
        }
    }

    /// Else its worker's others would be in the scope as it waits, and the thread for ever after where two waited in theirs.
    #[test]
    fn a_uthread_has_no_scope() {
        let _alone = alone();
        let memory: &'static Memory = Box::leak(Box::new(memory(16 * MIB, Full::Fail)));
        let runtime = Runtime::new(Default::default()).unwrap();
        let scoped = runtime.spawn(|| memory.scope(|| ())).unwrap();
        runtime.run(1).unwrap();
        let message = scoped.join().unwrap_err();
        assert!(message.downcast_ref::<&str>().unwrap().contains("uthread"));
        memory.scope(|| ());
    }

    #[test]
    fn what_cannot_be_memory_is_refused_in_words() {
        let _alone = alone();
        let folder = std::env::temp_dir().join(format!("lode-memory-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let refusal = |name: &str, size| {
            let error = Memory::check(&folder.join(name), size).unwrap_err();
            (error.errno(), error.to_string())
        };
        let says = |(errno, text): (i32, String), wanted: i32, word: &str| {
            assert!(errno == wanted && text.contains(word), "{errno}: {text}");
        };
        says(refusal("missing", None), libc::ENOENT, "give a size");
        says(refusal("", None), libc::EISDIR, "directory");
        says(refusal("small", Some(1 << 20)), libc::EINVAL, "give a larger size");
        assert!(!folder.join("small").exists(), "nothing is left behind");
        std::fs::write(folder.join("empty"), "").unwrap();
        says(refusal("empty", None), libc::EINVAL, "is empty");
        std::fs::write(folder.join("letter"), vec![b'x'; 16 * MIB]).unwrap();
        says(refusal("letter", None), libc::EEXIST, "other data");
        assert_eq!(std::fs::read(folder.join("letter")).unwrap(), vec![b'x'; 16 * MIB]);
        let pool =
            crate::media::Pool::create(&[folder.join("pool")], Some(16 << 20), &Default::default()).unwrap();
        says(refusal("pool", None), libc::EBUSY, "in use");
        drop(pool);
        says(refusal("pool", None), libc::EEXIST, "holds a pool");
        // A second look finds its own label.
        Memory::check(&folder.join("good"), Some(16 << 20)).unwrap();
        let memory = Memory::open(&folder.join("good"), &MemoryOptions::default()).unwrap();
        let at = memory.alloc(layout(MIB)).unwrap();
        fill(at, MIB, 0x5a);
        let stored = std::fs::read(folder.join("good")).unwrap();
        assert!(
            stored.windows(MIB).any(|part| part.iter().all(|byte| *byte == 0x5a)),
            "the bytes are in the file"
        );
        Memory::check(&folder.join("good"), None).unwrap();
        let alone = crate::media::Pool::open(&folder.join("good"), &Default::default()).unwrap_err();
        assert_eq!(alone.errno(), libc::EBUSY, "a pool is not made where programs have memory");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
