#!/usr/bin/env python3
"""card_plans.py: `train plan` against the passes of dev/results/passes-*.json, which ran on a GPU. Bytes of the plan are those of the run; the estimate
is within 10 % of the seconds, 20 % where chunks are short. TRAIN=./train"""

import glob
import json
import os
import shlex
import subprocess
import sys

DELTA_SLOWER = {"6a8115d": 0.19 / 0.072}  # the delta rule's kernels of then
faults = count = 0
for path in sorted(glob.glob("dev/results/passes-*.json")):
    with open(path, encoding="utf-8") as file:
        ran = json.load(file)
    card = ran.get("machine", next((name for name in ("h100", "h200", "a100") if name in ran["device"].lower()), ""))
    if not card:
        continue  # a card that plans do not know
    slower = DELTA_SLOWER.get(ran["commit"], 1)
    for each in ran["passes"]:
        keep = "" if "--keep" in each["options"] else "--keep none"  # a pass kept nothing unasked
        options = shlex.split(f"plan --for bp {keep} --machine {card},host=128GiB --memory-limit {ran['memory_limit']} --json --quiet {each['options']}")
        plan = json.loads(subprocess.run([os.environ.get("TRAIN", "./train"), *options], stdout=subprocess.PIPE, check=True).stdout)
        short = plan["chunk"] < 2048
        seconds = plan["estimated_seconds"] + plan["estimated_work"].get("delta", 0) * (slower - 1)
        ratio = (each["seconds"] - (0.8 if each["passes"] == 1 and each["seconds"] > 10 else 0)) / seconds  # it compiled, too
        count += 1
        other = plan["total_bytes"] != each["plan_bytes"] and "since" not in each  # since: why plans have other bytes
        if other or not 0.9 < ratio < (1.2 if short else 1.1):
            faults += 1
            print(f"{each['options']}: {plan['total_bytes']} bytes, ran with {each['plan_bytes']}; {ratio:.3f} of the estimated seconds", file=sys.stderr)
print(f"{count} passes planned, {faults} otherwise")
sys.exit(faults > 0 or not count)
