"""Finds the chat template in a tokenizer's folder, and renders it exactly as transformers does.

A template is a Jinja program from a model's folder, so it runs in a sandbox that cannot change its arguments. A rendering can also
mark which of its characters lie in {% generation %} blocks. Needs only jinja2.

    load_chat_template(folder)                               -> the template's text, or None
    load_special_tokens(folder)                              -> {"bos_token": "<s>", ...}, variables for templates
    ChatTemplate(text, special).render(messages)             -> text
"""

import datetime
import json
import os
import re
import resource
import signal

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning
MARKS = ("\ufdd0", "\ufdd1")  # noncharacters of Unicode, which texts do not contain


SECONDS, BYTES = 10.0, 4 << 30  # limits of a rendering: processor time (plus a millisecond a message) and memory
KEYS = frozenset(dir(dict))
METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
NUMBERS = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"))


class TemplateFailure(Exception):
    """The template refused these messages, or its rendering cannot be trusted."""


class Endless(Exception):
    """The template cannot be used at all: it does not end, or fills the memory."""


# ---- files of a tokenizer's folder -------------------------------------------------------------------------------------------
def folder_of(path):
    """Returns the folder of a tokenizer, given by its folder or by the tokenizer.json in it."""
    return path if os.path.isdir(path) else os.path.dirname(path) or "."


def hub_snapshot(name):
    """Returns the folder in Hugging Face's cache for a hub name, such as Qwen/Qwen3-0.6B, or None, as llmc/files does."""
    variable = os.environ.get
    home = variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    cache = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    repository = os.path.join(cache, "models--" + name.replace("/", "--"))
    try:
        with open(os.path.join(repository, "refs", "main"), encoding="utf-8") as file:
            folder = os.path.join(repository, "snapshots", file.read(64).strip() or "none")
    except (OSError, UnicodeDecodeError):
        return None
    return folder if os.path.isdir(folder) else None


def tokenizer_name(path):
    """Returns the name of the folder, or of the repository whose snapshot it is."""
    above, name = os.path.split(os.path.abspath(path))
    return os.path.basename(os.path.dirname(above)).split("--")[-1] if os.path.basename(above) == "snapshots" else name


def read_json(path):
    """Returns the object in a file; {} if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return found


def write_whole(path, content):
    """Writes a file, complete or not at all."""
    try:
        with open(path + ".tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    finally:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")


def load_chat_template(path, file=None):
    """Returns the template of a file; or of chat_template.jinja, else tokenizer_config.json's chat_template: a text, or a list of named
    texts, of which `default` is taken. None if there is no template."""
    folder = folder_of(path)
    alone = file or os.path.join(folder, "chat_template.jinja")
    if file or os.path.exists(alone):
        with open(alone, encoding="utf-8") as file:
            return file.read()
    name = os.path.join(folder, "tokenizer_config.json")
    template = read_json(name).get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError):
            raise ValueError(f"{name}: chat_template is a list, but not of named templates") from None
    if isinstance(template, dict):
        if "default" not in template:
            raise ValueError(f"{name}: has chat templates {', '.join(sorted(template))}, and none is `default`; "
                             "give --chat-template FILE")
        template = template["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{name}: chat_template is neither a text nor a list of named ones")
    return template


def load_special_tokens(path):
    """Returns the texts of the special tokens by name. special_tokens_map.json counts only if tokenizer_config.json has no
    added_tokens_decoder, as in transformers."""
    folder = folder_of(path)
    config = read_json(os.path.join(folder, "tokenizer_config.json"))
    if "added_tokens_decoder" not in config:
        config = {**config, **read_json(os.path.join(folder, "special_tokens_map.json"))}
    special = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            special[name] = token
    return special


# ---- the environment templates run in ---------------------------------------------------------------------------------------
class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: encloses the model's text. The text is kept; on request it is put between MARKS."""

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(mark_generation=False)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def _block(self, caller):
        text = caller()
        return MARKS[0] + text + MARKS[1] if self.environment.mark_generation else text


class Namespace(jinja2.utils.Namespace):
    """namespace() for templates, without names that begin with an underscore."""

    def __init__(*arguments, **named):  # so that an attribute may be named `self`
        self, *rest = arguments
        attributes = dict(*rest, **named)
        for name in attributes:
            Namespace._allow(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace._allow(name)
        super().__setitem__(name, value)

    @staticmethod
    def _allow(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


class Late(BaseException):
    """The time is over. A BaseException, which templates' code does not catch."""


def late(*_):
    raise Late


def taken_bytes():
    """Returns the address space in use by this process; 0: unknown."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 32).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)


def limited(function, seconds):
    """Returns the function's result; raises Endless if it takes longer, or BYTES more memory than the process has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds + 1)  # repeats, because the first exception may be raised in code that ignores it
        if taken := taken_bytes():
            most = taken + BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
        return function()
    except (Late, MemoryError) as error:
        what = f"did not end within {seconds:.0f} s" if isinstance(error, Late) else f"takes more than {BYTES >> 30} GiB"
        raise Endless(f"the chat template {what}; give another --chat-template") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with faster attribute look-up and bounded numbers."""

    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj, attribute):
        kind = type(obj)
        if kind is dict and attribute not in KEYS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in METHODS or kind is jinja2.runtime.LoopContext and attribute in NUMBERS
                or kind is Namespace and attribute[0] != "_" and hasattr(obj, attribute)):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context, operator, left, right):
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise OverflowError("a number of more than 4096 bits")
        return super().call_binop(context, operator, left, right)


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Filter tojson, which does not escape <, > and & for HTML, unlike Jinja's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def with_reasoning(message):
    """Gives a message's reasoning under both common names, as templates read either."""
    for name in REASONING:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


class ChatTemplate:
    """A compiled template with its special tokens. `now` is the time for strftime_now: the same for a whole run, so that the run can be
    repeated."""

    def __init__(self, text, special=None, now=None):
        self.text, self.content = text, text.encode("utf-8", "replace")
        self.special = dict(special or {})
        self.has_generation = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        self.tells_time = "strftime_now" in text
        now = now or datetime.datetime.now()
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=refuse, strftime_now=now.strftime, namespace=Namespace)
        self.environment = environment
        try:
            self.compiled = limited(lambda: environment.from_string(text), SECONDS)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except Endless as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            raise ValueError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from None

    def render(self, messages, add_generation_prompt=False, tools=None, marked=False, **more):
        """Renders messages to text. Keys that are None are dropped."""
        messages = [with_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages]
        self.environment.mark_generation = marked
        try:
            return limited(lambda: self.compiled.render(messages=messages, tools=tools, documents=None,
                                                        add_generation_prompt=add_generation_prompt, **{**self.special, **more}),
                           SECONDS + len(messages) / 1000)
        except Endless:
            raise
        except jinja2.exceptions.TemplateError as error:
            raise TemplateFailure(str(error) or type(error).__name__) from None
        except RecursionError:
            raise TemplateFailure("the template recurses without end") from None
        except Exception as error:  # a template is a program: it may divide by zero, for example
            raise TemplateFailure(f"{type(error).__name__}: {error}") from None
        finally:
            self.environment.mark_generation = False

    def render_generation(self, messages, tools=None, **more):
        """Returns the text, and [begin, end) of every stretch made by {% generation %} blocks."""
        text = self.render(messages, tools=tools, **more)
        if any(mark in text for mark in MARKS):
            raise TemplateFailure("the text holds U+FDD0 or U+FDD1, which mark {% generation %} blocks here")
        marked = self.render(messages, tools=tools, marked=True, **more)
        marks = list(re.finditer("[" + "".join(MARKS) + "]", marked))
        if marked.translate({ord(mark): None for mark in MARKS}) != text or len(marks) % 2:
            raise TemplateFailure("the template changes the text of its {% generation %} blocks")
        if [found.group() for found in marks] != [*MARKS] * (len(marks) // 2):
            raise TemplateFailure("{% generation %} blocks are nested")
        edges = [found.start() - i for i, found in enumerate(marks)]
        return text, list(zip(edges[::2], edges[1::2]))
