#!/usr/bin/env python3
"""Random LoRA adapters of gpt_oss and Gemma 4 against PEFT: loss, norm of the adapters' gradients and each gradient in float64, of packed
documents, by a random method. Models are those of random_models.py; the adapters are trained here and read by PEFT, or made by PEFT with
random values and read here: some attention, feed-forward, router and per-layer matrices, experts' stacks, embedding and head, whole copies.

    test/random/random_adapters.py [--seed S] [--trials N] [--only T]      60 trials; TRAIN=build/cpu-double/train, as random_models.py

Values are small: with a standard deviation of 1 in place of 0.2 an ulp of the weights moves PEFT's own norm of the gradients by up to 5e-10.
PEFT 0.21 adds B A untransposed to a single expert of gpt_oss, which is stored transposed; such experts get no adapter here.
"""
import argparse
import json
import pathlib
import random
import sys
import tempfile

import random_models as models
import make_golden
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

FAMILIES = ["gpt_oss", "gemma4"]
EXACT, GRADIENT = 1e-12, 1e-6  # gradients are written in fp32


def held_name(key):
    """In PEFT's model, of a name in its files."""
    if "lora_embedding_" in key:
        return f"{key}.default"
    if "lora_" not in key:
        return key.replace(".weight", ".modules_to_save.default.weight")
    return key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")


def draw_targets(r, model):
    """Returns ends of names of linear layers and of parameters (the router's of gpt_oss, experts' stacks), and modules to save."""
    inner = {name.split("layers.")[1].split(".", 1)[1] for name, m in model.named_modules()
             if isinstance(m, torch.nn.Linear) and "layers." in name}
    parameters = {name.split("layers.")[1].split(".", 1)[1] for name, p in model.named_parameters()
                  if (p.dim() == 3 and len(p) > 1) or name.endswith("mlp.router.weight")}
    modules = r.sample(sorted(inner), r.randrange(len(inner) + 1))
    stacks = r.sample(sorted(parameters), r.randrange(len(parameters) + 1))
    outer, saved = r.choice([[], [], ["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]]), []
    if not model.config.tie_word_embeddings and r.random() < 0.5:
        outer, saved = [], outer
    if set(modules + stacks + outer) <= {"mlp.router.weight"}:  # which has no gradient if it chooses one expert
        modules = ["o_proj"]
    return modules + outer, stacks, saved


def make_adapter(r, ours, folder, data, length, work):
    """Returns the adapter's folder, and words about it."""
    model = make_golden.load_model(folder, torch.float32)
    modules, stacks, saved = draw_targets(r, model)
    rank, rslora, every = r.randrange(1, 9), r.random() < 0.4, modules + stacks
    alpha = r.choice([1, 3, 16, 2 * rank])
    ranks = {r.choice(every): r.randrange(1, 9)} if r.random() < 0.4 else {}
    alphas = {r.choice(every): r.randrange(1, 30)} if r.random() < 0.4 else {}
    about = f"rank {rank}, alpha {alpha}{', rslora' * rslora} {','.join(every)} saved {','.join(saved)} {ranks} {alphas}"
    if ours:
        words = ["--lora-rank", rank, "--lora-alpha", alpha, "--lora-targets", ",".join(every)] + ["--rslora"] * rslora
        for key, pattern in (("rank", ranks), ("alpha", alphas)):
            words += [f"--lora-{key}-pattern", ",".join(f"{k}={v}" for k, v in pattern.items())] if pattern else []
        words += ["--lora-modules-to-save", ",".join(saved)] if saved else []
        models.ours("train", "--model", folder, "--data", data, "--any-tokenizer", "--seq-len", length, "--steps", 3, "--lr", 0.05,
                    "--seed", r.randrange(99), "--quiet", "--out", work / "run", *words)
        return work / "run" / "checkpoint-00000003", about
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules=modules, target_parameters=stacks,
                        rank_pattern=ranks, alpha_pattern=alphas, modules_to_save=saved or None)
    model = get_peft_model(model, config)
    for key, value in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            value.data = 0.2 * torch.randn_like(value)
    model.save_pretrained(work / "adapter")
    return work / "adapter", about


def trial(seed, number, work, verbose):
    """Returns the errors of the loss, of the norm of the gradients and of the worst gradient."""
    r = random.Random(f"{seed} {number} adapter")
    name, ours = r.choice(FAMILIES), r.random() < 0.5
    config = models.FAMILIES[name](r)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    lengths = [r.randrange(1, 70) for _ in range(r.choice([1, 1, 2, 3]))]
    case = make_golden.Case(name, config, seed=r.randrange(1 << 20), lengths=tuple(lengths))
    folder = work / "model"
    folder.mkdir()
    make_golden.save_model(case, make_golden.random_model(case), folder)
    torch.manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    documents = [rng.integers(0, config.vocab_size, n + 1).astype(np.uint16) for n in lengths]
    counts = [np.r_[0, np.ones(n)].astype(np.uint8) for n in lengths]
    data = models.write_shard(work, documents, counts, config.vocab_size)
    adapter, about = make_adapter(r, ours, folder, data, max(lengths), work)
    method = r.choice(["full", "checkpoint", "stream", "stream"])
    about = f"{name} by {'us' if ours else 'PEFT'}, {lengths} tokens, {method}, {about}"
    if verbose:
        print(about, config.to_json_string(), sep="\n")
    out = json.loads(models.ours("bp", "--model", folder, "--adapter", adapter, "--data", data, "--any-tokenizer", "--seq-len", max(lengths),
                                 "--batch", len(lengths), "--method", method, *(["--chunk", r.randrange(1, 80)] if method == "stream" else []),
                                 "--router-aux-loss", 0, "--grads-out", work / "grads.safetensors", "--json", "--quiet"))
    found = {held_name(key): g.double() for key, g in load_file(work / "grads.safetensors").items()}
    with make_golden.rmsnorm_in_the_models_dtype():
        model = make_golden.load_model(folder, torch.float64)
        model.config.output_hidden_states = getattr(config, "num_kv_shared_layers", 0) > 0  # as in random_models.py
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).double().eval()
        joined = [torch.tensor(np.concatenate(parts).astype(np.int64)) for parts in (
            [ids[:-1] for ids in documents], [ids[1:] for ids in documents], [counted[1:] for counted in counts])]
        stream = dict(zip(("tokens", "targets", "loss_weight"), joined), doc_length=torch.tensor(lengths),
                      doc_start=torch.tensor([0, *lengths[:-1]]).cumsum(0))
        try:
            loss, _, _, gradients = make_golden.loss_and_gradients(model, stream)
        except RuntimeError as error:
            raise RuntimeError(f"{about}: PEFT: {error}")
    gradients = {key: g for key, g in gradients.items() if g is not None}
    off = abs(out["loss"] - loss.item()) / loss.item()
    whole = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    apart = (abs(out["grad_norm"] - whole) / whole).item()
    if verbose:
        print(off, apart, out["grad_norm"], whole.item())
        for key, g in gradients.items():
            print(key, tuple(g.shape), g.norm().item(), (found[key] - g).norm().item() / g.norm().item() if key in found else None)
    assert set(found) == set(gradients), f"{about}: gradients of {set(found) ^ set(gradients)}"
    assert off <= EXACT, f"{about}: loss {out['loss']!r}, PEFT has {loss.item()!r}"
    worst = max((found[key] - g).norm() / (g.norm() + 1e-3 * whole) for key, g in gradients.items()).item()
    assert worst <= GRADIENT, f"{about}: a gradient is off by {worst:.2g}"
    assert apart <= EXACT, f"{about}: norm of the gradients {out['grad_norm']!r}, PEFT has {whole.item()!r}"
    return off, apart, worst


def main():
    arguments = argparse.ArgumentParser(description="Random adapters against PEFT.")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=60)
    arguments.add_argument("--only", type=int, help="this trial alone")
    options = arguments.parse_args()
    models.prepare_torch()
    passed, failed, worst = 0, 0, (0.0, 0.0, 0.0)
    for number in [options.only] if options.only is not None else range(options.trials):
        with tempfile.TemporaryDirectory() as work:
            try:
                errors = trial(options.seed, number, pathlib.Path(work), options.only is not None)
                worst, passed = tuple(map(max, worst, errors)), passed + 1
            except Exception as error:  # a fault of either side fails only this trial
                failed += 1
                print(f"trial {number} of seed {options.seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    print(f"worst error of a loss {worst[0]:.1e}, of the gradients' norm {worst[1]:.1e}, of a gradient {worst[2]:.1e} "
          "(gradients are written in fp32)")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
