"""Encodes samples to tokens, with a mask of the targets that count. Also checks that the mask marks the right tokens.

A token counts if its first character lies in a trained stretch. So a token that begins before a stretch and ends in it does not
count. The first token of a document is not a target and never counts.
"""

import bisect
import functools
import itertools
import json
import os
import re
import unicodedata
import zlib
from dataclasses import dataclass

import jinja2.meta
import numpy as np
import tokenizers
from tokenizers import normalizers, processors

import iterative
import layout
import records
import shards
import spans
import templates
import tokenizer_load
import words
from records import Rejected


SPACE = re.compile(r"(?<=[A-Za-z0-9.,:;!?)]) (?=[A-Za-z])")
TOLD_APART = {"role", "content", "tool_calls", "tool_call_id", *templates.REASONING, *records.MASKS}  # keys of messages
THOUGHT = re.compile(r"(?s)^\s*(?:<think>)?(?:(?!<think>).)*?</think>|</?think>")  # matches reasoning at the beginning, and other tags
PIECE = 1 << 16  # characters given to the library at a time, if the text can be cut


class MaskFailure(Exception):
    """The counted tokens differ from the tokens of the trained texts: the run must end."""

    def __str__(self):
        return f"the loss mask does not lie where it should: {self.args[0]}; use another chat template"


class SetupFailure(Exception):
    """Tokenizer and options do not fit together."""


@dataclass
class Options:
    """Options that change the tokens; prepare.json records them, so that a continued run has the same."""

    tokenizer: str
    format: str = "auto"
    chat_template: str = None  # path of a file
    template_arguments: str = "{}"
    train_on: str = "assistant"
    roles: str = ""
    eos: str = "yes"
    eos_token: str = None
    max_tokens: int = 0  # 0: any length
    long: str = "keep"
    columns: dict = None  # {our name: the rows' name}
    reasoning: str = "keep"  # or "drop": what to do with samples whose reasoning is cut off
    now: str = None  # the result of strftime_now in templates
    segment_tokens: int = None  # with --iterative
    summary_command: str = None
    summary_timeout: float = 600  # seconds that an answer may take


class Encoding:
    """The tokens of a text: ids [tokens] uint32, and the characters [begin, end) of each, which the library returns slowly, so
    only few are requested."""

    ordered = True  # begins never decrease

    def __init__(self, found):
        self.found = found
        self.ids = np.array(found.ids, np.uint32)

    @functools.cached_property
    def offsets(self):
        return np.array(self.found.offsets, np.int64).reshape(-1, 2)

    def behind(self, at):
        """Returns (the first token that begins at or after the character `at`, whether the token before it extends beyond `at`)."""
        chars = self.found.token_to_chars
        low = bisect.bisect_left(range(len(self.ids)), at, key=lambda i: chars(i)[0])
        return low, low > 0 and chars(low - 1)[1] > at


class Pieces(Encoding):
    """The tokens of a text encoded in pieces: [(ids, offsets)]."""

    def __init__(self, pieces):
        self.ids, self.offsets = map(np.concatenate, zip(*pieces))
        self.ordered = bool((np.diff(self.offsets[:, 0]) >= 0).all())

    def behind(self, at):
        low = int(np.searchsorted(self.offsets[:, 0], at))
        return low, low > 0 and self.offsets[low - 1, 1] > at


class Words(Encoding):
    """The tokens of a text whose words are known; `library` encodes others."""

    def __init__(self, known, text, library):
        self.known, self.text, self.library = known, text, library
        self.windows = list(known.windows(text))  # [(begin, end)]
        ids = [self.look_at(window) for window in range(len(self.windows))]
        self.edges = list(itertools.accumulate(map(len, ids), initial=0))
        self.ids = np.frombuffer(b"".join(ids), np.uint32)

    def look_at(self, window):
        """Returns the bytes of the ids. Keeps the state that behind() needs."""
        begin, end = self.windows[window]
        self.at, self.begins, self.last = window, None, (None, None)  # last: begin and Encoding of the last stretch
        self.stretches = self.known.cut(self.text, begin, end)
        if len(self.stretches) == 1:
            self.last = begin, self.library(self.stretches[0])
            self.parts = [self.last[1].ids.tobytes()]
            self.ordered &= self.last[1].ordered
        else:
            self.parts = self.known.ids(self.stretches)
        return b"".join(self.parts)

    def behind(self, at):
        if at >= len(self.text):
            return len(self.ids), False
        window = bisect.bisect_right(self.windows, at, key=lambda window: window[0]) - 1
        if window != self.at:
            self.look_at(window)
        if not self.begins:  # offsets in the text, and in the bytes of its ids
            self.begins = list(itertools.accumulate(map(len, self.stretches), initial=self.windows[window][0]))
            self.before = list(itertools.accumulate(map(len, self.parts), initial=self.edges[window]))
        i = bisect.bisect_right(self.begins, at) - 1
        if self.begins[i] == at:
            return self.before[i] // 4, False
        if self.last[0] != self.begins[i]:
            self.last = self.begins[i], self.library(self.stretches[i])
        low, across = self.last[1].behind(at - self.begins[i])
        return self.before[i] // 4 + low, across


@dataclass
class Document:
    ids: np.ndarray  # [tokens] uint32
    counts: np.ndarray  # [tokens] uint8
    prompt: int = 0  # tokens before the completion
    reward: float = 0.0
    values: np.ndarray = None  # [tokens] float32: advantages, or None
    truncated: bool = False
    empty: bool = False  # whether a counted turn of the assistant is empty
    straddles: int = 0  # number of stretches whose first character lies within a token that begins before them
    begins: bool = False  # whether the first token, which cannot count, lies in a stretch
    texts: tuple = None  # messages or texts that count, for the check; None: no check
    others: tuple = ()  # messages or texts that do not count


def tokenizer_json(path):
    return os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path


def alike(a, b):
    """Returns the length of the common prefix of ids."""
    shorter = min(len(a), len(b))
    return int(np.argmin(np.append(a[:shorter] == b[:shorter], False)))


def text_crc(text):
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def library_version():
    return f"tokenizers {tokenizers.__version__}"


class Cuts:
    """Places where a text may be cut without changing its tokens: before a special token that is matched literally, takes nothing from
    the text before it, and overlaps no other added token. The library itself first cuts a text by added tokens."""

    def __init__(self, added):
        raw = [token for token in added if not token.normalized and token.content]
        self.known = {token.content: token.lstrip for token in raw}
        self.lengths = sorted({len(content) for content in self.known})
        marks = [re.escape(token.content) for token in raw if token.special and not token.lstrip]
        whole_words = any(token.single_word for token in raw)  # a token of this kind depends on its neighbours
        self.pattern = re.compile("|".join(marks)) if marks and not whole_words else None

    def may_cut(self, text, at):
        if any(self.known.get(text[at:at + n]) for n in self.lengths):
            return False
        return not any(text[at - before:at - before + n] in self.known for n in self.lengths for before in range(1, min(n, at + 1)))

    def pieces(self, text):
        """Returns [begin, end) of pieces of at least PIECE characters."""
        begin = at = 0
        while self.pattern and len(text) - begin > 2 * PIECE:
            found = self.pattern.search(text, max(at, begin + PIECE))
            if not found:
                break
            at = found.start() + 1
            if self.may_cut(text, found.start()):
                yield begin, found.start()
                begin = found.start()
        yield begin, len(text)


class Encoder:
    """A tokenizer with its chat template and a run's options."""

    def __init__(self, options, now=None):
        self.options, self.now = options, now
        path = tokenizer_json(options.tokenizer)
        try:
            content, self.tokenizer, self.own_ids = tokenizer_load.load(path)
        except ValueError as error:
            raise SetupFailure(str(error)) from None
        normalizer = self.tokenizer.normalizer
        self.nfc, self.without_nfc = normalizer if isinstance(normalizer, normalizers.NFC) else None, False
        self.vocabulary = max(self.tokenizer.get_vocab(True).values(), default=-1) + 1  # own_ids: the ids of tokenizer.json without added tokens
        self.fingerprint = shards.fingerprint(content)
        self.name = templates.tokenizer_name(templates.folder_of(options.tokenizer))
        self.special = templates.load_special_tokens(options.tokenizer)
        self._take_post_processor(path)
        self.eos = self._eos()
        added = self.tokenizer.get_added_tokens_decoder()
        self.cuts = Cuts(added.values())
        self.known = words.Known(self.tokenizer, lambda text: self.library(text).ids.tobytes())
        self.special_ids = np.array(sorted(i for i, token in added.items() if token.special), np.uint32)
        text = templates.load_chat_template(options.tokenizer, options.chat_template)
        self.template = templates.ChatTemplate(text, self.special, now) if text is not None else None
        self.turns = spans.Turns(self.template, [added[int(i)].content for i in self.special_ids]) if self.template else None
        self.patterns = layout.Patterns(self.asked_stretches, templates.TemplateFailure)
        self.summaries = iterative.Summaries(options.summary_command, options.summary_timeout) if options.summary_command else None
        self.more_roles = tuple(role for role in options.roles.split(",") if role)
        self.train_on = self._train_on()
        try:
            self.template_arguments = records.template_arguments(json.loads(options.template_arguments), "--template-arguments")
        except (ValueError, RecursionError):
            raise SetupFailure("--template-arguments is not a JSON object") from None
        except Rejected as rejected:
            raise SetupFailure(rejected.detail) from None

    def _take_post_processor(self, path):
        """Returns the tokens that the post-processor puts around every text. They are added here instead, since post-processors shift the
        offsets of tokens that begin with a space, and masks are made from offsets."""
        samples = ("a", "ab 12\n c", "\u00e9")
        with_special = [self.tokenizer.encode(text) for text in samples]
        self.tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        plain = [self.tokenizer.encode(text).ids for text in samples]
        first = with_special[0].ids
        begin = next((i for i in range(len(first) + 1) if first[i:i + len(plain[0])] == plain[0]), None)
        if begin is not None:
            self.before, self.behind = first[:begin], first[begin + len(plain[0]):]
        if begin is None or any(e.ids != self.before + ids + self.behind for e, ids in zip(with_special, plain)):
            raise SetupFailure(f"{path}: its post-processor does more than add special tokens around a text, which is not supported")

    def _eos(self):
        token = self.options.eos_token or self.special.get("eos_token")
        if token is None:
            return None
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise SetupFailure(f"{self.options.tokenizer}: its vocabulary has no end-of-text token {token!r}; give another --eos-token")
        return found

    def _train_on(self):
        wanted = self.options.train_on.split(",")
        known = (*records.ROLES, *self.more_roles)
        if wanted in (["all"], ["last"], ["completion"]):
            return wanted[0]
        for role in wanted:
            if role not in known:
                raise SetupFailure(f"--train-on names the unknown role {role!r}; known are all, last, completion, {', '.join(known)}")
        return tuple(dict.fromkeys(wanted))

    # ---- tokens -------------------------------------------------------------------------------------------------------------
    def encode(self, record):
        """Returns (kind, [Document]) of an object; raises Rejected with the reason."""
        record, documents = self.understood(record)
        return record.kind, documents

    def understood(self, record):
        """Returns (Record, [Document]) of an object."""
        record = records.understand(record, self.options.format, self.more_roles, self.options.columns, self.template and self.reads)
        if self.options.segment_tokens:
            self.cut_into_rounds(record)
        documents = []
        for source in record.documents:
            try:
                if self.template and source.prompt is not None:
                    source.prompt, source.body = self.tagged(source.prompt), self.tagged(source.body)
                document = self.document(source, record)
            except templates.TemplateFailure as failure:
                raise Rejected(records.TEMPLATE, str(failure)) from None
            except templates.Endless as failure:
                raise SetupFailure(str(failure)) from None
            except RecursionError:
                raise Rejected(records.MALFORMED, "is nested too deeply") from None
            except (TypeError, UnicodeEncodeError):
                raise Rejected(records.MALFORMED, "holds half of a surrogate pair, which is not text") from None
            document.reward = source.reward
            prompt = document.prompt
            documents.append(self.bounded(document))
            if record.kind == shards.PROMPTS and document.prompt < prompt:
                raise Rejected(records.TOO_LONG, f"a prompt of {prompt} tokens, which is not cut")
        if record.kind == shards.PAIRS and (self.train_on == "completion" or record.implicit and isinstance(record.documents[0].prompt, str)):
            prompt = min(document.prompt for document in documents)  # the tokens with which both begin
            for document in documents:
                document.counts[max(prompt, 1):document.prompt] = 1
                document.prompt = prompt
        if record.kind == shards.PROMPTS:
            return record, documents
        for number, document in enumerate(documents):
            if len(document.ids) < 2 or not document.counts.any():
                which = f"document {number + 1} of {len(documents)}: " if len(documents) > 1 else ""
                raise Rejected(records.NO_TARGET, f"{which}none of its {len(document.ids)} tokens")
        return record, documents

    def cut_into_rounds(self, record):
        """Replaces a conversation by the rounds of its reasoning (iterative.py)."""
        source = record.documents[0]
        if record.kind != shards.DOCUMENTS:
            raise Rejected(records.WRONG_TYPE, f"--iterative takes conversations, and this is of {shards.KINDS[record.kind]}")
        if self.template and source.prompt is not None:
            source.body = self.tagged(source.body)
        record.used += [key for key in record.left_out if key in ("segments", "summaries")]
        record.left_out = [key for key in record.left_out if key not in record.used]
        try:
            record.documents = iterative.rounds(source, record.rounds, self.options.segment_tokens, self.encoding, self.summaries)
        except iterative.SummaryFailure as failure:
            raise SetupFailure(str(failure)) from None
        record.told += ["reasoning was cut into rounds"] * (len(record.documents) > 1)

    def document(self, source, record):
        if record.kind == shards.PROMPTS:
            return self.prompt_alone(source, record)
        if record.kind == shards.ADVANTAGES:
            return self.finished(self.tokens(*source.body))
        if source.prompt is None:
            ids, _ = self.surrounded(self.encoding(source.body).ids)
            return self.finished(Document(ids, np.ones(len(ids), np.uint8)))
        if isinstance(source.body, str):
            return self.finished(self.completion(source.prompt, source.body, record.implicit))
        return self.finished(self.conversation(source, record))

    def encoding(self, text):
        """Encodes a text by the library."""
        found = Words(self.known, text, self.library) if text and self.known.stretches else None
        return found if found and found.ordered else self.library(text)

    def library(self, text):
        """Encodes a text, a long one in pieces: the library needs some hundreds of bytes for every token given at a time."""
        if self.nfc:  # NFC does not change ASCII but takes time; so does replacing the normalizer
            wanted = None if text.isascii() else self.nfc
            if self.without_nfc != (wanted is None) and (wanted or len(text) > words.LONGEST):
                self.tokenizer.normalizer, self.without_nfc = wanted, wanted is None
        normal = unicodedata.is_normalized("NFC", text)  # a normalizer does not reorder the characters of an NFC text
        if normal and len(text) <= 2 * PIECE:
            return Encoding(self.tokenizer.encode(text, add_special_tokens=False))
        pieces = []
        for begin, end in self.cuts.pieces(text):
            while begin < end:
                encoding, tokens, behind = self.words(text, begin, end)
                pieces.append((encoding.ids[:tokens], encoding.offsets[:tokens] + begin))
                begin = behind
        return Pieces(pieces)

    def words(self, text, begin, end):
        """Encodes about PIECE characters of a long text from `begin`; returns (Encoding, tokens to take, their end). The tokens end
        before a word that begins with its space, where another piece may begin."""
        if end - begin > 2 * PIECE and self.words_are_apart:
            found = self.tokenizer.encode(text[begin:begin + PIECE], add_special_tokens=False)
            for place in SPACE.finditer(text, begin + PIECE - PIECE // 16, begin + PIECE - PIECE // 64):
                at = place.start() - begin
                token = found.char_to_token(at)
                if token and found.token_to_chars(token)[0] == at and found.token_to_word(token) != found.token_to_word(token - 1):
                    return Encoding(found), token, begin + at
        encoding = Encoding(self.tokenizer.encode(text[begin:end], add_special_tokens=False))
        return encoding, len(encoding.ids), end

    @functools.cached_property
    def words_are_apart(self):
        """Tells whether a text may be cut before the space of a word: tokens depend on nothing after that space, nor on a text's beginning."""
        ids = lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids
        text = "Hello there, big wide world: 12 a.b (c) d"
        return all(ids(text[:found.start()]) + ids(text[found.start():]) == ids(text) for found in SPACE.finditer(text))

    @staticmethod
    def finished(document):
        """Makes a Document; its first token never counts, because nothing predicts it."""
        document.begins = bool(document.counts[:1].any())
        document.counts[:1] = 0
        return document

    def bounded(self, document):
        limit, tokens = self.options.max_tokens, len(document.ids)
        if not limit or tokens <= limit or self.options.long == "keep":
            return document
        if self.options.long == "skip":
            raise Rejected(records.TOO_LONG, f"{tokens} tokens")
        document.ids, document.counts = document.ids[:limit], document.counts[:limit]
        document.values = None if document.values is None else document.values[:limit]
        document.prompt = min(document.prompt, limit)
        document.truncated, document.texts = True, None
        return document

    def surrounded(self, ids):
        """Returns (ids, how many were added before) with the post-processor's tokens and an end-of-text token; adds none that the text
        already has."""
        lead = 0 if ids[:len(self.before)].tolist() == self.before else len(self.before)
        behind = [] if not self.behind or ids[-len(self.behind):].tolist() == self.behind else self.behind
        ids = np.concatenate([np.array(self.before[:lead], np.uint32), ids, np.array(behind, np.uint32)])
        if self.options.eos == "yes":
            if self.eos is None:
                raise SetupFailure(f"{self.options.tokenizer}: has no end-of-text token (tokenizer_config.json has no eos_token); "
                                   "give --eos-token TOKEN or --eos no")
            if ids[-1:].tolist() != [self.eos]:
                ids = np.append(ids, np.uint32(self.eos))
        return ids, lead

    def completion(self, prompt, body, implicit=False):
        """Encodes prompt and completion as one text, as the model will see them; tokens added after it count. An implicit prompt may end
        within a word: then the first token that is partly after the prompt counts, too."""
        encoding = self.encoding(prompt + body)
        inner, straddles = self.mask(encoding, [(len(prompt), len(prompt) + len(body))])
        ids, lead = self.surrounded(encoding.ids)
        begin = lead + (int(np.argmax(inner)) if inner.any() else len(inner))
        if implicit or self.train_on == "completion":
            begin, straddles = alike(np.concatenate([ids[:lead], self.encoding(prompt).ids]), ids), 0
        counts = np.zeros(len(ids), np.uint8)
        if self.train_on == "all":
            counts[:] = 1
        elif self.train_on in ("last", "completion") or "assistant" in self.train_on:
            counts[begin:] = 1
        return Document(ids, counts, begin, straddles=straddles, texts=(body,), others=(prompt,))

    def tokens(self, ids, train, advantages):
        """Makes a document of a record of tokens; its prompt ends before the first token that counts."""
        wrong = next((i for i, token in enumerate(ids) if token >= self.vocabulary), None)
        if wrong is not None:
            raise Rejected(records.WRONG_TYPE, f"ids[{wrong}] is {ids[wrong]}, the vocabulary has {self.vocabulary}")
        counts = np.array(train, np.uint8)
        return Document(np.array(ids, np.uint32), counts, int(np.argmax(counts)) if counts.any() else 0,
                        values=np.array(advantages, np.float32))

    def prompt_alone(self, source, record):
        """Encodes a prompt up to the first token that the model writes, then the reference answer without added tokens."""
        if isinstance(source.prompt, str):
            ids = self.encoding(source.prompt).ids
            ids = ids if ids[:len(self.before)].tolist() == self.before else np.concatenate([np.array(self.before, np.uint32), ids])
        else:
            messages, more = self.messages(source.prompt, record)
            text = self.template.render(messages, True, record.tools, **more)
            self.placed(text, messages, [], record, more)
            ids = self.encoding(text).ids
        if not len(ids):
            raise Rejected(records.EMPTY, "the prompt has no tokens")
        answer = self.encoding(source.body).ids if source.body else ids[:0]
        return Document(np.concatenate([ids, answer]), np.zeros(len(ids) + len(answer), np.uint8), len(ids))

    @staticmethod
    def mask(encoding, stretches):
        """Returns (counts, number of stretches that begin within a token)."""
        counts = np.zeros(len(encoding.ids), np.uint8)
        straddles = 0
        for first, last in stretches:
            if encoding.ordered:
                low, across = encoding.behind(first)
                counts[low:encoding.behind(last)[0]] = 1
                straddles += bool(across and not counts[low - 1])
            else:
                begin, end = encoding.offsets[:, 0], encoding.offsets[:, 1]
                counts[(begin >= first) & (begin < last)] = 1
                straddles += bool(((begin < first) & (end > first)).any())
        return counts, straddles

    def wanted(self, messages, first):
        """Returns the indices of the trained messages; in a completion only messages after its prompt."""
        roles = ("assistant",) if self.train_on == "last" else self.train_on
        found = [i for i in range(first, len(messages)) if messages[i]["role"] in roles]
        return [i for i in found[-(self.train_on == "last"):] if not records.masked(messages[i])]

    def messages(self, messages, record):
        """Returns (messages with their reasoning in the keys that the template reads, variables for the template). Notes masks."""
        if self.template is None:
            raise SetupFailure(f"{self.options.tokenizer}: has no chat template for messages; give --chat-template FILE")
        found = []
        for i, message in enumerate(messages):
            for key in message.keys() & records.MASKS if len(message) > 2 else ():
                if not message[key]:
                    record.told.append(f"turns whose {key} is 0 or false do not count")
                elif not isinstance(self.train_on, str) and message["role"] not in self.train_on:
                    record.told.append(f"{key} is true for turns of the {message['role']}, which --train-on does not name: they do not count")
            if message["role"] == "assistant" and "think>" in message["content"]:
                message = self.reasoned(message, i + 1 == len(messages), record)
            found.append(message)
        return found, {**self.template_arguments, **record.template_arguments}

    def probe(self, content, **more):
        try:
            return self.template.render([{"role": "user", "content": "Q"}, {"role": "assistant", "content": content, **more}],
                                        **self.template_arguments)
        except (templates.TemplateFailure, templates.Endless):
            return ""

    @functools.cached_property
    def reads(self):
        """Returns the variables that the template expects from its caller, and REASONING_FIELD if it has one."""
        tree = self.template.environment.parse(self.template.text)
        own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx != "load"}
        asked = {test.node.name for test in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
                 if test.name in ("defined", "default") and isinstance(test.node, jinja2.nodes.Name)} | {"tools"}
        more = {records.REASONING_FIELD} if self.reasoning[0] else set()
        return jinja2.meta.find_undeclared_variables(tree) - (own - asked) - {"content", *self.special} | more

    @functools.cached_property
    def reasoning(self):
        """Returns (whether the template has a field for reasoning, whether it reads or prints reasoning in the content, too)."""
        field, inside = self.probe("QzA", reasoning_content="QzR"), self.probe("<think>\nQzR\n</think>\n\nQzA")
        return "QzR" in field, "QzR" not in field or field.count("</think>") == inside.count("</think>")

    @functools.cached_property
    def marks(self):
        """Returns the template's own marks around reasoning, if it removes them from a content; else None."""
        field, plain = self.probe("QzA", reasoning_content="QzR"), self.probe("QzA")
        begin, _, rest = field.partition("QzR")
        marks = begin[len(os.path.commonprefix([begin, plain])):].strip(), rest.partition("QzA")[0].strip()
        inside = self.probe(f"{marks[0]}\nQzR\n{marks[1]}QzA")
        return marks if all(marks) and "QzA" in inside and "QzR" not in inside and "think>" not in "".join(marks) else None

    def tagged(self, messages):
        """Returns messages with <think> in place of the template's own marks."""
        def content(text):
            inside = text.lstrip().startswith(self.marks[0])
            return text.replace(self.marks[0], "<think>", 1).replace(self.marks[1], "</think>", 1) if inside else text
        if not isinstance(messages, list) or not self.marks:
            return messages
        return [{**message, "content": content(message["content"])} if message["role"] == "assistant" else message for message in messages]

    @staticmethod
    def cut_off(message):
        """Tells whether the turn ends before its reasoning does."""
        return (message["role"] == "assistant" and message["content"].lstrip().startswith("<think>") and "</think>" not in message["content"]
                and not any(message.get(name) for name in ("tool_calls", *templates.REASONING)))

    def reasoned(self, message, last, record):
        """Returns the message. Moves its reasoning to the template's field, if the template would not find it in the content."""
        thought, end, answer = message["content"].partition("</think>")
        begins, (field, inside) = thought.lstrip().startswith("<think>"), self.reasoning
        if "<think>" in message["content"].rpartition("</think>")[2] and (end or not begins):
            record.told.append("<think> after other text, without </think>, is left unchanged")
        if any(message.get(name) for name in templates.REASONING) or not begins and (not end or "<think>" in thought):
            return message
        if not end:
            record.told.append("reasoning is cut off (<think> without </think>); --reasoning drop leaves these samples out")
            if self.options.reasoning == "drop" or not last and field:
                raise Rejected(records.CUT_OFF, f"a turn begins with <think> and has no </think>: {self.clip(message['content'])}")
        elif not begins:
            record.told.append("</think> without <think>: " + ("the text before it became reasoning_content" if field else
                                                                "the template has no field for reasoning, and prints it unchanged"))
        elif not inside:
            record.told.append("reasoning in the content became reasoning_content, which the template reads")
        if not field or begins and end and inside or not end and not last:
            return message
        return {**message, "reasoning_content": thought.lstrip().removeprefix("<think>").strip("\n"), "content": answer.lstrip("\n")}

    def conversation(self, source, record):
        given = source.prompt + source.body
        messages, more = self.messages(given, record)
        first, last = len(source.prompt), len(messages)
        everything = self.train_on in ("all", "completion")
        if self.train_on == "completion" and not first:  # in a whole conversation the assistant's last turn
            first = next((i for i in reversed(range(last)) if messages[i]["role"] == "assistant"), last)
            last = first + 1
        masked = [i for i, message in enumerate(messages) if records.masked(message)]
        begin = first if self.train_on == "completion" else 0
        wanted = [i for i in range(begin, min(last, len(messages))) if not records.masked(messages[i])] if everything else self.wanted(messages, first)
        text, stretches = self.stretches(given, messages, masked if everything else wanted, record, more)
        encoding = self.encoding(text)
        ids = encoding.ids
        counts, straddles = self.mask(encoding, [stretch[1:] for stretch in stretches])
        if everything:
            counts, straddles = 1 - counts, 0
        prompt = int(np.argmax(counts)) if first and counts.any() else 0
        before = self.template.render(messages[:first], True, record.tools, **more) if first and everything else ""
        if before and self.train_on == "all":
            prompt = encoding.behind(len(before))[0] if text.startswith(before) else 0
        if self.train_on == "completion":
            prompt = alike(self.encoding(before).ids, ids) if before else 0
            counts[:prompt] = 0
            if last < len(messages):
                whole = self.template.render(messages[:last], False, record.tools, **more)
                counts[alike(self.encoding(whole).ids, ids):] = 0
                said = messages[first]["content"].rpartition("</think>")[2].strip()
                if wanted and messages[first].get("tool_calls") and said not in os.path.commonprefix([whole, text])[len(before):]:
                    counts |= self.mask(encoding, [stretch[1:] for stretch in self.asked_stretches(messages, wanted, record.tools, more)[1]])[0]
        chosen, order = set(wanted), {stretch[0]: place for place, stretch in enumerate(stretches)}
        texts = tuple(messages[i] for i in (sorted(wanted, key=order.get) if chosen <= order.keys() else wanted))
        empty = any(given[i]["role"] == "assistant" and not (given[i]["content"].strip() or given[i].get("tool_calls")) for i in wanted)
        return Document(ids, counts, prompt, straddles=straddles, empty=empty, texts=texts,
                        others=tuple(m for i, m in enumerate(messages) if i not in chosen))

    def stretches(self, source, messages, wanted, record, more):
        """Returns (text, [(message number, begin, end)]). Reasoning cut off at the end is an unfinished turn: nothing follows it."""
        text = self.template.render(messages, False, record.tools, **more)
        found = self.placed(text, messages, wanted, record, more)
        if not self.cut_off(source[-1]):
            return text, found
        said = (messages[-1].get("reasoning_content") or messages[-1]["content"]).strip()
        end = text.rfind(said) + len(said)
        if not said or end < len(said):
            raise Rejected(records.CUT_OFF, f"the template has no place for it: {self.clip(said)}")
        return text[:end], [(i, begin, min(last, end)) for i, begin, last in found if begin < end]

    def placed(self, text, messages, wanted, record, more):
        """Returns [(message number, begin, end)] in the rendering of messages: from the conversation of placeholders if that one
        is proved equal, else from renderings of these messages. Raises Rejected if a message is not in the text."""
        mark = next((p[0] for p in spans.PLACEHOLDERS if p[0] not in text), None)
        found = absent = None
        if mark and not (self.template.has_generation and any(mark in text for mark in templates.MARKS)):
            found, absent = self.patterns.spans(text, messages, mark, wanted, record.tools, more)
        if absent is None:
            absent = [path for path, value in layout.leaves(messages) if not any(s in text for s in layout.spellings(value))]
        left_out = {key for _, key, *rest in absent if not rest} - TOLD_APART
        for i, key, *rest in absent:
            if key == "content" or key == "tool_calls" and rest[1:2] in (["function"], ["name"], ["arguments"]):
                self.look_for((i, key, *rest), messages, record, more)
        for i, message in enumerate(messages):
            if len(message) > 2:
                left_out |= {key for key in message.keys() - TOLD_APART if not isinstance(message[key], str) and key not in self.template.text}
            reasoning, rest = self.thoughts(message) if message["role"] == "assistant" else ("", ())
            if reasoning.strip() not in text:
                old = any(later["role"] == "user" for later in messages[i:])
                record.told.append(f"the template leaves out the reasoning of {'turns before the last question' if old else 'the last turn'}")
            for begin, end in rest:
                self.look_for((i, "content"), messages, record, more, begin, end)
        record.left_out += [key for key in sorted(f"messages[].{key}" for key in left_out) if key not in record.left_out]
        return self.asked_stretches(messages, wanted, record.tools, more)[1] if found is None and wanted else found or []

    @staticmethod
    def thoughts(message):
        """Returns (reasoning of a message, [begin, end) of its content around the reasoning, without the answer after it)."""
        thought, closed, _ = message["content"].partition("</think>")
        edges = [0, *(edge for tag in THOUGHT.finditer(message["content"]) for edge in tag.span())]
        inside = thought.rpartition("<think>")[2] if closed else ""
        return next(filter(None, map(message.get, templates.REASONING)), inside), list(zip(edges[::2], edges[1::2]))

    def look_for(self, path, messages, record, more, begin=0, end=None):
        """Raises Rejected if a part of a message's text does not change the rendering."""
        whole = functools.reduce(lambda value, key: value[key], path, messages)
        part = whole[begin:end]
        if not part.strip():
            return
        other = layout.put_at(messages, path, whole[:begin] + spans.PLACEHOLDERS[0] + whole[begin + len(part):])
        try:
            text, other = (self.template.render(found, False, record.tools, **more) for found in (messages, other))
        except templates.TemplateFailure:  # the rendering changed, so the template reads this text
            return
        if text == other:
            what = path[1] if part == whole else f"{path[1]}'s {self.clip(part)}"
            raise Rejected(records.TEMPLATE, f"the template leaves out the {what} of message {path[0] + 1} "
                                             f"({messages[path[0]]['role']}); change it, or give another --chat-template")

    def asked_stretches(self, messages, wanted, tools, more):
        """Returns (text, [(message number, begin, end)]). {% generation %} blocks, if any, mark the assistant's turns; turns of other roles
        are searched."""
        if not wanted:
            return self.template.render(messages, False, tools, **more), []
        find = self.turns.find_generation if self.template.has_generation else self.turns.find
        text, stretches = find(messages, [i for i in wanted if messages[i]["role"] == "assistant"], tools, **more)
        rest = [i for i in wanted if messages[i]["role"] != "assistant"]
        stretches = stretches + (self.turns.find(messages, rest, tools, **more)[1] if rest else [])
        return text, sorted(stretches, key=lambda stretch: stretch[1])

    # ---- the check ----------------------------------------------------------------------------------------------------------
    def check(self, document):
        """Decodes the counted tokens and compares them with the trained texts, ignoring white space. Raises MaskFailure if they differ."""
        if document.texts is None or self.train_on in ("all", "completion"):
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[0], [document.begins], document.counts[1:], [0]])))
        runs = [self.letters(document.ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2])]
        everything, whole, at = "".join(runs), self.letters(document.ids), 0
        for message in document.texts:
            content = self.content_letters(message)  # or the message's end, if the prompt or the template holds its beginning
            opened = content.removeprefix("<think>" if self.generation_prompt.endswith("<think>") else "")
            answer = content if content in whole else content.rpartition("</think>")[2]
            said = next((part for part in (content, opened, answer) if part in everything[at:]), None)
            if said is not None:
                at = everything.index(said, at) + len(said)
            elif not self.shortened(content, runs, document):
                raise MaskFailure(f"{self.shown(message)} should count, {self.clip(everything)} does")
        counted = "\0".join(self.letters_of(text) for message in document.texts for _, text in layout.leaves(message))
        for message in document.others:
            content = self.content_letters(message)
            if len(content) >= 12 and content in everything and content not in counted:
                raise MaskFailure(f"{self.shown(message)} should not count, but does")

    def letters(self, ids):
        return "".join(self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False).split())

    def letters_of(self, text):
        """Returns the text as this tokenizer decodes it (for example normalised), without white space."""
        return self.letters(self.encoding(text).ids)

    def content_letters(self, message):
        return self.letters_of(message if isinstance(message, str) else message["content"])

    def shortened(self, content, runs, document):
        """Tells whether counted texts are the messages or their ends. A template may drop a part of a message, such as old reasoning; its
        generation prompt may hold a message's beginning; a first token that begins in the prompt does not count."""
        special = [self.tokenizer.id_to_token(int(i)) for i in self.special_ids]
        cores = [functools.reduce(str.removesuffix, special, run) for run in runs]
        cores = [core for core in cores if content.endswith(core) and (core or document.straddles)]
        if document.straddles or content not in self.letters(document.ids):
            return bool(cores)
        return any(self.generation_prompt.endswith(content[:len(content) - len(core)]) for core in cores)

    @functools.cached_property
    def generation_prompt(self):
        if not self.turns:
            return ""
        try:
            prompt = spans.Canonical(self.template, self.turns.special_pattern, self.template_arguments).prompt
        except templates.TemplateFailure:
            return ""
        return "".join(prompt.split())

    def shown(self, message):
        if isinstance(message, str):
            return f"the text {self.clip(message)}"
        return f"the {message['role']}'s {self.clip(message.get('content', ''))}"

    @staticmethod
    def clip(text):
        return json.dumps(text[:40] + ("..." if len(text) > 40 else ""), ensure_ascii=False)


def pack(documents, id_type):
    """Returns a sample's documents in the shard's form: ids, counts, values (or None), table (begin counted from the first)."""
    table = np.zeros(len(documents), shards.TABLE)
    begin = 0
    ids = [document.ids.astype(id_type) for document in documents]
    for i, (document, own) in enumerate(zip(documents, ids)):
        crc = shards.document_crc(own.data, document.counts.data, b"" if document.values is None else document.values.data)
        table[i] = begin, len(own), np.count_nonzero(document.counts), 0, document.prompt, document.reward, crc
        begin += len(own)
    return ids, [document.counts for document in documents], [document.values for document in documents], table
