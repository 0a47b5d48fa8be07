/*
The calls of llmc/ops/cuda/memory.cuh and collective.cuh to CUDA's runtime and NCCL, on the host and over MPI, for
tests. The files are compiled as they are, against the real cuda_runtime.h and nccl.h, and run in several processes
without a GPU.

Device memory is the host's. A copy on the default stream is done when the call returns; first it waits for whatever the
stream awaits. The streams of transfers are queues. They run when the default stream or the host waits for them. A
transfer follows those that the default stream had awaited before it. The stream of collectives is a queue, too. It runs
in order and as late as CUDA allows: when the default stream waits for it, or when the host has queried an event for
long. So whoever reads a result too early reads the old data. Events never block, as on a GPU: the program itself must
detect a missing rank.

What a wrong caller does here:

    a collective that does not wait for the kernels before it   refused when its group ends
    a transfer to or from the host that does not                refused
    a copy that crosses the end of a pinned piece               refused
    calls outside of a group, or on the default stream          refused
    buffers other than those of NCCL's in-place collectives     refused
    ranks that ask for different collectives, or in another     their signatures are compared before the result is used
      order
    parcels of another size than the receiver expects           their bytes are counted
    an event recorded anew before the old one has happened      refused: who waits for the old one would get the new one
    reading what a reduce-scatter leaves undefined              reads NaNs
    relying on an order of additions                            sums go around a ring: rank r's begin with r + 1's

NCCL_ON_MPI_DEVICES: GPUs of this host, 8 unless set. NCCL_ON_MPI_FAULT=hang: no collective ends; =error: NCCL reports
an error; =old: it is older than 2.18; =far: exchanges of ranks that are no neighbours are refused. CUDA_FAULT: a call
of CUDA's fails. CUDA_TAKEN: other processes use the device. CUDA_PINNED="bytes error": bytes that can be pinned, and
what more returns.

It cannot show: whether NCCL takes the calls, kernels that really run beside collectives, speed.
*/
#ifndef TEST_NCCL_ON_MPI_H
#define TEST_NCCL_ON_MPI_H
#define LLMC_CUDA_PLATFORM_CUH // kernels need nvcc; the following is all that is needed of it
#include "llmc/base/random.h"
#include "llmc/ops/cuda/device.cuh"
#include <dlfcn.h>
#include <nccl.h>
#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

// dlopen finds this file in place of the library.
static void *nccl_on_mpi_symbol(const char *name);
#define dlopen(name, flags)  ((void)(name), (void *)&before_waiting)
#define dlsym(library, name) ((void)(library), nccl_on_mpi_symbol(name))

namespace nccl_on_mpi {

// Queries of an event until it happens; LATE: for a collective that the default stream does not await.
constexpr int SOON = 3, LATE = 200;
const cudaStream_t SECOND_STREAM = (cudaStream_t)16;

struct Communicator {
    MPI_Comm ranks, meeting; // meeting: for comparing signatures; shared by all communicators that hold all ranks
    int count, rank;
    uint64_t id;
};

// A call between ncclGroupStart and ncclGroupEnd
struct Call {
    std::function<void(MPI_Request *)> start;
    std::function<void(void)> finish;
    int receives; // bytes of a parcel, else -1
};

struct Group {
    std::vector<Call> calls;
    std::vector<MPI_Request> requests; // one per call, and one for the signatures; empty: not started
    uint64_t signature;                // of its collectives, equal on all ranks; 0: parcels only
    MPI_Comm meeting;
    std::vector<uint64_t> signatures; // [ranks of the meeting]
};

static std::deque<Group> queue; // all calls so far
static size_t done;             // groups
static size_t awaited;          // groups that the default stream waits for
static size_t kernels, seen;    // launched on the default stream so far; awaited by the second stream

// Transfers to the host, from the host, to disk, from disk: the order in which their streams are made
constexpr size_t TRANSFER_STREAMS = 4;
typedef std::array<size_t, TRANSFER_STREAMS> Transfers; // number of each
struct TransferStream {
    std::deque<std::function<void(void)>> asked;
    Transfers after;  // transfers that precede the next one
    size_t done, saw; // saw: like `seen`
};
static TransferStream transfer_stream[TRANSFER_STREAMS];
static Transfers awaited_transfers; // like `awaited`
static size_t streams;              // made so far

static size_t transfer_stream_of(cudaStream_t stream) {
    const size_t number = (size_t)stream / 32 - 1;
    return (size_t)stream % 32 == 0 && number < streams ? number : TRANSFER_STREAMS;
}
static Transfers all_transfers(void) {
    Transfers all;
    for (size_t i = 0; i < TRANSFER_STREAMS; i++) all[i] = transfer_stream[i].asked.size();
    return all;
}
static void work_off_transfers(const Transfers &until) {
    for (size_t i = 0; i < TRANSFER_STREAMS; i++)
        while (transfer_stream[i].done < until[i]) transfer_stream[i].asked[transfer_stream[i].done++]();
}
static bool open; // between ncclGroupStart and ncclGroupEnd: in queue.back()

static bool fault(const char *name) {
    const char *asked = getenv("NCCL_ON_MPI_FAULT");
    return asked && !strcmp(asked, name);
}

// CUDA_FAULT="error n": CUDA's n-th call does nothing and returns this error. "error n on": so do all later calls, as
// if a GPU were lost. Errors are worded as in CUDA.
struct CudaError {
    cudaError_t error;
    const char *name, *text;
};
static const CudaError cuda_errors[] = {
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorSystemDriverMismatch, "cudaErrorSystemDriverMismatch",
     "system has unsupported display driver / cuda driver combination"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static CudaError cuda_error(cudaError_t error) {
    for (const CudaError &e : cuda_errors)
        if (e.error == error) return e;
    return CudaError{error, "cudaErrorUnrecognized", "unrecognized error code"};
}

static cudaError_t cuda_fault(void) {
    const char *asked = getenv("CUDA_FAULT");
    static int calls; // since CUDA_FAULT was set
    int error, at;
    char on = 0;
    if (!asked || (calls++, sscanf(asked, "%d %d %c", &error, &at, &on) < 2)) return cudaSuccess;
    return calls == at || (on && calls > at) ? (cudaError_t)error : cudaSuccess;
}
#define CUDA_CALL                                                                                                      \
    if (const cudaError_t fault = nccl_on_mpi::cuda_fault()) return fault

// ---- running the queue ----------------------------------------------------------------------------------------------
static void start(Group *g) {
    g->requests.resize(g->calls.size() + (g->signature != 0), MPI_REQUEST_NULL);
    for (size_t i = 0; i < g->calls.size(); i++) g->calls[i].start(&g->requests[i]);
    if (!g->signature) return;
    int ranks;
    MPI_Comm_size(g->meeting, &ranks);
    g->signatures.resize((size_t)ranks);
    MPI_Iallgather(&g->signature, 1, MPI_UINT64_T, g->signatures.data(), 1, MPI_UINT64_T, g->meeting,
                   &g->requests.back());
}

static void compare_signatures(const Group *g) {
    for (size_t r = 0; r < g->signatures.size(); r++)
        if (g->signatures[r] != g->signature)
            die("pretended NCCL: rank %zu of this meeting asks for another collective as no. %zu", r, done + 1);
}

// Returns true if the first group of the queue has ended; starts it if needed.
static bool end_first(void) {
    Group *g = &queue[done];
    int ended = 0;
    if (g->requests.empty()) start(g);
    std::vector<MPI_Status> statuses(g->requests.size());
    if (g->signature) { // checked first, as others' data may be of another size
        MPI_Test(&g->requests.back(), &ended, MPI_STATUS_IGNORE);
        if (!ended) return false;
        compare_signatures(g);
    }
    if (fault("hang")) return false;
    MPI_Testall((int)g->requests.size(), g->requests.data(), &ended, statuses.data());
    if (!ended) return false;
    for (size_t i = 0; i < g->calls.size(); i++) {
        int bytes = -1;
        if (g->calls[i].receives >= 0) MPI_Get_count(&statuses[i], MPI_BYTE, &bytes);
        if (bytes != g->calls[i].receives)
            die("pretended NCCL: a parcel of %d bytes came where %d were expected", bytes, g->calls[i].receives);
        g->calls[i].finish();
    }
    done++;
    return true;
}

static bool work_off(size_t groups) {
    while (done < groups)
        if (!end_first()) return false;
    return true;
}

// Call when the default stream uses memory: after all that it awaits, before later collectives.
static void default_stream_turn(void) {
    while (!work_off(awaited)) sched_yield();
    work_off_transfers(awaited_transfers);
    kernels++;
}

// ---- events ---------------------------------------------------------------------------------------------------------
struct Event {
    size_t groups;  // happens when as many are done
    size_t kernels; // on the default stream when it was recorded
    bool of_second;
    int looks;
    Transfers transfers; // happens when as many are done
};
static Event *event_of(cudaEvent_t event) { return (Event *)(void *)event; }

static void record(Event *event, cudaStream_t stream) {
    const bool of_second = stream == SECOND_STREAM;
    if (const size_t i = transfer_stream_of(stream); i < TRANSFER_STREAMS) {
        // waiting for more than the old mark is in order
        event->transfers[i] = transfer_stream[i].asked.size();
        return;
    }
    if (event->of_second && event->groups > done)
        die("pretended CUDA: an event is recorded anew before what it marked has happened");
    *event = Event{of_second ? queue.size() : awaited, kernels, of_second, 0, awaited_transfers};
}

static bool happened(Event *event) {
    const bool nobody_waits = event->groups > std::max(awaited, done);
    return ++event->looks > (nobody_waits ? LATE : SOON) && work_off(event->groups);
}

static void wait_for(cudaStream_t stream, const Event *event) {
    const size_t transfers = transfer_stream_of(stream);
    Transfers *const after = !stream                        ? &awaited_transfers
                             : transfers < TRANSFER_STREAMS ? &transfer_stream[transfers].after
                                                            : NULL;
    for (size_t i = 0; i < TRANSFER_STREAMS && after; i++) (*after)[i] = std::max((*after)[i], event->transfers[i]);
    if (!stream)
        awaited = std::max(awaited, event->groups);
    else if (after)
        transfer_stream[transfers].saw = std::max(transfer_stream[transfers].saw, event->kernels);
    else if (!event->of_second)
        seen = std::max(seen, event->kernels);
}

// ---- NCCL's calls ---------------------------------------------------------------------------------------------------
static const Communicator *communicator_of(ncclComm_t communicator) {
    return (const Communicator *)(const void *)communicator;
}

static void add_call(cudaStream_t stream, int receives, std::function<void(MPI_Request *)> start,
                     std::function<void(void)> finish) {
    if (!open) die("pretended NCCL: a call outside of a group");
    if (stream != SECOND_STREAM) die("pretended NCCL: a call that is not on the stream of collectives");
    queue.back().calls.push_back(Call{start, finish, receives});
}

// Adds a collective to the signature of its group.
static void sign(const Communicator *c, uint64_t kind, size_t count, int root) {
    Group *g = &queue.back();
    const uint64_t words[] = {c->id, kind, count, (uint64_t)root, queue.size()};
    for (uint64_t word : words) g->signature = random_mix(g->signature ^ word) | 1;
    g->meeting = c->meeting;
}

static void must_be(bool so, const char *what) {
    if (!so) die("pretended NCCL: %s", what);
}

typedef std::shared_ptr<std::vector<float>> Terms; // [ranks][count]

static void add_terms(float *sums, const Terms &terms, size_t count, const Communicator *c, int owner) {
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int step = 1; step <= c->count; step++) sum += (*terms)[(size_t)((owner + step) % c->count) * count + i];
        sums[i] = sum;
    }
}

static void make_undefined(float *x, size_t count) { memset(x, 0xff, count * sizeof(*x)); }

static void reduce_scatter(const float *all, float *own, size_t n, const Communicator *c, cudaStream_t stream) {
    Terms terms = std::make_shared<std::vector<float>>((size_t)c->count * n);
    must_be(own == all + (size_t)c->rank * n, "a reduce-scatter that is not in place");
    add_call(
        stream, -1,
        [=](MPI_Request *request) {
            MPI_Ialltoall(all, (int)n, MPI_FLOAT, terms->data(), (int)n, MPI_FLOAT, c->ranks, request);
        },
        [=]() {
            make_undefined(own - (size_t)c->rank * n, (size_t)c->count * n);
            add_terms(own, terms, n, c, c->rank);
            terms->clear(), terms->shrink_to_fit();
        });
    sign(c, 1, n, 0);
}

static void reduce(const float *in, float *out, size_t n, int root, const Communicator *c, cudaStream_t stream) {
    const bool here = c->rank == root;
    Terms terms = std::make_shared<std::vector<float>>(here ? (size_t)c->count * n : 0);
    must_be(in == out, "a reduction that is not in place");
    add_call(
        stream, -1,
        [=](MPI_Request *request) {
            MPI_Igather(in, (int)n, MPI_FLOAT, terms->data(), (int)n, MPI_FLOAT, root, c->ranks, request);
        },
        [=]() {
            make_undefined(out, n);
            if (here) add_terms(out, terms, n, c, root);
        });
    sign(c, 2, n, root);
}

static void all_gather(const char *own, char *all, size_t n, const Communicator *c, cudaStream_t stream) {
    must_be(own == all + (size_t)c->rank * n, "an all-gather that is not in place");
    add_call(
        stream, -1,
        [=](MPI_Request *request) {
            MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, all, (int)n, MPI_BYTE, c->ranks, request);
        },
        []() {});
    sign(c, 3, n, 0);
}

static void broadcast(const char *in, char *out, size_t n, int root, const Communicator *c, cudaStream_t stream) {
    must_be(in == out, "a broadcast that is not in place");
    add_call(
        stream, -1, [=](MPI_Request *request) { MPI_Ibcast(out, (int)n, MPI_BYTE, root, c->ranks, request); }, []() {});
    sign(c, 4, n, root);
}

// Connects one communicator after the other on all ranks, so that they can split a common one.
static Communicator *connect(int count, uint64_t id, int rank) {
    static MPI_Comm everyone = MPI_COMM_NULL;
    Communicator *c = new Communicator{MPI_COMM_NULL, MPI_COMM_NULL, 0, 0, id};
    int all;
    if (everyone == MPI_COMM_NULL) MPI_Comm_split(MPI_COMM_WORLD, 0, 0, &everyone);
    MPI_Comm_split(everyone, (int)id, rank, &c->ranks);
    MPI_Comm_size(c->ranks, &c->count), MPI_Comm_rank(c->ranks, &c->rank), MPI_Comm_size(everyone, &all);
    if (c->count != count || c->rank != rank)
        die("pretended NCCL: rank %d of %d says it is %d of %d", c->rank, c->count, rank, count);
    c->meeting = count == all ? everyone : c->ranks;
    return c;
}

// Splits a communicator; all its ranks take part.
static Communicator *split(const Communicator *parent, int color, int key) {
    static uint64_t splits;
    if (done < queue.size()) die("pretended NCCL: a communicator is split while collectives are in flight");
    Communicator *c = new Communicator{MPI_COMM_NULL, MPI_COMM_NULL, 0, 0, ++splits << 32 | (uint64_t)color};
    MPI_Comm_split(parent->ranks, color, key, &c->ranks);
    MPI_Comm_size(c->ranks, &c->count), MPI_Comm_rank(c->ranks, &c->rank);
    c->meeting = c->count == parent->count ? parent->meeting : c->ranks;
    return c;
}

// ---- device memory --------------------------------------------------------------------------------------------------
constexpr size_t DEVICE_BYTES = (size_t)8 << 30;
static std::map<void *, size_t> memory; // allocations and their bytes
static size_t in_use;
static int memory_asked; // how often available memory was asked
static std::map<const char *, size_t> pinned;

// Checks that a copy of pinned host memory stays within one piece.
static void within_piece(const void *host, size_t bytes) {
    auto piece = pinned.upper_bound((const char *)host);
    if (piece == pinned.begin() || !bytes) return;
    --piece;
    const size_t offset = (size_t)((const char *)host - piece->first);
    if (offset < piece->second && bytes > piece->second - offset)
        die("pretended CUDA: a copy that passes a pinned piece");
}

// CUDA_TAKEN="bytes n": other processes take these bytes after n queries of the available memory.
static size_t left(void) {
    const char *taken = getenv("CUDA_TAKEN");
    unsigned long long bytes = 0;
    int times = 0;
    if (taken && (sscanf(taken, "%llu %d", &bytes, &times) < 1 || memory_asked <= times)) bytes = 0;
    return DEVICE_BYTES - min_size(DEVICE_BYTES, in_use + (size_t)bytes);
}

static void *allocate(size_t bytes) {
    void *block = malloc(bytes);
    if (block) memory[block] = bytes, in_use += bytes;
    return block;
}

// Frees the block after waiting for the whole device, as CUDA does.
static void release(void *block) {
    if (!block) return;
    while (!work_off(queue.size())) sched_yield();
    work_off_transfers(all_transfers());
    in_use -= memory.at(block);
    memory.erase(block);
    free(block);
}

} // namespace nccl_on_mpi

// ---- CUDA's runtime -------------------------------------------------------------------------------------------------
extern "C" {
cudaError_t cudaGetDeviceCount(int *count) {
    CUDA_CALL;
    const char *devices = getenv("NCCL_ON_MPI_DEVICES");
    *count = devices ? atoi(devices) : 8;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int number) {
    CUDA_CALL;
    memset(properties, 0, sizeof(*properties));
    properties->uuid.bytes[0] = (char)(number + 1);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    CUDA_CALL;
    memset(attributes, 0, sizeof(*attributes));
    return attributes->localSizeBytes = 1024, cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    CUDA_CALL;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    CUDA_CALL;
    return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    CUDA_CALL;
    *value = which == cudaDevAttrMultiProcessorCount ? 132 : which == cudaDevAttrMaxThreadsPerMultiProcessor ? 2048 : 9;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    CUDA_CALL;
    nccl_on_mpi::awaited_transfers = nccl_on_mpi::all_transfers();
    nccl_on_mpi::default_stream_turn();
    return nccl_on_mpi::work_off(nccl_on_mpi::queue.size()) ? cudaSuccess : cudaErrorUnknown; // it was watched before
}
cudaError_t cudaGetLastError(void) {
    CUDA_CALL;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t error) { return nccl_on_mpi::cuda_error(error).text; }
const char *cudaGetErrorName(cudaError_t error) { return nccl_on_mpi::cuda_error(error).name; }

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    CUDA_CALL;
    nccl_on_mpi::memory_asked++;
    *total = nccl_on_mpi::DEVICE_BYTES, *left = nccl_on_mpi::left();
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **block, size_t bytes) {
    CUDA_CALL;
    if (bytes > nccl_on_mpi::left()) return cudaErrorMemoryAllocation;
    return (*block = nccl_on_mpi::allocate(bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *block) {
    CUDA_CALL;
    return nccl_on_mpi::release(block), cudaSuccess;
}
cudaError_t cudaHostRegister(void *host, size_t bytes, unsigned) {
    CUDA_CALL;
    const char *asked = getenv("CUDA_PINNED");
    unsigned long long most = SIZE_MAX;
    int error = cudaErrorMemoryAllocation;
    size_t sum = bytes;
    for (const auto &piece : nccl_on_mpi::pinned) sum += piece.second;
    if (asked) sscanf(asked, "%llu %d", &most, &error);
    if (sum > most) return (cudaError_t)error;
    return nccl_on_mpi::pinned[(const char *)host] = bytes, cudaSuccess;
}
cudaError_t cudaHostUnregister(void *host) {
    CUDA_CALL;
    return nccl_on_mpi::pinned.erase((const char *)host) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaDeviceGetPCIBusId(char *bus, int bytes, int) {
    CUDA_CALL;
    return snprintf(bus, (size_t)bytes, "0000:ff:1F.7"), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *out, const void *in, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    CUDA_CALL;
    if (const size_t i = nccl_on_mpi::transfer_stream_of(stream); i < nccl_on_mpi::TRANSFER_STREAMS) {
        nccl_on_mpi::TransferStream *t = &nccl_on_mpi::transfer_stream[i];
        if (i < 2 && t->saw != nccl_on_mpi::kernels)
            die("pretended CUDA: a transfer that does not wait for kernels before it");
        nccl_on_mpi::within_piece(kind == cudaMemcpyDeviceToHost ? out : in, bytes);
        t->asked.push_back([=, after = t->after] { nccl_on_mpi::work_off_transfers(after), memcpy(out, in, bytes); });
        return cudaSuccess;
    }
    nccl_on_mpi::default_stream_turn();
    return memcpy(out, in, bytes), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CUDA_CALL;
    nccl_on_mpi::Transfers all = {};
    const size_t i = nccl_on_mpi::transfer_stream_of(stream);
    if (i < nccl_on_mpi::TRANSFER_STREAMS) all[i] = nccl_on_mpi::all_transfers()[i];
    nccl_on_mpi::work_off_transfers(all);
    if (!stream) nccl_on_mpi::default_stream_turn();
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *out, const void *in, size_t bytes, cudaMemcpyKind kind) {
    CUDA_CALL;
    return cudaMemcpyAsync(out, in, bytes, kind, NULL);
}
cudaError_t cudaMemsetAsync(void *out, int value, size_t bytes, cudaStream_t) {
    CUDA_CALL;
    nccl_on_mpi::default_stream_turn();
    return memset(out, value, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void *out, int value, size_t bytes) {
    CUDA_CALL;
    return cudaMemsetAsync(out, value, bytes, NULL);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) {
    CUDA_CALL;
    return *low = 0, *high = -5, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    CUDA_CALL;
    return *stream = nccl_on_mpi::SECOND_STREAM, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    CUDA_CALL;
    nccl_on_mpi::must_be(nccl_on_mpi::streams < nccl_on_mpi::TRANSFER_STREAMS, "more streams than kinds of transfers");
    return *stream = (cudaStream_t)(32 * ++nccl_on_mpi::streams), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CUDA_CALL;
    return nccl_on_mpi::wait_for(stream, nccl_on_mpi::event_of(event)), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    CUDA_CALL;
    return *event = (cudaEvent_t)(void *)new nccl_on_mpi::Event{}, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CUDA_CALL;
    return nccl_on_mpi::record(nccl_on_mpi::event_of(event), stream), cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    CUDA_CALL;
    return nccl_on_mpi::happened(nccl_on_mpi::event_of(event)) ? cudaSuccess : cudaErrorNotReady;
}

// ---- NCCL -----------------------------------------------------------------------------------------------------------
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    id->internal[0] = (char)++made, id->internal[1] = (char)rank;
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int count, ncclUniqueId id, int rank) {
    const uint64_t number = (uint64_t)id.internal[0] << 8 | (uint64_t)id.internal[1];
    *communicator = (ncclComm_t)(void *)nccl_on_mpi::connect(count, number, rank);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int count, ncclUniqueId id, int rank, ncclConfig_t *c) {
    nccl_on_mpi::must_be(c->splitShare == 1, "splits share only with a parent that says so");
    return ncclCommInitRank(communicator, count, id, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t of, int color, int key, ncclComm_t *communicator, ncclConfig_t *) {
    *communicator = (ncclComm_t)(void *)nccl_on_mpi::split(nccl_on_mpi::communicator_of(of), color, key);
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) {
    return *state = nccl_on_mpi::fault("error") ? ncclRemoteError : ncclSuccess, ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclRemoteError ? "remote error" : "other error";
}
const char *ncclGetLastError(ncclComm_t) { return "a link is down"; }

ncclResult_t ncclGroupStart(void) {
    nccl_on_mpi::must_be(!nccl_on_mpi::open, "a group within a group");
    nccl_on_mpi::queue.push_back(nccl_on_mpi::Group{{}, {}, 0, MPI_COMM_NULL, {}});
    nccl_on_mpi::open = true;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    nccl_on_mpi::must_be(nccl_on_mpi::open, "the end of a group that was not begun");
    nccl_on_mpi::must_be(nccl_on_mpi::seen == nccl_on_mpi::kernels, "a group that does not wait for kernels before it");
    nccl_on_mpi::open = false;
    return ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void *all, void *own, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t stream) {
    nccl_on_mpi::must_be(type == ncclFloat && op == ncclSum, "sums are fp32");
    nccl_on_mpi::reduce_scatter((const float *)all, (float *)own, n, nccl_on_mpi::communicator_of(c), stream);
    return ncclSuccess;
}
ncclResult_t ncclReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t c, cudaStream_t stream) {
    nccl_on_mpi::must_be(type == ncclFloat && op == ncclSum, "sums are fp32");
    nccl_on_mpi::reduce((const float *)in, (float *)out, n, root, nccl_on_mpi::communicator_of(c), stream);
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void *own, void *all, size_t n, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t stream) {
    nccl_on_mpi::must_be(type == ncclUint8, "bytes are gathered");
    nccl_on_mpi::all_gather((const char *)own, (char *)all, n, nccl_on_mpi::communicator_of(c), stream);
    return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t type, int root, ncclComm_t c,
                           cudaStream_t stream) {
    nccl_on_mpi::must_be(type == ncclUint8, "bytes are broadcast");
    nccl_on_mpi::broadcast((const char *)in, (char *)out, n, root, nccl_on_mpi::communicator_of(c), stream);
    return ncclSuccess;
}
ncclResult_t ncclSend(const void *out, size_t n, ncclDataType_t type, int to, ncclComm_t c, cudaStream_t stream) {
    const MPI_Comm ranks = nccl_on_mpi::communicator_of(c)->ranks;
    const int count = nccl_on_mpi::communicator_of(c)->count;
    const int apart = (to - nccl_on_mpi::communicator_of(c)->rank + count) % count;
    nccl_on_mpi::must_be(type == ncclUint8, "bytes are sent");
    nccl_on_mpi::must_be(apart == 1 || apart == count - 1 || !nccl_on_mpi::fault("far"), "a pair that is not warm");
    nccl_on_mpi::add_call(
        stream, -1, [=](MPI_Request *request) { MPI_Isend(out, (int)n, MPI_BYTE, to, 0, ranks, request); }, []() {});
    return ncclSuccess;
}
ncclResult_t ncclRecv(void *in, size_t n, ncclDataType_t type, int from, ncclComm_t c, cudaStream_t stream) {
    const MPI_Comm ranks = nccl_on_mpi::communicator_of(c)->ranks;
    nccl_on_mpi::must_be(type == ncclUint8, "bytes are received");
    nccl_on_mpi::add_call(
        stream, (int)n, [=](MPI_Request *request) { MPI_Irecv(in, (int)n, MPI_BYTE, from, 0, ranks, request); },
        []() {});
    return ncclSuccess;
}
}

#endif
