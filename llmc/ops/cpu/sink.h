/*
Sinks of attention: one more term, exp(sinks[h]), in the softmax of a head, which reads no value. With d = sinks[h] - l
(l: the log-sum-exp of the keys), the keys keep the share 1 / (1 + exp(d)), and lse = max(l, sinks[h]) + log(1 +
exp(-|d|)): nothing cancels or overflows. Heads are taken VECTOR_LANES at a time. dsinks is a sum over tokens, in groups
of TOKEN_GROUP for any number of threads.
*/
#ifndef LLMC_CPU_SINK_H
#define LLMC_CPU_SINK_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

// Loads lanes [0, count) of sums; all further lanes are 0.
VECTOR_INLINE Vector sums_load_first(const floatS *x, size_t count) {
    floatS lane[VECTOR_LANES] = {0};
    if (count >= VECTOR_LANES) return vector_load(x);
    for (size_t i = 0; i < count; i++) lane[i] = x[i];
    return vector_load(lane);
}

static VECTOR_FUNCTION void sink_row(floatX *out, floatS *lse, const floatX *sinks, size_t NH, size_t HD) {
    for (size_t first = 0; first < NH; first += VECTOR_LANES) {
        const size_t heads = min_size(VECTOR_LANES, NH - first);
        const Vector l = sums_load_first(lse + first, heads), s = vector_load_first(sinks + first, heads, 0);
        const Vector most = vector_max(l, s), rest = vector_exp(-vector_max(l - s, s - l));
        Vector slope, share = vector_logistic(l - s, &slope);
        for (size_t i = 0; i < heads; i++) {
            floatX *head = out + (first + i) * HD;
            lse[first + i] = most[i] + (floatS)log1p((double)rest[i]);
            for (size_t c = 0; c < HD; c += VECTOR_LANES)
                vector_store_first(head + c, vector_load_first(head + c, HD - c, 0) * share[i], HD - c);
        }
    }
}

static void cpu_sink_forward(Stored *out, Summed *lse, const Stored *sinks, size_t n, size_t NH, size_t HD) {
#pragma omp parallel for schedule(static) if (n * NH * HD >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        sink_row((floatX *)out + t * NH * HD, (floatS *)lse + t * NH, (const floatX *)sinks, NH, HD);
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Adds exp(sinks - lse) (dout . out) of a row to sum[NH].
static VECTOR_FUNCTION void sink_row_back(floatS *sum, const floatX *dout, const floatX *out, const floatS *lse,
                                          const floatX *sinks, size_t NH, size_t HD) {
    for (size_t first = 0; first < NH; first += VECTOR_LANES) {
        const size_t heads = min_size(VECTOR_LANES, NH - first);
        const Vector s = vector_load_first(sinks + first, heads, 0);
        const Vector p = vector_exp(s - sums_load_first(lse + first, heads));
        for (size_t i = 0; i < heads; i++) {
            const size_t head = (first + i) * HD;
            Vector dot = {0};
            for (size_t c = 0; c < HD; c += VECTOR_LANES)
                dot += vector_load_first(dout + head + c, HD - c, 0) * vector_load_first(out + head + c, HD - c, 0);
            sum[first + i] += p[i] * vector_sum_across(dot);
        }
    }
}

// Sizes scratch[groups][NH]: sums of each group of tokens
static size_t cpu_sink_backward_scratch(size_t n, size_t NH) { return (n + TOKEN_GROUP - 1) / TOKEN_GROUP * NH; }

static void cpu_sink_backward(Summed *dsinks, const Stored *dout, const Stored *out, const Summed *lse,
                              const Stored *sinks, size_t n, size_t NH, size_t HD, Summed *scratch) {
    const size_t groups = (n + TOKEN_GROUP - 1) / TOKEN_GROUP;
    floatS *part = (floatS *)scratch;
#pragma omp parallel for schedule(static) if (n * NH * HD >= PARALLEL_MIN)
    for (size_t g = 0; g < groups; g++) {
        memset(part + g * NH, 0, NH * sizeof(*part));
        for (size_t t = g * TOKEN_GROUP; t < min_size((g + 1) * TOKEN_GROUP, n); t++)
            sink_row_back(part + g * NH, (const floatX *)dout + t * NH * HD, (const floatX *)out + t * NH * HD,
                          (const floatS *)lse + t * NH, (const floatX *)sinks, NH, HD);
    }
    for (size_t g = 0; g < groups; g++)
        for (size_t h = 0; h < NH; h++) ((floatS *)dsinks)[h] -= part[g * NH + h];
}

#endif
