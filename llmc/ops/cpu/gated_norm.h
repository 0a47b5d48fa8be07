/*
The gated norm of linear attention: out = w xhat z s(z) with xhat = x / sqrt(mean(x^2) + eps) over a head of V elements
and the logistic function s. Backward recomputes statistics and gates. dw is a sum over tokens and heads, made in parts
as in norm.h.
*/
#ifndef LLMC_CPU_GATED_NORM_H
#define LLMC_CPU_GATED_NORM_H
#include "llmc/ops/ops.h"
#include "norm.h"

static VECTOR_FUNCTION void gated_norm_head(floatX *out, const floatX *x, const floatX *z, const floatX *w, size_t V,
                                            double eps) {
    const RowStatistics s = row_statistics(x, V, eps, 0);
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector gate = vector_load_first(z + d, V - d, 0);
        Vector slope, y = gate * vector_logistic(gate, &slope) * vector_load_first(w + d, V - d, 0);
        vector_store_first(out + d, y * (s.rstd * vector_load_first(x + d, V - d, 0)), V - d);
    }
}

static void cpu_gated_norm_forward(Stored *out, const Stored *x, const Stored *z, const Stored *w, size_t n,
                                   size_t heads, size_t V, size_t stride, double eps) {
#pragma omp parallel for schedule(static) if (n * heads * V >= PARALLEL_MIN)
    for (size_t i = 0; i < n * heads; i++)
        gated_norm_head((floatX *)out + i * V, (const floatX *)x + i * V,
                        (const floatX *)z + i / heads * stride + i % heads * V, (const floatX *)w, V, eps);
}

// Runs a head backward. With g = dout w z s(z): dx = rstd (g - xhat mean(g xhat)), dw += dout xhat z s(z), dz = dout w
// xhat (s + z s (1 - s)). dx may be dout: every element is read before it is written.
static VECTOR_FUNCTION void gated_norm_head_back(floatX *dx, floatX *dz, floatS *dw, const floatX *dout,
                                                 const floatX *x, const floatX *z, const floatX *w, size_t V,
                                                 double eps) {
    const RowStatistics s = row_statistics(x, V, eps, 0);
    Vector dot = {0};
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector gate = vector_load_first(z + d, V - d, 0), to = vector_load_first(dout + d, V - d, 0);
        const Vector xhat = s.rstd * vector_load_first(x + d, V - d, 0), weight = vector_load_first(w + d, V - d, 0);
        Vector slope, share = vector_logistic(gate, &slope);
        const Vector by_weight = to * xhat * gate * share;
        if (dw) vector_store(dw + d, vector_load(dw + d) + by_weight);
        if (dz) vector_store_first(dz + d, to * weight * xhat * (share + gate * slope), V - d);
        dot += by_weight * weight;
    }
    const floatS mean = vector_sum_across(dot) / (floatS)V;
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector gate = vector_load_first(z + d, V - d, 0), xhat = s.rstd * vector_load_first(x + d, V - d, 0);
        Vector slope, g = vector_load_first(dout + d, V - d, 0) * vector_load_first(w + d, V - d, 0);
        g *= gate * vector_logistic(gate, &slope);
        vector_store_first(dx + d, s.rstd * (g - xhat * mean), V - d);
    }
}

// Sizes scratch[parts][V, rounded up to whole vectors]: each part's dw
static size_t cpu_gated_norm_backward_scratch(size_t n, size_t heads, size_t V) {
    return norm_parts(n * heads) * norm_part_row(V);
}

static void cpu_gated_norm_backward(Stored *dx, Stored *dz, Summed *dw, const Stored *dout, const Stored *x,
                                    const Stored *z, const Stored *w, size_t n, size_t heads, size_t V, size_t stride,
                                    double eps, Summed *scratch) {
    const size_t rows = n * heads, parts = norm_parts(rows), width = norm_part_row(V);
#pragma omp parallel for schedule(static) if (rows * V >= PARALLEL_MIN)
    for (size_t p = 0; p < parts; p++) {
        floatS *part = dw ? (floatS *)scratch + p * width : NULL;
        if (dw) memset(part, 0, width * sizeof(*part));
        for (size_t i = rows * p / parts; i < rows * (p + 1) / parts; i++) {
            const size_t gate = i / heads * stride + i % heads * V;
            gated_norm_head_back((floatX *)dx + i * V, dz ? (floatX *)dz + gate : NULL, part,
                                 (const floatX *)dout + i * V, (const floatX *)x + i * V, (const floatX *)z + gate,
                                 (const floatX *)w, V, eps);
        }
    }
    if (dw) add_parts((floatS *)dw, (floatS *)scratch, parts, width, V);
}

#endif
