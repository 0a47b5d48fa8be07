#!/usr/bin/env python3
"""
Makes formats.json: the tokens, and which of them count, that TRL's own trainers make of samples of every format of its documentation,
with tokenizers and chat templates of test/data/prepare_samples.py. The test reads the committed file; only whoever changes it runs this.

    pip install torch==2.15.0 transformers==5.24.0 accelerate datasets trl==1.16.0 jinja2
    python make_formats.py

A trainer is made without a model: only its preparation of a data set is called. What counts is what its collator takes the loss of: of
preferences and unpaired preferences the completion, of prompt-completion too (completion_only_loss), else every token.
"""
import json
import os
import pathlib
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "data")]

import datasets
import transformers
import trl

import prepare_samples as samples

datasets.disable_progress_bars()


def said(role, content):
    return {"role": role, "content": content}


USER, HELLO, NO, AND, BYE = said("user", "Hi"), said("assistant", "hello world"), said("assistant", "no"), said("user", "And?"), said("assistant", "Bye")
THOUGHT = said("assistant", "<think>\nhm\n</think>\n\nBye")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}]
ROWS = {  # of each trainer
    "sft": [{"text": "hello world"}, {"text": "two hello</s>"}, {"messages": [USER, HELLO, AND, BYE]}, {"messages": [USER, HELLO], "tools": TOOLS},
            {"messages": [USER, THOUGHT], "chat_template_kwargs": {"enable_thinking": False}},
            {"prompt": "hello", "completion": " world"}, {"prompt": "hello ", "completion": "world"}, {"prompt": "hel", "completion": "lo"},
            {"prompt": [USER], "completion": [HELLO]}, {"prompt": [USER, HELLO, AND], "completion": [THOUGHT]},
            {"prompt": [USER, HELLO, AND], "completion": [BYE]}, {"prompt": [USER], "completion": [HELLO], "tools": TOOLS},
            {"prompt": [USER], "completion": [THOUGHT], "chat_template_kwargs": {"enable_thinking": False}}],
    "dpo": [{"prompt": "hello", "chosen": " world", "rejected": " w"}, {"prompt": "hello ", "chosen": "world", "rejected": "hello"},
            {"chosen": "hello world", "rejected": "hello w\u00e9"}, {"chosen": "hello hello", "rejected": "hello helm"},
            {"prompt": [USER], "chosen": [HELLO], "rejected": [NO]}, {"chosen": [USER, HELLO, AND, THOUGHT], "rejected": [USER, HELLO, AND, NO]},
            {"chosen": [USER, HELLO], "rejected": [USER, NO], "tools": TOOLS}],
    "kto": [{"prompt": "hello", "completion": " world", "label": True}, {"prompt": "hello ", "completion": "world", "label": False},
            {"chosen": "hello world", "rejected": "hello w\u00e9"}, {"chosen": "hello hello", "rejected": "hello helm"},
            {"chosen": [USER, HELLO, AND, THOUGHT], "rejected": [USER, HELLO, AND, NO]},
            {"prompt": [USER], "completion": [HELLO], "label": True}, {"prompt": [USER, HELLO, AND], "completion": [THOUGHT], "label": False}],
    "grpo": [{"prompt": "hello"}, {"prompt": [USER]}, {"prompt": [USER, HELLO, AND]}]}


def made(trainer, tokenizer):
    """A trainer with what its preparation looks at."""
    it = trainer.__new__(trainer)
    it.processing_class = it._tokenizer = tokenizer
    it._is_vlm = it._is_vision_dataset = it.calculate_KL = False
    it.completion_only_loss, it.chat_template, it.chat_template_kwargs = True, None, {}
    it.environment_factories = it.tools = None
    return it


def arguments(**more):
    return types.SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start", dataset_text_field="text",
                                 assistant_only_loss=False, dataset_kwargs=None, eos_token=None, shuffle_dataset=False, **more)


def prepared(name, tokenizer, row):
    """[ids, first that counts] of each document; of prompts nothing counts."""
    if name == "grpo":
        ids = made(trl.GRPOTrainer, tokenizer)._tokenize_prompts([row["prompt"]])[0][0]
        return [[list(ids), len(ids)]]
    data = datasets.Dataset.from_list([row])
    if name == "sft":
        (one,) = made(trl.SFTTrainer, tokenizer)._prepare_dataset(data, tokenizer, arguments(), False, None, "train")
        labels = one.get("labels", one["input_ids"])
        return [[one["input_ids"], next((i for i, label in enumerate(labels) if label != -100), len(labels))]]
    trainer = {"dpo": trl.DPOTrainer, "kto": trl.KTOTrainer}[name]
    found = made(trainer, tokenizer)._prepare_dataset(data, tokenizer, arguments(), "train")
    answers = ("chosen_ids", "rejected_ids") if name == "dpo" else ("completion_ids",)
    return [[one["prompt_ids"] + one[answer], len(one["prompt_ids"])] for one in found for answer in answers]


def main():
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in samples.fixed_folders(folder).items():
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            for trainer, rows in ROWS.items():
                for row in rows:
                    cases.append({"tokenizer": name, "trainer": trainer, "row": row, "documents": prepared(trainer, tokenizer, row)})
    with open(HERE / "formats.json", "w", encoding="utf-8") as file:
        versions = f"trl {trl.__version__}, transformers {transformers.__version__}"
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        file.write(f'{{"made with": "{versions}",\n"cases": [\n{lines}]}}\n')
    print(f"{len(cases)} cases, {os.path.getsize(HERE / 'formats.json'):,} bytes")


if __name__ == "__main__":
    main()
