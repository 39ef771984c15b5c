/*
 * The copies without a pool, from C: copies DIRECTORY.
 *
 * What is checked is the contract at this boundary: values, errno, tickets, threads, close and fork, faults, every engine;
 * that engines copy well is tested beside them.
 */
#define _GNU_SOURCE 1
#include "check.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MEDIA_BYTES = 8 << 20, BULK = 300000 };

static const char *const ENGINES[] = {"cpu", "semaphore", "delegate", "dsa", "ioat", "emu", "emu-ioat"};
enum { ENGINE_COUNT = sizeof ENGINES / sizeof *ENGINES };

static lode_media *media;
static char path[3000];
static unsigned char bulk[BULK], back[BULK];

static lode_media *open_with(const char *engine, const char *more)
{
    char opts[200];
    snprintf(opts, sizeof opts, "size=%d,engine=%s,threshold=4096%s", MEDIA_BYTES, engine, more);
    lode_media *opened = lode_media_open(path, opts);
    CHECK(opened != NULL);
    return opened;
}

static void fill(unsigned seed)
{
    for (size_t i = 0; i < sizeof bulk; i++)
        bulk[i] = (unsigned char)((i * 2654435761u + seed * 40503u) >> 13);
}

static void opening(void)
{
    FAILS_NULL(ENOENT, lode_media_open(path, NULL));
    CHECK(strstr(lode_last_error(), path));
    FAILS_NULL(EINVAL, lode_media_open(NULL, NULL));
    FAILS_NULL(EINVAL, lode_media_open(path, "size=much"));
    FAILS_NULL(EINVAL, lode_media_open(path, "size=1048576,engine=gpu"));
    FAILS_NULL(EINVAL, lode_media_open(path, "size=1048576,concurrency=0"));
    FAILS_NULL(EINVAL, lode_media_open(path, "colour=red"));
    CHECK(access(path, F_OK) == -1);

    media = lode_media_open(path, "size=100001");
    CHECK(media && lode_media_size(media) == 100001);
    CHECK(lode_media_domain(media) != NULL);
    FAILS_NULL(EBUSY, lode_media_open(path, NULL));
    CHECK(lode_media_close(media) == 0);
    FAILS(EBADF, lode_media_close(media));
    FAILS(EBADF, lode_copy_to_media(media, 0, "x", 1, 0, NULL));
    FAILS(EINVAL, lode_media_close(NULL));
    FAILS(EINVAL, lode_media_fence((lode_media *)&media));
    FAILS_NULL(EINVAL, lode_media_domain(NULL));

    media = lode_media_open(path, "ro");
    CHECK(media && lode_media_size(media) == 100001);
    FAILS(EROFS, lode_copy_to_media(media, 0, "x", 1, 0, NULL));
    FAILS(EROFS, lode_copy_to_media_async(media, 0, "x", 1, 0, NULL));
    CHECK(lode_copy_from_media(media, 100000, back, 1, 0, NULL) == 0 && back[0] == 0);
    CHECK(lode_media_close(media) == 0);

    /* A profile is advice. */
    char profile[3100], with_profile[3200];
    snprintf(profile, sizeof profile, "%s.profile", path);
    snprintf(with_profile, sizeof with_profile, "engine=semaphore,concurrency=3,profile=%s", profile);
    media = lode_media_open(path, with_profile);
    CHECK(media && strstr(lode_last_error(), profile) && strstr(lode_last_error(), "cannot be read"));
    CHECK(lode_copy_to_media(media, 0, "x", 1, LODE_COPY_DURABLE, NULL) == 0);
    CHECK(lode_media_close(media) == 0);
    FAILS_NULL(EINVAL, lode_media_open(path, "profile="));
    if (access("/sys/bus/dsa/devices", F_OK) != 0) {
        media = lode_media_open(path, "engine=dsa");
        CHECK(media && strstr(lode_last_error(), "lode_media_open: engine dsa cannot be used"));
        CHECK(lode_media_close(media) == 0);
    }

    char pool[3100];
    snprintf(pool, sizeof pool, "%s.pool", path);
    CHECK(lode_mkfs(pool, 16 << 20, NULL) == 0);
    FAILS_NULL(EEXIST, lode_media_open(pool, NULL));
    CHECK(strstr(lode_last_error(), "holds a pool"));
    FAILS(EINVAL, lode_fstat((lode_fs *)media, 0, NULL));
    CHECK(unlink(pool) == 0);

    /* Anonymous memory. */
    media = lode_media_open(NULL, "size=65536,assume=memory");
    CHECK(media && strcmp(lode_media_domain(media), "memory") == 0);
    CHECK(lode_copy_to_media(media, 65535, "z", 1, LODE_COPY_DURABLE, NULL) == 0);
    CHECK(lode_media_close(media) == 0);
}

static void bad_requests(void)
{
    lode_copy parts[2] = {{0, bulk, 100}, {99, bulk + 100, 100}};
    uint32_t crc = 5;

    media = open_with("delegate", "");
    FAILS(EINVAL, lode_copy_to_media(media, MEDIA_BYTES - 9, bulk, 10, 0, NULL));
    FAILS(EINVAL, lode_copy_from_media(media, UINT64_MAX - 3, back, 10, 0, NULL));
    FAILS(EINVAL, lode_copy_to_media(media, 0, bulk, SIZE_MAX, 0, NULL));
    FAILS(EINVAL, lode_copy_to_media_async(media, 0, bulk, SIZE_MAX, 0, NULL));
    FAILS(EINVAL, lode_copy_to_media_async(media, MEDIA_BYTES, bulk, 1, 0, NULL));
    FAILS(EFAULT, lode_copy_to_media(media, 0, NULL, 10, 0, NULL));
    FAILS(EFAULT, lode_copy_from_media_async(media, 0, NULL, 10, 0, NULL));
    FAILS(EFAULT, lode_copy_vectored(media, LODE_TO_MEDIA, NULL, 1, 0, NULL));
    FAILS(EINVAL, lode_copy_to_media(media, 0, bulk, 10, 64, NULL));
    FAILS(EINVAL, lode_copy_vectored(media, 3, parts, 1, 0, NULL));
    FAILS(EINVAL, lode_copy_vectored(media, LODE_TO_MEDIA, parts, -1, 0, NULL));
    FAILS(EINVAL, lode_copy_vectored(media, LODE_TO_MEDIA, parts, 1025, 0, NULL));
    FAILS(EINVAL, lode_copy_vectored(media, LODE_TO_MEDIA, parts, 2, 0, NULL));
    CHECK(strstr(lode_last_error(), "overlap") && strstr(lode_last_error(), path));
    parts[1].at = 100;
    CHECK(lode_copy_vectored(media, LODE_TO_MEDIA, parts, 2, 0, NULL) == 0);
    parts[1].buffer = bulk + 99;
    FAILS(EINVAL, lode_copy_vectored(media, LODE_FROM_MEDIA, parts, 2, 0, NULL));
    FAILS(EINVAL, lode_media_set_engine(media, "gpu"));
    FAILS(EFAULT, lode_media_set_engine(media, NULL));

    CHECK(lode_copy_to_media(media, MEDIA_BYTES, NULL, 0, LODE_COPY_DURABLE, &crc) == 0 && crc == 5);
    CHECK(lode_copy_vectored(media, LODE_FROM_MEDIA, NULL, 0, 0, &crc) == 0 && crc == 5);
    lode_ticket ticket = lode_copy_from_media_async(media, 0, NULL, 0, 0, NULL);
    CHECK(ticket >= 0 && lode_media_poll(media, ticket) == 1 && lode_media_wait(media, ticket, NULL) == 0);
    FAILS(EINVAL, lode_media_wait(media, ticket, NULL));
    FAILS(EINVAL, lode_media_poll(media, ticket));
    FAILS(EINVAL, lode_media_wait(media, -1, NULL));
    CHECK(lode_media_close(media) == 0);
}

/* Nine bytes whose checksum everybody knows. */
static void checksums(void)
{
    uint32_t crc = 0;
    media = open_with("cpu", "");
    CHECK(lode_copy_to_media(media, 1, "123456789", 9, LODE_COPY_DURABLE, &crc) == 0 && crc == 0xe3069283);
    crc = 0;
    CHECK(lode_copy_from_media(media, 1, back, 4, 0, &crc) == 0);
    CHECK(lode_copy_from_media(media, 5, back, 5, 0, &crc) == 0 && crc == 0xe3069283);
    CHECK(lode_media_close(media) == 0);
}

static void every_engine(void)
{
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        for (int durable = 0; durable <= LODE_COPY_DURABLE; durable++) {
            uint32_t stored = 7, loaded = 7, crc = 7;
            lode_copy parts[3];
            media = open_with(ENGINES[n], n % 2 ? ",assume=memory,concurrency=3" : "");
            fill(n);
            CHECK(lode_copy_to_media(media, 777, bulk, sizeof bulk, durable, &stored) == 0);
            memset(back, 0, sizeof back);
            CHECK(lode_copy_from_media(media, 777, back, sizeof back, durable, &loaded) == 0);
            CHECK(stored == loaded && memcmp(bulk, back, sizeof back) == 0);

            /* In pieces, in another order. */
            for (int i = 0; i < 3; i++)
                parts[i] = (lode_copy){(uint64_t)(3 - i) << 20, bulk + i * 100000, 100000};
            lode_ticket ticket = lode_copy_vectored_async(media, LODE_TO_MEDIA, parts, 3, durable, &crc);
            CHECK(ticket >= 0 && lode_media_wait(media, ticket, &crc) == 0 && crc == stored);
            memset(back, 0, sizeof back);
            for (int i = 0; i < 3; i++)
                parts[i].buffer = back + i * 100000;
            crc = 7;
            CHECK(lode_copy_vectored(media, LODE_FROM_MEDIA, parts, 3, 0, &crc) == 0 && crc == stored);
            CHECK(memcmp(bulk, back, sizeof back) == 0);

            memset(back, 0, sizeof back);
            ticket = lode_copy_from_media_async(media, 777, back, sizeof back, 0, NULL);
            CHECK(ticket >= 0);
            int ended;
            while ((ended = lode_media_poll(media, ticket)) == 0)
                usleep(100);
            CHECK(ended == 1 && memcmp(bulk, back, sizeof back) == 0);
            CHECK(lode_media_wait(media, ticket, NULL) == 0);

            CHECK(lode_media_set_engine(media, ENGINES[(n + 1) % ENGINE_COUNT]) == 0);
            CHECK(lode_copy_to_media_async(media, 4 << 20, bulk, sizeof bulk, durable, NULL) > ticket);
            CHECK(lode_media_drain(media) == 0 && lode_media_fence(media) == 0);
            /* Not waited for: closing does. */
            CHECK(lode_media_close(media) == 0);
        }
    }
}

enum { THREADS = 4, ROUNDS = 300, COPY = 20000 };

static lode_ticket tickets[THREADS][ROUNDS];
static unsigned char sources[THREADS][COPY];

static void *submit_many(void *arg)
{
    size_t thread = (size_t)arg;
    memset(sources[thread], 'a' + (int)thread, COPY);
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t at = thread * (MEDIA_BYTES / THREADS) + (uint64_t)(i % 50) * COPY;
        tickets[thread][i] = lode_copy_to_media_async(media, at, sources[thread], COPY, 0, NULL);
        if (tickets[thread][i] < 0)
            abort();
    }
    return NULL;
}

/* Waits for what its neighbour submitted. */
static void *wait_for_others(void *arg)
{
    size_t other = ((size_t)arg + 1) % THREADS;
    for (int i = ROUNDS - 1; i >= 0; i--)
        if (lode_media_wait(media, tickets[other][i], NULL) != 0)
            abort();
    return NULL;
}

static void in_threads(void *(*work)(void *))
{
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void any_thread_may_wait(void)
{
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        media = open_with(ENGINES[n], "");
        in_threads(submit_many);
        in_threads(wait_for_others);
        for (size_t thread = 0; thread < THREADS; thread++) {
            CHECK(lode_copy_from_media(media, thread * (MEDIA_BYTES / THREADS) + 49 * COPY, back, COPY, 0, NULL) == 0);
            CHECK(memcmp(back, sources[thread], COPY) == 0);
        }
        CHECK(lode_media_close(media) == 0);
    }
}

static void *copy_until_closed(void *arg)
{
    unsigned char own[COPY];
    memset(own, (int)(size_t)arg, sizeof own);
    for (;;) {
        lode_ticket ticket = lode_copy_to_media_async(media, (size_t)arg * COPY, own, sizeof own, 0, NULL);
        if (ticket < 0 || lode_media_wait(media, ticket, NULL) != 0)
            break;
    }
    if (errno != EBADF)
        abort();
    return NULL;
}

/* Who is told that the media are closed has no copy under way any more: its buffer, on a stack, may go. */
static void media_may_close_under_copies(void)
{
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        pthread_t users[THREADS];
        media = open_with(ENGINES[n], "");
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&users[i], NULL, copy_until_closed, (void *)i) == 0);
        usleep(10000);
        CHECK(lode_media_close(media) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_join(users[i], NULL) == 0);
    }
}

static void too_many_tickets_are_refused(void)
{
    lode_ticket first = -1;
    media = open_with("cpu", "");
    for (int i = 0; i < 65536; i++) {
        lode_ticket ticket = lode_copy_to_media_async(media, 0, bulk, 8, 0, NULL);
        if (first < 0)
            first = ticket;
        if (ticket < 0)
            CHECK(false);
    }
    FAILS(EAGAIN, lode_copy_to_media_async(media, 0, bulk, 8, 0, NULL));
    CHECK(lode_media_wait(media, first, NULL) == 0);
    CHECK(lode_copy_to_media_async(media, 0, bulk, 8, 0, NULL) > first);
    CHECK(lode_media_close(media) == 0);
}

/* A file that somebody cuts: EIO and a reason, and all goes on. */
static void cut_files(void)
{
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        media = open_with(ENGINES[n], "");
        CHECK(truncate(path, 1 << 20) == 0);
        uint64_t at = (1 << 20) - 50000;
        FAILS(EIO, lode_copy_to_media(media, at, bulk, sizeof bulk, 0, NULL));
        CHECK(strstr(lode_last_error(), "0x100000") && strstr(lode_last_error(), path));
        FAILS(EIO, lode_copy_from_media(media, at, back, sizeof back, 0, NULL));
        lode_ticket to = lode_copy_to_media_async(media, at, bulk, sizeof bulk, LODE_COPY_DURABLE, NULL);
        lode_ticket from = lode_copy_from_media_async(media, 2 << 20, back, sizeof back, 0, NULL);
        CHECK(to >= 0 && from >= 0);
        FAILS(EIO, lode_media_wait(media, from, NULL));
        FAILS(EIO, lode_media_wait(media, to, NULL));
        CHECK(lode_copy_to_media(media, 0, bulk, sizeof bulk, 0, NULL) == 0);
        CHECK(lode_copy_from_media(media, 0, back, sizeof back, 0, NULL) == 0);
        CHECK(memcmp(bulk, back, sizeof back) == 0);
        CHECK(lode_media_close(media) == 0);
    }
}

/* A class for each call: with every engine, both ways, by ticket and at once. */
static void classes(void)
{
    static const int classes[] = { LODE_COPY_LATENCY, LODE_COPY_BANDWIDTH };
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        media = open_with(ENGINES[n], "");
        for (int i = 0; i < 2; i++) {
            int flags = classes[i] | LODE_COPY_DURABLE;
            fill(n + 40 + (unsigned)i);
            CHECK(lode_copy_to_media(media, 4096, bulk, sizeof bulk, flags, NULL) == 0);
            memset(back, 0, sizeof back);
            CHECK(lode_copy_from_media(media, 4096, back, sizeof back, classes[i], NULL) == 0);
            CHECK(memcmp(bulk, back, sizeof back) == 0);
            lode_ticket to = lode_copy_to_media_async(media, 1 << 20, bulk, sizeof bulk, flags, NULL);
            CHECK(to >= 0 && lode_media_wait(media, to, NULL) == 0);
            lode_ticket from = lode_copy_from_media_async(media, 1 << 20, back, sizeof back, classes[1 - i], NULL);
            CHECK(from >= 0 && lode_media_wait(media, from, NULL) == 0);
            CHECK(memcmp(bulk, back, sizeof back) == 0);
        }
        FAILS(EINVAL, lode_copy_to_media(media, 0, bulk, 1, LODE_COPY_LATENCY | LODE_COPY_BANDWIDTH, NULL));
        CHECK(strstr(lode_last_error(), "one class"));
        CHECK(lode_media_close(media) == 0);
    }
}

static void mapped_ranges(void)
{
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && ftruncate(fd, MEDIA_BYTES) == 0);
    unsigned char *start = mmap(NULL, MEDIA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(start != MAP_FAILED);
    FAILS_NULL(EFAULT, lode_media_map(start, MEDIA_BYTES, NULL, NULL));
    FAILS_NULL(EINVAL, lode_media_map(start, MEDIA_BYTES, "hope", NULL));
    FAILS_NULL(EINVAL, lode_media_map(start, 0, "memory", NULL));
    FAILS_NULL(EFAULT, lode_media_map(NULL, 4096, "memory", NULL));
    FAILS_NULL(EINVAL, lode_media_map(start, MEDIA_BYTES, "memory", "size=4096"));
    for (unsigned n = 0; n < ENGINE_COUNT; n++) {
        char opts[100];
        snprintf(opts, sizeof opts, "engine=%s,threshold=4096", ENGINES[n]);
        media = lode_media_map(start + 100, MEDIA_BYTES - 100, n % 2 ? "memory" : "page-cache", opts);
        CHECK(media && lode_media_size(media) == MEDIA_BYTES - 100);
        fill(n + 10);
        CHECK(lode_copy_to_media(media, 5, bulk, sizeof bulk, LODE_COPY_DURABLE, NULL) == 0);
        CHECK(pread(fd, back, sizeof back, 105) == (ssize_t)sizeof back && memcmp(bulk, back, sizeof back) == 0);
        /* A buffer inside of the media may not overlap its target. */
        FAILS(EINVAL, lode_copy_to_media(media, 20, start + 105, sizeof bulk, 0, NULL));
        CHECK(lode_copy_to_media(media, 4 << 20, start + 105, sizeof bulk, 0, NULL) == 0);
        CHECK(memcmp(start + 100 + (4 << 20), bulk, sizeof bulk) == 0);
        CHECK(lode_media_close(media) == 0);
    }
    media = lode_media_map(start, MEDIA_BYTES, "memory", "ro");
    CHECK(media);
    FAILS(EROFS, lode_copy_to_media(media, 0, bulk, 1, 0, NULL));
    CHECK(ftruncate(fd, 4096) == 0);
    FAILS(EIO, lode_copy_from_media(media, 8192, back, 100, 0, NULL));
    CHECK(lode_media_close(media) == 0);
    CHECK(munmap(start, MEDIA_BYTES) == 0 && close(fd) == 0);
}

/* A child gets EBADF and a reason; the parent's media stay as they are, also what is under way. */
static void forked_children_are_told(void)
{
    int status;
    media = open_with("delegate", "");
    lode_ticket ticket = lode_copy_to_media_async(media, 0, bulk, sizeof bulk, 0, NULL);
    CHECK(ticket >= 0);
    pid_t child = fork();
    if (child == 0) {
        bool told = lode_copy_to_media(media, 0, "c", 1, 0, NULL) == -1 && errno == EBADF;
        told = told && strstr(lode_last_error(), "fork");
        told = told && lode_media_wait(media, ticket, NULL) == -1 && errno == EBADF;
        told = told && lode_media_close(media) == -1 && errno == EBADF;
        /* Media of its own. */
        lode_media *own = lode_media_open(NULL, "size=1048576,engine=delegate,threshold=4096");
        told = told && own && lode_copy_to_media(own, 0, bulk, sizeof bulk, 0, NULL) == 0;
        told = told && lode_media_close(own) == 0;
        _exit(told ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(lode_media_wait(media, ticket, NULL) == 0);
    CHECK(lode_copy_from_media(media, 0, back, sizeof back, 0, NULL) == 0 && memcmp(bulk, back, sizeof back) == 0);
    CHECK(lode_media_close(media) == 0);
}

int main(int argc, char **argv)
{
    if (argc != 2 || snprintf(path, sizeof path, "%s/copies.media", argv[1]) >= (int)sizeof path - 10) {
        fprintf(stderr, "usage: copies DIRECTORY\n");
        return 2;
    }
    opening();
    bad_requests();
    checksums();
    every_engine();
    any_thread_may_wait();
    media_may_close_under_copies();
    too_many_tickets_are_refused();
    cut_files();
    classes();
    mapped_ranges();
    forked_children_are_told();
    CHECK(unlink(path) == 0);
    printf("copies: %u checks passed\n", checks);
    return 0;
}
