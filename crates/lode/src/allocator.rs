//! The command's memory allocator: jemalloc, for a server with several threads and millions of small, long-lived
//! objects. In huge pages, because a look-up in a large directory is a random walk through them. The library
//! leaves the choice to its user.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

// SAFETY: the allocator reads this symbol when the process starts, as a pointer to a string that ends with NUL;
// nothing else has its name.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: &[u8; 29] = b"thp:always,metadata_thp:auto\0";
