#!/usr/bin/env python3
"""Makes a wheel of a portable program: wheel.py PROGRAM LICENCES OUT (make wheel).

OUT gets streambp_c-VERSION-py3-none-TAG.whl: the distribution streambp-c with the package streambp_c and the command streambp.
LICENCES is a folder of texts. auditwheel says the TAG, the oldest C library that runs the program, so this Python needs it.
The same program gives the same bytes.
"""

import base64
import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
VERSION = (ROOT / "VERSION").read_text().strip()
DATA = ["tokenizers", "jinja2>=3.1.6", "numpy", "pyarrow"]  # of prepare.py
CUDA = ["nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc"]  # opened at run time


def end(message):
    sys.exit(f"wheel.py: {message}")


def versions_of_cuda():
    """Returns requirements for the libraries: the major versions that scripts/cuda_wheels.sh names, and no older ones."""
    text = (ROOT / "scripts" / "cuda_wheels.sh").read_text()
    for name in CUDA:
        major, minor = re.search(rf"\b{name}==(\d+)\.(\d+)", text).groups()
        yield f"{name}>={major}.{minor},<{int(major) + 1}"


def metadata(licences, cuda):
    lines = ["Metadata-Version: 2.4", "Name: streambp-c", f"Version: {VERSION}",
             "Summary: Fine-tunes language models on very long sequences with exact gradients, in C and CUDA C",
             "License-Expression: MIT", *(f"License-File: {name}" for name in sorted(licences)), "Requires-Python: >=3.9",
             *(f"Requires-Dist: {name}" for name in DATA)]
    if cuda:
        lines += ["Provides-Extra: cuda", *(f'Requires-Dist: {name}; extra == "cuda"' for name in versions_of_cuda())]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", (ROOT / "README.md").read_text(encoding="utf-8")])


def contents(program, licences):
    """Returns the bytes of each file but WHEEL and RECORD."""
    scripts, info = ROOT / "scripts", f"streambp_c-{VERSION}.dist-info"
    binary = program.read_bytes()
    files = {"streambp_c/__init__.py": b"", "streambp_c/__main__.py": (scripts / "wheel_command.py").read_bytes(), "streambp_c/streambp": binary,
             **{f"streambp_c/data/{path.name}": path.read_bytes() for path in (ROOT / "data").glob("*.py")},
             f"{info}/entry_points.txt": b"[console_scripts]\nstreambp = streambp_c.__main__:main\n"}
    texts = {path.name: path.read_bytes() for path in licences.iterdir()}
    files |= {f"{info}/licenses/{name}": text for name, text in texts.items()}
    return files | {f"{info}/METADATA": metadata(texts, b"libcublasLt.so" in binary).encode()}


def write(folder, files, tag):
    """Writes a wheel, and returns its path."""
    info = f"streambp_c-{VERSION}.dist-info"
    files = {**files, f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: streambp.c\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()}
    hashes = ((name, base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode(), len(text)) for name, text in sorted(files.items()))
    files[f"{info}/RECORD"] = "".join([*(f"{name},sha256={code},{size}\n" for name, code, size in hashes), f"{info}/RECORD,,\n"]).encode()
    path = folder / f"streambp_c-{VERSION}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.create_system, entry.compress_type = 3, zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == "streambp_c/streambp" else 0o100644) << 16
            archive.writestr(entry, text)
    return path


def tag_of(files):
    with tempfile.TemporaryDirectory() as folder:
        path = write(pathlib.Path(folder), files, "linux_x86_64")
        done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(path)], capture_output=True, text=True)
    found = re.search(r'platform tag: "(\w+)"', " ".join(done.stdout.split()))
    if not found:
        end(f"auditwheel names no tag: {' '.join((done.stderr or done.stdout).split())[-200:]}")
    if not found[1].startswith("manylinux"):
        end("the program needs libraries that other machines lack; build it with PORTABLE=1")
    return found[1]


def main(program, licences, out):
    if importlib.util.find_spec("auditwheel") is None:
        end(f"{sys.executable} has no auditwheel: pip install auditwheel, or name a Python that has it: PYTHON=...")
    files = dict(sorted(contents(pathlib.Path(program), pathlib.Path(licences)).items()))
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    print(write(out, files, tag_of(files)))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        end("usage: wheel.py PROGRAM LICENCES OUT")
    main(*sys.argv[1:])
