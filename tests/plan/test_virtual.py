"""The scheduler in virtual time: what every request gets, how level microbatches are, what delays do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.mesh import FloatArray
from headrace.plan.arrivals import Arrivals, Ask, Closed, Open
from headrace.plan.load import Load
from headrace.plan.pipeline import Pipeline
from headrace.plan.virtual import VirtualEngine
from headrace.schedule import SchedulerConfig
from headrace.step import ROW_WIDTH, StepPlan, unpack

NUM_STAGES = 8
STEP_S, ROW_S = 1e-3, 1e-3


class Linear:
    """A step and its rows each take as long; so do all stages."""

    feedback_s = 0.0

    def __init__(self, num_stages: int = NUM_STAGES, host_s: float = 0.0) -> None:
        self.num_stages, self.host_s = num_stages, host_s

    def steps_s(self, load: Load) -> FloatArray:
        return np.full(self.num_stages, STEP_S + ROW_S * load.decodes + ROW_S / 40 * (load.tokens - load.decodes))

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        return np.zeros(self.num_stages - 1), np.zeros(self.num_stages - 1)


def config(num_stages: int = NUM_STAGES, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {
        "max_running": 64,
        "chunk": 512,
        "page_size": 16,
        "num_pages": 4096,
        "max_len": 4096,
        "run_ahead": 2,
    }
    return SchedulerConfig(num_stages=num_stages, **{**sizes, **changes})


def served(arrivals: Arrivals, *, cost: Linear | None = None, **changes: int) -> VirtualEngine:
    cost = cost or Linear()
    engine = VirtualEngine(config(cost.num_stages, **changes), cost, record=True)
    engine.run(arrivals)
    return engine


def decode_sizes(engine: VirtualEngine) -> list[tuple[float, int, int]]:
    """By plan: when the first stage began it, its decode rows, its other rows."""
    first = [span for span in engine.pipeline.spans if span.stage == 0]
    return [(s.start_s, int(s.args["decodes"]), int(s.args["rows"]) - int(s.args["decodes"])) for s in first]


def test_a_burst_of_32_is_level_within_two_trips() -> None:
    engine = served(Open([Ask(0.0, 10, 60)] * 32))
    plans = decode_sizes(engine)
    prompts_done = max(i for i, (_, _, others) in enumerate(plans) if others)
    settled = plans[prompts_done + 1 + 2 * NUM_STAGES :]
    ends = min(record.token_times_s[-1] for record in engine.records)
    sizes = [decodes for start, decodes, _ in settled if start < ends - 0.2]
    assert len(sizes) > 10 * NUM_STAGES
    assert set(sizes) == {4}


def test_staggered_arrivals_are_level_two_trips_after_each() -> None:
    gap_s = 0.3
    engine = served(Open([Ask(i * gap_s, 10, 500) for i in range(20)]))
    plans = decode_sizes(engine)
    trip = NUM_STAGES + 2  # those live and those ahead
    checked = 0
    for count in range(1, 20):
        came = count * gap_s
        after = [i for i, (start, _, others) in enumerate(plans) if start >= came and others]
        begin = after[0] + 2 * trip
        end = next(i for i, (start, _, _) in enumerate(plans) if start >= came + gap_s) if count < 19 else begin + 40
        live = min(NUM_STAGES, count + 1)
        for i in range(begin, end - live):
            window = [decodes for _, decodes, _ in plans[i : i + live]]
            assert max(window) - min(window) <= 1
            assert sum(window) == count + 1
            checked += 1
    assert checked > 100


class Watched(Pipeline):
    """Remembers which requests each plan has; the first token of a prompt is its request's number here."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.members: list[list[int]] = []
        self._request: dict[int, int] = {}

    def send(self, plan: StepPlan, now_s: float) -> None:
        for life in plan.register:
            self._request[life.slot] = int(unpack(life.tokens)[0])
        self.members.append([self._request[slot] for slot in unpack(plan.rows, ROW_WIDTH)[:, 0].tolist()])
        super().send(plan, now_s)


def watched(outputs: list[int]) -> tuple[VirtualEngine, list[list[int]]]:
    engine = VirtualEngine(config(), Linear(), record=True)
    pipeline = Watched(engine.pipeline.cost, 64, True)
    engine.pipeline = pipeline
    engine.run(Open([Ask(0.0, 10, output) for output in outputs]))
    return engine, pipeline.members


def test_one_microbatch_ends_together_and_the_others_level_within_two_trips() -> None:
    _, members = watched([200] * 32)
    together = members[40 * NUM_STAGES]
    assert len(together) == 4
    outputs = [60 if number in together else 200 for number in range(32)]
    engine, members = watched(outputs)
    last = max(i for i, who in enumerate(members) if set(who) & set(together))
    assert [who for who in members if set(who) & set(together)][-1] == together  # they did end together
    assert all(not set(who) & set(together) for who in members[last + 1 :])
    settled = [len(who) for who in members[last + 1 + 2 * NUM_STAGES : last + 1 + 8 * NUM_STAGES]]
    for i in range(len(settled) - NUM_STAGES):
        window = settled[i : i + NUM_STAGES]
        assert sum(window) == 28 and max(window) - min(window) <= 1
    assert all(record.done for record in engine.records)


def test_one_request_alone_costs_its_stages_and_no_more() -> None:
    quick = served(Open([Ask(0.0, 1, 100)]), cost=Linear())
    slow = served(Open([Ask(0.0, 1, 100)]), cost=Linear(host_s=NUM_STAGES * (STEP_S + ROW_S)))
    for engine in (quick, slow):  # plans run ahead of results, however late those are
        times = engine.records[0].token_times_s
        assert times[-1] - times[1] == pytest.approx(98 * NUM_STAGES * (STEP_S + ROW_S))
    behind = served(Open([Ask(0.0, 1, 100)]), cost=Linear(host_s=0.016), run_ahead=0)
    times = behind.records[0].token_times_s
    assert times[-1] - times[1] == pytest.approx(98 * (NUM_STAGES * (STEP_S + ROW_S) + 0.016))


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    engine = served(Closed(5, 23, 30, 20))
    assert len(engine.records) == 23
    asked = [record.ask.at_s for record in engine.records]
    assert asked[:5] == [0.0] * 5
    ends = sorted(record.token_times_s[-1] for record in engine.records)
    assert asked[5:] == ends[:18]


def test_busy_time_is_what_steps_took() -> None:
    engine = served(Open([Ask(0.0, 10, 30)] * 16))
    spans = engine.pipeline.spans
    for stage in range(NUM_STAGES):
        assert engine.pipeline.busy_s[stage] == pytest.approx(sum(s.dur_s for s in spans if s.stage == stage))
    assert engine.active_s == pytest.approx(max(record.token_times_s[-1] for record in engine.records))


def test_time_without_work_is_nobodys_bubble() -> None:
    engine = served(Open([Ask(0.0, 10, 5), Ask(1000.0, 10, 5)]))
    assert engine.active_s < 1.0


def test_short_of_pages_everyone_still_gets_all_tokens() -> None:
    engine = served(Open([Ask(0.0, 40, 100)] * 16), num_pages=40)
    assert engine.scheduler.num_preemptions > 0
    assert [len(record.token_times_s) for record in engine.records] == [100] * 16


def test_what_can_never_fit_is_said() -> None:
    with pytest.raises(UserError, match="do not fit"):
        served(Open([Ask(0.0, 5000, 10)]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_everyone_gets_what_was_asked_in_order_and_the_same_again(
    asks: list[tuple[float, int, int]], num_stages: int, run_ahead: int
) -> None:
    runs = [
        served(Open([Ask(*ask) for ask in asks]), cost=Linear(num_stages, 1e-3), run_ahead=run_ahead, chunk=32)
        for _ in range(2)
    ]
    for record in runs[0].records:
        times = record.token_times_s
        assert record.done and len(times) == record.ask.output
        # Never before the stages could have computed it, one after the other.
        assert times[0] >= record.ask.at_s + num_stages * STEP_S
        gaps = np.diff(times)
        assert (gaps >= num_stages * (STEP_S + ROW_S) - 1e-9).all()
    assert [r.token_times_s for r in runs[0].records] == [r.token_times_s for r in runs[1].records]
