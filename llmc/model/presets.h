/*
Presets: families with the numbers of published models. To add one, add a row: the numbers are those of its config.json.
*/
#ifndef LLMC_PRESETS_H
#define LLMC_PRESETS_H
#include "family.h"

// Shapes of published models, from their config.json. 0: the family's default
enum { PRESET_NUMBERS = 5 };
static const char *const preset_numbers[PRESET_NUMBERS] = {"hidden_size", "intermediate_size", "num_hidden_layers",
                                                           "num_attention_heads", "num_key_value_heads"};
typedef struct {
    const char *name, *hub, *family; // hub: the model's name on Hugging Face
    unsigned numbers[PRESET_NUMBERS];
    const char *keys; // other keys
} Preset;

// clang-format off
#define LLAMA3  "vocab_size=128256,rms_norm_eps=1e-5,rope_theta=500000,"
#define LLAMA31 LLAMA3 "max_position_embeddings=131072,rope_type=llama3,low_freq_factor=1,high_freq_factor=4,"         \
                       "original_max_position_embeddings=8192,"
#define MISTRAL "rms_norm_eps=1e-5,"
#define GEMMA3  "head_dim=256,query_pre_attn_scalar=256,"
#define GEMMA3L GEMMA3 "vocab_size=262208,sliding_window=1024,max_position_embeddings=131072,rope_type=linear,factor=8,"
#define GEMMA4  "final_logit_softcapping=30,"
#define GEMMA4L GEMMA4 "hidden_size_per_layer_input=0,attention_k_eq_v=true,sliding_window=1024,"                      \
                       "max_position_embeddings=262144,"
#define QWEN25  "rope_theta=1000000,max_position_embeddings=32768,"
#define QWEN25L "rope_theta=1000000,max_position_embeddings=131072,vocab_size=152064,"
#define QWEN3  "rope_theta=1000000,max_position_embeddings=40960,"
#define QWEN35 "rope_theta=10000000,max_position_embeddings=262144,"
#define OLMO2  "vocab_size=100352,max_position_embeddings=4096,rms_norm_eps=1e-6,rope_theta=500000"
#define OLMO3  "vocab_size=100278,max_position_embeddings=65536,rms_norm_eps=1e-6,rope_type=yarn,factor=8,"            \
               "original_max_position_embeddings=8192,attention_factor=1.2079441541679836"
#define PHI4   "vocab_size=100352,max_position_embeddings=16384,rope_theta=250000"
#define GLM4   "max_position_embeddings=32768,rms_norm_eps=1e-5"
#define GLM45  "attention_bias=true,rope_theta=1000000"
#define LFM2   "layer_types=ccfccfccfcfcfcfc"
#define GRANITE4 "vocab_size=100352,rms_norm_eps=1e-5,max_position_embeddings=131072,tie_word_embeddings=true,"        \
                 "layer_types=lllllnllll,linear_key_head_dim=128,embedding_multiplier=12,residual_multiplier=0.22,"
#define QWEN3_EXPERTS "head_dim=128,norm_topk_prob=true,"
static const Preset presets[] = {
    {"gpt2", "openai-community/gpt2", "gpt2", {0}, ""},
    {"gpt2-medium", "openai-community/gpt2-medium", "gpt2", {1024, 0, 24, 16, 0}, ""},
    {"gpt2-large", "openai-community/gpt2-large", "gpt2", {1280, 0, 36, 20, 0}, ""},
    {"gpt2-xl", "openai-community/gpt2-xl", "gpt2", {1600, 0, 48, 25, 0}, ""},
    {"llama3-8b", "meta-llama/Meta-Llama-3-8B", "llama", {4096, 14336, 0, 0, 8}, LLAMA3 "max_position_embeddings=8192"},
    {"llama3.1-8b", "meta-llama/Llama-3.1-8B", "llama", {4096, 14336, 0, 0, 8}, LLAMA31 "factor=8"},
    {"llama3.1-70b", "meta-llama/Llama-3.1-70B", "llama", {8192, 28672, 80, 64, 8}, LLAMA31 "factor=8"},
    {"llama3.2-1b", "meta-llama/Llama-3.2-1B", "llama", {2048, 8192, 16, 0, 8},
     LLAMA31 "factor=32,tie_word_embeddings=true"},
    {"llama3.2-3b", "meta-llama/Llama-3.2-3B", "llama", {3072, 8192, 28, 24, 8},
     LLAMA31 "factor=32,tie_word_embeddings=true"},
    {"mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", "mistral", {0}, MISTRAL "max_position_embeddings=32768"},
    {"mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", "mistral", {0},
     MISTRAL "vocab_size=32768,rope_theta=1000000,max_position_embeddings=32768,sliding_window=0"},
    {"mistral-nemo-12b", "mistralai/Mistral-Nemo-Base-2407", "mistral", {5120, 0, 40, 0, 0},
     MISTRAL "vocab_size=131072,head_dim=128,rope_theta=1000000,max_position_embeddings=131072,sliding_window=0"},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "qwen2", {896, 4864, 24, 14, 2}, QWEN25 "tie_word_embeddings=true"},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", "qwen2", {1536, 8960, 28, 12, 2}, QWEN25 "tie_word_embeddings=true"},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B", "qwen2", {2048, 11008, 36, 16, 2}, QWEN25 "tie_word_embeddings=true"},
    {"qwen2.5-7b", "Qwen/Qwen2.5-7B", "qwen2", {3584, 18944, 28, 28, 4}, QWEN25L},
    {"qwen2.5-14b", "Qwen/Qwen2.5-14B", "qwen2", {5120, 13824, 48, 40, 8}, QWEN25L "rms_norm_eps=1e-5"},
    {"qwen2.5-32b", "Qwen/Qwen2.5-32B", "qwen2", {5120, 27648, 64, 40, 8}, QWEN25L "rms_norm_eps=1e-5"},
    {"qwen2.5-72b", "Qwen/Qwen2.5-72B", "qwen2", {8192, 29568, 80, 64, 8}, QWEN25L "rms_norm_eps=1e-5"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3", {1024, 3072, 28, 16, 8}, QWEN3 "tie_word_embeddings=true"},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "qwen3", {2048, 6144, 28, 16, 8}, QWEN3 "tie_word_embeddings=true"},
    {"qwen3-4b", "Qwen/Qwen3-4B", "qwen3", {2560, 9728, 36, 32, 8}, QWEN3 "tie_word_embeddings=true"},
    {"qwen3-8b", "Qwen/Qwen3-8B", "qwen3", {4096, 12288, 36, 32, 8}, QWEN3},
    {"qwen3-14b", "Qwen/Qwen3-14B", "qwen3", {5120, 17408, 40, 40, 8}, QWEN3},
    {"qwen3-32b", "Qwen/Qwen3-32B", "qwen3", {5120, 25600, 64, 64, 8}, QWEN3},
    {"qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", "qwen3_5", {1024, 3584, 24, 8, 2},
     QWEN35 "linear_num_value_heads=16,tie_word_embeddings=true"},
    {"qwen3.5-2b", "Qwen/Qwen3.5-2B", "qwen3_5", {2048, 6144, 24, 8, 2},
     QWEN35 "linear_num_value_heads=16,tie_word_embeddings=true"},
    {"qwen3.5-4b", "Qwen/Qwen3.5-4B", "qwen3_5", {2560, 9216, 32, 16, 4}, QWEN35 "tie_word_embeddings=true"},
    {"qwen3.5-9b", "Qwen/Qwen3.5-9B", "qwen3_5", {0}, QWEN35},
    {"qwen3.5-27b", "Qwen/Qwen3.5-27B", "qwen3_5", {5120, 17408, 64, 24, 4}, QWEN35 "linear_num_value_heads=48"},
    {"qwen3.6-27b", "Qwen/Qwen3.6-27B", "qwen3_5", {5120, 17408, 64, 24, 4}, QWEN35 "linear_num_value_heads=48"},
    {"qwen3.8-27b", "Qwen/Qwen3.8-27B", "qwen3_5", {5120, 17408, 64, 24, 4}, QWEN35 "linear_num_value_heads=48"},
    {"gemma3-270m", "google/gemma-3-270m", "gemma3", {640, 2048, 18, 4, 1},
     GEMMA3 "vocab_size=262144,sliding_window=512,max_position_embeddings=32768"},
    {"gemma3-1b", "google/gemma-3-1b-pt", "gemma3", {1152, 6912, 0, 4, 1},
     GEMMA3 "vocab_size=262144,sliding_window=512,max_position_embeddings=32768"},
    {"gemma3-4b", "google/gemma-3-4b-pt", "gemma3", {2560, 10240, 34, 0, 0}, GEMMA3L},
    {"gemma3-12b", "google/gemma-3-12b-pt", "gemma3", {3840, 15360, 48, 16, 8}, GEMMA3L},
    {"gemma3-27b", "google/gemma-3-27b-pt", "gemma3", {5376, 21504, 62, 32, 16},
     "head_dim=128,query_pre_attn_scalar=168,sliding_window=1024,rope_type=linear,factor=8"},
    {"ministral3-3b", "mistralai/Ministral-3-3B-Base-2512", "ministral3", {3072, 9216, 26, 0, 0},
     "tie_word_embeddings=true"},
    {"ministral3-8b", "mistralai/Ministral-3-8B-Base-2512", "ministral3", {0}, ""},
    {"ministral3-14b", "mistralai/Ministral-3-14B-Base-2512", "ministral3", {5120, 16384, 40, 0, 0},
     "rope_theta=1000000000"},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "smollm3", {0}, "rope_theta=5000000,max_position_embeddings=65536"},
    {"olmo2-1b", "allenai/OLMo-2-0425-1B", "olmo2", {2048, 8192, 16, 16, 0}, OLMO2},
    {"olmo2-7b", "allenai/OLMo-2-1124-7B", "olmo2", {0}, OLMO2},
    {"olmo2-13b", "allenai/OLMo-2-1124-13B", "olmo2", {5120, 13824, 40, 40, 0}, OLMO2},
    {"olmo2-32b", "allenai/OLMo-2-0325-32B", "olmo2", {5120, 27648, 64, 40, 8}, OLMO2},
    {"olmo3-7b", "allenai/Olmo-3-1025-7B", "olmo3", {0}, OLMO3},
    {"olmo3-32b", "allenai/Olmo-3-1125-32B", "olmo3", {5120, 27648, 64, 40, 8}, OLMO3},
    {"olmo-hybrid-7b", "allenai/Olmo-Hybrid-7B", "olmo_hybrid", {0}, "layer_types=llln"},
    {"phi3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", "phi3", {0}, "sliding_window=2047"},
    {"phi3-medium-4k", "microsoft/Phi-3-medium-4k-instruct", "phi3", {5120, 17920, 40, 40, 10}, "sliding_window=2047"},
    {"phi4", "microsoft/phi-4", "phi3", {5120, 17920, 40, 40, 10}, PHI4},
    {"glm4-9b", "zai-org/GLM-4-9B-0414", "glm4", {0}, GLM4},
    {"glm4-32b", "zai-org/GLM-4-32B-0414", "glm4", {6144, 23040, 61, 48, 0}, GLM4 ",attention_bias=false"},
    {"seed-oss-36b", "ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", {5120, 0, 0, 0, 0}, "rope_theta=10000000"},
    {"ernie4.5-0.3b", "baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", {0}, ""},
    {"lfm2-350m", "LiquidAI/LFM2-350M", "lfm2", {1024, 4608, 16, 16, 0}, LFM2},
    {"lfm2-700m", "LiquidAI/LFM2-700M", "lfm2", {1536, 6912, 16, 24, 0}, LFM2},
    {"lfm2-1.2b", "LiquidAI/LFM2-1.2B", "lfm2", {2048, 0, 16, 0, 0}, LFM2},
    {"lfm2-2.6b", "LiquidAI/LFM2-2.6B", "lfm2", {2048, 10752, 30, 0, 0}, "layer_types=ccfccfcccfcccfcccfcccfccfccfcc"},
    {"lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B", "lfm2_moe", {0, 0, 24, 0, 0}, "layer_types=ccfcccfcccfcccfcccfccfcc"},
    {"lfm3-1.7b", "LiquidAI/LFM3-1.7B", "lfm3", {0}, "max_position_embeddings=262144"},
    {"muse-glimmer-30b", "meta-models/Muse-Glimmer-30B", "muse_glimmer", {0}, ""},
    {"qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "qwen3_moe", {2048, 0, 48, 32, 4}, QWEN3_EXPERTS QWEN3},
    {"qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", {2048, 0, 48, 32, 4},
     QWEN3_EXPERTS "rope_theta=10000000,max_position_embeddings=262144,router_aux_loss_coef=0"},
    {"qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "qwen3_moe", {4096, 12288, 94, 64, 4},
     QWEN3_EXPERTS QWEN3 "moe_intermediate_size=1536"},
    {"qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", {0}, QWEN35},
    {"qwen3.6-35b-a3b", "Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", {0}, QWEN35},
    {"qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", {0}, QWEN35},
    {"nemotron3-nano-30b-a3b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h", {2688, 1856, 52, 0, 2},
     "layer_types=LeLeLFeLeLeLFeLeLeLFeLeLeLFeLeLeLFeLeLeLeLFeLeLeLeLe,max_position_embeddings=1048576,"
     "linear_num_value_heads=64,num_experts=128,num_experts_per_tok=6,moe_intermediate_size=1856,"
     "shared_expert_intermediate_size=3712,routed_scaling_factor=2.5"},
    {"granite4-h-micro", "ibm-granite/granite-4.0-h-micro", "granitemoehybrid", {2048, 8192, 40, 32, 8},
     GRANITE4 "linear_num_value_heads=64,attention_multiplier=0.015625,logits_scaling=8,num_experts=0,"
     "moe_intermediate_size=8192"},
    {"granite4-h-tiny", "ibm-granite/granite-4.0-h-tiny", "granitemoehybrid", {1536, 1024, 40, 12, 4},
     GRANITE4 "linear_num_value_heads=48,attention_multiplier=0.0078125,logits_scaling=6,num_experts=64,"
     "num_experts_per_tok=6,moe_intermediate_size=512"},
    {"granite4-h-small", "ibm-granite/granite-4.0-h-small", "granitemoehybrid", {4096, 1536, 40, 32, 8},
     GRANITE4 "attention_multiplier=0.0078125,logits_scaling=16,num_experts=72,num_experts_per_tok=10,"
     "moe_intermediate_size=768"},
    {"bamba-9b", "ibm-fms/Bamba-9B", "bamba", {0},
     "vocab_size=128256,linear_key_head_dim=128,layer_types=lllllllllfllllllllfllllllllfllll"},
    {"mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", "mixtral", {0},
     "max_position_embeddings=32768,router_aux_loss_coef=0.02"},
    {"mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", "mixtral", {6144, 16384, 56, 48, 0},
     "max_position_embeddings=65536"},
    {"gpt-oss-20b", "openai/gpt-oss-20b", "gpt_oss", {0, 0, 24, 0, 0}, "num_experts=32,router_aux_loss_coef=0.9"},
    {"gpt-oss-120b", "openai/gpt-oss-120b", "gpt_oss", {0}, "router_aux_loss_coef=0.9"},
    {"glm4.5-air", "zai-org/GLM-4.5-Air", "glm4_moe", {0}, GLM45},
    {"glm4.5", "zai-org/GLM-4.5", "glm4_moe", {5120, 12288, 92, 0, 0},
     GLM45 ",use_qk_norm=true,num_experts=160,moe_intermediate_size=1536,first_k_dense_replace=3,"
           "routed_scaling_factor=2.5"},
    {"glm4.7-flash", "zai-org/GLM-4.7-Flash", "glm4_moe_lite", {0}, "rope_theta=1000000"},
    {"deepseek-v3", "deepseek-ai/DeepSeek-V3", "deepseek_v3", {0},
     "max_position_embeddings=163840,rope_type=yarn,factor=40,original_max_position_embeddings=4096,mscale=1,"
     "mscale_all_dim=1"},
    {"mistral-small-4", "mistralai/Mistral-Small-4-119B-2603", "mistral4", {0}, ""},
    {"gemma4-31b", "google/gemma-4-31B", "gemma4", {5376, 21504, 60, 32, 16}, GEMMA4L "num_global_key_value_heads=4"},
    {"gemma4-12b", "google/gemma-4-12B", "gemma4", {3840, 15360, 48, 16, 8}, GEMMA4L "num_global_key_value_heads=1"},
    {"gemma4-26b-a4b", "google/gemma-4-26B-A4B", "gemma4", {2816, 2112, 30, 16, 8},
     GEMMA4L "num_global_key_value_heads=2,num_experts=128,num_experts_per_tok=8,moe_intermediate_size=704"},
    {"gemma4-e4b", "google/gemma-4-E4B", "gemma4", {2560, 10240, 42, 8, 2}, GEMMA4 "num_kv_shared_layers=18"},
    {"gemma4-e2b", "google/gemma-4-E2B", "gemma4", {1536, 6144, 35, 8, 1},
     GEMMA4 "num_kv_shared_layers=20,use_double_wide_mlp=true,layer_types=ssssf"},
};
// clang-format on
#define PRESETS (sizeof(presets) / sizeof(presets[0]))

#endif
