#!/usr/bin/env python3
"""The tables of dev/results in README files: "what ran where" from test-*.json, which `make test-gpu` writes, and the measurements
beside others from compare-*.json, which are copies of what dev/compare/compare.py writes.

    results_table.py            prints the tables
    results_table.py --write    puts them where they are shown: in the README.md, here or one folder below, with the comments that name this script
    results_table.py --check    exit status 1 if others are shown

Needs the standard library only. A device without results is not left out: the text says that nothing has run there.
"""

import glob
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "dev", "compare"))
import report  # noqa: E402

END = "<!-- end -->"
NO_GPU = (
    "The GPU op set has been compiled and its kernels run on the CPU in the tests; it has not run on hardware yet."
)
KEYS = (
    "op_set", "device", "driver", "cuda", "libraries", "date", "commit", "passed", "failed", "skipped", "complete", "attention",
)
NOTHING_COMPARED_ON_A_GPU = "Nothing has been measured beside others on a GPU yet."
ATTENTION = {"cudnn": "; attention by cuDNN", "own": "; attention by our own kernels", "unknown": ""}


def read(kind, keys):
    """The objects of dev/results/KIND-*.json, each of which must have these keys."""
    found = []
    for path in sorted(glob.glob(os.path.join(ROOT, "dev", "results", f"{kind}-*.json"))):
        with open(path, encoding="utf-8") as file:
            try:
                result = json.load(file)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path}: {error}")
        missing = [key for key in keys if key not in result]
        if missing:
            raise SystemExit(f"{path}: has no {', '.join(missing)}")
        found.append(result)
    return found


def tests_table():
    """What ran where."""
    found = sorted(read("test", KEYS), key=lambda r: (r["op_set"], r["device"], r["date"]))
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


def compare_tables():
    """Ours beside others: GPUs first."""
    found = sorted(read("compare", report.KEYS), key=lambda r: (not r["on_gpu"], r["device_name"], r["shape"], r["date"]))
    lines = [] if any(run["on_gpu"] for run in found) else [NOTHING_COMPARED_ON_A_GPU]
    for run in found:
        lines += ([""] if lines else []) + report.markdown(run)
    return "\n".join(lines)


SECTIONS = {
    "<!-- scripts/results_table.py -->": tests_table,
    "<!-- scripts/results_table.py compare -->": compare_tables,
}


def pages():
    """The README files that hold the tables, by path from the root, with their texts."""
    found = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "README.md")) + glob.glob(os.path.join(ROOT, "*", "README.md"))):
        with open(path, encoding="utf-8") as file:
            found[os.path.relpath(path, ROOT)] = file.read()
    return found


def main():
    if sys.argv[1:] not in ([], ["--write"], ["--check"]):
        raise SystemExit(__doc__)
    before = pages()
    after = dict(before)
    for begin, make in SECTIONS.items():
        text = make()
        if not sys.argv[1:]:
            print(text)
            continue
        holders = [name for name, page in after.items() if page.count(begin + "\n") == 1 and END in page.split(begin)[1]]
        if len(holders) != 1:
            raise SystemExit(f"one README.md needs {begin} and, behind it, {END}; {len(holders)} have it")
        head, rest = after[holders[0]].split(begin + "\n")
        after[holders[0]] = f"{head}{begin}\n{text}\n{END}{rest.split(END, 1)[1]}"
    changed = [name for name in after if after[name] != before[name]]
    if sys.argv[1:] == ["--check"] and changed:
        print(f"{changed[0]}: its tables are not those of dev/results; scripts/results_table.py --write", file=sys.stderr)
        return 1
    for name in changed if sys.argv[1:] == ["--write"] else []:
        with open(os.path.join(ROOT, name), "w", encoding="utf-8") as file:
            file.write(after[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
