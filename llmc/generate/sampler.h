/*
Text generation with the key/value cache of orders/key_value_cache.h. The token at position t of a text is drawn by op
`draw` with random number t of the text's seed, so the text is the same however much of it was fed and however much was
drawn before, and whatever is drawn beside it (but for rounding: products of few rows and of many may sum in another
order).

    sampler_allocate         once, before training: host memory, and every refusal that is known beforehand
    sampler_begin            pushes the cache on the run's arena; RunSettings.cache_tokens has put it into the plan
    sampler_feed             the prompt, of any length that fits; again later to go on with given tokens
    sampler_next             the next token
    sampler_rewind           takes the end of the text back
    sampler_end              pops the cache: the arena is as it was

    sampler_batch_allocate   the same for many texts at once, each in a slot of the cache (RunSettings.rollout_slots)
    sampler_batch            completes texts, any number of them

Nothing else allocates. In sampler_batch every step draws a token for each slot. A text whose end token is drawn, or
that has its `room` of tokens, leaves its slot to the next one that waits, so that steps are as wide as they can be. A
prompt goes through the model once for all texts that have it (those whose `prompt` is the same pointer, one after the
other); the others copy its keys, values and states. Its last token is fed by a step like any token drawn.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "llmc/plan/plan.h"

#define RANDOM_STREAM_SAMPLING 0x73616d706c65ull // of random.h ("sample")

// ---- one text ------------------------------------------------------------------------------------------------------
typedef struct {
    StreamBP *streambp;
    Cache cache;     // of one slot
    size_t capacity; // tokens, prompt and all; the last one drawn need not fit
    int32_t drawn;   // the last token drawn, which the model has not seen yet; -1: none
} Sampler;

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
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    sampler->capacity = capacity;
    cache_allocate(&sampler->cache, 1, capacity);
}

static void sampler_free(Sampler *sampler) {
    cache_free(&sampler->cache);
    memset(sampler, 0, sizeof(*sampler));
}

// Not while a sequence is on its way through forward_backward or forward_only.
static void sampler_begin(Sampler *sampler, StreamBP *s) {
    sampler->streambp = s;
    sampler->drawn = -1;
    cache_begin(&sampler->cache, s);
}

static void sampler_end(Sampler *sampler) { cache_end(&sampler->cache, sampler->streambp); }

// Back to the first `tokens` of the text, of which so many are left as it returns: none, where a layer keeps less than
// the keys and values of all.
static size_t sampler_rewind(Sampler *sampler, size_t tokens) {
    const Config *config = &sampler->streambp->model->config;
    if (layers_of_kind(config, LAYER_FULL) < config->num_hidden_layers) {
        sampler_end(sampler);
        sampler_begin(sampler, sampler->streambp);
        return 0;
    }
    sampler->drawn = -1;
    return sampler->cache.used[0] = min_size(sampler->cache.used[0], tokens);
}

// The text goes on with the token drawn last, where the model has not seen it yet, and ids[count] (host).
static void sampler_feed(Sampler *sampler, const int32_t *ids, size_t count) {
    Cache *cache = &sampler->cache;
    const size_t V = sampler->streambp->model->config.vocab_size;
    const int32_t drawn = sampler->drawn;
    sampler->drawn = -1;
    if (drawn >= 0) sampler_feed(sampler, &drawn, 1);
    if (count > cache->capacity - cache->used[0])
        die("a text of %zu tokens does not fit into a key/value cache planned for %zu; shorten the prompt or ask for "
            "fewer new tokens",
            cache->used[0] + count, cache->capacity);
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= V)
            die("token %zu of the text to continue is %d, but the vocabulary ends at %zu", cache->used[0] + i, ids[i],
                V - 1);
    cache_feed(cache, sampler->streambp, 0, ids, count);
}

// Ranks that gather weights for each other (ZeRO 3) write one text, rank 0's: with other devices or numbers of threads
// their logits may be rounded otherwise, and each has to end where the others do.
static int32_t sampler_next(Sampler *sampler, const SamplingSettings *settings) {
    sampler_feed(sampler, NULL, 0);
    const size_t position = sampler->cache.used[0];
    if (position == 0) die("there is nothing to continue: a prompt has at least one token");
    const double uniform = random_uniform(settings->seed, RANDOM_STREAM_SAMPLING, position);
    cache_draw(&sampler->cache, sampler->streambp, settings, &uniform, &sampler->drawn);
    if (weights_sharding(&sampler->streambp->memory).ranks > 1)
        dist_broadcast(RANKS_ALL, &sampler->drawn, sizeof(sampler->drawn), 0);
    return sampler->drawn;
}

// ---- many texts at once --------------------------------------------------------------------------------------------
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
    const int32_t **prompt; // [slots] the prompt that begins this slot, all but its last token; NULL: none
    size_t *text;           // [slots] which completion is written there
    size_t *active;         // [active_count] slots with a text that is not complete
    int32_t *next;          // [active_count] the token that each is fed next
    int32_t *drawn;         // [slots] of a step, by numbers in [0, 1)
    double *uniform;
    size_t active_count;
} SamplerBatch;

// capacity: tokens of the longest prompt and its completion; the last one drawn is never fed, and need not fit
static void sampler_batch_allocate(SamplerBatch *sampler, const Model *model, size_t slots, size_t capacity) {
    sampler_check(model, capacity);
    memset(sampler, 0, sizeof(*sampler));
    cache_allocate(&sampler->cache, slots, capacity);
    sampler->prompt = (const int32_t **)checked_calloc(slots, sizeof(*sampler->prompt), "prompts of texts");
    sampler->text = (size_t *)checked_calloc(slots, sizeof(size_t), "texts by slot");
    sampler->active = (size_t *)checked_calloc(slots, sizeof(size_t), "slots of texts");
    sampler->next = (int32_t *)checked_calloc(slots, sizeof(int32_t), "tokens of texts");
    sampler->drawn = (int32_t *)checked_calloc(slots, sizeof(int32_t), "tokens of texts");
    sampler->uniform = (double *)checked_calloc(slots, sizeof(double), "random numbers of texts");
}

static void sampler_batch_free(SamplerBatch *sampler) {
    cache_free(&sampler->cache);
    free(sampler->prompt), free(sampler->text), free(sampler->active), free(sampler->next);
    free(sampler->drawn), free(sampler->uniform);
    memset(sampler, 0, sizeof(*sampler));
}

static void sampler_batch_check(const SamplerBatch *sampler, const Completion *text, size_t number, size_t V) {
    if (!text->prompt_tokens || !text->room)
        die("text %zu: there is nothing to continue, or no room for it: a prompt has at least one token", number);
    if (text->prompt_tokens + text->room - 1 > sampler->cache.capacity)
        die("text %zu: a prompt of %zu tokens and %zu new ones do not fit into a key/value cache planned for %zu; "
            "shorten the prompt or ask for fewer new tokens",
            number, text->prompt_tokens, text->room, sampler->cache.capacity);
    for (size_t i = 0; i < text->prompt_tokens; i++)
        if (text->prompt[i] < 0 || (size_t)text->prompt[i] >= V)
            die("text %zu: token %zu of the prompt is %d, but the vocabulary ends at %zu", number, i, text->prompt[i],
                V - 1);
}

// All of a prompt but its last token, in a slot: from one that has it, or through the model. Of layers with linear
// attention the state behind the last prompt alone is kept: with another one no slot has what a copy takes.
static void slot_fill(SamplerBatch *sampler, StreamBP *s, size_t slot, const Completion *text) {
    Cache *cache = &sampler->cache;
    const int linear = layers_of_kind(&s->model->config, LAYER_LINEAR) > 0, keeps = cache_keeps_all(cache, s);
    size_t count = text->prompt_tokens - 1, from = sampler->prompt[slot] == text->prompt ? slot : 0;
    while (from < cache->slots && sampler->prompt[from] != text->prompt) from++;
    if (from < cache->slots) {
        cache_copy(cache, s, from, slot, count);
    } else {
        cache_clear(cache, s, slot);
        cache_feed(cache, s, slot, text->prompt, count);
        if (linear) memset(sampler->prompt, 0, cache->slots * sizeof(*sampler->prompt));
        if (linear && keeps) cache_keep(cache, s, slot);
    }
    sampler->prompt[slot] = keeps ? text->prompt : NULL;
}

// Gives text number `number` a slot.
static void slot_open(SamplerBatch *sampler, StreamBP *s, size_t slot, Completion *text, size_t number) {
    slot_fill(sampler, s, slot, text);
    text->tokens = 0, text->ended = 0;
    sampler->text[slot] = number;
    sampler->active[sampler->active_count] = slot;
    sampler->next[sampler->active_count++] = text->prompt[text->prompt_tokens - 1];
}

// The next token of a text. Returns 1 where that completes it.
static int text_append(Completion *text, int32_t id, const uint32_t *end_ids, size_t end_count) {
    text->ids[text->tokens++] = id;
    for (size_t i = 0; i < end_count; i++) text->ended |= (uint32_t)id == end_ids[i];
    return text->ended || text->tokens == text->room;
}

// Completes `count` texts. settings->seed is not looked at: each text has its own. end_ids[end_count]: what ends a
// text. Not while a sequence is on its way through forward_backward or forward_only. Collective with ZeRO 3, where each
// rank has texts of its own, or none.
static void sampler_batch(SamplerBatch *sampler, StreamBP *s, Completion *texts, size_t count,
                          const SamplingSettings *settings, const uint32_t *end_ids, size_t end_count) {
    size_t waiting = 0, slot, steps;
    for (size_t i = 0; i < count; i++) sampler_batch_check(sampler, &texts[i], i, s->model->config.vocab_size);
    memset(sampler->prompt, 0, sampler->cache.slots * sizeof(*sampler->prompt));
    sampler->active_count = 0;
    sampler->cache.turns = weights_sharding(&s->memory).ranks > 1;
    cache_begin(&sampler->cache, s);
    for (slot = 0; slot < sampler->cache.slots && waiting < count; slot++, waiting++)
        slot_open(sampler, s, slot, &texts[waiting], waiting);
    while ((steps = sampler->active_count) > 0) {
        cache_step(&sampler->cache, s, sampler->active, sampler->next, steps);
        for (size_t i = 0; i < steps; i++) {
            const Completion *text = &texts[sampler->text[sampler->active[i]]];
            const size_t position = text->prompt_tokens + text->tokens;
            sampler->uniform[i] = random_uniform(text->seed, RANDOM_STREAM_SAMPLING, position);
        }
        cache_draw(&sampler->cache, s, settings, sampler->uniform, sampler->drawn);
        sampler->active_count = 0; // filled anew with those that go on and those that begin: never beyond i
        for (size_t i = 0; i < steps; i++) {
            Completion *text;
            slot = sampler->active[i], text = &texts[sampler->text[slot]];
            if (!text_append(text, sampler->drawn[i], end_ids, end_count)) {
                sampler->active[sampler->active_count] = slot;
                sampler->next[sampler->active_count++] = text->ids[text->tokens - 1];
            } else if (waiting < count) {
                slot_open(sampler, s, slot, &texts[waiting], waiting);
                waiting++;
            }
        }
    }
    cache_turn(&sampler->cache, s, TURN_NONE); // others may need this rank's weights for longer
    cache_end(&sampler->cache, s);
}

#endif
