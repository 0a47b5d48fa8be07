"""Checks that are counted: check(what, ok), and at the end close(), which prints `N passed, N failed, N skipped`. And what tests
against transformers begin with: their arguments TRAIN WORK, the program and an empty folder; to be imported before torch.
"""
import os
import subprocess
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
warnings.filterwarnings("ignore")

GOLDEN = "test/golden"
TRAIN, WORK = (sys.argv + ["", ""])[1:3]
passed = failed = 0


def check(what, ok, why=""):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"FAILED: {what}{': ' if why else ''}{why}")


def train(*arguments):
    """Runs the program, which must succeed. Returns what it prints."""
    words = list(map(str, arguments))
    run = subprocess.run([TRAIN, *words], capture_output=True, text=True)
    check("train " + " ".join(words), run.returncode == 0, run.stderr.strip()[-400:])
    return run.stdout


def write_shard(stem, kind, vocabulary, documents, of_sample):
    """The path of a shard of encode.Documents. of_sample: how many each sample has. data/ is in sys.path."""
    import encode
    import numpy as np
    import shards
    writer = shards.ShardWriter(WORK, stem, kind, vocabulary, 0, "tests", 10**9)
    ids, counts, values, table = encode.pack(documents, np.dtype("<u2"))
    writer.add(np.concatenate(ids), np.concatenate(counts), table, of_sample, np.concatenate(values) if kind == shards.ADVANTAGES else None)
    path = writer.path()
    writer.close()
    os.rename(path + ".tmp", path)
    writer.forget_old()
    return path


def close():
    print(f"{passed} passed, {failed} failed, 0 skipped")
    raise SystemExit(failed > 0)
