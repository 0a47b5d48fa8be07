/*
Estimates how long a step takes: the work and traffic of its plan divided by a machine's rates (machine.h). Nothing is
measured here; code that prints these numbers calls them estimated.

    work        sum of products' max(FLOPs / rate, bytes of operands / bandwidth), products of experts in whole tiles at
                a rate of their own, + attention forward / rate
                + attention backward / rate + (bytes that other ops move + bytes that attention stages) / bandwidth
                + kernels * gap
    traffic     bytes that a rank sends / bandwidth of the group's slowest link + hops * time of a hop
    transfers   max of: bytes through the host's link / its bandwidth, both directions at once at 0.85 each;
                bytes to the disk / its rate + bytes from it / its rate, shared by the ranks of a node;
                bytes / the bandwidth of host memory, shared by them, too
    a sequence  max(F, W/2, P_F) + max(B, W/2 + G, P_B) + KV
    a step      its sequences one after the other + max(O, P_O) + U
                --update forward: O and P_O belong to the first sequence's forward pass

F, B   work of this rank's forward and backward pass, recomputation included
O      work of the optimizer's step
P      transfers between places (llmc/stream/pager.h), counted by the plan; each byte is also work of device memory
G      all-reduce of gradients, overlapped with the next layer; summed in place, only that of a step's last sequence
W      ZeRO-3's weights, gathered one layer ahead, once per pass
KV     keys, values and their gradients, overlapped with nothing. Round a ring (llmc/orders/ring.h) attention overlaps
       them: K, V once forward, and backward twice, or once if attention is not run again
U      gather of the updated weights, ZeRO-1 and 2

Assumed: layers are equal, so the maximum per layer is the maximum of the sums; ranks have equal work and do not wait
for each other. Left out: the host's own work, data, checkpoints.
*/
#ifndef LLMC_ESTIMATE_H
#define LLMC_ESTIMATE_H
#include "machine.h"

typedef struct {
    size_t sequences;           // micro-batches of a rank
    double tokens, model_flops; // sums over all ranks; model_flops: see Plan
    double full_flops;          // model_flops_full_attention, summed over all ranks
} StepShape;

typedef struct {
    double seconds;
    double on_device;     // seconds if nothing moved between places
    double communication; // the part of `seconds` without computation
    WorkTime work;        // work of a rank; the optimizer's work counts as memory
    OpCounts counts;      // counts of one sequence
    double tokens_per_second, mfu;
    double mfu_full; // MFU if model FLOPs are StepShape.full_flops
    double executed; // FLOP/s that a rank executes
    Traffic sent;    // bytes that a rank sends
} Estimate;

// Returns the bytes that a rank reads and writes in its optimizer step: the gradient twice (its norm comes first),
// moments in and out, master weights in and out or weights in, weights out.
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

#define LINK_BOTH      1.7    // (rate of the host's link, both directions at once) / (rate of one direction): an H100's
#define HOST_BANDWIDTH 0.6e12 // bytes per second of a node's memory, shared by its ranks: assumed

// Returns the seconds of a phase's transfers between places.
static double moved_seconds(const Machine *m, World w, const double bytes[WAYS]) {
    const double link = m->value[LINK_HOST] * m->value[LINK_SHARE];
    const double sharing = fmin((double)world_ranks(w), m->value[GPUS_PER_NODE]);
    const double out = bytes[WAY_HOST_OUT] + bytes[WAY_DISK_OUT], in = bytes[WAY_HOST_IN] + bytes[WAY_DISK_IN];
    const double disk = bytes[WAY_DISK_OUT] / m->value[DISK_WRITE] + bytes[WAY_DISK_IN] / m->value[DISK_READ];
    const double host = (out + in) / HOST_BANDWIDTH;
    return fmax(fmax(fmax(out, in), (out + in) / LINK_BOTH) / link, sharing * fmax(host, disk));
}

// Returns the seconds that these transfers occupy a rank's device memory.
static double moved_work(const Machine *m, const double bytes[WAYS]) {
    double sum = 0;
    for (int way = 0; way < WAYS; way++) sum += bytes[way];
    return sum / (m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE]);
}

// Work and traffic of a sequence, independent of places
typedef struct {
    OpCounts counts;
    double forward, backward; // seconds: F, B
    double update;            // seconds: O
    Traffic last, other;      // traffic of the step's last sequence, and of each sequence before it
} PassWork;

// A result of pass_work, kept while the model and its adapters do not change: dry runs of millions of tokens take
// seconds
typedef struct {
    const Machine *machine;
    RunSettings settings;
    size_t N, documents, first, forks; // shape of the part's rows; first: tokens of its first document or chain
    PassWork work;
} KnownWork;

typedef struct {
    KnownWork known[256];
    size_t count;
} PassWorks;

static PassWorks *pass_works; // NULL: results are not kept

// Returns the directions in which a library computes attention: as the device says, or as planned.
static int estimated_library(const Machine *m, const RunSettings *settings) {
    return settings->library & LIBRARY_ASKED ? settings->library : machine_attends(m, settings->model);
}

// Counts the passes over a rank's part of a micro-batch with dry runs.
static PassWork pass_work(const Machine *m, const RunSettings *settings, const Batch *part) {
    RunSettings here = *settings;
    OpCounts update = {0};
    PassWork work;
    const Batch *const rows = batch_rows(part);
    const size_t first = rows->documents ? rows->document_start[1] : 0, forks = part->tree ? part->tree->forks : 0;
    for (size_t i = 0; pass_works && i < pass_works->count; i++) {
        const KnownWork *k = &pass_works->known[i];
        if (k->machine == m && k->N == rows->N && k->documents == rows->documents && k->first == first &&
            k->forks == forks && !memcmp(&k->settings, settings, sizeof(*settings)))
            return k->work;
    }
    work.last = plan_traffic(settings, part, 1);
    work.other = traffic_less(plan_traffic(settings, part, 2), work.last);
    here.ridge = machine_ridge(m), here.library = estimated_library(m, settings);
    here.rates = machine_kernels(m);
    work.counts = plan_make(&here, part).counts;
    here.backward = here.optimizer = 0; // count only the forward pass
    work.forward = work_seconds(m, plan_make(&here, part).counts);
    work.backward = work_seconds(m, work.counts) - work.forward;
    update.moved = update_bytes(settings);
    work.update = work_seconds(m, update);
    if (pass_works && pass_works->count < sizeof(pass_works->known) / sizeof(KnownWork)) {
        const KnownWork known = {m, *settings, rows->N, rows->documents, first, forks, work};
        pass_works->known[pass_works->count++] = known;
    }
    return work;
}

static double sequence_seconds(const Machine *m, const RunSettings *settings, const PassWork *work, const Moved *moved,
                               const Traffic *sent) {
    const World w = settings->world;
    const double gradients = sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_GRADIENTS);
    const double weights = w.zero == 3 ? sent_seconds(m, w, RANKS_ALL, sent, TRAFFIC_WEIGHTS) : 0;
    const double kv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEYS_VALUES);
    const double dkv = sent_seconds(m, w, RANKS_SEQUENCE, sent, TRAFFIC_KEY_VALUE_GRADIENTS);
    const double chain = (double)world_sp(w) * sent->bytes[TRAFFIC_STATES]; // sent by all ranks, one after another
    const double states = ring_seconds(m, world_ranks(w), world_sp(w), chain, sent->hops[TRAFFIC_STATES]);
    const double again =
        settings->keep.level || settings->method == METHOD_FULL ? 1 : 2; // rounds of the ring in backward
    const double *out = moved->bytes[PHASE_FORWARD], *back = moved->bytes[PHASE_BACKWARD];
    const double forward = fmax(work->forward + moved_work(m, out), moved_seconds(m, w, out));
    const double backward = fmax(work->backward + moved_work(m, back), moved_seconds(m, w, back));
    if (settings->ring)
        return fmax(forward, weights / 2 + kv / (1 + again)) +
               fmax(backward, weights / 2 + gradients + kv * again / (1 + again) + dkv) + states;
    return fmax(forward, weights / 2) + fmax(backward, weights / 2 + gradients) + kv + dkv + states;
}

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

// Estimates a training step.
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
    e.communication = fmax(e.seconds - computing, 0); // not below 0 by rounding
    e.tokens_per_second = step.tokens / e.seconds;
    const double peak = e.seconds * (double)world_ranks(settings->world) * m->value[PEAK_FLOPS];
    e.mfu = step.model_flops / peak, e.mfu_full = step.full_flops / peak;
    e.executed = sequences * e.counts.flops / e.seconds;
    return e;
}

#endif
