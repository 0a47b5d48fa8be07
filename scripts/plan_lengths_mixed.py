#!/usr/bin/env python3
"""Plans documents of all lengths on 64 H100 in nodes of eight, by `train plan`: Qwen3-8B with --sp auto, compared with the best fixed --sp, which is
dealt and packed in the same way. Nothing is run: memory is planned, times are estimates. Lengths are log-normal up to a maximum; medians,
deviations and maxima are assumed shapes of such corpora, not measured.

    plan_lengths_mixed.py                  prints a table; TRAIN=./train
    plan_lengths_mixed.py --points FILE    writes the bars of `plot.py mixed`: seconds of each rank in a step

Needs the standard library only.
"""

import csv
import sys

from log_export import end
from plan_lengths import plan

LENGTHS = {  # name: median, deviation of the logarithm, maximum
    "code": (1200, 1.2, 32768),
    "web text": (800, 1.4, 131072),
    "encyclopedias": (400, 1.6, 393216),
}
SAMPLES = 64, 256, 1024
DRAWN = 1, 256  # --zero and samples of the picture, as plot.py's caption says


def planned(name, zero, samples):
    median, sigma, most = LENGTHS[name]
    return plan(f"--init qwen3-8b --machine h100 --ranks 64 --sp auto --zero {zero} --samples {samples} "
                f"--lengths lognormal,median={median},sigma={sigma},max={most}")


def fixed_seconds(made):
    return made["level_seconds"][made["level_sp"].index(made["fixed_sp"])]


def groups(made):
    """Returns the sizes of groups with their share of the tokens, such as "1: 88 %, 2: 10 %": the largest shares, in the order of sizes."""
    shares = [(100 * tokens / made["step_tokens"], sp) for sp, tokens in zip(made["level_sp"], made["level_tokens"])]
    return ", ".join(f"{sp}: {share:.0f} %" for share, sp in shares if share >= 4.5)


def table():
    """Prints Markdown: a row for each distribution, number of samples and stage of ZeRO."""
    lines = ["| `--zero` | lengths | samples a step | thousand tokens/s | of the bound | best fixed | times as fast as it | groups of ranks: tokens |",
             "|---|---|---|---|---|---|---|---|"]
    for zero in 1, 3:
        for name in LENGTHS:
            for samples in SAMPLES:
                made = planned(name, zero, samples)
                lines.append(f"| {zero} | {name} | {samples} | {made['step_tokens'] / made['step_seconds'] / 1000:.0f} | "
                             f"{100 * made['deal_bound']:.0f} % | `--sp {made['fixed_sp']}` | "
                             f"{fixed_seconds(made) / made['step_seconds']:.2f} | {groups(made)} |")
    return "\n".join(lines)


def points(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["lengths", "way", "rank", "sp", "seconds"])
        for name in LENGTHS:
            made = planned(name, *DRAWN)
            sides = [(f"--sp {made['fixed_sp']}", [(made["fixed_sp"], made["fixed_rank_seconds"])]),
                     ("--sp auto", list(zip(made["level_sp"], made["rank_seconds"])))]
            for way, levels in sides:
                for sp, ranks in levels:
                    out.writerows([name, way, rank, sp, f"{seconds:.6g}"] for rank, seconds in enumerate(ranks) if seconds)


def main():
    if not sys.argv[1:]:
        print(table())
    elif len(sys.argv) == 3 and sys.argv[1] == "--points":
        points(sys.argv[2])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    end(main)
