"""Layouts of rows and kinds of files that people have, for test_prepare.py: each against the same rows as ours, or refused by name."""

import bz2
import fnmatch
import gzip
import json
import lzma
import os
import random
import re
import shutil
import sys
import tempfile
import types
import unittest
from unittest import mock

import inputs
import prepare
import prepare_samples as samples
import records
import run
import shards
import workers
from prepare_runs import FOLDERS, GOOD, WithCommand, contents, encoder, pyarrow

def zst(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


PACKERS = [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress), *[("zst", zst)] * bool(pyarrow)]
USER, SYSTEM = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Be brief"}
FOUR, FIVE = ({"role": "assistant", "content": content} for content in ("4", "5"))
TALK = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
SPOKEN, PAIR = {"prompt": [USER], "completion": [FOUR]}, {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}
TOLD = {"prompt": [SYSTEM, USER], "chosen": [FOUR], "rejected": [FIVE]}


SPELT = {  # columns of LAYOUTS, each in three spellings
    "Q": "question Query problem", "A": "response Output solution", "I": "instruction Instruction INSTRUCTION", "S": "system system_prompt systemMessage",
    "H": "history Chat-History conversation_history", "T": "tools functions Functions", "R": "reasoning thinking chain-of-thought", "C": "chosen preferred_response responseChosen",
    "J": "rejected dispreferred_response responseRejected", "M": "messages conversation Dialog", "X": "context Context CONTEXT", "E": "enable_thinking " * 3,
    "P": "images image Videos", "L": "response_a response_0 Positive", "W": "response_b response_1 Negative"}


def wrapped(**function):
    return {"type": "function", "function": function}


class Layouts(WithCommand):
    def made(self, row, name="chatml", **options):
        record, documents = encoder(name, **options).understood(workers.parsed(row))
        return record, [(d.ids.tolist(), d.counts.tolist(), d.reward, d.prompt if record.kind != shards.DOCUMENTS else 0) for d in documents]

    def assert_same(self, row, ours, name="chatml", **options):
        (found, documents), (record, expected) = self.made(row, name, **options), self.made(ours, name, **options)
        self.assertEqual((found.kind, documents), (record.kind, expected))
        return found

    def refused_row(self, detail, row, name="chatml", **options):
        with self.assertRaisesRegex(records.Rejected, detail, msg=row):
            self.made(row, name, **options)

    def test_rows_of_other_layouts(self):
        add, four = {"role": "user", "content": "Add\n2+2"}, {"messages": [USER, FOUR]}
        history = [["hi", "ho"], ["And?", "Yes"]]
        talked = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate((*history[0], *history[1]))]
        for row, ours in (
                ({"instruction": "Add", "input": "2+2", "output": "4"}, {"prompt": [add], "completion": [FOUR]}),
                ({"instruction": "2+2?", "input": "", "output": "4"}, SPOKEN), ({"instruction": "2+2?", "output": "4"}, SPOKEN),
                ({"instruction": "", "input": "2+2?", "output": "4", "system": ""}, SPOKEN),
                ({"instruction": "Add", "context": "2+2", "response": "4", "category": "sums"}, {"prompt": [add], "completion": [FOUR]}),
                ({"instruction": "2+2?", "output": "4", "system": "Be brief", "history": history}, {"messages": [SYSTEM, *talked, USER, FOUR]}),
                *(({question: "2+2?", answer: "4", "id": 3}, SPOKEN)
                  for question, answer in (("question", "answer"), ("query", "response"), ("instruction", "response"), ("prompt", "response"),
                                           ("prompt", "output"), ("problem", "solution"), ("input", "output"), ("question", "completion"))),
                ({"system_prompt": "Be brief", "question": "2+2?", "response": "4"}, {"prompt": [SYSTEM, USER], "completion": [FOUR]}),
                ({"instruction": "2+2?", "output": "4", "label": False}, {**SPOKEN, "label": False}),
                # ShareGPT
                ({"conversations": TALK, "system": "Be brief"}, {"messages": [SYSTEM, USER, FOUR]}),
                ({"conversation": [{"from": "system", "value": "Be brief"}, *TALK], "system": "Be brief"}, {"messages": [SYSTEM, USER, FOUR]}),
                ({"messages": [USER, FOUR], "system": "Be brief"}, {"messages": [SYSTEM, USER, FOUR]}),
                ({"prompt": json.dumps([USER]), "completion": str([FOUR])}, SPOKEN), ({"messages": json.dumps([USER, FOUR])}, four), ({"messages": str([USER, FOUR])}, four),
                # the last answer is labelled; a prompt of messages; whole conversations
                *(({"messages": [USER, FOUR], key: value}, {**SPOKEN, "label": label}) for key, value, label in (
                    ("label", True, True), ("label", 0, False), ("label", "False", False), ("label", "1.0", True), ("kto_tag", True, True))),
                *(({key: prompt, "chosen": chosen, "rejected": rejected}, PAIR) for key, prompt, chosen, rejected in (
                    ("messages", [USER], [FOUR], [FIVE]), ("conversations", TALK[:1], TALK[1], {"from": "gpt", "value": "5"}),
                    ("conversations", TALK[:1], "4", "5"), ("question", "2+2?", "4", "5"), ("instruction", "2+2?", FOUR, FIVE),
                    ("prompt", "2+2?", TALK, [TALK[0], {"from": "gpt", "value": "5"}]), ("prompt", "2+2?", [FOUR], [FIVE]), ("prompt", [USER], [USER, FOUR], [USER, FIVE]))),
                *(({"system": "Be brief", **row}, TOLD) for row in (
                    {"question": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
                    {"prompt": [USER], "chosen": "4", "rejected": [FIVE]}, {"conversations": TALK[:1], "chosen": TALK[1], "rejected": FIVE},
                    {"chosen": [USER, FOUR], "rejected": [USER, FIVE]})),
                ({"question": "2+2?", "completions": ["4", "5"], "rewards": [1, 0]}, {"prompt": [USER], "completions": ["4", "5"], "rewards": [1, 0]})):
            with self.subTest(row=row):
                self.assert_same(row, ours)
        for text in ("[{1, 2}]", '[{"a": 1}]', "[{", '[{"role": 1}, 3]', "[]"):  # which are texts
            self.assertEqual(records.understand({"prompt": text, "completion": text}).documents, [records.Source(text, text)])
        found = self.assert_same({"question": "2+2?", "answer": "4", "level": 3}, {"prompt": [USER], "answer": "4"}, format="prompts")
        self.assertEqual(json.loads(found.columns), {"messages": [USER], "question": "2+2?", "answer": "4", "level": 3})
        # reward commands get the messages with reasoning and calls as they are, beside tools; a column of that name goes before
        call = {"type": "function", "function": {"name": "w", "arguments": {"city": "SF"}}}
        talk = [USER, {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
        for row, sent in (({"prompt": talk, "tools": [{"name": "w"}]}, {"messages": talk, "tools": [{"name": "w"}]}),
                          ({"prompt": TALK[:1], "system": "Be brief"}, {"messages": [SYSTEM, USER], "system": "Be brief"}),
                          ({"prompt": [USER], "messages": [FOUR]}, {"messages": [FOUR]}), ({"prompt": "2+2?", "n": 1}, {"n": 1})):
            self.assertEqual(json.loads(records.understand(row, "prompts").columns), sent)
        # without a chat template they are texts, with line breaks between them
        texts = {"prompt": "Be brief\nAdd\n2+2\n", "completion": "4"}
        options = {"eos_token": "</s>"}
        both = [encoder("bare", **options).encode(row)[1][0].ids.tolist() for row in (
            {"instruction": "Add", "input": "2+2", "output": "4", "system": "Be brief"}, texts)]
        self.assertEqual(*both)
        for columns, row, ours in (({"prompt": "q", "completion": "a"}, {"q": "2 + 2 =", "a": " 4", "answer": "x"}, {"prompt": "2 + 2 =", "completion": " 4"}),
                                   ({"instruction": "q", "output": "a"}, {"q": "2+2?", "a": "4"}, SPOKEN),
                                   ({"prompt": "completion", "completion": "prompt"}, {"completion": "2+2?", "prompt": "4"}, {"prompt": "2+2?", "completion": "4"}),
                                   ({"prompt": "messages", "completion": "solution"}, {"messages": [USER], "solution": "4"}, {"prompt": [USER], "completion": "4"}),
                                   ({"prompt": "messages", "answer": "solution"}, {"messages": [USER], "solution": "4"}, {"prompt": [USER], "answer": "4"}),
                                   ({"instruction": "prompt", "output": "completion"}, {"prompt": "2+2?", "completion": "4", "tools": [{}]}, {**SPOKEN, "tools": [{}]}),
                                   ({"instruction": "question"}, {"question": "2", "answer": "4", "context": "2"}, {"prompt": [{**USER, "content": "2\n2"}], "completion": [FOUR]}),
                                   ({"unused": "reasoning"}, {"text": "a", "reasoning": "b"}, {"text": "a"}),
                                   ({"prompt": "q", "answer": "a"}, {"q": "2+2?", "a": "4", "n": 1}, {"prompt": "2+2?", "answer": "4"})):
            record, documents = records.understand(row, "auto", (), columns), records.understand(ours)
            self.assertEqual((record.kind, record.documents), (documents.kind, documents.documents))
        self.assertEqual(json.loads(record.columns), {"answer": "4", "n": 1})

    def test_columns_with_a_meaning(self):
        """Each is read, or refuses the row with what to type; none is left out."""
        think, tools, no_thinking = {**FOUR, "reasoning_content": "I add"}, [wrapped(name="w", parameters={})], {"enable_thinking": False}
        earlier, turns, call = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], [["Hi", "Ho"]], {"role": "assistant", "tool_calls": [wrapped(name="w", arguments={})]}
        said, asked, two = [*earlier, USER, FOUR], {"Q": "2+2?", "A": "4"}, {"C": "4", "J": "5"}
        user, with_tools, way = "--columns prompt=KEY,completion=KEY takes it; .*; --format prompts --columns prompt=KEY(,answer=KEY)? makes prompts$", {**SPOKEN, "tools": tools}, "--columns instruction=prompt,output=completion "
        for row, ours in (
                (asked, SPOKEN), ({**asked, "S": "Be brief"}, {**SPOKEN, "prompt": [SYSTEM, USER]}), ({"I": "Add", "input": "2", "A": "4"}, {**SPOKEN, "prompt": [{**USER, "content": "Add\n2"}]}),
                ({"I": "Add", "X": "2", "A": "4"}, {**SPOKEN, "prompt": [{**USER, "content": "Add\n2"}]}), ({**asked, "X": "It is 2."}, "--columns instruction=KEY takes it; --format completion"),
                *(({question: "2+2?", answer: "4", "H": history}, {"messages": said}) for question, answer in (("Q", "A"), ("input", "A"), ("prompt", "A"), ("prompt", "completion"), ("I", "A"))
                  for history in (turns, earlier, json.dumps(turns), str(earlier))[question != "Q":]),
                ({**asked, "H": [], "R": "", "S": " ", "X": "", "T": [], "P": []}, SPOKEN), ({**asked, "H": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "S": "Be brief"}, {"messages": [SYSTEM, *said]}),
                ({"Q": "2+2?", "H": turns, **two}, {**PAIR, "prompt": [*earlier, USER]}), ({"prompt": "2+2?", "H": turns, "answer": "4"}, {"prompt": [*earlier, USER], "answer": "4"}),
                ({"M": [USER, FOUR], "H": turns}, "--format messages leaves"), ({"M": said, "H": turns}, {"messages": said}), ({**asked, "H": [earlier[0]]}, "history ends with a question"),
                *(({**each, "R": "I add"}, {**SPOKEN, "completion": [think]}) for each in (asked, {"prompt": "2+2?", "completion": "4"}, SPOKEN)), ({"M": [USER, FOUR], "R": "I add"}, {"messages": [USER, think]}),
                ({**asked, "R": "I add", "H": turns}, {"messages": [*said[:-1], think]}), ({"M": [USER, think], "R": "I add"}, {"messages": [USER, think]}), ({**SPOKEN, "label": True, "R": "I add"}, {**SPOKEN, "completion": [think], "label": True}),
                *(({**each, "R": value}, "--format [a-z]* leaves") for each, value in ((asked, "on"), ({"Q": "on", "A": "on"}, "on"), ({"Q": "15?", "A": "Hi, 15"}, ["Hi"]), (asked, ["I", "add"]), ({"M": said}, "I add"), ({"Q": "2+2?", **two}, "I add"), ({"text": "2+2=4"}, "I add"))),
                ({**asked, "T": tools}, with_tools), ({**asked, "T": json.dumps(tools)}, with_tools), ({"prompt": "2+2?", "completion": "4", "T": tools}, way), ({"text": "2+2=4", "T": tools}, "--format text"),
                ({"M": [USER, call, {"role": "tool", "content": "4"}, FOUR], "T": tools}, {"messages": [USER, call, {"role": "tool", "content": "4"}, FOUR], "tools": tools}),
                ({"Q": "2+2?", **two}, PAIR), ({"prompt": [USER], "C": [FOUR], "J": [FIVE]}, PAIR), ({"C": [USER, FOUR], "J": str([USER, FIVE])}, PAIR), ({"M": [USER], "C": [FOUR], "J": [FIVE]}, PAIR),
                ({"I": "2+2?", "input": "", **two, "S": "Be brief"}, TOLD), ({"Q": "2+2?", "L": "4", "W": "5"}, "--columns chosen=KEY,rejected=KEY or"), ({"prompt": "2+2?", "L": "4", "W": "5"}, "--columns chosen=KEY,rejected=KEY or"),
                ({"M": [USER, FOUR], "A": "4"}, {"messages": [USER, FOUR]}), ({"M": [USER, FOUR], "A": "5"}, "--format messages leaves"), ({"M": [USER, {**FOUR, "content": "14"}], "A": "4"}, "--format messages leaves"), ({"M": [USER], "A": "4"}, user), ({"M": [*said[:2], USER], "A": "4"}, user),
                ({"prompt": "2+2?", "completion": "4", "A": "5"}, "--columns completion=KEY takes it"), ({"M": [USER, FOUR], "Q": "2+2?"}, {"messages": [USER, FOUR]}), ({"M": [USER, FOUR], "Q": "5?"}, "--format messages leaves"),
                ({"M": [USER, FOUR], "E": False}, {"messages": [USER, FOUR], "chat_template_kwargs": no_thinking}), ({**asked, "E": False}, {**SPOKEN, "chat_template_kwargs": no_thinking}), ({"text": "2+2=4", "E": True}, "--format text leaves"),
                ({"prompt": "2+2?", "completion": "4", "E": True}, way), ({"M": [USER, FOUR], "thinking_budget": 4}, "--format messages leaves"), ({"M": [USER, FOUR], "E": None, "reasoning": None, "note": 1, "date_string": "4"}, {"messages": [USER, FOUR]}), ({"M": [USER, FOUR], "P": ["a.png"]}, "only text is trained on here"),
                ({"text": "2+2=4", "S": "Be brief"}, "--format text leaves"), ({"text": "Be brief: 2+2=4", "S": "Be brief"}, {"text": "Be brief: 2+2=4"})):
            for i in range(3):
                spelt = {SPELT[key].split()[i] if key in SPELT else key: value for key, value in row.items()}
                with self.subTest(row=spelt):
                    if isinstance(ours, str):
                        self.refused_row(ours.replace("KEY", r"[\w-]*"), spelt, "hybrid")
                    else:
                        found = self.assert_same({**spelt, "note": "x"}, ours, "hybrid")
                        self.assertLessEqual({*found.left_out}, {"note", "date_string"})

    def test_tools_of_sharegpt(self):
        call, tool = {"name": "w", "arguments": {"city": "SF"}}, {"name": "w", "description": "d", "parameters": {}}
        answers = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny"}]
        calls = lambda *made: {"messages": [USER, {"role": "assistant", "tool_calls": [wrapped(**each) for each in made]}, *answers], "tools": [wrapped(**tool)]}
        says = lambda value, tools: {"conversations": [TALK[0], {"from": "function_call", "value": value}, {"from": "observation", "value": "sunny"},
                                                       {"from": "gpt", "value": "Sunny"}], "tools": tools}
        for name in ("hybrid", "thinking"):
            for value, made in ((call, [call]), ([call, call], [call, call]), ({"name": "w"}, [{"name": "w", "arguments": {}}])):
                for tools in ([tool], [wrapped(**tool)], json.dumps([tool])):
                    self.assert_same(says(json.dumps(value), tools), calls(*made), name, format="auto" if name == "hybrid" else "messages")
        told = {"messages": [USER, {"role": "assistant", "tool_calls": [wrapped(**call)]}, *answers], "tools": [wrapped(**tool)]}
        for turn in ({"tool_calls": [wrapped(name="w", arguments='{"city": "SF"}')]}, {"tool_calls": json.dumps([wrapped(**call)])},
                     {"function_call": call}, {"function_call": json.dumps(call)}):
            for tools in ([wrapped(**tool)], [json.dumps(wrapped(**tool))]):
                self.assert_same({**told, "messages": [USER, {"role": "assistant", **turn}, *answers], "tools": tools}, told, "hybrid")
        self.assert_same({"messages": [USER, {"role": "assistant", "tool_calls": [wrapped(name="w", arguments=None)]}, *answers]},
                         {"messages": [USER, {"role": "assistant", "tool_calls": [wrapped(name="w", arguments={})]}, *answers]}, "hybrid")
        for arguments in ([1], 5, "[1]", '"x"', "{1: 2}"):
            self.refused_row("wrong type: messages.1. calls a tool with arguments that are not an object",
                             {"messages": [USER, {"role": "assistant", "tool_calls": [wrapped(name="w", arguments=arguments)]}]}, "hybrid")
        self.refused_row("wrong type: a tool of tools is a text, not an object", {**told, "tools": ["w"]}, "hybrid")
        for value in ("call w", "[]", '{"arguments": {}}', "3"):
            self.refused_row("wrong type: messages.1. is a tool call, but not JSON", says(value, [tool]), "hybrid")

    def test_rows_that_are_refused(self):
        for detail, row in (
                ("clash: column system differs from the system message", {"messages": [SYSTEM, USER, FOUR], "system": "Be long"}),
                ("clash: column system differs from", {"conversations": [{"from": "system", "value": "x"}, *TALK], "system_prompt": "y"}),
                ("clash: has output and response, each of which could be the completion; choose with --columns completion=output",
                 {"instruction": "a", "output": "b", "response": "c"}),
                ("clash: has question and problem", {"question": "a", "problem": "b", "answer": "c"}),
                ("clash: has instruction, for which .*; --columns prompt=instruction takes it; --format completion leaves it out", {"instruction": "c", "prompt": "a: b", "output": "b"}),
                ("clash: has text, and a question with an answer; choose with --format text or completion",
                 {"instruction": "a", "output": "b", "text": "c"}),
                ("clash: has messages and chosen, and messages end with an answer", {"messages": [USER, FOUR], "chosen": [FOUR], "rejected": [FIVE]}),
                ("wrong type: messages end with the user, not with the assistant's answer", {"messages": [USER], "label": True}),
                ("wrong type: history.0. is a list, not an object", {"instruction": "a", "output": "b", "history": [["c"]]}),
                ("wrong type: history is a text", {"instruction": "a", "output": "b", "history": "c"}),
                ("wrong type: messages is a text, not a list, nor JSON", {"messages": "[{'role': 'user'} {'role': 'assistant'}]"}),
                ("wrong type: the row is a list", [1]), ("unknown format: has question, and no known answer; --columns completion=KEY", {"question": "a", "level": "b"})):
            self.refused_row(detail, row)
        with self.assertRaisesRegex(records.Rejected, "unknown format: has no column q, named by --columns; it has a, b"):
            records.understand({"a": "1", "b": "2"}, columns={"prompt": "q"})

    # ---- files ------------------------------------------------------------------------------------------------------------------
    def binary(self, name, content):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return self.path(name)

    def shard_of(self, *arguments):
        self.prepare("out", *arguments, "--force")
        return contents(self.path("out"))["train-00000.bin"]

    def test_kinds_of_files(self):
        rows = list(samples.conversations(60, seed=4, most=5))
        expected = self.shard_of(self.write("a.jsonl", rows))
        texts = lambda indent, lead="": lead + json.dumps(rows, ensure_ascii=False, indent=indent)
        files = [("a.json", texts(None)), ("b.json", texts(1, "\ufeff \n")), ("c.json.gz", gzip.compress(texts(2).encode())), ("d.jsonl", texts("\t")),
                 ("e.json", "\n".join(json.dumps(row, indent=4) for row in rows)), ("rows", texts(None)),
                 ("f.csv", "id,messages\r\n" + "".join(f'{i},"{json.dumps(row["messages"])}"\r\n'.replace('"', '""').replace('""[', '"[').replace(']""', ']"')
                                                       for i, row in enumerate(rows)))]
        with mock.patch.object(inputs, "HEAD", 64):  # so that values end in other pieces than they begin in
            for name, content in files[:None if pyarrow else -1]:
                self.assertEqual(self.shard_of(self.binary(name, content)), expected, name)
        if pyarrow:
            table = pyarrow.Table.from_pylist(rows)
            for name, writer in (("g.arrow", pyarrow.ipc.new_file), ("h.arrow", pyarrow.ipc.new_stream), ("saved/part.arrow", pyarrow.ipc.new_stream)):
                self.binary(name, "")
                with pyarrow.OSFile(self.path(name), "wb") as file, writer(file, table.schema) as out:
                    out.write_table(table, max_chunksize=25)
                self.assertEqual(self.shard_of(self.path(name)), expected, name)
            self.binary("saved/state.json", json.dumps({"_data_files": [{"filename": "part.arrow"}]}))
            self.assertEqual(self.shard_of(self.path("saved")), expected)
            os.makedirs(self.path("splits"))
            os.rename(self.path("saved"), self.path("splits/train"))
            self.binary("splits/dataset_dict.json", '{"splits": ["test", "train"]}')
            self.assertEqual(self.shard_of(self.path("splits")), expected)
        self.assertEqual(inputs.without_nulls({"chat_template_kwargs": {"a": None}, "b": None}), {"chat_template_kwargs": {}, "b": None})
        if not pyarrow:
            return
        rows = [{"question": "2+2?", "thinking": "I add", "answer": "4", "chat_history": [["Hi", "Ho"]], "enable_thinking": True}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.path("columns.parquet"))
        self.prepare("j", self.write("columns.jsonl", rows), tokenizer="hybrid")
        self.prepare("p", self.path("columns.parquet"), tokenizer="hybrid")
        self.assertEqual(*(contents(self.path(out))["train-00000.bin"] for out in "jp"))
        quoted = self.binary("q.csv", '\ufeffprompt,completion,label,\n"say ""hi"", you","line\nbreak",True,1\n"[1, 2]", 4,0,2\n')
        rows = [{"prompt": 'say "hi", you', "completion": "line\nbreak", "label": True}, {"prompt": "[1, 2]", "completion": " 4", "label": False}]
        expected = self.shard_of(self.write("q.jsonl", rows))
        self.assertEqual(self.shard_of(quoted), expected)
        for name, comma in (("q.tsv", "\t"), ("semicolons.csv", ";")):
            content = f"prompt{comma}completion{comma}label\n" + comma.join(('"say ""hi"", you"', '"line\nbreak"', "true\n")) + comma.join(("[1, 2]", " 4", "0\n"))
            self.assertEqual(self.shard_of(self.binary(name, content)), expected, name)

    def test_files_that_are_refused(self):
        row, wide = json.dumps(GOOD), "iconv -f UTF-16 -t UTF-8 > NEW"
        for words, name, content in (
                ("cut.json:2: not JSON: ends within its array or object; the file may be cut off", "cut.json", f"[{row},\n{row[:40]}"),
                ("open.json:2: not JSON: ends within", "open.json", f"[{row},\n{row}"), ("two.json:1: .* something follows its array", "two.json", f"[{row}] [{row}]"),
                ("bad.json:2: not JSON: Expecting ',' delimiter at column 14", "bad.json", '[\n{"text": "a" "b"}]'),
                ("far.json:3: not JSON: Expecting value at column 8", "far.json", '[\n{"a": 1},\n{"a": [tru]},\n' + '{"text": "a"},\n' * 9000),
                ("latin.json:1: cannot be read: .*utf-8", "latin.json", b'[{"text": "\xff"}]'), ("huge.json:1: cannot be read", "huge.json", '[{"a": ' + "9" * 5000),
                ("deep.json:1: cannot be read", "deep.json", "[" * 100000), ("no sample for training", "none.json", "[ ]"), 
                ("none.* \\(body\\) is known", "t.parquet", ""),
                (f"wide.jsonl: is UTF-16, not UTF-8; type: cat .*wide.jsonl . {wide}", "wide.jsonl", row.encode("utf-16")),
                (f"wide.csv.gz: is UTF-16, .* zcat .*wide.csv.gz . {wide}", "wide.csv.gz", gzip.compress(row.encode("utf-16"))),
                *((f"cut.jsonl.{suffix}(:[0-9]+)?: cannot be read: (Compressed file ended|Truncated)", f"cut.jsonl.{suffix}", pack(b'{"text": "hello"}\n' * 99)[:-9])
                  for suffix, pack in PACKERS), *((f"no.csv.{suffix}: cannot be read: ", f"no.csv.{suffix}", b"PK not one") for suffix, _ in PACKERS),
                ("binary.txt: is binary", "binary.txt", b"a\0b"), ("code.py: is of an unknown kind .*; --format text", "code.py", "print(1)"),
                ("empty: has no file of a known kind", "empty/.hidden", "")):
            path = self.binary(name, content)
            if name == "t.parquet":
                if not pyarrow:
                    continue
                pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), path)
            self.refused(1, words, self.command("x", os.path.dirname(path) if "hidden" in name else path))
        with mock.patch.dict("sys.modules", {"pyarrow": None, "compression.zstd": None}), mock.patch("importlib.util.find_spec", lambda _: None):
            self.refused(1, "a.csv.zst: cannot be read: .*: pip install pyarrow", self.command("x", self.binary("a.csv.zst", b"")))
        if pyarrow:
            for words, content in (("a.csv:1: cannot be read: .*Expected 2 columns, got 1: a", "prompt,completion\na\n"), ("Expected 2 columns, got 1: \"a,b", 'prompt,completion\n"a,b\n'),
                                   ("invalid UTF8", b"prompt,completion\na,\xff\n"), ("a.csv: has two columns a", "a,b,a\n1,2,3\n"),
                                   ("a.csv: none of its columns .hello, world. is known", "hello,world\na,b\n"), ("cannot be read: Empty CSV", "")):
                self.refused(1, words, self.command("y", self.binary("a.csv", content)))
            done = self.refused(1, "1 bad sample", self.command("y", self.binary("a.csv", "a\n1\n"), "--columns", "prompt=q"))
            self.assertIn("a.csv:1: unknown format: has no column q, named by --columns; it has a", done.stderr)
        done = self.refused(1, "1 bad sample", self.command("z", self.write("cut.jsonl", [row, row[:44]])))
        self.assertIn(f"cut.jsonl:2: malformed line: not JSON: ends in the middle of a JSON value, at column {len(row[:44].rstrip()) + 1}; the file may be cut off", done.stderr)
        for lines in (["{a"], []):  # nothing is shown
            done = self.run_main(*self.command(None, "--show", "2", self.write("a.jsonl", lines)))
            self.assertEqual((done.returncode, done.stderr), (1, "prepare.py: no sample is shown: none could be read\n"))

    def test_folders(self):
        rows = list(samples.conversations(3, most=3))
        for name, content in (("d/b.jsonl", rows[1]), ("d/a/z.json", [rows[0]]), ("d/c.jsonl", rows[2])):
            self.binary(name, json.dumps(content))
        for name in ("d/README.md", "d/code.py", "d/.git/x.jsonl", "d/dataset_info.json"):
            self.binary(name, "no\n")
        self.binary("d/data.bin", b"\0\1")
        os.symlink("..", self.path("d/a/loop"))
        os.symlink("b.jsonl", self.path("d/same.jsonl"))
        expected = self.shard_of(self.write("all.jsonl", rows))
        done = self.prepare("out", self.path("d"), "--force")
        self.assertEqual(contents(self.path("out"))["train-00000.bin"], expected)
        for words in ("takes 3 files: a/z.json, b.jsonl, c.jsonl\n", "1 file: README.md is text next to data", ".git is hidden", "dataset_info.json is about data", "2 files: a/loop is listed twice",
                      "2 files: code.py is of an unknown kind"):
            self.assertIn(words, done.stderr)
        self.refused(1, "b.jsonl: is also in a named folder", self.command("x", self.path("d"), self.path("d/b.jsonl")))
        for name in ("s/a.rst", "s/b/c.py", "s/d.MD"):
            self.binary(name, f"text of {name}\n")
        self.binary("s/e.o", b"\x7fELF\0")
        done = self.prepare("out", self.path("s"), "--format", "text", "--force")
        rows = [{"text": f"text of {name}"} for name in ("s/a.rst", "s/b/c.py", "s/d.MD")]
        self.assertEqual(contents(self.path("out"))["train-00000.bin"], self.shard_of(self.write("t.jsonl", rows)))
        self.assertIn("left out 1 file: e.o is binary, not text", done.stderr)

    def test_splits_of_folders(self):
        """As datasets' load_dataset finds them; of each folder one line names what is taken, and what is there."""
        hub = ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"]
        made, two = [name.replace("train", "train_gen") for name in hub[:1]] + [name.replace("-0", "_sft-0", 1) for name in hub[:2]], ["main/train-0.jsonl", "main/test-0.jsonl", "more/train-0.jsonl"]
        configs = "---\nlicense: mit\nconfigs:\n- config_name: main\n%s  data_files:\n  - split: train\n    path: main/train-*\n  - path: 'main/test-[0-9]*'  # held out\n    split: test\n" \
                  "- config_name: more\n  data_files: [\"more/**\"]\ndataset_info:\n- config_name: x\n---\n# Hi\n"
        saved = ["s/a/data-0.jsonl", "s/b/data-0.jsonl"]
        for files, takes, words, *more in (
                (hub, hub[:1], "takes train of its splits .test, train, validation."), (hub, hub[1:], "takes test, validation of", "--splits", "test,val"), (hub, hub, "takes 3 files", "--splits", "all"),
                (hub, None, "has splits test, train, validation; --splits NAME,... chooses", "--splits", "train,tset"), (made[1:], made[1:2], "takes train_sft of its splits .test_sft, train_sft."),
                (made, None, "has splits test_sft, train_gen, train_sft; --splits"), (made, made[:2], "takes train_gen, train_sft of", "--splits", "train_gen,train_sft"),
                (["train.jsonl", "dev.json", "Valid.csv", "eval.jsonl", "other.jsonl"], ["train.jsonl"], "left out 4 files: Valid.csv is not of that split"),
                (["train/a.jsonl", "test/a.jsonl", "x.jsonl"], ["train/a.jsonl"], "left out 2 files: test/a.jsonl"), (["a.training_2/b.jsonl", "a/testing/b.jsonl"], ["a.training_2/b.jsonl"], "(test, train)"),
                (["test.jsonl"], ["test.jsonl"], "takes test of its splits .test."), (["test.jsonl", "a.jsonl"], None, "has splits test and other files; --splits"), (["test.jsonl", "a.jsonl"], ["test.jsonl"], "left out", "--splits", "test"),
                ([*two, "---\nconfigs:\n- config_name: main\n  data_dir: main\n- config_name: more\n  data_dir: more\n---\n"], None, "configurations by data_dir"),
                ([*two, "---\nconfigs: [{config_name: main, data_files: main/*}, {config_name: more, data_files: more/*}]\n---\n"], None, "on one line"),
                ([*two[:2], "---\nconfigs:\n- config_name: main\n  data_dir: main\n---\n"], two[:1], "takes train of its splits"),
                (["dev.jsonl", "test.jsonl"], None, "has splits test, validation; --splits"), (["trainer.jsonl", "contest.jsonl", "latest/a.jsonl"],) * 2 + ("takes 3 files",),
                (["train.txt", "test.txt"], ["train.txt"], "takes train of its splits .test, train."), (["a.txt", "test/b.txt", "training/c.txt", "eval.md"],) * 2 + ("takes 4 files",),
                (["train.py", "test.json", "b.py"],) * 2 + ("takes 3 files", "--format", "text"), (saved, saved[1:], "takes b of its splits", "--splits", "b"), (saved, None, "has splits a, b; --splits"),
                (two, [two[0], two[2]], "takes train of its splits .test, train."), ([*two, configs % ""], None, "README.md has configurations main, more; name files of one as FILE"),
                ([*two, configs % "  default: true\n"], two[:1], "takes train of its splits .test, train., configuration main of main, more"), ([*two, configs % "  default: true\n"], two[1:2], "takes test of", "--splits", "test"),
                ([*two, configs.replace(" main\n", " default\n") % ""], two[:1], "configuration default of default, more"), ([two[1], two[2], configs % ""], None, "configurations main, more"), ([two[2], configs % ""], two[2:], "^[^(]*takes 1 file: more/train-0.jsonl$")):
            with self.subTest(files=files, more=more), tempfile.TemporaryDirectory() as folder:
                for name in files:
                    self.binary(os.path.join(folder, "README.md" if "\n" in name else name), name if "\n" in name else '{"text": "a"}\n')
                if files is saved:
                    self.binary(os.path.join(folder, "s/dataset_dict.json"), '{"splits": ["a", "b"]}')
                arguments, said = prepare.read_arguments(self.command("x", folder, *more)), []
                try:
                    found = sorted(os.path.relpath(path, folder) for path in inputs.find([folder], arguments.format, said.append, arguments.splits))
                except inputs.InputFailure as failure:
                    found, said = None, [str(failure)]
                self.assertEqual(found, takes and sorted(takes), said)
                self.assertRegex("\n".join(said), words.replace("(", r"\(").replace(")", r"\)"))
                if takes:  # files named themselves are always taken
                    self.assertEqual(inputs.find([os.path.join(folder, files[0])], arguments.format, said.append), [os.path.join(folder, files[0])])
        self.refused(2, "--splits needs a folder", self.command("x", self.write("a.jsonl", [GOOD]), "--splits", "test"))

    def test_data_sets_of_the_hub(self):
        """A module stands in for huggingface_hub: it copies the files that match a pattern into a snapshot."""
        remote, snapshot, calls = self.path("remote"), self.path("hub/datasets--o--set/snapshots/abc"), []
        for name in ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "more/a.json", "large.bin"):
            self.binary(os.path.join(remote, name), '{"text": "%s"}\n' % name)

        def snapshot_download(repo_id, repo_type, revision, allow_patterns):
            calls.append((repo_id, repo_type, revision, allow_patterns[0]))
            if repo_id != "o/set":
                raise OSError("401 Client Error.\n\nAccess to it is restricted" + " at length" * 40)
            for folder, _, names in os.walk(remote):
                for name in (os.path.relpath(os.path.join(folder, name), remote) for name in names):
                    if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                        os.makedirs(os.path.dirname(os.path.join(snapshot, name)), exist_ok=True)
                        shutil.copy(os.path.join(remote, name), os.path.join(snapshot, name))
            os.makedirs(snapshot, exist_ok=True)
            return snapshot

        def shown(*arguments):
            shutil.rmtree(snapshot, ignore_errors=True)
            done = self.prepare(None, *arguments, "--show", "9")
            self.assertIn("note: hf://datasets/o/set", done.stderr)
            return re.findall(r"^--- .*snapshots/abc/(.*):1:", done.stdout, re.M)
        train, test = "data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"
        with mock.patch.dict(sys.modules, huggingface_hub=types.SimpleNamespace(snapshot_download=snapshot_download)):
            self.assertEqual(shown("hf://datasets/o/set"), [train])
            self.assertEqual(sorted(os.listdir(snapshot)), ["data", "more"])
            self.assertEqual(shown("hf://datasets/o/set", "--splits", "all"), [test, train, "more/a.json"])
            self.assertEqual(shown("hf://datasets/o/set/test"), [test])
            self.assertEqual(shown("hf://datasets/o/set/test", "hf://datasets/o/set/train"), [test, train])
            self.assertEqual((shown("hf://datasets/o/set@v1/more"), os.listdir(snapshot), calls[-1]), (["more/a.json"], ["more"], ("o/set", "dataset", "v1", "more")))
            self.assertEqual((shown("hf://datasets/o/set/" + test), os.listdir(snapshot + "/data")), ([test], [test[5:]]))
            for name, words in (("hf://datasets/set", "names no data set"), ("hf://models/o/set", "names no data set"), ("hf://datasets/o/set/x.json", "has no file or folder x.json"),
                                ("hf://datasets/o/set/dev", "has no split validation; it has splits test, train"), ("hf://datasets/o/gated", "OSError: 401 Client Error. .*: hf auth login")):
                self.refused(1, words, self.command("x", name))
        with mock.patch.dict(sys.modules, huggingface_hub=None):
            self.refused(1, "need huggingface_hub: pip install huggingface_hub", self.command("x", "hf://datasets/o/set"))

    @unittest.skipUnless(pyarrow, "Parquet: pyarrow is not installed")
    def test_nulls_of_structs(self):
        """A column gives each call the arguments of all others, as null."""
        rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [wrapped(name=name, arguments=arguments)]},
                              {"role": "tool", "content": "x"}, FOUR], "tools": [wrapped(name=name, parameters={"properties": {key: {"type": "string"} for key in arguments}})]}
                for name, arguments in (("weather", {"city": "SF", "list": [None, 1]}), ("search", {"query": "cats", "deep": {"a": 1}}))]
        self.write("a.jsonl", rows)
        for name in ("a.parquet", "a.arrow"):
            table = pyarrow.Table.from_pylist(rows)
            if name == "a.parquet":
                pyarrow.parquet.write_table(table, self.path(name))
            else:
                with pyarrow.OSFile(self.path(name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
                    out.write_table(table)
            for each in ("hybrid", "thinking"):
                for out, data in (("j", "a.jsonl"), ("p", name)):
                    self.prepare(out, self.path(data), "--force", "--format", "messages", tokenizer=each)
                self.assertEqual(*(contents(self.path(out))["train-00000.bin"] for out in "jp"))

    def test_runs_go_on_in_each_kind(self):
        """From the position behind any batch come the rows that follow it."""
        rows = [{"prompt": f"{i}\u00e9?", "completion": "4,\n5" if i % 3 else "6"} for i in range(40)]
        lines, array = "".join(json.dumps(row) + "\n" for row in rows), "\n\n" + json.dumps(rows, indent=random.Random(1).choice((1, 3)))
        table = "prompt,completion\n" + "".join(f'{row["prompt"]},"{row["completion"]}"\n' for row in rows)
        paths = [self.binary("a.json", array), *(self.binary(f"{kind}.{suffix}", pack(content.encode())) for suffix, pack in PACKERS
                                                 for kind, content in (("a.jsonl", lines), ("b.json", array), *[("c.csv", table)] * bool(pyarrow)))]
        if pyarrow:
            paths.append(self.path("c.arrow"))
            with pyarrow.OSFile(paths[-1], "wb") as file, pyarrow.ipc.new_file(file, pyarrow.Table.from_pylist(rows).schema) as out:
                out.write_table(pyarrow.Table.from_pylist(rows), max_chunksize=13)
        with mock.patch.object(inputs, "BATCH_ROWS", 7), mock.patch.object(inputs, "HEAD", 99):
            batches = list(inputs.batches(paths, inputs.START))
            self.assertEqual([dict(workers.parsed(row)) for batch in batches for _, row in batch.rows], rows * len(paths))
            for i, batch in enumerate(batches):
                position = json.loads(json.dumps(batch.end))
                self.assertEqual([(b.file, b.rows) for b in inputs.batches(paths, position)], [(b.file, b.rows) for b in batches[i + 1:]])

    # ---- what is said -----------------------------------------------------------------------------------------------------------
    def test_what_is_counted(self):
        pair, group = {"prompt": "2+2?", "chosen": "4", "rejected": "4"}, {"prompt": "2+2?", "completions": ["4", "5"], "rewards": [1, 1]}
        for rows, words in (([pair, {**pair, "rejected": "5"}, pair], "\n2 samples: chosen and rejected are the same"),
                            ([group, {**group, "rewards": [0, 1]}], "\n1 sample: all rewards of the group are equal"),
                            ([{"prompt": "a", "answer": ""}, {"prompt": "a"}], "\n1 sample: the answer is empty"),
                            ([GOOD, GOOD], r"\nmasked: [0-9]* of [0-9]* tokens; turns: 2 of user \(counting: 2 of assistant\)\n")):
            self.assertRegex(self.prepare("out", self.write("a.jsonl", rows), "--force").stdout, words)
        self.assertIn("a.jsonl:1: chosen and rejected are the same", self.prepare(None, "--show", "1", self.write("a.jsonl", [pair])).stdout)

    def test_the_next_command(self):
        rows = [{"text": "hello world " * (3000 if i == 7 else 5)} for i in range(200)]
        data, folder = self.write("a.jsonl", rows), self.path("model")
        (longest,) = encoder("chatml").encode(rows[7])[1]
        needed = -(-(len(longest.ids) - 1) // 1024) * 1024
        lengths = [len(encoder("chatml").encode(row)[1][0].ids) for row in rows]
        for config, next_words, more in (
                (None, f"--seq-len {needed} --samples", "or --seq-len 1024: 1 of 200 documents"),
                ({"model_type": "qwen3", "max_position_embeddings": 1 << 20}, f"--seq-len {needed} --samples", "or --seq-len 1024: "),
                ({"model_type": "qwen3", "max_position_embeddings": 2000}, f"--seq-len {needed} --rope-scaling yarn,factor={-(-needed // 2000)} ", "or --seq-len 2000: "),
                ({"model_type": "qwen3", "max_position_embeddings": needed - 900}, f"--seq-len {needed} --rope-scaling yarn,factor=2 ", f"or --seq-len {needed - 900}: "),
                ({"model_type": "llama", "max_position_embeddings": 4000, "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 1000}},
                 f"--seq-len 9000 --rope-scaling yarn,factor=9 ", "or --seq-len 4000: "),
                ({"model_type": "gpt2", "n_positions": 1024}, "--seq-len 1024 --samples", "gpt2 has 1,024 positions, which cannot be scaled: 1 of 200 documents")):
            model = samples.tokenizer_folder(folder, encoder("chatml").tokenizer, *samples.TEMPLATES["chatml"])
            if config:
                samples.write_text(folder + "/config.json", json.dumps(config))
            said = self.prepare("out", data, "--force", tokenizer=model).stdout
            self.assertRegex(said, f"next: .* {next_words}.* --save-every 3 --out run\n{more}")
            cut = int(said.rpartition("or --seq-len ")[2].split(":")[0]) if "or --seq" in said else 1024
            lost = sum(max(0, length - cut - 1) for length in lengths)
            self.assertIn(f"would cut {lost:,} of {sum(lengths):,} tokens", said)
