"""The two products of routed experts on a GPU: which kernel, for which weights and how many tokens an expert.

Shapes: T tokens, k experts a token, P = T * k pairs, X local experts, D hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels import grouped, int4_experts, int4_prefill
from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments

FEW = 8.0
"""Pairs an expert up to which INT4 weights are a stream that the products must keep up with."""


@dataclass(frozen=True)
class Stored:
    """Weights as the checkpoint stores them."""

    weight: torch.Tensor
    """[X, out, in], or packed int32 [X, out, in / 8]."""
    scale: torch.Tensor | None = None
    """bf16 [X, out, in / group] of packed ones."""


ExpertWeights = Stored | Fragments


def plain_weights(weight_XOI: torch.Tensor) -> ExpertWeights | None:
    """bf16 weights on a GPU; None where only the reference multiplies them."""
    return Stored(weight_XOI) if weight_XOI.is_cuda and weight_XOI.dtype == torch.bfloat16 else None


def int4_weights(
    packed_XOW: torch.Tensor, scale_XOG: torch.Tensor, dtype: torch.dtype, reserve: int = 0
) -> ExpertWeights | None:
    """INT4 weights for activations of `dtype` on a GPU, repacked in their own memory where the shape allows.

    reserve: see `Fragments`.
    """
    if not packed_XOW.is_cuda or dtype != torch.bfloat16:
        return None
    rows, columns = packed_XOW.shape[1], packed_XOW.shape[2] * 8
    if columns // scale_XOG.shape[2] != int4_experts.GROUP or not int4_experts.fits(rows, columns, 2):
        return Stored(packed_XOW, scale_XOG)
    return Fragments(*int4_experts.repack(packed_XOW, scale_XOG), reserve)


def block_size(pairs_each: float, gate_up: ExpertWeights, down: ExpertWeights) -> int:
    """Most pairs of a block, when an expert has `pairs_each` on average. Both products walk over the same blocks."""
    if isinstance(gate_up, Fragments) and isinstance(down, Fragments):
        return 8 if pairs_each <= FEW else int4_prefill.block_for(pairs_each, gate_up.words.device)
    return 16 if pairs_each <= 16 else 64 if pairs_each < 64 else 128


def expert_gate_up(x_TD: torch.Tensor, plan: ExpertPlan, weights: ExpertWeights) -> torch.Tensor:
    """silu(gate) * up of each planned pair: [P, I] at pair index; other rows are undefined."""
    if isinstance(weights, Fragments):
        if plan.block <= 16:
            return int4_experts.gate_up(x_TD, plan, weights)
        return int4_prefill.gate_up(x_TD, plan, weights)
    if weights.scale is not None:
        return grouped.gate_up_int4(x_TD, plan, weights.weight, weights.scale)
    return grouped.gate_up(x_TD, plan, weights.weight)


def expert_down(inner_PI: torch.Tensor, plan: ExpertPlan, weights: ExpertWeights) -> torch.Tensor:
    """Each planned pair's row times its expert's down matrix: [P, D] at pair index; other rows are undefined.

    Called right after `expert_gate_up`, with nothing launched in between.
    """
    if isinstance(weights, Fragments):
        if plan.block <= 16:
            return int4_experts.down(inner_PI, plan, weights, follows_gate_up=True)
        return int4_prefill.down(inner_PI, plan, weights)
    if weights.scale is not None:
        return grouped.down_int4(inner_PI, plan, weights.weight, weights.scale)
    return grouped.down(inner_PI, plan, weights.weight)
