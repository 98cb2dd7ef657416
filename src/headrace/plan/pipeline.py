"""Stages in virtual time: when every stage computes every plan, known as soon as the plan is sent.

Stages and the links between them are servers in a row, each of which serves plans strictly in order. A plan reaches a
stage when the plan before has left it and its activations have arrived, and the first stage when the engine has sent it
and the tokens that its rows start from are there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headrace.mesh import FloatArray
from headrace.plan.cost import CostModel
from headrace.plan.load import Load
from headrace.step import ROW_WIDTH, StepPlan, StepResult, pack, unpack
from headrace.telemetry.perfetto import Span

TOKEN = 1
"""What every row samples: the simulator counts tokens and never looks at their values."""
ONE_TOKEN = pack([TOKEN])


class Line:
    """Stages and the links between them as servers in a row: when each is done with what it served last."""

    def __init__(self, num_stages: int) -> None:
        self._free_s = np.zeros(2 * num_stages - 1)

    def serve(self, steps_s: FloatArray, edges_s: FloatArray, delays_s: FloatArray, ready_s: float) -> FloatArray:
        """When each stage begins with what is ready for the first at `ready_s`, and keeps it for `steps_s`.

        Server j ends at max(its last end, the arrival from j - 1) + its work. Unrolled, with A the work and the delays
        of all servers before: end_j = A_j + work_j + max over i <= j of (begin_i - A_i), where begin_i is when server i
        would begin if nothing had to arrive.
        """
        work = np.empty(len(self._free_s))
        work[0::2], work[1::2] = steps_s, edges_s
        before = np.empty(len(work))
        before[0] = 0.0
        np.cumsum(work[:-1], out=before[1:])
        late_s = np.cumsum(delays_s)
        before[2::2] += late_s
        before[3::2] += late_s[:-1]
        begins = self._free_s
        begins[0] = max(begins[0], ready_s)
        begins = before + np.maximum.accumulate(begins - before)
        self._free_s = begins + work
        stages: FloatArray = begins[0::2]
        return stages


@dataclass
class Pipeline:
    """The virtual workers of one engine."""

    cost: CostModel
    num_slots: int
    record: bool = False
    """Whether to keep a span for every stage and plan."""
    spans: list[Span] = field(default_factory=list)
    results: deque[tuple[float, StepResult]] = field(default_factory=deque)
    """When each reaches the engine, in order."""

    def __post_init__(self) -> None:
        num_stages = self.cost.num_stages
        self.busy_s: FloatArray = np.zeros(num_stages)
        """By stage: computing, since the start."""
        self.edge_s: FloatArray = np.zeros(num_stages - 1)
        """By edge: its link occupied."""
        self.num_plans = 0
        self._token_s = np.zeros(self.num_slots)
        """By slot: when its last token is on the first stage."""
        self._line = Line(num_stages)

    def send(self, plan: StepPlan, now_s: float) -> None:
        """Take a plan that the engine sends at `now_s`."""
        for life in plan.register:
            self._token_s[life.slot] = 0.0
        rows = unpack(plan.rows, ROW_WIDTH)
        load = Load.of_rows(rows)
        ready_s = max(now_s + self.cost.host_s / 2, float(self._token_s[rows[:, 0]].max()))
        steps_s = self.cost.steps_s(load)
        edges_s, delays_s = self.cost.edges_s(load.tokens)
        begins_s = self._line.serve(steps_s, edges_s, delays_s, ready_s)
        self.busy_s += steps_s
        self.edge_s += edges_s
        end_s = float(begins_s[-1] + steps_s[-1])
        self._token_s[rows[rows[:, 3] == 1, 0]] = end_s + self.cost.feedback_s
        self.results.append((end_s + self.cost.host_s / 2, StepResult(plan.plan_id, ONE_TOKEN * load.sampled)))
        self.num_plans += 1
        if self.record:
            self._record(plan.plan_id, len(rows), load, begins_s, steps_s)

    def _record(self, plan_id: int, num_rows: int, load: Load, begins_s: FloatArray, steps_s: FloatArray) -> None:
        args = {"plan": plan_id, "rows": num_rows, "tokens": load.tokens, "decodes": load.decodes}
        name = f"{num_rows} rows" if load.tokens == num_rows else f"{num_rows} rows, {load.tokens} tokens"
        for stage, (begin, step) in enumerate(zip(begins_s.tolist(), steps_s.tolist(), strict=True)):
            self.spans.append(Span(stage, name, begin, step, args, flow=plan_id))
