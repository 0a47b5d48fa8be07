/*
Op set "nccl" of the tests: memory, transfers and collectives of op set "cuda" over pretended calls of CUDA and NCCL
(nccl_on_mpi.h). It has no other ops.
*/
#include "nccl_on_mpi.h"
#include "llmc/ops/cuda/memory.cuh"
#include "llmc/ops/cuda/collective.cuh"
#include "llmc/ops/cuda/transfer.cuh"

static void *nccl_on_mpi_symbol(const char *name) {
#define CALL(call)                                                                                                     \
    if (!strcmp(name, "nccl" #call)) return (void *)&nccl##call;
    NCCL_CALLS(CALL)
#undef CALL
    return NULL;
}

static void *allocate(size_t bytes) {
    collectives_require();
    return memory_allocate(bytes);
}

// After so many launches that the host has had to keep up with the device.
static void copy_out_after_kernels(void *host, const void *from, size_t bytes) {
    for (int launch = 0; launch < 300 && after_launch; launch++) after_launch();
    copy_out(host, from, bytes);
}

static const Ops ops_nccl = {
    .name = "nccl",
    .stored = DTYPE_FP32,
    .summed = DTYPE_FP32,
    .allocate = allocate,
    .release = memory_release,
    .memory_peak = memory_peak,
    .memory_available = memory_available,
    .copy_in = copy_in,
    .copy_out = copy_out_after_kernels,
    .copy = copy,
    .zero = zero,
    .finish = finish,
    .host_allocate = host_allocate,
    .host_release = host_release,
    .host_available = host_available,
    .store = store,
    .load = load,
    .await_transfer = await_transfer,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .exchange = exchange,
    .await = await,
};

extern "C" {
extern const Ops *const ops_device;
const Ops *const ops_device = &ops_nccl;
}
