#!/usr/bin/env python3
"""Compares our sampler with transformers.generate at completing texts in parallel, on the CPU, in turns within one run.

    dev/compare/decode.py --python venv/bin/python [--init qwen3-0.6b,num_hidden_layers=8] [--texts 4,32] [--rounds 5]

The same random weights (written once by `train convert`, fp32), the same prompts of equal length, greedy, no end token,
keys and values kept; the prompts are part of the time. Each round both complete the texts once, who begins changes;
printed are medians of the rounds' ratios, and how many texts are the same on both sides: greedy choices between almost
equal logits of random weights may differ. The first round warms up and does not count.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time

import machine
from contenders import HERE, ROOT, last_line

WORKER = "--as-transformers"


def transformers_side(folder, texts, prompt, new_tokens, group, threads):
    """The same as `bench decode`, by transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model = model.eval()
    V = model.config.vocab_size
    ids = torch.tensor([[(i // group * 7919 + t * 104729 + 1) % V for t in range(prompt)] for i in range(texts)])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for _ in sys.stdin:
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
            )
        seconds = time.perf_counter() - begin
        print(seconds, *out[:, prompt:].flatten().tolist(), flush=True)


class Side:
    def __init__(self, name, command, threads):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.name = name
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)

    def complete(self):
        """Returns seconds, and the ids of all texts."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        words = self.process.stdout.readline().split()
        if not words:
            raise SystemExit(f"decode.py: {self.name} ended without an answer; its stderr says why")
        return float(words[0]), words[1:]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="one with torch and transformers")
    parser.add_argument("--init", default="qwen3-0.6b,num_hidden_layers=8")
    parser.add_argument("--texts", default="4,32", help="numbers of texts, of 2 at least")
    parser.add_argument("--prompt", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--group", type=int, default=1, metavar="TEXTS", help="that have the same prompt, as in GRPO")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "compare-decode"))
    return parser.parse_args()


def main():
    if sys.argv[1:2] == [WORKER]:
        return transformers_side(sys.argv[2], *map(int, sys.argv[3:]))
    o = parse_options()
    build = os.path.join(ROOT, "build", "cpu-fp32")
    made = subprocess.run(["make", "-s", "BACKEND=cpu", "PRECISION=fp32", "train", "build/cpu-fp32/bench"], cwd=ROOT)
    if made.returncode:
        return made.returncode
    folder = os.path.join(o.out, "model")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(o.out, exist_ok=True)
    convert = [os.path.join(build, "train"), "convert", "--init", o.init, "--dtype", "fp32", "--out", folder, "--quiet"]
    made = subprocess.run(convert, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"decode.py: {last_line(made.stderr)}")
    print(f"{machine.cpu_name()}; {o.threads} threads, {o.init}, fp32, prompts of {o.prompt} tokens, {o.new} new ones, {o.group} texts a prompt")
    for texts in map(int, o.texts.split(",")):
        shape = [folder, *map(str, (texts, o.prompt, o.new, o.group))]
        sides = [
            Side("bench decode", [os.path.join(build, "bench"), "decode", *shape], o.threads),
            Side("transformers", [o.python, os.path.join(HERE, "decode.py"), WORKER, *shape, str(o.threads)], o.threads),
        ]
        ratios = []
        for number in range(o.rounds + 1):
            order = sides[::-1] if number % 2 else sides
            found = {side.name: side.complete() for side in order}
            (ours, our_ids), (theirs, their_ids) = found["bench decode"], found["transformers"]
            ratios.append(theirs / ours)
        same = sum(our_ids[i : i + o.new] == their_ids[i : i + o.new] for i in range(0, len(our_ids), o.new))
        ratios = ratios[1:]
        print(
            f"{texts} texts: {statistics.median(ratios):.2f} times as fast as transformers.generate "
            f"({min(ratios):.2f} to {max(ratios):.2f} in {o.rounds} rounds); {same} of {texts} texts are the same",
            flush=True,
        )
        for side in sides:
            side.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
