"""The families added last, beside transformers: 30 steps of training in fp32, and config.json changed by hand. test_transformers.py runs
these.
"""
import copy
import json
import re

from checks import WORK, check, train, write_shard
from hybrid_trials import agree, one_pass, random_shard

import numpy as np
import torch

import encode
import make_golden
import shards

FAMILIES = ("seed_oss", "hunyuan_v1_dense", "ernie4_5", "qwen3_next", "muse_glimmer", "olmo_hybrid", "granitemoehybrid", "bamba", "deepseek_v3-full", "mistral4")
STEPS, BATCH, LENGTH, LR = 30, 2, 12, 1e-3
LOSS, WEIGHTS = 1e-5, 1e-3  # relative: of a loss at every step; of the way of all weights


def weights_of(model):
    return torch.cat([p.detach().flatten() for _, p in make_golden.text_parameters(model)])


def train_theirs(folder, ids):
    """The losses of transformers' model under torch's AdamW, and its weights before the first step and after the last."""
    model = make_golden.load_model(folder, torch.float32)
    start = weights_of(model).clone()
    decayed = [[p for _, p in make_golden.text_parameters(model) if (p.ndim > 1) == matrix] for matrix in (True, False)]
    adamw = torch.optim.AdamW([dict(params=decayed[0], weight_decay=0.1), dict(params=decayed[1], weight_decay=0.0)], lr=LR,
                              betas=(0.9, 0.95), eps=1e-6)
    losses = []
    for step in ids.split(BATCH):
        logits = model(input_ids=step[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), step[:, 1:].flatten())
        loss.backward()
        adamw.step(), adamw.zero_grad()
        losses.append(loss.item())
    return np.array(losses), start.double(), weights_of(model).double()


def steps(name):
    folder, run = f"test/golden/{name}", f"{WORK}/steps-{name}"
    vocabulary = make_golden.transformers.AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    rng = np.random.default_rng(5)
    ids = rng.integers(0, vocabulary // 3, (STEPS * BATCH, LENGTH + 1))
    counts = np.ones(LENGTH + 1, np.uint8)
    counts[0] = 0
    shard = write_shard(f"steps-{name}", shards.DOCUMENTS, vocabulary, [encode.Document(row, counts) for row in ids], [1] * len(ids))
    train("train", "--model", folder, "--data", shard, "--any-tokenizer", "--seq-len", LENGTH, "--batch", BATCH, "--shuffle", "off", "--steps",
          STEPS, "--lr", LR, "--schedule", "constant", "--weight-decay", 0.1, "--beta2", 0.95, "--epsilon", 1e-6, "--grad-clip", 0, "--chunk", 7,
          *(["--router-aux-loss", 0] if name in ("qwen3_next", "granitemoehybrid", "mistral4") else []), "--out", run, "--quiet")
    with open(f"{run}/log.jsonl") as log:
        ours = np.array([line["loss"] for line in map(json.loads, log) if "loss" in line])
    train("convert", "--model", run, "--out", f"{run}-hf", "--quiet", *(["--like", folder] if name == "muse_glimmer" else []))
    last = weights_of(make_golden.load_model(f"{run}-hf", torch.float32)).double()
    losses, start, weights = train_theirs(folder, torch.tensor(ids))
    off, apart = max(abs(ours / losses - 1)), (last - weights).norm() / (weights - start).norm()
    check(f"{name}: {STEPS} losses", len(ours) == STEPS and off <= LOSS, f"{off:.2g} apart")
    check(f"{name}: learns", losses[-1] < 0.97 * losses[0], f"{losses[0]} to {losses[-1]}")
    check(f"{name}: weights", apart <= WEIGHTS, f"{apart:.2g} of their way apart")
    print(f"{name}: {STEPS} losses within {off:.1e}, weights within {apart:.1e} of their way")


def hand_made(name, what, edit=lambda text: text, layout="plain", **keys):
    """A golden family with other keys, and a config.json that `edit` has changed: loss and gradients, and what convert writes."""
    case = copy.deepcopy(next(c for c in make_golden.CASES if c.name == name))
    for key, value in keys.items():
        setattr(case.config.get_text_config() if hasattr(case.config, "text_config") and key != "tie_word_embeddings" else case.config, key, value)
    case.layout, folder = layout, make_golden.pathlib.Path(f"{WORK}/{name}-{what.replace(' ', '-')}")
    make_golden.save_model(case, make_golden.random_model(case), folder)
    text = edit((folder / "config.json").read_text())
    (folder / "config.json").write_text(text)
    rng = np.random.default_rng(3)
    path, documents = random_shard(folder.name, case.config.get_text_config().vocab_size, rng, [1, 17, 9])
    agree(f"{name}, {what}", one_pass(folder, path, "--batch", 3, "--chunk", 7, *(["--router-aux-loss", 0] if "router_aux_loss_coef" in text else [])),
          folder, documents)
    train("convert", "--model", folder, "--out", f"{folder}-again", "--quiet")
    check(f"{name}, {what}: config.json is kept", make_golden.pathlib.Path(f"{folder}-again/config.json").read_text() == text)
    models = [make_golden.load_model(f, torch.float32) for f in (folder, f"{folder}-again")]
    check(f"{name}, {what}: weights", torch.equal(*map(weights_of, models)))


def infinite(text):
    """Both forms in which Python's json and transformers have infinity, in keys that no family has."""
    return text.replace("{", '{\n  "limits": [0.3, {"__float__": "Infinity"}],\n  "limit": Infinity,\n  "least": -Infinity,', 1)


def family_trials():
    for name in FAMILIES:
        steps(name)
    hand_made("olmo_hybrid", "tied, infinite", infinite, tie_word_embeddings=True)
    hand_made("olmo_hybrid", "rotated, beta below 1", rope_parameters=dict(rope_type="default", rope_theta=5e4), linear_allow_neg_eigval=False)
    hand_made("qwen3_next", "7 experts in stacks, tied, infinite", infinite, "fused", num_experts=7, num_experts_per_tok=3, tie_word_embeddings=True)
    bare = lambda text: infinite(re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", text))  # as in published folders
    hand_made("granitemoehybrid", "no positions, tied, infinite", bare, tie_word_embeddings=True, position_embedding_type="nope",
              time_step_limit=(0.4, float("inf")))
    hand_made("bamba", "a derived width, tied, infinite", lambda text: bare(text).replace('"mamba_d_head": 18', '"mamba_d_head": "auto"'),
              tie_word_embeddings=True, mamba_expand=2, mamba_d_head=18)
    hand_made("seed_oss", "tied, infinite", infinite, tie_word_embeddings=True)
    hand_made("hunyuan_v1_dense", "tied, infinite", infinite, tie_word_embeddings=True)
    hand_made("ernie4_5", "untied, no biases, infinite", infinite, tie_word_embeddings=False, use_bias=False)
    hand_made("muse_glimmer", "infinite inside and outside", lambda text: infinite(text).replace('"text_config": {', '"text_config": {\n    "y": Infinity,'))
