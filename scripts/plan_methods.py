#!/usr/bin/env python3
"""Plans memory and time of every method, by `train plan`: one forward and backward pass of all weights in bf16, everything on the device of an
A100. Nothing is run: bytes are plans, seconds are estimates. stream, seco and spaco take chunks of 1024.

    plan_methods.py                              prints a table of six models; TRAIN=./train
    plan_methods.py --points FILE [MODEL...]     writes the bars of `plot.py methods`, with the paper's measurements of memory

Bytes are the growth for one more token, between half of the tokens and all tokens; in Figure 3 of the paper between its shortest and its
longest sequence. Needs the standard library only.
"""

import csv
import os
import sys

from log_export import end
from plan_lengths import ROOT, plan

MODELS = ["qwen3-4b", "qwen3-8b", "qwen2.5-7b", "llama3.1-8b", "qwen3.5-9b", "gemma3-12b"]
CHUNKS = "--chunk 1024 --logits-chunk 1024"
METHODS = {"full": "", "checkpoint": "", "mst": "", "stream": CHUNKS, "seco": CHUNKS, "spaco": CHUNKS + " --keep-chunks 0.25"}
TOKENS = 65536
OPTIONS = "--for bp --machine a100,host=0 --memory-limit 9TiB --inputs device --inputs-every 1 --weights device --gradients device --keep none"
ANY_LENGTH = "max_position_embeddings=1000000000"


def planned(model, method):
    """Returns the bytes of one more token, and seconds, whether the length fits an A100 or not."""
    half, whole = (plan(f"--init {model},{ANY_LENGTH} --method {method} {METHODS[method]} --seq-len {n} {OPTIONS}")
                   for n in (TOKENS // 2, TOKENS))
    return (whole["total_bytes"] - half["total_bytes"]) / (TOKENS - TOKENS // 2), whole["estimated_seconds"]


def paper():
    """Returns {(model, method): (tokens, bytes of one more token)} of the paper's Figure 3 (arXiv 2506.03077), measured on an A800."""
    with open(os.path.join(ROOT, "scripts", "paper", "fig3_bp_memory.csv"), newline="", encoding="utf-8") as file:
        first, found = {}, {}
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            key, tokens, peak = (row["model"], row["method"]), int(row["seq_len"]), float(row["peak_gib"]) * 2**30
            least, begin = first.setdefault(key, (tokens, peak))
            if tokens > least:
                found[key] = tokens, (peak - begin) / (tokens - least)
    return found


def points(path, models):
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["model", "method", "source", "tokens", "bytes_per_token", "seconds"])
        for model in models:
            for method in METHODS:
                each, seconds = planned(model, method)
                out.writerow([model, method, "plan", TOKENS, f"{each:.6g}", f"{seconds:.6g}"])
        for (model, method), (tokens, each) in paper().items():
            if model in models:
                out.writerow([model, method, "paper", tokens, f"{each:.6g}", ""])


def table():
    """Prints Markdown: bytes of one more token, and seconds, for every model and method."""
    lines = [f"| kB of a further token; seconds of {TOKENS // 1024}k | " + " | ".join(f"`{method}`" for method in METHODS) + " |",
             "|---|" + "---|" * len(METHODS)]
    for model in MODELS:
        found = [planned(model, method) for method in METHODS]
        lines.append(f"| {model} | " + " | ".join(f"{each / 1000:.0f}; {seconds:.1f}" for each, seconds in found) + " |")
    return "\n".join(lines)


def main():
    if not sys.argv[1:]:
        print(table())
    elif sys.argv[1] == "--points" and len(sys.argv) > 2 and set(sys.argv[3:]) <= set(MODELS):
        points(sys.argv[2], sys.argv[3:] or MODELS)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    end(main)
