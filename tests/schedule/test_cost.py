"""Chunks that cost what runs beside them: sizes, and who waits for a long prompt how long."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.schedule.cost import CostCurve
from headrace.schedule.policy import prompt_counts
from headrace.step import ROW_WIDTH, StepResult, pack, unpack
from tests.schedule.driver import config

CURVES = st.builds(CostCurve, token=st.integers(1, 10**12), pair=st.integers(0, 10**9), step=st.integers(1, 10**16))
# Of a mixture of experts: 64,000 positions before it make a token cost three and a half times as much as none.
MOE = CostCurve(token=4_000_000_000, pair=160_000, step=2200 * 4_000_000_000)


@given(curve=CURVES, start=st.integers(0, 10**6), cost=st.integers(0, 10**18))
def test_the_most_tokens_for_a_cost(curve: CostCurve, start: int, cost: int) -> None:
    count = curve.tokens(start, cost)
    assert curve.cost(start, count) <= cost < curve.cost(start, count + 1)


@given(curve=CURVES, start=st.integers(0, 10**6), counts=st.lists(st.integers(0, 10**4), min_size=1, max_size=5))
def test_the_cost_of_a_whole_is_that_of_its_parts(curve: CostCurve, start: int, counts: list[int]) -> None:
    at, total = start, 0
    for count in counts:
        total += curve.cost(at, count)
        at += count
    assert total == curve.cost(start, at - start)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 10**5)), min_size=1, max_size=12),
    room=st.integers(0, 9000),
    num_decoding=st.integers(0, 64),
    ways=st.integers(1, 8),
    curve=CURVES | st.just(MOE) | st.none(),
)
def test_counts_keep_to_room_and_cost_and_the_first_goes_on(
    prompts: list[tuple[int, int]], room: int, num_decoding: int, ways: int, curve: CostCurve | None
) -> None:
    counts = prompt_counts(prompts, room, num_decoding, ways, curve)
    assert len(counts) == len(prompts)
    assert all(0 <= count <= length for count, (_, length) in zip(counts, prompts, strict=True))
    assert sum(counts) <= room
    assert not room or counts[0] >= 1
    if curve is not None and num_decoding and room:
        costs = [curve.cost(start, count) for (start, _), count in zip(prompts, counts, strict=True)]
        most = curve.microbatch(-(-num_decoding // ways)) * (num_decoding + len(prompts)) // num_decoding
        most = min(most, curve.token * room)
        assert sum(costs) <= most or (counts[0] == 1 and sum(costs[1:]) <= most)


def test_chunks_are_whole_where_nothing_decodes_and_shrink_far_into_a_prompt_where_something_does() -> None:
    assert prompt_counts([(0, 64_000)], 8192, 0, 2, MOE) == [8000]
    assert prompt_counts([(60_000, 64_000)], 8192, 0, 2, MOE) == [8000]
    sizes = [prompt_counts([(start, 10**6)], 8192, 16, 2, MOE)[0] for start in (0, 8000, 32_000, 64_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert 2000 < sizes[0] < 2400
    assert 550 < sizes[3] < 700
    assert prompt_counts([(0, 100)], 8192, 16, 2, MOE) == [100]


def test_prompts_have_more_where_few_decode() -> None:
    """So that a burst is not computed at the pace of the first to be done with their prompts."""
    waiting = [(0, 1000)] * 30
    sizes = [sum(prompt_counts(waiting, 8192, num_decoding, 1, MOE)) for num_decoding in (0, 1, 10, 30, 300)]
    assert min(sizes[:3]) >= 7500
    assert 3000 < sizes[3] < 2 * 2230
    assert sizes[4] < 1.1 * 2500


def test_a_short_prompt_pays_for_its_own_tokens_not_for_the_long_ones_attention() -> None:
    long, short = prompt_counts([(60_000, 100_000), (0, 1000)], 8192, 64, 8, MOE)
    assert short == 1000
    assert 300 < long < 450


class Line:
    """Plans and their results, without anything that computes them: every token is 1."""

    def __init__(self, sizes: SchedulerConfig) -> None:
        self.scheduler = Scheduler(sizes)
        self.plans: list[list[list[int]]] = []
        """The rows of each."""
        self.results: deque[StepResult] = deque()
        self.answered: set[str] = set()

    def submit(self, name: str, num_prompt: int, max_tokens: int) -> None:
        self.scheduler.submit(Request(name, pack(range(num_prompt)), max_tokens), 0.0)

    def step(self) -> None:
        """Bring a result back, and plan what that allows."""
        if self.results:
            self.answered |= {event.request_id for event in self.scheduler.commit(self.results.popleft(), 0.0)}
        while (plan := self.scheduler.schedule(0.0)) is not None:
            rows = unpack(plan.rows, ROW_WIDTH).tolist()
            self.plans.append(rows)
            self.results.append(StepResult(plan.plan_id, pack([1] * sum(row[3] for row in rows))))

    def costs(self, first: int) -> list[int]:
        """Of all rows of the plans from number `first` on."""
        return [sum(MOE.cost(start, count) for _, start, count, _ in rows) for rows in self.plans[first:]]


@pytest.mark.parametrize("num_stages", [1, 2, 8])
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("decoding", [0, 1, 16])
def test_a_long_prompt_holds_nobody_up(num_stages: int, run_ahead: int, decoding: int) -> None:
    """64,000 tokens are in flight when a short request comes: it waits for the plans that are made, and for its own."""
    sizes = config(
        num_stages=num_stages, run_ahead=run_ahead, chunk=8192, page_size=64, max_len=100_000, curve=MOE, max_running=32
    )  # fmt: skip
    line = Line(sizes)
    for number in range(decoding):
        line.submit(f"decoding {number}", 4, max_tokens=3000)
    for _ in range(4 * num_stages):
        line.step()
    line.submit("long", 64_000, max_tokens=4)
    while line.scheduler._jobs["long"].num_computed < 32_000:
        line.step()
    first = len(line.plans)
    line.submit("short", 200, max_tokens=1000)
    while "short" not in line.answered:
        line.step()
    # A trip until there is room in a plan, and one through the stages, each plan no longer than those before it.
    decodes = (decoding + 1) * MOE.cost(3000, 1)
    assert len(line.plans) - first <= 2 * (num_stages + run_ahead)
    microbatch = MOE.microbatch(-(-(decoding + 1) // num_stages))
    most = microbatch * (decoding + 2) // decoding if decoding else MOE.cost(40_000, 8192)
    assert max(line.costs(first)) <= most + decodes
    # From now on somebody decodes: a plan costs little more than reading the weights once again, and its own rows.
    first = len(line.plans) + num_stages + run_ahead
    while "long" not in line.answered:
        line.step()
    assert len(line.plans) > first or not decoding
    assert max(line.costs(first), default=0) <= microbatch * (decoding + 2) // (decoding + 1) + decodes


def test_prompts_are_no_slower_for_it_where_nothing_decodes() -> None:
    line = Line(config(num_stages=2, chunk=4096, num_pages=8000, max_len=30_000, curve=MOE))
    line.submit("alone", 20_000, max_tokens=1)
    while line.scheduler.has_work:
        line.step()
    assert len(line.plans) == 5
