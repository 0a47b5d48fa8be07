"""Data and summaries for inftythink.sh: addition modulo 100 by counting, with all reasoning in one block.

    inftythink.py data FILE COUNT train     conversations: "17+02", reasoning "01 18", "00 19", answer "19"
    inftythink.py data FILE COUNT test      the same, with a tenth of all questions, which train does not have
    inftythink.py steps                     a summary command for these: the last step
    inftythink.py extract                   a summary command for any text: the summary before, the first sentence and the last one
    inftythink.py right FILE                of a file of data and, on standard input, outputs of `sample --json`: how many are right

A summary command gets a line of JSON (question, history, segment) and answers with a text as JSON. Needs nothing but Python.
"""

import json
import random
import re
import sys

STEPS = (10, 40)  # fewest and most steps


def sample(draw, test):
    """Draws a question of one part, test or train."""
    value, steps = draw.randrange(100), draw.randint(*STEPS)
    while ((7 * value + 3 * steps) % 10 == 0) != test:
        value, steps = draw.randrange(100), draw.randint(*STEPS)
    lines = [f"{steps - i:02d} {(value + i) % 100:02d}" for i in range(1, steps + 1)]
    return {"messages": [{"role": "user", "content": f"{value:02d}+{steps:02d}"},
                         {"role": "assistant", "reasoning_content": "\n".join(lines), "content": lines[-1][-2:]}]}


def data(path, count, part):
    draw = random.Random(part)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(int(count)):
            file.write(json.dumps(sample(draw, part == "test")) + "\n")


def last_step(line):
    return re.findall(r"\d\d \d\d", line["segment"])[-1]


def extract(line):
    sentences = [text for text in re.split(r"\n+|(?<=[.!?])\s+", line["segment"]) if text.strip()]
    return "\n".join([line["history"]] * bool(line["history"]) + list(dict.fromkeys([sentences[0], sentences[-1]])))


def right(path):
    with open(path, encoding="utf-8") as file:
        wanted = [json.loads(line)["messages"][-1]["content"] for line in file]
    outputs = [json.loads(line) for line in sys.stdin]
    answers = [output["rounds"][-1]["text"].rpartition("</think>")[2].strip() for output in outputs]
    rounds = [len(output["rounds"]) for output in outputs]
    print(f"{sum(a == b for a, b in zip(answers, wanted))} of {len(answers)} answers are right, in {min(rounds)} to {max(rounds)} rounds")


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("steps", "extract") and not arguments:
        for text in sys.stdin:
            print(json.dumps((last_step if verb == "steps" else extract)(json.loads(text))), flush=True)
    elif verb == "data" and len(arguments) == 3 and arguments[2] in ("train", "test"):
        data(*arguments)
    elif verb == "right" and len(arguments) == 1:
        right(*arguments)
    else:
        raise SystemExit(__doc__)
