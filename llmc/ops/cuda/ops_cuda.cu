/*
Op set "cuda": fills the table of ops.h. Each op family has a file, forward and backward together. This file is compiled
once per precision and linked to the driver; its object exports the table alone. In the tests the kernels run on the CPU
(platform.cuh); op set "cpu" replaces the libraries' memory and matrix products.
*/
#define OP_SET // takes what utils.h shares from the program
#include "llmc/ops/ops.h"
#include "platform.cuh" // floatX, packs, reductions, launches
#include "graph.cuh"    // recorded launches of decoding steps
#ifdef CUDA_ON_CPU
#include "test/emulate/cuda_library_on_cpu.h"
#else
#include "memory.cuh"     // allocate, release, copy, zero, transfers
#include "collective.cuh" // collectives between processes, by NCCL
#include "linear.cuh"     // matrix products, by cuBLASLt
#endif
#include "embedding.cuh" // token and position embeddings, scattered and gathered rows
#include "norm.cuh"      // RMSNorm, LayerNorm
#include "adapter.cuh"   // scaling and dropout of adapters (LoRA)
#include "rope.cuh"      // rotary position embedding
#include "attention.cuh" // attention of one chunk over its documents' keys
#ifdef HAVE_CUDNN
#include "attention_cudnn.cuh" // attention's long spans, by cuDNN
#endif
#include "received.cuh"     // attention that each key receives
#include "blocks.cuh"       // the best blocks of a long text
#include "sink.cuh"         // sinks of attention
#include "gate.cuh"         // the gate of attention's output
#include "latent.cuh"       // latent attention
#include "conv.cuh"         // linear attention: the convolution
#include "delta.cuh"        // linear attention: the gated delta rule
#include "ssd.cuh"          // linear attention: Mamba-2's rule
#include "gated_norm.cuh"   // linear attention: the gated norm
#include "scan.cuh"         // linear attention: states between ranks
#include "activation.cuh"   // SwiGLU, GeGLU, GELU, clamped SwiGLU
#include "logprob.cuh"      // log-probabilities and the gradient of the logits
#include "draw.cuh"         // tokens drawn from logits
#include "distill.cuh"      // the likeliest tokens of a teacher; a student's divergence from them
#include "dequantise.cuh"   // matrices in 4 bits
#include "router.cuh"       // experts: the router
#include "routes.cuh"       // experts: rows sorted, gathered, combined
#include "experts.cuh"      // experts: grouped products
#include "experts_bias.cuh" // experts: vectors and factors of rows
#include "gradient.cuh"     // stored gradients and their norm
#include "adamw.cuh"        // the optimizer

#ifndef CUDA_ON_CPU
#include "findings.cuh" // facts about this machine

// Chooses this rank's device before its first use, then allocates.
static void *cuda_allocate(size_t bytes) {
    collectives_require();
    return memory_allocate(bytes);
}

// Lets libraries take their memory before a plan is compared with the remaining memory.
static size_t cuda_memory_available(void) {
    collectives_require();
    cublas_require();
#ifdef HAVE_CUDNN
    cudnn_attention_start();
#endif
    return memory_available();
}

static void cuda_repeat(double) {}
static void cuda_attention_choose(AttentionChoice) {}
static const char *cuda_attention_library(size_t, size_t, size_t, size_t, int) { return NULL; }
#endif

#ifdef HAVE_CUDNN
static const char *cudnn_or_own_library(size_t NH, size_t NKV, size_t HD, size_t window, int backward) {
#ifndef CUDA_ON_CPU
    collectives_require();
#endif
    const CudnnAttention square = {CUDNN_BLOCK, CUDNN_BLOCK, NH, NKV, NH, NKV, HD, min_size(window, CUDNN_GRID),
                                   1.0,         1,           0};
    const bool has = cudnn_takes(HD, true) && !(backward && hopper_backward_replaces(HD)) &&
                     library_takes_window(HD, window, backward) && cudnn_attention_has(&square, backward, SIZE_MAX);
    return has ? cudnn_attention_library() : NULL;
}
#endif

// rows of logits start at multiples of 16 bytes, which fast products need (GPT-2: V = 50257)

#ifdef HAVE_CUDNN
#define CUDNN_LIBRARY ", cuDNN 9" // any version 9.x that is found
#else
#define CUDNN_LIBRARY ", without cuDNN"
#endif
#ifdef HAVE_NCCL
#define NCCL_LIBRARY ", NCCL " VERSION_TEXT(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#else
#define NCCL_LIBRARY ", without NCCL"
#endif
#ifdef CUDA_ON_CPU
constexpr char LIBRARIES[] = "none: kernels on a CPU" CUDNN_LIBRARY;
#else
constexpr char LIBRARIES[] =
    "CUDA " VERSION_TEXT(__CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__) CUDNN_LIBRARY NCCL_LIBRARY;
#endif

static constexpr Ops ops_cuda_make(void) {
    Ops ops = {"cuda",         LIBRARIES, FLOATX_DTYPE, DTYPE_FP32, CUDA_CHUNK, CUDA_LOGITS_CHUNK, GPU_ROW_MULTIPLE,
               QUANTISED_ROWS, 1};
#define OP(type, op, ...) ops.op = cuda_##op;
#include "llmc/ops/op_list.h"
#ifdef HAVE_CUDNN
    ops.attention_forward = cudnn_or_own_forward, ops.attention_backward = cudnn_or_own_backward;
    ops.attention_scratch = cudnn_or_own_scratch;
    ops.attention_choose = cudnn_or_own_choose, ops.attention_library = cudnn_or_own_library;
#endif
    return ops;
}

extern "C" {
extern const Ops OPS_TABLE(cuda);
const Ops OPS_TABLE(cuda) = ops_cuda_make();
}
