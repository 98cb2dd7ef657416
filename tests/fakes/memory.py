"""KV pages without a model: what a position keeps depends on its token and on what the position before it keeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from headrace.step import pack


class Memory:
    """What is in every page. Who writes or reads names the pages of a request, in order."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        """(page, offset) to a token, and a digest of it and all tokens before it."""

    def write(self, pages: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Compute positions from `start` on, after what the pages say of the position before."""
        size = self.page_size
        assert start + len(tokens) <= len(pages) * size, "a row outside the request's pages"
        digest = self.cells[pages[(start - 1) // size], (start - 1) % size][1] if start else 0
        for i, token in enumerate(tokens, start):
            digest = zlib.crc32(token.to_bytes(4, "little"), digest)
            self.cells[pages[i // size], i % size] = (token, digest)

    def read(self, pages: Sequence[int], end: int) -> list[int]:
        """Tokens up to position `end`, each page of them written after all that stand before it."""
        size, digest = self.page_size, 0
        history: list[int] = []
        for first in range(0, end, size):
            page, count = pages[first // size], min(size, end - first)
            cells = [self.cells[page, offset] for offset in range(count)]
            tokens = [token for token, _ in cells]
            digest = zlib.crc32(pack(tokens), digest)
            assert digest == cells[-1][1], f"page {page}, at position {first}, was written for other tokens"
            history += tokens
        return history
