from __future__ import annotations

import pytest

from headrace.schedule.pages import PagePool


def test_counts_and_ids() -> None:
    pool = PagePool(5, page_size=4)
    assert (pool.num_free, pool.num_used, pool.num_tokens) == (5, 0, 20)
    pages = pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (2, 3)
    assert sorted(pages + pool.allocate(2)) == [0, 1, 2, 3, 4]


def test_the_last_freed_is_the_next_given() -> None:
    pool = PagePool(5, page_size=4)
    pages = pool.allocate(3)
    pool.free(pages)
    assert pool.allocate(3) == pages


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(num_tokens: int, num_pages: int) -> None:
    assert PagePool(5, page_size=4).pages_for(num_tokens) == num_pages


def test_more_than_is_free_is_a_programmer_error() -> None:
    pool = PagePool(2, page_size=1)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)


def test_freeing_twice_is_a_programmer_error() -> None:
    pool = PagePool(2, page_size=1)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)
