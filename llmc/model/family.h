/*
Model families: rows of `families`, with the defaults of the config class in transformers, switches and tensor names.
One decoder block covers them all; switches select its parts. presets.h has published models. To add a family, add a row
here, the config.json keys to refuse to hf_constants.h, and a golden model to the tests.
*/
#ifndef LLMC_FAMILY_H
#define LLMC_FAMILY_H
#include "llmc/ops/ops.h"

// The tensors of one layer, in their order in memory and in a flat .bin. A layer has the tensors of attention or of
// linear attention, the tensors of a dense MLP or of experts, and the common ones. Adjacent without padding are: q, k
// and v weights; their biases; gate and up; the first of linear attention. A file may hold these neighbours as one
// tensor (GPT-2's c_attn), and the driver may use them as one (gate and up).
// clang-format off
#define LAYER_TENSOR_LIST(_)                                                                                           \
    _(NORM1_WEIGHT) _(NORM1_BIAS)                                                                                      \
    /* attention */                                                                                                    \
    _(Q_WEIGHT) _(K_WEIGHT) _(V_WEIGHT) _(Q_BIAS) _(K_BIAS) _(V_BIAS) _(Q_NORM) _(K_NORM) _(O_WEIGHT) _(O_BIAS)        \
    /* linear attention; z of Mamba-2; q, k, v, or q alone if the family names IN_K_WEIGHT */                          \
    _(IN_GATE_WEIGHT) _(IN_QKV_WEIGHT) _(IN_K_WEIGHT) _(IN_V_WEIGHT)                                                   \
    _(IN_Z_WEIGHT) _(IN_B_WEIGHT) _(IN_A_WEIGHT) _(CONV_WEIGHT) _(DT_BIAS) _(A_LOG) _(GATED_NORM) _(OUT_WEIGHT)        \
    _(POST_NORM1) _(NORM2_WEIGHT) _(NORM2_BIAS)                                                                        \
    /* dense MLP */                                                                                                    \
    _(GATE_WEIGHT) _(UP_WEIGHT) _(GATE_BIAS) _(UP_BIAS) _(DOWN_WEIGHT) _(DOWN_BIAS)                                    \
    /* experts */                                                                                                      \
    _(ROUTER_WEIGHT) _(SHARED_SCALE_WEIGHT) _(SHARED_GATE_WEIGHT) _(SHARED_UP_WEIGHT) _(SHARED_DOWN_WEIGHT)            \
    _(EXPERTS_GATE_UP) _(EXPERTS_DOWN) _(POST_NORM2)                                                                   \
    /* attention; the last two of latent attention */                                                                  \
    _(SINKS) _(OUTPUT_GATE) _(QUERY_DOWN) _(KEY_VALUE_UP)                                                              \
    /* experts; the last three of experts next to a dense MLP */                                                       \
    _(ROUTER_BIAS) _(ROUTER_NORM) _(EXPERTS_SCALE) _(EXPERTS_GATE_UP_BIAS) _(EXPERTS_DOWN_BIAS)                        \
    _(DENSE_POST_NORM) _(EXPERTS_PRE_NORM) _(EXPERTS_POST_NORM)                                                        \
    /* the layer's own input */                                                                                        \
    _(INPUT_TABLE) _(INPUT_PROJECTION) _(INPUT_GATE) _(INPUT_OUT) _(INPUT_NORM)                                        \
    /* linear attention of Mamba-2: SKIP is D */                                                                       \
    _(CONV_BIAS) _(SKIP)

#define LAYER_TENSOR(T) T,
#define LAYER_TENSOR_NAME(T) const char *T;
typedef enum { LAYER_TENSOR_LIST(LAYER_TENSOR) LAYER_TENSORS } LayerTensor;

// What files call a layer's tensors. NULL: absent, or part of the tensor before it
typedef struct { LAYER_TENSOR_LIST(LAYER_TENSOR_NAME) } LayerNames;

// The tensors outside the layers: the first three precede the layers, the rest follow the layers
typedef enum {
    EMBEDDING,
    POSITION_EMBEDDING,
    INPUTS_NORM,
    FINAL_NORM_WEIGHT,
    FINAL_NORM_BIAS,
    LM_HEAD,
    MODEL_TENSORS
} ModelTensor;
// clang-format on

// No QK-norm; per head; over all heads; per head, after the rotary embedding; per head, without weights
typedef enum { QK_NORM_NONE, QK_NORM_HEADS, QK_NORM_WHOLE, QK_NORM_ROTATED, QK_NORM_BARE } QkNorm;

// What files call the tensors
typedef struct {
    const char *layer_prefix; // with one %zu
    const char *model[MODEL_TENSORS];
    LayerNames layer;
    const char *expert[3]; // gate, up and down in files with a tensor for each expert, with one %zu; without a gate up,
                           // NULL and down
    const char *router;    // the router in files with a tensor for each expert; NULL: as in `layer`
} TensorNames;

typedef struct {
    const char *name;         // name for --init
    const char *model_type;   // model_type in config.json
    const char *architecture; // Hugging Face's class
    const char *defaults;     // defaults of the config class; optional keys exist only in families that list them here
    const char *layer_types;  // letters of layer_types in addition to f (full attention): s, l, n, c; "": none
    NormKind norm;
    ActivationKind activation;
    QkNorm qk_norm;
    int learned_positions;  // position table instead of RoPE
    int qkv_bias;           // biases on q, k, v but not on the output projection, whatever attention_bias says
    int biases;             // biases on every linear layer
    int mlp_biases_too;     // attention_bias, use_bias in files, gives the MLP biases, too
    int no_output_bias;     // attention_bias covers only q, k, v
    int conv1d;             // files hold linear weights transposed
    int norm_offset;        // norms multiply by 1 + w
    int no_pre_norms;       // no norm before attention and MLP, which read the residual stream directly
    int post_norms;         // norms after attention and MLP, before the residual addition
    int linear_pre_norms;   // layers of linear attention have the norms before their branches instead
    int scaled_embeddings;  // embeddings are multiplied by sqrt(hidden_size)
    int head_gates;         // attention's output has a gate for each head, from a projection of its own
    int gated_attention;    // attention gates its output, by half of q_proj
    RouterKind router;      // layers may have experts
    double router_epsilon;  // RouterShape.epsilon
    int shared_scale;       // the shared expert is scaled by a logistic function of the token
    int expert_biases;      // the router and the products of experts have biases
    int expert_columns;     // files hold stacks of experts as [E, in, out]
    int experts_beside;     // experts are added to a dense MLP in the same layer
    int sinks;              // attention has a sink for each head
    int value_norm;         // values pass an RMSNorm without weight
    int unscaled_attention; // the factor of scores is 1
    int last_full;          // the last layer has full attention, whatever layer_types says
    int proportional;       // full attention rotates the first part of all pairs of a head
    int layer_scalars;      // a layer's output is multiplied by a number (Model.layer_scalar)
    int same_windows;       // sliding_window applies to all layers
    int interleaved;        // rotary pairs are neighbours, not elements half a head apart
    int plain_rope;         // rotary positions cannot be scaled
    int outer_norms;        // embeddings pass an RMSNorm without weight; the final norm lacks the layers' offset
    int ssd;                // linear attention is Mamba-2's
    int shared_dense;       // intermediate_size is the shared expert's width; without experts it is the MLP
    int bare_attention;     // attention has neither rotary positions nor biases
    const char *stored_as;  // prefix of names in folders, in place of layer_prefix's first part; NULL: the same
    int fused_heads;        // files fuse linear attention's inputs head by head (fused_rows)
    double gated_norm_eps;  // epsilon of linear attention's gated norm; 0: that of the other norms
    TensorNames names;
} Family;

// Returns the name of a layer's tensor after the layer's prefix, or NULL.
static const char *layer_name(const Family *family, int tensor) {
    return ((const char *const *)&family->names.layer)[tensor];
}

// Tells whether layers of the family may have linear attention.
static int family_has_linear(const Family *family) { return strpbrk(family->layer_types, "lL") != NULL; }

// Tells whether a shared expert without a scale is next to the chosen experts.
static int family_has_shared(const Family *family) {
    return family->names.layer.SHARED_DOWN_WEIGHT && !family->shared_scale && !family->shared_dense;
}

// Tells whether layers of Mamba-2 also have an MLP. The classes, Granite 4's and Bamba's, have mamba_expand and
// time_step_limit.
static int family_expands(const Family *family) { return family->ssd && !family->bare_attention; }

// Tells whether files give the number of shared experts, each as wide as another expert, not the width of all.
static int family_counts_shared(const Family *family) { return family_has_shared(family) && !family->bare_attention; }

// Returns the matrices of an expert's first product: gate and up, or up alone.
static size_t expert_parts(const Family *family) { return activation_width(family->activation, 1); }

// Tells whether layers of the family may mix tokens by a short convolution alone.
static int family_has_convolution(const Family *family) { return strchr(family->layer_types, 'c') != NULL; }

// clang-format off
// Part of LayerNames, in its order
#define LINEAR_NAMES .IN_QKV_WEIGHT = "linear_attn.in_proj_qkv.weight",                                                \
    .IN_Z_WEIGHT = "linear_attn.in_proj_z.weight", .IN_B_WEIGHT = "linear_attn.in_proj_b.weight",                      \
    .IN_A_WEIGHT = "linear_attn.in_proj_a.weight", .CONV_WEIGHT = "linear_attn.conv1d.weight",                         \
    .DT_BIAS = "linear_attn.dt_bias", .A_LOG = "linear_attn.A_log", .GATED_NORM = "linear_attn.norm.weight",           \
    .OUT_WEIGHT = "linear_attn.out_proj.weight"
#define FUSED_LINEAR_NAMES .IN_QKV_WEIGHT = "linear_attn.in_proj_qkvz.weight",                                         \
    .IN_B_WEIGHT = "linear_attn.in_proj_ba.weight", .CONV_WEIGHT = "linear_attn.conv1d.weight",                        \
    .DT_BIAS = "linear_attn.dt_bias", .A_LOG = "linear_attn.A_log", .GATED_NORM = "linear_attn.norm.weight",           \
    .OUT_WEIGHT = "linear_attn.out_proj.weight"
#define CONVOLUTION_NAMES .IN_QKV_WEIGHT = "conv.in_proj.weight", .CONV_WEIGHT = "conv.conv.weight",                   \
    .OUT_WEIGHT = "conv.out_proj.weight"
#define OLMO_LINEAR_NAMES .IN_QKV_WEIGHT = "linear_attn.q_proj.weight", .IN_K_WEIGHT = "linear_attn.k_proj.weight",    \
    .IN_V_WEIGHT = "linear_attn.v_proj.weight", .IN_Z_WEIGHT = "linear_attn.g_proj.weight",                            \
    .IN_B_WEIGHT = "linear_attn.b_proj.weight", .IN_A_WEIGHT = "linear_attn.a_proj.weight",                            \
    .CONV_WEIGHT = "linear_attn.conv1d.weight", .DT_BIAS = "linear_attn.dt_bias", .A_LOG = "linear_attn.A_log",        \
    .GATED_NORM = "linear_attn.o_norm.weight", .OUT_WEIGHT = "linear_attn.o_proj.weight"
#define ATTENTION_PRODUCTS .Q_WEIGHT = "self_attn.q_proj.weight", .K_WEIGHT = "self_attn.k_proj.weight",               \
    .V_WEIGHT = "self_attn.v_proj.weight", .Q_BIAS = "self_attn.q_proj.bias", .K_BIAS = "self_attn.k_proj.bias",       \
    .V_BIAS = "self_attn.v_proj.bias"
#define ATTENTION_OUTPUT .O_WEIGHT = "self_attn.o_proj.weight", .O_BIAS = "self_attn.o_proj.bias"
#define ATTENTION_NAMES ATTENTION_PRODUCTS, .Q_NORM = "self_attn.q_norm.weight",                                       \
    .K_NORM = "self_attn.k_norm.weight", ATTENTION_OUTPUT
#define MLP_NAMES .GATE_WEIGHT = "mlp.gate_proj.weight", .UP_WEIGHT = "mlp.up_proj.weight",                            \
    .GATE_BIAS = "mlp.gate_proj.bias", .UP_BIAS = "mlp.up_proj.bias", .DOWN_WEIGHT = "mlp.down_proj.weight",           \
    .DOWN_BIAS = "mlp.down_proj.bias"
#define LFM_MLP_NAMES .GATE_WEIGHT = "feed_forward.w1.weight", .UP_WEIGHT = "feed_forward.w3.weight",                  \
    .DOWN_WEIGHT = "feed_forward.w2.weight"
#define FUSED_MLP_NAMES .GATE_WEIGHT = "mlp.gate_up_proj.weight", .DOWN_WEIGHT = "mlp.down_proj.weight"
#define EXPERT_NAMES .EXPERTS_GATE_UP = "mlp.experts.gate_up_proj", .EXPERTS_DOWN = "mlp.experts.down_proj"
#define SHARED_EXPERT_NAMES .ROUTER_WEIGHT = "mlp.gate.weight",                                                        \
    .SHARED_SCALE_WEIGHT = "mlp.shared_expert_gate.weight",                                                            \
    .SHARED_GATE_WEIGHT = "mlp.shared_expert.gate_proj.weight",                                                        \
    .SHARED_UP_WEIGHT = "mlp.shared_expert.up_proj.weight",                                                            \
    .SHARED_DOWN_WEIGHT = "mlp.shared_expert.down_proj.weight", EXPERT_NAMES
#define SPLIT_NAMES {"mlp.experts.%zu.gate_proj.weight", "mlp.experts.%zu.up_proj.weight",                             \
    "mlp.experts.%zu.down_proj.weight"}
#define SHARED_EXPERTS_NAMES .ROUTER_WEIGHT = "mlp.gate.weight",                                                       \
    .SHARED_GATE_WEIGHT = "mlp.shared_experts.gate_proj.weight",                                                       \
    .SHARED_UP_WEIGHT = "mlp.shared_experts.up_proj.weight",                                                           \
    .SHARED_DOWN_WEIGHT = "mlp.shared_experts.down_proj.weight", EXPERT_NAMES
// Names of a layer with norms before attention and MLP: the part up to linear attention, and the second norm
#define BLOCK_NAMES .NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_NAMES
#define NORM2_NAME .NORM2_WEIGHT = "post_attention_layernorm.weight"
#define LLAMA_LAYER_NAMES {BLOCK_NAMES, NORM2_NAME, MLP_NAMES}
#define OLMO_LAYER_NAMES {ATTENTION_NAMES, .POST_NORM1 = "post_attention_layernorm.weight", MLP_NAMES,                 \
    .POST_NORM2 = "post_feedforward_layernorm.weight"}
#define LFM2_LAYER_NAMES .NORM1_WEIGHT = "operator_norm.weight", .Q_WEIGHT = "self_attn.q_proj.weight",                \
    .K_WEIGHT = "self_attn.k_proj.weight", .V_WEIGHT = "self_attn.v_proj.weight",                                      \
    .Q_NORM = "self_attn.q_layernorm.weight", .K_NORM = "self_attn.k_layernorm.weight",                                \
    .O_WEIGHT = "self_attn.out_proj.weight", CONVOLUTION_NAMES, .NORM2_WEIGHT = "ffn_norm.weight", LFM_MLP_NAMES
// Latent attention: Q_WEIGHT is the second product of queries; K_WEIGHT and V_WEIGHT make the latent and the shared key
#define LATENT_NAMES .Q_WEIGHT = "self_attn.q_b_proj.weight", .K_WEIGHT = "self_attn.kv_a_proj_with_mqa.weight",       \
    .Q_NORM = "self_attn.q_a_layernorm.weight", .K_NORM = "self_attn.kv_a_layernorm.weight",                           \
    .O_WEIGHT = "self_attn.o_proj.weight"
#define LATENT_BLOCK_NAMES .NORM1_WEIGHT = "input_layernorm.weight", LATENT_NAMES, NORM2_NAME, MLP_NAMES,              \
    SHARED_EXPERTS_NAMES, .QUERY_DOWN = "self_attn.q_a_proj.weight", .KEY_VALUE_UP = "self_attn.kv_b_proj.weight"
// Mamba-2 in a module MIXER "."
#define MAMBA_NAMES(MIXER) .IN_GATE_WEIGHT = MIXER "in_proj.weight", .CONV_WEIGHT = MIXER "conv1d.weight",             \
    .DT_BIAS = MIXER "dt_bias", .A_LOG = MIXER "A_log", .GATED_NORM = MIXER "norm.weight",                             \
    .OUT_WEIGHT = MIXER "out_proj.weight"
#define MAMBA_LAST_NAMES(MIXER) .CONV_BIAS = MIXER "conv1d.bias", .SKIP = MIXER "D"
// Nemotron's layers have one branch, whose parts have the prefix "mixer." in every kind of layer
#define NEMOTRON_LAYER_NAMES {.NORM1_WEIGHT = "norm.weight", .Q_WEIGHT = "mixer.q_proj.weight",                        \
    .K_WEIGHT = "mixer.k_proj.weight", .V_WEIGHT = "mixer.v_proj.weight", .O_WEIGHT = "mixer.o_proj.weight",           \
    MAMBA_NAMES("mixer."), .NORM2_WEIGHT = "norm.weight", .GATE_WEIGHT = "mixer.up_proj.weight",                       \
    .DOWN_WEIGHT = "mixer.down_proj.weight", .ROUTER_WEIGHT = "mixer.gate.weight",                                     \
    .SHARED_GATE_WEIGHT = "mixer.shared_experts.up_proj.weight",                                                       \
    .SHARED_DOWN_WEIGHT = "mixer.shared_experts.down_proj.weight", .EXPERTS_GATE_UP = "mixer.experts.up_proj",         \
    .EXPERTS_DOWN = "mixer.experts.down_proj", MAMBA_LAST_NAMES("mixer.")}
// Names of tensors in files, of all families except GPT-2. Arguments: the final norm; .layer, then .expert and .router
// of experts.
#define NAMES_WITH_NORM(FINAL, ...) .names = {.layer_prefix = "model.layers.%zu.", .model =                            \
    {"model.embed_tokens.weight", NULL, "model.per_layer_projection_norm.weight", FINAL, NULL, "lm_head.weight"},      \
    .layer = __VA_ARGS__}
#define TENSOR_NAMES(...) NAMES_WITH_NORM("model.norm.weight", __VA_ARGS__)

static const Family families[] = {
    {.name = "gpt2", .model_type = "gpt2", .architecture = "GPT2LMHeadModel",
     .defaults =
     "vocab_size=50257,max_position_embeddings=1024,hidden_size=768,num_hidden_layers=12,num_attention_heads=12,"
     "layer_norm_epsilon=1e-5,tie_word_embeddings=true",
     .layer_types = "", .norm = NORM_LAYER, .activation = ACTIVATION_GELU, .learned_positions = 1, .biases = 1,
     .conv1d = 1,
     .names = {.layer_prefix = "transformer.h.%zu.", .model =
     {"transformer.wte.weight", "transformer.wpe.weight", NULL, "transformer.ln_f.weight", "transformer.ln_f.bias",
      "lm_head.weight"}, .layer =
     {.NORM1_WEIGHT = "ln_1.weight", .NORM1_BIAS = "ln_1.bias",
      .Q_WEIGHT = "attn.c_attn.weight", .Q_BIAS = "attn.c_attn.bias", .O_WEIGHT = "attn.c_proj.weight",
      .O_BIAS = "attn.c_proj.bias", .NORM2_WEIGHT = "ln_2.weight", .NORM2_BIAS = "ln_2.bias",
      .GATE_WEIGHT = "mlp.c_fc.weight", .GATE_BIAS = "mlp.c_fc.bias", .DOWN_WEIGHT = "mlp.c_proj.weight",
      .DOWN_BIAS = "mlp.c_proj.bias"}}},
    {.name = "llama", .model_type = "llama", .architecture = "LlamaForCausalLM",
     .defaults =
     "vocab_size=32000,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-6,rope_theta=10000,mlp_bias=false",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "mistral", .model_type = "mistral", .architecture = "MistralForCausalLM",
     .defaults =
     "vocab_size=32000,hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=8,max_position_embeddings=131072,rms_norm_eps=1e-6,rope_theta=10000,sliding_window=4096,"
     "layer_types=s",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .same_windows = 1,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "ministral3", .model_type = "ministral3", .architecture = "Ministral3ForCausalLM",
     .defaults =
     "vocab_size=131072,hidden_size=4096,intermediate_size=14336,num_hidden_layers=34,num_attention_heads=32,"
     "num_key_value_heads=8,head_dim=128,max_position_embeddings=262144,rms_norm_eps=1e-5,rope_theta=1000000,"
     "layer_types=s,rope_type=yarn,factor=16,original_max_position_embeddings=16384,mscale=1,mscale_all_dim=1,"
     "llama_4_scaling_beta=0.1",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .same_windows = 1,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "qwen2", .model_type = "qwen2", .architecture = "Qwen2ForCausalLM",
     .defaults =
     "vocab_size=151936,hidden_size=4096,intermediate_size=22016,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=32,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qkv_bias = 1,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "qwen3", .model_type = "qwen3", .architecture = "Qwen3ForCausalLM",
     .defaults =
     "vocab_size=151936,hidden_size=4096,intermediate_size=22016,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=32,head_dim=128,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "gemma3", .model_type = "gemma3_text", .architecture = "Gemma3ForCausalLM",
     .defaults =
     "vocab_size=262208,hidden_size=2304,intermediate_size=9216,num_hidden_layers=26,num_attention_heads=8,"
     "num_key_value_heads=4,head_dim=256,max_position_embeddings=131072,rms_norm_eps=1e-6,rope_theta=1000000,"
     "tie_word_embeddings=true,sliding_window=4096,layer_types=sssssf,rope_local_base_freq=10000,"
     "query_pre_attn_scalar=256",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_GEGLU, .qk_norm = QK_NORM_HEADS, .norm_offset = 1,
     .post_norms = 1, .scaled_embeddings = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_NAMES,
      .POST_NORM1 = "post_attention_layernorm.weight", .NORM2_WEIGHT = "pre_feedforward_layernorm.weight", MLP_NAMES,
      .POST_NORM2 = "post_feedforward_layernorm.weight"})},
    {.name = "qwen3_5", .model_type = "qwen3_5_text", .architecture = "Qwen3_5ForCausalLM",
     .defaults =
     "vocab_size=248320,hidden_size=4096,intermediate_size=12288,num_hidden_layers=32,num_attention_heads=16,"
     "num_key_value_heads=4,head_dim=256,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,"
     "layer_types=lllf,partial_rotary_factor=0.25,linear_conv_kernel_dim=4,linear_key_head_dim=128,"
     "linear_value_head_dim=128,linear_num_key_heads=16,linear_num_value_heads=32",
     .layer_types = "l", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS, .norm_offset =
     1, .gated_attention = 1,
     TENSOR_NAMES({BLOCK_NAMES, LINEAR_NAMES, NORM2_NAME, MLP_NAMES})},
    {.name = "smollm3", .model_type = "smollm3", .architecture = "SmolLM3ForCausalLM",
     .defaults =
     "vocab_size=128256,hidden_size=2048,intermediate_size=11008,num_hidden_layers=36,num_attention_heads=16,"
     "num_key_value_heads=4,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=2000000,"
     "tie_word_embeddings=true,mlp_bias=false,layer_types=fffn",
     .layer_types = "n", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "olmo2", .model_type = "olmo2", .architecture = "Olmo2ForCausalLM",
     .defaults =
     "vocab_size=50304,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-5,rope_theta=10000",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_WHOLE,
     .no_pre_norms = 1, .post_norms = 1,
     TENSOR_NAMES(OLMO_LAYER_NAMES)},
    {.name = "olmo3", .model_type = "olmo3", .architecture = "Olmo3ForCausalLM",
     .defaults =
     "vocab_size=50304,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-5,rope_theta=500000,sliding_window=4096,layer_types=sssf,"
     "rope_local_base_freq=500000",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_WHOLE,
     .no_pre_norms = 1, .post_norms = 1,
     TENSOR_NAMES(OLMO_LAYER_NAMES)},
    {.name = "olmo_hybrid", .model_type = "olmo_hybrid", .architecture = "OlmoHybridForCausalLM",
     .defaults =
     "vocab_size=100352,hidden_size=3840,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=30,"
     "max_position_embeddings=65536,rms_norm_eps=1e-6,rope_theta=10000,layer_types=lllf,linear_conv_kernel_dim=4,"
     "linear_key_head_dim=96,linear_value_head_dim=192,linear_num_key_heads=30,linear_num_value_heads=30,"
     "linear_allow_neg_eigval=true",
     .layer_types = "ln", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_WHOLE,
     .no_pre_norms = 1, .post_norms = 1, .linear_pre_norms = 1, .gated_norm_eps = 1e-5,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_NAMES, OLMO_LINEAR_NAMES,
      .POST_NORM1 = "post_attention_layernorm.weight", .NORM2_WEIGHT = "post_attention_layernorm.weight", MLP_NAMES,
      .POST_NORM2 = "post_feedforward_layernorm.weight"})},
    {.name = "phi3", .model_type = "phi3", .architecture = "Phi3ForCausalLM",
     .defaults =
     "vocab_size=32064,hidden_size=3072,intermediate_size=8192,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=4096,rms_norm_eps=1e-5,rope_theta=10000,layer_types=s,partial_rotary_factor=1",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .same_windows = 1, .plain_rope = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", .Q_WEIGHT = "self_attn.qkv_proj.weight",
      .O_WEIGHT = "self_attn.o_proj.weight", .NORM2_WEIGHT = "post_attention_layernorm.weight", FUSED_MLP_NAMES})},
    {.name = "glm4", .model_type = "glm4", .architecture = "Glm4ForCausalLM",
     .defaults =
     "vocab_size=151552,hidden_size=4096,intermediate_size=13696,num_hidden_layers=40,num_attention_heads=32,"
     "num_key_value_heads=2,head_dim=128,max_position_embeddings=131072,rms_norm_eps=1.5625e-7,rope_theta=10000,"
     "attention_bias=true,partial_rotary_factor=0.5",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .no_output_bias = 1, .post_norms = 1,
     .interleaved = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_NAMES,
      .POST_NORM1 = "post_self_attn_layernorm.weight", .NORM2_WEIGHT = "post_attention_layernorm.weight",
      FUSED_MLP_NAMES, .POST_NORM2 = "post_mlp_layernorm.weight"})},
    {.name = "granite", .model_type = "granite", .architecture = "GraniteForCausalLM",
     .defaults =
     "vocab_size=32000,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-6,rope_theta=10000,mlp_bias=false,embedding_multiplier=1,"
     "attention_multiplier=1,residual_multiplier=1,logits_scaling=1",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "seed_oss", .model_type = "seed_oss", .architecture = "SeedOssForCausalLM",
     .defaults =
     "vocab_size=155136,hidden_size=4096,intermediate_size=27648,num_hidden_layers=64,num_attention_heads=80,"
     "num_key_value_heads=8,head_dim=128,max_position_embeddings=524288,rms_norm_eps=1e-6,rope_theta=10000,"
     "attention_bias=true,mlp_bias=false",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .no_output_bias = 1,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "hunyuan_v1_dense", .model_type = "hunyuan_v1_dense", .architecture = "HunYuanDenseV1ForCausalLM",
     .defaults =
     "vocab_size=290943,hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-5,rope_theta=10000,alpha=0",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_ROTATED,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_PRODUCTS,
      .Q_NORM = "self_attn.query_layernorm.weight", .K_NORM = "self_attn.key_layernorm.weight", ATTENTION_OUTPUT,
      .NORM2_WEIGHT = "post_attention_layernorm.weight", MLP_NAMES})},
    {.name = "ernie4_5", .model_type = "ernie4_5", .architecture = "Ernie4_5ForCausalLM",
     .defaults =
     "vocab_size=103424,hidden_size=1024,intermediate_size=3072,num_hidden_layers=18,num_attention_heads=16,"
     "num_key_value_heads=2,head_dim=128,max_position_embeddings=131072,rms_norm_eps=1e-5,rope_theta=500000,"
     "tie_word_embeddings=true",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .mlp_biases_too = 1, .interleaved = 1,
     TENSOR_NAMES(LLAMA_LAYER_NAMES)},
    {.name = "muse_glimmer", .model_type = "muse_glimmer_text", .architecture = "MuseGlimmerForConditionalGeneration",
     .defaults =
     "vocab_size=202048,hidden_size=6656,intermediate_size=19968,num_hidden_layers=52,num_attention_heads=32,"
     "num_key_value_heads=2,head_dim=128,max_position_embeddings=131072,rms_norm_eps=1e-5,rope_theta=10000,"
     "sliding_window=2048,layer_types=sssn,final_logit_softcapping=20,qk_scale_factor=3.87,"
     "output_multiplier=0.19611613513818404,post_norm_eps=1e-8",
     .layer_types = "sn", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_BARE, .norm_offset = 1,
     .post_norms = 1, .outer_norms = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_PRODUCTS, ATTENTION_OUTPUT,
      .POST_NORM1 = "post_attention_layernorm.weight", .NORM2_WEIGHT = "pre_feedforward_layernorm.weight", MLP_NAMES,
      .POST_NORM2 = "post_feedforward_layernorm.weight", .OUTPUT_GATE = "self_attn.gate_proj.weight"})},
    // intermediate_size: after the class's adjustment of 12288
    {.name = "lfm2", .model_type = "lfm2", .architecture = "Lfm2ForCausalLM",
     .defaults =
     "vocab_size=65536,hidden_size=2560,intermediate_size=8192,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=8,max_position_embeddings=128000,rms_norm_eps=1e-5,rope_theta=1000000,"
     "tie_word_embeddings=true,layer_types=f,linear_conv_kernel_dim=3",
     .layer_types = "c", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     NAMES_WITH_NORM("model.embedding_norm.weight", {LFM2_LAYER_NAMES})},
    {.name = "lfm3", .model_type = "lfm3", .architecture = "Lfm3ForCausalLM",
     .defaults =
     "vocab_size=128000,hidden_size=2048,intermediate_size=7680,num_hidden_layers=24,num_attention_heads=16,"
     "num_key_value_heads=4,head_dim=128,max_position_embeddings=128000,rms_norm_eps=1e-5,rope_theta=1000000,"
     "partial_rotary_factor=0.5,tie_word_embeddings=true,sliding_window=256,layer_types=ccfcscfc,"
     "rope_local_base_freq=10000,attention_bias=false,linear_conv_kernel_dim=7",
     .layer_types = "sc", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     .post_norms = 1, .head_gates = 1, .proportional = 1, .plain_rope = 1,
     NAMES_WITH_NORM("model.embedding_norm.weight", {.NORM1_WEIGHT = "operator_norm.weight", ATTENTION_NAMES,
      CONVOLUTION_NAMES, .POST_NORM1 = "post_operator_norm.weight", .NORM2_WEIGHT = "ffn_norm.weight", LFM_MLP_NAMES,
      .POST_NORM2 = "post_ffn_norm.weight", .OUTPUT_GATE = "self_attn.g_proj.weight"})},
    {.name = "qwen3_moe", .model_type = "qwen3_moe", .architecture = "Qwen3MoeForCausalLM",
     .defaults =
     "vocab_size=151936,hidden_size=2048,intermediate_size=6144,num_hidden_layers=24,num_attention_heads=32,"
     "num_key_value_heads=4,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,num_experts=128,"
     "num_experts_per_tok=8,moe_intermediate_size=768,norm_topk_prob=false,decoder_sparse_step=1,mlp_only_layers=none,"
     "router_aux_loss_coef=0.001",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     .router = ROUTER_SOFTMAX,
     TENSOR_NAMES({BLOCK_NAMES, NORM2_NAME, MLP_NAMES, .ROUTER_WEIGHT = "mlp.gate.weight", EXPERT_NAMES},
      .expert = SPLIT_NAMES)},
    {.name = "qwen3_5_moe", .model_type = "qwen3_5_moe_text", .architecture = "Qwen3_5MoeForCausalLM",
     .defaults =
     "vocab_size=248320,hidden_size=2048,num_hidden_layers=40,num_attention_heads=16,num_key_value_heads=2,"
     "head_dim=256,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,layer_types=lllf,"
     "partial_rotary_factor=0.25,linear_conv_kernel_dim=4,linear_key_head_dim=128,linear_value_head_dim=128,"
     "linear_num_key_heads=16,linear_num_value_heads=32,num_experts=256,num_experts_per_tok=8,"
     "moe_intermediate_size=512,shared_expert_intermediate_size=512,router_aux_loss_coef=0.001",
     .layer_types = "l", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS, .norm_offset =
     1, .gated_attention = 1, .router = ROUTER_SOFTMAX, .shared_scale = 1,
     TENSOR_NAMES({BLOCK_NAMES, LINEAR_NAMES, NORM2_NAME, SHARED_EXPERT_NAMES}, .expert = SPLIT_NAMES)},
    {.name = "qwen3_next", .model_type = "qwen3_next", .architecture = "Qwen3NextForCausalLM",
     .defaults =
     "vocab_size=151936,hidden_size=2048,intermediate_size=5632,num_hidden_layers=48,num_attention_heads=16,"
     "num_key_value_heads=2,head_dim=256,max_position_embeddings=32768,rms_norm_eps=1e-6,rope_theta=10000,"
     "layer_types=lllf,partial_rotary_factor=0.25,linear_conv_kernel_dim=4,linear_key_head_dim=128,"
     "linear_value_head_dim=128,linear_num_key_heads=16,linear_num_value_heads=32,num_experts=512,"
     "num_experts_per_tok=10,moe_intermediate_size=512,shared_expert_intermediate_size=512,norm_topk_prob=true,"
     "decoder_sparse_step=1,mlp_only_layers=none,router_aux_loss_coef=0.001",
     .layer_types = "l", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS, .norm_offset = 1,
     .gated_attention = 1, .router = ROUTER_SOFTMAX, .shared_scale = 1, .fused_heads = 1,
     TENSOR_NAMES({BLOCK_NAMES, FUSED_LINEAR_NAMES, NORM2_NAME, MLP_NAMES, SHARED_EXPERT_NAMES},
      .expert = SPLIT_NAMES)},
    {.name = "mixtral", .model_type = "mixtral", .architecture = "MixtralForCausalLM",
     .defaults =
     "vocab_size=32000,hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=8,max_position_embeddings=131072,rms_norm_eps=1e-5,rope_theta=1000000,layer_types=s,"
     "num_experts=8,num_experts_per_tok=2,router_aux_loss_coef=0.001",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .router = ROUTER_SOFTMAX,
     .same_windows = 1,
     TENSOR_NAMES({BLOCK_NAMES, NORM2_NAME, .ROUTER_WEIGHT = "mlp.gate.weight", EXPERT_NAMES}, .expert =
      {"block_sparse_moe.experts.%zu.w1.weight", "block_sparse_moe.experts.%zu.w3.weight",
       "block_sparse_moe.experts.%zu.w2.weight"}, .router = "block_sparse_moe.gate.weight")},
    {.name = "glm4_moe", .model_type = "glm4_moe", .architecture = "Glm4MoeForCausalLM",
     .defaults =
     "vocab_size=151552,hidden_size=4096,intermediate_size=10944,num_hidden_layers=46,num_attention_heads=96,"
     "num_key_value_heads=8,head_dim=128,max_position_embeddings=131072,rms_norm_eps=1e-5,rope_theta=10000,"
     "partial_rotary_factor=0.5,use_qk_norm=false,num_experts=128,num_experts_per_tok=8,moe_intermediate_size=1408,"
     "shared_expert_intermediate_size=1408,first_k_dense_replace=1,n_group=1,topk_group=1,norm_topk_prob=true,"
     "routed_scaling_factor=1",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     .no_output_bias = 1, .router = ROUTER_SIGMOID, .router_epsilon = 1e-20,
     TENSOR_NAMES({BLOCK_NAMES, NORM2_NAME, MLP_NAMES, SHARED_EXPERTS_NAMES}, .expert = SPLIT_NAMES)},
    {.name = "glm4_moe_lite", .model_type = "glm4_moe_lite", .architecture = "Glm4MoeLiteForCausalLM",
     .defaults =
     "vocab_size=154880,hidden_size=2048,intermediate_size=10240,num_hidden_layers=47,num_attention_heads=20,"
     "max_position_embeddings=202752,rms_norm_eps=1e-5,rope_theta=10000,q_lora_rank=768,kv_lora_rank=512,"
     "qk_nope_head_dim=192,qk_rope_head_dim=64,v_head_dim=256,num_experts=64,num_experts_per_tok=4,"
     "moe_intermediate_size=1536,shared_expert_intermediate_size=1536,mlp_only_layers=0,n_group=1,topk_group=1,"
     "norm_topk_prob=true,routed_scaling_factor=1.8",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .router = ROUTER_SIGMOID,
     .router_epsilon = 1e-20, .interleaved = 1,
     TENSOR_NAMES({LATENT_BLOCK_NAMES}, .expert = SPLIT_NAMES)},
    {.name = "deepseek_v3", .model_type = "deepseek_v3", .architecture = "DeepseekV3ForCausalLM",
     .defaults =
     "vocab_size=129280,hidden_size=7168,intermediate_size=18432,num_hidden_layers=61,num_attention_heads=128,"
     "max_position_embeddings=4096,rms_norm_eps=1e-6,rope_theta=10000,q_lora_rank=1536,kv_lora_rank=512,"
     "qk_nope_head_dim=128,qk_rope_head_dim=64,v_head_dim=128,num_experts=256,num_experts_per_tok=8,"
     "moe_intermediate_size=2048,shared_expert_intermediate_size=2048,first_k_dense_replace=3,n_group=8,topk_group=4,"
     "norm_topk_prob=true,routed_scaling_factor=2.5",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .router = ROUTER_SIGMOID,
     .router_epsilon = 1e-20, .interleaved = 1,
     TENSOR_NAMES({LATENT_BLOCK_NAMES}, .expert = SPLIT_NAMES)},
    {.name = "mistral4", .model_type = "mistral4", .architecture = "Mistral4ForCausalLM",
     .defaults =
     "vocab_size=131072,hidden_size=4096,intermediate_size=12288,num_hidden_layers=36,num_attention_heads=32,"
     "max_position_embeddings=1048576,rms_norm_eps=1e-6,rope_theta=10000,rope_type=yarn,factor=128,"
     "original_max_position_embeddings=8192,mscale=1,mscale_all_dim=1,llama_4_scaling_beta=0.1,q_lora_rank=1024,"
     "kv_lora_rank=256,qk_nope_head_dim=64,qk_rope_head_dim=64,v_head_dim=128,num_experts=128,num_experts_per_tok=4,"
     "moe_intermediate_size=2048,shared_expert_intermediate_size=2048,first_k_dense_replace=0,n_group=1,topk_group=1,"
     "norm_topk_prob=true,routed_scaling_factor=1",
     .layer_types = "", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .router = ROUTER_SOFTMAX,
     .interleaved = 1,
     TENSOR_NAMES({LATENT_BLOCK_NAMES})},
    {.name = "lfm2_moe", .model_type = "lfm2_moe", .architecture = "Lfm2MoeForCausalLM",
     .defaults =
     "vocab_size=65536,hidden_size=2048,intermediate_size=7168,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=8,max_position_embeddings=128000,rms_norm_eps=1e-5,rope_theta=1000000,"
     "tie_word_embeddings=true,layer_types=ccfc,linear_conv_kernel_dim=3,num_experts=32,num_experts_per_tok=4,"
     "moe_intermediate_size=1792,first_k_dense_replace=2,norm_topk_prob=true,routed_scaling_factor=1",
     .layer_types = "c", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .qk_norm = QK_NORM_HEADS,
     .router = ROUTER_SIGMOID, .router_epsilon = 1e-6,
     NAMES_WITH_NORM("model.embedding_norm.weight", {LFM2_LAYER_NAMES, .ROUTER_WEIGHT = "feed_forward.gate.weight",
      .EXPERTS_GATE_UP = "feed_forward.experts.gate_up_proj", .EXPERTS_DOWN = "feed_forward.experts.down_proj"},
      .expert = {"feed_forward.experts.%zu.w1.weight", "feed_forward.experts.%zu.w3.weight",
      "feed_forward.experts.%zu.w2.weight"})},
    {.name = "gpt_oss", .model_type = "gpt_oss", .architecture = "GptOssForCausalLM",
     .defaults =
     "vocab_size=201088,hidden_size=2880,intermediate_size=2880,num_hidden_layers=36,num_attention_heads=64,"
     "num_key_value_heads=8,head_dim=64,max_position_embeddings=131072,rms_norm_eps=1e-5,rope_theta=150000,"
     "attention_bias=true,sliding_window=128,layer_types=sf,rope_type=yarn,factor=32,"
     "original_max_position_embeddings=4096,truncate=false,num_experts=128,num_experts_per_tok=4,swiglu_alpha=1.702,"
     "swiglu_limit=7,router_aux_loss_coef=0.001",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_CLAMPED, .router = ROUTER_SOFTMAX,
     .expert_biases = 1, .expert_columns = 1, .sinks = 1,
     TENSOR_NAMES({BLOCK_NAMES, NORM2_NAME, .ROUTER_WEIGHT = "mlp.router.weight", EXPERT_NAMES,
      .SINKS = "self_attn.sinks", .ROUTER_BIAS = "mlp.router.bias",
      .EXPERTS_GATE_UP_BIAS = "mlp.experts.gate_up_proj_bias", .EXPERTS_DOWN_BIAS = "mlp.experts.down_proj_bias"})},
    {.name = "gemma4", .model_type = "gemma4_text", .architecture = "Gemma4ForCausalLM",
     .defaults =
     "vocab_size=262144,hidden_size=2304,intermediate_size=9216,num_hidden_layers=30,num_attention_heads=8,"
     "num_key_value_heads=4,head_dim=256,global_head_dim=512,num_global_key_value_heads=0,attention_k_eq_v=false,"
     "num_kv_shared_layers=0,use_double_wide_mlp=false,hidden_size_per_layer_input=256,"
     "vocab_size_per_layer_input=262144,max_position_embeddings=131072,rms_norm_eps=1e-6,rope_theta=1000000,"
     "partial_rotary_factor=0.25,tie_word_embeddings=true,sliding_window=512,layer_types=sssssf,"
     "rope_local_base_freq=10000,final_logit_softcapping=0,num_experts=0,num_experts_per_tok=1,"
     "moe_intermediate_size=1,pad_token_id=0",
     .layer_types = "s", .norm = NORM_RMS, .activation = ACTIVATION_GEGLU, .qk_norm = QK_NORM_HEADS, .post_norms = 1,
     .scaled_embeddings = 1, .router = ROUTER_SOFTMAX, .experts_beside = 1, .value_norm = 1, .unscaled_attention = 1,
     .last_full = 1, .proportional = 1, .layer_scalars = 1, .plain_rope = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_NAMES,
      .POST_NORM1 = "post_attention_layernorm.weight", .NORM2_WEIGHT = "pre_feedforward_layernorm.weight", MLP_NAMES,
      .ROUTER_WEIGHT = "router.proj.weight", .EXPERTS_GATE_UP = "experts.gate_up_proj",
      .EXPERTS_DOWN = "experts.down_proj", .POST_NORM2 = "post_feedforward_layernorm.weight",
      .ROUTER_NORM = "router.scale", .EXPERTS_SCALE = "router.per_expert_scale",
      .DENSE_POST_NORM = "post_feedforward_layernorm_1.weight",
      .EXPERTS_PRE_NORM = "pre_feedforward_layernorm_2.weight",
      .EXPERTS_POST_NORM = "post_feedforward_layernorm_2.weight", .INPUT_TABLE = "embed_tokens_per_layer.weight",
      .INPUT_PROJECTION = "per_layer_model_projection.weight", .INPUT_GATE = "per_layer_input_gate.weight",
      .INPUT_OUT = "per_layer_projection.weight", .INPUT_NORM = "post_per_layer_input_norm.weight"})},
    {.name = "nemotron_h", .model_type = "nemotron_h", .architecture = "NemotronHForCausalLM",
     .defaults =
     "vocab_size=131072,hidden_size=4096,intermediate_size=21504,num_hidden_layers=4,num_attention_heads=32,"
     "num_key_value_heads=8,head_dim=128,max_position_embeddings=4096,rms_norm_eps=1e-5,layer_types=LeFp,"
     "linear_num_key_heads=8,linear_num_value_heads=128,linear_key_head_dim=128,linear_value_head_dim=64,"
     "linear_conv_kernel_dim=4,time_step_min=0.001,num_experts=8,num_experts_per_tok=2,moe_intermediate_size=7688,"
     "shared_expert_intermediate_size=7688,n_group=1,topk_group=1,norm_topk_prob=true,routed_scaling_factor=1",
     .layer_types = "LFpe", .norm = NORM_RMS, .activation = ACTIVATION_RELU2, .router = ROUTER_SIGMOID,
     .router_epsilon = 1e-20, .plain_rope = 1, .ssd = 1, .bare_attention = 1, .stored_as = "backbone.",
     .names = {.layer_prefix = "model.layers.%zu.", .model =
     {"model.embeddings.weight", NULL, NULL, "model.norm_f.weight", NULL, "lm_head.weight"}, .layer =
     NEMOTRON_LAYER_NAMES, .expert = {"mixer.experts.%zu.up_proj.weight", NULL, "mixer.experts.%zu.down_proj.weight"}}},
    // moe_intermediate_size is the file's intermediate_size, intermediate_size its shared_intermediate_size
    {.name = "granitemoehybrid", .model_type = "granitemoehybrid", .architecture = "GraniteMoeHybridForCausalLM",
     .defaults =
     "vocab_size=32000,hidden_size=4096,intermediate_size=1024,num_hidden_layers=32,num_attention_heads=32,"
     "max_position_embeddings=2048,rms_norm_eps=1e-6,rope_theta=10000,layer_types=l,embedding_multiplier=1,"
     "attention_multiplier=1,residual_multiplier=1,logits_scaling=1,linear_num_key_heads=1,linear_num_value_heads=128,"
     "linear_key_head_dim=256,linear_value_head_dim=64,linear_conv_kernel_dim=4,time_step_min=0,time_step_max=0,"
     "num_experts=8,num_experts_per_tok=2,moe_intermediate_size=11008,router_aux_loss_coef=0.001",
     .layer_types = "ln", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .router = ROUTER_SOFTMAX, .ssd = 1,
     .shared_dense = 1,
     TENSOR_NAMES({.NORM1_WEIGHT = "input_layernorm.weight", ATTENTION_PRODUCTS, ATTENTION_OUTPUT,
      MAMBA_NAMES("mamba."), NORM2_NAME, .GATE_WEIGHT = "shared_mlp.input_linear.weight",
      .DOWN_WEIGHT = "shared_mlp.output_linear.weight",
      .ROUTER_WEIGHT = "block_sparse_moe.router.weight", .SHARED_GATE_WEIGHT = "shared_mlp.input_linear.weight",
      .SHARED_DOWN_WEIGHT = "shared_mlp.output_linear.weight",
      .EXPERTS_GATE_UP = "block_sparse_moe.experts.gate_up_proj",
      .EXPERTS_DOWN = "block_sparse_moe.experts.down_proj", MAMBA_LAST_NAMES("mamba.")})},
    {.name = "bamba", .model_type = "bamba", .architecture = "BambaForCausalLM",
     .defaults =
     "vocab_size=128000,hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,"
     "num_key_value_heads=8,max_position_embeddings=262144,rms_norm_eps=1e-5,rope_theta=10000,layer_types=l,"
     "partial_rotary_factor=0.5,mlp_bias=false,linear_num_key_heads=1,linear_num_value_heads=128,"
     "linear_key_head_dim=256,linear_value_head_dim=64,linear_conv_kernel_dim=4,time_step_min=0,time_step_max=0",
     .layer_types = "l", .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU, .ssd = 1,
     NAMES_WITH_NORM("model.final_layernorm.weight", {.NORM1_WEIGHT = "input_layernorm.weight",
      ATTENTION_PRODUCTS, ATTENTION_OUTPUT, MAMBA_NAMES("mamba."), .NORM2_WEIGHT = "pre_ff_layernorm.weight",
      .GATE_WEIGHT = "feed_forward.gate_proj.weight", .UP_WEIGHT = "feed_forward.up_proj.weight",
      .GATE_BIAS = "feed_forward.gate_proj.bias", .UP_BIAS = "feed_forward.up_proj.bias",
      .DOWN_WEIGHT = "feed_forward.down_proj.weight", .DOWN_BIAS = "feed_forward.down_proj.bias",
      MAMBA_LAST_NAMES("mamba.")})},
};
// clang-format on
#define FAMILIES (sizeof(families) / sizeof(families[0]))

// Returns a family of latent attention with the names of queries of full rank: one product, no norm.
static const Family *family_full_rank(const Family *family) {
    static Family made[FAMILIES];
    if (!family->names.layer.QUERY_DOWN) return family;
    Family *own = &made[family - families];
    *own = *family;
    own->names.layer.Q_WEIGHT = "self_attn.q_proj.weight";
    own->names.layer.Q_NORM = own->names.layer.QUERY_DOWN = NULL;
    return own;
}

#endif
