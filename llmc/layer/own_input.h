/*
A layer's own input (Gemma 4 E2B, E4B): after the MLP a third branch gates a vector that belongs to the token and the
layer, of width P, made of the embeddings x_0 and of a table of the layer:

    own = (norm(x_0 W_projection^T / sqrt(C)) + sqrt(P) table[token]) / sqrt(2)
    out = x + norm(W_out (gelu(W_gate x) own))

It is computed again where it is needed, chunk by chunk, from x_0 (stream/inputs.h). Files hold W_projection and the
tables of all layers as one tensor each.
*/
#ifndef LLMC_OWN_INPUT_H
#define LLMC_OWN_INPUT_H
#include "branch.h"

static const Activation own_activation = {ACTIVATION_GEGLU, 0, 0};

static double own_table_scale(const StreamBP *s) {
    return rounded_to(s->model->dtype, sqrt((double)s->model->config.hidden_size_per_layer_input));
}

// Divides its input by sqrt(C): an RMSNorm gives the same with eps times C.
static Norm own_norm(const StreamBP *s) {
    Norm norm = norm_of(s);
    norm.eps *= (double)s->model->config.hidden_size;
    return norm;
}

// Runs the branch from a->mlp_out up to its last norm.
static void own_input_activate(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Stored *own = push_stored(s, SHARE_WORKSPACE, "own input", c.n * d.P);
    Stored *gate = push_stored(s, SHARE_WORKSPACE, "gate of the own input", c.n * d.P);
    const Stored *x = stored_row(s, s->inputs.first, c.row - s->inputs.begin, d.C);
    linear_forward(s, l, c, w, INPUT_PROJECTION, a->input_product, x, NULL);
    s->ops->embedding_forward(own, s->now.tokens + c.row, s->now.position + c.row, weight_of(s, w, INPUT_TABLE), NULL,
                              c.n, d.P, own_table_scale(s));
    s->ops->norm_forward(own, a->input_product, s->inputs.norm, NULL, own, c.n, d.P, own_norm(s));
    s->ops->scale(own, s->model->dtype, sqrt(0.5), c.n * d.P);
    linear_forward(s, l, c, w, INPUT_GATE, gate, a->mlp_out, NULL);
    s->ops->split_heads(a->input_gate, gate, own, c.n, 1, d.P, 1);
    s->ops->activation_forward(a->input_activated, a->input_gate, own_activation, c.n, d.P);
    linear_forward(s, l, c, w, INPUT_OUT, a->input_branch, a->input_activated, NULL);
    arena_pop(s->arena, mark);
}

// down[n,P], gradient of the own input -> dW of table, projection and norm, dx_0 +=. Overwrites a->input_product.
static void own_input_trains(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                             Stored *down) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), first = c.row - s->inputs.begin;
    const size_t rows = s->model->config.vocab_size_per_layer_input;
    Summed *dtable = sum_of(s, dw, INPUT_TABLE), *dnorm = dtable ? s->inputs.dnorm : NULL;
    if (!s->inputs.dfirst) return;
    const size_t norm = s->ops->norm_backward_scratch(c.n, d.P);
    const size_t table = dtable ? s->ops->embedding_backward_scratch(c.n, rows, d.P) : 0;
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "scratch of the own input", max_size(norm, table));
    s->ops->scale(down, s->model->dtype, sqrt(0.5), c.n * d.P);
    if (dtable)
        s->ops->embedding_backward(dtable, dtype_of_sums(s->model->dtype), down, s->now.tokens + c.row, c.n, rows, d.P,
                                   own_table_scale(s), s->model->config.pad_token_id, scratch);
    s->ops->norm_backward(a->input_product, dnorm, NULL, down, a->input_product, s->inputs.norm, c.n, d.P, own_norm(s),
                          0, scratch);
    linear_backward(s, l, c, w, dw, INPUT_PROJECTION, stored_row(s, s->inputs.dfirst, first, d.C), a->input_product,
                    stored_row(s, s->inputs.first, first, d.C), 1);
    arena_pop(s->arena, mark);
}

// dx[n,C] of the branch's output -> dx of a->mlp_out, in place; dW +=. Overwrites the branch's activations.
static void own_input_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                               Stored *dx) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Stored *down = push_stored(s, SHARE_WORKSPACE, "gradient of the own input", c.n * d.P);
    Stored *dgate = push_stored(s, SHARE_WORKSPACE, "gradient of its gate", c.n * d.P);
    norm_backward(s, a->input_branch, sum_of(s, dw, INPUT_NORM), NULL, dx, a->input_branch, weight_of(s, w, INPUT_NORM),
                  c.n, d.C, 0);
    linear_backward(s, l, c, w, dw, INPUT_OUT, a->input_activated, a->input_branch, a->input_activated, 0);
    s->ops->activation_backward(a->input_gate, a->input_activated, a->input_gate, own_activation, c.n, d.P);
    s->ops->split_heads(a->input_gate, dgate, down, c.n, 1, d.P, 0);
    linear_backward(s, l, c, w, dw, INPUT_GATE, dx, dgate, a->mlp_out, 1);
    own_input_trains(s, l, c, w, dw, a, down);
    arena_pop(s->arena, mark);
}

#endif
