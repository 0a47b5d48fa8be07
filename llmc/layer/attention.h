/*
Attention (section 3.2.2 of the paper). Keys and values join the chunks of a layer. Chunk c's queries see the keys of
chunks <= c, so dK[c], dV[c] are complete once chunk c's own queries have been through backward. A layer with a window
stores the keys of the window alone, which slides with the chunks (stream/attention_memory.h).
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H
#include "branch.h"

// norm 1 -> K[c], V[c]
static void kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    window_slide_forward(s, l, c); // a layer with a window makes room
    Stored *k = key_value_at(s, s->kv.k, l, c.token), *v = key_value_at(s, s->kv.v, l, c.token);
    Stored *k_linear = s->kv.k_linear ? key_value_at(s, s->kv.k_linear, l, c.token) : k;
    const Shapes d = layer_shapes(s, l);
    linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    if (!d.values_are_keys) linear_forward(s, l, c, w, V_WEIGHT, v, a->norm1, NULL);
    if (d.value_norm)
        s->ops->norm_forward(v, d.values_are_keys ? k_linear : v, NULL, NULL, NULL, c.n * d.NKV, d.HD, norm_of(s));
    rotary_forward(s, l, c, w, K_NORM, k, k_linear);
}

// norm 1 -> Q[c], and the gate of attention's output if the family has one
static void queries_project(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = layer_shapes(s, l);
    Stored *q_linear = d.qk_norm ? a->q_linear : a->q;
    if (d.gated_attention) { // the product interleaves both, head by head
        const size_t mark = arena_mark(s->arena);
        Stored *both = push_stored(s, SHARE_WORKSPACE, "queries and gates", 2 * c.n * d.Q);
        linear_forward(s, l, c, w, Q_WEIGHT, both, a->norm1, NULL);
        s->ops->split_heads(both, q_linear, a->gate, c.n, d.NH, d.HD, 0);
        arena_pop(s->arena, mark);
    } else {
        linear_forward(s, l, c, w, Q_WEIGHT, q_linear, a->norm1, NULL);
    }
    rotary_forward(s, l, c, w, Q_NORM, a->q, q_linear);
}

// y = x_l + the branch, from attention_out and its gate
static void attention_output(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Stored *out = a->gate ? a->gated : a->attention_out;
    if (a->gate) s->ops->gate_forward(a->gated, a->attention_out, a->gate, c.n * layer_shapes(s, l).Q);
    branch_inner(s, l, c, w, attention_branch, a->attention_branch, out);
    branch_out(s, l, c, w, attention_branch, a->y, a->attention_branch, out, layer_input(s, l, c.row));
}

// Gives each head's sink its share of attention's output and log-sum-exp, [n] rows.
static void sinks_forward(const StreamBP *s, size_t l, GroupWeights w, Stored *attention_out, Summed *lse, size_t n) {
    const Shapes d = layer_shapes(s, l);
    if (d.sinks) s->ops->sink_forward(attention_out, lse, weight_of(s, w, SINKS), n, d.NH, d.HD);
}

// norm 1, K[:t1], V[:t1] -> y. Skips attention itself where --keep attention saved its output.
static void attention_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Shapes d = layer_shapes(s, l);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    queries_project(s, l, c, w, a);
    if (!attention_saved(s)) {
        const AttentionShape shape = attention_shape(s, l, layer_spans(s, l, c));
        s->ops->attention_forward(a->attention_out, a->lse, a->q, layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l),
                                  &shape, scratch);
        sinks_forward(s, l, w, a->attention_out, a->lse, c.n);
    }
    attention_output(s, l, c, w, a);
    arena_pop(s->arena, mark);
}

// dattention_out[n,NH*HD] = gradient of attention_out; that of the gate overwrites the gate; dsinks +=
static void output_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            const Stored *dx, Stored *dattention_out) {
    branch_out_backward(s, l, c, w, dw, attention_branch, dattention_out, dx, a->attention_branch,
                        a->gate ? a->gated : a->attention_out);
    if (a->gate)
        s->ops->gate_backward(dattention_out, a->gate, dattention_out, a->attention_out, a->gate,
                              c.n * layer_shapes(s, l).Q);
    Summed *dsinks = sum_of(s, dw, SINKS);
    if (!dsinks) return;
    const Shapes d = layer_shapes(s, l);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "scratch of sinks", s->ops->sink_backward_scratch(c.n, d.NH));
    s->ops->sink_backward(dsinks, dattention_out, a->attention_out, a->lse, weight_of(s, w, SINKS), c.n, d.NH, d.HD,
                          scratch);
    arena_pop(s->arena, mark);
}

// dnorm1 = the part through queries and their gates (+= where norm 1 is absent). Uses up dq.
static void queries_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                             Stored *dq) {
    const Shapes d = layer_shapes(s, l);
    const size_t mark = arena_mark(s->arena);
    Stored *dout = dq;
    rotary_backward(s, l, c, w, dw, Q_NORM, dq, a->q_linear);
    if (a->gate) {
        dout = push_stored(s, SHARE_WORKSPACE, "gradient of queries and gates", 2 * c.n * d.Q);
        s->ops->split_heads(dout, dq, a->gate, c.n, d.NH, d.HD, 1);
    }
    linear_backward(s, l, c, w, dw, Q_WEIGHT, a->dnorm1, dout, a->norm1, adds_to_dx(s));
    arena_pop(s->arena, mark);
}

// dx of y -> dnorm1, the queries' part; dK[:t1], dV[:t1] +=
static void attention_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                               Stored *dx) {
    const Shapes d = layer_shapes(s, l);
    a->dnorm1 = push_norm1_gradient(s, c, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of attention output", c.n * d.Q);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    output_backward(s, l, c, w, dw, a, dx, dattention_out);
    const AttentionShape shape = attention_shape(s, l, layer_spans(s, l, c));
    s->ops->attention_backward(dq, s->kv.dk, s->kv.dv, dattention_out, a->attention_out, a->q,
                               layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l), a->lse, &shape, scratch);
    queries_backward(s, l, c, w, dw, a, dq);
    arena_pop(s->arena, mark);
}

// Pushes room for values before their norm, or for their gradient; NULL: values have no norm
static Stored *push_value_gradient(const StreamBP *s, size_t l, Chunk c) {
    const Shapes d = layer_shapes(s, l);
    return d.value_norm ? push_stored(s, SHARE_WORKSPACE, "values before their norm", c.n * d.KV) : NULL;
}

// dV[c] -> dnorm1 += its part. dkv[n,KV], v_linear[n,KV] (NULL without a norm): room
static void values_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            Stored *dkv, Stored *v_linear) {
    const Shapes d = layer_shapes(s, l);
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dv, l, c.token), c.n * d.KV);
    if (v_linear) {
        linear_forward(s, l, c, w, V_WEIGHT, v_linear, a->norm1, NULL);
        norm_backward(s, dkv, NULL, NULL, dkv, v_linear, NULL, c.n * d.NKV, d.HD, 0);
    }
    linear_backward(s, l, c, w, dw, V_WEIGHT, a->dnorm1, dkv, a->norm1, 1);
}

// dK[c], dV[c] -> dnorm1 += their part (= where the queries' part is not in it); then dx of x_l
static void kv_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                        Stored *dx) {
    const Shapes d = layer_shapes(s, l);
    const int accumulate = a->dnorm1 || adds_to_dx(s);
    if (!a->dnorm1) a->dnorm1 = push_norm1_gradient(s, c, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dkv = push_stored(s, SHARE_WORKSPACE, "gradient of keys or values", c.n * d.KV);
    Stored *dvalues = push_value_gradient(s, l, c);
    Stored *k_linear = NULL; // keys before QK-norm: projected again, unless method full kept them
    if (d.qk_norm && s->kv.k_linear) {
        k_linear = key_value_at(s, s->kv.k_linear, l, c.token);
    } else if (d.qk_norm) {
        k_linear = push_stored(s, SHARE_WORKSPACE, "keys before QK-norm", c.n * d.KV);
        linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    }
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dk, l, c.token), c.n * d.KV);
    rotary_backward(s, l, c, w, dw, K_NORM, dkv, k_linear);
    if (d.values_are_keys) { // one product, with the gradient of both
        s->ops->round_sums(dvalues, key_gradient_at(s, s->kv.dv, l, c.token), c.n * d.KV);
        norm_backward(s, dkv, NULL, NULL, dvalues, k_linear, NULL, c.n * d.NKV, d.HD, 1);
    }
    linear_backward(s, l, c, w, dw, K_WEIGHT, a->dnorm1, dkv, a->norm1, accumulate);
    if (!d.values_are_keys) values_backward(s, l, c, w, dw, a, dkv, dvalues);
    norm1_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

// x_l[c] -> K[c], V[c]; computes nothing else of the layer.
static void chunk_kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Activations a = norm1_activations(s, l, c, w);
    kv_project(s, l, c, w, &a);
    drop(s, &a);
}

// Projects K, V of all tokens again, once per pass; dK = dV = 0. A layer with a window gets its keys in window_project.
static void keys_begin(StreamBP *s, size_t l, GroupWeights w) {
    s->kv.first = s->now.N;
    if (layer_slides(s, l) || shares_keys(s, l)) return; // lent keys are there since forward
    zero_key_value_gradients(s, l, s->kv.rows[layer_window(&s->model->config, l) != 0]);
    for (size_t i = 0; i < chunk_count(s) && !keeps_activations(s); i++)
        chunk_kv_project(s, l, visit(s, chunk_at(s, i)), w);
}

// Slides a layer's window back to chunk c and projects the keys that enter it again, in chunks.
static void window_project(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const Range missing = window_slide_back(s, l, c);
    Chunk part = c;
    for (size_t done = 0; done < missing.count; done += part.n) {
        part.row = part.token = missing.begin + done;
        part.n = min_size(effective_chunk(s, s->setup->chunk), missing.count - done);
        chunk_kv_project(s, l, part, w);
    }
}

#endif
