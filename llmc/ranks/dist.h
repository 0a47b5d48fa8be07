/*
Between the processes of a run, on the host: who they are, small exchanges, and how they end together. MPI launches and
connects them (dist_mpi.h, in the op set's translation unit); tensors move by the collectives of ops.h, through MPI on
the CPU and NCCL on GPUs.

A process that no launcher started with others is alone: MPI is not even initialised, and everything here is the
identity. What communicates is collective: every rank of the group calls it in the same order. A rank that waits for
others finds out whether they are at work; where they give no sign of it for dist_timeout, it ends the job with a
message that names them.
*/
#ifndef LLMC_DIST_H
#define LLMC_DIST_H
#include "llmc/base/hash.h"
#include "llmc/base/output.h"
#include "world.h"

#ifdef __cplusplus
extern "C" {
#endif

// Joins the others where a launcher (mpirun, srun) started several; before anything else. After it errors of any rank
// end the whole job with one message, and only rank 0 speaks to people: notes and the standard output of others are
// lost.
void dist_start(void);
size_t dist_ranks(void);
size_t dist_rank(void);
size_t dist_local_rank(void);       // among the ranks on this host: which device
size_t dist_local_ranks(void);      // on this host
const char *dist_host(size_t rank); // name of the machine
void dist_split(size_t sp);         // makes the groups of streams; once, sp divides dist_ranks()
void dist_timeout(double seconds);  // how long a rank waits for a sign of another one
void dist_stop(void);               // at the end of main; done at exit otherwise

// all[ranks of the group][bytes] = every rank's own[bytes], in the order of the group's ranks.
void dist_gather(RankGroup group, const void *own, size_t bytes, void *all);
// values[count] = their sums over the group, added in the order of ranks: the same bits on every rank.
void dist_sum(RankGroup group, double *values, size_t count);
// The smallest of all ranks' numbers; *whose: the first rank that has it.
size_t dist_smallest(size_t number, size_t *whose);
void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root);
void dist_barrier(void);
// At a point that all ranks pass equally often: 1 where all give up their work, because one of them asks.
int dist_stop_point(int asks);

// Refuses where ranks differ: in `key` (a checksum) of `what`, as in "data"; in their arguments, or as programs.
void dist_check(const char *what, uint64_t key);
void dist_check_program(int argc, char **argv);

#ifdef __cplusplus
}
#endif

// Makes the sums of all ranks' bytes of every rank's own. Collective.
static void checksum_join(Checksum *c) {
    double part[8]; // 16 bits each: their sums over ranks are exact
    for (size_t i = 0; i < 8; i++) part[i] = (double)(c->sum[i / 4] >> 16 * (i % 4) & 0xffff);
    dist_sum(RANKS_ALL, part, 8);
    memset(c, 0, sizeof(*c));
    for (size_t i = 0; i < 8; i++) c->sum[i / 4] += (uint64_t)part[i] << 16 * (i % 4);
}

// Opens the unfinished file that rank 0 has made, to become `path`, on the other ranks, which write a part each.
// Collective.
static void output_share(OutputFile *output, const char *path) {
    char temporary[PATH_MAX] = "";
    if (dist_rank() == 0) memcpy(temporary, output->temporary, sizeof(temporary));
    dist_broadcast(RANKS_ALL, temporary, sizeof(temporary), 0);
    if (dist_rank() != 0) output_join(output, path, temporary);
}

#endif
