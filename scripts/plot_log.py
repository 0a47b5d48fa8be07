"""Draws the loss of one or more runs, or what else their log.jsonl has of every step.

    plot_log.py --out loss.png [--level 3.21 --level-name "unigram entropy"] RUN/log.jsonl...
    plot_log.py --out reward.png --key reward RUN/log.jsonl

A thin line is the loss (or --key) of every step, marks joined by a line are validations. A level is a horizontal line to compare with.
"""

import argparse
import json
import os

import plot_style as style
from plot_style import plt


def read(path, key):
    """([(step, value of key)], [(step, validation loss)]) of one log; validations belong to the loss."""
    steps, validations = [], []
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record.get(key) is not None:
                steps.append((record["step"], record[key]))
            if key == "loss" and record.get("val_loss") is not None:
                validations.append((record["step"], record["val_loss"]))
    return steps, validations


def name_of(path):
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="log.jsonl")
    parser.add_argument("--out", required=True)
    parser.add_argument("--key", default="loss")
    parser.add_argument("--level", type=float)
    parser.add_argument("--level-name", default="")
    options = parser.parse_args()

    figure, axes = plt.subplots(figsize=(5.6, 3.3))
    colours = [*style.COLOURS.values()][::-1] + ["#4e9a51", "#7b5ea7", style.GREY]
    last = 0
    training = "training" if options.key == "loss" else options.key
    for i, path in enumerate(options.logs):
        colour = colours[i % len(colours)]
        steps, validations = read(path, options.key)
        if not steps and not validations:
            raise SystemExit(f"{path}: holds no step with \"{options.key}\" and no validation")
        label = "" if len(options.logs) == 1 else name_of(path) + ", "
        for points, what, look in ((steps, training, {"linewidth": 1.0, "alpha": 0.55}),
                                   (validations, "validation", {"marker": "o", "markersize": 4})):
            if points:
                axes.plot(*zip(*points), color=colour, **look)
                last = max(last, points[-1][0])
        # the two lines end close together, so one label names the one that matters
        points, what = (validations, "validation") if validations else (steps, training)
        axes.annotate(f"  {label}{what} {points[-1][1]:.3f}", points[-1], va="center", color=colour,
                      annotation_clip=False)
    if options.level is not None:
        axes.axhline(options.level, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(f"  {options.level_name} {options.level:.3f}", (last, options.level), va="center",
                      color=style.GREY, annotation_clip=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token" if options.key == "loss" else options.key)
    axes.set_xlim(0, last)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
