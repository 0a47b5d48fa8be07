/*
config.json of a Hugging Face model -> Config. Both spellings are read: the classic keys (rope_theta, rope_scaling,
torch_dtype) and those of transformers 5 (rope_parameters, dtype); what is absent has the default of its config class.
The other half of the job is to refuse, by name, whatever would make the model compute something else than we do:
architectures, activations, rope scaling, sliding windows, quantisation, values that no model can have.
*/
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H
#include "config.h"
#include "file.h"
#include "json.h"

#define HF_CONFIG_MAX ((size_t)16 << 20) // bytes of a config.json or an index

// ---- keys that may only have the values we implement ---------------------------------------------------------------------------
typedef struct {
    const char *family; // NULL: any
    const char *key;
    const char *allowed; // separated by "|"; an absent key is allowed
} HfRequirement;

static const HfRequirement hf_requirements[] = {
    {"llama", "hidden_act", "silu"},
    {"qwen2", "hidden_act", "silu"},
    {"qwen3", "hidden_act", "silu"},
    {"gpt2", "activation_function", "gelu_new|gelu_pytorch_tanh"},
    {"gpt2", "scale_attn_weights", "true"},
    {"gpt2", "scale_attn_by_inverse_layer_idx", "false"},
    {"gpt2", "reorder_and_upcast_attn", "false"},
    {NULL, "add_cross_attention", "false"},
    {NULL, "is_encoder_decoder", "false"},
    {NULL, "partial_rotary_factor", "1"},
    {NULL, "dtype", "float32|float16|bfloat16|float64|auto"},
    {NULL, "torch_dtype", "float32|float16|bfloat16|float64|auto"},
};

static inline int hf_is_one_of(const char *value, const char *allowed) {
    size_t length = strlen(value);
    while (1) {
        size_t option = strcspn(allowed, "|");
        if (option == length && !memcmp(allowed, value, length)) return 1;
        if (!allowed[option]) return 0;
        allowed += option + 1;
    }
}

static inline void hf_check_requirements(const cJSON *root, const Family *family, const char *path) {
    char value[64];
    size_t i;
    const cJSON *item;
    for (i = 0; i < sizeof(hf_requirements) / sizeof(hf_requirements[0]); i++) {
        const HfRequirement *r = &hf_requirements[i];
        if (r->family && strcmp(r->family, family->name) != 0) continue;
        item = json_get(root, r->key);
        if (item && !hf_is_one_of(json_scalar_text(item, value, sizeof(value)), r->allowed))
            die("%s: %s is %s, which is not supported; supported is %s", path, r->key, value, r->allowed);
    }
    item = json_get(root, "quantization_config");
    if (item) {
        item = json_get(item, "quant_method");
        die("%s: quantization_config (%s): quantised models are not supported; give the full-precision model", path,
            item ? json_scalar_text(item, value, sizeof(value)) : "no method named");
    }
}

// ---- which family ----------------------------------------------------------------------------------------------------------------
__attribute__((noreturn)) static inline void hf_refuse_family(const char *path, const char *key, const cJSON *item) {
    char value[128], known[512] = "";
    size_t i;
    for (i = 0; i < FAMILIES; i++)
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s (%s)", i ? ", " : "",
                 families[i].architecture, families[i].name);
    die("%s: %s %s is not supported; supported are %s", path, key, json_scalar_text(item, value, sizeof(value)), known);
}

static inline const Family *hf_family(const cJSON *root, const char *path) {
    const cJSON *list = json_get(root, "architectures"), *type = json_get(root, "model_type");
    const cJSON *architecture = cJSON_IsArray(list) ? list->child : list;
    const Family *family = NULL, *by_type = NULL;
    size_t i;
    if (!architecture && !type)
        die("%s: has neither architectures nor model_type, so it cannot be told what it is", path);
    if (architecture && architecture->next && cJSON_IsArray(list)) die("%s: architectures names more than one", path);
    for (i = 0; i < FAMILIES; i++) {
        if (architecture && cJSON_IsString(architecture) &&
            !strcmp(architecture->valuestring, families[i].architecture))
            family = &families[i];
        if (type && cJSON_IsString(type) && !strcmp(type->valuestring, families[i].name)) by_type = &families[i];
    }
    if (architecture && !family) hf_refuse_family(path, "architecture", architecture);
    if (type && !by_type) hf_refuse_family(path, "model_type", type);
    if (family && by_type && family != by_type)
        die("%s: architectures says %s, but model_type says %s", path, family->architecture, by_type->name);
    return family ? family : by_type;
}

// ---- the numbers -------------------------------------------------------------------------------------------------------------------
static inline void hf_set(Config *config, const ConfigKey *key, const char *name, const cJSON *item, const char *path) {
    char value[64];
    json_scalar_text(item, value, sizeof(value));
    if (key->kind == KEY_BOOL ? !cJSON_IsBool(item) : !cJSON_IsNumber(item))
        die("%s: %s is %s%s%s, %s was expected", path, name, cJSON_IsString(item) ? "the text \"" : "", value,
            cJSON_IsString(item) ? "\"" : "", key->kind == KEY_BOOL ? "true or false" : "a number");
    config_set(config, name, value, path, EXIT_RUNTIME);
}

static inline void hf_read_keys(Config *config, const cJSON *root, const char *path) {
    size_t i;
    for (i = 0; i < CONFIG_KEYS; i++) {
        const ConfigKey *key = &config_keys[i];
        const cJSON *common = json_get(root, key->name), *original = key->alias ? json_get(root, key->alias) : NULL;
        if (!strcmp(key->name, "rope_theta")) continue;
        if (common && original && !cJSON_Compare(common, original, 1))
            die("%s: %s and %s are the same thing, but have different values", path, key->name, key->alias);
        if (common)
            hf_set(config, key, key->name, common, path);
        else if (original)
            hf_set(config, key, key->alias, original, path);
    }
}

// Numbers without which a config.json can only be damaged; saved ones always have them.
static inline void hf_check_required(const Config *config, const char *path) {
    static const char *required[] = {"vocab_size",          "hidden_size",       "num_hidden_layers",
                                     "num_attention_heads", "intermediate_size", "max_position_embeddings"};
    size_t i;
    for (i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        const ConfigKey *key = &config_keys[config_key_find(required[i])];
        if (!strcmp(key->name, "intermediate_size") && config->family->activation == ACTIVATION_GELU) continue;
        if (!strcmp(key->name, "max_position_embeddings") && !config->family->learned_positions) continue;
        if (!config_given(config, key->name))
            die("%s: %s%s%s%s is missing", path, key->name, key->alias ? " (or " : "", key->alias ? key->alias : "",
                key->alias ? ")" : "");
    }
}

// ---- rotary positions ----------------------------------------------------------------------------------------------------------------
// rope_scaling (classic) or rope_parameters (transformers 5): null, {} or a plain {"rope_type": "default"}.
static inline void hf_check_rope(const cJSON *rope, const char *key, const char *path) {
    char value[64];
    const cJSON *type = json_get(rope, "rope_type"), *factor = json_get(rope, "partial_rotary_factor"), *item;
    if (!type) type = json_get(rope, "type");
    if (!cJSON_IsObject(rope)) die("%s: %s is not an object", path, key);
    cJSON_ArrayForEach(item, rope) {
        if (cJSON_IsObject(item) && json_printable(item->string))
            die("%s: %s.%.64s: rope settings per kind of layer are not supported", path, key, item->string);
    }
    if (type && (!cJSON_IsString(type) || strcmp(type->valuestring, "default") != 0))
        die("%s: %s of type %s is not supported; only plain rotary positions (default) are", path, key,
            json_scalar_text(type, value, sizeof(value)));
    if (!type && json_get(rope, "factor")) die("%s: %s has a factor but no type", path, key);
    if (factor && !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: %s.partial_rotary_factor is %s; only 1 is supported", path, key,
            json_scalar_text(factor, value, sizeof(value)));
}

static inline void hf_read_rope(Config *config, const cJSON *root, const char *path) {
    static const char *keys[] = {"rope_scaling", "rope_parameters"};
    const ConfigKey *theta_key = &config_keys[config_key_find("rope_theta")];
    const cJSON *theta = json_get(root, "rope_theta");
    size_t i;
    for (i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const cJSON *rope = json_get(root, keys[i]), *inner;
        if (!rope) continue;
        hf_check_rope(rope, keys[i], path);
        inner = json_get(rope, "rope_theta");
        if (inner && theta && !cJSON_Compare(inner, theta, 1))
            die("%s: rope_theta is given twice, with different values (the other is in %s)", path, keys[i]);
        if (inner) theta = inner;
    }
    if (theta) hf_set(config, theta_key, "rope_theta", theta, path);
}

// ---- sliding windows -----------------------------------------------------------------------------------------------------------------
static inline void hf_refuse_windows(const Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types"), *type;
    const cJSON *window = json_get(root, "sliding_window"), *first = json_get(root, "max_window_layers");
    char value[64];
    double first_layer = 28; // the default of the Qwen classes: layers from here on have a window
    size_t layers = 0;
    if (types && !cJSON_IsArray(types)) die("%s: layer_types is not a list", path);
    cJSON_ArrayForEach(type, types) {
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "full_attention") != 0)
            die("%s: layer_types: layer %zu has %s, only full_attention is supported", path, layers,
                json_scalar_text(type, value, sizeof(value)));
        layers++;
    }
    if (types && layers != config->num_hidden_layers)
        die("%s: layer_types names %zu layers, num_hidden_layers is %zu", path, layers, config->num_hidden_layers);
    if (types || !cJSON_IsTrue(json_get(root, "use_sliding_window"))) return;
    if (first && !cJSON_IsNumber(first)) die("%s: max_window_layers is not a number", path);
    if (first) first_layer = first->valuedouble;
    // a window that is null is none; one that is absent has the class's default
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "sliding_window"))) return;
    if (first_layer < (double)config->num_hidden_layers)
        die("%s: use_sliding_window with a sliding_window of %s from layer %.0f on is not supported", path,
            window ? json_scalar_text(window, value, sizeof(value)) : "4096", first_layer);
}

// ---- the whole -------------------------------------------------------------------------------------------------------------------------
// Models are trained without dropout here, which is common practice for fine-tuning but not what the file says.
static inline void hf_remark_dropout(const cJSON *root, char *remark, size_t size) {
    static const char *keys[] = {"attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"};
    size_t i;
    for (i = 0; i < sizeof(keys) / sizeof(keys[0]) && !*remark; i++) {
        const cJSON *item = json_get(root, keys[i]);
        if (cJSON_IsNumber(item) && item->valuedouble > 0)
            snprintf(remark, size, "config.json asks for dropout (%s = %g); training is without dropout here", keys[i],
                     item->valuedouble);
    }
}

// Reads and checks config.json. `remark` gets a line for whoever trains the model, or stays empty.
static inline Config hf_config_read(const char *path, char *remark, size_t remark_size) {
    size_t length;
    char *text = input_read_text(path, HF_CONFIG_MAX, &length);
    cJSON *root = json_parse_object(text, length, path);
    const cJSON *kv_heads = cJSON_GetObjectItemCaseSensitive(root, "num_key_value_heads");
    const Family *family = hf_family(root, path);
    Config config = config_defaults(family);
    hf_check_requirements(root, family, path);
    hf_read_keys(&config, root, path);
    hf_check_required(&config, path);
    if (!family->learned_positions) hf_read_rope(&config, root, path);
    if (cJSON_IsNull(kv_heads)) // in every class null, other than absence, means one per query head
        config.num_key_value_heads = config.num_attention_heads;
    config_finish(&config, path, EXIT_RUNTIME);
    hf_refuse_windows(&config, root, path);
    *remark = 0;
    hf_remark_dropout(root, remark, remark_size);
    cJSON_Delete(root);
    free(text);
    return config;
}

#endif
