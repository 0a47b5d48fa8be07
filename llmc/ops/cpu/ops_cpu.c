/*
Op set "cpu": the table of ops.h, filled. One file per op family, forward and backward together; this one is compiled
once per precision (precision.h) and linked to the driver.
*/
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE // MAP_ANONYMOUS, madvise
#endif
// `#pragma omp simd` on a loop around libm's exp (double build) or an instrumented one (sanitizers) cannot be honoured.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#endif
#include "llmc/ops/ops.h"
#include "precision.h"  // floatX and floatS
#include "memory.h"     // allocate, release, copy, zero
#include "transfer.h"   // to and from host memory
#include "embedding.h"  // token and position embeddings, scattered rows
#include "norm.h"       // RMSNorm, LayerNorm
#include "linear.h"     // matrix products
#include "adapter.h"    // adapters (LoRA)
#include "rope.h"       // rotary position embedding
#include "attention.h"  // attention of one chunk over its documents' keys
#include "activation.h" // SwiGLU, GeGLU, GELU
#include "logprob.h"    // log-probabilities and the gradient of the logits
#include "gradient.h"   // stored gradients and their norm
#include "adamw.h"      // the optimizer
#include "collective.h" // between processes

static void finish(void) {} // every op is done when it returns

// Only op set "dry" counts. Every chunk of a pass comes here, and every token that is written or piece of a file there.
static void repeat_once(double factor) { (void)factor, watch_at_work(); }
static void copy_between(void *out, const void *in, size_t bytes) { watch_at_work(), memory_copy(out, in, bytes); }

static const Ops ops_cpu = {
    .name = "cpu",
    .stored = FLOATX_DTYPE,
    .summed = sizeof(floatS) == 8 ? DTYPE_FP64 : DTYPE_FP32,
    .chunk = 1024,
    .logits_chunk = 512,
    .allocate = memory_allocate,
    .release = memory_release,
    .memory_peak = host_memory_peak,
    .memory_available = host_memory_available,
    .copy_in = copy_between,
    .copy_out = copy_between,
    .copy = memory_copy,
    .zero = memory_zero,
    .finish = finish,
    .host_allocate = memory_allocate,
    .host_release = memory_release,
    .host_available = host_available,
    .store = transfer,
    .load = transfer,
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
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .attention_scratch = attention_scratch,
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

const Ops *const ops_device = &ops_cpu;
