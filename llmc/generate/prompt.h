/*
Prompts from the command line, and text generated from them. The model's tokenizer file (tokenizer.h) encodes and
decodes, or ids are bytes. Without a tokenizer and without bytes, prompt and answer are ids.
*/
#ifndef LLMC_PROMPT_H
#define LLMC_PROMPT_H
#include "llmc/base/json.h"
#include "llmc/tokenizer/chat.h"
#include "llmc/run/run.h"
#include "sampler.h"
#include "llmc/base/text.h"
#include "llmc/tokenizer/tokenizer_file.h"

#define PROMPT_MAX          ((size_t)1 << 30) // bytes, also the most positions
#define RANDOM_STREAM_TEXTS 0x7465787473ull   // stream of random.h for the seeds of a batch of texts ("texts")

typedef struct {
    int32_t *id; // [count]
    size_t count;
    char *text; // printed before the continuation; NULL: nothing
    size_t text_bytes;
    int bytes;            // 1: ids are bytes
    Tokenizer *tokenizer; // NULL: no tokenizer
    const Run *run;       // run of the model
    int chat, show_special, ignore_end;
    IdList stop_ids; // ids that end a text, in addition to the tokenizer's
} Prompt;

// ---- the tokenizer -------------------------------------------------------------------------------------------------
// Finds the tokenizer file: --tokenizer FILE, else the file with which a new run's data were rendered, else the
// tokenizer file next to the adapters, next to the model, or next to a training run's shards. Returns NULL if there is
// none. path: receives the name
static const char *tokenizer_of_run(const Run *run, char path[PATH_MAX]) {
    const Options *o = run->options;
    const char *const beside[] = {run->adapter ? run->adapter->path : o->adapter,
                                  *run->model_path && !run->grown_from ? run->model_path : NULL};
    const char *word = o->tokenizer;
    if (!strcmp(word, "none") || !strcmp(word, "bytes")) return NULL;
    if (strcmp(word, "auto") != 0) return word;
    if (*run->data_tokenizer) return run->data_tokenizer;
    for (size_t i = 0; i < 2; i++)
        if (beside[i] && tokenizer_beside(beside[i], path)) return path;
    if (o->verb != VERB_TRAIN || !o->data.count || !tokenizer_beside_shard(o->data.path[0], path)) return NULL;
    const char *own = run->tokenizer_path; // the model's own tokenizer; the tokenizer file must have been made from it
    return !*own || tokenizer_fingerprint(path) == tokenizer_fingerprint(own) ? path : NULL;
}

// Returns what to type if the model has no tokenizer file.
static const char *tokenizer_advice(const Run *run) {
    char path[PATH_MAX], folder[PATH_MAX], *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (!*run->model_path || !out) return "data/tokenizer_file.py writes one";
    snprintf(folder, sizeof(folder), "%s", run->model_path);
    if (!path_is_directory(folder)) folder_above(folder, run->model_path);
    if (checkpoint_step_of(path_last(folder)) != CHECKPOINT_NONE) folder_above(path, folder), strcpy(folder, path);
    path_join(path, folder, TOKENIZER_NAME);
    fputs("type: python data/tokenizer_file.py --tokenizer ", out);
    echo_quoted(out, folder_has(folder, "tokenizer.json") ? folder : "FOLDER");
    fputs(" --out ", out), echo_quoted(out, path), fclose(out);
    return text;
}

// Sets prompt->tokenizer or prompt->bytes.
static void prompt_choose_tokenizer(Prompt *prompt, const Run *run) {
    const char *word = run->options->tokenizer;
    const size_t V = run->model.config.vocab_size;
    char path[PATH_MAX];
    const char *file = tokenizer_of_run(run, path);
    if (!file) {
        const int bytes = !strcmp(word, "bytes");
        if (bytes && V < 256)
            die_usage(
                "--tokenizer bytes needs a vocabulary of at least 256, but this model has %zu; give --tokenizer FILE",
                V);
        prompt->bytes = bytes || (!strcmp(word, "auto") && V == 256);
        return;
    }
    prompt->tokenizer = tokenizer_open(file);
    if (prompt->tokenizer->vocabulary_ids > V)
        die("%s: this tokenizer has a vocabulary of %u, the model %zu; give --tokenizer FILE of this model, or "
            "--tokenizer none",
            file, prompt->tokenizer->vocabulary_ids, V);
}

// Copies the run's tokenizer and its chat template into `folder`, next to the checkpoints, where `sample` and `convert`
// find them. begins: the run is new, so an existing copy belongs to another run
static void tokenizer_keep(const Run *run, const char *folder, int begins) {
    char path[PATH_MAX], copy[PATH_MAX], chat[PATH_MAX];
    const char *from = tokenizer_of_run(run, path);
    struct stat there, source;
    path_join(copy, folder, TOKENIZER_NAME), path_join(chat, folder, TEMPLATE_NAME);
    const int is_there = stat(copy, &there) == 0;
    if (is_there && (!begins || (from && stat(from, &source) == 0 && same_file(&there, &source)))) return;
    unlink(chat);
    if (is_there && !from) unlink(copy);
    if (!from) return;
    Tokenizer *t = tokenizer_load(from);
    output_write_file(copy, t->file, (size_t)t->bytes);
    if (t->section_bytes[SECTION_TEMPLATE])
        output_write_file(chat, t->section[SECTION_TEMPLATE], t->section_bytes[SECTION_TEMPLATE]);
    tokenizer_close(t);
}

#define CHAT_TOKENS ((size_t)8192) // most tokens of a chat from standard input, unless --max-context is given

// Returns the ids that end a text: the tokenizer's ids unless --ignore-eos is given, and the ids of --stop-ids. The
// caller frees the ids.
static uint32_t *end_ids_from_options(const Options *o, const Tokenizer *t, size_t V, size_t *count) {
    const size_t own = t && !o->ignore_eos ? t->end_count : 0;
    uint32_t *ids = (uint32_t *)checked_calloc(own + o->stop_ids.count + 1, sizeof(uint32_t), "ids that end a text");
    *count = own + o->stop_ids.count;
    for (size_t i = 0; i < own; i++) ids[i] = t->end_ids[i];
    for (size_t i = 0; i < o->stop_ids.count; i++) {
        if ((size_t)o->stop_ids.id[i] >= V)
            die_usage("--stop-ids: %d is outside the vocabulary of %zu; give ids below the vocabulary",
                      o->stop_ids.id[i], V);
        ids[own + i] = (uint32_t)o->stop_ids.id[i];
    }
    return ids;
}

// ---- the prompt ----------------------------------------------------------------------------------------------------
// Appends the ids of a text: as the first turn of a chat, as a plain prompt, or as bytes.
static void prompt_append(const Prompt *prompt, const Options *options, const char *text, size_t bytes, TokenIds *ids) {
    if (prompt->chat)
        chat_turn(prompt->tokenizer, options->system, options->thinking, text, bytes, 1, ids);
    else if (prompt->tokenizer)
        tokenizer_prompt(prompt->tokenizer, text, bytes, ids);
    for (size_t i = 0; prompt->bytes && i < bytes; i++) token_ids_add(ids, (unsigned char)text[i]);
}

static void prompt_encode(Prompt *prompt, const Options *options, const char *text, size_t bytes) {
    TokenIds ids = {NULL, 0, 0};
    prompt_append(prompt, options, text, bytes, &ids);
    prompt->id = ids.id, prompt->count = ids.count;
    if (prompt->chat) bytes = chat_shown_opening(prompt->tokenizer, options->thinking, &text);
    if (prompt->chat && !bytes) return;
    prompt->text = (char *)checked_malloc(bytes, "the prompt");
    memcpy(prompt->text, text, bytes);
    prompt->text_bytes = bytes;
}

static void prompt_check_ids(const int32_t *id, size_t count, size_t V) {
    for (size_t i = 0; i < count; i++)
        if ((size_t)id[i] >= V)
            die_usage("token %zu of the prompt is %d; ids must be below the model's vocabulary of %zu", i, id[i], V);
}

// Tells whether a chat has no prompt and so reads turns from standard input, one per line.
static int prompt_is_interactive(const Options *o) {
    return o->verb == VERB_SAMPLE && (o->chat || o->system) && !o->prompt && !o->prompt_file && !o->prompts &&
           !o->serve;
}

// Reads the tokenizer, and refuses a chat that its template cannot write.
static Prompt prompt_open(const Run *run) {
    const Options *o = run->options;
    Prompt prompt = {0};
    prompt.run = run;
    prompt.chat = o->chat || o->system, prompt.show_special = o->show_special, prompt.ignore_end = o->ignore_eos;
    if (o->verb == VERB_SAMPLE) prompt.stop_ids = o->stop_ids; // in other verbs --stop-ids belong to rollouts
    prompt_choose_tokenizer(&prompt, run);
    if (prompt.chat && !prompt.tokenizer)
        die_usage("--chat needs the model's tokenizer file, or --tokenizer FILE; %s", tokenizer_advice(run));
    if (prompt.chat) chat_check(prompt.tokenizer, o->system, o->thinking, prompt_is_interactive(o));
    return prompt;
}

// Reads the tokenizer and the prompt of --prompt-ids, --prompt or --prompt-file. Training without a prompt begins a
// text with the tokenizer's first token of every text, or else with a newline.
static Prompt prompt_from_options(const Run *run) {
    const Options *o = run->options;
    size_t V = run->model.config.vocab_size;
    char *read = NULL;
    Prompt prompt = prompt_open(run);
    if (prompt_is_interactive(o)) return prompt;
    if (o->prompt_ids.count) {
        prompt.count = o->prompt_ids.count;
        prompt.id = (int32_t *)checked_calloc(prompt.count, sizeof(int32_t), "the prompt");
        memcpy(prompt.id, o->prompt_ids.id, prompt.count * sizeof(int32_t));
        prompt_check_ids(prompt.id, prompt.count, V);
        return prompt;
    }
    if (!prompt.bytes && !prompt.tokenizer)
        die_usage("the model has no tokenizer file, so it reads only --prompt-ids ID,ID,...; %s",
                  tokenizer_advice(run));
    const int prefixed = prompt.tokenizer && prompt.tokenizer->prefix_count && !prompt.chat;
    const char *text = o->prompt ? o->prompt : prefixed ? "" : "\n";
    size_t bytes = strlen(text);
    if (o->prompt_file)
        text = read = strcmp(o->prompt_file, "-") ? input_read_text(o->prompt_file, PROMPT_MAX, &bytes)
                                                  : stream_read_text(stdin, "standard input", PROMPT_MAX, &bytes);
    prompt_encode(&prompt, o, text, bytes);
    free(read);
    if (!prompt.count) die_usage("the prompt is empty; give at least one character");
    prompt_check_ids(prompt.id, prompt.count, V);
    return prompt;
}

static void prompt_free(Prompt *prompt) {
    tokenizer_close(prompt->tokenizer);
    free(prompt->id), free(prompt->text);
    memset(prompt, 0, sizeof(*prompt));
}

// Returns the most tokens of a chat from standard input, or of a planned text.
static size_t chat_tokens(const Run *run) {
    const size_t most = run->options->max_context;
    return most ? most : min_size(CHAT_TOKENS, run->model.config.max_position_embeddings);
}

// Returns how many tokens the key/value cache needs. The last drawn token is never fed.
static size_t prompt_cache_tokens(const Prompt *prompt, const Options *options) {
    return prompt->count + options->max_new_tokens - 1;
}

// ---- tokens as text ------------------------------------------------------------------------------------------------
#define TEXT_BYTES_PER_TOKEN 12 // most bytes of an id and a space

// Returns the most bytes of a token's text.
static size_t prompt_token_bytes(const Prompt *prompt) {
    const Tokenizer *t = prompt->tokenizer;
    size_t most = TEXT_BYTES_PER_TOKEN;
    for (size_t i = 0; t && i < t->ids; i++)
        most = max_size(most, 3 * (size_t)(t->text_offsets[i + 1] - t->text_offsets[i]));
    return most;
}

// Prints a token: its text; without a tokenizer its byte ('?' from 256 on) or its id, after a space if index > 0.
// Prints special tokens only with show_special.
static void prompt_token_out(const Prompt *prompt, TextOut *out, int32_t id, size_t index) {
    char number[TEXT_BYTES_PER_TOKEN + 1], byte = id < 256 ? (char)id : '?';
    const Tokenizer *t = prompt->tokenizer;
    if (t) {
        size_t bytes;
        const char *text = tokenizer_decode(t, id, &bytes);
        if (tokenizer_is_special(t, id) && !prompt->show_special) return;
        if (!out->bytes && !out->count && bytes && *text == ' ' && !prompt->text && t->flags & TOKENIZER_STRIP_FIRST)
            text++, bytes--;
        text_out(out, text, bytes);
    } else if (prompt->bytes) {
        text_out(out, &byte, 1);
    } else {
        text_out(out, number, (size_t)snprintf(number, sizeof(number), "%s%d", index ? " " : "", id));
    }
}

// Appends the model's answer ids[count]. Appends special tokens only if they may be marks of reasoning.
static void prompt_append_answer(const Prompt *prompt, Scratch *answer, const int32_t *ids, size_t count) {
    const Tokenizer *t = prompt->tokenizer;
    char *text = (char *)checked_malloc(count * prompt_token_bytes(prompt), "an answer");
    TextOut out = text_out_to(NULL, text);
    for (size_t i = 0, bytes; i < count; i++) {
        const char *part = tokenizer_decode(t, ids[i], &bytes);
        if (t->section_bytes[SECTION_THOUGHT_END] || !tokenizer_is_special(t, ids[i])) text_out(&out, part, bytes);
    }
    text_out_end(&out);
    scratch_append(answer, text, out.bytes);
    free(text);
}

// Prints ids[count] to `text`, which has room for prompt_token_bytes() * count bytes. Returns the bytes of the text.
static size_t prompt_text(const Prompt *prompt, const int32_t *ids, size_t count, char *text) {
    TextOut out = text_out_to(NULL, text);
    for (size_t i = 0; i < count; i++) prompt_token_out(prompt, &out, ids[i], i);
    text_out_end(&out);
    return out.bytes;
}

// ---- generating ----------------------------------------------------------------------------------------------------
static SamplingSettings sampling_from_options(const Options *o) {
    const SamplingSettings settings = {o->temperature, 0, o->top_k, o->top_p, o->seed};
    return settings;
}

static int prompt_is_end(const Prompt *prompt, int32_t id) {
    for (size_t i = 0; i < prompt->stop_ids.count; i++)
        if (prompt->stop_ids.id[i] == id) return 1;
    return prompt->tokenizer && !prompt->ignore_end && tokenizer_is_end(prompt->tokenizer, id);
}

// Writes the answer ids[count] into an open object: ids, text, and why it ends. text: room for prompt_token_bytes() *
// count bytes
static void prompt_answer_json(JsonOut *json, const Prompt *prompt, const int32_t *ids, size_t count, char *text) {
    json_ids(json, "ids", ids, count);
    if (prompt->bytes || prompt->tokenizer) json_bytes(json, "text", text, prompt_text(prompt, ids, count, text));
    json_text(json, "stop", prompt_is_end(prompt, ids[count - 1]) ? "eos" : "length");
}

// Draws at most `count` tokens into ids, up to a token that ends the text. Returns how many. Writes each token to `out`
// when it is drawn.
static size_t generate_on(Sampler *sampler, const Prompt *prompt, const SamplingSettings *settings, int32_t *ids,
                          size_t count, TextOut *out) {
    for (size_t i = 0; i < count; i++) {
        ids[i] = sampler_next(sampler, settings);
        if (out->file) {
            prompt_token_out(prompt, out, ids[i], i);
            fflush(out->file);
        }
        if (prompt_is_end(prompt, ids[i])) return i + 1;
    }
    return count;
}

// Feeds the prompt, then draws. Prints the prompt and the tokens to `file` unless it is NULL.
static size_t generate(Sampler *sampler, StreamBP *s, const Prompt *prompt, const SamplingSettings *settings,
                       int32_t *ids, size_t count, FILE *file) {
    TextOut out = text_out_to(file, NULL);
    sampler_begin(sampler, s);
    sampler_feed(sampler, prompt->id, prompt->count);
    if (file && prompt->text) text_out(&out, prompt->text, prompt->text_bytes);
    if (file && !prompt->text && !prompt->chat && (prompt->tokenizer || prompt->bytes))
        for (size_t i = 0; i < prompt->count; i++) prompt_token_out(prompt, &out, prompt->id[i], i);
    size_t drawn = generate_on(sampler, prompt, settings, ids, count, &out);
    if (file) {
        text_out_end(&out);
        fputc('\n', file);
    }
    sampler_end(sampler);
    return drawn;
}

#endif
