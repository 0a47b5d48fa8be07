/*
What this machine gives a run: OpenMP threads, and the peak rate of its matrix product, measured.
*/
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H
#include "run.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef _OPENMP
// Processors for this rank where several share a host: mpirun binds each to a core of its own, or lets all have all.
static size_t processors_of_rank(void) {
    const size_t granted = (size_t)omp_get_num_procs(), ranks = dist_local_ranks();
    const size_t share = max_size((size_t)sysconf(_SC_NPROCESSORS_ONLN) / ranks, 1);
    if (granted < share)
        note("each rank is bound to %zu of this host's processors, its share would be %zu (mpirun --bind-to none)",
             granted, share);
    return min_size(granted, share);
}
#endif

// oneDNN cuts its work into omp_get_max_threads() pieces. Where the OpenMP runtime then starts fewer threads
// (OMP_THREAD_LIMIT, OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), results are wrong without a word. So, before any plan: what
// is promised is from now on what a team has. wanted 0: as many as there are; of several ranks on a host, its share.
static void use_threads(size_t wanted) {
    size_t team = 1;
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (wanted)
        omp_set_num_threads((int)wanted);
    else if (dist_local_ranks() > 1 && !getenv("OMP_NUM_THREADS"))
        omp_set_num_threads((int)processors_of_rank());
#pragma omp parallel
#pragma omp single
    team = (size_t)omp_get_num_threads();
    omp_set_num_threads((int)team);
#endif
    if (wanted > team) note("--threads %zu: the OpenMP runtime grants this process %zu", wanted, team);
}

static int cpu_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// FLOP/s of the op set's own product of two n x n matrices, the best of a few, in memory of the arena that is not in
// use (between two sequences: nearly all of it); 0 where that is too small.
static double run_product_rate(Run *run, size_t n) {
    const size_t size = dtype_size(run->model.dtype), mark = arena_mark(&run->arena);
    double best = 0;
    Stored *x[3];
    if (run->arena.capacity - run->arena.used < 3 * (n * n * size + ARENA_ALIGNMENT)) return 0;
    for (size_t i = 0; i < 3; i++) {
        x[i] = (Stored *)arena_push(&run->arena, SHARE_WORKSPACE, "peak measurement", n * n, size);
        ops_device->zero(x[i], n * n * size);
    }
    for (size_t i = 0; i < 4; i++) {
        double begin = seconds_now();
        ops_device->linear_forward(x[0], x[1], x[2], NULL, NULL, n, n, n);
        ops_device->finish();
        double rate = 2.0 * (double)(n * n * n) / (seconds_now() - begin);
        if (rate > best) best = rate;
    }
    arena_pop(&run->arena, mark);
    return best;
}

// The machine's peak as far as this op set reaches it: larger products until one takes a few milliseconds.
static double run_peak_flops(Run *run) {
    double best = 0, rate = 1;
    for (size_t n = 1024; n <= 8192 && rate > 0; n *= 2) {
        rate = run_product_rate(run, n);
        if (rate > best) best = rate;
        if (2.0 * (double)(n * n * n) > 5e-3 * best) break;
    }
    return best;
}

#endif
