"""What cannot be beaten: bytes that a decode step must read, and operations that a prompt must do, from the spec alone.

Each byte of weights is read once a step and stage, experts as uniform routing touches them; KV and activations are left
out. Nothing is charged for links.
"""

from __future__ import annotations

from headrace.errors import UserError
from headrace.mesh import Mesh, best_split, run_costs
from headrace.plan.reads import StageReads
from headrace.schedule.balance import level_sizes
from headrace.spec import MlaSpec, ModelSpec, MoeSpec


def decode_floor(spec: ModelSpec, mesh: Mesh, requests: int, bytes_per_s: float) -> float:
    """Most tokens a second at so many requests: microbatches of equal size, one a stage."""
    sizes = level_sizes(requests, min(mesh.pp, requests))
    stages = range(mesh.pp)
    reads = [StageReads.of(spec, mesh, stage) for stage in stages]
    times = {size: [one.bytes(size) / bytes_per_s for one in reads] for size in set(sizes)}
    dearest_stage = max(sum(times[size][stage] for size in sizes) for stage in stages)
    longest_trip = max(sum(times[size]) for size in sizes)
    return requests / max(dearest_stage, longest_trip)


def best_decode_floor(spec: ModelSpec, mesh: Mesh, requests: int, bytes_per_s: float) -> tuple[float, tuple[int, ...]]:
    """The same for the split that reaches most, with that split.

    How long a microbatch's trip is does not depend on the split: it is the one whose dearest stage reads least.
    """
    each = Mesh(pp=spec.num_layers, tp=mesh.tp, ep=mesh.ep, split=(1,) * spec.num_layers)
    layers = [StageReads.of(spec, each, layer) for layer in range(spec.num_layers)]
    sizes = level_sizes(requests, min(mesh.pp, requests))
    costs_SE = run_costs([sum(layer.bytes(size) for size in sizes) for layer in layers])
    split = best_split(lambda _: costs_SE, mesh.pp)
    assert split is not None
    other = Mesh(pp=mesh.pp, tp=mesh.tp, ep=mesh.ep, split=split)
    return decode_floor(spec, other, requests, bytes_per_s), split


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


def split_of(text: str) -> tuple[int, ...] | None:
    """`6,2` as a split; `auto` is None. Raises UserError."""
    if text == "auto":
        return None
    if not all(part.isdecimal() for part in text.split(",")):
        raise UserError(f"--split {text}: write auto, or layers a stage like 6,2")
    return tuple(int(part) for part in text.split(","))
