/*
StreamBP: exact backpropagation, streamed through each layer chunk by chunk (arXiv 2506.03077), as a few steps on a chunk c
of tokens [begin, begin + n) of the packed stream, and methods, which are orders of these steps.

    kv_project(l, c)          x_l[c] -> K_l[c], V_l[c]
    attention_forward(l, c)   x_l[c], K_l[:end], V_l[:end] -> y[c]
    mlp_forward(l, c)         y[c] -> x_{l+1}[c]
    mlp_backward(l, c)        dx[c] of x_{l+1} -> dx[c] of y, in place; dW +=
    attention_backward(l, c)  dx[c] of y -> the query part of the gradient of the first norm; dK[:end], dV[:end] +=; dW +=
    kv_backward(l, c)         dK[c], dV[c] -> the rest of it; dW +=; then dx[c] of x_l, in place
    head_step(c)              x_L[c] -> logits[c] -> log-probabilities; dlogits -> dx[c] over x_L[c]; dW +=

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             chunks last to first

Why last to first: attention is causal, so dK[c], dV[c] receive from chunks >= c only. Walking backwards they are complete the
moment chunk c's own attention_backward is done; kv_backward follows at once and dx[c] is overwritten in place. K, V of a
layer are projected once per pass. Nothing of size N x hidden is needed beside the layer inputs and dx (dx is x_L's storage).

A layer with a sliding window holds the keys and values of its window alone: they slide along the stream with the chunks, forwards
in the forward pass, and backwards, with dK and dV, in backward (window_advance in llmc/stream.h, window_retreat below).

Every tensor is pushed on the arena where it is needed and popped where it dies. A plan is this same code on op set "dry" and
an arena without memory (llmc/plan.h): it visits one layer and one chunk of each length, and multiplies. The steps never look
inside a tensor.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/stream.h"

// ---- the steps: forward -------------------------------------------------------------------------------------------------------
static inline void first_norm(StreamBP *s, size_t l, Chunk c, char *w, Activations *a) {
    norm_forward(s, a->normed1, input_load(&s->memory, l, c.begin), weight_of(s, w, NORM1_WEIGHT),
                 weight_of(s, w, NORM1_BIAS), c.n);
}

static inline void kv_project(StreamBP *s, size_t l, Chunk c, char *w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *k = key_value_at(s, s->kv.k, l, c.begin), *v = key_value_at(s, s->kv.v, l, c.begin);
    Stored *k_linear = s->kv.k_linear ? key_value_at(s, s->kv.k_linear, l, c.begin) : k;
    s->ops->linear_forward(k_linear, a->normed1, weight_of(s, w, K_WEIGHT), weight_of(s, w, K_BIAS), NULL, c.n, d.C,
                           d.KV);
    s->ops->linear_forward(v, a->normed1, weight_of(s, w, V_WEIGHT), weight_of(s, w, V_BIAS), NULL, c.n, d.C, d.KV);
    norm_rotated(s, l, k, k_linear, weight_of(s, w, K_NORM), s->position + c.begin, c.n, d.NKV);
}

static inline void attention_forward(StreamBP *s, size_t l, Chunk c, char *w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *q_linear = d.qk_norm ? a->q_linear : a->q;
    const Stored *x = input_load(&s->memory, l, c.begin);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    s->ops->linear_forward(q_linear, a->normed1, weight_of(s, w, Q_WEIGHT), weight_of(s, w, Q_BIAS), NULL, c.n, d.C,
                           d.Q);
    norm_rotated(s, l, a->q, q_linear, weight_of(s, w, Q_NORM), s->position + c.begin, c.n, d.NH);
    s->ops->attention_forward(a->attended, a->lse, a->q, layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l),
                              layer_spans(s, l, c), d.NH, d.NKV, d.HD, attention_scale(s->model, l), scratch);
    s->ops->linear_forward(d.post_norms ? a->added1 : a->y, a->attended, weight_of(s, w, O_WEIGHT),
                           weight_of(s, w, O_BIAS), d.post_norms ? NULL : x, c.n, d.Q, d.C);
    if (d.post_norms) post_norm_forward(s, a->y, a->added1, weight_of(s, w, POST_NORM1), x, c.n);
    arena_pop(s->arena, mark);
}

static inline void activation_forward(StreamBP *s, Stored *out, const Stored *hidden, size_t n, size_t FF) {
    switch (s->model->config.family->activation) {
    case ACTIVATION_SWIGLU: s->ops->swiglu_forward(out, hidden, n, FF); break;
    case ACTIVATION_GEGLU: s->ops->geglu_forward(out, hidden, n, FF); break;
    default: s->ops->gelu_forward(out, hidden, n * FF);
    }
}

static inline void activation_backward(StreamBP *s, Stored *dhidden, const Stored *dout, const Stored *hidden, size_t n,
                                       size_t FF) {
    switch (s->model->config.family->activation) {
    case ACTIVATION_SWIGLU: s->ops->swiglu_backward(dhidden, dout, hidden, n, FF); break;
    case ACTIVATION_GEGLU: s->ops->geglu_backward(dhidden, dout, hidden, n, FF); break;
    default: s->ops->gelu_backward(dhidden, dout, hidden, n * FF);
    }
}

// The MLP up to what its backward needs: its activation, or the end where a norm follows.
static inline void mlp_activate(StreamBP *s, Chunk c, char *w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    norm_forward(s, a->normed2, a->y, weight_of(s, w, NORM2_WEIGHT), weight_of(s, w, NORM2_BIAS), c.n);
    s->ops->linear_forward(a->hidden, a->normed2, weight_of(s, w, GATE_WEIGHT), weight_of(s, w, GATE_BIAS), NULL, c.n,
                           d.C, d.H);
    activation_forward(s, a->active, a->hidden, c.n, d.FF);
    if (d.post_norms)
        s->ops->linear_forward(a->added2, a->active, weight_of(s, w, DOWN_WEIGHT), weight_of(s, w, DOWN_BIAS), NULL,
                               c.n, d.FF, d.C);
}

static inline void mlp_forward(StreamBP *s, size_t l, Chunk c, char *w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *out = input_save(&s->memory, l + 1, c.begin);
    mlp_activate(s, c, w, a);
    if (d.post_norms)
        post_norm_forward(s, out, a->added2, weight_of(s, w, POST_NORM2), a->y, c.n);
    else
        s->ops->linear_forward(out, a->active, weight_of(s, w, DOWN_WEIGHT), weight_of(s, w, DOWN_BIAS), a->y, c.n,
                               d.FF, d.C);
}

// ---- the steps: backward. dx is the gradient of the residual stream, [n,C], updated in place --------------------------------
// The gradient of what a part of the layer adds: dx itself, or through the post norm, over `added`, the norm's input.
static inline const Stored *added_backward(StreamBP *s, Chunk c, char *w, GroupSums sums, LayerTensor norm,
                                           Stored *added, const Stored *dx) {
    if (!added) return dx;
    norm_backward(s, added, sum_of(s, sums, norm), NULL, dx, added, weight_of(s, w, norm), c.n, 0);
    return added;
}

static inline void mlp_backward(StreamBP *s, Chunk c, char *w, GroupSums sums, const Activations *a, Stored *dx) {
    Shapes d = shapes_of(s->model);
    Stored *dactive = a->active, *dhidden = a->hidden, *dnormed = a->normed2; // each over its own values, once used
    const Stored *dadded = added_backward(s, c, w, sums, POST_NORM2, a->added2, dx);
    s->ops->linear_backward_weight(sum_of(s, sums, DOWN_WEIGHT), sum_of(s, sums, DOWN_BIAS), dadded, a->active, c.n,
                                   d.FF, d.C);
    s->ops->linear_backward_input(dactive, dadded, weight_of(s, w, DOWN_WEIGHT), c.n, d.FF, d.C, 0);
    activation_backward(s, dhidden, dactive, a->hidden, c.n, d.FF);
    s->ops->linear_backward_weight(sum_of(s, sums, GATE_WEIGHT), sum_of(s, sums, GATE_BIAS), dhidden, a->normed2, c.n,
                                   d.C, d.H);
    s->ops->linear_backward_input(dnormed, dhidden, weight_of(s, w, GATE_WEIGHT), c.n, d.C, d.H, 0);
    norm_backward(s, dx, sum_of(s, sums, NORM2_WEIGHT), sum_of(s, sums, NORM2_BIAS), dnormed, a->y,
                  weight_of(s, w, NORM2_WEIGHT), c.n, 1);
}

// dnormed1[n,C] = the part of the first norm's gradient that comes through the queries
static inline void attention_backward(StreamBP *s, size_t l, Chunk c, char *w, GroupSums sums, const Activations *a,
                                      const Stored *dx, Stored *dnormed1) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dattended = push_stored(s, SHARE_WORKSPACE, "gradient of attention output", c.n * d.Q);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    const Stored *dadded;
    dadded = added_backward(s, c, w, sums, POST_NORM1, a->added1, dx);
    s->ops->linear_backward_weight(sum_of(s, sums, O_WEIGHT), sum_of(s, sums, O_BIAS), dadded, a->attended, c.n, d.Q,
                                   d.C);
    s->ops->linear_backward_input(dattended, dadded, weight_of(s, w, O_WEIGHT), c.n, d.Q, d.C, 0);
    s->ops->attention_backward(dq, s->kv.dk, s->kv.dv, dattended, a->attended, a->q, layer_keys(s, s->kv.k, l),
                               layer_keys(s, s->kv.v, l), a->lse, layer_spans(s, l, c), d.NH, d.NKV, d.HD,
                               attention_scale(s->model, l), scratch);
    norm_rotated_backward(s, l, dq, sum_of(s, sums, Q_NORM), a->q_linear, weight_of(s, w, Q_NORM), c, d.NH);
    s->ops->linear_backward_weight(sum_of(s, sums, Q_WEIGHT), sum_of(s, sums, Q_BIAS), dq, a->normed1, c.n, d.C, d.Q);
    s->ops->linear_backward_input(dnormed1, dq, weight_of(s, w, Q_WEIGHT), c.n, d.C, d.Q, 0);
    arena_pop(s->arena, mark);
}

static inline void kv_backward(StreamBP *s, size_t l, Chunk c, char *w, GroupSums sums, const Activations *a,
                               Stored *dx, Stored *dnormed1) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Stored *dkv = push_stored(s, SHARE_WORKSPACE, "gradient of keys or values", c.n * d.KV);
    Stored *k_linear = NULL; // chunk c's keys before QK-norm, projected again where they were not kept
    if (d.qk_norm && s->kv.k_linear) {
        k_linear = key_value_at(s, s->kv.k_linear, l, c.begin);
    } else if (d.qk_norm) {
        k_linear = push_stored(s, SHARE_WORKSPACE, "keys before QK-norm", c.n * d.KV);
        s->ops->linear_forward(k_linear, a->normed1, weight_of(s, w, K_WEIGHT), weight_of(s, w, K_BIAS), NULL, c.n, d.C,
                               d.KV);
    }
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dk, l, c.begin), c.n * d.KV);
    norm_rotated_backward(s, l, dkv, sum_of(s, sums, K_NORM), k_linear, weight_of(s, w, K_NORM), c, d.NKV);
    s->ops->linear_backward_weight(sum_of(s, sums, K_WEIGHT), sum_of(s, sums, K_BIAS), dkv, a->normed1, c.n, d.C, d.KV);
    s->ops->linear_backward_input(dnormed1, dkv, weight_of(s, w, K_WEIGHT), c.n, d.C, d.KV, 1);
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dv, l, c.begin), c.n * d.KV);
    s->ops->linear_backward_weight(sum_of(s, sums, V_WEIGHT), sum_of(s, sums, V_BIAS), dkv, a->normed1, c.n, d.C, d.KV);
    s->ops->linear_backward_input(dnormed1, dkv, weight_of(s, w, V_WEIGHT), c.n, d.C, d.KV, 1);
    norm_backward(s, dx, sum_of(s, sums, NORM1_WEIGHT), sum_of(s, sums, NORM1_BIAS), dnormed1,
                  input_load(&s->memory, l, c.begin), weight_of(s, w, NORM1_WEIGHT), c.n, 1);
    arena_pop(s->arena, mark);
}

// ---- the head -----------------------------------------------------------------------------------------------------------------
typedef struct {
    const Stored *norm, *norm_bias; // [C] the final norm; norm_bias NULL with RMSNorm
    const Stored *matrix;           // [V,C]
    Stored *normed;                 // [n,C]
    Stored *logits;                 // [n,V]
} HeadStep;

// x_L of chunk c -> its logits, pushed.
static inline HeadStep head_forward(StreamBP *s, Chunk c, char *w) {
    Shapes d = shapes_of(s->model);
    HeadStep h;
    h.norm = (const Stored *)w;
    h.norm_bias = s->model->model_offset[FINAL_NORM_BIAS] == ABSENT ? NULL : (const Stored *)at(w, d.C, d.stored);
    h.matrix = (const Stored *)at(s->memory.weights, model_head_offset(s->model), d.stored);
    h.normed = push_stored(s, SHARE_LOGITS, "final norm", c.n * d.C);
    h.logits = push_stored(s, SHARE_LOGITS, "logits", c.n * d.V);
    norm_forward(s, h.normed, input_load(&s->memory, d.L, c.begin), h.norm, h.norm_bias, c.n);
    s->ops->linear_forward(h.logits, h.normed, h.matrix, NULL, NULL, c.n, d.C, d.V);
    return h;
}

// Log-probabilities of chunk c's targets; with sums also dW, and the gradient of x_L[c] over x_L[c].
static inline void head_step(StreamBP *s, Chunk c, char *w, const GroupSums *sums) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    HeadStep h = head_forward(s, c, w);
    s->ops->logprob((Summed *)at(s->logp, c.begin, d.summed), NULL, h.logits, s->targets + c.begin,
                    sums ? (Summed *)at(s->token_weight, c.begin, d.summed) : NULL, c.n, d.V, 1.0);
    if (sums) {
        Stored *x = input_load(&s->memory, d.L, c.begin), *dlogits = h.logits, *dnormed = h.normed;
        s->ops->linear_backward_weight(sums->head, NULL, dlogits, h.normed, c.n, d.C, d.V);
        s->ops->linear_backward_input(dnormed, dlogits, h.matrix, c.n, d.C, d.V, 0);
        norm_backward(s, x, sums->norm, h.norm_bias ? (Summed *)at(sums->norm, d.C, d.summed) : NULL, dnormed, x,
                      h.norm, c.n, 0);
    }
    arena_pop(s->arena, mark);
}

static inline void head(StreamBP *s, int backward) {
    size_t size = effective_chunk(s, s->logits_chunk), i;
    char *w = weights_acquire(&s->memory, GROUP_HEAD);
    GroupSums sums = {NULL, NULL, NULL};
    s->layers_repeat = 1;
    if (backward) sums = grads_acquire(&s->memory, GROUP_HEAD);
    for (i = 0; i < chunk_visits(s, size); i++) head_step(s, chunk_visit(s, i, size), w, backward ? &sums : NULL);
    if (backward) grads_release(&s->memory, GROUP_HEAD, sums);
    weights_release(&s->memory, GROUP_HEAD);
}

// ---- the embedding --------------------------------------------------------------------------------------------------------------
static inline void embedding_step(StreamBP *s, Chunk c, char *w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w, position, d.stored);
    s->ops->embedding_forward(input_save(&s->memory, 0, c.begin), s->tokens + c.begin, s->position + c.begin,
                              (const Stored *)w, wpe, c.n, d.C, d.embedding_scale);
}

static inline void embedding_forward(StreamBP *s) {
    size_t size = effective_chunk(s, s->chunk), i;
    char *w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    s->layers_repeat = 1;
    for (i = 0; i < chunk_visits(s, size); i++) embedding_step(s, chunk_visit(s, i, size), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

static inline void table_backward(StreamBP *s, ModelTensor table, const int32_t *index, size_t rows) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(s->N, rows, d.C));
    s->ops->embedding_backward(gradient_of_table(&s->memory, table), s->memory.gradient_type,
                               input_load(&s->memory, d.L, 0), index, s->N, rows, d.C,
                               table == EMBEDDING ? d.embedding_scale : 1, scratch);
    arena_pop(s->arena, mark);
}

// ---- methods ----------------------------------------------------------------------------------------------------------------------
static inline void layer_chunk_forward(StreamBP *s, size_t l, Chunk c, char *w) {
    size_t mark = arena_mark(s->arena);
    Activations a;
    if (s->kept.normed1)
        a = kept_activations(s, l);
    else
        push_attention_activations(s, &a, c.n), push_mlp_activations(s, &a, c.n);
    first_norm(s, l, c, w, &a);
    kv_project(s, l, c, w, &a);
    attention_forward(s, l, c, w, &a);
    mlp_forward(s, l, c, w, &a);
    arena_pop(s->arena, mark);
}

static inline void layers_forward(StreamBP *s) {
    size_t size = effective_chunk(s, s->chunk), visit, i;
    for (visit = 0; visit < layer_visits(s); visit++) {
        size_t l = layer_visit(s, visit);
        char *w = weights_acquire(&s->memory, l);
        s->kv.first = 0;
        for (i = 0; i < chunk_visits(s, size); i++) {
            Chunk c = chunk_visit(s, i, size);
            if (layer_slides(s, l)) window_advance(s, c);
            layer_chunk_forward(s, l, c, w);
        }
        weights_release(&s->memory, l);
    }
}

// K and V again, once per pass: of c alone ...
static inline void chunk_kv_project(StreamBP *s, size_t l, Chunk c, char *w) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    Activations a;
    a.normed1 = push_stored(s, SHARE_WORKSPACE, "first norm", c.n * d.C);
    first_norm(s, l, c, w, &a);
    kv_project(s, l, c, w, &a);
    arena_pop(s->arena, mark);
}

// ... of a whole layer, ...
static inline void layer_kv_project(StreamBP *s, size_t l, char *w, size_t size) {
    size_t i;
    for (i = 0; i < chunk_visits(s, size); i++) chunk_kv_project(s, l, chunk_visit(s, i, size), w);
}

// ... or of a layer with a window what chunk c sees and the chunk after it did not: the window slides backwards, and dK, dV with
// it. At the last chunk there is nothing yet (kv.first is the stream's end).
static inline void window_retreat(StreamBP *s, size_t l, Chunk c, char *w, size_t size) {
    Shapes d = shapes_of(s->model);
    const size_t first = first_key(0, c.begin, window_of_model(&s->model->config));
    const size_t known = min_size(s->kv.first, c.begin + c.n);
    Chunk piece = c;
    slide_keys(s, l, first, c.begin + c.n);
    s->kv.first = first;
    s->ops->zero(s->kv.dk, (known - first) * d.KV * d.summed);
    s->ops->zero(s->kv.dv, (known - first) * d.KV * d.summed);
    if (s->dry) { // as many as c has, each once: which ones does not matter
        chunk_kv_project(s, l, c, w);
        return;
    }
    for (piece.begin = first; piece.begin < known; piece.begin += piece.n) {
        piece.n = min_size(size, known - piece.begin);
        chunk_kv_project(s, l, piece, w);
    }
}

static inline void layer_chunk_backward(StreamBP *s, size_t l, Chunk c, char *w, GroupSums sums) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena), mlp_mark;
    Stored *dx = input_load(&s->memory, d.L, c.begin), *dnormed1; // dx lives where x_L was
    Activations a;
    int recompute = !s->kept.normed1;
    if (recompute)
        push_attention_activations(s, &a, c.n);
    else
        a = kept_activations(s, l);
    if (recompute) {
        first_norm(s, l, c, w, &a);
        attention_forward(s, l, c, w, &a);
    }
    mlp_mark = arena_mark(s->arena);
    if (recompute) {
        push_mlp_activations(s, &a, c.n);
        mlp_activate(s, c, w, &a);
    }
    mlp_backward(s, c, w, sums, &a, dx);
    arena_pop(s->arena, mlp_mark);
    dnormed1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    attention_backward(s, l, c, w, sums, &a, dx, dnormed1);
    kv_backward(s, l, c, w, sums, &a, dx, dnormed1);
    arena_pop(s->arena, mark);
}

static inline void layers_backward(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    size_t size = effective_chunk(s, s->chunk), visit, i, mark = arena_mark(s->arena);
    size_t rows = s->kv.rows[layers_with_window(&s->model->config) == d.L];
    s->kv.dk = push_summed(s, SHARE_KV, "gradient of keys of one layer", rows * d.KV);
    s->kv.dv = push_summed(s, SHARE_KV, "gradient of values of one layer", rows * d.KV);
    for (visit = layer_visits(s); visit-- > 0;) {
        size_t l = layer_visit(s, visit);
        char *w = weights_acquire(&s->memory, l);
        GroupSums sums = grads_acquire(&s->memory, l);
        int slides = layer_slides(s, l);
        s->kv.first = slides ? s->N : 0;
        if (!slides) {
            s->ops->zero(s->kv.dk, s->N * d.KV * d.summed);
            s->ops->zero(s->kv.dv, s->N * d.KV * d.summed);
            if (!s->kept.normed1) layer_kv_project(s, l, w, size);
        }
        for (i = chunk_visits(s, size); i-- > 0;) {
            Chunk c = chunk_visit(s, i, size);
            if (slides) window_retreat(s, l, c, w, size);
            layer_chunk_backward(s, l, c, w, sums);
        }
        grads_release(&s->memory, l, sums);
        weights_release(&s->memory, l);
    }
    arena_pop(s->arena, mark);
}

// ---- one stream through the model ---------------------------------------------------------------------------------------------------
// Z normalises the loss: the counted targets of the whole accumulated batch.
static inline void stream_begin(StreamBP *s, const Batch *batch, double Z) {
    DType summed = dtype_of_sums(s->model->dtype);
    size_t N = batch->N;
    s->batch = batch, s->N = N;
    s->tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", N, sizeof(int32_t));
    s->targets = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "targets", N, sizeof(int32_t));
    s->position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", N, sizeof(int32_t));
    s->token_weight = push_summed(s, SHARE_WORKSPACE, "token weights", N);
    s->logp = push_summed(s, SHARE_WORKSPACE, "log-probabilities", N);
    if (s->dry) return;
    if (N > s->host_tokens || batch->documents > s->host_documents)
        die("a stream of %zu tokens in %zu documents, but the run was set up for %zu in %zu", N, batch->documents,
            s->host_tokens, s->host_documents);
    objective_weights(&s->objective, batch, Z, 0, N, NULL, s->host_sums, summed);
    s->ops->copy_in(s->tokens, batch->tokens, N * sizeof(int32_t));
    s->ops->copy_in(s->targets, batch->targets, N * sizeof(int32_t));
    s->ops->copy_in(s->position, batch->position, N * sizeof(int32_t));
    s->ops->copy_in(s->token_weight, s->host_sums, N * dtype_size(summed));
}

static inline double stream_loss(StreamBP *s, double Z) {
    DType summed = dtype_of_sums(s->model->dtype);
    if (s->dry) return 0;
    s->ops->copy_out(s->host_sums, s->logp, s->N * dtype_size(summed));
    return objective_loss(&s->objective, s->batch, Z, s->host_sums, NULL, summed, NULL);
}

// The loss of one stream (its share of the accumulated batch's); gradients are added to the stored ones.
static inline double forward_backward(StreamBP *s, const Batch *batch, double Z) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena), kv_mark;
    int full = s->method == METHOD_FULL;
    double loss;
    stream_begin(s, batch, Z);
    push_inputs(s, s->N, 1);
    memset(&s->kept, 0, sizeof(s->kept));
    if (full) {
        push_attention_activations(s, &s->kept, d.L * s->N);
        push_mlp_activations(s, &s->kept, d.L * s->N);
    }
    kv_mark = arena_mark(s->arena);
    push_key_value(s, full ? d.L : 1, s->N, effective_chunk(s, s->chunk), full && d.qk_norm);
    embedding_forward(s);
    layers_forward(s);
    if (!full) arena_pop(s->arena, kv_mark); // K, V of the last layer die: the head takes their place
    head(s, 1);
    loss = stream_loss(s, Z);
    if (!full) push_key_value(s, 1, s->N, effective_chunk(s, s->chunk), 0);
    layers_backward(s);
    arena_pop(s->arena, kv_mark);
    s->layers_repeat = 1;
    table_backward(s, EMBEDDING, s->tokens, d.V);
    if (!d.rotary) table_backward(s, POSITION_EMBEDDING, s->position, s->model->config.max_position_embeddings);
    arena_pop(s->arena, mark);
    return loss;
}

// The loss alone: layer inputs are overwritten layer by layer, so memory does not grow with L.
static inline double forward_only(StreamBP *s, const Batch *batch, double Z) {
    size_t mark = arena_mark(s->arena), kv_mark;
    double loss;
    Method method = s->method;
    if (method == METHOD_FULL) s->method = METHOD_CHECKPOINT; // nothing is kept either way
    stream_begin(s, batch, Z);
    push_inputs(s, s->N, 0);
    memset(&s->kept, 0, sizeof(s->kept));
    kv_mark = arena_mark(s->arena);
    push_key_value(s, 1, s->N, effective_chunk(s, s->chunk), 0);
    embedding_forward(s);
    layers_forward(s);
    arena_pop(s->arena, kv_mark);
    head(s, 0);
    loss = stream_loss(s, Z);
    arena_pop(s->arena, mark);
    s->method = method;
    return loss;
}

// ---- generation: chunks outermost, so that a chunk visits every layer before the next one comes; K and V of all layers are
// kept (the key/value cache), of the residual stream one chunk. Alive between two streams, never during one. -------------------
// The cache is a stream of `slots` documents of `capacity` tokens each: slot b is tokens [b * capacity, (b + 1) * capacity). Where there
// are several, `slots` more tokens behind them are where a step has what it computes, a row for each slot that takes part, before
// keys and values go to their slots. One slot is a text on its own: layers with a window slide along it; several hold all of theirs.
typedef struct {
    size_t slots, capacity; // documents side by side, tokens that fit into each
    size_t tokens;          // of the stream
    size_t chunk;           // the most that one cache_feed takes
    size_t mark;            // of the arena, before
    Chunk last;             // what was fed last: the tokens whose logits can be had
    Batch documents;
    size_t *used;                      // [slots] tokens that are there
    int32_t *position;                 // [capacity] 0, 1, 2, ...; NULL in a plan
    int32_t *step_position, *step_row; // [slots] of a step
    int32_t *row;                      // [slots] the same; device
} Cache;

// Its shape, with the host memory of a step.
static inline void cache_shape(Cache *cache, size_t slots, size_t capacity) {
    size_t b;
    memset(cache, 0, sizeof(*cache));
    if (!slots || !capacity || capacity > ((size_t)INT32_MAX - slots) / slots)
        die("a key/value cache of %zu texts of %zu tokens is more than can be indexed; take fewer or shorter ones",
            slots, capacity);
    cache->slots = slots, cache->capacity = capacity, cache->tokens = slots * capacity + (slots > 1 ? slots : 0);
    cache->documents.N = cache->tokens, cache->documents.documents = slots;
    cache->documents.document_start =
        (size_t *)checked_calloc(slots + 1, sizeof(size_t), "the documents of a key/value cache");
    cache->used = (size_t *)checked_calloc(slots, sizeof(size_t), "the lengths of texts");
    cache->step_position = (int32_t *)checked_calloc(slots, sizeof(int32_t), "positions to sample at");
    cache->step_row = (int32_t *)checked_calloc(slots, sizeof(int32_t), "rows to sample at");
    for (b = 0; b <= slots; b++) cache->documents.document_start[b] = b * capacity;
}

// Host memory, which outlives the cache on the arena.
static inline void cache_allocate(Cache *cache, size_t slots, size_t capacity) {
    size_t t;
    cache_shape(cache, slots, capacity);
    cache->position = (int32_t *)checked_calloc(capacity, sizeof(int32_t), "positions to sample at");
    for (t = 0; t < capacity; t++) cache->position[t] = (int32_t)t;
}

static inline void cache_free(Cache *cache) {
    free(cache->documents.document_start), free(cache->used);
    free(cache->position), free(cache->step_position), free(cache->step_row);
    memset(cache, 0, sizeof(*cache));
}

static inline void cache_begin(Cache *cache, StreamBP *s) {
    size_t b;
    cache->mark = arena_mark(s->arena);
    cache->chunk = min_size(s->chunk, cache->capacity);
    memset(cache->used, 0, cache->slots * sizeof(size_t));
    memset(&s->kept, 0, sizeof(s->kept));
    s->batch = &cache->documents, s->N = cache->tokens;
    s->layers_repeat = 1;
    push_key_value(s, s->model->config.num_hidden_layers, cache->tokens,
                   cache->slots > 1 ? cache->tokens : cache->chunk, 0);
    push_inputs(s, max_size(cache->chunk, cache->slots), 0);
    s->tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", cache->tokens, sizeof(int32_t));
    s->position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", cache->tokens, sizeof(int32_t));
    cache->row = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "rows of a step", cache->slots, sizeof(int32_t));
    for (b = 0; b < cache->slots; b++)
        s->ops->copy_in(s->position + b * cache->capacity, cache->position, cache->capacity * sizeof(int32_t));
}

// A step's keys and values, to the rows of their slots.
static inline void keys_scatter(Cache *cache, StreamBP *s, size_t l, Chunk c) {
    Shapes d = shapes_of(s->model);
    s->ops->scatter_rows(layer_keys(s, s->kv.k, l), key_value_at(s, s->kv.k, l, c.begin), cache->row, c.n, d.KV);
    s->ops->scatter_rows(layer_keys(s, s->kv.v, l), key_value_at(s, s->kv.v, l, c.begin), cache->row, c.n, d.KV);
}

// Tokens (host) of chunk c through every layer. Afterwards `inputs` holds x_L of these.
static inline void cache_forward(Cache *cache, StreamBP *s, const int32_t *tokens, Chunk c, int scatter) {
    size_t visit;
    char *w;
    s->memory.input_begin = c.begin;
    s->ops->copy_in(s->tokens + c.begin, tokens, c.n * sizeof(int32_t));
    w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, c, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    for (visit = 0; visit < layer_visits(s); visit++) {
        size_t l = layer_visit(s, visit), mark = arena_mark(s->arena);
        Activations a;
        w = weights_acquire(&s->memory, l);
        push_attention_activations(s, &a, c.n), push_mlp_activations(s, &a, c.n);
        first_norm(s, l, c, w, &a);
        kv_project(s, l, c, w, &a);
        if (scatter) keys_scatter(cache, s, l, c);
        attention_forward(s, l, c, w, &a);
        mlp_forward(s, l, c, w, &a);
        arena_pop(s->arena, mark);
        weights_release(&s->memory, l);
    }
}

// n <= chunk further tokens (host) of one slot.
static inline void cache_feed(Cache *cache, StreamBP *s, size_t slot, const int32_t *tokens, size_t n) {
    Chunk c = chunk_of(s, slot * cache->capacity + cache->used[slot], n);
    window_advance(s, c);
    cache_forward(cache, s, tokens, c, 0);
    cache->used[slot] += n;
    cache->last = c;
    cache->last.begin = c.begin + n - 1, cache->last.n = 1;
}

// One further token (host) of each of n different slots: products of n rows, and for each slot attention to its own keys.
static inline void cache_step(Cache *cache, StreamBP *s, const size_t *slot, const int32_t *tokens, size_t n) {
    const size_t window = window_of_model(&s->model->config);
    Chunk c = {cache->slots * cache->capacity, n, {s->span, 0, 0, 0}, 0};
    size_t i;
    if (cache->slots == 1) {
        cache_feed(cache, s, slot[0], tokens, n);
        return;
    }
    for (i = 0; i < n; i++) {
        size_t position = cache->used[slot[i]]++;
        Span *span = &s->span[i];
        span->document = slot[i] * cache->capacity;
        span->begin = span->document + position, span->end = span->begin + 1, span->row = i;
        cache->step_position[i] = (int32_t)position, cache->step_row[i] = (int32_t)span->begin;
        c.spans.pairs += query_key_pairs(position, position + 1, 0);
        c.window_pairs += query_key_pairs(position, position + 1, window);
    }
    c.spans.count = n;
    s->ops->copy_in(s->position + c.begin, cache->step_position, n * sizeof(int32_t));
    s->ops->copy_in(cache->row, cache->step_row, n * sizeof(int32_t));
    cache_forward(cache, s, tokens, c, 1);
    cache->last = c;
}

// Whether a slot still has the keys and values of its first tokens when later ones have come.
static inline int cache_keeps_all(const StreamBP *s) { return s->kv.rows[1] == s->kv.rows[0]; }

// Slot `to` becomes a document of the first n tokens of slot `from`, which may be the same (where cache_keeps_all).
static inline void cache_copy(Cache *cache, StreamBP *s, size_t from, size_t to, size_t n) {
    Shapes d = shapes_of(s->model);
    size_t source = from * cache->capacity, target = to * cache->capacity, bytes = n * d.KV * d.stored, l;
    for (l = 0; l < d.L && from != to; l++) {
        s->ops->copy(key_value_at(s, s->kv.k, l, target), key_value_at(s, s->kv.k, l, source), bytes);
        s->ops->copy(key_value_at(s, s->kv.v, l, target), key_value_at(s, s->kv.v, l, source), bytes);
    }
    cache->used[to] = n;
}

// A slot becomes empty.
static inline void cache_clear(Cache *cache, StreamBP *s, size_t slot) {
    cache->used[slot] = 0;
    if (cache->slots == 1) s->kv.first = 0;
}

// logits[n,V], as they are stored, of the last token that cache_feed was given (n = 1), or of the n of the last cache_step; host
static inline void cache_logits(Cache *cache, StreamBP *s, void *logits) {
    const size_t row = s->model->config.vocab_size * dtype_size(s->model->dtype);
    char *w = weights_acquire(&s->memory, GROUP_HEAD);
    size_t done;
    Chunk c = cache->last;
    for (done = 0; done < cache->last.n; done += c.n) {
        size_t mark = arena_mark(s->arena);
        c.begin = cache->last.begin + done, c.n = min_size(s->logits_chunk, cache->last.n - done);
        s->ops->copy_out((char *)logits + done * row, head_forward(s, c, w).logits, c.n * row);
        arena_pop(s->arena, mark);
    }
    weights_release(&s->memory, GROUP_HEAD);
}

static inline void cache_end(Cache *cache, StreamBP *s) { arena_pop(s->arena, cache->mark); }

// What a plan visits of all this: the longest chunk, a single token, a step of all slots, and the logits of the last.
static inline void cache_walk(StreamBP *s, size_t slots, size_t capacity) {
    Cache cache;
    size_t *slot = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of a plan"), b;
    for (b = 0; b < slots; b++) slot[b] = b;
    cache_shape(&cache, slots, capacity);
    cache_begin(&cache, s);
    cache_feed(&cache, s, 0, NULL, cache.chunk);
    if (cache.used[0] < capacity) cache_feed(&cache, s, 0, NULL, 1);
    cache_clear(&cache, s, 0);
    if (slots > 1) cache_step(&cache, s, slot, NULL, slots);
    cache_logits(&cache, s, NULL);
    cache_end(&cache, s);
    cache_free(&cache);
    free(slot);
}

#endif
