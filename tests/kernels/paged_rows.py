"""Rows over pages for tests of paged attention: ragged, shuffled, poisoned wherever no row holds a position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLOTS = 8


@dataclass(frozen=True)
class Rows:
    """A step's rows as kernels see them."""

    slot: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    offset: torch.Tensor
    page_table: torch.Tensor
    held: torch.Tensor
    """[N, S] whether a row holds the position."""

    @property
    def tokens(self) -> int:
        return int(self.count.sum())

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.slot, self.start, self.count, self.offset

    @property
    def padding(self) -> torch.Tensor:
        """[T] whether the token belongs to a row of padding."""
        return (self.slot < 0).repeat_interleave(self.count.long())


def make_rows(rows: list[tuple[int, int, int]], size: int, device: str = "cpu", num_slots: int = SLOTS) -> Rows:
    """From (slot, start, count)."""
    most = max([-(-(start + count) // size) for _, start, count in rows])
    table = torch.randperm(most * num_slots).view(num_slots, most).int()
    held = torch.zeros(most * num_slots, size, dtype=torch.bool)
    for slot, start, count in rows:
        if slot >= 0:
            pos = torch.arange(start + count)
            held[table[slot].long()[pos // size], pos % size] = True
    slots, starts, counts = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    offsets = (counts.cumsum(0) - counts).int()
    return Rows(*(x.to(device) for x in (slots, starts, counts, offsets, table, held)))


def poison(cache: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The cache with NaN wherever nothing may be read."""
    cache[~rows.held] = float("nan")
    return cache


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm-wise relative error; NaN is 1e9."""
    found = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    return found if found == found else 1e9
