/*
Objectives as weights per token. For every objective here dL/dlogits[t] = w[t]/tau * (onehot(target) - softmax(logits/tau))
with w[t] = dL/dlogp[t]: an objective turns log-probabilities of the targets (and what else a batch knows of them) into the loss
and w.

    sft   L = -sum_t loss_weight[t] logp[t] / Z,  w[t] = -loss_weight[t] / Z
          Z = sum of loss_weight over the counted targets of the whole accumulated batch (for masks of 0 and 1: their number)
*/
#ifndef LLMC_OBJECTIVE_H
#define LLMC_OBJECTIVE_H
#include "batch.h"
#include "dtype.h"

typedef enum {
    OBJECTIVE_SFT,
    OBJECTIVE_DPO,
    OBJECTIVE_SIMPO,
    OBJECTIVE_ORPO,
    OBJECTIVE_GRPO,
    OBJECTIVE_GSPO,
    OBJECTIVE_PPO
} ObjectiveKind;
typedef enum { DPO_SIGMOID, DPO_IPO, DPO_HINGE } DpoLoss;
typedef enum { NORMALISE_GRPO, NORMALISE_BNPO, NORMALISE_DR_GRPO, NORMALISE_DAPO } Normalisation;

typedef struct {
    ObjectiveKind kind;
    DpoLoss dpo_loss;
    Normalisation normalisation;
    double beta, label_smoothing, gamma, clip_low, clip_high;
    double temperature;       // logits are divided by it; 1 but for grpo, gspo and ppo
    double completion_tokens; // dr_grpo: the most that a completion may have
} Objective;

// What an objective's weights wait for.
typedef enum {
    WEIGHTS_AT_ONCE,  // nothing: they are known before the head runs
    WEIGHTS_BY_TOKEN, // the token's own log-probability
    WEIGHTS_BY_STREAM // those of the whole stream
} ObjectiveWeights;

static inline ObjectiveWeights objective_weights_wait(const Objective *o) {
    (void)o;
    return WEIGHTS_AT_ONCE;
}

// Whether the batch must know the reference's log-probabilities.
static inline int objective_needs_reference(const Objective *o) {
    (void)o;
    return 0;
}

// Whether the entropy of the distributions is wanted, for its metrics.
static inline int objective_has_entropy(const Objective *o) {
    return o->kind == OBJECTIVE_GRPO || o->kind == OBJECTIVE_GSPO || o->kind == OBJECTIVE_PPO;
}

// What the step's losses are divided by.
static inline double objective_normaliser(const Objective *o, Counts counts) {
    (void)o;
    return counts.tokens;
}

static inline double value_at(const void *values, DType type, size_t i) {
    return type == DTYPE_FP64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
}

static inline void value_set(void *values, DType type, size_t i, double value) {
    if (type == DTYPE_FP64)
        ((double *)values)[i] = value;
    else
        ((float *)values)[i] = (float)value;
}

// weight[n] = dL/dlogp of targets [begin, begin + n) from their logp[n] (NULL with WEIGHTS_AT_ONCE); with WEIGHTS_BY_STREAM of the
// whole stream. Both of `type`, fp32 or double; weight may be logp. Z = 0 (every target masked) gives no gradient.
static inline void objective_weights(const Objective *o, const Batch *batch, double Z, size_t begin, size_t n,
                                     const void *logp, void *weight, DType type) {
    size_t i;
    (void)o, (void)logp;
    for (i = 0; i < n; i++)
        value_set(weight, type, i,
                  batch->targets[begin + i] >= 0 && Z > 0 ? -(double)batch->loss_weight[begin + i] / Z : 0.0);
}

// What people watch, as sums and what they are divided by; two streams' add up.
#define METRICS_MOST 16
typedef struct {
    const char *name; // as in log.jsonl
    double sum, count;
} Metric;

typedef struct {
    Metric metric[METRICS_MOST];
    size_t count;
} Metrics;

static inline void metric_add(Metrics *m, const char *name, double sum, double count) {
    size_t i;
    for (i = 0; i < m->count && strcmp(m->metric[i].name, name) != 0; i++) continue;
    if (i == METRICS_MOST) die("internal: more than %d metrics", METRICS_MOST);
    if (i == m->count) m->metric[i].name = name, m->metric[i].sum = m->metric[i].count = 0, m->count++;
    m->metric[i].sum += sum, m->metric[i].count += count;
}

// This stream's part of the loss from logp[N], and entropy[N] of the distributions (NULL: not known), of `type`. metrics: NULL, or
// what its metrics are added to.
static inline double objective_loss(const Objective *o, const Batch *batch, double Z, const void *logp,
                                    const void *entropy, DType type, Metrics *metrics) {
    double sum = 0;
    size_t t;
    (void)o, (void)entropy, (void)metrics;
    for (t = 0; t < batch->N; t++)
        if (batch->targets[t] >= 0 && batch->loss_weight[t] != 0)
            sum += (double)batch->loss_weight[t] * value_at(logp, type, t);
    return Z > 0 ? -sum / Z : 0.0;
}

#endif
