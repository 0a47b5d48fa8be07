/*
The attention that each key receives: the sum of exp(scale q k - lse) over queries and heads. A thread takes
RECEIVED_KEYS keys at a time, which stay in the L1 cache while all queries pass. So each sum has one order, for any
number of threads.
*/
#ifndef LLMC_CPU_RECEIVED_H
#define LLMC_CPU_RECEIVED_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

enum { RECEIVED_KEYS = 32 };

// Adds to sum[count] the attention that keys `first`, first + 1, ... receive from the queries of one head. key, query:
// elements between rows
static VECTOR_FUNCTION void received_of_head(floatS *sum, const floatX *q, const floatX *k, const floatS *lse,
                                             size_t first, size_t count, size_t n, size_t before, size_t NH, size_t NKV,
                                             size_t HD, floatS scale) {
    for (size_t t = first > before ? first - before : 0; t < n; t++) { // earlier queries see none of these keys
        const size_t seen = min_size(count, before + t + 1 - first);
        const floatX *query = q + t * NH * HD;
        floatS score[RECEIVED_KEYS] = {0};
        for (size_t j = 0; j < seen; j++) {
            const floatX *key = k + (first + j) * NKV * HD;
            Vector dot = {0};
            for (size_t i = 0; i < HD; i += VECTOR_LANES)
                dot += vector_load_first(query + i, HD - i, 0) * vector_load_first(key + i, HD - i, 0);
            score[j] = scale * vector_sum_across(dot) - lse[t * NH];
        }
        for (size_t j = 0; j < seen; j += VECTOR_LANES) {
            floatS p[VECTOR_LANES];
            vector_store(p, vector_exp(vector_load(score + j)));
            for (size_t i = 0; i < min_size(VECTOR_LANES, seen - j); i++) sum[j + i] += p[i];
        }
    }
}

static size_t cpu_attention_received_scratch(size_t keys, size_t NKV) { return (void)keys, (void)NKV, 0; }

static void cpu_attention_received(Summed *received, const Stored *q, const Stored *k, const Summed *lse, size_t n,
                                   size_t keys, size_t NH, size_t NKV, size_t HD, double scale, Summed *scratch) {
    (void)scratch;
#pragma omp parallel for schedule(dynamic) if (n * keys * NH * HD >= PARALLEL_WORK)
    for (size_t first = 0; first < keys; first += RECEIVED_KEYS)
        for (size_t h = 0; h < NH; h++)
            received_of_head((floatS *)received + first, (const floatX *)q + h * HD,
                             (const floatX *)k + h / (NH / NKV) * HD, (const floatS *)lse + h, first,
                             min_size(RECEIVED_KEYS, keys - first), n, keys - n, NH, NKV, HD, (floatS)scale);
}

#endif
