"""An axis: one direction of the mesh as a layer sees it. Of size 1 it does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.errors import PeerLost
from headrace.mesh import Place


@dataclass(frozen=True)
class Axis:
    """`size` ranks that share something, of which this is `index`; collectives are among them."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    name: str = "tensor"

    @classmethod
    def at(cls, place: Place, group: dist.ProcessGroup | None, name: str) -> Axis:
        """An axis at a place of the mesh."""
        return cls(place.size, place.index, group, name)

    def share(self, count: int) -> range:
        """Which of `count` equal things are held here."""
        return Place(self.size, self.index).share(count)

    def padded_share(self, count: int) -> range:
        """Like `share`, for a count that need not divide: every rank holds as many, the last ones fewer real ones."""
        each = -(-count // self.size)
        return range(min(count, self.index * each), min(count, (self.index + 1) * each))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the axis, in place."""
        if self.size > 1:
            with _named(self.name):
                dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate over the axis along the last dim: [..., n] -> [..., size * n]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _named(self.name):
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class _named:
    """Turns a collective's failure into one line that names the axis."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PeerLost(f"collective on the {self.name} axis failed: {first}") from error
