/*
A request for a chat completion, in OpenAI's form, and how its answer grows. Keys that would change the answer in a way
that is not built are refused by name; keys for accounts and bills are ignored.

    ask_read      reads the request; a fault ends it (die_caught)
    ask_token     adds a drawn token
    ask_parts     cuts the text so far into reasoning and content

Further keys, as other servers have them: top_k; chat_template_kwargs; return_token_ids. Reasoning ends at the tokenizer
file's mark and is given as reasoning_content. Clients send back only `content`; templates drop old reasoning.
*/
#ifndef LLMC_ASK_H
#define LLMC_ASK_H
#include "http.h"
#include "llmc/generate/prompt_file.h"

#define ASK_STOPS  4     // most texts that end an answer
#define ASK_TOP    20    // most top_logprobs
#define ASK_VALUES 65536 // most JSON values of a request, for each takes about 80 bytes while the request waits

typedef enum {
    ASK_RENDERS, // waits for the renderer to write its prompt
    ASK_READY,   // waits for a slot
    ASK_WRITES,  // is being written
    ASK_PARSES   // waits for the renderer to find calls in its answer
} AskStage;

typedef struct {
    HttpRequest *request; // NULL: answered, or its client has left
    AskStage stage;
    size_t number; // of the request, from 1
    long created;  // seconds since 1970
    cJSON *body;
    const cJSON *messages, *tools; // tools: NULL: none
    // what it asks for
    Thinking thinking;
    TokenIds prompt;
    SamplingSettings sampling;
    uint64_t seed;
    size_t room, top; // most new tokens; likeliest tokens to report of each
    const char *stop[ASK_STOPS];
    size_t stops;
    int streams, usage, logprobs, gives_ids;
    int parses; // 1: the renderer parses the answer
    // its answer
    int32_t *ids;        // [tokens] drawn tokens; room for `room`
    size_t tokens, told; // told: tokens whose ids and log-probabilities were given
    size_t cached;       // tokens of the prompt that did not run: kept by the slot, or copied
    TextOut out;
    char *text;                          // [out.bytes] text of the tokens
    size_t bytes;                        // bytes of text that count: all, or up to a stop text
    int begins_in_thought;               // the prompt ends within reasoning
    size_t thought_given, content_given; // bytes that were streamed
    char *logits;                        // [V] of the token that is drawn next; NULL: not asked for
    LineOut scores;                      // log-probabilities of tokens that were not given yet, members of a list
    const char *finish;                  // NULL: it goes on
} Ask;

static void ask_free(Ask *a) {
    cJSON_Delete(a->body);
    free(a->prompt.id), free(a->ids), free(a->text), free(a->logits);
    if (a->scores.file) fclose(a->scores.file);
    free(a->scores.text);
    free(a);
}

// ---- keys -----------------------------------------------------------------------------------------------------------
static double ask_number(const cJSON *body, const char *key, double least, double most, double missing) {
    const cJSON *value = json_get(body, key);
    if (!value) return missing;
    if (!cJSON_IsNumber(value) || !(value->valuedouble >= least && value->valuedouble <= most))
        die("%s must be a number from %g to %g", key, least, most);
    return value->valuedouble;
}

static uint64_t ask_whole(const cJSON *body, const char *key, double least, double most, uint64_t missing) {
    const double value = ask_number(body, key, least, most, 0);
    if (value != floor(value)) die("%s must be a whole number", key);
    return json_get(body, key) ? (uint64_t)value : missing;
}

static int ask_flag(const cJSON *body, const char *key) {
    const cJSON *value = json_get(body, key);
    if (value && !cJSON_IsBool(value)) die("%s must be true or false", key);
    return cJSON_IsTrue(value);
}

static size_t ask_values(const cJSON *value) {
    const cJSON *child;
    size_t count = 1;
    cJSON_ArrayForEach(child, value) count += ask_values(child);
    return count;
}

// Refuses keys that are unknown, or whose value would change the answer in a way that is not built.
static void ask_check_keys(const cJSON *body) {
    static const char known[] =
        "messages|model|max_tokens|max_completion_tokens|temperature|top_p|top_k|seed|stop|stream|stream_options|"
        "logprobs|top_logprobs|tools|tool_choice|chat_template_kwargs|return_token_ids|n|presence_penalty|"
        "frequency_penalty|logit_bias|response_format|modalities|user|metadata|store|service_tier|"
        "parallel_tool_calls|prompt_cache_key|prompt_cache_retention|safety_identifier|reasoning_effort";
    const cJSON *parallel = json_get(body, "parallel_tool_calls"), *options = json_get(body, "stream_options");
    const cJSON *key, *format = json_get(body, "response_format"), *bias = json_get(body, "logit_bias");
    cJSON_ArrayForEach(key, body) {
        if (word_index(known, key->string) < 0 && !cJSON_IsNull(key))
            die("%.100s is not known here; leave it out", key->string);
    }
    if (ask_whole(body, "n", 1, 128, 1) > 1) die("n must be 1; send the request again for another answer");
    if (ask_number(body, "presence_penalty", -2, 2, 0) != 0 || ask_number(body, "frequency_penalty", -2, 2, 0) != 0)
        die("presence_penalty and frequency_penalty must be 0");
    if (bias && (!cJSON_IsObject(bias) || bias->child)) die("logit_bias must be {}");
    if (format && !json_is(json_get(format, "type"), "text")) die("response_format must be {\"type\": \"text\"}");
    if (parallel && !cJSON_IsTrue(parallel)) die("parallel_tool_calls must be true");
    if (options && !cJSON_IsObject(options)) die("stream_options must be an object");
    JSON_EACH(kind, json_get(body, "modalities")) {
        if (!json_is(kind, "text")) die("modalities must be [\"text\"]");
    }
}

// Joins the parts of a content that is a list of texts.
static void ask_join_content(cJSON *message, size_t number) {
    cJSON *content = cJSON_GetObjectItemCaseSensitive(message, "content"), *whole;
    size_t bytes = 0;
    if (!cJSON_IsArray(content)) return;
    JSON_EACH(part, content) {
        if (!json_is(json_get(part, "type"), "text") || !cJSON_IsString(json_get(part, "text")))
            die("message %zu has content that is no text; send {\"type\": \"text\", \"text\": \"...\"}", number);
        bytes += strlen(json_get(part, "text")->valuestring);
    }
    char *text = (char *)checked_calloc(bytes + 1, 1, "a message"), *end = text;
    JSON_EACH(part, content) end = stpcpy(end, json_get(part, "text")->valuestring);
    whole = cJSON_CreateString(text);
    free(text);
    cJSON_ReplaceItemInObjectCaseSensitive(message, "content", whole);
}

// Reads the messages. system: begins chats without a system message; NULL: none
static void ask_read_messages(Ask *a, const char *system) {
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(a->body, "messages"), *message;
    size_t number = 0;
    if (!cJSON_IsArray(messages) || !cJSON_GetArraySize(messages))
        die("messages must be a list of at least one message");
    cJSON_ArrayForEach(message, messages) {
        number++;
        if (!cJSON_IsObject(message) || !cJSON_IsString(json_get(message, "role")))
            die("message %zu must be an object with a role", number);
        ask_join_content(message, number);
        if (json_is(json_get(message, "role"), "developer")) // OpenAI's word for the system's
            cJSON_ReplaceItemInObjectCaseSensitive(message, "role", cJSON_CreateString("system"));
    }
    cJSON *first = cJSON_GetArrayItem(messages, 0);
    if (system && !json_is(json_get(first, "role"), "system")) {
        cJSON *own = cJSON_CreateObject();
        cJSON_AddStringToObject(own, "role", "system"), cJSON_AddStringToObject(own, "content", system);
        cJSON_InsertItemInArray(messages, 0, own);
    }
    a->messages = messages;
}

static void ask_read_tools(Ask *a) {
    const cJSON *tools = json_get(a->body, "tools"), *choice = json_get(a->body, "tool_choice");
    if (tools && !cJSON_IsArray(tools)) die("tools must be a list");
    if (choice && !json_is(choice, "auto") && !json_is(choice, "none")) die("tool_choice must be \"auto\" or \"none\"");
    if (cJSON_GetArraySize(tools) && !json_is(choice, "none")) a->tools = tools;
}

// Reads a request from text[bytes], which a zero follows. o: defaults of absent keys. most: most tokens of prompt and
// answer together
static void ask_read(Ask *a, const Options *o, const char *text, size_t bytes, size_t most) {
    a->body = json_parse_object(text, bytes, "the request");
    const cJSON *body = a->body, *kwargs = json_get(body, "chat_template_kwargs");
    const cJSON *thinks = json_get(kwargs, "enable_thinking");
    if (ask_values(body) > ASK_VALUES) die("the request has more than %d JSON values; shorten it", ASK_VALUES);
    ask_check_keys(body);
    ask_read_messages(a, o->system);
    ask_read_tools(a);
    if (kwargs && !cJSON_IsObject(kwargs)) die("chat_template_kwargs must be an object");
    if (thinks && !cJSON_IsBool(thinks)) die("enable_thinking must be true or false");
    a->thinking = cJSON_IsBool(thinks) ? (cJSON_IsTrue(thinks) ? THINKING_ON : THINKING_OFF) : o->thinking;
    a->sampling = sampling_from_options(o);
    a->sampling.temperature = ask_number(body, "temperature", 0, 1000, o->temperature);
    a->sampling.top_p = ask_number(body, "top_p", 0, 1, o->top_p);
    a->sampling.top_k = ask_whole(body, "top_k", 0, 1e9, o->top_k);
    // a seed gives line 1 of sample --prompts; without one, the number of the request is that of the line
    const int seeded = json_get(body, "seed") != NULL;
    a->seed = random_bits(ask_whole(body, "seed", 0, 9007199254740992.0, o->seed), RANDOM_STREAM_TEXTS,
                          seeded ? 1 : a->number);
    a->room = ask_whole(body, "max_tokens", 1, 1e9, min_size(o->max_new_tokens, most));
    a->room = min_size(most, ask_whole(body, "max_completion_tokens", 1, 1e9, a->room));
    a->streams = ask_flag(body, "stream"), a->usage = ask_flag(json_get(body, "stream_options"), "include_usage");
    a->gives_ids = ask_flag(body, "return_token_ids"), a->logprobs = ask_flag(body, "logprobs");
    a->top = ask_whole(body, "top_logprobs", 0, ASK_TOP, 0);
    if (a->top && !a->logprobs) die("top_logprobs needs \"logprobs\": true");
    JSON_EACH(stop, json_get(body, "stop")) {
        if (!cJSON_IsString(stop) || !*stop->valuestring || a->stops == ASK_STOPS)
            die("stop must be a text or up to %d texts, none of them empty", ASK_STOPS);
        a->stop[a->stops++] = stop->valuestring;
    }
}

// Tells whether only the chat template itself can write the request.
static int ask_needs_renderer(const Ask *a, const Tokenizer *t) {
    const cJSON *message, *argument, *key;
    if (a->tools || json_get(a->body, "reasoning_effort")) return 1;
    cJSON_ArrayForEach(argument, json_get(a->body, "chat_template_kwargs")) {
        if (strcmp(argument->string, "enable_thinking") != 0) return 1;
    }
    cJSON_ArrayForEach(message, a->messages) {
        cJSON_ArrayForEach(key, message) {
            const int empty = cJSON_IsNull(key) || (cJSON_IsArray(key) && !key->child);
            const int drops = !strcmp(key->string, "reasoning_content") && chat_forgets(t);
            if (!empty && !drops && word_index("role|content", key->string) < 0) return 1;
        }
    }
    return 0;
}

// ---- the answer -----------------------------------------------------------------------------------------------------
// Returns how many bytes at the end of text[bytes] may be the beginning of a mark.
static size_t ask_held(const char *text, size_t bytes, const char *mark, size_t mark_bytes) {
    for (size_t n = min_size(bytes, mark_bytes - 1); n; n--)
        if (!memcmp(text + bytes - n, mark, n)) return n;
    return 0;
}

// The parts of the text so far: [begin, end) of the reasoning and of the content, final up to their ends
typedef struct {
    size_t thought, thought_end, content, content_end;
} AskParts;

static AskParts ask_parts(const Ask *a, const Tokenizer *t) {
    static const char opening[] = "<think>";
    AskParts p = {0, 0, 0, 0};
    size_t mark_bytes, bytes = a->bytes, begin = 0, held = 0;
    const char *mark = t ? chat_thought_end(t, &mark_bytes) : NULL;
    for (size_t i = 0; i < a->stops && !a->finish; i++)
        held = max_size(held, ask_held(a->text, bytes, a->stop[i], strlen(a->stop[i])));
    bytes -= held;
    if (mark && !a->begins_in_thought) { // is there reasoning?
        while (begin < bytes && strchr(" \n", a->text[begin])) begin++;
        const size_t alike = min_size(bytes - begin, sizeof(opening) - 1);
        const int may_be = !memcmp(a->text + begin, opening, alike);
        if (may_be && alike < sizeof(opening) - 1 && !a->finish) return p;
        if (!may_be || alike < sizeof(opening) - 1) mark = NULL;
        begin += sizeof(opening) - 1;
    }
    if (!mark) {
        p.content_end = bytes;
        return p;
    }
    const char *end = (const char *)memmem(a->text + begin, bytes - begin, mark, mark_bytes);
    p.thought = begin + (begin < bytes && a->text[begin] == '\n');
    p.thought_end = end ? (size_t)(end - a->text)
                        : bytes - (a->finish ? 0 : ask_held(a->text + begin, bytes - begin, mark, mark_bytes));
    p.content = p.content_end = bytes;
    if (end) p.content = p.thought_end + mark_bytes;
    while (end && p.thought_end > p.thought && a->text[p.thought_end - 1] == '\n') p.thought_end--;
    while (end && p.content < bytes && a->text[p.content] == '\n') p.content++;
    while (!end && !a->finish && p.thought_end > p.thought && a->text[p.thought_end - 1] == '\n') p.thought_end--;
    p.thought = min_size(p.thought, p.thought_end);
    return p;
}

// Ends the text before a stop text, if one is there. from: bytes that were searched before
static void ask_find_stop(Ask *a, size_t from) {
    for (size_t i = 0; i < a->stops; i++) {
        const size_t length = strlen(a->stop[i]), begin = from > length ? from - length : 0;
        const char *found =
            a->bytes > begin ? (const char *)memmem(a->text + begin, a->bytes - begin, a->stop[i], length) : NULL;
        if (found) a->bytes = (size_t)(found - a->text), a->finish = "stop";
    }
}

// Tells whether a prompt ends within reasoning: its last tokens open it.
static int ask_opens_thought(const Tokenizer *t, const TokenIds *prompt) {
    size_t mark_bytes, bytes, count = 0;
    const char *mark = chat_thought_end(t, &mark_bytes), *last = NULL;
    char tail[256];
    size_t i = prompt->count;
    while (i > 0) { // as many of the last tokens as the room holds
        tokenizer_decode(t, prompt->id[i - 1], &bytes);
        if (count + bytes > sizeof(tail)) break;
        count += bytes, i--;
    }
    for (count = 0; i < prompt->count; i++, count += bytes) {
        const char *text = tokenizer_decode(t, prompt->id[i], &bytes);
        memcpy(tail + count, text, bytes);
    }
    for (size_t k = 0; k + 7 <= count; k++)
        if (!memcmp(tail + k, "<think>", 7)) last = tail + k;
    return last && !memmem(last, (size_t)(tail + count - last), mark, mark_bytes);
}

// Adds a drawn token. ended: it ends the text; last: no token follows
static void ask_token(Ask *a, const Prompt *decoder, int32_t id, int ended, int last) {
    const size_t before = a->out.bytes;
    Prompt own = *decoder;
    own.text = a->begins_in_thought ? a->text : NULL; // keeps a first space: the text goes on
    if (!ended) prompt_token_out(&own, &a->out, id, a->tokens);
    a->ids[a->tokens++] = id;
    if (ended || last) text_out_end(&a->out), a->finish = ended ? "stop" : "length";
    a->bytes = a->out.bytes;
    ask_find_stop(a, before);
}

#endif
