"""Caches the tokens of words, which mostly repeat; the library encodes only new words.

Byte-level tokenizers with the regular expression of GPT-2, Llama 3, Qwen, Tekken or o200k cut a text into words that are encoded
independently. This module finds stretches of whole words. They end where these expressions always end a word:

    between a non-space and white space other than a line break: no alternative matches across this place, and no alternative that ends
    here looks ahead (with GPT-2's also before line breaks);
    after the last line break of a run of white space (not with GPT-2's, Tekken's or o200k's): \\s*[\\r\\n]+ and [\\r\\n]* take
    everything up to it and look no further.

The library searches added tokens first. If none of them contains or takes white space, each lies within a stretch. NFC changes
nothing across these places.
"""

import json
import re
import unicodedata

from tokenizers import models, normalizers

import split_patterns
import tokenizer_file

BLANK = r"\t\x0b\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # the library's \s without \r\n
SPACE = r"\r\n" + BLANK
CUT = re.compile(f"[^{SPACE}](?=[{BLANK}])")
LINES = re.compile(fr"[{BLANK}]*[^{SPACE}]+(?:[\r\n](?:[{SPACE}]*[\r\n])?)?|[{SPACE}]*[\r\n]|[{BLANK}]+")
CASED = re.compile(fr"[{SPACE}]*[^{SPACE}]+(?:[\r\n][{SPACE}]*[^{SPACE}]*)*|[{SPACE}]+")
GPT2 = re.compile(f"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
WINDOW = 1 << 16  # characters of a text that are cut at a time
KEPT, LONGEST = 1 << 17, 64  # cached stretches (at most twice as many), and most characters of one
MEAN = 16  # characters: longer stretches, as in Chinese, rarely repeat


def ascii_words(pattern):
    """Returns the tokenizer's expression for ASCII only, with \\p{L} and \\p{N} replaced."""
    pattern = pattern.replace(r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", "A-Z").replace(r"\p{Ll}\p{Lm}\p{Lo}\p{M}", "a-z")
    pattern = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(pattern, re.ASCII)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN2_MARKS = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
LETTERS = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX|"
           r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX|"
           r"\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = LETTERS.replace("SUFFIX", "").replace("DIGITS", "")
O200K = LETTERS.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}")
EXPRESSIONS = {split_patterns.GPT2: (GPT2, ascii_words(split_patterns.GPT2)), QWEN2_MARKS: (LINES, ascii_words(QWEN2)),
               **{pattern: (LINES, ascii_words(LLAMA3 if pattern == CL100K else pattern)) for pattern in (LLAMA3, CL100K, QWEN2)},
               **{pattern: (CASED, ascii_words(pattern)) for pattern in (TEKKEN, O200K)}}


def expressions(tokenizer):
    """Returns the expressions (of stretches, of words in ASCII); None: texts must not be cut."""
    added = tokenizer.get_added_tokens_decoder().values()
    if (type(tokenizer.model) is not models.BPE or tokenizer.model.dropout or tokenizer.pre_tokenizer is None
            or type(tokenizer.normalizer) not in (type(None), normalizers.NFC)
            or any(t.lstrip or t.rstrip or t.single_word or re.search(f"[{SPACE}]", t.content) for t in added)):
        return None
    parts = tokenizer_file.flatten(json.loads(tokenizer.pre_tokenizer.__getstate__()), "pretokenizers")
    kinds = [part["type"] for part in parts]
    if kinds[-1] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return None
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return EXPRESSIONS[split_patterns.GPT2]
    if kinds != ["Split", "ByteLevel"] or parts[1].get("use_regex", True):
        return None
    way = parts[0]["behavior"], bool(parts[0].get("invert"))  # the library then leaves matches unchanged
    return EXPRESSIONS.get(parts[0]["pattern"].get("Regex")) if way in (("Isolated", False), ("Removed", True)) else None


class Known(dict):
    """The cache {stretch or word: bytes of its ids}; `library` encodes others."""

    def __init__(self, tokenizer, library):
        self.stretches, self.words = expressions(tokenizer) or (None, None)
        self.library, self.old = library, {}  # old: the previous generation; entries that occur again move to the new one
        marks = [re.escape(token.content) for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        self.added = re.compile("|".join(marks) or r"(?!)")

    def __missing__(self, stretch):
        if len(stretch) > LONGEST:
            return self.library(stretch)
        ids = self.old.get(stretch)
        if ids is None:
            words = self.words.findall(stretch) if stretch.isascii() and not self.added.search(stretch) else ()
            ids = b"".join(map(self.__getitem__, words)) if len(words) > 1 else self.library(stretch)
        self[stretch] = ids
        return ids

    def windows(self, text):
        """Yields [(begin, end)] of parts of the text between which it may be cut."""
        begin = 0
        while begin < len(text):
            cut = CUT.search(text, begin + WINDOW)
            end = cut.end() if cut else len(text)
            yield begin, end
            begin = end

    def cut(self, text, begin, end):
        """Returns the stretches of a window: a single one if they are too long for the cache, or if the text is not NFC (offsets might decrease)."""
        window = text[begin:end]
        found = self.stretches.findall(window) if unicodedata.is_normalized("NFC", window) else ()
        return found if len(found) * MEAN > end - begin else [window]

    def ids(self, stretches):
        """Returns the bytes of the ids of each stretch."""
        if len(self) > KEPT:
            self.old = dict(self)
            self.clear()
        return list(map(self.__getitem__, stretches))
