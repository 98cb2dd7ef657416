"""Steady pace of a pipeline: microbatches that go round and round, without a scheduler.

The sizes are those that the scheduler settles at, the stages and links those of the simulator; what is left out are
arrivals, ends and prompts between decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.mesh import FloatArray
from headrace.plan.cost import CostModel
from headrace.plan.load import Load
from headrace.plan.pipeline import Line
from headrace.schedule.balance import Balance, level_sizes

WARM, MEASURED = 6, 6
"""Rounds until the pace is taken to be steady, and rounds it is taken from."""
EQUAL = 0.02
"""Share by which a period exceeds the busiest stage's work before it is the trip that sets it."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Of a round: every microbatch once."""

    period_s: float
    sizes: tuple[int, ...]
    steps_s: FloatArray
    """[M, P]: each microbatch on each stage."""
    edges_s: FloatArray
    """[M, P - 1]: each microbatch on each link."""

    @property
    def stage(self) -> int:
        """The busiest."""
        return int(self.steps_s.sum(axis=0).argmax())

    @property
    def bubble(self) -> FloatArray:
        """[P]: share of the time in which a stage computes nothing."""
        idle: FloatArray = 1 - self.steps_s.sum(axis=0) / self.period_s
        return np.clip(idle, 0.0, 1.0)

    @property
    def bound(self) -> str:
        """What sets the pace: "stage", "edge" or the "trip" through all of them."""
        stage_s = float(self.steps_s.sum(axis=0).max())
        edge_s = float(self.edges_s.sum(axis=0).max(initial=0.0))
        if max(stage_s, edge_s) < self.period_s * (1 - EQUAL):
            return "trip"
        return "stage" if stage_s >= edge_s else "edge"


def decode_sizes(num_requests: int, num_stages: int, balance: Balance | None) -> tuple[int, ...]:
    """Rows of each microbatch, largest first, as the scheduler spreads them."""
    sizes = balance.sizes(num_requests, num_stages) if balance is not None else None
    return tuple(sizes) if sizes is not None else level_sizes(num_requests, min(num_stages, num_requests))


def decode_pace(cost: CostModel, sizes: Sequence[int], length: int, run_ahead: int) -> Pace:
    """Microbatches of so many decode rows, each row attending to `length` positions."""
    return _pace(cost, sizes, [Load.decode(rows, length) for rows in sizes], run_ahead)


def _pace(cost: CostModel, sizes: Sequence[int], loads: Sequence[Load], run_ahead: int) -> Pace:
    steps = np.array([cost.steps_s(load) for load in loads])
    hops = [cost.edges_s(load.tokens) for load in loads]
    edges, delays = np.array([edge for edge, _ in hops]), hops[0][1]
    line, num = Line(cost.num_stages), len(loads)
    ends: list[float] = []
    for index in range(num * (WARM + MEASURED)):
        which = index % num
        token_s = ends[index - num] + cost.feedback_s if index >= num else 0.0
        # A plan is sent when the result of an older one has come: of the one that made room in the window.
        older = index - num - run_ahead
        sent_s = ends[older] + cost.host_s if older >= 0 else 0.0
        begins = line.serve(steps[which], edges[which], delays, max(token_s, sent_s))
        ends.append(float(begins[-1] + steps[which, -1]))
    period = (ends[-1] - ends[num * WARM - 1]) / MEASURED
    return Pace(period_s=period, sizes=tuple(sizes), steps_s=steps, edges_s=edges)


def prompt_loads(num_input: int, chunk: int) -> list[Load]:
    """Steps that prompts of so many tokens come in, when many wait: full chunks, or the parts of a long prompt."""
    if num_input <= chunk:
        count = chunk // num_input
        one = Load.prompt(0, num_input, samples=True) if num_input > 1 else Load.decode(1, 1)
        return [
            Load(
                count * one.tokens, count, count * one.decodes, count * one.context, count * one.chunk_context,
                count * one.chunk_pairs,
            )
        ]  # fmt: skip
    num_chunks = -(-num_input // chunk)
    sizes = level_sizes(num_input, num_chunks)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    return [
        Load.prompt(int(start), size, samples=index == num_chunks - 1)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]


def prefill_pace(cost: CostModel, num_input: int, chunk: int) -> tuple[float, FloatArray, FloatArray]:
    """Prompt tokens a second once all stages have some; seconds of such steps by stage [P] and by link [P - 1]."""
    loads = prompt_loads(num_input, chunk)
    steps: FloatArray = sum((cost.steps_s(load) for load in loads), np.zeros(cost.num_stages))
    edges: FloatArray = sum((cost.edges_s(load.tokens)[0] for load in loads), np.zeros(cost.num_stages - 1))
    slowest = max(float(steps.max()), float(edges.max(initial=0.0)))
    return sum(load.tokens for load in loads) / slowest, steps, edges


def first_token_s(cost: CostModel, num_input: int, chunk: int) -> float:
    """From a prompt's arrival at an idle engine to its first token."""
    line, end = Line(cost.num_stages), 0.0
    num_chunks = -(-num_input // chunk)
    start = 0
    for index, size in enumerate(level_sizes(num_input, num_chunks)):
        last = index == num_chunks - 1
        load = Load.prompt(start, size, samples=last) if size > 1 else Load.decode(1, start + 1)
        steps = cost.steps_s(load)
        begins = line.serve(steps, *cost.edges_s(load.tokens), cost.host_s / 2)
        end = float(begins[-1] + steps[-1])
        start += size
    return end + cost.host_s / 2
