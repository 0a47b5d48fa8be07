"""Draws the pictures of this project. A kind of picture is a function below; its docstring says what its file holds.

    plot.py log --out run.png [--mean 20] [--level 3.21 --level-name "unigram entropy"] [--stages] RUN/log.jsonl...
    plot.py curve|memory|scale|lengths|methods|compare --in points.csv --out picture.png [--caption TEXT]
    plot.py KIND --help     what it draws, and its other options
"""

import argparse
import csv
import itertools
import json
import math
import os
import textwrap

import matplotlib
from plan_lengths import tokens as decimal

matplotlib.use("Agg")  # draws files, needs no display
import matplotlib.pyplot as plt

# ---- how every picture looks --------------------------------------------------------------------------------------------------
# One colour per method, and per program of others that it is compared with, the same in every picture; told apart in grey too.
COLOURS = {"full": "#c0504d", "checkpoint": "#b9770e", "stream": "#1f6fb4", "mst": "#d98cb3", "seco": "#1f7a6d", "spaco": "#7fcdbb",
           "stream-keep": "#5aa9dd", "hf": "#7a5195", "hf-chunked": "#b07cc6", "paper": "#4f9a5c", "llmc": "#333333"}
GREY = "#555555"

# A README shows a picture about 900 pixels wide. At 220 dots per inch it then has two dots to a pixel, and 9 points are 14 pixels.
WIDTH = 7.6  # inches, at most
LINE = 11  # points between two labels
GIB = 2**30

plt.rcParams.update({
    "savefig.dpi": 220,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.linewidth": 1.6,
})


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def series_of(path, key, point):
    """{key(row): [point(row), ...]}, everything in the file's order."""
    found = {}
    for row in rows_of(path):
        found.setdefault(key(row), []).append(point(row))
    return found


def number(text):
    return float(text) if text else None


def plain(n, _position=None):
    return f"{n:g}"


def tokens(n, _position=None):
    """8192 -> 8k, 262144 -> 256k, 110000 -> 110k: powers of two in binary thousands, everything else in decimal ones."""
    unit = 1024 if n % 1024 == 0 else 1000
    return f"{n:g}" if n < unit else f"{n / unit:g}k" if n < unit * unit else f"{n / unit / unit:g}M"


def size(n, _position=None):
    """Bytes with a binary unit: 1610612736 -> 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.3g} {unit}"
        n /= 1024


def label(axes, labels):
    """Words at the ends of lines, [(point, text, colour)], pushed up where they would overlap."""
    below = float("-inf")
    for point, text, colour in sorted(labels, key=lambda entry: entry[0][1]):
        at = axes.transData.transform(point)[1] * 72 / axes.figure.dpi
        below = max(at, below + LINE)
        axes.annotate(text, point, xytext=(6, below - at), textcoords="offset points", va="center", color=colour,
                      annotation_clip=False)


def caption(figure, text):
    """Small print below a picture, in lines that are as wide."""
    columns = int(17 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, columns) for line in text.replace("\\n", "\n").split("\n"))
    figure.text(0.01, 0.0, text, ha="left", va="top", fontsize=8.5, color=GREY, linespacing=1.4)


# ---- log ----------------------------------------------------------------------------------------------------------------------
METRICS = {  # of log.jsonl, in the order of the panels; validations have val_ before the name
    "reward": "mean reward",
    "loss": "loss",
    "rewards/accuracies": "pairs ranked right, share",
    "rewards/margins": "reward: chosen - rejected",
    "kl": "KL from reference, nats",
    "clip_ratio/region_mean": "clipped share",
    "entropy": "entropy, nats per token",
    "completions/mean_length": "tokens of a completion",
}
BEFORE = {"clip_fraction": "clip_ratio/region_mean", "completion_length": "completions/mean_length"}  # names of older logs
SHARES = ("rewards/accuracies", "clip_ratio/region_mean")  # drawn from 0
ROUNDING = 1e-6  # below it a value is zero


def read(path):
    """({metric: ([(step, value)], [(step, value of a validation)])}, options, {step: tokens up to it}) of one log."""
    found, said, trained = {}, {}, {0: 0}
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = {BEFORE.get(key, key): value for key, value in json.loads(line).items()}
            said = record.get("options", said)
            if "tokens" in record:
                trained[record["step"]] = trained.get(record["step"] - 1, 0) + record["tokens"]
            for metric in METRICS:
                for which, key in enumerate((metric, "val_" + metric)):
                    if record.get(key) is not None:
                        found.setdefault(metric, ([], []))[which].append((record["step"], record[key]))
    if not found:
        raise SystemExit(f"{path}: holds no step and no validation")
    return found, said, trained


def follow(runs):
    """The runs of --stages with tokens in place of steps, each after the one before; [(begin in tokens, its --seq-len)]."""
    moved, begins, begin = [], [], 0
    for name, found, said, trained in runs:
        at = {metric: tuple([(begin + trained[step], value) for step, value in points] for points in series)
              for metric, series in found.items()}
        moved.append((name, at, said, trained))
        begins.append((begin, said.get("seq_len")))
        begin += max(trained.values())
    return moved, begins


def name_of(path):
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def is_zero(series):
    return all(abs(value) < ROUNDING for points in series for _, value in points)


def means(points, count):
    """The mean of the `count` points around each: as many before as after it, fewer where there are no more."""
    values = [value for _, value in points]
    sides = [min(i, len(values) - 1 - i, count // 2) for i in range(len(values))]
    return [(step, sum(values[i - k:i + k + 1]) / (2 * k + 1)) for i, ((step, _), k) in enumerate(zip(points, sides))]


def log_lines(axes, steps, validations, colour, mean):
    """One run's lines in one panel; returns the point that its label stands at, and what that is."""
    if steps:
        axes.plot(*zip(*steps), color=colour, linewidth=1.0, alpha=0.3 if mean else 0.8)
    if mean and steps:
        steps = means(steps, mean)
        axes.plot(*zip(*steps), color=colour)
    if validations:
        axes.plot(*zip(*validations), color=colour, linestyle="none", marker="o", markersize=5, clip_on=False)
    # the two end close together, so one label names the one that matters
    return (validations[-1], "validation") if validations else (steps[-1], "training")


def log_caption(runs, mean, unit, zero):
    """What lines and marks are, and what is not drawn."""
    text = f"Thin lines: every step; thick: the mean of the {mean} {unit}s around it." if mean else "Lines: every step."
    validated = any(validations for _, found, *_ in runs for _, validations in found.values())
    text += (" Points: validations." if validated else "") + " Numbers: last values."
    return text + (f" Zero throughout: {', '.join(METRICS[metric] for metric in zero)}." if zero else "")


def log(options):
    """Draws how one or more runs went, from their log.jsonl: the loss, and what people watch of the objective.

    A panel for each metric (METRICS) that a log holds, runs over one another; metrics that are zero to within rounding (the loss of a
    rollout whose advantages sum to 0) are named below them. A line is every step, marks are validations. --mean: thin lines, and
    thick ones of the mean of so many steps. A level is a horizontal line in the panel of the loss, to compare with. --stages: the runs
    continued one another, and are drawn one after the other against the tokens trained on; --mean then counts tokens.
    """
    runs = [(name_of(path), *read(path)) for path in options.logs]
    unit, means_of, begins = "step", [options.mean for _ in runs], []
    if options.stages:
        runs, begins = follow(runs)
        unit, means_of = "token", [options.mean * max(trained) // max(1, max(trained.values())) for *_, trained in runs]
    metrics = [metric for metric in METRICS if any(metric in found for _, found, *_ in runs)]
    zero = [metric for metric in metrics if all(is_zero(found.get(metric, ())) for _, found, *_ in runs)]
    metrics = [metric for metric in metrics if metric not in zero] or zero
    columns = min(len(metrics), 3)
    rows = -(-len(metrics) // columns)
    alone = len(metrics) == 1
    figure, axes = plt.subplots(rows, columns, squeeze=False,
                                figsize=(6.4, 3.6) if alone else (2.6 * columns, 2.3 * rows))
    for unused in axes.flat[len(metrics):]:
        unused.remove()
    colours = itertools.cycle(COLOURS[name] for name in ("stream", "full", "checkpoint", "paper", "hf", "llmc"))
    colours = [next(colours) for _ in runs] if not options.stages else [next(colours)] * len(runs)
    last = max(points[-1][0] for _, found, *_ in runs for series in found.values() for points in series if points)

    labels = {metric: [] for metric in metrics}
    for metric, axis in zip(metrics, axes.flat):
        for (name, found, *_), colour, mean in zip(runs, colours, means_of):
            if metric in found:
                point, what = log_lines(axis, *found[metric], colour, mean)
                if options.stages and found is not runs[-1][1]:
                    continue
                text = f"{what} {point[1]:.3f}" if alone else f"{point[1]:.3g}"
                labels[metric].append((point, f"{name}, {text}" if alone and len(runs) > 1 and not options.stages else text, colour))
        (axis.set_ylabel if alone else axis.set_title)(METRICS[metric])
        axis.set_xlabel("tokens trained on" if options.stages else "step")
        for begin, length in begins:
            axis.axvline(begin, color=GREY, linewidth=0.8)
            axis.annotate(f"T = {length}", (begin, 1), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
                          color=GREY)
        if options.stages:  # single steps of short sequences may lie far above
            axis.xaxis.set_major_formatter(tokens)
            axis.set_ylim(0, 1.1 * max(value for _, found, *_ in runs for _, value in found.get(metric, ((), ()))[1] or [(0, 1)]))
        axis.set_xlim(0, last)
        if metric in SHARES:
            axis.set_ylim(0, None)
    if "loss" in metrics and all(said.get("objective", "sft") == "sft" for *_, said, _ in runs):
        (axes[0, 0].set_ylabel if alone else axes.flat[metrics.index("loss")].set_title)("loss, nats per token")
    if "loss" in metrics and options.level is not None:
        axes.flat[metrics.index("loss")].axhline(options.level, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        labels["loss"].append(((last, options.level), f"{options.level_name} {options.level:.3f}", GREY))

    figure.tight_layout(w_pad=1.0 if alone else 4.0)
    for metric, axis in zip(metrics, axes.flat):
        label(axis, labels[metric])
    if not alone and len(runs) > 1 and not options.stages:
        lines = [plt.Line2D([], [], color=colour) for _, colour in zip(runs, colours)]
        figure.legend(lines, [name for name, *_ in runs], loc="lower left", bbox_to_anchor=(0, 1), ncol=len(runs))
    return figure, log_caption(runs, options.mean, unit, zero)


# ---- curve --------------------------------------------------------------------------------------------------------------------
def curve(options):
    """Draws the loss by position in the sequence: how far back a model looks.

    Columns: series,begin,end,loss: nats per token over the positions from begin to before end, as `train eval --curve` has them. A point
    stands in the middle of its positions, on a logarithmic axis.
    """
    series = series_of(options.input, lambda row: row["series"],
                       lambda row: (math.sqrt(max(int(row["begin"]), 1) * int(row["end"])), float(row["loss"])))
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.set_xscale("log", base=2)
    labels = []
    for (name, points), method in zip(series.items(), ("checkpoint", "stream-keep", "stream", "full", "hf")):
        axes.plot(*zip(*points), color=COLOURS[method], marker="o", markersize=4)
        labels.append((points[-1], f"{name}: {points[-1][1]:.3f}", COLOURS[method]))
    axes.set_title(options.title)
    axes.set_xlabel("position in the sequence, tokens")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_formatter(tokens)
    figure.tight_layout()
    label(axes, labels)
    return figure, ""


# ---- memory -------------------------------------------------------------------------------------------------------------------
def below(points, limit):
    """The part of a line that lies below the limit, ending on it."""
    kept = []
    for n, value in points:
        if limit and value > limit:
            if kept:
                n0, value0 = kept[-1]
                kept.append((n0 + (n - n0) * (limit - value0) / (value - value0), limit))
            break
        kept.append((n, value))
    return kept


def memory(options):
    """Draws memory against sequence length.

    Columns: series,method,source,seq_len,bytes. A series is labelled with its name, in which | breaks the line. Source `plan` is a line,
    `pass` a dashed one, `measured` and `paper` are marks. A limit is a horizontal line; under the highest one all series end, and their
    labels stand above it with the length that they reach.
    """
    marks, dashes = {"measured": "o", "paper": "x"}, {"plan": "-", "pass": (0, (5, 2))}
    series = series_of(options.input, lambda row: (row["series"], row["method"], row["source"]),
                       lambda row: (int(row["seq_len"]), float(row["bytes"])))
    limits = [(float(bytes_), name) for name, bytes_ in (limit.rsplit("=", 1) for limit in options.limit)]
    top = max(limits, default=(None, ""))[0]
    figure, axes = plt.subplots(figsize=(WIDTH, 4.2 if top else 3.6))
    ends = []
    for (name, method, source), points in series.items():
        colour = COLOURS[method]
        if source in dashes:
            points = below(sorted(points), top)
            axes.plot(*zip(*points), color=colour, linestyle=dashes[source])
            for limit, _ in limits:
                if points[0][1] < limit < top:
                    end = below(points, limit)[-1]
                    axes.annotate(tokens(round(end[0], -3)), end, xytext=(0, 4), textcoords="offset points", ha="right", color=colour)
        else:
            axes.plot(*zip(*points), linestyle="none", marker=marks[source], markersize=5, color=colour, clip_on=False)
        if name:
            ends.append((points[-1], name.replace("|", "\n"), colour))
    axes.set_xlabel("tokens of a sequence")
    if options.log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_xlim(0, None)
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(plt.MultipleLocator(10 * GIB))
    axes.xaxis.set_major_formatter(tokens)
    axes.yaxis.set_major_formatter(size)
    for limit, name in limits:
        axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), clip_on=False)
        axes.annotate(f"{name}\n{limit / GIB:.1f} GiB", (1, limit), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", color=GREY, annotation_clip=False)
    figure.tight_layout()
    axes.set_title(options.title, pad=44 if top else None)
    if not top:
        label(axes, ends)
    for (end, _), name, colour in ends if top else ():
        axes.annotate(f"{name}\n{tokens(round(end, -3))}", (end, top), textcoords="offset points", xytext=(0, 4), ha="center",
                      va="bottom", color=colour, annotation_clip=False)
    return figure, ""


# ---- scale --------------------------------------------------------------------------------------------------------------------
SHARING = {  # series of a panel, after the model's name: the words at the end of its line, and how that is drawn
    "sp = GPUs ring": ("all share one,\npassed around", "-"),
    "sp = GPUs gathered": ("all share one,\ngathered", (0, (5, 2))),
    "sp 8": ("eight share one", (0, (1, 1.5))),
    "sp = GPUs": ("", "-"),
}


def scale_panel(axes, rows, panel, value, title):
    ends = []
    for series, (words, line) in SHARING.items():
        points = [(float(row["gpus"]), float(row[value])) for row in rows
                  if (row["panel"], row["series"], row["source"]) == (panel, f"Qwen3-8B {series}", "plan")]
        if points:
            axes.plot(*zip(*points), color=COLOURS["stream"], linestyle=line)
            ends.append((points[-1], words, COLOURS["stream"]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("H100 GPUs")
    axes.xaxis.set_major_formatter(plain)
    axes.set_title(title)
    return ends


def scale(options):
    """Draws what a plan says of many GPUs: the longest sequence, and beside it the time of a step, which is an estimate.

    Columns: panel,series,source,gpus,tokens,seconds,mfu,communication_share. Drawn are the rows of Qwen3-8B whose source is `plan`: what
    others measured is in the tables of plan_scale.sh, never on the axes of an estimate.
    """
    rows = rows_of(options.input)
    figure, (length, time) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    ends = scale_panel(length, rows, "length", "tokens", "Longest sequence, tokens (planned)")
    length.yaxis.set_major_formatter(tokens)
    scale_panel(time, rows, "million", "seconds", "Step of a million tokens, s (estimated)")
    time.yaxis.set_major_formatter(plain)
    figure.tight_layout(w_pad=7)
    label(length, ends)
    return figure, ""


# ---- lengths ------------------------------------------------------------------------------------------------------------------
LENGTHS = ("Plans and estimates of ./train plan, nothing was run: 78.1 GiB of the card, bf16, AdamW with fp32 states, one sequence a step. "
           "Cross: published with a time of a step; ticks: without one.")


def lengths(options):
    """Draws the estimated time of a step against the length of its sequence on one card; what others published as marks.

    Columns: series,source,tokens,seconds, as plan_lengths.py --points writes them. A length that was published without a time is a mark on
    the lower edge.
    """
    colours = [COLOURS[name] for name in ("stream-keep", "stream", "checkpoint", "full", "hf")]
    widest = 7  # points: lines lie on one another, the first below
    series = series_of(options.input, lambda row: (row["series"], row["source"]),
                       lambda row: (int(row["tokens"]), number(row["seconds"])))
    figure, axes = plt.subplots(figsize=(WIDTH, 4.0))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lines = [(name, points) for (name, source), points in series.items() if source == "plan"]
    for i, (name, points) in enumerate(lines):
        axes.plot(*zip(*points), color=colours[i], linewidth=widest * (1 - i / len(lines)), solid_capstyle="butt",
                  label=f"{name}: to {decimal(points[-1][0])}")
        axes.plot(*points[-1], color=colours[i], marker="o", markersize=widest + 1 - i)
    low = min(y for _, points in lines for _, y in points) / 2
    axes.set_ylim(low, None)
    others = sorted((x, y, name) for (name, source), points in series.items() if source != "plan" for x, y in points)
    for i, (x, y, name) in enumerate(others):
        axes.plot([x], [y or low], color=GREY, marker="x" if y else "|", markersize=8, clip_on=False)
        axes.annotate(f"{name}: {decimal(x)}", (x, y or low), xytext=(-6, 3 if y else 8 + LINE * i), textcoords="offset points",
                      ha="right", color=GREY)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("seconds of a step, estimated")
    axes.xaxis.set_major_formatter(tokens)
    axes.yaxis.set_major_formatter(plain)
    axes.set_title("Qwen3-8B on one H100: seconds of a step, estimated")
    axes.legend()
    figure.tight_layout()
    return figure, LENGTHS


# ---- methods ------------------------------------------------------------------------------------------------------------------
METHODS = ("Plans and estimates of ./train plan for an A100, nothing was run: one forward and backward pass of all weights in bf16, everything "
           "on the device. Above: memory that a further token takes, beside what does not grow. spaco: a backward for one chunk in four; its "
           "memory is seco's. Marks: the paper's own measurements on an A800 (arXiv 2506.03077, Figure 3 and Table 1) of checkpointing (x), "
           "Mini-Sequence (+) and StreamBP (.).")


def methods_panel(axes, series, value):
    """value: 1: kilobytes a token, 2: seconds"""
    marks = {"checkpoint": "x", "mst": "+", "stream": "."}
    widest = 6  # points: where lines lie on one another the first is below
    for i, ((method, source), points) in enumerate(series.items()):
        known = [(point[0], (1e-3 if value == 1 else 1) * point[value]) for point in points if point[value] is not None]
        if not known or (value == 1 and method == "spaco"):
            continue
        if source == "plan":
            axes.plot(*zip(*known), color=COLOURS[method], label=method, linewidth=max(widest - i, 1), solid_capstyle="butt")
        else:
            axes.plot(*zip(*known), linestyle="none", marker=marks[method], markersize=4.5, color=COLOURS[method])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(tokens)
    axes.xaxis.set_major_locator(plt.LogLocator(base=4))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(plt.NullLocator())
    if value == 1:
        axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))


def methods(options):
    """Draws memory and time of every method against the length of a sequence; the paper's measurements as marks.

    A pair of panels for each model. Columns: model,method,source,tokens,bytes_per_token,seconds, as plan_methods.py --points writes them.
    """
    columns, models = 3, {}
    for (model, *key), points in series_of(
            options.input, lambda row: (row["model"], row["method"], row["source"]),
            lambda row: (int(row["tokens"]), number(row["bytes_per_token"]), number(row["seconds"]))).items():
        models.setdefault(model, {})[tuple(key)] = points
    rows = (len(models) + columns - 1) // columns
    figure, axes = plt.subplots(2 * rows, columns, figsize=(WIDTH, 4 * rows), squeeze=False, sharex=True)
    for i, (model, series) in enumerate(models.items()):
        for value in (1, 2):
            here = axes[i // columns + (value - 1) * rows][i % columns]
            methods_panel(here, series, value)
            here.set_title(model)
            if i % columns == 0:
                here.set_ylabel("kB of a further token" if value == 1 else "seconds, estimated")
    for here in axes[-1]:
        here.set_xlabel("tokens of a sequence")
    for here in axes.flat[len(models) :] if len(models) % columns else []:
        here.set_visible(here.has_data())
    axes[rows][0].legend(loc="upper left", labelspacing=0.2, borderpad=0.1, handlelength=1.2)
    figure.tight_layout()
    return figure, METHODS


# ---- compare ------------------------------------------------------------------------------------------------------------------
def compare_panel(axes, series, value, title):
    for name, rows in series.items():
        points = [(row["seq_len"], row[value]) for row in rows if row[value] is not None]
        if points:
            colour = COLOURS.get(name.split("@")[0], GREY)
            axes.plot(*zip(*points), marker=".", color=colour, linestyle=":" if "@" in name else "-", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(tokens)
    axes.minorticks_off()
    axes.set_xticks(sorted({row["seq_len"] for rows in series.values() for row in rows}))
    axes.set_xlabel("tokens of a sequence (T)")
    axes.set_title(title)
    axes.set_ylim(0, None)


def compare(options):
    """Draws what dev/compare/compare.py measured: time over that of `stream`, and peak memory, against sequence length."""
    series = {}
    for row in rows_of(options.input):
        if not row["error"]:
            series.setdefault(row["contender"], []).append(
                {"seq_len": int(row["seq_len"]), "time_ratio": number(row["time_ratio"]), "peak_gib": float(row["peak_bytes"]) / GIB})
    figure, (time, peak) = plt.subplots(1, 2, figsize=(WIDTH, 3.3))
    compare_panel(time, series, "time_ratio", "Time of forward and backward, over `stream`'s")
    compare_panel(peak, series, "peak_gib", "Peak memory, GiB")
    handles, labels = peak.get_legend_handles_labels()
    figure.tight_layout(w_pad=2.0)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncol=4)
    return figure, ""


# ---- main ---------------------------------------------------------------------------------------------------------------------
KINDS = {  # how each is drawn, and its own arguments
    "log": (log, {
        "logs": {"nargs": "+", "metavar": "log.jsonl"},
        "--mean": {"type": int, "default": 0, "help": "also a line of the mean of so many steps, as many before a step as after it"},
        "--stages": {"action": "store_true", "help": "one run after the other, against tokens; --mean counts tokens"},
        "--level": {"type": float},
        "--level-name": {"default": ""},
    }),
    "curve": (curve, {"--title": {"default": ""}}),
    "memory": (memory, {
        "--title": {"default": ""},
        "--limit": {"action": "append", "default": [], "metavar": "NAME=BYTES"},
        "--log": {"action": "store_true", "help": "logarithmic axes"},
    }),
    "scale": (scale, {}),
    "lengths": (lengths, {}),
    "methods": (methods, {}),
    "compare": (compare, {}),
}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (draw, arguments) in KINDS.items():
        kind = kinds.add_parser(name, help=draw.__doc__.split("\n")[0], description=draw.__doc__, formatter_class=raw)
        if name != "log":
            kind.add_argument("--in", dest="input", required=True, metavar="CSV")
        kind.add_argument("--out", required=True, metavar="PNG")
        kind.add_argument("--caption", default="", help="small print below the picture")
        for argument, settings in arguments.items():
            kind.add_argument(argument, **settings)
    options = parser.parse_args()

    figure, text = KINDS[options.kind][0](options)
    if options.caption or text:
        caption(figure, options.caption or text)
    figure.savefig(options.out, bbox_inches="tight", pad_inches=0.12)


if __name__ == "__main__":
    main()
