"""Draws what dev/compare/compare.py measured: time over that of `stream`, and peak memory, against sequence length.

plot_compare.py --in compare.csv --out compare.png [--caption TEXT]
"""

import csv

import plot_style as style
from plot_style import plt


def read(path):
    """{contender: [point, ...]} of the rows that have a result, in the file's order."""
    series = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if not row["error"]:
                point = {"seq_len": int(row["seq_len"]), "peak_gib": float(row["peak_bytes"]) / 2**30}
                if row["time_ratio"]:
                    point["time_ratio"] = float(row["time_ratio"])
                series.setdefault(row["contender"], []).append(point)
    return series


def draw(axes, series, value):
    for name, rows in series.items():
        points = [(row["seq_len"], row[value]) for row in rows if value in row]
        if points:
            colour = style.COLOURS.get(name.split("@")[0], style.GREY)
            axes.plot(*zip(*points), marker=".", color=colour, linestyle=":" if "@" in name else "-", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(style.tokens)
    axes.minorticks_off()
    axes.set_xticks(sorted({row["seq_len"] for rows in series.values() for row in rows}))
    axes.set_xlabel("tokens of a sequence (T)")


def main():
    options = style.parser(__doc__).parse_args()

    series = read(options.input)
    figure, (time, memory) = plt.subplots(1, 2, figsize=(style.WIDTH, 3.3))
    draw(time, series, "time_ratio")
    time.set_title("Time of forward and backward, over `stream`'s")
    time.set_ylim(0, None)
    draw(memory, series, "peak_gib")
    memory.set_title("Peak memory, GiB")
    memory.set_ylim(0, None)
    handles, labels = memory.get_legend_handles_labels()
    figure.tight_layout(w_pad=2.0)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncol=4)
    if options.caption:
        style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
