"""A step as the layers see it: tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.kernels.attention import Attention


class LayerCaches(Protocol):
    """KV storage of the local layers."""

    def layer(self, index: int) -> torch.Tensor:
        """A layer's pages, by its global index."""
        ...


@dataclass(frozen=True)
class Batch:
    """The rows of one plan, T tokens in all."""

    plan_id: int
    tokens: torch.Tensor | None
    """[T] ids, on the first stage; elsewhere the hidden states come over an edge."""
    positions: torch.Tensor
    """[T] int64."""
    slots: torch.Tensor
    """[T] int64, where each token's keys and values are kept: page id * page size + offset; -1 for a pad."""
    attention: Attention
    cache: LayerCaches
    padded: bool = False
    """Whether there may be pads: rows that fill a step up to a size that was captured, and must leave no trace."""
