/*
Transfers of op set "cuda" to and from pinned host memory, on a stream of their own: a transfer begins behind an event
of the default stream, and `await_transfer` makes the default stream wait for the event behind it; the host never
waits. One stream for both ways: forward only stores, backward only loads.
*/
#ifndef LLMC_CUDA_TRANSFER_CUH
#define LLMC_CUDA_TRANSFER_CUH
#include "llmc/ops/arena.h"
#include "memory.cuh"

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
