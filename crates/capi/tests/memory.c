/*
 * Memory on slow memory, from C: memory DIRECTORY.
 *
 * What is checked is the contract at this boundary: values, errno, threads, fork and close; that the memory below is right is
 * tested beside it.
 */
#define _GNU_SOURCE 1
#include "check.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>

enum { BYTES = 64 << 20, BLOCKS = 400 };

static lode_memory *memory;
static char path[3000];

static void opening(void)
{
    FAILS_NULL(ENOENT, lode_memory_open(path, 0, 0));
    CHECK(strstr(lode_last_error(), path));
    FAILS_NULL(EINVAL, lode_memory_open(path, 4096, 0));
    FAILS_NULL(EINVAL, lode_memory_open(NULL, 0, 0));
    FAILS_NULL(EINVAL, lode_memory_open(path, BYTES, 64));
    CHECK(access(path, F_OK) == -1);
    CHECK((memory = lode_memory_open(path, BYTES, LODE_MEMORY_FAIL)) != NULL);
    /* Another part of the same file. */
    lode_memory *other = lode_memory_open(path, 0, 0);
    CHECK(other != NULL);
    char *here = lode_memory_alloc(memory, 100000), *there = lode_memory_alloc(other, 100000);
    CHECK(here && there);
    memset(here, 1, 100000);
    memset(there, 2, 100000);
    CHECK(here[99999] == 1 && there[99999] == 2);
    CHECK(lode_memory_close(other) == 0);
    FAILS(EBADF, lode_memory_close(other));
    FAILS_NULL(EBADF, lode_memory_alloc(other, 10));
    FAILS(EINVAL, lode_memory_free((lode_memory *)path, here));
    CHECK(lode_memory_free(memory, here) == 0);
}

static void blocks(void)
{
    unsigned char *had[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        CHECK((had[i] = lode_memory_alloc(memory, i * 211)) != NULL && (uintptr_t)had[i] % 16 == 0);
        memset(had[i], (int)i, i * 211);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        for (size_t n = 0; n < i * 211; n++)
            CHECK(had[i][n] == (unsigned char)i);
        CHECK((had[i] = lode_memory_realloc(memory, had[i], i * 211 + 5000)) != NULL);
        CHECK(i == 0 || had[i][i * 211 - 1] == (unsigned char)i);
    }
    lode_memory_statistics found;
    CHECK(lode_memory_stats(memory, &found, sizeof found) == 0);
    CHECK(found.media == BYTES && found.in_dram == 0 && found.arenas > 0 && found.extents > 0);
    CHECK(found.on_media >= BLOCKS * 5000 && found.claimed >= found.on_media && found.active >= BLOCKS * 5000);
    FAILS(EINVAL, lode_memory_stats(memory, &found, 8));
    FAILS(EFAULT, lode_memory_stats(memory, NULL, sizeof found));
    for (size_t i = 0; i < BLOCKS; i++)
        CHECK(lode_memory_free(memory, had[i]) == 0);
    CHECK(lode_memory_free(memory, NULL) == 0);
    for (size_t align = 1; align <= 1 << 21; align *= 2) {
        void *at = lode_memory_alloc_aligned(memory, align, 77);
        CHECK(at && (uintptr_t)at % align == 0);
        CHECK(lode_memory_free(memory, at) == 0);
    }
    FAILS_NULL(EINVAL, lode_memory_alloc_aligned(memory, 24, 77));
    FAILS_NULL(ENOMEM, lode_memory_alloc(memory, 2 * (size_t)BYTES));
    FAILS_NULL(ENOMEM, lode_memory_alloc(memory, SIZE_MAX - 5));
    CHECK(lode_memory_stats(memory, &found, sizeof found) == 0 && found.refused > 0);
}

static void *worker(void *number)
{
    unsigned char with = (unsigned char)(uintptr_t)number;
    for (size_t round = 1; round < 3000; round++) {
        unsigned char *at = lode_memory_alloc(memory, round * 7);
        CHECK(at != NULL);
        memset(at, with, round * 7);
        CHECK(at[0] == with && at[round * 7 - 1] == with);
        CHECK(lode_memory_free(memory, at) == 0);
    }
    return NULL;
}

static void threads(void)
{
    pthread_t all[4];
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&all[i], NULL, worker, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_join(all[i], NULL) == 0);
}

static void forking(void)
{
    enum { SIZE = 3 << 20 };
    char *at = lode_memory_alloc(memory, SIZE);
    memset(at, 'a', SIZE);
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(at[0] == 'a' && at[SIZE - 1] == 'a');
        memset(at, 'c', SIZE);
        FAILS_NULL(EBADF, lode_memory_alloc(memory, 10));
        lode_memory *own = lode_memory_open(path, 0, 0);
        char *mine = lode_memory_alloc(own, SIZE);
        CHECK(mine != NULL);
        memset(mine, 'd', SIZE);
        CHECK(at[SIZE - 1] == 'c' && lode_memory_close(own) == 0);
        _exit(0);
    }
    memset(at, 'p', SIZE);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(at[0] == 'p' && at[SIZE - 1] == 'p');
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return fprintf(stderr, "usage: memory DIRECTORY\n"), 2;
    snprintf(path, sizeof path, "%s/memory", argv[1]);
    unlink(path);
    opening();
    blocks();
    threads();
    forking();
    CHECK(lode_memory_close(memory) == 0);
    printf("memory: %u checks passed\n", checks);
    return unlink(path);
}
