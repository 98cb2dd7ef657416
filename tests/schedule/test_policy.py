from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule.policy import decode_quota, prompt_budget, share_budget


@given(ways=st.integers(1, 8), sizes=st.lists(st.integers(0, 40), max_size=8), num_ready=st.integers(0, 80))
def test_any_ring_is_level_after_two_trips(ways: int, sizes: list[int], num_ready: int) -> None:
    """Rows of plans in flight, as unlevel as may be, come back plan by plan and are taken as the quota says."""
    ring = sizes[:ways]
    num_decoding = num_ready + sum(ring)
    # An event: one plan comes back if any is in flight, then plans are made while the ring has room.
    for _ in range(2 * ways):
        if ring:
            num_ready += ring.pop(0)
        while len(ring) < ways and (take := decode_quota(num_decoding, num_ready, ring, ways)):
            assert take <= num_ready
            ring.append(take)
            num_ready -= take
    assert num_ready == 0
    ring = [size for size in ring if size]
    assert len(ring) == min(ways, num_decoding)
    assert not ring or max(ring) - min(ring) <= 1


def test_the_ring_of_a_field_report_is_level_after_two_trips() -> None:
    ring, num_ready, seen = [7, 2, 13, 10], 0, []
    for _ in range(8):
        num_ready += ring.pop(0)
        take = decode_quota(32, num_ready, ring, 4)
        ring.append(take)
        num_ready -= take
        seen.append(take)
    assert seen == [7, 2, 8, 8, 8, 8, 8, 8]


def test_nothing_ready_nothing_taken() -> None:
    assert decode_quota(0, 0, [0, 0], 4) == 0
    assert decode_quota(3, 0, [3], 4) == 0


@given(num_waiting=st.integers(1, 10_000), room=st.integers(1, 600))
def test_prompt_budgets_of_sibling_plans_are_the_same(num_waiting: int, room: int) -> None:
    budgets = []
    while num_waiting:
        budgets.append(prompt_budget(num_waiting, room))
        num_waiting -= budgets[-1]
    assert max(budgets) <= room
    assert max(budgets) - min(budgets) <= 1
    assert len(budgets) == -(-sum(budgets) // room)


def test_no_room_no_budget() -> None:
    assert prompt_budget(10, 0) == 0
    assert prompt_budget(0, 10) == 0


@given(budget=st.integers(1, 300), remaining=st.lists(st.integers(1, 500), min_size=1, max_size=12))
def test_a_budget_is_used_up_and_the_oldest_has_its_half(budget: int, remaining: list[int]) -> None:
    counts = share_budget(budget, remaining)
    assert sum(counts) == min(budget, sum(remaining))
    assert all(0 <= count <= most for count, most in zip(counts, remaining, strict=True))
    assert counts[0] == remaining[0] or counts[0] >= budget / 2


def test_shares() -> None:
    assert share_budget(100, [10, 20, 30]) == [10, 20, 30]
    assert share_budget(100, [60, 70, 80]) == [60, 40, 0]  # all that the oldest needs, then the shortest
    assert share_budget(100, [60, 70, 20, 20]) == [60, 0, 20, 20]
    assert share_budget(100, [5000, 7000, 20]) == [50, 30, 20]  # half for the oldest, where it needs more than all
    assert share_budget(100, [5000, 20]) == [80, 20]  # what others leave is the oldest's
    assert share_budget(1, [9, 9]) == [1, 0]
