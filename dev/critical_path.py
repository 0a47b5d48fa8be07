#!/usr/bin/env python3
"""Compares --sp auto with fixed S by processor time on the CPU: seconds of the slowest rank in a step, and of all ranks
together. Waits for other ranks do not count, so ranks may share cores. Documents are lognormal with a few long ones;
runs take turns, with the same steps; prints medians over steps of the least over runs.

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
    busy = {sp: [] for sp in o.sp}  # [runs][steps] of (slowest, sum)
    with tempfile.TemporaryDirectory() as made:
        program, data = f"{made}/make_documents", f"{made}/data.bin"
        subprocess.run([os.environ.get("CC", "cc"), "-D_GNU_SOURCE", "-O1", "-I.", "test/data/make_documents.c", "-lm", "-o",
                        program], cwd=ROOT, check=True)
        drawn = lengths(o.samples * o.steps, o.tokens, o.median, o.seed)
        subprocess.run([program, data, "256", ",".join(map(str, drawn)), str(o.seed)], check=True)
        for run in range(o.runs):
            for sp in o.sp:
                out = f"{made}/{sp}-{run}"
                subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(o.ranks), o.train, "train", "--init",
                                SHAPE, "--data", data, "--seq-len", str(o.tokens), "--samples", str(o.samples), "--steps",
                                str(o.steps), "--sp", sp, "--out", out], check=True, stdout=subprocess.DEVNULL,
                               env=dict(os.environ, OMP_NUM_THREADS="1"))
                records = [json.loads(line) for line in open(f"{out}/log.jsonl")]
                busy[sp].append([(r["busy_seconds"], r["busy_mean"] * o.ranks, r.get("deal_bound", 1))
                                 for r in records if "busy_seconds" in r][1:])  # the first step warms up
    print(f"{o.ranks} ranks, {o.samples} samples a step, {statistics.median(drawn):.0f} tokens in the middle, at most {max(drawn)}")
    print("   sp   slowest s  all ranks s  mean over slowest  bound over estimate")
    for sp in o.sp:
        steps = list(zip(*busy[sp]))
        slowest, total = ([min(run[k] for run in step) for step in steps] for k in (0, 1))
        even = statistics.median(t / o.ranks / s for s, t in zip(slowest, total))
        bound = statistics.median(step[0][2] for step in steps)
        print(f"{sp:>5} {statistics.median(slowest):11.3f} {statistics.median(total):12.3f} {even:18.3f}",
              f"{bound:20.3f}" if sp == "auto" else "")


main()
