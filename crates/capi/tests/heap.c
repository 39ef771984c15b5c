/*
 * Persistent heaps, from C: heap DIRECTORY.
 *
 * What is checked is the contract at this boundary: addresses, errno, commits, a child that is killed; that a heap
 * survives every crash is tested beside it.
 */
#define _GNU_SOURCE 1
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

enum { TYPE = 7, KILLS = 10, THREADS = 4, ROUNDS = 200 };

/* A list, by what LODE_HEAP_LINK stores. */
struct node {
    uint64_t next;
    uint64_t number;
    char text[48];
};

static char path[3000];
static lode_heap *heap;

static struct node *first(void)
{
    return lode_heap_root(heap, "list", TYPE);
}

static struct node *next(const struct node *node)
{
    return lode_heap_linked(heap, node->next);
}

/* A new first node, in one commit. */
static int push(uint64_t number)
{
    struct node *node = lode_heap_reserve(heap, sizeof *node);
    if (node == NULL)
        return -1;
    struct node *old = first();
    node->number = number;
    snprintf(node->text, sizeof node->text, "number %llu", (unsigned long long)number);
    lode_heap_change changes[] = {
        {.what = LODE_HEAP_PUBLISH, .at = node},
        {.what = LODE_HEAP_LINK, .at = &node->next, .to = old},
        {.what = LODE_HEAP_ROOT, .name = "list", .value = TYPE, .to = node},
    };
    return lode_heap_commit(heap, changes, 3);
}

static uint64_t count(void)
{
    uint64_t nodes = 0;
    for (struct node *node = first(); node; node = next(node), nodes++) {
        char text[48];
        snprintf(text, sizeof text, "number %llu", (unsigned long long)node->number);
        CHECK(strcmp(node->text, text) == 0);
    }
    return nodes;
}

static void opening(void)
{
    FAILS_NULL(ENOENT, lode_heap_open(path, NULL));
    CHECK(strstr(lode_last_error(), path));
    FAILS_NULL(EFAULT, lode_heap_open(NULL, NULL));
    FAILS_NULL(EINVAL, lode_heap_create(path, "size=much"));
    FAILS_NULL(EINVAL, lode_heap_create(path, "colour=red"));
    FAILS_NULL(EINVAL, lode_heap_create(path, "size=8192"));
    FAILS_NULL(EINVAL, lode_heap_create(path, "size=1048576,address=12345"));
    CHECK(access(path, F_OK) == -1);
    heap = lode_heap_create(path, "size=4194304,label=list");
    CHECK(heap != NULL);
    FAILS_NULL(EBUSY, lode_heap_open(path, NULL));
    FAILS_NULL(EINVAL, lode_heap_open(path, "force"));
    CHECK(lode_heap_close(heap) == 0);
    FAILS(EBADF, lode_heap_close(heap));
    FAILS_NULL(EBADF, lode_heap_reserve(heap, 16));
    FAILS(EINVAL, lode_heap_close(NULL));
    FAILS_NULL(EEXIST, lode_heap_create(path, "size=4194304"));
    heap = lode_heap_open(path, NULL);
    CHECK(heap != NULL);
}

static void committing(void)
{
    FAILS_NULL(ENOENT, first());
    CHECK(push(1) == 0 && push(2) == 0 && push(3) == 0 && count() == 3);
    FAILS_NULL(EEXIST, lode_heap_root(heap, "list", TYPE + 1));
    struct node *third = first(), *second = next(third);
    CHECK(third->number == 3 && second->number == 2);
    CHECK(lode_heap_usable_size(heap, third) == sizeof *third);
    CHECK(lode_heap_offset(heap, third) > 0);
    FAILS(EINVAL, lode_heap_offset(heap, path));
    FAILS(EINVAL, lode_heap_usable_size(heap, &third->number));
    lode_heap_usage before, after;
    CHECK(lode_heap_used(heap, &before) == 0 && before.objects == 3);

    /* Nothing of a commit that is refused. */
    void *object = lode_heap_reserve(heap, 100);
    CHECK(object != NULL && (uintptr_t)object % 16 == 0);
    lode_heap_change bad[] = {
        {.what = LODE_HEAP_PUBLISH, .at = object},
        {.what = LODE_HEAP_SET, .at = &third->number, .value = 9},
        {.what = LODE_HEAP_FREE, .at = second->text},
    };
    FAILS(EINVAL, lode_heap_commit(heap, bad, 3));
    bad[2] = (lode_heap_change){.what = 99};
    FAILS(EINVAL, lode_heap_commit(heap, bad, 3));
    bad[2] = (lode_heap_change){.what = LODE_HEAP_REMOVE_ROOT, .name = "none"};
    FAILS(ENOENT, lode_heap_commit(heap, bad, 3));
    bad[2] = (lode_heap_change){.what = LODE_HEAP_ROOT};
    FAILS(EFAULT, lode_heap_commit(heap, bad, 3));
    FAILS(EFAULT, lode_heap_commit(heap, NULL, 3));
    CHECK(lode_heap_used(heap, &after) == 0 && memcmp(&before, &after, sizeof before) == 0 && third->number == 3);
    CHECK(lode_heap_give_back(heap, object) == 0);
    FAILS(EINVAL, lode_heap_give_back(heap, object));

    /* The second goes, the third leads to the first. */
    lode_heap_change unlink[] = {
        {.what = LODE_HEAP_LINK, .at = &third->next, .to = next(second)},
        {.what = LODE_HEAP_FREE, .at = second},
    };
    CHECK(lode_heap_commit(heap, unlink, 2) == 0 && count() == 2);
    lode_heap_change nowhere = {.what = LODE_HEAP_ROOT, .name = "nowhere", .value = 1};
    CHECK(lode_heap_commit(heap, &nowhere, 1) == 0);
    CHECK((errno = 5, lode_heap_root(heap, "nowhere", 1) == NULL) && errno == 0);
    strcpy(third->text, "number 3");
    CHECK(lode_heap_persist(heap, third->text, 9) == 0);
    FAILS(EINVAL, lode_heap_persist(heap, path, 9));
    CHECK(lode_heap_check(heap) == 0);
    CHECK(lode_heap_close(heap) == 0);
    heap = lode_heap_open(path, NULL);
    CHECK(heap != NULL && count() == 2 && lode_heap_check(heap) == 0);
}

static void *threads_push(void *name)
{
    void *old = NULL;
    for (int i = 0; i < ROUNDS; i++) {
        int *object = lode_heap_reserve(heap, 1000);
        CHECK(object != NULL);
        object[0] = i;
        lode_heap_change changes[] = {
            {.what = LODE_HEAP_PUBLISH, .at = object},
            {.what = LODE_HEAP_ROOT, .name = name, .value = 1, .to = object},
            {.what = LODE_HEAP_FREE, .at = old},
        };
        CHECK(lode_heap_commit(heap, changes, old ? 3 : 2) == 0);
        old = object;
    }
    return NULL;
}

static void threads(void)
{
    static char names[THREADS][16];
    pthread_t all[THREADS];
    for (int i = 0; i < THREADS; i++) {
        snprintf(names[i], sizeof names[i], "thread %d", i);
        CHECK(pthread_create(&all[i], NULL, threads_push, names[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(all[i], NULL) == 0);
    lode_heap_usage usage;
    CHECK(lode_heap_used(heap, &usage) == 0 && usage.objects == 2 + THREADS && lode_heap_check(heap) == 0);
}

/* A child pushes until it is killed; what it said is there. */
static void kills(void)
{
    CHECK(lode_heap_close(heap) == 0);
    for (int kill_number = 0; kill_number < KILLS; kill_number++) {
        int pipes[2];
        CHECK(pipe(pipes) == 0);
        heap = lode_heap_open(path, NULL);
        CHECK(heap != NULL);
        uint64_t before = count();
        CHECK(lode_heap_close(heap) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            heap = lode_heap_open(path, NULL);
            for (uint64_t n = 0; heap && push(n) == 0; n++)
                if (write(pipes[1], "x", 1) != 1)
                    break;
            _exit(1);
        }
        close(pipes[1]);
        uint64_t said = 0;
        char byte;
        for (; said < 20 && read(pipes[0], &byte, 1) == 1; said++)
            ;
        CHECK(said == 20 && kill(child, SIGKILL) == 0);
        while (read(pipes[0], &byte, 1) == 1)
            said++;
        close(pipes[0]);
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
        heap = lode_heap_open(path, NULL);
        CHECK(heap != NULL && lode_heap_check(heap) == 0);
        uint64_t after = count() - before;
        CHECK(after == said || after == said + 1);
        CHECK(lode_heap_close(heap) == 0);
    }
}

static void place(void)
{
    strcat(path, ".fixed");
    heap = lode_heap_create(path, "size=4194304,fixed");
    CHECK(heap != NULL && push(1) == 0 && push(2) == 0);
    struct node *node = first();
    CHECK((uintptr_t)node->next == (uintptr_t)next(node));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(!(lode_heap_reserve(heap, 16) == NULL && errno == EBADF));
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(lode_heap_close(heap) == 0);
    heap = lode_heap_open(path, NULL);
    CHECK(heap != NULL && first() == node && count() == 2);
    CHECK(lode_heap_close(heap) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    snprintf(path, sizeof path - 10, "%s/heap.%d", argv[1], (int)getpid());
    opening();
    committing();
    threads();
    kills();
    place();
    printf("%u checks of heaps passed\n", checks);
    return 0;
}
