/*
The mixer: the part of a layer that joins its tokens. This file alone knows that there are two kinds, and that method full has what
others compute again. The loops of an order ask it:

    mixer_forward          norm 1 -> y
    mixer_begin            before a layer's backward: what joins its chunks again, once (K, V; states), its gradient = 0
    mixer_restore          before chunk i's backward: what it sees is as it was (a window's keys; the state before it)
    mixer_recompute        its activations, as far as the MLP
    mixer_backward         dx of y -> dx of x_l
*/
#ifndef LLMC_MIXER_H
#define LLMC_MIXER_H
#include "attention.h"
#include "linear_attention.h"

static int is_linear(const StreamBP *s, size_t l) { return layer_is_linear(&s->model->config, l); }

// Room for what a layer keeps between its chunks, in a pass that walks layer by layer; returns the arena's mark before.
// Method full has all layers' keys and values already.
static size_t push_layer_memory(StreamBP *s, size_t l) {
    const size_t mark = arena_mark(s->arena);
    if (is_linear(s, l)) {
        push_states(s, 1, 1, 0);
        if (s->pass == PASS_BACKWARD) push_state_gradients(s);
        if (s->pass == PASS_FORWARD_ONLY) push_range_states(s, 1);
    } else {
        if (!keeps_activations(s)) push_key_value(s, 1, s->N, layer_chunk(s), 0);
        if (s->pass == PASS_BACKWARD) push_key_value_gradients(s);
    }
    return mark;
}

// Room for chunk c's activations, as far as the MLP
static Activations chunk_activations(StreamBP *s, size_t l, Chunk c) {
    Activations a = {0};
    if (keeps_activations(s)) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    if (!is_linear(s, l)) saved_attention_chunk(s, l, c, &a.attention_out, &a.lse);
    push_activations(s, &a, mixer_parts(s, l), c.n);
    return a;
}

static void mixer_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    if (is_linear(s, l)) {
        linear_attention_forward(s, l, c, w, a);
    } else {
        kv_project(s, l, c, w, a);
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

static Activations recompute(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const int linear = is_linear(s, l), keeps = keeps_activations(s);
    if (linear && !keeps) state_copy(s, state_before(s, c), 0);
    if (!linear) window_project(s, l, c, w);
    Activations a = chunk_activations(s, l, c);
    saved_attention_prefetch(s, l, c.index);
    if (keeps) return a;
    norm1_forward(s, l, c, w, &a);
    if (linear)
        linear_attention_forward(s, l, c, w, &a);
    else
        attention_forward(s, l, c, w, &a);
    return a;
}

static void mixer_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a, Stored *dx) {
    if (is_linear(s, l)) {
        linear_attention_backward(s, l, c, w, dw, a, dx);
    } else {
        attention_backward(s, l, c, w, dw, a, dx); // dQ[c]; dK, dV of all chunks up to c
        kv_backward(s, l, c, w, dw, a, dx);        // dK[c], dV[c] are complete now
    }
}

#endif
