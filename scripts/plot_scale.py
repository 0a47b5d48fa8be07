"""Draws what a plan says of many GPUs: the longest sequence, and beside it the time of a step, which is an estimate.

    plot_scale.py --in scale.csv --out scale.png [--caption TEXT]

scale.csv has the columns panel,series,source,gpus,tokens,seconds,mfu,communication_share. Drawn are the rows of Qwen3-8B whose source is
`plan`: what others measured is in the tables of plan_scale.sh, never on the axes of an estimate.
"""

import csv

import plot_style as style
from plot_style import plt

MODEL = "Qwen3-8B"
COLOUR = style.COLOURS["stream"]
SERIES = {  # of a panel, by what follows the model's name: the words at the end of its line, and how that is drawn
    "sp = GPUs ring": ("all share one,\npassed around", "-"),
    "sp = GPUs gathered": ("all share one,\ngathered", (0, (5, 2))),
    "sp 8": ("eight share one", (0, (1, 1.5))),
    "sp = GPUs": ("", "-"),
}


def draw(axes, rows, panel, value, title):
    ends = []
    for series, (words, line) in SERIES.items():
        points = [(float(row["gpus"]), float(row[value])) for row in rows
                  if (row["panel"], row["series"], row["source"]) == (panel, f"{MODEL} {series}", "plan")]
        if points:
            axes.plot(*zip(*points), color=COLOUR, linestyle=line)
            ends.append((points[-1], words, COLOUR))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("H100 GPUs")
    axes.xaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes.set_title(title)
    return ends


def main():
    options = style.parser(__doc__).parse_args()

    with open(options.input, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, (length, time) = plt.subplots(1, 2, figsize=(style.WIDTH, 3.6))
    ends = draw(length, rows, "length", "tokens", "Longest sequence, tokens (planned)")
    length.yaxis.set_major_formatter(style.tokens)
    draw(time, rows, "million", "seconds", "Step of a million tokens, s (estimated)")
    time.yaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    figure.tight_layout(w_pad=7)
    style.label(length, ends)
    if options.caption:
        style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
