/*
A layer's own input (Gemma 4 E2B, E4B): a vector of width P for each token and layer, made of the embeddings x_0 and of
a table of the layer. A third branch after the MLP, without a norm before it, gates this vector:

    own = (norm(x_0 W_projection^T / sqrt(C)) + sqrt(P) table[token]) / sqrt(2)
    out = x + norm(W_out (gelu(W_gate x) own))

Forward and backward compute the vector chunk by chunk from x_0, which is kept (stream/inputs.h). Files hold
W_projection of all layers as one tensor, and the tables of all layers as another.
*/
#ifndef LLMC_OWN_INPUT_H
#define LLMC_OWN_INPUT_H
#include "experts.h"

static const Activation own_activation = {ACTIVATION_GEGLU, 0, 0};

static double own_table_scale(const StreamBP *s) {
    return rounded_to(s->model->dtype, sqrt((double)s->model->config.hidden_size_per_layer_input));
}

// Returns the norm of x_0 W_projection^T / sqrt(C): an RMSNorm of the undivided input, with eps times C.
static Norm own_norm(const StreamBP *s) {
    Norm norm = norm_of(s);
    norm.eps *= (double)s->model->config.hidden_size;
    return norm;
}

// Makes input_gate[n,2P], gate and own input side by side, from the MLP's output and x_0.
static void own_input_gate(const Visit *v, size_t i, const Activations *a) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), n = v->c.n, P = v->layer->shape.P;
    Stored *own = push_stored(s, SHARE_WORKSPACE, "own input", n * P);
    Stored *gate = push_stored(s, SHARE_WORKSPACE, "gate of the own input", n * P);
    const Stored *x = stored_row(s, s->inputs.first, v->c.row - s->inputs.begin, v->layer->shape.C);
    linear_forward(v, INPUT_PROJECTION, a->input_product, x, NULL);
    s->ops->embedding_forward(own, s->now.tokens + v->c.row, s->now.position + v->c.row, weight_of(v, INPUT_TABLE),
                              NULL, n, P, own_table_scale(s));
    s->ops->norm_forward(own, a->input_product, s->inputs.norm, NULL, own, n, P, own_norm(s));
    s->ops->scale(own, s->model->dtype, sqrt(0.5), n * P);
    linear_forward(v, INPUT_GATE, gate, a->x[i], NULL);
    s->ops->split_heads(a->input_gate, gate, own, n, 1, P, 1);
    arena_pop(s->arena, mark);
}

// Runs the branch, from the MLP's output.
static void own_input_forward(const Visit *v, size_t i, size_t j, const Activations *a, const Routed *r) {
    (void)r;
    if (!is_found(v, a, a->input_gate)) own_input_gate(v, i, a);
    if (!is_found(v, a, a->input_activated))
        v->s->ops->activation_forward(a->input_activated, a->input_gate, own_activation, v->c.n, v->layer->shape.P);
    part_product(v, i, j, a, a->input_activated);
}

// Adds down[n,P], the gradient of the own input, to dW of table, projection and norm, and to dx_0. Overwrites
// a->input_product.
static void own_input_trains(const Visit *v, const Activations *a, Stored *down) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), first = v->c.row - s->inputs.begin, n = v->c.n;
    const size_t rows = s->model->config.vocab_size_per_layer_input, C = v->layer->shape.C, P = v->layer->shape.P;
    Summed *dtable = sum_of(v, INPUT_TABLE), *dnorm = dtable ? s->inputs.dnorm : NULL;
    if (!s->inputs.dfirst) return;
    const size_t norm = s->ops->norm_backward_scratch(n, P);
    const size_t table = dtable ? s->ops->embedding_backward_scratch(n, rows, P) : 0;
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "scratch of the own input", max_size(norm, table));
    s->ops->scale(down, s->model->dtype, sqrt(0.5), n * P);
    if (dtable)
        s->ops->embedding_backward(dtable, dtype_of_sums(s->model->dtype), down, s->now.tokens + v->c.row, n, rows, P,
                                   own_table_scale(s), s->model->config.pad_token_id, scratch);
    s->ops->norm_backward(a->input_product, dnorm, NULL, down, a->input_product, s->inputs.norm, n, P, own_norm(s), 0,
                          scratch);
    linear_backward(v, INPUT_PROJECTION, stored_row(s, s->inputs.dfirst, first, C), a->input_product,
                    stored_row(s, s->inputs.first, first, C), 1);
    arena_pop(s->arena, mark);
}

// dx[n,C] of x_{i+1} -> dx of x_i, in place; dW +=. Overwrites the branch's activations.
static void own_input_backward(const Visit *v, size_t i, size_t j, Activations *a, const Routed *r, Stored *dx) {
    (void)r;
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), n = v->c.n, P = v->layer->shape.P;
    Stored *down = push_stored(s, SHARE_WORKSPACE, "gradient of the own input", n * P);
    Stored *dgate = push_stored(s, SHARE_WORKSPACE, "gradient of its gate", n * P);
    linear_backward(v, INPUT_OUT, a->input_activated, part_out_backward(v, i, j, a, dx), a->input_activated, 0);
    s->ops->activation_backward(a->input_gate, a->input_activated, a->input_gate, own_activation, n, P);
    s->ops->split_heads(a->input_gate, dgate, down, n, 1, P, 0);
    linear_backward(v, INPUT_GATE, dx, dgate, a->x[i], 1);
    own_input_trains(v, a, down);
    arena_pop(s->arena, mark);
}

#endif
