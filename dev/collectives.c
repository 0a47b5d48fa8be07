/*
What the collectives between processes reach, through the driver's own table of ops: MPI's on the CPU, NCCL's on GPUs.

    make dev-collectives && mpirun -n P build/cpu-fp32/collectives [MOST_MIB [REPEATS]]

Each op is checked against plain loops at an odd count, then timed at 64 KiB, 512 KiB, ... up to MOST_MIB (256): the
median of REPEATS (7) batches of calls, of the slowest rank. GB/s as in llmc/verbs/doctor_ranks.h.
*/
#include "llmc/verbs/doctor_ranks.h"

#define LEAST ((size_t)64 << 10) // bytes
#define BATCH ((size_t)64 << 20) // bytes that the calls of one timing move together, at least

static void check(const Collectives *c) {
    const size_t count = 10007;
    double found;
    for (size_t which = 0; which < COLLECTIVES; which++) {
        const size_t bad = collective_check(c, which, count, 32, &found);
        if (bad < count) die("%s: element %zu is %g", collectives[which].name, bad, found);
    }
}

static void measure(const Collectives *c, size_t which, size_t repeats) {
    double *seconds = (double *)checked_calloc(repeats, sizeof(double), "timings");
    for (size_t bytes = LEAST; bytes <= c->most; bytes *= 8) {
        const size_t calls = max_size(1, BATCH / bytes);
        collective_seconds(c, which, bytes, calls);
        for (size_t i = 0; i < repeats; i++) seconds[i] = collective_seconds(c, which, bytes, calls);
        const double median_seconds = median(seconds, repeats);
        if (c->rank == 0)
            printf("%-16s %12zu %12.1f %10.3f\n", collectives[which].name, bytes, 1e6 * median_seconds,
                   collective_sent(c, which, bytes) / median_seconds * 1e-9);
    }
    free(seconds);
}

int main(int argc, char **argv) {
    size_t mib = 256, repeats = 7;
    dist_start();
    if (argc > 3 || (argc > 1 && (!parse_size(argv[1], &mib) || !mib)) ||
        (argc > 2 && (!parse_size(argv[2], &repeats) || !repeats)))
        die_usage("usage: mpirun -n P collectives [MOST_MIB [REPEATS]], both from 1");
    Collectives c = {ops_device, dist_ranks(), dist_rank(), dtype_size(ops_device->summed), NULL, mib << 20};
    if (c.ranks == 1) die_usage("one process has no peer; start it with mpirun -n P");
    dist_split(1);
    c.x = (char *)ops_device->allocate(2 * c.most);
    if (!c.x) die("no memory for %s; name fewer MiB", human_bytes(2.0 * (double)c.most));
    check(&c);
    if (c.rank == 0)
        printf("%zu ranks, op set %s\n%-16s %12s %12s %10s\n", c.ranks, ops_device->name, "op", "bytes", "us", "GB/s");
    for (size_t which = 0; which < COLLECTIVES; which++) measure(&c, which, repeats);
    ops_device->release(c.x, 2 * c.most);
    dist_stop();
    return 0;
}
