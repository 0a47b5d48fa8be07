/*
Prompts from the command line, and text generated from them. The only tokenizer here is bytes: a model whose ids are not bytes
is prompted with ids and answers with ids.
*/
#ifndef LLMC_PROMPT_H
#define LLMC_PROMPT_H
#include "options.h"
#include "sampler.h"
#include "weights.h"

#define PROMPT_MAX ((size_t)1 << 30) // bytes: as many as there can be positions

typedef struct {
    int32_t *id; // [count]
    size_t count;
    int bytes; // ids are bytes
} Prompt;

static inline int ids_are_bytes(const Options *options, const Model *model) {
    if (!strcmp(options->tokenizer, "auto")) return model->config.vocab_size == 256;
    if (strcmp(options->tokenizer, "bytes") != 0) return 0;
    if (model->config.vocab_size < 256)
        die_usage("--tokenizer bytes needs a vocabulary of at least 256, this model has %zu", model->config.vocab_size);
    return 1;
}

// From --prompt-ids, --prompt or --prompt-file; a byte-level model without one starts after a line's end.
static inline Prompt prompt_from_options(const Options *options, const Model *model) {
    Prompt prompt;
    const char *text = options->prompt ? options->prompt : "\n";
    char *read = NULL;
    size_t i;
    memset(&prompt, 0, sizeof(prompt));
    prompt.bytes = ids_are_bytes(options, model);
    if (options->prompt_ids.count) {
        prompt.count = options->prompt_ids.count;
        prompt.id = (int32_t *)checked_calloc(prompt.count, sizeof(int32_t), "the prompt");
        memcpy(prompt.id, options->prompt_ids.id, prompt.count * sizeof(int32_t));
    } else {
        if (!prompt.bytes)
            die_usage(
                "this model's tokens are not bytes (vocabulary %zu), so a prompt is given with --prompt-ids ID,ID,...",
                model->config.vocab_size);
        prompt.count = strlen(text);
        if (options->prompt_file) text = read = input_read_text(options->prompt_file, PROMPT_MAX, &prompt.count);
        if (!prompt.count) die_usage("the prompt is empty; give at least one character");
        prompt.id = (int32_t *)checked_calloc(prompt.count, sizeof(int32_t), "the prompt");
        for (i = 0; i < prompt.count; i++) prompt.id[i] = (unsigned char)text[i];
        free(read);
    }
    for (i = 0; i < prompt.count; i++)
        if ((size_t)prompt.id[i] >= model->config.vocab_size)
            die_usage("token %zu of the prompt is %d, outside the vocabulary of %zu", i, prompt.id[i],
                      model->config.vocab_size);
    return prompt;
}

// Tokens of the key/value cache: the last one drawn is not fed.
static inline size_t prompt_cache_tokens(const Prompt *prompt, const Options *options) {
    return prompt->count + options->max_new_tokens - 1;
}

#define TEXT_BYTES_PER_TOKEN 12 // of an id and its space

// What the tokens look like to people: their bytes ('?' where an id is none), or their ids. Returns the bytes of `text`, which
// has room for TEXT_BYTES_PER_TOKEN * count.
static inline size_t prompt_text(const Prompt *prompt, const int32_t *ids, size_t count, char *text) {
    size_t i, bytes = 0;
    for (i = 0; i < count; i++) {
        if (prompt->bytes)
            text[bytes++] = ids[i] < 256 ? (char)ids[i] : '?';
        else
            bytes += (size_t)snprintf(text + bytes, TEXT_BYTES_PER_TOKEN, "%s%d", i ? " " : "", ids[i]);
    }
    return bytes;
}

static inline SamplingSettings sampling_from_options(const Options *options) {
    SamplingSettings settings;
    settings.temperature = options->temperature;
    settings.top_k = options->top_k, settings.top_p = options->top_p;
    settings.seed = options->seed;
    return settings;
}

// Draws `count` tokens into ids; to `out`, where it is not NULL, each is written as it comes.
static inline void generate(Sampler *sampler, StreamBP *stream, const Prompt *prompt, const SamplingSettings *settings,
                            int32_t *ids, size_t count, FILE *out) {
    size_t i;
    sampler_begin(sampler, stream);
    sampler_feed(sampler, prompt->id, prompt->count);
    if (out && prompt->bytes)
        for (i = 0; i < prompt->count; i++) fputc(prompt->id[i], out);
    for (i = 0; i < count; i++) {
        ids[i] = sampler_next(sampler, settings);
        if (!out) continue;
        if (prompt->bytes)
            fputc(ids[i] < 256 ? ids[i] : '?', out);
        else
            fprintf(out, "%s%d", i ? " " : "", ids[i]);
        fflush(out);
    }
    if (out) fputc('\n', out);
    sampler_end(sampler);
}

#endif
