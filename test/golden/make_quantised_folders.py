"""Folders of 4-bit weights as transformers saves them with bitsandbytes, of golden models that are there, and one as gpt-oss's.

    python3 test/golden/make_quantised_folders.py      (transformers 5.23, bitsandbytes 0.50.2, on a CPU)
    python3 test/golden/make_quantised_folders.py mxfp4     (transformers 5.24 alone)

qwen3-nf4: nf4, double quantisation, of qwen3-bf16, layer 1's mlp left in bf16. gpt2-fp4: fp4, scales in fp32, of gpt2.
gpt_oss-mxfp4: random codes, and scales from 2^-9 to 2^-4.
"""
import json
import os
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, GptOssForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))


def make(name, source, dtype, **settings):
    folder = os.path.join(HERE, name)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)
    model = AutoModelForCausalLM.from_pretrained(
        os.path.join(HERE, source), dtype=dtype, quantization_config=config, device_map="cpu")
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    for extra in ("generation_config.json",):
        os.remove(os.path.join(folder, extra))


def make_mxfp4(name):
    folder = os.path.join(HERE, name)
    torch.manual_seed(5)
    config = GptOssConfig(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=8,
                          max_position_embeddings=64, initializer_range=0.2, dtype="bfloat16", eos_token_id=None, pad_token_id=None,
                          rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                               truncate=False, original_max_position_embeddings=16))
    tensors = {}
    for key, value in GptOssForCausalLM(config).state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = value.to(torch.bfloat16).clone()
            continue
        experts, inner, outer = value.shape
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(118, 124, (experts, outer, inner // 32), dtype=torch.uint8)
    shutil.rmtree(folder, ignore_errors=True)
    config.save_pretrained(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        text = json.load(file)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    text["quantization_config"] = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    with open(path, "w") as file:
        file.write(json.dumps(text, indent=2, sort_keys=True) + "\n")


torch.set_num_threads(1)
make_mxfp4("gpt_oss-mxfp4")
if sys.argv[1:] == ["mxfp4"]:
    sys.exit()
make("qwen3-nf4", "qwen3-bf16", torch.bfloat16, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
     llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"])
make("gpt2-fp4", "gpt2", torch.float32, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)
