from __future__ import annotations

import pytest

from headrace.sampling import SamplingParams
from headrace.schedule import Request
from headrace.step import ROW_WIDTH, SamplerSpec, StepPlan, pack, unpack
from tests.schedule.driver import Driver, config


def rows(plan: StepPlan) -> list[list[int]]:
    """(slot, start, count, samples) of each row."""
    return unpack(plan.rows, ROW_WIDTH).tolist()


def test_one_request_from_prompt_to_last_token() -> None:
    driver = Driver(config(page_size=4))
    name = driver.submit([1, 2, 3, 4, 5], max_tokens=2)
    (prompt,) = driver.schedule()
    plan = prompt.plan
    assert (plan.plan_id, rows(plan), plan.free) == (0, [[0, 0, 5, 1]], [])
    assert [(one.slot, unpack(one.tokens).tolist(), one.num_prompt) for one in plan.register] == [
        (0, [1, 2, 3, 4, 5], 5)
    ]
    assert unpack(plan.pages, 2).tolist() == [[0, 0], [0, 1]]

    (first,) = driver.commit()
    assert (first.request_id, len(first.tokens), first.finish_reason) == (name, 1, None)
    (decode,) = driver.schedule()
    assert rows(decode.plan) == [[0, 5, 1, 1]]
    assert not decode.plan.register
    assert not decode.plan.pages

    (last,) = driver.commit()
    assert last.finish_reason == "length"
    assert not driver.scheduler.has_work
    driver.check()


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    driver = Driver(config(num_stages=3, chunk=10, page_size=1))
    driver.submit(25, max_tokens=1)
    plans = [done.plan for done in driver.schedule()]
    assert [rows(plan) for plan in plans] == [[[0, 0, 9, 0]], [[0, 9, 8, 0]], [[0, 17, 8, 1]]]
    assert driver.commit() == []
    assert driver.commit() == []
    assert len(driver.commit()) == 1


def test_no_more_plans_in_flight_than_stages_or_than_asked() -> None:
    for stages, asked, most in ((3, None, 3), (3, 1, 1), (2, 5, 5)):
        changes = {"num_stages": stages, "chunk": 10} | ({} if asked is None else {"max_in_flight": asked})
        driver = Driver(config(**changes))
        driver.submit(100)
        assert len(driver.schedule()) == most
        assert driver.scheduler.num_in_flight == most


def test_decode_rows_come_first_and_prompts_fill_the_chunk() -> None:
    driver = Driver(config(num_stages=1, chunk=16, page_size=1))
    for _ in range(4):
        driver.submit(2, max_tokens=50)
    driver.step()
    driver.submit(40, max_tokens=1)
    done = [driver.step()[0] for _ in range(4)]
    assert [(one.num_decodes, one.num_prompt_tokens) for one in done] == [(4, 10), (4, 10), (4, 10), (4, 10)]


def test_chunks_end_with_pages_where_pages_are_shared() -> None:
    for cache, ends in ((0, [9, 17, 25]), (1, [8, 16, 25])):
        driver = Driver(config(num_stages=3, chunk=10, prefix_cache=cache))
        driver.submit(25, max_tokens=1)
        plans = [rows(done.plan) for done in driver.schedule()]
        assert [start + count for ((_, start, count, _),) in plans] == ends
    driver = Driver(config(num_stages=4, chunk=2, page_size=16))  # a chunk of less than a page
    driver.submit(8, max_tokens=1)
    assert [rows(done.plan)[0][2] for done in driver.schedule()] == [2, 2, 2, 2]


def test_several_prompts_share_a_plan_and_several_are_mid_prefill() -> None:
    driver = Driver(config(num_stages=1, chunk=16))
    driver.submit(100)
    driver.submit(30)
    driver.submit(3)
    (done,) = driver.schedule()
    assert rows(done.plan) == [[0, 0, 8, 0], [1, 0, 4, 0], [2, 0, 3, 1]]


def test_a_chunk_smaller_than_the_decode_rows_bounds_them() -> None:
    driver = Driver(config(num_stages=2, chunk=1))
    for _ in range(5):
        driver.submit(3, max_tokens=6)
    driver.run()
    assert all(done.num_tokens == 1 for done in driver.executor.executed)
    driver.check()


def test_rows_that_come_back_together_are_bounded_by_the_chunk_too() -> None:
    driver = Driver(config(num_stages=1, max_in_flight=4, chunk=3))
    for _ in range(12):
        driver.submit(1, max_tokens=5)
    driver.schedule()
    for _ in range(4):
        driver.commit()
    assert driver.schedule()[0].num_decodes == 3
    driver.run()
    driver.check()


def test_a_short_prompt_passes_a_long_one_in_flight() -> None:
    driver = Driver(config(num_stages=4, chunk=512, num_pages=32_768, max_len=100_000))
    driver.submit(64_000, max_tokens=1)
    driver.schedule()
    driver.submit(200, max_tokens=1)
    # One trip for the place in the pipeline, one through it.
    for _ in range(8):
        driver.step()
    assert driver.events[0].request_id == "r1"
    assert driver.requests["r1"].finish_reason == "length"


def test_two_long_prompts_do_not_hold_a_short_one_back() -> None:
    driver = Driver(config(num_stages=2, chunk=64))
    driver.submit(1000)
    driver.submit(1000)
    driver.submit(8, max_tokens=1)
    for _ in range(5):
        driver.step()
    assert driver.requests["r2"].finish_reason == "length"


@pytest.mark.parametrize("chunk", [2, 8, 64])
def test_decodes_that_fill_the_chunk_leave_room_for_prompts(chunk: int) -> None:
    driver = Driver(config(num_stages=1, chunk=chunk, max_running=100))
    for _ in range(chunk):
        driver.submit(1, max_tokens=200)
    for _ in range(4):
        driver.step()
    driver.submit(5, max_tokens=1)
    for _ in range(12):
        driver.step()
    assert driver.requests[f"r{chunk}"].finish_reason == "length"


def test_slots_bound_admission_in_arrival_order() -> None:
    driver = Driver(config(max_running=2))
    for _ in range(4):
        driver.submit(4, max_tokens=3)
    driver.schedule()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 2)
    driver.run()
    finished = [event.request_id for event in driver.events if event.finish_reason]
    assert finished == ["r0", "r1", "r2", "r3"]
    driver.check()


def test_admission_keeps_pages_for_prompts_that_are_not_computed_yet() -> None:
    driver = Driver(config(chunk=4, page_size=4, num_pages=8, headroom=0))
    driver.submit(16, max_tokens=2)  # needs 5 pages, has 1 after the first plan
    driver.schedule()
    driver.submit(12, max_tokens=2)  # needs 4
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    driver.check()


def test_admission_keeps_room_for_the_running_to_grow() -> None:
    for headroom, num_running in ((0, 4), (4, 3), (16, 2)):
        driver = Driver(config(page_size=4, num_pages=8, headroom=headroom))
        for _ in range(4):
            driver.submit(7, max_tokens=20)
        driver.schedule()
        assert driver.scheduler.num_running == num_running


def test_slots_and_pages_of_the_ended_are_used_by_the_next_plan() -> None:
    driver = Driver(config(num_stages=1, max_running=1, page_size=4, num_pages=2, headroom=0))
    driver.submit(7, max_tokens=1)
    driver.submit(7, max_tokens=1)
    driver.schedule()
    (done,) = driver.step()
    assert done.plan.free == [0]
    assert [one.slot for one in done.plan.register] == [0]
    driver.run()
    driver.check()


def test_pages_come_back_as_soon_as_the_last_row_is_planned() -> None:
    driver = Driver(config(num_stages=2))
    driver.submit(7, max_tokens=1)
    driver.schedule()
    assert driver.scheduler.num_pages_used == 0
    assert driver.scheduler.num_running == 1


def test_no_plan_is_made_to_free_slots_alone() -> None:
    driver = Driver(config())
    driver.submit(3, max_tokens=1)
    driver.run()
    assert driver.schedule() == []
    driver.submit(3, max_tokens=1)
    (done,) = driver.schedule()
    assert done.plan.free == [0]


def test_an_abort_frees_all_pages_at_once_wherever_the_request_is() -> None:
    driver = Driver(config(num_stages=4, chunk=16, max_running=4))
    in_flight, ready, prefilling = (driver.submit(length, max_tokens=20) for length in (4, 4, 500))
    waiting = [driver.submit(4, max_tokens=20) for _ in range(3)]
    driver.step()
    driver.commit()
    for name in (prefilling, ready, waiting[-1], in_flight, waiting[0]):
        before = driver.scheduler.num_pages_used
        held = len(driver.scheduler._jobs[name].pages)
        assert driver.abort(name)
        assert driver.scheduler.num_pages_used == before - held
    assert not driver.abort(ready)
    driver.submit(9, max_tokens=5)
    driver.run()
    driver.check()


def test_results_of_an_aborted_life_do_not_reach_the_next_one_of_its_slot() -> None:
    driver = Driver(config(num_stages=2, max_running=1))
    first = driver.submit(4, max_tokens=9)
    driver.schedule()
    driver.abort(first)
    driver.submit(5, max_tokens=3)
    (done,) = driver.schedule()
    assert done.plan.free == [0]
    assert done.plan.register[0].slot == 0
    assert driver.commit() == []
    driver.run()
    driver.check()


def test_results_must_come_in_the_order_of_plans() -> None:
    driver = Driver(config(num_stages=2, chunk=8))
    driver.submit(16)
    _, second = driver.schedule()
    with pytest.raises(AssertionError, match="result of plan 1, plan 0 is due"):
        driver.scheduler.commit(second.result, 0.0)


def test_a_request_resolves_what_the_user_asked() -> None:
    sampling = SamplingParams(stop_token_ids=(7, 3), max_tokens=9, min_tokens=2, temperature=0.5, logprobs=1)
    request = Request.from_sampling("a", pack([1, 2]), sampling, eos_ids=(2, 3), seed=11)
    assert (request.num_prompt, request.max_tokens) == (2, 9)
    assert request.sampler == SamplerSpec(seed=11, temperature=0.5, logprobs=1, min_tokens=2, stop_token_ids=[2, 3, 7])
    sampling = SamplingParams(stop_token_ids=(7,), ignore_eos=True, seed=5)
    request = Request.from_sampling("a", pack([1, 2]), sampling, eos_ids=(2, 3), seed=11)
    assert (request.sampler.seed, request.sampler.stop_token_ids) == (5, [7])
