"""Whole runs of data/prepare.py for test_prepare.py: the bytes of the format, bad input, kill -9, workers, memory, Parquet, inspect."""

import argparse
import contextlib
import glob
import gzip
import io
import itertools
import json
import os
import random
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

FIELDS = ("magic version order header file documents tokens counted longest id_bytes kind vocabulary tokenizer table ids counts values "
          "table_crc header_crc").split()
SHARD = "train-00000.bin"


def contents(folder):
    """{name: bytes} of a folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def read_shard(raw):
    """(header fields, [(begin, tokens, counted, group, prompt, reward, crc)], ids, counts), by the offsets of data/README.md."""
    fields = dict(zip(FIELDS, struct.unpack_from("<8s2I6Q2I6Q2I", raw)))
    table = [struct.unpack_from("<QQQQQfI", raw, fields["table"] + 48 * i) for i in range(fields["documents"])]
    ids = struct.unpack_from(f"<{fields['tokens']}{'H' if fields['id_bytes'] == 2 else 'I'}", raw, fields["ids"])
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

    def start(self, *arguments, **more):
        """A process of its own, where that matters: it takes two seconds to start."""
        return subprocess.Popen([sys.executable, PREPARE, *self.command(*arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, **more)

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

    def write(self, name, lines):
        return samples.write_lines(self.path(name), lines)

    def assert_same_files(self, a, b, where=None):
        """Two results of contents()."""
        self.assertEqual((a.keys(), [name for name in a if a[name] != b[name]]), (b.keys(), []), where)


class Format(WithCommand):
    def test_every_byte_of_a_shard(self):
        data = self.write("a.jsonl", [{"text": "hello world"}, {"prompt": "2 + 2 =", "completion": " 4"}, *samples.conversations(20)])
        out = self.path("out")
        self.prepare(out, data)
        self.assertEqual(set(contents(out)) - {"tokenizer.tok"}, {SHARD, "prepare.json"})
        raw = contents(out)[SHARD]
        fields, table, ids, counts = read_shard(raw)
        tokenizer = contents(self.tokenizer)["tokenizer.json"]
        encoder, begin = encode.Encoder(encode.Options(tokenizer=self.tokenizer)), 0
        padded = lambda offset: (offset + 63) // 64 * 64
        ids_at, tokens = padded(256 + 48 * 22), len(ids)
        counts_at = padded(ids_at + 2 * tokens)
        self.assertEqual(fields, {
            "magic": b"SBPSHARD", "version": 1, "order": 0x01020304, "header": 256, "file": counts_at + tokens, "documents": 22,
            "tokens": tokens, "counted": sum(row[2] for row in table), "longest": max(row[1] for row in table), "id_bytes": 2, "kind": 0,
            "vocabulary": encoder.vocabulary, "tokenizer": len(tokenizer) << 32 | zlib.crc32(tokenizer), "table": 256, "ids": ids_at,
            "counts": counts_at, "values": 0, "table_crc": zlib.crc32(raw[256:256 + 48 * 22]),
            "header_crc": zlib.crc32(raw[:124] + bytes(4) + raw[128:256])})
        self.assertEqual((raw[128:256], len(raw)), (b"tokenizer" + bytes(119), fields["file"]))
        self.assertEqual((raw[256 + 48 * 22:ids_at] + raw[ids_at + 2 * tokens:counts_at]).strip(b"\0"), b"")
        with open(data, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        for i, (row, record) in enumerate(zip(table, records)):
            _, (document,) = encoder.encode(record)
            own_ids, own_counts = ids[begin:begin + row[1]], counts[begin:begin + row[1]]
            self.assertEqual((list(own_ids), own_counts), (document.ids.tolist(), document.counts.tobytes()))
            crc = zlib.crc32(own_counts, zlib.crc32(struct.pack(f"<{row[1]}H", *own_ids)))
            self.assertEqual(row, (begin, len(document.ids), sum(own_counts), i, document.prompt, 0.0, crc))
            begin += row[1]
        self.assertEqual(begin, tokens)

    def test_large_vocabularies_have_ids_of_four_bytes(self):
        tokenizer = samples.byte_level()
        tokenizer.add_tokens([f"<extra{i}>" for i in range(65536 - tokenizer.get_vocab_size())])
        data = self.write("a.jsonl", [{"text": "hello <extra3>"}])
        for size in (2, 4):
            folder = samples.tokenizer_folder(self.path(f"tokenizer{size}"), tokenizer, None, None, "<|im_end|>")
            self.prepare(self.path(str(size)), data, tokenizer=folder)
            self.assertEqual(read_shard(contents(self.path(str(size)))[SHARD])[0]["id_bytes"], size)
            tokenizer.add_tokens(["<one more>"])

    def test_validation_is_a_choice_by_number_and_seed(self):
        data = self.write("a.jsonl", [{"text": f"hello {i}"} for i in range(400)])
        for name, more in (("a", []), ("b", ["--seed", "1"]), ("c", ["--shard-tokens", "500"])):
            self.prepare(self.path(name), data, "--val-fraction", "0.25", *more)
        a, b, c = (contents(self.path(name)) for name in "abc")
        self.assertNotEqual(a["val-00000.bin"], b["val-00000.bin"])
        tables = [[row for name in sorted(files) if name.startswith("val-") for row in read_shard(files[name])[1]] for files in (a, c)]
        self.assertEqual([row[6] for row in tables[0]], [row[6] for row in tables[1]])  # the same documents, by checksum
        self.assertTrue(60 < len(tables[0]) < 140 and "val-00001.bin" in c)
        self.assertEqual(len(tables[0]) + read_shard(a[SHARD])[0]["documents"], 400)

    def test_inspect(self):
        bad = self.path("llmc.bin")
        with open(bad, "wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, 5) + bytes(1012))
        for code, words, paths in ((1, "llm.c", [bad]), (1, "No such file", [self.path("none.bin")]), (2, "names of shards", [])):
            self.refused(code, words, ["inspect", *paths])
        self.prepare(self.path("out"), self.write("a.jsonl", samples.conversations(12)))
        shard = self.path("out/" + SHARD)
        self.assertRegex(self.run_main(["inspect", shard]).stdout, "whole; version 1, documents, 12 documents")
        with open(shard, "ab") as file:
            file.write(b"\0")
        self.refused(1, "has .* bytes, its header says .*; make it again", ["inspect", shard])


class Refusals(WithCommand):
    GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    BAD = (("{", "malformed line"), ("[1]", "malformed line"), ({"text": ""}, "empty sample"), ({"x": 1}, "unknown format"),
           ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"), ({"text": 3}, "wrong type"),
           ({"prompt": "a", "chosen": "b", "rejected": "c"}, "another kind"))
    LEFT_OUT = {"messages": [{"role": "user", "content": "Hi"}]}

    def test_bad_samples_refuse_the_run(self):
        self.prepare(self.path("good"), self.write("good.jsonl", [self.GOOD] * 3))
        expected = contents(self.path("good"))[SHARD]
        for i, (bad, reason) in enumerate(self.BAD):
            data, out = self.write(f"{i}.jsonl", [self.GOOD, "", bad, self.GOOD, self.GOOD]), self.path(str(i))
            done = self.refused(1, "1 bad sample, listed in .*rejected.jsonl; .*--skip-bad", self.command(out, data))
            self.assertRegex(done.stderr, f"note: {data}:3: {reason}: ")
            self.assertEqual(glob.glob(out + "/*.bin"), [])
            (line,) = map(json.loads, contents(out)["rejected.jsonl"].splitlines())
            self.assertEqual((line["file"], line["line"], line["reason"]), (data, 3, reason))
            if i == 0:
                self.refused(1, "1 bad sample", self.command(out, data, "--skip-bad", "0"))
            self.assertIn(f"left out: 1 of {reason!r}", self.prepare(out, "--skip-bad", data).stdout)
            skipped = contents(out)
            self.assertEqual((skipped[SHARD], len(skipped["rejected.jsonl"].splitlines())), (expected, 1))

    def test_samples_that_are_left_out(self):
        short = self.write("a.jsonl", [self.GOOD, self.LEFT_OUT, self.GOOD])
        long = self.write("long.jsonl", [self.GOOD, {"text": "hello " * 100}])
        for data, more, words in ((short, [], "train: 2 samples[^$]*left out: 1 of 'no target that counts'"),
                                  (long, ["--max-tokens", "50", "--long", "skip"], "left out: 1 of 'longer than --max-tokens'"),
                                  (long, ["--max-tokens", "50", "--long", "truncate"], "longest document 50 tokens[^$]*1 documents were cut"),
                                  (long, ["--max-tokens", "50"], "1 documents are longer than --max-tokens 50")):
            self.assertRegex(self.prepare(self.path("out"), data, "--force", *more).stdout, words)

    def test_ten_of_a_kind_are_printed_and_all_are_listed(self):
        data, out = self.write("a.jsonl", ["{"] * 30 + [{"text": ""}] * 12 + [self.GOOD]), self.path("out")
        done = self.refused(1, "42 bad samples", self.command(out, data))
        self.assertEqual((done.stderr.count(": malformed line: "), done.stderr.count(": empty sample: ")), (10, 10))
        self.assertEqual(len(contents(out)["rejected.jsonl"].splitlines()), 42)
        self.refused(1, "42 bad samples", self.command(out, "--skip-bad", "41", data))
        self.prepare(out, "--skip-bad", "42", data)

    def test_other_inputs_and_options(self):
        data, out = self.write("a.jsonl", [self.GOOD, "{"]), self.path("out")
        self.refused(1, "1 bad sample", self.command(out, data))
        self.write("a.jsonl", [self.GOOD])  # input that was refused may be mended
        self.assertIn("1 samples", self.prepare(out, data).stdout)
        before = contents(out)
        self.assertNotIn("rejected.jsonl", before)
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
        for pattern, out, *arguments in (
                ("no FILE", "x"), ("no --out", None, data), ("unrecognized arguments: --colour", "x", data, "--colour"),
                ("--max-tokens", "x", data, "--long", "skip"), ("'0' is not", "x", data, "--workers", "0"),
                ("'1' is not a fraction", "x", data, "--val-fraction", "1"), ("named twice", "x", data, data),
                ("invalid choice: 'dpo'", "x", data, "--format", "dpo")):
            self.refused(2, pattern, self.command(out, *arguments))
        self.refused(2, "no --tokenizer", ["--out", "x", data])
        self.assertFalse(os.path.exists("x"))

    def test_files_that_are_not_there_or_not_what_they_say(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        bad = samples.write_text(self.path("bad.jinja"), "{% if %}")
        os.mkfifo(self.path("pipe"))
        os.makedirs(self.path("nothing"))
        with open(self.path("cut.jsonl.gz"), "wb") as file:
            file.write(gzip.compress(b'{"text": "hello"}\n' * 1000)[:-20])
        for words, *arguments in (
                ("none.jsonl: cannot be read: No such file", self.path("none.jsonl")), ("pipe: is not a regular file", self.path("pipe")),
                ("none.jinja: No such file", data, "--chat-template", self.path("none.jinja")),
                ("not valid Jinja", data, "--chat-template", bad), ("unknown role 'robot'", data, "--train-on", "robot"),
                ("cut.jsonl.gz:[0-9]+: cannot be read", self.path("cut.jsonl.gz")),
                ("no sample for training in 1 file", self.write("empty.jsonl", []), "--force"),
                ("no sample for training", self.write("b.jsonl", [self.LEFT_OUT]), "--force")):
            self.refused(1, words, self.command(out, *arguments))
        self.refused(1, "nothing/tokenizer.json: does not exist", self.command(out, data, tokenizer=self.path("nothing")))
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
        take = run.Run.take

        def changing(self_, *arguments):
            take(self_, *arguments)
            with open(data, "a", encoding="utf-8") as file:
                file.write("\n")

        with mock.patch.object(run.Run, "take", changing), self.assertRaisesRegex(run.Failure, "changed while it was read"):
            run_of(self.tokenizer, out, data).run()
        self.assertEqual(glob.glob(out + "/*.bin"), [])

    def test_two_runs_in_one_folder(self):
        data, out = self.write("a.jsonl", [self.GOOD]), self.path("out")
        holder = run.Folder(out)
        self.refused(1, "another run is at work", self.command(out, data))
        os.close(holder.lock)
        self.prepare(out, data)

    def test_show(self):
        data = self.write("a.jsonl", [self.GOOD, "{", {"prompt": "a", "completion": " \x1b[2Jb"}, self.GOOD])
        shown = self.prepare(None, "--show", "3", data).stdout
        _, (document,) = encode.Encoder(encode.Options(tokenizer=self.tokenizer)).encode(self.GOOD)
        for words in ("<|im_start|>assistant\n\u00abHello<|im_end|>\u00bb\n", f"--- {data}:2: left out: malformed line",
                      f"--- {data}:1: {len(document.ids)} tokens, {document.counts.sum()} count\n", "\u00ab \\x1b[2Jb<|im_end|>\u00bb"):
            self.assertIn(words, shown)
        self.assertNotRegex(shown, "\x1b|:4:")


def run_of(tokenizer, out, *paths, **more):
    """A silent run in this process."""
    settings = {"workers": 1, "val_fraction": 0.2, "seed": 0, "shard_tokens": 2500, "skip_bad": -1, "force": False, **more}
    return run.Run(argparse.Namespace(paths=list(paths), out=out, options=encode.Options(tokenizer=tokenizer), **settings),
                   lambda *_: None, lambda _: None)


def process_file(pid, name):
    """Text of a file in /proc, empty where the process is gone."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def children(pid):
    return [int(child) for child in process_file(pid, f"task/{pid}/children").split()]


class Crash(BaseException):
    pass


class Restarts(WithCommand):
    def test_kill_9_and_again(self):
        data = self.write("a.jsonl", [*samples.conversations(1000), "{", *samples.conversations(500, 7)])
        more = [data, "--skip-bad", "--val-fraction", "0.1", "--shard-tokens", "15000", "--workers", "2"]
        self.prepare(self.path("whole"), *more)
        out, kills = self.path("killed"), 0
        while True:
            before, begin = self.progress(out), time.monotonic()
            process = self.start(out, *more)
            while process.poll() is None and (kills >= 3 or self.progress(out) in (before, None)):
                time.sleep(0.005)
                self.assertLess(time.monotonic() - begin, 240)
            if process.poll() is not None:
                break
            time.sleep(0.03 * kills)
            descendants = children(process.pid)
            process.kill()
            process.communicate()
            kills += 1
            with open(out + "/prepare.json", encoding="utf-8") as file:
                final = json.load(file)["status"] in ("publishing", "complete")
            for path in glob.glob(out + "/*.bin"):  # only when all of them are whole
                self.assertTrue(final)
                self.assertEqual(self.run_main(["inspect", path]).returncode, 0)
            for pid in descendants:
                self.assert_ends(pid)
        process.communicate()
        self.assertEqual((process.returncode, kills), (0, 3))
        self.assertGreater(len(contents(out)), 10)
        self.assert_same_files(contents(self.path("whole")), contents(out))

    @staticmethod
    def progress(out):
        try:
            with open(out + "/prepare.json", encoding="utf-8") as file:
                return json.load(file)["state"]["position"]["offset"]
        except (OSError, KeyError):
            return None

    def assert_ends(self, pid):
        """A worker whose parent is gone ends by itself."""
        for _ in range(1000):
            if process_file(pid, "stat").rpartition(")")[2].split()[:1] in ([], ["Z"]):
                return
            time.sleep(0.02)
        self.fail(f"worker {pid} lives on")

    def test_a_full_disk(self):
        data = self.write("a.jsonl", samples.conversations(600))
        self.prepare(self.path("whole"), data)
        process = self.start(self.path("full"), data, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
        out, error = process.communicate()
        self.assertEqual((process.returncode, out), (1, ""))
        self.assertRegex(error, "prepare.py: .*File too large; .*make room and give the same command\n$")
        self.assertEqual(glob.glob(self.path("full") + "/*.bin"), [])
        self.prepare(self.path("full"), data)
        self.assert_same_files(contents(self.path("full")), contents(self.path("whole")))

    def test_a_crash_at_every_step(self):
        """At each fsync, rename and removal of a small run with advantages: before it is done, and after."""
        data = self.write("a.jsonl", [*map(samples.rollout, range(40)), "{", *map(samples.rollout, range(40, 80))])
        run_to = lambda name: run_of(self.tokenizer, self.path(name), data, shard_tokens=150)
        with mock.patch.object(inputs, "BATCH_ROWS", 8), mock.patch.object(run, "STATE_SECONDS", 0):
            run_to("whole").run()
            expected, crashes = contents(self.path("whole")), 0
            for name, after in itertools.product(("fsync", "replace", "remove"), (False, True)):
                step, where = 1, f"{name}-{after}-1"
                while self.crashes(run_to(where), name, step, after):
                    run_to(where).run()
                    self.assert_same_files(contents(self.path(where)), expected, where)
                    crashes, step = crashes + 1, step + (1 if step < 5 else 37)
                    where = f"{name}-{after}-{step}"
            self.assertGreater(crashes, 20)
        self.assertGreater(sum(name.endswith(".bin") for name in expected), 5)

    @staticmethod
    def crashes(work, name, step, after):
        """True where the run gets to that call of os.NAME, and ends there."""
        calls, function = itertools.count(1), getattr(os, name)

        def failing(*arguments, **named):
            number = next(calls)
            if number == step and not after:
                raise Crash
            result = function(*arguments, **named)
            if number == step:
                raise Crash
            return result

        with mock.patch.object(os, name, failing):
            try:
                work.run()
            except Crash:
                os.close(work.folder.lock)
                return True
        return False

    def test_positions(self):
        """Reading goes on from every position as it would have."""
        records = [{"text": samples.words(random.Random(i), 30)} for i in range(50)]
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
            rows = flat(batches)
            self.assertEqual(len(rows), 107 + (50 if pyarrow else 0))
            self.assertEqual([row[1:] for row in rows[:50]], [row[1:] for row in rows[57:107]])  # zipped or not
            for i, batch in enumerate(batches):
                self.assertEqual(flat(inputs.batches(paths, batch.end)), flat(batches[i + 1:]))
            self.assertEqual([number for number, _ in batches[0].rows], [1, 3, 4, 5][:len(batches[0].rows)])


class Many(WithCommand):
    def test_workers_do_not_change_a_byte(self):
        data = self.write("a.jsonl", [*samples.conversations(500), "{", {"text": "hello " * 40000}, *samples.conversations(200, 5)])
        for count in ("1", "3"):
            self.prepare(self.path(count), data, "--skip-bad", "--val-fraction", "0.1", "--shard-tokens", "40000", "--workers", count)
        self.assertGreater(len(contents(self.path("1"))), 4)
        self.assert_same_files(contents(self.path("1")), contents(self.path("3")))

    def test_a_worker_that_dies(self):
        data = self.write("a.jsonl", samples.conversations(4000, most=4))
        work = run_of(self.tokenizer, self.path("out"), data, workers=2)
        take = work.take

        def killing(*arguments):
            take(*arguments)
            for pid in children(os.getpid()):
                os.kill(pid, signal.SIGKILL)

        work.take = killing
        with mock.patch.object(workers, "encoder", None), self.assertRaisesRegex(workers.WorkerFailure, "a worker has ended with status -9"):
            work.run()

    @unittest.skipUnless(os.path.exists("/proc/self/smaps_rollup"), "memory of a long file: there is no /proc here")
    def test_memory_does_not_grow_with_the_input(self):
        block = [{"ids": [(i + k) % 300 for k in range(300)], "train": [1] * 300, "advantages": [0.5] * 300, "note": "x" * 60000}
                 for i in range(100)]
        small, large = (self.peak(self.write(f"{times}.jsonl", block * times), self.path(f"{times}.out")) for times in (1, 20))
        self.assertLess(large, 450 << 20)
        self.assertLess(large - small, 64 << 20)

    def peak(self, path, out):
        """The largest sum of what all processes of a run have in memory, shared pages counted in each."""
        process, most = self.start(out, path, "--workers", "2"), 0
        while process.poll() is None:
            rollups = [process_file(pid, "smaps_rollup").partition("Rss:")[2].split()[:1] for pid in [process.pid, *children(process.pid)]]
            most = max(most, sum(int(size) << 10 for sizes in rollups for size in sizes))
            time.sleep(0.05)
        self.assertEqual(process.communicate()[1], "")
        return most

    @unittest.skipUnless(pyarrow, "Parquet: pyarrow is not installed")
    def test_parquet_gives_what_jsonl_gives(self):
        records = {"messages": list(samples.conversations(200)), "text": [{"text": f"hello {i}", "id": i} for i in range(700)],
                   "groups": [{"prompt": "a", "completions": [" b", " c", " d"][:2 + i % 2], "rewards": [0.5, 1.0, 0.0][:2 + i % 2]}
                              for i in range(100)],
                   "advantages": [{"ids": [5, 6, i], "train": [0, 1, 1], "advantages": [0.0, -0.5, i / 8]} for i in range(100)],
                   "prompts": [{"prompt": "a", "answer": str(i) if i % 2 else None} for i in range(100)]}
        for name, rows in records.items():
            data, table = self.write(name + ".jsonl", rows), self.path(name + ".parquet")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=90)
            self.prepare(self.path(name + "-1"), data)
            self.prepare(self.path(name + "-2"), table)
            self.assertEqual(contents(self.path(name + "-1"))[SHARD], contents(self.path(name + "-2"))[SHARD])
        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), self.path("other.parquet"))
        self.refused(1, "none of its columns \\(body\\)", self.command(self.path("other"), self.path("other.parquet")))
        with open(self.path("bad.parquet"), "wb") as file:
            file.write(b"PAR1 this is not one PAR1")
        self.refused(1, "bad.parquet: row 1: cannot be read", self.command(self.path("bad"), self.path("bad.parquet")))
