"""An axis: one direction of the mesh as a layer sees it. Of size 1 it does nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.errors import PeerLost
from headrace.mesh import Place


class SmallSum(Protocol):
    """A faster way to sum over an axis what is small."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether x goes this way; the same answer on every rank."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum, in place, in the current stream's order."""


@dataclass(frozen=True)
class Axis:
    """`size` ranks that share something, of which this is `index`; collectives are among them."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    name: str = ""
    """In messages: "tensor ranks of stage 1"."""
    timeout_s: float = 60.0
    """Deadline of each collective."""
    small: SmallSum | None = None
    """Where the ranks' GPUs reach each other's memory."""

    @classmethod
    def at(
        cls,
        place: Place,
        group: dist.ProcessGroup | None,
        name: str,
        timeout_s: float = 60.0,
        small: SmallSum | None = None,
    ) -> Axis:
        """An axis at a place of the mesh."""
        return cls(place.size, place.index, group, name, timeout_s, small)

    def share(self, count: int) -> range:
        """Which of `count` equal things are held here."""
        return Place(self.size, self.index).share(count)

    def padded_share(self, count: int) -> range:
        """Like `share`, for a count that need not divide: every rank holds as many, the last ones fewer real ones."""
        each = -(-count // self.size)
        return range(min(count, self.index * each), min(count, (self.index + 1) * each))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the axis, in place."""
        if self.small is not None and self.small.fits(x):
            return self.small(x)
        if self.size > 1:
            with _named(self):
                if x.is_cuda:  # in the stream's order: nothing to wait for here, and a graph can hold it
                    dist.all_reduce(x, group=self.group)
                else:
                    _wait(dist.all_reduce(x, group=self.group, async_op=True), self.timeout_s)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """What index 0 has, on every rank, in place."""
        if self.size > 1:
            with _named(self):
                if x.is_cuda:
                    dist.broadcast(x, group=self.group, group_src=0)
                else:
                    _wait(dist.broadcast(x, group=self.group, group_src=0, async_op=True), self.timeout_s)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate over the axis along the last dim: [..., n] -> [..., size * n]."""
        if self.size == 1:
            return x
        if x.is_cuda:
            whole = x.new_empty(self.size, *x.shape)
            with _named(self):
                dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
            return whole.movedim(0, -2).flatten(-2)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _named(self):
            _wait(dist.all_gather(parts, x.contiguous(), group=self.group, async_op=True), self.timeout_s)
        return torch.cat(parts, dim=-1)


class _named:
    """Turns a collective's failure into one line that names the axis and the place on it."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            problem = library_words(error, self.axis.timeout_s)
            raise PeerLost(f"sum over the {self.axis.name}, at place {self.axis.index}: {problem}") from error


def _wait(work: dist.Work | None, timeout_s: float) -> None:
    assert work is not None
    work.wait(timedelta(seconds=timeout_s))


def library_words(error: BaseException, timeout_s: float) -> str:
    """What the communication library says, without source paths and advice; a deadline of `timeout_s` in our words."""
    text = str(error).strip()
    if "imed out" in text or "timeout" in text.lower():
        return f"nothing within {timeout_s:g} s (--timeout)"
    if not text:
        return type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", text.splitlines()[0]).split(". ")[0]
