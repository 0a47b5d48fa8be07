/*
What the collectives between processes reach, through the driver's own table of ops: MPI's on the CPU, NCCL's on GPUs.

    make dev-collectives && mpirun -n P build/cpu-fp32/collectives [MOST_MIB [REPEATS]]

Each op is checked against plain loops at an odd count, then timed at 64 KiB, 512 KiB, ... up to MOST_MIB (256): the
median of REPEATS (7) batches of calls, of the slowest rank. GB/s counts the bytes that a rank sends, n (P - 1) / P of
n: what nccl-tests call the bus bandwidth. `exchange` sends all n to the next rank, and receives as many from the one
before.
*/
#include "llmc/ranks/dist.h"
#include "llmc/ops/ops.h"

#define LEAST ((size_t)64 << 10) // bytes
#define BATCH ((size_t)64 << 20) // bytes that the calls of one timing move together, at least

typedef struct {
    size_t ranks, rank, size; // size: bytes of a sum
    char *x;                  // device [2 * most bytes]; exchange receives in its second half
    size_t most;
} Bench;

typedef int64_t (*Run)(Bench *b, size_t bytes, size_t unit);

static int64_t run_reduce_scatter(Bench *b, size_t bytes, size_t unit) {
    return ops_device->reduce_scatter(RANKS_ALL, (Summed *)(void *)b->x, bytes / b->size, unit);
}

static int64_t run_all_gather(Bench *b, size_t bytes, size_t unit) {
    return ops_device->all_gather(RANKS_ALL, b->x, bytes / b->size, unit, b->size);
}

static int64_t run_exchange(Bench *b, size_t bytes, size_t unit) {
    const size_t next = (b->rank + 1) % b->ranks, before = (b->rank + b->ranks - 1) % b->ranks;
    Message messages[2];
    (void)unit;
    memset(messages, 0, sizeof(messages));
    messages[0].peer = next, messages[0].out = b->x, messages[0].out_bytes = bytes;
    messages[1].peer = before, messages[1].in = b->x + b->most, messages[1].in_bytes = bytes;
    return ops_device->exchange(RANKS_ALL, messages, 2);
}

// ---- checks ---------------------------------------------------------------------------------------------------------
// Rank r's element i before; small whole numbers, so that every order of a sum is exact.
static double given(size_t r, size_t i) { return (double)((r + 1) * (i % 97 + 1)); }

static double value_at(const Bench *b, const char *host, size_t i) {
    return b->size == 8 ? ((const double *)(const void *)host)[i] : (double)((const float *)(const void *)host)[i];
}

static void fill(const Bench *b, char *host, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (b->size == 8)
            ((double *)(void *)host)[i] = given(b->rank, i);
        else
            ((float *)(void *)host)[i] = (float)given(b->rank, i);
    }
    ops_device->copy_in(b->x, host, count * b->size);
}

// The portion's owner of element i.
static size_t owner_of(const Bench *b, size_t i, size_t count, size_t unit) {
    const size_t each = shard_range(count, unit, b->ranks, 0).count;
    return each ? min_size(i / each, b->ranks - 1) : b->ranks - 1;
}

static void check(Bench *b) {
    const size_t count = 10007, unit = 32;
    const double all = (double)(b->ranks * (b->ranks + 1) / 2);
    const Range own = shard_range(count, unit, b->ranks, b->rank);
    char *host = (char *)checked_malloc(count * b->size, "values to be checked");
    fill(b, host, count);
    ops_device->await(run_reduce_scatter(b, count * b->size, unit));
    ops_device->copy_out(host, b->x, count * b->size);
    for (size_t i = own.begin; i < own.begin + own.count; i++)
        if (value_at(b, host, i) != all * given(0, i))
            die("reduce_scatter: element %zu is %g, it should be %g", i, value_at(b, host, i), all * given(0, i));
    fill(b, host, count);
    ops_device->await(run_all_gather(b, count * b->size, unit));
    ops_device->copy_out(host, b->x, count * b->size);
    for (size_t i = 0; i < count; i++)
        if (value_at(b, host, i) != given(owner_of(b, i, count, unit), i))
            die("all_gather: element %zu is %g, it should be rank %zu's %g", i, value_at(b, host, i),
                owner_of(b, i, count, unit), given(owner_of(b, i, count, unit), i));
    fill(b, host, count);
    ops_device->await(run_exchange(b, count * b->size, unit));
    ops_device->copy_out(host, b->x + b->most, count * b->size);
    for (size_t i = 0; i < count; i++)
        if (value_at(b, host, i) != given((b->rank + b->ranks - 1) % b->ranks, i))
            die("exchange: element %zu is %g, not that of the rank before", i, value_at(b, host, i));
    free(host);
}

// ---- timing ---------------------------------------------------------------------------------------------------------
static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Seconds of one call on the slowest rank.
static double seconds_of(Bench *b, Run run, size_t bytes) {
    const size_t calls = max_size(1, BATCH / bytes);
    double slowest = 0, *all = (double *)checked_calloc(b->ranks, sizeof(double), "the ranks' times");
    int64_t ticket = 0;
    ops_device->finish();
    dist_barrier();
    double own = seconds_now();
    for (size_t i = 0; i < calls; i++) ticket = run(b, bytes, SHARD_ALIGNMENT);
    ops_device->await(ticket);
    ops_device->finish();
    own = (seconds_now() - own) / (double)calls;
    dist_gather(RANKS_ALL, &own, sizeof(own), all);
    for (size_t i = 0; i < b->ranks; i++) slowest = all[i] > slowest ? all[i] : slowest;
    free(all);
    return slowest;
}

static void measure(Bench *b, const char *name, Run run, int to_next, size_t repeats) {
    double *seconds = (double *)checked_calloc(repeats, sizeof(double), "timings");
    for (size_t bytes = LEAST; bytes <= b->most; bytes *= 8) {
        const double sent = to_next ? (double)bytes : (double)bytes * (double)(b->ranks - 1) / (double)b->ranks;
        ops_device->zero(b->x, 2 * b->most); // sums of zeros stay zeros
        seconds_of(b, run, bytes);
        for (size_t i = 0; i < repeats; i++) seconds[i] = seconds_of(b, run, bytes);
        qsort(seconds, repeats, sizeof(double), compare);
        if (b->rank == 0)
            printf("%-16s %12zu %12.1f %10.3f\n", name, bytes, 1e6 * seconds[repeats / 2],
                   sent / seconds[repeats / 2] * 1e-9);
    }
    free(seconds);
}

int main(int argc, char **argv) {
    Bench b;
    size_t mib = 256, repeats = 7;
    dist_start();
    if (argc > 3 || (argc > 1 && (!parse_size(argv[1], &mib) || !mib)) ||
        (argc > 2 && (!parse_size(argv[2], &repeats) || !repeats)))
        die_usage("usage: mpirun -n P collectives [MOST_MIB [REPEATS]], both from 1");
    b.ranks = dist_ranks(), b.rank = dist_rank();
    if (b.ranks == 1) die_usage("one process has nobody to send to; start it with mpirun -n P");
    dist_split(1);
    b.size = dtype_size(ops_device->summed), b.most = mib << 20;
    b.x = (char *)ops_device->allocate(2 * b.most);
    if (!b.x) die("no memory for %s; name fewer MiB", human_bytes(2.0 * (double)b.most));
    check(&b);
    if (b.rank == 0)
        printf("%zu ranks, op set %s\n%-16s %12s %12s %10s\n", b.ranks, ops_device->name, "op", "bytes", "us", "GB/s");
    measure(&b, "reduce_scatter", run_reduce_scatter, 0, repeats);
    measure(&b, "all_gather", run_all_gather, 0, repeats);
    measure(&b, "exchange", run_exchange, 1, repeats);
    ops_device->release(b.x, 2 * b.most);
    dist_stop();
    return 0;
}
