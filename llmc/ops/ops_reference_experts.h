/*
The ops of experts in double, written like ops_reference.h only from the formulas of op_list.h. To choose experts it
counts, for each expert, the experts that precede it. The router's gradient goes through scores, one factor at a time.
*/
#ifndef LLMC_OPS_REFERENCE_EXPERTS_H
#define LLMC_OPS_REFERENCE_EXPERTS_H
#include "ops_reference.h"

// ---- the router -----------------------------------------------------------------------------------------------------
static void reference_router_logits(double *logits, const double *x, const double *weight, const double *bias, size_t n,
                                    size_t C, size_t E, int accumulate) {
    reference_linear_forward(logits, x, weight, bias, accumulate ? logits : NULL, n, C, E, E);
}

// Returns how many of the numbers [begin, end) precede number `which`: a number precedes it if it is higher, or equal
// with a lower index. open (may be NULL): only numbers i with open[i] != 0 count
static size_t reference_rank(const double *value, size_t begin, size_t end, size_t which, const int *open) {
    size_t before = 0;
    for (size_t i = begin; i < end; i++)
        if (!open || open[i]) before += value[i] > value[which] || (value[i] == value[which] && i < which);
    return before;
}

// Returns log(e^a + e^b).
static double reference_log_sum(double a, double b) {
    const double most = fmax(a, b);
    return most > -INFINITY ? most + log(exp(a - most) + exp(b - most)) : most;
}

static void reference_router_choose(uint16_t *route, const double *logits, const float *bias, size_t n,
                                    const RouterShape *shape, int keep) {
    const size_t E = shape->E, k = shape->k, size = E / shape->groups;
    double *score = (double *)checked_calloc(2 * E, sizeof(double), "scores of experts"), *best = score + E;
    int *open = (int *)checked_calloc(E, sizeof(int), "groups of experts");
    for (size_t t = 0; t < n; t++) {
        if (keep && route[t * k] != NO_EXPERT) continue;
        for (size_t e = 0; e < E; e++) {
            const double z = logits[t * E + e];
            score[e] = (shape->kind == ROUTER_SIGMOID ? logistic(z) : z) + (bias ? (double)bias[e] : 0.0);
            if (isnan(score[e])) score[e] = -INFINITY;
        }
        for (size_t g = 0; g < shape->groups; g++) {
            const int sums = shape->kind == ROUTER_SIGMOID;
            best[g] = sums ? 0.0 : -INFINITY;
            for (size_t e = g * size; e < (g + 1) * size; e++)
                if (reference_rank(score, g * size, (g + 1) * size, e, NULL) < 2)
                    best[g] = sums ? best[g] + score[e] : reference_log_sum(best[g], score[e]);
        }
        for (size_t e = 0; e < E; e++) open[e] = reference_rank(best, 0, shape->groups, e / size, NULL) < shape->kept;
        for (size_t e = 0; e < E; e++) {
            const size_t rank = reference_rank(score, 0, E, e, open);
            if (open[e] && rank < k) route[t * k + rank] = (uint16_t)e;
        }
    }
    free(score), free(open);
}

// Computes score[E] of a token: p = softmax(z) over all experts, or s = 1 / (1 + exp(-z)). Returns log(sum_e exp z_e).
static double reference_scores(double *score, const double *z, size_t E, RouterKind kind) {
    double largest;
    const double lse = row_logsumexp(z, E, 1.0, &largest);
    for (size_t e = 0; e < E; e++) score[e] = kind == ROUTER_SIGMOID ? logistic(z[e]) : exp(z[e] - largest - lse);
    return largest + lse;
}

static size_t reference_expert(const uint16_t *route, size_t k, size_t t, size_t j) {
    return route ? route[t * k + j] : j;
}

// Returns the divisor of a token's weights.
static double reference_divisor(const double *score, const uint16_t *route, size_t t, const RouterShape *shape) {
    double sum = shape->kind == ROUTER_SIGMOID ? shape->epsilon : 0.0;
    for (size_t j = 0; j < shape->k; j++) sum += score[reference_expert(route, shape->k, t, j)];
    return shape->normalised ? sum : 1.0;
}

static void reference_router_weights(double *weight, const double *logits, const uint16_t *route, size_t n,
                                     const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    double *score = (double *)checked_calloc(E, sizeof(double), "scores of experts");
    for (size_t t = 0; t < n; t++) {
        reference_scores(score, logits + t * E, E, shape->kind);
        for (size_t j = 0; j < k; j++)
            weight[t * k + j] =
                shape->scale * score[reference_expert(route, k, t, j)] / reference_divisor(score, route, t, shape);
    }
    free(score);
}

// Computes, with w_j = scale q_j / S, S the sum of a token's scores q:   dq_j = scale (g_j / S - sum_i g_i q_i / S^2)
static void reference_router_backward(double *dlogits, const double *dweight, const double *logits,
                                      const uint16_t *route, const double *balance, double z, const int32_t *times,
                                      size_t n, const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    double *score = (double *)checked_calloc(3 * E, sizeof(double), "scores of experts");
    double *dscore = score + E, *p = score + 2 * E;
    for (size_t t = 0; t < n; t++) {
        const double *g = dweight + t * k, lse = reference_scores(p, logits + t * E, E, ROUTER_SOFTMAX);
        double *dz = dlogits + t * E, inner = 0.0, through = 0.0, pulled = 0.0;
        reference_scores(score, logits + t * E, E, shape->kind);
        const double sum = reference_divisor(score, route, t, shape);
        for (size_t e = 0; e < E; e++) dscore[e] = 0.0;
        for (size_t j = 0; j < k; j++) inner += g[j] * score[reference_expert(route, k, t, j)];
        for (size_t j = 0; j < k; j++)
            dscore[reference_expert(route, k, t, j)] +=
                shape->scale * (g[j] / sum - (shape->normalised ? inner / (sum * sum) : 0.0));
        for (size_t e = 0; e < E; e++) {
            through += dscore[e] * p[e];
            pulled += balance ? balance[e] * p[e] : 0.0;
        }
        for (size_t e = 0; e < E; e++) {
            dz[e] =
                shape->kind == ROUTER_SIGMOID ? dscore[e] * score[e] * (1.0 - score[e]) : p[e] * (dscore[e] - through);
            dz[e] += (times ? times[t] : 1) * p[e] * ((balance ? balance[e] - pulled : 0.0) + 2.0 * z * lse);
        }
    }
    free(score);
}

// Counts each token times[t] times, one after the other.
static void reference_router_count(int64_t *count, double *sums, const double *logits, const uint16_t *route,
                                   const int32_t *times, size_t n, const RouterShape *shape, void *scratch) {
    const size_t E = shape->E, k = shape->k;
    double *p = (double *)checked_calloc(E, sizeof(double), "scores of experts");
    (void)scratch;
    for (size_t t = 0; t < n; t++)
        for (int32_t i = 0; i < (times ? times[t] : 1); i++) {
            const double lse = reference_scores(p, logits + t * E, E, ROUTER_SOFTMAX);
            for (size_t j = 0; j < k; j++) count[route[t * k + j]]++;
            for (size_t e = 0; sums && e < E; e++) sums[e] += p[e];
            if (sums) sums[E] += lse * lse;
        }
    free(p);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static void reference_route_sort(int32_t *first, int32_t *source, int32_t *place, const uint16_t *route, size_t n,
                                 size_t k, size_t E, void *scratch) {
    int32_t row = 0;
    (void)scratch;
    for (size_t e = 0; e < E; e++) {
        first[e] = row;
        for (size_t i = 0; i < n * k; i++)
            if (route[i] == e) place[i] = row, source[row++] = (int32_t)i;
    }
    first[E] = row;
}

static void reference_route_gather(double *out, const double *x, const int32_t *source, size_t n, size_t k,
                                   size_t width) {
    for (size_t i = 0; i < n * k * width; i++) out[i] = x[(size_t)source[i / width] / k * width + i % width];
}

static void reference_route_combine(double *out, const double *rows, const int32_t *place, const double *residual,
                                    size_t n, size_t k, size_t width) {
    for (size_t i = 0; i < n * width; i++) {
        double sum = residual ? residual[i] : 0.0;
        for (size_t j = 0; j < k; j++) sum += rows[(size_t)place[i / width * k + j] * width + i % width];
        out[i] = sum;
    }
}

static void reference_route_weigh(double *out, const double *x, const double *weight, const int32_t *source,
                                  size_t rows, size_t width) {
    for (size_t i = 0; i < rows * width; i++) out[i] = weight[source ? (size_t)source[i / width] : i / width] * x[i];
}

static void reference_route_weigh_backward(double *dweight, double *dx, double *x, const double *dout,
                                           const double *weight, const int32_t *source, size_t rows, size_t width) {
    for (size_t i = 0; i < rows; i++) {
        const size_t at = source ? (size_t)source[i] : i;
        dweight[at] = 0.0;
        for (size_t c = i * width; c < (i + 1) * width; c++) {
            dweight[at] += dout[c] * x[c];
            dx[c] = weight[at] * dout[c], x[c] *= weight[at];
        }
    }
}

// ---- biases and factors of experts ----------------------------------------------------------------------------------
static size_t reference_expert_of(const int32_t *first, size_t row) {
    size_t e = 0;
    while ((size_t)first[e + 1] <= row) e++;
    return e;
}

static void reference_experts_bias_forward(double *rows, const double *bias, const double *weight, const int32_t *first,
                                           const int32_t *source, size_t R, size_t E, size_t width) {
    (void)E;
    for (size_t i = 0; i < R * width; i++)
        rows[i] += (weight ? weight[source[i / width]] : 1.0) *
                   bias[reference_expert_of(first, i / width) * width + i % width];
}

static void reference_experts_bias_backward(double *dbias, double *dweight, const double *drows, const double *bias,
                                            const double *weight, const int32_t *first, const int32_t *source, size_t R,
                                            size_t E, size_t width) {
    (void)E;
    for (size_t i = 0; i < R * width; i++) {
        const size_t at = reference_expert_of(first, i / width) * width + i % width;
        if (dbias) dbias[at] += (weight ? weight[source[i / width]] : 1.0) * drows[i];
        if (weight) dweight[source[i / width]] += drows[i] * bias[at];
    }
}

static void reference_experts_scale_forward(double *out, const double *weight, const double *scale,
                                            const int32_t *first, const int32_t *source, size_t R, size_t E) {
    (void)E;
    for (size_t r = 0; r < R; r++) out[source[r]] = scale[reference_expert_of(first, r)] * weight[source[r]];
}

static void reference_experts_scale_backward(double *dscale, double *dweight, const double *weight, const double *scale,
                                             const int32_t *first, const int32_t *source, size_t R, size_t E) {
    (void)E;
    for (size_t r = 0; r < R; r++) {
        const size_t e = reference_expert_of(first, r), i = (size_t)source[r];
        if (dscale) dscale[e] += dweight[i] * weight[i];
        dweight[i] *= scale[e];
    }
}

// ---- products: a linear layer per expert ----------------------------------------------------------------------------
static size_t rows_of_expert(const int32_t *first, size_t e) { return (size_t)(first[e + 1] - first[e]); }

static void reference_experts_forward(double *out, const double *x, const double *weight, const int32_t *first,
                                      size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++) {
        double *to = out + (size_t)first[e] * OC;
        reference_linear_forward(to, x + (size_t)first[e] * C, weight + e * OC * C, NULL, accumulate ? to : NULL,
                                 rows_of_expert(first, e), C, OC, OC);
    }
}

static void reference_experts_activate(double *out, double *gate_up, const double *x, const double *weight,
                                       const double *bias, const double *factor, const int32_t *first,
                                       const int32_t *source, size_t rows, size_t E, size_t C, size_t I,
                                       Activation activation, int keep) {
    const size_t H = activation_width(activation.kind, I);
    double *product = keep ? gate_up : (double *)checked_calloc(rows * H, sizeof(double), "gates and ups of experts");
    reference_experts_forward(product, x, weight, first, rows, E, C, H, 0);
    if (bias) reference_experts_bias_forward(product, bias, NULL, first, source, rows, E, H);
    reference_activation_forward(out, product, activation, rows, I);
    if (factor) reference_route_weigh(out, out, factor, source, rows, I);
    if (!keep) free(product);
}

static void reference_experts_forward_quantised(double *out, const double *x, const void *record,
                                                const QuantFormat *format, const int32_t *first, size_t rows, size_t E,
                                                size_t C, size_t OC) {
    double *weight = (double *)checked_calloc(E * OC * C, sizeof(double), "experts in 4 bits");
    reference_dequantise(weight, record, format, E * OC * C);
    reference_experts_forward(out, x, weight, first, rows, E, C, OC, 0);
    free(weight);
}

static void reference_experts_backward_input(double *dx, const double *dout, const double *weight, const int32_t *first,
                                             size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        reference_linear_backward_input(dx + (size_t)first[e] * C, dout + (size_t)first[e] * OC, weight + e * OC * C,
                                        rows_of_expert(first, e), C, OC, OC, accumulate);
}

static void reference_experts_backward_weight(double *dweight, const double *dout, const double *x,
                                              const int32_t *first, size_t rows, size_t E, size_t C, size_t OC) {
    (void)rows;
    for (size_t e = 0; e < E; e++)
        reference_linear_backward_weight(dweight + e * OC * C, NULL, dout + (size_t)first[e] * OC,
                                         x + (size_t)first[e] * C, rows_of_expert(first, e), C, OC, OC);
}

#endif
