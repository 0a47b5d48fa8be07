#!/usr/bin/env python3
"""Turns text, conversations and preferences (JSON, CSV, Parquet, Arrow) into shards of tokens that `train --data` reads.

    prepare.py --tokenizer FOLDER --out FOLDER FILE...   writes FOLDER/train-00000.bin, ..., FOLDER/tokenizer.tok
    prepare.py --tokenizer FOLDER --show 3 FILE...       shows samples with the trained tokens marked, and writes nothing
    prepare.py inspect SHARD...                          verifies shards completely

Needs tokenizers, jinja2 and numpy; pyarrow for Parquet and Arrow. data/README.md has the formats, every option, and the guarantees.
"""

import argparse
import dataclasses
import errno
import glob
import importlib.util
import itertools
import json
import os
import re
import shlex
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads are off: a run has several processes
PROGRAM = os.environ.get("STREAMBP_PREPARE", "prepare.py")  # a wheel says: streambp prepare
TRAIN = PROGRAM.removesuffix(" prepare") if "STREAMBP_PREPARE" in os.environ else "./train"


def line_of(message):
    """Returns the text as one line without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", " ".join(str(message).split()))


def end(message, status=1):
    """Prints one line to stderr and exits."""
    print(f"{PROGRAM}: {line_of(message)}", file=sys.stderr)
    sys.exit(status)


missing = [name for name in ("tokenizers", "jinja2", "numpy") if importlib.util.find_spec(name) is None]
if missing:
    end(f"{sys.executable} has no {', '.join(missing)}: pip install tokenizers jinja2 numpy")

import jinja2
import numpy as np

import code_tests
import encode
import hub
import inputs
import records
import run
import shards
import templates
import workers

if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < (3, 1, 6):
    end(f"jinja2 {jinja2.__version__} has an unsafe sandbox, and chat templates are untrusted programs: pip install -U jinja2")


# ---- the command line --------------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    def error(self, message):
        end(f"{message}; see {PROGRAM} --help", 2)


def number(kind, low, high, what):
    def parse(text):
        try:
            value = kind(float(text)) if kind is int and re.fullmatch(r"\d+e\d+", text) else kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
        return value
    return parse


def renames(text):
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    if not all(map(all, pairs)) or any(len({*names}) < len(pairs) for names in zip(*pairs)):
        raise argparse.ArgumentTypeError(f"'{text}' is not OURS=NAME,..., each once")
    return dict(pairs)


def read_arguments(argv):
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    count = number(int, 1, 1 << 40, "a whole number of 1 or more")
    add("files", nargs="*", metavar="FILE", help="JSON, CSV, text (*.json, *.csv, *.txt, also *.gz, *.xz), *.parquet, *.arrow, or folders of these; "
        "or hf://datasets/OWNER/NAME, maybe with /FOLDER, /FILE or /SPLIT")
    add("--tokenizer", metavar="PATH", help="a tokenizer's folder, its tokenizer.json, or a name of the hub that is in Hugging Face's cache")
    add("--out", metavar="FOLDER", help="where the shards go")
    add("--format", choices=records.FORMATS, default="auto", help="what the objects are; auto tells by their keys")
    add("--columns", type=renames, metavar="OURS=NAME,...", help="columns that have other names: prompt=question,answer=solution")
    add("--splits", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="of folders (default train), or all: every file")
    add("--separator", type=str.encode, metavar="LINE", help="line between the documents of a text, '' for blank ones (default: it is one)")
    add("--with-tests", action="store_true", help="of source code: a file and its tests, found by name, are one document, with --separator "
        "between them (default <|codetestpair|>)")
    add("--chat-template", metavar="FILE", help="a Jinja file in place of the tokenizer's own template")
    add("--template-arguments", metavar="JSON", default="{}", help='variables for the template, such as {"enable_thinking": false}')
    add("--train-on", metavar="WHAT", default="assistant", help="assistant (the default), all, last (the last turn of the assistant), "
        "completion (everything after the prompt, as TRL; of messages the last turn of the assistant), or roles with commas between "
        "them; the line break after a turn counts with it, as in TRL's assistant_only_loss")
    add("--reasoning", choices=("keep", "drop"), default="keep", help="what is done with a sample whose reasoning is cut off, <think> without "
        "</think> (default keep: as the beginning of a turn that does not end)")
    add("--iterative", action="store_true", help="cut the reasoning of the last turn into segments with summaries, each a sample of its own")
    add("--segment-tokens", type=count, metavar="N", help="with --iterative: most tokens of a segment (default 4096)")
    add("--summary-command", metavar="COMMAND", help="with --iterative: a command that summarises, for rows without a column summaries: a line "
        "of JSON in (question, history, segment), a text as JSON out")
    add("--summary-timeout", type=number(float, 0.01, 1e6, "a number of seconds"), default=600, metavar="SECONDS", help="for its answer (default 600)")
    add("--roles", metavar="NAME,...", default="", help="roles that the template knows in addition to the common roles")
    add("--eos", choices=("yes", "no"), default="yes", help="end texts and completions with the end-of-text token (default yes)")
    add("--eos-token", metavar="TOKEN", help="that token, in place of tokenizer_config.json's")
    add("--max-tokens", type=count, default=0, metavar="N", help="documents of more are long")
    add("--long", choices=("keep", "skip", "truncate"), default="keep", help="what is done with them (default keep: the trainer splits)")
    add("--skip-bad", type=number(int, -1, 1 << 40, "a number of samples"), metavar="N", help="leave out bad samples, at most N")
    add("--val-fraction", type=number(float, 0.0, 0.999, "a fraction below 1"), default=0.0, metavar="F", help="share of the samples "
        "that go to val-*.bin")
    add("--seed", type=number(int, 0, (1 << 64) - 1, "a whole number"), default=0, metavar="N", help="of the choice of these")
    add("--shard-tokens", type=count, default=10**8, metavar="N", help="a shard's size (default 1e8)")
    add("--workers", type=number(int, 1, 1024, "a number of processes"), default=0, metavar="N", help="processes (default: cores, at most 16)")
    add("--show", type=count, metavar="N", help="print N samples and write nothing")
    add("--overwrite", action="store_true", help="replace the output of an earlier run, once the new one is complete")
    add("--force", action="store_true", help="remove what an earlier run left in the folder first, and begin anew")
    # --skip-bad without a number means any number; argparse would take the next file name as its number.
    argv = ["--skip-bad=-1" if a == "--skip-bad" and not re.fullmatch(r"\d+", following) else a
            for a, following in zip(argv, [*argv[1:], ""])]
    if "--separator" in argv[:-1]:  # the value of this option may begin with a dash
        at = argv.index("--separator")
        argv[at:at + 2] = ["--separator=" + argv[at + 1]]
    parser.set_defaults(hub=None)  # the hub name with which the tokenizer was given
    arguments = parser.parse_args(argv)
    for wrong, why in ((not arguments.files, "no FILE to read"), (not arguments.tokenizer, "no --tokenizer"),
                       (not arguments.out and not arguments.show, "no --out FOLDER for the shards (or --show N)"),
                       (arguments.long != "keep" and not arguments.max_tokens, f"--long {arguments.long} needs --max-tokens"),
                       (arguments.with_tests and arguments.format not in ("auto", "text"), "--with-tests takes texts, so --format is text"),
                       (arguments.splits and not any(os.path.isdir(file) or file.startswith("hf:") for file in arguments.files), "--splits needs a folder as FILE; named files are taken"),
                       (not arguments.iterative and arguments.segment_tokens, "--segment-tokens needs --iterative"),
                       (not arguments.iterative and arguments.summary_command, "--summary-command needs --iterative"),
                       (len({*map(os.path.realpath, arguments.files)}) < len(arguments.files), "a FILE is named twice")):
        if wrong:
            parser.error(why)
    arguments.segment_tokens = arguments.segment_tokens or (4096 if arguments.iterative else None)
    return arguments


def options_of(a):
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", a.tokenizer) and not os.path.exists(a.tokenizer):
        a.hub, a.tokenizer = a.tokenizer, templates.hub_snapshot(a.tokenizer)
        if not a.tokenizer:
            end(f"--tokenizer {a.hub}: does not exist, nor is it in Hugging Face's cache; type: hf download {a.hub} --local-dir "
                f"{a.hub.split('/')[1]}")
    if not os.path.exists(encode.tokenizer_json(a.tokenizer)):
        end(f"{encode.tokenizer_json(a.tokenizer)}: does not exist; --tokenizer names a folder with a tokenizer.json")
    return encode.Options(**{option.name: getattr(a, option.name) for option in dataclasses.fields(encode.Options) if option.name in vars(a)})


# ---- output of a run -----------------------------------------------------------------------------------------------------------
class Progress:
    """A progress bar on stderr, if stderr is a terminal; other lines are printed above it."""

    def __init__(self, total):
        self.total, self.begin, self.first, self.last = total, time.monotonic(), None, 0.0
        self.shown = sys.stderr.isatty()

    def __call__(self, done, tokens):
        now = time.monotonic()
        self.first = done if self.first is None else self.first
        if not self.shown or (now - self.last < 0.2 and done < self.total):
            return
        self.last = now
        rate = (done - self.first) / max(now - self.begin, 1e-9)
        left = f"{(self.total - done) / rate:.0f} s left" if rate else ""
        share = done / max(self.total, 1)
        print(f"\r\033[K[{'#' * int(30 * share):30}] {100 * share:3.0f} %  {rate / 1e6:.1f} MB/s  {tokens:,} tokens  {left}",
              end="", file=sys.stderr, flush=True)

    def clear(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def say(self, line):
        self.clear()
        print(f"note: {line_of(line)}", file=sys.stderr)


def detected(notes):
    """Prints the formats found, and the columns used, passed on and left out; with a count if they are not in every sample."""
    samples = sum(count for name, count in notes.items() if name.startswith("format "))

    def named(prefix):
        found = [(name[len(prefix):], count) for name, count in sorted(notes.items()) if name.startswith(prefix)]
        shown = [re.sub(r"\s+", " ", name)[:60] + (f" ({count:,})" if count != samples else "") for name, count in found[:8]]
        return ", ".join(shown) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    parts = [f"format: {named('format ')}"]
    for what, prefix in (("columns", "used"), ("to reward commands", "passed"), ("left out", "left out")):
        columns = named(f"column {prefix} ")
        parts += [f"{what}: {columns}"] * bool(columns)
    return "; ".join(parts)


def report(work, arguments):
    """Prints the totals of the written shards, and the next command."""
    kind = work.kind or 0
    for name, part in sorted(work.parts.items()):
        print(f"{name}: {part.samples:,} samples, {part.documents:,} documents ({shards.KINDS[kind]}), {part.tokens:,} tokens, of them "
              f"{part.counted:,} count ({100 * part.counted / part.tokens:.1f} %), longest document {part.longest:,} tokens")
    lengths = np.sum([part.lengths for part in work.parts.values()], axis=0)
    used = np.flatnonzero(lengths)
    for i in range(used[0], used[-1] + 1):
        print(f"  {1 << i:>12,} to {(2 << i) - 1:>13,} tokens {lengths[i]:>12,} {'#' * int(np.ceil(40 * lengths[i] / lengths.max()))}")
    noted = lambda prefix: [(name[len(prefix):], count) for name, count in sorted(work.notes.items()) if name.startswith(prefix)]
    print(detected(work.notes))
    for key, count in noted("unused "):
        print(f"{key!r} of {count:,} samples is not used")
    if kind != shards.PROMPTS:
        tokens, counted = (sum(getattr(part, name) for part in work.parts.values()) for name in ("tokens", "counted"))
        turns = [", ".join(f"{count:,} of {role}" for role, count in noted(what)) or "none" for what in ("masked ", "counts ")]
        print(f"masked: {tokens - counted:,} of {tokens:,} tokens" + f"; turns: {turns[0]} (counting: {turns[1]})" * (turns != ["none"] * 2))
    for reason, many in sorted(work.reasons.items()):
        print(f"left out: {many:,} of {reason!r}; see {os.path.join(arguments.out, 'rejected.jsonl')}")
    later = "does not split these answers, but has --long truncate" if kind in (shards.PAIRS, shards.GROUPS, shards.LABELS) else "splits them"
    for note, text in (
            ("long", f"are longer than --max-tokens {arguments.max_tokens} and were kept: the trainer {later}"),
            ("truncated", f"were cut to {arguments.max_tokens} tokens"),
            ("straddles", "have a token that begins in the prompt and ends in what is trained on; it does not count. Where prompts end with a space, "
                          "move it to the completions"),
            ("empty", "have an empty turn of the assistant, which teaches to say nothing")):
        if work.notes.get(note):
            print(f"{work.notes[note]:,} documents {text}")
    if kind == shards.LABELS and not (work.notes.get("label True") and work.notes.get("label False")):
        print("all labels are equal, so there is no preference; add answers with the other label")
    for text, count in noted("told "):
        print(f"{count:,} sample{'s' * (count != 1)}: {text}")
    hint(work, arguments, kind)


UNSCALED = ("gpt2", "phi3")  # families whose positions train does not scale
NEXT = {  # for each kind: options, name of a step's units, option and number of units a step, learning rate
    shards.DOCUMENTS: ("", "documents", "--samples", 16, "1e-5"),
    shards.PAIRS: (" --objective dpo", "pairs", "--samples", 16, "5e-7"),
    shards.LABELS: (" --objective kto", "documents", "--samples", 16, "5e-7"),
    shards.GROUPS: (" --objective grpo", "groups", "--samples", 8, "1e-6"),
    shards.PROMPTS: (" --objective grpo --rollout --reward-command COMMAND", "prompts", "--batch", 8, "1e-6"),
    shards.ADVANTAGES: (" --objective ppo", "documents", "--samples", 16, "1e-6")}


def hint(work, arguments, kind):
    """Prints the next command, with at least 10 steps an epoch if there are enough samples."""
    folder = templates.folder_of(arguments.tokenizer)
    model = arguments.hub or folder if os.path.exists(os.path.join(folder, "config.json")) else "MODEL"
    objective, samples, option, most, rate = NEXT[kind]
    pattern = lambda part: shlex.quote(os.path.join(glob.escape(arguments.out), f"{part}-*.bin"))
    validation = f" --val-data {pattern('val')}" if "val" in work.parts else ""
    needed = max(part.longest for part in work.parts.values()) - 1
    needed += 256 * (kind == shards.PROMPTS)  # default of the trainer's --max-new-tokens
    length, (family, positions, unscaled) = max(1024, -(-needed // 1024) * 1024), model_positions(folder)
    beyond = 0 < positions < needed
    factor = 0 if family in UNSCALED or not beyond else -(-needed // unscaled)
    length = min(length, factor * unscaled or positions or length)
    scaling = f" --rope-scaling yarn,factor={factor}" * (factor > 0)
    step = max(1, min(most, (number := work.parts["train"].samples) // 10))
    steps = -(-number // step)
    few = "" if steps >= 10 else f", which is few: a step updates the weights once; add data, or --epochs {-(-10 // steps)}"
    print(f"an epoch is {steps:,} optimizer step{'s' * (steps != 1)} of {step} {samples[:-1] if step == 1 else samples}{few}")
    often = max(1, min(steps // 4, 500))
    print(f"next: {TRAIN} --model {shlex.quote(model)}{objective} --data {pattern('train')}{validation} "
          f"--seq-len {length}{scaling} {option} {step} --lr {rate} --save-every {often} --out run")
    tokens = np.concatenate([shards.Shard(os.path.join(arguments.out, name)).table["tokens"].astype(np.int64)
                             for name in work.made["result"]["shards"] if name.startswith("train")])
    cut = lambda length: np.maximum(tokens - length - 1, 0)
    short = positions if beyond else next(1 << i for i in itertools.count(10) if (cut(1 << i) == 0).mean() >= 0.99)
    if kind != shards.PROMPTS and cut(short).any():
        lost = cut(short)
        print((f"{family} has {positions:,} positions, which cannot be scaled: " if short == length else f"or --seq-len {short}: ") +
              f"{np.count_nonzero(lost):,} of {len(tokens):,} documents are longer, of which --long truncate would cut {lost.sum():,} of "
              f"{tokens.sum():,} tokens ({100 * lost.sum() / tokens.sum():.1f} %)")


def model_positions(folder):
    """Returns (model_type, max_position_embeddings, max_position_embeddings before scaling) of the model in the tokenizer's folder; 0: unknown."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config = config.get("text_config", config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope, positions = rope.get("full_attention", rope), int(config.get("max_position_embeddings", config.get("n_positions", 0)))
        linear = rope.get("rope_type", rope.get("type")) == "linear"
        return config.get("model_type"), max(positions, 0), max(int(positions / rope["factor"] if linear else
                                                                    rope.get("original_max_position_embeddings", positions)), 1)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None, 0, 1


# ---- --show --------------------------------------------------------------------------------------------------------------------
def pieces(encoder, ids, counts):
    """Yields (text, counts?) for runs of tokens. A decoder may treat a text's first token differently, so a run is decoded together
    with the run before it, if the two texts can be separated."""
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(ids)]
    decode = lambda a, b: encoder.tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False)
    for i in range(len(edges) - 1):
        begin, until, before = edges[i], edges[i + 1], edges[max(i - 1, 0)]
        text, lead = decode(before, until), decode(before, begin)
        yield (text[len(lead):] if text.startswith(lead) else decode(begin, until)), bool(counts[begin])


def show(arguments):
    encoder = encode.Encoder(options_of(arguments))
    marks = ("\033[1;32m", "\033[0m") if sys.stdout.isatty() else ("\u00ab", "\u00bb")
    said, shown = None, 0
    batches = (code_tests.batches(arguments.files, inputs.START, arguments.separator, arguments.code_tests) if arguments.code_tests else
               inputs.batches(arguments.files, inputs.START, arguments.separator, arguments.format, arguments.columns))
    for batch, (line, row) in itertools.islice(((batch, row) for batch in batches for row in batch.rows), arguments.show):
        where = f"{batch.file}:{line}"
        try:
            record, documents = encoder.understood(workers.parsed(row))
        except records.Rejected as rejected:
            print(f"--- {where}: left out: {rejected}\n")
            continue
        kind, shown, found = record.kind, shown + 1, detected(dict.fromkeys(record.noted(), 1))
        if found != said:
            print(said := found)
        for text in dict.fromkeys(workers.tell(record, documents)):
            print(f"{where}: {text}")
        for i, document in enumerate(documents):
            rounds = f" round {i + 1} of {len(documents)}" if kind == shards.DOCUMENTS and len(documents) > 1 else ""
            which = {shards.PAIRS: (" chosen", " rejected")[i % 2], shards.PROMPTS: " prompt alone",
                     shards.LABELS: " desirable" if document.reward else " undesirable",
                     shards.GROUPS: f" completion {i + 1}, reward {document.reward:g}"}.get(kind, rounds)
            prompt = f", {document.prompt} of the prompt" if document.prompt else ""
            print(f"--- {where}{which}: {len(document.ids)} tokens, {int(document.counts.sum())} count{prompt}")
            for text, counts in pieces(encoder, document.ids, document.counts):
                text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c.group()):02x}", text)
                print(marks[0] + text + marks[1] if counts else text, end="")
            print("\n")
            encoder.check(document)
    if not shown:
        end("no sample is shown: none could be read")


# ---- inspect -------------------------------------------------------------------------------------------------------------------
def inspect(paths):
    if not paths or any(path.startswith("-") for path in paths):
        end("inspect takes names of shards", 2)
    bad = 0
    for path in paths:
        try:
            shard = shards.Shard(path)
            shard.verify()
        except (shards.ShardError, OSError) as error:
            print(f"{PROGRAM}: {path}: cannot be read: {error.strerror}" if isinstance(error, OSError) else f"{PROGRAM}: {error}", file=sys.stderr)
            bad += 1
            continue
        table = shard.table
        print(f"{path}: whole; version {shard.version}, {shard.holds}, {shard.documents:,} documents, {shard.tokens:,} tokens of "
              f"{shard.id_bytes} bytes, {shard.counted:,} count ({100 * shard.counted / shard.tokens:.1f} %), longest {shard.longest:,}, "
              f"shortest {int(table['tokens'].min()):,}")
        made = f"tokenizer.json of {shard.tokenizer >> 32:,} bytes, crc32 {shard.tokenizer & 0xffffffff:08x}" if shard.tokenizer else "bytes"
        rendered = f", chat template of {shard.chat_template >> 32:,} bytes, crc32 {shard.chat_template & 0xffffffff:08x}" * bool(shard.chat_template)
        print(f"  tokenizer {shard.name!r}, vocabulary {shard.vocabulary:,}, {made}{rendered}; {shard.file_bytes:,} bytes")
        if shard.kind == shards.PAIRS:
            print(f"  {shard.documents // 2:,} pairs")
        if shard.kind == shards.LABELS:
            print(f"  {int(table['reward'].sum()):,} desirable")
        if shard.kind == shards.GROUPS:
            sizes = np.bincount(table["group"].astype(np.int64))
            print(f"  {len(sizes):,} groups of {sizes.min():,} to {sizes.max():,} documents, rewards {table['reward'].min():g} to "
                  f"{table['reward'].max():g}")
        if table["prompt"].any():
            print(f"  prompts in {np.count_nonzero(table['prompt']):,} documents, of {table['prompt'].mean():.1f} tokens in the mean, the "
                  f"longest {int(table['prompt'].max()):,}")
        if shard.columns_at:
            print(f"  other columns, of at most {shard.longest_columns:,} bytes: {', '.join(sorted(set().union(*shard.columns()))[:20])}")
        if shard.values is not None:
            print(f"  advantages {shard.values.min():g} to {shard.values.max():g}, in the mean {shard.values.mean(dtype=np.float64):.4g}")
    return 1 if bad else 0


# ---- a run -----------------------------------------------------------------------------------------------------------------------
def prepare(arguments):
    progress = Progress(sum(map(os.path.getsize, arguments.files)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = argparse.Namespace(**{**vars(arguments), "paths": arguments.files, "options": options_of(arguments),
                                     "workers": arguments.workers or min(cores, 16)})
    work = run.Run(settings, progress, progress.say)
    try:
        work.run()
    finally:
        progress.clear()
        work.close()
    report(work, arguments)


def fetched(path, splits, say):
    """Returns where a data set of the hub is; puts the split that its name ends with into `splits`."""
    local, split = hub.fetch(path)
    splits[local] = splits.get(local, []) + [split] * bool(split)
    say(f"{path}: is {local}")
    return local


def main(argv):
    if argv[:1] == ["inspect"]:
        return inspect(argv[1:])
    arguments = read_arguments(argv)
    say, splits = lambda line: print(f"note: {line_of(line)}", file=sys.stderr), {}
    try:
        given = [*dict.fromkeys(fetched(path, splits, say) if path.startswith("hf:") else path for path in arguments.files)]
        arguments.files = inputs.find(given, *(("text", say, ["all"]) if arguments.with_tests else (arguments.format, say, arguments.splits, splits)))
        arguments.code_tests = None
        if arguments.with_tests:
            arguments.files = code_tests.sources(arguments.files, given, say)
            arguments.code_tests, line = code_tests.plan(arguments.files)
            print(line)
        show(arguments) if arguments.show else prepare(arguments)
    except (run.Failure, inputs.InputFailure, encode.SetupFailure, encode.MaskFailure, workers.WorkerFailure, shards.ShardError,
            ValueError) as error:
        end(error)
    except OSError as error:
        kept = "; what was done is kept, make room and give the same command" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        end(f"{error.filename or arguments.out}: {error.strerror or error}{kept}")
    except KeyboardInterrupt:
        end("interrupted; the same command continues", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
