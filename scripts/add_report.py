#!/usr/bin/env python3
"""add_report.py FILE...: checks records of a machine and copies them to dev/results, for the tables. FILE: the line that `train doctor --report` prints
(- reads it from standard input), or a queue-, passes-, ops- or test-*.json of scripts/gpu_queue.sh. RESULTS [dev/results]: another folder."""

import datetime
import glob
import json
import math
import os
import re
import sys

from log_export import end

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Wrong(Exception):
    pass


def text(pattern=r"[ -~]{0,2500}"):
    return lambda x: isinstance(x, str) and bool(re.fullmatch(pattern, x))


def number(least, most, kind=(int, float)):
    return lambda x: isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x) and least <= x <= most


def maybe(check):
    return lambda x: x is None or check(x)


def words(*allowed):
    return lambda x: x in allowed and isinstance(x, type(allowed[0]))


def date(x):
    try:
        return "2026-01-01" <= x and datetime.date.fromisoformat(x) <= datetime.datetime.now(datetime.timezone.utc).date() + datetime.timedelta(1)
    except (TypeError, ValueError):
        return False


SECONDS, BYTES, REAL, FLAG = number(1e-9, 1e7), number(0, 1e14, int), number(-1e9, 1e9), words(True, False)
NAME = text(r"[A-Za-z0-9][A-Za-z0-9 ().,@/+_-]{1,100}")  # of a device: dev/results names files by it
COMMIT = text(r"(unknown|[0-9a-f]{4,40})(-dirty|-modified)?")
HEAD = {"device_name": NAME, "on_gpu": FLAG, "driver": text(r"[0-9.]{1,20}|none|unknown"), "libraries": text(r"[A-Za-z0-9 .,]{0,120}"), "date": date, "commit": COMMIT,
        "command": text()}
KIT = {"device": NAME, "machine": text(r"[a-z0-9-]{0,20}")}  # --machine's name, or none
MEASURED = {"seconds": SECONDS, "planned_seconds": maybe(SECONDS), "tokens": number(1, 1e10, int)}
MEMORY = {"plan_bytes": BYTES, "peak_bytes": BYTES, "loss": REAL, "grad_norm": maybe(REAL)}
OP = {"op": text(), "of": text(), "ms": number(1e-6, 1e6)}
PROGRAM = {"program": text(), "precision": text(), "passed": BYTES, "failed": BYTES, "skipped": BYTES}
# Kind: fields; fields that may be absent; the name of its list; fields of an element; those that may be absent
KINDS = {
    "report": (HEAD | {"op_set": words("cpu", "cuda"), "dtype": words("fp32", "bf16", "double"), "version": text(r"[0-9a-z.+-]{1,20}"), "right": FLAG,
                       "wrong": list, "rates": {}}, {}, "rows",
               MEASURED | MEMORY | {"options": text(), "chunk": number(1, 1e9, int), "attention": words("cudnn", "own")}, {}),
    "queue": (HEAD | KIT, {}, "rows", MEASURED | {"what": text(), "state": words("ok", "WRONG", "-"), "expected": text(), "found": text(),
                                                               "environment": text(r"[A-Z_0-9= ]*"), "command": text()},
              MEMORY | {"rollout_seconds": maybe(SECONDS)}),
    "passes": (HEAD | KIT | {"what": text(), "memory_limit": maybe(BYTES)}, {}, "passes",
               MEASURED | MEMORY | {"options": text(), "passes": number(1, 1e6, int), "warmup_seconds": maybe(SECONDS), "attention_workspace": maybe(BYTES)},
               {}),
    "ops": (HEAD | KIT | dict.fromkeys(["what", "dtype", "compute_capability", "cuda"], text()) | dict.fromkeys(
        ["copy_gb_per_s", "product_tflop_per_s"], number(0, 1e6)), dict.fromkeys(["repeats", "cublaslt", "memory_bytes"], BYTES) | {"cuda_of_driver": text()},
            "ops", OP, dict.fromkeys(["rows", "in", "out", "gb_per_s", "tflop_per_s", "share_of_copy", "share_of_product"], number(0, 1e12))),
    "test": ({key: HEAD[key] for key in ("driver", "libraries", "date", "commit")} | {
        "device": NAME, "op_set": words("cpu", "cuda"), "cuda": text(), "sources": text(), "passed": BYTES, "failed": BYTES, "skipped": BYTES,
        "complete": FLAG, "attention": words("cudnn", "own", "unknown")}, {}, "programs", PROGRAM, {"cudnn_calls": BYTES}),
}


def check(value, where, needed, allowed):
    if not isinstance(value, dict):
        raise Wrong(f"{where} is no object")
    for problem, keys in ("lacks", needed.keys() - value.keys()), ("has the unknown field", value.keys() - needed.keys() - allowed.keys()):
        if keys:
            raise Wrong(f"{where} {problem} {', '.join(sorted(keys))}"[:150])
    for key, test in {**needed, **allowed}.items():
        if key not in value:
            continue
        if test is list:
            fine = isinstance(value[key], list) and all(map(text(r"[ -~]{1,64}"), value[key]))
        elif isinstance(test, dict):
            fine = isinstance(value[key], dict) and all(text(r"[ -~]{1,64}")(name) and number(0, 1e18)(rate) for name, rate in value[key].items())
        else:
            fine = test(value[key])
        if not fine:
            raise Wrong(f"{where}: {key} cannot be {json.dumps(value[key])[:60]}")


def unique(pairs):
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def read(path):
    with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
        content = file.read(4 << 20)
    try:
        return content, json.loads(content, object_pairs_hook=unique, parse_constant=float)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"it is no JSON: {error}; paste the whole line")


def add(path, results):
    content, record = read(path)
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in KINDS:
        raise Wrong(f"its kind is none of {', '.join(KINDS)}; take the output of `train doctor --report` or a file of scripts/gpu_queue.sh")
    needed, allowed, rows, of_row, maybe_of_row = KINDS[kind]
    check(record, "the record", needed | {"kind": words(kind), rows: lambda x: isinstance(x, list) and len(x) < 1000}, allowed)
    for i, row in enumerate(record[rows], 1):
        check(row, f"{rows} {i}", of_row, maybe_of_row)
        if kind == "ops" and not row.keys() & {"gb_per_s", "tflop_per_s"}:
            raise Wrong(f"ops {i} has no rate")
    device = re.sub("[^a-z0-9]+", "-", record.get("device_name", record.get("device")).lower()).strip("-")
    for other in glob.glob(os.path.join(results, f"{kind}-{device}-*.json")):
        with open(other, encoding="utf-8") as file:
            if json.load(file) == record:
                raise Wrong(f"{other} holds it already")
    names = (os.path.join(results, f"{kind}-{device}-{record['date']}{suffix}.json") for suffix in ["", *(f"-{n}" for n in range(2, 1000))])
    name = next(name for name in names if not os.path.exists(name))
    with open(name, "x", encoding="utf-8") as file:
        file.write(content.strip() + "\n")
    print(name)


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("--"):
        raise SystemExit(__doc__)
    for path in sys.argv[1:]:
        try:
            add(path, os.environ.get("RESULTS", os.path.join(ROOT, "dev", "results")))
        except Wrong as wrong:
            raise SystemExit(f"add_report.py: {path}: {wrong}")


if __name__ == "__main__":
    end(main)
