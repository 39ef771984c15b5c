/*
 * fio on a Lodestone pool: ioengine=external:.../liblode_fio.so, pool=POOL.
 *
 * All jobs are threads of one process (thread=1) and share one open pool, as the threads of a program
 * that embeds the library do. Calls complete in queue(): the engine is synchronous. For fio the engine is
 * "diskless", so that fio itself touches no file: what its layout phase does on a disk (making, filling
 * and preallocating files) is done here, inside the pool, in setup().
 *
 * Built against the headers of fio (GPL-2.0); this file may be used under the MIT licence.
 */
#include "fio.h"
#include "optgroup.h"

#include <lodestone.h>

struct lode_options {
    void *unused; /* fio cannot store an option at offset 0 */
    char *pool;
    char *pool_opts;
};

static struct fio_option options[] = {
    {
        .name = "pool",
        .lname = "Lodestone pool",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct lode_options, pool),
        .help = "Pool that holds the files (made by lode mkfs)",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "pool_opts",
        .lname = "Lodestone pool options",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct lode_options, pool_opts),
        .help = "Options of lode_open_pool, such as assume=memory",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = NULL,
    },
};

/* Pools that jobs share. */
struct pool {
    struct pool *next;
    char *path;
    char *opts;
    lode_fs *fs;
    unsigned int jobs;
};

static struct pool *pools;
/* Guards the list, and makes jobs lay out their files one after the other: they may share them. */
static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;

static int failed(struct thread_data *td, int error, const char *where)
{
    td_verror(td, error, where);
    return 1;
}

/* A call of the library failed: its sentence says more than the errno. */
static int lode_failed(struct thread_data *td, const char *where)
{
    int error = errno;

    log_err("lode: %s: %s\n", td->o.name, lode_last_error());
    return failed(td, error, where);
}

static lode_fs *fs_of(struct thread_data *td)
{
    return ((struct pool *)td->io_ops_data)->fs;
}

static bool same(const char *a, const char *b)
{
    return strcmp(a ? a : "", b ? b : "") == 0;
}

static int open_pool(struct thread_data *td, const struct lode_options *o)
{
    struct pool *pool;

    for (pool = pools; pool && !same(pool->path, o->pool); pool = pool->next)
        ;
    if (pool && !same(pool->opts, o->pool_opts)) {
        log_err("lode: %s: the jobs on pool %s have different pool_opts\n", td->o.name, o->pool);
        return failed(td, EINVAL, "pool_opts");
    }
    if (!pool) {
        lode_fs *fs = lode_open_pool(o->pool, o->pool_opts);

        if (!fs)
            return lode_failed(td, "lode_open_pool");
        pool = calloc(1, sizeof(*pool));
        if (pool) {
            pool->path = strdup(o->pool);
            pool->opts = o->pool_opts ? strdup(o->pool_opts) : NULL;
        }
        if (!pool || !pool->path || (o->pool_opts && !pool->opts)) {
            if (pool) {
                free(pool->path);
                free(pool->opts);
            }
            free(pool);
            lode_close_pool(fs);
            return failed(td, ENOMEM, "calloc");
        }
        pool->fs = fs;
        pool->next = pools;
        pools = pool;
    }
    pool->jobs++;
    td->io_ops_data = pool;
    return 0;
}

static void close_pool(struct pool *pool)
{
    struct pool **at = &pools;

    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    if (lode_close_pool(pool->fs) < 0)
        log_err("lode: %s\n", lode_last_error());
    free(pool->path);
    free(pool->opts);
    free(pool);
}

/* Jobs that were set up but never ran had no cleanup. */
static void __attribute__((destructor)) close_pools(void)
{
    while (pools)
        close_pool(pools);
}

/* Makes the directories that lead to a file. */
static int make_parents(struct thread_data *td, const char *file_name)
{
    char path[PATH_MAX];
    char *slash = path;

    if (!*file_name)
        return failed(td, EINVAL, "filename");
    if (snprintf(path, sizeof(path), "%s", file_name) >= (int)sizeof(path))
        return failed(td, ENAMETOOLONG, "filename");
    while ((slash = strchr(slash + 1, '/'))) {
        *slash = '\0';
        if (lode_mkdir(fs_of(td), path, 0755) < 0 && errno != EEXIST)
            return lode_failed(td, "lode_mkdir");
        *slash = '/';
    }
    return 0;
}

/* fallocate=, as fio does it on a disk. */
static int preallocate(struct thread_data *td, int fd, uint64_t size)
{
    int ret = 0;

    switch (td->o.fallocate_mode) {
    case FIO_FALLOCATE_NATIVE:
    case FIO_FALLOCATE_POSIX:
        ret = lode_fallocate(fs_of(td), fd, 0, 0, size);
        break;
    case FIO_FALLOCATE_KEEP_SIZE:
        ret = lode_fallocate(fs_of(td), fd, FALLOC_FL_KEEP_SIZE, 0, size);
        break;
    case FIO_FALLOCATE_TRUNCATE:
        ret = lode_ftruncate(fs_of(td), fd, size);
        break;
    case FIO_FALLOCATE_NONE:
        break;
    }
    return ret < 0 ? lode_failed(td, "fallocate") : 0;
}

static int fill(struct thread_data *td, int fd, uint64_t size)
{
    uint64_t bs = td->o.max_bs[DDIR_WRITE];
    uint64_t at = 0;
    char *buf = malloc(bs);
    int ret = 0;

    if (!buf)
        return failed(td, ENOMEM, "malloc");
    while (at < size && !td->terminate && !ret) {
        uint64_t now = min(bs, size - at);

        fill_io_buffer(td, buf, now, now);
        if (lode_pwrite(fs_of(td), fd, buf, now, at) != (ssize_t)now)
            ret = lode_failed(td, "lode_pwrite");
        at += now;
    }
    free(buf);
    if (!ret && td->o.create_fsync && lode_fsync(fs_of(td), fd) < 0)
        ret = lode_failed(td, "lode_fsync");
    return ret;
}

/* Brings a file that is too short into being, with contents where the job will read or overwrite. */
static int lay_out(struct thread_data *td, struct fio_file *f, uint64_t size)
{
    bool needs_data = td_read(td) || (td_write(td) && td->o.overwrite && !td->o.file_append);
    int ret, fd, flags = O_WRONLY | (td->o.allow_create ? O_CREAT : 0);

    if (read_only) {
        log_err("lode: %s: not laying out %s, because of --readonly\n", td->o.name, f->file_name);
        return failed(td, EROFS, "layout");
    }
    log_info("%s: Laying out IO file in the pool (%s / %lluMiB)\n", td->o.name, f->file_name,
             (unsigned long long)size >> 20);
    if (make_parents(td, f->file_name))
        return 1;
    if (!td->o.file_append && lode_unlink(fs_of(td), f->file_name) < 0 && errno != ENOENT)
        return lode_failed(td, "lode_unlink");
    fd = lode_open(fs_of(td), f->file_name, flags, 0644);
    if (fd < 0)
        return lode_failed(td, "lode_open");
    ret = preallocate(td, fd, size);
    if (!ret && needs_data)
        ret = fill(td, fd, size);
    lode_close(fs_of(td), fd);
    return ret;
}

static int get_file_size(struct thread_data *td, struct fio_file *f)
{
    struct stat st;

    f->filetype = FIO_TYPE_FILE;
    f->real_file_size = 0;
    if (lode_stat(fs_of(td), f->file_name, &st) < 0)
        return errno == ENOENT ? 0 : lode_failed(td, "lode_stat");
    f->real_file_size = st.st_size;
    fio_file_set_size_known(f);
    return 0;
}

/* The size the job wants of a file; 0 where it takes the file as it is. */
static uint64_t wanted_size(struct thread_data *td, struct fio_file *f, uint64_t now)
{
    const struct thread_options *o = &td->o;

    if (!o->file_size_low) {
        /* fio gives the remainder, in blocks, to the first files; one block more does for any. */
        uint64_t each = o->size / o->nr_files;
        uint64_t rest = o->size % o->nr_files ? td_min_bs(td) : 0;

        return o->size ? get_start_offset(td, f) + each + rest : 0;
    }
    if (now >= o->file_size_low && now <= o->file_size_high)
        return now;
    return o->file_size_low == o->file_size_high ? o->file_size_low : get_rand_file_size(td);
}

static int setup_file(struct thread_data *td, struct fio_file *f)
{
    uint64_t want;

    if (get_file_size(td, f))
        return 1;
    want = wanted_size(td, f, f->real_file_size);
    if (f->real_file_size >= want)
        return 0;
    if (!td->o.create_on_open && lay_out(td, f, want))
        return 1;
    f->real_file_size = want;
    return 0;
}

static int setup(struct thread_data *td)
{
    const struct lode_options *o = td->eo;
    struct fio_file *f;
    unsigned int i;
    int ret;

    if (!o->pool || !*o->pool) {
        log_err("lode: %s: the option pool= is missing: the pool that holds the files\n", td->o.name);
        return failed(td, EINVAL, "pool");
    }
    if (!td->o.use_thread) {
        log_err("lode: %s: a pool belongs to one process: add thread=1, so that jobs are threads\n",
                td->o.name);
        return failed(td, EINVAL, "thread");
    }
    pthread_mutex_lock(&pools_lock);
    ret = open_pool(td, o);
    for_each_file(td, f, i) {
        if (!ret)
            ret = setup_file(td, f);
    }
    pthread_mutex_unlock(&pools_lock);
    return ret;
}

static void cleanup(struct thread_data *td)
{
    struct pool *pool = td->io_ops_data;

    if (!pool)
        return;
    td->io_ops_data = NULL;
    pthread_mutex_lock(&pools_lock);
    if (--pool->jobs == 0)
        close_pool(pool);
    pthread_mutex_unlock(&pools_lock);
}

/* The descriptor of an open file. fio's own f->fd stays -1: it would be a descriptor of the kernel's. */
static int fd_of(const struct fio_file *f)
{
    return (int)(intptr_t)FILE_ENG_DATA(f);
}

static int open_file(struct thread_data *td, struct fio_file *f)
{
    int fd, flags = O_RDONLY;

    if (td_write(td) || td_trim(td))
        flags = O_RDWR | td->o.sync_io | (td->o.allow_create ? O_CREAT : 0);
    fd = lode_open(fs_of(td), f->file_name, flags, 0644);
    if (fd < 0)
        return lode_failed(td, "lode_open");
    FILE_SET_ENG_DATA(f, (void *)(intptr_t)fd);
    return 0;
}

static int close_file(struct thread_data *td, struct fio_file *f)
{
    return lode_close(fs_of(td), fd_of(f)) < 0 ? errno : 0;
}

static int unlink_file(struct thread_data *td, struct fio_file *f)
{
    return lode_unlink(fs_of(td), f->file_name) < 0 ? errno : 0;
}

static enum fio_q_status queue(struct thread_data *td, struct io_u *io_u)
{
    lode_fs *fs = fs_of(td);
    int fd = fd_of(io_u->file);
    ssize_t done = -1;

    fio_ro_check(td, io_u);
    io_u->error = 0;
    switch (io_u->ddir) {
    case DDIR_READ:
        done = lode_pread(fs, fd, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset);
        break;
    case DDIR_WRITE:
        done = lode_pwrite(fs, fd, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset);
        break;
    case DDIR_TRIM:
        done = lode_fallocate(fs, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, io_u->offset,
                              io_u->xfer_buflen);
        if (done == 0)
            done = io_u->xfer_buflen;
        break;
    case DDIR_SYNC:
        done = lode_fsync(fs, fd);
        break;
    case DDIR_DATASYNC:
    case DDIR_SYNC_FILE_RANGE:
        done = lode_fdatasync(fs, fd);
        break;
    default:
        errno = EINVAL;
        break;
    }
    if (done < 0) {
        io_u->error = errno;
        lode_failed(td, "queue");
    } else if (ddir_rw(io_u->ddir)) {
        io_u->resid = io_u->xfer_buflen - done;
    }
    return FIO_Q_COMPLETED;
}

struct ioengine_ops ioengine = {
    .name = "lode",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_SYNCIO | FIO_DISKLESSIO | FIO_NODISKUTIL,
    .setup = setup,
    .cleanup = cleanup,
    .open_file = open_file,
    .close_file = close_file,
    .unlink_file = unlink_file,
    .get_file_size = get_file_size,
    .queue = queue,
    .options = options,
    .option_struct_size = sizeof(struct lode_options),
};
