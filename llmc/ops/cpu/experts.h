/*
Experts: the router, rows sorted by expert, and products of each expert's rows with its matrices. Every sum is made in a
fixed order, whatever the threads.
*/
#ifndef LLMC_CPU_EXPERTS_H
#define LLMC_CPU_EXPERTS_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "linear.h"
#include <math.h>

static void cpu_router_logits(Summed *logits, const Stored *x, const Stored *weight, size_t n, size_t C, size_t E,
                              int accumulate) {
    Product p = product_of("router_logits", n, E, C, x, weight, logits);
    p.b_transposed = 1, p.out_summed = 1, p.accumulate = accumulate;
    matrix_product(&p);
}

// Returns the score by which an expert is chosen; NaN: the lowest
static floatS router_score(const RouterShape *shape, floatS z, const float *bias, size_t e) {
    floatS score = shape->kind == ROUTER_SIGMOID ? 1 / (1 + exp(-z)) : z;
    if (bias) score += bias[e];
    return score == score ? score : -INFINITY;
}

static void cpu_router_choose(uint16_t *route, const Summed *logits, const float *bias, size_t n,
                              const RouterShape *shape, int keep) {
    const size_t E = shape->E, k = shape->k, size = E / max_size(shape->groups, 1);
#pragma omp parallel for schedule(static) if (n * E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        const floatS *z = (const floatS *)logits + t * E;
        uint16_t *to = route + t * k;
        floatS score[EXPERTS_MOST], best[EXPERTS_MOST];
        uint8_t taken[EXPERTS_MOST] = {0}, open[EXPERTS_MOST] = {0};
        if (keep && to[0] != NO_EXPERT) continue;
        for (size_t e = 0; e < E; e++) score[e] = router_score(shape, z[e], bias, e);
        for (size_t g = 0; g < shape->groups; g++) {
            floatS most = -INFINITY, second = -INFINITY;
            for (size_t e = g * size; e < (g + 1) * size; e++) {
                if (score[e] > most)
                    second = most, most = score[e];
                else if (score[e] > second)
                    second = score[e];
            }
            best[g] = size > 1 ? most + second : most;
        }
        for (size_t i = 0; i < shape->kept; i++) {
            size_t g = 0;
            for (size_t j = 1; j < shape->groups; j++)
                if (!open[j] && (open[g] || best[j] > best[g])) g = j;
            open[g] = 1;
        }
        for (size_t i = 0; i < k; i++) {
            size_t e = SIZE_MAX;
            for (size_t j = 0; j < E; j++)
                if (open[j / size] && !taken[j] && (e == SIZE_MAX || score[j] > score[e])) e = j;
            taken[e] = 1, to[i] = (uint16_t)e;
        }
    }
}

// Returns the largest of z[E] and the sum of exp(z - largest).
static floatS router_sum(const floatS *z, size_t E, floatS *largest) {
    floatS sum = 0;
    *largest = z[0];
    for (size_t e = 1; e < E; e++) *largest = z[e] > *largest ? z[e] : *largest;
    for (size_t e = 0; e < E; e++) sum += exp(z[e] - *largest);
    return sum;
}

static size_t route_at(const uint16_t *route, size_t k, size_t t, size_t j) { return route ? route[t * k + j] : j; }

// Weights of token t: out[k]; returns the sum that they were divided by, scale left out.
static floatS router_token_weights(floatS *out, const floatS *z, const uint16_t *route, size_t t,
                                   const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    floatS largest, all = router_sum(z, E, &largest), sum = 0;
    for (size_t j = 0; j < k; j++) {
        const floatS value = z[route_at(route, k, t, j)];
        out[j] = shape->kind == ROUTER_SIGMOID ? 1 / (1 + exp(-value)) : exp(value - largest) / all;
        sum += out[j];
    }
    if (shape->kind == ROUTER_SIGMOID) sum += 1e-20;
    return shape->normalised ? sum : 1;
}

static void cpu_router_weights(Summed *weight, const Summed *logits, const uint16_t *route, size_t n,
                               const RouterShape *shape) {
    const size_t k = shape->k;
#pragma omp parallel for schedule(static) if (n * shape->E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatS *w = (floatS *)weight + t * k;
        const floatS sum = router_token_weights(w, (const floatS *)logits + t * shape->E, route, t, shape);
        for (size_t j = 0; j < k; j++) w[j] = w[j] / sum * (floatS)shape->scale;
    }
}

static void cpu_router_backward(Stored *dlogits, const Summed *dweight, const Summed *logits, const uint16_t *route,
                                const Summed *balance, double z_factor, size_t n, const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    const floatS *b = (const floatS *)balance;
#pragma omp parallel for schedule(static) if (n * E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        const floatS *z = (const floatS *)logits + t * E, *g = (const floatS *)dweight + t * k;
        floatS dz[EXPERTS_MOST] = {0}, w[EXPERTS_MOST], largest, mean = 0, inner = 0;
        const floatS all = router_sum(z, E, &largest), sum = router_token_weights(w, z, route, t, shape);
        for (size_t j = 0; j < k; j++) inner += w[j] / sum * g[j];
        for (size_t j = 0; j < k; j++) {
            const size_t e = route_at(route, k, t, j);
            const floatS scale = (floatS)shape->scale;
            if (shape->kind == ROUTER_SIGMOID)
                dz[e] += scale * (shape->normalised ? (g[j] - inner) / sum : g[j]) * w[j] * (1 - w[j]);
            else if (shape->normalised)
                dz[e] += scale * w[j] / sum * (g[j] - inner);
            else
                dz[e] += scale * w[j] * g[j];
        }
        if (balance)
            for (size_t e = 0; e < E; e++) mean += exp(z[e] - largest) / all * b[e];
        for (size_t e = 0; e < E; e++) {
            const floatS p = exp(z[e] - largest) / all;
            if (shape->kind == ROUTER_SOFTMAX && !shape->normalised) dz[e] -= (floatS)shape->scale * p * inner;
            if (balance) dz[e] += p * (b[e] - mean);
            if (z_factor != 0) dz[e] += (floatS)z_factor * 2 * (log(all) + largest) * p;
            ((floatX *)dlogits)[t * E + e] = store(dz[e]);
        }
    }
}

static void cpu_router_count(int64_t *count, double *sums, const Summed *logits, const uint16_t *route, size_t n,
                             const RouterShape *shape, Summed *scratch) {
    const size_t E = shape->E;
    (void)scratch;
    for (size_t i = 0; i < n * shape->k; i++) count[route[i]]++;
    for (size_t t = 0; t < n && sums; t++) {
        const floatS *z = (const floatS *)logits + t * E;
        floatS largest;
        const floatS all = router_sum(z, E, &largest);
        for (size_t e = 0; e < E; e++) sums[e] += exp(z[e] - largest) / all;
        sums[E] += (log(all) + largest) * (log(all) + largest);
    }
}

static size_t cpu_router_count_scratch(size_t n, size_t E) {
    (void)n, (void)E;
    return 0;
}

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

static void cpu_route_combine(Stored *out, const Stored *rows, const int32_t *place, const Stored *residual, size_t n,
                              size_t k, size_t width) {
    const floatX *row = (const floatX *)rows;
#pragma omp parallel for schedule(static) if (n * k * width >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        for (size_t c = 0; c < width; c++) {
            floatS sum = 0;
            for (size_t j = 0; j < k; j++) sum += load(row[(size_t)place[t * k + j] * width + c]);
            if (residual) sum += load(((const floatX *)residual)[t * width + c]);
            ((floatX *)out)[t * width + c] = store(sum);
        }
}

static void cpu_route_weigh(Stored *out, const Stored *x, const Summed *weight, const int32_t *source, size_t rows,
                            size_t width) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_MIN)
    for (size_t i = 0; i < rows; i++) {
        const floatS w = ((const floatS *)weight)[source ? (size_t)source[i] : i];
        for (size_t c = 0; c < width; c++)
            ((floatX *)out)[i * width + c] = store(w * load(((const floatX *)x)[i * width + c]));
    }
}

static void cpu_route_weigh_backward(Summed *dweight, Stored *dx, Stored *x, const Stored *dout, const Summed *weight,
                                     const int32_t *source, size_t rows, size_t width) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_MIN)
    for (size_t i = 0; i < rows; i++) {
        const size_t at = source ? (size_t)source[i] : i;
        const floatS w = ((const floatS *)weight)[at];
        floatX *a = (floatX *)x + i * width, *d = (floatX *)dx + i * width;
        floatS sum = 0;
        for (size_t c = 0; c < width; c++) {
            const floatS u = load(((const floatX *)dout)[i * width + c]), value = load(a[c]);
            sum += u * value;
            d[c] = store(w * u), a[c] = store(w * value);
        }
        ((floatS *)dweight)[at] = sum;
    }
}

// ---- products -------------------------------------------------------------------------------------------------------
static void cpu_experts_forward(Stored *out, const Stored *x, const Stored *weight, const int32_t *first, size_t rows,
                                size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++) {
        floatX *to = (floatX *)out + (size_t)first[e] * OC;
        cpu_linear_forward((Stored *)to, (const Stored *)((const floatX *)x + (size_t)first[e] * C),
                           (const Stored *)((const floatX *)weight + e * OC * C), NULL,
                           accumulate ? (const Stored *)to : NULL, (size_t)(first[e + 1] - first[e]), C, OC, OC);
    }
}

static void cpu_experts_forward_quantised(Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                          const int32_t *first, size_t rows, size_t E, size_t C, size_t OC) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        cpu_linear_forward_quantised((Stored *)((floatX *)out + (size_t)first[e] * OC),
                                     (const Stored *)((const floatX *)x + (size_t)first[e] * C), record, format,
                                     E * OC, e * OC, NULL, NULL, (size_t)(first[e + 1] - first[e]), C, OC, OC);
}

static void cpu_experts_backward_input(Stored *dx, const Stored *dout, const Stored *weight, const int32_t *first,
                                       size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        cpu_linear_backward_input((Stored *)((floatX *)dx + (size_t)first[e] * C),
                                  (const Stored *)((const floatX *)dout + (size_t)first[e] * OC),
                                  (const Stored *)((const floatX *)weight + e * OC * C),
                                  (size_t)(first[e + 1] - first[e]), C, OC, OC, accumulate);
}

static void cpu_experts_backward_weight(Summed *dweight, const Stored *dout, const Stored *x, const int32_t *first,
                                        size_t rows, size_t E, size_t C, size_t OC) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        cpu_linear_backward_weight((Summed *)((floatS *)dweight + e * OC * C), NULL,
                                   (const Stored *)((const floatX *)dout + (size_t)first[e] * OC),
                                   (const Stored *)((const floatX *)x + (size_t)first[e] * C),
                                   (size_t)(first[e + 1] - first[e]), C, OC, OC);
}

#endif
