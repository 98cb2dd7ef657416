"""Plans issued ahead of results: when a row comes again, what a stop costs, and that nobody's tokens change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.schedule import SchedulerConfig
from headrace.step import ROW_WIDTH, SamplerSpec, StepPlan, unpack
from tests.schedule.driver import Driver, config
from tests.schedule.stages import Stages
from tests.strategies import PROMPTS, sampler_specs, scheduler_configs

FOR_EVER = 300


def rows(plan: StepPlan) -> list[list[int]]:
    """(slot, start, count, samples) of each row."""
    return unpack(plan.rows, ROW_WIDTH).tolist()


def slots(plan: StepPlan) -> set[int]:
    return {row[0] for row in rows(plan)}


def staged(**changes: int) -> Driver:
    """With stages that go at their own pace; two plans ahead but for the changes."""
    sizes = config(**{"run_ahead": 2, **changes})
    return Driver(sizes, Stages(sizes))


def stop_at(prompt: list[int], index: int) -> SamplerSpec:
    """A stop id that the request meets as its token `index`, and not before."""
    driver = Driver(config())
    driver.submit(prompt, max_tokens=index + 1)
    tokens = driver.expected("r0").tokens
    assert tokens[index] not in tokens[:index]
    return SamplerSpec(stop_token_ids=[tokens[index]])


# --- when a row comes again -------------------------------------------------------------------------------------------


def test_one_request_chases_its_own_tokens() -> None:
    driver = staged(num_stages=1)
    driver.submit([1, 2, 3], max_tokens=9)
    plans = [done.plan for done in driver.schedule()]
    assert [rows(plan) for plan in plans] == [[[0, 0, 3, 1]], [[0, 3, 1, 1]], [[0, 4, 1, 1]]]
    assert [rows(done.plan) for done in driver.step()] == [[[0, 5, 1, 1]]]
    driver.run()
    driver.check()


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_rows_come_again_after_as_many_plans_as_are_live(num_stages: int, num_requests: int, run_ahead: int) -> None:
    driver = staged(num_stages=num_stages, run_ahead=run_ahead)
    for _ in range(num_requests):
        driver.submit(3, max_tokens=FOR_EVER)
    for _ in range(40):
        driver.step()
    live = min(num_stages, num_requests)
    plans = [done.plan for done in driver.executor.executed[-3 * live - 1 :]]
    assert all(slots(plan) == slots(again) for plan, again in zip(plans, plans[live:], strict=False))
    for i in range(live, len(plans)):
        assert len(set().union(*map(slots, plans[i - live : i]))) == num_requests
    # Never fewer than are live and `run_ahead` more; a row may be planned once more than that takes.
    rounds = 1 - -run_ahead // live
    assert live + run_ahead <= driver.scheduler.num_in_flight <= min(num_stages + run_ahead, rounds * live)
    assert max(job.num_uncommitted for job in driver.scheduler._running) <= rounds


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_requests", [1, 3, 8, 13])
@pytest.mark.parametrize("latency", [1, 2])
def test_no_stage_waits_for_the_host(num_stages: int, num_requests: int, latency: int) -> None:
    """Stages take a tick a plan; the host, `latency` ticks from a result to the plans that answer it."""
    busy = {}
    for run_ahead in (0, latency):
        driver = staged(num_stages=num_stages, run_ahead=run_ahead)
        for _ in range(num_requests):
            driver.submit(3, max_tokens=FOR_EVER)
        busy[run_ahead] = run_in_ticks(driver, latency)[-8 * num_stages :]
    live = min(num_stages, num_requests)
    assert sum(busy[latency]) == 8 * num_stages * live, "a pipeline as full as its rows can make it"
    assert sum(busy[0]) < sum(busy[latency])


def run_in_ticks(driver: Driver, latency: int, num_ticks: int = 130) -> list[int]:
    """How many stages were busy in each tick."""
    assert isinstance(driver.executor, Stages)
    busy: list[int] = []
    seen: list[int] = []
    """When each result came that the host has not answered."""
    driver.schedule()
    for now in range(num_ticks):
        busy.append(driver.executor.tick())
        seen += [now] * (len(driver.executor.results) - len(seen))
        while seen and now >= seen[0] + latency:
            seen.pop(0)
            driver.step()
    return busy


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_long_prompt_fills_the_stages_beside_one_who_decodes(num_stages: int) -> None:
    """A decode row in every chunk's plan would make each chunk wait for the one before to leave the last stage."""
    driver = staged(num_stages=num_stages, chunk=64, max_len=6000)
    driver.submit(3, max_tokens=FOR_EVER)
    for _ in range(10):
        driver.step()
    driver.submit(5000, max_tokens=1)
    first = len(driver.executor.executed)
    busy = run_in_ticks(driver, latency=2, num_ticks=60)
    plans = [rows(done.plan) for done in driver.executor.executed[first : first + 30]]
    assert all(any(count > 1 for _, _, count, _ in plan) for plan in plans)
    decoding = [i for i, plan in enumerate(plans) if any(count == 1 for _, _, count, _ in plan)]
    assert {later - sooner for sooner, later in pairwise(decoding)} == {num_stages}
    assert busy[-20:] == [num_stages] * 20


def test_who_arrives_waits_for_few_plans_of_one_who_decodes_alone() -> None:
    driver = staged(num_stages=8)
    driver.submit(3, max_tokens=FOR_EVER)
    for _ in range(20):
        driver.step()
    assert driver.scheduler.num_in_flight == 3
    driver.submit(3, max_tokens=1)
    driver.schedule()
    for _ in range(4):
        driver.step()
    assert driver.requests["r1"].finish_reason == "length"


def test_rows_of_one_plan_go_apart_at_its_commit() -> None:
    """Two requests make two microbatches, though one plan held both: they wait until it is done, and no longer."""
    driver = staged(num_stages=2)
    driver.submit(3, max_tokens=FOR_EVER)
    driver.submit(3, max_tokens=FOR_EVER)
    assert len(driver.schedule()) == 1
    assert [slots(done.plan) for done in driver.step()] == [{0}, {1}, {0}, {1}]


def test_plans_in_flight_are_bounded() -> None:
    for changes, most in (({}, 5), ({"run_ahead": 0}, 3), ({"max_in_flight": 1}, 1), ({"max_in_flight": 4}, 4)):
        driver = staged(**{"num_stages": 3, "chunk": 10, **changes})
        driver.submit(200)
        assert len(driver.schedule()) == most


# --- how requests end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_nothing_is_planned_past_a_limit(run_ahead: int) -> None:
    driver = staged(num_stages=2, run_ahead=run_ahead, max_len=12)
    driver.submit(4, max_tokens=5)
    driver.submit(7)
    driver.submit(6, max_tokens=0, sampler=SamplerSpec(prompt_logprobs=0))
    driver.run()
    planned = [row for done in driver.executor.executed for row in rows(done.plan)]
    assert sum(samples for *_, samples in planned) == 5 + 5
    assert sum(count for _, _, count, _ in planned) == (4 + 4) + (7 + 4) + 6
    driver.check()


@pytest.mark.parametrize(
    ("num_stages", "num_requests", "most"), [(1, 1, 2), (1, 4, 2), (2, 1, 2), (2, 4, 1), (8, 1, 2)]
)
def test_a_stop_frees_all_at_its_commit_and_few_rows_are_lost(num_stages: int, num_requests: int, most: int) -> None:
    driver = staged(num_stages=num_stages, page_size=4)
    prompt = [3, 1, 4]
    driver.submit(prompt, sampler=stop_at(prompt, 6))
    for _ in range(num_requests - 1):
        driver.submit(3, max_tokens=FOR_EVER)
    driver.schedule()
    while driver.requests["r0"].finish_reason is None:
        held = len(driver.scheduler._jobs["r0"].pages)
        used = driver.scheduler.num_pages_used
        driver.commit()
        if driver.requests["r0"].finish_reason is None:
            driver.schedule()
    assert driver.scheduler.num_pages_used == used - held
    late = [row for done in driver.executor.in_flight for row in rows(done.plan) if row[0] == 0]
    assert 1 <= len(late) <= most
    for name in list(driver.requests)[1:]:
        driver.abort(name)
    driver.run()
    driver.check()


def test_a_slot_and_pages_begin_again_while_rows_of_the_stopped_are_in_flight() -> None:
    driver = staged(num_stages=2, max_running=1, page_size=4, num_pages=4, headroom=0)
    prompt = [3, 1, 4]
    driver.submit(prompt, sampler=stop_at(prompt, 6))
    driver.submit(9, max_tokens=4)
    plans = [done.plan for done in driver.schedule()]
    while driver.requests["r0"].finish_reason is None:
        driver.commit()
        plans = [done.plan for done in driver.schedule()]
    assert [(plan.free, [one.slot for one in plan.register]) for plan in plans[:1]] == [([0], [0])]
    assert any(0 in slots(done.plan) for done in list(driver.executor.in_flight)[: -len(plans)]), "late rows before it"
    driver.run()
    driver.check()


def test_an_abort_frees_all_at_once_however_many_rows_are_in_flight() -> None:
    driver = staged(num_stages=2, max_running=2)
    names = [driver.submit(4, max_tokens=FOR_EVER) for _ in range(2)]
    for _ in range(8):
        driver.step()
    assert [driver.scheduler._jobs[name].num_uncommitted for name in names] == [2, 2]
    held = len(driver.scheduler._jobs[names[0]].pages)
    used = driver.scheduler.num_pages_used
    driver.abort(names[0])
    assert driver.scheduler.num_pages_used == used - held
    known = len(driver.requests[names[0]].tokens)
    driver.submit(5, max_tokens=6)
    for _ in range(20):
        driver.step()
    assert len(driver.requests[names[0]].tokens) == known
    driver.abort(names[1])
    driver.run()
    driver.check()


# --- pre-emption ------------------------------------------------------------------------------------------------------


def preempted(sampler: SamplerSpec | None = None, older: SamplerSpec | None = None) -> tuple[Driver, str]:
    """The older of two needs a page while tokens of the younger are in flight; returns the younger's id."""
    driver = staged(num_stages=2, page_size=4, num_pages=6, headroom=0)
    driver.submit(7, max_tokens=17, sampler=older)
    young = driver.submit([9, 2, 6, 5, 3, 5], max_tokens=17, sampler=sampler)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert (driver.scheduler._jobs[young].num_uncommitted, driver.scheduler.num_waiting) == (2, 1)
    return driver, young


def test_a_preempted_request_comes_again_when_all_its_tokens_are_known() -> None:
    driver, young = preempted()
    known = len(driver.requests[young].tokens)
    job = driver.scheduler._jobs[young]
    while job.num_uncommitted:
        assert job.slot < 0
        driver.step()
    assert len(driver.requests[young].tokens) == known + 2
    driver.run()
    lives = [one for done in driver.executor.executed for one in done.plan.register if one.num_prompt == 6]
    assert len(unpack(lives[1].tokens)) >= 6 + known + 2
    driver.check()


def test_room_alone_does_not_bring_a_preempted_request_back() -> None:
    """The older stops right after, so all pages are free while tokens of the younger are in flight."""
    driver, _ = preempted()
    known = len(driver.requests["r0"].tokens)
    driver, young = preempted(older=SamplerSpec(stop_token_ids=[driver.expected("r0").tokens[known]]))
    job = driver.scheduler._jobs[young]
    while not driver.requests["r0"].finish_reason:
        driver.commit()
    assert (driver.scheduler.num_pages_used, job.num_uncommitted) == (0, 1)
    assert driver.schedule() == []
    driver.step()
    assert driver.scheduler.num_running == 1
    driver.run()
    driver.check()


@pytest.mark.parametrize("which", [0, 1])
def test_a_stop_may_come_for_a_preempted_request(which: int) -> None:
    driver, young = preempted()
    known = len(driver.requests[young].tokens)
    tokens = driver.expected(young).tokens
    assert tokens[known + which] not in tokens[: known + which]
    driver, young = preempted(SamplerSpec(stop_token_ids=[tokens[known + which]]))
    while driver.scheduler.num_waiting:
        driver.step()
    assert driver.requests[young].finish_reason == "stop"
    assert driver.requests[young].tokens == tokens[: known + which + 1]
    driver.run()
    driver.check()


def test_an_abort_of_a_preempted_request_drops_all_its_tokens_in_flight() -> None:
    driver, young = preempted()
    driver.abort(young)
    driver.run()
    driver.check()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("run_ahead", [1, 2, 3])
@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_a_storm_loses_and_repeats_nothing(num_stages: int, run_ahead: int, chunk: int) -> None:
    driver = staged(num_stages=num_stages, run_ahead=run_ahead, chunk=chunk, page_size=4, num_pages=12, headroom=0)
    for _ in range(6):
        driver.submit(4, max_tokens=30, sampler=SamplerSpec(prompt_logprobs=0, logprobs=0))
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    finished = [event.request_id for event in driver.events if event.finish_reason]
    assert finished[0] == "r0", "the oldest never gives way"
    driver.check()


# --- nobody's tokens change -------------------------------------------------------------------------------------------


def test_prompt_logprobs_come_once_though_rows_follow_unheard() -> None:
    driver = staged(chunk=4)
    driver.submit(11, max_tokens=6, sampler=SamplerSpec(prompt_logprobs=0, logprobs=0, min_tokens=4))
    driver.run()
    assert [(len(event.tokens), len(event.prompt_logprobs)) for event in driver.events] == [(1, 10)] + [(1, 0)] * 5
    driver.check()


Happening = tuple[str, int, SamplerSpec, list[int], int | None]

HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "abort", "step", "step", "step", "advance"]),
        st.integers(0, 7),
        sampler_specs(),
        PROMPTS,
        st.sampled_from([None, 0, 1, 2, 7, 30]),
    ),
    max_size=60,
)


def tell(sizes: SchedulerConfig, happenings: list[Happening]) -> Iterator[tuple[str, list[int], str | None, bool]]:
    """Run what happens to the end; what each request got."""
    driver = Driver(sizes, stages := Stages(sizes))
    for what, number, sampler, prompt, max_tokens in happenings:
        if what == "submit":
            try:
                driver.submit(prompt, max_tokens, sampler)
            except UserError:
                continue
        elif what == "abort" and driver.requests:
            name = list(driver.requests)[number % len(driver.requests)]
            if driver.requests[name].finish_reason is None:
                driver.abort(name)
        elif what == "step":
            driver.step()
        else:
            stages.advance(number % sizes.num_stages)
    driver.run()
    driver.check()
    for name, got in driver.requests.items():
        yield name, got.tokens, got.finish_reason, got.aborted


@settings(max_examples=60, deadline=None)
@given(sizes=scheduler_configs(), run_ahead=st.integers(1, 3), happenings=HAPPENINGS)
def test_running_ahead_changes_nobodys_tokens(
    sizes: SchedulerConfig, run_ahead: int, happenings: list[Happening]
) -> None:
    sizes = replace(sizes, max_waiting=None)  # who is refused depends on who has ended by then
    alone, ahead = tell(sizes, happenings), tell(replace(sizes, run_ahead=run_ahead), happenings)
    for (name, tokens, reason, aborted), (again, others, other, stopped) in zip(alone, ahead, strict=True):
        assert name == again
        if aborted or stopped:  # an abort comes sooner or later in a request's life
            length = min(len(tokens), len(others))
            assert tokens[:length] == others[:length]
        else:
            assert (tokens, reason) == (others, other)
