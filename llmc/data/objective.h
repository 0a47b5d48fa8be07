/*
Objectives as weights per token. For every objective here

    dL/dlogits[t] = w[t]/tau * (onehot(target) - softmax(logits/tau)) with w[t] = dL/dlogp[t]

(distill adds a divergence), so an objective maps log-probabilities of the targets (and other fields of a batch) to the
loss and w. Below, logp, ref and old are the log-probabilities of target t under the policy (its logits/tau), the
reference and the policy that wrote the completion; m is its loss weight, 0 if masked; sums, means and counts over t run
over a document's targets, each weighted by m; sigma is the logistic function; Z is objective_normaliser of the whole
accumulated batch. TRL is Hugging Face's library, version 1.16.

sft    L = -sum_t m logp / Z, Z = targets

Pairs of documents, chosen and rejected: L = sum of the pairs' losses / Z, Z = pairs.
dpo    (arXiv 2305.18290) c = sum_t m (logp - ref) of the chosen less that of the rejected, and by dpo_loss
       sigmoid  -(1 - e) log sigma(beta c) - e log sigma(-beta c), e = label_smoothing (cDPO, Mitchell 2023; TRL has e
                in its CPOTrainer, not in its DPOTrainer)
       robust   (-(1 - e) log sigma(beta c) + e log sigma(-beta c)) / (1 - 2e), e = label_smoothing: an unbiased
                estimate of sigmoid's loss without wrong labels (arXiv 2403.00409)
       hinge    max(0, 1 - beta c) (SLiC-HF, arXiv 2305.10425)
       ipo      (c - 1 / (2 beta))^2, c of means over t instead of sums (arXiv 2310.12036, equation 17). The means are
                TRL's, not the paper's; TRL says that the paper's experiments used them
simpo  (arXiv 2405.14734) -log sigma(beta (a_chosen - a_rejected) - gamma), a = mean_t logp
orpo   (arXiv 2403.07691) -a_chosen - beta log sigma(o_chosen - o_rejected), o = a - log(1 - exp(a)): the log odds.
TRL's
       first term includes prompts and is a mean over all tokens instead of over pairs

Answers with a label, desirable or not (arXiv 2402.01306): L = sum of the documents' losses / Z, Z = documents.
kto    with x = sum_t m (logp - ref), by kto_loss
       kto       w (1 - sigma(beta (x - kl))) for a desirable document, w' (1 - sigma(beta (kl - x))) otherwise;
                 kl = max(0, mean of x over mismatched documents), without a gradient. Mismatched documents pair each
                 prompt of a sequence with the completion of the document before it, the first prompt with the last
                 completion (batch_mismatch); the mean is over all sequences of a micro-batch. TRL rotates the documents
                 of a device's batch in the same way; its mean is over devices, not over their documents
       apo_zero  the same with kl = 0, TRL's apo_zero_unpaired (arXiv 2408.06266)

Completions with advantages A: L = sum_t m n (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta c k3) where
k3 = exp(ref - logp) - (ref - logp) - 1 estimates the divergence from the reference (Schulman 2020). c is r with
kl_correction, as completions are the old policy's but the divergence is the policy's (arXiv 2512.02556, section 3.1);
else 1. n by normalisation; documents without a target count, too, as in TRL:
       grpo     1 / (the document's targets x Z), Z = documents (arXiv 2402.03300)
       bnpo     1 / Z, Z = targets; TRL's Z is a micro-batch's
       dapo     as bnpo, with a wider upper clip (arXiv 2503.14476)
       dr_grpo  1 / Z, Z = documents x completion_tokens (arXiv 2503.20783)
grpo   r = exp(logp - old). If old is unknown, it is the policy's own: r is 1, its gradient that of logp
cispo  (arXiv 2506.13585) the first term is -min(r, clip_high) A logp, where min(r, clip_high) is a weight without a
       gradient: no token loses its gradient. n is bnpo's
ppo    (arXiv 1707.06347) as grpo, with an advantage per token; there is no value function here
gspo   (arXiv 2507.18071) one r for a document, exp(mean_t (logp - old)), with a gradient to each of its tokens. With
       other normalisations than grpo a document's weight is its number of tokens, as in TRL
All documents of a trajectory (batch->trajectory) are one document here: their targets count together.

A teacher with probabilities p; q: the policy's. L = sum over t / Z, Z = targets. T = distill_temperature
distill  forward  m ((1 - share) (-logp) + share T^2 KL), where KL is the divergence of q from p, both at temperature T,
                  over the teacher's k likeliest tokens and one class for all others: sum_j p_j log(p_j / q_j) + r log(r
                  / s), r and s the others' shares under p and q. At k = V it is the whole divergence; a smaller k gives
                  at most that. T^2 keeps the gradient's size (arXiv 1503.02531, section 2)
         reverse  the policy gradient with the advantage A = log p - logp of the target, which has no gradient: w = -m A
                  / Z; L = m (logp - log p). For targets that the policy has drawn it is an unbiased estimate of the
                  gradient of each next token's divergence of p from q, given the earlier tokens (on-policy
                  distillation, arXiv 2306.13649). What a token does to later tokens is not counted

A log-probability or advantage that is not finite makes the loss NaN (for sft: not finite), and all weights that depend
on it.
*/
#ifndef LLMC_OBJECTIVE_H
#define LLMC_OBJECTIVE_H
#include "tree.h"
#include "metrics.h"
#include "llmc/ops/ops.h"
#include <math.h>

typedef enum {
    OBJECTIVE_SFT,
    OBJECTIVE_DPO,
    OBJECTIVE_SIMPO,
    OBJECTIVE_ORPO,
    OBJECTIVE_GRPO,
    OBJECTIVE_GSPO,
    OBJECTIVE_PPO,
    OBJECTIVE_CISPO,
    OBJECTIVE_KTO,
    OBJECTIVE_DISTILL,
    OBJECTIVES
} ObjectiveKind;
typedef enum { DPO_SIGMOID, DPO_IPO, DPO_HINGE, DPO_ROBUST, DPO_LOSSES } DpoLoss;
typedef enum { KTO_KTO, KTO_APO_ZERO, KTO_LOSSES } KtoLoss;
typedef enum { DISTILL_FORWARD, DISTILL_REVERSE, DISTILL_LOSSES } DistillLoss;
typedef enum { NORMALISE_GRPO, NORMALISE_BNPO, NORMALISE_DR_GRPO, NORMALISE_DAPO, NORMALISATIONS } Normalisation;

static const char *const objective_names[OBJECTIVES] = {"sft",  "dpo", "simpo", "orpo", "grpo",
                                                        "gspo", "ppo", "cispo", "kto",  "distill"};
static const char *const dpo_loss_names[DPO_LOSSES] = {"sigmoid", "ipo", "hinge", "robust"};
static const char *const kto_loss_names[KTO_LOSSES] = {"kto", "apo_zero"};
static const char *const distill_loss_names[DISTILL_LOSSES] = {"forward", "reverse"};
static const char *const normalisation_names[NORMALISATIONS] = {"grpo", "bnpo", "dr_grpo", "dapo"};

typedef struct {
    double beta, gamma, clip_low, clip_high; // NAN: objective_resolve sets the default
    ObjectiveKind kind;
    DpoLoss dpo_loss;
    KtoLoss kto_loss;
    Normalisation normalisation;
    int kl_correction; // 1: c in the formulas is r, else 1
    double label_smoothing;
    double desirable_weight, undesirable_weight; // kto: w and w'
    Temperature temperature;                     // temperature.divisor is 1 except for objectives with advantages
    double completion_tokens;                    // dr_grpo: most tokens of a completion
    DistillLoss distill_loss;
    double distill_share, distill_temperature; // distill, forward: share and T in the formulas
} Objective;

// Time at which the weights of an objective can be computed
typedef enum {
    WEIGHTS_AT_ONCE,    // before the head runs
    WEIGHTS_BY_TOKEN,   // from the token's own log-probability
    WEIGHTS_BY_SEQUENCE // from the log-probabilities of the whole sequence
} ObjectiveWeights;

static int objective_is_of_pairs(const Objective *o) {
    return o->kind == OBJECTIVE_DPO || o->kind == OBJECTIVE_SIMPO || o->kind == OBJECTIVE_ORPO;
}

// Tells whether the divergence is estimated from mismatched documents.
static int objective_needs_mismatched(const Objective *o) { return o->kind == OBJECTIVE_KTO && o->kto_loss == KTO_KTO; }

// Tells whether the objective has advantages and a clipped ratio (and maybe a divergence).
static int objective_is_of_policy(const Objective *o) {
    return o->kind >= OBJECTIVE_GRPO && o->kind <= OBJECTIVE_CISPO;
}

// Tells whether the batch needs a teacher's likeliest tokens.
static int objective_needs_top(const Objective *o) {
    return o->kind == OBJECTIVE_DISTILL && o->distill_loss == DISTILL_FORWARD;
}

// Tells whether the objective is distillation by the teacher's log-probabilities of the targets alone.
static int objective_is_reverse(const Objective *o) {
    return o->kind == OBJECTIVE_DISTILL && o->distill_loss == DISTILL_REVERSE;
}

// Tells whether passes compute a second value of each target: its entropy, or its divergence from a teacher.
static int objective_has_entropy(const Objective *o) {
    return objective_is_of_policy(o) || o->kind == OBJECTIVE_KTO || objective_needs_top(o);
}

// Sets open parameters to the papers' values. simpo: the margin is half of beta, where the authors of simpo start. dapo
// and gspo: the clips of the papers' experiments; cispo: the clip of arXiv 2510.13786.
static void objective_resolve(Objective *o) {
    const int gspo = o->kind == OBJECTIVE_GSPO;
    if (o->kind == OBJECTIVE_CISPO) {
        o->normalisation = NORMALISE_BNPO;
        if (isnan(o->clip_high)) o->clip_high = 5;
    }
    const int preferences = objective_is_of_pairs(o) || o->kind == OBJECTIVE_KTO;
    if (isnan(o->beta)) o->beta = o->kind == OBJECTIVE_SIMPO ? 2 : preferences ? 0.1 : 0;
    if (isnan(o->gamma)) o->gamma = 1;
    if (isnan(o->clip_high) && gspo) o->clip_high = 4e-4;
    if (isnan(o->clip_high) && o->normalisation == NORMALISE_DAPO) o->clip_high = 0.28;
    if (isnan(o->clip_low)) o->clip_low = gspo ? 3e-4 : 0.2;
    if (isnan(o->clip_high)) o->clip_high = o->clip_low;
}

static ObjectiveWeights objective_weights_wait(const Objective *o) {
    if (o->kind == OBJECTIVE_SFT || objective_needs_top(o)) return WEIGHTS_AT_ONCE;
    const int by_token = objective_is_of_policy(o) && o->kind != OBJECTIVE_GSPO;
    return by_token || objective_is_reverse(o) ? WEIGHTS_BY_TOKEN : WEIGHTS_BY_SEQUENCE;
}

// Tells whether the batch needs the reference's log-probabilities.
static int objective_needs_reference(const Objective *o) {
    if (o->kind == OBJECTIVE_DPO || o->kind == OBJECTIVE_KTO) return 1;
    return (objective_is_of_policy(o) && o->beta != 0);
}

// Tells whether a batch has log-probabilities of its targets under another model: the reference, or the teacher.
static int objective_reads_reference(const Objective *o) {
    return objective_needs_reference(o) || objective_is_reverse(o);
}

// Returns the denominator of a step's losses.
static double objective_normaliser(const Objective *o, TargetCounts counts) {
    if (objective_is_of_pairs(o)) return counts.groups;
    if (o->kind == OBJECTIVE_KTO) return counts.documents;
    if (!objective_is_of_policy(o)) return counts.tokens;
    switch (o->normalisation) {
    case NORMALISE_GRPO: return counts.documents;
    case NORMALISE_DR_GRPO: return counts.documents * o->completion_tokens;
    default: return counts.tokens;
    }
}

static double finite_or_nan(double value) { return isfinite(value) ? value : NAN; }

// Computes advantages of a group of n completions: rewards minus their mean, with `scale` divided by 1e-4 + their
// standard deviation (over n - 1), as TRL does. They are exactly 0 if all rewards are equal, NaN if a reward is not
// finite.
static void group_advantages(const float *reward, size_t n, int scale, double *advantage) {
    double mean = 0, squares = 0;
    size_t equal = 0;
    for (size_t i = 0; i < n; i++) mean += (double)reward[i] / (double)n, equal += reward[i] == reward[0];
    if (equal == n) mean = n ? (double)reward[0] : 0; // exact mean without rounding of the sum
    mean = finite_or_nan(mean);
    for (size_t i = 0; i < n; i++) {
        advantage[i] = (double)reward[i] - mean;
        squares += advantage[i] * advantage[i];
    }
    if (!scale || equal == n) return;
    for (size_t i = 0; i < n; i++) advantage[i] /= sqrt(squares / (double)(n - 1)) + 1e-4;
}

// ---- values of a target ---------------------------------------------------------------------------------------------
static double value_at(const void *values, DType type, size_t i) {
    return type == DTYPE_FP64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
}

static void value_set(void *values, DType type, size_t i, double value) {
    if (type == DTYPE_FP64)
        ((double *)values)[i] = value;
    else
        ((float *)values)[i] = (float)value;
}

// Returns a log-probability, or NaN for an infinity, which a clip or the flat part of a loss could hide.
static double logp_at(const void *logp, DType type, size_t i) { return finite_or_nan(value_at(logp, type, i)); }

// Returns the loss weight of target t; 0 if masked.
static double target_weight(const Batch *batch, size_t t) {
    return batch->targets[t] >= 0 ? (double)batch->loss_weight[t] : 0.0;
}

// Returns sum_t m value; *weight: sum_t m
static double target_sum(const Batch *batch, const void *values, DType type, double *weight) {
    double sum = 0;
    *weight = 0;
    for (size_t t = 0; t < batch->N; t++) {
        const double m = target_weight(batch, t);
        if (m != 0) sum += m * value_at(values, type, t), *weight += m;
    }
    return sum;
}

static double log_sigmoid(double x) { return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x)); }

static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

// ---- pairs ----------------------------------------------------------------------------------------------------------
// Sums over a document's targets
typedef struct {
    double logp, reference; // reference: 0 if not needed
    double weight;          // sum of loss weights
} DocumentSums;

// A pair's loss, and the loss's derivatives by the two documents' sums of log-probabilities
typedef struct {
    double loss, slope[2];      // [chosen, rejected]
    double reward[2], logps[2]; // the metrics' values
} PairLoss;

static DocumentSums document_sums(const Objective *o, const Batch *batch, size_t d, const void *logp, DType type) {
    DocumentSums sums = {0, 0, 0};
    for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) {
        const double m = target_weight(batch, t);
        if (m == 0) continue;
        sums.logp += m * logp_at(logp, type, t), sums.weight += m;
        if (objective_needs_reference(o) && !batch->document_reference)
            sums.reference += m * finite_or_nan((double)batch->reference[t]);
    }
    if (batch->document_reference) sums.reference = finite_or_nan(batch->document_reference[d]);
    return sums;
}

// Returns the loss of dpo and simpo from the margin x_chosen - x_rejected, where x is a sum (dpo) or a mean (ipo,
// simpo). *slope: derivative of the loss by the margin
static double margin_loss(const Objective *o, double margin, double *slope) {
    double scaled = o->beta * margin, e = o->label_smoothing, rest;
    if (o->kind == OBJECTIVE_SIMPO) {
        *slope = -o->beta * sigmoid(o->gamma - scaled);
        return -log_sigmoid(scaled - o->gamma);
    }
    switch (o->dpo_loss) {
    case DPO_IPO:
        rest = margin - 0.5 / o->beta;
        *slope = 2 * rest;
        return rest * rest;
    case DPO_HINGE:
        rest = 1 - scaled;
        *slope = rest <= 0 ? 0 : isnan(rest) ? rest : -o->beta;
        return rest <= 0 ? 0 : rest;
    case DPO_ROBUST:
        *slope = -o->beta * (e * sigmoid(scaled) + (1 - e) * sigmoid(-scaled)) / (1 - 2 * e);
        return (-(1 - e) * log_sigmoid(scaled) + e * log_sigmoid(-scaled)) / (1 - 2 * e);
    default:
        *slope = o->beta * (e * sigmoid(scaled) - (1 - e) * sigmoid(-scaled));
        return -(1 - e) * log_sigmoid(scaled) - e * log_sigmoid(-scaled);
    }
}

// Returns the log odds of a mean log-probability. *slope: their derivative. Limits 1 - exp(a) to at least 2^-24, the
// resolution of fp32, since certainty has infinite odds.
static double log_odds(double a, double *slope) {
    double rest = -expm1(a);
    if (rest < 0x1p-24) rest = 0x1p-24;
    *slope = 1 / rest;
    return a - log(rest);
}

// Returns orpo's loss from the mean log-probabilities a[chosen, rejected]. slope[2]: derivatives of the loss
static double odds_ratio_loss(const Objective *o, const double a[2], double slope[2]) {
    double by_mean[2], ratio = log_odds(a[0], &by_mean[0]) - log_odds(a[1], &by_mean[1]);
    double by_ratio = -o->beta * sigmoid(-ratio);
    slope[0] = -1 + by_ratio * by_mean[0], slope[1] = -by_ratio * by_mean[1];
    return -a[0] - o->beta * log_sigmoid(ratio);
}

// Returns the loss of a pair. side: sums of the chosen and of the rejected document
static PairLoss pair_loss(const Objective *o, const DocumentSums side[2]) {
    int dpo = o->kind == OBJECTIVE_DPO, of_means = !dpo || o->dpo_loss == DPO_IPO;
    double x[2], share[2]; // sums or means of log-ratios, and their derivative by a token's log-probability
    PairLoss pair;
    for (int i = 0; i < 2; i++) {
        double sum = side[i].logp - side[i].reference;
        share[i] = of_means && side[i].weight != 0 ? 1 / side[i].weight : 1;
        x[i] = sum * share[i];
        pair.logps[i] = dpo ? side[i].logp : x[i];
        pair.reward[i] = o->beta * (dpo ? sum : x[i]);
    }
    if (o->kind == OBJECTIVE_ORPO) {
        pair.loss = odds_ratio_loss(o, x, pair.slope);
    } else {
        pair.loss = margin_loss(o, x[0] - x[1], &pair.slope[0]);
        pair.slope[1] = -pair.slope[0];
    }
    for (int i = 0; i < 2; i++) pair.slope[i] *= share[i];
    return pair;
}

// Returns the loss of the pair whose chosen document is d.
static PairLoss pair_at(const Objective *o, const Batch *batch, size_t d, const void *logp, DType type) {
    DocumentSums side[2];
    if (d + 1 >= batch->documents || batch->group[d] != batch->group[d + 1])
        die("internal: document %zu of a sequence of pairs has no partner; please report it", d);
    side[0] = document_sums(o, batch, d, logp, type), side[1] = document_sums(o, batch, d + 1, logp, type);
    return pair_loss(o, side);
}

// Sets the weights of a document's targets from the derivative of the loss by the sum of their log-probabilities.
static void document_weights(const Batch *batch, size_t d, double Z, double slope, void *weight, DType type) {
    for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) {
        const double m = target_weight(batch, t);
        value_set(weight, type, t, m == 0 ? 0 : m * slope / Z);
    }
}

static void pair_weights(const Objective *o, const Batch *batch, double Z, const void *logp, void *weight, DType type) {
    PairLoss pair = {0};
    for (size_t d = 0; d < batch->documents; d++) {
        if (d % 2 == 0) pair = pair_at(o, batch, d, logp, type);
        document_weights(batch, d, Z, pair.slope[d % 2], weight, type);
    }
}

// ---- answers with a label -------------------------------------------------------------------------------------------
// A document's loss, and the loss's derivative by the sum of the document's log-probabilities
typedef struct {
    double loss, slope, reward, logps; // reward, logps: for metrics
} LabelLoss;

// Computes kto_loss of document d: w (1 - sigmoid(sign beta (x - kl))). sign and w follow from the document's label
static LabelLoss label_loss(const Objective *o, const Batch *batch, size_t d, const void *logp, DType type) {
    const DocumentSums sums = document_sums(o, batch, d, logp, type);
    const double sign = batch->reward[d] != 0 ? 1 : -1, w = sign > 0 ? o->desirable_weight : o->undesirable_weight;
    const double x = sums.logp - sums.reference, kl = objective_needs_mismatched(o) ? batch->kl : 0;
    const double scaled = sign * o->beta * (x - finite_or_nan(kl)), rest = sigmoid(-scaled);
    const LabelLoss found = {w * rest, -w * sign * o->beta * rest * sigmoid(scaled), o->beta * x, sums.logp};
    return found;
}

// ---- completions with advantages ------------------------------------------------------------------------------------
// Surrogate loss -min(r A, clip(r) A), and the loss's derivative by log r (for cispo by logp). clipped: -1 or 1 if the
// lower or upper bound zeroes the gradient, or for cispo reduces it
typedef struct {
    double loss, slope;
    int clipped;
} Surrogate;

// Computes a target's surrogate loss. logp: the token's log-probability, only cispo uses it
static Surrogate surrogate_of(const Objective *o, double ratio, double A, double logp) {
    const double low = 1 - o->clip_low, high = 1 + o->clip_high;
    Surrogate s;
    if (o->kind == OBJECTIVE_CISPO) {
        s.slope = -A * (ratio > o->clip_high ? o->clip_high : ratio);
        s.loss = s.slope * logp, s.clipped = A > 0 && ratio > o->clip_high;
        return s;
    }
    s.clipped = A > 0 && ratio > high ? 1 : A < 0 && ratio < low ? -1 : 0;
    s.loss = -A * (s.clipped > 0 ? high : s.clipped < 0 ? low : ratio);
    s.slope = s.clipped ? 0 : -A * ratio;
    return s;
}

static double advantage_at(const Batch *batch, size_t t) { return finite_or_nan((double)batch->advantage[t]); }

// Returns log r of a token.
static double log_ratio_at(const Batch *batch, size_t t, double logp) {
    return logp - (batch->old ? finite_or_nan((double)batch->old[t]) : logp);
}

// Returns ref - logp of target t.
static double reference_over(const Batch *batch, size_t t, double logp) {
    return finite_or_nan((double)batch->reference[t]) - logp;
}

// Returns factor n of the formulas at the top of this file for a document. The document must have targets, here and in
// the next two functions.
static double document_scale(const Objective *o, const Batch *batch, double Z, size_t d) {
    return (o->normalisation == NORMALISE_GRPO ? 1 / batch->document_weight[d] : 1.0) / Z;
}

// Terms that gspo's targets of a document share. slope: derivative, by the log-probability of a target of weight 1, of
// the document's surrogates and of corrected divergences through the ratio. log r contains each log-probability with
// weight 1 / document_weight
typedef struct {
    double ratio, slope;
} DocumentRatio;

// Returns the text positions of document d, with those of its trajectory (batch_whole).
static Range whole_positions(const Batch *batch, size_t d) {
    const Range whole = batch_whole(batch, d);
    const size_t begin = batch->document_start[whole.begin];
    const Range positions = {begin, batch->document_start[whole.begin + whole.count] - begin};
    return positions;
}

static double document_ratio(const Batch *batch, size_t d, const void *logp, DType type) {
    const Range whole = whole_positions(batch, d);
    double sum = 0;
    for (size_t t = whole.begin; t < whole.begin + whole.count; t++) {
        double m = target_weight(batch, t);
        if (m != 0) sum += m * log_ratio_at(batch, t, logp_at(logp, type, t));
    }
    return exp(sum / batch->document_weight[d]);
}

static DocumentRatio document_ratio_slope(const Objective *o, const Batch *batch, size_t d, const void *logp,
                                          DType type) {
    const Range whole = whole_positions(batch, d);
    DocumentRatio r = {document_ratio(batch, d, logp, type), 0};
    for (size_t t = whole.begin; t < whole.begin + whole.count; t++) {
        const double m = target_weight(batch, t);
        if (m == 0) continue;
        r.slope += m * surrogate_of(o, r.ratio, advantage_at(batch, t), 0).slope;
        if (o->beta != 0 && o->kl_correction) {
            const double over = reference_over(batch, t, logp_at(logp, type, t));
            r.slope += m * o->beta * r.ratio * (expm1(over) - over);
        }
    }
    r.slope /= batch->document_weight[d];
    return r;
}

// Returns the derivative of target t's terms by its log-probability. document: for gspo. The derivative of a corrected
// divergence r k3 is r (k3 + dk3), which is -r (ref - logp) if r is the ratio of the token alone.
static double target_slope(const Objective *o, const Batch *batch, size_t t, double logp, DocumentRatio document) {
    const int gspo = o->kind == OBJECTIVE_GSPO;
    const double ratio = gspo ? document.ratio : exp(log_ratio_at(batch, t, logp));
    double slope = gspo ? document.slope : surrogate_of(o, ratio, advantage_at(batch, t), logp).slope;
    if (o->beta == 0) return slope;
    const double over = reference_over(batch, t, logp);
    return slope - o->beta * (!o->kl_correction ? expm1(over) : ratio * (gspo ? expm1(over) : over));
}

static void policy_weights(const Objective *o, const Batch *batch, double Z, size_t begin, size_t n, const void *logp,
                           void *weight, DType type) {
    const size_t *start = batch->document_start;
    size_t d = last_at_most(start, sizeof(*start), max_size(batch->documents, 1), begin), known = d;
    DocumentRatio document = {1, 0};
    for (; d < batch->documents && start[d] < begin + n; d++) {
        const double scale = document_scale(o, batch, Z, d);
        if (o->kind == OBJECTIVE_GSPO && d == known) { // once for a trajectory: weight may be logp
            document = document_ratio_slope(o, batch, d, logp, type);
            known = d + batch_whole(batch, d).count;
        }
        for (size_t t = max_size(start[d], begin); t < min_size(start[d + 1], begin + n); t++) {
            double m = target_weight(batch, t), w = 0;
            if (m != 0) w = m * scale * target_slope(o, batch, t, logp_at(logp, type, t - begin), document);
            value_set(weight, type, t - begin, w);
        }
    }
}

// ---- weights --------------------------------------------------------------------------------------------------------
static void objective_check_batch(const Objective *o, const Batch *batch) {
    if (objective_is_of_pairs(o) && !batch->group)
        die("internal: a batch of %s without groups; please report it", objective_names[o->kind]);
    if (objective_is_of_policy(o) && !(batch->advantage && batch->document_weight))
        die("internal: a batch of %s without advantages; please report it", objective_names[o->kind]);
    if (o->kind == OBJECTIVE_KTO && !batch->reward) die("internal: a batch of kto without labels; please report it");
    if (objective_needs_top(o) && !batch->teacher.id)
        die("internal: a batch of distill without a teacher's tokens; please report it");
    if (objective_reads_reference(o) && !batch->reference && !batch->document_reference)
        die("internal: a batch of %s without the reference's log-probabilities; please report it",
            objective_names[o->kind]);
}

// Computes weight[n] = dL/dlogp of targets [begin, begin + n) from their logp[n] (NULL with WEIGHTS_AT_ONCE); with
// WEIGHTS_BY_SEQUENCE for the whole sequence. logp and weight have `type`, fp32 or double; weight may be logp. Z = 0
// (all targets masked) gives no gradient. Call batch_count first.
static void objective_weights(const Objective *o, const Batch *batch, double Z, size_t begin, size_t n,
                              const void *logp, void *weight, DType type) {
    objective_check_batch(o, batch);
    if (objective_weights_wait(o) == WEIGHTS_BY_SEQUENCE && (begin != 0 || n != batch->N))
        die("internal: weights of a part of a sequence, but %s needs all of it; please report it",
            objective_names[o->kind]);
    if (batch->empty) {
        for (size_t i = 0; i < n; i++) value_set(weight, type, i, 0);
    } else if (objective_is_of_pairs(o)) {
        pair_weights(o, batch, Z, logp, weight, type);
    } else if (o->kind == OBJECTIVE_KTO) {
        for (size_t d = 0; d < batch->documents; d++)
            document_weights(batch, d, Z, label_loss(o, batch, d, logp, type).slope, weight, type);
    } else if (objective_is_of_policy(o)) {
        policy_weights(o, batch, Z, begin, n, logp, weight, type);
    } else if (objective_is_reverse(o)) {
        for (size_t i = 0; i < n; i++) {
            const double m = target_weight(batch, begin + i);
            value_set(weight, type, i, m == 0 ? 0 : -m / Z * reference_over(batch, begin + i, logp_at(logp, type, i)));
        }
    } else {
        for (size_t i = 0; i < n; i++) value_set(weight, type, i, Z == 0 ? 0.0 : -target_weight(batch, begin + i) / Z);
    }
}

// ---- the loss and metrics -------------------------------------------------------------------------------------------
// Computes the loss of pairs, with TRL's metrics. A document's reward is beta times its log-ratio to the reference
// (dpo) or its mean log-probability (simpo, orpo). The metrics of logps are sums for dpo, means for simpo and orpo.
static double pairs_loss(const Objective *o, const Batch *batch, double Z, const void *logp, DType type,
                         Metrics *metrics) {
    double sum = 0;
    for (size_t d = 0; d < batch->documents; d += 2) {
        PairLoss pair = pair_at(o, batch, d, logp, type);
        sum += pair.loss;
        metric_add(metrics, "rewards/chosen", pair.reward[0], 1);
        metric_add(metrics, "rewards/rejected", pair.reward[1], 1);
        metric_add(metrics, "rewards/margins", pair.reward[0] - pair.reward[1], 1);
        metric_add(metrics, "rewards/accuracies", pair.reward[0] > pair.reward[1], 1);
        metric_add(metrics, "logps/chosen", pair.logps[0], 1);
        metric_add(metrics, "logps/rejected", pair.logps[1], 1);
    }
    return sum / Z;
}

// Computes the loss of labelled answers, with TRL's metrics. metrics_margin adds rewards/margins for whole steps,
// because it is a difference of means.
static double labels_loss(const Objective *o, const Batch *batch, double Z, const void *logp, DType type,
                          Metrics *metrics) {
    static const char *const names[] = {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"};
    double sum = 0;
    for (size_t i = 0; i < 4; i++) metric_add(metrics, names[i], 0, 0); // fixes the order of the metrics
    for (size_t d = 0; d < batch->documents; d++) {
        const LabelLoss document = label_loss(o, batch, d, logp, type);
        const int side = batch->reward[d] == 0;
        sum += document.loss;
        metric_add(metrics, names[side], document.reward, 1);
        metric_add(metrics, names[2 + side], document.logps, 1);
    }
    if (objective_needs_mismatched(o))
        metric_add(metrics, "kl", (double)batch->documents * batch->kl, (double)batch->documents);
    return sum / Z;
}

// Sums over the targets of a sequence. low, high: number of clipped targets, for gspo of clipped documents
typedef struct {
    double tokens, ratio, divergence, low, high, reward;
} PolicySums;

static double document_loss(const Objective *o, const Batch *batch, size_t d, const void *logp, DType type,
                            PolicySums *sums) {
    const int gspo = o->kind == OBJECTIVE_GSPO;
    double ratio = gspo ? document_ratio(batch, d, logp, type) : 1, loss = 0, low = 0, high = 0;
    for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) {
        double m = target_weight(batch, t);
        if (m == 0) continue;
        const double p = logp_at(logp, type, t);
        if (!gspo) ratio = exp(log_ratio_at(batch, t, p));
        const Surrogate s = surrogate_of(o, ratio, advantage_at(batch, t), p);
        loss += m * s.loss;
        sums->tokens += m, sums->ratio += m * ratio;
        low += s.clipped < 0 ? m : 0, high += s.clipped > 0 ? m : 0;
        if (batch->reference) {
            const double over = reference_over(batch, t, p);
            const double divergence = (o->kl_correction ? ratio : 1) * (expm1(over) - over);
            sums->divergence += m * divergence;
            if (o->beta != 0) loss += m * o->beta * divergence;
        }
    }
    // gspo's advantages may differ between tokens in user data, so each token counts with its share
    const double weight = gspo ? 1 / batch->document_weight[d] : 1;
    sums->low += weight * low, sums->high += weight * high;
    return loss;
}

// Computes the loss of completions, with TRL's metrics. The metric `ratio`, the mean of r, is our own.
static double policy_loss(const Objective *o, const Batch *batch, double Z, const void *logp, DType type,
                          Metrics *metrics) {
    double loss = 0, texts = 0;
    PolicySums sums = {0};
    for (size_t d = 0, end; d < batch->documents; d = end, texts++) {
        const Range whole = whole_positions(batch, d);
        double length = 0;
        end = d + batch_whole(batch, d).count;
        for (size_t t = whole.begin; t < whole.begin + whole.count; t++) length += batch->targets[t] >= 0;
        metric_length(metrics, completion_lengths, length);
        if (batch->reward) sums.reward += (double)batch->reward[d];
        for (size_t i = d; i < end && batch->document_weight[d] != 0; i++)
            loss += document_scale(o, batch, Z, i) * document_loss(o, batch, i, logp, type, &sums);
    }
    if (batch->reward) metric_add(metrics, "reward", sums.reward, texts);
    for (size_t d = 0, end; batch->reward && batch->group && d < batch->documents; d = end) {
        int equal = 1; // 1: the group's rewards are equal; --rollout counts its groups earlier, to the same mean
        for (end = d; end < batch->documents && batch->group[end] == batch->group[d]; end++)
            equal &= batch->reward[end] == batch->reward[d];
        metric_add(metrics, "frac_reward_zero_std", equal, 1);
    }
    if (batch->reference) metric_add(metrics, "kl", sums.divergence, sums.tokens);
    metric_add(metrics, "ratio", sums.ratio, sums.tokens);
    const double clips = o->kind == OBJECTIVE_GSPO ? texts : sums.tokens;
    if (o->kind == OBJECTIVE_CISPO) {
        metric_add(metrics, "cispo_clip_ratio", sums.high, clips);
    } else {
        metric_add(metrics, "clip_ratio/region_mean", sums.low + sums.high, clips);
        metric_add(metrics, "clip_ratio/low_mean", sums.low, clips);
        metric_add(metrics, "clip_ratio/high_mean", sums.high, clips);
    }
    return loss;
}

// Computes the loss of a distillation. divergence[N]: of the policy from the teacher; NULL: reverse
static double distill_loss(const Objective *o, const Batch *batch, double Z, const void *logp, const void *divergence,
                           DType type, Metrics *metrics) {
    const double T = o->distill_temperature;
    double weight, apart = 0, cross = -target_sum(batch, logp, type, &weight);
    if (divergence) apart = target_sum(batch, divergence, type, &weight);
    for (size_t t = 0; t < batch->N && !divergence; t++) {
        const double m = target_weight(batch, t);
        if (m != 0) apart -= m * reference_over(batch, t, logp_at(logp, type, t));
    }
    metric_add(metrics, "kl", apart, weight);
    metric_add(metrics, "cross_entropy", cross, weight);
    const double sum = divergence ? (1 - o->distill_share) * cross + o->distill_share * T * T * apart : apart;
    return Z == 0 ? 0.0 : sum / Z;
}

// Returns this sequence's part of the loss from logp[N]. entropy[N]: entropies of the distributions (NULL: unknown), or
// divergences from a teacher.
// logp and entropy have `type`. Adds the sequence's metrics to `metrics` unless it is NULL. Call batch_count first.
static double objective_loss(const Objective *o, const Batch *batch, double Z, const void *logp, const void *entropy,
                             DType type, Metrics *metrics) {
    double weight, sum;
    objective_check_batch(o, batch);
    if (batch->empty) return 0;
    if (o->kind == OBJECTIVE_DISTILL)
        return distill_loss(o, batch, Z, logp, objective_is_reverse(o) ? NULL : entropy, type, metrics);
    if (entropy) {
        sum = target_sum(batch, entropy, type, &weight);
        metric_add(metrics, "entropy", sum, weight);
    }
    if (objective_is_of_pairs(o)) return pairs_loss(o, batch, Z, logp, type, metrics);
    if (o->kind == OBJECTIVE_KTO) return labels_loss(o, batch, Z, logp, type, metrics);
    if (objective_is_of_policy(o)) return policy_loss(o, batch, Z, logp, type, metrics);
    return Z == 0 ? 0.0 : -target_sum(batch, logp, type, &weight) / Z;
}

#endif
