/*
A residual branch, out = x + post(f(pre(x))). f is the mixer or the MLP, and ends in a linear layer. Families differ in
their norms: before f alone (most), before and after (Gemma 3, GLM-4), after alone (OLMo 2). Nothing else in a layer
knows which. Without the norm before, f reads x itself and adds its gradient to dx.
*/
#ifndef LLMC_BRANCH_H
#define LLMC_BRANCH_H
#include "activations.h"
#include "llmc/stream/modules.h"

typedef struct {
    LayerTensor pre, pre_bias, post, product; // product: the last linear layer of f
} Branch;

static const Branch attention_branch = {NORM1_WEIGHT, NORM1_BIAS, POST_NORM1, O_WEIGHT};
static const Branch linear_branch = {NORM1_WEIGHT, NORM1_BIAS, POST_NORM1, OUT_WEIGHT};
static const Branch mlp_branch = {NORM2_WEIGHT, NORM2_BIAS, POST_NORM2, DOWN_WEIGHT};

// Returns pre(x[n,C]), written to `out`; without that norm x.
static Stored *branch_in(const StreamBP *s, Chunk c, GroupWeights w, Branch b, Stored *out, Stored *x) {
    if (!shapes_of(s->model).pre_norms) return x;
    norm_forward(s, out, x, weight_of(s, w, b.pre), weight_of(s, w, b.pre_bias), NULL, c.n);
    return out;
}

// With a norm after: inner[n,C] = f's last product, which the norm's backward needs
static void branch_inner(const StreamBP *s, size_t l, Chunk c, GroupWeights w, Branch b, Stored *inner,
                         const Stored *f) {
    if (shapes_of(s->model).post_norms) linear_forward(s, l, c, w, b.product, inner, f, NULL);
}

// out[n,C] = x + the branch, after branch_inner
static void branch_out(const StreamBP *s, size_t l, Chunk c, GroupWeights w, Branch b, Stored *out, const Stored *inner,
                       const Stored *f, const Stored *x) {
    if (shapes_of(s->model).post_norms)
        norm_forward(s, out, inner, weight_of(s, w, b.post), NULL, x, c.n);
    else
        linear_forward(s, l, c, w, b.product, out, f, x);
}

// dx[n,C] of out -> df, the gradient of f's last input; dW of the product and of the norm after +=. Overwrites inner.
static void branch_out_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Branch b,
                                Stored *df, const Stored *dx, Stored *inner, const Stored *f) {
    const Shapes d = shapes_of(s->model);
    if (d.post_norms)
        norm_backward(s, inner, sum_of(s, dw, b.post), NULL, dx, inner, weight_of(s, w, b.post), c.n, d.C, 0);
    linear_backward(s, l, c, w, dw, b.product, df, d.post_norms ? inner : dx, f, 0);
}

// Without the norm before it, f's first products add their gradient to dx.
static int adds_to_dx(const StreamBP *s) { return !shapes_of(s->model).pre_norms; }

// dx[n,C] += the gradient dpre[n,C] of pre(x); without that norm dpre is dx.
static void branch_in_backward(const StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, Branch b, Stored *dx,
                               const Stored *dpre, const Stored *x) {
    if (adds_to_dx(s)) return;
    norm_backward(s, dx, sum_of(s, dw, b.pre), sum_of(s, dw, b.pre_bias), dpre, x, weight_of(s, w, b.pre), c.n,
                  s->model->config.hidden_size, 1);
}

// ---- norm 1, which queries, keys and values share -------------------------------------------------------------------
static void norm1_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, Activations *a) {
    a->norm1 = branch_in(s, c, w, attention_branch, a->norm1, layer_input(s, l, c.row));
}

// Pushes room for dnorm1; dx itself without the norm.
static Stored *push_norm1_gradient(const StreamBP *s, Chunk c, Stored *dx) {
    if (adds_to_dx(s)) return dx;
    return push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * s->model->config.hidden_size);
}

// dx of y -> dx of x_l
static void norm1_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                           Stored *dx) {
    branch_in_backward(s, c, w, dw, attention_branch, dx, a->dnorm1, layer_input(s, l, c.row));
}

// Computes norm 1 of chunk c alone, or in backward returns what was kept (method full).
static Activations norm1_activations(const StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const Shapes d = shapes_of(s->model);
    Activations a = {0};
    if (keeps_activations(s) && s->now.pass == PASS_BACKWARD) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    if (d.pre_norms) a.norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", c.n * d.C);
    norm1_forward(s, l, c, w, &a);
    return a;
}

#endif
