/*
Adapters (LoRA, Hu et al. 2021): a product of low rank that joins some columns of a wider matrix, and back; scaling, and
dropout. Dropout keeps elements by the seed and their place in the stream alone: the same for every cut into chunks,
forward and backward, and on every op set.
*/
#ifndef LLMC_CPU_ADAPTER_H
#define LLMC_CPU_ADAPTER_H
#include "llmc/ops/ops.h"
#include "llmc/base/random.h"
#include "elements.h"
#include "product.h"

static void cpu_adapter_forward(Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n,
                                size_t r, size_t OC) {
    Product p = product_of("adapter_forward", n, OC, r, h, b, (floatX *)out + column);
    p.b_transposed = 1;
    p.out_stride = width;
    p.accumulate = 1;
    matrix_product(&p);
}

static void cpu_adapter_backward(Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column,
                                 const Stored *h, const Stored *b, size_t n, size_t r, size_t OC) {
    const Stored *columns = (const Stored *)((const floatX *)dout + column);
    Product input = product_of("adapter_backward, dh", n, r, OC, columns, b, dh);
    Product weight = product_of("adapter_backward, db", OC, r, n, columns, h, db);
    input.a_stride = weight.a_stride = width;
    matrix_product(&input);
    weight.a_transposed = 1;
    weight.out_summed = 1;
    weight.accumulate = 1;
    if (db) matrix_product(&weight);
}

static void cpu_scale(Stored *x_, double factor, size_t count) {
    const floatS by = (floatS)factor;
    floatX *x = (floatX *)x_;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) x[i] = store(load(x[i]) * by);
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
