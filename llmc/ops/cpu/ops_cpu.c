/*
Op set "cpu": fills the table of ops.h. Each op family has a file, forward and backward together. This file is compiled
once per precision (precision.h) and linked to the driver; its object exports the table alone.
*/
#define OP_SET // takes what utils.h shares from the program
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE // for MAP_ANONYMOUS, madvise
#endif
// clang cannot honour `#pragma omp simd` on a loop around libm's exp (double build) or an instrumented one
// (sanitizers).
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#endif
#include "llmc/ops/ops.h"
#include "precision.h"  // floatX and floatS
#include "memory.h"     // allocate, release, copy, zero, transfers
#include "embedding.h"  // token and position embeddings, scattered and gathered rows
#include "norm.h"       // RMSNorm, LayerNorm
#include "linear.h"     // matrix products
#include "adapter.h"    // adapters (LoRA)
#include "rope.h"       // rotary position embedding
#include "attention.h"  // attention of one chunk over its documents' keys
#include "received.h"   // attention that each key receives
#include "blocks.h"     // the best blocks of a long text
#include "sink.h"       // sinks of attention
#include "gate.h"       // the gate of attention's output
#include "latent.h"     // latent attention
#include "conv.h"       // linear attention: the convolution
#include "delta.h"      // linear attention: the gated delta rule
#include "ssd.h"        // linear attention: Mamba-2's rule
#include "gated_norm.h" // linear attention: the gated norm
#include "scan.h"       // linear attention: states between ranks
#include "activation.h" // SwiGLU, GeGLU, GELU, clamped SwiGLU, squared ReLU
#include "experts.h"    // mixtures of experts
#include "logprob.h"    // log-probabilities and the gradient of the logits
#include "draw.h"       // tokens drawn from logits
#include "distill.h"    // the likeliest tokens of a teacher; a student's divergence from them
#include "dequantise.h" // matrices in 4 bits
#include "gradient.h"   // stored gradients and their norm
#include "adamw.h"      // the optimizer
#include "collective.h" // collectives between processes
#include "findings.h"   // facts about this machine

static size_t cpu_memory_peak(void) { return host_memory_peak(); }

// Subtracts what libraries and files take in addition to the plan: in a control group the kernel would kill this
// process. oneDNN and the OpenMP runtime do not survive a failed allocation.
static size_t cpu_memory_available(void) {
    const size_t most = host_memory_available(), left = address_space_left(), files = (size_t)48 << 20;
    const size_t available = most > files ? most - files : most ? 1 : 0;
    size_t beside = (size_t)32 << 20;
#ifdef _OPENMP
    beside += beside * (size_t)omp_get_max_threads();
#endif
    if (left <= beside)
        die("ulimit -v or -d leaves %s of address space, but libraries and threads need %s in addition to the plan; "
            "raise "
            "the limit, or give fewer --threads",
            human_bytes((double)left), human_bytes((double)beside));
    return left == SIZE_MAX ? available : min_size(available ? available : left, left - beside);
}
static size_t cpu_host_available(size_t planned) {
    const size_t available = cpu_memory_available();
    return available > planned ? available - planned : available ? 1 : 0;
}
static const char *cpu_device_name(void) { return ""; }
static const char *cpu_memory_name(void) {
    return address_space_left() < SIZE_MAX ? "the memory that ulimit -v or -d leaves" : "the memory available";
}
static const char *cpu_device_problem(void) { return NULL; }
static void cpu_finish(void) { disk_finish(); } // every op is finished when it returns

// Tells the other ranks that this rank is computing; called for every chunk of a pass.
static void cpu_repeat(double factor) { (void)factor, watch_at_work(); }
static int cpu_graph_begin(const GraphKey *key) { return (void)key, 1; } // launches cost nothing here
static int cpu_graph_end(void) { return 0; }
static void cpu_graphs_forget(void) {}
static void cpu_attention_choose(AttentionChoice choice) { (void)choice; }
static const char *cpu_attention_library(size_t NH, size_t NKV, size_t HD, size_t window, int backward) {
    (void)NH, (void)NKV, (void)HD, (void)window, (void)backward;
    return NULL;
}

#ifdef HAVE_ONEDNN
#define ONEDNN_LIBRARY "oneDNN " VERSION_TEXT(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH)
#else
#define ONEDNN_LIBRARY "without oneDNN"
#endif

extern const Ops OPS_TABLE(cpu);
const Ops OPS_TABLE(cpu) = {
    .name = "cpu",
    .libraries = ONEDNN_LIBRARY,
    .stored = FLOATX_DTYPE,
    .summed = sizeof(floatS) == 8 ? DTYPE_FP64 : DTYPE_FP32,
    .chunk = 1024,
    .logits_chunk = 512, // a larger chunk is hardly faster (dev/README.md) and costs memory
    .row_multiple = 1,
    .quantised_rows = QUANTISED_ROWS,
#define OP(type, op, ...) .op = cpu_##op,
#include "llmc/ops/op_list.h"
};
