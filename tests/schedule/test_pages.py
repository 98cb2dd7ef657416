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


def test_a_shared_page_is_free_when_the_last_lets_it_go() -> None:
    pool = PagePool(3, page_size=1)
    (page,) = pool.allocate(1)
    pool.keep(page)
    pool.share(page)
    pool.free([page])
    assert (pool.num_free, pool.num_used, pool.num_kept, pool.is_held(page)) == (2, 1, 0, True)
    pool.free([page])
    assert (pool.num_free, pool.num_used, pool.num_kept, pool.is_held(page)) == (3, 0, 1, False)
    pool.share(page)
    assert (pool.num_free, pool.num_used, pool.num_kept) == (2, 1, 0)


def test_kept_pages_go_last_the_longest_unused_first() -> None:
    forgotten: list[int] = []
    pool = PagePool(4, page_size=1, forget=forgotten.append)
    pages = pool.allocate(4)
    for page in pages[:3]:
        pool.keep(page)
    pool.free(pages[1:3])  # the last of them first
    pool.free(pages[:1])
    pool.free(pages[3:])
    pool.share(pages[2])
    pool.free([pages[2]])
    assert pool.allocate(1) == pages[3:]
    assert forgotten == []
    assert pool.allocate(3) == [pages[1], pages[0], pages[2]] == forgotten
    pool.free(pages)
    assert pool.num_kept == 0, "what was given away is known no more"


def test_forgetting_all_leaves_owners_theirs() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.allocate(2)
    for page in pages:
        pool.keep(page)
    pool.free(pages[:1])
    pool.forget_all()
    assert (pool.num_free, pool.num_kept, pool.is_held(pages[1])) == (2, 0, True)
    pool.free(pages[1:])
    assert (pool.num_free, pool.num_kept) == (3, 0)


def test_what_is_not_known_is_not_shared() -> None:
    pool = PagePool(1, page_size=1)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.keep(0)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="nothing is known of it"):
        pool.share(page)
