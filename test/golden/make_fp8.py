"""Folders in FP8, and what transformers and the formula bf16(fp32 code * fp32 scale) decode from them.

    python3 test/golden/make_fp8.py      (transformers 5.24, on a CPU)

qwen3_moe-fp8: blocks of 16 x 16 with fp32 scales, a tensor for each matrix of an expert; decoded/ is what transformers
saves after loading it. qwen3-fp8: blocks of 128 x 128 that do not divide the sides, which transformers misreads, scales
of tensors and rows, in fp32, bf16 and e8m0, in the layout of compressed-tensors; decoded/ is made by the formula.
qwen3_next-fp8: linear attention whose inputs files fuse head by head, in blocks of 16 x 16 that begin within a head.
"""
import json
import os
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

HERE = os.path.dirname(os.path.abspath(__file__))


def scales_of(shape, low, high):
    return torch.exp2(torch.rand(shape) * (high - low) + low)


def decode(codes, scale, block):
    wide = scale.float()
    if scale.dtype == torch.uint8:
        wide = torch.exp2(scale.float() - 127)
    if wide.numel() > 1:
        wide = wide.repeat_interleave(block[0], 0)[:codes.shape[0]].repeat_interleave(block[1], 1)[:, :codes.shape[1]]
    return (codes.float() * wide).bfloat16()


def random_codes(rows, cols):
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 5
    return codes.view(torch.float8_e4m3fn)


def write(folder, tensors, quantisation):
    path = os.path.join(folder, "model.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o644)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        text = json.load(file)
    if quantisation:
        text["quantization_config"] = quantisation
    with open(path, "w") as file:
        file.write(json.dumps(text, indent=2, sort_keys=True) + "\n")


def begin(name, config):
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    os.remove(os.path.join(folder, "generation_config.json"))
    return folder, load_file(os.path.join(folder, "model.safetensors"))


def make_moe():
    folder, tensors = begin("qwen3_moe-fp8", Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, moe_intermediate_size=16, num_experts=3, num_experts_per_tok=2, max_position_embeddings=64, norm_topk_prob=True,
        initializer_range=0.3, eos_token_id=None, pad_token_id=None, bos_token_id=None))
    out = {}
    for key, value in tensors.items():
        out[key] = value
        if key.endswith("proj.weight") and not key.endswith("layers.1.self_attn.k_proj.weight"):
            rows, cols = value.shape
            out[key] = random_codes(rows, cols)
            out[key + "_scale_inv"] = scales_of((rows // 16, cols // 16), -12, -9)
    write(folder, out, dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[16, 16],
                            modules_to_not_convert=["lm_head", "model.layers.1.self_attn.k_proj"]))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(os.path.join(folder, "decoded"))
    decoded = load_file(os.path.join(folder, "decoded", "model.safetensors"))
    for key in out:  # transformers equals the formula here
        if key + "_scale_inv" in out:
            assert torch.equal(decoded[key], decode(out[key], out[key + "_scale_inv"], (16, 16))), key
    os.chmod(os.path.join(folder, "decoded", "model.safetensors"), 0o644)
    for extra in ("generation_config.json", "config.json"):
        os.remove(os.path.join(folder, "decoded", extra))


def make_forms():
    folder, tensors = begin("qwen3-fp8", Qwen3Config(
        vocab_size=96, hidden_size=16, intermediate_size=144, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4,
        head_dim=16, max_position_embeddings=64, initializer_range=0.3, eos_token_id=None, pad_token_id=None, bos_token_id=None))
    block, out, decoded = (128, 128), {}, {}
    for key, value in tensors.items():
        out[key] = decoded[key] = value
        if not key.endswith("proj.weight") or key.endswith("layers.1.mlp.down_proj.weight"):
            continue
        rows, cols = value.shape
        part, grid, of = key.split(".")[-2], (-(-rows // 128), -(-cols // 128)), block
        scale = scales_of(grid, -12, -9)
        if ".layers.1." in key:
            if part == "q_proj":
                scale = scale.bfloat16()
            if part == "k_proj":
                scale = torch.tensor(0.00123)
            if part == "v_proj":
                scale, of = scales_of((rows, 1), -12, -9), (1, cols)
            if part in ("o_proj", "gate_proj"):
                scale = torch.randint(114, 118, grid, dtype=torch.uint8)
            if part == "up_proj":
                scale = torch.tensor([0.002]).bfloat16()
        codes = random_codes(rows, cols)
        decoded[key] = decode(codes, scale, of)
        out[key], out[key + "_scale"] = codes, scale.view(torch.float8_e8m0fnu) if part == "gate_proj" and ".layers.1." in key else scale
        if ".layers.1." in key:
            out[key.replace(".weight", ".input_scale")] = torch.tensor([0.5])
    weights = dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True, dynamic=False)
    write(folder, out, dict(quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed",
                            config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=None)),
                            ignore=["lm_head", r"re:.*layers\.1\.mlp\.down_proj"]))
    os.mkdir(os.path.join(folder, "decoded"))
    save_file(decoded, os.path.join(folder, "decoded", "model.safetensors"), metadata={"format": "pt"})
    os.chmod(os.path.join(folder, "decoded", "model.safetensors"), 0o644)


def make_next():
    folder, tensors = begin("qwen3_next-fp8", Qwen3NextConfig(
        vocab_size=96, hidden_size=24, intermediate_size=24, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
        linear_value_head_dim=8, initializer_range=0.3, eos_token_id=None, pad_token_id=None, bos_token_id=None))
    out, decoded = {}, {}
    for key, value in tensors.items():
        out[key] = decoded[key] = value
        if "proj" in key:
            rows, cols = value.shape
            out[key] = random_codes(rows, cols)
            out[key + "_scale_inv"] = scales_of((-(-rows // 16), -(-cols // 16)), -12, -9).bfloat16()
            decoded[key] = decode(out[key], out[key + "_scale_inv"], (16, 16))
    write(folder, out, dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[16, 16],
                            modules_to_not_convert=["lm_head", "mlp.gate", "mlp.shared_expert_gate"]))
    os.mkdir(os.path.join(folder, "decoded"))
    save_file(decoded, os.path.join(folder, "decoded", "model.safetensors"), metadata={"format": "pt"})
    os.chmod(os.path.join(folder, "decoded", "model.safetensors"), 0o644)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_moe()
    make_forms()
    make_next()
