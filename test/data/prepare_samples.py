"""Tokenizers, chat templates and conversations for the tests of data/: made here, in the manner of those that models come with."""

import json
import math
import os
import random
import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "data")]

import records  # noqa: E402
import templates  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
LINES = ["hello world, how are you doing today?", "the weather is nice and the sun shines", "two and two is four: 2 + 2 = 4",
         "def add(a, b):\n    return a + b\n", "user assistant system tool model think", "  spaces   between    words  "]

CHATML = """{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# No generation prompt; the system message is put into the last user message, so that prefixes are none.
MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if system else messages %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if system and loop.last or system and loop.index0 == rest | length - 2 else '') }}
        {{- message.content | trim + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant') }}
    {%- endif %}
{%- endfor %}"""

# Reasoning stays in the last turn only, where it stands in a block of its own, empty or not.
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set reasoning = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The generation prompt opens the reasoning, which old turns do not have any more.
OPENING = THINKING.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")

# As Qwen3.5's: contents are trimmed; reasoning stands behind the last question alone, in a block that the generation prompt opens, or
# closes, too; calls have their arguments in tags; what tools answer is a user's turn; a system message comes first, or not at all.
HYBRID = """{%- set turns = namespace(question=-1) %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'user' and not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
        {%- set turns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if turns.question < 0 %}{{ raise_exception('no question of a user') }}{% endif %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>' + ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message behind others') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content %}
        {%- if reasoning is not string and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > turns.question %}{{ '<think>\n' + (reasoning or '') | trim + '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' * (0 if loop.first and not content else 2 if loop.first else 1) + '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' + ('\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif %}"""

# As Qwen3.8's: reasoning is read from its field alone, and every turn has its block.
FIELD = HYBRID.replace("reasoning is not string and '</think>' in content", "false").replace("loop.index0 > turns.question", "true")

# In the manner of gpt-oss's: reasoning is a message of its own, of the last turn only, which ends with another token; so does a call of a
# tool, whose name is in its answer again.
HARMONY = """{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set tool = m.tool_calls[0].function %}
        {{- '<|start|>assistant to=' + tool.name + '<|message|>' + tool.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking and loop.last and not add_generation_prompt }}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
    {%- else %}
        {{- '<|start|>' + ('developer' if m.role == 'system' else messages[loop.index0 - 1].tool_calls[0].function.name if m.role == 'tool' else m.role) }}
        {{- '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# In the manner of Gemma 4's: reasoning only after the last question, taken out of contents; a tool's answer is within the turn.
CHANNELS = """{%- set ns = namespace(last=0, tool=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- m.content + '<answer|>' }}
    {%- else %}
        {{- '' if ns.tool else '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
        {{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' if m.reasoning_content and loop.index0 > ns.last }}
        {%- set text %}{% for part in m.content.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor %}{% endset %}
        {{- (text if m.role == 'assistant' else m.content) | trim }}
        {{- m.tool_calls[0].function.name + '<|answer>' if m.tool_calls else '<turn|>\n' }}
    {%- endif %}
    {%- set ns.tool = m.role == 'tool' %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{ '<|turn>model\n' }}{% endif %}"""

# In the manner of Gemma 4's: an assistant's text beside its call is written after the tool's answers. INTO (empty): within the last answer.
MOVING = """{%- for m in messages %}
    {%- set call = messages[:loop.index0] | selectattr('tool_calls') | list | last %}
    {%- set moved = call.content if m.role == 'tool' and (loop.last or messages[loop.index0 + 1].role != 'tool') else '' %}
    {%- if m.role == 'tool' %}{{ '<|channel>' + INTO + m.content + '<channel|>' + moved }}
    {%- elif m.tool_calls %}{{ '<|turn>model\n' + m.tool_calls[0].function.name + '<|answer>' }}
    {%- elif m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content + '<turn|>\n' }}
    {%- else %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<turn|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"""
# In the manner of GLM 4.7's: the prompt opens reasoning, which is closed in every turn; no token ends a turn.
CLOSING = """{%- for m in messages %}{{ '<|' + m.role + '|>' + ('</think>' if m.role == 'assistant' else '') + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"""

GENERATION = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A template that is wrong: what it calls generated is the user's.
WRONG = GENERATION.replace("== 'assistant'", "== 'user'")

# The parts of transformers' renderer that templates use, and what 5.23 makes of them in test_renderings.
FEATURES = """{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {{ ns.count }} {{ message.content | trim }} {{ message['missing'] }} {{ message | tojson }} {{ message.reasoning_content }}
{% endfor %}
{{ tools | tojson(indent=2) if tools else 'no tools' }} {{ bos_token is defined }} {{ documents is none }}
{#- gone -#}
{% if add_generation_prompt %}<assistant>{{ eos_token }}{% endif %}"""

# What published families put around texts, and the ways of their templates: with bos, eos and the special tokens of their tokenizers.
EACH = "{% for m in messages %}{{ HEAD }}{% endfor %}{% if add_generation_prompt %}{{ ASK }}ELSE{% endif %}"
PHI4 = EACH.replace("HEAD", "'<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>'").replace("ASK", "'<|im_start|>assistant<|im_sep|>'")
PHI3 = EACH.replace("HEAD", "'<|' + m.role + '|>\n' + m.content + '<|end|>\n'").replace("ASK", "'<|assistant|>\n'").replace("ELSE", "{% else %}{{ eos_token }}")
GLM4 = """[gMASK]<sop>
{%- for m in messages if m.role == 'system' %}{{ '<|system|>\n' + m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}
<|{{ m.role }}|>
{{ m.content }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# The last turn ends with another token than those before it.
OLMO2 = """{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + (eos_token if m.role == 'assistant' else '') }}
{%- if m.role != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""
OLMO3 = """{% if not messages | selectattr('role', 'equalto', 'system') | list %}{{ '<|im_start|>system\nNo <functions>.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + (' No <functions>.' if m.role == 'system' else '') }}
{%- if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}{{ '<|im_end|>\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}{% endfor %}"""
# Reasoning is said in the head, which system texts can change; the head has no end of its own.
SMOLLM3 = """{% set mode = '/no_think' if enable_thinking is false else '/think' %}
{% if messages[0].role == 'system' %}{% set own = messages[0].content.replace('/no_think', '').rstrip() %}
{% if '/no_think' in messages[0].content %}{% set mode = '/no_think' %}{% endif %}{% endif %}
{{- '<|im_start|>system\nMode: ' + mode + '\n\n' + (own or 'Help.') + '\n\n' }}
{%- set asked = '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}
    {%- if m.role == 'assistant' %}{% generation %}{{ asked + m.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ asked }}{% endif %}"""
MINISTRAL3 = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- else %}{% set rest = messages %}{{ '[SYSTEM_PROMPT]Help.[/SYSTEM_PROMPT]' }}{% endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles have to alternate') }}{% endif %}
    {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""
# In the manner of Seed-OSS's: every turn has one end; of Hunyuan's: the head of an answer is the end of a question; of ERNIE's: plain words.
SEED = EACH.replace("HEAD", "'<seed:bos>' + m.role + '\n' + m.content + '<seed:eos>'").replace("ASK", "'<seed:bos>assistant\n'").replace("ELSE", "")
HUNYUAN = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content + '<|place3|>' }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- else %}{{ '<|Assistant|>' + m.content + '<|place2|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
ERNIE = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}{% else %}{{ 'User: ' * (m.role == 'user') + m.content + '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"""
FAMILIES = {
    "seed_oss": (SEED, "<seed:bos>", "<seed:eos>", ["<seed:bos>", "<seed:eos>"]),
    "hunyuan": (HUNYUAN, "<s>", "<|place2|>", ["<|place2|>", "<|place3|>", "<|User|>", "<|Assistant|>"]),
    "ernie4_5": (ERNIE, "<s>", "</s>", []),
    "phi4": (PHI4.replace("ELSE", ""), None, "<|im_end|>", ["<|im_sep|>"]),
    "phi3": (PHI3, "<s>", "<|endoftext|>", ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]),
    "phi4-mini": (PHI3.replace("\n", ""), "<|endoftext|>", "<|endoftext|>", ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]),
    "glm4": (GLM4, None, "<|endoftext|>", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]),
    "olmo2": (OLMO2, "<|endoftext|>", "<|endoftext|>", []), "olmo3": (OLMO3, None, "<|endoftext|>", []),
    "smollm3": (SMOLLM3, None, "<|im_end|>", ["<think>", "</think>"]),
    "ministral3": (MINISTRAL3, "<s>", "</s>", ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]),
    "harmony": (HARMONY, None, "<|return|>", ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]),
    "channels": (CHANNELS, "<s>", "</s>", ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|answer>", "<answer|>"])}

TEMPLATES = {  # with bos and eos
    "chatml": (CHATML, None, "<|im_end|>"), "mistral": (MISTRAL, "<s>", "</s>"),
    "thinking": (THINKING, None, "<|im_end|>"), "opening": (OPENING, None, "<|im_end|>"), "hybrid": (HYBRID, None, "<|im_end|>"),
    "field": (FIELD, None, "<|im_end|>"), "bare": (None, None, None),
    "generation": (GENERATION, None, "<|im_end|>"), "wrong": (WRONG, None, "<|im_end|>")}


def byte_level(vocabulary=400, texts=None):
    """As GPT-2, Llama 3 and Qwen have it; of other texts, tokens are learned across the ends of words, too, so that it tells how it cuts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not texts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts or LINES * 3, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False,
                                                                 initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def fixed_byte_level():
    """The same kind, with merges that are not learned, so that its ids are the same whatever the library's version."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for pair in ("h e", "l o", "he l", "hel lo", "\u0120 hello", "\u0120 w", "o r", "l d", "\u0120w or", "\u0120wor ld", "wor ld", "w or", "b y", "< t"):
        left, right = pair.split(" ")
        if left in vocabulary and right in vocabulary and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentence_piece():
    """As Llama 2 and Mistral have it: words begin with a visible space, unknown characters become bytes, BOS comes first."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    characters = sorted(set("".join(LINES)) - {" "})
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "\u2581", *characters])}
    merges = []
    for pair in ("\u2581 h", "e l", "l o", "\u2581h el", "\u2581hel lo", "\u2581 w", "\u2581 \u2581"):
        left, right = pair.split(" ")
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def tokenizer_folder(path, tokenizer, template=None, bos=None, eos=None, **config):
    os.makedirs(path, exist_ok=True)
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    config.update({key: value for key, value in (("chat_template", template), ("bos_token", bos), ("eos_token", eos)) if value})
    write_text(os.path.join(path, "tokenizer_config.json"), json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return path


def tokenizer_folders(path):
    """{name: folder} of every template with a byte-level tokenizer, and of Mistral's with a SentencePiece-like one."""
    tokenizer = byte_level()
    folders = {name: tokenizer_folder(os.path.join(path, name), tokenizer, *more) for name, more in TEMPLATES.items()}
    return {**folders, "sentencepiece": tokenizer_folder(os.path.join(path, "sp"), sentence_piece(), *TEMPLATES["mistral"])}


def fixed_folders(path):
    """{name: folder} of tokenizers that are the same everywhere, for what is compared with ids that were made once."""
    own = fixed_byte_level()
    folders = {name: tokenizer_folder(os.path.join(path, "fixed-" + name), own, *TEMPLATES[name])
               for name in ("chatml", "thinking", "opening", "hybrid", "generation")}
    return {**folders, "sentencepiece": tokenizer_folder(os.path.join(path, "fixed-sp"), sentence_piece(), *TEMPLATES["mistral"])}


def words(rng, most):
    return " ".join(rng.choice("hello world the weather is nice today two and four \u00e9t\u00e9 \U0001f600 42 \u4f60\u597d".split())
                    for _ in range(rng.randint(1, most)))


def conversations(count, seed=0, most=40):
    rng = random.Random(seed)
    for _ in range(count):
        turns = rng.randint(1, 4)
        yield {"messages": [{"role": role, "content": words(rng, most)} for role in ("user", "assistant") * turns]}


def rollout(i):
    """Tokens, which of them are trained on, and their advantages."""
    ids = [(7 * i + k * k) % 300 for k in range(4 + i % 20)]
    return {"ids": ids, "train": [int(k > i % 3) for k in range(len(ids))], "advantages": [math.sin(i + k) for k in range(len(ids))]}


def long_conversation(rng, turns, variant):
    """Bits of `variant`: empty contents, reasoning, tool calls, space around contents."""
    messages, now = [], lambda bit, chance: variant & bit and rng.random() < chance
    for _ in range(turns):
        user, assistant = ({"role": role, "content": words(rng, 6)} for role in ("user", "assistant"))
        if now(1, .2):
            assistant["content"] = ""
        if now(2, .3):
            assistant["reasoning_content"] = words(rng, 4)
        if now(4, .3):
            assistant["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"a": 'x"\n' + words(rng, 2), "n": 3}}}]
        if now(8, .5):
            user["content"], assistant["content"] = user["content"] + " \n", "\n" + assistant["content"] + " "
        messages += [user, assistant]
    return messages


# ---- conversations for templates as shipped ------------------------------------------------------------------------------------
MARKS = re.compile(r"<[|\uff5c][^|\uff5c>]+[|\uff5c]>|<(?:start|end)_of_turn>|</?think>|\[gMASK\]|<sop>|<\|[a-z_]+>|<[a-z_]+\|>")
PHRASES = ("hello", "the weather", "\u00e9t\u00e9", "\u4f60\u597d", "\U0001f600", '"quoted" & <b>', "a\\b", "two\nlines", "  spaces ", "2 + 2 = 4", "user", "{x}")
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]


def talk(rng, most=4, beside=False):
    """Returns (a user's row, the messages that a template gets). beside: with texts beside calls, and several rounds of these."""
    text = lambda: " ".join(rng.choice(PHRASES) for _ in range(rng.randint(1, 6)))
    row, given, tools, reasons = [], [], rng.random() < .3, rng.random() < .4

    def say(role, content, masks=(), **more):
        given.append(templates.with_reasoning({"role": role, "content": content, **more}))
        for call in more.get("tool_calls", ()):
            if rng.random() < .5:
                function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=rng.random() < .5)}
                more = {**more, "tool_calls": [{**call, "function": function}]}
        row.append({"role": role, "content": content, **more, **dict(masks)})

    def answer(content, **more):
        where = rng.randrange(4) if reasons else 3
        content = f"<think>\n{text().strip()}\n</think>\n\n{content}" if where == 0 else content
        more |= {("reasoning_content", "reasoning")[where - 1]: text().strip()} if where in (1, 2) else {}
        say("assistant", content, [(rng.choice(records.MASKS), rng.choice((0, 1, False, True)))] * (rng.random() < .2), **more)

    if rng.random() < .4:
        say(rng.choice(("system", "system", "system", "developer")), text())
    for _ in range(rng.randint(1, most)):
        say("user", text())
        for _ in range(rng.randint(1, 3) if beside else tools and rng.random() < .7):
            arguments = {"city": text(), "days": rng.randint(1, 9)} if rng.random() < .8 else {}
            answer(text() if beside and rng.random() < .7 else "", tool_calls=[{"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}])
            say("tool", json.dumps({"sky": text()}, ensure_ascii=False), name="w", tool_call_id="c1")
        answer(text() if rng.random() < .95 else "")
    return {"messages": row, **({"tools": TOOLS} if tools else {})}, given


def in_field(message):
    thought, end, answer = message["content"].partition("</think>")
    if message["role"] != "assistant" or not end:
        return message
    return templates.with_reasoning({**message, "content": answer.lstrip("\n"), "reasoning_content": thought.removeprefix("<think>").strip("\n")})


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def write_lines(path, records):
    return write_text(path, "".join((record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n"
                                    for record in records))
