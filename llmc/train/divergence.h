/*
Signs that a run has diverged though every number is finite: no gradient, a loss far above its best, equal rewards. Each
is reported once: trainer_watch (trainer.h) prints a note or ends the run.
*/
#ifndef LLMC_DIVERGENCE_H
#define LLMC_DIVERGENCE_H
#include "log.h"

#define DIVERGENCE_STEPS 3     // steps in a row without a gradient, or with equal rewards
#define DIVERGENCE_LOSS  100.0 // times the best loss
#define DIVERGENCE_FLOOR 0.1   // nats; least best loss, so that one odd document is no sign

typedef enum { SIGN_NONE, SIGN_REWARDS, SIGN_GRADIENT, SIGN_LOSS, SIGNS } DivergenceSign;

typedef struct {
    size_t equal, still; // steps in a row: all groups had equal rewards; a gradient of exactly 0
    double best;         // least loss since the run began or was resumed; 0: none yet
    int high;            // the last loss is far above it
    unsigned reported;   // a bit for each sign
} Divergence;

static const char *const divergence_texts[SIGNS] = {
    "", "all groups had equal rewards in 3 steps in a row; use other prompts, or a finer reward command",
    "the gradient was exactly 0 in 3 steps in a row; use a smaller --lr, or check --data",
    "the loss is 100 times its best; use a smaller --lr or a longer --warmup"};

// Returns a sign that a step shows for the first time, or SIGN_NONE. cross_entropy: the loss is at least 0 and
// comparable between steps.
static DivergenceSign divergence_find(Divergence *d, const StepReport *r, int cross_entropy) {
    DivergenceSign sign = SIGN_NONE;
    int equal = 0;
    for (size_t i = 0; i < r->metrics.count; i++)
        equal |= !strcmp(r->metrics.metric[i].name, "frac_reward_zero_std") && metric_value(&r->metrics.metric[i]) == 1;
    d->equal = equal ? d->equal + 1 : 0;
    d->still = !equal && r->grad_norm == 0 ? d->still + 1 : 0;
    if (cross_entropy) {
        const double loss = fmax(r->loss, DIVERGENCE_FLOOR);
        if (d->best == 0 || loss < d->best) d->best = loss;
        d->high = loss > DIVERGENCE_LOSS * d->best;
        if (d->high) sign = SIGN_LOSS;
    }
    if (d->still >= DIVERGENCE_STEPS) sign = SIGN_GRADIENT;
    if (d->equal >= DIVERGENCE_STEPS) sign = SIGN_REWARDS;
    if (!sign || d->reported >> sign & 1) return SIGN_NONE;
    d->reported |= 1u << sign;
    return sign;
}

// Returns 1 if checkpoints saved from now on may be worse than those before.
static int divergence_doubts(const Divergence *d) { return d->equal || d->still || d->high; }

#endif
