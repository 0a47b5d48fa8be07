/*
Transfers of op set "cpu", whose device is the host: copies. A call only joins a queue, which is worked off, in its
order, when a ticket is awaited, or when it is full: as late as the contract allows, as in collective.h.
*/
#ifndef LLMC_CPU_TRANSFER_H
#define LLMC_CPU_TRANSFER_H
#include "memory.h"

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
