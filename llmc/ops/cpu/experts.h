/*
Rows sorted by expert, and products of each expert's rows with its matrices. Every sum is made in a fixed order, for any
number of threads. Sorting is two passes over n k numbers, negligible compared with the rows that are gathered
afterwards.
*/
#ifndef LLMC_CPU_EXPERTS_H
#define LLMC_CPU_EXPERTS_H
#include "linear.h"
#include "router.h"

static void cpu_route_sort(int32_t *first, int32_t *source, int32_t *place, const uint16_t *route, size_t n, size_t k,
                           size_t E, Summed *scratch) {
    (void)scratch;
    memset(first, 0, (E + 1) * sizeof(*first));
    for (size_t i = 0; i < n * k; i++) first[route[i] + 1]++;
    for (size_t e = 0; e < E; e++) first[e + 1] += first[e];
    for (size_t i = 0; i < n * k; i++) place[i] = first[route[i]]++, source[place[i]] = (int32_t)i;
    for (size_t e = E; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

static size_t cpu_route_sort_scratch(size_t n, size_t k, size_t E) {
    (void)n, (void)k, (void)E;
    return 0;
}

static void cpu_route_gather(Stored *out, const Stored *x, const int32_t *source, size_t n, size_t k, size_t width) {
#pragma omp parallel for schedule(static) if (n * k * width >= PARALLEL_MIN)
    for (size_t i = 0; i < n * k; i++)
        memcpy((floatX *)out + i * width, (const floatX *)x + (size_t)source[i] / k * width, width * sizeof(floatX));
}

static VECTOR_FUNCTION void combine_token(floatX *out, const floatX *rows, const int32_t *place, const floatX *residual,
                                          size_t k, size_t width) {
    for (size_t c = 0; c < width; c += VECTOR_LANES) {
        Vector sum = {0};
        for (size_t j = 0; j < k; j++) sum += vector_load_first(rows + (size_t)place[j] * width + c, width - c, 0);
        if (residual) sum += vector_load_first(residual + c, width - c, 0);
        vector_store_first(out + c, sum, width - c);
    }
}

static void cpu_route_combine(Stored *out, const Stored *rows, const int32_t *place, const Stored *residual, size_t n,
                              size_t k, size_t width) {
#pragma omp parallel for schedule(static) if (n * k * width >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        combine_token((floatX *)out + t * width, (const floatX *)rows, place + t * k,
                      residual ? (const floatX *)residual + t * width : NULL, k, width);
}

static VECTOR_FUNCTION void weigh_row(floatX *out, const floatX *x, floatS weight, size_t width) {
    for (size_t c = 0; c < width; c += VECTOR_LANES)
        vector_store_first(out + c, weight * vector_load_first(x + c, width - c, 0), width - c);
}

static void cpu_route_weigh(Stored *out, const Stored *x, const Summed *weight, const int32_t *source, size_t rows,
                            size_t width) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_MIN)
    for (size_t i = 0; i < rows; i++)
        weigh_row((floatX *)out + i * width, (const floatX *)x + i * width,
                  ((const floatS *)weight)[source ? (size_t)source[i] : i], width);
}

// Returns dout . x; computes dx = weight dout and x = weight x.
static VECTOR_FUNCTION floatS weigh_row_back(floatX *dx, floatX *x, const floatX *dout, floatS weight, size_t width) {
    Vector sum = {0};
    for (size_t c = 0; c < width; c += VECTOR_LANES) {
        const Vector u = vector_load_first(dout + c, width - c, 0), value = vector_load_first(x + c, width - c, 0);
        sum += u * value;
        vector_store_first(dx + c, weight * u, width - c);
        vector_store_first(x + c, weight * value, width - c);
    }
    return vector_sum_across(sum);
}

static void cpu_route_weigh_backward(Summed *dweight, Stored *dx, Stored *x, const Stored *dout, const Summed *weight,
                                     const int32_t *source, size_t rows, size_t width) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_MIN)
    for (size_t i = 0; i < rows; i++) {
        const size_t at = source ? (size_t)source[i] : i, row = i * width;
        ((floatS *)dweight)[at] = weigh_row_back((floatX *)dx + row, (floatX *)x + row, (const floatX *)dout + row,
                                                 ((const floatS *)weight)[at], width);
    }
}

// ---- biases and factors of experts ----------------------------------------------------------------------------------
// Returns the expert of a sorted row.
static size_t expert_of_row(const int32_t *first, size_t E, size_t row) {
    size_t low = 0, high = E; // first[low] <= row < first[high]
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if ((size_t)first[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static VECTOR_FUNCTION void bias_row(floatX *row, const floatX *bias, floatS weight, size_t width) {
    for (size_t c = 0; c < width; c += VECTOR_LANES)
        vector_store_first(
            row + c, vector_load_first(row + c, width - c, 0) + weight * vector_load_first(bias + c, width - c, 0),
            width - c);
}

static void cpu_experts_bias_forward(Stored *rows, const Stored *bias, const Summed *weight, const int32_t *first,
                                     const int32_t *source, size_t R, size_t E, size_t width) {
#pragma omp parallel for schedule(static) if (R * width >= PARALLEL_MIN)
    for (size_t r = 0; r < R; r++)
        bias_row((floatX *)rows + r * width, (const floatX *)bias + expert_of_row(first, E, r) * width,
                 weight ? ((const floatS *)weight)[source[r]] : 1, width);
}

static VECTOR_FUNCTION floatS bias_dot(const floatX *drow, const floatX *bias, size_t width) {
    Vector sum = {0};
    for (size_t c = 0; c < width; c += VECTOR_LANES)
        sum += vector_load_first(drow + c, width - c, 0) * vector_load_first(bias + c, width - c, 0);
    return vector_sum_across(sum);
}

// Adds to dbias[count] the sum of weight drows over sorted rows [begin, end), which are `width` apart.
static void bias_strip(floatS *dbias, const floatX *drows, const floatS *weight, const int32_t *source, size_t begin,
                       size_t end, size_t count, size_t width) {
    floatS sum[BIAS_STRIP] = {0};
    for (size_t from = begin; from < end; from += TOKEN_GROUP) {
        floatS group[BIAS_STRIP] = {0};
        for (size_t r = from; r < min_size(from + TOKEN_GROUP, end); r++) {
            const floatS by = weight ? weight[source[r]] : 1;
            for (size_t j = 0; j < count; j++) group[j] += by * load(drows[r * width + j]);
        }
        for (size_t j = 0; j < count; j++) sum[j] += group[j];
    }
    for (size_t j = 0; j < count; j++) dbias[j] += sum[j];
}

static void cpu_experts_bias_backward(Summed *dbias, Summed *dweight, const Stored *drows_, const Stored *bias,
                                      const Summed *weight, const int32_t *first, const int32_t *source, size_t R,
                                      size_t E, size_t width) {
    const floatX *drows = (const floatX *)drows_;
#pragma omp parallel for schedule(static) if (R * width >= PARALLEL_MIN)
    for (size_t r = 0; r < (dweight ? R : 0); r++)
        ((floatS *)dweight)[source[r]] +=
            bias_dot(drows + r * width, (const floatX *)bias + expert_of_row(first, E, r) * width, width);
    const size_t strips = (width + BIAS_STRIP - 1) / BIAS_STRIP;
#pragma omp parallel for schedule(dynamic) if (R * width >= PARALLEL_MIN)
    for (size_t i = 0; i < (dbias ? E * strips : 0); i++) {
        const size_t e = i / strips, column = i % strips * BIAS_STRIP;
        bias_strip((floatS *)dbias + e * width + column, drows + column, (const floatS *)weight, source,
                   (size_t)first[e], (size_t)first[e + 1], min_size(BIAS_STRIP, width - column), width);
    }
}

static void cpu_experts_scale_forward(Summed *out, const Summed *weight, const Stored *scale, const int32_t *first,
                                      const int32_t *source, size_t R, size_t E) {
    (void)R;
    for (size_t e = 0; e < E; e++)
        for (int32_t r = first[e]; r < first[e + 1]; r++)
            ((floatS *)out)[source[r]] = load(((const floatX *)scale)[e]) * ((const floatS *)weight)[source[r]];
}

static void cpu_experts_scale_backward(Summed *dscale, Summed *dweight, const Summed *weight, const Stored *scale,
                                       const int32_t *first, const int32_t *source, size_t R, size_t E) {
    (void)R;
    for (size_t e = 0; e < E; e++) {
        const floatS factor = load(((const floatX *)scale)[e]);
        double sum = 0;
        for (int32_t r = first[e]; r < first[e + 1]; r++) {
            floatS *g = (floatS *)dweight + source[r];
            sum += (double)*g * (double)((const floatS *)weight)[source[r]];
            *g *= factor;
        }
        if (dscale) ((floatS *)dscale)[e] += (floatS)sum;
    }
}

// ---- products -------------------------------------------------------------------------------------------------------
/*
The number of an expert's rows varies from call to call, and oneDNN makes a primitive for one number of rows. So fp32
uses our own products where they are as fast: forward, and weight gradients of few rows. dnnl_sgemm takes any number of
rows and computes the rest.
*/
enum { FEW_EXPERT_ROWS = 128 };
static void expert_product(const Product *p) {
    if (!p->m || !p->n || !p->k) return;
    if (sizeof(floatX) < sizeof(floatS) || VECTOR_BYTES < 64 || !(p->b_transposed || p->k <= FEW_EXPERT_ROWS))
        matrix_product(p);
    else if (!product_streamed(p))
        product_plain(p);
}

static void cpu_experts_forward(Stored *out, const Stored *x, const Stored *weight, const int32_t *first, size_t rows,
                                size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++) {
        Product p = product_of("experts_forward", (size_t)(first[e + 1] - first[e]), OC, C, x, weight, out);
        p.a += (size_t)first[e] * C, p.b += e * OC * C, p.out = (floatX *)p.out + (size_t)first[e] * OC;
        p.b_transposed = 1, p.accumulate = accumulate;
        expert_product(&p);
    }
}

static void cpu_experts_activate(Stored *out, Stored *gate_up, const Stored *x, const Stored *weight,
                                 const Stored *bias, const Summed *factor, const int32_t *first, const int32_t *source,
                                 size_t rows, size_t E, size_t C, size_t I, Activation activation, int keep) {
    const size_t H = activation_width(activation.kind, I);
    (void)keep;
    cpu_experts_forward(gate_up, x, weight, first, rows, E, C, H, 0);
    if (bias) cpu_experts_bias_forward(gate_up, bias, NULL, first, source, rows, E, H);
    cpu_activation_forward(out, gate_up, activation, rows, I);
    if (factor) cpu_route_weigh(out, out, factor, source, rows, I);
}

static void cpu_experts_forward_quantised(Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                          const int32_t *first, size_t rows, size_t E, size_t C, size_t OC) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        cpu_linear_forward_quantised((Stored *)((floatX *)out + (size_t)first[e] * OC),
                                     (const Stored *)((const floatX *)x + (size_t)first[e] * C), record, format, E * OC,
                                     e * OC, NULL, NULL, (size_t)(first[e + 1] - first[e]), C, OC, OC);
}

static void cpu_experts_backward_input(Stored *dx, const Stored *dout, const Stored *weight, const int32_t *first,
                                       size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++) {
        Product p = product_of("experts_backward_input", (size_t)(first[e + 1] - first[e]), C, OC, dout, weight, dx);
        p.a += (size_t)first[e] * OC, p.b += e * OC * C, p.out = (floatX *)p.out + (size_t)first[e] * C;
        p.accumulate = accumulate;
        expert_product(&p);
    }
}

static void cpu_experts_backward_weight(Summed *dweight, const Stored *dout, const Stored *x, const int32_t *first,
                                        size_t rows, size_t E, size_t C, size_t OC) {
    (void)rows;
    for (size_t e = 0; e < E; e++) {
        Product p = product_of("experts_backward_weight", OC, C, (size_t)(first[e + 1] - first[e]), dout, x, dweight);
        p.a += (size_t)first[e] * OC, p.b += (size_t)first[e] * C, p.out = (floatS *)p.out + e * OC * C;
        p.a_transposed = 1, p.out_summed = 1, p.accumulate = 1;
        expert_product(&p);
    }
}

#endif
