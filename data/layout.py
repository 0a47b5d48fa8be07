"""Finds a conversation's texts in its rendering, by one more rendering instead of one for each message.

Every text (content, reasoning, parts of tool calls) is replaced by its own placeholder. That rendering shows the template's own
text and the place of each text. It is trusted only if inserting the texts gives the true rendering, to the character. A template
that looks into its texts fails this test; then spans.py finds turns message by message.

Conversations that differ only in their texts share a rendering of placeholders, so its result is cached (Patterns).
"""

import bisect
import itertools
import json
import re
from dataclasses import dataclass


@dataclass
class Layout:
    places: list  # [begin, end) of every message in the text, or None
    sure: list  # whether all texts of a message were replaced; else it may extend beyond its place
    shapes: list  # role and keys of every message, on which a template's output may depend


def numbered(value, mark, texts, blank):
    """Returns the value with every text replaced by mark, number in `texts`, mark. Keys, roles and `type` stay; without `blank` also texts
    of white space, because templates test for empty texts."""
    if isinstance(value, str):
        if not blank and not value.strip():
            return value
        texts.append(value)
        return f"{mark}{len(texts) - 1}{mark}"
    if isinstance(value, list):
        return [numbered(item, mark, texts, blank) for item in value]
    if isinstance(value, dict):
        return {k: v if k in ("role", "type") else numbered(v, mark, texts, blank) for k, v in value.items()}
    return value


def shape(value):
    """Returns a message without its texts: keys, which texts are empty, and other values."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list):
        return tuple(map(shape, value))
    if isinstance(value, dict):
        return tuple((k, v if k in ("role", "type") else shape(v)) for k, v in value.items())
    return repr(value)


def spellings(text):
    """Returns the forms in which templates write a text: unchanged, trimmed, and within JSON."""
    yield text
    yield text.strip()
    yield json.dumps(text, ensure_ascii=False)[1:-1]


def find_layout(text, messages, mark, render):
    """Returns the Layout of `text` = render(messages); `mark` is a character that is not in it. None: undecided."""
    shapes = [shape(message) for message in messages]
    for blank in (True, False):
        texts, owner, marked = [], [], []
        for i, message in enumerate(messages):
            marked.append(numbered(message, mark, texts, blank))
            owner += [i] * (len(texts) - len(owner))
        found = put_back(text, re.split(f"{mark}([0-9]+){mark}", render(marked)), texts)
        if found is None:
            continue
        places, sure = [None] * len(messages), [True] * len(messages)
        if not blank:
            sure = [all(text.strip() for _, text in leaves(message)) for message in messages]
        seen = set()
        for number, begin, end in found:
            i = owner[number]
            sure[i] = sure[i] and number not in seen  # a tool's name may occur in its answer
            seen.add(number)
            places[i] = (places[i][0] if places[i] else begin, end)
        return Layout(places, sure, shapes)
    return None


def put_back(text, parts, texts):
    """Returns [(number, begin, end)] of the texts in `text`; `parts` alternate between the template's text and numbers of texts. None if
    the parts do not give `text`."""
    if not text.startswith(parts[0]):
        return None
    at, found = len(parts[0]), []
    for number, literal in zip(map(int, parts[1::2]), parts[2::2]):
        if number >= len(texts):
            return None
        end = next((at + len(s) for s in spellings(texts[number])
                    if text.startswith(s, at) and text.startswith(literal, at + len(s))), None)
        if end is None:
            return None
        found.append((number, at, end))
        at = end + len(literal)
    return found if at == len(text) else None


def leaves(value, path=()):
    """Yields (path, text) of every text in a value that numbered() replaces."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in ("role", "type"):
                yield from leaves(item, (*path, key))


def put_at(value, path, text):
    """Returns the value with the text at a path replaced by this text."""
    if not path:
        return text
    value = value.copy()
    value[path[0]] = put_at(value[path[0]], path[1:], text)
    return value


class Patterns:
    """The places of turns in conversations of one shape. `find(messages, wanted, tools, more)` returns a conversation's text and
    [(message number, begin, end)] in it. It is called once, for the conversation of placeholders, so that results do not depend on
    earlier conversations."""

    MOST = 1024  # cached shapes

    def __init__(self, find, failures):
        self.find, self.failures, self.known = find, failures, {}

    def spans(self, text, messages, mark, wanted, tools, more):
        """Returns (the result of `find` for `text`, the rendering of `messages`, which has no `mark`; paths of texts not in it). None:
        undecided. Without a result, the paths are those of all placeholders."""
        for blank in (True, False):
            texts = []
            marked = [numbered(message, mark, texts, blank) for message in messages]
            parts, edges, absent = self.pattern(marked, mark, wanted, tools, more)
            places = edges is not None and put_back(text, parts, texts)
            if places not in (None, False):
                begins = [0, *(end for _, _, end in places)]  # the template's text before, between and after texts
                return [(i, begins[a] + b, begins[c] + d) for i, a, b, c, d in edges], absent
            if all(map(str.strip, texts)):
                break
        return None, absent

    def pattern(self, marked, mark, wanted, tools, more):
        """Returns (parts for put_back, [(message number, part, offset, part, offset)], [path of a missing text]), or None."""
        key = repr((marked, wanted, tools, more))
        if key not in self.known:
            if len(self.known) >= self.MOST:
                self.known.clear()
            try:
                text, spans = self.find(marked, wanted, tools, more)
                parts, edges = self.divided(text, spans, mark)
                present = {f"{mark}{number}{mark}" for number in parts[1::2]}
                self.known[key] = parts, edges, [path for path, found in leaves(marked) if found[:1] == mark and found not in present]
            except self.failures:
                self.known[key] = None, None, None
        return self.known[key]

    @staticmethod
    def divided(text, spans, mark):
        parts = re.split(f"{mark}([0-9]+){mark}", text)
        lengths = [len(part) + 2 * (i % 2) for i, part in enumerate(parts)]
        ends = list(itertools.accumulate(lengths))
        found = []
        for i, *edges in spans:
            found.append([i])
            for edge in edges:
                at = bisect.bisect_left(ends, min(edge, len(text)))
                offset = edge - ends[at] + lengths[at]
                if at % 2:  # a boundary within a text moves to the text's end
                    if offset < lengths[at]:
                        return parts, None
                    at, offset = at + 1, 0
                found[-1] += [at // 2, offset]
        return parts, found
