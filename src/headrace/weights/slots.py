"""A slot: where a checkpoint tensor, or a part of it, goes in this rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slot:
    """`dest.copy_(tensor[source])`, where `tensor` must have exactly `shape`.

    dest: any strides, on any device; its dtype is what is kept (floating tensors are cast, packed INT4 words are not).
    source: one slice a dim, contiguous (step 1).
    shape: the whole tensor's shape in the checkpoint.
    """

    dest: torch.Tensor
    source: tuple[slice, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        got = tuple(len(range(*part.indices(size))) for part, size in zip(self.source, self.shape, strict=True))
        assert got == tuple(self.dest.shape), f"slot of {tuple(self.dest.shape)} filled with {got}"
