"""Draws lengths and times against the number of GPUs: what is planned as lines, what others measured as marks.

    plot_scale.py --in scale.csv --out scale.png [--caption TEXT]

scale.csv has the columns panel,series,source,gpus,tokens,seconds,mfu,communication_share. Source `plan` is ours; every other
one says who measured it.
"""

import csv

import plot_style as style
from plot_style import plt

LINES = {"gathered": "-", "ring": ":", "8": "--"}  # by the last word of a series
COLOURS = {"Qwen3-8B": "#1f6fb4", "Llama 3.1 8B": "#4f9a5c"}
MARKS = {"paper": "x", "ALST": "s", "TRL": "^"}


def read(path):
    """{panel: {(series, source): [row, ...]}}, numbers as numbers, None where there is none."""
    panels = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            point = {key: float(row[key]) if row[key] else None for key in ("gpus", "tokens", "seconds", "mfu")}
            panels.setdefault(row["panel"], {}).setdefault((row["series"], row["source"]), []).append(point)
    return panels


def model_colour(series):
    return next(colour for model, colour in COLOURS.items() if series.startswith(model))


def draw_models(axes, series, value):
    """Lines of plans and marks of others' runs against the number of GPUs, both axes logarithmic."""
    for (name, source), points in series.items():
        points = [point for point in points if point[value] is not None]
        x, y = [point["gpus"] for point in points], [point[value] for point in points]
        if not points:
            continue
        if source == "plan":
            axes.plot(x, y, color=model_colour(name), linestyle=LINES.get(name.split()[-1], "-"), label=name)
        else:
            label = None if any(text.get_label() == source for text in axes.lines) else source
            axes.plot(x, y, color=model_colour(name), linestyle="none", marker=MARKS[source], markersize=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("GPUs")
    axes.xaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes.legend(fontsize=7, frameon=False)


def draw_tables(axes, series, x, value, scale, colours):
    """Lines of plans and crosses of the paper."""
    for (name, source), points in series.items():
        axes.plot([point[x] for point in points], [point[value] / scale for point in points], color=colours[name],
                  linestyle="-" if source == "plan" else "none", marker=None if source == "plan" else "x", markersize=5,
                  label=f"{name}, {'ours' if source == 'plan' else 'paper'}")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(fontsize=7, frameon=False, loc="upper left", ncol=2)


def main():
    options = style.parser(__doc__).parse_args()

    panels = read(options.input)
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.5))
    draw_models(axes[0], panels["length"], "tokens")
    axes[0].yaxis.set_major_formatter(style.tokens)
    axes[0].set_title("Longest sequence (planned), tokens")
    draw_models(axes[1], panels["million"], "seconds")
    axes[1].yaxis.set_major_formatter(lambda n, _position: f"{n:g}")
    axes[1].set_title("A step of a million tokens (estimated), s")
    draw_tables(axes[2], panels["table4"], "gpus", "tokens", 1000,
                 {**style.COLOURS, "Adam in bf16": style.COLOURS["stream"], "no optimizer": "#8fb9dd"})
    axes[2].set_xlabel("GPUs, ZeRO-2, Qwen3-8B")
    axes[2].set_title("The paper's Table 4: k tokens (ours: planned)")
    draw_tables(axes[3], panels["table5"], "tokens", "seconds", 1, style.COLOURS)
    axes[3].xaxis.set_major_formatter(style.tokens)
    axes[3].set_xlabel("tokens of a sequence, 8 GPUs, ZeRO-2, Qwen3-8B")
    axes[3].set_title("The paper's Table 5: seconds (ours: estimated)")
    figure.tight_layout(w_pad=1.5)
    if options.caption:
        style.caption(figure, options.caption.replace("\\n", "\n"))
    style.save(figure, options.out)


if __name__ == "__main__":
    main()
