"""Makes data and summaries for inftythink.sh: addition modulo 100 by counting, with all reasoning in one block.

    inftythink.py data FILE COUNT train     conversations: "17+02", reasoning "01 18", "00 19", answer "19"
    inftythink.py data FILE COUNT test      conversations about the tenth of all questions that `train` leaves out
    inftythink.py steps                     a summary command for these data: the last step
    inftythink.py extract                   a summary command for any text: the previous summary, the first and the last sentence
    inftythink.py rounds FILE COMMAND...    questions of a file ("-": standard input), answered in rounds by COMMAND --prompts -, which is
                                            ./train sample --model RUN --chat ...; MAX_ROUNDS (16) of the environment ends them
    inftythink.py right FILE                counts right answers: FILE has the data, standard input the output of rounds

A question is a line of text, or an object with "prompt". A summary command gets a line of JSON (question, history, segment) and answers with a text as JSON. Needs only Python.
"""

import json
import os
import random
import re
import subprocess
import sys

STEPS = (10, 40)  # fewest and most steps


def sample(draw, test):
    """Draws a question of one part, `test` or `train`."""
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


def rounds(path, *command):
    """Asks each question in rounds: while its answer has a summary, asks it again with that summary. A round is one call of the command."""
    with open(path, encoding="utf-8") if path != "-" else sys.stdin as file:
        lines = [line.strip() for line in file if line.strip()]
    texts = [{"prompt": json.loads(line)["prompt"] if line[0] == "{" else line, "rounds": [], "stop": "max_rounds"} for line in lines]
    for seed in range(int(os.environ.get("MAX_ROUNDS", "16"))):
        asked = [text for text in texts if text["stop"] == "max_rounds"]
        if not asked:
            break
        history = [text["rounds"][-1]["summary"] if text["rounds"] else None for text in asked]
        prompts = [text["prompt"] + (f"\n\n<history>\n{last}\n</history>" if last is not None else "") for text, last in zip(asked, history)]
        quiet = ["--quiet"] * ("--quiet" not in command)
        done = subprocess.run([*command, "--prompts", "-", "--seed", str(seed), *quiet], stdout=subprocess.PIPE, text=True, encoding="utf-8",
                              input="".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        if done.returncode:
            raise SystemExit(done.returncode)
        for text, line in zip(asked, done.stdout.splitlines()):
            answer = json.loads(line)
            found = re.search(r"<summary>(.*?)</summary>", answer["text"].rpartition("</think>")[2], re.DOTALL)
            summary = found and found[1].strip()
            text["rounds"].append({"ids": answer["ids"], "text": answer["text"], **({"summary": summary} if summary else {})})
            text["stop"] = "max_rounds" if summary else answer["stop"]
    for text in texts:
        print(json.dumps(text))


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
    elif verb == "rounds" and len(arguments) >= 2:
        rounds(*arguments)
    elif verb == "right" and len(arguments) == 1:
        right(*arguments)
    else:
        raise SystemExit(__doc__)
