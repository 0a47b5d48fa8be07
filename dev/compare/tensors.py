"""Files that contenders share: shards of random tokens, gradients in safetensors; read and written with the standard
library alone."""

import array
import json
import math
import os
import random
import struct

PIECE = 1 << 16  # values read at a time
MOST = 1 << 24  # values of a tensor that are compared: of a larger one, pieces spread evenly over it


def write_tokens(path, count, vocab_size, seed):
    """A shard in llm.c's format, uint16 where ids fit, else uint32. Longer ones of a seed begin as shorter ones."""
    small = vocab_size <= 1 << 16
    ids = array.array("H" if small else "I", random.Random(seed).choices(range(vocab_size), k=count))
    header = struct.pack("<256i", *((20240520, 1) if small else (20240801, 7)), count, *[0] * 253)
    with open(path + ".part", "wb") as file:
        file.write(header)
        ids.tofile(file)
    os.replace(path + ".part", path)


# Mamba-2's families: the names of embedding and final norm, and of a layer's parameters by its kind
MAMBA = {
    "nemotron_h": ("model.embeddings.weight", "model.norm_f.weight", {
        "linear_attention": ("mixer.in_proj.weight", "mixer.A_log"), "full_attention": ("mixer.q_proj.weight",),
        "mlp": ("mixer.down_proj.weight",), "moe": ("mixer.experts.down_proj",)}),
    "granitemoehybrid": ("model.embed_tokens.weight", "model.norm.weight", {
        "mamba": ("mamba.in_proj.weight", "mamba.A_log"), "attention": ("self_attn.q_proj.weight",)}),
    "bamba": ("model.embed_tokens.weight", "model.final_layernorm.weight", {
        "mamba": ("mamba.in_proj.weight", "mamba.A_log"), "attention": ("self_attn.q_proj.weight",)})}


def mamba_names(config):
    embedding, norm, of_kind = MAMBA[config["model_type"]]
    types = config.get("layers_block_type") or config.get("layer_types") or [
        "attention" if number in config["attn_layer_indices"] else "mamba" for number in range(config["num_hidden_layers"])]
    head = [] if config.get("tie_word_embeddings", False) else ["lm_head.weight"]
    return [embedding, norm, *head, *(f"model.layers.{number}.{name}" for number in sorted({0, len(types) - 1}) for name in of_kind[types[number]])]


def gradient_names(config):
    """Parameters whose gradients are held against each other, by transformers' names."""
    if config["model_type"] in MAMBA:
        return mamba_names(config)
    if config["model_type"] == "gpt2":
        last = config["n_layer"] - 1
        linear = ()
        layer = "transformer.h.{}.attn.c_attn.weight", "transformer.h.{}.mlp.c_proj.weight"
        around = ["transformer.wte.weight", "transformer.ln_f.weight"]
    else:
        last = config["num_hidden_layers"] - 1
        experts = config.get("num_experts") or config.get("num_local_experts")
        layer = "model.layers.{}.self_attn.q_proj.weight", f"model.layers.{{}}.mlp.{'experts.down_proj' if experts else 'down_proj.weight'}"
        linear = "model.layers.{}.linear_attn.in_proj_qkv.weight", "model.layers.{}.linear_attn.A_log", layer[1]
        if config.get("kv_lora_rank"):  # the first layers of these are dense
            layer = "model.layers.{}.self_attn.q_b_proj.weight", "model.layers.{}.self_attn.kv_b_proj.weight"
        around = ["model.embed_tokens.weight", "model.norm.weight"]
        if not config.get("tie_word_embeddings", False):
            around.append("lm_head.weight")
    types = config.get("layer_types") or ["full_attention"] * (last + 1)
    return around + [name.format(number) for number in sorted({0, last})
                     for name in (linear if types[number] == "linear_attention" else layer)]


class Tensors:
    """The fp32 tensors of a safetensors file."""

    def __init__(self, path):
        self.file = open(path, "rb")
        (length,) = struct.unpack("<Q", self.file.read(8))
        self.header = json.loads(self.file.read(length))
        self.header.pop("__metadata__", None)
        self.start = 8 + length

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.file.close()

    def shape(self, name):
        return self.header[name]["shape"]

    def pieces(self, name):
        tensor = self.header[name]
        if tensor["dtype"] != "F32":
            raise ValueError(f"{self.file.name}: {name} is {tensor['dtype']}, not F32")
        begin, end = tensor["data_offsets"]
        step = -(-(end - begin) // (4 * MOST))
        for offset in range(begin, end, 4 * PIECE * step):
            self.file.seek(self.start + offset)
            values = array.array("f")
            values.fromfile(self.file, min(4 * PIECE, end - offset) // 4)
            yield values


def relative_difference(a, b, name):
    """||a - b|| / ||b|| of a tensor in two files."""
    if name not in a.header:
        raise ValueError(f"{a.file.name}: has no {name}")
    if a.shape(name) != b.shape(name):
        raise ValueError(f"{a.file.name}: {name} is {a.shape(name)}, not {b.shape(name)}")
    difference = norm = 0.0
    for ours, theirs in zip(a.pieces(name), b.pieces(name)):
        difference += math.dist(ours, theirs) ** 2
        norm += math.hypot(*theirs) ** 2
    return math.sqrt(difference / norm) if norm else math.inf


def gradient_differences(path, reference, names):
    """{name: relative difference} of the gradients in two files."""
    with Tensors(path) as found, Tensors(reference) as wanted:
        return {name: relative_difference(found, wanted, name) for name in names}
