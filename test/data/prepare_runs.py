"""Whole runs of data/prepare.py for test_prepare.py: the bytes of the format, bad input, kill -9, workers, memory, Parquet, inspect."""

import contextlib
import glob
import gzip
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib
from unittest import mock

import encode
import inputs
import prepare
import prepare_samples as samples
import run
import workers

PREPARE = os.path.join(os.path.abspath(__file__).rsplit("/test/", 1)[0], "data", "prepare.py")
try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None


def contents(folder):
    """{name: bytes} of a folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def read_shard(raw):
    """(header fields, [(begin, tokens, counted, group, prompt, reward, crc)], ids, counts), by the offsets of data/README.md."""
    at = lambda offset, form: struct.unpack_from("<" + form, raw, offset)
    fields = {"magic": raw[:8], "version": at(8, "I")[0], "order": at(12, "I")[0], "header": at(16, "Q")[0], "file": at(24, "Q")[0],
              "documents": at(32, "Q")[0], "tokens": at(40, "Q")[0], "counted": at(48, "Q")[0], "longest": at(56, "Q")[0],
              "id_bytes": at(64, "I")[0], "kind": at(68, "I")[0], "vocabulary": at(72, "Q")[0], "tokenizer": at(80, "Q")[0],
              "table": at(88, "Q")[0], "ids": at(96, "Q")[0], "counts": at(104, "Q")[0], "values": at(112, "Q")[0],
              "table_crc": at(120, "I")[0], "header_crc": at(124, "I")[0], "name": raw[128:192].split(b"\0")[0].decode()}
    table = [at(fields["table"] + 48 * i, "QQQQQfI") for i in range(fields["documents"])]
    ids = at(fields["ids"], f"{fields['tokens']}{'H' if fields['id_bytes'] == 2 else 'I'}")
    return fields, table, ids, raw[fields["counts"]:fields["counts"] + fields["tokens"]]


class WithCommand(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        work = tempfile.TemporaryDirectory()
        cls.addClassCleanup(work.cleanup)
        cls.work = work.name
        cls.tokenizer = samples.tokenizer_folder(os.path.join(cls.work, "tokenizer"), samples.byte_level(), samples.CHATML, None, "<|im_end|>")

    def path(self, name):
        return os.path.join(self.work, f"{self.id().rsplit('.', 1)[-1]}-{name}")

    def command(self, out, *arguments, tokenizer=None):
        return ["--tokenizer", tokenizer or self.tokenizer, *(["--out", out] if out else []), *arguments]

    def program(self, *arguments):
        """For subprocess: where a process of its own matters, which takes two seconds to start."""
        return [sys.executable, PREPARE, *arguments]

    def run_main(self, arguments):
        """prepare.py's main in this process, with one worker unless told otherwise: returncode, stdout and stderr."""
        out, error = io.StringIO(), io.StringIO()
        if arguments[:1] not in ([], ["inspect"]) and "--workers" not in arguments:
            arguments = [*arguments, "--workers", "1"]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = prepare.main(arguments)
            except SystemExit as ended:
                code = ended.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())

    def prepare(self, out, *arguments, **more):
        """The finished run; it must have ended well."""
        done = self.run_main(self.command(out, *arguments, **more))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def refused(self, code, pattern, arguments):
        """Exit code, one line of error that matches, nothing on stdout."""
        done = self.run_main(arguments)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        self.assertEqual((done.returncode, len(lines), done.stdout), (code, 1, ""), done.stderr)
        self.assertRegex(lines[0], "^prepare.py: .*" + pattern)
        return done

    def inspect(self, *paths):
        return ["inspect", *paths]

    def write(self, name, lines):
        return samples.write_lines(self.path(name), lines)


class Format(WithCommand):
    def test_every_byte_of_a_shard(self):
        data = self.write("a.jsonl", [{"text": "hello world"}, {"prompt": "2 + 2 =", "completion": " 4"}, *samples.conversations(20)])
        out = self.path("out")
        self.prepare(out, data)
        raw = contents(out)["train-00000.bin"]
        fields, table, ids, counts = read_shard(raw)
        with open(os.path.join(self.tokenizer, "tokenizer.json"), "rb") as file:
            tokenizer = file.read()
        self.assertEqual((fields["magic"], fields["version"], fields["order"], fields["header"], fields["file"]),
                         (b"SBPSHARD", 1, 0x01020304, 256, len(raw)))
        self.assertEqual((fields["tokenizer"], fields["name"], fields["id_bytes"], fields["kind"], fields["values"], fields["table"]),
                         (len(tokenizer) << 32 | zlib.crc32(tokenizer), "tokenizer", 2, 0, 0, 256))
        self.assertEqual(fields["header_crc"], zlib.crc32(raw[:124] + bytes(4) + raw[128:256]))
        self.assertEqual(fields["table_crc"], zlib.crc32(raw[256:256 + 48 * 22]))
        self.assertEqual(raw[192:256], bytes(64))
        self.assertEqual((fields["ids"] % 64, fields["counts"] % 64), (0, 0))
        self.assertEqual(raw[256 + 48 * 22:fields["ids"]].strip(b"\0"), b"")
        self.assertEqual(raw[fields["ids"] + 2 * fields["tokens"]:fields["counts"]].strip(b"\0"), b"")
        self.assertEqual(fields["file"], fields["counts"] + fields["tokens"])
        self.assertEqual((fields["documents"], fields["longest"], fields["counted"]),
                         (22, max(row[1] for row in table), sum(row[2] for row in table)))
        encoder, begin = encode.Encoder(encode.Options(tokenizer=self.tokenizer)), 0
        self.assertEqual(fields["vocabulary"], encoder.vocabulary)
        with open(data, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        for i, (row, record) in enumerate(zip(table, records)):
            _, (document,) = encoder.encode(record)
            own_ids, own_counts = ids[begin:begin + row[1]], counts[begin:begin + row[1]]
            self.assertEqual((list(own_ids), own_counts), (document.ids.tolist(), document.counts.tobytes()))
            crc = zlib.crc32(own_counts, zlib.crc32(struct.pack(f"<{row[1]}H", *own_ids)))
            self.assertEqual(row, (begin, len(document.ids), sum(own_counts), i, document.prompt, 0.0, crc))
            begin += row[1]
        self.assertEqual(begin, fields["tokens"])
        self.assertEqual(set(contents(out)) - {"tokenizer.tok"}, {"train-00000.bin", "prepare.json"})

    def test_large_vocabularies_have_ids_of_four_bytes(self):
        tokenizer = samples.byte_level()
        tokenizer.add_tokens([f"<extra{i}>" for i in range(65536 - tokenizer.get_vocab_size())])
        data = self.write("a.jsonl", [{"text": "hello <extra3>"}])
        for size in (2, 4):
            folder = samples.tokenizer_folder(self.path(f"tokenizer{size}"), tokenizer, None, None, "<|im_end|>")
            self.prepare(self.path(str(size)), data, tokenizer=folder)
            self.assertEqual(read_shard(contents(self.path(str(size)))["train-00000.bin"])[0]["id_bytes"], size)
            tokenizer.add_tokens(["<one more>"])

    def test_validation_is_a_choice_by_number_and_seed(self):
        data = self.write("a.jsonl", samples.conversations(400))
        for name, more in (("a", []), ("b", ["--seed", "1"]), ("c", ["--shard-tokens", "5000"])):
            self.prepare(self.path(name), data, "--val-fraction", "0.25", *more)
        a, b, c = (contents(self.path(name)) for name in "abc")
        self.assertNotEqual(a["val-00000.bin"], b["val-00000.bin"])
        tables = [[row for name in sorted(files) if name.startswith("val-") for row in read_shard(files[name])[1]] for files in (a, c)]
        self.assertEqual([row[6] for row in tables[0]], [row[6] for row in tables[1]])  # the same documents, by checksum
        self.assertTrue(60 < len(tables[0]) < 140)
        self.assertEqual(len(tables[0]) + read_shard(a["train-00000.bin"])[0]["documents"], 400)

    def test_damage_is_found(self):
        data, out = self.write("a.jsonl", samples.conversations(12, most=5)), self.path("out")
        self.prepare(out, data)
        whole = contents(out)["train-00000.bin"]
        fields, _, _, _ = read_shard(whole)
        damaged = self.path("damaged.bin")
        places = [*range(0, 256, 5), *range(256, fields["ids"], 31), *range(fields["ids"], len(whole), 101), fields["counts"] - 1]
        changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:] for at in places]
        changed += [whole[:length] for length in (0, 7, 100, 255, 256, 300, fields["ids"], len(whole) - 1)] + [whole + b"\0"]
        import shards
        for i, raw in enumerate(changed):
            with open(damaged, "wb") as file:
                file.write(raw)
            with self.assertRaises(shards.ShardError, msg=f"change {i}"):
                shards.Shard(damaged).verify()
        self.refused(1, "damaged.bin: .*65.* bytes|damaged.bin: has .* bytes, its header says .*; make it again", self.inspect(damaged))
        with open(damaged, "wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, 5) + bytes(1012))
        self.refused(1, "llm.c", self.inspect(damaged))
        self.refused(1, "No such file", self.inspect(self.path("none.bin")))
        self.refused(2, "names of shards", self.inspect())
        shown = self.run_main(self.inspect(os.path.join(out, "train-00000.bin")))
        self.assertRegex(shown.stdout, "whole; version 1, documents, 12 documents")


class Refusals(WithCommand):
    GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    BAD = (("{", "malformed line"), ("[1]", "malformed line"), ({"text": ""}, "empty sample"), ({"x": 1}, "unknown format"),
           ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"), ({"text": 3}, "wrong type"),
           ({"prompt": "a", "chosen": "b", "rejected": "c"}, "another kind"))
    LEFT_OUT = (({"messages": [{"role": "user", "content": "Hi"}]}, "no target that counts"),)

    def test_bad_samples_refuse_the_run(self):
        expected = self.path("good")
        self.prepare(expected, self.write("good.jsonl", [self.GOOD] * 3))
        for i, (bad, reason) in enumerate(self.BAD):
            data, out = self.write(f"{i}.jsonl", [self.GOOD, "", bad, self.GOOD, self.GOOD]), self.path(str(i))
            done = self.refused(1, "1 bad sample, listed in .*rejected.jsonl; .*--skip-bad", self.command(out, data))
            self.assertRegex(done.stderr, f"note: {data}:3: {reason}: ")
            self.assertEqual(glob.glob(out + "/*.bin"), [])
            with open(out + "/rejected.jsonl", encoding="utf-8") as file:
                (line,) = map(json.loads, file)
            self.assertEqual((line["file"], line["line"], line["reason"]), (data, 3, reason))
            if i == 0:
                self.refused(1, "1 bad sample", self.command(out, data, "--skip-bad", "0"))
            done = self.prepare(out, "--skip-bad", data)
            self.assertIn(f"left out: 1 of {reason!r}", done.stdout)
            skipped = contents(out)
            self.assertEqual(skipped["train-00000.bin"], contents(expected)["train-00000.bin"])
            self.assertEqual(len(skipped["rejected.jsonl"].splitlines()), 1)

    def test_samples_that_are_left_out(self):
        data = self.write("a.jsonl", [self.GOOD, *(bad for bad, _ in self.LEFT_OUT), self.GOOD])
        done = self.prepare(self.path("out"), data)
        self.assertIn("train: 2 samples", done.stdout)
        self.assertIn("left out: 1 of 'no target that counts'", done.stdout)
        long = self.write("long.jsonl", [self.GOOD, {"text": "hello " * 100}])
        done = self.prepare(self.path("long"), long, "--max-tokens", "50", "--long", "skip")
        self.assertIn("left out: 1 of 'longer than --max-tokens'", done.stdout)
        done = self.prepare(self.path("cut"), long, "--max-tokens", "50", "--long", "truncate")
        self.assertRegex(done.stdout, "longest document 50 tokens[^$]*1 documents were cut")
        done = self.prepare(self.path("kept"), long, "--max-tokens", "50")
        self.assertIn("1 documents are longer than --max-tokens 50", done.stdout)

    def test_ten_of_a_kind_are_printed_and_all_are_listed(self):
        data = self.write("a.jsonl", ["{"] * 30 + [{"text": ""}] * 12 + [self.GOOD])
        done = self.refused(1, "42 bad samples", self.command(self.path("out"), data))
        self.assertEqual((done.stderr.count(": malformed line: "), done.stderr.count(": empty sample: ")), (10, 10))
        self.assertEqual(len(contents(self.path("out"))["rejected.jsonl"].splitlines()), 42)
        self.refused(1, "42 bad samples", self.command(self.path("out"), "--skip-bad", "41", data))
        self.prepare(self.path("out"), "--skip-bad", "42", data)

    def test_mended_input_after_a_refusal(self):
        data, out = self.write("a.jsonl", [self.GOOD, "{"]), self.path("out")
        self.refused(1, "1 bad sample", self.command(out, data))
        self.write("a.jsonl", [self.GOOD, self.GOOD])
        self.assertIn("2 samples", self.prepare(out, data).stdout)
        self.assertFalse(os.path.exists(out + "/rejected.jsonl"))

    def test_other_inputs_and_options(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        self.prepare(out, data)
        before = contents(out)
        self.assertIn("is complete", self.prepare(out, data).stderr)
        self.refused(1, "begun with other --train-on; --force", self.command(out, data, "--train-on", "all"))
        self.write("a.jsonl", [self.GOOD, self.GOOD])
        self.refused(1, "begun with other inputs; --force", self.command(out, data))
        self.assertEqual(contents(out), before)
        self.assertIn("2 samples", self.prepare(out, data, "--force").stdout)
        os.remove(out + "/prepare.json")
        self.refused(1, "holds train-00000.bin but no prepare.json", self.command(out, data))
        samples.write_text(out + "/prepare.json", "{}")
        self.refused(1, "prepare.json: cannot be understood", self.command(out, data))

    def test_usage(self):
        data = self.write("a.jsonl", [self.GOOD])
        for pattern, command in (("no FILE", self.command("x")), ("no --out", self.command(None, data)), ("unrecognized arguments: --colour",
                                 self.command("x", data, "--colour")), ("--max-tokens", self.command("x", data, "--long", "skip")),
                                 ("'0' is not", self.command("x", data, "--workers", "0")), ("'1' is not a fraction", self.command("x", data, "--val-fraction", "1")),
                                 ("named twice", self.command("x", data, data)), ("no --tokenizer", ["--out", "x", data]),
                                 ("invalid choice: 'dpo'", self.command("x", data, "--format", "dpo"))):
            self.refused(2, pattern, command)
        self.assertFalse(os.path.exists("x"))

    def test_files_that_are_not_there_or_not_what_they_say(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        self.refused(1, "none.jsonl: cannot be read: No such file", self.command(out, self.path("none.jsonl")))
        os.mkfifo(self.path("pipe"))
        self.refused(1, "pipe: is not a regular file", self.command(out, self.path("pipe")))
        os.makedirs(self.path("nothing"))
        self.refused(1, "nothing/tokenizer.json: does not exist", self.command(out, data, tokenizer=self.path("nothing")))
        self.refused(1, "none.jinja: No such file", self.command(out, data, "--chat-template", self.path("none.jinja")))
        self.refused(1, "unknown role 'robot'", self.command(out, data, "--train-on", "robot"))
        samples.write_text(self.path("bad.jinja"), "{% if %}")
        self.refused(1, "not valid Jinja", self.command(out, data, "--chat-template", self.path("bad.jinja")))
        with open(self.path("cut.jsonl.gz"), "wb") as file:
            file.write(gzip.compress(b'{"text": "hello"}\n' * 1000)[:-20])
        self.refused(1, "cut.jsonl.gz:[0-9]+: cannot be read", self.command(out, self.path("cut.jsonl.gz")))
        self.refused(1, "no sample for training in 1 file", self.command(self.path("empty"), self.write("empty.jsonl", [])))
        self.refused(1, "no sample for training", self.command(self.path("none"), self.write("b.jsonl", [r for r, _ in self.LEFT_OUT])))
        self.refused(1, "file", self.command(samples.write_text(self.path("file"), ""), data))
        self.assertEqual(glob.glob(out + "/*.bin"), [])

    def test_a_template_whose_mask_is_wrong_refuses_the_run(self):
        folder = samples.tokenizer_folder(self.path("wrong"), samples.byte_level(), samples.WRONG, None, "<|im_end|>")
        data, out = self.write("a.jsonl", samples.conversations(300)), self.path("out")
        for count in ("1", "2"):
            self.refused(1, "a.jsonl:1: the loss mask does not lie where it should", self.command(out, data, "--workers", count, tokenizer=folder))
            self.assertEqual(os.listdir(out), [])

    def test_an_input_that_changes_meanwhile(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        settings = settings_of(self.tokenizer, out, [data])
        take = run.Run.take

        def changing(self_, *arguments):
            take(self_, *arguments)
            with open(data, "a", encoding="utf-8") as file:
                file.write("\n")

        with mock.patch.object(run.Run, "take", changing), self.assertRaisesRegex(run.Failure, "changed while it was read"):
            run.Run(settings, lambda *_: None, lambda _: None).run()
        self.assertEqual(glob.glob(out + "/*.bin"), [])

    def test_two_runs_in_one_folder(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        holder = run.Folder(out)
        self.refused(1, "another run is at work", self.command(out, data))
        os.close(holder.lock)
        self.prepare(out, data)

    def test_show(self):
        data = self.write("a.jsonl", [self.GOOD, "{", {"prompt": "a", "completion": " \x1b[2Jb"}, self.GOOD])
        done = self.prepare(None, "--show", "3", data)
        self.assertIn("<|im_start|>assistant\n\u00abHello<|im_end|>\u00bb\n", done.stdout)
        _, (document,) = encode.Encoder(encode.Options(tokenizer=self.tokenizer)).encode(self.GOOD)
        self.assertIn(f"--- {data}:1: {len(document.ids)} tokens, {document.counts.sum()} count\n", done.stdout)
        self.assertIn(f"--- {data}:2: left out: malformed line", done.stdout)
        self.assertIn("\u00ab \\x1b[2Jb<|im_end|>\u00bb", done.stdout)
        self.assertNotIn("\x1b", done.stdout)
        self.assertNotIn(":4:", done.stdout)


def settings_of(tokenizer, out, paths, **more):
    import argparse
    defaults = dict(workers=1, val_fraction=0.2, seed=0, shard_tokens=2500, skip_bad=-1, force=False)
    return argparse.Namespace(paths=paths, out=out, options=encode.Options(tokenizer=tokenizer), **{**defaults, **more})


class Crash(BaseException):
    pass


class Restarts(WithCommand):
    def test_kill_9_and_again(self):
        data = self.write("a.jsonl", [*samples.conversations(2000), "{", *samples.conversations(1000, 7)])
        more = [data, "--skip-bad", "--val-fraction", "0.1", "--shard-tokens", "30000", "--workers", "2"]
        self.prepare(self.path("whole"), *more)
        out, kills = self.path("killed"), 0
        while True:
            process = subprocess.Popen(self.program(*self.command(out, *more)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            before, begin = self.progress(out), time.monotonic()
            while process.poll() is None and (kills >= 5 or self.progress(out) in (before, None)):
                time.sleep(0.005)
                self.assertLess(time.monotonic() - begin, 240)
            if process.poll() is not None:
                break
            time.sleep(0.03 * kills)
            descendants = self.children(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            with open(out + "/prepare.json", encoding="utf-8") as file:
                final = json.load(file)["status"] in ("publishing", "complete")
            for path in glob.glob(out + "/*.bin"):  # only when all of them are whole
                self.assertTrue(final)
                self.assertEqual(self.run_main(self.inspect(path)).returncode, 0)
            for pid in descendants:
                self.assert_ends(pid)
        self.assertEqual(process.returncode, 0)
        self.assertGreaterEqual(kills, 3)
        whole, killed = contents(self.path("whole")), contents(out)
        self.assertGreater(len(whole), 10)
        self.assertEqual(whole.keys(), killed.keys())
        self.assertEqual([name for name in whole if whole[name] != killed[name]], [])

    @staticmethod
    def progress(out):
        try:
            with open(out + "/prepare.json", encoding="utf-8") as file:
                return json.load(file)["state"]["position"]["offset"]
        except (OSError, KeyError):
            return None

    @staticmethod
    def children(pid):
        try:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                return [int(child) for child in file.read().split()]
        except OSError:
            return []

    def assert_ends(self, pid):
        """A worker whose parent is gone ends by itself."""
        for _ in range(1000):
            try:
                with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                    if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                        return
            except OSError:
                return
            time.sleep(0.02)
        self.fail(f"worker {pid} lives on")

    def test_a_full_disk(self):
        data = self.write("a.jsonl", samples.conversations(600))
        self.prepare(self.path("whole"), data)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        done = subprocess.run(self.program(*self.command(self.path("full"), data)), capture_output=True, text=True, preexec_fn=limit)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, "prepare.py: .*File too large; .*make room and give the same command\n$")
        self.assertEqual(glob.glob(self.path("full") + "/*.bin"), [])
        self.prepare(self.path("full"), data)
        self.assertEqual(contents(self.path("full")), contents(self.path("whole")))

    def test_a_crash_at_every_step(self):
        """At each fsync, rename and removal of a small run: before it is done, and after."""
        data = self.write("a.jsonl", [*samples.conversations(40, most=25), "{", *samples.conversations(40, 3, most=25)])
        quiet = (lambda *_: None, lambda _: None)
        with mock.patch.object(inputs, "BATCH_ROWS", 8), mock.patch.object(run, "STATE_SECONDS", 0):
            run.Run(settings_of(self.tokenizer, self.path("whole"), [data]), *quiet).run()
            expected, crashes = contents(self.path("whole")), 0
            for name in ("fsync", "replace", "remove"):
                for after in (False, True):
                    step = 0
                    while True:
                        out, step = self.path(f"{name}-{after}-{step}"), step + (1 if step < 6 else 19)
                        if not self.crashes(getattr(os, name), name, step, after, out, data, quiet):
                            break
                        crashes += 1
                        run.Run(settings_of(self.tokenizer, out, [data]), *quiet).run()
                        found = contents(out)
                        self.assertEqual(found.keys(), expected.keys(), f"{name} {step} {after}")
                        self.assertEqual([key for key in found if found[key] != expected[key]], [], f"{name} {step} {after}")
            self.assertGreater(crashes, 25)
        self.assertGreater(sum(name.endswith(".bin") for name in expected), 5)

    def crashes(self, function, name, step, after, out, data, quiet):
        calls = 0

        def failing(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls == step and not after:
                raise Crash
            result = function(*arguments, **named)
            if calls == step:
                raise Crash
            return result

        work = run.Run(settings_of(self.tokenizer, out, [data]), *quiet)
        with mock.patch.object(os, name, failing):
            try:
                work.run()
            except Crash:
                os.close(work.folder.lock)
                return True
        return False

    def test_positions(self):
        """Reading goes on from every position as it would have."""
        records = [{"text": samples.words(samples.random.Random(i), 30)} for i in range(50)]
        paths = [self.write("a.jsonl", ["\ufeff" + json.dumps(records[0]), "", *records[1:]]), self.write("b.jsonl", records[:7])]
        with open(paths[0], "rb") as file, gzip.open(self.path("c.jsonl.gz"), "wb") as zipped:
            zipped.write(file.read())
        paths.append(self.path("c.jsonl.gz"))
        if pyarrow:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), self.path("d.parquet"), row_group_size=20)
            paths.append(self.path("d.parquet"))
        flat = lambda batches: [(batch.file, *row) for batch in batches for row in batch.rows]
        with mock.patch.object(inputs, "BATCH_ROWS", 4):
            batches = list(inputs.batches(paths, inputs.START))
            self.assertEqual(len(flat(batches)), 107 + (50 if pyarrow else 0))
            for i, batch in enumerate(batches):
                self.assertEqual(flat(inputs.batches(paths, batch.end)), flat(batches[i + 1:]))
            self.assertEqual([number for number, _ in batches[0].rows], [1, 3, 4, 5][:len(batches[0].rows)])


class Many(WithCommand):
    def test_workers_do_not_change_a_byte(self):
        data, made = self.write("a.jsonl", [*samples.conversations(600), "{", {"text": "hello " * 40000}, *samples.conversations(300, 5)]), []
        for count in ("1", "2", "3"):
            self.prepare(self.path(count), data, "--skip-bad", "--val-fraction", "0.1", "--shard-tokens", "40000", "--workers", count)
            made.append(contents(self.path(count)))
        self.assertGreater(len(made[0]), 4)
        self.assertTrue(made[0] == made[1] == made[2])

    def test_a_worker_that_dies(self):
        data = self.write("a.jsonl", samples.conversations(4000))
        work = run.Run(settings_of(self.tokenizer, self.path("out"), [data], workers=2), lambda *_: None, lambda _: None)
        take = work.take

        def killing(*arguments):
            take(*arguments)
            for pid in Restarts.children(os.getpid()):
                os.kill(pid, signal.SIGKILL)

        work.take = killing
        with mock.patch.object(workers, "encoder", None), self.assertRaisesRegex(workers.WorkerFailure, "a worker has ended with status -9"):
            work.run()

    @unittest.skipUnless(os.path.exists("/proc/self/smaps_rollup"), "memory of a long file: there is no /proc here")
    def test_memory_does_not_grow_with_the_input(self):
        lines, small, large = list(samples.conversations(300, most=200)), self.path("small.jsonl"), self.path("large.jsonl")
        samples.write_lines(small, lines)
        with open(small, "rb") as file, open(large, "wb") as out:
            block = file.read()
            for _ in range(max(2, 25_000_000 // len(block))):
                out.write(block)
        used = {path: self.peak(path, path + ".out") for path in (small, large)}
        self.assertLess(used[large], 450 << 20)
        self.assertLess(used[large] - used[small], 64 << 20)

    def peak(self, path, out):
        """The largest sum of what all processes of a run have in memory, shared pages counted in each."""
        process, most = subprocess.Popen(self.program(*self.command(out, path, "--workers", "2", "--train-on", "last")), stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            total = 0
            for pid in [process.pid, *Restarts.children(process.pid)]:
                try:
                    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                        total += next(int(line.split()[1]) for line in file if line.startswith("Rss:")) << 10
                except (OSError, StopIteration):
                    pass
            most = max(most, total)
            time.sleep(0.05)
        self.assertEqual(process.returncode, 0)
        return most

    @unittest.skipUnless(pyarrow, "Parquet: pyarrow is not installed")
    def test_parquet_gives_what_jsonl_gives(self):
        records = {"messages": list(samples.conversations(700)), "text": [{"text": f"hello {i}", "id": i} for i in range(700)],
                   "groups": [{"prompt": "a", "completions": [" b", " c", " d"][:2 + i % 2], "rewards": [0.5, 1.0, 0.0][:2 + i % 2]}
                              for i in range(100)],
                   "advantages": [{"ids": [5, 6, i], "train": [0, 1, 1], "advantages": [0.0, -0.5, i / 8]} for i in range(100)],
                   "prompts": [{"prompt": "a", "answer": str(i) if i % 2 else None} for i in range(100)]}
        for name, rows in records.items():
            data, table = self.write(name + ".jsonl", rows), self.path(name + ".parquet")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=90)
            self.prepare(self.path(name + "-1"), data)
            self.prepare(self.path(name + "-2"), table)
            a, b = contents(self.path(name + "-1")), contents(self.path(name + "-2"))
            self.assertEqual(a["train-00000.bin"], b["train-00000.bin"])
        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), self.path("other.parquet"))
        self.refused(1, "none of its columns \\(body\\)", self.command(self.path("other"), self.path("other.parquet")))
        with open(self.path("bad.parquet"), "wb") as file:
            file.write(b"PAR1 this is not one PAR1")
        self.refused(1, "bad.parquet: row 1: cannot be read", self.command(self.path("bad"), self.path("bad.parquet")))

    def test_gzipped_lines(self):
        data = self.write("a.jsonl", samples.conversations(300))
        with open(data, "rb") as file, gzip.open(data + ".gz", "wb") as zipped:
            zipped.write(file.read())
        self.prepare(self.path("1"), data)
        self.prepare(self.path("2"), data + ".gz")
        self.assertEqual(contents(self.path("1"))["train-00000.bin"], contents(self.path("2"))["train-00000.bin"])
