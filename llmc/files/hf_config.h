/*
config.json of a Hugging Face model -> Config. Both spellings are read: the classic keys (rope_theta, rope_scaling,
torch_dtype) and those of transformers 5 (rope_parameters, dtype); what is absent has the default of its config class.
The other half of the job is to refuse, by name, whatever would make the model compute something else than we do:
architectures, activations, other ways of scaling rope, soft caps, quantisation, values that no model can have.
*/
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H
#include "llmc/model/config.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

#define HF_CONFIG_MAX ((size_t)16 << 20) // bytes of a config.json or an index

// ---- keys that may only have the values we implement ----------------------------------------------------------------
typedef struct {
    const char *family; // NULL: any
    const char *key;
    const char *allowed; // separated by "|"; an absent key is allowed
} HfRequirement;

static const HfRequirement hf_requirements[] = {
    {"llama", "hidden_act", "silu"},
    {"qwen2", "hidden_act", "silu"},
    {"qwen3", "hidden_act", "silu"},
    {"mistral", "hidden_act", "silu"},
    {"gemma3", "hidden_activation", "gelu_pytorch_tanh"},
    {"gemma3", "attn_logit_softcapping", "null"},
    {"gemma3", "final_logit_softcapping", "null"},
    {"gemma3", "use_bidirectional_attention", "false"},
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

static int hf_is_one_of(const char *value, const char *allowed) {
    size_t length = strlen(value);
    while (1) {
        size_t option = strcspn(allowed, "|");
        if (option == length && !memcmp(allowed, value, length)) return 1;
        if (!allowed[option]) return 0;
        allowed += option + 1;
    }
}

static void hf_check_requirements(const cJSON *root, const Family *family, const char *path) {
    char value[64];
    const cJSON *item;
    for (size_t i = 0; i < sizeof(hf_requirements) / sizeof(hf_requirements[0]); i++) {
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

// ---- which family ---------------------------------------------------------------------------------------------------
__attribute__((noreturn)) static void hf_refuse_family(const char *path, const char *key, const cJSON *item) {
    char value[128], known[512] = "";
    for (size_t i = 0; i < FAMILIES; i++)
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s (%s)", i ? ", " : "",
                 families[i].architecture, families[i].name);
    die("%s: %s %s is not supported; supported are %s", path, key, json_scalar_text(item, value, sizeof(value)), known);
}

static const Family *hf_family(const cJSON *root, const char *path) {
    const cJSON *list = json_get(root, "architectures"), *type = json_get(root, "model_type");
    const cJSON *architecture = cJSON_IsArray(list) ? list->child : list;
    const Family *family = NULL, *by_type = NULL;
    if (!architecture && !type)
        die("%s: has neither architectures nor model_type, so it cannot be told what it is", path);
    if (architecture && architecture->next && cJSON_IsArray(list)) die("%s: architectures names more than one", path);
    for (size_t i = 0; i < FAMILIES; i++) {
        if (architecture && cJSON_IsString(architecture) &&
            !strcmp(architecture->valuestring, families[i].architecture))
            family = &families[i];
        if (type && cJSON_IsString(type) && !strcmp(type->valuestring, families[i].model_type)) by_type = &families[i];
    }
    if (json_get(root, "text_config") && !(family && by_type))
        die("%s: is a model with images or sound beside its text (it has a text_config), which is not supported; save "
            "its text model by itself (for Gemma 3 that is Gemma3ForCausalLM)",
            path);
    if (architecture && !family) hf_refuse_family(path, "architecture", architecture);
    if (type && !by_type) hf_refuse_family(path, "model_type", type);
    if (family && by_type && family != by_type)
        die("%s: architectures says %s, but model_type says %s", path, family->architecture, by_type->model_type);
    return family ? family : by_type;
}

// ---- the numbers ----------------------------------------------------------------------------------------------------
static void hf_set(Config *config, const ConfigKey *key, const char *name, const cJSON *item, const char *path) {
    char value[64];
    json_scalar_text(item, value, sizeof(value));
    if (key->kind == KEY_BOOL ? !cJSON_IsBool(item) : !cJSON_IsNumber(item))
        die("%s: %s is %s%s%s, %s was expected", path, name, cJSON_IsString(item) ? "the text \"" : "", value,
            cJSON_IsString(item) ? "\"" : "", key->kind == KEY_BOOL ? "true or false" : "a number");
    config_set(config, name, value, path, EXIT_RUNTIME);
}

static void hf_read_keys(Config *config, const cJSON *root, const char *path) {
    for (size_t i = 0; i < CONFIG_KEYS; i++) {
        const ConfigKey *key = &config_keys[i];
        const cJSON *common = json_get(root, key->name), *original = key->alias ? json_get(root, key->alias) : NULL;
        if (!strcmp(key->name, "rope_theta") || key->kind == KEY_LAYER_TYPES || key->scaling) continue; // below
        if (!strcmp(key->name, "sliding_window") || !strcmp(key->name, "query_pre_attn_scalar") ||
            !strcmp(key->name, "rope_local_base_freq"))
            if (!family_has_key(config->family, key->name)) continue; // their classes do not look at these
        if (common && original && !cJSON_Compare(common, original, 1))
            die("%s: %s and %s are the same thing, but have different values", path, key->name, key->alias);
        if (common)
            hf_set(config, key, key->name, common, path);
        else if (original)
            hf_set(config, key, key->alias, original, path);
    }
}

// Numbers without which a config.json can only be damaged; saved ones always have them.
static void hf_check_required(const Config *config, const char *path) {
    static const char *required[] = {"vocab_size",          "hidden_size",       "num_hidden_layers",
                                     "num_attention_heads", "intermediate_size", "max_position_embeddings"};
    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        const ConfigKey *key = &config_keys[config_key_find(required[i])];
        if (!strcmp(key->name, "intermediate_size") && config->family->activation == ACTIVATION_GELU) continue;
        if (!strcmp(key->name, "max_position_embeddings") && !config->family->learned_positions) continue;
        if (!config_given(config, key->name))
            die("%s: %s%s%s%s is missing", path, key->name, key->alias ? " (or " : "", key->alias ? key->alias : "",
                key->alias ? ")" : "");
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------
// Checks that do not depend on the type: an object without objects in it, and all of a head rotated.
static void hf_check_rope(const cJSON *rope, const char *key, const char *path) {
    char value[64];
    const cJSON *factor = json_get(rope, "partial_rotary_factor"), *item;
    if (!cJSON_IsObject(rope)) die("%s: %s is not an object", path, key);
    cJSON_ArrayForEach(item, rope) {
        if (cJSON_IsObject(item) && json_printable(item->string))
            die("%s: %s.%.64s: rope settings per kind of layer are not supported for this family", path, key,
                item->string);
    }
    if (factor && !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: %s.partial_rotary_factor is %s; only 1 is supported", path, key,
            json_scalar_text(factor, value, sizeof(value)));
}

static const cJSON *hf_rope_type(const cJSON *rope) {
    const cJSON *type = json_get(rope, "rope_type");
    return type ? type : json_get(rope, "type");
}

// The type and its keys.
static void hf_read_rope_type(Config *config, const cJSON *rope, const char *name, const char *path) {
    char value[64];
    const cJSON *type = hf_rope_type(rope);
    int known = 0;
    if (!type && json_get(rope, "factor")) die("%s: %s has a factor but no type", path, name);
    if (!type) return;
    for (size_t i = 0; i < ROPE_TYPES; i++)
        known |= cJSON_IsString(type) && !strcmp(type->valuestring, rope_type_names[i]);
    if (!known)
        die("%s: %s of type %s is not supported; default, linear, llama3 and yarn are", path, name,
            json_scalar_text(type, value, sizeof(value)));
    config_set_rope_type(config, type->valuestring, path, EXIT_RUNTIME);
    for (size_t i = 0; i < CONFIG_KEYS; i++) {
        const ConfigKey *key = &config_keys[i];
        if (key->kind == KEY_ROPE_TYPE || !(key->scaling >> config->rope_type & 1)) continue;
        if (!family_has_key(config->family, key->name)) continue;
        const cJSON *item = json_get(rope, key->name);
        if (!item) continue;
        hf_set(config, key, key->name, item, path);
        if (!strcmp(key->name, "attention_factor") && !(item->valuedouble > 0))
            die("%s: %s.attention_factor is %g, it must be above 0", path, name, item->valuedouble);
    }
}

// *theta becomes the object's, where it has one.
static void hf_read_rope_theta(const cJSON *rope, const char *name, const cJSON **theta, const char *path) {
    const cJSON *inner = json_get(rope, "rope_theta");
    if (inner && *theta && !cJSON_Compare(inner, *theta, 1))
        die("%s: rope_theta is given twice, with different values (the other is in %s)", path, name);
    if (inner) *theta = inner;
}

// Gemma's rope_parameters: an object for each kind of layer.
static void hf_read_rope_per_layer(Config *config, const cJSON *rope, const cJSON **theta, const char *path) {
    const cJSON *full = json_get(rope, "full_attention"), *sliding = json_get(rope, "sliding_attention");
    char value[64];
    if (!full && !sliding)
        die("%s: rope_parameters has neither full_attention nor sliding_attention, as this family wants", path);
    if (full) {
        hf_check_rope(full, "rope_parameters.full_attention", path);
        hf_read_rope_type(config, full, "rope_parameters.full_attention", path);
        hf_read_rope_theta(full, "rope_parameters", theta, path);
    }
    if (!sliding) return;
    hf_check_rope(sliding, "rope_parameters.sliding_attention", path);
    const cJSON *type = hf_rope_type(sliding), *local = json_get(sliding, "rope_theta");
    if (type && (!cJSON_IsString(type) || strcmp(type->valuestring, "default") != 0))
        die("%s: rope_parameters.sliding_attention of type %s is not supported; layers with a window have plain rotary "
            "positions",
            path, json_scalar_text(type, value, sizeof(value)));
    if (local)
        hf_set(config, &config_keys[config_key_find("rope_local_base_freq")], "rope_local_base_freq", local, path);
}

// rope_scaling (classic) or rope_parameters (transformers 5); where both say something, the former counts, as there.
static void hf_read_rope(Config *config, const cJSON *root, const char *path) {
    const cJSON *theta = json_get(root, "rope_theta"), *scaling = json_get(root, "rope_scaling");
    const cJSON *parameters = json_get(root, "rope_parameters");
    const int per_layer = family_has_key(config->family, "rope_local_base_freq");
    if (scaling) {
        hf_check_rope(scaling, "rope_scaling", path);
        hf_read_rope_theta(scaling, "rope_scaling", &theta, path);
    }
    if (parameters && per_layer) {
        if (!cJSON_IsObject(parameters)) die("%s: rope_parameters is not an object", path);
        hf_read_rope_per_layer(config, parameters, &theta, path);
    } else if (parameters) {
        hf_check_rope(parameters, "rope_parameters", path);
        hf_read_rope_theta(parameters, "rope_parameters", &theta, path);
        if (!scaling || !scaling->child) hf_read_rope_type(config, parameters, "rope_parameters", path);
    }
    if (scaling) hf_read_rope_type(config, scaling, "rope_scaling", path);
    if (theta) hf_set(config, &config_keys[config_key_find("rope_theta")], "rope_theta", theta, path);
    const cJSON *original = json_get(root, "original_max_position_embeddings");
    if (original && !per_layer && config->rope_type != ROPE_DEFAULT && config->rope_type != ROPE_LINEAR)
        hf_set(config, &config_keys[config_key_find("original_max_position_embeddings")],
               "original_max_position_embeddings", original, path);
}

// ---- sliding windows ------------------------------------------------------------------------------------------------
#define QWEN_FIRST_WINDOW_LAYER 28 // the default of max_window_layers: layers from here on have a window
#define GEMMA_WINDOW_PATTERN    6  // of sliding_window_pattern: every so many-th layer has none

// A whole number of config.json, or its default where it is absent.
static size_t hf_size(const cJSON *root, const char *key, size_t otherwise, const char *path) {
    const cJSON *item = json_get(root, key);
    uint64_t value = otherwise;
    if (item && !json_whole_number(item, &value)) die("%s: %s is not a whole number of at least 0", path, key);
    return (size_t)value;
}

// The list of every layer's kind.
static void hf_read_layer_types(Config *config, const cJSON *types, const char *path) {
    const cJSON *type;
    size_t layers = 0;
    char value[64];
    if (!cJSON_IsArray(types)) die("%s: layer_types is not a list", path);
    memset(config->layer_types, 0, sizeof(config->layer_types));
    cJSON_ArrayForEach(type, types) {
        const char *name = cJSON_IsString(type) ? type->valuestring : "";
        if (strcmp(name, "full_attention") != 0 && strcmp(name, "sliding_attention") != 0)
            die("%s: layer_types: layer %zu has %s, full_attention and sliding_attention are supported", path, layers,
                json_scalar_text(type, value, sizeof(value)));
        if (layers < LAYER_TYPES_MAX) config->layer_types[layers] = name[0];
        layers++;
    }
    if (layers != config->num_hidden_layers)
        die("%s: layer_types names %zu layers, num_hidden_layers is %zu", path, layers, config->num_hidden_layers);
    if (layers > LAYER_TYPES_MAX) die("%s: layer_types of more than %d layers are not read", path, LAYER_TYPES_MAX);
}

// Each class reads sliding_window in its own way; then which layers have it. Transformers counts a query's own key, as
// we do.
static void hf_read_windows(Config *config, const cJSON *root, const char *path) {
    const Family *family = config->family;
    const cJSON *types = json_get(root, "layer_types"),
                *window = cJSON_GetObjectItemCaseSensitive(root, "sliding_window");
    const int has = family_has_key(family, "sliding_window"), qwen = has && !config->layer_types[0];
    const int everywhere = has && !strcmp(config->layer_types, "s"); // Mistral's default
    size_t l, L = config->num_hidden_layers;
    if (qwen && cJSON_IsTrue(json_get(root, "use_sliding_window")) && !window) config->sliding_window = 4096;
    if (has && cJSON_IsNull(window)) config->sliding_window = 0;
    if (qwen && !cJSON_IsTrue(json_get(root, "use_sliding_window"))) config->sliding_window = 0;
    if (L > LAYER_TYPES_MAX && config->sliding_window && !everywhere)
        die("%s: windows in so many layers are not supported", path);
    if (types) {
        hf_read_layer_types(config, types, path);
        if (everywhere && config->sliding_window && strchr(config->layer_types, 'f'))
            die("%s: layer_types has full_attention, but %s gives every layer the sliding_window", path,
                family->architecture);
        if (strchr(config->layer_types, 's') && !everywhere && !config->sliding_window)
            die("%s: layer_types has sliding_attention, but there is no sliding_window%s", path,
                qwen ? " (or use_sliding_window is false)" : "");
    } else if (qwen && config->sliding_window) {
        size_t first = hf_size(root, "max_window_layers", QWEN_FIRST_WINDOW_LAYER, path);
        for (l = 0; l < L; l++) config->layer_types[l] = l >= first ? 's' : 'f';
    } else if (has && !everywhere && !qwen) {
        size_t pattern = hf_size(root, "sliding_window_pattern", GEMMA_WINDOW_PATTERN, path);
        if (!pattern) die("%s: sliding_window_pattern is 0", path);
        for (l = 0; l < L && l < LAYER_TYPES_MAX; l++) config->layer_types[l] = (l + 1) % pattern ? 's' : 'f';
        config->layer_types[l] = 0;
        if (!config->sliding_window && strchr(config->layer_types, 's'))
            die("%s: sliding_window is null, but layers have sliding attention", path);
    }
}

// ---- the whole ------------------------------------------------------------------------------------------------------
// Models are trained without dropout here, which is common practice for fine-tuning but not what the file says.
static void hf_remark_dropout(const cJSON *root, char *remark, size_t size) {
    static const char *keys[] = {"attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]) && !*remark; i++) {
        const cJSON *item = json_get(root, keys[i]);
        if (cJSON_IsNumber(item) && item->valuedouble > 0)
            snprintf(remark, size, "config.json asks for dropout (%s = %g); training is without dropout here", keys[i],
                     item->valuedouble);
    }
}

// Reads and checks config.json. `remark` gets a line for whoever trains the model, or stays empty.
static Config hf_config_read(const char *path, char *remark, size_t remark_size) {
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
    hf_read_windows(&config, root, path);
    config_finish(&config, path, EXIT_RUNTIME);
    *remark = 0;
    hf_remark_dropout(root, remark, remark_size);
    cJSON_Delete(root);
    free(text);
    return config;
}

#endif
