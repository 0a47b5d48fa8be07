"""Turns records into rows, checks, Markdown and CSV. scripts/tables.py makes docs/measured.md's tables with `markdown`."""

import csv
import statistics

# Relative differences to `stream` that rounding explains: of the loss, of the norm of all gradients, of one tensor's
# gradient (L2). bf16: implementations that round differently are each a few percent from the exact gradient.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "norm": 1e-3, "gradient": 1e-3},
    "bf16": {"loss": 3e-3, "norm": 5e-2, "gradient": 0.15},
}
CHECKS = ("loss", "norm", "gradient")
COLUMNS = (
    "contender",
    "seq_len",
    "batch",
    "chunk",
    "passes",
    "seconds",
    "tokens_per_second",
    "share_of_peak",
    "peak_bytes",
    "peak_of",
    "time_ratio",
    "memory_ratio",
    "loss_difference",
    "norm_difference",
    "gradient_difference",
    "gradient_worst",
    "wrong",
    "error",
    "attention",
    "note",
)
KEYS = (
    "shape",
    "device_name",
    "on_gpu",
    "driver",
    "dtype",
    "batch",
    "date",
    "commit",
    "command",
    "peak_tflops",
    "peak_from",
    "memory_limit",
    "rows",
    "longest",
    "left_out",
)  # of compare.json, that `markdown` reads
LONGEST_COLUMNS = ("contender", "seq_len", "peak_bytes", "how", "ratio", "error")


def relative(a, b):
    return abs(a - b) / abs(b) if b else float("inf")


# ---- rows ----------------------------------------------------------------------------------------------------------
def row_of(records, batch):
    """Returns the row of a contender at a length: medians over all rounds; skips the first of several passes of a process."""
    first = records[0]
    errors = [r["result"]["error"] for r in records if r["result"].get("error")]
    row = dict.fromkeys(COLUMNS)
    row.update(
        contender=first["contender"],
        seq_len=first["seq_len"],
        batch=batch,
        error=errors[0] if errors else None,
        wrong=[],
    )
    if errors:
        return row, None
    results = [r["result"] for r in records]
    seconds = [s for result in results for s in result["seconds"][1:] or result["seconds"]]
    row.update(
        chunk=results[0].get("chunk"),
        passes=len(seconds),
        seconds=statistics.median(seconds),
        peak_of=results[0].get("peak_of"),
        peak_bytes=max(result["peak_bytes"] for result in results),
        attention=results[0].get("attention"),
        note=results[0].get("note"),
    )
    gradients = next((r["gradients"] for r in records if "gradients" in r), None)
    if gradients and "error" in gradients:
        row.update(gradient_worst=gradients["error"], gradient_difference=float("inf"))
    elif gradients:
        row["gradient_worst"] = max(gradients, key=lambda name: worst_last(gradients[name]))
        row["gradient_difference"] = gradients[row["gradient_worst"]]
    return row, results


def worst_last(difference):
    return float("inf") if difference != difference else difference  # NaN is worse than anything


def against(row, results, yardstick, yardstick_results, tolerances):
    """Adds ratios to `stream` at the same length, and differences beyond the tolerance."""
    row["time_ratio"] = row["seconds"] / yardstick["seconds"]
    row["memory_ratio"] = row["peak_bytes"] / yardstick["peak_bytes"]
    wanted = yardstick_results[0]
    row["loss_difference"] = max((relative(r["loss"], wanted["loss"]) for r in results), key=worst_last)
    row["norm_difference"] = max((relative(r["grad_norm"], wanted["grad_norm"]) for r in results), key=worst_last)
    row["wrong"] = [
        check
        for check in CHECKS
        if row[check + "_difference"] is not None and not row[check + "_difference"] <= tolerances[check]
    ]


def rows_of(records, names, seq_lens, batch, dtype, peak, on_gpu):
    """Returns rows by length, then contender. `names`: contenders; the first is the reference."""
    rows = []
    for T in seq_lens:
        found = {
            name: row_of([r for r in records if r["contender"] == name and r["seq_len"] == T], batch) for name in names
        }
        yardstick, yardstick_results = found[names[0]]
        for row, results in found.values():
            if results and yardstick_results:
                against(row, results, yardstick, yardstick_results, TOLERANCES[dtype])
                row["tokens_per_second"] = batch * T / row["seconds"]
                if peak:
                    row["share_of_peak"] = yardstick_results[0]["model_flops"] / row["seconds"] / (peak * 1e12)
        rows += [row for row, _ in found.values()]
    for row in rows:
        if not on_gpu:  # times of a machine that is shared are good for ratios within one run
            row["seconds"] = row["tokens_per_second"] = None
    return rows


def longest_ratios(longest):
    """Returns the ratio of `stream`'s longest length to the contender's."""
    most = longest[0]["seq_len"]
    for row in longest:
        row["ratio"] = most / row["seq_len"] if most and row["seq_len"] else None
    return longest


def failures(rows, longest):
    """Returns lines about errors and failures, for exit status 1. Too little memory or time is not a failure."""
    lines = []
    for row in rows:
        where = f"{row['contender']}, T = {row['seq_len']}"
        lines += [
            f"{where}: {check} differs from stream's by {row[check + '_difference']:.2g}"
            + (f" ({row['gradient_worst']})" if check == "gradient" else "")
            for check in row["wrong"]
        ]
        if row["error"] and row["error"].startswith("failed"):
            lines.append(f"{where}: {row['error']}")
    return lines + [f"{row['contender']}, longest: {row['error']}" for row in longest if row["error"]]


# ---- Markdown ------------------------------------------------------------------------------------------------------
def tokens(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def memory(n):
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"


def difference(row, check):
    value = row[check + "_difference"]
    return "" if value is None else f"{value:.1e}" + (" WRONG" if check in row["wrong"] else "")


def line(cells):
    return "| " + " | ".join(cells) + " |"


CELLS = {  # column: (heading, cell of a row)
    "contender": ("contender", lambda r: f"`{r['contender']}`" + (" *" if r["note"] else "")),
    "seq_len": ("T", lambda r: tokens(r["seq_len"])),
    "seconds": ("seconds", lambda r: f"{r['seconds']:.3g}"),
    "tokens_per_second": ("tokens/s", lambda r: f"{r['tokens_per_second']:.0f}"),
    "share_of_peak": ("of peak", lambda r: f"{100 * r['share_of_peak']:.1f} %"),
    "peak_bytes": ("peak memory", lambda r: memory(r["peak_bytes"])),
    "time_ratio": ("time, over `stream`'s", lambda r: f"{r['time_ratio']:.2f}"),
    "memory_ratio": ("memory, over `stream`'s", lambda r: f"{r['memory_ratio']:.2f}"),
    "loss": ("loss", lambda r: difference(r, "loss")),
    "norm": ("gradient norm", lambda r: difference(r, "norm")),
    "gradient": ("gradient", lambda r: difference(r, "gradient")),
}


def table(rows):
    """Returns the lines of a table, without columns that have no value."""
    columns = [
        name for name in CELLS if any(r.get(name) is not None or r.get(name + "_difference") is not None for r in rows)
    ]
    lines = [line(CELLS[name][0] for name in columns), "|---" * len(columns) + "|"]
    for row in rows:
        cells = [CELLS[name][1](row) if row.get(name) is not None or name in CHECKS else "" for name in columns]
        if row["error"]:
            cells = cells[:2] + [row["error"].replace("|", "/")] + [""] * (len(columns) - 3)
        lines.append(line(cells))
    return lines


def longest_table(longest):
    lines = [line(["contender", "longest T", "peak memory there", "`stream`'s over it"]), "|---|---|---|---|"]
    for row in longest:
        T = str(row["seq_len"]) if row["seq_len"] else ""
        peak = memory(row["peak_bytes"]) if row["peak_bytes"] else ""
        lines.append(
            line(
                [
                    f"`{row['contender']}`",
                    f"{T} {row['error'] or ''}".strip(),
                    peak,
                    f"{row['ratio']:.2f}" if row["ratio"] else "",
                ]
            )
        )
    return lines


def markdown(run):
    """Returns the tables of one run with their description: `run` is compare.json."""
    peak = (
        " Share of peak: causal model FLOPs, recomputation not counted, over "
        f"{run['peak_tflops']:.3g} TFLOP/s ({run['peak_from']})."
        if run["peak_tflops"]
        else ""
    )
    times = "" if run["on_gpu"] else " Times of a CPU that is shared are given as ratios only."
    where = " ".join(filter(None, [run["device_name"], run["driver"] and f"(driver {run['driver']})"]))
    lines = [
        f"{run['shape']}, {run['dtype']}, batch {run['batch']}; {where}; "
        f"{run['date'][:10]}, commit {run['commit'][:12]}.{times}{peak}",
        "",
    ]
    lines += table(run["rows"])
    if run["longest"]:
        lines += ["", f"Longest sequence within {memory(run['memory_limit'])}:", ""] + longest_table(run["longest"])
    notes = dict.fromkeys((row["contender"], row["note"]) for row in run["rows"] if row["note"])
    attention = {row["contender"]: row["attention"] for row in run["rows"] if row["attention"]}
    about = [f"\\* `{name}`: {note}." for name, note in notes]
    if attention:
        about.append("Attention: " + "; ".join(f"`{name}` {what}" for name, what in attention.items()) + ".")
    if run["on_gpu"]:
        about.append("Attention backward of the others adds in any order, which is faster; ours in a fixed one unless `--deterministic off`.")
    about += [f"Not taken part: `{name}`: {why}." for name, why in run["left_out"].items()]
    about.append("Made by `" + run["command"] + "`.")
    return lines + [""] + about


# ---- CSV -----------------------------------------------------------------------------------------------------------
def write_csv(path, rows, columns):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "wrong": " ".join(row.get("wrong") or [])} for row in rows)
