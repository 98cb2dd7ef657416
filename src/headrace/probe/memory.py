"""Memory bandwidth: a large copy, launched and not captured (a graph's copy goes to the slower copy engine)."""

from __future__ import annotations

import torch

from headrace.probe.device import last_cache
from headrace.probe.timing import device_of, seconds_of

MOST_BYTES, LEAST_BYTES = 1 << 30, 128 << 20


def measure(gpu: int | None, budget_s: float, most_bytes: int = MOST_BYTES) -> dict[str, float]:
    """`bytes_per_s`, read and written together. Every core of a processor takes part."""
    device = device_of(gpu)
    if gpu is None:
        size = min(most_bytes, max(LEAST_BYTES, 2 * last_cache()))
    else:
        size = min(most_bytes, torch.cuda.mem_get_info(gpu)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    dest = torch.zeros_like(source)  # pages that nobody has touched are not there yet
    copy_s = seconds_of(lambda: dest.copy_(source), budget_s, device)
    return {"bytes_per_s": 2 * size / copy_s}
