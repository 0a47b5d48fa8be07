/*
Wrong files of weights: each is refused with exit code 1 and one line that names the fault, before any computation.
Random damage is in test_fuzz.c.
*/
#include "test/base/damage.h"
#include "weight_files.h"

#define CONFIG_JSON "llama/config.json"
#define MODEL       "llama/" HF_SINGLE_FILE

// Repairs the length before a safetensors header, or the checksum of a flat header.
static void mend_weights(const char *path, char *bytes, size_t count, size_t before) {
    FlatHeader *header = (FlatHeader *)(void *)bytes;
    mend_safetensors(path, bytes, count, before);
    if (text_ends_with(path, "flat.bin") && count >= sizeof(*header)) header->checksum = flat_checksum(header);
}

// Copies golden folders for damage. Returns the suite that opens the folder of a row.
static DamageSuite golden_copies(const char *names) {
    const DamageSuite suite = {copy_goldens(names), open_and_read, NULL, mend_weights, 0};
    return suite;
}

// ---- changes of text ------------------------------------------------------------------------------------------------
#define CONFIG(golden, find, replace, words) CHANGED_TEXT(golden "/config.json", find, replace, words)
#define HEADER(find, replace, words)         CHANGED_TEXT(MODEL, find, replace, words)
#define TENSOR(golden, find, replace, words) CHANGED_TEXT(golden "/" HF_SINGLE_FILE, find, replace, words)
#define INDEX(find, replace, words)          CHANGED_TEXT("llama-sharded/" HF_INDEX_FILE, find, replace, words)
// Another value of a key; another shape or offsets of lm_head, the first tensor; another text instead of the metadata.
#define KEY(golden, key, was, is, words) CONFIG(golden, "\"" key "\": " was, "\"" key "\": " is, words)
#define SHAPE(is, words)                 HEADER("\"shape\":[131,40]", "\"shape\":" is, words)
#define OFFSETS(is, words)               HEADER("\"data_offsets\":[0,20960]", "\"data_offsets\":" is, words)
#define FIRST(name, type, shape, at, words)                                                                            \
    HEADER(METADATA, "{\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" at "}", words)
#define METADATA "{\"__metadata__\":{\"format\":\"pt\"}"

static const Damage changed_texts[] = {
    // kind of model
    CONFIG("llama", "\"LlamaForCausalLM\"", "\"Qwen2MoeForCausalLM\"", "architectures Qwen2MoeForCausalLM is not"),
    CONFIG("llama", "\"LlamaForCausalLM\"", "\"LlamaForCausalLM\", \"B\"", "architectures names more than one class"),
    CONFIG("llama", "\"LlamaForCausalLM\"", "\"\\n\"", "architectures ? is not"),
    KEY("llama", "model_type", "\"llama\"", "\"qwen2\"", "LlamaForCausalLM, but model_type says qwen2"),
    // computation
    CONFIG("llama", "\"silu\"", "\"gelu\"", "hidden_act is gelu; it must be silu"),
    CONFIG("gpt2", "\"gelu_new\"", "\"relu\"", "activation_function is relu"),
    KEY("gpt2", "scale_attn_weights", "true", "false", "scale_attn_weights is false"),
    KEY("gpt2", "scale_attn_by_inverse_layer_idx", "false", "true", "scale_attn_by_inverse_layer_idx is true"),
    KEY("gpt2", "reorder_and_upcast_attn", "false", "true", "reorder_and_upcast_attn is true"),
    KEY("gpt2", "add_cross_attention", "false", "true", "add_cross_attention is true"),
    // null, if transformers gives it no meaning
    KEY("llama", "rms_norm_eps", "1e-05", "null", "rms_norm_eps is null, which transformers refuses; give its"),
    KEY("llama", "attention_bias", "false", "null", "attention_bias is null"),
    KEY("llama", "hidden_act", "\"silu\"", "null", "hidden_act is null"),
    KEY("llama", "rope_theta", "10000.0", "null", "rope_parameters.rope_theta is null"),
    KEY("llama-sharded", "rope_theta", "10000.0", "null", "rope_theta is null; give its value"),
    KEY("gpt2", "layer_norm_epsilon", "1e-05", "null", "layer_norm_epsilon is null"),
    KEY("gpt2", "tie_word_embeddings", "true", "null", "tie_word_embeddings is null"),
    KEY("qwen3", "head_dim", "16", "null", "head_dim is null"),
    KEY("mistral", "num_key_value_heads", "2", "null", "num_key_value_heads is null"),
    KEY("llama", "use_cache", "true", "null", "use_cache is null, which transformers refuses"),
    KEY("qwen3", "attention_dropout", "0.0", "null", "attention_dropout is null"),
    KEY("gpt2", "add_cross_attention", "false", "null", "add_cross_attention is null"),
    KEY("phi3", "original_max_position_embeddings", "4096", "null", "original_max_position_embeddings is null"),
    KEY("llama", "rope_type", "\"default\"", "null", "rope_parameters.rope_type is null"),
    KEY("qwen3-yarn", "original_max_position_embeddings", "100", "null", "original_max_position_embeddings is null"),
    // the pad token
    KEY("llama", "pad_token_id", "null", "131", "pad_token_id is 131, outside of vocab_size 131; give"),
    KEY("llama", "pad_token_id", "null", "-132", "pad_token_id is -132, outside of vocab_size 131"),
    KEY("llama", "pad_token_id", "null", "\"1\"", "pad_token_id must be a number or null"),
    CONFIG("phi3", "\"pad_token_id\"", "\"was\"", "pad_token_id is 32000 (its class's default), outside of"),
    CONFIG("llama", "{", "{\"quantization_config\":{\"quant_method\":\"gptq\"},", "quantization_config (gptq)"),
    CONFIG("llama", "{", "{\"partial_rotary_factor\":0.5,", "partial_rotary_factor is 0.5"),
    KEY("llama", "dtype", "\"float32\"", "\"float8_e4m3fn\"", "dtype is float8_e4m3fn"),
    KEY("llama-sharded", "torch_dtype", "\"float32\"", "\"int8\"", "torch_dtype is int8"),
    // rotary positions
    KEY("llama", "rope_type", "\"default\"", "\"yarn\"", "rope_type yarn needs factor"),
    KEY("llama", "rope_type", "\"default\"", "\"dynamic\",\"factor\":2", "rope_parameters of type dynamic is not"),
    KEY("llama3", "low_freq_factor", "1.0", "4.0", "low_freq_factor 4 must be below high_freq_factor 4"),
    CONFIG("llama3", "\"high_freq_factor\": 4.0,", "", "rope_type llama3 needs high_freq_factor"),
    KEY("qwen3-yarn", "beta_fast", "16.0", "\"16\"", "beta_fast is the text"),
    CONFIG("qwen3-yarn", "\"beta_fast\": 16.0", "\"attention_factor\": 0", "attention_factor is 0"),
    CONFIG("llama", "\"rope_type\": \"default\"", "\"factor\": 8", "rope_parameters has a factor but no rope_type"),
    CONFIG("llama", "\"rope_type\": \"default\"", "\"full_attention\": {}", "rope_parameters.full_attention"),
    CONFIG("llama", "\"rope_type\": \"default\"", "\"partial_rotary_factor\": 0.25", "partial_rotary_factor is 0.25"),
    CONFIG("llama", "{", "{\"rope_theta\":500000,", "rope_theta is given twice"),
    CONFIG("olmo2", "{", "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0},",
           "transformers ignores rope_parameters if rope_scaling is given: rope_theta would be 10000, not 500000"),
    CONFIG("glm4", "{", "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0,\"partial_rotary_factor\":1.0},",
           "partial_rotary_factor would be 1, not 0.5"),
    CONFIG("ministral3", "\"rope_parameters\"", "\"rope_theta\": 10000.0, \"was\"",
           "ignores rope_theta without rope_parameters"),
    KEY("llama", "rope_theta", "10000.0", "-1", "rope_theta=-1 is out of range"),
    KEY("llama-sharded", "rope_scaling", "null", "{\"rope_type\": \"llama3\", \"factor\": 8.0}",
        "rope_type llama3 needs low_freq_factor"),
    KEY("llama-sharded", "rope_scaling", "null", "{\"type\": \"longrope\", \"factor\": 2.0}",
        "rope_scaling of type longrope is not supported"),
    KEY("llama-sharded", "rope_scaling", "null", "\"linear\"", "rope_scaling must be an object"),
    // windows
    CONFIG("qwen2", "\"full_attention\",\n    \"full_attention\"\n", "\"full_attention\",\n    \"sliding_attention\"\n",
           "layer_types has sliding_attention, but there is no sliding_window (or use_sliding_window is false)"),
    CONFIG("qwen2", "\"full_attention\",\n    \"full_attention\"\n", "\"full_attention\",\n    \"linear_attention\"\n",
           "layer_types: layer 2 is linear_attention"),
    KEY("gemma3", "sliding_window", "8", "null", "there is no sliding_window"),
    KEY("gemma3-linear", "sliding_window", "5", "null", "sliding_window is null, but layers have sliding attention"),
    CONFIG("mistral-full", "{", "{\"layer_types\":[\"sliding_attention\"],",
           "layer_types has sliding_attention, but there is no sliding_window"),
    CONFIG("mistral", "{", "{\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"],",
           "gives every layer the sliding_window"),
    // families with rotary positions and windows of their own
    KEY("phi3", "rope_type", "\"default\"", "\"longrope\"",
        "of type longrope is not supported for this family; supported: default"),
    KEY("phi3", "rope_type", "\"default\"", "\"yarn\",\"factor\":2", "of type yarn is not supported for this family"),
    KEY("granite", "residual_multiplier", "0.4", "0", "residual_multiplier=0 is out of range"),
    KEY("seed_oss", "attention_dropout", "0.0", "0.1", "attention_dropout is 0.1"),
    KEY("seed_oss", "residual_dropout", "0.0", "0.2",
        "residual_dropout is 0.20000000000000001; it must be 0, since this program applies no dropout"),
    KEY("seed_oss", "attention_out_bias", "false", "true", "attention_out_bias is true; it must be false"),
    CONFIG("seed_oss", "\"residual_dropout\": 0.0,", "", "residual_dropout is missing, which means 0.1; it must be 0"),
    KEY("hunyuan_v1_dense", "alpha", "50.0", "0", "rope_type dynamic needs alpha"),
    KEY("hunyuan_v1_dense", "head_dim", "10", "null", "head_dim is null"),
    KEY("hunyuan_v1_dense", "type", "\"dynamic\"", "\"longrope\"", "rope_scaling of type longrope is not supported"),
    KEY("llama3", "rope_type", "\"llama3\"", "\"dynamic\", \"alpha\": 50", "of type dynamic is not supported"),
    KEY("muse_glimmer", "final_logit_softcapping", "3.0", "0", "final_logit_softcapping must be above 0"),
    CONFIG("muse_glimmer", "      50000.0,\n      0", "      5.0,\n      0",
           "layer_rope_theta: the value of layer 2 must be 0 or rope_theta, 50000"),
    CONFIG("muse_glimmer", "\"layer_rope_theta\": [\n      50000.0,", "\"layer_rope_theta\": [\n      0,",
           "layer 0 has a sliding window, so it must have rotary positions here"),
    KEY("muse_glimmer", "sliding_window", "5", "null", "there is no sliding_window"),
    KEY("muse_glimmer", "hidden_activation", "\"silu\"", "\"gelu\"", "hidden_activation is gelu; it must be silu"),
    KEY("lfm2_moe", "use_expert_bias", "true", "false", "use_expert_bias is false; it must be true"),
    KEY("lfm3", "use_attention_gate", "true", "false", "use_attention_gate is false; it must be true"),
    KEY("lfm3", "rope_type", "\"proportional\"", "\"default\"", NULL), // its partial_rotary_factor does not count
    KEY("lfm3", "rope_type", "\"proportional\"", "\"linear\"",
        "of type linear is not supported for this family; supported: proportional|default"),
    KEY("lfm3", "sliding_window", "6", "null", "there is no sliding_window"),
    KEY("lfm3", "norm_eps", "1e-05", "1e-05, \"rms_norm_eps\": 0.01", "rms_norm_eps is another name of norm_eps here"),
    KEY("lfm2", "conv_bias", "false", "true", "conv_bias is true; it must be false"),
    KEY("lfm2", "conv_L_cache", "3", "9",
        "conv_L_cache: linear_conv_kernel_dim=9 is out of range; give a number from 1 to 8"),
    KEY("lfm2", "norm_eps", "1e-05", "null", "norm_eps is null"),
    KEY("lfm2", "block_multiple_of", "8", "0",
        "block_multiple_of and block_ffn_dim_multiplier must be numbers above 0"),
    KEY("lfm2", "tie_word_embeddings", "true", "true, \"tie_embedding\": false", "lm_head.weight"),
    KEY("lfm2", "block_auto_adjust_ff_dim", "true", "true, \"block_ff_dim\": 90",
        "tensor model.layers.0.feed_forward.w1.weight has shape [48, 36], but config.json asks for [64, 36]"),
    CONFIG("lfm2", "\"layer_types\": [\n    \"conv\",", "\"layer_types\": [\n    \"mamba\",",
           "layer_types: layer 0 is mamba, but must be full_attention|conv"),
    CONFIG("lfm2",
           "\"full_attn_idxs\": null,\n  \"hidden_size\": 36,\n  \"initializer_range\": 0.02,\n"
           "  \"intermediate_size\": 66,\n  \"layer_types\": [",
           "\"full_attn_idxs\": [true], \"hidden_size\": 36, \"intermediate_size\": 66, \"other\": [",
           "full_attn_idxs has an entry that is not a layer's number"),
    CONFIG("olmo_hybrid", "{",
           "{\"Infinity\": \"\\\"Infinity\", \"x\": [-Infinity, Infinity, {\"__float__\": \"Infinity\"}],", NULL),
    KEY("olmo_hybrid", "rms_norm_eps", "0.1", "Infinity", "rms_norm_eps=inf is not a number"),
    KEY("olmo_hybrid", "rms_norm_eps", "0.1", "{\"__float__\": \"Infinity\"}", "rms_norm_eps is an object"),
    KEY("olmo_hybrid", "rms_norm_eps", "0.1", "Infinit", "is not valid JSON"),
    CONFIG("olmo_hybrid", "\"full_attention\"", "\"linear_attention\"",
           "needs layers of linear attention (l) and of full"),
    KEY("olmo_hybrid", "linear_allow_neg_eigval", "true", "null", "linear_allow_neg_eigval is null"),
    KEY("olmo_hybrid", "linear_value_head_dim", "7", "6", "model.layers.0.linear_attn.v_proj.weight has shape"),
    CONFIG("olmo_hybrid", "{", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0},",
           NULL), // hides the null
    CONFIG("olmo_hybrid", "{", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0, \"rope_theta\": null},",
           NULL),
    KEY("olmo2", "rope_theta", "500000.0", "null", "rope_theta is null"),
    KEY("ernie4_5", "use_bias", "true", "false, \"attention_bias\": true",
        "does not have these tensors with this config.json: model.layers.0.mlp.down_proj.bias"),
    KEY("phi3", "partial_rotary_factor", "0.75", "0.625", "rotates 5 of head_dim 8 elements"),
    KEY("smollm3", "use_sliding_window", "false", "true", "use_sliding_window is true; it must be false"),
    KEY("ministral3", "sliding_window", "null", "0", "sliding_window 0 would mask every token"),
    KEY("olmo3", "hidden_act", "\"silu\"", "\"silu\", \"is_causal\": false", "is_causal is false; it must be true"),
    KEY("llama", "hidden_act", "\"silu\"", "\"silu\", \"is_causal\": null", "is_causal is null"),
    KEY("olmo3", "sliding_window", "5", "5, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}",
        "rope_scaling has a type but no rope_type, which Olmo3ForCausalLM needs"),
    CONFIG("smollm3", "\"no_rope_layers\": [\n    1,", "\"no_rope_layers\": [\n    2,",
           "the value of layer 0 must be 0 or 1"),
    CONFIG("smollm3", "\"no_rope_layers\": [\n    1,", "\"no_rope_layers\": [",
           "must be a list of 0 or 1 for each of 4"),
    CONFIG("ministral3", "\"llama_4_scaling_beta\": 0.3,", "", "rope_parameters has no llama_4_scaling_beta"),
    KEY("ministral3", "rope_type", "\"yarn\"", "\"linear\"", "llama_4_scaling_beta is 0.3 with rope_type linear"),
    KEY("olmo3", "rope_theta", "3000.0,\n      \"rope_type\": \"default\"", "3000.0,\n      \"rope_type\": \"linear\"",
        "rope_parameters.sliding_attention of type linear is not supported"),
    // variants of Gemma
    KEY("gemma3", "attn_logit_softcapping", "null", "50.0", "attn_logit_softcapping is 50; it must be null"),
    KEY("gemma3", "use_bidirectional_attention", "false", "true", "use_bidirectional_attention is true"),
    CONFIG("gemma3", "\"rope_parameters\": {", "\"rope_parameters\": {\"truncate\": false,",
           "truncate must not be false or null for all kinds"),
    KEY("gemma3", "rope_theta", "10000.0,\n      \"rope_type\": \"default\"",
        "10000.0,\n      \"rope_type\": \"linear\"",
        "rope_parameters.sliding_attention of type linear is not supported"),
    KEY("llama", "model_type", "\"llama\"", "\"llava\",\"text_config\":{\"model_type\":\"llama\"}",
        "is a model of images or sound and text, which is not supported; save its text model by itself, as "
        "LlamaForCausalLM"),
    KEY("llama", "model_type", "\"llama\"", "\"kimi_linear\",\"layer_types\":[\"linear_attention\"]",
        "model_type kimi_linear, a hybrid with layers of linear attention, is not in this version; "
        "families are gpt2, llama, mistral, ministral3, qwen2, qwen3, gemma3, qwen3_5, smollm3, olmo2, olmo3, "
        "olmo_hybrid, phi3, glm4, granite, seed_oss, hunyuan_v1_dense, ernie4_5, muse_glimmer"),
    KEY("llama", "model_type", "\"llama\"", "\"falcon_h1\"", "model_type falcon_h1 is not in this version"),
    KEY("llama", "model_type", "\"llama\"", "\"deepseek_v3\",\"n_routed_experts\":8",
        "model_type deepseek_v3, a mixture of experts, is not in this version"),
    // experts: their keys, and tensors of each or of all
    KEY("qwen3_moe", "num_local_experts", "5", "5, \"num_experts\": 4",
        "num_experts and num_local_experts are the same"),
    KEY("qwen3_moe", "num_local_experts", "5", "null", "num_local_experts is null"),
    KEY("qwen3_moe", "num_experts_per_tok", "2", "6", "num_experts_per_tok 6 must be at most num_experts 5"),
    KEY("qwen3_moe", "mlp_only_layers", "[", "[1.5,", "mlp_only_layers has an entry that is not a layer's number"),
    KEY("qwen3_moe", "use_sliding_window", "false", "true", "use_sliding_window is true; it must be false"),
    KEY("qwen3_moe", "mlp_only_layers", "[\n    1\n  ]", "null", "tensor model.layers.1.mlp.gate.weight is missing"),
    KEY("mixtral", "num_local_experts", "4", "0", "num_experts is 0, but must be at least 1, since mixtral"),
    KEY("mixtral", "router_jitter_noise", "0.0", "0.1", "router_jitter_noise is 0.10000000000000001; it must be"),
    KEY("glm4_moe", "n_group", "2", "6", "equal groups of num_experts 6 must hold num_experts_per_tok 2"),
    KEY("glm4_moe", "n_shared_experts", "2", "3",
        "shared_experts.gate_proj.weight has shape [40, 32], but config.json"),
    KEY("granitemoehybrid", "mamba_d_head", "8", "9", "mamba_n_heads 6 x mamba_d_head 9 must be mamba_expand x"),
    KEY("granitemoehybrid", "mamba_expand", "2", "0", "mamba_d_head 8 must be mamba_expand x hidden_size, 0"),
    CONFIG("granitemoehybrid", "1.1", "0.5", "time_step_limit must be a list of two numbers, the second above"),
    KEY("granitemoehybrid", "num_experts_per_tok", "2", "0", "num_experts_per_tok is 0, but must be at least 1"),
    KEY("granitemoehybrid", "mamba_conv_bias", "true", "false", "mamba_conv_bias is false; it must be true"),
    CONFIG("granitemoehybrid", "{", "{\"layers_block_type\": [\"moe\", \"mamba\", \"mamba\"],",
           "layer_types: layer 0 is moe, but must be"),
    KEY("granitemoehybrid", "shared_intermediate_size", "28", "null", "shared_intermediate_size is null"),
    KEY("granitemoehybrid", "mamba_d_head", "8", "\"auto\"", NULL),
    KEY("granitemoehybrid", "num_experts_per_tok", "2", "2, \"time_step_min\": 9", NULL), // no key of its class
    KEY("bamba", "z_loss_coefficient", "0.0", "0.1", "z_loss_coefficient is 0.10000000000000001; it must be 0"),
    CONFIG("bamba", "[\n    1\n  ]", "[\n    -1\n  ]", "attn_layer_indices has an entry that is not a layer's number"),
    KEY("bamba", "mamba_expand", "3", "3, \"layer_types\": [\"mamba\"]",
        "layer_types is no key of its class; give attn_layer_indices"),
    KEY("bamba", "mlp_bias", "true", "true, \"partial_rotary_factor\": 0.25", NULL), // the class ignores it
    KEY("glm4_moe_lite", "q_lora_rank", "8", "null", "q_lora_rank is null, queries of full rank"),
    KEY("glm4_moe_lite", "v_head_dim", "10", "8", "v_head_dim 8 must be qk_nope_head_dim + qk_rope_head_dim, 10"),
    KEY("glm4_moe_lite", "rope_interleave", "true", "false", "rope_interleave is false; it must be true"),
    KEY("glm4_moe_lite", "num_key_value_heads", "3", "1", "num_key_value_heads 1 must be num_attention_heads 3"),
    CONFIG("glm4_moe_lite", "\"dense\"", "\"wide\"", "the entry of layer 1 must be dense or sparse"),
    KEY("glm4_moe_lite", "kv_lora_rank", "10", "12", "kv_a_proj_with_mqa.weight has shape [14, 24], but config.json"),
    KEY("gpt_oss", "hidden_act", "\"silu\"", "\"gelu\"", "hidden_act is gelu; it must be"),
    KEY("gpt_oss", "num_local_experts", "5", "null", "num_local_experts is null"),
    KEY("gpt_oss", "num_local_experts", "5", "6", "router.weight has shape [5, 32], but config.json asks for [6, 32]"),
    KEY("gpt_oss", "swiglu_limit", "0.8", "0", "swiglu_limit=0 is out of range"),
    KEY("gpt_oss", "sliding_window", "6", "null", "layer_types has sliding_attention, but there is no sliding_window"),
    KEY("gpt_oss", "rope_type", "\"yarn\"", "\"longrope\"", "rope_parameters of type longrope is not supported"),
    TENSOR("gpt_oss", "[5,32,40]", "[5,40,32]",
           "gate_up_proj has shape [5, 40, 32], but config.json asks for [5, 32, 40]"),
    TENSOR("gpt_oss", "[5,40]", "[200]", "gate_up_proj_bias has shape [200], but config.json asks for [5, 40]"),
    TENSOR("gpt_oss", "experts.down_proj\"", "experts.down_proj_blocks\"",
           "down_proj_blocks is F32 [5, 20, 32], but config.json asks for U8"),
    TENSOR("gpt_oss", "self_attn.sinks", "self_attn.sink", "layers.0.self_attn.sinks is missing"),
    TENSOR("qwen3_moe", "experts.3.up_proj", "experts.9.up_proj", "layers.0.mlp.experts.3.up_proj.weight is missing"),
    TENSOR("qwen3_moe", "[32,24]", "[24,32]",
           "layers.0.mlp.experts.0.down_proj.weight has shape [24, 32], but config.json"),
    TENSOR("qwen3_moe", "experts.0.down_proj.weight", "experts.down_proj", "experts.0.down_proj.weight is missing"),
    TENSOR("qwen3_moe", "\"__metadata__\"",
           "\"model.layers.0.mlp.experts.gate_up_proj\":{\"dtype\":\"F32\","
           "\"shape\":[0],\"data_offsets\":[0,0]},\"__metadata__\"",
           "layers.0.mlp.experts.gate_up_proj has shape [0], but config.json asks for [5, 48, 32]"),
    TENSOR("qwen3_moe-fused", "experts.down_proj", "experts.0.down_proj.weight",
           "layers.1.mlp.experts.down_proj is missing"),
    TENSOR("glm4_moe", "e_score_correction_bias", "e_score_correction", "gate.e_score_correction_bias is missing"),
    KEY("gemma4-e", "final_logit_softcapping", "2.5", "0", "final_logit_softcapping is 0, which makes every logit 0"),
    KEY("gemma4-e", "use_bidirectional_attention", "null", "\"all\"", "use_bidirectional_attention is all; it must be"),
    KEY("gemma4-e", "num_kv_shared_layers", "3", "4",
        "layer 1 shares keys and values, but no earlier layer of its kind"),
    KEY("gemma4-e", "enable_moe_block", "false", "true", "enable_moe_block is true, so num_experts, top_k_"),
    CONFIG(
        "gemma4-e", "\"1\": {\n      \"head_dim\": 16", "\"1\": {\n      \"head_dim\": 8",
        "per_layer_config: layer 4 needs the head_dim and num_key_value_heads of the other layers with full attention"),
    CONFIG("gemma4-e", "\"1\": {", "\"7\": {}, \"1\": {",
           "per_layer_config has a key that is not a layer number below 5"),
    CONFIG("gemma4-e", "\"1\": {", "\"1\": {\"sliding_window\": 3, ", "per_layer_config: layer 1 has sliding_window"),
    CONFIG("gemma4-e", "\"1\": {\n      \"head_dim\": 16\n    },\n    \"4\": {\n      \"head_dim\": 16",
           "\"1\": {\"num_key_value_heads\": 1}, \"04\": {\"num_key_value_heads\": 1",
           "1 num_key_value_heads in full attention, 2 else, are supported only with attention_k_eq_v"),
    TENSOR("gemma4-e", "layers.3.layer_scalar", "layers.3.layer_scale.", "layers.3.layer_scalar is missing"),
    TENSOR("gemma4-e", "[103,40]", "[40,103]", "embed_tokens_per_layer.weight has shape [40, 103], but config.json"),
    KEY("llama", "model_type", "\"llama\"", "\"gemma3n\",\"text_config\":{}",
        "model_type gemma3n is not in this version"),
    CONFIG("qwen2", "\"full_attention\",\n", "", "layer_types names 2 layers, but num_hidden_layers is 3"),
    // numbers
    CONFIG("llama", "\"hidden_size\": 40,", "", "hidden_size is missing"),
    KEY("gpt2", "n_head", "3,", "null,", "n_head is null, which transformers refuses"),
    CONFIG("gpt2", "\"n_positions\": 64,", "", "max_position_embeddings (or n_positions) is missing"),
    CONFIG("llama", "\"intermediate_size\": 88,", "", "intermediate_size is missing"),
    CONFIG("llama", "\"vocab_size\": 131", "\"x\": 131", "vocab_size is missing"),
    KEY("llama", "hidden_size", "40", "-40", "hidden_size=-40 is not a whole number"),
    KEY("llama", "hidden_size", "40", "40.5", "hidden_size=40.5 is not a whole number"),
    KEY("llama", "hidden_size", "40", "\"40\"", "hidden_size is the text \"40\", but must be a number"),
    KEY("llama", "hidden_size", "40", "4000000000", "hidden_size=4000000000 is out of range"),
    KEY("llama", "num_hidden_layers", "2", "3", "model.layers.2.input_layernorm.weight is missing"),
    KEY("llama", "num_hidden_layers", "2", "1",
        "LlamaForCausalLM does not have these tensors with this config.json: model.layers.1.input_layernorm.weight, "
        "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight and 6 more, all beginning with "
        "model.layers.1."),
    KEY("llama", "num_key_value_heads", "2", "3", "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    KEY("qwen2", "num_key_value_heads", "2", "null", "[16, 32], but config.json asks for [32, 32]"),
    KEY("llama", "head_dim", "10", "9", "head_dim 9 must be even"),
    KEY("llama", "vocab_size", "131", "132", "[131, 40], but config.json asks for [132, 40]"),
    KEY("llama", "tie_word_embeddings", "false", "0", "tie_word_embeddings is 0, but must be true or false"),
    KEY("llama", "attention_bias", "false", "true", "q_proj.bias is missing"),
    KEY("llama-tied", "tie_word_embeddings", "true", "false", "lm_head.weight is missing"),
    CONFIG("gpt2", "\"n_embd\": 24", "\"hidden_size\": 32, \"n_embd\": 24", "hidden_size and n_embd are the same"),
    KEY("gpt2", "n_head", "3", "5", "hidden_size 24 is not a multiple of num_attention_heads 5"),
    // the text of config.json
    CONFIG("llama", "}\n", "", "config.json: is not valid JSON; correct the error near byte"),
    CONFIG("llama", "{", "[{", "config.json: is not valid JSON"),
    CONFIG("llama", "\"silu\"", "\"si\xed\xa0\x80lu\"", "is not UTF-8"),
    CONFIG("llama", "\"silu\"", "\"si\001lu\"", "is not UTF-8"),
    CONFIG("llama", "\"mlp_bias\": false", "\"hidden_size\": 40", "the key \"hidden_size\" is given twice"),
    CONFIG("llama", "\"mlp_bias\": false", "\"a\\u001bb\": 1", "a key has a control character"),
    // the header of a safetensors file
    HEADER("model.norm.weight", "model.norm.w",
           "tensor model.norm.weight is missing; there are model.norm.w; take the original model, not wrapped or"),
    HEADER("\"__metadata__\":{\"format\":\"pt\"}", "\"extra\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}",
           "LlamaForCausalLM does not have these tensors with this config.json: extra"),
    HEADER("\"F32\"", "\"I32\"", "lm_head.weight has dtype I32; F32, F16,"),
    HEADER("\"dtype\":\"F32\",\"shape\":[131,40]", "\"dtype\":\"F8_E4M3\",\"shape\":[131,160]",
           "lm_head.weight has shape [131, 160]"),
    HEADER("\"F32\"", "32", "lm_head.weight has no dtype"),
    SHAPE("[40,131]", "lm_head.weight has shape [40, 131], but config.json asks for [131, 40]"),
    SHAPE("[131,41]", "lm_head.weight: data_offsets span 20960 bytes, which is not the size of shape [131, 41] in F32"),
    SHAPE("[131,-40]", "lm_head.weight: its shape has an entry that is not a whole"),
    SHAPE("[4611686018427387904,4]", "lm_head.weight: its shape has an entry"),
    SHAPE("[8,17031093,33847548851]", "which is not the size of shape"),
    HEADER("\"shape\":[40],\"data_offsets\":[165440,165600]", "\"shape\":[40,1],\"data_offsets\":[165440,165600]",
           "model.norm.weight has shape [40, 1], but config.json asks for [40]"),
    SHAPE("[1,1,1,1,1,1,1,131,40]", "lm_head.weight has more dimensions than the supported 8"),
    SHAPE("{}", "lm_head.weight has no shape"), OFFSETS("[0,20960,0]", "data_offsets are not two numbers"),
    OFFSETS("[20960,0]", "[20960, 0] end before they begin"),
    OFFSETS("[-1,20959]", "data_offsets has an entry that is not a whole"),
    OFFSETS("[4,20964]", "bytes 0 to 4 of the data, before tensor lm_head.weight, belong to no tensor"),
    HEADER("\"data_offsets\":[20960,41920]", "\"data_offsets\":[20959,41919]", "overlaps tensor lm_head.weight"),
    HEADER("\"data_offsets\":[165440,165600]", "\"data_offsets\":[165600,165760]", "ends at byte 165760 of the"),
    OFFSETS("[165600,186560]", "bytes 0 to 20960 of the data, before tensor model.embed_tokens.weight, belong to no"),
    HEADER("{\"dtype\":\"F32\",\"shape\":[131,40],\"data_offsets\":[0,20960]}", "[1,2]",
           "the entry of tensor lm_head.weight must be an object"),
    HEADER("lm_head.weight", "lm_head.\xc0\x80", "is not UTF-8"),
    SHAPE("[131,40],\"dtype\":\"I32\"", "the key \"dtype\" is given twice"),
    SHAPE("[131,40],\"strides\":[1,131]", "lm_head.weight: its entry has the key \"strides\", which the format does"),
    SHAPE("[]", "which is not the size of shape [] in F32"),
    FIRST("scalar", "F32", "[]", "[165600,165604]", "scalar ends at byte 165604 of the data, but the file has"),
    FIRST("empty", "F32", "[0,7]", "[20964,20964]", "overlaps tensor"),
    FIRST("a", "F4", "[3]", "[0,0]", "LlamaForCausalLM does not have these tensors with this config.json: a"),
    OFFSETS("[0,18446744073709551615]", "data_offsets has an entry"),
    HEADER("{\"format\":\"pt\"}", "[\"pt\"]", "__metadata__ must be an object"),
    HEADER("{\"format\":\"pt\"}", "{\"format\":[\"pt\"]}", "__metadata__ has a value that is not text: format"),
    // escapes that would end a name early
    HEADER("\"lm_head.weight\"", "\"lm_head.weight\\u0000x\"", "the \\u escape at byte 47 is not a character"),
    HEADER("\"lm_head.weight\"", "\"lm_head.weight\\uzzzz\"", "the \\u escape at byte 47 is not a character"),
    HEADER("\"lm_head.weight\"", "\"lm_head.weight\\ud800\"", "is not valid JSON"),
    KEY("llama", "rope_type", "\"default\"", "\"default\", \"rope_type\": \"yarn\"", "the key \"rope_type\" is given"),
    // shards
    INDEX("\"weight_map\"", "\"weights\"", "has no weight_map"),
    INDEX("\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"../model-00004",
          "weight_map puts tensor lm_head.weight into \"../model-00004-of-00004.safetensors\", which is not a file of "
          "this directory"),
    INDEX("\"lm_head.weight\": \"model-00004-of-00004.safetensors\"", "\"lm_head.weight\": 4",
          "weight_map names no file for tensor lm_head.weight"),
    INDEX("\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"model-00005",
          "No such file or directory, but model"),
    INDEX("\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"model-00001", "tensor lm_head.weight should be"),
    INDEX("\"lm_head.weight\": \"model-00004-of-00004.safetensors\",", "", "does not list tensor lm_head.weight of"),
    INDEX("\"lm_head.weight\":", "\"other.weight\":", "tensor other.weight should be in model-00004"),
    CHANGED_TEXT("llama-sharded/"
                 "model-00004-of-00004.safetensors",
                 "\"lm_head.weight\"", "\"model.embed_tokens.weight\"", "tensor model.embed_tokens.weight is also in"),
    // unusual but right texts
    CONFIG("llama", "\"architectures\"", "\"was\"", NULL),                    // model_type is enough
    CONFIG("llama", "\"model_type\": \"llama\",", "", NULL),                  // and so are architectures
    CONFIG("llama", "\"rope_parameters\"", "\"was\"", NULL),                  // the default is 10000
    CONFIG("llama", "{", "{\"rope_theta\":10000,\"rope_scaling\":{},", NULL), // twice, but the same
    CONFIG("llama", "\"head_dim\": 10", "\"head_dim\": null", NULL),          // follows
    CONFIG("gpt_oss", "\"layer_types\"", "\"was\"", NULL),                    // every other layer has the window
    CONFIG("gpt2", "\"tie_word_embeddings\": true,", "", NULL),               // GPT-2's default
    CONFIG("gpt2", "\"n_embd\": 24", "\"hidden_size\": 24", NULL),            // the common name
    CONFIG("gpt2", "\"n_inner\": null", "\"n_inner\": 96", NULL),
    CONFIG("gpt2", "\"gelu_new\"", "\"gelu_pytorch_tanh\"", NULL),
    CONFIG("gpt2", "\"gelu_new\"", "\"gelu_accurate\"", NULL), // the same function
    CONFIG("gemma3", "\"gelu_pytorch_tanh\"", "\"gelu_new\"", NULL),
    KEY("llama", "hidden_act", "\"silu\"", "\"swish\"", NULL),
    KEY("gpt2", "n_head", "3", "3, \"num_key_value_heads\": 1, \"partial_rotary_factor\": 0.5",
        NULL), // no keys of it
    KEY("qwen2", "use_cache", "true", "true, \"attention_bias\": true, \"mlp_bias\": true, \"n_embd\": null", NULL),
    KEY("llama", "rope_type", "\"default\"", "\"default\", \"truncate\": null, \"mrope_section\": {}", NULL),
    CONFIG("gemma3", "{", "{\"rope_scaling\":{\"type\":\"default\"},", NULL),
    CONFIG("gpt2", "\"vocab_size\": 101", "\"vocab_size\": 101.0, \"x\": \"\\u00e9\"", NULL),
    HEADER("\"__metadata__\":{\"format\":\"pt\"},", "", NULL), // and an odd length
    HEADER("{",
           "{\"layers.0.self_attn.rotary_emb.inv_freq\":{\"dtype\":\"F99\",\"shape\":[3],"
           "\"data_offsets\":[0,0]},",
           NULL), // no weights, hence any type
};

TEST(texts) {
    const DamageSuite suite =
        golden_copies("gpt2 llama llama3 llama-sharded llama-tied qwen2 qwen3 qwen3-yarn mistral gemma3 "
                      "gemma3-linear ministral3 smollm3 olmo2 olmo3 phi3 glm4 granite mistral-full qwen3_moe "
                      "seed_oss hunyuan_v1_dense ernie4_5 muse_glimmer olmo_hybrid lfm2 lfm3 lfm2_moe "
                      "qwen3_moe-fused mixtral glm4_moe glm4_moe_lite gpt_oss gemma4-e granitemoehybrid bamba");
    expect_damage_found(&suite, changed_texts, COUNT_OF(changed_texts));
}

// ---- changes of bytes -----------------------------------------------------------------------------------------------
TEST(wrong_bytes) {
    static const Damage rows[] = {
        WHOLE_TEXT(CONFIG_JSON, "", "config.json: is empty"),
        WHOLE_TEXT(CONFIG_JSON, "{}", "config.json: has neither architectures nor model_type"),
        WHOLE_TEXT(CONFIG_JSON, "[]", "config.json: must be a JSON object"),
        OTHER_NUMBER(CONFIG_JSON, 1, 1, 0, "config.json: is not valid JSON"),
        EXTENDED_BY(CONFIG_JSON, HF_CONFIG_MAX, "a file of this kind may have at most 16777216"),
        REMOVED(MODEL, "llama: holds neither model.safetensors nor model.safetensors.index.json"),
        WHOLE_TEXT(MODEL, "", "model.safetensors: is empty"),
        CUT_TO(MODEL, 7, "is too short for a safetensors file"),
        CUT_TO(MODEL, 1000, "model.safetensors: claims a header of 2120 bytes; it has 1000 bytes"),
        CUT_TO(MODEL, -1, "ends at byte 165600 of the data, but the file has 165599; download"),
        EXTENDED_BY(MODEL, 1, "1 bytes after the last tensor belong to no tensor"),
        OTHER_NUMBER(MODEL, 0, 8, UINT64_MAX, "claims a header of 18446744073709551615 bytes"),
        OTHER_NUMBER(MODEL, 0, 8, 0, "model.safetensors: is not valid JSON"),
    };
    const DamageSuite suite = golden_copies("llama");
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

TEST(wrong_folders) {
    const DamageSuite suite = golden_copies("llama");
    const char *copy = scratch_path("golden/llama"), *empty = scratch_path("empty-folder");
    const uint64_t header = 100000001;
    char path[PATH_MAX];
    expect_bad(scratch_path("nothing-here"),
               "nothing-here: No such file or directory; a model is a Hugging Face directory");
    mkdir(empty, 0777);
    expect_bad(empty, "empty-folder: holds no config.json");
    path_join(path, suite.folder, MODEL);
    write_file(path, "version https://git-lfs.github.com/spec/v1\noid", 46);
    expect_bad(copy, "model.safetensors: is a pointer of git-lfs, not the file itself");
    write_file(path, &header, 8);
    assert_int_equal(truncate(path, 200000000), 0);
    expect_bad(copy, "claims a header of 100000001 bytes");
    run_command("rm '%s/model.safetensors' && echo > '%s/pytorch_model.bin'", copy, copy);
    expect_bad(copy, "llama/pytorch_model.bin, which is not read; give the folder that save_pretrained writes");
    run_command("mv '%s/pytorch_model.bin' '%s/consolidated.00.pth'", copy, copy);
    expect_bad(copy, "nor model.safetensors.index.json; it holds ");
    expect_bad(suite.folder, "golden: holds no config.json; give ");
    expect_bad(suite.folder, "/golden/llama\n");
    run_command("mkdir '%s/model.safetensors'", copy, "");
    expect_bad(copy, "model.safetensors: is not a regular file");
    run_command("rmdir '%s/model.safetensors' && mkfifo '%s/model.safetensors'", copy, copy);
    expect_bad(copy, "model.safetensors: is not a regular file");
}

// JSON that would become gigabytes of tree, or end the stack: the reader stops earlier.
TEST(json_bombs) {
    static const struct {
        const char *file, *unit;
        size_t times, ends; // then a number and braces
        const char *words;
    } cases[] = {
        {CONFIG_JSON, ",", 12u << 20, 0, "config.json: has more JSON values than the limit of 2097152"},
        {CONFIG_JSON, "[", 1u << 20, 0, "config.json: is not valid JSON"},
        {MODEL, "{\"a\":", 500000, 0, "is not valid JSON"},
        {MODEL, "{\"a\":", 900, 901, "its entry has the key \"a\""},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s, %s", cases[i].file, cases[i].unit);
        const char *folder = copy_goldens("llama");
        const size_t unit = strlen(cases[i].unit), length = unit * cases[i].times + cases[i].ends;
        char path[PATH_MAX], *text = (char *)memset(case_memory(length), '}', length);
        if (cases[i].ends) text[unit * cases[i].times] = '1';
        for (size_t k = 0; k < cases[i].times; k++) memcpy(text + k * unit, cases[i].unit, unit);
        path_join(path, folder, cases[i].file);
        if (text_ends_with(path, ".json"))
            write_file(path, text, length);
        else
            write_safetensors(path, text, length, "", 0);
        expect_bad(scratch_path("golden/llama"), cases[i].words);
    }
}

// ---- flat .bin: the fields of its header ----------------------------------------------------------------------------
TEST(wrong_flat_files) {
#define FLAT "flat.bin"
    static const Damage rows[] = {
        FLIPPED_BIT(FLAT, 0, 5, "flat.bin: is neither a flat .bin nor an llm.c GPT-2 .bin"),
        OTHER_NUMBER(FLAT, 8, 4, 2, "is a flat .bin of version 2, this program reads version 1"),
        OTHER_NUMBER(FLAT, 12, 4, FLAT_BYTE_ORDER_REV, "was written on a machine of the other byte order"),
        OTHER_NUMBER(FLAT, 12, 4, 3, "its byte order mark is damaged"),
        OTHER_NUMBER(FLAT, 16, 8, 1ull << 62, "claims a header of 4611686018427387904 bytes"),
        OTHER_NUMBER(FLAT, 24, 4, 4, "element type 4 is unknown"),
        OTHER_NUMBER(FLAT, 24, 4, DTYPE_FP32, "so it is truncated; 105088 were expected"),
        OTHER_NUMBER(FLAT, 32, 8, 25249, "claims 25249 elements, but its model has 25248"),
        OTHER_NUMBER(FLAT, 32, 8, UINT64_MAX, "claims 18446744073709551615 elements"),
        FLIPPED_BIT(FLAT, 57, 0, "its header is damaged (checksum)"),
        OTHER_NUMBER(FLAT, 48, 4048, 0x6161616161616161, "the name of the model in its header has no end"),
        OTHER_NUMBER(FLAT, 48, 4048, 0, "unknown model ''"),
        CHANGED_TEXT(FLAT, "llama,", "mamba,", "flat.bin: unknown model 'mamba'"),
        CHANGED_TEXT(FLAT, "hidden_size=32", "hidden_size=-4", "flat.bin: hidden_size=-4 is not a whole number"),
        CHANGED_TEXT(FLAT, "hidden_size", "hidden_tide", "flat.bin: unknown key 'hidden_tide'"),
        CUT_TO(FLAT, -1, "so it is truncated"),
        CUT_TO(FLAT, 4095, "is truncated: it has 4095 bytes, but the header alone needs 4096"),
        CUT_TO(FLAT, 3, "is text, not a model; make shards for --data of it"),
        CUT_TO(FLAT, 0, "flat.bin: is empty"),
        EXTENDED_BY(FLAT, 1, "too many; "),
    };
    const DamageSuite suite = {scratch_folder(), open_and_read, scratch_path(FLAT), mend_weights, 0};
    WeightSource *source = weights_open(GOLDEN "llama-tied");
    weights_convert(source, scratch_path(FLAT), DTYPE_BF16);
    weights_close(source);
    expect_good(scratch_path(FLAT));
    expect_damage_found(&suite, rows, COUNT_OF(rows));
    expect_bad("/dev/null", "/dev/null: is not a regular file");
    expect_bad(GOLDEN "llama/model.safetensors", "give its directory");
}

// ---- llm.c: field i of its header is byte 4 i -----------------------------------------------------------------------
TEST(wrong_llmc_files) {
#define LLMC                   "gpt2.bin"
#define FIELD(i, value, words) OTHER_NUMBER(LLMC, 4 * (i), 4, value, words)
    static const Damage rows[] = {
        FIELD(0, __builtin_bswap32(20240326), "was written on a machine of the other byte order"),
        FIELD(0, 20240520, "is a token shard of llm.c, not a model; it belongs to --data"),
        FIELD(0, 20240803, "is a Llama 3 checkpoint of llm.c, not a model; take the Hugging Face directory"),
        FIELD(1, 1, "is an llm.c model of version 1, not 3 (fp32) or 5 (bf16)"),
        FIELD(2, -1, "max_position_embeddings=-1 is not a whole number"),
        FIELD(3, 0, "vocab_size=0 is out of range"),
        FIELD(4, 2000000000, "num_hidden_layers=2000000000 is out of range"),
        FIELD(4, 3, "so it is truncated"),
        FIELD(4, 1, "too many; "),
        FIELD(5, 7, "hidden_size 24 is not a multiple of num_attention_heads 7"),
        FIELD(6, 25, "hidden_size 25 is not a multiple of num_attention_heads 3"),
        FIELD(7, 100, "the padded vocabulary 100 must be at least the vocabulary 101"),
        FIELD(7, 2147483647, "the padded vocabulary 2147483647 must be at least the vocabulary 101"),
        FIELD(7, 256, "so it is truncated"),
        CUT_TO(LLMC, -2, "so it is truncated"),
        CUT_TO(LLMC, 1000, "is truncated: it has 1000 bytes, but the header alone needs 1024"),
        EXTENDED_BY(LLMC, 1, "too many; "),
    };
    const DamageSuite suite = {scratch_folder(), open_and_read, scratch_path(LLMC), NULL, 0};
    run_command("cp --no-preserve=mode '%s' '%s'", GOLDEN "gpt2/gpt2_llmc_bf16.bin", scratch_path(LLMC));
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
