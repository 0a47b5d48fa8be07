#!/usr/bin/env python3
"""Compares --sp auto with fixed S by processor time on the CPU: seconds of the slowest rank in a step, and of all ranks
together. Waits for other ranks do not count (busy.c), so ranks may share cores. Documents are lognormal with a few long
ones; runs take turns, with the same steps. What lies between two exchanges of all ranks counts by its least over runs;
prints means over steps after the first, which warms up.

  dev/critical_path.py [--train ./train] [--ranks 4] [--sp auto 1 4] [--tokens 4096] [--samples 48] [--steps 9] [--runs 2]
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ("qwen3,hidden_size=192,intermediate_size=512,num_hidden_layers=4,num_attention_heads=6,num_key_value_heads=2,"
         "head_dim=32,vocab_size=256")


def lengths(count, most, median, seed):
    draw = random.Random(seed)
    found = [max(8, min(most, int(draw.lognormvariate(0, 1) * median))) for _ in range(count)]
    for i in range(0, count, 20):
        found[i] = draw.choice([most, most * 3 // 4, most // 2, most // 3])
    return draw.sample(found, count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=ROOT / "train")
    parser.add_argument("--sp", nargs="+", default=["auto", "1", "4"])
    for name, value in {"ranks": 4, "tokens": 4096, "samples": 48, "steps": 9, "runs": 2, "median": 160,
                        "seed": 1}.items():
        parser.add_argument("--" + name, type=int, default=value)
    o = parser.parse_args()
    found = {(sp, steps): [] for sp in o.sp for steps in (1, o.steps)}  # [runs][parts] of (slowest, sum)
    bounds = {}
    with tempfile.TemporaryDirectory() as made:
        program, data, busy = f"{made}/make_documents", f"{made}/data.bin", f"{made}/busy"
        subprocess.run([os.environ.get("CC", "cc"), "-D_GNU_SOURCE", "-O1", "-I.", "test/data/make_documents.c", "-lm", "-o",
                        program], cwd=ROOT, check=True)
        subprocess.run(["mpicc", "-shared", "-fPIC", "dev/busy.c", "-o", f"{busy}.so"], cwd=ROOT, check=True)
        drawn = lengths(o.samples * o.steps, o.tokens, o.median, o.seed)
        subprocess.run([program, data, "256", ",".join(map(str, drawn)), str(o.seed)], check=True)
        for _ in range(o.runs):
            for sp, steps in found:
                out = f"{made}/{sp}"
                subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-x", f"LD_PRELOAD={busy}.so", "-x", f"BUSY={busy}",
                                "-n", str(o.ranks), o.train, "train", "--init", SHAPE, "--data", data, "--seq-len", str(o.tokens),
                                "--samples", str(o.samples), "--steps", str(steps), "--sp", sp, "--overwrite", "--out", out],
                               check=True, stdout=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
                ends = [[0.0, *map(float, open(f"{busy}.{rank}"))] for rank in range(o.ranks)]
                parts = zip(*([b - a for a, b in zip(rank, rank[1:])] for rank in ends))
                found[sp, steps].append([(max(part), sum(part)) for part in parts])
                records = [json.loads(line) for line in open(f"{out}/log.jsonl")]
                bounds[sp] = statistics.median(r.get("deal_bound", 1) for r in records if "grad_norm" in r)

    def seconds(sp, steps, k):
        return sum(min(run[k] for run in part) for part in zip(*found[sp, steps]))

    print(f"{o.ranks} ranks, {o.samples} samples a step, {statistics.median(drawn):.0f} tokens in the middle, at most {max(drawn)}")
    print("   sp   slowest s  all ranks s  mean over slowest  bound over estimate")
    for sp in o.sp:
        slowest, total = ((seconds(sp, o.steps, k) - seconds(sp, 1, k)) / (o.steps - 1) for k in (0, 1))
        print(f"{sp:>5} {slowest:11.3f} {total:12.3f} {total / o.ranks / slowest:18.3f}",
              f"{bounds[sp]:20.3f}" if sp == "auto" else "")


main()
