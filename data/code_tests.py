"""Makes documents of source code for `prepare.py --with-tests`: a file and its tests are one document (CAT-LM, arXiv 2310.01602).

    code, a line with the separator, tests

A test is found by its name: test_X, X_test, X_tests, X_unittest, X.test, X.spec, X_spec, XTest, XTests or TestX of X, in the language of X.
Of several candidates, the one whose folders have the most names in common with the file's, from both ends, is taken first; then candidates
of the same suffix; then by name. Each file is in one document: tests whose file is taken stay alone, as do files without tests. Copies are
left out.
"""

import hashlib
import os
import re

import inputs
import records

SEPARATOR = b"<|codetestpair|>"  # the separator of the paper
LANGUAGES = ("py pyi", "c h cc cpp cxx hpp hh cu cuh m mm", "java", "kt kts", "scala", "cs", "js jsx ts tsx mjs cjs", "go", "rs", "rb", "php",
             "swift", "sh bash", "pl pm t", "lua", "jl", "r", "hs", "ml mli", "ex exs", "dart", "zig")
LANGUAGE = {suffix: number for number, suffixes in enumerate(LANGUAGES) for suffix in suffixes.split()}
TEST = re.compile(r"(?i:test)_(?P<a>.+)|(?P<b>.+?)(?:_(?i:tests?|spec|unittest)|\.test|\.spec)|(?P<c>.*[A-Za-z0-9])Tests?|Test(?P<d>[A-Z].*)")


def named(path):
    """Returns (folders, stem, suffix)."""
    folder, name = os.path.split(os.path.normpath(path))
    stem, _, suffix = name.rpartition(".")
    return folder.split(os.sep), stem, suffix.lower()


def is_source(path):
    return named(path)[2] in LANGUAGE


def tested(stem):
    """Returns the stem of the file that a test tests, or None."""
    found = TEST.fullmatch(stem)
    return found and next(filter(None, found.groups()))


def common(a, b):
    """Returns how many names two paths of folders share at their beginnings and their ends."""
    least = min(len(a), len(b))
    begin = next((i for i in range(least) if a[i] != b[i]), least)
    end = next((i for i in range(least - begin) if a[-1 - i] != b[-1 - i]), least - begin)
    return begin + end


def pairs(paths):
    """Returns {code: test}, in which each file occurs once."""
    files = {path: named(path) for path in paths}
    of = {}
    for path, (_, stem, suffix) in files.items():
        of.setdefault((LANGUAGE.get(suffix), stem), []).append(path)
    found = []
    for test, (folders, stem, suffix) in files.items():
        for code in of.get((LANGUAGE.get(suffix), tested(stem)), ()):
            found.append((-common(folders, files[code][0]), suffix != files[code][2], test, code))
    result, taken = {}, set()
    for *_, test, code in sorted(found):
        if not {code, test} & taken:
            taken |= {code, test}
            result[code] = test
    return result


def content(path):
    try:
        with open(path, "rb") as file:
            return file.read().strip(b"\r\n")
    except OSError as error:
        raise inputs.InputFailure(f"{path}: cannot be read: {error.strerror}") from None


def sources(paths, given, say):
    """Returns the paths of `paths` that are source code, or named by the user."""
    found = [path for path in paths if path in given or is_source(path)]
    if len(found) < len(paths):
        say(f"left out {len(paths) - len(found):,} files that are not source code")
    return found


def plan(paths):
    """Returns ({path that begins a document: its test or None} in the order of `paths`, a line about them)."""
    found = pairs(paths)
    tests = {test: code for code, test in found.items()}
    digest = {path: hashlib.sha256(content(path)).digest() for path in paths}
    empty, seen, kept = hashlib.sha256(b"").digest(), set(), {}
    for path in sorted(paths, key=lambda path: (path not in found, path)):  # first the documents of two files
        whole = (digest[path], digest.get(found.get(path)))
        if path in tests or whole == (empty, None) or whole in seen:
            continue
        seen |= {whole, *((part, None) for part in whole)}
        kept[path] = found.get(path)
    two = sum(test is not None for test in kept.values())
    alone = [path for path, test in kept.items() if not test]
    unpaired = sum(tested(named(path)[1]) is not None for path in alone)
    line = (f"{len(paths):,} files: {two:,} with their tests, {len(alone):,} alone ({unpaired:,} of them tests without their file), "
            f"{len(paths) - 2 * two - len(alone):,} empty or copies, which are left out")
    return {path: kept[path] for path in paths if path in kept}, line


def batches(paths, position, separator, documents):
    """Yields an inputs.Batch for each document after `position`. documents: from plan()"""
    done = 0
    for i, path in enumerate(paths):
        done += os.path.getsize(path)
        if path in documents and (i, 0) >= (position["file"], position["offset"]):
            parts = [content(part) for part in (path, documents[path]) if part]
            text = b"\n".join([parts[0], separator or SEPARATOR, parts[1]] if len(parts) > 1 else parts)
            yield inputs.Batch(path, [(1, records.Text(text))], len(text), {"file": i, "offset": len(text), "number": 1}, done)
