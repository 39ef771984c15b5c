/*
 * The C interface against a pool in a directory of its own: api DIRECTORY.
 *
 * What is checked is the contract at this boundary (values, errno, descriptors, threads, pointers that
 * must not crash); the file system behind it has tests of its own.
 */
#define _GNU_SOURCE 1
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

static lode_fs *fs;
static char pool_path[3000];
/* Of one call. */
static const int classes[] = {0, LODE_COPY_LATENCY, LODE_COPY_BANDWIDTH};

static int make(const char *path, const char *text)
{
    int fd = lode_open(fs, path, O_RDWR | O_CREAT | O_EXCL, 0644);
    CHECK(fd >= 0);
    CHECK(lode_write(fs, fd, text, strlen(text)) == (ssize_t)strlen(text));
    return fd;
}

static void make_closed(const char *path, const char *text)
{
    CHECK(lode_close(fs, make(path, text)) == 0);
}

static bool holds(const char *path, const char *text)
{
    char buf[256];
    int fd = lode_open(fs, path, O_RDONLY, 0);
    CHECK(fd >= 0);
    ssize_t n = lode_read(fs, fd, buf, sizeof buf);
    CHECK(lode_close(fs, fd) == 0);
    return n == (ssize_t)strlen(text) && memcmp(buf, text, strlen(text)) == 0;
}

static mode_t mode_of(const char *path)
{
    struct stat st;
    CHECK(lode_lstat(fs, path, &st) == 0);
    return st.st_mode;
}

/* Both superblocks are gone: said of the file by its name. */
static void damaged_pool(void)
{
    char path[3100], zeros[4096] = {0};
    snprintf(path, sizeof path, "%s.damaged", pool_path);
    CHECK(lode_mkfs(path, 8 << 20, NULL) == 0);
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0);
    CHECK(pwrite(fd, zeros, sizeof zeros, 4096) == sizeof zeros);
    CHECK(pwrite(fd, zeros, sizeof zeros, (8 << 20) - 4096) == sizeof zeros);
    CHECK(close(fd) == 0);
    CHECK(lode_open_pool(path, NULL) == NULL);
    CHECK(strstr(lode_last_error(), path));
    CHECK(unlink(path) == 0);
}

static void pools(void)
{
    lode_fs *other;
    FILE *file;
    char profile[4096], opts[5000];

    FAILS_NULL(ENOENT, lode_open_pool("/nonexistent/pool", NULL));
    CHECK(strstr(lode_last_error(), "/nonexistent/pool"));
    FAILS_NULL(EFAULT, lode_open_pool(NULL, NULL));
    damaged_pool();
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "colour=red"));
    CHECK(strstr(lode_last_error(), "colour=red"));
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "assume=hope"));
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "umask=1777"));
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "floor=0"));
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "starve=never"));
    CHECK(strstr(lode_last_error(), "'never' milliseconds at most: 1 to 60000"));
    CHECK(lode_mkfs(pool_path, 64 << 20, "label=api,data=cow") == 0);
    FAILS(EEXIST, lode_mkfs(pool_path, 64 << 20, NULL));
    FAILS(EINVAL, lode_mkfs(pool_path, 64 << 20, "data=maybe"));
    CHECK(lode_mkfs(pool_path, 64 << 20, "force") == 0);

    other = lode_open_pool(pool_path, "user=root,umask=077,assume=memory");
    CHECK(other);
    FAILS_NULL(EBUSY, lode_open_pool(pool_path, NULL));
    CHECK(lode_umask(other, 022) == 077);
    CHECK(lode_umask(other, 022) == 022);
    CHECK(lode_mkdir(other, "kept", 0755) == 0);
    CHECK(lode_open(other, "left-open", O_CREAT | O_RDWR, 0644) == 0);
    CHECK(lode_close_pool(other) == 0);
    FAILS(EBADF, lode_close_pool(other));
    FAILS(EBADF, lode_mkdir(other, "late", 0755));
    CHECK(strstr(lode_last_error(), "closed"));

    /* A profile is advice: whatever is wrong with it, the pool opens, and there is a sentence about it. */
    CHECK(snprintf(profile, sizeof profile, "%s.profile", pool_path) < (int)sizeof profile);
    CHECK(snprintf(opts, sizeof opts, "profile=%s", profile) < (int)sizeof opts);
    other = lode_open_pool(pool_path, opts);
    CHECK(other && strstr(lode_last_error(), profile) && strstr(lode_last_error(), "cannot be read"));
    CHECK(lode_close_pool(other) == 0);
    CHECK((file = fopen(profile, "w")) && fputs("version = 1\n", file) >= 0 && fclose(file) == 0);
    CHECK(setenv("LODE_PROFILE", profile, 1) == 0);
    other = lode_open_pool(pool_path, NULL);
    CHECK(other && strstr(lode_last_error(), "is missing") && strstr(lode_last_error(), "defaults are used"));
    CHECK(lode_close_pool(other) == 0);
    CHECK(unsetenv("LODE_PROFILE") == 0 && unlink(profile) == 0);
    FAILS_NULL(EINVAL, lode_open_pool(pool_path, "profile="));

    /* So is an engine that cannot be used. */
    if (access("/sys/bus/dsa/devices", F_OK) != 0) {
        other = lode_open_pool(pool_path, "engine=dsa");
        CHECK(other && strstr(lode_last_error(), "lode_open_pool: engine dsa cannot be used"));
        CHECK(lode_close_pool(other) == 0);
    } else {
        printf("SKIPPED: an engine that cannot be used: there may be a dsa\n");
    }

    other = lode_open_pool(pool_path, "ro");
    CHECK(other);
    CHECK(lode_access(other, "kept", F_OK) == 0);
    FAILS(EROFS, lode_mkdir(other, "never", 0755));
    FAILS(EROFS, lode_unlink(other, "left-open"));
    FAILS(EROFS, lode_open(other, "never", O_CREAT | O_RDWR, 0600));
    FAILS(EROFS, lode_open(other, "left-open", O_RDWR, 0));
    CHECK(lode_open(other, "left-open", O_CREAT | O_RDONLY, 0600) == 0 && lode_fsync(other, 0) == 0);
    CHECK(lode_sync(other) == 0);
    struct statvfs whole;
    CHECK(lode_statvfs(other, "/", &whole) == 0 && whole.f_flag & ST_RDONLY);
    FAILS(EROFS, lode_truncate(other, "left-open", (off_t)1 << 50));
    CHECK(lode_close_pool(other) == 0);

    fs = lode_open_pool(pool_path, "umask=022");
    CHECK(fs);
    CHECK(lode_statvfs(fs, "/", &whole) == 0 && !(whole.f_flag & ST_RDONLY));
    FAILS(EFBIG, lode_truncate(fs, "left-open", (off_t)1 << 50));
    CHECK(lode_rmdir(fs, "kept") == 0 && lode_unlink(fs, "left-open") == 0);
}

static void bad_handles(void)
{
    int local;
    char buf[8];
    struct stat st;

    FAILS(EINVAL, lode_close_pool(NULL));
    FAILS(EINVAL, lode_close_pool((lode_fs *)&local));
    FAILS(EINVAL, lode_stat(NULL, "/", &st));
    FAILS(EINVAL, lode_stat((lode_fs *)((char *)fs + 8), "/", &st));
    FAILS_NULL(EINVAL, lode_opendir(NULL, "/"));
    FAILS(EFAULT, lode_stat(fs, NULL, &st));
    FAILS(EFAULT, lode_stat(fs, "/", NULL));
    FAILS(EFAULT, lode_open(fs, NULL, O_RDONLY, 0));
    FAILS(EFAULT, lode_rename(fs, "/a", NULL, 0));
    FAILS(EBADF, lode_read(fs, 99, buf, 8));
    FAILS(EBADF, lode_read(fs, -1, buf, 8));
    FAILS(EBADF, lode_close(fs, 1 << 30));
    FAILS(EBADF, lode_close(fs, AT_FDCWD));
    FAILS(EBADF, lode_dup(fs, 99));
    FAILS_NULL(EBADF, lode_readdir(fs, NULL));
    FAILS_NULL(EBADF, lode_readdir(fs, (lode_dir *)&local));
    FAILS(EBADF, lode_closedir(fs, (lode_dir *)77));

    int fd = make("f", "data");
    FAILS(EFAULT, lode_read(fs, fd, NULL, 8));
    FAILS(EFAULT, lode_write(fs, fd, NULL, 8));
    FAILS(EINVAL, lode_pread(fs, fd, buf, SIZE_MAX, 0));
    FAILS(EINVAL, lode_pread(fs, fd, buf, 8, -1));
    CHECK(lode_write(fs, fd, NULL, 0) == 0);
    CHECK(lode_close(fs, fd) == 0);
    FAILS(EBADF, lode_close(fs, fd));
    CHECK(lode_unlink(fs, "f") == 0);
}

static void descriptors(void)
{
    char buf[64];
    struct stat st;

    CHECK(make("a", "0123456789") == 0);
    CHECK(lode_open(fs, "a", O_RDONLY, 0) == 1);
    CHECK(lode_open(fs, "a", O_WRONLY, 0) == 2);
    CHECK(lode_close(fs, 1) == 0);
    CHECK(lode_open(fs, "a", O_RDONLY, 0) == 1);

    FAILS(EBADF, lode_write(fs, 1, "x", 1));
    FAILS(EBADF, lode_pwrite(fs, 1, "x", 1, 0));
    FAILS(EBADF, lode_read(fs, 2, buf, 1));
    FAILS(EINVAL, lode_ftruncate(fs, 1, 0));
    FAILS(EBADF, lode_fallocate(fs, 1, 0, 0, 10));

    CHECK(lode_dup(fs, 1) == 3);
    CHECK(lode_read(fs, 1, buf, 4) == 4 && memcmp(buf, "0123", 4) == 0);
    CHECK(lode_read(fs, 3, buf, 4) == 4 && memcmp(buf, "4567", 4) == 0);
    CHECK(lode_close(fs, 1) == 0);
    CHECK(lode_read(fs, 3, buf, 4) == 2 && memcmp(buf, "89", 2) == 0);
    CHECK(lode_read(fs, 3, buf, 4) == 0);

    CHECK(lode_lseek(fs, 3, -3, SEEK_END) == 7);
    CHECK(lode_lseek(fs, 3, -2, SEEK_CUR) == 5);
    FAILS(EINVAL, lode_lseek(fs, 3, -6, SEEK_CUR));
    CHECK(lode_lseek(fs, 3, 0, SEEK_CUR) == 5);
    FAILS(EINVAL, lode_lseek(fs, 3, 0, 17));
    CHECK(lode_lseek(fs, 3, 4, SEEK_DATA) == 4);
    CHECK(lode_lseek(fs, 3, 4, SEEK_HOLE) == 10);
    FAILS(ENXIO, lode_lseek(fs, 3, 10, SEEK_DATA));
    FAILS(ENXIO, lode_lseek(fs, 3, -1, SEEK_HOLE));

    CHECK(lode_pwrite(fs, 0, "abc", 3, 20) == 3);
    CHECK(lode_fstat(fs, 0, &st) == 0 && st.st_size == 23 && st.st_blksize == 4096);
    CHECK(lode_pread(fs, 0, buf, 64, 8) == 15 && memcmp(buf, "89\0\0\0\0\0\0\0\0\0\0abc", 15) == 0);
    CHECK(lode_ftruncate(fs, 0, 5) == 0 && lode_ftruncate(fs, 0, 8) == 0);
    CHECK(lode_pread(fs, 0, buf, 64, 0) == 8 && memcmp(buf, "01234\0\0\0", 8) == 0);
    FAILS(EINVAL, lode_ftruncate(fs, 0, -1));
    FAILS(EFBIG, lode_ftruncate(fs, 0, (1LL << 44) + 1));
    FAILS(EFBIG, lode_pwrite(fs, 0, "x", 1, 1LL << 44));
    CHECK(lode_fsync(fs, 0) == 0 && lode_fdatasync(fs, 3) == 0 && lode_sync(fs) == 0);

    static char bulk[300000], back[300000];
    const char *engines[] = {"delegate", "semaphore", "dsa", "ioat", "emu", "emu-ioat", "cpu", NULL};
    for (int i = 0; engines[i]; i++) {
        memset(bulk, 'a' + i, sizeof bulk);
        CHECK(lode_set_engine(fs, 0, engines[i]) == 0);
        CHECK(lode_pwrite(fs, 0, bulk, sizeof bulk, 100 + i) == sizeof bulk);
        CHECK(lode_pread(fs, 0, back, sizeof back, 100 + i) == sizeof back && memcmp(bulk, back, sizeof back) == 0);
    }
    for (int i = 0; i < 400; i++)
        CHECK(lode_pwrite(fs, 0, bulk, 5000, 100) == 5000 && lode_pread(fs, 0, back, 5000, 100) == 5000);
    for (int i = LODE_READS; i <= LODE_WRITES; i++) {
        lode_times t;
        CHECK(lode_get_times(fs, i, &t) == 0 && t.operations > 0 && t.bytes > 0);
        CHECK(t.copy_ns > 0 && t.metadata_ns > 0 && t.index_ns > 0 && t.wait_ns > 0);
    }
    FAILS(EINVAL, lode_get_times(fs, 2, (lode_times *)back));
    FAILS(EFAULT, lode_get_times(fs, LODE_READS, NULL));
    FAILS(EINVAL, lode_set_engine(fs, 0, "gpu"));
    CHECK(strstr(lode_last_error(), "delegate") != NULL);
    FAILS(EBADF, lode_set_engine(fs, 99, "cpu"));
    CHECK(lode_set_class(fs, 0, "bandwidth:7") == 0 && lode_set_class(fs, 0, "latency") == 0);
    CHECK(lode_set_class(fs, 0, NULL) == 0);
    FAILS(EINVAL, lode_set_class(fs, 0, "fast"));
    FAILS(EBADF, lode_set_class(fs, 99, "latency"));
    CHECK(strstr(lode_last_error(), "lode_set_class") != NULL);
    /* Of one call; -1 stands for the descriptor's own offset, which moves. */
    CHECK(lode_set_engine(fs, 0, "emu") == 0);
    for (int i = 0; i < 3; i++) {
        off_t own = lode_lseek(fs, 0, 500000, SEEK_SET);

        memset(bulk, 'p' + i, sizeof bulk);
        CHECK(lode_pwrite2(fs, 0, bulk, sizeof bulk, 100 + i, classes[i]) == sizeof bulk);
        CHECK(lode_pread2(fs, 0, back, sizeof back, 100 + i, classes[i]) == sizeof back);
        CHECK(memcmp(bulk, back, sizeof back) == 0 && lode_lseek(fs, 0, 0, SEEK_CUR) == own);
        CHECK(lode_pwrite2(fs, 0, bulk, sizeof bulk, -1, classes[i]) == sizeof bulk);
        CHECK(lode_lseek(fs, 0, own, SEEK_SET) == own && lode_fstat(fs, 0, &st) == 0);
        CHECK(st.st_size == (off_t)(own + sizeof bulk));
        memset(back, 0, sizeof back);
        CHECK(lode_pread2(fs, 0, back, sizeof back, -1, classes[i]) == sizeof back);
        CHECK(memcmp(bulk, back, sizeof back) == 0 && lode_lseek(fs, 0, 0, SEEK_CUR) == st.st_size);
    }
    const int wrong[] = {LODE_COPY_DURABLE, LODE_COPY_LATENCY | LODE_COPY_BANDWIDTH, 8};
    for (int i = 0; i < 3; i++) {
        FAILS(EINVAL, lode_pread2(fs, 0, back, 1, 0, wrong[i]));
        CHECK(strstr(lode_last_error(), "lode_pread2") && strstr(lode_last_error(), "LODE_COPY_LATENCY"));
        FAILS(EINVAL, lode_pwrite2(fs, 0, "x", 1, 0, wrong[i]));
        FAILS(EINVAL, lode_pread2_async(fs, 0, back, 1, 0, wrong[i]));
        FAILS(EINVAL, lode_pwrite2_async(fs, 0, "x", 1, 0, wrong[i]));
    }
    FAILS(EINVAL, lode_pread2(fs, 0, back, 1, -2, 0));
    FAILS(EBADF, lode_pwrite2(fs, 99, "x", 1, 0, LODE_COPY_LATENCY));
    CHECK(lode_set_engine(fs, 0, NULL) == 0 && lode_lseek(fs, 0, 0, SEEK_SET) == 0);
    CHECK(lode_ftruncate(fs, 0, 8) == 0);
    CHECK(lode_fchmod(fs, 0, 0444) == 0);
    CHECK(lode_pwrite(fs, 0, "x", 1, 0) == 1 && lode_ftruncate(fs, 0, 4) == 0);

    for (int fd = 0; fd < 4; fd++)
        CHECK(lode_close(fs, fd) == (fd == 1 ? -1 : 0));
    CHECK(lode_unlink(fs, "a") == 0);
}

static void open_flags(void)
{
    char buf[8];
    struct stat st;
    int fd, dir;

    FAILS(ENOENT, lode_open(fs, "", O_RDONLY, 0));
    FAILS(ENOENT, lode_open(fs, "none", O_RDONLY, 0));
    FAILS(ENOENT, lode_open(fs, "none/x", O_CREAT | O_RDWR, 0644));
    make_closed("f", "text");
    FAILS(EEXIST, lode_open(fs, "f", O_CREAT | O_EXCL | O_RDWR, 0644));
    FAILS(ENOTDIR, lode_open(fs, "f/x", O_RDONLY, 0));
    FAILS(ENOTDIR, lode_open(fs, "f", O_RDONLY | O_DIRECTORY, 0));
    FAILS(ENOTDIR, lode_open(fs, "f/", O_RDONLY, 0));
    FAILS(EISDIR, lode_open(fs, "new/", O_CREAT | O_RDWR, 0644));
    FAILS(EISDIR, lode_open(fs, "/", O_RDWR, 0));
    FAILS(EISDIR, lode_open(fs, "/", O_RDONLY | O_TRUNC, 0));
    FAILS(EISDIR, lode_open(fs, ".", O_RDONLY | O_CREAT, 0));
    FAILS(EEXIST, lode_open(fs, "..", O_RDONLY | O_CREAT | O_EXCL, 0));
    FAILS(EINVAL, lode_open(fs, "x", O_RDONLY | O_CREAT | O_DIRECTORY, 0));

    char name[4200];
    memset(name, 'n', sizeof name);
    name[256] = 0;
    FAILS(ENAMETOOLONG, lode_open(fs, name, O_CREAT | O_RDWR, 0644));
    name[255] = 0;
    CHECK((fd = lode_open(fs, name, O_CREAT | O_RDWR, 0644)) >= 0 && lode_close(fs, fd) == 0);
    CHECK(lode_unlink(fs, name) == 0);
    memset(name, '/', sizeof name);
    name[4096] = 0;
    FAILS(ENAMETOOLONG, lode_open(fs, name, O_RDONLY, 0));
    name[4095] = 0;
    CHECK((fd = lode_open(fs, name, O_RDONLY, 0)) >= 0 && lode_close(fs, fd) == 0);

    /* Symbolic links. */
    CHECK(lode_symlink(fs, "f", "link") == 0 && lode_symlink(fs, "target", "dangling") == 0);
    CHECK(lode_symlink(fs, "round", "about") == 0 && lode_symlink(fs, "about", "round") == 0);
    FAILS(ELOOP, lode_open(fs, "link", O_RDONLY | O_NOFOLLOW, 0));
    FAILS(ELOOP, lode_open(fs, "link", O_RDONLY | O_NOFOLLOW | O_CREAT, 0));
    FAILS(EEXIST, lode_open(fs, "dangling", O_RDWR | O_CREAT | O_EXCL, 0644));
    FAILS(ELOOP, lode_open(fs, "round", O_RDONLY, 0));
    FAILS(ELOOP, lode_open(fs, "round", O_RDWR | O_CREAT, 0644));
    FAILS(ENOENT, lode_open(fs, "dangling", O_RDONLY, 0));
    CHECK((fd = lode_open(fs, "dangling", O_RDWR | O_CREAT, 0644)) >= 0 && lode_close(fs, fd) == 0);
    CHECK(lode_unlink(fs, "target") == 0);
    CHECK((fd = lode_open(fs, "link", O_WRONLY | O_CREAT | O_TRUNC, 0644)) >= 0);
    CHECK(lode_fstat(fs, fd, &st) == 0 && st.st_size == 0 && lode_close(fs, fd) == 0);

    /* O_PATH is a place, not an open file. */
    CHECK((fd = lode_open(fs, "f", O_PATH | O_RDWR, 0)) >= 0 && lode_fstat(fs, fd, &st) == 0);
    FAILS(EBADF, lode_read(fs, fd, buf, 1));
    FAILS(EBADF, lode_write(fs, fd, "x", 1));
    FAILS(EBADF, lode_fchmod(fs, fd, 0600));
    FAILS(EBADF, lode_fsync(fs, fd));
    FAILS(EBADF, lode_fgetxattr(fs, fd, "user.x", buf, 1));
    CHECK(lode_close(fs, fd) == 0);
    CHECK((fd = lode_open(fs, "link", O_PATH | O_NOFOLLOW, 0)) >= 0);
    CHECK(lode_fstat(fs, fd, &st) == 0 && S_ISLNK(st.st_mode) && lode_close(fs, fd) == 0);

    /* O_APPEND, also against pwrite, as on Linux. */
    CHECK((fd = lode_open(fs, "f", O_WRONLY | O_APPEND, 0)) >= 0);
    CHECK(lode_write(fs, fd, "ab", 2) == 2 && lode_lseek(fs, fd, 0, SEEK_SET) == 0);
    CHECK(lode_write(fs, fd, "cd", 2) == 2 && lode_lseek(fs, fd, 0, SEEK_CUR) == 4);
    CHECK(lode_pwrite(fs, fd, "ef", 2, 0) == 2 && lode_close(fs, fd) == 0);
    CHECK(holds("f", "abcdef"));

    /* O_TMPFILE. */
    FAILS(EINVAL, lode_open(fs, "/", O_TMPFILE | O_RDONLY, 0600));
    CHECK((fd = lode_open(fs, "/", O_TMPFILE | O_RDWR, 0600)) >= 0);
    CHECK(lode_write(fs, fd, "late", 4) == 4 && lode_flink(fs, fd, "named") == 0);
    CHECK(lode_close(fs, fd) == 0 && holds("named", "late"));
    CHECK((fd = lode_open(fs, "/", O_TMPFILE | O_RDWR | O_EXCL, 0600)) >= 0);
    FAILS(ENOENT, lode_flink(fs, fd, "never"));
    CHECK(lode_close(fs, fd) == 0);

    /* Relative to a directory. */
    CHECK(lode_mkdir(fs, "dir", 0755) == 0 && (dir = lode_open(fs, "dir", O_RDONLY, 0)) >= 0);
    CHECK((fd = lode_openat(fs, dir, "in", O_CREAT | O_RDWR, 0644)) >= 0 && lode_close(fs, fd) == 0);
    CHECK(lode_access(fs, "dir/in", F_OK) == 0);
    FAILS(EISDIR, lode_read(fs, dir, buf, 1));
    CHECK((fd = lode_open(fs, "f", O_RDONLY, 0)) >= 0);
    FAILS(ENOTDIR, lode_openat(fs, fd, "in", O_RDONLY, 0));
    FAILS(EBADF, lode_openat(fs, 500, "in", O_RDONLY, 0));
    CHECK(lode_close(fs, fd) == 0 && lode_close(fs, dir) == 0);

    /* Unlinked but open. */
    CHECK((fd = lode_open(fs, "dir/in", O_RDWR, 0)) >= 0 && lode_unlink(fs, "dir/in") == 0);
    CHECK(lode_pwrite(fs, fd, "still here", 10, 0) == 10 && lode_pread(fs, fd, buf, 5, 0) == 5);
    CHECK(lode_fstat(fs, fd, &st) == 0 && st.st_nlink == 0);
    FAILS(ENOENT, lode_flink(fs, fd, "back"));
    CHECK(lode_close(fs, fd) == 0);

    static const char *const rest[] = {"f", "link", "dangling", "about", "round", "named"};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
        CHECK(lode_unlink(fs, rest[i]) == 0);
    CHECK(lode_rmdir(fs, "dir") == 0);
}

static void names(void)
{
    char buf[32];
    struct stat st;

    CHECK(lode_mkdir(fs, "d/", 0777) == 0 && mode_of("d") == (S_IFDIR | 0755));
    FAILS(EEXIST, lode_mkdir(fs, "d", 0777));
    FAILS(EEXIST, lode_mkdir(fs, "/", 0777));
    FAILS(EEXIST, lode_mkdir(fs, "d/.", 0777));
    make_closed("d/f", "f");
    FAILS(ENOTEMPTY, lode_rmdir(fs, "d"));
    FAILS(EINVAL, lode_rmdir(fs, "d/."));
    FAILS(ENOTEMPTY, lode_rmdir(fs, "d/.."));
    FAILS(EBUSY, lode_rmdir(fs, "/"));
    FAILS(ENOTDIR, lode_rmdir(fs, "d/f"));
    FAILS(EISDIR, lode_unlink(fs, "d"));
    FAILS(EISDIR, lode_unlink(fs, "d/"));
    FAILS(EISDIR, lode_unlink(fs, "/"));
    FAILS(ENOTDIR, lode_unlink(fs, "d/f/"));
    FAILS(ENOENT, lode_unlink(fs, "d/none/"));

    CHECK(lode_link(fs, "d/f", "g") == 0 && lode_stat(fs, "g", &st) == 0 && st.st_nlink == 2);
    FAILS(EEXIST, lode_link(fs, "d/f", "g"));
    FAILS(EPERM, lode_link(fs, "d", "h"));
    FAILS(ENOENT, lode_link(fs, "g", "h/"));

    make_closed("x", "x");
    FAILS(EEXIST, lode_rename(fs, "x", "g", RENAME_NOREPLACE));
    FAILS(EEXIST, lode_rename(fs, "x", "d/..", RENAME_NOREPLACE));
    FAILS(EBUSY, lode_rename(fs, "x", "d/..", 0));
    FAILS(EBUSY, lode_rename(fs, "d/.", "y", 0));
    FAILS(EINVAL, lode_rename(fs, "x", "g", RENAME_NOREPLACE | RENAME_EXCHANGE));
    FAILS(EINVAL, lode_rename(fs, "x", "g", 1u << 20));
    FAILS(EINVAL, lode_rename(fs, "d", "d/inside", 0));
    FAILS(EISDIR, lode_rename(fs, "x", "d", 0));
    FAILS(ENOTDIR, lode_rename(fs, "d", "x", 0));
    FAILS(ENOTDIR, lode_rename(fs, "x", "new/", 0));
    FAILS(ENOTDIR, lode_rename(fs, "x/", "new", 0));
    CHECK(lode_rename(fs, "x", "d/f", RENAME_EXCHANGE) == 0 && holds("x", "f") && holds("d/f", "x"));
    CHECK(lode_rename(fs, "x", "g", 0) == 0 && lode_access(fs, "x", F_OK) == 0); /* one file, two names */
    CHECK(lode_rename(fs, "d/f", "g", 0) == 0 && holds("g", "x"));
    CHECK(lode_rename(fs, "d/", "e/", 0) == 0 && lode_rmdir(fs, "e/") == 0);

    CHECK(lode_symlink(fs, "some/where", "s") == 0);
    FAILS(EEXIST, lode_symlink(fs, "some/where", "s"));
    FAILS(ENOENT, lode_symlink(fs, "", "t"));
    CHECK(lode_readlink(fs, "s", buf, sizeof buf) == 10 && memcmp(buf, "some/where", 10) == 0);
    CHECK(lode_readlink(fs, "s", buf, 4) == 4);
    FAILS(EINVAL, lode_readlink(fs, "s", buf, 0));
    FAILS(EINVAL, lode_readlink(fs, "g", buf, 4));
    CHECK(lode_lstat(fs, "s", &st) == 0 && S_ISLNK(st.st_mode) && st.st_size == 10);
    FAILS(ENOENT, lode_stat(fs, "s", &st));

    CHECK(lode_mknod(fs, "fifo", S_IFIFO | 0600, 0) == 0 && mode_of("fifo") == (S_IFIFO | 0600));
    CHECK(lode_mknod(fs, "plain", 0600, 0) == 0 && mode_of("plain") == (S_IFREG | 0600));
    FAILS(ENXIO, lode_open(fs, "fifo", O_RDONLY, 0));
    FAILS(ENXIO, lode_open(fs, "fifo", O_RDWR | O_CREAT, 0600));
    FAILS(EEXIST, lode_mknod(fs, "plain", S_IFREG | 0600, 0));
    FAILS(EPERM, lode_mknod(fs, "dir", S_IFDIR | 0700, 0));
    FAILS(EINVAL, lode_mknod(fs, "l", S_IFLNK | 0700, 0));

    static const char *const rest[] = {"g", "x", "s", "fifo", "plain"};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
        CHECK(lode_unlink(fs, rest[i]) == 0);
}

static void attributes(void)
{
    struct stat st, root;
    struct statvfs vfs;
    struct timespec t[2] = {{-5, 7}, {5000000000, 999999999}};
    int fd = make("f", "1234");

    CHECK(lode_stat(fs, "/", &root) == 0 && S_ISDIR(root.st_mode) && root.st_nlink == 2);
    CHECK(lode_stat(fs, "/f", &st) == 0 && st.st_mode == (S_IFREG | 0644) && st.st_size == 4);
    CHECK(st.st_dev == root.st_dev && st.st_dev != 0 && st.st_ino != root.st_ino && st.st_nlink == 1);
    CHECK(st.st_uid == geteuid() && st.st_gid == getegid());
    CHECK(lode_chmod(fs, "f", 04751) == 0 && mode_of("f") == (S_IFREG | 04751));
    CHECK(lode_fchmod(fs, fd, 0640) == 0 && mode_of("f") == (S_IFREG | 0640));

    CHECK(lode_utimens(fs, "f", t, 0) == 0 && lode_stat(fs, "f", &st) == 0);
    CHECK(st.st_atim.tv_sec == -5 && st.st_atim.tv_nsec == 7);
    CHECK(st.st_mtim.tv_sec == 5000000000 && st.st_mtim.tv_nsec == 999999999);
    t[0].tv_nsec = UTIME_OMIT;
    t[1].tv_nsec = UTIME_NOW;
    CHECK(lode_futimens(fs, fd, t) == 0 && lode_fstat(fs, fd, &st) == 0);
    CHECK(st.st_atim.tv_sec == -5 && st.st_mtim.tv_sec > 1700000000 && st.st_mtim.tv_sec < 5000000000);
    CHECK(lode_futimens(fs, fd, NULL) == 0 && lode_fstat(fs, fd, &st) == 0 && st.st_atim.tv_sec > 1700000000);
    t[0].tv_nsec = 1000000000;
    FAILS(EINVAL, lode_utimens(fs, "f", t, 0));
    FAILS(EINVAL, lode_utimens(fs, "f", NULL, 1 << 30));

    CHECK(lode_chown(fs, "f", (uid_t)-1, (gid_t)-1) == 0 && lode_fchown(fs, fd, geteuid(), getegid()) == 0);
    CHECK(lode_symlink(fs, "none", "s") == 0 && lode_lchown(fs, "s", geteuid(), (gid_t)-1) == 0);
    FAILS(ENOENT, lode_chown(fs, "s", geteuid(), (gid_t)-1));
    t[0] = (struct timespec){1, 2};
    CHECK(lode_utimens(fs, "s", t, AT_SYMLINK_NOFOLLOW) == 0 && lode_lstat(fs, "s", &st) == 0);
    CHECK(st.st_atim.tv_sec == 1 && st.st_atim.tv_nsec == 2);

    CHECK(lode_access(fs, "f", R_OK | W_OK) == 0);
    FAILS(EACCES, lode_access(fs, "f", X_OK));
    FAILS(ENOENT, lode_access(fs, "none", F_OK));
    FAILS(EINVAL, lode_access(fs, "f", 8));

    CHECK(lode_statvfs(fs, "/", &vfs) == 0 && vfs.f_frsize * vfs.f_blocks <= 64 << 20);
    CHECK(vfs.f_namemax == 255 && vfs.f_bfree > 0 && vfs.f_bfree < vfs.f_blocks);
    CHECK(lode_fstatvfs(fs, fd, &vfs) == 0);
    FAILS(EBADF, lode_fstatvfs(fs, 77, &vfs));

    CHECK(lode_fallocate(fs, fd, 0, 0, 1 << 20) == 0 && lode_fstat(fs, fd, &st) == 0);
    CHECK(st.st_size == 1 << 20 && st.st_blocks >= 2048);
    CHECK(lode_fallocate(fs, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 20) == 0);
    CHECK(lode_fstat(fs, fd, &st) == 0 && st.st_size == 1 << 20 && st.st_blocks < 2048);
    FAILS(EINVAL, lode_fallocate(fs, fd, 0, 0, 0));
    FAILS(EOPNOTSUPP, lode_fallocate(fs, fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096));
    CHECK(lode_truncate(fs, "f", 3) == 0 && lode_fstat(fs, fd, &st) == 0 && st.st_size == 3);
    FAILS(EISDIR, lode_truncate(fs, "/", 3));

    CHECK(lode_close(fs, fd) == 0 && lode_unlink(fs, "f") == 0 && lode_unlink(fs, "s") == 0);
}

static void xattrs(void)
{
    char buf[64];
    int fd = make("f", "");

    CHECK(lode_setxattr(fs, "f", "user.one", "1", 1, 0) == 0);
    FAILS(EEXIST, lode_setxattr(fs, "f", "user.one", "2", 1, XATTR_CREATE));
    FAILS(ENODATA, lode_setxattr(fs, "f", "user.two", "2", 1, XATTR_REPLACE));
    FAILS(EINVAL, lode_setxattr(fs, "f", "user.two", "2", 1, 64));
    FAILS(EOPNOTSUPP, lode_setxattr(fs, "f", "nothing.known", "2", 1, 0));
    CHECK(lode_fsetxattr(fs, fd, "user.empty", NULL, 0, 0) == 0);
    CHECK(lode_getxattr(fs, "f", "user.one", NULL, 0) == 1);
    CHECK(lode_fgetxattr(fs, fd, "user.one", buf, sizeof buf) == 1 && buf[0] == '1');
    CHECK(lode_getxattr(fs, "f", "user.empty", buf, sizeof buf) == 0);
    CHECK(lode_setxattr(fs, "f", "user.one", "longer", 6, XATTR_REPLACE) == 0);
    FAILS(ERANGE, lode_getxattr(fs, "f", "user.one", buf, 5));
    FAILS(ENODATA, lode_getxattr(fs, "f", "user.none", buf, 5));
    CHECK(lode_listxattr(fs, "f", NULL, 0) == 20 && lode_listxattr(fs, "f", buf, sizeof buf) == 20);
    FAILS(ERANGE, lode_flistxattr(fs, fd, buf, 19));
    CHECK(lode_removexattr(fs, "f", "user.empty") == 0);
    FAILS(ENODATA, lode_fremovexattr(fs, fd, "user.empty"));
    CHECK(lode_flistxattr(fs, fd, buf, sizeof buf) == 9 && memcmp(buf, "user.one", 9) == 0);
    FAILS(EFAULT, lode_setxattr(fs, "f", NULL, "1", 1, 0));

    CHECK(lode_symlink(fs, "f", "s") == 0);
    CHECK(lode_getxattr(fs, "s", "user.one", buf, sizeof buf) == 6);
    FAILS(ENODATA, lode_lgetxattr(fs, "s", "user.one", buf, sizeof buf));
    FAILS(EPERM, lode_lsetxattr(fs, "s", "user.one", "1", 1, 0));
    CHECK(lode_llistxattr(fs, "s", buf, sizeof buf) == 0);
    FAILS(geteuid() == 0 ? ENODATA : EPERM, lode_lremovexattr(fs, "s", "trusted.one"));
    CHECK(lode_close(fs, fd) == 0 && lode_unlink(fs, "f") == 0 && lode_unlink(fs, "s") == 0);
}

static void directories(void)
{
    enum { ENTRIES = 500 };
    char name[300];
    bool seen[ENTRIES] = {0};
    struct dirent *entry;
    struct stat st;
    int dots = 0, others = 0, n, end;

    CHECK(lode_mkdir(fs, "many", 0755) == 0);
    for (int i = 0; i < ENTRIES; i++) {
        snprintf(name, sizeof name, "many/entry-%d", i);
        make_closed(name, "");
    }
    lode_dir *dir = lode_opendir(fs, "many");
    CHECK(dir && lode_dirfd(fs, dir) >= 0);
    long places[ENTRIES + 3];
    char names_at[ENTRIES + 2][24];
    for (int i = 0;; i++) {
        CHECK((places[i] = lode_telldir(fs, dir)) >= 0);
        errno = 0;
        if (!(entry = lode_readdir(fs, dir)))
            break;
        CHECK(i < ENTRIES + 2 && strlen(entry->d_name) < sizeof names_at[0]);
        strcpy(names_at[i], entry->d_name);
        if (entry->d_name[0] == '.') {
            CHECK(entry->d_type == DT_DIR);
            dots++;
            continue;
        }
        CHECK(sscanf(entry->d_name, "entry-%d%n", &n, &end) == 1 && entry->d_name[end] == 0);
        CHECK(n >= 0 && n < ENTRIES && !seen[n]);
        seen[n] = true;
        others++;
        snprintf(name, sizeof name, "many/%s", entry->d_name);
        CHECK(entry->d_type == DT_REG && lode_stat(fs, name, &st) == 0 && st.st_ino == entry->d_ino);
    }
    CHECK(errno == 0 && dots == 2 && others == ENTRIES);
    CHECK(lode_readdir(fs, dir) == NULL && errno == 0);

    CHECK(lode_rewinddir(fs, dir) == 0 && (entry = lode_readdir(fs, dir)) && strcmp(entry->d_name, ".") == 0);
    static const int some[] = {ENTRIES + 1, 1, 250, 2, 499, 0};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        CHECK(lode_seekdir(fs, dir, places[some[i]]) == 0 && lode_telldir(fs, dir) == places[some[i]]);
        CHECK((entry = lode_readdir(fs, dir)) && strcmp(entry->d_name, names_at[some[i]]) == 0);
    }
    /* Entries go while the stream is read: the others stay. */
    CHECK(lode_rewinddir(fs, dir) == 0);
    for (others = 0; (entry = lode_readdir(fs, dir));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "many/%s", entry->d_name);
        CHECK(lode_unlink(fs, name) == 0);
        others++;
    }
    CHECK(others == ENTRIES);
    int fd = lode_dirfd(fs, dir);
    CHECK(lode_closedir(fs, dir) == 0);
    FAILS(EBADF, lode_closedir(fs, dir));
    FAILS_NULL(EBADF, lode_readdir(fs, dir));
    FAILS(EBADF, lode_close(fs, fd));
    FAILS_NULL(ENOENT, lode_opendir(fs, "none"));
    make_closed("f", "");
    FAILS_NULL(ENOTDIR, lode_opendir(fs, "f"));
    /* A directory that was removed while it is read has no entries. */
    CHECK((dir = lode_opendir(fs, "many")) && lode_rmdir(fs, "many") == 0);
    errno = 0;
    CHECK(lode_readdir(fs, dir) == NULL && errno == 0 && lode_closedir(fs, dir) == 0);
    CHECK(lode_unlink(fs, "f") == 0);
}

static void errors(void)
{
    CHECK(strcmp(lode_strerror(ENOENT), strerror(ENOENT)) == 0);
    CHECK(strstr(lode_strerror(99999), "99999"));
    CHECK(strlen(lode_version()) >= 5);
    FAILS(ENOENT, lode_unlink(fs, "none"));
    CHECK(strncmp(lode_last_error(), "lode_unlink: ", 13) == 0);
}

/* Threads. Each thread checks with CHECK, which ends the process: `checks` is only a count of checks. */

enum { THREADS = 4, RECORDS = 2000 };
static int shared_fd;
static atomic_bool stop;

static void in_threads(void *(*run)(void *))
{
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, run, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void *write_records(void *arg)
{
    for (uint64_t i = 0; i < RECORDS; i++) {
        uint64_t record = (uintptr_t)arg * RECORDS + i;
        if (lode_write(fs, shared_fd, &record, sizeof record) != sizeof record)
            abort();
    }
    return NULL;
}

static atomic_uchar records_read[THREADS * RECORDS];

static void *read_records(void *arg)
{
    uint64_t record;
    ssize_t n;
    (void)arg;
    while ((n = lode_read(fs, shared_fd, &record, sizeof record)) == sizeof record)
        atomic_fetch_add(&records_read[record], 1);
    if (n != 0)
        abort();
    return NULL;
}

/* Every record lands once, and is read once: the offset moves with the bytes. */
static void threads_share_an_offset(int flags)
{
    struct stat st;
    shared_fd = lode_open(fs, "records", O_RDWR | O_CREAT | O_EXCL | flags, 0644);
    CHECK(shared_fd >= 0);
    in_threads(write_records);
    CHECK(lode_fstat(fs, shared_fd, &st) == 0 && st.st_size == THREADS * RECORDS * 8);
    CHECK(lode_lseek(fs, shared_fd, 0, SEEK_SET) == 0);
    memset(records_read, 0, sizeof records_read);
    in_threads(read_records);
    for (int i = 0; i < THREADS * RECORDS; i++)
        CHECK(records_read[i] == 1);
    CHECK(lode_close(fs, shared_fd) == 0 && lode_unlink(fs, "records") == 0);
}

static void *use_what_closes(void *arg)
{
    char buf[16];
    (void)arg;
    while (!stop) {
        ssize_t n = lode_pread(fs, 0, buf, sizeof buf, 0);
        if (n == -1 ? errno != EBADF : n != 4 || memcmp(buf, "text", 4))
            abort();
    }
    return NULL;
}

static void *close_and_open(void *arg)
{
    (void)arg;
    for (int i = 0; i < 3000; i++)
        if (lode_open(fs, "text", O_RDONLY, 0) != 0 || lode_close(fs, 0) != 0)
            abort();
    stop = true;
    return NULL;
}

static void a_close_may_race_with_uses(void)
{
    pthread_t users[2], closer;
    make_closed("text", "text");
    stop = false;
    CHECK(pthread_create(&closer, NULL, close_and_open, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&users[i], NULL, use_what_closes, NULL) == 0);
    CHECK(pthread_join(closer, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(users[i], NULL) == 0);
    CHECK(lode_unlink(fs, "text") == 0);
}

static void *use_until_the_pool_closes(void *arg)
{
    struct stat st;
    (void)arg;
    while (lode_stat(fs, "/", &st) == 0)
        ;
    if (errno != EBADF)
        abort();
    return NULL;
}

static void a_pool_may_close_under_calls(void)
{
    pthread_t users[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&users[i], NULL, use_until_the_pool_closes, NULL) == 0);
    usleep(10000);
    CHECK(lode_close_pool(fs) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(users[i], NULL) == 0);
    CHECK((fs = lode_open_pool(pool_path, NULL)));
}

/* Counts to its argument's number, and lets others in between. */
static int turns[8][4];

static void *count_in_turns(void *arg)
{
    int me = (int)(intptr_t)arg;

    for (int i = 0; i < 4; i++) {
        turns[me][i] = i + 1;
        lode_yield();
    }
    return (void *)(intptr_t)(me * me);
}

/* A child gets EBADF and a reason; the parent's pool stays as it is. */
static void forked_children_are_told(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        bool told = lode_mkdir(fs, "child", 0755) == -1 && errno == EBADF && strstr(lode_last_error(), "fork");
        told = told && lode_close_pool(fs) == -1 && errno == EBADF;
        /* The workers stayed with the parent. */
        told = told && lode_spawn(count_in_turns, NULL) == NULL && errno == EBADF;
        told = told && lode_run(1) == -1 && errno == EBADF && strstr(lode_last_error(), "fork");
        _exit(told ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(lode_mkdir(fs, "parent", 0755) == 0 && lode_rmdir(fs, "parent") == 0);
    FAILS(ENOENT, lode_rmdir(fs, "child"));
}

static void *writes_synced(void *arg)
{
    int fd = lode_open(fs, "synced", O_RDWR | O_CREAT | O_SYNC, 0644);
    CHECK(fd >= 0 && lode_write(fs, fd, "abc", 3) == 3 && lode_pwrite(fs, fd, "de", 2, 3) == 2);
    CHECK(lode_fsync(fs, fd) == 0 && lode_fdatasync(fs, fd) == 0 && lode_sync(fs) == 0);
    CHECK(lode_close(fs, fd) == 0);
    FAILS(EBADF, lode_fsync(fs, fd));
    return arg;
}

/* On a thread, and in a uthread, whose worker is free meanwhile. */
static void what_is_written_is_synced(void)
{
    char bytes[6];
    writes_synced(NULL);
    lode_uthread *one = lode_spawn(writes_synced, NULL);
    CHECK(one && lode_run(1) == 0 && lode_join(one, NULL) == 0);
    int fd = lode_open(fs, "synced", O_RDONLY, 0);
    CHECK(lode_pread(fs, fd, bytes, sizeof bytes, 0) == 5 && memcmp(bytes, "abcde", 5) == 0);
    CHECK(lode_close(fs, fd) == 0);
}

static void *spawn_and_join(void *arg)
{
    intptr_t sum = 0;
    lode_uthread *all[8];

    (void)arg;
    for (intptr_t i = 0; i < 8; i++)
        CHECK((all[i] = lode_spawn(count_in_turns, (void *)i)) != NULL);
    for (int i = 0; i < 8; i++) {
        void *result;

        CHECK(lode_join(all[i], &result) == 0);
        sum += (intptr_t)result;
    }
    FAILS(EDEADLK, lode_run(1));
    return (void *)sum;
}

static void uthreads_run_and_are_joined(void)
{
    for (unsigned workers = 0; workers < 4; workers++) {
        lode_uthread *first = lode_spawn(spawn_and_join, NULL);
        void *sum;

        CHECK(first != NULL);
        CHECK(lode_run(workers) == 0);
        CHECK(lode_join(first, &sum) == 0);
        CHECK((intptr_t)sum == 0 + 1 + 4 + 9 + 16 + 25 + 36 + 49);
        CHECK(turns[7][3] == 4);
        FAILS(ESRCH, lode_join(first, NULL));
    }
    FAILS(ESRCH, lode_join(NULL, NULL));
    FAILS(EINVAL, lode_run(1 << 20));
    FAILS_NULL(EFAULT, lode_spawn(NULL, NULL));
    lode_yield();
}

static lode_uthread *itself;

static void *joins_itself(void *arg)
{
    FAILS(EDEADLK, lode_join(itself, NULL));
    return arg;
}

static void *keeps_its_errno(void *arg)
{
    for (int turn = 0; turn < 4; turn++) {
        errno = (int)(intptr_t)arg;
        lode_yield();
        CHECK(errno == (int)(intptr_t)arg);
    }
    return arg;
}

static void uthreads_are_told_and_keep_what_is_theirs(void)
{
    lode_uthread *both[2];
    void *result;

    CHECK((itself = lode_spawn(joins_itself, &itself)) && lode_run(1) == 0);
    CHECK(lode_join(itself, &result) == 0 && result == &itself);
    for (intptr_t i = 0; i < 2; i++)
        CHECK((both[i] = lode_spawn(keeps_its_errno, (void *)(i + 1))));
    CHECK(lode_run(1) == 0 && lode_join(both[0], NULL) == 0 && lode_join(both[1], NULL) == 0);
}

static int it_ran;

static void *says_that_it_ran(void *arg)
{
    it_ran = 1;
    return arg;
}

/* On one worker: the other has yet to run. */
static void *forks_and_yields(void *arg)
{
    int status;
    lode_uthread *other = lode_spawn(says_that_it_ran, NULL);
    pid_t child = fork();

    if (child == 0) {
        for (int turn = 0; turn < 4; turn++)
            lode_yield();
        _exit(it_ran);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(!it_ran && lode_join(other, NULL) == 0 && it_ran);
    return arg;
}

static void the_parents_uthreads_run_in_no_child(void)
{
    lode_uthread *one = lode_spawn(forks_and_yields, NULL);

    CHECK(one && lode_run(1) == 0 && lode_join(one, NULL) == 0);
}

/* On the stack that a uthread has where nobody asked for a larger one. */
static void *makes_and_opens_a_pool(void *path)
{
    static const char *const opts[] = { NULL, "ro", "assume=memory,engine=emu", "assume=memory,engine=emu-ioat" };

    for (size_t i = 0; i < sizeof opts / sizeof *opts; i++) {
        lode_fs *made;

        CHECK(lode_mkfs(path, 16 << 20, "force") == 0);
        CHECK((made = lode_open_pool(path, opts[i])) && lode_close_pool(made) == 0);
    }
    return path;
}

static void uthreads_make_and_open_pools(void)
{
    char path[sizeof pool_path + 8];
    lode_uthread *one;

    snprintf(path, sizeof path, "%s.small", pool_path);
    CHECK((one = lode_spawn(makes_and_opens_a_pool, path)) && lode_run(1) == 0 && lode_join(one, NULL) == 0);
    CHECK(unlink(path) == 0);
}

#define COPY 65536

static unsigned char sources[8][COPY], targets[8][COPY];

/* Writes and reads by ticket; in a uthread others run while it waits. */
static void *use_tickets(void *arg)
{
    lode_ticket tickets[8];
    int fd = lode_open(fs, "tickets", O_RDWR | O_CREAT | O_TRUNC, 0644);

    CHECK(fd >= 0);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            memset(sources[i], 16 * round + i + 1, COPY);
            tickets[i] = round % 2 ? lode_pwrite_async(fs, fd, sources[i], COPY, (off_t)i * COPY)
                                   : lode_pwrite2_async(fs, fd, sources[i], COPY, (off_t)i * COPY, classes[i % 3]);
            CHECK(tickets[i] >= 0);
        }
        CHECK(lode_fsync(fs, fd) == 0);
        for (int i = 7; i >= 0; i--) {
            int ended = lode_poll(fs, tickets[i]);

            CHECK(ended == 1); /* fsync waited */
            CHECK(lode_wait(fs, tickets[i]) == COPY);
            FAILS(EINVAL, lode_wait(fs, tickets[i]));
            FAILS(EINVAL, lode_poll(fs, tickets[i]));
        }
        /* What is read by ticket is what was written by one that nobody waited for. */
        memset(sources[0], 0xee, COPY);
        CHECK((tickets[0] = lode_pwrite_async(fs, fd, sources[0], COPY, 3 * COPY)) >= 0);
        for (int i = 1; i < 8; i++) {
            tickets[i] = round % 2 ? lode_pread_async(fs, fd, targets[i], COPY, (off_t)i * COPY)
                                   : lode_pread2_async(fs, fd, targets[i], COPY, (off_t)i * COPY, classes[i % 3]);
            CHECK(tickets[i] >= 0);
        }
        for (int i = 0; i < 8; i++) {
            while (arg && lode_poll(fs, tickets[i]) == 0)
                lode_yield();
            CHECK(lode_wait(fs, tickets[i]) == COPY);
        }
        for (int i = 1; i < 8; i++)
            CHECK(targets[i][0] == (i == 3 ? 0xee : 16 * round + i + 1) && targets[i][COPY - 1] == targets[i][0]);
    }
    /* Short at the end of file, and nothing behind it. */
    CHECK((tickets[0] = lode_pread_async(fs, fd, targets[0], COPY, 7 * COPY + 100)) >= 0);
    CHECK((tickets[1] = lode_pread_async(fs, fd, targets[1], COPY, 8 * COPY)) >= 0);
    CHECK(lode_wait(fs, tickets[0]) == COPY - 100 && lode_wait(fs, tickets[1]) == 0);
    FAILS(EBADF, lode_pwrite_async(fs, 77, sources[0], COPY, 0));
    FAILS(EINVAL, lode_pread_async(fs, fd, targets[0], COPY, -1));
    FAILS(EFAULT, lode_pwrite_async(fs, fd, NULL, COPY, 0));
    FAILS(EINVAL, lode_wait(fs, 123456789));
    FAILS(EINVAL, lode_poll(fs, -1));
    CHECK(lode_close(fs, fd) == 0 && lode_unlink(fs, "tickets") == 0);
    return NULL;
}

static int first_fd;

static void *writes_much(void *turn)
{
    (void)turn;
    CHECK(lode_pwrite(fs, first_fd, sources[1], COPY, 0) == COPY);
    return NULL;
}

static void *writes_into_it(void *turn)
{
    (void)turn;
    CHECK(lode_pwrite(fs, first_fd, "new", 3, 100) == 3);
    return NULL;
}

static void *closes_and_opens(void *turn)
{
    (void)turn;
    CHECK(lode_close(fs, first_fd) == 0);
    CHECK(lode_open(fs, "second", O_RDWR, 0) == first_fd);
    return NULL;
}

/* A call goes on with the file that it began with. */
static void a_number_used_again_misleads_no_call(void)
{
    char bytes[3];
    CHECK(lode_close_pool(fs) == 0);
    CHECK((fs = lode_open_pool(pool_path, "assume=memory,engine=emu,floor=25,starve=60000")));
    int second = lode_open(fs, "second", O_RDWR | O_CREAT, 0644);
    CHECK(second >= 0 && lode_pwrite(fs, second, "old", 3, 100) == 3 && lode_close(fs, second) == 0);
    CHECK((first_fd = lode_open(fs, "first", O_RDWR | O_CREAT, 0644)) == second);
    lode_uthread *all[] = { lode_spawn(writes_much, NULL), lode_spawn(writes_into_it, NULL),
                            lode_spawn(closes_and_opens, NULL) };
    CHECK(all[0] && all[1] && all[2] && lode_run(1) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(lode_join(all[i], NULL) == 0);
    CHECK(lode_pread(fs, first_fd, bytes, 3, 100) == 3 && memcmp(bytes, "old", 3) == 0);
    CHECK((second = lode_open(fs, "first", O_RDONLY, 0)) >= 0);
    CHECK(lode_pread(fs, second, bytes, 3, 100) == 3 && memcmp(bytes, "new", 3) == 0);
    CHECK(lode_close(fs, second) == 0 && lode_close(fs, first_fd) == 0);
    CHECK(lode_unlink(fs, "first") == 0 && lode_unlink(fs, "second") == 0);
}

#define ROOM ((size_t)8 << 20)

static lode_fs *full;
static unsigned char *large;
static int kept_fd, other_fd, others, ran_meanwhile;

static void *needs_room(void *arg)
{
    (void)arg;
    lode_ticket ticket = lode_pwrite_async(full, kept_fd, large, ROOM, 0);
    CHECK(ticket >= 0);
    CHECK(lode_pwrite(full, other_fd, large, 1 << 20, 0) == 1 << 20);
    ran_meanwhile = others;
    CHECK(lode_wait(full, ticket) == (ssize_t)ROOM);
    CHECK(lode_ftruncate(full, other_fd, 0) == 0);
    return NULL;
}

static void *is_another(void *arg)
{
    (void)arg;
    others = 1;
    return NULL;
}

/* The pool is full but for what a copy keeps: who waits for that lets others run on its worker. */
static void room_is_waited_for_with_nothing_held(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.full", pool_path);
    CHECK(lode_mkfs(path, 64 << 20, NULL) == 0 && (full = lode_open_pool(path, "assume=memory,engine=emu")));
    CHECK((large = calloc(1, ROOM)));
    CHECK((kept_fd = lode_open(full, "kept", O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(lode_pwrite(full, kept_fd, large, ROOM, 0) == (ssize_t)ROOM);
    CHECK((other_fd = lode_open(full, "other", O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(lode_set_engine(full, other_fd, "cpu") == 0);
    int gap = lode_open(full, "gap", O_RDWR | O_CREAT, 0600), fill = lode_open(full, "fill", O_RDWR | O_CREAT, 0600);
    /* Beside what a write takes some for logs, and less than the other one needs. */
    CHECK(gap >= 0 && fill >= 0 && lode_fallocate(full, gap, 0, 0, (off_t)ROOM + (512 << 10)) == 0);
    for (off_t at = 0, step = 8 << 20; step >= 4096;)
        if (lode_fallocate(full, fill, 0, at, step) == 0)
            at += step;
        else
            step /= 2;
    CHECK(lode_ftruncate(full, gap, 0) == 0);
    /* The device may be through before anybody looks. */
    for (int round = 0; round < 200 && !ran_meanwhile; round++) {
        others = 0;
        lode_uthread *one = lode_spawn(needs_room, NULL), *other = lode_spawn(is_another, NULL);
        CHECK(one && other && lode_run(1) == 0 && lode_join(one, NULL) == 0 && lode_join(other, NULL) == 0);
    }
    CHECK(ran_meanwhile);
    CHECK(lode_close_pool(full) == 0 && unlink(path) == 0);
    free(large);
}

static void *closes_the_pool(void *turn)
{
    (void)turn;
    CHECK(lode_close_pool(fs) == 0);
    int file = open(pool_path, O_RDWR);
    CHECK(file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0 && close(file) == 0);
    return NULL;
}

/* Who has closed it has it no more, whoever waited for a copy of his. */
static void a_close_waits_for_who_waits(void)
{
    CHECK((first_fd = lode_open(fs, "first", O_RDWR | O_CREAT, 0644)) >= 0);
    lode_uthread *one = lode_spawn(writes_much, NULL), *other = lode_spawn(closes_the_pool, NULL);
    CHECK(one && other && lode_run(1) == 0 && lode_join(one, NULL) == 0 && lode_join(other, NULL) == 0);
    CHECK((fs = lode_open_pool(pool_path, NULL)) && lode_unlink(fs, "first") == 0);
}

/* Options are looked at before anything is made. */
static void a_refused_pool_leaves_nothing(void)
{
    char path[4096], opts[128];
    snprintf(path, sizeof path, "%s.refused", pool_path);
    snprintf(opts, sizeof opts, "label=%064d", 1);
    FAILS(EINVAL, lode_mkfs(path, 8 << 20, opts));
    FAILS(EINVAL, lode_mkfs(path, 8 << 20, "label=two\nlines"));
    FAILS(EINVAL, lode_mkfs(path, 4096, NULL));
    CHECK(access(path, F_OK) == -1 && errno == ENOENT);
}

static int late_fd;

/* The calling thread's own memory is gone by then. */
static void used_at_exit(void)
{
    if (lode_pwrite(fs, late_fd, "late", 4, 0) != 4 || lode_close_pool(fs) != 0 || unlink(pool_path) != 0) {
        fprintf(stderr, "what runs at exit failed: %s\n", lode_last_error());
        _exit(1);
    }
}

static void *ends_the_process(void *turn)
{
    (void)turn;
    exit(0);
}

/* A uthread of this thread waits for its copy, and will for ever: a close goes on without it. */
static void a_process_may_end_in_a_uthread(void)
{
    CHECK((fs = lode_open_pool(pool_path, "assume=memory,engine=emu")));
    CHECK((first_fd = lode_open(fs, "first", O_RDWR | O_CREAT, 0644)) >= 0);
    CHECK((late_fd = lode_open(fs, "late", O_RDWR | O_CREAT, 0644)) >= 0 && atexit(used_at_exit) == 0);
    CHECK(lode_spawn(writes_much, NULL) && lode_spawn(ends_the_process, NULL));
    printf("api: %u checks passed\n", checks);
    lode_run(1);
}

static void files_are_used_by_ticket(void)
{
    static const char *const engines[] = { "cpu", "semaphore", "delegate", "emu", "emu-ioat" };
    char opts[64];

    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        CHECK(lode_close_pool(fs) == 0);
        snprintf(opts, sizeof opts, "assume=memory,engine=%s", engines[i]);
        CHECK((fs = lode_open_pool(pool_path, opts)));
        use_tickets(NULL);
        lode_uthread *one = lode_spawn(use_tickets, "polls");
        CHECK(one && lode_run(1) == 0 && lode_join(one, NULL) == 0);
    }
    /* A pool that closes waits for them; they end with it. */
    int fd = lode_open(fs, "file", O_RDWR | O_CREAT, 0644);
    lode_ticket ticket = lode_pwrite_async(fs, fd, sources[1], COPY, 0);
    lode_ticket other = lode_pread_async(fs, fd, targets[1], COPY, 0);
    CHECK(fd >= 0 && ticket >= 0 && other > ticket);
    CHECK(lode_close_pool(fs) == 0);
    FAILS(EBADF, lode_wait(fs, ticket));
    CHECK(targets[1][5] == sources[1][5]);
    CHECK((fs = lode_open_pool(pool_path, NULL)));
    FAILS(EINVAL, lode_wait(fs, ticket));
    CHECK((fd = lode_open(fs, "file", O_RDWR, 0)) >= 0);
    memset(targets[2], 0, COPY);
    CHECK(lode_pread(fs, fd, targets[2], COPY, 0) == COPY && memcmp(targets[2], sources[1], COPY) == 0);
    for (int i = 0; i < 65536; i++)
        CHECK((other = lode_pread_async(fs, fd, targets[0], 1, 0)) > ticket);
    FAILS(EAGAIN, lode_pread_async(fs, fd, targets[0], 1, 0));
    CHECK(lode_wait(fs, other) == 1 && lode_pwrite_async(fs, fd, "x", 1, 0) > other);
    CHECK(lode_close(fs, fd) == 0 && lode_unlink(fs, "file") == 0);
}

static lode_fs *closing;

static void *closes_it(void *arg)
{
    CHECK(lode_close_pool(closing) == 0);
    return arg;
}

/* Who is told that the pool is closed has no read under way any more: its buffer may go. */
static void a_closed_pool_uses_no_buffers(void)
{
    enum { BYTES = 64 << 20, STEP = 4096 };
    char path[3100];
    pthread_t closer;

    snprintf(path, sizeof path, "%s.closing", pool_path);
    CHECK(lode_mkfs(path, 192 << 20, "force") == 0);
    unsigned char *bytes = malloc(BYTES);
    CHECK(bytes && (closing = lode_open_pool(path, NULL)));
    memset(bytes, 'r', BYTES);
    int fd = lode_open(closing, "file", O_RDWR | O_CREAT, 0644);
    CHECK(fd >= 0 && lode_pwrite(closing, fd, bytes, BYTES, 0) == BYTES && lode_close_pool(closing) == 0);
    for (int round = 0; round < 3; round++) {
        CHECK((closing = lode_open_pool(path, "assume=memory,engine=emu")));
        CHECK((fd = lode_open(closing, "file", O_RDONLY, 0)) >= 0);
        lode_ticket ticket = lode_pread_async(closing, fd, bytes, BYTES, 0);
        CHECK(ticket >= 0 && pthread_create(&closer, NULL, closes_it, NULL) == 0);
        while (lode_poll(closing, ticket) >= 0)
            ;
        CHECK(errno == EBADF);
        for (size_t at = 0; at < BYTES; at += STEP)
            bytes[at] = 'w';
        CHECK(pthread_join(closer, NULL) == 0);
        for (size_t at = 0; at < BYTES; at += STEP)
            if (bytes[at] != 'w')
                CHECK(false);
    }
    free(bytes);
    CHECK(unlink(path) == 0);
}

/* Where the first of so many blocks stands in the pool's file that begin and end with these eight bytes. */
static off_t first_block(const char *path, uint64_t tag, int blocks)
{
    static char block[4096];
    off_t first = -1, at = 0;
    int fd = open(path, O_RDONLY), found = 0;
    CHECK(fd >= 0);
    for (; pread(fd, block, sizeof block, at) == sizeof block; at += sizeof block)
        if (memcmp(block, &tag, sizeof tag) == 0 && memcmp(block + 4088, &tag, sizeof tag) == 0) {
            first = first < 0 ? at : first;
            found++;
        }
    CHECK(found == blocks && close(fd) == 0);
    return first;
}

/* The pool's file is cut under the program: a load of what is gone raises SIGBUS, and costs that call alone. */
static void media_may_go_away(void)
{
    enum { BLOCKS = 256, BYTES = BLOCKS * 4096, POOL = 64 << 20 };
    static uint64_t data[2][BYTES / 8], back[BYTES / 8];
    static const char *const names[] = { "/one", "/two" };
    char path[3100];
    int fds[2];
    off_t first[2];
    struct stat st;
    struct statvfs whole;

    snprintf(path, sizeof path, "%s.cut", pool_path);
    CHECK(lode_mkfs(path, POOL, "force") == 0);
    lode_fs *cut = lode_open_pool(path, NULL);
    CHECK(cut);
    for (int i = 0; i < 2; i++) {
        for (size_t at = 0; at < BYTES / 8; at++)
            data[i][at] = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(i + 1);
        CHECK((fds[i] = lode_open(cut, names[i], O_RDWR | O_CREAT, 0644)) >= 0);
        CHECK(lode_pwrite(cut, fds[i], data[i], BYTES, 0) == BYTES && lode_fsync(cut, fds[i]) == 0);
        first[i] = first_block(path, data[i][0], BLOCKS);
    }
    int lost = first[1] > first[0], kept = !lost;
    CHECK(first[kept] + BYTES <= first[lost]);
    CHECK(truncate(path, first[lost]) == 0);

    for (int round = 0; round < 3; round++) {
        FAILS(EIO, lode_pread(cut, fds[lost], back, BYTES, 0));
        CHECK(strstr(lode_last_error(), "media"));
        FAILS(EIO, lode_pread(cut, fds[lost], back, 1, BYTES - 1));
        CHECK(lode_pread(cut, fds[kept], back, BYTES, 0) == BYTES && memcmp(back, data[kept], BYTES) == 0);
    }
    lode_ticket ticket;
    FAILS(EIO, (ticket = lode_pread_async(cut, fds[lost], back, BYTES, 0)) < 0 ? -1 : lode_wait(cut, ticket));
    CHECK(lode_stat(cut, names[lost], &st) == 0 && st.st_size == BYTES);
    CHECK(lode_statvfs(cut, "/", &whole) == 0 && whole.f_bfree > 0);
    lode_dir *dir = lode_opendir(cut, "/");
    CHECK(dir && lode_readdir(cut, dir) && lode_closedir(cut, dir) == 0);

    /* Whole again, with zeros in it. A sync in the background may have met the missing end: then the close says so. */
    CHECK(truncate(path, POOL) == 0);
    CHECK(lode_pread(cut, fds[lost], back, BYTES, 0) == BYTES && back[0] == 0 && back[BYTES / 8 - 1] == 0);
    CHECK(lode_close_pool(cut) == 0 || errno == EIO);
    CHECK((cut = lode_open_pool(path, NULL)));
    CHECK((fds[kept] = lode_open(cut, names[kept], O_RDONLY, 0)) >= 0);
    CHECK(lode_pread(cut, fds[kept], back, BYTES, 0) == BYTES && memcmp(back, data[kept], BYTES) == 0);
    CHECK(lode_close_pool(cut) == 0 && unlink(path) == 0);
}

/* The same while a device copies: what cannot be stored is said by lode_wait, and once by lode_fsync; the file is what it was. */
static void a_copy_that_fails_is_told(void)
{
    enum { BYTES = 1 << 20, POOL = 64 << 20 };
    static uint64_t old[BYTES / 8], new[BYTES / 8], back[BYTES / 8];
    char path[3100];

    snprintf(path, sizeof path, "%s.fails", pool_path);
    CHECK(lode_mkfs(path, POOL, "force") == 0);
    lode_fs *cut = lode_open_pool(path, "assume=memory,engine=emu");
    CHECK(cut);
    for (size_t at = 0; at < BYTES / 8; at++) {
        old[at] = UINT64_C(0x9e3779b97f4a7c15);
        new[at] = ~old[at];
    }
    /* Room below, in which the log can say what became of the copy. */
    int fd = lode_open(cut, "/room", O_RDWR | O_CREAT, 0644);
    CHECK(fd >= 0 && lode_pwrite(cut, fd, new, BYTES / 4, 0) == BYTES / 4 && lode_close(cut, fd) == 0);
    fd = lode_open(cut, "/file", O_RDWR | O_CREAT, 0644);
    CHECK(fd >= 0 && lode_pwrite(cut, fd, old, BYTES, 0) == BYTES && lode_unlink(cut, "/room") == 0);
    off_t behind = first_block(path, old[0], BYTES / 4096) + BYTES;

    /* Whatever a new copy is given lies behind what there is. */
    CHECK(truncate(path, behind) == 0);
    lode_ticket ticket = lode_pwrite_async(cut, fd, new, BYTES, 0);
    CHECK(ticket >= 0);
    FAILS(EIO, lode_wait(cut, ticket));
    CHECK(strstr(lode_last_error(), "as it was"));
    FAILS(EINVAL, lode_wait(cut, ticket));
    CHECK(lode_pread(cut, fd, back, BYTES, 0) == BYTES && memcmp(back, old, BYTES) == 0);
    FAILS(EIO, lode_fsync(cut, fd));
    CHECK(lode_fsync(cut, fd) == 0);

    /* The offset stays, also where a write is done and its sync fails. */
    CHECK(lode_lseek(cut, fd, 4096, SEEK_SET) == 4096);
    FAILS(EIO, lode_write(cut, fd, new, BYTES));
    CHECK(lode_lseek(cut, fd, 0, SEEK_CUR) == 4096);
    FAILS(EIO, lode_pwrite2(cut, fd, new, BYTES, -1, LODE_COPY_LATENCY));
    CHECK(lode_lseek(cut, fd, 0, SEEK_CUR) == 4096);
    int synced = lode_open(cut, "/file", O_WRONLY | O_SYNC, 0);
    CHECK(synced >= 0);
    FAILS(EIO, lode_write(cut, synced, old, 8));
    CHECK(lode_lseek(cut, synced, 0, SEEK_CUR) == 0);
    CHECK(lode_write(cut, synced, old, 8) == 8 && lode_lseek(cut, synced, 0, SEEK_CUR) == 8);
    CHECK(lode_close(cut, synced) == 0);
    CHECK(truncate(path, behind - BYTES / 2) == 0);
    CHECK(lode_lseek(cut, fd, 4096, SEEK_SET) == 4096);
    FAILS(EIO, lode_read(cut, fd, back, BYTES));
    CHECK(lode_lseek(cut, fd, 0, SEEK_CUR) == 4096);
    FAILS(EIO, lode_pread2(cut, fd, back, BYTES, -1, 0));
    CHECK(lode_lseek(cut, fd, 0, SEEK_CUR) == 4096);

    /* And it can be written again once there is media again. */
    CHECK(truncate(path, POOL) == 0);
    CHECK(lode_pwrite(cut, fd, new, BYTES, 0) == BYTES && lode_fsync(cut, fd) == 0);
    CHECK(lode_pread(cut, fd, back, BYTES, 0) == BYTES && memcmp(back, new, BYTES) == 0);
    CHECK(lode_close_pool(cut) == 0 && unlink(path) == 0);
}

int main(int argc, char **argv)
{
    if (argc != 2 || snprintf(pool_path, sizeof pool_path, "%s/api.pool", argv[1]) >= (int)sizeof pool_path) {
        fprintf(stderr, "usage: api DIRECTORY\n");
        return 2;
    }
    pools();
    bad_handles();
    descriptors();
    open_flags();
    names();
    attributes();
    xattrs();
    directories();
    errors();
    what_is_written_is_synced();
    threads_share_an_offset(0);
    threads_share_an_offset(O_APPEND);
    a_close_may_race_with_uses();
    a_pool_may_close_under_calls();
    uthreads_run_and_are_joined();
    uthreads_are_told_and_keep_what_is_theirs();
    uthreads_make_and_open_pools();
    the_parents_uthreads_run_in_no_child();
    files_are_used_by_ticket();
    a_closed_pool_uses_no_buffers();
    a_number_used_again_misleads_no_call();
    a_close_waits_for_who_waits();
    room_is_waited_for_with_nothing_held();
    a_refused_pool_leaves_nothing();
    media_may_go_away();
    a_copy_that_fails_is_told();
    forked_children_are_told();
    CHECK(lode_close_pool(fs) == 0);
    a_process_may_end_in_a_uthread();
    return 1;
}
