/*
Memory in three places: the device, host memory, a file on a disk (arena.h). Ops work on the device alone, so what lies
elsewhere comes to device memory before it is used, and goes back; both run beside other ops, until the ticket is
awaited. Bytes are counted by phase and way, in plans for all that a visit stands for.
*/
#ifndef LLMC_PLACES_H
#define LLMC_PLACES_H
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

typedef enum { PHASE_FORWARD, PHASE_BACKWARD, PHASE_UPDATE, PHASES } Phase;
typedef enum { WAY_HOST_OUT, WAY_HOST_IN, WAY_DISK_OUT, WAY_DISK_IN, WAYS } Way; // out: from the device

typedef struct {
    Phase phase; // at hand
    double bytes[PHASES][WAYS];
} Moved;

static void moved_count(Moved *m, Place place, int in, double bytes) {
    m->bytes[m->phase][(place == PLACE_DISK ? WAY_DISK_OUT : WAY_HOST_OUT) + in] += bytes;
}

// place[bytes] = device, place[bytes] being elsewhere; repeat: transfers that this one stands for
static int64_t place_store(const Ops *ops, Moved *m, Place place, void *to, const void *device, size_t bytes,
                           double repeat) {
    moved_count(m, place, 0, repeat * (double)bytes);
    return bytes ? ops->store(to, device, bytes) : 0;
}

// device[bytes] = what is elsewhere
static int64_t place_load(const Ops *ops, Moved *m, Place place, void *device, const void *from, size_t bytes,
                          double repeat) {
    moved_count(m, place, 1, repeat * (double)bytes);
    return bytes ? ops->load(device, from, bytes) : 0;
}

// The one of two tickets of a kind, in the order of asking, that is awaited for both
static int64_t last_ticket(int64_t first, int64_t second) { return second ? second : first; }

#endif
