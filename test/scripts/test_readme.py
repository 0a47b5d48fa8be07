"""Holds the commands and links of all Markdown files against what there is: test_readme.py TRAIN.

Commands are lines of indented and of fenced blocks, and code within a line that begins as one. Of `./train` and `streambp` the options are
parsed (`--help` behind them answers once all are valid); `make` runs with -n; a script must be there, be valid, and know each
--option it is given. Placeholders in <angles> stand for 1. A link names a file, and a heading in it, that exist; so do names of
Markdown files in sources. README has at most 200 lines of at most 120 columns, and its first command in the first 25.
"""

import glob
import os
import re
import shlex
import subprocess
import sys

TRAIN = os.path.abspath(sys.argv[1])
variables = {}  # of loops, the first value of each
HAS_NVCC = subprocess.run("command -v nvcc", shell=True, capture_output=True).returncode == 0
LAUNCHED = {"scripts/run_single_node.sh", "scripts/slurm_train.sbatch"}  # their options are those of ./train
COMMAND = re.compile(r"^(\$ )?((\w+=\S* )*(\./train|streambp|make|mpirun|python3?|sbatch|sh|(scripts|dev|test|data)/\S+\.(sh|py|sbatch))|for \w+ in)( |$)")


def blocks(text):
    """Lines of code blocks, continued lines joined, and code within lines."""
    fenced, before = None, ""
    joined = ""
    for line in text.split("\n"):
        if line.startswith("```"):
            fenced = line[3:].strip() if fenced is None else None
            before = ""
            continue
        indented = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        before = line
        if indented or fenced in ("", "sh", "bash", "console"):
            joined += line.strip()
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            yield joined
            joined = ""
        elif fenced is None:
            for code in re.findall(r"`([^`]+)`", line):
                if re.match(r"^((\w+=\S* )*make \S|(scripts|dev|test|data)/\S+\.(sh|py|sbatch)( |$))", code):
                    yield code


def parts(line):
    """The simple commands of a line."""
    line = re.sub(r"<[^<>|]*>", "1", line)
    words, part = shlex.split(line, comments=True), []
    for word in words:
        if word in ("|", "&&", "||", "do", "done", ">", ">>", "2>", "&") or word.endswith(";"):
            if word.endswith(";") and word != ";":
                part.append(word[:-1])
            yield part
            part = ["true"] if word in (">", ">>", "2>") else []  # a file's name follows
        else:
            part.append(word)
    yield part


def run(words, **options):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    return None if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}").split("\n")[-1]


def script(path, arguments):
    if not os.path.exists(path):
        return "there is no such file"
    if path in LAUNCHED:
        return train(arguments) or run(["bash", "-n", path])
    # of Python options may be declared in a module beside it
    files = [path] if not path.endswith(".py") else glob.glob(os.path.dirname(path) + "/*.py")
    text = "".join(open(name, encoding="utf-8").read() for name in files)
    if not path.endswith(".py"):
        fault = run(["bash", "-n", path])
        if fault or '"$@"' in text and path.endswith(".sh"):  # its options are another program's
            return fault
    unknown = [a for a in arguments if a.startswith("--") and a.split("=")[0] not in text and a[2:] not in text]
    return f"{path} knows no {unknown[0]}" if unknown else None


def train(arguments):
    return run([TRAIN, *(re.sub(r"\$(\w+)", lambda m: variables.get(m[1], "1"), a) for a in arguments), "--help"])


def fault_of(words):
    """What is wrong with a simple command; None: nothing, False: it is not checked."""
    while words and (re.match(r"^\w+=", words[0]) or words[0] == "$"):
        words = words[1:]
    if words and words[0] == "mpirun":
        words = words[words.index("-n") + 2 :]
    if words and words[0] == "sbatch":
        words = words[next(i for i, w in enumerate(words) if w.endswith(".sbatch")) :]
    if not words:
        return False
    name, arguments = words[0], words[1:]
    if name == "for":  # NAME in VALUE ...
        variables[words[1]] = words[3]
    if name.endswith("/train") or name == "train":
        return train(arguments)
    if name == "streambp":  # of a wheel
        return script("data/prepare.py", arguments[1:]) if arguments[0] == "prepare" else train(arguments)
    if name == "make":
        if any("cuda" in a for a in arguments) and not HAS_NVCC:
            return False
        arguments = [a for a in arguments if not a.startswith("CUDA=")]  # a folder that the user makes
        return run(["make", "-n", *arguments], env={**os.environ, "DEPS": "skip", "MAKEFLAGS": ""})
    if name in ("python", "python3", "sh") and arguments and not arguments[0].startswith("-"):
        if "/" not in arguments[0]:
            return False  # a file of the user
        name, arguments = arguments[0], arguments[1:]
    if re.match(r"^(\./)?(scripts|dev|test|data)/", name) and name.endswith((".sh", ".py", ".sbatch")):
        return script(name.removeprefix("./"), arguments)
    return False


def headings(path):
    """The anchors of a file: of its headings, as GitHub makes them, and its own."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return set(re.findall(r'<a id="([^"]+)">', text)) | {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def bad_links(path, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if "://" not in target and (not os.path.exists(file) or heading and heading not in headings(file)):
            yield target


def named_in_sources():
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split()
    for path in files or glob.glob("**/*.*", recursive=True):
        if path.endswith((".h", ".c", ".cu", ".cuh", ".py", ".sh", "Makefile")) and os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                for name in re.findall(r"\b(?:llmc|scripts|dev|test|data)/[\w/]*\.md\b", file.read()):
                    yield path, name


def is_short(lines):
    made = [number for number, line in enumerate(lines, 1) if line.startswith("    make")]
    return len(lines) <= 200 and max(map(len, lines)) <= 120 and made[0] <= 25


def main():
    passed = failed = 0
    for path, name in sorted(set(named_in_sources())):
        passed += os.path.exists(name)
        if not os.path.exists(name):
            failed += 1
            print(f"FAILED: {path}: there is no {name}")
    for path in sorted(path for path in glob.glob("**/*.md", recursive=True) if not path.startswith("build/")):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        lines = [line for line in blocks(text) if COMMAND.match(line)]
        lines = lines[: None if not path.startswith("docs/models/") else 1]  # test_pages.py plans them all
        broken = list(bad_links(path, text)) + ([] if path != "README.md" or is_short(text.split("\n")) else ["too long"])
        passed += not broken
        failed += len(broken)
        for link in broken:
            print(f"FAILED: {path}: {link}: no such file or heading" if link != "too long" else f"FAILED: {path} is too long")
        for line in dict.fromkeys(lines):
            try:
                faults = [fault_of(words) for words in parts(line)]
            except ValueError as error:
                faults = [str(error)]
            for fault in faults:
                passed += fault is None
                failed += bool(fault)
                if fault:
                    print(f"FAILED: {path}: {line}: {fault}")
    failed += not passed
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed != 0


sys.exit(main())
