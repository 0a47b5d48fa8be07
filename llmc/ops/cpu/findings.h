/*
Finds what the verb `doctor` reports on op set "cpu": processor and instruction sets, threads, oneDNN.
*/
#ifndef LLMC_CPU_FINDINGS_H
#define LLMC_CPU_FINDINGS_H
#include "llmc/ops/findings.h"
#ifdef HAVE_ONEDNN
#include <dnnl.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

// Compares the instruction sets that matter for speed: the program's with the processor's. If the processor lacked a
// set that the program uses, the program would have ended earlier.
static void find_processor(TellFinding tell) {
    char name[128] = "unknown processor", line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof(line), file))
        if (!strncmp(line, "model name", 10) && strchr(line, ':'))
            snprintf(name, sizeof(name), "%.*s", (int)strcspn(strchr(line, ':') + 2, "\n"), strchr(line, ':') + 2);
    if (file) fclose(file);
#if defined(__x86_64__)
#if defined(__AVX512F__)
    const int built = 2;
#elif defined(__AVX2__)
    const int built = 1;
#else
    const int built = 0;
#endif
    static const char *const sets[] = {"SSE2", "AVX2", "AVX-512"};
    __builtin_cpu_init();
    const int has = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
    if (has > built)
        tell("processor", FINDING_NOTE,
             "%s: has %s, this program was built for %s; `make` on this machine builds for it", name, sets[has],
             sets[built]);
    else
        tell("processor", FINDING_OK, "%s, %s", name, sets[built]);
#else
    tell("processor", FINDING_OK, "%s", name);
#endif
}

static void find_threads(TellFinding tell) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
#ifdef _OPENMP
    const long threads = omp_get_max_threads();
    const double quota = cgroup_processors();
    if (quota < (double)online)
        tell("threads", FINDING_NOTE, "%ld of %ld processors, limited by the control group to the time of %.4g",
             threads, online, quota);
    else if (threads < online && dist_local_ranks() == 1)
        tell("threads", FINDING_NOTE,
             "%ld of %ld processors: unset OMP_NUM_THREADS and OMP_THREAD_LIMIT, or give --threads %ld", threads,
             online, online);
    else
        tell("threads", FINDING_OK, "%ld of %ld processors", threads, online);
#else
    tell("threads", FINDING_NOTE,
         "1 of %ld processors: this program was built without OpenMP (libgomp-dev or libomp-dev)", online);
#endif
}

static void find_onednn(TellFinding tell) {
#ifdef HAVE_ONEDNN
    const dnnl_version_t *dnnl = dnnl_version();
    tell("oneDNN", FINDING_OK, "%d.%d.%d: matrix products", dnnl->major, dnnl->minor, dnnl->patch);
#else
    tell("oneDNN", FINDING_NOTE,
         "this program was built without oneDNN, so its own, slower products are used; install libdnnl-dev (Debian, "
         "Ubuntu), then make clean and make");
#endif
}

static void cpu_machine_findings(TellFinding tell) {
    find_processor(tell);
    find_threads(tell);
    find_host(tell);
    find_onednn(tell);
}

#endif
