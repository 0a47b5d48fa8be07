/*
Adds a layer's sums over tokens (floatS) to stored gradients, and computes the gradients' norm. A layer's sums are
rounded to the gradient's type once per micro-batch, never once per chunk.
*/
#ifndef LLMC_CPU_GRADIENT_H
#define LLMC_CPU_GRADIENT_H
#include "llmc/ops/ops.h"
#include "elements.h"

static void cpu_round_sums(Stored *out, const Summed *in, size_t count) {
    const floatS *sums = (const floatS *)in;
    floatX *rounded = (floatX *)out;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) rounded[i] = store(sums[i]);
}

static void cpu_widen(float *out, const Stored *in_, size_t count) {
    const floatX *in = (const floatX *)in_;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) out[i] = (float)load(in[i]);
}

static void cpu_gradient_add(void *gradient, DType type, const Summed *in_, size_t count) {
    size_t blocks = block_count(count);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b * BLOCK_ELEMENTS, length = min_size(BLOCK_ELEMENTS, count - begin);
        const floatS *in = (const floatS *)in_ + begin;
        floatS buffer[BLOCK_ELEMENTS], *block = block_open(gradient, type, begin, length, buffer);
#pragma omp simd
        for (size_t i = 0; i < length; i++) block[i] += in[i];
        block_close(gradient, type, begin, length, block);
    }
}

// Adds up squares in double, in a fixed number of parts that are added in order: the same bits for any number of
// threads.
static void cpu_sum_of_squares(double *sums, size_t parts, const void *x, DType type, size_t count) {
    const size_t blocks = block_count(count), used = min_size(parts, 64);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t p = 0; p < parts; p++) {
        sums[p] = 0;
        for (size_t b = blocks * p / used; p < used && b < blocks * (p + 1) / used; b++) {
            size_t begin = b * BLOCK_ELEMENTS, length = min_size(BLOCK_ELEMENTS, count - begin);
            floatS buffer[BLOCK_ELEMENTS];
            const floatS *block = block_read(x, type, begin, length, buffer);
            double squares = 0;
#pragma omp simd reduction(+ : squares)
            for (size_t i = 0; i < length; i++) squares += (double)block[i] * (double)block[i];
            sums[p] += squares;
        }
    }
}

#endif
