"""RMS norm against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 64), (7, 3, 16)])
def test_norm_with_and_without_the_sum(dtype: torch.dtype, bound: float, shape: tuple[int, ...]) -> None:
    x, delta = torch.randn(shape).to(dtype) * 30, torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)

    def exact(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    def error(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.double() - expected).norm() / expected.norm())

    assert error(rms_norm(x, weight, 1e-5), exact(x)) < bound
    normed, total = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta) and error(normed, exact(total)) < bound
    normed, total = add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(total, x) and error(normed, exact(x)) < bound
