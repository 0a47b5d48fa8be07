/*
Transfers of op set "cpu", whose device is the host: copies. A call only joins a queue, which is worked off, in its order,
when a ticket is awaited, or when it is full: as late as the contract allows, as in collective.h.
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

static void await_transfer(int64_t ticket) {
    for (; transfers.done < ticket; transfers.done++) {
        const size_t i = (size_t)transfers.done % TRANSFERS;
        memory_copy(transfers.waiting[i].to, transfers.waiting[i].from, transfers.waiting[i].bytes);
    }
}

static int64_t transfer(void *to, const void *from, size_t bytes) {
    const size_t i = (size_t)transfers.asked % TRANSFERS;
    if (transfers.asked - transfers.done == TRANSFERS) await_transfer(transfers.done + 1);
    transfers.waiting[i].to = to, transfers.waiting[i].from = from, transfers.waiting[i].bytes = bytes;
    return ++transfers.asked;
}

// The device's memory is the host's.
static size_t host_available(size_t planned) {
    const size_t available = host_memory_available();
    return available > planned ? available - planned : available ? 1 : 0;
}

#endif
