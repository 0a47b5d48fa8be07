/*
The chat of a Hugging Face folder. A run's data were prepared with its tokenizer file, so the file's template and ends
of a turn replace the template and ends of a turn in the kept folder. chat_template.jinja is written anew. Other files
keep every byte but the values of `chat_keys`: an existing chat_template; eos_token, if generation does not end at the
end of a turn yet and the template does not write eos_token; generation_config's eos_token_id: the old ids and then the
new ids, each once. config.json and pad_token stay.
*/
#ifndef LLMC_HF_CHAT_H
#define LLMC_HF_CHAT_H
#include "hf_config_keep.h"
#include "llmc/tokenizer/tokenizer.h"

#define HF_CHAT_MAX    ((size_t)16 << 20) // most bytes of a file with a template
#define HF_GENERATION  "generation_config.json"
#define TOKENIZER_JSON "tokenizer_config.json"

static const struct {
    const char *file, *key;
    int add; // add the key if the file lacks it
} chat_keys[] = {{TOKENIZER_JSON, "chat_template", 0},        {TOKENIZER_JSON, "eos_token", 1},
                 {"special_tokens_map.json", "eos_token", 0}, {"chat_template.json", "chat_template", 0},
                 {HF_GENERATION, "eos_token_id", 1},          {HF_GENERATION, "pad_token_id", 1},
                 {HF_GENERATION, "bos_token_id", 1}};

typedef struct {
    Tokenizer *tokenizer; // NULL: the files stay as they are
    char *edits;          // a JSON object of keys that change, with their values
    size_t length;        // length of edits
    int replaces;         // 1: the tokenizer's chat template replaces the folder's template
    size_t bytes;         // bytes of the chat_template.jinja to write; 0: the folder's file stays
} HfChat;

// Returns the object in a file of the folder, or an empty object. The caller frees it.
static cJSON *hf_folder_object(const char *folder, const char *name) {
    char path[PATH_MAX];
    return *folder && path_found(path, folder, name) ? json_read_object(path, HF_CHAT_MAX) : cJSON_CreateObject();
}

// Tells whether `string` equals text[bytes]; NULL equals no text.
static int hf_is_text(const char *string, const char *text, size_t bytes) {
    return string && strlen(string) == bytes && !memcmp(string, text, bytes);
}

// Returns the folder's default template: from chat_template.jinja, else from tokenizer_config.json; "": none. The
// caller frees it.
static char *hf_folder_template(const char *folder, const cJSON *config) {
    char path[PATH_MAX];
    size_t length;
    const cJSON *value = json_get(config, "chat_template"), *entry = cJSON_IsArray(value) ? value->child : NULL;
    for (; entry; entry = entry->next)
        if (json_is(json_get(entry, "name"), "default")) value = json_get(entry, "template");
    if (*folder && path_found(path, folder, TEMPLATE_NAME)) return input_read_text(path, HF_CHAT_MAX, &length);
    return checked_strdup(cJSON_IsString(value) ? value->valuestring : "");
}

// Returns a value of generation_config.json, else of config.json or the text model in it, as transformers does.
static const cJSON *hf_generation_value(const cJSON *config, const char *key) {
    const cJSON *value = json_get(config, key);
    return value ? value : json_get(json_get(config, "text_config"), key);
}

// Tells whether a token is among ids (a number, a list or NULL) before the entry `until`; until NULL: among all.
static int hf_has_id(const cJSON *ids, double id, const cJSON *until) {
    JSON_EACH(entry, ids) {
        if (entry == until) return 0;
        if (cJSON_IsNumber(entry) && entry->valuedouble == id) return 1;
    }
    return 0;
}

// Adds eos_token = the first end-of-turn token of the template, unless generation in the folder stops at one of its
// end-of-turn tokens.
static void hf_chat_eos(JsonOut *json, const Tokenizer *t, const cJSON *config, const cJSON *ids) {
    const cJSON *own = json_get(config, "eos_token");
    size_t bytes;
    if (cJSON_IsObject(own)) own = json_get(own, "content");
    for (size_t i = t->turn_end_count; i-- > 0;) {
        const char *text = tokenizer_decode(t, (int32_t)t->turn_ends[i], &bytes);
        if (hf_has_id(ids, t->turn_ends[i], NULL) || hf_is_text(cJSON_GetStringValue(own), text, bytes)) return;
        if (!i) json_bytes(json, "eos_token", text, bytes);
    }
}

// Adds generation's eos_token_id if it lacks an end of a turn or has an id twice. The value is the old ids, each once,
// then the missing ends. Without generation_config.json also adds the remaining ids of config.json, because generation
// no longer reads config.json then.
static void hf_chat_ids(JsonOut *json, const Tokenizer *t, const cJSON *generation, const cJSON *config,
                        const cJSON *ids) {
    static const char *const others[] = {"bos_token_id", "pad_token_id"};
    const cJSON *other;
    int changes = 0;
    for (size_t i = 0; i < t->turn_end_count; i++) changes |= !hf_has_id(ids, t->turn_ends[i], NULL);
    JSON_EACH(id, ids) changes |= hf_has_id(ids, id->valuedouble, id);
    if (!changes) return;
    for (size_t i = 0; !generation->child && i < 2; i++)
        if (cJSON_IsNumber(other = hf_generation_value(config, others[i])))
            json_number(json, others[i], other->valuedouble);
    json_array(json, "eos_token_id");
    JSON_EACH(id, ids) {
        if (cJSON_IsNumber(id) && !hf_has_id(ids, id->valuedouble, id)) json_number(json, NULL, id->valuedouble);
    }
    for (size_t i = 0; i < t->turn_end_count; i++)
        if (!hf_has_id(ids, t->turn_ends[i], NULL)) json_size(json, NULL, t->turn_ends[i]);
    json_array_end(json);
}

// Compares the chat of a tokenizer file with the chat of the kept folder; "": no folder. Takes ownership of the
// tokenizer.
static HfChat hf_chat_prepare(const char *folder, Tokenizer *t) {
    HfChat chat = {t, NULL, 0, 0, 0};
    const size_t bytes = t->section_bytes[SECTION_TEMPLATE], room = 6 * bytes + 32 * t->turn_end_count + 4096;
    cJSON *config = hf_folder_object(folder, TOKENIZER_JSON), *model = hf_folder_object(folder, "config.json");
    cJSON *generation = hf_folder_object(folder, HF_GENERATION);
    const cJSON *ids = hf_generation_value(generation->child ? generation : model, "eos_token_id");
    const char *text = (const char *)t->section[SECTION_TEMPLATE];
    char *own = hf_folder_template(folder, config);
    chat.replaces = bytes && !hf_is_text(own, text, bytes);
    chat.bytes = chat.replaces || !cJSON_IsArray(json_get(config, "chat_template")) ? bytes : 0; // a written file must
                                                                                                 // not hide a list of
                                                                                                 // templates
    chat.edits = (char *)checked_malloc(room, "the chat of a folder");
    JsonOut json = json_open_text(chat.edits, room, JSON_INDENTED);
    if (chat.replaces) json_bytes(&json, "chat_template", text, bytes);
    if (*folder && t->turn_end_count) {
        // A template that writes eos_token would render differently with a new eos_token.
        const char *shown = bytes ? text : own;
        if (!memmem(shown, bytes ? bytes : strlen(own), "eos_token", 9)) hf_chat_eos(&json, t, config, ids);
        hf_chat_ids(&json, t, generation, model, ids);
    }
    chat.length = json_text_end(&json);
    if (!chat.length) die("internal: the chat of a folder is longer than %zu bytes; please report it", room);
    free(own);
    cJSON_Delete(config), cJSON_Delete(model), cJSON_Delete(generation);
    return chat;
}

// Returns the text of a file of the folder, which may be absent, with the changed values; NULL: the file stays. The
// caller frees it.
static char *hf_chat_edit(const HfChat *chat, const char *path, const char *name, size_t *length) {
    char *out = NULL;
    size_t begin, end;
    for (size_t i = 0; chat->tokenizer && i < sizeof(chat_keys) / sizeof(chat_keys[0]); i++) {
        const char *key = chat_keys[i].key;
        if (strcmp(name, chat_keys[i].file) != 0 || !json_value_span(chat->edits, chat->length, key, &begin, &end))
            continue;
        if (!out) {
            char *text = path_exists(path) ? input_read_text(path, HF_CHAT_MAX, length) : checked_strdup("{\n}\n");
            if (!path_exists(path)) *length = strlen(text);
            cJSON_Delete(json_parse_object(text, *length, path));
            out = (char *)checked_malloc(*length + chat->length + 256, path);
            memcpy(out, text, *length + 1);
            free(text);
        }
        *length = hf_config_replace(out, *length, key, chat->edits + begin, end - begin, chat_keys[i].add);
    }
    return out;
}

#endif
