"""Token embedding and language-model head, the vocabulary spread over the tensor axis.

Shapes: T tokens, V local vocabulary rows (padded so that every rank holds as many), D hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.linear import Product, product_of
from headrace.layers.build import Build
from headrace.weights.slots import Slot


class VocabMatrix(nn.Module):
    """This rank's rows of a [vocab, hidden] matrix."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.vocab_size, self.axis = build.spec.vocab_size, build.tensor
        self.rows = self.axis.padded_share(self.vocab_size)
        padded = -(-self.vocab_size // self.axis.size)
        self.weight = build.empty(padded, build.spec.hidden)
        self.weight.data[len(self.rows) :] = 0

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """The local rows."""
        hidden = self.weight.shape[1]
        source = (slice(self.rows.start, self.rows.stop), slice(0, hidden))
        return {"weight": Slot(self.weight.data[: len(self.rows)], source, (self.vocab_size, hidden))}


class Embedding(VocabMatrix):
    """ids_T -> x_TD."""

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return nn.functional.embedding(ids_T, self.weight)
        local = ids_T - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        x_TD = nn.functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self.axis.all_reduce(x_TD.masked_fill_(outside.unsqueeze(-1), 0))


class Head(nn.Module):
    """x_TD -> logits [T, vocab], whole on every rank of the axis. `tied` is the embedding that it shares, if any."""

    def __init__(self, build: Build, tied: Embedding | None = None) -> None:
        super().__init__()
        self.vocab_size, self.axis = build.spec.vocab_size, build.tensor
        self.own = VocabMatrix(build) if tied is None else None
        self._matrix = [self.own if tied is None else tied]  # in a list: not a child module, so counted once
        self._product: Product | None = None
        self.copied_bytes = 0
        """Of the product's own copy of a matrix that the embedding keeps too."""

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """The local rows, unless the embedding holds them."""
        return self.own.slots(name) if self.own is not None else {}

    def finalise(self) -> None:
        """Once loaded, take the form in which this device multiplies fastest."""
        matrix = self._matrix[0]
        assert matrix is not None
        self._product = product_of(matrix.weight.data)
        if not self._product.owns_weight:
            return
        if self.own is None:
            self.copied_bytes = matrix.weight.nbytes
        self._matrix, self.own = [], None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._product is not None:
            logits = self._product(x_TD, None)
        else:
            matrix = self._matrix[0]
            assert matrix is not None
            logits = nn.functional.linear(x_TD, matrix.weight)
        return self.axis.all_gather(logits)[..., : self.vocab_size]
