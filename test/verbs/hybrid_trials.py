"""Random hybrid models against transformers in float64: loss and every gradient of `bp`, over packed documents, which transformers has
one at a time. Head counts are odd, value heads more than key heads, layers of linear attention one, all or some; test_transformers.py
runs these, 60 with ALL_CASES=1.
"""
import json
import os
import sys

from checks import WORK, check, train, write_shard

sys.path[1:1] = ["test/golden", "data"]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import encode  # noqa: E402
import make_golden  # noqa: E402
import shards  # noqa: E402

TOLERANCE = 1e-5  # in fp32, of a gradient the L2 norm
LENGTHS, CHUNKS = (1, 2, 3, 63, 64, 65, 130), (1, 7, 64, 100)
HEADS = ((8, 0.25), (16, 0.25), (12, 0.5), (24, 0.25), (10, 0.6), (8, 1.0), (6, 0.34))  # head_dim, the part that is rotated


def layers(rng, trial):
    """Of every four trials: all linear; one linear layer; every k-th is full attention, k not dividing the layers; any."""
    count = int(rng.integers(2, 6))
    if trial % 4 == 0:
        return "l" * count
    if trial % 4 == 1:
        return "".join(rng.permutation(list("l" + "f" * (count - 1))))
    if trial % 4 == 2:
        k = int(rng.integers(2, 4))
        return ("l" * (k - 1) + "f") * (count // k + 1) + "l"
    return "".join(rng.choice(list("lf"), count))


def random_config(rng, trial):
    """Sizes of every layer, and how positions are scaled."""
    pick = lambda *values: values[rng.integers(len(values))]
    head_dim, part = pick(*HEADS)
    rope = dict(rope_theta=pick(1e4, 1e7), partial_rotary_factor=part)
    rope |= pick({}, {}, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), dict(rope_type="linear", factor=2.5))
    key_heads, groups = pick(1, 2, 3, 5), pick(1, 2, 3)
    return make_golden.qwen3_5(
        layers(rng, trial), rope=rope, vocab_size=int(rng.integers(20, 130)), hidden_size=pick(8, 16, 20, 36),
        intermediate_size=pick(12, 24, 41), head_dim=head_dim, num_key_value_heads=groups, num_attention_heads=groups * pick(1, 2, 3),
        linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * pick(1, 2, 3), linear_key_head_dim=pick(2, 4, 5, 8, 12, 20),
        linear_value_head_dim=pick(1, 3, 8, 10, 16), linear_conv_kernel_dim=pick(2, 3, 4), rms_norm_eps=pick(1e-3, 1e-2),
        tie_word_embeddings=bool(rng.integers(2)), attention_bias=pick(False, False, True))


def random_shard(stem, vocabulary, rng, lengths):
    """Documents at random of so many inputs, each with one id more; the last target of each counts."""
    documents = []
    for length in lengths:
        counts = (rng.random(length + 1) < 0.8).astype(np.uint8)
        counts[0], counts[-1] = 0, 1
        documents.append(encode.Document(rng.integers(0, vocabulary, length + 1), counts))
    return write_shard(stem, shards.DOCUMENTS, vocabulary, documents, [1] * len(documents)), documents


def reference(folder, documents, dtype=torch.float64):
    """Loss and gradients, each document alone."""
    stream = dict(tokens=torch.tensor(np.concatenate([d.ids[:-1] for d in documents]).astype(np.int64)),
                  targets=torch.tensor(np.concatenate([d.ids[1:] for d in documents]).astype(np.int64)),
                  loss_weight=torch.tensor(np.concatenate([d.counts[1:] for d in documents])),
                  doc_length=torch.tensor([len(d.ids) - 1 for d in documents]))
    stream["doc_start"] = stream["doc_length"].cumsum(0) - stream["doc_length"]
    with make_golden.rmsnorm_in_the_models_dtype():
        loss, _, _, gradients = make_golden.loss_and_gradients(make_golden.load_model(folder, dtype, "sdpa"), stream)
    return float(loss), gradients


def one_pass(folder, path, *options):
    """Loss and gradients of `bp` over all documents of a shard, in one micro-batch."""
    out = f"{WORK}/gradients.safetensors"
    found = train("bp", "--model", folder, "--data", path, "--seq-len", max(LENGTHS), "--grads-out", out, "--overwrite", "--json",
                  *options)
    return json.loads(found)["loss"], load_file(out)


def errors(gradients, expected):
    """By name, relative; a gradient that is next to nothing beside the others need not be more exact."""
    floor = 1e-3 * (sum(float(g.square().sum()) for g in expected.values()) / len(expected)) ** 0.5
    return {name: float((gradients[name].double() - g).norm()) / (float(g.norm()) + floor) for name, g in expected.items()}


def agree(what, found, folder, documents):
    """The tolerance, or what transformers is off by itself in fp32: gated norms of next to nothing enlarge rounding."""
    loss, gradients = found
    expected_loss, expected = reference(folder, documents)
    check(f"{what}: loss", abs(loss - expected_loss) <= TOLERANCE * expected_loss, f"{loss}, not {expected_loss}")
    check(f"{what}: names", gradients.keys() == expected.keys(), str(gradients.keys() ^ expected.keys()))
    error = max(errors(gradients, expected).items(), key=lambda item: item[1])
    theirs = 0 if error[1] <= TOLERANCE else max(errors(reference(folder, documents, torch.float32)[1], expected).values())
    check(f"{what}: gradients", error[1] <= max(TOLERANCE, 2 * theirs), f"{error}; transformers in fp32 {theirs:.2g}")


def random_hybrid(trial):
    rng = np.random.default_rng(trial)
    config, folder = random_config(rng, trial), f"{WORK}/hybrid-{trial}"
    make_golden.random_model(make_golden.Case(folder, config, trial)).save_pretrained(folder)
    lengths = rng.choice(LENGTHS, rng.integers(2, 5)).tolist()
    path, documents = random_shard(f"hybrid-{trial}", config.vocab_size, rng, lengths)
    chunk, logits_chunk = rng.choice(CHUNKS, 2)
    kinds = "".join(kind[0] for kind in config.layer_types)
    agree(f"hybrid {trial}, layers {kinds}, documents of {lengths}, chunks {chunk} and {logits_chunk}",
          one_pass(folder, path, "--batch", len(lengths), "--chunk", chunk, "--logits-chunk", logits_chunk), folder, documents)


def trials():
    for trial in range(60 if os.environ.get("ALL_CASES") else 4):
        random_hybrid(trial)
