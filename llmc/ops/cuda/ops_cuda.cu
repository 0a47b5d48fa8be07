/*
Op set "cuda": the table of ops.h, filled. One file per op family, forward and backward together; this one is compiled once per
precision and linked to the driver. In the tests the kernels run on the CPU (platform.cuh), where memory and matrix products, which
are the libraries' here, come from op set "cpu".
*/
#include "llmc/ops/ops.h"
#include "platform.cuh" // floatX, packs, reductions, launches
#ifdef CUDA_ON_CPU
#include "test/emulate/cuda_library_on_cpu.h"
#else
#include "memory.cuh"     // allocate, release, copy, zero
#include "collective.cuh" // between processes, by NCCL
#include "transfer.cuh"   // to and from host memory
#include "linear.cuh"     // matrix products, by cuBLASLt
#endif
#include "embedding.cuh" // token and position embeddings, scattered rows
#include "norm.cuh"      // RMSNorm, LayerNorm
#include "adapter.cuh"   // scaling and dropout, of adapters (LoRA)
#include "rope.cuh"      // rotary position embedding
#include "attention.cuh" // attention of one chunk over its documents' keys
#ifdef HAVE_CUDNN
#include "attention_cudnn.cuh" // its long spans by cuDNN
#define WITH_CUDNN(op) op##_with_cudnn
#else
#define WITH_CUDNN(op) op
#endif
#include "activation.cuh" // SwiGLU, GeGLU, GELU
#include "logprob.cuh"    // log-probabilities and the gradient of the logits
#include "gradient.cuh"   // stored gradients and their norm
#include "adamw.cuh"      // the optimizer

// Which device is this rank's is settled before it is used.
static void *allocate(size_t bytes) {
#ifndef CUDA_ON_CPU
    collectives_require();
#endif
    return memory_allocate(bytes);
}

// Libraries take their memory before a plan is held against what is left.
static size_t memory_left(void) {
#ifndef CUDA_ON_CPU
    collectives_require();
    cublas_require();
#endif
#ifdef HAVE_CUDNN
    cudnn_attention_start();
#endif
    return memory_available();
}

static void repeat_once(double factor) { (void)factor; } // only op set "dry" counts

static const Ops ops_cuda = {
    .name = "cuda",
    .stored = FLOATX_DTYPE,
    .summed = DTYPE_FP32,
    // Every chunk reads and writes a layer's fp32 dW, and the logits' that of the head: at 1024 tokens that would take as long as half
    // of the product that it belongs to.
    .chunk = 4096,
    .logits_chunk = 2048,
    .allocate = allocate,
    .release = memory_release,
    .memory_peak = memory_peak,
    .memory_available = memory_left,
    .copy_in = copy_in,
    .copy_out = copy_out,
    .copy = copy,
    .zero = zero,
    .finish = finish,
    .host_allocate = host_allocate,
    .host_release = host_release,
    .host_available = host_available,
    .store = store,
    .load = load,
    .await_transfer = await_transfer,
    .repeat = repeat_once,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .embedding_backward_scratch = embedding_backward_scratch,
    .scatter_rows = scatter_rows,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .norm_backward_scratch = norm_backward_scratch,
    .linear_forward = linear_forward,
    .linear_backward_input = linear_backward_input,
    .linear_backward_weight = linear_backward_weight,
    .adapter_forward = adapter_forward,
    .adapter_backward = adapter_backward,
    .scale = scale,
    .dropout = dropout,
    .rope_forward = rope_forward,
    .rope_backward = rope_backward,
    .attention_forward = WITH_CUDNN(attention_forward),
    .attention_backward = WITH_CUDNN(attention_backward),
    .attention_scratch = WITH_CUDNN(attention_scratch),
    .activation_forward = activation_forward,
    .activation_backward = activation_backward,
    .logprob = logprob,
    .round_sums = round_sums,
    .gradient_add = gradient_add,
    .sum_of_squares = sum_of_squares,
    .adamw = adamw,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .exchange = exchange,
    .await = await,
};

extern "C" {
extern const Ops *const ops_device;
const Ops *const ops_device = &ops_cuda;
}
