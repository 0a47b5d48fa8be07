#!/usr/bin/env python3
"""Renders conversations of agents for the trainer (train --environment-command): lines of JSON in, a line of JSON out for each.

    render.py DATA TOKENIZER            DATA: folder that prepare.py wrote; TOKENIZER: the folder, or its tokenizer.json, that it was given
    render.py DATA bytes                tokens are bytes, and conversations plain text
    render.py - TOKENIZER [TEMPLATE]    no data: sample --serve; TEMPLATE: a file, in place of the tokenizer's

    {"said": [ids], "ended": true, "turn": 3}             -> {"message": {...}}: a turn of the assistant as a message. "raw" is its whole
                                                             text; tool_calls and reasoning_content if the template's form is known
    {"ids": [...], "row": {...}, "messages": [...],
     "most": n}                                           -> {"keep": k, "ids": [...]}: the conversation begins with the first k given
                                                             ids; of those that follow at most n + 1 are given

Templates, limits and encoding are prepare.py's. Ids that were given are never encoded again: a rendering that differs from their text
keeps the ids before the difference. Messages of the assistant are rendered from "raw", or from their parsed form if the template
refuses "raw" or then more ids stay. A failure is answered with {"error": "..."}.
"""

import datetime
import json
import os
import sys

import tool_calls


# ---- renderers ---------------------------------------------------------------------------------------------------------------
def after_last_turn(messages):
    """Returns the text that follows the assistant's last turn in a conversation of plain text."""
    last = max(i for i, message in enumerate(messages) if "raw" in message)
    return "".join(message["content"] for message in messages[last + 1:])


class Bytes:
    failures = ()

    def said(self, ids, ended, turn):
        raw = bytes(ids).decode("utf-8", "replace").replace("\0", "\ufffd")  # no JSON here has \u0000
        return {"message": {"role": "assistant", "content": raw, "raw": raw}}

    def render(self, ids, row, messages, most):
        return {"keep": len(ids), "ids": list(after_last_turn(messages).encode())[:most + 1]}


class Renderer:
    def __init__(self, data, tokenizer, template=""):
        global encode, records, templates  # `bytes` needs none of their modules
        import prepare  # noqa: F401 (ends the program if a module is missing)
        import encode
        import records
        import templates
        made = {"plan": {"options": {}}} if data == "-" else templates.read_json(os.path.join(data, "prepare.json"))
        if made.get("status") != "complete" and data != "-":
            raise ValueError(f"{data}: holds no complete output of prepare.py; give the folder of --data")
        options = {name: value for name, value in made["plan"]["options"].items() if name in encode.Options.__dataclass_fields__}
        own = template if data == "-" else os.path.join(data, "chat_template.jinja")
        options.update(tokenizer=tokenizer, format="prompts", chat_template=own if own and os.path.exists(own) else None)
        now = datetime.datetime.fromisoformat(made["now"]) if made.get("now") else None
        try:
            self.encoder = encode.Encoder(encode.Options(**options), now)
        except encode.SetupFailure as error:
            raise ValueError(str(error)) from None
        if data != "-" and self.encoder.fingerprint != made["plan"]["tokenizer"]["fingerprint"]:
            raise ValueError(f"{tokenizer}: is not the tokenizer with which {data} was prepared; give that one")
        self.failures = (templates.Endless, encode.SetupFailure)
        self.template = self.encoder.template.text if self.encoder.template else ""
        try:  # a template may refuse or leave out a tool's answer after a turn without a call, as gpt-oss's and Gemma 4's do
            roles = ("user", "Q"), ("assistant", "A"), ("tool", "QzT")
            shown = self.rendering({}, [{"role": role, "content": text} for role, text in roles]) if self.template else "QzT"
        except (records.Rejected, templates.TemplateFailure, templates.Endless):
            shown = ""
        self.needs_call = "QzT" not in shown

    def text(self, ids):
        return self.encoder.tokenizer.decode(ids, skip_special_tokens=False)

    def said(self, ids, ended, turn):
        raw = self.text(ids[:-1] if ended else ids).replace("\0", "\ufffd")
        channels = "<|channel|>analysis" in self.template
        message = {"role": "assistant", "content": tool_calls.harmony(raw) if channels else raw}
        tagged = self.encoder.tagged([message])[0] if self.template else message
        thought, end, answer = tagged["content"].partition("</think>")
        if end or thought.lstrip().startswith("<think>"):  # without an end all is reasoning
            message.update(reasoning_content=thought.lstrip().removeprefix("<think>").strip("\n"), content=answer.lstrip("\n"))
        try:
            content, calls = tool_calls.calls_of(message["content"], self.template)
        except (ValueError, RecursionError):
            calls, message["malformed_call"] = [], True
        if calls:
            message.update(content=content, tool_calls=[
                {"type": "function", "id": f"{turn:05d}{i:04d}", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)])
        for key in message.keys() & {"content", "reasoning_content"} if channels else ():  # gpt-oss's template refuses its own marks there
            message[key] = tool_calls.CHANNELS.sub("", message[key])
        return {"message": {**message, "raw": raw}}

    def rendering(self, row, messages):
        """Returns the text of a conversation up to the assistant's next turn, as prepare.py renders a prompt."""
        encoder = self.encoder
        row = {key: value for key, value in row.items() if key not in ("messages", *records.OURS)}
        record = records.understand({**row, "prompt": messages}, "prompts", encoder.more_roles, None, encoder.reads)
        found, more = encoder.messages(encoder.tagged(record.documents[0].prompt), record)
        return encoder.template.render(found, True, record.tools, **more)

    def kept(self, ids, text):
        """Returns (how many ids stay, the ids that follow them), so that all ids decode to the text."""
        whole = self.encoder.encoding(text).ids
        alike = encode.alike(whole, encode.np.array(ids, encode.np.uint32))
        if alike == len(ids):
            return alike, whole[alike:].tolist()
        common = len(os.path.commonprefix([self.text(ids), text]))
        low, high = alike, len(ids)
        while low < high:  # the longest beginning whose text is not longer than what is common
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.text(ids[:middle])) <= common else (low, middle - 1)
        while low > alike and not text.startswith(self.text(ids[:low])):  # it ends within a character
            low -= 1
        added = self.encoder.encoding(text[len(self.text(ids[:low])):]).ids.tolist()
        return (low, added) if low > alike and self.text(ids[:low] + added) == text else (alike, whole[alike:].tolist())

    def forms(self, messages):
        """Returns a conversation with the assistant's turns as raw text, and with parsed turns. A tool's answer without an id belongs to the
        next call; one that needs a call and has none is the user's."""
        raw, parsed, called, open_calls = [], [], True, []
        for message in messages:
            bare = {key: value for key, value in message.items() if key not in ("raw", "malformed_call")}
            if message["role"] == "assistant":
                called, open_calls = "tool_calls" in message, list(message.get("tool_calls") or [])
            elif message["role"] == "tool" and open_calls:
                one = next((one for one in open_calls if message.get("tool_call_id", one.get("id")) == one.get("id")), open_calls[0])
                open_calls.remove(one)
                bare = {"tool_call_id": one.get("id"), "name": one["function"]["name"], **bare}
            elif message["role"] == "tool" and self.needs_call and not called:
                bare["role"] = "user"
            parsed.append(bare)
            raw.append({"role": "assistant", "content": message["raw"]} if "raw" in message and not (self.needs_call and called) else bare)
        return raw, parsed

    def render(self, ids, row, messages, most):
        if "messages" not in row:  # a prompt of plain text
            return {"keep": len(ids), "ids": self.encoder.encoding(after_last_turn(messages)).ids[:most + 1].tolist()}
        best = failure = None
        for form in self.forms(messages):
            try:
                keep, added = self.kept(ids, self.rendering(row, form))
            except (records.Rejected, templates.TemplateFailure) as error:
                failure = error
                continue
            if best is None or keep > best["keep"]:
                best = {"keep": keep, "ids": added[:most + 1]}
            if keep == len(ids):
                break
        if best is None:
            raise ValueError(f"the chat template refuses the conversation: {failure}")
        return best


def answer(renderer, line):
    try:
        asked = json.loads(line)
        return (renderer.said if "said" in asked else renderer.render)(*asked.values())
    except (ValueError, TypeError, LookupError, AttributeError, *renderer.failures) as error:
        return {"error": " ".join(str(error).split())[:300]}


def main(arguments):
    if len(arguments) != 2 and arguments[:1] != ["-"]:
        raise SystemExit("render.py: give the folder of the data and the tokenizer")
    try:
        renderer = Bytes() if arguments[1] == "bytes" else Renderer(*arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"render.py: {error}") from None
    for line in sys.stdin:
        print(json.dumps(answer(renderer, line)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
