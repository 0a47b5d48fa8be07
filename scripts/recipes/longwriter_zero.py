"""Reward commands for long writing (LongWriter-Zero, arXiv 2506.18841), and the toy data of longwriter_zero.sh:

    longwriter_zero.py length               1 if the answer has the wanted number of words, falling to 0 with the distance
    longwriter_zero.py format               1 if the completion is <think>...</think><answer>...</answer>, and nothing else
    longwriter_zero.py repetition [N]       the share of the answer's runs of N words (4) that did not occur earlier in it
    longwriter_zero.py data FOLDER          toy data: form.jsonl, texts of any length, and task.jsonl, prompts that ask for a length
    longwriter_zero.py counts               a judge for toy data: the share of an answer's numbers that follow the previous number

Each reads lines of JSON (scripts/guides/rewards.md) and prints a number for each. The wanted length is in a row's columns: `words` (10 % more
or less are right), or `min_words` and `max_words`; the answer null means that a row has none. The answer is the text between <answer> and
</answer>, else the text after </think>. A word is a run without spaces; each Chinese or Japanese character is one.
"""

import json
import os
import random
import re
import sys

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
MARK = re.compile(r"(</?(?:think|answer)>)")
FORM = ["<think>", "</think>", "<answer>", "</answer>"]


def answer_of(sample):
    text = sample["completion"]
    found = re.search(r"<answer>(.*?)(</answer>|\Z)", text, re.S)
    return found[1] if found else text.rpartition("</think>")[2]


def words_of(sample):
    return WORD.findall(answer_of(sample))


def length(sample):
    """Returns 1 from the least to the most wanted words; below, words / least; above, falling to 0 at twice the most."""
    words = sample.get("words")
    least, most = (0.9 * words, 1.1 * words) if words else (sample.get("min_words"), sample.get("max_words"))
    count = len(words_of(sample))
    if not most:
        return None
    if count < (least or 0):
        return count / least
    return 1.0 if count <= most else max(0.0, 2 - count / most)


def form(sample):
    """Returns 1 or 0. The opening <think> may stand in the prompt; a completion that was cut off has no form."""
    opened = sample["prompt"].rstrip().endswith(FORM[0])
    parts = MARK.split(FORM[0] * opened + sample["completion"].strip())
    texts = [text.strip() for text in parts[::2]]
    return float(parts[1::2] == FORM and not (texts[0] or texts[2] or texts[4]) and bool(texts[3]) and sample.get("ended", True))


def repetition(sample, n=4):
    words = words_of(sample)
    runs = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    return len(set(runs)) / len(runs) if runs else float(bool(words))


# ---- the toy: count to any number; then, from rewards, to the number in the prompt ------------------------------------------------
def counts(sample):
    numbers = [int(word) if word.isdecimal() else -1 for word in words_of(sample)]
    return sum(a == b for a, b in zip(numbers, range(1, len(numbers) + 1))) / max(len(numbers), 1)


MOST, PROMPTS = 12, 2000


def data(folder):
    draw = random.Random(1)
    with open(os.path.join(folder, "form.jsonl"), "w") as form, open(os.path.join(folder, "task.jsonl"), "w") as task:
        for _ in range(PROMPTS):
            words, written = draw.randint(2, MOST), draw.randint(2, MOST)
            numbers = " ".join(map(str, range(1, written + 1)))
            print(json.dumps({"prompt": f"{words} words:", "completion": f"<think>{written}</think><answer>{numbers}</answer>"}), file=form)
            print(json.dumps({"prompt": f"{words} words:", "words": words}), file=task)


REWARDS = {"length": length, "format": form, "repetition": repetition, "counts": counts}


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:] or [""]
    if verb == "data" and len(arguments) == 1:
        data(*arguments)
    elif verb in REWARDS and (not arguments or verb == "repetition" and len(arguments) == 1 and arguments[0].isdecimal()):
        for line in sys.stdin:
            print(json.dumps(REWARDS[verb](json.loads(line), *map(int, arguments))), flush=True)
    else:
        raise SystemExit(__doc__)
