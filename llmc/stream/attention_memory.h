/*
Keys, values and their gradients.

A token of the sequence indexes keys, values and their gradients; a row indexes activations. A full-attention layer
stores the keys of the whole sequence. A layer with a window stores the window of the current chunk, which slides along
the sequence with the chunks: forward in a forward pass, back in backward.

If ranks share the sequence (llmc/orders/), a full-attention layer stores the keys of all tokens, or with a ring of the
rank's own tokens. A layer with a window stores the rank's ranges and a halo before each: the keys that the range's
first query sees.
*/
#ifndef LLMC_ATTENTION_MEMORY_H
#define LLMC_ATTENTION_MEMORY_H
#include "inputs.h"
#include "tree_spans.h"

// Tells whether the layer stores only the keys of its window. In a tree with forks it stores all: keys of a window lie
// on several chains.
static int layer_slides(const StreamBP *s, size_t l) { return layer_of(s, l)->window && s->kv.rows[1] < s->now.N; }

// Tells whether the layer's keys travel round a ring of ranks.
static int layer_rings(const StreamBP *s, size_t l) {
    return s->setup->ring && s->now.ranks > 1 && !layer_of(s, l)->window;
}

// Returns the tokens that rank `rank` stores for one of its ranges, in a layer with a window: the range and its halo.
// Leaves out tokens that the first range stores already. An empty range stores nothing.
static Range window_range_of_rank(const StreamBP *s, size_t rank, size_t half) {
    const size_t window = window_of_model(&s->model->config);
    const Range first = sequence_part(s->now.N, s->now.ranks, rank, 0),
                own = sequence_part(s->now.N, s->now.ranks, rank, half);
    Range range = {half ? s->now.N : 0, 0};
    if (!own.count) return range;
    range.begin = first_key(s->now.batch->document_start[document_of(s->now.batch, own.begin)], own.begin, window);
    if (half && first.count) range.begin = max_size(range.begin, first.begin + first.count);
    range.count = own.begin + own.count - range.begin;
    return range;
}

// ---- tensors --------------------------------------------------------------------------------------------------------
static Stored **key_tensor(StreamBP *s, KeyTensor i) {
    Stored **const of[KEY_TENSORS] = {&s->kv.k, &s->kv.v, &s->kv.k_linear, &s->kv.v_linear};
    return of[i];
}

static Stored *key_base(const StreamBP *s, KeyTensor i) {
    Stored *const of[KEY_TENSORS] = {s->kv.k, s->kv.v, s->kv.k_linear, s->kv.v_linear};
    return of[i];
}

// Returns the elements of a token in a tensor of keys or values.
static size_t key_width(const Shapes *d, KeyTensor i) { return i == VALUES || i == VALUES_LINEAR ? d->VV : d->KV; }

// ---- room -----------------------------------------------------------------------------------------------------------
// Returns the elements of a layer's keys or values; 0 if the layer has no keys of its own.
static size_t keys_of_layer(const StreamBP *s, KeyTensor i, size_t l) {
    const Layer *layer = layer_of(s, l);
    return has_own_keys(layer) ? s->kv.rows[layer->window != 0] * key_width(&layer->shape, i) : 0;
}

// Returns the elements of the keys or values of all layers, or of the layer with the most.
static size_t keys_of_layers(const StreamBP *s, KeyTensor i, int all) {
    size_t sum = 0, most = 0;
    for (size_t l = 0; l < s->model->config.num_hidden_layers; l++)
        sum += keys_of_layer(s, i, l), most = max_size(most, keys_of_layer(s, i, l));
    return all ? sum : most;
}

// Sets the rows that a layer of each kind stores. A layer with a window stores the keys that a chunk sees, or a rank's
// ranges and halos.
static void set_key_rows(StreamBP *s, size_t layers, size_t tokens, size_t chunk) {
    const size_t window = window_of_model(&s->model->config);
    const int shared = s->now.ranks > 1;
    const KeyValue none = {0};
    s->kv = none;
    s->kv.layers = layers;
    s->kv.rows[0] = !shared          ? tokens
                    : s->setup->ring ? sequence_share_max(s->now.N, s->now.ranks)
                                     : sequence_rows(s->now.N, s->now.ranks);
    s->kv.rows[1] = tokens;
    if (window && !has_forks(s))
        s->kv.rows[1] = min_size(tokens, shared ? s->now.rows + 2 * (window - 1) : window - 1 + chunk);
    for (size_t half = 0; half < 2 && shared; half++)
        s->kv.halo[half] = window_range_of_rank(s, sequence_rank(s), half);
}

// Pushes keys and values of all layers for generation. staged: adds rows for one layer's keys of a pass, at tokens from
// `tokens` on; 0: adds none
static void push_all_key_values(StreamBP *s, size_t tokens, size_t chunk, size_t staged) {
    set_key_rows(s, s->model->config.num_hidden_layers, tokens, chunk);
    s->kv.staged = staged ? tokens : 0;
    for (int i = KEYS; i <= VALUES; i++)
        *key_tensor(s, (KeyTensor)i) =
            push_stored(s, SHARE_KV, i == KEYS ? "keys of all layers" : "values of all layers",
                        keys_of_layers(s, (KeyTensor)i, 1) + staged * (keys_of_layers(s, (KeyTensor)i, 0) / tokens));
}

static void push_key_value_gradients(StreamBP *s) {
    s->kv.dk = push_summed(s, SHARE_KV, "gradient of keys of one layer", keys_of_layers(s, KEYS, 0));
    s->kv.dv = push_summed(s, SHARE_KV, "gradient of values of one layer", keys_of_layers(s, VALUES, 0));
}

// Pushes keys and values of all heads and tokens, for a layer whose latents are expanded once a pass.
static void push_head_keys(StreamBP *s, const Shapes *d) {
    const size_t count = s->now.N * d->Q;
    HeadKeys *heads = &s->kv.heads;
    heads->k = push_stored(s, SHARE_KV, "keys of a layer's heads", count);
    heads->v = push_stored(s, SHARE_KV, "values of a layer's heads", count);
    if (s->now.pass != PASS_BACKWARD) return;
    heads->dk = push_summed(s, SHARE_KV, "gradient of keys of a layer's heads", count);
    heads->dv = push_summed(s, SHARE_KV, "gradient of values of a layer's heads", count);
}

/*
Shared keys: the last layers may read K, V of an earlier layer (num_kv_shared_layers). One layer of each kind lends its
K, V, which stay from its forward to its backward. A single process stores the lent K, V of all tokens, whatever the
window. dK, dV of all readers add up in one sum, which the lender's own backward uses.
*/
static int shares_keys(const Layer *layer) { return layer->borrows || layer->lends; }

// Pushes K, V of the layers that lend them, or their gradients, set to 0.
static void push_lent_keys(StreamBP *s, int gradients) {
    const Config *c = &s->model->config;
    if (!c->num_kv_shared_layers) return;
    set_key_rows(s, 1, s->now.N, s->now.N);
    for (size_t l = 0; l < c->num_hidden_layers; l++) {
        const size_t count = keys_of_layer(s, KEYS, l), bytes = count * dtype_size(dtype_of_sums(s->model->dtype));
        LentKeys *lent = &s->lent[layer_of(s, l)->window != 0];
        if (!layer_of(s, l)->lends) continue;
        if (gradients) {
            lent->dk = push_summed(s, SHARE_KV, "gradient of keys that other layers read", count);
            lent->dv = push_summed(s, SHARE_KV, "gradient of values that other layers read", count);
            s->ops->zero(lent->dk, bytes), s->ops->zero(lent->dv, bytes);
        } else {
            lent->k = push_stored(s, SHARE_KV, "keys that other layers read", count);
            lent->v = push_stored(s, SHARE_KV, "values that other layers read", count);
        }
    }
}

// Points s->kv at the lender's K, V (in backward also dK, dV), for a layer l that lends or borrows them.
static void select_lent_keys(StreamBP *s, size_t l) {
    const LentKeys *lent = &s->lent[layer_of(s, l)->window != 0];
    set_key_rows(s, 1, s->now.N, s->now.N);
    s->kv.k = lent->k, s->kv.v = lent->v;
    s->kv.dk = lent->dk, s->kv.dv = lent->dv;
}

// ---- rows -----------------------------------------------------------------------------------------------------------
// Returns row 0 of a layer's keys or values, which attention takes together with layer_spans.
static Stored *layer_keys(const StreamBP *s, KeyTensor i, size_t l) {
    size_t elements = 0;
    const size_t of = layer_of(s, l)->borrows ? key_value_layer(&s->model->config, l) : l;
    for (size_t before = 0; before < of && s->kv.layers > 1; before++) elements += keys_of_layer(s, i, before);
    return stored_row(s, key_base(s, i), elements, 1);
}

// Returns a token's index in the sequence minus its row in the K/V buffer. A rank's second range directly follows its
// first range in the buffer.
static size_t tokens_skipped(const StreamBP *s, size_t l, size_t token) {
    if (layer_rings(s, l)) return token - own_row(s, token);
    if (!layer_slides(s, l)) return 0;
    if (s->now.ranks == 1) return s->kv.first;
    return token < s->kv.halo[1].begin ? s->kv.halo[0].begin : s->kv.halo[1].begin - s->kv.halo[0].count;
}

// Returns a token's row in a tensor of keys or values. Below: its row in kv.dk or kv.dv, which hold one layer at a time
static Stored *key_value_at(const StreamBP *s, KeyTensor i, size_t l, size_t token) {
    const size_t width = key_width(&layer_of(s, l)->shape, i);
    if (s->kv.staged && token >= s->kv.staged)
        return stored_row(s, key_base(s, i), keys_of_layers(s, i, 1) + (token - s->kv.staged) * width, 1);
    return stored_row(s, layer_keys(s, i, l), token - tokens_skipped(s, l, token), width);
}

static Summed *key_gradient_at(const StreamBP *s, KeyTensor i, size_t l, size_t token) {
    return summed_row(s, i == KEYS ? s->kv.dk : s->kv.dv, token - tokens_skipped(s, l, token),
                      key_width(&layer_of(s, l)->shape, i));
}

// Returns a chunk's spans for a layer, relative to the layer's row 0.
static Spans layer_spans(const StreamBP *s, size_t l, Chunk c) {
    return make_spans(s, c, layer_of(s, l)->window, tokens_skipped(s, l, c.token));
}

// Returns the address that token 0 of the sequence would have, `skipped` rows of `row` bytes before x. Only x's rows
// exist.
static void *token_0(void *x, size_t skipped, size_t row) {
    return (void *)((uintptr_t)x - skipped * row); // NOLINT(performance-no-int-to-ptr)
}

static AttentionShape attention_shape(const StreamBP *s, size_t l, Spans spans) {
    const Shapes *d = &layer_of(s, l)->shape;
    const AttentionShape shape = {spans, d->NH, d->NKV, d->HD, attention_scale(s->model), all_keys, 0, 0, s->kv.slots};
    return shape;
}

// Makes `shape` the shape of a call over an ancestor's keys, whose results are merged with earlier calls'.
static void attention_shape_call(AttentionShape *shape, const TreeCall *call) {
    const size_t window = shape->spans.window;
    const Spans spans = {&call->span, 1, window, span_pairs(call->span, call->keys, window)};
    shape->spans = spans, shape->keys = call->keys;
    shape->partial = shape->accumulate = 1;
}

static void zero_key_value_gradients(const StreamBP *s, size_t l, size_t rows) {
    const Shapes *d = &layer_of(s, l)->shape;
    s->ops->zero(s->kv.dk, rows * d->KV * d->summed);
    s->ops->zero(s->kv.dv, rows * d->VV * d->summed);
    if (!s->kv.heads.dk) return;
    s->ops->zero(s->kv.heads.dk, s->now.N * d->Q * d->summed);
    s->ops->zero(s->kv.heads.dv, s->now.N * d->Q * d->summed);
}

// ---- the window's slide ---------------------------------------------------------------------------------------------
// Moves `rows` rows of `bytes` each from row `from` to row `to`, in copies that do not overlap.
static void slide_rows(const Ops *ops, void *base, size_t from, size_t to, size_t rows, size_t bytes) {
    size_t step = from > to ? from - to : to - from, n;
    char *memory = (char *)base;
    for (size_t done = 0; step && done < rows; done += n) {
        n = min_size(step, rows - done);
        size_t row = from > to ? done : rows - done - n; // downwards from the bottom, upwards from the top
        ops->copy(memory + (to + row) * bytes, memory + (from + row) * bytes, n * bytes);
    }
}

// Slides a layer's window so that row 0 holds token `first`. Moves the rows of stored tokens that stay: [first, end)
// when the window slides forward, [kv.first, end) when it slides back.
static void slide_keys(const StreamBP *s, size_t l, size_t first, size_t end) {
    const Shapes *d = &layer_of(s, l)->shape;
    const size_t old = s->kv.first, stay = max_size(first, old), from = stay - old, to = stay - first;
    const size_t rows = end > stay ? end - stay : 0;
    if (s->memory.walk.dry) return;
    slide_rows(s->ops, layer_keys(s, KEYS, l), from, to, rows, d->KV * d->stored);
    slide_rows(s->ops, layer_keys(s, VALUES, l), from, to, rows, d->KV * d->stored);
    if (!s->kv.dk) return;
    slide_rows(s->ops, s->kv.dk, from, to, rows, d->KV * d->summed);
    slide_rows(s->ops, s->kv.dv, from, to, rows, d->KV * d->summed);
}

// Makes room for the keys of chunk c in a layer with a window, before they are projected; chunks go first to last. If
// all layers' keys are stored, slides all windows. The dry run moves no rows.
static void window_slide_forward(StreamBP *s, size_t layer, Chunk c) {
    size_t window = window_of_model(&s->model->config), first = first_key(0, c.token, window);
    if (s->now.ranks > 1 || !layer_slides(s, layer)) return;
    if (!c.token) s->kv.first = 0;
    if (c.token + c.n - s->kv.first <= s->kv.rows[1]) return;
    for (size_t l = s->kv.layers > 1 ? 0 : layer; l < s->model->config.num_hidden_layers; l++) {
        if (layer_slides(s, l) && keys_of_layer(s, KEYS, l)) slide_keys(s, l, first, c.token);
        if (s->kv.layers == 1) break;
    }
    s->kv.first = first;
}

// Slides a layer's window back to chunk c; chunks go last to first. Returns the tokens that chunk c sees and no later
// chunk sees. Their dK, dV become 0; the caller projects their keys again. The dry run returns c's own tokens.
static Range window_slide_back(StreamBP *s, size_t l, Chunk c) {
    const size_t first = first_key(0, c.token, window_of_model(&s->model->config));
    const Range missing = {first, min_size(s->kv.first, c.token + c.n) - first}, none = {0, 0}, own = {c.token, c.n};
    if (s->now.ranks > 1 || !layer_slides(s, l)) return none;
    slide_keys(s, l, first, c.token + c.n);
    s->kv.first = first;
    zero_key_value_gradients(s, l, missing.count);
    return s->memory.walk.dry ? own : missing;
}

#endif
