"""Draws the pictures of this project. Each kind of picture is a function below; its docstring describes its file.

    plot.py log --out run.png [--mean 20] [--only reward] [--level 3.21 --level-name "unigram entropy"] [--stages] RUN...
    plot.py curve|memory|scale|lengths|mixed|methods|recall|compare --in points.csv --out picture.png [--title TEXT] [--caption TEXT]
    plot.py KIND --help     what it draws, and its other options

A picture's title is its message; braces in it stand for numbers of the picture: --title "{first} at first, {last} at the end".
"""

import argparse
import csv
import io
import itertools
import math
import os
import sys
import textwrap

from log_export import log_of, records_of, refuse, scalars_of
from plan_lengths import tokens as decimal

try:
    import matplotlib
    from PIL import Image
except ImportError:
    refuse(f"{sys.executable} has no matplotlib: pip install matplotlib, or call another Python")

matplotlib.use("Agg")  # draws files, needs no display
import matplotlib.pyplot as plt
import numpy

# ---- how every picture looks --------------------------------------------------------------------------------------------------
# One colour per method, and per other program, the same in every picture; the colours differ in grey, too.
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
    "axes.titlesize": 9.5,
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


def rows_of(path, columns):
    """Returns the rows of a CSV, which must have these columns."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        refuse(f"{path}: holds no rows")
    for column in columns.split(","):
        if any(row.get(column) is None for row in rows):
            refuse(f"{path}: a row has no {column}; the columns are {columns}")
    return rows


def series_of(rows, key, point):
    """Returns {key(row): [point(row), ...]}, keys and points in the file's order."""
    found = {}
    for row in rows:
        found.setdefault(key(row), []).append(point(row))
    return found


def number(text):
    return float(text) if text else None


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
    """Writes words at the ends of lines, [(point, text, colour)], and moves words up that would overlap."""
    below = float("-inf")
    for point, text, colour in sorted(labels, key=lambda entry: entry[0][1]):
        at = axes.transData.transform(point)[1] * 72 / axes.figure.dpi
        below = max(at, below + LINE)
        axes.annotate(text, point, xytext=(6, below - at), textcoords="offset points", va="center", color=colour,
                      annotation_clip=False)


def bars(axes, entries, most=math.inf):
    """Draws horizontal bars from the top, [(name, value, words, colour)], with words at their ends; cuts bars at `most`."""
    axes.grid(axis="y", visible=False)
    axes.barh([name for name, *_ in entries], [min(value, most) for _, value, *_ in entries], height=0.62,
              color=[colour for *_, colour in entries])
    for i, (_, value, words, _) in enumerate(entries):
        cut = value > most
        axes.annotate(f"{words}, cut" if cut else words, (min(value, most), i), xytext=(-4 if cut else 4, 0), textcoords="offset points",
                      va="center", ha="right" if cut else "left", color="white" if cut else "black", annotation_clip=False)
    axes.set_xlim(0, most if most < math.inf else None)
    axes.invert_yaxis()


def write(figure, title, small, path):
    """Saves a picture with its message above and small print below, in lines of the picture's width, on white, with a small palette."""
    for text, at, points, weight, colour, columns in ((title, 1, 11, "bold", "black", 11.5), (small, 0, 8.5, "normal", GREY, 16.5)):
        figure.text(0.01, at, textwrap.fill(text, int(columns * figure.get_figwidth())), va="bottom" if at else "top", fontsize=points,
                    fontweight=weight, color=colour, linespacing=1.4)
    drawn = io.BytesIO()
    figure.savefig(drawn, facecolor="white", bbox_inches="tight", pad_inches=0.15)
    Image.open(drawn).convert("RGB").quantize(64).save(path, format="PNG", optimize=True)


# ---- log ----------------------------------------------------------------------------------------------------------------------
METRICS = {  # metrics of log.jsonl, in the order of the panels
    "reward": "mean reward",
    "frac_reward_zero_std": "groups without signal, share",
    "loss": "loss",
    "rewards/accuracies": "pairs ranked right, share",
    "rewards/margins": "reward: chosen - rejected",
    "kl": "KL from reference, nats",
    "entropy": "entropy, nats per token",
    "completions/mean_length": "tokens of a completion",
}
ROUNDING = 1e-6  # smaller values count as zero


def read(path):
    """Returns ({metric: ([(step, value)], [(step, value of a validation)])}, options, {step: its tokens}) of one log."""
    found, said, trained = {}, {}, {}
    for record in records_of(path):
        if "options" in record:
            said = record["options"]
            continue
        if "tokens" in record:
            trained[record["step"]] = record["tokens"]
        for name, value in scalars_of(record, 0).items():
            side, metric = name.split("/", 1)
            found.setdefault(metric, ([], []))[side == "eval"].append((record["step"], value))
    if not set(METRICS) & set(found):
        refuse(f"{path}: holds no step and no validation")
    return found, said, trained


def follow(runs):
    """Returns the runs of --stages with tokens in place of steps, each after the previous run; and [(begin in tokens, --seq-len)]."""
    moved, begins, begin = [], [], 0
    for name, found, said, trained in runs:
        ends = dict(zip([0, *trained], itertools.accumulate(trained.values(), initial=begin)))
        if any(step not in ends for series in found.values() for points in series for step, _ in points):
            refuse(f"{name}: --stages needs the tokens of every step, which its log does not have")
        at = {metric: tuple([(ends[step], value) for step, value in points] for points in series) for metric, series in found.items()}
        moved.append((name, at, said, {ends[step]: count for step, count in trained.items()}))
        begins.append((begin, said.get("seq_len")))
        begin = max(ends.values())
    return moved, begins


def means(points, count, weights):
    """Returns the weighted mean of `count` points around each point, as many before as after it; no mean if points are missing."""
    k, found = count // 2, []
    for i in range(k, len(points) - k):
        around = points[i - k:i + k + 1]
        total = sum(weights.get(step, 1) for step, _ in around)
        found.append((points[i][0], sum(weights.get(step, 1) * value for step, value in around) / (total or 1)))
    return found


def log_lines(axes, steps, validations, colour, count, weights, band):
    """Draws one run's lines in one panel. Returns the main values: of validations, else the means, else of every step."""
    thick = means(steps, count, weights) if count else []
    if steps:
        axes.plot(*zip(*steps), color=colour, linewidth=1.0, alpha=0.3 if thick else 0.8)
    if thick:
        axes.plot(*zip(*thick), color=colour)
    if band:
        apart = dict(means(band, count if thick else 0, weights))
        edges = [(step, value - apart[step], value + apart[step]) for step, value in thick or steps if step in apart]
        axes.fill_between(*zip(*edges), color=colour, alpha=0.12, linewidth=0)
    if validations:
        axes.plot(*zip(*validations), color=colour, linestyle="none", marker="o", markersize=5, clip_on=False)
    return validations or thick or steps


def log_axes(axes, last, most, begins):
    """Labels the axes, and marks the stages. begins: [(tokens before a stage, its --seq-len)]"""
    axes.set_xlabel("tokens trained on" if begins else "step")
    axes.set_xlim(0, last)
    for begin, length in begins:
        axes.axvline(begin, color=GREY, linewidth=0.8)
        axes.annotate(f"T = {length}" if length else "", (begin, 1), xycoords=("data", "axes fraction"), xytext=(3, 2),
                      textcoords="offset points", color=GREY)
        axes.xaxis.set_major_formatter(tokens)
    if most:
        axes.set_ylim(0, most)


def panels_of(runs, wanted):
    """Returns the metrics to draw, and the metrics left out because they are zero throughout."""
    found = {metric: [value for _, found, *_ in runs for points in found.get(metric, ()) for _, value in points] for metric in wanted}
    rewarded = len(wanted) > 1 and all("reward" in found for _, found, *_ in runs)  # their loss is 0 by construction: advantages sum to 0
    metrics = [metric for metric in wanted if found[metric] and not (metric == "loss" and rewarded)]
    if not metrics:
        refuse(f"--only: there is no such metric; the first log has {', '.join(runs[0][1])}")
    drawn = [metric for metric in metrics if max(map(abs, found[metric])) > ROUNDING] or metrics
    return drawn, [metric for metric in metrics if metric not in drawn]


def log(options):
    """Draws runs, from their folders or log.jsonl: the loss, and the main metrics of the objective.

    A panel for each metric that a log holds: the loss; for preferences also the share of pairs ranked right and the margin; for GRPO in
    place of the loss the reward with its deviation as a band, the share of groups without signal, KL, entropy and length. Metrics that are zero
    to within rounding are named below the panels. --only: draws one metric of log.jsonl. A line has every step, marks are validations. --mean N:
    also a thick line, the mean of N steps around each; metrics per token are weighted by tokens. A level is a
    horizontal line in the panel of the loss. --stages: each run continued the previous run; they are drawn one after the other against the
    tokens of training; --mean then counts tokens. --title: the {first} and the {last} value.
    """
    runs = [(os.path.basename(os.path.dirname(path)), *read(path)) for path in map(log_of, options.logs)]
    counts, begins = [options.mean for _ in runs], []
    if options.stages:
        runs, begins = follow(runs)
        counts = [options.mean * len(trained) // max(1, sum(trained.values())) for *_, trained in runs]
    only, _, words = options.only.partition("=")
    metrics, zero = panels_of(runs, [only] if only else METRICS)
    alone = len(metrics) == 1
    columns = 2 if len(metrics) == 4 else min(len(metrics), 3)
    rows = math.ceil(len(metrics) / columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(6.4, 3.4) if alone else (WIDTH, 2.2 * rows))
    for unused in axes.flat[len(metrics):]:
        unused.remove()
    single = len(runs) == 1 or options.stages
    cycle = itertools.cycle(("stream",) if single else ("stream", "full", "checkpoint", "paper", "hf", "llmc"))
    colours = [COLOURS[method] for _, method in zip(runs, cycle)]
    last = max(points[-1][0] or 1 for _, found, *_ in runs for metric in metrics for points in found.get(metric, ()) if points)
    names = {**METRICS, only: words or METRICS.get(only, only)}
    if all(said.get("objective", "sft") == "sft" for *_, said, _ in runs):
        names["loss"] = "loss, nats per token"

    labels, values = {metric: [] for metric in metrics}, []
    for metric, axis in zip(metrics, axes.flat):
        name, most = names[metric], 0
        for (run, found, _, trained), colour, count in zip(runs, colours, counts):
            if metric not in found:
                continue
            band = found.get("reward_std", ((), ()))[0] if metric == "reward" and single else ()
            seen = log_lines(axis, *found[metric], colour, count, trained if "per token" in name else {}, band)
            values += seen if metric == metrics[0] else []
            most = max(most, *(1.1 * value for _, value in seen))  # the loss of single steps of short sequences may be far above the mean
            if not options.stages or found is runs[-1][1]:
                text = f"{seen[-1][1]:.3f}" if alone else f"{seen[-1][1]:.3g}"
                end = max(points[-1][0] for points in found[metric] if points)
                labels[metric].append(((end, seen[-1][1]), text if not alone or single else f"{run} {text}", colour))
        (axis.set_ylabel if alone else axis.set_title)(name)
        log_axes(axis, last, 1.02 if name.endswith("share") else most if options.stages else None, begins)
        if metric == "loss" and options.level is not None:
            axis.axhline(options.level, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
            labels[metric].append(((last, options.level), f"{options.level_name} {options.level:.3f}", GREY))

    figure.tight_layout(w_pad=1.0 if alone else 4.0)
    for metric, axis in zip(metrics, axes.flat):
        label(axis, labels[metric])
    if not alone and not single:
        axes[0, 0].legend([plt.Line2D([], [], color=colour) for colour in colours], [name for name, *_ in runs])
    name = names[metrics[0]]
    facts = {"first": f"{values[0][1]:.3g}", "last": f"{values[-1][1]:.3g}"}
    unit = "tokens" if options.stages else "steps"
    text = f"Thin: every step; thick: the mean of {options.mean} {unit}. " if options.mean else "Lines: every step. "
    text += "Points: validations. " if any(found[metric][1] for _, found, *_ in runs for metric in metrics if metric in found) else ""
    text += f"Zero throughout: {', '.join(names[metric] for metric in zero)}." if zero else ""
    return figure, f"{name[0].upper()}{name[1:]}: {{first}} at first, {{last}} at the end" if single else "", facts, text


# ---- curve --------------------------------------------------------------------------------------------------------------------
def curve(options):
    """Draws the loss by position in the sequence: how far back a model looks.

    Columns: series,begin,end,loss: nats per token over the positions from begin to before end, as `train eval --curve` has them. A point
    stands in the middle of its positions, on a log axis. --title: {gains}, by how much each series' last point lies below its first.
    """
    series = series_of(options.rows, lambda row: row["series"], lambda row: (int(row["begin"]), int(row["end"]), float(row["loss"])))
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    axes.set_xscale("log", base=2)
    labels = []
    for (name, points), method in zip(series.items(), itertools.cycle(("checkpoint", "stream-keep", "stream", "full", "hf"))):
        drawn = [(math.sqrt(max(begin, 1) * end), loss) for begin, end, loss in points]
        axes.plot(*zip(*drawn), color=COLOURS[method], marker="o", markersize=4)
        labels.append((drawn[-1], f"{name}: {drawn[-1][1]:.3f}", COLOURS[method]))
    axes.set_xlabel("position in the sequence, tokens")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_formatter(tokens)
    figure.tight_layout()
    label(axes, labels)
    gains = ", ".join(f"{points[0][2] - points[-1][2]:.2f} ({name})" for name, points in series.items())
    return figure, "Long context saves nats per token: {gains}", {"gains": gains}, ""


# ---- memory -------------------------------------------------------------------------------------------------------------------
def memory(options):
    """Draws memory against sequence length.

    Columns: series,method,source,seq_len,bytes. A series is labelled with its name, in which | breaks the line: the method, then its trained
    weights. Source `plan` is a line, `measured` are marks. A limit is a horizontal line; the highest one ends the picture, and labels
    stand above it with the length that they reach. --title: {times} the length of `checkpoint` that `stream` reaches below the lowest
    {limit} that both reach, {what} it trains.
    """
    series = series_of(options.rows, lambda row: (row["series"], row["method"], row["source"]),
                       lambda row: (int(row["seq_len"]), float(row["bytes"])))
    figure, axes = plt.subplots(figsize=(WIDTH, 4.0 if options.limit else 3.4))
    reached = {limit: {} for limit in sorted(options.limit, reverse=True)}  # {(what, method): (tokens, label)}
    for (name, method, source), points in series.items():
        colour, (lengths, sizes) = COLOURS.get(method, GREY), zip(*sorted(points))
        axes.plot(lengths, sizes, color=colour, **({} if source == "plan" else {"linestyle": "none", "marker": "o", "markersize": 5}))
        for limit in reached:
            if source == "plan" and sizes[0] < limit[0]:
                reached[limit][name.split("|")[-1], method] = float(numpy.interp(limit[0], sizes, lengths)), name.replace("|", "\n")
    axes.set_xlabel("tokens of a sequence")
    if options.log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)
        axes.yaxis.set_major_locator(plt.MultipleLocator(10 * GIB))
    axes.xaxis.set_major_formatter(tokens)
    axes.yaxis.set_major_formatter(size)

    facts, above = {}, {"xytext": (0, 4), "ha": "center", "va": "bottom"}
    for i, ((limit, card), found) in enumerate(reached.items()):
        axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), clip_on=False)
        axes.annotate(f"{card}\n{limit / GIB:.1f} GiB", (1, limit), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", color=GREY, annotation_clip=False)
        if i == 0 and found:
            axes.set_ylim(0, limit)
            axes.set_xlim(0, 1.05 * max(found.values())[0])
        for j, ((what, method), (n, name)) in enumerate(sorted(found.items(), key=lambda entry: entry[1])):
            beside = {"xytext": (4, -LINE), "ha": "left"} if j else {"xytext": (-1, 4), "ha": "right"}
            axes.annotate(f"{name}\n" * (i == 0) + tokens(round(n, -3)), (n, limit), textcoords="offset points", annotation_clip=False,
                          color=COLOURS.get(method, GREY), **(beside if i else above))
            if method == "stream" and (what, "checkpoint") in found:
                facts = {"limit": card, "what": what, "times": f"{n / found[what, 'checkpoint'][0]:.1f}"}
    figure.tight_layout()
    if not reached:
        label(axes, [(max(points), name, COLOURS.get(method, GREY)) for (name, method, _), points in series.items() if name])
    return figure, "", facts, ""


# ---- scale --------------------------------------------------------------------------------------------------------------------
SHARING = {  # series of a panel, after the model's name: the words at the end of its line, and the line's style
    "sp = GPUs ring": ("all share one,\npassed around", "-"),
    "sp = GPUs gathered": ("all share one,\ngathered", (0, (5, 2))),
    "sp 8": ("eight share one", (0, (1, 1.5))),
    "sp = GPUs": ("", "-"),
}


def scale_panel(axes, rows, panel, value, title):
    ends = {}
    for series, (words, line) in SHARING.items():
        points = [(float(row["gpus"]), float(row[value])) for row in rows
                  if (row["panel"], row["series"], row["source"]) == (panel, f"Qwen3-8B {series}", "plan")]
        if points:
            axes.plot(*zip(*points), color=COLOURS["stream"], linestyle=line)
            ends[series] = (points[-1], words, COLOURS["stream"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("H100 GPUs")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(title)
    return ends


def scale(options):
    """Draws plans for many GPUs: the longest sequence, and next to it the time of a step, which is an estimate.

    Columns: panel,series,source,gpus,tokens,seconds. Only rows of Qwen3-8B whose source is `plan` are drawn; measurements of others are in
    the tables of plan_scale.sh. --title: {times} the length of gathered keys and values for those passed around, on most {gpus}.
    """
    figure, (length, time) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
    ends = scale_panel(length, options.rows, "length", "tokens", "Longest sequence, tokens (planned)")
    length.yaxis.set_major_formatter(tokens)
    scale_panel(time, options.rows, "million", "seconds", "Step of a million tokens, s (estimated)")
    time.yaxis.set_major_formatter("{x:g}")
    figure.tight_layout(w_pad=7)
    label(length, ends.values())
    facts = {}
    if {"sp = GPUs ring", "sp = GPUs gathered"} <= set(ends):
        (gpus, ring), (_, gathered) = (ends[f"sp = GPUs {way}"][0] for way in ("ring", "gathered"))
        facts = {"gpus": f"{gpus:g}", "times": f"{ring / gathered:.3g}"}
    return figure, "{gpus} GPUs: keys and values passed around reach {times} times the length of gathered ones" if facts else "", facts, ""


# ---- lengths ------------------------------------------------------------------------------------------------------------------
def lengths(options):
    """Draws the longest sequence of each way to train on one card, and published lengths of others.

    Columns: series,source,tokens,seconds, as plan_lengths.py --points writes them; seconds of a step may be unknown. --title: the
    {longest} plan, {times} the longest that was published.
    """
    entries, longest = [], {True: 0, False: 1}
    for row in options.rows:
        n, seconds, ours = int(row["tokens"]), number(row["seconds"]), row["source"] == "plan"
        longest[ours] = max(longest[ours], n)
        time = "" if not seconds else f", {seconds / 3600:.1f} h a step" if seconds > 3600 else f", {seconds / 60:.0f} min a step"
        colour = COLOURS["stream-keep" if "LoRA" in row["series"] else "stream"] if ours else "#999999"
        entries.append((row["series"], n, decimal(n) + time, colour))
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.29 * len(entries)))
    bars(axes, sorted(entries, key=lambda entry: -entry[1]))
    axes.set_xlabel("tokens of the longest sequence")
    axes.xaxis.set_major_formatter(tokens)
    figure.tight_layout()
    facts = {"longest": decimal(longest[True]), "times": f"{longest[True] / longest[False]:.1f}"}
    return figure, "Planned on one H100: Qwen3-8B on {longest} tokens, {times} times the longest published", facts, \
        "Plans and estimates, nothing was run. Grey: what others published, of models of 7B and 8B."


# ---- mixed --------------------------------------------------------------------------------------------------------------------
def mixed(options):
    """Draws the time of each GPU in a step of documents of all lengths: groups of one size compared with --sp auto.

    Columns: lengths,way,rank,sp,seconds, as plan_lengths_mixed.py --points writes them. A panel for each distribution of lengths, a bar
    for each GPU, from the bottom in the order of its passes, a colour for each number of GPUs that share a sequence. --title: {gains}, the
    slowest GPU's time of the first way over that of the last.
    """
    panels = series_of(options.rows, lambda row: row["lengths"], lambda row: row)
    sizes = sorted({int(row["sp"]) for row in options.rows})
    colours = dict(zip(sizes, plt.colormaps["viridis_r"](numpy.linspace(0.05, 1, len(sizes)))))
    figure, axes = plt.subplots(1, len(panels), squeeze=False, figsize=(WIDTH, 2.6))
    gains = []
    for axis, (name, rows) in zip(axes.flat, panels.items()):
        ways, ends = list(dict.fromkeys(row["way"] for row in rows)), []
        ranks = 1 + max(int(row["rank"]) for row in rows)
        for i, way in enumerate(ways):
            height, left = numpy.zeros(ranks), 1.15 * ranks * i
            for sp in reversed(sizes):
                seconds = numpy.zeros(ranks)
                for row in rows:
                    if row["way"] == way and int(row["sp"]) == sp:
                        seconds[int(row["rank"])] = float(row["seconds"])
                axis.bar(left + numpy.arange(ranks), seconds, bottom=height, width=1, color=colours[sp])
                height += seconds
            ends.append(height.max())
            axis.annotate(f"{ends[-1]:.2f} s", (left + ranks / 2, ends[-1]), xytext=(0, 3), textcoords="offset points", ha="center")
        gains.append(f"{ends[0] / ends[-1]:.2f}")
        axis.set_xticks([1.15 * ranks * i + ranks / 2 for i in range(len(ways))], ways)
        axis.tick_params(axis="x", length=0)
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, 1.12 * max(ends))
        axis.set_title(name)
    axes[0, 0].set_ylabel("seconds, estimated")
    figure.tight_layout(w_pad=1.5, rect=(0, 0.11, 1, 1))
    figure.text(0.01, 0.06, "GPUs that share a sequence:", va="center")
    figure.legend([plt.Rectangle((0, 0), 1, 1, color=colours[sp]) for sp in sizes], sizes, ncol=len(sizes), handlelength=1,
                  loc="center left", bbox_to_anchor=(0.26, 0.06))
    return figure, "A step with groups that suit each document: {gains} times as fast", {"gains": ", ".join(gains)}, \
        "Estimated, nothing was run: a step of 256 documents, Qwen3-8B on 64 H100 in nodes of eight, ZeRO-1, beside the best --sp of " \
        "one size. Lengths are drawn from assumed distributions."


# ---- methods ------------------------------------------------------------------------------------------------------------------
def methods(options):
    """Draws memory and time of every method for one model, with the paper's measurements of memory.

    Columns: model,method,source,tokens,bytes_per_token,seconds, as plan_methods.py --points writes them. --title: {memory} and {time}
    of `stream` over those of `checkpoint`.
    """
    rows = [row for row in options.rows if row["model"] == options.model]
    plans = {row["method"]: row for row in rows if row["source"] == "plan"}
    if not {"stream", "checkpoint"} <= set(plans):
        refuse(f"{options.input}: has no plans of {options.model} by stream and checkpoint; --model names another")
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 2.4))
    paper = {row["method"]: f" ({float(row['bytes_per_token']) / 1000:.0f})" for row in rows if row["source"] == "paper"}
    length, over = tokens(int(plans["stream"]["tokens"])), []
    for axes, column, title, unit in ((panels[0], "bytes_per_token", "Memory of a further token, kB", 1000),
                                      (panels[1], "seconds", f"Time of a pass of {length} tokens, s (estimated)", 1)):
        found = {method: float(row[column]) / unit for method, row in plans.items()}
        over.append(f"{found['stream'] / found['checkpoint']:.2f}")
        bars(axes, [(method, value, f"{value:.0f}" + paper.get(method, "") * (unit > 1), COLOURS.get(method, GREY))
                    for method, value in found.items()], 1.5 * sorted(found.values())[-2])
        axes.set_title(title)
    figure.tight_layout(w_pad=2)
    return figure, "StreamBP: {memory} of checkpointing's memory for a further token, {time} of its time", \
        {"memory": over[0], "time": over[1]}, \
        f"{options.model} in bf16 on an A100, planned, nothing was run. In brackets: measured by the paper, in its own code, on an A800."


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
    """Draws the measurements of dev/compare/compare.py: time over the time of `stream`, and peak memory, against sequence length."""
    series = series_of([row for row in options.rows if not row["error"]], lambda row: row["contender"], lambda row: {
        "seq_len": int(row["seq_len"]), "time_ratio": number(row["time_ratio"]), "peak_gib": float(row["peak_bytes"]) / GIB})
    figure, (time, peak) = plt.subplots(1, 2, figsize=(WIDTH, 3.3))
    compare_panel(time, series, "time_ratio", "Time of forward and backward, over `stream`'s")
    compare_panel(peak, series, "peak_gib", "Peak memory, GiB")
    figure.tight_layout(w_pad=2.0)
    figure.legend(*peak.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(0, 1), ncol=4)
    return figure, "", {}, ""


# ---- recall -------------------------------------------------------------------------------------------------------------------
def recall(options):
    """Draws the measurements of scripts/passkey_demo.sh: the share of keys found, by length of the text and depth of the key."""
    lengths = sorted({int(row["length"]) for row in options.rows})
    depths = sorted({float(row["depth"]) for row in options.rows})
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 0.9 + 0.3 * len(depths)), sharey=True)
    share = {(row["memory"], int(row["length"]), float(row["depth"])): int(row["found"]) / int(row["texts"]) for row in options.rows}
    for axes, memory, title in zip(panels, ("blocks", "off"), ("--context-memory blocks", "without it")):
        grid = [[share.get((memory, length, depth), math.nan) for length in lengths] for depth in depths]
        axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.grid(visible=False)
        axes.set_title(title)
        axes.set_xticks(range(len(lengths)), [tokens(length) for length in lengths])
        axes.set_xlabel("tokens of the text")
        for y, row in enumerate(grid):
            for x, found in enumerate(row):
                axes.text(x, y, "" if math.isnan(found) else f"{100 * found:.0f} %", ha="center", va="center")
    panels[0].set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    panels[0].set_ylabel("depth of the key")
    figure.tight_layout(w_pad=2.0)
    means = {memory: numpy.mean([s for (m, _, _), s in share.items() if m == memory]) for memory in ("blocks", "off")}
    facts = {"found": f"{100 * means['blocks']:.0f} %", "without": f"{100 * means['off']:.0f} %"}
    return figure, "Keys found in long texts: {found} with the memory, {without} without", facts, "A model trained on 1,024 tokens."


# ---- main ---------------------------------------------------------------------------------------------------------------------
def limit_of(text):
    name, bytes_ = text.rsplit("=", 1)
    return float(bytes_), name


KINDS = {  # for each kind: the function that draws it, the columns of its CSV, its own arguments
    "log": (log, "", {
        "logs": {"nargs": "+", "metavar": "RUN", "help": "the folder of a run, or its log.jsonl"},
        "--mean": {"type": int, "default": 0, "help": "also a line of the mean of so many steps, as many before a step as after it"},
        "--only": {"default": "", "metavar": "METRIC[=NAME]", "help": "draw this one of log.jsonl alone"},
        "--stages": {"action": "store_true", "help": "one run after the other, against tokens; --mean counts tokens"},
        "--level": {"type": float},
        "--level-name": {"default": ""},
    }),
    "curve": (curve, "series,begin,end,loss", {}),
    "memory": (memory, "series,method,source,seq_len,bytes", {
        "--limit": {"type": limit_of, "action": "append", "default": [], "metavar": "NAME=BYTES"},
        "--log": {"action": "store_true", "help": "logarithmic axes"},
    }),
    "scale": (scale, "panel,series,source,gpus,tokens,seconds", {}),
    "lengths": (lengths, "series,source,tokens,seconds", {}),
    "mixed": (mixed, "lengths,way,rank,sp,seconds", {}),
    "methods": (methods, "model,method,source,tokens,bytes_per_token,seconds", {"--model": {"default": "qwen3-8b"}}),
    "recall": (recall, "memory,length,depth,found,texts", {}),
    "compare": (compare, "contender,seq_len,time_ratio,peak_bytes,error", {}),
}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (draw, columns, arguments) in KINDS.items():
        kind = kinds.add_parser(name, help=draw.__doc__.split("\n")[0], description=draw.__doc__, formatter_class=raw)
        if columns:
            kind.add_argument("--in", dest="input", required=True, metavar="CSV")
        kind.add_argument("--out", required=True, metavar="PNG")
        kind.add_argument("--title", default="", help="the message above the picture")
        kind.add_argument("--caption", default="", help="small print below the picture")
        for argument, settings in arguments.items():
            kind.add_argument(argument, **settings)
    options = parser.parse_args()

    draw, columns, _ = KINDS[options.kind]
    try:
        if columns:
            options.rows = rows_of(options.input, columns)
        figure, title, facts, small = draw(options)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        refuse(f"{getattr(options, 'input', 'a log')}: {error}")
    try:
        write(figure, (options.title or title).format(**facts), options.caption or small, options.out)
    except (KeyError, IndexError, ValueError) as error:
        refuse(f"--title: what is drawn has no {error}; it has {', '.join(facts) or 'no numbers'}")
    except OSError as error:
        refuse(f"{options.out}: {error.strerror}")


if __name__ == "__main__":
    main()
