/*
Answers to requests, in OpenAI's form: one object, or a stream of chunks as server-sent events.

    answer_scores   adds the log-probabilities of a drawn token
    answer_chunk    streams what has become final since the last chunk
    answer_whole    answers with one object

Log-probabilities are those of the model's own softmax: temperature, top_k and top_p do not change them.
*/
#ifndef LLMC_ANSWER_H
#define LLMC_ANSWER_H
#include "ask.h"

// What answers need besides their request
typedef struct {
    const Prompt *decoder;
    const Config *config;
    DType dtype;       // of logits
    const char *model; // its name
    uint64_t run;      // number of this process, for the ids of answers
    long created;      // seconds since 1970, when the server began, for the model
} Answerer;

// ---- log-probabilities ----------------------------------------------------------------------------------------------
static void answer_score(JsonOut *json, const Answerer *s, size_t id, double logp) {
    size_t bytes;
    char number[TEXT_BYTES_PER_TOKEN + 1];
    const Tokenizer *t = s->decoder->tokenizer;
    const char *text = tokenizer_decode(t, (int32_t)id, &bytes);
    if (!bytes) text = number, bytes = (size_t)snprintf(number, sizeof(number), "<%zu>", id);
    json_bytes(json, "token", text, bytes);
    json_number(json, "logprob", logp);
    json_array(json, "bytes");
    for (size_t i = 0; i < bytes; i++) json_size(json, NULL, (unsigned char)text[i]);
    json_array_end(json);
}

// Adds token `id` and the likeliest tokens, by the logits that it was drawn from.
static void answer_scores(const Answerer *s, Ask *a, int32_t id) {
    const size_t V = s->config->vocab_size;
    const double divisor = logits_divisor(s->config), cap = logits_cap(s->config);
    size_t best[ASK_TOP], found = 0;
    double *z = (double *)checked_calloc(V, sizeof(double), "log-probabilities of a token"), most = -HUGE_VAL, sum = 0;
    for (size_t v = 0; v < V; v++) {
        z[v] = element_to_double(a->logits, s->dtype, v);
        z[v] = (cap > 0 ? cap * tanh(z[v] / cap) : z[v]) / divisor;
        most = fmax(most, z[v]);
        size_t at = found; // inserts into the best so far; equal logits: the lower id first
        while (at && z[v] > z[best[at - 1]]) at--;
        if (at == a->top) continue;
        found = min_size(found + 1, a->top);
        memmove(best + at + 1, best + at, (found - 1 - at) * sizeof(*best));
        best[at] = v;
    }
    for (size_t v = 0; v < V; v++) sum += exp(z[v] - most);
    const double total = most + log(sum);
    if (!a->scores.file) {
        a->scores.file = open_memstream(&a->scores.text, &a->scores.bytes);
        if (!a->scores.file) die("out of host memory for log-probabilities; free some memory");
        memset(&a->scores.json, 0, sizeof(a->scores.json));
        a->scores.json.file = a->scores.file;
    }
    JsonOut *json = &a->scores.json;
    json_object(json, NULL);
    answer_score(json, s, (size_t)id, z[id] - total);
    json_array(json, "top_logprobs");
    for (size_t i = 0; i < found; i++) {
        json_object(json, NULL);
        answer_score(json, s, best[i], z[best[i]] - total);
        json_object_end(json);
    }
    json_array_end(json);
    json_object_end(json);
    free(z);
}

// Writes the log-probabilities that were added since the last call.
static void answer_put_scores(JsonOut *json, Ask *a) {
    if (!a->logprobs) return;
    json_object(json, "logprobs");
    json_array(json, "content");
    if (a->scores.file && !fclose(a->scores.file) && a->scores.bytes) json_word(json, NULL, a->scores.text);
    free(a->scores.text);
    a->scores.file = NULL, a->scores.text = NULL;
    json_array_end(json);
    json_object_end(json);
}

// ---- parts of both forms --------------------------------------------------------------------------------------------
static void answer_head(JsonOut *json, const Answerer *s, const Ask *a, const char *object) {
    char id[64];
    snprintf(id, sizeof(id), "chatcmpl-%016llx-%zu", (unsigned long long)s->run, a->number);
    json_text(json, "id", id), json_text(json, "object", object);
    json_size(json, "created", (size_t)a->created), json_text(json, "model", s->model);
}

static void answer_usage(JsonOut *json, const Ask *a) {
    json_object(json, "usage");
    json_size(json, "prompt_tokens", a->prompt.count), json_size(json, "completion_tokens", a->tokens);
    json_size(json, "total_tokens", a->prompt.count + a->tokens);
    json_object(json, "prompt_tokens_details");
    json_size(json, "cached_tokens", a->cached);
    json_object_end(json);
    json_object_end(json);
}

static void answer_ids(JsonOut *json, const char *key, const int32_t *ids, size_t count) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) json_size(json, NULL, (size_t)ids[i]);
    json_array_end(json);
}

// Writes the calls of a message from the renderer, whose arguments are objects. Returns how many.
static size_t answer_calls(JsonOut *json, const cJSON *message) {
    const cJSON *call, *calls = json_get(message, "tool_calls");
    size_t count = 0;
    if (!cJSON_GetArraySize(calls)) return 0;
    json_array(json, "tool_calls");
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = json_get(call, "function");
        char *arguments = cJSON_PrintUnformatted(json_get(function, "arguments"));
        json_object(json, NULL);
        json_size(json, "index", count++);
        json_text(json, "id", cJSON_GetStringValue(json_get(call, "id")));
        json_text(json, "type", "function");
        json_object(json, "function");
        json_text(json, "name", cJSON_GetStringValue(json_get(function, "name")));
        json_text(json, "arguments", arguments ? arguments : "{}");
        json_object_end(json);
        json_object_end(json);
        cJSON_free(arguments);
    }
    json_array_end(json);
    return count;
}

// Writes the members of a message: of the renderer, or of the text. Returns the number of its calls.
static size_t answer_message(JsonOut *json, const Answerer *s, const Ask *a, const cJSON *message) {
    if (message) {
        const char *thought = cJSON_GetStringValue(json_get(message, "reasoning_content"));
        const char *content = cJSON_GetStringValue(json_get(message, "content"));
        size_t bytes = content ? strlen(content) : 0;
        for (size_t i = 0; i < a->stops && content; i++) {
            const char *stop = strstr(content, a->stop[i]);
            if (stop) bytes = min_size(bytes, (size_t)(stop - content));
        }
        if (content && (bytes || !cJSON_GetArraySize(json_get(message, "tool_calls"))))
            json_bytes(json, "content", content, bytes);
        else
            json_null(json, "content");
        if (thought && *thought) json_text(json, "reasoning_content", thought);
        return answer_calls(json, message);
    }
    const AskParts p = ask_parts(a, s->decoder->tokenizer);
    json_bytes(json, "content", a->text + p.content, p.content_end - p.content);
    if (p.thought_end > p.thought)
        json_bytes(json, "reasoning_content", a->text + p.thought, p.thought_end - p.thought);
    return 0;
}

// ---- one object -----------------------------------------------------------------------------------------------------
// message: from the renderer; NULL: the text is the answer
static void answer_whole(const Answerer *s, Ask *a, const cJSON *message) {
    LineOut line;
    line_open(&line);
    JsonOut *json = &line.json;
    answer_head(json, s, a, "chat.completion");
    json_array(json, "choices");
    json_object(json, NULL);
    json_size(json, "index", 0);
    json_object(json, "message");
    json_text(json, "role", "assistant");
    const size_t calls = answer_message(json, s, a, message);
    json_object_end(json);
    answer_put_scores(json, a);
    json_text(json, "finish_reason", calls ? "tool_calls" : a->finish);
    if (a->gives_ids) answer_ids(json, "token_ids", a->ids, a->tokens);
    json_object_end(json);
    json_array_end(json);
    answer_usage(json, a);
    if (a->gives_ids) answer_ids(json, "prompt_token_ids", a->prompt.id, a->prompt.count);
    line_close(&line);
    http_reply(a->request, 200, line.text, line.bytes);
    a->request = NULL;
    free(line.text);
}

// ---- a stream -------------------------------------------------------------------------------------------------------
static void answer_event(Ask *a, LineOut *line) {
    line_close(line);
    line->text[line->bytes - 1] = 0; // without its newline
    http_event(a->request, line->text);
    free(line->text);
}

// Ends a stream: the tokens that were used, if asked for.
static void answer_end(const Answerer *s, Ask *a) {
    LineOut line;
    if (a->usage) {
        line_open(&line);
        answer_head(&line.json, s, a, "chat.completion.chunk");
        json_array(&line.json, "choices"), json_array_end(&line.json);
        answer_usage(&line.json, a);
        answer_event(a, &line);
    }
    http_event(a->request, "[DONE]");
    http_end(a->request);
    a->request = NULL;
}

// Streams what became final since the last chunk; the first chunk begins the stream, and one with a finish ends it. An
// answer that the renderer parses is streamed at its end, from the renderer's message.
static void answer_chunk(const Answerer *s, Ask *a, const cJSON *message) {
    const int first = !a->told, ends = a->finish && (message || !a->parses);
    const AskParts none = {0, 0, 0, 0}, p = a->parses ? none : ask_parts(a, s->decoder->tokenizer);
    const size_t thought = p.thought + a->thought_given, content = p.content + a->content_given;
    const size_t thoughts = p.thought_end > thought ? p.thought_end - thought : 0;
    const size_t contents = p.content_end > content ? p.content_end - content : 0;
    LineOut line;
    size_t calls = 0;
    if (!first && !ends && !thoughts && !contents) return;
    if (first) http_stream(a->request);
    line_open(&line);
    JsonOut *json = &line.json;
    answer_head(json, s, a, "chat.completion.chunk");
    json_array(json, "choices");
    json_object(json, NULL);
    json_size(json, "index", 0);
    json_object(json, "delta");
    if (first) json_text(json, "role", "assistant");
    if (message) calls = answer_message(json, s, a, message);
    if (!message && contents) json_bytes(json, "content", a->text + content, contents);
    if (!message && thoughts) json_bytes(json, "reasoning_content", a->text + thought, thoughts);
    json_object_end(json);
    answer_put_scores(json, a);
    json_text(json, "finish_reason", !ends ? NULL : calls ? "tool_calls" : a->finish);
    if (a->gives_ids) answer_ids(json, "token_ids", a->ids + a->told, a->tokens - a->told);
    json_object_end(json);
    json_array_end(json);
    if (a->gives_ids && first) answer_ids(json, "prompt_token_ids", a->prompt.id, a->prompt.count);
    answer_event(a, &line);
    a->told = a->tokens, a->thought_given += thoughts, a->content_given += contents;
    if (ends) answer_end(s, a);
}

#endif
