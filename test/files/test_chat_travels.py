"""The way of a chat template: prepare -> train -> sample, rollout -> convert, for six kinds of ends of a turn: test_chat_travels.py TRAIN WORK

Text and ids are those of the template and the tokenizers library; the folder's files are read as JSON. Closes with `N passed, N failed,
N skipped`.
"""
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys

from checks import TRAIN, WORK, check, close, train

sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "data")]

from tokenizers import processors

import encode
import prepare
import prepare_samples as samples
import shards
import templates
import tokenizer_file

os.chdir(WORK)
END, DONE = "<|endoftext|>", "<|im_end|>"
GIVEN = "{% for m in messages %}{{ '### Q: ' + m.content + '\n### A:' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}"
PIECES = "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + '[/]\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
LLAMA3 = ("{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content | trim + '<|end|>' }}{% endfor %}"
          "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}")
#         template in the folder, bos, eos, special tokens; prepare.py's own; ends of a turn; eos_token and eos_token_id of the result
KINDS = {"chatml": (samples.CHATML, None, END, [], None, [DONE], DONE, [END, DONE]),
         "llama3": (LLAMA3, "<s>", END, ["<|start|>", "<|message|>", "<|end|>"], None, ["<|end|>"], "<|end|>", [END, "<|end|>"]),
         "gemma4": (*samples.FAMILIES["channels"], None, ["<turn|>", "<|answer>"], "<turn|>", ["</s>", "<turn|>", "<|answer>"]),
         "gpt-oss": (*samples.FAMILIES["harmony"], None, ["<|return|>", "<|call|>"], "<|return|>", ["<|return|>", "<|call|>"]),
         "pieces": (PIECES, None, END, [], None, [], END, END),
         "given": (samples.CHATML, None, DONE, [], GIVEN.replace("eos_token", f"'{END}'"), [END], END, [DONE, END])}
ROWS = [("two and two?", "four"), ("a boat?", "on the lake")]


def say(*words):
    """Runs prepare.py here, and returns what it says."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        prepare.main(["--workers", "1", "--force", *words])
    return out.getvalue() + err.getvalue()


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file) if path.endswith(".json") else file.read()


def refused(what, words, *arguments):
    done = subprocess.run([TRAIN, *map(str, arguments)], capture_output=True, text=True)
    check(what, done.returncode == 1 and words in done.stderr, done.stderr[-300:])


talk = lambda q, a: [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
samples.write_lines("chat.jsonl", [{"messages": talk(*row)} for row in ROWS * 4])
samples.write_lines("prompts.jsonl", [{"prompt": talk(*row)[:1]} for row in ROWS])
samples.write_lines("plain.jsonl", [{"text": "two and two is four"}] * 4)
train("convert", "--init", "llama,hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2,vocab_size=480", "--out", "weights")
for name, (template, bos, eos, special, other, ends, eos_after, ids_after) in KINDS.items():
    os.mkdir(name)
    os.chdir(name)
    shutil.copytree("../weights", "model")
    tokenizer = samples.byte_level()
    tokenizer.add_special_tokens(special)
    samples.tokenizer_folder("model", tokenizer, template, bos, eos, pad_token=END)
    id_of = lambda texts: [tokenizer.token_to_id(text) for text in texts] if isinstance(texts, list) else tokenizer.token_to_id(texts)
    config = {**read("model/config.json"), "eos_token_id": id_of(eos), "pad_token_id": id_of(END)}
    for file, value in (("config", config), ("generation_config", {"eos_token_id": id_of(eos), "top_k": 20})):
        samples.write_text(f"model/{file}.json", json.dumps(value, indent=2))
    given = ["--chat-template", samples.write_text("given.jinja", other)] if other else []
    said = say("--tokenizer", "model", *given, "--out", "shards", "../chat.jsonl")
    check(f"{name}: a note tells of an end of several pieces", ("tokens: sample and rollouts do not end there" in said) == (name == "pieces"), said)
    train("train", "--model", "model", "--data", "shards/train-*.bin", "--samples", 4, "--epochs", 40, "--lr", 2e-2, "--seq-len", 256, "--out", "run")
    train("convert", "--model", "run", "--out", "out")
    check(f"{name}: the template", [read(f"{place}/chat_template.jinja") for place in ("shards", "run", "out")] == [other or template] * 3)
    after = [read(f"out/{file}.json") for file in ("tokenizer_config", "generation_config")]
    check(f"{name}: ends in the folder", (after[0]["eos_token"], after[0]["pad_token"], after[1]) ==
          (eos_after, END, {"eos_token_id": id_of(ids_after), "top_k": 20}), after)
    check(f"{name}: config.json stays", read("out/config.json") == {**config, **{k: v for k, v in read("out/config.json").items() if "dtype" in k}})
    content = open("out/tokenizer.tok", "rb").read()
    found = tokenizer_file.section_of(content, "turn_ends")
    check(f"{name}: ends of a turn", [tokenizer.id_to_token(i) for i in memoryview(found).cast("I")] == ends)
    compiled = templates.ChatTemplate(other or template, {"eos_token": eos, **({"bos_token": bos} if bos else {})})
    for q, a in ROWS:
        text = compiled.render(talk(q, a)[:1], True)
        whole = tokenizer.encode(compiled.render(talk(q, a)), add_special_tokens=False).ids
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for model in ("run", "out"):
            answer = json.loads(train("sample", "--model", model, "--chat", "--prompt", q, "--temperature", 0, "--max-new-tokens", 16, "--json"))
            check(f"{name}: {model} is asked by the template", answer["prompt_ids"] == ids, answer)
            own, wanted = answer["ids"], whole[len(ids):]
            check(f"{name}: {model} ends its turn", own[:len(wanted)] == wanted[:len(own)] and (answer["stop"] == "eos") == bool(ends), f"{answer}, {whole}")
    os.chdir("..")

# ---- rollouts, adapters, --tokenizer, data of several templates, resuming -------------------------------------------------------------------
os.chdir("given")
given = ["--chat-template", "given.jinja"]
say("--tokenizer", "out", *given, "--out", "prompts", "../prompts.jsonl")
train("train", "--model", "out", "--data", "prompts/train-*.bin", "--objective", "grpo", "--rollout", "--reward-command", "sed -u s/.*/1/", "--batch", 2,
      "--group-size", 2, "--max-new-tokens", 16, "--seq-len", 256, "--steps", 1, "--temperature", 0.01, "--out", "rolled")
rolled = [json.loads(line) for line in open("rolled/rollouts.jsonl")]
check("rollouts end at the end of a turn", len(rolled) == 4 and all(r["ended"] and r["completion"].strip() in dict(ROWS).values() for r in rolled), rolled)
train("train", "--model", "model", "--data", "shards/train-*.bin", "--lora-rank", 2, "--steps", 1, "--seq-len", 256, "--out", "lora")
train("convert", "--model", "lora", "--out", "merged")
train("convert", "--adapter", "lora", "--model", "model", "--adapter-only", "--out", "adapters")
check("a run of adapters keeps it", all(read(f"{place}/chat_template.jinja") == read("given.jinja") for place in ("lora", "merged", "adapters")))
tokenizer_file.write_tokenizer_file("own.tok", "model")
train("convert", "--model", "run", "--tokenizer", "own.tok", "--out", "own")
check("--tokenizer overrides", read("own/chat_template.jinja") == samples.CHATML and read("own/tokenizer_config.json")["eos_token"] == DONE)
eos, done, own = id_of(DONE), id_of(END), read("model/config.json")
bare = {key: value for key, value in own.items() if not key.endswith("_token_id")}
#                                 config.json, generation_config.json before and after
for what, config, before, after in (
        ("an id twice", own, {"eos_token_id": [eos, done, eos], "top_k": 1}, {"eos_token_id": [eos, done], "top_k": 1}),
        ("ids of the text model", {**bare, "text_config": {"eos_token_id": [eos, 7], "bos_token_id": 3}}, None,
         {"bos_token_id": 3, "eos_token_id": [eos, 7, done]}),
        ("a pad of -1", {**bare, "eos_token_id": eos, "pad_token_id": -1}, None, {"pad_token_id": -1, "eos_token_id": [eos, done]})):
    shutil.copytree("model", "odd", dirs_exist_ok=True)
    samples.write_text("odd/config.json", json.dumps(config))
    samples.write_text("odd/generation_config.json", json.dumps(before)) if before else os.remove("odd/generation_config.json")
    train("convert", "--model", "run", "--like", "odd", "--out", "kept", "--overwrite")
    check(f"generation_config.json: {what}", read("kept/generation_config.json") == after, read("kept/generation_config.json"))
writes = samples.write_text("writes.jinja", samples.CHATML.replace(DONE, END) + "{{ eos_token }}")
say("--tokenizer", "model", "--chat-template", writes, "--out", "writes", "../chat.jsonl")
train("train", "--model", "model", "--data", "writes/train-*.bin", "--steps", 1, "--seq-len", 256, "--out", "rendered")
train("convert", "--model", "rendered", "--out", "kept", "--overwrite")
after = [read(f"kept/{file}.json") for file in ("tokenizer_config", "generation_config")]
check("a template that writes eos_token keeps it", (after[0]["eos_token"], after[1]["eos_token_id"]) == (DONE, [eos, done]), after)
open_end = ("{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{{ '<think></think>\n' if m.role == 'assistant' and loop.last }}"
            "{{ m.content.split('</think>')[-1] | trim }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
found = tokenizer_file.section_of(tokenizer_file.tokenizer_bytes(tokenizer_file.Source("model"), open_end), "turn_ends")
check("a turn ends at the next one's beginning", list(memoryview(found).cast("I")) == [id_of("<|im_start|>")])
say("--tokenizer", "model", "--out", "others", "../chat.jsonl")
say("--tokenizer", "model", "--out", "plain", "../plain.jsonl")
header = lambda path: shards.Shard(path).vocabulary
shutil.copytree("model", "padded")
samples.write_text("padded/tokenizer_config.json", json.dumps({**read("model/tokenizer_config.json"), "pad_token": "<pad>", "extra_special_tokens": ["<new>"]}))
samples.write_lines("new.jsonl", [{"text": "two <new>"}])
for name, data in (("unused", "../plain.jsonl"), ("used", "new.jsonl")):
    say("--tokenizer", "padded", "--out", name, data)
vocabularies = [header(f"{name}/train-00000.bin") for name in ("plain", "unused", "used")]
check("added tokens count where they are used", vocabularies == [vocabularies[0], vocabularies[0], vocabularies[0] + 2], vocabularies)
check("plain text has no template", sorted(os.listdir("plain")) == ["prepare.json", "tokenizer.tok", "train-00000.bin"])
step = ["--model", "model", "--steps", 1, "--seq-len", 256, "--out"]
both = "others/train-00000.bin was rendered with one chat template, shards/train-00000.bin with another"
refused("shards of two templates", both, "train", "--data", "shards/train-*.bin", "others/train-*.bin", *step, "a")
refused("--val-data of another", "shards/train-00000.bin was rendered with one chat template, others/train-00000.bin",
        "train", "--data", "shards/train-*.bin", "--val-data", "others/train-*.bin", *step, "a")
train("train", "--data", "shards/train-*.bin", "--val-data", "others/train-*.bin", "--any-tokenizer", *step, "any")
train("train", "--data", "plain/train-*.bin", "shards/train-*.bin", *step, "mixed")
train("train", "--data", "plain/train-*.bin", *step, "alone")
check("plain text goes with any", read("mixed/chat_template.jinja") == read("given.jinja") and not os.path.exists("alone/chat_template.jinja"))
shutil.copy("own.tok", "mixed/tokenizer.tok")
train("train", "--data", "plain/train-*.bin", "shards/train-*.bin", *step[:2], "--steps", 2, *step[4:], "mixed", "--resume")
check("a resumed run keeps its copy", open("mixed/tokenizer.tok", "rb").read() == open("own.tok", "rb").read())
shutil.move("mixed/tokenizer.tok", "model/tokenizer.tok")
train("train", "--data", "plain/train-*.bin", "shards/train-*.bin", *step[:2], "--steps", 2, *step[4:], "mixed", "--resume")
check("without a copy it takes the model's", read("mixed/chat_template.jinja") == samples.CHATML)
os.remove("model/tokenizer.tok")
os.remove("mixed/tokenizer.tok")
train("train", "--data", "plain/train-*.bin", *step, "mixed", "--overwrite")
check("a new run removes an old run's template", not os.path.exists("mixed/chat_template.jinja"))
samples.write_text("shards/tokenizer.tok", "damaged")
train("train", "--data", "shards/train-*.bin", "--tokenizer", "own.tok", *step, "given")
check("--tokenizer overrides a damaged file", open("given/tokenizer.tok", "rb").read() == open("own.tok", "rb").read())
refused("--tokenizer is a folder", "shards: is a folder", "convert", "--model", "run", "--tokenizer", "shards", "--out", "a")
tokenizer = samples.byte_level()
tokenizer.add_special_tokens(["<more>"])
samples.tokenizer_folder("foreign", tokenizer, GIVEN, None, DONE)
tokenizer_file.write_tokenizer_file("shards/tokenizer.tok", "foreign", read("given.jinja"))
check("shards beside the file of another tokenizer", "no tokenizer.tok next to it has its chat template" in subprocess.run(
    [TRAIN, "train", "--data", "shards/train-00000.bin", *map(str, step), "lost"], capture_output=True, text=True).stderr)
# ---- a prompt of sample is a prompt of prepare.py ---------------------------------------------------------------------------------------------
tokenizer = samples.byte_level()
around = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
own = encode.Encoder(encode.Options(samples.tokenizer_folder("around", tokenizer, None, "<s>", "</s>")))
tokenizer_file.write_tokenizer_file("around.tok", "around")
texts = ["hello world", "<s>hello", "a\x0cb\x1b[0m", "\x07", "<s>", "tab\there"]
samples.write_text("prompts.txt", "".join(f"{text}\n{json.dumps({'prompt': text})}\n" for text in texts))
lines = train("sample", "--model", "../weights", "--tokenizer", "around.tok", "--prompts", "prompts.txt", "--max-new-tokens", 1, "--json").splitlines()
expected = [own.encode({"prompt": text})[1][0].ids.tolist() for text in texts for _ in range(2)]
check("prompts", [json.loads(line)["prompt_ids"] for line in lines] == expected, f"{lines} {expected}")
one = json.loads(train("sample", "--model", "../weights", "--tokenizer", "around.tok", "--prompt", texts[0], "--max-new-tokens", 1, "--json"))
check("a prompt", one["prompt_ids"] == expected[0] and expected[0][-1] != around[1][1], one)
close()
