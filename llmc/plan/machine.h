/*
What machines can do, and how long work and traffic take on them: a row for each kind of node, for the estimates of
estimate.h and the floors of profile.h alone. Rates are of bf16.

Where a number comes from stands beside it. "measured": on such a GPU, with the libraries that op set "cuda" calls.
"data sheet": NVIDIA's, dense and without sparsity, links in one direction. "assumed": neither; what that rests on is
said where it stands. Estimates are no better than these.
*/
#ifndef LLMC_MACHINE_H
#define LLMC_MACHINE_H
#include "llmc/ranks/world.h"
#include "llmc/base/utils.h"
#include "plan.h"

typedef enum { BASIS_MEASURED, BASIS_DATA_SHEET, BASIS_ASSUMED, BASES } Basis;

static const char *const basis_names[BASES] = {"measured", "data sheet", "assumed"};

typedef enum {
    GPUS_PER_NODE,
    MEMORY_BYTES,
    PEAK_FLOPS, // per second, as the next three
    PRODUCT_FLOPS,
    ATTENTION_FORWARD_FLOPS,
    ATTENTION_BACKWARD_FLOPS,
    MEMORY_BANDWIDTH, // bytes per second of a GPU, as the next two
    LINK_WITHIN,      // to the GPUs of its own node
    LINK_BETWEEN,     // to those of other nodes
    LINK_HOST,        // to host memory, one way
    MEMORY_SHARE,     // of that bandwidth that ops reach
    LINK_SHARE,       // and large messages
    HOP_WITHIN,       // seconds from one GPU to the next in a collective, however small the message
    HOP_BETWEEN,
    MACHINE_CONSTANTS
} MachineConstant;

// As people read them: value / unit is what is printed.
static const struct {
    const char *name, *suffix;
    double unit;
} machine_constants[MACHINE_CONSTANTS] = {{"GPUs of a node", "", 1},
                                          {"memory", " GiB", 1024.0 * 1024 * 1024},
                                          {"peak", " TFLOP/s", 1e12},
                                          {"products", " TFLOP/s", 1e12},
                                          {"attention forward", " TFLOP/s", 1e12},
                                          {"attention backward", " TFLOP/s", 1e12},
                                          {"memory bandwidth", " GB/s", 1e9},
                                          {"link within a node", " GB/s", 1e9},
                                          {"link between nodes", " GB/s", 1e9},
                                          {"link to the host", " GB/s", 1e9},
                                          {"memory bandwidth reached", " %", 0.01},
                                          {"link bandwidth reached", " %", 0.01},
                                          {"hop within a node", " us", 1e-6},
                                          {"hop between nodes", " us", 1e-6}};

typedef struct {
    const char *name, *gpu;
    double value[MACHINE_CONSTANTS]; // in the order above
    Basis basis[MACHINE_CONSTANTS];
} Machine;

// Measured on H100 and H200, bf16: cuBLASLt's products 770 to 800 TFLOP/s; cuDNN 9.19, causal attention over 32k tokens
// with heads of 128, forward 688 and backward 581. An A100 is taken to reach the same shares of its own peak.
// Memory: the GB of the data sheets are 2^30 bytes, less what the driver keeps.
// Links of a GPU: NVLink of 600 (A100), 900 GB/s (H100, H200) in both directions together; InfiniBand of 200 Gb/s
// (HDR), 400 Gb/s (NDR), an adapter for each GPU. To the host: PCIe 4.0 x16 (A100), 5.0 x16.
// Shares and hops are of the usual order for kernels bound by memory and for NCCL's rings; nobody has measured them
// here.
#define GIBIBYTE           (1024.0 * 1024 * 1024)
#define SHEET              BASIS_DATA_SHEET
#define SHARES_AND_HOPS    0.85, 0.8, 2e-6, 5e-6
#define SHARES_ARE_ASSUMED BASIS_ASSUMED, BASIS_ASSUMED, BASIS_ASSUMED, BASIS_ASSUMED

typedef enum { MACHINE_A100, MACHINE_H100, MACHINE_H200, MACHINES } MachineName;

static const Machine machines[MACHINES] = {
    {"a100",
     "A100 SXM 80 GB",
     {8, 80 * GIBIBYTE, 312e12, 312e12 * 780 / 989, 312e12 * 688 / 989, 312e12 * 581 / 989, 2.0e12, 300e9, 25e9, 32e9,
      SHARES_AND_HOPS},
     {SHEET, SHEET, SHEET, BASIS_ASSUMED, BASIS_ASSUMED, BASIS_ASSUMED, SHEET, SHEET, SHEET, SHEET,
      SHARES_ARE_ASSUMED}},
    {"h100",
     "H100 SXM",
     {8, 80 * GIBIBYTE, 989e12, 780e12, 688e12, 581e12, 3.35e12, 450e9, 50e9, 64e9, SHARES_AND_HOPS},
     {SHEET, SHEET, SHEET, BASIS_MEASURED, BASIS_MEASURED, BASIS_MEASURED, SHEET, SHEET, SHEET, SHEET,
      SHARES_ARE_ASSUMED}},
    {"h200",
     "H200 SXM",
     {8, 141 * GIBIBYTE, 989e12, 780e12, 688e12, 581e12, 4.8e12, 450e9, 50e9, 64e9, SHARES_AND_HOPS},
     {SHEET, SHEET, SHEET, BASIS_MEASURED, BASIS_MEASURED, BASIS_MEASURED, SHEET, SHEET, SHEET, SHEET,
      SHARES_ARE_ASSUMED}},
};
#undef SHEET
#undef SHARES_AND_HOPS
#undef SHARES_ARE_ASSUMED

static double machine_value(const Machine *m, MachineConstant constant) { return m->value[constant]; }

// FLOPs of products that it does in the time in which memory brings a byte (op set "dry" wants to know).
static double machine_ridge(const Machine *m) {
    return machine_value(m, PRODUCT_FLOPS) / (machine_value(m, MEMORY_BANDWIDTH) * machine_value(m, MEMORY_SHARE));
}

// A line for each basis that some constant has.
static void machine_print(FILE *out, const Machine *m) {
    const char *head = "machine";
    for (int basis = 0; basis < BASES; basis++) {
        int printed = 0;
        for (int i = 0; i < MACHINE_CONSTANTS; i++) {
            if (m->basis[i] != (Basis)basis) continue;
            if (printed++)
                fputs(", ", out);
            else
                fprintf(out, "%-8s %s: ", head, basis_names[basis]);
            fprintf(out, "%s %.4g%s", machine_constants[i].name, m->value[i] / machine_constants[i].unit,
                    machine_constants[i].suffix);
        }
        if (printed) fputc('\n', out), head = "";
    }
}

// ---- how long things take ------------------------------------------------------------------------------------------
typedef struct {
    double products, attention_forward, attention_backward; // FLOPs
    double operands;                                        // bytes that products read and write
    double stalled;                                         // FLOPs of products that wait for them meanwhile
    double moved;                                           // and what is bound by memory alone
} Work;

// The same in seconds; memory: of what is bound by it alone.
typedef struct {
    double products, attention_forward, attention_backward, memory;
} WorkTime;

static WorkTime work_time(const Machine *m, Work w) {
    const double bandwidth = machine_value(m, MEMORY_BANDWIDTH) * machine_value(m, MEMORY_SHARE);
    WorkTime t;
    t.products = fmax((w.products + w.stalled) / machine_value(m, PRODUCT_FLOPS), w.operands / bandwidth);
    t.attention_forward = w.attention_forward / machine_value(m, ATTENTION_FORWARD_FLOPS);
    t.attention_backward = w.attention_backward / machine_value(m, ATTENTION_BACKWARD_FLOPS);
    t.memory = w.moved / bandwidth;
    return t;
}

static double work_seconds(const Machine *m, Work w) {
    const WorkTime t = work_time(m, w);
    return t.products + t.attention_forward + t.attention_backward + t.memory;
}

// Ranks of a group of `size` that are sure to share a node: all ranks fill node after node, and groups follow each
// other.
static size_t ranks_per_node(const Machine *m, size_t ranks, size_t size) {
    const size_t node = (size_t)machine_value(m, GPUS_PER_NODE);
    return ranks <= node ? size : greatest_common_divisor(node, size);
}

// Seconds of collectives in which each rank of a group of `size` sends `bytes` in so many hops, in rings: round the
// ranks of a node and on to the next node. There are as many rings as a node has ranks in the group, so that the
// adapters of all are in use.
static double ring_seconds(const Machine *m, size_t ranks, size_t size, double bytes, double hops) {
    const double together = (double)ranks_per_node(m, ranks, size), nodes = (double)size / together;
    double bandwidth = machine_value(m, LINK_WITHIN), between = 0;
    if (size <= 1) return 0;
    if (nodes > 1) {
        bandwidth = fmin(bandwidth, together * machine_value(m, LINK_BETWEEN));
        between = (nodes - 1) / (double)(size - 1); // of the hops
    }
    return bytes / (bandwidth * machine_value(m, LINK_SHARE)) +
           hops * (between * machine_value(m, HOP_BETWEEN) + (1 - between) * machine_value(m, HOP_WITHIN));
}

#endif
