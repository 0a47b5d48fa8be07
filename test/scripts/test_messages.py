"""Every message of the program is at most two lines of 100 columns, with names and numbers of usual length (WIDTH)."""
import pathlib
import re
import sys

CALLS = re.compile(r"\b(die|die_usage|die_with|note|options_refuse)\(")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
CONVERSION = re.compile(r"%[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?(?:hh|h|ll|l|z|j|t)?([a-zA-Z%])")
WIDTH = {"s": 16, "d": 4, "i": 4, "u": 5, "g": 6, "f": 6, "e": 8, "c": 1, "x": 8, "p": 12, "%": 1}


def arguments(text, begin):
    """The arguments of the call whose parenthesis opens before `begin`."""
    parts, depth, i, last = [], 0, begin, begin
    while i < len(text):
        if text[i] == '"':
            i = LITERAL.match(text, i).end()
            continue
        if text[i] == "'":
            i += 4 if text[i + 1] == "\\" else 3
            continue
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth < 0:
                return parts + [text[last:i]]
        elif text[i] == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
        i += 1
    return []


def said(part):
    """The longest literal of an argument, whose pieces stand beside each other."""
    joined = re.sub(r'"\s*(?:\n\s*)?"', "", re.sub(r"//[^\n]*", "", part))
    return max((m.group(1) for m in LITERAL.finditer(joined)), key=len, default=None)


def columns(format_text, values):
    text, rest = 0, iter(values)
    end = 0
    for m in CONVERSION.finditer(format_text):
        text += len(format_text[end : m.start()].replace("\\", ""))
        end = m.end()
        if m.group(3) == "%":
            text += 1
            continue
        for star in m.groups()[:2]:
            if star == "*":
                next(rest, None)
        literal = said(next(rest, ""))
        least = int(m.group(1)) if (m.group(1) or "*") != "*" else 0
        text += len(literal) if m.group(3) == "s" and literal is not None else max(least, WIDTH.get(m.group(3), 8))
    return text + len(format_text[end:].replace("\\", ""))


bad = count = 0
for path in sorted([*pathlib.Path("llmc").rglob("*"), pathlib.Path("train_gpt.cu"), pathlib.Path("streambp.h")]):
    if path.suffix not in (".h", ".c", ".cc", ".cu", ".cuh"):
        continue
    text = path.read_text()
    for call in CALLS.finditer(text):
        parts = arguments(text, call.end())
        formats = [i for i, part in enumerate(parts) if said(part) is not None]
        if not formats or "..." in "".join(parts[:1]):
            continue
        first = formats[0]
        count += 1
        wide = len("train: ") + columns(said(parts[first]), parts[first + 1 :])
        if call.group(1) == "options_refuse":
            wide += len("; see ./train convert --help")
        if wide > 200:
            bad += 1
            print(f"FAILED: {path}:{text.count(chr(10), 0, call.start()) + 1}: {wide} columns: {said(parts[first])}")
    if path.name == "options_check.h":
        for m in re.finditer(r'\{[^{}"]*?,\s*("(?:[^"\\]|\\.)*"(?:\s*"(?:[^"\\]|\\.)*")*)\s*\}', text):
            count += 1
            wide = len("train: ; see ./train convert --help") + len(said(m.group(1)).replace("\\", ""))
            if wide > 200:
                bad += 1
                print(f"FAILED: {path}:{text.count(chr(10), 0, m.start(1)) + 1}: {wide} columns: {said(m.group(1))}")
print(f"{count - bad} passed, {bad} failed, 0 skipped")
sys.exit(bad > 0)
