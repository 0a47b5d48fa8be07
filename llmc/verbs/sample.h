/*
The verb `sample` writes text with a model and a key/value cache (sampler.h): one answer; answers to a file of prompts;
a chat, whose turns are lines of standard input, and whose cache lives across turns; or chats over HTTP (serve.h).
*/
#ifndef LLMC_SAMPLE_H
#define LLMC_SAMPLE_H
#include "llmc/generate/prompt_file.h"
#ifdef HAVE_LIBEVENT
#include "llmc/serve/serve.h"
#endif

static void sample_json(const Prompt *prompt, const int32_t *ids, size_t count) {
    JsonOut json = json_open(stdout);
    char *text = (char *)checked_calloc(count, prompt_token_bytes(prompt), "the sampled text");
    json_ids(&json, "prompt_ids", prompt->id, prompt->count);
    prompt_answer_json(&json, prompt, ids, count, text);
    json_finish(&json);
    free(text);
}

// A conversation, before its next turn is fed
typedef struct {
    Scratch text;          // text of all turns if the template rewrites them, else of the last turn
    TokenIds turn, fed;    // ids of `text` with the answer's opening; ids of the previous turn
    const int32_t *answer; // [answer_ids] the last answer, without the end token
    size_t turns, answer_ids;
} Conversation;

// Encodes a user's turn into c->turn. Returns how many of its first ids the sampler already has. A template that drops
// old reasoning changes earlier turns. Then all turns are encoded, and everything after the first change is fed again.
static size_t conversation_turn(Conversation *c, Sampler *sampler, const Prompt *prompt, const Options *o,
                                const char *line, size_t bytes) {
    Tokenizer *t = prompt->tokenizer;
    Scratch answer = {NULL, 0, 0};
    size_t known = 0;
    const int forgets = chat_forgets(t);
    const TokenIds fed = c->fed;
    c->fed = c->turn, c->turn = fed;
    c->turn.count = 0;
    if (!forgets) c->text.count = 0;
    if (forgets && c->turns) {
        prompt_append_answer(prompt, &answer, c->answer, c->answer_ids);
        chat_append_answer(&c->text, t, o->thinking, (const char *)answer.at, answer.count);
        free(answer.at);
    }
    chat_append_turn(&c->text, t, o->system, line, bytes, c->turns++ == 0);
    chat_encode(t, &c->text, o->thinking, &c->turn);
    if (!forgets || c->turns == 1) return 0;
    while (known < min_size(c->fed.count, c->turn.count) && c->fed.id[known] == c->turn.id[known]) known++;
    return sampler_rewind(sampler, known);
}

// Chats: each line is a turn. An answer ends when the model ends it, or at --max-new-tokens. The chat ends when the
// cache is full.
static void sample_chat(Run *run, Sampler *sampler, const Prompt *prompt, int32_t *ids) {
    const Options *o = run->options;
    SamplingSettings settings = sampling_from_options(o);
    Conversation c = {0};
    const char *opening;
    const size_t shown = chat_shown_opening(prompt->tokenizer, o->thinking, &opening);
    char *line = NULL;
    size_t capacity = 0;
    const int terminal = isatty(STDIN_FILENO);
    sampler_begin(sampler, &run->streambp);
    if (terminal) fputs("type a message; Ctrl-D ends the chat\n", stderr);
    for (;;) {
        TextOut out = text_out_to(stdout, NULL);
        if (terminal) fputs("> ", stderr);
        ssize_t bytes = getline(&line, &capacity, stdin);
        if (bytes < 0 && !feof(stdin) && errno == ENOMEM)
            die("out of host memory for a line of the chat; free some memory");
        if (bytes < 0 && terminal) fputc('\n', stderr);
        if (bytes < 0) break;
        while (bytes && (line[bytes - 1] == '\n' || line[bytes - 1] == '\r')) bytes--;
        if (!bytes) continue;
        const size_t known = conversation_turn(&c, sampler, prompt, o, line, (size_t)bytes),
                     fresh = c.turn.count - known;
        prompt_check_ids(c.turn.id, c.turn.count, run->model.config.vocab_size);
        size_t room = sampler->capacity - sampler->cache.used[0];
        room -= room && sampler->drawn >= 0; // the last drawn token is not fed yet
        if (!room || fresh > room) {
            note("the chat has reached its %zu tokens; raise --max-context", sampler->capacity);
            break;
        }
        sampler_feed(sampler, c.turn.id + known, fresh);
        text_out(&out, opening, shown);
        size_t drawn =
            generate_on(sampler, prompt, &settings, ids, min_size(o->max_new_tokens, room - fresh + 1), &out);
        const int ended = prompt_is_end(prompt, ids[drawn - 1]);
        if (ended) sampler->drawn = -1; // the next turn's text begins with this token
        c.answer = ids, c.answer_ids = drawn - (size_t)ended;
        text_out_end(&out);
        fputc('\n', stdout);
        fflush(stdout);
    }
    sampler_end(sampler);
    free(line), free(c.text.at);
    free(c.turn.id), free(c.fed.id);
}

// ---- a file of prompts ---------------------------------------------------------------------------------------------
// Answers in the order of the prompts. An answer is printed once all earlier answers are complete.
typedef struct {
    const PromptFile *prompts;
    Completion *completion; // [prompts]
    char *decoded;          // room for one text
    size_t printed;
} Answers;

// Prints the next answers that are complete (SamplerBatch.completed).
static void answers_print(void *context) {
    Answers *a = (Answers *)context;
    for (; a->printed < a->prompts->count; a->printed++) {
        const Completion *text = &a->completion[a->printed];
        if (!text->ended && text->tokens < text->room) break;
        prompt_file_print(a->prompts, a->printed, text->ids, text->tokens, a->decoded);
    }
}

// Writes a text for each line of --prompts.
static int sample_prompts(const Options *o) {
    static const char what[] = "the texts of --prompts";
    const SamplingSettings sampling = sampling_from_options(o);
    Run run;
    SamplerBatch sampler;
    Answers answers = {0};
    run_open(&run, o, NULL);
    PromptFile prompts = prompt_file_read(&run);
    const size_t capacity = prompts.longest + o->max_new_tokens - 1;
    run.settings.rollout_slots = slots_from_options(o, &run.settings, prompts.count);
    run.settings.rollout_tokens = capacity;
    check_positions(&run, capacity, "the longest prompt and --max-new-tokens together,");
    const size_t most = run.settings.rollout_slots;
    run_allocate(&run, regular_bound(0, 0));
    if (run.settings.rollout_slots < most && !o->quiet)
        note("memory holds %zu text%s of up to %zu tokens at a time; shorter prompts or a lower --max-new-tokens allow "
             "more",
             run.settings.rollout_slots, run.settings.rollout_slots > 1 ? "s" : "", capacity);
    sampler_batch_allocate(&sampler, &run.model, run.settings.rollout_slots, capacity);
    int32_t *ids = (int32_t *)checked_calloc(prompts.count * o->max_new_tokens, sizeof(int32_t), what);
    size_t ends;
    uint32_t *end_ids = end_ids_from_options(o, prompts.text.tokenizer, run.model.config.vocab_size, &ends);
    answers.prompts = &prompts;
    answers.completion = (Completion *)checked_calloc(prompts.count, sizeof(Completion), what);
    answers.decoded = (char *)checked_malloc(o->max_new_tokens * prompt_token_bytes(&prompts.text), what);
    sampler.completed = answers_print, sampler.context = &answers;
    for (size_t i = 0; i < prompts.count; i++) {
        Completion *text = &answers.completion[i];
        text->prompt = prompt_file_ids(&prompts, i), text->prompt_tokens = prompts.line[i].tokens;
        text->ids = ids + i * o->max_new_tokens, text->room = o->max_new_tokens;
        text->seed = random_bits(o->seed, RANDOM_STREAM_TEXTS, prompts.line[i].number);
    }
    run_load_weights(&run);
    sampler_batch(&sampler, &run.streambp, answers.completion, prompts.count, &sampling, end_ids, ends);
    sampler_batch_free(&sampler);
    free(ids), free(end_ids), free(answers.completion), free(answers.decoded);
    prompt_file_free(&prompts);
    run_close(&run);
    return 0;
}

// ---- the verb ------------------------------------------------------------------------------------------------------
static int verb_sample(const Options *options) {
    if (options->prompts) return sample_prompts(options);
    if (options->serve) {
#ifdef HAVE_LIBEVENT
        return sample_serve(options);
#else
        die_usage("--serve: this program was built without libevent; install libevent-dev, then type make");
#endif
    }
    Run run;
    Sampler sampler;
    SamplingSettings sampling = sampling_from_options(options);
    int chat = prompt_is_interactive(options);
    run_open(&run, options, NULL);
    Prompt prompt = prompt_from_options(&run);
    run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
    if (chat) run.settings.cache_tokens = chat_tokens(&run);
    if (!options->context_memory) // without a window no token is farther away than it
        check_positions(&run, run.settings.cache_tokens,
                        chat ? "--max-context" : "the prompt and --max-new-tokens together,");
    run_allocate(&run, regular_bound(0, 0));
    sampler_allocate(&sampler, &run.model, run.settings.cache_tokens, run.settings.context);
    run_load_weights(&run);
    int32_t *ids = (int32_t *)checked_calloc(options->max_new_tokens, sizeof(int32_t), "the sampled tokens");
    if (chat) {
        sample_chat(&run, &sampler, &prompt, ids);
    } else {
        size_t drawn = generate(&sampler, &run.streambp, &prompt, &sampling, ids, options->max_new_tokens,
                                options->json ? NULL : stdout);
        if (options->json) sample_json(&prompt, ids, drawn);
    }
    sampler_free(&sampler);
    free(ids);
    prompt_free(&prompt);
    run_close(&run);
    return 0;
}

#endif
