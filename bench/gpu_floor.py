"""What cannot be beaten: bytes that a decode step must read, and operations that a prompt must do, from the spec alone.

Each byte of weights is read once a step and stage, experts as uniform routing touches them; KV and activations are left
out. Nothing is charged for links.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from headrace.mesh import Mesh
from headrace.plan.reads import StageReads
from headrace.spec import MlaSpec, ModelSpec, MoeSpec


def decode_floor(spec: ModelSpec, mesh: Mesh, requests: int, bytes_per_s: float) -> float:
    """Most tokens a second at so many requests: microbatches of equal size, one a stage."""
    count = min(mesh.pp, requests)
    sizes = [requests // count + (i < requests % count) for i in range(count)]
    stages = range(mesh.pp)
    reads = [StageReads.of(spec, mesh, stage) for stage in stages]
    times = {size: [one.bytes(size) / bytes_per_s for one in reads] for size in set(sizes)}
    dearest_stage = max(sum(times[size][stage] for size in sizes) for stage in stages)
    longest_trip = max(sum(times[size]) for size in sizes)
    return requests / max(dearest_stage, longest_trip)


def best_decode_floor(spec: ModelSpec, mesh: Mesh, requests: int, bytes_per_s: float) -> tuple[float, tuple[int, ...]]:
    """The same for the split that reaches most, with that split."""
    best = (0.0, mesh.split)
    for cuts in itertools.combinations(range(1, spec.num_layers), mesh.pp - 1):
        ends = (0, *cuts, spec.num_layers)
        split = tuple(b - a for a, b in itertools.pairwise(ends))
        other = Mesh(pp=mesh.pp, tp=mesh.tp, ep=mesh.ep, split=split)
        best = max(best, (decode_floor(spec, other, requests, bytes_per_s), split))
    return best


def prompt_flops(spec: ModelSpec, length: int) -> float:
    """Operations of one prompt: products with the parameters a token uses, causal attention, one row of the head."""
    total = 2.0 * spec.hidden * spec.vocab_size
    for layer in spec.layers:
        active = float(spec.layer_params(layer.index))
        if isinstance(layer.mlp, MoeSpec):
            unused = layer.mlp.num_experts - layer.mlp.top_k
            active -= unused * 3 * spec.hidden * layer.mlp.intermediate
        attention = layer.attention
        if isinstance(attention, MlaSpec):
            dims = attention.num_heads * (attention.qk_dim + attention.v_dim)
        else:
            dims = attention.num_heads * 2 * attention.head_dim
        total += 2 * active * length + 2 * dims * length * (length + 1) / 2
    return total


def split_of(text: str) -> Sequence[int] | None:
    """`6,2` as a split; `auto` is None."""
    return None if text == "auto" else tuple(int(part) for part in text.split(","))
