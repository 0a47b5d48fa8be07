/*
The learning rate of each step.

Steps are counted from 1 to N = `steps`. Warm-up is linear and reaches the peak at step `warmup`; a decay of D steps
takes p = 0, 1 / D, ... (D - 1) / D, and would reach peak * final_fraction one step after the last:

    cosine    half a cosine                       (1 + cos(pi p)) / 2
    linear    a straight line                     1 - p
    wsd       warm-up, stable, decay: the peak until the last decay_fraction of the steps, then 1 - sqrt(p)
              (Haegele et al. 2024, arXiv:2405.18392, found this shape better than a line)
    constant  no decay

With D = N - warmup (wsd: decay_fraction * N), cosine and linear decay as get_cosine_schedule_with_warmup and
get_linear_schedule_with_warmup of transformers do. Its Trainer takes lambda(s - 1) at step s. So its warm-up is
(s - 1) / warmup, and step 1 changes nothing. Here warm-up is s / warmup; steps warmup and warmup + 1 have the peak.
*/
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H
#include "llmc/base/utils.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD, SCHEDULES } ScheduleKind;
static const char *const schedule_names[SCHEDULES] = {"cosine", "linear", "constant", "wsd"};

typedef struct {
    double peak; // --lr
    ScheduleKind kind;
    double final_fraction; // --final-lr-fraction: end of the decay, as a fraction of the peak
    double decay_fraction; // --decay-fraction: share of the steps that decay; wsd only
    size_t warmup, steps;
    int version_1; // 1 for runs begun before version 2: D is one less, and p reaches 1 at the last step
    // for an extended run (--extend): steps up to `begin` had another schedule, which ended at the rate `from`. Warm-up
    // goes from `from` to the peak; the decay counts from `begin`. 0: not extended
    size_t begin;
    double from;
} Schedule;

// Returns p of a step: 0 at the peak, 1 one step after the last step (version_1: at the last step).
static double schedule_decayed(const Schedule *schedule, size_t step) {
    const size_t decay = (size_t)(schedule->decay_fraction * (double)schedule->steps + 0.5);
    const size_t made = schedule->version_1 ? step : step - 1;
    size_t begin = schedule->version_1 ? max_size(schedule->warmup, 1) : schedule->warmup;
    if (schedule->kind == SCHEDULE_CONSTANT) return 0;
    if (schedule->kind == SCHEDULE_WSD) begin = max_size(begin, schedule->steps - min_size(decay, schedule->steps));
    if (made <= begin) return 0;
    return made >= schedule->steps ? 1 : (double)(made - begin) / (double)(schedule->steps - begin);
}

static double schedule_learning_rate(const Schedule *schedule, size_t step) {
    if (schedule->begin) {
        Schedule rest = *schedule;
        const size_t made = step - schedule->begin;
        rest.begin = 0, rest.steps -= schedule->begin;
        if (made >= schedule->warmup) return schedule_learning_rate(&rest, made);
        return schedule->from + (schedule->peak - schedule->from) * ((double)made / (double)schedule->warmup);
    }
    const double p = schedule_decayed(schedule, step);
    double shape; // the decay's shape, falling from 1 to 0
    if (step < schedule->warmup) return schedule->peak * ((double)step / (double)schedule->warmup);
    if (p <= 0) return schedule->peak;
    if (p >= 1) return schedule->peak * schedule->final_fraction;
    if (schedule->kind == SCHEDULE_COSINE)
        shape = 0.5 * (1.0 + cos(3.14159265358979323846 * p));
    else if (schedule->kind == SCHEDULE_LINEAR)
        shape = 1.0 - p;
    else
        shape = 1.0 - sqrt(p);
    return schedule->peak * (shape + schedule->final_fraction * (1.0 - shape));
}

#endif
