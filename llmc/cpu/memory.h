/*
Memory of op set "cpu": "device" memory is anonymous memory of this process. Pages become resident when they are first
touched, so an allocation may be planned generously. Huge pages are asked for: the matrix products then miss the TLB
less often, and first touches cost far less time.
*/
#ifndef LLMC_CPU_MEMORY_H
#define LLMC_CPU_MEMORY_H
#include <sys/mman.h>
#include <sys/resource.h>
#include <stdio.h>
#include "../dist.h"

#define HUGE_PAGE ((size_t)2 << 20)

// bytes, at least one, rounded up to whole pages (huge ones where the allocation has any).
static size_t allocation_size(size_t bytes) {
    size_t page = bytes < HUGE_PAGE ? (size_t)4096 : HUGE_PAGE;
    return bytes ? (bytes + page - 1) / page * page : page;
}

// Large allocations start at a multiple of HUGE_PAGE: more is mapped, and what lies before and behind goes back.
static void *memory_allocate(size_t bytes) {
    size_t size, slack, before, behind;
    char *memory;
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE) return NULL; // size + slack would wrap around
    size = allocation_size(bytes), slack = size < HUGE_PAGE ? 0 : HUGE_PAGE;
    memory = (char *)mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (!slack) return memory;
    before = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
    behind = slack - before;
    if (before) munmap(memory, before);
    if (behind) munmap(memory + before + size, behind);
#ifdef MADV_HUGEPAGE
    madvise(memory + before, size, MADV_HUGEPAGE); // a wish: without it everything works, a little slower
#endif
    return memory + before;
}

static void memory_release(void *memory, size_t bytes) {
    if (memory) munmap(memory, allocation_size(bytes));
}

// ---- what is in use and what is left, as the system tells --------------------------------------------------------------
// The number behind `key` in a file of lines "Key:  number kB", in bytes; 0 where there is none.
static size_t system_kilobytes(const char *path, const char *key) {
    char line[256];
    size_t length = strlen(key), bytes = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        if (!strncmp(line, key, length) && line[length] == ':') bytes = strtoull(line + length + 1, NULL, 10) * 1024;
    if (file) fclose(file);
    return bytes;
}

static size_t system_number(const char *path) { // 0 where there is none, or "max"
    char line[64];
    size_t number = 0;
    FILE *file = fopen(path, "r");
    if (file && fgets(line, sizeof(line), file)) number = strtoull(line, NULL, 10);
    if (file) fclose(file);
    return number;
}

// High-water mark of this process's resident memory.
static size_t memory_peak(void) {
    struct rusage usage;
    size_t bytes = system_kilobytes("/proc/self/status", "VmHWM");
    if (bytes || getrusage(RUSAGE_SELF, &usage)) return bytes;
#ifdef __APPLE__
    return (size_t)usage.ru_maxrss;
#else
    return (size_t)usage.ru_maxrss * 1024;
#endif
}

// The number behind `key` in a cgroup's lines "key number"; 0 where there is none.
static size_t cgroup_stat(const char *path, const char *key) {
    char line[128];
    size_t length = strlen(key), number = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        if (!strncmp(line, key, length) && line[length] == ' ') number = strtoull(line + length, NULL, 10);
    if (file) fclose(file);
    return number;
}

// What a container's limit leaves: file contents that the kernel can drop count as used there, but are no hindrance.
// SIZE_MAX without a limit.
static size_t cgroup_left(const char *limit_path, const char *used_path, const char *stat_path, const char *droppable) {
    size_t limit = system_number(limit_path), used = system_number(used_path),
           cache = cgroup_stat(stat_path, droppable);
    if (!limit) return SIZE_MAX;
    used -= min_size(used, cache);
    return used < limit ? limit - used : 1; // 0 would mean that nothing is known
}

// What the machine, or the container this runs in (cgroup 2 or 1), has left for this process: its share, where other ranks
// run there.
#define CGROUP "/sys/fs/cgroup/"
static size_t memory_available(void) {
    size_t machine = system_kilobytes("/proc/meminfo", "MemAvailable"), left;
    left = min_size(cgroup_left(CGROUP "memory.max", CGROUP "memory.current", CGROUP "memory.stat", "inactive_file"),
                    cgroup_left(CGROUP "memory/memory.limit_in_bytes", CGROUP "memory/memory.usage_in_bytes",
                                CGROUP "memory/memory.stat", "total_inactive_file"));
    left = machine ? min_size(machine, left) : left == SIZE_MAX ? 0 : left;
    return left ? left / dist_local_ranks() + 1 : 0; // 0 would mean that nothing is known
}

// ---- copies and clears ---------------------------------------------------------------------------------------------------
// Large copies and clears are shared by all threads: one core alone does not reach the memory's bandwidth.
#define COPY_PIECE ((size_t)1 << 20)

static void memory_copy(void *out, const void *in, size_t bytes) {
    size_t pieces = (bytes + COPY_PIECE - 1) / COPY_PIECE, i;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (i = 0; i < pieces; i++)
        memcpy((char *)out + i * COPY_PIECE, (const char *)in + i * COPY_PIECE,
               min_size(COPY_PIECE, bytes - i * COPY_PIECE));
}

static void memory_zero(void *out, size_t bytes) {
    size_t pieces = (bytes + COPY_PIECE - 1) / COPY_PIECE, i;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (i = 0; i < pieces; i++) memset((char *)out + i * COPY_PIECE, 0, min_size(COPY_PIECE, bytes - i * COPY_PIECE));
}

#endif
