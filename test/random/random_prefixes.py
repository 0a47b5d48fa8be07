#!/usr/bin/env python3
"""Random runs of `train --share-prefixes` against the same documents apart, in double: losses, norms and metrics of 3 steps are the same to
1e-10 (1e-7 with a reference, whose log-probabilities are stored in fp32). Random models, objectives, prompts, trees of plain documents,
methods, chunks, --keep, places, LoRA; some runs end in the middle and are resumed.

    test/random/random_prefixes.py [--seed S] [--trials N] [--only T]      100 trials; TRAIN=build/cpu-double/train

Needs numpy. AdamW's epsilon is large, or it would make much of gradients that are 0 but for rounding.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np

from random_deals import HEADS, MODELS, ROOT, TRAIN, asked

sys.path.insert(0, str(ROOT / "data"))
import shards  # noqa: E402

EXACT, REFERENCE, STEPS, VOCABULARY = 1e-10, 1e-7, 3, 61
METRICS = ("loss", "grad_norm", "tokens", "val_loss", "kl", "margin", "accuracy", "reward_margin", "reward_chosen", "entropy", "clipped", "ratio")


def ids_of(r, n):
    return [r.randrange(VOCABULARY) for _ in range(n)]


def samples_of(r, objective):
    """Returns samples: lists of (ids, number of prompt ids, reward)."""
    kind = {"sft": "documents", "kto": "labels", "grpo": "groups", "gspo": "groups"}.get(objective, "pairs")
    if kind in ("pairs", "groups"):
        members = 2 if kind == "pairs" else r.randrange(2, 6)
        samples = []
        for _ in range(r.randrange(2, 12)):
            prompt = ids_of(r, r.choice([3, 40, 64, 65, 66, 90, 150]))
            samples.append([(prompt + ids_of(r, r.choice([1, 1, 5, 30, 70])), len(prompt), r.random()) for _ in range(members)])
        return kind, samples
    documents = []
    for _ in range(r.randrange(2, 25)):  # each continues, cuts or repeats an earlier one, or is new
        old = r.choice(documents) if documents and r.random() < 0.75 else []
        documents.append((old[:r.randrange(len(old) + 1)] + ids_of(r, r.choice([0, 1, 20, 90])))[:220] if r.random() < 0.85 else list(old))
        if len(documents[-1]) < 3:
            documents[-1] = ids_of(r, r.randrange(3, 120))
    return kind, [[(ids, r.randrange(1, len(ids)), float(r.random() < 0.5))] for ids in documents]


def write(folder, r, kind, samples):
    number = {"documents": shards.DOCUMENTS, "pairs": shards.PAIRS, "groups": shards.GROUPS, "labels": shards.LABELS}[kind]
    writer = shards.ShardWriter(str(folder), "data", number, VOCABULARY, 0, "", 1 << 20)
    flat = [(i, *document) for i, sample in enumerate(samples) for document in sample]
    table, begin, ids, counts = np.zeros(len(flat), shards.TABLE), 0, [], []
    for i, (group, tokens, prompt, reward) in enumerate(flat):
        of = np.array(tokens, np.uint16)
        counted = np.array([t >= prompt and (kind != "documents" or r.random() < 0.8 or t == len(tokens) - 1) for t in range(len(tokens))], np.uint8)
        table[i] = begin, len(of), counted.sum(), group, 0 if kind == "documents" else prompt, reward, shards.document_crc(of.tobytes(), counted.tobytes())
        begin += len(of)
        ids.append(of), counts.append(counted)
    writer.add(np.concatenate(ids), np.concatenate(counts), table, np.array([len(s) for s in samples], np.int64))
    writer.close()
    pathlib.Path(writer.path(0) + ".tmp").rename(folder / "data.bin")


def draw(r):
    """Returns objective, samples, options of both runs, and --share-prefixes."""
    objective = r.choice(["sft", "sft", "sft", "dpo", "dpo", "simpo", "orpo", "grpo", "grpo", "gspo", "kto"])
    kind, samples = samples_of(r, objective)
    model = r.choice(MODELS)
    model += "" if "num_attention_heads" in model else f",{HEADS}"
    lengths = [sum(len(ids) for ids, *_ in sample) for sample in samples]
    share = "on" if kind in ("documents", "labels") or r.random() < 0.3 else "auto"
    options = f"--init {model} --seq-len {r.choice([120, 230, 230, 500])} --batch {r.choice([1, 2, 4])} --objective {objective} --lr 0.0005"
    options += f" --epsilon 1e-3 --schedule constant --seed {r.randrange(99)} --samples {100 if share == 'on' else r.randrange(1, len(samples) + 1)}"
    method = r.choice(["stream"] * 5 + ["checkpoint", "full", "mst"])
    options += f" --method {method}"
    if method in ("stream", "mst"):
        options += f" --logits-chunk {r.choice([1, 10, 64, 300])}" + f" --chunk {r.choice([1, 7, 16, 33, 64, 200])}" * (method == "stream")
    if method in ("stream", "checkpoint"):
        options += " --keep " + r.choice(["none", "attention", "products", "all", "products=1"]) + r.choice([" --keep-on host", ""])
        options += r.choice(["", "", " --inputs host", " --inputs-every 2"])
    if "experts" in model:
        options += " --router-aux-loss 0"  # its unit is the packed sequence
    if r.random() < 0.3:
        options += f" --lora-rank {r.randrange(1, 5)}"
    if objective in ("grpo", "gspo") and r.random() < 0.5:
        options += " --beta 0.1"
    if objective == "grpo":
        options += f" --normalisation {r.choice(['grpo', 'bnpo', 'dr_grpo', 'dapo'])}"
    if r.random() < 0.3:
        options += " --weights host"
    return objective, kind, samples, options, share, max(lengths)


def run(folder, words):
    made = subprocess.run([TRAIN, *words.replace("DATA", str(folder)).split()], capture_output=True, text=True, timeout=300, cwd=ROOT)
    if made.returncode:
        said = [line for line in made.stderr.splitlines() if line.startswith("train: ")] or [made.stderr[-600:]]
        raise AssertionError(f"exit status {made.returncode}: {said[0]}")
    return made.stderr


def logged(folder):
    found, computed, tokens = {}, 0, 0
    for line in open(folder / "run" / "log.jsonl"):
        record = json.loads(line)
        if "grad_norm" in record:
            computed, tokens = computed + record.get("computed", record["tokens"]), tokens + record["tokens"]
            found |= {(key, record["step"]): record[key] for key in METRICS if key in record}
    return found, computed, tokens


def trial(seed, number, folder, shows):
    r = random.Random(f"{seed} {number}")
    objective, kind, samples, options, share, _ = draw(r)
    halves = r.random() < 0.3
    if shows:
        print(number, options, share, kind, [len(s) for s in samples], halves)
    for name in ("apart", "shared"):
        (folder / name).mkdir()
        write(folder / name, random.Random(f"{seed} {number} data"), kind, samples)
    train = f"train --data DATA/data.bin --out DATA/run --any-tokenizer {options}"
    try:
        run(folder / "apart", f"{train} --steps {STEPS} --share-prefixes off")
    except AssertionError as error:  # refused for a reason that both share, such as documents without a target
        if shows:
            print(error)
        try:
            run(folder / "shared", f"{train} --steps {STEPS} --share-prefixes {share}")
        except AssertionError as other:
            assert str(error).replace("/apart/", "/shared/") == str(other), f"{error}; shared: {other} ({options})"
            return objective, 0, 0, 0
        raise AssertionError(f"runs although apart is refused: {error} ({options})")
    try:
        run(folder / "shared", f"{train} --steps {2 if halves else STEPS} --share-prefixes {share}")
        if halves:
            run(folder / "shared", f"{train} --steps {STEPS} --resume")
    except AssertionError as error:
        raise AssertionError(f"{error} ({options} --share-prefixes {share})")
    (apart, _, tokens), (shared, computed, same) = logged(folder / "apart"), logged(folder / "shared")
    assert apart.keys() == shared.keys() and ("loss", STEPS) in apart, f"records differ: {sorted(apart.keys() ^ shared.keys())} ({options})"
    assert tokens == same and computed <= tokens, f"{computed} of {same} tokens, apart {tokens} ({options})"
    worst, bound = 0, REFERENCE if objective in ("dpo", "kto") or "--beta" in options else EXACT
    for key, value in apart.items():
        error = abs(value - shared[key]) / max(abs(value), 1e-3)
        assert error <= bound, f"{key}: {shared[key]!r}, apart {value!r} ({options} --share-prefixes {share}{' in halves' * halves})"
        worst = max(worst, error * (bound == EXACT))
    return objective, worst, computed, tokens


def main():
    seed, numbers, shows = asked("Random runs of --share-prefixes against documents apart.", 100)
    counts, failed, worst, all_computed, all_tokens = {}, 0, 0.0, 0, 0
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                name, error, computed, tokens = trial(seed, number, pathlib.Path(folder), shows)
                worst, counts[name] = max(worst, error), counts.get(name, 0) + 1
                all_computed, all_tokens = all_computed + computed, all_tokens + tokens
            except Exception as error:  # fails only this trial
                failed += 1
                print(f"trial {number} of seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{sum(counts.values())} passed, {failed} failed: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    print(f"worst error {worst:.1e}; {all_computed:.0f} of {all_tokens:.0f} tokens were computed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
