"""RMSNorm as a module: alone, or with the residual sum that precedes it."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.layers.build import Build
from headrace.weights.slots import Slot


class RMSNorm(nn.Module):
    """Over the last dim, of size `dim`."""

    def __init__(self, build: Build, dim: int, *, eps: float | None = None) -> None:
        super().__init__()
        self.weight = build.empty(dim)
        self.eps = build.spec.norm_eps if eps is None else eps

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """The weight's slot."""
        size = self.weight.shape[0]
        return {"weight": Slot(self.weight.data, (slice(0, size),), (size,))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta), x + delta)."""
        return add_rms_norm(x, delta, self.weight, self.eps)
