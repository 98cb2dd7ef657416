"""Linear layers: one product for several checkpoint matrices, of which this rank holds some rows or columns.

Shapes: T tokens, I and O the local input and output dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headrace.kernels.linear import Product, product_of
from headrace.layers.axis import Axis
from headrace.layers.build import Build
from headrace.spec import Int4Spec
from headrace.weights.formats import dequantise
from headrace.weights.slots import Slot

WORD = 8
"""INT4 values in an int32 word."""


@dataclass(frozen=True)
class Part:
    """Some rows of a checkpoint matrix that has `out` of them."""

    name: str
    out: int
    rows: range


def whole(name: str, out: int) -> Part:
    """A matrix held whole."""
    return Part(name, out, range(out))


def shared(name: str, out: int, axis: Axis) -> Part:
    """A matrix whose rows are spread over an axis."""
    return Part(name, out, axis.share(out))


class Linear(nn.Module):
    """x_TI -> y_TO with the stacked rows of `parts`, over the input columns `columns` (all by default)."""

    def __init__(
        self,
        build: Build,
        in_features: int,
        parts: Sequence[Part],
        *,
        columns: range | None = None,
        bias: bool = False,
        int4: Int4Spec | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.columns = columns if columns is not None else range(in_features)
        self.parts = tuple(parts)
        self.int4 = int4
        self.sizes = [len(part.rows) for part in parts]
        """Output dims of each part, to split by."""
        out, width = sum(self.sizes), len(self.columns)
        self._dtype = build.dtype
        self._product: Product | None = None
        if int4 is None:
            self.weight: nn.Parameter | None = build.empty(out, width)
        else:
            self.weight = None
            self.packed = build.empty(out, width // WORD, dtype=torch.int32)
            self.scale = build.empty(out, width // int4.group_size, dtype=torch.bfloat16)
        self.bias = build.empty(out) if bias else None

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """Where the tensors of one part go, by the suffix of their checkpoint names."""
        start = 0
        for part in self.parts:
            if part.name == name:
                return self._slots(part, slice(start, start + len(part.rows)))
            start += len(part.rows)
        raise KeyError(name)

    def _slots(self, part: Part, here: slice) -> dict[str, Slot]:
        rows, columns = _slice(part.rows), _slice(self.columns)
        found: dict[str, Slot] = {}
        if self.weight is not None:
            found["weight"] = Slot(self.weight.data[here], (rows, columns), (part.out, self.in_features))
        else:
            assert self.int4 is not None
            group = self.int4.group_size
            found["weight_packed"] = Slot(
                self.packed.data[here], (rows, _divide(columns, WORD)), (part.out, self.in_features // WORD)
            )
            found["weight_scale"] = Slot(
                self.scale.data[here], (rows, _divide(columns, group)), (part.out, self.in_features // group)
            )
        if self.bias is not None:
            found["bias"] = Slot(self.bias.data[here], (rows,), (part.out,))
        return found

    def matrix(self) -> torch.Tensor:
        """The weight as [O, I], dequantised where it is stored packed."""
        if self.weight is not None:
            return self.weight
        return dequantise(self.packed, self.scale, self._dtype)

    def finalise(self) -> None:
        """Once loaded, take the form in which this device multiplies fastest."""
        if self.weight is not None:
            self._product = product_of(self.weight.data)
            if self._product.owns_weight:
                self.weight = None  # the product holds the only copy

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._product is not None:
            return self._product(x_TI, self.bias)
        return nn.functional.linear(x_TI, self.matrix(), self.bias)


class RowLinear(Linear):
    """A Linear whose input dim is spread over an axis: the partial products are summed over it, unless told not to."""

    def __init__(
        self,
        build: Build,
        in_features: int,
        part: Part,
        axis: Axis,
        *,
        bias: bool = False,
        int4: Int4Spec | None = None,
        reduce: bool = True,
    ) -> None:
        super().__init__(build, in_features, [part], columns=axis.share(in_features), bias=bias, int4=int4)
        self.axis = axis
        self.reduce = reduce
        if bias and axis.size > 1 and not reduce:
            raise AssertionError("a bias would be added once a rank")

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return super().forward(x_TI)
        if self._product is not None:
            y_TO = self._product(x_TI, None)
        else:
            y_TO = nn.functional.linear(x_TI, self.matrix())
        if self.reduce:
            y_TO = self.axis.all_reduce(y_TO)
        return y_TO if self.bias is None else y_TO + self.bias


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _divide(span: slice, by: int) -> slice:
    assert span.start % by == 0 and span.stop % by == 0, f"{span} cuts a group of {by}"
    return slice(span.start // by, span.stop // by)
