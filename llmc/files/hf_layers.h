/*
Reads the kinds of layers of config.json: windows, linear attention, convolutions, branches, rotary positions by layer,
and widths of heads or MLPs that follow from the kind.
*/
#ifndef LLMC_HF_LAYERS_H
#define LLMC_HF_LAYERS_H
#include "hf_keys.h"

// Defaults in transformers
#define HF_WINDOW               4096 // sliding_window of Qwen and Gemma
#define QWEN_FIRST_WINDOW_LAYER 28   // max_window_layers: layers from here on have a window

// Returns a whole number of config.json; `otherwise` if it is absent.
static size_t hf_size(const cJSON *root, const char *key, size_t otherwise, const char *path) {
    const cJSON *item = json_get(root, key);
    uint64_t value = otherwise;
    if (item && !json_whole_number(item, &value)) die("%s: %s must be a whole number of at least 0", path, key);
    return (size_t)value;
}

// Reads layer_types, a list of every layer's kind.
static void hf_read_layer_types(Config *config, const cJSON *types, const char *path) {
    const cJSON *type;
    const char *known = family_expands(config->family)               ? FULL "|" LINEAR "|attention|mamba"
                        : family_has_linear(config->family)          ? FULL "|" LINEAR
                        : !strcmp(config->family->layer_types, "sc") ? FULL "|" SLIDING "|" CONVOLUTION
                        : family_has_convolution(config->family)     ? FULL "|" CONVOLUTION
                        : *config->family->layer_types == 's'        ? FULL "|" SLIDING
                                                                     : FULL;
    size_t layers = 0;
    char value[64];
    if (!cJSON_IsArray(types)) die("%s: layer_types must be a list", path);
    memset(config->layer_types, 0, sizeof(config->layer_types));
    cJSON_ArrayForEach(type, types) {
        if (!cJSON_IsString(type) || !text_is_one_of(type->valuestring, known))
            die("%s: layer_types: layer %zu is %s, but must be %s", path, layers,
                json_scalar_text(type, value, sizeof(value)), known);
        const char first = type->valuestring[0];
        if (layers < LAYER_TYPES_MAX) config->layer_types[layers] = first == 'm' ? 'l' : first == 'a' ? 'f' : first;
        layers++;
    }
    if (layers != config->num_hidden_layers)
        die("%s: layer_types names %zu layers, but num_hidden_layers is %zu; make the two equal", path, layers,
            config->num_hidden_layers);
    if (layers > LAYER_TYPES_MAX) die("%s: layer_types has more layers than the supported %d", path, LAYER_TYPES_MAX);
}

// Sets layer_types to the class's default pattern ("lllf"), but with `interval` layers in it: the last layer of an
// interval has the other kind.
static void hf_repeat_types(Config *config, const char *key, size_t interval, const char *path) {
    const char usual = config->layer_types[0], last = config->layer_types[strlen(config->layer_types) - 1];
    const size_t period = min_size(interval, config->num_hidden_layers);
    if (!interval) die("%s: %s is 0; it must be at least 1", path, key);
    if (period > LAYER_TYPES_MAX) die("%s: %s is %zu; at most %d is supported", path, key, interval, LAYER_TYPES_MAX);
    memset(config->layer_types, 0, sizeof(config->layer_types));
    for (size_t l = 0; l < period; l++) config->layer_types[l] = (l + 1) % interval ? usual : last;
}

// Tells whether layers of full attention have no rotary positions: in OLMo's class if rope_theta is null, in the object
// of positions or else outside; in Granite's unless position_embedding_type is rope.
static int hf_has_no_rope(const Family *family, const cJSON *root) {
    const cJSON *rope = json_get(root, "rope_scaling");
    if (!rope || !rope->child) rope = json_get(root, "rope_parameters");
    const cJSON *inner = cJSON_GetObjectItemCaseSensitive(rope, "rope_theta");
    if (family_expands(family))
        return !strcmp(family->layer_types, "ln") && !json_is(json_get(root, "position_embedding_type"), "rope");
    return !strcmp(family->layer_types, "ln") &&
           cJSON_IsNull(inner ? inner : cJSON_GetObjectItemCaseSensitive(root, "rope_theta"));
}

// Reads the numbers of the layers of full attention. All other layers get the letter.
static void hf_read_full_layers(Config *config, const cJSON *root, const char *key, char letter, const char *path) {
    const cJSON *list = json_get(root, key), *item;
    const size_t L = config->num_hidden_layers;
    uint64_t l;
    if (!cJSON_IsArray(list)) die("%s: %s must be a list of layer numbers", path, key);
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    memset(config->layer_types, letter, L);
    config->layer_types[L] = 0;
    cJSON_ArrayForEach(item, list) {
        if (!json_whole_number(item, &l)) die("%s: %s has an entry that is not a layer's number", path, key);
        if (l < L) config->layer_types[l] = 'f';
    }
}

// Reads which layers have linear attention: a list, or all except every full_attention_interval-th, a key that OLMo's
// and Mamba-2's classes lack. Bamba's class has only the numbers of the other layers.
static void hf_read_kinds(Config *config, const cJSON *root, const char *path) {
    const int olmo = config->family->linear_pre_norms, mamba = family_expands(config->family);
    const cJSON *blocks = mamba ? json_get(root, "layers_block_type") : NULL, *types = json_get(root, "layer_types");
    const size_t usual = strlen(config->layer_types), L = config->num_hidden_layers;
    if (blocks) types = blocks; // the class prefers it, too
    if (types && mamba && !strcmp(config->family->layer_types, "l"))
        die("%s: %s is no key of its class; give attn_layer_indices, the numbers of layers with attention", path,
            types->string);
    if (types)
        hf_read_layer_types(config, types, path);
    else if (mamba && json_get(root, "attn_layer_indices"))
        hf_read_full_layers(config, root, "attn_layer_indices", 'l', path);
    else
        hf_repeat_types(config, "full_attention_interval",
                        olmo || mamba ? min_size(usual, L) : hf_size(root, "full_attention_interval", usual, path),
                        path);
    if (olmo) config->given[config_key_find("layer_types")] = 1;
    for (char *at = config->layer_types; hf_has_no_rope(config->family, root) && *at; at++)
        if (*at == 'f') *at = 'n';
}

// Reads the branch of each layer: a list under one of two names, or a pattern. Its length is the number of layers.
static void hf_read_branches(Config *config, const cJSON *root, const char *path) {
    static const char *const names[] = {LINEAR, "mamba", FULL, "attention", "mlp", "moe"}, letters[] = "LLFFpe";
    const cJSON *list = json_get(root, "layers_block_type"), *pattern = json_get(root, "hybrid_override_pattern"),
                *type;
    const char *marks = "M*-E", *text = cJSON_IsString(pattern) ? pattern->valuestring : "";
    size_t layers = 0;
    if (!list) list = json_get(root, "layer_types");
    if (!config->family->bare_attention || (!list && !pattern)) return;
    memset(config->layer_types, 0, sizeof(config->layer_types));
    cJSON_ArrayForEach(type, list) {
        size_t i = 0;
        while (i < sizeof(names) / sizeof(names[0]) && !json_is(type, names[i])) i++;
        if (i == sizeof(names) / sizeof(names[0]) || layers == LAYER_TYPES_MAX)
            die("%s: layers_block_type: layer %zu must be " LINEAR ", " FULL ", mlp or moe, and at most %d layers are "
                "supported",
                path, layers, LAYER_TYPES_MAX);
        config->layer_types[layers++] = letters[i];
    }
    for (; !list && *text; text++) {
        const char *mark = strchr(marks, *text);
        if (!mark || layers == LAYER_TYPES_MAX)
            die("%s: hybrid_override_pattern: layer %zu must be M, *, - or E, and at most %d layers are supported",
                path, layers, LAYER_TYPES_MAX);
        config->layer_types[layers++] = "LFpe"[mark - marks];
    }
    if (!layers) die("%s: names no layers; give layers_block_type", path);
    config->num_hidden_layers = layers;
}

// Reads which layers have no rotary positions: a list of 0 and 1 for at least all layers, or every
// no_rope_layer_interval-th.
static void hf_read_no_rope(Config *config, const cJSON *root, const char *path) {
    const cJSON *list = json_get(root, "no_rope_layers"), *types = json_get(root, "layer_types");
    const size_t interval = hf_size(root, "no_rope_layer_interval", strlen(config->layer_types), path);
    const size_t L = config->num_hidden_layers;
    Config ignored = *config;
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    if (types) hf_read_layer_types(&ignored, types, path);
    if (list && (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) < L))
        die("%s: no_rope_layers must be a list of 0 or 1 for each of %zu layers", path, L);
    if (!list) hf_repeat_types(config, "no_rope_layer_interval", interval, path);
    const cJSON *item = list ? list->child : NULL;
    for (size_t l = 0; item && l < L; l++, item = item->next) {
        if (!cJSON_IsNumber(item) || (item->valuedouble != 0 && item->valuedouble != 1))
            die("%s: no_rope_layers: the value of layer %zu must be 0 or 1", path, l);
        config->layer_types[l] = item->valuedouble != 0 ? 'f' : 'n';
    }
    config->layer_types[L] = 0;
}

// Reads which layers have a window (layer_types) and which have no rotary positions (layer_rope_theta is 0), of a class
// whose defaults count every fourth layer from the last. transformers reads the other values of the list as yes or no.
static void hf_read_rope_thetas(Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types"), *thetas = json_get(root, "layer_rope_theta"), *item;
    const size_t L = config->num_hidden_layers;
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    if (thetas && (!cJSON_IsArray(thetas) || (size_t)cJSON_GetArraySize(thetas) < L))
        die("%s: layer_rope_theta must be a list of a number for each of %zu layers", path, L);
    if (types) hf_read_layer_types(config, types, path);
    for (size_t l = 0; l < L; l++) {
        const int fourth = (L - 1 - l) % 4 == 0;
        if (!types) config->layer_types[l] = fourth ? 'f' : 's';
        item = thetas ? cJSON_GetArrayItem(thetas, (int)l) : NULL;
        if (item && (!cJSON_IsNumber(item) || (item->valuedouble != 0 && item->valuedouble != config->rope_theta)))
            die("%s: layer_rope_theta: the value of layer %zu must be 0 or rope_theta, %g", path, l,
                config->rope_theta);
        if (item ? item->valuedouble != 0 : !fourth) continue;
        if (config->layer_types[l] == 's')
            die("%s: layer_rope_theta: layer %zu has a sliding window, so it must have rotary positions here", path, l);
        config->layer_types[l] = 'n';
    }
    config->layer_types[L] = 0, config->given[config_key_find("layer_types")] = 1;
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "sliding_window"))) config->sliding_window = 0;
    if (strchr(config->layer_types, 's') && !config->sliding_window)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give its size", path);
}

// Reads sliding_window and which layers have a window, by the rules of each class. A window includes the key of the
// query's token, as it does in our config.
static void hf_read_windows(Config *config, const cJSON *root, const char *path) {
    const Family *family = config->family;
    const cJSON *types = json_get(root, "layer_types"),
                *window = cJSON_GetObjectItemCaseSensitive(root, "sliding_window");
    const int has = family_has_key(family, "sliding_window"), qwen = has && !config->layer_types[0];
    const int everywhere = family->same_windows;
    const int turned_off = qwen && !cJSON_IsTrue(json_get(root, "use_sliding_window"));
    size_t l, L = config->num_hidden_layers;
    if ((everywhere || qwen) && !turned_off && cJSON_IsNumber(window) && window->valuedouble == 0)
        die("%s: sliding_window 0 would mask every token; use null for no window", path);
    if (qwen && !window) config->sliding_window = HF_WINDOW;
    if (turned_off || (has && cJSON_IsNull(window))) config->sliding_window = 0;
    if (L > LAYER_TYPES_MAX && config->sliding_window && !everywhere)
        die("%s: sliding_window is supported in models of at most %d layers", path, LAYER_TYPES_MAX);
    if (types) {
        hf_read_layer_types(config, types, path);
        if (everywhere && config->sliding_window && strchr(config->layer_types, 'f'))
            die("%s: layer_types has full_attention, but %s gives every layer the sliding_window; make all "
                "sliding_attention, or set sliding_window to null",
                path, family->architecture);
        if (strchr(config->layer_types, 's') && !config->sliding_window)
            die("%s: layer_types has sliding_attention, but there is no sliding_window%s; give its size", path,
                qwen ? " (or use_sliding_window is false)" : "");
    } else if (qwen && config->sliding_window) {
        size_t first = hf_size(root, "max_window_layers", QWEN_FIRST_WINDOW_LAYER, path);
        for (l = 0; l < L; l++) config->layer_types[l] = l >= first ? 's' : 'f';
    } else if (has && !everywhere && !qwen) {
        size_t pattern = strlen(config->layer_types); // default of the class: the last layer of a period has no window
        // Only Gemma has the key sliding_window_pattern.
        if (family->norm_offset) pattern = hf_size(root, "sliding_window_pattern", pattern, path);
        hf_repeat_types(config, "sliding_window_pattern", pattern, path);
        if (!config->sliding_window && strchr(config->layer_types, 's'))
            die("%s: sliding_window is null, but layers have sliding attention; give its size", path);
    }
}

// Reads which layers have a short convolution: a list of kinds, or the numbers of all layers with attention.
static void hf_read_convolutions(Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types");
    if (*config->family->layer_types == 's' && json_get(root, "rms_norm_eps")) // its class has both names
        die("%s: rms_norm_eps is another name of norm_eps here; give norm_eps alone", path);
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "sliding_window"))) config->sliding_window = 0;
    if (types) hf_read_layer_types(config, types, path), config->given[config_key_find("layer_types")] = 1;
    if (strchr(config->layer_types, 's') && !config->sliding_window)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give its size", path);
    if (!types && config->family->router) die("%s: layer_types is missing; name the kind of each layer", path);
    if (!types && json_get(root, "full_attn_idxs") && *config->family->layer_types != 's')
        hf_read_full_layers(config, root, "full_attn_idxs", 'c', path);
}

// Returns a bound of time_step_limit, a number or transformers' object for infinity; NAN: neither
static double hf_time_step(const cJSON *item) {
    if (json_is(json_get(item, "__float__"), "Infinity")) return INFINITY;
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

// Reads the width of a Mamba-2 head, by default mamba_expand times hidden_size over all heads, and the bounds of time
// steps.
static void hf_read_mamba(Config *config, const cJSON *root, const char *path) {
    const cJSON *limit = cJSON_GetObjectItemCaseSensitive(root, "time_step_limit");
    const size_t heads = config->linear_num_value_heads, most = 1 << 20;
    const size_t width = min_size(hf_size(root, "mamba_expand", 2, path), most) * config->hidden_size;
    if (!config_given(config, "linear_value_head_dim"))
        config->linear_value_head_dim = width / heads, config->given[config_key_find("linear_value_head_dim")] = 1;
    if (!width || heads * config->linear_value_head_dim != width)
        die("%s: mamba_n_heads %zu x mamba_d_head %zu must be mamba_expand x hidden_size, %zu", path, heads,
            config->linear_value_head_dim, width);
    if (!limit) return;
    const double from = hf_time_step(cJSON_GetArrayItem(limit, 0)), to = hf_time_step(cJSON_GetArrayItem(limit, 1));
    if (cJSON_GetArraySize(limit) != 2 || !(to > from && to > 0) || isinf(from) > 0 || (to > 1e6 && !isinf(to)))
        die("%s: time_step_limit must be a list of two numbers, the second above the first, and above 0 up to 1e6 or "
            "Infinity",
            path);
    config->time_step_min = fmax(from, 0), config->time_step_max = isinf(to) ? 0 : to;
}

// Reads LFM2's names of common keys, and the width of the MLP. Unless block_auto_adjust_ff_dim is false, the class
// takes two thirds of it, times a factor, rounded up to a multiple.
static void hf_read_blocks(Config *config, const cJSON *root, const char *path) {
    const cJSON *tied = json_get(root, "tie_embedding"), *width = json_get(root, "block_ff_dim");
    const cJSON *adjust = json_get(root, "block_auto_adjust_ff_dim"), *by = json_get(root, "block_ffn_dim_multiplier");
    const size_t multiple = hf_size(root, "block_multiple_of", 256, path);
    if (tied) hf_set(config, "tie_word_embeddings", tied, path);
    if (config->family->router) return;
    if (width) hf_set(config, "intermediate_size", width, path);
    if (!config_given(config, "intermediate_size") || cJSON_IsFalse(adjust)) return;
    if (adjust && !cJSON_IsTrue(adjust)) die("%s: block_auto_adjust_ff_dim must be true or false", path);
    if (!multiple || (by && !(cJSON_IsNumber(by) && by->valuedouble > 0 && by->valuedouble < 1e6)))
        die("%s: block_multiple_of and block_ffn_dim_multiplier must be numbers above 0", path);
    const double two_thirds = floor(2 * (double)config->intermediate_size / 3);
    const size_t wide = (size_t)((by ? by->valuedouble : 1) * two_thirds);
    config->intermediate_size = (wide + multiple - 1) / multiple * multiple;
}

// Returns a layer's entry of per_layer_config. The keys of per_layer_config are layer numbers with leading zeros.
static const cJSON *hf_layer_entry(const cJSON *layers, size_t l) {
    const cJSON *item;
    cJSON_ArrayForEach(item, layers) if (strspn(item->string, "0123456789") == strlen(item->string) &&
                                         strtoul(item->string, NULL, 10) == l) return item;
    return NULL;
}

// Reads the head size and count of full attention as transformers 5.24 saves them: an object for each layer that
// differs from the other layers.
static void hf_read_layer_heads(Config *config, const cJSON *root, const char *path) {
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(root, "per_layer_config"), *key;
    const size_t L = config->num_hidden_layers;
    size_t entries = 0, heads[2][2] = {{0, 0}, {config->head_dim, config->num_key_value_heads}}; // heads[has a window]
    if (!layers || !family_has_key(config->family, "global_head_dim")) return;
    if (!cJSON_IsObject(layers)) die("%s: per_layer_config must be an object", path);
    for (size_t l = 0; l < L; l++) {
        const cJSON *entry = hf_layer_entry(layers, l);
        const int window = layer_letter(config, l) == 's' && l + 1 < L;
        const size_t dim = hf_size(entry, "head_dim", config->head_dim, path);
        const size_t kv = hf_size(entry, "num_key_value_heads", config->num_key_value_heads, path);
        entries += entry != NULL;
        cJSON_ArrayForEach(key, entry) if (!text_is_one_of(key->string, "head_dim|num_key_value_heads"))
            die("%s: per_layer_config: layer %zu has %s, but may have only head_dim and num_key_value_heads", path, l,
                key->string);
        if (!heads[window][0]) heads[window][0] = dim, heads[window][1] = kv;
        if (dim != heads[window][0] || kv != heads[window][1])
            die("%s: per_layer_config: layer %zu needs the head_dim and num_key_value_heads of the other layers with "
                "%s attention",
                path, l, window ? "sliding" : "full");
    }
    if (entries != (size_t)cJSON_GetArraySize(layers))
        die("%s: per_layer_config has a key that is not a layer number below %zu", path, L);
    if (heads[0][1] != config->num_key_value_heads && !config->attention_k_eq_v)
        die("%s: per_layer_config: %zu num_key_value_heads in full attention, %zu else, are supported only with "
            "attention_k_eq_v",
            path, heads[0][1], config->num_key_value_heads);
    config->global_head_dim = heads[0][0], config->num_global_key_value_heads = heads[0][1];
}

#endif
