"""How every picture of this project looks. Imported by the plot_*.py beside it."""

import argparse
import textwrap

import matplotlib

matplotlib.use("Agg")  # draws files, needs no display
import matplotlib.pyplot as plt

# One colour per method, and per program of others that it is compared with, the same in every picture; told apart in grey too.
COLOURS = {"full": "#c0504d", "checkpoint": "#b9770e", "stream": "#1f6fb4", "mst": "#d98cb3", "seco": "#1f7a6d", "spaco": "#7fcdbb",
           "stream-keep": "#5aa9dd", "hf": "#7a5195", "hf-chunked": "#b07cc6", "paper": "#4f9a5c", "llmc": "#333333"}
GREY = "#555555"

# A README shows a picture about 900 pixels wide. At 220 dots per inch it then has two dots to a pixel, and 9 points are 14 pixels.
WIDTH = 7.6  # inches, at most
LINE = 11  # points between two labels

plt.rcParams.update({
    "savefig.dpi": 220,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.linewidth": 1.6,
})


def parser(doc):
    """Of a script that makes a picture from a file; `doc` says which."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--in", dest="input", required=True)
    made.add_argument("--out", required=True)
    made.add_argument("--caption", default="")
    return made


def tokens(n, _position=None):
    """8192 -> 8k, 262144 -> 256k, 110000 -> 110k: powers of two in binary thousands, everything else in decimal ones."""
    unit = 1024 if n % 1024 == 0 else 1000
    return f"{n:g}" if n < unit else f"{n / unit:g}k" if n < unit * unit else f"{n / unit / unit:g}M"


def size(n, _position=None):
    """Bytes with a binary unit: 1610612736 -> 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.3g} {unit}"
        n /= 1024


def label(axes, labels):
    """Words at the ends of lines, [(point, text, colour)], pushed up where they would lie on one another."""
    below = float("-inf")
    for point, text, colour in sorted(labels, key=lambda entry: entry[0][1]):
        at = axes.transData.transform(point)[1] * 72 / axes.figure.dpi
        below = max(at, below + LINE)
        axes.annotate(text, point, xytext=(6, below - at), textcoords="offset points", va="center", color=colour,
                      annotation_clip=False)


def caption(figure, text):
    """Small print below a picture, in lines that are as wide."""
    columns = int(17 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, columns) for line in text.replace("\\n", "\n").split("\n"))
    figure.text(0.01, 0.0, text, ha="left", va="top", fontsize=8.5, color=GREY, linespacing=1.4)


def save(figure, path):
    figure.savefig(path, bbox_inches="tight", pad_inches=0.12)
    plt.close(figure)
