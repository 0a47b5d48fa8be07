/*
The ops of experts: routers of all kinds, with ties and NaN, groups of experts, kept routes; rows of experts without a
token and with all of them; products of each expert's rows. Part of test_ops.c.
*/
#ifndef TEST_OPS_EXPERTS_H
#define TEST_OPS_EXPERTS_H
#include "test_ops_reference.h"

static const RouterShape routers[] = {
    {ROUTER_SOFTMAX, 7, 3, 1, 1.0, 1, 1, 1e-20},    {ROUTER_SIGMOID, 16, 4, 1, 2.5, 2, 1, 0.125},
    {ROUTER_SOFTMAX, 8, 2, 0, 1.0, 1, 1, 1e-20},    {ROUTER_SIGMOID, 1, 1, 0, 1.0, 1, 1, 1e-20},
    {ROUTER_SOFTMAX, 128, 8, 1, 1.0, 1, 1, 1e-20},  {ROUTER_SIGMOID, 12, 3, 0, 2.5, 4, 2, 1e-20},
    {ROUTER_SOFTMAX, 5, 5, 1, 2.5, 1, 1, 1e-20},    {ROUTER_SIGMOID, 33, 6, 1, 1.0, 1, 1, 1e-20},
    {ROUTER_SOFTMAX, 2, 1, 1, 1.0, 1, 1, 1e-20},    {ROUTER_SIGMOID, 8, 2, 1, 1.5, 8, 3, 1e-20},
    {ROUTER_SOFTMAX, 70, 64, 0, 1.0, 1, 1, 1e-20},  {ROUTER_SIGMOID, 160, 8, 1, 2.5, 8, 4, 1e-20},
    {ROUTER_SOFTMAX, 515, 10, 0, 2.5, 1, 1, 1e-20}, {ROUTER_SIGMOID, 4, 4, 1, 2.5, 2, 2, 1e-20},
    {ROUTER_SOFTMAX, 12, 3, 1, 1.0, 4, 2, 1e-20},   {ROUTER_SIGMOID, 9, 2, 1, 1.0, 3, 2, 1e-20},
    {ROUTER_SOFTMAX, 8, 2, 0, 1.0, 8, 3, 1e-20},    {ROUTER_SOFTMAX, 160, 8, 1, 2.5, 8, 3, 1e-20},
    {ROUTER_SOFTMAX, 1, 1, 1, 1.0, 1, 1, 1e-20},    {ROUTER_SIGMOID, EXPERTS_MOST, CHOSEN_MOST, 1, 1.0, 4, 2, 1e-20},
};
static const size_t tokens_of_routers[] = {1, 2, 7, 33, 130};

// A router and a number of tokens: those of few experts with all of them
static OpShape router_shape(size_t i) {
    const RouterShape *r = &routers[i % COUNT_OF(routers)];
    const size_t n = tokens_of_routers[i / COUNT_OF(routers)];
    const OpShape s = {.n = r->E > 500 ? 1 + n % 5 : n, .router = *r};
    return s;
}
enum { ROUTER_CASES = COUNT_OF(routers) * COUNT_OF(tokens_of_routers) };

TEST(router_logits) {
    static const size_t shapes[][3] = {{1, 1, 1},   {1, 64, 128}, {5, 33, 7},    {40, 128, 16},
                                       {3, 300, 9}, {70, 96, 65}, {33, 1030, 40}}; // n, C, E
    for (size_t i = 0; i < 4 * COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i / 4];
        const OpShape s = {
            .n = shape[0], .C = shape[1], .accumulate = (int)i % 2, .bias = (int)i / 2 % 2, .router = {.E = shape[2]}};
        case_of("", "accumulate %d, bias %d", s.accumulate, s.bias);
        case_router_logits(&s);
    }
}

// Logits that decide nothing: equal, NaN, infinite or of equal sigmoids
enum { LOGITS_DRAWN, LOGITS_EQUAL, LOGITS_NAN, LOGITS_FEW, LOGITS_LARGE, LOGITS_KINDS };
static double *undecided(const OpShape *s, size_t kind) {
    double *z = case_doubles(s->n * s->router.E);
    for (size_t i = 0; i < s->n * s->router.E; i++)
        z[i] = kind == LOGITS_EQUAL   ? 0.5
               : kind == LOGITS_NAN   ? (test_random_below(4) ? (double)test_random_below(3) : NAN)
               : kind == LOGITS_FEW   ? (test_random_below(4) ? (i % 2 ? NAN : -INFINITY) : 1.0)
               : kind == LOGITS_LARGE ? 100.0 + (double)test_random_below(9)
                                      : 0.0;
    return z;
}

TEST(router_choose) {
    for (size_t i = 0; i < LOGITS_KINDS * ROUTER_CASES; i += EMULATED ? 7 : 1) {
        OpShape s = router_shape(i / LOGITS_KINDS);
        s.bias = (int)(i / 2 % 2), s.back = (int)(i / 3 % 2);
        case_of(i % 5 == 4 ? ", no bias" : "", "logits %zu, bias %d, keep %d", i % LOGITS_KINDS, s.bias, s.back);
        if (i % LOGITS_KINDS != LOGITS_DRAWN) given("logits", undecided(&s, i % LOGITS_KINDS));
        case_router_choose(&s);
    }
}

// Without a route: all experts, in their order
static const char *all_chosen(const OpShape *s, size_t i) {
    return s->router.k == s->router.E && i % 2 ? ", no route" : "";
}

TEST(router_weights) {
    for (size_t i = 0; i < ROUTER_CASES; i++) {
        const OpShape s = router_shape(i);
        case_of(all_chosen(&s, i), "logits of %d", i % 3 ? 3 : 30);
        drawn("logits", i % 4 ? 0.0 : 40.0, i % 3 ? 3.0 : 30.0);
        case_router_weights(&s);
    }
}

TEST(router_backward) {
    for (size_t i = 0; i < 2 * ROUTER_CASES; i++) {
        OpShape s = router_shape(i / 2);
        s.joined = (int)(i % 3 > 0), s.factor = i % 4 < 2 ? 0.0 : 0.3, s.times = (int)(i % 5 < 3);
        case_of(all_chosen(&s, i), "balance %d, z %g, times %d", s.joined, s.factor, s.times);
        drawn("logits", 0.0, 2.0);
        case_router_backward(&s);
    }
}

TEST(router_count) {
    for (size_t i = 0; i < ROUTER_CASES; i++) {
        OpShape s = router_shape(i);
        if (i % COUNT_OF(routers) == 0) s.n *= 13; // several blocks of tokens
        s.times = (int)(i % 5 < 3);
        case_of(i % 3 ? "" : ", no sums", "counted, times %d", s.times);
        drawn("logits", 0.0, 3.0);
        case_router_count(&s);
    }
}

TEST(route_sort) {
    for (size_t i = 0; i < 2 * ROUTER_CASES; i++) {
        OpShape s = router_shape(i / 2);
        if (i / 2 % COUNT_OF(routers) < 2) s.n *= 19;
        case_of("", "%s", i % 2 ? "the first and the last experts" : "drawn");
        uint16_t *route = (uint16_t *)case_memory(s.n * s.router.k * sizeof(uint16_t));
        for (size_t j = 0; j < s.n * s.router.k; j++) // the last expert first
            route[j] = (uint16_t)((2 * s.router.E - 1 - j % s.router.k) % s.router.E);
        if (i % 2) given("route", route);
        case_route_sort(&s);
    }
}

TEST(route_rows) {
    static const size_t shapes[][3] = {{1, 1, 1},   {1, 8, 33}, {2, 3, 16}, {7, 2, 100}, {5, 4, 17},
                                       {33, 8, 64}, {16, 1, 7}, {70, 3, 1}, {9, 10, 515}}; // n, k, width
    for (size_t i = 0; i < 3 * COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i / 3];
        OpShape s = {.n = shape[0], .C = shape[2], .router = {.k = shape[1]}, .joined = (int)i % 3};
        case_of("", "rows of tokens");
        varied.exactly = 1;
        case_route_gather(&s);
        case_of(i % 3 == 2 ? ", out is residual" : "", "residual %d", s.joined);
        case_route_combine(&s);
        s.n *= shape[1], s.joined = i % 3 > 0;
        case_of(i % 2 ? ", out is x" : "", "in the order of experts: %d", s.joined);
        case_route_weigh(&s);
        case_of(i % 2 ? ", dx is dout" : "", "backward, in the order of experts: %d", s.joined);
        case_route_weigh_backward(&s);
    }
}

// ---- products -------------------------------------------------------------------------------------------------------
enum { ROWS_DRAWN, ROWS_OF_ONE, ROWS_EVEN, ROWS_KINDS };

// Returns first[E + 1]: all rows are one expert's, or each has as many.
static int32_t *rows_of_experts(const OpShape *s, size_t kind) {
    const size_t E = s->router.E;
    int32_t *first = (int32_t *)case_memory((E + 1) * sizeof(int32_t));
    for (size_t e = 0; e <= E; e++) first[e] = (int32_t)(kind == ROWS_EVEN ? s->n * e / E : e > E / 2 ? s->n : 0);
    return first;
}

// i: of the variants of a shape {rows, E, C, OC}
static OpShape experts_shape(const size_t *shape, size_t i) {
    const OpShape s = {
        .n = shape[0], .C = shape[2], .OC = shape[3], .router = {.E = shape[1]}, .accumulate = (int)(i / 3 % 2)};
    return s;
}
static void experts_case_of(const char *variant, const OpShape *s, size_t i) {
    static const char *const kinds[] = {"drawn", "of one expert", "of all experts"};
    case_of(variant, "rows %s, accumulate %d", kinds[i % ROWS_KINDS], s->accumulate);
    if (i % ROWS_KINDS != ROWS_DRAWN) given("first", rows_of_experts(s, i % ROWS_KINDS));
}
static void experts_case(const OpShape *s, size_t i) { experts_case_of("", s, i); }

TEST(experts) {
    static const size_t shapes[][4] = {{1, 1, 1, 1},      {1, 5, 16, 9},    {8, 128, 24, 17},  {3, 2, 300, 40},
                                       {40, 3, 33, 65},   {64, 4, 64, 64},  {100, 7, 20, 130}, {130, 2, 129, 33},
                                       {257, 16, 56, 31}, {300, 5, 96, 70}, {33, 33, 40, 7},   {500, 3, 270, 24}};
    for (size_t i = 0; i < 6 * COUNT_OF(shapes); i++) {
        const OpShape s = experts_shape(shapes[i / 6], i);
        if (EMULATED && i % 2 && !all_cases()) continue;
        experts_case(&s, i);
        case_experts_forward(&s);
        experts_case(&s, i);
        case_experts_backward_input(&s);
        experts_case(&s, i);
        case_experts_backward_weight(&s);
    }
}

// Sets whether Hopper's kernels run, if there are any.
static void set_wgmma(int on) {
    if (on)
        setenv("STREAMBP_WGMMA", "1", 1);
    else
        unsetenv("STREAMBP_WGMMA");
}

// Runs the op, and those that it joins: the same bits.
static void activate_case(OpShape s, size_t i, int wgmma) {
    static const char *const kinds[] = {"swiglu", "gelu", "geglu", "clamped"};
    s.joined = (int)(i % 4 > 0), s.back = (int)(i % 3 > 0), s.bias = (int)(i % 2);
    experts_case_of("", &s, i);
    drawn("weight", 0.0, 1.0 / sqrt((double)s.C));
    set_wgmma(wgmma);
    case_experts_activate(&s);
    const Guarded *out = tensor_of("out"), *gate_up = tensor_of("gate_up"), *factor = tensor_of("factor");
    const Guarded *first = tensor_of("first"), *source = tensor_of("source"), *bias = tensor_of("bias");
    const size_t bytes = dtype_size(out->type), I = out->count / s.n, H = gate_up->count / s.n;
    void *one = case_memory(out->count * bytes), *both = case_memory(gate_up->count * bytes);
    memcpy(one, out->after + out->offset, out->count * bytes);
    memcpy(both, gate_up->after + gate_up->offset, gate_up->count * bytes);
    set_wgmma(wgmma && !EMULATED); // a device's other kernels may add in another order
    CALL((
        ops->experts_forward(gate_up->data, tensor_of("x")->data, tensor_of("weight")->data, first->data, s.n,
                             s.router.E, s.C, H, 0),
        bias ? ops->experts_bias_forward(gate_up->data, bias->data, NULL, first->data, source->data, s.n, s.router.E, H)
             : (void)0,
        ops->activation_forward(out->data, gate_up->data, s.activation, s.n, I),
        factor ? ops->route_weigh(out->data, out->data, factor->data, source->data, s.n, I) : (void)0));
    set_wgmma(0);
    if (memcmp(one, out->after + out->offset, out->count * bytes))
        test_fail("%s, bias %d: single ops give other bits", kinds[s.activation.kind], s.bias);
    if (s.back && memcmp(both, gate_up->after + gate_up->offset, gate_up->count * bytes))
        test_fail("%s, bias %d: single ops give other gates and ups", kinds[s.activation.kind], s.bias);
}

TEST(experts_activate) {
    static const size_t shapes[][4] = {{1, 1, 1, 2},    {8, 128, 24, 34}, {3, 2, 300, 40},
                                       {40, 3, 33, 66}, {100, 7, 20, 64}, {33, 33, 40, 14}};
    for (size_t i = 0; i < 4 * COUNT_OF(shapes); i++) {
        OpShape s = experts_shape(shapes[i / 4], i);
        s.activation = (Activation){(ActivationKind)(i % 4), 1.702, 4.0};
        activate_case(s, i, 0);
    }
}

// Hopper's kernels: tiles of 192 rows and 128 or 192 columns, the last of them cut; sums of one stage to more than the
// pipeline has; experts without rows, of one row, of a part of a tile and of several tiles.
TEST(experts_wgmma) {
    static const size_t shapes[][4] = {{9, 2, 64, 256},    {70, 1, 72, 208},  {300, 3, 136, 400}, {130, 2, 520, 80},
                                       {257, 4, 328, 144}, {450, 90, 80, 96}, {150, 3, 264, 400}};
    if (strcmp(ops->name, "cuda") || ops->stored != DTYPE_BF16) return;
    for (size_t i = 0; i < ROWS_KINDS * COUNT_OF(shapes); i++) {
        OpShape s = experts_shape(shapes[i / ROWS_KINDS], i);
        if (EMULATED && i % 2 && !all_cases()) continue;
        const size_t times = EMULATED ? 1 : 20; // a device leaves few rows and short sums to other kernels
        s.n *= times, s.C *= times / 4 + 1, s.OC *= times / 4 + 1, s.accumulate = 0;
        set_wgmma(1);
        experts_case(&s, i);
        case_experts_forward(&s);
        experts_case(&s, i);
        case_experts_backward_input(&s);
        set_wgmma(0);
        static const ActivationKind kinds[] = {ACTIVATION_SWIGLU, ACTIVATION_CLAMPED, ACTIVATION_GEGLU};
        s.activation = (Activation){kinds[i / 2 % 3], 1.702, 4.0};
        activate_case(s, i / 2 + i % ROWS_KINDS, 1);
    }
}

TEST(experts_biases_and_factors) {
    static const size_t shapes[][4] = {{1, 1, 1, 1},    {1, 5, 16, 0},   {8, 128, 24, 0},  {3, 2, 300, 0},
                                       {40, 3, 65, 0},  {64, 4, 64, 0},  {100, 7, 130, 0}, {130, 2, 33, 0},
                                       {257, 16, 7, 0}, {300, 5, 96, 0}, {33, 33, 40, 0},  {500, 3, 17, 0}};
    for (size_t i = 0; i < 6 * COUNT_OF(shapes); i++) {
        OpShape s = experts_shape(shapes[i / 6], i);
        s.joined = (int)(i % 2);
        experts_case(&s, i);
        case_experts_bias_forward(&s);
        experts_case_of(i % 5 == 4 ? ", no dbias" : "", &s, i);
        case_experts_bias_backward(&s);
        experts_case_of(s.joined ? ", out is weight" : "", &s, i);
        case_experts_scale_forward(&s);
        experts_case_of(i % 5 == 4 ? ", no dscale" : "", &s, i);
        case_experts_scale_backward(&s);
    }
}

TEST(experts_forward_quantised) {
    static const size_t shapes[][4] = {{1, 1, 64, 6},   {8, 128, 64, 10}, {3, 2, 33, 40},   {16, 4, 256, 33},
                                       {70, 3, 128, 9}, {2, 6, 384, 60},  {40, 16, 32, 24}, {5, 5, 7, 5}};
    for (size_t i = 0; i < 4 * COUNT_OF(shapes); i++) {
        OpShape s = experts_shape(shapes[i / 4], i);
        QuantFormat f = {i % 2 ? QUANT_NF4 : QUANT_FP4,
                         i % 3 != 0,
                         i % 4 ? 64 : 32,
                         i % 5 > 2 && ops->stored != DTYPE_BF16 ? DTYPE_FP32 : DTYPE_BF16,
                         {0}};
        if (i % 4 == 3) f = (QuantFormat){QUANT_MXFP4, 0, MXFP4_BLOCK, f.rounding, {0}};
        if (i % 4 == 2) f = random_fp8(shapes[i / 4][3], shapes[i / 4][2]);
        s.format = f;
        experts_case(&s, i);
        case_experts_forward_quantised(&s);
    }
}

// ---- the reference against central differences ----------------------------------------------------------------------
enum { FEW_TOKENS = 3 };
static const uint16_t few_routes[] = {2, 0, 5, 1, 3, 5};
static const int32_t few_times[] = {1, 3, 0};
static const int32_t few_first[] = {0, 1, 2, 3, 4, 4, 6}, few_sources[] = {1, 3, 0, 4, 2, 5},
                     few_places[] = {2, 0, 4, 1, 3, 5};

// The weights, then the sum of both losses' gradients: balance[E] p, and log(sum_j exp z_j)^2, few_times each
static void router_forward(double *out, double *const *x, const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    double p[6];
    reference_router_weights(out, x[0], k < E ? few_routes : NULL, FEW_TOKENS, shape);
    out += FEW_TOKENS * k;
    out[0] = out[1] = 0.0;
    for (size_t t = 0; t < FEW_TOKENS; t++) {
        const double lse = reference_scores(p, x[0] + t * E, E, ROUTER_SOFTMAX);
        for (size_t e = 0; e < E; e++) out[0] += few_times[t] * ((double)e - 1.5) * p[e];
        out[1] += few_times[t] * lse * lse;
    }
}
static void router_backward_of(double *const *d, const double *dout, double *const *x, const RouterShape *shape) {
    const size_t E = shape->E, k = shape->k;
    double balance[6];
    for (size_t e = 0; e < E; e++) balance[e] = ((double)e - 1.5) * dout[FEW_TOKENS * k];
    reference_router_backward(d[0], dout, x[0], k < E ? few_routes : NULL, balance, dout[FEW_TOKENS * k + 1], few_times,
                              FEW_TOKENS, shape);
}

#define ROUTER_PROBLEM(name, ...)                                                                                      \
    static const RouterShape name = {__VA_ARGS__};                                                                     \
    static void name##_forward(double *out, double *const *x) { router_forward(out, x, &name); }                       \
    static void name##_backward(double *const *d, const double *dout, double *const *x) {                              \
        router_backward_of(d, dout, x, &name);                                                                         \
    }
ROUTER_PROBLEM(softmax_normalised, ROUTER_SOFTMAX, 6, 2, 1, 2.5, 1, 1, 0)
ROUTER_PROBLEM(softmax_of_all, ROUTER_SOFTMAX, 6, 2, 0, 2.5, 1, 1, 0)
ROUTER_PROBLEM(sigmoid_normalised, ROUTER_SIGMOID, 6, 2, 1, 2.5, 1, 1, 0.25)
ROUTER_PROBLEM(sigmoid_alone, ROUTER_SIGMOID, 6, 2, 0, 2.5, 1, 1, 0)
ROUTER_PROBLEM(every_expert, ROUTER_SIGMOID, 4, 4, 1, 1.0, 1, 1, 0)

// x[3 tokens,3] of six experts [4,3] with biases x[4], weighed by x[2] times the factors x[5], their sum of [2 slots]
static void experts_problem_forward(double *out, double *const *x) {
    double rows[6 * 3], wide[6 * 4], weighed[6 * 4], weight[6];
    reference_experts_scale_forward(weight, x[2], x[5], few_first, few_sources, 6, 6);
    reference_route_gather(rows, x[0], few_sources, FEW_TOKENS, 2, 3);
    reference_experts_forward(wide, rows, x[1], few_first, 6, 6, 3, 4, 0);
    reference_route_weigh(weighed, wide, weight, few_sources, 6, 4);
    reference_experts_bias_forward(weighed, x[4], weight, few_first, few_sources, 6, 6, 4);
    reference_route_combine(out, weighed, few_places, x[3], FEW_TOKENS, 2, 4);
}
static void experts_problem_backward(double *const *d, const double *dout, double *const *x) {
    double rows[6 * 3], wide[6 * 4], dwide[6 * 4], drows[6 * 3], drows_wide[6 * 4], weight[6];
    reference_experts_scale_forward(weight, x[2], x[5], few_first, few_sources, 6, 6);
    reference_route_gather(rows, x[0], few_sources, FEW_TOKENS, 2, 3);
    reference_experts_forward(wide, rows, x[1], few_first, 6, 6, 3, 4, 0);
    reference_route_gather(dwide, dout, few_sources, FEW_TOKENS, 2, 4);
    memcpy(drows_wide, dwide, sizeof(dwide));
    reference_route_weigh_backward(d[2], dwide, wide, dwide, weight, few_sources, 6, 4);
    reference_experts_bias_backward(d[4], d[2], drows_wide, x[4], weight, few_first, few_sources, 6, 6, 4);
    reference_experts_scale_backward(d[5], d[2], x[2], x[5], few_first, few_sources, 6, 6);
    reference_experts_backward_weight(d[1], dwide, rows, few_first, 6, 6, 3, 4);
    reference_experts_backward_input(drows, dwide, x[1], few_first, 6, 6, 3, 4, 0);
    reference_route_combine(d[0], drows, few_places, NULL, FEW_TOKENS, 2, 3);
    memcpy(d[3], dout, FEW_TOKENS * 4 * sizeof(double));
}

TEST(experts_reference_gradients) {
    static const Problem all[] = {
        {"softmax of the chosen", {18}, 8, softmax_normalised_forward, softmax_normalised_backward},
        {"softmax of all", {18}, 8, softmax_of_all_forward, softmax_of_all_backward},
        {"sigmoids over their sum", {18}, 8, sigmoid_normalised_forward, sigmoid_normalised_backward},
        {"sigmoids", {18}, 8, sigmoid_alone_forward, sigmoid_alone_backward},
        {"every expert", {12}, 14, every_expert_forward, every_expert_backward},
        {"experts", {9, 72, 6, 12, 24, 6}, 12, experts_problem_forward, experts_problem_backward},
    };
    for (size_t p = 0; p < COUNT_OF(all); p++) expect_gradients(&all[p]);
}

#endif
