#!/usr/bin/env python3
"""README's table "what ran where", from dev/results/test-*.json, which `make test-gpu` writes.

    results_table.py            prints the table
    results_table.py --write    puts it into README.md, between the two comments that name this script
    results_table.py --check    exit status 1 if README.md has another one

Needs the standard library only. A device without results is not left out: the text says that nothing has run there.
"""

import glob
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "<!-- scripts/results_table.py -->", "<!-- end -->"
NO_GPU = (
    "The GPU op set has been compiled and its kernels run on the CPU in the tests; it has not run on hardware yet."
)
KEYS = (
    "op_set", "device", "driver", "cuda", "libraries", "date", "commit", "passed", "failed", "skipped", "complete", "attention",
)
ATTENTION = {"cudnn": "; attention by cuDNN", "own": "; attention by our own kernels", "unknown": ""}


def results():
    found = []
    for path in sorted(glob.glob(os.path.join(ROOT, "dev", "results", "test-*.json"))):
        with open(path, encoding="utf-8") as file:
            try:
                result = json.load(file)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path}: {error}")
        missing = [key for key in KEYS if key not in result]
        if missing:
            raise SystemExit(f"{path}: has no {', '.join(missing)}")
        found.append(result)
    return sorted(found, key=lambda r: (r["op_set"], r["device"], r["date"]))


def table(found):
    lines = []
    if found:
        lines += ["| op set | device | driver, CUDA, libraries | date | commit | tests |", "|---|---|---|---|---|---|"]
    for r in found:
        tests = f"{r['passed']} passed, {r['failed']} failed, {r['skipped']} skipped{'' if r['complete'] else '; incomplete: parts have not run'}"
        where = f"{r['driver']}, {r['cuda']}, {r['libraries']}{ATTENTION[r['attention']]}"
        lines.append(f"| `{r['op_set']}` | {r['device']} | {where} | {r['date']} | {r['commit']} | {tests} |")
    if not any(r["op_set"] == "cuda" for r in found):
        lines += ([""] if lines else []) + [NO_GPU]
    return "\n".join(lines)


def main():
    if sys.argv[1:] not in ([], ["--write"], ["--check"]):
        raise SystemExit(__doc__)
    text = table(results())
    if not sys.argv[1:]:
        print(text)
        return 0
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as file:
        readme = file.read()
    if readme.count(BEGIN) != 1 or END not in readme.split(BEGIN)[1]:
        raise SystemExit(f"README.md: needs {BEGIN} and, behind it, {END}")
    before, rest = readme.split(BEGIN)
    wanted = f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"
    if sys.argv[1] == "--check":
        if readme != wanted:
            print("README.md: the table of what ran where is not that of dev/results; scripts/results_table.py --write", file=sys.stderr)
        return int(readme != wanted)
    with open(path, "w", encoding="utf-8") as file:
        file.write(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
