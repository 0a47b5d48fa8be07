#!/usr/bin/env python3
"""test_pages.py [N]: the commands of docs/models/*.md, every one or N of each page, plan again with the bytes that stand there. TRAIN=./train"""

import glob
import re
import shlex
import sys

sys.path.insert(0, "scripts")
from plan_lengths import plan  # noqa: E402
from plan_models import memory  # noqa: E402

most = int(sys.argv[1]) if len(sys.argv) > 1 else 0
wrong = count = 0
for number, path in enumerate(sorted(glob.glob("docs/models/*.md"))):
    with open(path, encoding="utf-8") as file:
        found = re.findall(r"planned (.*) with `--machine (\S+)`:\n\n {4}\./train train (.*)\n", file.read())
    for said, machine, options in [found[(5 * number + each) % len(found)] for each in range(most or len(found))]:
        made = plan(f"--machine {machine} " + " ".join(shlex.split(options)))
        count += 1
        if not made["fits"] or memory(made) != said:
            wrong += 1
            print(f"{path}: {machine}: {memory(made)}, not {said}: {options}", file=sys.stderr)
print(f"{count} commands planned again, {wrong} otherwise")
sys.exit(wrong > 0 or not count)
