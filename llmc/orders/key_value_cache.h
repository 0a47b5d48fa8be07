/*
The key/value cache: generation as one more order of the steps of streambp.h. It is chunk-major: a pass takes a chunk of
tokens through every layer before the next chunk starts. It keeps K and V of all layers, and the residual stream of one
chunk. The cache is on the arena between two training passes, never during a pass.

A cache is a sequence of `slots` documents of `capacity` tokens each; slot b is tokens [b * capacity, (b + 1) *
capacity). A pass appends runs of tokens to any slots, as documents packed into a sequence: a prompt to one slot, many
prompts to many slots, a token to each slot. With several slots a pass computes K, V in rows of its own and scatters
them to the slots. In a single slot, layers with a window keep only the window; several slots keep all keys. A single
slot whose windows never slide is laid out like several, if the op set records launches: then no launch of a step moves.

A step of n texts is recorded once for each n. So that few n occur, steps are padded with texts of one token, which
nobody reads (cache_padded). Each has a document after the slots.

A layer of linear attention has one state for each slot: the state after the slot's last token. One more state, after
the slots' states, saves the state of a common prefix, so that several slots can begin with the same tokens.

    cache_allocate   allocates host memory; call it once, before training
    cache_record     records the routes of tokens in a model with experts; call it after cache_allocate
    cache_begin      pushes the cache on the arena (RunSettings of plan.h have planned it)
    cache_append     appends tokens to slots, in as few passes as the tokens fit
    cache_feed       appends tokens to one slot
    cache_step       appends one token to each of many slots
    cache_keep       saves a slot's state, for cache_copy to slots that begin with the slot's tokens
    cache_draw       draws the next token of each text that was fed last
    cache_end        pops the cache from the arena
*/
#ifndef LLMC_KEY_VALUE_CACHE_H
#define LLMC_KEY_VALUE_CACHE_H
#include "streambp.h"

enum { CACHE_PASS = 8192 }; // most tokens of a pass over several slots; longer passes are no faster

// Tokens to append to a slot
typedef struct {
    size_t slot;
    const int32_t *tokens; // [n] host; NULL in the dry run
    size_t n;
} Append;

typedef struct {
    size_t slots, capacity; // number of documents, most tokens of each
    size_t rows;            // most tokens of a pass
    size_t padding;         // documents of one token after the slots, for padded steps
    size_t texts;           // texts of the last pass; further spans are padding
    int scattered;          // 1: a pass has rows of its own for K, V
    int turns;              // ZeRO 3: ranks gather weights together but generate different texts (cache_turn)
    size_t mark;            // the arena's mark before cache_begin
    Chunk last;             // tokens fed last: cache_draw draws their successors
    Batch documents;
    size_t *used; // [slots] tokens in each slot
    // The current pass, on the host
    int32_t *pass_token, *pass_position, *pass_row; // [rows] pass_row: row in the slots
    Span *span;                                     // [slots] the pass's runs of tokens
    Spans spans;
    int32_t *row;    // [rows] pass_row on the device
    int32_t *token;  // [slots] drawn tokens, on the device
    double *uniform; // [slots] uniform numbers of the draws, on the device
    Span *copied;    // [slots] span on the device
    // Experts, on the host; NULL: routes are not recorded
    uint16_t **route;               // [slots] routes of a slot's tokens, [capacity,layers with experts,k], or NULL
    uint16_t *fed;                  // [layers with experts,n,k] routes of a pass
    void (*between)(void *context); // called after each pass of cache_append; NULL: not called
    void *context;
} Cache;

// Returns the tokens of the longest pass.
static size_t cache_rows(const Cache *cache, size_t chunk) {
    if (cache->slots == 1) return min_size(chunk, cache->capacity);
    return max_size(cache->slots, min_size(min_size(chunk, CACHE_PASS), cache->slots * cache->capacity));
}

// Allocates host memory, which outlives the cache on the arena.
static void cache_allocate(Cache *cache, size_t slots, size_t capacity) {
    memset(cache, 0, sizeof(*cache));
    if (!slots || !capacity || capacity > ((size_t)INT32_MAX - CACHE_PASS) / slots - 1)
        die("a key/value cache of %zu texts of %zu tokens is too large to index; take fewer or shorter texts", slots,
            capacity);
    cache->slots = slots, cache->capacity = capacity, cache->documents.N = slots * capacity;
    const size_t rows = cache_rows(cache, SIZE_MAX);
    cache->used = (size_t *)checked_calloc(slots, sizeof(size_t), "the lengths of texts");
    cache->pass_token = (int32_t *)checked_calloc(rows, sizeof(int32_t), "tokens of texts");
    cache->pass_position = (int32_t *)checked_calloc(rows, sizeof(int32_t), "positions of texts");
    cache->pass_row = (int32_t *)checked_calloc(rows, sizeof(int32_t), "rows of texts");
    cache->span = (Span *)checked_calloc(slots, sizeof(Span), "keys of texts");
    cache->spans.span = cache->span;
}

static void cache_record(Cache *cache, const Config *config) {
    const size_t layers = expert_layers_before(config, config->num_hidden_layers), k = config->num_experts_per_tok;
    cache->route = (uint16_t **)checked_calloc(cache->slots, sizeof(uint16_t *), "routes of texts");
    cache->fed =
        (uint16_t *)checked_calloc(layers * cache_rows(cache, SIZE_MAX) * k, sizeof(uint16_t), "routes of texts");
}

static void cache_free(Cache *cache) {
    free(cache->route), free(cache->fed);
    free(cache->used), free(cache->pass_token), free(cache->pass_position), free(cache->pass_row), free(cache->span);
    memset(cache, 0, sizeof(*cache));
}

// Returns the texts of a padded step: the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..., at most all slots.
static size_t cache_padded(const Cache *cache, size_t n) {
    size_t padded = 1;
    while (padded < n) padded = padded >= 16 && padded / 2 * 3 >= n ? padded / 2 * 3 : 2 * padded;
    return min_size(padded, cache->slots);
}

// Chooses the cache's layout. States of linear attention have no padding.
static void cache_lay_out(Cache *cache, const StreamBP *s) {
    const size_t window = window_of_model(&s->model->config);
    const int slides = window && window - 1 + cache->rows < cache->capacity;
    cache->padding = 0;
    for (size_t n = 1; n < cache->slots && s->ops->graphs && !layers_with_state(&s->model->config); n++)
        cache->padding = max_size(cache->padding, cache_padded(cache, n) - n);
    cache->scattered = cache->slots > 1 || (s->ops->graphs && !slides);
    cache->documents.N = cache->slots * cache->capacity + cache->padding;
}

static void cache_begin(Cache *cache, StreamBP *s) {
    const size_t linear = layers_with_state(&s->model->config);
    cache->mark = arena_mark(s->arena);
    cache->rows = cache_rows(cache, s->setup->chunk);
    cache_lay_out(cache, s);
    const size_t tokens = cache->documents.N, slots = cache->slots;
    const int scattered = cache->scattered;
    memset(cache->used, 0, cache->slots * sizeof(size_t));
    s->now.pass = PASS_FORWARD_ONLY;
    sequence_set(s, &cache->documents);
    sequence_split(s, 1); // every rank generates for itself
    push_all_key_values(s, tokens, scattered ? tokens : cache->rows, scattered ? cache->rows : 0);
    s->kv.slots.count = slots, s->kv.slots.tokens = cache->capacity;
    if (linear) push_states(s, linear, slots > 1 ? slots + 1 : 1, scattered ? cache->capacity : 0);
    s->now.rows = cache->rows;
    push_inputs(s);
    if (expert_layers(s))
        s->routes.fed =
            (uint16_t *)arena_push(s->arena, SHARE_WORKSPACE, "routes of a pass",
                                   expert_layers(s) * cache->rows * shapes_of(s->model).router.k, sizeof(uint16_t));
    s->now.tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", cache->rows, sizeof(int32_t));
    s->now.position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", cache->rows, sizeof(int32_t));
    cache->row = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "rows of a pass", scattered ? cache->rows : 0,
                                       sizeof(int32_t));
    cache->token = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "drawn tokens", cache->slots, sizeof(int32_t));
    cache->uniform = (double *)arena_push(s->arena, SHARE_WORKSPACE, "uniform numbers", cache->slots, sizeof(double));
    s->ops->zero(cache->uniform, slots * sizeof(double)); // padding draws with 0
    cache->copied = (Span *)arena_push(s->arena, SHARE_WORKSPACE, "spans of a step", cache->slots, sizeof(Span));
}

// ---- ranks that gather weights for each other (ZeRO 3) --------------------------------------------------------------
// The next work for which a rank needs weights: none, a pass through all layers, the head
typedef enum { TURN_NONE, TURN_FORWARD, TURN_DRAW } Turn;

// Gathers and releases a turn's weights for other ranks, without computing.
static void cache_serve(StreamBP *s, Turn turn) {
    if (turn == TURN_DRAW) {
        weights_acquire_for(&s->memory, GROUP_HEAD, 0);
        weights_release(&s->memory, GROUP_HEAD);
        return;
    }
    weights_acquire(&s->memory, GROUP_EMBEDDING);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        weights_acquire_for(&s->memory, v.l, 0);
        weights_prefetch(&s->memory, v.l);
        weights_release(&s->memory, v.l);
    }
    layers_end(&s->memory);
}

// Joins the other ranks' gathers until the turn is `wanted`: gathers are collective, but each rank generates its own
// texts. Passes through the layers go before draws. TURN_NONE returns when no rank needs weights. Collective.
static void cache_turn(const Cache *cache, StreamBP *s, Turn wanted) {
    while (cache->turns) {
        double wants[2] = {wanted == TURN_FORWARD ? 1.0 : 0.0, wanted == TURN_DRAW ? 1.0 : 0.0};
        dist_sum(RANKS_ALL, wants, 2);
        const Turn turn = wants[0] > 0 ? TURN_FORWARD : wants[1] > 0 ? TURN_DRAW : TURN_NONE;
        if (turn == wanted) return;
        cache_serve(s, turn);
    }
}

// ---- graphs: op set "cuda" repeats the launches of a step as a whole ------------------------------------------------
// Makes the graph's key for a part of a pass of n tokens, each of another slot, or for their draws (of: the draws'
// settings, else NULL). Returns NULL if launches differ from pass to pass: rows of K, V move, weights may be loaded or
// gathered, or a step of the optimizer is deferred, or latents are expanded.
static const GraphKey *graph_key(const Cache *cache, const StreamBP *s, GraphKey *key, size_t n, size_t part,
                                 const SamplingSettings *of) {
    const Residency *r = &s->memory;
    if (!cache->scattered || weights_are_staged(r) || r->hook.context || s->model->config.kv_lora_rank) return NULL;
    memset(key, 0, sizeof(*key));
    key->span = s->now.span, key->copied = cache->copied, key->n = n, key->part = part;
    if (of) key->of = *of;
    return key;
}

// Usage: for (int calls = graph_begin(s, key); calls; calls = graph_end(s, key)) ...; key NULL: runs the body once
static int graph_begin(const StreamBP *s, const GraphKey *key) { return key ? s->ops->graph_begin(key) : 1; }
static int graph_end(const StreamBP *s, const GraphKey *key) { return key ? s->ops->graph_end() : 0; }

// ---- passes ---------------------------------------------------------------------------------------------------------
// Runs the tokens of chunk c through every layer. Afterwards `inputs` holds their x_L. Scatters K and V to cache->row.
static void cache_forward(const Cache *cache, StreamBP *s, Chunk c) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, c, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        v.c = c, v.w = weights_acquire_for(&s->memory, v.l, c.n);
        weights_prefetch(&s->memory, v.l);
        s->ops->repeat(v.times);
        Activations a = forward_activations(&v);
        mixer_keys(&v, &a);
        for (int i = KEYS; i <= VALUES && cache->scattered && keys_of_layer(s, KEYS, v.l); i++)
            s->ops->scatter_rows(layer_keys(s, (KeyTensor)i, v.l), key_value_at(s, (KeyTensor)i, v.l, c.token),
                                 cache->row, c.n, key_width(&v.layer->shape, (KeyTensor)i));
        rest_forward(&v, &a);
        weights_release(&s->memory, v.l);
        s->ops->repeat(1);
    }
    layers_end(&s->memory);
}

// Copies the routes of the last pass to the routes of its slots.
static void cache_take_routes(const Cache *cache, const StreamBP *s, size_t n) {
    const size_t layers = expert_layers(s), k = shapes_of(s->model).router.k;
    int wanted = 0;
    for (size_t i = 0; cache->route && i < cache->texts; i++)
        wanted |= cache->route[cache->span[i].document / cache->capacity] != NULL;
    if (!wanted) return;
    s->ops->copy_out(cache->fed, s->routes.fed, layers * n * k * sizeof(uint16_t));
    for (size_t i = 0; i < cache->texts; i++) {
        const Span *span = &cache->span[i];
        uint16_t *route = cache->route[span->document / cache->capacity];
        for (size_t t = span->begin; route && t < span->end; t++)
            for (size_t l = 0; l < layers; l++)
                memcpy(route + ((t - span->document) * layers + l) * k,
                       cache->fed + (l * n + span->row + t - span->begin) * k, k * sizeof(uint16_t));
    }
}

// Adds n tokens to the pass, at the pass's row `row`, for the end of a slot. tokens: NULL in the dry run
static void cache_add(Cache *cache, size_t slot, const int32_t *tokens, size_t n, size_t row) {
    const size_t document = slot * cache->capacity, begin = document + cache->used[slot];
    const Span span = {document, begin, begin + n, row};
    cache->span[cache->spans.count++] = span;
    for (size_t t = 0; t < n; t++) {
        cache->pass_token[row + t] = tokens ? tokens[t] : 0;
        cache->pass_position[row + t] = (int32_t)(cache->used[slot] + t);
        cache->pass_row[row + t] = (int32_t)(begin + t);
    }
    cache->used[slot] += n;
}

// Adds padding to the n texts of a step. Returns the step's tokens.
static size_t cache_pad(Cache *cache, size_t n) {
    const size_t padded = cache->padding ? cache_padded(cache, n) : n, slots = cache->slots * cache->capacity;
    for (size_t row = n; row < padded; row++) {
        const size_t document = slots + row - n;
        const Span span = {document, document, document + 1, row};
        cache->span[cache->spans.count++] = span;
        cache->pass_token[row] = cache->pass_position[row] = 0;
        cache->pass_row[row] = (int32_t)document;
    }
    return padded;
}

// Runs the model on the n tokens that were added last.
static void cache_pass(Cache *cache, StreamBP *s, size_t n) {
    const Chunk c = {0, n, cache->scattered ? cache->documents.N : cache->span[0].begin, 0, 1, &cache->spans};
    GraphKey room;
    const GraphKey *key = cache->spans.count == n ? graph_key(cache, s, &room, n, 0, NULL) : NULL;
    cache_turn(cache, s, TURN_FORWARD);
    s->ops->copy_in(s->now.tokens, cache->pass_token, n * sizeof(int32_t));
    s->ops->copy_in(s->now.position, cache->pass_position, n * sizeof(int32_t));
    if (cache->scattered) s->ops->copy_in(cache->row, cache->pass_row, n * sizeof(int32_t));
    if (key) s->ops->copy_in(cache->copied, cache->span, n * sizeof(Span));
    for (int calls = graph_begin(s, key); calls; calls = graph_end(s, key)) cache_forward(cache, s, c);
    cache_take_routes(cache, s, n);
    cache->last = c;
}

// Appends tokens to different slots; an append may have no tokens. cache_draw then draws the last append's next token.
static void cache_append(Cache *cache, StreamBP *s, const Append *append, size_t count) {
    for (size_t i = 0, done = 0; i < count;) {
        size_t n = 0;
        for (cache->spans.count = 0; i < count && n < cache->rows;) {
            const Append *a = &append[i];
            const size_t part = min_size(a->n - done, cache->rows - n);
            if (part) cache_add(cache, a->slot, a->tokens ? a->tokens + done : NULL, part, n);
            n += part, done += part;
            if (done == a->n) i++, done = 0;
        }
        if (!n) continue;
        cache->texts = cache->spans.count;
        cache_pass(cache, s, n);
        cache->last.row = n - 1, cache->last.n = cache->texts = 1;
        if (cache->between) cache->between(cache->context);
    }
}

static void cache_feed(Cache *cache, StreamBP *s, size_t slot, const int32_t *tokens, size_t count) {
    const Append append = {slot, tokens, count};
    cache_append(cache, s, &append, 1);
}

// Appends one token (host) to each of n different slots; cache_draw then draws each slot's next token.
static void cache_step(Cache *cache, StreamBP *s, const size_t *slot, const int32_t *tokens, size_t n) {
    cache->spans.count = 0;
    for (size_t i = 0; i < n; i++) cache_add(cache, slot[i], tokens ? &tokens[i] : NULL, 1, i);
    cache->texts = n;
    cache_pass(cache, s, cache_pad(cache, n));
}

// Tells whether slots keep K, V of all their tokens (no window slides) and a state can be saved.
static int cache_keeps_all(const Cache *cache, const StreamBP *s) {
    const int linear = layers_with_state(&s->model->config) > 0;
    return s->kv.rows[1] == s->kv.rows[0] && !(linear && cache->slots == 1);
}

// Copies slot `from`'s states of linear attention to slot `to`. Slot number `slots` holds the saved states.
static void cache_copy_states(const StreamBP *s, size_t from, size_t to) {
    const Shapes d = shapes_of(s->model);
    for (size_t l = 0; l < d.L; l++) {
        if (!has_state(layer_of(s, l))) continue;
        Summed *state = layer_state(s, l);
        Stored *columns = layer_columns(s, l);
        s->ops->copy(summed_row(s, state, to, d.linear.S), summed_row(s, state, from, d.linear.S),
                     d.linear.S * d.summed);
        if (d.linear.columns)
            s->ops->copy(stored_row(s, columns, to, d.linear.columns), stored_row(s, columns, from, d.linear.columns),
                         d.linear.columns * d.stored);
    }
}

// Saves the states of a slot for cache_copy. Needs cache_keeps_all.
static void cache_keep(const Cache *cache, const StreamBP *s, size_t slot) { cache_copy_states(s, slot, cache->slots); }

// Makes slot `to` a document of the first n tokens of slot `from`, which may be `to`. Needs cache_keeps_all. Linear
// attention: copies the states of slot `state`. They must be the states after token n: state = from if `from` holds n
// tokens; state = cache->slots if cache_keep was last called after n tokens.
static void cache_copy(Cache *cache, const StreamBP *s, size_t from, size_t state, size_t to, size_t n) {
    const size_t L = s->model->config.num_hidden_layers;
    const size_t source = from * cache->capacity, target = to * cache->capacity;
    for (size_t l = 0; l < L && from != to; l++) {
        const Shapes *d = &layer_of(s, l)->shape;
        for (int i = KEYS; i <= VALUES && keys_of_layer(s, KEYS, l); i++)
            s->ops->copy(key_value_at(s, (KeyTensor)i, l, target), key_value_at(s, (KeyTensor)i, l, source),
                         n * key_width(d, (KeyTensor)i) * d->stored);
    }
    cache_copy_states(s, state, to);
    cache->used[to] = n;
}

// Empties a slot.
static void cache_clear(Cache *cache, StreamBP *s, size_t slot) {
    cache->used[slot] = 0;
    if (cache->slots == 1) s->kv.first = 0;
}

// Ends the program because a logit is NaN or infinite. row: the logit's row among the tokens fed last; drawn: -1 - the
// logit's vocabulary id
static void cache_refuse(const Cache *cache, const StreamBP *s, Stored *logits, size_t row, int32_t drawn) {
    const size_t id = (size_t)(-1 - (int64_t)drawn);
    const size_t position = (size_t)cache->pass_position[cache->last.row + row] + 1;
    double logit; // room for any type
    s->ops->copy_out(&logit, stored_row(s, logits, id, 1), dtype_size(s->model->dtype));
    die("the logit of token %zu at position %zu is %g: the weights are damaged or training has diverged; take another "
        "copy or an earlier checkpoint",
        id, position, element_to_double(&logit, s->model->dtype, 0));
}

// How one text of a step is drawn
typedef struct {
    const SamplingSettings *settings;
    void *logits; // [V] host: gets the logits that its token is drawn from, in the model's type; NULL: not wanted
} DrawOwn;

// Adds to the settings how the model divides and caps its logits.
static SamplingSettings draw_scaled(const StreamBP *s, const SamplingSettings *settings) {
    SamplingSettings scaled = *settings;
    scaled.temperature *= logits_divisor(&s->model->config), scaled.cap = logits_cap(&s->model->config);
    return scaled;
}

// Draws cache->token[n] from n rows of logits, each by its own settings.
static void cache_draw_own(const Cache *cache, StreamBP *s, const DrawOwn *own, Stored *logits, const double *uniform,
                           size_t n, Summed *scratch) {
    const Shapes d = shapes_of(s->model);
    for (size_t i = 0; i < n; i++) {
        const Stored *row = stored_row(s, logits, i, d.logits_stride);
        const SamplingSettings scaled = draw_scaled(s, own[i].settings);
        s->ops->draw(cache->token + i, row, uniform + i, 1, d.V, d.logits_stride, &scaled, scratch);
        if (own[i].logits) s->ops->copy_out(own[i].logits, row, d.V * d.stored);
    }
}

// Draws token[n] (host) with uniform[n] (host) from logits of the last token appended (n = 1), or of the n tokens of
// the last cache_step. Ends the program on a NaN or infinite logit. own[n]: replaces `settings`; NULL: all texts have
// these settings. token, uniform: NULL in the dry run
static void cache_draw(Cache *cache, StreamBP *s, const SamplingSettings *settings, const DrawOwn *own,
                       const double *uniform, int32_t *token) {
    const Shapes d = shapes_of(s->model);
    GraphKey room;
    const SamplingSettings scaled = draw_scaled(s, settings);
    cache_turn(cache, s, TURN_DRAW);
    Visit v = {0};
    v.s = s, v.w = weights_acquire_for(&s->memory, GROUP_HEAD, cache->last.n), v.c = cache->last;
    Chunk *c = &v.c;
    s->ops->copy_in(cache->uniform, uniform, cache->texts * sizeof(double));
    for (size_t done = 0; done < cache->texts; done += c->n) {
        size_t mark = arena_mark(s->arena);
        c->row = cache->last.row + done, c->n = min_size(s->setup->logits_chunk, cache->last.n - done);
        const GraphKey *key = own ? NULL : graph_key(cache, s, &room, cache->last.n, 1 + c->row, &scaled);
        const size_t drawn = min_size(c->n, cache->texts - done);
        for (int calls = graph_begin(s, key); calls; calls = graph_end(s, key)) {
            Stored *logits = head_logits(&v).logits;
            Summed *scratch = push_summed(s, SHARE_LOGITS, "draw", s->ops->draw_scratch(d.V));
            if (own)
                cache_draw_own(cache, s, own + done, logits, cache->uniform + done, drawn, scratch);
            else
                s->ops->draw(cache->token, logits, cache->uniform + done, c->n, d.V, d.logits_stride, &scaled, scratch);
            arena_pop(s->arena, mark);
        }
        s->ops->copy_out(token ? token + done : NULL, cache->token, drawn * sizeof(int32_t));
        for (size_t i = 0; token && i < drawn; i++)
            if (token[done + i] < 0)
                cache_refuse(cache, s, stored_row(s, head_logits(&v).logits, i, d.logits_stride), done + i,
                             token[done + i]);
    }
    weights_release(&s->memory, GROUP_HEAD);
}

static void cache_end(Cache *cache, StreamBP *s) {
    s->ops->graphs_forget();
    s->routes.fed = NULL;
    arena_pop(s->arena, cache->mark);
}

// Makes the dry run of the last token of each of `slots` texts of `tokens` tokens.
static void cache_walk_token(StreamBP *s, size_t slots, size_t tokens) {
    const SamplingSettings likeliest = {0};
    Cache cache;
    size_t *slot = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of a dry run");
    cache_allocate(&cache, slots, tokens);
    cache_begin(&cache, s);
    for (size_t b = 0; b < slots; b++) slot[b] = b, cache.used[b] = tokens - 1;
    s->ops->repeat(1);
    if (slots > 1)
        cache_step(&cache, s, slot, NULL, slots);
    else
        cache_feed(&cache, s, 0, NULL, 1);
    cache_draw(&cache, s, &likeliest, NULL, NULL, NULL);
    cache_end(&cache, s);
    cache_free(&cache);
    free(slot);
}

// Makes the dry run of generation: the longest pass, split into the runs with the most blocks of linear attention, a
// single token, a step of all slots, and draws.
static void cache_walk(StreamBP *s, size_t slots, size_t capacity) {
    const SamplingSettings likeliest = {0};
    Cache cache;
    size_t *slot = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of a dry run");
    Append *append = (Append *)checked_calloc(slots, sizeof(Append), "slots of a dry run");
    cache_allocate(&cache, slots, capacity);
    cache_begin(&cache, s);
    size_t left = cache.rows - slots; // rows is at least slots
    for (size_t b = 0; b < slots; b++) slot[b] = append[b].slot = b, append[b].n = 1;
    for (size_t unit = DELTA_BLOCK, b = 0; left; b = (b + 1) % slots) {
        const size_t more = min_size(left, capacity - append[b].n) / unit * unit;
        append[b].n += more, left -= more;
        if (b + 1 == slots) unit = 1;
    }
    cache_append(&cache, s, append, slots);
    cache_clear(&cache, s, 0);
    cache_feed(&cache, s, 0, NULL, 1);
    for (size_t b = 0; b < slots; b++) cache_clear(&cache, s, b);
    if (slots > 1) cache_step(&cache, s, slot, NULL, slots);
    cache_draw(&cache, s, &likeliest, NULL, NULL, NULL);
    cache_end(&cache, s);
    cache_free(&cache);
    free(slot), free(append);
}

#endif
