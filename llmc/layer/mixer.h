/*
The mixer: the part of a layer that joins its tokens, attention or linear attention. This file alone knows which of the
two a layer has. The loops of an order call, for layer l and chunk c,

    mixer_keys         norm 1 -> K, V (a state passes on in mixer_forward)
    mixer_forward      norm 1 -> y
    mixer_begin        before the layer's backward: K, V of all tokens again, or states at intervals; gradients = 0
    mixer_restore      before the backward of the i-th chunk: the states that it needs
    recompute          the activations of c up to the MLP
    mixer_backward     dx of y -> dx of x_l
*/
#ifndef LLMC_MIXER_H
#define LLMC_MIXER_H
#include "attention.h"
#include "linear_attention.h"

// Pushes what a layer's chunks share, K, V or states, in a pass that walks layer by layer. Returns the arena's mark
// before it. Method full has K, V of all layers already.
static size_t push_layer_memory(StreamBP *s, size_t l) {
    const size_t mark = arena_mark(s->arena);
    if (is_linear(s, l)) {
        push_states(s, 1, 1, 0);
        if (s->now.pass == PASS_BACKWARD) push_state_gradients(s);
        if (s->now.pass == PASS_FORWARD_ONLY) push_range_states(s, 1);
    } else {
        const int shares = shares_keys(s, l);
        if (!keeps_activations(s) && !shares) push_key_value(s, 1, s->now.N, layer_chunk(s), 0);
        if (s->now.pass == PASS_BACKWARD && !shares) push_key_value_gradients(s);
        if (shares) select_lent_keys(s, l);
    }
    return mark;
}

// Pushes what all layers save from forward to backward: attention's outputs, states of a rank's ranges, routes.
static void push_saved_mixers(StreamBP *s) {
    routes_push(s, s->now.rows);
    saved_attention_push(s);
    push_range_states(s, layers_of_kind(&s->model->config, LAYER_LINEAR));
}

// Method full: pushes K, V of all layers, and K before QK-norm.
static void push_kept_keys(StreamBP *s) {
    const Shapes d = shapes_of(s->model);
    push_key_value(s, d.L, s->now.N, layer_chunk(s), d.qk_norm != QK_NORM_NONE);
}

// Pushes chunk c's activations up to the MLP, or returns those that method full keeps.
static Activations chunk_activations(StreamBP *s, size_t l, Chunk c) {
    Activations a = {0};
    if (keeps_activations(s)) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    if (!is_linear(s, l)) saved_attention_chunk(s, l, c, &a.attention_out, &a.lse);
    push_activations(s, l, &a, mixer_parts(s, l), c.n);
    return a;
}

// Pushes all of chunk c's activations for forward, and runs norm 1.
static Activations forward_activations(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Activations a = chunk_activations(s, l, c);
    if (!keeps_activations(s)) push_mlp_activations(s, l, &a, c.n);
    norm1_forward(s, l, c, w, &a);
    return a;
}

static void mixer_keys(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    if (!is_linear(s, l) && !layer_shapes(s, l).borrows) kv_project(s, l, c, w, a);
}

static void mixer_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    if (is_linear(s, l)) {
        linear_attention_forward(s, l, c, w, a);
    } else {
        attention_forward(s, l, c, w, a);
        saved_attention_store_chunk(s, l, c, a->attention_out, a->lse);
    }
}

static void mixer_begin(StreamBP *s, size_t l, GroupWeights w) {
    saved_attention_prefetch(s, l, chunk_count(s));
    if (is_linear(s, l))
        states_begin(s, l, w);
    else
        keys_begin(s, l, w);
}

static void mixer_restore(StreamBP *s, size_t l, GroupWeights w, size_t i) {
    if (is_linear(s, l)) states_restore(s, l, w, 0, i);
}

// Recomputes chunk c's activations up to the MLP, after sliding the window, or resetting the state, back to c.
static Activations recompute(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const int keeps = keeps_activations(s);
    if (!is_linear(s, l))
        window_project(s, l, c, w);
    else if (!keeps)
        state_copy(s, state_before(s, c), 0);
    Activations a = chunk_activations(s, l, c);
    saved_attention_prefetch(s, l, c.index);
    if (keeps) return a;
    norm1_forward(s, l, c, w, &a);
    mixer_forward(s, l, c, w, &a);
    return a;
}

static void mixer_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                           Stored *dx) {
    if (is_linear(s, l)) {
        linear_attention_backward(s, l, c, w, dw, a, dx);
    } else {
        attention_backward(s, l, c, w, dw, a, dx); // dQ[c]; dK, dV of all chunks up to c
        if (layer_shapes(s, l).borrows)
            norm1_backward(s, l, c, w, dw, a, dx);
        else
            kv_backward(s, l, c, w, dw, a, dx); // dK[c], dV[c] are complete now
    }
}

#endif
