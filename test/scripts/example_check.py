"""The worked example's result against transformers, in fp32: example_check.py TUNED SHARD SAMPLE EVAL_LOSS

TUNED: the folder that convert wrote; SHARD: one conversation, as prepare.py has it; SAMPLE: what `train sample --json --temperature 0
--chat` printed; EVAL_LOSS: what `train eval` found for SHARD. Closes with `N passed, N failed, N skipped`.
"""
import json
import os
import sys

from checks import check, close

sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "data")]

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shards

tuned, shard, sample, eval_loss = sys.argv[1:]
QUESTION = "What is two and two?"

tokenizer = AutoTokenizer.from_pretrained(tuned)
model = AutoModelForCausalLM.from_pretrained(tuned).eval()
check("the weights are fp32", model.dtype == torch.float32, model.dtype)
with open(sample, encoding="utf-8") as file:
    ours = json.load(file)
inputs = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True,
                                       return_tensors="pt")
prompt = inputs["input_ids"][0].tolist()
check("the prompt's ids", ours["prompt_ids"] == prompt, f"{ours['prompt_ids']}, transformers: {prompt}")
with torch.no_grad():
    ids = model.generate(**inputs, max_new_tokens=256, do_sample=False)[0, len(prompt):].tolist()
check("the answer's ids", ours["ids"] == ids, f"{ours['ids']}, transformers: {ids}")
check("the answer's text", ours["text"] == tokenizer.decode(ids, skip_special_tokens=True), ours["text"])

shard = shards.Shard(shard)
ids, labels = torch.from_numpy(shard.ids.astype("int64")), None
labels = torch.where(torch.from_numpy(shard.counts.astype("int64")) == 1, ids, -100)
check("a shard of one conversation", shard.documents == 1 and 0 < (labels >= 0).sum() < len(ids), shard.documents)
with torch.no_grad():
    theirs = model(ids[None], labels=labels[None]).loss.item()
difference = abs(theirs - float(eval_loss)) / theirs
print(f"loss of one conversation of {len(ids)} tokens: {eval_loss}, transformers {theirs:.9f}, relative difference {difference:.1e}")
check("the loss", difference < 1e-5, f"{eval_loss}, transformers: {theirs}")
close()
