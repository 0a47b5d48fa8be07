"""How every picture of this project looks. Imported by the plot_*.py beside it."""

import argparse

import matplotlib

matplotlib.use("Agg")  # draws files, needs no display
import matplotlib.pyplot as plt

# One colour per method, and per program of others that it is compared with, the same in every picture; told apart in grey too.
COLOURS = {"full": "#c0504d", "checkpoint": "#d9a13b", "stream": "#1f6fb4",
           "stream-keep": "#5aa9dd", "hf": "#7a5195", "hf-chunked": "#b07cc6", "paper": "#4f9a5c", "llmc": "#333333"}
GREY = "#666666"

plt.rcParams.update({
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
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


def caption(figure, text):
    """Small print below a picture."""
    figure.text(0.01, 0.0, text, ha="left", va="top", fontsize=7.5, color=GREY, linespacing=1.4)


def save(figure, path):
    figure.savefig(path, bbox_inches="tight", pad_inches=0.12)
    plt.close(figure)
