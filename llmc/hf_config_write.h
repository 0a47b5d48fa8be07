/*
config.json for a model that is written as a Hugging Face folder. Where there is one of this model it is kept, byte for byte but
for the type of the weights; otherwise one is written with every key that transformers needs to build the same model. Like the
header of a flat .bin it is made from the text form of the configuration (config.h), so a key that is new there is written
under its own name without anything being said here; what has another place or form in config.json has a row below.
*/
#ifndef LLMC_HF_CONFIG_WRITE_H
#define LLMC_HF_CONFIG_WRITE_H
#include "dtype.h"
#include "hf_config.h"
#include "json_out.h"

#define HF_CONFIG_TEXT 16384 // bytes of a config.json that is written, at most

// ---- the tables ----------------------------------------------------------------------------------------------------------
// Where a key of config.h stands in config.json, if not at the top under its own name. A new key of rotary positions (factor,
// original_max_position_embeddings, ...) is a row with ROPE; one that files do not have at all is a row with NOWHERE.
typedef enum { HF_TOP, HF_ROPE, HF_TOP_AND_ROPE, HF_NOWHERE } HfConfigPlace;

static const struct {
    const char *family; // NULL: any
    const char *key;    // of config_keys
    const char *name;   // in config.json
    HfConfigPlace place;
} hf_config_rows[] = {
    {NULL, "rope_theta", "rope_theta",
     HF_TOP_AND_ROPE}, // classic readers want it at the top, transformers 5 in the object
    {"gpt2", "hidden_size", "n_embd", HF_TOP},
    {"gpt2", "intermediate_size", "n_inner", HF_TOP},
    {"gpt2", "num_hidden_layers", "n_layer", HF_TOP},
    {"gpt2", "num_attention_heads", "n_head", HF_TOP},
    {"gpt2", "max_position_embeddings", "n_positions", HF_TOP},
    {"gpt2", "rms_norm_eps", "layer_norm_epsilon", HF_TOP},
};

// What is the same in every model of a family, as JSON. Special tokens are not known here: null, not the class's default.
static const struct {
    const char *family, *key, *value;
} hf_config_constants[] = {
    {NULL, "bos_token_id", "null"},
    {NULL, "eos_token_id", "null"},
    {NULL, "pad_token_id", "null"},
    {NULL, "use_cache", "true"},
    {"gpt2", "activation_function", "\"gelu_new\""},
    {"gpt2", "attn_pdrop", "0.0"},
    {"gpt2", "embd_pdrop", "0.0"},
    {"gpt2", "resid_pdrop", "0.0"},
    {"llama", "hidden_act", "\"silu\""},
    {"llama", "attention_dropout", "0.0"},
    {"qwen2", "hidden_act", "\"silu\""},
    {"qwen2", "attention_dropout", "0.0"},
    {"qwen2", "use_sliding_window", "false"},
    {"qwen3", "hidden_act", "\"silu\""},
    {"qwen3", "attention_dropout", "0.0"},
    {"qwen3", "use_sliding_window", "false"},
};

// A new family: its constants above, and here nothing, unless its keys have other names in config.json.

static inline const char *hf_dtype_name(DType type) {
    return type == DTYPE_FP32   ? "float32"
           : type == DTYPE_BF16 ? "bfloat16"
           : type == DTYPE_FP16 ? "float16"
                                : "float64";
}

// ---- a text that grows ---------------------------------------------------------------------------------------------------
typedef struct {
    char *bytes; // [HF_CONFIG_TEXT]
    size_t used;
} HfText;

__attribute__((format(printf, 2, 3))) static inline void hf_put(HfText *text, const char *format, ...) {
    va_list args;
    va_start(args, format);
    text->used += (size_t)vsnprintf(text->bytes + text->used, HF_CONFIG_TEXT - text->used, format, args);
    va_end(args);
    if (text->used >= HF_CONFIG_TEXT) die("internal: config.json is longer than %d bytes", HF_CONFIG_TEXT);
}

// The next "key=value" of the text form, cut into its halves; 0 at the end.
static inline int hf_next_pair(char **cursor, char **key, char **value) {
    char *comma;
    if (!*cursor || !**cursor) return 0;
    *key = *cursor;
    comma = strchr(*cursor, ',');
    *cursor = comma ? comma + 1 : NULL;
    if (comma) *comma = 0;
    *value = strchr(*key, '=');
    if (!*value) die("internal: '%s' in the text of a configuration has no value", *key);
    *(*value)++ = 0;
    return 1;
}

// A value of the text form as JSON: a number that is real in transformers stays one ("10000.0"), words become text.
static inline const char *hf_value_text(const char *key, const char *value, char text[64]) {
    int index = config_key_find(key);
    char *end;
    double number = strtod(value, &end);
    if (*end || end == value) {
        int word = strcmp(value, "true") != 0 && strcmp(value, "false") != 0;
        snprintf(text, 64, word ? "\"%s\"" : "%s", value);
    } else if (index >= 0 && config_keys[index].kind == KEY_DOUBLE) {
        number_text(number, text);
        if (!strpbrk(text, ".e")) snprintf(text + strlen(text), 64 - strlen(text), ".0");
    } else {
        snprintf(text, 64, "%s", value);
    }
    return text;
}

// ---- writing one -----------------------------------------------------------------------------------------------------------
// The keys of the configuration that belong at the top, or (rope) into the object of rotary positions.
static inline void hf_put_keys(HfText *text, const Config *config, int rope, const char *indent) {
    char form[4096], *cursor, *key, *value, json[64];
    const char *family = config->family->name;
    size_t i;
    config_to_text(config, form, sizeof(form));
    cursor = strchr(form, ',') ? strchr(form, ',') + 1 : NULL;
    while (hf_next_pair(&cursor, &key, &value)) {
        const char *name = key;
        HfConfigPlace place = HF_TOP;
        for (i = 0; i < sizeof(hf_config_rows) / sizeof(hf_config_rows[0]); i++) {
            if (strcmp(hf_config_rows[i].key, key) != 0) continue;
            if (hf_config_rows[i].family && strcmp(hf_config_rows[i].family, family) != 0) continue;
            name = hf_config_rows[i].name, place = hf_config_rows[i].place;
        }
        if (place == HF_TOP_AND_ROPE || place == (rope ? HF_ROPE : HF_TOP))
            hf_put(text, ",\n%s\"%s\": %s", indent, name, hf_value_text(key, value, json));
    }
}

// A config.json for this model, whose weights are of `type`. text: [HF_CONFIG_TEXT]; returns the length.
static inline size_t hf_config_write(const Config *config, DType type, char *bytes) {
    const char *family = config->family->name;
    HfText text = {bytes, 0};
    size_t i;
    hf_put(&text, "{\n  \"architectures\": [\n    \"%s\"\n  ],\n", config->family->architecture);
    hf_put(&text, "  \"model_type\": \"%s\",\n", family);
    hf_put(&text, "  \"dtype\": \"%s\",\n", hf_dtype_name(type));
    hf_put(&text, "  \"torch_dtype\": \"%s\"", hf_dtype_name(type)); // what dtype was called before transformers 5
    hf_put_keys(&text, config, 0, "  ");
    if (!config->family
             ->learned_positions) { // once config.h has a rope_type, a row with HF_ROPE takes the word's place
        hf_put(&text, ",\n  \"rope_parameters\": {\n    \"rope_type\": \"default\"");
        hf_put_keys(&text, config, 1, "    ");
        hf_put(&text, "\n  }");
    }
    for (i = 0; i < sizeof(hf_config_constants) / sizeof(hf_config_constants[0]); i++) {
        if (!hf_config_constants[i].family || !strcmp(hf_config_constants[i].family, family))
            hf_put(&text, ",\n  \"%s\": %s", hf_config_constants[i].key, hf_config_constants[i].value);
    }
    hf_put(&text, "\n}\n");
    return text.used;
}

// ---- keeping one -----------------------------------------------------------------------------------------------------------
// Where the value of a key of the outermost object stands in a text that has been parsed: bytes [begin, end). 0: nowhere.
static inline int json_value_place(const char *text, size_t length, const char *key, size_t *begin, size_t *end) {
    size_t i, first, depth = 0;
    for (i = 0; i < length; i++) {
        depth += text[i] == '{' || text[i] == '[';
        depth -= text[i] == '}' || text[i] == ']';
        if (text[i] != '"') continue;
        for (first = ++i; text[i] != '"'; i++) i += text[i] == '\\';
        if (depth != 1 || i - first != strlen(key) || memcmp(text + first, key, i - first) != 0) continue;
        *begin = i + 1 + strspn(text + i + 1, " \t\r\n");
        if (text[*begin] != ':') continue; // a value, not a key
        *begin += 1 + strspn(text + *begin + 1, " \t\r\n");
        *end =
            *begin + (text[*begin] == '"' ? strcspn(text + *begin + 1, "\"") + 2 : strcspn(text + *begin, ",} \t\r\n"));
        return 1;
    }
    return 0;
}

// Puts the name of `type` where a config.json names that of the weights; all else stays. out has room for 64 bytes more than
// the text; returns the new length.
static inline size_t hf_config_with_type(const char *text, size_t length, DType type, char *out) {
    static const char *keys[] = {"dtype", "torch_dtype"};
    size_t i, begin, end;
    memcpy(out, text, length);
    for (i = 0; i < 2; i++) {
        char name[16];
        out[length] = 0;
        if (!json_value_place(out, length, keys[i], &begin, &end)) continue;
        snprintf(name, sizeof(name), "\"%s\"", hf_dtype_name(type));
        memmove(out + begin + strlen(name), out + end, length - end);
        memcpy(out + begin, name, strlen(name));
        length += strlen(name) - (end - begin);
    }
    out[length] = 0;
    return length;
}

// The folder's config.json must describe the model `config` of `source`. How weights were initialised matters no more.
static inline void hf_check_same_model(const Config *config, const char *source, const Config *like,
                                       const char *folder) {
    char ours[4096], theirs[4096], *a, *b, *key, *value, *other_key, *other;
    config_to_text(config, ours, sizeof(ours));
    config_to_text(like, theirs, sizeof(theirs));
    if (config->family != like->family)
        die("%s/config.json: is of another model: its model_type is %s, that of %s is %s", folder, like->family->name,
            source, config->family->name);
    a = strchr(ours, ','), b = strchr(theirs, ',');
    if (a) a++;
    if (b) b++;
    while (hf_next_pair(&a, &key, &value)) {
        if (!hf_next_pair(&b, &other_key, &other) || strcmp(key, other_key) != 0)
            die("%s/config.json: is of another model: %s of %s is not there", folder, key, source);
        if (strcmp(value, other) != 0 && strcmp(key, "initializer_range") != 0)
            die("%s/config.json: is of another model: its %s is %s, that of %s is %s", folder, key, other, source,
                value);
    }
}

#endif
