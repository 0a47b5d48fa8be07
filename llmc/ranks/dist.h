/*
The processes of a run, on the host: who they are, small exchanges, and how they end together. MPI launches and connects
them (dist.c). Tensors move by the collectives of ops.h, through MPI on the CPU
and NCCL on GPUs.

A process started without a launcher is alone: MPI is not initialised, and everything here is the identity. Functions
that communicate are collective: every rank of the group calls them in the same order. A waiting rank asks the other
ranks whether they are at work. If a rank gives no sign for dist_timeout, the waiting rank ends the job with a message
that names it.
*/
#ifndef LLMC_DIST_H
#define LLMC_DIST_H
#include "llmc/base/hash.h"
#include "llmc/base/output.h"
#include "world.h"

#ifdef __cplusplus
extern "C" {
#endif

const char *dist_library(void); // "Open MPI 4.1.4"; NULL: built without MPI

// Joins the other processes if a launcher (mpirun, srun) started several. Call it first. From then on an error of any
// rank ends the whole job with one message, and only rank 0 prints: notes and standard output of other ranks are
// dropped.
void dist_start(void);
size_t dist_ranks(void);
size_t dist_rank(void);
size_t dist_local_rank(void);       // this rank's number on its host, which chooses its device
size_t dist_local_ranks(void);      // number of ranks on this host
const char *dist_host(size_t rank); // name of a rank's machine
void dist_split(size_t sp);         // forms groups of sp ranks that share a stream; collective when it makes them
void dist_timeout(double seconds);  // sets how long a rank waits for a sign of life
void dist_stop(void);               // leaves the job at the end of main; otherwise that is done at exit

// Gathers all[ranks of the group][bytes] = every rank's own[bytes], in the order of the group's ranks.
void dist_gather(RankGroup group, const void *own, size_t bytes, void *all);
// Sums values[count] over the group, in the order of ranks: the same bits on every rank.
void dist_sum(RankGroup group, double *values, size_t count);
// Returns the smallest number of all ranks. *whose: the first rank that has it
size_t dist_smallest(size_t number, size_t *whose);
void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root);
void dist_barrier(void);
// Returns 1 if all ranks abandon their work at this point because one of them asks for it. All ranks pass this point
// equally often.
int dist_stop_point(int asks);

// Refuses ranks that differ in `key`, a checksum of `what` ("data"), in their arguments or in their program.
void dist_check(const char *what, uint64_t key);
void dist_check_program(int argc, char **argv);

// ---- for op sets: groups, pieces of tensors, waiting ----------------------------------------------------------------
#define SPLITS_MOST   24                // most sizes of groups that share a stream
#define STAGING_BYTES ((size_t)4 << 20) // staging memory of collectives; larger tensors are cut into pieces

World dist_world(void);                // this rank, in the groups that dist_split chose
size_t dist_splits(void);              // number of sizes of groups made so far, at most SPLITS_MOST
size_t dist_split_chosen(void);        // number of the chosen size
size_t dist_split_ranks(size_t split); // ranks of a group of this size
char *dist_staging(void);              // [STAGING_BYTES] host memory

// Starts to send bytes of host memory to a rank of the group, or to receive them. dist_wait completes all of them.
void dist_send(RankGroup group, const void *data, size_t bytes, size_t peer);
void dist_receive(RankGroup group, void *data, size_t bytes, size_t peer);
void dist_wait(const char *what);
void dist_end_failed(void); // aborts all ranks if this rank has failed; for exit handlers

#define WATCH_YIELD 0.01 // s of polling before a waiting rank pauses between polls

typedef struct {
    double begin;   // s
    double asked;   // s: time of the last question; at first begin
    double still;   // s: time since which all ranks have answered and none has moved; 0: unknown
    int unanswered; // 1: the last question still awaits answers
} Wait;

// Answers the ranks that ask. Call it between two pieces of this rank's work.
void watch_at_work(void);
Wait wait_from(double begin); // a wait that began at `begin` seconds
// Asks other ranks and answers them, between two polls of what this rank waits for
void watch_wait(Wait *wait);
void watch_pause(void);              // sleeps between two polls
double watch_timeout(void);          // s, of dist_timeout
void watch_moved(const char *where); // records progress: from now on this rank waits for `where`

#ifdef __cplusplus
}
#endif

// Adds up the checksum sums of all ranks. Collective.
static void checksum_join(Checksum *c) {
    double part[8]; // parts of 16 bits, so that sums over ranks are exact
    for (size_t i = 0; i < 8; i++) part[i] = (double)(c->sum[i / 4] >> 16 * (i % 4) & 0xffff);
    dist_sum(RANKS_ALL, part, 8);
    memset(c, 0, sizeof(*c));
    for (size_t i = 0; i < 8; i++) c->sum[i / 4] += (uint64_t)part[i] << 16 * (i % 4);
}

// Opens on the other ranks the unfinished file that rank 0 made for `path`. Each rank writes a part of it. Collective.
static void output_share(OutputFile *output, const char *path) {
    char temporary[PATH_MAX] = "";
    if (dist_rank() == 0) memcpy(temporary, output->temporary, sizeof(temporary));
    dist_broadcast(RANKS_ALL, temporary, sizeof(temporary), 0);
    if (dist_rank() != 0) output_join(output, path, temporary);
}

#endif
