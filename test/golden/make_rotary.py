"""Writes rotary.txt: configurations of rotary positions, and a hash of the frequencies that transformers has for each in fp32; and
exact.txt: loss and norm of the gradient of every golden model in float64, with the sines and cosines of rotary positions (fp32) rounded
correctly: torch's are off by an ulp in 4 % of cases, which ones depending on the machine.

    python make_rotary.py        # torch 2.15.0 and transformers 5.23.0, on a CPU with AVX-512
    python make_rotary.py NAME   # only this model's line of exact.txt

A line is the configuration as --init takes it, the FNV-1a of its frequencies' bits, and the factor of cosine and sine. torch's powers are
SLEEF's for each 32 at a time and libm's powf for what is left; with AVX2 it is 16, so heads of other than 64, 128, 256 differ there.
"""
import itertools
import sys
from pathlib import Path

import make_golden
import torch
from safetensors.torch import load_file
from transformers import Gemma3TextConfig, HunYuanDenseV1Config, LlamaConfig, Qwen3_5TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

HERE = Path(__file__).parent
assert torch.backends.cpu.get_cpu_capability() == "AVX512"
THETAS = (1e4, 1.5e5, 5e5, 1e6, 5e6, 1e7, 123456.7)
DIMS = (10, 32, 64, 80, 96, 128, 256)
PARTS = ((256, 0.25), (128, 0.5), (24, 0.5), (80, 0.75))  # of a head of so many elements, the part that is rotated
SCALINGS = (
    {}, {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.3, "high_freq_factor": 5.1, "original_max_position_embeddings": 8000},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 3.7, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.5},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
)


def fnv(values):
    h = 0xcbf29ce484222325
    for byte in values.numpy().tobytes():
        h = (h ^ byte) * 0x100000001b3 % 2**64
    return h


def text(family, dim, theta, scaling):
    words = ("true" if v is True else "false" if v is False else v if isinstance(v, str) else repr(v) for v in scaling.values())
    return ",".join([family, f"head_dim={dim}", f"rope_theta={theta!r}", *(f"{k}={v}" for k, v in zip(scaling, words))])


def write_rotary(out):
    for theta, dim, scaling in itertools.product(THETAS, DIMS, SCALINGS):
        rope = {"rope_theta": theta, "rope_type": "default"} | scaling
        rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=dim, max_position_embeddings=1 << 20, rope_parameters=rope))
        assert rotary.inv_freq.dtype == torch.float32
        out.write(f"{text('llama', dim, theta, scaling)} {fnv(rotary.inv_freq):016x} {float(rotary.attention_scaling)!r}\n")
    for dim, (theta, local), scaling in itertools.product((128, 256), ((1e6, 1e4), (1e7, 5e5)), SCALINGS[:2]):
        rope = {"full_attention": {"rope_theta": theta, "rope_type": "default"} | scaling,
                "sliding_attention": {"rope_theta": local, "rope_type": "default"}}
        rotary = Gemma3RotaryEmbedding(Gemma3TextConfig(head_dim=dim, rope_parameters=rope))
        line = text("gemma3", dim, theta, scaling) + f",rope_local_base_freq={local!r}"
        out.write(f"{line} {fnv(torch.cat([rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq])):016x} 1.0\n")

    for theta, (dim, part), scaling in itertools.product((1e4, 1e7), PARTS, SCALINGS):
        rope = {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": part} | scaling
        rotary = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=dim, max_position_embeddings=1 << 20, rope_parameters=rope))
        assert 2 * len(rotary.inv_freq) == dim * part
        line = text("qwen3_5", dim, theta, scaling) + f",partial_rotary_factor={part!r}"
        out.write(f"{line} {fnv(rotary.inv_freq):016x} {float(rotary.attention_scaling)!r}\n")

    for theta, dim, alpha in itertools.product((1e4, 1e6), (64, 128), (1000.0, 7.5)):
        rope = {"rope_theta": theta, "rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
        rotary = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(head_dim=dim, rope_parameters=rope))
        line = text("hunyuan_v1_dense", dim, theta, {"rope_type": "dynamic", "alpha": alpha})
        out.write(f"{line} {fnv(rotary.inv_freq):016x} 1.0\n")


if len(sys.argv) == 1:
    with open(HERE / "rotary.txt", "w") as out:
        write_rotary(out)

for name in ("cos", "sin"):
    rounded = lambda x, f=getattr(torch, name): f(x.double()).to(x.dtype)
    setattr(torch.Tensor, name, rounded)
exact = HERE / "exact.txt"
lines = {line.split()[0]: line for line in exact.read_text().splitlines()} if len(sys.argv) > 1 else {}
with make_golden.rmsnorm_in_the_models_dtype():
    for folder in [HERE / name for name in sys.argv[1:]] or [f.parent for f in HERE.glob("*/reference.safetensors")]:
        loss, _, _, gradients = make_golden.loss_and_gradients(
            make_golden.load_model(folder, torch.float64), load_file(folder / "reference.safetensors"))
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        lines[folder.name] = f"{folder.name} {loss.item()!r} {norm.item()!r}"
exact.write_text("".join(lines[name] + "\n" for name in sorted(lines)))
