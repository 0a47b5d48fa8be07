/*
config.json for a model that is written as a Hugging Face folder. Where there is one of this model it is kept, byte for
byte but for the type of the weights; otherwise one is written with every key that transformers needs to build the same
model. Like the header of a flat .bin it is made from the text form of the configuration (config.h), so a key that is
new there is written under its own name without anything being said here; what has another place or form in config.json
has a row below. Rotary positions and windows are written twice where that contradicts nothing, in the form of
transformers 5 and the one before it.
*/
#ifndef LLMC_HF_CONFIG_WRITE_H
#define LLMC_HF_CONFIG_WRITE_H
#include "llmc/base/dtype.h"
#include "hf_config.h"
#include "llmc/base/json.h"

#define HF_CONFIG_TEXT 65536 // bytes of a config.json that is written, at most

// ---- the tables -----------------------------------------------------------------------------------------------------
// The position of a key of config.h in config.json, if not at the top under its own name. Keys of a way of scaling
// rotary positions are in the objects of rotary positions without a row here; SPECIAL is what has a function of its own
// below.
typedef enum { HF_TOP, HF_TOP_AND_ROPE, HF_ROPE, HF_SPECIAL } HfConfigPosition;

static const struct {
    const char *family; // NULL: any
    const char *key;    // of config_keys
    const char *name;   // in config.json
    HfConfigPosition place;
} hf_config_rows[] = {
    {NULL, "rope_theta", "rope_theta",
     HF_TOP_AND_ROPE}, // classic readers want it at the top, transformers 5 in the object
    {NULL, "rope_type", NULL, HF_SPECIAL},
    {NULL, "sliding_window", NULL, HF_SPECIAL},
    {NULL, "layer_types", NULL, HF_SPECIAL},
    {"gpt2", "hidden_size", "n_embd", HF_TOP},
    {"gpt2", "intermediate_size", "n_inner", HF_TOP},
    {"gpt2", "num_hidden_layers", "n_layer", HF_TOP},
    {"gpt2", "num_attention_heads", "n_head", HF_TOP},
    {"gpt2", "max_position_embeddings", "n_positions", HF_TOP},
    {"gpt2", "rms_norm_eps", "layer_norm_epsilon", HF_TOP},
};

// Values that are the same in every model of a family, as JSON. Special tokens are not known here: null, not the
// class's default.
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
    {"qwen3", "hidden_act", "\"silu\""},
    {"qwen3", "attention_dropout", "0.0"},
    {"mistral", "hidden_act", "\"silu\""},
    {"mistral", "attention_dropout", "0.0"},
    {"gemma3", "hidden_activation", "\"gelu_pytorch_tanh\""},
    {"gemma3", "attention_dropout", "0.0"},
    {"gemma3", "attn_logit_softcapping", "null"},
    {"gemma3", "final_logit_softcapping", "null"},
    {"gemma3", "use_bidirectional_attention", "false"},
};

static const char *hf_dtype_name(DType type) {
    return type == DTYPE_FP32   ? "float32"
           : type == DTYPE_BF16 ? "bfloat16"
           : type == DTYPE_FP16 ? "float16"
                                : "float64";
}

// The next "key=value" of the text form, cut into its halves; 0 at the end.
static int hf_next_pair(char **cursor, char **key, char **value) {
    if (!*cursor || !**cursor) return 0;
    *key = *cursor;
    char *comma = strchr(*cursor, ',');
    *cursor = comma ? comma + 1 : NULL;
    if (comma) *comma = 0;
    *value = strchr(*key, '=');
    if (!*value) die("internal: '%s' in the text of a configuration has no value", *key);
    *(*value)++ = 0;
    return 1;
}

// ---- writing one ----------------------------------------------------------------------------------------------------
// A value of the text form as JSON: a number that is real in transformers stays one ("10000.0"; query_pre_attn_scalar
// is a whole one there), words become text.
static const char *hf_value_text(const char *key, const char *value, char text[64]) {
    int index = config_key_find(key);
    char *end;
    double number = strtod(value, &end);
    if (*end || end == value) {
        int word = strcmp(value, "true") != 0 && strcmp(value, "false") != 0;
        snprintf(text, 64, word ? "\"%s\"" : "%s", value);
    } else if (index >= 0 && config_keys[index].kind == KEY_DOUBLE) {
        number_text(number, text);
        if (!strpbrk(text, ".e") && strcmp(key, "query_pre_attn_scalar") != 0)
            snprintf(text + strlen(text), 64 - strlen(text), ".0");
    } else {
        snprintf(text, 64, "%s", value);
    }
    return text;
}

// Factors of which 0 says that none is given, and which are not written then.
static int hf_not_given(const char *key, const char *value) {
    static const char *const keys[] = {"attention_factor", "mscale", "mscale_all_dim"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (!strcmp(key, keys[i])) return strtod(value, NULL) == 0;
    return 0;
}

// The keys of the configuration that belong at the top, or (rope) into an object of rotary positions: that of
// transformers 5 has rope_theta, too.
static void hf_put_keys(JsonOut *json, const Config *config, HfConfigPosition rope) {
    char form[4096], *key, *value, text[64];
    const char *family = config->family->name;
    config_to_text(config, form, sizeof(form));
    char *cursor = strchr(form, ',') ? strchr(form, ',') + 1 : NULL;
    while (hf_next_pair(&cursor, &key, &value)) {
        const char *name = key;
        HfConfigPosition place = config_keys[config_key_find(key)].scaling ? HF_ROPE : HF_TOP;
        for (size_t i = 0; i < sizeof(hf_config_rows) / sizeof(hf_config_rows[0]); i++) {
            if (strcmp(hf_config_rows[i].key, key) != 0) continue;
            if (hf_config_rows[i].family && strcmp(hf_config_rows[i].family, family) != 0) continue;
            name = hf_config_rows[i].name, place = hf_config_rows[i].place;
        }
        if (place == HF_SPECIAL || hf_not_given(key, value)) continue;
        if (rope == HF_TOP ? place != HF_ROPE : place == HF_ROPE || place == rope)
            json_word(json, name, hf_value_text(key, value, text));
    }
}

static void hf_put_rope_object(JsonOut *json, const char *name, const Config *config, HfConfigPosition place) {
    json_object(json, name);
    json_text(json, "rope_type", rope_type_names[config->rope_type]);
    hf_put_keys(json, config, place);
    json_object_end(json);
}

// Rotary positions: the classic rope_scaling beside rope_theta, and rope_parameters, which Gemma has for each kind of
// layer.
static void hf_put_rope(JsonOut *json, const Config *config) {
    char text[64], local[64];
    if (config->rope_type != ROPE_DEFAULT) hf_put_rope_object(json, "rope_scaling", config, HF_ROPE);
    if (!family_has_key(config->family, "rope_local_base_freq")) {
        hf_put_rope_object(json, "rope_parameters", config, HF_TOP_AND_ROPE);
        return;
    }
    snprintf(local, sizeof(local), "%.17g", config->rope_local_base_freq);
    json_object(json, "rope_parameters");
    hf_put_rope_object(json, "full_attention", config, HF_TOP_AND_ROPE);
    json_object(json, "sliding_attention");
    json_text(json, "rope_type", "default");
    json_word(json, "rope_theta", hf_value_text("rope_theta", local, text));
    json_object_end(json);
    json_object_end(json);
}

// Windows, as every family's class wants them: Mistral's has one in all layers or null; Qwen's must be turned on, and
// counts the layers before the first one that has it; Gemma's number is there even where no layer has it, and its first
// class knew a period only.
static void hf_put_windows(JsonOut *json, const Config *config) {
    const size_t L = config->num_hidden_layers, period = strlen(config->layer_types);
    const int gemma = !strcmp(config->family->name, "gemma3"), windows = period != 0;
    const int mistral = !strcmp(config->family->name, "mistral");
    size_t first;
    if (!family_has_key(config->family, "sliding_window")) return;
    if (L > LAYER_TYPES_MAX && windows && !mistral)
        die("config.json: layer_types of %zu layers cannot be written, %d are the most", L, LAYER_TYPES_MAX);
    for (first = 0; first < L && !layer_window(config, first); first++) continue;
    if (windows || gemma)
        json_size(json, "sliding_window", windows ? config->sliding_window : 4096);
    else
        json_null(json, "sliding_window");
    if (mistral) return;
    if (!gemma) {
        json_bool(json, "use_sliding_window", windows);
        json_size(json, "max_window_layers", first);
    }
    if (gemma && windows && strspn(config->layer_types, "s") == period - 1)
        json_size(json, "sliding_window_pattern", period);
    if (!windows && L > LAYER_TYPES_MAX) return;
    json_array(json, "layer_types");
    for (size_t l = 0; l < L; l++)
        json_text(json, NULL, layer_window(config, l) ? "sliding_attention" : "full_attention");
    json_array_end(json);
}

// A config.json for this model, whose weights are of `type`. text: [HF_CONFIG_TEXT]; returns the length.
static size_t hf_config_write(const Config *config, DType type, char *text) {
    const char *family = config->family->name;
    JsonOut json = json_open_text(text, HF_CONFIG_TEXT, JSON_INDENTED);
    json_object(&json, NULL);
    json_array(&json, "architectures");
    json_text(&json, NULL, config->family->architecture);
    json_array_end(&json);
    json_text(&json, "model_type", config->family->model_type);
    json_text(&json, "dtype", hf_dtype_name(type));
    json_text(&json, "torch_dtype", hf_dtype_name(type)); // what dtype was called before transformers 5
    hf_put_keys(&json, config, HF_TOP);
    if (!config->family->learned_positions) hf_put_rope(&json, config);
    hf_put_windows(&json, config);
    for (size_t i = 0; i < sizeof(hf_config_constants) / sizeof(hf_config_constants[0]); i++)
        if (!hf_config_constants[i].family || !strcmp(hf_config_constants[i].family, family))
            json_word(&json, hf_config_constants[i].key, hf_config_constants[i].value);
    json_object_end(&json);
    const size_t length = json_text_end(&json);
    if (!length) die("internal: config.json is longer than %d bytes", HF_CONFIG_TEXT);
    return length;
}

// ---- keeping one ----------------------------------------------------------------------------------------------------
// Bytes [begin, end) of the value of a key of the outermost object in a text that has been parsed. 0: there is none.
static int json_value_span(const char *text, size_t length, const char *key, size_t *begin, size_t *end) {
    size_t first, depth = 0;
    for (size_t i = 0; i < length; i++) {
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

// Puts the name of `type` where a config.json names that of the weights; all else stays. out has room for 64 bytes more
// than the text; returns the new length.
static size_t hf_config_with_type(const char *text, size_t length, DType type, char *out) {
    static const char *keys[] = {"dtype", "torch_dtype"};
    size_t begin, end;
    memcpy(out, text, length);
    for (size_t i = 0; i < 2; i++) {
        char name[16];
        out[length] = 0;
        if (!json_value_span(out, length, keys[i], &begin, &end)) continue;
        snprintf(name, sizeof(name), "\"%s\"", hf_dtype_name(type));
        memmove(out + begin + strlen(name), out + end, length - end);
        memcpy(out + begin, name, strlen(name));
        length += strlen(name) - (end - begin);
    }
    out[length] = 0;
    return length;
}

// The folder's config.json must describe the model `config` of `source`. How weights were initialised matters no more.
static void hf_check_same_model(const Config *config, const char *source, const Config *like, const char *folder) {
    char ours[4096], theirs[4096], *key, *value, *other_key, *other;
    config_to_text(config, ours, sizeof(ours));
    config_to_text(like, theirs, sizeof(theirs));
    if (config->family != like->family)
        die("%s/config.json: is of another model: its model_type is %s, that of %s is %s", folder, like->family->name,
            source, config->family->name);
    char *a = strchr(ours, ','), *b = strchr(theirs, ',');
    if (a) a++;
    if (b) b++;
    while (hf_next_pair(&a, &key, &value)) {
        if (!hf_next_pair(&b, &other_key, &other) || strcmp(key, other_key) != 0)
            die("%s/config.json: is of another model: %s of %s is not there", folder, key, source);
        if (strcmp(value, other) != 0 && strcmp(key, "initializer_range") != 0)
            die("%s/config.json: is of another model: its %s is %s, that of %s is %s", folder, key, other, source,
                value);
    }
    if (hf_next_pair(&b, &other_key, &other))
        die("%s/config.json: is of another model: its %s is %s, %s has none", folder, other_key, other, source);
}

#endif
