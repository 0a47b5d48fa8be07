"""Small files that the worked examples of README files begin with: example_files.py FOLDER, which is made. In it

    tokenizer/            of a chat model
    known.jsonl           conversations that a model is to know already: a few questions over and over, each with one answer
    conversations.jsonl   a new kind of them, of which every one is another, and those among them
    preferences.jsonl     pairs
    questions.jsonl       prompts with answers
    other.jsonl           one conversation that no such model expects

The size of the vocabulary is printed.
"""
import json
import os
import random
import sys

sys.path[:0] = ["test/data"]

import prepare_samples as samples

ANSWERS = {"How are you doing today?": "The sun shines and I am nice.", "What is two and two?": "Two and two is four: 2 + 2 = 4.",
           "And what is the weather?": "The weather is nice: hello \u4f60\u597d \U0001f600.", "Add a and b.": "def add(a, b):\n    return a + b"}
WORDS = "hello world how are you doing today the weather is nice and sun shines two four".split()


def messages(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * len(texts), texts)]


def known(rng):
    return {"messages": messages(*(text for _ in range(3) for question in rng.sample(list(ANSWERS), len(ANSWERS))
                                   for text in (question, ANSWERS[question])))}


def new(rng):
    text, question = " ".join(rng.choices(WORDS, k=rng.randint(2, 6))), rng.choice(list(ANSWERS))
    return {"messages": messages("Say it: " + text, f"You said: {text}. Is that right?", question, ANSWERS[question])}


def pair(rng):
    question = rng.choice(list(ANSWERS))
    return {"prompt": messages(question), "chosen": ANSWERS[question], "rejected": " ".join(rng.choices(WORDS, k=4))}


def main(folder):
    rng = random.Random(1)
    tokenizer = samples.byte_level()
    place = os.path.join(folder, "tokenizer")
    samples.tokenizer_folder(place, tokenizer, samples.CHATML, None, "<|im_end|>", pad_token="<|endoftext|>")
    with open(os.path.join(place, "generation_config.json"), "w", encoding="utf-8") as file:
        json.dump({"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "pad_token_id": tokenizer.token_to_id("<|endoftext|>")}, file)
    for name, lines in (("known", [known(rng) for _ in range(40)]), ("conversations", [new(rng) for _ in range(4000)]),
                        ("preferences", [pair(rng) for _ in range(40)]), ("other", samples.conversations(1, seed=3)),
                        ("questions", [{"prompt": messages(question), "answer": ANSWERS[question]} for question in ANSWERS] * 4)):
        samples.write_lines(os.path.join(folder, name + ".jsonl"), lines)
    print(tokenizer.get_vocab_size())


if __name__ == "__main__":
    main(sys.argv[1])
