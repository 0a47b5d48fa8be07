/*
The gate of attention's output: out = x s(gate) with the logistic function s, and the split of q_proj's rows into
queries and gates, head by head.
*/
#ifndef LLMC_CPU_GATE_H
#define LLMC_CPU_GATE_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

static void cpu_split_heads(Stored *joined, Stored *first, Stored *second, size_t n, size_t heads, size_t HD,
                            int join) {
    const size_t bytes = HD * sizeof(floatX);
#pragma omp parallel for schedule(static) if (n * heads * HD >= PARALLEL_MIN)
    for (size_t i = 0; i < n * heads; i++) {
        floatX *both = (floatX *)joined + 2 * i * HD, *a = (floatX *)first + i * HD, *b = (floatX *)second + i * HD;
        memcpy(join ? both : a, join ? a : both, bytes);
        memcpy(join ? both + HD : b, join ? b : both + HD, bytes);
    }
}

static VECTOR_FUNCTION void gate_run(floatX *out, const floatX *x, const floatX *gate, size_t count) {
    for (size_t i = 0; i < count; i += VECTOR_LANES) {
        Vector slope, s = vector_logistic(vector_load_first(gate + i, count - i, 0), &slope);
        vector_store_first(out + i, vector_load_first(x + i, count - i, 0) * s, count - i);
    }
}

static VECTOR_FUNCTION void gate_run_back(floatX *dx, floatX *dgate, const floatX *dout, const floatX *x,
                                          const floatX *gate, size_t count) {
    for (size_t i = 0; i < count; i += VECTOR_LANES) {
        const Vector d = vector_load_first(dout + i, count - i, 0), y = vector_load_first(x + i, count - i, 0);
        Vector slope, s = vector_logistic(vector_load_first(gate + i, count - i, 0), &slope);
        vector_store_first(dx + i, d * s, count - i);
        vector_store_first(dgate + i, d * y * slope, count - i);
    }
}

// Runs a gate of `width` elements: out = x s, or with dgate out = dout s and dgate = s' sum of dout x.
static VECTOR_FUNCTION void gate_run_wide(floatX *out, floatX *dgate, const floatX *dout, const floatX *x,
                                          const floatX *gate, size_t width) {
    Vector slope, z = {0}, sum = {0};
    floatS total = 0;
    const Vector s = vector_logistic(z + load(*gate), &slope);
    for (size_t i = 0; i < width; i += VECTOR_LANES) {
        const Vector in = vector_load_first(x + i, width - i, 0);
        const Vector d = dgate ? vector_load_first(dout + i, width - i, 0) : in;
        sum += d * in;
        vector_store_first(out + i, d * s, width - i);
    }
    for (size_t i = 0; i < VECTOR_LANES; i++) total += sum[i];
    if (dgate) *dgate = store(total * slope[0]);
}

static void cpu_gate_forward(Stored *out, const Stored *x, const Stored *gate, size_t count, size_t width) {
    if (width > 1) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
        for (size_t i = 0; i < count; i += width)
            gate_run_wide((floatX *)out + i, NULL, NULL, (const floatX *)x + i, (const floatX *)gate + i / width,
                          width);
        return;
    }
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i += BLOCK_ELEMENTS)
        gate_run((floatX *)out + i, (const floatX *)x + i, (const floatX *)gate + i,
                 min_size(BLOCK_ELEMENTS, count - i));
}

static void cpu_gate_backward(Stored *dx, Stored *dgate, const Stored *dout, const Stored *x, const Stored *gate,
                              size_t count, size_t width) {
    if (width > 1) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
        for (size_t i = 0; i < count; i += width)
            gate_run_wide((floatX *)dx + i, (floatX *)dgate + i / width, (const floatX *)dout + i,
                          (const floatX *)x + i, (const floatX *)gate + i / width, width);
        return;
    }
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i += BLOCK_ELEMENTS)
        gate_run_back((floatX *)dx + i, (floatX *)dgate + i, (const floatX *)dout + i, (const floatX *)x + i,
                      (const floatX *)gate + i, min_size(BLOCK_ELEMENTS, count - i));
}

#endif
