"""Steps timed by events in a stream: kernels that only pass time stand in for waits, computing and sends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from headrace.worker.clock import DeviceClocks, Part, StepTimes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CYCLES = 2_000_000
"""About a millisecond."""
NUM = 20


def sleep_ns() -> float:
    """How long `CYCLES` take."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    first.record()
    for _ in range(10):
        torch.cuda._sleep(CYCLES)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e5


def test_parts_of_steps_that_are_issued_ahead_are_the_devices_own_and_nothing_waits() -> None:
    one_ns = sleep_ns()
    clocks, edge = DeviceClocks(), torch.cuda.Stream()
    flying = []
    for _ in range(NUM):
        step = clocks.start(0)
        step.enter(Part.TOKENS)
        torch.cuda._sleep(CYCLES)
        step.enter(Part.BUSY)
        torch.cuda._sleep(2 * CYCLES)
        edge.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(edge):
            torch.cuda._sleep(CYCLES // 2)
        step.enter(Part.COMMUNICATION)
        step.sent(edge)
        step.stop()
        flying.append(step)
    assert not flying[-1].is_done(), "something waited for the device"
    seen: list[StepTimes] = []
    for step in flying:
        while not step.is_done():
            pass
        seen.append(step.account())
    torch.cuda.synchronize()
    assert clocks.settle()
    assert clocks.spent_ns[Part.TOKENS] == pytest.approx(NUM * one_ns, rel=0.2)
    assert clocks.spent_ns[Part.BUSY] == pytest.approx(NUM * 2 * one_ns, rel=0.2)
    assert clocks.edge_ns == pytest.approx(NUM * one_ns / 2, rel=0.4)
    # One step stands behind the other: sends are beside them.
    assert clocks.spent_ns[Part.COMMUNICATION] < 0.1 * NUM * one_ns
    for times in seen:
        assert times.end_ns - times.start_ns == pytest.approx(2 * one_ns, rel=0.2)
    for before, after in pairwise(seen):
        assert before.end_ns <= after.start_ns - after.tokens_wait_ns
