#!/usr/bin/env python3
"""Compares `./train bp` with other implementations on one model, with the same weights, tokens and lengths, and checks that they agree.

    dev/compare/compare.py --init qwen3-0.6b,num_hidden_layers=2 --seq-lens 1k,2k,4k --python venv/bin/python

README.md in this folder says who can take part, what is measured, and how to set the Pythons up. Writes compare.md,
compare.csv, compare.json and compare.png below --out. Exit status 1 where something failed, or where a loss or gradient
is not that of `stream` within rounding.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import contenders
import machine
import report
import runs
from contenders import HERE, ROOT
from runs import say

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def usage(text):
    raise SystemExit(f"compare.py: {text}")  # to stderr, exit status 1


def number(text, what="a number"):
    """Parses 4096, 4k = 4096, 80GiB."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.strip().lower())
    if not match or match[2] not in UNITS or int(match[1]) == 0:
        usage(f"'{text}' is not {what}, such as 4096, 4k or 80GiB")
    return int(match[1]) * UNITS[match[2]]


def memory(text, train):
    """Parses 80GiB, or a card such as h100: the memory that it leaves to a program."""
    words = [train, "plan", "--init", "gpt2", "--memory-limit", text, "--json", "--quiet"]
    card = text[0].isalpha() and subprocess.run(words, capture_output=True, text=True)
    return json.loads(card.stdout)["usable_bytes"] if card and not card.returncode else number(text, "an amount of memory")


def chunk(text):
    if not re.fullmatch(r"[1-9]\d*|T/[1-9]\d*", text):
        usage(f"--chunk: '{text}' is not a number of tokens, nor a part of the length such as T/3")
    return text


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--init", help="shape of a random model, as ./train's --init")
    model.add_argument("--model", help="Hugging Face folder instead")
    parser.add_argument("--seed", type=int, default=42, help="of weights and tokens")
    parser.add_argument("--seq-lens", default="1k,2k,4k", help="tokens of a sequence: 2k (= 2048), 6000, ...")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--contenders", help="names separated by commas; `stream` always takes part (--list names them)"
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more: a program that takes the arguments of README.md",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where nvidia-smi names a GPU")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--rounds", type=int, default=1, help="contenders take turns in each")
    parser.add_argument(
        "--repeat", type=int, default=3, help="passes of a process; the first of several warms up and does not count"
    )
    parser.add_argument(
        "--chunk", type=chunk, help="tokens of a chunk, of those that have chunks: N, or T/N of the length"
    )
    parser.add_argument("--logits-chunk", type=int)
    parser.add_argument("--chunks", default="", help="ours once more with each of these chunks")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--memory-limit", help="such as 80GiB, or a card as h100: ours by its plan, the others by PyTorch's allocator")
    parser.add_argument(
        "--longest", action="store_true", help="also the longest length that each holds within --memory-limit"
    )
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the device; else from its name, else measured")
    parser.add_argument("--train", help="our program [build/DEVICE-DTYPE/train, or ./train]")
    parser.add_argument("--python", default="python3", help="one with torch and transformers, for hf and hf-chunked")
    parser.add_argument("--paper", help="checkout of the paper's code")
    parser.add_argument("--paper-python", help="one with torch and transformers 4.51.3 [--python]")
    parser.add_argument("--llmc", help="checkout of llm.c")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a process may take")
    parser.add_argument("--out", default="build/compare")
    parser.add_argument("--resume", action="store_true", help="keep results of the same run that lie in --out")
    parser.add_argument("--no-picture", action="store_true", help="leave compare.png out")
    parser.add_argument("--list", action="store_true", help="who can take part here")
    return parser.parse_args()


PLACES = {
    "--train": "TRAIN",
    "--python": "PYTHON",
    "--paper": "STREAMBP",
    "--paper-python": "PAPER_PYTHON",
    "--llmc": "LLMC",
    "--model": "MODEL",
    "--contender": "COMMAND",
}


def command_line(words):
    """Returns the command line for the results, without this machine's folders."""
    told, words = [], iter(words)
    for word in words:
        name, equals, _value = word.partition("=")
        if name in PLACES or name == "--out":
            told += [name, PLACES[name]] if name in PLACES else []
            if not equals:
                next(words, None)
        elif name not in ("--resume", "--no-picture"):
            told.append(word)
    return shlex.join(["dev/compare/compare.py", *told])


def settle(o):
    """Resolves words to numbers and defaults to values; refuses impossible options."""
    o.seq_lens = sorted({number(text, "a length") for text in o.seq_lens.split(",")})
    o.chunks = [chunk(text) for text in o.chunks.split(",") if text]
    o.commands = dict(
        text.split("=", 1) if "=" in text else usage(f"--contender: '{text}' is not NAME=COMMAND")
        for text in o.contender
    )
    for name in ("batch", "rounds", "repeat"):
        if getattr(o, name) < 1:
            usage(f"--{name}: {getattr(o, name)} is less than 1")
    if o.longest and not o.memory_limit:
        usage("--longest is of a --memory-limit: name it, such as h100 or 80GiB")
    if o.longest and any(text.startswith("T/") for text in [o.chunk or "", *o.chunks]):
        usage("--longest needs chunks in tokens: a fraction of the length changes during the search")
    names = o.contenders.split(",") if o.contenders else [*contenders.DEFAULT, *o.commands]
    for name in names:
        if name not in contenders.WHAT and name not in o.commands:
            usage(f"--contenders: there is no '{name}'; there are {', '.join([*contenders.WHAT, *o.commands])}")
    o.contenders = list(dict.fromkeys(["stream", *names, *o.commands]))
    gpu = machine.ask_gpu("name")
    o.device = o.device or ("cuda" if gpu else "cpu")
    if o.device == "cuda" and not gpu:
        usage("--device cuda: nvidia-smi names no GPU here")
    o.on_gpu = o.device == "cuda"
    o.dtype = o.dtype or ("bf16" if o.on_gpu else "fp32")
    o.device_name = gpu if o.on_gpu else machine.cpu_name()
    built = os.path.join(ROOT, "build", f"{o.device}-{o.dtype}", "train")
    o.train = os.path.abspath(o.train) if o.train else built if os.path.exists(built) else os.path.join(ROOT, "train")
    if not os.access(o.train, os.X_OK):
        usage(f"there is no {o.train}; run make first, or name our program with --train")
    o.memory_limit = memory(o.memory_limit, o.train) if o.memory_limit else None
    for name in ("paper", "llmc", "out", "model"):  # contenders are started in the project's folder
        setattr(o, name, getattr(o, name) and os.path.abspath(getattr(o, name)))
    for name in ("python", "paper_python"):
        path = getattr(o, name)
        setattr(o, name, shutil.which(path) or path if path else path)


def provide_model(o):
    """Returns the folder that all contenders load; random weights are written once and reused."""
    if not o.model:
        o.init = o.init or "qwen3-0.6b,num_hidden_layers=2,vocab_size=32000"
        folder, written = os.path.join(o.out, "model"), os.path.join(o.out, "model.json")
        wanted = {"init": o.init, "seed": o.seed, "dtype": o.dtype}
        there = json.load(open(written, encoding="utf-8")) if os.path.exists(written) else None
        if there != wanted:
            if there:
                os.remove(written)
                shutil.rmtree(folder, ignore_errors=True)
            what = ["--init", o.init, "--seed", str(o.seed), "--dtype", o.dtype, "--out", folder, "--quiet"]
            made = subprocess.run([o.train, "convert", *what], capture_output=True, text=True)
            if made.returncode != 0:
                usage(contenders.last_line(made.stderr))
            runs.write_json(written, wanted)
        o.model_folder, o.model_key, o.shape = folder, wanted, o.init
    else:
        o.model_folder, o.model_key, o.shape = o.model, os.path.basename(o.model), os.path.basename(o.model)
    try:
        with open(os.path.join(o.model_folder, "config.json"), encoding="utf-8") as file:
            o.config = json.load(file)
    except OSError as error:
        usage(f"{o.model_folder}: config.json: {error.strerror}; --model is a Hugging Face folder")
    o.model_type = o.config["model_type"]
    o.tokens_file = os.path.join(o.out, f"tokens-{o.seed}-{o.config['vocab_size']}.bin")
    longest = o.config.get("n_positions")
    if longest and o.seq_lens[-1] > longest:
        usage(f"--seq-lens: {o.seq_lens[-1]} is more than the {longest} positions that this model has learned")


def choose(o):
    """Returns the available contenders, and {name: reason} of the others."""
    found, left_out = [], {}
    for contender in [contenders.make(name, o) for name in o.contenders] + contenders.sweep(o):
        why = contender.missing()
        if why:
            left_out[contender.name] = why
        else:
            found.append(contender)
    return found, left_out


def draw(o, csv_path):
    """Draws the picture with a Python that has matplotlib, or prints a note."""
    for python in dict.fromkeys([os.environ.get("PYTHON") or sys.executable, "python3", "/usr/bin/python3", o.python]):
        try:
            if subprocess.run([python, "-c", "import matplotlib"], capture_output=True).returncode == 0:
                picture = os.path.join(o.out, "compare.png")
                caption = f"{o.shape}, {o.dtype}, batch {o.batch}; {o.device_name}"
                plot = os.path.join(ROOT, "scripts", "plot.py")
                subprocess.run([python, plot, "compare", "--in", csv_path, "--out", picture, "--caption", caption])
                return
        except OSError:
            pass
    say(
        "No picture: no Python with matplotlib here. Install it (Debian, Ubuntu: apt-get install python3-matplotlib), "
        "then repeat with --resume."
    )


def finish(o, records, longest, left_out):
    """Writes all results; returns the exit status."""
    peak, peak_from = machine.peak(o)
    names = list(dict.fromkeys(r["contender"] for r in records))
    names.sort(key=lambda name: o.order.index(name))
    rows = report.rows_of(records, names, o.seq_lens, o.batch, o.dtype, peak, o.on_gpu)
    longest = report.longest_ratios(longest) if longest else []
    versions = {r["contender"]: r["result"]["versions"] for r in records if r["result"].get("versions")}
    run = {
        "kind": "compare",
        "shape": o.shape,
        "device": o.device,
        "device_name": o.device_name,
        "on_gpu": o.on_gpu,
        "dtype": o.dtype,
        "batch": o.batch,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": machine.commit(),
        "driver": machine.ask_gpu("driver_version") if o.on_gpu else "",
        "clocks_most_mhz": machine.ask_gpu("clocks.max.sm,clocks.max.mem") if o.on_gpu else None,
        "power_limit_w": machine.ask_gpu("power.limit") if o.on_gpu else None,
        "command": o.command,
        "versions": versions,
        "memory_limit": o.memory_limit,
        "peak_tflops": peak,
        "peak_from": peak_from,
        "tolerances": report.TOLERANCES[o.dtype],
        "left_out": left_out,
        "rows": rows,
        "longest": longest,
        "records": records,
    }
    text = "\n".join(report.markdown(run)) + "\n"
    path = os.path.join(o.out, "compare")
    runs.write_json(path + ".json", run)
    report.write_csv(path + ".csv", rows, report.COLUMNS)
    if longest:
        report.write_csv(os.path.join(o.out, "longest.csv"), longest, report.LONGEST_COLUMNS)
    with open(path + ".md", "w", encoding="utf-8") as file:
        file.write(text)
    print(text, end="")
    if not o.no_picture:
        draw(o, path + ".csv")
    failed = report.failures(rows, longest)
    for line in failed:
        say(f"FAILED: {line}")
    return 1 if failed else 0


def main():
    o = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    o.command = command_line(sys.argv[1:])
    settle(o)
    try:
        os.makedirs(o.out, exist_ok=True)
    except OSError as error:
        usage(f"--out {o.out}: {error.strerror}")
    provide_model(o)
    found, left_out = choose(o)
    if o.list:
        for name in [*contenders.WHAT, *o.commands]:
            why = contenders.make(name, o).missing()
            print(
                f"{name:12} {contenders.WHAT.get(name, 'yours: ' + o.commands.get(name, ''))}: {why or 'can take part'}"
            )
        return 0
    for name, why in left_out.items():
        say(f"without {name}: {why}")
    o.order = [contender.name for contender in found]
    runner = runs.Runner(o, found)
    error = runner.reference()
    if error:
        usage(f"stream, T = {o.seq_lens[0]}: {error}; nothing can be held against it")
    records = runner.rounds()
    return finish(o, records, runner.longest() if o.longest else None, left_out)


if __name__ == "__main__":
    sys.exit(main())
