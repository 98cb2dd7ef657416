"""RMS normalisation, with the residual sum that precedes it.

Shapes: x [..., D], weight [D].
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim, in float32 inside."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + delta, x + delta); delta None is zero."""
    total = x if delta is None else x + delta
    return rms_norm(total, weight, eps), total
