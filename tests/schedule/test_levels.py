"""Microbatches differ by one at most, within two trips of anything that disturbs them, however far plans run ahead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.executor import Executed, FakeExecutor
from tests.schedule.driver import Driver, config

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])


def live(driver: Driver) -> list[Executed]:
    """The latest plans, as many as microbatches can be live; without running ahead, those in flight."""
    num_live = min(driver.config.num_stages, driver.scheduler.num_running)
    recent = driver.executor.executed[len(driver.executor.executed) - num_live :]
    assert driver.config.run_ahead or recent == list(driver.executor.in_flight)
    return recent


def settle(driver: Driver) -> None:
    """Until no prompt is left to compute or in flight, then two trips; what has run ahead cannot move."""
    driver.schedule()
    while (
        driver.scheduler._prefilling
        or driver.scheduler._waiting
        or any(d.num_chunks for d in driver.executor.in_flight)
    ):
        driver.step()
    for _ in range(2 * driver.config.num_stages + driver.config.run_ahead):
        driver.step()


def check_level(driver: Driver) -> list[int]:
    """Sizes of the latest plans: as many as can be, level, everyone in one of them, and so they stay."""
    num_stages = driver.config.num_stages
    for _ in range(2 * num_stages):
        recent = live(driver)
        sizes = [done.num_decodes for done in recent]
        assert len(sizes) == min(num_stages, driver.scheduler.num_running)
        assert len({id(mirror) for done in recent for mirror in done.sampled}) == driver.scheduler.num_running
        assert sum(sizes) == driver.scheduler.num_running
        assert not sizes or max(sizes) - min(sizes) <= 1
        driver.step()
    return sizes


@AHEAD
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [40, 64, 1000])
def test_a_burst_of_32(num_stages: int, run_ahead: int, chunk: int) -> None:
    driver = Driver(config(num_stages=num_stages, chunk=chunk, run_ahead=run_ahead))
    for _ in range(32):
        driver.submit(10)
    settle(driver)
    assert sorted(check_level(driver)) == sorted(32 // num_stages + (i < 32 % num_stages) for i in range(num_stages))


@AHEAD
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_staggered_arrivals(num_stages: int, run_ahead: int) -> None:
    """Every request changes the level; the plans are level again two trips after each."""
    driver = Driver(config(num_stages=num_stages, run_ahead=run_ahead))
    for _ in range(3 * num_stages):
        driver.submit(5)
        settle(driver)
        check_level(driver)


@AHEAD
def test_arrivals_that_never_let_it_rest(run_ahead: int) -> None:
    """A request every third step: decode rows stay near the level even so."""
    driver = Driver(config(num_stages=4, run_ahead=run_ahead))
    for _ in range(30):
        driver.submit(5)
        for _ in range(3):
            driver.step()
    for done in driver.executor.executed[60:]:
        assert done.num_decodes <= driver.scheduler.num_running // 4 + 1


@AHEAD
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_requests_of_one_microbatch_end_together(num_stages: int, run_ahead: int) -> None:
    driver = Driver(config(num_stages=num_stages, run_ahead=run_ahead))
    for _ in range(32):
        driver.submit(10)
    settle(driver)
    owners = {id(mirror): name for name, mirror in _mirrors(driver).items()}
    for mirror in driver.executor.in_flight[-1].sampled:
        driver.abort(owners[id(mirror)])
    for _ in range(2 * num_stages):
        driver.step()
    assert sum(check_level(driver)) == 32 - 32 // num_stages


def _mirrors(driver: Driver) -> dict[str, object]:
    assert isinstance(driver.executor, FakeExecutor)
    return {name: driver.executor.slots[job.slot] for name, job in driver.scheduler._jobs.items()}


@AHEAD
def test_ends_by_length_leave_it_level(run_ahead: int) -> None:
    """Lengths are known, so rows that will not come back are not counted on."""
    driver = Driver(config(num_stages=4, run_ahead=run_ahead))
    for i in range(40):
        driver.submit(10, max_tokens=40 if i % 2 else 1000)
    settle(driver)
    while driver.scheduler.num_running > 20:
        driver.step()
    for _ in range(8):
        driver.step()
    assert sorted(check_level(driver)) == [5, 5, 5, 5]


@AHEAD
def test_fewer_requests_than_stages_go_alone(run_ahead: int) -> None:
    driver = Driver(config(num_stages=8, run_ahead=run_ahead))
    for _ in range(5):
        driver.submit(10)
    settle(driver)
    assert check_level(driver) == [1, 1, 1, 1, 1]


@AHEAD
def test_a_long_prompt_rides_along_without_tilting_the_decodes(run_ahead: int) -> None:
    driver = Driver(config(num_stages=4, chunk=64, page_size=1, run_ahead=run_ahead))
    for _ in range(32):
        driver.submit(4)
    settle(driver)
    driver.submit(2000)
    driver.step()
    for _ in range(20):
        (done,) = driver.step()
        assert done.num_decodes == 8
        assert 54 <= done.num_prompt_tokens <= 56


@settings(max_examples=60, deadline=None)
@given(
    num_stages=st.integers(1, 8),
    run_ahead=st.integers(0, 3),
    chunk=st.sampled_from([20, 64, 500]),
    rounds=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=8),
    data=st.data(),
)
def test_whatever_happened(
    num_stages: int, run_ahead: int, chunk: int, rounds: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    driver = Driver(config(num_stages=num_stages, chunk=chunk, max_running=200, run_ahead=run_ahead))
    live: list[str] = []
    for num_new, num_ended, num_steps in rounds:
        live += [driver.submit(1 + 7 * i % 30) for i in range(num_new)]
        for _ in range(min(num_ended, len(live))):
            driver.abort(live.pop(data.draw(st.integers(0, len(live) - 1))))
        for _ in range(num_steps):
            driver.step()
    while len(live) > num_stages * chunk:
        driver.abort(live.pop())
    settle(driver)
    check_level(driver)
