/*
The reference itself (llmc/ops/ops_reference.h): each backward function against central differences of its forward, in
double, every element of every input. With the scalar loss = sum(dout * out), a backward function must return d loss /
d input. Part of test_ops.c.
*/
#ifndef TEST_OPS_REFERENCE_H
#define TEST_OPS_REFERENCE_H
#include "cases.h"

enum { MOST_INPUTS = 6, HEADS = 4, KEY_HEADS = 2, HEAD_DIM = 3 };

// out[outputs] of the inputs x, and d, their gradients, which begin at 0.
typedef struct {
    const char *name;
    size_t inputs[MOST_INPUTS], outputs;
    void (*forward)(double *out, double *const *x);
    void (*backward)(double *const *d, const double *dout, double *const *x);
} Problem;

static const int32_t rows_of_four[] = {2, 0, 3, 0, 1, 1, 2, 3}, places[] = {0, 77, 12},
                     targets_of_nine[] = {4, 0, -1, 8, 3, 3};
static const float turns[] = {1.0f, 0.6f, 0.3f, 0.05f};
static const Norm rms_norm = {1e-2, 1.0, NORM_RMS}, layer_norm = {1e-2, 0.0, NORM_LAYER};

static void embedding_forward(double *out, double *const *x) {
    reference_embedding_forward(out, rows_of_four, rows_of_four + 1, x[0], x[1], 7, 3, 2.5);
}
static void embedding_backward(double *const *d, const double *dout, double *const *x) {
    (void)x;
    reference_embedding_backward(d[0], DTYPE_FP64, dout, rows_of_four, 7, 4, 3, 2.5, NO_ROW, NULL);
    reference_embedding_backward(d[1], DTYPE_FP64, dout, rows_of_four + 1, 7, 4, 3, 1.0, NO_ROW, NULL);
}

static void rms_forward(double *out, double *const *x) {
    reference_norm_forward(out, x[0], x[1], NULL, NULL, 3, 7, rms_norm);
}
static void rms_backward(double *const *d, const double *dout, double *const *x) {
    reference_norm_backward(d[0], d[1], NULL, dout, x[0], x[1], 3, 7, rms_norm, 0, NULL);
}

// Without a weight
static void bare_forward(double *out, double *const *x) {
    reference_norm_forward(out, x[0], NULL, NULL, NULL, 3, 7, rms_norm);
}
static void bare_backward(double *const *d, const double *dout, double *const *x) {
    reference_norm_backward(d[0], NULL, NULL, dout, x[0], NULL, 3, 7, rms_norm, 0, NULL);
}

static void layer_forward(double *out, double *const *x) {
    reference_norm_forward(out, x[0], x[1], x[2], NULL, 3, 7, layer_norm);
}
static void layer_backward(double *const *d, const double *dout, double *const *x) {
    reference_norm_backward(d[0], d[1], d[2], dout, x[0], x[1], 3, 7, layer_norm, 0, NULL);
}

static void linear_forward(double *out, double *const *x) {
    reference_linear_forward(out, x[0], x[1], x[2], NULL, 3, 5, 4, 4);
}
static void linear_backward(double *const *d, const double *dout, double *const *x) {
    reference_linear_backward_input(d[0], dout, x[1], 3, 5, 4, 4, 0);
    reference_linear_backward_weight(d[1], d[2], dout, x[0], 3, 5, 4, 4);
}

static const Rotation turned = {1.25f, 1, 0.2, 3};

static void rope_forward(double *out, double *const *x) {
    memcpy(out, x[0], 3 * 2 * 8 * sizeof(double));
    reference_rope(out, places, turns, 3, 2, 8, 8, turned, 0);
}
static void rope_backward(double *const *d, const double *dout, double *const *x) {
    (void)x;
    memcpy(d[0], dout, 3 * 2 * 8 * sizeof(double));
    reference_rope(d[0], places, turns, 3, 2, 8, 8, turned, 1);
}

// Tokens 0-1 and 2-6 are documents; the chunk begins inside the first one.
static AttentionShape attention_of(size_t window) {
    static const Span span[] = {{0, 1, 2, 0}, {2, 2, 7, 1}};
    const AttentionShape shape = {{span, 2, window, 0.0}, HEADS, KEY_HEADS, HEAD_DIM, 0.7, all_keys, 0, 0, {0, 0}};
    return shape;
}
static void attention_forward(double *out, double *const *x, size_t window) {
    const AttentionShape shape = attention_of(window);
    double lse[6 * HEADS];
    reference_attention_forward(out, lse, x[0], x[1], x[2], &shape, NULL);
}
static void attention_backward(double *const *d, const double *dout, double *const *x, size_t window) {
    const AttentionShape shape = attention_of(window);
    double out[6 * HEADS * HEAD_DIM];
    attention_forward(out, x, window);
    reference_attention_backward(d[0], d[1], d[2], dout, out, x[0], x[1], x[2], NULL, &shape, NULL);
}

// Attention with the sinks x[3]
static void sinks_forward(double *out, double *const *x) {
    const AttentionShape shape = attention_of(0);
    double lse[6 * HEADS];
    reference_attention_forward(out, lse, x[0], x[1], x[2], &shape, NULL);
    reference_sink_forward(out, lse, x[3], 6, HEADS, HEAD_DIM);
}
static void sinks_backward(double *const *d, const double *dout, double *const *x) {
    const AttentionShape shape = attention_of(0);
    double out[6 * HEADS * HEAD_DIM], lse[6 * HEADS];
    reference_attention_forward(out, lse, x[0], x[1], x[2], &shape, NULL);
    reference_sink_forward(out, lse, x[3], 6, HEADS, HEAD_DIM);
    reference_sink_backward(d[3], dout, out, lse, x[3], 6, HEADS, HEAD_DIM, NULL);
    reference_attention_backward(d[0], d[1], d[2], dout, out, x[0], x[1], x[2], lse, &shape, NULL);
}

static void logprob_forward(double *out, double *const *x, double cap) {
    const Temperature temperature = {0.7, cap};
    reference_logprob(out, NULL, x[0], targets_of_nine, NULL, 6, 9, 9, temperature);
}
static void logprob_backward(double *const *d, const double *dout, double *const *x, double cap) {
    const Temperature temperature = {0.7, cap};
    double logp[6];
    memcpy(d[0], x[0], 6 * 9 * sizeof(double));
    reference_logprob(logp, NULL, d[0], targets_of_nine, dout, 6, 9, 9, temperature);
}

static const int32_t teacher_ids[6 * 3] = {0, 4, 8, 1, 2, 3, 0, 1, 7, 2, 6, 8, 0, 3, 5, 3, 4, 5};
static void distill_problem(double *logp, double *divergence, double *logits, const double *weight, double cap) {
    const Distillation how = {{0.7, cap}, 1.6, 0.4};
    double top_logp[6 * 3], tail[6];
    for (size_t i = 0; i < 6 * 3; i++) top_logp[i] = log(0.1 + 0.02 * (double)(i % 7)), tail[i / 3] = 0.0;
    for (size_t t = 0; t < 6; t++) {
        tail[t] = 1.0;
        for (size_t j = 0; j < 3; j++) tail[t] -= exp(top_logp[t * 3 + j]);
    }
    reference_distill(logp, divergence, logits, targets_of_nine, teacher_ids, top_logp, tail, weight, 6, 9, 3, 9, how,
                      NULL);
}
static void distill_forward(double *out, double *const *x, double cap) {
    double divergence[6];
    distill_problem(out, divergence, x[0], NULL, cap);
    for (size_t t = 0; t < 6; t++) out[t] = 0.6 * out[t] - 0.4 * 1.6 * 1.6 * divergence[t];
}
static void distill_backward(double *const *d, const double *dout, double *const *x, double cap) {
    double logp[6], divergence[6];
    memcpy(d[0], x[0], 6 * 9 * sizeof(double));
    distill_problem(logp, divergence, d[0], dout, cap);
}

#define OF_KIND(op, kind, ...)                                                                                         \
    static void op##_##kind##_forward(double *out, double *const *x) { op##_forward(out, x, __VA_ARGS__); }            \
    static void op##_##kind##_backward(double *const *d, const double *dout, double *const *x) {                       \
        op##_backward(d, dout, x, __VA_ARGS__);                                                                        \
    }
static void activation_forward(double *out, double *const *x, ActivationKind kind) {
    const Activation activation = {kind, 1.702, 0.8};
    reference_activation_forward(out, x[0], activation, 3, 5);
}
static void activation_backward(double *const *d, const double *dout, double *const *x, ActivationKind kind) {
    const Activation activation = {kind, 1.702, 0.8};
    reference_activation_backward(d[0], dout, x[0], activation, 3, 5);
}
OF_KIND(attention, whole, 0)
OF_KIND(attention, windowed, 3)
OF_KIND(activation, swiglu, ACTIVATION_SWIGLU)
OF_KIND(activation, geglu, ACTIVATION_GEGLU)
OF_KIND(activation, gelu, ACTIVATION_GELU)
OF_KIND(activation, clamped, ACTIVATION_CLAMPED)
OF_KIND(activation, relu2, ACTIVATION_RELU2)
OF_KIND(logprob, plain, 0.0)
OF_KIND(logprob, capped, 1.5)
OF_KIND(distill, plain, 0.0)
OF_KIND(distill, capped, 1.5)

static const Problem problems[] = {
    {"embedding", {12, 12}, 21, embedding_forward, embedding_backward},
    {"rmsnorm", {21, 7}, 21, rms_forward, rms_backward},
    {"rmsnorm without a weight", {21}, 21, bare_forward, bare_backward},
    {"layernorm", {21, 7, 7}, 21, layer_forward, layer_backward},
    {"linear", {15, 20, 4}, 12, linear_forward, linear_backward},
    {"rope", {48}, 48, rope_forward, rope_backward},
    {"attention", {72, 42, 42}, 72, attention_whole_forward, attention_whole_backward},
    {"attention in a window", {72, 42, 42}, 72, attention_windowed_forward, attention_windowed_backward},
    {"swiglu", {30}, 15, activation_swiglu_forward, activation_swiglu_backward},
    {"geglu", {30}, 15, activation_geglu_forward, activation_geglu_backward},
    {"gelu", {15}, 15, activation_gelu_forward, activation_gelu_backward},
    {"clamped", {30}, 15, activation_clamped_forward, activation_clamped_backward},
    {"squared ReLU", {15}, 15, activation_relu2_forward, activation_relu2_backward},
    {"sinks", {72, 42, 42, 4}, 72, sinks_forward, sinks_backward},
    {"logprob", {54}, 6, logprob_plain_forward, logprob_plain_backward},
    {"logprob, capped", {54}, 6, logprob_capped_forward, logprob_capped_backward},
    {"distill", {54}, 6, distill_plain_forward, distill_plain_backward},
    {"distill, capped", {54}, 6, distill_capped_forward, distill_capped_backward},
};

static double *normals(size_t count) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = test_normal();
    return values;
}

// Returns the slope of the loss along input[i].
static double slope_of(const Problem *p, double *const *x, const double *dout, double *input) {
    const double step = 1e-5, at = *input;
    double *above = case_doubles(p->outputs), *below = case_doubles(p->outputs), slope = 0.0;
    *input = at + step;
    p->forward(above, x);
    *input = at - step;
    p->forward(below, x);
    *input = at;
    for (size_t i = 0; i < p->outputs; i++) slope += dout[i] * (above[i] - below[i]) / (2.0 * step);
    return slope;
}

// Unread input elements have no slope, and no gradient.
static void expect_gradients(const Problem *p) {
    double *x[MOST_INPUTS], *d[MOST_INPUTS];
    case_of("", "%s", p->name);
    const double *dout = normals(p->outputs);
    for (size_t k = 0; k < MOST_INPUTS; k++) x[k] = normals(p->inputs[k]), d[k] = case_doubles(p->inputs[k]);
    p->backward(d, dout, x);
    for (size_t k = 0; k < MOST_INPUTS && p->inputs[k]; k++) {
        double error = 0.0, size = 0.0;
        for (size_t i = 0; i < p->inputs[k]; i++) {
            const double slope = slope_of(p, x, dout, &x[k][i]);
            error += pow(slope - d[k][i], 2.0), size += slope * slope;
        }
        if (!(size > 0.0 && error <= 1e-14 * size))
            test_fail("input %zu: relative error %.3g against central differences", k, sqrt(error / size));
    }
}

TEST(reference_gradients) {
    for (size_t p = 0; p < COUNT_OF(problems); p++) expect_gradients(&problems[p]);
}

TEST(reference_gelu_is_of_tanh) { // as in ops.h
    for (double x = -6.0; x < 6.0; x += 0.3) {
        const double z = sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x),
                     tanh_form = 0.5 * x * (1.0 + tanh(z));
        if (fabs(gelu_of(x) - tanh_form) > 1e-15 * fmax(1.0, fabs(x))) test_fail("gelu(%g) is %.17g", x, gelu_of(x));
    }
}

#endif
