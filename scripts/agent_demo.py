"""Data of agent_demo.sh, whose tasks are files to read; tokens are bytes:

    agent_demo.py FOLDER     format-00000.bin: conversations that read any file and answer with its digit; task-00000.bin: prompts "c>",
                             answered by the digit in file c; test-00000.bin: other tasks. Needs numpy.
"""

import random
import sys

FILES = "abcd"
PROMPTS = 1000


def conversation(draw):
    """A conversation as text, and the counts of its bytes: the model's turns."""
    digit = draw.choice("0123456789")
    parts = [(draw.choice(FILES) + ">", 0), (f"read {draw.choice(FILES)}\n", 1), (digit + "\n", 0), (f"answer {digit}\n", 1)]
    return "".join(text for text, _ in parts), [count for text, count in parts for _ in text]


def task(draw):
    files = {name: draw.choice("0123456789") for name in FILES}
    name = draw.choice(FILES)
    return (name + ">", [0, 0]), {"files": files, "answer": files[name]}


def data(folder):
    from byte_shard import write_shard

    draw = random.Random(1)
    write_shard(folder, "format", [conversation(draw) for _ in range(4 * PROMPTS)])
    tasks = {}
    while len(tasks) < 2 * PROMPTS:
        made = task(draw)
        tasks[str(made)] = made
    for stem, begin in ("task", 0), ("test", PROMPTS):
        write_shard(folder, stem, *zip(*[*tasks.values()][begin:begin + PROMPTS]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    data(sys.argv[1])
