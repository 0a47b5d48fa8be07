r"""Converts pre-tokenizers to the form that C runs: regular expressions over symbols, one byte a character.

Characters that no part of the patterns distinguishes have the same symbol. The `tokenizers` library itself answers which they are: its
regular expressions have a Unicode version of their own, and a tokenizer must agree with them to the character. So each part that stands
for one character (`\p{L}`, `[^\s\p{N}]`, `x`, also within (?i:...)) becomes the class of its symbols. The rest means the same to Oniguruma,
for which these patterns were written, and to PCRE2, which runs them. Parts with different meanings are written out ({1,3}+, ^, \b) or
refused by CannotEncode.
"""

import itertools
import re

from tokenizers import Regex, pre_tokenizers

BEHAVIOURS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
INVERTED, MOST_SYMBOLS = 1 << 8, 256
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Planes 4 to 13 are unassigned, and 15 and 16 private: planes left out behave like the plane before them.
POINTS = (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1001), 0xF0000, 0xFFFFE, 0x100000, 0x10FFFE)
TOKEN = re.compile(r"""(?sx)
    (?P<one>\\[pP]\{[^}]*\} | \\x\{[0-9A-Fa-f]+\} | \\x[0-9A-Fa-f]{1,2} | \\u[0-9A-Fa-f]{4} | \\[sSdDwWhHtnrfvae] | \\[^0-9A-Za-z] |
           [^[\\(){}*+?|^$])
  | (?P<repeat>(?P<count>[*+?] | \{\d*,?\d*\})(?P<how>[+?]?))
  | (?P<open>\((?![?*]) | \(\?(?:[:=!>] | <[=!] | -?i:))
  | (?P<edge>[$^] | \\[bBZ])
  | (?P<plain>[)|] | \\[Az])""")
EDGES = {"^": r"(?:\A|(?<=\n)(?!\z))", "$": r"(?:\z|(?=\n))", r"\Z": r"(?=\n?\z)", r"\b": r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))",
         r"\B": r"(?:(?<=\w)(?=\w)|(?<!\w)(?!\w))"}
FOLDED = re.compile("ss|st|ff|fi|fl", re.I)  # one character that becomes two letters in another case


class CannotEncode(Exception):
    """Says why C cannot encode text with this tokenizer."""


def every_character():
    return list(map(chr, POINTS))


def matches(pattern, text):
    """Returns [(begin, end)] of the matches of a regular expression in a text."""
    return [place for _, place in pre_tokenizers.Split(Regex(pattern), "removed", invert=True).pre_tokenize_str(text)]


def members(one, characters):
    """Returns the runs [(begin, end)] of code points that `one` matches: a regular expression, or a pre-tokenizer that isolates them."""
    if isinstance(one, str):
        return matches(f"(?:{one})+", "".join(characters))
    pieces = one.pre_tokenize_str("a".join(characters))
    return [(begin // 2, end // 2 + 1) for _, (begin, end) in pieces if end - begin == 1 and begin % 2 == 0]


def end_of_set(pattern, at):
    """Returns the end of the [...] that begins at `at`; it may be nested."""
    depth, i = 0, at
    while i < len(pattern):
        depth += {"[": 1, "]": -1}.get(pattern[i], 0)
        i += 2 if pattern[i] == "\\" else 1
        if not depth:
            return i
    raise CannotEncode(f"its pre-tokenizer's pattern has a [ without its ], at character {at}")


class Splits:
    """Collects the patterns of a tokenizer, one after the other, and the symbols that they need."""

    def __init__(self):
        self.sets, self.rows = {}, []  # {a part that stands for one character: its number}; [(behaviour, parts of a pattern)]

    def number(self, one):
        return self.sets.setdefault(one, len(self.sets))

    def add(self, pattern, behaviour, invert=False):
        """Adds a pattern: a regular expression, or a pre-tokenizer that isolates single characters."""
        parts = self.parts(pattern) if isinstance(pattern, str) else [self.number(pattern)]
        self.rows.append((BEHAVIOURS.index(behaviour) | INVERTED * bool(invert), parts))

    def parts(self, pattern):
        """Returns the parts of a pattern: texts, and numbers of sets of characters."""
        fold, behind, repeated, letters = pattern.startswith("(?i)"), False, False, ""
        parts, opened, unit, at = [], [], 0, 4 * fold  # unit: index in parts of the last character or group
        while at < len(pattern):
            token = TOKEN.match(pattern, at)
            end = token.end() if token else end_of_set(pattern, at) if pattern[at] == "[" else at
            text, kind = pattern[at:end], token.lastgroup if token else "one"
            letters = letters + text if kind == "one" and fold else ""
            if kind == "repeat":
                count, how = token["count"].replace("{,", "{0,"), token["how"]
                interval = count[0] == "{"
                if repeated:
                    parts[unit:] = ["(?:", *parts[unit:], ")"]
                if interval and (how == "+" or how == "?" and "," not in count):  # in Ruby's syntax: a repetition of the repetition
                    parts[unit:] = ["(?:", *parts[unit:], count + ")"]
                    count = ""
                parts.append(count + how)
            elif kind == "open":
                opened.append((len(parts), fold, behind))
                fold, behind = ("i" in text and "-" not in text) if ":" in text and "i" in text else fold, behind or "<" in text
                parts.append("(?:" if "i" in text else text)
            elif text == ")" and opened:
                unit, fold, behind = opened.pop()
                parts.append(text)
            elif kind != "plain":
                unit = len(parts)
                parts += [self.number(f"(?i:{text})" if fold else text)] if kind == "one" else self.parts(EDGES[text])
            else:
                parts.append(text)
            if end == at or FOLDED.search(letters) or kind == "repeat" and (behind or not re.search(r"[*+?\d]", text)):
                raise CannotEncode(f"its pre-tokenizer's pattern is not read here from its character {at} on: {pattern[at:at + 40]!r}")
            at, repeated = end, kind == "repeat"
        return parts

    def coded(self):
        """Returns ([(first, last, symbol)] of code points whose symbol is not 0, [pattern])."""
        characters = every_character()
        try:
            cuts = [pre_tokenizers.Split(Regex(f"(?:{one})+"), "isolated") if isinstance(one, str) else one for one in self.sets]
            begins = [begin for _, (begin, _) in pre_tokenizers.Sequence(cuts).pre_tokenize_str("".join(characters))]  # one pass over all code points
            found = [members(one, [characters[begin] for begin in begins]) for one in self.sets]
        except Exception as error:  # the library has no class of its own for this set
            raise CannotEncode(f"its pre-tokenizer's pattern has a part that does not stand alone: {error}") from None
        masks = [0] * len(begins)
        for number, runs in enumerate(found):
            for place in itertools.chain(*(range(*run) for run in runs)):
                masks[place] |= 1 << number
        symbols = {0: 0}
        begins = [(POINTS[begin], symbols.setdefault(mask, len(symbols)))
                  for i, (begin, mask) in enumerate(zip(begins, masks)) if not i or mask != masks[i - 1]]
        if len(symbols) > MOST_SYMBOLS:
            raise CannotEncode(f"its pre-tokenizer tells {len(symbols)} kinds of characters apart, and {MOST_SYMBOLS} are told apart here")
        classes = ["".join(f"\\x{symbol:02x}" for mask, symbol in symbols.items() if mask >> number & 1) for number in range(len(self.sets))]
        patterns = ["".join(part if isinstance(part, str) else f"[{classes[part]}]" if classes[part] else "(?!)" for part in parts)
                    for _, parts in self.rows]
        ends = [begin - 1 for begin, _ in begins[1:]] + [0x10FFFF]
        return [(begin, end, symbol) for (begin, symbol), end in zip(begins, ends) if symbol], patterns
