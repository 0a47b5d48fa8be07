/*
Log-probabilities and the gradient of the logits: the only op over [n,V]. A row of logits is read twice: for its maximum
and its sum of exponentials together, block by block while the block is in cache (a block that raises the maximum
rescales the sum), and to be overwritten by its gradient. Exponentials are fp32, their sum is double.

Entropy comes from the first reading: with z = (x - top) / temperature and S = sum exp z it is log S - (sum z exp z) /
S, two terms that are never negative and so do not cancel.
*/
#ifndef LLMC_CPU_LOGPROB_H
#define LLMC_CPU_LOGPROB_H
#include <float.h>
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

// The larger of top and the maximum of x[0..count), NaN aside. In lanes, since clang takes no maximum for a reduction.
static floatS maximum(const floatX *x, size_t count, floatS top) {
    enum { LANES = 32 };
    floatS lane[LANES];
    size_t i;
    for (size_t j = 0; j < LANES; j++) lane[j] = top;
    for (i = 0; i + LANES <= count; i += LANES) {
#pragma omp simd
        for (size_t j = 0; j < LANES; j++) lane[j] = load(x[i + j]) > lane[j] ? load(x[i + j]) : lane[j];
    }
    for (; i < count; i++) top = load(x[i]) > top ? load(x[i]) : top;
    for (size_t j = 0; j < LANES; j++) top = lane[j] > top ? lane[j] : top;
    return top;
}

static inline Exponentials sum_of_exponentials(const floatX *x, size_t V, floatS inverse_temperature,
                                               const int weighted) {
    Exponentials e = {-FLT_MAX, 0, 0};
    for (size_t begin = 0; begin < V; begin += BLOCK_ELEMENTS) {
        size_t count = min_size(BLOCK_ELEMENTS, V - begin);
        const floatX *block = x + begin;
        floatS top = maximum(block, count, e.top), block_sum = 0, block_weighted = 0;
        if (top > e.top) raise_top(&e, top, (double)inverse_temperature);
#pragma omp simd reduction(+ : block_sum, block_weighted)
        for (size_t i = 0; i < count; i++) {
            floatS z = (load(block[i]) - top) * inverse_temperature, p = simd_exp(z);
            block_sum += p;
            if (weighted) block_weighted += p * (z < LEAST_Z ? LEAST_Z : z);
        }
        e.sum += (double)block_sum;
        e.weighted += (double)block_weighted;
    }
    return e;
}

/*
One row; weight NULL leaves the logits as they are. The target stands aside (-inf) while the others are summed: 1 - p of
the target, which is its gradient, is then others / sum, without cancellation where the model is nearly certain.
*/
static floatS logprob_row(floatX *x, size_t target, const floatS *weight, floatS *entropy, size_t V,
                          double temperature) {
    const double inverse = 1 / temperature;
    const floatS inverse_temperature = (floatS)inverse;
    const floatX logit = x[target];
    double value = (double)load(logit);
    x[target] = store(-INFINITY);
    Exponentials others =
        entropy ? sum_of_exponentials(x, V, inverse_temperature, 1) : sum_of_exponentials(x, V, inverse_temperature, 0);
    x[target] = logit;
    if (value > (double)others.top) raise_top(&others, load(logit), inverse);
    floatS top = others.top;
    double itself = exp((value - (double)top) * inverse);
    double sum = itself + others.sum;
    double logp = itself > others.sum ? -log1p(others.sum / itself) : (value - (double)top) * inverse - log(sum);
    if (entropy) {
        const double logsum = itself == 1 ? log1p(others.sum) : log(sum); // near certainty the others are its digits
        *entropy = (floatS)(logsum - (others.weighted + itself * ((value - (double)top) * inverse)) / sum);
    }
    if (!weight) return (floatS)logp;
    double slope = (double)*weight * inverse;
    floatS scale = (floatS)(-slope / sum);
#pragma omp simd
    for (size_t i = 0; i < V; i++) x[i] = store(scale * simd_exp((load(x[i]) - top) * inverse_temperature));
    x[target] = store((floatS)(slope * (others.sum / sum)));
    return (floatS)logp;
}

static void cpu_logprob(Summed *logp_, Summed *entropy_, Stored *logits_, const int32_t *targets, const Summed *weight_,
                        size_t n, size_t V, size_t stride, double temperature) {
    floatS *logp = (floatS *)logp_, *entropy = (floatS *)entropy_;
    const floatS *weight = (const floatS *)weight_;
    // dynamic, `turn` rows at a time: rows that do not count cost next to nothing and come in long runs (prompts)
    size_t turn = 1 + 4 * PARALLEL_MIN / V;
    (void)turn; // without OpenMP
#pragma omp parallel for schedule(dynamic, turn) if (n * V >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatX *x = (floatX *)logits_ + t * stride;
        int counts = targets[t] >= 0, gradient = weight != NULL && counts && weight[t] != 0;
        if (counts)
            logp[t] = logprob_row(x, (size_t)targets[t], gradient ? weight + t : NULL, entropy ? entropy + t : NULL, V,
                                  temperature);
        else
            logp[t] = 0;
        if (entropy && !counts) entropy[t] = 0;
        if (weight && !gradient) memset(x, 0, V * sizeof(*x));
    }
}

#endif
