/*
RMSNorm and LayerNorm over the last dimension of x[n,C]. Both are

    out = xhat * (w + offset) (+ shift)    with    xhat = (x - mean) * rstd,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)

where RMSNorm takes 0 for the mean and is shifted by a residual, if by anything; LayerNorm is shifted by b and has no
offset. The statistics are taken in two passes (mean, then squares of deviations), which loses no digits where the mean
is large, and are recomputed in backward.

dw and db are sums over tokens: the rows are cut into parts, a function of n alone, each with a row of scratch; the
parts are added in order. So the result does not depend on the number of threads.
*/
#ifndef LLMC_CPU_NORM_H
#define LLMC_CPU_NORM_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

typedef struct {
    floatS mean, rstd;
} RowStatistics;

static RowStatistics row_statistics(const floatX *x, size_t C, double eps, int centred) {
    RowStatistics row = {0, 0};
    floatS sum = 0, squares = 0;
    if (centred) {
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) sum += load(x[c]);
        row.mean = sum / (floatS)C;
    }
    floatS mean = row.mean;
#pragma omp simd reduction(+ : squares)
    for (size_t c = 0; c < C; c++) squares += (load(x[c]) - mean) * (load(x[c]) - mean);
    row.rstd = (floatS)(1 / sqrt((double)squares / (double)C + eps));
    return row;
}

// shift NULL, a constant where this is inlined: none
static inline __attribute__((always_inline)) void
norm_row(floatX *out, const floatX *x, const floatX *w, const floatX *shift, size_t C, floatS offset, RowStatistics s) {
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        const floatS y = (load(x[c]) - s.mean) * s.rstd * (load(w[c]) + offset);
        out[c] = store(shift ? y + load(shift[c]) : y);
    }
}

static void cpu_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                             size_t n, size_t C, Norm norm) {
    const floatX *shift = (const floatX *)(b ? b : residual); // row t is shifted by shift + t * stride
    const size_t stride = b ? 0 : C;
    const floatS offset = (floatS)norm.offset;
#pragma omp parallel for schedule(static) if (n * C >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        const floatX *in = (const floatX *)x + t * C;
        floatX *row = (floatX *)out + t * C;
        RowStatistics s = row_statistics(in, C, norm.eps, norm.kind == NORM_LAYER);
        if (shift)
            norm_row(row, in, (const floatX *)w, shift + t * stride, C, offset, s);
        else
            norm_row(row, in, (const floatX *)w, NULL, C, offset, s);
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------

static size_t norm_parts(size_t n) { return n < 32 ? 1 : min_size(n / 16, 64); }

// scratch[parts][2][C]: a part's dw, then its db; none of it where dw is NULL
static size_t cpu_norm_backward_scratch(size_t n, size_t C) { return norm_parts(n) * 2 * C; }

/*
One row. With g = dout * (w + offset):  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without mean(g) in RMSNorm,
and dw += dout * xhat, db += dout. dx may be dout or x: every column is read before it is written. dw NULL: dx alone.
*/
static inline void norm_backward_row(floatX *dx, floatS *dw, floatS *db, const floatX *dout, const floatX *x,
                                     const floatX *w, size_t C, double eps, floatS offset, int centred,
                                     int accumulate) {
    RowStatistics s = row_statistics(x, C, eps, centred);
    floatS sum = 0, dot = 0, mean = s.mean, rstd = s.rstd;
#pragma omp simd reduction(+ : sum, dot)
    for (size_t c = 0; c < C; c++) {
        floatS g = load(dout[c]) * (load(w[c]) + offset);
        sum += g;
        dot += g * ((load(x[c]) - mean) * rstd);
    }
    sum = centred ? sum / (floatS)C : 0;
    dot /= (floatS)C;
    if (dw && centred) {
#pragma omp simd
        for (size_t c = 0; c < C; c++) db[c] += load(dout[c]);
    }
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        floatS d = load(dout[c]), xhat = (load(x[c]) - mean) * rstd;
        floatS gradient = rstd * (d * (load(w[c]) + offset) - sum - xhat * dot);
        if (dw) dw[c] += d * xhat;
        dx[c] = store(accumulate ? load(dx[c]) + gradient : gradient);
    }
}

static void add_parts(floatS *dw, const floatS *scratch, size_t parts, size_t stride, size_t C) {
    for (size_t p = 0; p < parts; p++) {
#pragma omp simd
        for (size_t c = 0; c < C; c++) dw[c] += scratch[p * stride + c];
    }
}

static void cpu_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout_, const Stored *x_,
                              const Stored *w_, size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    const floatX *dout = (const floatX *)dout_, *x = (const floatX *)x_, *w = (const floatX *)w_;
    const int centred = norm.kind == NORM_LAYER;
    const floatS offset = (floatS)norm.offset;
    floatS *sums = (floatS *)scratch;
    size_t parts = norm_parts(n);
#pragma omp parallel for schedule(static) if (n * C >= PARALLEL_MIN)
    for (size_t p = 0; p < parts; p++) {
        floatS *part_dw = dw ? sums + p * 2 * C : NULL, *part_db = dw ? part_dw + C : NULL;
        if (dw) memset(part_dw, 0, 2 * C * sizeof(*part_dw));
        for (size_t t = n * p / parts; t < n * (p + 1) / parts; t++) {
            floatX *row = (floatX *)dx + t * C;
            if (accumulate)
                norm_backward_row(row, part_dw, part_db, dout + t * C, x + t * C, w, C, norm.eps, offset, centred, 1);
            else
                norm_backward_row(row, part_dw, part_db, dout + t * C, x + t * C, w, C, norm.eps, offset, centred, 0);
        }
    }
    if (!dw) return;
    add_parts((floatS *)dw, sums, parts, 2 * C, C);
    if (centred) add_parts((floatS *)db, sums + C, parts, 2 * C, C);
}

#endif
