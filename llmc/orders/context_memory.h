/*
Long memory of one text (InfLLM, arXiv 2402.04617): generation whose device memory hardly grows with the text. Nothing
is trained. Layers with windows or linear attention work as in key_value_cache.h. A full-attention layer has

    the window      the last tokens' K and V, rows [0, held) of s->kv, at most `window` with the current chunk
    first tokens    K and V of the first block that left the window
    memory          later blocks, in the place of PLACED_INPUTS, and for each block a key: the sum of its
                    representatives, the CONTEXT_REPRESENTATIVES keys that got the most attention while in the window
    loaded blocks   slots on the device for the blocks that the current chunk of queries chose

A block's score is the sum of q k over its representatives and over the chunk's queries and heads. The blocks with the
highest scores are loaded. A sum of products is a product of sums, so one key for each block gives the score exactly.

Keys are stored at position 0. Keys in the window are rotated to their rows. Keys outside count as one window away: they
stay at position 0, and queries are rotated to position `window`. So no position exceeds `window`. Attention outside and
inside the window is merged by log-sum-exp. A text that fits the window is computed as usual.

    context_begin    pushes the memory, in place of cache_begin
    context_feed     appends tokens to the text, in place of cache_feed; cache_draw draws
    context_end      pops the memory
    context_walk     makes the dry run
*/
#ifndef LLMC_CONTEXT_MEMORY_H
#define LLMC_CONTEXT_MEMORY_H
#include "key_value_cache.h"

enum {
    CONTEXT_BLOCK = 128,
    CONTEXT_REPRESENTATIVES = 4,
    CONTEXT_CHUNK = 512,
    CONTEXT_WINDOW = 4096,
    CONTEXT_LOADED = 16
};

typedef struct {
    size_t window; // tokens, at least twice a block; 0: no context memory
    size_t block;  // tokens of a block
    size_t loaded; // blocks that a chunk of queries loads
} ContextSettings;

typedef struct {
    ContextSettings set;
    size_t layers;       // full-attention layers
    size_t most, slots;  // blocks that ever leave the window; slots of a layer
    size_t held, left;   // tokens in the window; blocks that have left it, the first tokens included
    size_t leaving;      // blocks that leave before the current chunk
    Marks mark;          // marks of the arenas before context_begin
    Stored *rotated;     // [layers,window,KV] keys of the window, at the positions of their rows
    Stored *outside[2];  // [layers,(1 + slots) * block,KV] K and V of the first tokens and the loaded blocks
    Stored *home[2];     // [layers,most,block,KV] K and V of blocks
    Stored *key;         // [layers,most,KV] sums of representatives
    Summed *received;    // [layers,window] attention that the window's keys got
    Stored *groups;      // [chunk * NH,NKV] 1 where a query head reads a key head, else 0
    int32_t *zero;       // [chunk] positions in full-attention layers: 0
    int32_t *running;    // [chunk] positions in other layers: the tokens' own
    int32_t *row, *edge; // [window] positions 0, 1, ...; [chunk] positions `window`
    int32_t *slot;       // [layers,slots] number of the block in each slot; 0: none yet
    int32_t *taken;      // [slots] blocks that the current layer loads; 0: the slot keeps its block
    int reached;         // 1: ops read blocks where they are; 0: the host loads them, so it must know their numbers
    PageSlot *page;      // [layers] host: transfers of blocks
    void *host;          // scratch for numbers of blocks, attention received, representatives, groups
} ContextMemory;

// Returns why a model cannot have this memory; NULL: it can.
static const char *context_problem(const Config *c) {
    if (c->kv_lora_rank) return "it has latents in place of keys";
    if (c->family->learned_positions) return "its positions are a learned table";
    if (c->num_kv_shared_layers) return "its last layers read keys of earlier ones";
    return layers_of_kind(c, LAYER_FULL) ? NULL : "none of its layers sees all tokens";
}

// Returns the tokens of a chunk: at most half of the window less a block, so that all queries see earlier tokens.
static size_t context_chunk(ContextSettings set, size_t chunk) {
    return max_size(min_size(min_size(chunk, CONTEXT_CHUNK), (set.window - set.block) / 2), 1);
}

// Allocates host memory for transfers and scratch. It outlives the context memory's tensors on the arena.
static void context_allocate(ContextMemory *m, ContextSettings set, const Model *model, size_t capacity) {
    const Config *c = &model->config;
    memset(m, 0, sizeof(*m));
    if (!set.window) return;
    m->set = set, m->layers = layers_of_kind(c, LAYER_FULL);
    m->most = capacity > set.window ? (capacity - set.window + set.block - 1) / set.block : 0;
    m->slots = min_size(set.loaded, max_size(m->most, 1) - 1);
    const size_t leaving = CONTEXT_CHUNK / set.block + 2; // most blocks that leave at a time
    const size_t masks = leaving * set.block * leaving, groups = CONTEXT_CHUNK * c->num_attention_heads;
    m->page = (PageSlot *)checked_calloc(m->layers, sizeof(PageSlot), "blocks of a long text");
    m->host =
        checked_calloc(max_size(max_size(max_size(m->slots, 2 * masks), set.window), groups * shapes_of(model).NKV),
                       sizeof(double), "blocks of a long text");
}

static void context_free(ContextMemory *m) {
    free(m->page), free(m->host);
    memset(m, 0, sizeof(*m));
}

static int32_t *push_positions(const StreamBP *s, const char *name, size_t n) {
    return (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, name, n, sizeof(int32_t));
}

static void set_number(void *elements, DType type, size_t i, float number) {
    elements_from_float(at(elements, i, dtype_size(type)), type, &number, 1);
}

// Fills the constant tensors: positions and groups.
static void context_fill(const ContextMemory *m, const Cache *cache, const StreamBP *s) {
    const Shapes d = shapes_of(s->model);
    int32_t *position = (int32_t *)m->host;
    s->ops->zero(m->zero, cache->rows * sizeof(int32_t));
    for (size_t t = 0; t < cache->rows; t++) position[t] = (int32_t)m->set.window;
    s->ops->copy_in(m->edge, position, cache->rows * sizeof(int32_t));
    for (size_t t = 0; t < s->kv.rows[0]; t++) position[t] = (int32_t)t;
    s->ops->copy_in(m->row, position, s->kv.rows[0] * sizeof(int32_t));
    memset(m->host, 0, cache->rows * d.NH * d.NKV * d.stored);
    for (size_t i = 0; i < cache->rows * d.NH; i++)
        set_number(m->host, s->model->dtype, i * d.NKV + i % d.NH / (d.NH / d.NKV), 1);
    s->ops->copy_in(m->groups, m->host, cache->rows * d.NH * d.NKV * d.stored);
}

// Pushes the memory of an empty text; `cache` has one slot and stores no keys.
static void context_begin(ContextMemory *m, Cache *cache, StreamBP *s) {
    const Shapes d = shapes_of(s->model);
    const size_t L = d.L, linear = layers_with_state(&s->model->config), block = m->set.block * d.KV;
    const size_t window = min_size(m->set.window, cache->capacity);
    m->mark = marks_of(s->arena), m->held = m->left = 0;
    cache->rows = min_size(context_chunk(m->set, s->setup->chunk), cache->capacity), cache->used[0] = 0;
    memset(m->page, 0, m->layers * sizeof(PageSlot));
    s->now.pass = PASS_FORWARD_ONLY;
    sequence_set(s, &cache->documents);
    sequence_split(s, 1);
    set_key_rows(s, L, cache->capacity, cache->rows);
    s->kv.rows[0] = window;
    s->kv.slots.count = 1, s->kv.slots.tokens = window;
    s->kv.k = push_stored(s, SHARE_KV, "keys in windows", keys_of_layers(s, KEYS, 1));
    s->kv.v = push_stored(s, SHARE_KV, "values in windows", keys_of_layers(s, VALUES, 1));
    if (linear) push_states(s, linear, 1, 0);
    m->rotated = push_stored(s, SHARE_KV, "rotated keys in windows", m->layers * window * d.KV);
    m->received = push_summed(s, SHARE_KV, "attention received", m->layers * window);
    m->key = push_stored(s, SHARE_KV, "keys of blocks", m->layers * m->most * d.KV);
    for (size_t j = 0; j < 2; j++) {
        m->outside[j] = push_stored(s, SHARE_KV, j ? "values of loaded blocks" : "keys of loaded blocks",
                                    m->most ? m->layers * (1 + m->slots) * block : 0);
        m->home[j] =
            (Stored *)arena_push(memory_of(&s->memory, PLACED_INPUTS), SHARE_KV,
                                 j ? "values of blocks" : "keys in blocks", m->layers * m->most * block, d.stored);
    }
    m->reached = s->ops->reaches(m->home[0], m->layers * m->most * block * d.stored) &&
                 s->ops->reaches(m->home[1], m->layers * m->most * block * d.stored);
    s->now.rows = cache->rows;
    push_inputs(s);
    if (expert_layers(s))
        s->routes.fed = (uint16_t *)arena_push(s->arena, SHARE_WORKSPACE, "routes of a pass",
                                               expert_layers(s) * cache->rows * d.router.k, sizeof(uint16_t));
    s->now.tokens = push_positions(s, "tokens", cache->rows);
    m->running = push_positions(s, "positions", cache->rows), m->zero = push_positions(s, "positions 0", cache->rows);
    m->row = push_positions(s, "rows of the window", window), m->edge = push_positions(s, "its edge", cache->rows);
    cache->token = push_positions(s, "drawn tokens", 1);
    cache->uniform = (double *)arena_push(s->arena, SHARE_WORKSPACE, "uniform numbers", 1, sizeof(double));
    m->groups = push_stored(s, SHARE_WORKSPACE, "heads of groups", cache->rows * d.NH * d.NKV);
    m->slot = push_positions(s, "blocks in slots", m->layers * m->slots);
    m->taken = push_positions(s, "blocks to load", m->slots);
    s->ops->zero(m->slot, m->layers * m->slots * sizeof(int32_t));
    context_fill(m, cache, s);
}

static void context_end(ContextMemory *m, StreamBP *s) {
    for (size_t l = 0; l < m->layers; l++) page_finish(s->ops, &m->page[l]), page_await(s->ops, &m->page[l]);
    s->routes.fed = NULL;
    marks_pop(s->arena, m->mark);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------
// Return layer l's number among full-attention layers, and the layer's rows in `outside`.
static size_t full_number(const StreamBP *s, size_t l) { return layer_of(s, l)->number[LAYER_FULL]; }

static Stored *outside_rows(const ContextMemory *m, const StreamBP *s, size_t l, size_t j, size_t row) {
    return stored_row(s, m->outside[j], full_number(s, l) * (1 + m->slots) * m->set.block + row,
                      layer_of(s, l)->shape.KV);
}

// Rotates n rows of heads from position 0 to `position`. Sets the rotation's factor to 1, as position 0 applied it.
static void rotate_from_zero(const StreamBP *s, size_t l, Stored *x, const int32_t *position, size_t n, int queries) {
    const Shapes d = layer_of(s, l)->shape;
    Rotation how = rotation_of(&s->model->config, 0, queries);
    how.factor = 1;
    if (layer_of(s, l)->rotates)
        s->ops->rope(x, position, s->setup->inverse_frequency[0], n, queries ? d.NH : d.NKV, d.HD, d.R, how, 0);
}

// Moves K and V of block `number` between rows on the device and the block's home.
static void block_move(ContextMemory *m, StreamBP *s, size_t l, size_t number, int in, Stored *const rows[2]) {
    const Shapes d = layer_of(s, l)->shape;
    const size_t i = full_number(s, l), count = m->set.block * d.KV;
    for (size_t j = 0; j < 2; j++) {
        Stored *home = stored_row(s, m->home[j], i * m->most + number, count);
        if (is_off_device(&s->memory, PLACED_INPUTS))
            page_move(layer_pager(&s->memory, PLACED_INPUTS), &m->page[i], in, rows[j], home, count * d.stored);
        else
            s->ops->copy(in ? rows[j] : home, in ? home : rows[j], count * d.stored);
    }
}

// Marks each leaving block's representatives: the keys that received the most attention (host); ties go to the earlier
// key. mask[leaving * block,leaving] = 1 for a representative of the block, else 0
static void representatives_mark(const ContextMemory *m, DType type, DType sums, void *received, void *mask) {
    const size_t block = m->set.block, rows = m->leaving * block;
    memset(mask, 0, rows * m->leaving * dtype_size(type));
    for (size_t b = 0; b < m->leaving; b++)
        for (size_t i = 0; i < min_size(CONTEXT_REPRESENTATIVES, block); i++) {
            size_t best = b * block;
            for (size_t j = best; j < (b + 1) * block; j++)
                if (value_at(received, sums, j) > value_at(received, sums, best)) best = j;
            set_number(mask, type, best * m->leaving + b, 1);
            set_number(received, sums, best, -1); // below any attention: not chosen again
        }
}

// Computes the keys of the leaving blocks in layer l, the i-th full-attention layer.
static void blocks_key(const ContextMemory *m, const StreamBP *s, size_t l, size_t i) {
    const Shapes d = layer_of(s, l)->shape;
    const DType type = s->model->dtype, sums = dtype_of_sums(type);
    const size_t rows = m->leaving * m->set.block, mark = arena_mark(s->arena);
    Stored *mask = push_stored(s, SHARE_WORKSPACE, "representatives", rows * m->leaving);
    Summed *sum = push_summed(s, SHARE_WORKSPACE, "sums of representatives", m->leaving * d.KV);
    void *host_mask = at(m->host, rows, sizeof(double));
    s->ops->copy_out(m->host, summed_row(s, m->received, i, s->kv.rows[0]), rows * d.summed);
    representatives_mark(m, type, sums, m->host, host_mask);
    s->ops->copy_in(mask, host_mask, rows * m->leaving * d.stored);
    s->ops->zero(sum, m->leaving * d.KV * d.summed);
    s->ops->linear_backward_weight(sum, NULL, mask, layer_keys(s, KEYS, l), rows, d.KV, m->leaving, m->leaving);
    s->ops->round_sums(stored_row(s, m->key, i * m->most + m->left - m->leaving, d.KV), sum, m->leaving * d.KV);
    arena_pop(s->arena, mark);
}

// Moves the leaving blocks of layer l out of the window, and the rest of the window to its first rows.
static void blocks_leave(ContextMemory *m, StreamBP *s, size_t l) {
    const Shapes d = layer_of(s, l)->shape;
    const size_t i = full_number(s, l), rows = m->leaving * m->set.block, row = d.KV * d.stored;
    Stored *k = layer_keys(s, KEYS, l), *v = layer_keys(s, VALUES, l);
    Stored *rotated = stored_row(s, m->rotated, i * s->kv.rows[0], d.KV);
    if (!rows) return;
    blocks_key(m, s, l, i);
    for (size_t b = 0; b < m->leaving; b++) {
        const size_t number = m->left - m->leaving + b, first = b * m->set.block;
        Stored *const from[2] = {stored_row(s, k, first, d.KV), stored_row(s, v, first, d.KV)};
        for (size_t j = 0; j < 2 && !number; j++)
            s->ops->copy(outside_rows(m, s, l, j, 0), from[j], m->set.block * row);
        if (number) block_move(m, s, l, number, 0, from);
    }
    page_finish(s->ops, &m->page[i]);
    slide_rows(s->ops, k, rows, 0, m->held, row), slide_rows(s->ops, v, rows, 0, m->held, row);
    slide_rows(s->ops, summed_row(s, m->received, i, s->kv.rows[0]), rows, 0, m->held, d.summed);
    if (m->held) s->ops->copy(rotated, k, m->held * row);
    rotate_from_zero(s, l, rotated, m->row, m->held, 0);
}

// Fills m->taken for queries q[n,NH,HD] of layer l: scores the blocks in memory, and gives the best ones to the layer's
// `count` slots. Ties go to the earlier block.
static void blocks_choose(const ContextMemory *m, const StreamBP *s, size_t l, const Stored *q, size_t n,
                          size_t count) {
    const Shapes d = layer_of(s, l)->shape;
    const size_t blocks = m->left - 1, mark = arena_mark(s->arena);
    Stored *x = push_stored(s, SHARE_WORKSPACE, "queries of blocks", d.KV);
    Summed *sum = push_summed(s, SHARE_WORKSPACE, "sums of queries", d.KV);
    Summed *score = push_summed(s, SHARE_WORKSPACE, "scores of blocks", blocks);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "best blocks", s->ops->blocks_choose_scratch(count));
    if (blocks > count) {
        s->ops->zero(sum, d.KV * d.summed);
        s->ops->linear_backward_weight(sum, NULL, m->groups, q, n * d.NH, d.HD, d.NKV, d.NKV);
        s->ops->round_sums(x, sum, d.KV);
        s->ops->router_logits(score, x, stored_row(s, m->key, full_number(s, l) * m->most + 1, d.KV), NULL, 1, d.KV,
                              blocks, 0);
    }
    s->ops->blocks_choose(m->slot + full_number(s, l) * m->slots, m->taken, blocks > count ? score : NULL, blocks,
                          count, scratch);
    arena_pop(s->arena, mark);
}

// Loads m->taken[count] into slots of layer l from a place that only the host reaches.
static void blocks_fetch(ContextMemory *m, StreamBP *s, size_t l, size_t count) {
    const int32_t *taken = (const int32_t *)m->host;
    s->ops->copy_out(m->host, m->taken, count * sizeof(int32_t));
    for (size_t i = 0; i < count; i++) {
        const size_t row = (1 + i) * m->set.block;
        Stored *const to[2] = {outside_rows(m, s, l, 0, row), outside_rows(m, s, l, 1, row)};
        if (taken[i]) block_move(m, s, l, (size_t)taken[i], 1, to);
    }
    page_await(s->ops, &m->page[full_number(s, l)]);
}

// Loads the blocks of layer l that the queries q[n,NH,HD] want, unless they are loaded already. Returns their number.
static size_t blocks_load(ContextMemory *m, StreamBP *s, size_t l, const Stored *q, size_t n) {
    const size_t count = min_size(m->left - 1, m->slots), width = m->set.block * layer_of(s, l)->shape.KV;
    if (!count) return 0;
    blocks_choose(m, s, l, q, n, count);
    for (size_t j = 0; j < 2 && m->reached; j++)
        s->ops->gather_rows(outside_rows(m, s, l, j, m->set.block),
                            stored_row(s, m->home[j], full_number(s, l) * m->most, width), m->taken, count, width);
    if (!m->reached) blocks_fetch(m, s, l, count);
    return count;
}

// ---- attention ------------------------------------------------------------------------------------------------------
// Runs attention inside or outside the window: queries q[n,NH,HD], `before` earlier keys; own: also the queries' own
// keys
static void context_part(StreamBP *s, size_t l, void *out, Summed *lse, const Stored *q, const Stored *k,
                         const Stored *v, size_t n, size_t before, int own, int partial) {
    const Shapes d = layer_of(s, l)->shape;
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "attention scratch",
                                  s->ops->attention_scratch(n, d.NH, d.NKV, d.HD, s->kv.slots));
    Span span = {0, before, before + n, 0};
    const double pairs = own ? query_key_pairs(before, before + n, 0) : (double)n * (double)before;
    const Spans spans = {&span, 1, 0, pairs};
    AttentionShape shape = attention_shape(s, l, spans);
    shape.partial = partial, shape.accumulate = partial && own;
    if (!own) shape.keys.end = before;
    s->ops->attention_forward(out, lse, q, k, v, &shape, scratch);
    arena_pop(s->arena, mark);
}

// Runs full attention of chunk c: the mixer's norm, K, V of the window (c.token: c's row in it) and of blocks -> x_1.
static void context_attention(ContextMemory *m, const Visit *v, const Activations *a) {
    StreamBP *s = v->s;
    const Chunk c = v->c;
    const size_t l = v->l;
    const Shapes d = v->layer->shape;
    const size_t i = full_number(s, l), mark = arena_mark(s->arena), Q = c.n * d.Q;
    Stored *rotated = stored_row(s, m->rotated, i * s->kv.rows[0], d.KV);
    Stored *own = stored_row(s, rotated, m->held, d.KV);
    Summed *received = summed_row(s, m->received, i, s->kv.rows[0]), *sums = NULL;
    s->ops->copy(own, key_value_at(s, KEYS, l, c.token), c.n * d.KV * d.stored);
    rotate_from_zero(s, l, own, m->row + m->held, c.n, 0);
    queries_project(v, a);
    if (m->left) {
        Stored *q = push_stored(s, SHARE_WORKSPACE, "queries at the window's edge", Q);
        sums = push_summed(s, SHARE_WORKSPACE, "sums of attention output", Q);
        s->ops->copy(q, a->q, Q * d.stored);
        rotate_from_zero(s, l, q, m->edge, c.n, 1);
        const size_t rows = (1 + blocks_load(m, s, l, q, c.n)) * m->set.block;
        context_part(s, l, sums, a->lse, q, outside_rows(m, s, l, 0, 0), outside_rows(m, s, l, 1, 0), c.n, rows, 0, 1);
    }
    rotate_from_zero(s, l, a->q, m->row + m->held, c.n, 1);
    context_part(s, l, sums ? (void *)sums : a->attention_out, a->lse, a->q, rotated, layer_keys(s, VALUES, l), c.n,
                 m->held, 1, sums != NULL);
    if (sums) s->ops->round_sums(a->attention_out, sums, Q);
    s->ops->zero(summed_row(s, received, m->held, 1), c.n * d.summed);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "attention received by heads",
                                  s->ops->attention_received_scratch(m->held + c.n, d.NKV));
    s->ops->attention_received(received, a->q, rotated, a->lse, c.n, m->held + c.n, d.NH, d.NKV, d.HD,
                               attention_scale(s->model), scratch);
    sinks_forward(v, a->attention_out, a->lse, c.n);
    attention_output(v, a);
    arena_pop(s->arena, mark);
}

// ---- a text ---------------------------------------------------------------------------------------------------------
// Runs n tokens (host; NULL in the dry run) through every layer. Afterwards `inputs` holds their x_L.
static void context_forward(ContextMemory *m, Cache *cache, StreamBP *s, const int32_t *tokens, size_t n) {
    const size_t over = m->held + n > s->kv.rows[0] ? m->held + n - s->kv.rows[0] : 0;
    m->leaving = (over + m->set.block - 1) / m->set.block;
    m->held -= m->leaving * m->set.block, m->left += m->leaving;
    const Chunk text = {0, n, cache->used[0], 0, 1, &cache->spans}, window = {0, n, m->held, 0, 1, NULL};
    cache->spans.count = 0, cache->last = text;
    cache_add(cache, 0, tokens, n, 0);
    s->ops->copy_in(s->now.tokens, cache->pass_token, n * sizeof(int32_t));
    s->ops->copy_in(m->running, cache->pass_position, n * sizeof(int32_t));
    s->now.position = m->running;
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, text, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        const int full = has_attention(v.layer) && !v.layer->window;
        v.c = full ? window : text, v.w = weights_acquire_for(&s->memory, v.l, n);
        weights_prefetch(&s->memory, v.l);
        if (full) blocks_leave(m, s, v.l);
        s->now.position = full ? m->zero : m->running;
        Activations a = forward_activations(&v);
        mixer_keys(&v, &a);
        if (full)
            context_attention(m, &v, &a);
        else
            mixer_forward(&v, &a);
        mlp_forward(&v, &a);
        drop(&v, &a);
        weights_release(&s->memory, v.l);
    }
    layers_end(&s->memory);
    m->held += n;
    cache->last.row = n - 1, cache->last.n = cache->texts = 1;
}

// Appends tokens (host; NULL in the dry run) to the text. Once blocks leave, feeds the last token alone, so that it
// chooses its own blocks before its successor is drawn.
static void context_feed(ContextMemory *m, Cache *cache, StreamBP *s, const int32_t *tokens, size_t count) {
    for (size_t done = 0, n; done < count; done += n) {
        n = min_size(count - done, cache->rows);
        if (cache->used[0] + count - done > s->kv.rows[0] && count - done > 1) n = min_size(n, count - done - 1);
        context_forward(m, cache, s, tokens ? tokens + done : NULL, n);
    }
}

// Makes the dry run: the longest chunk before and after all blocks have left, a single token, and a draw.
static void context_walk(StreamBP *s, ContextSettings set, size_t capacity) {
    const SamplingSettings likeliest = {0};
    Cache cache;
    ContextMemory m;
    cache_allocate(&cache, 1, capacity);
    context_allocate(&m, set, s->model, capacity);
    context_begin(&m, &cache, s);
    context_forward(&m, &cache, s, NULL, cache.rows);
    if (m.most) {
        const size_t over = min_size(cache.rows, capacity - s->kv.rows[0]);
        cache.used[0] = 0;
        m.held = s->kv.rows[0] + over - cache.rows, m.left = m.most - (over + set.block - 1) / set.block;
        context_forward(&m, &cache, s, NULL, cache.rows);
        m.held = s->kv.rows[0] - 1, cache.used[0] = 0;
    }
    if (m.held < s->kv.rows[0]) context_forward(&m, &cache, s, NULL, 1);
    cache_draw(&cache, s, &likeliest, NULL, NULL, NULL);
    context_end(&m, s);
    context_free(&m), cache_free(&cache);
}

#endif
