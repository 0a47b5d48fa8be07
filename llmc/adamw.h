/*
The optimizer over the parameter table: the norm of the whole gradient, and one AdamW step of every parameter. The arithmetic
is ops->adamw's; here is decided who decays (matrices; norms and biases do not) and who gets which random bits.

Where something is held in bf16 it is rounded stochastically. Every parameter has bits of its own at every step, a function of
(seed, step, place in the table) alone: so a resumed run repeats them, and a step does not depend on which parameters
happen to lie, or to be stepped, side by side. That is why neighbours are not stepped together.
*/
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H
#include "random.h"
#include "residency.h"
#include "weight_source.h"

#define RANDOM_STREAM_ADAMW 0x6164616d77ull // of random.h ("adamw")

// ---- the gradient as a whole ----------------------------------------------------------------------------------------------
// Its L2 norm, summed in double in the order of the table. *bad becomes the first parameter whose gradient holds NaN or an
// infinity (or values whose squares do not fit a double), or NULL.
static inline double gradient_norm(const Model *model, const Ops *ops, const void *gradients, DType type,
                                   const Parameter **bad) {
    double sum = 0;
    size_t i;
    *bad = NULL;
    for (i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const char *gradient = (const char *)gradients + p->offset * dtype_size(type);
        double squares = ops->sum_of_squares(gradient, type, parameter_elements(p));
        if (!isfinite(squares) && !*bad) *bad = p;
        sum += squares;
    }
    return sqrt(sum);
}

// What the gradient is multiplied by, so that its norm is at most `limit` (0: no limit).
static inline double gradient_clip(double norm, double limit) { return limit > 0 && norm > limit ? limit / norm : 1; }

// ---- the optimizer ----------------------------------------------------------------------------------------------------------
// master = weights, through the host a slab at a time.
static inline void optimizer_fill_master(const Model *model, const Ops *ops, const void *weights, float *master) {
    size_t begin, n, size = dtype_size(model->dtype);
    for (begin = 0; begin < model->elements; begin += n) {
        n = min_size(model->elements - begin, SLAB_ELEMENTS);
        ops->copy_out(staged_raw.bytes, (const char *)weights + begin * size, n * size);
        elements_convert(staged_reformed.bytes, DTYPE_FP32, staged_raw.bytes, model->dtype, n);
        ops->copy_in(master + begin, staged_reformed.bytes, n * sizeof(float));
    }
}

// Before the first step, once the weights are there.
static inline void optimizer_init(const Model *model, const Ops *ops, const void *weights, const OptimizerState *state,
                                  DType moment_type) {
    ops->zero(state->m, model->elements * dtype_size(moment_type));
    ops->zero(state->v, model->elements * dtype_size(moment_type));
    if (state->master) optimizer_fill_master(model, ops, weights, state->master);
}

// `step` is the same for all: its weight_decay is that of matrices, its seed that of the run.
static inline void optimizer_step(const Model *model, const Ops *ops, void *weights, const void *gradients,
                                  DType gradient_type, const OptimizerState *state, DType moment_type,
                                  const AdamW *step) {
    size_t stored = dtype_size(model->dtype), gradient = dtype_size(gradient_type), moment = dtype_size(moment_type), i;
    for (i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        size_t begin = p->offset;
        AdamW own = *step;
        if (!parameter_decays(p)) own.weight_decay = 0;
        own.seed = random_bits(step->seed, RANDOM_STREAM_ADAMW + i, (uint64_t)step->step);
        ops->adamw((Stored *)((char *)weights + begin * stored), state->master ? state->master + begin : NULL,
                   (const char *)gradients + begin * gradient, gradient_type, (char *)state->m + begin * moment,
                   (char *)state->v + begin * moment, moment_type, parameter_elements(p), &own);
    }
}

#endif
