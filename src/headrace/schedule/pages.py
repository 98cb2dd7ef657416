"""The pool of KV pages: who holds which, and which hold something worth keeping; ids are the same on every stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """`num_pages` pages of `page_size` token positions, ids 0..num_pages-1, each held by any number of requests.

    A page that nobody holds is free. What a kept one holds can still be found: those are given away last, the one that
    was let go longest ago first, and `forget` is told. Of the others the last freed is the next given.
    """

    def __init__(self, num_pages: int, page_size: int, forget: Callable[[int], None] = lambda page: None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._forget = forget
        self._holders = [0] * num_pages
        self._keep = bytearray(num_pages)
        """Whether what a page holds can be found."""
        self._blank = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Kept pages that nobody holds, in the order in which they were let go. (To find the first entry of a plain
        dict takes longer the more were deleted before it.)"""

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Free pages whose content can be found."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages that a request holds."""
        return self.num_pages - self.num_free

    @property
    def num_tokens(self) -> int:
        """Token positions of the whole pool."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many positions."""
        return -(-num_tokens // self.page_size)

    def is_held(self, page: int) -> bool:
        """Whether a request holds it."""
        return self._holders[page] > 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages to write to; the caller knows that so many are free."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._keep[page] = 0
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Hold a page that is kept, with whoever holds it already."""
        assert self._keep[page], f"page {page} shared, and nothing is known of it"
        if not self._holders[page]:
            del self._kept[page]
        self._holders[page] += 1

    def free(self, pages: list[int]) -> None:
        """Let pages go, the last first. Plans run in order, so the very next plan may write those nobody else holds,
        whatever is still in flight.
        """
        for page in reversed(pages):
            left = self._holders[page] - 1
            assert left >= 0, f"page {page} freed twice"
            self._holders[page] = left
            if left:
                continue
            if self._keep[page]:
                self._kept[page] = None
            else:
                self._blank.append(page)

    def keep(self, page: int) -> None:
        """From now on, what this page holds can be found."""
        assert self._holders[page], f"page {page} kept, and nobody holds it"
        self._keep[page] = 1

    def forget_all(self) -> None:
        """Nothing is kept any more; who holds a page goes on holding it. `forget` is not told."""
        self._blank += reversed(self._kept)
        self._kept.clear()
        self._keep = bytearray(self.num_pages)
