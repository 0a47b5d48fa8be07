/*
The collectives of op set "cpu", over MPI. A call joins a queue; awaiting a ticket executes the queue up to it, in
order. This is as late as the contract allows, so reading or overwriting a tensor too early shows on the CPU, too.
*/
#ifndef LLMC_CPU_COLLECTIVE_H
#define LLMC_CPU_COLLECTIVE_H
#include "llmc/ranks/dist.h"
#include "precision.h"

typedef enum { REDUCE_SCATTER, ALL_GATHER, EXCHANGE } CollectiveKind;
enum { COLLECTIVES = 16, MESSAGES = 64 };

typedef struct {
    CollectiveKind kind;
    RankGroup group;
    size_t sp; // ranks that shared a sequence when the call was queued
    char *x;
    size_t count, unit, size; // elements, or messages; unit: parts are multiples of it; size: bytes of an element
    Message message[MESSAGES];
} Collective;

static Collective queue[COLLECTIVES];
static int64_t asked, done; // queue[i % COLLECTIVES] with done <= i < asked is waiting

// Returns a piece of a part. All three collectives send directly from rank to rank, in pieces: MPI needs no memory of
// the tensor's size, and nothing is sent twice. Each rank begins with its neighbour, so that not all ranks send to the
// same rank first.
static Range piece_of(Range p, size_t begin, size_t most) {
    const Range piece = {p.begin + min_size(begin, p.count), min_size(most, p.count - min_size(begin, p.count))};
    return piece;
}

// Adds to x[count], in rank order, the terms of all ranks. Terms of another rank r begin at staging[r * stride].
static void add_terms(floatS *x, size_t count, size_t stride, size_t ranks, size_t rank) {
    enum { BLOCK = 1024 };
    const floatS *staging = (const floatS *)(const void *)dist_staging();
#pragma omp parallel for schedule(static)
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        const size_t n = min_size(BLOCK, count - begin);
        floatS sum[BLOCK] = {0};
        for (size_t r = 0; r < ranks; r++) {
            const floatS *term = r == rank ? x + begin : staging + r * stride + begin;
            for (size_t i = 0; i < n; i++) sum[i] += term[i];
        }
        memcpy(x + begin, sum, n * sizeof(*sum));
    }
}

// Runs a reduce-scatter (sends pieces of the other ranks' parts, to be added there) or an all-gather (sends this rank's
// part).
static void run_parts(const Collective *c) {
    const size_t ranks = ranks_in(dist_world(), c->group), rank = rank_in(dist_world(), c->group), size = c->size;
    const int reduces = c->kind == REDUCE_SCATTER;
    const size_t most = max_size(STAGING_BYTES / size / (reduces ? ranks : 1), 1);
    const Range own = shard_range(c->count, c->unit, ranks, rank);
    for (size_t begin = 0; begin < shard_range_max(c->count, c->unit, ranks); begin += most) {
        const Range mine = piece_of(own, begin, most);
        for (size_t i = 1; i < ranks; i++) {
            const size_t to = (rank + i) % ranks, from = (rank + ranks - i) % ranks;
            const Range theirs = piece_of(shard_range(c->count, c->unit, ranks, reduces ? to : from), begin, most);
            const Range out = reduces ? theirs : mine, in = reduces ? mine : theirs;
            char *place = reduces ? dist_staging() + from * most * size : c->x + in.begin * size;
            dist_receive(c->group, place, in.count * size, from);
            dist_send(c->group, c->x + out.begin * size, out.count * size, to);
        }
        dist_wait(reduces ? "a reduce-scatter" : "an all-gather");
        if (reduces) add_terms((floatS *)(void *)c->x + mine.begin, mine.count, most, ranks, rank);
    }
}

static void run_exchange(const Collective *c) {
    size_t longest = 0;
    for (size_t i = 0; i < c->count; i++)
        longest = max_size(longest, max_size(c->message[i].in_bytes, c->message[i].out_bytes));
    for (size_t begin = 0; begin < longest; begin += STAGING_BYTES) {
        for (size_t i = 0; i < c->count; i++) {
            const Message *p = &c->message[i];
            const Range in = {0, p->in_bytes}, out = {0, p->out_bytes};
            dist_receive(c->group, (char *)p->in + begin, piece_of(in, begin, STAGING_BYTES).count, p->peer);
            dist_send(c->group, (char *)p->out + begin, piece_of(out, begin, STAGING_BYTES).count, p->peer);
        }
        dist_wait("an exchange");
    }
}

static void cpu_await(int64_t ticket) {
    static void (*const run[])(const Collective *) = {run_parts, run_parts, run_exchange};
    const size_t chosen = dist_world().sp;
    for (; done < ticket; done++) {
        const Collective *c = &queue[done % COLLECTIVES];
        dist_split(c->sp);
        run[c->kind](c);
    }
    dist_split(chosen);
}

static int64_t enqueue(CollectiveKind kind, RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    if (asked - done == COLLECTIVES) cpu_await(done + 1);
    Collective *c = &queue[asked % COLLECTIVES];
    c->kind = kind, c->group = group, c->sp = dist_world().sp;
    c->x = (char *)x, c->count = count, c->unit = unit, c->size = size;
    return ++asked;
}

static int64_t cpu_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    return enqueue(REDUCE_SCATTER, group, x, count, unit, sizeof(floatS));
}

static int64_t cpu_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    return enqueue(ALL_GATHER, group, x, count, unit, size);
}

static int64_t cpu_exchange(RankGroup group, const Message *messages, size_t n) {
    const int64_t ticket = enqueue(EXCHANGE, group, NULL, n, 1, 1);
    if (n > MESSAGES) die("internal: an exchange of %zu messages, at most %d; please report it", n, MESSAGES);
    memcpy(queue[(ticket - 1) % COLLECTIVES].message, messages, n * sizeof(*messages));
    return ticket;
}

#endif
