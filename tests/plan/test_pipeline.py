"""Stages in virtual time, against the same stages simulated server by server."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.mesh import FloatArray
from headrace.plan.load import Load
from headrace.plan.pipeline import Pipeline
from headrace.step import Register, SamplerSpec, StepPlan, pack


@dataclass
class Given:
    """A cost model with the times that a test names, plan by plan."""

    num_stages: int
    steps: list[list[float]] = field(default_factory=list)
    edges: list[list[float]] = field(default_factory=list)
    delay_s: float = 0.0
    feedback_s: float = 0.0
    host_s: float = 0.0
    num_priced: int = 0

    def steps_s(self, load: Load) -> FloatArray:
        self.num_priced += 1
        return np.array(self.steps[self.num_priced - 1], dtype=float)

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        busy = self.edges[self.num_priced - 1] if self.edges else [0.0] * (self.num_stages - 1)
        return np.array(busy, dtype=float), np.full(self.num_stages - 1, self.delay_s)


def plan(plan_id: int, rows: list[tuple[int, int, int, int]], register: tuple[int, ...] = ()) -> StepPlan:
    lives = [Register(slot, pack([0]), 1, SamplerSpec()) for slot in register]
    return StepPlan(plan_id, pack([value for row in rows for value in row]), [], lives)


def begins(pipeline: Pipeline) -> list[list[float]]:
    """By plan and stage."""
    num_stages = pipeline.cost.num_stages
    times = [span.start_s for span in pipeline.spans]
    return [times[i : i + num_stages] for i in range(0, len(times), num_stages)]


def test_a_plan_waits_for_the_one_before_and_for_its_activations() -> None:
    cost = Given(3, steps=[[1, 5, 1], [1, 1, 1]], delay_s=0.5)
    pipeline = Pipeline(cost, 4, record=True)
    pipeline.send(plan(0, [(0, 0, 1, 1)]), 0.0)
    pipeline.send(plan(1, [(1, 0, 1, 1)]), 0.0)
    assert begins(pipeline) == [[0, 1.5, 7], [1, 6.5, 8]]
    assert [time for time, _ in pipeline.results] == [8, 9]
    assert pipeline.busy_s.tolist() == [2, 6, 2]


def test_a_link_carries_one_plan_after_the_other() -> None:
    cost = Given(2, steps=[[1, 1], [1, 1]], edges=[[10], [10]], delay_s=0.25)
    pipeline = Pipeline(cost, 4, record=True)
    for number in range(2):
        pipeline.send(plan(number, [(number, 0, 5, 0)]), 0.0)
    assert begins(pipeline) == [[0, 11.25], [1, 21.25]]
    assert pipeline.edge_s.tolist() == [20]


def test_a_decode_row_waits_for_its_token_and_the_engine_for_the_result() -> None:
    cost = Given(2, steps=[[1, 1]] * 3, feedback_s=0.5, host_s=2.0)
    pipeline = Pipeline(cost, 4, record=True)
    pipeline.send(plan(0, [(0, 0, 3, 1)], register=(0,)), 0.0)
    pipeline.send(plan(1, [(0, 3, 1, 1)]), 0.0)  # ahead of its token
    assert begins(pipeline) == [[1, 2], [3.5, 4.5]]  # half of the engine's trip; then the token, half a second late
    assert [time for time, _ in pipeline.results] == [4, 6.5]
    # Another life of the slot starts from nothing.
    pipeline.send(plan(2, [(0, 0, 3, 1)], register=(0,)), 0.0)
    assert begins(pipeline)[2] == [4.5, 5.5]


def test_a_chunk_that_samples_nothing_makes_nobody_wait() -> None:
    cost = Given(2, steps=[[1, 4], [1, 4]])
    pipeline = Pipeline(cost, 4, record=True)
    pipeline.send(plan(0, [(0, 0, 3, 0)], register=(0,)), 0.0)
    pipeline.send(plan(1, [(0, 3, 3, 1)]), 0.0)
    assert begins(pipeline) == [[0, 1], [1, 5]]
    assert [len(result.tokens) for _, result in pipeline.results] == [0, 4]


@given(st.data(), st.integers(1, 6))
def test_against_servers_one_by_one(data: st.DataObject, num_stages: int) -> None:
    times = st.floats(0, 10)
    count = data.draw(st.integers(1, 12))
    row = st.lists(times, min_size=num_stages, max_size=num_stages)
    edge = st.lists(times, min_size=num_stages - 1, max_size=num_stages - 1)
    cost = Given(
        num_stages,
        steps=data.draw(st.lists(row, min_size=count, max_size=count)),
        edges=data.draw(st.lists(edge, min_size=count, max_size=count)),
        delay_s=data.draw(times),
    )
    sent = sorted(data.draw(st.lists(st.floats(0, 50), min_size=count, max_size=count)))
    pipeline = Pipeline(cost, 16, record=True)
    stage_free, link_free = [0.0] * num_stages, [0.0] * num_stages
    expected = []
    for number, now_s in enumerate(sent):
        pipeline.send(plan(number, [(number % 16, 0, 2, 0)]), now_s)
        arrives, begun = now_s, []
        for stage in range(num_stages):
            begun.append(max(arrives, stage_free[stage]))
            stage_free[stage] = begun[-1] + cost.steps[number][stage]
            if stage < num_stages - 1:
                link_free[stage] = max(stage_free[stage], link_free[stage]) + cost.edges[number][stage]
                arrives = link_free[stage] + cost.delay_s
        expected.append(begun)
    for found, wanted in zip(begins(pipeline), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_spans_say_what_was_computed() -> None:
    pipeline = Pipeline(Given(1, steps=[[1], [1]]), 4, record=True)
    pipeline.send(plan(7, [(0, 9, 1, 1), (1, 4, 1, 1)]), 0.0)
    pipeline.send(plan(8, [(0, 10, 1, 1), (2, 0, 30, 0)]), 0.0)
    assert [span.name for span in pipeline.spans] == ["2 rows", "2 rows, 31 tokens"]
    assert pipeline.spans[1].args == {"plan": 8, "rows": 2, "tokens": 31, "decodes": 1}


def test_the_sums_of_a_plans_rows() -> None:
    rows = np.array([[0, 9, 1, 1], [1, 4, 1, 1], [2, 0, 30, 0], [3, 100, 2, 1]], dtype=np.int32)
    assert Load.of_rows(rows) == Load(
        tokens=34, sampled=3, decodes=2, context=15, chunk_context=132, chunk_pairs=30 * 31 // 2 + 101 + 102
    )
    assert Load.of_rows(rows[:2]) == Load(tokens=2, sampled=2, decodes=2, context=15)
    assert Load.of_rows(rows[3:]) == Load.prompt(100, 2, samples=True)
    assert Load.decode(3, 10) == Load(3, 3, 3, 30)
