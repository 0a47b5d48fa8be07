/*
Keys of a config.json with one value in every supported model of a family. Other values are refused by name; keys that
transformers needs are written.
*/
#ifndef LLMC_HF_CONSTANTS_H
#define LLMC_HF_CONSTANTS_H
#include "llmc/model/config_text.h"
#include "llmc/base/json.h"

typedef struct {
    const char *families; // names or activations, separated by "|"; NULL: any
    const char *key;
    const char *allowed; // allowed values, separated by "|"; NULL: any value
    const char *written; // JSON value to write; NULL: the key is not written
} HfConstant;

#define HF_SILU    "with silu" // all families with this activation
#define HF_GPT2    "with gelu_new"
#define HF_GEMMA   "with gelu_pytorch_tanh"
#define HF_RELU2   "with relu2"
#define HF_ANY     HF_SILU "|" HF_GPT2 "|" HF_GEMMA "|" HF_RELU2
#define HF_LATENT  "glm4_moe_lite|deepseek_v3|mistral4"
#define HF_GELU    "gelu_new|gelu_pytorch_tanh|gelu_accurate|gelu_python_tanh" // names of GELU by tanh
#define HF_DTYPES  "float32|float16|bfloat16|float64|auto"
#define NO_DROPOUT "0.0"
static const HfConstant hf_constants[] = {
    {NULL, "bos_token_id", NULL, "null"}, // the id is unknown here, so null replaces the class's default
    {NULL, "eos_token_id", NULL, "null"},
    {NULL, "use_cache", NULL, "true"},
    {"gpt2", "activation_function", HF_GELU, NULL},
    {"gpt2", "attn_pdrop", NULL, NO_DROPOUT},
    {"gpt2|phi3", "embd_pdrop", NULL, NO_DROPOUT},
    {"gpt2|phi3", "resid_pdrop", NULL, NO_DROPOUT},
    {"smollm3|qwen3_moe", "use_sliding_window", "false", "false"},
    {"gpt2", "scale_attn_weights", "true", NULL},
    {"gpt2", "scale_attn_by_inverse_layer_idx", "false", NULL},
    {"gpt2", "reorder_and_upcast_attn", "false", NULL},
    {HF_SILU, "hidden_act", "silu|swish", "\"silu\""},
    {HF_GEMMA, "hidden_activation", HF_GELU, "\"gelu_pytorch_tanh\""},
    {HF_SILU "|" HF_GEMMA "|" HF_RELU2, "attention_dropout", NULL, NO_DROPOUT},
    {HF_GEMMA, "attn_logit_softcapping", "null", "null"},
    {HF_GEMMA, "final_logit_softcapping", "null", "null"},
    {"gemma3", "use_bidirectional_attention", "false|null", "false"},
    {"gemma4", "use_bidirectional_attention", "null|vision", "null"}, // attention of text tokens is causal
    {HF_ANY, "is_causal", "true", NULL},                              // transformers reads it for any model
    {"gpt2", "add_cross_attention", "false", NULL},
    {HF_ANY, "is_encoder_decoder", "false", NULL},
    {HF_SILU "|" HF_GEMMA, "partial_rotary_factor", "1|null", NULL},
    {"muse_glimmer", "hidden_activation", "silu", "\"silu\""},
    {"lfm2|lfm2_moe|lfm3", "conv_bias", "false", "false"},
    {"lfm3", "use_sandwich_norm", "true", "true"},
    {"lfm3", "use_attention_gate", "true", "true"},
    {"lfm2_moe", "use_expert_bias", "true", "true"},
    {"lfm2", "block_auto_adjust_ff_dim", NULL, "false"}, // intermediate_size is written after it
    {"lfm2", "block_multiple_of", NULL, NULL},
    {"lfm2", "block_ffn_dim_multiplier", NULL, NULL},
    {"lfm2|lfm2_moe", "tie_embedding", NULL, NULL},
    {"lfm2", "block_ff_dim", NULL, NULL},
    {"seed_oss", "attention_dropout", "0", NULL},
    {"seed_oss", "residual_dropout", "0", NO_DROPOUT},
    {"seed_oss", "attention_out_bias", "false", "false"},
    {"qwen3_5|qwen3_5_moe", "attn_output_gate", "true|null", NULL},
    {"qwen3_5|qwen3_5_moe", "output_gate_type", "swish|silu", NULL}, // activation of linear attention's gated norm
    {"granitemoehybrid|bamba", "mamba_conv_bias", "true", "true"},
    {"granitemoehybrid|bamba", "mamba_proj_bias", "false", "false"},
    {"bamba", "z_loss_coefficient", "0", NULL}, // a loss in addition
    {"nemotron_h", "mlp_hidden_act", "relu2", "\"relu2\""},
    {"nemotron_h", "mamba_hidden_act", "silu", "\"silu\""},
    {"nemotron_h", "moe_latent_size", "null", NULL}, // latent experts
    {"nemotron_h", "use_conv_bias", "true", NULL},
    {"nemotron_h", "mamba_conv_bias", "true", NULL}, // its older name
    {"nemotron_h", "mamba_proj_bias", "false", NULL},
    {"nemotron_h", "use_bias", "false", NULL},
    {"nemotron_h", "mlp_bias", "false", NULL},
    {"nemotron_h", "attention_bias", "false", NULL},
    {"nemotron_h", "tie_word_embeddings", "false", NULL}, // its class ties nothing
    {"nemotron_h", "hidden_dropout", NULL, NO_DROPOUT},
    {"mixtral", "router_jitter_noise", "0", NULL},
    {HF_LATENT, "attention_bias", "false", "false"},
    {HF_LATENT, "rope_interleave", "true", "true"},
    {HF_LATENT, "pretraining_tp", "1|null", NULL},
    {HF_LATENT, "moe_layer_freq", "1", NULL}, // keys of the models' own code
    {"glm4_moe_lite|deepseek_v3", "scoring_func", "sigmoid", NULL},
    {"mistral4", "scoring_func", "softmax", NULL},
    // a folder may have further layers after the last one
    {"glm4_moe|nemotron_h|deepseek_v3", "num_nextn_predict_layers", NULL, "0"},
    {NULL, "dtype", HF_DTYPES, NULL},
    {NULL, "torch_dtype", HF_DTYPES, NULL}, // name of dtype before transformers 5
};
#define HF_CONSTANTS (sizeof(hf_constants) / sizeof(hf_constants[0]))

// Default of pad_token_id in a family's config class; null for other families. GPT-2's embedding ignores it.
static const struct {
    const char *family;
    int id;
} hf_pad_tokens[] = {
    {"ministral3", 11}, {"gemma3", 0},   {"gemma4", 0},    {"smollm3", 128004}, {"olmo2", 1},
    {"olmo3", 1},       {"phi3", 32000}, {"glm4", 151329}, {"seed_oss", 1},     {"hunyuan_v1_dense", 0},
    {"ernie4_5", 0},    {"lfm2", 0},     {"lfm2_moe", 0},  {"lfm3", 124893},    {"olmo_hybrid", 100277},
    {"bamba", 0},       {"mistral4", 11}};

// Tells whether a list of families names this family or the family's activation.
static int hf_names(const char *families, const Family *family) {
    static const char *const activations[] = {HF_SILU, HF_GPT2, HF_GEMMA, HF_SILU,
                                              HF_RELU2}; // indexed by ActivationKind
    return !families || text_is_one_of(family->name, families) ||
           text_is_one_of(activations[family->activation], families);
}

// Tells whether the family accepts only the table's values of a key. Optional keys that the family has are read as
// settings instead.
static int hf_applies(const HfConstant *c, const Family *family) {
    const int key = config_key_find(c->key);
    if (key >= 0 && config_keys[key].optional && family_has_key(family, c->key)) return 0;
    return hf_names(c->families, family);
}

// Keys that the classes of families call by another name; `older`: a name that they also read
static const struct {
    const char *families, *key, *name, *older;
} hf_renamed[] = {{"lfm2|lfm2_moe|lfm3", "rms_norm_eps", "norm_eps", NULL},
                  {"lfm2|lfm2_moe|lfm3", "linear_conv_kernel_dim", "conv_L_cache", NULL},
                  {"lfm2_moe", "first_k_dense_replace", "num_dense_layers", NULL},
                  {"nemotron_h", "linear_num_key_heads", "n_groups", "mamba_n_groups"},
                  {"nemotron_h", "linear_num_value_heads", "mamba_num_heads", NULL},
                  {"nemotron_h", "linear_key_head_dim", "ssm_state_size", NULL},
                  {"nemotron_h", "linear_value_head_dim", "mamba_head_dim", NULL},
                  {"nemotron_h", "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"},
                  {"nemotron_h", "time_step_min", "time_step_min", "mamba_dt_min"},
                  {"nemotron_h", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", NULL},
                  {"nemotron_h", "rms_norm_eps", "layer_norm_epsilon", NULL},
                  {"granitemoehybrid|bamba", "linear_num_key_heads", "mamba_n_groups", NULL},
                  {"granitemoehybrid|bamba", "linear_num_value_heads", "mamba_n_heads", NULL},
                  {"granitemoehybrid|bamba", "linear_key_head_dim", "mamba_d_state", NULL},
                  {"granitemoehybrid|bamba", "linear_value_head_dim", "mamba_d_head", NULL},
                  {"granitemoehybrid|bamba", "linear_conv_kernel_dim", "mamba_d_conv", NULL},
                  {"granitemoehybrid", "intermediate_size", "shared_intermediate_size", NULL},
                  {"granitemoehybrid", "moe_intermediate_size", "intermediate_size", NULL}};
#define HF_RENAMED (sizeof(hf_renamed) / sizeof(hf_renamed[0]))

// Returns the index of a key in hf_renamed, or HF_RENAMED.
static size_t hf_renamed_at(const Family *family, const char *key) {
    size_t i = 0;
    while (i < HF_RENAMED && (!text_is_one_of(family->name, hf_renamed[i].families) || strcmp(hf_renamed[i].key, key)))
        i++;
    return i;
}

// Returns the common name of a key of the file.
static const char *hf_common_name(const Family *family, const char *name) {
    for (size_t i = 0; i < HF_RENAMED; i++)
        if (text_is_one_of(family->name, hf_renamed[i].families) && !strcmp(hf_renamed[i].name, name))
            return hf_renamed[i].key;
    return name;
}

// Refuses null for keys for which transformers refuses null; read as absent, null would silently give the default. For
// a few keys null has a meaning: the value follows from other keys.
static void hf_check_nulls(const cJSON *root, const Family *family, const char *path) {
    static const char *const means[][2] = {
        {"head_dim", "llama|mistral|mixtral|seed_oss|ernie4_5"},
        {"num_key_value_heads", "llama|qwen2|qwen3|smollm3|olmo2|olmo3|phi3|granite|mixtral|seed_oss|ernie4_5|"
                                "hunyuan_v1_dense|olmo_hybrid|deepseek_v3|mistral4|granitemoehybrid|bamba"},
        {"q_lora_rank", HF_LATENT},
        {"linear_num_key_heads", "olmo_hybrid"},
        {"linear_num_value_heads", "olmo_hybrid"},
        {"linear_key_head_dim", "olmo_hybrid"},
        {"linear_value_head_dim", "olmo_hybrid"},
        {"mlp_only_layers", "qwen3_moe|qwen3_next"},
        {"intermediate_size", "gpt2"},
        {"final_logit_softcapping", "gemma4"},
        {"num_experts", "gemma4"},
        {"moe_intermediate_size", "gemma4"},
        {"num_global_key_value_heads", "gemma4"},
        {"hidden_size_per_layer_input", "gemma4"},
        {"attention_dropout", "llama|" HF_GEMMA}};
    static const char *const refuses[][2] = {
        {"use_cache", HF_ANY},
        {"use_sliding_window", "qwen2|qwen3"},
        {"max_window_layers", "qwen2|qwen3"},
        {"num_local_experts", "qwen3_moe|mixtral|glm4_moe|gpt_oss|granitemoehybrid|" HF_LATENT},
        {"n_routed_experts", "glm4_moe|" HF_LATENT},
        {"n_shared_experts", "glm4_moe|" HF_LATENT},
        {"original_max_position_embeddings", "phi3"}};
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        const char *common = hf_common_name(family, item->string);
        const int found = config_key_find(common), original = found >= 0 && strcmp(common, config_keys[found].name);
        const int index = original && !family->learned_positions ? -1 : found; // only GPT-2 has original names
        const char *name = index < 0 ? item->string : config_keys[index].name;
        int refused = index >= 0 && family_has_key(family, name) && !config_keys[index].scaling &&
                      !text_is_one_of(name, "rope_theta|rope_local_base_freq|layer_types|sliding_window|pad_token_id");
        for (size_t i = 0; i < sizeof(refuses) / sizeof(refuses[0]); i++)
            if (!strcmp(name, refuses[i][0])) refused = hf_names(refuses[i][1], family);
        for (const HfConstant *c = hf_constants; c < hf_constants + HF_CONSTANTS; c++)
            if (!strcmp(name, c->key) && c->families && hf_applies(c, family))
                refused = !c->allowed || !text_is_one_of("null", c->allowed);
        for (size_t i = 0; i < sizeof(means) / sizeof(means[0]); i++)
            if (!strcmp(name, means[i][0]) && hf_names(means[i][1], family)) refused = 0;
        if (refused && cJSON_IsNull(item))
            die("%s: %s is null, which transformers refuses; give its value, or leave it out for the default", path,
                item->string);
    }
}

// Tells whether a key is dropout that the class applies by default, in training. This program applies none.
static int hf_forbids_dropout(const HfConstant *c) {
    return c->allowed && !strcmp(c->allowed, "0") && strstr(c->key, "dropout");
}

// Refuses values that a family does not allow. `remark` gets a line if the file asks for dropout, which we do not
// apply, as is common in fine-tuning.
static void hf_check_constants(const cJSON *root, const Family *family, const char *path, char *remark, size_t size) {
    char value[64];
    *remark = 0;
    for (const HfConstant *c = hf_constants; c < hf_constants + HF_CONSTANTS; c++) {
        const cJSON *item = json_get(root, c->key);
        const int dropout = hf_forbids_dropout(c);
        if ((!item && !dropout) || !hf_applies(c, family)) continue;
        json_scalar_text(item, value, sizeof(value));
        if (!item || (c->allowed && !text_is_one_of(value, c->allowed)))
            die("%s: %s is %s; it must be %s%s", path, c->key, item ? value : "missing, which means 0.1", c->allowed,
                dropout ? ", since this program applies no dropout" : "");
        if (!*remark && c->written && !strcmp(c->written, NO_DROPOUT) && cJSON_IsNumber(item) && item->valuedouble > 0)
            snprintf(remark, size, "config.json asks for dropout (%s = %g); this program applies none", c->key,
                     item->valuedouble);
    }
}

#endif
