/*
 * lodestone.h: a file system for slow, byte-addressable memory, in this process.
 *
 * A pool is a file, a device or persistent memory with a Lodestone file system in it. The functions have
 * the shape of POSIX's: what open(2) is, lode_open is, with the pool in front. Link with -llodestone.
 *
 * The mover below it can be had alone: lode_media_open names slow memory, lode_copy_to_media and its kin copy
 * there, for storage engines with a format of their own. lode_memory_open and its kin allocate on slow memory.
 *
 * A persistent heap (lode_heap_create) is neither: objects in memory that are there again after a restart, found by
 * names, changed by commits.
 *
 * Failure: functions that return int, ssize_t, off_t or long return -1 and set errno; those that return a
 * pointer return NULL and set errno. lode_last_error() says what happened in one sentence. Besides the
 * errors named at each function: EINVAL for a pool (or media, or heap) that is none, EBADF for one that is closed or
 * was opened before fork(), EFAULT for NULL where something must be, EIO for bad media or a pool that refuses
 * writes after it could not make data durable (close and open it).
 *
 * Durability: "Durable" at a function means that what it did survives a crash of the process when it
 * returns, and loss of power too where the media is persistent memory. On an ordinary file power loss is
 * survived from the next lode_fsync of the file (or lode_sync) on. What a crash interrupts has happened
 * wholly or not at all.
 *
 * Signals: from the first pool, media or heap on SIGBUS has a handler, by which bad media is EIO of one call. It passes on
 * what is not about them to the handler that was there. A program that installs its own later calls the one that it
 * replaces (or the process ends at bad media). No thread that calls these functions blocks SIGBUS: the kernel then asks no
 * handler, and ends the process at bad media. Threads that the library starts, but for those that run uthreads, take
 * no signals but what they raise themselves: all others are the program's threads'.
 *
 * Sandboxes: a program that forbids itself system calls (seccomp(2)) after its first call of these functions goes on allowing
 * membarrier(2); else calls fail with EIO, and their pool with them. Where it was forbidden before, they do without it.
 *
 * What a caller owes: pointers are NULL or valid for the length given, and strings end with a NUL; nobody
 * writes them meanwhile. All functions may be called from any thread at any time, also lode_close and
 * lode_close_pool, which wait for the calls in flight (so does lode_media_close); not from a signal handler.
 * Threads inside the library are not to be cancelled: pthread_cancel(3) ends the process there. Paths are
 * relative to the root of the pool and have at most 4095 bytes, names at most 255. Offsets and sizes are in bytes.
 * A descriptor of one pool means nothing to another, nor to the kernel. Linux's own constants (O_TMPFILE,
 * SEEK_DATA, FALLOC_FL_*, RENAME_*) come with -D_GNU_SOURCE.
 *
 * This file is generated: crates/capi/tests/header.rs.
 */

#ifndef LODESTONE_H
#define LODESTONE_H

#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

/* Where strict C99 leaves it out. */
struct timespec;

/* Offsets have 64 bits: on 32-bit systems compile with -D_FILE_OFFSET_BITS=64. */
typedef char lode_off_t_has_64_bits[sizeof(off_t) == 8 ? 1 : -1];


/**
 * Operations that lode_get_times knows.
 */
#define LODE_READS 0

#define LODE_WRITES 1

/**
 * What is copied is durable when the call (or lode_media_wait) returns.
 */
#define LODE_COPY_DURABLE 1

/**
 * Of which class the copy is, where its engine has channels (see class of lode_open_pool); neither: of none, and what
 * lode_pread2 and its like copy of the file's.
 */
#define LODE_COPY_LATENCY 2

#define LODE_COPY_BANDWIDTH 4

/**
 * Directions of lode_copy_vectored.
 */
#define LODE_TO_MEDIA 1

#define LODE_FROM_MEDIA 2

/**
 * An object that lode_heap_reserve returned is in use from the commit on: at.
 */
#define LODE_HEAP_PUBLISH 1

/**
 * The 8 bytes at at, a multiple of 8 in an object, are set to value.
 */
#define LODE_HEAP_SET 2

/**
 * The 8 bytes at at lead to the object to, or nowhere (NULL): see lode_heap_linked.
 */
#define LODE_HEAP_LINK 3

/**
 * An object is free from the commit on: at. Nothing may lead to it then.
 */
#define LODE_HEAP_FREE 4

/**
 * The root name, of type value, leads to the object to, or nowhere (NULL); it is made where it is not there.
 */
#define LODE_HEAP_ROOT 5

/**
 * The root name is removed.
 */
#define LODE_HEAP_REMOVE_ROOT 6

/**
 * For lode_memory_open: when the media is full an allocation fails, instead of getting DRAM.
 */
#define LODE_MEMORY_FAIL 1

/**
 * A directory being read.
 */
typedef struct lode_dir lode_dir;

/**
 * An open pool. Every function takes one; it may be used by any number of threads.
 */
typedef struct lode_fs lode_fs;

/**
 * A persistent heap that is open: any number of threads may use it.
 */
typedef struct lode_heap lode_heap;

/**
 * Slow memory to copy to and from, without a pool: any number of threads may use it.
 */
typedef struct lode_media lode_media;

/**
 * Memory on a file or device: any number of threads may use it.
 */
typedef struct lode_memory lode_memory;

/**
 * A uthread: a thread of this program, light enough to have one for each request.
 */
typedef struct lode_uthread lode_uthread;

/**
 * Where the time of operations went that were watched: about one in 64 of each thread.
 */
typedef struct {
    /**
     * That were watched, and the bytes that they were asked for.
     */
    uint64_t operations;
    uint64_t bytes;
    /**
     * Moving data, in nanoseconds; all phases together are the whole.
     */
    uint64_t copy_ns;
    /**
     * Allocating, appending records and fencing them.
     */
    uint64_t metadata_ns;
    /**
     * Finding out where things are.
     */
    uint64_t index_ns;
    /**
     * Waiting for locks, and for engines that copy.
     */
    uint64_t wait_ns;
} lode_times;

/**
 * A copy, a read or a write under way: see lode_copy_to_media_async, lode_pread_async. Never negative.
 */
typedef int64_t lode_ticket;

/**
 * One part of a vectored copy: bytes at offset at of the media, and their buffer.
 */
typedef struct {
    uint64_t at;
    void *buffer;
    size_t bytes;
} lode_copy;

/**
 * One thing that a commit does: one of the LODE_HEAP_ numbers, and what is named there; the rest is not looked at.
 */
typedef struct {
    int what;
    void *at;
    void *to;
    uint64_t value;
    const char *name;
} lode_heap_change;

/**
 * What is in use of a heap: bytes that objects can have, objects, and bytes that these take.
 */
typedef struct {
    uint64_t capacity;
    uint64_t objects;
    uint64_t used;
} lode_heap_usage;

/**
 * What a memory comes to, in bytes. There may be more in a later version: see lode_memory_stats.
 */
typedef struct {
    /**
     * Of the media, for all processes.
     */
    uint64_t media;
    /**
     * Claimed by this process, in use or idle.
     */
    uint64_t claimed;
    /**
     * Of what is claimed, what the host keeps pages for.
     */
    uint64_t resident;
    /**
     * In pages that hold something in use, in all arenas.
     */
    uint64_t active;
    /**
     * In extents on the media.
     */
    uint64_t on_media;
    /**
     * In extents in DRAM, because the media was full.
     */
    uint64_t in_dram;
    /**
     * Extents that got DRAM so far, and extents that were refused.
     */
    uint64_t fallen_back;
    uint64_t refused;
    /**
     * Arenas of jemalloc, and the extents that they have.
     */
    uint64_t arenas;
    uint64_t extents;
} lode_memory_statistics;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens the pool at path, a file or a device; of a pool of several regions the first. Returns NULL on
 * failure.
 *
 * opts: NULL, or a comma-separated list of
 *   ro                      nothing on media changes; writing calls fail with EROFS
 *   user=process            permissions are checked for the user and groups that the process has when it opens the
 *                           pool (the default); what it drops later it keeps here
 *   user=root               every permission is granted, and new files belong to root
 *   umask=OCTAL             instead of the process's
 *   assume=DOMAIN           cpu-cache, memory, page-cache or volatile: the persistence domain to work by instead
 *                           of the one detected. On ordinary memory this emulates persistent memory.
 *   engine=ENGINE           who copies data: cpu, the calling thread (the default); semaphore, the calling
 *                           thread, at most two at a time per region; delegate, threads of the pool;
 *                           dsa and ioat, Intel's devices, or cpu where none can be used; emu and emu-ioat,
 *                           emulated devices, for tests
 *   class=CLASS             what is wanted of copies that engines make: latency, each is through soon; bandwidth,
 *                           many are, and they give way to the others; bandwidth:N, likewise, with a share of
 *                           its own for each number N, instead of one for the process. Else LODE_CLASS, else the
 *                           class of the calling thread's I/O priority (ioprio_set(2), ionice(1)): latency of
 *                           realtime, bandwidth of idle.
 *   floor=PERCENT           what class bandwidth keeps of the bytes that classes copy, if it wants it: 1 to 90
 *                           (10 is the default)
 *   starve=MS               and so many milliseconds, 1 to 60000, after which it has a piece of a copy where nothing
 *                           moves because somebody does not look after copies of class latency (2 is the default)
 *   profile=FILE            what engines are worth, as `lode tune` wrote it; else the file that LODE_PROFILE
 *                           names. One that is damaged or was made on another machine is not used: the
 *                           pool opens with the defaults, and lode_last_error() says why.
 *
 * Where the engine that was asked for cannot be used the pool opens all the same, the calling thread copies, and
 * lode_last_error() says why.
 *
 * A pool that was not closed is recovered first. One process has a pool open at a time, except ro. After fork() the
 * child has none of the parent's; and where another thread was in one of these functions at the fork, it may do
 * nothing here but exec: a lock of that thread's is taken for ever.
 * Errors: EACCES, EBUSY (another process), EFAULT, EINVAL (an option, or not a pool), EIO, EISDIR, ELOOP, EMFILE (256
 * are open), ENAMETOOLONG, ENODEV (a device that is no memory), ENOENT, ENOMEM, ENOTDIR, EOPNOTSUPP and EPROTONOSUPPORT (made by a version whose format this
 * one does not know), EUCLEAN (damaged). lode_last_error() names the file and the remedy.
 */
lode_fs *lode_open_pool(const char *path,
                        const char *opts);

/**
 * Waits for the calls in flight, closes the descriptors and streams that are open, writes a checkpoint
 * so that the next open need not recover, and gives the pool free. Reads and writes by ticket end with it, and their
 * buffers are the caller's: who is answered EBADF knows that no copy goes on. The handle is invalid afterwards, also
 * on failure. Errors: EBADF (closed already), EINVAL (not a pool), EIO. Durable: everything.
 */
int lode_close_pool(lode_fs *fs);

/**
 * Makes an empty file system in the file or device at path. size: bytes of the pool, a file being made
 * where none is; 0 takes an existing file or device as large as it is.
 *
 * opts: NULL, or a comma-separated list of
 *   force                   also where something is already
 *   label=TEXT              at most 63 bytes, none of them a control character
 *   data=cow                each write is atomic (the default)
 *   data=inplace            a crash can tear a write
 *
 * The root directory belongs to the process's user. Errors: EACCES, EBUSY, EEXIST (something is there:
 * force), EFAULT, EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENODEV (neither a file nor a device that can be mapped), ENOENT, ENOSPC,
 * ENOTDIR. Durable.
 */
int lode_mkfs(const char *path,
              uint64_t size,
              const char *opts);

/**
 * Opens or makes a file and returns the lowest free descriptor of this pool, or -1.
 *
 * flags: O_RDONLY, O_WRONLY, O_RDWR; O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_DIRECTORY, O_NOFOLLOW,
 * O_TMPFILE, O_PATH, O_SYNC, O_DSYNC; O_CLOEXEC, O_DIRECT, O_NOATIME, O_NOCTTY and O_NONBLOCK are
 * accepted and change nothing. mode: permission bits of a file that is made, less the umask; without
 * O_CREAT or O_TMPFILE it is not looked at.
 *
 * Errors: EACCES, EEXIST, EINVAL, EISDIR, ELOOP, EMFILE (1048576 are open), ENAMETOOLONG, ENOENT, ENOSPC,
 * ENOTDIR, ENXIO (a fifo, socket or device), EPERM (O_NOATIME on another's file), EROFS. Durable: the new
 * name, the truncation.
 */
int lode_open(lode_fs *fs, const char *path, int flags, mode_t mode);

/**
 * As lode_open, relative paths starting at the directory that dirfd is open on; AT_FDCWD is the root.
 * Further errors: EBADF, ENOTDIR for dirfd.
 */
int lode_openat(lode_fs *fs, int dirfd, const char *path, int flags, mode_t mode);

/**
 * Closes a descriptor. A call that uses it in another thread ends first, or, where it waits for a copy,
 * goes on with the file that it began with. The space of an unlinked file is free when its last descriptor
 * is closed and no copy into it is under way. Errors: EBADF. Closing makes nothing more durable.
 */
int lode_close(lode_fs *fs, int fd);

/**
 * A second descriptor for the same open file: they share the offset and O_APPEND. Errors: EBADF, EMFILE.
 */
int lode_dup(lode_fs *fs, int fd);

/**
 * Reads up to count bytes at the file offset, moves it, and returns the bytes read: fewer than count
 * only at the end of file or beyond 0x7ffff000, 0 at the end. Threads that share the offset take turns.
 * Errors: EBADF, EFAULT, EINVAL, EIO (bad media), EISDIR.
 */
ssize_t lode_read(lode_fs *fs, int fd, void *buf, size_t count);

/**
 * As lode_read at offset (bytes, not negative); the file offset is neither used nor moved.
 */
ssize_t lode_pread(lode_fs *fs, int fd, void *buf, size_t count, off_t offset);

/**
 * Writes count bytes at the file offset, or with O_APPEND at the end of file, moves the offset, and
 * returns the bytes written: fewer than count only beyond 0x7ffff000 or at the largest file size
 * (16 TiB less 4096 bytes). Threads that share the offset take turns.
 *
 * Errors: EBADF, EFAULT, EFBIG, EINVAL, EIO, ENOSPC, EROFS. Durable: the data and the size; by default
 * (data=cow) the whole write or none of it survives a crash.
 */
ssize_t lode_write(lode_fs *fs, int fd, const void *buf, size_t count);

/**
 * As lode_write at offset (bytes, not negative); the file offset is neither used nor moved. On a
 * descriptor with O_APPEND the bytes go to the end of file, as on Linux.
 */
ssize_t lode_pwrite(lode_fs *fs, int fd, const void *buf, size_t count, off_t offset);

/**
 * As lode_pread, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
 * lode_open_pool were told; 0: of theirs. offset -1: as lode_read, at the file offset, which moves. Further errors:
 * EINVAL (other flags).
 */
ssize_t lode_pread2(lode_fs *fs,
                    int fd,
                    void *buf,
                    size_t count,
                    off_t offset,
                    int flags);

/**
 * As lode_pwrite, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
 * lode_open_pool were told; 0: of theirs. offset -1: as lode_write, at the file offset, which moves. Further errors:
 * EINVAL (other flags).
 */
ssize_t lode_pwrite2(lode_fs *fs,
                     int fd,
                     const void *buf,
                     size_t count,
                     off_t offset,
                     int flags);

/**
 * Moves the file offset and returns it, in bytes. whence: SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA,
 * SEEK_HOLE. Errors: EBADF, EINVAL, ENXIO (SEEK_DATA or SEEK_HOLE beyond the end).
 */
off_t lode_lseek(lode_fs *fs, int fd, off_t offset, int whence);

/**
 * Sets the size of a file in bytes; bytes that come into being read as zeros. Errors: EACCES, EFBIG,
 * EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
 */
int lode_truncate(lode_fs *fs, const char *path, off_t length);

/**
 * As lode_truncate on a descriptor. EINVAL where it is not open for writing.
 */
int lode_ftruncate(lode_fs *fs, int fd, off_t length);

/**
 * Reserves, punches or zeros a range of bytes. mode: 0 or FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (with
 * KEEP_SIZE), FALLOC_FL_ZERO_RANGE, FALLOC_FL_UNSHARE_RANGE (as 0: nothing is shared). Errors: EBADF, EFBIG,
 * EINVAL, ENOSPC, EOPNOTSUPP (other modes), EROFS. Durable.
 */
int lode_fallocate(lode_fs *fs, int fd, int mode, off_t offset, off_t len);

/**
 * From now on this engine copies what is read and written through the descriptor and its duplicates: cpu,
 * semaphore, delegate, dsa, ioat, emu or emu-ioat, as lode_open_pool explains them. NULL: the pool's. What
 * a call promises does not depend on it. Errors: EBADF, EFAULT, EINVAL (no such engine).
 */
int lode_set_engine(lode_fs *fs, int fd, const char *engine);

/**
 * From now on this is wanted of copies of what is read and written through the descriptor and its duplicates: latency or
 * bandwidth, as lode_open_pool explains them. NULL: the pool's. It changes when a copy is made, and nothing of what a call
 * promises. Errors: EBADF, EFAULT, EINVAL (no such class).
 */
int lode_set_class(lode_fs *fs,
                   int fd,
                   const char *class_);

/**
 * Makes everything done to the file survive power loss, on every kind of media that can keep it. Only
 * ordinary files as media need it: on persistent memory each call is durable when it returns. Also for
 * directories. Errors: EBADF, EIO.
 */
int lode_fsync(lode_fs *fs, int fd);

/**
 * As lode_fsync, leaving out metadata that reading the data back does not need.
 */
int lode_fdatasync(lode_fs *fs, int fd);

/**
 * lode_fsync for the whole pool. Errors: EIO.
 */
int lode_sync(lode_fs *fs);

/**
 * Tests whether the user of this pool may do what mode asks: F_OK (it exists), or any of R_OK, W_OK,
 * X_OK. Errors: EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EROFS.
 */
int lode_access(lode_fs *fs, const char *path, int mode);

/**
 * Where the time of reads (LODE_READS) or writes (LODE_WRITES) went since the pool was opened, on all threads. (Phases as
 * in EasyIO, Figure 1.) Errors: EFAULT, EINVAL.
 */
int lode_get_times(lode_fs *fs,
                   int operation,
                   lode_times *times);

/**
 * Begins what lode_pread does, and returns a ticket for lode_poll and lode_wait, never negative. Until the ticket has ended
 * nobody uses the buffer. What a write under way is about to change is waited for first. Where the pool's engine does not
 * copy on its own (cpu, semaphore), and below an engine's threshold, the bytes are read before this returns.
 *
 * Errors: those of lode_pread but EIO by bad media, which lode_wait tells if an engine met it; EAGAIN (nobody waited for
 * 65536 others).
 */
lode_ticket lode_pread_async(lode_fs *fs,
                             int fd,
                             void *buf,
                             size_t count,
                             off_t offset);

/**
 * As lode_pread_async, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
 * lode_open_pool were told; 0: of theirs. Further errors: EINVAL (other flags).
 */
lode_ticket lode_pread2_async(lode_fs *fs,
                              int fd,
                              void *buf,
                              size_t count,
                              off_t offset,
                              int flags);

/**
 * Begins what lode_pwrite does, and returns a ticket for lode_poll and lode_wait, never negative. Until the ticket has ended
 * nobody changes the buffer. From now on reads of these bytes wait for the write, and so do writes of them and lode_fsync of
 * the file; nothing else does. A write under way to the same bytes is waited for first. Where the pool's engine does not copy
 * on its own (cpu, semaphore), below an engine's threshold, and on ordinary files, the write is done before this returns.
 *
 * Errors: those of lode_pwrite but EIO by bad media, which lode_wait tells if an engine met it; EAGAIN (nobody waited for
 * 65536 others). Durable: nothing before the ticket has ended; then what lode_pwrite says.
 */
lode_ticket lode_pwrite_async(lode_fs *fs,
                              int fd,
                              const void *buf,
                              size_t count,
                              off_t offset);

/**
 * As lode_pwrite_async, and with flags LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH of that class, whatever lode_set_class and
 * lode_open_pool were told; 0: of theirs. Further errors: EINVAL (other flags).
 */
lode_ticket lode_pwrite2_async(lode_fs *fs,
                               int fd,
                               const void *buf,
                               size_t count,
                               off_t offset,
                               int flags);

/**
 * 1 where the read or write of a ticket has ended, 0 where not, -1 on failure. Once it has, the buffer is the caller's; how
 * it ended, and the end of the ticket, is lode_wait's. Errors: EINVAL (no such ticket, or it was waited for).
 */
int lode_poll(lode_fs *fs,
              lode_ticket ticket);

/**
 * Waits until the read or write of a ticket has ended, and returns what lode_pread or lode_pwrite would have. Any thread may,
 * and several at once; the first that returns ends the ticket. In a uthread others run meanwhile. Errors: EINVAL (no such
 * ticket, or it was waited for), EIO (bad media; a write left the file as it was): the ticket has ended then, too.
 */
ssize_t lode_wait(lode_fs *fs,
                  lode_ticket ticket);

/**
 * Makes a directory. mode: permission bits, less the umask. Errors: EACCES, EEXIST, ELOOP, EMLINK,
 * ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
 */
int lode_mkdir(lode_fs *fs, const char *path, mode_t mode);

/**
 * Removes an empty directory. Errors: EACCES, EBUSY (the root), EINVAL ("."), ELOOP, ENAMETOOLONG, ENOENT,
 * ENOTDIR, ENOTEMPTY, EPERM, EROFS. Durable.
 */
int lode_rmdir(lode_fs *fs, const char *path);

/**
 * Removes a name that is not a directory's; the file goes with its last name and descriptor. Errors:
 * EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS. Durable.
 */
int lode_unlink(lode_fs *fs, const char *path);

/**
 * Moves a name, in one step that a crash cannot split. flags: 0 (what stands at `to` is replaced),
 * RENAME_NOREPLACE (EEXIST instead) or RENAME_EXCHANGE (both stay, exchanged); or RENAME_WHITEOUT, alone or with
 * RENAME_NOREPLACE (a character device 0:0 takes the old name in the same step). Errors: EACCES, EBUSY,
 * EEXIST, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, ENOTEMPTY, EPERM, EROFS. Durable.
 */
int lode_rename(lode_fs *fs,
                const char *from,
                const char *to,
                unsigned int flags);

/**
 * Gives a file a further name; a symbolic link itself, not what it points to. Errors: EACCES, EEXIST,
 * ELOOP, EMLINK, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM (a directory), EROFS. Durable.
 */
int lode_link(lode_fs *fs, const char *from, const char *to);

/**
 * Gives the file of a descriptor a name: how a file opened with O_TMPFILE (without O_EXCL) gets one.
 * Errors: as lode_link, and EBADF; ENOENT where the file has lost its last name. Durable.
 */
int lode_flink(lode_fs *fs, int fd, const char *to);

/**
 * Makes a symbolic link with the text `target` (1 to 4095 bytes). Errors: EACCES, EEXIST, ELOOP,
 * ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EROFS. Durable.
 */
int lode_symlink(lode_fs *fs, const char *target, const char *path);

/**
 * Copies the text of a symbolic link to buf, at most size bytes and without a NUL, and returns the
 * bytes copied. Errors: EACCES, EFAULT, EINVAL (not a link, or size is 0), ELOOP, ENAMETOOLONG, ENOENT,
 * ENOTDIR.
 */
ssize_t lode_readlink(lode_fs *fs, const char *path, char *buf, size_t size);

/**
 * Makes a file, fifo, socket or device node, by the type bits of mode (none: a regular file). dev: the
 * device number of a device node. Here they are names only: lode_open refuses all but files. Errors:
 * EACCES, EEXIST, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM (a directory, or a device
 * node by an ordinary user), EROFS. Durable.
 */
int lode_mknod(lode_fs *fs, const char *path, mode_t mode, dev_t dev);

/**
 * Attributes of what a path names, symbolic links followed. st_size is in bytes, st_blocks in units of
 * 512 bytes. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR.
 */
int lode_stat(lode_fs *fs, const char *path, struct stat *buf);

/**
 * As lode_stat, of a symbolic link itself.
 */
int lode_lstat(lode_fs *fs, const char *path, struct stat *buf);

/**
 * As lode_stat, of a descriptor's file. Errors: EBADF, EFAULT.
 */
int lode_fstat(lode_fs *fs, int fd, struct stat *buf);

/**
 * Sets the permission bits (07777). Errors: EACCES, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS.
 * Durable.
 */
int lode_chmod(lode_fs *fs, const char *path, mode_t mode);

/**
 * As lode_chmod on a descriptor. Errors: EBADF, EPERM, EROFS. Durable.
 */
int lode_fchmod(lode_fs *fs, int fd, mode_t mode);

/**
 * Sets user and group, symbolic links followed; -1 leaves one as it is. Errors: EACCES, ELOOP,
 * ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS. Durable.
 */
int lode_chown(lode_fs *fs, const char *path, uid_t uid, gid_t gid);

/**
 * As lode_chown, of a symbolic link itself. Durable.
 */
int lode_lchown(lode_fs *fs, const char *path, uid_t uid, gid_t gid);

/**
 * As lode_chown on a descriptor. Errors: EBADF, EPERM, EROFS. Durable.
 */
int lode_fchown(lode_fs *fs, int fd, uid_t uid, gid_t gid);

/**
 * Sets access and modification time (times[0] and times[1]); tv_nsec may be UTIME_NOW or UTIME_OMIT, and
 * NULL means now for both. Kept from 1901 to 2446 with nanoseconds. flags: 0, or AT_SYMLINK_NOFOLLOW for
 * a symbolic link itself. Errors: EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS.
 * Durable.
 */
int lode_utimens(lode_fs *fs, const char *path, const struct timespec *times, int flags);

/**
 * As lode_utimens on a descriptor. Errors: EACCES, EBADF, EINVAL, EPERM, EROFS. Durable.
 */
int lode_futimens(lode_fs *fs, int fd, const struct timespec *times);

/**
 * Size and use of the pool, in units of f_frsize bytes; path names anything in it. Errors: EACCES,
 * EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR.
 */
int lode_statvfs(lode_fs *fs, const char *path, struct statvfs *buf);

/**
 * As lode_statvfs through a descriptor. Errors: EBADF, EFAULT.
 */
int lode_fstatvfs(lode_fs *fs, int fd, struct statvfs *buf);

/**
 * Sets the mask of permission bits that new files lack and returns the old one. Starts as the process's
 * umask when the pool is opened.
 */
int lode_umask(lode_fs *fs, mode_t mask);

/**
 * Copies the value of an extended attribute to value and returns its length in bytes; with size 0 only
 * the length. Names begin with user., trusted., security. or are system.posix_acl_access and
 * system.posix_acl_default. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENODATA (no such attribute),
 * ENOENT, ENOTDIR, EOPNOTSUPP, ERANGE (size is too small).
 */
ssize_t lode_getxattr(lode_fs *fs, const char *path, const char *name, void *value, size_t size);

/**
 * As lode_getxattr, of a symbolic link itself.
 */
ssize_t lode_lgetxattr(lode_fs *fs, const char *path, const char *name, void *value, size_t size);

/**
 * As lode_getxattr on a descriptor. Further error: EBADF.
 */
ssize_t lode_fgetxattr(lode_fs *fs, int fd, const char *name, void *value, size_t size);

/**
 * Sets an extended attribute to size bytes, at most 65536. flags: 0, XATTR_CREATE (EEXIST where it is
 * there) or XATTR_REPLACE (ENODATA where it is not). Errors: EACCES, E2BIG, EEXIST, EFAULT, EINVAL, ELOOP,
 * ENAMETOOLONG, ENODATA, ENOENT, ENOSPC, ENOTDIR, EOPNOTSUPP, EPERM, EROFS. Durable.
 */
int lode_setxattr(lode_fs *fs, const char *path, const char *name, const void *value, size_t size, int flags);

/**
 * As lode_setxattr, of a symbolic link itself. Durable.
 */
int lode_lsetxattr(lode_fs *fs,
                   const char *path,
                   const char *name,
                   const void *value,
                   size_t size,
                   int flags);

/**
 * As lode_setxattr on a descriptor. Further error: EBADF. Durable.
 */
int lode_fsetxattr(lode_fs *fs, int fd, const char *name, const void *value, size_t size, int flags);

/**
 * Copies the names of all extended attributes, each closed by a NUL, to list and returns their bytes;
 * with size 0 only the bytes. Errors: EACCES, EFAULT, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ERANGE (size
 * is too small).
 */
ssize_t lode_listxattr(lode_fs *fs, const char *path, char *list, size_t size);

/**
 * As lode_listxattr, of a symbolic link itself.
 */
ssize_t lode_llistxattr(lode_fs *fs, const char *path, char *list, size_t size);

/**
 * As lode_listxattr on a descriptor. Further error: EBADF.
 */
ssize_t lode_flistxattr(lode_fs *fs, int fd, char *list, size_t size);

/**
 * Removes an extended attribute. Errors: as lode_setxattr. Durable.
 */
int lode_removexattr(lode_fs *fs, const char *path, const char *name);

/**
 * As lode_removexattr, of a symbolic link itself. Durable.
 */
int lode_lremovexattr(lode_fs *fs, const char *path, const char *name);

/**
 * As lode_removexattr on a descriptor. Further error: EBADF. Durable.
 */
int lode_fremovexattr(lode_fs *fs, int fd, const char *name);

/**
 * Opens a directory for reading its entries; the stream holds one descriptor. Returns NULL on failure.
 * Errors: EACCES, ELOOP, EMFILE, ENAMETOOLONG, ENOENT, ENOTDIR.
 */
lode_dir *lode_opendir(lode_fs *fs, const char *path);

/**
 * The next entry, "." and ".." first; NULL at the end with errno as it was, and NULL with errno on
 * failure. The entry is valid until the next call on the same stream. Entries that come or go while the
 * stream is read may or may not be seen; all others are seen once. Errors: EBADF, EIO.
 */
struct dirent *lode_readdir(lode_fs *fs, lode_dir *dir);

/**
 * Where the stream stands, for lode_seekdir; -1 on failure. Errors: EBADF.
 */
long lode_telldir(lode_fs *fs, lode_dir *dir);

/**
 * Goes to a place that lode_telldir reported. Unlike POSIX it says whether it failed. Errors: EBADF.
 */
int lode_seekdir(lode_fs *fs, lode_dir *dir, long position);

/**
 * Begins again, with the entries as they are now. Errors: EBADF.
 */
int lode_rewinddir(lode_fs *fs, lode_dir *dir);

/**
 * The stream's descriptor, which the stream keeps. Errors: EBADF.
 */
int lode_dirfd(lode_fs *fs, lode_dir *dir);

/**
 * Closes the stream and its descriptor. Errors: EBADF.
 */
int lode_closedir(lode_fs *fs, lode_dir *dir);

/**
 * Opens slow memory as it is, for lode_copy_to_media and its kin: a regular file, a file on a DAX mount, a block
 * device, a device-dax node; path NULL: anonymous memory of size= bytes. Returns NULL on failure.
 *
 * Nothing but copies changes it: there is no header and no label. The file is locked (flock) until it is closed;
 * copies of other processes need a lock of their own.
 *
 * opts: NULL, or a comma-separated list of
 *   ro                      copies to it fail with EROFS
 *   size=BYTES              make the file where there is none, so long at least, its blocks reserved
 *   force                   also where there is a pool
 *   prefault                take every page now
 *   assume=DOMAIN           cpu-cache, memory or page-cache, as lode_open_pool explains it
 *   engine=ENGINE           who copies, as lode_open_pool explains it
 *   concurrency=N           copies at a time of semaphore, and threads of delegate
 *   threshold=BYTES         engines get copies from this size on, at least 4096; smaller ones the caller copies
 *   profile=FILE            what engines are worth, as `lode tune` wrote it, but for what the two above say; else the
 *                           file that LODE_PROFILE names. One that is damaged or was made on another machine is not
 *                           used: defaults are, and lode_last_error() says why.
 *
 * Errors: EACCES, EBUSY (in use), EEXIST (a pool is there: force), EINVAL (an option; an empty file), EIO, EMFILE
 * (256 are open, or 1024 regions mapped), ENOENT, ENOMEM, ENOSPC. Durable: the file, where it was made.
 */
lode_media *lode_media_open(const char *path,
                            const char *opts);

/**
 * As lode_media_open for bytes bytes at start that the caller has mapped, and keeps mapped until lode_media_close
 * has returned. domain says what makes stores to them durable, and is believed: "cpu-cache" (a fence), "memory" (a
 * write-back and a fence), "page-cache" (msync), "volatile" (nothing). opts: ro, engine=, concurrency=, threshold=,
 * profile=.
 * Errors: EFAULT, EINVAL, EMFILE.
 */
lode_media *lode_media_map(void *start,
                           size_t bytes,
                           const char *domain,
                           const char *opts);

/**
 * Waits for the calls in flight and for all copies under way, and gives the memory free. Their tickets end with it; who
 * is answered EBADF knows that no copy goes on. The handle is invalid afterwards. Errors: EBADF (closed already), EINVAL (not media). Makes nothing durable.
 */
int lode_media_close(lode_media *media);

/**
 * Bytes of the media.
 */
off_t lode_media_size(lode_media *media);

/**
 * The persistence domain by which copies are made durable: "cpu-cache", "memory", "page-cache" or "volatile" (nothing
 * survives loss of power). Valid for ever; NULL on failure.
 */
const char *lode_media_domain(lode_media *media);

/**
 * From now on this engine copies, whatever lode_media_open was told. Copies under way stay with theirs. Errors:
 * EFAULT, EINVAL (no such engine).
 */
int lode_media_set_engine(lode_media *media,
                          const char *name);

/**
 * Copies bytes bytes from a buffer to offset at of the media, and waits. Any alignment; 0 bytes are no error.
 *
 * flags: 0, or LODE_COPY_DURABLE: durable on return, which in the domain page-cache takes a sync of the file. Without
 * it what is copied is durable after the next lode_media_fence of the same thread. A crash before that leaves any
 * part of the copy. LODE_COPY_LATENCY or LODE_COPY_BANDWIDTH: what is wanted of it beside other copies.
 *
 * crc: NULL, or a CRC-32C (Castagnoli) to be continued by the bytes copied, 0 to begin.
 *
 * Errors: EFAULT, EINVAL (outside of the media; the buffer overlaps its target; a flag), EIO (bad media, a file that
 * was cut, a sync that failed: any part of the target may have changed), EROFS.
 *
 * (With lode_copy_from_media and lode_copy_vectored the calls of Fastmove, Table 3, in user space.)
 */
int lode_copy_to_media(lode_media *media,
                       uint64_t at,
                       const void *buffer,
                       size_t bytes,
                       int flags,
                       uint32_t *crc);

/**
 * Copies bytes bytes from offset at of the media to a buffer, and waits. flags: 0; LODE_COPY_DURABLE changes nothing.
 * crc and errors as lode_copy_to_media; after EIO any part of the buffer may have changed.
 */
int lode_copy_from_media(lode_media *media,
                         uint64_t at,
                         void *buffer,
                         size_t bytes,
                         int flags,
                         uint32_t *crc);

/**
 * Copies count parts, at most 1024, all in one direction (LODE_TO_MEDIA or LODE_FROM_MEDIA), and waits: an engine gets
 * them in as few submissions as it takes. flags and crc as lode_copy_to_media; the checksum goes through the parts in
 * their order. Errors: those of lode_copy_to_media; EINVAL also where targets of two parts overlap.
 */
int lode_copy_vectored(lode_media *media,
                       int direction,
                       const lode_copy *parts,
                       int count,
                       int flags,
                       uint32_t *crc);

/**
 * Begins what lode_copy_to_media does, and returns a ticket for lode_media_poll and lode_media_wait. Until the ticket
 * has ended the buffer is the copy's: it stays where it is, and nobody changes it. With the engines cpu and
 * semaphore, and below an engine's threshold, the copy is made before this returns.
 *
 * crc: NULL, or where the CRC-32C to be continued is, which is read now; lode_media_wait gives the new one.
 *
 * Errors: those of lode_copy_to_media but EIO, which lode_media_wait tells; EAGAIN (nobody waited for 65536 others).
 */
lode_ticket lode_copy_to_media_async(lode_media *media,
                                     uint64_t at,
                                     const void *buffer,
                                     size_t bytes,
                                     int flags,
                                     const uint32_t *crc);

/**
 * Begins what lode_copy_from_media does. Until the ticket has ended nobody uses the buffer. Otherwise as
 * lode_copy_to_media_async.
 */
lode_ticket lode_copy_from_media_async(lode_media *media,
                                       uint64_t at,
                                       void *buffer,
                                       size_t bytes,
                                       int flags,
                                       const uint32_t *crc);

/**
 * Begins what lode_copy_vectored does; the array of parts is read now, the buffers are the copy's. Otherwise as
 * lode_copy_to_media_async.
 */
lode_ticket lode_copy_vectored_async(lode_media *media,
                                     int direction,
                                     const lode_copy *parts,
                                     int count,
                                     int flags,
                                     const uint32_t *crc);

/**
 * 1 where the copy of a ticket has ended, 0 where not, -1 on failure. Once it has, the buffers are the caller's; how it
 * ended, and the end of the ticket, is lode_media_wait's. May copy what an engine left undone. Errors: EINVAL (no
 * such ticket, or it was waited for).
 */
int lode_media_poll(lode_media *media,
                    lode_ticket ticket);

/**
 * Waits until the copy of a ticket has ended, and is durable where that was asked for. Any thread may, and several at
 * once; the first that returns ends the ticket. crc: NULL, or where the checksum goes, if one was asked for. Errors:
 * EINVAL (no such ticket, or it was waited for), EIO (bad media, or a sync that failed): the ticket has ended then,
 * too.
 */
int lode_media_wait(lode_media *media,
                    lode_ticket ticket,
                    uint32_t *crc);

/**
 * Makes durable what this thread copied to the media without LODE_COPY_DURABLE, and the copies by ticket that have
 * ended. Errors: EIO: what of it is kept nobody knows. Durable: those.
 */
int lode_media_fence(lode_media *media);

/**
 * Waits for all copies under way, those of other threads too, then does what lode_media_fence does. Tickets stay, for
 * lode_media_wait to tell how each ended. Errors: EIO.
 */
int lode_media_drain(lode_media *media);

/**
 * Makes a persistent heap in a file (which is made with size= where there is none), a file on a DAX mount, a block
 * device or a device-dax node, and opens it. Returns NULL on failure, and then leaves no file that it made; one
 * that was there is as long as before.
 *
 * opts: NULL, or a comma-separated list of
 *   size=BYTES              the size of the file
 *   label=TEXT              at most 63 bytes
 *   fixed                   always mapped at one address, which is chosen now: objects may hold addresses
 *   address=ADDRESS         the same with this one, a multiple of 2 MiB
 *   force                   also where something is
 *   prefault                take every page now
 *   assume=DOMAIN           cpu-cache, memory or page-cache, as lode_open_pool explains it
 *
 * Errors: EACCES, EADDRINUSE (the place is taken), EBUSY (in use), EEXIST (something is there: force), EINVAL, EIO,
 * EISDIR, EMFILE (256 are open, or 1024 regions mapped), ENODEV (neither a file nor a device that can be mapped), ENOENT (no
 * file, and no size for one), ENOMEM, ENOSPC. Durable.
 */
lode_heap *lode_heap_create(const char *path,
                            const char *opts);

/**
 * Opens a heap. What a crash interrupted is finished or gone; objects that no commit published are free again.
 * Returns NULL on failure, and then has changed nothing, but for EIO: then perhaps some of what was interrupted is
 * finished. opts: NULL, or prefault, assume=DOMAIN as above. One process at a time has a heap open.
 *
 * Errors: EACCES, EADDRINUSE (it has its place, and something else is mapped there), EBUSY (in use), EINVAL (no heap;
 * the file was cut), EIO, EMFILE, ENOENT, ENOMEM, EOPNOTSUPP (of a later version), EUCLEAN (damaged).
 */
lode_heap *lode_heap_open(const char *path,
                          const char *opts);

/**
 * Waits for the calls in flight and closes the heap. The handle and every address in the heap are invalid afterwards,
 * after an error too. Errors: EBADF (closed already), EINVAL, EIO (what was acknowledged is there all the same).
 */
int lode_heap_close(lode_heap *heap);

/**
 * Memory of bytes bytes for the caller alone, until a commit publishes it; content: whatever was there. It is given
 * back by lode_heap_give_back, or by itself when the program ends. Fill it by plain stores: the commit makes them
 * durable. Its address is a multiple of 16. NULL on failure: EINVAL, EIO, ENOSPC.
 */
void *lode_heap_reserve(lode_heap *heap,
                        size_t bytes);

/**
 * Memory that was reserved and not published is free again. Errors: EINVAL where it is not.
 */
int lode_heap_give_back(lode_heap *heap, void *object);

/**
 * All count changes, or none, in every kind of crash. Commits of several threads must not set the same 8 bytes at the
 * same time; nor may one set 8 bytes of an object that another one frees, or lead a root to it. After an error other
 * than EIO nothing has changed, and what was reserved is still reserved.
 *
 * Errors: EBUSY (an object is in two commits), EEXIST (the root has another type), EINVAL (not reserved, not in use,
 * not in an object, no such change), EIO (it may have happened; the heap refuses changes until it is opened again),
 * ENAMETOOLONG (a name of more than 255 bytes), ENOENT (no such root), ENOSPC (no room for a large commit, or for
 * another root). Durable, against power loss in every domain but volatile.
 */
int lode_heap_commit(lode_heap *heap,
                     const lode_heap_change *changes,
                     size_t count);

/**
 * The object that a root leads to; NULL with errno 0 where it leads nowhere. Errors: EEXIST (it has another type),
 * ENOENT (no such root), EUCLEAN (its object was freed).
 */
void *lode_heap_root(lode_heap *heap,
                     const char *name,
                     uint64_t type_number);

/**
 * What was stored to these bytes of published objects is durable on return. A crash before that may leave any part of
 * it: what has to be whole is for lode_heap_commit. Errors: EFAULT, EINVAL (not in the heap), EIO.
 */
int lode_heap_persist(lode_heap *heap,
                      const void *at,
                      size_t bytes);

/**
 * What 8 bytes that LODE_HEAP_LINK set lead to; NULL for nowhere, or where it is not in the heap. (In a heap that has
 * its place they hold the address itself.)
 */
void *lode_heap_linked(lode_heap *heap,
                       uint64_t value);

/**
 * Where an address is, counted from the beginning of the heap: the same at every opening. Errors: EFAULT, EINVAL.
 */
off_t lode_heap_offset(lode_heap *heap,
                       const void *at);

/**
 * Bytes that an object can hold, at least what was asked for. Errors: EFAULT, EINVAL where none begins there.
 */
off_t lode_heap_usable_size(lode_heap *heap, const void *object);

/**
 * What is in use.
 */
int lode_heap_used(lode_heap *heap, lode_heap_usage *usage);

/**
 * Whether no object is there twice, none is lost to the heap, and every root leads to one. Other threads must not
 * reserve or give back meanwhile. Errors: EIO; EUCLEAN where something is wrong: lode_last_error says what.
 */
int lode_heap_check(lode_heap *heap);

/**
 * Opens memory on the file or device at path: a regular file, on a DAX mount, tmpfs or hugetlbfs too, a block device,
 * a device-dax node; path NULL: anonymous memory, to try things with. Returns NULL on failure.
 *
 * bytes: a file is made where there is none, and is so long at least; no more of it is used. 0: what is there.
 * Several processes may use one file, each a part of its own. What is allocated means nothing once the process has
 * ended, and nothing is durable. After fork() parent and child each have their own copy of all of it; the child
 * cannot allocate or free there, but opens memory of its own.
 *
 * flags: 0 or LODE_MEMORY_FAIL.
 *
 * Errors: EACCES, EBUSY (somebody has it alone), EEXIST (it holds a pool, or other data), EINVAL (too small, or no
 * size), EMFILE (64 are open), ENOENT, ENOMEM, ENOSPC.
 */
lode_memory *lode_memory_open(const char *path,
                              uint64_t bytes,
                              int flags);

/**
 * As malloc(3), from this memory. Errors: ENOMEM.
 */
void *lode_memory_alloc(lode_memory *memory, size_t bytes);

/**
 * As aligned_alloc(3), from this memory. Errors: EINVAL (align is no power of two), ENOMEM.
 */
void *lode_memory_alloc_aligned(lode_memory *memory, size_t align, size_t bytes);

/**
 * As realloc(3), of what this memory gave; at NULL allocates. Errors: ENOMEM, and then at is as it was.
 */
void *lode_memory_realloc(lode_memory *memory, void *at, size_t bytes);

/**
 * As free(3), of what this memory gave; at NULL does nothing. Returns 0.
 */
int lode_memory_free(lode_memory *memory, void *at);

/**
 * Says what of the memory is used for what. bytes is sizeof(lode_memory_statistics): of a longer one the rest
 * is not touched. Returns 0. Errors: EFAULT, EINVAL (bytes is smaller than any version had it).
 */
int lode_memory_stats(lode_memory *memory, lode_memory_statistics *to, size_t bytes);

/**
 * Ends a memory and all that was allocated from it. Waits for calls in flight. Returns 0.
 */
int lode_memory_close(lode_memory *memory);

/**
 * Makes a uthread that runs body(argument). It begins when lode_run runs uthreads, which may be later, or
 * when the uthread that made it waits. Its stack has 64 KiB, or LODE_STACK_BYTES. A uthread stays on the
 * thread where it began; it lets others run in lode_yield and lode_join. It keeps its errno over that, but
 * lode_last_error() is of all that run on its thread: ask before others run. Its body has to return:
 * pthread_exit(3) in it ends the process. Join it: its result is kept until then. Errors: EBADF after
 * fork(), EINVAL (LODE_STACK_BYTES), ENOMEM.
 */
lode_uthread *lode_spawn(void *(*body)(void *argument), void *argument);

/**
 * Waits for a uthread's end and gives it back; what its body returned goes to *result, unless that is NULL.
 * From uthreads and from threads, once for each uthread. Errors: EBADF after fork(), EDEADLK (a uthread joins
 * itself), ESRCH for one that is none or was joined.
 */
int lode_join(lode_uthread *uthread, void **result);

/**
 * Lets other uthreads run; outside of a uthread, other threads. In a child of fork() that a uthread called no uthread runs
 * any more: it has to end by _exit(2) or execute a program before the body returns.
 */
void lode_yield(void);

/**
 * Runs uthreads until none is left, on this thread and on nworkers - 1 more; 0 stands for as many as there
 * are CPUs. What another thread spawns as it ends may be left to the next lode_run. Errors: EAGAIN (no
 * thread can be started), EBADF after fork(), EBUSY (another thread is in lode_run), EDEADLK (called by a
 * uthread), EINVAL (more than 1024).
 */
int lode_run(unsigned int nworkers);

/**
 * The last failure of this thread as one sentence: which function, what, and where there is more to
 * say, on which file and what to do about it. Also why lode_open_pool or lode_media_open did not use
 * the profile or the engine that it was to use. Empty where
 * nothing has failed yet. Valid until the next call of this function in the same thread. Never NULL.
 */
const char *lode_last_error(void);

/**
 * What an errno value means, as strerror(3) says it, safe to call from several threads. Valid until the
 * next call of this function in the same thread. Never NULL.
 */
const char *lode_strerror(int errnum);

/**
 * The version of the library, "MAJOR.MINOR.PATCH". Never NULL, valid for ever.
 */
const char *lode_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LODESTONE_H */
