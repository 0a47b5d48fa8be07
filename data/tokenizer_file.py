#!/usr/bin/env python3
r"""Turns a Hugging Face tokenizer into the one binary file with which `train sample` reads text.

    python data/tokenizer_file.py --tokenizer Qwen3-0.6B --out Qwen3-0.6B/tokenizer.tok

It takes a folder with tokenizer.json (and, if present, tokenizer_config.json, generation_config.json and the chat template), or a
tokenizer.json alone. Needs the `tokenizers` library and jinja2.

The file, little-endian throughout (llmc/tokenizer/tokenizer_file.h reads it):

    0   8 bytes  "SBPTOKEN"
    8   uint32   version, 1; 2 if one of the last 4 flags or an opening is present; 3 if splits are; 4 if thought_end is; 5 if template is
    12  uint32   CRC-32 (zlib's) of all bytes from 16 to the end
    16  uint64   bytes of the file
    24  uint64   fingerprint: bytes of tokenizer.json << 32 | CRC-32 of tokenizer.json
    32  uint32   flags, see FLAGS
    36  uint32   ids: the largest id + 1
    40  uint32   ids of the model's own vocabulary: added tokens may lie above
    44  uint32   how text is cut into words, see WORDS
    48  uint32   the id of unknown characters, 0xffffffff: none
    52  uint32   sections: 25, 28, 30, 32, 34 in versions 1 to 5
    56  uint64   0
    64  sections x (uint64 offset, uint64 bytes), in the order of SECTIONS; each begins at a multiple of 8

An id's `text` is its bytes in a text. Its `spelling` is its name in the vocabulary, if different ("▁the" means " the"); both are one
run of bytes and ids + 1 offsets into it. `merges` are (left, right, result), lowest rank first. `added` tokens are (id, flags, offset
and bytes to search for), those matched in normalized text last, each kind sorted by bytes. `splits` are (behaviour, offset and bytes
in `patterns`); `classes` are the symbols that patterns see in place of characters; both are split_patterns.py's. Versions 1 and 2
name a model in place of patterns. The others are ids or text. Chat is the template's text around a user's: found with placeholders
and checked against renderings of other texts; unconfirmed parts are left out and `chat_reason` says why. `template` is the template
itself, and `turn_ends` are the ids that end an assistant's turn in its renderings; `end_ids` are these and those of the folder.

A tokenizer whose encoding C does not support is written for decoding only, without the flag ENCODES, and `reason` says why.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import struct
import sys
import unicodedata
import zlib

try:
    from tokenizers import normalizers, pre_tokenizers

    import records
    import shards
    import spans
    import templates
    import tokenizer_chat
    import tokenizer_load
    from split_patterns import GPT2, CannotEncode, Splits, every_character
except ImportError as error:
    sys.exit(f"tokenizer_file.py: {sys.executable}: {error}; pip install tokenizers jinja2 numpy")

MAGIC, NONE = b"SBPTOKEN", 0xFFFFFFFF
FLAGS = {name: 1 << bit for bit, name in enumerate((
    "ENCODES", "BYTE_LEVEL", "IGNORE_MERGES", "BYTE_FALLBACK", "FUSE_UNKNOWN", "COMPOSE", "REPLACE_SPACES", "PREPEND",
    "PREFIX_SPACE", "SPLIT_WORDS", "STRIP_FIRST", "TRIM_USER", "TRIM_SYSTEM", "CHAT", "CHAT_SYSTEM", "CHAT_NEXT",
    "THINKING", "FORGETS", "FORGETS_LINES", "FORGETS_SPACE",
))}
WORDS = {name: number for number, name in enumerate((
    "WHOLE", "GPT2", "LLAMA3", "QWEN2", "QWEN2_MARKS", "METASPACE_ALWAYS", "METASPACE_FIRST", "METASPACE_NEVER",
    "TEKKEN", "O200K",
))}
SECTIONS = (
    "text_offsets", "text", "spelling_offsets", "spelling", "id_flags", "merges", "added", "added_text", "end_ids", "prefix_ids",
    "suffix_ids", "classes", "decompositions", "combining", "pairs", "reason", "chat_reason", "first_before", "first_after",
    "system_before", "system_between", "system_after", "next_before", "next_after", "name",
    "opening", "thinking_on", "thinking_off",
    "splits", "patterns",
    "thought_begin", "thought_end",
    "template", "turn_ends",
)
COUNTS, FLAGS_1 = (25, 28, 30, 32, 34), 16  # sections of each version, and flags of version 1
ID_EXISTS, ID_SPECIAL, ID_IN_VOCABULARY = 1, 2, 4
ADDED_LEFT, ADDED_RIGHT, ADDED_NORMALIZED, ADDED_SPECIAL = 1, 2, 4, 8


class TokenizerError(ValueError):
    """The tokenizer cannot be written at all."""


# ---- reading -----------------------------------------------------------------------------------------------------------------
class Source:
    """Reads tokenizer.json and the other files of its folder, with the tokens that transformers adds at loading."""

    def __init__(self, where):
        self.folder = where if os.path.isdir(where) else os.path.dirname(where) or "."
        path = os.path.join(where, "tokenizer.json") if os.path.isdir(where) else where
        if not os.path.exists(path):
            raise TokenizerError(f"{path}: no such file; give a folder with tokenizer.json, or a tokenizer.json")
        self.name = templates.tokenizer_name(where)
        self.generation = templates.read_json(os.path.join(self.folder, "generation_config.json"))
        content, self.tokenizer, _ = tokenizer_load.load(path)
        self.fingerprint = shards.fingerprint(content)
        self.state = json.loads(self.tokenizer.to_str())

    def id_of(self, text):
        return None if text is None else self.tokenizer.token_to_id(text)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def around(self):
        """Returns the ids that the post-processor puts before and after a plain text; with a tokenizer.json transformers uses only it."""
        for text in ("a", "."):
            plain, whole = self.encode(text), self.tokenizer.encode(text).ids
            if not plain:
                continue
            for begin in range(len(whole) - len(plain) + 1):
                if whole[begin:begin + len(plain)] == plain:
                    return whole[:begin], whole[begin + len(plain):]
            raise TokenizerError("the post-processor changes the ids of a text, which is not supported")
        return [], []


def flatten(part, members):
    """Returns the parts of a normalizer, pre-tokenizer or decoder, which may be a sequence."""
    if not part:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for member in part[members] for leaf in flatten(member, members)]


# ---- ids to bytes -------------------------------------------------------------------------------------------------------------
def byte_alphabet():
    """Returns the byte alphabet of byte-level vocabularies: printable bytes as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = byte_alphabet()
BYTE_OF, SPELLING = str.maketrans({c: chr(byte) for c, byte in ALPHABET.items()}), re.compile(f"[{re.escape(''.join(ALPHABET))}]*")


def bytes_of_spelling(spelling):
    """Returns the bytes of a spelling; None: not in the byte alphabet."""
    return spelling.translate(BYTE_OF).encode("latin-1") if SPELLING.fullmatch(spelling) else None


def byte_of_token(spelling):
    """Returns 65 for "<0x41>"."""
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return int(spelling[3:5], 16)
        except ValueError:
            pass
    return None


def decoder_of(state):
    """Returns (spelling -> bytes, whether a first space is dropped)."""
    parts = flatten(state.get("decoder"), "decoders")
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return lambda spelling: bytes_of_spelling(spelling) or spelling.encode(), False
    if kinds == ["Metaspace"] and parts[0].get("replacement", "▁") == "▁":
        return lambda spelling: spelling.replace("▁", " ").encode(), parts[0].get("prepend_scheme") != "never"
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        fallback, strip = "ByteFallback" in kinds, "Strip" in kinds
        replaced = [part for part in parts if part["type"] == "Replace"]
        stripped = [part for part in parts if part["type"] == "Strip"]
        if all((p["pattern"], p["content"]) == ({"String": "▁"}, " ") for p in replaced) and \
                all((p["content"], p["start"], p["stop"]) == (" ", 1, 0) for p in stripped):
            def decode(spelling):
                byte = byte_of_token(spelling) if fallback else None
                return bytes([byte]) if byte is not None else (spelling.replace("▁", " ") if replaced else spelling).encode()
            return decode, strip
    raise TokenizerError(f"its decoder ({', '.join(kinds) or 'none'}) is not supported: byte-level and SentencePiece-like ones are")


# ---- text to ids --------------------------------------------------------------------------------------------------------------
def check_model(model):
    if model["type"] != "BPE":
        raise CannotEncode(f"its model is {model['type']}, and only BPE is encoded here")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise CannotEncode(f"its BPE has {key} {model[key]!r}")
    if model.get("byte_fallback") and any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        raise CannotEncode("it falls back to bytes but lacks some of the 256 byte tokens")


def normalizer_flags(state):
    names = []
    for part in flatten(state.get("normalizer"), "normalizers"):
        if part["type"] == "NFC" and not names:
            names.append("COMPOSE")
        elif part["type"] == "Prepend" and part["prepend"] == "▁" and "PREPEND" not in names:
            names.append("PREPEND")
        elif part["type"] == "Replace" and (part["pattern"], part["content"]) == ({"String": " "}, "▁"):
            names.append("REPLACE_SPACES")
        else:
            raise CannotEncode(f"its normalizer {json.dumps(part, ensure_ascii=False)} is not supported")
    return names


def words_of(state, flags, splits):
    """Returns (how spaces are written, flags); adds the patterns that cut words to `splits`."""
    parts = flatten(state.get("pre_tokenizer"), "pretokenizers")
    if [part["type"] for part in parts] == ["Split"] and parts[0]["pattern"] == {"String": " "} and "REPLACE_SPACES" in flags:
        return "WHOLE", []  # no space is left at which to split
    words, more = "WHOLE", []
    for i, part in enumerate(parts):
        kind, last = part["type"], i == len(parts) - 1
        if kind == "Split":
            text = part["pattern"].get("Regex") or "".join(f"\\x{{{ord(c):x}}}" for c in part["pattern"]["String"])
            splits.add(text, part["behavior"], part.get("invert"))
        elif kind == "Digits":
            splits.add(pre_tokenizers.Digits(True), "Isolated" if part["individual_digits"] else "Contiguous")
        elif kind == "Punctuation":
            splits.add(pre_tokenizers.Punctuation("isolated"), part["behavior"])
        elif kind == "ByteLevel" and last and not (i and part["add_prefix_space"]):
            more += ["BYTE_LEVEL"] + ["PREFIX_SPACE"] * part["add_prefix_space"]
            if part.get("use_regex", True):
                splits.add(GPT2, "Isolated")
        elif kind == "Metaspace" and not i and part["replacement"] == "▁":
            words = f"METASPACE_{part.get('prepend_scheme', 'always').upper()}"
            if part.get("split", True) and last:
                more = ["SPLIT_WORDS"]
            elif part.get("split", True):
                splits.add("▁", "MergedWithNext")
        else:
            raise CannotEncode(f"its pre-tokenizer's {kind} is not supported there ({', '.join(part['type'] for part in parts)})")
    return words, more


def added_tokens(source):
    """Returns [(normalized, bytes to search for, id, flags)] in order."""
    normalizer = source.tokenizer.normalizer
    tokens = {}
    for token in source.state["added_tokens"]:
        flags = ADDED_LEFT * token["lstrip"] | ADDED_RIGHT * token["rstrip"] | ADDED_SPECIAL * token["special"]
        text = token["content"]
        if token["single_word"]:
            raise CannotEncode(f"its added token {text!r} is to match single words only")
        if token["normalized"]:
            flags |= ADDED_NORMALIZED
            text = normalizer.normalize_str(text) if normalizer else text
        if text:
            tokens.setdefault((token["normalized"], text.encode()), (token["id"], flags))
    if any(flags & ADDED_RIGHT for _, flags in tokens.values()) and any(text[:1].isspace() for _, text in tokens):
        raise CannotEncode("an added token takes the space after it, and another one begins with space")
    return [(*key, *value) for key, value in sorted(tokens.items())]


def pack(values):
    return struct.pack(f"<{len(values)}I", *values)


def pack_table(texts):
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return pack(offsets), b"".join(texts)


def normal_forms(normalizer, texts):
    """Returns the normal form of each text. No text holds a line feed, so one separates them."""
    return normalizer.normalize_str("\n".join(texts)).split("\n")


@functools.cache
def composition():
    """Returns (decompositions, combining classes, pairs): [(code point, [full canonical decomposition])], [(code point, class)],
    [(first, second, composite)], each in order, as the library has them; Hangul syllables are left out."""
    characters = [c for c in every_character() if c != "\n" and not 0xAC00 <= ord(c) < 0xD7A4]  # Hangul syllables are composed by rule
    decomposed, composed = (normal_forms(form, characters) for form in (normalizers.NFD(), normalizers.NFC()))
    decompositions = [(ord(c), list(map(ord, d))) for c, d in zip(characters, decomposed) if c != d]
    primary = [d for c, d, n in zip(characters, decomposed, composed) if c != d and c == n]
    starts, wholes = (normal_forms(normalizers.NFC(), texts) for texts in ([d[:-1] for d in primary], primary))
    pairs = [(ord(start), ord(d[-1]), ord(whole)) for start, d, whole in zip(starts, primary, wholes)]
    # Marks are the characters that change places with U+0345, whose class is the largest. Python's Unicode is not older than the library's.
    pairs_of_marks = ["\u0345" + c for c, d in zip(characters, decomposed) if c == d]
    moved = [pair[1] for pair, form in zip(pairs_of_marks, normal_forms(normalizers.NFD(), pairs_of_marks)) if pair != form]
    combining = [(ord(c), unicodedata.combining(c)) for c in sorted([*moved, "\u0345"])]
    assert all(value for _, value in combining), "this Python's Unicode is older than that of tokenizers; take a newer one"
    return decompositions, combining, sorted(pairs)


def encoder_sections(source, decoded, sections):
    """Fills the sections for encoding; returns (flags, how words are cut). Raises CannotEncode."""
    state, model = source.state, source.state["model"]
    check_model(model)
    flags = normalizer_flags(state)
    splits = Splits()
    words, more = words_of(state, flags, splits)
    flags += more + ["ENCODES"]
    flags += [flag for flag, key in (("BYTE_FALLBACK", "byte_fallback"), ("IGNORE_MERGES", "ignore_merges"), ("FUSE_UNKNOWN", "fuse_unk"))
              if model.get(key)]
    byte_level = "BYTE_LEVEL" in flags
    if byte_level and "BYTE_FALLBACK" in flags:
        raise CannotEncode("it is byte-level and falls back to bytes")
    vocabulary, id_flags, spelled = model["vocab"], bytearray(sections["id_flags"]), [b""] * len(decoded)
    for text, id in vocabulary.items():
        spelling = bytes_of_spelling(text) if byte_level else text.encode()
        if spelling:  # a byte-level text has only the byte alphabet
            id_flags[id] |= ID_IN_VOCABULARY
            spelled[id] = spelling
    ranks = {}
    for merge in model["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        ranks.pop((left, right), None)  # the last duplicate counts
        ranks[left, right] = None
    if any(flag & ID_IN_VOCABULARY and spelling != text for flag, spelling, text in zip(id_flags, spelled, decoded)):
        sections["spelling_offsets"], sections["spelling"] = pack_table(spelled)
    sections["id_flags"] = bytes(id_flags)
    sections["merges"] = pack([number for left, right in ranks
                               for number in (vocabulary[left], vocabulary[right], vocabulary[left + right])])
    added = added_tokens(source)
    offsets, sections["added_text"] = pack_table([text for _, text, _, _ in added])
    begins = struct.unpack(f"<{len(added) + 1}I", offsets)
    sections["added"] = pack([number for (_, text, id, flag), begin in zip(added, begins) for number in (id, flag, begin, len(text))])
    if splits.rows:
        classes, patterns = splits.coded()
        sections["classes"] = pack([number for entry in classes for number in entry])
        offsets, sections["patterns"] = pack_table([pattern.encode() for pattern in patterns])
        sections["splits"] = pack([number for (behaviour, _), begin, pattern in zip(splits.rows, struct.unpack(f"<{len(patterns) + 1}I", offsets), patterns)
                                   for number in (behaviour, begin, len(pattern))])
    if "COMPOSE" in flags:
        decompositions, combining, pairs = composition()
        sections["decompositions"] = pack([number for point, parts in decompositions
                                           for number in (point, len(parts), *parts, *[0] * (4 - len(parts)))])
        sections["combining"] = pack([number for entry in combining for number in entry])
        sections["pairs"] = pack([number for entry in pairs for number in entry])
    return flags, words


# ---- chat -----------------------------------------------------------------------------------------------------------------------
def chat_sections(source, sections, template, arguments, now):
    """Fills the texts around a user's text, and the template; returns (flags, ids that end an assistant's turn)."""
    try:
        template = templates.load_chat_template(source.folder) if template is None else template
        compiled = templates.ChatTemplate(template, templates.load_special_tokens(source.folder), now) if template is not None else None
        chat = tokenizer_chat.Chat(flags=[], reasons=["there is no chat template"] * (compiled is None))
        chat = tokenizer_chat.find_chat(compiled, source.encode, arguments) if compiled else chat
    except (tokenizer_chat.NoChat, ValueError) as reason:
        chat = tokenizer_chat.Chat(flags=[], reasons=[str(reason)])
    for name, text in chat.texts.items():
        sections[name] = text.encode()
    sections["template"] = compiled.content if compiled else b""
    ends = turn_ends(source, compiled, arguments or {}, chat) if compiled else []
    sections["chat_reason"] = chat.reason.encode()
    return chat.flags, ends


def turn_ends(source, compiled, arguments, chat):
    """Returns the ids that end an assistant's turn in the template's renderings: the last turn's first. Tokens that also occur within a
    turn do not count: gpt-oss ends its reasoning, too, with <|end|>."""
    added = {token["content"]: token for token in source.state["added_tokens"]}
    question, thought, answer = spans.PLACEHOLDERS
    special = [content for content, token in added.items() if token["special"]]

    def render(*texts, **more):
        roles = {"role": "user"}, {"role": "assistant", **more}, {"role": "user"}
        try:
            return compiled.render([{**role, "content": text} for role, text in zip(roles, texts)], **arguments)
        except templates.TemplateFailure:
            return ""

    try:
        canonical = spans.Canonical(compiled, spans.Turns(compiled, special).special_pattern, arguments)
        found, closing = list(canonical.ends), canonical.closing.strip()
    except templates.TemplateFailure:
        found, closing = [], ""
    within = render(question, answer, reasoning_content=thought).partition(thought)[2].partition(answer)[0]
    following = source.encode(render(question, answer, thought).partition(answer)[2].lstrip())[:1]  # the token belongs to the next turn if no token ends this turn
    found = (found or [closing]) + [content for content, token in added.items() if token["id"] in following]
    ends = [added[end]["id"] for end in found if end in added and end not in within]
    if not ends:
        what = f"with {closing[:40]!r}, which is {len(source.encode(closing))} tokens" if closing else "without a token of its own"
        chat.reasons.append(f"an assistant's turn ends {what}: sample and rollouts do not end there; let the template end it with a special token")
    return list(dict.fromkeys(ends))


def end_ids(source, ends_of_turns):
    ids = [source.id_of(templates.load_special_tokens(source.folder).get("eos_token"))]
    more = source.generation.get("eos_token_id")
    ids += more if isinstance(more, list) else [more]
    ids += ends_of_turns
    return list(dict.fromkeys(id for id in ids if isinstance(id, int) and source.tokenizer.id_to_token(id) is not None))


# ---- the file -------------------------------------------------------------------------------------------------------------------
def tokenizer_bytes(source, template=None, arguments=None, now=None, rendered=True, eos=None):
    """Returns the bytes of the file; see write_tokenizer_file."""
    sections = dict.fromkeys(SECTIONS, b"")
    decode, strip = decoder_of(source.state)
    vocabulary = source.tokenizer.get_vocab(with_added_tokens=True)
    own = source.tokenizer.get_vocab(with_added_tokens=False)
    special = {token["id"] for token in source.state["added_tokens"] if token["special"]}
    decoded, exists = [b""] * (max(vocabulary.values()) + 1), bytearray(max(vocabulary.values()) + 1)
    for id in vocabulary.values():
        decoded[id] = decode(source.tokenizer.id_to_token(id))  # the normal form of a normalized added token
        exists[id] = ID_EXISTS | ID_SPECIAL * (id in special)
    sections["text_offsets"], sections["text"] = pack_table(decoded)
    sections["id_flags"] = bytes(exists)
    flags, words = [], "WHOLE"
    try:
        flags, words = encoder_sections(source, decoded, sections)
    except CannotEncode as reason:
        sections["reason"] = str(reason).encode()
    flags += ["STRIP_FIRST"] * strip
    chat_flags, ends_of_turns = chat_sections(source, sections, template, arguments, now)
    ends_of_texts = [source.id_of(eos)] * (eos is not None)
    prefix, suffix = source.around()
    sections["prefix_ids"], sections["suffix_ids"] = pack(prefix), pack(suffix)
    sections["end_ids"] = pack(end_ids(source, ends_of_turns + ends_of_texts))
    sections["turn_ends"] = pack(list(dict.fromkeys(ends_of_turns * rendered + ends_of_texts)))
    sections["template"] *= rendered
    sections["name"] = source.name.encode()
    unknown = source.state["model"].get("unk_token") if flags and "ENCODES" in flags else None
    unknown = own.get(unknown, NONE) if unknown else NONE
    bits = sum(FLAGS[name] for name in set(flags + chat_flags))
    used = max(i + 1 for i, name in enumerate(SECTIONS) if sections[name])
    version = max(1 + bool(bits >> FLAGS_1), *(i + 1 for i, count in enumerate((0, *COUNTS[:-1])) if used > count))
    names = SECTIONS[:COUNTS[version - 1]]
    offset, table, body = 64 + 16 * len(names), b"", b""
    for name in names:
        table += struct.pack("<QQ", offset + len(body), len(sections[name]))
        body += sections[name] + bytes(-len(sections[name]) % 8)
    rest = struct.pack("<QQ6IQ", offset + len(body), source.fingerprint, bits, len(decoded), max(own.values(), default=-1) + 1,
                       WORDS[words], unknown, len(names), 0) + table + body
    return MAGIC + struct.pack("<II", version, zlib.crc32(rest)) + rest


def write_tokenizer_file(path, tokenizer, *chat, **more):
    """Writes the tokenizer of a folder, or of a tokenizer.json, to `path`, complete or not at all. `template`: a text in place of the
    folder's; `arguments`: its variables; `now`: its time; `rendered`: False leaves the template and its ends out, for data that the template did not
    render; `eos`: a token that also ends an answer. Returns lines for the user."""
    source = Source(tokenizer)
    try:
        content = tokenizer_bytes(source, *chat, **more)
    except TokenizerError as error:
        raise TokenizerError(f"{tokenizer}: {error}") from None
    templates.write_whole(path, content)
    return remarks(content)


def section_of(content, name):
    offset, length = struct.unpack_from("<QQ", content, 64 + 16 * SECTIONS.index(name))
    return content[offset:offset + length]


def remarks(content):
    (flags,) = struct.unpack_from("<I", content, 32)
    reason, chat_reason = (section_of(content, name).decode() for name in ("reason", "chat_reason"))
    lines = []
    if not flags & FLAGS["ENCODES"]:
        lines.append(f"C cannot encode text with it: {reason}; give prompts as ids")
    if chat_reason:
        lines.append(f"chat: {chat_reason}")
    return lines


def main():
    parser = argparse.ArgumentParser(description="Writes a Hugging Face tokenizer as one file for `train sample`.")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="a folder with tokenizer.json, or that file")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write; a program finds it as tokenizer.tok in the model's folder")
    parser.add_argument("--chat-template", metavar="FILE", help="another chat template than the folder's")
    parser.add_argument("--template-arguments", metavar="JSON", default="{}", help="variables of the template, '{\"enable_thinking\": false}'")
    arguments = parser.parse_args()
    try:
        more = records.template_arguments(json.loads(arguments.template_arguments), "--template-arguments")
    except (ValueError, records.Rejected) as error:
        parser.error(f"--template-arguments: {error}")
    try:
        template = arguments.chat_template and pathlib.Path(arguments.chat_template).read_text(encoding="utf-8")
        lines = write_tokenizer_file(arguments.out, arguments.tokenizer, template, more)
    except (ValueError, OSError) as error:
        why = f"{error.filename or arguments.out}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"tokenizer_file.py: {why}", file=sys.stderr)
        return 1
    for line in lines:
        print(f"note: {line}", file=sys.stderr)
    print(f"{arguments.out}: {os.path.getsize(arguments.out)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
