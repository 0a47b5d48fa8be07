/*
Op set "nccl" of the tests: memory, transfers and collectives of op set "cuda" over pretended calls of CUDA and NCCL
(nccl_on_mpi.h). It has no other ops.
*/
#include "nccl_on_mpi.h"
#include "llmc/ops/cuda/memory.cuh"
#include "llmc/ops/cuda/collective.cuh"

static void *nccl_on_mpi_symbol(const char *name) {
#define CALL(call)                                                                                                     \
    if (!strcmp(name, "nccl" #call)) return (void *)&nccl##call;
    NCCL_CALLS(CALL)
#undef CALL
    return NULL;
}

static void *cuda_allocate(size_t bytes) {
    collectives_require();
    return memory_allocate(bytes);
}
static size_t cuda_memory_available(void) { return memory_available(); }
static void cuda_repeat(double) {}
static void cuda_attention_choose(AttentionChoice) {}
static const char *cuda_attention_library(size_t, size_t, size_t, size_t) { return NULL; }

// After so many launches that the host has had to keep up with the device.
static void copy_out_after_kernels(void *host, const void *from, size_t bytes) {
    for (int launch = 0; launch < 300 && after_launch; launch++) after_launch();
    cuda_copy_out(host, from, bytes);
}

static constexpr Ops ops_nccl_make(void) {
    Ops ops = {"nccl", "", DTYPE_FP32, DTYPE_FP32, 0, 0};
#define OP_HOST(type, op, ...)   ops.op = cuda_##op;
#define OP_MEMORY(type, op, ...) ops.op = cuda_##op;
#define OP(...)
#define OP_SCRATCH(...)
#define OP_STEP(...)
#include "llmc/ops/op_list.h"
    ops.copy_out = copy_out_after_kernels;
    return ops;
}
static constexpr Ops ops_nccl = ops_nccl_make();

extern "C" {
extern const Ops *const ops_device;
const Ops *const ops_device = &ops_nccl;
}
