//! The command's memory allocator: jemalloc, for a server with several threads and millions of small, long-lived
//! objects. In huge pages, because a look-up in a large directory is a random walk through them; and what was freed goes back to the
//! kernel after a minute, not after ten seconds: that takes huge pages apart, and whoever makes names next waits for the kernel.
//! The library leaves the choice to its user.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

// SAFETY: the allocator reads this symbol when the process starts, as a pointer to a string that ends with NUL;
// nothing else has its name.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: &[u8; 50] = b"thp:always,metadata_thp:auto,dirty_decay_ms:60000\0";

/// Gives free memory back to the kernel, so that what is resident is what is in use.
pub fn give_back() {
    // All arenas.
    let purge = c"arena.4096.purge";
    let null = std::ptr::null_mut();
    // SAFETY: the name ends with NUL; the call takes no value and gives none.
    let failed = unsafe { tikv_jemalloc_sys::mallctl(purge.as_ptr(), null, null.cast(), null, 0) };
    assert_eq!(failed, 0, "the allocator knows its own names");
}
