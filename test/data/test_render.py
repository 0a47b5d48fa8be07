"""data/render.py: conversations of turns, written by a scripted model and environment, end as prepare.py's rendering of their messages, for
templates of six manners; ids that were drawn stay; the forms of tool calls. Prints how many conversations another encoding would
encode otherwise. Run by test_prepare.py's Python.
"""

import json
import os
import random
import subprocess
import sys

from checks import WORK, check, close
import prepare_samples as samples

import encode  # noqa: E402  (in data/, which prepare_samples has put into the path)
import render  # noqa: E402

TEMPLATES = {  # name: (template, end of a turn, whether tools are rendered)
    "chatml": (samples.CHATML, "<|im_end|>", True), "thinking": (samples.THINKING, "<|im_end|>", True),
    "opening": (samples.OPENING, "<|im_end|>", True), "hybrid": (samples.HYBRID, "<|im_end|>", True),
    "mistral": (samples.MISTRAL, "</s>", False), "generation": (samples.GENERATION, "<|im_end|>", True)}
CONVERSATIONS = 12


def prepared(name, template, end):
    """Returns (folder of the data, tokenizer) of a few prompts."""
    folder = os.path.join(WORK, name)
    samples.tokenizer_folder(folder, samples.byte_level(), template, bos="<s>", eos=end)
    rows = os.path.join(WORK, name + ".jsonl")
    samples.write_lines(rows, [{"prompt": [{"role": "user", "content": text}], "level": 3} for text in samples.LINES])
    subprocess.run([sys.executable, "data/prepare.py", "--tokenizer", folder, "--out", folder + "-data", "--format", "prompts", "--workers", "1",
                    rows], check=True, capture_output=True)
    return folder + "-data", folder


def drawn(rng, encoder, name):
    """Returns the text of a turn: reasoning, text, a call, spaces, as a model may write them."""
    thought = {"thinking": "<think>\n{}\n</think>\n\n", "opening": "{}\n</think>\n\n", "hybrid": "<think>\n{}\n</think>\n\n"}.get(name, "")
    text = rng.choice(samples.PHRASES) + rng.choice(["", " ", "\n", " {\"a\": 1}"]) + rng.choice(samples.LINES)
    call = '\n<tool_call>\n{"name": "w", "arguments": {"x":' + str(rng.randrange(9)) + "}}\n</tool_call>"
    return thought.format(rng.choice(samples.LINES).strip()) + text.strip() + call * (name != "mistral" and rng.random() < 0.5)


def ids_of(rng, encoder, text):
    """Encodes a text in pieces, so that not always as one encoding would."""
    at = rng.randrange(len(text)) if rng.random() < 0.3 else 0
    return [*encoder.encoding(text[:at]).ids.tolist(), *encoder.encoding(text[at:]).ids.tolist()]


def converse(renderer, name, end, tools, rng):
    """Returns (ids, messages, forks, whether another encoding of their text has these ids)."""
    encoder, row = renderer.encoder, {"messages": [{"role": "user", "content": rng.choice(samples.LINES)}], "level": 3}
    messages, forks = list(row["messages"]), 0
    ids = encoder.encoding(renderer.rendering(row, messages)).ids.tolist()
    for turn in range(1, rng.randrange(2, 6)):
        said = [*ids_of(rng, encoder, drawn(rng, encoder, name)), encoder.tokenizer.token_to_id(end)]
        messages.append(renderer.said(said, True, turn)["message"])
        ids += said
        role = "tool" if tools and rng.random() < 0.6 else "user"
        messages.append({"role": role, "content": rng.choice(samples.PHRASES).strip()})
        found = render.answer(renderer, json.dumps({"ids": ids, "row": row, "messages": messages, "most": 10**6}))
        if "error" in found:
            check(f"{name}: a turn", False, found["error"])
            break
        forks += found["keep"] < len(ids)
        ids = ids[:found["keep"]] + found["ids"]
    text = renderer.text(ids)
    bare = lambda message: {key: value for key, value in message.items() if key not in ("raw", "malformed_call")}
    forms = ([{"role": "assistant", "content": m["raw"]} if "raw" in m else m for m in messages], [*map(bare, messages)])
    check(f"{name}: the text is prepare.py's rendering", text in [renderer.rendering(row, form) for form in forms], repr(text))
    return ids, forks, encoder.encoding(text).ids.tolist() == ids


for name, (template, end, tools) in TEMPLATES.items():
    renderer = render.Renderer(*prepared(name, template, end))
    rng = random.Random(name)
    found = [converse(renderer, name, end, tools, rng) for _ in range(CONVERSATIONS)]
    others = sum(not same for *_, same in found)
    print(f"{name}: {len(found)} conversations, {sum(forks for _, forks, _ in found)} forks, {others} that one encoding would encode otherwise")
    if name == "chatml":
        check("other encodings occur, and are kept", 0 < others < CONVERSATIONS)
        check("nothing forks where a template only appends", not any(forks for _, forks, _ in found))
    if name == "thinking":
        check("a template that drops old reasoning forks", sum(forks for _, forks, _ in found) > CONVERSATIONS // 2)

CALLS = (  # a template's mark, a text, the text without calls, the calls; None: damaged
    ("<tool_call>", 'a\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("a", [("f", {"x": 1})])),
    ("<tool_call>", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n</function>\n</tool_call>",
     ("", [("f", {"x": 1, "y": "a\nb"})])),
    ("<tool_call>", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>", ("", [("f", {"x": "a b"})])),
    ("<tool_call>", '<tool_call>\n{"name": "f", "arg', None), ("<tool_call>", "<tool_call>\n{}\n</tool_call>", None),
    ("", "<tool_call>\n{}\n</tool_call>", ("<tool_call>\n{}\n</tool_call>", [])),
    ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 2}}]', ("", [("f", {}), ("g", {"a": 2})])),
    ("[TOOL_CALLS]", 'a[TOOL_CALLS]f[ARGS]{"x": [1]}[TOOL_CALLS]g[ARGS]{}', ("a", [("f", {"x": [1]}), ("g", {})])),
    ('"parameters": ', '{"name": "f", "parameters": {"x": 1}}', ("", [("f", {"x": 1})])),
    ('"parameters": ', "plain text", ("plain text", [])))
for template, text, wanted in CALLS:
    try:
        calls = render.calls_of(text, template)
    except render.Unread:
        calls = None
    check(f"the calls of {text!r}", calls == wanted, repr(calls))
check("bytes", render.Bytes().said([104, 105], False, 1)["message"]["raw"] == "hi")
close()
