#!/usr/bin/env python3
"""Random runs of `train --sp auto` on 2 to 8 CPU processes against one process, in double: losses and norms of 4 steps, the validation's
losses and sampled ids are the same to 1e-12. Random models, objectives, lengths with a long tail, --zero, LoRA, places, limits on memory
that leave short sequences alone to small groups, --samples or --grad-accum; some runs end in the middle and are resumed.

    test/random/random_deals.py [--seed S] [--trials N] [--only T]      200 trials; TRAIN=build/cpu-double/train (make PRECISION=double train)

With int8 moments only the first step counts: their blocks are of a rank's own part. Runs with a reference are held to 1e-8, as its
log-probabilities are stored in fp32. AdamW's epsilon is large, or it would make much of gradients that are 0 but for rounding.
Needs mpirun and a C compiler.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = os.environ.get("TRAIN", str(ROOT / "build" / "cpu-double" / "train"))
EXACT, REFERENCE, STEPS = 1e-12, 1e-8, 4
HEADS = "num_attention_heads=4,num_key_value_heads=2,vocab_size=61"
EXPERTS = "num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12"
OWN = "gemma4,initializer_range=0.2,hidden_size=20,intermediate_size=16,head_dim=8,global_head_dim=12,sliding_window=6,layer_types=sf"
LINEAR = "linear_num_key_heads=2,linear_num_value_heads=4,linear_key_head_dim=6,linear_value_head_dim=10,rms_norm_eps=1e-3"
MODELS = [
    "qwen3,hidden_size=24,intermediate_size=32,num_hidden_layers=3,head_dim=8",
    "gpt2,hidden_size=24,num_hidden_layers=2,max_position_embeddings=512,num_attention_heads=4,vocab_size=61",
    "mistral,hidden_size=24,intermediate_size=32,num_hidden_layers=2,head_dim=8,sliding_window=9",
    "gemma3,hidden_size=24,intermediate_size=32,num_hidden_layers=3,head_dim=8,sliding_window=7,layer_types=sf",
    f"qwen3_5,hidden_size=24,intermediate_size=20,num_hidden_layers=4,head_dim=8,partial_rotary_factor=0.5,{LINEAR}",
    f"{OWN},num_hidden_layers=3,num_global_key_value_heads=1,attention_k_eq_v=true,hidden_size_per_layer_input=0,{EXPERTS}",
    f"{OWN},num_hidden_layers=6,num_kv_shared_layers=3,hidden_size_per_layer_input=12,vocab_size_per_layer_input=61",
    f"gpt_oss,hidden_size=20,intermediate_size=12,num_hidden_layers=3,head_dim=8,sliding_window=7,{EXPERTS.rsplit(',', 1)[0]}",
    f"qwen3_moe,hidden_size=20,intermediate_size=24,num_hidden_layers=3,head_dim=8,mlp_only_layers=1,{EXPERTS}",
]


def draw(r):
    """Returns the processes, the options of both runs, those of --sp auto alone, and arguments of make_documents."""
    T, objective = r.choice([48, 96, 200, 400]), r.choice(["sft"] * 4 + ["dpo", "simpo", "orpo", "grpo"])
    model = r.choice(MODELS)
    model += "" if "num_attention_heads" in model else f",{HEADS}"
    kind = {"sft": ["documents"], "grpo": [str(r.randrange(2, 5))]}.get(objective, ["pairs"])
    unit = int(kind[0]) if objective == "grpo" else 2 if kind == ["pairs"] else 1
    longest, long = T + r.choice([1, 1, 20]) * (unit == 1), r.choice([0, 0.1, 0.3])
    lengths = [max(3, min(longest, int(r.lognormvariate(2.6, 1.1) if r.random() >= long else T * r.uniform(0.5, 1.1)))) for _ in range(unit * r.randrange(6, 40))]
    made = [",".join(map(str, lengths)), r.randrange(1000), r.choice([0, 1, 7]), *kind]
    lora = r.random() < 0.3
    options = f"--init {model} --seq-len {T} --batch {r.choice([1, 1, 2, 3])} --objective {objective} --lr 0.0005 --epsilon 1e-3 --schedule constant --seed {r.randrange(99)}"
    options += f" --samples {r.randrange(1, 30)}" if r.random() < 0.6 else f" --grad-accum {r.randrange(1, 7)}"
    if "experts" in model:
        options += " --router-aux-loss 0"  # its unit is the packed sequence
    if lora:
        options += f" --lora-rank {r.randrange(1, 5)}" + r.choice(["", " --lora-targets q_proj,o_proj"]) * ("gpt2" not in model)
    if objective == "grpo" and r.random() < 0.5:
        options += " --beta 0.1"
    for chance, some in [(0.2, "--shuffle off"), (0.15, "--moments int8"), (0.3, f"--chunk {r.choice([8, 16, 33])} --logits-chunk 10"),
                         (0.3, "--val-every 2 --val-data DATA/val.bin"), (0.2, "--sample-every 2 --prompt-ids 1,2,3 --max-new-tokens 5")]:
        options += f" {some}" if r.random() < chance else ""
    auto = f"--sp auto --zero {r.choice([0, 1, 2, 2, 3, 3])}"
    for what, places in dict(weights="host disk", gradients="host", optimizer="host disk", inputs="host disk").items():
        auto += f" --{what} {r.choice(places.split())}" if r.random() < 0.12 else ""
    for some in ["--update forward", "--keep attention", "--kv ring", "--kv gather", "--keep attention --keep-on host", "--inputs-every 2"]:
        auto += f" {some}" if r.random() < 0.15 and some.split()[0] not in auto else ""
    return r.randrange(2, 9), options, auto + (" --disk DATA" if "disk" in auto else ""), made, objective


def run(work, ranks, words, fails=True):
    command = [str(ROOT / "test" / "ranks" / "mpirun.sh"), str(ranks), TRAIN, *words.replace("DATA", str(work)).split()]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    if made.returncode and fails:
        said = [line for line in made.stderr.splitlines() if line.startswith("train: ")] or [made.stderr[-300:]]
        raise AssertionError(f"exit status {made.returncode}: {said[0]}")
    return made.stdout


def total(work, words):
    return json.loads(run(work, 1, f"plan {words} --json"))["total_bytes"]


def logged(folder):
    """Returns steps and validations of a run by kind and step, and the sizes of groups that its steps used."""
    found, sizes = {}, []
    for line in open(folder / "log.jsonl"):
        record = json.loads(line)
        for key in ("loss", "grad_norm", "tokens", "val_loss", "sample", "kl", "margin", "accuracy", "reward_margin"):
            if key in record and "options" not in record:
                found[key, record["step"]] = record[key]
        if "groups" in record:
            sizes.append([int(n) for n in record["groups"]])
    return found, sizes


def trial(seed, number, folder, make_documents, shows):
    r = random.Random(f"{seed} {number}")
    ranks, options, auto, made, objective = draw(r)
    limited, halves, share = r.random() < 0.8, r.random() < 0.3, r.random() ** 3
    if shows:
        print(number, ranks, options, auto, made, limited, halves)
    for name in ("one", "many"):  # each with data of its own: a reference is stored beside them
        (folder / name).mkdir()
        for file in ("data", "val"):
            subprocess.run([make_documents, folder / name / f"{file}.bin", "61", *map(str, made)], check=True)
    train = f"train --data DATA/data.bin --out DATA/run --steps {STEPS} {options}"
    run(folder / "one", 1, train)
    if limited:
        planned = re.sub(" --(val|sample)-every.*", "", options)  # which are the last
        fixed = f"--data DATA/data.bin {planned} {re.sub('--(sp|kv) [a-z]*', '', auto)} --ranks {ranks}"
        least, most = (total(folder / "many", f"{fixed} --sp {size}") for size in (ranks, 1))
        auto += f" --memory-limit {int(1.05 * least + share * max(most - least, 0)) // 1024}KiB"
    if halves:
        run(folder / "many", ranks, f"{train} {auto}".replace(f"--steps {STEPS}", "--steps 2"))
    run(folder / "many", ranks, f"{train} {auto}" + " --resume" * halves)
    (ours, sizes), (one, _) = logged(folder / "many" / "run"), logged(folder / "one" / "run")
    last = 1 if "int8" in options else STEPS
    one, ours = ({k: v for k, v in found.items() if k[1] <= last and not (k[1] and k[0] == "val_loss" and last == 1)} for found in (one, ours))
    assert one.keys() == ours.keys() and ("loss", last) in one, f"records differ: {sorted(one.keys() ^ ours.keys(), key=str)}"
    worst, bound = 0, EXACT if objective != "dpo" and "--beta" not in options else REFERENCE
    for key, value in one.items():
        error = (value != ours[key]) if isinstance(value, str) else abs(value - ours[key]) / max(abs(value), 1e-3)
        assert error <= bound, f"{key}: {ours[key]!r}, alone {value!r} ({ranks} {options} {auto})"
        worst = max(worst, error * (bound == EXACT))
    return objective, worst, sizes


def asked(description, trials):
    """Returns seed, numbers of the trials, and whether a single trial shows its options."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=trials)
    arguments.add_argument("--first", type=int, default=0, help="number of the first trial")
    arguments.add_argument("--only", type=int, help="this trial alone, with its options")
    options = arguments.parse_args()
    shows = options.only is not None
    return options.seed, [options.only] if shows else range(options.first, options.first + options.trials), shows


def main():
    seed, numbers, shows = asked("Random runs of --sp auto against one process.", 200)
    counts, failed, worst, steps, several, shared = {}, 0, 0.0, 0, 0, 0
    with tempfile.TemporaryDirectory() as work:
        tool = pathlib.Path(work) / "make_documents"
        subprocess.run(["cc", "-D_GNU_SOURCE", "-O1", "-I.", "test/data/make_documents.c", "-lm", "-o", tool], check=True, cwd=ROOT)
        for number in numbers:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    name, error, sizes = trial(seed, number, pathlib.Path(folder), tool, shows)
                    worst, counts[name] = max(worst, error), counts.get(name, 0) + 1
                    steps, several = steps + len(sizes), several + sum(len(s) > 1 for s in sizes)
                    shared += sum(max(s) > 1 for s in sizes)
                except Exception as error:  # fails only this trial
                    failed += 1
                    print(f"trial {number} of seed {seed}: {error}", flush=True)
    print(f"{sum(counts.values())} passed, {failed} failed: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    print(f"worst error {worst:.1e}; of {steps} steps {shared} had groups of several ranks, {several} groups of several sizes")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
