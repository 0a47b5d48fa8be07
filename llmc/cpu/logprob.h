/*
The loss head's log-probabilities and their gradient: the only op over [n,V]. A row of logits is read twice: once for its
maximum and its sum of exponentials together, block by block while the block is in cache (when a block raises the
maximum, the sum so far is scaled to it), and once to be overwritten by its gradient. Exponentials are fp32, their sum
over the vocabulary is double.
*/
#ifndef LLMC_CPU_LOGPROB_H
#define LLMC_CPU_LOGPROB_H
#include <float.h>
#include "../ops.h"
#include "elements.h"
#include "simd_math.h"

// The larger of top and the maximum of x[0..count), NaN aside. In lanes, since clang takes no maximum for a reduction.
static floatS maximum(const floatX *x, size_t count, floatS top) {
    enum { LANES = 32 };
    floatS lane[LANES];
    size_t i, j;
    for (j = 0; j < LANES; j++) lane[j] = top;
    for (i = 0; i + LANES <= count; i += LANES) {
#pragma omp simd
        for (j = 0; j < LANES; j++) lane[j] = load(x[i + j]) > lane[j] ? load(x[i + j]) : lane[j];
    }
    for (; i < count; i++) top = load(x[i]) > top ? load(x[i]) : top;
    for (j = 0; j < LANES; j++) top = lane[j] > top ? lane[j] : top;
    return top;
}

/*
Returns the sum of exp((x - top) / temperature). The maximum starts at the lowest finite number, not at -inf: logits of
-inf (masked words) then count as probability 0 even where a whole block consists of them, while +inf and NaN reach the
sum as NaN.
*/
static double sum_of_exponentials(const floatX *x, size_t V, floatS inverse_temperature, floatS *top) {
    double sum = 0;
    size_t begin;
    *top = -FLT_MAX;
    for (begin = 0; begin < V; begin += BLOCK_ELEMENTS) {
        size_t count = min_size(BLOCK_ELEMENTS, V - begin);
        const floatX *block = x + begin;
        floatS block_top = maximum(block, count, *top), block_sum = 0;
        if (block_top > *top) {
            sum *= exp(((double)*top - (double)block_top) * (double)inverse_temperature);
            *top = block_top;
        }
#pragma omp simd reduction(+ : block_sum)
        for (size_t i = 0; i < count; i++) block_sum += simd_exp((load(block[i]) - block_top) * inverse_temperature);
        sum += (double)block_sum;
    }
    return sum;
}

/*
One row; weight NULL leaves the logits as they are. The target stands aside (-inf) while the others are summed: 1 - p of
the target, which is its gradient, is then others / sum, without cancellation where the model is nearly certain.
*/
static floatS logprob_row(floatX *x, size_t target, const floatS *weight, size_t V, double temperature) {
    const double inverse = 1 / temperature;
    const floatS inverse_temperature = (floatS)inverse;
    const floatX logit = x[target];
    double value = (double)load(logit), others, itself, sum, logp, slope;
    floatS top, scale;
    x[target] = store(-INFINITY);
    others = sum_of_exponentials(x, V, inverse_temperature, &top);
    x[target] = logit;
    if (value > (double)top) {
        others *= exp(((double)top - value) * inverse);
        top = load(logit);
    }
    itself = exp((value - (double)top) * inverse);
    sum = itself + others;
    logp = itself > others ? -log1p(others / itself) : (value - (double)top) * inverse - log(sum);
    if (!weight) return (floatS)logp;
    slope = (double)*weight * inverse;
    scale = (floatS)(-slope / sum);
#pragma omp simd
    for (size_t i = 0; i < V; i++) x[i] = store(scale * simd_exp((load(x[i]) - top) * inverse_temperature));
    x[target] = store((floatS)(slope * (others / sum)));
    return (floatS)logp;
}

static void logprob(Summed *logp_, Stored *logits_, const int32_t *targets, const Summed *weight_, size_t n, size_t V,
                    double temperature) {
    floatS *logp = (floatS *)logp_;
    const floatS *weight = (const floatS *)weight_;
    // dynamic, `turn` rows at a time: rows that do not count cost next to nothing and come in long runs (prompts)
    size_t turn = 1 + 4 * PARALLEL_MIN / V, t;
    (void)turn; // without OpenMP
#pragma omp parallel for schedule(dynamic, turn) if (n * V >= PARALLEL_MIN)
    for (t = 0; t < n; t++) {
        floatX *x = (floatX *)logits_ + t * V;
        int counts = targets[t] >= 0, gradient = weight != NULL && counts && weight[t] != 0;
        logp[t] = counts ? logprob_row(x, (size_t)targets[t], gradient ? weight + t : NULL, V, temperature) : 0;
        if (weight && !gradient) memset(x, 0, V * sizeof(*x));
    }
}

#endif
