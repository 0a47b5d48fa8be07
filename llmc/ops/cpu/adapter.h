/*
Scaling and dropout of adapters (LoRA, Hu et al. 2021); their products are in linear.h. Dropout depends only on the seed
and an element's index in the stream: the same for any chunks, forward and backward, and on every op set.
*/
#ifndef LLMC_CPU_ADAPTER_H
#define LLMC_CPU_ADAPTER_H
#include "llmc/ops/ops.h"
#include "llmc/base/random.h"
#include "elements.h"
#include "vector.h"

static void cpu_scale(void *x, DType type, double factor, size_t count) {
    const floatS by = (floatS)factor;
    size_t blocks = block_count(count);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b * BLOCK_ELEMENTS, length = min_size(BLOCK_ELEMENTS, count - begin);
        floatS buffer[BLOCK_ELEMENTS], *block = block_open(x, type, begin, length, buffer);
#pragma omp simd
        for (size_t i = 0; i < length; i++) block[i] *= by;
        block_close(x, type, begin, length, block);
    }
}

static void cpu_dropout(Stored *out_, const Stored *in_, size_t n, size_t width, size_t first_row, double rate,
                        uint64_t seed, int accumulate) {
    const uint64_t threshold = dropout_threshold(rate), first = first_row * width;
    const floatS kept = (floatS)(1 / (1 - rate));
    const floatX *in = (const floatX *)in_;
    floatX *out = (floatX *)out_;
#pragma omp parallel for simd schedule(static) if (parallel : n * width >= PARALLEL_MIN)
    for (size_t i = 0; i < n * width; i++) {
        floatS x = dropout_keeps(seed, first + i, threshold) ? load(in[i]) * kept : 0;
        out[i] = store(accumulate ? load(out[i]) + x : x);
    }
}

#endif
