"""Who goes first, who gives way, and who is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import QueueFull
from headrace.schedule import Request
from headrace.schedule.order import POLICIES, PriorityFirst, Queue
from headrace.schedule.request import Job
from headrace.step import SamplerSpec, pack, unpack
from tests.schedule.driver import Driver, config

PRIORITY = PriorityFirst()


def finished(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.events if event.finish_reason]


def job(number: int, priority: int) -> Job:
    request = Request(f"r{number}", pack([1]), 1, priority=priority)
    return Job(request, 2, 0.0, POLICIES["priority"].rank(request, number))


@given(priorities=st.lists(st.integers(-3, 3), max_size=20), data=st.data())
def test_a_queue_is_in_order_whoever_leaves(priorities: list[int], data: st.DataObject) -> None:
    queue, jobs = Queue(), [job(number, priority) for number, priority in enumerate(priorities)]
    for one in jobs:
        queue.add(one)
    gone = data.draw(st.sets(st.sampled_from(jobs))) if jobs else set()
    for one in gone:
        assert queue.remove(one)
        assert not queue.remove(one)
    left = sorted((one for one in jobs if one not in gone), key=lambda one: (one.request.priority, int(one.id[1:])))
    assert len(queue) == len(left)
    for one in left:
        assert queue.first is one
        queue.remove(one)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 0, 2])])
def test_who_waits_is_admitted_in_the_order_of_the_policy(policy: str, order: list[int]) -> None:
    driver = Driver(config(num_stages=1, max_running=1, policy=POLICIES[policy]))
    for priority in (0, -1, 0, -2):
        driver.submit(4, max_tokens=3, priority=priority)
    driver.run()
    assert finished(driver) == [f"r{number}" for number in order]
    driver.check()


def test_nobody_who_runs_is_sent_away_for_who_arrives() -> None:
    driver = Driver(config(num_stages=1, max_running=1, policy=PRIORITY))
    driver.submit(4, max_tokens=10, priority=5)
    driver.step()
    driver.submit(4, max_tokens=2, priority=-5)
    driver.run()
    assert finished(driver) == ["r0", "r1"]
    assert driver.scheduler.num_preemptions == 0


def test_the_least_important_gives_way_and_among_equals_the_youngest() -> None:
    driver = Driver(config(num_stages=1, page_size=4, num_pages=12, headroom=0, policy=PRIORITY))
    for priority in (1, 1, 0, 2):
        driver.submit(4, max_tokens=30, priority=priority)
    driver.run()
    assert finished(driver) == ["r2", "r0", "r1", "r3"]
    lives = [unpack(one.tokens)[0] for done in driver.executor.executed for one in done.plan.register]
    assert lives.count(2) == 1, "the most important never gives way"
    assert lives.count(3) > 1
    driver.check()


def test_an_important_prompt_has_its_share_before_others() -> None:
    driver = Driver(config(num_stages=1, chunk=64, page_size=1, policy=PRIORITY))
    driver.submit(1000, priority=1)
    driver.step()
    driver.submit(1000, priority=0)
    (done,) = driver.step()
    counts = dict(unpack(done.plan.rows, 4)[:, [0, 2]].tolist())
    assert counts[1] >= 32
    assert counts[0] <= 32


def test_urgent_ones_that_come_for_ever_do_not_stop_who_runs() -> None:
    driver = Driver(config(num_stages=1, page_size=4, num_pages=20, headroom=4, max_running=3, policy=PRIORITY))
    driver.submit(4, max_tokens=30, priority=1)
    for _ in range(80):
        driver.submit(4, max_tokens=2, priority=0)
        driver.step()
    assert driver.requests["r0"].finish_reason == "length"
    driver.run()
    driver.check()


# --- a queue that is full ---------------------------------------------------------------------------------------------


def test_one_too_many_is_refused_and_the_rest_go_on() -> None:
    driver = Driver(config(max_running=2, max_waiting=1))
    for _ in range(3):
        driver.submit(4, max_tokens=9)
    with pytest.raises(QueueFull, match=r"1 requests wait already, and no more may \(--max-waiting 1\)"):
        driver.submit(4, max_tokens=9)
    while not driver.requests["r0"].finish_reason:
        driver.step()
    driver.submit(4, max_tokens=9)
    driver.run()
    assert len(finished(driver)) == 4
    driver.check()


def test_who_can_start_does_not_wait_however_many_come_at_once() -> None:
    """Before a plan is made."""
    driver = Driver(config(max_running=8, max_waiting=0))
    for _ in range(8):
        driver.submit(4, max_tokens=9)
    with pytest.raises(QueueFull):
        driver.submit(4, max_tokens=9)
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (8, 0)
    driver.run()
    driver.check()


def test_who_gave_way_has_its_place_in_a_full_queue() -> None:
    driver = Driver(config(num_stages=1, page_size=4, num_pages=12, headroom=0, max_waiting=1))
    for _ in range(4):
        driver.submit(4, max_tokens=30, sampler=SamplerSpec(logprobs=0))
        driver.step()
    while driver.scheduler.num_waiting < 2:
        driver.step()
    with pytest.raises(QueueFull, match="2 requests wait"):
        driver.submit(4)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    driver.check()
