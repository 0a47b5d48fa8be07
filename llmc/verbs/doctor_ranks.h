/*
The collectives between processes, for the verb `doctor` and dev/collectives.c: each is compared with plain loops, and
timed. GB/s counts the bytes that a rank sends, n (P - 1) / P of n: nccl-tests call this the bus bandwidth. `exchange`
sends all n bytes to the next rank, and receives as many from the previous rank.
*/
#ifndef LLMC_DOCTOR_RANKS_H
#define LLMC_DOCTOR_RANKS_H
#include "llmc/ops/ops.h"
#include "llmc/ranks/dist.h"
#include "llmc/train/all_reduce.h"

typedef struct {
    const Ops *ops;
    size_t ranks, rank, size; // size: bytes of an element of a sum
    char *x;                  // device [2 * most bytes]; exchange receives in the second half
    size_t most;
} Collectives;

static int64_t run_reduce_scatter(const Collectives *c, size_t bytes, size_t unit) {
    return c->ops->reduce_scatter(RANKS_ALL, (Summed *)(void *)c->x, bytes / c->size, unit);
}

static int64_t run_all_gather(const Collectives *c, size_t bytes, size_t unit) {
    return c->ops->all_gather(RANKS_ALL, c->x, bytes / c->size, unit, c->size);
}

static size_t rank_before(const Collectives *c) { return (c->rank + c->ranks - 1) % c->ranks; }

static int64_t run_exchange(const Collectives *c, size_t bytes, size_t unit) {
    Message messages[2];
    (void)unit;
    memset(messages, 0, sizeof(messages));
    messages[0].peer = (c->rank + 1) % c->ranks, messages[0].out = c->x, messages[0].out_bytes = bytes;
    messages[1].peer = rank_before(c), messages[1].in = c->x + c->most, messages[1].in_bytes = bytes;
    return c->ops->exchange(RANKS_ALL, messages, 2);
}

// ---- checks ---------------------------------------------------------------------------------------------------------
// Returns rank r's element i before the collective: small whole numbers, so that every order of a sum is exact.
static double rank_element(size_t r, size_t i) { return (double)((r + 1) * (i % 97 + 1)); }

// expected_... return the value that this rank must find in element i; NAN: any value
static double expected_sum(const Collectives *c, size_t i, size_t owner) {
    const size_t sum = c->ranks * (c->ranks + 1) / 2;
    return owner == c->rank ? (double)sum * rank_element(0, i) : NAN;
}
static double expected_part(const Collectives *c, size_t i, size_t owner) {
    (void)c;
    return rank_element(owner, i);
}
static double expected_message(const Collectives *c, size_t i, size_t owner) {
    (void)owner;
    return rank_element(rank_before(c), i);
}

static const struct {
    const char *name;
    int64_t (*run)(const Collectives *c, size_t bytes, size_t unit);
    double (*expected)(const Collectives *c, size_t i, size_t owner);
    int to_next; // 1: sends everything to the next rank, and receives in the second half
} collectives[] = {{"reduce_scatter", run_reduce_scatter, expected_sum, 0},
                   {"all_gather", run_all_gather, expected_part, 0},
                   {"exchange", run_exchange, expected_message, 1}};
#define COLLECTIVES (sizeof(collectives) / sizeof(collectives[0]))

// Returns the first element of collective `which` that is wrong; count: none is. *found: its value
static size_t collective_check(const Collectives *c, size_t which, size_t count, size_t unit, double *found) {
    const DType type = c->size == 8 ? DTYPE_FP64 : DTYPE_FP32;
    const size_t each = shard_range(count, unit, c->ranks, 0).count;
    char *host = (char *)checked_malloc(count * c->size, "values to be checked");
    size_t i;
    for (i = 0; i < count; i++) {
        const float value = (float)rank_element(c->rank, i);
        elements_from_float(host + i * c->size, type, &value, 1);
    }
    c->ops->copy_in(c->x, host, count * c->size);
    c->ops->await(collectives[which].run(c, count * c->size, unit));
    c->ops->copy_out(host, c->x + (collectives[which].to_next ? c->most : 0), count * c->size);
    for (i = 0; i < count; i++) {
        const size_t owner = each ? min_size(i / each, c->ranks - 1) : c->ranks - 1;
        const double expected = collectives[which].expected(c, i, owner);
        *found = element_to_double(host, type, i);
        if (!isnan(expected) && *found != expected) break;
    }
    free(host);
    return i;
}

// ---- time -----------------------------------------------------------------------------------------------------------
// Returns the seconds of one of `calls` calls on the slowest rank. The elements are zeros, whose sums stay zeros.
static double collective_seconds(const Collectives *c, size_t which, size_t bytes, size_t calls) {
    const World world = {c->ranks, c->rank, 0, 1};
    int64_t ticket = 0;
    c->ops->zero(c->x, 2 * c->most);
    c->ops->finish();
    dist_barrier();
    double own = seconds_now();
    for (size_t i = 0; i < calls; i++) ticket = collectives[which].run(c, bytes, SHARD_ALIGNMENT);
    c->ops->await(ticket);
    c->ops->finish();
    own = (seconds_now() - own) / (double)calls;
    return max_over_ranks(world, own);
}

// Returns the bytes that a rank sends.
static double collective_sent(const Collectives *c, size_t which, size_t bytes) {
    return collectives[which].to_next ? (double)bytes : (double)bytes * (double)(c->ranks - 1) / (double)c->ranks;
}

#endif
