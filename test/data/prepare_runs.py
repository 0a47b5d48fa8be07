"""Whole runs of data/prepare.py for test_prepare.py: every byte of shards, refusals, crashes, workers, memory, Parquet, damage."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import glob
import gzip
import io
import itertools
import json
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import unittest
import zlib
from unittest import mock

import numpy as np

import encode
import inputs
import prepare
import prepare_samples as samples
import run
import shards
import tokenizer_file
import workers

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

WORK = tempfile.TemporaryDirectory()
FOLDERS = samples.tokenizer_folders(WORK.name)
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
LEFT_OUT = {"messages": [{"role": "user", "content": "Hi"}]}
KINDS = {  # of each: its number in the header, samples, and what is said of these
    "documents": (0, [{"text": "hello world", "prompt": None, "completion": None, "messages": None},
                      {"prompt": "2 + 2 =", "completion": " 4"}, *samples.conversations(80, most=5)], ("MODEL --data ", "whole; version 1, documents, ")),
    "pairs": (1, [{"prompt": f"{i} + 2 =", "chosen": " 4", "rejected": " 5 and six"} for i in range(40)],
              ("MODEL --objective dpo", "preference pairs", " pairs\n")),
    "groups": (2, [{"prompt": "2+2", "completions": [" 4", " 5", " 6", " 7"][:2 + i % 3], "rewards": [i / 2, -1.0, 0.0, 3.0][:2 + i % 3]}
                   for i in range(40)], ("MODEL --objective grpo", "groups of 2 to 4 documents, rewards -1 to ")),
    "unpaired": (5, [{"prompt": f"{i} + 2 =", "completion": f" {i + 2}" if i % 3 else " many", "label": bool(i % 3)} for i in range(60)],
                 ("MODEL --objective kto", "labelled answers", " desirable\n")),
    "prompts": (3, [{"prompt": f"{i} + 2 =", "answer": f" {i + 2}" if i % 2 else None, "level": [str(i), "\u00e9\n"] if i > 60 else None}
                    for i in range(90)],
                ("--rollout --reward-command", "prompts in ")),
    "advantages": (0, [samples.rollout(i) for i in range(100)], ("MODEL --objective ppo", "documents with advantages", "advantages -"))}


@functools.cache
def encoder(name, **options):
    return encode.Encoder(encode.Options(tokenizer=FOLDERS[name], **options))


def contents(folder):
    """{name: bytes} of a folder's files."""
    found = {}
    for name in sorted(filter(lambda name: not os.path.isdir(os.path.join(folder, name)), os.listdir(folder))):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def in_child(function):
    """(exit status, peak kilobytes) of a function in a process of its own; workers that it leaves behind must end, too."""
    end, held = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgrp()
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(held)
    _, status, usage = os.wait4(pid, 0)
    if not select.select([end], [], [], 20)[0]:  # readable when no process holds the other end any more
        os.killpg(pid, signal.SIGKILL)
        raise AssertionError("its workers live on")
    os.close(end)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss


class WithCommand(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.work = work.name

    def path(self, name):
        return os.path.join(self.work, name)

    def write(self, name, lines):
        return samples.write_lines(self.path(name), lines)

    def run_main(self, *arguments):
        """prepare.py's main in this process, with one worker unless told otherwise: returncode, stdout and stderr."""
        out, error = io.StringIO(), io.StringIO()
        workers = [] if arguments[:1] in ((), ("inspect",)) or "--workers" in arguments else ["--workers", "1"]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = prepare.main([*arguments, *workers])
            except SystemExit as ended:
                code = ended.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())

    def command(self, out, *arguments, tokenizer="chatml"):
        return ["--tokenizer", FOLDERS.get(tokenizer, tokenizer), *(["--out", self.path(out)] if out else []), *arguments]

    def prepare(self, out, *arguments, **more):
        """The finished run; it must have ended well."""
        done = self.run_main(*self.command(out, *arguments, **more))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def refused(self, code, pattern, arguments):
        """Exit code, one line of error that matches, nothing on stdout."""
        done = self.run_main(*arguments)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        self.assertEqual((done.returncode, len(lines), done.stdout), (code, 1, ""), (pattern, done.stderr))
        self.assertRegex(lines[0], "^prepare.py: .*" + pattern)
        for line in done.stderr.replace(self.work, "").splitlines():
            self.assertLessEqual(len(line), 200, line)
        return done

    def run_of(self, out, *data, progress=lambda *_: None, **more):
        """A silent run, not begun."""
        settings = {"workers": 1, "val_fraction": 0.2, "seed": 0, "shard_tokens": 2500, "skip_bad": -1, "force": False, "overwrite": False, "separator": None, **more}
        options = encode.Options(tokenizer=FOLDERS["chatml"])
        return run.Run(argparse.Namespace(paths=data, out=self.path(out), options=options, code_tests=None, **settings), progress, lambda _: None)

    def assert_same_files(self, a, b):
        a, b = contents(self.path(a)), contents(self.path(b))
        self.assertEqual((a.keys(), [name for name in a if a[name] != b[name]]), (b.keys(), []))


def shard_bytes(of, kind, samples, columns=(), talks=False):
    """A shard of these samples, each a list of documents, with the columns of prompts, as data/README.md has it."""
    documents = [(group, document) for group, sample in enumerate(samples) for document in sample]
    width, values_follow = 2 if of.vocabulary <= 65536 else 4, documents[0][1].values is not None
    table, sections, counted = b"", [b"", b"", b""], 0
    for group, d in documents:
        own = [struct.pack(f"<{len(d.ids)}{'H' if width == 2 else 'I'}", *d.ids), bytes(d.counts.tolist()),
               struct.pack(f"<{len(d.ids)}f", *d.values) if values_follow else b""]
        table += struct.pack("<QQQQQfI", len(sections[1]), len(d.ids), sum(own[1]), group, d.prompt, d.reward, zlib.crc32(b"".join(own)))
        sections, counted = [section + more for section, more in zip(sections, own)], counted + sum(own[1])
    padded, at, whole = lambda raw: raw + bytes(-len(raw) % 64), [], bytes(256) + table
    for section in sections[:2 + values_follow]:
        at.append(len(padded(whole)))
        whole = padded(whole) + section
    texts, index, text = [json.dumps(each, ensure_ascii=False).encode() for each in columns if any(columns)], b"", b""
    for each in texts:
        index, text = index + struct.pack("<QII", len(text), len(each), zlib.crc32(each)), text + each
    template = of.template.text.encode() if talks else b""
    more = struct.pack("<QQI4xII32x", texts and len(padded(whole)) or 0, max(map(len, texts), default=0), zlib.crc32(index), zlib.crc32(template), len(template))
    whole = padded(whole) + index + text if texts else whole
    longest = max(len(d.ids) for _, d in documents)
    header = struct.pack("<8s2I6Q2I6QI", b"SBPSHARD", 1, 0x01020304, 256, len(whole), len(documents), len(sections[1]), counted, longest,
                         width, kind, of.vocabulary, of.fingerprint, 256, *at, *[0] * (3 - len(at)), zlib.crc32(table))
    name = of.name.encode().ljust(64, b"\0") + more
    return header + struct.pack("<I", zlib.crc32(header + bytes(4) + name)) + name + whole[256:]


def expected_shards(of, kind, rows, most):
    """The bytes of each shard of up to `most` tokens: a sample that does not fit begins another."""
    shards, columns, size = [[]], [[]], 0
    for row in rows:
        _, documents = of.encode(row)
        tokens = sum(len(document.ids) for document in documents)
        if shards[-1] and size + tokens > most:
            shards, columns, size = [*shards, []], [*columns, []], 0
        shards[-1].append(documents)
        columns[-1].append({key: value for key, value in row.items() if kind == 3 and key != "prompt" and value is not None})
        size += tokens
    talks = any(isinstance(row.get("messages", row.get("prompt")), list) for row in rows)
    return [shard_bytes(of, kind, *both, talks) for both in zip(shards, columns)]


class Runs(WithCommand):
    def test_every_byte_of_shards(self):
        """Samples of each kind, those for training and those for validation, in several shards each."""
        for name, (kind, rows, words) in KINDS.items():
            of, validation = encoder("chatml"), run.in_validation(np.arange(len(rows)), 3, 0.2)
            data, options = self.write(name + ".jsonl", rows), ["--val-fraction", "0.2", "--seed", "3", "--shard-tokens", "150"]
            said = self.prepare(name, data, *options).stdout
            made = contents(self.path(name))
            paths = [self.path(f"{name}/{each}") for each in made if each.endswith(".bin")]
            self.assertTrue("train-00002.bin" in made and len(made) == len(paths) + 2 + ("chat_template.jinja" in made))
            self.assertEqual(made.get("chat_template.jinja", of.template.content), of.template.content)
            inspected = self.run_main("inspect", *paths)
            self.assertEqual(inspected.returncode, 0, inspected.stderr)
            for each in words:
                self.assertIn(each, said + inspected.stdout)
            for part, wanted in (("train", False), ("val", True)):
                expected = expected_shards(of, kind, [row for row, value in zip(rows, validation) if value == wanted], 150)
                self.assertEqual({f"{part}-{i:05d}.bin": shard for i, shard in enumerate(expected)},
                                 {each: content for each, content in made.items() if each.startswith(part)})
        choices = [run.in_validation(np.arange(4000), seed, 0.25) for seed in (0, 1)]
        self.assertTrue(0.2 < choices[0].mean() < 0.3 and (choices[0] != choices[1]).any())

    def test_pairs_become_labelled_answers(self):
        said = self.prepare("out", self.write("pairs.jsonl", KINDS["pairs"][1]), "--format", "unpaired").stdout
        self.assertIn("format: standard unpaired preference of pairs with explicit prompt; columns: chosen, prompt, rejected\n", said)
        shard = shards.Shard(self.path("out/train-00000.bin"))
        shard.verify()
        self.assertEqual((shard.kind, shard.table["reward"].tolist()), (5, [1.0, 0.0] * 40))

    def test_large_vocabularies_have_ids_of_four_bytes(self):
        self.assertEqual(shards.id_bytes_of(65536), 2)
        tokenizer = samples.byte_level()
        more = [f"<extra{i}>" for i in range(65537 - tokenizer.get_vocab_size())]
        tokenizer.add_tokens(more)
        folder = samples.tokenizer_folder(self.path("large"), tokenizer, None, None, "<|im_end|>")
        rows = [{"text": "hello " + token} for token in (more[3], more[-1])]
        self.prepare("out", self.write("a.jsonl", rows), tokenizer=folder)
        expected = expected_shards(encode.Encoder(encode.Options(tokenizer=folder)), 0, rows, 1000)
        self.assertEqual(expected, [contents(self.path("out"))["train-00000.bin"]])

    def test_bad_samples_refuse_the_run(self):
        self.prepare("good", self.write("good.jsonl", [GOOD] * 3))
        lines = ["\ufeff" + json.dumps(GOOD), "", "{", *["["] * 29, KINDS["pairs"][1][0], *[{"text": ""}] * 12, GOOD, GOOD]
        data, reasons = self.write("a.jsonl", lines), ["malformed line"] * 30 + ["another kind"] + ["empty sample"] * 12
        done = self.refused(1, "43 bad samples, listed in .*rejected.jsonl; .*--skip-bad", self.command("out", data))
        self.assertEqual([done.stderr.count(f": {reason}: ") for reason in dict.fromkeys(reasons)], [10, 1, 10])
        self.assertEqual(glob.glob(self.path("out/*.bin")), [])
        listed = [json.loads(line) for line in contents(self.path("out"))["rejected.jsonl"].splitlines()]
        self.assertEqual([(line["file"], line["line"], line["reason"]) for line in listed],
                         [(data, 3 + i, reason) for i, reason in enumerate(reasons)])
        for most in ("0", "42"):
            self.refused(1, "43 bad samples", self.command("out", data, "--skip-bad", most))
        for skip in (["--skip-bad", "43", data], ["--skip-bad", data]):
            said = self.prepare("out", *skip).stdout
            self.assertIn("left out: 30 of 'malformed line'", said)
            self.assertIn("\nformat: conversational language modelling; columns: messages\n", said)  # nothing of the pair
            self.assertEqual(contents(self.path("out"))["train-00000.bin"], contents(self.path("good"))["train-00000.bin"])
        text, tokens, prompt = {"text": "hello world"}, samples.rollout(5), {"prompt": "a"}
        for i, rows in enumerate(([tokens, text], [text, tokens], [prompt, {**prompt, "completion": " b"}])):
            done = self.refused(1, "1 bad sample,", self.command(f"mixed{i}", self.write(f"{i}.jsonl", rows)))
            self.assertIn(":2: another kind: ", done.stderr)

    def test_what_is_said(self):
        said = self.prepare("a b[1]", self.write("hint.jsonl", [GOOD])).stdout  # in the next command it is no pattern
        self.assertEqual(glob.glob(re.search("--data '(.*?)'", said)[1]), [self.path("a b[1]/train-00000.bin")])
        many = [{"messages": [*GOOD["messages"][:1], {"role": "assistant", "content": ""}]}, {"text": "hello world", "score": 3}, *[GOOD] * 168]
        for rows, words in ((many, "format: conversational language modelling \\(169\\), standard language modelling \\(1\\); columns: messages \\(169\\), "
                                   "text \\(1\\); left out: score \\(1\\)\n'score' of 1 samples is not used\nmasked: .*\n1 documents have an empty turn of the assistant, .*\nan epoch is 11 optimizer steps of 16 documents\nnext: .* --samples 16 --lr 1e-5 "),
                            ([GOOD] * 57, "an epoch is 12 optimizer steps of 5 documents\n.* --samples 5 "),
                            ([GOOD] * 4, "an epoch is 4 optimizer steps of 1 document, which is few: .*--epochs 3\n.* --samples 1 "),
                            (KINDS["pairs"][1], "format: standard preference with explicit prompt; columns: chosen, prompt, rejected\nmasked: .*\n.*10 optimizer "
                                                 "steps of 4 pairs\n.*--objective dpo .* --samples 4 --lr 5e-7"),
                            (KINDS["prompts"][1], "format: standard prompt-only; columns: answer \\(45\\), prompt; to reward commands: answer "
                                                   "\\(45\\), level \\(29\\)\n.*12 optimizer steps of 8 prompts\n.*--objective grpo --rollout .* --batch 8 --lr 1e-6")):
            said = self.prepare("hint", self.write("hint.jsonl", rows), "--force").stdout
            self.assertRegex(said, words)
            self.assertTrue(all(len(line.replace(self.work, "")) <= 200 for line in said.splitlines()))
        short, long = self.write("a.jsonl", [GOOD, LEFT_OUT, GOOD]), self.write("long.jsonl", [GOOD, {"text": "hello " * 100}])
        for data, words, *more in ((short, "train: 2 samples[^$]*left out: 1 of 'no target that counts'"),
                                   (long, "left out: 1 of 'longer than --max-tokens'", "--max-tokens", "50", "--long", "skip"),
                                   (long, "longest document 50 tokens[^$]*1 documents were cut", "--max-tokens", "50", "--long", "truncate"),
                                   (long, "1 documents are longer than --max-tokens 50", "--max-tokens", "50")):
            self.assertRegex(self.prepare("out", data, "--force", *more).stdout, words)
        ask, row = GOOD["messages"][0], lambda *turns: {"messages": [GOOD["messages"][0], *turns]}
        cut, bad = row({"role": "assistant", "content": "<think>\nhm"}), row({"role": "assistant", "content": "no", "weight": 0.5})
        masked = row({"role": "assistant", "content": "no", "train": False}, {**ask, "name": "Ann"}, {"role": "assistant", "content": "yes"})
        turns = self.write("turns.jsonl", [GOOD, cut, masked, masked])
        for more, words in (((), "columns: messages; left out: messages...name .2.\n[^$]*1 sample: reasoning is cut off[^$]*2 samples: turns whose train is 0"),
                            (("--reasoning", "drop"), "train: 3 samples[^$]*left out: 1 of 'reasoning that is cut off'")):
            self.assertRegex(self.prepare("turns", turns, "--force", *more).stdout, words)
        self.refused(1, "other --reasoning", self.command("turns", turns))
        developer = {"messages": [{"role": "developer", "content": "be nice"}, *GOOD["messages"]]}
        developers = self.write("developer.jsonl", [GOOD, developer, bad])
        refused = self.refused(1, "2 bad samples", self.command("developer", developers, tokenizer="hybrid")).stderr
        for line in ("developer.jsonl:2: template failure: the template leaves out the content of message 1 (developer)", "jsonl:3: wrong type: messages[1] has weight 0.5"):
            self.assertIn(line, refused)
        data = self.write("show.jsonl", [GOOD, "{", {"prompt": "a", "completion": " \x1b[2Jb"}, GOOD])
        shown = self.prepare(None, "--show", "3", data).stdout
        _, (document,) = encoder("chatml").encode(GOOD)
        for words in ("<|im_start|>assistant\n\u00abHello<|im_end|>\n\u00bb", f"--- {data}:2: left out: malformed line",
                      f"--- {data}:1: {len(document.ids)} tokens, {document.counts.sum()} count\n", "\u00ab \\x1b[2Jb<|im_end|>\u00bb"):
            self.assertIn(words, shown)
        self.assertNotRegex(shown, "\x1b|:4:")
        self.assertRegex(shown, "^format: conversational language modelling; columns: messages\n---[^$]*\nformat: standard prompt-completion; columns: ")
        for name, more, rest in (("chatml", ["--format", "preference"], "; left out: note, tools"), ("hybrid", [], ", tools; left out: note")):  # which shows tools
            row = {"chosen": [*GOOD["messages"]], "rejected": [GOOD["messages"][0], {"role": "assistant", "content": "No"}], "note": 1, "tools": [{}]}
            shown = self.prepare(None, "--show", "1", self.write("tools.jsonl", [row]), *more, tokenizer=name).stdout
            self.assertIn(f"format: conversational preference with implicit prompt; columns: chosen, rejected{rest}\n", shown)
        self.assertIn("prompt alone", self.prepare(None, "--show", "1", self.write("prompt.jsonl", [{"prompt": "a"}])).stdout)

    def test_text_and_markdown(self):
        text = "\ufeff\n# Hello\nworld\n\nthe weather\n \n\n---\nis nice\n"
        for name in ("a.txt", "b.md"):
            samples.write_text(self.path(name), text)
        with gzip.open(self.path("c.md.gz"), "wb") as zipped:
            zipped.write(text.encode())
        texts = lambda *texts: [{"text": each} for each in texts]
        for separator, rows in ((None, texts(text[2:-1])), ("", texts("# Hello\nworld", "the weather", "---\nis nice")),
                                ("---", texts("# Hello\nworld\n\nthe weather\n \n", "is nice"))):
            rows = [{"text": row["text"].strip("\n")} for row in rows]
            for name in ("a.txt", "b.md", "c.md.gz"):
                self.prepare("out", self.path(name), "--force", *([] if separator is None else ["--separator", separator]))
                self.assertEqual([contents(self.path("out"))["train-00000.bin"]], expected_shards(encoder("chatml"), 0, rows, 10**6), name)
        with open(self.path("bad.txt"), "wb") as file:
            file.write(b"good\n\n\xff\n")
        done = self.refused(1, "1 bad sample", self.command("x", self.path("bad.txt"), "--separator", ""))
        self.assertIn("bad.txt:3: malformed line: not UTF-8", done.stderr)
        for name in ("a.jsonl.7z", "a.parquet.gz", "a.html"):
            self.refused(1, f"{name}: is of an unknown kind .*; --format text reads any text", self.command("y", samples.write_text(self.path(name), "")))

    def test_other_inputs_and_options(self):
        data = self.write("a.jsonl", [GOOD, "{"])
        self.refused(1, "1 bad sample", self.command("out", data))
        self.write("a.jsonl", [GOOD])  # input that was refused may be mended
        self.assertIn("1 samples", self.prepare("out", data).stdout)
        before = contents(self.path("out"))
        self.assertNotIn("rejected.jsonl", before)
        self.assertIn("is complete", self.prepare("out", data).stderr)
        self.refused(1, "begun with other --train-on; --overwrite", self.command("out", data, "--train-on", "all"))
        self.write("a.jsonl", [GOOD, GOOD])
        self.refused(1, "begun with other inputs; --overwrite", self.command("out", data))
        self.assertEqual(contents(self.path("out")), before)
        samples.write_text(self.path("out/notes.txt"), "a file of the user's")
        self.assertIn("2 samples", self.prepare("out", data, "--overwrite").stdout)
        self.assertIn("2 samples", self.prepare("out", data, "--force").stdout)
        self.assertEqual(sorted(os.listdir(self.path("out"))), ["chat_template.jinja", "notes.txt", "prepare.json", "tokenizer.tok", "train-00000.bin"])
        os.remove(self.path("out/prepare.json"))
        self.refused(1, "holds train-00000.bin but no prepare.json", self.command("out", data))
        samples.write_text(self.path("out/prepare.json"), "{}")
        self.refused(1, "prepare.json: cannot be parsed", self.command("out", data))

    def test_names_of_the_hub(self):
        repository = self.path("hub/models--some--Model")
        os.makedirs(repository + "/refs")
        samples.write_text(repository + "/refs/main", "abc123\n")
        shutil.copytree(FOLDERS["chatml"], repository + "/snapshots/abc123")
        samples.write_text(repository + "/snapshots/abc123/config.json", "{}")
        with mock.patch.dict(os.environ, HF_HUB_CACHE=self.path("hub")):
            done = self.prepare("out", self.write("a.jsonl", [GOOD]), tokenizer="some/Model")
        self.assertIn("--model some/Model ", done.stdout)
        self.assertEqual(shards.Shard(self.path("out/train-00000.bin")).name, "Model")

    def test_refusals(self):
        data, damaged = self.write("a.jsonl", [GOOD]), gzip.compress(b'{"text": "hello world"}\n' * 1000)[:-20]
        for name, content in (("llm.c.bin", struct.pack("<3i", 20240520, 1, 5) + bytes(1012)), ("cut.jsonl.gz", damaged), ("file", b""),
                              ("bad.jinja", b"{% if %}"), ("none.jsonl", b""), ("bad.parquet", b"PAR1 this is not one PAR1")):
            with open(self.path(name), "wb") as file:
                file.write(content)
        os.mkfifo(self.path("pipe"))
        self.prepare("long", data)
        with open(self.path("long/train-00000.bin"), "ab") as file:
            file.write(b"\0")
        left, command = self.write("left.jsonl", [LEFT_OUT]), self.command
        for words, arguments in (
                ("no FILE", command("out")), ("no --out", command(None, data)), ("no --tokenizer", ["--out", "x", data]),
                ("unrecognized arguments: --colour", command("out", data, "--colour")), ("named twice", command("out", data, data)),
                ("--max-tokens", command("out", data, "--long", "skip")), ("'0' is not", command("out", data, "--workers", "0")),
                ("'1' is not a fraction", command("out", data, "--val-fraction", "1")), ("names of shards", ["inspect"]),
                ("invalid choice: 'dpo'", command("out", data, "--format", "dpo"))):
            self.refused(2, words, arguments)
        self.assertFalse(os.path.exists(self.path("out")))
        for words, arguments in (
                ("nothing.jsonl: cannot be read: No such file", command("out", self.path("nothing.jsonl"))),
                ("pipe: is not a regular file", command("out", self.path("pipe"))), ("file", command("file", data)),
                ("nothing: No such file", command("out", data, "--chat-template", self.path("nothing"))),
                ("not valid Jinja", command("out", data, "--chat-template", self.path("bad.jinja"))),
                ("unknown role 'robot'", command("out", data, "--train-on", "robot")),
                ("cut.jsonl.gz:?[0-9]*: cannot be read", command("out", self.path("cut.jsonl.gz"))),
                ("no sample for training in 1 file", command("out", self.path("none.jsonl"), "--force")),
                ("no sample for training", command("out", left, "--force")),
                ("nothing: does not exist", command("out", data, tokenizer=self.path("nothing"))),
                ("cache; type: hf download a/b", ["--tokenizer", "a/b", "--out", "x", data]),
                ("is one of llm.c's", ["inspect", self.path("llm.c.bin")]), ("No such file", ["inspect", self.path("nothing.bin")]),
                ("has .* bytes, its header says .*; make it again", ["inspect", self.path("long/train-00000.bin")])):
            self.refused(1, words, arguments)
        self.assertEqual(glob.glob(self.path("out/*.bin")), [])

    def test_a_tokenizer_file_that_cannot_be_written(self):
        for options, words in (([], "nowhere/x.tok.tmp: No such file or directory"), (["-S"], "No module named .*; pip install tokenizers ")):
            command = [sys.executable, *options, tokenizer_file.__file__, "--tokenizer", FOLDERS["chatml"], "--out", self.path("nowhere/x.tok")]
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n"), done.stdout), (1, 1, ""), done.stderr)
            self.assertRegex(done.stderr, f"^tokenizer_file.py: .*{words}")

    def test_what_ends_a_run(self):
        """Wrong masks, another run in its folder, inputs that change, workers that die."""
        data, many = self.write("a.jsonl", [GOOD]), self.write("many.jsonl", samples.conversations(4000, most=4))
        for count in "12":
            command = self.command("wrong", many, "--workers", count, tokenizer="wrong")
            self.refused(1, "many.jsonl:1: the loss mask does not lie where it should", command)
            self.assertEqual(os.listdir(self.path("wrong")), [])
        holder = run.Folder(self.path("out"))
        self.refused(1, "another run writes", self.command("out", data))
        os.close(holder.lock)
        with self.assertRaisesRegex(run.Failure, "changed while it was read"):
            self.run_of("out", data, progress=lambda *_: samples.write_text(data, "{}\n")).run()
        self.assertEqual(glob.glob(self.path("out/*.bin")), [])
        kill = lambda *_: [process.kill() for process in multiprocessing.active_children()]
        with mock.patch.object(workers, "encoder", None), self.assertRaisesRegex(workers.WorkerFailure, "ended with status -9"):
            self.run_of("killed", many, progress=kill, workers=2).run()

    def test_a_full_disk(self):
        data = self.write("a.jsonl", samples.conversations(600))
        self.prepare("whole", data)

        def fill():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            self.refused(1, "File too large; .*make room and give the same command$", self.command("full", data))
        self.assertEqual(in_child(fill)[0], 0)
        self.assertEqual(glob.glob(self.path("full/*.bin")), [])
        self.prepare("full", data)
        self.assert_same_files("full", "whole")

    def test_kill_9_at_every_step(self):
        """At each fsync, rename and removal of a small run with advantages, inputs of each kind and two workers: before it is done, and
        after."""
        rows, kills = [samples.rollout(i) for i in range(80)], 0
        data = [self.write("a.jsonl", [*rows[:20], "", "{", *rows[20:30]]), self.path("b.jsonl.gz")]
        with gzip.open(data[1], "wb") as zipped:
            zipped.write(contents(self.work)["a.jsonl"])
        if pyarrow:
            data.append(self.path("c.parquet"))
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[30:]), data[2], row_group_size=20)
        with mock.patch.object(inputs, "BATCH_ROWS", 8), mock.patch.object(run, "STATE_SECONDS", 0):
            run_to = lambda out, **more: self.run_of(out, *data, shard_tokens=150, **more).run()
            run_to("whole")
            self.assertGreater(len(glob.glob(self.path("whole/*.bin"))), 5)
            for (name, stride), after in itertools.product((("fsync", 29), ("replace", 5), ("remove", 29)), (False, True)):
                for step in itertools.count(1, stride):
                    out = f"{name}-{after}-{step}"
                    status, _ = in_child(lambda: (self.die_at(name, step, after), run_to(out, workers=2)))
                    if status == 0:
                        break
                    self.assertEqual(status, 9)
                    if glob.glob(self.path(out + "/*.bin")):  # only when all of them are whole
                        self.assertIn(json.loads(contents(self.path(out))["prepare.json"])["status"], ("publishing", "complete"))
                    run_to(out)
                    self.assert_same_files(out, "whole")
                    kills += 1
        self.assertGreater(kills, 20)

    def test_overwrite_keeps_the_old_output_until_the_new_one_is_complete(self):
        """Killed before or after any removal and renaming, it leaves one of them, and the next run makes what an undisturbed one makes."""
        rows = [*samples.conversations(8)]
        old, data = self.write("old.jsonl", rows[:5]), self.write("new.jsonl", rows[5:])
        run_to = lambda out, data, **more: self.run_of(out, data, val_fraction=0, **more).run()
        run_to("old", old, shard_tokens=100)  # more shards than the new one
        run_to("new", data)
        before, after = (contents(self.path(name)) for name in ("old", "new"))
        ours, new, states = self.path("out"), self.path("out/prepare.new"), set()
        held = lambda whole, *files: all(any(file.get(name) == content for file in files) for name, content in whole.items())
        for name, late in itertools.product(("fsync", "replace", "remove", "rmdir"), (False, True)):
            for step in itertools.count(1):
                shutil.copytree(self.path("old"), ours)
                samples.write_text(self.path("out/notes.txt"), "a file of the user's")
                making = name == "fsync"  # killed while it makes the new one, else while it moves it
                if not making:
                    shutil.copytree(self.path("new"), new)
                act = (lambda: run_to("out", data, overwrite=True)) if making else lambda: run.Folder(ours).replace()
                status, _ = in_child(lambda: (self.die_at(name, step + 2 * making, late), act()))
                files = [contents(ours), contents(new) if os.path.exists(new) else {}]
                states.add((held(before, files[0]), held(after, *files)))
                self.assertNotIn((False, False), states, (name, late, step))
                run_to("out", data, overwrite=making)
                self.assertEqual(contents(ours), {**after, "notes.txt": b"a file of the user's"}, (name, late, step))
                shutil.rmtree(ours)
                if status == 0 or making:
                    break
                self.assertEqual(status, 9)
        self.assertEqual(states, {(True, False), (True, True), (False, True)})

    @staticmethod
    def die_at(name, step, after):
        """This process ends at that call of os.NAME, as if it were killed."""
        calls, function = itertools.count(1), getattr(os, name)

        def dying(*arguments):
            last = next(calls) == step
            if not last or after:
                function(*arguments)
            if last:
                os._exit(9)
        setattr(os, name, dying)

    def test_workers_do_not_change_a_byte(self):
        data = self.write("a.jsonl", [*samples.conversations(500), "{", {"text": "hello " * 40000}, *samples.conversations(200, 5)])
        for count in ("1", "3"):
            self.prepare(count, data, "--skip-bad", "--val-fraction", "0.1", "--shard-tokens", "40000", "--workers", count)
        self.assertGreater(len(contents(self.path("1"))), 4)
        self.assert_same_files("1", "3")

    def test_memory_does_not_grow_with_the_input(self):
        block = [{"ids": [(i + k) % 300 for k in range(300)], "train": [1] * 300, "advantages": [0.5] * 300, "note": "x" * 60000}
                 for i in range(100)]
        peaks = []
        for times in (1, 20):
            data = self.write(f"{times}.jsonl", block * times)
            status, peak = in_child(self.run_of(str(times), data, workers=2).run)
            self.assertEqual(status, 0)
            peaks.append(peak)
        self.assertTrue(peaks[1] < 450 << 10 and peaks[1] - peaks[0] < 64 << 10, peaks)

    @unittest.skipUnless(pyarrow, "Parquet: pyarrow is not installed")
    def test_parquet_gives_what_jsonl_gives(self):
        for name, (_, rows, _) in KINDS.items():
            data, table = self.write(name + ".jsonl", rows), self.path(name + ".parquet")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=30)
            for out, path in (("1", data), ("2", table)):
                self.prepare(out, path, "--force")
            self.assertEqual(*(contents(self.path(out))["train-00000.bin"] for out in "12"))
        rows = [{"prompt": None, "text": "a b"}, {"prompt": datetime.datetime(2026, 1, 1)}]
        schema = pyarrow.schema([("prompt", pyarrow.timestamp("us")), ("text", "string")])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), self.path("time.parquet"))
        done = self.refused(1, "1 bad sample", self.command("time", self.path("time.parquet")))
        self.assertIn("time.parquet:2: wrong type: prompt is a datetime, not a text; cast it", done.stderr)
        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), self.path("other.parquet"))
        self.refused(1, "none of its columns \\(body\\)", self.command("other", self.path("other.parquet")))
        samples.write_text(self.path("bad.parquet"), "PAR1 this is not one PAR1")
        self.refused(1, "bad.parquet:1: cannot be read", self.command("bad", self.path("bad.parquet")))


class Damage(WithCommand):
    def damaged(self, words, content):
        with open(self.path("shard"), "wb") as file:
            file.write(content)
        with self.assertRaisesRegex(shards.ShardError, words, msg=words):
            shards.Shard(self.path("shard")).verify()

    def test_damage_is_found(self):
        """In any byte, and in the length."""
        for kind, rows, _ in KINDS.values():
            (raw,) = expected_shards(encoder("chatml"), kind, rows[56:65] if kind == 3 else rows[:9], 10**6)
            ids, counts, values, columns = *struct.unpack_from("<3Q", raw, 96), *struct.unpack_from("<Q", raw, 192)
            last = columns or values or counts
            for at in (*range(0, 256, 5), *range(256, ids, 17), *range(ids, last, 101), *range(last - 3, len(raw), 11)):
                self.damaged("", raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:])
            for length in (0, 7, 100, 255, 256, 300, ids, len(raw) - 1):
                self.damaged("", raw[:length])
            self.damaged("has .* bytes, its header says", raw + b"\0")

    def test_faults_with_right_checksums(self):
        """As a writer with a fault would make them."""
        of = encoder("chatml")
        a, b = of.encode(KINDS["groups"][1][0])[1]
        wrong = lambda **more: [[a, dataclasses.replace(b, **more)]]
        for words, kind, faulty in (
                ("group 0 has only one completion", 2, [[a], [a, b]]), ("not numbered in order", 2, [[a, b], [], [a, b]]),
                ("not numbered in order", 1, [[a, b, a]]), ("not numbered in order", 0, [[a, b]]), ("a prompt of .*impossible", 3, [[a], [b]]),
                ("rewards that are not finite", 2, wrong(reward=float("nan"))), ("a prompt of .*impossible", 2, wrong(prompt=99)),
                ("invalid counts", 2, wrong(counts=b.counts + b.counts)), ("invalid counts", 2, wrong(counts=1 | b.counts)),
                ("has id 400, the vocabulary is", 2, wrong(ids=0 * b.ids + 400))):
            self.damaged(words, shard_bytes(of, kind, faulty))
