#!/usr/bin/env python3
"""Makes a wheel of a portable program: wheel.py TREE OUT (make wheel). TREE is what `scripts/dist.sh tree` makes.

OUT gets streambp_c-VERSION-py3-none-TAG.whl, with CUDA -VERSION+cuda-: the distribution streambp-c, the package streambp_c and the
command streambp. auditwheel says the TAG, the oldest C library that runs the program, so this Python needs auditwheel. The same
tree becomes the same bytes.
"""

import base64
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
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


def metadata(version, licences, cuda):
    lines = ["Metadata-Version: 2.4", "Name: streambp-c", f"Version: {version}",
             "Summary: Fine-tunes language models on very long sequences with exact gradients, in C and CUDA C",
             "License: MIT; what is linked statically has the licences of parts.txt",
             *(f"License-File: {name}" for name in sorted(licences)), "Requires-Python: >=3.9", *(f"Requires-Dist: {name}" for name in DATA)]
    if cuda:
        lines += ["Provides-Extra: cuda", *(f'Requires-Dist: {name}; extra == "cuda"' for name in versions_of_cuda())]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", (ROOT / "README.md").read_text(encoding="utf-8")])


def contents(tree):
    """Returns the version, and the bytes of each file but WHEEL and RECORD."""
    program, command = (tree / "streambp").read_bytes(), ROOT / "scripts" / "wheel_command.py"
    cuda = b"libcublasLt.so.13" in program
    version = (ROOT / "VERSION").read_text().strip() + "+cuda" * cuda
    licences = {path.name: path.read_bytes() for path in (tree / "LICENSE", tree / "parts.txt", *(tree / "licenses").iterdir())}
    info = {"METADATA": metadata(version, licences, cuda).encode(), "entry_points.txt": b"[console_scripts]\nstreambp = streambp_c.__main__:main\n",
            **{f"licenses/{name}": text for name, text in licences.items()}}
    data = {path.name: path.read_bytes() for path in (ROOT / "data").glob("*.py")}
    return version, {"streambp_c/__init__.py": b"", "streambp_c/__main__.py": command.read_bytes(), "streambp_c/streambp": program,
                     **{f"streambp_c/data/{name}": text for name, text in data.items()},
                     **{f"streambp_c-{version}.dist-info/{name}": text for name, text in info.items()}}


def write(folder, version, files, tag):
    """Writes a wheel, and returns its path."""
    info = f"streambp_c-{version}.dist-info"
    files = {**files, f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: streambp.c\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()}
    hashes = ((name, base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode(), len(text)) for name, text in sorted(files.items()))
    files[f"{info}/RECORD"] = "".join([*(f"{name},sha256={code},{size}\n" for name, code, size in hashes), f"{info}/RECORD,,\n"]).encode()
    path = folder / f"streambp_c-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.create_system, entry.compress_type = 3, zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == "streambp_c/streambp" else 0o100644) << 16
            archive.writestr(entry, text)
    return path


def tag_of(version, files):
    with tempfile.TemporaryDirectory() as folder:
        path = write(pathlib.Path(folder), version, files, f"linux_{os.uname().machine}")
        done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(path)], capture_output=True, text=True)
    found = re.search(r'platform tag: "(\w+)"', " ".join(done.stdout.split()))
    if not found:
        end(f"auditwheel names no tag: {' '.join((done.stderr or done.stdout).split())[-200:]}")
    if not found[1].startswith("manylinux"):
        end("the program needs libraries that other machines lack; build it with PORTABLE=1")
    return found[1]


def main(tree, out):
    version, files = contents(pathlib.Path(tree))
    tag = tag_of(version, files)
    os.makedirs(out, exist_ok=True)
    print(write(pathlib.Path(out), version, files, tag))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        end("usage: wheel.py TREE OUT")
    main(*sys.argv[1:])
