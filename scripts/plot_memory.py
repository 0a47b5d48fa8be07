"""Draws memory against sequence length.

    plot_memory.py --in memory.csv --out memory.png --title TEXT [--limit NAME=BYTES]... [--log] [--caption TEXT]

memory.csv has the columns series,method,source,seq_len,bytes. A series is labelled with its name, in which | breaks the line. Source
`plan` is a line, `pass` a dashed one, every other one (`measured`, `paper`) marks. A limit is a horizontal line; under the highest
one all series end, and their labels stand above it with the length that they reach.
"""

import csv

import plot_style as style
from plot_style import plt

GIB = 2**30
MARKS = {"measured": "o", "paper": "x"}
LINES = {"plan": "-", "pass": (0, (5, 2))}


def read(path):
    """{(series, method, source): [(seq_len, bytes), ...]}, everything in the file's order."""
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            point = int(row["seq_len"]), float(row["bytes"])
            found.setdefault((row["series"], row["method"], row["source"]), []).append(point)
    return found


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


def main():
    parser = style.parser(__doc__)
    parser.add_argument("--title", default="")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=BYTES")
    parser.add_argument("--log", action="store_true", help="logarithmic axes")
    options = parser.parse_args()

    limits = [(float(size), name) for name, size in (limit.rsplit("=", 1) for limit in options.limit)]
    top = max(limits, default=(None, ""))[0]
    figure, axes = plt.subplots(figsize=(style.WIDTH, 4.2 if top else 3.6))
    ends = []
    for (name, method, source), points in read(options.input).items():
        colour = style.COLOURS[method]
        if source in LINES:
            points = below(sorted(points), top)
            axes.plot(*zip(*points), color=colour, linestyle=LINES[source])
            for size, _ in limits:
                if points[0][1] < size < top:
                    end = below(points, size)[-1]
                    axes.annotate(style.tokens(round(end[0], -3)), end, xytext=(0, 4), textcoords="offset points", ha="right",
                                  color=colour)
        else:
            axes.plot(*zip(*points), linestyle="none", marker=MARKS[source], markersize=5, color=colour, clip_on=False)
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
    axes.xaxis.set_major_formatter(style.tokens)
    axes.yaxis.set_major_formatter(style.size)
    for size, name in limits:
        axes.axhline(size, color=style.GREY, linewidth=1.0, linestyle=(0, (2, 2)), clip_on=False)
        axes.annotate(f"{name}\n{size / GIB:.1f} GiB", (1, size), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", color=style.GREY, annotation_clip=False)
    figure.tight_layout()
    if top:
        axes.set_title(options.title, pad=44)
        for (end, value), name, colour in ends:
            text = f"{name}\n{style.tokens(round(end, -3))}"
            axes.annotate(text, (end, top), textcoords="offset points", xytext=(0, 4), ha="center", va="bottom", color=colour,
                          annotation_clip=False)
    else:
        axes.set_title(options.title)
        style.label(axes, ends)
    if options.caption:
        style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
