"""Runs prepare.py: from inputs to a folder of shards, restartable, all or nothing.

Until the end all files have names that end in .tmp, next to prepare.json, whose "state" records the progress. A state is saved between
batches, after its files are synced. After a crash files are truncated to the last state, and the same bytes follow.
"""

import collections
import datetime
import fcntl
import json
import os
import re
import shutil
import time

import numpy as np

import code_tests
import encode
import inputs
import records
import shards
import templates
import tokenizer_file
import workers

STATE_SECONDS = 10  # seconds between states; the end of a shard saves a state, too
CHECKED = 64  # samples at the beginning of a run whose masks are checked
MOST_NOTES = 200  # about how many characters of column names a note has
SHOWN = 10  # number of rejected samples that are printed for each reason
NEW = "prepare.new"  # folder in --out in which --overwrite makes the new output before the old one is removed
TOKENIZER = ("tokenizer.tok", "chat_template.jinja")  # files for the C program and others
OURS = re.compile(r"(train|val)-[0-9]{5,}\.bin(\.(table|ids|counts|values|index|columns))?(\.tmp)?|"
                  r"rejected\.jsonl(\.tmp)?|prepare\.json(\.tmp)?|tokenizer\.tok|chat_template\.jinja")


class Failure(Exception):
    """An error of one line: where, what is wrong, what to do."""


# ---- small things ------------------------------------------------------------------------------------------------------------
def mixed(numbers):
    """Returns 64 pseudo-random bits for each uint64 number, by splitmix64's finalizer."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def in_validation(ordinals, seed, fraction):
    """Tells which samples, by their index in the inputs, are for validation."""
    key = mixed(np.array([seed], np.uint64))
    return (mixed(np.asarray(ordinals, np.uint64) + key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def save(path, value):
    templates.write_whole(path, (json.dumps(value, indent=1) + "\n").encode())  # ASCII: file names need not be valid text


def differences(old, new):
    """Returns the names of the entries in which two plans differ."""
    names = [key for key in new if key != "options" and old[key] != new[key]]
    return names + ["--" + key.replace("_", "-") for key in new["options"] if old["options"].get(key) != new["options"][key]]


class Part:
    """The counts of train or of val."""

    FIELDS = ("samples", "documents", "tokens", "counted", "longest")

    def __init__(self, saved=None):
        saved = saved or {}
        for name in self.FIELDS:
            setattr(self, name, saved.get(name, 0))
        self.lengths = saved.get("lengths", [0] * 64)  # number of documents of 2^i to 2^(i+1)-1 tokens

    def add(self, table, samples):
        tokens = table["tokens"].astype(np.int64)
        self.samples += samples
        self.documents += len(table)
        self.tokens += int(tokens.sum())
        self.counted += int(table["counted"].sum())
        self.longest = max(self.longest, int(tokens.max()))
        for i, count in enumerate(np.bincount(np.frexp(tokens)[1] - 1)):
            self.lengths[i] += int(count)

    def saved(self):
        return {**{name: getattr(self, name) for name in self.FIELDS}, "lengths": self.lengths}


class RejectedFile:
    """Writes rejected.jsonl: every sample that was left out, with its file, line and reason. Prints some of them."""

    def __init__(self, folder, state, say):
        self.path, self.say = os.path.join(folder, "rejected.jsonl"), say
        self.reasons = collections.Counter(state.get("reasons", {}))
        size = state.get("rejected_bytes", 0)
        if size and not os.path.exists(self.path + ".tmp"):  # already renamed
            os.replace(self.path, self.path + ".tmp")
        self.file = open(self.path + ".tmp", "r+b" if size else "w+b")
        self.file.truncate(size)
        self.file.seek(size)

    def add(self, file, number, reason, detail):
        self.reasons[reason] += 1
        line = {"file": file, "line": number, "reason": reason, "detail": detail}
        self.file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
        if self.reasons[reason] <= SHOWN:
            self.say(f"{file}:{number}: {reason}: {detail}")
        if self.reasons[reason] == SHOWN + 1:
            self.say(f"more samples with {reason!r} are only counted here, and listed in {os.path.basename(self.path)}")

    def bad(self):
        return sum(count for reason, count in self.reasons.items() if reason not in records.ACCEPTABLE)

    def state(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        return {"reasons": dict(self.reasons), "rejected_bytes": self.file.tell()}

    def publish(self):
        self.file.close()
        if self.reasons:
            os.replace(self.path + ".tmp", self.path)
        elif os.path.exists(self.path + ".tmp"):
            os.remove(self.path + ".tmp")


# ---- the folder --------------------------------------------------------------------------------------------------------------
class Folder:
    """The output folder and its prepare.json; one run at a time holds it."""

    def __init__(self, path):
        self.path, self.json = path, os.path.join(path, "prepare.json")
        os.makedirs(path, exist_ok=True)
        self.lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"{path}: another run writes to this folder; wait for it, or choose another --out") from None

    def ours(self):
        return [name for name in sorted(os.listdir(self.path)) if OURS.fullmatch(name)]

    def clear(self, keep=()):
        for name in self.ours():
            if name not in keep:
                os.remove(os.path.join(self.path, name))

    def replace(self):
        """Moves a complete output in NEW to the folder, prepare.json last. May be repeated after a crash at any point: the old prepare.json
        is removed before the first new file is moved."""
        new = os.path.join(self.path, NEW)
        if os.path.exists(self.json):
            self.clear(keep=["prepare.json"])
            os.remove(self.json)
        for name in sorted(os.listdir(new), key="prepare.json".__eq__):
            path = os.path.join(new, name)
            os.remove(path) if name.endswith(".tmp") else os.replace(path, os.path.join(self.path, name))
        os.rmdir(new)

    def saved(self, name="."):
        """Returns prepare.json of this folder, or of a folder in it; {} if it cannot be read."""
        try:
            with open(os.path.join(self.path, name, "prepare.json"), encoding="utf-8") as file:
                value = json.load(file)
        except (OSError, ValueError):
            value = None
        return value if isinstance(value, dict) else {}

    def begin(self, plan, force, overwrite):
        """Returns prepare.json of a begun run with this plan; {} for a new one."""
        if force:
            self.clear()
            shutil.rmtree(os.path.join(self.path, NEW), ignore_errors=True)
        if not os.path.exists(self.json):
            foreign = [name for name in self.ours() if name.endswith(".bin")]
            if foreign:
                raise Failure(f"{self.path}: holds {foreign[0]} but no prepare.json; choose another --out, or give --force to remove these files")
            self.clear()
            return {}
        saved = self.saved()
        try:
            different = differences(saved["plan"], plan)
            saved["status"]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Failure(f"{self.json}: cannot be parsed; --overwrite replaces it") from None
        if not different:
            return saved
        if saved["status"] == "refused" or overwrite:  # the earlier run wrote nothing
            self.clear()
            return {}
        raise Failure(f"{self.path}: was begun with other {', '.join(different)}; --overwrite replaces it, or choose another --out")


# ---- the run -----------------------------------------------------------------------------------------------------------------
class Run:
    """`settings`: paths, out, options (encode.Options), workers, val_fraction, seed, shard_tokens, skip_bad (None: refuse, -1: any
    number), force, overwrite, code_tests (None, or the documents of code_tests.plan). `progress(done bytes, tokens)` is called between batches, `say(line)` for messages."""

    def __init__(self, settings, progress, say):
        self.settings, self.progress, self.say = settings, progress, say
        self.parts, self.writers, self.kind, self.notes = {}, {}, None, collections.Counter()
        self.folder = self.goal = None

    def close(self):
        """Lets other runs into the folder."""
        for folder in {self.folder, self.goal} - {None}:
            os.close(folder.lock)

    def plan(self):
        """Returns everything that the output depends on."""
        s, o = self.settings, self.settings.options
        template = workers.encoder.template
        return {
            "inputs": [inputs.identity(path) for path in s.paths],
            "tokenizer": {"name": workers.encoder.name, "fingerprint": workers.encoder.fingerprint,
                          "special tokens": workers.encoder.special, "library": encode.library_version()},
            "chat template": template and encode.text_crc(template.text),
            "options": {**{name: value for name, value in vars(o).items() if name not in ("tokenizer", "chat_template", "now", "summary_timeout")},
                        "val_fraction": s.val_fraction, "seed": s.seed, "shard_tokens": s.shard_tokens,
                        "with_tests": True if s.code_tests else None,
                        "separator": None if s.separator is None else s.separator.decode()},
        }

    def run(self):
        s = self.settings
        folder = self.folder = self.goal = Folder(s.out)
        if folder.saved(NEW).get("status") == "complete":  # there was a crash during the move
            folder.replace()
            self.say(f"{s.out}: the output of an earlier --overwrite was complete and is now in place")
        if s.overwrite and os.path.exists(folder.json) and folder.saved().get("status") not in ("running", "read", "refused"):
            s.out = os.path.join(s.out, NEW)
            folder = self.folder = Folder(s.out)
        saved_now = None if s.force else folder.saved().get("now")  # a continued run keeps the time that its template reads
        now = datetime.datetime.fromisoformat(saved_now) if saved_now else datetime.datetime.now().replace(microsecond=0)
        pool = workers.Pool(s.workers, lambda: encode.Encoder(s.options, now), close=[folder.lock for folder in {self.folder, self.goal}])
        try:
            self.made = folder.begin(self.plan(), s.force, s.overwrite)
            if self.made.get("status") == "complete":
                self.say(f"{s.out}: is complete for these inputs and options; nothing to do")
                self.restore(self.made["result"])
                self.tokenizer_files()
                return
            template = workers.encoder.template
            self.made = self.made or {"status": "running", "plan": self.plan(), "state": {"position": inputs.START, "samples": 0},
                                      "now": now.isoformat() if template and template.tells_time else None}
            self.restore(self.made["state"])
            self.rejected = RejectedFile(s.out, self.made["state"], self.say)
            if self.made["status"] == "running":
                self.read(pool)
        finally:
            pool.close()
        self.finish()

    def restore(self, state):
        self.parts = {name: Part(part) for name, part in state.get("parts", {}).items()}
        self.kind, self.notes = state.get("kind"), collections.Counter(state.get("notes", {}))
        self.reasons = state.get("reasons", {})
        for name, saved in state.get("writers", {}).items():
            self.writers[name] = self.writer(name, saved)

    def writer(self, name, saved=None):
        e = workers.encoder
        return shards.ShardWriter(self.settings.out, name, self.kind, e.own_ids, e.fingerprint, e.name, self.settings.shard_tokens, saved,
                                  lambda: shards.fingerprint(template.content) if (template := self.rendered()) else 0, e.vocabulary)

    def read(self, pool):
        state = self.made["state"]
        position, ordinal = state["position"], state["samples"]
        if position != inputs.START:
            self.say(f"going on at {self.settings.paths[position['file']]}:{position['number'] + 1}")
        last = time.monotonic()
        s = self.settings
        batches = (code_tests.batches(s.paths, position, s.separator, s.code_tests) if s.code_tests else
                   inputs.batches(s.paths, position, s.separator, s.options.format, s.options.columns))
        for batch, result in pool.results(batches, CHECKED):
            if result.fatal:
                if ordinal < CHECKED:
                    self.rejected.file.close()
                    self.folder.clear()
                raise Failure(result.fatal)
            self.take(batch, result, ordinal)
            ordinal, position = ordinal + len(batch.rows), batch.end
            self.progress(batch.done, sum(part.tokens for part in self.parts.values()))
            if any(writer.old for writer in self.writers.values()) or time.monotonic() - last > STATE_SECONDS:
                self.save_state("running", position, ordinal)
                last = time.monotonic()
        for writer in self.writers.values():
            writer.close()
        self.save_state("read", position, ordinal)

    def take(self, batch, result, ordinal):
        """Adds a batch's samples, in order, to train or val."""
        rejected = {row: (reason, detail) for row, reason, detail in result.rejected}
        if self.kind is None and result.kinds:
            self.kind = result.kinds[0]
        for row, kind in zip(result.rows, result.kinds):
            if kind != self.kind:
                rejected[row] = (records.OTHER_KIND, f"is of {shards.KINDS[kind]}, the first sample was of {shards.KINDS[self.kind]}; "
                                                     "prepare them apart")
        for row in sorted(rejected):
            self.rejected.add(batch.file, batch.rows[row], *rejected[row])
        self.notes.update({name: count for name, count in result.notes.get(self.kind, {}).items()
                           if name in self.notes or not name.startswith("column ") or len(self.notes) < MOST_NOTES})
        validation = in_validation(np.arange(len(batch.rows)) + ordinal, self.settings.seed, self.settings.val_fraction)
        goal = [None if row in rejected else "val" if validation[row] else "train" for row in result.rows]
        ends = np.cumsum(result.documents)
        first = 0
        while first < len(goal):  # runs of samples that go to the same place, train or val
            last = first + 1
            while last < len(goal) and goal[last] == goal[first]:
                last += 1
            if goal[first]:
                self.add(goal[first], result, result.documents[first:last], int(ends[first]) - result.documents[first], int(ends[last - 1]))
            first = last

    def add(self, name, result, documents, begin, end):
        if name not in self.writers:
            self.writers[name], self.parts[name] = self.writer(name), Part()
        table = result.table[begin:end].copy()
        first = int(table["begin"][0])
        last = int(table["begin"][-1] + table["tokens"][-1])
        table["begin"] -= np.uint64(first)
        values = result.values[first:last] if self.kind == shards.ADVANTAGES else None
        if self.kind in (shards.LABELS, shards.DOCUMENTS):  # a pair becomes two answers, long reasoning several rounds
            documents = [1] * len(table)
        columns = result.columns[begin:end] if self.kind == shards.PROMPTS else None
        self.writers[name].add(result.ids[first:last], result.counts[first:last], table, documents, values, columns)
        self.parts[name].add(table, len(documents))

    def save_state(self, status, position, ordinal):
        self.made["status"] = status
        self.made["state"] = {"position": position, "samples": ordinal, **self.summary(),
                              "writers": {name: writer.state() for name, writer in self.writers.items()}, **self.rejected.state()}
        save(self.folder.json, self.made)
        for writer in self.writers.values():
            writer.forget_old()

    def summary(self):
        return {"kind": self.kind, "parts": {name: part.saved() for name, part in sorted(self.parts.items())}, "notes": dict(self.notes)}

    # ---- the end ------------------------------------------------------------------------------------------------------------
    def finish(self):
        """Refuses the run, or renames all files to their final names. May be repeated after a crash at any point."""
        s, out = self.settings, self.settings.out
        if [inputs.identity(path) for path in s.paths] != self.made["plan"]["inputs"]:
            raise Failure(f"{out}: an input changed while it was read; run again with --overwrite")
        self.reasons, bad = dict(self.rejected.reasons), self.rejected.bad()
        if self.made["status"] != "publishing":
            if bad and (s.skip_bad is None or 0 <= s.skip_bad < bad):
                self.refuse(f"{bad} bad sample{'s' * (bad != 1)}, listed in {self.rejected.path}; mend the input, or --skip-bad leaves them out")
            if "train" not in self.parts:
                self.refuse(f"no sample for training in {len(s.paths)} file{'s' * (len(s.paths) != 1)}"
                            + ("; lower --val-fraction" if "val" in self.parts else ""))
            self.tokenizer_files()
            self.made["status"] = "publishing"
            save(self.folder.json, self.made)
        names = [f"{name}-{i:05d}.bin" for name, writer in sorted(self.writers.items()) for i in range(writer.shard)]
        for name in names:
            path = os.path.join(out, name)
            if os.path.exists(path + ".tmp"):
                os.replace(path + ".tmp", path)
        self.rejected.publish()
        result = {**self.summary(), "reasons": self.reasons, "shards": names}
        self.made = {"status": "complete", "plan": self.made["plan"], "now": self.made["now"], "result": result}
        save(self.folder.json, self.made)
        self.folder.clear(keep=[*names, "prepare.json", "rejected.jsonl" if self.reasons else "", *TOKENIZER])
        if self.folder is not self.goal:
            self.goal.replace()

    def rendered(self):
        """Returns the template if it rendered a sample that was read so far; else None."""
        return workers.encoder.template if any(name.startswith("format conversational") for name in self.notes) else None

    def tokenizer_files(self):
        """Writes the template that rendered samples, and tokenizer.tok, with which the C program encodes, decodes and ends turns."""
        path, template = (os.path.join(self.settings.out, name) for name in TOKENIZER)
        encoder, options, rendered = workers.encoder, self.settings.options, self.rendered()
        if os.path.exists(path):
            return
        if rendered:
            templates.write_whole(template, rendered.content)
        try:
            remarks = tokenizer_file.write_tokenizer_file(path, options.tokenizer, encoder.template and encoder.template.text,
                                                          encoder.template_arguments, now=encoder.now, rendered=bool(rendered),
                                                          eos=options.eos_token)
        except Exception as error:  # the C program does not support every tokenizer
            remarks = [f"tokenizer.tok was not written: {' '.join(str(error).split())}"]
        for remark in remarks:
            self.say(remark)

    def refuse(self, why):
        """Refuses the run, but keeps its files under temporary names: with --skip-bad the same command only renames them."""
        self.made["status"] = "refused"
        save(self.folder.json, self.made)
        self.rejected.publish()
        raise Failure(why)
