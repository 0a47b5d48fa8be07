/*
Memory of op set "cuda".
*/
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH
#include "llmc/ops/arena.h"
#include "platform.cuh"

// True where memory did not suffice; every other error ends the program.
static bool allocation_refused(cudaError_t error, const char *doing) {
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // it was said, and is not to be found again by the next check
        return true;
    }
    CUDA_CHECK(error, doing);
    return false;
}

static void *memory_allocate(size_t bytes) {
    void *memory = NULL;
    size_t left, total;
    device_require();
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has");
    if (bytes > total) return NULL; // whatever CUDA would call it
    return allocation_refused(cudaMalloc(&memory, bytes ? bytes : 1), "allocating device memory") ? NULL : memory;
}

static void cuda_release(void *memory, size_t) { CUDA_CHECK(cudaFree(memory), "freeing device memory"); }

// Since the context was made: our one allocation and what the libraries took. 0 before there is a device.
static size_t cuda_memory_peak(void) {
    if (!device.ready) return 0;
    size_t now = device_in_use();
    if (now > device.peak) device.peak = now;
    return device.peak - device.in_use_before;
}

// Assumed: kernels of libraries, loaded when first launched. Local memory of ours comes on top.
constexpr size_t BESIDE_PLANS = (size_t)256 << 20;

static size_t memory_available(void) {
    size_t left, total;
    device_require();
    const size_t beside = BESIDE_PLANS + kernels_load();
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has left");
    return left > beside ? left - beside : 1;
}

// The words for what memory_available counts
static const char *cuda_memory_name(void) {
    static char text[160];
    size_t left, total;
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has left");
    if (device.in_use_before < (size_t)1 << 30) return "the memory of this GPU"; // a context's own
    snprintf(text, sizeof(text), "what is free of this GPU's %s (others hold %s: see nvidia-smi)",
             human_bytes((double)total), human_bytes((double)device.in_use_before));
    return text;
}

static cudaEvent_t event_make(void) {
    cudaEvent_t event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
}

// Beyond the 64 KiB that CUDA sets aside for it, the host waits until the kernels before are done.
static void cuda_copy_in(void *to, const void *host, size_t bytes) {
    if (before_waiting && bytes > 64 << 10) before_waiting(false);
    CUDA_CHECK(cudaMemcpy(to, host, bytes, cudaMemcpyHostToDevice), "copying to the device");
}
static void cuda_copy_out(void *host, const void *from, size_t bytes) {
    if (before_waiting) before_waiting(false);
    CUDA_CHECK(cudaMemcpy(host, from, bytes, cudaMemcpyDeviceToHost),
               "copying from the device, after the kernels before");
}
static void cuda_copy(void *out, const void *in, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice), "copying on the device");
}
static void cuda_zero(void *out, size_t bytes) { CUDA_CHECK(cudaMemsetAsync(out, 0, bytes), "clearing device memory"); }
static void cuda_finish(void) {
    if (before_waiting) before_waiting(true);
    if (device.ready) CUDA_CHECK(cudaDeviceSynchronize(), "waiting for the device");
}

// ---- transfers, to and from pinned host memory, on a stream of their own --------------------------------------------
// A transfer begins behind an event of the default stream, and `await_transfer` makes the default stream wait for the
// event behind it; the host never waits. One stream for both ways: forward only stores, backward only loads.
constexpr int64_t TRANSFER_EVENTS = 16;

static struct {
    cudaStream_t stream;
    cudaEvent_t ready;                 // on the default stream
    cudaEvent_t done[TRANSFER_EVENTS]; // of ticket t: done[t % TRANSFER_EVENTS], or of a later one, which is behind it
    int64_t asked;
} transfers;

static void transfers_require(void) {
    if (transfers.stream) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&transfers.stream, cudaStreamNonBlocking), "making a stream");
    transfers.ready = event_make();
    for (cudaEvent_t &event : transfers.done) event = event_make();
}

static void *cuda_host_allocate(size_t bytes) {
    void *memory = NULL;
    device_require();
    transfers_require();
    if (allocation_refused(cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault),
                           "allocating pinned host memory"))
        return NULL;
    return memory;
}

static void cuda_host_release(void *memory, size_t) {
    if (memory) CUDA_CHECK(cudaFreeHost(memory), "freeing pinned host memory");
}

static size_t cuda_host_available(size_t) { return host_memory_available(); } // what is planned is the device's

static int64_t transfer(void *to, const void *from, size_t bytes, cudaMemcpyKind way) {
    const int64_t ticket = ++transfers.asked;
    CUDA_CHECK(cudaEventRecord(transfers.ready), "marking the default stream");
    CUDA_CHECK(cudaStreamWaitEvent(transfers.stream, transfers.ready), "ordering a transfer after kernels");
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, way, transfers.stream), "copying between device and host");
    CUDA_CHECK(cudaEventRecord(transfers.done[ticket % TRANSFER_EVENTS], transfers.stream), "marking a transfer");
    return ticket;
}

static int64_t cuda_store(void *host, const void *from, size_t bytes) {
    return transfer(host, from, bytes, cudaMemcpyDeviceToHost);
}

static int64_t cuda_load(void *to, const void *host, size_t bytes) {
    return transfer(to, host, bytes, cudaMemcpyHostToDevice);
}

static void cuda_await_transfer(int64_t ticket) {
    if (ticket)
        CUDA_CHECK(cudaStreamWaitEvent(NULL, transfers.done[ticket % TRANSFER_EVENTS]),
                   "ordering kernels after a transfer");
}

#endif
