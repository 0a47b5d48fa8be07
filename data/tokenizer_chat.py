"""A chat template as fixed text around what a user writes, for programs that have no Jinja.

    first turn                  first_before + USER + first_after
    first, after a system text  system_before + SYSTEM + system_between + USER + system_after
    every later turn            next_before + USER + next_after, behind what the model answered

The texts are found by rendering placeholders, and kept only if renderings of other texts are their concatenation (templates may
trim what users write, which is noted) and, of later turns, if the ids of the parts are the ids of the whole.
"""

from dataclasses import dataclass, field

import templates

USER, SYSTEM, ANSWER, LATER = ("QzUser0ne", "QzSystem0ne", "QzAnswer0ne", "QzUser2wo")
OTHERS = ("Hello", "a {{ b }} {% c %} <d> & 'e' \"f\" \\ g\n\nh", "  between spaces ", "\nfor\tlines\n", "ÄÖ é 漢字 🙂", "x" * 300)


class NoChat(Exception):
    """Why there is no chat."""


@dataclass
class Chat:
    texts: dict = field(default_factory=dict)
    flags: list = field(default_factory=lambda: ["CHAT"])
    end: str = ""  # what follows an assistant's turn
    reasons: list = field(default_factory=list)

    @property
    def reason(self):
        return "; ".join(self.reasons)


def message(role, content):
    return {"role": role, "content": content}


def cut(text, *placeholders):
    """The parts of a rendering around placeholders, which must be there once each, in this order."""
    parts = []
    for placeholder in placeholders:
        before, found, text = text.partition(placeholder)
        if not found or placeholder in text:
            raise NoChat("the template does not put each text into its rendering once, and in order")
        parts.append(before)
    return [*parts, text]


def joined(parts, texts):
    return "".join(part for pair in zip(parts, [*texts, ""]) for part in pair)


def is_trimmed(render, parts, count, place):
    """True where the template trims the text at `place` of `count`; otherwise it must leave all as they are."""
    exact = trimmed = True
    for other in OTHERS:
        texts = ["Question"] * count
        texts[place] = other
        found = render(texts)
        exact = exact and found == joined(parts, texts)
        texts[place] = other.strip()
        trimmed = trimmed and found == joined(parts, texts)
    if not exact and not trimmed:
        raise NoChat("the template changes the text it is given, other than trimming it")
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


def find_next(chat, ask, encode):
    def turns(first, answer, *later):
        rest = [turn for text in later for turn in (message("assistant", answer), message("user", text))]
        return [message("user", first), *rest]

    _, _, before, after = cut(ask(turns(USER, ANSWER, LATER)), USER, ANSWER, LATER)
    if "CHAT_SYSTEM" in chat.flags:
        found = cut(ask([message("system", SYSTEM), *turns(USER, ANSWER, LATER)]), SYSTEM, USER, ANSWER, LATER)
        if found[3:] != [before, after]:
            raise NoChat("the template writes later turns in another way after a system text")
    third = ask(turns("Question", "Answer", "Second", LATER))
    if not third.endswith(before + LATER + after):
        raise NoChat("the template writes the third turn in another way than the second")
    for other in OTHERS:
        text = other.strip() if "TRIM_USER" in chat.flags else other
        if not ask(turns("Question", "Answer", other)).endswith(before + text + after):
            raise NoChat("the template changes a later turn's text")
        start, rest = chat.texts["first_before"] + "Question" + chat.texts["first_after"] + "Answer", before + text + after
        if encode(start + rest) != encode(start) + encode(rest):
            raise NoChat("its later turns do not begin with a token of their own")
    chat.flags.append("CHAT_NEXT")
    chat.texts["next_before"], chat.texts["next_after"] = before, after


def find_chat(folder, encode):
    """The chat of the template in a tokenizer's folder; `encode` gives the ids of a text. Raises NoChat."""
    try:
        template = templates.load_chat_template(folder)
        if template is None:
            raise NoChat("there is no chat template")
        compiled = templates.ChatTemplate(template, templates.load_special_tokens(folder))
    except ValueError as error:
        raise NoChat(str(error)) from None

    def ask(messages):
        return compiled.render(messages, add_generation_prompt=True)

    chat = Chat()
    try:
        find_first(chat, ask)
    except templates.TemplateFailure as error:
        raise NoChat(f"the template refuses a user's message: {error}") from None
    for part, find in (("system text", lambda: find_system(chat, ask)), ("later turns", lambda: find_next(chat, ask, encode))):
        try:
            find()
        except (NoChat, templates.TemplateFailure) as error:
            chat.reasons.append(f"no {part}: {error}")
    try:
        whole = compiled.render([message("user", USER), message("assistant", ANSWER)])
        chat.end = whole.partition(ANSWER)[2].lstrip()
    except templates.TemplateFailure:
        pass
    if compiled.tells_time:
        chat.reasons.append("the template tells the date, and this file keeps the one of the day it was written")
    return chat
