/*
 * hello POOL: makes a pool where none is, keeps a greeting in it, and shows what the pool holds.
 *
 *     cc hello.c -o hello $(pkg-config --cflags --libs lodestone)
 *     ./hello /tmp/hello.pool
 */
#include <errno.h>
#include <lodestone.h>
#include <stdlib.h>
#include <string.h>

static void give_up(void)
{
    fprintf(stderr, "hello: %s\n", lode_last_error());
    exit(1);
}

/* The whole greeting or none of it is there after a crash: a rename is one step. */
static void write_greeting(lode_fs *fs)
{
    static const char text[] = "Hello from slow memory.\n";
    int fd = lode_open(fs, "/greetings/new", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0)
        give_up();
    if (lode_write(fs, fd, text, strlen(text)) < 0)
        give_up();
    /* Needed on an ordinary file; on persistent memory the write was durable already. */
    if (lode_fsync(fs, fd) < 0 || lode_close(fs, fd) < 0)
        give_up();
    if (lode_rename(fs, "/greetings/new", "/greetings/hello", 0) < 0)
        give_up();
}

static void print_greeting(lode_fs *fs)
{
    char text[100];
    int fd = lode_open(fs, "/greetings/hello", O_RDONLY, 0);
    if (fd < 0)
        give_up();
    ssize_t n = lode_pread(fs, fd, text, sizeof text, 0);
    if (n < 0)
        give_up();
    fwrite(text, 1, (size_t)n, stdout);
    lode_close(fs, fd);
}

static void list(lode_fs *fs, const char *path)
{
    lode_dir *dir = lode_opendir(fs, path);
    if (!dir)
        give_up();
    for (struct dirent *entry; (entry = lode_readdir(fs, dir));) {
        char full[4096];
        struct stat st;
        snprintf(full, sizeof full, "%s/%s", path, entry->d_name);
        if (lode_lstat(fs, full, &st) < 0)
            give_up();
        printf("%8lld  %s\n", (long long)st.st_size, entry->d_name);
    }
    lode_closedir(fs, dir);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: hello POOL\n");
        return 2;
    }
    if (access(argv[1], F_OK) < 0 && lode_mkfs(argv[1], 64 << 20, "label=hello") < 0)
        give_up();
    lode_fs *fs = lode_open_pool(argv[1], NULL);
    if (!fs)
        give_up();
    if (lode_mkdir(fs, "/greetings", 0755) < 0 && errno != EEXIST)
        give_up();
    write_greeting(fs);
    print_greeting(fs);
    list(fs, "/greetings");
    if (lode_close_pool(fs) < 0)
        give_up();
    return 0;
}
