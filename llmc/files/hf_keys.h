/*
Reads the numbers and the rotary positions of config.json into Config: keys by their common names (config_keys), by the
names of a family's class (hf_renamed), and those that several keys give. hf_layers.h reads the kinds of layers.
*/
#ifndef LLMC_HF_KEYS_H
#define LLMC_HF_KEYS_H
#include "hf_constants.h"

#define HF_THETA 10000 // transformers' default of rope_theta, unless the class has another

// Sets a key from the file's value, under its common or original name.
static void hf_set(Config *config, const char *name, const cJSON *item, const char *path) {
    const int is_bool = config_keys[config_key_find(name)].kind == KEY_BOOL;
    const int is_text = config_keys[config_key_find(name)].kind == KEY_GELU; // hf_constants has checked this text
    const char *quote = cJSON_IsString(item) ? "\"" : "";
    char value[64];
    json_scalar_text(item, value, sizeof(value));
    if (is_bool ? !cJSON_IsBool(item) : !is_text && !cJSON_IsNumber(item))
        die("%s: %s is %s%s%s%s, but must be %s", path, name, *quote ? "the text " : "", quote, value, quote,
            is_bool ? "true or false" : "a number");
    config_set(config, name, value, path, EXIT_RUNTIME);
}

// Names of the number of experts in config.json; the first name is written
static const char *const hf_expert_names[][2] = {{"num_experts", "num_local_experts"},
                                                 {"num_local_experts", "num_experts"},
                                                 {"n_routed_experts", "num_local_experts"},
                                                 {"num_local_experts", "num_local_experts"}};

static const char *const *hf_names_of_experts(const Family *family) {
    if (family->shared_dense) return hf_expert_names[3];
    return hf_expert_names[family_has_shared(family) ? 2 : family->names.router || family->expert_columns];
}

// Reads mlp_only_layers, a list of layers without experts.
static void hf_read_layers(Config *config, const cJSON *list, const char *path) {
    const cJSON *item;
    uint64_t l;
    if (!cJSON_IsArray(list)) die("%s: mlp_only_layers must be a list of layer numbers", path);
    cJSON_ArrayForEach(item, list) {
        if (!json_whole_number(item, &l) || l >= LAYER_TYPES_MAX)
            die("%s: mlp_only_layers has an entry that is not a layer's number below %d", path, LAYER_TYPES_MAX);
        config->mlp_only_layers[l / 8] |= (uint8_t)(1u << l % 8);
    }
}

// Reads mlp_layer_types, a list of "dense" or "sparse" for every layer.
static void hf_read_mlp_types(Config *config, const cJSON *list, const char *path) {
    const cJSON *item;
    size_t l = 0;
    if (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) != config->num_hidden_layers ||
        config->num_hidden_layers > LAYER_TYPES_MAX)
        die("%s: mlp_layer_types must be a list of num_hidden_layers, %zu, entries, at most %d", path,
            config->num_hidden_layers, LAYER_TYPES_MAX);
    memset(config->mlp_only_layers, 0, sizeof(config->mlp_only_layers));
    cJSON_ArrayForEach(item, list) {
        if (!json_is(item, "dense") && !json_is(item, "sparse"))
            die("%s: mlp_layer_types: the entry of layer %zu must be dense or sparse", path, l);
        if (json_is(item, "dense")) config->mlp_only_layers[l / 8] |= (uint8_t)(1u << l % 8);
        l++;
    }
}

// Returns the elements of a head over which a class of latent attention spreads its rotary positions, times
// partial_rotary_factor: those of a whole head in a class whose queries grow with their position.
static size_t hf_rotary_head(const Config *c) {
    return c->qk_rope_head_dim + (family_has_key(c->family, "llama_4_scaling_beta") ? c->qk_nope_head_dim : 0);
}

// Reads queries of full rank, whose q_lora_rank is null. Refuses a head_dim by which transformers would rotate other
// elements.
static void hf_read_latents(Config *config, const cJSON *root, const char *path) {
    const cJSON *head = json_get(root, "head_dim"), *rank = cJSON_GetObjectItemCaseSensitive(root, "q_lora_rank");
    if (!config->kv_lora_rank) return;
    if (cJSON_IsNumber(rank) && !config->q_lora_rank) die("%s: q_lora_rank is 0; queries of full rank are null", path);
    if (cJSON_IsNull(rank)) config->q_lora_rank = 0;
    if (head && !(cJSON_IsNumber(head) && head->valuedouble == (double)hf_rotary_head(config)))
        die("%s: head_dim must be %zu here, which transformers rotates by; leave it out", path, hf_rotary_head(config));
}

// Reads the number of experts and n_shared_experts. Shared experts become one shared expert, with the sum of their
// widths.
static void hf_read_experts(Config *config, const cJSON *root, const char *path) {
    const char *const *names = hf_names_of_experts(config->family);
    const cJSON *one = json_get(root, names[0]), *other = json_get(root, names[1]);
    const cJSON *shared = json_get(root, "n_shared_experts"), *only = json_get(root, "mlp_only_layers");
    uint64_t count = 1;
    if (one && other && !cJSON_Compare(one, other, 1))
        die("%s: %s and %s are the same key, but have different values; remove one of them", path, names[0], names[1]);
    if (one || other) hf_set(config, "num_experts", one ? one : other, path);
    if (config->family->experts_beside) {
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(root, "hidden_size_per_layer_input");
        if (cJSON_IsNull(own)) config->hidden_size_per_layer_input = 0;
        if (config_given(config, "final_logit_softcapping") && config->final_logit_softcapping == 0)
            die("%s: final_logit_softcapping is 0, which makes every logit 0; use null for no cap", path);
        const int on = cJSON_IsTrue(json_get(root, "enable_moe_block"));
        if (on &&
            (!config->num_experts || !json_get(root, "top_k_experts") || !json_get(root, "moe_intermediate_size")))
            die("%s: enable_moe_block is true, so num_experts, top_k_experts and moe_intermediate_size must be given",
                path);
        if (!on) config->num_experts = 0, config->num_experts_per_tok = config->moe_intermediate_size = 1;
    }
    if (only && family_has_key(config->family, "mlp_only_layers") && config->family->router == ROUTER_SOFTMAX)

        hf_read_layers(config, only, path);
    if (!family_counts_shared(config->family)) return;
    const cJSON *types = json_get(root, "mlp_layer_types");
    if (types && family_has_key(config->family, "mlp_only_layers")) hf_read_mlp_types(config, types, path);
    if (!config_given(config, "head_dim")) config->head_dim = config->hidden_size / config->num_attention_heads;
    if (shared && (!json_whole_number(shared, &count) || count > 1024))
        die("%s: n_shared_experts must be a whole number of at most 1024", path);
    config->shared_expert_intermediate_size = (size_t)count * config->moe_intermediate_size;
    config->given[config_key_find("shared_expert_intermediate_size")] = 1;
}

// Tells whether the top level of config.json may have the key. Only Gemma's first class has rope_local_base_freq there;
// other families have it in rope_parameters.
static int hf_has_key(const Family *family, const char *name) {
    if (family_expands(family) && text_is_one_of(name, "time_step_min|time_step_max")) return 0; // in time_step_limit
    return family_has_key(family, name) && (strcmp(name, "rope_local_base_freq") != 0 || family->norm_offset);
}

// Tells whether a family's config.json has a key under its alias: every key of GPT-2, one key of models with a dense
// MLP next to experts, use_bias.
static int hf_uses_alias(const Family *family, const ConfigKey *key) {
    return key->alias &&
           (family->learned_positions || (family->experts_beside && !strcmp(key->name, "num_experts_per_tok")) ||
            (family->mlp_biases_too && !strcmp(key->name, "attention_bias")));
}

// Reads a key that the family's class calls by another name. Returns 0 if it has no other name.
static int hf_read_renamed(Config *config, const ConfigKey *key, const cJSON *root, const char *path) {
    const size_t i = hf_renamed_at(config->family, key->name);
    if (i == HF_RENAMED) return 0;
    const cJSON *own = json_get(root, hf_renamed[i].name);
    const cJSON *older = hf_renamed[i].older ? json_get(root, hf_renamed[i].older) : NULL, *item = older ? older : own;
    char where[PATH_MAX + 64];
    const int derived = family_expands(config->family) && !strcmp(key->name, "linear_value_head_dim");
    if (!item || (derived && json_is(item, "auto"))) return 1;
    if (!cJSON_IsNumber(item)) die("%s: %s must be a number", path, item->string);
    snprintf(where, sizeof(where), "%s: %s", path, item->string);
    hf_set(config, key->name, item, where); // the class prefers the older name, too
    return 1;
}

static void hf_read_keys(Config *config, const cJSON *root, const char *path) {
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const int aliased = hf_uses_alias(config->family, key), gpt2 = config->family->learned_positions;
        const cJSON *common = json_get(root, key->name), *original = aliased ? json_get(root, key->alias) : NULL;
        if (aliased && !gpt2) common = NULL; // the family's class ignores the common name
        if (gpt2 && text_is_one_of(key->name, "intermediate_size|rms_norm_eps"))
            common = NULL; // GPT-2 ignores these names
        if (text_is_one_of(key->name, "rope_theta|partial_rotary_factor|layer_types|pad_token_id|num_experts|"
                                      "mlp_only_layers") ||
            key->scaling)
            continue; // separate functions below read these keys
        if (family_counts_shared(config->family) && !strcmp(key->name, "shared_expert_intermediate_size")) continue;
        if (hf_read_renamed(config, key, root, path)) continue;
        if (!hf_has_key(config->family, key->name)) continue; // the family's class ignores it
        if (key->kind == KEY_GELU && common && word_index("gelu_new|gelu_pytorch_tanh", common->valuestring) < 0)
            continue; // hf_constants checks other names of the same activation
        if (common && original && !cJSON_Compare(common, original, 1))
            die("%s: %s and %s are the same key, but have different values; remove one of them", path, key->name,
                key->alias);
        if (common || original) hf_set(config, common ? key->name : key->alias, common ? common : original, path);
    }
}

// Reads pad_token_id: inputs of this token give the embedding no gradient. A negative id counts from the end, as in
// torch.
static void hf_read_pad(Config *config, const cJSON *root, const char *path, char *remark, size_t size) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "pad_token_id"), *eos = json_get(root, "eos_token_id");
    double id = item ? item->valuedouble : NAN;
    for (size_t i = 0; !item && i < sizeof(hf_pad_tokens) / sizeof(hf_pad_tokens[0]); i++)
        if (!strcmp(config->family->name, hf_pad_tokens[i].family)) id = hf_pad_tokens[i].id;
    config->pad_token_id = NO_ROW;
    if (!family_has_key(config->family, "pad_token_id") || cJSON_IsNull(item) || (!item && isnan(id))) return;
    if (item && !cJSON_IsNumber(item)) die("%s: pad_token_id must be a number or null", path);
    const double row = id < 0 ? id + (double)config->vocab_size : id;
    if (!(row >= 0 && row < (double)config->vocab_size && row == floor(row)))
        die("%s: pad_token_id is %g%s, outside of vocab_size %zu; give an id below it, or null", path, id,
            item ? "" : " (its class's default)", config->vocab_size);
    config->pad_token_id = (size_t)row;
    const cJSON *end = cJSON_IsArray(eos) ? eos->child : eos;
    while (end && !(cJSON_IsNumber(end) && end->valuedouble == id)) end = end == eos ? NULL : end->next;
    if (end)
        snprintf(remark + strlen(remark), size - strlen(remark),
                 "%spad_token_id is eos_token_id (%.0f): its inputs give the embedding no gradient, as in transformers",
                 *remark ? "; " : "", id);
}

// Refuses a config.json that lacks numbers which every saved config.json has.
static void hf_check_required(const Config *config, const char *path) {
    const char *also = config->family->learned_positions ? "max_position_embeddings" : "intermediate_size";
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        if ((strcmp(key->name, also) != 0 || !family_has_key(config->family, also)) &&
            (strcmp(key->name, "head_dim") != 0 || config->family->qk_norm != QK_NORM_ROTATED) && // Hunyuan's class
            !text_is_one_of(key->name, "vocab_size|hidden_size|num_hidden_layers|num_attention_heads"))
            continue;
        if (config->family->bare_attention && !strcmp(key->name, "num_hidden_layers")) continue; // hf_read_branches
        const char *alias = config->family->learned_positions ? key->alias : NULL;
        const size_t renamed = hf_renamed_at(config->family, key->name);
        if (!config_given(config, key->name))
            die("%s: %s%s%s%s is missing; add it, or download the file again", path,
                renamed < HF_RENAMED ? hf_renamed[renamed].name : key->name, alias ? " (or " : "", alias ? alias : "",
                alias ? ")" : "");
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------
#define SLIDING     "sliding_attention" // kinds of layers
#define FULL        "full_attention"
#define LINEAR      "linear_attention"
#define CONVOLUTION "conv"

// Values that the top level or an object of rotary positions may give: given in only one place, or equal in both
typedef struct {
    const cJSON *theta, *rotated; // rope_theta, partial_rotary_factor
} HfRope;

// Checks an object of rotary positions of any type: it contains no objects, and rotates whole heads if the family
// requires this. Returns the type, or NULL.
static const cJSON *hf_check_rope(const Config *config, const cJSON *rope, const char *name, const char *path) {
    char value[64];
    const cJSON *factor = json_get(rope, "partial_rotary_factor"), *item;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(rope, "rope_type");
    if (!type) type = cJSON_GetObjectItemCaseSensitive(rope, "type");
    if (!cJSON_IsObject(rope)) die("%s: %s must be an object", path, name);
    cJSON_ArrayForEach(item, rope) {
        if (cJSON_IsNull(item) && (item == type || text_is_one_of(item->string, "rope_theta|partial_rotary_factor")))
            die("%s: %s.%s is null; give its value, or leave it out for the default", path, name, item->string);
        if (cJSON_IsObject(item) && text_is_one_of(item->string, SLIDING "|" FULL "|" LINEAR))
            die("%s: %s.%s: this family has one rope setting for all layers; give it without kinds of layers", path,
                name, item->string);
    }
    if (config->kv_lora_rank) { // must leave qk_rope_head_dim elements; a class sets its own only in rope_parameters
        const size_t head = hf_rotary_head(config);
        const int own = head != config->qk_rope_head_dim && !strcmp(name, "rope_parameters");
        const double part = cJSON_IsNumber(factor) ? factor->valuedouble : 1;
        if ((factor && !cJSON_IsNumber(factor)) ||
            ((factor || !own) && !(part > 0 && part <= 1 && (size_t)((double)head * part) == config->qk_rope_head_dim)))
            die("%s: %s.partial_rotary_factor must be %g, which is qk_rope_head_dim / %zu", path, name,
                (double)config->qk_rope_head_dim / (double)head, head);
    } else if (factor && !family_has_key(config->family, "partial_rotary_factor") &&
               !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: %s.partial_rotary_factor is %s; only 1 is supported", path, name,
            json_scalar_text(factor, value, sizeof(value)));
    return type;
}

// Sets *found to an object's key, if present; refuses two different values.
static void hf_take_once(const cJSON **found, const cJSON *object, const char *key, const char *name,
                         const char *path) {
    const cJSON *inner = json_get(object, key);
    if (inner && *found && !cJSON_Compare(inner, *found, 1))
        die("%s: %s is given twice, with different values (the other value is in %s); remove one of the two", path, key,
            name);
    if (inner) *found = inner;
}

static void hf_read_rope_object(Config *config, const cJSON *rope, const char *name, HfRope *found, const char *path) {
    char value[64];
    const cJSON *type = hf_check_rope(config, rope, name, path);
    hf_take_once(&found->theta, rope, "rope_theta", name, path);
    const int whole = family_has_convolution(config->family) && config->family->proportional; // or default: LFM3
    if (!whole || !type || !json_is(type, "default")) // LFM3's class ignores the factor of default positions
        hf_take_once(&found->rotated, rope, "partial_rotary_factor", name, path);
    if (!type && json_get(rope, "factor"))
        die("%s: %s has a factor but no rope_type; give both or neither", path, name);
    if (!type) return;
    const int scales = family_has_key(config->family, "rope_type"), alpha = family_has_key(config->family, "alpha");
    const char *plain = whole ? "proportional|default" : config->family->proportional ? "proportional" : "default";
    if (!cJSON_IsString(type) || (!text_is_one_of(type->valuestring, scales ? "default|linear|llama3|yarn" : plain) &&
                                  !(alpha && json_is(type, "dynamic"))))
        die("%s: %s of type %s is not supported%s; supported: %s", path, name,
            json_scalar_text(type, value, sizeof(value)), scales ? "" : " for this family",
            scales ? "default, linear, llama3 or yarn" : plain);
    if (!scales) return;
    config_set(config, "rope_type", type->valuestring, path, EXIT_RUNTIME);
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(rope, key->name);
        if (!item || key->kind == KEY_ROPE_TYPE || !(key->scaling >> config->rope.type & 1)) continue;
        if (!family_has_key(config->family, key->name)) continue;
        if (cJSON_IsNull(item) && text_is_one_of(key->name, "truncate|original_max_position_embeddings"))
            die("%s: %s.%s is null; give its value, or leave it out for the default", path, name, key->name);
        if (cJSON_IsNull(item)) continue; // null counts as absent here
        hf_set(config, key->name, item, path);
        if (!strcmp(key->name, "attention_factor") && !(item->valuedouble > 0))
            die("%s: %s.attention_factor is %g; it must be above 0", path, name, item->valuedouble);
    }
}

// Checks keys that only proportional positions have. If partial_rotary_factor is absent, all pairs of full attention
// are rotated.
static void hf_check_proportional(Config *config, const cJSON *full, const cJSON *sliding, const char *path) {
    const cJSON *factor = json_get(full, "factor");
    if (!json_get(full, "rope_type") && !json_get(full, "type"))
        die("%s: rope_parameters.full_attention has no rope_type; give proportional", path);
    if (!json_get(full, "rope_theta") || (sliding && !json_get(sliding, "rope_theta")))
        die("%s: rope_parameters must have a rope_theta for each kind of layer", path);
    if (factor && !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: rope_parameters.full_attention.factor is not supported; this family's positions are not scaled; leave "
            "it out",
            path);
    config->partial_rotary_factor = 1;
}

// Reads Gemma's rope_parameters: one object per kind of layer.
static void hf_read_rope_per_layer(Config *config, const cJSON *rope, HfRope *found, const char *path) {
    const cJSON *full = json_get(rope, "full_attention"), *sliding = json_get(rope, "sliding_attention");
    char value[64];
    if (!cJSON_IsObject(rope)) die("%s: rope_parameters must be an object", path);
    if (cJSON_IsFalse(json_get(rope, "truncate")) || cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(rope, "truncate")))
        die("%s: rope_parameters.truncate must not be false or null for all kinds of layers; leave it out", path);
    if (!full && !sliding)
        die("%s: rope_parameters must have full_attention or sliding_attention for this family", path);
    if (config->family->proportional) hf_check_proportional(config, full, sliding, path);
    if (full) hf_read_rope_object(config, full, "rope_parameters.full_attention", found, path);
    if (!sliding) return;
    const cJSON *type = hf_check_rope(config, sliding, "rope_parameters.sliding_attention", path);
    const cJSON *local = json_get(sliding, "rope_theta");
    if (type && !json_is(type, "default"))
        die("%s: rope_parameters.sliding_attention of type %s is not supported; layers with a window must have type "
            "default",
            path, json_scalar_text(type, value, sizeof(value)));
    if (local) hf_set(config, "rope_local_base_freq", local, path);
}

// Checks the keys by which Ministral scales queries; transformers requires both: the factor, and the position from
// which it applies.
static void hf_check_growth(const Config *config, const cJSON *rope, const char *path) {
    const cJSON *growth = json_get(rope, "llama_4_scaling_beta"),
                *from = json_get(rope, "original_max_position_embeddings");
    if (!cJSON_IsNumber(growth) || !cJSON_IsNumber(from))
        die("%s: rope_parameters has no %s; add it, since %s needs it", path,
            growth ? "original_max_position_embeddings" : "llama_4_scaling_beta", config->family->architecture);
    if (growth->valuedouble != 0 && config->rope.type != ROPE_YARN && config->rope.type != ROPE_LLAMA3)
        die("%s: llama_4_scaling_beta is %g with rope_type %s; it is supported with yarn and llama3, or as 0", path,
            growth->valuedouble, rope_type_names[config->rope.type]);
}

// Refuses a key of rope_parameters that changes the model but that transformers ignores if there is also rope_scaling.
static void hf_check_hidden(const cJSON *parameters, const char *key, double value, const char *path) {
    const cJSON *hidden = json_get(parameters, key);
    if (hidden && hidden->valuedouble != value)
        die("%s: transformers ignores rope_parameters if rope_scaling is given: %s would be %g, not %g; give it in "
            "rope_scaling",
            path, key, value, hidden->valuedouble);
}

// Reads rope_scaling (classic) or rope_parameters (transformers 5). If both exist, rope_scaling counts, as in
// transformers.
static void hf_read_rope(Config *config, const cJSON *root, const char *path) {
    const cJSON *scaling = json_get(root, "rope_scaling");
    // Bamba's class ignores the outer factor
    const cJSON *share = family_expands(config->family) ? NULL : json_get(root, "partial_rotary_factor");
    HfRope found = {json_get(root, "rope_theta"), share};
    const cJSON *parameters = json_get(root, "rope_parameters"),
                *original = cJSON_GetObjectItemCaseSensitive(root, "original_max_position_embeddings");
    const int per_layer = family_has_key(config->family, "rope_local_base_freq");
    const int hides = !per_layer && scaling && (scaling->child || !cJSON_IsObject(scaling));
    const int given = parameters || hides, grows = given && family_has_key(config->family, "llama_4_scaling_beta");
    if (given && family_names_key(config->family, "rope_type")) config->rope = rope_unscaled;
    if (grows) config->rope_theta = HF_THETA; // Ministral's class has it in rope_parameters
    if (parameters && per_layer)
        hf_read_rope_per_layer(config, parameters, &found, path);
    else if (parameters && !hides)
        hf_read_rope_object(config, parameters, "rope_parameters", &found, path);
    const cJSON *type = json_get(scaling, "type");
    const int plain = config->rope.type == ROPE_DEFAULT && json_is(type, "default");
    if (per_layer && type && !plain && !json_get(scaling, "rope_type"))
        die("%s: rope_scaling has a type but no rope_type, which %s needs; rename type to rope_type", path,
            config->family->architecture);
    if (scaling && (per_layer || hides)) hf_read_rope_object(config, scaling, "rope_scaling", &found, path);
    if (found.theta && !grows && config->rope.llama_4_scaling_beta != 0 &&
        found.theta->valuedouble != config->rope_theta)
        die("%s: transformers ignores rope_theta without rope_parameters; give it in rope_parameters", path);
    if (found.theta) hf_set(config, "rope_theta", found.theta, path);
    if (found.rotated && family_has_key(config->family, "partial_rotary_factor"))
        hf_set(config, "partial_rotary_factor", found.rotated, path);
    if (!found.theta && cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "rope_theta")))
        die("%s: rope_theta is null; give its value, or leave it out for the default", path);
    if (hides) hf_check_hidden(parameters, "rope_theta", config->rope_theta, path);
    if (hides && !config->kv_lora_rank) // else the share that counts must be one
        hf_check_hidden(parameters, "partial_rotary_factor", config->partial_rotary_factor, path);
    if (grows) hf_check_growth(config, hides ? scaling : parameters, path);
    if (original && !per_layer && config->rope.type != ROPE_DEFAULT && config->rope.type != ROPE_LINEAR)
        hf_set(config, "original_max_position_embeddings", original, path);
}

#endif
