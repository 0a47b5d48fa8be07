"""Folders of 4-bit weights as transformers saves them with bitsandbytes, of golden models that are there.

    python3 test/golden/make_quantised_folders.py      (transformers 5.23, bitsandbytes 0.50.2, on a CPU)

qwen3-nf4: nf4, double quantisation, of qwen3-bf16, layer 1's mlp left in bf16. gpt2-fp4: fp4, scales in fp32, of gpt2.
"""
import os
import shutil

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

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


torch.set_num_threads(1)
make("qwen3-nf4", "qwen3-bf16", torch.bfloat16, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
     llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"])
make("gpt2-fp4", "gpt2", torch.float32, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)
