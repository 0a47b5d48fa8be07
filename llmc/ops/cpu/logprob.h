/*
Log-probabilities and the gradient of the logits: the only op over [n,V]. A row of logits is read twice. The first
reading goes block by block: it finds a block's maximum and then, from the L1 cache, its sum of exponentials; a new
maximum rescales the sum. The second reading overwrites the row with its gradient. In fp32 the exponentials replace the
logits: the second reading only scales them, each block by its maximum relative to the row's. In bf16 that would round
them once more, so the second reading recomputes them. Exponentials are fp32, their sum over blocks is double.

With a cap, tanh is computed in both readings, also in fp32: its slope needs the logit, so exponentials do not replace
the logits. A row's capped logits have their maximum at the same token as its logits.

The first reading also finds the entropy: with z = (x - top) / temperature and S = sum exp z it is log S - (sum z exp z)
/ S, two terms that are never negative and so do not cancel.
*/
#ifndef LLMC_CPU_LOGPROB_H
#define LLMC_CPU_LOGPROB_H
#include <float.h>
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

// A row has this many blocks: of 1024 logits each up to a vocabulary of 256 k
enum { LOGIT_BLOCKS = 256, KEEPS_EXPONENTIALS = sizeof(floatX) == sizeof(floatS) };
static size_t logit_block(size_t V) {
    return max_size(round_up((V + LOGIT_BLOCKS - 1) / LOGIT_BLOCKS, VECTOR_LANES), BLOCK_ELEMENTS);
}

// Returns the larger of top and the maximum of x[0..count), ignoring NaN.
VECTOR_INLINE floatS maximum(const floatX *x, size_t count, floatS top) {
    Vector most[2] = {vector_of(top), vector_of(top)};
    size_t i = 0;
    for (; i + 2 * VECTOR_LANES <= count; i += 2 * VECTOR_LANES)
        for (size_t v = 0; v < 2; v++) most[v] = vector_max(vector_load_stored(x + i + v * VECTOR_LANES), most[v]);
    for (; i < count; i += VECTOR_LANES) most[0] = vector_max(vector_load_first(x + i, count - i, top), most[0]);
    return vector_max_across(vector_max(most[0], most[1]));
}

// Returns cap tanh(x / cap) and its slope; infinite logits stay infinite.
VECTOR_INLINE Vector capped(Vector x, floatS cap, Vector *slope) {
    const Vector y = vector_tanh(x * (1 / cap), slope);
    return vector_select((VectorBits)(x - x == 0), cap * y, x);
}

// Returns capped() for one logit, with the same digits; without a cap x itself and slope 1.
VECTOR_INLINE floatS capped_logit(floatS x, floatS cap, floatS *slope) {
    Vector slopes = vector_of(1);
    const floatS y = cap > 0 ? capped(vector_of(x), cap, &slopes)[0] : x;
    *slope = slopes[0];
    return y;
}

// Loads logits, or with capping the capped logits; lanes from `count` on are -inf. capping: a constant once inlined
VECTOR_INLINE Vector logits_load(const floatX *x, size_t count, const int capping, floatS cap, Vector *slope) {
    const Vector logits = vector_load_first(x, count, -INFINITY);
    return capping ? capped(logits, cap, slope) : logits;
}

// Sums the row's exponentials. With tops, logits of block b become exp((x - tops[b]) / temperature).
VECTOR_INLINE Exponentials sum_of_exponentials(floatX *x, size_t V, floatS inverse_temperature, const int weighted,
                                               floatS *tops, const int capping, floatS cap) {
    Exponentials e = {-FLT_MAX, 0, 0};
    const size_t block = logit_block(V);
    floatS largest = e.top; // largest logit before the cap
    for (size_t begin = 0; begin < V; begin += block) {
        const size_t count = min_size(block, V - begin);
        largest = maximum(x + begin, count, largest);
        floatS unused;
        const floatS top = capping ? capped_logit(largest, cap, &unused) : largest;
        Vector sum = {0}, sum_weighted = {0}, slope;
        if (top > e.top) raise_top(&e, top, (double)inverse_temperature);
        for (size_t i = 0; i < count; i += VECTOR_LANES) {
            const Vector logits = logits_load(x + begin + i, count - i, capping, cap, &slope);
            const Vector z = (logits - top) * inverse_temperature, p = vector_exp(z);
            sum += p;
            if (weighted) sum_weighted += p * vector_max(vector_of(LEAST_Z), z);
            if (tops) vector_store_first(x + begin + i, p, count - i);
        }
        if (tops) tops[begin / block] = top;
        e.sum += (double)vector_sum_across(sum);
        e.weighted += (double)vector_sum_across(sum_weighted);
    }
    return e;
}

// Computes x = scale * exp((x - top) / temperature), times the cap's slope: the gradient of all words except the
// target.
VECTOR_INLINE void scale_exponentials(floatX *x, size_t V, floatS scale, const Exponentials *e, const floatS *tops,
                                      double inverse_temperature, const int capping, floatS cap) {
    const size_t block = logit_block(V);
    for (size_t begin = 0; begin < V; begin += block) {
        const size_t count = min_size(block, V - begin);
        const floatS by =
            tops ? scale * (floatS)exp(((double)tops[begin / block] - (double)e->top) * inverse_temperature) : scale;
        for (size_t i = begin; i < begin + count; i += VECTOR_LANES) {
            const size_t lanes = begin + count - i;
            Vector slope, logits = tops ? vector_of(0) : logits_load(x + i, lanes, capping, cap, &slope);
            Vector p =
                tops ? vector_load_first(x + i, lanes, 0) : vector_exp((logits - e->top) * (floatS)inverse_temperature);
            if (capping) p *= slope;
            vector_store_first(x + i, by * p, lanes);
        }
    }
}

/*
Computes one row; weight NULL leaves the logits unchanged. The target's logit counts as -inf while the other words are
summed. The target's gradient, 1 - p, is then others / sum, without cancellation when the model is nearly certain.
*/
static VECTOR_FUNCTION floatS logprob_row(floatX *x, size_t target, const floatS *weight, floatS *entropy, size_t V,
                                          Temperature temperature) {
    floatS of_blocks[LOGIT_BLOCKS], *tops = weight && KEEPS_EXPONENTIALS ? of_blocks : NULL;
    const double inverse = 1 / temperature.divisor;
    const floatS by = (floatS)inverse, cap = (floatS)temperature.cap;
    const int capping = temperature.cap > 0;
    const floatX logit = x[target];
    floatS cap_slope;
    double value = (double)capped_logit(load(logit), cap, &cap_slope);
    x[target] = store(-INFINITY);
    Exponentials others = capping   ? sum_of_exponentials(x, V, by, entropy != NULL, NULL, 1, cap)
                          : entropy ? sum_of_exponentials(x, V, by, 1, tops, 0, 0)
                          : tops    ? sum_of_exponentials(x, V, by, 0, of_blocks, 0, 0)
                                    : sum_of_exponentials(x, V, by, 0, NULL, 0, 0);
    x[target] = logit;
    if (value > (double)others.top) raise_top(&others, (floatS)value, inverse);
    floatS top = others.top;
    double itself = exp((value - (double)top) * inverse);
    double sum = itself + others.sum;
    double logp = itself > others.sum ? -log1p(others.sum / itself) : (value - (double)top) * inverse - log(sum);
    if (entropy) {
        const double logsum = itself == 1 ? log1p(others.sum) : log(sum); // near certainty log1p keeps the digits
        *entropy = (floatS)(logsum -
                            (others.weighted + itself * fmax((value - (double)top) * inverse, (double)LEAST_Z)) / sum);
    }
    if (!weight) return (floatS)logp;
    double slope = (double)*weight * inverse;
    if (capping)
        scale_exponentials(x, V, (floatS)(-slope / sum), &others, NULL, inverse, 1, cap);
    else
        scale_exponentials(x, V, (floatS)(-slope / sum), &others, KEEPS_EXPONENTIALS ? of_blocks : NULL, inverse, 0, 0);
    x[target] = store((floatS)(slope * (double)cap_slope * (others.sum / sum)));
    return (floatS)logp;
}

static void cpu_logprob(Summed *logp_, Summed *entropy_, Stored *logits_, const int32_t *targets, const Summed *weight_,
                        size_t n, size_t V, size_t stride, Temperature temperature) {
    floatS *logp = (floatS *)logp_, *entropy = (floatS *)entropy_;
    const floatS *weight = (const floatS *)weight_;
    // threads take `turn` rows at a time: rows without a target cost little and form long runs (prompts)
    size_t turn = 1 + 4 * PARALLEL_MIN / V;
    (void)turn; // unused without OpenMP
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
