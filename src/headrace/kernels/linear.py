"""The matrix product with a constant weight, in the form that the device at hand runs fastest.

Shapes: x_TI [T, I], weight_OI [O, I] -> [T, O].
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.kernels import few_tokens


class Product(Protocol):
    """A weight, ready to be multiplied."""

    owns_weight: bool
    """Whether the product keeps its own copy, so that the plain weight may go."""

    def __call__(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias."""
        ...


class PlainProduct:
    """The reference: the library's product on the weight as it lies."""

    owns_weight = False

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight = weight_OI

    def __call__(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x_TI, self.weight, bias)


class BlockedProduct:
    """A bf16 weight in oneDNN's blocked layout, which AMX tiles read without reordering it at every call."""

    owns_weight = True
    BATCH_HINT = 16

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight_OI, self.BATCH_HINT)

    def __call__(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.blocked, bias, "none", [], "")
        return y


class CudaProduct:
    """A bf16 weight on CUDA, as it lies: few tokens stream it through a kernel of ours, many go to the library."""

    owns_weight = False

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight = weight_OI

    def __call__(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return few_tokens.product(x_TI, self.weight, bias)


@cache
def has_amx() -> bool:
    """Whether this processor has AMX tiles for bf16, and the kernel lets us use them."""
    return bool(torch.cpu._is_amx_tile_supported())


def product_of(weight_OI: torch.Tensor) -> Product:
    """The fastest product for a weight on its device."""
    if (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and has_amx()
        and torch.backends.mkldnn.is_available()
    ):
        return BlockedProduct(weight_OI)
    if weight_OI.is_cuda and weight_OI.dtype == torch.bfloat16:
        return CudaProduct(weight_OI)
    return PlainProduct(weight_OI)


def product_float(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x W^T in float32, never rounded to the operands' type: [T, E]. For router scores."""
    if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16:
        return few_tokens.product(x_TD, weight_ED, None, torch.float32)
    return F.linear(x_TD.float(), weight_ED.float())
