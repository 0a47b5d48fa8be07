"""One line of input, a JSON object or a Parquet row, understood: which kind of sample it is, and what its documents are made of.

Shapes of an object (keys that are None count as absent):

  {"text"}  {"messages"} or {"conversations"}  {"prompt", "completion"}             one document
  {"prompt", "completion", "label"}                                                 one document that is desirable (label true) or not
  {"chosen", "rejected"}, maybe with {"prompt"}                                     a preference pair, two documents
  {"prompt", "completions": [...], "rewards": [...]}                                a group, a document for each completion
  {"prompt"}, maybe with {"answer"}                                                 a prompt alone, with a reference answer behind it
  {"ids": [...], "train": [...], "advantages": [...]}                               a document that is tokens already

Prompts and completions are texts, or lists of messages; an answer is a text. What is not so is a Rejected with a reason for counting and a detail.
"""

import json
from dataclasses import dataclass, field

import shards

FORMATS = ("auto", "text", "messages", "completion", "unpaired", "preference", "groups", "prompts", "advantages")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
COLUMNS = ("text", "messages", "conversations", "prompt", "completion", "chosen", "rejected", "completions", "rewards", "answer",
           "label", "ids", "train", "advantages", "tools", "chat_template_kwargs")
UNUSED = ("score", "scores", "reward", "rating", "weight", "system", "response", "output", "target")  # they may mean something
SHAPES = (  # of each format: the columns that it must have, and those that it may have beside them; of two that fit, the first
    ("text", ("text",), ()), ("messages", ("messages",), ()), ("messages", ("conversations",), ()),
    ("unpaired", ("prompt", "completion", "label"), ()), ("completion", ("prompt", "completion"), ()),
    ("preference", ("chosen", "rejected"), ("prompt",)), ("groups", ("completions", "rewards", "prompt"), ()),
    ("prompts", ("prompt",), ("answer", "label")), ("advantages", ("ids", "advantages"), ("train",)))
SHAPING = ("text", "messages", "conversations", "prompt", "completion", "chosen", "rejected", "completions")  # the others mean little alone
BESIDE_LABEL = {"messages", "conversations", "completion", "chosen", "rejected", "completions"}
FIELD_NAMES = {"text": "language modelling", "messages": "language modelling", "completion": "prompt-completion",
               "unpaired": "unpaired preference", "preference": "preference", "groups": "groups with rewards", "prompts": "prompt-only",
               "advantages": "tokens with advantages"}
PROMPTS_OWN = {"prompt", "answer"}  # what is not passed on to reward commands as a column
BESIDE_NO_PROMPT = ("text", "messages", "conversations", "completion", "chosen", "rejected", "completions")  # of prompts alone
OURS = ("completion", "reference", "completion_ids", "prompt_ids", "reference_ids", "prompt_number", "ended", "reward",
        "advantage", "step", "tokens")  # keys of rollouts.jsonl, and of the
# lines that reward commands get and give, beside prompt: no columns are passed on under these names
TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "self", "marked", "wanted")  # no names for a template's variables

MASKS = ("weight", "train", "trainable", "loss", "loss_mask")  # of a message: 0 or false says that its turn does not count

MALFORMED, UNKNOWN_FORMAT, WRONG_TYPE, EMPTY = "malformed line", "unknown format", "wrong type", "empty sample"
CLASH = "columns that clash"
UNKNOWN_ROLE, TEMPLATE, OTHER_KIND = "unknown role", "template failure", "another kind"
NO_TARGET, TOO_LONG, CUT_OFF = "no target that counts", "longer than --max-tokens", "reasoning that is cut off"
ACCEPTABLE = (NO_TARGET, TOO_LONG, CUT_OFF)  # left out and reported; everything else refuses the run


class Unread(str):
    """Stands for a column of Parquet that is not read."""


class Text(bytes):
    """A document of a text file."""


class Rejected(Exception):
    def __init__(self, reason, detail):
        detail = detail if len(detail) <= 160 else detail[:157] + "..."
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass
class Source:
    """The parts of a document: a prompt and what follows it, both texts or both messages. Plain text has no prompt; of a prompt
    alone the body is a reference answer or None; of tokens it is (ids, train, advantages)."""

    body: object
    prompt: object = None
    reward: float = 0.0


@dataclass
class Record:
    kind: int
    documents: list
    format: str = None
    unused: list = field(default_factory=list)
    tools: list = None
    template_arguments: dict = field(default_factory=dict)
    implicit: bool = False  # the prompt is what two answers begin with alike
    shape: str = None  # the format as it is called in the field, for people
    used: list = field(default_factory=list)  # columns,
    passed: list = field(default_factory=list)  # those that go to reward commands,
    left_out: list = field(default_factory=list)  # and the others
    told: list = field(default_factory=list)  # what a person should know of it: texts, of which a run counts the samples
    columns: bytes = shards.EMPTY_COLUMNS  # of a prompt alone: what reward commands get beside prompt and answer, as a JSON object


def parse_line(line):
    """A line's object."""
    whole = "; a file that is one JSON array becomes lines with `jq -c '.[]'`" if line.lstrip()[:1] == b"[" else ""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Rejected(MALFORMED, f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise Rejected(MALFORMED, f"not JSON: {error.msg} at column {error.colno}{whole}") from None
    except (RecursionError, ValueError) as error:
        raise Rejected(MALFORMED, f"not JSON that can be read: {type(error).__name__}") from None
    if not isinstance(record, dict):
        raise Rejected(MALFORMED, f"is {type_name(record)}, not an object{whole}")
    return record


def parse_text(document):
    try:
        return {"text": document.decode("utf-8")}
    except UnicodeDecodeError as error:
        raise Rejected(MALFORMED, f"not UTF-8 at byte {error.start} of the document; convert it, as with iconv -t UTF-8") from None


def want_json(value, column):
    """Parquet has values of more types than JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            want_json(item, f"{column}.{key}" if column else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            want_json(item, f"{column}[{i}]")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise Rejected(WRONG_TYPE, f"column {column} holds {type_name(value)}, which JSON does not have; cast it to text or a number")


def type_name(value):
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number",
            type(None): "null", bytes: "binary data", tuple: "a map"}.get(type(value), f"a {type(value).__name__}")


def want(value, kind, what):
    if not isinstance(value, kind):
        raise Rejected(WRONG_TYPE, f"{what} is {type_name(value)}, not {type_name(kind())}")
    return value


def want_finite(values, what):
    """Numbers that a float32 holds."""
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 3.4e38:
            shown = value if isinstance(value, float) else type_name(value)
            raise Rejected(WRONG_TYPE, f"{what}[{i}] is {shown}, not a finite number")


def template_arguments(value, what):
    """Variables for a template, whose names are not those of what it gets anyway."""
    taken = next((name for name in TAKEN if name in want(value, dict, what)), None)
    if taken:
        raise Rejected(WRONG_TYPE, f"{what} has {taken}, which a template gets from elsewhere; rename it")
    return value


def masked(message):
    return any(key in message and not message[key] for key in MASKS)


# ---- which format -------------------------------------------------------------------------------------------------------------
def detect(record):
    """The name of the one format whose columns the object has."""
    there = lambda key: record.get(key) is not None
    row = [key for key in SHAPING if there(key)]
    satisfied = [name for name, needed, _ in SHAPES if all(map(there, needed))]
    if there("label") and (record["label"] in (True, False) or "completion" in row) and set(row) & BESIDE_LABEL:
        row.append("label")
    if {"prompt", "completions"} <= set(row) and there("labels"):
        raise Rejected(UNKNOWN_FORMAT, "has prompt, completions and labels, which is stepwise supervision; no objective here trains on that")
    picture = next((key for key in ("images", "image", "videos", "audio") if record.get(key)), None)
    if picture:
        raise Rejected(UNKNOWN_FORMAT, f"has {picture}: only text is trained on here; drop the column, or --format takes the row without")
    if there("ids") and there("advantages"):
        row = ["ids", *row]
    clash = next(((a, b) for a in row for b in row if a != b and not any({a, b} <= {*needed, *more} for _, needed, more in SHAPES)), None)
    if clash:
        advice = f"; choose with --format {' or '.join(dict.fromkeys(satisfied))}" if satisfied else ""
        advice += "; unpaired preference, for KTO, has prompt, completion, label" if "label" in clash else ""
        raise Rejected(CLASH, f"has {clash[0]} and {clash[1]}, which no format has together{advice}")
    beside = next((key for key in ("response", "output", "target") if there(key)), None)
    if row == ["prompt"] and beside:
        raise Rejected(UNKNOWN_FORMAT, f"has prompt and {beside}; rename {beside} to completion (SFT) or answer, or --format prompts "
                                       "takes the prompt alone")
    for name, needed, more in SHAPES:
        if name in satisfied and set(row) <= {*needed, *more}:
            return name
    for name, needed, more in SHAPES:  # the first of which something is there, but not all
        if row and set(row) <= {*needed, *more}:
            raise Rejected(UNKNOWN_FORMAT, f"has {' and '.join(row)}, and no {next(key for key in needed if key not in row)}; {name} has "
                                           f"{', '.join(needed)} (data/README.md)")
    keys = ", ".join(map(str, list(record)[:8])) or "none"
    raise Rejected(UNKNOWN_FORMAT, f"keys are {keys[:60]}; wanted are text, messages, prompt with completion or chosen and rejected, ... "
                                   "(data/README.md)")


def describe(record, result):
    """What was made of an object: the format by its name in the field, with the columns that were used, passed on and left out."""
    source, name = result.documents[0], result.format
    talks = isinstance(source.prompt, list)
    result.shape = FIELD_NAMES[name] if name == "advantages" else f"{'conversational' if talks else 'standard'} {FIELD_NAMES[name]}"
    pair = name == "preference" or len(result.documents) == 2 and name == "unpaired"
    if pair:
        result.shape += f"{' of pairs' * (name == 'unpaired')} with {'implicit' if result.implicit else 'explicit'} prompt"
    own = {"chosen", "rejected", "prompt"} if pair else {key for shape, needed, more in SHAPES if shape == name for key in (*needed, *more)} - {"label" if name == "prompts" else ""}
    if result.implicit:
        own.remove("prompt")
    if name == "messages" and record.get("messages") is not None:
        own.remove("conversations")
    if name == "prompts" and source.body is not None and source.body is record.get("completion"):
        own.add("completion")
    own |= {"tools", "chat_template_kwargs"} if talks else set()
    for key, value in record.items():
        if value is not None:
            passed = name == "prompts" and key not in PROMPTS_OWN and key not in own
            (result.used if key in own else result.passed if passed else result.left_out).append(key)


def understand(record, name="auto", more_roles=()):
    """The Record of an object."""
    name = detect(record) if name == "auto" else name
    reader = Reader(record, (*ROLES, *more_roles))
    unused = UNUSED if name == "unpaired" else ("label", *UNUSED)
    result = Record(*getattr(reader, name)(), name, [key for key in unused if record.get(key) is not None])
    result.implicit, result.told = reader.implicit, reader.told
    describe(record, result)
    if result.kind == shards.PROMPTS:
        result.columns, result.unused = other_columns(record, "completion" in result.used), []
    if record.get("tools"):
        tools = record["tools"]
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                raise Rejected(WRONG_TYPE, "tools is a text that is not JSON") from None
        result.tools = want(tools, list, "tools") or None
    if record.get("chat_template_kwargs") is not None:
        result.template_arguments = template_arguments(record["chat_template_kwargs"], "chat_template_kwargs")
    return result


def other_columns(record, completion_is_answer):
    """A prompt's row without prompt and answer, nor what is null, as bytes of a JSON object."""
    taken = {*PROMPTS_OWN, *(["completion"] if completion_is_answer else [])}
    if any(isinstance(value, Unread) for value in record.values()):
        raise Rejected(UNKNOWN_FORMAT, "is a prompt alone in a file with a column completion, of which not all is read; --format prompts "
                                       "reads all")
    columns = {key: value for key, value in record.items() if key not in taken and value is not None}
    wrong = next((key for key in OURS if key in columns), None)
    if wrong:
        raise Rejected(CLASH, f"column {wrong} has a name that reward commands know for something else; rename it")
    try:
        return json.dumps(columns, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Rejected(MALFORMED, "holds half of a surrogate pair, which is not text") from None
    except ValueError:
        raise Rejected(WRONG_TYPE, "a column holds a number that is not finite, which JSON does not have; make it null or a text") from None


class Reader:
    def __init__(self, record, roles):
        self.record, self.roles, self.implicit, self.told = record, roles, False, []

    def get(self, key, kind=None):
        value = self.record.get(key)
        if value is None:
            raise Rejected(UNKNOWN_FORMAT, f"has no {key}")
        return want(value, kind, key) if kind else value

    # -- formats: (kind, documents)
    def text(self):
        text = self.get("text", str)
        if not text.strip():
            raise Rejected(EMPTY, "text is empty")
        return shards.DOCUMENTS, [Source(text)]

    def messages(self):
        key = "messages" if self.record.get("messages") is not None else "conversations"
        return shards.DOCUMENTS, [Source(self.message_list(self.get(key), key), prompt=[])]

    def completion(self):
        return shards.DOCUMENTS, [self.pair(self.get("prompt"), self.get("completion"), "completion")]

    def unpaired(self):
        if self.record.get("chosen") is not None and self.record.get("rejected") is not None:  # a pair is two answers with labels
            _, (chosen, rejected) = self.preference()
            chosen.reward, rejected.reward = 1.0, 0.0
            return shards.LABELS, [chosen, rejected]
        label = self.get("label")
        if label not in (True, False):
            raise Rejected(WRONG_TYPE, f"label is {json.dumps(label)[:40]}, neither true nor false; --format completion trains on all rows")
        return shards.LABELS, [self.pair(self.get("prompt"), self.get("completion"), "completion", float(label))]

    def preference(self):
        chosen, rejected = self.get("chosen"), self.get("rejected")
        prompt = self.record.get("prompt")
        if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
            prompt, chosen, rejected = self.shared_prompt(prompt, chosen, rejected)
        elif prompt is None:
            want(chosen, str, "chosen")
            prompt, chosen, rejected = self.shared_text(chosen, want(rejected, str, "rejected"))
        return shards.PAIRS, [self.pair(prompt, chosen, "chosen"), self.pair(prompt, rejected, "rejected")]

    def groups(self):
        prompt, completions, rewards = self.get("prompt"), self.get("completions", list), self.get("rewards", list)
        if not completions:
            raise Rejected(EMPTY, "completions is empty")
        if len(completions) != len(rewards):
            raise Rejected(WRONG_TYPE, f"{len(completions)} completions, {len(rewards)} rewards")
        if len(completions) == 1:
            raise Rejected(WRONG_TYPE, "one completion alone is no group: there is nothing to compare its reward with")
        want_finite(rewards, "rewards")
        return shards.GROUPS, [self.pair(prompt, completion, f"completions[{i}]", float(reward))
                               for i, (completion, reward) in enumerate(zip(completions, rewards))]

    def prompts(self):
        prompt, answer = self.get("prompt"), self.record.get("answer")
        if answer is None:
            answer = self.record.get("completion")
        if answer is not None:
            want(answer, str, "answer")
        if isinstance(prompt, list):
            return shards.PROMPTS, [Source(answer, self.message_list(prompt, "prompt"))]
        if not want(prompt, str, "prompt"):
            raise Rejected(EMPTY, "prompt is empty")
        return shards.PROMPTS, [Source(answer, prompt)]

    def advantages(self):
        ids, train, advantages = (self.get(key, list) for key in ("ids", "train", "advantages"))
        if not len(ids) == len(train) == len(advantages):
            raise Rejected(WRONG_TYPE, f"{len(ids)} ids, {len(train)} of train, {len(advantages)} advantages; each token has one of each")
        wrong = next((i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value < 1 << 31), None)
        if wrong is not None:
            raise Rejected(WRONG_TYPE, f"ids[{wrong}] is {json.dumps(ids[wrong])[:20]}, not a token's number")
        wrong = next((i for i, value in enumerate(train) if value not in (0, 1)), None)
        if wrong is not None:
            raise Rejected(WRONG_TYPE, f"train[{wrong}] is {json.dumps(train[wrong])[:20]}, not 0 or 1")
        want_finite(advantages, "advantages")
        return shards.ADVANTAGES, [Source((ids, train, advantages))]

    # -- their parts
    def shared_text(self, chosen, rejected):
        """Two whole texts: the characters they begin with alike are the prompt, without a space at its end."""
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        if shared == min(len(chosen), len(rejected)):
            raise Rejected(EMPTY, "chosen and rejected do not differ, or one only continues the other")
        shared -= chosen[:shared].endswith(" ")
        if not shared:
            raise Rejected(UNKNOWN_FORMAT, 'has no prompt, and chosen and rejected begin differently; "prompt": "" says that there is none')
        self.implicit = True
        return chosen[:shared], chosen[shared:], rejected[shared:]

    def shared_prompt(self, prompt, chosen, rejected):
        """Two whole conversations: what they begin with alike is the prompt. A text `prompt` beside them must be in that."""
        chosen, rejected = list(chosen), list(rejected)
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if shared == len(chosen) or shared == len(rejected):
            raise Rejected(EMPTY, "chosen and rejected do not differ, or one only continues the other")
        if not shared:
            raise Rejected(UNKNOWN_FORMAT, "has no prompt, and chosen and rejected begin differently")
        if isinstance(prompt, str) and all(m.get("content") != prompt for m in chosen[:shared] if isinstance(m, dict)):
            raise Rejected(UNKNOWN_FORMAT, "prompt is a text that is not among the messages chosen and rejected share")
        self.implicit = True
        return chosen[:shared], chosen[shared:], rejected[shared:]

    def pair(self, prompt, completion, name, reward=0.0):
        if isinstance(prompt, list):
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            return Source(self.message_list(completion, name), self.message_list(prompt, "prompt"), reward)
        want(prompt, str, "prompt")
        if not want(completion, str, name):
            raise Rejected(EMPTY, f"{name} is empty")
        return Source(completion, prompt, reward)

    def message_list(self, messages, name):
        want(messages, list, name)
        if not messages:
            raise Rejected(EMPTY, f"{name} is empty")
        found = [self.message(message, f"{name}[{i}]") for i, message in enumerate(messages)]
        if not any(message.get("content") or message.get("tool_calls") for message in found):
            raise Rejected(EMPTY, f"{name} holds no text")
        return found

    def message(self, message, name):
        want(message, dict, name)
        message = {key: value for key, value in message.items() if value is not None}
        if "role" not in message and "from" in message:
            speaker = message.pop("from")
            if not isinstance(speaker, str) or speaker not in SHAREGPT:
                raise Rejected(UNKNOWN_ROLE, f"{name} is from {json.dumps(speaker)[:40]}; known are {', '.join(SHAREGPT)}")
            if "value" not in message:
                raise Rejected(WRONG_TYPE, f"{name} has no value")
            message = {"role": SHAREGPT[speaker], "content": message.pop("value"), **message}
        role = message.get("role")
        if role not in self.roles:
            raise Rejected(UNKNOWN_ROLE, f"{name} has role {json.dumps(role)[:40]}; known are {', '.join(self.roles)}, more by --roles")
        for key in MASKS:
            if message.get(key, 0) not in (0, 1):
                raise Rejected(WRONG_TYPE, f"{name} has {key} {json.dumps(message[key])[:20]}; a turn counts (1, true) or does not (0, false)")
        if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):  # as OpenAI's API had it before tools
            message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
            self.told.append("function_call became tool_calls")
        if message.get("tool_calls"):
            message["tool_calls"] = [self.call(call, name) for call in want(message["tool_calls"], list, f"{name}'s tool_calls")]
        if "content" not in message:
            if not message.get("tool_calls"):
                raise Rejected(WRONG_TYPE, f"{name} has neither content nor tool_calls")
            message["content"] = ""
        message["content"] = self.content(message["content"], name)
        return message

    def call(self, call, name):
        """A tool call whose arguments are an object. In OpenAI's API they are the text of one, which templates would encode again."""
        function = want(want(call, dict, f"{name}'s tool call").get("function") or call, dict, f"{name}'s function")
        if not isinstance(function.get("arguments"), str):
            return call
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Rejected(WRONG_TYPE, f"{name} calls a tool with arguments that are no JSON object: {json.dumps(function['arguments'])[:60]}")
        self.told.append("tool calls have their arguments as a text, which was parsed")
        return {**call, "arguments": arguments} if function is call else {**call, "function": {**function, "arguments": arguments}}

    @staticmethod
    def content(content, name):
        """A text, or a list of parts that are texts: they are joined, as templates made for such parts do."""
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if len(parts) != len(content) or any(part.get("type", "text") != "text" for part in parts):
                raise Rejected(WRONG_TYPE, f"{name} has parts that are not text")
            return "".join(part["text"] for part in parts)
        return want(content, str, f"{name}'s content")
