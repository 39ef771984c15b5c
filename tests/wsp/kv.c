/* The database of the study of whole systems: RocksDB, asked for exactly so many entries at exactly the moment it is told to.
 *
 *     kv DIRECTORY fill ENTRIES    makes a database
 *     kv DIRECTORY serve ENTRIES   opens it, reads nothing, says "@ready", and does what each line of its input says:
 *
 *         warm                     reads all entries once, both ways;  @warm
 *         random COUNT SEED        so many entries, anywhere;          @reads random, the time of each in ns;  @end
 *         seq COUNT SEED           so many in order, from some on;     @reads seq, ...
 *
 * db_bench begins by itself, and tells percentiles of all it did: where a suspend falls in it nobody can choose. Here all times
 * are stored, in memory that was touched before, and written when the last is known. They are by CLOCK_MONOTONIC, which nobody
 * sets, and which stands while the guest does.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rocksdb/c.h>

enum { VALUE_BYTES = 400, COUNT_MAX = 1 << 20, KEY_BYTES = 16, CACHE_BYTES = 1 << 30 };

static uint64_t latencies[COUNT_MAX];
static uint64_t random_state;
/* What was read counts, so that no compiler leaves a read out. */
static volatile uint64_t bytes_read;

static void check(const char *error, const char *what)
{
    if (error) {
        printf("@broken: %s: %s\n", what, error);
        exit(1);
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* xorshift64* */
static uint64_t next_random(void)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717u;
}

/* Decimal, so that they are in order. */
static void key_of(uint64_t entry, char key[KEY_BYTES])
{
    for (int n = KEY_BYTES - 1; n >= 0; n--, entry /= 10)
        key[n] = (char)('0' + entry % 10);
}

static void fill(rocksdb_t *db, uint64_t entries)
{
    rocksdb_writeoptions_t *options = rocksdb_writeoptions_create();
    rocksdb_writeoptions_disable_WAL(options, 1);
    uint64_t value[VALUE_BYTES / 8];
    char key[KEY_BYTES], *error = NULL;
    for (uint64_t entry = 0; entry < entries; entry++) {
        for (size_t n = 0; n < VALUE_BYTES / 8; n++)
            value[n] = next_random();
        key_of(entry, key);
        rocksdb_put(db, options, key, KEY_BYTES, (char *)value, VALUE_BYTES, &error);
        check(error, "put");
    }
    rocksdb_compact_range(db, NULL, 0, NULL, 0);
    rocksdb_writeoptions_destroy(options);
}

static void get(rocksdb_t *db, const rocksdb_readoptions_t *options, uint64_t entry)
{
    char key[KEY_BYTES], *error = NULL;
    size_t length = 0;
    key_of(entry, key);
    char *value = rocksdb_get(db, options, key, KEY_BYTES, &length, &error);
    check(error, "get");
    check(value && length == VALUE_BYTES ? NULL : "or too short", "an entry is missing");
    bytes_read += (unsigned char)value[length - 1];
    rocksdb_free(value);
}

static void look(const rocksdb_iterator_t *at)
{
    size_t length = 0;
    check(rocksdb_iter_valid(at) ? NULL : "too early", "the database ends");
    const char *value = rocksdb_iter_value(at, &length);
    bytes_read += (unsigned char)value[length - 1];
}

static void warm(rocksdb_t *db, const rocksdb_readoptions_t *options, uint64_t entries)
{
    for (uint64_t entry = 0; entry < entries; entry++)
        get(db, options, entry);
    rocksdb_iterator_t *at = rocksdb_create_iterator(db, options);
    for (rocksdb_iter_seek_to_first(at); rocksdb_iter_valid(at); rocksdb_iter_next(at))
        look(at);
    rocksdb_iter_destroy(at);
    printf("@warm\n");
}

static void reads_random(rocksdb_t *db, const rocksdb_readoptions_t *options, uint64_t entries, size_t count)
{
    for (size_t n = 0; n < count; n++) {
        uint64_t entry = next_random() % entries, begun = now_ns();
        get(db, options, entry);
        latencies[n] = now_ns() - begun;
    }
}

/* The first of them finds its place. */
static void reads_seq(rocksdb_t *db, const rocksdb_readoptions_t *options, uint64_t entries, size_t count)
{
    char key[KEY_BYTES];
    check(count <= entries ? NULL : "too few entries", "seq");
    key_of(next_random() % (entries - count + 1), key);
    rocksdb_iterator_t *at = NULL;
    for (size_t n = 0; n < count; n++) {
        uint64_t begun = now_ns();
        if (n == 0) {
            at = rocksdb_create_iterator(db, options);
            rocksdb_iter_seek(at, key, KEY_BYTES);
        } else {
            rocksdb_iter_next(at);
        }
        look(at);
        latencies[n] = now_ns() - begun;
    }
    if (at)
        rocksdb_iter_destroy(at);
}

static void serve(rocksdb_t *db, uint64_t entries)
{
    rocksdb_readoptions_t *options = rocksdb_readoptions_create();
    char line[128], order[16];
    size_t count;
    memset(latencies, 0xff, sizeof latencies);
    printf("@ready\n");
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "warm", 4) == 0) {
            warm(db, options, entries);
            continue;
        }
        if (sscanf(line, "%15s %zu %" SCNu64, order, &count, &random_state) != 3 || count > COUNT_MAX || random_state == 0)
            check(line, "what is meant by");
        if (strcmp(order, "random") == 0)
            reads_random(db, options, entries, count);
        else
            reads_seq(db, options, entries, count);
        printf("@reads %s\n", order);
        for (size_t n = 0; n < count; n++)
            printf("%" PRIu64 "%c", latencies[n], n % 16 == 15 || n + 1 == count ? '\n' : ' ');
        printf("@end\n");
    }
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: kv DIRECTORY fill|serve ENTRIES\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    random_state = 88172645463325252u;
    uint64_t entries = strtoull(argv[3], NULL, 10);
    rocksdb_options_t *options = rocksdb_options_create();
    rocksdb_block_based_table_options_t *table = rocksdb_block_based_options_create();
    rocksdb_cache_t *cache = rocksdb_cache_create_lru(CACHE_BYTES);
    rocksdb_block_based_options_set_block_cache(table, cache);
    rocksdb_options_set_block_based_table_factory(options, table);
    rocksdb_options_set_compression(options, rocksdb_no_compression);
    /* Nothing of its own meanwhile. */
    rocksdb_options_set_stats_dump_period_sec(options, 0);
    rocksdb_options_set_create_if_missing(options, strcmp(argv[2], "fill") == 0);
    char *error = NULL;
    rocksdb_t *db = rocksdb_open(options, argv[1], &error);
    check(error, "open");
    if (strcmp(argv[2], "fill") == 0)
        fill(db, entries);
    else
        serve(db, entries);
    rocksdb_close(db);
    rocksdb_cache_destroy(cache);
    rocksdb_block_based_options_destroy(table);
    rocksdb_options_destroy(options);
    return 0;
}
