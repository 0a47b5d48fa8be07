"""Draws how one or more runs went, from their log.jsonl: the loss, and what people watch of the objective that was trained.

    plot_log.py --out run.png [--mean 20] [--level 3.21 --level-name "unigram entropy"] [--stages] RUN/log.jsonl...

A panel for the reward, the loss and every other metric (METRICS) that a log holds, runs over one another; what is zero to within rounding
(the loss of a rollout whose advantages sum to 0, say) is named below them. A line is every step, marks are validations. --mean: thin
lines, and thick ones of the mean of so many steps, as many before a step as behind it. A level is a horizontal line in the
panel of the loss, to compare with. --stages: the runs went on from one another, and are drawn one behind the other against the
tokens trained on; --mean is then of so many tokens.
"""

import argparse
import itertools
import json
import os

import plot_style as style
from plot_style import plt

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
COLUMNS = 3
ROUNDING = 1e-6  # below it a value is zero


def read(path):
    """({metric: ([(step, value)], [(step, value of a validation)])}, options, {step: tokens up to it}) of one log."""
    found, said, tokens = {}, {}, {0: 0}
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = {BEFORE.get(key, key): value for key, value in json.loads(line).items()}
            said = record.get("options", said)
            if "tokens" in record:
                tokens[record["step"]] = tokens.get(record["step"] - 1, 0) + record["tokens"]
            for metric in METRICS:
                for which, key in enumerate((metric, "val_" + metric)):
                    if record.get(key) is not None:
                        found.setdefault(metric, ([], []))[which].append((record["step"], record[key]))
    if not found:
        raise SystemExit(f"{path}: holds no step and no validation")
    return found, said, tokens


def follow(runs):
    """The runs of a --stages with tokens in place of steps, each behind the one before; [(begin in tokens, its --seq-len)]."""
    moved, begins, begin = [], [], 0
    for name, found, said, tokens in runs:
        at = {metric: tuple([(begin + tokens[step], value) for step, value in points] for points in series)
              for metric, series in found.items()}
        moved.append((name, at, said, tokens))
        begins.append((begin, said.get("seq_len")))
        begin += max(tokens.values())
    return moved, begins


def name_of(path):
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def is_zero(series):
    return all(abs(value) < ROUNDING for points in series for _, value in points)


def means(points, count):
    """The mean of the `count` points around each: as many before as behind it, fewer where there are no more."""
    values = [value for _, value in points]
    sides = [min(i, len(values) - 1 - i, count // 2) for i in range(len(values))]
    return [(step, sum(values[i - k:i + k + 1]) / (2 * k + 1)) for i, ((step, _), k) in enumerate(zip(points, sides))]


def draw(axes, steps, validations, colour, mean):
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


def caption(runs, mean, unit, zero):
    """The caption: what lines and marks are, and what is not drawn."""
    text = f"Thin lines: every step; thick: the mean of the {mean} {unit}s around it." if mean else "Lines: every step."
    validated = any(validations for _, found, *_ in runs for _, validations in found.values())
    text += (" Points: validations." if validated else "") + " Numbers: last values."
    return text + (f" Zero throughout: {', '.join(METRICS[metric] for metric in zero)}." if zero else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="log.jsonl")
    parser.add_argument("--out", required=True)
    parser.add_argument("--mean", type=int, default=0, help="also a line of the mean of so many steps")
    parser.add_argument("--stages", action="store_true", help="one run behind the other, against tokens; --mean is of tokens")
    parser.add_argument("--level", type=float)
    parser.add_argument("--level-name", default="")
    options = parser.parse_args()

    runs = [(name_of(path), *read(path)) for path in options.logs]
    unit, means_of, begins = "step", [options.mean for _ in runs], []
    if options.stages:
        runs, begins = follow(runs)
        unit, means_of = "token", [options.mean * max(tokens) // max(1, max(tokens.values())) for *_, tokens in runs]
    metrics = [metric for metric in METRICS if any(metric in found for _, found, *_ in runs)]
    zero = [metric for metric in metrics if all(is_zero(found.get(metric, ())) for _, found, *_ in runs)]
    metrics = [metric for metric in metrics if metric not in zero] or zero
    columns = min(len(metrics), COLUMNS)
    rows = -(-len(metrics) // columns)
    alone = len(metrics) == 1
    figure, axes = plt.subplots(rows, columns, squeeze=False,
                                figsize=(6.4, 3.6) if alone else (2.6 * columns, 2.3 * rows))
    for unused in axes.flat[len(metrics):]:
        unused.remove()
    colours = itertools.cycle(style.COLOURS[name] for name in ("stream", "full", "checkpoint", "paper", "hf", "llmc"))
    colours = [next(colours) for _ in runs] if not options.stages else [next(colours)] * len(runs)
    last = max(points[-1][0] for _, found, *_ in runs for series in found.values() for points in series if points)

    labels = {metric: [] for metric in metrics}
    for metric, axis in zip(metrics, axes.flat):
        for (name, found, *_), colour, mean in zip(runs, colours, means_of):
            if metric in found:
                point, what = draw(axis, *found[metric], colour, mean)
                if options.stages and found is not runs[-1][1]:
                    continue
                text = f"{what} {point[1]:.3f}" if alone else f"{point[1]:.3g}"
                labels[metric].append((point, f"{name}, {text}" if alone and len(runs) > 1 and not options.stages else text, colour))
        (axis.set_ylabel if alone else axis.set_title)(METRICS[metric])
        axis.set_xlabel("tokens trained on" if options.stages else "step")
        for begin, length in begins:
            axis.axvline(begin, color=style.GREY, linewidth=0.8)
            axis.annotate(f"T = {length}", (begin, 1), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
                          color=style.GREY)
        if options.stages:  # single steps of short sequences may lie far above
            axis.xaxis.set_major_formatter(style.tokens)
            axis.set_ylim(0, 1.1 * max(value for _, found, *_ in runs for _, value in found.get(metric, ((), ()))[1] or [(0, 1)]))
        axis.set_xlim(0, last)
        if metric in SHARES:
            axis.set_ylim(0, None)
    if "loss" in metrics and all(said.get("objective", "sft") == "sft" for *_, said, _ in runs):
        (axes[0, 0].set_ylabel if alone else axes.flat[metrics.index("loss")].set_title)("loss, nats per token")
    if "loss" in metrics and options.level is not None:
        axes.flat[metrics.index("loss")].axhline(options.level, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        labels["loss"].append(((last, options.level), f"{options.level_name} {options.level:.3f}", style.GREY))

    figure.tight_layout(w_pad=1.0 if alone else 4.0)
    for metric, axis in zip(metrics, axes.flat):
        style.label(axis, labels[metric])
    if not alone and len(runs) > 1 and not options.stages:
        lines = [plt.Line2D([], [], color=colour) for _, colour in zip(runs, colours)]
        figure.legend(lines, [name for name, *_ in runs], loc="lower left", bbox_to_anchor=(0, 1), ncol=len(runs))
    style.caption(figure, caption(runs, options.mean, unit, zero))
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
