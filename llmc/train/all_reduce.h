/*
All-reduce of losses, token counts and metrics on the host, in rank order: identical bits on every rank. All ranks that
share a sequence have its loss and tokens, which count once. Tensors are reduced in residency.h.
*/
#ifndef LLMC_ALL_REDUCE_H
#define LLMC_ALL_REDUCE_H
#include "llmc/ranks/dist.h"
#include "llmc/data/objective.h"

// Returns a rank's contribution to a sum over sequences.
static double once_per_sequence(World w, double value) { return w.rank % world_sp(w) ? 0 : value; }

// Sums `values` of this rank's sequence over all sequences.
static void sum_over_sequences(World w, double *values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] = once_per_sequence(w, values[i]);
    dist_sum(RANKS_ALL, values, count);
}

static TargetCounts target_counts_over_sequences(World w, TargetCounts counts) {
    double sums[4] = {counts.tokens, counts.documents, counts.groups, counts.batches};
    sum_over_sequences(w, sums, 4);
    counts.tokens = sums[0], counts.documents = sums[1], counts.groups = sums[2], counts.batches = sums[3];
    return counts;
}

// All-gathers to [ranks][bytes], in memory that the first step allocates and later steps reuse.
static void *gather_from_all(World w, const void *own, size_t bytes) {
    static void *all;
    static size_t room;
    if (world_ranks(w) * bytes > room) {
        free(all);
        all = checked_malloc(room = world_ranks(w) * bytes, "the gathered values of all ranks");
    }
    dist_gather(RANKS_ALL, own, bytes, all);
    return all;
}

static double max_over_ranks(World w, double value) {
    if (world_ranks(w) == 1) return value;
    const double *all = (const double *)gather_from_all(w, &value, sizeof(value));
    double most = all[0];
    for (size_t r = 1; r < world_ranks(w); r++) most = fmax(most, all[r]);
    return most;
}

// ---- metrics --------------------------------------------------------------------------------------------------------
#define METRIC_NAME 64

typedef struct {
    char name[METRIC_NAME]; // "": no metric
    Metric metric;          // its name is the field `name`
} MetricRecord;

// Returns a permanent copy of the name, since other ranks may send a metric that this rank does not have.
static const char *metric_name_kept(const char *name) {
    static char kept[2 * METRICS_MOST][METRIC_NAME];
    size_t i;
    for (i = 0; i < 2 * METRICS_MOST && *kept[i] && strcmp(kept[i], name) != 0; i++) continue;
    if (i == 2 * METRICS_MOST) die("internal: more than %d names of metrics; please report it", 2 * METRICS_MOST);
    if (!*kept[i]) snprintf(kept[i], METRIC_NAME, "%s", name);
    return kept[i];
}

// Adds kto's metric rewards/margins: the mean chosen reward minus the mean rejected reward, if both exist.
static void metrics_margin(Metrics *metrics) {
    double mean[2] = {0, 0};
    size_t found = 0;
    for (size_t i = 0; i < metrics->count; i++) {
        const Metric *m = &metrics->metric[i];
        if (!strcmp(m->name, "rewards/margins")) return; // pairs have this metric already
        const int rejected = !strcmp(m->name, "rewards/rejected");
        if (m->count == 0 || (!rejected && strcmp(m->name, "rewards/chosen") != 0)) continue;
        mean[rejected] = m->sum / m->count, found++;
    }
    if (found == 2) metric_add(metrics, "rewards/margins", mean[0] - mean[1], 1);
}

static void metrics_over_ranks(World w, Metrics *metrics) {
    MetricRecord own[METRICS_MOST];
    if (world_ranks(w) == 1) return;
    memset(own, 0, sizeof(own));
    for (size_t i = 0; i < metrics->count; i++) {
        snprintf(own[i].name, METRIC_NAME, "%s", metrics->metric[i].name);
        own[i].metric = metrics->metric[i];
        if (!once_per_sequence(w, 1)) own[i].metric.sum = own[i].metric.count = own[i].metric.squares = 0;
    }
    const MetricRecord *all = (const MetricRecord *)gather_from_all(w, own, sizeof(own));
    metrics->count = 0;
    for (size_t i = 0; i < world_ranks(w) * METRICS_MOST; i++) {
        if (!*all[i].name) continue;
        Metric more = all[i].metric;
        more.name = metric_name_kept(all[i].name);
        metric_merge(metrics, &more);
    }
}

// Merges the metrics of all sequences of a step.
static void metrics_over_sequences(World w, Metrics *metrics) {
    metrics_over_ranks(w, metrics);
    metrics_margin(metrics);
}

// ---- traffic --------------------------------------------------------------------------------------------------
// Returns the traffic since `before`, averaged over ranks and divided by `divisor`.
static Traffic sent_since(World w, const Traffic *before, const Traffic *now, double divisor) {
    Traffic sent = traffic_less(*now, *before);
    dist_sum(RANKS_ALL, sent.bytes, TRAFFIC_KINDS);
    dist_sum(RANKS_ALL, sent.calls, TRAFFIC_KINDS);
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
        sent.bytes[kind] /= divisor * (double)world_ranks(w);
        sent.calls[kind] /= divisor * (double)world_ranks(w);
    }
    return sent;
}

static double traffic_bytes(const Traffic *sent) {
    double bytes = 0;
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) bytes += sent->bytes[kind];
    return bytes;
}

#endif
