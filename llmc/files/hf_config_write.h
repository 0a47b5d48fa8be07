/*
Writes config.json of a Hugging Face model: every key that transformers needs to build the same model, rotary positions
and windows in both forms if these agree. hf_config_keep.h keeps an existing config.json of this model.
*/
#ifndef LLMC_HF_CONFIG_WRITE_H
#define LLMC_HF_CONFIG_WRITE_H
#include "hf_config.h"

#define HF_CONFIG_TEXT 65536 // most bytes of a written config.json

// Writes a number that transformers reads as a float: "10000.0".
static void hf_put_real(JsonOut *json, const char *name, double value) {
    char text[40];
    number_text(value, text);
    json_word(json, name, strcat(text, strpbrk(text, ".e") ? "" : ".0"));
}

typedef enum { HF_TOP, HF_ROPE_SCALING, HF_ROPE_PARAMETERS } HfLevel;

// Tells whether a key is written as null: a value of 0 that means "none", and keys of experts in a model without
// experts.
static int hf_is_null(const Config *config, const ConfigKey *key) {
    if (!strcmp(key->name, "rope_theta")) return config_has_no_rope(config) && config->family->linear_pre_norms;
    if (!strcmp(key->name, "final_logit_softcapping")) return config->final_logit_softcapping == 0;
    if (!strcmp(key->name, "num_global_key_value_heads")) return !config->num_global_key_value_heads;
    if (!strcmp(key->name, "q_lora_rank")) return !config->q_lora_rank;
    return config->family->experts_beside && !config->num_experts &&
           text_is_one_of(key->name, "num_experts|num_experts_per_tok|moe_intermediate_size");
}

// Writes the keys of the top level or of an object of rotary positions. Keys of scaling go to the object; rope_theta
// and partial_rotary_factor go to the top level and to rope_parameters, in Mamba-2's families to every object. Separate
// functions write windows and layer types. GPT-2's keys have the names of GPT-2's class.
static void hf_put_keys(JsonOut *json, const Config *config, HfLevel level) {
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const void *field = (const char *)config + key->offset;
        const size_t renamed = hf_renamed_at(config->family, key->name);
        const char *name = renamed < HF_RENAMED                 ? hf_renamed[renamed].name
                           : hf_uses_alias(config->family, key) ? key->alias
                                                                : key->name;
        const int rotary = text_is_one_of(key->name, "rope_theta|partial_rotary_factor");
        if (level == HF_TOP && !strcmp(key->name, "pad_token_id") && config->pad_token_id == NO_ROW)
            json_null(json, name);
        if (!config_uses_key(config, key) || !hf_has_key(config->family, key->name) ||
            text_is_one_of(key->name, "rope_type|layer_types|sliding_window|activation_function"))
            continue;
        const int apart = level == HF_ROPE_SCALING && !family_expands(config->family); // Bamba: not the class's 0.5
        if (rotary ? apart : (level != HF_TOP) != (key->scaling != 0)) continue;
        if (rotary && level == HF_TOP && config->family->proportional) continue; // written only in rope_parameters
        if (!strcmp(key->name, "num_experts")) name = hf_names_of_experts(config->family)[0];
        if (hf_is_null(config, key))
            json_null(json, name);
        else if (key->kind == KEY_BOOL)
            json_bool(json, name, *(const int *)field);
        else if (key->kind == KEY_LAYERS && config->family->router == ROUTER_SIGMOID) {
            json_array(json, "mlp_layer_types");
            for (size_t l = 0; l < config->num_hidden_layers; l++)
                json_text(json, NULL, layer_has_experts(config, l) ? "sparse" : "dense");
            json_array_end(json);
        } else if (key->kind == KEY_LAYERS) {
            json_array(json, name);
            for (size_t l = 0; l < LAYER_TYPES_MAX; l++)
                if (config->mlp_only_layers[l / 8] >> l % 8 & 1) json_size(json, NULL, l);
            json_array_end(json);
        } else if (family_counts_shared(config->family) && !strcmp(name, "shared_expert_intermediate_size"))
            json_size(json, "n_shared_experts", *(const size_t *)field / config->moe_intermediate_size);
        else if (key->kind == KEY_SIZE)
            json_size(json, name, *(const size_t *)field);
        else if (!strcmp(key->name, "query_pre_attn_scalar"))
            json_number(json, name, *(const double *)field);   // a whole number in transformers
        else if (!key->scaling || *(const double *)field != 0) // 0: the key is not given
            hf_put_real(json, name, *(const double *)field);
    }
}

static void hf_put_rope_object(JsonOut *json, const char *name, const Config *config, HfLevel level) {
    json_object(json, name);
    json_text(json, "rope_type", config->family->proportional ? "proportional" : rope_type_names[config->rope.type]);
    hf_put_keys(json, config, level);
    if (config->kv_lora_rank && hf_rotary_head(config) != config->qk_rope_head_dim)
        hf_put_real(json, "partial_rotary_factor", (double)config->qk_rope_head_dim / (double)hf_rotary_head(config));
    if (config->rope.type == ROPE_DYNAMIC) json_word(json, "factor", "1.0"); // required, but without effect
    if (family_has_key(config->family, "llama_4_scaling_beta") && rotation_growth(config) == 0) {
        json_word(json, "llama_4_scaling_beta", "0.0"); // required by the family's config class
        if (config->rope.type == ROPE_DEFAULT || config->rope.type == ROPE_LINEAR)
            json_size(json, "original_max_position_embeddings", config->max_position_embeddings);
    }
    json_object_end(json);
}

// Writes the classic rope_scaling and rope_theta, and rope_parameters (for Gemma one per kind of layer).
static void hf_put_rope(JsonOut *json, const Config *config) {
    if (config->rope.type != ROPE_DEFAULT) hf_put_rope_object(json, "rope_scaling", config, HF_ROPE_SCALING);
    if (!family_has_key(config->family, "rope_local_base_freq")) {
        hf_put_rope_object(json, "rope_parameters", config, HF_ROPE_PARAMETERS);
        return;
    }
    json_object(json, "rope_parameters");
    hf_put_rope_object(json, FULL, config, HF_ROPE_PARAMETERS);
    json_object(json, SLIDING);
    json_text(json, "rope_type", "default");
    hf_put_real(json, "rope_theta", config->rope_local_base_freq);
    json_object_end(json);
    json_object_end(json);
}

// Writes layer_types, or what the family's class has in their place.
static void hf_put_layer_types(JsonOut *json, const Config *config) {
    const int mamba = family_expands(config->family); // with names that older versions know
    const char *names[LAYER_KINDS] = {mamba ? "attention" : FULL, SLIDING,
                                      family_has_convolution(config->family) ? CONVOLUTION
                                      : mamba                                ? "mamba"
                                                                             : LINEAR,
                                      "mlp"};
    if (mamba && !strcmp(config->family->layer_types, "l")) {
        json_array(json, "attn_layer_indices");
        for (size_t l = 0; l < config->num_hidden_layers; l++)
            if (!layer_is_linear(config, l)) json_size(json, NULL, l);
        json_array_end(json);
        return;
    }
    json_array(json, config->family->bare_attention ? "layers_block_type" : "layer_types");
    for (size_t l = 0; l < config->num_hidden_layers; l++) {
        const int experts = layer_kind(config, l) == LAYER_NONE && layer_has_experts(config, l);
        json_text(json, NULL, experts ? "moe" : names[layer_kind(config, l)]);
    }
    json_array_end(json);
}

// Writes keys of Mamba-2: its width, the bounds of time steps if there are any, whether attention has rotary positions.
static void hf_put_mamba(JsonOut *json, const Config *c) {
    json_size(json, "mamba_expand", c->linear_num_value_heads * c->linear_value_head_dim / c->hidden_size);
    if (!strcmp(c->family->layer_types, "ln"))
        json_text(json, "position_embedding_type", config_has_no_rope(c) ? "nope" : "rope");
    if (c->time_step_min == 0 && c->time_step_max == 0) return; // the class's default
    json_array(json, "time_step_limit");
    hf_put_real(json, NULL, c->time_step_min);
    if (c->time_step_max > 0) {
        hf_put_real(json, NULL, c->time_step_max);
    } else {
        json_object(json, NULL);
        json_text(json, "__float__", "Infinity");
        json_object_end(json);
    }
    json_array_end(json);
}

// Writes windows by the rules of each class. Mistral: one window for all layers, or null. Qwen: use_sliding_window, and
// the number of layers before the first layer with a window. Gemma: always a number; Gemma's first class knew only a
// period.
static void hf_put_windows(JsonOut *json, const Config *config) {
    const size_t L = config->num_hidden_layers, period = strlen(config->layer_types);
    const int gemma = config->family->norm_offset && !config->family->outer_norms,
              everywhere = config->family->same_windows;
    // Gemma and OLMo list layer types.
    const int listed = family_names_key(config->family, "sliding_window") && !everywhere;
    size_t first;
    if (L > LAYER_TYPES_MAX && period && !everywhere)
        die("config.json: layer_types of %zu layers cannot be written; at most %d layers are supported", L,
            LAYER_TYPES_MAX);
    const int letter = *config->family->layer_types; // 's': layer_types follows the window
    if (letter == 'l' || letter == 'L' || letter == 'c') hf_put_layer_types(json, config);
    if (*config->family->layer_types == 'n') {
        json_array(json, "no_rope_layers"); // 1: the layer has rotary positions
        for (size_t l = 0; l < L; l++) json_size(json, NULL, (size_t)layer_rotates(config, l));
        json_array_end(json);
    }
    if (!strcmp(config->family->layer_types, "sn")) {
        json_array(json, "layer_rope_theta");
        for (size_t l = 0; l < L; l++) hf_put_real(json, NULL, layer_rotates(config, l) ? config->rope_theta : 0);
        json_array_end(json);
    }
    if (!family_has_key(config->family, "sliding_window")) return;
    for (first = 0; first < L && !layer_window(config, first); first++) continue;
    const int null = config->family->outer_norms || family_has_convolution(config->family); // no window: null
    if (null ? config->sliding_window : period || listed)
        json_size(json, "sliding_window", period ? config->sliding_window : HF_WINDOW);
    else
        json_null(json, "sliding_window");
    if (everywhere) return;
    if (!listed) {
        json_bool(json, "use_sliding_window", period != 0);
        json_size(json, "max_window_layers", first);
    }
    if (gemma && period && strspn(config->layer_types, "s") == period - 1)
        json_size(json, "sliding_window_pattern", period);
    if (period || L <= LAYER_TYPES_MAX) hf_put_layer_types(json, config);
}

// Writes a config.json for this model with weights of `type`. text: [HF_CONFIG_TEXT]. Returns the length.
static size_t hf_config_write(const Config *config, DType type, char *text) {
    JsonOut json = json_open_text(text, HF_CONFIG_TEXT, JSON_INDENTED);
    json_array(&json, "architectures");
    json_text(&json, NULL, config->family->architecture);
    json_array_end(&json);
    json_text(&json, "model_type", config->family->model_type);
    json_text(&json, "dtype", hf_dtype_name(type));
    json_text(&json, "torch_dtype", hf_dtype_name(type));
    hf_put_keys(&json, config, HF_TOP);
    if (!config->family->learned_positions && !config->family->bare_attention) hf_put_rope(&json, config);
    hf_put_windows(&json, config);
    if (family_expands(config->family)) hf_put_mamba(&json, config);
    if (config->family->experts_beside) json_bool(&json, "enable_moe_block", config->num_experts != 0);
    for (const HfConstant *c = hf_constants; c < hf_constants + HF_CONSTANTS; c++)
        if (!strcmp(c->key, "activation_function") && hf_applies(c, config->family))
            json_text(&json, c->key, gelu_names[config->activation_function]);
        else if (c->written && hf_applies(c, config->family))
            json_word(&json, c->key, c->written);
    const size_t length = json_text_end(&json);
    if (!length) die("internal: config.json is longer than %d bytes; please report it", HF_CONFIG_TEXT);
    return length;
}

#endif
