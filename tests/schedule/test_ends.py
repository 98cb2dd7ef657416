from __future__ import annotations

import pytest

from headrace.errors import UserError
from headrace.schedule import Request
from headrace.schedule.request import Job
from headrace.step import SamplerSpec, pack
from tests.fakes.executor import VOCAB_SIZE
from tests.schedule.driver import Driver, config


def test_stop_ids_end_a_request_and_are_part_of_it() -> None:
    stop_ids = list(range(0, VOCAB_SIZE, 3))
    driver = Driver(config())
    name = driver.submit(4, max_tokens=200, sampler=SamplerSpec(stop_token_ids=stop_ids))
    driver.run()
    got = driver.requests[name]
    assert got.finish_reason == "stop"
    assert [token in stop_ids for token in got.tokens] == [False] * (len(got.tokens) - 1) + [True]
    driver.check()


def test_min_tokens_come_before_any_stop() -> None:
    every = list(range(VOCAB_SIZE))
    driver = Driver(config())
    driver.submit(4, max_tokens=50, sampler=SamplerSpec(stop_token_ids=every[:-1], min_tokens=5))
    driver.run()
    got = driver.requests["r0"]
    assert got.tokens[:5] == [VOCAB_SIZE - 1] * 5
    assert len(got.tokens) >= 5
    driver.check()


def test_a_stop_token_before_min_tokens_ends_nothing() -> None:
    """Whatever the sampler does."""
    job = Job(Request("a", pack([1, 2]), None, SamplerSpec(min_tokens=3, stop_token_ids=[5])), limit=6, now=0.0)
    job.num_uncommitted = 4
    assert [job.take(5), job.take(5), job.take(5)] == [None, None, "stop"]
    assert job.take(6) == "length"


def test_a_request_without_max_tokens_ends_at_the_longest_length() -> None:
    driver = Driver(config(max_len=20))
    driver.submit(5)
    driver.submit(5, max_tokens=1000)
    driver.run()
    assert [len(got.tokens) for got in driver.requests.values()] == [15, 15]
    driver.check()


def test_a_request_ends_where_the_whole_pool_is_full() -> None:
    driver = Driver(config(page_size=4, num_pages=3))
    driver.submit(5)
    driver.run()
    assert len(driver.requests["r0"].tokens) == 7
    driver.check()


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = Driver(config(max_len=20))
    with pytest.raises(UserError, match="prompt: 20 tokens and one to generate do not fit in max_len 20"):
        driver.submit(20)
    with pytest.raises(UserError, match="prompt: 21 tokens do not fit in max_len 20"):
        driver.submit(21, max_tokens=0)
    driver = Driver(config(page_size=4, num_pages=3))
    with pytest.raises(UserError, match="prompt: 12 tokens and one to generate do not fit in the KV cache.* 12"):
        driver.submit(12)
    with pytest.raises(UserError, match="prompt: has no tokens"):
        driver.submit(0)
    assert not driver.scheduler.has_work


def test_the_longest_that_fit_run() -> None:
    driver = Driver(config(max_len=20))
    driver.submit(19)
    driver.submit(20, max_tokens=0)
    driver.run()
    driver.check()
    driver = Driver(config(page_size=4, num_pages=3))
    driver.submit(11)
    driver.submit(12, max_tokens=0)
    driver.run()
    driver.check()


def test_no_tokens_asked_gives_prompt_logprobs_alone() -> None:
    driver = Driver(config(chunk=4))
    driver.submit(11, max_tokens=0, sampler=SamplerSpec(prompt_logprobs=0))
    driver.submit(1, max_tokens=0, sampler=SamplerSpec(prompt_logprobs=0))
    driver.submit(3, max_tokens=0)
    driver.run()
    assert not any(done.sampled for done in driver.executor.executed)
    assert [len(got.prompt_logprobs) for got in driver.requests.values()] == [10, 0, 0]
    assert {got.finish_reason for got in driver.requests.values()} == {"length"}
    assert [got.num_events for got in driver.requests.values()] == [1, 1, 1]
    driver.check()


def test_prompt_logprobs_of_all_chunks_come_once_with_the_first_token() -> None:
    driver = Driver(config(chunk=4))
    driver.submit(11, max_tokens=3, sampler=SamplerSpec(prompt_logprobs=0, logprobs=0))
    driver.run()
    assert [(len(event.tokens), len(event.prompt_logprobs)) for event in driver.events] == [(1, 10), (1, 0), (1, 0)]
    driver.check()


def test_queued_time_is_told_once() -> None:
    driver = Driver(config(num_stages=1, max_running=1))
    driver.submit(3, max_tokens=2)
    driver.submit(3, max_tokens=2)
    driver.run()
    assert [event.queued_s for event in driver.events] == [1.0, 0.0, 2.0, 0.0]
