"""The pool of KV pages: which are free; page ids are the same on every stage."""

from __future__ import annotations


class PagePool:
    """`num_pages` pages of `page_size` token positions, ids 0..num_pages-1. The last freed is the next given."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that a request owns."""
        return self.num_pages - len(self._free)

    @property
    def num_tokens(self) -> int:
        """Token positions of the whole pool."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller knows that so many are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        """Give pages back. Plans run in order, so the very next plan may write them, whatever is still in flight."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "pages freed twice"
