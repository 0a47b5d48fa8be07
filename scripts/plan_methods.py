#!/usr/bin/env python3
"""Memory and time of every method against the length of a sequence, by `train plan`, beside the paper's own measurements of gradient
checkpointing and Mini-Sequence. One forward and backward pass of all weights in bf16, everything on the device of an A100. Nothing is run:
bytes are plans, seconds are estimates. stream, seco and spaco take chunks of 1024.

    plan_methods.py --points FILE [MODEL...]     the points of `plot.py methods`; TRAIN=./train; six models unless some are named

FILE has the columns model,method,source,tokens,bytes_per_token,seconds. Bytes are those that a further token takes: from half as many
tokens on, or in Figure 3 of the paper from its shortest sequence on. A value that is not known is empty. Needs the standard library only.
"""

import csv
import os
import sys

from plan_lengths import ROOT, plan

MODELS = ["qwen3-4b", "qwen3-8b", "qwen2.5-7b", "llama3.1-8b", "qwen3.5-9b", "gemma3-12b"]
CHUNKS = "--chunk 1024 --logits-chunk 1024"
METHODS = {"full": "", "checkpoint": "", "mst": "", "stream": CHUNKS, "seco": CHUNKS, "spaco": CHUNKS + " --keep-chunks 0.25"}
LENGTHS = [1 << k for k in range(12, 21)]
OPTIONS = ("--for bp --machine a100,host=0 --inputs device --inputs-every 1 --weights device --gradients device --keep none")
ANY_LENGTH = "max_position_embeddings=1000000000"


def planned(model, method, tokens):
    """The object that `train plan` prints. It exits 1 where nothing fits an A100, which does not matter here."""
    return plan(f"--init {model},{ANY_LENGTH} --method {method} {METHODS[method]} --seq-len {tokens} {OPTIONS}")


def paper():
    """The paper's measurements on an A800 (arXiv 2506.03077): memory of Figure 3, seconds of Table 1."""
    def rows(name):
        with open(os.path.join(ROOT, "scripts", "paper", name), newline="", encoding="utf-8") as file:
            yield from csv.DictReader(line for line in file if not line.startswith("#"))
    shortest = {}
    for row in rows("fig3_bp_memory.csv"):
        key, tokens, peak = (row["model"], row["method"]), int(row["seq_len"]), float(row["peak_gib"]) * 2**30
        first, least = shortest.setdefault(key, (tokens, peak))
        if tokens > 2 * first:
            yield *key, tokens, f"{(peak - least) / (tokens - first):.6g}", ""
    for row in rows("tables.csv"):
        for method in ("checkpoint", "mst", "stream"):
            if row["table"] == "table1_bp_seconds" and row[method]:
                yield row["model"], method, int(row["x"].rstrip("k")) * 1000, "", row[method]


def points(path, models):
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["model", "method", "source", "tokens", "bytes_per_token", "seconds"])
        for model in models:
            for method in METHODS:
                for tokens in LENGTHS:
                    whole, half = planned(model, method, tokens), planned(model, method, tokens // 2)
                    each = (whole["total_bytes"] - half["total_bytes"]) / (tokens - tokens // 2)
                    out.writerow([model, method, "plan", tokens, f"{each:.6g}", f"{whole['estimated_seconds']:.6g}"])
        for model, method, tokens, each, seconds in paper():
            if model in models and method != "full":
                out.writerow([model, method, "paper", tokens, each, seconds])


def main():
    if len(sys.argv) < 3 or sys.argv[1] != "--points" or not set(sys.argv[3:]) <= set(MODELS):
        raise SystemExit(__doc__)
    points(sys.argv[2], sys.argv[3:] or MODELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
