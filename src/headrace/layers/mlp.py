"""SwiGLU MLP, its intermediate dim spread over the tensor axis."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.activation import silu_mul
from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.linear import Linear, Part, RowLinear, shared
from headrace.spec import Int4Spec


class Mlp(nn.Module):
    """down(silu(gate x) * up x). With `reduce=False` the result is this rank's share of the sum."""

    def __init__(
        self, build: Build, intermediate: int, *, bias: bool = False, int4: Int4Spec | None = None, reduce: bool = True
    ) -> None:
        super().__init__()
        hidden, axis = build.spec.hidden, build.tensor
        parts = [shared("gate", intermediate, axis), shared("up", intermediate, axis)]
        self.gate_up = Linear(build, hidden, parts, bias=bias, int4=int4)
        self.down = RowLinear(
            build, intermediate, Part("down", hidden, range(hidden)), axis, bias=bias, int4=int4, reduce=reduce
        )

    def forward(self, x_TD: torch.Tensor, batch: Batch | None = None) -> torch.Tensor:
        y: torch.Tensor = self.down(silu_mul(self.gate_up(x_TD)))
        return y
