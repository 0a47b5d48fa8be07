"""Interprets an input row, an object: its kind of sample (SHAPES), and the texts of its documents.

Rows of other layouts (Alpaca, question and answer, ShareGPT, ...) are converted by MEANINGS, the names of their columns. No such
column is left out silently. Keys that are None count as absent. A fault raises Rejected with a reason, by which samples are counted, and a detail.
"""

import ast
import contextlib
import functools
import json
from dataclasses import dataclass, field

import layout
import shards
from templates import REASONING

FORMATS = ("auto", "text", "messages", "completion", "unpaired", "preference", "groups", "prompts", "advantages")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
CALLS = "tool calls"
SHAREGPT = {speaker: role for role, speakers in (  # names of speakers, and their roles
    ("user", "human user prompter"), ("assistant", "gpt assistant bot chatgpt model"), ("system", "system"),
    ("tool", "tool observation function_response"), (CALLS, "function_call tool_call")) for speaker in speakers.split()}
SHAPES = (  # for each format: required and optional columns; the first format that fits is taken
    ("text", ("text",), ()), ("messages", ("messages",), ()),
    ("unpaired", ("prompt", "completion", "label"), ()), ("completion", ("prompt", "completion"), ()),
    ("preference", ("chosen", "rejected"), ("prompt",)), ("groups", ("completions", "rewards", "prompt"), ()),
    ("prompts", ("prompt",), ("answer", "label")), ("advantages", ("ids", "advantages"), ("train",)),
    ("unpaired", ("messages", "label"), ()), ("preference", ("messages", "chosen", "rejected"), ()))
SHAPING = ("text", "messages", "prompt", "completion", "chosen", "rejected", "completions")  # columns that decide the format
TALKS = tuple(key for key in SHAPING if key != "prompt")  # a prompt with one of these columns is not a prompt alone
NOUNS = ("", "response", "answer", "completion", "output", "message", "messages", "conversation", "conversations", "text")
sided = lambda words: " ".join(f"{word}{noun} {noun}{word}" for word in words.split() for noun in NOUNS)
MEANINGS = {  # for each of our columns: its names in all layouts, compared without case, spaces, - and _
    "messages": "messages conversations conversation dialogue dialog",
    "chosen": sided("chosen preferred accepted better") + " responsej",
    "rejected": sided("rejected dispreferred nonpreferred unpreferred worse") + " responsek",
    "prompt": "prompt instruction question query problem",
    "completion": "completion output response answer solution target",
    "system": "system system_prompt system_message system_instruction",
    "history": "history chat_history conversation_history dialogue_history dialog_history",
    "reasoning_content": "reasoning_content reasoning reasoning_trace thinking thought thoughts cot complex_cot chain_of_thought rationale",
    "tools": "tools functions", "label": "kto_tag",
    "input": "input", "context": "context", "images": "images image videos audio",  # an input without an instruction is a question; images are refused
    "chat_template_kwargs": "chat_template_kwargs enable_thinking reasoning_effort thinking_budget preserve_thinking model_identity",  # members
    "either": "response_a response_b response_0 response_1 response_2 conversation_a conversation_b positive negative winner loser"}  # is better
BY_NAME = {name.replace("_", ""): column for column, names in MEANINGS.items() for name in names.split()}
meaning = functools.lru_cache(4096)(lambda key: BY_NAME.get("".join(filter(str.isalnum, key)).lower()))  # our name for a row's column, or None
BESIDE = {"prompt": ("text", "messages", "ids"), "completion": (*TALKS, "ids"), "system": ("text",)}  # with auto, next to one of these columns it has no meaning
NOTED = ("score", "scores", "reward", "rating", "weight", "label")  # reported if they are left out
LISTS = ("messages", "completions", "rewards", "ids", "train", "advantages", "history")  # a text in these columns is parsed as JSON
READ = (*LISTS, *NOTED, "text", "answer", "segments", "summaries")  # columns read from tables in addition to columns with a meaning
REASONING_FIELD = "messages[].reasoning_content"  # stands for a template's field of reasoning, among the names of its variables
FIELD_NAMES = {"text": "language modelling", "messages": "language modelling", "completion": "prompt-completion",
               "unpaired": "unpaired preference", "preference": "preference", "groups": "groups with rewards", "prompts": "prompt-only",
               "advantages": "tokens with advantages"}
OURS = ("completion", "reference", "completion_ids", "prompt_ids", "reference_ids", "prompt_number", "ended", "reward", "advantage", "step",
        "tokens")  # keys of rollouts.jsonl, and of reward commands' lines, except prompt: no columns are passed on under these names
BINARY = "binary data"
SAID = ("role", "from", "content", "value", "tool_calls", "function_call", *REASONING)  # keys of a message that are read
TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "self", "marked", "wanted")  # not allowed as a template's variables
MASKS = ("weight", "train", "trainable", "loss", "loss_mask")  # keys of a message that say whether its turn counts; 0 or false: no
MALFORMED, UNKNOWN_FORMAT, WRONG_TYPE, EMPTY = "malformed line", "unknown format", "wrong type", "empty sample"
CLASH = "columns that clash"
UNKNOWN_ROLE, TEMPLATE, OTHER_KIND = "unknown role", "template failure", "another kind"
NO_TARGET, TOO_LONG, CUT_OFF = "no target that counts", "longer than --max-tokens", "reasoning that is cut off"
ACCEPTABLE = (NO_TARGET, TOO_LONG, CUT_OFF)  # left out and reported; other reasons end the run


class Unread(str):
    """Marks a Parquet column that is not read."""


class Odd(str):
    """The text of a table's value, of a `kind` that JSON lacks; a time in ISO 8601. Formats refuse these values."""


class Text(bytes):
    """A document of a text file."""


class Rejected(Exception):
    def __init__(self, reason, detail):
        detail = detail if len(detail) <= 240 else detail[:237] + "..."
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass
class Source:
    """The parts of a document: a prompt and a body, both texts or both messages. Plain text has no prompt; the body of a prompt alone
    is a reference answer or None; for tokens it is (ids, train, advantages)."""

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
    implicit: bool = False  # the prompt is the common beginning of two answers
    shape: str = None  # the usual name of the format, for messages to the user
    used: list = field(default_factory=list)  # columns used
    passed: list = field(default_factory=list)  # columns passed to reward commands
    left_out: list = field(default_factory=list)  # other columns
    told: list = field(default_factory=list)  # notes for users; a run counts the samples of each
    rounds: tuple = (None, None)  # columns segments and summaries, for iterative.py
    columns: bytes = shards.EMPTY_COLUMNS  # for a prompt alone: other columns for reward commands, as a JSON object

    def noted(self):
        """Returns the names under which a run counts its format and columns."""
        columns = (("used", self.used), ("passed", self.passed), ("left out", self.left_out))
        return [f"format {self.shape}", *(f"column {what} {key}" for what, keys in columns for key in keys)]


def parse_line(line):
    """Parses a line's object."""
    try:
        text = line.decode("utf-8")
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise Rejected(MALFORMED, f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
        if is_cut(error):
            why = f"ends in the middle of a JSON value, at column {len(text.rstrip()) + 1}; the file may be cut off"
        raise Rejected(MALFORMED, f"not JSON: {why}") from None
    except (RecursionError, ValueError) as error:
        raise Rejected(MALFORMED, f"not JSON that can be read: {type(error).__name__}") from None
    if not isinstance(record, dict):
        raise Rejected(MALFORMED, f"is {type_name(record)}, not an object")
    return record


def is_cut(error):
    """Tells whether JSON is valid as far as it goes, so that only its end is missing."""
    text = error.doc.rstrip()
    return error.pos >= len(text) or error.msg.startswith("Unterminated") or "escape" in error.msg and error.pos + 6 > len(text)


def parse_text(document):
    try:
        return {"text": document.decode("utf-8")}
    except UnicodeDecodeError as error:
        raise Rejected(MALFORMED, f"not UTF-8 at byte {error.start} of the document; convert it, as with iconv -t UTF-8") from None


def want_json(value):
    """Returns a value of a table with an Odd text for each type that JSON lacks, and maps as objects."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {key: want_json(item) for key, item in value.items()}
    if isinstance(value, list):
        is_map = value and all(type(item) is tuple and len(item) == 2 for item in value)
        return {str(want_json(key)): want_json(item) for key, item in value} if is_map else [*map(want_json, value)]
    text = Odd(f"PT{value.total_seconds()}S" if hasattr(value, "total_seconds") else value.isoformat() if hasattr(value, "isoformat") else
               BINARY if isinstance(value, bytes) else value)
    text.kind = type_name(value)
    return text


def odd(value, kind=""):
    """Returns the first Odd text, of one kind or any, in a value; or None."""
    with contextlib.suppress(RecursionError):  # JSON has no Odd values
        return next((leaf for _, leaf in layout.leaves(value) if isinstance(leaf, Odd) and kind in leaf.kind), None)


def type_name(value):
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number", type(None): "null",
            bytes: BINARY, tuple: "a map"}.get(type(value), getattr(value, "kind", f"a {type(value).__name__}"))


def want(value, kind, what):
    if not isinstance(value, kind) or isinstance(value, Odd):
        hint = "; cast it" if odd(value) else ", nor JSON of one; json.dumps(list) writes that" * (kind is list and isinstance(value, str))
        raise Rejected(WRONG_TYPE, f"{what} is {type_name(value)}, not {type_name(kind())}{hint}")
    return value


def want_finite(values, what):
    """Checks that all values are numbers that fit a float32."""
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 3.4e38:
            shown = value if isinstance(value, float) else type_name(value)
            raise Rejected(WRONG_TYPE, f"{what}[{i}] is {shown}, not a finite number")


def template_arguments(value, what):
    """Checks variables for a template: no name may be one that every template gets."""
    taken = next((name for name in TAKEN if name in want(value, dict, what)), None)
    if taken:
        raise Rejected(WRONG_TYPE, f"{what} has {taken}, a name that templates use already; rename it")
    return value


def masked(message):
    return any(key in message and not message[key] for key in MASKS)


# ---- which format -------------------------------------------------------------------------------------------------------------
def detect(record):
    """Returns the name of the only format whose columns the object has."""
    there = lambda key: record.get(key) is not None
    row = [key for key in SHAPING if there(key)]
    satisfied = [name for name, needed, _ in SHAPES if all(map(there, needed))]
    if there("label") and (as_label(record["label"]) is not None or "completion" in row) and {*row} & {*TALKS} - {"text"}:
        row.append("label")
    if {"prompt", "completions"} <= set(row) and there("labels"):
        raise Rejected(UNKNOWN_FORMAT, "has prompt, completions and labels, which is stepwise supervision; no objective here trains on that")
    picture = next((key for key in record if meaning(key) == "images" and record[key]), None)
    if picture:
        raise Rejected(UNKNOWN_FORMAT, f"has {picture}: only text is trained on here; drop the column, or --format takes the row without")
    if there("ids") and there("advantages"):
        row = ["ids", *row]
    clash = next(((a, b) for a in row for b in row if a != b and not any({a, b} <= {*needed, *more} for _, needed, more in SHAPES)), None)
    if clash:
        advice = f"; choose with --format {' or '.join(dict.fromkeys(satisfied))}" if satisfied else ""
        advice += "; unpaired preference, for KTO, has prompt, completion, label" if "label" in clash else ""
        raise Rejected(CLASH, f"has {clash[0]} and {clash[1]}, which no format has together{advice}")
    if {"messages", "chosen"} <= set(row) and is_answer(record["messages"], -1):
        raise Rejected(CLASH, "has messages and chosen, and messages end with an answer, so they are no prompt; --format preference ignores them")
    for name, needed, more in SHAPES:
        if name in satisfied and set(row) <= {*needed, *more}:
            return name
    for name, needed, more in SHAPES:  # the first format that the object has some columns of, but not all
        if row and set(row) <= {*needed, *more}:
            raise Rejected(UNKNOWN_FORMAT, f"has {' and '.join(row)}, and no {next(key for key in needed if key not in row)}; {name} has "
                                           f"{', '.join(needed)} (data/README.md)")
    keys = ", ".join(map(str, list(record)[:8])) or "none"
    raise Rejected(UNKNOWN_FORMAT, f"keys are {keys[:60]}; --columns prompt=KEY,completion=KEY says which are ours: text, messages, chosen, "
                                   "... (data/README.md)")


# ---- other layouts ------------------------------------------------------------------------------------------------------------
def renamed(record, columns):
    """Returns the row with the names of --columns: {our name: its own}."""
    for column, own in columns.items():
        if not {column, own} & record.keys():
            raise Rejected(UNKNOWN_FORMAT, f"has no column {own}, named by --columns; it has {', '.join(map(str, record))}")
    rest = {key: value for key, value in record.items() if key not in columns.values()}
    return rest | {column: record[own] for column, own in columns.items() if own in record}


def value_of(text, readers=(json.loads, ast.literal_eval)):
    """Returns the list or object that a text holds, in JSON or Python's form; else the value itself."""
    for read in readers if isinstance(text, str) else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            if isinstance(value := read(text), (list, dict)):
                return value
    return text


def as_label(value):
    """Returns True or False for the usual spellings of labels; else None."""
    if isinstance(value, str):
        value = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}.get(value.strip().lower())
    return bool(value) if value in (True, False) else None


def is_answer(messages, at):
    """Tells whether the first message (at 0) or the last (-1) is the assistant's."""
    message = messages[at] if isinstance(messages, list) and messages else None
    return isinstance(message, dict) and SHAREGPT.get(str(message.get("role", message.get("from")))) in ("assistant", CALLS)


def calls_of(value, name):
    """Parses ShareGPT's tool calls: JSON of one or several objects with name and arguments."""
    found = value_of(value) or [None]
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found):
        raise Rejected(WRONG_TYPE, f"{name} is a tool call, but not JSON of an object with name and arguments")
    return [{"type": "function", "function": {"name": call["name"], "arguments": {}, **call}} for call in found]


def fits(column, value):
    """Tells whether the value has a type that fits the column's name."""
    if column == "reasoning_content":  # settings are not reasoning
        return type(value) is str and value.strip().lower() not in ("", *"on off true false yes no none low medium high".split())
    return column not in ("chosen", "rejected", "either") or isinstance(value, (str, list, dict))


def ours(record, name):
    """Returns a row of another layout with our names, and {its own column: our column}."""
    row, own = dict(record), {}
    there = lambda *keys: any(row.get(key) is not None for key in keys)
    meant = [(key, meaning(key)) for key in filter(there, record) if meaning(key) and fits(meaning(key), record[key])]
    named = {column: [key for key, kind in meant if kind == column] for column in MEANINGS}
    others = lambda column: [key for key in named[column] if key != column]
    if name == "auto" and there("text") and others("prompt") and others("completion"):
        raise Rejected(CLASH, "has text, and a question with an answer; choose with --format text or completion")
    for column in list(MEANINGS)[:-5]:
        found = others(column) or named["input"] * (column == "prompt" and not (name == "auto" and there(*SHAPING, "ids")))
        reference = column == "completion" and (  # the answer of a prompt alone
            name == "prompts" or [*map(str.lower, found)] == ["answer"] and name == "auto" and "prompt" not in own.values())
        half = column in ("chosen", "rejected") and not (named["chosen"] and named["rejected"])
        if not found or there(column) or reference or half or name == "auto" and there(*BESIDE.get(column, ())):
            continue
        if len(found) > 1:
            raise Rejected(CLASH, f"has {' and '.join(found)}, each of which could be the {column}; choose with --columns {column}={found[0]}")
        own[found[0]], row[column] = column, row.pop(found[0])
    if name == "auto" and len(named["either"]) > 1 and not there("chosen"):
        raise Rejected(CLASH, "has {0} and {1}; --columns chosen={0},rejected={1} or the reverse; or --format prompts, say".format(*named["either"]))
    behind = [*filter(there, (*named["input"], *named["context"]))] if "instruction" in map(str.lower, own) else []
    if behind:
        texts = [want(row["prompt"], str, "instruction"), *(want(row.pop(key), str, key) for key in behind)]
        row["prompt"], own = "\n".join(text for text in texts if text.strip()), {**own, **dict.fromkeys(behind, "prompt")}
    return row, own


def spoken(result, row, own, reads, reader):
    """Puts system, history and reasoning into the messages. Makes messages of a prompt of another layout, or without a template a text."""
    system, foreign, used = want(row.get("system") or "", str, "system"), {"prompt", "completion"} & {*own.values()}, set()
    system = system if system.strip() else ""
    single = len(result.documents) == 1 and result.kind != shards.PROMPTS and REASONING_FIELD in (reads or ())
    thought = row.get("reasoning_content") if single and fits("reasoning_content", row.get("reasoning_content")) else None
    asked = row.get("history") if isinstance(row.get("prompt"), str) and not result.implicit else None
    turns = [[{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}] if isinstance(turn, list) and len(turn) == 2
             else [turn] for turn in want(asked or [], list, "history")]
    history = reader.message_list(sum(turns, []), "history") if turns else []
    if history and history[-1]["role"] != "assistant":
        raise Rejected(WRONG_TYPE, "history ends with a question, not with its answer")
    for source in result.documents:
        if isinstance(source.prompt, str) and (foreign or system or history or thought):
            if reads is None:
                texts = [*[system] * bool(system), *(message["content"] for message in history), source.prompt]
                source.prompt = "\n".join(texts) + "\n" * bool(foreign)
            else:
                source.prompt = [{"role": "user", "content": source.prompt}]
                source.body = source.body if result.kind == shards.PROMPTS else [{"role": "assistant", "content": source.body}]
        answers = [message for message in source.body if message["role"] == "assistant"] if thought and isinstance(source.body, list) else []
        if answers and answers == source.body[-1:] and "</think>" not in answers[0]["content"] and not any(map(answers[0].get, REASONING)):
            answers[0]["reasoning_content"], used = thought, {"reasoning_content"}
        if history and isinstance(source.prompt, list):
            source.prompt = history + source.prompt
            if result.kind == shards.DOCUMENTS:  # answers in the history are trained on, too
                source.prompt, source.body = [], source.prompt + source.body
        messages, first = source.prompt or source.body, {"role": "system", "content": system}
        if system and isinstance(messages, list) and messages[0] != first:
            if messages[0]["role"] == "system":
                raise Rejected(CLASH, "column system differs from the system message; leave one of them out")
            messages.insert(0, first)
    return used | {key for key, value in (("system", system), ("history", history)) if value}


# ---- a record --------------------------------------------------------------------------------------------------------------------
def describe(record, result, used, own):
    """Describes the result: the format by its usual name, and the columns used, passed on and left out."""
    name, talks = result.format, isinstance(result.documents[0].prompt, list)
    result.shape = FIELD_NAMES[name] if name == "advantages" else f"{'conversational' if talks else 'standard'} {FIELD_NAMES[name]}"
    if name == "preference" or len(result.documents) == 2 and name == "unpaired":
        result.shape += f"{' of pairs' * (name == 'unpaired')} with {'implicit' if result.implicit else 'explicit'} prompt"
    for key in [key for key, value in record.items() if value is not None]:
        if own.get(key, key) in used:
            result.used.append(key)
        if name == "prompts" and key != "prompt" and not (key == "completion" and key in used) and not odd(record[key], BINARY):
            result.passed.append(key)
        elif own.get(key, key) not in used and not (meaning(key) and str(record[key]).strip() in ("", "[]", "{}")):
            result.left_out.append(key)


def refuse_lost(record, result, own, named, reads):
    """Refuses a row that leaves out a column with a meaning, except for meanings `named` by --columns. A column that repeats the sample is used."""
    talks, ends = isinstance(result.documents[0].prompt, list), [source.body for source in result.documents]
    prompt, messages = (next((key for key in own if own[key] == column), column) for column in ("prompt", "messages"))
    for key in list(result.left_out):
        column, value, variable = meaning(key), record[key], talks and key in reads
        number = isinstance(value, (int, float)) and column in ("chosen", "rejected", *["completion"] * (result.format == "text"))
        if not variable and (number or column in (None, "label", "images", "either", *named)):
            continue
        parts = [end[-1:] if isinstance(end, list) else end for end in ends] if column == "completion" else [*map(vars, result.documents)]
        texts, said = ([text.strip() for _, text in layout.leaves(part)] for part in (value if fits("either", value) else str(value), parts))
        asks = column == "completion" and result.format == "messages" and not is_answer(ends[0], -1)
        other = variable or asks or column in ("tools", "chat_template_kwargs") or not fits(column, value)
        if texts and not other and all(text in (said if len(text) < 8 else "\n".join(said)) for text in texts):  # short texts repeat by chance
            result.used.append(result.left_out.pop(result.left_out.index(key)))
            continue
        instruction = f"instruction={prompt}" + ",output=completion" * ("completion" in result.used)
        takes = (f"prompt={messages},completion={key}" if asks else f"{key}={key}" if isinstance(value, Unread) else
                 f"{column}={key}" if column in result.used else instruction if isinstance(record.get(prompt), str) and (
                     column in ("input", "context") or column in ("tools", "chat_template_kwargs") and not talks) else "")
        raise Rejected(CLASH, f"has {key}, for which this format or chat template has no clear place; "
                       + f"--columns {takes} takes it; " * bool(takes) + f"--format {result.format} leaves it out"
                       + f"; --format prompts --columns prompt={messages}{f',answer={key}' * (key != 'answer')} makes prompts" * asks)


def understand(record, name="auto", more_roles=(), columns=None, reads=frozenset(("tools", REASONING_FIELD))):
    """Returns the Record of an object. `columns`: {our name: its own}. `reads`: variables of the template, None without one; or REASONING_FIELD."""
    record = renamed(record, columns) if columns else record
    for key in [key for key, value in record.items() if isinstance(value, str)]:
        column, part = meaning(key) or key, record[key][:2] == "[{" and (key in ("prompt", "completion") or meaning(key) in ("chosen", "rejected"))
        value = value_of(record[key]) if column in LISTS or part else ""
        if column in LISTS or all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in value or [""]):
            record = {**record, key: value}
    row, own = ours(record, name)
    name, asked = detect(row) if name == "auto" else name, name
    if asked == "auto" and name == "prompts" and "prompt" in own.values():
        raise Rejected(UNKNOWN_FORMAT, f"has {next(iter(own))}, and no known answer; --columns completion=KEY names it; or --format prompts")
    reader = Reader(row, (*ROLES, *more_roles))
    result = Record(*getattr(reader, name)(), name)
    result.implicit, result.told = reader.implicit, reader.told
    used = reader.used | (spoken(result, row, own, reads, reader) if result.documents[0].prompt is not None else set())
    if isinstance(result.documents[0].prompt, list):
        result.template_arguments = {  # CSV has only texts
            key: {"true": True, "false": False}.get(str(row[key]).lower(), row[key])
            for key in row.keys() & (reads or set()) - used - {*TAKEN} if type(row[key]) not in (Unread, type(None)) and not odd(row[key], BINARY)}
        used |= {"chat_template_kwargs", *result.template_arguments, *["tools"] * (reads is None or "tools" in reads)}
    describe(record, result, used - ({"prompt"} if result.implicit else set()), own)
    if result.kind == shards.PROMPTS:
        talk = {"messages": result.documents[0].prompt} if isinstance(result.documents[0].prompt, list) else {}
        result.columns = other_columns(talk | {key: record[key] for key in result.passed})
    else:
        result.unused = [key for key in result.left_out if key in NOTED or meaning(key)]
    if row.get("tools"):
        tools = [want(value_of(tool), dict, "a tool of tools") for tool in want(value_of(row["tools"]), list, "tools")]
        bare = lambda tool: (reader.speakers or "tools" in own.values()) and "name" in tool and "function" not in tool and "type" not in tool
        result.tools = [{"type": "function", "function": tool} if bare(tool) else tool for tool in tools] or None
    if asked == "auto":
        refuse_lost(record, result, own, [found for key in columns or () for found in (meaning(key), "input", "context")], reads or ())
    result.rounds = tuple(value_of(record.get(key)) for key in ("segments", "summaries"))
    if row.get("chat_template_kwargs") is not None:
        result.template_arguments |= template_arguments(row["chat_template_kwargs"], "chat_template_kwargs")
    return result


def other_columns(columns):
    """Returns the other columns of a prompt's row for reward commands, as bytes of a JSON object."""
    if any(isinstance(value, Unread) for value in columns.values()):
        raise Rejected(UNKNOWN_FORMAT, "is a prompt alone in a file with a column completion, which is not fully read; --format prompts "
                                       "reads all")
    wrong = next((key for key in OURS if key in columns), None)
    if wrong:
        raise Rejected(CLASH, f"column {wrong} has a name with another meaning for reward commands; --columns NAME={wrong} renames it")
    try:
        return json.dumps(columns, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Rejected(MALFORMED, "holds half of a surrogate pair, which is not text") from None
    except ValueError:
        raise Rejected(WRONG_TYPE, "a column holds a number that is not finite, which JSON lacks; make it null or a text") from None


class Reader:
    def __init__(self, record, roles):
        self.record, self.roles, self.implicit, self.told = record, roles, False, []
        self.used, self.speakers = set(), False  # the columns read; whether messages are ShareGPT's, with a key "from"

    def get(self, key, kind=None):
        value = self.maybe(key)
        if value is None:
            raise Rejected(UNKNOWN_FORMAT, f"has no {key}")
        return want(value, kind, key) if kind else value

    def maybe(self, key):
        self.used.add(key)
        return self.record.get(key)

    # -- formats: (kind, documents)
    def text(self):
        text = self.get("text", str)
        if not text.strip():
            raise Rejected(EMPTY, "text is empty")
        return shards.DOCUMENTS, [Source(text)]

    def messages(self):
        return shards.DOCUMENTS, [Source(self.message_list(self.get("messages"), "messages"), prompt=[])]

    def completion(self):
        return shards.DOCUMENTS, [self.pair(self.get("prompt"), self.get("completion"), "completion")]

    def unpaired(self):
        if self.record.get("chosen") is not None and self.record.get("rejected") is not None:  # a pair gives two labelled answers
            _, (chosen, rejected) = self.preference()
            chosen.reward, rejected.reward = 1.0, 0.0
            return shards.LABELS, [chosen, rejected]
        label = as_label(self.get("label"))
        if label is None:
            raise Rejected(WRONG_TYPE, f"label is {json.dumps(self.get('label'))[:40]}, neither true nor false; or --format completion")
        if self.record.get("prompt") is None and self.record.get("messages") is not None:
            messages = self.message_list(self.get("messages"), "messages")
            if messages[-1]["role"] != "assistant":
                raise Rejected(WRONG_TYPE, f"messages end with the {messages[-1]['role']}, not with the assistant's answer, which is labelled")
            return shards.LABELS, [Source(messages[-1:], messages[:-1], float(label))]
        return shards.LABELS, [self.pair(self.get("prompt"), self.get("completion"), "completion", float(label))]

    def preference(self):
        chosen, rejected = ([part] if isinstance(part, dict) else part for part in (self.get("chosen"), self.get("rejected")))
        prompt = self.maybe("prompt")
        if isinstance(prompt, str) and is_answer(chosen, 0) and is_answer(rejected, 0):
            prompt = [{"role": "user", "content": prompt}]
        if prompt is None and not is_answer(self.record.get("messages"), -1):
            prompt = self.maybe("messages")
        if isinstance(prompt, list) and all(isinstance(part, list) and part[:len(prompt)] == prompt for part in (chosen, rejected)):
            chosen, rejected = chosen[len(prompt):], rejected[len(prompt):]
        talks = isinstance(chosen, list) and isinstance(rejected, list)
        if prompt is None and not talks:
            chosen, rejected = want(chosen, str, "chosen"), want(rejected, str, "rejected")
        if prompt is None or talks and isinstance(prompt, str):
            prompt, chosen, rejected = self.shared_prompt(prompt, chosen, rejected)
        return shards.PAIRS, [self.pair(prompt, chosen, "chosen"), self.pair(prompt, rejected, "rejected")]

    def groups(self):
        prompt, completions, rewards = self.get("prompt"), self.get("completions", list), self.get("rewards", list)
        if not completions:
            raise Rejected(EMPTY, "completions is empty")
        if len(completions) != len(rewards):
            raise Rejected(WRONG_TYPE, f"{len(completions)} completions, {len(rewards)} rewards")
        if len(completions) == 1:
            raise Rejected(WRONG_TYPE, "a group needs at least two completions, to compare their rewards")
        want_finite(rewards, "rewards")
        return shards.GROUPS, [self.pair(prompt, completion, f"completions[{i}]", float(reward))
                               for i, (completion, reward) in enumerate(zip(completions, rewards))]

    def prompts(self):
        prompt, answer = self.get("prompt"), self.maybe("answer")
        if answer is None:
            answer = self.maybe("completion")
        if answer is not None and not want(answer, str, "answer"):
            self.told.append("the answer is empty, so there is no reference")
        if isinstance(prompt, list):
            return shards.PROMPTS, [Source(answer, self.message_list(prompt, "prompt"))]
        if not want(prompt, str, "prompt"):
            raise Rejected(EMPTY, "prompt is empty")
        return shards.PROMPTS, [Source(answer, prompt)]

    def advantages(self):
        ids, train, advantages = (self.get(key, list) for key in ("ids", "train", "advantages"))
        if not len(ids) == len(train) == len(advantages):
            raise Rejected(WRONG_TYPE, f"{len(ids)} ids, {len(train)} of train, {len(advantages)} advantages; each token has one of each")
        for name, values, right, what in (("ids", ids, lambda value: type(value) is int and 0 <= value < 1 << 31, "a token's number"),
                                          ("train", train, lambda value: value in (0, 1), "0 or 1")):
            wrong = next((i for i, value in enumerate(values) if not right(value)), None)
            if wrong is not None:
                raise Rejected(WRONG_TYPE, f"{name}[{wrong}] is {json.dumps(values[wrong])[:20]}, not {what}")
        want_finite(advantages, "advantages")
        return shards.ADVANTAGES, [Source((ids, train, advantages))]

    # -- their parts
    def shared_prompt(self, prompt, chosen, rejected):
        """Splits two whole texts or conversations: their common beginning is the prompt, without a space at its end. If they are
        conversations, a text `prompt` must occur in the common beginning."""
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        if shared == min(len(chosen), len(rejected)):
            raise Rejected(EMPTY, "chosen and rejected do not differ, or one only continues the other")
        text = isinstance(chosen, str)
        shared -= text and chosen[:shared].endswith(" ")
        if not shared:
            raise Rejected(UNKNOWN_FORMAT, "has no prompt, and chosen and rejected begin differently"
                                           + '; --columns prompt=KEY names it, "prompt": "" says there is none' * text)
        if isinstance(prompt, str) and all(prompt not in (m.get("content"), m.get("value")) for m in chosen[:shared] if isinstance(m, dict)):
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
        for key in [key for key, value in message.items() if type(value) is not str and odd(value, BINARY * (key not in SAID))]:
            if key in SAID:
                raise Rejected(WRONG_TYPE, f"{name}'s {key} holds {type_name(odd(message[key]))}, which JSON lacks; cast it")
            self.told.append(f"messages[].{key} is binary and left out")
            del message[key]
        if "role" not in message and "from" in message:
            speaker = message.pop("from")
            if not isinstance(speaker, str) or speaker not in SHAREGPT:
                raise Rejected(UNKNOWN_ROLE, f"{name} is from {json.dumps(speaker)[:40]}; known are {', '.join(SHAREGPT)}")
            if "value" not in message:
                raise Rejected(WRONG_TYPE, f"{name} has no value")
            value, role, self.speakers = message.pop("value"), SHAREGPT[speaker], True
            says = {"role": "assistant", "tool_calls": calls_of(value, name)} if role == CALLS else {"role": role, "content": value}
            message = {**says, **message}
        role = message.get("role")
        if role not in self.roles:
            raise Rejected(UNKNOWN_ROLE, f"{name} has role {json.dumps(role)[:40]}; known are {', '.join(self.roles)}, more by --roles")
        for key in MASKS:
            if message.get(key, 0) not in (0, 1):
                raise Rejected(WRONG_TYPE, f"{name} has {key} {json.dumps(message[key])[:20]}; a turn counts (1, true) or does not (0, false)")
        if message.get("function_call") and not message.get("tool_calls"):  # the form of OpenAI's API before it had tools
            message["tool_calls"] = [{"type": "function", "function": value_of(message.pop("function_call"))}]
            self.told.append("function_call became tool_calls")
        if message.get("tool_calls"):
            calls = want(value_of(message["tool_calls"]), list, f"{name}'s tool_calls")
            message["tool_calls"] = [self.call(call, name) for call in calls]
        if "content" not in message:
            if not message.get("tool_calls"):
                raise Rejected(WRONG_TYPE, f"{name} has neither content nor tool_calls")
            message["content"] = ""
        message["content"] = self.content(message["content"], name)
        return message

    def call(self, call, name):
        """Returns a tool call with its arguments as an object. OpenAI's API has the arguments as text, which templates would encode again."""
        function = want(want(call, dict, f"{name}'s tool call").get("function") or call, dict, f"{name}'s function")
        given = function.get("arguments")
        if isinstance(given, dict):
            return call
        arguments = value_of(given or "{}", (json.loads,))
        if not isinstance(arguments, dict):
            raise Rejected(WRONG_TYPE, f"{name} calls a tool with arguments that are not an object: {json.dumps(given)[:40]}")
        self.told += ["tool calls have their arguments as a text, which was parsed"] * isinstance(given, str)
        return {**call, "arguments": arguments} if function is call else {**call, "function": {**function, "arguments": arguments}}

    @staticmethod
    def content(content, name):
        """Returns a text; joins a list of parts that are texts, as templates that read parts do."""
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if len(parts) != len(content) or any(part.get("type", "text") != "text" for part in parts):
                raise Rejected(WRONG_TYPE, f"{name} has parts that are not text")
            return "".join(part["text"] for part in parts)
        return want(content, str, f"{name}'s content")
