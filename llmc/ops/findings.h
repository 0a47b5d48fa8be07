/*
Finds what the verb `doctor` reports on a host, for every op set: its memory, and MPI. Part of an op set's translation
unit.
*/
#ifndef LLMC_FINDINGS_H
#define LLMC_FINDINGS_H
#include "arena.h"
#include "llmc/ranks/dist.h"
#include "ops.h"

static void find_host(TellFinding tell) {
    const size_t total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    const size_t known = host_memory_available(), available = known ? known : total;
    const size_t space = address_space_left();
    const char *all = human_bytes((double)total), *left = human_bytes((double)min_size(available, space));
    if (space < available)
        tell("host memory", FINDING_NOTE, "%s of %s: ulimit -v or -d allows no more; raise it", left, all);
    else
        tell("host memory", FINDING_OK, "%s of %s available", left, all);
    if (dist_library())
        tell("MPI", FINDING_OK, "%s, %zu rank%s", dist_library(), dist_ranks(),
             dist_ranks() > 1 ? "s" : "; mpirun -n N starts several");
    else
        tell("MPI", FINDING_NOTE,
             "one process only, because this program was built without MPI: install libopenmpi-dev and openmpi-bin, "
             "then `make clean all` without PORTABLE=1");
}

#endif
