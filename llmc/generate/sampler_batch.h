/*
Many texts at once: each has a slot of the key/value cache of cache.h, and every step draws a token for each of them.

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
#ifndef LLMC_SAMPLER_BATCH_H
#define LLMC_SAMPLER_BATCH_H
#include "sampler.h"

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
