"""What the contenders written in PyTorch share: arguments, tokens, timed passes, memory, gradients, one JSON object per
length.

A contender calls `run(name, prepare)`. prepare(options) makes the model once and returns a Setup, whose `one_pass` does
forward, loss and backward of one length; several lengths (ascending) share the process, because loading a large model
takes longer than a pass. Gradients are kept allocated and zeroed between passes, outside of the time, as a training
step has them.
"""

import argparse
import array
import fnmatch
import gc
import json
import struct
import sys
import time
from dataclasses import dataclass
from typing import Callable

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARDS = {20240520: "H", 20240801: "I"}  # llm.c's magic numbers, and the array type of their ids


@dataclass
class Setup:
    model: torch.nn.Module
    one_pass: (
        Callable  # (inputs, targets), both int64 [B, T] -> mean loss over B x T targets; gradients are added to .grad
    )
    before_length: Callable = lambda T: None  # chooses what depends on the length; its memory and time do not count
    attention: Callable = lambda: "unknown"  # what computed attention, after a pass
    versions: dict = None
    note: str = None


def parse_options(name):
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--tokens", required=True, help="shard in llm.c's format")
    parser.add_argument(
        "--seq-len", required=True, type=lambda text: sorted(int(T) for T in text.split(",")), help="T[,T...]"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--chunk", help="N, or T/N of the length")
    parser.add_argument("--logits-chunk", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory-limit", type=int, help="bytes that the allocator may take (cuda)")
    parser.add_argument("--grads-out", help="safetensors file for gradients of the first length")
    parser.add_argument("--grads-of", default="*", help="whose: names or patterns, separated by commas")
    parser.add_argument("--loss", choices=("plain", "chunked"), default="plain")
    parser.add_argument("--checkout", help="folder of the code that is compared, where it is no package")
    return parser.parse_args()


def read_tokens(path, count, device):
    """The first `count` ids as int64."""
    with open(path, "rb") as file:
        magic, _version, there = struct.unpack("<3i", file.read(12))
        if magic not in SHARDS:
            raise SystemExit(f"{path}: begins with {magic}, so it is no shard of llm.c")
        if there < count:
            raise SystemExit(f"{path}: holds {there} tokens, {count} are needed")
        ids = array.array(SHARDS[magic])
        file.seek(1024)
        ids.fromfile(file, count)
    return torch.tensor(ids.tolist(), dtype=torch.int64, device=device)


def chunk_tokens(text, T):
    return -(-T // int(text[2:])) if text.startswith("T/") else int(text)


# ---- memory --------------------------------------------------------------------------------------------------------
def process_bytes(field):
    """VmRSS or VmHWM of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def out_of_memory(error):
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch's allocator on the CPU


def peak_of(options, resident_at_start):
    if options.device == "cpu":
        return {"peak_bytes": process_bytes("VmHWM") - resident_at_start, "peak_of": "process"}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_of": "allocator",
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


# ---- passes --------------------------------------------------------------------------------------------------------
def synchronize(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


def zero_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def gradient_norm(model):
    """Summed in double, a piece at a time: PyTorch's norm of a large fp32 tensor is off by 1e-4 on a CPU."""
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += sum(piece.double().square().sum().item() for piece in parameter.grad.flatten().split(1 << 24))
    return squares**0.5


def timed_passes(setup, options, T):
    ids = read_tokens(options.tokens, options.batch * T + 1, options.device)
    inputs, targets = ids[:-1].view(options.batch, T), ids[1:].view(options.batch, T)
    seconds = []
    for _ in range(options.repeat):
        zero_gradients(setup.model)
        synchronize(options)
        start = time.perf_counter()
        loss = setup.one_pass(inputs, targets)
        synchronize(options)
        seconds.append(time.perf_counter() - start)
    return float(loss), seconds


def write_gradients(model, path, patterns):
    from safetensors.torch import save_file

    patterns = patterns.split(",")
    chosen = {
        name: parameter.grad.float().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    save_file(chosen, path)


def one_length(setup, options, T, resident_at_start, write):
    """The result of length T, or None when memory ran out."""
    try:
        setup.before_length(T)
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loss, seconds = timed_passes(setup, options, T)
        result = {
            "loss": loss,
            "seconds": seconds,
            **peak_of(options, resident_at_start),
            "grad_norm": gradient_norm(setup.model),
        }
        if write:
            write_gradients(setup.model, options.grads_out, options.grads_of)
        return result
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None


def report(name, T, result, **more):
    print(json.dumps({"contender": name, "seq_len": T, **result, **more}), flush=True)


def run(name, prepare):
    """Does the lengths in ascending order. Where one does not fit the longer ones do not either, and are not tried."""
    resident_at_start = process_bytes("VmRSS")
    options = parse_options(name)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"{name}: PyTorch {torch.__version__} sees no GPU; --device cpu, or another Python")
        if options.memory_limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_limit / total))
    try:
        setup = prepare(options)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        setup = None
    for T in options.seq_len:
        result = setup and one_length(
            setup, options, T, resident_at_start, options.grads_out and T == options.seq_len[0]
        )
        if not result:
            setup = None
            gc.collect()
            report(name, T, {}, error="out of memory")
        else:
            report(
                name,
                T,
                result,
                attention=setup.attention(),
                error=None,
                note=setup.note,
                versions={"python": sys.version.split()[0], "torch": torch.__version__, **(setup.versions or {})},
            )
