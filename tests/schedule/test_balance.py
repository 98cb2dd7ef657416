from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.schedule.balance import Balance, ByCost, Level, level_sizes, period, unequal_quota

targets_and_ring = st.integers(2, 6).flatmap(
    lambda ways: st.tuples(
        st.lists(st.integers(1, 60), min_size=ways, max_size=ways).map(lambda sizes: sorted(sizes, reverse=True)),
        st.lists(st.integers(0, 80), max_size=ways),
        st.integers(0, 100),
    )
)


@given(targets_and_ring)
# Halves of the large one are nearer to the small ones: no size may be taken for another's.
@example(([52, 1, 1], [26, 2, 26], 0))
@example(([60, 8, 8, 7, 7, 7], [29, 21, 21, 7, 16, 3], 4))
def test_any_ring_has_the_targets_after_two_trips(given_: tuple[list[int], list[int], int]) -> None:
    targets, ring, plan_id = given_
    num_ready = sum(targets) - sum(ring)
    if num_ready < 0:  # more is out than there is: not a state
        ring, num_ready = [], sum(targets)
    for _ in range(2 * len(targets)):
        if ring:
            num_ready += ring.pop(0)
        while len(ring) < len(targets) and num_ready:
            take = unequal_quota(targets, num_ready, plan_id)
            assert 0 < take <= num_ready
            ring.append(take)
            num_ready -= take
            plan_id += 1
    assert num_ready == 0
    assert Counter(ring) == Counter(targets)


def test_level_is_never_unequal() -> None:
    balance: Balance = Level()
    assert balance.sizes(100, 4) is None


def concave(rows: int) -> float:
    return 1.0 - 0.98**rows


@given(num=st.integers(2, 400), ways=st.integers(1, 8))
def test_equal_stages_stay_level(num: int, ways: int) -> None:
    """The longest trip sets their pace: nothing is gained by a larger microbatch."""
    assert ByCost(lambda rows: [concave(rows)] * ways).sizes(num, ways) is None


@given(num=st.integers(8, 400), heavy=st.floats(1.0, 4.0))
def test_unequal_sizes_are_all_the_rows_and_faster(num: int, heavy: float) -> None:
    def costs(rows: int) -> list[float]:
        return [heavy * concave(rows), concave(rows)]

    sizes = ByCost(costs).sizes(num, 2)
    if sizes is not None:
        assert sum(sizes) == num and sizes[0] > sizes[1] >= 1
        level = period([costs(rows) for rows in level_sizes(num, 2)])
        assert period([costs(rows) for rows in sizes]) < 0.98 * level


def test_a_stage_that_sets_the_pace_gets_unequal_microbatches() -> None:
    assert ByCost(lambda rows: [2 * concave(rows), concave(rows)]).sizes(256, 2) is not None


def test_period() -> None:
    # One microbatch: its trip. Two over two equal stages: each waits for the other. A stage twice as dear: its sum.
    assert period([[1.0, 1.0]]) == 2.0
    assert period([[1.0, 1.0], [1.0, 1.0]]) == 2.0
    assert period([[2.0, 1.0], [2.0, 1.0]]) == 4.0
    assert period([[3.0, 1.0], [1.0, 0.5]]) == 4.0
    assert period([[3.0, 2.0], [1.0, 0.5]]) == 5.0
