/*
The state of streamed backpropagation and the vocabulary of its steps: shapes, chunks and their spans, the activations of a
chunk, keys and values of a layer, and the pushes on the arena that make room for them. streambp.h is the algorithm over this.

A plan runs the algorithm with `dry` set: loops then visit one layer and one chunk of each length, and op set "dry"
multiplies what it counts by how many they stand for.
*/
#ifndef LLMC_STREAM_H
#define LLMC_STREAM_H
#include "objective.h"
#include "ops_dry.h"
#include "residency.h"

typedef enum { METHOD_STREAM, METHOD_CHECKPOINT, METHOD_FULL } Method;

typedef struct {
    size_t begin, n; // tokens [begin, begin + n) of the stream
    Spans spans;
} Chunk;

// What one chunk's forward leaves for its backward. With method full one set for each layer, n = N.
typedef struct {
    Stored *normed1;  // [n,C]      norm of x_l
    Stored *q_linear; // [n,NH*HD]  queries before QK-norm; NULL without QK-norm
    Stored *q;        // [n,NH*HD]  after QK-norm and RoPE
    Stored *attended; // [n,NH*HD]  attention's output
    Summed *lse;      // [n,NH]     log-sum-exp of its scores
    Stored *y;        // [n,C]      x_l + attention part
    Stored *normed2;  // [n,C]      norm of y
    Stored *hidden;   // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *active;   // [n,FF]     after the activation
} Activations;

// Keys and values of the tokens 0..N-1 of one layer, or of every layer where `stride` is not 0.
typedef struct {
    Stored *k, *v;    // [N,NKV*HD]  after QK-norm and RoPE
    Stored *k_linear; // [N,NKV*HD]  before QK-norm: kept by method full only
    Summed *dk, *dv;  // [N,NKV*HD]
    size_t stride;    // elements from layer to layer, 0: one layer's at a time
} KeyValue;

typedef struct {
    const Model *model;
    const Ops *ops;
    Arena *arena;
    Residency memory;
    Method method;
    size_t chunk, logits_chunk; // as asked for; the stream's length caps them
    int dry;                    // a plan: loops visit each distinct shape once

    // The stream at hand: host side
    const Batch *batch;
    size_t N;
    Span *span;                         // [documents], of the chunk being visited
    void *host_sums;                    // [N] Summed: on the way in dL/dlogp, on the way out the log-probabilities
    size_t host_tokens, host_documents; // what these two have room for
    // and on the device, [N] each
    int32_t *tokens, *targets, *position;
    Summed *token_weight; // dL/dlogp
    Summed *logp;
    float *inverse_frequency; // [HD/2]

    KeyValue kv;
    Activations kept; // method full: of layer 0, those of layer l lie l * N rows further
    double layers_repeat;
} StreamBP;

// ---- shapes ---------------------------------------------------------------------------------------------------------------
typedef struct {
    size_t C, NH, NKV, HD, FF, H, V, L, Q, KV; // Q = NH*HD, KV = NKV*HD, H = width of the MLP's first product
    size_t stored, summed;                     // element sizes
    int gated, qk_norm, rotary;
    double scale;
} Shapes;

static inline Shapes shapes_of(const Model *model) {
    const Config *c = &model->config;
    Shapes s;
    s.C = c->hidden_size, s.NH = c->num_attention_heads, s.NKV = c->num_key_value_heads, s.HD = c->head_dim;
    s.FF = c->intermediate_size, s.V = c->vocab_size, s.L = c->num_hidden_layers;
    s.Q = s.NH * s.HD, s.KV = s.NKV * s.HD;
    s.gated = c->family->activation == ACTIVATION_SWIGLU;
    s.H = s.gated ? 2 * s.FF : s.FF;
    s.qk_norm = c->family->qk_norm, s.rotary = !c->family->learned_positions;
    s.stored = dtype_size(model->dtype), s.summed = dtype_size(dtype_of_sums(model->dtype));
    s.scale = 1.0 / sqrt((double)s.HD);
    return s;
}

static inline Stored *push_stored(StreamBP *s, Share share, const char *name, size_t count) {
    return (Stored *)arena_push(s->arena, share, name, count, dtype_size(s->model->dtype));
}

static inline Summed *push_summed(StreamBP *s, Share share, const char *name, size_t count) {
    return (Summed *)arena_push(s->arena, share, name, count, dtype_size(dtype_of_sums(s->model->dtype)));
}

// A layer's tensor, from the layer's first element; NULL where the family has none.
static inline const Stored *weight_of(const StreamBP *s, char *layer, LayerTensor tensor) {
    size_t offset = s->model->layer_offset[tensor];
    return offset == ABSENT ? NULL : (const Stored *)at(layer, offset, dtype_size(s->model->dtype));
}

static inline Summed *sum_of(const StreamBP *s, GroupSums sums, LayerTensor tensor) {
    size_t offset = s->model->layer_offset[tensor];
    return offset == ABSENT ? NULL : (Summed *)at(sums.layer, offset, dtype_size(dtype_of_sums(s->model->dtype)));
}

// ---- chunks and layers to visit -----------------------------------------------------------------------------------------
static inline size_t effective_chunk(const StreamBP *s, size_t chunk) {
    return s->method == METHOD_STREAM ? min_size(chunk, s->N) : s->N;
}

// How many chunks of `size` a loop visits: all of them, or in a plan one of each length. No chunk is empty, nor is a stream.
static inline size_t chunk_visits(const StreamBP *s, size_t size) {
    // NOLINTBEGIN(clang-analyzer-core.DivideZero)
    if (s->dry) return s->N % size && s->N > size ? 2 : 1;
    return (s->N + size - 1) / size;
    // NOLINTEND(clang-analyzer-core.DivideZero)
}

static inline size_t layer_visits(const StreamBP *s) { return s->dry ? 1 : s->model->config.num_hidden_layers; }

static inline double causal_pairs(size_t first, size_t end) { // sum of 1..end less sum of 1..first
    return 0.5 * ((double)end * ((double)end + 1) - (double)first * ((double)first + 1));
}

// The documents' parts within [begin, begin + n).
static inline Spans spans_of(StreamBP *s, size_t begin, size_t n) {
    const size_t *start = s->batch->document_start;
    size_t low = 0, high = s->batch->documents, end = begin + n;
    Spans spans = {s->span, 0, 0};
    while (high - low > 1) { // the last document that begins at or before `begin`
        size_t middle = low + (high - low) / 2;
        if (start[middle] <= begin)
            low = middle;
        else
            high = middle;
    }
    for (; low < s->batch->documents && start[low] < end; low++) {
        Span *span = &s->span[spans.count];
        span->document = start[low];
        span->begin = max_size(start[low], begin), span->end = min_size(start[low + 1], end);
        if (span->begin == span->end) continue; // an empty document
        spans.pairs += causal_pairs(span->begin - span->document, span->end - span->document);
        spans.count++;
    }
    return spans;
}

// The index-th visit of a loop over chunks of `size`. In a plan the first stands for all whole chunks.
static inline Chunk chunk_visit(StreamBP *s, size_t index, size_t size) {
    Chunk c;
    size_t whole = s->N / size, d;
    double repeat = 1;
    c.begin = s->dry && index ? whole * size : index * size;
    c.n = min_size(size, s->N - c.begin);
    c.spans = spans_of(s, c.begin, c.n);
    if (s->dry && index == 0 && whole > 1) { // pairs: the mean over the whole chunks
        double pairs = 0;
        for (d = 0; d < s->batch->documents; d++)
            pairs += causal_pairs(0, s->batch->document_start[d + 1] - s->batch->document_start[d]);
        if (s->N % size) pairs -= chunk_visit(s, 1, size).spans.pairs;
        c.spans = spans_of(s, c.begin, c.n);
        repeat = (double)whole;
        c.spans.pairs = pairs / repeat;
    }
    s->ops->repeat(s->layers_repeat * repeat);
    return c;
}

// ---- norms, of either kind --------------------------------------------------------------------------------------------------
static inline void norm_forward(StreamBP *s, Stored *out, const Stored *x, const Stored *w, const Stored *b, size_t n) {
    const Config *config = &s->model->config;
    if (config->family->norm == NORM_RMS)
        s->ops->rmsnorm_forward(out, x, w, n, config->hidden_size, config->norm_eps);
    else
        s->ops->layernorm_forward(out, x, w, b, n, config->hidden_size, config->norm_eps);
}

static inline void norm_backward(StreamBP *s, Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x,
                                 const Stored *w, size_t n, int accumulate) {
    const Config *config = &s->model->config;
    size_t C = config->hidden_size, mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "norm scratch", s->ops->norm_backward_scratch(n, C));
    if (config->family->norm == NORM_RMS)
        s->ops->rmsnorm_backward(dx, dw, dout, x, w, n, C, config->norm_eps, accumulate, scratch);
    else
        s->ops->layernorm_backward(dx, dw, db, dout, x, w, n, C, config->norm_eps, accumulate, scratch);
    arena_pop(s->arena, mark);
}

// Gradient through RoPE and QK-norm of [n,heads,HD], in place. linear: the values before QK-norm.
static inline void rotated_norm_backward(StreamBP *s, Stored *dx, Summed *dnorm, const Stored *linear,
                                         const Stored *norm, Chunk c, size_t heads) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena), rows = c.n * heads;
    if (d.rotary) s->ops->rope_backward(dx, s->position + c.begin, s->inverse_frequency, c.n, heads, d.HD);
    if (d.qk_norm) {
        Summed *scratch = push_summed(s, SHARE_WORKSPACE, "norm scratch", s->ops->norm_backward_scratch(rows, d.HD));
        s->ops->rmsnorm_backward(dx, dnorm, dx, linear, norm, rows, d.HD, s->model->config.norm_eps, 0, scratch);
    }
    arena_pop(s->arena, mark);
}

// ---- activations: pushed for a chunk, or kept for every layer ---------------------------------------------------------------
static inline void push_attention_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->normed1 = push_stored(s, SHARE_WORKSPACE, "first norm", n * d.C);
    a->q_linear = d.qk_norm ? push_stored(s, SHARE_WORKSPACE, "queries before QK-norm", n * d.Q) : NULL;
    a->q = push_stored(s, SHARE_WORKSPACE, "queries", n * d.Q);
    a->attended = push_stored(s, SHARE_WORKSPACE, "attention output", n * d.Q);
    a->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp", n * d.NH);
    a->y = push_stored(s, SHARE_WORKSPACE, "after attention", n * d.C);
}

static inline void push_mlp_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->normed2 = push_stored(s, SHARE_WORKSPACE, "second norm", n * d.C);
    a->hidden = push_stored(s, SHARE_WORKSPACE, d.gated ? "gate and up" : "before GELU", n * d.H);
    a->active = push_stored(s, SHARE_WORKSPACE, "after activation", n * d.FF);
}

// Method full: layer l's set.
static inline Activations kept_activations(StreamBP *s, size_t l) {
    Shapes d = shapes_of(s->model);
    Activations a = s->kept;
    size_t row = l * s->N;
    a.normed1 = (Stored *)at(a.normed1, row * d.C, d.stored);
    if (d.qk_norm) a.q_linear = (Stored *)at(a.q_linear, row * d.Q, d.stored);
    a.q = (Stored *)at(a.q, row * d.Q, d.stored);
    a.attended = (Stored *)at(a.attended, row * d.Q, d.stored);
    a.lse = (Summed *)at(a.lse, row * d.NH, d.summed);
    a.y = (Stored *)at(a.y, row * d.C, d.stored);
    a.normed2 = (Stored *)at(a.normed2, row * d.C, d.stored);
    a.hidden = (Stored *)at(a.hidden, row * d.H, d.stored);
    a.active = (Stored *)at(a.active, row * d.FF, d.stored);
    return a;
}

// Room for x_0..x_L of `tokens` tokens where every layer's input is kept, or for one x that layers overwrite in place.
static inline void push_inputs(StreamBP *s, size_t tokens, int every_layer) {
    Shapes d = shapes_of(s->model);
    size_t layers = every_layer ? d.L + 1 : 1;
    s->memory.inputs =
        (char *)push_stored(s, SHARE_LAYER_INPUTS, every_layer ? "layer inputs" : "layer input", layers * tokens * d.C);
    s->memory.input_stride = every_layer ? tokens * d.C : 0;
    s->memory.input_begin = 0;
}

static inline Stored *key_value_at(StreamBP *s, Stored *base, size_t l, size_t token) {
    Shapes d = shapes_of(s->model);
    return (Stored *)at(base, l * s->kv.stride + token * d.KV, d.stored);
}

// Keys and values of `layers` layers at a time, for `tokens` tokens.
static inline void push_key_value(StreamBP *s, size_t layers, size_t tokens, int linear) {
    Shapes d = shapes_of(s->model);
    size_t count = layers * tokens * d.KV;
    memset(&s->kv, 0, sizeof(s->kv));
    s->kv.stride = layers > 1 ? tokens * d.KV : 0;
    s->kv.k = push_stored(s, SHARE_KV, layers > 1 ? "keys of all layers" : "keys of one layer", count);
    s->kv.v = push_stored(s, SHARE_KV, layers > 1 ? "values of all layers" : "values of one layer", count);
    if (linear) s->kv.k_linear = push_stored(s, SHARE_KV, "keys before QK-norm of all layers", count);
}

#endif
