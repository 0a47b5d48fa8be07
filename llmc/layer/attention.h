/*
Attention (section 3.2.2 of the paper). Keys and values join the chunks of a layer. Chunk c's queries see the keys of
chunks <= c, so dK[c], dV[c] are complete once chunk c's own queries have been through backward. A layer with a window
stores only the window's keys and values; the window slides with the chunks (stream/attention_memory.h).
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H
#include "latent_attention.h"

// Keys and values of chunk c. Products go to k_linear and v_linear, which are k and v themselves unless kept.
typedef struct {
    Stored *k, *v, *k_linear, *v_linear;
} ChunkKeys;

static ChunkKeys chunk_keys(const Visit *v) {
    const KeyValue *kv = &v->s->kv;
    ChunkKeys c;
    c.k = key_value_at(v->s, KEYS, v->l, v->c.token), c.v = key_value_at(v->s, VALUES, v->l, v->c.token);
    c.k_linear = kv->k_linear ? key_value_at(v->s, KEYS_LINEAR, v->l, v->c.token) : c.k;
    c.v_linear = kv->v_linear                      ? key_value_at(v->s, VALUES_LINEAR, v->l, v->c.token)
                 : v->layer->shape.values_are_keys ? c.k_linear
                                                   : c.v;
    return c;
}

// Makes K[c], V[c] from their products, by the norms and RoPE. Skips what is found.
static void keys_finish(const Visit *v, ChunkKeys c) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const int again = keys_found(v), has_keys = again && layer_keeps_key(v->layer, KEYS);
    if (is_latent(v)) {
        if (!has_keys)
            s->ops->norm_forward(c.k, c.k_linear, weight_of(v, K_NORM), NULL, NULL, v->c.n, d->KV, latent_norm);
        if (!(again && layer_keeps_key(v->layer, VALUES))) shared_key_rotate(v, c.v, 0);
        return;
    }
    if (d->value_norm && !(again && layer_keeps_key(v->layer, VALUES)))
        s->ops->norm_forward(c.v, c.v_linear, NULL, NULL, NULL, v->c.n * d->NKV, d->HD, norm_of(s));
    if (!has_keys) rotary_forward(v, K_NORM, c.k, c.k_linear);
}

// Projects K[c], V[c] from the mixer's norm.
static void kv_project(const Visit *v, const Activations *a) {
    window_slide_forward(v->s, v->l, v->c); // makes room for K[c], V[c] in a layer with a window
    const ChunkKeys c = chunk_keys(v);
    if (!keys_found(v)) {
        linear_forward(v, K_WEIGHT, c.k_linear, a->norm[0], NULL);
        rotate_product(v, K_NORM, c.k_linear);
        linear_forward(v, V_WEIGHT, c.v_linear, a->norm[0], NULL);
    }
    keys_finish(v, c);
}

// The product of Q_WEIGHT: queries and gates of attention's output, interleaved by head. Without these gates the
// queries alone, in their own tensor.
static Stored *push_queries_and_gates(const Visit *v, const char *name, Stored *q) {
    const Shapes *d = &v->layer->shape;
    return d->query_gate ? push_stored(v->s, SHARE_WORKSPACE, name, v->c.n * (d->Q + d->query_gate)) : q;
}

// Splits `both` into queries and gates, or joins them (join).
static void gates_split(const Visit *v, Stored *both, Stored *q, Stored *gate, int join) {
    const Shapes *d = &v->layer->shape;
    if (both != q) v->s->ops->split_heads(both, q, gate, v->c.n, d->NH, d->HD, join);
}

// Projects Q[c] before QK-norm from the mixer's norm, and the gate of attention's output if the family has a gate.
static void queries_linear(const Visit *v, const Activations *a, Stored *q_linear, Stored *gate) {
    const size_t mark = arena_mark(v->s->arena);
    if (v->layer->shape.low) {
        linear_forward(v, QUERY_DOWN, q_linear, a->norm[0], NULL);
        return;
    }
    Stored *both = push_queries_and_gates(v, "queries and gates", q_linear);
    linear_forward(v, Q_WEIGHT, both, a->norm[0], NULL);
    gates_split(v, both, q_linear, gate, 0);
    rotate_product(v, Q_NORM, q_linear);
    linear_forward(v, OUTPUT_GATE, gate, a->norm[0], NULL);
    arena_pop(v->s->arena, mark);
}

static void queries_project(const Visit *v, const Activations *a) {
    if (!is_found(v, a, a->q_linear)) queries_linear(v, a, a->q_linear, a->gate);
    if (is_found(v, a, a->q)) return;
    if (v->layer->shape.low)
        latent_queries(v, a->q, a->q_linear);
    else
        rotary_forward(v, Q_NORM, a->q, a->q_linear);
}

// Returns the elements of attention's output that a gate scales: one, or those of a head.
static size_t gate_elements(const Visit *v) { return v->layer->shape.Q / v->layer->shape.gate; }

// Runs the gate and attention's last product. It goes to x_1 = x_l + the branch, or to the branch's sum (part_target).
// Values narrower than keys are padded with zeros to their width (latent_expand), which the last product leaves out.
static void attention_output(const Visit *v, const Activations *a) {
    const Shapes *d = &v->layer->shape;
    const int found = is_found(v, a, a->gated);
    if (a->gate && !found)
        v->s->ops->gate_forward(a->gated, a->attention_out, a->gate, v->c.n * d->Q, gate_elements(v));
    if (d->O < d->Q && !found) v->s->ops->latent_trim(a->attention_out, a->gated, v->c.n, d->NH, d->HD, d->VD, 0);
    part_product(v, 0, 0, a, a->gated);
}

// Adds each head's sink, a logit without a value, to the softmax: rescales attention_out[n,.], updates lse[n,.].
static void sinks_forward(const Visit *v, Stored *attention_out, Summed *lse, size_t n) {
    const Shapes *d = &v->layer->shape;
    const Stored *sinks = weight_of(v, SINKS);
    if (sinks) v->s->ops->sink_forward(attention_out, lse, sinks, n, d->NH, d->HD);
}

static Summed *push_attention_scratch(const Visit *v) {
    const Shapes *d = &v->layer->shape;
    return push_summed(v->s, SHARE_WORKSPACE, "attention scratch",
                       v->s->ops->attention_scratch(v->c.n, d->NH, d->NKV, d->HD, v->s->kv.slots));
}

// Pushes memory for the sums of several calls: in every chunk of a tree with forks, as planned. NULL without forks
static Summed *push_call_sums(const Visit *v, const char *name) {
    const size_t count = v->c.n * v->layer->shape.Q;
    return has_forks(v->s) ? push_summed(v->s, SHARE_WORKSPACE, name, count) : NULL;
}

// Runs the attention op in a tree with forks: a call over the chains' own keys, then `calls` calls over ancestors' keys
// (tree_calls). sums[n,NH*HD] are rounded once, after the last call.
static void tree_attention_forward(const Visit *v, const Activations *a, HeadKeys keys, AttentionShape shape,
                                   size_t calls, Summed *sums, Summed *scratch) {
    const StreamBP *s = v->s;
    const size_t Q = v->layer->shape.Q, NH = v->layer->shape.NH;
    shape.partial = 1;
    s->ops->attention_forward(sums, a->lse, a->q, keys.k, keys.v, &shape, scratch);
    for (size_t i = 0; i < calls; i++) {
        const size_t row = s->now.call[i].row;
        attention_shape_call(&shape, &s->now.call[i]);
        s->ops->attention_forward(summed_row(s, sums, row, Q), summed_row(s, a->lse, row, NH),
                                  stored_row(s, a->q, row, Q), keys.k, keys.v, &shape, scratch);
    }
    s->ops->round_sums(a->attention_out, sums, v->c.n * Q);
}

// Runs its backward: dq[n,NH*HD]; dK, dV +=
static void tree_attention_backward(const Visit *v, const Activations *a, Stored *dq, Stored *dattention_out,
                                    HeadKeys keys, AttentionShape shape, size_t calls, Summed *sums, Summed *scratch) {
    const StreamBP *s = v->s;
    const size_t Q = v->layer->shape.Q, NH = v->layer->shape.NH;
    shape.partial = 1;
    s->ops->attention_backward(sums, keys.dk, keys.dv, dattention_out, a->attention_out, a->q, keys.k, keys.v, a->lse,
                               &shape, scratch);
    for (size_t i = 0; i < calls; i++) {
        const size_t row = s->now.call[i].row;
        attention_shape_call(&shape, &s->now.call[i]);
        s->ops->attention_backward(summed_row(s, sums, row, Q), keys.dk, keys.dv, stored_row(s, dattention_out, row, Q),
                                   stored_row(s, a->attention_out, row, Q), stored_row(s, a->q, row, Q), keys.k, keys.v,
                                   summed_row(s, a->lse, row, NH), &shape, scratch);
    }
    s->ops->round_sums(dq, sums, v->c.n * Q);
}

// Runs the attention op, in a tree with forks in several calls, or by ranges of latents.
static void attention_op_forward(const Visit *v, const Activations *a, Summed *scratch) {
    const StreamBP *s = v->s;
    if (expands_ranges(v)) {
        latent_attention(v, a, NULL, NULL, scratch);
        return;
    }
    const HeadKeys keys = attention_keys(v);
    const size_t mark = arena_mark(s->arena), calls = tree_calls(s, v->c, v->layer->window);
    const AttentionShape shape = attention_shape(s, v->l, layer_spans(s, v->l, v->c));
    Summed *sums = push_call_sums(v, "sums of attention output");
    if (merges_calls(s, calls))
        tree_attention_forward(v, a, keys, shape, calls, sums, scratch);
    else
        s->ops->attention_forward(a->attention_out, a->lse, a->q, keys.k, keys.v, &shape, scratch);
    sinks_forward(v, a->attention_out, a->lse, v->c.n);
    arena_pop(s->arena, mark);
}

// Runs its backward: dq[n,NH*HD] from dattention_out; dK[:t1], dV[:t1] +=
static void attention_op_backward(const Visit *v, const Activations *a, Stored *dq, Stored *dattention_out,
                                  Summed *scratch) {
    const StreamBP *s = v->s;
    if (expands_ranges(v)) {
        latent_attention(v, a, dq, dattention_out, scratch);
        return;
    }
    const HeadKeys keys = attention_keys(v);
    const size_t mark = arena_mark(s->arena), calls = tree_calls(s, v->c, v->layer->window);
    const AttentionShape shape = attention_shape(s, v->l, layer_spans(s, v->l, v->c));
    Summed *sums = push_call_sums(v, "sums of gradient of queries");
    if (merges_calls(s, calls))
        tree_attention_backward(v, a, dq, dattention_out, keys, shape, calls, sums, scratch);
    else
        s->ops->attention_backward(dq, keys.dk, keys.dv, dattention_out, a->attention_out, a->q, keys.k, keys.v, a->lse,
                                   &shape, scratch);
    arena_pop(s->arena, mark);
    if (is_latent(v)) latents_of_chunk(v, v->c.index, 1); // dK, dV of these tokens are complete now
}

// Runs attention: the mixer's norm, K[:t1], V[:t1] -> x_1. Skips the attention op if its output was saved.
static void attention_forward(const Visit *v, const Activations *a) {
    const size_t mark = arena_mark(v->s->arena);
    Summed *scratch = push_attention_scratch(v);
    queries_project(v, a);
    if (!is_found(v, a, a->attention_out)) attention_op_forward(v, a, scratch);
    attention_output(v, a);
    arena_pop(v->s->arena, mark);
}

// dattention_out[n,NH*HD] = the gradient of attention_out. The gate's gradient overwrites the gate; dsinks +=
static void output_backward(const Visit *v, const Activations *a, const Stored *dsum, Stored *dattention_out) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena);
    Stored *dgated =
        d->O < d->Q ? push_stored(s, SHARE_WORKSPACE, "gradient of attention output without padding", v->c.n * d->O)
                    : dattention_out;
    linear_backward(v, O_WEIGHT, dgated, dsum, a->gated, 0);
    if (d->O < d->Q) s->ops->latent_trim(dattention_out, dgated, v->c.n, d->NH, d->HD, d->VD, 1);
    arena_pop(s->arena, mark);
    if (a->gate)
        s->ops->gate_backward(dattention_out, a->gate, dattention_out, a->attention_out, a->gate, v->c.n * d->Q,
                              gate_elements(v));
    Summed *dsinks = sum_of(v, SINKS);
    if (!dsinks) return;
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "scratch of sinks", s->ops->sink_backward_scratch(v->c.n, d->NH));
    s->ops->sink_backward(dsinks, dattention_out, a->attention_out, a->lse, weight_of(v, SINKS), v->c.n, d->NH, d->HD,
                          scratch);
    arena_pop(s->arena, mark);
}

// Adds the gradient through queries and gates to dnorm. Overwrites dq.
static void queries_backward(const Visit *v, Activations *a, Stored *dq) {
    const StreamBP *s = v->s;
    if (v->layer->shape.low) {
        latent_queries_backward(v, a, dq);
        return;
    }
    const size_t mark = arena_mark(s->arena);
    rotary_backward(v, Q_NORM, dq, a->q_linear);
    Stored *dout = push_queries_and_gates(v, "gradient of queries and gates", dq);
    gates_split(v, dout, dq, a->gate, 1);
    mixer_input_backward(v, a, linear_of(v, Q_WEIGHT), dout);
    if (has_tensor(v, OUTPUT_GATE)) mixer_input_backward(v, a, linear_of(v, OUTPUT_GATE), a->gate);
    arena_pop(s->arena, mark);
}

// dx of x_1 -> dnorm, the queries' part; dK[:t1], dV[:t1] +=
static void attention_backward(const Visit *v, Activations *a, Stored *dx) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    mixer_gradient_begin(v, a, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of attention output", v->c.n * d->Q);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", v->c.n * d->Q);
    Summed *scratch = push_attention_scratch(v);
    output_backward(v, a, branch_sum_backward(v, 0, a, dx), dattention_out);
    attention_op_backward(v, a, dq, dattention_out, scratch);
    queries_backward(v, a, dq);
    arena_pop(s->arena, mark);
}

// Adds the gradient through V[c] to dnorm. Scratch: dkv[n,KV], and v_linear[n,KV] (NULL if values have no norm)
static void values_backward(const Visit *v, Activations *a, Stored *dkv, Stored *v_linear) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    s->ops->round_sums(dkv, key_gradient_at(s, VALUES, v->l, v->c.token), v->c.n * d->KV);
    if (v_linear) {
        if (s->kv.v_linear)
            v_linear = key_value_at(s, VALUES_LINEAR, v->l, v->c.token);
        else
            linear_forward(v, V_WEIGHT, v_linear, a->norm[0], NULL);
        norm_rows_backward(s, dkv, NULL, NULL, dkv, v_linear, NULL, v->c.n * d->NKV, d->HD, 0);
    }
    mixer_input_backward(v, a, linear_of(v, V_WEIGHT), dkv);
}

// Returns keys before QK-norm: kept, or projected again and pushed. NULL without QK-norm
static Stored *keys_linear(const Visit *v, const Activations *a) {
    const StreamBP *s = v->s;
    if (!v->layer->shape.qk_norm && !is_latent(v)) return NULL;
    if (s->kv.k_linear) return key_value_at(s, KEYS_LINEAR, v->l, v->c.token);
    Stored *k_linear = push_stored(s, SHARE_WORKSPACE, "keys before QK-norm", v->c.n * v->layer->shape.KV);
    linear_forward(v, K_WEIGHT, k_linear, a->norm[0], NULL);
    rotate_product(v, K_NORM, k_linear);
    return k_linear;
}

// dK[c], dV[c], which are complete -> their part of dnorm; then dx of x_l
static void kv_backward(const Visit *v, Activations *a, Stored *dx) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    mixer_gradient_begin(v, a, dx);
    const size_t mark = arena_mark(s->arena), count = v->c.n * d->KV;
    if (is_latent(v)) {
        latents_backward(v, a, keys_linear(v, a));
        mixer_gradient_end(v, a, dx);
        arena_pop(s->arena, mark);
        return;
    }
    Stored *dkv = push_stored(s, SHARE_WORKSPACE, "gradient of keys or values", count);
    Stored *dvalues = d->value_norm ? push_stored(s, SHARE_WORKSPACE, "values before their norm", count) : NULL;
    Stored *k_linear = keys_linear(v, a);
    s->ops->round_sums(dkv, key_gradient_at(s, KEYS, v->l, v->c.token), count);
    rotary_backward(v, K_NORM, dkv, k_linear);
    if (d->values_are_keys) { // one product makes both: dkv is the sum of both gradients
        s->ops->round_sums(dvalues, key_gradient_at(s, VALUES, v->l, v->c.token), count);
        norm_rows_backward(s, dkv, NULL, NULL, dvalues, k_linear, NULL, v->c.n * d->NKV, d->HD, 1);
        mixer_input_backward(v, a, linear_of(v, K_WEIGHT), dkv);
    } else {
        mixer_input_backward(v, a, linear_of(v, K_WEIGHT), dkv);
        values_backward(v, a, dkv, dvalues);
    }
    mixer_gradient_end(v, a, dx);
    arena_pop(s->arena, mark);
}

// Projects K[c], V[c] from x_l[c]; computes nothing else of the layer.
static void chunk_kv_project(const Visit *v) {
    Activations a = mixer_norm(v);
    kv_project(v, &a);
    drop(v, &a);
}

// Projects K, V of all tokens again, once per pass, or makes them from kept products; dK = dV = 0. A layer whose window
// slides gets its keys in window_project.
static void keys_begin(const Visit *v) {
    StreamBP *s = v->s;
    Visit of = *v;
    kept_keys_load(v);
    s->kv.first = s->now.N;
    if (layer_slides(s, v->l)) return;
    zero_key_value_gradients(s, v->l, s->kv.rows[v->layer->window != 0]);
    for (size_t i = 0; i < chunk_count(s); i++) {
        of.c = visit(s, chunk_at(s, i));
        if (keys_found(v))
            keys_finish(&of, chunk_keys(&of));
        else
            chunk_kv_project(&of);
    }
}

// Lent keys stay from forward; their products may be kept.
static void lent_keys_begin(const Visit *v) {
    kept_keys_load(v);
    v->s->kv.first = v->s->now.N;
}

// Slides a layer's window back to chunk c. Projects the keys that enter the window again, in chunks.
static void window_project(const Visit *v) {
    StreamBP *s = v->s;
    const Range missing = window_slide_back(s, v->l, v->c);
    Visit of = *v;
    for (size_t done = 0; done < missing.count; done += of.c.n) {
        of.c.row = of.c.token = missing.begin + done;
        of.c.n = min_size(effective_chunk(s, s->setup->chunk), missing.count - done);
        chunk_kv_project(&of);
    }
}

#endif
