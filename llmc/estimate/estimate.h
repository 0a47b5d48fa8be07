/*
How long a step would take: the work and the traffic of its plan over what a machine can do (machine.h). Nothing is
measured here, and whatever shows it calls it estimated.

    work        of each product max(FLOPs / rate, bytes of operands / bandwidth), + attention forward / rate
                + attention backward / rate + bytes that the ops in between move, and those that attention stages
                / bandwidth + kernels * gap
    traffic     bytes that a rank sends / bandwidth of the slowest link on the group's way + hops * time of a hop

    transfers   bytes to host memory and from it, and through it to a disk and back / bandwidth of the host's link,
                both ways at once; bytes to the disk / its rate + bytes from it / its rate, which ranks of a node
                share; the longer of the two

    a sequence  max(F, W/2, P_F) + max(B, W/2 + G, P_B) + KV
    a step      its sequences one after the other + max(O, P_O) + U; of a step that waits for the next forward pass
                O and P_O are of its first sequence's forward pass

F, B: work of the forward and of the backward pass (with what it computes again) of this rank's tokens. P: transfers
between places (llmc/stream/pager.h) in either pass and in the optimizer's step O, counted by the plan; device memory
is read or written for each byte of them, which is work. G: gradients that are added up over the ranks while it goes on
with the next layer; where they are added up once a step, of its last sequence alone. W: weights of stage 3, gathered
one layer ahead, once in either pass. KV: keys, values and their gradients, which nothing goes on beside; round a ring
(llmc/orders/ring.h) they pass while attention works, and are hidden like W and G: keys and values once forward, and
backward twice, or once where attention is not run again. U: weights that come together again after the optimizer's
step, in stages 1 and 2.

Layers are alike, so that the longer of two things within each of them is the longer of their sums. Ranks have equal
work (causal attention is dealt so), and wait for nobody. Left out: the host's own work, the data, checkpoints.
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
    double on_device;     // seconds if nothing moved between places
    double communication; // of `seconds`, in which nothing is computed
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
                           (settings->moment_type == DTYPE_INT8 ? 4 * sizeof(float) / (double)MOMENT_BLOCK : 0) +
                           (settings->master ? 2 * sizeof(float) : stored) + stored;
    if (!settings->optimizer) return 0;
    return (double)table->elements * element / (settings->world.zero ? ranks : 1);
}

static double sent_seconds(const Machine *m, World w, RankGroup group, const Traffic *sent, TrafficKind kind) {
    return ring_seconds(m, world_ranks(w), ranks_in(w, group), sent->bytes[kind], sent->hops[kind]);
}

// Seconds in which what moves between places in a phase does so.
static double moved_seconds(const Machine *m, World w, const double bytes[WAYS]) {
    const double link = m->value[LINK_HOST] * m->value[LINK_SHARE];
    const double sharing = fmin((double)world_ranks(w), m->value[GPUS_PER_NODE]);
    return fmax(fmax(bytes[WAY_HOST_OUT] + bytes[WAY_DISK_OUT], bytes[WAY_HOST_IN] + bytes[WAY_DISK_IN]) / link,
                sharing * (bytes[WAY_DISK_OUT] / m->value[DISK_WRITE] + bytes[WAY_DISK_IN] / m->value[DISK_READ]));
}

// Seconds that a rank's device memory is busy with it.
static double moved_work(const Machine *m, const double bytes[WAYS]) {
    double sum = 0;
    for (int way = 0; way < WAYS; way++) sum += bytes[way];
    return sum / (m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE]);
}

// The work and the traffic of a sequence, which are the same wherever things lie.
typedef struct {
    OpCounts counts;
    double forward, backward; // seconds: F, B
    double update;            // O
    Traffic last, other;      // of the step's last sequence, and of each before it
} PassWork;

// In chunks of a GPU build where none are asked for. part: the shape of a rank's part of a micro-batch
static PassWork pass_work(const Machine *m, const RunSettings *settings, const Batch *part) {
    RunSettings here = *settings; // which of its products wait for their operands
    OpCounts update = {0};
    PassWork work;
    work.last = plan_traffic(settings, part, 1);
    work.other = traffic_less(plan_traffic(settings, part, 2), work.last);
    if (!here.chunk && here.method != METHOD_MST) here.chunk = CUDA_CHUNK;
    if (!here.logits_chunk && here.method != METHOD_MST) here.logits_chunk = CUDA_LOGITS_CHUNK;
    here.ridge = machine_ridge(m), here.library = machine_attends(settings->model) != NULL;
    work.counts = plan_make(&here, part).counts;
    here.backward = here.optimizer = 0; // the forward pass alone
    work.forward = work_seconds(m, plan_make(&here, part).counts);
    work.backward = work_seconds(m, work.counts) - work.forward;
    update.moved = update_bytes(settings);
    work.update = work_seconds(m, update);
    return work;
}

// Seconds of one sequence of a rank.
static double sequence_seconds(const Machine *m, const RunSettings *settings, const PassWork *work, const Moved *moved,
                               const Traffic *sent) {
    const World w = settings->world;
    const double gradients = sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_GRADIENTS);
    const double weights = w.zero == 3 ? sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_WEIGHTS) : 0;
    const double kv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEYS_VALUES);
    const double dkv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEY_VALUE_GRADIENTS);
    const double chain = (double)world_sp(w) * sent->bytes[TRAFFIC_STATES]; // each rank's, one after the other
    const double states = ring_seconds(m, world_ranks(w), world_sp(w), chain, sent->hops[TRAFFIC_STATES]);
    const double again = settings->keep || settings->method == METHOD_FULL ? 1 : 2; // rounds of the ring, backward
    const double *out = moved->bytes[PHASE_FORWARD], *back = moved->bytes[PHASE_BACKWARD];
    const double forward = fmax(work->forward + moved_work(m, out), moved_seconds(m, w, out));
    const double backward = fmax(work->backward + moved_work(m, back), moved_seconds(m, w, back));
    if (settings->ring)
        return fmax(forward, weights / 2 + kv / (1 + again)) +
               fmax(backward, weights / 2 + gradients + kv * again / (1 + again) + dkv) + states;
    return fmax(forward, weights / 2) + fmax(backward, weights / 2 + gradients) + kv + dkv + states;
}

// Seconds of a step of so many sequences.
static double step_seconds(const Machine *m, const RunSettings *settings, const PassWork *work, const Moved *moved,
                           size_t sequences) {
    const World w = settings->world;
    const double *update = moved->bytes[PHASE_UPDATE];
    PassWork first = *work;
    Moved with = *moved;
    double seconds = fmax(work->update + moved_work(m, update), moved_seconds(m, w, update));
    if (settings->defers) {
        seconds = 0, first.forward += work->update;
        for (int way = 0; way < WAYS; way++) with.bytes[PHASE_FORWARD][way] += update[way];
    }
    seconds += sequence_seconds(m, settings, &first, &with, &work->last);
    if (sequences > 1) seconds += (double)(sequences - 1) * sequence_seconds(m, settings, work, moved, &work->other);
    if (w.zero == 1 || w.zero == 2) seconds += sent_seconds(m, w, RANKS_ALL, &work->last, TRAFFIC_WEIGHTS);
    return seconds;
}

// A training step.
static Estimate estimate_step(const Machine *m, const RunSettings *settings, const Batch *part, StepShape step) {
    const PassWork work = pass_work(m, settings, part);
    const Moved moved = plan_make(settings, part).moved, still = {PHASE_FORWARD, {{0}}};
    const double sequences = (double)step.sequences;
    Estimate e;
    e.work = work_time(m, work.counts), e.counts = work.counts;
    e.work.products *= sequences, e.work.memory *= sequences, e.work.gaps *= sequences;
    e.work.attention_forward *= sequences, e.work.attention_backward *= sequences, e.work.delta *= sequences;
    e.work.memory += work.update;
    e.sent = plan_traffic(settings, part, step.sequences);
    e.seconds = step_seconds(m, settings, &work, &moved, step.sequences);
    e.on_device = step_seconds(m, settings, &work, &still, step.sequences);
    double computing = sequences * (work.forward + work.backward) + work.update;
    e.communication = fmax(e.seconds - computing, 0); // rounding
    e.tokens_per_second = step.tokens / e.seconds;
    const double peak = e.seconds * (double)world_ranks(settings->world) * m->value[PEAK_FLOPS];
    e.mfu = step.model_flops / peak, e.mfu_full = step.full_flops / peak;
    e.executed = sequences * e.counts.flops / e.seconds;
    return e;
}

#endif
