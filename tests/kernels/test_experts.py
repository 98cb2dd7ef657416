"""Grouped experts, plain and INT4, against one token at a time in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.experts import grouped_experts
from headrace.weights.formats import dequantise, quantise


class Plain:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return self.weights[expert].to(dtype)


class Packed:
    def __init__(self, weights: torch.Tensor) -> None:
        self.packed, self.scale = quantise(weights, 32)

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return dequantise(self.packed[expert], self.scale[expert], dtype)


@pytest.mark.parametrize("kind", [Plain, Packed])
@pytest.mark.parametrize("held", [range(8), range(2, 5), range(7, 8)])
@pytest.mark.parametrize("tokens", [1, 33])
def test_weighted_sum_over_held_experts(kind: type[Plain | Packed], held: range, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens + held.start)
    gate_up, down = (
        kind(torch.randn(len(held), *shape, generator=generator) * 0.2) for shape in ((2 * 64, 32), (32, 64))
    )
    x = torch.randn(tokens, 32, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3, generator=generator)
    expected = torch.zeros(tokens, 32, dtype=torch.float64)
    for t in range(tokens):
        for slot, expert in enumerate(ids[t].tolist()):
            if expert in held:
                up = gate_up.matrix(expert - held.start, torch.float64) @ x[t].double()
                inner = F.silu(up[:64]) * up[64:]
                expected[t] += weights[t, slot].double() * (down.matrix(expert - held.start, torch.float64) @ inner)
    got = grouped_experts(x, weights, ids, gate_up, down, held)
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)
