/*
The configuration of a model: one decoder block, described by numbers and a few switches, covers every family here.
Fields bear their Hugging Face names. A family is a row of `families`: its defaults (those of its config class in
transformers), its switches and the names of its tensors; a preset is a family with other numbers. The text form
"family,key=value,..." is used by --init, by presets and in the header of flat .bin files.
*/
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H
#include "utils.h"
#include <stddef.h>

typedef enum { NORM_RMS, NORM_LAYER } NormKind;
typedef enum { ACTIVATION_SWIGLU, ACTIVATION_GELU } ActivationKind; // gated silu; tanh-form GELU

typedef struct Family Family;

typedef struct {
    const Family *family;
    size_t vocab_size, hidden_size, intermediate_size, num_hidden_layers;
    size_t num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings;
    double norm_eps; // rms_norm_eps or layer_norm_epsilon
    double rope_theta, initializer_range;
    int tie_word_embeddings, attention_bias, mlp_bias;
    unsigned given; // bit i: key i of config_keys was set by hand, so it does not follow others
} Config;

typedef enum { KEY_SIZE, KEY_DOUBLE, KEY_BOOL } KeyKind;

typedef struct {
    const char *name, *alias; // common and original Hugging Face name
    KeyKind kind;
    size_t offset;
    double least, most; // allowed values, inclusive
} ConfigKey;

#define FIELD(name) offsetof(Config, name)
static const ConfigKey config_keys[] = {
    {"vocab_size", NULL, KEY_SIZE, FIELD(vocab_size), 2, 1 << 24},
    {"hidden_size", "n_embd", KEY_SIZE, FIELD(hidden_size), 1, 1 << 20},
    {"intermediate_size", "n_inner", KEY_SIZE, FIELD(intermediate_size), 1, 1 << 22},
    {"num_hidden_layers", "n_layer", KEY_SIZE, FIELD(num_hidden_layers), 1, 4096},
    {"num_attention_heads", "n_head", KEY_SIZE, FIELD(num_attention_heads), 1, 1 << 14},
    {"num_key_value_heads", NULL, KEY_SIZE, FIELD(num_key_value_heads), 1, 1 << 14},
    {"head_dim", NULL, KEY_SIZE, FIELD(head_dim), 1, 1024},
    {"max_position_embeddings", "n_positions", KEY_SIZE, FIELD(max_position_embeddings), 1, 1e9},
    {"rms_norm_eps", "layer_norm_epsilon", KEY_DOUBLE, FIELD(norm_eps), 0, 1},
    {"rope_theta", NULL, KEY_DOUBLE, FIELD(rope_theta), 1, 1e12},
    {"initializer_range", NULL, KEY_DOUBLE, FIELD(initializer_range), 0, 10},
    {"tie_word_embeddings", NULL, KEY_BOOL, FIELD(tie_word_embeddings), 0, 1},
    {"attention_bias", NULL, KEY_BOOL, FIELD(attention_bias), 0, 1},
    {"mlp_bias", NULL, KEY_BOOL, FIELD(mlp_bias), 0, 1},
};
#undef FIELD
#define CONFIG_KEYS (sizeof(config_keys) / sizeof(config_keys[0]))

// clang-format off
// The tensors of one layer, in the order in which they lie in memory and in a flat .bin. Query, key and value weights
// are neighbours without padding, and so are their biases and the gate and up projections: a file may hold neighbours
// as one tensor (GPT-2's c_attn), and the driver may use them as one (gate and up).
typedef enum {
    NORM1_WEIGHT, NORM1_BIAS,
    Q_WEIGHT, K_WEIGHT, V_WEIGHT, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, O_WEIGHT, O_BIAS,
    NORM2_WEIGHT, NORM2_BIAS,
    GATE_WEIGHT, UP_WEIGHT, GATE_BIAS, UP_BIAS, DOWN_WEIGHT, DOWN_BIAS,
    LAYER_TENSORS
} LayerTensor;
// clang-format on

// The tensors outside the layers: the first two come before them, the others after.
typedef enum { EMBEDDING, POSITION_EMBEDDING, FINAL_NORM_WEIGHT, FINAL_NORM_BIAS, LM_HEAD, MODEL_TENSORS } ModelTensor;

struct Family {
    const char *name;         // also Hugging Face's model_type
    const char *architecture; // Hugging Face's class
    const char *defaults;
    NormKind norm;
    ActivationKind activation;
    int learned_positions; // a position table instead of RoPE
    int qk_norm;
    int qkv_bias;             // biases on q, k, v but not on the output projection, whatever attention_bias says
    int biases;               // biases on every linear layer
    int conv1d;               // files hold linear weights transposed
    int head_dim_follows;     // head_dim = hidden_size / num_attention_heads unless given
    int kv_heads_follow;      // num_key_value_heads = num_attention_heads unless given
    const char *layer_prefix; // with one %zu
    const char *layer_names[LAYER_TENSORS]; // NULL: absent, or part of the tensor before it
    const char *model_names[MODEL_TENSORS];
};

// clang-format off
#define LLAMA_LAYER_NAMES                                                                                              \
    {"input_layernorm.weight", NULL, "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",  \
     "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.q_norm.weight",             \
     "self_attn.k_norm.weight", "self_attn.o_proj.weight", "self_attn.o_proj.bias",                                    \
     "post_attention_layernorm.weight", NULL, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.bias",      \
     "mlp.up_proj.bias", "mlp.down_proj.weight", "mlp.down_proj.bias"}
#define LLAMA_MODEL_NAMES {"model.embed_tokens.weight", NULL, "model.norm.weight", NULL, "lm_head.weight"}

static const Family families[] = {
    {"gpt2", "GPT2LMHeadModel",
     "vocab_size=50257,max_position_embeddings=1024,hidden_size=768,num_hidden_layers=12,num_attention_heads=12,"
     "layer_norm_epsilon=1e-5,initializer_range=0.02,tie_word_embeddings=true",
     NORM_LAYER, ACTIVATION_GELU, 1, 0, 0, 1, 1, 1, 1, "transformer.h.%zu.",
     {"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", NULL, NULL, "attn.c_attn.bias", NULL, NULL, NULL, NULL,
      "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", NULL, "mlp.c_fc.bias",
      NULL, "mlp.c_proj.weight", "mlp.c_proj.bias"},
     {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias",
      "lm_head.weight"}},
    {"llama", "LlamaForCausalLM",
     "vocab_size=32000,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-6,rope_theta=10000,initializer_range=0.02",
     NORM_RMS, ACTIVATION_SWIGLU, 0, 0, 0, 0, 0, 1, 1, "model.layers.%zu.", LLAMA_LAYER_NAMES, LLAMA_MODEL_NAMES},
    {"qwen2", "Qwen2ForCausalLM",
     "vocab_size=151936,hidden_size=4096,intermediate_size=22016,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=32,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,initializer_range=0.02",
     NORM_RMS, ACTIVATION_SWIGLU, 0, 0, 1, 0, 0, 1, 0, "model.layers.%zu.", LLAMA_LAYER_NAMES, LLAMA_MODEL_NAMES},
    {"qwen3", "Qwen3ForCausalLM",
     "vocab_size=151936,hidden_size=4096,intermediate_size=22016,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=32,head_dim=128,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,"
     "initializer_range=0.02",
     NORM_RMS, ACTIVATION_SWIGLU, 0, 1, 0, 0, 0, 0, 0, "model.layers.%zu.", LLAMA_LAYER_NAMES, LLAMA_MODEL_NAMES},
};
// clang-format on
#define FAMILIES (sizeof(families) / sizeof(families[0]))

// Shapes of published models, from their config.json.
typedef struct {
    const char *name, *family, *keys;
} Preset;

// clang-format off
#define LLAMA3 "vocab_size=128256,rms_norm_eps=1e-5,rope_theta=500000,"
#define QWEN25 "rope_theta=1000000,max_position_embeddings=32768,"
#define QWEN3  "rope_theta=1000000,max_position_embeddings=40960,"
static const Preset presets[] = {
    {"gpt2", "gpt2", ""},
    {"gpt2-medium", "gpt2", "hidden_size=1024,num_hidden_layers=24,num_attention_heads=16"},
    {"gpt2-large", "gpt2", "hidden_size=1280,num_hidden_layers=36,num_attention_heads=20"},
    {"gpt2-xl", "gpt2", "hidden_size=1600,num_hidden_layers=48,num_attention_heads=25"},
    {"llama3-8b", "llama",
     LLAMA3 "hidden_size=4096,intermediate_size=14336,num_key_value_heads=8,max_position_embeddings=8192"},
    {"llama3.1-8b", "llama",
     LLAMA3 "hidden_size=4096,intermediate_size=14336,num_key_value_heads=8,max_position_embeddings=131072"},
    {"llama3.1-70b", "llama",
     LLAMA3 "hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,num_attention_heads=64,"
            "num_key_value_heads=8,max_position_embeddings=131072"},
    {"llama3.2-1b", "llama",
     "vocab_size=128256,rms_norm_eps=1e-5,rope_theta=500000,hidden_size=2048,intermediate_size=8192,"
     "num_hidden_layers=16,num_key_value_heads=8,max_position_embeddings=131072,tie_word_embeddings=true"},
    {"llama3.2-3b", "llama",
     LLAMA3 "hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,"
            "num_key_value_heads=8,max_position_embeddings=131072,tie_word_embeddings=true"},
    {"qwen2.5-0.5b", "qwen2",
     QWEN25 "hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,"
            "num_key_value_heads=2,tie_word_embeddings=true"},
    {"qwen2.5-1.5b", "qwen2",
     QWEN25 "hidden_size=1536,intermediate_size=8960,num_hidden_layers=28,num_attention_heads=12,"
            "num_key_value_heads=2,tie_word_embeddings=true"},
    {"qwen2.5-3b", "qwen2",
     QWEN25 "hidden_size=2048,intermediate_size=11008,num_hidden_layers=36,num_attention_heads=16,"
            "num_key_value_heads=2,tie_word_embeddings=true"},
    {"qwen2.5-7b", "qwen2",
     QWEN25 "vocab_size=152064,hidden_size=3584,intermediate_size=18944,num_hidden_layers=28,num_attention_heads=28,"
            "num_key_value_heads=4"},
    {"qwen2.5-14b", "qwen2",
     QWEN25 "vocab_size=152064,hidden_size=5120,intermediate_size=13824,num_hidden_layers=48,num_attention_heads=40,"
            "num_key_value_heads=8"},
    {"qwen2.5-32b", "qwen2",
     QWEN25 "vocab_size=152064,hidden_size=5120,intermediate_size=27648,num_hidden_layers=64,num_attention_heads=40,"
            "num_key_value_heads=8"},
    {"qwen2.5-72b", "qwen2",
     QWEN25 "vocab_size=152064,hidden_size=8192,intermediate_size=29568,num_hidden_layers=80,num_attention_heads=64,"
            "num_key_value_heads=8"},
    {"qwen3-0.6b", "qwen3",
     QWEN3 "hidden_size=1024,intermediate_size=3072,num_hidden_layers=28,num_attention_heads=16,"
           "num_key_value_heads=8,tie_word_embeddings=true"},
    {"qwen3-1.7b", "qwen3",
     QWEN3 "hidden_size=2048,intermediate_size=6144,num_hidden_layers=28,num_attention_heads=16,"
           "num_key_value_heads=8,tie_word_embeddings=true"},
    {"qwen3-4b", "qwen3",
     QWEN3 "hidden_size=2560,intermediate_size=9728,num_hidden_layers=36,num_attention_heads=32,"
           "num_key_value_heads=8,tie_word_embeddings=true"},
    {"qwen3-8b", "qwen3",
     QWEN3 "hidden_size=4096,intermediate_size=12288,num_hidden_layers=36,num_attention_heads=32,"
           "num_key_value_heads=8"},
    {"qwen3-14b", "qwen3",
     QWEN3 "hidden_size=5120,intermediate_size=17408,num_hidden_layers=40,num_attention_heads=40,"
           "num_key_value_heads=8"},
    {"qwen3-32b", "qwen3",
     QWEN3 "hidden_size=5120,intermediate_size=25600,num_hidden_layers=64,num_attention_heads=64,"
           "num_key_value_heads=8"},
};
// clang-format on
#define PRESETS (sizeof(presets) / sizeof(presets[0]))

static inline const Family *family_find(const char *name) {
    size_t i;
    for (i = 0; i < FAMILIES; i++) {
        if (!strcmp(families[i].name, name)) return &families[i];
    }
    return NULL;
}

static inline int config_key_find(const char *name) {
    size_t i;
    for (i = 0; i < CONFIG_KEYS; i++) {
        if (!strcmp(config_keys[i].name, name) || (config_keys[i].alias && !strcmp(config_keys[i].alias, name)))
            return (int)i;
    }
    return -1;
}

// Whether the family's config class has the key. `name` is the common one.
static inline int family_has_key(const Family *family, const char *name) {
    if (!strcmp(name, "rope_theta")) return !family->learned_positions;
    if (!strcmp(name, "num_key_value_heads") || !strcmp(name, "head_dim")) return !family->biases;
    if (!strcmp(name, "attention_bias")) return !family->biases && !family->qkv_bias;
    if (!strcmp(name, "mlp_bias")) return !strcmp(family->name, "llama");
    return 1;
}

// family NULL: every key there is.
static inline const char *config_keys_text(const Family *family, char *text, size_t size) {
    size_t i, used = 0;
    *text = 0;
    for (i = 0; i < CONFIG_KEYS && used < size; i++)
        if (!family || family_has_key(family, config_keys[i].name))
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", config_keys[i].name);
    return text;
}

// Sets one key from text. `where` begins the error line ("--init", a file name); `code` is its exit code.
static inline void config_set(Config *config, const char *name, const char *value, const char *where, int code) {
    int index = config_key_find(name), ok;
    char *field, known[512];
    double number = 0;
    if (index < 0)
        die_with(code, "%s: unknown key '%s'; keys are %s", where, name, config_keys_text(NULL, known, sizeof(known)));
    field = (char *)config + config_keys[index].offset;
    switch (config_keys[index].kind) {
    case KEY_SIZE:
        ok = parse_size(value, (size_t *)(void *)field);
        number = ok ? (double)*(size_t *)(void *)field : 0;
        break;
    case KEY_DOUBLE:
        ok = parse_double(value, (double *)(void *)field);
        number = ok ? *(double *)(void *)field : 0;
        break;
    default: ok = parse_bool(value, (int *)(void *)field);
    }
    if (!ok)
        die_with(code, "%s: %s=%s is not %s", where, name, value,
                 config_keys[index].kind == KEY_BOOL   ? "true or false"
                 : config_keys[index].kind == KEY_SIZE ? "a whole number"
                                                       : "a number");
    if (config_keys[index].kind != KEY_BOOL && (number < config_keys[index].least || number > config_keys[index].most))
        die_with(code, "%s: %s=%s is out of range, %g to %g are allowed", where, name, value, config_keys[index].least,
                 config_keys[index].most);
    config->given |= 1u << index;
}

static inline int config_given(const Config *config, const char *name) {
    return (config->given >> config_key_find(name)) & 1u;
}

// Reads one "key=value" of a text; *seen has bit i where key i of config_keys stood in that text before.
static inline void config_set_pair(Config *config, char *pair, unsigned *seen, const char *where, int code) {
    char *equals = strchr(pair, '='), known[512];
    int index;
    if (!equals || equals == pair) die_with(code, "%s: '%s' is not of the form key=value", where, pair);
    *equals = 0;
    index = config_key_find(pair);
    if (index >= 0 && !family_has_key(config->family, config_keys[index].name))
        die_with(code, "%s: %s is not a key of %s, whose keys are %s", where, pair, config->family->name,
                 config_keys_text(config->family, known, sizeof(known)));
    if (index >= 0 && (*seen >> index & 1u)) die_with(code, "%s: %s is given twice", where, pair);
    config_set(config, pair, equals + 1, where, code);
    *seen |= 1u << index;
}

// Reads "key=value,key=value". The text is cut in place into a copy.
static inline void config_set_all(Config *config, const char *text, const char *where, int code) {
    char *copy = checked_strdup(text), *cursor = copy;
    unsigned seen = 0;
    while (*cursor) {
        char *comma = strchr(cursor, ',');
        if (comma) *comma = 0;
        if (*cursor) config_set_pair(config, cursor, &seen, where, code);
        if (!comma) break;
        cursor = comma + 1;
    }
    free(copy);
}

static inline Config config_defaults(const Family *family) {
    Config config;
    memset(&config, 0, sizeof(config));
    config.family = family;
    config_set_all(&config, family->defaults, family->name, EXIT_RUNTIME);
    config.given = 0;
    return config;
}

// Fills in what follows from other keys and refuses what cannot be a model.
static inline void config_finish(Config *config, const char *where, int code) {
    const Family *family = config->family;
    if (family->kv_heads_follow && !config_given(config, "num_key_value_heads"))
        config->num_key_value_heads = config->num_attention_heads;
    if (family->head_dim_follows && !config_given(config, "head_dim")) {
        if (config->hidden_size % config->num_attention_heads)
            die_with(code,
                     "%s: hidden_size %zu is not a multiple of num_attention_heads %zu, and head_dim is not given",
                     where, config->hidden_size, config->num_attention_heads);
        config->head_dim = config->hidden_size / config->num_attention_heads;
    }
    if (family->activation == ACTIVATION_GELU && !config_given(config, "intermediate_size"))
        config->intermediate_size = 4 * config->hidden_size;
    if (config->num_attention_heads % config->num_key_value_heads)
        die_with(code, "%s: num_attention_heads %zu is not a multiple of num_key_value_heads %zu", where,
                 config->num_attention_heads, config->num_key_value_heads);
    if (!family->learned_positions && config->head_dim % 2)
        die_with(code, "%s: head_dim %zu is odd, rotary positions need an even one", where, config->head_dim);
    if (family->biases && config->num_key_value_heads != config->num_attention_heads)
        die_with(code,
                 "%s: %s has as many key/value heads as heads: num_key_value_heads is %zu, num_attention_heads %zu",
                 where, family->name, config->num_key_value_heads, config->num_attention_heads);
    if (family->biases && config->head_dim * config->num_attention_heads != config->hidden_size)
        die_with(code, "%s: %s needs head_dim x num_attention_heads = hidden_size, not %zu x %zu = %zu", where,
                 family->name, config->head_dim, config->num_attention_heads, config->hidden_size);
    if (config->attention_bias && !family_has_key(family, "attention_bias"))
        die_with(code, "%s: attention_bias is not a key of %s, whose biases are fixed", where, family->name);
    if (config->mlp_bias && !family_has_key(family, "mlp_bias"))
        die_with(code, "%s: mlp_bias is a key of llama only, not of %s", where, family->name);
}

// "NAME" or "NAME,key=value,...": NAME is a preset or a family.
static inline Config config_from_text(const char *text, const char *where, int code) {
    char name[64];
    size_t length = strcspn(text, ","), i;
    const Preset *preset = NULL;
    const Family *family;
    Config config;
    if (length >= sizeof(name)) length = sizeof(name) - 1;
    memcpy(name, text, length);
    name[length] = 0;
    for (i = 0; i < PRESETS; i++) {
        if (!strcmp(presets[i].name, name)) preset = &presets[i];
    }
    family = family_find(preset ? preset->family : name);
    if (!family) {
        char known[1024] = "";
        for (i = 0; i < FAMILIES; i++)
            snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", families[i].name);
        for (i = 0; i < PRESETS; i++)
            if (!family_find(presets[i].name))
                snprintf(known + strlen(known), sizeof(known) - strlen(known), ", %s", presets[i].name);
        die_with(code, "%s: unknown model '%s'; families and presets are %s", where, name, known);
    }
    config = config_defaults(family);
    if (preset) config_set_all(&config, preset->keys, preset->name, EXIT_RUNTIME);
    if (text[strcspn(text, ",")]) config_set_all(&config, text + strcspn(text, ",") + 1, where, code);
    config_finish(&config, where, code);
    return config;
}

// The inverse: every key of the model, so that config_from_text gives it back to the bit.
static inline void config_to_text(const Config *config, char *text, size_t size) {
    size_t i, used = (size_t)snprintf(text, size, "%s", config->family->name);
    for (i = 0; i < CONFIG_KEYS && used < size; i++) {
        const void *field = (const char *)config + config_keys[i].offset;
        const char *name = config_keys[i].name;
        if (!family_has_key(config->family, name)) continue;
        if (config_keys[i].kind == KEY_SIZE)
            used += (size_t)snprintf(text + used, size - used, ",%s=%zu", name, *(const size_t *)field);
        else if (config_keys[i].kind == KEY_BOOL)
            used += (size_t)snprintf(text + used, size - used, ",%s=%s", name, *(const int *)field ? "true" : "false");
        else
            used += (size_t)snprintf(text + used, size - used, ",%s=%.17g", name, *(const double *)field);
    }
}

#endif
