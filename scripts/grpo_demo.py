"""The task of grpo_demo.sh, sorting digits, whose tokens are bytes:

    grpo_demo.py data FOLDER     shards of prompts "4192>": format-00000.bin with answers in any order, task-00000.bin with the right ones
    grpo_demo.py reward          a reward command: the share of the places of an answer that are right, for each line of standard input
    grpo_demo.py solved          another: 1 where all are right, else 0

The last two need nothing but Python; the first needs numpy.
"""

import json
import os
import random
import sys

DIGITS = 4
PROMPTS = 2000


def write_shard(folder, stem, samples):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
    import numpy as np
    import shards

    writer = shards.ShardWriter(folder, stem, shards.DOCUMENTS, 256, 0, "bytes", 1 << 30)
    for prompt, answer in samples:
        ids = np.frombuffer((prompt + answer).encode(), np.uint8).astype("<u2")
        counts = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
        table = np.zeros(1, shards.TABLE)
        table["tokens"], table["counted"], table["prompt"] = len(ids), len(answer), len(prompt)
        table["crc"] = shards.document_crc(ids, counts)
        writer.add(ids, counts, table, [1])
    path = writer.path()
    writer.close()
    os.rename(path + ".tmp", path)
    for name in writer.old:
        os.remove(name)


def data(folder):
    draw = random.Random(1)
    prompts = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(PROMPTS)]
    write_shard(folder, "format", [(p + ">", "".join(draw.sample(p, DIGITS)) + "\n") for p in prompts])
    write_shard(folder, "task", [(p + ">", "".join(sorted(p)) + "\n") for p in prompts])


def reward(whole):
    for line in sys.stdin:
        sample = json.loads(line)
        answer, right = sample["completion"], sample["reference"]
        places = sum(a == b for a, b in zip(answer, right))
        print(int(answer == right) if whole else places / max(len(answer), len(right)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["data"] and len(sys.argv) == 3:
        data(sys.argv[2])
    elif sys.argv[1:] in (["reward"], ["solved"]):
        reward(sys.argv[1] == "solved")
    else:
        raise SystemExit(__doc__)
