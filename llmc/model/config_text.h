/*
A Config from text and back: `--init`, the text of checkpoints, and --rope-scaling. config_finish, which readers of
config.json call, too, sets keys that follow from others and refuses impossible models.
*/
#ifndef LLMC_CONFIG_TEXT_H
#define LLMC_CONFIG_TEXT_H
#include "config.h"
#include "presets.h"

// Shortens layer_types to its period. If no layer has a window, clears pattern and window (only in families with
// letters f and s).
static void config_resolve_layer_types(Config *config, const char *where, int code) {
    const size_t L = config->num_hidden_layers;
    size_t given = strlen(config->layer_types);
    size_t period, l;
    if (config->family->last_full && L <= LAYER_TYPES_MAX && layer_letter(config, L - 1) != 'f') {
        for (l = given; l < L; l++) config->layer_types[l] = config->layer_types[l % given];
        config->layer_types[L - 1] = 'f', config->layer_types[L] = 0, given = L;
    }
    if (config->family->linear_pre_norms && !config_given(config, "layer_types") && L < given) {
        config->layer_types[L - 1] = config->layer_types[given - 1]; // the class makes one layer full attention
        config->layer_types[L] = 0, given = L;
    }
    if (strchr(config->family->layer_types, 'n') && *config->family->layer_types == 's' && L <= LAYER_TYPES_MAX &&
        !config_given(config, "layer_types")) { // the class counts the pattern from the last layer
        for (l = 0; l < L; l++) config->layer_types[l] = (L - 1 - l) % 4 ? 's' : 'n';
        config->layer_types[L] = 0, given = L;
    }
    if (!strcmp(config->family->layer_types, "sc") && L <= LAYER_TYPES_MAX && !config_given(config, "layer_types")) {
        for (l = 0; l < L; l++) config->layer_types[l] = l % 4 == 2 ? 'f' : l % 4 || !l ? 'c' : 's';
        config->layer_types[L] = 0, given = L;
    }
    const size_t sliding = layers_of_kind(config, LAYER_WINDOW);
    if (!sliding && config->sliding_window && config_given(config, "sliding_window") && !given)
        die_with(code, "%s: sliding_window=%zu, but no layer has a window; give layer_types, such as s or sf", where,
                 config->sliding_window);
    if (!sliding && text_is_one_of(config->family->layer_types, "|s")) {
        config->layer_types[0] = 0, config->sliding_window = 0;
        return;
    }
    if (!sliding) config->sliding_window = 0;
    if (!given) die_with(code, "%s: layer_types= names no kind of layer; give letters such as sf", where);
    for (period = 1; period < L; period++) {
        for (l = period; l < L && layer_letter(config, l) == layer_letter(config, l - period); l++) continue;
        if (l == L) break;
    }
    if (period > LAYER_TYPES_MAX)
        die_with(code, "%s: layer_types has a period of %zu layers, too long here; give a shorter pattern", where,
                 period);
    for (l = given; l < period; l++) config->layer_types[l] = config->layer_types[l % given];
    config->layer_types[period] = 0;
}

// Resets keys without effect to one value, so that equal models have equal keys. Refuses shared keys and values that no
// earlier layer has.
static void config_finish_sharing(Config *c, const char *where, int code) {
    const size_t L = c->num_hidden_layers;
    if (c->num_kv_shared_layers >= L)
        die_with(code, "%s: num_kv_shared_layers %zu must be below num_hidden_layers %zu", where,
                 c->num_kv_shared_layers, L);
    for (size_t l = L - c->num_kv_shared_layers; l < L; l++)
        if (key_value_layer(c, l) == l)
            die_with(code,
                     "%s: layer %zu shares keys and values, but no earlier layer of its kind has keys and values; "
                     "lower num_kv_shared_layers",
                     where, l);
    if (!c->attention_k_eq_v || c->num_global_key_value_heads == c->num_key_value_heads)
        c->num_global_key_value_heads = 0;
    if (c->hidden_size_per_layer_input && c->vocab_size_per_layer_input < c->vocab_size)
        die_with(code, "%s: vocab_size_per_layer_input %zu must be at least vocab_size %zu", where,
                 c->vocab_size_per_layer_input, c->vocab_size);
}

// Refuses a rope type without the keys that it needs.
static void config_resolve_rope(Config *config, const char *where, int code) {
    static const char *const needed[] = {"factor", "low_freq_factor", "high_freq_factor", "alpha"};
    for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        const ConfigKey *key = &config_keys[config_key_find(needed[i])];
        if ((key->scaling >> config->rope.type & 1) &&
            *(const double *)(const void *)((char *)config + key->offset) <= 0)
            die_with(code, "%s: rope_type %s needs %s", where, rope_type_names[config->rope.type], key->name);
    }
    if (config->rope.type == ROPE_LLAMA3 && config->rope.low_freq_factor >= config->rope.high_freq_factor)
        die_with(code, "%s: low_freq_factor %g must be below high_freq_factor %g", where, config->rope.low_freq_factor,
                 config->rope.high_freq_factor);
    if (config->rope.type == ROPE_YARN && config->rope_theta <= 1)
        die_with(code, "%s: rope_type yarn needs a rope_theta above 1, not %g", where, config->rope_theta);
    if (!config->rope.original_max_position_embeddings)
        config->rope.original_max_position_embeddings = config->max_position_embeddings;
}

// Sets widths of experts that follow from other keys. Refuses impossible experts.
static void config_finish_experts(Config *c, const char *where, int code) {
    if (!c->family->router) return;
    if (!family_has_key(c->family, "moe_intermediate_size")) c->moe_intermediate_size = c->intermediate_size;
    if (c->family->shared_dense) c->shared_expert_intermediate_size = c->intermediate_size;
    const int counted = family_counts_shared(c->family);
    if (counted && !config_given(c, "shared_expert_intermediate_size"))
        c->shared_expert_intermediate_size = c->moe_intermediate_size;
    if (counted && c->shared_expert_intermediate_size % c->moe_intermediate_size)
        die_with(code, "%s: shared_expert_intermediate_size %zu must be a multiple of moe_intermediate_size %zu", where,
                 c->shared_expert_intermediate_size, c->moe_intermediate_size);
    if (!c->num_experts && !family_has_key(c->family, "decoder_sparse_step") && !c->family->experts_beside &&
        !c->family->shared_dense)
        die_with(code, "%s: num_experts is 0, but must be at least 1, since %s has experts", where, c->family->name);
    if (!c->num_experts) return;
    if (!c->num_experts_per_tok) die_with(code, "%s: num_experts_per_tok is 0, but must be at least 1", where);
    if (c->num_experts_per_tok > c->num_experts)
        die_with(code, "%s: num_experts_per_tok %zu must be at most num_experts %zu", where, c->num_experts_per_tok,
                 c->num_experts);
    if (c->num_experts % c->n_group || c->topk_group > c->n_group ||
        c->num_experts / c->n_group * c->topk_group < c->num_experts_per_tok ||
        (family_has_shared(c->family) && c->num_experts / c->n_group < 2)) // a group's score sums its best two
        die_with(code,
                 "%s: topk_group %zu of n_group %zu equal groups of num_experts %zu must hold num_experts_per_tok %zu",
                 where, c->topk_group, c->n_group, c->num_experts, c->num_experts_per_tok);
}

// Sets the shape of linear attention where it follows attention's heads, as in OLMo's class. Refuses mixtures of layers
// that the class refuses.
static void config_finish_hybrid(Config *c, const char *where, int code) {
    const size_t L = c->num_hidden_layers, linear = layers_of_kind(c, LAYER_LINEAR);
    if (!config_given(c, "linear_num_key_heads")) c->linear_num_key_heads = c->num_attention_heads;
    if (!config_given(c, "linear_num_value_heads")) c->linear_num_value_heads = c->num_attention_heads;
    if (!config_given(c, "linear_key_head_dim"))
        c->linear_key_head_dim = max_size(3 * c->hidden_size / (4 * c->linear_num_key_heads), 1);
    if (!config_given(c, "linear_value_head_dim")) c->linear_value_head_dim = 2 * c->linear_key_head_dim;
    if (!linear || linear == L)
        die_with(code, "%s: layer_types=%.64s, but %s needs layers of linear attention (l) and of full attention",
                 where, c->layer_types, c->family->name);
}

// Refuses a model whose files could not tell which layers have rotary positions, and scaled positions without layers.
static void config_check_no_rope(const Config *c, const char *where, int code) {
    if (!config_has_no_rope(c)) return;
    if (strchr(c->layer_types, 'f'))
        die_with(code,
                 "%s: layer_types=%.64s, but layers of full attention in %s have all rotary positions (f) or all none "
                 "(n)",
                 where, c->layer_types, c->family->name);
    if (c->rope.type != ROPE_DEFAULT)
        die_with(code, "%s: this %s has no rotary positions, so they cannot be scaled; leave the scaling out", where,
                 c->family->name);
}

// Sets the width of a Mamba-2 head, by default twice hidden_size over all heads. Refuses what mamba_expand and
// time_step_limit cannot say.
static void config_finish_mamba(Config *c, const char *where, int code) {
    const size_t heads = c->linear_num_value_heads;
    if (!config_given(c, "linear_value_head_dim")) c->linear_value_head_dim = max_size(2 * c->hidden_size / heads, 1);
    if (c->linear_value_head_dim > 1024)
        die_with(code, "%s: a Mamba-2 head of %zu elements is wider than the supported 1024; give more heads", where,
                 c->linear_value_head_dim);
    if (heads * c->linear_value_head_dim % c->hidden_size)
        die_with(code,
                 "%s: linear_num_value_heads %zu x linear_value_head_dim %zu must be a multiple of hidden_size %zu",
                 where, heads, c->linear_value_head_dim, c->hidden_size);
    if (c->time_step_max > 0 && c->time_step_max <= c->time_step_min)
        die_with(code, "%s: time_step_max %g must be above time_step_min %g, or 0 for no bound", where,
                 c->time_step_max, c->time_step_min);
}

// Sets the head of latent attention and the names of its queries. Refuses shapes and rotary positions that it cannot
// have here. Classes whose queries grow with their position need YaRN in transformers.
static void config_finish_latents(Config *c, const char *where, int code) {
    const RopeScaling *r = &c->rope;
    if (!c->kv_lora_rank) return;
    c->head_dim = c->qk_nope_head_dim + c->qk_rope_head_dim;
    if (!c->q_lora_rank) c->family = family_full_rank(c->family);
    if (c->v_head_dim > c->head_dim)
        die_with(code,
                 "%s: v_head_dim %zu must be at most qk_nope_head_dim + qk_rope_head_dim, %zu: wider values are not "
                 "supported",
                 where, c->v_head_dim, c->head_dim);
    if (c->num_key_value_heads && c->num_key_value_heads != c->num_attention_heads)
        die_with(code, "%s: num_key_value_heads %zu must be num_attention_heads %zu", where, c->num_key_value_heads,
                 c->num_attention_heads);
    if (c->qk_nope_head_dim % 2 || c->qk_rope_head_dim % 2)
        die_with(code, "%s: qk_nope_head_dim %zu and qk_rope_head_dim %zu must be even", where, c->qk_nope_head_dim,
                 c->qk_rope_head_dim);
    const int unscaled =
        r->attention_factor > 0 ? r->attention_factor == 1 : r->mscale > 0 && r->mscale == r->mscale_all_dim;
    const int yarn = r->type == ROPE_YARN && unscaled, grows = family_has_key(c->family, "llama_4_scaling_beta");
    if (!yarn && grows)
        die_with(code, "%s: %s supports only rope_type yarn with mscale = mscale_all_dim", where, c->family->name);
    if (!yarn && r->type != ROPE_DEFAULT)
        die_with(code, "%s: %s supports rope_type default, or yarn with mscale = mscale_all_dim; give one of the two",
                 where, c->family->name);
}

// Sets keys of some families that follow from other keys.
static void config_finish_derived(Config *config, const char *where, int code) {
    const Family *family = config->family;
    if (family->linear_pre_norms) config_finish_hybrid(config, where, code);
    if (family_expands(family)) config_finish_mamba(config, where, code);
    config_check_no_rope(config, where, code);
    if (config->rope.type == ROPE_DYNAMIC && config->head_dim == 2)
        die_with(code, "%s: rope_type dynamic needs a head_dim above 2", where);
    if (family->mlp_biases_too) config->mlp_bias = config->attention_bias;
    if (!family_has_key(family, "post_norm_eps")) config->post_norm_eps = config->norm_eps;
    if (family_has_key(family, "output_multiplier") && config->final_logit_softcapping <= 0)
        die_with(code, "%s: final_logit_softcapping must be above 0", where);
}

// Sets keys that follow from other keys, and refuses impossible models.
static void config_finish(Config *config, const char *where, int code) {
    const Family *family = config->family;
    if (family_has_convolution(family))
        config->linear_num_value_heads = config->hidden_size, config->linear_value_head_dim = 1;
    config_resolve_layer_types(config, where, code);
    if (family->same_windows && strchr(config->layer_types, 'f'))
        die_with(code, "%s: layer_types=%.64s, but in %s either every layer has a sliding_window or none; give s or f",
                 where, config->layer_types, family->name);
    config_resolve_rope(config, where, code);
    config_finish_experts(config, where, code);
    config_finish_sharing(config, where, code);
    if (config->pad_token_id != NO_ROW && config->pad_token_id >= config->vocab_size)
        die_with(code, "%s: pad_token_id %zu must be below vocab_size %zu", where, config->pad_token_id,
                 config->vocab_size);
    if (!config->num_key_value_heads) config->num_key_value_heads = config->num_attention_heads;
    config_finish_latents(config, where, code);
    if (!config->head_dim) {
        if (config->hidden_size % config->num_attention_heads)
            die_with(code,
                     "%s: hidden_size %zu is not a multiple of num_attention_heads %zu; give head_dim, or a multiple",
                     where, config->hidden_size, config->num_attention_heads);
        config->head_dim = config->hidden_size / config->num_attention_heads;
    }
    config_finish_derived(config, where, code);
    if (family->activation == ACTIVATION_GELU && !config_given(config, "intermediate_size"))
        config->intermediate_size = 4 * config->hidden_size;
    if (config->num_attention_heads % config->num_key_value_heads)
        die_with(code, "%s: num_attention_heads %zu must be a multiple of num_key_value_heads %zu", where,
                 config->num_attention_heads, config->num_key_value_heads);
    if (family_has_linear(family) && config->linear_num_value_heads % config->linear_num_key_heads)
        die_with(code, "%s: linear_num_value_heads %zu must be a multiple of linear_num_key_heads %zu", where,
                 config->linear_num_value_heads, config->linear_num_key_heads);
    if (family_has_linear(family) &&
        config->linear_num_value_heads * config->linear_key_head_dim > LINEAR_STATE_MAX / config->linear_value_head_dim)
        die_with(code,
                 "%s: linear_num_value_heads %zu x linear_key_head_dim %zu x linear_value_head_dim %zu is a state of "
                 "more than %d elements a layer; lower one of the three",
                 where, config->linear_num_value_heads, config->linear_key_head_dim, config->linear_value_head_dim,
                 LINEAR_STATE_MAX);
    for (int global = 0; global < 2; global++)
        if (!family->learned_positions && !family->bare_attention &&
            (global ? config->global_head_dim : config->head_dim) % 2)
            die_with(code, "%s: %s %zu must be even for rotary positions", where,
                     global ? "global_head_dim" : "head_dim", global ? config->global_head_dim : config->head_dim);
    if (config->num_global_key_value_heads && config->num_attention_heads % config->num_global_key_value_heads)
        die_with(code, "%s: num_attention_heads %zu must be a multiple of num_global_key_value_heads %zu", where,
                 config->num_attention_heads, config->num_global_key_value_heads);
    if (!family->learned_positions && !family->bare_attention && (rotary_width(config) % 2 || !rotary_width(config)))
        die_with(code,
                 "%s: partial_rotary_factor %g rotates %zu of head_dim %zu elements; it must rotate an even number",
                 where, config->partial_rotary_factor, rotary_width(config), config->head_dim);
}

// Parses "NAME" or "NAME,key=value,...". NAME is a preset or a family.
static Config config_from_text(const char *text, const char *where, int code) {
    char name[64], number[32];
    const char *keys = text + strcspn(text, ",");
    const Preset *preset = NULL;
    snprintf(name, sizeof(name), "%.*s", (int)(keys - text), text);
    for (size_t i = 0; i < PRESETS; i++) {
        if (!strcmp(presets[i].name, name)) preset = &presets[i];
    }
    const Family *family = family_find(preset ? preset->family : name);
    if (!family) {
        const char *nearest = NULL;
        size_t best = SIZE_MAX;
        for (size_t i = 0; i < FAMILIES; i++) spelling_compare(name, families[i].name, &nearest, &best);
        for (size_t i = 0; i < PRESETS; i++) spelling_compare(name, presets[i].name, &nearest, &best);
        die_with(code, "%s: unknown model '%s'%s; %s info --help lists all", where, name, did_you_mean("", nearest),
                 program_called());
    }
    Config config = config_defaults(family);
    for (size_t i = 0; preset && i < PRESET_NUMBERS; i++) {
        snprintf(number, sizeof(number), "%u", preset->numbers[i]);
        if (preset->numbers[i]) config_set(&config, preset_numbers[i], number, preset->name, EXIT_RUNTIME);
    }
    if (preset) config_set_all(&config, preset->keys, preset->name, EXIT_RUNTIME);
    if (*keys) config_set_all(&config, keys + 1, where, code);
    config_finish(&config, where, code);
    return config;
}

// Prints the value of a key in the form that config_set reads.
static void config_key_text(const Config *config, const ConfigKey *key, char text[LAYER_TYPES_MAX + 1]) {
    const size_t size = LAYER_TYPES_MAX + 1;
    const void *field = (const char *)config + key->offset;
    switch (key->kind) {
    case KEY_SIZE: snprintf(text, size, "%zu", *(const size_t *)field); break;
    case KEY_DOUBLE: snprintf(text, size, "%.17g", *(const double *)field); break;
    case KEY_BOOL: snprintf(text, size, "%s", *(const int *)field ? "true" : "false"); break;
    case KEY_LAYERS: layers_to_text((const uint8_t *)field, text, size); break;
    case KEY_ROPE_TYPE: snprintf(text, size, "%s", rope_type_names[config->rope.type]); break;
    case KEY_GELU: snprintf(text, size, "%s", gelu_names[config->activation_function]); break;
    case KEY_LAYER_TYPES: snprintf(text, size, "%s", config->layer_types);
    }
}

// Prints every key of the model, so that config_from_text restores it to the bit.
static void config_to_text(const Config *config, char *text, size_t size) {
    char value[LAYER_TYPES_MAX + 1];
    size_t used = (size_t)snprintf(text, size, "%s", config->family->name);
    for (size_t i = 0; i < CONFIG_KEYS && used < size; i++) {
        if (!config_uses_key(config, &config_keys[i])) continue;
        config_key_text(config, &config_keys[i], value);
        used += (size_t)snprintf(text + used, size - used, ",%s=%s", config_keys[i].name, value);
    }
}

// Returns a checksum of what the model computes: of all keys except pad_token_id, which matters only in training.
static uint64_t config_checksum(uint64_t seed, Config config) {
    char text[4096];
    config.pad_token_id = NO_ROW;
    config_to_text(&config, text, sizeof(text));
    return checksum_of(seed, text, strlen(text));
}

// ---- scaling from the command line ----------------------------------------------------------------------------------
// Returns the number of positions before scaling.
static size_t config_unscaled_positions(const Config *config) {
    return config->rope.type == ROPE_LINEAR ? (size_t)((double)config->max_position_embeddings / config->rope.factor)
                                            : config->rope.original_max_position_embeddings;
}

// Prints the scaling of rotary positions in the form that config_scale reads: "TYPE,key=value,...".
static void config_scaling_text(const Config *config, char *text, size_t size) {
    char value[LAYER_TYPES_MAX + 1];
    size_t used = (size_t)snprintf(text, size, "%s", rope_type_names[config->rope.type]);
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS && used < size; key++) {
        if (!key->scaling || key->kind == KEY_ROPE_TYPE || !config_uses_key(config, key)) continue;
        config_key_text(config, key, value);
        used += (size_t)snprintf(text + used, size - used, ",%s=%s", key->name, value);
    }
}

// Replaces the scaling of rotary positions; max_position_embeddings becomes factor times the original. Returns a model
// that already has this scaling unchanged.
static Config config_scale(const Config *config, const char *scaling, const char *where, int code) {
    char text[4096], same[4096], type[16];
    const char *keys = scaling + strcspn(scaling, ",");
    Config plain = *config, scaled;
    if (config->family->learned_positions)
        die_with(code, "%s: %s has a table of positions, which cannot be scaled; leave the scaling out", where,
                 config->family->name);
    if (config->kv_lora_rank && family_has_key(config->family, "llama_4_scaling_beta"))
        die_with(code, "%s: %s scales positions, scores and queries by its own YaRN; leave the scaling out", where,
                 config->family->name);
    if (config->family->plain_rope)
        die_with(code, "%s: rotary positions of %s cannot be scaled; leave the scaling out, as transformers does",
                 where, config->family->name);
    plain.rope = rope_unscaled;
    config_to_text(&plain, text, sizeof(text));
    plain = config_from_text(text, where, code);
    scaled = plain, scaled.rope.original_max_position_embeddings = config_unscaled_positions(config);
    scaled.rope.llama_4_scaling_beta = config->rope.llama_4_scaling_beta;
    snprintf(type, sizeof(type), "%.*s", (int)(keys - scaling), scaling);
    if (!text_is_one_of(type, "linear|llama3|yarn"))
        die_with(code, "%s: unknown scaling '%s'; give linear, llama3 or yarn, such as yarn,factor=4", where, type);
    config_set(&scaled, "rope_type", type, where, code);
    if (rotation_growth(config) != 0 && rotation_growth(&scaled) == 0)
        die_with(code, "%s: queries of %s grow with their position, which %s scaling would lose; use yarn", where,
                 config->family->name, type);
    memset(scaled.given, 0, sizeof(scaled.given));
    config_set_all(&scaled, keys + (*keys != 0), where, code);
    for (size_t i = 0; i < CONFIG_KEYS; i++)
        if (scaled.given[i] &&
            (config_keys[i].kind == KEY_ROPE_TYPE || !(config_keys[i].scaling >> scaled.rope.type & 1)))
            die_with(code, "%s: %s is not a key of %s scaling; leave it out", where, config_keys[i].name, type);
    for (size_t i = 0; i < CONFIG_KEYS; i++) scaled.given[i] |= plain.given[i];
    config_finish(&scaled, where, code);
    if (scaled.rope.factor < 1)
        die_with(code, "%s: factor=%g would leave fewer positions; give a factor of 1 or more", where,
                 scaled.rope.factor);
    config_to_text(config, text, sizeof(text)), config_to_text(&scaled, same, sizeof(same));
    const double positions = scaled.rope.factor * (double)scaled.rope.original_max_position_embeddings;
    scaled.max_position_embeddings = (size_t)fmax(1, fmin(positions, 1e9));
    return strcmp(text, same) ? scaled : *config;
}

#endif
