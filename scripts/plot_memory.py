"""Draws memory against sequence length, one panel per model.

    plot_memory.py --in memory.csv --out memory.png [--limit-gib 78] [--log] [--caption TEXT]

memory.csv has the columns panel,method,source,seq_len,bytes. Source `plan` is drawn as a line; every other one (`measured`,
`paper`) as marks, which the note below the axes explains.
"""

import csv

import plot_style as style
from plot_style import plt

GIB = 2**30
MARKS = {"measured": "o", "paper": "x"}


def read(path):
    """{panel: {(method, source): [(seq_len, bytes), ...]}}, everything in the file's order."""
    panels = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            series = panels.setdefault(row["panel"], {})
            series.setdefault((row["method"], row["source"]), []).append((int(row["seq_len"]), float(row["bytes"])))
    return panels


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


def draw(axes, title, series, limit, log):
    scale = 1 if log else GIB
    for (method, source), points in series.items():
        colour = style.COLOURS[method]
        if source == "plan":
            line = below(sorted(points), limit)
            axes.plot([n for n, _ in line], [value / scale for _, value in line], color=colour)
            end, value = line[-1]
            hits = bool(limit) and value >= limit
            text = f"{method}\n{style.tokens(round(end, -2 if end < 1e4 else -3))}" if hits else f" {method}"
            axes.annotate(text, (end, value / scale), textcoords="offset points", xytext=(0, 5) if hits else (3, 0),
                          ha="center" if hits else "left", va="bottom" if hits else "center", color=colour,
                          annotation_clip=False)
        else:
            axes.plot([n for n, _ in points], [value / scale for _, value in points], linestyle="none",
                      marker=MARKS[source], markersize=4, color=colour, clip_on=False)
    axes.set_title(title, pad=32 if limit else 8)
    axes.xaxis.set_major_formatter(style.tokens)
    axes.set_xlabel("tokens of a sequence (T)")
    if limit:
        axes.axhline(limit / scale, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(style.size)
    else:
        axes.set_xlim(0, None)
        axes.set_ylim(0, limit / scale if limit else None)
        axes.set_ylabel("GiB")


def main():
    parser = style.parser(__doc__)
    parser.add_argument("--limit-gib", type=float, help="memory there is; lines end there, labelled with their length")
    parser.add_argument("--log", action="store_true", help="logarithmic axes")
    options = parser.parse_args()

    panels = read(options.input)
    limit = options.limit_gib * GIB if options.limit_gib else None
    width = 5.6 if len(panels) == 1 else 3.4 * len(panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.3), squeeze=False)
    for axis, (title, series) in zip(axes[0], panels.items()):
        draw(axis, title, series, limit, options.log)
    figure.tight_layout(w_pad=2.0)
    if options.caption:
        style.caption(figure, options.caption.replace("\\n", "\n"))
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
