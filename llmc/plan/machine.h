/*
What machines can do: a row for each kind of node, for the estimates of estimate.h and the floors of profile.h, and
nothing else. Rates are of bf16.

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

typedef struct {
    double value;
    Basis basis;
} Constant;

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
    Constant constant[MACHINE_CONSTANTS]; // in the order above
} Machine;

// Measured on H100 and H200, bf16: cuBLASLt's products 770 to 800 TFLOP/s; cuDNN 9.19, causal attention over 32k tokens
// with heads of 128, forward 688 and backward 581. An A100 is taken to reach the same shares of its own peak.
// Memory: the GB of the data sheets are 2^30 bytes, less what the driver keeps.
// Links of a GPU: NVLink of 600 (A100), 900 GB/s (H100, H200) in both directions together; InfiniBand of 200 Gb/s
// (HDR), 400 Gb/s (NDR), an adapter for each GPU. To the host: PCIe 4.0 x16 (A100), 5.0 x16.
// Shares and hops are of the usual order for kernels bound by memory and for NCCL's rings; nobody has measured them
// here.
#define GIBIBYTE (1024.0 * 1024 * 1024)
#define MACHINE_ASSUMPTIONS                                                                                            \
    {0.85, BASIS_ASSUMED}, {0.8, BASIS_ASSUMED}, {2e-6, BASIS_ASSUMED}, { 5e-6, BASIS_ASSUMED }

typedef enum { MACHINE_A100, MACHINE_H100, MACHINE_H200, MACHINES } MachineName;

static const Machine machines[MACHINES] = {
    {"a100",
     "A100 SXM 80 GB",
     {{8, BASIS_DATA_SHEET},
      {80 * GIBIBYTE, BASIS_DATA_SHEET},
      {312e12, BASIS_DATA_SHEET},
      {312e12 * 780 / 989, BASIS_ASSUMED},
      {312e12 * 688 / 989, BASIS_ASSUMED},
      {312e12 * 581 / 989, BASIS_ASSUMED},
      {2.0e12, BASIS_DATA_SHEET},
      {300e9, BASIS_DATA_SHEET},
      {25e9, BASIS_DATA_SHEET},
      {32e9, BASIS_DATA_SHEET},
      MACHINE_ASSUMPTIONS}},
    {"h100",
     "H100 SXM",
     {{8, BASIS_DATA_SHEET},
      {80 * GIBIBYTE, BASIS_DATA_SHEET},
      {989e12, BASIS_DATA_SHEET},
      {780e12, BASIS_MEASURED},
      {688e12, BASIS_MEASURED},
      {581e12, BASIS_MEASURED},
      {3.35e12, BASIS_DATA_SHEET},
      {450e9, BASIS_DATA_SHEET},
      {50e9, BASIS_DATA_SHEET},
      {64e9, BASIS_DATA_SHEET},
      MACHINE_ASSUMPTIONS}},
    {"h200",
     "H200 SXM",
     {{8, BASIS_DATA_SHEET},
      {141 * GIBIBYTE, BASIS_DATA_SHEET},
      {989e12, BASIS_DATA_SHEET},
      {780e12, BASIS_MEASURED},
      {688e12, BASIS_MEASURED},
      {581e12, BASIS_MEASURED},
      {4.8e12, BASIS_DATA_SHEET},
      {450e9, BASIS_DATA_SHEET},
      {50e9, BASIS_DATA_SHEET},
      {64e9, BASIS_DATA_SHEET},
      MACHINE_ASSUMPTIONS}},
};

static double machine_value(const Machine *m, MachineConstant constant) { return m->constant[constant].value; }

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
            if (m->constant[i].basis != (Basis)basis) continue;
            if (printed++)
                fputs(", ", out);
            else
                fprintf(out, "%-8s %s: ", head, basis_names[basis]);
            fprintf(out, "%s %.4g%s", machine_constants[i].name, m->constant[i].value / machine_constants[i].unit,
                    machine_constants[i].suffix);
        }
        if (printed) fputc('\n', out), head = "";
    }
}

// ---- how long things take -------------------------------------------------------------------------------------------
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

// Of the `size` ranks of a group, those that are sure to share a node: `ranks` ranks fill node after node, and groups
// follow each other.
static size_t ranks_per_node(const Machine *m, size_t ranks, size_t size) {
    const size_t node = (size_t)machine_value(m, GPUS_PER_NODE);
    return ranks <= node ? size : greatest_common_divisor(node, size);
}

// Of collectives in which each of the `size` ranks of a group sends `bytes` in all, in so many hops, in rings: round
// the ranks of a node and on to the next node. There are as many rings as a node has ranks in the group, so that the
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

/*
How long a step would take: the work and the traffic of its plan over what a machine can do (machine.h). Nothing is
measured here, and whatever shows it calls it estimated.

    work        of each product max(FLOPs / rate, bytes of operands / bandwidth), + attention forward / rate
                + attention backward / rate + bytes that the ops in between move / bandwidth
    traffic     bytes that a rank sends / bandwidth of the slowest link on the group's way + hops * time of a hop

    a stream    max(F, W/2, H) + max(B, W/2 + G, H) + KV
    a step      its streams one after the other + the optimizer + U

F, B: work of the forward and of the backward pass (with what it computes again) of this rank's tokens. G: gradients
that are added up over the ranks while it goes on with the next layer; where they are added up once a step, of its
last stream alone. W: weights of stage 3, gathered one layer ahead, once in either pass. KV: keys, values and their
gradients, which nothing goes on beside; round a ring (llmc/stream/ring.h) they pass while attention works, and are hidden
like W and G: keys and values once forward, and backward twice, or once where attention is not run again. H: what
--keep attention keeps in host memory, on its way there or back. U: weights that come together again after the optimizer's
step, in stages 1 and 2.

Layers are alike, so that the longer of two things within each of them is the longer of their sums. Ranks have equal
work (causal attention is dealt so), and wait for nobody. Left out: the host, the data, checkpoints, and
what transfers take from the kernels that run beside them.
*/
typedef struct {
    size_t streams;             // of a rank
    double tokens, model_flops; // of all ranks; model_flops as Plan's
} StepShape;

typedef struct {
    double seconds;
    double communication; // of these, in which nothing is computed
    WorkTime work;        // and what is, of a rank; the optimizer's is memory's
    double tokens_per_second, mfu;
    Traffic sent; // by a rank
} Estimate;

static Work work_of(const Plan *plan) {
    Work work;
    work.attention_forward = plan->attention_forward, work.attention_backward = plan->attention_backward;
    work.products = plan->flops - plan->attention_forward - plan->attention_backward;
    work.operands = plan->operands, work.moved = plan->moved, work.stalled = plan->stalled;
    return work;
}

// Bytes that a rank reads and writes to step what it holds: the gradient twice (its norm comes first), moments in and
// out, and the master weights or else the weights in; the weights out.
static double update_bytes(const RunSettings *settings) {
    const Model *table = settings->lora ? &settings->lora->table : settings->model;
    const double stored = (double)dtype_size(table->dtype), ranks = (double)world_ranks(settings->world);
    const double element = 2 * (double)dtype_size(settings->gradient_type) +
                           4 * (double)dtype_size(settings->moment_type) +
                           (settings->master ? 2 * sizeof(float) : stored) + stored;
    if (!settings->optimizer) return 0;
    return (double)table->elements * element / (settings->world.zero ? ranks : 1);
}

static double sent_seconds(const Machine *m, World w, RankGroup group, const Traffic *sent, TrafficKind kind) {
    return ring_seconds(m, world_ranks(w), ranks_in(w, group), sent->bytes[kind], sent->hops[kind]);
}

// One stream of a rank: F, B and H in seconds, and what it sends.
static double sequence_seconds(const Machine *m, const RunSettings *settings, double forward, double backward,
                               double host, const Traffic *sent) {
    const World w = settings->world;
    const double gradients = sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_GRADIENTS);
    const double weights = w.zero == 3 ? sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_WEIGHTS) : 0;
    const double kv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEYS_VALUES);
    const double dkv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEY_VALUE_GRADIENTS);
    const double again = settings->keep || settings->method == METHOD_FULL ? 1 : 2; // rounds of the ring, backward
    forward = fmax(forward, host), backward = fmax(backward, host);
    if (settings->ring)
        return fmax(forward, weights / 2 + kv / (1 + again)) +
               fmax(backward, weights / 2 + gradients + kv * again / (1 + again) + dkv);
    return fmax(forward, weights / 2) + fmax(backward, weights / 2 + gradients) + kv + dkv;
}

static Traffic traffic_less(Traffic a, Traffic b) {
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
        a.bytes[kind] -= b.bytes[kind];
        a.calls[kind] -= b.calls[kind];
        a.hops[kind] -= b.hops[kind];
    }
    return a;
}

// A plan that knows which of its products wait for their operands.
static Plan plan_on(const Machine *m, const RunSettings *settings, const Batch *batch) {
    RunSettings here = *settings;
    here.ridge = machine_ridge(m);
    return plan_make(&here, batch);
}

// Of a run that trains. part: of a micro-batch, what this rank's streams are like.
static Estimate estimate_step(const Machine *m, const RunSettings *settings, const Batch *part, StepShape step) {
    const World w = settings->world;
    const Traffic last = plan_traffic(settings, part, 1), two = plan_traffic(settings, part, 2);
    const Traffic other = traffic_less(two, last); // of a stream but the last
    RunSettings forward_alone = *settings;
    Estimate e;
    Plan plan = plan_on(m, settings, part);
    const double host = (double)plan.host_bytes / (machine_value(m, LINK_HOST) * machine_value(m, LINK_SHARE));
    double all = work_seconds(m, work_of(&plan));
    Work update = {0, 0, 0, 0, 0, update_bytes(settings)};
    e.work = work_time(m, work_of(&plan));
    forward_alone.backward = forward_alone.optimizer = 0;
    plan = plan_on(m, &forward_alone, part);
    double forward = work_seconds(m, work_of(&plan));
    double optimizer = work_seconds(m, update);
    e.work.products *= (double)step.streams, e.work.memory *= (double)step.streams;
    e.work.attention_forward *= (double)step.streams, e.work.attention_backward *= (double)step.streams;
    e.work.memory += optimizer;
    e.sent = plan_traffic(settings, part, step.streams);
    e.seconds = (double)(step.streams - 1) * sequence_seconds(m, settings, forward, all - forward, host, &other) +
                sequence_seconds(m, settings, forward, all - forward, host, &last) + optimizer;
    if (w.zero == 1 || w.zero == 2) e.seconds += sent_seconds(m, w, RANKS_ALL, &last, TRAFFIC_WEIGHTS);
    double computing = (double)step.streams * all + optimizer;
    e.communication = fmax(e.seconds - computing, 0); // rounding
    e.tokens_per_second = step.tokens / e.seconds;
    e.mfu = step.model_flops / (e.seconds * (double)world_ranks(w) * machine_value(m, PEAK_FLOPS));
    return e;
}

#endif
