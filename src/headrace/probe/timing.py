"""How long a call takes on a processor or on a GPU: the median of several samples, within a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

NUM_SAMPLES = 9
WARM_SHARE = 0.3
"""Of the budget: an idle GPU clocks low, and its link runs slow."""


def device_of(gpu: int | None) -> torch.device:
    """A GPU, made the current one, or the processor for None."""
    if gpu is None:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def seconds_of(call: Callable[[], object], budget_s: float, device: torch.device) -> float:
    """Seconds of one `call`, in about `budget_s` seconds in all, or four calls where those take longer."""
    sample = _on_gpu if device.type == "cuda" else _on_host
    each = sample(call, 1)
    ends = time.monotonic() + budget_s * WARM_SHARE
    while True:
        each = sample(call, max(1, int(0.02 / max(each, 1e-7))))
        if time.monotonic() >= ends:
            break
    count = max(1, int(budget_s * (1 - WARM_SHARE) / NUM_SAMPLES / max(each, 1e-7)))
    num_samples = max(2, min(NUM_SAMPLES, int(budget_s / max(each, 1e-7))))
    return statistics.median(sample(call, count) for _ in range(num_samples))


def _on_host(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def _on_gpu(call: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count
