/*
The state of streamed backpropagation and the vocabulary of its steps: shapes, chunks and their spans, the activations
of a chunk, keys and values of a layer, and the pushes on the arena that make room for them. streambp.h is the algorithm
over this.

Where several ranks share a stream, each owns two ranges of its tokens, one in the first half and one as far from the
end of the second, so that causal work is balanced. Whatever is per token (inputs, activations, targets) exists for the
rank's own tokens alone, one range behind the other: rows. Keys and values go by the token's place in the stream
(key_value_exchange.h brings together what ranks have made). Alone, a rank owns one range, and rows are places.

A plan runs the algorithm with `dry` set: loops then visit one layer and one chunk of each length, and op set "dry"
multiplies what it counts by how many they stand for. It stands for the rank that owns the most.
*/
#ifndef LLMC_STREAM_H
#define LLMC_STREAM_H
#include "llmc/data/objective.h"
#include "llmc/ops/ops_dry.h"
#include "residency.h"
#include "llmc/model/rope_frequency.h"

#define RANDOM_STREAM_DROPOUT 0x64726f706f7574ull // of random.h ("dropout")

typedef enum { METHOD_STREAM, METHOD_CHECKPOINT, METHOD_FULL } Method;

// Where attention's outputs stay from forward to backward (kept_attention.h).
typedef enum { KEEP_NOTHING, KEEP_ON_DEVICE, KEEP_IN_HOST_MEMORY } Keep;

typedef struct {
    size_t begin, n;     // rows [begin, begin + n) of the rank's own tokens
    size_t place;        // tokens [place, place + n) of the stream
    size_t visit;        // the number of its visit among those of a loop over all own tokens
    Spans spans;         // of layers that see everything
    double window_pairs; // of layers with a window
} Chunk;

// What one chunk's forward leaves for its backward. With method full one set for each layer, n = N.
typedef struct {
    Stored *norm1;            // [n,C]      norm of x_l
    Stored *q_linear;         // [n,NH*HD]  queries before QK-norm; NULL without QK-norm
    Stored *q;                // [n,NH*HD]  after QK-norm and RoPE
    Stored *attention_out;    // [n,NH*HD]  attention's output
    Summed *lse;              // [n,NH]     log-sum-exp of its scores
    Stored *attention_branch; // [n,C]      attention part before its post norm; NULL where there is none
    Stored *y;                // [n,C]      x_l + attention part
    Stored *norm2;            // [n,C]      norm of y
    Stored *gate_up;          // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *active;           // [n,FF]     after the activation
    Stored *mlp_branch;       // [n,C]      MLP part before its post norm; NULL where there is none
} Activations;

// Keys and values of a layer, or of every layer. A layer that sees everything holds its whole stream; one with a window
// holds the window of the chunk at hand, which slides along the stream.
typedef struct {
    Stored *k, *v;    // [rows,NKV*HD]  after QK-norm and RoPE
    Stored *k_linear; // [rows,NKV*HD]  before QK-norm: kept by method full only
    Summed *dk, *dv;  // [rows,NKV*HD]
    size_t rows[2];   // held of a layer that sees everything, of one with a window
    size_t layers;    // 1: one layer's at a time
    size_t first;     // alone: the token in row 0 of layers with a window
    Range held[2];    // of several ranks: the tokens that this one holds of layers with a window (window_range_of_rank)
} KeyValue;

// What a layer keeps of this rank's own tokens while blocks of keys pass by (ring.h)
typedef struct {
    Stored *q;              // [own_tokens,NH*HD]; NULL: the layer at hand has all its keys
    Stored *attention_out;  // [own_tokens,NH*HD]
    Stored *dattention_out; // [own_tokens,NH*HD]
    Summed *lse;            // [own_tokens,NH]
    Summed *dq;             // [own_tokens,NH*HD]
} RingLayer;

// What stays of attention from a stream's forward to its backward pass (kept_attention.h)
typedef struct {
    Stored *attention_out; // [L,own_tokens,NH*HD], on the device or in host memory; NULL: nothing stays
    Summed *lse;           // [L,own_tokens,NH]
    int backward;          // they are there
    // Of those in host memory two chunks' are on the device, by turns: chunks of even and of odd visits.
    Stored *chunk_attention_out[2]; // [chunk,NH*HD]
    Summed *chunk_lse[2];           // [chunk,NH]
    int64_t ticket[2];              // of the last transfer of each
    size_t chunk;                   // tokens
} KeptAttention;

typedef struct {
    const Model *model;
    const Ops *ops;
    Arena *arena;
    Arena host; // of host memory: what --keep-on host puts there
    Residency memory;
    Method method;
    Keep keep;
    size_t chunk, logits_chunk; // as asked for; the stream's length caps them
    int dry;                    // a plan: loops visit each distinct shape once
    Objective objective;
    double dropout; // rate of the adapters' dropout: in force in forward_backward alone
    uint64_t dropout_seed;

    // The stream at hand: host side
    const Batch *batch;
    size_t N;
    size_t ranks;                       // that share it
    Range own[2];                       // this rank's tokens of it, in rows 0, 1, ...; alone: all of it, and nothing
    size_t own_tokens;                  // of both
    Span *span;                         // [2 * documents], of the chunk being visited, then as a layer's keys lie
    double Z;                           // what its loss is divided by
    void *host_sums;                    // [N] Summed: on the way in dL/dlogp, on the way out the log-probabilities
    void *host_entropy;                 // [N] Summed; NULL where the objective does not want it
    void *host_gathered;                // [ranks + 1, most tokens of a rank] Summed; NULL alone
    size_t host_tokens, host_documents; // what these have room for
    // and on the device, [own_tokens] each
    int32_t *tokens, *targets, *position;
    Summed *token_weight; // dL/dlogp
    Summed *logp;
    Summed *entropy;             // of the distributions over the vocabulary; NULL where the objective does not want it
    float *inverse_frequency[2]; // [HD/2] of layers that see everything, of those with a window

    KeyValue kv;
    int ring; // ranks that share a stream pass blocks of keys around where a layer sees everything
    RingLayer ring_layer;
    KeptAttention kept_attention;
    Activations kept; // method full: of layer 0, those of layer l lie l * own_tokens rows further
} StreamBP;

// ---- shapes ---------------------------------------------------------------------------------------------------------
typedef struct {
    size_t C, NH, NKV, HD, FF, H, V, L, Q, KV; // Q = NH*HD, KV = NKV*HD, H = width of the MLP's first product
    size_t stored, summed;                     // element sizes
    ActivationKind activation;
    int gated, qk_norm, rotary, post_norms;
    double norm_offset, embedding_scale;
} Shapes;

static Shapes shapes_of(const Model *model) {
    const Config *c = &model->config;
    Shapes s;
    s.C = c->hidden_size, s.NH = c->num_attention_heads, s.NKV = c->num_key_value_heads, s.HD = c->head_dim;
    s.FF = c->intermediate_size, s.V = c->vocab_size, s.L = c->num_hidden_layers;
    s.Q = s.NH * s.HD, s.KV = s.NKV * s.HD;
    s.activation = c->family->activation, s.gated = s.activation != ACTIVATION_GELU;
    s.H = s.gated ? 2 * s.FF : s.FF;
    s.qk_norm = c->family->qk_norm, s.rotary = !c->family->learned_positions;
    s.stored = dtype_size(model->dtype), s.summed = dtype_size(dtype_of_sums(model->dtype));
    s.post_norms = c->family->post_norms, s.norm_offset = c->family->norm_offset;
    s.embedding_scale = c->family->scaled_embeddings ? rounded_to(model->dtype, sqrt((double)s.C)) : 1;
    return s;
}

// Of attention scores in a layer.
static double attention_scale(const Model *model, size_t l) {
    const Config *c = &model->config;
    double width = c->query_pre_attn_scalar > 0 ? c->query_pre_attn_scalar : (double)c->head_dim;
    double factor = rope_attention_factor(c, layer_window(c, l) != 0);
    return factor * factor / sqrt(width);
}

static AttentionShape attention_shape(const StreamBP *s, size_t l, Spans spans) {
    const Shapes d = shapes_of(s->model);
    const AttentionShape shape = {spans, d.NH, d.NKV, d.HD, attention_scale(s->model, l), all_keys, 0, 0};
    return shape;
}

static Stored *push_stored(StreamBP *s, Share share, const char *name, size_t count) {
    return (Stored *)arena_push(s->arena, share, name, count, dtype_size(s->model->dtype));
}

static Summed *push_summed(StreamBP *s, Share share, const char *name, size_t count) {
    return (Summed *)arena_push(s->arena, share, name, count, dtype_size(dtype_of_sums(s->model->dtype)));
}

// A layer's tensor; NULL where the family has none.
static const Stored *weight_of(const StreamBP *s, GroupWeights w, LayerTensor tensor) {
    size_t offset = s->model->layer_offset[tensor];
    return offset == ABSENT ? NULL : (const Stored *)at(w.weights, offset, dtype_size(s->model->dtype));
}

// Where its dW is summed; NULL where there is none, and where it is not trained.
static Summed *sum_of(const StreamBP *s, GroupSums sums, LayerTensor tensor) {
    size_t offset = s->model->layer_offset[tensor];
    return offset == ABSENT || s->memory.lora
               ? NULL
               : (Summed *)at(sums.layer, offset, dtype_size(dtype_of_sums(s->model->dtype)));
}

// ---- the tokens of a rank -------------------------------------------------------------------------------------------
// Which of the stream's ranks this is; in a plan the one that owns the most.
static size_t sequence_rank(const StreamBP *s) {
    if (s->ranks == 1) return 0;
    return s->dry ? sequence_largest_rank(s->N, s->ranks) : rank_in(s->memory.world, RANKS_SEQUENCE);
}

// Deals the stream of s->batch over so many ranks.
static void sequence_split(StreamBP *s, size_t ranks) {
    s->N = s->batch->N, s->ranks = ranks;
    for (size_t half = 0; half < 2; half++) s->own[half] = sequence_part(s->N, ranks, sequence_rank(s), half);
    s->own_tokens = s->own[0].count + s->own[1].count;
}

// Which of its ranges an own token is in, and where it is among the rank's rows.
static size_t own_half(const StreamBP *s, size_t token) { return s->own[1].count && token >= s->own[1].begin; }

static size_t own_row(const StreamBP *s, size_t token) {
    const size_t half = own_half(s, token);
    return token - s->own[half].begin + (half ? s->own[0].count : 0);
}

// ---- chunks and layers to visit -------------------------------------------------------------------------------------
static size_t effective_chunk(const StreamBP *s, size_t chunk) {
    const size_t longest = max_size(max_size(s->own[0].count, s->own[1].count), 1);
    return s->method == METHOD_STREAM ? min_size(chunk, longest) : longest;
}

// How many chunks of `size` a loop visits of one of the rank's ranges: all of them, or in a plan one of each length. No
// chunk is empty; a range may be.
static size_t range_visits(const StreamBP *s, size_t half, size_t size) {
    const size_t n = s->own[half].count;
    // NOLINTBEGIN(clang-analyzer-core.DivideZero)
    if (s->dry && n) return n % size && n > size ? 2 : 1;
    return (n + size - 1) / size;
    // NOLINTEND(clang-analyzer-core.DivideZero)
}

// Of both ranges, one behind the other.
static size_t chunk_visits(const StreamBP *s, size_t size) {
    return range_visits(s, 0, size) + range_visits(s, 1, size);
}

// How many layers a loop visits: all of them, or in a plan one of each kind.
static size_t layer_visits(const StreamBP *s) {
    size_t L = s->model->config.num_hidden_layers, windows = layers_with_window(&s->model->config);
    return !s->dry ? L : windows && windows < L ? 2 : 1;
}

// The layer of the index-th visit. In a plan the first of its kind stands for all of it.
static size_t layer_visit(StreamBP *s, size_t index) {
    const Config *c = &s->model->config;
    size_t windows = layers_with_window(c), l = 0;
    int wanted = index || windows == c->num_hidden_layers; // a layer with a window
    if (!s->dry) return index;
    while ((layer_window(c, l) != 0) != wanted) l++;
    s->memory.layers_repeat = (double)(wanted ? windows : c->num_hidden_layers - windows);
    return l;
}

// The window of those layers that have one.
static size_t window_of_model(const Config *config) { return config->layer_types[0] ? config->sliding_window : 0; }

// The document of a token.
static size_t document_of(const Batch *batch, size_t token) {
    const size_t *start = batch->document_start;
    return last_at_most(start, sizeof(*start), max_size(batch->documents, 1), token);
}

// The chunk of n own tokens from `place` on, with the documents' parts in it.
static Chunk chunk_of(StreamBP *s, size_t place, size_t n) {
    const size_t *start = s->batch->document_start, window = window_of_model(&s->model->config), end = place + n;
    size_t document = document_of(s->batch, place);
    Spans spans = {s->span, 0, 0, 0};
    Chunk c = {own_row(s, place), n, place, 0, spans, 0};
    for (; document < s->batch->documents && start[document] < end; document++) {
        Span *span = &s->span[c.spans.count];
        span->document = start[document];
        span->begin = max_size(start[document], place), span->end = min_size(start[document + 1], end);
        if (span->begin == span->end) continue; // an empty document
        span->row = span->begin - place;
        c.spans.pairs += query_key_pairs(span->begin - span->document, span->end - span->document, 0);
        c.window_pairs += query_key_pairs(span->begin - span->document, span->end - span->document, window);
        c.spans.count++;
    }
    return c;
}

// Query-key pairs of the queries of a range in one layer, and of a whole stream.
static double range_pairs(const Batch *batch, Range range, size_t window) {
    const size_t *start = batch->document_start, end = range.begin + range.count;
    double pairs = 0;
    for (size_t d = 0; d < batch->documents; d++) {
        const size_t from = max_size(start[d], range.begin), to = min_size(start[d + 1], end);
        if (from < to) pairs += query_key_pairs(from - start[d], to - start[d], window);
    }
    return pairs;
}

static double batch_pairs(const Batch *batch, size_t window) {
    const Range all = {0, batch->N};
    return range_pairs(batch, all, window);
}

// The tokens of the index-th visit of a loop over chunks of `size` of a range. In a plan there are two: the first
// chunk, which stands for all whole ones, and the last.
static Range visited_tokens(const StreamBP *s, size_t half, size_t index, size_t size) {
    const Range range = s->own[half];
    const size_t skipped = s->dry && index ? range.count / size * size : index * size;
    const Range tokens = {range.begin + skipped, min_size(size, range.count - skipped)};
    return tokens;
}

// The same as a chunk.
static Chunk range_visit(StreamBP *s, size_t half, size_t index, size_t size) {
    const Range range = s->own[half], tokens = visited_tokens(s, half, index, size);
    const size_t whole = range.count / size, visit = index + (half ? range_visits(s, 0, size) : 0);
    Chunk c = chunk_of(s, tokens.begin, tokens.count);
    double repeat = 1;
    if (s->dry && index == 0 && whole > 1) { // pairs: the mean over the whole chunks
        double pairs = range_pairs(s->batch, range, 0);
        double window_pairs = range_pairs(s->batch, range, window_of_model(&s->model->config));
        if (range.count % size) {
            Chunk last = chunk_of(s, range.begin + whole * size, range.count % size);
            pairs -= last.spans.pairs, window_pairs -= last.window_pairs;
        }
        c = chunk_of(s, tokens.begin, tokens.count);
        repeat = (double)whole;
        c.spans.pairs = pairs / repeat, c.window_pairs = window_pairs / repeat;
    }
    s->ops->repeat(s->memory.layers_repeat * repeat);
    c.visit = visit;
    return c;
}

// The same over both ranges.
static Chunk chunk_visit(StreamBP *s, size_t index, size_t size) {
    const size_t first = range_visits(s, 0, size);
    return index < first ? range_visit(s, 0, index, size) : range_visit(s, 1, index - first, size);
}

// ---- norms, of either kind ------------------------------------------------------------------------------------------
static Norm norm_of(const StreamBP *s) {
    const Config *config = &s->model->config;
    const Norm norm = {config->norm_eps, (double)config->family->norm_offset, config->family->norm};
    return norm;
}

static void norm_forward(StreamBP *s, Stored *out, const Stored *x, const Stored *w, const Stored *b, size_t n) {
    s->ops->norm_forward(out, x, w, b, NULL, n, s->model->config.hidden_size, norm_of(s));
}

static void norm_backward(StreamBP *s, Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x,
                          const Stored *w, size_t n, int accumulate) {
    size_t C = s->model->config.hidden_size, mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "norm scratch", s->ops->norm_backward_scratch(n, C));
    s->ops->norm_backward(dx, dw, db, dout, x, w, n, C, norm_of(s), accumulate, scratch);
    arena_pop(s->arena, mark);
}

// What a part of a layer adds to the residual stream: out[n,C] = residual + norm(x).
static void post_norm_forward(StreamBP *s, Stored *out, const Stored *x, const Stored *w, const Stored *residual,
                              size_t n) {
    s->ops->norm_forward(out, x, w, NULL, residual, n, s->model->config.hidden_size, norm_of(s));
}

// QK-norm and RoPE of queries or keys [n,heads,HD]: out = both of them; linear is out without QK-norm.
static void norm_rotated(StreamBP *s, size_t l, Stored *out, const Stored *linear, const Stored *norm,
                         const int32_t *position, size_t n, size_t heads) {
    Shapes d = shapes_of(s->model);
    const int local = layer_window(&s->model->config, l) != 0;
    if (d.qk_norm) s->ops->norm_forward(out, linear, norm, NULL, NULL, n * heads, d.HD, norm_of(s));
    if (d.rotary) s->ops->rope_forward(out, position, s->inverse_frequency[local], n, heads, d.HD);
}

// Gradient through RoPE and QK-norm of [n,heads,HD], in place. linear: the values before QK-norm.
static void norm_rotated_backward(StreamBP *s, size_t l, Stored *dx, Summed *dnorm, const Stored *linear,
                                  const Stored *norm, Chunk c, size_t heads) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena), rows = c.n * heads;
    const int local = layer_window(&s->model->config, l) != 0;
    if (d.rotary) s->ops->rope_backward(dx, s->position + c.begin, s->inverse_frequency[local], c.n, heads, d.HD);
    if (d.qk_norm) {
        Summed *scratch = push_summed(s, SHARE_WORKSPACE, "norm scratch", s->ops->norm_backward_scratch(rows, d.HD));
        s->ops->norm_backward(dx, dnorm, NULL, dx, linear, norm, rows, d.HD, norm_of(s), 0, scratch);
    }
    arena_pop(s->arena, mark);
}

// ---- activations: pushed for a chunk, or kept for every layer -------------------------------------------------------
static void push_attention_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", n * d.C);
    a->q_linear = d.qk_norm ? push_stored(s, SHARE_WORKSPACE, "queries before QK-norm", n * d.Q) : NULL;
    a->q = a->attention_out = NULL, a->lse = NULL;
    if (!s->ring_layer.q) a->q = push_stored(s, SHARE_WORKSPACE, "queries", n * d.Q);
    if (!s->ring_layer.q && !s->kept_attention.attention_out) {
        a->attention_out = push_stored(s, SHARE_WORKSPACE, "attention output", n * d.Q);
        a->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp", n * d.NH);
    }
    a->attention_branch = d.post_norms ? push_stored(s, SHARE_WORKSPACE, "attention before its norm", n * d.C) : NULL;
    a->y = push_stored(s, SHARE_WORKSPACE, "after attention", n * d.C);
}

static void push_mlp_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->norm2 = push_stored(s, SHARE_WORKSPACE, "second norm", n * d.C);
    a->gate_up = push_stored(s, SHARE_WORKSPACE, d.gated ? "gate and up" : "before GELU", n * d.H);
    a->active = push_stored(s, SHARE_WORKSPACE, "after activation", n * d.FF);
    a->mlp_branch = d.post_norms ? push_stored(s, SHARE_WORKSPACE, "MLP before its norm", n * d.C) : NULL;
}

// Method full: layer l's set, from a row of the rank's own tokens on.
static Activations kept_activations(StreamBP *s, size_t l, size_t begin) {
    Shapes d = shapes_of(s->model);
    Activations a = s->kept;
    size_t row = l * s->own_tokens + begin;
    a.norm1 = (Stored *)at(a.norm1, row * d.C, d.stored);
    if (d.qk_norm) a.q_linear = (Stored *)at(a.q_linear, row * d.Q, d.stored);
    a.q = (Stored *)at(a.q, row * d.Q, d.stored);
    a.attention_out = (Stored *)at(a.attention_out, row * d.Q, d.stored);
    a.lse = (Summed *)at(a.lse, row * d.NH, d.summed);
    if (d.post_norms) a.attention_branch = (Stored *)at(a.attention_branch, row * d.C, d.stored);
    if (d.post_norms) a.mlp_branch = (Stored *)at(a.mlp_branch, row * d.C, d.stored);
    a.y = (Stored *)at(a.y, row * d.C, d.stored);
    a.norm2 = (Stored *)at(a.norm2, row * d.C, d.stored);
    a.gate_up = (Stored *)at(a.gate_up, row * d.H, d.stored);
    a.active = (Stored *)at(a.active, row * d.FF, d.stored);
    return a;
}

// Room for x_0..x_L of `tokens` tokens where every layer's input is kept, or for one x that layers overwrite in place.
static void push_inputs(StreamBP *s, size_t tokens, int every_layer) {
    Shapes d = shapes_of(s->model);
    size_t layers = every_layer ? d.L + 1 : 1;
    s->memory.inputs =
        (char *)push_stored(s, SHARE_LAYER_INPUTS, every_layer ? "layer inputs" : "layer input", layers * tokens * d.C);
    s->memory.input_stride = every_layer ? tokens * d.C : 0;
    s->memory.input_begin = 0;
}

// Whether the keys and values of a layer are those of its window alone, or else whether they pass around its ranks.
static int layer_slides(const StreamBP *s, size_t l) {
    return layer_window(&s->model->config, l) && s->kv.rows[1] < s->N;
}

static int layer_rings(const StreamBP *s, size_t l) {
    return s->ring && s->ranks > 1 && !layer_window(&s->model->config, l);
}

// The first row of a layer's keys and values.
static size_t key_value_begin(const StreamBP *s, size_t l) {
    size_t row = 0;
    for (size_t i = 0; i < l && s->kv.layers > 1; i++) row += s->kv.rows[layer_window(&s->model->config, i) != 0];
    return row;
}

// How many tokens before a token's row: what it stands at less where it is. Of several ranks' held tokens the second
// piece follows the first one at once.
static size_t tokens_skipped(const StreamBP *s, size_t l, size_t token) {
    if (layer_rings(s, l)) return token - own_row(s, token); // its own tokens alone
    if (!layer_slides(s, l)) return 0;
    if (s->ranks == 1) return s->kv.first;
    return token < s->kv.held[1].begin ? s->kv.held[0].begin : s->kv.held[1].begin - s->kv.held[0].count;
}

// Where a token is in kv.k, kv.v or kv.k_linear.
static Stored *key_value_at(StreamBP *s, Stored *base, size_t l, size_t token) {
    Shapes d = shapes_of(s->model);
    return (Stored *)at(base, (key_value_begin(s, l) + token - tokens_skipped(s, l, token)) * d.KV, d.stored);
}

// The same in kv.dk or kv.dv, which are of one layer at a time.
static Summed *key_gradient_at(StreamBP *s, Summed *base, size_t l, size_t token) {
    Shapes d = shapes_of(s->model);
    return (Summed *)at(base, (token - tokens_skipped(s, l, token)) * d.KV, d.summed);
}

// All that a layer holds, from its row 0: what attention takes, with the spans of layer_spans.
static Stored *layer_keys(StreamBP *s, Stored *base, size_t l) {
    Shapes d = shapes_of(s->model);
    return (Stored *)at(base, key_value_begin(s, l) * d.KV, d.stored);
}

// A chunk's spans for a layer. Where tokens are skipped they count from row 0; a document that begins before it begins
// there, which no query of the chunk can tell.
static Spans layer_spans(StreamBP *s, size_t l, Chunk c) {
    Spans spans = c.spans;
    Span *moved = s->span + s->batch->documents;
    size_t skipped = tokens_skipped(s, l, c.place);
    spans.window = layer_window(&s->model->config, l);
    if (spans.window) spans.pairs = c.window_pairs;
    if (!skipped) return spans;
    for (size_t i = 0; i < spans.count; i++) {
        moved[i].document = max_size(c.spans.span[i].document, skipped) - skipped;
        moved[i].begin = c.spans.span[i].begin - skipped, moved[i].end = c.spans.span[i].end - skipped;
        moved[i].row = c.spans.span[i].row;
    }
    spans.span = moved;
    return spans;
}

// What a rank of the stream holds of layers with a window: each of its ranges, and before it the keys that the first
// query sees, its halo; the second as far as the first does not hold them already. An empty range holds nothing.
static Range window_range_of_rank(const StreamBP *s, size_t rank, size_t half) {
    const size_t window = window_of_model(&s->model->config);
    const Range first = sequence_part(s->N, s->ranks, rank, 0), own = sequence_part(s->N, s->ranks, rank, half);
    Range held = {half ? s->N : 0, 0};
    if (!own.count) return held;
    held.begin = first_key(s->batch->document_start[document_of(s->batch, own.begin)], own.begin, window);
    if (half && first.count) held.begin = max_size(held.begin, first.begin + first.count);
    held.count = own.begin + own.count - held.begin;
    return held;
}

// Tokens held of a layer with a window: what a chunk of at most `chunk` tokens sees, or a rank's ranges.
static size_t window_rows(const StreamBP *s, size_t tokens, size_t chunk) {
    const size_t window = window_of_model(&s->model->config);
    if (!window) return tokens;
    return min_size(tokens, s->ranks > 1 ? s->own_tokens + 2 * (window - 1) : window - 1 + chunk);
}

// Rows of whichever layer has the most.
static size_t rows_of_a_layer(const StreamBP *s) {
    const size_t windows = layers_with_window(&s->model->config);
    return max_size(windows < s->model->config.num_hidden_layers ? s->kv.rows[0] : 0, windows ? s->kv.rows[1] : 0);
}

// Room for the keys and values of `layers` layers at a time, of `tokens` tokens visited in chunks of at most `chunk`.
static void push_key_value(StreamBP *s, size_t layers, size_t tokens, size_t chunk, int linear) {
    Shapes d = shapes_of(s->model);
    size_t windows = layers_with_window(&s->model->config), count;
    memset(&s->kv, 0, sizeof(s->kv));
    s->kv.layers = layers;
    s->kv.rows[0] = s->ranks == 1 ? tokens
                    : s->ring     ? sequence_share_max(s->N, s->ranks)
                                  : sequence_rows(s->N, s->ranks);
    s->kv.rows[1] = window_rows(s, tokens, chunk);
    for (size_t half = 0; half < 2 && s->ranks > 1; half++)
        s->kv.held[half] = window_range_of_rank(s, sequence_rank(s), half);
    if (layers > 1)
        count = (d.L - windows) * s->kv.rows[0] + windows * s->kv.rows[1];
    else
        count = rows_of_a_layer(s);
    s->kv.k = push_stored(s, SHARE_KV, layers > 1 ? "keys of all layers" : "keys of one layer", count * d.KV);
    s->kv.v = push_stored(s, SHARE_KV, layers > 1 ? "values of all layers" : "values of one layer", count * d.KV);
    if (linear) s->kv.k_linear = push_stored(s, SHARE_KV, "keys before QK-norm of all layers", count * d.KV);
}

// ---- the window's slide ---------------------------------------------------------------------------------------------
// Moves `rows` rows of `bytes` each from row `from` to row `to`, a piece at a time since pieces may not overlap.
static void slide_rows(const Ops *ops, void *base, size_t from, size_t to, size_t rows, size_t bytes) {
    size_t step = from > to ? from - to : to - from, n;
    char *memory = (char *)base;
    for (size_t done = 0; step && done < rows; done += n) {
        n = min_size(step, rows - done);
        size_t row = from > to ? done : rows - done - n; // downwards from the bottom, upwards from the top
        ops->copy(memory + (to + row) * bytes, memory + (from + row) * bytes, n * bytes);
    }
}

// Tokens [first, end) stay, and lie from row 0 on (first >= kv.first), or end where they must for earlier ones to come
// before them (first < kv.first: those that are there are [kv.first, end)).
static void slide_keys(StreamBP *s, size_t l, size_t first, size_t end) {
    Shapes d = shapes_of(s->model);
    const size_t old = s->kv.first, stay = max_size(first, old), from = stay - old, to = stay - first;
    const size_t rows = end > stay ? end - stay : 0;
    if (s->dry) return;
    slide_rows(s->ops, layer_keys(s, s->kv.k, l), from, to, rows, d.KV * d.stored);
    slide_rows(s->ops, layer_keys(s, s->kv.v, l), from, to, rows, d.KV * d.stored);
    if (!s->kv.dk) return;
    slide_rows(s->ops, s->kv.dk, from, to, rows, d.KV * d.summed);
    slide_rows(s->ops, s->kv.dv, from, to, rows, d.KV * d.summed);
}

// Before chunk c of layers with a window, chunks first to last: makes room for its keys. In a plan they are at once
// where they would have come to be.
static void window_slide_forward(StreamBP *s, Chunk c) {
    size_t window = window_of_model(&s->model->config), first = first_key(0, c.place, window);
    if (c.place + c.n - s->kv.first <= s->kv.rows[1]) return;
    for (size_t l = 0; l < s->model->config.num_hidden_layers; l++) {
        if (!layer_slides(s, l)) continue;
        slide_keys(s, l, first, c.place);
        if (s->kv.layers == 1) break; // one layer's are there, whose they are does not matter
    }
    s->kv.first = first;
}

#endif
