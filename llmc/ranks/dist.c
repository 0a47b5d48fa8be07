/*
dist.h over MPI. Without MPI (HAVE_MPI not defined) a process is alone, and several processes are refused. Compiled once
and linked to every program.
*/
#include "dist.h"
#include "llmc/base/text.h"
#include <unistd.h>
#ifdef HAVE_MPI
#include "dist_watch.h"
#endif

#if !defined(HAVE_MPI)
#define MPI_LIBRARY NULL
#elif defined(OMPI_MAJOR_VERSION)
#define MPI_LIBRARY "Open MPI " VERSION_TEXT(OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION)
#elif defined(MPICH_VERSION)
#define MPI_LIBRARY "MPICH " MPICH_VERSION
#else
#define MPI_LIBRARY "MPI"
#endif

// ---- launchers ------------------------------------------------------------------------------------------------------
// Returns the number of processes that the launcher started: 1 without a launcher, 0 if it does not say.
static size_t launched(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    size_t ranks;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (getenv(sizes[i]) && parse_size(getenv(sizes[i]), &ranks)) return ranks;
    return getenv("PMIX_RANK") ? 0 : 1;
}

// Refuses several processes that cannot connect. The first process says why; the others wait until it has.
__attribute__((noreturn)) static void refuse_launch(const char *why) {
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"};
    size_t rank = 0;
    for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++)
        if (getenv(ranks[i]) && parse_size(getenv(ranks[i]), &rank)) break;
    if (rank) {
        sleep(2);
        exit(EXIT_RUNTIME);
    }
    die("%s", why);
}

#ifdef HAVE_MPI
static struct {
    size_t ranks, rank, local_ranks, local_rank, sp;
    int joined; // 1: MPI is in use
    struct {
        size_t sp;
        MPI_Comm group[RANK_GROUPS];
    } made[SPLITS_MOST];      // groups made by dist_split
    size_t splits, split;     // number of sizes made, and the chosen one
    MPI_Comm *group;          // communicators of the chosen size
    MPI_Request *request;     // [requests]
    size_t requests, started; // started: requests that dist_wait completes
    char *staging;            // [STAGING_BYTES]
} job = {1, 0, 1, 0, 1, 0, {{0}}, 0, 0, job.made[0].group, NULL, 0, 0, NULL};
#else
static struct { size_t ranks, rank, local_ranks, local_rank, sp; } job = {1, 0, 1, 0, 1};
#endif

const char *dist_library(void) { return MPI_LIBRARY; }

size_t dist_ranks(void) { return job.ranks; }
size_t dist_rank(void) { return job.rank; }
size_t dist_local_rank(void) { return job.local_rank; }
size_t dist_local_ranks(void) { return job.local_ranks; }
Wait wait_from(double begin) {
    const Wait wait = {begin, begin, 0, 0};
    return wait;
}
World dist_world(void) {
    const World world = {job.ranks, job.rank, 0, job.sp};
    return world;
}

#ifdef HAVE_MPI

// ---- start and end --------------------------------------------------------------------------------------------------
// Leaves MPI at exit: after an error it aborts all ranks, else all ranks finalise together.
static void leave_job(void) {
    MPI_Request end;
    if (!job.joined) return;
    if (voice.failed) MPI_Abort(MPI_COMM_WORLD, voice.failed);
    if (job.ranks > 1) {
        MPI_Ibarrier(watch.words, &end); // on a communicator of its own, so that it matches no other barrier
        wait_all(&end, 1, "the end of the program");
        watch_stop();
    }
    MPI_Finalize();
    free(job.request), free(job.staging);
    memset(&job, 0, sizeof(job));
    job.ranks = job.local_ranks = job.sp = 1;
}

// Finds the ranks on this host.
static void find_neighbours(void) {
    MPI_Comm host;
    int ranks, rank;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, (int)job.rank, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &ranks);
    MPI_Comm_rank(host, &rank);
    MPI_Comm_free(&host);
    job.local_ranks = (size_t)ranks, job.local_rank = (size_t)rank;
}

void dist_start(void) {
    const size_t wanted = launched();
    int ranks, rank, granted;
    if (wanted == 1) return;
    atexit(leave_job);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &granted);
    job.joined = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (wanted && (size_t)ranks != wanted)
        refuse_launch("the launcher started several processes, but MPI does not connect them; use the launcher of the "
                      "MPI that this program was built with (Slurm: srun --mpi=list shows the choices)");
    if (ranks == 1) return;
    job.ranks = (size_t)ranks, job.rank = (size_t)rank;
    watch_start(job.ranks, job.rank);
    voice.silent = rank > 0;
    if (rank && !freopen("/dev/null", "w", stdout)) die("/dev/null: cannot be opened: %s", strerror(errno));
    job.group[RANKS_ALL] = MPI_COMM_WORLD;
    find_neighbours();
    job.requests = max_size(2 * job.ranks, 256);
    job.request = (MPI_Request *)checked_calloc(job.requests, sizeof(MPI_Request), "requests to other ranks");
    job.staging = (char *)checked_calloc(STAGING_BYTES, 1, "the staging memory of collectives");
}

void dist_split(size_t sp) {
    const int stream = (int)(job.rank / sp), place = (int)(job.rank % sp);
    job.sp = sp;
    if (job.ranks == 1) return;
    for (job.split = 0; job.split < job.splits && job.made[job.split].sp != sp;) job.split++;
    job.group = job.made[job.split].group;
    if (job.split < job.splits) return;
    if (job.splits++ == SPLITS_MOST) die("internal: groups of more than %d sizes; please report it", SPLITS_MOST);
    job.made[job.split].sp = sp, job.group[RANKS_ALL] = MPI_COMM_WORLD;
    MPI_Comm_split(MPI_COMM_WORLD, stream, place, &job.group[RANKS_SEQUENCE]);
    MPI_Comm_split(MPI_COMM_WORLD, stream, (int)sp - place, &job.group[RANKS_SEQUENCE_REVERSED]);
}

size_t dist_splits(void) { return job.splits; }
size_t dist_split_chosen(void) { return job.split; }
size_t dist_split_ranks(size_t split) { return job.made[split].sp; }

void dist_timeout(double seconds) { watch.timeout = seconds; }
void dist_end_failed(void) {
    if (voice.failed) MPI_Abort(MPI_COMM_WORLD, voice.failed);
}
void dist_stop(void) { leave_job(); }
const char *dist_host(size_t rank) { return job.ranks > 1 ? watch.host[rank] : "this host"; }

// ---- pieces of tensors in host memory -------------------------------------------------------------------------------
char *dist_staging(void) { return job.staging; }

// Returns the next request; requests suffice for 128 messages each way, and one from and to each rank.
static MPI_Request *next_request(void) {
    if (job.started == job.requests) die("internal: more than %zu requests; please report it", job.requests);
    return &job.request[job.started++];
}
void dist_send(RankGroup group, const void *data, size_t bytes, size_t peer) {
    if (bytes) MPI_Isend(data, (int)bytes, MPI_BYTE, (int)peer, 0, job.group[group], next_request());
}
void dist_receive(RankGroup group, void *data, size_t bytes, size_t peer) {
    if (bytes) MPI_Irecv(data, (int)bytes, MPI_BYTE, (int)peer, 0, job.group[group], next_request());
}
void dist_wait(const char *what) {
    const size_t started = job.started;
    if (job.ranks == 1) return;
    job.started = 0;
    wait_all(job.request, (int)started, what);
}

// ---- small exchanges ------------------------------------------------------------------------------------------------
static void gather(RankGroup group, const void *own, size_t bytes, void *all, const char *what) {
    MPI_Request done;
    MPI_Iallgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, job.group[group], &done);
    wait_all(&done, 1, what);
}

void dist_gather(RankGroup group, const void *own, size_t bytes, void *all) {
    const size_t ranks = ranks_in(dist_world(), group), most = STAGING_BYTES / ranks;
    size_t n;
    if (ranks == 1) memcpy(all, own, bytes);
    if (ranks == 1) return;
    for (size_t begin = 0; begin < bytes; begin += n) {
        n = min_size(most, bytes - begin);
        gather(group, (const char *)own + begin, n, job.staging, "a gather");
        for (size_t r = 0; r < ranks; r++) memcpy((char *)all + r * bytes + begin, job.staging + r * n, n);
    }
}

void dist_sum(RankGroup group, double *values, size_t count) {
    const size_t ranks = ranks_in(dist_world(), group), most = STAGING_BYTES / ranks / sizeof(double);
    size_t n, r;
    if (ranks == 1) return;
    for (size_t begin = 0; begin < count; begin += n) {
        const double *all = (const double *)(const void *)job.staging;
        n = min_size(most, count - begin);
        gather(group, values + begin, n * sizeof(double), job.staging, "a sum");
        for (size_t i = 0; i < n; i++)
            for (values[begin + i] = all[i], r = 1; r < ranks; r++) values[begin + i] += all[r * n + i];
    }
}

void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root) {
    MPI_Request done;
    size_t n;
    if (ranks_in(dist_world(), group) == 1) return;
    for (size_t begin = 0; begin < bytes; begin += n) {
        n = min_size(STAGING_BYTES, bytes - begin);
        MPI_Ibcast((char *)data + begin, (int)n, MPI_BYTE, (int)root, job.group[group], &done);
        wait_all(&done, 1, "a broadcast");
    }
}

int dist_stop_point(int asks) { return job.ranks > 1 ? watch_stop_point(asks) : asks; }

void dist_barrier(void) {
    MPI_Request done;
    if (job.ranks == 1) return;
    MPI_Ibarrier(MPI_COMM_WORLD, &done);
    wait_all(&done, 1, "a barrier");
}

size_t dist_smallest(size_t number, size_t *whose) {
    const size_t *all = (const size_t *)(const void *)job.staging;
    *whose = 0;
    if (job.ranks == 1) return number;
    gather(RANKS_ALL, &number, sizeof(number), job.staging, "a comparison");
    for (size_t r = 1; r < job.ranks; r++)
        if (all[r] < all[*whose]) *whose = r;
    return all[*whose];
}
#else
// without MPI no other rank asks, and nothing is sent
void watch_at_work(void) {}
void watch_wait(Wait *wait) { (void)wait; }
void watch_pause(void) {}
double watch_timeout(void) { return 0; }
void watch_moved(const char *where) { (void)where; }
size_t dist_splits(void) { return 0; }
size_t dist_split_chosen(void) { return 0; }
size_t dist_split_ranks(size_t split) { return (void)split, 1; }
void dist_end_failed(void) {}
char *dist_staging(void) { return NULL; }
void dist_send(RankGroup group, const void *data, size_t bytes, size_t peer) {
    (void)group, (void)data, (void)bytes, (void)peer;
}
void dist_receive(RankGroup group, void *data, size_t bytes, size_t peer) {
    (void)group, (void)data, (void)bytes, (void)peer;
}
void dist_wait(const char *what) { (void)what; }
void dist_start(void) {
    if (launched() > 1)
        refuse_launch("the launcher started several processes, but this program was built without MPI; install an MPI "
                      "(libopenmpi-dev) and build again, or start one process");
}
void dist_split(size_t sp) { job.sp = sp; }
void dist_timeout(double seconds) { (void)seconds; }
void dist_stop(void) {}
const char *dist_host(size_t rank) { return (void)rank, "this host"; }
void dist_gather(RankGroup group, const void *own, size_t bytes, void *all) { (void)group, memcpy(all, own, bytes); }
void dist_sum(RankGroup group, double *values, size_t count) { (void)group, (void)values, (void)count; }
void dist_broadcast(RankGroup group, void *data, size_t bytes, size_t root) {
    (void)group, (void)data, (void)bytes, (void)root;
}
int dist_stop_point(int asks) { return asks; }
void dist_barrier(void) {}
size_t dist_smallest(size_t number, size_t *whose) { return *whose = 0, number; }
#endif

// ---- ranks that must be alike ---------------------------------------------------------------------------------------
// Returns the first rank whose key differs from rank 0's, or 0.
static size_t first_other(uint64_t key) {
    uint64_t *keys = (uint64_t *)checked_calloc(job.ranks, sizeof(*keys), "keys of ranks");
    size_t r = 1;
    dist_gather(RANKS_ALL, &key, sizeof(key), keys);
    while (r < job.ranks && keys[r] == keys[0]) r++;
    free(keys);
    return r < job.ranks ? r : 0;
}

void dist_check(const char *what, uint64_t key) {
    const size_t other = first_other(key);
    if (other)
        die("rank %zu on %s has other %s than rank 0 on %s; give all ranks the same %s", other, dist_host(other), what,
            dist_host(0), what);
}

static void check_arguments(int argc, char **argv) {
    char mine[200], others[200];
    for (size_t i = 1;; i++) {
        snprintf(mine, sizeof(mine), "%s", i < (size_t)argc ? argv[i] : "nothing");
        size_t other = first_other(i < (size_t)argc ? checksum_of(1, argv[i], strlen(argv[i])) : 0);
        if (!other && i >= (size_t)argc) return; // the arguments have ended on all ranks
        if (!other) continue;
        memcpy(others, mine, sizeof(others));
        dist_broadcast(RANKS_ALL, mine, sizeof(mine), 0);
        dist_broadcast(RANKS_ALL, others, sizeof(others), other);
        die_usage("rank %zu on %s has other arguments: no. %zu is '%s', on rank 0 '%s'; start all ranks with the same "
                  "command",
                  other, dist_host(other), i, others, mine);
    }
}

// Returns a checksum of this program's file; 0 if the system does not show it.
static uint64_t program_key(void) {
    char piece[1 << 14];
    uint64_t key = 0;
    size_t got;
    FILE *file = fopen("/proc/self/exe", "rb");
    if (!file) return 0;
    while ((got = fread(piece, 1, sizeof(piece), file)) > 0) key = checksum_of(key, piece, got);
    fclose(file);
    return key;
}

void dist_check_program(int argc, char **argv) {
    if (job.ranks == 1) return;
    dist_check("program file", program_key());
    check_arguments(argc, argv);
}
