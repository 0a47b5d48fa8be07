#!/usr/bin/env python3
"""Random conversations through real chat templates: tokens of data/prepare.py, and which of them count, against TRL's assistant_only_loss.

    python dev/compare/conversations.py [--count 300] [--seed 1] [--show]      needs trl, transformers, torch, tokenizers, jinja2, numpy

TRL ships the template of a family and one for training, whose {% generation %} blocks say what counts. TRL gets arguments of tool calls as
objects, reasoning under both of its names, and blocks of masked turns are cleared. Columns:

    equal      with the training template tokens and masks are the same
    stated     they are, once TRL gets reasoning out of the content in the field that the template has for it
    refused    by both; or here as the template leaves out a message, and TRL's tokens are the same without it
    own        with the model's template tokens are the same, in brackets: and masks, where both templates give one text, but for the beginning
               of a block that the generation prompt holds
    no turns   turns are not found in the model's template, which is refused

Exit 1 if anything is different; --show prints the first of each family.
"""
import argparse
import collections
import json
import pathlib
import random
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "test" / "data")]

import transformers
import trl

import encode
import prepare_samples as samples
import records
import templates

SHIPPED = pathlib.Path(trl.__file__).parent / "chat_templates"
FAMILIES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_8", "llama3", "gemma3", "phi3_5", "lfm2_v2", "glm4moe", "nemotron_3_nano", "gptoss")
COLUMNS = ("equal", "stated", "refused", "DIFFERENT", "own", "(masks)", "no turns")


def blocks(mask):
    return [i for i, (before, own) in enumerate(zip([0, *mask], mask)) if own and not before]


class Family:
    def __init__(self, name):
        self.own, self.training = ((SHIPPED / f"{name}{kind}.jinja").read_text(encoding="utf-8") for kind in ("", "_training"))
        with tempfile.TemporaryDirectory() as folder:
            library = samples.byte_level()
            library.add_special_tokens(sorted(set(samples.MARKS.findall(self.own))))
            samples.tokenizer_folder(folder, library, self.own, "<s>", "</s>")
            self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            self.ours = {text: encode.Encoder(encode.Options(tokenizer=folder, chat_template=str(SHIPPED / f"{name}{kind}.jinja")))
                         for text, kind in ((self.own, ""), (self.training, "_training"))}

    def trl(self, template, row, given):
        """Returns (ids, mask); (None, None) if it refuses. Blocks are in the order of turns."""
        try:
            found = self.tokenizer.apply_chat_template(given, tools=row.get("tools"), chat_template=template, return_dict=True,
                                                       return_assistant_tokens_mask=template == self.training)
        except Exception:  # a template is a program
            return None, None
        ids, mask = list(found["input_ids"]), list(found.get("assistant_masks", ()))
        for begin, turn in zip(blocks(mask), (message for message in row["messages"] if message["role"] == "assistant")):
            while records.masked(turn) and begin < len(mask) and mask[begin]:
                mask[begin], begin = 0, begin + 1
        return ids, [0, *mask[1:]]

    def left_out(self, template, row, given, detail):
        gone = re.match(r"the template leaves out the (\w+) of message (\d+)", detail)
        at = int(gone[2]) - 1 if gone else 0
        other = {**given[at], **({"content": "gone"} if gone and gone[1] == "content" else {"tool_calls": []})}
        return gone and self.trl(template, row, given)[0] == self.trl(template, row, [*given[:at], other, *given[at + 1:]])[0]

    def without_prompt(self, ids, mask, ours):
        user, mask = [{"role": "user", "content": "x"}], list(mask)
        closed, asked = (self.tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=more) for more in (False, True))
        for begin in blocks(mask):
            end = next((i for i in range(begin, len(ids)) if ours[i] or not mask[i]), begin)
            if self.tokenizer.decode(ids[begin:end]) in asked[len(closed):]:
                mask[begin:end] = [0] * (end - begin)
        return mask

    def outcomes(self, template, row, given):
        ids, mask = self.trl(template, row, given)
        try:
            record, (document,) = self.ours[template].understood(row)
        except records.Rejected as rejected:
            both = ids is None or rejected.reason == records.NO_TARGET and not any(mask)
            lost = not both and self.left_out(template, row, given, rejected.detail)
            return ["refused" if both or lost else "no turns" if template == self.own and "is not found" in rejected.detail else "DIFFERENT"]
        found, counts = document.ids.tolist(), document.counts.tolist()
        moved = found != ids and any("became reasoning_content" in text for text in record.told)
        if moved:
            given = list(map(samples.in_field, given))
            ids, mask = self.trl(template, row, given)
        if template == self.training:
            return ["DIFFERENT" if (ids, mask) != (found, counts) else "stated" if moved else "equal"]
        trained, mask = self.trl(self.training, row, given)
        if ids != found or trained == ids and self.without_prompt(ids, mask, counts) != counts:
            return ["DIFFERENT"]
        return ["own", *["(masks)"] * (trained == ids)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    options, bad = parser.parse_args(), 0
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, {options.count} conversations, seed {options.seed}")
    print(f"{'family':22} {' '.join(f'{name:>9}' for name in COLUMNS)}")
    for name in FAMILIES:
        family, rng, sums = Family(name), random.Random(options.seed), collections.Counter()
        for _ in range(options.count):
            row, given = samples.talk(rng)
            for template in (family.training, family.own):
                outcomes = family.outcomes(template, row, given)
                if options.show and "DIFFERENT" in outcomes and not sums["DIFFERENT"]:
                    print("training" if template == family.training else "own", json.dumps(row, ensure_ascii=False))
                sums.update(outcomes if template == family.training or outcomes != ["refused"] else ())
        print(f"{name:22} {' '.join(f'{sums[column]:9}' for column in COLUMNS)}", flush=True)
        bad += sums["DIFFERENT"]
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
