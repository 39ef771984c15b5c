//! The names of the C library's allocator, with its contracts: errno, alignments, sizes of 0.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use lodestone::wsp::memory::{Memory, options_text};
use std::alloc::Layout;
use tikv_jemalloc_sys as jemalloc;

/// jemalloc reads this when it is first called: the text of its options, which `prepare` writes. There is one arena for each CPU.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: AtomicPtr<c_char> = AtomicPtr::new(null_mut());

static OPTIONS_TEXT: [AtomicU8; 64] = [const { AtomicU8::new(0) }; 64];

/// jemalloc was not called yet.
const UNPREPARED: usize = usize::MAX;
/// Either that, or 0 where all memory is of one kind, or the size from which on it lies on media.
static LEAST_BYTES: AtomicUsize = AtomicUsize::new(UNPREPARED);
/// The media of large allocations, where there is a difference.
static LARGE: AtomicPtr<Memory> = AtomicPtr::new(null_mut());

/// From now on allocations of so many bytes lie in `memory`, and smaller ones in DRAM.
pub fn divide(memory: &'static Memory, least_bytes: usize) {
    LARGE.store((&raw const *memory).cast_mut(), Ordering::Release);
    LEAST_BYTES.store(least_bytes, Ordering::Release);
}

/// Whether the program brings a `malloc` of its own, which comes before ours: nobody calls this one then. It is tried; of its address a
/// program may have one of its own even where it is ours.
pub fn is_passed_over() -> bool {
    let (malloc, free) = (first(c"malloc"), first(c"free"));
    if malloc.is_null() || free.is_null() {
        return false;
    }
    // SAFETY: what is found under these names is called so by everybody.
    unsafe {
        let malloc: unsafe extern "C" fn(usize) -> *mut c_void = std::mem::transmute(malloc);
        let free: unsafe extern "C" fn(*mut c_void) = std::mem::transmute(free);
        free(malloc(1));
    }
    LEAST_BYTES.load(Ordering::Relaxed) == UNPREPARED
}

/// What the dynamic linker has everybody call by this name.
#[cold]
fn first(name: &CStr) -> *mut c_void {
    // SAFETY: a name with an end.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// The first call of all: the process has one thread.
#[cold]
fn prepare() {
    // SAFETY: plain data, for which zeros are a valid value; the kernel fills it.
    let cpus = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) {
            0 => libc::CPU_COUNT(&set) as usize,
            _ => 1,
        }
    };
    for (place, byte) in OPTIONS_TEXT.iter().zip(options_text(cpus)) {
        place.store(byte, Ordering::Relaxed);
    }
    OPTIONS.store(OPTIONS_TEXT.as_ptr().cast_mut().cast(), Ordering::Relaxed);
    LEAST_BYTES.store(0, Ordering::Release);
}

/// The memory for an allocation, where it is not jemalloc's default.
#[inline(always)]
fn large(bytes: usize, align: usize) -> Option<&'static Memory> {
    match LEAST_BYTES.load(Ordering::Relaxed) {
        0 => None,
        UNPREPARED => {
            prepare();
            None
        }
        least_bytes => by_size(bytes, align, least_bytes),
    }
}

/// By the size that jemalloc makes of it.
#[cold]
fn by_size(bytes: usize, align: usize, least_bytes: usize) -> Option<&'static Memory> {
    let flags = if align > ALIGNED_ANYWAY || align > bytes { jemalloc::MALLOCX_ALIGN(align) } else { 0 };
    // SAFETY: the size is not 0, the alignment a power of two.
    let rounded = unsafe { jemalloc::nallocx(bytes.max(1), flags) };
    // SAFETY: null, or a memory that lasts as long as the process.
    let memory = unsafe { LARGE.load(Ordering::Acquire).as_ref() };
    memory.filter(|_| rounded >= least_bytes)
}

/// The memory on whose media a block lies, where that is not jemalloc's default. By its address: a block of any size may be
/// DRAM's, because it was there before the media was, or because that is full, and must not get among those of the media.
#[inline(always)]
fn owner(at: *mut c_void) -> Option<&'static Memory> {
    match LEAST_BYTES.load(Ordering::Relaxed) {
        0 | UNPREPARED => None,
        _ => {
            // SAFETY: null, or a memory that lasts as long as the process.
            let memory = unsafe { LARGE.load(Ordering::Acquire).as_ref() };
            memory.filter(|memory| memory.contains(at.cast()))
        }
    }
}

fn no_memory() -> *mut c_void {
    // SAFETY: the C library gives every thread its errno.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    null_mut()
}

fn aligned(align: usize, bytes: usize) -> *mut c_void {
    let got = match large(bytes, align) {
        Some(memory) => {
            let layout = Layout::from_size_align(bytes, align).ok();
            layout.and_then(|layout| memory.alloc(layout)).map_or(null_mut(), |at| at.as_ptr().cast())
        }
        // SAFETY: the size is not 0, the alignment a power of two.
        None => unsafe { jemalloc::mallocx(bytes.max(1), jemalloc::MALLOCX_ALIGN(align)) },
    };
    if got.is_null() { no_memory() } else { got }
}

fn page_bytes() -> usize {
    // SAFETY: it only reads.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// As malloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    match large(bytes, alignment(bytes)) {
        // SAFETY: any size will do.
        None => unsafe { jemalloc::malloc(bytes) },
        Some(_) => aligned(alignment(bytes), bytes),
    }
}

/// What malloc aligns to, in bytes.
const ALIGNED_ANYWAY: usize = 16;

/// The same for a block of this size: nothing in 8 bytes needs more.
fn alignment(bytes: usize) -> usize {
    if bytes > 8 { ALIGNED_ANYWAY } else { 8 }
}

/// As calloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let align = alignment(count.saturating_mul(bytes));
    let Some(memory) = large(count.saturating_mul(bytes), align) else {
        // SAFETY: any numbers will do.
        return unsafe { jemalloc::calloc(count, bytes) };
    };
    let bytes = count.checked_mul(bytes);
    let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, align).ok());
    let got = layout.and_then(|layout| memory.alloc_zeroed(layout));
    got.map_or_else(no_memory, |at| at.as_ptr().cast())
}

/// As free(3): errno stays.
///
/// # Safety
///
/// As free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(at: *mut c_void) {
    let Some(block) = NonNull::new(at) else { return };
    // SAFETY: the caller's: a block of ours that nobody uses any more.
    unsafe {
        match owner(at) {
            None => jemalloc::free(at),
            Some(memory) => memory.dealloc(block.cast()),
        }
    }
}

/// As realloc(3); to a size of 0 frees, and gives NULL.
///
/// # Safety
///
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(at: *mut c_void, bytes: usize) -> *mut c_void {
    let Some(block) = NonNull::new(at) else { return malloc(bytes) };
    // SAFETY: the caller's: a block of ours.
    unsafe {
        if bytes == 0 {
            free(at);
            return null_mut();
        }
        match (owner(at), large(bytes, alignment(bytes))) {
            (None, None) => {
                let got = jemalloc::realloc(at, bytes);
                if got.is_null() { no_memory() } else { got }
            }
            (Some(memory), Some(_)) => {
                let got = memory.realloc(block.cast(), alignment(bytes), bytes);
                got.map_or_else(no_memory, |at| at.as_ptr().cast())
            }
            // From one kind of memory to the other.
            _ => {
                let to = malloc(bytes);
                if !to.is_null() {
                    std::ptr::copy_nonoverlapping(
                        at.cast::<u8>(),
                        to.cast(),
                        jemalloc::sallocx(at, 0).min(bytes),
                    );
                    free(at);
                }
                to
            }
        }
    }
}

/// As reallocarray(3). Where a program brings a `realloc` of its own and none of these, the block is of that one's kind: it is asked, as
/// the C library's asks it.
///
/// # Safety
///
/// As reallocarray(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(at: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(bytes) else { return no_memory() };
    let chosen = match LEAST_BYTES.load(Ordering::Relaxed) {
        UNPREPARED => first(c"realloc"),
        _ => null_mut(),
    };
    // SAFETY: the caller's; and what is found under this name is called so by everybody.
    unsafe {
        match chosen.is_null() {
            true => realloc(at, bytes),
            false => {
                let realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void =
                    std::mem::transmute(chosen);
                realloc(at, bytes)
            }
        }
    }
}

/// As posix_memalign(3): errno stays.
///
/// # Safety
///
/// As posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, align: usize, bytes: usize) -> c_int {
    if !align.is_power_of_two() || align < size_of::<*mut c_void>() {
        return libc::EINVAL;
    }
    // SAFETY: the C library gives every thread its errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let got = aligned(align, bytes);
    // SAFETY: as above, and the caller's: it is a place for a pointer.
    unsafe {
        *errno = before;
        if got.is_null() {
            return libc::ENOMEM;
        }
        *to = got;
    }
    0
}

/// As aligned_alloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    memalign(align, bytes)
}

/// As memalign(3): an alignment that is no power of two is rounded up to one.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    match align.max(ALIGNED_ANYWAY).checked_next_power_of_two() {
        Some(align) => aligned(align, bytes),
        None => {
            // SAFETY: the C library gives every thread its errno.
            unsafe { *libc::__errno_location() = libc::EINVAL };
            null_mut()
        }
    }
}

/// As valloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: usize) -> *mut c_void {
    aligned(page_bytes(), bytes)
}

/// As pvalloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match bytes.max(1).checked_next_multiple_of(page_bytes()) {
        Some(bytes) => aligned(page_bytes(), bytes),
        None => no_memory(),
    }
}

/// As malloc_usable_size(3).
///
/// # Safety
///
/// As malloc_usable_size(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(at: *mut c_void) -> usize {
    // SAFETY: the caller's: null, or a block of ours.
    unsafe { jemalloc::malloc_usable_size(at) }
}
