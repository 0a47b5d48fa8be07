/*
The configuration of a model: a family (family.h) and its numbers, under their Hugging Face names. The text form
"family,key=value,..." is used by --init, by presets and in the header of flat .bin files.
*/
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H
#include "family.h"
#include "llmc/base/hash.h"
#include "llmc/base/text.h"
#include <assert.h>
#include <ctype.h>
#include <stddef.h>

// ROPE_DYNAMIC: the base grows by a fixed alpha (Hunyuan), whatever the length
typedef enum { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, ROPE_DYNAMIC, ROPE_TYPES } RopeType;
static const char *const rope_type_names[ROPE_TYPES] = {"default", "linear", "llama3", "yarn", "dynamic"};

static const char *const gelu_names[2] = {"gelu_new", "gelu_pytorch_tanh"};

enum { CONFIG_KEYS_MOST = 96 };
#define LAYER_TYPES_MAX  1024      // most layers before their types repeat
#define LINEAR_STATE_MAX (1 << 24) // most elements of a layer's state; Qwen3.5-27B has 48 x 128 x 128

// Scaling of rotary positions; keys that the type does not use are ignored.
typedef struct {
    int type; // RopeType
    double factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow;
    double attention_factor, mscale, mscale_all_dim; // 0: not given
    size_t original_max_position_embeddings;         // 0: max_position_embeddings
    int truncate;
    double alpha;                // rope_theta is multiplied by alpha^(d/(d-2)), d = head_dim
    double llama_4_scaling_beta; // growth of queries with the logarithm of their position (Rotation in ops.h)
} RopeScaling;

static const RopeScaling rope_unscaled = {.beta_fast = 32, .beta_slow = 1, .truncate = 1};

typedef struct {
    const Family *family;
    size_t vocab_size, hidden_size, intermediate_size, num_hidden_layers;
    size_t num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings;
    double norm_eps; // value of rms_norm_eps or layer_norm_epsilon
    double rope_theta, initializer_range;
    int tie_word_embeddings, attention_bias, mlp_bias;
    RopeScaling rope;
    double rope_local_base_freq; // rope_theta of layers with a window, never scaled; 0: as in layers without a window
    size_t sliding_window;       // keys that a query of a layer with a window sees, its own key included; 0: no window
    // s: sliding, f: full, l: linear attention, n: full without rotary positions, c: a short convolution; repeated to
    // num_hidden_layers; "": all full
    char layer_types[LAYER_TYPES_MAX + 1];
    double partial_rotary_factor; // share of a head's elements that are rotated: its first elements
    // linear attention (Gated DeltaNet). A short convolution has hidden_size value heads of one element, and no keys
    size_t linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim;
    size_t linear_conv_kernel_dim;
    int linear_allow_neg_eigval;         // DeltaShape.doubled
    double time_step_min, time_step_max; // Mamba-2: least and greatest step of a token; greatest 0: none
    // experts
    size_t num_experts, num_experts_per_tok, moe_intermediate_size;
    size_t shared_expert_intermediate_size;       // width of the shared expert, which every token uses; 0: none
    size_t decoder_sparse_step;                   // every n-th layer has experts
    size_t first_k_dense_replace;                 // the first n layers have no experts
    uint8_t mlp_only_layers[LAYER_TYPES_MAX / 8]; // layers without experts, a bit each
    // latent attention: ranks of queries (0: full rank) and of keys and values (0: no latents); elements of a head's
    // keys, of its values
    size_t q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    size_t n_group, topk_group;        // RouterShape.groups, .kept
    int norm_topk_prob;                // RouterShape.normalised
    double routed_scaling_factor;      // RouterShape.scale
    double router_aux_loss_coef;       // weight of the loss that balances the experts
    double swiglu_alpha, swiglu_limit; // Activation.alpha, .limit
    int use_qk_norm;                   // 0: the model lacks the family's QK-norm
    // heads of layers with full attention, if they differ from heads of windowed layers; 0: they do not
    size_t global_head_dim, num_global_key_value_heads;
    int attention_k_eq_v;        // full attention: values are the keys before their norm
    size_t num_kv_shared_layers; // number of last layers that read K, V of the last layer of their kind before them
    int use_double_wide_mlp;     // 1: the MLPs of these last layers are twice as wide
    size_t hidden_size_per_layer_input, vocab_size_per_layer_input; // a layer's own input: its width, 0: there is none;
                                                                    // its number of tokens
    double final_logit_softcapping;                                 // Temperature.cap
    double query_pre_attn_scalar; // attention scores are divided by the square root of this number; 0: of head_dim
    double attention_multiplier;  // factor of attention scores in place of that division; 0: none
    double embedding_multiplier,
        residual_multiplier;         // factors of the embeddings, and of each branch before its addition
    double logits_scaling;           // divisor of the logits
    double qk_scale_factor;          // factor of queries, or of attention scores, after QK-norm
    double output_multiplier;        // factor of the logits before their cap
    double post_norm_eps;            // norm_eps of norms after attention and MLP
    int activation_function;         // index of GPT-2's name for the activation: two names stand for
                                     // one function
    size_t pad_token_id;             // input token whose embedding gets no gradient; NO_ROW: none
    uint8_t given[CONFIG_KEYS_MOST]; // 1: this key of config_keys was set explicitly, so it follows no other key
} Config;

typedef enum { KEY_SIZE, KEY_DOUBLE, KEY_BOOL, KEY_ROPE_TYPE, KEY_LAYER_TYPES, KEY_GELU, KEY_LAYERS } KeyKind;

typedef struct {
    const char *name;  // common Hugging Face name
    size_t offset;     // in Config
    const char *alias; // original Hugging Face name, or NULL
    KeyKind kind;
    double least, most; // allowed values, inclusive
    int scaling;        // bit t: a key of RopeType t, kept in rope_scaling or rope_parameters
    int optional;       // only families whose defaults name the key have it
} ConfigKey;

enum { OPTIONAL = 1 };
#define LLAMA3_SCALED  (1 << ROPE_LLAMA3)
#define YARN_SCALED    (1 << ROPE_YARN)
#define DYNAMIC_SCALED (1 << ROPE_DYNAMIC)
#define SCALED         (1 << ROPE_LINEAR | LLAMA3_SCALED | YARN_SCALED)
#define KEY(name)      #name, offsetof(Config, name)
#define ROPE_KEY(name) #name, offsetof(Config, rope.name)
static const ConfigKey config_keys[] = {
    {KEY(vocab_size), NULL, KEY_SIZE, 2, 1 << 24, 0, 0},
    {KEY(hidden_size), "n_embd", KEY_SIZE, 1, 1 << 20, 0, 0},
    {KEY(intermediate_size), "n_inner", KEY_SIZE, 1, 1 << 22, 0, 0},
    {KEY(num_hidden_layers), "n_layer", KEY_SIZE, 1, 4096, 0, 0},
    {KEY(num_attention_heads), "n_head", KEY_SIZE, 1, 1 << 14, 0, 0},
    {KEY(num_key_value_heads), NULL, KEY_SIZE, 1, 1 << 14, 0, 0},
    {KEY(head_dim), NULL, KEY_SIZE, 1, 1024, 0, 0},
    {KEY(max_position_embeddings), "n_positions", KEY_SIZE, 1, 1e9, 0, 0},
    {"rms_norm_eps", offsetof(Config, norm_eps), "layer_norm_epsilon", KEY_DOUBLE, 0, 1, 0, 0},
    {KEY(rope_theta), NULL, KEY_DOUBLE, 1, 1e12, 0, 0},
    {KEY(initializer_range), NULL, KEY_DOUBLE, 0, 10, 0, 0},
    {KEY(tie_word_embeddings), NULL, KEY_BOOL, 0, 1, 0, 0},
    {KEY(attention_bias), "use_bias", KEY_BOOL, 0, 1, 0, 0},
    {KEY(mlp_bias), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {"rope_type", offsetof(Config, rope.type), NULL, KEY_ROPE_TYPE, 0, 0, SCALED | DYNAMIC_SCALED, 0},
    {ROPE_KEY(factor), NULL, KEY_DOUBLE, 1e-3, 1e6, SCALED, 0},
    {ROPE_KEY(original_max_position_embeddings), NULL, KEY_SIZE, 1, 1e9, LLAMA3_SCALED | YARN_SCALED, 0},
    {ROPE_KEY(low_freq_factor), NULL, KEY_DOUBLE, 1e-3, 1e6, LLAMA3_SCALED, 0},
    {ROPE_KEY(high_freq_factor), NULL, KEY_DOUBLE, 1e-3, 1e6, LLAMA3_SCALED, 0},
    {ROPE_KEY(attention_factor), NULL, KEY_DOUBLE, 0, 1e6, YARN_SCALED, 0},
    {ROPE_KEY(beta_fast), NULL, KEY_DOUBLE, 1e-3, 1e6, YARN_SCALED, 0},
    {ROPE_KEY(beta_slow), NULL, KEY_DOUBLE, 1e-3, 1e6, YARN_SCALED, 0},
    {ROPE_KEY(mscale), NULL, KEY_DOUBLE, 0, 1e6, YARN_SCALED, 0},
    {ROPE_KEY(mscale_all_dim), NULL, KEY_DOUBLE, 0, 1e6, YARN_SCALED, 0},
    {ROPE_KEY(truncate), NULL, KEY_BOOL, 0, 1, YARN_SCALED, 0},
    {ROPE_KEY(alpha), NULL, KEY_DOUBLE, 0, 1e9, DYNAMIC_SCALED, OPTIONAL},
    {ROPE_KEY(llama_4_scaling_beta), NULL, KEY_DOUBLE, 0, 1e3, LLAMA3_SCALED | YARN_SCALED, OPTIONAL},
    {KEY(rope_local_base_freq), NULL, KEY_DOUBLE, 1, 1e12, 0, OPTIONAL},
    {KEY(sliding_window), NULL, KEY_SIZE, 0, 1e9, 0, 0},
    {KEY(layer_types), NULL, KEY_LAYER_TYPES, 0, 0, 0, 0},
    {KEY(query_pre_attn_scalar), NULL, KEY_DOUBLE, 1e-3, 1e6, 0, OPTIONAL},
    {KEY(attention_multiplier), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(embedding_multiplier), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(residual_multiplier), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(logits_scaling), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(qk_scale_factor), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(output_multiplier), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(post_norm_eps), NULL, KEY_DOUBLE, 0, 1, 0, OPTIONAL},
    {KEY(activation_function), NULL, KEY_GELU, 0, 1, 0, 0},
    {KEY(partial_rotary_factor), NULL, KEY_DOUBLE, 1e-3, 1, 0, OPTIONAL},
    {KEY(linear_num_key_heads), NULL, KEY_SIZE, 1, 1 << 14, 0, OPTIONAL},
    {KEY(linear_num_value_heads), NULL, KEY_SIZE, 1, 1 << 14, 0, OPTIONAL},
    {KEY(linear_key_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(linear_value_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(linear_conv_kernel_dim), NULL, KEY_SIZE, 1, CONV_TAPS_MAX, 0, OPTIONAL},
    {KEY(linear_allow_neg_eigval), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {KEY(q_lora_rank), NULL, KEY_SIZE, 0, 1 << 16, 0, OPTIONAL},
    {KEY(kv_lora_rank), NULL, KEY_SIZE, 1, 1 << 16, 0, OPTIONAL},
    {KEY(qk_nope_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(qk_rope_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(v_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(time_step_min), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(time_step_max), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(num_experts), "num_local_experts", KEY_SIZE, 0, EXPERTS_MOST, 0, OPTIONAL},
    {KEY(num_experts_per_tok), "top_k_experts", KEY_SIZE, 0, CHOSEN_MOST, 0, OPTIONAL},
    {KEY(moe_intermediate_size), NULL, KEY_SIZE, 1, 1 << 22, 0, OPTIONAL},
    {KEY(shared_expert_intermediate_size), NULL, KEY_SIZE, 0, 1 << 22, 0, OPTIONAL},
    {KEY(decoder_sparse_step), NULL, KEY_SIZE, 1, 4096, 0, OPTIONAL},
    {KEY(first_k_dense_replace), NULL, KEY_SIZE, 0, 4096, 0, OPTIONAL},
    {KEY(mlp_only_layers), NULL, KEY_LAYERS, 0, 0, 0, OPTIONAL},
    {KEY(n_group), NULL, KEY_SIZE, 1, EXPERTS_MOST, 0, OPTIONAL},
    {KEY(topk_group), NULL, KEY_SIZE, 1, EXPERTS_MOST, 0, OPTIONAL},
    {KEY(norm_topk_prob), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {KEY(routed_scaling_factor), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(router_aux_loss_coef), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(use_qk_norm), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {KEY(swiglu_alpha), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(swiglu_limit), NULL, KEY_DOUBLE, 1e-6, 1e6, 0, OPTIONAL},
    {KEY(global_head_dim), NULL, KEY_SIZE, 1, 1024, 0, OPTIONAL},
    {KEY(num_global_key_value_heads), NULL, KEY_SIZE, 0, 1 << 14, 0, OPTIONAL},
    {KEY(attention_k_eq_v), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {KEY(num_kv_shared_layers), NULL, KEY_SIZE, 0, 4096, 0, OPTIONAL},
    {KEY(use_double_wide_mlp), NULL, KEY_BOOL, 0, 1, 0, OPTIONAL},
    {KEY(hidden_size_per_layer_input), NULL, KEY_SIZE, 0, 1 << 16, 0, OPTIONAL},
    {KEY(vocab_size_per_layer_input), NULL, KEY_SIZE, 1, 1 << 24, 0, OPTIONAL},
    {KEY(final_logit_softcapping), NULL, KEY_DOUBLE, 0, 1e6, 0, OPTIONAL},
    {KEY(pad_token_id), NULL, KEY_SIZE, 0, (1 << 24) - 1, 0, 0},
};
#undef KEY
#undef ROPE_KEY
#define CONFIG_KEYS (sizeof(config_keys) / sizeof(config_keys[0]))
static_assert(CONFIG_KEYS <= CONFIG_KEYS_MOST, "Config.given has a place for every key");

static const Family *family_find(const char *name) {
    for (size_t i = 0; i < FAMILIES; i++) {
        if (!strcmp(families[i].name, name)) return &families[i];
    }
    return NULL;
}

static int config_key_find(const char *name) {
    for (size_t i = 0; i < CONFIG_KEYS; i++) {
        if (!strcmp(config_keys[i].name, name) || (config_keys[i].alias && !strcmp(config_keys[i].alias, name)))
            return (int)i;
    }
    return -1;
}

// Tells whether the family's defaults give the key a value.
static int family_names_key(const Family *family, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = family->defaults; at; at = strchr(at, ','), at += at != NULL)
        if (!strncmp(at, name, length) && at[length] == '=') return 1;
    return 0;
}

// Tells whether the family's config class has the key. name: the key's common name
static int family_has_key(const Family *family, const char *name) {
    const ConfigKey *key = &config_keys[config_key_find(name)];
    if (key->optional) return family_names_key(family, name);
    if (text_is_one_of(name, "rope_theta|pad_token_id")) return !family->learned_positions && !family->bare_attention;
    if (!strcmp(name, "intermediate_size")) return !family->router || family_names_key(family, name);
    if (text_is_one_of(name, "head_dim|attention_bias") && family_names_key(family, "kv_lora_rank")) return 0;
    if (!strcmp(name, "num_key_value_heads") || !strcmp(name, "head_dim")) return !family->biases;
    if (!strcmp(name, "attention_bias"))

        return !family->biases && !family->qkv_bias && !family->same_windows &&
               (!family_has_convolution(family) || family_names_key(family, name)) && !family->bare_attention;
    if (!strcmp(name, "sliding_window")) return *family->layer_types == 's';
    if (key->kind == KEY_LAYER_TYPES) return *family->layer_types;
    if (key->kind == KEY_GELU) return family->activation == ACTIVATION_GELU;
    if (!strcmp(name, "truncate") && family_names_key(family, "rope_local_base_freq"))
        return 0; // transformers reads `truncate` only outside the objects per kind of layer
    return !key->scaling || (!family->learned_positions && !family->plain_rope);
}

// Tells whether the key matters for this model. It does not if it belongs to another rope type, is a window that the
// family lacks by default, or is the default name of an activation.
static int config_uses_key(const Config *config, const ConfigKey *key) {
    if (!family_has_key(config->family, key->name)) return 0;
    if (key->kind == KEY_GELU) return config->activation_function;
    if (!strcmp(key->name, "pad_token_id")) return config->pad_token_id != NO_ROW;
    if (key->kind == KEY_ROPE_TYPE && family_names_key(config->family, key->name)) return 1;
    if (key->kind == KEY_LAYER_TYPES && strcmp(config->family->layer_types, "s") != 0) return 1;
    if (!strcmp(key->name, "sliding_window") || key->kind == KEY_LAYER_TYPES)
        return config->layer_types[0] || family_names_key(config->family, "sliding_window");
    return !key->scaling || (key->scaling >> config->rope.type & 1);
}

// Reads a list of layers, "0+3+7" or "none", into one bit each. Returns 0 if the text has another form.
static int layers_from_text(const char *text, uint8_t layers[LAYER_TYPES_MAX / 8]) {
    memset(layers, 0, LAYER_TYPES_MAX / 8);
    for (const char *at = text; strcmp(text, "none") != 0;) {
        char *end;
        const unsigned long l = strtoul(at, &end, 10);
        if (*at < '0' || *at > '9' || l >= LAYER_TYPES_MAX || (*end && *end != '+')) return 0;
        layers[l / 8] |= (uint8_t)(1u << l % 8);
        if (!*end) break;
        at = end + 1;
    }
    return 1;
}

static void layers_to_text(const uint8_t layers[LAYER_TYPES_MAX / 8], char *text, size_t size) {
    size_t used = 0;
    for (size_t l = 0; l < LAYER_TYPES_MAX && used < size; l++)
        if (layers[l / 8] >> l % 8 & 1) used += (size_t)snprintf(text + used, size - used, "%s%zu", used ? "+" : "", l);
    if (!used) snprintf(text, size, "none");
}

// Sets one key from text. Error messages begin with `where` ("--init", a file name); the exit code is `code`.
static void config_set(Config *config, const char *name, const char *value, const char *where, int code) {
    const int index = config_key_find(name);
    const char *wanted = NULL; // the values that were expected, if the value is bad
    char letters[8];
    if (index < 0) {
        const char *nearest = NULL;
        size_t best = SIZE_MAX;
        for (size_t i = 0; i < CONFIG_KEYS; i++) spelling_compare(name, config_keys[i].name, &nearest, &best);
        die_with(code, "%s: unknown key '%.64s'%s; %s info --init %s shows the keys", where, name,
                 did_you_mean("", nearest), program_called(), config->family->name);
    }
    const ConfigKey *key = &config_keys[index];
    void *field = (char *)config + key->offset;
    double number = key->least;
    switch (key->kind) {
    case KEY_SIZE:
        if (!parse_size(value, (size_t *)field)) wanted = "a whole number";
        number = (double)*(size_t *)field;
        break;
    case KEY_DOUBLE:
        if (!parse_double(value, (double *)field)) wanted = "a number";
        number = *(double *)field;
        break;
    case KEY_BOOL:
        if (!parse_bool(value, (int *)field)) wanted = "true or false";
        break;
    case KEY_GELU:
        config->activation_function = !strcmp(value, gelu_names[1]);
        if (strcmp(value, gelu_names[config->activation_function]) != 0) wanted = "gelu_new or gelu_pytorch_tanh";
        break;
    case KEY_LAYERS:
        if (!layers_from_text(value, (uint8_t *)field)) wanted = "none or numbers of layers, such as 0+3+7";
        break;
    case KEY_ROPE_TYPE:
        for (config->rope.type = 0; strcmp(value, rope_type_names[config->rope.type]) != 0;)
            if (++config->rope.type == ROPE_TYPES)
                die_with(code, "%s: rope_type=%.64s is not supported; give default, linear, llama3 or yarn", where,
                         value);
        break;
    case KEY_LAYER_TYPES:
        snprintf(letters, sizeof(letters), "%s%s", config->family->layer_types,
                 config->family->bare_attention ? "" : "f");
        if (strlen(value) > LAYER_TYPES_MAX || value[strspn(value, letters)])
            die_with(code, "%s: layer_types=%.64s is not a pattern of at most %d letters %s%s", where, value,
                     LAYER_TYPES_MAX,
                     letters[0] == 'L'   ? "L (Mamba-2), F (attention), p (MLP), e (experts)"
                     : letters[0] == 'l' ? letters[1] == 'n' ? "l (linear), n (no rotary positions)" : "l (linear)"
                     : letters[0] == 'c' ? "c (convolution)"
                     : letters[0] == 'n' ? "n (no rotary positions)"
                     : letters[1] == 'n' ? "s (sliding), n (no rotary positions)"
                     : letters[1] == 'c' ? "s (sliding), c (convolution)"
                                         : "s (sliding)",
                     letters[0] == 'L' ? "" : " and f (full)");
        snprintf(config->layer_types, sizeof(config->layer_types), "%s", value);
    }
    if (wanted) die_with(code, "%s: %s=%.64s is not %s", where, name, value, wanted);
    if (number < key->least || number > key->most)
        die_with(code, "%s: %s=%.64s is out of range; give a number from %g to %g", where, name, value, key->least,
                 key->most);
    config->given[index] = 1;
}

static int config_given(const Config *config, const char *name) { return config->given[config_key_find(name)]; }

// Reads one "key=value" of a text. seen[i]: key i of config_keys occurred before
static void config_set_pair(Config *config, char *pair, uint8_t seen[CONFIG_KEYS_MOST], const char *where, int code) {
    char *equals = strchr(pair, '=');
    if (!equals || equals == pair) die_with(code, "%s: '%.64s' is not of the form key=value", where, pair);
    *equals = 0;
    int index = config_key_find(pair);
    if (index >= 0 && !family_has_key(config->family, config_keys[index].name))
        die_with(code, "%s: %s is not a key of %s; %s info --init %s shows the keys", where, pair, config->family->name,
                 program_called(), config->family->name);
    if (index >= 0 && seen[index]) die_with(code, "%s: %s is given twice; give it once", where, pair);
    config_set(config, pair, equals + 1, where, code);
    seen[index] = 1;
}

// Reads "key=value,key=value".
static void config_set_all(Config *config, const char *text, const char *where, int code) {
    char *copy = checked_strdup(text), *cursor = copy;
    uint8_t seen[CONFIG_KEYS_MOST] = {0};
    while (*cursor) {
        char *comma = strchr(cursor, ',');
        if (comma) *comma = 0;
        if (*cursor) config_set_pair(config, cursor, seen, where, code);
        if (!comma) break;
        cursor = comma + 1;
    }
    free(copy);
}

static Config config_defaults(const Family *family) {
    Config config = {.family = family, .rope = rope_unscaled, .partial_rotary_factor = 1};
    config.pad_token_id = NO_ROW, config.initializer_range = 0.02; // of every class
    config.decoder_sparse_step = config.n_group = config.topk_group = 1;
    config.norm_topk_prob = 1, config.routed_scaling_factor = 1,
    config.use_qk_norm = 1; // defaults where a family lacks a key
    config.embedding_multiplier = config.residual_multiplier = config.logits_scaling = 1;
    config.qk_scale_factor = config.output_multiplier = 1;
    config.rope_theta = 10000;
    config_set_all(&config, family->defaults, family->name, EXIT_RUNTIME);
    memset(config.given, 0, sizeof(config.given));
    return config;
}

// Returns the divisor and the cap of logits, which output_multiplier scales before the cap:
// z = cap tanh(logits m / cap) = m (cap / m) tanh(logits / (cap / m))
static double logits_divisor(const Config *c) { return c->logits_scaling / c->output_multiplier; }
static double logits_cap(const Config *c) { return c->final_logit_softcapping / c->output_multiplier; }

// Returns the upper bound of Mamba-2's time steps.
static double time_step_most(const Config *c) { return c->time_step_max > 0 ? c->time_step_max : INFINITY; }

// Returns the growth of queries with their position (Rotation in ops.h); 0: none
static double rotation_growth(const Config *config) {
    const ConfigKey *key = &config_keys[config_key_find("llama_4_scaling_beta")];
    return config_uses_key(config, key) ? config->rope.llama_4_scaling_beta : 0;
}

// How a layer mixes tokens: by attention to all or to a window, by a state alone, not at all
typedef enum { LAYER_FULL, LAYER_WINDOW, LAYER_LINEAR, LAYER_NONE, LAYER_KINDS } LayerKind;

static char layer_letter(const Config *config, size_t l) {
    return config->layer_types[0] ? config->layer_types[l % strlen(config->layer_types)] : 'f';
}

// Returns the letter of layer l's mixer: f full attention, s with a window, n full without rotary positions, l linear
// attention, c its convolution alone, b full and linear attention summed, p none, e none in a layer of experts.
static char mixer_letter(const Config *config, size_t l) { return (char)tolower(layer_letter(config, l)); }

// A capital letter: the layer has no MLP.
static int layer_has_mlp(const Config *config, size_t l) { return !isupper(layer_letter(config, l)); }

// Tells whether a state passes through layer l from token to token.
static int layer_has_state(const Config *config, size_t l) { return strchr("lcb", mixer_letter(config, l)) != NULL; }

static LayerKind layer_kind(const Config *config, size_t l) {
    const char type = mixer_letter(config, l);
    if (type == 'p' || type == 'e') return LAYER_NONE;
    return type == 'l' || type == 'c'              ? LAYER_LINEAR
           : type == 's' && config->sliding_window ? LAYER_WINDOW
                                                   : LAYER_FULL;
}

// Tells whether layer l rotates its queries and keys by position.
static int layer_rotates(const Config *config, size_t l) {
    return !config->family->learned_positions && !config->family->bare_attention && mixer_letter(config, l) != 'n';
}

static QkNorm config_qk_norm(const Config *config) {
    return config->use_qk_norm ? config->family->qk_norm : QK_NORM_NONE;
}

static int layer_is_linear(const Config *config, size_t l) { return layer_kind(config, l) == LAYER_LINEAR; }

// Tells whether layer l's MLP consists of experts.
static int layer_has_experts(const Config *config, size_t l) {
    if (strchr(config->family->layer_types, 'e')) return layer_letter(config, l) == 'e';
    return config->family->router && config->num_experts && layer_has_mlp(config, l) &&
           l >= config->first_k_dense_replace && (l + 1) % config->decoder_sparse_step == 0 &&
           (l >= LAYER_TYPES_MAX || !(config->mlp_only_layers[l / 8] >> l % 8 & 1));
}

// Counts the layers with experts before layer l; l = num_hidden_layers: in the whole model
static size_t expert_layers_before(const Config *config, size_t l) {
    size_t count = 0;
    for (size_t i = 0; i < l; i++) count += (size_t)layer_has_experts(config, i);
    return count;
}

// Returns the layer whose keys and values layer l reads: itself, or the last layer of its kind with keys and values of
// its own.
static size_t key_value_layer(const Config *config, size_t l) {
    const size_t own = config->num_hidden_layers - config->num_kv_shared_layers;
    if (l < own) return l;
    for (size_t i = own; i-- > 0;)
        if (layer_kind(config, i) == layer_kind(config, l)) return i;
    return l;
}

// Tells whether layers after layer l read its keys and values.
static int layer_lends(const Config *config, size_t l) {
    const size_t L = config->num_hidden_layers, own = L - config->num_kv_shared_layers;
    for (size_t i = l + 1; i < L && l < own; i++) // the last layer of its kind lends
        if (layer_kind(config, i) == layer_kind(config, l)) return i >= own;
    return 0;
}

// What a layer has, one bit each: linear attention in place of attention, or summed with it, or its convolution alone;
// experts; a window; keys and values of another layer; keys and values that other layers read; no mixer; no MLP
typedef enum {
    FORM_FULL = 0,
    FORM_LINEAR = 1,
    FORM_EXPERTS = 2,
    FORM_WINDOW = 4,
    FORM_BORROWS = 8,
    FORM_LENDS = 16,
    FORM_BOTH = 32,
    FORM_CONVOLUTION = 64,
    FORM_NO_MIXER = 128,
    FORM_NO_MLP = 256,
    LAYER_FORMS = 512
} LayerForm;

static unsigned layer_form(const Config *config, size_t l) {
    const LayerKind kind = layer_kind(config, l);
    const char mixer = mixer_letter(config, l);
    unsigned form = kind == LAYER_WINDOW ? FORM_WINDOW : kind == LAYER_NONE ? FORM_NO_MIXER : FORM_FULL;
    if (layer_has_state(config, l)) form |= FORM_LINEAR;
    if (mixer == 'b') form |= FORM_BOTH;
    if (mixer == 'c') form |= FORM_CONVOLUTION;
    if (!layer_has_mlp(config, l)) form |= FORM_NO_MLP;
    if (layer_has_experts(config, l)) form |= FORM_EXPERTS;
    if (!config->num_kv_shared_layers) return form;
    if (key_value_layer(config, l) != l) form |= FORM_BORROWS;
    return layer_lends(config, l) ? form | FORM_LENDS : form;
}

static size_t head_dim_of(const Config *c, unsigned form) {
    return form & FORM_WINDOW || !c->global_head_dim ? c->head_dim : c->global_head_dim;
}

static size_t key_value_heads_of(const Config *c, unsigned form) {
    return form & FORM_WINDOW || !c->num_global_key_value_heads || !c->attention_k_eq_v ? c->num_key_value_heads
                                                                                        : c->num_global_key_value_heads;
}

static size_t intermediate_size_of(const Config *c, unsigned form) {
    return c->use_double_wide_mlp && form & FORM_BORROWS ? 2 * c->intermediate_size : c->intermediate_size;
}

// Tells whether a layer's values are its keys before their norm.
static int values_are_keys(const Config *c, unsigned form) {
    return c->attention_k_eq_v && !(form & (FORM_WINDOW | FORM_BORROWS));
}

// Counts the layers of a kind before layer l; l = num_hidden_layers: in the whole model
static size_t layers_before(const Config *config, LayerKind kind, size_t l) {
    const size_t period = max_size(strlen(config->layer_types), 1);
    size_t whole = 0, rest = 0;
    // NOLINTBEGIN(clang-analyzer-core.DivideZero): a period is 1 at least
    for (size_t i = 0; i < period; i++) {
        whole += layer_kind(config, i) == kind;
        rest += i < l % period && layer_kind(config, i) == kind;
    }
    return l / period * whole + rest;
    // NOLINTEND(clang-analyzer-core.DivideZero)
}

// Counts the layers with a state.
static size_t layers_with_state(const Config *config) {
    size_t count = 0;
    for (size_t l = 0; l < config->num_hidden_layers; l++) count += (size_t)layer_has_state(config, l);
    return count;
}

static size_t layers_of_kind(const Config *config, LayerKind kind) {
    return layers_before(config, kind, config->num_hidden_layers);
}

// Returns the window of layer l; 0: no window
static size_t layer_window(const Config *config, size_t l) {
    return layer_kind(config, l) == LAYER_WINDOW ? config->sliding_window : 0;
}

// Returns how many elements of a head are rotated in a layer of this form. Proportional positions count all elements:
// elements outside the rotated share have angle 0.
static size_t rotary_width_of(const Config *config, unsigned form) {
    const size_t HD = head_dim_of(config, form);
    return config->family->proportional ? HD : (size_t)((double)HD * config->partial_rotary_factor);
}

static size_t rotary_width(const Config *config) { return rotary_width_of(config, 0); }

// Tells whether no layer of a model of linear and full attention rotates queries and keys.
static int config_has_no_rope(const Config *c) {
    return !strcmp(c->family->layer_types, "ln") && strchr(c->layer_types, 'n');
}

// Tells whether --rope-scaling can scale the positions.
static int config_can_scale(const Config *c) {
    const int own = c->kv_lora_rank && family_has_key(c->family, "llama_4_scaling_beta"); // YaRN of its own
    return !c->family->learned_positions && !c->family->plain_rope && !own && !config_has_no_rope(c);
}

#endif
