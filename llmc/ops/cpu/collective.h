/*
The collectives of op set "cpu", over MPI. A call only joins a queue; the queue is worked off, in its order, when a
ticket is awaited. That is as late as the contract allows, so what reads or overwrites a tensor too early is wrong
here, too, and not on a GPU alone.
*/
#ifndef LLMC_CPU_COLLECTIVE_H
#define LLMC_CPU_COLLECTIVE_H
#include "llmc/ranks/dist_mpi.h"
#include "precision.h"

typedef enum { REDUCE_SCATTER, ALL_GATHER, EXCHANGE } CollectiveKind;
enum { COLLECTIVES = 16, MESSAGES = 64 };

typedef struct {
    CollectiveKind kind;
    RankGroup group;
    char *x;
    size_t count, unit, size, messages;
    Message message[MESSAGES];
} Collective;

static Collective queue[COLLECTIVES];
static int64_t asked, done; // queue[i % COLLECTIVES] of done <= i < asked wait

#ifdef HAVE_MPI
// All three go directly from rank to rank, in pieces, so that MPI needs no memory of the tensor's size, and each rank
// sends what has to be sent and no more. Ranks begin with their neighbour: nobody is everybody's first.
static Range piece_of(Range p, size_t begin, size_t most) {
    Range piece;
    piece.begin = p.begin + min_size(begin, p.count);
    piece.count = min_size(most, p.count - min_size(begin, p.count));
    return piece;
}

static int send_piece(int n, const Collective *c, const void *data, size_t bytes, size_t to) {
    if (!bytes) return n;
    MPI_Isend(data, (int)bytes, MPI_BYTE, (int)to, 0, job.group[c->group], &job.request[n]);
    return n + 1;
}

static int receive_piece(int n, const Collective *c, void *data, size_t bytes, size_t from) {
    if (!bytes) return n;
    MPI_Irecv(data, (int)bytes, MPI_BYTE, (int)from, 0, job.group[c->group], &job.request[n]);
    return n + 1;
}

// x[count] = the sums over ranks, added in their order; of the others' terms, rank r's are from staging[r * stride] on.
static void add_terms(floatS *x, size_t count, size_t stride, size_t ranks, size_t rank) {
    enum { BLOCK = 1024 };
    const floatS *staging = (const floatS *)(const void *)job.staging;
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

static void run_reduce_scatter(const Collective *c) {
    const size_t ranks = ranks_in(job_world(), c->group), rank = rank_in(job_world(), c->group);
    const size_t most = STAGING_BYTES / ranks / sizeof(floatS), longest = shard_range_max(c->count, c->unit, ranks);
    const Range own = shard_range(c->count, c->unit, ranks, rank);
    floatS *x = (floatS *)(void *)c->x, *staging = (floatS *)(void *)job.staging;
    for (size_t begin = 0; begin < longest; begin += most) {
        const Range mine = piece_of(own, begin, most);
        int n = 0;
        for (size_t i = 1; i < ranks; i++) {
            const size_t to = (rank + i) % ranks, from = (rank + ranks - i) % ranks;
            const Range theirs = piece_of(shard_range(c->count, c->unit, ranks, to), begin, most);
            n = receive_piece(n, c, staging + from * most, mine.count * sizeof(floatS), from);
            n = send_piece(n, c, x + theirs.begin, theirs.count * sizeof(floatS), to);
        }
        wait_all(job.request, n, "a reduce-scatter");
        add_terms(x + mine.begin, mine.count, most, ranks, rank);
    }
}

static void run_all_gather(const Collective *c) {
    const size_t ranks = ranks_in(job_world(), c->group), rank = rank_in(job_world(), c->group), size = c->size;
    const size_t most = max_size(STAGING_BYTES / size, 1), longest = shard_range_max(c->count, c->unit, ranks);
    const Range own = shard_range(c->count, c->unit, ranks, rank);
    for (size_t begin = 0; begin < longest; begin += most) {
        const Range mine = piece_of(own, begin, most);
        int n = 0;
        for (size_t i = 1; i < ranks; i++) {
            const size_t to = (rank + i) % ranks, from = (rank + ranks - i) % ranks;
            const Range theirs = piece_of(shard_range(c->count, c->unit, ranks, from), begin, most);
            n = receive_piece(n, c, c->x + theirs.begin * size, theirs.count * size, from);
            n = send_piece(n, c, c->x + mine.begin * size, mine.count * size, to);
        }
        wait_all(job.request, n, "an all-gather");
    }
}

static void run_exchange(const Collective *c) {
    size_t longest = 0;
    for (size_t i = 0; i < c->messages; i++)
        longest = max_size(longest, max_size(c->message[i].in_bytes, c->message[i].out_bytes));
    for (size_t begin = 0; begin < longest; begin += STAGING_BYTES) {
        int n = 0;
        for (size_t i = 0; i < c->messages; i++) {
            const Message *p = &c->message[i];
            const Range in = {0, p->in_bytes}, out = {0, p->out_bytes};
            n = receive_piece(n, c, (char *)p->in + begin, piece_of(in, begin, STAGING_BYTES).count, p->peer);
            n = send_piece(n, c, (const char *)p->out + begin, piece_of(out, begin, STAGING_BYTES).count, p->peer);
        }
        wait_all(job.request, n, "an exchange");
    }
}

static void cpu_await(int64_t ticket) {
    static void (*const run[])(const Collective *) = {run_reduce_scatter, run_all_gather, run_exchange};
    for (; done < ticket; done++) run[queue[done % COLLECTIVES].kind](&queue[done % COLLECTIVES]);
}

#else
static void cpu_await(int64_t ticket) { done = ticket; } // nobody is there
#endif

static Collective *enqueue(CollectiveKind kind, RankGroup group) {
    if (asked - done == COLLECTIVES) cpu_await(done + 1);
    Collective *c = &queue[asked++ % COLLECTIVES];
    c->kind = kind, c->group = group;
    return c;
}

static int64_t cpu_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    Collective *c = enqueue(REDUCE_SCATTER, group);
    c->x = (char *)x, c->count = count, c->unit = unit, c->size = sizeof(floatS);
    return asked;
}

static int64_t cpu_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    Collective *c = enqueue(ALL_GATHER, group);
    c->x = (char *)x, c->count = count, c->unit = unit, c->size = size;
    return asked;
}

static int64_t cpu_exchange(RankGroup group, const Message *messages, size_t n) {
    Collective *c = enqueue(EXCHANGE, group);
    if (n > MESSAGES) die("internal: an exchange of %zu messages, at most %d", n, MESSAGES);
    memcpy(c->message, messages, n * sizeof(*messages));
    c->messages = n;
    return asked;
}

#endif
