"""Which experts a token goes to, and with what weights.

Shapes: T tokens, E experts, k chosen; logits_TE float32 -> (weights_Tk float32, ids_Tk int64).
"""

from __future__ import annotations

import torch


def route_softmax(logits_TE: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best k (Qwen3-MoE)."""
    weights, ids = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def route_sigmoid(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores; a bias and groups choose, the unbiased scores weigh (DeepSeek-V3, `noaux_tc`).

    A group's score is the sum of its two best biased scores; experts outside the best `topk_groups` are never chosen.
    """
    scores = logits_TE.sigmoid()
    choice = scores if bias_E is None else scores + bias_E
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids
