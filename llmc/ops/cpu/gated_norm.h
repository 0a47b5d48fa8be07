/*
The gated norm of linear attention: out = w xhat z s(z) with xhat = x / sqrt(mean(x^2) + eps) over a head of V elements
and the logistic function s. Backward recomputes statistics and gates. dw is a sum over tokens and heads, made in parts
as in norm.h.
*/
#ifndef LLMC_CPU_GATED_NORM_H
#define LLMC_CPU_GATED_NORM_H
#include "llmc/ops/ops.h"
#include "norm.h"

// Returns x silu(z) at elements d, d + 1, ...
VECTOR_INLINE Vector gated_input(const floatX *x, const floatX *z, size_t d, size_t V) {
    const Vector gate = vector_load_first(z + d, V - d, 0);
    Vector slope;
    return vector_load_first(x + d, V - d, 0) * (gate * vector_logistic(gate, &slope));
}

// Returns 1 / sqrt(mean(a^2) + eps) with a = x silu(z).
VECTOR_INLINE floatS gated_scale(const floatX *x, const floatX *z, size_t V, double eps) {
    Vector squares = {0};
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector a = gated_input(x, z, d, V);
        squares += a * a;
    }
    return (floatS)(1 / sqrt((double)vector_sum_across(squares) / (double)V + eps));
}

static VECTOR_FUNCTION void gate_first_head(floatX *out, const floatX *x, const floatX *z, const floatX *w, size_t V,
                                            double eps) {
    const floatS scale = gated_scale(x, z, V, eps);
    for (size_t d = 0; d < V; d += VECTOR_LANES)
        vector_store_first(out + d, vector_load_first(w + d, V - d, 0) * (scale * gated_input(x, z, d, V)), V - d);
}

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
                                   size_t heads, size_t V, size_t stride, int gate_first, double eps) {
#pragma omp parallel for schedule(static) if (n * heads * V >= PARALLEL_MIN)
    for (size_t i = 0; i < n * heads; i++)
        (gate_first ? gate_first_head : gated_norm_head)((floatX *)out + i * V, (const floatX *)x + i * V,
                                                         (const floatX *)z + i / heads * stride + i % heads * V,
                                                         (const floatX *)w + (gate_first ? i % heads * V : 0), V, eps);
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

// As gated_norm_head_back, with the gate first. With a = x z s(z) and g = dout w: da = scale (g - ahat mean(g ahat)),
// dx = da z s(z), dz = da x (s + z s (1 - s)), dw += dout ahat.
static VECTOR_FUNCTION void gate_first_head_back(floatX *dx, floatX *dz, floatS *dw, const floatX *dout,
                                                 const floatX *x, const floatX *z, const floatX *w, size_t V,
                                                 double eps) {
    const floatS scale = gated_scale(x, z, V, eps);
    Vector dot = {0};
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector by_weight = vector_load_first(dout + d, V - d, 0) * (scale * gated_input(x, z, d, V));
        if (dw) vector_store(dw + d, vector_load(dw + d) + by_weight);
        dot += by_weight * vector_load_first(w + d, V - d, 0);
    }
    const floatS mean = vector_sum_across(dot) / (floatS)V;
    for (size_t d = 0; d < V; d += VECTOR_LANES) {
        const Vector gate = vector_load_first(z + d, V - d, 0), in = vector_load_first(x + d, V - d, 0);
        const Vector g = vector_load_first(dout + d, V - d, 0) * vector_load_first(w + d, V - d, 0);
        Vector slope, share = vector_logistic(gate, &slope);
        const Vector da = scale * (g - scale * (in * (gate * share)) * mean);
        if (dz) vector_store_first(dz + d, da * in * (share + gate * slope), V - d);
        vector_store_first(dx + d, da * (gate * share), V - d);
    }
}

// Returns the elements of a part's dw: V or, with weights of their own for each head, heads * V, in whole vectors.
static size_t gated_part_row(size_t heads, size_t V, int gate_first) {
    return norm_part_row(V) * (gate_first ? heads : 1);
}

static size_t cpu_gated_norm_backward_scratch(size_t n, size_t heads, size_t V, int gate_first) {
    return norm_parts(n * heads) * gated_part_row(heads, V, gate_first);
}

static void cpu_gated_norm_backward(Stored *dx, Stored *dz, Summed *dw, const Stored *dout, const Stored *x,
                                    const Stored *z, const Stored *w, size_t n, size_t heads, size_t V, size_t stride,
                                    int gate_first, double eps, Summed *scratch) {
    const size_t rows = n * heads, parts = norm_parts(rows), width = gated_part_row(heads, V, gate_first);
    const size_t own = norm_part_row(V);
#pragma omp parallel for schedule(static) if (rows * V >= PARALLEL_MIN)
    for (size_t p = 0; p < parts; p++) {
        floatS *part = dw ? (floatS *)scratch + p * width : NULL;
        if (dw) memset(part, 0, width * sizeof(*part));
        for (size_t i = rows * p / parts; i < rows * (p + 1) / parts; i++) {
            const size_t head = gate_first ? i % heads : 0, gate = i / heads * stride + i % heads * V;
            (gate_first ? gate_first_head_back : gated_norm_head_back)(
                (floatX *)dx + i * V, dz ? (floatX *)dz + gate : NULL, dw ? part + head * own : NULL,
                (const floatX *)dout + i * V, (const floatX *)x + i * V, (const floatX *)z + gate,
                (const floatX *)w + head * V, V, eps);
        }
    }
    for (size_t head = 0; head < (gate_first ? heads : 1) && dw; head++)
        add_parts((floatS *)dw + head * V, (floatS *)scratch + head * own, parts, width, V);
}

#endif
