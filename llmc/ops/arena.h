/*
One planned allocation for all tensors that a run keeps in a place: device memory, host memory or a file on a disk.
Regions are pushed and popped like a stack: regions that never live together share bytes, and equal pushes give equal
addresses. An address on a disk names a byte of the file; only the ops' transfers and copies take it.

A dry run walks the same code over an arena without memory, at addresses outside any address space. It records the peak,
its shares, and the names of regions alive at the peak; the run then allocates that peak once.
*/
#ifndef LLMC_ARENA_H
#define LLMC_ARENA_H
#include "llmc/base/utils.h"
#include "llmc/ranks/dist.h"
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>

typedef enum { PLACE_AUTO = -1, PLACE_DEVICE, PLACE_HOST, PLACE_DISK, PLACES } Place; // AUTO: the planner's choice

static const char *const place_names[PLACES] = {"device", "host", "disk"};

#define DISK_PIECES ((size_t)16 << 20) // bytes of host memory in which disk transfers are staged (disk.h)

// Kinds of tensors whose place can be chosen
typedef enum {
    PLACED_INPUTS, // kept from forward to backward: layer inputs; in chunk-major methods keys, values and states
    PLACED_WEIGHTS,
    PLACED_GRADIENTS,
    PLACED_OPTIMIZER,
    PLACED_KEPT,
    PLACED_REFERENCE,
    PLACED
} Placed;

static const char *const placed_names[PLACED] = {"inputs", "weights", "gradients", "optimizer", "keep_on", "reference"};

typedef enum {
    SHARE_WEIGHTS,
    SHARE_GRADIENTS,
    SHARE_OPTIMIZER,
    SHARE_LAYER_INPUTS,
    SHARE_KEPT,
    SHARE_KV,
    SHARE_WORKSPACE,
    SHARE_LOGITS,
    SHARES
} Share;

static const char *const share_names[SHARES] = {"weights",        "gradients", "optimizer", "layer_inputs",
                                                "kept_attention", "kv",        "workspace", "logits"};

typedef struct {
    const char *name;
    Share share;
    size_t begin, bytes; // bytes are rounded up to the alignment
} Region;

#define ARENA_REGIONS   160
#define ARENA_ALIGNMENT 256
#define ARENA_NOWHERE   ((uintptr_t)1 << 52) // base of a dry run, doubled for each further place: no machine maps it

typedef struct {
    char *base;
    size_t capacity; // SIZE_MAX in a dry run
    size_t used, peak;
    Region region[ARENA_REGIONS]; // regions alive now
    size_t regions;
    Region at_peak[ARENA_REGIONS]; // regions alive at the peak
    size_t regions_at_peak;
    void (*copy_in)(void *, const void *, size_t), (*copy_out)(void *, const void *, size_t); // copies for red zones;
                                                                                              // NULL: no red zones
} Arena;

static void arena_plan(Arena arena[PLACES]) {
    memset(arena, 0, PLACES * sizeof(*arena));
    for (int place = 0; place < PLACES; place++) {
        arena[place].base = (char *)(ARENA_NOWHERE << place);
        arena[place].capacity = SIZE_MAX - (ARENA_NOWHERE << place);
    }
}

static void arena_init(Arena *arena, void *memory, size_t bytes) {
    memset(arena, 0, sizeof(*arena));
    arena->base = (char *)memory;
    arena->capacity = bytes;
}

/*
Red zones, for debugging: with STREAMBP_RED_ZONES set, also in dry runs, ARENA_ALIGNMENT bytes after each region hold a
pattern. A write into a red zone ends the program at the next pop. (To compute-sanitizer the arena is one allocation
without regions.) Each push and pop waits for the device.
*/
#define ARENA_PATTERN 0xA5
static size_t arena_red_zone(void) { return getenv("STREAMBP_RED_ZONES") ? ARENA_ALIGNMENT : 0; }

// Sets the copies that write and read red zones.
static void arena_watch(Arena *arena, void (*copy_in)(void *, const void *, size_t),
                        void (*copy_out)(void *, const void *, size_t)) {
    if (arena_red_zone()) arena->copy_in = copy_in, arena->copy_out = copy_out;
}

static void arena_check_zones(const Arena *arena) {
    unsigned char zone[ARENA_ALIGNMENT];
    for (size_t i = 0; arena->copy_out && i < arena->regions; i++) {
        const Region *region = &arena->region[i];
        arena->copy_out(zone, arena->base + region->begin + region->bytes, sizeof(zone));
        for (size_t j = 0; j < sizeof(zone); j++)
            if (zone[j] != ARENA_PATTERN)
                die("%s: byte %zu after its %zu bytes was overwritten between the arena's last pop and this one; "
                    "please report it",
                    region->name, j, region->bytes);
    }
}

// Pushes a region of `count` elements of `size` bytes. The region lives until arena_pop of a mark that was taken before
// the push.
static void *arena_push(Arena *arena, Share share, const char *name, size_t count, size_t size) {
    const size_t zone = arena_red_zone();
    size_t bytes = count * size;
    if (count && (size > SIZE_MAX / count || bytes > SIZE_MAX - ARENA_NOWHERE - 2 * ARENA_ALIGNMENT))
        die("%s: %zu elements of %zu bytes are more than any memory holds; give a smaller --seq-len or --batch", name,
            count, size);
    bytes = (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    if (bytes + zone > arena->capacity - arena->used)
        die("%s: %zu bytes do not fit in addition to %zu of %zu planned bytes: the run does not follow its plan, "
            "please report it",
            name, bytes, arena->used, arena->capacity);
    if (arena->regions == ARENA_REGIONS)
        die("internal: %s: more than %d regions in one arena; please report it", name, ARENA_REGIONS);
    Region *region = &arena->region[arena->regions++];
    region->name = name, region->share = share;
    region->begin = arena->used, region->bytes = bytes;
    arena->used += bytes + zone;
    if (arena->used > arena->peak) {
        arena->peak = arena->used;
        arena->regions_at_peak = arena->regions;
        memcpy(arena->at_peak, arena->region, arena->regions * sizeof(Region));
    }
    if (arena->copy_in) {
        unsigned char pattern[ARENA_ALIGNMENT];
        memset(pattern, ARENA_PATTERN, sizeof(pattern));
        arena->copy_in(arena->base + region->begin + bytes, pattern, sizeof(pattern));
    }
    return arena->base + region->begin;
}

// Returns a mark; arena_pop(arena, mark) ends every region pushed after the mark.
static size_t arena_mark(const Arena *arena) { return arena->regions; }

static void arena_pop(Arena *arena, size_t mark) {
    arena_check_zones(arena);
    if (mark < arena->regions) arena->used = arena->region[mark].begin;
    arena->regions = mark;
}

// Marks of the arenas of all places
typedef struct {
    size_t of[PLACES];
} Marks;

static Marks marks_of(const Arena arena[PLACES]) {
    Marks marks;
    for (int place = 0; place < PLACES; place++) marks.of[place] = arena_mark(&arena[place]);
    return marks;
}

static void marks_pop(Arena arena[PLACES], Marks marks) {
    for (int place = 0; place < PLACES; place++) arena_pop(&arena[place], marks.of[place]);
}

// Returns whether [pointer, pointer + bytes) lies within one live region.
static int arena_holds(const Arena *arena, const void *pointer, size_t bytes) {
    const Region *r = arena->region;
    const size_t at = (size_t)((uintptr_t)pointer - (uintptr_t)arena->base);
    r += last_at_most(&r->begin, sizeof(*r), arena->regions, at);
    return arena->regions && at >= r->begin && at - r->begin <= r->bytes && bytes <= r->bytes - (at - r->begin);
}

static size_t arena_share(const Arena *arena, Share share) {
    size_t bytes = 0;
    for (size_t i = 0; i < arena->regions_at_peak; i++)
        if (arena->at_peak[i].share == share) bytes += arena->at_peak[i].bytes;
    return bytes;
}

/*
The host's memory, as the system reports it: this process's peak, and the bytes that it can still take.
*/
// Returns the number after `key` in a file of lines "Key: number kB" or "key number", in bytes. key "": the whole file
// is a number. Returns 0 if there is no number, or if it is "max".
static size_t system_bytes(const char *path, const char *key) {
    char line[256];
    size_t length = strlen(key), bytes = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        if (!strncmp(line, key, length) && (!length || line[length] == ':' || line[length] == ' '))
            bytes = strtoull(line + length + (length != 0), NULL, 10) * (strstr(line, " kB") ? 1024 : 1);
    if (file) fclose(file);
    return bytes;
}

// Returns the peak of this process's resident memory, in bytes.
static size_t host_memory_peak(void) {
    struct rusage usage;
    size_t bytes = system_bytes("/proc/self/status", "VmHWM");
    if (bytes || getrusage(RUSAGE_SELF, &usage)) return bytes;
#ifdef __APPLE__
    return (size_t)usage.ru_maxrss;
#else
    return (size_t)usage.ru_maxrss * 1024;
#endif
}

// Visits the folder of each control group of this process, version 2 or 1, and of the groups that contain it.
#ifndef CGROUP
#define CGROUP      "/sys/fs/cgroup"
#define PROC_CGROUP "/proc/self/cgroup"
#endif
typedef void (*CgroupVisit)(const char *folder, int version, void *found);

static void cgroups_visit(const char *controller, CgroupVisit visit, void *found) {
    char line[1024], folder[1280];
    FILE *file = fopen(PROC_CGROUP, "r");
    while (file && fgets(line, sizeof(line), file)) { // a line is number:controllers:path
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0, path[strcspn(path, "\n")] = 0;
        const int version = controllers[1] ? 1 : 2;
        char *word = version == 1 ? strtok(controllers + 1, ",") : NULL;
        while (word && strcmp(word, controller) != 0) word = strtok(NULL, ",");
        if (version == 1 && !word) continue;
        for (char *end = path + strlen(path); end; end = strrchr(path, '/')) {
            *end = 0;
            snprintf(folder, sizeof(folder), CGROUP "%s%s%s", word ? "/" : "", word ? word : "", path);
            visit(folder, version, found);
        }
    }
    if (file) fclose(file);
}

static size_t cgroup_bytes(const char *folder, const char *name, const char *key) {
    char path[1400];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return system_bytes(path, key);
}

static void visit_memory(const char *folder, int version, void *found) {
    size_t *left = (size_t *)found;
    const size_t most = cgroup_bytes(folder, version == 1 ? "memory.limit_in_bytes" : "memory.max", "");
    const size_t now = cgroup_bytes(folder, version == 1 ? "memory.usage_in_bytes" : "memory.current", "");
    const size_t droppable =
        cgroup_bytes(folder, "memory.stat", version == 1 ? "total_inactive_file" : "inactive_file");
    const size_t held = now - min_size(now, droppable);
    if (most) *left = min_size(*left, held < most ? most - held : 1); // never 0, which would mean unknown
}

// Returns the bytes that control groups still allow, counting file contents that the kernel can drop. SIZE_MAX without
// a limit.
static size_t cgroup_left(void) {
    size_t left = SIZE_MAX;
    cgroups_visit("memory", visit_memory, &left);
    return left;
}

static void visit_processors(const char *folder, int version, void *found) {
    double *processors = (double *)found, quota = 0, period = 0; // in microseconds; quota: "max" or -1 without a limit
    char path[1400];
    snprintf(path, sizeof(path), "%s/%s", folder, version == 1 ? "cpu.cfs_quota_us" : "cpu.max");
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (fscanf(file, "%lf %lf", &quota, &period) == 1) period = (double)cgroup_bytes(folder, "cpu.cfs_period_us", "");
    if (quota > 0 && period > 0) *processors = fmin(*processors, quota / period);
    fclose(file);
}

// Returns how many processors the CPU quotas of control groups amount to. INFINITY without a limit.
static double cgroup_processors(void) {
    double processors = INFINITY;
    cgroups_visit("cpu", visit_processors, &processors);
    return processors;
}

// Returns the bytes of address space that ulimit -v and -d still allow. SIZE_MAX without a limit.
static size_t address_space_left(void) {
    static const struct {
        int resource;
        const char *used;
    } limits[] = {{RLIMIT_AS, "VmSize"}, {RLIMIT_DATA, "VmData"}};
    size_t left = SIZE_MAX;
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        struct rlimit limit;
        if (getrlimit(limits[i].resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
        const size_t used = system_bytes("/proc/self/status", limits[i].used);
        left = min_size(left, used < limit.rlim_cur ? (size_t)limit.rlim_cur - used : 1);
    }
    return left;
}

// Returns the bytes that the machine and the container have left; 0: unknown. A virtual machine that grows on use
// reports the balloon as used memory, but gives the balloon back on demand.
#ifndef MEMINFO
#define MEMINFO "/proc/meminfo"
#endif
static size_t host_memory_left(void) {
    const size_t machine = system_bytes(MEMINFO, "MemAvailable") + system_bytes(MEMINFO, "Balloon");
    const size_t left = cgroup_left();
    return machine ? min_size(machine, left) : left == SIZE_MAX ? 0 : left;
}

// Returns this process's share of host_memory_left() among the node's ranks; 0: unknown.
static size_t host_memory_available(void) {
    const size_t left = host_memory_left();
    return left ? left / dist_local_ranks() + 1 : 0;
}

// Makes the whole pages of [memory, memory + bytes) resident. Returns 0 if fewer than bytes + `beside` bytes are left:
// using the memory would make the kernel kill a process.
static int host_memory_touch(char *memory, size_t bytes, size_t beside) {
    const size_t most = (size_t)1 << 30;
    for (size_t at = 0; at < bytes; at += most) {
        const size_t piece = min_size(most, bytes - at), left = host_memory_left();
        if (left && left < piece + beside) return 0;
#ifdef MADV_POPULATE_WRITE
        if (!madvise(memory + at, piece, MADV_POPULATE_WRITE)) continue;
        if (errno != EINVAL) return 0; // Linux before 5.14
#endif
        for (size_t page = 0; page < piece; page += 4096) memory[at + page] = 0;
    }
    return 1;
}

#endif
