/*
The router of experts: logits, choice, weights, their gradient, and what the losses need. A token's scores fit the L1
cache; its sums are made in a fixed order. Sums over tokens are made in groups of TOKEN_GROUP, for any number of
threads. Without balance and z, a softmax over the chosen experts touches no other expert's exponential.
*/
#ifndef LLMC_CPU_ROUTER_H
#define LLMC_CPU_ROUTER_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "product.h"
#include "simd_math.h"

#define ROUTER_ROW (EXPERTS_MOST + VECTOR_LANES) // room for one number per expert of a token, in whole vectors

static void cpu_router_logits(Summed *logits, const Stored *x, const Stored *weight, const Stored *bias, size_t n,
                              size_t C, size_t E, int accumulate) {
    Product p = product_of("router_logits", n, E, C, x, weight, logits);
    p.b_transposed = 1, p.out_summed = 1, p.accumulate = accumulate;
    p.bias = (const floatX *)bias;
    matrix_product(&p);
}

// Loads the lanes of x[count] from i on; lanes after the end are `rest`.
VECTOR_INLINE Vector router_lanes(const floatS *x, size_t i, size_t count, floatS rest) {
    floatS lane[VECTOR_LANES];
    if (i + VECTOR_LANES <= count) return vector_load(x + i);
    for (size_t j = 0; j < VECTOR_LANES; j++) lane[j] = i + j < count ? x[i + j] : rest;
    return vector_load(lane);
}

// Returns the largest of x[count], ignoring NaN.
VECTOR_INLINE floatS router_largest(const floatS *x, size_t count) {
    Vector most = vector_of(-INFINITY);
    for (size_t i = 0; i < count; i += VECTOR_LANES) most = vector_max(router_lanes(x, i, count, -INFINITY), most);
    return vector_max_across(most);
}

// ---- choice ---------------------------------------------------------------------------------------------------------
// Computes score[E], by which experts are chosen. A NaN becomes the lowest score.
VECTOR_INLINE void router_scores(floatS *score, const floatS *z, const float *bias, const RouterShape *shape) {
    const Vector lowest = vector_of(-INFINITY);
    for (size_t e = 0; e < shape->E; e += VECTOR_LANES) {
        Vector slope, x = router_lanes(z, e, shape->E, 0);
        vector_store(score + e, shape->kind == ROUTER_SIGMOID ? vector_logistic(x, &slope) : x);
    }
    for (size_t e = 0; e < shape->E && bias; e++) score[e] += (floatS)bias[e];
    for (size_t e = 0; e < shape->E; e += VECTOR_LANES) {
        const Vector x = vector_load(score + e);
        vector_store(score + e, vector_select((VectorBits)(x == x), x, lowest));
    }
}

// Returns the index of the largest of score[count], the lowest index among equal scores. Sets this score to NaN, so
// that later calls skip it.
VECTOR_INLINE size_t router_take(floatS *score, size_t count) {
    const floatS largest = router_largest(score, count);
    size_t e = 0;
    while (e + 1 < count && score[e] != largest) e++;
    score[e] = NAN;
    return e;
}

// Excludes all groups except the `kept` best: their scores become NaN. Of a softmax the logits rank the experts, and
// log(exp(z1) + exp(z2)) of its two best logits ranks a group, as the sum of their probabilities would.
static void router_close_groups(floatS *score, const RouterShape *shape) {
    const size_t size = shape->E / shape->groups;
    floatS best[EXPERTS_MOST];
    for (size_t g = 0; g < shape->groups; g++) {
        floatS most = -INFINITY, second = -INFINITY;
        for (size_t e = g * size; e < (g + 1) * size; e++) {
            const floatS x = score[e];
            second = x > most ? most : x > second ? x : second;
            most = x > most ? x : most;
        }
        if (shape->kind == ROUTER_SOFTMAX)
            second = second > -INFINITY ? (floatS)log1p(exp((double)(second - most))) : 0;
        best[g] = size > 1 ? most + second : most;
    }
    for (size_t i = 0; i < shape->kept; i++) router_take(best, shape->groups);
    for (size_t e = 0; e < shape->E; e++)
        if (best[e / size] == best[e / size]) score[e] = NAN;
}

static VECTOR_FUNCTION void choose_token(uint16_t *route, const floatS *z, const float *bias,
                                         const RouterShape *shape) {
    floatS score[ROUTER_ROW];
    router_scores(score, z, bias, shape);
    if (shape->kept < shape->groups) router_close_groups(score, shape);
    for (size_t j = 0; j < shape->k; j++) route[j] = (uint16_t)router_take(score, shape->E);
}

static void cpu_router_choose(uint16_t *route, const Summed *logits, const float *bias, size_t n,
                              const RouterShape *shape, int keep) {
    const size_t E = shape->E, k = shape->k;
#pragma omp parallel for schedule(static) if (n * E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        if (!keep || route[t * k] == NO_EXPERT)
            choose_token(route + t * k, (const floatS *)logits + t * E, bias, shape);
}

// ---- weights --------------------------------------------------------------------------------------------------------
static size_t route_at(const uint16_t *route, size_t k, size_t t, size_t j) { return route ? route[t * k + j] : j; }

// Computes p[count] = exp(z - *largest) and returns their sum.
VECTOR_INLINE floatS router_exponentials(floatS *p, const floatS *z, size_t count, floatS *largest) {
    Vector sum = {0};
    *largest = router_largest(z, count);
    for (size_t e = 0; e < count; e += VECTOR_LANES) {
        const Vector x = vector_exp(router_lanes(z, e, count, -INFINITY) - *largest);
        sum += x;
        vector_store(p + e, x);
    }
    return vector_sum_across(sum);
}

// A token's router; weights are scale score[k] / divisor
typedef struct {
    floatS score[ROUTER_ROW], slope[ROUTER_ROW]; // of the chosen experts; slope: the sigmoid's derivative
    floatS p[ROUTER_ROW];                        // exp(z - largest) of all experts, if router_all computed them
    floatS largest, sum, divisor;
} TokenRouter;

VECTOR_INLINE void router_all(TokenRouter *r, const floatS *z, size_t E) {
    r->sum = router_exponentials(r->p, z, E, &r->largest);
}

// Scores the chosen experts. A normalised softmax over all experts equals a softmax over the chosen experts.
VECTOR_INLINE void router_chosen(TokenRouter *r, const floatS *z, const uint16_t *route, size_t t,
                                 const RouterShape *shape) {
    const size_t k = shape->k;
    floatS chosen[ROUTER_ROW], largest, sum = (floatS)shape->epsilon;
    r->divisor = 1;
    for (size_t j = 0; j < k; j++) chosen[j] = z[route_at(route, k, t, j)];
    if (shape->kind == ROUTER_SIGMOID) {
        for (size_t j = 0; j < k; j += VECTOR_LANES) {
            Vector slope;
            vector_store(r->score + j, vector_logistic(router_lanes(chosen, j, k, 0), &slope));
            vector_store(r->slope + j, slope);
        }
        for (size_t j = 0; j < k; j++) sum += r->score[j];
        if (shape->normalised) r->divisor = sum;
    } else if (shape->normalised)
        r->divisor = router_exponentials(r->score, chosen, k, &largest);
    else {
        router_all(r, z, shape->E);
        for (size_t j = 0; j < k; j++) r->score[j] = r->p[route_at(route, k, t, j)] / r->sum;
    }
}

static VECTOR_FUNCTION void weigh_token(floatS *weight, const floatS *z, const uint16_t *route, size_t t,
                                        const RouterShape *shape) {
    TokenRouter r;
    router_chosen(&r, z, route, t, shape);
    for (size_t j = 0; j < shape->k; j++) weight[j] = r.score[j] / r.divisor * (floatS)shape->scale;
}

static void cpu_router_weights(Summed *weight, const Summed *logits, const uint16_t *route, size_t n,
                               const RouterShape *shape) {
#pragma omp parallel for schedule(static) if (n * shape->E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        weigh_token((floatS *)weight + t * shape->k, (const floatS *)logits + t * shape->E, route, t, shape);
}

// ---- gradient -------------------------------------------------------------------------------------------------------
// Adds p_e (shift + times (balance_e - sum_j p_j balance_j)) to dz[E].
VECTOR_INLINE void router_all_back(floatS *dz, const TokenRouter *r, const floatS *balance, floatS shift, floatS times,
                                   size_t E) {
    const floatS inverse = 1 / r->sum;
    Vector pulled = {0};
    for (size_t e = 0; e < E && balance; e += VECTOR_LANES)
        pulled += vector_load(r->p + e) * router_lanes(balance, e, E, 0);
    shift -= times * vector_sum_across(pulled) * inverse;
    for (size_t e = 0; e < E; e += VECTOR_LANES) {
        const Vector by = balance ? times * router_lanes(balance, e, E, 0) + shift : vector_of(shift);
        vector_store(dz + e, vector_load(dz + e) + vector_load(r->p + e) * inverse * by);
    }
}

static VECTOR_FUNCTION void router_token_back(floatX *dlogits, const floatS *g, const floatS *z, const uint16_t *route,
                                              const floatS *balance, floatS z_factor, floatS times, size_t t,
                                              const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    const int of_all = shape->kind == ROUTER_SOFTMAX && !shape->normalised;
    const floatS scale = (floatS)shape->scale;
    TokenRouter r;
    floatS dz[ROUTER_ROW], inner = 0, shift = 0;
    memset(dz, 0, round_up(E, VECTOR_LANES) * sizeof(*dz));
    router_chosen(&r, z, route, t, shape);
    for (size_t j = 0; j < k; j++) inner += r.score[j] / r.divisor * g[j];
    for (size_t j = 0; j < k; j++)
        dz[route_at(route, k, t, j)] += scale * (shape->kind == ROUTER_SIGMOID ? r.slope[j] : r.score[j]) / r.divisor *
                                        (shape->normalised ? g[j] - inner : g[j]);
    if (of_all || balance || z_factor != 0) {
        if (!of_all) router_all(&r, z, E);
        if (of_all) shift -= scale * inner;
        if (z_factor != 0) shift += times * z_factor * 2 * ((floatS)log((double)r.sum) + r.largest);
        router_all_back(dz, &r, balance, shift, times, E);
    }
    for (size_t e = 0; e < E; e += VECTOR_LANES) vector_store_first(dlogits + e, vector_load(dz + e), E - e);
}

static void cpu_router_backward(Stored *dlogits, const Summed *dweight, const Summed *logits, const uint16_t *route,
                                const Summed *balance, double z, const int32_t *times, size_t n,
                                const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
#pragma omp parallel for schedule(static) if (n * E >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        router_token_back((floatX *)dlogits + t * E, (const floatS *)dweight + t * k, (const floatS *)logits + t * E,
                          route, (const floatS *)balance, (floatS)z, times ? (floatS)times[t] : 1, t, shape);
}

// ---- counts ---------------------------------------------------------------------------------------------------------
// Sums over tokens [begin, end), each times[.] times, into sums[E + 1].
static VECTOR_FUNCTION void count_group(floatS *sums, const floatS *logits, const int32_t *times, size_t begin,
                                        size_t end, size_t E) {
    floatS p[ROUTER_ROW], total[ROUTER_ROW], squares = 0, largest;
    memset(total, 0, round_up(E, VECTOR_LANES) * sizeof(*total));
    for (size_t t = begin; t < end; t++) {
        const floatS sum = router_exponentials(p, logits + t * E, E, &largest);
        const floatS lse = (floatS)log((double)sum) + largest, by = times ? (floatS)times[t] : 1, inverse = by / sum;
        for (size_t e = 0; e < E; e += VECTOR_LANES)
            vector_store(total + e, vector_load(total + e) + vector_load(p + e) * inverse);
        squares += by * lse * lse;
    }
    memcpy(sums, total, E * sizeof(*sums));
    sums[E] = squares;
}

// Sizes scratch[groups][E + 1]: sums of each group of tokens
static size_t router_groups(size_t n) { return (n + TOKEN_GROUP - 1) / TOKEN_GROUP; }
static size_t cpu_router_count_scratch(size_t n, size_t E) { return router_groups(n) * (E + 1); }

static void cpu_router_count(int64_t *count, double *sums, const Summed *logits, const uint16_t *route,
                             const int32_t *times, size_t n, const RouterShape *shape, Summed *scratch) {
    const size_t E = shape->E, groups = router_groups(n);
    floatS *part = (floatS *)scratch;
    for (size_t i = 0; i < n * shape->k; i++) count[route[i]] += times ? times[i / shape->k] : 1;
    if (!sums) return;
#pragma omp parallel for schedule(static) if (n * E >= PARALLEL_MIN)
    for (size_t g = 0; g < groups; g++)
        count_group(part + g * (E + 1), (const floatS *)logits, times, g * TOKEN_GROUP,
                    min_size((g + 1) * TOKEN_GROUP, n), E);
    for (size_t g = 0; g < groups; g++)
        for (size_t e = 0; e <= E; e++) sums[e] += (double)part[g * (E + 1) + e];
}

#endif
