/*
The host's memory, as the system tells: what this process has had in use, and what is left for it.
*/
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H
#include <sys/resource.h>
#include <stdio.h>
#include "llmc/ranks/dist.h"

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
static size_t host_memory_peak(void) {
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
static size_t host_memory_available(void) {
    size_t machine = system_kilobytes("/proc/meminfo", "MemAvailable");
    size_t left =
        min_size(cgroup_left(CGROUP "memory.max", CGROUP "memory.current", CGROUP "memory.stat", "inactive_file"),
                 cgroup_left(CGROUP "memory/memory.limit_in_bytes", CGROUP "memory/memory.usage_in_bytes",
                             CGROUP "memory/memory.stat", "total_inactive_file"));
    left = machine ? min_size(machine, left) : left == SIZE_MAX ? 0 : left;
    return left ? left / dist_local_ranks() + 1 : 0; // 0 would mean that nothing is known
}

#endif
