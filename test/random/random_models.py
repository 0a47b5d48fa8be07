#!/usr/bin/env python3
"""Random configurations of every family against transformers: loss and the gradient of every parameter in float64, of documents of
different lengths packed into a sequence, by a random method and chunk size; now and then greedy text, and the folder that `convert`
writes, whose weights must be the same bytes. The last line has the worst errors of all trials.

    test/random/random_models.py                      100 trials; TRAIN=build/cpu-double/train (make PRECISION=double train)
    test/random/random_models.py --seed 7 --trials 20 --families glm4,olmo3
    test/random/random_models.py --seed 7 --only 13   one trial again, with its configuration
    test/random/random_models.py --mutate --trials 2000   configurations with a few keys changed, left out, null, of another
                                                   type or another family: read as transformers reads them, or refused

The reference is transformers without its casts to fp32 (test/golden/make_golden.py), with sines, cosines and
logarithms rounded correctly (torch's logarithm of 7 in fp32, of Ministral 3's queries, is off by an ulp). Needs torch and transformers.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test" / "golden"), str(ROOT / "data")]
warnings.filterwarnings("ignore")
import make_golden  # noqa: E402
import numpy as np  # noqa: E402
import shards  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402
from transformers import (BambaConfig,
DeepseekV3Config, Ernie4_5Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig, GPT2Config,  # noqa: E402
                          GptOssConfig, GraniteConfig, GraniteMoeHybridConfig, HunYuanDenseV1Config, Lfm2Config, Lfm2MoeConfig, Lfm3Config,
                          LlamaConfig, Ministral3Config, Mistral4Config, MistralConfig,
                          MixtralConfig, MuseGlimmerConfig, NemotronHConfig, Olmo2Config, Olmo3Config, OlmoHybridConfig, Phi3Config,
                          Qwen2Config, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig,
                          SeedOssConfig, SmolLM3Config)

TRAIN = os.environ.get("TRAIN", str(ROOT / "build" / "cpu-double" / "train"))
LOSS, GRADIENT = 1e-11, 1e-6  # gradients are written in fp32
EXACT = 1e-12                 # of mutated configurations: the loss, the gradients' norm


# ---- configurations --------------------------------------------------------------------------------------------------------------
def scaling(r, positions):
    """Draws a rope type and its keys."""
    kind = r.choice(["default", "default", "linear", "llama3", "yarn", "yarn"])
    rope = dict(rope_type=kind, rope_theta=float(r.choice([5e3, 1e4, 5e5, 1e6, 12345.6])))
    if kind != "default":
        rope["factor"] = r.choice([1.5, 2.0, 4.0, 8.0])
    if kind == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=r.choice([2.0, 4.0]))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = r.choice([16, 32, positions])
    if kind == "yarn":
        rope |= r.choice([{}, dict(attention_factor=1.3), dict(truncate=False),
                          dict(mscale=0.8, mscale_all_dim=1.1, beta_fast=16.0, beta_slow=0.5)])
    return rope


def sizes(r):
    """Draws the keys of all rotated families. transformers needs hidden_size to be a multiple of the heads, and even head widths."""
    groups, kv = r.choice([1, 2, 3, 4]), r.choice([1, 1, 2, 3])
    return dict(vocab_size=r.randrange(60, 140), hidden_size=groups * kv * r.randrange(3, 60 // (groups * kv) + 4),
                intermediate_size=r.randrange(9, 90),
                num_hidden_layers=r.randrange(1, 5), num_attention_heads=groups * kv, num_key_value_heads=kv,
                head_dim=2 * r.randrange(2, 17), max_position_embeddings=256, rms_norm_eps=r.choice([1e-6, 1e-5, 1e-3]),
                tie_word_embeddings=r.random() < 0.5)


def part(r, width):
    """Draws the rotated share of a head, an even number of elements."""
    return r.choice([p for p in (0.25, 0.5, 0.75, 1.0) if width * p % 2 == 0])


def width_of_heads(r, s):
    """Draws head_dim for classes that lack it but read it: given, or derived from other keys. Returns it."""
    if r.random() < 0.3:
        return s["head_dim"]
    s["hidden_size"] = s["num_attention_heads"] * s["head_dim"]
    return s.pop("head_dim")


def kinds(r, n, other):
    return [r.choice(["full_attention", other]) for _ in range(n)]


def per_kind(r):
    rope = dict(full_attention=scaling(r, 64), sliding_attention=dict(rope_type="default", rope_theta=r.choice([1e3, 1e4])))
    rope["full_attention"].pop("truncate", None)
    return rope


def gpt2(r):
    heads = r.choice([1, 2, 3, 5])
    return GPT2Config(vocab_size=r.randrange(60, 140), n_positions=128, n_embd=heads * r.randrange(3, 15), n_layer=r.randrange(1, 4),
                      n_head=heads, n_inner=r.choice([None, r.randrange(9, 90)]), layer_norm_epsilon=r.choice([1e-5, 1e-3]),
                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama(r):
    return LlamaConfig(**sizes(r), rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3)


def mistral(r):
    return MistralConfig(**sizes(r), rope_parameters=scaling(r, 64), sliding_window=r.choice([None, r.randrange(1, 30)]))


def ministral3(r):
    rope = dict(rope_theta=1e4, original_max_position_embeddings=r.choice([5, 12, 30]),
                llama_4_scaling_beta=r.choice([0.0, 0.1, 0.7]))
    rope |= r.choice([dict(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=r.choice([0.5, 1.0]))] * 3 + [
        dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_type="default", llama_4_scaling_beta=0.0)])
    return Ministral3Config(**sizes(r), rope_parameters=rope, sliding_window=r.choice([None, None, r.randrange(1, 30)]))


def qwen_windows(r, layers):
    some = dict(use_sliding_window=True, sliding_window=r.randrange(1, 30))
    return r.choice([{}, some | dict(max_window_layers=r.randrange(0, layers)),
                     some | dict(layer_types=kinds(r, layers, "sliding_attention"))])


def qwen2(r):
    s = sizes(r)
    return Qwen2Config(**s, rope_parameters=scaling(r, 64), **qwen_windows(r, s["num_hidden_layers"]))


def qwen3(r):
    s = sizes(r)
    return Qwen3Config(**s, rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3, **qwen_windows(r, s["num_hidden_layers"]))


def gemma3(r):
    s = sizes(r)
    return Gemma3TextConfig(**s, layer_types=kinds(r, s["num_hidden_layers"], "sliding_attention"), sliding_window=r.randrange(1, 30),
                            query_pre_attn_scalar=r.choice([8, 24, 256]), rope_parameters=per_kind(r), attention_bias=r.random() < 0.3)


def gemma4(r):
    """Draws a dense model, one with experts beside, one with shared keys and own inputs, or any mixture."""
    s, full = sizes(r), r.random() < 0.5
    layers, E = s["num_hidden_layers"], r.choice([None, None, r.randrange(2, 9)])
    shared = r.choice([0, r.randrange(0, layers)])
    own = kinds(r, layers - shared, "sliding_attention")
    types = own + [r.choice(own) for _ in range(shared)]
    if shared and "full_attention" not in own:
        types[0] = "full_attention"
    types[-1] = "full_attention"
    if shared and "sliding_attention" not in types[:layers - shared]:
        types = ["full_attention"] * layers
    heads = s["num_attention_heads"]
    rope = dict(full_attention=dict(rope_type="proportional", rope_theta=r.choice([1e4, 1e6]),
                                    partial_rotary_factor=r.choice([0.25, 0.5, 0.3, 1.0])),
                sliding_attention=dict(rope_type="default", rope_theta=r.choice([1e3, 1e4])))
    experts = dict(enable_moe_block=True, num_experts=E, top_k_experts=r.randrange(1, E + 1),
                   moe_intermediate_size=r.randrange(3, 40)) if E else {}
    return Gemma4TextConfig(**s, **experts, layer_types=types, sliding_window=r.randrange(1, 30), rope_parameters=rope,
                            global_head_dim=2 * r.randrange(2, 20), attention_k_eq_v=full, num_kv_shared_layers=shared,
                            num_global_key_value_heads=r.choice([None, *(n for n in range(1, heads + 1) if heads % n == 0)]),
                            use_double_wide_mlp=r.random() < 0.5, attention_bias=r.random() < 0.3,
                            final_logit_softcapping=r.choice([None, 2.0, 5.0, 30.0]),
                            hidden_size_per_layer_input=r.choice([0, 0, r.randrange(1, 20)]),
                            vocab_size_per_layer_input=s["vocab_size"] + r.choice([0, 0, 7]))


def qwen3_5(r):
    s = sizes(r)
    keys, rope = r.choice([1, 2, 3]), scaling(r, 64)
    s["rms_norm_eps"], s["head_dim"] = 1e-3, 4 * r.randrange(2, 9)
    rope["partial_rotary_factor"] = r.choice([0.5, 1.0])
    return Qwen3_5TextConfig(**s, layer_types=kinds(r, s["num_hidden_layers"], "linear_attention"), rope_parameters=rope,
                             linear_num_key_heads=keys, linear_num_value_heads=keys * r.choice([1, 2, 3]),
                             linear_key_head_dim=r.randrange(3, 20), linear_value_head_dim=r.randrange(3, 20),
                             linear_conv_kernel_dim=r.randrange(1, 5), attention_bias=r.random() < 0.3)


def smollm3(r):
    s = sizes(r)
    width_of_heads(r, s)
    without = r.choice([dict(no_rope_layers=[r.randrange(2) for _ in range(s["num_hidden_layers"])]),
                        dict(no_rope_layer_interval=r.randrange(1, 5))])
    return SmolLM3Config(**s, **without, rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3)


def olmo2(r):
    return Olmo2Config(**sizes(r), rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3)


def olmo3(r):
    s = sizes(r)
    return Olmo3Config(**s, layer_types=kinds(r, s["num_hidden_layers"], "sliding_attention"), sliding_window=r.randrange(1, 30),
                       rope_parameters=per_kind(r), attention_bias=r.random() < 0.3)


def olmo_hybrid(r):
    """At least a layer of each kind, as the class asks. Its heads are as wide as other keys say, or as head_dim does."""
    s, keys = sizes(r), r.choice([1, 2, 3])
    width_of_heads(r, s)
    s["num_hidden_layers"] += 1
    types = ["linear_attention", "full_attention"] + kinds(r, s["num_hidden_layers"] - 2, "linear_attention")
    r.shuffle(types)
    heads = r.choice([{}, dict(linear_num_key_heads=keys, linear_num_value_heads=keys * r.choice([1, 2, 3]),
                               linear_key_head_dim=r.randrange(3, 20), linear_value_head_dim=r.randrange(3, 20))])
    return OlmoHybridConfig(**s, **heads, layer_types=types, linear_conv_kernel_dim=r.randrange(1, 5), attention_bias=r.random() < 0.3,
                            linear_allow_neg_eigval=r.random() < 0.7,
                            rope_parameters=r.choice([dict(rope_type="default", rope_theta=None), scaling(r, 64)]))


def phi3(r):
    s = sizes(r)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=part(r, width_of_heads(r, s)))
    return Phi3Config(**s, rope_parameters=rope, sliding_window=r.choice([None, r.randrange(1, 30)]))


def glm4(r):
    s, rope = sizes(r), scaling(r, 64)
    rope["partial_rotary_factor"] = part(r, s["head_dim"])
    return Glm4Config(**s, rope_parameters=rope, attention_bias=r.random() < 0.6)


def granite(r):
    return GraniteConfig(**sizes(r), rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3,
                         embedding_multiplier=r.choice([1, 0.5, 12.0]), attention_multiplier=r.choice([0.125, 0.5, 1.0]),
                         residual_multiplier=r.choice([0.22, 1.0, 1.7]), logits_scaling=r.choice([0.7, 1, 8.0]))


def seed_oss(r):
    return SeedOssConfig(**sizes(r), rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.7, mlp_bias=r.random() < 0.3,
                         attention_dropout=0.0, residual_dropout=0.0)


def hunyuan_v1_dense(r):
    grown = dict(rope_type="dynamic", rope_theta=1e4, alpha=r.choice([2.0, 1000.0]), factor=1.0)
    return HunYuanDenseV1Config(**sizes(r), rope_parameters=r.choice([grown, scaling(r, 64)]), attention_bias=r.random() < 0.3)


def ernie4_5(r):
    return Ernie4_5Config(**sizes(r), rope_parameters=scaling(r, 64), use_bias=r.random() < 0.5)


def lfm2(r):
    s = sizes(r)
    width_of_heads(r, s)
    layers, s["norm_eps"] = s["num_hidden_layers"], s.pop("rms_norm_eps")
    which = r.choice([dict(layer_types=kinds(r, layers, "conv")), dict(full_attn_idxs=[l for l in range(layers) if r.random() < 0.4])])
    return Lfm2Config(**s, **which, rope_parameters=scaling(r, 64), conv_L_cache=r.randrange(1, 9), block_multiple_of=r.choice([1, 8, 24]),
                      block_ffn_dim_multiplier=r.choice([1.0, 1.3]), block_auto_adjust_ff_dim=r.random() < 0.7)


def lfm3(r):
    s = sizes(r)
    layers, s["norm_eps"] = s["num_hidden_layers"], s.pop("rms_norm_eps")
    types = [None, [r.choice(["conv", "full_attention", "sliding_attention"]) for _ in range(layers)]]
    rope = dict(full_attention=dict(rope_type=r.choice(["proportional", "proportional", "default"]), rope_theta=r.choice([1e4, 1e6]),
                                    partial_rotary_factor=r.choice([0.25, 0.5, 1.0])),
                sliding_attention=dict(rope_type="default", rope_theta=r.choice([1e3, 1e4])))
    return Lfm3Config(**s, layer_types=r.choice(types), sliding_window=r.randrange(1, 30), conv_L_cache=r.randrange(1, 9),
                      rope_parameters=rope, attention_bias=r.random() < 0.3)


def lfm2_moe(r):
    s, (E, e) = sizes(r), experts(r)
    width_of_heads(r, s)
    layers, s["norm_eps"] = s["num_hidden_layers"], s.pop("rms_norm_eps")
    return Lfm2MoeConfig(**s, **e, num_experts=E, layer_types=kinds(r, layers, "conv"), rope_parameters=scaling(r, 64),
                         conv_L_cache=r.randrange(1, 9), num_dense_layers=r.randrange(0, layers + 1), norm_topk_prob=r.random() < 0.5,
                         routed_scaling_factor=r.choice([1.0, 2.5]))


def muse_glimmer(r):
    """The text of the composite class, with the vision tower of the golden model."""
    s, rope = sizes(r), scaling(r, 64)
    types = r.choice([None, kinds(r, s["num_hidden_layers"], "sliding_attention")])
    thetas = types and [r.choice([0, rope["rope_theta"]]) if t == "full_attention" else rope["rope_theta"] for t in types]
    s["tie_word_embeddings"] = False  # the class ignores the key in text_config
    text = dict(**s, layer_types=types, layer_rope_theta=thetas, rope_parameters=rope, sliding_window=r.randrange(1, 30),
                post_norm_eps=r.choice([1e-8, 1e-3]), qk_scale_factor=r.choice([1.0, 3.87]), output_multiplier=r.choice([0.2, 1.5]),
                final_logit_softcapping=r.choice([2.0, 20.0]), attention_bias=r.random() < 0.3)
    golden = make_golden.MUSE_GLIMMER.to_dict()
    return MuseGlimmerConfig(text_config=text, vision_config=golden["vision_config"], out_hidden_size=32, projector_hidden_size=8)


def experts(r, most=16):
    """Draws the keys of a layer's experts: as many as there are of a token, or up to `most`."""
    E = r.randrange(2, most + 1)
    return E, dict(num_experts_per_tok=r.choice([1, 2, E, r.randrange(1, E + 1)]), moe_intermediate_size=r.randrange(3, 40))


def qwen3_moe(r):
    s, (E, e) = sizes(r), experts(r)
    layers = s["num_hidden_layers"]
    dense = [l for l in range(layers) if r.random() < 0.3] if r.random() < 0.4 else []
    return Qwen3MoeConfig(**s, **e, num_experts=E, mlp_only_layers=dense, decoder_sparse_step=r.choice([1, 1, 2, 3]),
                          norm_topk_prob=r.random() < 0.5, rope_parameters=scaling(r, 64), attention_bias=r.random() < 0.3)


def qwen3_5_moe(r):
    c, (E, e) = qwen3_5(r).to_dict(), experts(r)
    kept = {key: c[key] for key in Qwen3_5MoeTextConfig().to_dict() if key in c and key not in ("model_type", "architectures")}
    return Qwen3_5MoeTextConfig(**kept, **e, num_experts=E, shared_expert_intermediate_size=r.randrange(3, 50))


def qwen3_next(r):
    c, (E, e) = qwen3_5(r).to_dict(), experts(r)
    kept = {key: c[key] for key in Qwen3NextConfig().to_dict() if key in c and key not in ("model_type", "architectures")}
    layers = c["num_hidden_layers"]
    return Qwen3NextConfig(**kept, **e, num_experts=E, shared_expert_intermediate_size=r.randrange(3, 50), norm_topk_prob=r.random() < 0.5,
                           mlp_only_layers=[l for l in range(layers) if r.random() < 0.3], decoder_sparse_step=r.choice([1, 1, 2]))


def mixtral(r):
    E, e = experts(r)
    del e["moe_intermediate_size"]
    return MixtralConfig(**sizes(r), **e, num_local_experts=E, rope_parameters=scaling(r, 64),
                         sliding_window=r.choice([None, None, r.randrange(1, 30)]))


def glm4_moe(r):
    s, rope, groups = sizes(r), scaling(r, 64), r.choice([1, 1, 2, 3, 4])
    E, kept = groups * r.randrange(2, 6), r.randrange(1, groups + 1)
    rope["partial_rotary_factor"] = part(r, s["head_dim"])
    return Glm4MoeConfig(**s, n_routed_experts=E, num_experts_per_tok=r.randrange(1, E // groups * kept + 1), n_group=groups,
                         topk_group=kept, moe_intermediate_size=r.randrange(3, 40), n_shared_experts=r.choice([1, 1, 2]),
                         first_k_dense_replace=r.randrange(0, s["num_hidden_layers"] + 1), num_mtp_layers=0,
                         norm_topk_prob=r.random() < 0.5, use_qk_norm=r.random() < 0.5,
                         routed_scaling_factor=r.choice([1.0, 2.5]), rope_parameters=rope, attention_bias=r.random() < 0.5)


def latents(r):
    """Draws the keys of latent attention, values as wide as keys or narrower, and of experts in groups. For other rope types: YaRN."""
    s, rope, groups = sizes(r), scaling(r, 64), r.choice([1, 1, 2, 3])
    del s["head_dim"]
    s["num_key_value_heads"] = s["num_attention_heads"]
    if rope.get("rope_type") not in (None, "default"):
        rope = dict(rope_type="yarn", rope_theta=1e4, factor=r.choice([4.0, 40.0]), original_max_position_embeddings=r.choice([12, 32]))
        rope["mscale"] = rope["mscale_all_dim"] = r.choice([0.8, 1.0])
    E, kept = groups * r.randrange(2, 6), r.randrange(1, groups + 1)
    own, shared = 2 * r.randrange(1, 9), 2 * r.randrange(1, 9)
    return s | dict(n_routed_experts=E, num_experts_per_tok=r.randrange(1, E // groups * kept + 1), n_group=groups, topk_group=kept,
                    moe_intermediate_size=r.randrange(3, 40), n_shared_experts=r.choice([1, 1, 2]),
                    q_lora_rank=r.choice([None, r.randrange(1, 40), r.randrange(1, 40)]), kv_lora_rank=r.randrange(1, 40),
                    qk_nope_head_dim=own, qk_rope_head_dim=shared, v_head_dim=r.choice([own + shared, r.randrange(1, own + shared + 1)]),
                    norm_topk_prob=r.random() < 0.5, routed_scaling_factor=r.choice([1.0, 1.8]), rope_parameters=rope)


def glm4_moe_lite(r):
    s = latents(r)
    return Glm4MoeLiteConfig(**s, mlp_layer_types=[r.choice(["dense", "sparse"]) for _ in range(s["num_hidden_layers"])])


def deepseek_v3(r):
    s = latents(r)
    return DeepseekV3Config(**s, num_mtp_layers=0, first_k_dense_replace=r.randrange(0, s["num_hidden_layers"] + 1))


def mistral4(r):
    """YaRN, the share of a head that is rotated as its class computes it, queries that grow with their position."""
    s = latents(r)
    own, shared = s["qk_nope_head_dim"], s["qk_rope_head_dim"]
    if int((own + shared) * (shared / (own + shared))) != shared:
        s["qk_nope_head_dim"] = shared
        s["v_head_dim"] = min(s["v_head_dim"], 2 * shared)
    s["rope_parameters"] = dict(rope_type="yarn", rope_theta=1e4, factor=r.choice([4.0, 128.0]), mscale=1.0, mscale_all_dim=1.0,
                                original_max_position_embeddings=r.choice([5, 12, 30]), llama_4_scaling_beta=r.choice([0.0, 0.1, 0.7]))
    return Mistral4Config(**s, first_k_dense_replace=r.randrange(0, s["num_hidden_layers"] + 1))


def nemotron_h(r):
    """One branch a layer; steps at their lower bound or above."""
    s, groups, G = sizes(r), r.choice([1, 1, 2, 3]), r.choice([1, 2, 3])
    E, kept = groups * r.randrange(2, 6), r.randrange(1, groups + 1)
    s["layer_norm_epsilon"] = s.pop("rms_norm_eps")
    pattern = "".join(r.choice("MMME*-") for _ in range(r.randrange(1, 7)))
    return NemotronHConfig(**s | dict(tie_word_embeddings=False, num_hidden_layers=None), hybrid_override_pattern=pattern,
                           ssm_state_size=r.randrange(1, 20), mamba_num_heads=G * r.randrange(1, 4), mamba_head_dim=r.randrange(1, 14),
                           n_groups=G, conv_kernel=r.randrange(2, 6), chunk_size=16, time_step_min=r.choice([0.001, 0.5]),
                           n_routed_experts=E, num_experts_per_tok=r.randrange(1, E // groups * kept + 1), n_group=groups,
                           topk_group=kept, moe_intermediate_size=r.randrange(3, 40), norm_topk_prob=r.random() < 0.5,
                           moe_shared_expert_intermediate_size=r.randrange(3, 50), routed_scaling_factor=r.choice([1.0, 2.5]))


def mamba(r, s):
    """Draws the keys of Mamba-2 in classes with mamba_expand; changes hidden_size to fit."""
    groups, expand = r.choice([1, 1, 2, 3]), r.choice([1, 2, 2, 3])
    heads = groups * r.randrange(1, 4)
    s["hidden_size"] = s["num_attention_heads"] * heads * r.randrange(1, max(2, 60 // (s["num_attention_heads"] * heads)))
    limit = r.choice([(0.0, float("inf")), (0.0, float("inf")), (0.3, 1.0), (0.6, float("inf")), (0.0, 0.8)])
    return dict(mamba_n_heads=heads, mamba_n_groups=groups, mamba_expand=expand, mamba_d_state=r.randrange(1, 20), time_step_limit=limit,
                mamba_d_head=r.choice(["auto", expand * s["hidden_size"] // heads]), mamba_d_conv=r.randrange(2, 6), mamba_chunk_size=16)


def granitemoehybrid(r):
    s = sizes(r)
    m, dense = mamba(r, s), r.random() < 0.4
    if r.random() < 0.6:
        del s["head_dim"]
        s["hidden_size"] *= 2
        m["mamba_d_head"] = "auto"
    E = 0 if dense else r.randrange(2, 9)
    types = [r.choice(["mamba", "mamba", "attention"]) for _ in range(s["num_hidden_layers"])]
    return GraniteMoeHybridConfig(**s, **m, layer_types=r.choice([types, types, None]), num_local_experts=E,
                                  num_experts_per_tok=r.choice([1, 2]) if E else r.choice([0, 2]), shared_intermediate_size=r.randrange(3, 50),
                                  position_embedding_type=r.choice(["rope", "nope", None]), rope_parameters=scaling(r, 64),
                                  attention_bias=r.random() < 0.3, embedding_multiplier=r.choice([1, 0.5, 12.0]),
                                  attention_multiplier=r.choice([0.125, 0.5, 1.0]), residual_multiplier=r.choice([0.22, 1.0, 1.7]),
                                  logits_scaling=r.choice([0.7, 1, 8.0]))


def bamba(r):
    s, rope = sizes(r), scaling(r, 64)
    m = mamba(r, s)
    s["head_dim"] = 4 * (s["head_dim"] // 4 or 1)
    if r.random() < 0.3:
        rope["partial_rotary_factor"] = part(r, s["head_dim"])  # else the class rotates a half
    layers = [l for l in range(s["num_hidden_layers"]) if r.random() < 0.4]
    return BambaConfig(**s, **m, attn_layer_indices=r.choice([layers, layers, None]), rope_parameters=rope,
                       attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3)


def gpt_oss(r):
    s, E = sizes(r), r.choice([1, *range(2, 17)])
    some = {} if r.random() < 0.2 else dict(rope_parameters=scaling(r, 64))  # {}: the class's YaRN
    return GptOssConfig(**s, **some, num_local_experts=E, num_experts_per_tok=r.choice([1, min(2, E), E, r.randrange(1, E + 1)]),
                        layer_types=r.choice([None, kinds(r, s["num_hidden_layers"], "sliding_attention")]),
                        sliding_window=r.randrange(1, 71), swiglu_alpha=r.choice([1.702, 0.5, 3.0]),
                        swiglu_limit=r.choice([7.0, 1.0, 0.3]), attention_bias=r.random() < 0.7)


FAMILIES = dict(gpt2=gpt2, llama=llama, mistral=mistral, ministral3=ministral3, qwen2=qwen2, qwen3=qwen3, gemma3=gemma3, gemma4=gemma4,
                qwen3_5=qwen3_5, smollm3=smollm3, olmo2=olmo2, olmo3=olmo3, phi3=phi3, glm4=glm4, granite=granite, qwen3_moe=qwen3_moe,
                qwen3_5_moe=qwen3_5_moe, mixtral=mixtral, glm4_moe=glm4_moe, glm4_moe_lite=glm4_moe_lite, deepseek_v3=deepseek_v3,
                mistral4=mistral4, gpt_oss=gpt_oss, seed_oss=seed_oss,
                hunyuan_v1_dense=hunyuan_v1_dense, ernie4_5=ernie4_5, qwen3_next=qwen3_next, muse_glimmer=muse_glimmer,
                lfm2=lfm2, lfm2_moe=lfm2_moe, lfm3=lfm3,
                olmo_hybrid=olmo_hybrid,
                nemotron_h=nemotron_h, granitemoehybrid=granitemoehybrid, bamba=bamba)


# ---- mutated config.json ---------------------------------------------------------------------------------------------------------
# Values by key, beside what any key may become (OTHERS); those of a family are no keys of most others.
VALUES = dict(
    hidden_act=["swish", "gelu", "silu", "relu"], hidden_activation=["gelu_new", "gelu_accurate", "gelu", "silu"],
    activation_function=["gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu", "relu"],
    pad_token_id=[0, 1, 3, 17, -1, -2, 59, 5000, True, 2.0, "1"], eos_token_id=[0, 1, 3, [1, 3], None],
    bos_token_id=[1, None], rope_theta=[1e4, 5e5, 12345, None], partial_rotary_factor=[0.5, 1.0, 0.25],
    rope_local_base_freq=[1e4, 1e3, None], original_max_position_embeddings=[16, 64],
    max_position_embeddings=[64, 256], rms_norm_eps=[1e-5, 1e-2, 1], layer_norm_epsilon=[1e-5, 1e-2],
    tie_word_embeddings=[True, False], attention_bias=[True, False], mlp_bias=[True, False],
    sliding_window=[None, 0, 3, 9], use_sliding_window=[True, False], max_window_layers=[0, 1, 28, None],
    layer_types=[None, ["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"],
                 ["attention"]],
    sliding_window_pattern=[1, 2, 6, None], head_dim=[None, 8, 12], num_key_value_heads=[None, 1, 2],
    num_hidden_layers=[1, 2], intermediate_size=[24, 40], n_inner=[None, 40], n_embd=[24, 30], n_head=[2, 3],
    hidden_size=[24, 30], n_layer=[1, 2], query_pre_attn_scalar=[16, 24.0, 256], initializer_range=[0.5, 0.01, 2],
    is_causal=[True, None], clip_qkv=[None, 8], attn_logit_softcapping=[None, 50.0],
    final_logit_softcapping=[None, 30.0, 2.0, 0], use_bidirectional_attention=[False, None, "vision", "all"],
    scale_attn_weights=[True, False, None], scale_attn_by_inverse_layer_idx=[False, True],
    reorder_and_upcast_attn=[False], no_rope_layers=[None, [1, 0], [0, 1, 1, 1]], no_rope_layer_interval=[1, 2, 4],
    full_attention_interval=[1, 2, 4], attn_output_gate=[True, None], add_cross_attention=[False, None],
    is_encoder_decoder=[False], use_cache=[True, False, None], attention_dropout=[0.0, 0.1, None, 0],
    resid_pdrop=[0.0, 0.1], embd_pdrop=[0.0, 0.1], pretraining_tp=[1, 2], torch_dtype=["bfloat16", "float32", None],
    dtype=["float16", None, "auto"], transformers_version=["4.1.0", None], linear_conv_kernel_dim=[2, 4],
    linear_allow_neg_eigval=[True, False], linear_num_key_heads=[1, 2], linear_num_value_heads=[2, 4], linear_key_head_dim=[8], vocab_size=[60, 77],
    use_bias=[True, False, None], residual_dropout=[0.0, 0, 0.1], attention_out_bias=[True, False],
    embedding_multiplier=[2, 0.5], residual_multiplier=[0.3, 2], attention_multiplier=[0.1], logits_scaling=[3, 0],
    num_experts=[2, 5, 0], num_local_experts=[2, 5], n_routed_experts=[2, 4], num_experts_per_tok=[1, 2, 7, 0],
    moe_intermediate_size=[8, 0], shared_expert_intermediate_size=[8, 0], n_shared_experts=[1, 2, 0], decoder_sparse_step=[1, 2, 0, -1],
    first_k_dense_replace=[0, 1, 9], mlp_only_layers=[[0], [1, 7], [-1], None], n_group=[1, 2, 0], topk_group=[1, 2, 0],
    norm_topk_prob=[True, False], routed_scaling_factor=[2.5, 1, 0], router_jitter_noise=[0.0, 0.1], use_qk_norm=[True, False],
    conv_L_cache=[1, 2, 7, 9, 0], conv_bias=[False, True, 0], norm_eps=[1e-5, 1e-2, 1, None], full_attn_idxs=[None, [0], [1, 9], [-1], ["0"]],
    use_sandwich_norm=[True, False], use_attention_gate=[True, False], num_dense_layers=[0, 1, 9, None], use_expert_bias=[True, False], block_ff_dim=[24, 40, None], tie_embedding=[True, False, None], block_auto_adjust_ff_dim=[True, False, None],
    block_multiple_of=[1, 16, 0], block_ffn_dim_multiplier=[1.0, 0.7, 2, None],
    swiglu_alpha=[1.0, 0, None], swiglu_limit=[0.5, 0, None],
    q_lora_rank=[None, 4, 0], kv_lora_rank=[3, 0], qk_nope_head_dim=[2, 3], qk_rope_head_dim=[2, 3], v_head_dim=[1, 3, 40, None],
    rope_interleave=[True, False, None], mlp_layer_types=[None, ["dense"], ["sparse", "dense"]], num_mtp_layers=[0, 1],
    router_aux_loss_coef=[0.5, 0], output_router_logits=[True], num_nextn_predict_layers=[0, 1, 2],
    mamba_n_heads=[1, 2, 4], mamba_n_groups=[1, 2, 0], mamba_d_state=[3, 8, 0], mamba_d_head=["auto", 8, 12, None, "8"],
    mamba_d_conv=[1, 2, 4, 9], mamba_expand=[1, 2, 3, 1.5, None], mamba_conv_bias=[True, False, None], mamba_proj_bias=[False, True],
    mamba_chunk_size=[8, 16], attn_layer_indices=[None, [], [0], [1, 9], [-1]], z_loss_coefficient=[0.0, 0, 0.1, None],
    time_step_limit=[None, [0.0, 1.0], [0.2, {"__float__": "Infinity"}], [-1.0, float("inf")], [0.5, 0.5], [0.0, float("inf")], [0.5]],
    position_embedding_type=["rope", "nope", None, "alibi"], shared_intermediate_size=[8, 24, None],
    layers_block_type=[None, ["mamba"], ["mamba", "attention"], ["linear_attention", "full_attention"]],
    time_step_min=[0.1], time_step_max=[0.5], global_head_dim=[8, 6, None], num_global_key_value_heads=[1, 2, None], attention_k_eq_v=[True, False],
    num_kv_shared_layers=[0, 1, 2], use_double_wide_mlp=[True, False], hidden_size_per_layer_input=[0, 4, None],
    vocab_size_per_layer_input=[60, 160, 30], enable_moe_block=[True, False], top_k_experts=[1, 2, None, 0],
    per_layer_config=[{}, {"0": dict(head_dim=8)}, {"00": dict(head_dim=8, num_key_value_heads=1)}, {"1": dict(sliding_window=3)}],
    type_vocab_size=[2], quantization_config=[None], return_dict=[True, None],
    architectures=[None], _name_or_path=["x"], auto_map=[{}], rope_scaling=[None, {}], rope_parameters=[None, {}])
ROPE = dict(rope_type=["default", "linear", "yarn", "llama3", "dynamic", "proportional", None],
            type=["default", "linear", "yarn", "mrope"], rope_theta=[1e4, 5e5, 777, None], factor=[2.0, 4, None, 0.5],
            partial_rotary_factor=[0.5, 1.0, 1, None], original_max_position_embeddings=[16, 32, None],
            attention_factor=[1.2, None, 1], beta_fast=[16.0, None, 32], beta_slow=[0.5, None, 1],
            mscale=[1.0, 0.7, None, 0], mscale_all_dim=[0.5, None], truncate=[False, None, True], alpha=[50.0, 0, None],
            low_freq_factor=[1.0, None], high_freq_factor=[4.0, 2], llama_4_scaling_beta=[0.1, 0.0, None],
            max_position_embeddings=[64], mrope_section=[[1, 1, 2]], unknown=[1])
OTHERS = [None, True, 1, 2.0, "1", [], {}]
SCALINGS = [dict(factor=2.0), dict(factor=4.0, original_max_position_embeddings=32),
            dict(factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0), {}]


def change(r, where, values):
    """Drops one key of an object, or gives it another value, another type, or the value of another key."""
    key = r.choice([k for k in where] or list(values)) if r.random() < 0.45 else r.choice(list(values))
    if key in where and r.random() < 0.25:
        del where[key]
        return f"-{key}"
    where[key] = r.choice(OTHERS) if key not in values or r.random() < 0.15 else r.choice(values[key])
    return f"{key}={where[key]!r}"


def scale(r, config):
    """Adds rope_scaling to rope_parameters or replaces it, with its type under either name."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and r.random() < 0.5:
        rope = config.pop("rope_parameters")
        flat = rope.get("full_attention", rope)
        if "rope_theta" in flat and r.random() < 0.7:
            config["rope_theta"] = flat.pop("rope_theta")
        config["rope_scaling"] = {r.choice(["type", key]) if key == "rope_type" else key: value
                                  for key, value in flat.items()}
    else:
        config["rope_scaling"] = r.choice([{}, dict(rope_theta=r.choice(ROPE["rope_theta"]))]) | r.choice(SCALINGS) | {
            r.choice(["type", "rope_type"]): r.choice(ROPE["rope_type"])}
    return f"rope_scaling={config['rope_scaling']} beside {config.get('rope_parameters')}, {config.get('rope_theta')}"


def mutate(r, config):
    """Changes a config.json; returns how."""
    said = []
    for _ in range(r.choice([1, 1, 1, 2, 2, 3])):
        ropes = [config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
        what = r.random()
        if what < 0.2:
            said.append(scale(r, config))
        elif what < 0.4 and ropes:
            said.append("rope: " + change(r, r.choice(ropes), ROPE))
        else:
            said.append(change(r, config, VALUES))
    return "; ".join(said)


STORED = {"self_attn.g_proj.": "self_attn.gate_proj.", "moe.experts.gate_up_proj": "moe.input_linear.weight",
          "moe.experts.down_proj": "moe.output_linear.weight", "moe.router.weight": "moe.router.layer.weight"}  # names in files


def small_model(folder):
    """Builds transformers' model of a config.json, with random weights representable in fp32, saved beside it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = make_golden.auto_class(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > 2e6:
        raise OverflowError(f"{size} weights")
    model = auto.from_config(config, dtype=torch.float64, attn_implementation=make_golden.attention_of(config),
                             experts_implementation="eager").eval()
    config.output_hidden_states = bool(getattr(config, "num_kv_shared_layers", 0))  # as in trial()
    for part_of in [*routers_of(model), *(m for n, m in model.named_modules() if n.endswith("linear_attn"))]:
        part_of.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = parameter.ndim == 1 and name.endswith("weight") and not make_golden.adds_one(config, name)
            mean = -2 if name.endswith("A_log") else float(one)
            noise = (0.15 if parameter.ndim == 1 else 0.25) * torch.randn(parameter.shape)
            parameter.copy_((mean + noise).float())
    weights = {}
    for name, p in model.named_parameters():
        for memory, file in STORED.items():
            name = name.replace(memory, file)
        weights[name] = p.detach().float().contiguous()
    weights |= {name: b.float() for name, b in model.named_buffers() if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias"))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def mutated_trial(seed, number, names, work, verbose):
    """Returns the family, whether both accept it, the change, and messages or differences."""
    r = random.Random(f"{seed} {number} mutated")
    name = r.choice(names)
    config = FAMILIES[name](r)
    for key in ("bos_token_id", "eos_token_id"):
        setattr(config, key, None)
    config.get_text_config().pad_token_id = r.choice([None, r.randrange(60)])
    whole = json.loads(config.to_json_string(use_diff=False))
    whole["architectures"] = [make_golden.auto_class(config)._model_mapping[type(config)].__name__]
    text = whole.get("text_config", whole)
    for key in [k for k, v in text.items() if v is None and k not in VALUES]:
        text.pop(key, None)
    said = mutate(r, text)
    if verbose:
        print(said, json.dumps(text, indent=1), sep="\n")
    folder = work / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    torch.manual_seed(r.randrange(1 << 30))
    with make_golden.rmsnorm_in_the_models_dtype():
        try:
            model, theirs = small_model(folder), None
            vocabulary, pad = model.config.get_text_config().vocab_size, model.config.get_text_config().pad_token_id
            ids = torch.randint(vocabulary, (40,))
            if isinstance(pad, int):
                ids[3:36:11] = pad % vocabulary
            stream = dict(tokens=ids[:-1], targets=ids[1:], loss_weight=torch.ones(39), doc_start=torch.tensor([0]),
                          doc_length=torch.tensor([39]))
            loss, _, _, gradients = make_golden.loss_and_gradients(model, stream)
            assert not loss.isnan(), "NaN"
        except Exception as error:  # of any kind: transformers refuses it
            theirs = f"{type(error).__name__}: {error}"
    try:
        if theirs:
            ours("plan", "--model", folder, "--seq-len", 39, "--quiet")
            return name, "refused there", said, theirs
        counted = np.r_[0, np.ones(39)].astype(np.uint8)
        shard = write_shard(work, [ids.numpy().astype(np.uint16)], [counted], vocabulary)
        out = json.loads(ours("bp", "--model", folder, "--data", shard, "--any-tokenizer", "--seq-len", 39, "--batch", 1,
                              "--router-aux-loss", 0, "--json", "--quiet", "--grads-out", work / "grads.safetensors"))
    except AssertionError as error:
        message = str(error).split("config.json: ")[-1].split("exit status ")[-1]
        return name, "refused by both" if theirs else "refused by us", said, f"{message} | {theirs}"
    found = load_file(work / "grads.safetensors")
    whole = torch.stack([g.square().sum() for g in gradients.values() if g is not None]).sum().sqrt().item()
    wrong = []
    if abs(out["loss"] - loss.item()) > EXACT * loss.item():
        wrong.append(f"loss {out['loss']!r}, there {loss.item()!r}")
    if abs(out["grad_norm"] - whole) > EXACT * whole:
        wrong.append(f"norm of the gradients {out['grad_norm']!r}, there {whole!r}")
    for key, g in gradients.items():
        if key not in found or (found[key].double() - g).norm() > 1e-7 * (g.norm() + 1e-3 * whole):
            wrong.append(f"gradient of {key}")
    return name, "wrong" if wrong else "alike", said, "; ".join(wrong)


# ---- one trial -------------------------------------------------------------------------------------------------------------------
def ours(*words):
    made = subprocess.run([TRAIN, *map(str, words)], capture_output=True, text=True)
    if made.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: exit status {made.returncode}: {made.stderr.strip()[-300:]}")
    return made.stdout


def write_shard(folder, documents, counts, vocabulary):
    writer = shards.ShardWriter(str(folder), "data", shards.DOCUMENTS, vocabulary, 0, "", 1 << 20)
    table, begin = np.zeros(len(documents), shards.TABLE), 0
    for i, (ids, counted) in enumerate(zip(documents, counts)):
        table[i] = begin, len(ids), counted.sum(), i, 0, 0, shards.document_crc(ids.tobytes(), counted.tobytes())
        begin += len(ids)
    writer.add(np.concatenate(documents), np.concatenate(counts), table, np.ones(len(documents), np.int64))
    writer.close()
    os.rename(writer.path(0) + ".tmp", writer.path(0))
    return writer.path(0)


def routers_of(model):
    return [m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]


def router_losses(model, stream, balance, z):
    """The routers' losses (llmc/stream/routes.h) of all documents together; their gradients are added to those of the parameters."""
    rows = {router: [] for router in routers_of(model)}
    hooks = [router.register_forward_hook(lambda router, _, out: rows[router].append((out[0], out[2]))) for router in rows]
    for start, length in zip(stream["doc_start"].tolist(), stream["doc_length"].tolist()):
        model(input_ids=stream["tokens"][None, start:start + length], use_cache=False)
    for hook in hooks:
        hook.remove()
    logits, chosen = (torch.cat([pair[i] for pairs in rows.values() for pair in pairs]) for i in (0, 1))
    share = torch.bincount(chosen.flatten(), minlength=logits.shape[1]).double() / len(logits)
    losses = (logits.shape[1] * (share * logits.softmax(-1).mean(0)).sum(), logits.logsumexp(-1).square().mean())
    (balance * losses[0] + z * losses[1]).backward()
    theirs = load_balancing_loss_func(tuple(torch.cat([l for l, _ in pairs]) for pairs in rows.values()), logits.shape[1],
                                      chosen.shape[1])
    assert abs(theirs - losses[0]) < 1e-5 * losses[0], f"balance {losses[0]}, transformers has {theirs}"
    return [loss.item() for loss in losses]


def skew(r, model):
    """Lets a feature of all tokens choose some experts always and others never, or makes two experts tie: the lower one counts."""
    how = r.choice(["", "", "skewed", "tied"])
    with torch.no_grad():
        if how == "skewed":
            model.get_input_embeddings().weight[:, 0] = 1.5
        for router in routers_of(model):
            E = len(router.weight)
            if how == "skewed":
                router.weight[:, 0] = torch.tensor([r.choice([-9.0, 0.0, 9.0]) for _ in range(E)])
            if how == "tied":
                alike = torch.tensor(r.sample(range(E), r.randrange(min(2, E), E + 1)))
                router.weight[alike] = 0
                if getattr(router, "bias", None) is not None:
                    router.bias[alike] = 0.1
            if how and hasattr(router, "e_score_correction_bias"):
                values = [0.0] if how == "tied" else [-3.0, 0.0, 3.0]
                router.e_score_correction_bias.copy_(torch.tensor([r.choice(values) for _ in range(E)]))
    return how


def topk_of_the_lowest(scores, k, dim=-1, sorted=True):
    """As torch.topk, with the lower index of equal ones."""
    if k > scores.shape[dim]:
        raise IndexError(f"{k} of {scores.shape[dim]}")
    best = torch.sort(scores, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((best.values[..., :k], best.indices[..., :k]))


def kept(r, method, config):
    """Returns options for what stays from forward to backward: a level, a number of layers, a place."""
    if method not in ("stream", "checkpoint"):
        return []
    layers = config.num_hidden_layers
    level, place = r.choice(["none", "attention", "products", "products", "all", "all"]), r.choice(["device", "host", "host"])
    number = r.randrange(1, layers + 1) if level != "none" and r.random() < 0.5 else 0
    off = r.randrange(1, (number or layers) + 1) if level != "none" and place == "host" and r.random() < 0.5 else 0
    return ["--keep", f"{level}={number}" if number else level, "--keep-on", f"{place}={off}" if off else place]


def trial(seed, number, names, work, verbose):
    """Returns the family, and the errors of the loss, of the norm of the gradients and of the worst gradient."""
    r = random.Random(f"{seed} {number}")
    name = r.choice(names)
    config = FAMILIES[name](r)
    for key in ("bos_token_id", "eos_token_id"):
        setattr(config, key, None)
    text = config.get_text_config()
    text.pad_token_id = r.choice([None, r.randrange(60)])
    lengths = [r.randrange(1, 70) for _ in range(r.choice([1, 1, 2, 3]))]
    shares = getattr(text, "num_kv_shared_layers", 0)  # seco refuses such
    chunked = [(m, r.randrange(1, 80)) for m in ["mst", "stream" if shares else "seco"] + ["stream"] * 6]
    method, chunk = r.choice([("full", 0), ("checkpoint", 0), *chunked]), r.randrange(1, 90)
    about = f"{name}, {lengths} tokens, {method[0]} {method[1]}"
    if verbose:
        print(about, config.to_json_string(), sep="\n")
    layout = r.choice(["plain", "fused"]) if name in ("qwen3_moe", "qwen3_5_moe", "qwen3_next") else "plain"
    case = make_golden.Case(name, config, seed=r.randrange(1 << 20), layout=layout, lengths=tuple(lengths))
    folder = work / str(number)
    folder.mkdir()
    made = make_golden.random_model(case)
    about += f" {layout} {skew(r, made)}"
    make_golden.save_model(case, made, folder)
    losses = [r.choice([0, 0.01, 1.0]), r.choice([0, 0.1])] if any(
        "TopKRouter" in type(m).__name__ and not hasattr(m, "use_expert_bias") for m in made.modules()) else []
    routers = [word for pair in zip(("--router-aux-loss", "--router-z-loss"), losses) for word in pair]
    every = ["--inputs-every", r.choice([1, 1, 2, 3])] if method[0] in ("stream", "checkpoint", "mst") else []
    keep = kept(random.Random(f"{seed} {number} keep"), method[0], text)
    rng = np.random.default_rng(case.seed)
    documents = [rng.integers(0, text.vocab_size, n + 1).astype(np.uint16) for n in lengths]
    for ids in documents:
        ids[::9] = ids[0] if text.pad_token_id is None else text.pad_token_id
    counts = [(rng.random(n + 1) < 0.8).astype(np.uint8) for n in lengths]
    for counted in counts:
        counted[0], counted[-1] = 0, 1  # some target of each counts
    data = write_shard(work, documents, counts, text.vocab_size)
    chunks = ["--chunk", method[1], "--logits-chunk", chunk] if method[1] else []
    if getattr(text, "kv_lora_rank", None) and method[0] != "seco":
        chunks += ["--latents", random.Random(f"{seed} {number} latents").choice(["layer", "ranges"])]
    command = ["bp", "--model", folder, "--data", data, "--any-tokenizer", "--seq-len", max(lengths), "--batch", len(lengths), "--method",
               method[0], *chunks, *every, *routers, "--threads", 1, "--json", "--quiet", "--grads-out"]
    out = json.loads(ours(*command, work / "grads.safetensors", *keep))
    about += f" {' '.join(map(str, keep))}"
    kinds_of = set(getattr(text, "layer_types", None) or [])
    if keep and not kinds_of & {"sliding_attention", "linear_attention"}:  # else keys and states are made in another way
        ours(*command, work / "unkept.safetensors", "--keep", "none")
        same = (work / "grads.safetensors").read_bytes() == (work / "unkept.safetensors").read_bytes()
        (work / "unkept.safetensors").unlink()
        assert same, f"{about}: other bits than with --keep none"
    found = load_file(work / "grads.safetensors")
    with make_golden.rmsnorm_in_the_models_dtype():
        model = make_golden.load_model(folder, torch.float64)
        model.config.output_hidden_states = shares > 0  # without, layers that share keys need own inputs in transformers
        joined = [torch.tensor(np.concatenate(parts).astype(np.int64)) for parts in (
            [ids[:-1] for ids in documents], [ids[1:] for ids in documents], [counted[1:] for counted in counts])]
        stream = dict(zip(("tokens", "targets", "loss_weight"), joined), doc_length=torch.tensor(lengths),
                      doc_start=torch.tensor([0, *lengths[:-1]]).cumsum(0))
        loss, _, _, gradients = make_golden.loss_and_gradients(model, stream)
        for key, loss_of in zip(("aux_loss", "z_loss"), router_losses(model, stream, *losses) if losses else []):
            assert abs(out.get(key, loss_of) - loss_of) <= LOSS * loss_of, f"{about}: {key} {out[key]!r}, transformers has {loss_of!r}"
        off, worst = abs(out["loss"] - loss.item()) / loss.item(), 0.0
        assert off <= LOSS, f"{about}: loss {out['loss']!r}, transformers has {loss.item()!r}"
        whole = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        apart = abs(out["grad_norm"] - whole) / whole
        assert apart <= LOSS, f"{about}: norm of the gradients {out['grad_norm']!r}, transformers has {whole.item()!r}"
        assert set(found) == set(gradients), f"{about}: gradients of {set(found) ^ set(gradients)}"
        for key, g in gradients.items():
            error = (found[key].double() - g).norm() / (g.norm() + 1e-3 * whole)
            assert error <= GRADIENT, f"{about}: gradient of {key} is off by {error:.2g}"
            worst = max(worst, error.item())
        if number % 5 == 0:
            prompt = documents[0][:6].astype(int)
            expected = model.generate(torch.tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                      do_sample=False, max_new_tokens=6, use_cache=False)[0, len(prompt):].tolist()
            said = ours("sample", "--model", folder, "--prompt-ids", ",".join(map(str, prompt)), "--max-new-tokens", 6, "--temperature", 0,
                        "--quiet").split()
            assert [int(word) for word in said][-len(expected):] == expected, f"{about}: text {said}, transformers {expected}"
    if number % 5 == 1:
        ours("convert", "--model", folder, "--out", work / "again", "--quiet")
        again = make_golden.load_model(work / "again", torch.float32)
        same = (work / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        if name == "olmo_hybrid":  # transformers saves the convolution in thirds
            same = all(torch.equal(a, b) for a, b in zip(again.parameters(), made.parameters()))
        assert same, f"{about}: the weights that convert writes are others"
    return name, off, apart.item(), worst


def prepare_torch():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for function in ("cos", "sin"):  # torch's own are off by an ulp now and then
        setattr(torch.Tensor, function, lambda x, f=getattr(torch, function): f(x.double()).to(x.dtype))
    torch.topk = torch.Tensor.topk = topk_of_the_lowest
    torch.log = lambda x, f=torch.log: f(x.double()).to(x.dtype)


def main():
    arguments = argparse.ArgumentParser(description="Random configurations against transformers.")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=100)
    arguments.add_argument("--only", type=int, help="this trial alone")
    arguments.add_argument("--first", type=int, default=0, help="number of the first trial")
    arguments.add_argument("--mutate", action="store_true", help="change each config.json; what is read otherwise fails")
    arguments.add_argument("--families", default=",".join(FAMILIES), help="of these families")
    options = arguments.parse_args()
    names = options.families.split(",")
    prepare_torch()
    counts, failed, worst = {}, 0, (0.0, 0.0, 0.0)
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.trials)
    for number in numbers if options.mutate else []:
        with tempfile.TemporaryDirectory() as work:
            name, how, *about = mutated_trial(options.seed, number, names, pathlib.Path(work), options.only is not None)
            counts[how] = counts.get(how, 0) + 1
            if how != "alike" or options.only is not None:
                print(f"{number} {name} {how}: {' -> '.join(about)}".replace("\n", " ")[:600], flush=True)
    if options.mutate:
        print(", ".join(f"{how} {n}" for how, n in sorted(counts.items())))
        return "wrong" in counts
    for number in numbers:
        with tempfile.TemporaryDirectory() as work:
            try:
                name, *errors = trial(options.seed, number, names, pathlib.Path(work), options.only is not None)
                worst = tuple(map(max, worst, errors))
                counts[name] = counts.get(name, 0) + 1
            except Exception as error:  # a fault of either side fails only this trial
                failed += 1
                print(f"trial {number} of seed {options.seed}: {error}", flush=True)
    print(f"{sum(counts.values())} passed, {failed} failed: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    print(f"worst error of a loss {worst[0]:.1e}, of the gradients' norm {worst[1]:.1e}, of a gradient {worst[2]:.1e} "
          "(gradients are written in fp32)")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
