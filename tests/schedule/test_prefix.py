"""The prefix cache: what is found, what never is, who computes what is not there, and that nobody's tokens change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schedule import SchedulerConfig
from headrace.schedule.request import Job
from headrace.step import ROW_WIDTH, SamplerSpec, StepPlan, unpack
from tests.fakes.executor import Executed
from tests.schedule.driver import Driver, config
from tests.schedule.stages import Stages
from tests.schedule.tree import check_tree
from tests.strategies import PROMPTS, sampler_specs, scheduler_configs

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
"""Three pages of four tokens."""


def rows(plan: StepPlan) -> list[list[int]]:
    """(slot, start, count, samples) of each row."""
    return unpack(plan.rows, ROW_WIDTH).tolist()


def computed(driver: Driver) -> int:
    """Positions computed so far."""
    return sum(done.num_tokens for done in driver.executor.executed)


def finish(
    driver: Driver, prompt: list[int], max_tokens: int = 1, sampler: SamplerSpec | None = None
) -> list[Executed]:
    """Run a request to its end; its plans."""
    first = len(driver.executor.executed)
    driver.submit(prompt, max_tokens, sampler)
    driver.run()
    return driver.executor.executed[first:]


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_second_of_two_alike_computes_its_own_part() -> None:
    driver = Driver(config())
    finish(driver, [*PREFIX, 7, 7])
    (done,) = finish(driver, [*PREFIX, 8, 8, 8])
    assert rows(done.plan) == [[0, 12, 3, 1]]
    assert len(unpack(done.plan.register[0].tokens)) == 15, "workers get all tokens"
    assert unpack(done.plan.pages, 2).tolist() == [[0, page] for page in (0, 1, 2, 3)]
    assert [got.num_cached for got in driver.requests.values()] == [0, 12]
    assert (driver.scheduler.num_prefix_queries, driver.scheduler.num_prefix_hits) == (14 + 15, 12)
    driver.check()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    driver = Driver(config())
    finish(driver, PREFIX)
    (done,) = finish(driver, PREFIX)
    assert rows(done.plan) == [[0, 8, 4, 1]]
    (done,) = finish(driver, PREFIX, 0)
    assert rows(done.plan) == [[0, 8, 4, 0]]
    driver.check()


def test_only_whole_pages_of_the_same_tokens_after_the_same_tokens_are_found() -> None:
    driver = Driver(config())
    finish(driver, [*PREFIX, 7, 7])
    (done,) = finish(driver, [*PREFIX[:7], 0, *PREFIX[8:], 7])
    assert rows(done.plan) == [[0, 4, 9, 1]]
    (done,) = finish(driver, [*PREFIX[4:], 7])
    assert rows(done.plan) == [[0, 0, 9, 1]]
    driver.check()


def test_answers_are_found_by_the_next_turn() -> None:
    driver = Driver(config())
    finish(driver, PREFIX, 14)
    turn = [*PREFIX, *driver.requests["r0"].tokens, 1, 1]
    (done,) = finish(driver, turn)
    # The last token was never computed: 25 positions were, six pages.
    assert rows(done.plan) == [[0, 24, 4, 1]]
    assert driver.requests["r1"].num_cached == 24
    driver.check()


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_nothing_past_a_stop_is_found(run_ahead: int) -> None:
    """Whatever was computed past it."""
    sizes = config(run_ahead=run_ahead, num_stages=1, page_size=1)
    driver = Driver(sizes, Stages(sizes))
    tokens = Driver(sizes).expected_of([5, 6], 9)
    assert tokens[3] not in tokens[:3]
    finish(driver, [5, 6], 9, SamplerSpec(stop_token_ids=[tokens[3]]))
    assert driver.requests["r0"].tokens == tokens[:4]
    cached = driver.scheduler.num_pages_cached
    assert cached == 6 if run_ahead else 5, "with the stop itself, where its position was computed"
    check_tree(driver.scheduler)
    finish(driver, [5, 6, *tokens, 1], 4)
    assert driver.requests["r1"].num_cached == cached
    driver.check()


def test_an_answer_is_found_when_it_has_ended_however_it_ended() -> None:
    for aborted in (False, True):
        driver = Driver(config(num_stages=1))
        driver.submit([5, 6, 7], 30 if aborted else 13)
        for _ in range(12):
            driver.step()
        assert driver.scheduler._prefix._root.num_below == 1, "its own place, and nothing below"
        if aborted:
            driver.abort("r0")
        driver.run()
        finish(driver, [5, 6, 7, *driver.requests["r0"].tokens], 1)
        assert driver.requests["r1"].num_cached == 12
        driver.check()


# --- who computes what is not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("chunk", [8, 16, 50, 1000])
def test_a_burst_of_alike_prompts_computes_what_they_share_once(num_stages: int, run_ahead: int, chunk: int) -> None:
    sizes = config(num_stages=num_stages, run_ahead=run_ahead, chunk=chunk)
    driver = Driver(sizes, Stages(sizes))
    shared = [i % 29 for i in range(200)]
    for i in range(8):
        driver.submit([*shared, i, i], max_tokens=1)
    driver.run()
    assert computed(driver) == 200 + 8 * 2
    assert driver.scheduler.num_prefix_queries == 8 * 202
    driver.check()


def test_one_plan_holds_a_prefix_and_all_that_follow_it() -> None:
    driver = Driver(config(num_stages=1))
    for i in range(4):
        driver.submit([*PREFIX, i], max_tokens=1)
    (done,) = driver.schedule()
    assert rows(done.plan) == [[0, 0, 13, 1], [1, 12, 1, 1], [2, 12, 1, 1], [3, 12, 1, 1]]
    driver.run()
    assert [got.num_cached for got in driver.requests.values()] == [0, 12, 12, 12]
    driver.check()


def test_two_alike_go_ahead_of_each_other() -> None:
    """Each computes the part that comes next, and takes what the other did."""
    driver = Driver(config(num_stages=1, chunk=16))
    shared = [i % 29 for i in range(63)]
    driver.submit([*shared, 1])
    driver.submit([*shared, 2])
    plans = [rows(driver.step()[0].plan) for _ in range(5)]
    assert plans[:3] == [[[0, 16 * i, 8, 0], [1, 16 * i + 8, 8, 0]] for i in range(3)]
    assert plans[3:] == [[[0, 48, 16, 1]], [[0, 64, 1, 1], [1, 60, 4, 1]]]


def test_a_page_is_found_before_it_is_written() -> None:
    """By a plan that comes after the one that writes it; no stage has run either."""
    sizes = config(num_stages=2, run_ahead=2, chunk=14)
    driver = Driver(sizes, Stages(sizes))
    driver.submit([*PREFIX, 7], 1)
    driver.schedule()
    driver.submit([*PREFIX, 8], 1)
    (done,) = driver.schedule()
    assert rows(done.plan) == [[0, 12, 1, 1]]
    assert len(driver.executor.in_flight) == 2
    driver.run()
    driver.check()


def test_an_aborted_prompt_leaves_what_was_planned_of_it_and_no_more() -> None:
    driver = Driver(config(num_stages=1, chunk=9))
    driver.submit([*PREFIX, *PREFIX], 1)
    (done,) = driver.schedule()
    assert done.num_tokens == 8
    driver.abort("r0")
    plans = finish(driver, [*PREFIX, *PREFIX], 1)
    assert rows(plans[0].plan)[0][:2] == [0, 8]
    driver.check()


def test_prompts_whose_every_position_is_wanted_take_nothing_and_give_all() -> None:
    driver = Driver(config())
    finish(driver, [*PREFIX, 7])
    (done,) = finish(driver, [*PREFIX, 8, 8, 8, 8, 8], 1, SamplerSpec(prompt_logprobs=0))
    assert rows(done.plan) == [[0, 0, 17, 1]]
    (done,) = finish(driver, [*PREFIX, 8, 8, 8, 8, 9])
    assert rows(done.plan) == [[0, 16, 1, 1]]
    assert driver.scheduler.num_prefix_queries == 13 + 17
    driver.check()


def test_off_means_off() -> None:
    driver = Driver(config(prefix_cache=0))
    for _ in range(2):
        (done,) = finish(driver, [*PREFIX, 7])
        assert rows(done.plan) == [[0, 0, 13, 1]]
    scheduler = driver.scheduler
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits, scheduler.num_pages_cached) == (0, 0, 0)
    driver.check()


# --- room -------------------------------------------------------------------------------------------------------------


def test_the_longest_unused_goes_first_and_of_it_the_end() -> None:
    driver = Driver(config(num_stages=1, num_pages=8, headroom=0))
    finish(driver, PREFIX[:8])
    finish(driver, [0, *PREFIX[:8]])
    finish(driver, [*PREFIX[:8], 7])  # uses the first again
    assert driver.scheduler.num_pages_cached == 4
    finish(driver, [20] * 20)  # five pages, where four are blank
    assert [driver.scheduler._prefix._root.num_below, driver.scheduler.num_pages_cached] == [3, 3 + 5]
    (done,) = finish(driver, [0, *PREFIX[:8]])
    assert rows(done.plan) == [[0, 4, 5, 1]]
    driver.check()


def test_a_cached_page_is_as_good_as_a_free_one() -> None:
    driver = Driver(config(num_stages=1, num_pages=8, headroom=0))
    for token in range(20):
        finish(driver, [token] * 20, 12)
    assert driver.scheduler.num_preemptions == 0
    driver.check()


def test_shared_pages_let_more_requests_in() -> None:
    running = {}
    for cache in (0, 1):
        driver = Driver(config(num_stages=1, num_pages=45, headroom=0, prefix_cache=cache))
        shared = [i % 29 for i in range(40)]
        for i in range(8):
            driver.submit([*shared, i], max_tokens=12)
            driver.step()
        running[cache] = driver.scheduler.num_running
        driver.run()
        driver.check()
    assert driver.scheduler.num_preemptions == 0
    assert running[0] <= 3
    assert running[1] >= 7


def test_an_abort_frees_what_nobody_else_holds() -> None:
    driver = Driver(config(num_stages=2))
    names = [driver.submit([*PREFIX, i], max_tokens=30) for i in range(3)]
    for _ in range(4):
        driver.step()
    used = driver.scheduler.num_pages_used
    assert used == 3 + 3
    for number, name in enumerate(names, 1):
        assert driver.abort(name)
        assert driver.scheduler.num_pages_used == (used - number if number < 3 else 0)
    driver.run()
    driver.check()


def test_a_preempted_request_resumes_from_its_pages() -> None:
    driver = Driver(config(num_stages=1, page_size=4, num_pages=12, headroom=0))
    for _ in range(3):
        driver.submit(4, max_tokens=30)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    lives = [
        (len(unpack(one.tokens)), next(start for slot, start, _, _ in rows(done.plan) if slot == one.slot))
        for done in driver.executor.executed
        for one in done.plan.register
    ]
    assert all(start <= length - 1 for length, start in lives)
    assert any(start > 4 for length, start in lives), "nothing was there"
    assert all(got.num_cached == 0 for got in driver.requests.values()), "one's own pages are no hit"
    assert driver.scheduler.num_prefix_hits == 0
    driver.check()


def test_what_a_waiting_request_has_in_the_cache_is_looked_up_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(config(num_stages=1, num_pages=40, headroom=0))
    driver.submit(60, max_tokens=90)
    driver.step()
    driver.submit(60, max_tokens=60)
    driver.submit(100, max_tokens=2)
    looked_up: list[str] = []
    begin = driver.scheduler._prefix.begin

    def look_up(job: Job) -> int:
        looked_up.append(job.id)
        return begin(job)

    monkeypatch.setattr(driver.scheduler._prefix, "begin", look_up)
    driver.run()
    assert looked_up[0] == "r1"
    assert looked_up.count("r2") < len(driver.executor.executed) / 10
    driver.check()


def test_who_holds_tokens_in_a_page_of_its_own_is_found_when_the_other_is_gone() -> None:
    driver = Driver(config(num_stages=1, num_pages=12, headroom=0))
    finish(driver, [*PREFIX, 7])  # three pages that can be found, and are free
    driver.submit([*PREFIX, 8], 20, SamplerSpec(prompt_logprobs=0))  # has its own
    driver.step()
    cache = driver.scheduler._prefix
    assert driver.scheduler.num_pages_cached == 3
    finishing = driver.submit([20] * 28, 1)  # takes their room
    while driver.requests[finishing].finish_reason is None:
        driver.step()
        check_tree(driver.scheduler)
    assert len([node for node in cache._nodes.values() if node.page < 0]) > 0
    driver.run()
    (done,) = finish(driver, [*PREFIX, *driver.requests["r1"].request.tokens[12:13], 0])
    assert rows(done.plan)[0][1] == 12
    driver.check()


# --- forgetting all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_after_a_reset_nothing_from_before_is_found(run_ahead: int) -> None:
    sizes = config(num_stages=2, run_ahead=run_ahead, chunk=12)
    driver = Driver(sizes, Stages(sizes))
    finish(driver, [*PREFIX, 7])
    driver.submit([*PREFIX, 8], 30)
    driver.submit([20] * 40, 4)
    for _ in range(3):
        driver.step()
    assert driver.executor.in_flight
    driver.scheduler.reset_prefix_cache()
    check_tree(driver.scheduler)
    assert driver.scheduler.num_pages_cached == 0
    driver.run()
    assert driver.scheduler.num_pages_cached == 0, "who ran then keeps its pages to itself"
    plans = finish(driver, [*PREFIX, 7])
    assert rows(plans[0].plan)[0][:2] == [0, 0]
    (done,) = finish(driver, [*PREFIX, 9])
    assert rows(done.plan)[0][:2] == [0, 12]
    driver.check()


# --- nobody's tokens change -------------------------------------------------------------------------------------------

Arrival = tuple[list[int], SamplerSpec, int | None, int, bool]


def tell(sizes: SchedulerConfig, arrivals: list[Arrival]) -> list[tuple[list[int], str | None]]:
    """What each gets that is not aborted."""
    driver = Driver(sizes, Stages(sizes))
    room = min(sizes.max_len, sizes.num_pages * sizes.page_size)
    for prompt, sampler, max_tokens, steps, aborted in arrivals:
        name = driver.submit(prompt[: room - 1], max_tokens, sampler)
        for _ in range(steps):
            driver.step()
        if aborted and driver.requests[name].finish_reason is None:
            driver.abort(name)
    driver.run()
    driver.check()
    check_tree(driver.scheduler)
    return [(got.tokens, got.finish_reason) for got in driver.requests.values() if not got.aborted]


@settings(max_examples=80, deadline=None)
@given(
    sizes=scheduler_configs(),
    run_ahead=st.integers(0, 2),
    arrivals=st.lists(
        st.tuples(PROMPTS, sampler_specs(), st.sampled_from([None, 1, 7, 30]), st.integers(0, 5), st.booleans()),
        max_size=12,
    ),
)
def test_the_cache_changes_nobodys_tokens(sizes: SchedulerConfig, run_ahead: int, arrivals: list[Arrival]) -> None:
    lasting = [(*arrival[:4], False) for arrival in arrivals]
    sizes = replace(sizes, run_ahead=run_ahead, max_waiting=None)
    without = tell(replace(sizes, prefix_cache=False), lasting)
    assert tell(replace(sizes, prefix_cache=True), lasting) == without
    tell(replace(sizes, prefix_cache=True), arrivals)
