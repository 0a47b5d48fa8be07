/*
How long a step would take: the work and the traffic of its plan over what a machine can do (machine.h). Nothing is
measured here, and whatever shows it calls it estimated.

    work        of each product max(FLOPs / rate, bytes of operands / bandwidth), + attention forward / rate
                + attention backward / rate + bytes that the ops in between move, and those that attention stages
                / bandwidth + kernels * gap
    traffic     bytes that a rank sends / bandwidth of the slowest link on the group's way + hops * time of a hop

    a sequence  max(F, W/2, H) + max(B, W/2 + G, H) + KV
    a step      its sequences one after the other + the optimizer + U

F, B: work of the forward and of the backward pass (with what it computes again) of this rank's tokens. G: gradients
that are added up over the ranks while it goes on with the next layer; where they are added up once a step, of its last
sequence alone. W: weights of stage 3, gathered one layer ahead, once in either pass. KV: keys, values and their
gradients, which nothing goes on beside; round a ring (llmc/orders/ring.h) they pass while attention works, and are
hidden like W and G: keys and values once forward, and backward twice, or once where attention is not run again. H:
what --keep attention keeps in host memory, on its way there or back. U: weights that come together again after the
optimizer's step, in stages 1 and 2.

Layers are alike, so that the longer of two things within each of them is the longer of their sums. Ranks have equal
work (causal attention is dealt so), and wait for nobody. Left out: the host, the data, checkpoints, and
what transfers take from the kernels that run beside them.
*/
#ifndef LLMC_ESTIMATE_H
#define LLMC_ESTIMATE_H
#include "machine.h"

typedef struct {
    size_t sequences;           // micro-batches of a rank
    double tokens, model_flops; // of all ranks; model_flops as Plan's
    double full_flops;          // model_flops_full_attention of all ranks
} StepShape;

typedef struct {
    double seconds;
    double communication; // of these, in which nothing is computed
    WorkTime work;        // and what is, of a rank; the optimizer's is memory's
    OpCounts counts;      // of one sequence
    double tokens_per_second, mfu;
    double mfu_full; // of StepShape.full_flops
    double executed; // FLOP/s of a rank
    Traffic sent;    // by a rank
} Estimate;

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

// Seconds of one sequence of a rank, from its F, B and H and its traffic.
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

// A training step, in chunks of a GPU build where none are asked for. part: the shape of a rank's part of a micro-batch
static Estimate estimate_step(const Machine *m, const RunSettings *settings, const Batch *part, StepShape step) {
    const World w = settings->world;
    const Traffic last = plan_traffic(settings, part, 1), two = plan_traffic(settings, part, 2);
    const Traffic other = traffic_less(two, last); // of a sequence but the last
    RunSettings here = *settings;                  // which of its products wait for their operands
    if (!here.chunk) here.chunk = CUDA_CHUNK;
    if (!here.logits_chunk) here.logits_chunk = CUDA_LOGITS_CHUNK;
    here.ridge = machine_ridge(m), here.library = machine_attends(settings->model) != NULL;
    Plan plan = plan_make(&here, part);
    Estimate e;
    const double host = (double)plan.host_bytes / (m->value[LINK_HOST] * m->value[LINK_SHARE]);
    double all = work_seconds(m, plan.counts);
    OpCounts update = {0};
    update.moved = update_bytes(settings);
    e.work = work_time(m, plan.counts), e.counts = plan.counts;
    here.backward = here.optimizer = 0; // the forward pass alone
    plan = plan_make(&here, part);
    double forward = work_seconds(m, plan.counts);
    double optimizer = work_seconds(m, update);
    e.work.products *= (double)step.sequences, e.work.memory *= (double)step.sequences;
    e.work.attention_forward *= (double)step.sequences, e.work.attention_backward *= (double)step.sequences;
    e.work.gaps *= (double)step.sequences;
    e.work.memory += optimizer;
    e.sent = plan_traffic(settings, part, step.sequences);
    e.seconds = (double)(step.sequences - 1) * sequence_seconds(m, settings, forward, all - forward, host, &other) +
                sequence_seconds(m, settings, forward, all - forward, host, &last) + optimizer;
    if (w.zero == 1 || w.zero == 2) e.seconds += sent_seconds(m, w, RANKS_ALL, &last, TRAFFIC_WEIGHTS);
    double computing = (double)step.sequences * all + optimizer;
    e.communication = fmax(e.seconds - computing, 0); // rounding
    e.tokens_per_second = step.tokens / e.seconds;
    const double peak = e.seconds * (double)world_ranks(w) * m->value[PEAK_FLOPS];
    e.mfu = step.model_flops / peak, e.mfu_full = step.full_flops / peak;
    e.executed = (double)step.sequences * e.counts.flops / e.seconds;
    return e;
}

#endif
