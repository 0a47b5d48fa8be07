#!/usr/bin/env python3
"""Greedy texts of random small models: `train sample --prompts` with all prompts in one run, against transformers' generate on each prompt
alone, and against `train sample --prompts` with one prompt in a run. Models are those of random_models.py; prompts have random ids and
lengths, some the same; slots and chunks are random, too. A text that differs is told with the margin of transformers' logits,
best less second best, at its first token that differs: it counts as a tie if rounding may decide it.

    test/random/random_prompts.py                     40 models; TRAIN=build/cpu-double/train (make PRECISION=double train)
    test/random/random_prompts.py --dtype fp32        TRAIN=build/cpu-fp32/train; margins below --tie of the largest logit are ties
    test/random/random_prompts.py --only 13           one model again, with its configuration

transformers runs without a key/value cache: that of 5.24 sees too much where a window is 1 token, and needs a layer of attention.
Needs torch and transformers.
"""
import argparse
import json
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import random_models  # noqa: E402
from random_models import FAMILIES, make_golden, ours, torch  # noqa: E402

NEW = 12                                  # tokens of a text
TIES = dict(double=1e-12, fp32=2e-5)      # of the largest logit
FEW = "gpt2,llama,mistral,qwen2,qwen3,gemma3,gemma4,qwen3_5,qwen3_5_moe,qwen3_moe,gpt_oss,mixtral,olmo3,phi3"


def sampled(folder, prompts, work, *options):
    """Returns the ids of our texts, one for each prompt."""
    path = work / "prompts.jsonl"
    path.write_text("".join(json.dumps(dict(prompt_ids=ids)) + "\n" for ids in prompts))
    out = ours("sample", "--model", folder, "--prompts", path, "--max-new-tokens", NEW, "--temperature", 0, "--ignore-eos", "--quiet",
               "--tokenizer", "none", *options)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["prompt_ids"] for a in answers] == prompts, "answers are not in the order of the prompts"
    return [a["ids"] for a in answers]


def greedy(model, ids):
    """Returns transformers' greedy text, and for each of its tokens the margin of its logit over the largest logit's size."""
    out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                         max_new_tokens=NEW, use_cache=False, return_dict_in_generate=True, output_logits=True)
    best = [logits[0].double().topk(2).values for logits in out.logits]
    size = [logits[0].double().abs().max() for logits in out.logits]
    return out.sequences[0, len(ids):].tolist(), [((b[0] - b[1]) / s).item() for b, s in zip(best, size)]


def compare(what, found, expected, margins, tie, about):
    """Prints the texts that differ; returns how many there are of [equal, tie, different]."""
    counts = [0, 0, 0]
    for i, (a, b) in enumerate(zip(found, expected)):
        at = next((t for t, (x, y) in enumerate(zip(a, b)) if x != y), None)
        kind = 0 if at is None and len(a) == len(b) else 1 if at is not None and margins[i][at] < tie else 2
        counts[kind] += 1
        if kind:
            margin = f"token {at}, margin {margins[i][at]:.1e}" if at is not None else "another length"
            print(f"{about}: prompt {i}, {what}: {margin}{' (a tie)' if kind == 1 else ''}", flush=True)
    return counts


def trial(options, number, names, work):
    """Returns the family and the counts against transformers and against prompts alone."""
    r = random.Random(f"prompts {options.seed} {number}")
    name = names[number % len(names)]
    config = FAMILIES[name](r)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    case = make_golden.Case(name, config, seed=r.randrange(1 << 20), lengths=(1,))
    folder = work / "model"
    folder.mkdir()
    made = make_golden.random_model(case)
    if options.dtype == "double":  # in fp32 rounding would choose among experts that tie
        random_models.skew(r, made)
    make_golden.save_model(case, made, folder)
    most = r.choice([4, 20, 60, 90])
    prompts = [[r.randrange(config.vocab_size) for _ in range(r.randrange(1, most))] for _ in range(r.randrange(1, 20))]
    for i in range(1, len(prompts)):
        if r.random() < 0.2:
            prompts[i] = prompts[i - 1]
    how = ["--slots", r.choice([1, 2, 3, len(prompts), "auto"]), "--chunk", r.choice([1, 2, 7, 16, 33, 200]), "--logits-chunk",
           r.choice([1, 3, 64])]
    about = f"model {number}, {name}, {len(prompts)} prompts of up to {most - 1}, {' '.join(map(str, how))}"
    if options.only is not None:
        print(about, config.to_json_string(), sep="\n")
    together = sampled(folder, prompts, work, *how)
    alone = [sampled(folder, [ids], work)[0] for ids in prompts]
    with make_golden.rmsnorm_in_the_models_dtype():
        model = make_golden.load_model(folder, dict(double=torch.float64, fp32=torch.float32)[options.dtype])
        model.config.output_hidden_states = getattr(config, "num_kv_shared_layers", 0) > 0  # as in random_models.py
        texts = [greedy(model, ids) for ids in prompts]
    margins = [m for _, m in texts]
    tie = options.tie or TIES[options.dtype]
    return name, compare("transformers", together, [ids for ids, _ in texts], margins, tie, about), \
        compare("alone", together, alone, margins, tie, about)


def main():
    arguments = argparse.ArgumentParser(description="Random prompts against transformers and against prompts alone.")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--models", type=int, default=40)
    arguments.add_argument("--only", type=int, help="this model alone")
    arguments.add_argument("--dtype", default="double", choices=TIES, help="of TRAIN's build, and of transformers")
    arguments.add_argument("--tie", type=float, help="margins below are ties, as shares of the largest logit")
    arguments.add_argument("--families", default=FEW, help="of these families, by turns")
    options = arguments.parse_args()
    random_models.prepare_torch()
    sums, failed, families = ([0, 0, 0], [0, 0, 0]), 0, {}
    for number in [options.only] if options.only is not None else range(options.models):
        with tempfile.TemporaryDirectory() as work:
            try:
                name, *counts = trial(options, number, options.families.split(","), pathlib.Path(work))
            except Exception as error:  # a fault of either side fails only this model
                failed += 1
                print(f"model {number} of seed {options.seed}: {error}", flush=True)
                continue
            families[name] = families.get(name, 0) + 1
            for total, found in zip(sums, counts):
                total[:] = map(sum, zip(total, found))
    print(f"{sum(families.values())} models, {failed} failed: " + ", ".join(f"{name} {n}" for name, n in sorted(families.items())))
    for what, (equal, ties, different) in zip(("transformers", "prompts alone"), sums):
        print(f"texts against {what}: {equal} equal, {ties} ties, {different} different")
    return failed > 0 or sums[0][2] > 0 or sums[1][2] > 0


if __name__ == "__main__":
    sys.exit(main())
