/*
The reference itself (reference.h): each backward function against central differences of its forward, in double, every
element of every input. With the scalar loss = sum(dout * out), a backward function must return d loss / d input.
Part of test_ops.c.
*/
#ifndef TEST_OPS_REFERENCE_H
#define TEST_OPS_REFERENCE_H
#include "reference.h"
#include "test/base/testing.h"

typedef struct {
    double *x, *y, *z, *out, *dout; // up to three inputs
    size_t outputs, n, C, OC;
    int32_t index[16], position[16];
    float frequency[8];
    Spans spans;
} Problem;

typedef void (*Forward)(Problem *problem);

static double *normals(size_t count) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = test_normal();
    return values;
}

static double loss_of(Problem *p, Forward forward) {
    double loss = 0.0;
    forward(p);
    for (size_t i = 0; i < p->outputs; i++) loss += p->dout[i] * p->out[i];
    return loss;
}

// gradient[count]: what the backward function says about input[count], which belongs to the problem.
static void check_derivative(Problem *p, Forward forward, const char *name, double *input, const double *gradient,
                             size_t count) {
    const double step = 1e-5;
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < count; i++) {
        double at = input[i], above, below;
        input[i] = at + step, above = loss_of(p, forward);
        input[i] = at - step, below = loss_of(p, forward);
        input[i] = at;
        double slope = (above - below) / (2.0 * step);
        error += (slope - gradient[i]) * (slope - gradient[i]);
        size += slope * slope;
    }
    if (!(size > 0.0 && error <= 1e-14 * size))
        test_fail("%s: relative error %.3g against central differences", name, sqrt(error / size));
}

static Problem problem_of(size_t outputs, size_t n, size_t C, size_t OC) {
    Problem p = {0};
    p.outputs = outputs, p.n = n, p.C = C, p.OC = OC;
    p.out = case_doubles(outputs), p.dout = normals(outputs);
    for (size_t i = 0; i < 16; i++)
        p.index[i] = (int32_t)test_random_below(4), p.position[i] = (int32_t)test_random_below(100);
    for (size_t i = 0; i < 8; i++) p.frequency[i] = (float)pow(100.0, -(double)i / 8.0);
    return p;
}

static void forward_embedding(Problem *p) {
    reference_embedding_forward(p->out, p->index, p->index + 1, p->x, p->y, p->n, p->C, 2.5);
}

TEST(reference_embedding) {
    test_case("n=7 C=3");
    Problem p = problem_of(7 * 3, 7, 3, 0);
    double *dx = case_doubles(4 * 3), *dy = case_doubles(4 * 3);
    p.x = normals(4 * 3), p.y = normals(4 * 3);
    reference_embedding_backward(dx, p.dout, p.index, 7, 3, 2.5);
    reference_embedding_backward(dy, p.dout, p.index + 1, 7, 3, 1.0);
    check_derivative(&p, forward_embedding, "wte", p.x, dx, 4 * 3);
    check_derivative(&p, forward_embedding, "wpe", p.y, dy, 4 * 3);
}

static void forward_norm(Problem *p) {
    reference_norm_forward(p->out, p->x, p->y, p->z, NULL, p->n, p->C, 1e-2, p->z ? 0.0 : 1.0);
}

TEST(reference_norms) {
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        test_case("layernorm=%d n=3 C=7", layernorm);
        Problem p = problem_of(3 * 7, 3, 7, 0);
        double *dx = case_doubles(3 * 7), *dw = case_doubles(7), *db = case_doubles(7);
        p.x = normals(3 * 7), p.y = normals(7), p.z = layernorm ? normals(7) : NULL;
        reference_norm_backward(dx, dw, layernorm ? db : NULL, p.dout, p.x, p.y, 3, 7, 1e-2, layernorm ? 0.0 : 1.0);
        check_derivative(&p, forward_norm, "x", p.x, dx, 3 * 7);
        check_derivative(&p, forward_norm, "w", p.y, dw, 7);
        if (layernorm) check_derivative(&p, forward_norm, "b", p.z, db, 7);
    }
}

static void forward_linear(Problem *p) { reference_linear_forward(p->out, p->x, p->y, p->z, NULL, p->n, p->C, p->OC); }

TEST(reference_linear) {
    test_case("n=3 C=5 OC=4");
    Problem p = problem_of(3 * 4, 3, 5, 4);
    double *dx = case_doubles(3 * 5), *dy = case_doubles(4 * 5), *dz = case_doubles(4);
    p.x = normals(3 * 5), p.y = normals(4 * 5), p.z = normals(4);
    reference_linear_backward(dx, dy, dz, p.dout, p.x, p.y, 3, 5, 4);
    check_derivative(&p, forward_linear, "x", p.x, dx, 3 * 5);
    check_derivative(&p, forward_linear, "weight", p.y, dy, 4 * 5);
    check_derivative(&p, forward_linear, "bias", p.z, dz, 4);
}

static void forward_rope(Problem *p) {
    memcpy(p->out, p->x, p->outputs * sizeof(double));
    reference_rope(p->out, p->position, p->frequency, p->n, 2, 8, 0);
}

TEST(reference_rope_turns) {
    test_case("n=3 heads=2 HD=8");
    Problem p = problem_of(3 * 2 * 8, 3, 0, 0);
    double *dx = case_copy(p.dout, 3 * 2 * 8);
    p.x = normals(3 * 2 * 8);
    reference_rope(dx, p.position, p.frequency, 3, 2, 8, 1);
    check_derivative(&p, forward_rope, "x", p.x, dx, 3 * 2 * 8);
}

enum { HEADS = 4, KEY_HEADS = 2, HEAD_DIM = 3 }; // of the attention problem: tokens 0-1 and 2-6 are documents

static void forward_attention(Problem *p) {
    double row[8], lse[7 * HEADS];
    reference_attention_forward(p->out, lse, p->x, p->y, p->z, p->spans, HEADS, KEY_HEADS, HEAD_DIM, 0.7, row);
}

static void reference_attention_with(size_t window) {
    static const Span spans[] = {{0, 1, 2, 0}, {2, 2, 7, 1}}; // the chunk begins inside the first document
    const size_t queries = 6 * HEADS * HEAD_DIM, keys = 7 * KEY_HEADS * HEAD_DIM;
    double row[8];
    test_case("tokens 1 to 6 of documents of 2 and 5, window %zu", window);
    Problem p = problem_of(queries, 6, 0, 0);
    double *dq = case_doubles(queries), *dk = case_doubles(keys), *dv = case_doubles(keys);
    p.spans.span = spans, p.spans.count = 2, p.spans.window = window;
    p.x = normals(queries), p.y = normals(keys), p.z = normals(keys);
    forward_attention(&p);
    reference_attention_backward(dq, dk, dv, p.dout, p.out, p.x, p.y, p.z, p.spans, HEADS, KEY_HEADS, HEAD_DIM, 0.7,
                                 row);
    check_derivative(&p, forward_attention, "q", p.x, dq, queries);
    check_derivative(&p, forward_attention, "k", p.y, dk, keys);
    check_derivative(&p, forward_attention, "v", p.z, dv, keys);
}

TEST(reference_attention) {
    reference_attention_with(0);
    reference_attention_with(3);
}

static void forward_swiglu(Problem *p) { reference_swiglu_forward(p->out, p->x, p->n, p->C); }
static void forward_geglu(Problem *p) { reference_geglu_forward(p->out, p->x, p->n, p->C); }
static void forward_gelu(Problem *p) { reference_gelu_forward(p->out, p->x, p->outputs); }

TEST(reference_activations) {
    test_case("swiglu n=3 FF=5");
    Problem p = problem_of(3 * 5, 3, 5, 0);
    double *dx = case_doubles(2 * 3 * 5);
    p.x = normals(2 * 3 * 5);
    reference_swiglu_backward(dx, p.dout, p.x, 3, 5);
    check_derivative(&p, forward_swiglu, "gate_up", p.x, dx, 2 * 3 * 5);

    test_case("geglu n=3 FF=5");
    p = problem_of(3 * 5, 3, 5, 0);
    p.x = normals(2 * 3 * 5), dx = case_doubles(2 * 3 * 5);
    reference_geglu_backward(dx, p.dout, p.x, 3, 5);
    check_derivative(&p, forward_geglu, "gate_up", p.x, dx, 2 * 3 * 5);

    test_case("gelu of 40");
    p = problem_of(40, 40, 1, 0);
    p.x = normals(40), dx = case_doubles(40);
    reference_gelu_backward(dx, p.dout, p.x, 40);
    check_derivative(&p, forward_gelu, "x", p.x, dx, 40);
    for (int i = 0; i < 40; i++) { // as ops.h writes it
        double x = p.x[i],
               tanh_form = 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
        reference_gelu_forward(p.out, &x, 1);
        if (fabs(p.out[0] - tanh_form) > 1e-15 * fmax(1.0, fabs(x))) test_fail("gelu(%g) is %.17g", x, p.out[0]);
    }
}

static void forward_logprob(Problem *p) { reference_logprob_forward(p->out, p->x, p->index, p->n, p->C, 0.7); }

TEST(reference_logprob) {
    test_case("n=6 V=9");
    Problem p = problem_of(6, 6, 9, 0);
    double *dx = case_doubles(6 * 9);
    p.x = normals(6 * 9);
    p.index[2] = -1;
    reference_logprob_backward(dx, p.x, p.index, p.dout, 6, 9, 0.7);
    check_derivative(&p, forward_logprob, "logits", p.x, dx, 6 * 9);
}

#endif
