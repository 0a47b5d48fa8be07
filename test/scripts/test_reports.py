"""scripts/add_report.py on a report, and on records that are wrong in one thing: test_reports.py REPORT FOLDER"""
import copy
import json
import os
import subprocess
import sys

REPORT, FOLDER = sys.argv[1:]
sys.path[:0] = ["scripts"]
import add_report  # noqa: E402


def refused(text, pattern, path=FOLDER + "/../wrong.json"):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    try:
        add_report.add(path, FOLDER)
    except add_report.Wrong as wrong:
        assert pattern in str(wrong) and "\n" not in str(wrong) and len(str(wrong)) < 200, (pattern, str(wrong))
        return
    raise AssertionError(f"taken: {pattern}: {text[:100]}")


with open(REPORT, encoding="utf-8") as file:
    good = json.load(file)
assert good["on_gpu"] is False and good["right"] is True and len(good["rows"]) == 1 and good["rates"]["products"] > 0, good
sys.stdout = open(os.devnull, "w", encoding="utf-8")
run = [sys.executable, "scripts/add_report.py"]
environment = {**os.environ, "RESULTS": FOLDER}
made = subprocess.run([*run, "-"], input=json.dumps(good), capture_output=True, text=True, env=environment)
assert made.returncode == 0 and os.path.isfile(made.stdout.strip()), made
again = subprocess.run([*run, REPORT], capture_output=True, text=True, env=environment)
assert again.returncode == 1 and again.stderr.count("\n") == 1 and "holds it already" in again.stderr, again
with open(FOLDER + "/../other.json", "w", encoding="utf-8") as file:
    json.dump(good | {"commit": "abcd1234"}, file)
add_report.add(file.name, FOLDER)
assert len(os.listdir(FOLDER)) == 2 and any(name.endswith("-2.json") for name in os.listdir(FOLDER)), os.listdir(FOLDER)

changes = {"device_name": ["../../etc/passwd", "", "-x", "a" * 200, "a\nb", 3, "..", "caf\u00e9"], "on_gpu": [1, "true", None],
           "date": ["2025-01-01", "2099-01-01", "today", None], "commit": ["; rm", "", None], "driver": ["580; x", ""], "right": [0],
           "wrong": ["x", [1], ["a\u0000"]], "rates": [[], {"x": -1}, {"x": "1"}, {"x\n": 1}], "rows": [{}, None], "op_set": ["gpu", 0], "dtype": ["fp8"],
           "libraries": ["/home/me/lib"], "command": [["x"], "a\nb"], "version": [0.1]}
assert set(changes) == set(good) - {"kind"}, set(good) ^ set(changes)
for key, values in changes.items():
    for value in values:
        refused(json.dumps(good | {key: value}), f"{key} cannot be")
    refused(json.dumps({k: v for k, v in good.items() if k != key}), f"lacks {key}")
refused(json.dumps(good | {"host": "name"}), "has the unknown field host")
refused(json.dumps(good | {"kind": "else"}), "its kind is none of")
row = {"options": [1], "seconds": [0, -1, 1e9, "1", True], "planned_seconds": [0, "x"], "tokens": [0, 1.5, True], "plan_bytes": [-1, 1.5, 10**16],
       "peak_bytes": [None], "loss": [None, 1e300], "grad_norm": ["x"], "chunk": [0], "attention": ["flash"]}
assert set(row) == set(good["rows"][0])
for key, values in row.items():
    for value in values:
        changed = copy.deepcopy(good)
        changed["rows"][0][key] = value
        refused(json.dumps(changed), f"rows 1: {key} cannot be")
for text, pattern in ("", "no JSON"), ("[]", "its kind"), ('{"kind": "report", "kind": "report"}', "a key stands twice"), ("[" * 100000, "no JSON"), \
        (json.dumps(good).replace('"seconds": ', '"seconds": NaN, "x": ', 1), "rows 1"):
    refused(text, pattern)
assert len(os.listdir(FOLDER)) == 2
