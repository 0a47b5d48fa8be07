"""Draws how one or more runs went, from their log.jsonl: the loss, and what people watch of the objective that was trained.

    plot_log.py --out run.png [--mean 20] [--level 3.21 --level-name "unigram entropy"] RUN/log.jsonl...

A panel for the loss and for every other metric (METRICS) that a log holds, runs over one another. A thin line is every step,
marks are validations. --mean: also a line of the mean of the last so many steps. A level is a horizontal line in the panel of
the loss, to compare with.
"""

import argparse
import itertools
import json
import os

import plot_style as style
from plot_style import plt

METRICS = {  # of log.jsonl, in the order of the panels; validations have val_ before the name
    "loss": "loss",
    "rewards/accuracies": "share of pairs ranked right",
    "rewards/margins": "margin of rewards, chosen less rejected",
    "reward": "mean reward",
    "kl": "KL from the reference, nats per token",
    "clip_fraction": "share of tokens clipped",
    "entropy": "entropy, nats per token",
    "completion_length": "tokens of a completion",
}
SHARES = ("rewards/accuracies", "clip_fraction")  # drawn from 0
COLUMNS = 3
LINE_HEIGHT = 10  # points between two labels


def read(path):
    """({metric: ([(step, value)], [(step, value of a validation)])}, objective) of one log."""
    found, objective = {}, "sft"
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            objective = record.get("options", {}).get("objective", objective)
            for metric in METRICS:
                for which, key in enumerate((metric, "val_" + metric)):
                    if record.get(key) is not None:
                        found.setdefault(metric, ([], []))[which].append((record["step"], record[key]))
    if not found:
        raise SystemExit(f"{path}: holds no step and no validation")
    return found, objective


def name_of(path):
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def means(points, count):
    """The mean of each point and the count - 1 before it; the first ones have fewer."""
    values = [value for _, value in points]
    return [(step, sum(values[max(0, i + 1 - count):i + 1]) / min(i + 1, count)) for i, (step, _) in enumerate(points)]


def draw(axes, steps, validations, colour, mean):
    """One run's lines in one panel; returns the point that its label stands at, and what that is."""
    if steps:
        axes.plot(*zip(*steps), color=colour, linewidth=1.0, alpha=0.25 if mean else 0.55)
    if mean and steps:
        steps = means(steps, mean)
        axes.plot(*zip(*steps), color=colour)
    if validations:
        axes.plot(*zip(*validations), color=colour, linestyle="none" if mean else "-", marker="o", markersize=4)
    # the two lines end close together, so one label names the one that matters
    return (validations[-1], "validation") if validations else (steps[-1], "training")


def label(axes, labels):
    """Words at the ends of lines, [(point, text, colour)], pushed up where they would lie on one another."""
    below = float("-inf")
    for point, text, colour in sorted(labels, key=lambda entry: entry[0][1]):
        at = axes.transData.transform(point)[1] * 72 / axes.figure.dpi
        below = max(at, below + LINE_HEIGHT)
        axes.annotate(f" {text}", point, xytext=(3, below - at), textcoords="offset points", va="center", color=colour,
                      annotation_clip=False)


def caption(runs, mean):
    """What lines and marks are."""
    lines = f"Thin lines: every step; others: the mean of the last {mean}." if mean else "Thin lines: every step."
    validated = any(validations for _, found, _ in runs for _, validations in found.values())
    return lines + (" Marks: validations, whose last value is given." if validated else " Given is the last value.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="log.jsonl")
    parser.add_argument("--out", required=True)
    parser.add_argument("--mean", type=int, default=0, help="also a line of the mean of so many steps")
    parser.add_argument("--level", type=float)
    parser.add_argument("--level-name", default="")
    options = parser.parse_args()

    runs = [(name_of(path), *read(path)) for path in options.logs]
    metrics = [metric for metric in METRICS if any(metric in found for _, found, _ in runs)]
    columns = min(len(metrics), COLUMNS)
    rows = -(-len(metrics) // columns)
    alone = len(metrics) == 1
    figure, axes = plt.subplots(rows, columns, squeeze=False,
                                figsize=(5.6, 3.3) if alone else (3.6 * columns, 2.6 * rows))
    for unused in axes.flat[len(metrics):]:
        unused.remove()
    colours = itertools.cycle([*style.COLOURS.values()][::-1] + ["#4e9a51", "#7b5ea7", style.GREY])
    colours = [next(colours) for _ in runs]
    last = max(points[-1][0] for _, found, _ in runs for series in found.values() for points in series if points)

    labels = {metric: [] for metric in metrics}
    for metric, axis in zip(metrics, axes.flat):
        for (name, found, _), colour in zip(runs, colours):
            if metric in found:
                point, what = draw(axis, *found[metric], colour, options.mean)
                text = f"{what} {point[1]:.3f}" if alone else f"{point[1]:.4g}"
                labels[metric].append((point, f"{name}, {text}" if alone and len(runs) > 1 else text, colour))
        (axis.set_ylabel if alone else axis.set_title)(METRICS[metric])
        axis.set_xlabel("step")
        axis.set_xlim(0, last)
        if metric in SHARES:
            axis.set_ylim(0, None)
    if "loss" in metrics and all(objective == "sft" for *_, objective in runs):
        axes[0, 0].set_ylabel("loss, nats per token")
    if "loss" in metrics and options.level is not None:
        axes[0, 0].axhline(options.level, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        labels["loss"].append(((last, options.level), f"{options.level_name} {options.level:.3f}", style.GREY))

    figure.tight_layout(w_pad=1.0 if alone else 4.0)
    for metric, axis in zip(metrics, axes.flat):
        label(axis, labels[metric])
    if not alone:
        if len(runs) > 1:
            lines = [plt.Line2D([], [], color=colour) for _, colour in zip(runs, colours)]
            figure.legend(lines, [name for name, *_ in runs], loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                          ncol=len(runs))
        style.caption(figure, caption(runs, options.mean))
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
