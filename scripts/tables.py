#!/usr/bin/env python3
"""Makes every generated table of the Markdown files, each between `<!-- table NAME -->` and `<!-- end -->`: plans and estimates by `train plan`, and
measurements in dev/results (test-*.json, which `make test-gpu` writes; compare-*.json, copies of what dev/compare/compare.py writes).

    tables.py [NAME...]            prints them; TRAIN=./train
    tables.py --write [NAME...]    puts them where they are shown
    tables.py --check [NAME...]    exit status 1 if the files show other tables, a recipe does not fit, a length is not reached, or a pass ran otherwise
    tables.py --check --quick      all but the pages of models, which take minutes

Needs the standard library only. A device without results is listed, too: the text says that nothing has run on it.
"""

import csv
import functools
import glob
import json
import os
import subprocess
import sys
import tempfile

import measured
import plan_lengths
import plan_lengths_mixed
import plan_methods
import plan_models
from log_export import end
from plan_lengths import ROOT, plan, tokens

sys.path.insert(0, os.path.join(ROOT, "dev", "compare"))
import report  # noqa: E402

END = "<!-- end -->\n"
ON_DEVICE = "--inputs device --inputs-every 1 --weights device --gradients device --optimizer device"
ANY_LENGTH = "max_position_embeddings=1000000000"
PAPER_CHUNKS = "--chunk 500 --logits-chunk 100"
faults = []  # for --check


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" if cells is not lines[1] else "|" + "|".join(cells) + "|" for cells in lines)


# ---- what fits a card ------------------------------------------------------------------------------------------------
FIT = {"Qwen3-0.6B": "qwen3-0.6b", "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b", "Qwen3-14B": "qwen3-14b", "Qwen3-32B": "qwen3-32b",
       "Llama-3.1-8B": "llama3.1-8b", "Qwen3.5-0.8B": "qwen3.5-0.8b", "Qwen3.5-4B": "qwen3.5-4b", "Qwen3.5-9B": "qwen3.5-9b",
       "Qwen3.5-, 3.6-, 3.8-27B": "qwen3.8-27b"}
CARDS = {"24 GB": "rtx4090", "80 GB": "a100", "141 GB": "h200"}
WAYS = {"all weights": "--moments bf16 --master none", "LoRA": "--lora-rank 32", "4 bits": "--base nf4 --lora-rank 32"}


def fit():
    heads = [""] + [f"{card}: {way}" if way == "all weights" else way for card in CARDS for way in WAYS]
    return markdown(heads, [[name] + [
        tokens(plan(f"--init {model},{ANY_LENGTH} --dtype bf16 --seq-len 1024 {ON_DEVICE} --memory-limit {card} {way}")["max_seq_len"])
        for card in CARDS.values() for way in WAYS.values()] for name, model in FIT.items()])


# ---- one card with host memory and a disk ----------------------------------------------------------------------------
SHORT = (1, 2, 6, 8, 9, 13, 19, 31)  # rows in README's table


@functools.cache
def lengths_rows():
    return plan_lengths.rows(plan_lengths.ROWS)


def lengths_of(name, table):
    heads = ["", "limits", "tokens", "reached", "longest", "not on the device", "GiB of device, host, disk", "s a step", "transfers add",
             "others, published"]
    rows, commands = [], []
    for number, row in enumerate(table, 1):
        rows.append([f"{number}{'. ' + row['what'] if row['what'] else ''}", row["limits"], row["tokens"], "yes" if row["reached"] else "NO",
                     row["longest"], row["places"], row["memory"], row["seconds"], row["waits"], "; ".join(row["others"])])
        commands.append(f"    ./train plan {row['options']}  # {number}")
    missed = sum(not row["reached"] for row in table)
    if missed:
        faults.append(f"{name}: {missed} are not reached")
    verdict = f"{missed} of {len(rows)} are NOT reached." if missed else "All are reached."
    return "\n".join([markdown(heads, rows), "", verdict + " The commands, row by row:", "", *commands])


def lengths():
    return lengths_of("lengths", lengths_rows())


def experts():
    return lengths_of("experts", plan_lengths.rows(plan_lengths.experts()))


def lengths_short():
    rows, what = [], ""
    for number, row in enumerate(lengths_rows(), 1):
        same, what = not row["what"], row["what"] or what
        if number in SHORT:
            rows.append(["the same" if same and rows and rows[-1][-1] == what else what, row["limits"], row["tokens"], row["seconds"], row["waits"].replace("0.0", "0"),
                         ",".join((row["others"] or [""])[0].split(",")[:2]), what])
    return markdown(["trained", "limits", "tokens", "s a step", "transfers add", "others, published"], [row[:-1] for row in rows])


# ---- recipes ---------------------------------------------------------------------------------------------------------
def recipes():
    with tempfile.TemporaryDirectory() as work:
        prompts = os.path.join(work, "prompts.bin")
        subprocess.run(f"{os.environ.get('CC', 'cc')} -D_GNU_SOURCE -I. test/data/make_documents.c -lm -o {work}/make && "
                       f"{work}/make {prompts} 96 4096 1 0 prompts", shell=True, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        made = subprocess.run(["scripts/recipes/plans.sh", *(["--write"] if "--write" in sys.argv else [])], cwd=ROOT, capture_output=True,
                              text=True, env={**os.environ, "TRAIN": os.path.join(ROOT, plan_lengths.TRAIN), "PROMPTS": prompts})
    faults.extend(made.stderr.splitlines())
    return made.stdout.strip()


# ---- compared with the paper (arXiv 2506.03077) -----------------------------------------------------------------------------
def paper_rows(table):
    with open(os.path.join(ROOT, "scripts", "paper", "tables.csv"), newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(line for line in file if not line.startswith("#")) if row["table"] == table]


def name_of(model):
    return model.replace("qwen", "Qwen").replace("b", "B")


RUNS = {"sft full": "SFT all weights", "sft lora": "SFT LoRA", "dpo lora": "DPO LoRA", "grpo lora": "GRPO LoRA"}


@functools.cache
def longest():
    """Returns {(model, run): (longest trained by our defaults as --seq-len reads it, longest pass in the paper's chunks, the paper's pass)}, from paper_max_length.sh."""
    made = subprocess.run(["scripts/paper_max_length.sh"], cwd=ROOT, capture_output=True, text=True, check=True,
                          env={**os.environ, "TRAIN": os.path.join(ROOT, plan_lengths.TRAIN), "LIMIT": CARDS["80 GB"]})
    rows = [line.replace("|", " ").split() for line in made.stdout.splitlines() if line.startswith("Qwen3-")]
    return {(row[0], f"{row[1]} {row[2]}".lower()): (tokens(int(1000 * float(row[4]) - 50)), row[8], row[7]) for row in rows}


def trained():
    models = dict.fromkeys(model for model, _ in longest())
    return markdown(["trained", *RUNS.values()], [[model] + [longest().get((model, run), ("",))[0] for run in RUNS] for model in models])


def passes():
    models = dict.fromkeys(model for model, _ in longest())
    heads = ["one pass, not training"] + [head for run in RUNS.values() for head in (f"{run}: plan", "paper")]
    return markdown(heads, [[model] + [cell for run in RUNS for cell in longest().get((model, run), ("", "", ""))[1:]] for model in models])


def methods():
    heads = ["one pass, not training"] + [head for method in ("full", "checkpoint", "stream") for head in (f"`{method}`: plan", "paper")]
    rows = []
    for row in paper_rows("fig3_max_len"):
        if row["setting"] == "bp":
            rows.append([name_of(row["model"])])
            for method in ("full", "checkpoint", "stream"):
                chunks = PAPER_CHUNKS if method == "stream" else ""
                made = plan(f"--init {row['model']},{ANY_LENGTH} --method {method} --for bp --dtype bf16 --seq-len 1024 {ON_DEVICE} "
                            f"--memory-limit {CARDS['80 GB']} {chunks}")
                rows[-1] += [f"{made['max_seq_len'] / 1000:.1f}", row[method]]
    return markdown(heads, rows)


# ---- many GPUs, as scripts/plan_scale.sh has them --------------------------------------------------------------------
def scale():
    rows = []
    for ranks in 8, 64, 512, 4096:
        options = (f"--init qwen3-8b,{ANY_LENGTH} --ranks {ranks} --sp {ranks} --zero 3 --dtype bf16 --machine h100 --chunk 4096 "
                   f"--logits-chunk 2048 --memory-limit h100 {ON_DEVICE} --seq-len")
        found = [plan(f"{options} 1024 --grad-dtype bf16 --kv {kv}")["max_seq_len"] for kv in ("gather", "ring")]
        step = plan(f"{options} {-(-1000000 // (2 * ranks)) * 2 * ranks}")
        rows.append([str(ranks), *(tokens(n) for n in found), f"{step['estimated_seconds']:.3g} s", f"{100 * step['estimated_mfu']:.0f} %"])
    return markdown(["H100", "Qwen3-8B, longest, planned: gathered", "passed around", "a million tokens, estimated", "MFU, estimated"], rows)


# ---- dev/results -----------------------------------------------------------------------------------------------------
NO_GPU = "`make test-gpu` has not been recorded on a GPU yet; its kernels run on the CPU in `make test`."
KEYS = (
    "op_set", "device", "driver", "cuda", "libraries", "date", "commit", "passed", "failed", "skipped", "complete", "attention",
)
NOTHING_COMPARED_ON_A_GPU = "Nothing has been measured beside others on a GPU yet."
ATTENTION = {"cudnn": "; attention by cuDNN", "own": "; attention by our own kernels", "unknown": ""}


def read(kind, keys):
    """Returns the objects of dev/results/KIND-*.json, each of which must have these keys."""
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


def tests():
    """Prints which tests ran on which device."""
    found = sorted(read("test", KEYS), key=lambda r: (r["op_set"], r["device"], r["date"]))
    lines = []
    if found:
        lines += ["| op set | device | driver, CUDA, libraries | date | commit | tests |", "|---|---|---|---|---|---|"]
    for r in found:
        done = f"{r['passed']} passed, {r['failed']} failed, {r['skipped']} skipped{'' if r['complete'] else '; incomplete: parts have not run'}"
        where = f"{r['driver']}, {r['cuda']}, {r['libraries']}{ATTENTION[r['attention']]}"
        lines.append(f"| `{r['op_set']}` | {r['device']} | {where} | {r['date']} | {r['commit']} | {done} |")
    if not any(r["op_set"] == "cuda" for r in found):
        lines += ([""] if lines else []) + [NO_GPU]
    return "\n".join(lines)


def compared():
    """Returns the runs of dev/compare, GPUs first."""
    return sorted(read("compare", report.KEYS), key=lambda r: (not r["on_gpu"], r["device_name"], r["shape"], r["date"]))


def compare():
    """Prints our measurements next to others'."""
    lines = [] if any(run["on_gpu"] for run in compared()) else [NOTHING_COMPARED_ON_A_GPU]
    for run in compared():
        lines += ([""] if lines else []) + report.markdown(run)
    return "\n".join(lines)


CONTENDERS = {"hf": "transformers with gradient checkpointing", "hf-chunked": "the same, with the loss in chunks",
              "paper": "the paper's PyTorch code", "checkpoint": "our own gradient checkpointing (`--method checkpoint`)"}


def compare_short():
    """Prints README's rows of a run on a CPU: ratios to `stream` at the run's shortest and longest length."""
    run = next(run for run in compared() if not run["on_gpu"])
    rows = {(row["contender"], row["seq_len"]): row for row in run["rows"]}
    every = sorted({T for _, T in rows})
    shown = every[:1] + every[1:][-1:]
    heads = ["one pass"] + [f"{what}, T = {report.tokens(T)}" for what in ("time over ours", "memory over ours") for T in shown]
    return markdown(heads, [[name] + [f"{rows[contender, T][ratio]:.2f}" for ratio in ("time_ratio", "memory_ratio") for T in shown]
                            for contender, name in CONTENDERS.items()])


TABLES = {"fit": fit, "lengths-short": lengths_short, "compare-short": compare_short, "lengths": lengths, "experts": experts,
          "recipes": recipes, "trained": trained, "passes": passes, "methods": methods, "further": plan_methods.table, "scale": scale,
          "mixed": plan_lengths_mixed.table, "compare": compare, "tests": tests, "passes-measured": lambda: measured.passes(faults),
          "ops-measured": measured.ops, "reports": measured.reports, "published": measured.published}
PAGES = {**{name: functools.partial(plan_models.page, name) for name in plan_models.MODELS}, "models": plan_models.index}
QUICK = list(TABLES)
TABLES.update(PAGES)


def main():
    mode = sys.argv[1] if sys.argv[1:2] in (["--write"], ["--check"]) else ""
    names = sys.argv[1 + bool(mode) :] or list(TABLES)
    names = QUICK if names == ["--quick"] else names
    if not set(names) <= set(TABLES):
        raise SystemExit(f"{__doc__}\nNames: {', '.join(TABLES)}")
    pages = {}
    for path in glob.glob(os.path.join(ROOT, "**", "*.md"), recursive=True):
        with open(path, encoding="utf-8") as file:
            pages[os.path.relpath(path, ROOT)] = file.read()
    before = dict(pages)
    for name in names:
        text, begin = TABLES[name](), f"<!-- table {name} -->\n"
        if not mode:
            print(f"{begin}{text}\n{END}")
            continue
        holders = [path for path, page in pages.items() if page.count(begin) == 1 and END in page.split(begin)[1]]
        if len(holders) != 1:
            raise SystemExit(f"one Markdown file needs {begin.strip()} and, after it, {END.strip()}; {len(holders)} have it")
        head, rest = pages[holders[0]].split(begin)
        pages[holders[0]] = f"{head}{begin}{text}\n{END}{rest.split(END, 1)[1]}"
        if pages[holders[0]] != before[holders[0]]:
            faults.append(f"{holders[0]}: table {name} is out of date; scripts/tables.py --write")
            if mode == "--write":
                faults.pop()
                with open(os.path.join(ROOT, holders[0]), "w", encoding="utf-8") as file:
                    file.write(pages[holders[0]])
            before[holders[0]] = pages[holders[0]]
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    end(main)
