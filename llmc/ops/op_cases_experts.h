/*
Cases of the ops of experts. Part of op_cases.h. A sample has some columns, and every token, expert and row.
*/
#ifndef LLMC_OP_CASES_EXPERTS_H
#define LLMC_OP_CASES_EXPERTS_H
#include "ops_reference_experts.h"

#define ROUTES DTYPE_BF16 // for routes: a type as wide as uint16_t
#define COUNTS DTYPE_FP64 // for counts: a type as wide as int64_t

static void router_begin(const OpShape *s) {
    const RouterShape *r = &s->router;
    check_begin("%zu x %zu of %zu%s%s, scale %g, %zu of %zu groups", s->n, r->k, r->E,
                r->kind == ROUTER_SIGMOID ? " by sigmoid" : "", r->normalised ? ", normalised" : "", r->scale, r->kept,
                r->groups);
}

// Returns k different experts for each of n tokens. One expert gets no rows, unless each token has all experts.
static uint16_t *drawn_routes(size_t n, const RouterShape *r) {
    const size_t k = r->k, empty = k < r->E ? check_below(r->E) : r->E;
    uint16_t *route = (uint16_t *)check_allocate(n * k * sizeof(uint16_t));
    for (size_t i = 0; i < n * k; i++)
        for (int again = 1; again;) {
            route[i] = (uint16_t)check_below(r->E), again = route[i] == empty;
            for (size_t j = i / k * k; j < i; j++) again |= route[j] == route[i];
        }
    return route;
}

static Tensor *tensor_routes(const OpShape *s) {
    return tensor_raw(TENSOR_READ, "route", ROUTES, all_of(s->n * s->router.k), drawn_routes(s->n, &s->router));
}
static Tensor *tensor_logits(const OpShape *s) {
    return tensor_make(TENSOR_READ, "logits", check.ops->summed, all_of(s->n), all_of(s->router.E));
}

// Makes the times that a token counts: 0 to 6, or NULL, once each.
static Tensor *tensor_times(const OpShape *s) { return s->times ? tensor_indices("times", all_of(s->n), 7, 0) : NULL; }

// ---- the router -----------------------------------------------------------------------------------------------------
static void case_router_logits(const OpShape *s) {
    check_begin("%zu x %zu x %zu", s->n, s->C, s->router.E);
    const Dim N = some_of(s->n, 32), C = all_of(s->C), E = all_of(s->router.E);
    Tensor *x = tensor_in("x", N, C), *weight = tensor_in("weight", E, C);
    Tensor *logits = s->accumulate ? tensor_sums("logits", N, E) : tensor_found("logits", N, E);
    Tensor *bias = s->bias ? tensor_in("bias", all_of(1), E) : NULL;
    sums_of(s->C, s->bias);
    CHECK(router_logits, of(logits), of(x), of(weight), of(bias), len(N), len(C), len(E), s->accumulate);
    expect(logits, 1, sqrt((double)s->C));
}

// Draws logits and biases from a grid, so that two scores are either equal or far apart. back: keeps known routes
static void case_router_choose(const OpShape *s) {
    const size_t n = s->n, E = s->router.E, k = s->router.k;
    router_begin(s);
    float *values = (float *)check_allocate(n * E * sizeof(float)), *bias = (float *)check_allocate(E * sizeof(float));
    void *elements = check_allocate(n * E * sizeof(double));
    uint16_t *known = drawn_routes(n, &s->router);
    for (size_t i = 0; i < n * E; i++) values[i] = ((float)check_below(97) - 48) / 16 + 3.0f / 256;
    for (size_t e = 0; e < E; e++) bias[e] = (float)check_below(9) / 8;
    for (size_t t = 0; t < n; t += 2) known[t * k] = NO_EXPERT;
    elements_from_float(elements, check.ops->summed, values, n * E);
    Tensor *logits = tensor_given(TENSOR_READ, "logits", check.ops->summed, all_of(n), all_of(E), elements);
    Tensor *added = s->bias ? tensor_raw(TENSOR_READ, "bias", DTYPE_FP32, all_of(E), bias) : NULL;
    Tensor *route =
        tensor_raw(s->back ? TENSOR_CHANGED : TENSOR_WRITTEN, "route", ROUTES, all_of(n * k), s->back ? known : NULL);
    CHECK(router_choose, of(route), of(logits), of(added), n, &s->router, s->back);
    expect_integers(route);
}

// Runs the op, with route NULL if there is one expert.
static void case_router_weights(const OpShape *s) {
    router_begin(s);
    Tensor *logits = tensor_logits(s), *route = s->router.E > 1 ? tensor_routes(s) : NULL;
    Tensor *weight = tensor_found("weight", all_of(s->n), all_of(s->router.k));
    CHECK(router_weights, of(weight), of(logits), of(route), s->n, &s->router);
    expect(weight, 1, 0);
}

// Runs the op. joined: with the loss that balances experts; factor: weight of the z loss
static void case_router_backward(const OpShape *s) {
    router_begin(s);
    const DType summed = check.ops->summed;
    const Dim N = all_of(s->n), k = all_of(s->router.k), E = all_of(s->router.E), one = all_of(1);
    Tensor *dweight = tensor_make(TENSOR_READ, "dweight", summed, N, k), *logits = tensor_logits(s);
    Tensor *route = s->router.E > 1 ? tensor_routes(s) : NULL;
    Tensor *balance = s->joined ? tensor_make(TENSOR_READ, "balance", summed, one, E) : NULL;
    Tensor *times = tensor_times(s), *dlogits = tensor_out("dlogits", N, E);
    CHECK(router_backward, of(dlogits), of(dweight), of(logits), of(route), of(balance), s->factor, of(times), s->n,
          &s->router);
    expect(dlogits, 2, s->router.k < 3); // with one or two experts the terms cancel
}

static void case_router_count(const OpShape *s) {
    const size_t E = s->router.E;
    router_begin(s);
    int64_t *before = (int64_t *)check_allocate(E * sizeof(int64_t));
    for (size_t e = 0; e < E; e++) before[e] = (int64_t)check_below(1 << 20);
    Tensor *count = tensor_raw(TENSOR_CHANGED, "count", COUNTS, all_of(E), before);
    Tensor *sums = tensor_make(TENSOR_CHANGED, "sums", DTYPE_FP64, all_of(1), all_of(E + 1));
    Tensor *logits = tensor_logits(s), *route = tensor_routes(s);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(router_count, s->n, E));
    Tensor *times = tensor_times(s);
    CHECK(router_count, of(count), of(sums), of(logits), of(route), of(times), s->n, &s->router, of(scratch));
    expect_integers(count);
    expect(sums, 1, 1);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static void case_route_sort(const OpShape *s) {
    const size_t E = s->router.E, k = s->router.k;
    check_begin("%zu x %zu of %zu", s->n, k, E);
    const Dim rows = all_of(s->n * k);
    Tensor *route = tensor_routes(s), *first = tensor_raw(TENSOR_WRITTEN, "first", DTYPE_FP32, all_of(E + 1), NULL);
    Tensor *source = tensor_raw(TENSOR_WRITTEN, "source", DTYPE_FP32, rows, NULL);
    Tensor *place = tensor_raw(TENSOR_WRITTEN, "place", DTYPE_FP32, rows, NULL);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(route_sort, s->n, k, E));
    CHECK(route_sort, of(first), of(source), of(place), of(route), s->n, k, E, of(scratch));
    expect_integers(first);
    expect_integers(source);
    expect_integers(place);
}

// Makes a permutation of the numbers below n.
static Tensor *tensor_order(const char *name, size_t n) {
    int32_t *order = (int32_t *)check_allocate(n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) {
        const size_t j = check_below(i + 1);
        order[i] = order[j], order[j] = (int32_t)i;
    }
    return tensor_raw(TENSOR_READ, name, DTYPE_FP32, all_of(n), order);
}

static void case_route_gather(const OpShape *s) {
    const size_t k = s->router.k;
    check_begin("%zu x %zu x %zu", s->n, k, s->C);
    const Dim C = some_of(s->C, 64);
    Tensor *source = tensor_order("source", s->n * k), *x = tensor_in("x", all_of(s->n), C);
    Tensor *out = tensor_out("out", all_of(s->n * k), C);
    CHECK(route_gather, of(out), of(x), of(source), s->n, k, len(C));
    expect(out, 1, 0);
}

static void case_route_combine(const OpShape *s) {
    const size_t k = s->router.k;
    check_begin("%zu x %zu x %zu", s->n, k, s->C);
    const Dim C = some_of(s->C, 64), N = all_of(s->n);
    Tensor *place = tensor_order("place", s->n * k), *rows = tensor_in("rows", all_of(s->n * k), C);
    Tensor *residual = s->joined ? tensor_in("residual", N, C) : NULL, *out = tensor_out("out", N, C);
    CHECK(route_combine, of(out), of(rows), of(place), of(residual), s->n, k, len(C));
    expect(out, 1, sqrt((double)k));
}

// Runs the op. joined: rows are in the order of experts
static void case_route_weigh(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim C = some_of(s->C, 64), N = all_of(s->n);
    Tensor *x = tensor_in("x", N, C), *out = tensor_out("out", N, C);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, all_of(1));
    Tensor *source = s->joined ? tensor_order("source", s->n) : NULL;
    CHECK(route_weigh, of(out), of(x), of(weight), of(source), len(N), len(C));
    expect(out, 1, 0);
}

static void case_route_weigh_backward(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim C = all_of(s->C), N = all_of(s->n);
    Tensor *dout = tensor_in("dout", N, C), *x = tensor_inout("x", N, C), *dx = tensor_out("dx", N, C);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, all_of(1));
    Tensor *dweight = tensor_found("dweight", N, all_of(1));
    Tensor *source = s->joined ? tensor_order("source", s->n) : NULL;
    CHECK(route_weigh_backward, of(dweight), of(dx), of(x), of(dout), of(weight), of(source), len(N), len(C));
    expect(dweight, 1, sqrt((double)s->C));
    expect(dx, 1, 0);
    expect(x, 1, 0);
}

// ---- products: n rows of E experts ----------------------------------------------------------------------------------
// Makes first[E + 1]: experts with lower indices have more rows; if there are several, one has none.
static Tensor *tensor_first(const OpShape *s) {
    const size_t E = s->router.E, empty = check_below(E);
    int32_t *first = (int32_t *)check_allocate((E + 1) * sizeof(int32_t));
    for (size_t i = 0; i < s->n; i++) {
        const size_t e = check_below(1 + check_below(E));
        first[(e == empty && E > 1 ? (e + 1) % E : e) + 1]++;
    }
    for (size_t e = 0; e < E; e++) first[e + 1] += first[e];
    return tensor_raw(TENSOR_READ, "first", DTYPE_FP32, all_of(E + 1), first);
}

// Makes rows of E matrices, each with rows d.
static Dim of_experts(Dim d, size_t E) {
    size_t *at = (size_t *)check_allocate(d.count * E * sizeof(size_t));
    for (size_t i = 0; i < d.count * E; i++) at[i] = i / d.count * d.size + dim_at(d, i % d.count);
    return dim_of(d.size * E, d.count * E, at);
}

// Runs the op. joined: rows are weighed by their token's weight
static void case_experts_bias_forward(const OpShape *s) {
    check_begin("%zu x %zu by %zu", s->n, s->C, s->router.E);
    const Dim N = all_of(s->n), C = some_of(s->C, 64);
    Tensor *first = tensor_first(s), *source = tensor_order("source", s->n), *rows = tensor_inout("rows", N, C);
    Tensor *bias = tensor_in("bias", all_of(s->router.E), C);
    Tensor *weight = s->joined ? tensor_make(TENSOR_READ, "weight", check.ops->summed, N, all_of(1)) : NULL;
    CHECK(experts_bias_forward, of(rows), of(bias), of(weight), of(first), of(source), s->n, s->router.E, len(C));
    expect(rows, 1, 1);
}

static void case_experts_bias_backward(const OpShape *s) {
    check_begin("%zu x %zu by %zu", s->n, s->C, s->router.E);
    const Dim N = all_of(s->n), C = all_of(s->C), E = all_of(s->router.E), one = all_of(1);
    Tensor *first = tensor_first(s), *source = tensor_order("source", s->n), *drows = tensor_in("drows", N, C);
    Tensor *bias = tensor_in("bias", E, C), *dbias = tensor_sums("dbias", E, C);
    Tensor *weight = s->joined ? tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one) : NULL;
    Tensor *dweight = s->joined ? tensor_sums("dweight", N, one) : NULL;
    CHECK(experts_bias_backward, of(dbias), of(dweight), of(drows), of(bias), of(weight), of(first), of(source), s->n,
          s->router.E, len(C));
    expect(dbias, 1, sqrt((double)s->n));
    expect(dweight, 1, sqrt((double)s->C));
}

static void case_experts_scale_forward(const OpShape *s) {
    check_begin("%zu by %zu", s->n, s->router.E);
    const Dim N = all_of(s->n), one = all_of(1);
    Tensor *first = tensor_first(s), *source = tensor_order("source", s->n);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one), *out = tensor_found("out", N, one);
    Tensor *scale = tensor_in("scale", all_of(s->router.E), one);
    CHECK(experts_scale_forward, of(out), of(weight), of(scale), of(first), of(source), s->n, s->router.E);
    expect(out, 1, 0);
}

static void case_experts_scale_backward(const OpShape *s) {
    check_begin("%zu by %zu", s->n, s->router.E);
    const Dim N = all_of(s->n), E = all_of(s->router.E), one = all_of(1);
    Tensor *first = tensor_first(s), *source = tensor_order("source", s->n);
    Tensor *scale = tensor_in("scale", E, one), *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one);
    Tensor *dscale = tensor_sums("dscale", E, one), *dweight = tensor_sums("dweight", N, one);
    CHECK(experts_scale_backward, of(dscale), of(dweight), of(weight), of(scale), of(first), of(source), s->n,
          s->router.E);
    expect(dscale, 1, sqrt((double)s->n));
    expect(dweight, 1, 0);
}

static void products_begin(const OpShape *s) { check_begin("%zux%zux%zu by %zu", s->n, s->C, s->OC, s->router.E); }

static void case_experts_forward(const OpShape *s) {
    products_begin(s);
    const Dim N = all_of(s->n), C = all_of(s->C), OC = some_of(s->OC, 48);
    Tensor *first = tensor_first(s), *x = tensor_in("x", N, C);
    Tensor *weight = tensor_in("weight", of_experts(OC, s->router.E), C);
    Tensor *out = s->accumulate ? tensor_inout("out", N, OC) : tensor_out("out", N, OC);
    sums_of(s->C, s->accumulate);
    CHECK(experts_forward, of(out), of(x), of(weight), of(first), s->n, s->router.E, len(C), len(OC), s->accumulate);
    expect(out, 1, sqrt((double)s->C));
}

// Makes columns of gate_up from columns d of the activated rows.
static Dim gates_and_ups(Dim d, ActivationKind kind) {
    const size_t width = activation_width(kind, 1), count = d.count * width;
    size_t *at = (size_t *)check_allocate(count * sizeof(size_t));
    for (size_t i = 0; i < count; i++)
        at[i] =
            kind == ACTIVATION_CLAMPED ? dim_at(d, i / 2) * 2 + i % 2 : i / d.count * d.size + dim_at(d, i % d.count);
    return dim_of(d.size * width, count, at);
}

// Runs the op. joined: rows are weighed by their token's factor; bias: experts have biases; back: gate_up stays
static void case_experts_activate(const OpShape *s) {
    products_begin(s);
    const size_t E = s->router.E, width = activation_width(s->activation.kind, 1);
    const Dim N = all_of(s->n), C = all_of(s->C), I = some_of(s->OC / width, 24);
    const Dim H = gates_and_ups(I, s->activation.kind);
    Tensor *first = tensor_first(s), *source = tensor_order("source", s->n), *x = tensor_in("x", N, C);
    Tensor *weight = tensor_in("weight", of_experts(H, E), C), *out = tensor_out("out", N, I);
    Tensor *gate_up = tensor_make(s->back ? TENSOR_WRITTEN : TENSOR_SCRATCH, "gate_up", check.ops->stored, N, H);
    Tensor *factor = s->joined ? tensor_make(TENSOR_READ, "factor", check.ops->summed, N, all_of(1)) : NULL;
    Tensor *bias = s->bias ? tensor_in("bias", all_of(E), H) : NULL;
    sums_of(s->C, 0);
    CHECK(experts_activate, of(out), of(gate_up), of(x), of(weight), of(bias), of(factor), of(first), of(source), s->n,
          E, len(C), len(I), s->activation, s->back);
    const int bf16 = check.ops->stored == DTYPE_BF16, clamped = bf16 && s->activation.kind == ACTIVATION_CLAMPED;
    const int early = bf16 && s->bias; // sums are rounded before biases (at most about 4) are added
    const double sums = sqrt((double)s->C);
    const double scale =
        fmax((double)s->C, clamped ? 33 * s->activation.limit : 0); // of rounded sums; clamped: ups + 1
    if (early) result_rounds(2, 2 * 4);
    if (s->back) expect(gate_up, 1, sums);
    // gate, up, their product and the weighed product are rounded; with biases gate and up twice, and each early error
    // is multiplied by an up or a gate of at most 4 sums
    result_rounds(early ? 7 : 3, early ? 2 * 2 * 4 * 4 * sums : sums);
    expect(out, 1, scale);
}

static void case_experts_forward_quantised(const OpShape *s) {
    const size_t E = s->router.E;
    products_begin(s);
    const Dim N = all_of(s->n), C = all_of(s->C), OC = all_of(s->OC);
    const QuantFormat format = format_on(s, s->OC, s->C);
    Tensor *first = tensor_first(s), *record = tensor_record(format, E * s->OC * s->C);
    Tensor *x = tensor_in("x", N, C), *out = tensor_out("out", N, OC);
    sums_of(s->C, 0);
    CHECK(experts_forward_quantised, of(out), of(x), of(record), &format, of(first), s->n, E, len(C), len(OC));
    expect(out, 1, sqrt((double)s->C));
}

static void case_experts_backward_input(const OpShape *s) {
    products_begin(s);
    const Dim N = all_of(s->n), C = some_of(s->C, 48), OC = all_of(s->OC);
    Tensor *first = tensor_first(s), *dout = tensor_in("dout", N, OC);
    Tensor *weight = tensor_in("weight", of_experts(OC, s->router.E), C);
    Tensor *dx = s->accumulate ? tensor_inout("dx", N, C) : tensor_out("dx", N, C);
    sums_of(s->OC, s->accumulate);
    CHECK(experts_backward_input, of(dx), of(dout), of(weight), of(first), s->n, s->router.E, len(C), len(OC),
          s->accumulate);
    expect(dx, 1, sqrt((double)s->OC));
}

static void case_experts_backward_weight(const OpShape *s) {
    products_begin(s);
    const Dim N = all_of(s->n), C = some_of(s->C, 48), OC = some_of(s->OC, 48);
    Tensor *first = tensor_first(s), *dout = tensor_in("dout", N, OC), *x = tensor_in("x", N, C);
    Tensor *dweight = tensor_sums("dweight", of_experts(OC, s->router.E), C);
    sums_of(s->n, 0);
    CHECK(experts_backward_weight, of(dweight), of(dout), of(x), of(first), s->n, s->router.E, len(C), len(OC));
    expect(dweight, 1, sqrt((double)s->n));
}

#endif
