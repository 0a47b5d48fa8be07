/*
StreamBP: exact backpropagation, streamed through each layer chunk by chunk (arXiv 2506.03077), as a few steps on a
chunk c of tokens [begin, begin + n) of the packed stream, and methods, which are orders of these steps.

    kv_project(l, c)          x_l[c] -> K_l[c], V_l[c]
    attention_forward(l, c)   x_l[c], K_l[:end], V_l[:end] -> y[c]
    mlp_forward(l, c)         y[c] -> x_{l+1}[c]
    mlp_backward(l, c)        dx[c] of x_{l+1} -> dx[c] of y, in place; dW +=
    attention_backward(l, c)  dx[c] of y -> query part of the first norm's gradient; dK[:end], dV[:end] +=; dW +=
    kv_backward(l, c)         dK[c], dV[c] -> the rest of it; dW +=; then dx[c] of x_l, in place
    head_step(c)              x_L[c] -> logits[c] -> log-probabilities; dlogits -> dx[c] over x_L[c]; dW +=

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             chunks last to first

Why last to first: attention is causal, so dK[c], dV[c] receive from chunks >= c only. Walking backwards they are
complete the moment chunk c's own attention_backward is done; kv_backward follows at once and dx[c] is overwritten in
place. K, V of a layer are projected once per pass. Nothing of size N x hidden is needed beside the layer inputs and dx
(dx is x_L's storage).

With --keep attention (llmc/stream/kept_attention.h) what attention_forward(l, c) found stays, and backward goes on from there.

What the head does with an objective is in llmc/stream/head.h: weights of targets that wait for log-probabilities of the whole
stream cost a second visit of its logits. A forward pass alone gives log-probabilities: of a loss, of a reference, of an
old policy.

With LoRA (llmc/model/lora.h) the steps stay as they are: linear layers have their adapters with them (llmc/stream/linear_layer.h),
dW is that of the adapters, and a forward pass without them is one of the model below, which is their reference.
Generation is one more order of the forward steps (llmc/orders/key_value_cache.h).

Several ranks can share a stream (sequence parallelism): each goes through the layers with its own tokens, and per
layer and pass K, V come together first, and dK, dV go to the tokens' owners last (llmc/stream/key_value_exchange.h). The
first norm's gradient then comes in two parts, through the queries and later through keys and values: its backward is
linear.

A layer with a sliding window holds the keys and values of its window alone: they slide along the stream with the
chunks, forwards in the forward pass, and backwards, with dK and dV, in backward (window_slide_forward in llmc/stream/stream.h,
window_slide_back below).

Every tensor is pushed on the arena where it is needed and popped where it dies. A plan is this same code on op set
"dry" and an arena without memory (llmc/plan/plan.h): it visits one layer and one chunk of each length, and multiplies. The
steps never look inside a tensor.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/stream/head.h"
#include "llmc/stream/kept_attention.h"
#include "llmc/stream/key_value_exchange.h"
#include "llmc/stream/linear_layer.h"
#include "llmc/stream/ring.h"

// ---- the steps: forward ---------------------------------------------------------------------------------------------
static void first_norm(StreamBP *s, size_t l, Chunk c, GroupWeights w, Activations *a) {
    norm_forward(s, a->norm1, input_load(&s->memory, l, c.begin), weight_of(s, w, NORM1_WEIGHT),
                 weight_of(s, w, NORM1_BIAS), c.n);
}

static void kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *k = key_value_at(s, s->kv.k, l, c.place), *v = key_value_at(s, s->kv.v, l, c.place);
    Stored *k_linear = s->kv.k_linear ? key_value_at(s, s->kv.k_linear, l, c.place) : k;
    linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    linear_forward(s, l, c, w, V_WEIGHT, v, a->norm1, NULL);
    norm_rotated(s, l, k, k_linear, weight_of(s, w, K_NORM), s->position + c.begin, c.n, d.NKV);
}

static void queries_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *q_linear = d.qk_norm ? a->q_linear : a->q;
    linear_forward(s, l, c, w, Q_WEIGHT, q_linear, a->norm1, NULL);
    norm_rotated(s, l, a->q, q_linear, weight_of(s, w, Q_NORM), s->position + c.begin, c.n, d.NH);
}

static void attention_output(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const int post_norms = s->model->config.family->post_norms;
    const Stored *x = input_load(&s->memory, l, c.begin);
    linear_forward(s, l, c, w, O_WEIGHT, post_norms ? a->attention_branch : a->y, a->attention_out,
                   post_norms ? NULL : x);
    if (post_norms) post_norm_forward(s, a->y, a->attention_branch, weight_of(s, w, POST_NORM1), x, c.n);
}

static void attention_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    queries_project(s, l, c, w, a);
    const AttentionShape shape = attention_shape(s, l, layer_spans(s, l, c));
    if (!attention_saved(s))
        s->ops->attention_forward(a->attention_out, a->lse, a->q, layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l),
                                  &shape, scratch);
    attention_output(s, l, c, w, a);
    arena_pop(s->arena, mark);
}

// The MLP up to what its backward needs: its activation, or the end where a norm follows.
static void mlp_activate(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    norm_forward(s, a->norm2, a->y, weight_of(s, w, NORM2_WEIGHT), weight_of(s, w, NORM2_BIAS), c.n);
    linear_forward(s, l, c, w, GATE_WEIGHT, a->gate_up, a->norm2, NULL);
    s->ops->activation_forward(a->active, a->gate_up, d.activation, c.n, d.FF);
    if (d.post_norms) linear_forward(s, l, c, w, DOWN_WEIGHT, a->mlp_branch, a->active, NULL);
}

static void mlp_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *out = input_save(&s->memory, l + 1, c.begin);
    mlp_activate(s, l, c, w, a);
    if (d.post_norms)
        post_norm_forward(s, out, a->mlp_branch, weight_of(s, w, POST_NORM2), a->y, c.n);
    else
        linear_forward(s, l, c, w, DOWN_WEIGHT, out, a->active, a->y);
}

// ---- the steps: backward. dx is the gradient of the residual stream, [n,C], updated in place ------------------------
// The gradient of what a part of the layer adds: dx itself, or through the post norm, over `added`, the norm's input.
static const Stored *branch_backward(StreamBP *s, Chunk c, GroupWeights w, GroupSums sums, LayerTensor norm,
                                     Stored *added, const Stored *dx) {
    if (!added) return dx;
    norm_backward(s, added, sum_of(s, sums, norm), NULL, dx, added, weight_of(s, w, norm), c.n, 0);
    return added;
}

static void mlp_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                         Stored *dx) {
    Shapes d = shapes_of(s->model);
    Stored *dactive = a->active, *dgate_up = a->gate_up, *dnorm_out = a->norm2; // each over its own values, once used
    const Stored *dbranch = branch_backward(s, c, w, sums, POST_NORM2, a->mlp_branch, dx);
    linear_backward(s, l, c, w, sums, DOWN_WEIGHT, dactive, dbranch, a->active, 0);
    s->ops->activation_backward(dgate_up, dactive, a->gate_up, d.activation, c.n, d.FF);
    linear_backward(s, l, c, w, sums, GATE_WEIGHT, dnorm_out, dgate_up, a->norm2, 0);
    norm_backward(s, dx, sum_of(s, sums, NORM2_WEIGHT), sum_of(s, sums, NORM2_BIAS), dnorm_out, a->y,
                  weight_of(s, w, NORM2_WEIGHT), c.n, 1);
}

// dattended[n,NH*HD] = the gradient of attention's output
static void output_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                            const Stored *dx, Stored *dattention_out) {
    const Stored *dbranch = branch_backward(s, c, w, sums, POST_NORM1, a->attention_branch, dx);
    linear_backward(s, l, c, w, sums, O_WEIGHT, dattention_out, dbranch, a->attention_out, 0);
}

// dnormed1[n,C] = the part of the first norm's gradient that comes through the queries; dq is used up
static void queries_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                             Stored *dq, Stored *dnorm1) {
    Shapes d = shapes_of(s->model);
    norm_rotated_backward(s, l, dq, sum_of(s, sums, Q_NORM), a->q_linear, weight_of(s, w, Q_NORM), c, d.NH);
    linear_backward(s, l, c, w, sums, Q_WEIGHT, dnorm1, dq, a->norm1, 0);
}

static void attention_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                               const Stored *dx, Stored *dnorm1) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of attention output", c.n * d.Q);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    output_backward(s, l, c, w, sums, a, dx, dattention_out);
    const AttentionShape shape = attention_shape(s, l, layer_spans(s, l, c));
    s->ops->attention_backward(dq, s->kv.dk, s->kv.dv, dattention_out, a->attention_out, a->q,
                               layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l), a->lse, &shape, scratch);
    queries_backward(s, l, c, w, sums, a, dq, dnorm1);
    arena_pop(s->arena, mark);
}

// The same behind the ring, which has left dq of all own tokens.
static void ring_queries_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                                  Stored *dnorm1) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    if (d.qk_norm && !s->kept.norm1) linear_forward(s, l, c, w, Q_WEIGHT, a->q_linear, a->norm1, NULL);
    s->ops->round_sums(dq, (Summed *)at(s->ring_layer.dq, c.begin * d.Q, d.summed), c.n * d.Q);
    queries_backward(s, l, c, w, sums, a, dq, dnorm1);
    arena_pop(s->arena, mark);
}

static void first_norm_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, Stored *dx,
                                const Stored *dnorm1) {
    norm_backward(s, dx, sum_of(s, sums, NORM1_WEIGHT), sum_of(s, sums, NORM1_BIAS), dnorm1,
                  input_load(&s->memory, l, c.begin), weight_of(s, w, NORM1_WEIGHT), c.n, 1);
}

// dnormed1[n,C] = (or += with accumulate) the part that comes through keys and values; then through the norm
static void kv_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums, const Activations *a,
                        Stored *dx, Stored *dnorm1, int accumulate) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dkv = push_stored(s, SHARE_WORKSPACE, "gradient of keys or values", c.n * d.KV);
    Stored *k_linear = NULL; // chunk c's keys before QK-norm, projected again where they were not kept
    if (d.qk_norm && s->kv.k_linear) {
        k_linear = key_value_at(s, s->kv.k_linear, l, c.place);
    } else if (d.qk_norm) {
        k_linear = push_stored(s, SHARE_WORKSPACE, "keys before QK-norm", c.n * d.KV);
        linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    }
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dk, l, c.place), c.n * d.KV);
    norm_rotated_backward(s, l, dkv, sum_of(s, sums, K_NORM), k_linear, weight_of(s, w, K_NORM), c, d.NKV);
    linear_backward(s, l, c, w, sums, K_WEIGHT, dnorm1, dkv, a->norm1, accumulate);
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dv, l, c.place), c.n * d.KV);
    linear_backward(s, l, c, w, sums, V_WEIGHT, dnorm1, dkv, a->norm1, 1);
    first_norm_backward(s, l, c, w, sums, dx, dnorm1);
    arena_pop(s->arena, mark);
}

// ---- the embedding --------------------------------------------------------------------------------------------------
static void embedding_step(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w.weights, position, d.stored);
    s->ops->embedding_forward(input_save(&s->memory, 0, c.begin), s->tokens + c.begin, s->position + c.begin,
                              (const Stored *)w.weights, wpe, c.n, d.C, d.embedding_scale);
}

static void embedding_forward(StreamBP *s) {
    size_t size = effective_chunk(s, s->chunk);
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    for (size_t i = 0; i < chunk_visits(s, size); i++) embedding_step(s, chunk_visit(s, i, size), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// A rank without tokens has nothing to add.
static void table_backward(StreamBP *s, GroupSums sums, ModelTensor table, const int32_t *index, size_t rows) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    void *dw = at(sums.tables, s->model->model_offset[table], dtype_size(sums.tables_type));
    if (!s->own_tokens) return;
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(s->own_tokens, rows, d.C));
    s->ops->embedding_backward(dw, sums.tables_type, input_load(&s->memory, d.L, 0), index, s->own_tokens, rows, d.C,
                               table == EMBEDDING ? d.embedding_scale : 1, scratch);
    arena_pop(s->arena, mark);
}

static void embedding_backward(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    if (s->memory.lora) return;
    GroupSums sums = grads_acquire(&s->memory, GROUP_EMBEDDING);
    if (s->own_tokens) table_backward(s, sums, EMBEDDING, s->tokens, d.V);
    if (s->own_tokens && !d.rotary)
        table_backward(s, sums, POSITION_EMBEDDING, s->position, s->model->config.max_position_embeddings);
    grads_release(&s->memory, GROUP_EMBEDDING, sums);
}

// ---- methods --------------------------------------------------------------------------------------------------------
static void layer_chunk_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    size_t mark = arena_mark(s->arena);
    Activations a = attention_activations(s, l, c);
    if (!s->kept.norm1) push_mlp_activations(s, &a, c.n);
    if (s->ring_layer.q) {
        attention_output(s, l, c, w, &a);
    } else {
        first_norm(s, l, c, w, &a);
        if (s->ranks == 1) kv_project(s, l, c, w, &a);
        attention_forward(s, l, c, w, &a);
        chunk_attention_store(s, l, c, &a);
    }
    mlp_forward(s, l, c, w, &a);
    arena_pop(s->arena, mark);
}

// K and V of c alone, for the ring its queries, too ...
static void chunk_kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Activations a;
    if (s->ring_layer.q)
        a = attention_activations(s, l, c);
    else
        a.norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", c.n * d.C);
    first_norm(s, l, c, w, &a);
    kv_project(s, l, c, w, &a);
    if (s->ring_layer.q) queries_project(s, l, c, w, &a);
    arena_pop(s->arena, mark);
}

// ... or of a whole layer's own tokens. Where ranks share the stream they then come together: ticket[half] is what
// queries of a half have to wait for. In the ring all wait.
static void layer_kv_project(StreamBP *s, size_t l, GroupWeights w, size_t size, int64_t ticket[2]) {
    for (size_t half = 0; half < 2; half++) {
        for (size_t i = 0; i < range_visits(s, half, size); i++)
            chunk_kv_project(s, l, range_visit(s, half, i, size), w);
        if (s->ranks > 1) keys_share(s, l, half, ticket);
    }
    if (s->ring_layer.q) ring_forward(s, l, size);
}

static void layer_forward(StreamBP *s, size_t l, GroupWeights w, size_t size) {
    const int slides = s->ranks == 1 && layer_slides(s, l);
    int64_t ticket[2] = {0, 0};
    size_t mark = arena_mark(s->arena);
    s->kv.first = 0;
    if (layer_rings(s, l)) ring_begin(s, l, 0);
    if (s->ranks > 1) layer_kv_project(s, l, w, size, ticket);
    weights_prefetch(&s->memory, l);
    for (size_t half = 0; half < 2; half++) {
        await_shared(s, ticket[half]);
        for (size_t i = 0; i < range_visits(s, half, size); i++) {
            Chunk c = range_visit(s, half, i, size);
            if (slides) window_slide_forward(s, c);
            layer_chunk_forward(s, l, c, w);
        }
    }
    ring_end(s);
    arena_pop(s->arena, mark);
}

static void layers_forward(StreamBP *s) {
    size_t size = effective_chunk(s, s->chunk);
    const size_t mark = arena_mark(s->arena);
    kept_attention_begin(s, size, 0);
    layers_begin(&s->memory, 1);
    for (size_t visit = 0; visit < layer_visits(s); visit++) {
        size_t l = layer_visit(s, visit);
        GroupWeights w = weights_acquire(&s->memory, l);
        layer_forward(s, l, w, size);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
    kept_attention_finish(s);
    arena_pop(s->arena, mark);
}

// Backward K and V are projected again, once per pass. Of a layer with a window what chunk c sees and the chunk after
// it did not: the window slides backwards, and dK, dV with it. At the last chunk there is nothing yet (kv.first is the
// stream's end).
static void window_slide_back(StreamBP *s, size_t l, Chunk c, GroupWeights w, size_t size) {
    Shapes d = shapes_of(s->model);
    const size_t first = first_key(0, c.place, window_of_model(&s->model->config));
    const size_t known = min_size(s->kv.first, c.place + c.n);
    Chunk piece = c;
    slide_keys(s, l, first, c.place + c.n);
    s->kv.first = first;
    s->ops->zero(s->kv.dk, (known - first) * d.KV * d.summed);
    s->ops->zero(s->kv.dv, (known - first) * d.KV * d.summed);
    if (s->dry) { // as many as c has, each once: which ones does not matter
        chunk_kv_project(s, l, c, w);
        return;
    }
    for (piece.place = first; piece.place < known; piece.place += piece.n) {
        piece.begin = piece.place, piece.n = min_size(size, known - piece.place);
        chunk_kv_project(s, l, piece, w);
    }
}

static void layer_chunk_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dx = input_load(&s->memory, d.L, c.begin); // dx lives where x_L was
    Activations a = attention_activations(s, l, c);
    const int recompute = !s->kept.norm1, ring = s->ring_layer.q != NULL;
    if (!ring && c.visit) chunk_attention_load(s, l, c.visit - 1); // of the chunk that comes next
    if (recompute && ring) {
        attention_output(s, l, c, w, &a);
    } else if (recompute) {
        first_norm(s, l, c, w, &a);
        attention_forward(s, l, c, w, &a);
    }
    size_t mlp_mark = arena_mark(s->arena);
    if (recompute) {
        push_mlp_activations(s, &a, c.n);
        mlp_activate(s, l, c, w, &a);
    }
    mlp_backward(s, l, c, w, sums, &a, dx);
    arena_pop(s->arena, mlp_mark);
    if (ring) {
        output_backward(s, l, c, w, sums, &a, dx, (Stored *)at(s->ring_layer.dattention_out, c.begin * d.Q, d.stored));
    } else {
        Stored *dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
        attention_backward(s, l, c, w, sums, &a, dx, dnorm1);
        if (s->ranks == 1)
            kv_backward(s, l, c, w, sums, &a, dx, dnorm1, 1);
        else
            first_norm_backward(s, l, c, w, sums, dx, dnorm1);
    }
    arena_pop(s->arena, mark);
}

// What is left where ranks share the stream, once dK, dV of c are the sums of what all of them have found; and behind
// the ring the queries' part.
static void layer_chunk_kv_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums sums) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dx = input_load(&s->memory, d.L, c.begin);
    const int ring = s->ring_layer.q != NULL;
    Activations a;
    if (s->kept.norm1 || ring)
        a = attention_activations(s, l, c);
    else
        a.norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", c.n * d.C);
    if (!s->kept.norm1) first_norm(s, l, c, w, &a);
    Stored *dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    if (ring) ring_queries_backward(s, l, c, w, sums, &a, dnorm1);
    kv_backward(s, l, c, w, sums, &a, dx, dnorm1, ring);
    arena_pop(s->arena, mark);
}

static void layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums sums, size_t size) {
    Shapes d = shapes_of(s->model);
    const size_t rows = s->kv.rows[layer_window(&s->model->config, l) != 0], mark = arena_mark(s->arena);
    const int slides = s->ranks == 1 && layer_slides(s, l), rings = layer_rings(s, l);
    int64_t ticket[2] = {0, 0};
    s->kv.first = slides ? s->N : 0;
    if (rings) ring_begin(s, l, 1);
    if (!slides && !rings) {
        s->ops->zero(s->kv.dk, rows * d.KV * d.summed);
        s->ops->zero(s->kv.dv, rows * d.KV * d.summed);
    }
    if (!rings && s->own_tokens) chunk_attention_load(s, l, chunk_visits(s, size) - 1);
    if (!slides && !s->kept.norm1) layer_kv_project(s, l, w, size, ticket);
    weights_prefetch(&s->memory, l);
    for (size_t half = 0; half < 2; half++) await_shared(s, ticket[half]); // the second may be empty
    for (size_t half = 2; half-- > 0;) {
        for (size_t i = range_visits(s, half, size); i-- > 0;) {
            Chunk c = range_visit(s, half, i, size);
            if (slides) window_slide_back(s, l, c, w, size);
            layer_chunk_backward(s, l, c, w, sums);
        }
        if (s->ranks > 1) key_gradients_share(s, l, half, ticket);
    }
    if (rings) {
        s->ring_layer.dq = push_summed(s, SHARE_WORKSPACE, "sums of gradient of queries", s->own_tokens * d.Q);
        ring_backward(s, l, size);
    }
    for (size_t half = 2; half-- > 0 && s->ranks > 1;) {
        await_shared(s, ticket[half]);
        for (size_t i = range_visits(s, half, size); i-- > 0;)
            layer_chunk_kv_backward(s, l, range_visit(s, half, i, size), w, sums);
    }
    ring_end(s);
    arena_pop(s->arena, mark);
}

static void layers_backward(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    size_t size = effective_chunk(s, s->chunk), mark = arena_mark(s->arena);
    size_t rows = rows_of_a_layer(s);
    s->kv.dk = push_summed(s, SHARE_KV, "gradient of keys of one layer", rows * d.KV);
    s->kv.dv = push_summed(s, SHARE_KV, "gradient of values of one layer", rows * d.KV);
    kept_attention_begin(s, size, 1);
    layers_begin(&s->memory, -1);
    for (size_t visit = layer_visits(s); visit-- > 0;) {
        size_t l = layer_visit(s, visit);
        GroupWeights w = weights_acquire(&s->memory, l);
        GroupSums sums = grads_acquire(&s->memory, l);
        layer_backward(s, l, w, sums, size);
        grads_release(&s->memory, l, sums);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
    kept_attention_finish(s);
    arena_pop(s->arena, mark);
}

// ---- one stream through the model -----------------------------------------------------------------------------------
// The loss of one stream (its share of the accumulated batch's); gradients are added to the stored ones, and metrics
// (or NULL) to metrics.
static double forward_backward(StreamBP *s, const Batch *batch, double Z, Metrics *metrics) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena), host_mark = arena_mark(&s->host);
    int full = s->method == METHOD_FULL;
    s->dropout = s->memory.lora ? s->memory.lora->dropout : 0;
    sequence_begin(s, batch, Z);
    push_inputs(s, s->own_tokens, 1);
    push_kept_attention(s);
    memset(&s->kept, 0, sizeof(s->kept));
    if (full) {
        push_attention_activations(s, &s->kept, d.L * s->own_tokens);
        push_mlp_activations(s, &s->kept, d.L * s->own_tokens);
    }
    grads_begin(&s->memory);
    size_t kv_mark = arena_mark(s->arena);
    push_key_value(s, full ? d.L : 1, s->N, effective_chunk(s, s->chunk), full && d.qk_norm);
    embedding_forward(s);
    layers_forward(s);
    if (!full) arena_pop(s->arena, kv_mark); // K, V of the last layer die: the head takes their place
    head(s, 1);
    sequence_end(s);
    double loss = sequence_loss(s, metrics);
    if (!full) push_key_value(s, 1, s->N, effective_chunk(s, s->chunk), 0);
    layers_backward(s);
    arena_pop(s->arena, kv_mark);
    pop_kept_attention(s, host_mark);
    embedding_backward(s);
    grads_end(&s->memory);
    arena_pop(s->arena, mark);
    s->dropout = 0;
    return loss;
}

// Log-probabilities alone, in host_sums: layer inputs are overwritten layer by layer, so memory does not grow with L.
static void forward_logprobs(StreamBP *s, const Batch *batch, double Z) {
    size_t mark = arena_mark(s->arena);
    Method method = s->method;
    if (method == METHOD_FULL) s->method = METHOD_CHECKPOINT; // nothing is kept either way
    sequence_begin(s, batch, Z);
    push_inputs(s, s->own_tokens, 0);
    memset(&s->kept, 0, sizeof(s->kept));
    size_t kv_mark = arena_mark(s->arena);
    push_key_value(s, 1, s->N, effective_chunk(s, s->chunk), 0);
    embedding_forward(s);
    layers_forward(s);
    arena_pop(s->arena, kv_mark);
    head(s, 0);
    sequence_end(s);
    arena_pop(s->arena, mark);
    s->method = method;
}

// The loss alone.
static double forward_only(StreamBP *s, const Batch *batch, double Z, Metrics *metrics) {
    forward_logprobs(s, batch, Z);
    return sequence_loss(s, metrics);
}

// out[N] = log-probabilities of the targets under the model as it is, or without its adapters.
static void forward_policy(StreamBP *s, const Batch *batch, int without_adapters, float *out) {
    const DType type = dtype_of_sums(s->model->dtype);
    s->memory.without = without_adapters;
    forward_logprobs(s, batch, 1);
    s->memory.without = 0;
    for (size_t t = 0; t < batch->N; t++) out[t] = (float)value_at(s->host_sums, type, t);
}

#endif
