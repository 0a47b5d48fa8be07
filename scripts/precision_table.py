"""Prints errors of gradients against a float64 reference, all from files of `./train bp --grads-out` (safetensors, fp32).

    precision_table.py REFERENCE LABEL=FILE...

A label is "DTYPE METHOD" and other words that distinguish it ("bf16 stream 100/64"); the other bf16 files are compared with "bf16
full". Prints relative L2 errors in percent and the conditions; exit status 1 if a condition does not hold. Standard library only.
"""

import array
import json
import math
import struct
import sys

from log_export import end

BIG = 4096  # a tensor of a bf16 run is checked by itself if it has more elements
FP32_BOUND = 1e-5  # largest error of every tensor, against float64
BF16_ALL, BF16_TENSOR = 1.05, 1.2  # stream's error over full's: all parameters together, any big tensor
# Files hold fp32, so two double runs that agree to d = 1e-12 differ only in elements that round to different sides of a tie: in one
# element of 6e-8 / d, by 1e-7. Over all parameters together the error is about 3e-10.
DOUBLE_BOUND = 1e-9


def read(path):
    """Returns {name: array of float}"""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "F32":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, a gradient file holds F32")
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            values = array.array("f")
            values.frombytes(file.read(end - begin))
            if sys.byteorder == "big":
                values.byteswap()
            tensors[name] = values
    return tensors


def relative(pairs):
    """Returns sqrt(sum of the first / sum of the second)."""
    pairs = list(pairs)
    return math.sqrt(math.fsum(a for a, _ in pairs) / math.fsum(b for _, b in pairs))


class Errors:
    """Returns the errors of one file: per tensor, and of groups of tensors."""

    def __init__(self, path, reference):
        tensors = read(path)
        if tensors.keys() != reference.keys():
            raise SystemExit(f"{path}: its tensors are not those of the reference: {sorted(tensors.keys() ^ reference.keys())}")
        squares = {}  # squared norms: of the difference, of the reference
        for name, r in reference.items():
            difference = [a - b for a, b in zip(tensors[name], r)]
            squares[name] = (math.fsum(d * d for d in difference), math.fsum(v * v for v in r))
        self.tensor = {name: relative([pair]) for name, pair in squares.items()}
        self.head = self.tensor["lm_head.weight"]
        self.layers = relative(pair for name, pair in squares.items() if ".layers." in name)
        self.all = relative(squares.values())


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    reference = read(sys.argv[1])
    runs = {label: Errors(path, reference) for label, path in (pair.split("=", 1) for pair in sys.argv[2:])}
    big = [name for name in reference if len(reference[name]) >= BIG]

    print(f"{'':24} {'lm_head':>9} {'layers':>9} {'all':>9} {'worst tensor of >= ' + str(BIG) + ' elements':>9}")
    for label, e in runs.items():
        worst = max(big, key=e.tensor.get)
        values = (100 * e.head, 100 * e.layers, 100 * e.all, 100 * e.tensor[worst])
        print(f"{label:24} " + " ".join(f"{value:9.3g}" for value in values) + f"  {worst}")

    failed = False

    def hold(what, value, bound):
        nonlocal failed
        good = value <= bound  # written so that NaN fails
        failed |= not good
        print(f"  {'holds' if good else 'FAILS'}  {what}: {value:.3g}, at most {bound:g}")

    base = runs["bf16 full"]
    for label, e in runs.items():
        dtype = label.split()[0]
        if dtype == "fp32":
            hold(f"{label}, worst tensor of any size", max(e.tensor.values()), FP32_BOUND)
        elif dtype == "double":
            hold(f"{label}, all, as far as files of fp32 show it", e.all, DOUBLE_BOUND)
        elif e is not base:
            hold(f"{label} over bf16 full, all", e.all / base.all, BF16_ALL)
            hold(f"{label} over bf16 full, worst big tensor", max(e.tensor[n] / base.tensor[n] for n in big), BF16_TENSOR)
    return 1 if failed else 0


if __name__ == "__main__":
    end(main)
