/*
Memory of op set "cpu": anonymous memory of this process. Pages become resident when first touched, so allocations may
be generous. Huge pages are requested: fewer TLB misses and far cheaper first touches.
*/
#ifndef LLMC_CPU_MEMORY_H
#define LLMC_CPU_MEMORY_H
#include <sys/mman.h>
#include "llmc/ops/arena.h"
#include "llmc/ops/disk.h"
#include "llmc/ranks/dist.h"

#define HUGE_PAGE ((size_t)2 << 20)

// Rounds bytes, at least one, up to whole pages: huge pages from HUGE_PAGE on.
static size_t allocation_size(size_t bytes) {
    size_t page = bytes < HUGE_PAGE ? (size_t)4096 : HUGE_PAGE;
    return bytes ? (bytes + page - 1) / page * page : page;
}

// Allocates memory. Large allocations start at a multiple of HUGE_PAGE: it maps more and unmaps both ends.
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
    madvise(memory + before, size, MADV_HUGEPAGE); // optional: only a little slower if it fails
#endif
    return memory + before;
}

static void memory_unmap(void *memory, size_t bytes) {
    if (memory) munmap(memory, allocation_size(bytes));
}

// ---- copies and clears ---------------------------------------------------------------------------------------------
// bytes of a thread's piece. All threads share large copies and clears: one core does not reach the memory's bandwidth.
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

// ---- transfers -----------------------------------------------------------------------------------------------------
// Transfers to and from the host have two queues. A queue is executed in order when a ticket is awaited or it is full:
// as late as the contract allows. disk.h has transfers to and from disk. Ticket 4 n + kind is transfer n of its kind.
enum { STORE_HOST, LOAD_HOST, STORE_DISK, LOAD_DISK, TRANSFER_KINDS, TRANSFERS = 16 };

typedef struct {
    struct {
        void *to;
        const void *from;
        size_t bytes;
    } waiting[TRANSFERS]; // transfer n, counted from 1, is waiting[(n - 1) % TRANSFERS]
    int64_t asked, done;
} TransferQueue;

static TransferQueue transfers[2];

static void transfers_work_off(TransferQueue *queue, int64_t n) {
    for (; queue->done < n; queue->done++) {
        const size_t i = (size_t)queue->done % TRANSFERS;
        cpu_copy(queue->waiting[i].to, queue->waiting[i].from, queue->waiting[i].bytes);
    }
}

static void cpu_await_transfer(int64_t ticket) {
    const int kind = (int)(ticket % TRANSFER_KINDS);
    if (kind >= STORE_DISK)
        disk_await(kind - STORE_DISK, ticket / TRANSFER_KINDS);
    else
        transfers_work_off(&transfers[kind], ticket / TRANSFER_KINDS);
}

static int64_t transfer(int kind, void *to, const void *from, size_t bytes) {
    TransferQueue *queue = &transfers[kind];
    const size_t i = (size_t)queue->asked % TRANSFERS;
    if (queue->asked - queue->done == TRANSFERS) transfers_work_off(queue, queue->done + 1);
    queue->waiting[i].to = to, queue->waiting[i].from = from, queue->waiting[i].bytes = bytes;
    return TRANSFER_KINDS * ++queue->asked + kind;
}

static int64_t cpu_store(void *place, const void *device, size_t bytes) {
    const DiskFile *file = disk_file_of(place);
    if (!file) return transfer(STORE_HOST, place, device, bytes);
    return TRANSFER_KINDS * disk_ask(DISK_WRITES, file, place, (void *)(uintptr_t)device, bytes, 0) + STORE_DISK;
}
static int64_t cpu_load(void *device, const void *place, size_t bytes) {
    const DiskFile *file = disk_file_of(place);
    if (!file) return transfer(LOAD_HOST, device, place, bytes);
    return TRANSFER_KINDS * disk_ask(DISK_READS, file, place, device, bytes, 0) + LOAD_DISK;
}

static int cpu_reaches(const void *place, size_t bytes) { return (void)bytes, !disk_file_of(place); }

// Cancels pending transfers of memory that is released.
static void transfers_forget(const void *memory, size_t bytes) {
    disk_forget(memory, bytes, NULL);
    for (TransferQueue *queue = transfers; queue < transfers + 2; queue++)
        for (int64_t n = queue->done; n < queue->asked; n++) {
            const size_t i = (size_t)n % TRANSFERS;
            if ((uintptr_t)queue->waiting[i].to - (uintptr_t)memory < bytes ||
                (uintptr_t)queue->waiting[i].from - (uintptr_t)memory < bytes)
                queue->waiting[i].bytes = 0;
        }
}

static void cpu_release(void *memory, size_t bytes) {
    transfers_forget(memory, bytes);
    memory_unmap(memory, bytes);
}

// Allocates host memory, which on a CPU is device memory. Makes the pages resident now: another process might take the
// memory before it is used.
static void *cpu_host_allocate(size_t bytes) {
    char *memory = (char *)cpu_allocate(bytes);
    if (memory && host_memory_touch(memory, allocation_size(bytes), 0)) return memory;
    memory_unmap(memory, bytes);
    return NULL;
}
static void cpu_host_release(void *memory, size_t bytes) { cpu_release(memory, bytes); }

static const DiskDevice cpu_disk = {.allocate = cpu_allocate, .release = memory_unmap, .at_work = watch_at_work};

static void *cpu_disk_allocate(const char *folder, size_t bytes) {
    return disk_file_allocate(&cpu_disk, folder, bytes);
}
static void cpu_disk_release(void *memory, size_t bytes) { (void)bytes, disk_file_release(memory); }
static size_t cpu_disk_available(const char *folder) { return disk_bytes_left(folder, dist_local_ranks()); }

static void cpu_copy_in(void *place, const void *host, size_t bytes) {
    watch_at_work();
    if (!disk_copy_in(place, host, bytes)) cpu_copy(place, host, bytes);
}
static void cpu_copy_out(void *host, const void *place, size_t bytes) {
    watch_at_work();
    if (!disk_copy_out(host, place, bytes)) cpu_copy(host, place, bytes);
}

#endif
