/*
Memory of op set "cpu": anonymous memory of this process. Pages become resident when they are first touched, so an
allocation may be planned generously. Huge pages are asked for: fewer TLB misses and far cheaper first touches.
*/
#ifndef LLMC_CPU_MEMORY_H
#define LLMC_CPU_MEMORY_H
#include <sys/mman.h>
#include "llmc/ops/arena.h"

#define HUGE_PAGE ((size_t)2 << 20)

// bytes, at least one, rounded up to whole pages (huge ones where the allocation has any).
static size_t allocation_size(size_t bytes) {
    size_t page = bytes < HUGE_PAGE ? (size_t)4096 : HUGE_PAGE;
    return bytes ? (bytes + page - 1) / page * page : page;
}

// Large allocations start at a multiple of HUGE_PAGE: more is mapped, and what lies before and behind goes back.
static void *cpu_allocate(size_t bytes) {
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE) return NULL; // size + slack would wrap around
    size_t size = allocation_size(bytes), slack = size < HUGE_PAGE ? 0 : HUGE_PAGE;
    char *memory = (char *)mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (!slack) return memory;
    size_t before = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
    size_t behind = slack - before;
    if (before) munmap(memory, before);
    if (behind) munmap(memory + before + size, behind);
#ifdef MADV_HUGEPAGE
    madvise(memory + before, size, MADV_HUGEPAGE); // a wish: without it everything works, a little slower
#endif
    return memory + before;
}

static void cpu_release(void *memory, size_t bytes) {
    if (memory) munmap(memory, allocation_size(bytes));
}

// ---- copies and clears ----------------------------------------------------------------------------------------------
// Large copies and clears are shared by all threads: one core alone does not reach the memory's bandwidth.
#define COPY_PIECE ((size_t)1 << 20)

static void cpu_copy(void *out, const void *in, size_t bytes) {
    size_t pieces = (bytes + COPY_PIECE - 1) / COPY_PIECE;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (size_t i = 0; i < pieces; i++)
        memcpy((char *)out + i * COPY_PIECE, (const char *)in + i * COPY_PIECE,
               min_size(COPY_PIECE, bytes - i * COPY_PIECE));
}

static void cpu_zero(void *out, size_t bytes) {
    size_t pieces = (bytes + COPY_PIECE - 1) / COPY_PIECE;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (size_t i = 0; i < pieces; i++)
        memset((char *)out + i * COPY_PIECE, 0, min_size(COPY_PIECE, bytes - i * COPY_PIECE));
}

// ---- transfers: a queue, worked off in its order when a ticket is awaited or it is full: as late as may be ----------
enum { TRANSFERS = 16 };

static struct {
    struct {
        void *to;
        const void *from;
        size_t bytes;
    } waiting[TRANSFERS]; // of ticket t: waiting[(t - 1) % TRANSFERS]
    int64_t asked, done;
} transfers;

static void cpu_await_transfer(int64_t ticket) {
    for (; transfers.done < ticket; transfers.done++) {
        const size_t i = (size_t)transfers.done % TRANSFERS;
        cpu_copy(transfers.waiting[i].to, transfers.waiting[i].from, transfers.waiting[i].bytes);
    }
}

static int64_t transfer(void *to, const void *from, size_t bytes) {
    const size_t i = (size_t)transfers.asked % TRANSFERS;
    if (transfers.asked - transfers.done == TRANSFERS) cpu_await_transfer(transfers.done + 1);
    transfers.waiting[i].to = to, transfers.waiting[i].from = from, transfers.waiting[i].bytes = bytes;
    return ++transfers.asked;
}

static int64_t cpu_store(void *host, const void *device, size_t bytes) { return transfer(host, device, bytes); }
static int64_t cpu_load(void *device, const void *host, size_t bytes) { return transfer(device, host, bytes); }

// The device's memory is the host's.
static void *cpu_host_allocate(size_t bytes) { return cpu_allocate(bytes); }
static void cpu_host_release(void *memory, size_t bytes) { cpu_release(memory, bytes); }
static size_t cpu_host_available(size_t planned) {
    const size_t available = host_memory_available();
    return available > planned ? available - planned : available ? 1 : 0;
}

#endif
