"""The product's fast form against its reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.linear import BlockedProduct, PlainProduct, has_amx, product_of


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
@pytest.mark.parametrize("bias", [True, False])
def test_blocked_bf16_is_the_product(rows: int, bias: bool) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(200, 96).bfloat16()
    b = torch.randn(200).bfloat16() if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    got = BlockedProduct(weight)(x, b)
    assert (got.double() - expected).norm() / expected.norm() < 1e-2


def test_float32_is_left_as_it_lies() -> None:
    weight = torch.randn(8, 4)
    product = product_of(weight)
    assert isinstance(product, PlainProduct) and product.weight is weight
    assert isinstance(product_of(weight.bfloat16()), BlockedProduct if has_amx() else PlainProduct)
