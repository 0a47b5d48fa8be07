"""Runs contenders and keeps their results: one file for each process and length below OUT/cases, which --resume
reuses."""

import datetime
import hashlib
import json
import os
import statistics
import sys

import machine
import tensors
from contenders import MEMORY_ERROR, Case, Ours

LONGEST = 1.05  # the longest length is known within this factor
MOST_TOKENS = 1 << 24


def say(text):
    print(text, file=sys.stderr, flush=True)


def write_json(path, value):
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.replace(path + ".part", path)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


class Runner:
    def __init__(self, options, contenders):
        self.options = options
        self.contenders = contenders
        self.folder = os.path.join(options.out, "cases")
        self.gradients = os.path.join(options.out, "gradients")
        self.names = tensors.gradient_names(options.config)
        os.makedirs(self.folder, exist_ok=True)
        os.makedirs(self.gradients, exist_ok=True)

    # ---- one process ------------------------------------------------------------------------------------------------
    def key(self, contender, repeat, limit):
        """Returns a key of everything that a result depends on; results with another key are not reused."""
        o = self.options
        return {
            "model": o.model_key,
            "tokens_seed": o.seed,
            "batch": o.batch,
            "dtype": o.dtype,
            "device": o.device_name,
            "repeat": repeat,
            "chunk": contender.chunk,
            "logits_chunk": o.logits_chunk,
            "threads": o.threads,
            "memory_limit": limit,
            "programs": {os.path.basename(path): digest(path) for path in contender.command_needs},
        }

    def path(self, contender, T, what):
        return os.path.join(self.folder, f"{contender.name}-{T}-{what}.json".replace("/", "_").replace(" ", "-"))

    def kept(self, contender, T, what, repeat, limit):
        """Returns the record that --resume finds, or None. Failed or slow cases run again."""
        try:
            with open(self.path(contender, T, what), encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, json.JSONDecodeError):
            return None
        settled = record["result"].get("error") in (None, MEMORY_ERROR)
        return (
            record if self.options.resume and settled and record["key"] == self.key(contender, repeat, limit) else None
        )

    def run(self, contender, case):
        if case.grads_out and os.path.exists(case.grads_out):
            os.remove(case.grads_out)  # left by a contender that failed after writing it
        return contender.run(case, self.options.timeout)

    def process(self, contender, lengths, what, repeat, limit, with_gradients=False):
        """Returns records of these lengths: kept ones, and those of one new process for the others."""
        records = {T: self.kept(contender, T, what, repeat, limit) for T in lengths}
        missing = [T for T in lengths if records[T] is None]
        if not missing:
            return records
        self.provide_tokens(max(missing))
        grads_out = (
            os.path.join(self.gradients, "contender.safetensors")
            if with_gradients and missing[0] == lengths[0]
            else None
        )
        case = Case(missing, repeat, grads_out, ",".join(self.names), limit)
        with machine.gpu_watched(self.options.on_gpu) as gpu:
            found = self.run(contender, case)
        for T in missing:
            record = {
                "contender": contender.name,
                "seq_len": T,
                "what": what,
                "key": self.key(contender, repeat, limit),
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "gpu": gpu,
                "result": found[T],
            }
            if grads_out and T == missing[0] and not found[T].get("error"):
                record["gradients"] = self.held_against_reference(contender, grads_out)
            write_json(self.path(contender, T, what), record)
            records[T] = record
            self.tell(contender, T, what, found[T])
        return records

    def tell(self, contender, T, what, result):
        text = result.get("error")
        if not text:
            seconds = statistics.median(result["seconds"][1:] or result["seconds"])
            text = f"{result['peak_bytes'] / 2**30:.2f} GiB, loss {result['loss']:.6f}" + (
                f", {seconds:.3g} s" if self.options.on_gpu else ""
            )
        say(f"{what}: {contender.name}, T = {T}: {text}")

    def provide_tokens(self, longest):
        count = self.options.batch * longest + 1
        path = self.options.tokens_file
        width = 2 if self.options.config["vocab_size"] <= 1 << 16 else 4
        if not os.path.exists(path) or os.path.getsize(path) < 1024 + width * count:
            tensors.write_tokens(path, count, self.options.config["vocab_size"], self.options.seed)

    # ---- gradients --------------------------------------------------------------------------------------------------
    def reference(self):
        """Writes the gradients of `stream` at the first length, the reference for all. Returns None, or why it failed."""
        contender = self.contenders[0]
        T = self.options.seq_lens[0]
        path = os.path.join(self.gradients, "reference.safetensors")
        kept = os.path.exists(path) and self.kept(contender, T, "reference", 1, self.options.memory_limit)
        if kept:
            return None
        self.provide_tokens(T)
        case = Case([T], 1, path, ",".join(self.names), self.options.memory_limit)
        result = self.run(contender, case)[T]
        write_json(
            self.path(contender, T, "reference"),
            {"key": self.key(contender, 1, self.options.memory_limit), "result": result},
        )
        return result.get("error")

    def held_against_reference(self, contender, path):
        """Returns {parameter: relative L2 difference}, or {"error": ...}; removes the large file."""
        try:
            return tensors.gradient_differences(path, os.path.join(self.gradients, "reference.safetensors"), self.names)
        except (OSError, ValueError, KeyError) as error:
            return {"error": f"gradients of {contender.name} cannot be read: {error}"}
        finally:
            if os.path.exists(path):
                os.remove(path)

    # ---- rounds -----------------------------------------------------------------------------------------------------
    def rounds(self):
        """All records of all rounds. Contenders take turns, and who begins changes from round to round."""
        records = []
        for number in range(self.options.rounds):
            shift = number % len(self.contenders)
            for contender in self.contenders[shift:] + self.contenders[:shift]:
                together = self.options.on_gpu and contender.several_lengths
                for lengths in [self.options.seq_lens] if together else [[T] for T in self.options.seq_lens]:
                    gradients = number == 0 and lengths[0] == self.options.seq_lens[0]
                    records += self.process(
                        contender,
                        lengths,
                        f"round {number + 1}",
                        self.options.repeat,
                        self.options.memory_limit,
                        gradients,
                    ).values()
        return records

    # ---- the longest length -----------------------------------------------------------------------------------------
    def longest(self):
        return [self.longest_of(contender) for contender in self.contenders]

    def longest_of(self, contender):
        """The longest length that is held within --memory-limit: {contender, seq_len, peak_bytes, how, error}."""
        limit = self.options.memory_limit
        most = self.options.config.get("n_positions", MOST_TOKENS)  # a learned table of positions ends somewhere
        if isinstance(contender, Ours):
            T, error = contender.longest(limit)
            if error:
                return {"contender": contender.name, "seq_len": None, "peak_bytes": None, "how": "plan", "error": error}
            result = self.probe(contender, min(T, most))
            return {
                "contender": contender.name,
                "seq_len": min(T, most),
                "peak_bytes": result.get("peak_bytes"),
                "how": "plan and a pass",
                "error": result.get("error"),
            }
        T, peak, error = self.search(contender, most)
        return {"contender": contender.name, "seq_len": T, "peak_bytes": peak, "how": "passes", "error": error}

    def probe(self, contender, T):
        """The result of a single pass; one that took more than the limit has run out of memory."""
        limit = self.options.memory_limit
        found = self.process(contender, [T], "longest", 1, limit)[T]["result"]
        over = self.options.device == "cpu" and not found.get("error") and found["peak_bytes"] > limit
        return {"error": MEMORY_ERROR} if over and not isinstance(contender, Ours) else found

    def search(self, contender, most):
        """(longest length that is held, its peak, None): by doubling, or halving, from the first, then by bisecting."""
        held, peak, refused = None, None, None
        T = min(self.options.seq_lens[0], most)
        while True:
            found = self.probe(contender, T)
            if found.get("error") not in (None, MEMORY_ERROR):
                return held, peak, found["error"]  # nothing is known beyond
            if found.get("error"):
                refused = T
            else:
                held, peak = T, found["peak_bytes"]
            if refused == 1:
                return None, None, "not even one token fits"
            if held == most or (held and refused and refused <= max(LONGEST * held, held + 1)):
                return held, peak, None
            T = next_length(held, refused, most)


def next_length(held, refused, most):
    """The next one to be tried; in multiples of 16 where there are any between the two."""
    if refused is None:
        return min(2 * held, most)
    if held is None:
        return refused // 2
    middle = (held + refused) // 2
    rounded = middle // 16 * 16
    return rounded if rounded > held else middle
