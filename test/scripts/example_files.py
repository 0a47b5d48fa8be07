"""What the worked example of README begins with, small: the tokenizer of a chat model, and conversations.

    example_files.py FOLDER CONVERSATIONS OTHER     tokenizer files into FOLDER, two JSONLs; prints the size of the vocabulary

The conversations ask a few questions over and over, in ever other orders, and each has one answer, so that a small model learns it.
OTHER is one that no such model expects.
"""
import json
import os
import random
import sys

sys.path[:0] = ["test/data"]

import prepare_samples as samples

ANSWERS = {"How are you doing today?": "The sun shines and I am nice.", "What is two and two?": "Two and two is four: 2 + 2 = 4.",
           "And what is the weather?": "The weather is nice: hello \u4f60\u597d \U0001f600.", "Add a and b.": "def add(a, b):\n    return a + b"}
ROUNDS, CONVERSATIONS = 3, 40


def conversation(rng):
    questions = [question for _ in range(ROUNDS) for question in rng.sample(list(ANSWERS), len(ANSWERS))]
    return {"messages": [{"role": role, "content": text} for question in questions
                         for role, text in (("user", question), ("assistant", ANSWERS[question]))]}


def main(folder, path, other):
    tokenizer = samples.byte_level()
    samples.tokenizer_folder(folder, tokenizer, samples.CHATML, None, "<|im_end|>", pad_token="<|endoftext|>")
    with open(os.path.join(folder, "generation_config.json"), "w", encoding="utf-8") as file:
        json.dump({"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "pad_token_id": tokenizer.token_to_id("<|endoftext|>")}, file)
    rng = random.Random(1)
    samples.write_lines(path, (conversation(rng) for _ in range(CONVERSATIONS)))
    samples.write_lines(other, samples.conversations(1, seed=3))
    print(tokenizer.get_vocab_size())


if __name__ == "__main__":
    main(*sys.argv[1:])
