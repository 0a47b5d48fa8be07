"""The tables of docs/measured.md: passes and ops that ran on a GPU (dev/results/passes-*.json, ops-*.json), and speeds that others publish
(scripts/paper/long_runs.csv). A row exists only if a record does. Each pass is planned again by `train plan`; a plan that differs is a fault.

Needs the standard library only. tables.py puts the tables where they are shown.
"""

import collections
import functools
import glob
import json
import math
import os
import re

from plan_lengths import ROOT, long_runs, plan, title

CARD = re.compile(r"[ABH]\d00|L40S|RTX \d{4}")  # of a device's name; small and without the blank a name of --machine
DELTA_SLOWER = {"6a8115d": 0.19 / 0.072}  # the delta rule's kernels of then over those of now
USUAL = r" --(logits-chunk 2048|inputs-every 1|inputs device|keep-on device|keep none)\b"  # not worth a word in the table


def records(kind):
    """Returns dev/results/KIND-*.json, newest first; parts of one day by their number. card: its name for --machine, or ""."""
    found = []
    for path in glob.glob(os.path.join(ROOT, "dev", "results", f"{kind}-*.json")):
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        record.setdefault("device", record.get("device_name"))
        missing = [key for key in ("device", "driver", "date", "commit") if not record.get(key)]
        if missing:
            raise SystemExit(f"{path}: has no {', '.join(missing)}")
        card = re.search(CARD, record["device"])
        part = re.search(r"\d{4}-\d\d-\d\d-(\d+)\.json$", path)
        record.setdefault("card", record.get("machine", card[0].lower().replace(" ", "") if card else ""))
        found.append({"part": int(part[1]) if part else 1, **record, "file": os.path.basename(path)})
    return sorted(found, key=lambda record: (record["date"], record["part"]), reverse=True)


def heading(record):
    return [f"### {record['device']}, {record['date']}, commit {record['commit']}: {record['file']}", ""]


def name_of(options):
    """Returns what a pass computed: "Qwen3-8B, 2 layers, vocabulary 32000" and its unusual options."""
    model, *keys = re.search(r"--init (\S+)", options)[1].split(",")
    cut = "".join(", " + re.sub(r"num_hidden_layers=(\d+)", r"\1 layers", key).replace("vocab_size=", "vocabulary ") for key in keys)
    rest = re.sub(r"--(init|seq-len) \S+", "", re.sub(USUAL, "", " " + options))
    return title(model) + (cut or ", all layers"), " ".join(rest.split())


def planned(record, each):
    """Returns today's plan of a pass that ran, and a list of what contradicts it. A card without a row in machine.h has no plan."""
    if not record["card"]:
        return {"estimated_seconds": math.nan, "estimated_mfu": math.nan, "estimated_work": {}, "total_bytes": each["plan_bytes"]}, []
    keep = "" if "--keep" in each["options"] else "--keep none"  # a pass kept nothing unasked
    limit = f"--memory-limit {record['memory_limit']}" if record["memory_limit"] else ""
    made = plan(f"--for bp {keep} --machine {record['card']},host=128GiB {limit} {each['options']}")
    slower = DELTA_SLOWER.get(record["commit"], 1) - 1
    compiling = 0.8 if each["passes"] == 1 and each["seconds"] > 10 else 0  # the only pass of a process compiles kernels, too
    ratio = (each["seconds"] - compiling) / (made["estimated_seconds"] + slower * made["estimated_work"].get("delta", 0))
    wrong = []
    if made["total_bytes"] != each["plan_bytes"] and "since" not in each:  # since: why plans have other bytes
        wrong.append(f"plans {made['total_bytes']} bytes, ran with {each['plan_bytes']}")
    if not 0.9 < ratio < (1.2 if made["chunk"] < 2048 else 1.1):
        wrong.append(f"took {ratio:.3f} of the estimated seconds")
    return made, wrong


@functools.cache
def rows():
    """Returns (record, rows) of each record of passes, newest first: what was found, beside today's plan. Rows of a card and commit are counted."""
    found, count = [], collections.Counter()
    for record in reversed(records("passes")):
        each_row, name = [], f"{record['card'] or re.sub('[^a-z0-9]+', '', record['device'].lower())}-{record['commit'][:7]}"
        for each in record["passes"]:
            count[name] += 1
            made, wrong = planned(record, each)
            tokens = int(re.search(r"--seq-len (\d+)", each["options"])[1])
            each_row.append({
                "id": f"{name}-{count[name]}", "options": each["options"], "tokens": tokens, "seconds": each["seconds"],
                "per_second": tokens / each["seconds"], "mfu": made["estimated_mfu"] * made["estimated_seconds"] / each["seconds"],
                "planned_seconds": made["estimated_seconds"], "planned": each["plan_bytes"], "peak": each["peak_bytes"], "wrong": wrong,
                "marks": ("*" if made["total_bytes"] != each["plan_bytes"] else "") +
                         ("+" if record["commit"] in DELTA_SLOWER and made["estimated_work"].get("delta") else ""),
                "windows": each.get("windows", ""), "card": record["card"].upper(), "date": record["date"]})
        found.append((record, each_row))
    return found[::-1]


def passes(faults):
    """Returns Markdown: a heading, a table and the commands of each record."""
    lines = []
    for record, each_row in rows():
        lines += [*heading(record), f"Driver {record['driver']}, {record['libraries']}; {record['what']}. Planned seconds are estimated today.", "",
                  "| row | what | tokens | s | s, planned | tokens/s | MFU | GB planned | GB found |", "|---|---|---|---|---|---|---|---|---|"]
        for row in each_row:
            faults += [f"docs/measured.md: {row['id']}: {wrong}" for wrong in row["wrong"]]
            what, options = name_of(row["options"])
            what += (f", `{options}`" if options else "") + (f", windows {row['windows']}" if row["windows"] else "")
            lines.append(f"| <a id=\"{row['id']}\"></a>{row['id']} | {what} | {row['tokens']} | {row['seconds']:.4g} | {row['planned_seconds']:.3g}"
                         f"{row['marks'].replace('*', '')} | {row['per_second']:.0f} | {100 * row['mfu']:.1f} % | {row['planned'] / 1e9:.2f}"
                         f"{row['marks'].replace('+', '')} | {row['peak'] / 1e9:.2f} |")
        lines += ["", "The commands, row by row:", "", *(f"    ./train bp {row['options']}  # {row['id']}" for row in each_row), ""]
    return "\n".join(lines).replace(" nan % ", " - ").replace(" nan ", " - ").strip()


def ops():
    """Returns Markdown: single ops of the newest record of each card."""
    lines = []
    for record in records("ops"):
        lines += [*heading(record), f"Driver {record['driver']}, CUDA {record['cuda']}; {record['what']}, {record['dtype']}. "
                  f"Device copy {record['copy_gb_per_s']:.0f} GB/s, best square product {record['product_tflop_per_s']:.0f} TFLOP/s.", "",
                  "| op | of | rows x in (x out) | ms | rate | share of the copy, of the product |", "|---|---|---|---|---|---|"]
        for op in record["ops"]:
            rate = f"{op['gb_per_s']:.0f} GB/s" if "gb_per_s" in op else f"{op['tflop_per_s']:.0f} TFLOP/s"
            lines.append(f"| `{op['op']}` | {op['of']} | {' x '.join(str(op[key]) for key in ('rows', 'in', 'out') if key in op)} | {op['ms']:.3g} | "
                         f"{rate} | {100 * op.get('share_of_copy', op.get('share_of_product', 0)):.0f} % |")
        lines.append("")
    return "\n".join(lines).strip()


def reports():
    """Returns Markdown: the rows that others have sent (report-*.json), and those of the queue of a GPU (queue-*.json). A CPU's seconds are not quoted."""
    lines = []
    for record in records("report") + records("queue"):
        lines += [*heading(record), f"`{record['command']}`", "", "| row | what | tokens | s | s, planned | GB planned | GB found |", "|---" * 7 + "|"]
        for number, row in enumerate(record["rows"], 1):
            name = f"{record['file'].removesuffix('.json')}-{number}"
            seconds = [f"{row[key]:.3g}" if record["on_gpu"] and row.get(key) else "-" for key in ("seconds", "planned_seconds")]
            memory = [f"{row[key] / 1e9:.2f}" if row.get(key) else "-" for key in ("plan_bytes", "peak_bytes")]
            what = " ".join(part for part in (row.get("what", ""), f"`{row.get('options') or row.get('command')}`", row.get("state", "")) if part)
            lines.append(f"| <a id=\"{name}\"></a>{number} | {what} | {row.get('tokens', '-')} | {' | '.join(seconds + memory)} |")
        lines.append("")
    return "\n".join(lines).strip() or "No row has been sent yet."


def nearest(trained, tokens):
    """Returns our row of all of Qwen3-8B's layers, of the same kind of training, whose length is nearest (0: any); of equal ones the fastest."""
    like = [row for _, each in rows() for row in each
            if row["options"].startswith("--init qwen3-8b ") and ("--lora-rank" in row["options"]) == ("lora" in trained)]
    return min(like, key=lambda row: (abs(math.log(row["tokens"] / (tokens or row["tokens"]))), -row["per_second"]))


def published():
    """Returns Markdown: speeds that others publish, each beside our nearest row."""
    lines = ["| who | what | card | tokens | tokens/s a GPU | MFU | ours, nearest | ahead | source, read |", "|---|---|---|---|---|---|---|---|---|"]
    for theirs in long_runs():
        if not theirs["tokens_per_second"] and not theirs["seconds"]:
            continue
        per_second = float(theirs["tokens_per_second"] or float(theirs["tokens"]) / float(theirs["seconds"]) / int(theirs["gpus"]))
        ours = nearest(theirs["trained"], int(theirs["tokens"] or 0))
        both = float(theirs["mfu"] or 0), ours["mfu"]
        ahead = "they" if (both[0] > both[1] if both[0] else per_second > ours["per_second"]) else "we"
        if ahead == "we" and not 1 / 4 <= int(theirs["tokens"] or 0) / ours["tokens"] <= 4:
            ahead = "lengths differ"
        what = f"{title(theirs['model'])}, {theirs['trained']} | {theirs['gpus']} {title(theirs['gpu'])} | {theirs['tokens'] or 'not stated'}"
        lines.append(f"| {theirs['system']} | {what} | {per_second:.0f} | {f'{100 * both[0]:.0f} %' if both[0] else ''} | [{ours['id']}](#{ours['id']}): {ours['tokens']} tokens, "
                     f"{ours['per_second']:.0f} tokens/s, {100 * both[1]:.0f} % | {ahead} | {theirs['source']}, {theirs['read']} |")
    return "\n".join(lines)
