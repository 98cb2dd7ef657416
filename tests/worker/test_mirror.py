"""Plans' deltas build up page tables and known tokens; a plan that contradicts them is a programmer's error."""

from __future__ import annotations

import pytest

from headrace.step import Register, SamplerSpec, StepPlan, pack
from headrace.worker.mirror import Mirror


def plan(
    plan_id: int, free: list[int] | None = None, new: dict[int, list[int]] | None = None, pages: list[int] | None = None
) -> StepPlan:
    register = [Register(slot, pack(tokens), len(tokens), SamplerSpec()) for slot, tokens in (new or {}).items()]
    return StepPlan(plan_id, b"", free or [], register, pack(pages or []))


def test_pages_are_appended_in_order_and_start_anew_with_a_life() -> None:
    mirror = Mirror(num_slots=3, max_pages=4)
    mirror.apply(plan(0, new={1: [7, 8, 9]}, pages=[1, 5, 1, 3]))
    mirror.apply(plan(4, pages=[1, 6]))
    assert mirror.page_table[1, :3].tolist() == [5, 3, 6]
    assert (mirror.known[1], mirror.num_pages[1]) == (3, 3)
    mirror.apply(plan(5, free=[1], new={1: [4], 2: [2, 2]}, pages=[2, 5, 1, 0]))
    assert mirror.page_table[1, 0] == 0 and mirror.page_table[2, 0] == 5
    assert (mirror.known[1], mirror.num_pages[1], mirror.num_pages[2]) == (1, 1, 1)


def test_contradictions_are_caught() -> None:
    mirror = Mirror(num_slots=2, max_pages=4)
    mirror.apply(plan(3, new={0: [1]}))
    with pytest.raises(AssertionError, match="after 3"):
        mirror.apply(plan(3))
    with pytest.raises(AssertionError, match="while in use"):
        mirror.apply(plan(4, new={0: [1]}))
    with pytest.raises(AssertionError, match="freed twice"):
        mirror.apply(plan(5, free=[1]))
