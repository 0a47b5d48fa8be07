/*
The MLP (section 3.2.2): a chunk of tokens depends on no other. This file alone knows whether a layer's is dense or one
of experts (experts.h).
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H
#include "experts.h"
#include "own_input.h"

// Runs a dense MLP up to what its backward needs: the activation, or the input of a norm after it.
static void dense_activate(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = layer_shapes(s, l);
    branch_in(s, c, w, mlp_branch, a->norm2, a->y);
    linear_forward(s, l, c, w, GATE_WEIGHT, a->gate_up, a->norm2, NULL);
    s->ops->activation_forward(a->activated, a->gate_up, d.activation, c.n, d.FF);
    if (d.beside)
        linear_forward(s, l, c, w, DOWN_WEIGHT, a->dense_sum, a->activated, NULL);
    else
        branch_inner(s, l, c, w, mlp_branch, a->mlp_branch, a->activated);
}

// dx[n,C] += the gradient of y through a dense MLP; dW +=. Gradients overwrite their activations.
static void dense_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                           Stored *dx) {
    const Shapes d = layer_shapes(s, l);
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm2 = adds_to_dx(s) ? dx : a->norm2;
    if (d.beside)
        linear_backward(s, l, c, w, dw, DOWN_WEIGHT, dactivated, a->dense_sum, a->activated, 0);
    else
        branch_out_backward(s, l, c, w, dw, mlp_branch, dactivated, dx, a->mlp_branch, a->activated);
    s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d.activation, c.n, d.FF);
    linear_backward(s, l, c, w, dw, GATE_WEIGHT, dnorm2, dgate_up, a->norm2, adds_to_dx(s));
    branch_in_backward(s, c, w, dw, mlp_branch, dx, dnorm2, a->y);
}

// ---- experts beside a dense MLP: each behind a norm of its own, both sums behind a third one ------------------------
static void both_sum(const StreamBP *s, Chunk c, GroupWeights w, const Activations *a) {
    norm_forward(s, a->mlp_branch, a->dense_sum, weight_of(s, w, DENSE_POST_NORM), NULL, NULL, c.n);
    norm_forward(s, a->mlp_branch, a->expert_sum, weight_of(s, w, EXPERTS_POST_NORM), NULL, a->mlp_branch, c.n);
}

// dx[n,C] of out -> gradients of both sums, over them; overwrites mlp_branch
static void both_sum_backward(const StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                              const Stored *dx) {
    const size_t C = s->model->config.hidden_size;
    norm_backward(s, a->mlp_branch, sum_of(s, dw, POST_NORM2), NULL, dx, a->mlp_branch, weight_of(s, w, POST_NORM2),
                  c.n, C, 0);
    norm_backward(s, a->dense_sum, sum_of(s, dw, DENSE_POST_NORM), NULL, a->mlp_branch, a->dense_sum,
                  weight_of(s, w, DENSE_POST_NORM), c.n, C, 0);
    norm_backward(s, a->expert_sum, sum_of(s, dw, EXPERTS_POST_NORM), NULL, a->mlp_branch, a->expert_sum,
                  weight_of(s, w, EXPERTS_POST_NORM), c.n, C, 0);
}

// ---- any MLP --------------------------------------------------------------------------------------------------------
// y[c] -> out[n,C] = y + the MLP
static void mlp_run(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, Stored *out) {
    const Shapes d = layer_shapes(s, l);
    if (layer_has_experts(&s->model->config, l) && !d.beside) {
        experts_forward(s, l, c, w, a, out);
        return;
    }
    dense_activate(s, l, c, w, a);
    if (d.beside) experts_forward(s, l, c, w, a, a->expert_sum), both_sum(s, c, w, a);
    branch_out(s, l, c, w, mlp_branch, out, a->mlp_branch, a->activated, a->y);
}

// y[c] -> x_{l+1}[c]
static void mlp_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = layer_shapes(s, l);
    Stored *out = layer_output(s, l + 1, c);
    mlp_run(s, l, c, w, a, d.P ? a->mlp_out : out);
    if (d.P) {
        own_input_activate(s, l, c, w, a);
        norm_forward(s, out, a->input_branch, weight_of(s, w, INPUT_NORM), NULL, a->mlp_out, c.n);
    }
    if (s->model->layer_scalar) s->ops->scale(out, s->model->dtype, (double)s->model->layer_scalar[l], c.n * d.C);
    input_save(s, l + 1, c);
}

// Recomputes the activations of backward, unless they were kept. r: rows of experts, or NULL
static void mlp_recompute(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, const Routed *r) {
    const Shapes d = layer_shapes(s, l);
    const int kept = keeps_activations(s);
    if (!kept && (!r || d.beside)) dense_activate(s, l, c, w, a);
    if (r) experts_activate(s, l, c, w, a, r, kept);
    if (kept) return;
    if (d.beside) experts_sum(s, l, c, w, a, r, a->expert_sum, NULL, 0), both_sum(s, c, w, a);
    if (!d.P) return;
    if (r && !d.beside)
        experts_sum(s, l, c, w, a, r, a->mlp_out, a->y, 0);
    else
        branch_out(s, l, c, w, mlp_branch, a->mlp_out, a->mlp_branch, a->activated, a->y);
    own_input_activate(s, l, c, w, a);
}

// dx of x_{l+1}[c] -> dx of y[c], in place; dW +=. Recomputes the MLP's activations unless they were kept. Gradients
// overwrite their activations.
static void mlp_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                         Stored *dx) {
    const Shapes d = layer_shapes(s, l);
    const size_t mark = arena_mark(s->arena);
    const int experts = layer_has_experts(&s->model->config, l);
    Routed r = {{NULL, NULL, 0}, NULL, NULL, NULL, NULL, NULL};
    if (!keeps_activations(s)) push_mlp_activations(s, l, a, c.n);
    if (experts) r = push_routed(s, l, c);
    if (s->model->layer_scalar) s->ops->scale(dx, s->model->dtype, (double)s->model->layer_scalar[l], c.n * d.C);
    mlp_recompute(s, l, c, w, a, experts ? &r : NULL);
    if (d.P) own_input_backward(s, l, c, w, dw, a, dx);
    if (d.beside) both_sum_backward(s, c, w, dw, a, dx);
    if (experts) experts_backward(s, l, c, w, dw, a, &r, d.beside ? a->expert_sum : dx, dx);
    if (!experts || d.beside) dense_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

#endif
