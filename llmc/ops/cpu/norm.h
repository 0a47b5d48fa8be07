/*
RMSNorm and LayerNorm over the last dimension of x[n,C]. Both are

    out = xhat * (w + offset) (+ shift)    with    xhat = (x - mean) * rstd,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)

RMSNorm has mean 0 and may be shifted by a residual; LayerNorm is shifted by b and has no offset. The statistics take
two passes (mean, then squares of deviations), which keeps all digits if the mean is large; backward recomputes them.

dw and db are sums over tokens: the rows are cut into parts by n alone, each with a row of scratch; the parts are added
in order. So the result does not depend on the number of threads.
*/
#ifndef LLMC_CPU_NORM_H
#define LLMC_CPU_NORM_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

typedef struct {
    floatS mean, rstd;
} RowStatistics;

VECTOR_INLINE RowStatistics row_statistics(const floatX *x, size_t C, double eps, int centred) {
    RowStatistics row = {0, 0};
    Vector sum = {0}, squares = {0};
    if (centred) {
        for (size_t c = 0; c < C; c += VECTOR_LANES) sum += vector_load_first(x + c, C - c, 0);
        row.mean = vector_sum_across(sum) / (floatS)C;
    }
    for (size_t c = 0; c < C; c += VECTOR_LANES) {
        const Vector deviation = vector_load_first(x + c, C - c, row.mean) - row.mean;
        squares += deviation * deviation;
    }
    row.rstd = (floatS)(1 / sqrt((double)vector_sum_across(squares) / (double)C + eps));
    return row;
}

// Returns the factors of columns [c, c + VECTOR_LANES): w + offset, or 1 if w is NULL.
VECTOR_INLINE Vector norm_factor(const floatX *w, size_t c, size_t C, floatS offset) {
    return w ? vector_load_first(w + c, C - c, 0) + offset : vector_of(1);
}

// Norms a row. w NULL: factor 1; shift NULL: no shift; centred 0: mean 0; w, shift and centred are constants once
// inlined
VECTOR_INLINE void norm_row(floatX *out, const floatX *x, const floatX *w, const floatX *shift, size_t C, double eps,
                            floatS offset, int centred) {
    const RowStatistics s = row_statistics(x, C, eps, centred);
    for (size_t c = 0; c < C; c += VECTOR_LANES) {
        Vector y = (vector_load_first(x + c, C - c, 0) - s.mean) * s.rstd * norm_factor(w, c, C, offset);
        if (shift) y += vector_load_first(shift + c, C - c, 0);
        vector_store_first(out + c, y, C - c);
    }
}

static VECTOR_FUNCTION void norm_row_of(floatX *out, const floatX *x, const floatX *w, const floatX *shift, size_t C,
                                        Norm norm) {
    const floatS offset = (floatS)norm.offset;
    if (norm.kind == NORM_LAYER)
        norm_row(out, x, w, shift, C, norm.eps, offset, 1);
    else if (!w)
        norm_row(out, x, NULL, shift, C, norm.eps, offset, 0);
    else if (shift)
        norm_row(out, x, w, shift, C, norm.eps, offset, 0);
    else
        norm_row(out, x, w, NULL, C, norm.eps, offset, 0);
}

static void cpu_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                             size_t n, size_t C, Norm norm) {
    const floatX *shift = (const floatX *)(b ? b : residual); // row t has shift + t * stride
    const size_t stride = b ? 0 : C;
#pragma omp parallel for schedule(static) if (n * C >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        norm_row_of((floatX *)out + t * C, (const floatX *)x + t * C, (const floatX *)w,
                    shift ? shift + t * stride : NULL, C, norm);
}

// ---- backward ------------------------------------------------------------------------------------------------------

static size_t norm_parts(size_t n) { return n < 32 ? 1 : min_size(n / 16, 64); }

// Sizes scratch[parts][2][C, rounded up to whole vectors of any machine]: each part's dw, then its db; unused if dw is
// NULL
static size_t norm_part_row(size_t C) { return round_up(C, 16); }
static size_t cpu_norm_backward_scratch(size_t n, size_t C) { return norm_parts(n) * 2 * norm_part_row(C); }

/*
Runs one row backward. With g = dout * (w + offset): dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without mean(g)
in RMSNorm, and dw += dout * xhat, db += dout. dx may be dout or x: every column is read before it is written. dw NULL:
computes only dx. w NULL: factor 1.
*/
VECTOR_INLINE void norm_backward_row(floatX *dx, floatS *dw, floatS *db, const floatX *dout, const floatX *x,
                                     const floatX *w, size_t C, double eps, floatS offset, int centred,
                                     int accumulate) {
    const RowStatistics s = row_statistics(x, C, eps, centred);
    Vector sum = {0}, dot = {0};
    for (size_t c = 0; c < C; c += VECTOR_LANES) {
        const Vector g = vector_load_first(dout + c, C - c, 0) * norm_factor(w, c, C, offset);
        if (centred) sum += g;
        dot += g * ((vector_load_first(x + c, C - c, 0) - s.mean) * s.rstd);
    }
    const floatS mean = centred ? vector_sum_across(sum) / (floatS)C : 0, slope = vector_sum_across(dot) / (floatS)C;
    for (size_t c = 0; c < C; c += VECTOR_LANES) {
        const Vector d = vector_load_first(dout + c, C - c, 0);
        const Vector xhat = (vector_load_first(x + c, C - c, 0) - s.mean) * s.rstd;
        Vector gradient = s.rstd * (d * norm_factor(w, c, C, offset) - mean - xhat * slope);
        if (dw) vector_store(dw + c, vector_load(dw + c) + d * xhat);
        if (dw && centred) vector_store(db + c, vector_load(db + c) + d);
        if (accumulate) gradient += vector_load_first(dx + c, C - c, 0);
        vector_store_first(dx + c, gradient, C - c);
    }
}

static VECTOR_FUNCTION void norm_backward_row_of(floatX *dx, floatS *dw, floatS *db, const floatX *dout,
                                                 const floatX *x, const floatX *w, size_t C, Norm norm,
                                                 int accumulate) {
    const floatS offset = (floatS)norm.offset;
    if (norm.kind == NORM_LAYER)
        norm_backward_row(dx, dw, db, dout, x, w, C, norm.eps, offset, 1, accumulate);
    else if (!w)
        norm_backward_row(dx, NULL, NULL, dout, x, NULL, C, norm.eps, offset, 0, accumulate);
    else if (accumulate)
        norm_backward_row(dx, dw, db, dout, x, w, C, norm.eps, offset, 0, 1);
    else
        norm_backward_row(dx, dw, db, dout, x, w, C, norm.eps, offset, 0, 0);
}

enum { NORM_STRIP = 64 }; // columns of dw that a thread sums at a time
static void add_parts(floatS *dw, const floatS *part, size_t parts, size_t stride, size_t count) {
    for (; parts-- > 0; part += stride) {
#pragma omp simd
        for (size_t c = 0; c < count; c++) dw[c] += part[c];
    }
}

static void cpu_norm_backward(Stored *dx_, Summed *dw_, Summed *db_, const Stored *dout, const Stored *x,
                              const Stored *w, size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    floatX *dx = (floatX *)dx_;
    floatS *dw = (floatS *)dw_, *db = norm.kind == NORM_LAYER ? (floatS *)db_ : NULL, *sums = (floatS *)scratch;
    const size_t parts = norm_parts(n), row = norm_part_row(C);
#pragma omp parallel if (n * C >= PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (size_t p = 0; p < parts; p++) {
            floatS *part = dw ? sums + p * 2 * row : NULL;
            if (dw) memset(part, 0, 2 * row * sizeof(*part));
            for (size_t t = n * p / parts; t < n * (p + 1) / parts; t++)
                norm_backward_row_of(dx + t * C, part, dw ? part + row : NULL, (const floatX *)dout + t * C,
                                     (const floatX *)x + t * C, (const floatX *)w, C, norm, accumulate);
        }
#pragma omp for schedule(static)
        for (size_t c = 0; c < (dw ? C : 0); c += NORM_STRIP) {
            const size_t count = min_size(NORM_STRIP, C - c);
            add_parts(dw + c, sums + c, parts, 2 * row, count);
            if (db) add_parts(db + c, sums + row + c, parts, 2 * row, count);
        }
    }
}

#endif
