/*
The norm of the whole gradient, clipping, and the learning rate of each step. AdamW's step is llmc/stream/update.h.
*/
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H
#include "llmc/cli/option_rows.h"
#include "llmc/stream/update.h"
#include "llmc/base/utils.h"

// ---- the gradient as a whole ----------------------------------------------------------------------------------------
// L2 norm, summed in double in the order of the table and then of the ranks, each over its shard at every ZeRO stage.
// *bad becomes the first parameter whose gradient holds NaN or an infinity (or values whose squares overflow a double),
// or NULL: the same on all ranks.
static double gradient_norm(const Residency *r, const Parameter **bad) {
    const Model *table = trained_table(r);
    const size_t ranks = world_ranks(r->world);
    size_t first_bad = table->parameter_count, whose;
    double sum = 0;
    for (size_t i = 0; i < table->parameter_count; i++) {
        const double squares = is_elsewhere(r, PLACED_GRADIENTS)
                                   ? r->squares[i]
                                   : parameter_squares(r, &table->parameters[i], r->gradients, 0);
        if (!isfinite(squares) && first_bad > i) first_bad = i;
        sum += squares;
    }
    if (ranks > 1) dist_sum(RANKS_ALL, &sum, 1);
    if (ranks > 1 && !isfinite(sum)) first_bad = dist_smallest(first_bad, &whose); // then it is not finite on any rank
    *bad = first_bad < table->parameter_count ? &table->parameters[first_bad] : NULL;
    return sqrt(sum);
}

// Scale of the gradient that limits its norm to `limit` (0: no limit).
static double gradient_clip(double norm, double limit) { return limit > 0 && norm > limit ? limit / norm : 1; }

// ---- the learning rate ----------------------------------------------------------------------------------------------
/*
Steps are counted from 1 to `steps`. Warm-up is linear and reaches the peak exactly at step
`warmup`; a decay starts there and reaches peak * final_fraction exactly at step `steps`:

    cosine    half a cosine                       (1 + cos(pi p)) / 2
    linear    a straight line                     1 - p
    wsd       warm-up, stable, decay: the peak is held until the last decay_fraction of the steps, then 1 - sqrt(p)
              (Haegele et al. 2024, arXiv:2405.18392, found this shape better than a line)
    constant  no decay

where p runs from 0 to 1 over the decay. Without warm-up step 1 is at the peak; a run no longer than its warm-up never
decays.
*/
static const char *const schedule_names[SCHEDULES] = {"cosine", "linear", "constant", "wsd"};

typedef struct {
    double peak; // --lr
    ScheduleKind kind;
    double final_fraction; // --final-lr-fraction: the last step's learning rate over the peak
    double decay_fraction; // --decay-fraction: share of the steps that decay, of wsd only
    size_t warmup, steps;
} Schedule;

// The last step at the peak.
static size_t schedule_decay_begin(const Schedule *schedule) {
    size_t begin = max_size(schedule->warmup, 1);
    if (schedule->kind == SCHEDULE_CONSTANT) return max_size(begin, schedule->steps);
    if (schedule->kind != SCHEDULE_WSD) return begin;
    size_t decay = (size_t)(schedule->decay_fraction * (double)schedule->steps + 0.5);
    return max_size(begin, schedule->steps - min_size(decay, schedule->steps));
}

static double schedule_learning_rate(const Schedule *schedule, size_t step) {
    size_t begin = schedule_decay_begin(schedule);
    double shape; // shape falls from 1 to 0
    if (step < schedule->warmup) return schedule->peak * ((double)step / (double)schedule->warmup);
    if (step <= begin || begin >= schedule->steps) return schedule->peak;
    if (step >= schedule->steps) return schedule->peak * schedule->final_fraction;
    double p = (double)(step - begin) / (double)(schedule->steps - begin);
    if (schedule->kind == SCHEDULE_COSINE)
        shape = 0.5 * (1.0 + cos(3.14159265358979323846 * p));
    else if (schedule->kind == SCHEDULE_LINEAR)
        shape = 1.0 - p;
    else
        shape = 1.0 - sqrt(p);
    return schedule->peak * (shape + schedule->final_fraction * (1.0 - shape));
}

#endif
