/*
Memory of op set "cuda".
*/
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH
#include "llmc/ops/arena.h"
#include "llmc/ops/disk.h"
#include "llmc/ranks/dist.h"
#include "platform.cuh"
#include <sys/syscall.h>

static void *memory_allocate(size_t bytes) {
    void *memory = NULL;
    size_t left, total;
    device_require();
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has");
    if (bytes > total) return NULL; // cudaMalloc may fail with another error for such sizes
    const cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // hides the handled error from the next check
        return NULL;
    }
    CUDA_CHECK(error, "allocating device memory");
    return memory;
}

static void cuda_release(void *memory, size_t bytes) {
    disk_forget(memory, bytes, NULL);
    CUDA_CHECK(cudaFree(memory), "freeing device memory");
}

// Returns the peak of our allocation and the libraries' memory, without CUDA's context (half a GiB more). Returns 0
// before the device is opened
static size_t cuda_memory_peak(void) {
    if (!device.ready) return 0;
    size_t now = device_in_use();
    if (now > device.peak) device.peak = now;
    return device.peak - device.in_use_before;
}

// memory assumed for library kernels, which are loaded at first launch; our kernels' local memory is added
constexpr size_t BESIDE_PLANS = (size_t)256 << 20;

static size_t memory_available(void) {
    size_t left, total;
    device_require();
    const size_t beside = BESIDE_PLANS + kernels_load();
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has left");
    return left > beside ? left - beside : 1;
}

static const char *cuda_device_name(void) {
    static cudaDeviceProp card;
    CUDA_CHECK(cudaGetDeviceProperties(&card, device.number), "asking for the device's name");
    return card.name;
}

// Returns the name of memory_available's figure: "the memory of this GPU", or "what is free of this GPU's 80 GiB
// (...)".
static const char *cuda_memory_name(void) {
    static char text[160];
    size_t left, total;
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has left");
    if (device.in_use_before < (size_t)1 << 30) return "the memory of this GPU"; // the context alone, no other process
    snprintf(text, sizeof(text), "what is free of this GPU's %s (others hold %s: see nvidia-smi)",
             human_bytes((double)total), human_bytes((double)device.in_use_before));
    return text;
}

static cudaEvent_t event_make(void) {
    cudaEvent_t event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
}

static void cuda_copy(void *out, const void *in, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, launch_stream), "copying on the device");
}
static void cuda_zero(void *out, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(out, 0, bytes, launch_stream), "clearing device memory");
}
static void cuda_finish(void) {
    disk_finish();
    if (before_waiting) before_waiting(true);
    if (device.ready) CUDA_CHECK(cudaDeviceSynchronize(), "waiting for the device");
}

// ---- transfers -----------------------------------------------------------------------------------------------------
// Kinds of transfers. Each kind has its own stream, so that both directions of the link are busy at once. A transfer
// starts after an event of the default stream. For transfers to and from the host, `await_transfer` makes the default
// stream wait for the event that ends the transfer; the host never waits. For transfers to and from disk, the host
// waits for a thread (disk.h).
enum { STORE_HOST, LOAD_HOST, STORE_DISK, LOAD_DISK, TRANSFER_KINDS };
constexpr int64_t TRANSFER_EVENTS = DISK_QUEUE;

typedef struct {
    cudaStream_t stream;
    // transfer n uses entry [n % TRANSFER_EVENTS]; later transfers, which end after it, use the entry again
    cudaEvent_t ready[TRANSFER_EVENTS]; // recorded on the default stream; transfers to and from the host use [0]
    cudaEvent_t done[TRANSFER_EVENTS];
    int64_t asked; // last ticket asked for, only for transfers to and from the host
} TransferStream;

static TransferStream transfers[TRANSFER_KINDS];

static void transfers_require(void) {
    if (transfers[0].stream) return;
    for (TransferStream &kind : transfers) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&kind.stream, cudaStreamNonBlocking), "making a stream");
        for (cudaEvent_t &event : kind.ready) event = event_make();
        for (cudaEvent_t &event : kind.done) event = event_make();
    }
}

// ---- host memory, pinned -------------------------------------------------------------------------------------------
// One range of addresses, pinned in pieces: pinning a piece takes some tenths of a second, and a copy stays within a
// piece. If no more can be pinned, the rest is pageable: its copies pass through a buffer of the driver, and the host
// waits.
#ifndef PINNED_PIECE
#define PINNED_PIECE ((size_t)1 << 30)
#endif

static_assert(PINNED_PIECE % DISK_PIECE == 0, "a piece of disk.h lies within one");
constexpr size_t HOST_PAGE = 4096;
// assumed: host memory that the driver takes, and, from driver 580 on, bytes for each pinned page
constexpr size_t HOST_BESIDE = (size_t)512 << 20, HOST_PAGE_BESIDE = 16;

typedef struct {
    char *base; // NULL: no host memory
    size_t bytes, pinned;
} HostMemory;
static HostMemory host_memories[16];

static const HostMemory *host_memory_of(const void *pointer) {
    for (const HostMemory &memory : host_memories)
        if (memory.base && (uintptr_t)pointer - (uintptr_t)memory.base < memory.bytes) return &memory;
    return NULL;
}

// Asks for pages of [memory, memory + bytes) on the GPU's NUMA node.
static void host_prefer_node(char *memory, size_t bytes) {
    char bus[32] = "", path[96];
    int node = -1;
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), device.number), "asking where it is connected");
    for (char *c = bus; *c; c++) *c = (char)tolower(*c);
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", bus);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%d", &node) != 1) node = -1;
    if (file) fclose(file);
    const unsigned long nodes = node >= 0 && node < 64 ? 1ul << node : 0;
    if (nodes) syscall(SYS_mbind, memory, bytes, 1 /* MPOL_PREFERRED */, &nodes, 65ul, 0u); // errors are ignored
}

// Pins a piece. Returns false if it cannot be pinned. Ends the program if the device has failed, because then every
// call fails.
static bool host_pin(char *memory, size_t bytes, cudaError_t *error) {
    *error = cudaHostRegister(memory, bytes, cudaHostRegisterDefault);
    if (*error == cudaSuccess) return true;
    cudaGetLastError(); // hides the handled error from the next check
    CUDA_CHECK(cudaDeviceSynchronize(), "pinning host memory");
    return false;
}

static void cuda_host_release(void *base, size_t) {
    HostMemory *memory = (HostMemory *)host_memory_of(base);
    if (!memory) return;
    cuda_finish();
    for (size_t at = 0; at < memory->pinned; at += PINNED_PIECE)
        CUDA_CHECK(cudaHostUnregister(memory->base + at), "giving pinned host memory back");
    munmap(memory->base, memory->bytes);
    memory->base = NULL;
}

static void *cuda_host_allocate(size_t bytes) {
    const double begin = seconds_now();
    HostMemory *memory = host_memories;
    cudaError_t error = cudaSuccess;
    device_require();
    transfers_require();
    while (memory->base && memory < host_memories + 15) memory++;
    if (memory->base) die("more than 16 allocations of host memory; please report it");
    bytes = (max_size(bytes, 1) + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
    char *base = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == (char *)MAP_FAILED) return NULL;
    madvise(base, bytes, MADV_HUGEPAGE); // huge pages are pinned far faster
    host_prefer_node(base, bytes);
    memory->base = base, memory->bytes = bytes, memory->pinned = 0;
    for (size_t at = 0; at < bytes; at += PINNED_PIECE) {
        const size_t piece = min_size(PINNED_PIECE, bytes - at);
        watch_at_work(); // each piece takes tenths of a second
        if (!host_memory_touch(base + at, piece, HOST_BESIDE + (bytes - at) / HOST_PAGE * HOST_PAGE_BESIDE)) {
            cuda_host_release(base, bytes);
            return NULL;
        }
        if (memory->pinned == at && host_pin(base + at, piece, &error)) memory->pinned += piece;
    }
    if (memory->pinned < bytes)
        note("%s of %s of host memory could not be pinned (%s): its copies do not overlap with kernels, a step may "
             "take 1.5 times as long; lower --host-limit",
             human_bytes((double)(bytes - memory->pinned)), human_bytes((double)bytes), cudaGetErrorString(error));
    else if (seconds_now() - begin > 5)
        note("%s of host memory pinned in %.0f s", human_bytes((double)bytes), seconds_now() - begin);
    return base;
}

static size_t cuda_host_available(size_t) { // planned bytes lie on the device, so they take no host memory
    const size_t available = host_memory_available();
    const size_t pages = available > HOST_BESIDE ? (available - HOST_BESIDE) / (HOST_PAGE + HOST_PAGE_BESIDE) : 0;
    return pages ? pages * HOST_PAGE : available ? 1 : 0;
}

// ---- copies: the other side is any host memory of the caller -------------------------------------------------------
// Waits for the default stream, and so for its transfers. Then the host may use our host memory.
static void host_require(void) {
    if (before_waiting) before_waiting(false);
    CUDA_CHECK(cudaStreamSynchronize(NULL), "waiting for transfers");
}

// Copies to the device. Above 64 KiB, which CUDA buffers, the host waits until earlier kernels are done.
static void cuda_copy_in(void *place, const void *host, size_t bytes) {
    if (disk_copy_in(place, host, bytes)) return;
    if (host_memory_of(place)) {
        host_require();
        memcpy(place, host, bytes);
        return;
    }
    if (before_waiting && bytes > 64 << 10) before_waiting(false);
    CUDA_CHECK(cudaMemcpy(place, host, bytes, cudaMemcpyHostToDevice), "copying to the device");
}
static void cuda_copy_out(void *host, const void *place, size_t bytes) {
    if (disk_copy_out(host, place, bytes)) return;
    if (host_memory_of(place)) {
        host_require();
        memcpy(host, place, bytes);
        return;
    }
    if (before_waiting) before_waiting(false);
    CUDA_CHECK(cudaMemcpy(host, place, bytes, cudaMemcpyDeviceToHost), "copying from the device after kernels");
}

// ---- stores and loads ----------------------------------------------------------------------------------------------
static int64_t host_transfer(int kind, void *to, const void *from, const void *host, size_t bytes) {
    TransferStream *t = &transfers[kind];
    const HostMemory *memory = host_memory_of(host);
    const int64_t n = ++t->asked;
    if (!memory) die("a transfer with memory that host_allocate did not give; please report it");
    CUDA_CHECK(cudaEventRecord(t->ready[0]), "marking the default stream");
    CUDA_CHECK(cudaStreamWaitEvent(t->stream, t->ready[0]), "ordering a transfer after kernels");
    for (size_t at = 0, part; at < bytes; at += part) {
        const size_t offset = (size_t)((const char *)host + at - memory->base);
        part = min_size(bytes - at, PINNED_PIECE - offset % PINNED_PIECE);
        if (before_waiting && offset + part > memory->pinned) before_waiting(false); // pageable memory: the host waits
        CUDA_CHECK(cudaMemcpyAsync((char *)to + at, (const char *)from + at, part,
                                   kind == STORE_HOST ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, t->stream),
                   "copying between device and host");
    }
    CUDA_CHECK(cudaEventRecord(t->done[n % TRANSFER_EVENTS], t->stream), "marking a transfer");
    return TRANSFER_KINDS * n + kind;
}

static int64_t cuda_store(void *place, const void *from, size_t bytes) {
    const DiskFile *file = disk_file_of(place);
    if (!file) return host_transfer(STORE_HOST, place, from, place, bytes);
    return TRANSFER_KINDS * disk_ask(DISK_WRITES, file, place, (void *)(uintptr_t)from, bytes, 0) + STORE_DISK;
}
static int64_t cuda_load(void *to, const void *place, size_t bytes) {
    const DiskFile *file = disk_file_of(place);
    if (!file) return host_transfer(LOAD_HOST, to, place, place, bytes);
    return TRANSFER_KINDS * disk_ask(DISK_READS, file, place, to, bytes, 0) + LOAD_DISK;
}

// Host memory must be pinned, and kernels must see it at the host's address.
static int cuda_reaches(const void *place, size_t bytes) {
    const HostMemory *memory = host_memory_of(place);
    int same = 1;
    if (disk_file_of(place)) return 0;
    if (!memory) return 1;
    CUDA_CHECK(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device.number),
               "asking how kernels reach host memory");
    return same && (size_t)((const char *)place - memory->base) + bytes <= memory->pinned;
}

static void cuda_await_transfer(int64_t ticket) {
    const int64_t kind = ticket % TRANSFER_KINDS, n = ticket / TRANSFER_KINDS;
    if (n && kind >= STORE_DISK)
        disk_await((int)kind - STORE_DISK, n);
    else if (n)
        CUDA_CHECK(cudaStreamWaitEvent(NULL, transfers[kind].done[n % TRANSFER_EVENTS]),
                   "ordering kernels after a transfer");
}

// ---- disk.h: each thread has its own stream -------------------------------------------------------------------------
static void cuda_disk_mark(int way, size_t slot) {
    CUDA_CHECK(cudaEventRecord(transfers[STORE_DISK + way].ready[slot]), "marking the default stream");
}
static void cuda_disk_begin(int way, size_t slot) {
    TransferStream *t = &transfers[STORE_DISK + way];
    CUDA_CHECK(cudaSetDevice(device.number), "choosing the device for a thread");
    CUDA_CHECK(cudaStreamWaitEvent(t->stream, t->ready[slot]), "ordering a transfer after kernels");
}
static void cuda_disk_copy(int way, void *to, const void *from, size_t bytes) {
    const cudaMemcpyKind kind = way == DISK_WRITES ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, transfers[STORE_DISK + way].stream),
               "copying between device and disk");
}
static void cuda_disk_copied(int way) {
    CUDA_CHECK(cudaStreamSynchronize(transfers[STORE_DISK + way].stream), "copying between device and disk");
}
static void cuda_disk_wait(int way, size_t slot) {
    if (before_event) before_event(transfers[STORE_DISK + way].ready[slot]);
}
static const DiskDevice cuda_disk = {cuda_host_allocate, cuda_host_release, watch_at_work,  cuda_disk_mark,
                                     cuda_disk_wait,     cuda_disk_begin,   cuda_disk_copy, cuda_disk_copied};

static void *cuda_disk_allocate(const char *folder, size_t bytes) {
    device_require();
    transfers_require();
    return disk_file_allocate(&cuda_disk, folder, bytes);
}
static void cuda_disk_release(void *memory, size_t) { disk_file_release(memory); }
static size_t cuda_disk_available(const char *folder) { return disk_bytes_left(folder, dist_local_ranks()); }

#endif
