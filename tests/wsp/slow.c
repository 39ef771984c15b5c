/* A model of memory with a latency, for the study of whole systems: a plugin of QEMU's, for guests whose processor is emulated.
 *
 *     qemu-system-x86_64 -plugin file=slow.so,ns=300 ...
 *
 * Each load and store of the guest's looks for its line in a cache of 32 MiB, and where it is not there, the processor stands for
 * as long as the memory takes. So much is a model: the cache is mapped directly, nothing is fetched ahead, code is not fetched at
 * all, lines are not written back, and bandwidth has no end. Who compares latencies has the model on both sides: it costs time
 * itself. A device's accesses are not the processor's, and are as fast as ever.
 *
 * QEMU's packages have no header for plugins; what is used of it stands here. It is version 1 (QEMU 4.2 to 8).
 */
#define _POSIX_C_SOURCE 200809L

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { LINE_SHIFT = 6, CACHE_LINES = (32 << 20) >> LINE_SHIFT, NO_REGISTERS = 0, LOADS_AND_STORES = 3 };

struct block;
struct instruction;
struct place;
typedef void translated_fn(uint64_t plugin, struct block *block);
typedef void accessed_fn(unsigned processor, uint32_t access, uint64_t address, void *data);

extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t plugin, translated_fn *then);
extern size_t qemu_plugin_tb_n_insns(const struct block *block);
extern struct instruction *qemu_plugin_tb_get_insn(const struct block *block, size_t n);
extern void qemu_plugin_register_vcpu_mem_cb(struct instruction *at, accessed_fn *then, int registers, int kinds, void *data);
extern struct place *qemu_plugin_get_hwaddr(uint32_t access, uint64_t address);
extern bool qemu_plugin_hwaddr_is_io(const struct place *place);
extern uint64_t qemu_plugin_hwaddr_phys_addr(const struct place *place);

EXPORT int qemu_plugin_version = 1;

/* Which line is where; processors that meet at one lose nothing but a hit. */
static uint64_t cached[CACHE_LINES];
static uint64_t latency_ns;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void accessed(unsigned processor, uint32_t access, uint64_t address, void *data)
{
    (void)processor, (void)data;
    const struct place *place = qemu_plugin_get_hwaddr(access, address);
    if (!place || qemu_plugin_hwaddr_is_io(place))
        return;
    /* None is line 0, so that an empty cache has none. */
    uint64_t line = (qemu_plugin_hwaddr_phys_addr(place) >> LINE_SHIFT) + 1;
    if (cached[line % CACHE_LINES] == line)
        return;
    cached[line % CACHE_LINES] = line;
    for (uint64_t until = now_ns() + latency_ns; now_ns() < until;)
        ;
}

static void translated(uint64_t plugin, struct block *block)
{
    (void)plugin;
    for (size_t n = 0; n < qemu_plugin_tb_n_insns(block); n++)
        qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(block, n), accessed, NO_REGISTERS, LOADS_AND_STORES, NULL);
}

EXPORT int qemu_plugin_install(uint64_t plugin, const void *about, int argc, char **argv)
{
    (void)about;
    if (argc != 1 || strncmp(argv[0], "ns=", 3) != 0)
        return -1;
    latency_ns = strtoull(argv[0] + 3, NULL, 10);
    qemu_plugin_register_vcpu_tb_trans_cb(plugin, translated);
    return 0;
}
