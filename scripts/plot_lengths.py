"""Draws the estimated time of a step against the length of its sequence, for the ways to train on one card; what others published as marks.

    plot_lengths.py --in lengths.csv --out lengths.png [--caption TEXT]

lengths.csv is what plan_lengths.py --points writes, with the columns series,source,tokens,seconds. A length that was published without
a time is a mark on the lower edge.
"""

import csv

import plot_style as style
from plan_lengths import tokens
from plot_style import plt

COLOURS = [style.COLOURS[name] for name in ("stream-keep", "stream", "checkpoint", "full", "hf")]
WIDEST = 7  # points: lines lie on one another, the first below
CAPTION = ("Plans and estimates of ./train plan, nothing was run: 78.1 GiB of the card, bf16, AdamW with fp32 states, one sequence a step. "
           "Cross: published with a time of a step; ticks: without one.")


def main():
    parser = style.parser(__doc__)
    parser.set_defaults(caption=CAPTION)
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
    for i, (name, points) in enumerate(lines):
        axes.plot(*zip(*points), color=COLOURS[i], linewidth=WIDEST * (1 - i / len(lines)), solid_capstyle="butt",
                  label=f"{name}: to {tokens(points[-1][0])}")
        axes.plot(*points[-1], color=COLOURS[i], marker="o", markersize=WIDEST + 1 - i)
    low = min(y for _, points in lines for _, y in points) / 2
    axes.set_ylim(low, None)
    others = sorted((x, y, name) for (name, source), points in series.items() if source != "plan" for x, y in points)
    for i, (x, y, name) in enumerate(others):
        axes.plot([x], [y or low], color=style.GREY, marker="x" if y else "|", markersize=8, clip_on=False)
        axes.annotate(f"{name}: {tokens(x)}", (x, y or low), xytext=(-6, 3 if y else 8 + style.LINE * i),
                      textcoords="offset points", ha="right", color=style.GREY)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("seconds of a step, estimated")
    axes.xaxis.set_major_formatter(style.tokens)
    axes.yaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes.set_title("Qwen3-8B on one H100: seconds of a step, estimated")
    axes.legend()
    figure.tight_layout()
    style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
