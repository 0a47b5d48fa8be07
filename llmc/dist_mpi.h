/*
dist.h over MPI; without MPI (HAVE_MPI not defined) every process is alone. Part of the op set's translation unit, whose
collectives use the same communicators.
*/
#ifndef LLMC_DIST_MPI_H
#define LLMC_DIST_MPI_H
#include "dist.h"
#ifdef HAVE_MPI
#include <mpi.h>
#endif

static struct {
    size_t ranks, rank, local_rank, sp;
    double timeout;
#ifdef HAVE_MPI
    MPI_Comm group[RANK_GROUPS];
#endif
} job = {.ranks = 1, .sp = 1};

size_t dist_ranks(void) { return job.ranks; }
size_t dist_rank(void) { return job.rank; }
size_t dist_local_rank(void) { return job.local_rank; }

static World job_world(void) {
    World world = {job.ranks, job.rank, 0, job.sp};
    return world;
}

#ifdef HAVE_MPI
// Whether a launcher started this process with others: MPI need not be initialised to know.
static int launched(void) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_NTASKS"};
    size_t i;
    for (i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        if (getenv(variables[i])) return 1;
    return 0;
}

static void dist_communicators(size_t sp) {
    const int stream = job.rank / (int)sp, place = job.rank % (int)sp;
    MPI_Comm_split(MPI_COMM_WORLD, stream, place, &job.group[RANKS_OF_STREAM]);
    MPI_Comm_split(MPI_COMM_WORLD, stream, (int)sp - place, &job.group[RANKS_OF_STREAM_REVERSED]);
}

void dist_start(void) {
    int ranks, rank, granted;
    if (!launched()) return;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &granted);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    job.ranks = (size_t)ranks, job.rank = (size_t)rank;
    job.group[RANKS_ALL] = MPI_COMM_WORLD;
}

void dist_split(size_t sp) {
    job.sp = sp;
    if (job.ranks > 1) dist_communicators(sp);
}

void dist_stop(void) {
    if (job.ranks > 1) MPI_Finalize();
}

void dist_gather(RankGroup group, const void *own, size_t bytes, void *all) {
    if (ranks_in(job_world(), group) == 1)
        memcpy(all, own, bytes);
    else
        MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, job.group[group]);
}

void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root) {
    if (ranks_in(job_world(), group) > 1) MPI_Bcast(data, (int)bytes, MPI_BYTE, (int)root, job.group[group]);
}

void dist_barrier(void) {
    if (job.ranks > 1) MPI_Barrier(MPI_COMM_WORLD);
}

void dist_abort(int code) {
    if (job.ranks > 1) MPI_Abort(MPI_COMM_WORLD, code);
    exit(code);
}
#else
void dist_start(void) {}
void dist_split(size_t sp) { job.sp = sp; }
void dist_stop(void) {}
void dist_gather(RankGroup group, const void *own, size_t bytes, void *all) { (void)group, memcpy(all, own, bytes); }
void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root) {
    (void)group, (void)data, (void)bytes, (void)root;
}
void dist_barrier(void) {}
void dist_abort(int code) { exit(code); }
#endif

const char *dist_host(size_t rank) {
    (void)rank;
    return "this host";
}

void dist_timeout(double seconds) { job.timeout = seconds; }

void dist_sum(RankGroup group, double *values, size_t count) {
    const size_t ranks = ranks_in(job_world(), group);
    double *all;
    size_t r, i;
    if (ranks == 1) return;
    all = (double *)calloc(ranks * count, sizeof(double));
    dist_gather(group, values, count * sizeof(double), all);
    memset(values, 0, count * sizeof(double));
    for (r = 0; r < ranks; r++)
        for (i = 0; i < count; i++) values[i] += all[r * count + i];
    free(all);
}

#endif
