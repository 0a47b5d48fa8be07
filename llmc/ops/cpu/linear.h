/*
Linear layers with weight[OC,C]: forward out = x weight^T, and the two products of the backward pass. In the bf16 build
every sum is fp32 and is rounded once, after adding bias, residual or the accumulated gradient; dweight stays fp32.
*/
#ifndef LLMC_CPU_LINEAR_H
#define LLMC_CPU_LINEAR_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "product.h"

static void cpu_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                               const Stored *residual, size_t n, size_t C, size_t OC, size_t stride) {
    Product p = product_of("linear_forward", n, OC, C, x, weight, out);
    p.b_transposed = 1;
    p.out_stride = stride;
    p.bias = (const floatX *)bias;
    if (residual == out)
        p.accumulate = 1;
    else
        p.residual = (const floatX *)residual;
    matrix_product(&p);
}

static void cpu_linear_forward_quantised(Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                         size_t rows, size_t first, const Stored *bias, const Stored *residual,
                                         size_t n, size_t C, size_t OC, size_t stride) {
    quant_scales(); // fills the table before threads need it
    for (size_t row = 0; row < n; row += FEW_MOST) {
        Product p = product_of("linear_forward_quantised", min_size(FEW_MOST, n - row), OC, C, x, NULL, out);
        p.record = record, p.format = format, p.record_rows = rows, p.record_first = first;
        p.a += row * C, p.out = (floatX *)p.out + row * stride;
        p.b_transposed = 1;
        p.out_stride = stride;
        p.bias = (const floatX *)bias;
        if (residual == out)
            p.accumulate = 1;
        else if (residual)
            p.residual = (const floatX *)residual + row * stride;
        product_of_few(&p);
    }
}

static void cpu_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                      size_t OC, size_t stride, int accumulate) {
    Product p = product_of("linear_backward_input", n, C, OC, dout, weight, dx);
    p.a_stride = stride;
    p.accumulate = accumulate;
    matrix_product(&p);
}

// Adds column sums of dout[n,OC] to dbias[OC], a strip of columns per thread.
#define BIAS_STRIP 64
static void bias_backward(floatS *dbias, const floatX *dout, size_t n, size_t OC, size_t stride) {
#pragma omp parallel for schedule(static) if (n * OC >= PARALLEL_MIN)
    for (size_t strip = 0; strip < OC; strip += BIAS_STRIP) {
        size_t width = min_size(BIAS_STRIP, OC - strip);
        floatS sum[BIAS_STRIP] = {0};
        for (size_t first = 0; first < n; first += TOKEN_GROUP) {
            floatS group[BIAS_STRIP] = {0};
            for (size_t t = first; t < min_size(first + TOKEN_GROUP, n); t++)
                for (size_t j = 0; j < width; j++) group[j] += load(dout[t * stride + strip + j]);
            for (size_t j = 0; j < width; j++) sum[j] += group[j];
        }
        for (size_t j = 0; j < width; j++) dbias[strip + j] += sum[j];
    }
}

static void cpu_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                       size_t C, size_t OC, size_t stride) {
    Product p = product_of("linear_backward_weight", OC, C, n, dout, x, dweight);
    p.a_transposed = 1;
    p.a_stride = stride;
    p.out_summed = 1;
    p.accumulate = 1;
    matrix_product(&p);
    if (dbias) bias_backward((floatS *)dbias, (const floatX *)dout, n, OC, stride);
}

#endif
