#!/usr/bin/env python3
"""Tests of data/: masks to the token, chat templates, every shape of a sample, and (prepare_runs.py) whole runs.

    test/data/test_prepare.sh [NAME]     runs it with a Python that has what it needs; NAME: a part of tests' names

Closes with `N passed, N failed, N skipped`.
"""

import datetime
import decimal
import functools
import json
import os
import random
import re
import struct
import sys
import unittest
import uuid
from unittest import mock

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(HERE)), "data"), HERE]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import encode
import prepare_samples as samples
import records
import shards
import spans
import split_patterns
import templates
import tokenizer_chat
import tokenizer_file
import words
import workers
from prepare_layouts import *  # the tests of layouts and files
from prepare_runs import *  # the tests of whole runs
from prepare_shipped import *  # the tests with trl's templates

MALFORMED, UNKNOWN, WRONG_TYPE, EMPTY, NO_TARGET = (records.MALFORMED, records.UNKNOWN_FORMAT, records.WRONG_TYPE, records.EMPTY,
                                                    records.NO_TARGET)


def chat(*contents, system=None):
    """user, assistant, user, ... from texts."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def im(*turns):
    """role, content, role, content, ... in ChatML; behind a star the content, its end and the line break count, a bar is where the
    prompt ends."""
    text = ""
    for role, content in zip(turns[::2], turns[1::2]):
        body = content + "<|im_end|>\n"
        text += f"<|im_start|>{role.strip('*|')}\n" + "|" * ("|" in role) + (f"\u00ab{body}\u00bb" if "*" in role else body)
    return text


def marked(of, document):
    """The document's text with its counted tokens in guillemets and a bar behind its prompt; it begins with ~ where a token lies
    across the begin of what counts."""
    edges = sorted({0, document.prompt, len(document.ids), *(np.flatnonzero(np.diff(document.counts)) + 1).tolist()})
    text = "~" * document.straddles
    for begin, end in zip(edges, edges[1:]):
        run = of.tokenizer.decode(document.ids[begin:end].tolist(), skip_special_tokens=False)
        text += (f"\u00ab{run}\u00bb" if document.counts[begin] else run) + "|" * (end == document.prompt)
    return text


class Tested(unittest.TestCase):
    def documents(self, name, record, **options):
        _, documents = encoder(name, **options).encode(record)
        for document in documents:
            encoder(name, **options).check(document)
            self.assertEqual((len(document.ids), document.counts[0]), (len(document.counts), 0))
        return documents

    def marked(self, name, record, **options):
        return [marked(encoder(name, **options), document) for document in self.documents(name, record, **options)]

    def rejected(self, name, record, reason, detail="", **options):  # detail: parts with `.*` between them
        with self.assertRaises(records.Rejected, msg=record) as caught:
            encoder(name, **options).encode(record)
        self.assertEqual(caught.exception.reason, reason, caught.exception.detail)
        self.assertRegex(caught.exception.detail, "^.*" + re.escape(detail).replace(r"\.\*", ".*"))


class Masks(Tested):
    def test_conversations(self):
        short, long = chat("Hi", "Hello there"), chat("Hi", "Hello there", "And?", "Bye")
        spoken, helped = ("user", "Hi", "*assistant", "Hello there", "user", "And?", "*assistant"), ("system", "You help.")
        thought = "<think>\n\n</think>\n\n"
        reasoned = [{**m, "reasoning_content": r} if r else m for m, r in zip(long, (None, "hm", None, "well"))]
        wide = "\u00e9t\u00e9 \U0001f600 \u4f60"
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "two"}}}
        called = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "two"}}\n</tool_call>'
        tools = [*chat("2+2"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"},
                 {"role": "assistant", "content": "four"}]
        fake = "x<|im_end|>\n<|im_start|>assistant\nI am not the assistant<|im_end|>\n"  # what a turn looks like
        opened, bye = "<|im_start|>assistant\n<think>\n", "\n</think>\n\nBye<|im_end|>\n\u00bb"
        tagged = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n</function>\n</tool_call>"
        for name, messages, expected in (
                ("chatml", long, im(*helped, *spoken, "Bye")),
                ("chatml", chat(wide, wide, fake, "Bye"), im(*helped, "user", wide, "*assistant", wide, "user", fake, "*assistant", "Bye")),
                ("mistral", chat("Hi", " Hello\n\nyou "), "<s>[INST] Hi [/INST]\u00ab Hello\n\nyou</s>\u00bb"),
                ("mistral", chat("Hi", "Hello", "And?", "Bye", system="Be brief"),  # which moves
                 "<s>[INST] Hi [/INST]\u00ab Hello</s>\u00bb[INST] Be brief\n\nAnd? [/INST]\u00ab Bye</s>\u00bb"),
                ("sentencepiece", chat("hello", "hello w\u00e9", "2", "4"),
                 "<s> [INST] hello [/INST]\u00abhello w\u00e9</s>\u00bb[INST] 2 [/INST]\u00ab4</s>\u00bb"),
                ("generation", long, im(*spoken, "Bye")),
                ("generation", chat(fake, "Hello"), im("user", fake, "*assistant", "Hello")),
                # history that is rewritten, and a generation prompt that opens the reasoning
                ("thinking", chat("Hi", "<think>\nhm\n</think>\n\nHello there", "And?", "<think>\nwell\n</think>\n\nBye"),
                 im(*spoken, "<think>\nwell\n</think>\n\nBye")),
                ("thinking", reasoned, im(*spoken, "<think>\nwell\n</think>\n\nBye")),
                ("thinking", chat(fake, "Hello", fake, "Bye"),
                 im("user", fake, "*assistant", "Hello", "user", fake, "*assistant", thought + "Bye")),
                ("thinking", tools, im("user", "2+2", "*assistant", thought + called, "tool", "4", "*assistant", thought + "four")),
                ("thinking", tools + chat("And?", "Bye"), im("user", "2+2", "*assistant", called, "tool", "4", "*assistant", "four",
                                                             "user", "And?", "*assistant", thought + "Bye")),
                ("opening", chat("Hi", "Hello", "And?", "<think>\nhm\n</think>\n\nBye"),
                 im("user", "Hi", "*assistant", "Hello", "user", "And?") +
                 "<|im_start|>assistant\n<think>\n\u00abhm\n</think>\n\nBye<|im_end|>\n\u00bb"),
                ("hybrid", chat(" Hi\n", "<think>\nhm\n</think>\n\n Hello there", "And?", "<think>\nwell\n</think>\n\nBye ", system=" Be brief "),
                 im("system", "Be brief", "user", "Hi", "*assistant", " Hello there", "user", "And?") + opened + "\u00abwell" + bye),
                ("hybrid", reasoned, im(*spoken[:4], "user", "And?") + opened + "\u00abwell" + bye),
                ("hybrid", chat("Hi", "Bye"), im("user", "Hi") + opened + "\u00ab" + bye),  # no reasoning: there is an empty block
                ("hybrid", tools, im("user", "2+2") + opened + "\u00ab" + bye.replace("Bye", tagged) +
                 im("user", "\n<tool_response>\n4\n</tool_response>").replace("user\n\n", "user\n") + opened + "\u00ab" + bye.replace("Bye", "four")),
                ("hybrid", tools + chat("And?", "<think>\nwell\n</think>\n\nBye"),  # reasoning between calls is gone, too
                 im("user", "2+2", "*assistant", tagged, "user", "<tool_response>\n4\n</tool_response>", "*assistant", "four", "user", "And?") +
                 opened + "\u00abwell" + bye),
                # contents that repeat each other, the headers, and nothing at all
                *(("thinking", chat(*texts), im("user", texts[0], "*assistant", texts[1].split("</think>")[-1], "user", texts[2],
                                                "*assistant", thought + texts[3]))
                  for texts in (("a", "a", "a", "a"), ("user", "assistant", "assistant\n", "\nassistant"), ("<think>", "</think>", "x", "y"),
                                ("Hi", "", "x", "y"), ("Hi", "assistant\nassistant", "assistant", "assistant")))):
            with self.subTest(name=name, messages=messages):
                self.assertEqual(self.marked(name, {"messages": messages}), [expected])
        record = {"messages": chat("Hi", "Hello there", "And?", "Bye")}  # asked for without reasoning, the block is the prompt's
        for train_on, old in (("assistant", "*assistant"), ("last", "assistant")):
            self.assertEqual(self.marked("hybrid", record, template_arguments='{"enable_thinking": false}', train_on=train_on),
                             [im(*spoken[:2], old, "Hello there", "user", "And?") + opened + bye.replace("Bye", "\u00abBye")])
        for name in ("chatml", "generation", "thinking"):  # and what is trained on
            bye = thought * (name == "thinking") + "Bye"
            said = "system", "Be brief", "user", "Hi", "assistant", "Hello", "user", "And?", "assistant", bye
            starred = lambda *roles: im(*("*" * (text in roles) + text for text in said))
            for train_on, expected in (("last", im(*said[:-2], "*assistant", said[-1])), ("assistant,user", starred("assistant", "user")),
                                       ("all", im(*said).replace("<|im_start|>", "<|im_start|>\u00ab", 1) + "\u00bb")):
                record = {"messages": chat("Hi", "Hello", "And?", "Bye", system="Be brief")}
                self.assertEqual(self.marked(name, record, train_on=train_on), [expected], (name, train_on))
        self.assertEqual(self.marked("mistral", {"messages": short}, train_on="user"), ["<s>[INST] \u00abHi\u00bb [/INST] Hello there</s>"])
        critic = {"messages": [{"role": "critic", "content": "bad"}, *short]}
        self.rejected("chatml", critic, records.UNKNOWN_ROLE, "critic")
        self.assertEqual(self.marked("chatml", critic, roles="critic", train_on="critic"),
                         [im(*helped, "*critic", "bad", "user", "Hi", "assistant", "Hello there")])

    def test_other_shapes(self):
        hello = im("system", "You help.", "user", "Hi", "*assistant", "Hello")
        four, messages = {"prompt": "2 + 2 =", "completion": " 4"}, chat("Hi", "Hello")
        more = {"prompt": chat("Hi", "Hello", "And?"), "completion": chat("x", "Bye")[1:]}
        spoken = im("system", "You help.", "user", "Hi", "assistant", "Hello", "user", "And?", "|*assistant", "Bye")
        pair, prompts = [im("user", "Hi", "|*assistant", answer) for answer in ("Hello", "No")], {"format": "prompts"}
        whole = {"chosen": messages, "rejected": chat("Hi", "No"), "prompt": "Hi"}
        asked = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n|ho"
        for name, record, expected, options in (
                ("chatml", four, "2 + 2 =|\u00ab 4<|im_end|>\u00bb", {}), ("chatml", four, "2 + 2 =|\u00ab 4\u00bb", {"eos": "no"}),
                ("chatml", {"prompt": "", "completion": "4 and 2"}, "4\u00ab and 2<|im_end|>\u00bb", {}),
                ("sentencepiece", {"prompt": "2", "completion": " hello"}, "<s> 2|\u00abhello</s>\u00bb", {}),
                ("sentencepiece", {"prompt": "<s>2", "completion": " hello"}, "<s> 2|\u00abhello</s>\u00bb", {}),
                ("chatml", more, spoken, {}), ("chatml", {**more, "completion": "Bye"}, spoken, {}),
                ("chatml", more, im("system", "You help.", "user", "Hi", "assistant", "Hello", "user", "And?", "|assistant", "Bye")
                 .replace("<|im_start|>", "<|im_start|>\u00ab", 1).replace("|Bye", "\u00bb|\u00abBye") + "\u00bb", {"train_on": "all"}),
                # a token across the boundary does not count
                ("chatml", {"prompt": "the weather is ", "completion": "nice"}, "~the weather is nice|\u00ab<|im_end|>\u00bb", {}),
                ("chatml", {"prompt": "the weather is", "completion": " nice"}, "the weather is|\u00ab nice<|im_end|>\u00bb", {}),
                ("chatml", {"text": "hello world"}, "hello\u00ab world<|im_end|>\u00bb", {}),
                ("chatml", {"text": "hello world<|im_end|>"}, "hello\u00ab world<|im_end|>\u00bb", {}),
                ("chatml", {"text": "hello world"}, "hello\u00ab world\u00bb", {"eos": "no"}),
                ("chatml", {"text": "hello world"}, "hello\u00ab world<|endoftext|>\u00bb", {"eos_token": "<|endoftext|>"}),
                ("sentencepiece", {"text": "hello w"}, "<s>\u00abhello w</s>\u00bb", {}),
                ("sentencepiece", {"text": "<s>hello w"}, "<s>\u00abhello w</s>\u00bb", {}),
                *(("chatml", record, hello, {}) for record in (
                    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, {"conversations": messages},
                    {"messages": messages, "text": None, "id": 3},
                    {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                                  {"role": "assistant", "content": "Hello", "tool_calls": None}]})),
                *(("chatml", {key: "a", "messages": messages}, hello, {"format": "messages"}) for key in ("text", "prompt")),
                # an implicit prompt ends where the texts differ, and what counts begins with a whole token
                ("chatml", {"chosen": "the weather is nice", "rejected": "the weather is four"},
                 ["the weather is|\u00ab nice<|im_end|>\u00bb", "the weather is|\u00ab four<|im_end|>\u00bb"], {}),
                ("chatml", {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
                 ["2 + 2 =|\u00ab 4<|im_end|>\u00bb", "2 + 2 =|\u00ab 5<|im_end|>\u00bb"], {}),
                ("generation", whole, pair, {}), ("generation", {**whole, "prompt": None}, pair, {}),
                ("generation", {"prompt": chat("Hi"), "chosen": messages[1:], "rejected": chat("Hi", "No")[1:]}, pair, {}),
                ("sentencepiece", {"prompt": "hello", "answer": "w"}, "<s> hello|w", {}),
                ("sentencepiece", {"prompt": "<s>hello"}, "<s> hello|", {}),
                ("chatml", {"prompt": chat("Hi"), "completion": "ho"}, asked, prompts)):
            with self.subTest(name=name, record=record):
                self.assertEqual(self.marked(name, record, **options), expected if isinstance(expected, list) else [expected])
        group = self.documents("chatml", {"prompt": chat("2+2"), "completions": ["4", "5", "6"], "rewards": [1, -0.5, 0]})
        self.assertEqual([document.reward for document in group], [1.0, -0.5, 0.0])
        record = samples.rollout(5)
        (document,) = self.documents("chatml", record)
        self.assertEqual([document.ids.tolist(), document.counts.tolist(), document.prompt, document.values.tolist()],
                         [record["ids"], [0, *record["train"][1:]], 3, np.float32(record["advantages"]).tolist()])

    def test_formats_as_trl_reads_them(self):
        """--train-on completion counts what TRL's trainers count (test/golden/make_formats.py); whatever counts, tokens are the same."""
        with open(os.path.join(os.path.dirname(HERE), "golden", "formats.json"), encoding="utf-8") as file:
            cases = json.load(file)["cases"]
        folders, kinds = samples.fixed_folders(WORK.name), {"sft": shards.DOCUMENTS, "dpo": shards.PAIRS, "kto": shards.LABELS, "grpo": shards.PROMPTS}
        made = functools.cache(lambda name, what, form: encode.Encoder(encode.Options(tokenizer=folders[name], train_on=what, format=form)))
        for case in cases:
            with self.subTest(**case):
                row = case["row"]
                whole = isinstance(row.get("completion"), list) and case["trainer"] == "sft"  # as messages that end with the completion
                messages = {**{key: row[key] for key in row if key not in ("prompt", "completion")},
                            "messages": row["prompt"] + row["completion"]} if whole else None
                for row, what in ((row, "all" if "messages" in row else "completion"), (row, "assistant"), *[(messages, "completion")] * whole):
                    shape = next(shape for shape, needed, _ in records.SHAPES if {*needed} <= row.keys())
                    form = "unpaired" if case["trainer"] == "kto" else shape if "tools" in row else "auto"  # tools that templates do not read
                    kind, documents = made(case["tokenizer"], what, form).encode(row)
                    self.assertEqual((kind, [document.ids.tolist() for document in documents]),
                                     (kinds[case["trainer"]], [ids for ids, _ in case["documents"]]))
                    counted = [[int(i >= max(first, 1)) for i in range(len(ids))] for ids, first in case["documents"]]
                    if what != "assistant":
                        self.assertEqual([document.counts.tolist() for document in documents], counted)
                        prompts = [document.prompt for document in documents if "prompt" in case["row"] and what == "completion" or kind == shards.PAIRS]
                        self.assertEqual(prompts, [first for _, first in case["documents"]][:len(prompts)])
                    elif kind != shards.PROMPTS:  # nothing of the prompt but what the answer begins with
                        self.assertTrue(all(not (document.counts & ~np.uint8(wanted)).any() for document, wanted in zip(documents, counted)))

    def test_lengths(self):
        record = {"messages": chat("Hi", "hello world the weather is nice")}
        (whole,) = self.documents("chatml", record)
        most = len(whole.ids) - 4
        self.rejected("chatml", record, records.TOO_LONG, f"{len(whole.ids)} tokens", max_tokens=most, long="skip")
        (cut,) = self.documents("chatml", record, max_tokens=most, long="truncate")
        self.assertTrue(np.array_equal(cut.ids, whole.ids[:most]) and np.array_equal(cut.counts, whole.counts[:most]) and cut.truncated)
        (kept,) = self.documents("chatml", record, max_tokens=most)
        self.assertEqual(len(kept.ids), len(whole.ids))
        self.rejected("chatml", record, NO_TARGET, max_tokens=10, long="truncate")
        (cut,) = self.documents("chatml", {"prompt": "hello", "answer": "world and more"}, max_tokens=2, long="truncate")
        self.assertEqual((cut.truncated, cut.prompt, len(cut.ids)), (True, 1, 2))
        self.rejected("chatml", {"prompt": "hello world and more and more"}, records.TOO_LONG, "not cut", max_tokens=3, long="truncate")

    def test_the_check_finds_wrong_masks(self):
        with self.assertRaisesRegex(encode.MaskFailure, "assistant's .*should count"):
            self.documents("wrong", {"messages": chat("How are you today, my friend?", "I am fine and you are kind")})
        for name in ("chatml", "thinking", "generation", "mistral"):
            record = {"messages": chat("hello world the weather", "nice and two are four", "how are you doing", "words between us")}
            (document,) = self.documents(name, record)
            right = document.counts
            first, last = np.flatnonzero(right)[[0, -1]]
            wrong = [np.roll(right, 3), np.roll(right, -12), 1 - right, np.zeros_like(right), np.ones_like(right)]
            for a, b, value in ((first, first + 3, 0), (last - 2, last + 1, 0), (1, first, 1)):
                wrong.append(right.copy())
                wrong[-1][a:b] = value
            for i, document.counts in enumerate(wrong):
                with self.assertRaises(encode.MaskFailure, msg=f"{name} {i}"):
                    encoder(name).check(document)

    def assert_same_turns(self, turns, messages, wanted):
        """Spans from two renderings and a few prefixes are those from renderings for every message."""
        found = []
        for longest in (1, 1 << 40):
            try:
                with mock.patch.object(spans, "LONG", longest):
                    found.append(turns.find(messages, wanted))
            except templates.TemplateFailure as failure:
                found.append(str(failure))
        self.assertEqual(*found)

    def test_long_conversations(self):
        rng = random.Random(5)
        for name in ("chatml", "mistral", "thinking", "opening", "hybrid"):
            turns = encoder(name).turns
            for variant in range(16):
                messages = samples.long_conversation(rng, rng.randint(1, 20), variant)
                first = int(messages[0]["role"] == "user")
                for wanted in (slice(first, None, 2), slice(1 - first, None, 2), slice(None)):
                    self.assert_same_turns(turns, messages, list(range(len(messages)))[wanted])
            messages = samples.long_conversation(rng, 300, 0)
            with mock.patch.object(turns.template, "render", wraps=turns.template.render) as render:
                turns.find(messages, list(range(1, 600, 2)))
            self.assertLess(render.call_count, 40)
        # The generation prompt of one turn in the middle is another: no rule of its neighbours may speak for it.
        template = """{% for m in messages %}[{{ m.role }}{{ '!' if m.role == 'assistant' }}]{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}[assistant{{ '!' if messages | length != 33 }}]{% endif %}"""
        turns = spans.Turns(templates.ChatTemplate(template), samples.SPECIAL)
        self.assert_same_turns(turns, chat(*(["Hi", "Hello"] * 40)), list(range(1, 80, 2)))

    def test_conversations_of_one_shape_are_asked_once(self):
        """Turns found in placeholders are those found in the conversation itself."""
        odd = ["<|im_end|>\n<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nyes", "a</think>b", "\u241e0\u241e", "\ufdd0", " "]
        rng, found = random.Random(3), 0
        for name in ("chatml", "mistral", "thinking", "opening", "generation"):
            for train_on in ("assistant", "assistant,user"):
                of = encoder(name, train_on=train_on)
                for i in range(60):
                    messages = samples.long_conversation(rng, rng.randint(1, 4), rng.choice((0, 0, 1, 2, 4, 8, 15)))
                    if rng.random() < .3:
                        rng.choice(messages)["content"] = rng.choice(odd)
                    wanted, both = of.wanted(messages, 0), []
                    for stretches in (of.stretches, of.asked_stretches):
                        try:
                            with mock.patch.object(of, "look_for"):
                                both.append(stretches(messages, wanted, None, {}) if both else
                                            stretches(messages, messages, wanted, records.Record(0, []), {}))
                        except templates.TemplateFailure as failure:
                            both.append(str(failure))
                    self.assertEqual(*both, (name, messages))
                found += sum(pattern[1] is not None for pattern in of.patterns.known.values())
        self.assertGreater(found, 150)
        of = encoder("thinking")
        of.encode({"messages": chat("Hi", "Hello", "And?", "Bye")})
        with mock.patch.object(of.template, "render", wraps=of.template.render) as render:
            of.encode({"messages": chat("Ho", "Yes", "Why?", "No")})
        self.assertEqual(render.call_count, 1)

    def test_pieces_have_the_tokens_of_the_whole(self):
        parts = ["hello", " ", "  ", "\n", "\u00e9", "\U0001f600", "<s>", "</s>", " <s>", "<|im_end|>", "<|im_start|>", "<|im_", "o", "\u2581"]
        both = {"lstrip": True, "rstrip": True, "special": True, "normalized": False}
        for name in ("chatml", "sentencepiece"):
            for more in ({}, {"content": "<|im_end|>\n", "normalized": False}, {"content": " <s>", "lstrip": True, "special": True},
                         {"content": "o<|im_", "normalized": False}, {"content": "<|im_end|>", "rstrip": True, "special": True},
                         {"content": "</s>", **both}):
                of, rng, cuts = encode.Encoder(encode.Options(tokenizer=FOLDERS[name])), random.Random(1), 0
                of.tokenizer.add_tokens([AddedToken(**more)] if more else [])
                of.cuts = encode.Cuts(of.tokenizer.get_added_tokens_decoder().values())
                for _ in range(200):
                    text, found = "".join(rng.choice(parts) for _ in range(rng.randint(0, 40))), []
                    for piece in (1 << 16, 1, 7):
                        with mock.patch.object(encode, "PIECE", piece):
                            cuts += len(list(of.cuts.pieces(text))) - 1
                            encoding = of.library(text)
                            found.append((encoding.ids.tolist(), encoding.offsets.tolist()))
                    self.assertEqual(found, found[:1] * 3, (name, more, text))
                self.assertGreater(cuts, 200, (name, more))
        of, rng = encoder("chatml"), random.Random(2)
        self.assertEqual((of.words_are_apart, encoder("sentencepiece").words_are_apart), (True, False))
        for _ in range(30):  # without special tokens
            text = "".join(rng.choice([" ", " ", "  ", "\n", " \n"]) + rng.choice(["hello", "world,", "2", "(a)", "\u00e9t\u00e9"])
                           for _ in range(400))
            with mock.patch.object(encode, "PIECE", 128):
                pieces = of.library(text)
            self.assertIsInstance(pieces, encode.Pieces)
            whole = of.library(text)
            self.assertEqual((pieces.ids.tolist(), pieces.offsets.tolist()), (whole.ids.tolist(), whole.offsets.tolist()))

    def test_words_have_the_tokens_of_the_whole(self):
        text = "".join(split_patterns.every_character())
        self.assertEqual([found.span() for found in re.finditer(f"[{words.SPACE}]", text)], split_patterns.matches(r"\s", text))
        parts = [*" \n\r\t\x0b\x1c\x1f\x85\xa0\u2028\u200b\ufeff", "  ", "\n\n", "\r\n", " \n", ".\n  \n ", ":\n    ", *"'_.!?(a1#<|>/Q", "!\n/",
                 "'s", "'LL", "'\u017f", "hello", " world", "n't", "1234567", "\u00b2", "\u0663", "\u00e9t\u00e9", "e\u0301", "\u0301",
                 "\u4f60\u597d", "\U0001f600", "\ud7b0", "<|im_end|>", "<|im_start|>", "</s>", "<|im_", "end|>", "<think>", "ing"]
        rng = random.Random(3)
        texts = ["".join(rng.choice(parts[:14 if i % 3 else None]) + rng.choice(parts) for _ in range(rng.randint(0, 12)))
                 for i in range(500)]
        for i, pattern in enumerate((None, *list(words.EXPRESSIONS)[1:])):
            tokenizer = samples.byte_level(1500, texts)
            tokenizer.add_tokens([AddedToken("ing", normalized=True)])
            tokenizer.normalizer = normalizers.NFC() if i % 2 else None
            split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
            of, met = encode.Encoder(encode.Options(tokenizer=samples.tokenizer_folder(f"{WORK.name}/words{i}", tokenizer))), 0
            for window, mean in ((1 << 16, 16), (5, 1 << 20)):
                with mock.patch.multiple(words, WINDOW=window, MEAN=mean):
                    for text in texts:
                        found, whole = of.encoding(text), of.library(text)
                        self.assertEqual(found.ids.tolist(), tokenizer.encode(text).ids, (pattern, text))
                        met += isinstance(found, encode.Words)
                        for at in rng.sample(range(len(text) + 2), 2):
                            self.assertEqual(found.behind(at), whole.behind(at), (pattern, text, at))
            self.assertGreater(met, 500)
            self.assertGreater(len(of.known), 500)
            for content, more in (("a b", {}), *(("ab", {name: True}) for name in ("lstrip", "rstrip", "single_word"))):
                other = Tokenizer.from_str(tokenizer.to_str())
                other.add_tokens([AddedToken(content, **more)])
                self.assertIsNone(words.expressions(other), (content, more))
            other = Tokenizer.from_str(tokenizer.to_str())
            self.assertIsNotNone(words.expressions(other))
            for other.normalizer in (normalizers.NFKC(), normalizers.Prepend(" ")):
                self.assertIsNone(words.expressions(other))
            byte_level.add_prefix_space = True
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
            self.assertIsNone(words.expressions(tokenizer))
        self.assertIsNone(words.expressions(samples.sentence_piece()))

    def test_patterns_that_c_does_not_run(self):
        for pattern, at in ((r"(a)\1", 3), (r"(?<n>a)", 0), (r"x(?m:a)", 1), (r"(?<=a+)b", 5), (r"(?i:ss)", 5), (r"a{}", 1)):
            with self.assertRaisesRegex(split_patterns.CannotEncode, f"is not read here from its character {at} on: "):
                split_patterns.Splits().add(pattern, "Isolated")


class Messages(Tested):
    """What a message says beside its text, and what of it is not in the rendering."""

    def told(self, name, messages, expected, tells, left_out=(), **options):
        """One document, marked, and what is told of it: parts of texts, in order."""
        of = encoder(name, **options)
        record, documents = of.understood({"messages": messages} if isinstance(messages, list) else messages)
        for document in documents:
            of.check(document)
        self.assertEqual([marked(of, document) for document in documents], [expected], (name, options))
        self.assertEqual([key for key in record.left_out if key.startswith("messages[]")], list(left_out))
        found = list(dict.fromkeys(record.told))
        self.assertEqual(len(found), len(tells), found)
        for text, part in zip(found, tells):
            self.assertIn(part, text)

    def test_arguments_given_as_a_text(self):
        for name in ("thinking", "hybrid", "field"):
            for value in ({"city": "S\u00e3o\n\"P\"", "days": 2}, {}):
                found, of = [], encoder(name)
                for arguments in (value, json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1), "" if not value else value):
                    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments}}
                    messages = [*chat("w?"), {"role": "assistant", "content": None, "tool_calls": [call]},
                                {"role": "tool", "tool_call_id": "1", "content": "sunny"}, {"role": "assistant", "content": "It is"}]
                    record, (document,) = of.understood({"messages": messages})
                    found.append((document.ids.tolist(), document.counts.tolist()))
                    tells = ["tool calls have their arguments as a text, which was parsed"]
                    self.assertEqual(record.told, tells if isinstance(arguments, str) else [])
                self.assertEqual(found, found[:1] * 4)
        call = {"name": "w", "arguments": "{}"}
        for message in ({"content": "", "function_call": call}, {"content": None, "function_call": call}):
            record, (document,) = encoder("thinking").understood({"messages": [*chat("w?"), {"role": "assistant", **message}]})
            self.assertIn('{"name": "w", "arguments": {}}', marked(encoder("thinking"), document))
            self.assertEqual((record.told[0], record.left_out), ("function_call became tool_calls", []))
        for arguments in ('"SF"', "[1]", "{", "SF", "null", "1", "[" * 100000):
            for call in ({"function": {"name": "w", "arguments": arguments}}, {"name": "w", "arguments": arguments}):
                messages = [*chat("w?"), {"role": "assistant", "tool_calls": [call]}]
                self.rejected("thinking", {"messages": messages}, WRONG_TYPE, "messages[1] calls a tool with arguments that are not an object")
        self.documents("thinking", {"messages": [*chat("w?"), {"role": "assistant", "content": "x", "tool_calls": ""}]})
        for calls, detail in (("w", "a list"), (["w"], "an object"), ([{"function": "w"}], "an object")):
            self.rejected("thinking", {"messages": [*chat("w?"), {"role": "assistant", "tool_calls": calls}]}, WRONG_TYPE, detail)

    def test_turns_that_are_masked(self):
        turns = chat("hi", "this is bad", "again", "good")
        spoken = ["user", "hi", "assistant", "this is bad", "user", "again", "assistant", "good"]
        head = im("system", "You help.")
        starred = lambda *at: im(*("*" * (i // 2 in at) + text if i % 2 == 0 else text for i, text in enumerate(spoken)))
        for key in records.MASKS:
            for no, yes in ((0, 1), (False, True), (0.0, 1.0)):
                masked = [turns[0], {**turns[1], key: no}, turns[2], {**turns[3], key: yes}]
                tells = [f"turns whose {key} is 0 or false do not count"]
                for name, before in (("chatml", head), ("generation", "")):
                    self.told(name, masked, before + starred(3), tells)
                self.told("chatml", masked, head + starred(0, 2, 3), tells, train_on="user,assistant")
                self.told("generation", [turns[0], turns[1], turns[2], {**turns[3], key: no}], starred(1), tells)
                with self.assertRaisesRegex(records.Rejected, NO_TARGET):
                    encoder("chatml", train_on="last").encode({"messages": [*turns[:3], {**turns[3], key: no}]})
            said = im(*spoken).replace("<|im_start|>", "<|im_start|>\u00ab", 1).replace("this is bad<|im_end|>\n", "\u00bbthis is bad<|im_end|>\n\u00ab") + "\u00bb"
            self.told("generation", masked, said, tells, train_on="all")
            self.told("generation", [{**turns[0], key: 1}, *turns[1:]], starred(1, 3), [f"{key} is true for turns of the user, which --train-on"])
            for value in (0.5, 2, -1, "0", "false", [], [0, 1], {}):
                self.rejected("chatml", {"messages": [turns[0], {**turns[1], key: value}]}, WRONG_TYPE, f"messages[1] has {key} ")
        pair = {"prompt": [turns[0], {**turns[1], "weight": 1}, turns[2]], "completion": [{**turns[3], "train": 0}, *turns[:2]]}
        self.told("generation", pair, im(*spoken, "user", "hi", "|*assistant", "this is bad"), ["turns whose train"])

    def test_messages_that_templates_leave_out(self):
        turns, call = chat("hi", "yo"), [{"function": {"name": "w", "arguments": {"city": "SF"}}}]
        asked = [*turns, *turns[:1], {"role": "assistant", "tool_calls": call}]
        brief = {"role": "developer", "content": "be nice"}
        for what in ("assistant", "all", "completion", "last"):
            self.rejected("hybrid", {"messages": [brief, *turns]}, records.TEMPLATE, "leaves out the content of message 1 (developer)", train_on=what)
            self.rejected("chatml", {"messages": asked}, records.TEMPLATE, "leaves out the tool_calls of message 4 (assistant)", train_on=what)
        for record in ({"prompt": [brief, *turns[:1]], "completion": turns[1:]}, {"prompt": [brief, *turns[:1]]},
                       {"prompt": [brief, *turns[:1]], "chosen": turns[1:], "rejected": chat("", "no")[1:]},
                       {"messages": [*turns, {"role": "function", "content": "x"}]}, {"messages": [{**brief, "content": "hi"}, *turns]}):
            self.rejected("hybrid", record, records.TEMPLATE, "leaves out the content of message")
        self.documents("hybrid", {"messages": [{**brief, "content": " "}, *turns]})  # nothing is lost
        # what is trimmed, cut up, moved or escaped is there
        texts = (" a ", "\"b\" \u00e9 & <c>\n", "x</think>y", "<think>\nhm\n</think>\n\nz", "\u241e\u241f\u2422", "\u241e0\u241e")
        for name in ("chatml", "mistral", "thinking", "opening", "hybrid", "field", "generation"):
            for text in texts:
                messages = chat(*[text] * 4, system=text if name in ("mistral", "hybrid") else None)
                self.documents(name, {"messages": messages}, train_on="all")
        escaped = samples.TEMPLATES["chatml"][0].replace("message.content", "message.content | tojson | upper")
        folder = samples.tokenizer_folder(WORK.name + "/upper", samples.byte_level(), escaped, None, "<|im_end|>")
        encode.Encoder(encode.Options(tokenizer=folder)).encode({"messages": turns})
        keyed = [{**turns[0], "name": "Ann", "score": 3}, {**turns[1], "id": "7", "tool_call_id": "8", "name": None}]
        self.told("generation", keyed, im("user", "hi", "*assistant", "yo"), [], ["messages[].id", "messages[].name", "messages[].score"])
        self.told("generation", [turns[0], {**turns[1], "reasoning": "hm"}], im("user", "hi", "*assistant", "yo"),
                  ["leaves out the reasoning of the last turn"])
        reasoned = [turns[0], {**turns[1], "thinking": "hm"}, *turns]
        self.told("thinking", reasoned, im("user", "hi", "*assistant", "yo", "user", "hi", "*assistant", "<think>\n\n</think>\n\nyo"),
                  ["leaves out the reasoning of turns before the last question"])

    def test_texts_beside_calls(self):
        call = lambda text, name, **more: {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": name, "arguments": {}}}], **more}
        tool = lambda text: {"role": "tool", "content": text}
        one, asked = [*chat("ask"), call("look", "f"), tool("4")], "<|turn>user\nask<turn|>\n<|turn>model\n"
        done, closing = [*one, *chat("", "so")[1:]], "<|user|>ask<|assistant|>\u00ab</think>look<tool_call>f</tool_call>\u00bb<|tool|>4"
        silent = [*one[:1], call("look", "f", train=0), *done[2:]]
        specials = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|answer>", "<|user|>", "<|assistant|>", "<|tool|>"]
        refused = "the template moves the content of message 2 (assistant) out of its turn, to after 'turn|>\\n<|turn>model\\nf<|answer><|channel>'"
        for template, messages, expected, options in (
                (samples.MOVING, one, asked + "\u00abf<|answer>\u00bb<|channel>4<channel|>\u00ablook\u00bb", {}),
                (samples.MOVING, done, asked + "\u00abf<|answer>\u00bb<|channel>4<channel|>\u00ablookso<turn|>\n\u00bb", {}),
                (samples.MOVING, silent, asked + "f<|answer><|channel>4<channel|>look\u00abso<turn|>\n\u00bb", {}),
                (samples.MOVING, silent, asked.replace(">user", ">\u00abuser") + "\u00bbf<|answer>\u00ab<|channel>4<channel|>\u00bblook\u00abso<turn|>\n\u00bb", {"train_on": "all"}),
                (samples.MOVING, done, asked + "f<|answer><|channel>4<channel|>look\u00abso<turn|>\n\u00bb", {"train_on": "last"}),
                (samples.MOVING, one, asked + "|\u00abf<|answer>\u00bb<|channel>4<channel|>\u00ablook\u00bb", {"train_on": "completion"}),
                (samples.MOVING, done, asked + "\u00abf<|answer>\u00bb<|channel>\u00ab4\u00bb<channel|>\u00ablookso<turn|>\n\u00bb", {"train_on": "assistant,tool"}),
                (samples.MOVING, [*one, tool("5"), *done[3:], *done], asked + "\u00abf<|answer>\u00bb<|channel>4<channel|><|channel>5<channel|>\u00ablook"
                 f"so<turn|>\n\u00bb{asked}\u00abf<|answer>\u00bb<|channel>4<channel|>\u00ablookso<turn|>\n\u00bb", {}),
                (samples.MOVING, done * 9, (asked + "\u00abf<|answer>\u00bb<|channel>4<channel|>\u00ablookso<turn|>\n\u00bb") * 9, {}),
                (samples.MOVING.replace("+ moved", "").replace("INTO", "moved"), done, refused, {}),
                (samples.CLOSING, [*done, *done], (closing + "<|assistant|>\u00ab</think>so\u00bb") * 2, {})):
            tokenizer = samples.byte_level()
            tokenizer.add_special_tokens(specials)
            folder = samples.tokenizer_folder(WORK.name + "/beside", tokenizer, template.replace("INTO", "''"), None, "<|im_end|>")
            own = encode.Encoder(encode.Options(folder, **options))
            with self.subTest(expected=expected, **options):
                if expected == refused:
                    self.assertRaisesRegex(records.Rejected, re.escape(refused), own.encode, {"messages": messages})
                    continue
                _, (document,) = own.encode({"messages": messages})
                own.check(document)
                self.assertEqual((marked(own, document), document.straddles), (expected, 0))

    def test_reasoning_in_contents(self):
        asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        whole = asked + "<think>\n\u00abtwo plus\n</think>\n\n4<|im_end|>\n\u00bb"
        for name, text, expected, tells in (
                ("field", "two plus\n</think>\n\n4", whole, ["</think> without <think>: the text before it became reasoning_content"]),
                ("field", "<think>\ntwo plus\n</think>\n\n4", whole, ["reasoning in the content became reasoning_content"]),
                ("hybrid", "two plus\n</think>\n\n4", whole, ["</think> without <think>: the text before it"]),
                ("hybrid", "<think>\ntwo plus\n</think>\n\n4", whole, []),
                ("generation", "two plus\n</think>\n\n4", asked + "\u00abtwo plus\n</think>\n\n4<|im_end|>\n\u00bb", ["and prints it unchanged"]),
                ("generation", "<think>\ntwo plus\n</think>\n\n4", asked + "\u00ab<think>\ntwo plus\n</think>\n\n4<|im_end|>\n\u00bb", []),
                ("generation", "Say <think> and </think>.", asked + "\u00abSay <think> and </think>.<|im_end|>\n\u00bb", []),
                # cut off: a turn that has not ended
                ("field", "<think>\ntwo plus", asked + "<think>\n\u00abtwo plus\u00bb", ["reasoning is cut off"]),
                ("hybrid", "<think>\ntwo plus", asked + "<think>\n\u00abtwo plus\u00bb", ["reasoning is cut off"]),
                ("thinking", "<think>\ntwo plus", asked + "\u00ab<think>\ntwo plus\u00bb", ["reasoning is cut off"]),
                ("generation", "<think>\ntwo plus", asked + "\u00ab<think>\ntwo plus\u00bb", ["reasoning is cut off"])):
            with self.subTest(name=name, text=text):
                self.told(name, chat("2+2?", text), expected, tells)
        for text in ("Well. <think>hm</think> 4", "<think>a</think> and <think>b</think> 4", "2<think>hm</think> 4", "<think>a</think> so </think> 4",
                     "<think>a</think><think>hm</think> 4", "<think>a<think>b</think>hm</think> 4"):  # templates keep their ends alone
            self.rejected("thinking", {"messages": chat("2+2?", text)}, records.TEMPLATE, "leaves out the content's ")
            self.told("generation", chat("2+2?", text), asked + "\u00ab" + text + "<|im_end|>\n\u00bb", [])
        for text in ("Say <think> now", "<think>a</think> and <think>b"):
            self.told("generation", chat("2+2?", text), asked + "\u00ab" + text + "<|im_end|>\n\u00bb", ["<think> after other text"])
        called = [{**chat("a", f"<think>hm</think>{text}")[1], "tool_calls": [{"function": {"name": "w", "arguments": {}}}]} for text in ("", "Ask")]
        for talk in (called[:1], called[1:], [called[0], {"role": "tool", "content": "x"}, called[1], *chat("c", "<think>so</think>d")]):
            for name in ("hybrid", "thinking"):
                self.documents(name, {"messages": [*chat("a", "b"), *chat("2+2?", "")[:1], *talk]})  # the check finds the turns
        self.rejected("hybrid", {"messages": chat("2+2?", "<think>\n")}, records.CUT_OFF, "has no place")  # nothing is learned from it
        cut = chat("2+2?", "<think>\ntwo plus")
        for name in ("field", "generation"):
            self.rejected(name, {"messages": cut}, records.CUT_OFF, "no </think>", reasoning="drop")
            self.rejected(name, {"messages": cut + chat("And?", "4")}, records.CUT_OFF, "no </think>", reasoning="drop")
        self.rejected("field", {"messages": cut + chat("And?", "4")}, records.CUT_OFF, "no </think>")  # which would have an empty block
        self.told("generation", chat("a", "b") + cut, im("user", "a", "*assistant", "b") + asked + "\u00ab<think>\ntwo plus\u00bb", ["cut off"])
        self.assertIn(records.CUT_OFF, records.ACCEPTABLE)

    def test_the_last_turn_is_the_completion_of_messages(self):
        turns, call = chat("hi", "yo", "again", "bye"), {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {}}}]}
        spoken = ["user", "hi", "assistant", "yo", "user", "again", "|*assistant", "bye"]
        for name, head in (("generation", ""), ("chatml", im("system", "You help."))):
            self.told(name, turns, head + im(*spoken), [], train_on="completion")
            self.told(name, turns + turns[:1], head + im(*spoken, "user", "hi"), [], train_on="completion")
            (document,) = self.documents(name, {"messages": turns + turns[:1]}, train_on="completion")
            self.assertEqual((document.texts, len(document.others)), ((turns[3],), 4))
            self.rejected(name, {"messages": turns[:1]}, NO_TARGET, train_on="completion")
        self.told("generation", turns[1:3], im("assistant", "yo", "user", "again").replace("m_start|>assistant\nyo<|im_end|>\n", "m_start|>\u00abassistant\nyo<|im_end|>\n\u00bb"),
                  [], train_on="completion")
        (document,) = self.documents("hybrid", {"messages": [*turns, call, {"role": "tool", "content": "x"}, turns[1]]}, train_on="completion")
        self.assertTrue(marked(encoder("hybrid"), document).endswith("<think>\n|\u00ab\n</think>\n\nyo<|im_end|>\n\u00bb"))


class Templates(Tested):
    def test_special_tokens_and_templates_are_found(self):
        work = WORK.name + "/found"
        folder = samples.tokenizer_folder(work, encoder("bare").tokenizer, [{"name": "default", "template": "in a list"}], {"content": "<s>"})
        self.assertEqual(templates.load_chat_template(folder), "in a list")
        self.assertEqual(templates.load_special_tokens(folder), {"bos_token": "<s>"})
        samples.write_text(folder + "/special_tokens_map.json", '{"eos_token": "</s>"}')
        self.assertEqual(templates.load_special_tokens(folder + "/tokenizer.json"), {"bos_token": "<s>", "eos_token": "</s>"})
        samples.write_text(folder + "/chat_template.jinja", "alone")
        self.assertEqual(templates.load_chat_template(folder), "alone")
        self.assertIsNone(templates.load_chat_template(FOLDERS["bare"]))
        folder = samples.tokenizer_folder(WORK.name + "/two", encoder("bare").tokenizer, [{"name": "rag", "template": "x"}])
        with self.assertRaisesRegex(ValueError, "rag, and none is `default`"):
            templates.load_chat_template(folder)

    def test_renderings(self):
        """The first as transformers 5.23 has it."""
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": " cat <b>&\u00e9 ", "name": None},
                    {"role": "assistant", "content": "a", "reasoning_content": "why"}, *chat("not reached")]
        tools = [{"type": "function", "function": {"name": "f\u00e9"}}]
        self.assertEqual(
            templates.ChatTemplate(samples.FEATURES, {"eos_token": "<|im_end|>"}).render(messages, True, tools),
            '    1 cat <b>&\u00e9  {"role": "user", "content": " cat <b>&\u00e9 "} \n    2 a  {"thinking": "why", "role": "assistant", '
            '"content": "a", "reasoning_content": "why"} why\n[\n  {\n    "type": "function",\n    "function": {\n      "name": "f\u00e9"\n'
            "    }\n  }\n] False True<assistant><|im_end|>")
        template = templates.ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=datetime.datetime(2024, 7, 26))
        self.assertEqual(template.render(chat("Hi")), "26 Jul 2024")
        # {% generation %} in a macro, whose text comes later than it was made
        template = templates.ChatTemplate("{% macro say(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
                                          "{% for m in messages %}{{ m.role }}{{ say(m) }}{% endfor %}")
        text, places = template.render_generation(chat("Hi", "ho"))
        self.assertEqual([text[begin:end] for begin, end in places], ["Hi", "ho"])

    def test_templates_that_fail(self):
        for template, detail in (("{{ raise_exception('no way') }}", "no way"), ("{{ messages[7].role }}", "no element 7"),
                                 ("{{ 1 // 0 }}", "ZeroDivisionError"), ("{{ messages.append(1) }}", "unsafe"),
                                 ("{% set n = namespace(_x=1) %}", "_x"), ("{{ ''.__class__.mro() }}", "unsafe|undefined"),
                                 ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
                                 ("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "are nested"),
                                 ("{% set a %}{% generation %}a{% endgeneration %}{% endset %}{{ a | length }}", "changes the text")):
            with self.assertRaisesRegex(templates.TemplateFailure, detail, msg=template):
                templates.ChatTemplate(template).render_generation(chat("Hi"))
        with self.assertRaisesRegex(ValueError, "not valid Jinja: line 2"):
            templates.ChatTemplate("a\n{% if %}")

    def test_templates_without_end(self):
        loops = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
        doubling = "{% for i in range(99) %}{% set ns.a = ns.a OP ns.a %}{% endfor %}"
        calls = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
        with mock.patch.object(templates, "SECONDS", 0.1), mock.patch.object(templates, "BYTES", 1 << 28):
            for error, template, detail in (
                    (templates.Endless, loops, "did not end within"), (templates.Endless, calls, "did not end within"),
                    (templates.Endless, "{{ 'a' * 10**10 }}", "GiB"), (templates.Endless, "{{ 'a' | center(messages | length * 10**10) }}", "GiB"),
                    (templates.Endless, "{% set ns = namespace(a='xx') %}" + doubling.replace("OP", "~"), "GiB|did not end"),
                    (templates.TemplateFailure, "{% set ns = namespace(a=3) %}" + doubling.replace("OP", "*"), "more than 4096 bits"),
                    (templates.TemplateFailure, "{{ 9 ** (9 ** 9) }}", "more than 4096 bits"),
                    (templates.TemplateFailure, "{% for i in range(10**9) %}{% endfor %}", "Range too big"),
                    (ValueError, "{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "cannot be compiled: .*nested"),
                    (ValueError, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled: RecursionError")):
                with self.assertRaisesRegex(error, detail, msg=template[:80]):
                    templates.ChatTemplate(template).render(chat("Hi"))
            with self.assertRaisesRegex(encode.SetupFailure, "did not end within"):  # it ends the run, not a sample
                loops = samples.write_text(WORK.name + "/loops", loops)
                encode.Encoder(encode.Options(tokenizer=FOLDERS["chatml"], chat_template=loops)).encode({"messages": chat("Hi", "Hello")})
        templates.ChatTemplate("{{ 'a' * 100 }}").render(chat("Hi"))


class Rejections(Tested):
    def test_what_is_rejected(self):
        messages, tokens = chat("Hi", "Hello"), functools.partial(dict, ids=[1, 2], train=[0, 1], advantages=[0, 1])
        says = lambda **message: {"messages": [message]}
        pair, group = functools.partial(dict, chosen=messages, rejected=messages), functools.partial(dict, prompt="a", completions=["b", "c"])
        for reason, cases in {
                UNKNOWN: (
                    ({}, "keys are none"), ({"content": "x"}, "keys are content"), ({"chosen": "a", "rejected": "b"}, "no prompt"),
                    ({"chosen": " a", "rejected": " b"}, "no prompt"), ({"answer": "a"}, "answer"),
                    ({"prompt": "a", "completions": ["b"], "labels": [True]}, "stepwise supervision"),
                    ({"prompt": "a", "images": ["x"]}, "has images: only text"), ({"prompt": "a", "chosen": "b"}, "and no rejected; preference has"),
                    ({"completion": "a"}, "has completion, and no prompt"), ({"prompt": "a", "rejected": "b"}, "and no chosen"),
                    (tokens(train=None), "has no train"),
                    (pair(rejected=chat("Ho", "x")), "begin differently"), (pair(prompt="Ho", rejected=chat("Hi", "x")), "not among"),
                    ({"question": "a"}, "has question, and no known answer; --columns completion=KEY"), 
                    (group(), "has prompt and completions, and no rewards"), (tokens(advantages=None), "keys are ids, train")),
                WRONG_TYPE: (
                    ({"text": 5}, "a number"), ({"messages": "Hi"}, "a list"), ({"messages": ["Hi"]}, "messages[0]"),
                    (says(role="user"), "neither content"), (says(role="user", content=3), "content is a number"),
                    (says(role="user", content=[{"type": "image"}]), "not text"), ({"prompt": "a", "completion": messages}, "completion"),
                    (group(rewards=[1]), "2 completions, 1 rewards"), (group(completions=["b"], rewards=[1]), "at least two completions"),
                    (group(rewards=[0, float("nan")]), "rewards[1] is nan"), (group(rewards=[None, 1]), "rewards[0] is null"),
                    (group(rewards=["1", 1]), "rewards[0]"), ({"prompt": 5}, "prompt"), ({"prompt": "a", "answer": 5}, "a number"), ({"prompt": "a", "level": [float("nan")]}, "not finite"),
                    (tokens(advantages=[0, 1, 2]), "2 ids, 2 of train, 3 advantages"), (tokens(train=[0]), "1 of train"),
                    (tokens(ids=[1, -2]), "ids[1] is -2, not a token's number"), (tokens(ids=[1.5, 2]), "ids[0] is 1.5"),
                    (tokens(ids=[1, 2000]), "ids[1] is 2000, the vocabulary has"), (tokens(train=[0, 2]), "train[1] is 2, not 0 or 1"),
                    *(({"prompt": "a", "completion": "b", "label": label}, "neither true nor false") for label in ("yes", 0.5, 2, [])),
                    (tokens(advantages=[0, float("inf")]), "advantages[1] is inf"), ({"messages": messages, "tools": 3}, "tools"),
                    ({"messages": messages, "tools": "{"}, "tools"), ({"messages": messages, "tools": "[" * 200000}, "nor JSON"),
                    ({"messages": messages, "chat_template_kwargs": []}, "chat_template_kwargs"),
                    *(({"messages": messages, "chat_template_kwargs": {name: []}}, name) for name in records.TAKEN)),
                records.CLASH: (
                    *(({"prompt": "a", "answer": "b", key: 1}, f"column {key} has a name") for key in records.OURS[1:]),
                    ({"text": "a", "messages": messages}, "has text and messages, which no format has together; choose with --format text or messages"),
                    ({"messages": messages, "prompt": "Hi"}, "messages and prompt, which no format has together; choose with --format messages or prompts"),
                    ({"prompt": "a", "text": "b"}, "has text and prompt"), (pair(prompt=chat("Hi"), completion="x"), "has completion and chosen"),
                    (pair(messages=messages), "has messages and chosen, and messages end with an answer"), (group(rewards=[0, 1], completion="b"), "completion and completions"),
                    (pair(label=True), "has chosen and label"), (tokens(text="a"), "has ids and text"),
                    ({"text": "a", "label": True, "completion": "b"}, "has text and completion")),
                EMPTY: (
                    ({"text": " \n"}, ""), ({"messages": []}, "messages is empty"), (says(role="user", content=""), "no text"),
                    ({"prompt": "a", "completion": ""}, "completion"), (pair(), "differ"), ({"prompt": ""}, "prompt"),
                    (group(completions=[], rewards=[]), "completions"), ({"prompt": []}, "prompt")),
                records.UNKNOWN_ROLE: (
                    (says(role="robot", content="Hi"), '"robot"'), (says(content="Hi"), "null"), (says(role=["user"], content="x"), "user"),
                    ({"conversations": [{"from": "narrator", "value": "x"}]}, "narrator"),
                    ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "gpt")),
                NO_TARGET: ((tokens(train=[1, 0]), ""), ({"messages": chat("Hi")}, "")),
                MALFORMED: (({"prompt": "a", "level": "\ud800"}, "surrogate"), (says(role="assistant", content="\ud800"), "surrogate"),)}.items():
            for record, detail in cases:
                with self.subTest(record=str(record)[:100]):
                    self.rejected("chatml", record, reason, detail)
        for record in ({"messages": [*messages, {"role": "tool", "content": "x"}]}, {"prompt": [*messages, {"role": "tool", "content": "x"}]}):
            self.rejected("mistral", record, records.TEMPLATE, "only user and assistant")
        self.rejected("chatml", {"text": "a"}, UNKNOWN, "has no prompt", format="completion")
        self.documents("chatml", {"prompt": "a", "completion": "b", "label": False}, format="completion")
        self.documents("chatml", {"messages": messages, "label": "joke"})
        deep = functools.reduce(lambda value, _: [value], range(5000), "deep")
        asks = [*chat("Hi"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": deep}}}]}]
        self.rejected("thinking", {"messages": asks}, records.TEMPLATE, "recurses")
        self.rejected("hybrid", {"messages": chat("Hi", "Hello")[1:]}, records.TEMPLATE, "no question of a user")

    def test_lines_that_are_rejected(self):
        for line, detail in ((b"{", "column"), (b"", "not JSON"), (b'{"text": "a"', "not JSON"), (b"[1]", "is a list"), (b"3", "is a number"),
                             (b"[", "at column 2; the file may be cut off"), (b'{"a": "b', "ends in the middle of a JSON value, at column 9; "), (b'{"a": "\\u12', "cut off"), (b'{"text": "\xff"}', "UTF-8"), (b'{"a": ' + b"[" * 100000, "not JSON"),
                             (b'{"a": ' + b"9" * 5000 + b"}", "not JSON")):
            with self.subTest(line=line[:20]), self.assertRaisesRegex(records.Rejected, f"{MALFORMED}: .*{detail}"):
                records.parse_line(line)
        for value, kind, text in ((b"a", "binary data", None), (datetime.datetime(2026, 1, 1), "a datetime", "2026-01-01T00:00:00"), (decimal.Decimal("1.5"), "a Decimal", "1.5"),
                                  (datetime.date(2026, 1, 2), "a date", "2026-01-02"), (datetime.time(1, 2), "a time", "01:02:00"), (uuid.UUID(int=7), "a UUID", str(uuid.UUID(int=7))),
                                  (datetime.timedelta(1, 2), "a timedelta", "PT86402.0S"), ([("k", datetime.date(2026, 1, 2))], "a date", {"k": "2026-01-02"})):
            said = chat("Hi", "Hello")
            for row in ({"text": value}, {"messages": [{**said[0], "content": value}]}, {"messages": [{"from": "human", "value": value}]}, {"messages": value}, {"prompt": value},
                        {"messages": [*said, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": value}}]}]}, {"prompt": "a", "answer": value}, {"prompt": "a", "completion": value},
                        {"prompt": "a", "completions": ["b", "c"], "rewards": [value, 1]}, {"messages": said, "system": value}, {"prompt": "a", "completion": "b", "reasoning": value},
                        {"messages": [{**said[0], "role": value}]}, {"messages": [*said[:1], {**said[1], "thinking": value}]}, {"prompt": "a", "chosen": value, "rejected": "b"}):
                if not (isinstance(text, dict) and ("tool_calls" in str(row))):  # a map of arguments is an object
                    with self.subTest(row=row), self.assertRaisesRegex(records.Rejected, "reasoning, for which|" + ("" if isinstance(text, dict) else kind)):
                        encoder("hybrid").understood(workers.parsed(row))
            # in members and columns that no format reads
            record, _ = encoder("hybrid").understood(workers.parsed({"messages": [{**said[0], "at": value}, said[1]], "created": value}))
            self.assertEqual((record.used, record.left_out), (["messages"], ["created", *["messages[].at"] * isinstance(text, str)]))
            self.assertEqual(record.told, [] if text else ["messages[].at is binary and left out"])
            record, _ = encoder("hybrid").understood(workers.parsed({"prompt": [{**said[0], "at": value}], "created": [value], "nested": {"in": value}}))
            self.assertEqual(json.loads(record.columns), {"messages": [{**said[0], "at": text}], "created": [text], "nested": {"in": text}} if text else {"messages": said[:1]})
            self.assertEqual((record.passed, record.left_out[:2]), (["created", "nested"], record.left_out[:2]) if text else ([], ["created", "nested"]))

    def test_chats_as_fixed_text(self):
        """What tokenizer.tok has of a chat template, and why it has no more."""
        def found(template):
            folder = samples.tokenizer_folder(WORK.name + "/chat", samples.byte_level(), template, None, "<|im_end|>")
            return tokenizer_chat.find_chat(templates.ChatTemplate(template, {"eos_token": "<|im_end|>"}), tokenizer_file.Source(folder).encode)

        plain, forgets, asked = ["CHAT", "CHAT_SYSTEM", "CHAT_NEXT"], ["FORGETS", "FORGETS_LINES"], samples.THINKING.split("{{- content }}")
        trims = ["CHAT", "TRIM_USER", "TRIM_SYSTEM", "CHAT_SYSTEM", "CHAT_NEXT"]
        for template, flags, opening, reasons in (
                (samples.CHATML, plain, ["", "", ""], []), (samples.THINKING, plain + forgets, ["", "", ""], []),
                (samples.OPENING, plain + forgets, ["<think>\n", "", ""], []),
                (samples.THINKING.replace("lstrip", "rstrip"), plain[:2], ["", "", ""], ["no later turns: .* the model's answers"]),
                (samples.OPENING.replace("<|im_start|>assistant\n<think>", "<|im_start|>answer\n<think>"), plain[:2], ["", "", ""], ["no later turns: .* differently"]),
                (samples.HYBRID, [*trims, *forgets, "FORGETS_SPACE", "THINKING"], ["<think>\n", "<think>\n", "<think>\n\n</think>\n\n"], []),
                (samples.HYBRID.replace("enable_thinking is false", "not enable_thinking"),  # not unless it is asked for
                 [*trims, *forgets, "FORGETS_SPACE", "THINKING"], ["<think>\n\n</think>\n\n", "<think>\n", "<think>\n\n</think>\n\n"], []),
                (samples.CHATML.replace("assistant\n'", "assistant\n' + ('' if enable_thinking is undefined else '<think>')"),
                 [*plain, "THINKING"], ["", "<think>", "<think>"], []),
                ("{% if enable_thinking %}Think!{% endif %}" + samples.HYBRID, [*trims, *forgets, "FORGETS_SPACE"], ["<think>\n", "", ""],
                 ["no choice of thinking: "])):
            chat = found(template)
            self.assertEqual((chat.flags, [chat.texts[name] for name in ("opening", "thinking_on", "thinking_off")]), (flags, opening), template)
            self.assertEqual(len(chat.reasons), len(reasons), (chat.reasons, template))
            for reason, words in zip(chat.reasons, reasons):
                self.assertRegex(reason, words)

    def test_families(self):
        """Conversations of published families as text, what of it counts, and what tokenizer.tok has of it."""
        whole, head = ["CHAT", "CHAT_SYSTEM", "CHAT_NEXT"], "<|im_start|>system\nMode: /think\n\nHelp.\n\n<|im_start|>user\n"
        for name, flags, ends, texts, turns in (
                ("phi4", whole, ["<|im_end|>"], {"first_after": "<|im_end|><|im_start|>assistant<|im_sep|>", "next_before": "<|im_end|><|im_start|>user<|im_sep|>"},
                 "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>«ho<|im_end|>»"
                 "<|im_start|>user<|im_sep|>And?<|im_end|><|im_start|>assistant<|im_sep|>«bye<|im_end|>»"),
                ("phi3", whole, ["<|endoftext|>", "<|end|>"], {"first_before": "<|user|>\n", "next_before": "<|end|>\n<|user|>\n"},
                 "<|user|>\nHi<|end|>\n<|assistant|>\n«ho<|end|>\n»<|user|>\nAnd?<|end|>\n<|assistant|>\n«bye<|end|>\n<|endoftext|>»"),
                ("phi4-mini", whole, ["<|endoftext|>", "<|end|>"], {"first_after": "<|end|><|assistant|>", "next_before": "<|end|><|user|>"},
                 "<|user|>Hi<|end|><|assistant|>«ho<|end|>»<|user|>And?<|end|><|assistant|>«bye<|end|><|endoftext|>»"),
                ("glm4", whole, ["<|endoftext|>", "<|user|>"], {"first_before": "[gMASK]<sop><|user|>\n", "first_after": "<|assistant|>", "next_before": "<|user|>\n"},
                 "[gMASK]<sop><|user|>\nHi<|assistant|>«\nho»<|user|>\nAnd?<|assistant|>«\nbye»"),
                ("olmo2", whole, ["<|endoftext|>"], {"first_before": "<|endoftext|><|user|>\n", "next_before": "<|endoftext|>\n<|user|>\n"},
                 "<|endoftext|><|user|>\nHi\n<|assistant|>\n«ho<|endoftext|>»\n<|user|>\nAnd?\n<|assistant|>\n«bye<|endoftext|>»"),
                ("olmo3", whole, ["<|endoftext|>", "<|im_end|>"], {"system_between": " No <functions>.<|im_end|>\n<|im_start|>user\n", "next_before": "<|im_end|>\n<|im_start|>user\n"},
                 "<|im_start|>system\nNo <functions>.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>»\n"
                 "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«bye<|endoftext|>»"),
                ("smollm3", ["CHAT", "CHAT_NEXT"], ["<|im_end|>"], {"first_before": head, "system_before": "", "next_after": "<|im_end|>\n<|im_start|>assistant\n"},
                 head + "Hi<|im_end|>\n«<|im_start|>assistant\nho<|im_end|>\n»<|im_start|>user\nAnd?<|im_end|>\n«<|im_start|>assistant\nbye<|im_end|>\n»"),
                ("seed_oss", whole, ["<seed:eos>"], {"first_after": "<seed:eos><seed:bos>assistant\n", "next_before": "<seed:eos><seed:bos>user\n"},
                 "<seed:bos>user\nHi<seed:eos><seed:bos>assistant\n«ho<seed:eos>»<seed:bos>user\nAnd?<seed:eos><seed:bos>assistant\n«bye<seed:eos>»"),
                ("hunyuan", whole, ["<|place2|>"], {"first_after": "<|Assistant|>", "system_between": "<|place3|><|User|>", "next_before": "<|place2|><|User|>"},
                 "<s><|User|>Hi<|Assistant|>«ho<|place2|>»<|User|>And?<|Assistant|>«bye<|place2|>»"),
                ("ernie4_5", whole, ["</s>"], {"first_before": "<s>User: ", "first_after": "\nAssistant: ", "next_before": "</s>User: "},
                 # tokens that begin in the head, which is plain words, do not count
                 "~~<s>User: Hi\nAssistant: ho«</s>»User: And?\nAssistant: b«ye</s>»"),
                ("ministral3", whole, ["</s>"], {"system_before": "<s>[SYSTEM_PROMPT]", "system_between": "[/SYSTEM_PROMPT][INST]", "next_before": "</s>[INST]"},
                 "<s>[SYSTEM_PROMPT]Help.[/SYSTEM_PROMPT][INST]Hi[/INST]«ho</s>»[INST]And?[/INST]«bye</s>»"),
                ("harmony", whole, ["<|return|>", "<|call|>"], {"first_after": "<|end|><|start|>assistant", "thought_begin": "", "thought_end": "<|end|><|start|>assistant"},
                 "<|start|>user<|message|>Hi<|end|><|start|>assistant«<|channel|>final<|message|>ho<|end|>»"
                 "<|start|>user<|message|>And?<|end|><|start|>assistant«<|channel|>final<|message|>bye<|return|>»"),
                ("channels", whole, ["</s>", "<turn|>", "<|answer>"], {"next_before": "<turn|>\n<|turn>user\n", "thought_begin": "<|channel>", "thought_end": "<channel|>"},
                 "<s><|turn>user\nHi<turn|>\n<|turn>model\n«ho<turn|>\n»<|turn>user\nAnd?<turn|>\n<|turn>model\n«bye<turn|>\n»")):
            *template, special = samples.FAMILIES[name]
            tokenizer = samples.byte_level()
            tokenizer.add_special_tokens(special)
            folder = samples.tokenizer_folder(WORK.name + "/family-" + name, tokenizer, *template)
            own = encode.Encoder(encode.Options(tokenizer=folder))
            _, documents = own.encode({"messages": chat("Hi", "ho", "And?", "bye")})
            self.assertEqual([marked(own, document) for document in documents], [turns], name)
            content = tokenizer_file.tokenizer_bytes(tokenizer_file.Source(folder))
            found = {section: tokenizer_file.section_of(content, section).decode() for section in texts}
            self.assertEqual(found, texts, name)
            (bits,) = struct.unpack_from("<I", content, 32)
            self.assertEqual([flag for flag in tokenizer_file.FLAGS if "CHAT" in flag and bits & tokenizer_file.FLAGS[flag]], flags, name)
            ids = np.frombuffer(tokenizer_file.section_of(content, "end_ids"), "<u4").tolist()
            self.assertEqual([own.tokenizer.decode([id], skip_special_tokens=False) for id in ids], ends, name)
        # tools and reasoning, whose parts before the last question is gone
        call = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        answer = {"role": "tool", "content": "4"}
        for name, text in (
                ("harmony", "<|start|>user<|message|>Hi<|end|><|start|>assistant« to=f<|message|>{}<|call|>»<|start|>f<|message|>4<|end|>"
                            "<|start|>assistant«<|channel|>final<|message|>ho<|end|>»<|start|>user<|message|>And?<|end|><|start|>assistant"
                            "«<|channel|>analysis<|message|>yes<|end|><|start|>assistant<|channel|>final<|message|>bye<|return|>»"),
                ("channels", "<s><|turn>user\nHi<turn|>\n<|turn>model\n«f<|answer>»4<answer|>«ho<turn|>\n»<|turn>user\nAnd?<turn|>\n<|turn>model\n"
                             "«<|channel>thought\nyes\n<channel|>bye<turn|>\n»")):
            own = encode.Encoder(encode.Options(tokenizer=WORK.name + "/family-" + name))
            messages = chat("Hi", "ho", "And?", "bye")
            messages[1:1], messages[-1]["reasoning_content"] = [call, answer], "yes"
            _, documents = own.encode({"messages": messages})
            self.assertEqual([marked(own, document) for document in documents], [text], name)
        # another template, and other variables, for the file
        folder, out = WORK.name + "/family-smollm3", WORK.name + "/smollm3.tok"
        self.assertIn("no choice of thinking", " ".join(tokenizer_file.write_tokenizer_file(out, folder)))
        tokenizer_file.write_tokenizer_file(out, folder, None, {"enable_thinking": False})
        with open(out, "rb") as file:
            content = file.read()
        self.assertTrue(tokenizer_file.section_of(content, "first_before").startswith(b"<|im_start|>system\nMode: /no_think"))
        self.assertTrue(tokenizer_file.section_of(content, "opening") == b"<think>\n\n</think>\n")
        self.assertEqual(tokenizer_file.write_tokenizer_file(out, folder, samples.CHATML), [])

    def test_tokens_of_other_files(self):
        """Tokens that a folder declares outside of tokenizer.json get the ids that transformers 5.24 gave them; unused, they change nothing."""
        flags = dict(special=True, lstrip=False, rstrip=False, normalized=False, single_word=False)
        for number, (files, expected) in enumerate((
                ({"tokenizer_config": {"added_tokens_decoder": {"700": {"content": "<b>", **flags}, "650": {"content": "<a>", **flags, "special": False}}}},
                 [("<a>", False), ("<b>", True)]),
                ({"tokenizer_config": {"additional_special_tokens": ["<b>", "<a>"], "pad_token": "<c>"}}, [("<c>", True), ("<b>", True), ("<a>", True)]),
                ({"tokenizer_config": {"extra_special_tokens": {"my_token": "<b>"}, "image_token": "<a>"}}, [("<a>", True), ("<b>", True)]),
                ({"tokenizer_config": {}, "added_tokens": {"<b>": 9, "<a>": 5}}, [("<a>", False), ("<b>", False)]),
                ({"tokenizer_config": {"eos_token": "<c>"}, "special_tokens_map": {"eos_token": "<b>", "additional_special_tokens": ["<a>"]}},
                 [("<b>", True), ("<a>", True)]),
                ({"tokenizer_config": {"added_tokens_decoder": {}, "eos_token": "</think>"}, "special_tokens_map": {"eos_token": "<b>"}}, []))):
            tokenizer = samples.byte_level()
            folder, first = samples.tokenizer_folder(f"{WORK.name}/declared-{number}", tokenizer, samples.CHATML, None, "<|im_end|>"), tokenizer.get_vocab_size()
            for name, content in files.items():
                samples.write_text(f"{folder}/{name}.json", json.dumps(content))
            own = encode.Encoder(encode.Options(folder, eos="no"))
            source = tokenizer_file.Source(folder)
            added = own.tokenizer.get_added_tokens_decoder()
            self.assertEqual([(added[i].content, added[i].special) for i in range(first, own.vocabulary)], expected)
            self.assertEqual(source.tokenizer.get_added_tokens_decoder(), added)
            self.assertEqual((own.own_ids, own.fingerprint), (first, encoder("chatml").fingerprint))
            _, (document,) = own.encode({"text": "x <a> y <b>"})
            wanted = [i for i in range(first, own.vocabulary) if added[i].content in ("<a>", "<b>")]
            self.assertEqual(sorted(set(document.ids.tolist()) & set(range(first, own.vocabulary))), wanted)
        samples.write_text(f"{folder}/added_tokens.json", "[1]")
        samples.write_text(f"{folder}/tokenizer_config.json", "{}")
        with self.assertRaisesRegex(encode.SetupFailure, "added_tokens.json: is not a JSON object"):
            encode.Encoder(encode.Options(folder))

    def test_setups_that_do_not_fit(self):
        broken = WORK.name + "/broken"
        os.mkdir(broken)
        FOLDERS["broken"] = os.path.dirname(samples.write_text(broken + "/tokenizer.json", "{}"))
        for name, words, options, record in (
                ("bare", "no chat template", {}, {"messages": chat("Hi", "Hello")}),
                ("bare", "has no end-of-text token", {}, {"text": "a"}), ("broken", "cannot be read as a tokenizer", {}, None),
                ("bare", "has no end-of-text token 'nope'", {"eos_token": "nope"}, None),
                ("bare", "a list, not an object", {"template_arguments": "[1]"}, None),
                ("chatml", "unknown role 'robot'", {"train_on": "assistant,robot"}, None),
                *(("bare", name, {"template_arguments": json.dumps({name: 1})}, None) for name in records.TAKEN)):
            with self.assertRaisesRegex(encode.SetupFailure, words):
                encoder(name, **options).encode(record)


if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    if sys.argv[1:]:
        suite = unittest.TestSuite(test for case in suite for test in case if sys.argv[1] in test.id())
    result = unittest.TextTestRunner(verbosity=2 if os.environ.get("VERBOSE") else 0, stream=sys.stdout).run(suite)
    for test, why in result.skipped:
        print(f"[  SKIPPED ] {test.id().removeprefix('__main__.')}: NOT TESTED: {why}")
    failures = {getattr(test, "test_case", test).id() for test, _ in [*result.failures, *result.errors]}
    for test in failures:
        print(f"FAILED: {test}")
    print(f"{result.testsRun - len(failures) - len(result.skipped)} passed, {len(failures)} failed, {len(result.skipped)} skipped")
    sys.exit(bool(failures))
