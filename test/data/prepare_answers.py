"""Answers, for test_prepare.py: whole runs that make shards of pairs, groups, prompts and documents with advantages."""

import glob
import json
import struct
import zlib

import numpy as np

import encode
import prepare_samples as samples
import shards
from prepare_runs import WithCommand, contents, read_shard


class Answers(WithCommand):
    def made(self, name, rows, *arguments):
        """(shard's path, header fields, table, ids, counts, raw bytes) for every shard of a run over these rows; inspected."""
        done = self.prepare(self.path(name), self.write(name + ".jsonl", rows), *arguments)
        paths = sorted(glob.glob(self.path(name) + "/train-*.bin"))
        inspected = self.run_main(["inspect", *paths])
        self.assertEqual(inspected.returncode, 0, inspected.stderr)
        self.said = done.stdout + inspected.stdout
        return [(path, *read_shard(raw), raw) for path in paths for raw in [open(path, "rb").read()]]

    def assert_said(self, *words):
        """By the run that made the shards, and of them by inspect."""
        for each in words:
            self.assertIn(each, self.said)

    def test_pairs(self):
        made = self.made("pairs", [{"prompt": f"{i} + 2 =", "chosen": " 4", "rejected": " 5 and six"} for i in range(40)], "--shard-tokens", "300")
        self.assertGreater(len(made), 1)
        for _, fields, table, _, _, _ in made:
            self.assertEqual((fields["kind"], fields["values"]), (1, 0))
            self.assertEqual([row[3] for row in table], [i // 2 for i in range(len(table))])
            self.assertTrue(all(4 <= row[4] < row[1] for row in table))
        self.assertEqual(sum(len(table) for _, _, table, *_ in made), 80)
        self.assert_said("--objective dpo", "preference pairs", "  16 pairs\n")

    def test_groups(self):
        rows = [{"prompt": "2+2", "completions": [" 4"] * (2 + i % 3), "rewards": [i / 2] * (2 + i % 3)} for i in range(40)]
        made, seen = self.made("groups", rows, "--shard-tokens", "300"), 0
        self.assertGreater(len(made), 1)
        for _, fields, table, _, _, _ in made:
            groups = table[-1][3] + 1
            expected = [(g, (seen + g) / 2) for g in range(groups) for _ in range(2 + (seen + g) % 3)]
            self.assertEqual((fields["kind"], [(row[3], row[5]) for row in table]), (2, expected))
            seen += groups
        self.assertEqual(seen, 40)
        self.assert_said("--objective grpo", "groups of 2 to 4 documents, rewards 0 to ")

    def test_prompts(self):
        rows = [{"prompt": f"{i} + 2 =", **({"answer": f" {i + 2}"} if i % 2 else {})} for i in range(30)]
        rows.append({"prompt": [{"role": "user", "content": "Hi"}], "answer": "Hello"})
        encoder = encode.Encoder(encode.Options(tokenizer=self.tokenizer))
        decode = lambda ids: encoder.tokenizer.decode(list(ids), skip_special_tokens=False)
        (_, fields, table, ids, counts, _), = self.made("prompts", rows)
        self.assertEqual((fields["kind"], fields["counted"], set(counts)), (3, 0, {0}))
        for i, (begin, tokens, counted, group, prompt, reward, _) in enumerate(table):
            text = (decode(ids[begin:begin + prompt]), decode(ids[begin + prompt:begin + tokens]))
            expected = (rows[i]["prompt"], rows[i].get("answer", "")) if i < 30 else (
                "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello")
            self.assertEqual((counted, group, reward, text), (0, i, 0, expected))
        self.said += self.prepare(None, "--show", "1", self.path("prompts.jsonl")).stdout
        self.assert_said("--rollout --reward-command", "prompts in 31 documents", "prompt alone")

    def test_advantages(self):
        rows = [samples.rollout(i) for i in range(200)]
        made, i = self.made("values", rows, "--shard-tokens", "900"), 0
        self.assertGreater(len(made), 1)
        for _, fields, table, ids, counts, raw in made:
            self.assertEqual((fields["kind"], fields["values"] % 64, fields["file"]), (0, 0, fields["values"] + 4 * fields["tokens"]))
            values = struct.unpack_from(f"<{fields['tokens']}f", raw, fields["values"])
            for number, (begin, tokens, counted, group, prompt, _, crc) in enumerate(table):
                own = slice(begin, begin + tokens)
                self.assertEqual((list(ids[own]), list(counts[own])), (rows[i]["ids"], [0] + rows[i]["train"][1:]))
                self.assertEqual(np.float32(rows[i]["advantages"]).tolist(), list(values[own]))
                whole = struct.pack(f"<{tokens}H", *ids[own]) + counts[own] + struct.pack(f"<{tokens}f", *values[own])
                self.assertEqual((group, prompt, crc), (number, 1 + i % 3, zlib.crc32(whole)))
                i += 1
        self.assertEqual(i, len(rows))
        self.assert_said("--objective ppo", "documents with advantages")

    def test_kinds_do_not_mix(self):
        for number, (first, other) in enumerate(((samples.rollout(5), {"text": "hello world"}), ({"text": "hello world"}, samples.rollout(5)),
                                                 ({"prompt": "a"}, {"prompt": "a", "completion": " b"}))):
            out = self.path(str(number))
            self.refused(1, "1 bad sample", self.command(out, self.write(f"{number}.jsonl", [first, other])))
            self.assertEqual(json.loads(contents(out)["rejected.jsonl"])["reason"], "another kind")

    def test_damage_is_found(self):
        """In any byte, and in the length."""
        for name, rows in (("values", [samples.rollout(i) for i in range(9)]), ("prompts", [{"prompt": "hello world", "answer": "a"}] * 9),
                           ("groups", [{"prompt": "a", "completions": [" b", " c"], "rewards": [0, 1]}] * 5),
                           ("documents", samples.conversations(12, most=5))):
            (path, fields, _, _, _, raw), = self.made(name, rows)
            last = fields["values"] or fields["counts"]
            places = (*range(0, 256, 5), *range(256, fields["ids"], 17), *range(fields["ids"], last, 101), *range(last - 3, len(raw), 11))
            changed = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:] for at in places]
            changed += [raw[:length] for length in (0, 7, 100, 255, 256, 300, fields["ids"], len(raw) - 1)] + [raw + b"\0"]
            for i, damaged in enumerate(changed):
                with open(path, "wb") as file:
                    file.write(damaged)
                with self.assertRaises(shards.ShardError, msg=f"{name}, change {i}"):
                    shards.Shard(path).verify()

    def test_faults_with_right_checksums(self):
        """As a writer with a fault would make them."""
        (path, fields, table, _, counts, raw), = self.made("groups", [{"prompt": "a", "completions": [" b", " c"], "rewards": [0, 1]}] * 3)

        def sealed(changes):
            changed = bytearray(raw)
            for at, value in changes:
                changed[at:at + len(value)] = value
            changed[120:124] = struct.pack("<I", zlib.crc32(changed[256:256 + 48 * fields["documents"]]))
            changed[124:128] = bytes(4)
            changed[124:128] = struct.pack("<I", zlib.crc32(changed[:256]))
            with open(path, "wb") as file:
                file.write(changed)
            return shards.Shard(path)

        at = lambda document, field: 256 + 48 * document + field
        for words, changes in (("group 0 has one completion alone", [(at(1, 24), b"\1")]),
                               ("not numbered in order", [(at(2, 24), b"\2")]), ("not numbered in order", [(at(4, 24), b"\0")]),
                               ("rewards that are not finite", [(at(2, 40), struct.pack("<f", float("nan")))]),
                               ("not numbered in order", [(68, b"\1"), (at(5, 24), b"\5")]),
                               ("cannot be", [(68, b"\3"), *((at(i, 24), bytes([i])) for i in range(6))])):
            with self.assertRaisesRegex(shards.ShardError, words):
                sealed(changes).verify()
        sealed([]).verify()
