"""The contenders: how each is started and how its output is read. README.md beside this has the arguments and the
result."""

import json
import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MEMORY_ERROR = "out of memory"
# Messages of our program when memory is short (llmc/run/run.h, llmc/ops/cuda/platform.cuh).
OUR_MEMORY_ERRORS = re.compile("the plan needs|no length fits|refused one allocation|outside of the plan needs memory")
WHAT = {
    "stream": "ours: StreamBP, chunk by chunk; the others are held against it",
    "stream-keep": "ours, keeping each layer's attention output (--keep attention)",
    "stream-any": "ours, attention's gradients added in any order, as the others' are (--deterministic off; on a GPU)",
    "checkpoint": "ours: gradient checkpointing",
    "full": "ours: every activation kept",
    "hf": "transformers with gradient checkpointing, its own loss",
    "hf-chunked": "transformers with gradient checkpointing, the loss a chunk of tokens at a time",
    "paper": "the StreamBP paper's PyTorch code (--paper DIR, --paper-python)",
    "llmc": "llm.c, GPT-2 shapes only (--llmc DIR)",
}
DEFAULT = ("stream", "stream-keep", "checkpoint", "hf", "hf-chunked", "paper", "llmc")


@dataclass
class Case:
    """The work of one process: passes of the same batch at each of the lengths."""

    seq_lens: list
    repeat: int
    grads_out: str = None  # file for gradients of the first length
    grads_of: str = None
    memory_limit: int = None


class Failure(Exception):
    """Returns one line on what went wrong in a contender's process."""


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip() and line[0] != " "]
    return lines[-1][:300] if lines else "it said nothing on stderr"


def chunk_tokens(text, seq_len):
    """Returns --chunk's value as a number: N, or T/N of the length."""
    return -(-seq_len // int(text[2:])) if text.startswith("T/") else int(text)


@dataclass
class Contender:
    name: str
    options: object  # options of compare.py
    chunk: str = None  # N or T/N; None: the contender's default
    several_lengths = False  # one process can measure several lengths
    command_needs = ()  # files that a result depends on

    def missing(self):
        """Returns why it cannot take part, or None."""

    def common(self, case):
        o = self.options
        words = ["--model", o.model_folder, "--tokens", o.tokens_file, "--seq-len", ",".join(map(str, case.seq_lens))]
        words += ["--batch", str(o.batch), "--dtype", o.dtype, "--device", o.device, "--repeat", str(case.repeat)]
        words += self.optional(
            [
                ("--chunk", self.chunk_argument(case)),
                ("--logits-chunk", o.logits_chunk),
                ("--threads", o.threads),
                ("--memory-limit", case.memory_limit),
            ]
        )
        return words + self.optional(
            [("--grads-out", case.grads_out), ("--grads-of", case.grads_out and case.grads_of)]
        )

    @staticmethod
    def optional(pairs):
        return [str(word) for name, value in pairs if value is not None for word in (name, value)]

    def chunk_argument(self, case):
        return self.chunk if self.chunk is None else chunk_tokens(self.chunk, case.seq_lens[0])

    def read(self, stdout):
        """Returns {length or None: result} from the lines of JSON."""
        results = {}
        for line in stdout.splitlines():
            if line.startswith("{"):
                try:
                    result = json.loads(line)
                except json.JSONDecodeError as error:
                    raise Failure(f"a line of its output is no JSON object: {error}")
                results[result.get("seq_len")] = result
        return results

    def memory_error(self, _stderr):
        """Tells whether a failed process reports that memory ran out; contenders report it in their result."""
        return False

    def run(self, case, timeout):
        """Returns {length: result}. A result has the fields in README.md, or only `error`."""
        command = self.command(case)
        environment = dict(
            os.environ, CUDA_DEVICE_ORDER="PCI_BUS_ID", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
        )
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return {T: {"error": f"{command[0]}: {error.strerror}"} for T in case.seq_lens}
        error = None
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its session has only this contender
            stdout, stderr = process.communicate()
            error = f"timed out after {timeout:g} s"
        except BaseException:  # what ends us ends it, too
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode != 0 and error is None:
            error = MEMORY_ERROR if self.memory_error(stderr) else f"failed: {last_line(stderr)}"
            with open(os.path.join(self.options.out, f"{self.name.replace('/', '_')}.stderr"), "w") as file:
                file.write(stderr)  # only its last line is shown
        try:
            found = self.read(stdout)
        except Failure as failure:
            found, error = {}, f"failed: {failure}"
        if error and len(case.seq_lens) == 1:  # with several lengths, results before the error are valid
            found = {}
        if None in found and len(case.seq_lens) == 1:
            found[case.seq_lens[0]] = found.pop(None)
        return {
            T: checked(found[T], case.repeat) if T in found else {"error": error or "failed: no result"}
            for T in case.seq_lens
        }


def checked(result, repeat):
    """Returns the result, or an error that says what is wrong with it."""
    if result.get("error"):
        return result
    numbers = [result.get(key) for key in ("loss", "grad_norm", "peak_bytes")]
    seconds = result.get("seconds")
    if not all(isinstance(n, (int, float)) for n in numbers) or not isinstance(seconds, list) or len(seconds) != repeat:
        return {"error": f"failed: its result lacks loss, grad_norm, peak_bytes or the seconds of {repeat} passes"}
    return result


# ---- ours ----------------------------------------------------------------------------------------------------------
class Ours(Contender):
    def missing(self):
        if self.name.startswith("stream-keep"):
            help_text = subprocess.run([self.options.train, "bp", "--help", "all"], capture_output=True, text=True).stdout
            if not re.search(r"--keep \S*attention", help_text):
                return "this build has no bp --keep attention"

    @property
    def command_needs(self):
        return (self.options.train,)

    @property
    def method(self):
        return self.name.split("@")[0].split("-")[0]

    def run_options(self, case):
        o = self.options
        chunks = (
            [("--chunk", self.chunk_argument(case)), ("--logits-chunk", o.logits_chunk)]
            if self.method == "stream"
            else []
        )
        keep = ["--keep", "attention"] if self.name.startswith("stream-keep") else []
        order = ["--deterministic", "off"] if self.name.startswith("stream-any") else []
        return [
            "--model",
            o.model_folder,
            "--seq-len",
            str(case.seq_lens[0]),
            "--batch",
            str(o.batch),
            "--dtype",
            o.dtype,
            "--json",
            "--quiet",
            "--method",
            self.method,
            *keep,
            *order,
            *self.optional([*chunks, ("--threads", o.threads), ("--memory-limit", case.memory_limit)]),
        ]

    def command(self, case):
        gradients = self.optional([("--grads-out", case.grads_out), ("--grads-of", case.grads_out and case.grads_of)])
        return [
            self.options.train,
            "bp",
            *self.run_options(case),
            "--data",
            self.options.tokens_file,
            "--repeat",
            str(case.repeat),
            *gradients,
        ]

    def memory_error(self, stderr):
        return bool(OUR_MEMORY_ERRORS.search(last_line(stderr)))

    def read(self, stdout):
        results = super().read(stdout)
        for result in results.values():
            result["seconds"] = result.pop("seconds_each", None)
            result["peak_of"] = "process" if self.options.device == "cpu" else "device"
            if result.get("host_bytes"):
                gib = f"{result['host_bytes'] / 2**30:.2f} GiB of host memory, too"
                result["note"] = f"at T = {result['tokens'] // self.options.batch} {gib}"
        return results

    def longest(self, limit):
        """Returns (tokens that fit `limit` bytes by `plan`, None), or (None, why there are none)."""
        case = Case([self.options.seq_lens[0]], 1, memory_limit=limit)
        plan = subprocess.run(
            [self.options.train, "plan", "--for", "bp", *self.run_options(case)], capture_output=True, text=True
        )
        if not plan.stdout:
            return None, f"failed: {last_line(plan.stderr)}"
        longest = json.loads(plan.stdout)["max_seq_len"]
        return (longest, None) if longest else (None, "not even one token fits")


# ---- others --------------------------------------------------------------------------------------------------------
def python_problem(python, device):
    """Returns (why a Python is unsuitable, or None; its version of transformers), without the time to import it."""
    test = [
        "from importlib.metadata import version",
        "version('torch'), version('safetensors')",
        "print(version('transformers'))",
    ]
    if device == "cuda":
        test.append("import torch; assert torch.cuda.is_available(), 'PyTorch sees no GPU'")
    try:
        run = subprocess.run([python, "-c", "\n".join(test)], capture_output=True, text=True)
    except OSError as error:
        return f"its Python: {error.strerror}", None
    return (None, run.stdout.strip()) if run.returncode == 0 else (f"its Python: {last_line(run.stderr)}", None)


@dataclass
class TorchProgram(Contender):
    """A program of this folder, under a Python named by the user."""

    python: str = None
    script: str = None
    more: list = field(default_factory=list)
    several_lengths = True

    @property
    def command_needs(self):
        return (os.path.join(HERE, self.script), os.path.join(HERE, "torch_pass.py"), self.python)

    def chunk_argument(self, _case):
        return self.chunk

    def missing(self):
        return python_problem(self.python, self.options.device)[0]

    def command(self, case):
        return [self.python, os.path.join(HERE, self.script), *self.common(case), *self.more]


class Paper(TorchProgram):
    VERSION = "4.51."

    def missing(self):
        checkout = self.options.paper
        if not checkout:
            return "no --paper DIR, a checkout of https://github.com/Ledzy/StreamBP"
        if not os.path.isfile(os.path.join(checkout, "src", "streambp", "stream_model.py")):
            return "the folder of --paper has no src/streambp/stream_model.py"
        problem, version = python_problem(self.python, self.options.device)
        if problem:
            return problem
        if not version.startswith(self.VERSION):
            return f"its Python has transformers {version}, the paper's code wants {self.VERSION}3 (--paper-python)"
        if self.options.model_type in ("gpt2", "gemma3_text"):
            return f"its StreamModel does not do {self.options.model_type}"


class Command(Contender):
    """A program of the user's, or llm.c's script: it takes these arguments and prints such a result."""

    def __init__(self, name, options, words):
        super().__init__(name, options, options.chunk)
        self.words = words

    @property
    def command_needs(self):
        return tuple(word for word in self.words if os.path.isfile(word))

    def command(self, case):
        return [*self.words, *self.common(case)]


class Llmc(Command):
    def missing(self):
        if self.options.model_type != "gpt2":
            return f"it has GPT-2 shapes only, not {self.options.model_type}"
        if not self.options.llmc:
            return "no --llmc DIR, a checkout of https://github.com/karpathy/llm.c"
        if not os.path.isdir(self.options.llmc):
            return "--llmc names no folder"
        if not os.path.isfile(self.words[0]):
            return f"there is no {os.path.relpath(self.words[0], ROOT)}"


def make(name, options):
    """Returns the contender of that name; `options.commands` are the user's."""
    if name in options.commands:
        return Command(name, options, shlex.split(options.commands[name]))
    if name == "hf":
        return TorchProgram(name, options, None, options.python, "hf.py", ["--loss", "plain"])
    if name == "hf-chunked":
        return TorchProgram(name, options, None, options.python, "hf.py", ["--loss", "chunked"])
    if name == "paper":
        return Paper(
            name,
            options,
            options.chunk,
            options.paper_python or options.python,
            "paper.py",
            ["--checkout", options.paper or ""],
        )
    if name == "llmc":
        return Llmc(
            name, options, [os.path.join(HERE, "llmc_bp.sh"), "--train", options.train, "--llmc", options.llmc or ""]
        )
    return Ours(name, options, options.chunk)


def sweep(options):
    """Returns our contenders again for each of --chunks: stream@512, stream-keep@512, ..."""
    return [
        Ours(f"{name}@{chunk}", options, chunk)
        for name in options.contenders
        if name in ("stream", "stream-keep")
        for chunk in options.chunks
    ]
