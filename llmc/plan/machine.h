/*
What machines can do, and how long work and traffic take on them: a row for each kind of node, for the estimates of
estimate.h and the floors of profile.h alone. Rates are of bf16. And the memory of cards, for limits of plans.

Where a number comes from stands beside it, and is printed with it; nothing here was measured with this program.
Estimates are no better than these.
*/
#ifndef LLMC_MACHINE_H
#define LLMC_MACHINE_H
#include "llmc/ranks/world.h"
#include "llmc/base/utils.h"
#include "plan.h"

#define GIBIBYTE (1024.0 * 1024 * 1024)

// ---- cards ---------------------------------------------------------------------------------------------------------
// Memory that a card leaves to a plan: the total that CUDA reports, less CARD_RESERVED. Totals are the least that
// PyTorch's "total capacity of" has for such a card in public reports of 2023 to 2026; the driver keeps the rest, and
// ECC a sixteenth where it takes memory.
#define CARD_NAMES    "a100|h100|h200|a100-40|b200|l40s|rtx5090|rtx4090|rtx4080|rtx3060"
#define CARD_RESERVED GIBIBYTE // assumed: a context of 0.5 GiB, workspaces of libraries, what memory.cuh leaves free

static const struct {
    const char *gpu;
    double gib;
} cards[] = {
    // in the order of CARD_NAMES, which begins as machines do
    {"A100 80 GB", 79.1},
    {"H100 80 GB", 79.1},
    {"H200", 139.8},
    {"A100 40 GB", 39.4},
    {"B200", 178.3},
    {"L40S, other 48 GB with ECC", 44.4},
    {"RTX 5090", 31.3},
    {"RTX 4090, 3090", 23.5},
    {"RTX 4080, other 16 GB", 15.4},
    {"RTX 3060, other 12 GB", 11.5},
};

static size_t card_usable_bytes(int card) { return (size_t)(cards[card].gib * GIBIBYTE - CARD_RESERVED); }

// ---- machines ------------------------------------------------------------------------------------------------------
// The source of a constant, in the order of basis_names.
typedef enum { BASIS_MEASURED, BASIS_DATA_SHEET, BASIS_ASSUMED, BASES } Basis;
static const char *const basis_names[BASES] = {
    "measured by NVIDIA (cudnn-frontend's benchmarks, 2026-02-27: H200, cuDNN 9.19.1, 4096 queries and keys)",
    "NVIDIA's data sheets (dense; links in one direction)", "assumed"};

typedef enum {
    GPUS_PER_NODE,
    PEAK_FLOPS, // per second, as the next three
    PRODUCT_FLOPS,
    ATTENTION_FORWARD_FLOPS,   // by cuDNN, as the next four; of pairs without a mask
    MASKED_FORWARD_FLOPS,      // of AttentionCounts.masked
    ATTENTION_BACKWARD_FLOPS,  // deterministic
    ATTENTION_ANY_ORDER_FLOPS, // backward, sums in any order
    MASKED_ANY_ORDER_FLOPS,
    OWN_FORWARD_FLOPS, // attention by our own kernels
    OWN_BACKWARD_FLOPS,
    MEMORY_BANDWIDTH, // bytes per second of a GPU, as the next two
    LINK_WITHIN,      // to the GPUs of its own node
    LINK_BETWEEN,     // to those of other nodes
    LINK_HOST,        // to host memory, one way
    MEMORY_SHARE,     // of that bandwidth that ops reach
    LINK_SHARE,       // and large messages
    HOP_WITHIN,       // seconds from one GPU to the next in a collective, however small the message
    HOP_BETWEEN,
    LAUNCH_GAP, // seconds from the end of a kernel to the start of the next
    MACHINE_CONSTANTS
} MachineConstant;

// As people read them: value / unit is what is printed.
static const struct {
    const char *name, *suffix;
    double unit;
    Basis basis; // BASIS_MEASURED: of the machine that was measured, else assumed
} machine_constants[MACHINE_CONSTANTS] = {
    {"GPUs of a node", "", 1, BASIS_DATA_SHEET},
    {"peak", " TFLOP/s", 1e12, BASIS_DATA_SHEET},
    {"products", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"attention forward", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"causal", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention backward", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"attention backward in any order", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"causal", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention forward by our own kernels", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"backward", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"memory bandwidth", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link within a node", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link between nodes", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link to the host", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"memory bandwidth reached", " %", 0.01, BASIS_ASSUMED},
    {"link bandwidth reached", " %", 0.01, BASIS_ASSUMED},
    {"hop within a node", " us", 1e-6, BASIS_ASSUMED},
    {"hop between nodes", " us", 1e-6, BASIS_ASSUMED},
    {"gap between kernels", " us", 1e-6, BASIS_ASSUMED},
};

typedef struct {
    const char *name, *gpu;
    int measured;
    double value[MACHINE_CONSTANTS]; // in the order above
} Machine;

// Attention by cuDNN: h200_919_only_cudnn/llama3.1_20260227_034703.csv of NVIDIA/cudnn-frontend, 64 heads, its rows of
// 4096 queries and keys, without a mask and causal: a call over more keys is such squares on the diagonal and the rest
// without a mask. Longer ones reach more there (causal, 32768 tokens: forward 688, backward 581), shorter ones less;
// all ran for milliseconds. Backward in a fixed order writes dS to memory and reads it again: the one such row there
// (heads of 192 and 128) has 404 at 4096 tokens and 442 at 8192; FlashAttention-3 falls from 575 to 474.
// Products: cuBLASLt is usually reported at 770 to 800 TFLOP/s for some milliseconds; 680 is assumed of minutes at
// 700 W, with the epilogue of dW's products, whose fp32 sums go in and out beside the next tile's arithmetic. Our own
// attention is mma.sync at two fifths of what that instruction does, backward computes 7 products for 5.
// An H100 is taken to be as fast as an H200, an A100 to reach the same shares of its own peak, but for mma.sync, whose
// peak is all of its own.
// Links of a GPU: NVLink of 600 (A100), 900 GB/s (H100, H200) in both directions together; InfiniBand of 200 Gb/s
// (HDR), 400 Gb/s (NDR), an adapter for each GPU. To the host: PCIe 4.0 x16 (A100), 5.0 x16.
// Shares, hops and gaps are of the usual order for kernels bound by memory and for NCCL's rings; nobody has measured
// them here.
#define SHARES_HOPS_GAP 0.85, 0.8, 2e-6, 5e-6, 1.5e-6
#define OF_H100(flops)  (312e12 * (flops) / 989)
#define RATES_OF_H100   989e12, 680e12, 671e12, 591e12, 440e12, 560e12, 474e12, 250e12, 145e12

typedef enum { MACHINE_A100, MACHINE_H100, MACHINE_H200, MACHINES } MachineName;

static const Machine machines[MACHINES] = {
    {"a100",
     "A100 SXM 80 GB",
     0,
     {8, 312e12, OF_H100(680), OF_H100(671), OF_H100(591), OF_H100(440), OF_H100(560), OF_H100(474), 125e12, 73e12,
      2.0e12, 300e9, 25e9, 32e9, SHARES_HOPS_GAP}},
    {"h100", "H100 SXM", 0, {8, RATES_OF_H100, 3.35e12, 450e9, 50e9, 64e9, SHARES_HOPS_GAP}},
    {"h200", "H200 SXM", 1, {8, RATES_OF_H100, 4.8e12, 450e9, 50e9, 64e9, SHARES_HOPS_GAP}},
};
#undef SHARES_HOPS_GAP
#undef OF_H100
#undef RATES_OF_H100

static size_t machine_usable_bytes(const Machine *m) { return card_usable_bytes((int)(m - machines)); }

// FLOPs of products that it does in the time in which memory brings a byte (op set "dry" wants to know).
static double machine_ridge(const Machine *m) {
    return m->value[PRODUCT_FLOPS] / (m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE]);
}

// The library that attention of this model is planned with on a machine; NULL: none takes it
static const char *machine_attends(const Model *model) {
    const Config *c = &model->config;
    return model->dtype == DTYPE_BF16 && c->head_dim % 8 == 0 && c->head_dim <= 128 ? "cuDNN" : NULL;
}

// Two lines for each basis that some constant has, and one of the memory.
static void machine_print(FILE *out, const Machine *m) {
    const char *head = "machine";
    for (int basis = 0; basis < BASES; basis++) {
        int printed = 0;
        for (int i = 0; i < MACHINE_CONSTANTS; i++) {
            const Basis from = machine_constants[i].basis;
            if ((from == BASIS_MEASURED && !m->measured ? BASIS_ASSUMED : from) != (Basis)basis) continue;
            if (printed++)
                fputs(", ", out);
            else
                fprintf(out, "%-8s %s:\n         ", head, basis_names[basis]);
            fprintf(out, "%s %.4g%s", machine_constants[i].name, m->value[i] / machine_constants[i].unit,
                    machine_constants[i].suffix);
        }
        if (printed) fputc('\n', out), head = "";
    }
    fprintf(out, "         memory for a plan: %s; CUDA's total in public reports of 2023 to 2026, less 1 GiB\n",
            human_bytes((double)machine_usable_bytes(m)));
}

// Share of attention's work that our own kernels do
static double own_share(const OpCounts *w) {
    return (w->own_forward + w->own_backward) / fmax(w->attention_forward + w->attention_backward, 1);
}

// ---- how long things take ------------------------------------------------------------------------------------------
// Seconds of counted work; memory: of what is bound by it alone; gaps: between kernels
typedef struct {
    double products, attention_forward, attention_backward, memory, gaps;
} WorkTime;

static WorkTime work_time(const Machine *m, OpCounts w) {
    const double bandwidth = m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE];
    const double products = w.flops - w.attention_forward - w.attention_backward;
    WorkTime t;
    t.products = fmax((products + w.stalled) / m->value[PRODUCT_FLOPS], w.operands / bandwidth);
    t.attention_forward = (w.attention_forward - w.own_forward - w.masked_forward) / m->value[ATTENTION_FORWARD_FLOPS] +
                          w.masked_forward / m->value[MASKED_FORWARD_FLOPS] +
                          w.own_forward / m->value[OWN_FORWARD_FLOPS];
    t.attention_backward = (w.attention_backward - w.any_order - w.own_backward) / m->value[ATTENTION_BACKWARD_FLOPS] +
                           (w.any_order - w.masked_any_order) / m->value[ATTENTION_ANY_ORDER_FLOPS] +
                           w.masked_any_order / m->value[MASKED_ANY_ORDER_FLOPS] +
                           w.own_backward / m->value[OWN_BACKWARD_FLOPS];
    t.memory = w.moved / bandwidth;
    t.gaps = w.launches * m->value[LAUNCH_GAP];
    return t;
}

static double work_seconds(const Machine *m, OpCounts w) {
    const WorkTime t = work_time(m, w);
    return t.products + t.attention_forward + t.attention_backward + t.memory + t.gaps;
}

// Seconds of collectives in which each rank of a group of `size` sends `bytes` in so many hops, in rings: round the
// ranks of a node and on to the next node. There are as many rings as a node has ranks in the group, so that the
// adapters of all are in use. All ranks fill node after node, and groups follow each other.
static double ring_seconds(const Machine *m, size_t ranks, size_t size, double bytes, double hops) {
    const size_t node = (size_t)m->value[GPUS_PER_NODE];
    const double together = (double)(ranks <= node ? size : greatest_common_divisor(node, size)); // surely in a node
    const double nodes = (double)size / together;
    double bandwidth = m->value[LINK_WITHIN], between = 0;
    if (size <= 1) return 0;
    if (nodes > 1) {
        bandwidth = fmin(bandwidth, together * m->value[LINK_BETWEEN]);
        between = (nodes - 1) / (double)(size - 1); // of the hops
    }
    return bytes / (bandwidth * m->value[LINK_SHARE]) +
           hops * (between * m->value[HOP_BETWEEN] + (1 - between) * m->value[HOP_WITHIN]);
}

#endif
