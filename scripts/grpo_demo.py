"""Data and rewards of grpo_demo.sh, whose task is to sort digits; tokens are bytes:

    grpo_demo.py data FOLDER     shards of prompts "4192>": format-00000.bin with answers in any order, task-00000.bin with the right answers
    grpo_demo.py reward          a reward command: for each line of standard input, the share of an answer's digits in their right place
    grpo_demo.py solved          another reward command: 1 if all digits are in place, else 0

`reward` and `solved` need only Python; `data` needs numpy.
"""

import json
import random
import sys

DIGITS = 4
PROMPTS = 2000


def sample_of(prompt, answer):
    """A text and the counts of its bytes: the answer's."""
    return prompt + ">" + answer + "\n", [0] * (len(prompt) + 1) + [1] * (len(answer) + 1)


def data(folder):
    from byte_shard import write_shard

    draw = random.Random(1)
    prompts = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(PROMPTS)]
    write_shard(folder, "format", [sample_of(p, "".join(draw.sample(p, DIGITS))) for p in prompts])
    write_shard(folder, "task", [sample_of(p, "".join(sorted(p))) for p in prompts])


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
