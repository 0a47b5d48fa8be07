/*
The collectives of op set "cpu", over MPI. A call only joins a queue; the queue is worked off, in its order, when a ticket
is awaited. That is as late as the contract allows, so what reads or overwrites a tensor too early is wrong here, too, and
not on a GPU alone.
*/
#ifndef LLMC_CPU_COLLECTIVE_H
#define LLMC_CPU_COLLECTIVE_H
#include "../dist_mpi.h"
#include "precision.h"

typedef enum { REDUCE_SCATTER, ALL_GATHER, EXCHANGE } CollectiveKind;
enum { COLLECTIVES = 16, PARCELS = 64 };

typedef struct {
    CollectiveKind kind;
    RankGroup group;
    char *x;
    size_t count, unit, size, parcels;
    Parcel parcel[PARCELS];
} Collective;

static Collective queue[COLLECTIVES];
static int64_t asked, done; // queue[i % COLLECTIVES] of done <= i < asked wait

#ifdef HAVE_MPI
static void run_reduce_scatter(const Collective *c) {
    const World world = job_world();
    const size_t ranks = ranks_in(world, c->group), rank = rank_in(world, c->group);
    size_t r;
    for (r = 0; r < ranks; r++) {
        Portion p = share_of(c->count, c->unit, ranks, r);
        char *x = c->x + p.begin * sizeof(floatS);
        MPI_Reduce(r == rank ? MPI_IN_PLACE : x, x, (int)p.count, sizeof(floatS) == 8 ? MPI_DOUBLE : MPI_FLOAT, MPI_SUM,
                   (int)r, job.group[c->group]);
    }
}

static void run_all_gather(const Collective *c) {
    const World world = job_world();
    const size_t ranks = ranks_in(world, c->group);
    size_t r;
    for (r = 0; r < ranks; r++) {
        Portion p = share_of(c->count, c->unit, ranks, r);
        MPI_Bcast(c->x + p.begin * c->size, (int)(p.count * c->size), MPI_BYTE, (int)r, job.group[c->group]);
    }
}

static void run_exchange(const Collective *c) {
    MPI_Request request[2 * PARCELS];
    int n = 0;
    size_t i;
    for (i = 0; i < c->parcels; i++) {
        const Parcel *p = &c->parcel[i];
        if (p->in_bytes)
            MPI_Irecv(p->in, (int)p->in_bytes, MPI_BYTE, (int)p->peer, 1, job.group[c->group], &request[n++]);
        if (p->out_bytes)
            MPI_Isend(p->out, (int)p->out_bytes, MPI_BYTE, (int)p->peer, 1, job.group[c->group], &request[n++]);
    }
    MPI_Waitall(n, request, MPI_STATUSES_IGNORE);
}

static void await(int64_t ticket) {
    static void (*const run[])(const Collective *) = {run_reduce_scatter, run_all_gather, run_exchange};
    for (; done < ticket; done++) run[queue[done % COLLECTIVES].kind](&queue[done % COLLECTIVES]);
}

#else
static void await(int64_t ticket) { done = ticket; } // nobody is there
#endif

static Collective *enqueue(CollectiveKind kind, RankGroup group) {
    Collective *c;
    if (asked - done == COLLECTIVES) await(done + 1);
    c = &queue[asked++ % COLLECTIVES];
    c->kind = kind, c->group = group;
    return c;
}

static int64_t reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    Collective *c = enqueue(REDUCE_SCATTER, group);
    c->x = (char *)x, c->count = count, c->unit = unit, c->size = sizeof(floatS);
    return asked;
}

static int64_t all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    Collective *c = enqueue(ALL_GATHER, group);
    c->x = (char *)x, c->count = count, c->unit = unit, c->size = size;
    return asked;
}

static int64_t exchange(RankGroup group, const Parcel *parcels, size_t n) {
    Collective *c = enqueue(EXCHANGE, group);
    if (n > PARCELS) die("internal: an exchange of %zu parcels, at most %d", n, PARCELS);
    memcpy(c->parcel, parcels, n * sizeof(*parcels));
    c->parcels = n;
    return asked;
}

#endif
