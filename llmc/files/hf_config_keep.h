/*
Keeps an existing config.json byte for byte, except for three things that may change: type of the weights, rotary
positions, quantisation. Keys are found and replaced in its text.
*/
#ifndef LLMC_HF_CONFIG_KEEP_H
#define LLMC_HF_CONFIG_KEEP_H
#include "hf_config_write.h"

// Finds bytes [begin, end) of the value of a top-level key, in a text that has been parsed. Returns 0 if the key is
// absent.
static int json_value_span(const char *text, size_t length, const char *key, size_t *begin, size_t *end) {
    size_t first, depth = 0, inner = 0;
    for (size_t i = 0; i < length; i++) {
        depth += text[i] == '{' || text[i] == '[';
        depth -= text[i] == '}' || text[i] == ']';
        if (text[i] != '"') continue;
        for (first = ++i; text[i] != '"'; i++) i += text[i] == '\\';
        if (depth != 1 || i - first != strlen(key) || memcmp(text + first, key, i - first) != 0) continue;
        *begin = i + 1 + strspn(text + i + 1, " \t\r\n");
        if (text[*begin] != ':') continue; // a string value, not a key
        *begin += 1 + strspn(text + *begin + 1, " \t\r\n");
        for (*end = *begin; inner || !strchr(",} \t\r\n", text[*end]); ++*end) {
            inner += text[*end] == '{' || text[*end] == '[';
            inner -= text[*end] == '}' || text[*end] == ']';
            if (text[*end] != '"') continue;
            for (++*end; text[*end] != '"'; ++*end) *end += text[*end] == '\\';
        }
        return 1;
    }
    return 0;
}

// Replaces the value of a top-level key; if absent and `add` is 1, inserts the key first. text: zero-terminated, with
// room. Returns the new length.
static size_t hf_config_replace(char *text, size_t length, const char *key, const char *value, size_t bytes, int add) {
    size_t begin, end;
    char name[64] = "";
    if (!json_value_span(text, length, key, &begin, &end)) {
        if (!add) return length;
        begin = end = strcspn(text, "{") + 1;
        snprintf(name, sizeof(name), "\n  \"%s\": ", key);
    }
    const size_t before = strlen(name), after = *name && text[end + strspn(text + end, " \t\r\n")] != '}';
    memmove(text + begin + before + bytes + after, text + end, length - end + 1);
    memcpy(text + begin, name, before);
    memcpy(text + begin + before, value, bytes);
    if (after) text[begin + before + bytes] = ',';
    return length + before + bytes + after - (end - begin);
}

// Removes a top-level key, with the comma before or after it. Returns the new length.
static size_t hf_config_without(char *text, size_t length, const char *key) {
    static const char blanks[] = " \t\r\n";
    size_t begin, end;
    if (!json_value_span(text, length, key, &begin, &end)) return length;
    begin -= strlen(key) + 2;
    while (text[begin] != '"' || strncmp(text + begin + 1, key, strlen(key)) != 0) begin--;
    while (begin && strchr(blanks, text[begin - 1])) begin--;
    if (text[begin - 1] == ',')
        begin--;
    else if (text[end + strspn(text + end, blanks)] == ',')
        end += strspn(text + end, blanks) + 1;
    memmove(text + begin, text + end, length - end + 1);
    return length - (end - begin);
}

// Replaces the type of the weights in a config.json.
static size_t hf_config_with_type(char *text, size_t length, DType type) {
    char name[16];
    snprintf(name, sizeof(name), "\"%s\"", hf_dtype_name(type));
    length = hf_config_replace(text, length, "dtype", name, strlen(name), 0);
    return hf_config_replace(text, length, "torch_dtype", name, strlen(name), 0);
}

#define HF_ROPE_TEXT 4096 // most bytes of the rotary positions' JSON

// Returns the beginning of rope_parameters with the fields for image positions, or NULL. The caller frees it.
static char *hf_mrope(const char *text, size_t length) {
    static const char *const keys[] = {"mrope_section", "mrope_interleaved"};
    size_t begin, end, from, to, used = 0;
    if (!json_value_span(text, length, "rope_parameters", &begin, &end)) return NULL;
    char *out = (char *)checked_calloc(1, HF_ROPE_TEXT / 2, "positions of images");
    for (size_t i = 0; i < 2; i++) {
        const char *object = text + begin;
        if (!json_value_span(object, end - begin, keys[i], &from, &to) || to - from > HF_ROPE_TEXT / 8) continue;
        used += (size_t)snprintf(out + used, HF_ROPE_TEXT / 2 - used, "\"%s\": %.*s, ", keys[i], (int)(to - from),
                                 object + from);
    }
    return out;
}

// Replaces the scaling of rotary positions in the form that config.json uses: rope_parameters, or else rope_scaling.
static size_t hf_config_with_rope(char *text, size_t length, const Config *config) {
    static const char *const keys[] = {"max_position_embeddings", "original_max_position_embeddings", "rope_parameters",
                                       "rope_scaling"};
    char rope[HF_ROPE_TEXT];
    size_t begin, end;
    const int parameters = json_value_span(text, length, "rope_parameters", &begin, &end);
    const int theta = json_value_span(text, length, "rope_theta", &begin, &end);
    JsonOut json = json_open_text(rope, sizeof(rope), JSON_LINE);
    if (parameters && !theta) json_null(&json, "rope_scaling"); // it would hide the rope_theta of rope_parameters
    hf_put_rope(&json, config);
    json_size(&json, keys[0], config->max_position_embeddings);
    json_size(&json, keys[1], config->rope.original_max_position_embeddings);
    const size_t written = json_text_end(&json);
    if (!written) die("internal: rotary positions are longer than %d bytes; please report it", HF_ROPE_TEXT);
    char *mrope = parameters ? hf_mrope(text, length) : NULL;
    for (size_t i = 0; i < 4; i++)
        if (json_value_span(rope, written, keys[i], &begin, &end))
            length = hf_config_replace(text, length, keys[i], rope + begin, end - begin, i == 3 && !parameters);
    if (mrope && json_value_span(text, length, "rope_parameters", &begin, &end)) {
        memmove(text + begin + 1 + strlen(mrope), text + begin + 1, length - begin);
        memcpy(text + begin + 1, mrope, strlen(mrope));
        length += strlen(mrope);
    }
    free(mrope);
    return length;
}

// Refuses a folder whose config.json describes another model than `config` of `source`. Ignores keys of initialisation.
static void hf_check_same_model(const Config *config, const char *source, const Config *like, const char *folder) {
    char value[LAYER_TYPES_MAX + 1], other[LAYER_TYPES_MAX + 1];
    if (strcmp(config->family->name, like->family->name) != 0)
        die("%s/config.json: is of another model: its model_type is %s, but %s has %s; give a folder of this model",
            folder, like->family->name, source, config->family->name);
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const int ours = config_uses_key(config, key), theirs = config_uses_key(like, key);
        if (key->kind == KEY_GELU || !strcmp(key->name, "pad_token_id")) continue; // different values may mean the same
        config_key_text(config, key, value);
        config_key_text(like, key, other);
        if (ours && !theirs)
            die("%s/config.json: is of another model: it lacks %s, which %s has; give a folder of this model", folder,
                key->name, source);
        if (theirs && !ours)
            die("%s/config.json: is of another model: its %s is %s, but %s has no such key; give a folder of this "
                "model",
                folder, key->name, other, source);
        if (ours && strcmp(value, other) != 0 && strcmp(key->name, "initializer_range") != 0)
            die("%s/config.json: is of another model: its %s is %s, but in %s it is %s; give a folder of this model",
                folder, key->name, other, source, value);
    }
}

#endif
