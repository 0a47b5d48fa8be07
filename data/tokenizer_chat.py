"""Reduces a chat template to fixed text around a user's text, for programs without Jinja.

    first turn                  first_before + USER + first_after + opening
    first, after a system text  system_before + SYSTEM + system_between + USER + system_after + opening
    every later turn            next_before + USER + next_after + opening, after the model's answer

The opening is the part of the generation prompt that is dropped from an answer's turn when others follow, such as a reasoning model's
"<think>\\n". With enable_thinking, `thinking_on` or `thinking_off` replaces it. A template may also drop the reasoning of old answers
(FORGETS): of opening + answer it keeps the text after the last "</think>", without the line breaks that follow (FORGETS_LINES), after
trimming the whole (FORGETS_SPACE). Other marks of reasoning than <think> are `thought_begin` and `thought_end`, which `unthought` uses.

The texts are found by rendering placeholders, and kept only if renderings of other texts are their concatenation (templates may trim
users' texts, which is recorded) and, for later turns, if the ids of the parts are those of the whole. If old answers change, the whole
conversation must be encoded again.
"""

import os
from dataclasses import dataclass, field

import templates

USER, SYSTEM, ANSWER, LATER, THOUGHT = ("QzUser0ne", "QzSystem0ne", "QzAnswer0ne", "QzUser2wo", "QzThought0ne")
THINKING = {"thinking_on": True, "thinking_off": False}  # enable_thinking
THOUGHTS = "<think>\nhm </think> hm\n</think>\n\n"
OTHERS = ("Hello", "a {{ b }} {% c %} <d> & 'e' \"f\" \\ g\n\nh", "  between spaces ", "\nfor\tlines\n", "ÄÖ é 漢字 🙂", "x" * 300)


class NoChat(Exception):
    """The template cannot be reduced to a chat; the text says why."""


@dataclass
class Chat:
    texts: dict = field(default_factory=dict)
    flags: list = field(default_factory=lambda: ["CHAT"])
    reasons: list = field(default_factory=list)

    @property
    def reason(self):
        return "; ".join(self.reasons)


def message(role, content):
    return {"role": role, "content": content}


def cut(text, *placeholders):
    """Returns the parts of a rendering around placeholders, which must occur once each, in this order."""
    parts = []
    for placeholder in placeholders:
        before, found, text = text.partition(placeholder)
        if not found or placeholder in text:
            raise NoChat("the template does not render each text once, in order")
        parts.append(before)
    return [*parts, text]


def joined(parts, texts):
    return "".join(part for pair in zip(parts, [*texts, ""]) for part in pair)


def is_trimmed(render, parts, count, place):
    """Tells whether the template trims the text at `place` of `count`; other changes raise NoChat."""
    exact = trimmed = True
    for other in OTHERS:
        texts = ["Question"] * count
        texts[place] = other
        found = render(texts)
        exact = exact and found == joined(parts, texts)
        texts[place] = other.strip()
        trimmed = trimmed and found == joined(parts, texts)
    if not exact and not trimmed:
        raise NoChat("the template changes texts in other ways than trimming")
    return not exact


def find_first(chat, ask):
    parts = cut(ask([message("user", USER)]), USER)
    if is_trimmed(lambda texts: ask([message("user", texts[0])]), parts, 1, 0):
        chat.flags.append("TRIM_USER")
    chat.texts["first_before"], chat.texts["first_after"] = parts


def find_system(chat, ask):
    def render(texts):
        return ask([message("system", texts[0]), message("user", texts[1])])
    parts = cut(render([SYSTEM, USER]), SYSTEM, USER)
    if is_trimmed(render, parts, 2, 1) != ("TRIM_USER" in chat.flags):
        raise NoChat("the template trims a user's text in one place and not in another")
    if is_trimmed(render, parts, 2, 0):
        chat.flags.append("TRIM_SYSTEM")
    chat.flags.append("CHAT_SYSTEM")
    chat.texts["system_before"], chat.texts["system_between"], chat.texts["system_after"] = parts


def behind_thoughts(text):
    return text.rpartition("</think>")[2]


KEEPS = {  # how templates change an answer when others follow it
    (): lambda text: text,
    ("TRIMS",): str.strip,
    ("TRIMS_LINES",): lambda text: text.lstrip("\n"),
    ("FORGETS",): behind_thoughts,
    ("FORGETS", "FORGETS_LINES"): lambda text: behind_thoughts(text).lstrip("\n") if "</think>" in text else text,
    ("FORGETS", "FORGETS_LINES", "FORGETS_SPACE"): lambda text: behind_thoughts(text.strip()).lstrip("\n") if "</think>" in text else text.strip(),
}


def answers_become(ask, parts):
    """Returns the flags of KEEPS by which the template writes every old answer; None: no such flags."""
    before, between, after, end = parts
    found = set(KEEPS)
    for answer in (*OTHERS, *(THOUGHTS + other for other in OTHERS), "<think>\nhm", "hm</think>"):
        text = ask([message("user", USER), message("assistant", answer), message("user", LATER)])
        found = {flags for flags in found if text == joined(parts, [USER, KEEPS[flags](answer), LATER])}
    return min(found, key=len, default=None)


def unthought(text, begin, end):
    """Returns an answer without its reasoning: with a `begin`, without all text between the marks, and trimmed; else the text
    after the last `end`."""
    return "".join(part.split(begin)[0] for part in text.split(end)).strip() if begin else text.rpartition(end)[2]


def find_marks(chat, ask, close, parts):
    """Returns (begin, end) of `unthought` if the template writes reasoning between other marks than <think> and drops it from old answers;
    else None. The model itself writes the rest of an old answer's header (`own`), such as the name of a channel."""
    def talk(content, **more):
        return [message("user", USER), {**message("assistant", content), **more}]

    def kept(content, answer, **more):
        return ask([*talk(content, **more), message("user", LATER)]) == joined(parts, [USER, answer, LATER])

    try:
        _, before, between, _ = cut(close(talk(ANSWER, reasoning_content=THOUGHT)), USER, THOUGHT, ANSWER)
        forgets = all(kept(other, other.strip(), reasoning_content=THOUGHT) or kept(other, other, reasoning_content=THOUGHT) for other in OTHERS)
    except (NoChat, templates.TemplateFailure):
        return None
    head = os.path.commonprefix([parts[1], chat.texts["first_after"]])
    own = parts[1][len(head):]
    begin, end = before.removeprefix(head).strip(), between.removesuffix(own).strip()
    if not forgets or not (begin and end and before.startswith(head) and between.endswith(own)) or "think>" in begin + end:
        return None
    if own:  # the content is only the text after the mark
        return "", end
    for mark in (begin.partition(">")[0] + ">", begin, ""):
        texts = [a + other + b for other in OTHERS for a in ("", begin + "\nhm" + end, begin + "hm ", f"a{end}b{mark}c") for b in ("", end)]
        try:
            if all(kept(text, unthought(text, mark, end)) for text in texts):
                return mark, end
        except templates.TemplateFailure:
            break
    return None


def find_next(chat, ask, encode, close):
    def turns(first, answer, *later):
        rest = [turn for text in later for turn in (message("assistant", answer), message("user", text))]
        return [message("user", first), *rest]

    parts = cut(ask(turns(USER, ANSWER, LATER)), USER, ANSWER, LATER)
    _, between, before, after = parts
    if "CHAT_SYSTEM" in chat.flags:
        found = cut(ask([message("system", SYSTEM), *turns(USER, ANSWER, LATER)]), SYSTEM, USER, ANSWER, LATER)
        if found[3:] != [before, after]:
            raise NoChat("the template writes later turns differently after a system text")
    third = ask(turns("Question", "Answer", "Second", LATER))
    if not third.endswith(before + LATER + after):
        raise NoChat("the template writes the third turn differently from the second")
    marks = find_marks(chat, ask, close, parts)
    kept = ("FORGETS",) if marks else answers_become(ask, parts)
    if kept is None:
        raise NoChat("the template changes the model's answers in an unknown way")
    forgets = "FORGETS" in kept
    if marks:
        chat.texts["thought_begin"], chat.texts["thought_end"] = marks
        between = os.path.commonprefix([between, chat.texts["first_after"]])
    if forgets and not chat.texts["first_after"].startswith(between):
        raise NoChat("the template writes the generation prompt differently when others follow")
    for other in OTHERS:
        text = other.strip() if "TRIM_USER" in chat.flags else other
        if not ask(turns("Question", "Answer", other)).endswith(before + text + after):
            raise NoChat("the template changes a later turn's text")
        start, rest = chat.texts["first_before"] + "Question" + chat.texts["first_after"] + "Answer", before + text + after
        if not forgets and encode(start + rest) != encode(start) + encode(rest):
            raise NoChat("its later turns do not begin with a new token")
    chat.flags += ["CHAT_NEXT", *(flag for flag in kept if not flag.startswith("TRIMS"))]
    chat.texts["next_before"], chat.texts["next_after"] = before, after
    return between if forgets else None


def find_opening(chat, ask, between):
    """Cuts the opening off every text that ends with it. `between`: the part of the generation prompt kept before an old answer; None:
    all."""
    first = chat.texts["first_after"]
    choices = [ask([message("user", USER)], enable_thinking=value).rpartition(USER)[2] for value in THINKING.values()]
    if between is None:
        between = os.path.commonprefix([first, *choices])
    chat.texts["opening"] = opening = first[len(between):]
    for name in ("first_after", "system_after", "next_after"):
        if not chat.texts.get(name, opening).endswith(opening):
            raise NoChat("the template has several generation prompts")
        chat.texts[name] = chat.texts.get(name, "").removesuffix(opening)


def find_thinking(chat, ask):
    """Finds the texts with which enable_thinking replaces the opening."""
    turns = [message("user", USER), message("assistant", ANSWER), message("user", LATER)]
    asked = [turns[:1]] + [[message("system", SYSTEM), *turns[:1]]] * ("CHAT_SYSTEM" in chat.flags) + [turns] * ("CHAT_NEXT" in chat.flags)
    plain = [ask(messages).removesuffix(chat.texts["opening"]) for messages in asked]
    for name, value in THINKING.items():
        texts = [ask(messages, enable_thinking=value) for messages in asked]
        chat.texts[name] = opening = texts[0][len(plain[0]):]
        if texts != [text + opening for text in plain]:
            chat.reasons.append("no choice of thinking: enable_thinking changes more than how an answer begins")
            break
    else:
        chat.flags += ["THINKING"] * any(chat.texts[name] != chat.texts["opening"] for name in THINKING)
    if "THINKING" not in chat.flags:
        chat.texts.update(dict.fromkeys(THINKING, ""))


def find_chat(compiled, encode, arguments=None):
    """Returns the chat of a templates.ChatTemplate with these variables; `encode` returns the ids of a text. Raises NoChat."""
    def ask(messages, **more):
        return compiled.render(messages, add_generation_prompt=True, **{**(arguments or {}), **more})

    def close(messages):
        return compiled.render(messages, **(arguments or {}))

    chat, between = Chat(), None
    try:
        find_first(chat, ask)
    except templates.TemplateFailure as error:
        raise NoChat(f"the template refuses a user's message: {error}") from None
    for part, find in (("system text", lambda: find_system(chat, ask)), ("later turns", lambda: find_next(chat, ask, encode, close))):
        try:
            between = find()
        except (NoChat, templates.TemplateFailure) as error:
            chat.reasons.append(f"no {part}: {error}")
    try:
        find_opening(chat, ask, between)
        find_thinking(chat, ask)
    except templates.TemplateFailure as error:
        raise NoChat(f"the template refuses enable_thinking: {error}") from None
    if compiled.tells_time:
        chat.reasons.append("the template prints the date; this file keeps that of the day it was written")
    return chat
