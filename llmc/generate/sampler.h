/*
Text generation with the key/value cache of orders/key_value_cache.h. Op `draw` draws the token at position t with
random number t of the text's seed. So a text depends neither on how much of it was fed or drawn, nor on other texts in
the batch (except for rounding: products of few and of many rows may sum in another order).

    sampler_allocate         allocates host memory and checks all it can; call once, before training
    sampler_begin            pushes the cache on the run's arena; RunSettings.cache_tokens plans it
    sampler_feed             feeds the prompt, of any length that fits; later also further tokens
    sampler_next             draws the next token
    sampler_rewind           truncates the text
    sampler_end              pops the cache from the arena

    sampler_batch_allocate   allocates for many texts, each in a slot of the cache (RunSettings.rollout_slots)
    sampler_batch            completes any number of texts

Nothing else allocates. Every step of sampler_batch draws a token for each slot. A text that draws an end token, or
fills its `room`, gives its slot to the next waiting text. The prompts of all slots that open between two steps are
packed into passes (prepacking, arXiv 2404.09529). Consecutive texts with the same `prompt` pointer run the prompt
through the model once; the other texts copy its keys, values and states. A step feeds a prompt's last token like any
drawn token.

Texts may take turns (SamplerTurns): after a turn a text leaves its slot, and comes back with a longer prompt. Its slot
keeps its keys and values unless another text took the slot. What another slot has is copied (Completion.like); the rest
runs through the model again.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "llmc/plan/plan.h"

#define RANDOM_STREAM_SAMPLING 0x73616d706c65ull // stream of random.h ("sample")

// ---- one text ------------------------------------------------------------------------------------------------------
typedef struct {
    StreamBP *streambp;
    Cache cache;           // cache with one slot
    ContextMemory context; // with --context-memory: replaces the cache's keys and values
    size_t capacity;       // most tokens, including the prompt; the last drawn token need not fit
    int32_t drawn;         // last drawn token, not yet fed; -1: none
} Sampler;

// Refuses texts longer than a learned position table. Needs no weights.
static void sampler_check(const Model *model, size_t tokens) {
    const Config *config = &model->config;
    if (config->family->learned_positions && tokens > config->max_position_embeddings)
        die_usage("prompt and new tokens are %zu tokens, but the position table of this %s model has %zu; shorten the "
                  "prompt or ask for fewer new tokens",
                  tokens, config->family->name, config->max_position_embeddings);
}

// Allocates host memory. context: zeros: keys and values of all tokens are kept
static void sampler_allocate(Sampler *sampler, const Model *model, size_t capacity, ContextSettings context) {
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    sampler->capacity = capacity;
    cache_allocate(&sampler->cache, 1, capacity);
    context_allocate(&sampler->context, context, model, capacity);
}

static void sampler_free(Sampler *sampler) {
    cache_free(&sampler->cache);
    context_free(&sampler->context);
    memset(sampler, 0, sizeof(*sampler));
}

// Pushes the cache. Do not call it during forward_backward or forward_only.
static void sampler_begin(Sampler *sampler, StreamBP *s) {
    sampler->streambp = s;
    sampler->drawn = -1;
    if (sampler->context.layers)
        context_begin(&sampler->context, &sampler->cache, s);
    else
        cache_begin(&sampler->cache, s);
}

static void sampler_end(Sampler *sampler) {
    if (sampler->context.layers)
        context_end(&sampler->context, sampler->streambp);
    else
        cache_end(&sampler->cache, sampler->streambp);
}

// Truncates the text to `tokens` tokens. Returns how many remain: 0 if a layer cannot rewind.
static size_t sampler_rewind(Sampler *sampler, size_t tokens) {
    const Config *config = &sampler->streambp->model->config;
    if (layers_of_kind(config, LAYER_FULL) < config->num_hidden_layers || sampler->context.layers) {
        sampler_end(sampler);
        sampler_begin(sampler, sampler->streambp);
        return 0;
    }
    sampler->drawn = -1;
    return sampler->cache.used[0] = min_size(sampler->cache.used[0], tokens);
}

// Feeds the last drawn token, unless it was fed, then ids[count] (host).
static void sampler_feed(Sampler *sampler, const int32_t *ids, size_t count) {
    Cache *cache = &sampler->cache;
    const size_t V = sampler->streambp->model->config.vocab_size;
    const int32_t drawn = sampler->drawn;
    sampler->drawn = -1;
    if (drawn >= 0) sampler_feed(sampler, &drawn, 1);
    if (count > cache->capacity - cache->used[0])
        die("a text of %zu tokens does not fit the key/value cache planned for %zu; shorten the prompt or ask for "
            "fewer new tokens",
            cache->used[0] + count, cache->capacity);
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= V)
            die("token %zu of the text is %d; an id must be from 0 to %zu", cache->used[0] + i, ids[i], V - 1);
    if (sampler->context.layers)
        context_feed(&sampler->context, cache, sampler->streambp, ids, count);
    else
        cache_feed(cache, sampler->streambp, 0, ids, count);
}

// Draws the next token. With ZeRO 3 all ranks take rank 0's token: logits may round differently on another device or
// with another number of threads, and all ranks must stop at the same token.
static int32_t sampler_next(Sampler *sampler, const SamplingSettings *settings) {
    sampler_feed(sampler, NULL, 0);
    const size_t position = sampler->cache.used[0];
    if (position == 0) die("the prompt is empty; give at least one token");
    const double uniform = random_uniform(settings->seed, RANDOM_STREAM_SAMPLING, position);
    cache_draw(&sampler->cache, sampler->streambp, settings, NULL, &uniform, &sampler->drawn);
    if (weights_sharding(&sampler->streambp->memory).ranks > 1)
        dist_broadcast(RANKS_ALL, &sampler->drawn, sizeof(sampler->drawn), 0);
    return sampler->drawn;
}

// ---- many texts at once --------------------------------------------------------------------------------------------
typedef struct {
    const int32_t *prompt; // [prompt_tokens] the prompt, at least one token
    size_t prompt_tokens;
    uint64_t seed;
    int32_t *ids;        // [room] drawn tokens; an end token comes last
    size_t room, tokens; // most drawn tokens (at least 1), and how many there are
    int ended;           // 1: an end token was drawn
    uint16_t *route;     // [all but the last token,layers with experts,k] experts of the tokens; NULL: not recorded
    int again;           // 1: a later turn of the text, whose prompt no other text has
    size_t kept;         // leading tokens that the slot in which the text was last still has; set by the sampler, may
                         // be lowered between turns; 0: the text has no slot
    size_t like;         // with `again`: a text whose slot has the prompt's first `shared` tokens, too. They are copied
    size_t shared;       // if they are more than `kept`; 0: none
    size_t reused;       // with `again`: tokens of the prompt that did not run, kept or copied; set by the sampler
    const SamplingSettings *sampling; // of this text; NULL: the batch's
    void *logits;                     // as in DrawOwn
} Completion;

// Decides which text opens next; NULL: all texts, in order, one turn each
typedef struct {
    void *context;
    void (*ended)(void *context, size_t text, size_t step); // a text's turn ended at this step: it left its slot
    void (*drawn)(void *context);                           // called after each step
    // Returns a text to open at this step; SIZE_MAX: none now. idle: no text is written; then SIZE_MAX ends the batch
    size_t (*next)(void *context, size_t step, int idle);
} SamplerTurns;

typedef struct {
    Cache cache;
    const int32_t **prompt; // [slots] prompt in the slot, without the last token; NULL: none
    size_t *text;           // [slots] index of the completion that is or was written there; SIZE_MAX: none
    size_t *free;           // [free_count] slots in which no text is written
    size_t free_count;
    size_t *opened; // [slots] slots that are filled between two steps
    size_t *source; // [slots] slot whose prompt is copied to each opened slot after the passes; SIZE_MAX: none
    Append *append; // [slots] prompts that run through the model
    size_t *active; // [active_count] slots with an incomplete text
    int32_t *next;  // [active_count] token to feed next
    int32_t *drawn; // [slots] tokens drawn in a step, with random number `uniform` in [0, 1)
    double *uniform;
    DrawOwn *own; // [slots] how the texts of a step are drawn
    size_t active_count;
    void (*completed)(void *context); // called after each completed text; NULL: not called
    void *context;
    const SamplerTurns *turns; // NULL: each text has one turn
} SamplerBatch;

// Allocates for many texts. capacity: most tokens of a prompt and its completion; the last drawn token need not fit
static void sampler_batch_allocate(SamplerBatch *sampler, const Model *model, size_t slots, size_t capacity) {
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    cache_allocate(&sampler->cache, slots, capacity);
    if (model->config.num_experts) cache_record(&sampler->cache, &model->config);
    sampler->prompt = (const int32_t **)checked_calloc(slots, sizeof(*sampler->prompt), "prompts of texts");
    sampler->text = (size_t *)checked_calloc(slots, sizeof(size_t), "texts by slot");
    sampler->opened = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->free = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->source = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->append = (Append *)checked_calloc(slots, sizeof(Append), "prompts of texts");
    sampler->active = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->next = (int32_t *)checked_calloc(slots, sizeof(int32_t), "tokens of texts");
    sampler->drawn = (int32_t *)checked_calloc(slots, sizeof(int32_t), "tokens of texts");
    sampler->uniform = (double *)checked_calloc(slots, sizeof(double), "random numbers of texts");
    sampler->own = (DrawOwn *)checked_calloc(slots, sizeof(DrawOwn), "settings of texts");
}

static void sampler_batch_free(SamplerBatch *sampler) {
    cache_free(&sampler->cache);
    free(sampler->prompt), free(sampler->text), free(sampler->opened), free(sampler->source), free(sampler->append);
    free(sampler->free);
    free(sampler->active), free(sampler->next), free(sampler->drawn), free(sampler->uniform), free(sampler->own);
    memset(sampler, 0, sizeof(*sampler));
}

static void sampler_batch_check(const SamplerBatch *sampler, const Completion *text, size_t number, size_t V) {
    if (!text->prompt_tokens || !text->room)
        die("text %zu: the prompt is empty, or no new token is asked for; give at least one token of each", number);
    if (text->prompt_tokens + text->room - 1 > sampler->cache.capacity)
        die("text %zu: a prompt of %zu tokens and %zu new ones do not fit the key/value cache planned for %zu; "
            "shorten the prompt or ask for fewer new tokens",
            number, text->prompt_tokens, text->room, sampler->cache.capacity);
    for (size_t i = 0; i < text->prompt_tokens; i++)
        if (text->prompt[i] < 0 || (size_t)text->prompt[i] >= V)
            die("text %zu: token %zu of the prompt is %d; an id must be from 0 to %zu", number, i, text->prompt[i],
                V - 1);
}

// Copies a prompt without the last token, and the prompt's routes, from slot `from`. state: see cache_copy
static void slot_copy(SamplerBatch *sampler, StreamBP *s, size_t from, size_t state, size_t slot,
                      const Completion *text, const uint16_t *route) {
    const size_t count = text->prompt_tokens - 1;
    cache_copy(&sampler->cache, s, from, state, slot, count);
    if (route && route != text->route)
        memcpy(text->route, route, count * expert_layers(s) * s->model->config.num_experts_per_tok * sizeof(*route));
}

// Returns a slot with this prompt, preferring `slot` itself; SIZE_MAX: none
static size_t slot_with(const SamplerBatch *sampler, size_t slot, const int32_t *prompt) {
    if (sampler->prompt[slot] == prompt) return slot;
    for (size_t b = 0; b < sampler->cache.slots; b++)
        if (sampler->prompt[b] == prompt) return b;
    return SIZE_MAX;
}

// Keeps what is left of a text in its slot, or copies more of it from the slot of text->like. Returns the tokens to
// append after it. A slot that cannot be truncated is cleared. Slots that open together are called for in the order of
// SamplerTurns.next, so a slot is copied before it is truncated, and never beyond its valid tokens, cache->used.
static Append slot_continue(SamplerBatch *sampler, StreamBP *s, size_t slot, Completion *text) {
    Cache *cache = &sampler->cache;
    sampler->prompt[slot] = NULL;
    if (cache->route) cache->route[slot] = text->route;
    const int truncates = !layers_with_state(&s->model->config) && cache_keeps_all(cache, s);
    const size_t most = text->prompt_tokens - 1;
    size_t kept = min_size(min_size(text->kept, most), cache->used[slot]);
    if (kept < cache->used[slot] && !truncates) kept = 0;
    if (kept)
        cache->used[slot] = kept;
    else
        cache_clear(cache, s, slot);
    for (size_t b = 0; b < cache->slots && truncates && text->shared; b++) {
        const size_t shared = min_size(min_size(text->shared, most), cache->used[b]);
        if (sampler->text[b] != text->like || b == slot || shared <= kept) continue;
        cache_copy(cache, s, b, b, slot, shared);
        kept = shared;
    }
    text->reused = kept;
    const Append append = {slot, text->prompt + kept, most - kept};
    return append;
}

// Fills opened[count] with the prompts of their texts. A slot whose text takes its next turn keeps what it has. Another
// prompt that some slot has is copied; all other prompts run through the model together, each once. Layers of linear
// attention keep only the state after the prompt that ran last.
static void slots_fill(SamplerBatch *sampler, StreamBP *s, Completion *texts, size_t count) {
    Cache *cache = &sampler->cache;
    const int linear = layers_with_state(&s->model->config) > 0, keeps = cache_keeps_all(cache, s);
    const size_t none = SIZE_MAX;
    size_t fed = 0, continued = 0;
    for (size_t i = 0; i < count; i++) { // a slot that is about to lose its prompt is no source
        const size_t slot = sampler->opened[i];
        if (sampler->prompt[slot] != texts[sampler->text[slot]].prompt) sampler->prompt[slot] = NULL;
    }
    for (size_t i = 0; i < count; i++)
        if (texts[sampler->text[sampler->opened[i]]].again)
            sampler->append[fed++] =
                slot_continue(sampler, s, sampler->opened[i], &texts[sampler->text[sampler->opened[i]]]);
    continued = fed;
    for (size_t i = 0; i < count; i++) {
        const size_t slot = sampler->opened[i];
        if (texts[sampler->text[slot]].again) continue;
        const Completion *text = &texts[sampler->text[slot]];
        const size_t from = slot_with(sampler, slot, text->prompt);
        // Route of another text in that slot.
        const uint16_t *route = cache->route && from != none ? cache->route[from] : NULL;
        if (cache->route) cache->route[slot] = text->route;
        sampler->source[i] = none;
        if (from != none) {
            slot_copy(sampler, s, from, cache->slots, slot, text, route);
            sampler->prompt[slot] = text->prompt;
            continue;
        }
        for (size_t j = continued; j < fed && keeps; j++)
            if (sampler->append[j].tokens == text->prompt) sampler->source[i] = sampler->append[j].slot;
        if (sampler->source[i] != none) continue;
        const Append append = {slot, text->prompt, text->prompt_tokens - 1};
        cache_clear(cache, s, slot);
        sampler->append[fed++] = append;
    }
    cache_append(cache, s, sampler->append, fed);
    const Append *last = fed > continued ? &sampler->append[fed - 1] : NULL;
    if (last && linear) memset(sampler->prompt, 0, cache->slots * sizeof(*sampler->prompt));
    if (last && linear && keeps) cache_keep(cache, s, last->slot);
    for (size_t i = 0; i < count; i++) {
        const size_t slot = sampler->opened[i], from = sampler->source[i];
        const Completion *text = &texts[sampler->text[slot]];
        if (text->again) continue;
        if (from != none) slot_copy(sampler, s, from, from, slot, text, cache->route ? cache->route[from] : NULL);
        sampler->prompt[slot] = keeps && (!linear || !last || text->prompt == last->tokens) ? text->prompt : NULL;
    }
}

// Opens slots opened[count] for their next texts.
static void slots_open(SamplerBatch *sampler, StreamBP *s, Completion *texts, size_t count) {
    slots_fill(sampler, s, texts, count);
    for (size_t i = 0; i < count; i++) {
        const size_t slot = sampler->opened[i];
        Completion *text = &texts[sampler->text[slot]];
        text->tokens = 0, text->ended = 0;
        sampler->active[sampler->active_count] = slot;
        sampler->next[sampler->active_count++] = text->prompt[text->prompt_tokens - 1];
    }
}

// Appends a token to a text. Returns 1 if the text is then complete.
static int text_append(Completion *text, int32_t id, const uint32_t *end_ids, size_t end_count) {
    text->ids[text->tokens++] = id;
    for (size_t i = 0; i < end_count; i++) text->ended |= (uint32_t)id == end_ids[i];
    return text->ended || text->tokens == text->room;
}

// Takes a free slot for a text: its own, if it still has it, else one that no text will want again, else the first.
static size_t slot_take(SamplerBatch *sampler, Completion *texts, size_t text) {
    size_t found = 0, least = 3;
    for (size_t i = 0; i < sampler->free_count && least; i++) {
        const size_t other = sampler->text[sampler->free[i]];
        const size_t rank = other == text && texts[text].kept ? 0 : other == SIZE_MAX || !texts[other].kept ? 1 : 2;
        if (rank < least) least = rank, found = i;
    }
    const size_t slot = sampler->free[found];
    sampler->free_count--;
    for (size_t i = found; i < sampler->free_count; i++) sampler->free[i] = sampler->free[i + 1];
    if (least) texts[text].kept = 0;
    if (sampler->text[slot] != SIZE_MAX && least == 2) texts[sampler->text[slot]].kept = 0; // it has lost its slot
    for (size_t b = 0; b < sampler->cache.slots && texts[text].again; b++)
        if (sampler->text[b] == text) sampler->text[b] = SIZE_MAX; // the slot in which it was, if it takes another one
    sampler->text[slot] = text;
    return slot;
}

// Completes `count` texts. Ignores settings->seed, since each text has its own seed. end_ids[end_count]: tokens that
// end a text. Do not call it during forward_backward or forward_only. Collective with ZeRO 3; each rank completes
// different texts, or none
static void sampler_batch(SamplerBatch *sampler, StreamBP *s, Completion *texts, size_t count,
                          const SamplingSettings *settings, const uint32_t *end_ids, size_t end_count) {
    const SamplerTurns *turns = sampler->turns;
    size_t waiting = 0, steps;
    for (size_t i = 0; i < count; i++) sampler_batch_check(sampler, &texts[i], i, s->model->config.vocab_size);
    memset(sampler->prompt, 0, sampler->cache.slots * sizeof(*sampler->prompt));
    sampler->active_count = 0, sampler->free_count = sampler->cache.slots;
    for (size_t b = 0; b < sampler->cache.slots; b++) sampler->free[b] = b, sampler->text[b] = SIZE_MAX;
    sampler->cache.turns = weights_sharding(&s->memory).ranks > 1;
    cache_begin(&sampler->cache, s);
    for (size_t step = 0;; step++) {
        size_t opened = 0;
        while (sampler->free_count) {
            const int idle = !sampler->active_count && !opened;
            const size_t next = turns             ? turns->next(turns->context, step, idle)
                                : waiting < count ? waiting++
                                                  : SIZE_MAX;
            if (next == SIZE_MAX) break;
            sampler->opened[opened++] = slot_take(sampler, texts, next);
        }
        if (opened) slots_open(sampler, s, texts, opened);
        steps = sampler->active_count;
        if (!steps) break;
        int owns = 0; // 1: a text has settings of its own
        cache_step(&sampler->cache, s, sampler->active, sampler->next, steps);
        for (size_t i = 0; i < steps; i++) {
            const Completion *text = &texts[sampler->text[sampler->active[i]]];
            const size_t position = text->prompt_tokens + text->tokens;
            const DrawOwn own = {text->sampling ? text->sampling : settings, text->logits};
            sampler->uniform[i] = random_uniform(text->seed, RANDOM_STREAM_SAMPLING, position);
            sampler->own[i] = own, owns |= text->sampling != NULL;
        }
        cache_draw(&sampler->cache, s, settings, owns ? sampler->own : NULL, sampler->uniform, sampler->drawn);
        sampler->active_count = 0; // refilled with texts that continue, never beyond i
        for (size_t i = 0; i < steps; i++) {
            const size_t slot = sampler->active[i];
            Completion *text = &texts[sampler->text[slot]];
            if (!text_append(text, sampler->drawn[i], end_ids, end_count)) {
                sampler->active[sampler->active_count] = slot;
                sampler->next[sampler->active_count++] = text->ids[text->tokens - 1];
                continue;
            }
            sampler->free[sampler->free_count++] = slot;
            if (sampler->completed) sampler->completed(sampler->context);
            text->kept = turns ? text->prompt_tokens + text->tokens - 1 : 0;
            if (turns) turns->ended(turns->context, sampler->text[slot], step);
        }
        if (turns) turns->drawn(turns->context);
    }
    cache_turn(&sampler->cache, s, TURN_NONE); // other ranks may still need this rank's weights
    cache_end(&sampler->cache, s);
}

#endif
