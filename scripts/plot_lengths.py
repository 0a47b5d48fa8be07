"""Draws the estimated time of a step against the length of its sequence, for the ways to train on one card; what others published as marks.

    plot_lengths.py --in lengths.csv --out lengths.png [--title TEXT] [--caption TEXT]

lengths.csv is what plan_lengths.py --points writes, with the columns series,source,tokens,seconds. A length that was published without
a time is a mark on the lower edge.
"""

import csv

import plot_style as style
from plot_style import plt

COLOURS = [style.COLOURS[name] for name in ("stream-keep", "stream", "checkpoint", "full", "hf")]
LINES = ["-", (0, (5, 2)), (0, (1, 1.5)), "-", (0, (5, 2))]


def main():
    parser = style.parser(__doc__)
    parser.add_argument("--title", default="")
    options = parser.parse_args()

    series = {}
    with open(options.input, newline="") as file:
        for row in csv.DictReader(file):
            point = int(row["tokens"]), float(row["seconds"]) if row["seconds"] else None
            series.setdefault((row["series"], row["source"]), []).append(point)
    figure, axes = plt.subplots(figsize=(style.WIDTH, 4.0))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lines = [(name, points) for (name, source), points in series.items() if source == "plan"]
    for (name, points), colour, line in zip(lines, COLOURS, LINES):
        axes.plot(*zip(*points), color=colour, linestyle=line, marker=".", label=name)
    low = min(y for _, points in lines for _, y in points) / 2
    axes.set_ylim(low, None)
    for (name, source), points in series.items():
        for x, y in points if source != "plan" else []:
            axes.plot([x], [y or low], color=style.GREY, marker="x" if y else "|", markersize=7, clip_on=False)
            axes.annotate(name, (x, y or low), xytext=(0, 8), textcoords="offset points", ha="center", color=style.GREY)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("seconds of a step, estimated")
    axes.xaxis.set_major_formatter(style.tokens)
    axes.yaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes.set_title(options.title)
    axes.legend()
    figure.tight_layout()
    if options.caption:
        style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
