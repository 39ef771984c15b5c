//! Memory on slow memory, chosen for each allocation.

use crate::call::{on, without_pool};
use crate::convert::{store, string};
use crate::handle::{Handles, Held};
use lodestone::error::{Error, Result};
use lodestone::wsp::memory::{Full, Memory, MemoryOptions};
use std::alloc::Layout;
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// Memory on a file or device: any number of threads may use it.
pub struct lode_memory {
    _opaque: [u8; 0],
}

/// For lode_memory_open: when the media is full an allocation fails, instead of getting DRAM.
pub const LODE_MEMORY_FAIL: c_int = 1;

/// What a memory comes to, in bytes. There may be more in a later version: see lode_memory_stats.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct lode_memory_statistics {
    /// Of the media, for all processes.
    pub media: u64,
    /// Claimed by this process, in use or idle.
    pub claimed: u64,
    /// Of what is claimed, what the host keeps pages for.
    pub resident: u64,
    /// In pages that hold something in use, in all arenas.
    pub active: u64,
    /// In extents on the media.
    pub on_media: u64,
    /// In extents in DRAM, because the media was full.
    pub in_dram: u64,
    /// Extents that got DRAM so far, and extents that were refused.
    pub fallen_back: u64,
    pub refused: u64,
    /// Arenas of jemalloc, and the extents that they have.
    pub arenas: u64,
    pub extents: u64,
}

// SAFETY: jemalloc reads this symbol when it is first called, as a pointer to a string that ends with NUL; nothing else has its
// name in this library, whose references to it stay in it (build.rs). Extents go back to the media, and not to a store of addresses.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: &[u8; 13] = b"retain:false\0";

/// What malloc aligns to.
const ALIGN: usize = 16;

struct OpenMemory(Memory);

static MEMORIES: Handles<OpenMemory> = Handles::new();

impl Held for OpenMemory {
    const NOT_ONE: &str = "not memory that lode_memory_open returned";
    const CLOSED: &str = "the memory is closed";
    const INHERITED: &str =
        "the memory was opened before fork(): the child has what was allocated, and opens another for more";
    const DISTRUSTED: &str = "the memory met an internal error: allocate elsewhere";
    const TOO_MANY: &str = "memories are open in this process: close some";

    fn handles() -> &'static Handles<OpenMemory> {
        &MEMORIES
    }
}

/// Opens memory on the file or device at path: a regular file, on a DAX mount, tmpfs or hugetlbfs too, a block device,
/// a device-dax node; path NULL: anonymous memory, to try things with. Returns NULL on failure.
///
/// bytes: a file is made where there is none, and is so long at least; no more of it is used. 0: what is there.
/// Several processes may use one file, each a part of its own. What is allocated means nothing once the process has
/// ended, and nothing is durable. After fork() parent and child each have their own copy of all of it; the child
/// cannot allocate or free there, but opens memory of its own.
///
/// flags: 0 or LODE_MEMORY_FAIL.
///
/// Errors: EACCES, EBUSY (somebody has it alone), EEXIST (it holds a pool, or other data), EINVAL (too small, or no
/// size), EMFILE (64 are open), ENOENT, ENOMEM, ENOSPC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_open(path: *const c_char, bytes: u64, flags: c_int) -> *mut lode_memory {
    without_pool("lode_memory_open", || {
        if flags & !LODE_MEMORY_FAIL != 0 {
            return Err(invalid("a flag that is none"));
        }
        let full = if flags & LODE_MEMORY_FAIL != 0 { Full::Fail } else { Full::Dram };
        let size = (bytes > 0).then_some(bytes);
        let options = MemoryOptions { size, full, arenas: None };
        let memory = match path.is_null() {
            false => {
                // SAFETY: the contract at the head of the header.
                let path = Path::new(OsStr::from_bytes(unsafe { string(path) }?));
                Memory::open(path, &options)?
            }
            true => Memory::memfd(size.ok_or_else(|| invalid("anonymous memory needs a size"))?, &options)?,
        };
        let handle = MEMORIES.take()?;
        Ok(handle.fill(OpenMemory(memory)).cast())
    })
}

/// As malloc(3), from this memory. Errors: ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_alloc(memory: *mut lode_memory, bytes: usize) -> *mut c_void {
    on("lode_memory_alloc", memory.addr(), |memory: &OpenMemory| allocate(memory, ALIGN, bytes))
}

/// As aligned_alloc(3), from this memory. Errors: EINVAL (align is no power of two), ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_alloc_aligned(
    memory: *mut lode_memory,
    align: usize,
    bytes: usize,
) -> *mut c_void {
    on("lode_memory_alloc_aligned", memory.addr(), |memory: &OpenMemory| {
        if !align.is_power_of_two() {
            return Err(invalid("an alignment is a power of two"));
        }
        allocate(memory, align.max(ALIGN), bytes)
    })
}

fn allocate(memory: &OpenMemory, align: usize, bytes: usize) -> Result<*mut c_void> {
    let layout = Layout::from_size_align(bytes, align).map_err(|_| full(bytes))?;
    memory.0.alloc(layout).map(|at| at.as_ptr().cast()).ok_or_else(|| full(bytes))
}

/// As realloc(3), of what this memory gave; at NULL allocates. Errors: ENOMEM, and then at is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_realloc(
    memory: *mut lode_memory,
    at: *mut c_void,
    bytes: usize,
) -> *mut c_void {
    on("lode_memory_realloc", memory.addr(), |memory: &OpenMemory| {
        let Some(old) = NonNull::new(at) else { return allocate(memory, ALIGN, bytes) };
        // SAFETY: the caller's, as with realloc.
        let got = unsafe { memory.0.realloc(old.cast(), ALIGN, bytes) };
        got.map(|at| at.as_ptr().cast()).ok_or_else(|| full(bytes))
    })
}

/// As free(3), of what this memory gave; at NULL does nothing. Returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_free(memory: *mut lode_memory, at: *mut c_void) -> c_int {
    on("lode_memory_free", memory.addr(), |memory: &OpenMemory| {
        if let Some(at) = NonNull::new(at) {
            // SAFETY: the caller's, as with free.
            unsafe { memory.0.dealloc(at.cast()) };
        }
        Ok(0)
    })
}

/// Says what of the memory is used for what. bytes is sizeof(lode_memory_statistics): of a longer one the rest
/// is not touched. Returns 0. Errors: EFAULT, EINVAL (bytes is smaller than any version had it).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_stats(
    memory: *mut lode_memory,
    to: *mut lode_memory_statistics,
    bytes: usize,
) -> c_int {
    on("lode_memory_stats", memory.addr(), |memory: &OpenMemory| {
        if bytes < size_of::<lode_memory_statistics>() {
            return Err(invalid("the structure is smaller than lode_memory_statistics"));
        }
        let found = memory.0.statistics();
        let sum = |of: fn(&lodestone::wsp::memory::ArenaStatistics) -> usize| {
            found.arenas.iter().map(of).sum::<usize>() as u64
        };
        let told = lode_memory_statistics {
            media: found.media_bytes as u64,
            claimed: found.claimed_bytes as u64,
            resident: found.resident_bytes as u64,
            active: sum(|arena| arena.active_bytes),
            on_media: found.extent_bytes as u64,
            in_dram: found.dram_bytes as u64,
            fallen_back: found.fallen_back as u64,
            refused: found.refused as u64,
            arenas: found.arenas.len() as u64,
            extents: sum(|arena| arena.extents),
        };
        // SAFETY: the contract at the head of the header.
        unsafe { store(to, told) }?;
        Ok(0)
    })
}

/// Ends a memory and all that was allocated from it. Waits for calls in flight. Returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_memory_close(memory: *mut lode_memory) -> c_int {
    without_pool("lode_memory_close", || {
        let handle = MEMORIES.of(memory.addr())?;
        handle.empty(drop)?;
        handle.give_back();
        Ok(0)
    })
}

#[cold]
fn full(bytes: usize) -> Error {
    Error::message(libc::ENOMEM, "capi::memory", format!("the memory has no {bytes} bytes left"))
}

#[cold]
fn invalid(message: &str) -> Error {
    Error::message(libc::EINVAL, "capi::memory", message)
}
