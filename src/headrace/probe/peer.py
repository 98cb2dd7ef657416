"""Two GPUs of one host: whether either reaches the other's memory, whether what is copied arrives, how fast."""

from __future__ import annotations

from typing import Any

import torch

from headrace.errors import Fault, UserError
from headrace.kernels.driver import check, driver
from headrace.probe.timing import seconds_of
from headrace.worker.peer_memory import can_reach

NUM_BYTES = 128 << 20
SMALL_BYTES, NUM_SMALL = 16, 200
SLEEP_CYCLES = 6_000_000
"""Some 3 ms, in which that many copies can be issued: their time is then the device's alone."""


def measure(gpu: int, peer: int, budget_s: float) -> dict[str, Any]:
    """`p2p`, `there` and `back` in bytes a second, `latency_s` of a small copy (None where it cannot be timed).

    Raises Fault where what arrives is not what was sent.
    """
    one, other = torch.device("cuda", gpu), torch.device("cuda", peer)
    rates = [_rate(source, dest, budget_s / 2) for source, dest in ((one, other), (other, one))]
    reach = can_reach(one, other) and can_reach(other, one)
    return {"p2p": reach, "there": rates[0], "back": rates[1], "latency_s": _latency_s(one, other)}


def _rate(source: torch.device, dest: torch.device, budget_s: float) -> float:
    torch.cuda.set_device(source)
    sent = _pattern(source)
    got = torch.zeros_like(sent, device=dest)
    got.copy_(sent)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(dest)
    if not torch.equal(got, _pattern(dest)):
        raise Fault("what is copied does not arrive as it was sent")
    # Copies are issued on the source's stream, where they are timed.
    return NUM_BYTES / seconds_of(lambda: got.copy_(sent), budget_s, source)


def _pattern(device: torch.device) -> torch.Tensor:
    return (torch.arange(NUM_BYTES // 4, dtype=torch.int32, device=device) * 7919) ^ 0x5A5A5A5A


def _latency_s(source: torch.device, dest: torch.device) -> float | None:
    try:
        api = driver()
    except UserError:
        return None
    torch.cuda.set_device(source)
    sent = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=source)
    got = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=dest)
    torch.cuda.synchronize(dest)
    stream = torch.cuda.current_stream(source).cuda_stream
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(NUM_SMALL):
            check(api.cuMemcpyAsync(got.data_ptr(), sent.data_ptr(), SMALL_BYTES, stream), "small copies")
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / NUM_SMALL
