#!/usr/bin/env python3
"""
Makes moments.bin: what bitsandbytes' AdamW8bit has in its state, and makes of weights, on a CPU. The test (test/ops/test_ops_moments.h)
reads the committed file; only whoever changes it runs this.

    pip install torch==2.15.0 bitsandbytes==0.50.2
    python make_moments.py

Gradients and weights are values(salt, spread), powers of two times a fraction, which the test computes, too. In the file are, without any
header, in this order:

    quantised    signed codes of COUNT gradients, unsigned codes of their squares, the scales of both
    STEPS times  codes of m, codes of v, scales of m, scales of v, weights (fp32): after each step
"""
import pathlib

import bitsandbytes
import numpy as np
import torch

COUNT, BLOCK, STEPS = 1100, 256, 4
LEARNING_RATE, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def values(salt, spread):
    """2^-(0 .. spread - 1) times a number in [1, 2), of either sign: exact in fp32"""
    x = np.arange(COUNT, dtype=np.uint32) + np.uint32(salt * 10007)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    fraction = 1 + (x & np.uint32(0x7FFFFF)).astype(np.float64) / 2**23
    power = (x >> np.uint32(23) & np.uint32(31)) % np.uint32(spread)
    sign = np.where(x >> np.uint32(31), -1.0, 1.0)
    return torch.tensor((sign * fraction * 2.0 ** -power.astype(np.float64)).astype(np.float32))


def gradients(step):
    g = values(1 + step, 20)
    g[512:768] *= step > 1  # a block without a gradient
    return g


def main():
    torch.set_num_threads(1)
    parts = []
    keep = lambda tensor, kind: parts.append(tensor.detach().numpy().astype(kind).tobytes())
    g = gradients(0)
    functional = bitsandbytes.functional
    signed, first = functional.quantize_blockwise(g, code=functional.create_dynamic_map(signed=True), blocksize=BLOCK)
    unsigned, second = functional.quantize_blockwise(g * g, code=functional.create_dynamic_map(signed=False), blocksize=BLOCK)
    for tensor, kind in ((signed, "u1"), (unsigned, "u1"), (first.absmax, "<f4"), (second.absmax, "<f4")):
        keep(tensor, kind)
    weights = torch.nn.Parameter(values(0, 8))
    optimizer = bitsandbytes.optim.AdamW8bit([weights], LEARNING_RATE, BETAS, EPSILON, DECAY, min_8bit_size=0)
    for step in range(1, STEPS + 1):
        weights.grad = gradients(step)
        optimizer.step()
        state = optimizer.state[weights]
        for name, kind in (("state1", "u1"), ("state2", "u1"), ("absmax1", "<f4"), ("absmax2", "<f4")):
            keep(state[name], kind)
        keep(weights, "<f4")
    pathlib.Path(__file__).with_name("moments.bin").write_bytes(b"".join(parts))


main()
