/*
`sample --iterative`: reasoning in rounds (InftyThink, arXiv 2503.06692). A round is a chat of its own: the question,
and after the first round the last summary. An answer with a summary asks for another round; one without is the last.

    round 1      question                                  -> reasoning, <summary> s1 </summary>
    round i      question <history> s(i-1) </history>      -> reasoning, <summary> si </summary>
    last round   question <history> s(n-1) </history>      -> reasoning, answer

data/iterative.py writes the same marks into training data. The key/value cache never holds more than one round.
*/
#ifndef LLMC_SAMPLE_ITERATIVE_H
#define LLMC_SAMPLE_ITERATIVE_H
#include "llmc/base/json.h"
#include "llmc/generate/prompt.h"

static const char *const iterative_marks[] = {"\n\n<history>\n", "\n</history>"}; // around a summary in the prompt
#define ITERATIVE_AROUND ((size_t)24) // bytes of both, so at most as many tokens

// Returns the most tokens of a round: the prompt with the longest summary, and an answer.
static size_t iterative_cache_tokens(const Prompt *prompt, const Options *o) {
    return prompt_cache_tokens(prompt, o) + o->max_new_tokens + ITERATIVE_AROUND;
}

// Finds the summary in an answer, after its reasoning. Returns its bytes, without white space around; 0: none.
static size_t iterative_summary(const Tokenizer *t, const char *answer, size_t bytes, const char **summary) {
    static const char open[] = "<summary>", close[] = "</summary>";
    const char *end = answer + bytes, *mark, *closed = NULL;
    size_t length;
    const char *thought = chat_thought_end(t, &length);
    if (!bytes) return 0;
    while ((mark = (const char *)memmem(answer, (size_t)(end - answer), thought, length)) != NULL)
        answer = mark + length;
    mark = (const char *)memmem(answer, (size_t)(end - answer), open, sizeof(open) - 1);
    if (mark) {
        *summary = mark += sizeof(open) - 1;
        closed = (const char *)memmem(mark, (size_t)(end - mark), close, sizeof(close) - 1);
    }
    if (!closed) return 0;
    while (*summary < closed && strchr(" \t\r\n", **summary)) (*summary)++;
    while (closed > *summary && strchr(" \t\r\n", closed[-1])) closed--;
    return (size_t)(closed - *summary);
}

// Encodes the prompt of a later round into prompt->id: the question with summary[bytes] of the round before.
static void iterative_prompt(Prompt *prompt, const Options *o, const Scratch *question, const char *summary,
                             size_t bytes, size_t V) {
    Scratch text = {NULL, 0, 0};
    TokenIds ids = {NULL, 0, 0};
    scratch_append(&text, question->at, question->count);
    scratch_append(&text, iterative_marks[0], strlen(iterative_marks[0]));
    scratch_append(&text, summary, bytes);
    scratch_append(&text, iterative_marks[1], strlen(iterative_marks[1]));
    chat_turn(prompt->tokenizer, o->system, o->thinking, (const char *)text.at, text.count, 1, &ids);
    free(prompt->id), free(text.at);
    prompt->id = ids.id, prompt->count = ids.count;
    prompt_check_ids(prompt->id, prompt->count, V);
}

// Prints rounds until an answer has no summary, --max-rounds, or a prompt that leaves no room for --max-new-tokens.
// prompt: of the first round. ids: room for --max-new-tokens
static void sample_iterative(Run *run, Sampler *sampler, Prompt *prompt, int32_t *ids) {
    const Options *o = run->options;
    SamplingSettings settings = sampling_from_options(o);
    Scratch question = {NULL, 0, 0}, answer = {NULL, 0, 0};
    JsonOut json = json_open_text(NULL, 0, JSON_LINE);
    const char *stop = NULL, *summary = NULL;
    size_t bytes = o->prompt ? strlen(o->prompt) : 0;
    char *file = o->prompt_file ? input_read_text(o->prompt_file, PROMPT_MAX, &bytes) : NULL;
    scratch_append(&question, file ? file : o->prompt, bytes);
    free(file);
    if (o->json) json = json_open(stdout), json_array(&json, "rounds");
    for (size_t round = 1; !stop; round++) {
        const size_t drawn =
            generate(sampler, &run->streambp, prompt, &settings, ids, o->max_new_tokens, o->json ? NULL : stdout);
        const int ended = prompt_is_end(prompt, ids[drawn - 1]);
        answer.count = 0;
        prompt_append_answer(prompt, &answer, ids, drawn - (size_t)ended);
        bytes = iterative_summary(prompt->tokenizer, (const char *)answer.at, answer.count, &summary);
        if (o->json) {
            json_object(&json, NULL);
            json_size(&json, "prompt_tokens", prompt->count);
            json_ids(&json, "ids", ids, drawn);
            json_bytes(&json, "text", (const char *)answer.at, answer.count);
            if (bytes) json_bytes(&json, "summary", summary, bytes);
            json_object_end(&json);
        }
        if (bytes) iterative_prompt(prompt, o, &question, summary, bytes, run->model.config.vocab_size);
        const int fits = prompt_cache_tokens(prompt, o) <= sampler->capacity;
        stop = !bytes ? (ended ? "eos" : "length") : round == o->max_rounds ? "max_rounds" : fits ? NULL : "context";
        settings.seed++; // else tokens at one position would be drawn by one random number
        if (!o->json && !stop) fputc('\n', stdout);
    }
    if (o->json) {
        json_array_end(&json);
        json_text(&json, "stop", stop);
        json_finish(&json);
    } else if (strcmp(stop, "eos") != 0) {
        note("the rounds end without an answer (%s); raise %s", stop,
             !strcmp(stop, "max_rounds") ? "--max-rounds" : "--max-new-tokens");
    }
    free(question.at), free(answer.at);
}

#endif
