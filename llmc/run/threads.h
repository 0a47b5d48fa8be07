/*
A run's threads on the host: how many, on which processors, and how they wait for each other.
*/
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H
#include "llmc/ops/arena.h"
#include "llmc/ranks/dist.h"
#ifdef _OPENMP
#include <omp.h>
#include <signal.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

// ---- before anything else -------------------------------------------------------------------------------------------
// Returns the bytes of the calling thread's stack, or SIZE_MAX.
static size_t stack_bytes(void) {
    pthread_attr_t attributes;
    size_t bytes = SIZE_MAX;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0)
        pthread_attr_getstacksize(&attributes, &bytes), pthread_attr_destroy(&attributes);
    return bytes;
}

// Refuses a stack that would end the program without a message. By -fstack-usage, verb_plan and its callees take 2.8
// MiB, a thread 0.2 MiB (file_checksum, router.h).
static void stack_check(size_t bytes, size_t needed, const char *command) {
    if (bytes < needed)
        die("the stack has %s, but %s are needed; type: %s", human_bytes((double)bytes), human_bytes((double)needed),
            command);
}

// Makes this thread, and threads that it creates later, read and write denormal numbers as 0. Gradients of masked
// tokens decay to denormal numbers in linear attention; a Xeon's products then take 13 times as long.
static void denormals_off(void) {
#ifdef __SSE2__
    _mm_setcsr(_mm_getcsr() | 0x8040); // flush to zero, denormals are zero
#endif
}

#ifdef _OPENMP
// Undoes Open MPI 4's binding of a process to one core (one or two hardware threads), unless the user chose a binding.
// It binds so where there are one or two processes.
static void threads_unbind(void) {
    static const char *const said[] = {"OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_rmaps_base_mapping_policy",
                                       "OMPI_MCA_hwloc_base_cpu_set", "OMPI_MCA_orte_rankfile"};
    cpu_set_t processors;
    if (!getenv("OMPI_MCA_orte_bound_at_launch")) return;
    for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++)
        if (getenv(said[i])) return;
    if (sched_getaffinity(0, sizeof(processors), &processors) || CPU_COUNT(&processors) > 2) return;
    memset(&processors, 0xff, sizeof(processors));
    sched_setaffinity(0, sizeof(processors), &processors); // the container's processors
}
#endif

// Restarts the program once, so that waiting threads spin for tens of microseconds and then sleep. By default OpenMP's
// threads spin for milliseconds. Two runs on the same cores then take up to 200 times as long as one, because spinning
// threads keep the cores from threads that have work. Longer spinning gains a single run nothing; half of it costs tiny
// models a tenth. libgomp and libomp read the setting from the environment before main, and oneDNN uses their threads:
// a pool of our own would not reach them. Nothing has been done yet, and exec keeps the process. If the user chose how
// to wait, or the system refuses, the run continues without a restart. AT_BASE is 0 where a loader was started in the
// program's place.
static void threads_wait_briefly(char **argv) {
#ifdef _OPENMP
    static const char *const SPINS = "2000", *const MILLISECONDS = "1"; // for libgomp, for libomp
    if (strcmp(ops_device->name, "cpu") != 0)
        return; // processors of a GPU's host are rarely
                // contended
    threads_unbind();
    if (omp_get_max_threads() == 1 && (getenv("OMP_NUM_THREADS") || omp_get_num_procs() == 1)) return;
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME") || !getauxval(AT_BASE)) return;
    if (setenv("GOMP_SPINCOUNT", SPINS, 1) || setenv("KMP_BLOCKTIME", MILLISECONDS, 1)) return;
    execv((const char *)getauxval(AT_EXECFN), argv);
#else
    (void)argv;
#endif
}

// ---- how many -------------------------------------------------------------------------------------------------------
// Returns this rank's share of the processors. Each processor that it may use counts 1 / (ranks of this host that may
// use it). The control group's quota, divided among the host's ranks, is the upper limit. Hardware threads of one core
// count one by one. say: note if the share is less than the host has. Collective.
static size_t processors_share(int say) {
    const double quota = cgroup_processors() / (double)dist_local_ranks();
    double share = 0;
    const size_t ranks = dist_ranks();
    cpu_set_t mine, *all = (cpu_set_t *)checked_malloc(ranks * sizeof(*all), "the processors of ranks");
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof(mine), &mine); // fails above 1024 processors: the set stays empty
    dist_gather(RANKS_ALL, &mine, sizeof(mine), all);
    for (int p = 0; p < CPU_SETSIZE; p++) {
        double sharing = 0;
        if (!CPU_ISSET(p, &mine)) continue;
        for (size_t r = 0; r < ranks; r++)
            sharing += CPU_ISSET(p, &all[r]) && !strcmp(dist_host(r), dist_host(dist_rank()));
        share += 1 / sharing;
    }
    free(all);
    const double most = (double)sysconf(_SC_NPROCESSORS_ONLN) / (double)dist_local_ranks();
    if (share == 0) share = most;
    if (say && fmin(quota, share) < floor(most))
        note("CPU threads: %.0f, of %.0f processors for each process of this host; %s",
             fmax(1, floor(fmin(quota, share))), most,
             quota < share ? "the control group's quota of time grants no more"
                           : "it is bound to these (by taskset, the container, or mpirun without --bind-to none)");
    return max_size((size_t)(fmin(share, quota) + 1e-6), 1);
}

// Fixes the number of OpenMP threads. oneDNN cuts its work into omp_get_max_threads() pieces. If the OpenMP runtime
// then starts fewer threads (OMP_THREAD_LIMIT, OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), results are silently wrong. So
// omp_get_max_threads() is set to the threads that a team really has, before any plan. wanted 0: OMP_NUM_THREADS, or
// this rank's share of the processors.
static void use_threads(size_t wanted) {
    const int chosen = wanted || getenv("OMP_NUM_THREADS");
    const size_t share = processors_share(!chosen);
    size_t team = 1, stack = SIZE_MAX;
#ifdef M_ARENA_MAX
    if (address_space_left() != SIZE_MAX) mallopt(M_ARENA_MAX, 1); // an arena of malloc reserves 64 MiB of addresses
#endif
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (wanted || !chosen) omp_set_num_threads((int)(wanted ? wanted : share));
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // the team's other threads start here without signals: the main thread
                                                 // handles these
#pragma omp parallel reduction(min : stack) reduction(max : team)
    stack = stack_bytes(), team = (size_t)omp_get_num_threads();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    omp_set_num_threads((int)team);
    stack_check(stack, (size_t)512 << 10, "export OMP_STACKSIZE=8M");
#else
    (void)share, (void)stack;
#endif
    if (wanted > team)
        note("--threads %zu: the OpenMP runtime grants this process only %zu; check OMP_THREAD_LIMIT", wanted, team);
}

static int cpu_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

#endif
