/*
`sample --serve`: answers chat completions over HTTP, many at once. One thread does it all: between two steps of the
sampler it reads requests and writes answers, and sleeps if there are none.

A request is rendered to ids, by the tokenizer file or by the renderer (data/render.py), waits for a slot, and is
written with other requests in the sampler's batch (SamplerTurns). If a slot has the beginning of its prompt, from an
earlier turn of the chat or from a chat with the same system message, only the rest runs through the model. A client
that leaves frees its slot.
*/
#ifndef LLMC_SERVE_H
#define LLMC_SERVE_H
#include "answer.h"
#include "llmc/generate/sampler.h"
#include "llmc/train/reward.h"
#include <setjmp.h>

#define SERVE_SLOTS   ((size_t)8)  // texts written at once, unless --slots says
#define SERVE_WAITING ((size_t)64) // most requests that wait for a slot
#define SERVE_TAIL                                                                                                     \
    ((size_t)8) // tokens at a prompt's end that the next turn may replace, such as <|im_start|>assistant\n<think>\n
#define SERVE_RENDER 60.0 // seconds that the renderer has for a chat

typedef struct {
    Run run;
    Prompt prompt;
    Options own; // the options, with the thinking of the request that is read
    HttpServer http;
    Answerer answerer;
    char token[4096], model[256], render_command[3 * PATH_MAX + 64];
    // slots
    SamplerBatch sampler;
    Completion *text;
    int32_t **ids; // [slots][capacity + 1] the tokens of each text
    size_t *used;  // [slots] number of the last request there
    Ask **writing; // [slots] NULL: the slot is free
    size_t slots, capacity, token_bytes;
    // requests in the order of their arrival
    Ask **ask;
    size_t asks, number;
    // the renderer
    Reward renderer;
    Ask *rendering; // NULL: it is idle
    char *rendered; // its answer
} Serve;

// ---- refusals -------------------------------------------------------------------------------------------------------
static jmp_buf serve_jump;
static char serve_message[DIE_MESSAGE];

static void serve_caught(int code, const char *message) {
    (void)code;
    snprintf(serve_message, sizeof(serve_message), "%s", message);
    longjmp(serve_jump, 1);
}

// Refuses a request; serve_look forgets it.
static void serve_refuse(Ask *a, int status, const char *message) {
    if (a->request) http_refuse(a->request, status, status < 500 ? "invalid_request_error" : "server_error", message);
    a->request = NULL;
}

// ---- requests -------------------------------------------------------------------------------------------------------
static void serve_remove(Serve *s, size_t i) {
    ask_free(s->ask[i]);
    memmove(s->ask + i, s->ask + i + 1, (--s->asks - i) * sizeof(*s->ask));
}

// Readies a request whose prompt has its ids.
static void serve_ready(Serve *s, Ask *a) {
    const Config *c = &s->run.model.config;
    for (size_t i = 0; i < a->prompt.count; i++)
        if ((size_t)a->prompt.id[i] >= c->vocab_size)
            die("the prompt has token %d, which this model does not have", a->prompt.id[i]);
    if (!a->prompt.count) die("the prompt is empty");
    if (a->prompt.count > s->capacity)
        die("the prompt has %zu tokens, and a chat at most %zu; shorten it, or serve with a higher --max-context",
            a->prompt.count, s->capacity);
    a->room = min_size(a->room, s->capacity - a->prompt.count + 1);
    a->begins_in_thought = ask_opens_thought(s->prompt.tokenizer, &a->prompt);
    a->ids = (int32_t *)checked_malloc(a->room * sizeof(int32_t), "an answer");
    // special tokens that mark reasoning, as in gpt-oss and Gemma 4, are not in the text
    a->parses = a->tools || (*s->render_command && s->prompt.tokenizer->section_bytes[SECTION_THOUGHT_END]);
    a->text = (char *)checked_malloc(a->room * s->token_bytes, "an answer");
    a->out = text_out_to(NULL, a->text);
    if (a->logprobs)
        a->logits = (char *)checked_malloc(c->vocab_size * dtype_size(s->run.model.dtype), "the logits of a token");
    a->stage = ASK_READY;
}

// Reads a request. Its faults end in serve_caught.
static void serve_read(Serve *s, Ask *a, const char *text, size_t bytes) {
    Options *own = &s->own;
    ask_read(a, s->run.options, text, bytes, s->capacity);
    own->thinking = a->thinking;
    const char *fault = ask_needs_renderer(a, s->prompt.tokenizer)
                            ? "tools, tool_calls, reasoning_content, reasoning_effort and chat_template_kwargs need "
                              "data/render.py, Python and the model's tokenizer.json; serve with --render-command "
                              "'python3 data/render.py - TOKENIZER'"
                            : chat_messages_fault(&s->prompt, own, a->messages);
    if (fault && *s->render_command) return; // the renderer writes the prompt, or refuses it, too
    if (fault) die("%s", fault);
    chat_messages_encode(&s->prompt, own, a->messages, &a->prompt);
    serve_ready(s, a);
}

static void serve_chat(Serve *s, HttpRequest *request, const char *text, size_t bytes) {
    Ask *a = (Ask *)checked_calloc(1, sizeof(Ask), "a request");
    a->request = request, a->number = ++s->number, a->created = (long)time(NULL);
    s->ask[s->asks++] = a;
    if (!setjmp(serve_jump)) {
        die_caught = serve_caught;
        serve_read(s, a, text, bytes);
        die_caught = NULL;
    } else {
        die_caught = NULL;
        serve_refuse(a, 400, serve_message);
        serve_remove(s, s->asks - 1);
    }
}

// Takes a request (HttpServer.take).
static void serve_take(void *serve, HttpRequest *request, const char *path, const char *text, size_t bytes) {
    Serve *s = (Serve *)serve;
    char answer[1024];
    JsonOut json = json_open_text(answer, sizeof(answer), JSON_LINE);
    size_t writing = 0;
    for (size_t i = 0; i < s->slots; i++) writing += s->writing[i] != NULL;
    if (text && !strcmp(path, "/v1/chat/completions")) {
        if (stop_asked())
            http_refuse(request, 503, "server_error", "the server is ending");
        else if (s->asks == s->slots + SERVE_WAITING)
            http_refuse(request, 429, "server_error", "too many requests wait already; ask again later");
        else
            serve_chat(s, request, text, bytes);
    } else if (!text && !strcmp(path, "/v1/models")) {
        json_text(&json, "object", "list");
        json_array(&json, "data");
        json_object(&json, NULL);
        json_text(&json, "id", s->model), json_text(&json, "object", "model");
        json_size(&json, "created", (size_t)s->answerer.created), json_text(&json, "owned_by", "streambp");
        json_size(&json, "max_model_len", s->capacity);
        json_object_end(&json);
        json_array_end(&json);
        http_reply(request, 200, answer, json_text_end(&json));
    } else if (!text && !strcmp(path, "/health")) {
        json_text(&json, "status", "ok");
        json_size(&json, "slots", s->slots), json_size(&json, "writing", writing);
        json_size(&json, "waiting", s->asks - writing);
        http_reply(request, 200, answer, json_text_end(&json));
    } else {
        http_refuse(request, 404, "invalid_request_error",
                    "unknown; there are POST /v1/chat/completions, GET /v1/models and GET /health");
    }
}

// ---- the renderer ---------------------------------------------------------------------------------------------------
static int serve_rendered(Reward *r, char *text, size_t bytes, void *to) {
    text[bytes] = 0;
    *(char **)to = checked_strdup(text);
    r->answered++;
    return 1;
}

// Makes the row of a chat, from which the renderer takes tools and variables of the template. Without a key `messages`
// render.py would take it for plain text. The caller frees it.
static char *serve_row(const Ask *a) {
    const cJSON *variables = json_get(a->body, "chat_template_kwargs"), *effort = json_get(a->body, "reasoning_effort");
    cJSON *row = cJSON_CreateObject(), *own = variables ? cJSON_Duplicate(variables, 1) : cJSON_CreateObject();
    cJSON_AddArrayToObject(row, "messages");
    if (a->tools) cJSON_AddItemReferenceToObject(row, "tools", (cJSON *)a->tools);
    if (effort && !json_get(own, "reasoning_effort"))
        cJSON_AddItemToObject(own, "reasoning_effort", cJSON_Duplicate(effort, 1));
    if (a->thinking != THINKING_AUTO && !json_get(own, "enable_thinking"))
        cJSON_AddBoolToObject(own, "enable_thinking", a->thinking == THINKING_ON);
    if (cJSON_GetArraySize(own))
        cJSON_AddItemToObject(row, "chat_template_kwargs", own);
    else
        cJSON_Delete(own);
    char *text = cJSON_PrintUnformatted(row);
    cJSON_Delete(row);
    return text;
}

// Makes the line of a request for the renderer: its chat, or its answer.
static LineOut serve_render_line(const Serve *s, const Ask *a) {
    LineOut line;
    line_open(&line);
    if (a->stage == ASK_PARSES) {
        answer_ids(&line.json, "said", a->ids, a->tokens);
        json_bool(&line.json, "ended", prompt_is_end(&s->prompt, a->ids[a->tokens - 1]));
        json_size(&line.json, "turn", a->number); // in the ids of calls, which so are unique
    } else {
        char *messages = cJSON_PrintUnformatted(a->messages), *row = serve_row(a);
        answer_ids(&line.json, "ids", NULL, 0);
        json_word(&line.json, "row", row);
        json_word(&line.json, "messages", messages);
        json_size(&line.json, "most", s->capacity);
        cJSON_free(messages), cJSON_free(row);
    }
    line_close(&line);
    return line;
}

// Gives the renderer the request that has waited longest. Its process is started by the first one.
static void serve_render_begin(Serve *s) {
    Reward of = {0};
    for (size_t i = 0; i < s->asks && !s->rendering; i++) {
        Ask *a = s->ask[i];
        if (a->request && (a->stage == ASK_RENDERS || a->stage == ASK_PARSES)) s->rendering = a;
    }
    if (!s->rendering) return;
    of.who = "the renderer", of.option = "a shorter chat", of.take = serve_rendered;
    of.answer_room = ((size_t)1 << 22) + 12 * s->capacity;
    if (!s->renderer.process) reward_open_as(&s->renderer, of, s->render_command, NULL, SERVE_RENDER, 0);
    LineOut line = serve_render_line(s, s->rendering);
    exchange_begin(&s->renderer, line.text, line.bytes);
}

static void serve_answer(Serve *s, Ask *a, const cJSON *message) {
    if (!a->request) return;
    if (a->streams)
        answer_chunk(&s->answerer, a, message);
    else
        answer_whole(&s->answerer, a, message);
}

// Takes the ids of a rendered chat. Their faults end in serve_caught.
static void serve_take_ids(Serve *s, Ask *a, const cJSON *answer) {
    const cJSON *ids = json_get(answer, "ids"), *error = json_get(answer, "error"), *id;
    uint64_t number;
    if (!cJSON_IsArray(ids)) die("%s", cJSON_IsString(error) ? error->valuestring : "the renderer gave no ids");
    cJSON_ArrayForEach(id, ids) {
        if (!json_whole_number(id, &number) || number > INT32_MAX) die("the renderer gave ids that are none");
        token_ids_add(&a->prompt, (uint32_t)number);
    }
    serve_ready(s, a);
}

// Takes the renderer's answer.
static void serve_render_end(Serve *s) {
    Ask *const a = s->rendering;
    cJSON *const answer = s->rendered ? cJSON_Parse(s->rendered) : NULL;
    const cJSON *message = json_get(answer, "message");
    s->rendering = NULL;
    if (a->stage == ASK_PARSES && !cJSON_IsObject(message)) { // its text alone would hide calls
        const cJSON *error = json_get(answer, "error");
        if (a->streams && a->request)
            http_drop(a->request), a->request = NULL;
        else
            serve_refuse(a, 500,
                         s->renderer.failed      ? s->renderer.message
                         : cJSON_IsString(error) ? error->valuestring
                                                 : "the renderer gave no message");
    } else if (a->stage == ASK_PARSES) {
        // without calls the answer is its text, unless special tokens mark its reasoning
        const int marked = s->prompt.tokenizer->section_bytes[SECTION_THOUGHT_END] != 0;
        a->parses = marked || cJSON_GetArraySize(json_get(message, "tool_calls"));
        serve_answer(s, a, a->parses ? message : NULL);
    } else if (s->renderer.failed) {
        serve_refuse(a, 500, s->renderer.message);
    } else if (!setjmp(serve_jump)) {
        die_caught = serve_caught;
        serve_take_ids(s, a, answer);
        die_caught = NULL;
    } else {
        die_caught = NULL;
        serve_refuse(a, 400, serve_message);
    }
    if (s->renderer.failed) reward_restart(&s->renderer);
    free(s->rendered);
    s->rendered = NULL;
    cJSON_Delete(answer);
}

// Reads and writes what is ready at the renderer. waits: first at most a hundredth of a second
static void serve_render(Serve *s, int waits) {
    struct pollfd ends[2];
    if (!s->rendering) serve_render_begin(s);
    if (!s->rendering) return;
    reward_ends(&s->renderer, ends);
    reward_wait(ends, 2, waits ? 0.01 : 0);
    if (exchange_ends(&s->renderer, ends, &s->rendered)) serve_render_end(s);
}

// ---- the loop -------------------------------------------------------------------------------------------------------
// Reads and writes what is ready, and forgets requests that were answered or whose clients have left. waits: first
// until something is ready
static void serve_look(Serve *s, int waits) {
    http_poll(&s->http, waits && !s->rendering);
    serve_render(s, waits);
    for (size_t i = 0; i < s->asks; i++) {
        Ask *a = s->ask[i];
        if (a->request && http_left(a->request)) http_drop(a->request), a->request = NULL;
        if (!a->request && a->stage != ASK_WRITES && a != s->rendering) serve_remove(s, i--);
    }
}

// Chooses the slot of a request: the free slot whose chat it continues, else the one that was used least recently. Sets
// of its text: kept, the tokens that the slot has; like and shared, the text whose slot has the longest common beginning
// with the prompt, and its tokens. ids[i] may be newer than slot i's keys while slots open together (slot_continue).
static size_t serve_slot(Serve *s, const Ask *a) {
    size_t best = SIZE_MAX, continued = 0, like = 0, shared = 0, kept = 0;
    for (size_t i = 0; i < s->slots; i++) {
        const Completion *text = &s->text[i];
        const size_t begun = text->prompt_tokens, has = s->writing[i] ? begun + text->tokens : text->kept;
        size_t common = 0;
        while (common < min_size(has, a->prompt.count) && s->ids[i][common] == a->prompt.id[common]) common++;
        if (common > shared) shared = common, like = i;
        if (s->writing[i]) continue;
        const size_t continues = common + SERVE_TAIL >= begun ? common : 0; // else it only begins alike
        const int better =
            best == SIZE_MAX || continues > continued || (continues == continued && s->used[i] < s->used[best]);
        if (better) best = i, continued = continues, kept = common;
    }
    s->text[best].kept = kept, s->text[best].like = like, s->text[best].shared = shared;
    return best;
}

// Returns the text (Completion) of the next request (SamplerTurns). Waits for one if no text is written, until the
// program is asked to end.
static size_t serve_next(void *serve, size_t step, int idle) {
    Serve *s = (Serve *)serve;
    (void)step;
    for (;;) {
        Ask *a = NULL;
        for (size_t i = 0; i < s->asks && !a; i++)
            if (s->ask[i]->stage == ASK_READY && s->ask[i]->request) a = s->ask[i];
        if (!a && (!idle || (stop_asked() && !s->asks))) return SIZE_MAX;
        if (!a) {
            serve_look(s, 1);
            continue;
        }
        const size_t slot = serve_slot(s, a);
        Completion *text = &s->text[slot];
        memcpy(s->ids[slot], a->prompt.id, a->prompt.count * sizeof(int32_t));
        text->prompt = s->ids[slot], text->prompt_tokens = a->prompt.count, text->ids = s->ids[slot] + a->prompt.count;
        text->room = a->room, text->seed = a->seed, text->again = 1;
        text->sampling = &a->sampling, text->logits = a->logits;
        a->stage = ASK_WRITES;
        s->writing[slot] = a, s->used[slot] = a->number;
        return slot;
    }
}

// Reads and writes between the passes of long prompts (Cache.between).
static void serve_between(void *serve) { serve_look((Serve *)serve, 0); }

// Takes the token that was drawn last in a slot.
static void serve_token(Serve *s, size_t slot, int last) {
    Ask *a = s->writing[slot];
    const Completion *text = &s->text[slot];
    if (a->finish || !a->request) return; // a text ends one token after its stop text, or after its client has left
    const int32_t id = text->ids[a->tokens];
    if (!a->tokens) a->cached = text->reused;
    if (a->logprobs) answer_scores(&s->answerer, a, id);
    ask_token(a, &s->prompt, id, last && text->ended, last);
    if (a->streams)
        answer_chunk(&s->answerer, a, NULL);
    else if (a->finish && !a->parses)
        answer_whole(&s->answerer, a, NULL);
}

// Takes the end of a text (SamplerTurns).
static void serve_ended(void *serve, size_t slot, size_t step) {
    Serve *s = (Serve *)serve;
    Ask *a = s->writing[slot];
    (void)step;
    serve_token(s, slot, 1);
    a->stage = ASK_PARSES; // if it is answered already, serve_look forgets it
    s->writing[slot] = NULL;
}

// Takes the tokens of a step (SamplerTurns).
static void serve_drawn(void *serve) {
    Serve *s = (Serve *)serve;
    for (size_t i = 0; i < s->slots; i++)
        if (s->writing[i]) serve_token(s, i, 0);
    serve_look(s, 0);
    // ends answered and abandoned texts: their next token is the last one
    for (size_t i = 0; i < s->slots; i++)
        if (s->writing[i] && (s->writing[i]->finish || !s->writing[i]->request))
            s->text[i].room = s->text[i].tokens + 1;
}

// ---- the start ------------------------------------------------------------------------------------------------------
// Reads --serve-token.
static void serve_read_token(Serve *s, const char *path) {
    size_t bytes;
    char *text = input_read_text(path, sizeof(s->token) - 1, &bytes);
    const size_t length = strcspn(text, "\r\n");
    if (length < HTTP_TOKEN ||
        strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/=") < length)
        die_usage("--serve-token %s: its first line must be at least %d letters, digits or -._~+/=; try openssl rand "
                  "-hex 32",
                  path, HTTP_TOKEN);
    memcpy(s->token, text, length);
    free(text);
    s->http.token = s->token;
}

// Reads [ADDRESS:]PORT.
static size_t serve_read_address(const Options *o, char address[256]) {
    const char *colon = strrchr(o->serve, ':'), *port = colon ? colon + 1 : o->serve;
    size_t number, bytes = colon ? (size_t)(colon - o->serve) : 0;
    if (!parse_size(port, &number) || number > 65535 || (colon && !bytes) || bytes > 255)
        die_usage("--serve '%.100s' must be a port from 0 to 65535, or ADDRESS:PORT", o->serve);
    const int bracketed = bytes > 2 && o->serve[0] == '[' && o->serve[bytes - 1] == ']';
    if (!bracketed && colon && memchr(o->serve, ':', bytes))
        die_usage("--serve '%.100s': write an address of IPv6 as [ADDRESS]:PORT", o->serve);
    snprintf(address, 256, "%.*s", (int)(bytes - 2 * (size_t)bracketed), o->serve + bracketed);
    if (!colon) strcpy(address, "127.0.0.1");
    return number;
}

// Finds tokenizer.json: the model's, or that of the folder from which a run began. Returns 0 if there is none.
static int serve_find_tokenizer(Run *run, char path[PATH_MAX]) {
    char folder[PATH_MAX];
    RunSource source;
    run_find_tokenizer(run);
    strcpy(path, run->tokenizer_path);
    if (!strcmp(path_last(path), "tokenizer.json")) return 1;
    folder_above(folder, run->model_path);
    run_source_read(folder, &source);
    return *source.text[SOURCE_FOLDER] && path_found(path, source.text[SOURCE_FOLDER], "tokenizer.json");
}

// Sets the renderer's command; empty: there is none. auto: data/render.py next to the program.
static void serve_find_renderer(Serve *s) {
    const Options *o = s->run.options;
    char program[PATH_MAX] = "", home[PATH_MAX] = "", script[PATH_MAX + 16], chat[PATH_MAX] = "", folder[PATH_MAX];
    char tokenizer[PATH_MAX];
    if (strcmp(o->render_command, "auto") != 0) {
        if (strcmp(o->render_command, "none") != 0)
            snprintf(s->render_command, sizeof(s->render_command), "%s", o->render_command);
        return;
    }
    const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    folder_above(home, program);
    snprintf(script, sizeof(script), "%s/data/render.py", home);
    folder_above(folder, s->prompt.tokenizer->path);
    if (!path_found(chat, folder, TEMPLATE_NAME)) *chat = 0;
    if (length <= 0 || !path_exists(script) || !serve_find_tokenizer(&s->run, tokenizer) || strchr(home, '\'') ||
        strchr(tokenizer, '\'') || strchr(chat, '\''))
        return;
    snprintf(s->render_command, sizeof(s->render_command), "exec \"${STREAMBP_PYTHON:-python3}\" '%s' - '%s' '%s'",
             script, tokenizer, chat);
}

// Names the model in answers: the last part of its path, or the preset.
static void serve_name(Serve *s) {
    const Options *o = s->run.options;
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s", o->model ? o->model : o->init);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
    if (!o->model) path[strcspn(path, ",")] = 0;
    snprintf(s->model, sizeof(s->model), "%.250s", o->model ? path_last(path) : path);
}

static void serve_allocate(Serve *s) {
    static const char what[] = "the texts of --serve";
    sampler_batch_allocate(&s->sampler, &s->run.model, s->slots, s->capacity);
    s->text = (Completion *)checked_calloc(s->slots, sizeof(Completion), what);
    s->ids = (int32_t **)checked_calloc(s->slots, sizeof(int32_t *), what);
    s->used = (size_t *)checked_calloc(s->slots, sizeof(size_t), what);
    s->writing = (Ask **)checked_calloc(s->slots, sizeof(Ask *), what);
    s->ask = (Ask **)checked_calloc(s->slots + SERVE_WAITING, sizeof(Ask *), what);
    for (size_t i = 0; i < s->slots; i++) {
        Completion *text = &s->text[i];
        s->ids[i] = (int32_t *)checked_calloc(s->capacity + 1, sizeof(int32_t), what);
        text->prompt = s->ids[i], text->prompt_tokens = text->room = 1; // until its first request
    }
}

static void serve_free(Serve *s) {
    while (s->asks) serve_remove(s, s->asks - 1);
    for (size_t i = 0; i < s->slots; i++) free(s->ids[i]);
    free(s->text), free(s->ids), free(s->used), free(s->writing), free(s->ask);
    sampler_batch_free(&s->sampler);
    if (s->renderer.process) reward_close(&s->renderer);
    prompt_free(&s->prompt);
}

// Serves until SIGINT or SIGTERM; then it answers what it has begun.
static int sample_serve(const Options *o) {
    Serve *s = (Serve *)checked_calloc(1, sizeof(Serve), "the server");
    const SamplerTurns turns = {s, serve_ended, serve_drawn, serve_next};
    const SamplingSettings unused = sampling_from_options(o);
    char address[256];
    const size_t port = serve_read_address(o, address);
    if (o->serve_token) serve_read_token(s, o->serve_token);
    if (dist_ranks() > 1) die_usage("--serve runs as one process; start it without mpirun");
    http_open(&s->http, address, port);
    if (!s->http.local && !o->serve_token)
        die_usage("--serve %s: other machines may reach this address; give --serve-token FILE with a token that they "
                  "must send",
                  o->serve);
    run_open(&s->run, o, NULL);
    s->prompt = prompt_open(&s->run), s->prompt.chat = 0;
    if (!s->prompt.tokenizer || !(s->prompt.tokenizer->flags & TOKENIZER_ENCODES))
        die_usage("--serve needs the model's tokenizer file; %s", tokenizer_advice(&s->run));
    s->own = *o, s->own.system = NULL; // messages have it
    serve_name(s), serve_find_renderer(s);
    s->capacity = chat_tokens(&s->run), s->token_bytes = prompt_token_bytes(&s->prompt);
    check_positions(&s->run, s->capacity, "--max-context");
    s->run.settings.rollout_slots = slots_from_options(o, &s->run.settings, o->slots ? o->slots : SERVE_SLOTS);
    s->run.settings.rollout_tokens = s->capacity;
    run_allocate(&s->run, regular_bound(0, 0));
    s->slots = s->run.settings.rollout_slots;
    serve_allocate(s);
    s->http.take = serve_take, s->http.context = s;
    http_begin(&s->http, s->slots + 2 * SERVE_WAITING, ((size_t)1 << 20) + 32 * s->capacity);
    run_load_weights(&s->run);
    const Answerer answerer = {&s->prompt,
                               &s->run.model.config,
                               s->run.model.dtype,
                               s->model,
                               random_bits((uint64_t)(1e6 * seconds_now()), o->seed, (uint64_t)getpid()),
                               (long)time(NULL)};
    s->answerer = answerer;
    size_t ends;
    uint32_t *end_ids = end_ids_from_options(o, s->prompt.tokenizer, s->run.model.config.vocab_size, &ends);
    stop.doing = ": answering what was asked before it";
    stop_listen(0, NULL, NULL);
    printf("%s: http://%s%s%s:%zu/v1 answers %zu chat%s of up to %zu tokens at a time\n", s->model,
           strchr(address, ':') ? "[" : "", address, strchr(address, ':') ? "]" : "", s->http.port, s->slots,
           s->slots > 1 ? "s" : "", s->capacity);
    fflush(stdout);
    s->sampler.turns = &turns;
    s->sampler.cache.between = serve_between, s->sampler.cache.context = s;
    sampler_batch(&s->sampler, &s->run.streambp, s->text, s->slots, &unused, end_ids, ends);
    http_close(&s->http);
    serve_free(s);
    free(end_ids);
    run_close(&s->run);
    free(s);
    return stop_exit_code(stop_asked());
}

#endif
