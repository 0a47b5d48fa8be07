/*
Text generation: the host side of the key/value cache of orders/key_value_cache.h, and the draw of a token from its logits.

    sampler_allocate   once, before training: host memory, and every refusal that is known beforehand
    sampler_begin      pushes the cache on the run's arena; RunSettings.cache_tokens has put it into the plan
    sampler_feed       the prompt, of any length that fits; again later to go on with given tokens
    sampler_next       the next token, drawn from the logits of the last one
    sampler_end        pops the cache: the arena is as it was
    sampler_free

Nothing after sampler_allocate allocates. The token at position t of a text is drawn with random number t of the seed: the
text is the same however much of it was fed and however much was drawn before (but for rounding: products of one row and of
many may sum in another order).
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "llmc/plan/plan.h"
#include "llmc/base/random.h"

#define RANDOM_STREAM_SAMPLING 0x73616d706c65ull // of random.h ("sample")

typedef struct {
    double temperature; // logits are divided by it; 0: always the likeliest token
    size_t top_k;       // only the top_k likeliest tokens; 0: all
    double top_p;       // of these, only the fewest likeliest that hold this share of their probability; 1: all
    uint64_t seed;
} SamplingSettings;

typedef struct {
    StreamBP *stream;
    Cache cache;         // of one slot
    size_t capacity;     // tokens, prompt and all; the last one drawn need not fit
    size_t V;            // vocab_size
    void *stored_logits; // [V] as they come from the device
    double *logits;      // [V]
    int32_t *order;      // [V] token ids, the likeliest last
    int32_t drawn;       // the last token drawn, which the model has not seen yet; -1: none
} Sampler;

// ---- drawing a token from logits[V] ------------------------------------------------------------------------------------
// Before b in the order of likelihood: the higher logit, of equal ones the lower id.
static int likelier(const double *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static int32_t likeliest(const double *logits, size_t V) {
    int32_t best = 0;
    for (int32_t i = 1; i < (int32_t)V; i++)
        if (likelier(logits, i, best)) best = i;
    return best;
}

// heap[count], likelier tokens above: restores the order below `root`.
static void heap_sift(int32_t *heap, size_t count, size_t root, const double *logits) {
    int32_t id = heap[root];
    size_t child;
    while ((child = 2 * root + 1) < count) {
        if (child + 1 < count && likelier(logits, heap[child + 1], heap[child])) child++;
        if (!likelier(logits, heap[child], id)) break;
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = id;
}

// Moves the likeliest of heap[count] behind the heap.
static void heap_pop(int32_t *heap, size_t count, const double *logits) {
    int32_t top = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = top;
    heap_sift(heap, count - 1, 0, logits);
}

// Probability of a token, up to a factor; that of the likeliest is 1.
static double token_mass(const SamplingSettings *settings, const double *logits, double largest, int32_t id) {
    return exp((logits[id] - largest) / settings->temperature);
}

// The tokens to draw from: the last `count` (returned) of order[V]. A heap gives the likeliest one by one, so that a short
// list out of a large vocabulary needs no sorting of the rest.
static size_t sampling_candidates(const SamplingSettings *settings, const double *logits, double largest, size_t V,
                                  int32_t *order) {
    size_t k = settings->top_k && settings->top_k < V ? settings->top_k : V, count;
    double mass = 0, held = 0;
    for (size_t i = 0; i < V; i++) order[i] = (int32_t)i;
    if (k == V && settings->top_p >= 1) return V;
    for (size_t i = V / 2; i-- > 0;) heap_sift(order, V, i, logits);
    for (size_t i = 0; i < V && k == V; i++) mass += token_mass(settings, logits, largest, (int32_t)i);
    for (size_t i = 0; i < k && k < V; i++) {
        heap_pop(order, V - i, logits);
        mass += token_mass(settings, logits, largest, order[V - 1 - i]);
    }
    if (settings->top_p >= 1) return k;
    for (count = 0; count < k && (count == 0 || held < settings->top_p * mass); count++) {
        if (k == V) heap_pop(order, V - count, logits);
        held += token_mass(settings, logits, largest, order[V - 1 - count]);
    }
    return count;
}

// The token for a uniform number in [0, 1). order[V] is scratch.
static int32_t sampling_draw(const SamplingSettings *settings, const double *logits, size_t V, int32_t *order,
                             double uniform) {
    int32_t best = likeliest(logits, V);
    double largest = logits[best], mass = 0, passed = 0;
    size_t i;
    if (settings->temperature == 0) return best;
    size_t count = sampling_candidates(settings, logits, largest, V, order);
    for (i = 0; i < count; i++) mass += token_mass(settings, logits, largest, order[V - 1 - i]);
    for (i = 0; i + 1 < count; i++) {
        passed += token_mass(settings, logits, largest, order[V - 1 - i]);
        if (passed > uniform * mass) break;
    }
    return order[V - 1 - i];
}

// ---- host memory ---------------------------------------------------------------------------------------------------------
// Refuses texts of more tokens than a learned position table has rows. Needs no weights.
static void sampler_check(const Model *model, size_t tokens) {
    const Config *config = &model->config;
    if (config->family->learned_positions && tokens > config->max_position_embeddings)
        die_usage(
            "prompt and new tokens are %zu tokens, but the position table of this %s model ends at %zu; shorten the "
            "prompt or ask for fewer new tokens",
            tokens, config->family->name, config->max_position_embeddings);
}

static void sampler_allocate(Sampler *sampler, const Model *model, size_t capacity) {
    size_t V = model->config.vocab_size;
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    sampler->capacity = capacity, sampler->V = V;
    cache_allocate(&sampler->cache, 1, capacity);
    sampler->stored_logits = checked_calloc(V, dtype_size(model->dtype), "logits to sample from");
    sampler->logits = (double *)checked_calloc(V, sizeof(double), "logits to sample from");
    sampler->order = (int32_t *)checked_calloc(V, sizeof(int32_t), "tokens to sample from");
}

static void sampler_free(Sampler *sampler) {
    cache_free(&sampler->cache);
    free(sampler->stored_logits);
    free(sampler->logits);
    free(sampler->order);
    memset(sampler, 0, sizeof(*sampler));
}

// ---- generating: not while a stream is on its way through forward_backward or forward_only ---------------------------------
static void sampler_begin(Sampler *sampler, StreamBP *s) {
    sampler->stream = s;
    sampler->drawn = -1;
    cache_begin(&sampler->cache, s);
}

static void sampler_end(Sampler *sampler) { cache_end(&sampler->cache, sampler->stream); }

static void sampler_append(Sampler *sampler, const int32_t *ids, size_t count) {
    Cache *cache = &sampler->cache;
    size_t n;
    if (count > cache->capacity - cache->used[0])
        die("a text of %zu tokens does not fit into a key/value cache planned for %zu; shorten the prompt or ask for "
            "fewer new tokens",
            cache->used[0] + count, cache->capacity);
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= sampler->V)
            die("token %zu of the text to continue is %d, but the vocabulary ends at %zu", cache->used[0] + i, ids[i],
                sampler->V - 1);
    for (size_t done = 0; done < count; done += n) {
        n = min_size(count - done, cache->chunk);
        cache_feed(cache, sampler->stream, 0, ids + done, n);
    }
}

// Shows the model the last token it drew, unless it has seen it.
static void sampler_catch_up(Sampler *sampler) {
    int32_t drawn = sampler->drawn;
    sampler->drawn = -1;
    if (drawn >= 0) sampler_append(sampler, &drawn, 1);
}

// The last token drawn is not to be a part of the text.
static void sampler_forget(Sampler *sampler) { sampler->drawn = -1; }

// The text goes on with ids[count] (host).
static void sampler_feed(Sampler *sampler, const int32_t *ids, size_t count) {
    sampler_catch_up(sampler);
    sampler_append(sampler, ids, count);
}

// logits[V] from row `row` of what the device stores; refuses those of a model that has diverged. position: of the token to be drawn
static void logits_read(double *logits, const void *stored, DType type, size_t row, size_t V, size_t position) {
    for (size_t i = 0; i < V; i++) {
        logits[i] = element_to_double(stored, type, row * V + i);
        if (!isfinite(logits[i]))
            die("the logit of token %zu at position %zu is %g: the weights are damaged or training has diverged", i,
                position, logits[i]);
    }
}

// logits[V] of the token that comes next.
static const double *sampler_logits(Sampler *sampler) {
    sampler_catch_up(sampler);
    if (sampler->cache.used[0] == 0) die("there is nothing to continue: a prompt has at least one token");
    cache_logits(&sampler->cache, sampler->stream, sampler->stored_logits);
    logits_read(sampler->logits, sampler->stored_logits, sampler->stream->model->dtype, 0, sampler->V,
                sampler->cache.used[0]);
    return sampler->logits;
}

// Ranks that gather weights for each other (ZeRO 3) write one text, rank 0's: with other devices or numbers of threads
// their logits may be rounded otherwise, and each has to end where the others do.
static int32_t sampler_next(Sampler *sampler, const SamplingSettings *settings) {
    const double *logits = sampler_logits(sampler);
    double uniform = random_uniform(settings->seed, RANDOM_STREAM_SAMPLING, sampler->cache.used[0]);
    sampler->drawn = sampling_draw(settings, logits, sampler->V, sampler->order, uniform);
    if (weights_sharding(&sampler->stream->memory).ranks > 1)
        dist_broadcast(RANKS_ALL, &sampler->drawn, sizeof(sampler->drawn), 0);
    return sampler->drawn;
}

/*
Many texts at once: each has a slot of the key/value cache of orders/key_value_cache.h, and every step draws a token for each of them.

    sampler_batch_allocate   once, before training: host memory. RunSettings.rollout_slots and rollout_tokens have put
                             the cache into the plan
    sampler_batch            completes texts, any number of them
    sampler_batch_free

A text whose end token is drawn, or that has its `room` of tokens, leaves its slot to the next one that waits, so that
steps are as wide as they can be. A prompt goes through the model once for all texts that have it (those whose `prompt`
is the same pointer, one after the other); the others copy its keys and values. Its last token is fed by a step like any
token drawn.

The token at position t of a text is drawn with random number t of its own seed, as Sampler would: what is drawn depends
neither on the number of slots nor on the other texts (but for rounding: products of few rows and of many may sum in
another order).
*/
typedef struct {
    const int32_t *prompt; // [prompt_tokens], at least one
    size_t prompt_tokens;
    uint64_t seed;
    int32_t *ids;        // [room] what is drawn; an end token is the last
    size_t room, tokens; // at least one; how many there are
    int ended;           // by an end token
} Completion;

typedef struct {
    Cache cache;
    size_t V;
    void *stored_logits;  // [slots,V] as they come from the device
    double *logits;       // [V]
    int32_t *order;       // [V] scratch of a draw
    const int32_t **held; // [slots] the prompt that begins this slot, all but its last token; NULL: none
    size_t *text;         // [slots] which completion is written there
    size_t *active;       // [active_count] slots with a text that is not complete
    int32_t *next;        // [active_count] the token that each is fed next
    size_t active_count;
} SamplerBatch;

// capacity: tokens of the longest prompt and its completion; the last one drawn is never fed, and need not fit
static void sampler_batch_allocate(SamplerBatch *sampler, const Model *model, size_t slots, size_t capacity) {
    size_t V = model->config.vocab_size;
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    sampler->V = V;
    cache_allocate(&sampler->cache, slots, capacity);
    sampler->stored_logits = checked_calloc(slots * V, dtype_size(model->dtype), "logits to sample from");
    sampler->logits = (double *)checked_calloc(V, sizeof(double), "logits to sample from");
    sampler->order = (int32_t *)checked_calloc(V, sizeof(int32_t), "tokens to sample from");
    sampler->held = (const int32_t **)checked_calloc(slots, sizeof(*sampler->held), "prompts of texts");
    sampler->text = (size_t *)checked_calloc(slots, sizeof(size_t), "texts by slot");
    sampler->active = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->next = (int32_t *)checked_calloc(slots, sizeof(int32_t), "tokens of texts");
}

static void sampler_batch_free(SamplerBatch *sampler) {
    cache_free(&sampler->cache);
    free(sampler->stored_logits), free(sampler->logits), free(sampler->order);
    free(sampler->held), free(sampler->text), free(sampler->active), free(sampler->next);
    memset(sampler, 0, sizeof(*sampler));
}

static void sampler_batch_check(const SamplerBatch *sampler, const Completion *text, size_t number) {
    if (!text->prompt_tokens || !text->room)
        die("text %zu: there is nothing to continue, or no room for it: a prompt has at least one token", number);
    if (text->prompt_tokens + text->room - 1 > sampler->cache.capacity)
        die("text %zu: a prompt of %zu tokens and %zu new ones do not fit into a key/value cache planned for %zu; "
            "shorten the prompt or ask for fewer new tokens",
            number, text->prompt_tokens, text->room, sampler->cache.capacity);
    for (size_t i = 0; i < text->prompt_tokens; i++)
        if (text->prompt[i] < 0 || (size_t)text->prompt[i] >= sampler->V)
            die("text %zu: token %zu of the prompt is %d, but the vocabulary ends at %zu", number, i, text->prompt[i],
                sampler->V - 1);
}

// All of a prompt but its last token, in a slot: from one that has it, or through the model.
static void slot_fill(SamplerBatch *sampler, StreamBP *s, size_t slot, const Completion *text) {
    Cache *cache = &sampler->cache;
    size_t count = text->prompt_tokens - 1, from = sampler->held[slot] == text->prompt ? slot : 0, n;
    while (from < cache->slots && sampler->held[from] != text->prompt) from++;
    if (from < cache->slots) {
        cache_copy(cache, s, from, slot, count);
    } else {
        cache_clear(cache, s, slot);
        for (size_t done = 0; done < count; done += n) {
            n = min_size(count - done, cache->chunk);
            cache_feed(cache, s, slot, text->prompt + done, n);
        }
    }
    sampler->held[slot] = cache_keeps_all(s) ? text->prompt : NULL;
}

// Gives text number `number` a slot.
static void slot_open(SamplerBatch *sampler, StreamBP *s, size_t slot, Completion *text, size_t number) {
    slot_fill(sampler, s, slot, text);
    text->tokens = 0, text->ended = 0;
    sampler->text[slot] = number;
    sampler->active[sampler->active_count] = slot;
    sampler->next[sampler->active_count++] = text->prompt[text->prompt_tokens - 1];
}

// The next token of a text from row `row` of the logits. Whether the text is complete.
static int slot_draw(SamplerBatch *sampler, DType type, const SamplingSettings *settings, size_t row, Completion *text,
                     const uint32_t *end_ids, size_t end_count) {
    size_t position = text->prompt_tokens + text->tokens;
    logits_read(sampler->logits, sampler->stored_logits, type, row, sampler->V, position);
    int32_t id = sampling_draw(settings, sampler->logits, sampler->V, sampler->order,
                               random_uniform(text->seed, RANDOM_STREAM_SAMPLING, position));
    text->ids[text->tokens++] = id;
    for (size_t i = 0; i < end_count; i++) text->ended |= (uint32_t)id == end_ids[i];
    return text->ended || text->tokens == text->room;
}

// Completes `count` texts. settings->seed is not looked at: each text has its own. end_ids[end_count]: what ends a
// text. Not while a stream is on its way through forward_backward or forward_only.
static void sampler_batch(SamplerBatch *sampler, StreamBP *s, Completion *texts, size_t count,
                          const SamplingSettings *settings, const uint32_t *end_ids, size_t end_count) {
    size_t waiting = 0, slot, steps;
    for (size_t i = 0; i < count; i++) sampler_batch_check(sampler, &texts[i], i);
    memset(sampler->held, 0, sampler->cache.slots * sizeof(*sampler->held));
    sampler->active_count = 0;
    cache_begin(&sampler->cache, s);
    for (slot = 0; slot < sampler->cache.slots && waiting < count; slot++, waiting++)
        slot_open(sampler, s, slot, &texts[waiting], waiting);
    while ((steps = sampler->active_count) > 0) {
        cache_step(&sampler->cache, s, sampler->active, sampler->next, steps);
        cache_logits(&sampler->cache, s, sampler->stored_logits);
        sampler->active_count = 0; // filled anew with those that go on and those that begin: never beyond i
        for (size_t i = 0; i < steps; i++) {
            Completion *text;
            slot = sampler->active[i], text = &texts[sampler->text[slot]];
            if (!slot_draw(sampler, s->model->dtype, settings, i, text, end_ids, end_count)) {
                sampler->active[sampler->active_count] = slot;
                sampler->next[sampler->active_count++] = text->ids[text->tokens - 1];
            } else if (waiting < count) {
                slot_open(sampler, s, slot, &texts[waiting], waiting);
                waiting++;
            }
        }
    }
    cache_end(&sampler->cache, s);
}

#endif
