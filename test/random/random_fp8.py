"""FP8 folders drawn at random: what `convert` decodes is bf16(fp32 code * fp32 scale) to the bit, and transformers'
dequantisation where both sides are multiples of the block; adapters over the codes have the gradients of adapters over
the decoded folder; `convert --to fp8` returns every byte. Written in FP8 again, the decoded folder has transformers' codes and scales.

    python3 test/random/random_fp8.py [--seed S] [--trials N]
"""
import argparse
import collections
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig, logging
from transformers.integrations.finegrained_fp8 import Fp8Quantize

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
from make_fp8 import decode, random_codes, scales_of, write  # noqa: E402

TRAIN = os.environ.get("TRAIN", "./train")
FORMS = ("blocks", "tensor", "row", "e8m0", "mxfp8")
THEIRS = Fp8Quantize(types.SimpleNamespace(quantization_config=types.SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")))


def train(*words):
    subprocess.run([TRAIN, *words, "--quiet", "--overwrite"], check=True, stdout=subprocess.DEVNULL)


def draw_model(folder, form, whole):
    pick = random.choice
    sizes = (32, 64, 96, 128) if whole else (24, 40, 56, 96, 192)
    hidden, inner, heads = pick(sizes), pick(sizes), pick((2, 4, 6))
    common = dict(vocab_size=96, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
                  num_key_value_heads=heads // 2, head_dim=16 if not whole else 32, max_position_embeddings=64, eos_token_id=None,
                  pad_token_id=None, bos_token_id=None, initializer_range=0.2)
    config = Qwen3Config(**common)
    which = random.random()
    if which < 0.3:  # latents and the shared key, which is no multiple of a block, in one tensor
        del common["head_dim"]
        shared = pick((32, 64) if whole else (6, 16))
        config = DeepseekV3Config(**common | dict(num_key_value_heads=heads), q_lora_rank=random.choice([None, pick(sizes)]),
                                  kv_lora_rank=pick(sizes), qk_nope_head_dim=shared, qk_rope_head_dim=shared, v_head_dim=shared,
                                  moe_intermediate_size=pick(sizes), n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
                                  first_k_dense_replace=1)
    elif which < 0.65:
        config = Qwen3MoeConfig(**common, moe_intermediate_size=pick(sizes), num_experts=pick((3, 5)), num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    block = (1, 32) if form == "mxfp8" else (16, 32) if whole else (pick((16, 32, 128)), pick((16, 32, 128)))
    coded, decoded = {}, {}
    for key, value in load_file(os.path.join(folder, "model.safetensors")).items():
        coded[key] = decoded[key] = value
        if "proj" not in key or random.random() < 0.1 and "experts" not in key:
            continue
        rows, cols = value.shape
        of = {"tensor": (rows, cols), "row": (1, cols)}.get(form, block)
        grid = (-(-rows // of[0]), -(-cols // of[1]))
        scale = scales_of(grid, -12, -8)
        if form in ("e8m0", "mxfp8"):
            scale = torch.randint(112, 120, grid, dtype=torch.uint8)
        elif form != "row" and seed_bf16:
            scale = scale.bfloat16()
        if form == "tensor":
            scale = scale.reshape(())
        codes = random_codes(rows, cols)
        if random.random() < 0.3:  # subnormal codes
            codes = (codes.view(torch.uint8) & 0x87).view(torch.float8_e4m3fn)
        coded[key], coded[key + "_scale_inv"] = codes, scale
        decoded[key] = decode(codes, scale, of)
    write(folder, coded, pick((dict(quant_method="modelopt", quant_algo="MXFP8"), dict(quant_method="compressed-tensors", format="mxfp8-quantized")))
          if form == "mxfp8" else dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3",
                                       weight_block_size=None if form in ("tensor", "row") else list(block)))
    return decoded


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--trials", type=int, default=24)
options = parser.parse_args()
logging.set_verbosity_error()
logging.disable_progress_bar()
done = collections.Counter()
with tempfile.TemporaryDirectory() as work:
    for trial in range(options.trials):
        random.seed(1000 * options.seed + trial)
        torch.manual_seed(1000 * options.seed + trial)
        form, whole, seed_bf16 = FORMS[trial % len(FORMS)], trial // len(FORMS) % 2 == 0, random.random() < 0.5
        folder, ours, again = (os.path.join(work, name) for name in ("fp8", "decoded", "again"))
        shutil.rmtree(folder, ignore_errors=True)
        wanted = draw_model(folder, form, whole)
        train("convert", "--model", folder, "--out", ours)
        found = load_file(os.path.join(ours, "model.safetensors"))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key].view(torch.int16), value.view(torch.int16)), (trial, form, key)
        if whole and form in ("blocks", "tensor"):  # transformers reads other folders wrong, or not at all
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            model.save_pretrained(os.path.join(work, "theirs"))
            theirs = load_file(os.path.join(work, "theirs", "model.safetensors"))
            for key, value in theirs.items():
                assert torch.equal(found[key], value), (trial, form, key)
            done["of transformers"] += 1
        train("convert", "--model", folder, "--to", "fp8", "--out", again)
        assert open(f"{folder}/model.safetensors", "rb").read() == open(f"{again}/model.safetensors", "rb").read(), trial
        train("convert", "--model", ours, "--to", "fp8", "--out", again)
        for key, value in load_file(os.path.join(again, "model.safetensors")).items():
            made = THEIRS._quantize_one(key, wanted[key]) if value.dtype == torch.float8_e4m3fn else {}
            for name, theirs in made.items() if len(made) == 2 else ():
                assert torch.equal(load_file(os.path.join(again, "model.safetensors"))[name].view(torch.uint8), theirs.view(torch.uint8)), (trial, name)
                done["codes and scales of transformers"] += 1
        grads = []
        for of in (folder, ours):
            out = os.path.join(work, "grads.safetensors")
            train("bp", "--model", of, "--lora-rank", "3", "--seq-len", "30", "--batch", "2", "--grads-out", out)
            grads.append(open(out, "rb").read())
        assert grads[0] == grads[1], (trial, form)
        done[form] += 1
print(f"{options.trials} passed, 0 failed: " + ", ".join(f"{name} {count}" for name, count in sorted(done.items())))
