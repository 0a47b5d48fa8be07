#!/usr/bin/env python3
"""Random conversations through real chat templates: the tokens of data/prepare.py, and which of them count, held against TRL's.

    python dev/compare/conversations.py [--count 300] [--seed 1] [--show]

Needs `pip install trl transformers torch tokenizers jinja2 numpy`. For each family TRL ships the template of the model and one for training,
whose {% generation %} blocks say what counts with assistant_only_loss. TRL tokenises with apply_chat_template; masks of the model's own
template are compared where both templates render the same text. TRL is given what data/README.md states: arguments of tool calls as objects,
reasoning under both of its names; a turn that is masked does not count. Columns:

    equal      tokens and masks are the same
    stated     they are, once reasoning that stood in the content is given to TRL in the field that the template has for it
    refused    by both; or here, because the template leaves out a message, which is then looked for in TRL's rendering
    own        tokens are the same with the model's own template; in brackets those whose masks could be compared, and are the same but
               for the beginning of a block that the generation prompt has already (the line break after Qwen2.5's header, "<think>\n")
    no turns   turns are not found in the model's own template, which is refused

Exit 1 if anything is different.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "test" / "data")]

import transformers
import trl

import encode
import prepare_samples as samples
import records
import templates

SHIPPED = pathlib.Path(trl.__file__).parent / "chat_templates"
FAMILIES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_8", "llama3", "gemma3", "phi3_5", "lfm2_v2", "glm4moe", "nemotron_3_nano")
SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c>]+[|\uff5c]>|<(?:start|end)_of_turn>|</?think>|\[gMASK\]|<sop>")
WORDS = ("hello", "the weather", "\u00e9t\u00e9", "\u4f60\u597d", "\U0001f600", '"quoted" & <b>', "a\\b", "two\nlines", "  spaces ", "2 + 2 = 4", "user", "{x}")
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]


def conversation(rng):
    """(row as a user has it, messages as TRL gets them)"""
    text = lambda: " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
    row, tools, reasons = [], rng.random() < .3, rng.random() < .4
    if rng.random() < .4:
        row.append({"role": rng.choice(("system", "system", "system", "developer")), "content": text()})

    def answer(content, **more):
        message = {"role": "assistant", "content": content, **more}
        if reasons and rng.random() < .7:
            where = rng.randrange(3)
            if where < 2:
                message[("reasoning_content", "reasoning")[where]] = text().strip()
            else:
                message["content"] = f"<think>\n{text().strip()}\n</think>\n\n{content}"
        if rng.random() < .2:
            message[rng.choice(records.MASKS)] = rng.choice((0, 1, False, True))
        row.append(message)

    for _ in range(rng.randint(1, 4)):
        row.append({"role": "user", "content": text()})
        if tools and rng.random() < .7:
            arguments = {"city": text(), "days": rng.randint(1, 9)} if rng.random() < .8 else {}
            arguments = json.dumps(arguments, ensure_ascii=rng.random() < .5) if rng.random() < .5 else arguments
            answer("", tool_calls=[{"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}])
            row.append({"role": "tool", "name": "w", "tool_call_id": "c1", "content": json.dumps({"sky": text()}, ensure_ascii=False)})
        answer(text() if rng.random() < .95 else "")
    given = []
    for message in row:
        message = templates.with_reasoning({key: value for key, value in message.items() if key not in records.MASKS})
        if message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            arguments = json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]
            message["tool_calls"] = [{**message["tool_calls"][0], "function": {**call, "arguments": arguments}}]
        given.append(message)
    return {"messages": row, **({"tools": TOOLS} if tools else {})}, given


def in_field(message):
    thought, end, answer = message["content"].partition("</think>")
    if message["role"] != "assistant" or not end:
        return message
    return templates.with_reasoning({**message, "content": answer.lstrip("\n"), "reasoning_content": thought.removeprefix("<think>").strip("\n")})


def of_trl(tokenizer, template, row, given, masked=True):
    """(ids, mask) or (None, why it refuses). The mask of turns that do not count is zero: blocks are in the order of turns."""
    try:
        found = tokenizer.apply_chat_template(given, tools=row.get("tools"), chat_template=template, tokenize=True, return_dict=True,
                                              return_assistant_tokens_mask=masked)
    except Exception as error:  # a template is a program
        return None, str(error)
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"]) if masked else []
    runs = [i for i, (before, own) in enumerate(zip([0, *mask], mask)) if own and not before]
    turns = [message for message in row["messages"] if message["role"] == "assistant"]
    if masked and len(runs) != len(turns):
        return None, f"{len(runs)} blocks of {len(turns)} turns"
    for begin, turn in zip(runs, turns):
        while records.masked(turn) and begin < len(mask) and mask[begin]:
            mask[begin], begin = 0, begin + 1
    return ids, [0, *mask[1:]]


def left_out(tokenizer, template, row, given, detail):
    """Whether TRL's tokens stay the same without what prepare.py says that the template leaves out."""
    gone = re.match(r"the template leaves out the (\w+) of message (\d+)", detail)
    if not gone:
        return False
    at, other = int(gone[2]) - 1, {"content": "gone"} if gone[1] == "content" else {"tool_calls": []}
    both = [of_trl(tokenizer, template, row, messages, False)[0] for messages in (given, [*given[:at], {**given[at], **other}, *given[at + 1:]])]
    return both[0] is not None and both[0] == both[1]


def without_prompt(tokenizer, template, ids, trl, ours):
    """TRL's mask without what blocks begin with that is in the generation prompt."""
    user, trl = [{"role": "user", "content": "x"}], list(trl)
    closed, asked = (tokenizer.apply_chat_template(user, chat_template=template, tokenize=False, add_generation_prompt=more) for more in (False, True))
    for begin in [i for i, (before, own) in enumerate(zip([0, *trl], trl)) if own and not before]:
        end = next((i for i in range(begin, len(ids)) if ours[i] or not trl[i]), begin)
        if tokenizer.decode(ids[begin:end]) in asked[len(closed):]:
            trl[begin:end] = [0] * (end - begin)
    return trl


def of_ours(encoder, row):
    """(ids, mask, what was told), or (None, why not, reason)"""
    try:
        record, (document,) = encoder.understood(row)
    except records.Rejected as rejected:
        return None, rejected.detail, rejected.reason
    return document.ids.tolist(), document.counts.tolist(), record.told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the first difference of each family")
    options = parser.parse_args()
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, {options.count} conversations, seed {options.seed}")
    names = ("equal", "stated", "refused", "DIFFERENT", "own", "(masks)", "no turns")
    print(f"{'family':22} {' '.join(f'{name:>9}' for name in names)}")
    bad = 0
    for family in FAMILIES:
        own, training = (str(SHIPPED / f"{family}{kind}.jinja") for kind in ("", "_training"))
        texts = {path: pathlib.Path(path).read_text(encoding="utf-8") for path in (own, training)}
        rng, sums, shown = random.Random(options.seed), collections.Counter(), None
        with tempfile.TemporaryDirectory() as folder:
            library = samples.byte_level()
            library.add_special_tokens(sorted(set(SPECIAL.findall(texts[own]))))
            samples.tokenizer_folder(folder, library, texts[own], "<s>", "</s>")
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            ours = {path: encode.Encoder(encode.Options(tokenizer=folder, chat_template=path)) for path in texts}
        for _ in range(options.count):
            row, given = conversation(rng)
            for path in (training, own):
                found, form = of_ours(ours[path], row), given
                ids, mask = of_trl(tokenizer, texts[path], row, given, path == training)
                moved = found[0] is not None and found[0] != ids and any("became reasoning_content" in text for text in found[2])
                if moved:
                    form = list(map(in_field, given))
                    ids, mask = of_trl(tokenizer, texts[path], row, form, path == training)
                outcome = "stated" if moved else "equal"
                if found[0] is None:
                    both = ids is None or found[2] == records.NO_TARGET and not any(mask or [])
                    outcome = ("refused" if both or left_out(tokenizer, texts[path], row, given, found[1]) else
                               "no turns" if path == own and "is not found" in found[1] else "DIFFERENT")
                elif ids != found[0] or path == training and mask != found[1]:
                    outcome = "DIFFERENT"
                elif path == own:
                    trained, outcome = of_trl(tokenizer, texts[training], row, form), "own"
                    if trained[0] == ids:
                        same = without_prompt(tokenizer, texts[own], ids, trained[1], found[1]) == found[1]
                        sums["(masks)"], outcome = sums["(masks)"] + same, "own" if same else "DIFFERENT"
                sums[outcome] += path == training or outcome in ("own", "no turns", "DIFFERENT")
                if outcome == "DIFFERENT" and not shown:
                    shown = pathlib.Path(path).name, row, found, ids, mask
        print(f"{family:22} {' '.join(f'{sums[name]:9}' for name in names)}")
        bad += sums["DIFFERENT"]
        if shown and options.show:
            print(json.dumps(shown, ensure_ascii=False)[:6000])
    sys.exit(bad > 0)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
