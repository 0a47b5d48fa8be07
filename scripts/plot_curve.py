"""Draws the loss by position in the sequence: how far back a model looks.

    plot_curve.py --in curve.csv --out curve.png [--title TEXT] [--caption TEXT]

curve.csv has the columns series,begin,end,loss: nats per token over the positions from begin to before end, as `train eval --curve` has
them. A point stands in the middle of its positions, on a logarithmic axis.
"""

import csv
import math

import plot_style as style
from plot_style import plt

COLOURS = [style.COLOURS[name] for name in ("checkpoint", "stream-keep", "stream", "full", "hf")]


def read(path):
    """{series: [(middle of the positions, loss)]}"""
    found = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            middle = math.sqrt(max(int(row["begin"]), 1) * int(row["end"]))
            found.setdefault(row["series"], []).append((middle, float(row["loss"])))
    return found


def main():
    parser = style.parser(__doc__)
    parser.add_argument("--title", default="")
    options = parser.parse_args()

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.set_xscale("log", base=2)
    labels = []
    for (name, points), colour in zip(read(options.input).items(), COLOURS):
        axes.plot(*zip(*points), color=colour, marker="o", markersize=4)
        labels.append((points[-1], f"{name}: {points[-1][1]:.3f}", colour))
    axes.set_title(options.title)
    axes.set_xlabel("position in the sequence, tokens")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_formatter(style.tokens)
    figure.tight_layout()
    style.label(axes, labels)
    if options.caption:
        style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
