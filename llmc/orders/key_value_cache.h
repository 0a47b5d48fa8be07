/*
The key/value cache: generation as one more order of the steps of streambp.h. It is chunk-major: a chunk passes through
every layer before the next one starts. K and V of all layers are kept, and one chunk of the residual stream. The cache
is on the arena between two training passes, never during one.

A cache is a sequence of `slots` documents of `capacity` tokens each; slot b is tokens [b * capacity, (b + 1) *
capacity). With several slots, `slots` scratch rows follow: a decoding step computes there and scatters K, V to the
slots. In a single slot, layers with a window keep only the window; several slots keep all keys.

A layer of linear attention has one state for each slot, that after its last token. To let several slots begin with the
same tokens, one more state after the slots' saves that of the common prefix.

    cache_allocate   once, before training: host memory
    cache_record     the same: has the routes of tokens recorded, in a model with experts
    cache_begin      pushes it on the arena (RunSettings of plan.h have put it into the plan)
    cache_feed       appends tokens to one slot
    cache_step       appends one token to each of many slots
    cache_keep       saves the state of a slot, for cache_copy to others that begin with its tokens
    cache_draw       draws the next token of each text that was fed last
    cache_end        pops it: the arena is as it was
*/
#ifndef LLMC_KEY_VALUE_CACHE_H
#define LLMC_KEY_VALUE_CACHE_H
#include "streambp.h"

typedef struct {
    size_t slots, capacity; // number of documents, room in each in tokens
    size_t tokens;          // of all slots, and scratch rows
    size_t chunk;           // tokens that pass through the layers at once
    int turns;              // ZeRO 3: ranks gather weights together but generate different texts (cache_turn)
    size_t mark;            // the arena's, before cache_begin
    Chunk last;             // tokens fed last: cache_draw draws their successors
    Batch documents;
    size_t *used;                      // [slots] tokens in each
    int32_t *position;                 // [capacity] 0, 1, 2, ...
    int32_t *step_position, *step_row; // [slots] of a step
    Span *step_span;                   // [slots] of a step: a token and the keys of its slot
    int32_t *row;                      // [slots] step_row; device
    int32_t *token;                    // [slots] drawn tokens; device
    double *uniform;                   // [slots] uniform numbers of the draws; device
    Span *span;                        // [slots] step_span; device
    // Experts, host; NULL: routes are not recorded
    uint16_t **route; // [slots] of a slot's tokens, [capacity,layers with experts,k]; NULL: none
    uint16_t *fed;    // [layers with experts,n,k] of a pass
} Cache;

// Allocates host memory, which outlives the cache on the arena.
static void cache_allocate(Cache *cache, size_t slots, size_t capacity) {
    memset(cache, 0, sizeof(*cache));
    if (!slots || !capacity || capacity > ((size_t)INT32_MAX - slots) / slots)
        die("a key/value cache of %zu texts of %zu tokens is more than can be indexed; take fewer or shorter ones",
            slots, capacity);
    cache->slots = slots, cache->capacity = capacity, cache->tokens = slots * capacity + (slots > 1 ? slots : 0);
    cache->documents.N = cache->tokens, cache->documents.documents = slots;
    cache->documents.document_start =
        (size_t *)checked_calloc(slots + 1, sizeof(size_t), "the documents of a key/value cache");
    cache->used = (size_t *)checked_calloc(slots, sizeof(size_t), "the lengths of texts");
    cache->position = (int32_t *)checked_calloc(capacity, sizeof(int32_t), "positions to sample at");
    cache->step_position = (int32_t *)checked_calloc(slots, sizeof(int32_t), "positions to sample at");
    cache->step_row = (int32_t *)checked_calloc(slots, sizeof(int32_t), "rows to sample at");
    cache->step_span = (Span *)checked_calloc(slots, sizeof(Span), "keys to sample from");
    for (size_t b = 0; b <= slots; b++) cache->documents.document_start[b] = b * capacity;
    for (size_t t = 0; t < capacity; t++) cache->position[t] = (int32_t)t;
}

static void cache_record(Cache *cache, const Config *config) {
    const size_t layers = expert_layers_before(config, config->num_hidden_layers), k = config->num_experts_per_tok;
    const size_t tokens = max_size(cache->capacity, cache->slots);
    cache->route = (uint16_t **)checked_calloc(cache->slots, sizeof(uint16_t *), "routes of texts");
    cache->fed = (uint16_t *)checked_calloc(layers * tokens * k, sizeof(uint16_t), "routes of texts");
}

static void cache_free(Cache *cache) {
    free(cache->route), free(cache->fed);
    free(cache->documents.document_start), free(cache->used);
    free(cache->position), free(cache->step_position), free(cache->step_row), free(cache->step_span);
    memset(cache, 0, sizeof(*cache));
}

static void cache_begin(Cache *cache, StreamBP *s) {
    const size_t linear = layers_of_kind(&s->model->config, LAYER_LINEAR);
    const int several = cache->slots > 1;
    cache->mark = arena_mark(s->arena);
    cache->chunk = min_size(s->setup->chunk, cache->capacity);
    memset(cache->used, 0, cache->slots * sizeof(size_t));
    s->now.pass = PASS_FORWARD_ONLY;
    s->now.batch = &cache->documents;
    sequence_split(s, 1); // every rank generates for itself
    push_key_value(s, s->model->config.num_hidden_layers, cache->tokens, several ? cache->tokens : cache->chunk, 0);
    if (linear) push_states(s, linear, several ? cache->slots + 1 : 1, several ? cache->capacity : 0);
    s->now.rows = max_size(cache->chunk, cache->slots);
    push_inputs(s);
    if (expert_layers(s))
        s->routes.fed =
            (uint16_t *)arena_push(s->arena, SHARE_WORKSPACE, "routes of a pass",
                                   expert_layers(s) * s->now.rows * shapes_of(s->model).router.k, sizeof(uint16_t));
    s->now.rows = s->now.N;
    s->now.tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", cache->tokens, sizeof(int32_t));
    s->now.position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", cache->tokens, sizeof(int32_t));
    cache->row = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "rows of a step", cache->slots, sizeof(int32_t));
    cache->token = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "drawn tokens", cache->slots, sizeof(int32_t));
    cache->uniform = (double *)arena_push(s->arena, SHARE_WORKSPACE, "uniform numbers", cache->slots, sizeof(double));
    cache->span = (Span *)arena_push(s->arena, SHARE_WORKSPACE, "spans of a step", cache->slots, sizeof(Span));
    for (size_t b = 0; b < cache->slots; b++)
        s->ops->copy_in(s->now.position + b * cache->capacity, cache->position, cache->capacity * sizeof(int32_t));
}

// ---- ranks that gather weights for each other (ZeRO 3) --------------------------------------------------------------
// What a rank needs weights for next: nothing, a pass through all layers, the head
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
    for (size_t i = 0; i < layer_count(s); i++) {
        const size_t l = visit_layer(s, layer_at(s, i));
        weights_acquire_for(&s->memory, l, 0);
        weights_prefetch(&s->memory, l);
        weights_release(&s->memory, l);
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
// Makes the key of a part of a step of n tokens; of: settings of its draws, or NULL. Returns NULL if the step's calls
// are not alike: weights are loaded or gathered, or the optimizer's step waits for them.
static const GraphKey *graph_key(const Cache *cache, const StreamBP *s, GraphKey *key, size_t n, size_t part,
                                 const SamplingSettings *of) {
    const Residency *r = &s->memory;
    if (cache->slots == 1 || weights_are_staged(r) || r->hook.context) return NULL;
    memset(key, 0, sizeof(*key));
    key->span = s->now.span, key->copied = cache->span, key->n = n, key->part = part;
    if (of) key->of = *of;
    return key;
}

// for (int calls = graph_begin(s, key); calls; calls = graph_end(s, key)) ...; key NULL: makes the calls once
static int graph_begin(const StreamBP *s, const GraphKey *key) { return key ? s->ops->graph_begin(key) : 1; }
static int graph_end(const StreamBP *s, const GraphKey *key) { return key ? s->ops->graph_end() : 0; }

// Runs the tokens of chunk c, on the device, through every layer.
static void cache_layers(StreamBP *s, Chunk c, const int32_t *rows) {
    Stored *kv[2] = {s->kv.k, s->kv.v};
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, c, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    for (size_t i = 0; i < layer_count(s); i++) {
        const size_t l = visit_layer(s, layer_at(s, i));
        w = weights_acquire_for(&s->memory, l, c.n);
        weights_prefetch(&s->memory, l);
        Activations a = forward_activations(s, l, c, w);
        mixer_keys(s, l, c, w, &a);
        for (size_t j = 0; j < 2 && rows && keys_of_layer(s, l); j++)
            s->ops->scatter_rows(layer_keys(s, kv[j], l), key_value_at(s, kv[j], l, c.row), rows, c.n,
                                 layer_shapes(s, l).KV);
        rest_forward(s, l, c, w, &a);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
}

// Runs tokens (host) of chunk c through every layer. Afterwards `inputs` holds their x_L. rows: in a step [c.n], the
// rows of the slots that K, V are scattered to; else NULL. key: the step's, or NULL
static void cache_forward(StreamBP *s, const int32_t *tokens, Chunk c, const int32_t *rows, const GraphKey *key) {
    s->inputs.begin = c.row;
    s->ops->copy_in(s->now.tokens + c.row, tokens, c.n * sizeof(int32_t));
    for (int calls = graph_begin(s, key); calls; calls = graph_end(s, key)) cache_layers(s, c, rows);
}

// Copies the routes of the last pass to those of slots: of n tokens at the end of slot[0], or (step) of one at the end
// of each slot[n].
static void cache_take_routes(const Cache *cache, const StreamBP *s, const size_t *slot, size_t n, int step) {
    const size_t layers = expert_layers(s), k = shapes_of(s->model).router.k;
    if (!cache->route || !cache->route[slot[0]]) return;
    s->ops->copy_out(cache->fed, s->routes.fed, layers * n * k * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        const size_t b = slot[step ? i : 0], token = cache->used[b] - (step ? 1 : n - i);
        for (size_t l = 0; l < layers; l++)
            memcpy(cache->route[b] + (token * layers + l) * k, cache->fed + (l * n + i) * k, k * sizeof(uint16_t));
    }
}

// Appends tokens (host; NULL in the dry run) to one slot, a chunk at a time.
static void cache_feed(Cache *cache, StreamBP *s, size_t slot, const int32_t *tokens, size_t count) {
    for (size_t done = 0; done < count;) {
        const Chunk c = chunk_of(s, slot * cache->capacity + cache->used[slot], min_size(count - done, cache->chunk));
        cache_turn(cache, s, TURN_FORWARD);
        cache_forward(s, tokens ? tokens + done : NULL, c, NULL, NULL);
        cache->used[slot] += c.n, done += c.n;
        cache_take_routes(cache, s, &slot, c.n, 0);
        cache->last = c;
        cache->last.row = cache->last.token = c.row + c.n - 1, cache->last.n = 1;
    }
}

// Appends one token (host) to each of n different slots: products of n rows, attention of each row to its slot's keys.
static void cache_step(Cache *cache, StreamBP *s, const size_t *slot, const int32_t *tokens, size_t n) {
    const size_t row = cache->slots * cache->capacity;
    const Chunk c = {row, n, row, 0, 1, cache->step_span};
    GraphKey key;
    if (cache->slots == 1) {
        cache_feed(cache, s, slot[0], tokens, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        size_t position = cache->used[slot[i]]++;
        Span *span = &cache->step_span[i];
        span->document = slot[i] * cache->capacity;
        span->begin = span->document + position, span->end = span->begin + 1, span->row = i;
        cache->step_position[i] = (int32_t)position, cache->step_row[i] = (int32_t)span->begin;
    }
    s->ops->copy_in(s->now.position + c.row, cache->step_position, n * sizeof(int32_t));
    s->ops->copy_in(cache->row, cache->step_row, n * sizeof(int32_t));
    s->ops->copy_in(cache->span, cache->step_span, n * sizeof(Span));
    cache_turn(cache, s, TURN_FORWARD);
    cache_forward(s, tokens, c, cache->row, graph_key(cache, s, &key, n, 0, NULL));
    cache_take_routes(cache, s, slot, n, 1);
    cache->last = c;
}

// Tells whether slots keep K, V of all their tokens (no window slides) and a state can be saved.
static int cache_keeps_all(const Cache *cache, const StreamBP *s) {
    const int linear = layers_of_kind(&s->model->config, LAYER_LINEAR) > 0;
    return s->kv.rows[1] == s->kv.rows[0] && !(linear && cache->slots == 1);
}

// Copies slot `from`'s states of linear attention to slot `to`; slot `slots` is the saved one.
static void cache_copy_states(const StreamBP *s, size_t from, size_t to) {
    const Shapes d = shapes_of(s->model);
    for (size_t l = 0; l < d.L; l++) {
        if (!layer_is_linear(&s->model->config, l)) continue;
        Summed *state = layer_state(s, l);
        Stored *columns = layer_columns(s, l);
        s->ops->copy(summed_row(s, state, to, d.S), summed_row(s, state, from, d.S), d.S * d.summed);
        if (d.columns)
            s->ops->copy(stored_row(s, columns, to, d.columns), stored_row(s, columns, from, d.columns),
                         d.columns * d.stored);
    }
}

// Saves the states of a slot for cache_copy. Needs cache_keeps_all.
static void cache_keep(const Cache *cache, const StreamBP *s, size_t slot) { cache_copy_states(s, slot, cache->slots); }

// Makes slot `to` a document of the first n tokens of slot `from`, which may be the same. Needs cache_keeps_all. With
// linear attention the last cache_keep must have been called after exactly these tokens.
static void cache_copy(Cache *cache, const StreamBP *s, size_t from, size_t to, size_t n) {
    const size_t L = s->model->config.num_hidden_layers;
    const size_t source = from * cache->capacity, target = to * cache->capacity;
    for (size_t l = 0; l < L && from != to; l++) {
        const Shapes d = layer_shapes(s, l);
        const size_t bytes = n * d.KV * d.stored;
        if (!keys_of_layer(s, l)) continue;
        s->ops->copy(key_value_at(s, s->kv.k, l, target), key_value_at(s, s->kv.k, l, source), bytes);
        s->ops->copy(key_value_at(s, s->kv.v, l, target), key_value_at(s, s->kv.v, l, source), bytes);
    }
    cache_copy_states(s, cache->slots, to);
    cache->used[to] = n;
}

// Empties a slot.
static void cache_clear(Cache *cache, StreamBP *s, size_t slot) {
    cache->used[slot] = 0;
    if (cache->slots == 1) s->kv.first = 0;
}

// Ends the program: row `row` of what was fed last has a logit that is not finite, of token -1 - drawn.
static void cache_refuse(const Cache *cache, const StreamBP *s, Stored *logits, size_t row, int32_t drawn) {
    const size_t id = (size_t)(-1 - (int64_t)drawn);
    const size_t position = cache->slots > 1 ? (size_t)cache->step_position[row] + 1 : cache->used[0];
    double logit; // room for any type
    s->ops->copy_out(&logit, stored_row(s, logits, id, 1), dtype_size(s->model->dtype));
    die("the logit of token %zu at position %zu is %g: the weights are damaged or training has diverged", id, position,
        element_to_double(&logit, s->model->dtype, 0));
}

// Draws token[n] (host) with uniform[n] (host) from logits: of the last token of cache_feed (n = 1), or of the n tokens
// of the last cache_step. Ends the program on a logit that is not finite. token, uniform: NULL in the dry run
static void cache_draw(Cache *cache, StreamBP *s, const SamplingSettings *settings, const double *uniform,
                       int32_t *token) {
    const Shapes d = shapes_of(s->model);
    GraphKey key;
    SamplingSettings scaled = *settings;
    scaled.temperature *= s->model->config.logits_scaling, scaled.cap = s->model->config.final_logit_softcapping;
    cache_turn(cache, s, TURN_DRAW);
    GroupWeights w = weights_acquire_for(&s->memory, GROUP_HEAD, cache->last.n);
    Chunk c = cache->last;
    s->ops->copy_in(cache->uniform, uniform, c.n * sizeof(double));
    for (size_t done = 0; done < cache->last.n; done += c.n) {
        size_t mark = arena_mark(s->arena);
        c.row = c.token = cache->last.row + done, c.n = min_size(s->setup->logits_chunk, cache->last.n - done);
        const GraphKey *part = graph_key(cache, s, &key, cache->last.n, 1 + c.row, &scaled);
        for (int calls = graph_begin(s, part); calls; calls = graph_end(s, part)) {
            Stored *logits = head_forward(s, c, w).logits;
            Summed *scratch = push_summed(s, SHARE_LOGITS, "draw", s->ops->draw_scratch(d.V));
            s->ops->draw(cache->token, logits, cache->uniform + done, c.n, d.V, d.logits_stride, &scaled, scratch);
            arena_pop(s->arena, mark);
        }
        s->ops->copy_out(token ? token + done : NULL, cache->token, c.n * sizeof(int32_t));
        for (size_t i = 0; token && i < c.n; i++)
            if (token[done + i] < 0)
                cache_refuse(cache, s, stored_row(s, head_forward(s, c, w).logits, i, d.logits_stride), done + i,
                             token[done + i]);
    }
    weights_release(&s->memory, GROUP_HEAD);
}

static void cache_end(Cache *cache, StreamBP *s) {
    s->ops->graphs_forget();
    s->routes.fed = NULL;
    arena_pop(s->arena, cache->mark);
}

// Dry run of generation: the longest chunk, a single token, a step of all slots, and draws.
static void cache_walk(StreamBP *s, size_t slots, size_t capacity) {
    const SamplingSettings likeliest = {0};
    Cache cache;
    size_t *slot = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of a dry run");
    for (size_t b = 0; b < slots; b++) slot[b] = b;
    cache_allocate(&cache, slots, capacity);
    cache_begin(&cache, s);
    cache_feed(&cache, s, 0, NULL, cache.chunk);
    if (cache.used[0] < capacity) cache_feed(&cache, s, 0, NULL, 1);
    cache_clear(&cache, s, 0);
    if (slots > 1) cache_step(&cache, s, slot, NULL, slots);
    cache_draw(&cache, s, &likeliest, NULL, NULL);
    cache_end(&cache, s);
    cache_free(&cache);
    free(slot);
}

#endif
