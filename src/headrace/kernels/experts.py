"""The product of tokens with their experts' weights, plain or INT4: the PyTorch reference, expert by expert.

Shapes: T tokens, k experts a token, X local experts, D hidden, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.kernels.activation import silu_mul


class ExpertMatrices(Protocol):
    """Stacked matrices of the local experts."""

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's [out, in], dequantised where it is packed."""
        ...


def grouped_experts(
    x_TD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    held: range,
) -> torch.Tensor:
    """Weighted sum over the experts in `held` (global ids) that each token chose: [T, D]; zeros where none is held.

    A pad's ids are -1.
    """
    out_TD = torch.zeros_like(x_TD)
    flat_ids = ids_Tk.flatten() + 1  # pads first
    order = flat_ids.argsort(stable=True)
    pads, *counts = torch.bincount(flat_ids, minlength=held.stop + 1).tolist()
    tokens = order // ids_Tk.shape[1]
    weights = weights_Tk.flatten().index_select(0, order).to(x_TD.dtype).unsqueeze(-1)
    start = pads + sum(counts[: held.start])
    for expert in held:
        count = counts[expert]
        if not count:
            continue
        mine = slice(start, start + count)
        start += count
        inner = silu_mul(F.linear(x_TD.index_select(0, tokens[mine]), gate_up.matrix(expert - held.start, x_TD.dtype)))
        result = F.linear(inner, down.matrix(expert - held.start, x_TD.dtype))
        out_TD.index_add_(0, tokens[mine], result * weights[mine])
    return out_TD
