"""Unicode tables for tokenizers in C: classes of characters, and canonical composition.

They come from the `tokenizers` library itself, not from Python's unicodedata: its regular expressions and its NFC have their own
Unicode versions, which a tokenizer must match exactly. Planes 4 to 13 are unassigned, 15 and 16 private.
"""

import functools
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

LETTER, MARK, NUMBER, SPACE, UPPER, LOWER, CASELESS = (1 << bit for bit in range(7))
PATTERNS = {LETTER: r"\p{L}", MARK: r"\p{M}", NUMBER: r"\p{N}", SPACE: r"\s"}
CASED = {LETTER | UPPER: r"[\p{Lu}\p{Lt}]", LETTER | LOWER: r"\p{Ll}", LETTER | CASELESS: r"[\p{Lm}\p{Lo}]"}
HANGUL = range(0xAC00, 0xD7A4)  # these syllables are composed by rule, not by table


def every_character():
    return list(map(chr, (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000))))


@functools.cache
def classes(cased=False):
    """Returns [(first, last, class)] in order; classes are disjoint, and characters of none are left out. `cased`: letters by case."""
    text, patterns = "".join(every_character()), {**PATTERNS, **(CASED if cased else {})}
    if cased:
        del patterns[LETTER]
    runs = matches("|".join(f"{pattern}+" for pattern in patterns.values()), text)  # one pass over all characters
    kinds = [0] * len(runs)
    firsts = "".join(text[begin] for begin, _ in runs)
    for kind, pattern in patterns.items():
        for place, _ in matches(pattern, firsts):
            kinds[place] += kind
    assert all(kind in patterns for kind in kinds), "classes of characters overlap"
    return [(ord(text[begin]), ord(text[end - 1]), kind) for (begin, end), kind in zip(runs, kinds)]


def matches(pattern, text):
    """Returns [(begin, end)] of matches of a regular expression in a text."""
    return [place for _, place in pre_tokenizers.Split(Regex(pattern), "removed", invert=True).pre_tokenize_str(text)]


def normalize_each(normalizer, texts):
    """Returns the normal form of each text; none holds a line feed, which separates them."""
    return normalizer.normalize_str("\n".join(texts)).split("\n")


def combining_classes(characters):
    """Returns [(code point, class)] of reordered characters, found by which swap places with a character of a known class."""
    nfd = normalizers.NFD()
    pairs = ["\u0345" + c for c in characters]  # U+0345 has the largest class, 240
    moved = [c for c, pair, result in zip(characters, pairs, normalize_each(nfd, pairs)) if pair != result]
    known = {}
    for c in characters:
        if unicodedata.combining(c) and (c in moved or c == "\u0345"):
            known.setdefault(unicodedata.combining(c), c)
    found = {"\u0345": 240}
    for value, other in known.items():
        before = normalize_each(nfd, [other + c for c in moved])
        behind = normalize_each(nfd, [c + other for c in moved])
        for c, a, b in zip(moved, before, behind):
            if a == other + c and b == c + other:
                found[c] = value
    missing = [c for c in moved if c not in found]
    assert not missing, f"no combining class found for {missing}"
    return sorted((ord(c), value) for c, value in found.items())


@functools.cache
def composition():
    """Returns (decompositions, combining classes, pairs): [(code point, [full canonical decomposition])], [(code point, class)],
    [(first, second, composite)], each in order; Hangul syllables are left out."""
    characters = [c for c in every_character() if c != "\n" and ord(c) not in HANGUL]
    decomposed = normalize_each(normalizers.NFD(), characters)
    composed = normalize_each(normalizers.NFC(), characters)
    decompositions = [(ord(c), [ord(x) for x in d]) for c, d in zip(characters, decomposed) if c != d]
    primary = [d for c, d, n in zip(characters, decomposed, composed) if c != d and c == n]
    starts = normalize_each(normalizers.NFC(), [d[:-1] for d in primary])
    wholes = normalize_each(normalizers.NFC(), primary)
    pairs = []
    for start, d, whole in zip(starts, primary, wholes):
        assert len(start) == 1 and len(whole) == 1, f"{whole!r} is not composed of two"
        pairs.append((ord(start), ord(d[-1]), ord(whole)))
    combining = combining_classes([c for c, d in zip(characters, decomposed) if c == d])
    return decompositions, combining, sorted(pairs)
