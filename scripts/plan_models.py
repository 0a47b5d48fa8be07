"""The pages docs/models/*.md and the tables of docs/index.md: what fits four cards, how long a step takes, the commands, what is refused, what ran.
All of it is planned by `train plan`, seconds are estimated; one plan has the ways of all weights and of LoRA, so a page takes at most 24 of them.

Needs the standard library only. tables.py puts the tables where they are shown; test/scripts/test_pages.py plans the commands again.
"""

import functools
import re
import subprocess

import measured
import plan_lengths
from plan_lengths import ROOT, plan, tokens

MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B", "qwen3-32b": "Qwen3-32B", "qwen3.5-9b": "Qwen3.5-9B",
          "qwen3.8-27b": "Qwen3.8-27B", "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B", "qwen3-30b-a3b": "Qwen3-30B-A3B",
          "nemotron3-nano-30b-a3b": "Nemotron-3-Nano-30B-A3B", "glm4.7-flash": "GLM-4.7-Flash",
          "mistral-small-4": "Mistral Small 4 119B", "llama3.1-8b": "Llama-3.1-8B",
          "gpt-oss-20b": "gpt-oss-20b", "gemma4-31b": "Gemma 4 31B", "ministral3-8b": "Ministral 3 8B"}
IMAGES = ("qwen3.5", "qwen3.6", "qwen3.8", "gemma4", "ministral3", "mistral-small-4")  # folders of these hold a model of images, too
SHAPES = {"qwen3.6-35b-a3b": "qwen3.5-35b-a3b"}  # has the same shapes
MACHINES = {"12 GB, host 64 GiB": "rtx3060,host=64GiB", "24 GB, host 128 GiB": "rtx4090,host=128GiB", "80 GB, host 225 GiB": "h100,host=225GiB",
            "141 GB, host 225 GiB": "h200,host=225GiB"}
LENGTHS = {"4k": 4096, "32k": 32768, "128k": 131072}
WAYS = ("all weights", "LoRA", "4 bits")
PROBES = ("--base nf4 --lora-rank 16", "--base mxfp4 --lora-rank 16", "--base nf4 --lora-rank 16 --quantise-head", "--lora-rank 16 --lora-targets experts",
          "--lora-rank 16 --lora-dropout 0.1 --lora-targets all", "--rope-scaling yarn,factor=4", "--rope-scaling linear,factor=4", "--method seco",
          "--method seco --ranks 2 --sp 2", "--router-aux-loss 0.001", "--router-bias-update 0.001",
          "--batch 2 --shared-tokens 128 --share-prefixes on --ranks 2 --sp 2")
SMALL = "--dtype bf16 --seq-len 1024 --chunk 512 --logits-chunk 512 --inputs device --weights device --gradients device --optimizer device --quiet"


@functools.cache
def planned(model, machine, length, bits):
    """Returns {way: its object in `plan --json`} of the ways that the plan lists; the fastest that fits, else the longest."""
    base = f"--base {'mxfp4' if 'gpt-oss' in model else 'nf4'} --lora-rank 16" if bits else ""
    ways = {}
    for way in plan(f"--init {model} --seq-len {length} --machine {machine} {base}").get("ways", []):
        name = WAYS[0] if way["trained"] == "full" else WAYS[2] if way["base_in_4_bits"] else WAYS[1]
        ways.setdefault(name, []).append(way)
    return {name: {**min(each, key=lambda way: (not way["fits"], way["estimated_seconds"] or 0)), "longest": max(way["max_seq_len"] for way in each)}
            for name, each in ways.items()}


def row_of(model, machine, way):
    """Returns the longest length, {length: way} of those that fit, and the length whose command is shown: 32k if it fits, else the longest that does."""
    bits = way == WAYS[2]
    first = planned(model, machine, "32k", bits).get(way)
    if not first or not first["longest"]:
        return 0, {}, None
    found = {length: planned(model, machine, length, bits).get(way) for length, n in LENGTHS.items() if n <= first["longest"]}
    found = {length: each for length, each in found.items() if each and each["fits"]}
    return first["longest"], found, "32k" if "32k" in found else max(found, key=LENGTHS.get, default=None)


def seconds(way):
    n = way["estimated_seconds"]
    return f"{n:.3g}" if n < 1000 else f"{n:.0f}"


def memory(way):
    return f"{way['total_bytes'] / 2**30:.2f} GiB" + (f", host {way['host_bytes'] / 2**30:.2f} GiB" if way["host_bytes"] else "")


def refusals(model):
    """Returns lines: options of the family and the program's own answer."""
    lines = []
    for probe in PROBES:
        made = subprocess.run([plan_lengths.TRAIN, "plan", "--init", model, *SMALL.split(), *probe.split()], cwd=ROOT, capture_output=True, text=True)
        if made.returncode:
            lines.append(f"- `{probe}`: {made.stderr.strip().removeprefix('train: ')}")
    if model.startswith(IMAGES):
        lines.append("- Images and sound: only the text model of the folder is trained, the rest is copied.")
    return lines


def ran(model):
    """Returns lines: the rows of docs/measured.md of this model, whole or cut down."""
    return [f"- {row['card']}, {row['date']}: {' `'.join(part for part in measured.name_of(row['options']) if part)}"
            f"{'`' * bool(measured.name_of(row['options'])[1])}, {row['tokens']} tokens: {row['seconds']:.4g} s, {row['peak'] / 1e9:.2f} GB "
            f"([{row['id']}](../measured.md#{row['id']}))"
            for _, each in measured.rows() for row in each if re.match(f"--init {re.escape(SHAPES.get(model, model))}[ ,]", row["options"])]


def page(model):
    """Returns the Markdown of a model's page."""
    heads = ["card", "trained", "longest", *(f"s at {length}" for length in LENGTHS), "memory at"]
    lines, commands = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"], []
    for card, machine in MACHINES.items():
        for way in WAYS:
            longest, found, shown = row_of(model, machine, way)
            steps = (seconds(found[length]) if length in found else "-" for length in LENGTHS)
            where = f"{shown}: {memory(found[shown])}" if shown else "-"
            lines.append(f"| {card} | {way} | {tokens(longest)} | {' | '.join(steps)} | {where} |")
            if shown:
                commands += [f"{card}, {way}, {shown} tokens, planned {memory(found[shown])} with `--machine {machine}`:", "",
                             "    " + found[shown]["command"].removesuffix(" --threads 1"), ""]
    found = ran(model)
    return "\n".join([
        "**Planned; seconds are estimated.** A step: forward, backward and update of one sequence in bf16, AdamW with fp32 states. LoRA has rank 16. "
        "4 bits: " + ("gpt-oss's own mxfp4" if "gpt-oss" in model else "nf4") + " under LoRA. A k is 1024 tokens; a dash does not fit.", "", *lines, "",
        "## What of it has run", "", *(found or ["Nothing of this model has run on a GPU."]), "",
        "## What is refused", "", *refusals(model), "", "## The commands", "",
        "`plan` printed them. It takes the same options, with `--machine`, and prints the same bytes.", "", *commands]).strip()


def index():
    """Returns the Markdown of docs/index.md's tables: the longest lengths, and the seconds of a step at 32k."""
    lines = []
    for what in ("Longest sequence, planned", "Seconds of a step at 32k (32,768 tokens), estimated"):
        heads = [what] + [way if number else f"{card}: {way}" for card in MACHINES for number, way in enumerate(WAYS)]
        lines += [*([""] if lines else []), "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for model, name in MODELS.items():
            rows = [row_of(model, machine, way) for machine in MACHINES.values() for way in WAYS]
            cells = [tokens(longest) if "Longest" in what else seconds(found["32k"]) if "32k" in found else "-"
                     for longest, found, _ in rows]
            lines.append(f"| [{name}](models/{model}.md) | " + " | ".join(cells) + " |")
    return "\n".join(lines)
