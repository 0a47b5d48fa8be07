/*
The collectives of op set "cuda", by NCCL on a stream of their own, in parallel with the kernels of the default stream.
A collective starts after an event of the default stream; `await` makes the default stream wait for the event after it,
never the host. NCCL is loaded, and connected over MPI (dist.h), if a run has several ranks.

A rank's device is given by its local rank, or by its launcher (CUDA_VISIBLE_DEVICES).

Order. All collectives of a rank lie on one stream: each waits for earlier collectives of any group. So no two of NCCL's
kernels wait on a device at the same time. Communicators that share resources are never used at the same time, which
NCCL forbids. Two ranks must only agree on the order of collectives in which both take part. They do: in a pass a
group's ranks ask in the same order, and all ranks reach the collectives of all ranks at the same points of a step. With
--sp auto a rank goes from larger to smaller groups within a step (step_deal.h), so groups may differ in the number of
their exchanges between two such points.

Same bits. A sum depends on its order, so the algorithm is fixed: NCCL_ALGO=Ring, unless it is set. The order of a ring,
its channels and its protocol follow from the topology that NCCL finds, the element count and the NCCL_* variables; NCCL
does not tune by measuring. Another set of devices, another version of NCCL or another NCCL_ALGO may add in another
order; NVLS and CollNet add in the network's switches.
*/
#ifndef LLMC_CUDA_COLLECTIVE_CUH
#define LLMC_CUDA_COLLECTIVE_CUH
#include "llmc/ranks/dist.h"
#include "memory.cuh"

#ifdef HAVE_NCCL
#include "library.h"
#include <nccl.h>

// ---- the library ----------------------------------------------------------------------------------------------------
#define NCCL_CALLS(CALL)                                                                                               \
    CALL(GetUniqueId)                                                                                                  \
    CALL(CommInitRank)                                                                                                 \
    CALL(CommGetAsyncError)                                                                                            \
    CALL(GetErrorString)                                                                                               \
    CALL(GetLastError)                                                                                                 \
    CALL(GroupStart)                                                                                                   \
    CALL(GroupEnd)                                                                                                     \
    CALL(ReduceScatter)                                                                                                \
    CALL(AllGather)                                                                                                    \
    CALL(Reduce)                                                                                                       \
    CALL(Broadcast)                                                                                                    \
    CALL(Send)                                                                                                         \
    CALL(Recv)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
#define NCCL_SPLITS(CALL) CALL(CommInitRankConfig) CALL(CommSplit)
#else
#define NCCL_SPLITS(CALL)
#endif

static struct {
#define CALL(name) decltype(&nccl##name) name;
    NCCL_CALLS(CALL)
    NCCL_SPLITS(CALL) // NULL: the library is too old to have it
#undef CALL
} nccl;

static void nccl_load(void) {
    char error[500];
    // Without a prefix it applies to every collective. With a prefix (allreduce:ring) NCCL refuses collectives that are
    // not named.
    setenv("NCCL_ALGO", "Ring", 0);
    void *library = library_open(&LIBRARY_NCCL, error);
    if (!library) die("%zu ranks on GPUs need %s", dist_ranks(), error);
#define CALL(name) nccl.name = (decltype(nccl.name))library_function(library, &LIBRARY_NCCL, "nccl" #name);
    NCCL_CALLS(CALL)
#undef CALL
#define CALL(name) nccl.name = (decltype(nccl.name))dlsym(library, "nccl" #name);
    NCCL_SPLITS(CALL)
#undef CALL
}

static void nccl_check(ncclResult_t result, ncclComm_t communicator, const char *doing) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char *cause = nccl.GetLastError(communicator);
    die("NCCL, %s: %s%s%s; NCCL_DEBUG=INFO shows more", doing, nccl.GetErrorString(result), *cause ? ": " : "", cause);
}

// ---- the queue of collectives ---------------------------------------------------------------------------------------
constexpr int64_t IN_FLIGHT = 16; // collectives that the host may queue ahead of the device

typedef struct {
    cudaEvent_t ready, done; // ready: on the default stream, after which the tensors are ready; done: on the
                             // collectives' stream, after the collective
    const char *what;
    ncclComm_t communicator;
} Collective;

static struct {
    ncclComm_t communicator[SPLITS_MOST * RANK_GROUPS]; // [sizes of groups][RankGroup]; RANKS_ALL only in row 0
    cudaStream_t stream;
    Collective ring[IN_FLIGHT]; // ticket t is ring[(t - 1) % IN_FLIGHT]
    int64_t asked, done;        // the last ticket asked for; the last ticket known to be done
    int64_t stalled;            // the ticket that waits for other ranks; 0: none
    cudaEvent_t here, mark[2];  // on the default stream: where the host waits, and where it throttles launches
    size_t launches;
} collectives;

static bool event_happened(cudaEvent_t event) {
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        cudaGetLastError(); // not a failure: hides cudaErrorNotReady from the next check
        return false;
    }
    CUDA_CHECK(error, "waiting for the device");
    return true;
}

// ---- waiting while watching the other ranks (dist.h) ----------------------------------------------------------------
// Ends the job if NCCL has failed. Returns the collective that waits for other ranks, or does not end; NULL while the
// device computes on its own.
static const Collective *collective_stalled(void) {
    for (ncclComm_t communicator : collectives.communicator) {
        ncclResult_t state = ncclSuccess;
        if (!communicator) continue;
        nccl_check(nccl.CommGetAsyncError(communicator, &state), communicator, "asking for its state");
        nccl_check(state, communicator, "between the ranks");
    }
    while (collectives.done < collectives.asked && event_happened(collectives.ring[collectives.done % IN_FLIGHT].done))
        collectives.done++;
    const Collective *first = &collectives.ring[collectives.done % IN_FLIGHT];
    int64_t ticket = collectives.done < collectives.asked && event_happened(first->ready) ? collectives.done + 1 : 0;
    if (ticket && ticket != collectives.stalled) { // answers other ranks that ask whether this rank is alive
        char where[64];
        snprintf(where, sizeof(where), "%s, no. %lld", first->what, (long long)ticket);
        watch_moved(where);
    }
    collectives.stalled = ticket;
    return ticket ? first : NULL;
}

// Waits for an event. --timeout counts from the start of the collective. Before its start the device computes, which
// counts as progress for one --timeout.
static void event_wait(cudaEvent_t event) {
    const double begin = seconds_now();
    Wait wait = wait_from(begin);
    watch_at_work();
    while (!event_happened(event)) {
        const int64_t before = collectives.stalled;
        const Collective *stalled = collective_stalled();
        if (!stalled || collectives.stalled != before) wait = wait_from(seconds_now());
        if (stalled) {
            watch_wait(&wait);
            continue;
        }
        if (wait.begin - begin < watch_timeout()) watch_at_work();
        if (wait.begin - begin < WATCH_YIELD)
            sched_yield();
        else
            watch_pause();
    }
}

// Waits for the default stream (all: for all streams) before the host waits for it: CUDA's own waits cannot watch other
// ranks.
static void wait_watched(bool all) {
    CUDA_CHECK(cudaEventRecord(collectives.here), "marking the default stream");
    event_wait(collectives.here);
    if (all && collectives.asked) event_wait(collectives.ring[(collectives.asked - 1) % IN_FLIGHT].done);
}

// Throttles launches. A device that waits for other ranks queues about 1000 launches; the next launch then never
// returns.
static void keep_up(void) {
    constexpr size_t LAUNCHES = 128; // our own launches; libraries add theirs between them
    if (++collectives.launches % LAUNCHES) return;
    cudaEvent_t mark = collectives.mark[collectives.launches / LAUNCHES % 2];
    event_wait(mark);
    CUDA_CHECK(cudaEventRecord(mark), "marking the default stream");
}

// ---- communicators --------------------------------------------------------------------------------------------------
static ncclComm_t communicator_of(RankGroup group);

// Makes a group's communicator. From NCCL 2.18 on, smaller groups are split off the communicator of all ranks, whose
// channels and buffers they share.
static ncclComm_t communicator_make(RankGroup group) {
    const World world = dist_world();
    const int ranks = (int)ranks_in(world, group), rank = (int)rank_in(world, group);
    const char *const doing = "connecting the ranks";
    ncclComm_t made = NULL;
    ncclUniqueId id = {0};
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.splitShare = 1;
    if (group != RANKS_ALL && nccl.CommSplit) {
        const int replica = (int)world_replica(world);
        nccl_check(nccl.CommSplit(communicator_of(RANKS_ALL), replica, rank, &made, &config), NULL, doing);
        return made;
    }
#endif
    if (rank == 0) nccl_check(nccl.GetUniqueId(&id), NULL, "making an id");
    dist_broadcast(group, &id, sizeof(id), 0);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
    if (nccl.CommSplit)
        nccl_check(nccl.CommInitRankConfig(&made, ranks, id, rank, &config), NULL, doing);
    else
#endif
        nccl_check(nccl.CommInitRank(&made, ranks, id, rank), NULL, doing);
    return made;
}

static ncclComm_t communicator_of(RankGroup group) {
    ncclComm_t *communicator =
        &collectives.communicator[group == RANKS_ALL ? 0 : dist_split_chosen() * RANK_GROUPS + group];
    if (group == RANKS_SEQUENCE && world_replicas(dist_world()) == 1) return communicator_of(RANKS_ALL);
    if (!*communicator) *communicator = communicator_make(group);
    return *communicator;
}

static const Collective *ask(const char *what, RankGroup group) {
    ncclComm_t communicator = communicator_of(group);
    Collective *c = &collectives.ring[collectives.asked % IN_FLIGHT];
    if (collectives.asked >= IN_FLIGHT) event_wait(c->done);
    if (collectives.done < collectives.asked - IN_FLIGHT + 1) collectives.done = collectives.asked - IN_FLIGHT + 1;
    c->what = what, c->communicator = communicator;
    CUDA_CHECK(cudaEventRecord(c->ready), "marking the default stream");
    CUDA_CHECK(cudaStreamWaitEvent(collectives.stream, c->ready), "ordering collectives after kernels");
    nccl_check(nccl.GroupStart(), NULL, "beginning a group");
    return c;
}

// Adds an NCCL call to the group.
template <typename Call, typename... Arguments> static void add_call(const Collective *c, Call call, Arguments... x) {
    nccl_check(call(x..., c->communicator, collectives.stream), c->communicator, c->what);
}

static int64_t asked_for(const Collective *c) {
    nccl_check(nccl.GroupEnd(), c->communicator, c->what);
    CUDA_CHECK(cudaEventRecord(c->done, collectives.stream), "marking the end of a collective");
    return ++collectives.asked;
}

// ---- the ops --------------------------------------------------------------------------------------------------------
// Reduces shards. They are equal except for the last rank's remainder, which is reduced to that rank, or broadcast from
// it.
static int64_t cuda_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    const size_t ranks = ranks_in(dist_world(), group), rank = rank_in(dist_world(), group);
    const size_t each = shard_range(count, unit, ranks, 0).count, rest = ranks * each;
    const Collective *c = ask("a reduce-scatter", group);
    float *const sums = (float *)x, *const last = sums + rest;
    if (each) add_call(c, nccl.ReduceScatter, sums, sums + rank * each, each, ncclFloat, ncclSum);
    if (rest < count) add_call(c, nccl.Reduce, last, last, count - rest, ncclFloat, ncclSum, (int)ranks - 1);
    return asked_for(c);
}

static int64_t cuda_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    const size_t ranks = ranks_in(dist_world(), group), rank = rank_in(dist_world(), group);
    const size_t each = shard_range(count, unit, ranks, 0).count * size, rest = ranks * each, bytes = count * size;
    const Collective *c = ask("an all-gather", group);
    char *const all = (char *)x, *const last = all + rest;
    if (each) add_call(c, nccl.AllGather, all + rank * each, all, each, ncclUint8);
    if (rest < bytes) add_call(c, nccl.Broadcast, last, last, bytes - rest, ncclUint8, (int)ranks - 1);
    return asked_for(c);
}

static int64_t cuda_exchange(RankGroup group, const Message *messages, size_t n) {
    const Collective *c = ask("an exchange", group);
    for (size_t i = 0; i < n; i++) {
        const Message *p = &messages[i];
        if (p->out_bytes) add_call(c, nccl.Send, p->out, p->out_bytes, ncclUint8, (int)p->peer);
        if (p->in_bytes) add_call(c, nccl.Recv, p->in, p->in_bytes, ncclUint8, (int)p->peer);
    }
    return asked_for(c);
}

// Makes the default stream, and so all other ops, wait. The host has already awaited tickets that have left the ring.
static void cuda_await(int64_t ticket) {
    if (ticket > 0 && ticket > collectives.asked - IN_FLIGHT)
        CUDA_CHECK(cudaStreamWaitEvent(NULL, collectives.ring[(ticket - 1) % IN_FLIGHT].done),
                   "ordering kernels after a collective");
}

// ---- the beginning --------------------------------------------------------------------------------------------------
// Checks that no two ranks share a device. All ranks call it, so no rank connects before the others have started.
static void devices_check(void) {
    const size_t ranks = dist_ranks(), rank = dist_rank();
    cudaDeviceProp properties;
    cudaUUID_t *all = (cudaUUID_t *)checked_calloc(ranks, sizeof(cudaUUID_t), "the devices of all ranks");
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device.number), "asking which device this is");
    dist_gather(RANKS_ALL, &properties.uuid, sizeof(cudaUUID_t), all);
    for (size_t r = 0; r < ranks; r++)
        if (r != rank && !memcmp(&all[r], &properties.uuid, sizeof(cudaUUID_t)))
            die("%d GPU%s for the %zu ranks on %s, ranks %zu and %zu would share one; start one rank there for each "
                "GPU",
                device.count, device.count == 1 ? "" : "s", dist_local_ranks(), dist_host(rank), min_size(rank, r),
                max_size(rank, r));
    free(all);
}

// Runs every collective once, tiny: NCCL connects and takes its memory at first use. Each pair of ranks takes some
// memory, so exchanges are only with the next and the previous rank of a sequence. Rings, chains and most halos need no
// other pair. A halo over more ranks connects at its first use, within ncclGroupEnd, where the host answers no other
// rank.
static void communicator_warm(RankGroup group, char *x) {
    const size_t ranks = ranks_in(dist_world(), group), rank = rank_in(dist_world(), group);
    const size_t peers[2] = {(rank + 1) % ranks, (rank + ranks - 1) % ranks};
    char *const in = x + ranks * sizeof(float);
    cuda_reduce_scatter(group, (Summed *)(void *)x, ranks + 1, 1);
    cuda_all_gather(group, x, ranks + 1, 1, 1);
    if (group != RANKS_SEQUENCE) return;
    const Message messages[4] = {{peers[0], x, NULL, 1, 0},
                                 {peers[1], NULL, in, 0, 1},
                                 {peers[1], x, NULL, 1, 0},
                                 {peers[0], NULL, in + 1, 0, 1}};
    cuda_exchange(group, messages, 4);
}

// Sets up this rank's device, NCCL and its connections, before any other use of the device.
static void collectives_require(void) {
    const size_t bytes = (dist_ranks() + 16) * sizeof(float);
    int low, high;
    char *x;
    if (collectives.stream || dist_ranks() == 1) return;
    device_require();
    atexit(dist_end_failed); // before CUDA's handlers, which might wait for a kernel forever
    devices_check();
    nccl_load();
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high), "asking for the priorities of streams");
    CUDA_CHECK(cudaStreamCreateWithPriority(&collectives.stream, cudaStreamNonBlocking, high), "making a stream");
    for (Collective &c : collectives.ring) c.ready = event_make(), c.done = event_make();
    collectives.here = event_make(), collectives.mark[0] = event_make(), collectives.mark[1] = event_make();
    before_waiting = wait_watched, before_event = event_wait, after_launch = keep_up;
    CUDA_CHECK(cudaMalloc(&x, bytes), "allocating for the first collectives");
    CUDA_CHECK(cudaMemset(x, 0, bytes), "clearing device memory");
    const size_t chosen = dist_world().sp;
    for (int warms = 0; warms < 2; warms++) // nothing may be in flight while groups are split off
        for (size_t i = 0; i < dist_splits() * RANK_GROUPS; i++) {
            const RankGroup group = (RankGroup)(i % RANK_GROUPS);
            dist_split(dist_split_ranks(i / RANK_GROUPS));
            if (ranks_in(dist_world(), group) == 1 || (group == RANKS_ALL && i)) continue;
            if (warms)
                communicator_warm(group, x);
            else
                communicator_of(group);
        }
    dist_split(chosen);
    wait_watched(true);
    CUDA_CHECK(cudaFree(x), "freeing device memory");
}

#else
static void collectives_require(void) {
    if (dist_ranks() > 1)
        die("%zu ranks on GPUs need NCCL, and this program was built without: install libnccl-dev, or name the folder "
            "of a wheel (pip install nvidia-nccl-cu13, then NCCL=<folder>), and build it again",
            dist_ranks());
}
constexpr std::nullptr_t cuda_reduce_scatter = nullptr, cuda_all_gather = nullptr,
                         cuda_exchange = nullptr; // without NCCL a run has one rank
static void cuda_await(int64_t) {}
#endif

#endif
