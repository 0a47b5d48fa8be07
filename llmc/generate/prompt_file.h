/*
Reads prompts from a file, one per line, and prints their answers as JSON lines. A line whose first character is '{' is
a JSON object with one of

    "prompt": "text"                             like --prompt; with --chat a user's turn
    "messages": [{"role": "user", "content": "text"}, ...]   a chat in the model's template, which ends with the user
    "prompt_ids": [1, 2, 3]                      ids, used unchanged

and any other members, which come first in its answer. Any other line is the prompt itself. Blank lines are skipped. A
line that cannot be answered ends the program with "FILE:LINE: ...".
*/
#ifndef LLMC_PROMPT_FILE_H
#define LLMC_PROMPT_FILE_H
#include "prompt.h"

typedef struct {
    size_t number;        // line number, from 1
    size_t begin, tokens; // range of the prompt's ids within all ids
    const char *members;  // members of the line's object, as text within the file; NULL: the line is a text
    int has_ids;          // 1: the members include ids
    int continues;        // 1: the answer continues a text (prompt_token_out)
} PromptLine;

typedef struct {
    Prompt text; // the tokenizer, and how texts become ids
    char *file;  // the whole file
    PromptLine *line;
    size_t count, longest; // number of prompts; tokens of the longest prompt
    TokenIds ids;          // ids of all prompts
} PromptFile;

// ---- a line --------------------------------------------------------------------------------------------------------
#define PROMPT_ROLES "system|user|assistant"
enum { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT };

// Tells whether the tokenizer file says how the template writes an answer. Returns what is wrong, or NULL.
static const char *chat_answer_fault(const Tokenizer *t, const char *answer) {
    Scratch trimmed = {NULL, 0, 0};
    if (chat_forgets(t))
        return t->section_bytes[SECTION_THOUGHT_END] && !t->section_bytes[SECTION_THOUGHT_BEGIN]
                   ? "is an assistant's, and the tokenizer file does not say how the chat template begins an answer; "
                     "give \"prompt_ids\""
                   : NULL;
    chat_append_text(&trimmed, answer, strlen(answer), 1);
    const int differs = trimmed.count != strlen(answer);
    free(trimmed.at);
    return differs ? "begins or ends with white space, and the tokenizer file does not say whether the chat template "
                     "keeps it; trim the message"
                   : NULL;
}

// Checks a chat: an optional system message, then turns of user and assistant, the user's last. Returns what is wrong,
// or NULL.
static const char *chat_messages_fault(const Prompt *prompt, const Options *o, const cJSON *messages) {
    static char text[PATH_MAX + 1024];
    const size_t count = (size_t)cJSON_GetArraySize(messages);
    const Tokenizer *t = prompt->tokenizer;
    const cJSON *message = cJSON_GetArrayItem(messages, 0);
    const int has_system = json_is(json_get(message, "role"), "system");
    const char *option;
    size_t number = 0;
    int wanted = ROLE_USER;
    if (!t) {
        snprintf(text, sizeof(text), "messages need the model's tokenizer file, or --tokenizer FILE; %s",
                 tokenizer_advice(prompt->run));
        return text;
    }
    const char *fault = chat_fault(t, o->system || has_system, o->thinking, count > 1 + (size_t)has_system, &option);
    cJSON_ArrayForEach(message, messages) {
        const cJSON *role = json_get(message, "role"), *content = json_get(message, "content");
        const int word = cJSON_IsString(role) ? word_index(PROMPT_ROLES, role->valuestring) : -1;
        if (fault) return fault;
        number++;
        if (word < 0 || !cJSON_IsString(content))
            fault = "must be {\"role\": \"user\", \"system\" or \"assistant\", \"content\": \"text\"}";
        else if (word == ROLE_ASSISTANT && wanted == ROLE_ASSISTANT)
            fault = chat_answer_fault(t, content->valuestring);
        if (fault) {
            snprintf(text, sizeof(text), "message %zu %s", number, fault);
            return text;
        }
        if (word == ROLE_SYSTEM && number == 1) continue;
        if (word != wanted) {
            snprintf(text, sizeof(text),
                     "message %zu is the %s's; after an optional system message, user and assistant must take turns",
                     number, role->valuestring);
            return text;
        }
        wanted = word == ROLE_USER ? ROLE_ASSISTANT : ROLE_USER;
    }
    return wanted == ROLE_USER ? "the messages must end with the user's message, which the model answers" : NULL;
}

// Appends the ids of a chat without fault.
static void chat_messages_encode(const Prompt *prompt, const Options *o, const cJSON *messages, TokenIds *ids) {
    const char *system = o->system;
    const cJSON *message;
    Scratch text = {NULL, 0, 0};
    size_t users = 0;
    cJSON_ArrayForEach(message, messages) {
        const char *content = json_get(message, "content")->valuestring;
        const size_t bytes = strlen(content);
        const int word = word_index(PROMPT_ROLES, json_get(message, "role")->valuestring);
        if (word == ROLE_SYSTEM)
            system = content;
        else if (word == ROLE_USER)
            chat_append_turn(&text, prompt->tokenizer, system, content, bytes, users++ == 0);
        else if (chat_forgets(prompt->tokenizer))
            chat_append_kept(&text, prompt->tokenizer, content, bytes);
        else
            scratch_append(&text, content, bytes);
    }
    chat_encode(prompt->tokenizer, &text, o->thinking, ids);
    free(text.at);
}

// Appends the ids of a text.
static void line_encode(const Prompt *prompt, const Options *o, const char *text, size_t bytes, const char *where,
                        TokenIds *ids) {
    const Tokenizer *t = prompt->tokenizer;
    if (!t && !prompt->bytes)
        die("%s: the model has no tokenizer file, so it reads only {\"prompt_ids\": [ID, ...]}; %s", where,
            tokenizer_advice(prompt->run));
    if (t && !(t->flags & TOKENIZER_ENCODES))
        die("%s: %s decodes only, %s; give {\"prompt_ids\": [ID, ...]}", where, t->path,
            tokenizer_message(t, SECTION_REASON));
    const size_t valid = t ? utf8_valid_until(text, bytes) : bytes;
    if (valid < bytes) die("%s: byte %zu is not UTF-8; write the file in UTF-8", where, valid);
    prompt_append(prompt, o, text, bytes, ids);
}

// Tells whether an answer continues text that is shown.
static int answer_continues(const Prompt *prompt, const Options *o, int chat) {
    const char *opening;
    return !chat || chat_shown_opening(prompt->tokenizer, o->thinking, &opening) > 0;
}

// Appends the ids of an object's prompt. Sets the line's fields that the answer needs. Returns 1 if the object has
// messages.
static int object_encode(const Prompt *prompt, const Options *o, const cJSON *object, const char *where, size_t V,
                         PromptLine *line, TokenIds *ids) {
    static const char *const kinds[] = {"prompt", "messages", "prompt_ids"}, *const answers[] = {"line", "ids", "text",
                                                                                                 "stop"};
    const cJSON *value = NULL, *id;
    size_t kind = 3, given = 0;
    uint64_t number;
    for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++)
        if (cJSON_GetObjectItemCaseSensitive(object, answers[i]))
            die("%s: the key \"%s\" is written with each answer; rename the line's key", where, answers[i]);
    for (size_t i = 0; i < 3; i++)
        if (json_get(object, kinds[i])) value = json_get(object, kinds[i]), kind = i, given++;
    if (given != 1)
        die("%s: has %s of \"prompt\", \"messages\" and \"prompt_ids\"; give one of them", where,
            given ? "more than one" : "none");
    line->has_ids = kind == 2;
    if (kind == 0 && cJSON_IsString(value)) {
        line_encode(prompt, o, value->valuestring, strlen(value->valuestring), where, ids);
    } else if (kind == 1 && cJSON_IsArray(value)) {
        const char *fault = chat_messages_fault(prompt, o, value);
        if (fault) die("%s: %s", where, fault);
        chat_messages_encode(prompt, o, value, ids);
    } else if (kind == 2 && cJSON_IsArray(value)) {
        cJSON_ArrayForEach(id, value) {
            if (!json_whole_number(id, &number) || number >= V)
                die("%s: \"prompt_ids\" must be ids below the vocabulary of %zu", where, V);
            token_ids_add(ids, (uint32_t)number);
        }
    } else {
        die("%s: \"%s\" must be %s", where, kinds[kind], kind == 0 ? "a text" : kind == 1 ? "a list" : "a list of ids");
    }
    line->continues = kind < 2 && answer_continues(prompt, o, kind == 1 || prompt->chat);
    return kind == 1;
}

// ---- the file ------------------------------------------------------------------------------------------------------
// Refuses a prompt without tokens, with ids outside the vocabulary, or too long together with its answer.
static void prompt_file_check(const Run *run, const int32_t *ids, size_t tokens, const char *where) {
    const Config *c = &run->model.config;
    const Options *o = run->options;
    const size_t most = c->family->learned_positions ? c->max_position_embeddings : SIZE_MAX;
    const size_t all = tokens + o->max_new_tokens - 1, limit = o->max_context ? min_size(o->max_context, most) : most;
    if (!tokens) die("%s: the prompt is empty; give at least one token", where);
    for (size_t i = 0; i < tokens; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= c->vocab_size)
            die("%s: token %zu of the prompt is %d; ids must be below the model's vocabulary of %zu", where, i, ids[i],
                c->vocab_size);
    if (all > limit)
        die("%s: the prompt of %zu tokens and --max-new-tokens %zu take %zu positions, above %s %zu; shorten the "
            "prompt or lower --max-new-tokens",
            where, tokens, o->max_new_tokens, all, limit < most ? "--max-context" : "the model's positions,", limit);
}

// Reads --prompts. Consecutive lines with equal ids share them, so that the sampler feeds them once.
static PromptFile prompt_file_read(const Run *run) {
    static const char bom[] = "\xef\xbb\xbf";
    const Options *o = run->options;
    const int piped = !strcmp(o->prompts, "-");
    const char *name = piped ? "standard input" : o->prompts;
    PromptFile p = {0};
    char where[PATH_MAX + 24];
    size_t bytes, lines = 1, number = 0;
    int chats;
    p.text = prompt_open(run), chats = p.text.chat;
    p.file = piped ? stream_read_text(stdin, name, PROMPT_MAX, &bytes) : input_read_text(name, PROMPT_MAX, &bytes);
    for (size_t i = 0; i < bytes; i++) lines += p.file[i] == '\n';
    p.line = (PromptLine *)checked_calloc(lines, sizeof(PromptLine), "the lines of --prompts");
    char *at = p.file + (bytes >= 3 && !memcmp(p.file, bom, 3) ? 3 : 0), *const file_end = p.file + bytes;
    for (char *next; at < file_end; at = next) {
        char *end = (char *)memchr(at, '\n', (size_t)(file_end - at));
        PromptLine *line = &p.line[p.count], *before = p.count ? line - 1 : NULL;
        if (!end) end = file_end;
        next = end + 1, number++;
        if (end > at && end[-1] == '\r') end--;
        *end = 0;
        const char *first = at + strspn(at, " \t");
        if (first == end) continue;
        snprintf(where, sizeof(where), "%s:%zu", name, number);
        line->number = number, line->begin = p.ids.count;
        if (*first == '{') {
            cJSON *object = json_parse_object(first, (size_t)(end - first), where);
            chats |= object_encode(&p.text, o, object, where, run->model.config.vocab_size, line, &p.ids);
            cJSON_Delete(object);
            line->members = first + 1;
            *strrchr(at, '}') = 0;
        } else {
            line_encode(&p.text, o, at, (size_t)(end - at), where, &p.ids);
            line->continues = answer_continues(&p.text, o, p.text.chat);
        }
        line->tokens = p.ids.count - line->begin;
        const int32_t *ids = p.ids.id + line->begin;
        prompt_file_check(run, ids, line->tokens, where);
        if (before && before->tokens == line->tokens &&
            !memcmp(p.ids.id + before->begin, ids, line->tokens * sizeof(int32_t)))
            p.ids.count = line->begin, line->begin = before->begin;
        p.longest = max_size(p.longest, line->tokens);
        p.count++;
    }
    if (!p.count) die("%s: has no prompts; write one a line", name);
    if (option_given(o, "thinking") && !chats)
        die_usage("--thinking has no meaning here: no line of %s is a chat; give --chat, or leave it out", name);
    return p;
}

static const int32_t *prompt_file_ids(const PromptFile *p, size_t i) { return p->ids.id + p->line[i].begin; }

static void prompt_file_free(PromptFile *p) {
    prompt_free(&p->text);
    free(p->file), free(p->line), free(p->ids.id);
    memset(p, 0, sizeof(*p));
}

// ---- answers -------------------------------------------------------------------------------------------------------
// Prints the answer ids[count] to prompt i. text: as in prompt_answer_json
static void prompt_file_print(const PromptFile *p, size_t i, const int32_t *ids, size_t count, char *text) {
    const PromptLine *line = &p->line[i];
    Prompt prompt = p->text;
    JsonOut json = json_open(stdout);
    if (line->members) json_put_word(&json, line->members), json.comma = 1;
    json_size(&json, "line", line->number);
    if (!line->has_ids) json_ids(&json, "prompt_ids", prompt_file_ids(p, i), line->tokens);
    prompt.text = line->continues ? p->file : NULL;
    prompt_answer_json(&json, &prompt, ids, count, text);
    json_finish(&json);
}

#endif
