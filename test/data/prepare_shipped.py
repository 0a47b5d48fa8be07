"""Templates that trl ships, of families whose turns have channels, for test_prepare.py: text, tokens and masks of random conversations
against jinja2 and the patterns of TURNS. No template is copied here; without trl these tests are skipped.
"""

import datetime
import functools
import importlib.util
import json
import os
import random
import re
import struct
import tempfile
import unittest

import jinja2.ext
import jinja2.sandbox

import encode
import prepare_samples as samples
import records
import tokenizer_chat
import tokenizer_file

NOW = datetime.datetime(2026, 1, 2)
TURNS = {  # the assistant's turns in a rendering; the group is without the header. OPENED: thoughts that the prompt opens
    "gptoss": r"(?s)<\|start\|>assistant((?:<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant)?.*?<\|(?:end|call|return)\|>)",
    "gemma4_v5": r"(?s)(?:<\|turn>model\n|(?<=<tool_response\|>)OPENED)(.*?(?:<turn\|>\n|<\|tool_response>|$))"}
TURNS["gptoss_training"] = TURNS["gptoss"]
ARGUMENTS = {"gptoss": ({}, {"reasoning_effort": "high", "model_identity": "I."}, {"builtin_tools": ["browser", "python"]}),
             "gemma4_v5": ({}, {"enable_thinking": True}, {"preserve_thinking": True})}


def shipped(name):
    trl = importlib.util.find_spec("trl")
    if not trl:
        raise unittest.SkipTest("no trl, whose chat templates these are")
    return os.path.join(os.path.dirname(trl.origin), "chat_templates", name + ".jinja")


@functools.cache
def compiled(name):
    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals.update(strftime_now=NOW.strftime, raise_exception=refuse)
    with open(shipped(name), encoding="utf-8") as file:
        return environment.from_string(file.read())


def library(name):
    with open(shipped(name), encoding="utf-8") as file:
        marks = sorted(set(samples.MARKS.findall(file.read())))
    tokenizer = samples.byte_level()
    tokenizer.add_special_tokens([*marks, "<bos>", "<eos>"])
    return tokenizer


class Shipped(unittest.TestCase):
    def test_random_conversations(self):
        for name in TURNS:
            family = name.removesuffix("_training")
            path, rng, done = shipped(name), random.Random(3), 0
            with tempfile.TemporaryDirectory() as folder:
                own = encode.Encoder(encode.Options(samples.tokenizer_folder(folder, library(family), None, "<bos>", "<eos>"), chat_template=path), NOW)
            for i in range(150):
                row, given = samples.talk(rng, 4 if i % 30 else 30)
                row["chat_template_kwargs"] = rng.choice(ARGUMENTS[family])
                text = compiled(family).render(messages=list(map(samples.in_field, given)), tools=row.get("tools"), bos_token="<bos>", **row["chat_template_kwargs"])
                found = own.tokenizer.encode(text, add_special_tokens=False)
                opened = r"(?:<\|channel>thought\n)?" if "enable_thinking" in row["chat_template_kwargs"] else ""
                turns = list(re.finditer(TURNS[name].replace("OPENED", opened), text))
                answers = [message for message in row["messages"] if message["role"] == "assistant"]
                self.assertEqual(len(turns), len(answers), text)
                spans = [turn.span(0 if name != family else 1) for turn, answer in zip(turns, answers) if not records.masked(answer)]
                counts = [int(any(begin <= at < end for begin, end in spans)) for at, _ in found.offsets]
                if not any(counts[1:]):
                    continue
                with self.subTest(row=row):
                    _, (document,) = own.encode(row)
                    own.check(document)
                    self.assertEqual((document.ids.tolist(), document.counts.tolist()), (found.ids, [0, *counts[1:]]))
                done += 1
            self.assertGreater(done, 130)

    def test_texts_beside_calls(self):
        """Of Gemma 4's turns all counts but headers and what tools answer, also where its templates move the text beside a call."""
        for name in ("gemma4", "gemma4_v5"):
            rng = random.Random(4)
            with tempfile.TemporaryDirectory() as folder:
                own = encode.Encoder(encode.Options(samples.tokenizer_folder(folder, library(name), None, "<bos>", "<eos>"), chat_template=shipped(name)), NOW)
            for _ in range(16):
                row, given = samples.talk(rng, 3, beside=True)
                row["messages"] = [{key: value for key, value in message.items() if key not in records.MASKS} for message in row["messages"]]
                if name == "gemma4" and "<think>" in repr(row):  # which it leaves in contents
                    continue
                text = compiled(name).render(messages=list(map(samples.in_field, given)), tools=row.get("tools"), bos_token="<bos>")
                spans = [turn.span(1) for turn in re.finditer(r"(?s)(?:<\|turn>model\n|<tool_response\|>)((?!<\|tool_response>).*?)(?=response:w|<\|turn>|\Z)", text)]
                found = own.tokenizer.encode(text, add_special_tokens=False)
                with self.subTest(name=name, row=row):
                    _, (document,) = own.encode(row)
                    own.check(document)
                    counts = [int(any(begin <= at < end for begin, end in spans)) for at, _ in found.offsets]
                    self.assertTrue((document.ids.tolist(), document.counts.tolist()) == (found.ids, counts), text)

    def test_more(self):
        """Reasoning in a content between the template's own marks; what tokenizer.tok has; ids that end an answer."""
        made = {}
        for name, ends in (("gptoss", ["<eos>", "<|return|>", "<|call|>"]), ("gemma4_v5", ["<eos>", "<turn|>", "<|tool_response>"])):
            with tempfile.TemporaryDirectory() as folder, open(shipped(name), encoding="utf-8") as file:
                samples.tokenizer_folder(folder, library(name), file.read(), "<bos>", "<eos>")
                source = tokenizer_file.Source(folder)
                own = encode.Encoder(encode.Options(folder), NOW)
                made[name] = own, tokenizer_chat.find_chat(own.template, source.encode)
                content = tokenizer_file.tokenizer_bytes(source)
            ids = struct.iter_unpack("<I", tokenizer_file.section_of(content, "end_ids"))
            self.assertEqual([source.tokenizer.id_to_token(id) for id, in ids], ends)
            self.assertEqual(struct.unpack_from("<I", content, 8), (5,))
            chat, user = made[name][1], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "r"}, {"role": "user", "content": "c"}]
            self.assertIn("FORGETS", chat.flags)
            kept = {"gptoss": "<|channel|>final<|message|>b", "gemma4_v5": "b"}[name]
            text = made[name][0].template.render(user, True)
            self.assertEqual(text, "".join((chat.texts["first_before"], "a", chat.texts["first_after"], kept, chat.texts["next_before"], "c", chat.texts["next_after"])))
            self.assertEqual([chat.texts[f"thought_{edge}"] for edge in ("begin", "end")],
                             {"gptoss": ["", "<|end|><|start|>assistant"], "gemma4_v5": ["<|channel>", "<channel|>"]}[name])
        own = made["gemma4_v5"][0]
        for content, counted in (("<|channel>thought\nso it is\n<channel|>b", "<|channel>thought\nso it is\n<channel|>b<turn|>\n"), ("<|channel>thought\nso it is", "<|channel>thought\nso it is"),
                                 ("<|channel>thought\n<channel|>b", "b<turn|>\n"), ("b", "b<turn|>\n")):
            _, (document,) = own.encode({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]})
            self.assertEqual(own.tokenizer.decode(document.ids[document.counts == 1].tolist(), skip_special_tokens=False), counted)
