#!/usr/bin/env python3
"""
Makes the golden fixtures in this folder: tiny models in Hugging Face's layout, and what transformers computes with them.

The tests read the committed files; only whoever changes the fixtures runs this. README.md says what each file holds.

    python make_golden.py              rewrite every fixture, then check each against an untouched fp32 transformers
    python make_golden.py --check      only check the files that are there
    python make_golden.py --seeds      for each case, search the first seed whose greedy tokens are clear-cut
    python make_golden.py --bf16       how far off transformers' own gradients in bf16 are, for bounds of tests
"""
import argparse
import contextlib
import copy
import functools
import importlib
import json
import pathlib
import shutil
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, BambaConfig, DeepseekV3Config, Ernie4_5Config, Gemma3TextConfig,
                          Gemma4TextConfig, Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig, GPT2Config, GptOssConfig, GraniteConfig,
                          GraniteMoeHybridConfig, HunYuanDenseV1Config, Lfm2Config, Lfm2MoeConfig, Lfm3Config,
                          LlamaConfig, Ministral3Config, Mistral4Config, MistralConfig, MixtralConfig,
                          MuseGlimmerConfig, NemotronHConfig, Olmo2Config, Olmo3Config, OlmoHybridConfig, Phi3Config, Qwen2Config,
                          Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig,
                          SeedOssConfig, SmolLM3Config)


def classes(text):
    """Classes of transformers' models, by model and name."""
    words = (word.split(".") for word in text.split())
    return [getattr(importlib.import_module(f"transformers.models.{m}.modeling_{m}"), c) for m, c in words]


# Classes that cast to fp32 in a model in float64: RMSNorms, those that multiply by 1 + w, and what else casts
NORMS = classes("""llama.LlamaRMSNorm mistral.MistralRMSNorm ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm
    qwen2.Qwen2RMSNorm qwen3.Qwen3RMSNorm smollm3.SmolLM3RMSNorm olmo2.Olmo2RMSNorm olmo3.Olmo3RMSNorm phi3.Phi3RMSNorm
    glm4.Glm4RMSNorm qwen3_moe.Qwen3MoeRMSNorm mixtral.MixtralRMSNorm glm4_moe.Glm4MoeRMSNorm granite.GraniteRMSNorm
    gpt_oss.GptOssRMSNorm seed_oss.SeedOssRMSNorm hunyuan_v1_dense.HunYuanDenseV1RMSNorm ernie4_5.Ernie4_5RMSNorm
    lfm2.Lfm2RMSNorm lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm
    olmo_hybrid.OlmoHybridRMSNorm granitemoehybrid.GraniteMoeHybridRMSNorm bamba.BambaRMSNorm
    glm4_moe_lite.Glm4MoeLiteRMSNorm deepseek_v3.DeepseekV3RMSNorm mistral4.Mistral4RMSNorm""")
OFFSET_NORMS = classes("""gemma3.Gemma3RMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm
    qwen3_next.Qwen3NextRMSNorm muse_glimmer.MuseGlimmerTextCenteredRMSNorm""")
CASTING = classes("""qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet qwen3_moe.Qwen3MoeTopKRouter
    qwen3_5_moe.Qwen3_5MoeTopKRouter mixtral.MixtralTopKRouter glm4_moe.Glm4MoeTopkRouter gemma4.Gemma4RMSNorm
    gemma4.Gemma4TextRouter ernie4_5.Ernie4_5Attention qwen3_next.Qwen3NextGatedDeltaNet
    qwen3_next.Qwen3NextTopKRouter muse_glimmer.MuseGlimmerRMSNorm
    olmo_hybrid.OlmoHybridGatedDeltaNet
    glm4_moe_lite.Glm4MoeLiteTopkRouter deepseek_v3.DeepseekV3TopkRouter nemotron_h.NemotronHForCausalLM
    granitemoehybrid.GraniteMoeHybridMambaLayer granitemoehybrid.GraniteMoeHybridTopKRouter bamba.BambaMixer""")
Gemma4TextRouter, Mistral4TopkRouter, *SigmoidRouters = classes("""gemma4.Gemma4TextRouter mistral4.Mistral4TopkRouter
    glm4_moe.Glm4MoeTopkRouter
    glm4_moe_lite.Glm4MoeLiteTopkRouter deepseek_v3.DeepseekV3TopkRouter nemotron_h.NemotronHTopkRouter""")

transformers.utils.logging.disable_progress_bar()
HERE = pathlib.Path(__file__).resolve().parent

DOCUMENT_LENGTHS = [17, 1, 32, 9, 23]  # the packed stream; a document of one token is legal
LONGER_DOCUMENTS = [17, 1, 75, 9, 23]  # one is longer than a block of 64 of the gated delta rule
MASKED_DOCUMENT = 3                    # no target of this one counts
MASKED_PROMPT = 5                      # the first targets of document 0 do not count, as in fine-tuning on answers
PROMPT_LENGTH = 6
GREEDY_TOKENS = 12
GREEDY_MARGIN = 0.1   # smallest lead of the best logit over the second; far above the rounding of fp32
GREEDY_DISTINCT = 6   # a model that repeats one token would test little
ROUTE_MARGIN = 0.02   # smallest lead of the last expert chosen over the next one, in logits or scores: bf16 chooses the same

# ----------------------------------------------------------------------------------------------------------------------
# The cases

NO_SPECIAL_TOKENS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)

GPT2 = GPT2Config(vocab_size=101, n_positions=64, n_embd=24, n_layer=2, n_head=3, **NO_SPECIAL_TOKENS)

LLAMA = LlamaConfig(vocab_size=131, hidden_size=40, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
                    **NO_SPECIAL_TOKENS)

# Llama 3.2's way: tied, head_dim given (and not hidden_size / num_attention_heads), four query heads per key/value head
LLAMA_TIED = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
                         rms_norm_eps=1e-5, tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="default", rope_theta=500000.0), **NO_SPECIAL_TOKENS)

QWEN2 = Qwen2Config(vocab_size=112, hidden_size=32, intermediate_size=60, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    rope_parameters=dict(rope_type="default", rope_theta=1000000.0), **NO_SPECIAL_TOKENS)

# head_dim * num_attention_heads is 64, hidden_size 40
QWEN3 = Qwen3Config(vocab_size=107, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-6,
                    tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
                    **NO_SPECIAL_TOKENS)

# Llama 3.1's scaling. Of the 8 frequencies some stay, some are divided, some lie between, at this original length.
LLAMA3 = LlamaConfig(vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
                     num_key_value_heads=1, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5,
                     tie_word_embeddings=True,
                     rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                          high_freq_factor=4.0, original_max_position_embeddings=64),
                     **NO_SPECIAL_TOKENS)

LLAMA_LINEAR = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
                           attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                           rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0),
                           **NO_SPECIAL_TOKENS)

# As Qwen2.5's README says for long texts: the attention factor follows from the factor.
QWEN2_YARN = Qwen2Config(vocab_size=112, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
                         tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                              original_max_position_embeddings=32), **NO_SPECIAL_TOKENS)

# Everything that may be said of YaRN is said.
QWEN3_YARN = Qwen3Config(vocab_size=90, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
                         tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=2.5, beta_fast=16.0,
                                              beta_slow=0.5, mscale=1.3, mscale_all_dim=0.7, truncate=False,
                                              original_max_position_embeddings=100), **NO_SPECIAL_TOKENS)

MISTRAL = MistralConfig(vocab_size=110, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=128,
                        sliding_window=7, rms_norm_eps=1e-5, tie_word_embeddings=False, **NO_SPECIAL_TOKENS)

MISTRAL_FULL = MistralConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
                             sliding_window=None, tie_word_embeddings=False, **NO_SPECIAL_TOKENS)

# The last two of three layers have the window.
QWEN2_SLIDING = Qwen2Config(vocab_size=112, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                            use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True,
                            **NO_SPECIAL_TOKENS)

GEMMA3 = Gemma3TextConfig(vocab_size=112, hidden_size=40, intermediate_size=56, num_hidden_layers=7,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=24,
                          max_position_embeddings=128, sliding_window=8, **NO_SPECIAL_TOKENS)

# As the larger ones: linear scaling of the layers that see everything. Heads of 256.
GEMMA3_LINEAR = Gemma3TextConfig(vocab_size=104, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                                 num_attention_heads=2, num_key_value_heads=1, head_dim=256,
                                 query_pre_attn_scalar=168, max_position_embeddings=128, sliding_window=5,
                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                 rope_parameters=dict(
                                     full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
                                     sliding_attention=dict(rope_type="default", rope_theta=5000.0)),
                                 **NO_SPECIAL_TOKENS)


def qwen3_5(layer_types, rope=None, **keys):
    """
    Layers by letter, l and f: linear attention and full attention. Rotary positions: the first quarter of a head. The
    gated norm of a document's first tokens sees almost nothing where query and key are almost orthogonal, and what it makes
    of that is rounding: with the usual epsilon of 1e-6 no test in bf16 would mean anything.
    """
    names = dict(l="linear_attention", f="full_attention")
    sizes = dict(hidden_size=32, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                 rms_norm_eps=1e-3, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
                 linear_value_head_dim=8)
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25) | (rope or {})
    return Qwen3_5TextConfig(**(sizes | keys), num_hidden_layers=len(layer_types), max_position_embeddings=256,
                             layer_types=[names[letter] for letter in layer_types], rope_parameters=rope,
                             **NO_SPECIAL_TOKENS)


QWEN3_5 = qwen3_5("lllf", vocab_size=109, rms_norm_eps=5e-3, tie_word_embeddings=False)

# Two value heads of 12 to each of three key heads of 8; a convolution over three tokens; three query heads to a key head.
QWEN3_5_HEADS = qwen3_5("lf", vocab_size=105, hidden_size=36, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
                        linear_num_key_heads=3, linear_num_value_heads=6, linear_value_head_dim=12,
                        linear_conv_kernel_dim=3, rope=dict(partial_rotary_factor=0.75), tie_word_embeddings=False)

# One linear layer among others, three value heads to its only key head.
QWEN3_5_ONE = qwen3_5("flf", vocab_size=98, hidden_size=24, linear_num_key_heads=1, linear_num_value_heads=3,
                      linear_conv_kernel_dim=2, tie_word_embeddings=True)

QWEN3_5_LINEAR = qwen3_5("ll", vocab_size=102, linear_num_key_heads=1, linear_num_value_heads=2,
                         linear_key_head_dim=20, linear_value_head_dim=10, tie_word_embeddings=True)

QWEN3_5_FULL = qwen3_5("ff", vocab_size=100, num_key_value_heads=2, head_dim=32, attention_bias=True,
                       rms_norm_eps=1e-6, tie_word_embeddings=False)

# The factor of cosine and sine meets the rotated half of a head alone.
QWEN3_5_YARN = qwen3_5("lf", vocab_size=97, head_dim=24, tie_word_embeddings=True,
                       rope=dict(rope_type="yarn", rope_theta=10000.0, partial_rotary_factor=0.5, factor=4.0,
                                 original_max_position_embeddings=64))

# Queries grow from position 12 on, by steps; three query heads to a key head.
MINISTRAL3 = Ministral3Config(vocab_size=106, hidden_size=36, intermediate_size=44, num_hidden_layers=2,
                              num_attention_heads=6, num_key_value_heads=2, head_dim=10, max_position_embeddings=96,
                              rms_norm_eps=1e-5, tie_word_embeddings=False,
                              rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0,
                                                   beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                                                   original_max_position_embeddings=12, llama_4_scaling_beta=0.3),
                              **NO_SPECIAL_TOKENS)

# The second and the last of four layers have no rotary positions.
SMOLLM3 = SmolLM3Config(vocab_size=103, hidden_size=30, intermediate_size=52, num_hidden_layers=4,
                        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=128,
                        no_rope_layers=[1, 0, 1, 0], mlp_bias=True,
                        rope_parameters=dict(rope_type="default", rope_theta=5000.0), **NO_SPECIAL_TOKENS)

OLMO2 = Olmo2Config(vocab_size=101, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="default", rope_theta=500000.0), **NO_SPECIAL_TOKENS)

# YaRN in the layer that sees everything, another base in those with the window of 5.
OLMO3 = Olmo3Config(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=128, sliding_window=5, attention_bias=True,
                    layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=True,
                    rope_parameters=dict(
                        full_attention=dict(rope_type="yarn", rope_theta=50000.0, factor=4.0, attention_factor=1.2,
                                            beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=32),
                        sliding_attention=dict(rope_type="default", rope_theta=3000.0)), **NO_SPECIAL_TOKENS)

# Three quarters of a head are rotated; a window of 9.
PHI3 = Phi3Config(vocab_size=107, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=128, sliding_window=9, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75),
                  **NO_SPECIAL_TOKENS)

# Half of a head of 12 is rotated, neighbour with neighbour.
GLM4 = Glm4Config(vocab_size=109, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3,
                  num_key_value_heads=1, head_dim=12, max_position_embeddings=128, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
                  **NO_SPECIAL_TOKENS)

# Multipliers as odd as can be; an epsilon that matters.
GRANITE = GraniteConfig(vocab_size=103, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6,
                        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-3,
                        tie_word_embeddings=False, attention_bias=True, embedding_multiplier=2.5,
                        attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=0.6,
                        rope_parameters=dict(rope_type="default", rope_theta=20000.0), **NO_SPECIAL_TOKENS)

# Three query heads per key/value head; biases on q, k, v alone.
SEED_OSS = SeedOssConfig(vocab_size=102, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
                         num_key_value_heads=2, head_dim=10, max_position_embeddings=128, attention_dropout=0.0,
                         residual_dropout=0.0, rope_parameters=dict(rope_type="default", rope_theta=50000.0),
                         **NO_SPECIAL_TOKENS)

# QK-norm after rotary positions, whose base grows by a fixed alpha.
HUNYUAN = HunYuanDenseV1Config(vocab_size=104, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                               num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=128,
                               rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0),
                               **NO_SPECIAL_TOKENS)

# Neighbours are rotated; biases on every linear layer.
ERNIE4_5 = Ernie4_5Config(vocab_size=100, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=12, max_position_embeddings=128, use_bias=True,
                          **NO_SPECIAL_TOKENS)

# Short convolutions over three tokens in three of four layers. Two thirds of 66, rounded up to a multiple of 8, are 48.
LFM2 = Lfm2Config(vocab_size=103, hidden_size=36, intermediate_size=66, num_hidden_layers=4, num_attention_heads=6,
                  num_key_value_heads=2, max_position_embeddings=128, block_multiple_of=8,
                  layer_types=["conv", "conv", "full_attention", "conv"],
                  rope_parameters=dict(rope_type="default", rope_theta=50000.0), **NO_SPECIAL_TOKENS)

# A window of 6 in a layer; a gate a head, which files name like the MLP's; half of the pairs of full attention are rotated.
LFM3 = Lfm3Config(vocab_size=101, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=6,
                  num_key_value_heads=2, head_dim=12, max_position_embeddings=128, sliding_window=6, conv_L_cache=5,
                  layer_types=["conv", "sliding_attention", "full_attention", "conv"],
                  rope_parameters=dict(full_attention=dict(rope_type="proportional", rope_theta=50000.0, partial_rotary_factor=0.5),
                                       sliding_attention=dict(rope_type="default", rope_theta=3000.0)), **NO_SPECIAL_TOKENS)

# Two dense layers, then experts; the choice is by score and bias, the weights by score alone.
LFM2_MOE = Lfm2MoeConfig(vocab_size=98, hidden_size=32, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, num_dense_layers=2,
                         num_experts=5, num_experts_per_tok=2, routed_scaling_factor=1.5, conv_L_cache=4,
                         layer_types=["conv", "full_attention", "conv"],
                         rope_parameters=dict(rope_type="default", rope_theta=50000.0), **NO_SPECIAL_TOKENS)

# The middle one of three layers is dense; a normalised choice of 2 of 5 experts, narrower than the hidden size.
QWEN3_MOE = Qwen3MoeConfig(vocab_size=101, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=128,
                           num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1],
                           norm_topk_prob=True, tie_word_embeddings=False, **NO_SPECIAL_TOKENS)

# Weights that do not sum to 1, experts in every second layer, biases in attention.
QWEN3_MOE_FUSED = Qwen3MoeConfig(vocab_size=97, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
                                 num_attention_heads=2, num_key_value_heads=1, head_dim=16, attention_bias=True,
                                 max_position_embeddings=128, num_experts=6, num_experts_per_tok=3,
                                 moe_intermediate_size=24, decoder_sparse_step=2, norm_topk_prob=False,
                                 tie_word_embeddings=True, **NO_SPECIAL_TOKENS)

# A linear and a full layer, each with experts and a shared one, wider than they are.
QWEN3_5_MOE = Qwen3_5MoeTextConfig(vocab_size=103, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                   num_key_value_heads=1, head_dim=16, rms_norm_eps=5e-3, linear_num_key_heads=2,
                                   linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                                   layer_types=["linear_attention", "full_attention"], max_position_embeddings=256,
                                   num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                   shared_expert_intermediate_size=28, tie_word_embeddings=False,
                                   rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
                                   **NO_SPECIAL_TOKENS)

# Three value heads of 7 to each of two key heads of 5, fused head by head in files; a dense layer; weights that sum to 1.
QWEN3_NEXT = Qwen3NextConfig(vocab_size=101, hidden_size=32, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2,
                             num_key_value_heads=1, head_dim=16, rms_norm_eps=5e-3, linear_num_key_heads=2,
                             linear_num_value_heads=6, linear_key_head_dim=5, linear_value_head_dim=7,
                             layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[2],
                             max_position_embeddings=256, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16,
                             shared_expert_intermediate_size=12, tie_word_embeddings=False,
                             rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
                             **NO_SPECIAL_TOKENS)

MIXTRAL = MixtralConfig(vocab_size=98, hidden_size=32, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=128, num_local_experts=4, num_experts_per_tok=2,
                        sliding_window=9, tie_word_embeddings=False, **NO_SPECIAL_TOKENS)

# The choice is by score and bias within the better one of two groups, the weights by score alone; two shared experts.
GLM4_MOE = Glm4MoeConfig(vocab_size=104, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True,
                         use_qk_norm=True, max_position_embeddings=128, n_routed_experts=6, num_experts_per_tok=2,
                         n_group=2, topk_group=1, moe_intermediate_size=20, n_shared_experts=2, first_k_dense_replace=1,
                         routed_scaling_factor=2.5, norm_topk_prob=True, tie_word_embeddings=False, num_mtp_layers=0,
                         rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
                         **NO_SPECIAL_TOKENS)

# Latents of 10 and a shared key of 4 for three heads of 10; queries of rank 8; the norms of both have an epsilon of their
# own, which is not this one.
GLM4_MOE_LITE = Glm4MoeLiteConfig(vocab_size=103, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                                  num_attention_heads=3, num_key_value_heads=3, q_lora_rank=8, kv_lora_rank=10,
                                  qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, rms_norm_eps=1e-2,
                                  max_position_embeddings=128, n_routed_experts=6, num_experts_per_tok=2,
                                  moe_intermediate_size=16, n_shared_experts=2, n_group=2, topk_group=1,
                                  mlp_layer_types=["sparse", "dense"], routed_scaling_factor=1.8,
                                  rope_parameters=dict(rope_type="default", rope_theta=20000.0), **NO_SPECIAL_TOKENS)

# Values of 5 under keys of 10, and YaRN that also scales the scores; an epsilon as above.
DEEPSEEK_V3 = DeepseekV3Config(vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                               num_attention_heads=3, num_key_value_heads=3, q_lora_rank=8, kv_lora_rank=10,
                               qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, rms_norm_eps=1e-2,
                               max_position_embeddings=2560, n_routed_experts=6, num_experts_per_tok=2, n_group=2, topk_group=1,
                               moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=0,
                               rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=1.0,
                                                    mscale_all_dim=1.0, original_max_position_embeddings=64,
                                                    beta_fast=32.0, beta_slow=1.0), **NO_SPECIAL_TOKENS)

# Queries of full rank, and rotary positions as they are; the same values.
DEEPSEEK_V3_FULL = copy.deepcopy(DEEPSEEK_V3)
DEEPSEEK_V3_FULL.q_lora_rank, DEEPSEEK_V3_FULL.rope_parameters = None, dict(rope_type="default", rope_theta=20000.0)

# The same latents; queries that grow with their position from the 12th on; two shared experts.
MISTRAL4 = Mistral4Config(vocab_size=98, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
                          num_key_value_heads=3, q_lora_rank=8, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
                          v_head_dim=10, rms_norm_eps=1e-2, max_position_embeddings=192, n_routed_experts=4,
                          num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=2,
                          first_k_dense_replace=1, routed_scaling_factor=1.5,
                          rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, mscale=1.0,
                                               mscale_all_dim=1.0, original_max_position_embeddings=12, beta_fast=32.0,
                                               beta_slow=1.0, llama_4_scaling_beta=0.3, partial_rotary_factor=0.4),
                          **NO_SPECIAL_TOKENS)

# Sinks, biases everywhere, a window of 6 in the first layer, experts narrower than the hidden size, most values beyond the
# clamps.
GPT_OSS = GptOssConfig(vocab_size=106, hidden_size=32, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
                       num_key_value_heads=2, head_dim=12, max_position_embeddings=128, num_local_experts=5,
                       num_experts_per_tok=2, sliding_window=6, swiglu_alpha=1.5, swiglu_limit=0.8,
                       rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                            truncate=False, original_max_position_embeddings=16), **NO_SPECIAL_TOKENS)


def gemma4(layer_types, **keys):
    """Layers by letter, s and f: a window, and full attention with heads twice as wide. A cap that bends the logits."""
    names = dict(s="sliding_attention", f="full_attention")
    sizes = dict(hidden_size=32, intermediate_size=36, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                 global_head_dim=16, hidden_size_per_layer_input=0, sliding_window=7, final_logit_softcapping=2.5)
    return Gemma4TextConfig(**(sizes | keys), num_hidden_layers=len(layer_types), max_position_embeddings=128,
                            layer_types=[names[letter] for letter in layer_types], **NO_SPECIAL_TOKENS)


GEMMA4 = gemma4("sfsf", vocab_size=101, num_global_key_value_heads=1, attention_k_eq_v=True)

# The last three layers read keys of the first two and have MLPs twice as wide. Inputs of their own for all layers.
GEMMA4_E = gemma4("sfssf", vocab_size=103, hidden_size=24, num_kv_shared_layers=3, use_double_wide_mlp=True,
                  hidden_size_per_layer_input=8, vocab_size_per_layer_input=103)


# A window of 5 in two layers of four, the last one without rotary positions; two epsilons that matter; a cap that bends the
# logits. Written with the smallest vision tower that its class allows.
MUSE_GLIMMER = MuseGlimmerConfig(
    text_config=dict(vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=10, max_position_embeddings=128, sliding_window=5, rms_norm_eps=1e-3,
                     post_norm_eps=2e-2, qk_scale_factor=2.5, output_multiplier=0.6, final_logit_softcapping=3.0,
                     layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
                     layer_rope_theta=[50000.0, 50000.0, 50000.0, 0],
                     rope_parameters=dict(rope_type="default", rope_theta=50000.0), **NO_SPECIAL_TOKENS),
    vision_config=dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, patch_size=2,
                       pos_emb_height=2, pos_emb_width=2, max_position_embeddings=4),
    out_hidden_size=32, projector_hidden_size=8)


# A beta of 0 to 2; norms before the branches of linear layers, after those of the other, which has no rotary positions.
# Written with a convolution in parts of 22, 22 and 20 channels, not in its 18, 18 and 28. With small epsilons it would magnify
# rounding.
OLMO_HYBRID = OlmoHybridConfig(vocab_size=99, hidden_size=32, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
                               num_key_value_heads=2, rms_norm_eps=0.1, linear_num_key_heads=2, linear_num_value_heads=4,
                               linear_key_head_dim=9, linear_value_head_dim=7, max_position_embeddings=256,
                               layer_types=["linear_attention", "full_attention", "linear_attention"],
                               rope_parameters=dict(rope_type="default", rope_theta=None), **NO_SPECIAL_TOKENS)


# One branch a layer, of every kind; three heads of 4 to each of two groups, a state of 5; experts of squared ReLU, chosen in one
# of two groups, and a wider shared one. One head's steps lie below the bound.
NEMOTRON_H = NemotronHConfig(
    vocab_size=96, hidden_size=32, hybrid_override_pattern="ME*-M", num_attention_heads=4, num_key_value_heads=2, head_dim=12,
    intermediate_size=40, ssm_state_size=5, mamba_num_heads=6, mamba_head_dim=4, n_groups=2, conv_kernel=3, chunk_size=16,
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28, n_group=2,
    topk_group=1, routed_scaling_factor=2.5, layer_norm_epsilon=1e-3, max_position_embeddings=128, time_step_min=0.02,
    **NO_SPECIAL_TOKENS)

# No experts, one group, a convolution over four tokens
NEMOTRON_H_DENSE = NemotronHConfig(
    vocab_size=90, hidden_size=24, hybrid_override_pattern="M-M*-", num_attention_heads=3, num_key_value_heads=1, head_dim=8,
    intermediate_size=36, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=8, n_groups=1, chunk_size=16,
    layer_norm_epsilon=1e-3, max_position_embeddings=128, **NO_SPECIAL_TOKENS)

# Three heads of 8 to each of two groups, steps between two bounds, odd multipliers; attention in the middle, which rotates;
# files hold the experts in stacks, next to a wider MLP.
GRANITE_HYBRID = GraniteMoeHybridConfig(
    vocab_size=99, hidden_size=24, intermediate_size=20, shared_intermediate_size=28, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-3, num_local_experts=5, num_experts_per_tok=2,
    layer_types=["mamba", "attention", "mamba"], position_embedding_type="rope", mamba_n_heads=6, mamba_d_state=5, mamba_n_groups=2,
    mamba_d_conv=3, mamba_chunk_size=16, time_step_limit=[0.5, 1.1], embedding_multiplier=2.5, attention_multiplier=0.2,
    residual_multiplier=0.4, logits_scaling=0.6, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=20000.0),
    **NO_SPECIAL_TOKENS)

# No experts, no rotary positions, one group: as Granite 4's h-micro.
GRANITE_HYBRID_DENSE = GraniteMoeHybridConfig(
    vocab_size=100, hidden_size=32, intermediate_size=7, shared_intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-3, num_local_experts=0, num_experts_per_tok=0,
    layer_types=["mamba", "mamba", "attention"], position_embedding_type="nope", mamba_n_heads=8, mamba_d_state=16,
    mamba_chunk_size=16, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.7,
    logits_scaling=0.8, tie_word_embeddings=True, **NO_SPECIAL_TOKENS)

# Half of a head of 12 is rotated; biases in attention and MLP, three times as many values as hidden elements.
BAMBA = BambaConfig(
    vocab_size=97, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
    max_position_embeddings=128, rms_norm_eps=1e-3, attn_layer_indices=[1], mamba_n_heads=4, mamba_expand=3, mamba_d_state=6,
    mamba_n_groups=2, mamba_chunk_size=16, attention_bias=True, mlp_bias=True,
    rope_parameters=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.5), **NO_SPECIAL_TOKENS)


@dataclass
class Case:
    name: str                           # the folder
    config: transformers.PretrainedConfig
    seed: int                           # found with --seeds
    dtype: torch.dtype = torch.float32  # of the stored weights
    layout: str = "plain"               # "plain" | "sharded" | "hub" | "fused", see save_model
    config_style: int = 5               # the major version of transformers whose config.json it has
    lengths: tuple = tuple(DOCUMENT_LENGTHS)
    pad: int | None = None              # a token of the stream whose inputs give the embedding no gradient

    def __post_init__(self):
        self.config = copy.deepcopy(self.config)
        if self.pad is not None:
            self.config.get_text_config().pad_token_id = self.pad


CASES = [
    Case("gpt2", GPT2, seed=31),
    Case("gpt2-hub", GPT2, seed=31, layout="hub"),
    Case("llama", LLAMA, seed=33),
    Case("llama-sharded", LLAMA, seed=33, layout="sharded", config_style=4),
    Case("llama-tied", LLAMA_TIED, seed=208),
    Case("qwen2", QWEN2, seed=136),
    Case("qwen2-fp16", QWEN2, seed=168, dtype=torch.float16, config_style=4),
    Case("qwen3", QWEN3, seed=0),
    Case("qwen3-bf16", QWEN3, seed=0, dtype=torch.bfloat16),
    Case("llama3", LLAMA3, seed=6, pad=10),
    Case("llama-linear", LLAMA_LINEAR, seed=85, config_style=4, pad=41),
    Case("qwen2-yarn", QWEN2_YARN, seed=517, config_style=4, pad=108),
    Case("qwen3-yarn", QWEN3_YARN, seed=1438, pad=22),
    Case("mistral", MISTRAL, seed=13, pad=76),
    Case("mistral-full", MISTRAL_FULL, seed=39, config_style=4),
    Case("qwen2-sliding", QWEN2_SLIDING, seed=0, config_style=4, pad=77),
    Case("gemma3", GEMMA3, seed=303, pad=11),
    Case("gemma3-linear", GEMMA3_LINEAR, seed=185, config_style=4, pad=93),
    Case("qwen3_5", QWEN3_5, seed=388, lengths=tuple(LONGER_DOCUMENTS), pad=38),
    Case("qwen3_5-heads", QWEN3_5_HEADS, seed=18),
    Case("qwen3_5-one", QWEN3_5_ONE, seed=81, pad=90),
    Case("qwen3_5-linear", QWEN3_5_LINEAR, seed=2),
    Case("qwen3_5-full", QWEN3_5_FULL, seed=34),
    Case("qwen3_5-yarn", QWEN3_5_YARN, seed=6),
    Case("ministral3", MINISTRAL3, seed=76, pad=7),
    Case("smollm3", SMOLLM3, seed=51, config_style=4, pad=42),
    Case("olmo2", OLMO2, seed=14, pad=47),
    Case("olmo3", OLMO3, seed=26, pad=82),
    Case("phi3", PHI3, seed=23),
    Case("glm4", GLM4, seed=28, pad=30),
    Case("granite", GRANITE, seed=1, pad=21),
    Case("seed_oss", SEED_OSS, seed=5, pad=43),
    Case("hunyuan_v1_dense", HUNYUAN, seed=39, config_style=4),
    Case("ernie4_5", ERNIE4_5, seed=1044),
    Case("muse_glimmer", MUSE_GLIMMER, seed=302),
    Case("lfm2", LFM2, seed=10, config_style=4, pad=40),
    Case("olmo_hybrid", OLMO_HYBRID, seed=86),
    Case("qwen3_moe", QWEN3_MOE, seed=472, pad=30),
    Case("qwen3_moe-fused", QWEN3_MOE_FUSED, seed=10729, layout="fused"),
    Case("qwen3_5_moe", QWEN3_5_MOE, seed=430, layout="fused"),
    Case("qwen3_next", QWEN3_NEXT, seed=347),
    Case("nemotron_h", NEMOTRON_H, seed=303),
    Case("nemotron_h-dense", NEMOTRON_H_DENSE, seed=12, lengths=tuple(LONGER_DOCUMENTS)),
    Case("granitemoehybrid", GRANITE_HYBRID, seed=29),
    Case("granitemoehybrid-dense", GRANITE_HYBRID_DENSE, seed=55, lengths=tuple(LONGER_DOCUMENTS)),
    Case("bamba", BAMBA, seed=11, pad=33),
    Case("mixtral", MIXTRAL, seed=1223),
    Case("glm4_moe", GLM4_MOE, seed=763),
    Case("glm4_moe_lite", GLM4_MOE_LITE, seed=4991),
    Case("deepseek_v3", DEEPSEEK_V3, seed=8207),
    Case("deepseek_v3-full", DEEPSEEK_V3_FULL, seed=2363, config_style=4, pad=33),
    Case("mistral4", MISTRAL4, seed=187, pad=21),
    Case("gpt_oss", GPT_OSS, seed=2, pad=12),
    Case("lfm3", LFM3, seed=3, pad=30),
    Case("lfm2_moe", LFM2_MOE, seed=520),
    Case("gemma4", GEMMA4, seed=3797, pad=30),
    Case("gemma4-e", GEMMA4_E, seed=1005, pad=30),
]

# ----------------------------------------------------------------------------------------------------------------------
# Weights and their files


def adds_one(config, name):
    """Whether a norm multiplies by 1 + its weight: all of Gemma's, of Qwen3.5's all but the gated one, of Muse's the layers'"""
    hybrid = config.model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    if config.model_type == "muse_glimmer":
        return "layers" in name
    return config.model_type == "gemma3_text" or hybrid and "linear_attn" not in name


def auto_class(config):
    """Muse Glimmer has no class of the text model alone, and Mistral 4's is among those of images."""
    return AutoModelForImageTextToText if config.model_type in ("muse_glimmer", "mistral4") else AutoModelForCausalLM


def text_parameters(model):
    """Parameters of the text model, by the names that it would have alone."""
    return [(name.replace("model.language_model.", "model."), p) for name, p in model.named_parameters()
            if not name.startswith("model.vision")]


def random_model(case):
    """Every parameter non-trivial, so that no gradient is degenerate and no bias or norm weight can be forgotten."""
    rng = torch.Generator().manual_seed(case.seed)
    model = auto_class(case.config).from_config(case.config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            is_embedding = "wte" in name or "embed_tokens" in name or "lm_head" in name
            if is_norm_weight and adds_one(case.config, name):
                value = 0.15 * noise
            elif name.endswith("q_norm.weight") and case.config.model_type == "gemma4_text":
                value = 0.4 + 0.15 * noise  # its scores are not divided by the root of head_dim
            elif is_norm_weight:
                value = 1 + 0.15 * noise
            elif name.endswith("router.scale") or name.endswith("per_expert_scale"):
                value = 1 + 0.15 * noise
            elif name.endswith("router.proj.weight"):
                value = 3 * noise
            elif name.endswith("A_log"):
                value = 1.2 * noise - 2.2  # states that last for a few tokens to a hundred
            elif name.endswith("dt_bias") and case.config.model_type == "nemotron_h":
                value = noise - 1
                value[0] = -6
            elif "conv1d" in name or name.endswith("conv.conv.weight"):
                value = 0.5 * noise
            elif name.endswith("linear_attn.v_proj.weight"):
                value = 0.02 * noise  # olmo_hybrid's gated norm has an epsilon of 1e-5, which would magnify rounding
            elif parameter.ndim == 1 and not name.endswith("sinks"):
                value = 0.1 * noise
            elif is_embedding:
                value = 0.2 * noise
            elif name.endswith("feed_forward.gate.weight"):
                value = 0.8 * noise
            elif name.endswith(("mlp.gate.weight", "mixer.gate.weight")):
                value = 0.3 * noise
            elif name.endswith(("mlp.router.weight", "moe.router.weight", "sinks")):
                value = 0.6 * noise
            else:
                value = 0.15 * noise
            parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=rng))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.1 * torch.randn(buffer.shape, generator=rng))
    return model.to(case.dtype)


def save_model(case, model, folder):
    """
    plain    what save_pretrained writes
    sharded  the same in several files with an index
    hub      as in the published gpt2: names without "transformer.", and each layer's causal mask stored as a tensor
    fused    the experts of a layer as two tensors, as they are in memory
    """
    model.save_pretrained(folder, max_shard_size="50KB" if case.layout == "sharded" else "1GB")
    if case.config_style == 4:
        rewrite_config_as_transformers_4(folder / "config.json")
    if case.layout == "hub":
        rename_as_published_gpt2(folder / "model.safetensors", case.config)
    if case.layout == "fused":
        tensors = dict(model.named_parameters())
        save_file({name: tensor.detach() for name, tensor in tensors.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)


def rewrite_config_as_transformers_4(path):
    """
    As in most published models: rope_theta at the top level, rope_scaling (with "type" where it is Qwen's), torch_dtype,
    no head_dim where it follows from the others, and for Qwen2.5 a sliding window, mostly turned off by
    use_sliding_window. Gemma has rope_local_base_freq besides, and its pattern of layers as a number.
    """
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config |= dict(rope_local_base_freq=rope["sliding_attention"]["rope_theta"], sliding_window_pattern=2)
        del config["layer_types"]
        rope = rope["full_attention"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if config["model_type"] in ("qwen2", "hunyuan_v1_dense"):
        scaling["type"] = scaling.pop("rope_type")
    config |= dict(rope_theta=rope["rope_theta"], rope_scaling=scaling if len(scaling) > 1 else None,
                   torch_dtype=config.pop("dtype"), transformers_version="4.43.0")
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    if config["model_type"] == "qwen2":
        del config["layer_types"]
        if not config["use_sliding_window"]:
            config["sliding_window"] = 8
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def rename_as_published_gpt2(path, config):
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    n = config.n_positions
    for layer in range(config.n_layer):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(n, n)).view(1, 1, n, n)
    save_file(tensors, path, metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------------------------------------
# The packed stream


def packed_stream(case):
    """
    Documents one after the other. Each is drawn one token longer than it is, the last being only a target: what follows
    a document's end in the stream must not matter.
    """
    rng = np.random.default_rng(1000 + case.seed)
    documents = [rng.integers(0, case.config.get_text_config().vocab_size, length + 1) for length in case.lengths]
    weights = [(rng.random(length) < 0.75).astype(np.float32) for length in case.lengths]
    weights[0][:MASKED_PROMPT] = 0
    weights[1][:] = 1
    weights[MASKED_DOCUMENT][:] = 0
    starts = np.cumsum((0,) + case.lengths[:-1])
    stream = dict(tokens=np.concatenate([d[:-1] for d in documents]),
                  targets=np.concatenate([d[1:] for d in documents]),
                  doc_start=starts, doc_length=np.array(case.lengths),
                  prompt=rng.integers(0, case.config.get_text_config().vocab_size, PROMPT_LENGTH))
    stream = {name: torch.tensor(value.astype(np.int32)) for name, value in stream.items()}
    stream["loss_weight"] = torch.tensor(np.concatenate(weights))
    return stream


# ----------------------------------------------------------------------------------------------------------------------
# The reference


@contextlib.contextmanager
def doubles_stay_doubles():
    """float(), to(torch.float32), type(torch.float32) and a softmax in fp32 leave a tensor in float64 as it is."""
    to_float, to, type_, softmax = torch.Tensor.float, torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax

    def doubled(dtype):
        return torch.float64 if dtype is torch.float32 else dtype

    def to_double(self, *arguments, **named):
        if self.dtype == torch.float64:
            arguments, named = map(doubled, arguments), {name: doubled(value) for name, value in named.items()}
        return to(self, *arguments, **named)

    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else to_float(self)
    torch.Tensor.to = to_double
    torch.Tensor.type = lambda self, dtype: self if self.dtype == torch.float64 else type_(self, dtype)
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim,
                                                                          dtype=doubled(dtype) if x.dtype == torch.float64 else dtype)
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax = to_float, to, type_, softmax


@contextlib.contextmanager
def rmsnorm_in_the_models_dtype():
    """
    transformers' RMSNorm casts to fp32 also when the model is float64. Here the same formula without the cast. Its layers
    of linear attention cast in many places: decay, gated delta rule, gated norm; its routers cast to fp32. Theirs is the
    code that runs here, and in it doubles stay doubles.
    (Its eager attention does the same in the softmax; "sdpa" does not. Rotary angles stay fp32, as everywhere in it.)
    """
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def forward_gemma(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))

    def without_casts(c):
        @functools.wraps(c.forward)  # generate() reads the signature
        def forward(self, *arguments, **named):
            with doubles_stay_doubles():
                return originals[c](self, *arguments, **named)
        return forward

    forwards = {c: forward for c in NORMS} | {c: without_casts(c) for c in CASTING} | {c: forward_gemma for c in OFFSET_NORMS}
    originals = {c: c.forward for c in forwards}
    for c in forwards:
        c.forward = forwards[c]
    try:
        yield
    finally:
        for c, original in originals.items():
            c.forward = original


def attention_of(config):
    """The attention that casts nothing: gpt_oss, which has sinks, has no "sdpa"."""
    return "eager" if config.model_type == "gpt_oss" else "sdpa"


def load_model(folder, dtype, attention=None):
    config = transformers.AutoConfig.from_pretrained(folder)
    attention = attention or attention_of(config)
    model = auto_class(config).from_pretrained(folder, dtype=dtype, attn_implementation=attention,
                                                 experts_implementation="eager")
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mixer.gate")):
            module.to(dtype)  # glm4_moe and nemotron_h keep their routers in fp32
        if dtype == torch.float64 and name.endswith("linear_attn"):
            module.to(dtype)  # olmo_hybrid keeps A_log in fp32
    return model.eval()  # GPT-2's configuration has dropout


def loss_and_gradients(model, stream):
    """Each document alone through the model; the mean of -log p over all targets that count, and its gradient."""
    first_logits, logp = None, []
    for start, length in zip(stream["doc_start"].tolist(), stream["doc_length"].tolist()):
        tokens = stream["tokens"][None, start:start + length].long()
        targets = stream["targets"][start:start + length].long()
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        first_logits = logits if first_logits is None else first_logits
        logp.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    logp = torch.cat(logp)
    weight = stream["loss_weight"].to(logp.dtype)
    loss = -(weight * logp).sum() / weight.sum()
    model.zero_grad()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in text_parameters(model)}
    return loss.detach(), first_logits.detach(), logp.detach(), gradients


def greedy(model, prompt):
    """
    The tokens transformers generates, and the smallest lead of the best over the second logit on the way. Its cache does
    not know how long a text is without a layer of attention, and with it Mamba-2's steps have no bounds in these families.
    """
    kinds = set(getattr(model.config, "layer_types", None) or [None]) - {"linear_attention", "conv"}
    out = model.generate(prompt[None].long(), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         use_cache=bool(kinds) and model.config.model_type not in ("granitemoehybrid", "bamba"),
                         do_sample=False, max_new_tokens=GREEDY_TOKENS, return_dict_in_generate=True, output_logits=True)
    best_two = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, len(prompt):].to(torch.int32), float((best_two[:, 0] - best_two[:, 1]).min())


def route_margin(model, stream):
    """The smallest lead, over all tokens and layers, of the last expert that a router chooses over the next one."""
    leads = [1.0]

    def lead(router, inputs, outputs):
        beside = isinstance(router, Gemma4TextRouter)
        scores, k = (outputs[0].log(), router.config.top_k_experts) if beside else (outputs[0], router.top_k)
        if len(inputs) > 1:  # LFM2's bias
            scores = scores.sigmoid() + inputs[1]
        if isinstance(router, (*SigmoidRouters, Mistral4TopkRouter)):
            softmax = isinstance(router, Mistral4TopkRouter)
            scores = scores if softmax else scores.sigmoid() + router.e_score_correction_bias
            groups = scores.view(len(scores), router.num_group, -1)
            best = groups.topk(2).values
            best = (best.logsumexp(-1) if softmax else best.sum(-1)).topk(min(router.topk_group + 1, router.num_group))
            if router.num_group > router.topk_group:
                leads.append(float((best.values[:, -2] - best.values[:, -1]).min()))
            kept = best.indices[:, :router.topk_group, None].expand(-1, -1, groups.shape[-1])
            scores = groups.gather(1, kept).flatten(1)
        best = scores.topk(k + 1).values
        leads.append(float((best[:, -2] - best[:, -1]).min()))

    hooks = [m.register_forward_hook(lead) for m in model.modules()
             if isinstance(m, Gemma4TextRouter) or hasattr(m, "top_k") and hasattr(m, "weight")]
    with torch.no_grad():
        for start, length in zip(stream["doc_start"].tolist(), stream["doc_length"].tolist()):
            model(input_ids=stream["tokens"][None, start:start + length].long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(leads)


def reference(case, folder):
    """Computed in float64 from the weights as stored in `folder`, returned in fp32 and int32."""
    stream = packed_stream(case)
    with rmsnorm_in_the_models_dtype():
        model = load_model(folder, torch.float64)
        loss, logits, logp, gradients = loss_and_gradients(model, stream)
        tokens, margin = greedy(model, stream["prompt"])
    tensors = dict(stream, loss=loss[None].float(), logits=logits.float(), logp=logp.float(), greedy=tokens)
    tensors |= {f"grad.{name}": gradient.float() for name, gradient in gradients.items()}
    facts = dict(case=case.name, seed=case.seed, loss=float(loss), counted_targets=int(stream["loss_weight"].sum()),
                 greedy_margin=round(margin, 4), arithmetic="float64, rounded to fp32; rotary angles fp32",
                 transformers=transformers.__version__, torch=torch.__version__.split("+")[0])
    return tensors, facts


def is_clear_cut(tokens, margin):
    return margin >= GREEDY_MARGIN and len(set(tokens.tolist())) >= GREEDY_DISTINCT


def write_reference(case, folder):
    tensors, facts = reference(case, folder)
    if not is_clear_cut(tensors["greedy"], facts["greedy_margin"]):
        raise SystemExit(f"{case.name}: greedy tokens are a close call (margin {facts['greedy_margin']}); see --seeds")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # one metadata entry: safetensors does not keep the order of several, and the file would differ from run to run
    save_file(contiguous, folder / "reference.safetensors", metadata={"facts": json.dumps(facts)})
    return facts


# ----------------------------------------------------------------------------------------------------------------------
# llm.c's formats

LLMC_LAYER_TENSORS = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
                      "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
                      "mlp.c_proj.weight", "mlp.c_proj.bias"]


def llmc_header(*fields):
    header = np.zeros(256, np.int32)
    header[:len(fields)] = fields
    return header.tobytes()


def write_llmc_model(path, model, dtype):
    """
    llm.c's GPT-2 checkpoint: wte, wpe, then each kind of layer tensor for all layers, then the last norm. Matrices are
    [out, in] (transformers' Conv1D has [in, out]); wte is padded with zero rows to a multiple of 128.
    """
    config, parameters = model.config, dict(model.named_parameters())
    padded = (config.vocab_size + 127) // 128 * 128
    wte = torch.zeros(padded, config.n_embd)
    wte[:config.vocab_size] = parameters["transformer.wte.weight"]
    tensors = [wte, parameters["transformer.wpe.weight"]]
    for kind in LLMC_LAYER_TENSORS:
        for layer in range(config.n_layer):
            tensor = parameters[f"transformer.h.{layer}.{kind}"]
            tensors.append(tensor.T if tensor.ndim == 2 else tensor)
    tensors += [parameters["transformer.ln_f.weight"], parameters["transformer.ln_f.bias"]]

    version = {torch.float32: 3, torch.bfloat16: 5}[dtype]
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]  # NumPy has no bf16; only the bits matter
    with open(path, "wb") as file:
        file.write(llmc_header(20240326, version, config.n_positions, config.vocab_size, config.n_layer, config.n_head,
                               config.n_embd, padded))
        for tensor in tensors:
            file.write(tensor.detach().to(dtype).contiguous().view(integer).numpy().tobytes())


def shard_tokens(count=4097, vocab_size=96):
    """A chain with little entropy (log 3 nats per token): a model can learn it."""
    step = np.random.default_rng(7).integers(0, 3, count)
    tokens = np.zeros(count, np.int64)
    for t in range(1, count):
        tokens[t] = (5 * tokens[t - 1] + 7 + step[t]) % vocab_size
    return tokens


def write_llmc_shards(folder):
    tokens = shard_tokens()
    for name, magic, version, dtype in [("tokens_uint16.bin", 20240520, 1, np.uint16),   # llm.c's GPT-2 data
                                        ("tokens_uint32.bin", 20240801, 7, np.uint32)]:  # and its Llama 3 data
        (folder / name).write_bytes(llmc_header(magic, version, len(tokens)) + tokens.astype(dtype).tobytes())


# ----------------------------------------------------------------------------------------------------------------------
# Checks: what was written, read back and held against something else


def relative_error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def check_case(case, folder):
    """Against transformers as it is, nothing replaced: fp32, eager attention. Returns the largest relative error."""
    stored = load_file(folder / "reference.safetensors")
    model = load_model(folder, torch.float32, "eager")
    loss, logits, logp, gradients = loss_and_gradients(model, stored)
    tokens, _ = greedy(model, stored["prompt"])
    errors = {"loss": relative_error(loss[None], stored["loss"]), "logits": relative_error(logits, stored["logits"]),
              "logp": relative_error(logp, stored["logp"])}
    errors |= {name: relative_error(g, stored[f"grad.{name}"]) for name, g in gradients.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, f"{case.name}: {worst} is off by {errors[worst]:.1e}"
    assert torch.equal(tokens, stored["greedy"]), f"{case.name}: greedy tokens differ in fp32"
    assert {n for n in stored if n.startswith("grad.")} == {f"grad.{n}" for n in gradients}, f"{case.name}: names"
    assert all(float(g.abs().max()) > 1e-4 for g in gradients.values()), f"{case.name}: a gradient is degenerate"
    return errors[worst]


def check_finite_difference(case, folder, step=1e-7):
    """The float64 gradient along one random direction against a central difference of the loss. Returns the error."""
    stream = load_file(folder / "reference.safetensors")
    rng = torch.Generator().manual_seed(1)
    with rmsnorm_in_the_models_dtype():
        model = load_model(folder, torch.float64)
        for table in (m for m in model.modules() if isinstance(m, torch.nn.Embedding)):
            table.padding_idx = None  # with one it is not the slope
        gradients = loss_and_gradients(model, stream)[3]
        direction = {n: torch.randn(p.shape, generator=rng, dtype=torch.float64) for n, p in text_parameters(model)}
        slope = sum(float((gradients[n] * direction[n]).sum()) for n in gradients)
        loss = []
        for side in (+1, -2):  # from 0 to +step, from there to -step
            with torch.no_grad():
                for name, parameter in text_parameters(model):
                    parameter += side * step * direction[name]
            loss.append(float(loss_and_gradients(model, stream)[0]))
    error = abs((loss[0] - loss[1]) / (2 * step) - slope) / abs(slope)
    assert error < 1e-7, f"{case.name}: the gradient is not the slope of the loss, off by {error:.1e}"
    return error


def check_llmc_model(path, folder, dtype):
    """Reads the file as llm.c does, by sizes alone, and finds the weights of the safetensors file in it."""
    raw = path.read_bytes()
    magic, version, T, V, L, NH, C, Vp = np.frombuffer(raw, np.int32, 8)
    itemsize = 4 if version == 3 else 2
    values = torch.frombuffer(bytearray(raw[1024:]), dtype=torch.float32 if itemsize == 4 else torch.bfloat16)
    shapes = [("wte", 1, (Vp, C)), ("wpe", 1, (T, C)), ("ln_1.weight", L, (C,)), ("ln_1.bias", L, (C,)),
              ("attn.c_attn.weight", L, (3 * C, C)), ("attn.c_attn.bias", L, (3 * C,)),
              ("attn.c_proj.weight", L, (C, C)), ("attn.c_proj.bias", L, (C,)), ("ln_2.weight", L, (C,)),
              ("ln_2.bias", L, (C,)), ("mlp.c_fc.weight", L, (4 * C, C)), ("mlp.c_fc.bias", L, (4 * C,)),
              ("mlp.c_proj.weight", L, (C, 4 * C)), ("mlp.c_proj.bias", L, (C,)), ("ln_f.weight", 1, (C,)),
              ("ln_f.bias", 1, (C,))]
    weights, at = load_file(folder / "model.safetensors"), 0
    for name, copies, shape in shapes:
        for layer in range(copies):
            count = int(np.prod(shape))
            read, at = values[at:at + count].view(*[int(s) for s in shape]), at + count
            if name in ("wte", "wpe"):
                expected = weights[f"transformer.{name}.weight"]
                assert float(read[len(expected):].abs().sum()) == 0, f"{path.name}: padding of {name}"
                read = read[:len(expected)]
            else:
                expected = weights[f"transformer.{name}" if copies == 1 else f"transformer.h.{layer}.{name}"]
                expected = expected.T if expected.ndim == 2 else expected
            assert torch.equal(read, expected.to(dtype)), f"{path.name}: {name} of layer {layer}"
    assert (magic, at) == (20240326, len(values)) and NH == 3, f"{path.name}: header or size"


def check_all():
    for case in CASES:
        folder = HERE / case.name
        with safe_open(folder / "reference.safetensors", "pt") as file:
            facts = json.loads(file.metadata()["facts"])
        print(f"{case.name:14s} loss {facts['loss']:.12f}  targets {facts['counted_targets']}  "
              f"greedy margin {facts['greedy_margin']:.3f}  fp32 transformers within {check_case(case, folder):.1e}  "
              f"finite difference within {check_finite_difference(case, folder):.1e}")
    gpt2 = HERE / "gpt2"
    check_llmc_model(gpt2 / "gpt2_llmc_fp32.bin", gpt2, torch.float32)
    check_llmc_model(gpt2 / "gpt2_llmc_bf16.bin", gpt2, torch.bfloat16)
    a = np.frombuffer((HERE / "tokens_uint16.bin").read_bytes()[1024:], np.uint16)
    b = np.frombuffer((HERE / "tokens_uint32.bin").read_bytes()[1024:], np.uint32)
    assert np.array_equal(a, b) and a.max() < min(GPT2.vocab_size, LLAMA.vocab_size)
    print(f"llm.c files agree; shards hold {len(a)} tokens below {a.max() + 1}")


# ----------------------------------------------------------------------------------------------------------------------


def make_all():
    for case in CASES:
        folder = HERE / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        model = random_model(case)
        save_model(case, model, folder)
        write_reference(case, folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner alone
        if case.name == "gpt2":
            write_llmc_model(folder / "gpt2_llmc_fp32.bin", model, torch.float32)
            write_llmc_model(folder / "gpt2_llmc_bf16.bin", model, torch.bfloat16)
    write_llmc_shards(HERE)


def search_seeds(limit=20000):
    for case in CASES:
        for case.seed in range(limit):
            with torch.no_grad():
                model, stream = random_model(case).float().eval(), packed_stream(case)
                if route_margin(model, stream) < ROUTE_MARGIN:
                    continue
                tokens, margin = greedy(model, stream["prompt"])
            if is_clear_cut(tokens, margin):
                print(f"{case.name:14s} seed {case.seed:3d}  margin {margin:.3f}  {tokens.tolist()}")
                break


def bf16_errors():
    for case in CASES:
        folder, stream = HERE / case.name, load_file(HERE / case.name / "reference.safetensors")
        gradients = loss_and_gradients(load_model(folder, torch.bfloat16), stream)[3]
        expected = {name: stream[f"grad.{name}"].double() for name in gradients}
        squares = [sum((x[name] - y[name]).square().sum().item() for name in x) for x, y in (
            (expected, {name: g.double() for name, g in gradients.items()}), (expected, dict.fromkeys(expected, torch.zeros(()))))]
        print(f"{case.name:14s} bf16 off by {(squares[0] / squares[1]) ** 0.5:.4f}")


def main():
    arguments = argparse.ArgumentParser(description="Makes and checks the golden fixtures.")
    arguments.add_argument("--check", action="store_true", help="check the files that are there, write nothing")
    arguments.add_argument("--seeds", action="store_true", help="search seeds with clear-cut greedy tokens")
    arguments.add_argument("--bf16", action="store_true", help="print the errors of transformers in bf16")
    arguments.add_argument("cases", nargs="*", help="only these folders")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # sums in one order
    if options.cases:
        CASES[:] = [case for case in CASES if case.name in options.cases]
    if options.seeds or options.bf16:
        search_seeds() if options.seeds else bf16_errors()
        return
    if not options.check:
        make_all()
    check_all()


if __name__ == "__main__":
    main()
