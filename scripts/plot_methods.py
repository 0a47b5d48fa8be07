"""Draws memory and time of every method against the length of a sequence, a pair of panels for each model; the paper's measurements as marks.

    plot_methods.py --in methods.csv --out methods.png [--caption TEXT]

methods.csv is what plan_methods.py --points writes, with the columns model,method,source,tokens,bytes_per_token,seconds.
"""

import csv

import plot_style as style
from plot_style import plt

COLUMNS = 3
MARKS = {"checkpoint": "x", "mst": "+", "stream": "."}
WIDEST = 6  # points: where lines lie on one another the first is below
CAPTION = ("Plans and estimates of ./train plan for an A100, nothing was run: one forward and backward pass of all weights in bf16, everything "
           "on the device. Above: memory that a further token takes, beside what does not grow. spaco: a backward for one chunk in four; its "
           "memory is seco's. Marks: the paper's own measurements on an A800 (arXiv 2506.03077, Figure 3 and Table 1) of checkpointing (x), "
           "Mini-Sequence (+) and StreamBP (.).")


def read(path):
    """{model: {(method, source): [(tokens, bytes a token or None, seconds or None), ...]}}, in the file's order."""
    found = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = (int(row["tokens"]), *(float(row[key]) if row[key] else None for key in ("bytes_per_token", "seconds")))
            found.setdefault(row["model"], {}).setdefault((row["method"], row["source"]), []).append(point)
    return found


def panel(axes, series, value):
    """value: 1: kilobytes a token, 2: seconds"""
    scale = 1e-3 if value == 1 else 1
    for i, ((method, source), points) in enumerate(series.items()):
        known = [(point[0], scale * point[value]) for point in points if point[value] is not None]
        if not known or (value == 1 and method == "spaco"):
            continue
        if source == "plan":
            axes.plot(*zip(*known), color=style.COLOURS[method], label=method,
                      linewidth=max(WIDEST - i, 1), solid_capstyle="butt")
        else:
            axes.plot(*zip(*known), linestyle="none", marker=MARKS[method], markersize=4.5, color=style.COLOURS[method])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(style.tokens)
    axes.xaxis.set_major_locator(plt.LogLocator(base=4))
    axes.yaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes.yaxis.set_minor_locator(plt.NullLocator())
    if value == 1:
        axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))


def main():
    parser = style.parser(__doc__)
    parser.set_defaults(caption=CAPTION)
    options = parser.parse_args()
    found = read(options.input)
    rows = (len(found) + COLUMNS - 1) // COLUMNS
    figure, axes = plt.subplots(2 * rows, COLUMNS, figsize=(style.WIDTH, 4 * rows), squeeze=False, sharex=True)
    for i, (model, series) in enumerate(found.items()):
        for value in (1, 2):
            here = axes[i // COLUMNS + (value - 1) * rows][i % COLUMNS]
            panel(here, series, value)
            here.set_title(model)
            if i % COLUMNS == 0:
                here.set_ylabel("kB of a further token" if value == 1 else "seconds, estimated")
    for here in axes[-1]:
        here.set_xlabel("tokens of a sequence")
    for here in axes.flat[len(found) :] if len(found) % COLUMNS else []:
        here.set_visible(here.has_data())
    axes[rows][0].legend(loc="upper left", labelspacing=0.2, borderpad=0.1, handlelength=1.2)
    figure.tight_layout()
    style.caption(figure, options.caption)
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
