"""data/render.py: conversations of turns, written by a scripted model and environment, end as prepare.py's rendering of their messages, for
templates of eight manners, and published ones where TRL is installed; ids that were drawn stay; the forms of tool calls. Prints how many
conversations another encoding would encode otherwise. Run by test_prepare.py's Python.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys

from checks import WORK, check, close
import prepare_samples as samples

import encode  # noqa: E402  (in data/, which prepare_samples has put into the path)
import render  # noqa: E402
import tool_calls  # noqa: E402
import templates  # noqa: E402

# In the manner of gpt-oss's and Gemma 4's: reasoning of turns with calls; a tool's answer needs a call.
HARMONY = """{%- for m in messages %}
    {%- set thought = '<|channel|>analysis<|message|>' + (m.thinking or '') + '<|end|><|start|>assistant' if m.thinking else '' %}
    {%- if m.tool_calls %}{% set tool = m.tool_calls[0].function %}
        {{- '<|start|>assistant' + thought + ' to=functions.' + tool.name + '<|channel|>commentary json<|message|>' + tool.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + messages[loop.index0 - 1].tool_calls[0].function.name + '<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GEMMA = """{%- set ns = namespace(called=false) %}{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|tool_response>response:w{value:<|"|>' + m.content + '<|"|>}<tool_response|>' if ns.called }}
    {%- else %}
        {{- '' if ns.called and m.role == 'assistant' else '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
        {{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' if m.reasoning_content }}
        {{- m.content.split('<channel|>')[-1] | trim }}
        {%- for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{x:' ~ call.function.arguments.x ~ '}<tool_call|>' }}{% endfor %}
        {{- '' if m.tool_calls else '<turn|>\n' }}
        {%- set ns.called = m.tool_calls is defined %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.called %}{{ '<|turn>model\n' }}{% endif %}"""
MARKS = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "<|turn>", "<turn|>", "<|channel>",
         "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']

TEMPLATES = {  # name: (template, end of a turn, end of a turn with a call; None: tools are not rendered)
    "chatml": (samples.CHATML, "<|im_end|>", "<|im_end|>"), "thinking": (samples.THINKING, "<|im_end|>", "<|im_end|>"),
    "opening": (samples.OPENING, "<|im_end|>", "<|im_end|>"), "hybrid": (samples.HYBRID, "<|im_end|>", "<|im_end|>"),
    "mistral": (samples.MISTRAL, "</s>", None), "generation": (samples.GENERATION, "<|im_end|>", "<|im_end|>"),
    "harmony": (HARMONY, "<|return|>", "<|call|>"), "gemma": (GEMMA, "<turn|>", "<|tool_response>")}
if trl := importlib.util.find_spec("trl"):
    for name, file in (("harmony", "gptoss"), ("gemma", "gemma4"), ("gemma", "gemma4_v5"), ("hybrid", "glm4moe"), ("hybrid", "qwen3"), ("python", "lfm2_v2"), ("python", "lfm2_2_5_v2")):
        with open(os.path.join(os.path.dirname(trl.origin), "chat_templates", file + ".jinja"), encoding="utf-8") as text:
            TEMPLATES[f"{name}: {file}"] = (text.read(), *TEMPLATES.get(name, ("", "<|im_end|>", "<|im_end|>"))[1:])
CONVERSATIONS = 12


def prepared(name, template, end):
    """Returns (folder of the data, tokenizer) of a few prompts."""
    folder = os.path.join(WORK, name)
    tokenizer = samples.byte_level()
    tokenizer.add_special_tokens(MARKS)
    samples.tokenizer_folder(folder, tokenizer, template, bos="<s>", eos=end)
    rows = os.path.join(WORK, name + ".jsonl")
    samples.write_lines(rows, [{"prompt": [{"role": "user", "content": text}], "level": 3} for text in samples.LINES])
    subprocess.run([sys.executable, "data/prepare.py", "--tokenizer", folder, "--out", folder + "-data", "--format", "prompts", "--workers", "1",
                    rows], check=True, capture_output=True)
    return folder + "-data", folder


def drawn(rng, name):
    """Returns (the text of a turn: reasoning, text, a call, spaces, as a model may write them; whether it has a call)."""
    manner, x, called = name.split(":")[0], rng.randrange(9), rng.random() < 0.5
    thought, text = rng.choice(samples.LINES).strip(), rng.choice(samples.PHRASES) + rng.choice(["", " ", "\n", " {\"a\": 1}"]) + rng.choice(samples.LINES)
    if manner == "harmony":
        ways = " to=functions.w<|channel|>commentary json", "<|channel|>commentary to=functions.w <|constrain|>json"
        ends = rng.choice(ways) + f'<|message|>{{"x": {x}}}' if called else f"<|channel|>final<|message|>{text}"
        return (f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if rng.random() < 0.7 else "") + ends, called
    if manner == "gemma":
        thought = f"<|channel>thought\n{thought}\n<channel|>" if rng.random() < 0.7 else ""
        return thought + (f"<|tool_call>call:w{{x:{x}}}<tool_call|>" if called else text.strip()), called
    if manner == "python":
        return text.strip() + f"<|tool_call_start|>[w(x={x})]<|tool_call_end|>" * called, called
    thought = {"thinking": "<think>\n{}\n</think>\n\n", "opening": "{}\n</think>\n\n", "hybrid": "<think>\n{}\n</think>\n\n"}.get(manner, "").format(thought)
    call = f'\n<tool_call>\n{{"name": "w", "arguments": {{"x":{x}}}}}\n</tool_call>'
    return thought + text.strip() + call * (manner != "mistral" and called), called


def ids_of(rng, encoder, text):
    """Encodes a text in pieces, so that not always as one encoding would."""
    at = rng.randrange(len(text)) if rng.random() < 0.3 else 0
    return [*encoder.encoding(text[:at]).ids.tolist(), *encoder.encoding(text[at:]).ids.tolist()]


def renderings(renderer, row, messages):
    for form in renderer.forms(messages):
        try:
            yield renderer.rendering(row, form)
        except templates.TemplateFailure:
            pass


def converse(renderer, name, end, end_of_call, rng):
    """Returns (ids, forks, whether another encoding of their text has these ids)."""
    encoder, row = renderer.encoder, {"messages": [{"role": "user", "content": rng.choice(samples.LINES)}], "level": 3}
    messages, forks = list(row["messages"]), 0
    ids = encoder.encoding(renderer.rendering(row, messages)).ids.tolist()
    for turn in range(1, rng.randrange(2, 6)):
        text, called = drawn(rng, name)
        said = [*ids_of(rng, encoder, text), encoder.tokenizer.token_to_id(end_of_call if called and end_of_call else end)]
        messages.append(renderer.said(said, True, turn)["message"])
        if name.split(":")[0] in ("thinking", "hybrid", "harmony", "gemma", "python"):
            check(f"{name}: a call", ("tool_calls" in messages[-1]) == called, repr(messages[-1]))
        ids += said
        content = rng.choice(samples.PHRASES).strip()
        messages.append({"role": "tool" if end_of_call and rng.random() < 0.6 else "user", "content": content})
        found = render.answer(renderer, json.dumps({"ids": ids, "row": row, "messages": messages, "most": 10**6}))
        if "error" in found:
            check(f"{name}: a turn", False, found["error"])
            break
        forks += found["keep"] < len(ids)
        ids = ids[:found["keep"]] + found["ids"]
        added = renderer.text(found["ids"])
        check(f"{name}: the answer is rendered", content in added or json.dumps(content, ensure_ascii=False)[1:-1] in added, repr(added))
    text = renderer.text(ids)
    check(f"{name}: the text is prepare.py's rendering", text in [*renderings(renderer, row, messages)], repr(text))
    return ids, forks, encoder.encoding(text).ids.tolist() == ids


def junk_stays(renderer, name, end, role, rng):
    """A model may write anything: marks in any order. No turn of it ends a run."""
    encoder, row = renderer.encoder, {"messages": [{"role": "user", "content": "hello"}]}
    text = "".join(rng.choices([*MARKS, *samples.SPECIAL, "<think>", "</think>", "<tool_call>", "</tool_call>", " to=functions.w",
                                "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|channel|>commentary",
                                '{"name": "w", "arguments": {}}', "call:w{x:1}", "<|tool_call_start|>", "[TOOL_CALLS]", "\n", "hello"], k=rng.randrange(1, 9)))
    ids = encoder.encoding(renderer.rendering(row, row["messages"]) + text).ids.tolist()
    said = render.answer(renderer, json.dumps({"said": encoder.encoding(text).ids.tolist(), "ended": False, "turn": 1}))
    asked = {"ids": ids, "row": row, "messages": [*row["messages"], said.get("message"), {"role": role, "content": "4"}], "most": 99}
    check(f"{name}: {text!r} is a turn", "ids" in render.answer(renderer, json.dumps(asked)), render.answer(renderer, json.dumps(asked)))


for name, (template, end, end_of_call) in TEMPLATES.items():
    renderer = render.Renderer(*prepared(name, template, end))
    rng = random.Random(name)
    found = [converse(renderer, name, end, end_of_call, rng) for _ in range(CONVERSATIONS)]
    for i in range(40):
        junk_stays(renderer, name, end, "tool" if end_of_call and i % 2 else "user", rng)
    others = sum(not same for *_, same in found)
    print(f"{name}: {len(found)} conversations, {sum(forks for _, forks, _ in found)} forks, {others} that one encoding would encode otherwise")
    if name == "chatml":
        check("other encodings occur, and are kept", 0 < others < CONVERSATIONS)
        check("nothing forks where a template only appends", not any(forks for _, forks, _ in found))
    if name == "thinking":
        check("a template that drops old reasoning forks", sum(forks for _, forks, _ in found) > CONVERSATIONS // 2)

rows, plain = os.path.join(WORK, "plain.jsonl"), samples.tokenizer_folder(os.path.join(WORK, "plain"), samples.byte_level())
samples.write_lines(rows, [{"prompt": text} for text in samples.LINES])
subprocess.run([sys.executable, "data/prepare.py", "--tokenizer", plain, "--out", plain + "-data", "--format", "prompts", "--workers", "1", rows],
               check=True, capture_output=True)
renderer = render.Renderer(plain + "-data", plain)
ids = renderer.encoder.encoding("a <tool_call> b").ids.tolist()
said = render.answer(renderer, json.dumps({"said": ids, "ended": False, "turn": 1}))
check("plain text has no calls", said.get("message", {}).get("raw") == "a <tool_call> b" == said["message"]["content"], repr(said))
asked = {"ids": ids, "row": {}, "messages": [{"role": "user", "content": "x"}, said.get("message"), {"role": "tool", "content": "4"}], "most": 9}
check("plain text follows", render.answer(renderer, json.dumps(asked)) == {"keep": len(ids), "ids": renderer.encoder.encoding("4").ids.tolist()})

CALLS = (  # a template's mark, a text, the text without calls, the calls; None: damaged
    ("<tool_call>", 'a\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("a", [("f", {"x": 1})])),
    ("<tool_call>", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n</function>\n</tool_call>",
     ("", [("f", {"x": 1, "y": "a\nb"})])),
    ("<tool_call>", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>", ("", [("f", {"x": "a b"})])),
    ("<tool_call>", '<tool_call>\n{"name": "f", "arg', None), ("<tool_call>", "<tool_call>\n{}\n</tool_call>", None),
    ("", "<tool_call>\n{}\n</tool_call>", ("<tool_call>\n{}\n</tool_call>", [])),
    ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 2}}]', ("", [("f", {}), ("g", {"a": 2})])),
    ("[TOOL_CALLS]", 'a[TOOL_CALLS]f[ARGS]{"x": [1]}[TOOL_CALLS]g[ARGS]{}', ("a", [("f", {"x": [1]}), ("g", {})])),
    ("<|tool_call>", '<|tool_call>call:f{a:<|"|>x, y: {"z"}<|"|>,b:{c:[1,true],d:<|"|><|"|>}}<tool_call|><|tool_call>call:g{}<tool_call|>',
     ("", [("f", {"a": 'x, y: {"z"}', "b": {"c": [1, True], "d": ""}}), ("g", {})])),
    ("<|tool_call>", "<|tool_call>call:f{a:<|\"|>x}<tool_call|>", None), ("<|tool_call>", "a<|tool_call>call:f{a:1}", None),
    ("<|tool_call_start|>", """a<|tool_call_start|>[f(x='b, c', y={"d": true}, z=[1, 2], w=True), g()]<|tool_call_end|>""",
     ("a", [("f", {"x": "b, c", "y": {"d": True}, "z": [1, 2], "w": True}), ("g", {})])),
    ("<|tool_call_start|>", "<|tool_call_start|>[f(x=open('y'))]<|tool_call_end|>", None),
    ("<|tool_call_start|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>", None),
    *(("<|tool_call_start|>", f"<|tool_call_start|>[f(x={value})]<|tool_call_end|>", None) for value in ("1e999", "{1, 2}", "b''", "1j", "{[]: 1}")),
    *(("<tool_call>", '<tool_call>{"name": "f", "arguments": {"x": ' + value + "}}</tool_call>", None)
      for value in ("NaN", "-Infinity", '"\\u0000"', '"\\ud800"', "[" * 200 + "]" * 200)),
    ("<tool_call>", "<tool_call>f<arg_key>x</arg_key><arg_value>NaN</arg_value></tool_call>", None),
    ("<|tool_call_start|>", "<|tool_call_start|>[f(x='b]<|tool_call_end|>", None),
    ("<|channel|>commentary", 'a<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}', ("a", [("f", {"x": 1})])),
    ("<|channel|>commentary", ' to=functions.f<|channel|>commentary json<|message|>{"x": ', None),
    ('"parameters": ', '{"name": "f", "parameters": {"x": 1}}', ("", [("f", {"x": 1})])),
    ('"parameters": ', "plain text", ("plain text", [])))
for template, text, wanted in CALLS:
    try:
        calls = tool_calls.calls_of(text, template)
    except ValueError:
        calls = None
    check(f"the calls of {text!r}", calls == wanted, repr(calls))
check("bytes", render.Bytes().said([104, 105], False, 1)["message"]["raw"] == "hi")
close()
