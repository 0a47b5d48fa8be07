"""scripts/docker/ without a daemon: known instructions, sources that exist, `make -n` of what is copied, and the program's
answer to the commands of the first lines. test_docker.py TRAIN WORK: the program beside its objects, a folder
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

TRAIN, WORK = sys.argv[1], pathlib.Path(sys.argv[2])
KNOWN = "FROM ARG RUN WORKDIR COPY USER ENV VOLUME ENTRYPOINT CMD".split()


def run(words, **options):
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}, **options)
    assert done.returncode == 0 and "not found" not in done.stderr, (words, done.stderr[-300:])
    return done.stdout


def check_make(words, folder, arguments):
    """Variables are the Makefile's, and make knows the target in the folder that has what was copied."""
    makefile = open("Makefile").read()
    for word in words:
        assert "=" not in word or re.search(rf"\b{word.split('=')[0]}\b", makefile), f"the Makefile has no {word}"
    if "BACKEND=all" in words:  # whose toolkit is the image's
        assert arguments == ["ARCHS"], arguments
        words = ["BACKEND=cpu" if word == "BACKEND=all" else word for word in words]
    assert "install " in run(["make", "-n", "DEPS=skip", *words], cwd=folder)


def check_file(path):
    text = path.read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line.strip()]
    stages, installed, user, entry, arguments = [], set(), None, None, []
    ignored = pathlib.Path(".dockerignore").read_text().split("\n")
    folder = WORK / path.name
    folder.mkdir()
    for name, rest in steps:
        assert name in KNOWN, f"{path}: what is {name}?"
        words = shlex.split(rest)
        if name == "FROM":
            assert re.fullmatch(r"(debian|nvidia/cuda):[\w.-]+", words[0]) and words[1:2] in ([], ["AS"]), rest
            stages.append(words[2] if words[1:] else "")
        elif name == "COPY" and words[0].startswith("--from="):
            assert words[0][7:] in stages[:-1] and words[1] in installed, rest
        elif name == "COPY":
            for source in words[:-1]:
                assert f"!{source}" in ignored, f"{source} is in .dockerignore"
                target = folder / (words[-1] if os.path.isdir(source) else source)
                (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)
        elif name == "RUN":
            for command in rest.split("&&"):
                words = shlex.split(command)
                if words[0] == "make":
                    check_make(words[1:], folder, arguments)
                    put = dict(word.split("=") for word in words[1:] if "=" in word)
                    installed.add(f"{put['DESTDIR']}{put['PREFIX']}/bin/streambp")
                else:
                    assert words[0] in ("apt-get", "pip", "useradd", "mkdir", "chown"), command
        elif name == "ARG":
            arguments.append(rest)
        elif name in ("ENTRYPOINT", "CMD"):
            entry = (entry or []) + json.loads(rest)
        user = rest if name == "USER" else user
    assert len(stages) == 2 and user not in (None, "root") and entry[0] == "streambp", steps
    run([TRAIN, *entry[1:]])
    made = re.findall(r"^#   docker build -f (\S+) -t (\S+) \.$", text, flags=re.M)
    shown = re.findall(r"^#   docker run (.*)$", text, flags=re.M)
    assert made == [(str(path), made[0][1])] and len(shown) == 2, made
    for line in shown:
        words = shlex.split(line.replace("$PWD", "work").replace("$HOME", "home"))
        run([TRAIN, *words[words.index(made[0][1]) + 1:], "--help"])
    # Every file that the program is made of was copied.
    built = pathlib.Path(TRAIN).parent
    driver = built.with_name(built.name.replace("cpu-fp32", "driver"))
    lists = "".join(f.read_text() for f in (driver / "train_gpt.d", driver / "dist.d", built / "ops_cpu.d"))
    parts = re.findall(r"[\w./-]+\.(?:h|c|cu)\b", lists)
    assert len(parts) > 100, f"{TRAIN}: no lists of its parts beside it"
    missing = [part for part in parts if not part.startswith("/") and not (folder / part).exists()]
    assert not missing, missing


for name in "cpu", "gpu":
    check_file(pathlib.Path(f"scripts/docker/Dockerfile.{name}"))
