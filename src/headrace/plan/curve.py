"""From a model to what its rows cost the scheduler."""

from __future__ import annotations

from typing import Literal

from headrace.schedule.cost import CostCurve
from headrace.spec import GqaSpec, ModelSpec, MoeSpec

PRODUCTS_PER_BYTE = {"cuda": 128, "cpu": 8}
"""Multiply-adds that a device does while it reads a byte. GPUs of the last three generations have 100 to 150 (from the
makers' dense bf16 operations and bandwidths: H200 103, RTX PRO 6000 131, H100 148); of processors it is a guess at the
middle."""
LEAST_SHARE = 8
"""A chunk beside decode rows is at least one in so many of the largest: a step costs more than its weights, in launches
and messages, and a dense model's are read in the time of few tokens."""


def cost_curve(spec: ModelSpec, device: Literal["cpu", "cuda"], chunk: int) -> CostCurve:
    """Multiply-adds of a token and of a pair, over all layers: stages have their share of each."""
    token = pair = num_bytes = 0
    for layer in spec.layers:
        token += spec.layer_params(layer.index)
        num_bytes += spec.layer_bytes(layer.index)
        if isinstance(layer.mlp, MoeSpec):  # a token passes few of the routed experts
            token -= 3 * spec.hidden * layer.mlp.intermediate * (layer.mlp.num_experts - layer.mlp.top_k)
        attention = layer.attention
        if isinstance(attention, GqaSpec):
            pair += attention.num_heads * 2 * attention.head_dim
        else:
            pair += attention.num_heads * (attention.qk_dim + attention.v_dim)
    step = max(num_bytes * PRODUCTS_PER_BYTE[device], token * chunk // LEAST_SHARE)
    return CostCurve(token=token, pair=pair, step=step)
