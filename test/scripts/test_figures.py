"""Reads the documents for users: no figure without a measured row or a word that says what it is.

A figure is a number with a unit of time, speed or memory, a percentage, "N times as", or a number under such a head of a table. It stands in a
sentence, or in a row of a table. It needs one of
- a word: planned, estimated, simulated, ratio, published and their forms, in the sentence, before it in its paragraph or item, in the table's
  head, or in the paragraph before the table;
- a link to a row of docs/measured.md: then each figure of the sentence or row is a rounding of a number of that row;
- a link to the section of docs/measured.md on the log: then each figure is a rounding of a number of dev/gpu_log.md.
No figures: code, sizes of cards (CARD), and what SETTINGS lists. docs/measured.md's own generated tables are the rows.
"""

import glob
import re
import sys

WORD = re.compile(r"\b(planned|plans?|estimate[sd]?|simulated|ratios?|published|publish)\b", re.I)
UNIT = r"(?:%|(?:s|ms|us|h|seconds?|minutes?|hours?)\b|(?:k )?tokens/s|[TG]FLOP/s|[GT]B/s|[GT]i?B\b|times (?:as|its|the|longer|faster)\b)"
FIGURE = re.compile(rf"(?<![\w.,-])(\d[\d.,]*)(?:(?: to |, | and |-)\d[\d.,]*)* ?{UNIT}")
HEAD = re.compile(r"^(s|s .*|seconds.*|.*tokens/s.*|MFU|peak|memory.*|GB.*|GiB.*|.*TFLOP/s.*)$", re.I)
CARD = re.compile(r"\b(8|12|16|24|40|48|80|95|141) GB\b(?! a rank)|\bhosts? (memory )?(of )?\d[\d.]* [GT]i?B|\b\d[\d.]* [GT]i?B of host memory")
ROW = re.compile(r"measured\.md#([a-z0-9-]+-\d+)\b")
LOG = "measured.md#in-the-log-without-a-record"
SETTINGS = {  # defaults of options, bounds of tests, sizes of samples: nobody's measurement
    "README.md": ("30 minutes",),
    "scripts/guides/rewards.md": ("1.5 times as",),
    "scripts/guides/troubleshooting.md": ("100 times its",),
    "scripts/recipes/README.md": ("10 %",),
}


def numbers(text):
    return [n.rstrip(".,").replace(",", "") for n in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])", text)]


def is_rounding(n, of):
    decimals = len(n.partition(".")[2])
    return any(abs(float(each) - float(n)) <= 0.5 * 10**-decimals + 1e-9 for each in of)


def rows_of(measured):
    """Returns {id: numbers of its row}."""
    return {m[1]: numbers(m[2]) for m in re.finditer(r'^\| <a id="([^"]+)"></a>\S+ \|(.*)$', measured, re.M)}


def plain(text):
    return CARD.sub("", re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", text)))


def figures_of(path, text):
    return [n for m in FIGURE.finditer(plain(text)) if m[0] not in SETTINGS.get(path, ()) for n in numbers(m[0])]


def units(path, text):
    """Yields (what stands before, the sentence or row, its figures)."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    if path == "docs/measured.md":
        text = re.sub(r"<!-- table .*?<!-- end -->", "", text, flags=re.S)
    before = ""
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if not line.startswith("<!--")]
        if not lines or all(line.startswith("    ") for line in lines):
            continue
        table = [line for line in lines if line.startswith("|")]
        if table:
            heads = [head.strip() for head in table[0].strip("|").split("|")]
            for line in table[2:]:
                cells = line.strip("|").split("|")
                bare = [plain(cell) for head, cell in zip(heads[1:], cells[1:]) if HEAD.match(head)]
                yield before + table[0], line, numbers(" ".join(bare)) + figures_of(path, line)
        else:
            before = ""
            for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
                said = ""
                for sentence in re.split(r"(?<=[.:!?)])\s+(?=[A-Z*`\[(])", item):
                    yield said, sentence, figures_of(path, sentence)
                    said += sentence + " "
                before += item + " "


def faults_of(path, text, rows, log):
    for before, unit, figures in units(path, text):
        if not figures or WORD.search(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", before + unit))):
            continue
        linked = ROW.findall(unit)
        if not linked and LOG not in unit:
            yield f"{' '.join(unit.split())[:160]}: {', '.join(figures)}: neither a row of docs/measured.md nor planned, estimated, simulated, a ratio, published"
            continue
        known = [n for row in linked for n in rows.get(row, [])] + (log if LOG in unit else [])
        for row in linked:
            if row not in rows:
                yield f"docs/measured.md has no row {row}"
        for n in figures:
            if not is_rounding(n, known):
                yield f"{' '.join(unit.split())[:160]}: {n} is in no row that is linked"


def main():
    with open("docs/measured.md", encoding="utf-8") as file:
        rows = rows_of(file.read())
    with open("dev/gpu_log.md", encoding="utf-8") as file:
        log = numbers(file.read())
    passed = failed = 0
    for path in ["README.md", *sorted(glob.glob("scripts/*.md") + glob.glob("scripts/*/*.md") + glob.glob("docs/**/*.md", recursive=True))]:
        with open(path, encoding="utf-8") as file:
            found = list(faults_of(path, file.read(), rows, log))
        passed += not found
        failed += len(found)
        for fault in found:
            print(f"FAILED: {path}: {fault}")
    failed += not rows
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed != 0


sys.exit(main())
