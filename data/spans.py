"""Finds the turns of a conversation in its rendered text: [begin, end) in characters for every trained turn.

The first of three ways that applies is taken:

  generation   the template has {% generation %} blocks, and the assistant's turns are wanted: the blocks mark them
  prefixes     the messages before a turn, rendered with the generation prompt, are a prefix of the messages up to that turn,
               whose rendering is a prefix of the whole text; the turn lies between the two ends
  differences  templates that rewrite history (leave out old reasoning, move the system message) have no such prefixes. The
               texts of each message in turn are replaced by a placeholder; the message lies where the rendering differs from
               the whole text. An assistant's turn begins after the generation prompt and ends with the special token that
               ends a turn, or at the end of a conversation's last turn. A text that the template writes after the answers of its
               call is a stretch of its own.

A turn that none of the three ways finds is a TemplateFailure; nothing is guessed.

In long conversations a rendering for each message would take quadratic time. In these, two renderings (layout.py) give the places if they
are enough. Among turns with the same neighbourhood (shapes of the messages around, template text between), the first, second, fourth,
eighth ... and the last are compared with true prefixes; the other turns are placed like the compared turns.
"""

import functools
import itertools
import re

from layout import find_layout, leaves, put_at, spellings
from templates import REASONING, TemplateFailure

LONG = 32  # with this many turns or more, not every turn is rendered separately
PLACEHOLDERS = ("\u241e\u2420\u241e", "\u241f\u2421\u241f", "\u2422\u2424\u2422")  # the characters that show control characters


# ---- the first and last difference of two texts --------------------------------------------------------------------------------
def common_prefix(a, b):
    """Returns the length of the common prefix of a and b, by bisection with fast comparisons."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a, b):
    return common_prefix(a[::-1], b[::-1])


def without_old_reasoning(messages, kept):
    """Returns the messages without the reasoning before the last question, which many templates leave out; `kept`: keys of messages that
    keep it."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    return [message if any(map(message.get, kept)) else {key: value for key, value in message.items() if key not in REASONING}
            for message in messages[:last]] + messages[last:]


class Canonical:
    """The text that a template puts around a turn, learned from a conversation of two placeholders."""

    def __init__(self, template, special_pattern, more):
        user, assistant = ({"role": "user", "content": PLACEHOLDERS[0]}, {"role": "assistant", "content": PLACEHOLDERS[1]})
        asked = template.render([user], True, **more)
        closed = template.render([user], False, **more)
        whole = template.render([user, assistant], False, **more)
        self.prompt = asked[len(closed):] if asked.startswith(closed) else ""  # the generation prompt
        at = whole.find(PLACEHOLDERS[1])
        if at < 0 or not asked.strip():
            raise TemplateFailure("the template leaves out the assistant's text")
        self.before = whole[len(asked):at] if whole.startswith(asked) else ""  # text between the generation prompt and the content
        self.ends = {}  # special tokens that end a turn, as keys: of the last turn, of an earlier turn, of a turn that calls a tool
        self.behind = ""  # text of the template after the last turn's end token
        if special_pattern:
            found = [special_pattern.search(whole, at + len(PLACEHOLDERS[1])), self.inner_end(template, special_pattern, [user, assistant], more)]
            self.ends = dict.fromkeys(end.group() for end in found if end)
            self.behind = whole[found[0].end():] if found[0] else ""
            self.ends |= self.end_of_call(template, special_pattern, user, more)
        self.closing = whole[at + len(PLACEHOLDERS[1]):]  # text after the last answer

    @staticmethod
    def end_of_call(template, special_pattern, user, more):
        """Returns {the special token that ends a turn with a call of a tool: None}, or an empty dictionary."""
        call = {"type": "function", "function": {"name": PLACEHOLDERS[1], "arguments": {}}}
        try:
            text = template.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], False, **more).rstrip()
        except TemplateFailure:
            return {}
        return {mark.group(): None for mark in special_pattern.finditer(text.partition(PLACEHOLDERS[1])[2]) if text.endswith(mark.group())}

    @staticmethod
    def inner_end(template, special_pattern, messages, more):
        """Returns the first special token between an answer and the next user's turn."""
        try:
            text = template.render([*messages, {"role": "user", "content": PLACEHOLDERS[2]}], False, **more)
        except TemplateFailure:
            return None
        before, _, rest = text.partition(PLACEHOLDERS[0])
        between = rest.partition(PLACEHOLDERS[1])[2].partition(PLACEHOLDERS[2])[0]
        marks = list(special_pattern.finditer(before))
        return special_pattern.search(between.removesuffix(before[marks[-1].start():] if marks else before))


class Turns:
    """Finds turns in the renderings of one template. `special_tokens`: texts that are one token each."""

    def __init__(self, template, special_tokens):
        self.template = template
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def find(self, messages, wanted, tools=None, **more):
        """Returns (text, [(message number, begin, end)]) for the messages whose numbers are in `wanted`."""
        text = self.template.render(messages, False, tools, **more)
        for kept in ((), ("tool_calls",)):
            bare = without_old_reasoning(messages, kept)
            if bare != messages and self.template.render(bare, False, tools, **more) == text:
                messages = bare
        layout, spans = self.layout(text, messages, tools, more) if len(messages) >= LONG else None, None
        if all(messages[i]["role"] == "assistant" for i in wanted):
            if layout and None not in layout.places:
                spans = self.by_some_prefixes(text, messages, wanted, layout, tools, more)
            else:
                spans = self.by_prefixes(text, messages, wanted, tools, more)
        lost = spans is None or any(not any(said in text[b:e] for said in spellings(messages[i]["content"])) for i, b, e in spans)
        moved = self.moved(text, messages, layout, tools, more) if lost else []
        try:
            if set(moved) & set(wanted):
                spans = self.find_moved(messages, moved, wanted, tools, more)
            elif spans is None:
                spans = self.by_differences(text, messages, wanted, layout, tools, more)
        except TemplateFailure:
            if not moved or set(moved) & set(wanted):
                raise
            spans = self.find_moved(messages, moved, wanted, tools, more)
        return text, spans

    def moved(self, text, messages, layout, tools, more):
        """Returns the numbers of messages with a call whose content the template writes after the rest of the message."""
        found = []
        for i, message in enumerate(messages[:-1]):
            own, its = layout.places[i:i + 2] if layout else (None, None)
            if message.get("tool_calls") and message["content"].strip() and not (own and its and own[1] <= its[0]):
                other = self.template.render([*messages[:i], {**message, "content": PLACEHOLDERS[0]}, *messages[i + 1:]], False, tools, **more)
                closed = self.template.render([*messages[:i], {**message, "content": ""}], False, tools, **more)
                found += [i] * (text.startswith(closed) and common_prefix(text, other) > len(closed))
        return found

    def find_moved(self, messages, moved, wanted, tools, more):
        """Returns turns. Turns are found without the contents of the messages in `moved`. Then each content is inserted where the template writes it."""
        given, messages = messages, [{**message, "content": ""} if i in moved else message for i, message in enumerate(messages)]
        text, spans = self.find(messages, wanted, tools, **more)
        for i in moved:
            asked = [*messages[:i + 1], *itertools.takewhile(lambda message: message["role"] not in ("assistant", "user"), messages[i + 1:])]
            alone, messages[i], before = [*asked, {"role": "assistant", "content": given[i]["content"]}], given[i], text
            closed, opened, said, text = (self.template.render(found, prompt, tools, **more)
                                          for found, prompt in ((asked, False), (asked, True), (alone, False), (messages, False)))
            begin, size = len(opened if text.startswith(opened) else closed), len(text) - len(before)
            end = begin + size
            if (text[:begin] not in (opened, closed) or text[:begin] + text[end:] != before or text[begin:end] not in said[len(closed):]
                    or not text.startswith(tuple(spellings(given[i]["content"])), begin, end) or any(b < begin < e for _, b, e in spans)):
                raise TemplateFailure(f"the template moves the content of message {i + 1} (assistant) out of its turn, to after "
                                      f"{text[:common_prefix(text, before)][-40:]!r}; make it a message of its own")
            spans = [(k, b + size * (b >= begin), e + size * (e > begin)) for k, b, e in spans] + [(i, begin, end)] * (i in wanted)
        return sorted(spans, key=lambda span: span[1])

    def layout(self, text, messages, tools, more):
        placeholder = next((p for p in PLACEHOLDERS if p[0] not in text), None)
        try:
            return placeholder and find_layout(text, messages, placeholder[0],
                                               lambda marked: self.template.render(marked, False, tools, **more))
        except TemplateFailure:
            return None

    def find_generation(self, messages, wanted, tools=None, **more):
        """Returns turns by {% generation %} blocks: one for each of the assistant's turns; else the turns found otherwise choose their blocks."""
        text, blocks = self.template.render_generation(messages, tools, **more)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if assistant == list(wanted):
            return text, [(None, begin, end) for begin, end in blocks]
        answers = ["" if messages[i].get("tool_calls") else messages[i]["content"].rpartition("</think>")[2].strip() for i in assistant]
        if len(blocks) == len(assistant) and all(answer in text[begin:end] for answer, (begin, end) in zip(answers, blocks)):
            chosen = set(wanted)
            return text, [(i, *block) for i, block in zip(assistant, blocks) if i in chosen]
        _, turns = self.find(messages, wanted, tools, **more)
        return text, [(i, max(begin, b), min(end, e)) for i, begin, end in turns for b, e in blocks if b < end and e > begin]

    def prefix(self, text, messages, i, tools, more):
        """Returns (begin, end) of turn i by true prefixes; None if the renderings are not prefixes."""
        before = self.template.render(messages[:i], True, tools, **more)
        after = text if i + 1 == len(messages) else self.template.render(messages[:i + 1], False, tools, **more)
        if not after.startswith(before):  # in a turn that continues after a tool's answer the generation prompt may be only the opening of reasoning
            closed = self.template.render(messages[:i], False, tools, **more)
            mark = self.special_pattern and before.startswith(closed) and self.special_pattern.match(before, len(closed))
            before = closed if mark and not after.startswith(mark.group(), len(closed)) else before
        return (len(before), len(after)) if after.startswith(before) and text.startswith(after) else None

    def by_prefixes(self, text, messages, wanted, tools, more):
        """Returns turns by prefixes; None if renderings of prefixes are not prefixes."""
        spans = []
        try:
            for i in wanted:
                place = self.prefix(text, messages, i, tools, more)
                if place is None:
                    return None
                spans.append((i, *place))
        except TemplateFailure:  # a template may refuse some roles at the beginning or end
            return None
        return spans

    def by_some_prefixes(self, text, messages, wanted, layout, tools, more):
        """Returns turns from the places of all messages. A turn's neighbourhood is the shapes of the messages around it and the
        template's text between them; turns of one neighbourhood have the same place in it."""
        last = len(messages) - 1
        ends = [0, *(end for _, end in layout.places)]  # [i]: end of the message before i
        begins = [*(begin for begin, _ in layout.places), len(text)]  # [i + 1]: begin of the message after i
        found, spans = {}, []  # neighbourhood: [count, begin relative to ends[i], end relative to ends[i + 1]]

        def true_place(i):
            place = self.prefix(text, messages, i, tools, more)
            return place and (place[0] - ends[i], place[1] - ends[i + 1])

        try:
            for i in wanted:
                if not ends[i] <= begins[i] <= ends[i + 1] <= begins[i + 1]:
                    return self.by_prefixes(text, messages, wanted, tools, more)
                key = (i == last, *layout.shapes[max(i - 1, 0):i + 2], text[ends[i]:begins[i]], text[ends[i + 1]:begins[i + 1]])
                seen = found.setdefault(key, [0, None])
                seen[0] += 1
                if not seen[0] & (seen[0] - 1) or i == wanted[-1]:
                    place = true_place(i)
                    if place is None:
                        return None
                    if seen[1] not in (None, place) or place[0] < 0 or place[1] < 0:  # one neighbourhood, but different places: render every turn
                        return self.by_prefixes(text, messages, wanted, tools, more)
                    seen[1] = place
                spans.append((i, ends[i] + seen[1][0], ends[i + 1] + seen[1][1]))
        except TemplateFailure:
            return None
        return spans

    def by_differences(self, text, messages, wanted, layout, tools, more):
        canonical = Canonical(self.template, self.special_pattern, more)
        places = [layout.places[i] if layout and layout.sure[i] else self.place(text, messages, i, tools, more)
                  for i in range(len(messages))]
        ordered = sorted((place, i) for i, place in enumerate(places) if place)
        order = {i: k for k, (_, i) in enumerate(ordered)}
        reach = list(itertools.accumulate((place[1] for place, _ in ordered), max))
        spans, reached = [], 0
        for i in wanted:
            if places[i] is None:  # the template leaves the message out
                continue
            begin, end = places[i]
            k = order[i]
            behind = reach[k - 1] if k else 0
            following = ordered[k + 1][0][0] if k + 1 < len(ordered) else len(text)
            if begin < reached or behind > begin or following < end:
                raise TemplateFailure(f"the template moves message {i + 1} ({messages[i]['role']}) into others, or before them")
            if messages[i]["role"] == "assistant":
                begin = self.begin_of_turn(text, canonical, behind, begin, i)
            reached = self.end_of_turn(text, canonical, end, following, messages[:i + 1], tools, more)
            spans.append((i, begin, reached))
        return spans

    def place(self, text, messages, i, tools, more):
        """Returns [begin, end) of the text that depends on message i; None: nothing does."""
        placeholder = next((p for p in PLACEHOLDERS if p[0] not in text), None)
        if placeholder is None:
            raise TemplateFailure(f"the text holds all of {' '.join(p[0] for p in PLACEHOLDERS)}, the marks used to find turns")
        def rendered(message, texts=()):
            message = functools.reduce(lambda found, leaf: put_at(found, leaf[0], placeholder), texts, message)
            return self.template.render([*messages[:i], message, *messages[i + 1:]], False, tools, **more)

        message, texts = messages[i], list(leaves(messages[i]))
        try:
            other = rendered(message, texts)
        except TemplateFailure:  # some templates refuse content with a call
            other = rendered(message, [leaf for leaf in texts if leaf[1].strip()])
        if other == text:
            return None
        begin = common_prefix(text, other)
        if message.get("tool_calls"):  # names of tools may occur in their answers, too
            paths = [("tool_calls", k, *(("function",) if "function" in call else ()), "arguments") for k, call in enumerate(message["tool_calls"])]
            other = rendered(functools.reduce(lambda found, path: put_at(found, path, {placeholder: placeholder}), paths, message))
        return begin, len(text) - min(common_suffix(text, other), len(text) - begin)

    def begin_of_turn(self, text, canonical, behind, begin, i):
        window = text[behind:begin]
        prompt, before = canonical.prompt, canonical.before
        if not prompt:  # the template has no generation prompt, like Mistral's
            return begin - len(before) if window.endswith(before) else begin
        # The prompt may open the reasoning, which an old turn drops or closes at once; then compare only the prompt's beginning, up to a special token.
        mark = self.special_pattern.search(prompt) if self.special_pattern else None
        for length in range(len(prompt), mark.end() - 1 if mark else len(prompt) - 1, -1):
            at = window.rfind(prompt[:length])
            if at >= 0 and "<" not in prompt[:length].rpartition(">")[2]:  # do not cut within a mark
                return behind + at + length
        raise TemplateFailure(f"the template rewrites earlier messages, and the beginning of message {i + 1} is not found; use a "
                              "template with {% generation %} blocks")

    def end_of_turn(self, text, canonical, end, following, messages, tools, more):
        """Returns the end of the special token and the line breaks after it; without a special token, the end of the text as written for the last message."""
        assistant = messages[-1]["role"] == "assistant"
        marks = self.special_pattern.finditer(text, end, following) if self.special_pattern else ()
        mark = next((mark for mark in marks if mark.group() in canonical.ends or not assistant), None)
        if mark and mark.group() in canonical.ends:
            behind = canonical.behind if text[mark.end():] == canonical.behind else re.match(r"\s*", canonical.behind).group()
            return mark.end() + len(behind) * text.startswith(behind, mark.end())
        if not assistant:
            return end
        said = self.template.render(messages, False, tools, **more)
        place = self.place(said, messages, len(messages) - 1, tools, more)
        if place and text.startswith(said[place[1]:], end) and end + len(said) - place[1] <= following:
            return end + len(said) - place[1]
        raise TemplateFailure(f"the template rewrites earlier messages, and the end of message {len(messages)} is not found; use a template "
                              "with {% generation %} blocks")
