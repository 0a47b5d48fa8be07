/*
The MLP (section 3.2.2): a chunk of tokens depends on no other. This file alone knows whether a layer's is dense or one
of experts (experts.h).
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H
#include "experts.h"

// Runs the MLP up to what its backward needs: the activation, or the input of a norm after it.
static void mlp_activate(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = shapes_of(s->model);
    branch_in(s, c, w, mlp_branch, a->norm2, a->y);
    linear_forward(s, l, c, w, GATE_WEIGHT, a->gate_up, a->norm2, NULL);
    s->ops->activation_forward(a->activated, a->gate_up, d.activation, c.n, d.FF);
    branch_inner(s, l, c, w, mlp_branch, a->mlp_branch, a->activated);
}

// y[c] -> x_{l+1}[c]
static void mlp_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    if (layer_has_experts(&s->model->config, l)) {
        experts_forward(s, l, c, w, a);
    } else {
        mlp_activate(s, l, c, w, a);
        branch_out(s, l, c, w, mlp_branch, layer_output(s, l + 1, c), a->mlp_branch, a->activated, a->y);
    }
    input_save(s, l + 1, c);
}

static void dense_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                           Stored *dx) {
    const Shapes d = shapes_of(s->model);
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm2 = adds_to_dx(s) ? dx : a->norm2;
    if (!keeps_activations(s)) mlp_activate(s, l, c, w, a);
    branch_out_backward(s, l, c, w, dw, mlp_branch, dactivated, dx, a->mlp_branch, a->activated);
    s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d.activation, c.n, d.FF);
    linear_backward(s, l, c, w, dw, GATE_WEIGHT, dnorm2, dgate_up, a->norm2, adds_to_dx(s));
    branch_in_backward(s, c, w, dw, mlp_branch, dx, dnorm2, a->y);
}

// dx of x_{l+1}[c] -> dx of y[c], in place; dW +=. Recomputes the MLP's activations unless they were kept. Gradients
// overwrite their activations.
static void mlp_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                         Stored *dx) {
    const size_t mark = arena_mark(s->arena);
    if (!keeps_activations(s)) push_mlp_activations(s, l, a, c.n);
    if (layer_has_experts(&s->model->config, l))
        experts_backward(s, l, c, w, dw, a, dx);
    else
        dense_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

#endif
