"""Data and summaries for inftythink.sh: the leading digits of long sums, column by column, with all reasoning in one block.

    inftythink.py data FILE COUNT [SEED]    conversations: "a4+9 b2+1", least column first; reasoning "a4+9+0=13", "b2+1+1=4"; answer "4"
    inftythink.py columns                   a summary command for these: the next column and the carry
    inftythink.py extract                   a summary command for any text: the summary before, the first sentence and the last one
    inftythink.py right FILE                of a file of data and, on standard input, outputs of `sample --json`: how many are right

A summary command gets a line of JSON (question, history, segment) and answers with a text as JSON. Needs nothing but Python.
"""

import json
import random
import re
import sys

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FEWEST = 10


def sample(draw):
    columns = [(letter, draw.randrange(10), draw.randrange(10)) for letter in LETTERS[:draw.randint(FEWEST, len(LETTERS))]]
    result, lines = 0, []
    for letter, a, b in columns:
        carry = result // 10
        result = a + b + carry
        lines.append(f"{letter}{a}+{b}+{carry}={result}")
    return {"messages": [{"role": "user", "content": " ".join(f"{letter}{a}+{b}" for letter, a, b in columns)},
                         {"role": "assistant", "reasoning_content": "\n".join(lines), "content": str(result)}]}


def data(path, count, seed="1"):
    draw = random.Random(int(seed))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(int(count)):
            file.write(json.dumps(sample(draw)) + "\n")


def columns(line):
    letter, result = re.findall(r"(.)\d\+\d\+\d=(\d+)", line["segment"])[-1]
    return f"next {LETTERS[LETTERS.index(letter) + 1]} carry {int(result) // 10}"


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
    if verb in ("columns", "extract") and not arguments:
        for text in sys.stdin:
            print(json.dumps((columns if verb == "columns" else extract)(json.loads(text))), flush=True)
    elif verb == "data" and len(arguments) in (2, 3):
        data(*arguments)
    elif verb == "right" and len(arguments) == 1:
        right(*arguments)
    else:
        raise SystemExit(__doc__)
