#!/usr/bin/env python3
"""Lists lengths that one card reaches with host memory and a disk, by `train plan`, next to lengths that others have published for such cards
(scripts/paper/long_runs.csv, with its sources). Nothing is run: lengths are plans, times are estimates. tables.py makes the tables of `rows`.

    plan_lengths.py --points FILE     writes the points of `plot.py lengths`: our ways on an H100, and published lengths of others; TRAIN=./train

Needs the standard library only.
"""

import csv
import json
import os
import re
import subprocess
import sys

from log_export import end

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.environ.get("TRAIN", "./train")
H100 = "--machine h100 --memory-limit 80GiB"

# model and method, limits, options of plan; most % that transfers may add, or None; others: system, model, gpus, gpu of long_runs.csv
ROWS = [
    ("Qwen3-8B, all weights", "80 GiB, host 460 GiB", f"--init qwen3-8b --seq-len 1M {H100} --host-limit 460GiB", 3,
     [("ALST", "llama3.1-8b", 1, "h100"), ("MegaTrain", "7b", 1, "gh200")]),
    ("", "80 GiB, host 128 GiB, disk", "--init qwen3-8b --seq-len 1M --machine h100,disk=4TB --memory-limit 80GiB --host-limit 128GiB", 3, []),
    ("", "80 GiB, host 460 GiB", f"--init qwen3-8b --seq-len 256k {H100} --host-limit 460GiB", 3, []),
    ("", "80 GiB, host 460 GiB", f"--init qwen3-8b --seq-len 32k {H100} --host-limit 460GiB", None, []),
    ("", "80 GiB, host 460 GiB, 12 micro-batches", f"--init qwen3-8b --seq-len 32k --grad-accum 12 {H100} --host-limit 460GiB", 3, []),
    ("", "24 GiB, host 116 GiB", "--init qwen3-8b --seq-len 32k --machine rtx4090 --memory-limit 24GiB --host-limit 116GiB", None,
     [("LLMQ", "7b", 1, "rtx4090")]),
    ("", "24 GiB, host 116 GiB, disk, 8 micro-batches", "--init qwen3-8b --seq-len 32k --grad-accum 8 --machine rtx4090,disk=2TB "
     "--memory-limit 24GiB --host-limit 116GiB", None, []),
    ("Qwen3-8B, LoRA of rank 16", "24 GiB, host 96 GiB", "--init qwen3-8b --lora-rank 16 --seq-len 250000 --machine rtx4090 "
     "--memory-limit 24GiB --host-limit 96GiB", None, [("Unsloth", "llama3.1-8b", 1, "24gb")]),
    ("", "12 GiB, host 64 GiB", "--init qwen3-8b --lora-rank 16 --seq-len 128000 --machine rtx3060 --memory-limit 12GiB --host-limit 64GiB",
     None, [("Unsloth", "llama3.1-8b", 1, "12gb")]),
    ("Qwen3.5-9B, all weights", "80 GiB, host 460 GiB", f"--init qwen3.5-9b --seq-len 1M {H100} --host-limit 460GiB", 3, []),
    ("Qwen3.5-9B, LoRA of rank 16", "80 GiB", "--init qwen3.5-9b --lora-rank 16 --seq-len 200000 --machine h100,host=0 --memory-limit 80GiB",
     None, []),
    ("", "24 GiB, host 96 GiB", "--init qwen3.5-9b --lora-rank 16 --seq-len 250000 --machine rtx4090 --memory-limit 24GiB "
     "--host-limit 96GiB", None, []),
    ("Qwen3-32B, LoRA of rank 16", "80 GiB, host 320 GiB", f"--init qwen3-32b --lora-rank 16 --seq-len 500000 {H100} --host-limit 320GiB",
     None, [("ALST", "qwen3-32b", 1, "h100"), ("Unsloth", "llama3.3-70b", 1, "80gb")]),
    ("Llama-3.1-8B, all weights", "8 H100, host 1.8 TiB", "--init llama3.1-8b --seq-len 5000016 --ranks 8 --sp 8 --zero 3 --machine h100 "
     "--host-limit 1.8TiB", None, [("ALST", "llama3.1-8b", 8, "h100"), ("UPipe", "llama3-8b", 8, "h100")]),
    ("", "32 H100, host 1.8 TiB a node", "--init llama3.1-8b --seq-len 15500032 --ranks 32 --sp 32 --zero 3 --machine h100 "
     "--host-limit 1.8TiB", None, [("ALST", "llama3.1-8b", 32, "h100")]),
]


def qlora(model, what, published, times, card, gib, host=512):
    """Returns a row of rank 32 over a base in 4 bits, at a multiple of the length that Unsloth publishes for a card of gib GB."""
    limits, options = (f", host {host} GiB", f"{card} --host-limit {host}GiB") if host else ("", f"{card},host=0")
    return (what, f"{gib} GiB{limits}", f"--init {model} --base nf4 --lora-rank 32 --seq-len {int(times * published)} --machine {options} "
            f"--memory-limit {gib}GiB", None, [("Unsloth", model.replace("3.1-70b", "3.3-70b"), 1, f"{gib}gb")])


ROWS += [
    qlora("llama3.1-8b", "Llama-3.1-8B, QLoRA of rank 32", 2972, 8, "rtx3060", 8),
    qlora("llama3.1-8b", "", 21848, 8, "rtx3060", 12),
    qlora("llama3.1-8b", "", 40724, 8, "rtx4080", 16),
    qlora("llama3.1-8b", "", 78475, 8, "rtx4090", 24),
    qlora("llama3.1-8b", "", 153977, 8, "a100-40", 40),
    qlora("llama3.1-8b", "", 191728, 8, "l40s", 48),
    qlora("llama3.1-8b", "", 342733, 5, "h100", 80),
    qlora("llama3.1-8b", "the same, nothing outside the card", 2972, 0.65, "rtx3060", 8, 0),
    qlora("llama3.1-8b", "", 21848, 0.78, "rtx3060", 12, 0),
    qlora("llama3.1-8b", "", 40724, 0.79, "rtx4080", 16, 0),
    qlora("llama3.1-8b", "", 78475, 0.8, "rtx4090", 24, 0),
    qlora("llama3.1-8b", "", 153977, 0.8, "a100-40", 40, 0),
    qlora("llama3.1-8b", "", 191728, 0.8, "l40s", 48, 0),
    qlora("llama3.1-8b", "", 342733, 0.8, "h100", 80, 0),
    qlora("llama3.1-70b", "Llama-3.3-70B, QLoRA of rank 32", 12106, 4, "l40s", 48),
    qlora("llama3.1-70b", "", 89389, 4, "h100", 80),
]


def experts():
    """Returns rows of mixtures of experts over a base in 4 bits, with adapters of attention, then also of experts; then rows of all weights, of Gemma 4, and of
    larger models over FP8 and 4 bits."""
    cards = [("24 GiB, host 96 GiB", "--machine rtx4090 --memory-limit 24GiB --host-limit 96GiB", []),
             ("12 GiB, host 64 GiB", "--machine rtx3060 --memory-limit 12GiB --host-limit 64GiB", []),
             ("80 GiB", "--machine h100,host=0 --memory-limit 80GiB --inputs-every 4", [("Unsloth", "gpt-oss-20b", 1, "h100")])]
    ways = [("qwen3-30b-a3b", "Qwen3-30B-A3B, QLoRA of rank 16", "--lora-rank 16", (600000, 250000, 400000)),
            ("qwen3-30b-a3b", "Qwen3-30B-A3B, QLoRA of rank 8, experts too",
             "--lora-rank 8 --lora-targets q_proj,k_proj,v_proj,o_proj,experts", (600000, 250000, 400000)),
            ("qwen3.5-35b-a3b", "Qwen3.5-35B-A3B, QLoRA of rank 16", "--lora-rank 16", (900000, 375000, 600000))]
    full = "--init qwen3-30b-a3b --seq-len 1M --memory-limit 80GiB"
    oss = "--init gpt-oss-20b --base mxfp4 --lora-rank 16"
    return [(what * (not card), limits, f"--init {model} --base nf4 {way} --seq-len {lengths[card]} {options}", None, others)
            for model, what, way, lengths in ways for card, (limits, options, others) in enumerate(cards)] + [
        ("Qwen3-30B-A3B, all weights", "80 GiB, host 640 GiB", f"{full} --machine h100 --host-limit 640GiB", None, []),
        ("", "80 GiB, host 256 GiB, disk", f"{full} --machine h100,disk=2TB --host-limit 256GiB", None, []),
        ("the same, moments in 8 bits, no master weights", "80 GiB, host 256 GiB",
         f"{full} --moments int8 --master none --machine h100 --host-limit 256GiB", None, []),
        ("gpt-oss-20b over its MXFP4, LoRA of rank 16", "16 GiB, host 64 GiB",
         f"{oss} --seq-len 300000 --machine rtx4080 --memory-limit 16GiB --host-limit 64GiB", None, [("Unsloth", "gpt-oss-20b", 1, "80gb")]),
        ("", "80 GiB, host 256 GiB", f"{oss} --seq-len 1700000 {H100} --host-limit 256GiB", None, [("Unsloth", "gpt-oss-20b", 1, "h100")])] + [
        (f"{name}, QLoRA of rank 16", "24 GiB, host 128 GiB", f"--init {model} --base nf4 --lora-rank 16 --seq-len {length} --machine rtx4090 "
         "--memory-limit 24GiB --host-limit 128GiB", None, [])
        for name, model, length in (("Gemma 4 31B", "gemma4-31b", "128k"), ("Gemma 4 26B-A4B", "gemma4-26b-a4b", "256k"),
                                    ("Gemma 4 E4B", "gemma4-e4b", "128k"))] + [
        (what * (not card), limits, f"--init {model} --base {base} --lora-rank 16 --seq-len {lengths[card]} {options}", None, [])
        for what, model, base, host, lengths in (
            ("Qwen3.8-27B over its FP8, LoRA of rank 16", "qwen3.8-27b", "fp8", 96, ("128k", "64k")),
            ("Qwen3.8-27B, QLoRA of rank 16", "qwen3.8-27b", "nf4", 96, ("128k", "64k")),
            ("Qwen3-Next-80B-A3B, QLoRA of rank 16", "qwen3-next-80b-a3b", "nf4", 128, ("256k", "128k")),
            ("Muse Glimmer 30B, QLoRA of rank 16", "muse-glimmer-30b", "nf4", 128, ("128k", "64k")))
        for card, (limits, options) in enumerate([
            (f"24 GiB, host {host} GiB", f"--machine rtx4090 --memory-limit 24GiB --host-limit {host}GiB"),
            ("80 GiB", "--machine h100,host=0 --memory-limit 80GiB")])]


POINTS = [  # ways in the picture: name, options
    ("all weights, host 128 GiB and a disk", "--machine h100,host=128GiB,disk=4TB"),
    ("all weights, host 460 GiB", "--machine h100,host=460GiB"),
    ("all weights, host 128 GiB", "--machine h100,host=128GiB"),
    ("LoRA of rank 16, host 128 GiB", "--lora-rank 16 --machine h100,host=128GiB"),
    ("LoRA of rank 16, the card alone", "--lora-rank 16 --machine h100,host=0"),
]


def long_runs():
    with open(os.path.join(ROOT, "scripts", "paper", "long_runs.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def published():
    return {(row["system"], row["model"], int(row["gpus"]), row["gpu"]): row for row in long_runs()}


def plan(options):
    """Returns the object that `train plan` prints. plan exits with 1 if no length fits."""
    made = subprocess.run([TRAIN, "plan", *options.split(), "--threads", "1", "--json", "--quiet"], cwd=ROOT, capture_output=True, text=True)
    if made.returncode not in (0, 1) or not made.stdout:
        raise SystemExit(f"{os.path.basename(sys.argv[0])}: {TRAIN} plan {options}: {made.stderr.strip() or made.returncode}")
    return json.loads(made.stdout)


def tokens(n):
    """Returns a number as --seq-len reads it, rounded down: 1048576 -> 1M, 250000 -> 244k, 19777 -> 19.3k, 0 -> -."""
    big = f"{n * 100 // (1 << 20) / 100:g}M" if n >= 1 << 20 else f"{n // 1024}k"
    return big if n >= 102400 else f"{n * 10 // 1024 / 10:g}k" if n >= 1024 else str(n or "-")


def gigabytes(n):
    return f"{n / 2**30:.0f}" if n >= 10 * 2**30 else f"{n / 2**30:.1f}" if n else "-"


def places(made):
    """Returns the tensors that lie off the device: "host: inputs, optimizer"."""
    every = f"/{made['inputs_every']}" if made["inputs_every"] > 1 else ""
    found = {}
    for name in ("inputs", "weights", "gradients", "optimizer"):
        found.setdefault(made["placed"][name], []).append(name + every * (name == "inputs"))
    return "; ".join(f"{place}: {', '.join(found[place])}" for place in ("host", "disk") if place in found) or "nothing"


def title(name):
    """Returns the name of a model or a card as its makers write it."""
    for ours, theirs in (("llama", "Llama-"), ("qwen", "Qwen"), ("gemma", "Gemma "), ("mistral", "Mistral"), ("h100", "H100"), ("rtx", "RTX "), ("gb", " GB"), ("gh200", "GH200"), ("h200", "H200"), ("qlora", "QLoRA")):
        name = name.replace(ours, theirs)
    return re.sub(r"\ba?\d+b\b", lambda found: found[0].upper(), name)


def others(keys, known):
    found = []
    for row in (known[key] for key in keys):
        cards = f"{row['gpus']} {title(row['gpu'])}" if row["gpus"] != "1" else title(row["gpu"])
        seconds = f", {row['seconds']} s" if row["seconds"] else ""
        found.append(f"{row['system']} {row['tokens']}: {title(row['model'])}, {title(row['trained'])}, {cards}{seconds}")
    return found


def rows(table):
    """Returns the cells that the tables show for each of ROWS, or of experts()."""
    known, found = published(), []
    for what, limits, options, most, keys in table:
        made = plan(options)
        beyond = 100 * (made["estimated_seconds"] / made["estimated_seconds_on_device"] - 1)
        found.append({
            "what": what, "limits": limits, "options": options, "tokens": options.split("--seq-len ")[1].split()[0], "longest": tokens(made["max_seq_len"]),
            "reached": made["fits"] and not (most and beyond > most), "places": places(made), "seconds": f"{made['estimated_seconds']:.4g}",
            "memory": ", ".join(gigabytes(made[f"{place}_bytes"]) for place in ("total", "host", "disk")),
            "waits": f"{beyond:.1f} %", "others": others(keys, known)})
    return found


def points(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["series", "source", "tokens", "seconds"])
        for name, options in POINTS:
            longest = plan(f"--init qwen3-8b --seq-len 4096 {options}")["max_seq_len"]
            out.writerow([name, "plan", longest, plan(f"--init qwen3-8b --seq-len {longest} {options}")["estimated_seconds"]])
        for row in published().values():
            if row["gpus"] == "1" and row["gpu"] in ("h100", "gh200", "80gb") and row["model"] in ("7b", "llama3.1-8b"):
                out.writerow([f"{row['system']}, {title(row['gpu'])}, {title(row['trained'])}", "published", row["tokens"], row["seconds"]])


def main():
    if len(sys.argv) != 3 or sys.argv[1] != "--points":
        raise SystemExit(__doc__)
    points(sys.argv[2])


if __name__ == "__main__":
    end(main)
