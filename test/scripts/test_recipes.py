"""The recipes: data/iterative.py, data/code_tests.py, rounds of `sample --prompts`, reward commands, and each script at toy size."""
import json
import os
import random
import re
import subprocess
import sys

from checks import TRAIN, WORK, check, close, train

sys.path[:0] = ["data"]

import code_tests
import encode
import iterative
import prepare_samples as samples
import records
import shards

RECIPES = "scripts/recipes"
PLAIN = os.environ.get("TRAIN_PLAIN", TRAIN)  # trains the toys
FOLDERS = samples.tokenizer_folders(os.path.join(WORK, "tokenizers"))
UPPER = f"'{sys.executable}' -c 'import json, sys\nfor line in sys.stdin:\n    row = json.loads(line)\n    print(json.dumps(str(row[\"history\"]) + " \
        "\"+\" + row[\"segment\"][:3].upper()), flush=True)'"


def run(*words, lines=None, **more):
    given = None if lines is None else "".join(json.dumps(line) + "\n" for line in lines)
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, input=given, env={**os.environ, **more})


def prepare(*words):
    return run(sys.executable, "data/prepare.py", *words)


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def texts(folder, part="train", path=None):
    """Returns [(text, what counts in it)] of a folder's documents."""
    decode = encode.tokenizers.Tokenizer.from_file(encode.tokenizer_json(path or FOLDERS["thinking"])).decode
    found = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(part) and name.endswith(".bin"):
            shard = shards.Shard(os.path.join(folder, name))
            for document in shard.table:
                own = slice(int(document["begin"]), int(document["begin"] + document["tokens"]))
                ids, counts = shard.ids[own], shard.counts[own]
                found.append((decode(ids.tolist(), skip_special_tokens=False), decode(ids[counts > 0].tolist(), skip_special_tokens=False)))
    return found


# ---- where reasoning is cut ---------------------------------------------------------------------------------------------------
def cuts():
    draw, plain = random.Random(1), encode.Encoder(encode.Options(FOLDERS["thinking"]))
    for _ in range(100):
        pieces = ["the weather is nice. ", "two and two: 4\n", "hello", " ", "\n\n", "x = 3.5; ", "\u4f60\u597d\u3002", "Why? ", "aaaaaaaaaaaa", "1. "]
        trace = "".join(draw.choices(pieces, k=draw.randint(1, 40)))
        most, encoded = draw.choice((1, 3, 8, 20, 60)), plain.encoding(trace)
        before = [encoded.behind(at)[0] for at in range(len(trace) + 1)].__getitem__
        parts, edges = iterative.cut(trace, most, before), {found.end() for found in iterative.BREAK.finditer(trace)}
        at, right = 0, "".join(parts) == trace and all(parts)
        for part in parts:
            end = at + len(part)
            # a character of several tokens is not cut
            right &= before(end) - before(at) <= most or len(part) == 1
            longest = max((e for e in range(at + 1, len(trace) + 1) if before(e) <= before(at) + most), default=at + 1)
            ends = [e for e in edges if at < e <= longest]
            right &= end == len(trace) or end == (max(ends) if ends else longest)
            at = end
        check("segments give the reasoning, are short, and end where they may", right, repr((trace, most, parts)))


# ---- samples of rounds --------------------------------------------------------------------------------------------------------
TRACE = "The first step. A second one.\nThird: it is four. And the last."
PARTS = ["The first step. ", "A second one.\n", "Third: it is four. ", "And the last."]


def rounds_of(record, name="thinking", tokens=16, **more):
    encoder = encode.Encoder(encode.Options(FOLDERS[name], segment_tokens=tokens, **more))
    _, documents = encoder.encode(record)
    decode = lambda ids: encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    for document in documents:
        encoder.check(document)
    return [(decode(d.ids), decode(d.ids[d.counts > 0])) for d in documents]


def rounds():
    ask, system = {"role": "user", "content": "Q?"}, {"role": "system", "content": "Brief."}
    old = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    field = {"role": "assistant", "reasoning_content": TRACE, "content": "4"}
    inside = {"role": "assistant", "content": f"<think>\n{TRACE}\n</think>\n\n4"}
    given = {"segments": PARTS, "summaries": ["s1", " s2\n", "s3"]}
    turn = lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>\n"
    for last in (field, inside):
        for before in ([], [system], old):
            found = rounds_of({"messages": [*before, ask, last], **given})
            lead = "".join(turn(message["role"], message["content"]) for message in before)
            for i, (text, counted) in enumerate(found):
                question = "Q?" + (f"\n\n<history>\ns{i}\n</history>" if i else "")
                answer = f"<think>\n{PARTS[i].strip()}\n</think>\n\n" + ("4" if i == 3 else f"<summary>\ns{i + 1}\n</summary>")
                check(f"round {i + 1} of {len(before)} messages", (text, counted) == (
                    lead + turn("user", question) + f"<|im_start|>assistant\n{answer}<|im_end|>\n", f"{answer}<|im_end|>\n"), repr((text, counted)))
            check("as many samples as segments", len(found) == 4)
    thoughts = lambda found: [counted.split("<think>\n")[-1].split("\n</think>")[0] for _, counted in found]
    for name in ("thinking", "field", "hybrid"):
        found = rounds_of({"messages": [ask, field]}, name, summary_command=UPPER)
        check(f"{name}: the segments are the reasoning", "".join("".join(thoughts(found)).split()) == "".join(TRACE.split()), repr(found))
        check(f"{name}: each has a summary but the last", [("<summary>" in counted) for _, counted in found] == [True] * (len(found) - 1) + [False] and
              len(found) > 2)
    histories = [text.partition("<history>\n")[2].partition("\n</history>")[0] for text, _ in rounds_of({"messages": [ask, field]}, summary_command=UPPER)]
    check("the command gets the summary before", histories == ["", "None+THE", "None+THE+A S", "None+THE+A S+THI"], repr(histories))
    check("short reasoning is one sample", rounds_of({"messages": [ask, inside]}, tokens=1000) == rounds_of({"messages": [ask, field], "segments": [TRACE]}))
    check("a prompt with a completion, too", len(rounds_of({"prompt": [ask], "completion": [field], **given})) == 4)

    for record, reason, detail in (
            ({"messages": [ask, field]}, records.WRONG_TYPE, "has no summaries"),
            ({"messages": [ask, field], **given, "summaries": ["s1"]}, records.WRONG_TYPE, "has 1 summaries; 4 segments need 3"),
            ({"messages": [ask, field], **given, "summaries": ["s1", " ", "s3"]}, records.WRONG_TYPE, "all texts"),
            ({"messages": [ask, field], **given, "segments": PARTS[:3]}, records.WRONG_TYPE, "not the parts of the reasoning"),
            ({"messages": [ask, field], **given, "segments": "x"}, records.WRONG_TYPE, "segments is a text"),
            ({"messages": [ask, {"role": "assistant", "content": "4"}]}, records.WRONG_TYPE, "with reasoning"),
            ({"messages": [ask, {"role": "assistant", "content": "<think>\nThe"}]}, records.CUT_OFF, "needs the answer"),
            ({"messages": [ask, {"role": "assistant", "content": "x"}, field], **given}, records.WRONG_TYPE, "answer to a user's turn"),
            ({"text": TRACE}, records.WRONG_TYPE, "this is a text"),
            ({"prompt": [ask], "chosen": [field], "rejected": [inside]}, records.WRONG_TYPE, "this is of preference pairs")):
        try:
            rounds_of(record)
            check(f"refused: {detail}", False)
        except records.Rejected as rejected:
            check(f"refused: {detail}", rejected.reason == reason and detail in rejected.detail, str(rejected))


def whole_runs():
    draw = random.Random(2)
    rows = [{"messages": [{"role": "user", "content": f"Q{i}?"}, {"role": "assistant", "reasoning_content": samples.words(draw, 60) + ". " + TRACE,
                                                                 "content": f"A{i}"}]} for i in range(40)]
    path = write(os.path.join(WORK, "long.jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
    options = ("--tokenizer", FOLDERS["thinking"], "--iterative", "--segment-tokens", 20, "--summary-command", UPPER, "--val-fraction", 0.3)
    done = [prepare(*options, "--workers", workers, "--out", os.path.join(WORK, f"long-{workers}"), path) for workers in (1, 3)]
    check("runs of prepare.py --iterative", all(run.returncode == 0 for run in done), done[0].stderr + done[1].stderr)
    check("say that they cut", "40 samples: reasoning was cut into rounds" in done[0].stdout, done[0].stdout)
    check("each round counts as a sample", len(set(re.search(r"train: (\d+) samples, (\d+) documents", done[0].stdout).groups())) == 1, done[0].stdout)
    one, three = (texts(os.path.join(WORK, f"long-{workers}")) for workers in (1, 3))
    check("workers change nothing", one == three and len(one) > 80)
    question = lambda text: text.partition("user\n")[2].partition("?")[0]
    train_, val = ({question(text) for text, _ in texts(os.path.join(WORK, "long-1"), part)} for part in ("train", "val"))
    check("all rounds of a question are on one side", val and not train_ & val and len(train_ | val) == 40)
    silent = ("--iterative", "--segment-tokens", 5, "--summary-timeout", 0.3, "--summary-command")
    for words, status, message in ((("--segment-tokens", 5), 2, "--segment-tokens needs --iterative"),
                                   (("--summary-command", "x"), 2, "--summary-command needs --iterative"),
                                   (("--iterative", "--segment-tokens", 5, "--summary-command", "exit 3"), 1, "ended with status 3"),
                                   (("--iterative", "--segment-tokens", 5, "--summary-command", "cat"), 1, "not a text as JSON"),
                                   ((*silent, "sleep 9 | cat"), 1, "--summary-command gave no answer within 0.3 s; --summary-timeout allows more"),
                                   ((*silent, "tr -d '\\n' </dev/zero"), 1, "answered with more than 1,048,576 bytes: b'\\x00"),
                                   ((*silent, "yes '\"s\"'"), 1, "gave more answers than lines: b'\"s\""),
                                   (("--with-tests", "--format", "messages"), 2, "--with-tests takes texts")):
        done = prepare("--tokenizer", FOLDERS["thinking"], *words, "--out", os.path.join(WORK, "refused"), path)
        check(f"refused: {message}", done.returncode == status and message in done.stderr.splitlines()[-1], done.stderr)


# ---- files with their tests ------------------------------------------------------------------------------------------------------
def code():
    root = os.path.join(WORK, "code")
    files = {"src/a/util.py": "def util_a(): pass\n", "src/b/util.py": "def util_b(): pass\n", "tests/b/test_util.py": "test b\n",
             "tests/z/a/util_test.py": "test a\n", "src/x.c": "int x;\n", "src/x.h": "extern int x;\n", "test/test_x.c": "test x\n",
             "src/only.h": "header\n", "test/test_only.cc": "test header\n", "java/main/com/Foo.java": "class Foo\n",
             "java/test/com/FooTest.java": "class FooTest\n", "js/app.js": "app\n", "js/app.test.js": "test app\n", "go/s.go": "package s\n",
             "go/s_test.go": "package s test\n", "src/latest.py": "latest\n", "src/test_alone.py": "no file\n", "src/__init__.py": "",
             "src/copy.py": "def util_a(): pass\n", "src/x.py": "x = 3\n", "twice/y.py": "y\n", "twice/test_y.py": "test y\n",
             "twice/y_test.py": "another of y\n", "src/k.c": "int k;\n", "src/k.h": "extern int k;\n",
             "test/test_k.h": "test k\n", "notes.json": "{}", "README.md": "read"}
    for name, text in files.items():
        write(os.path.join(root, name), text)
    pairs = {"src/a/util.py": "tests/z/a/util_test.py", "src/b/util.py": "tests/b/test_util.py", "src/x.c": "test/test_x.c", "src/only.h": "test/test_only.cc",
             "java/main/com/Foo.java": "java/test/com/FooTest.java", "js/app.js": "js/app.test.js", "go/s.go": "go/s_test.go", "twice/y.py": "twice/test_y.py",
             "src/k.h": "test/test_k.h"}
    alone = {"src/x.h", "src/k.c", "src/latest.py", "src/test_alone.py", "src/x.py", "twice/y_test.py"}
    whole = lambda name, mark: files[name].strip() + (f"\n{mark}\n{files[pairs[name]].strip()}" if name in pairs else "")
    for mark in ("<|codetestpair|>", "=== tests"):
        out = os.path.join(WORK, "code-" + mark[:1])
        words = ("--separator", mark) if mark[0] == "=" else ()
        done = prepare("--tokenizer", FOLDERS["chatml"], "--with-tests", *words, "--out", out, root)
        check("prepare.py --with-tests", done.returncode == 0, done.stderr)
        found = texts(out, path=FOLDERS["chatml"])
        check("each file is in one document, with its tests", [text for text, _ in found] ==
              [whole(name, mark) + "<|im_end|>" for name in sorted({*pairs, *alone})], repr(found))
        check("all of it counts", all(text.endswith(counted) and len(text) - len(counted) < 12 for text, counted in found))
        check("what was found is said", "26 files: 9 with their tests, 6 alone (2 of them tests without their file), 2 empty or copies" in done.stdout and
              "left out 2 files that are not source code" in done.stderr, done.stdout + done.stderr)
    names = [os.path.join(root, name) for name in files if name.endswith((".py", ".c", ".h"))]
    once, _ = code_tests.plan(sorted(names))
    check("pairs do not depend on the order", code_tests.plan(sorted(names)[::-1])[0] == once)
    named = {"test_a": "a", "a_test": "a", "a_tests": "a", "a_unittest": "a", "a.test": "a", "a.spec": "a", "a_spec": "a", "ATest": "A", "ATests": "A",
             "TestA": "A", "latest": None, "test": None, "testing": None, "contest_a": None, "Testament": None, "test_": None}
    for stem, what in named.items():
        check(f"{stem} tests {what}", code_tests.tested(stem) == what)


# ---- rounds of sample --prompts ------------------------------------------------------------------------------------------------------------
def sampling():
    folder = os.path.join(WORK, "toy")
    check("toy_tokenizer.py", run(sys.executable, f"{RECIPES}/toy_tokenizer.py", folder).returncode == 0)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "reasoning_content": "abc", "content": "z"}],
           "segments": ["a", "b", "c"], "summaries": ["s", "t"]}
    path = write(os.path.join(WORK, "toy.jsonl"), json.dumps(row) + "\n")
    done = prepare("--tokenizer", folder, "--iterative", "--out", os.path.join(WORK, "toy-shards"), path)
    check("the toy's shards", done.returncode == 0, done.stderr)
    model = os.path.join(WORK, "toy-run")
    done = run(PLAIN, "--init", "qwen3,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,head_dim=16,intermediate_size=64,"
               "vocab_size=272", "--data", os.path.join(WORK, "toy-shards", "train-*.bin"), "--samples", 3, "--steps", 120, "--lr", 1e-2, "--out", model,
               "--quiet")
    check("the toy learns one sample", done.returncode == 0, done.stderr)

    sample = (PLAIN, "sample", "--model", model, "--chat", "--temperature", 0, "--quiet")

    def rounds(question, *words, **variables):
        done = run(sys.executable, f"{RECIPES}/inftythink.py", "rounds", write(os.path.join(WORK, "questions"), question), *sample, *words, **variables)
        return json.loads(done.stdout) if done.returncode == 0 else done

    whole = rounds("q\n")
    said = ["<think>\na\n</think>\n\n<summary>\ns\n</summary>", "<think>\nb\n</think>\n\n<summary>\nt\n</summary>", "<think>\nc\n</think>\n\nz"]
    check("rounds until an answer", whole["stop"] == "eos" and [r["text"] for r in whole["rounds"]] == said, json.dumps(whole))
    check("their summaries", [r.get("summary") for r in whole["rounds"]] == ["s", "t", None])
    for history, number in (("", 0), ("\n\n<history>\ns\n</history>", 1), ("\n\n<history>\nt\n</history>", 2)):
        alone = json.loads(run(*sample, "--json", "--prompt", "q" + history).stdout)
        check(f"round {number + 1} is a chat of its own", alone["ids"] == whole["rounds"][number]["ids"])
    least = rounds('{"prompt": "q"}\n', MAX_ROUNDS="2")
    check("MAX_ROUNDS ends them", least["stop"] == "max_rounds" and least["rounds"] == whole["rounds"][:2])
    short = rounds("q\n", "--max-new-tokens", 4)
    check("an answer that is cut off is the last", short["stop"] == "length" and len(short["rounds"]) == 1)
    check("a failing command ends it", rounds("q\n", "--no-such-option").returncode == 2)


# ---- rewards ------------------------------------------------------------------------------------------------------------------------
def rewards():
    form = lambda answer, thought="plan": f"<think>{thought}</think>\n<answer>{answer}</answer>"
    line = lambda completion, **more: {"prompt": "p", "completion": completion, "ended": True, **more}
    ten = " ".join(f"w{i}" for i in range(10))
    for verb, cases in (
            (["length"], ((line(form(ten), words=10), 1), (line(form(ten), words=20), 10 / 18), (line(form(ten), words=5), 2 - 10 / 5.5),
                          (line(form(ten), words=4), 0), (line(form(ten), min_words=8, max_words=12), 1), (line(form(ten), max_words=8), 0.75),
                          (line(form(ten)), None), (line(ten + "</think>" + ten, words=10), 1), (line(form("\u4f60\u597d a"), words=3), 1),
                          (line(form(""), words=3), 0))),
            (["format"], ((line(form("x")), 1), (line(form("x") + "\n"), 1), (line(form("x") + " more"), 0), (line(form(" ")), 0), (line("x"), 0),
                          (line(form("x"), ended=False), 0), (line("so " + form("x")), 0), (line(form(form("x"))), 0), (line(form("x", "")), 1),
                          ({**line("plan</think><answer>x</answer>"), "prompt": "p<think>\n"}, 1), (line("plan</think><answer>x</answer>"), 0))),
            (["repetition"], ((line(form(ten)), 1), (line(form("a " * 8)), 0.2), (line(form("a b")), 1), (line(form("")), 0))),
            (["repetition", "2"], ((line(form("a b a b")), 2 / 3), (line(form("a a")), 1))),
            (["counts"], ((line(form("1 2 3")), 1), (line(form("1 3 3 x")), 0.5), (line(form("")), 0)))):
        done = run(sys.executable, f"{RECIPES}/longwriter_zero.py", *verb, lines=[sample for sample, _ in cases])
        found = [json.loads(answer) for answer in done.stdout.splitlines()]
        for (sample, wanted), reward in zip(cases, found):
            check(f"{' '.join(verb)} of {sample}", reward is wanted is None or reward is not None and abs(reward - wanted) < 1e-9, f"{reward}, not {wanted}")
        check(f"{' '.join(verb)}: one answer a line", len(found) == len(cases), done.stderr)
    for words in (["quality"], ["length", "3"], ["repetition", "x"], []):
        check(f"refused: longwriter_zero.py {words}", run(sys.executable, f"{RECIPES}/longwriter_zero.py", *words, lines=[]).returncode == 1)
    row = {"question": "Q", "history": "old", "segment": "One is so. Two is not.\nThree. Four!"}
    for verb, given, wanted in (("extract", row, "old\nOne is so.\nFour!"), ("extract", {**row, "history": None}, "One is so.\nFour!"),
                                ("extract", {**row, "segment": "One."}, "old\nOne."),
                                ("steps", {**row, "segment": "01 24\n02 31"}, "02 31")):
        done = run(sys.executable, f"{RECIPES}/inftythink.py", verb, lines=[given, given])
        check(f"inftythink.py {verb}", [json.loads(text) for text in done.stdout.splitlines()] == [wanted] * 2, done.stdout + done.stderr)


# ---- the recipes, at toy size -----------------------------------------------------------------------------------------------------
def recipes():
    small = {"TRAIN": PLAIN, "PYTHON": sys.executable, "SIZE": "16", "STEPS": "2", "OMP_NUM_THREADS": "1"}
    for name, more, words, last in (
            ("inftythink", {"SAMPLES": "20", "QUESTIONS": "1"}, (), " of 1 answers are right, in "),
            ("longwriter_zero", {"FORM_STEPS": "2"}, (), "judge       0."),
            ("cat_lm", {"SEQ_LEN": "256"}, (os.path.join(WORK, "code"),), "9 with their tests")):
        out = os.path.join(WORK, "recipe-" + name)
        done = run(f"{RECIPES}/{name}.sh", *words, OUT=out, **small, **more)
        check(f"{name}.sh", done.returncode == 0 and last in done.stdout, done.stdout[-400:] + done.stderr[-400:])
        check(f"{name}.sh keeps its run", os.path.exists(os.path.join(out, "run", "log.jsonl")))
        again = run(f"{RECIPES}/{name}.sh", OUT=out, **small)
        check(f"{name}.sh does not remove another folder", again.returncode == 1 and "exists already" in again.stderr, again.stderr)


for part in (cuts, rounds, whole_runs, code, sampling, rewards, recipes):
    part()
close()
