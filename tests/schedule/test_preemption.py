from __future__ import annotations

import pytest

from headrace.step import SamplerSpec, unpack
from tests.schedule.driver import Driver, config


def storm(**changes: int) -> Driver:
    """Six requests that want 34 tokens of KV each, where 48 fit, admitted as if there were room to grow."""
    driver = Driver(config(**{"page_size": 4, "num_pages": 12, "headroom": 0, **changes}))
    for _ in range(6):
        driver.submit(4, max_tokens=30, sampler=SamplerSpec(prompt_logprobs=0, logprobs=0))
    return driver


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("chunk", [2, 7, 64])
@pytest.mark.parametrize("page_size", [1, 4])
def test_nothing_is_lost_or_repeated(num_stages: int, chunk: int, page_size: int) -> None:
    driver = storm(num_stages=num_stages, chunk=chunk, page_size=page_size, num_pages=48 // page_size)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    lives = sum(len(done.plan.register) for done in driver.executor.executed)
    assert lives == 6 + driver.scheduler.num_preemptions
    driver.check()


def test_the_youngest_gives_way_and_the_oldest_never() -> None:
    driver = storm()
    driver.run()
    lives = [unpack(one.tokens).tolist()[:4] for done in driver.executor.executed for one in done.plan.register]
    times = [lives.count(unpack(got.request.tokens).tolist()) for got in driver.requests.values()]
    assert times[0] == 1
    assert max(times[1:]) > 1
    finished = [event.request_id for event in driver.events if event.finish_reason]
    assert finished == sorted(finished)


def test_a_second_life_begins_with_all_tokens_so_far() -> None:
    driver = storm(num_stages=1)
    driver.run()
    lives: dict[int, int] = {}
    for done in driver.executor.executed:
        for one in done.plan.register:
            tokens = unpack(one.tokens).tolist()
            assert one.num_prompt == 4
            assert (one.sampler.prompt_logprobs is None) == (len(tokens) > 4), "already delivered"
            assert len(tokens) >= lives.get(tokens[0], 4)
            lives[tokens[0]] = len(tokens)
    assert max(lives.values()) > 4


def preempted_in_flight(sampler: SamplerSpec | None = None) -> tuple[Driver, str]:
    """The older of two needs a page while the younger's token is in flight; returns the younger's id."""
    driver = Driver(config(num_stages=2, page_size=4, num_pages=4, headroom=0))
    driver.submit(7, max_tokens=9)
    young = driver.submit(6, max_tokens=9, sampler=sampler)
    while not driver.scheduler.num_preemptions:
        driver.step()
    job = driver.scheduler._jobs[young]
    assert (job.num_uncommitted, job.pages, driver.scheduler.num_waiting) == (1, [], 1)
    return driver, young


def test_a_token_in_flight_outlives_a_preemption() -> None:
    driver, young = preempted_in_flight()
    known = len(driver.requests[young].tokens)
    driver.commit()
    driver.commit()
    assert len(driver.requests[young].tokens) == known + 1
    assert driver.scheduler.num_waiting == 1
    driver.run()
    driver.check()


def test_a_token_in_flight_may_be_the_last() -> None:
    driver, young = preempted_in_flight()
    known = len(driver.requests[young].tokens)
    last = driver.expected(young).tokens[known]
    driver, young = preempted_in_flight(SamplerSpec(stop_token_ids=[last]))
    driver.commit()
    driver.commit()
    assert driver.requests[young].finish_reason == "stop"
    assert driver.scheduler.num_waiting == 0
    driver.run()
    driver.check()


def test_an_abort_of_a_preempted_request_drops_its_token_in_flight() -> None:
    driver, young = preempted_in_flight()
    driver.abort(young)
    assert driver.scheduler.num_waiting == 0
    driver.run()
    driver.check()


def test_a_preempted_prompt_gives_its_logprobs_once() -> None:
    driver = Driver(config(num_stages=1, chunk=2, page_size=2, num_pages=12, headroom=0))
    driver.submit(3, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.submit(14, max_tokens=2, sampler=SamplerSpec(prompt_logprobs=0))
    driver.run()
    lives = [one for done in driver.executor.executed for one in done.plan.register if one.num_prompt == 14]
    assert len(unpack(lives[1].tokens)) == 14, "pre-empted before its first token"
    assert lives[1].sampler.prompt_logprobs == 0, "nothing was delivered before"
    assert [event.queued_s for event in driver.events if event.prompt_logprobs] == [1.0], "the first life's wait counts"
    driver.check()


def test_the_pipeline_recovers_from_a_storm() -> None:
    """Long outputs run the pool dry again and again; when they are gone, nothing of it is felt."""
    driver = Driver(config(num_stages=4, page_size=4, num_pages=40, headroom=0))
    for _ in range(16):
        driver.submit(4, max_tokens=60)
    driver.run(most=3000)
    assert driver.scheduler.num_preemptions > 10
    storms = driver.scheduler.num_preemptions
    first = len(driver.executor.executed)
    for _ in range(8):
        driver.submit(4, max_tokens=12)
    driver.run()
    assert driver.scheduler.num_preemptions == storms
    after = driver.executor.executed[first:]
    assert sum(done.num_tokens for done in after) == 8 * (4 + 12 - 1)
    # Four plans of two, twelve trips, as in a pipeline that never saw a storm.
    assert len(after) <= 12 * 4
    driver.check()


def test_headroom_saves_most_of_what_a_storm_recomputes() -> None:
    computed = {}
    for headroom in (0, 32):
        driver = Driver(config(num_stages=2, page_size=4, num_pages=200, headroom=headroom))
        for _ in range(40):
            driver.submit(20, max_tokens=100)
        driver.run()
        computed[headroom] = sum(done.num_tokens for done in driver.executor.executed)
    least = 40 * (20 + 100 - 1)
    assert computed[32] - least < (computed[0] - least) / 3
