/*
Op set "nccl" of the tests: memory, transfers, matrix products and collectives of op set "cuda" over pretended calls of
CUDA, cuBLASLt and NCCL (nccl_on_mpi.h, cublas_on_cpu.h). Other ops are those of op set "cpu", linked, too, each
launched like a kernel.
*/
#define OP_SET
#include "nccl_on_mpi.h"
#include "cublas_on_cpu.h"
#define PINNED_PIECE ((size_t)4 << 20)
#include "llmc/ops/cuda/memory.cuh"
#include "llmc/ops/cuda/collective.cuh"
#include "llmc/ops/cuda/findings.cuh"

// ---- kernels --------------------------------------------------------------------------------------------------------
typedef float floatX;
extern "C" const Ops OPS_TABLE(cpu);

static const bool listed = (kernels.list[kernels.count++] = (const void *)any_kernel, true);

// Call before a kernel; here its result is complete on return.
static void launch(const char *op) {
    nccl_on_mpi::default_stream_turn();
    cuda_check(cudaGetLastError(), __FILE__, __LINE__, op);
    if (after_launch) after_launch();
}

#define LLMC_CUDA_BIAS_CUH // kernels, too
static void bias_add(float *out, const Stored *bias, size_t n, size_t OC, size_t stride) {
    launch("bias_add");
    for (size_t i = 0; i < n * OC; i++) out[i / OC * stride + i % OC] += ((const float *)bias)[i % OC];
}
static void bias_backward(Summed *dbias, const Stored *dout, size_t n, size_t OC, size_t stride) {
    launch("bias_backward");
    for (size_t o = 0; o < OC; o++) {
        double sum = 0;
        for (size_t i = 0; i < n; i++) sum += (double)((const float *)dout)[i * stride + o];
        ((float *)dbias)[o] += (float)sum;
    }
}
#define MATMUL_ELEMENTS 100000
#include "llmc/ops/cuda/linear.cuh"

static void *nccl_on_mpi_symbol(const char *name) {
#define CALL(call)                                                                                                     \
    if (!strcmp(name, "nccl" #call)) return (void *)&nccl##call;
    NCCL_CALLS(CALL)
#undef CALL
#define CALL(call)                                                                                                     \
    if (!strcmp(name, "nccl" #call)) return nccl_on_mpi::fault("old") ? NULL : (void *)&nccl##call;
    NCCL_SPLITS(CALL)
#undef CALL
#define CALL(call)                                                                                                     \
    if (!strcmp(name, "cublasLt" #call)) return (void *)&cublasLt##call;
    CUBLASLT_CALLS(CALL)
#undef CALL
    return NULL;
}

#define OP(type, op, parameters, arguments, touches)                                                                   \
    static type kernel_##op parameters {                                                                               \
        launch(#op);                                                                                                   \
        return OPS_TABLE(cpu).op arguments;                                                                            \
    }
#define OP_HOST(...)
#define OP_MEMORY(...)
#define OP_SCRATCH(...)
#include "llmc/ops/op_list.h"

// ---- the op set -----------------------------------------------------------------------------------------------------
static void *cuda_allocate(size_t bytes) {
    collectives_require();
    return memory_allocate(bytes);
}
static size_t cuda_memory_available(void) {
    collectives_require();
    cublas_require();
    return memory_available();
}
static void cuda_repeat(double) {}
static int cuda_graph_begin(const GraphKey *) { return 1; }
static int cuda_graph_end(void) { return 0; }
static void cuda_graphs_forget(void) {}
static void cuda_attention_choose(AttentionChoice) {}
static const char *cuda_attention_library(size_t, size_t, size_t, size_t, int) { return NULL; }

// Copies after enough launches that the host has had to wait for the device.
static void copy_out_after_kernels(void *host, const void *from, size_t bytes) {
    for (int launch = 0; launch < 300 && after_launch; launch++) after_launch();
    cuda_copy_out(host, from, bytes);
}

static Ops ops_nccl_make(void) {
    Ops ops = {"nccl", "pretended", DTYPE_FP32, DTYPE_FP32, 1024, 512, 4};
#define OP(type, op, ...)        ops.op = kernel_##op;
#define OP_HOST(type, op, ...)   ops.op = cuda_##op;
#define OP_MEMORY(type, op, ...) ops.op = cuda_##op;
#define OP_SCRATCH(op, ...)      ops.op = OPS_TABLE(cpu).op;
#include "llmc/ops/op_list.h"
    ops.copy_out = copy_out_after_kernels;
    ops.linear_forward = cuda_linear_forward, ops.linear_backward_input = cuda_linear_backward_input;
    ops.linear_backward_weight = cuda_linear_backward_weight, ops.router_logits = cuda_router_logits;
    return ops;
}

extern "C" {
extern const Ops OPS_TABLE(nccl);
const Ops OPS_TABLE(nccl) = ops_nccl_make();
}
