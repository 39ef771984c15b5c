//! jemalloc's arenas on a heap: where they get extents from, and what each has.
//!
//! The hooks run with locks of the arena held. They enter the heap's gate, which never waits for a lock of jemalloc's, and
//! allocate nothing. A dirty extent goes back to the heap when jemalloc's decay says so; there is no lazy purge, since
//! nobody else could use the pages meanwhile.

use std::ffi::{CStr, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use tikv_jemalloc_sys::{self as jemalloc, extent_hooks_t};

use super::ground::PAGE;
use super::heap::{Heap, Place};
use crate::error::{Error, Result};
use crate::limits::MEMORY_ARENAS_MAX;

/// One arena and its extents. Its address is what jemalloc hands to the hooks.
#[repr(C)]
pub(super) struct Arena {
    hooks: extent_hooks_t,
    heap: *const Heap,
    extents: AtomicUsize,
    media_bytes: AtomicUsize,
    inherited_bytes: AtomicUsize,
    dram_bytes: AtomicUsize,
    /// Of the heap when this was last counted: what was on media before is inherited.
    generation: AtomicUsize,
}

// SAFETY: the heap may be used by any thread, and outlives the arenas.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// # Safety
    ///
    /// The heap outlives all use that jemalloc makes of this.
    pub unsafe fn new(heap: *const Heap) -> Arena {
        let hooks = extent_hooks_t {
            alloc: Some(alloc),
            dalloc: Some(dalloc),
            destroy: Some(destroy),
            commit: None,
            decommit: None,
            purge_lazy: None,
            purge_forced: None,
            split: Some(split),
            merge: Some(merge),
        };
        let zero = || AtomicUsize::new(0);
        Arena {
            hooks,
            heap,
            extents: zero(),
            media_bytes: zero(),
            inherited_bytes: zero(),
            dram_bytes: zero(),
            generation: zero(),
        }
    }

    pub fn extents(&self) -> usize {
        self.extents.load(Ordering::Relaxed)
    }

    pub fn media_bytes(&self) -> usize {
        // SAFETY: it outlives this, as who made this said.
        self.keep_up(unsafe { &*self.heap });
        self.media_bytes.load(Ordering::Relaxed)
    }

    pub fn dram_bytes(&self) -> usize {
        self.dram_bytes.load(Ordering::Relaxed)
    }

    /// Makes an arena of jemalloc's with these hooks; its number.
    pub fn create(&self) -> Result<usize> {
        let config = Config { hooks: &raw const self.hooks, records_there: false };
        let mut index: c_uint = 0;
        exchange(c"experimental.arenas_create_ext", Some(&mut index), Some(config))?;
        let index = index as usize;
        grow_by_need(index)?;
        Ok(index)
    }

    /// Puts the hooks on an arena that is there already: what it takes from now on is of the heap.
    pub fn adopt(&self, index: usize) -> Result<()> {
        // Its own records were made by its first use, in DRAM.
        let mut before: c_uint = 0;
        exchange(c"thread.arena", Some(&mut before), Some(index as c_uint))?;
        exchange(c"thread.arena", None::<&mut c_uint>, Some(before))?;
        let hooks: *const extent_hooks_t = &raw const self.hooks;
        with_index("arena.", index, ".extent_hooks", |name| {
            exchange(name, None::<&mut c_uint>, Some(hooks))
        })?;
        grow_by_need(index)
    }
}

/// Where jemalloc retains addresses (`opt.retain`, which is a matter of the whole process), it asks for ever larger extents
/// and keeps what it does not need: of a media that others share, and that may be small, each arena takes what it uses.
fn grow_by_need(index: usize) -> Result<()> {
    let mut retains = false;
    exchange(c"opt.retain", Some(&mut retains), None::<u8>)?;
    if !retains {
        return Ok(());
    }
    with_index("arena.", index, ".retain_grow_limit", |name| exchange(name, None::<&mut usize>, Some(PAGE)))
}

/// What `experimental.arenas_create_ext` takes (jemalloc's `arena_config_t`): the arena's own records stay in DRAM.
#[repr(C)]
struct Config {
    hooks: *const extent_hooks_t,
    records_there: bool,
}

/// What jemalloc counts of an arena.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pages {
    pub active: usize,
    pub dirty: usize,
}

/// Pages of an arena as jemalloc counts them, since the last [`refresh`].
pub(super) fn pages_of(index: usize) -> Pages {
    let read = |what| {
        let mut value = 0usize;
        let read =
            with_index("stats.arenas.", index, what, |name| exchange(name, Some(&mut value), None::<usize>));
        read.map_or(0, |()| value)
    };
    Pages { active: read(".pactive"), dirty: read(".pdirty") }
}

/// Has jemalloc sum up its counts.
pub(super) fn refresh() {
    let _ = exchange(c"epoch", None::<&mut u64>, Some(1u64));
}

/// Ends an arena and all that was allocated from it.
pub(super) fn end(index: usize) -> Result<()> {
    with_index("arena.", index, ".destroy", |name| exchange(name, None::<&mut u8>, None::<u8>))
}

/// Gives what an arena keeps for later use back to the heap.
pub(super) fn purge(index: usize) -> Result<()> {
    with_index("arena.", index, ".purge", |name| exchange(name, None::<&mut u8>, None::<u8>))
}

/// A cache of free blocks; its number.
pub(super) fn make_cache() -> Result<usize> {
    let mut index: c_uint = 0;
    exchange(c"tcache.create", Some(&mut index), None::<u8>)?;
    Ok(index as usize)
}

/// Gives the blocks of a cache back to their arenas.
pub(super) fn flush_cache(index: usize) -> Result<()> {
    exchange(c"tcache.flush", None::<&mut u8>, Some(index as c_uint))
}

pub(super) fn end_cache(index: usize) -> Result<()> {
    exchange(c"tcache.destroy", None::<&mut u8>, Some(index as c_uint))
}

/// The options that jemalloc needs where all of a program's memory comes from it, for so many arenas: extents go back to where
/// they came from (`retain`), and large ones are of the same arenas as others (`oversize_threshold`). Ends with NUL.
pub fn options_text(arenas: usize) -> [u8; 64] {
    const HEAD: &[u8] = b"retain:false,oversize_threshold:0,narenas:";
    let arenas = arenas.clamp(1, MEMORY_ARENAS_MAX);
    let mut text = [0; 64];
    text[..HEAD.len()].copy_from_slice(HEAD);
    // A number that begins with 0 is an octal one there.
    let digits = [b'0' + (arenas / 10) as u8, b'0' + (arenas % 10) as u8];
    let digits = &digits[(arenas < 10) as usize..];
    text[HEAD.len()..][..digits.len()].copy_from_slice(digits);
    text
}

const _: () = assert!(MEMORY_ARENAS_MAX < 100);

/// Whether jemalloc puts large allocations into an arena apart, which nobody can hand hooks to beforehand.
pub(super) fn sets_large_apart() -> Result<bool> {
    let mut from_bytes = 0usize;
    exchange(c"opt.oversize_threshold", Some(&mut from_bytes), None::<u8>)?;
    Ok(from_bytes != 0)
}

/// How many arenas jemalloc has for threads that choose none.
pub(super) fn automatic_arenas() -> Result<usize> {
    let mut count: c_uint = 0;
    exchange(c"opt.narenas", Some(&mut count), None::<u8>)?;
    Ok(count as usize)
}

/// One of jemalloc's controls: reads the old value, writes a new one.
fn exchange<Old, New>(name: &CStr, old: Option<&mut Old>, new: Option<New>) -> Result<()> {
    let mut old_bytes = size_of::<Old>();
    let (old, old_len): (*mut Old, *mut usize) = match old {
        Some(old) => (old, &raw mut old_bytes),
        None => (null_mut(), null_mut()),
    };
    let mut new = new;
    let (new, new_bytes): (*mut New, usize) = match &mut new {
        Some(new) => (new, size_of::<New>()),
        None => (null_mut(), 0),
    };
    // SAFETY: the name ends with NUL; both values are as long as said, and of the type that the control has.
    let failed = unsafe { jemalloc::mallctl(name.as_ptr(), old.cast(), old_len, new.cast(), new_bytes) };
    match failed {
        0 => Ok(()),
        errno => {
            let message = format!(
                "jemalloc refuses {}: {}",
                name.to_string_lossy(),
                std::io::Error::from_raw_os_error(errno)
            );
            Err(Error::message(errno, "wsp::memory::hooks", message))
        }
    }
}

/// Names a control with a number in it, without an allocation.
fn with_index<R>(before: &str, index: usize, after: &str, run: impl FnOnce(&CStr) -> R) -> R {
    use std::io::Write;
    let mut name = [0u8; 64];
    write!(&mut name[..63], "{before}{index}{after}").expect("controls have short names");
    run(CStr::from_bytes_until_nul(&name).expect("the last byte is NUL"))
}

/// # Safety (of each hook)
///
/// jemalloc calls it, with the hooks of an [`Arena`] and ranges of that arena.
unsafe fn arena<'a>(hooks: *mut extent_hooks_t) -> (&'a Arena, &'a Heap) {
    // SAFETY: the hooks are the first field of an arena, which outlives jemalloc's use, as does its heap.
    unsafe {
        let arena = &*hooks.cast::<Arena>();
        (arena, &*arena.heap)
    }
}

/// # Safety
/// See [`arena`].
unsafe extern "C" fn alloc(
    hooks: *mut extent_hooks_t,
    wanted: *mut c_void,
    bytes: usize,
    align: usize,
    zero: *mut bool,
    commit: *mut bool,
    _index: c_uint,
) -> *mut c_void {
    // SAFETY: by contract.
    let (arena, heap) = unsafe { arena(hooks) };
    let Some((got, zeroed)) = heap.alloc(wanted.addr(), bytes, align) else { return null_mut() };
    arena.extents.fetch_add(1, Ordering::Relaxed);
    arena.counter(heap, got.addr()).fetch_add(bytes, Ordering::Relaxed);
    // SAFETY: jemalloc passes two flags; the memory is as long as asked for, and nobody else has it.
    unsafe {
        if *zero && !zeroed {
            std::ptr::write_bytes(got, 0, bytes);
        }
        *zero |= zeroed;
        *commit = true;
    }
    got.cast()
}

impl Arena {
    fn counter(&self, heap: &Heap, address: usize) -> &AtomicUsize {
        self.keep_up(heap);
        match heap.place(address) {
            Place::Media => &self.media_bytes,
            Place::Inherited => &self.inherited_bytes,
            Place::Dram => &self.dram_bytes,
        }
    }

    /// In a child, at the first count: arenas are not known to who handles a fork.
    fn keep_up(&self, heap: &Heap) {
        let now = heap.generation.load(Ordering::Relaxed);
        if self.generation.swap(now, Ordering::Relaxed) != now {
            let before = self.media_bytes.swap(0, Ordering::Relaxed);
            self.inherited_bytes.fetch_add(before, Ordering::Relaxed);
        }
    }
}

/// # Safety
/// See [`arena`].
unsafe extern "C" fn dalloc(
    hooks: *mut extent_hooks_t,
    start: *mut c_void,
    bytes: usize,
    _committed: bool,
    _index: c_uint,
) -> bool {
    // SAFETY: by contract.
    let (arena, heap) = unsafe { arena(hooks) };
    let counter = arena.counter(heap, start.addr());
    // SAFETY: jemalloc lets go of the range.
    if !unsafe { heap.free(start.addr(), bytes) } {
        return true;
    }
    // What the arena had before it was adopted, or before a fork, is in no count.
    let less = |n: usize, by: usize| Some(n.saturating_sub(by));
    let _ = arena.extents.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| less(n, 1));
    let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| less(n, bytes));
    false
}

/// # Safety
/// See [`arena`].
unsafe extern "C" fn destroy(
    hooks: *mut extent_hooks_t,
    start: *mut c_void,
    bytes: usize,
    committed: bool,
    index: c_uint,
) {
    // SAFETY: by contract. In the middle of a fork it stays as it is, which loses memory and nothing else.
    unsafe { dalloc(hooks, start, bytes, committed, index) };
}

/// # Safety
/// See [`arena`].
unsafe extern "C" fn split(
    hooks: *mut extent_hooks_t,
    _start: *mut c_void,
    _bytes: usize,
    _first: usize,
    _second: usize,
    _committed: bool,
    _index: c_uint,
) -> bool {
    // SAFETY: by contract.
    let (arena, _) = unsafe { arena(hooks) };
    arena.extents.fetch_add(1, Ordering::Relaxed);
    false
}

/// # Safety
/// See [`arena`].
unsafe extern "C" fn merge(
    hooks: *mut extent_hooks_t,
    one: *mut c_void,
    _one_bytes: usize,
    other: *mut c_void,
    _other_bytes: usize,
    _committed: bool,
    _index: c_uint,
) -> bool {
    // SAFETY: by contract.
    let (arena, heap) = unsafe { arena(hooks) };
    if !heap.may_merge(one.addr(), other.addr()) {
        return true;
    }
    let _ = arena.extents.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(1)));
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_each_number_of_arenas_as_jemalloc_reads_it() {
        for arenas in 1..=MEMORY_ARENAS_MAX {
            let text = options_text(arenas);
            let text = CStr::from_bytes_until_nul(&text).unwrap();
            let digits = text.to_str().unwrap().rsplit_once("narenas:").unwrap().1;
            // With a 0 in front it would be octal, and 08 no number.
            assert!(!digits.starts_with('0') && digits.parse() == Ok(arenas), "{text:?}");
        }
    }
}
