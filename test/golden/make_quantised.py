"""
What bitsandbytes 0.50.2 and transformers 5.24 make of matrices in 4 bits on a CPU: test/golden/quantised.bin, which test/base/test_quantise.c
reads. Inputs come of a formula that both have. Of records the bytes between the parts are 0; where bitsandbytes decodes
fp4's second zero to -0, which some of its loops do, 0 is written.

    pip install torch==2.15 bitsandbytes==0.50.2 transformers==5.24.0
    python3 test/golden/make_quantised.py

Little-endian: the number of cases; of each type, nested, block, rounding, kind of input, n, bytes of the record (int32),
the record, the decoded values (fp32 or the 16 bits of bf16 and fp16). Then the number of means; of each n and the mean
of |input 0| in fp32, by one thread. Then the values of mxfp4's 16 codes with each of 256 scales, in bf16.
"""
import struct
import numpy as np
import torch
import bitsandbytes.functional as F
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TYPES = {1: "nf4", 2: "fp4"}
FP32, BF16, FP16 = 0, 1, 3  # enum DType
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


def inputs(kind, n):
    i = np.arange(n, dtype=np.uint64)
    h = (i * 2654435761 + kind * 40503 + 12345) % 2**32
    h ^= h >> 15
    h = h * 2246822519 % 2**32
    h ^= h >> 13
    x = ((h >> 8).astype(np.int64) - 2**23).astype(np.float32) * np.float32(2.0**-28)
    block = (i // 64).astype(np.int64)
    if kind == 1:  # scales far apart
        x *= np.exp2((block % 7 - 3) * 4).astype(np.float32)
    if kind == 2:  # blocks of zeros, and zeros among others
        x[(block % 3 == 1) | (h % 4 == 0)] = 0
    if kind == 3:  # multiples of 1/24 of the largest: fp4's values and the bounds between them
        x = ((((h >> 8) % 49).astype(np.int64) - 24) * (block + 3)).astype(np.float32)
    if kind == 4:  # scales of scales are too small to have an inverse
        x *= np.float32(2.0**-120)
    return x


def align(x, to):
    return -(-x // to) * to


def record_of(q, state, n, nested, block):
    blocks = -(-n // block)
    codes = q.numpy().reshape(-1)
    assert len(codes) == (n + 1) // 2
    parts = [codes.tobytes()]
    if nested:
        parts += [state.absmax.numpy().tobytes(), state.state2.absmax.numpy().tobytes()]
        parts += [state.offset.numpy().reshape(1).tobytes()]
        assert len(parts[1]) == blocks and len(parts[2]) == 4 * -(-blocks // 256)
    else:
        parts += [state.absmax.numpy().tobytes()]
        assert len(parts[1]) == 4 * blocks
    record = b"".join(part.ljust(align(len(part), 16), b"\0") for part in parts)
    return record.ljust(align(len(record), 64), b"\0")


def case(type, nested, block, rounding, kind, n):
    x = torch.from_numpy(inputs(kind, n)).to(DTYPES[rounding])
    q, state = F.quantize_4bit(x, blocksize=block, compress_statistics=bool(nested), quant_type=TYPES[type])
    decoded = F.dequantize_4bit(q, state).reshape(-1) + 0.0  # -0 becomes 0
    assert decoded.dtype == DTYPES[rounding] and len(decoded) == n
    record = record_of(q, state, n, nested, block)
    values = decoded if rounding == FP32 else decoded.view(torch.int16)
    header = struct.pack("<7i", type, nested, block, rounding, kind, n, len(record))
    return header + record + values.numpy().tobytes()


def mxfp4():
    blocks = (torch.arange(16, dtype=torch.uint8) % 8 * 0x22 + 0x10).repeat(1, 256, 1, 1)
    values = convert_moe_packed_tensors(blocks, torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1))
    return values[0].T.contiguous()[:, :16].contiguous().view(torch.int16).numpy().tobytes()


torch.set_num_threads(1)
cases = []
for type in TYPES:
    cases += [(type, 1, 64, BF16 if type == 1 else FP16, 0, 16453)]  # 258 blocks
    for k, n in enumerate((1, 2, 17, 63, 64, 96, 129, 512, 1000)):
        for nested in (0, 1):
            block = (64, 32, 128)[(k + nested) % 3]
            cases += [(type, nested, block, (FP32, BF16, FP16)[(k + type) % 3], (k + 2 * nested) % 4, n)]
    cases += [(type, nested, 64, BF16, kind, 640) for nested in (0, 1) for kind in range(4)]
    cases += [(type, 0, 64, FP32, 2, 104), (type, 1, 64, FP32, 4, 640)]  # 104: a rest of zeros
    cases += [(type, 0, 128, FP32, 3, 1142), (type, 1, 64, FP32, 3, 1340)]
    cases += [(type, 0, 4096, FP16, 0, 4100), (type, 1, 64, FP16, 1, 1792)]
lengths = [*range(1, 70), *range(100, 1200, 93), 4095, 4096, 4097, 16640, 32767, 32768, 40000]
with open("test/golden/quantised.bin", "wb") as file:
    file.write(struct.pack("<i", len(cases)) + b"".join(case(*c) for c in cases))
    file.write(struct.pack("<i", len(lengths)))
    for n in lengths:
        file.write(struct.pack("<if", n, torch.from_numpy(np.abs(inputs(0, n))).mean().item()))
    file.write(mxfp4())
