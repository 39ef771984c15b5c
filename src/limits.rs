//! Every named limit of the library, unit last. A queue or a loop without an entry here is a bug.

/// Longest name of one directory entry, in bytes (POSIX `NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;
/// Longest path that a caller may pass, in bytes, the closing NUL not counted.
pub const PATH_BYTES_MAX: usize = 4095;
/// Symbolic links followed in one path walk before ELOOP (as Linux).
pub const SYMLINK_DEPTH_MAX: u32 = 40;
/// Times that a call by path starts again because what it walked to was removed meanwhile.
pub const WALK_RETRIES_MAX: u32 = 100;
/// Largest file, in bytes: 2^32 - 1 pages of 4 KiB, 16 TiB less one page.
pub const FILE_BYTES_MAX: u64 = (1 << 44) - 4096;
/// Largest pool, in blocks: block numbers have 31 bits in the DRAM index.
pub const POOL_BLOCKS_MAX: u64 = 1 << 31;
/// Smallest pool, in bytes.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// Longest label of a pool, in bytes.
pub const LABEL_BYTES_MAX: usize = 63;
/// Hard links to one file (as ext4 has it).
pub const LINKS_MAX: u32 = 65_000;
/// Links to one directory, subdirectories and two: as many as xfs allows, for the count has 32 bits here and
/// in every `stat`.
pub const SUBDIRECTORIES_MAX: u32 = i32::MAX as u32;
/// Largest value of one extended attribute, in bytes (Linux `XATTR_SIZE_MAX`).
pub const XATTR_VALUE_BYTES_MAX: usize = 65_536;
/// All extended attribute names of one inode together, in bytes (Linux `XATTR_LIST_MAX`).
pub const XATTR_LIST_BYTES_MAX: usize = 65_536;
/// Regions in one pool.
pub const REGIONS_MAX: usize = 64;
/// Descriptors open at a time in one descriptor table (EMFILE beyond).
pub const OPEN_FILES_MAX: usize = 1 << 20;
/// Bytes moved by one read or write call at most (Linux `MAX_RW_COUNT`); longer ones return short.
pub const RW_BYTES_MAX: usize = 0x7fff_f000;
/// Regions mapped by one process at a time, all its pools together (the fault handler searches them).
pub const REGIONS_MAPPED_MAX: usize = 1024;
/// Smallest stack of a uthread, in bytes.
pub const STACK_BYTES_MIN: usize = 16 << 10;
/// Largest stack of a uthread, in bytes.
pub const STACK_BYTES_MAX: usize = 1 << 30;
/// Workers of one runtime.
pub const WORKERS_MAX: usize = 1024;
/// Parts of one vectored copy at most (Linux `IOV_MAX`).
pub const COPY_PARTS_MAX: usize = 1024;
/// Copies of one media handle of the C interface that nobody has waited for yet (EAGAIN beyond).
pub const COPY_TICKETS_MAX: usize = 65_536;
/// Owners of copies of class bandwidth that have a share of their own; more share theirs.
pub const COPY_OWNERS_MAX: usize = 64;
/// Largest object of a persistent heap, in bytes: what fits the largest heap.
pub const HEAP_OBJECT_BYTES_MAX: u64 = 1 << 46;
/// Smallest media that programs take memory from, in bytes.
pub const MEMORY_BYTES_MIN: usize = 8 << 20;
/// Largest one, in bytes; of a larger one so much is used.
pub const MEMORY_BYTES_MAX: usize = 4 << 40;
/// Arenas of one memory at most; more threads share them.
pub const MEMORY_ARENAS_MAX: usize = 64;
/// Memories open in one process at a time: forks, and who asks where an address lies, find them in tables of that length.
pub const MEMORIES_MAX: usize = 64;
/// Units that a process takes of a media beyond what it needs now, at most.
pub const MEMORY_GROWTH_UNITS_MAX: usize = 32;
