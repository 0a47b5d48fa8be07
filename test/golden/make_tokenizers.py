#!/usr/bin/env python3
"""
Makes the fixtures in tokenizers/: tiny tokenizers in the styles of published models, written by data/tokenizer_file.py, and what the
`tokenizers` library makes of several hundred texts with them. The tests read the committed files; only whoever changes them runs this.

    python make_tokenizers.py

texts.bin      every text: uint32 bytes, the bytes
NAME.tok       the tokenizer, as `train sample` reads it
NAME.cases     for every text of texts.bin: uint16 n, n ids (uint16), then the text that the ids decode to, special tokens and all:
               uint32 bytes and the bytes, or 0xffffffff where it is the text itself; all little-endian
"""
import json
import pathlib
import random
import struct
import sys
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "data"), str(HERE.parent / "data")]
import prepare_samples as samples  # noqa: E402
import tokenizer_file  # noqa: E402
import words  # noqa: E402

OUT = HERE / "tokenizers"

PROSE = """
The quick brown fox jumps over the lazy dog, and they're sure it's what we'd said: I'm, you've, he'll, DON'T, I'LL, WE'RE.
She sold 1234567 sea shells at 3.50 each on 2024-01-31; 12 of 100 were broken (about 12%).
def attention(q, k, v):\n    scores = q @ k.T / sqrt(d)\n\treturn softmax(scores) @ v  # causal\n
for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }\r\n\r\n/* done */ return sum != 0 ? "yes" : 'no';
<p class="x">A &amp; B</p> {"key": [1, 2, null], "text": "a\\nb"} https://example.org/path?q=1&r=%20#top user@example.org
Der schöne Käse fließt über die Straße. Le garçon a été déçu par l'œuvre. El niño comió piñas. Zażółć gęślą jaźń.
Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Đây là tiếng Việt có dấu.
我能吞下玻璃而不伤身体。 私はガラスを食べられます。 나는 유리를 먹을 수 있어요. ｆｕｌｌｗｉｄｔｈ １２３
أنا قادر على أكل الزجاج. אני יכול לאכול זכוכית. मैं काँच खा सकता हूँ। ฉันกินกระจกได้ ང་ཤེལ་ཟ་ཐུབ། ကျွန်တော်
""".strip().split("\n")

SHORT = [
    "a", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", " \n ", "  \n  x", "\u00a0", "\u00a0x", "\u3000", "\u2028", "\u200b", "\ufeff",
    "x ", " x", "  x", "   x  ", "x\n", "x \n", "x\n\n\ny", "x\r\ny", "\t\tx", " \tx", "\n\tx", "a\u00a0b", "a\u2003 b", "\x1c\x1d\x1e\x1f", "\x85a",
    "'s", "'S", "it's", "IT'S", "'ſ", "it'ſ", "'ll 'Ll 'lL 'LL", "'re've'm'd't", "'RE'VE'M'D'T", "''s", "'", "'x", " 's", "’s", "x'", "'l", "'r", "'v",
    "1", "12", "123", "1234", "12345", "1234567890", "1,234", "½ ² ③ Ⅷ ١٢٣ ५६७ 一二三", "a1b2", "1a", " 1", "  1", "-1", "3.14e-10", "0x1F",
    "é", "e\u0301", "\u0301", "a\u0301\u0323b", "a\u0323\u0301b", "\u1e69", "s\u0323\u0307", "s\u0307\u0323", "\u212b \u2126 \u212a", "\u0344", "\u0958",
    "\u1100\u1161\u11a8", "\uac00\u11a8", "\uac01", "가각", "\u0b47\u0b3e\u0b57", "\u0f71\u0f72\u0f74\u0f80", "\U0001d15e\U0001d165", "x\u0345\u0301", "\ufb01 \ufb06",
    "नमस्ते", "ก็ได้", "ที่นี่", "\u0300\u0300\u0300\u0316\u0316", "i\u0307", "İI", "ǅ", "ß ẞ", "ﬀ",
    "🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "❤️", "☃", "🙂🙂 x🙂y", "\U0001f600\u200d", "𝕳𝖊𝖑𝖑𝖔", "𐍈", "\U0010ffff", "\ue000", "\ufffd", "\ufffe",
    "!", "!!!", " !", "!!\n", "!!\n\n\nx", "...", "…", "$5", "€5", "a-b_c", "a--b", "((x))", "#tag @me", "^_^", "\\n", "\x00", "a\x00b", "\x01\x7f", "a/b\n",
    "▁", "▁▁x", "a▁b", " ▁ ", "<0x41>", "<0xE2>", "Ġ", "Ċx", "âĢ", "<unk>", "<|end|>", " <|end|> ", "x<|end|>y", "<|end|><|end|>", "<|en", "<|end|",
    "<s>", "</s>x", "<s> x", " x </s>", "<extra>", "a <extra> b", "a<extra>b", "<tool>", "x <tool> y", "<tool", "<<tool>>", "  <mask>  x", "x  <mask>", "[pad] ",
]

WORDS_OF = ["the", " the", "The", "'s", "'LL", "  ", "\n", "\r\n", "\t", " ", "12", "345", "é", "e\u0301", "漢字", "🙂", "\u200d", "ا", "ن", "न", "\u094d", "...",
            "<|end|>", "<extra>", "<tool>", "<mask>", "<s>", "▁", "_", "-", "\u00a0", "x", "Z", "ß", "\u0323", "가", "\u11a8", "\x00", "(", "!", "ſ", "Ⅷ", "\u2028", "/"]


def texts():
    generator = random.Random(4)
    made = ["".join(generator.choice(WORDS_OF) for _ in range(generator.randint(2, 14))) for _ in range(170)]
    for _ in range(60):
        made.append("".join(chr(generator.choice([generator.randrange(0x20, 0x250), generator.randrange(0x300, 0x3100),
                                                  generator.randrange(0xA000, 0xD7FF), generator.randrange(0x1F300, 0x1FAFF)]))
                            for _ in range(generator.randint(1, 9))))
    return list(dict.fromkeys(PROSE + SHORT + made))


def corpus():
    """What the vocabularies are made of: without one of the special tokens, which no merge shall make."""
    return PROSE * 3 + [text for text in texts() if "|end" not in text]


# ---- the styles ----------------------------------------------------------------------------------------------------------------
LLAMA3, QWEN2, QWEN2_MARKS, TEKKEN, O200K = words.LLAMA3, words.QWEN2, words.QWEN2_MARKS, words.TEKKEN, words.O200K
CHATML = ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
          "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TRIMMED = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
           "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
           "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}")
# Reasoning is opened by the generation prompt, or closed, too, and gone from answers that others follow.
REASONING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content | trim %}{% if m.role == 'assistant' and '</think>' in text %}"
             "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ text }}<|end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{{ '\n</think>\n\n' if enable_thinking is false }}{% endif %}")


def byte_level(pattern, use_regex=False, prefix_space=False):
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last]) if pattern else last


def trained_bytes(size, pre_tokenizer, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def trained_pieces(size, normalizer, pre_tokenizer, strip):
    """As SentencePiece models are converted: byte tokens are of the vocabulary, but no added tokens."""
    named = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer or normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=named, limit_alphabet=120, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    state["pre_tokenizer"] = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer else None
    if not normalizer:
        state["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * strip
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def with_tokens(tokenizer, *tokens):
    tokenizer.add_special_tokens(["<|im_start|>", "<|end|>"])
    tokenizer.add_tokens(["<tool>", *tokens])
    return tokenizer


def gpt2():
    tokenizer = with_tokens(trained_bytes(420, byte_level(None, use_regex=True)), AddedToken("<mask>", lstrip=True, special=True))
    return tokenizer, {"eos_token": "<|end|>", "bos_token": "<|end|>"}


def llama3():
    tokenizer = trained_bytes(460, byte_level(LLAMA3), ignore_merges=True)
    state = json.loads(tokenizer.to_str())
    for word in ("Ġlazy", "123", "DON", "漢"):  # words that no merge makes
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word.replace("Ġ", " "))[0][0]
        state["model"]["vocab"].setdefault(spelled, len(state["model"]["vocab"]))
    tokenizer = with_tokens(Tokenizer.from_str(json.dumps(state)), AddedToken("<extra>", rstrip=True, lstrip=True))
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    return tokenizer, {"eos_token": "<|end|>", "bos_token": "<|im_start|>"}


def qwen2():
    tokenizer = with_tokens(trained_bytes(440, byte_level(QWEN2), normalizers.NFC()), AddedToken("<extra>", normalized=True))
    return tokenizer, {"eos_token": "<|end|>", "chat_template": CHATML}


def qwen35():
    tokenizer = with_tokens(trained_bytes(440, byte_level(QWEN2_MARKS), normalizers.NFC()), "<think>", "</think>")
    return tokenizer, {"eos_token": "<|end|>", "chat_template": REASONING}


def trained_across(pattern, **model):
    """Tokens are learned across the ends of words, too: then ids tell where texts are cut."""
    tokenizer = trained_bytes(600, byte_level(None), **model)
    tokenizer.pre_tokenizer = byte_level(pattern)
    return with_tokens(tokenizer)


def tekken():
    tokenizer = trained_across(TEKKEN)
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    return tokenizer, {"eos_token": "<|end|>", "bos_token": "<|im_start|>"}


def o200k():
    return trained_across(O200K), {"eos_token": "<|end|>"}


def harmony():
    tokenizer = trained_across(O200K)
    tokenizer.add_special_tokens(["<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"])
    return tokenizer, {"eos_token": "<|return|>", "chat_template": samples.HARMONY}


def gemma4():
    tokenizer, config = gemma()
    tokenizer.add_special_tokens(["<|turn>", "<turn|>", "<|channel>", "<channel|>"])
    return tokenizer, {**config, "chat_template": samples.CHANNELS}


def gemma():
    tokenizer = trained_pieces(760, normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), False)
    with_tokens(tokenizer, AddedToken("\n\n", normalized=False), AddedToken("▁▁", normalized=False), "<extra>")
    return tokenizer, {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TRIMMED}


def llama2():
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = with_tokens(trained_pieces(700, normalizer, None, True), AddedToken("<extra>", normalized=True))
    return tokenizer, {"eos_token": "</s>", "bos_token": "<s>"}


def mistral():
    tokenizer = trained_pieces(700, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), True)
    return with_tokens(tokenizer, AddedToken("<extra>", lstrip=True)), {"eos_token": "</s>", "bos_token": "<s>"}


# ---- patterns that no model has ------------------------------------------------------------------------------------------------
def split_by(*parts, byte_level=True):
    """Tokens are learned across the ends of words, too: then ids tell where texts are cut. parts: (pattern, behavior, invert), or others."""
    tokenizer = trained_bytes(600, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made = [pre_tokenizers.Split(Regex(part[0]) if part[0] != "," else ",", *part[1:]) if isinstance(part, tuple) else part for part in parts]
    made += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)] * byte_level
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(made)
    return with_tokens(tokenizer), {"eos_token": "<|end|>"}


def digits():
    return split_by(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False), byte_level=False)


def ruby():
    """Where Oniguruma's syntax, Ruby's, is not PCRE2's: intervals, lines, words, sets of sets, cases, POSIX brackets."""
    return split_by((r"\p{N}{1,3}+|\p{Alpha}{2}?|(?i:the|k|\u00df|i\u0307)+|^#+|\w{,3}$|\b[[:punct:]&&[^'._]]+\B|[\p{^L}&&[^\s\d]]+|\h{2,}|\s*?\n|.",
                     "isolated"))


def stages():
    """One after the other, with everything that may become of matches."""
    return split_by((r"[\u4e00-\u9fa5\p{Hiragana}\p{Katakana}]+", "isolated"), (r"(?<=\p{Ll})(?=\p{Lu})|(?<![a-z])x", "isolated"),
                    (",", "merged_with_previous"), (r"[^\S\n]", "merged_with_next"), (r"[^\p{Ll}\p{Lu}]", "contiguous"),
                    (r"\p{M}|\A#|\u200d\z", "merged_with_previous", True), (r"\S+|\s*", "removed", True), pre_tokenizers.Punctuation("merged_with_next"),
                    pre_tokenizers.Digits())


def removed():
    """Matches are gone from the text."""
    return split_by((r"\s+(?=\p{L}+)|(?:[aeiou]|\p{Nd})(?!\w)|(?>-+)x?", "removed"))


def pieces():
    """Spaces become U+2581, then there are patterns."""
    tokenizer = trained_pieces(700, None, pre_tokenizers.Metaspace(prepend_scheme="first"), True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split(Regex(r"\p{N}|an|th"), "isolated")])
    return with_tokens(tokenizer, AddedToken("<extra>", lstrip=True)), {"eos_token": "</s>", "bos_token": "<s>"}


# Of the first nine there are files of versions 1 and 2, which name their patterns: they are kept as they were written.
STYLES = {"gpt2": gpt2, "llama3": llama3, "qwen2": qwen2, "qwen3.5": qwen35, "gemma": gemma, "llama2": llama2, "mistral": mistral,
          "tekken": tekken, "o200k": o200k,
          "digits": digits, "ruby": ruby, "stages": stages, "removed": removed, "pieces": pieces, "harmony": harmony, "gemma4": gemma4}


def save_style(name, folder):
    tokenizer, config = STYLES[name]()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = ("<|return|>", "<|call|>") if name == "harmony" else ("<|end|>", "</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(map(tokenizer.token_to_id, ends))}))
    return tokenizer


def main():
    OUT.mkdir(exist_ok=True)
    kept = {path.stem for path in OUT.glob("*.tok") if struct.unpack("<8sI", path.read_bytes()[:12])[1] < 3}
    every = [text.encode() for text in texts()]
    (OUT / "texts.bin").write_bytes(b"".join(struct.pack("<I", len(text)) + text for text in every))
    for name in STYLES:
        if name in kept:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary) / name
            folder.mkdir()
            tokenizer = save_style(name, folder)
            for line in tokenizer_file.write_tokenizer_file(str(OUT / f"{name}.tok"), folder):
                print(f"{name}: {line}")
        content = b""
        for text in every:
            ids = tokenizer.encode(text.decode(), add_special_tokens=False).ids
            back = tokenizer.decode(ids, skip_special_tokens=False).encode()
            content += struct.pack(f"<H{len(ids)}H", len(ids), *ids)
            content += struct.pack("<I", 0xFFFFFFFF) if back == text else struct.pack("<I", len(back)) + back
        (OUT / f"{name}.cases").write_bytes(content)
    print(f"{len(every)} texts, {sum(path.stat().st_size for path in OUT.iterdir())} bytes in all")


if __name__ == "__main__":
    main()
