"""Product rate: square matrices of random numbers (zeros run faster than any model does)."""

from __future__ import annotations

from functools import partial

import torch

from headrace.probe.timing import device_of, seconds_of

GPU_SIZE, HOST_SIZE = 8192, 1024


def measure(gpu: int | None, budget_s: float, size: int | None = None) -> dict[str, float]:
    """`bfloat16`, and of a processor `float32` too: operations a second."""
    device = device_of(gpu)
    types = (torch.bfloat16,) if gpu is not None else (torch.bfloat16, torch.float32)
    n = size or (HOST_SIZE if gpu is None else GPU_SIZE)
    rates = {}
    for dtype in types:
        a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
        with torch.inference_mode():
            product_s = seconds_of(partial(torch.mm, a, b, out=out), budget_s / len(types), device)
        rates[str(dtype).removeprefix("torch.")] = 2 * n**3 / product_s
    return rates
