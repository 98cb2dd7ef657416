"""Where a checkpoint's tensor belongs, from its name alone: which layer, and which part of it or of the model."""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.spec import ModelSpec

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_PARTS = (
    ("mlp.experts.", "experts"),
    ("mlp.shared_experts.", "shared"),
    ("mlp.gate.", "router"),
    ("mlp.", "dense"),
    ("self_attn.q_norm.", "norm"),
    ("self_attn.k_norm.", "norm"),
    ("self_attn.", "attention"),
    ("input_layernorm.", "norm"),
    ("post_attention_layernorm.", "norm"),
)
"""What stands after a layer's index, by part; the first that fits."""
_ENDS = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head", "model.norm.weight": "head"}

UNUSED = ("next-token (MTP)", "vision", "unused", "unknown")
"""Parts that no rank holds."""


def layer_of(tensor: str) -> int | None:
    """The global index of the layer that a checkpoint tensor belongs to; None for embedding, head and last norm."""
    match = _LAYER.search(tensor)
    return None if match is None else int(match[1])


def places(spec: ModelSpec) -> Callable[[str], tuple[int | None, str]]:
    """A function from a tensor's name to its layer and its part (see `plan.inventory`), or one of `UNUSED`."""
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    prefix, num_layers = spec.weight_prefix, spec.num_layers
    start = f"{prefix}model.layers."

    def place(name: str) -> tuple[int | None, str]:
        if name.startswith(start):
            index, _, rest = name[len(start) :].partition(".")
            if index.isdecimal() and int(index) < num_layers:
                part = next((part for beginning, part in _PARTS if rest.startswith(beginning)), None)
                if part is not None:
                    return int(index), part
        elif name.removeprefix(prefix) in _ENDS and name.startswith(prefix):
            part = _ENDS[name.removeprefix(prefix)]
            if not (part == "head" and spec.tied and "lm_head" in name):
                return None, part
        if not any(pattern.fullmatch(name) for pattern in ignored):
            return None, "unknown"
        if name.startswith(_VISION):
            return None, "vision"
        layer = layer_of(name)
        return None, "next-token (MTP)" if layer is not None and layer >= num_layers else "unused"

    return place
