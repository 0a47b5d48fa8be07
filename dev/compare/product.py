"""The rate of PyTorch's own matrix product, for devices whose peak is not known: product.py cpu|cuda fp32|bf16 THREADS
(0: as many as it takes)."""

import json
import sys
import time

import torch

device, dtype, threads = sys.argv[1], {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[2]], int(sys.argv[3])
if threads:
    torch.set_num_threads(threads)
n = 8192 if device == "cuda" else 2048
a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
best = float("inf")
for _ in range(6):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    product = a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    best = min(best, time.perf_counter() - start)
print(json.dumps({"tflops": 2 * n**3 / best / 1e12}))
