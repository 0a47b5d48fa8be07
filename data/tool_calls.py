"""Tool calls and reasoning in what a model writes, by the forms of chat templates: JSON or XML in <tool_call> (Qwen, GLM), Gemma 4, gpt-oss,
LFM2, Mistral, Llama. A call is (name, arguments), arguments an object. Used by render.py; without modules of others.
"""

import ast
import json
import re

XML = re.compile(r"(?s)<function=([^>\s]+)>(.*?)</function>")
PARAMETER = re.compile(r"(?s)<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>")
CHANNELS = re.compile(r"<\|channel\|>\w*|<\|(?:message|end|start)\|>")
ARGUMENT = re.compile(r"(?s)<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>")


def value_of(text, other=str):
    """Returns a value in JSON, else other(text)."""
    try:
        return json.loads(text)
    except ValueError:
        return other(text)


def call(found):
    """Returns (name, arguments) of an object with name and arguments."""
    arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        raise ValueError
    return found["name"], arguments


def tagged_call(text):
    """Returns the calls inside <tool_call>: JSON, a function in XML (Qwen3-Coder), or keys and values (GLM)."""
    if xml := XML.fullmatch(text):
        return [(xml[1], {key: value_of(value) for key, value in PARAMETER.findall(xml[2])})]
    if text.startswith("{"):
        return [call(json.loads(text))]
    name = re.match(r"[\w.-]+", text)
    if not name or text[name.end():].strip() and not ARGUMENT.search(text):
        raise ValueError
    return [(name[0], {key: value_of(value) for key, value in ARGUMENT.findall(text)})]


def mistral_call(name, value):
    value = json.loads(value)
    return [call({"name": name, "arguments": value})] if name else [*map(call, value if isinstance(value, list) else [value])]


def gemma_call(name, arguments):
    """Reads Gemma 4's arguments: JSON, but with bare keys, and strings between marks."""
    parts = arguments.split('<|"|>')
    parts[::2] = [re.sub(r"(?<=[{,])\s*([^{}\[\],:]+):", lambda key: json.dumps(key[1]) + ":", part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return [call({"name": name, "arguments": json.loads("".join(parts))})]


def python_calls(text):
    """Reads LFM2's calls, a list in Python, whose mappings are JSON: [f(a='b', c={"d": true}), g()]."""
    try:
        found = ast.parse(text, mode="eval").body.elts
        if any(one.args or any(value.arg is None for value in one.keywords) for one in found):
            raise ValueError
        values = [{value.arg: value_of(ast.get_source_segment(text, value.value), ast.literal_eval) for value in one.keywords} for one in found]
        json.dumps(values)  # refuses sets, bytes and complex numbers
        return [call({"name": one.func.id, "arguments": arguments}) for one, arguments in zip(found, values)]
    except (SyntaxError, AttributeError, MemoryError, TypeError):
        raise ValueError from None


FORMS = (  # (what a template of the form has, what a turn with calls has, a call, its reader)
    ("<tool_call>", "<tool_call>", re.compile(r"(?s)<tool_call>\s*(.*?)\s*</tool_call>"), tagged_call),
    ("<|tool_call>", "<|tool_call>", re.compile(r"(?s)<\|tool_call>call:([\w.-]+)(\{.*?\})<tool_call\|>"), gemma_call),
    ("<|channel|>commentary", "to=functions.", re.compile(r"(?s)(?:<\|channel\|>\w+)?\s*to=functions\.([\w.-]+)[^{]*?<\|message\|>(.*)"),
     mistral_call),
    ("<|tool_call_start|>", "<|tool_call_start|>", re.compile(r"(?s)<\|tool_call_start\|>(.*?)<\|tool_call_end\|>"), python_calls),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", re.compile(r"(?s)\[TOOL_CALLS\]\s*(?:([\w.-]+)\[ARGS\])?(.*?)(?=\[TOOL_CALLS\]|$)"), mistral_call))


def parsed(text, template):
    """Returns (text without its calls, [(name, arguments)]), by the forms that the template writes. Raises ValueError for a damaged call."""
    for own, mark, pattern, read in FORMS:
        if own in template and mark in text:
            found = [*pattern.finditer(text)]
            if len(found) != text.count(mark):
                raise ValueError
            return pattern.sub("", text).strip(), [one for match in found for one in read(*match.groups())]
    bare = text.strip().removeprefix("<|python_tag|>")
    if '"parameters": ' in template and bare.startswith("{") and '"name"' in bare:
        return "", [call(json.loads(bare))]
    return text, []


def depth(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return 1 + max(map(depth, parts), default=0)


def calls_of(text, template):
    """Parses calls. Calls that are no JSON for the trainer are damaged: NaN, infinity, U+0000, half a pair of surrogates, deep nesting."""
    text, calls = parsed(text, template)
    written = json.dumps(calls, ensure_ascii=False, allow_nan=False)
    if "\\u0000" in written.encode().decode() or depth(calls) > 100:
        raise ValueError
    return text, calls


def harmony(text):
    """Returns the messages of gpt-oss's turn as one text: reasoning in <think>, what is said, a call. Other marks stay."""
    parts = [part.partition("<|message|>") for part in text.split("<|start|>assistant")]
    thought = "\n".join(body for header, _, body in parts if "<|channel|>analysis" in header)
    said = "".join(header + mark + body if "to=" in header or not mark else body
                   for header, mark, body in parts if "<|channel|>analysis" not in header)
    return f"<think>\n{thought}\n</think>\n\n{said}" if thought else said
